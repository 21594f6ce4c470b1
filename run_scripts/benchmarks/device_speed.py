"""Speed of the biLM on an accelerator: every path and precision, checked against the definition on the CPU in float32.

The ids of a batch stay on the CPU, as in `elmo pretrain`. A time ends when the device has finished. Each row has two
more figures: the kernels that the host launches in a run, and the most memory that a run takes, in megabytes.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.profiler import profile

from modeling_elmo import ELMoModel
from modeling_elmo.elmo_lstm_fused import triton
from modeling_elmo.run_scripts.benchmarks.model_speed import computation, encode_words
from modeling_elmo.run_scripts.benchmarks.timing import TOLERANCE, Contest, Implementation, Outputs

DEVICE_PARTS = ("inference", "training")
PRECISIONS = {"float32": TOLERANCE, "tf32": 0.02, "bfloat16": 0.1}  # with the largest error of each
LAUNCHES = ("LaunchKernel", "GraphLaunch")  # parts of the names of CUDA's functions


@contextmanager
def precision_of(name: str, device: torch.device) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=name == "bfloat16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def device_contest(
    part: str, name: str, batch: list[list[str]], model: ELMoModel, there: ELMoModel, torch_lstm: ELMoModel
) -> Contest:
    """Our code, the definition and `torch.nn.LSTM` on one batch.

    Args:
        part: `"inference"`, or `"training"`: forward and backward, without dropout and optimizer.
        model: the model on the CPU; `there` and `torch_lstm` are copies on the device.
    """
    encoding = encode_words(batch)
    call_of = partial(computation, part, encoding)
    expected = {key: value.to(there.device) for key, value in call_of(model, "reference")().items()}
    calls = {
        "this package": call_of(there),
        "plain definition": call_of(there, "reference"),
        "torch.nn.LSTM": call_of(torch_lstm),
    }
    implementations = [
        in_precision(title, call, expected, there.device, precision)
        for title, call in calls.items()
        for precision in PRECISIONS
    ]
    return Contest(part, name, int(encoding.attention_mask.sum()), "tokens", implementations)


def in_precision(
    title: str, call: Callable[[], Outputs], expected: Outputs, device: torch.device, precision: str
) -> Implementation:
    module: Any = torch.get_device_module(device)

    def run() -> Outputs:
        with precision_of(precision, device):
            outputs = call()
        module.synchronize()
        return outputs

    def details() -> dict[str, float]:
        module.reset_peak_memory_stats()
        with profile() as profiler:
            run()
        launches = sum(each.count for each in profiler.key_averages() if any(name in each.key for name in LAUNCHES))
        return {"launches": launches, "megabytes": module.max_memory_allocated() / 1e6}

    return Implementation(f"{title}, {precision}", run, expected, PRECISIONS[precision], details)


def device_conditions(device: torch.device) -> dict[str, Any]:
    """What a reader of the figures must know about a CUDA device."""
    if device.type != "cuda":
        return {"device": str(device)}
    properties, command = torch.cuda.get_device_properties(device), shutil.which("nvidia-smi")
    query = [str(command), "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, encoding="utf-8").stdout.split() if command else []
    return {
        "device": properties.name,
        "device_memory": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": driver[0] if driver else "unknown",
        "cuda": torch.version.cuda,
        "triton": None if triton is None else triton.__version__,
    }
