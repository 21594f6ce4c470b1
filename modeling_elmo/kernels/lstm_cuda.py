"""The LSTM of accelerators: several directions of a layer at once, in two launches or in few launches a step.

Launches cost a GPU more time than the arithmetic of a step.

- `StepArithmetic`: a loop on the host. The recurrent products of both directions are one batched product, and their
  cells are one kernel: on CUDA in triton, elsewhere in plain PyTorch.
- `LayerArithmetic`: one launch for all steps of a layer, and one for its gradient. The programs of a kernel run at the
  same time, share the tiles of each product, and wait for each other before the next one.

For the shape suffixes, see `sequences.py`. In kernels, a tensor is a pointer to its first number.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from .lstm_loop import Arithmetic, cell_backward, cell_forward, clip_gradient_, run_direction, run_layer
from .plan import REFUSALS

try:  # optional, only for CUDA
    import triton
    import triton.language as tl
    from triton.language import constexpr

    inspect.getsource(sys.modules[__name__])  # triton compiles it, and a frozen installation has none
except (ImportError, OSError):
    triton = tl = None
    constexpr = Any
    REFUSALS[None] = "triton is not installed, or cannot read its kernels"

logger = logging.get_logger(__name__)

LINE = 32  # numbers from a barrier's counter to the next one: each has a line of the cache for itself
SIZES = ["rows", "all_rows", "sequences", "programs"]  # of a batch; a kernel compiled for each would take a second


def _unchanged(kernel: Any = None, **options: Any) -> Any:
    return _unchanged if kernel is None else kernel


jit: Any = _unchanged if triton is None else triton.jit


@jit
def _squashed(x):
    """The hyperbolic tangent."""
    return 2 * tl.sigmoid(2 * x) - 1


@jit
def _clipped(x, CLIP: constexpr):
    if CLIP is not None:
        bound = tl.full(x.shape, CLIP, x.dtype)
        x = tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))  # NaN stays NaN
    return x


@jit
def _where_free(gradient, x, CLIP: constexpr):
    """The gradient of a clipped value, which is 0 at its bounds."""
    if CLIP is not None:
        bound = tl.full(x.shape, CLIP, x.dtype)
        gradient = tl.where((x < bound) & (x > -bound), gradient, 0.0)
    return gradient


@jit
def _cell(i, f, o, g, before, CLIP: constexpr):
    """The cell, and the state before its projection."""
    cell = _clipped(i * g + f * before, CLIP)
    return cell, o * _squashed(cell)


@jit
def _gradients_of_cell(of_raw, of_cell, i, f, o, g, cell, before, CLIP: constexpr):
    """The gradients of the sums of the four gates and of the cell before, and the state before its projection."""
    squashed = _squashed(cell)
    of_cell = _where_free(of_cell + of_raw * o * (1 - squashed * squashed), cell, CLIP)
    of_i = of_cell * g * i * (1 - i)
    of_f = of_cell * before * f * (1 - f)
    of_o = of_raw * squashed * o * (1 - o)
    of_g = of_cell * i * (1 - g * g)
    return of_i, of_f, of_o, of_g, of_cell * f, o * squashed


@jit
def _cells_forward(
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
    """`cell_forward`: a program for each block of cells of each sequence."""
    k, s = tl.program_id(0) // sequences, tl.program_id(0) % sequences
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    exact = before.dtype.element_ty
    gates += k * gates_k + s * gates_s + columns
    values += k * values_k + s * values_s + columns
    i = tl.sigmoid(tl.load(gates, inside, 0).to(exact))
    f = tl.sigmoid(tl.load(gates + width, inside, 0).to(exact))
    o = tl.sigmoid(tl.load(gates + 2 * width, inside, 0).to(exact))
    g = _squashed(tl.load(gates + 3 * width, inside, 0).to(exact))
    cell, state = _cell(i, f, o, g, tl.load(before + k * before_k + s * before_s + columns, inside, 0), CLIP)
    tl.store(values, i, inside)
    tl.store(values + width, f, inside)
    tl.store(values + 2 * width, o, inside)
    tl.store(values + 3 * width, g, inside)
    tl.store(cells + k * cells_k + s * cells_s + columns, cell, inside)
    tl.store(raw + k * raw_k + s * raw_s + columns, state.to(raw.dtype.element_ty), inside)


@jit
def _cells_backward(
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
    """`cell_backward`, with the same programs."""
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
    cell_before = tl.load(before + k * before_k + s * before_s + columns, inside, 0)
    of_raw = tl.load(grad_raw + k * grad_raw_k + s * grad_raw_s + columns, inside, 0).to(exact)
    of_cell = tl.load(grad_cell, inside, 0)
    of_i, of_f, of_o, of_g, of_before, state = _gradients_of_cell(of_raw, of_cell, i, f, o, g, cell, cell_before, CLIP)
    tl.store(grad_gates, of_i.to(rounded), inside)
    tl.store(grad_gates + width, of_f.to(rounded), inside)
    tl.store(grad_gates + 2 * width, of_o.to(rounded), inside)
    tl.store(grad_gates + 3 * width, of_g.to(rounded), inside)
    tl.store(grad_cell, of_before, inside)
    tl.store(raw + k * raw_k + s * raw_s + columns, state.to(rounded), inside)


def run_cells(plain: Callable[..., None], kernel: Any, *arguments: Any):
    """`plain(*tensors, clip)`, on CUDA with triton as one launch of `kernel`."""
    *tensors, clip = arguments
    if triton is None or tensors[-1].device.type != "cuda":
        plain(*tensors, clip)
    else:
        _launch(kernel, tensors, clip)


def _launch(kernel: Any, tensors: Sequence[Tensor], clip: float | None):
    """A program for each sequence of each direction, and for each block of its cells.

    Triton launches on the current device, which need not be the device of the tensors.
    """
    directions, sequences, width = tensors[-1].shape
    block = min(1024, triton.next_power_of_2(width))
    strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
    grid = directions * sequences, triton.cdiv(width, block)
    with torch.cuda.device_of(tensors[0]):
        kernel[grid](*tensors, *strides, sequences, width, CLIP=clip, BLOCK=block)


class StepArithmetic(Arithmetic):
    def cell_forward(self, *arguments):
        run_cells(cell_forward, _cells_forward, *arguments)

    def cell_backward(self, *arguments):
        run_cells(cell_backward, _cells_backward, *arguments)


@jit
def _wait_for_all(counter, arrivals, POLL: constexpr):
    """Waits until the counter says that all programs of a team arrived. What they wrote can be read afterwards.

    Values that other programs wrote are read with `.cg`, past the cache of a processor, which may have old ones.
    """
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if POLL:
        read: constexpr = "ld.acquire.gpu.global.s32 $0, [$1];"
        while tl.inline_asm_elementwise(read, "=r,l", [counter], dtype=tl.int32, is_pure=False, pack=1) < arrivals:
            pass
    else:
        while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < arrivals:
            pass
    tl.debug_barrier()


@jit
def _share_of_team(team, sequences, K: constexpr, BS: constexpr, GROUPED: constexpr):
    """The first direction of a team, the number of its directions, and the range of its sequences.

    Sequences and directions are independent. Grouped, each team has a block of sequences of one direction, waits for
    its own programs only, and ends with its longest sequence. Otherwise, one team has everything.
    """
    if GROUPED:
        first_k = team % K
        directions = 1
        first = team // K * BS
        end = tl.minimum(first + BS, sequences)
    else:
        first_k = 0
        directions = K
        first = 0
        end = sequences
    return first_k, directions, first, end


@jit
def _place_of_tile(tile, first_k, directions, first, blocks, BS: constexpr, BX: constexpr):
    """The direction of a tile, its sequences and its columns. Offsets need 64 bits."""
    k = first_k + tile % directions + tl.program_id(0).to(tl.int64) * 0
    rest = tile // directions
    sequences = first + rest % blocks * BS + tl.arange(0, BS)
    columns = rest // blocks * BX + tl.arange(0, BX)
    return k, sequences, columns


@jit
def _long_product(
    x,
    weight,
    rows,
    columns,
    is_running,
    begin,
    LENGTH: constexpr,
    WIDTH: constexpr,
    ROW: constexpr,
    COLUMN: constexpr,
    PRECISION: constexpr,
    BT: constexpr,
    BP: constexpr,
    BL: constexpr,
):
    """A tile of `x @ weight`: from `begin` on, `LENGTH` inner products. Other programs wrote `x`."""
    total = tl.zeros((BT, BP), tl.float32)
    for offset in range(0, LENGTH, BL):
        inner = begin + offset + tl.arange(0, BL)
        x_tile = tl.load(x + rows[:, None] * WIDTH + inner[None, :], is_running, 0.0, cache_modifier=".cg")
        weight_tile = tl.load(weight + inner[:, None] * ROW + columns[None, :] * COLUMN)
        total = tl.dot(x_tile, weight_tile, total, input_precision=PRECISION)
    return total


@jit
def _sum_of_parts(
    parts, rows, columns, is_running, sequences, P: constexpr, SPLIT: constexpr, BT: constexpr, BP: constexpr
):
    """The parts of long products, added in a fixed order, so that the sum is identical bit for bit every time."""
    total = tl.zeros((BT, BP), tl.float32)
    for part in range(0, SPLIT):
        places = (part * sequences + rows[:, None]) * P + columns[None, :]
        total += tl.load(parts + places, is_running, 0.0, cache_modifier=".cg")
    return total


@jit
def _add_to_step_before(
    total, grad_outputs, grad_hidden, step, k, before, s, p, is_running, rows, sequences, P: constexpr
):
    """Adds to the gradient of the outputs of the step before, or stores it as that of the states at the start."""
    if step == 0:
        places = (k * sequences + s[:, None]) * P + p[None, :]
        tl.store(grad_hidden + places, total.to(grad_hidden.dtype.element_ty), is_running)
    else:
        places = (k * rows + before + s[:, None]) * P + p[None, :]
        total += tl.load(grad_outputs + places, is_running, 0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(grad_outputs + places, total.to(grad_outputs.dtype.element_ty), is_running)


@jit(do_not_specialize=SIZES)
def _layer_forward(
    gates,  # (K, rows, G), the input half
    state_weight,  # (K, G, P)
    projection,  # (K, P, H)
    hidden,  # (K, S, P), at the start, as is `cell` (K, S, H)
    cell,
    values,  # room for the values of the gates, (K, rows, G), if they are kept
    raw,  # room for the states before their projection, (K, rows, H)
    outputs,  # room: (K, all_rows, P)
    cells,  # room: (K, all_rows, H)
    parts,  # room for the parts of long products, (K, SPLIT, S, P)
    steps,  # the number of steps, then the running sequences of each
    counters,
    rows,
    all_rows,
    sequences,
    programs,
    CELL_CLIP: constexpr,
    PROJECTION_CLIP: constexpr,
    K: constexpr,
    H: constexpr,
    P: constexpr,
    IS_PROJECTED: constexpr,
    KEEP: constexpr,
    GROUPED: constexpr,
    POLL: constexpr,
    PRECISION: constexpr,
    BS: constexpr,  # sequences, cells and inner products of a tile of gates
    BH: constexpr,
    BK: constexpr,
    BT: constexpr,  # sequences, outputs and inner products of a tile of the projection
    BP: constexpr,
    BL: constexpr,
    SPLIT: constexpr,  # parts of each sum of the projection
):
    G: constexpr = 4 * H
    PART: constexpr = H // SPLIT
    teams = 1
    if GROUPED:
        teams = K * tl.cdiv(sequences, BS)
    members = tl.maximum(programs // teams, 1)
    member = tl.program_id(0) % members
    num_steps = tl.load(steps)
    for team in range(tl.program_id(0) // members, teams, programs // members):
        first_k, directions, first, end = _share_of_team(team, sequences, K, BS, GROUPED)
        counter = counters + team * 32  # LINE
        arrivals = 0
        start = 0
        before = 0
        for step in range(0, num_steps):
            size = tl.load(steps + 1 + step)
            running = tl.minimum(size, end) - first
            if running > 0:
                blocks = tl.cdiv(running, BS)
                for tile in range(member, directions * blocks * (H // BH), members):
                    k, s, h = _place_of_tile(tile, first_k, directions, first, blocks, BS, BH)
                    is_running = (s < size)[:, None]
                    if step == 0:
                        hidden_before = hidden + k * sequences * P
                        cells_before = cell + k * sequences * H
                    else:
                        hidden_before = outputs + (k * all_rows + before) * P
                        cells_before = cells + (k * all_rows + before) * H
                    i = tl.zeros((BS, BH), tl.float32)
                    f = tl.zeros((BS, BH), tl.float32)
                    o = tl.zeros((BS, BH), tl.float32)
                    g = tl.zeros((BS, BH), tl.float32)
                    for offset in range(0, P, BK):
                        p = offset + tl.arange(0, BK)
                        x = tl.load(hidden_before + s[:, None] * P + p[None, :], is_running, 0.0, cache_modifier=".cg")
                        weight = state_weight + k * G * P + h[None, :] * P + p[:, None]
                        i = tl.dot(x, tl.load(weight), i, input_precision=PRECISION)
                        f = tl.dot(x, tl.load(weight + H * P), f, input_precision=PRECISION)
                        o = tl.dot(x, tl.load(weight + 2 * H * P), o, input_precision=PRECISION)
                        g = tl.dot(x, tl.load(weight + 3 * H * P), g, input_precision=PRECISION)
                    inputs = gates + (k * rows + start + s[:, None]) * G + h[None, :]
                    i = tl.sigmoid(i + tl.load(inputs, is_running, 0.0).to(tl.float32))
                    f = tl.sigmoid(f + tl.load(inputs + H, is_running, 0.0).to(tl.float32))
                    o = tl.sigmoid(o + tl.load(inputs + 2 * H, is_running, 0.0).to(tl.float32))
                    g = _squashed(g + tl.load(inputs + 3 * H, is_running, 0.0).to(tl.float32))
                    cell_before = tl.load(
                        cells_before + s[:, None] * H + h[None, :], is_running, 0.0, cache_modifier=".cg"
                    )
                    new_cell, state = _cell(i, f, o, g, cell_before, CELL_CLIP)
                    if KEEP:
                        kept = values + (k * rows + start + s[:, None]) * G + h[None, :]
                        tl.store(kept, i.to(values.dtype.element_ty), is_running)
                        tl.store(kept + H, f.to(values.dtype.element_ty), is_running)
                        tl.store(kept + 2 * H, o.to(values.dtype.element_ty), is_running)
                        tl.store(kept + 3 * H, g.to(values.dtype.element_ty), is_running)
                    tl.store(cells + (k * all_rows + start + s[:, None]) * H + h[None, :], new_cell, is_running)
                    state = state.to(raw.dtype.element_ty)
                    if IS_PROJECTED:
                        tl.store(raw + (k * rows + start + s[:, None]) * H + h[None, :], state, is_running)
                    else:
                        tl.store(outputs + (k * all_rows + start + s[:, None]) * H + h[None, :], state, is_running)
                arrivals += members
                _wait_for_all(counter, arrivals, POLL)
                if IS_PROJECTED:
                    blocks = tl.cdiv(running, BT)
                    for tile in range(member, SPLIT * directions * blocks * (P // BP), members):
                        part = tile % SPLIT
                        k, s, p = _place_of_tile(tile // SPLIT, first_k, directions, first, blocks, BT, BP)
                        is_running = (s < size)[:, None]
                        states = raw + (k * rows + start) * H
                        total = _long_product(
                            states, projection + k * P * H, s, p, is_running, part * PART, PART, H, 1, H, PRECISION,
                            BT, BP, BL,
                        )  # fmt: skip
                        if SPLIT == 1:
                            total = _clipped(total, PROJECTION_CLIP).to(outputs.dtype.element_ty)
                            places = (k * all_rows + start + s[:, None]) * P + p[None, :]
                            tl.store(outputs + places, total, is_running)
                        else:
                            places = ((k * SPLIT + part) * sequences + s[:, None]) * P + p[None, :]
                            tl.store(parts + places, total, is_running)
                    if SPLIT > 1:
                        arrivals += members
                        _wait_for_all(counter, arrivals, POLL)
                        for tile in range(member, directions * blocks * (P // BP), members):
                            k, s, p = _place_of_tile(tile, first_k, directions, first, blocks, BT, BP)
                            is_running = (s < size)[:, None]
                            parts_of_k = parts + k * SPLIT * sequences * P
                            total = _sum_of_parts(parts_of_k, s, p, is_running, sequences, P, SPLIT, BT, BP)
                            total = _clipped(total, PROJECTION_CLIP).to(outputs.dtype.element_ty)
                            places = (k * all_rows + start + s[:, None]) * P + p[None, :]
                            tl.store(outputs + places, total, is_running)
                    arrivals += members
                    _wait_for_all(counter, arrivals, POLL)
            before = start
            start += size


@jit(do_not_specialize=SIZES)
def _layer_backward(
    grad_outputs,  # (K, rows, P), to which the gradients of the next steps are added
    grad_cell,  # (K, S, H), of the cells at the ends, then of those at the start
    state_weight,
    projection,
    cell,
    values,
    cells,
    outputs,
    grad_gates,  # room: (K, rows, G)
    raw,  # room: (K, rows, H)
    grad_hidden,  # room: (K, S, P)
    parts,
    steps,
    counters,
    rows,
    sequences,
    programs,
    CELL_CLIP: constexpr,
    PROJECTION_CLIP: constexpr,
    K: constexpr,
    H: constexpr,
    P: constexpr,
    IS_PROJECTED: constexpr,
    GROUPED: constexpr,
    POLL: constexpr,
    PRECISION: constexpr,
    BS: constexpr,  # sequences, cells and inner products of a tile of states
    BH: constexpr,
    BK: constexpr,
    BT: constexpr,  # sequences, outputs and inner products of a tile of hidden states
    BP: constexpr,
    BL: constexpr,
    SPLIT: constexpr,
):
    G: constexpr = 4 * H
    PART: constexpr = G // SPLIT
    teams = 1
    if GROUPED:
        teams = K * tl.cdiv(sequences, BS)
    members = tl.maximum(programs // teams, 1)
    member = tl.program_id(0) % members
    num_steps = tl.load(steps)
    num_rows = 0
    for step in range(0, num_steps):
        num_rows += tl.load(steps + 1 + step)
    for team in range(tl.program_id(0) // members, teams, programs // members):
        first_k, directions, first, end = _share_of_team(team, sequences, K, BS, GROUPED)
        counter = counters + team * 32  # LINE
        arrivals = 0
        start = num_rows
        for done in range(0, num_steps):
            step = num_steps - 1 - done
            size = tl.load(steps + 1 + step)
            start -= size
            before = start
            if step > 0:
                before -= tl.load(steps + step)
            running = tl.minimum(size, end) - first
            if running > 0:
                blocks = tl.cdiv(running, BS)
                for tile in range(member, directions * blocks * (H // BH), members):
                    k, s, h = _place_of_tile(tile, first_k, directions, first, blocks, BS, BH)
                    is_running = (s < size)[:, None]
                    tokens = k * rows + start + s[:, None]
                    at_cells = tokens * H + h[None, :]
                    if IS_PROJECTED:
                        of_raw = tl.zeros((BS, BH), tl.float32)
                        for offset in range(0, P, BK):
                            p = offset + tl.arange(0, BK)
                            output = tl.load(outputs + tokens * P + p[None, :], is_running, 0.0).to(tl.float32)
                            of_output = tl.load(
                                grad_outputs + tokens * P + p[None, :], is_running, 0.0, cache_modifier=".cg"
                            )
                            of_output = _where_free(of_output.to(tl.float32), output, PROJECTION_CLIP)
                            of_output = of_output.to(projection.dtype.element_ty)
                            weight = tl.load(projection + (k * P + p[:, None]) * H + h[None, :])
                            of_raw = tl.dot(of_output, weight, of_raw, input_precision=PRECISION)
                    else:
                        of_raw = tl.load(grad_outputs + at_cells, is_running, 0.0, cache_modifier=".cg")
                        of_raw = of_raw.to(tl.float32)
                    kept = values + tokens * G + h[None, :]
                    i = tl.load(kept, is_running, 0.0).to(tl.float32)
                    f = tl.load(kept + H, is_running, 0.0).to(tl.float32)
                    o = tl.load(kept + 2 * H, is_running, 0.0).to(tl.float32)
                    g = tl.load(kept + 3 * H, is_running, 0.0).to(tl.float32)
                    new_cell = tl.load(cells + at_cells, is_running, 0.0)
                    if step == 0:
                        cells_before = cell + (k * sequences + s[:, None]) * H + h[None, :]
                    else:
                        cells_before = cells + (k * rows + before + s[:, None]) * H + h[None, :]
                    cell_before = tl.load(cells_before, is_running, 0.0)
                    of_cells = grad_cell + (k * sequences + s[:, None]) * H + h[None, :]
                    of_cell = tl.load(of_cells, is_running, 0.0, cache_modifier=".cg")
                    of_i, of_f, of_o, of_g, of_before, state = _gradients_of_cell(
                        of_raw, of_cell, i, f, o, g, new_cell, cell_before, CELL_CLIP
                    )
                    of_gates = grad_gates + tokens * G + h[None, :]
                    tl.store(of_gates, of_i.to(grad_gates.dtype.element_ty), is_running)
                    tl.store(of_gates + H, of_f.to(grad_gates.dtype.element_ty), is_running)
                    tl.store(of_gates + 2 * H, of_o.to(grad_gates.dtype.element_ty), is_running)
                    tl.store(of_gates + 3 * H, of_g.to(grad_gates.dtype.element_ty), is_running)
                    tl.store(of_cells, of_before, is_running)
                    tl.store(raw + at_cells, state.to(raw.dtype.element_ty), is_running)
                arrivals += members
                _wait_for_all(counter, arrivals, POLL)
                blocks = tl.cdiv(running, BT)
                for tile in range(member, SPLIT * directions * blocks * (P // BP), members):
                    part = tile % SPLIT
                    k, s, p = _place_of_tile(tile // SPLIT, first_k, directions, first, blocks, BT, BP)
                    is_running = (s < size)[:, None]
                    of_gates = grad_gates + (k * rows + start) * G
                    total = _long_product(
                        of_gates, state_weight + k * G * P, s, p, is_running, part * PART, PART, G, P, 1, PRECISION,
                        BT, BP, BL,
                    )  # fmt: skip
                    if SPLIT == 1:
                        _add_to_step_before(
                            total, grad_outputs, grad_hidden, step, k, before, s, p, is_running, rows, sequences, P
                        )
                    else:
                        places = ((k * SPLIT + part) * sequences + s[:, None]) * P + p[None, :]
                        tl.store(parts + places, total, is_running)
                if SPLIT > 1:
                    arrivals += members
                    _wait_for_all(counter, arrivals, POLL)
                    for tile in range(member, directions * blocks * (P // BP), members):
                        k, s, p = _place_of_tile(tile, first_k, directions, first, blocks, BT, BP)
                        is_running = (s < size)[:, None]
                        parts_of_k = parts + k * SPLIT * sequences * P
                        total = _sum_of_parts(parts_of_k, s, p, is_running, sequences, P, SPLIT, BT, BP)
                        _add_to_step_before(
                            total, grad_outputs, grad_hidden, step, k, before, s, p, is_running, rows, sequences, P
                        )
                arrivals += members
                _wait_for_all(counter, arrivals, POLL)


class LayerArithmetic(StepArithmetic):
    """All steps in one launch.

    Args:
        grouped: whether each block of sequences of a direction has programs and a barrier of its own.
    """

    def __init__(self, grouped: bool = False):
        self.grouped = grouped

    def forward_steps(self, gates_KNG, weights, hidden_KSP, cell_KSH, outputs_KNP, cells_KNH, steps, clips, keep):
        directions, tokens, gates = gates_KNG.shape
        values_KNG = gates_KNG.new_empty(directions, tokens if keep else 0, gates)
        raw_KNH = gates_KNG.new_empty(directions, tokens if weights[1] is not None else 0, gates // 4)
        tensors = gates_KNG, *_with_placeholder(weights), hidden_KSP, cell_KSH, values_KNG, raw_KNH
        rooms = outputs_KNP, cells_KNH
        sizes = tokens, outputs_KNP.stride(0) // outputs_KNP.shape[2]
        if self._launch(_layer_forward, tensors, rooms, sizes, weights, cell_KSH, steps, clips, KEEP=keep):
            return values_KNG
        given = gates_KNG, weights, hidden_KSP, cell_KSH
        return super().forward_steps(*given, *rooms, steps, clips, keep)

    def backward_steps(
        self, grad_projected_KNP, grad_cell_KSH, weights, outputs_KNP, cells_KNH, values_KNG, cell_KSH, steps, clips
    ):
        grad_gates_KNG = steps.new_rows(values_KNG, *values_KNG.shape, dtype=outputs_KNP.dtype)
        raw_KNH = steps.new_rows(cells_KNH, *cells_KNH.shape, dtype=outputs_KNP.dtype)
        grad_hidden_KSP = grad_projected_KNP.new_zeros(*cell_KSH.shape[:2], grad_projected_KNP.shape[2])
        given = *_with_placeholder(weights), cell_KSH, values_KNG, cells_KNH, outputs_KNP
        rooms = grad_gates_KNG, raw_KNH, grad_hidden_KSP
        tensors = grad_projected_KNP, grad_cell_KSH, *given
        if not self._launch(_layer_backward, tensors, rooms, cells_KNH.shape[1:2], weights, cell_KSH, steps, clips):
            gradients = grad_projected_KNP, grad_cell_KSH
            kept = outputs_KNP, cells_KNH, values_KNG.to(cells_KNH.dtype), cell_KSH
            return super().backward_steps(*gradients, weights, *kept, steps, clips)
        clip_gradient_(grad_projected_KNP, outputs_KNP, clips[1])
        return grad_gates_KNG, raw_KNH, grad_hidden_KSP

    def _launch(self, kernel, tensors, rooms, rows, weights, cell_KSH, steps, clips, **options):
        """The tensors become contiguous, as the kernel reads them; it writes into the rooms.

        Returns:
            whether the device ran the kernel. If not, the reason is in `REFUSALS`.
        """
        if cell_KSH.device in REFUSALS:
            return False
        directions, sequences, cells = cell_KSH.shape
        state_weight_KGP, projection_KPH = weights
        width = state_weight_KGP.shape[2]
        device, dtype = cell_KSH.device, state_weight_KGP.dtype
        tiles = choose_tiles(sequences, cells, width, dtype, kernel is _layer_forward, shared_memory(device))
        parts = tiles["SPLIT"] if tiles["SPLIT"] > 1 else 0
        parts_KXSP = cell_KSH.new_empty(directions, parts, sequences, width, dtype=torch.float32)
        teams = directions * -(-sequences // tiles["BS"]) if self.grouped else 1
        counters = torch.zeros(teams, LINE, dtype=torch.int32, device=device)
        programs = num_programs(device)
        options |= tiles
        if device.type == "cuda":
            options["launch_cooperative_grid"] = True  # all programs run at the same time, or it is an error
        run = partial(
            kernel[(programs,)],
            *(tensor.contiguous() for tensor in tensors),
            *rooms,
            parts_KXSP,
            steps.on_device,
            counters,
            *rows,
            sequences,
            programs,
            CELL_CLIP=clips[0],
            PROJECTION_CLIP=clips[1],
            K=directions,
            H=cells,
            P=width,
            IS_PROJECTED=projection_KPH is not None,
            GROUPED=self.grouped,
            POLL=self.grouped and device.type == "cuda",
            PRECISION=precision_of_products(),
            **options,
        )
        with torch.cuda.device_of(cell_KSH):
            return _is_run(run, device, is_trial=self.grouped)


def _is_run(run: Callable[[], Any], device: torch.device, is_trial: bool) -> bool:
    """Whether a kernel was launched. A driver may refuse to run all programs at the same time."""
    try:
        run()
    except Exception as error:  # triton's have no common class
        if is_trial or device.type != "cuda":
            raise
        REFUSALS[device] = f"{device} refused to run a layer in one launch: {type(error).__name__}: {error}"
        logger.warning(
            f"{REFUSALS[device]}. The LSTM is slower, with some launches at each step. Its numbers are right."
        )
    return device not in REFUSALS


def _with_placeholder(weights: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """The weights, and any tensor where a kernel reads no projection."""
    state_weight_KGP, projection_KPH = weights
    return state_weight_KGP, state_weight_KGP if projection_KPH is None else projection_KPH


def precision_of_products() -> str:
    """Of float32 on tensor cores: one product if torch allows TF32, or the sum of three, which is near float32."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # since torch 2.9, where the older name may raise
    return "tf32" if precision == "tf32" or (precision is None and matmul.allow_tf32) else "tf32x3"


