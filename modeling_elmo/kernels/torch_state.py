"""What torch knows about a call: hooks, tangents, modes that watch operators, dtypes, and its private names.

This code stays with a checkpoint while torch changes. So each private name is looked up when it is needed, and its
answers are compared once with the plain definition. A name that is missing, or has changed, costs speed and gives one
warning. The model still loads, and its numbers are the same.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, reduce, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.utils import logging

logger = logging.get_logger(__name__)


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


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of a module
DISPATCH_MODE = "utils._python_dispatch._get_current_dispatch_mode"
TRANSFORMATION = "_C._functorch.peek_interpreter_stack"
GLOBAL_HOOKS = "nn.modules.module._has_any_global_hook"


def fetched(module: nn.Module, name: str) -> Tensor:
    """A parameter of a module outside of the module's call, where `device_map` may keep it on disk."""
    hook = getattr(module, "_hf_hook", None)  # accelerate's
    if hook is None or not getattr(module, name).is_meta:
        return getattr(module, name)
    hook.pre_forward(module)
    parameter = getattr(module, name)
    hook.post_forward(module, None)
    return parameter


def needs_gradients(layers: Iterable[nn.Module], *tensors: Tensor) -> bool:
    """Whether autograd wants the gradient of a tensor or of a parameter."""
    parameters = (parameter for layer in layers for parameter in layer.parameters())
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *parameters))


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own, or torch does not tell where they are."""
    return any(getattr(module, name, True) for name in HOOKS)


def is_hooked(module: nn.Module) -> bool:
    """Whether a part of a token encoder has a hook, which sees every position of a text, and not distinct words.

    Hooks of all modules (`register_module_forward_hook`) do not count: profilers use them to see what is computed.
    """
    return has_hooks(module) or any(map(is_hooked, module.children()))


def sees_values_only(*tensors: Tensor) -> bool:
    """Whether a computation with these tensors needs values and gradients only, which is all that kernels compute.

    The definition also computes tangents, and its operators are visible to subclasses of tensors.
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


def is_unmodified(layer: nn.Module, types: tuple[type[nn.Module], ...]) -> bool:
    """Whether a kernel may read the layer's own parameters directly.

    Adapters, quantizers and offloading change a layer's type, its parameters or its hooks, and a replica of
    `nn.DataParallel` has no parameters. Then it must be called.
    """
    hooked = has_hooks(layer) or question(GLOBAL_HOOKS)()
    own = layer.__dict__
    assigned = "forward" in own or any(isinstance(own.get(name), Tensor) for name in ("weight", "bias"))
    changed = hooked or assigned or getattr(layer, "_is_replica", False)
    own_parameters = (p for p in own.get("_parameters", {}).values() if p is not None)
    return type(layer) in types and not changed and all(type(p) is nn.Parameter for p in own_parameters)


def is_exporting() -> bool:
    """Whether `torch.export` traces the model. Releases of torch before 2.7 cannot tell, and cannot export it."""
    return getattr(torch.compiler, "is_exporting", bool)()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a `DTensor`, a class that builds of torch without `torch.distributed` lack."""
    return hasattr(tensor, "full_tensor")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on a device; `None` where it is off or does not exist."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of matrix products with a tensor: its own, or the dtype of autocast."""
    dtype = autocast_dtype(tensor.device)
    return tensor.dtype if dtype is None or tensor.dtype == torch.float64 else dtype


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of a function that has no second derivative: to compute one raises an error.

    torch's `once_differentiable` lets it pass where the incoming gradient is a constant, and a penalty of the gradient
    would then have a wrong gradient.
    """

    @wraps(backward)
    def refused(ctx, *gradients):
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # without `create_graph`
            return results
        results = results if isinstance(results, tuple) else (results,)
        found = [each for each in results if each is not None]
        given = [*gradients, *ctx.saved_tensors, gradients[0].new_zeros(0).requires_grad_()]
        values = iter(_Refused.apply(len(found), *found, *given))
        return tuple(None if each is None else next(values) for each in results)

    return refused


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, number, *tensors):
        return tuple(tensor.view_as(tensor) for tensor in tensors[:number])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            'This computation has no second derivative. For the biLM, compute inside `with elmo_backend("reference"):`.'
        )


def version(parameter: Tensor) -> float:
    """A number that increases with every in-place change."""
    # Without a version, a new NaN at each call: it differs from all others, so that nothing is remembered.
    return 0 if parameter.is_inference() else getattr(parameter, "_version", float("nan"))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on an accelerator, without waiting: only pinned memory is copied in the background.

    Parameters on `meta` are offloaded, and their modules move their inputs themselves. MPS copies in the background
    from memory that may be freed before (pytorch issue 139550), and other devices may have no pinned memory: they wait.
    """
    if tensor.device.type != "cpu" or device.type in ("cpu", "meta"):
        return tensor
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type or device.type == "mps":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device_at_once(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """As `to_device` of each of some tensors `(N,)` of one dtype, in one copy."""
    if tensors[0].device == device:
        return tensors
    return to_device(torch.cat(tuple(tensors)), device).split([len(tensor) for tensor in tensors])
