"""The clipped projected LSTM for accelerators: several directions of a layer at once, and few launches a step.

Launches cost a GPU more time than the arithmetic of a step. So the recurrent products of both directions are one
batched product, and the arithmetic of their cells is one kernel. `cell_forward` and `cell_backward` define this kernel
in plain PyTorch. On CUDA, triton computes the same.

For the shape suffixes, see `sequences.py`; the sequences of all directions have the same lengths.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .sequences import LSTMOutput, LSTMWeights, Sequences, Steps
from .torch_state import first_derivative, product_dtype

try:  # optional, only for CUDA
    import triton
    import triton.language as tl
    from triton.language import constexpr

    inspect.getsource(sys.modules[__name__])  # triton compiles it, and a frozen installation has none
except (ImportError, OSError):
    triton = tl = None
    constexpr = Any


MOST_GATES = 1 << 28  # input gates in memory at a time without gradients: 1 GB in float32
jit: Any = (lambda kernel: kernel) if triton is None else triton.jit


class StackedLayer(NamedTuple):
    """The parameters of the same layer of several directions, and its options."""

    input_weight_KGD: Tensor
    bias_KG: Tensor
    state_weight_KGP: Tensor
    projection_KPH: Tensor | None
    cell_clip: float | None
    projection_clip: float | None


def stacked_layer(layers: Sequence[LSTMWeights], dtype: torch.dtype) -> StackedLayer:
    """The same layer of several directions."""
    parameters = zip(*(layer.tensors() for layer in layers), strict=True)
    weights = [torch.stack([tensor.to(dtype) for tensor in same]) for same in parameters]
    input_weight_KGD, bias_KG, state_weight_KGP = weights[:3]
    projection_KPH = weights[3] if len(weights) > 3 else None
    forget_4H = bias_KG.new_zeros(4, bias_KG.shape[1] // 4)
    forget_4H[1] = layers[0].forget_bias
    clips = layers[0].cell_clip, layers[0].projection_clip
    return StackedLayer(input_weight_KGD, bias_KG + forget_4H.flatten(), state_weight_KGP, projection_KPH, *clips)


def fused_layer(
    layers: Sequence[LSTMWeights], inputs_KND: Tensor, hidden_KSP: Tensor, cell_KSH: Tensor, steps: Steps
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the same layer of several directions. Under autocast, cells stay in float32.

    Returns:
        `(outputs_KNP, hidden_KSP, cell_KSH)`: the outputs, and the states after each sequence's end.
    """
    dtype = product_dtype(inputs_KND)
    with torch.autocast(inputs_KND.device.type, enabled=False):  # the dtypes are chosen
        layer = stacked_layer(layers, dtype)
        tensors = (inputs_KND.to(dtype), *layer[:4], hidden_KSP.to(dtype), cell_KSH)
        if not torch.is_grad_enabled() or not any(tensor is not None and tensor.requires_grad for tensor in tensors):
            outputs_KNP, cells_KNH, _ = _run_layer(layer, tensors[0], *tensors[-2:], steps.batch_sizes, keep=False)
            final_KSH = cells_KNH.index_select(1, steps.last_S)
        else:
            outputs_KNP, final_KSH = FusedBackpropagation.apply(*tensors, *steps, *layer[4:])
        return outputs_KNP, outputs_KNP.index_select(1, steps.last_S), final_KSH


