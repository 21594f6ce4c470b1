"""A simulated accelerator, to test without a GPU what a GPU would do: device `fakegpu` on the memory of the host.

    with fakegpu.recording() as seen:
        model(**batch)
    seen.num_launches, seen.num_waits

The import builds `fakegpu.cpp` into torch's folder of extensions, which takes a minute the first time. It needs g++ and
ninja.

As on CUDA, operators refuse tensors of two devices, except indices, and 0-dim tensors of the CPU where TensorIterator
takes them. `recording` counts launches (operators that are not views; CUDA launches at least one kernel for each) and
waits of the host for the device: `.item()`, `bool(tensor)`, copies to the host, copies from pageable memory (also with
`non_blocking=True`), masks as indices, and operators whose CUDA kernels wait. Memory is NaN until it is written.
`cuda_graphs` lends `torch.cuda` graphs that refuse waits and repeat launches with the same memory, and one stream.

Not simulated: streams and races, limits of memory, CUDA's numerics, kernels that CUDA lacks for a dtype,
`device.type == "cuda"`.
"""

import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock, patch

import torch
from torch.utils.cpp_extension import load

NAME = "fakegpu"
OURS = ("/modeling_elmo/", "/run_scripts/")
_C = load("fakegpu", [str(Path(__file__).with_suffix(".cpp"))], extra_cflags=["-O0", "-w", "-std=c++20"])


class Recording:
    """Launches by operator, and waits by kind and place."""

    def __init__(self):
        self.launches, self.waits = Counter(), Counter()

    @property
    def num_launches(self) -> int:
        return sum(self.launches.values())

    @property
    def num_waits(self) -> int:
        return sum(number for (kind, _), number in self.waits.items() if not kind.endswith("async"))


_recordings = []


@contextmanager
def recording():
    seen = Recording()

    _recordings.append(seen)
    _start(seen)
    try:
        yield seen
    finally:
        seen.launches.update(_C.stop())
        _recordings.remove(seen)


def as_one_launch(function):
    """The definition of a kernel, counted as the one launch that the kernel is on CUDA."""

    def launch(*arguments):
        for seen in _recordings:
            seen.launches.update(_C.stop())
            seen.launches[function.__name__] += 1
        result = function(*arguments)
        for seen in _recordings:
            _start(seen)
        return result

    return launch


class CUDAGraph:
    def replay(self):
        _C.replay(self.calls)


@contextmanager
def _capture(graph: CUDAGraph):
    _C.begin_capture()
    try:
        yield
    finally:
        graph.calls = _C.end_capture()


@contextmanager
def cuda_graphs():
    stream = Mock()
    values = {"CUDAGraph": CUDAGraph, "graph": _capture, "Stream": lambda: stream, "current_stream": lambda: stream}
    with patch.multiple(torch.cuda, **values, stream=nullcontext):
        yield


def _start(seen: Recording):
    def note(kind, _):
        seen.waits[kind, _place()] += 1

    _C.start(note)


def _place() -> str:
    """The innermost line of the package on the stack."""
    frame = sys._getframe()
    while frame is not None and not any(folder in frame.f_code.co_filename for folder in OURS):
        frame = frame.f_back
    return "elsewhere" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _device_module() -> ModuleType:
    """What torch, accelerate and transformers ask of `torch.fakegpu`."""
    module = ModuleType(NAME)
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module.synchronize = module.empty_cache = module.reset_peak_memory_stats = lambda *_: None
    module.device = nullcontext
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = lambda seed: _C.seed(seed % 2**63)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_rng_state = lambda *_: torch.zeros(1, dtype=torch.uint8)
    module.set_rng_state = lambda *_: None
    module.memory_allocated = module.max_memory_allocated = lambda *_: 0
    return module


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _device_module())
torch.utils.generate_methods_for_privateuse1_backend()
