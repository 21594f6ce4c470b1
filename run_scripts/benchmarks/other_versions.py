"""Other implementations of ELMo that take part in a benchmark with the weights of our model.

A peer is a dictionary:

    "model"       prepared -> top layer `(batch, time, hidden_size)`, zeros at padding
    "prepare"     output of our tokenizer -> prepared; not timed. Default: the output itself
    "parameters"  {name: weight}: all weights whose gradients a training step computes. A gradient is checked if its
                  weight has the name and shape of one of ours. Without this key, the peer is left out of `training`
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from modeling_elmo import ELMoModel
from modeling_elmo.run_scripts.benchmarks.model_speed import Peer, top_layer

CHECKOUT = "modeling_elmo_of_another_checkout"  # name of its package in this process


def load_peer(spec: str, model: ELMoModel) -> tuple[str, Peer]:
    """Calls the function of `--peer FILE:FUNCTION` with our model; returns the function's name and the peer."""
    file, _, name = spec.rpartition(":")
    if not Path(file).is_file():
        raise FileNotFoundError(f"--peer {spec}: there is no file {file!r}; pass FILE.py:FUNCTION.")
    module = import_file(Path(file), Path(file).stem)
    peer = getattr(module, name)(model) if hasattr(module, name) else None
    if not isinstance(peer, dict) or "model" not in peer:
        raise ValueError(f"--peer {spec} gives no dictionary with 'model'; pass FILE.py:FUNCTION of such a function.")
    return name, peer


def load_checkout(folder: str) -> ModuleType:
    """Imports the package of another checkout beside this one. It has its own modules, backends and caches."""
    package = Path(folder, "modeling_elmo")
    if not (package / "__init__.py").is_file():
        raise FileNotFoundError(
            f"--against {folder}: there is no modeling_elmo/__init__.py; pass a clone of the repository."
        )
    return import_file(package / "__init__.py", CHECKOUT)


def checkout_peer(checkout: ModuleType, preset: str, model: ELMoModel) -> Peer:
    other = checkout.ELMoModel(checkout.ELMoConfig.from_preset(preset), add_mixing_layer=False).eval()
    other.load_state_dict(model.state_dict())
    return {"model": lambda encoding: top_layer(other, encoding), "parameters": dict(other.named_parameters())}


def import_file(path: Path, name: str) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
