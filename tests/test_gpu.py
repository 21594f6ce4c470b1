"""The facts of a card, from what torch and NVIDIA's own program answer."""

from types import SimpleNamespace

import pytest
import torch

from modeling_elmo.run_scripts.benchmarks.model_speed import device_conditions
from modeling_elmo.run_scripts.program import gpu


@pytest.fixture
def card(monkeypatch):
    properties = SimpleNamespace(name="GPU of a test", total_memory=80 * 2**30, major=8, minor=6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(gpu, "triton", SimpleNamespace(__version__="3.6.0"))
    return torch.device("cuda", 1)


def write_nvidia_smi(folder, answer, monkeypatch):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_facts_of_a_card(card, tmp_path, monkeypatch):
    write_nvidia_smi(tmp_path, "echo 580.95.05; echo 580.95.05", monkeypatch)
    found = gpu.gpu_facts(card)
    assert found == ("GPU of a test", 80 * 2**30, "8.6", "580.95.05", "CUDA 13.2", "3.6.0") and found.gibibytes == 80
    assert device_conditions(card) == {
        "device": "GPU of a test",
        "device_memory": 80 * 2**30,
        "compute_capability": "8.6",
        "driver": "580.95.05",
        "cuda": "13.2",
        "triton": "3.6.0",
    }
    assert device_conditions(torch.device("cpu")) == {"device": "cpu"}
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(gpu, "triton", None)
    assert gpu.gpu_facts(card)[4:] == ("ROCm 6.4", None)


def test_a_driver_that_does_not_answer(tmp_path, monkeypatch):
    write_nvidia_smi(tmp_path, "echo NVIDIA-SMI has failed because it could not find a driver; exit 9", monkeypatch)
    assert gpu.driver_version() == "unknown"
    monkeypatch.setattr(gpu.shutil, "which", lambda command: None)
    assert gpu.driver_version() == "unknown"
