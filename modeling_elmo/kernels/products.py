"""Matrix products of the fast backends, in the layout and by the library that is fastest for their rows.

Shape suffixes: N rows; D width of the input; G width of the output.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .int8 import Int8Linear, Int8Weight, int8_product, int8_rows
from .onednn import has_onednn, onednn_layout, onednn_product, processor_name
from .plan import forced_backend, make_plan
from .torch_state import first_derivative, product_dtype, version

FEW_PRODUCTS = 2**20  # with fewer multiplications, oneDNN's start (0.1 ms) costs more than it saves
MANY_ROWS = 256  # with fewer, the copy of a transposed gradient costs more than the faster product saves
FEW_VALUES = 2**12  # starting three operators costs more than one that is slower


def fast_linear(linear: nn.Linear, inputs: Tensor, part_GD: Tensor | None = None) -> Tensor:
    """`linear(inputs)`, with `product` where possible. With columns of its weight, `part_GD`, it adds no bias.

    Args:
        inputs: `(..., width)`.
    """
    backend = make_plan([linear], inputs).backend
    if backend in ("inference", "training"):
        weight_GD, bias_G = (linear.weight, linear.bias) if part_GD is None else (part_GD, None)
        dtype = product_dtype(inputs)
        return fast_product(inputs.to(dtype), weight_GD.to(dtype), None if bias_G is None else bias_G.to(dtype))
    if part_GD is not None:
        return F.linear(inputs, part_GD)
    if backend == "int8":
        return product(inputs.flatten(0, -2), prepared(linear), linear.bias).unflatten(0, inputs.shape[:-1])
    return linear(inputs)


def fast_product(inputs: Tensor, weight_GD: Tensor, bias_G: Tensor | None) -> Tensor:
    """`F.linear(inputs, weight, bias)` with `product`, also in the backward pass."""
    # oneDNN is slow with columns of a larger matrix.
    multiply = _Linear.apply if torch.is_grad_enabled() else product
    output_NG = multiply(inputs.flatten(0, -2).contiguous(), weight_GD.contiguous(), bias_G)
    return output_NG.unflatten(0, inputs.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs_ND, weight_GD, bias_G):
        ctx.save_for_backward(inputs_ND, weight_GD)
        return product(inputs_ND, weight_GD, bias_G)

    @staticmethod
    @first_derivative
    def backward(ctx, grad_NG):
        inputs_ND, weight_GD = ctx.saved_tensors
        grad_NG, wanted = grad_NG.contiguous(), ctx.needs_input_grad
        return (
            product(grad_NG, weight_GD.t()) if wanted[0] else None,
            weight_gradient(grad_NG, inputs_ND) if wanted[1] else None,
            grad_NG.sum(0) if wanted[2] else None,
        )


class Packed(NamedTuple):
    """A weight, and its copy in the layout of oneDNN."""

    weight_GD: Tensor
    copy: Tensor


class Transposed(NamedTuple):
    """A copy of a weight whose rows are its columns: the fastest for a single row of inputs."""

    weight_DG: Tensor


Weight = Tensor | Packed | Transposed | Int8Weight


def product(
    inputs_ND: Tensor,
    weight_GD: Weight,
    bias_G: Tensor | None = None,
    *,
    plus_NG: Tensor | None = None,
    clip: float | None = None,
) -> Tensor:
    """`inputs @ weight.T`, with an added bias, an added matrix, or clipped, in one pass. It has no gradient.

    Args:
        plus_NG: the added matrix, which may hold the result afterwards.
    """
    if isinstance(weight_GD, Transposed):
        return _plain_product(inputs_ND, weight_GD.weight_DG, bias_G, plus_NG, clip)
    if isinstance(weight_GD, Int8Weight):
        plus = bias_G if plus_NG is None else plus_NG if bias_G is None else plus_NG + bias_G
        return int8_product(inputs_ND, weight_GD, plus, clip)
    weight_GD, copy = weight_GD if isinstance(weight_GD, Packed) else (weight_GD, weight_GD)
    if not suits_onednn(len(inputs_ND), weight_GD):
        return _plain_product(inputs_ND, weight_GD.t(), bias_G, plus_NG, clip)
    return onednn_product(inputs_ND, copy, bias_G, plus_NG, clip)


def suits_onednn(rows: int, weight_GD: Tensor) -> bool:
    """Whether oneDNN is there for products of so many rows with a weight, and faster than MKL."""
    is_small = rows * weight_GD.numel() < FEW_PRODUCTS
    return not is_small and has_onednn(weight_GD) and not suits_mkl(rows, weight_GD)


def suits_mkl(rows: int, weight_GD: Tensor) -> bool:
    """On Intel, MKL is faster for a single row, and for a transposed weight, as in backward passes."""
    return _is_intel and (rows == 1 or not weight_GD.is_contiguous())


def _plain_product(inputs_ND, weight_DG, bias_G, plus_NG, clip) -> Tensor:
    if _is_intel and 8 <= len(inputs_ND) < 64 and weight_DG.t().is_contiguous():  # faster with the weight on the left
        output_NG = (weight_DG.t() @ inputs_ND.t()).t().contiguous()
        output_NG = output_NG if bias_G is None else output_NG.add_(bias_G)
    elif plus_NG is not None and bias_G is None:
        output_NG, plus_NG = plus_NG.addmm_(inputs_ND, weight_DG), None
    else:
        output_NG = inputs_ND @ weight_DG if bias_G is None else torch.addmm(bias_G, inputs_ND, weight_DG)
    output_NG = output_NG if plus_NG is None else output_NG.add_(plus_NG)
    return output_NG if clip is None else output_NG.clamp_(-clip, clip)


def weight_gradient(grad_NG: Tensor, inputs_ND: Tensor) -> Tensor:
    """`grad.T @ inputs`, `(G, D)`. A tall one of many rows is computed as its transpose, which autograd copies."""
    grad_GN, inputs_DN = grad_NG.t(), inputs_ND.t()
    is_tall = len(grad_GN) > len(inputs_DN) and len(grad_NG) >= MANY_ROWS
    if is_tall or not suits_onednn(len(grad_GN), inputs_DN):
        return product(inputs_DN, grad_GN).t()
    return product(grad_GN, inputs_DN)


def tanh(inputs: Tensor, out: Tensor | None = None) -> Tensor:
    """`tanh(x) = 2 sigmoid(2 x) - 1`, which torch computes five times as fast on CPU. The error is below 2e-7."""
    if inputs.device.type != "cpu" or inputs.dtype != torch.float32 or inputs.numel() < FEW_VALUES:
        return torch.tanh(inputs, out=out)
    return torch.mul(inputs, 2, out=out).sigmoid_().mul_(2).sub_(1)


def prepared(linear: nn.Linear | Int8Linear, rows: int | None = None) -> Weight:
    """The weight of a layer for `product`, without gradients: in 8 bits if the layer is, or if `elmo_backend` says so.

    Args:
        rows: the number of rows of many products. Then a copy of a float weight is kept, as in `packed`.
    """
    if isinstance(linear, Int8Linear):
        return remembered(Int8Weight.pack, linear.weight, linear.scales)
    if forced_backend() == "int8":
        return remembered(_quantized, linear.weight)
    if rows == 1 and linear.weight.dtype == torch.float32:
        return Transposed(remembered(_transposed, linear.weight))
    return linear.weight if rows is None else packed(linear.weight)


def _transposed(weight_GD: Tensor) -> Tensor:
    return weight_GD.detach().t().contiguous()


def _quantized(weight_GD: Tensor) -> Int8Weight:
    return Int8Weight.pack(*int8_rows(weight_GD.detach()))


def packed(weight_GD: Tensor, keep: bool = True) -> Packed:
    """Prepares a weight for many products with few rows.

    Args:
        keep: whether to remember the copy until the parameter changes.
    """
    if not has_onednn(weight_GD):
        return Packed(weight_GD, weight_GD)
    return Packed(weight_GD, remembered(onednn_layout, weight_GD) if keep else onednn_layout(weight_GD))


_is_intel = "Intel" in processor_name()
_remembered = WeakTensorKeyDictionary()  # first parameter -> {function: (stamps, sample, value)}; dies with it


def remembered(function: Callable[..., Any], *parameters: Tensor) -> Any:
    """`function(*parameters)`, remembered until a parameter changes."""
    stamps, sample = [(version(p), p.data_ptr(), p.dtype) for p in parameters], sample_of(parameters)
    values = _remembered.setdefault(parameters[0], {})
    if function not in values or values[function][0] != stamps or not torch.equal(values[function][1], sample):
        values[function] = (stamps, sample, function(*parameters))
    return values[function][2]


def sample_of(parameters: Sequence[Tensor]) -> Tensor:
    """Some values of each parameter, from every row and every column.

    They show writes through `.data`, which do not change the version; a write of a few numbers may still be missed.
    """
    return torch.cat([p.detach().flatten()[:: _sample_step(len(p), p.numel() // len(p))] for p in parameters])


@cache
def _sample_step(rows: int, columns: int) -> int:
    """The largest step over a matrix that leaves out no row (it is shorter than one) and no column."""
    steps = range(min(rows, columns - 1), 1, -1)
    return next((step for step in steps if math.gcd(step, columns) == 1), 1)
