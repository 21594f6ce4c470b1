"""Callers that share the cores of a CPU, and independent calls at once.

A step of an LSTM is a few products of few rows. Threads that share such a product wait for each other several times a
step. The two directions do not need each other, so each gets threads of its own, and they wait once, at the end.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import cache
from pathlib import Path
from threading import Semaphore
from typing import Any, TypeVar

import torch

from .torch_state import is_watched, question

PROFILER = "autograd._profiler_enabled"
_is_counted: ContextVar[bool] = ContextVar("counted among the callers", default=False)
_slots: Semaphore
_callers: set[object] = set()  # calls of models that run now, in all threads
_helpers: ThreadPoolExecutor
T = TypeVar("T")


@contextmanager
def own_share() -> Iterator[None]:
    """Shares the cores among the threads that call a model: one call per core, each with its part of torch's threads.

    A further call waits for a core, but only for a second, because a call that computes may itself wait for this one.
    """
    if _is_counted.get() or torch.compiler.is_compiling():
        yield
        return
    token, marker, slots = _is_counted.set(True), object(), _slots
    has_slot = slots.acquire(timeout=1)
    _callers.add(marker)
    try:
        with _own_threads(max(1, torch.get_num_threads() // len(_callers))):
            yield
    finally:
        _callers.discard(marker)
        if has_slot:
            slots.release()
        _is_counted.reset(token)


def at_once(calls: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """The results of calls that run at the same time, each with `threads` threads of torch.

    The caller's thread runs the last call. It also runs each other call that found no free thread until then, or that
    comes while the interpreter shuts down. The caller's gradient mode, autocast and context variables apply to all
    calls. If a call fails, its error is raised when all have ended.
    """
    *others, last = calls
    futures = [_submitted(call, threads) for call in others]
    try:
        with _own_threads(threads):
            found = last()
    finally:
        wait([future for future in futures if not future.cancel()])
    parallel = zip(futures, others, strict=True)
    return [*(call() if future.cancelled() else future.result() for future, call in parallel), found]


def _submitted(call: Callable[[], T], threads: int) -> Future:
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu")

    def run(context: Context) -> T:
        inference, gradients, autocast = modes
        with (
            _own_threads(threads),
            torch.inference_mode(inference),
            torch.set_grad_enabled(gradients),
            torch.autocast("cpu", dtype, enabled=autocast),
        ):
            return context.run(call)

    try:
        return _helpers.submit(run, copy_context())
    except RuntimeError:  # the interpreter ends, and starts no more threads
        return Future()


def can_use_threads(device: torch.device) -> bool:
    """Whether torch has several threads on this device, and nothing that watches operators sees its own thread only."""
    if device.type != "cpu" or torch.get_num_threads() == 1 or torch.compiler.is_compiling():
        return False
    return not is_watched() and not question(PROFILER)() and _set_own_threads() is not None


@contextmanager
def _own_threads(number: int) -> Iterator[None]:
    """Sets the number of threads of torch, and of MKL inside it, in the calling thread, and in no other."""
    before = torch.get_num_threads()
    set_number = None if before == number else _set_own_threads()
    if set_number is None:
        yield
        return
    set_number(number)
    before_in_mkl = _set_own_mkl_threads()(number)
    try:
        yield
    finally:
        set_number(before)
        _set_own_mkl_threads()(before_in_mkl)


@cache
def _set_own_threads() -> Callable[[int], Any] | None:
    """OpenMP's function that sets the number of threads of the calling thread; `None` if torch does not use OpenMP.

    torch's own function sets the number for all threads.
    """
    try:
        set_number = ctypes.CDLL("libiomp5md" if sys.platform == "win32" else None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return None
    before = torch.get_num_threads()  # which also gives this thread its first number, if it has none
    set_number(before + 1)
    is_ours = torch.get_num_threads() == before + 1
    set_number(before)
    return set_number if is_ours else None


@cache
def _set_own_mkl_threads() -> Callable[[int], Any]:
    """MKL's function for the calling thread: `torch.set_num_threads` gives it a number of its own."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).MKL_Set_Num_Threads_Local
    except (AttributeError, OSError):
        return lambda number: number


def _start_helpers():
    global _helpers, _slots
    _slots = Semaphore(os.cpu_count() or 1)
    _callers.clear()
    _helpers = ThreadPoolExecutor(os.cpu_count(), "elmo")  # its threads start with the calls


_start_helpers()


if hasattr(os, "register_at_fork"):  # a forked process has none of its parent's threads
    os.register_at_fork(after_in_child=_start_helpers)
