"""The clipped projected LSTM on CPUs: inference in place, and training with a hand-written backward pass.

`ELMoLSTMLayer` is the definition. For the shape suffixes, see `sequences.py`.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .lstm_loop import Arithmetic, StackedLayer, run_direction, run_groups
from .products import Packed, packed, prepared, product, suits_onednn, tanh, weight_gradient
from .sequences import LSTMOutput, LSTMWeights, Steps, Stream
from .torch_state import product_dtype

CHUNK_ROWS = 256  # rows of input gates per product: one (tokens x 4H) block would page-fault on every call
MOST_WORDS = 1024  # maximum distinct words whose input gates are kept: 64 KB each at the original size


def inference_lstm(layer: LSTMWeights, stream: Stream, hidden_SP: Tensor, cell_SH: Tensor) -> LSTMOutput:
    """CPU inference, in float or in 8 bits: in place, without gradients. Cells are float.

    The input gates of a repeated word are computed once. Each step has as few operators as possible: for one sentence,
    starting them takes as long as computing.
    """
    batch_sizes = stream.steps.batch_sizes
    most = batch_sizes[0]
    state_weight = prepared(layer.state_linear, most)
    projection = None if layer.projection is None else prepared(layer.projection, most)
    clip, ended, cell_SH = layer.cell_clip, [], cell_SH.clone()
    outputs_NP = stream.inputs.new_empty(sum(batch_sizes), hidden_SP.shape[-1])
    for plus_SG, output_SP in zip(_input_gates(layer, stream), outputs_NP.split(batch_sizes), strict=True):
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


def _input_gates(layer: LSTMWeights, stream: Stream) -> Iterator[Tensor]:
    """The input half of the gates of each step, computed for whole steps of about `CHUNK_ROWS` rows at a time."""
    weight = prepared(layer.input_linear)
    bias_G = _run_time_bias(layer.bias_G, layer.forget_bias)
    index_N: Any = stream.index_N
    are_kept = index_N is not None and len(stream.inputs) <= min(0.8 * len(index_N), MOST_WORDS)
    rows_XG = product(stream.inputs, weight, bias_G) if are_kept else stream.tokens_ND
    start, end, sizes = 0, 0, []
    batch_sizes = stream.steps.batch_sizes
    for size, following in zip(batch_sizes, [*batch_sizes[1:], CHUNK_ROWS], strict=True):
        sizes.append(size)
        end += size
        if end - start + following > CHUNK_ROWS:
            rows = slice(start, end)
            gates_CG = rows_XG[index_N[rows]] if are_kept else product(rows_XG[rows], weight, bias_G)
            yield from gates_CG.split(sizes)
            start, sizes = end, []


class CPUArithmetic(Arithmetic):
    """Products of one direction, or of each one by itself where that is faster, with oneDNN where it is faster."""

    def prepare(self, weight_KGD):
        return PreparedWeights(weight_KGD)

    def prepare_back(self, weight_KGD):
        return weight_KGD.mT if len(weight_KGD) == 1 else PreparedWeights(weight_KGD.mT)

    def multiply(self, x_KSD, weight, *, bias_KG=None, plus_KSG=None, clip=None, out_KSG=None):
        weights = weight.weight_KGD if isinstance(weight, PreparedWeights) else weight
        is_alone = len(x_KSD) == 1
        suits = suits_onednn(x_KSD.shape[1], weights[0])
        if not is_alone and not suits:
            return super().multiply(x_KSD, weights, bias_KG=bias_KG, plus_KSG=plus_KSG, clip=clip, out_KSG=out_KSG)
        if suits and isinstance(weight, PreparedWeights):
            weights = weight.layouts
        results = []
        for k, x_SD in enumerate(x_KSD):
            bias_G = None if bias_KG is None else bias_KG[k]
            plus_SG = None if plus_KSG is None else plus_KSG[k]
            results.append(product(x_SD, weights[k], bias_G, plus_NG=plus_SG, clip=clip))
        if plus_KSG is not None and results[-1] is plus_SG:
            return plus_KSG  # not a view with other strides, which no operator may write over
        result_KSG = results[0][None] if is_alone else torch.stack(results)
        return result_KSG if out_KSG is None else out_KSG.copy_(result_KSG)

    def weight_gradient(self, grad_KNG, x_KND):
        if len(grad_KNG) == 1:
            return weight_gradient(grad_KNG[0], x_KND[0])[None]
        return torch.stack([weight_gradient(grad_NG, x_ND) for grad_NG, x_ND in zip(grad_KNG, x_KND, strict=True)])


class PreparedWeights:
    """Weights of K directions, and their copies in the layout of oneDNN, which are made when they are needed."""

    def __init__(self, weight_KGD: Tensor):
        self.weight_KGD = weight_KGD

    @cached_property
    def layouts(self) -> list[Packed]:
        return [packed(weight_GD, keep=False) for weight_GD in self.weight_KGD]  # they change after every step


training_lstm = partial(run_direction, CPUArithmetic())


def threaded_layer(
    layers: Sequence[LSTMWeights], inputs_KND: Tensor, hidden_KSP: Tensor, cell_KSH: Tensor, steps: Steps
) -> LSTMOutput:
    """CPU training of both directions at once, each with half of torch's threads."""
    groups = [StackedLayer.of([layer], product_dtype(inputs_KND)) for layer in layers]
    inputs, hidden, cells = inputs_KND.split(1), hidden_KSP.split(1), cell_KSH.split(1)
    threads = torch.get_num_threads() // 2
    results = run_groups(CPUArithmetic(), groups, inputs, hidden, cells, steps, threads)
    outputs_KNP, hidden_KSP, cell_KSH = (torch.cat(parts) for parts in zip(*results, strict=True))
    return outputs_KNP, hidden_KSP, cell_KSH


def _run_time_bias(bias_G: Tensor, forget_bias: float) -> Tensor:
    """The stored bias with `forget_bias` added to the forget gate's part."""
    i, f, o, g = bias_G.chunk(4)
    return torch.cat([i, f + forget_bias, o, g])
