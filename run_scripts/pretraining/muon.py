"""Muon (Jordan et al. 2024): the momentum of a matrix, made orthogonal before each step.

`torch.optim.Muon` of torch 2.9 and newer computes in bfloat16, one matrix at a time. On a processor without
instructions for bfloat16 it is slower than the training itself.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from modeling_elmo.elmo_backends import bfloat16_obstacle

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's polynomial, which brings singular values to 0.7 ... 1.2


class Muon(Optimizer):
    """Muon with Nesterov's momentum. The sizes of its steps are those of AdamW (Liu et al. 2025).

        m = momentum m + (1 - momentum) g
        w = (1 - lr weight_decay) w - 0.2 lr sqrt(max(rows, columns)) orthogonal(momentum m + (1 - momentum) g)

    Equals `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` up to rounding, and has the same state.

    Args:
        params: matrices.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 3e-3, weight_decay: float = 0.0, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        shapes = [tuple(matrix.shape) for group in self.param_groups for matrix in group["params"]]
        if wrong := [shape for shape in shapes if len(shape) != 2]:
            raise ValueError(f"Muon trains matrices, but received a parameter of shape {wrong[0]}.")

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            equal_shapes = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    equal_shapes[matrix.shape].append(matrix)
            for matrices in equal_shapes.values():
                self._update(matrices, group["lr"], group["weight_decay"], group["momentum"])

    def _update(self, matrices: list[Tensor], lr: float, weight_decay: float, momentum: float):
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]  # all have one
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        updates = orthogonal(torch.stack(torch._foreach_lerp(gradients, momenta, momentum)))
        torch._foreach_mul_(matrices, 1 - lr * weight_decay)
        torch._foreach_add_(matrices, list(updates), alpha=-0.2 * lr * max(matrices[0].shape) ** 0.5)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices `(number, rows, columns)` with the same singular vectors, and singular values of about 1.

    Five iterations of Newton and Schulz, in bfloat16 unless the processor lacks its instructions.
    """
    a, b, c = COEFFICIENTS
    slow = matrices.device.type == "cpu" and bfloat16_obstacle()
    values = matrices if slow else matrices.bfloat16()
    is_tall = values.shape[1] > values.shape[2]
    values = values.mT if is_tall else values
    values = values / torch.linalg.matrix_norm(values, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = values @ values.mT
        values = torch.baddbmm(values, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), values, beta=a)
    return (values.mT if is_tall else values).to(matrices.dtype)
