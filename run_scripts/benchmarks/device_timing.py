"""Errors and times on a device: is a result as near to float64 as the definition, and how long did it take?

An error is compared with the error of the definition in the same precision. So one bound fits all precisions and sizes,
and an implementation that rounds less is not taken for a wrong one.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .timing import Outputs

MOST_RATIO = 3.0  # of errors; another order of sums changes them by less than two, and a wrong kernel by hundreds
ROUNDING = 1e-5  # of float32, in many steps: below it, another formula for tanh may have several times the error
LEAST_SHARE = 0.1  # of the definition's largest error: some outputs are exact by chance
MOST_RUNS, FEWEST_RUNS, MOST_SECONDS = 9, 3, 0.25  # timed


class Check(NamedTuple):
    """What an implementation is compared with."""

    expected: Outputs  # in float64
    of_definition: dict[str, float]  # the errors of the definition in the same precision
    largest_error: float  # of all: a ratio alone would not see a mistake that the definition shares
    most_ratio: float = MOST_RATIO


def errors_of(found: Outputs, expected: Outputs) -> dict[str, float]:
    """Relative RMS errors by name, in float64. Infinity if shapes differ or a value is not a number."""
    errors = {}
    for name in expected:
        errors[name] = math.inf
        if found[name].shape == expected[name].shape:
            difference = (found[name].double() - expected[name]).norm()
            error = float(difference / expected[name].norm().clamp(min=torch.finfo(torch.float64).tiny))
            errors[name] = math.inf if math.isnan(error) else error
    return errors


def error_ratio(errors: dict[str, float], of_definition: dict[str, float]) -> float:
    """The largest ratio of an error to the definition's error."""
    least = max(LEAST_SHARE * max(of_definition.values()), torch.finfo(torch.float64).eps)
    return max(error / max(of_definition[name], least) for name, error in errors.items())


def device_times(call: Callable[[], Any], device: torch.device) -> list[float]:
    """Milliseconds of several runs, each from an idle device to an idle device, after two that are not counted."""
    for _ in range(2):
        call()
    milliseconds: list[float] = []
    start = time.perf_counter()
    while len(milliseconds) < MOST_RUNS:
        if len(milliseconds) >= FEWEST_RUNS and time.perf_counter() - start > MOST_SECONDS:
            break
        milliseconds.append(one_time(call, device))
    return milliseconds


def one_time(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    call()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The first quartile, the median, and the third."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


def peak_of_products(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """The arithmetic of a large product of matrices in a second: what the card reaches, not what its maker says."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    milliseconds = device_times(lambda: torch.mm(left, right), device)
    return 2 * size**3 / (1e-3 * min(milliseconds))


def measured_row(call: Callable[[], Outputs], check: Check, device: torch.device) -> dict[str, Any]:
    """The errors and, if they are small enough, the times. `call` may fail: then the reason takes their place."""
    try:
        errors = errors_of(call(), check.expected)
        ratio = error_ratio(errors, check.of_definition)
        error = max(errors.values())
        is_equal = error <= ROUNDING or (ratio <= check.most_ratio and error <= check.largest_error)
        row = {"equal": is_equal, "error": error, "error_ratio": ratio}
        if not is_equal:
            return {name: str(value) if value == math.inf else value for name, value in row.items()}  # as JSON has it
        return row | {"milliseconds": device_times(call, device)}
    except Exception as error:  # a failure of one implementation leaves the figures of the others
        return {"failure": f"{type(error).__name__}: {first_line_of(error)}"}


def first_line_of(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else "no message"
