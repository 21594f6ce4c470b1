"""The checkpoints in the repository keep their scores, and their cards agree with the records."""

import ast
import inspect
import re
import runpy
import shutil
import sys

import pytest
import torch
from bilm_models import save
from clean_python import run
from places import ROOT, TEXT
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from modeling_elmo import ELMoModel, ELMoTokenizer
from modeling_elmo.run_scripts import perplexity, push_to_hub
from modeling_elmo.run_scripts.cards.bilm_card import write_bilm_card
from modeling_elmo.run_scripts.program.files import read_json

FOLDERS = sorted(path.parent for path in (ROOT / "model_cards").glob("*/config.json"))
# Measured on held-out documents at publication; and the maximum size of a folder.
PERPLEXITIES = {
    "elmo-small-en": ("inaugural_heldout.txt", 89.35),
    "elmo-small-ko": ("ko.txt", 182.13),
}
MEGABYTES = {"elmo-small-en": 30, "elmo-small-ko": 18}

each = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def test_there_is_one_for_each_language():
    assert [folder.name for folder in FOLDERS] == list(PERPLEXITIES) == list(MEGABYTES)


@pytest.mark.slow
@each
def test_a_published_checkpoint_keeps_its_perplexity(folder):
    name, expected = PERPLEXITIES[folder.name]
    options = ["--model", str(folder), "--validation_file", str(TEXT / name), "--is_split_into_words"]
    assert perplexity.main(options).perplexity == pytest.approx(expected, rel=1e-4)


@each
def test_elmo_in_fifty_lines_is_the_model(folder, monkeypatch, capsys):
    script = ROOT / "docs" / "elmo_in_fifty_lines.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(folder)])
    names = runpy.run_path(str(script))
    for layer, expected in zip(names["layers"], names["package"].hidden_states, strict=True):
        assert layer.shape == expected[0].shape and torch.allclose(layer, expected[0], atol=1e-5)
    differences = [float(line.split()[2 if line[0] == "l" else 1]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(differences) == 4 and max(differences) < 1e-5
    statements = [node for node in ast.parse(script.read_text("utf-8")).body if not isinstance(node, ast.ImportFrom)]
    code = [ast.unparse(node).splitlines() for node in statements[1:] if not isinstance(node, ast.Import)]
    assert sum(map(len, code)) <= 50  # without imports, comments and the docstring


@each
def test_half_precision_on_disk_single_in_memory(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py"]
    assert sum(path.stat().st_size for path in files) <= MEGABYTES[folder.name] * 1e6
    model = ELMoModel.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for parameter in model.parameters():
        assert torch.equal(parameter, parameter.half().float())


@each
def test_the_card_is_made_of_what_was_recorded(folder, tmp_path):
    """The card equals a new one, and its figures are in `results/`."""
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    write_bilm_card(copy, copy.name)
    card = (folder / "README.md").read_text("utf-8")
    assert (copy / "README.md").read_text("utf-8") == card
    log = read_json(folder / "results" / "pretraining.json")["log"]
    best = min(entry["perplexity"] for entry in log if "perplexity" in entry)
    assert f"**{best:.2f}**" in card and "license: cc-by-sa-4.0" in card
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", card):
        assert (folder / picture).is_file()


@pytest.mark.slow
@each
def test_a_stranger_loads_it_and_runs_its_card(folder, capsys):
    push_to_hub.main(["--model", str(folder), "--repo_id", f"someone/{folder.name}", "--dtype", "float16"])
    assert "A process without this package loads it and runs the card's example" in capsys.readouterr().out


@each
def test_it_has_no_code_in_a_clone(folder):
    """The package in the clone is its code; `save_pretrained` and `elmo push` write it for others."""
    assert not [*folder.glob("*.py")]
    assert all("auto_map" not in path.read_text("utf-8") for path in folder.glob("*.json"))


def vectors_of(name, **options):
    """The clean process runs the source of this function, too."""
    tokenizer, model = AutoTokenizer.from_pretrained(name, **options), AutoModel.from_pretrained(name, **options)
    return model(**tokenizer("Old 눈 .", return_tensors="pt")).last_hidden_state.detach()


@each
def test_it_loads_from_a_clone_with_and_without_the_flag(folder):
    expected = vectors_of(str(folder))
    assert torch.equal(vectors_of(str(folder), trust_remote_code=True), expected)
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert type(model) is ELMoModel and type(AutoTokenizer.from_pretrained(folder)) is ELMoTokenizer


@pytest.mark.slow
@each
def test_what_it_saves_loads_without_the_package(folder, tmp_path):
    name = folder.name
    save(tmp_path / name, ELMoModel.from_pretrained(folder), ELMoTokenizer.from_pretrained(folder))
    code = f"""
import sys
sys.modules["modeling_elmo"] = None  # as if it were not installed
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

{inspect.getsource(vectors_of)}
save_file({{"vectors": vectors_of({name!r}, trust_remote_code=True)}}, sys.argv[1])
"""
    run(sys.executable, "-c", code, str(tmp_path / "vectors"), cwd=tmp_path, HF_HOME=str(tmp_path))
    assert torch.equal(load_file(tmp_path / "vectors")["vectors"], vectors_of(str(folder)))
