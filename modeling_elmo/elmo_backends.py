"""Choice of a backend for each module, matrix products of the fast backends, and independent calls at once on CPU.

torch computes `F.linear` in float32 with MKL, which is slow for few rows and, on AMD, for any number of rows. oneDNN is
in the same wheel and exact. Its operators have no gradients, and they are private to torch (`elmo_operators.py`).

A step of an LSTM is a few products of few rows. Threads that share such a product wait for each other several times a
step. The two directions do not need each other, so each gets threads of its own, and they wait once, at the end.

Shape suffixes: N rows; D width of the input; G width of the output.
"""

import ctypes
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import cache, wraps
from pathlib import Path
from threading import Semaphore
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils import logging

from .elmo_operators import (
    Int8Linear,
    Int8Weight,
    int8_obstacle,
    int8_product,
    int8_rows,
    is_right,
    onednn_dtypes,
    onednn_layout,
    onednn_product,
    private,
    question,
)

logger = logging.get_logger(__name__)

BACKENDS = ("reference", "inference", "training", "int8", "fused")
DENSE_LAYERS = (nn.Linear, nn.Conv1d, nn.Embedding)
INT8_LAYERS = (nn.Linear, Int8Linear)
HOW_TO_TRAIN = "Train the model in float32 and quantize it afterwards; `model.dequantize()` turns it back."
FEW_PRODUCTS = 2**20  # with fewer multiplications, oneDNN's start (0.1 ms) costs more than it saves
MANY_ROWS = 256  # with fewer, the copy of a transposed gradient costs more than the faster product saves
FEW_VALUES = 2**12  # starting three operators costs more than one that is slower
FEW_MULTIPLICATIONS = 3e6  # of a step: below, one thread is faster than two that work at once
FEW_IN_TRAINING = 10e6
HAS_AVX512_BFLOAT16 = "cpu._is_avx512_bf16_supported"
PROFILER = "autograd._profiler_enabled"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of a module
DISPATCH_MODE = "utils._python_dispatch._get_current_dispatch_mode"
TRANSFORMATION = "_C._functorch.peek_interpreter_stack"
GLOBAL_HOOKS = "nn.modules.module._has_any_global_hook"
NOT_ONLY_VALUES = "a tensor has a tangent, is of a subclass, or is in a transformation of torch.func"
_forced: ContextVar[str | None] = ContextVar("forced backend", default=None)
_is_counted: ContextVar[bool] = ContextVar("counted among the callers", default=False)
_slots: Semaphore
_callers: set[object] = set()  # calls of models that run now, in all threads
_helpers: ThreadPoolExecutor
T = TypeVar("T")


@contextmanager
def elmo_backend(name: str) -> Iterator[None]:
    """Forces one of `BACKENDS` inside the block. A backend that is not possible raises an error.

    - `"reference"`: the definition, plain PyTorch with autograd. It needs the least memory: no second copy of a weight.
    - `"inference"`: in place, without gradients.
    - `"training"`: with a hand-written backward pass.
    - `"int8"`: linear layers in 8 bits, on CPU, without gradients. Float weights are kept, too: a trial of `quantize`.
    - `"fused"`: the LSTM with both directions at once, fused cells (triton on CUDA) and a hand-written backward pass.

    By default, CPUs use `"inference"` or `"training"` where possible, and `"int8"` for layers of a quantized model.
    LSTMs on accelerators use `"fused"` where possible. All else uses `"reference"`: also tangents, transformations of
    `torch.func`, and modes that watch operators (`FlopCounterMode`), unless a backend is forced. Under autocast in
    bfloat16, CPUs with oneDNN use `"training"`, also without gradients.
    """
    if name not in BACKENDS:
        raise ValueError(f"There is no backend {name!r}; pass one of {', '.join(BACKENDS)}.")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced_backend() -> str | None:
    """The backend of the innermost `elmo_backend` block."""
    return _forced.get()


