"""The clipped projected LSTM (Sak et al. 2014, with the bounds of Peters et al. 2018) over packed sequences.

Shape suffixes: N real tokens of a batch, time-major; S sequences, longest first; D width of the input;
H `lstm_hidden_size`; P `projection_size`; G = 4 H gates in the order i, f, o, g (g: the candidate).

Packing (`pack`) lays the real tokens out step by step, so that the sequences still running at a step are a prefix of
the state: nothing is ever computed for padding. A backward pass is a left-to-right pass over reversed sequences.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

CHUNK_ROWS = 256  # rows of input gates computed at a time: one (tokens x 4H) block would page-fault on every call


class Packing(NamedTuple):
    """How the real tokens of a batch are visited; made by `pack`.

    Shape:
        positions_N: flat position in (batch * time) of each real token, in reading order.
        forward_N, backward_N: which real token each packed row holds, for a left-to-right and a right-to-left pass.
        rows_S: the batch row of each sequence.
        batch_sizes: the number of sequences still running at each step.
    """

    positions_N: Tensor
    forward_N: Tensor
    backward_N: Tensor
    rows_S: Tensor
    batch_sizes: list[int]


def pack(mask_BT: Tensor, token_type_ids_BT: Tensor | None = None) -> Packing:
    """Finds the sequences of a batch: the unmasked positions of a row, cut where the token type changes.

    Args:
        mask_BT: `(batch, time)`, nonzero at real tokens, which may stand anywhere.
        token_type_ids_BT: `(batch, time)`; two texts in one row are two sequences.
    """
    rows_N, columns_N = mask_BT.nonzero(as_tuple=True)
    labels_N = rows_N if token_type_ids_BT is None else torch.stack([rows_N, token_type_ids_BT[rows_N, columns_N]])
    _, sequences_N, lengths_S = torch.unique_consecutive(labels_N, dim=-1, return_inverse=True, return_counts=True)
    order_S = lengths_S.argsort(descending=True, stable=True)
    starts_S = lengths_S.cumsum(0) - lengths_S
    ranks_N = order_S.argsort()[sequences_N]
    steps_N = torch.arange(len(rows_N), device=rows_N.device) - starts_S[sequences_N]
    reverse_steps_N = lengths_S[sequences_N] - 1 - steps_N
    return Packing(
        positions_N=rows_N * mask_BT.shape[1] + columns_N,
        forward_N=(steps_N * len(lengths_S) + ranks_N).argsort(),
        backward_N=(reverse_steps_N * len(lengths_S) + ranks_N).argsort(),
        rows_S=rows_N[starts_S[order_S]],
        batch_sizes=steps_N.bincount().tolist(),
    )


class ELMoLSTMLayer(nn.Module):
    """One layer of one direction. The weights sit in `nn.Linear` modules, so that adapters and quantizers find them.

        i, f, o, g = x_t W_ih + h_{t-1} W_hh + b
        c_t = clip(sigmoid(i) * tanh(g) + sigmoid(f + forget_bias) * c_{t-1}, cell_clip)
        h_t = clip((sigmoid(o) * tanh(c_t)) W_proj, projection_clip)

    Without a projection (`lstm_hidden_size == projection_size`) `h_t` is `sigmoid(o) * tanh(c_t)` itself, unclipped.
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

    @torch.compiler.disable  # a traced time loop would be compiled again for every length
    def forward(self, inputs_ND: Tensor, batch_sizes: list[int], hidden_SP: Tensor, cell_SH: Tensor):
        """Runs packed sequences from the given state.

        Returns:
            `(outputs_NP, hidden_SP, cell_SH)`: every step's projected state, and the state after each sequence's end.
        """
        if not batch_sizes:
            return inputs_ND.new_empty(0, hidden_SP.shape[-1]), hidden_SP, cell_SH
        backend, _ = choose_backend(self, inputs_ND, hidden_SP, cell_SH)
        return BACKENDS[backend](self, inputs_ND, batch_sizes, hidden_SP, cell_SH)


