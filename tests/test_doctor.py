"""`elmo doctor`: the report of versions, processor, accelerators and chosen backends."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bilm_models import save, tiny_model

import modeling_elmo
from modeling_elmo import ELMoTokenizer
from modeling_elmo.kernels.plan import elmo_backend
from modeling_elmo.run_scripts import doctor
from modeling_elmo.run_scripts.program import gpu
from modeling_elmo.shipping import MODULES, first_line


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


def test_the_version_of_torch_has_its_build(monkeypatch):
    """The wheel of PyPI is 2.15.0, and says what it was built for only when it is imported."""
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu132")
    assert doctor.machine_facts()["Versions"]["torch"] == "2.15.0+cu132"


def test_what_a_machine_has_and_lacks(monkeypatch):
    monkeypatch.setattr(doctor, "int8_obstacle", lambda: "this processor has no VNNI instructions")
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    found = doctor.machine_facts()
    assert found["Versions"]["no-such-package"] == "missing"
    assert found["Processor"]["8 bits"] == "slow: this processor has no VNNI instructions"


@pytest.fixture
def two_cards(monkeypatch):
    """What torch says about two cards of NVIDIA."""
    card = SimpleNamespace(name="GPU of a test", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(doctor, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))  # where it can compute
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(gpu, "driver_version", lambda: "580.95.05")


def test_the_cards(two_cards, monkeypatch):
    monkeypatch.setattr(gpu, "triton", SimpleNamespace(__version__="3.6.0"))
    card = "GPU of a test, 80 GiB, compute capability 9.0"
    with elmo_backend("reference"):
        found = doctor.machine_facts()["Accelerators"]
    assert found == {
        "device": "cpu",
        "cuda:0": card,
        "cuda:1": card,
        "driver": "580.95.05; torch is built for CUDA 13.2",
        "triton": "3.6.0",
        "LSTM": "reference, forced",
        "LSTM, --bf16": "reference, forced",
    }
    assert doctor.machine_facts()["Accelerators"]["LSTM"] == "inference, fastest on cpu"
    monkeypatch.setattr(gpu, "triton", None)
    missing = "missing, so the LSTM computes its cells in plain PyTorch"
    assert doctor.machine_facts()["Accelerators"]["triton"] == missing


def test_a_card_for_which_torch_has_no_kernels(two_cards, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nand advice")

    monkeypatch.setattr(torch, "zeros", fail)
    expected = "fails: CUDA error: no kernel image is available for execution on the device"
    assert doctor.accelerators()["LSTM"] == expected


def test_the_code_of_a_folder(tmp_path, capsys):
    folder = tmp_path / "saved"
    save(folder, tiny_model(), ELMoTokenizer())
    model, tokenizer, version = folder / "modeling_elmo.py", folder / "tokenization_elmo.py", modeling_elmo.__version__
    ours = f"the installed modeling_elmo {version}"
    equal = f"equals the code that {ours} generates"
    doctor.main([str(folder)])
    assert f"\nCode in {folder}\n  configuration_elmo.py  {equal}\n" in capsys.readouterr().out
    assert doctor.code_facts(folder) == dict.fromkeys(MODULES, equal)

    sections = model.read_bytes().partition(b"\n")[2]
    changed = sections.replace(b"relu", b"tanh")
    for lines, digest_of, expected in (
        ((version, changed), sections, f"differs from the code that {ours} generates"),
        ((version, changed), changed, f"differs from the code that {ours} generates"),  # a header proves nothing
        (("0.9", changed), changed, "generated by modeling_elmo 0.9; its sections match its own header"),
        (("0.9", changed), sections, "generated by modeling_elmo 0.9; its sections do not match its own header"),
    ):
        number, text = lines
        model.write_bytes(first_line(number, digest_of) + text)
        assert doctor.code_fact(model).startswith(expected)
    model.write_text("import os\n")
    assert doctor.code_fact(model) == f"not generated; {ours} says nothing about it"
    tokenizer.unlink()
    (folder / "elmo_lstm.py").touch()
    missing = "missing; write `import modeling_elmo` before you load the model"
    assert doctor.code_facts(folder)["tokenization_elmo.py"] == missing
    assert doctor.code_facts(folder)["other code"] == "elmo_lstm.py"


def test_what_is_no_folder_of_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder; pass the folder of a model"):
        doctor.main([str(tmp_path / "nowhere")])
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        doctor.main([str(tmp_path)])
