"""AllenNLP 2.10.1's ELMo with our weights, for `elmo benchmark --peer`.

    pip install --no-deps --target build/allennlp allennlp==2.10.1
    PYTHONPATH=build/allennlp elmo benchmark --peer run_scripts/benchmarks/peers/peer_allennlp.py:allennlp

`--no-deps`, because AllenNLP requires a torch of 2022. Its modules that compute are used unchanged. All its other
modules, which read data and need packages of that time, are replaced by empty modules in the whole process.
"""

import importlib
import re
import sys
import tempfile
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from torch import Tensor

from modeling_elmo import ELMoModel
from modeling_elmo.conversion.original import export_original_checkpoint

COMPUTING_MODULES = {
    "allennlp.common.checks",
    "allennlp.data.token_indexers.elmo_indexer",  # the characters of the markers
    "allennlp.modules.elmo",
    "allennlp.modules.elmo_lstm",
    "allennlp.modules.encoder_base",
    "allennlp.modules.highway",
    "allennlp.modules.lstm_cell_with_projection",
    "allennlp.modules.scalar_mix",
    "allennlp.nn.util",
}
# Weights of equal layout, renamed so that their gradients are compared. The gates and the highways are missing, because
# AllenNLP orders them differently; so are the character embeddings, because it trains them at padding too.
OUR_NAMES = {
    r"_token_embedder\.char_conv_": "char_encoder.convolutions.",
    r"_token_embedder\._projection": "token_projection",
    r"_elmo_lstm\.(\w+)_layer_(\d+)\.state_projection": r"\1_lstm.layers.\2.projection",
}


def allennlp(model: ELMoModel) -> dict[str, Any]:
    """Returns a peer, as model_speed.py describes it."""
    if not any(isinstance(finder, EmptyModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, EmptyModules(Path(str(distribution("allennlp").locate_file("allennlp")))))
    elmo: Any = importlib.import_module("allennlp.modules.elmo")
    for module in (elmo, importlib.import_module("allennlp.modules.elmo_lstm")):
        vars(module)["cached_path"] = str  # the files are local
    with tempfile.TemporaryDirectory() as folder:
        weights, options = Path(folder, "weights.hdf5"), Path(folder, "options.json")
        whole = ELMoModel(model.config)  # the export needs a model with a scalar mix
        whole.load_state_dict(model.state_dict(), strict=False)
        whole.save_pretrained(folder)
        export_original_checkpoint(folder, weights, options)
        bilm = elmo._ElmoBiLm(str(options), str(weights), requires_grad=True).eval()

    def top_layer(characters: Tensor) -> Tensor:
        bilm._elmo_lstm.reset_states()  # its LSTM keeps the states of the last batch
        return bilm(characters)["activations"][-1]

    parameters = dict(bilm.named_parameters())
    for theirs, ours in OUR_NAMES.items():
        parameters = {re.sub(theirs, ours, name): parameter for name, parameter in parameters.items()}
    return {"prepare": without_markers, "model": top_layer, "parameters": parameters, "to": bilm.to}


def without_markers(encoding: dict[str, Tensor]) -> Tensor:
    """Character ids of the words, `(batch, time - 2, max_word_length)`: AllenNLP adds `<S>` and `</S>` itself."""
    is_followed = encoding["attention_mask"][:, 2:, None]  # no token follows `</S>`
    return encoding["character_ids"][:, 1:-1] * is_followed


class EmptyModules(MetaPathFinder, Loader):
    """Finds an empty module for every name of AllenNLP outside `COMPUTING_MODULES`. Every name in it is a class."""

    def __init__(self, folder: Path):
        self.folder = folder

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        package, *parts = name.split(".")
        if package != "allennlp" or name in COMPUTING_MODULES:
            return None
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(self.folder.joinpath(*parts))]
        return spec

    def exec_module(self, module):
        def class_of_any_name(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (AnyObject,), {})

        module.__getattr__ = class_of_any_name


class AnyObject:
    """Replaces base classes, annotations, registries, and initializers of weights that are loaded afterwards."""

    def __init__(self, *args, **kwargs):
        pass

    @classmethod
    def register(cls, name: str) -> Callable:
        return lambda registered: registered
