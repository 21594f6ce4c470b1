"""What oneDNN can do on a processor, against the processor's own flags and tables written by hand."""

import platform
import re
from pathlib import Path

import pytest
import torch

from modeling_elmo.kernels import onednn
from modeling_elmo.kernels.onednn import bfloat16_obstacle, processor_name


def test_torch_2_8_does_not_know_the_processor(monkeypatch):
    """And the package is imported all the same."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "A processor"}, raising=False)
    assert processor_name() == "A processor"
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert processor_name() == (platform.processor() or platform.machine()) != ""


@pytest.mark.parametrize(
    "machine, of_onednn, of_avx512, is_fast",
    [
        ("x86_64", True, True, True),
        ("AMD64", True, False, False),  # emulated
        ("x86_64", False, False, False),
        ("aarch64", True, False, True),
        ("arm64", False, False, False),
    ],
)
def test_bfloat16_needs_instructions_of_its_own(machine, of_onednn, of_avx512, is_fast, monkeypatch):
    dtypes = {torch.float32, torch.bfloat16} if of_onednn else {torch.float32}
    monkeypatch.setattr(onednn, "onednn_dtypes", lambda: dtypes)
    monkeypatch.setattr(onednn.platform, "machine", lambda: machine)
    monkeypatch.setattr(onednn, "question", lambda name: lambda: of_avx512)
    assert bfloat16_obstacle() == (None if is_fast else "this processor has no instructions for bfloat16")


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="a file of Linux")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_bfloat16_on_this_machine():
    text = Path("/proc/cpuinfo").read_text("utf-8")
    flags = set(re.search(r"^(?:flags|Features)\s*:(.*)", text, re.MULTILINE)[1].split())
    assert (bfloat16_obstacle() is None) == bool(flags & {"avx512_bf16", "bf16"})