class ELMoLSTM(nn.Module):
    """All layers of one direction."""

    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList(ELMoLSTMLayer(config) for _ in range(config.num_hidden_layers))
        self.use_skip_connections = config.use_skip_connections
        self.dropout = config.dropout

    def forward(self, tokens_NP: Tensor, batch_sizes: list[int], hidden_LSP: Tensor, cell_LSH: Tensor):
        """Runs packed token vectors through the layers.

        The carried state is the projected, clipped `h_t` *before* the skip connection is added.

        Returns:
            `(outputs, hidden_LSP, cell_LSH)` with one `(N, P)` output for each layer.
        """
        outputs, states = [], []
        for depth, layer in enumerate(self.layers):
            inputs_NP = F.dropout(outputs[-1] if depth else tokens_NP, self.dropout, self.training)
            output_NP, *state = layer(inputs_NP, batch_sizes, hidden_LSP[depth], cell_LSH[depth])
            outputs.append(output_NP + inputs_NP if depth and self.use_skip_connections else output_NP)
            states.append(state)
        hidden, cell = zip(*states, strict=True)
        return outputs, torch.stack(hidden), torch.stack(cell)


def reference_lstm(layer: ELMoLSTMLayer, inputs_ND: Tensor, batch_sizes: list[int], hidden_SP: Tensor, cell_SH: Tensor):
    """The definition: plain PyTorch, one step at a time, differentiable, on every device and dtype."""
    gates_NG = layer.input_linear(inputs_ND)
    outputs, ended = [], []
    for size, running, gates_SG in _steps(batch_sizes, gates_NG):
        gates_SG = (gates_SG + layer.state_linear(hidden_SP[:size])).to(cell_SH.dtype)
        i, f, o, g = gates_SG.chunk(4, dim=-1)
        cell_SH = i.sigmoid() * g.tanh() + (f + layer.forget_bias).sigmoid() * cell_SH[:size]
        cell_SH = _clip(cell_SH, layer.cell_clip)
        hidden_SP = (o.sigmoid() * cell_SH.tanh()).to(gates_NG.dtype)
        if layer.projection is not None:
            hidden_SP = _clip(layer.projection(hidden_SP), layer.projection_clip)
        outputs.append(hidden_SP)
        ended.append((hidden_SP[running:], cell_SH[running:]))
    final_hidden, final_cell = zip(*reversed(ended), strict=True)
    return torch.cat(outputs), torch.cat(final_hidden), torch.cat(final_cell)


def onednn_lstm(layer: ELMoLSTMLayer, inputs_ND: Tensor, batch_sizes: list[int], hidden_SP: Tensor, cell_SH: Tensor):
    """The same on packed oneDNN weights, in place: CPU inference. `F.linear` takes a slow path on many CPUs."""
    ops = torch.ops.mkldnn
    input_weight, state_weight = _packed(layer.input_linear.weight), _packed(layer.state_linear.weight)
    projection = None if layer.projection is None else _packed(layer.projection.weight)
    clip = [] if layer.projection_clip is None else [-layer.projection_clip, layer.projection_clip]
    forget = layer.input_linear.bias.chunk(4)[1]
    bias_G = layer.input_linear.bias.clone()
    bias_G.chunk(4)[1].copy_(forget + layer.forget_bias)
    hidden_SP, cell_SH = hidden_SP.clone(), cell_SH.clone()
    outputs_NP = inputs_ND.new_empty(len(inputs_ND), hidden_SP.shape[-1])
    for sizes, inputs_CD, outputs_CP in _chunks(batch_sizes, inputs_ND, outputs_NP):
        gates_CG = ops._linear_pointwise(inputs_CD, input_weight, bias_G, "none", [], "")
        start = 0
        for size in sizes:
            rows = slice(start, start := start + size)
            gates_SG = ops._linear_pointwise.binary(hidden_SP[:size], gates_CG[rows], state_weight, None, "add")
            gates_SG = gates_SG.to(cell_SH.dtype)
            i, f, o, g = gates_SG.chunk(4, dim=-1)
            gates_SG[:, : -g.shape[-1]].sigmoid_()
            cell = cell_SH[:size].mul_(f).addcmul_(i, g.tanh_())
            if layer.cell_clip is not None:
                cell.clamp_(-layer.cell_clip, layer.cell_clip)
            hidden = cell.tanh().mul_(o).to(inputs_ND.dtype)
            if projection is not None:
                hidden = ops._linear_pointwise(hidden, projection, None, "hardtanh" if clip else "none", clip, "")
            hidden_SP[:size] = outputs_CP[rows] = hidden
    return outputs_NP, hidden_SP, cell_SH


def bptt_lstm(layer: ELMoLSTMLayer, inputs_ND: Tensor, batch_sizes: list[int], hidden_SP: Tensor, cell_SH: Tensor):
    """The same with a hand-written backward pass: CPU training. See `BackpropagationThroughTime`."""
    projection = None if layer.projection is None else layer.projection.weight
    bounds = (layer.forget_bias, layer.cell_clip, layer.projection_clip)
    gates_NG = layer.input_linear(inputs_ND)
    return BackpropagationThroughTime.apply(
        gates_NG, layer.state_linear.weight, projection, hidden_SP, cell_SH, batch_sizes, bounds
    )


