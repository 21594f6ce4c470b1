"""Checks the outputs of several implementations, then times them in turns.

All implementations run once per round, so that a busy machine slows all of them. Ratios are taken within a round: they
carry over to other machines, milliseconds do not.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Outputs = dict[str, Tensor]
BenchmarkRow = dict[str, Any]
TOLERANCE = 1e-3  # largest relative RMS error in float32: rounding, with random weights


class Implementation(NamedTuple):
    """One way to do a computation."""

    name: str  # the row of the table
    call: Callable[[], Outputs | None]  # runs the computation once; this is timed
    expected: Outputs | None = None  # correct outputs by name; those that only this or only `call` has are not compared
    tolerance: float = TOLERANCE
    details: Callable[[], dict[str, float]] = dict  # further figures of the row, after the last round


class Contest(NamedTuple):
    """Implementations that take turns on the same input. The first is ours; the others are compared with it."""

    part: str  # of the benchmark, such as `"inference"`
    batch: str  # name of the input
    size: int  # number of units in the input, for the units per second
    unit: str  # `"tokens"` (markers included), `"words"` or `"examples"`
    implementations: list[Implementation]


def measure(contest: Contest, rounds: int) -> list[BenchmarkRow]:
    """Returns a row for each implementation.

    Raises:
        ValueError: an implementation is wrong. Then none is timed.
    """
    errors = [output_error(implementation) for implementation in contest.implementations]
    times = time_in_turns([implementation.call for implementation in contest.implementations], rounds)
    rows = []
    for implementation, error, seconds in zip(contest.implementations, errors, times, strict=True):
        ratios = [other / ours for other, ours in zip(seconds, times[0], strict=True)]
        middle = statistics.median(seconds)
        row = {
            "part": contest.part,
            "batch": contest.batch,
            contest.unit: contest.size,
            "implementation": implementation.name,
            "milliseconds": 1e3 * middle,
            "fastest": 1e3 * min(seconds),
            "slowest": 1e3 * max(seconds),
            f"{contest.unit}_per_second": contest.size / middle,
            "speedup_of_ours": statistics.median(ratios),
            "lowest_speedup": min(ratios),
            "highest_speedup": max(ratios),
            "relative_rms_error": error,
        }
        rows.append(row | implementation.details())
    return rows


def output_error(implementation: Implementation) -> float | None:
    """Runs an implementation and returns the largest relative RMS error of its outputs; `None` if it has no check."""
    outputs = implementation.call()
    if implementation.expected is None or outputs is None:
        return None
    errors = {}
    for name, expected in implementation.expected.items():
        if name in outputs:
            errors[name] = relative_rms(outputs[name], expected)
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] > implementation.tolerance:
        raise ValueError(
            f"{implementation.name!r} is wrong: its output {worst!r} has a relative RMS error of {errors[worst]:.1e}, "
            f"more than {implementation.tolerance:.0e}. Correct it first; no speed is reported."
        )
    return errors[worst]


def relative_rms(output: Tensor, expected: Tensor) -> float:
    """Returns infinity if the shapes differ or a value is not a number."""
    if output.shape != expected.shape:
        return math.inf
    expected = expected.float()
    difference = output.float() - expected
    size = expected.norm().clamp(min=torch.finfo(torch.float32).tiny)
    error = (difference.norm() / size).item()
    return math.inf if math.isnan(error) else error


def time_in_turns(calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Returns the seconds of each call in each round. A round before the first is not counted.

    Each round has another random order, because a call leaves its data in the caches for the next.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    generator = random.Random(0)
    numbers = list(range(len(calls)))
    for _ in range(rounds + 1):
        generator.shuffle(numbers)
        gc.collect()
        for number in numbers:
            start = time.perf_counter()
            calls[number]()
            seconds[number].append(time.perf_counter() - start)
    return [counted for _, *counted in seconds]


def format_rows(contest: Contest, rows: Sequence[BenchmarkRow]) -> str:
    columns = {
        "ms": ("milliseconds", ",.1f"),
        "fastest": ("fastest", ",.1f"),
        "slowest": ("slowest", ",.1f"),
        f"{contest.unit}/s": (f"{contest.unit}_per_second", ",.0f"),
        "speedup": ("speedup_of_ours", ".2f"),
        "lowest": ("lowest_speedup", ".2f"),
        "highest": ("highest_speedup", ".2f"),
        "error": ("relative_rms_error", ".1e"),
        "launches": ("launches", ",.0f"),
        "MB": ("megabytes", ",.1f"),
    }
    shown = {header: column for header, column in columns.items() if column[0] in rows[0]}
    title = f"{contest.part}, {contest.batch}, {contest.size:,} {contest.unit}"
    lines = ["", title, " " * 30 + "".join(f"{header:>12}" for header in shown)]
    for row in rows:
        line = f"{row['implementation']:30}"
        for name, form in shown.values():
            cell = "" if row[name] is None else format(row[name], form)
            line += f"{cell:>12}"
        lines.append(line)
    return "\n".join(lines)