def choose_backend(layers: Iterable[nn.Module], inputs: Tensor, *states: Tensor) -> tuple[str, str]:
    """The backend for these layers, inputs and states, and the reason for the choice.

    Raises:
        ValueError: `elmo_backend` forces a backend that is not possible, or gradients of a quantized layer are needed.
    """
    layers, forced = list(layers), forced_backend()
    differentiable = needs_gradients(layers, inputs, *states)
    quantized = any(isinstance(layer, Int8Linear) for layer in layers)
    differentiated = differentiable or (quantized and may_have_tangents(inputs, *states))
    if quantized and (differentiated or forced not in (None, "reference", "int8")):
        wish = "gradients" if differentiated else f"backend {forced!r}"
        raise ValueError(f"A quantized layer has no {wish}. {HOW_TO_TRAIN}")
    if forced == "reference":
        return forced, "forced"
    suitable = "training" if differentiable or autocast_dtype(inputs.device) else "inference"
    is_linear = bool(layers) and all(isinstance(layer, INT8_LAYERS) for layer in layers)
    if quantized or (forced == "int8" and is_linear):
        wanted, obstacle = "int8", _int8_obstacle(differentiable, layers, inputs, *states)
    else:
        wanted = forced if forced in ("inference", "training") else suitable
        obstacle = _obstacle(wanted, differentiable, layers, inputs, *states)
    if obstacle and wanted == forced:
        raise ValueError(f"The backend {forced!r} was forced, but {obstacle}. Use elmo_backend('reference').")
    if obstacle:
        if inputs.device.type == "cpu" and product_dtype(inputs) == torch.bfloat16 and (slow := bfloat16_obstacle()):
            logger.warning_once(f"Products in bfloat16 are slower here than in float32: {slow}.")
        return "reference", obstacle
    return wanted, "forced" if wanted == forced else f"CPU {wanted}"


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


def _obstacle_of_all(*tensors: Tensor) -> str | None:
    """The reason why the definition must compute with these tensors, or `None`."""
    if torch.compiler.is_compiling():
        return "the model is being compiled"
    if forced_backend() is None and is_watched():
        return "a mode of torch watches the operators"
    return None if sees_values_only(*tensors) else NOT_ONLY_VALUES


def _obstacle(
    backend: str, differentiable: bool, layers: list[nn.Module], inputs: Tensor, *states: Tensor
) -> str | None:
    """The reason why a backend is not possible, or `None`."""
    if obstacle := _obstacle_of_all(inputs, *states):
        return obstacle
    exact = inputs.dtype in (torch.float32, torch.float64)
    autocast = autocast_dtype(inputs.device)
    other_device = inputs.device.type != "cpu" and forced_backend() != backend
    if other_device or not (exact or (autocast or backend == "inference") and _has_onednn(inputs)):
        return f"{backend} is not built for {inputs.dtype} on {inputs.device}"
    if autocast and (backend == "inference" or product_dtype(inputs) not in onednn_dtypes()):
        return f"{backend} is not built for autocast in {autocast}"
    if backend == "inference" and differentiable:
        return "gradients are needed"
    dtypes = {inputs.dtype, torch.float32} if autocast else {inputs.dtype}
    if not all(is_unmodified(layer, DENSE_LAYERS) and layer.weight.dtype in dtypes for layer in layers):
        return "a layer is wrapped, hooked or quantized, or its dtype is not the inputs'"
    return None


def fused_obstacle(layers: Iterable[nn.Module], inputs: Tensor, *states: Tensor) -> str | None:
    """The reason why an LSTM with these linear layers does not take the path of accelerators, or `None`."""
    forced = forced_backend()
    if forced not in (None, "fused"):
        return f"{forced!r} is forced"
    if forced is None and inputs.device.type in ("cpu", "meta", "mps"):
        return f"fused is not built for {inputs.device}"
    if obstacle := _obstacle_of_all(inputs, *states):
        return obstacle
    dtypes = {inputs.dtype, torch.float32} if autocast_dtype(inputs.device) else {inputs.dtype}
    if not all(is_unmodified(layer, (nn.Linear,)) and layer.weight.dtype in dtypes for layer in layers):
        return "a layer is wrapped, hooked or quantized, or its dtype is not the inputs'"
    return None


