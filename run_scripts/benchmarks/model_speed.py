"""Speed of the biLM: inference, and a training step without an optimizer.

Our code is compared with the plain definition, with `torch.nn.LSTM`, with other implementations on the same weights,
and with its own matrix products and nothing else.

On an accelerator every path is measured in every precision. The ids of a batch stay on the CPU, as in `elmo pretrain`.
A time ends when the device has finished. Each row has two more figures: the kernels that the host launches in a run,
and the most memory that a run takes, in megabytes.

Another implementation is a "peer". A peer is a dictionary:

    "model"       prepared -> top layer `(batch, time, hidden_size)`, zeros at padding
    "prepare"     output of our tokenizer -> prepared; not timed. Default: the output itself
    "parameters"  {name: weight}: all weights whose gradients a training step computes. A gradient is checked if its
                  weight has the name and shape of one of ours. Without this key, the peer is left out of `training`
    "to"          device -> moves the peer there. Without this key, `make bench-gpu` leaves the peer out
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BatchEncoding

from modeling_elmo import ELMoModel, ELMoTokenizer, elmo_backend
from modeling_elmo.kernels.int8 import int8_obstacle

from ..program.gpu import gpu_facts
from .timing import TOLERANCE, Contest, Implementation, Outputs

Peer = dict[str, Any]
CHECKOUT = "modeling_elmo_of_another_checkout"  # name of its package here, with its own modules, backends and caches
PRODUCT_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::addmm_",
    "aten::bmm",
    "aten::baddbmm",
    "mkldnn::_linear_pointwise",
)
DEVICE_PARTS = ("inference", "training")
PRECISIONS = {"float32": TOLERANCE, "tf32": 0.02, "bfloat16": 0.1}  # with the largest error of each
LAUNCHES = ("LaunchKernel", "GraphLaunch")  # parts of the names of CUDA's functions
INT8_TOLERANCE = 0.02  # relative RMS error of the vectors: inputs and weights have 127 steps


def with_torch_lstm(model: ELMoModel) -> ELMoModel:
    """A copy whose layers are `torch.nn.LSTM`, which has no clips: with random weights, no value reaches ours."""
    model = copy.deepcopy(model)
    for direction in (model.forward_lstm, model.backward_lstm):
        direction.layers = nn.ModuleList(map(TorchLSTMLayer, direction.layers))
    return model


class TorchLSTMLayer(nn.Module):
    """`torch.nn.LSTM` instead of one of our layers, with its weights in torch's order of gates: i, f, g, o."""

    def __init__(self, layer: Any):
        super().__init__()
        outer, inner = layer.input_linear.in_features, layer.input_linear.out_features // 4
        self.lstm = nn.LSTM(outer, inner, proj_size=outer)
        forget_bias = torch.zeros(4, inner).index_fill(0, torch.tensor(1), layer.forget_bias).flatten()
        state = {
            "weight_ih_l0": gates_of_torch(layer.input_linear.weight),
            "weight_hh_l0": gates_of_torch(layer.state_linear.weight),
            "bias_ih_l0": gates_of_torch(layer.input_linear.bias),
            "bias_hh_l0": forget_bias,
            "weight_hr_l0": layer.projection.weight,
        }
        self.lstm.load_state_dict(state)

    def forward(self, stream, hidden_SP: Tensor, cell_SH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sequences = PackedSequence(stream.tokens_ND, torch.tensor(stream.steps.batch_sizes))
        states = hidden_SP[None].contiguous(), cell_SH[None].contiguous()  # cuDNN reads no others
        outputs, (hidden, cell) = self.lstm(sequences, states)
        return outputs.data, hidden[0], cell[0]


def gates_of_torch(weight: Tensor) -> Tensor:
    first, forget, output, cell = weight.chunk(4)
    return torch.cat([first, forget, cell, output])


def encode_words(batch: list[list[str]]) -> BatchEncoding:
    tokenizer = ELMoTokenizer(pre_tokenization="whitespace")
    return tokenizer(batch, is_split_into_words=True, padding=True, return_tensors="pt")


def model_contest(
    part: str, name: str, batch: list[list[str]], model: ELMoModel, device: torch.device, peers: dict[str, Peer]
) -> Contest:
    """Our code, the definition and `torch.nn.LSTM` on one batch, checked against the definition on the CPU in float32.

    On the CPU also the peers, the matrix products and, in inference, our code in 8 bits; elsewhere all precisions.

    Args:
        part: `"inference"`, or `"training"`: forward and backward, without dropout and optimizer.
    """
    encoding = encode_words(batch)
    call_of = partial(computation, part, encoding)
    expected = {key: value.to(device) for key, value in call_of(model, "reference")().items()}
    there = model if device.type == "cpu" else copy.deepcopy(model).to(device)
    calls = {
        "this package": call_of(there),
        "plain definition": call_of(there, "reference"),
        "torch.nn.LSTM": call_of(with_torch_lstm(model).to(device)),
    }
    if device.type == "cpu":
        for peer_name, peer in peers.items():
            if part == "inference" or "parameters" in peer:
                forward = partial(peer["model"], peer.get("prepare", lambda same: same)(encoding))
                calls[peer_name] = partial(vectors_and_gradients, part, forward, peer.get("parameters", {}))
        measured = [Implementation(title, call, expected) for title, call in calls.items()]
        if part == "inference" and int8_obstacle() is None:
            measured.append(Implementation("int8", call_of(model, "int8"), expected, INT8_TOLERANCE))
        measured.append(Implementation("matrix products alone", replayed_products(call_of(model))))
    else:
        measured = []
        for title, call in calls.items():
            for precision in PRECISIONS:
                measured.append(in_precision(title, call, expected, device, precision))
    return Contest(part, name, int(encoding.attention_mask.sum()), "tokens", measured)


@contextmanager
def computing_in(device: torch.device, precision: str) -> Iterator[None]:
    """A precision of `PRECISIONS`. bfloat16 means autocast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    # torch's own choice is TF32 for cuDNN, which computes convolutions and `torch.nn.LSTM`, also in float32.
    cudnn = torch.backends.cudnn.flags(enabled=True, allow_tf32=precision != "float32")
    try:
        with cudnn, torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def in_precision(
    title: str, call: Callable[[], Outputs], expected: Outputs, device: torch.device, precision: str
) -> Implementation:
    module: Any = torch.get_device_module(device)

    def run() -> Outputs:
        with computing_in(device, precision):
            outputs = call()
        module.synchronize()
        return outputs

    def details() -> dict[str, float]:
        module.reset_peak_memory_stats()
        with profile() as profiler:
            run()
        launches = 0
        for event in profiler.key_averages():
            if any(name in event.key for name in LAUNCHES):
                launches += event.count
        return {"launches": launches, "megabytes": module.max_memory_allocated() / 1e6}

    return Implementation(f"{title}, {precision}", run, expected, PRECISIONS[precision], details)


def computation(
    part: str, encoding: BatchEncoding, model: ELMoModel, backend: str | None = None
) -> Callable[[], Outputs]:
    forward = partial(top_layer, model, encoding, backend)
    return partial(vectors_and_gradients, part, forward, dict(model.named_parameters()))


def top_layer(model: ELMoModel, encoding: BatchEncoding, backend: str | None = None) -> Tensor:
    with backend_context(backend):
        return model(**encoding).last_hidden_state


def backend_context(backend: str | None) -> AbstractContextManager:
    """Computes with a backend, or with the one that the model chooses."""
    return nullcontext() if backend is None else elmo_backend(backend)


def vectors_and_gradients(part: str, forward: Callable[[], Tensor], parameters: dict[str, Tensor]) -> Outputs:
    """The top layer, and in training the gradient of its squared norm for every parameter."""
    with torch.set_grad_enabled(part == "training"):
        vectors = forward()
    if part == "inference":
        return {"vectors": vectors}
    gradients = torch.autograd.grad(vectors.square().sum(), list(parameters.values()))
    return {"vectors": vectors.detach(), **dict(zip(parameters, gradients, strict=True))}


class ProductRecorder(TorchDispatchMode):
    """Records every matrix product inside its `with` block, with its operands."""

    def __init__(self):
        super().__init__()
        self.products: list[Callable[[], Tensor]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name().partition(".")[0] in PRODUCT_OPERATORS:
            self.products.append(partial(function, *args, **(kwargs or {})))
        return function(*args, **(kwargs or {}))


def replayed_products(call: Callable[[], Any]) -> Callable[[], None]:
    """A function that repeats the matrix products of `call` and nothing else: no code with these products is faster."""
    call()  # fills the caches: their products are not repeated
    with patch("modeling_elmo.kernels.plan.is_watched", bool), ProductRecorder() as recorder:  # not the definition
        call()

    @torch.no_grad()
    def replay():
        for repeat in recorder.products:
            repeat()

    return replay


def load_peer(spec: str, model: ELMoModel) -> tuple[str, Peer]:
    """Calls the function of `--peer FILE:FUNCTION` with our model; returns the function's name and the peer."""
    file, _, name = spec.rpartition(":")
    if not Path(file).is_file():
        raise FileNotFoundError(f"--peer {spec}: there is no file {file!r}; pass FILE.py:FUNCTION.")
    module = import_file(Path(file), Path(file).stem)
    peer = getattr(module, name)(model) if hasattr(module, name) else None
    if not isinstance(peer, dict) or "model" not in peer:
        raise ValueError(f"--peer {spec} returns no dictionary with 'model'; pass a function that does.")
    return name, peer


def checkout_peer(checkout: ModuleType, preset: str, model: ELMoModel) -> Peer:
    other = checkout.ELMoModel(checkout.ELMoConfig.from_preset(preset), add_mixing_layer=False).eval()
    other.load_state_dict(model.state_dict())
    forward = lambda encoding: top_layer(other, encoding)  # noqa: E731
    return {"model": forward, "parameters": dict(other.named_parameters()), "to": other.to}


def import_file(path: Path, name: str) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def device_conditions(device: torch.device) -> dict[str, Any]:
    """What a reader of the figures must know about a CUDA device."""
    if device.type != "cuda":
        return {"device": str(device)}
    card = gpu_facts(device)
    return {
        "device": card.name,
        "device_memory": card.memory,
        "compute_capability": card.capability,
        "driver": card.driver,
        "cuda": torch.version.cuda,
        "triton": card.triton,
    }