def num_programs(device: torch.device) -> int:
    """A program for each processor of the GPU. Without a GPU, triton's interpreter runs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def shared_memory(device: torch.device) -> int:
    """Bytes that the tiles of a program may take."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", H100_MEMORY)


H100_MEMORY = 227 << 10
TILES = ("BS", "BH", "BK", "BT", "BP", "BL", "SPLIT", "num_warps", "num_stages")
# The fastest of 40 to 135 choices for each size on an H100 in bfloat16: few sequences need many small tiles, and long
# sums in parts, or most processors have no tile.
FORWARD_TILES = {  # by the most cells, then by the most sequences
    2047: {
        128: (16, 64, 128, 16, 64, 128, 2, 8, 4),
        1024: (128, 64, 64, 64, 128, 128, 4, 8, 3),
        None: (128, 64, 64, 64, 64, 128, 1, 8, 3),
    },
    None: {
        64: (32, 64, 64, 32, 64, 64, 4, 8, 4),
        256: (128, 32, 64, 32, 128, 128, 4, 8, 4),
        None: (128, 64, 64, 64, 64, 128, 1, 8, 3),
    },
}
BACKWARD_TILES = {
    2047: {
        128: (32, 32, 128, 16, 64, 128, 4, 8, 4),
        1024: (64, 64, 64, 64, 64, 128, 4, 8, 3),
        None: (64, 64, 64, 64, 128, 128, 1, 8, 3),
    },
    None: {
        64: (16, 64, 64, 16, 128, 128, 8, 8, 4),
        256: (64, 64, 64, 64, 128, 128, 4, 8, 3),
        None: (64, 64, 64, 32, 128, 128, 4, 8, 4),
    },
}
# In float32, which was not tuned: an inner product of half the length takes the same memory.
FLOAT32_TILES = {
    16: (16, 32, 64, 16, 32, 128, 1, 4, 3),
    64: (32, 32, 64, 32, 32, 128, 1, 4, 3),
    511: (64, 32, 64, 32, 32, 128, 1, 4, 3),
    None: (128, 32, 64, 64, 64, 64, 1, 8, 3),
}


