"""The clipped projected LSTM (Sak et al. 2014, with the bounds of Peters et al. 2018) over packed sequences.

Shape suffixes: N real tokens of a batch, time-major; C a chunk of them; S sequences, longest first; U distinct words;
D width of the input; H `lstm_hidden_size`; P `projection_size`; G = 4 H gates in the order i, f, o, g (the candidate);
K directions; L layers; B batch; T time.

Tokens are packed step by step (see `pack` in `elmo_inputs.py`): the sequences that are still running at a step are a
prefix of the state, and nothing is computed for padding.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .elmo_backends import (
    FEW_IN_TRAINING,
    FEW_MULTIPLICATIONS,
    at_once,
    can_use_threads,
    choose_backend,
    first_derivative,
    forced_backend,
    fused_obstacle,
    is_unmodified,
    needs_gradients,
    packed,
    prepared,
    product,
    product_dtype,
    tanh,
    weight_gradient,
)
from .elmo_inputs import States, TokenBatch, join_states, starting_states, token_mask
from .elmo_lstm_fused import Steps, fused_layer
from .elmo_operators import private

CHUNK_ROWS = 256  # rows of input gates per product: one (tokens x 4H) block would page-fault on every call
MOST_WORDS = 1024  # maximum distinct words whose input gates are kept: 64 KB each at the original size


class Sequences(NamedTuple):
    """Input of a layer: packed tokens, and the state at their start.

    Shape:
        inputs: `(N, D)`, a vector for each token; with `index_N`, `(U, D)`, a vector for each distinct word.
        batch_sizes: the number of sequences that are still running at each step.
        index_N: the distinct word of each token.
    """

    inputs: Tensor
    batch_sizes: list[int]
    hidden_SP: Tensor
    cell_SH: Tensor
    index_N: Tensor | None = None

    @property
    def tokens_ND(self) -> Tensor:
        return self.inputs if self.index_N is None else self.inputs[self.index_N]


LSTMOutput = tuple[Tensor, Tensor, Tensor]  # outputs_NP; hidden_SP and cell_SH after each sequence's end
Kernel = Callable[["ELMoLSTMLayer", Sequences], LSTMOutput]
LayersKernel = Callable[..., LSTMOutput]  # computes the same layer of both directions


class ELMoLSTMLayer(nn.Module):
    """One layer of one direction. The weights are in `nn.Linear` modules, so that adapters and quantizers find them.

        i, f, o, g = x_t W_ih + h_{t-1} W_hh + b
        c_t = clip(sigmoid(i) * tanh(g) + sigmoid(f + forget_bias) * c_{t-1}, cell_clip)
        h_t = clip((sigmoid(o) * tanh(c_t)) W_proj, projection_clip)

    Without a projection (`config.has_projection` is False) `h_t` is `sigmoid(o) * tanh(c_t)` itself, unclipped.
    """

    def __init__(self, config):
        super().__init__()
        inner, outer = config.lstm_hidden_size, config.projection_size
        self.input_linear = nn.Linear(outer, 4 * inner)
        self.state_linear = nn.Linear(outer, 4 * inner, bias=False)
        self.projection = nn.Linear(inner, outer, bias=False) if config.has_projection else None
        self.forget_bias = config.forget_bias
        self.cell_clip = config.cell_clip
        self.projection_clip = config.projection_clip if config.has_projection else None

    def weights(self) -> list[Tensor]:
        """Input weight, bias, state weight and, if there is one, the projection's, as they are at this call."""
        projection = [] if self.projection is None else [self.projection.weight]
        return [self.input_linear.weight, self.input_linear.bias, self.state_linear.weight, *projection]

    @torch.compiler.disable  # a traced time loop would be compiled again for every length
    def forward(self, text: Sequences) -> LSTMOutput:
        """Returns the projected state at every step, and the state after each sequence's end."""
        if not text.batch_sizes:
            return text.inputs.new_empty(0, text.hidden_SP.shape[-1]), text.hidden_SP, text.cell_SH
        return KERNELS[lstm_backend(list(self.children()), text.inputs, text.hidden_SP, text.cell_SH)](self, text)


