"""`elmo doctor`: the report of versions, processor, chosen backends and extras."""

import json
import subprocess
import sys

import pytest
import torch
from packaging.requirements import Requirement

from modeling_elmo.elmo_backends import elmo_backend
from modeling_elmo.run_scripts import doctor
from modeling_elmo.run_scripts.program.command_line import run


def test_the_report_of_this_machine(capsys):
    doctor.main([])
    printed = capsys.readouterr().out
    listed = subprocess.run([sys.executable, "-m", "pip", "list", "--format", "json"], capture_output=True, check=True)
    versions = {package["name"].lower().replace("_", "-"): package["version"] for package in json.loads(listed.stdout)}
    facts = {title: dict(pairs) for title, pairs in doctor.sections().items()}
    for name in ("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy"):
        assert facts["Versions"][name] == versions[name], name
    assert [line for line in printed.splitlines() if line and line[0] != " "] == list(facts)
    assert all(f"  {name}" in printed and text in printed for pairs in facts.values() for name, text in pairs.items())
    assert f"{torch.get_num_threads()} threads" in facts["Processor"]["name"]
    extras = {"train", "coref", "cuda", "convert", "export", "spacy", "explore", "ray", "docs", "dev"}
    assert set(facts["Extras"]) == extras
    assert facts["Extras"]["train"] == "complete"


def test_backends_are_those_that_are_chosen():
    found = dict(doctor.chosen_backends())
    assert set(found) == {"vectors", "training", "training, --bf16"}
    with elmo_backend("reference"):
        assert {*dict(doctor.chosen_backends()).values()} == {"reference"} and "reference" not in found["vectors"]


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("torch>=2.6", None),
        ("modeling-elmo[train]", None),
        ("no-such-package>=1", "no-such-package is missing"),
        ("torch>=99", f"torch is {torch.__version__}, but must be >=99"),
    ],
)
def test_problems_of_packages(requirement, problem):
    assert doctor.problem_of(Requirement(requirement)) == problem
    assert doctor.missing_packages([Requirement(requirement), Requirement("numpy")]) == (problem or "complete")


def test_what_a_processor_lacks(monkeypatch):
    monkeypatch.setattr(doctor, "int8_obstacle", lambda: "this processor has no VNNI instructions")
    assert dict(doctor.processor())["8 bits"] == "slow: this processor has no VNNI instructions"


def test_accelerators_are_named(monkeypatch):
    facts = type("Facts", (), {"name": "GPU of a test", "total_memory": 80 * 2**30})
    monkeypatch.setattr(doctor, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: facts)
    monkeypatch.setattr(doctor.elmo_lstm_fused, "triton", None)
    text = "GPU of a test, 80 GiB; cells of the LSTM in plain PyTorch, because triton is missing"
    assert dict(doctor.accelerators()) == {"cuda:0": text, "cuda:1": text}


def test_a_package_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PACKAGE", "no-such-package")
    monkeypatch.setattr(sys, "argv", ["elmo doctor"])
    with pytest.raises(SystemExit) as ended:
        run(doctor.main)
    assert ended.value.code == 2
    assert "is not installed" in capsys.readouterr().err
