"""What a report must say about a CUDA device: the card, its driver, and what computes on it."""

import shutil
import subprocess
from typing import NamedTuple

import torch

from modeling_elmo.kernels.lstm_cuda import triton

UNKNOWN = "unknown"


class GPUFacts(NamedTuple):
    name: str
    memory: int  # in bytes
    capability: str  # such as "9.0"
    driver: str
    toolkit: str  # for which torch is built, such as "CUDA 13.2"
    triton: str | None  # its version, or `None` if it is missing

    @property
    def gibibytes(self) -> float:
        return self.memory / 2**30


def gpu_facts(device: torch.device) -> GPUFacts:
    """The facts of a device that torch calls `cuda`, also on cards of AMD."""
    card = torch.cuda.get_device_properties(device)
    is_amd = torch.version.hip is not None
    return GPUFacts(
        name=card.name,
        memory=card.total_memory,
        capability=f"{card.major}.{card.minor}",
        driver=driver_version(),
        toolkit=f"ROCm {torch.version.hip}" if is_amd else f"CUDA {torch.version.cuda}",
        triton=None if triton is None else triton.__version__,
    )


def driver_version() -> str:
    """Of NVIDIA's driver, from its own program: torch only knows the newest CUDA that the driver supports."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return UNKNOWN
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, encoding="utf-8")
    versions = answer.stdout.split() if answer.returncode == 0 else []
    return versions[0] if versions else UNKNOWN
