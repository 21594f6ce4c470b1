"""The choice of a backend for some layers and inputs, with the reason for it.

- `"reference"`: the definition, plain PyTorch with autograd, for every device.
- `"inference"`: on CPU, in place, without gradients.
- `"training"`: on CPU, with a hand-written backward pass.
- `"int8"`: linear layers in 8 bits, on CPU, without gradients.
- `"fused"`: an LSTM on an accelerator, both directions at once, with a hand-written backward pass.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

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

BACKENDS = ("reference", "int8")
LAYER_TYPES: dict[str, tuple[type[nn.Module], ...]] = {  # whose parameters a backend reads
    "inference": (nn.Linear, nn.Conv1d, nn.Embedding),
    "training": (nn.Linear, nn.Conv1d, nn.Embedding),
    "int8": (nn.Linear, Int8Linear),
    "fused": (nn.Linear,),
}
HOW_TO_TRAIN = "Train the model in float32 and quantize it afterwards; `model.dequantize()` turns it back."
NOT_ONLY_VALUES = "a tensor has a tangent, belongs to a subclass, or is in a transformation of torch.func"
_forced: ContextVar[str | None] = ContextVar("forced backend", default=None)


@contextmanager
def elmo_backend(name: str) -> Iterator[None]:
    """Forces a backend inside the block.

    - `"reference"`: the definition, plain PyTorch with autograd. It needs the least memory: no second copy of a weight.
    - `"int8"`: linear layers in 8 bits, on CPU, without gradients. Float weights are kept, too: a trial of `quantize`.

    By default, the fastest kernel computes that is possible for a device, a dtype, and what is asked for. Tangents,
    transformations of `torch.func`, and modes that watch operators (`FlopCounterMode`) get the definition.

    Raises:
        ValueError: there is no such backend, or, inside the block, 8 bits are not possible.
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


class Plan(NamedTuple):
    """The backend that computes, and the reason for it."""

    backend: str
    reason: str


def make_plan(layers: Iterable[nn.Module], inputs: Tensor, *states: Tensor, is_lstm: bool = False) -> Plan:
    """The backend for these layers, inputs and states.

    Raises:
        ValueError: `elmo_backend` asks for 8 bits, which are not possible; or a quantized layer needs gradients.
    """
    layers, forced = list(layers), forced_backend()
    differentiable = needs_gradients(layers, inputs, *states)
    is_quantized = any(isinstance(layer, Int8Linear) for layer in layers)
    if is_quantized and (differentiable or may_have_tangents(inputs, *states)):
        raise ValueError(f"A quantized layer has no gradients. {HOW_TO_TRAIN}")
    if forced == "reference":
        return Plan("reference", "forced")
    backend = _fastest(inputs, differentiable, is_lstm)
    is_linear = bool(layers) and all(isinstance(layer, LAYER_TYPES["int8"]) for layer in layers)
    if is_quantized or (forced == "int8" and is_linear):
        backend = "int8"
    obstacle = _obstacle(backend, differentiable, layers, inputs, *states)
    if obstacle is None:
        return Plan(backend, f"fastest on {inputs.device.type}")
    if backend == forced:
        raise ValueError(f"The backend 'int8' was forced, but {obstacle}. Use elmo_backend('reference').")
    if inputs.device.type == "cpu" and product_dtype(inputs) == torch.bfloat16 and (slow := bfloat16_obstacle()):
        logger.warning_once(f"Products in bfloat16 are slower here than in float32: {slow}.")
    return Plan("reference", obstacle)


def _fastest(inputs: Tensor, differentiable: bool, is_lstm: bool) -> str:
    """The backend of a device, if nothing speaks against it."""
    if is_lstm and is_accelerator(inputs.device):
        return "fused"
    # Under autocast, products are in another dtype than states, which only the kernels of training can do.
    return "training" if differentiable or autocast_dtype(inputs.device) else "inference"


def is_accelerator(device: torch.device) -> bool:
    """Whether an LSTM takes the path of few launches, which was never measured on Apple's devices."""
    return device.type not in ("cpu", "meta", "mps")


def _obstacle(
    backend: str, differentiable: bool, layers: list[nn.Module], inputs: Tensor, *states: Tensor
) -> str | None:
    """The reason why a backend is not possible, or `None`."""
    if torch.compiler.is_compiling():
        return "the model is being compiled"
    if forced_backend() is None and is_watched():
        return "a mode of torch watches the operators"
    if not sees_values_only(inputs, *states):
        return NOT_ONLY_VALUES
    autocast = autocast_dtype(inputs.device)
    if backend != "fused" and not _is_built_for(backend, inputs, autocast is not None):
        return f"{backend} is not built for {inputs.dtype} on {inputs.device}"
    if backend == "training" and autocast and product_dtype(inputs) not in onednn_dtypes():
        return f"{backend} is not built for autocast in {autocast}"
    if backend == "int8" and differentiable:
        return "gradients are needed"
    dtypes = {inputs.dtype}
    if backend == "int8":
        dtypes.add(torch.int8)
    elif autocast:
        dtypes.add(torch.float32)
    for layer in layers:
        if not is_unmodified(layer, LAYER_TYPES[backend]) or layer.weight.dtype not in dtypes:
            return "a layer is wrapped, hooked or quantized, or its dtype is not the inputs'"
    return int8_obstacle() if backend == "int8" else None


def _is_built_for(backend: str, inputs: Tensor, has_autocast: bool) -> bool:
    if inputs.device.type != "cpu":
        return False
    if backend == "int8":
        return inputs.dtype == torch.float32
    is_exact = inputs.dtype in (torch.float32, torch.float64)
    return is_exact or ((has_autocast or backend == "inference") and has_onednn(inputs))