def _run_layer(layer: StackedLayer, inputs_KND, hidden_KSP, cell_KSH, batch_sizes: list[int], keep: bool):
    """Outputs, cells and, if they are kept, the values of the gates, `(K, N, ...)`."""
    directions, tokens, _ = inputs_KND.shape
    gates, width = layer.bias_KG.shape[1], cell_KSH.shape[2]
    outputs_KNP = inputs_KND.new_empty(directions, tokens, hidden_KSP.shape[2])
    cells_KNH = cell_KSH.new_empty(directions, tokens, width)
    values_KNG = cell_KSH.new_empty(directions, tokens if keep else 0, gates)
    most = tokens if keep else max(batch_sizes[0], MOST_GATES // (directions * gates))
    first = end = 0  # rows whose input gates are in memory
    start, input_weight_KDG, state_weight_KPG = 0, layer.input_weight_KGD.mT, layer.state_weight_KGP.mT
    for size in batch_sizes:
        rows = slice(start, start + size)
        if rows.stop > end:
            first, end = start, min(tokens, start + most)
            gates_KNG = torch.baddbmm(layer.bias_KG[:, None], inputs_KND[:, first:end], input_weight_KDG)
        gates_KSG = gates_KNG[:, start - first : rows.stop - first]
        gates_KSG = torch.baddbmm(gates_KSG, hidden_KSP[:, :size], state_weight_KPG)
        values_KSG = values_KNG[:, rows] if keep else torch.empty_like(gates_KSG, dtype=cell_KSH.dtype)
        output_KSP, cells_KSH = outputs_KNP[:, rows], cells_KNH[:, rows]
        projection_KPH, bound = layer.projection_KPH, layer.projection_clip
        raw_KSH = output_KSP if projection_KPH is None else inputs_KND.new_empty(directions, size, width)
        tensors = gates_KSG, cell_KSH[:, :size], values_KSG, cells_KSH, raw_KSH
        run_cells(cell_forward, _forward_in_triton, *tensors, clip=layer.cell_clip)
        if projection_KPH is not None and bound is None:
            torch.bmm(raw_KSH, projection_KPH.mT, out=output_KSP)
        elif projection_KPH is not None and bound is not None:
            torch.clamp(torch.bmm(raw_KSH, projection_KPH.mT), -bound, bound, out=output_KSP)
        start, hidden_KSP, cell_KSH = rows.stop, output_KSP, cells_KSH
    return outputs_KNP, cells_KNH, values_KNG


class FusedBackpropagation(torch.autograd.Function):
    """A layer with a hand-written backward pass. The gradient of each weight is one product after the loop."""

    @staticmethod
    def forward(ctx, inputs_KND, input_weight, bias, state_weight, projection, hidden_KSP, cell_KSH, *options):
        ctx.batch_sizes, last_S, before_N, *clips = options
        ctx.clips = clips
        layer = StackedLayer(input_weight, bias, state_weight, projection, *clips)
        kept = _run_layer(layer, inputs_KND, hidden_KSP, cell_KSH, ctx.batch_sizes, keep=True)
        ctx.save_for_backward(inputs_KND, input_weight, state_weight, projection, hidden_KSP, cell_KSH, before_N, *kept)
        return kept[0], kept[1].index_select(1, last_S)

    @staticmethod
    @first_derivative
    def backward(ctx, grad_outputs_KNP, grad_cell_KSH):
        inputs_KND, input_weight_KGD, state_weight_KGP, projection_KPH, *states = ctx.saved_tensors
        hidden_KSP, cell_KSH, before_N, outputs_KNP, cells_KNH, values_KNG = states
        cell_clip, projection_clip = ctx.clips
        grad_gates_KNG = torch.empty_like(values_KNG, dtype=outputs_KNP.dtype)
        raw_KNH = torch.empty_like(cells_KNH, dtype=outputs_KNP.dtype)
        grad_hidden_KSP, grad_cell_KSH = torch.zeros_like(hidden_KSP), grad_cell_KSH.clone()
        grad_projected_KNP, end = grad_outputs_KNP.clone(), outputs_KNP.shape[1]
        for step in reversed(range(len(ctx.batch_sizes))):
            size, before = ctx.batch_sizes[step], ctx.batch_sizes[step - 1] if step else 0
            rows, rows_before = slice(end - size, end), slice(end - size - before, end - size - before + size)
            grad_raw_KSH = grad_projected_KNP[:, rows]
            if projection_clip is not None:
                torch.ops.aten.hardtanh_backward(
                    grad_raw_KSH, outputs_KNP[:, rows], -projection_clip, projection_clip, grad_input=grad_raw_KSH
                )
            if projection_KPH is not None:
                grad_raw_KSH = torch.bmm(grad_raw_KSH, projection_KPH)
            before_KSH = cells_KNH[:, rows_before] if step else cell_KSH[:, :size]
            given = grad_raw_KSH, values_KNG[:, rows], cells_KNH[:, rows], before_KSH
            rooms = grad_cell_KSH[:, :size], grad_gates_KNG[:, rows], raw_KNH[:, rows]
            run_cells(cell_backward, _backward_in_triton, *given, *rooms, clip=cell_clip)
            grad_before_KSP = grad_projected_KNP[:, rows_before] if step else grad_hidden_KSP[:, :size]
            grad_before_KSP.baddbmm_(grad_gates_KNG[:, rows], state_weight_KGP)
            end -= size
        wanted, grad_gates_KGN = ctx.needs_input_grad, grad_gates_KNG.mT
        before_KNP = torch.cat([hidden_KSP, outputs_KNP], 1).index_select(1, before_N)
        return (
            torch.bmm(grad_gates_KNG, input_weight_KGD) if wanted[0] else None,
            torch.bmm(grad_gates_KGN, inputs_KND) if wanted[1] else None,
            grad_gates_KNG.sum(1) if wanted[2] else None,
            torch.bmm(grad_gates_KGN, before_KNP) if wanted[3] else None,
            torch.bmm(grad_projected_KNP.mT, raw_KNH) if wanted[4] else None,
            grad_hidden_KSP,
            grad_cell_KSH,
            *(None,) * 5,
        )


def cell_forward(gates_KSG, before_KSH, values_KSG, cells_KSH, raw_KSH, clip: float | None):
    """A step of the cells, from the sums of the gates.

    Args:
        gates_KSG, before_KSH: the sums in the order i, f, o, g, and the cells before the step.
        values_KSG, cells_KSH, raw_KSH: room for the gates' values, the cells, and the state before its projection.
    """
    sigmoids, g = gates_KSG.to(before_KSH.dtype).split([3 * before_KSH.shape[2], before_KSH.shape[2]], dim=2)
    torch.cat([sigmoids.sigmoid(), g.tanh()], dim=2, out=values_KSG)
    i, f, o, g = values_KSG.chunk(4, dim=2)
    cell = i * g + f * before_KSH
    cells_KSH.copy_(cell if clip is None else cell.clamp(-clip, clip))
    raw_KSH.copy_(o * cells_KSH.tanh())


def cell_backward(
    grad_raw_KSH, values_KSG, cells_KSH, before_KSH, grad_cell_KSH, grad_gates_KSG, raw_KSH, clip: float | None
):
    """The gradient of `cell_forward`.

    Args:
        grad_cell_KSH: the gradient of the cells after the step; it becomes that of the cells before the step.
        grad_gates_KSG, raw_KSH: room for the gradient of the gates' sums, and for the state before its projection.
    """
    i, f, o, g = values_KSG.chunk(4, dim=2)
    grad_raw, squashed = grad_raw_KSH.to(cells_KSH.dtype), cells_KSH.tanh()
    raw_KSH.copy_(o * squashed)
    grad_cell = grad_cell_KSH + grad_raw * o * (1 - squashed * squashed)
    if clip is not None:
        grad_cell.masked_fill_(cells_KSH.abs() >= clip, 0)
    di, df = grad_cell * g * i * (1 - i), grad_cell * before_KSH * f * (1 - f)
    do, dg = grad_raw * squashed * o * (1 - o), grad_cell * i * (1 - g * g)
    grad_gates_KSG.copy_(torch.cat([di, df, do, dg], dim=2))
    torch.mul(grad_cell, f, out=grad_cell_KSH)


def run_cells(plain: Callable[..., None], kernel: Any, *tensors: Tensor, clip: float | None):
    """`plain(*tensors, clip)`, on CUDA with triton as one launch of `kernel`."""
    if triton is None or tensors[-1].device.type != "cuda":
        plain(*tensors, clip)
    else:
        _launch(kernel, tensors, clip)


def _launch(kernel: Any, tensors: Sequence[Tensor], clip: float | None):
    """A program for each sequence of each direction, and for each block of its cells.

    Triton launches on the current device, which need not be that of the tensors.
    """
    directions, sequences, width = tensors[-1].shape
    block = min(1024, triton.next_power_of_2(width))
    strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
    grid = directions * sequences, triton.cdiv(width, block)
    with torch.cuda.device_of(tensors[0]):
        kernel[grid](*tensors, *strides, sequences, width, CLIP=clip, BLOCK=block)


@jit
def _forward_in_triton(
    gates,
    before,
    values,
    cells,
    raw,
    gates_k,
    gates_s,
    before_k,
    before_s,
    values_k,
    values_s,
    cells_k,
    cells_s,
    raw_k,
    raw_s,
    sequences,
    width,
    CLIP: constexpr,
    BLOCK: constexpr,
):
    k, s = tl.program_id(0) // sequences, tl.program_id(0) % sequences
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    exact = before.dtype.element_ty
    gates += k * gates_k + s * gates_s + columns
    values += k * values_k + s * values_s + columns
    i = tl.sigmoid(tl.load(gates, inside, 0).to(exact))
    f = tl.sigmoid(tl.load(gates + width, inside, 0).to(exact))
    o = tl.sigmoid(tl.load(gates + 2 * width, inside, 0).to(exact))
    g = 2 * tl.sigmoid(2 * tl.load(gates + 3 * width, inside, 0).to(exact)) - 1  # tanh
    cell = i * g + f * tl.load(before + k * before_k + s * before_s + columns, inside, 0)
    if CLIP is not None:
        bound = tl.full([BLOCK], CLIP, exact)
        cell = tl.where(cell > bound, bound, tl.where(cell < -bound, -bound, cell))  # NaN stays NaN
    tl.store(values, i, inside)
    tl.store(values + width, f, inside)
    tl.store(values + 2 * width, o, inside)
    tl.store(values + 3 * width, g, inside)
    tl.store(cells + k * cells_k + s * cells_s + columns, cell, inside)
    state = o * (2 * tl.sigmoid(2 * cell) - 1)
    tl.store(raw + k * raw_k + s * raw_s + columns, state.to(raw.dtype.element_ty), inside)


@jit
def _backward_in_triton(
    grad_raw,
    values,
    cells,
    before,
    grad_cell,
    grad_gates,
    raw,
    grad_raw_k,
    grad_raw_s,
    values_k,
    values_s,
    cells_k,
    cells_s,
    before_k,
    before_s,
    grad_cell_k,
    grad_cell_s,
    grad_gates_k,
    grad_gates_s,
    raw_k,
    raw_s,
    sequences,
    width,
    CLIP: constexpr,
    BLOCK: constexpr,
):
    k, s = tl.program_id(0) // sequences, tl.program_id(0) % sequences
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    exact = cells.dtype.element_ty
    rounded = raw.dtype.element_ty
    values += k * values_k + s * values_s + columns
    grad_gates += k * grad_gates_k + s * grad_gates_s + columns
    grad_cell += k * grad_cell_k + s * grad_cell_s + columns
    i, f = tl.load(values, inside, 0), tl.load(values + width, inside, 0)
    o, g = tl.load(values + 2 * width, inside, 0), tl.load(values + 3 * width, inside, 0)
    cell = tl.load(cells + k * cells_k + s * cells_s + columns, inside, 0)
    squashed = 2 * tl.sigmoid(2 * cell) - 1
    of_raw = tl.load(grad_raw + k * grad_raw_k + s * grad_raw_s + columns, inside, 0).to(exact)
    of_cell = tl.load(grad_cell, inside, 0) + of_raw * o * (1 - squashed * squashed)
    if CLIP is not None:
        bound = tl.full([BLOCK], CLIP, exact)
        of_cell = tl.where((cell >= bound) | (cell <= -bound), 0.0, of_cell)
    of_f = of_cell * tl.load(before + k * before_k + s * before_s + columns, inside, 0)
    tl.store(grad_gates, (of_cell * g * i * (1 - i)).to(rounded), inside)
    tl.store(grad_gates + width, (of_f * f * (1 - f)).to(rounded), inside)
    tl.store(grad_gates + 2 * width, (of_raw * squashed * o * (1 - o)).to(rounded), inside)
    tl.store(grad_gates + 3 * width, (of_cell * i * (1 - g * g)).to(rounded), inside)
    tl.store(grad_cell, of_cell * f, inside)
    tl.store(raw + k * raw_k + s * raw_s + columns, (o * squashed).to(rounded), inside)


def fused_lstm(layer: LSTMWeights, text: Sequences) -> LSTMOutput:
    """One direction with the kernels of both."""
    steps = Steps.of(text.batch_sizes, text.inputs.device)
    states = text.hidden_SP[None], text.cell_SH[None]
    outputs_KNP, hidden_KSP, cell_KSH = fused_layer([layer], text.tokens_ND[None], *states, steps)
    return outputs_KNP[0], hidden_KSP[0], cell_KSH[0]