def _int8_obstacle(differentiable: bool, layers: list[nn.Module], inputs: Tensor, *states: Tensor) -> str | None:
    if inputs.device.type != "cpu" or inputs.dtype != torch.float32:
        return f"int8 is not built for {inputs.dtype} on {inputs.device}"
    if obstacle := _obstacle_of_all(inputs, *states):
        return obstacle
    if differentiable:
        return "gradients are needed"
    dtypes = {torch.float32, torch.int8}
    if not all(is_unmodified(layer, INT8_LAYERS) and layer.weight.dtype in dtypes for layer in layers):
        return "a layer is wrapped or hooked, or its dtype is not float32"
    return int8_obstacle()


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own, or torch does not tell where they are."""
    return any(getattr(module, name, True) for name in HOOKS)


def is_hooked(module: nn.Module) -> bool:
    """Whether a part of a token encoder has a hook, which sees every position of a text, and not distinct words.

    Hooks of all modules (`register_module_forward_hook`) do not count: profilers use them to see what is computed.
    """
    return has_hooks(module) or any(map(is_hooked, module.children()))


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
    """The dtype of matrix products with a tensor: its own, or that of autocast."""
    dtype = autocast_dtype(tensor.device)
    return tensor.dtype if dtype is None or tensor.dtype == torch.float64 else dtype


def fast_linear(linear: nn.Linear, inputs: Tensor, part_GD: Tensor | None = None) -> Tensor:
    """`linear(inputs)`, with `product` where possible. With columns of its weight, `part_GD`, it adds no bias.

    Args:
        inputs: `(..., width)`.
    """
    backend, _ = choose_backend([linear], inputs)
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
    return not is_small and _has_onednn(weight_GD) and not suits_mkl(rows, weight_GD)


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
    if inputs.dtype != torch.float32 or inputs.numel() < FEW_VALUES:
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
    if not _has_onednn(weight_GD):
        return Packed(weight_GD, weight_GD)
    return Packed(weight_GD, remembered(onednn_layout, weight_GD) if keep else onednn_layout(weight_GD))


def processor_name() -> str:
    """The processor's name as torch knows it; older releases of torch do not, and the system may know less."""
    capabilities: dict[str, str] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities.get("cpu_name") or platform.processor() or platform.machine()


_is_intel = "Intel" in processor_name()


def bfloat16_obstacle() -> str | None:
    """The reason why this machine's CPU has no fast products in bfloat16, or `None`."""
    if not onednn_dtypes():
        return "this build of torch has no products of oneDNN"
    has_instructions = torch.bfloat16 in onednn_dtypes()
    if has_instructions and platform.machine().lower() in ("x86_64", "amd64"):
        # There oneDNN also emulates bfloat16 with older instructions, which takes longer than float32.
        has_instructions = question(HAS_AVX512_BFLOAT16)()
    return None if has_instructions else "this processor has no instructions for bfloat16"


def _has_onednn(tensor: Tensor) -> bool:
    return tensor.dtype in onednn_dtypes() and tensor.device.type == "cpu"


_remembered = WeakTensorKeyDictionary()  # first parameter -> {function: (stamps, sample, value)}; dies with it


def remembered(function: Callable[..., Any], *parameters: Tensor) -> Any:
    """`function(*parameters)`, remembered until a parameter changes."""
    stamps, sample = [(version(p), p.data_ptr(), p.dtype) for p in parameters], sample_of(parameters)
    values = _remembered.setdefault(parameters[0], {})
    if function not in values or values[function][0] != stamps or not torch.equal(values[function][1], sample):
        values[function] = (stamps, sample, function(*parameters))
    return values[function][2]


