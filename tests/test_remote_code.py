"""A saved folder loads under every Auto class in a process without the package.

Three generations: saved here; loaded, trained and saved again without the package; and once more, from an archive.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from bilm_models import save
from clean_python import new_environment, run
from remote_code_worker import PIPELINES, TEXTS, first_file, first_files, outputs_of, piped, spoil
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers.dynamic_module_utils import create_dynamic_module, get_class_in_module
from transformers.utils.hub import HF_MODULES_CACHE

import modeling_elmo
from modeling_elmo import ELMoConfig, ELMoModel, ELMoTokenizer
from modeling_elmo.configuration_elmo import AUTO_CLASS_NAMES
from modeling_elmo.shipping import generate

DEFAULTS = {auto_class: names[0] for auto_class, names in AUTO_CLASS_NAMES.items() if auto_class != "AutoConfig"}
OTHERS = {name: auto_class for auto_class, names in AUTO_CLASS_NAMES.items() for name in names[1:]}
CODE = {"configuration_elmo.py", "modeling_elmo.py", "tokenization_elmo.py"}
NAMES = [*DEFAULTS.values(), *OTHERS]
LOGITS = ("logits", "start_logits", "end_logits", "predicate_logits", "antecedent_scores")
VOCABULARY = ["<S>", "</S>", "<UNK>", "He", "is", "in", "London"]
LABELS = {0: "O", 1: "B-LOC", 2: "I-LOC"}
SIZES = {"task_hidden_size": 6, "task_word_embedding_size": 5, "task_char_cnn_filters": [[3, 8]]}
SIZES |= {"task_num_layers": 2, "elmo_placement": "both"}


def classes_of(name: str) -> dict[str, str]:
    """The Auto classes of a folder of this class, and the class that each gives."""
    return DEFAULTS | ({OTHERS[name]: name} if name in OTHERS else {})


assert_same = partial(torch.testing.assert_close, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def generations(tmp_path_factory) -> Path:
    """Folders `0`, `1`, `2` of each class; `expected.pt`; results of the worker, `{1,2}.safetensors` and `.json`."""
    root = tmp_path_factory.mktemp("generations")
    tokenizer = ELMoTokenizer(vocab=VOCABULARY)
    torch.manual_seed(0)
    config = ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), id2label=LABELS, **SIZES)
    expected = {}
    for name in NAMES:
        model = getattr(modeling_elmo, name)(config)
        save(root / "0" / name, model, tokenizer)
        expected[name] = outputs_of(model, tokenizer(TEXTS, padding=True, return_tensors="pt"))
    torch.save(expected, root / "expected.pt")
    worker = shutil.copy(Path(__file__).with_name("remote_code_worker.py"), root)
    python = new_environment(root / "venv")
    for old, new in ((0, 1), (1, 2)):
        home = root / f"home_{new}"
        home.mkdir()
        folders = root / str(old)
        if old:  # as they arrive elsewhere
            archive = shutil.make_archive(str(root / "archive"), "zip", folders)
            folders = home / "unpacked"
            shutil.unpack_archive(archive, folders)
        arguments = (str(folders), str(root / f"{new}.safetensors"), str(root / str(new)))
        run(python, str(worker), *arguments, cwd=home, HF_HOME=str(home), HF_MODULES_CACHE=str(home / "modules"))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ids_and_vectors_equal_the_package(generations, name):
    expected = torch.load(generations / "expected.pt")[name]
    first, second = (load_file(generations / f"{generation}.safetensors") for generation in (1, 2))
    for auto_class, class_name in classes_of(name).items():
        assert_same(first[f"{name}/{auto_class}/hidden"], expected["hidden"])
        for key in expected.keys() & {*LOGITS} if class_name == name else ():
            assert_same(first[f"{name}/{auto_class}/{key}"], expected[key])
    for key, ids in ELMoTokenizer(vocab=VOCABULARY)(TEXTS, padding=True, return_tensors="pt").items():
        assert torch.equal(first[f"{name}/inputs/{key}"], ids) and torch.equal(second[f"{name}/inputs/{key}"], ids)


CUSTOM = {
    "ELMoForQuestionAnswering": modeling_elmo.ELMoQuestionAnsweringPipeline,
    "ELMoForSemanticRoleLabeling": modeling_elmo.ELMoSemanticRolePipeline,
    "ELMoForCoreferenceResolution": modeling_elmo.ELMoCoreferencePipeline,
}


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory) -> Path:
    """A folder of each class whose code raises an error."""
    root = tmp_path_factory.mktemp("spoilt")
    tokenizer = ELMoTokenizer(vocab=VOCABULARY)
    config = ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), id2label={0: "O", 1: "B-V"}, task_num_layers=1)
    for name in PIPELINES:
        save(root / name, getattr(modeling_elmo, name)(config), tokenizer)
        spoil(root / name)
    return root


@pytest.mark.parametrize("name", PIPELINES)
def test_which_code_runs_after_an_import_of_the_package(spoilt, name):
    """The table of docs/sharing.md."""
    folder, pipe = spoilt / name, ["", "tokenization_elmo.py"]
    if name in CUSTOM:
        pipe = ["refused", "modeling_elmo.py"]
    expected = dict.fromkeys(AUTO_CLASS_NAMES, ["", ""]) | {
        "AutoTokenizer": ["", "tokenization_elmo.py"],
        "pipeline": pipe,
    }
    assert first_files(folder) == expected
    for trust in ({}, {"trust_remote_code": True}):
        assert ELMoTokenizer.from_pretrained(folder, **trust) and ELMoModel.from_pretrained(folder, **trust)
    if name in CUSTOM:
        transformers.pipeline(PIPELINES[name][0], str(folder), pipeline_class=CUSTOM[name])


@pytest.mark.parametrize("trust, runs", [({}, ""), ({"trust_remote_code": True}, "tokenization_elmo.py")])
def test_which_code_runs_in_sentence_transformers(spoilt, trust, runs):
    folder = spoilt / "ELMoModel"
    assert first_file(folder, partial(SentenceTransformer, str(folder), device="cpu", **trust)) == runs


@pytest.mark.slow
def test_without_the_package_code_runs_with_the_flag_only(spoilt, tmp_path):
    code = (
        "import json, pathlib, sys\nfrom remote_code_worker import PIPELINES, first_files\n"
        f"found = {{name: first_files(pathlib.Path({str(spoilt)!r}, name)) for name in PIPELINES}}\n"
        "assert 'modeling_elmo' not in sys.modules\npathlib.Path('found.json').write_text(json.dumps(found))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "HF_MODULES_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code]
    subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True
    )
    calls = [*AUTO_CLASS_NAMES, "AutoTokenizer", "pipeline"]
    expected = dict.fromkeys(PIPELINES, dict.fromkeys(calls, ["refused", "configuration_elmo.py"]))
    assert json.loads((tmp_path / "found.json").read_text()) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_has_the_code_that_its_auto_classes_reach(tmp_path, name):
    """The same three files for each class, beside the user's own."""
    (tmp_path / "elmo_script.py").touch()
    model = getattr(modeling_elmo, name)(ELMoConfig.from_preset("tiny", id2label={0: "O", 1: "B-V"}))
    save(tmp_path, model, ELMoTokenizer())
    assert {file.name for file in tmp_path.glob("*.py")} == {*CODE, "elmo_script.py"}
    assert all((tmp_path / file).read_bytes() == generate(file) for file in CODE)