class BackpropagationThroughTime(torch.autograd.Function):
    """The recurrence with its gradient. The weights' gradients are single products after the loop, where autograd would
    add up one product a step; of each step only the gates' values, the cell and the output are kept.
    """

    @staticmethod
    def forward(ctx, gates_NG, state_weight_GP, projection_PH, hidden_SP, cell_SH, batch_sizes, bounds):
        forget_bias, cell_clip, projection_clip = bounds
        values_NG, width = gates_NG.clone(), cell_SH.shape[1]
        outputs_NP = hidden_SP.new_empty(len(gates_NG), hidden_SP.shape[1])
        cells_NH = cell_SH.new_empty(len(gates_NG), width)
        hidden, cell = hidden_SP.clone(), cell_SH.clone()
        steps = [tensor.split(batch_sizes) for tensor in (values_NG, outputs_NP, cells_NH)]
        for size, values_SG, output_SP, kept_SH in zip(batch_sizes, *steps, strict=True):
            values_SG.addmm_(hidden[:size], state_weight_GP.T)
            values_SG[:, width : 2 * width] += forget_bias
            values_SG[:, : 3 * width].sigmoid_()
            i, f, o, g = values_SG.chunk(4, dim=1)
            kept_SH.copy_(_clip(cell[:size].mul_(f).addcmul_(i, g.tanh_()), cell_clip))
            raw_SH = kept_SH.tanh().mul_(o)
            output_SP.copy_(raw_SH if projection_PH is None else _clip(raw_SH @ projection_PH.T, projection_clip))
            hidden[:size], cell[:size] = output_SP, kept_SH
        ctx.batch_sizes, ctx.bounds = batch_sizes, bounds
        ctx.save_for_backward(values_NG, cells_NH, outputs_NP, state_weight_GP, projection_PH, hidden_SP, cell_SH)
        return outputs_NP, hidden, cell

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_outputs_NP, grad_hidden_SP, grad_cell_SH):
        values_NG, cells_NH, outputs_NP, state_weight_GP, projection_PH, hidden_SP, cell_SH = ctx.saved_tensors
        _, cell_clip, projection_clip = ctx.bounds
        i, f, o, g = values_NG.chunk(4, dim=1)
        squashed_NH = cells_NH.tanh()
        before_NP = _shifted(hidden_SP, outputs_NP, ctx.batch_sizes)
        before_NH = _shifted(cell_SH, cells_NH, ctx.batch_sizes)
        # What a gradient is multiplied by, for all steps at once; where a bound was met nothing passes.
        slopes = (g * i * (1 - i), before_NH * f * (1 - f), squashed_NH * o * (1 - o), i * (1 - g * g))
        grad_gates_NG = torch.cat(slopes, dim=1)
        through_cell_NH = o * (1 - squashed_NH.square())
        open_cell_NH = None if cell_clip is None else cells_NH.abs() < cell_clip
        open_output_NP = None if projection_clip is None else outputs_NP.abs() < projection_clip
        grad_hidden_SP, grad_cell_SH = grad_hidden_SP.clone(), grad_cell_SH.clone()
        grad_projected_NP = grad_outputs_NP.clone()
        end = len(values_NG)
        for size in reversed(ctx.batch_sizes):
            rows = slice(end - size, end)
            end -= size
            grad_raw = grad_projected_NP[rows].add_(grad_hidden_SP[:size])
            if open_output_NP is not None:
                grad_raw.mul_(open_output_NP[rows])
            if projection_PH is not None:
                grad_raw = grad_raw @ projection_PH
            grad_cell = grad_cell_SH[:size].addcmul_(grad_raw, through_cell_NH[rows])
            if open_cell_NH is not None:
                grad_cell.mul_(open_cell_NH[rows])
            di, df, do, dg = grad_gates_NG[rows].chunk(4, dim=1)
            for part, gradient in ((di, grad_cell), (df, grad_cell), (do, grad_raw), (dg, grad_cell)):
                part.mul_(gradient)
            grad_cell.mul_(f[rows])
            torch.mm(grad_gates_NG[rows], state_weight_GP, out=grad_hidden_SP[:size])
        grad_projection_PH = None if projection_PH is None else grad_projected_NP.T @ (o * squashed_NH)
        grad_state_GP = grad_gates_NG.T @ before_NP
        return grad_gates_NG, grad_state_GP, grad_projection_PH, grad_hidden_SP, grad_cell_SH, None, None