def version(parameter: Tensor) -> float:
    """A number that increases with every in-place change."""
    # Without a version, a new NaN at each call: it differs from all others, so that nothing is remembered.
    return 0 if parameter.is_inference() else getattr(parameter, "_version", float("nan"))


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


@contextmanager
def own_share() -> Iterator[None]:
    """Callers share the cores: no more compute at a time, each with its part of torch's threads.

    Others wait for a second at most, because one that computes may wait for them.
    """
    if _is_counted.get() or torch.compiler.is_compiling():
        yield
        return
    token, marker, slots = _is_counted.set(True), object(), _slots
    has_slot = slots.acquire(timeout=1)
    _callers.add(marker)
    try:
        with _own_threads(max(1, torch.get_num_threads() // len(_callers))):
            yield
    finally:
        _callers.discard(marker)
        if has_slot:
            slots.release()
        _is_counted.reset(token)


def at_once(calls: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """The results of calls that run at the same time, each with `threads` threads of torch.

    The last call runs in the caller's thread. So does any other that no thread was free for when the last one ended, or
    that comes while the interpreter ends. The caller's gradient mode, autocast and context variables hold in all of
    them. An error of a call is raised when all have ended.
    """
    *others, last = calls
    futures = [_submitted(call, threads) for call in others]
    try:
        with _own_threads(threads):
            found = last()
    finally:
        wait([future for future in futures if not future.cancel()])
    parallel = zip(futures, others, strict=True)
    return [*(call() if future.cancelled() else future.result() for future, call in parallel), found]


def _submitted(call: Callable[[], T], threads: int) -> Future:
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu")

    def run(context: Context) -> T:
        inference, gradients, autocast = modes
        with (
            _own_threads(threads),
            torch.inference_mode(inference),
            torch.set_grad_enabled(gradients),
            torch.autocast("cpu", dtype, enabled=autocast),
        ):
            return context.run(call)

    try:
        return _helpers.submit(run, copy_context())
    except RuntimeError:  # the interpreter ends, and starts no more threads
        return Future()


def can_use_threads(device: torch.device) -> bool:
    """Whether torch has several threads on this device, and nothing that watches operators sees its own thread only."""
    if device.type != "cpu" or torch.get_num_threads() == 1 or torch.compiler.is_compiling():
        return False
    return not is_watched() and not question(PROFILER)() and _set_own_threads() is not None


@contextmanager
def _own_threads(number: int) -> Iterator[None]:
    """Sets the number of threads of torch, and of MKL inside it, in the calling thread, and in no other."""
    before = torch.get_num_threads()
    set_number = None if before == number else _set_own_threads()
    if set_number is None:
        yield
        return
    set_number(number)
    before_in_mkl = _set_own_mkl_threads()(number)
    try:
        yield
    finally:
        set_number(before)
        _set_own_mkl_threads()(before_in_mkl)


@cache
def _set_own_threads() -> Callable[[int], Any] | None:
    """OpenMP's function for the calling thread, or `None` if torch's threads are others; torch has none for one."""
    try:
        set_number = ctypes.CDLL("libiomp5md" if sys.platform == "win32" else None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return None
    before = torch.get_num_threads()  # which also gives this thread its first number, if it has none
    set_number(before + 1)
    is_ours = torch.get_num_threads() == before + 1
    set_number(before)
    return set_number if is_ours else None


@cache
def _set_own_mkl_threads() -> Callable[[int], Any]:
    """MKL's function for the calling thread: `torch.set_num_threads` gives it a number of its own."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).MKL_Set_Num_Threads_Local
    except (AttributeError, OSError):
        return lambda number: number


def _start_helpers():
    global _helpers, _slots
    _slots = Semaphore(os.cpu_count() or 1)
    _callers.clear()
    _helpers = ThreadPoolExecutor(os.cpu_count(), "elmo")  # its threads start with the calls


_start_helpers()
if hasattr(os, "register_at_fork"):  # a forked process has none of its parent's threads
    os.register_at_fork(after_in_child=_start_helpers)