def lstm_backend(linears: list[nn.Module], inputs: Tensor, *states: Tensor) -> str:
    """The name of the kernel for layers with these linear layers, inputs and states."""
    backend, _ = choose_backend(linears, inputs, *states)
    if (obstacle := fused_obstacle(linears, inputs, *states)) is None:
        return "fused"
    if forced_backend() == "fused":
        raise ValueError(f"The backend 'fused' was forced, but {obstacle}. Use elmo_backend('reference').")
    return backend


class ELMoLSTM(nn.Module):
    """All layers of one direction."""

    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList(ELMoLSTMLayer(config) for _ in range(config.num_hidden_layers))
        self.use_skip_connections = config.use_skip_connections
        self.dropout = config.dropout

    def forward(
        self,
        words_UP: Tensor,
        index_N: Tensor,
        batch_sizes: list[int],
        hidden_LSP: Tensor,
        cell_LSH: Tensor,
        kernel: Kernel | None = None,
    ):
        """Runs packed tokens through the layers.

        The carried state is the projected, clipped `h_t` *before* the skip connection is added.

        Args:
            words_UP: vectors of distinct words.
            index_N: the distinct word of each token.
            batch_sizes: the number of sequences that are still running at each step.
            hidden_LSP, cell_LSH: the state at the start.
            kernel: computes each layer. Default: the layers are called, and each chooses.

        Returns:
            `(outputs, hidden_LSP, cell_LSH)`, with an output `(N, P)` for each layer.
        """
        outputs, states = [], []
        for depth, layer in enumerate(cast(Iterable[ELMoLSTMLayer], self.layers)):
            inputs, index = (outputs[-1], None) if depth else (words_UP, index_N)
            if self.training and self.dropout:  # separate for each token, not for each distinct word
                inputs, index = F.dropout(inputs if depth else words_UP[index_N], self.dropout), None
            text = Sequences(inputs, batch_sizes, hidden_LSP[depth], cell_LSH[depth], index)
            output_NP, *state = layer(text) if kernel is None else kernel(layer, text)
            outputs.append(output_NP + inputs if depth and self.use_skip_connections else output_NP)
            states.append(state)
        hidden, cell = zip(*states, strict=True)
        return outputs, torch.stack(hidden), torch.stack(cell)


def reference_lstm(layer: ELMoLSTMLayer, text: Sequences) -> LSTMOutput:
    """The definition: plain PyTorch, one step at a time, differentiable, for every device and dtype."""
    _, batch_sizes, hidden_SP, cell_SH, _ = text
    gates_NG = layer.input_linear(text.tokens_ND)
    outputs, ended = [], []
    for size, running, gates_SG in zip(batch_sizes, [*batch_sizes[1:], 0], gates_NG.split(batch_sizes), strict=True):
        hidden_SP, cell_SH = reference_step(layer, gates_SG, hidden_SP[:size], cell_SH[:size])
        outputs.append(hidden_SP)
        ended.append((hidden_SP[running:], cell_SH[running:]))
    final_hidden, final_cell = zip(*reversed(ended), strict=True)
    return torch.cat(outputs), torch.cat(final_hidden), torch.cat(final_cell)


