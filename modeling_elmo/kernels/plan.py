"""The choice of a backend for some layers and inputs, with the reason for it.

- `"reference"`: the definition, plain PyTorch with autograd, for every device.
- `"inference"`: on CPU, in place, without gradients.
- `"training"`: on CPU, with a hand-written backward pass.
- `"int8"`: linear layers in 8 bits, on CPU, without gradients.
- `"fused"`: an LSTM on an accelerator, both directions at once, with a hand-written backward pass.
- `"persistent"`: the same on CUDA, a whole layer in one launch.
- `"grouped"`: the same with a barrier for each block of sequences, a trial.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
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

BACKENDS = ("reference", "int8", "trial")
LAYER_TYPES: dict[str, tuple[type[nn.Module], ...]] = {  # whose parameters a backend reads
    "inference": (nn.Linear, nn.Conv1d, nn.Embedding),
    "training": (nn.Linear, nn.Conv1d, nn.Embedding),
    "int8": (nn.Linear, Int8Linear),
    "fused": (nn.Linear,),
}
LAYER_UNIT = 16  # of cells and outputs: the side of the smallest tile of a tensor core
MEASURED_CAPABILITY = (9, 0)  # of the H100, the card whose measurements decided between "fused" and "persistent"
MANY_CELLS, MANY_SEQUENCES = 2048, 256  # beyond both, the products of a step by themselves fill the card
REFUSALS: dict[torch.device | None, str] = {}  # why a device, or all of them, cannot run a layer in one launch
HOW_TO_TRAIN = "Train the model in float32 and quantize it afterwards; `model.dequantize()` turns it back."
NOT_ONLY_VALUES = "a tensor has a tangent, belongs to a subclass, or is in a transformation of torch.func"
_forced: ContextVar[str | None] = ContextVar("forced backend", default=None)


@contextmanager
def elmo_backend(name: str) -> Iterator[None]:
    """Forces a backend inside the block.

    - `"reference"`: the definition, plain PyTorch with autograd. It needs the least memory: no second copy of a weight.
    - `"int8"`: linear layers in 8 bits, on CPU, without gradients. It keeps the float weights: a trial of `quantize`.
    - `"trial"`: on CUDA, the newest kernels, which no card has confirmed yet. Compare their numbers with the default's.

    By default, the fastest kernel computes that is possible for a device, a dtype, and what is asked for. Tangents,
    transformations of `torch.func`, modes that watch operators (`FlopCounterMode`) and hooks on the token encoder get
    the definition, which is slower. torch's profiler sees one thread that computes all.

    Raises:
        ValueError: the backend does not exist, or, inside the block, it is not possible.
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

    Args:
        states: of an LSTM, its hidden states `(..., sequences, projection_size)` and its cells come first.

    Raises:
        ValueError: `elmo_backend` asks for what is not possible; or a quantized layer needs gradients.
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
    if is_lstm and forced == "trial":
        backend, obstacle = forced, obstacle or _layer_obstacle(inputs, *states[:2])
    if backend == forced and obstacle is not None:
        raise ValueError(f"The backend {forced!r} was forced, but {obstacle}. Use elmo_backend('reference').")
    if backend == "trial":
        return Plan("grouped", "forced")
    if backend == "fused" and obstacle is None:
        slow = _layer_obstacle(inputs, *states[:2])
        return Plan("persistent", f"fastest on {inputs.device.type}") if slow is None else Plan("fused", slow)
    if obstacle is None:
        return Plan(backend, f"fastest on {inputs.device.type}")
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


def _layer_obstacle(inputs: Tensor, hidden: Tensor, cells: Tensor) -> str | None:
    """The reason why a layer of an LSTM does not run in one launch, or `None`."""
    device, dtype, sequences = inputs.device, product_dtype(inputs), cells.shape[-2]
    if device.type != "cuda" or torch.version.hip:
        return f"a layer in one launch is built for CUDA, not for {device.type}"
    if refusal := REFUSALS.get(None) or REFUSALS.get(device):
        return refusal
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"tensor cores do not multiply {dtype}"
    for size in (cells.shape[-1], hidden.shape[-1]):
        if size % LAYER_UNIT:
            return f"tiles of {LAYER_UNIT} do not fill a width of {size}"
    capability = _capability(device)
    if capability < (8, 0):
        return "a compute capability below 8.0 has no tensor cores for bfloat16"
    if forced_backend() == "trial":
        return None
    if dtype != torch.bfloat16 or capability != MEASURED_CAPABILITY:
        card = ".".join(map(str, capability))
        return f"in {dtype} with compute capability {card}, a layer in one launch is a trial: elmo_backend('trial')"
    if cells.shape[-1] >= MANY_CELLS and sequences > MANY_SEQUENCES:
        return f"{sequences} sequences of {cells.shape[-1]} cells fill the device at each step"
    return None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _is_built_for(backend: str, inputs: Tensor, has_autocast: bool) -> bool:
    if inputs.device.type != "cpu":
        return False
    if backend == "int8":
        return inputs.dtype == torch.float32
    is_exact = inputs.dtype in (torch.float32, torch.float64)
    return is_exact or ((has_autocast or backend == "inference") and has_onednn(inputs))
