"""The choice of a backend for some layers and inputs, with the reason for it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .int8 import Int8Linear, int8_obstacle
from .onednn import bfloat16_obstacle, has_onednn, onednn_dtypes
from .torch_state import (
    autocast_dtype,
    is_unmodified,
    is_watched,
    may_have_tangents,
    needs_gradients,
    product_dtype,
    sees_values_only,
)

logger = logging.get_logger(__name__)


BACKENDS = ("reference", "inference", "training", "int8", "fused")
DENSE_LAYERS = (nn.Linear, nn.Conv1d, nn.Embedding)
INT8_LAYERS = (nn.Linear, Int8Linear)
HOW_TO_TRAIN = "Train the model in float32 and quantize it afterwards; `model.dequantize()` turns it back."
NOT_ONLY_VALUES = "a tensor has a tangent, belongs to a subclass, or is in a transformation of torch.func"
_forced: ContextVar[str | None] = ContextVar("forced backend", default=None)


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
    if other_device or not (exact or (autocast or backend == "inference") and has_onednn(inputs)):
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


def lstm_backend(linears: list[nn.Module], inputs: Tensor, *states: Tensor) -> str:
    """The name of the kernel for layers with these linear layers, inputs and states."""
    backend, _ = choose_backend(linears, inputs, *states)
    if (obstacle := fused_obstacle(linears, inputs, *states)) is None:
        return "fused"
    if forced_backend() == "fused":
        raise ValueError(f"The backend 'fused' was forced, but {obstacle}. Use elmo_backend('reference').")
    return backend
