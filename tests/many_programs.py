"""Several programs of one kernel on a CPU: each is a process that really waits for the others.

Triton's interpreter runs the programs of a grid one after the other. So a kernel whose programs wait for each other
runs there with one program, and mistakes *between* programs are never seen: a barrier that is passed too early or
never, a tile that needs another tile of its own phase, a value in a cache that another program has changed. Inside
`with together():` every launch forks one process for each program, over shared memory. Barriers are the kernel's own,
because the interpreter's atomic operations are the processor's. Programs pause at random. Each has a cache that never
forgets: 128 bytes a line, filled by every load without `cache_modifier=".cg"`, changed only by the program's own
stores. A GPU forgets more than that; what is right here does not depend on it.
"""

import contextlib
import ctypes
import importlib.util
import inspect
import os
import random
import signal
import sys
import time
import traceback

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

LINE = 128
BUILDER = interpreter.interpreter_builder
TensorHandle = interpreter.TensorHandle


class Cache:
    """The cache of one program, which keeps each line from its first load on."""

    def __init__(self):
        self.lines = {}

    def load(self, addresses, mask):
        """Puts the lines into the cache, and returns the addresses of their copies."""
        for number in np.unique(addresses[mask] // LINE).tolist():
            if number not in self.lines:
                line = bytearray(ctypes.string_at(number * LINE, LINE))
                self.lines[number] = np.frombuffer(line, np.uint8)
        return self.find(addresses, mask)[0]

    def find(self, addresses, mask):
        """The addresses of the copies, and where there are any."""
        numbers, inverse = np.unique(addresses[mask] // LINE, return_inverse=True)
        bases = [self.lines[number].ctypes.data if number in self.lines else 0 for number in numbers.tolist()]
        copies, is_known = addresses.copy(), np.zeros(addresses.shape, bool)
        if len(numbers):
            base_of_each = np.array(bases, np.uint64)[inverse]
            copies[mask] = base_of_each + addresses[mask] % LINE
            is_known[mask] = base_of_each > 0
        return copies, is_known


def run_program(executor, arguments, options, run, rank, programs, seed):
    """What a forked process does: program `rank` of all programs."""
    chance, cache = random.Random(seed * 1000 + rank), Cache()
    kind = type(BUILDER)
    load, store, atomic = kind.create_masked_load, kind.create_masked_store, kind.create_atomic_rmw

    def pause():
        if chance.random() < 0.02:
            time.sleep(chance.random() * 0.003)

    def load_by_cache(pointers, mask, other, *policy, **more):
        pause()
        if ".cg" not in str([*policy, *more.values()]).lower():
            addresses = np.asarray(pointers.data, np.uint64)
            copies = cache.load(addresses, np.broadcast_to(mask.data, addresses.shape))
            pointers = TensorHandle(copies, pointers.dtype)
        return load(BUILDER, pointers, mask, other, *policy, **more)

    def store_through(pointers, value, mask, *policy, **more):
        pause()
        store(BUILDER, pointers, value, mask, *policy, **more)
        addresses = np.asarray(pointers.data, np.uint64)
        copies, is_known = cache.find(addresses, np.broadcast_to(mask.data, addresses.shape))
        if is_known.any():
            copies, is_known = TensorHandle(copies, pointers.dtype), TensorHandle(is_known, mask.dtype)
            store(BUILDER, copies, value, is_known, *policy, **more)

    def atomic_and_yield(*arguments, **more):
        time.sleep(0)
        return atomic(BUILDER, *arguments, **more)

    BUILDER.create_masked_load = load_by_cache
    BUILDER.create_masked_store = store_through
    BUILDER.create_atomic_rmw = atomic_and_yield
    BUILDER.get_cache_policy = lambda modifier, eviction: "." + modifier  # triton 3.9 forgets it
    set_index, set_size = BUILDER.set_grid_idx, BUILDER.set_grid_dim
    BUILDER.set_grid_idx = lambda *_: set_index(rank, 0, 0)
    BUILDER.set_grid_dim = lambda *_: set_size(programs, 1, 1)
    executor.grid = (1,)
    run(executor, *arguments, **options)


@contextlib.contextmanager
def together(seed=0, timeout=120):
    """Every launch inside runs one process for each program. `TimeoutError` where one never ends."""
    run = interpreter.GridExecutor.__call__

    def launch(self, *arguments, **options):
        (programs,) = self.grid
        for value in [*arguments, *options.values()]:
            if isinstance(value, torch.Tensor):
                value.untyped_storage().share_memory_()
        children = []
        for rank in range(programs):
            child = os.fork()
            if not child:
                code = 1
                try:
                    run_program(self, arguments, options, run, rank, programs, seed)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
        _wait(children, timeout)

    interpreter.GridExecutor.__call__ = launch
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = run


def _wait(children, timeout):
    end, failed = time.monotonic() + timeout, 0
    try:
        while children and not failed and time.monotonic() < end:
            for child in list(children):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    children.remove(child)
                    failed += status != 0
            time.sleep(0.001)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if failed:
        raise RuntimeError("a program failed")
    if children:
        raise TimeoutError(f"{len(children)} programs never ended")


@contextlib.contextmanager
def with_bfloat16():
    """Products of bfloat16, and rounding to the nearest: the interpreter multiplies the bits as integers, and cuts."""
    kind = type(BUILDER)
    names = "create_dot", "cast_impl", "create_fp_trunc"
    before = {name: getattr(kind, name) for name in names}

    def wide(values):
        if values.dtype.scalar != tl.bfloat16:
            return values
        floats = interpreter._convert_float(values.data, tl.bfloat16, tl.float32, None)
        return TensorHandle(floats.view(np.float32), tl.float32)

    def rounded(self, source, target):
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return before["cast_impl"](self, source, target)
        values = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16).view(torch.int16)
        return TensorHandle(values.numpy().view(np.uint16).reshape(source.data.shape), tl.bfloat16)

    kind.create_dot = lambda self, a, b, *rest: before["create_dot"](self, wide(a), wide(b), *rest)
    kind.cast_impl = kind.create_fp_trunc = rounded
    try:
        yield
    finally:
        for name in names:
            setattr(kind, name, before[name])


def broken(module, change, folder, monkeypatch):
    """A module loaded again from its source, with `change(source)` in place of its source."""
    source = inspect.getsource(module)
    changed = change(source)
    assert changed != source
    path = folder / f"{module.__name__.rpartition('.')[2]}.py"
    path.write_text(changed)
    spec = importlib.util.spec_from_file_location(module.__name__ + "_broken", path)
    made = importlib.util.module_from_spec(spec)  # its name gives it the package, for relative imports
    monkeypatch.setitem(sys.modules, spec.name, made)
    spec.loader.exec_module(made)
    return made
