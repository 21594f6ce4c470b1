"""Processes: all processes of one run work together, and two runs never write into the same folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Listener
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from transformers.utils import logging

from modeling_elmo.kernels.onednn import bfloat16_obstacle

logger = logging.get_logger(__name__)

LOCK = ".lock"
IMPORTED_IN = os.getpid()


def has_accelerator() -> bool:
    """Without one, accelerate must be told to use the CPU: else each process of `torchrun` is a run of its own."""
    return torch.accelerator.is_available()


def computes_bfloat16(device: str, option: str) -> bool:
    """Whether an option for bfloat16 is good for a device; a CPU without its instructions computes in float32."""
    obstacle = bfloat16_obstacle() if device == "cpu" else None
    if obstacle:
        logger.warning_once(f"{option}: {obstacle}, so float32 is faster. This run computes in float32.")
    return obstacle is None


def check_processes(number: int):
    """Compares the number of processes in a run with the number that a launcher started."""
    started = int(os.environ.get("WORLD_SIZE", number))
    if started != number:
        received = f"{started} processes were started (WORLD_SIZE), but this run has {number}"
        raise ValueError(f"{received}: start one process, or set ACCELERATE_USE_CPU=true.")


def check_workers(number: int):
    """Refuses worker processes of a `DataLoader` where they cannot send their batches."""
    try:
        if number:
            Listener().close()
    except OSError as error:
        place = f"{gettempdir()}, whose path is too long, or which cannot be written"
        raise ValueError(
            f"--dataloader_num_workers {number}: workers need a socket in {place}. Set TMPDIR, or pass 0."
        ) from error


def use_one_thread_if_forked():
    """In a forked process the threads of OpenMP, which are in the parent, never answer."""
    if os.getpid() != IMPORTED_IN:
        torch.set_num_threads(1)


def join_processes() -> tuple[int, int]:
    """Joins the processes of a launcher, `torchrun` for example; returns their number and the index of this one."""
    number = int(os.environ.get("WORLD_SIZE", 1))
    index = int(os.environ.get("RANK", 0))
    if number > 1:
        dist.init_process_group("gloo", timeout=timedelta(days=30))  # shares of a corpus may take days
    return number, index


def values_of_all(value: Any, number: int) -> list[Any]:
    """The values of all processes, when all have called this."""
    values = [value] * number
    try:
        if number > 1:
            dist.all_gather_object(values, value)
    except RuntimeError as error:  # of gloo
        raise ConnectionError(f"One of {number} processes has ended. Run the same command again.") from error
    return values


def local_device(name: str | None = None, rank: int | None = None) -> torch.device:
    """The device of this process, which becomes torch's current device.

    Each process on a machine takes a CUDA device of its own, by its `rank` or what a launcher says.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and device.index is None:
            rank = int(os.environ.get("LOCAL_RANK", 0)) if rank is None else rank
            device = torch.device("cuda", rank % max(1, torch.cuda.device_count()))
        torch.ones((), device=device).item()
    except (RuntimeError, AssertionError) as error:  # no such name or card, no data, or not built in
        raise ValueError(f"--device {name}: torch cannot compute on it here; pass cpu, cuda or cuda:1.") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextmanager
def sole_run(folder: Path, option: str = "--output_dir", is_main_process: bool = True) -> Iterator[None]:
    """Keeps other runs out of a folder, which is created if necessary, and removed if nothing was written.

    The system ends the lock with the main process, even a killed one: a file that stays behind does not lock.
    """
    if not is_main_process:
        yield
        return
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{option} {folder} is a file; pass a folder.")
    is_new, lock = not folder.exists(), FileLock(folder / LOCK)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FileExistsError(f"Another run is writing into {folder}. Wait, or pass another {option}.") from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file
            (folder / LOCK).unlink()
        lock.release()
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
