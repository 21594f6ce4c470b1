"""`elmo doctor`: the report of versions, processor, accelerators and chosen backends."""

import numpy as np
import torch

from modeling_elmo.elmo_backends import elmo_backend
from modeling_elmo.run_scripts import doctor


def test_the_report_of_this_machine(capsys):
    doctor.main([])
    printed = capsys.readouterr().out
    facts = {title: dict(lines()) for title, lines in doctor.SECTIONS.items()}
    assert facts["Versions"]["torch"] == torch.__version__ and facts["Versions"]["numpy"] == np.__version__
    assert [line for line in printed.splitlines() if line and line[0] != " "] == list(facts)
    assert all(f"  {name}" in printed and text in printed for pairs in facts.values() for name, text in pairs.items())
    assert f"{torch.get_num_threads()} threads" in facts["Processor"]["name"]


def test_backends_are_those_that_are_chosen():
    found = dict(doctor.chosen_backends())
    assert set(found) == {"vectors", "training", "training, --bf16"}
    with elmo_backend("reference"):
        assert {*dict(doctor.chosen_backends()).values()} == {"reference"} and "reference" not in found["vectors"]


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


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    assert dict(doctor.versions())["no-such-package"] == "missing"
