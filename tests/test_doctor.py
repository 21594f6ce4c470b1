"""`elmo doctor`: the report of versions, processor, accelerators and chosen backends."""

import numpy as np
import torch

from modeling_elmo.elmo_backends import elmo_backend
from modeling_elmo.run_scripts import doctor


def test_the_report_of_this_machine(capsys):
    doctor.main([])
    printed, facts = capsys.readouterr().out, doctor.machine_facts()
    assert facts["Versions"]["torch"] == torch.__version__ and facts["Versions"]["numpy"] == np.__version__
    assert [line for line in printed.splitlines() if line and line[0] != " "] == list(facts)
    assert all(f"  {name}" in printed and text in printed for pairs in facts.values() for name, text in pairs.items())
    with elmo_backend("reference"):
        forced = doctor.machine_facts()["Chosen backends on CPU"]
    assert {*forced.values()} == {"reference"} and "reference" not in facts["Chosen backends on CPU"]["vectors"]


def test_without_bfloat16_training_computes_in_float32(monkeypatch):
    monkeypatch.setattr(doctor, "bfloat16_obstacle", lambda: "this processor has no instructions for bfloat16")
    chosen = doctor.machine_facts()["Chosen backends on CPU"]
    assert chosen["training, --bf16"] == chosen["training"]


def test_what_a_machine_has_and_lacks(monkeypatch):
    facts = type("Facts", (), {"name": "GPU of a test", "total_memory": 80 * 2**30})
    monkeypatch.setattr(doctor, "int8_obstacle", lambda: "this processor has no VNNI instructions")
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(doctor, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: facts)
    monkeypatch.setattr(doctor.elmo_lstm_fused, "triton", None)
    found = doctor.machine_facts()
    assert found["Versions"]["no-such-package"] == "missing"
    assert found["Processor"]["8 bits"] == "slow: this processor has no VNNI instructions"
    text = "GPU of a test, 80 GiB; cells of the LSTM in plain PyTorch, because triton is missing"
    assert found["Accelerators"]["cuda:0"] == found["Accelerators"]["cuda:1"] == text
