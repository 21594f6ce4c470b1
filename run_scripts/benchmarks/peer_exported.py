"""Our model as `elmo export` writes it, for `elmo benchmark --peer`.

    elmo benchmark --parts inference --peer run_scripts/benchmarks/peer_exported.py:onnx
    elmo benchmark --parts inference --peer run_scripts/benchmarks/peer_exported.py:pt2

ONNX Runtime gets the threads of torch.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modeling_elmo import ELMoModel
from modeling_elmo.conversion.onnx import Exported, load_onnx, load_pt2, trace, write_onnx, write_pt2
from modeling_elmo.run_scripts.benchmarks.model_speed import encode_words

READ = ("character_ids", "attention_mask")


def onnx(model: ELMoModel) -> dict[str, Any]:
    """Returns a peer, as peers.py describes it."""
    return _peer(model, "model.onnx", write_onnx, lambda file: load_onnx(file, torch.get_num_threads()))


def pt2(model: ELMoModel) -> dict[str, Any]:
    """As `onnx`."""
    return _peer(model, "model.pt2", write_pt2, load_pt2)


def _peer(model: ELMoModel, name: str, write: Callable, load: Callable[[Path], Exported]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        write(trace(model, encode_words([["two", "words"], ["more"]])), file)
        run = load(file)

    def top_layer(inputs: dict[str, Tensor]) -> Tensor:
        return run(**inputs)["hidden_states"][:, -1]

    return {"prepare": lambda encoding: {name: encoding[name] for name in READ}, "model": top_layer}
