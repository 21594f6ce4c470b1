"""Private names of torch: what the fast paths need and torch does not offer in public.

This code stays with a checkpoint while torch changes. So each name is looked up when it is needed, and its answers are
compared once with the plain definition. A name that is missing, or has changed, costs speed and gives one warning. The
model still loads, and its numbers are the same.

Shape suffixes: N rows; D width of the input; G width of the output.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.utils import logging

logger = logging.get_logger(__name__)

LINEAR, LAYOUT = "ops.mkldnn._linear_pointwise", "ops.mkldnn._reorder_linear_weight"
HAS_BFLOAT16 = "ops.mkldnn._is_mkldnn_bf16_supported"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of a module
DISPATCH_MODE, TRANSFORMATION = (
    "utils._python_dispatch._get_current_dispatch_mode",
    "_C._functorch.peek_interpreter_stack",
)


@cache
def private(name: str) -> Any:
    """`torch.NAME`, or `None` if this release of torch has no such name."""
    try:
        return reduce(getattr, name.split("."), torch)
    except (AttributeError, RuntimeError):
        return None


def is_right(name: str, check: Callable[[], bool]) -> bool:
    """Whether a check of a private name passes. If not, a warning says so."""
    try:
        with ThreadPoolExecutor(1) as thread:  # a new thread has none of the modes of the caller
            right = thread.submit(torch.no_grad()(check)).result()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        right = False
    if not right:
        logger.warning_once(
            f"torch {torch.__version__} has no `torch.{name}` that works as expected, so ELMo is slower. Its numbers "
            "are the same. A newer modeling_elmo, or newer code in the model's folder, may know this release of torch."
        )
    return right


@cache
def question(name: str) -> Callable[[], bool]:
    """A private function that answers yes or no; where it cannot be called, one that says no."""
    return private(name) if is_right(name, lambda: private(name)() is not NotImplemented) else bool


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own, or torch does not tell where they are."""
    return any(getattr(module, name, True) for name in HOOKS)


def sees_values_only(*tensors: Tensor) -> bool:
    """Whether a computation with these tensors is of values and their gradients, and of nothing else.

    Fast paths compute no more. The definition also computes tangents, and subclasses of tensors see its operators.
    """
    for tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter):
            return False
    return _modes()[1]() is None and not _have_tangents(tensors)


def may_have_tangents(*tensors: Tensor) -> bool:
    """Whether a tensor has a tangent (forward mode), or a transformation of `torch.func` may hide one."""
    return _modes()[1]() not in (None, NotImplemented) or _have_tangents(tensors)


def _have_tangents(tensors: Iterable[Tensor]) -> bool:
    is_forward_mode = getattr(forward_ad, "_current_level", 0) >= 0  # to ask each tensor takes time
    return is_forward_mode and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def is_watched() -> bool:
    """Whether a dispatch mode, such as `FlopCounterMode`, sees the operators of the calling thread."""
    return _modes()[0]() is not None


@cache
def _modes() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Functions that return the calling thread's dispatch mode, and its transformation, or `None`.

    Where torch does not tell, they return `NotImplemented`, so that the definition computes everything.
    """
    mode, transformation = private(DISPATCH_MODE), private(TRANSFORMATION)

    def check_mode() -> bool:
        outside = mode()
        with private("utils._python_dispatch.TorchDispatchMode")():
            return outside is None and mode() is not None

    def check_transformation() -> bool:
        seen = [transformation()]

        def look(row: Tensor) -> Tensor:
            seen.append(transformation())
            return row

        torch.func.vmap(look)(torch.zeros(1))
        return seen[0] is None and seen[1] is not None

    checks = (mode, DISPATCH_MODE, check_mode), (transformation, TRANSFORMATION, check_transformation)
    first, second = (found if is_right(name, check) else lambda: NotImplemented for found, name, check in checks)
    return first, second


def onednn_product(
    inputs_ND: Tensor, weight_GD: Tensor, bias_G: Tensor | None, plus_NG: Tensor | None, clip: float | None
) -> Tensor:
    """`F.linear` by oneDNN, with an added matrix or clipped, for the dtypes of `onednn_dtypes`. It has no gradient."""
    if plus_NG is not None:
        return private(LINEAR).binary(inputs_ND, plus_NG, weight_GD, bias_G, "add")
    then, bounds = ("none", []) if clip is None else ("hardtanh", [-clip, clip])
    return private(LINEAR)(inputs_ND, weight_GD, bias_G, then, bounds, "")


def onednn_layout(weight_GD: Tensor) -> Tensor:
    """A copy of a weight in the layout of oneDNN."""
    return private(LAYOUT)(weight_GD.detach(), 32)  # 32: a typical number of rows


@cache
def onednn_dtypes() -> frozenset[torch.dtype]:
    """The dtypes in which oneDNN is there and equals `F.linear`. bfloat16 needs a CPU with its instructions."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    dtypes = (torch.float32, torch.bfloat16) if question(HAS_BFLOAT16)() else (torch.float32,)
    return frozenset(dtype for dtype in dtypes if is_right(LINEAR, partial(_equals_linear, dtype)))


def _equals_linear(dtype: torch.dtype) -> bool:
    inputs, weight, bias, plus = (torch.linspace(-2, 2, n).to(dtype) for n in (24, 40, 5, 15))
    inputs, weight, plus = inputs.view(3, 8), weight.view(5, 8).sin(), plus.view(3, 5)
    expected = F.linear(inputs, weight, bias).float()
    close = partial(torch.allclose, rtol=0.0, atol=1e-5 if dtype == torch.float32 else 0.1)
    return all(
        close(onednn_product(inputs, stored, bias, None, None).float(), expected)
        and close(onednn_product(inputs, stored, bias, plus, None).float(), expected + plus.float())
        and close(onednn_product(inputs, stored, bias, None, 1.0).float(), expected.clamp(-1, 1))
        for stored in (weight, onednn_layout(weight))
    )
