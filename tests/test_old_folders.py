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
READS_PAIRS = [name for name in AUTO_MODELS if name != "AutoModelForPreTraining"]
OLD_MAP = {name: reference.replace("_heads.", ".") for name, reference in AUTO_MAP.items()}
SAVED = {cls.__name__: cls for cls in (ELMoModel, ELMoForTokenClassification, ELMoForQuestionAnswering)}
WITHOUT_PACKAGE = """
import importlib.util, sys
import torch, transformers
from safetensors.torch import load_file, save_file

assert importlib.util.find_spec("modeling_elmo") is None
found, inputs = {}, load_file(sys.argv[1])
for folder in sys.argv[3].split():
    for name in sys.argv[4].split():
        model = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True).eval()
        found[f"{folder}/{name}"] = model(**inputs, output_hidden_states=True).hidden_states[-1].detach().clone()
save_file(found, sys.argv[2])
"""


def into_old_layout(folder: Path):
    """Moves the heads into `modeling_elmo.py`, and names them there. Newer heads did not exist."""
    model, heads = folder / "modeling_elmo.py", folder / "modeling_elmo_heads.py"
    newer = ("modeling_elmo_coreference", "modeling_elmo_roles")
    for name in newer:
        (folder / f"{name}.py").unlink()
    bilm_code = "".join(line for line in model.open() if not any(f".{name} import" in line for name in newer))
    bilm_code = bilm_code.replace("    from .modeling_elmo_heads import", "    from .elmo_head_crf import")
    heads_code = heads.read_text().replace("from .modeling_elmo import", "from .elmo_inputs import token_mask  #")
    model.write_text(bilm_code.replace("import ELMoTaskModel ", "import LinearChainCRF ") + heads_code)
    heads.unlink()
    for name in ("configuration_elmo.py", "config.json"):
        (folder / name).write_text((folder / name).read_text().replace("modeling_elmo_heads.", "modeling_elmo."))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """For each class an old folder `old_CLASS`, `new_CLASS`, saved from it by the package, and the `expected` layer."""
    root = tmp_path_factory.mktemp("old")
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", "He"])
    config = ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), num_labels=3)
    save_file(dict(tokenizer("Who?", "He is.", return_token_type_ids=True, return_tensors="pt")), root / "inputs")
    expected = {}
    for name, model_class in SAVED.items():
        torch.manual_seed(0)
        model = model_class(config)
        expected[name] = top_layer(model, root)
        for part in (model, tokenizer):
            part.save_pretrained(root / f"old_{name}")
        into_old_layout(root / f"old_{name}")
        for part in (model_class, ELMoTokenizer):
            part.from_pretrained(root / f"old_{name}").save_pretrained(root / f"new_{name}")
    save_file(expected, root / "expected")
    return root


def top_layer(model, root: Path) -> torch.Tensor:
    return model.eval()(**load_file(root / "inputs"), output_hidden_states=True).hidden_states[-1].detach()


@pytest.fixture(scope="module")
def found(root) -> dict[str, torch.Tensor]:
    """The top layer under each Auto class, in a process without the package."""
    folders = sorted(folder.name for folder in root.glob("*_ELMo*"))
    arguments = ("inputs", "found", " ".join(folders), " ".join(READS_PAIRS))
    run(new_environment(root / "venv"), "-c", WITHOUT_PACKAGE, *arguments, cwd=root, HF_HOME=str(root / "home"))
    return load_file(root / "found")


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("generation", ["old", "new"])
def test_folders_load_with_their_own_code(root, found, generation, name):
    """An old folder, and a folder that the package saved from it."""
    expected = load_file(root / "expected")[name]
    for auto_class in READS_PAIRS:
        torch.testing.assert_close(found[f"{generation}_{name}/{auto_class}"], expected, rtol=0, atol=1e-6)
    auto_map = json.loads((root / f"{generation}_{name}" / "config.json").read_text())["auto_map"]
    assert auto_map == (OLD_MAP if generation == "old" else AUTO_MAP)


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": False}, {"trust_remote_code": True}])
@pytest.mark.parametrize("auto_class", AUTO_MODELS)
@pytest.mark.parametrize("name", SAVED)
def test_the_package_reads_an_old_folder_with_its_new_code(root, name, auto_class, options):
    model = getattr(transformers, auto_class).from_pretrained(root / f"old_{name}", **options)
    assert type(model) is getattr(modeling_elmo, AUTO_MAP[auto_class].split(".")[1])
    if auto_class in READS_PAIRS:
        torch.testing.assert_close(top_layer(model, root), load_file(root / "expected")[name], rtol=0, atol=1e-6)


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
