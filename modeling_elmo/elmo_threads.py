"""Independent calls at once on CPU, each with a part of torch's threads.

A step of an LSTM is a few products of few rows. Threads that share such a product wait for each other several times a
step. The two directions do not need each other, so each gets threads of its own, and they wait once, at the end.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import Context, copy_context
from functools import cache
from typing import TypeVar

import torch
from torch.utils import _python_dispatch

T = TypeVar("T")
FEW_MULTIPLICATIONS = 10e6  # of a step: below, one thread is faster than two that work at once
FEW_IN_INT8 = 30e6


def at_once(calls: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """The results of up to two calls that run at the same time, each with `threads` threads of torch.

    The caller's gradient mode, autocast and context variables hold in the calls. An error of a call is raised when all
    have ended.
    """
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu")

    def run(context: Context, call: Callable[[], T]) -> T:
        inference, gradients, autocast = modes
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(gradients),
            torch.autocast("cpu", dtype, enabled=autocast),
        ):
            return context.run(call)

    futures = [_workers(threads).submit(run, copy_context(), call) for call in calls]
    wait(futures)
    return [future.result() for future in futures]


def can_use_threads(device: torch.device) -> bool:
    """Whether torch has several threads on this device. A mode that watches operators sees its own thread only."""
    is_watched = torch.compiler.is_compiling() or _python_dispatch._get_current_dispatch_mode() is not None
    return device.type == "cpu" and torch.get_num_threads() > 1 and not is_watched


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    """Two threads of Python, each with `threads` threads of torch."""
    own, both_started = torch.get_num_threads(), threading.Barrier(2)

    def start():
        torch.set_num_threads(threads)
        torch.get_num_threads()  # a thread takes its number when it is first asked, and keeps it

    pool = ThreadPoolExecutor(2, "elmo", start)
    wait([pool.submit(both_started.wait) for _ in range(2)])
    torch.set_num_threads(own)  # `start` has set the number for all new threads
    return pool


if hasattr(os, "register_at_fork"):  # a forked process has none of its parent's threads
    os.register_at_fork(after_in_child=_workers.cache_clear)
