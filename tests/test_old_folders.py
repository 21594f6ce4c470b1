"""Folders saved before the heads had their own file load with their own code, and with the package.

Such a folder has all classes in `modeling_elmo.py`, and its Auto map says so.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from clean_python import new_environment, run
from safetensors.torch import load_file, save_file
from transformers.dynamic_module_utils import create_dynamic_module, get_class_in_module
from transformers.utils.hub import HF_MODULES_CACHE

import modeling_elmo
from modeling_elmo import ELMoConfig, ELMoForQuestionAnswering, ELMoForTokenClassification, ELMoModel, ELMoTokenizer
from modeling_elmo.configuration_elmo import AUTO_MAP

AUTO_MODELS = [name for name in AUTO_MAP if name != "AutoConfig"]
OLD_MAP = {name: reference.replace("_heads.", ".") for name, reference in AUTO_MAP.items()}
WITHOUT_PACKAGE = """
import importlib.util, sys
import torch, transformers
from safetensors.torch import load_file, save_file

assert importlib.util.find_spec("modeling_elmo") is None
found, inputs = {}, load_file(sys.argv[1])
for name in sys.argv[4:]:
    model = getattr(transformers, name).from_pretrained(sys.argv[2], trust_remote_code=True).eval()
    found[name] = model(**inputs, output_hidden_states=True).hidden_states[-1].detach().clone()
save_file(found, sys.argv[3])
"""


def into_old_layout(folder: Path):
    """Moves the heads into `modeling_elmo.py`, and names them there."""
    model, heads = folder / "modeling_elmo.py", folder / "modeling_elmo_heads.py"
    bilm_code = model.read_text().replace("    from .modeling_elmo_heads import", "    from .elmo_head_crf import")
    heads_code = heads.read_text().replace("from .modeling_elmo import", "from .elmo_inputs import token_mask  #")
    model.write_text(bilm_code.replace("import ELMoTaskModel ", "import LinearChainCRF ") + heads_code)
    heads.unlink()
    for name in ("configuration_elmo.py", "config.json"):
        (folder / name).write_text((folder / name).read_text().replace("modeling_elmo_heads.", "modeling_elmo."))
    assert json.loads((folder / "config.json").read_text())["auto_map"] == OLD_MAP


@pytest.fixture(scope="module", params=[ELMoModel, ELMoForTokenClassification, ELMoForQuestionAnswering])
def old(request, tmp_path_factory) -> dict:
    """An old folder, a batch for it, and the top layer that it must give."""
    folder = tmp_path_factory.mktemp("old") / "model"
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", "He"])
    torch.manual_seed(0)
    model = request.param(ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), num_labels=3)).eval()
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    into_old_layout(folder)
    inputs = dict(tokenizer("Who?", "He is.", return_token_type_ids=True, return_tensors="pt"))
    layers = model(**inputs, output_hidden_states=True).hidden_states
    return {"folder": folder, "inputs": inputs, "expected": layers[-1].detach(), "name": request.param.__name__}


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Path:
    return new_environment(tmp_path_factory.mktemp("stranger") / "venv")


def check_without_package(python: Path, folder: Path, old: dict, place: Path):
    save_file(old["inputs"], place / "inputs")
    names = [name for name in AUTO_MODELS if name != "AutoModelForPreTraining"]  # which reads one text only
    arguments = [str(place / "inputs"), str(folder), str(place / "found"), *names]
    run(python, "-c", WITHOUT_PACKAGE, *arguments, cwd=place, HF_HOME=str(place))
    for name, found in load_file(place / "found").items():
        torch.testing.assert_close(found, old["expected"], rtol=0, atol=1e-6, msg=name)


def test_an_old_folder_loads_with_its_own_code(old, stranger, tmp_path):
    check_without_package(stranger, old["folder"], old, tmp_path)


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": False}, {"trust_remote_code": True}])
@pytest.mark.parametrize("auto_class", AUTO_MODELS)
def test_the_package_reads_an_old_folder_with_its_new_code(old, auto_class, options):
    model = getattr(transformers, auto_class).from_pretrained(old["folder"], **options).eval()
    assert type(model) is getattr(modeling_elmo, AUTO_MAP[auto_class].split(".")[1])
    if auto_class != "AutoModelForPreTraining":
        found = model(**old["inputs"], output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(found.detach(), old["expected"], rtol=0, atol=1e-6)


def test_an_old_folder_saved_again_is_a_new_one(old, stranger, tmp_path):
    folder = tmp_path / "new"
    for part in (getattr(modeling_elmo, old["name"]), ELMoTokenizer):
        part.from_pretrained(old["folder"]).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["auto_map"] == AUTO_MAP
    check_without_package(stranger, folder, old, tmp_path)


def test_references_to_a_repository():
    """Folders of the Hub may have them. Classes that are not ours keep their file."""
    given = {name: f"someone/elmo--{reference}" for name, reference in OLD_MAP.items()}
    expected = {name: f"someone/elmo--{reference}" for name, reference in AUTO_MAP.items()}
    assert ELMoConfig(auto_map=given).auto_map == expected
    mine = {"AutoModelForTokenClassification": "mine.MyTagger", "AutoModelForMaskedLM": "someone/elmo--other.Model"}
    assert ELMoConfig(auto_map=mine).auto_map == {**AUTO_MAP, **mine}


def test_a_saved_folder_names_its_own_code(tmp_path):
    given = {name: f"someone/elmo--{reference}" for name, reference in OLD_MAP.items()}
    ELMoModel(ELMoConfig.from_preset("tiny", auto_map=given)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_remote_heads_are_initialised_after_the_model_file_is_executed_again():
    """In a repository of the Hub, transformers executes a file again that another file only imported before.

    The heads then know other classes than the model file does.
    """
    place = Path("transformers_modules", "executed_twice")
    create_dynamic_module(place)
    folder = Path(HF_MODULES_CACHE, place)
    config = ELMoConfig.from_preset("tiny", word_embedding_size=4, num_labels=3)
    ELMoModel(config).save_pretrained(folder)
    tagger = get_class_in_module("ELMoForTokenClassification", place / "modeling_elmo_heads.py")
    get_class_in_module("ELMoModel", place / "modeling_elmo.py")
    model_file = sys.modules[tagger.__module__.removesuffix("_heads")]
    assert model_file.ELMoPreTrainedModel not in tagger.__mro__
    torch.full((1 << 20,), torch.nan)  # memory that will be reused
    model = tagger.from_pretrained(folder, num_labels=3)
    assert model.input_mix.gamma.item() == 1 and not model.input_mix.weights.any()
    words = tagger(config).elmo.word_embeddings.weight
    assert not words[0].any() and 0 < words.abs().max() <= (6 / (4 + 4)) ** 0.5
    model.resize_token_embeddings(9)
    assert len(model.elmo.word_embeddings.weight) == model.elmo.word_embeddings.num_embeddings == 9
