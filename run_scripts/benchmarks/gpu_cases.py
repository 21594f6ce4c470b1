"""One case of `make bench-gpu`, in a process of its own: facts, layers, pretraining or inference.

`python -m modeling_elmo.run_scripts.benchmarks.gpu_cases cuda` reads the case from its standard input, as `children.py`
sends it, and prints a row for each measurement.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modeling_elmo import ELMoConfig, ELMoModel

from ..program.gpu import gpu_facts
from ..program.processes import local_device
from .children import answer_case
from .device_timing import Check, errors_of, measured_row, peak_of_products
from .layer_speed import CUDNN, DEFINITION, MOST_RATIO_OF_TORCH, compile_layer, layer_rows
from .model_speed import (
    CHECKOUT,
    PRECISIONS,
    Peer,
    checkout_peer,
    computing_in,
    encode_words,
    import_file,
    load_peer,
    top_layer,
    with_torch_lstm,
)
from .text import draw_batch, made_up_sentences

OURS, ALLENNLP, OTHER = "this package", "AllenNLP", "other checkout"
PEER_ALLENNLP = Path(__file__).parent / "peers" / "peer_allennlp.py"  # only a clone has it
WORDS_OF_BATCHES = 60_000  # of the made-up text from which batches are drawn
DTYPES_OF_PRODUCTS = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}


def rows_of_case(device: torch.device, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    parts = {
        "facts": facts,
        "compilation": compile_layer,
        "layers": layer_rows,
        "pretraining": rows_of_pretraining,
        "inference": inference_rows,
    }
    return parts[case["part"]](case, device)


def rows_of_pretraining(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    from .pretraining_speed import pretraining_rows  # the other parts need no accelerate

    return pretraining_rows(case, device)


def facts(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """What a reader must know, and the operations per second of a large product in each precision."""
    row: dict[str, Any] = {"device": str(device), "torch": str(torch.__version__), "allennlp": has_allennlp()}
    if device.type == "cuda":
        row |= gpu_facts(device)._asdict()
    peaks = {}
    for precision, dtype in DTYPES_OF_PRODUCTS.items():
        with computing_in(device, precision), torch.autocast(device.type, enabled=False):
            peaks[precision] = peak_of_products(device, case["size"], dtype)
    yield row | {"peaks": peaks}


def has_allennlp() -> bool:
    return PEER_ALLENNLP.is_file() and find_spec("allennlp") is not None and find_spec("h5py") is not None


def inference_rows(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """The top layer of a model with random weights: a row for each batch, precision and implementation."""
    torch.manual_seed(0)
    model = ELMoModel(ELMoConfig.from_preset(case["preset"]), add_mixing_layer=False).eval()
    exact = copy.deepcopy(model).double().to(device)
    calls = {name: model_call(name, model, device, case) for name in case["implementations"]}
    plain = copy.deepcopy(model).to(device)
    sentences = made_up_sentences(WORDS_OF_BATCHES)
    for name in case["batches"]:
        encoding = encode_words(draw_batch(sentences, name, seed=0))
        expected = vectors(partial(top_layer, exact, encoding, "reference"))
        tokens = int(encoding.attention_mask.sum())
        for precision, largest_error in PRECISIONS.items():
            with computing_in(device, precision):
                errors = errors_of(vectors(partial(top_layer, plain, encoding, "reference")), expected)
                for implementation, call in calls.items():
                    check = Check(expected, errors, largest_error)
                    if implementation in (CUDNN, ALLENNLP):
                        check = check._replace(most_ratio=MOST_RATIO_OF_TORCH)
                    row = {"batch": name, "tokens": tokens, "precision": precision, "implementation": implementation}
                    yield row | measured_row(partial(vectors, call(encoding)), check, device)


@torch.no_grad()
def vectors(forward: Callable[[], Tensor]) -> dict[str, Tensor]:
    return {"vectors": forward()}


def model_call(
    name: str, model: ELMoModel, device: torch.device, case: dict[str, Any]
) -> Callable[[Any], Callable[[], Tensor]]:
    """For an implementation, a function of an encoded batch that returns the call to measure."""
    if name in (ALLENNLP, OTHER):
        return partial(peer_call, peer_of(name, model, case), device)
    if name == CUDNN:
        changed = with_torch_lstm(model).to(device)
        for direction in (changed.forward_lstm, changed.backward_lstm):
            for layer in direction.layers:
                layer.lstm.flatten_parameters()
        return lambda encoding: partial(top_layer, changed, encoding)
    there = copy.deepcopy(model).to(device)
    backend = "reference" if name == DEFINITION else name.removeprefix(OURS).removeprefix(", ") or None
    return lambda encoding: partial(top_layer, there, encoding, backend)


def peer_of(name: str, model: ELMoModel, case: dict[str, Any]) -> Peer:
    if name == ALLENNLP:
        return load_peer(f"{PEER_ALLENNLP}:allennlp", model)[1]
    checkout = import_file(Path(case["against"], "modeling_elmo", "__init__.py"), CHECKOUT)
    return checkout_peer(checkout, case["preset"], model)


def peer_call(peer: Peer, device: torch.device, encoding: Any) -> Callable[[], Tensor]:
    peer["to"](device)
    prepared = peer.get("prepare", lambda same: same)(encoding)
    if isinstance(prepared, Tensor):
        prepared = prepared.to(device)
    return partial(peer["model"], prepared)


if __name__ == "__main__":
    answer_case(partial(rows_of_case, local_device(sys.argv[1])))
