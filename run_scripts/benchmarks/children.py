"""Cases that run in a process of their own, with a deadline: a kernel whose barrier is wrong never ends.

A process takes seconds to import torch. So some are started ahead, and wait for their case: a line of JSON. They answer
with rows, each as soon as it is measured, so that those before a failure are kept.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

ROW = "ROW "  # begins a line of the answer; all else that a process prints is left out


class Answer(NamedTuple):
    rows: list[dict[str, Any]]
    failure: str | None  # why there are no more rows


class Children:
    """Processes of one command, of which `ahead` are waiting. They end with the `with` block."""

    def __init__(self, command: Sequence[str], ahead: int):
        self.command, self.ahead = list(command), ahead
        self.waiting: deque[subprocess.Popen] = deque()

    def __enter__(self) -> "Children":
        self._start()
        return self

    def __exit__(self, *_):
        for process in self.waiting:
            end(process)
            process.communicate()

    def run(self, case: dict[str, Any], seconds: float) -> Answer:
        """The rows of a case from a process that was started ahead."""
        process = self.waiting.popleft()
        self._start()
        return ask(process, case, seconds)

    def _start(self):
        while len(self.waiting) < max(1, self.ahead):
            self.waiting.append(start(self.command))


def start(command: Sequence[str]) -> subprocess.Popen:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    options: dict[str, Any] = {**pipes, "encoding": "utf-8", "errors": "replace", "start_new_session": True}
    return subprocess.Popen(list(command), **options)


def ask(process: subprocess.Popen, case: dict[str, Any], seconds: float) -> Answer:
    """The rows of a case, or those that were there after `seconds`, when its process was killed."""
    failure = None
    try:
        printed, errors = process.communicate(json.dumps(case) + "\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        failure = f"no answer within {seconds:.0f} s"
        end(process)
        printed, errors = process.communicate()
    rows = [json.loads(line.removeprefix(ROW)) for line in printed.splitlines() if line.startswith(ROW)]
    if failure is None and process.returncode:
        failure = f"ended with status {process.returncode}: {last_line_of(errors)}"
    return Answer(rows, failure)


def run_side_by_side(command: Sequence[str], cases: Iterable[dict[str, Any]], seconds: float, processes: int):
    """Runs cases whose rows nobody needs, several at a time, and kills those that are not ready after `seconds`."""
    deadline = time.monotonic() + seconds

    def run(case: dict[str, Any]):
        left = deadline - time.monotonic()
        if left > 0:
            ask(start(command), case, left)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run, cases))


def end(process: subprocess.Popen):
    """Kills a process with all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def last_line_of(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it printed no error"


def answer_case(rows_of: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]):
    """In the process: reads its case, and prints each row."""
    line = sys.stdin.readline()
    if not line.strip():  # the parent has ended
        return
    for row in rows_of(json.loads(line)):
        print(f"{ROW}{json.dumps(row)}", flush=True)
