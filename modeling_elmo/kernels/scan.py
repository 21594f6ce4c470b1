"""A loop over the time steps of padded rows, for `torch.export`.

Shape suffixes: B rows; T steps; X any width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .torch_state import private


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
