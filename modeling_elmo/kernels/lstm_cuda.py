"""The LSTM of accelerators: several directions of a layer at once, and few launches a step.

Launches cost a GPU more time than the arithmetic of a step. So the recurrent products of both directions are one
batched product, and the arithmetic of their cells is one kernel: on CUDA in triton, elsewhere in plain PyTorch.

For the shape suffixes, see `sequences.py`.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .lstm_loop import Arithmetic, cell_backward, cell_forward, run_direction, run_layer

try:  # optional, only for CUDA
    import triton
    import triton.language as tl
    from triton.language import constexpr

    inspect.getsource(sys.modules[__name__])  # triton compiles it, and a frozen installation has none
except (ImportError, OSError):
    triton = tl = None
    constexpr = Any


jit: Any = (lambda kernel: kernel) if triton is None else triton.jit


def run_cells(plain: Callable[..., None], kernel: Any, *arguments: Any):
    """`plain(*tensors, clip)`, on CUDA with triton as one launch of `kernel`."""
    *tensors, clip = arguments
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
        of_cell = tl.where((cell < bound) & (cell > -bound), of_cell, 0.0)
    of_f = of_cell * tl.load(before + k * before_k + s * before_s + columns, inside, 0)
    tl.store(grad_gates, (of_cell * g * i * (1 - i)).to(rounded), inside)
    tl.store(grad_gates + width, (of_f * f * (1 - f)).to(rounded), inside)
    tl.store(grad_gates + 2 * width, (of_raw * squashed * o * (1 - o)).to(rounded), inside)
    tl.store(grad_gates + 3 * width, (of_cell * i * (1 - g * g)).to(rounded), inside)
    tl.store(grad_cell, of_cell * f, inside)
    tl.store(raw + k * raw_k + s * raw_s + columns, (o * squashed).to(rounded), inside)


class AcceleratorArithmetic(Arithmetic):
    def cell_forward(self, *arguments):
        run_cells(cell_forward, _forward_in_triton, *arguments)

    def cell_backward(self, *arguments):
        run_cells(cell_backward, _backward_in_triton, *arguments)


fused_layer = partial(run_layer, AcceleratorArithmetic())  # of several directions
fused_lstm = partial(run_direction, AcceleratorArithmetic())
