"""How the two LSTMs of a biLM run: by which kernel, and both at once where that is faster.

`ELMoModel.run` is the definition. For the shape suffixes, see `kernels/sequences.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels.lstm_cpu import inference_lstm, threaded_layer, training_lstm
from .kernels.lstm_cuda import (
    fused_layer,
    fused_lstm,
    grouped_layer,
    grouped_lstm,
    persistent_layer,
    persistent_lstm,
)
from .kernels.plan import make_plan
from .kernels.sequences import Kernel, LSTMOutput, Stream
from .kernels.threads import at_once, can_use_threads
from .kernels.torch_state import needs_gradients

FEW_MULTIPLICATIONS = 3e6  # of a step: below, one thread is faster than two that work at once
FEW_IN_TRAINING = 10e6
KERNELS: dict[str, Kernel] = {
    "inference": inference_lstm,
    "training": training_lstm,
    "int8": inference_lstm,
    "fused": fused_lstm,
    "persistent": persistent_lstm,
    "grouped": grouped_lstm,
}  # of all plans but "reference"
LayersKernel = Callable[..., LSTMOutput]  # computes the same layer of both directions
LAYERS_KERNELS: dict[str, LayersKernel] = {
    "fused": fused_layer,
    "persistent": persistent_layer,
    "grouped": grouped_layer,
}
DirectionOutput = tuple[list[Tensor], Tensor, Tensor]  # as `ELMoLSTM.forward`


def lstm_kernel(linears: list[nn.Module], inputs: Tensor, *states: Tensor) -> Kernel | None:
    """The kernel for a layer with these linear layers, inputs and states; `None` for the definition."""
    return KERNELS.get(make_plan(linears, inputs, *states, is_lstm=True).backend)


def run_at_once(
    lstms: Sequence[Any], streams: Sequence[Stream], starts: Sequence[Sequence[Tensor]]
) -> list[DirectionOutput] | None:
    """The outputs of both `ELMoLSTM`s, of which no module has to be called; `None` for the definition.

    Args:
        starts: by direction, `hidden_LSP` and `cell_LSH`.
    """
    batch_sizes, other_sizes = (stream.steps.batch_sizes for stream in streams)
    if not batch_sizes or not other_sizes:
        return None
    tensors = [streams[0].inputs, *(state for start in starts for state in start), streams[1].inputs]
    layers = [layer for lstm in lstms for layer in lstm.layers]
    linears = [linear for layer in layers for linear in layer.children()]
    backend = make_plan(linears, *tensors, is_lstm=True).backend
    if backend == "reference":
        return None
    layers_kernel = None
    if batch_sizes == other_sizes:
        layers_kernel = kernel_of_both(lstms, batch_sizes, backend, *tensors)
    if layers_kernel is not None:
        return run_layer_by_layer(layers_kernel, lstms, streams, starts)
    calls = []
    for lstm, stream, start in zip(lstms, streams, starts, strict=True):
        calls.append(partial(lstm, stream, *start, kernel=KERNELS[backend]))
    return _run_in_threads(lstms, calls, batch_sizes, *tensors)


def run_layer_by_layer(
    kernel: LayersKernel, lstms: Sequence[Any], streams: Sequence[Stream], starts: Sequence[Sequence[Tensor]]
) -> list[DirectionOutput]:
    """As `ELMoLSTM.forward`, with one call for the same layer of both directions, whose batch sizes are equal."""
    forward_lstm = lstms[0]
    inputs_KND = torch.stack([stream.tokens_ND for stream in streams])
    hidden_KLSP, cell_KLSH = map(torch.stack, zip(*starts, strict=True))
    outputs, ends = [], []
    for depth, layers in enumerate(zip(*(lstm.layers for lstm in lstms), strict=True)):
        inputs_KND = F.dropout(inputs_KND, forward_lstm.dropout, forward_lstm.training)
        weights = [layer.weights() for layer in layers]
        output_KNP, *end = kernel(weights, inputs_KND, hidden_KLSP[:, depth], cell_KLSH[:, depth], streams[0].steps)
        if depth and forward_lstm.use_skip_connections:
            output_KNP = output_KNP + inputs_KND
        outputs.append(output_KNP)
        ends.append(end)
        inputs_KND = output_KNP
    hidden, cell = zip(*ends, strict=True)
    hidden_KLSP, cell_KLSH = torch.stack(hidden, 1), torch.stack(cell, 1)
    return [([output[k] for output in outputs], hidden_KLSP[k], cell_KLSH[k]) for k in range(len(lstms))]


def kernel_of_both(
    lstms: Sequence[nn.Module], batch_sizes: list[int], backend: str, *tensors: Tensor
) -> LayersKernel | None:
    """The kernel that computes a layer of both directions; `None` if it is better to take one after the other."""
    if backend in LAYERS_KERNELS:
        return LAYERS_KERNELS[backend]
    if backend != "training" or not can_use_threads(tensors[0].device) or not needs_gradients(lstms, *tensors):
        return None
    return threaded_layer if _multiplications(lstms[0], batch_sizes) >= FEW_IN_TRAINING else None


def _run_in_threads(
    lstms: Sequence[Any], calls: Sequence[Callable[[], Any]], batch_sizes: list[int], *tensors: Tensor
) -> list[Any]:
    """The results of calls that run one direction each: without gradients at once, or on one thread for few words."""
    draws = any(lstm.training and lstm.dropout for lstm in lstms)  # from one generator, so in a fixed order
    if draws or not can_use_threads(tensors[0].device) or needs_gradients(lstms, *tensors):
        return [call() for call in calls]
    if _multiplications(lstms[0], batch_sizes) < FEW_MULTIPLICATIONS:
        return at_once([lambda: [call() for call in calls]], threads=1)[0]
    return at_once(calls, torch.get_num_threads() // 2)


def _multiplications(lstm: Any, batch_sizes: list[int]) -> float:
    """The mean number of multiplications in a step of a layer."""
    layer = lstm.layers[0]
    weights = [linear.weight for linear in (layer.state_linear, layer.projection) if linear is not None]
    return sum(batch_sizes) / len(batch_sizes) * sum(weight.numel() for weight in weights)