def _shifted(first_SX: Tensor, rows_NX: Tensor, batch_sizes: list[int]) -> Tensor:
    """What stood in the state before each row: `first_SX`, then the rows of the step before."""
    steps = rows_NX.split(batch_sizes)
    before = [first_SX[: batch_sizes[0]], *(step[:size] for step, size in zip(steps, batch_sizes[1:], strict=False))]
    return torch.cat(before)


BACKENDS = {"reference": reference_lstm, "onednn": onednn_lstm, "bptt": bptt_lstm}
_forced: ContextVar[str | None] = ContextVar("forced LSTM backend", default=None)


@contextmanager
def lstm_backend(name: str) -> Iterator[None]:
    """Forces one of `BACKENDS` inside the block; an unsuitable one raises instead of falling back.

    `"reference"` is also the memory switch: it keeps no packed copy of the weights.
    """
    if name not in BACKENDS:
        raise ValueError(f"There is no LSTM backend {name!r}; pass one of {', '.join(BACKENDS)}.")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def choose_backend(layer: ELMoLSTMLayer, inputs: Tensor, *states: Tensor) -> tuple[str, str]:
    """Which of `BACKENDS` a layer uses for these inputs (and states), and why."""
    tensors = (inputs, *states, *layer.parameters())
    needs_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    forced = _forced.get()
    wanted = forced or ("bptt" if needs_gradients else "onednn")
    obstacle = None if wanted == "reference" else _obstacle(wanted, needs_gradients, layer, inputs)
    if forced and obstacle:
        raise ValueError(f"The LSTM backend {forced!r} was forced, but {obstacle}. Use lstm_backend('reference').")
    if obstacle:
        return "reference", obstacle
    return wanted, "forced" if forced else "CPU training" if needs_gradients else "CPU inference"


def _obstacle(backend: str, needs_gradients: bool, layer: ELMoLSTMLayer, inputs: Tensor) -> str | None:
    dtypes = {"onednn": (torch.float32, torch.bfloat16), "bptt": (torch.float32, torch.float64)}[backend]
    if inputs.device.type != "cpu" or inputs.dtype not in dtypes:
        return f"it needs {dtypes[0]} or {dtypes[1]} on CPU, and the inputs are {inputs.dtype} on {inputs.device}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    # Adapters, quantizers and offloading change the module, its parameter or its hooks: then the module is called.
    if not all(_is_plain(linear) and linear.weight.dtype == inputs.dtype for linear in layer.children()):
        return "a linear module is wrapped or hooked, or its dtype is not the inputs'"
    if backend == "bptt":
        return None
    if needs_gradients:
        return "gradients are needed"
    # Private operators of torch: absent from some builds.
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return "this build of torch has no oneDNN linear operators"
    if inputs.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 instructions"
    return None


def _is_plain(linear: nn.Module) -> bool:
    hooked = linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__
    return type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and not hooked


_packed_weights = WeakTensorKeyDictionary()  # parameter -> (stamp, sample, packed copy); dies with the parameter


def _packed(weight: Tensor) -> Tensor:
    """The weight in oneDNN's layout, packed again when the parameter has changed."""
    stamp = (0 if weight.is_inference() else weight._version, weight.data_ptr(), weight.dtype)
    sample = weight.detach().flatten()[:: max(1, weight.numel() // 256)]  # `.data` writes leave the version as it is
    known = _packed_weights.get(weight)
    if known is None or known[0] != stamp or not torch.equal(known[1], sample):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 32)  # 32: a typical number of rows
        known = _packed_weights[weight] = (stamp, sample.clone(), packed)
    return known[2]


def _steps(batch_sizes: list[int], rows_N: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Each step's number of sequences, the number that go on after it, and its rows."""
    sizes = [*batch_sizes, 0]
    return zip(batch_sizes, sizes[1:], rows_N.split(batch_sizes), strict=True)


def _chunks(batch_sizes: list[int], *tensors: Tensor) -> Iterator[tuple]:
    """Groups whole steps into chunks of about `CHUNK_ROWS` rows: their batch sizes, and each tensor's rows."""
    chunks: list[list[int]] = [[]]
    for size in batch_sizes:
        if chunks[-1] and sum(chunks[-1]) + size > CHUNK_ROWS:
            chunks.append([])
        chunks[-1].append(size)
    rows = [sum(chunk) for chunk in chunks]
    return zip(chunks, *(tensor.split(rows) for tensor in tensors), strict=True)


def _clip(tensor: Tensor, bound: float | None) -> Tensor:
    return tensor if bound is None else tensor.clamp(-bound, bound)