def reference_step(layer: ELMoLSTMLayer, gates_SG: Tensor, hidden_SP: Tensor, cell_SH: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the definition: the new hidden state and cell, from the input half of the gates."""
    dtype, gates_SG = gates_SG.dtype, (gates_SG + layer.state_linear(hidden_SP)).to(cell_SH.dtype)
    i, f, o, g = gates_SG.chunk(4, dim=-1)
    cell_SH = i.sigmoid() * g.tanh() + (f + layer.forget_bias).sigmoid() * cell_SH
    cell_SH = _clip(cell_SH, layer.cell_clip)
    hidden_SP = (o.sigmoid() * cell_SH.tanh()).to(dtype)
    if layer.projection is not None:
        hidden_SP = _clip(layer.projection(hidden_SP), layer.projection_clip)
    return hidden_SP, cell_SH


def inference_lstm(layer: ELMoLSTMLayer, text: Sequences) -> LSTMOutput:
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


def _input_gates(layer: ELMoLSTMLayer, text: Sequences) -> Iterator[Tensor]:
    """The input half of the gates of each step, computed for whole steps of about `CHUNK_ROWS` rows at a time."""
    weight = prepared(layer.input_linear)
    bias_G = _run_time_bias(layer.input_linear.bias, layer.forget_bias)
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


def training_lstm(layer: ELMoLSTMLayer, text: Sequences) -> LSTMOutput:
    """CPU training: with the backward pass of `BackpropagationThroughTime`. Under autocast, cells stay in float32."""
    tensors = _tensors_to_train(layer, text.tokens_ND, text.hidden_SP, text.cell_SH)
    return BackpropagationThroughTime.apply(None, text.batch_sizes, _options(layer), *tensors)


def _tensors_to_train(layer: ELMoLSTMLayer, inputs_ND: Tensor, hidden_SP: Tensor, cell_SH: Tensor) -> list:
    """The tensors that `BackpropagationThroughTime` reads, in the dtype of products; `None` for no projection."""
    dtype = product_dtype(inputs_ND)
    weights = [weight.to(dtype) for weight in layer.weights()]
    no_projection = [None] * (4 - len(weights))
    return [inputs_ND.to(dtype), *weights, *no_projection, hidden_SP.to(dtype), cell_SH]


def _options(layer: ELMoLSTMLayer) -> tuple[float, float | None, float | None]:
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
    layers: Sequence[ELMoLSTMLayer], inputs_KND: Tensor, hidden_KSP: Tensor, cell_KSH: Tensor, steps: Steps
) -> LSTMOutput:
    """`training_lstm` of both directions at once, each with half of torch's threads."""
    rows = zip(layers, inputs_KND, hidden_KSP, cell_KSH, strict=True)
    tensors = [tensor for row in rows for tensor in _tensors_to_train(*row)]
    threads = torch.get_num_threads() // 2
    found = BackpropagationThroughTime.apply(threads, steps.batch_sizes, _options(layers[0]), *tensors)
    outputs_KNP, hidden_KSP, cell_KSH = (torch.stack([found[number], found[number + 3]]) for number in range(3))
    return outputs_KNP, hidden_KSP, cell_KSH


@torch.compiler.disable  # as `ELMoModel.forward`
def run_directions(
    lstms: Sequence[ELMoLSTM], streams: Sequence[tuple[TokenBatch, Tensor]], states: States
) -> list[tuple[Any, ...]]:
    """Runs the forward and the backward LSTM, each over a batch in an order, at once where that is faster.

    Returns:
        For each direction `(outputs, hidden_BLP, cell_BLH)`: the packed output of each layer, and the state after each
        row's end.
    """
    batches = [batch for batch, _ in streams]
    rows = [batch.packing.rows_S for batch in batches]
    starts = [[state[:, :, number] for state in states] for number in range(2)]
    packed = [[start[rows_S].transpose(0, 1) for start in own] for own, rows_S in zip(starts, rows, strict=True)]
    sizes, other_sizes = (batch.packing.batch_sizes for batch in batches)
    tensors = *(batch.words_UP for batch in batches), *states
    backend = backend_of_both(lstms, *tensors) if sizes and other_sizes else None
    kernel = kernel_of_both(lstms, sizes, backend, *tensors) if sizes == other_sizes else None
    if kernel is None:
        texts = [(batch.words_UP, batch.index_N[order_N], batch.packing.batch_sizes) for batch, order_N in streams]
        each = None if backend is None else KERNELS[backend]
        calls = [partial(lstm, *text, *own, each) for lstm, text, own in zip(lstms, texts, packed, strict=True)]
        found = _run_in_threads(lstms, calls, sizes, backend, *tensors)
    else:
        inputs_KND = torch.stack([batch.words_UP[batch.index_N[order_N]] for batch, order_N in streams])
        outputs, *ends = run_both(kernel, lstms, inputs_KND, sizes, *map(torch.stack, zip(*packed, strict=True)))
        found = [([output[number] for output in outputs], *(end[number] for end in ends)) for number in range(2)]
    return [
        (outputs, *(old.index_copy(0, rows_S, new.transpose(0, 1).to(old)) for old, new in zip(own, ends, strict=True)))
        for (outputs, *ends), own, rows_S in zip(found, starts, rows, strict=True)
    ]


def run_both(kernel: LayersKernel, lstms: Sequence[ELMoLSTM], inputs_KND: Tensor, batch_sizes: list[int], *states):
    """As `ELMoLSTM.forward`, for both directions at once, whose tokens have the same batch sizes.

    Args:
        kernel: from `kernel_of_both`.
        states: `hidden_KLSP` and `cell_KLSH`, at the start.

    Returns:
        `(outputs, hidden_KLSP, cell_KLSH)`, with an output `(K, N, P)` for each layer.
    """
    outputs, ends, steps = [], [], Steps.of(batch_sizes, inputs_KND.device)
    for depth, layers in enumerate(zip(*(lstm.layers for lstm in lstms), strict=True)):
        inputs = F.dropout(outputs[-1] if depth else inputs_KND, lstms[0].dropout, lstms[0].training)
        output_KNP, *end = kernel(layers, inputs, *(state[:, depth] for state in states), steps)
        outputs.append(output_KNP + inputs if depth and lstms[0].use_skip_connections else output_KNP)
        ends.append(end)
    hidden, cell = zip(*ends, strict=True)
    return outputs, torch.stack(hidden, 1), torch.stack(cell, 1)


def backend_of_both(lstms: Sequence[ELMoLSTM], *tensors: Tensor) -> str | None:
    """The one kernel for all layers of both directions; `None` if modules were changed, so that each must be called."""
    layers = [layer for lstm in lstms for layer in lstm.layers]
    ours = all(is_unmodified(lstm, (ELMoLSTM,)) for lstm in lstms)
    if not ours or not all(is_unmodified(layer, (ELMoLSTMLayer,)) for layer in layers):
        return None
    return lstm_backend([linear for layer in layers for linear in layer.children()], *tensors)


def kernel_of_both(
    lstms: Sequence[ELMoLSTM], batch_sizes: list[int], backend: str | None, *tensors: Tensor
) -> LayersKernel | None:
    """The kernel that computes a layer of both directions; `None` if it is better to take one after the other."""
    if backend == "fused":
        return fused_layer
    if backend != "training" or not can_use_threads(tensors[0].device) or not needs_gradients(lstms, *tensors):
        return None
    return threaded_layer if _multiplications(lstms[0], batch_sizes) >= FEW_IN_TRAINING else None


def _run_in_threads(
    lstms: Sequence[ELMoLSTM],
    calls: Sequence[Callable[[], Any]],
    batch_sizes: list[int],
    backend: str | None,
    *tensors: Tensor,
) -> list[Any]:
    """The results of calls that run one direction each: without gradients at once, or on one thread for few words."""
    draws = any(lstm.training and lstm.dropout for lstm in lstms)  # from one generator, so in a fixed order
    possible = backend in ("inference", "int8", "training") and not draws and can_use_threads(tensors[0].device)
    if not possible or needs_gradients(lstms, *tensors):
        return [call() for call in calls]
    if _multiplications(lstms[0], batch_sizes) < FEW_MULTIPLICATIONS:
        return at_once([lambda: [call() for call in calls]], threads=1)[0]
    return at_once(calls, torch.get_num_threads() // 2)


def _multiplications(lstm: ELMoLSTM, batch_sizes: list[int]) -> float:
    """The mean number of multiplications in a step of a layer."""
    layer: Any = lstm.layers[0]
    weights = [linear.weight for linear in (layer.state_linear, layer.projection) if linear is not None]
    return sum(batch_sizes) / len(batch_sizes) * sum(weight.numel() for weight in weights)


def fused_lstm(layer: ELMoLSTMLayer, text: Sequences) -> LSTMOutput:
    """One direction with the kernels of `run_both`."""
    steps = Steps.of(text.batch_sizes, text.inputs.device)
    states = text.hidden_SP[None], text.cell_SH[None]
    outputs_KNP, hidden_KSP, cell_KSH = fused_layer([layer], text.tokens_ND[None], *states, steps)
    return outputs_KNP[0], hidden_KSP[0], cell_KSH[0]


def _run_time_bias(bias_G: Tensor, forget_bias: float) -> Tensor:
    """The stored bias with `forget_bias` added to the forget gate's part."""
    i, f, o, g = bias_G.chunk(4)
    return torch.cat([i, f + forget_bias, o, g])


def shifted(first_SX: Tensor, rows_NX: Tensor, batch_sizes: list[int]) -> Tensor:
    """The state before each row: `first_SX`, then the rows of the preceding step."""
    steps = rows_NX.split(batch_sizes)
    before = [first_SX[: batch_sizes[0]], *(step[:size] for step, size in zip(steps, batch_sizes[1:], strict=False))]
    return torch.cat(before)


KERNELS = {
    "reference": reference_lstm,
    "inference": inference_lstm,
    "training": training_lstm,
    "int8": inference_lstm,
    "fused": fused_lstm,
}


def _clip_gradient_(grad: Tensor, values: Tensor, bound: float | None):
    """Sets a gradient to 0 where a value reached its bound."""
    if bound is not None:
        torch.ops.aten.hardtanh_backward(grad, values, -bound, bound, grad_input=grad)


def _clip(tensor: Tensor, bound: float | None) -> Tensor:
    return tensor if bound is None else tensor.clamp(-bound, bound)


def run_in_export(
    model: Any, character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, initial_states
) -> tuple[tuple[Tensor, ...], Tensor, States | None]:
    """The layers of `ELMoModel`, the token mask and the final states, as `torch.export` traces them.

    Every step of the padded rows is computed, one after the other, without checks of values. A masked step keeps the
    state, so a mask of any pattern means what it means in `pack`, and no size of the traced program depends on a value.
    The backward direction reads the same steps from the last to the first.
    """
    if token_type_ids is not None:
        raise ValueError("`token_type_ids` cannot be exported. Leave them out, and give each text its own row.")
    if model.training:
        raise ValueError("A model in training mode cannot be exported. Call `model.eval()` before.")
    mask_BT = token_mask(model.config, character_ids, input_ids, attention_mask, None, inputs_embeds)
    if inputs_embeds is None:
        inputs_embeds = model.compute_words(model.word_ids(character_ids, input_ids).long())
    words_BTP = inputs_embeds.to(model.dtype)
    states = starting_states(model.config, initial_states, words_BTP, mask_BT.shape[0])
    starts = [[state[:, :, direction] for state in states] for direction in range(2)]
    forward, *forward_ends = _padded_lstm(model.forward_lstm, words_BTP, mask_BT, starts[0], reverse=False)
    backward, *backward_ends = _padded_lstm(model.backward_lstm, words_BTP, mask_BT, starts[1], reverse=True)
    halves = zip([words_BTP, *forward], [words_BTP, *backward], strict=True)
    hidden_states = tuple(torch.cat(pair, -1).masked_fill(~mask_BT[..., None], 0) for pair in halves)
    return hidden_states, mask_BT, join_states(forward_ends, backward_ends)


def _padded_lstm(
    lstm: ELMoLSTM, words_BTP: Tensor, mask_BT: Tensor, states: list[Tensor], reverse: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """One direction over padded rows: the output of each layer, undefined at padding, and the states at the end."""
    outputs, ends = [words_BTP], []
    for depth, layer in enumerate(cast(Iterable[ELMoLSTMLayer], lstm.layers)):
        start = [state[:, depth].contiguous() for state in states]
        gates_TBG = layer.input_linear(outputs[-1].transpose(0, 1))
        end, output_TBP = masked_scan(partial(reference_step, layer), start, gates_TBG, mask_BT, reverse)
        output_BTP = output_TBP.transpose(0, 1)
        outputs.append(output_BTP + outputs[-1] if depth and lstm.use_skip_connections else output_BTP)
        ends.append(end)
    hidden, cell = zip(*ends, strict=True)
    return outputs[1:], torch.stack(hidden, 1), torch.stack(cell, 1)


def masked_scan(
    step: Callable[..., Sequence[Tensor]],
    states: list[Tensor],
    inputs_TBX: Tensor,
    mask_BT: Tensor,
    reverse: bool,
    before: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """A loop over padded rows that `torch.export` can trace: the states at the end, and the first one after each step.

    Args:
        step: the new states for `step(input, *states)`. A masked step keeps the states.
        states: at the start, `(batch, width)`.
        reverse: whether the last step comes first.
        before: whether to return the first state before each step instead.
    """
    if (scan := private("_higher_order_ops.scan")) is None:
        raise ImportError(f"torch {torch.__version__} has no `scan`, so ELMo cannot be exported. Use another release.")

    def masked_step(old: list[Tensor], read: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        inputs_BX, is_real_B1 = read
        pairs = zip(step(inputs_BX, *old), old, strict=True)
        new = [torch.where(is_real_B1, changed, same) for changed, same in pairs]
        return new, (old if before else new)[0].clone()

    return scan(masked_step, states, [inputs_TBX, mask_BT.t()[..., None]], reverse=reverse)
