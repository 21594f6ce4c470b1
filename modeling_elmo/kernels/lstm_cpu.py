"""The clipped projected LSTM on CPUs: inference in place, and training with a hand-written backward pass.

`ELMoLSTMLayer` is the definition. For the shape suffixes, see `sequences.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from .products import packed, prepared, product, tanh, weight_gradient
from .sequences import LSTMOutput, LSTMWeights, Sequences, Steps, shifted
from .threads import at_once
from .torch_state import first_derivative, product_dtype

CHUNK_ROWS = 256  # rows of input gates per product: one (tokens x 4H) block would page-fault on every call
MOST_WORDS = 1024  # maximum distinct words whose input gates are kept: 64 KB each at the original size


def inference_lstm(layer: LSTMWeights, text: Sequences) -> LSTMOutput:
    """CPU inference, in float or in 8 bits: in place, without gradients. Cells are float.

    The input gates of a repeated word are computed once. Each step has as few operators as possible: for one sentence,
    starting them takes as long as computing.
    """
    most = text.batch_sizes[0]
    state_weight = prepared(layer.state_linear, most)
    projection = None if layer.projection is None else prepared(layer.projection, most)
    clip, ended, hidden_SP, cell_SH = layer.cell_clip, [], text.hidden_SP, text.cell_SH.clone()
    outputs_NP = text.inputs.new_empty(sum(text.batch_sizes), hidden_SP.shape[-1])
    for plus_SG, output_SP in zip(_input_gates(layer, text), outputs_NP.split(text.batch_sizes), strict=True):
        size = len(output_SP)
        if size < most:
            ended.append(hidden_SP[size:])
            hidden_SP, most = hidden_SP[:size], size
        gates_SG = product(hidden_SP, state_weight, plus_NG=plus_SG).to(cell_SH.dtype)
        i, f, o, g = gates_SG.chunk(4, dim=-1)
        g.mul_(2)
        gates_SG.sigmoid_()  # of g: tanh(g) = 2 sigmoid(2 g) - 1
        cell = cell_SH[:size].mul_(f).addcmul_(i, g, value=2).sub_(i)
        if clip is not None:
            cell.clamp_(-clip, clip)
        raw_SH = tanh(cell).mul_(o).to(outputs_NP.dtype)
        output_SP.copy_(raw_SH if projection is None else product(raw_SH, projection, clip=layer.projection_clip))
        hidden_SP = output_SP
    return outputs_NP, torch.cat([hidden_SP, *ended[::-1]]), cell_SH


def _input_gates(layer: LSTMWeights, text: Sequences) -> Iterator[Tensor]:
    """The input half of the gates of each step, computed for whole steps of about `CHUNK_ROWS` rows at a time."""
    weight = prepared(layer.input_linear)
    bias_G = _run_time_bias(layer.bias_G, layer.forget_bias)
    index_N: Any = text.index_N
    are_kept = index_N is not None and len(text.inputs) <= min(0.8 * len(index_N), MOST_WORDS)
    rows_XG = product(text.inputs, weight, bias_G) if are_kept else text.tokens_ND
    start, end, sizes = 0, 0, []
    for size, following in zip(text.batch_sizes, [*text.batch_sizes[1:], CHUNK_ROWS], strict=True):
        sizes.append(size)
        end += size
        if end - start + following > CHUNK_ROWS:
            rows = slice(start, end)
            gates_CG = rows_XG[index_N[rows]] if are_kept else product(rows_XG[rows], weight, bias_G)
            yield from gates_CG.split(sizes)
            start, sizes = end, []


def training_lstm(layer: LSTMWeights, text: Sequences) -> LSTMOutput:
    """CPU training: with the backward pass of `BackpropagationThroughTime`. Under autocast, cells stay in float32."""
    tensors = _tensors_to_train(layer, text.tokens_ND, text.hidden_SP, text.cell_SH)
    return BackpropagationThroughTime.apply(None, text.batch_sizes, _options(layer), *tensors)


def _tensors_to_train(layer: LSTMWeights, inputs_ND: Tensor, hidden_SP: Tensor, cell_SH: Tensor) -> list:
    """The tensors that `BackpropagationThroughTime` reads, in the dtype of products; `None` for no projection."""
    dtype = product_dtype(inputs_ND)
    weights = [weight.to(dtype) for weight in layer.tensors()]
    no_projection = [None] * (4 - len(weights))
    return [inputs_ND.to(dtype), *weights, *no_projection, hidden_SP.to(dtype), cell_SH]


def _options(layer: LSTMWeights) -> tuple[float, float | None, float | None]:
    return layer.forget_bias, layer.cell_clip, layer.projection_clip


class BackpropagationThroughTime(torch.autograd.Function):
    """A layer of one direction, or of both at once with `threads` each, with a hand-written backward pass.

    The gradient of each weight is one product after the loop; autograd would sum one product per step. Each step keeps
    only the values of the gates, the cell and the output.
    """

    @staticmethod
    def forward(ctx, threads, batch_sizes, options, *tensors):
        ctx.settings, ctx.directions = (threads, batch_sizes, options), len(tensors) // 7
        calls = [partial(_train_forward, batch_sizes, options, *own) for own in _by_direction(tensors, ctx.directions)]
        outputs, kept = zip(*_results(calls, threads), strict=True)
        ctx.save_for_backward(*chain.from_iterable(kept))
        return tuple(chain.from_iterable(outputs))

    @staticmethod
    @first_derivative
    def backward(ctx, *gradients):
        threads, *sizes = ctx.settings
        columns = ctx.saved_tensors, ctx.needs_input_grad[3:], gradients
        rows = zip(*(_by_direction(column, ctx.directions) for column in columns), strict=True)
        calls = [partial(_train_backward, sizes, kept, wanted, *given) for kept, wanted, given in rows]
        return None, None, None, *chain.from_iterable(_results(calls, threads))


def _results(calls: Sequence[Callable[[], Any]], threads: int) -> list[Any]:
    return at_once(calls, threads) if len(calls) > 1 else [calls[0]()]


def _by_direction(values: Sequence[Any], directions: int) -> list[Sequence[Any]]:
    size = len(values) // directions
    return [values[start : start + size] for start in range(0, len(values), size)]


def _train_forward(
    batch_sizes, options, inputs_ND, input_weight_GD, bias_G, state_weight_GP, projection_PH, hidden_SP, cell_SH
) -> tuple[LSTMOutput, tuple[Tensor | None, ...]]:
    """The output of a layer, and what `_train_backward` needs."""
    forget_bias, cell_clip, projection_clip = options
    # Weights change after every training step, so their packed copies are not kept.
    state_weight = packed(state_weight_GP, keep=False)
    projection = None if projection_PH is None else packed(projection_PH, keep=False)
    inputs_NG = product(inputs_ND, input_weight_GD, _run_time_bias(bias_G, forget_bias))
    width, exact = cell_SH.shape[1], inputs_NG.dtype == cell_SH.dtype
    values_NG = inputs_NG if exact else torch.empty_like(inputs_NG, dtype=cell_SH.dtype)
    outputs_NP = hidden_SP.new_empty(len(inputs_ND), hidden_SP.shape[1])
    cells_NH = cell_SH.new_empty(len(inputs_ND), width)
    hidden, cell, before_SH = hidden_SP.clone(), cell_SH.clone(), cell_SH
    steps = [tensor.split(batch_sizes) for tensor in (inputs_NG, values_NG, outputs_NP, cells_NH)]
    for size, plus_SG, values_SG, output_SP, kept_SH in zip(batch_sizes, *steps, strict=True):
        gates_SG = product(hidden[:size], state_weight, plus_NG=plus_SG).to(cell.dtype)
        torch.sigmoid(gates_SG[:, : 3 * width], out=values_SG[:, : 3 * width])
        tanh(gates_SG[:, 3 * width :], out=values_SG[:, 3 * width :])
        i, f, o, g = values_SG.chunk(4, dim=1)
        torch.mul(before_SH[:size], f, out=kept_SH).addcmul_(i, g)
        if cell_clip is not None:
            kept_SH.clamp_(-cell_clip, cell_clip)
        raw_SH = tanh(kept_SH).mul_(o).to(outputs_NP.dtype)
        output_SP.copy_(raw_SH if projection is None else product(raw_SH, projection, clip=projection_clip))
        hidden[:size], cell[:size], before_SH = output_SP, kept_SH, kept_SH
    weights = input_weight_GD, state_weight_GP, projection_PH
    kept = inputs_ND, *weights, hidden_SP, cell_SH, values_NG, cells_NH, outputs_NP
    return (outputs_NP, hidden, cell), kept


def _train_backward(sizes, kept, wanted, grad_outputs_NP, grad_hidden_SP, grad_cell_SH):
    """The gradients of the tensors of `_train_forward`; `None` where none is wanted."""
    inputs_ND, input_weight_GD, state_weight_GP, projection_PH, hidden_SP, cell_SH = kept[:6]
    values_NG, cells_NH, outputs_NP = kept[6:]
    batch_sizes, (_, cell_clip, projection_clip) = sizes
    aten, width = torch.ops.aten, cell_SH.shape[1]
    grad_gates_NG = torch.empty_like(values_NG, dtype=outputs_NP.dtype)
    raw_NH = torch.empty_like(cells_NH, dtype=outputs_NP.dtype)
    step_gates_SG = torch.empty_like(values_NG[: batch_sizes[0]])  # the gates' gradients of a step
    grad_hidden_SP, grad_cell_SH, grad_projected_NP = (
        gradient.clone() for gradient in (grad_hidden_SP, grad_cell_SH, grad_outputs_NP)
    )
    cells = [cell_SH, *cells_NH.split(batch_sizes)]
    for step, end in reversed([*enumerate(accumulate(batch_sizes))]):
        size = batch_sizes[step]
        rows = slice(end - size, end)
        i, f, o, g = values_NG[rows].chunk(4, dim=1)
        squashed = tanh(cells_NH[rows])
        torch.mul(o, squashed, out=raw_NH[rows])
        grad_raw = grad_projected_NP[rows].add_(grad_hidden_SP[:size])
        _clip_gradient_(grad_raw, outputs_NP[rows], projection_clip)
        if projection_PH is not None:
            grad_raw = product(grad_raw, projection_PH.t())
        grad_raw = grad_raw.to(cells_NH.dtype)
        grad_cell = grad_cell_SH[:size].add_(aten.tanh_backward(grad_raw * o, squashed))
        _clip_gradient_(grad_cell, cells_NH[rows], cell_clip)
        grad_gates = step_gates_SG[:size]
        sigmoids, (di, df, do, dg) = grad_gates[:, : 3 * width], grad_gates.chunk(4, dim=1)
        torch.mul(grad_cell, g, out=di)
        torch.mul(grad_cell, cells[step][:size], out=df)  # the cell before the step
        torch.mul(grad_raw, squashed, out=do)
        aten.sigmoid_backward(sigmoids, values_NG[rows, : 3 * width], grad_input=sigmoids)
        aten.tanh_backward(grad_cell * i, g, grad_input=dg)
        grad_cell.mul_(f)
        grad_gates = grad_gates_NG[rows].copy_(grad_gates)
        grad_hidden_SP[:size] = product(grad_gates, state_weight_GP.t())
    before_NP = shifted(hidden_SP, outputs_NP, batch_sizes)
    return (
        product(grad_gates_NG, input_weight_GD.t()) if wanted[0] else None,
        weight_gradient(grad_gates_NG, inputs_ND) if wanted[1] else None,
        grad_gates_NG.sum(0) if wanted[2] else None,
        weight_gradient(grad_gates_NG, before_NP) if wanted[3] else None,
        weight_gradient(grad_projected_NP, raw_NH) if wanted[4] else None,
        grad_hidden_SP,
        grad_cell_SH,
    )


def threaded_layer(
    layers: Sequence[LSTMWeights], inputs_KND: Tensor, hidden_KSP: Tensor, cell_KSH: Tensor, steps: Steps
) -> LSTMOutput:
    """`training_lstm` of both directions at once, each with half of torch's threads."""
    rows = zip(layers, inputs_KND, hidden_KSP, cell_KSH, strict=True)
    tensors = [tensor for row in rows for tensor in _tensors_to_train(*row)]
    threads = torch.get_num_threads() // 2
    found = BackpropagationThroughTime.apply(threads, steps.batch_sizes, _options(layers[0]), *tensors)
    outputs_KNP, hidden_KSP, cell_KSH = (torch.stack([found[number], found[number + 3]]) for number in range(3))
    return outputs_KNP, hidden_KSP, cell_KSH


def _run_time_bias(bias_G: Tensor, forget_bias: float) -> Tensor:
    """The stored bias with `forget_bias` added to the forget gate's part."""
    i, f, o, g = bias_G.chunk(4)
    return torch.cat([i, f + forget_bias, o, g])


def _clip_gradient_(grad: Tensor, values: Tensor, bound: float | None):
    """Sets a gradient to 0 where a value reached its bound."""
    if bound is not None:
        torch.ops.aten.hardtanh_backward(grad, values, -bound, bound, grad_input=grad)