def numbers_and_rest(found) -> tuple[list[float], list]:
    """Separates the numbers in a pipeline's result from the rest."""
    numbers = []

    def note(number):
        numbers.append(float(number))

    rest = json.loads(json.dumps(found, default=float), parse_float=note, parse_int=note)
    return numbers, rest


@pytest.mark.slow
@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_stock_pipelines_say_the_same(generations, name, generation):
    found = json.loads((generations / f"{generation}.json").read_text())[name]
    folder = generations / str(generation - 1) / name
    if name == "ELMoForQuestionAnswering":
        expected = piped(name, model=str(folder), trust_remote_code=True)  # the pipeline of the folder
    else:
        model = getattr(modeling_elmo, name).from_pretrained(folder)
        expected = piped(name, model=model, tokenizer=ELMoTokenizer.from_pretrained(folder))
    (numbers, rest), (expected_numbers, expected_rest) = map(numbers_and_rest, (found, expected))
    finds_nothing = (name, generation) == ("ELMoForCoreferenceResolution", 2)  # after its one large step of training
    assert rest == expected_rest and (finds_nothing or len(numbers) > len(TEXTS))
    assert numbers == pytest.approx(expected_numbers, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_survives_saving_again(generations, name):
    before, after = (load_file(generations / f"{generation}.safetensors") for generation in (1, 2))
    (auto_class,) = [key for key, class_name in classes_of(name).items() if class_name == name]
    for key in ("hidden", *LOGITS):
        if f"{name}/trained/{key}" in before:
            assert_same(after[f"{name}/{auto_class}/{key}"], before[f"{name}/trained/{key}"])
    for other in DEFAULTS:
        assert_same(after[f"{name}/{other}/hidden"], before[f"{name}/trained/hidden"])
    moved = next((key for key in LOGITS if f"{name}/trained/{key}" in before), "hidden")
    assert not torch.equal(before[f"{name}/trained/{moved}"], before[f"{name}/{auto_class}/{moved}"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_generation_is_complete(generations, name):
    first, *later = (generations / str(number) / name for number in range(3))
    for folder in later:
        assert {file.name for file in folder.glob("*.py")} == CODE
        assert all((folder / file).read_bytes() == (first / file).read_bytes() == generate(file) for file in CODE)
        for file in ("config.json", "tokenizer_config.json"):
            auto_maps = [json.loads((path / file).read_text())["auto_map"] for path in (first, folder)]
            assert auto_maps[0] == auto_maps[1]


def test_a_repository_of_the_hub_has_one_module_of_all_models():
    """A file that another file imports may be executed again there: heads would know other classes than the model."""
    place = Path("transformers_modules", "executed_twice")
    create_dynamic_module(place)
    folder = Path(HF_MODULES_CACHE, place)
    config = ELMoConfig.from_preset("tiny", word_embedding_size=4, num_labels=3)
    ELMoModel(config).save_pretrained(folder)
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    found = []
    for reference in [*auto_map.values(), *auto_map.values()]:
        file, name = reference.split(".")
        found.append(get_class_in_module(name, place / f"{file}.py"))
    assert found[: len(auto_map)] == found[len(auto_map) :] and len({each.__module__ for each in found}) == 2
    tagger = next(each for each in found if each.__name__ == "ELMoForTokenClassification")
    torch.full((1 << 20,), torch.nan)  # memory that will be reused
    model = tagger.from_pretrained(folder, num_labels=3)
    assert model.input_mix.gamma.item() == 1 and not model.input_mix.weights.any()
    words = tagger(config).elmo.word_embeddings.weight
    assert not words[0].any() and 0 < words.abs().max() <= (6 / (4 + 4)) ** 0.5
    model.resize_token_embeddings(9)
    assert len(model.elmo.word_embeddings.weight) == model.elmo.word_embeddings.num_embeddings == 9
