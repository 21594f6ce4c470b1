"""Cross-entropy on CUDA in triton: a program for each prediction reads its logits twice and writes their gradient.

The logits stay in the dtype of their product, and are never copied: the first pass finds the highest of them and the
sum of exponentials at once, and the second writes the gradient in their place. All sums are in float32. Liger's fused
cross-entropy (Hsu et al. 2024) works like this; ours has rows that compete or not, and a bias.

Shape suffixes: B predictions; P width of a prediction; R rows of the output layer.
"""

import torch
from torch import Tensor

from .lstm_cuda import constexpr, jit, tl, triton

MOST_LOGITS_IN_BLOCK = 4096  # that a program holds at a time
ALIGNED_LOGITS = 16  # 32 bytes in half precision: then a program reads several logits at once


def has_softmax_kernel(hidden: Tensor) -> bool:
    return triton is not None and hidden.device.type == "cuda"


def room_for_logits(hidden_BP: Tensor, rows: int) -> Tensor:
    """Memory for `(B, R)` logits, of which each row is aligned."""
    columns = -(-rows // ALIGNED_LOGITS) * ALIGNED_LOGITS
    return hidden_BP.new_empty(len(hidden_BP), columns)[:, :rows]


def cross_entropy_in_triton(
    logits_BR: Tensor,
    hidden_BP: Tensor,
    weight_RP: Tensor,
    added_R: Tensor,
    competing_R: Tensor,
    targets_B: Tensor,
    rates_B: Tensor | None,
    losses_B: Tensor,
):
    """Writes the losses and, with `rates_B`, the gradient of `sum(rates_B * losses_B)` over the logits.

    A target that is not a row of the output layer has the loss NaN. The logit of a target is computed again,
    in the dtype of sums.

    Args:
        logits_BR: `hidden_BP @ weight_RP.T`.
        added_R: what is added to the logit of a target.
        competing_R: what is added to the other logits; minus infinity at rows that take part only as targets.
    """
    rows, width = weight_RP.shape
    block = min(MOST_LOGITS_IN_BLOCK, triton.next_power_of_2(rows))
    tensors = logits_BR, hidden_BP, weight_RP, added_R, competing_R, targets_B, rates_B, losses_B
    strides = [tensor.stride(0) for tensor in tensors[:3]]
    blocks = {"BLOCK": block, "BLOCK_P": triton.next_power_of_2(width)}
    with torch.cuda.device_of(logits_BR):  # triton launches on the current device
        _cross_entropy_kernel[(len(logits_BR),)](*tensors, *strides, rows, width, **blocks, num_warps=8)


@jit
def _cross_entropy_kernel(
    logits,
    hidden,
    weight,
    added,
    competing,
    targets,
    rates,
    losses,
    logits_b,
    hidden_b,
    weight_r,
    rows,
    width,
    BLOCK: constexpr,
    BLOCK_P: constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    exact = added.dtype.element_ty
    rounded = logits.dtype.element_ty
    logits += b * logits_b
    target = tl.load(targets + b + tl.arange(0, 1))
    is_row = (target >= 0) & (target < rows)
    inner = tl.arange(0, BLOCK_P)
    is_inner = (inner < width) & is_row
    x = tl.load(hidden + b * hidden_b + inner, is_inner, 0).to(exact)
    own = tl.sum(x * tl.load(weight + target * weight_r + inner, is_inner, 0).to(exact), 0)
    own = tl.where(is_row, own + tl.load(added + target, is_row, 0), float("nan"))
    highest = own
    total = tl.zeros([1], exact)
    for start in range(0, rows, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < rows
        values = tl.load(logits + columns, inside, 0).to(exact) + tl.load(competing + columns, inside, float("-inf"))
        values = tl.where(columns == target, own, values)
        higher = tl.maximum(highest, tl.max(values, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(values - higher), 0)
        highest = higher
    tl.store(losses + b + tl.arange(0, 1), tl.log(total) + (highest - own))
    if rates is not None:
        rate = tl.load(rates + b)
        for start in range(0, rows, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < rows
            values = tl.load(logits + columns, inside, 0).to(exact)
            values += tl.load(competing + columns, inside, float("-inf"))
            values = tl.where(columns == target, own, values)
            errors = tl.exp(values - highest) / total - tl.where(columns == target, 1.0, 0.0)
            tl.store(logits + columns, (errors * rate).to(rounded), inside)
