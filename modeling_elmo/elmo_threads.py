"""Independent calls at once on CPU, each with a part of torch's threads.

A step of an LSTM is a few products of few rows. Threads that share such a product wait for each other several times a
step. The two directions do not need each other, so each gets threads of its own, and they wait once, at the end.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import cache
from typing import Any, TypeVar

import torch

from .elmo_operators import is_watched, question

T = TypeVar("T")
FEW_MULTIPLICATIONS = 10e6  # of a step: below, one thread is faster than two that work at once
FEW_IN_INT8 = 30e6
PROFILER = "autograd._profiler_enabled"
_helpers: ThreadPoolExecutor


def at_once(calls: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """The results of calls that run at the same time, each with `threads` threads of torch.

    The last call runs in the caller's thread. So does any other that no thread was free for when the last one ended, or
    that comes while the interpreter ends. The caller's gradient mode, autocast and context variables hold in all of
    them. An error of a call is raised when all have ended.
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
    """Sets torch's number of threads in the calling thread, and in no other."""
    before, set_number = torch.get_num_threads(), _set_own_threads()
    if set_number is not None:
        set_number(number)
    try:
        yield
    finally:
        if set_number is not None:
            set_number(before)


@cache
def _set_own_threads() -> Callable[[int], Any] | None:
    """OpenMP's function for the calling thread, or `None` if torch computes with other threads than OpenMP's.

    `torch.set_num_threads` would change the number of all threads that start later, too.
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


def _start_helpers():
    global _helpers
    _helpers = ThreadPoolExecutor(os.cpu_count(), "elmo")  # its threads start with the calls


_start_helpers()
if hasattr(os, "register_at_fork"):  # a forked process has none of its parent's threads
    os.register_at_fork(after_in_child=_start_helpers)