@cache
def choose_tiles(
    sequences: int, cells: int, width: int, dtype: torch.dtype, forward: bool, memory: int
) -> dict[str, int]:
    """The sizes of tiles and the warps and stages of a program, for multiples of 16 cells and outputs."""
    by_sequences = FLOAT32_TILES
    if dtype != torch.float32:
        by_sequences = _up_to(cells, FORWARD_TILES if forward else BACKWARD_TILES)
    tiles = dict(zip(TILES, _up_to(sequences, by_sequences), strict=True))
    tiles["BH"] = _divisor(cells, tiles["BH"])
    tiles["BK"] = _divisor(width, tiles["BK"])
    tiles["BP"] = _divisor(width, tiles["BP"])
    length = cells if forward else 4 * cells
    while length % (16 * tiles["SPLIT"]):
        tiles["SPLIT"] //= 2
    tiles["BL"] = _divisor(length // tiles["SPLIT"], tiles["BL"])
    of_states, of_weights = (1, 4) if forward else (2, 1)  # tiles of the first product, whose weights have four gates
    first = tiles["BK"] * (of_states * tiles["BS"] + of_weights * tiles["BH"])
    second = tiles["BL"] * (tiles["BT"] + tiles["BP"])
    most = max(first, second) * dtype.itemsize
    while tiles["num_stages"] > 1 and (tiles["num_stages"] - 1) * most > memory:
        tiles["num_stages"] -= 1
    return tiles


def _up_to(size: int, choices: dict) -> Any:
    return next(choice for most, choice in choices.items() if most is None or size <= most)


def _divisor(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides a multiple of 16."""
    while size % most:
        most //= 2
    return most


fused_layer = partial(run_layer, StepArithmetic())  # of several directions
fused_lstm = partial(run_direction, StepArithmetic())
persistent_layer = partial(run_layer, LayerArithmetic())
persistent_lstm = partial(run_direction, LayerArithmetic())
grouped_layer = partial(run_layer, LayerArithmetic(grouped=True))
grouped_lstm = partial(run_direction, LayerArithmetic(grouped=True))
