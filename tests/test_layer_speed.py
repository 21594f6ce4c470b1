"""Layers of the LSTM on a device, and the check and the times of all measurements there, on the CPU at tiny sizes."""

import math

import pytest
import torch

from modeling_elmo import ELMoConfig, directions
from modeling_elmo.run_scripts.benchmarks import device_timing, layer_speed
from modeling_elmo.run_scripts.benchmarks.device_timing import (
    Check,
    device_times,
    error_ratio,
    errors_of,
    measured_row,
    quartiles,
)
from modeling_elmo.run_scripts.benchmarks.layer_speed import CUDNN, DEFINITION, PASSES, layer_rows, make_layer
from modeling_elmo.run_scripts.benchmarks.model_speed import PRECISIONS

CPU = torch.device("cpu")
CASE = {"cells": 24, "projection": 8, "sequences": 5, "steps": 3}


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    monkeypatch.setattr(device_timing, "MOST_RUNS", 3)


def rows_of(*implementations):
    return list(layer_rows({**CASE, "implementations": implementations}, CPU))


def test_all_implementations_of_a_layer_are_equal():
    """Forward and with all gradients; in the order in which a report shows them."""
    names = ("fused", DEFINITION, CUDNN)
    rows = rows_of(*names)
    expected = [(precision, name, kind) for precision in PRECISIONS for name in names for kind in PASSES]
    assert [(row["precision"], row["implementation"], row["pass"]) for row in rows] == expected
    for row in rows:
        assert row["equal"] and len(row["milliseconds"]) == 3 and min(row["milliseconds"]) > 0
        assert row["error"] < {"float32": 1e-6, "tf32": 1e-6, "bfloat16": 0.02}[row["precision"]]
        assert row["implementation"] != DEFINITION or row["error_ratio"] <= 1


def test_what_is_compared():
    """The results and the gradients of every input and weight, of which the check sees a small mistake."""
    layer = make_layer(6, 4, 2, 3, CPU)
    found = layer_speed.run_definition(layer, PASSES[1])
    weights = ("input_linear.weight", "input_linear.bias", "state_linear.weight", "projection.weight")
    gradients = {f"gradient {k} of layers.0.{name}" for k in range(2) for name in weights}
    gradients |= {f"gradient {k} of inputs" for k in range(2)}
    assert found.keys() == gradients | {f"{name} {k}" for k in range(2) for name in ("outputs", "cells")}
    assert layer_speed.run_definition(layer, PASSES[0]).keys() == found.keys() - gradients
    assert all(value.dtype == torch.float64 and value.any() for value in found.values())
    # The third of the gates is the output's, which torch has last.
    theirs = layer_speed.torch_lstm(layer, torch.float64)(PASSES[1])
    assert max(errors_of(theirs, found).values()) < 1e-12


def test_no_value_reaches_a_clip():
    """Which `torch.nn.LSTM` does not have."""
    config = ELMoConfig()
    found = layer_speed.run_definition(make_layer(64, 16, 40, 12, CPU), PASSES[0])
    for k in range(2):
        assert found[f"cells {k}"].abs().max() < config.cell_clip
        assert found[f"outputs {k}"].abs().max() < config.projection_clip


def test_a_wrong_kernel_has_no_time(monkeypatch):
    def doubled(*arguments):
        outputs, *states = plain(*arguments)
        return 1.5 * outputs, *states

    plain = directions.fused_layer
    monkeypatch.setattr(layer_speed, "kernel_of_both", lambda *_: doubled)
    rows = rows_of("fused", DEFINITION)
    for row in rows:
        is_right = row["implementation"] == DEFINITION
        assert row["equal"] == is_right and ("milliseconds" in row) == is_right
    assert rows[0]["error"] > 0.1 and rows[0]["error_ratio"] > 1e3


def test_a_kernel_that_fails_leaves_the_others(monkeypatch):
    def fail(*_):
        raise RuntimeError("out of resource: shared memory\nRequired: 300000")

    monkeypatch.setattr(layer_speed, "kernel_of_both", lambda *_: fail)
    failed, other = rows_of("fused", CUDNN)[::2][:2]
    assert failed["failure"] == "RuntimeError: out of resource: shared memory" and "equal" not in failed
    assert other["implementation"] == CUDNN and other["equal"]


def test_kernels_are_compiled_in_all_precisions_and_passes(monkeypatch):
    """On two steps: the number of steps changes no kernel. One that fails is told of later."""
    seen = []

    def kernel(layer, name, kind):
        seen.append((name, kind, len(layer.steps.batch_sizes), layer.cells.shape, torch.is_autocast_enabled("cpu")))
        raise RuntimeError("out of resource")

    monkeypatch.setattr(layer_speed, "run_kernel", kernel)
    assert list(layer_speed.compile_layer({**CASE, "implementations": ["grouped"]}, CPU)) == []
    both = [("grouped", kind, 2, (2, 5, 24)) for kind in PASSES]
    assert seen == [(*values, is_half) for is_half in (False, False, True) for values in both]


def test_a_kernel_that_gave_up_has_no_time(monkeypatch):
    """Then another one has computed in its place."""
    monkeypatch.setattr(layer_speed, "kernel_of_both", lambda *_: directions.fused_layer)
    monkeypatch.setattr(layer_speed, "REFUSALS", {CPU: "cpu refused to run a layer in one launch"})
    rows = rows_of("persistent", "fused")
    assert rows[0]["failure"] == "RuntimeError: cpu refused to run a layer in one launch"
    assert rows[2]["implementation"] == "fused" and rows[2]["equal"]


def test_errors():
    one = torch.ones(3, dtype=torch.float64)
    found = {"a": 1.5 * one.float(), "b": math.nan * one, "c": torch.ones(2), "d": 1e-3 * one}
    expected = dict.fromkeys("abc", one) | {"d": 0 * one}
    errors = errors_of(found, expected)
    assert errors["a"] == pytest.approx(0.5) and errors["b"] == errors["c"] == math.inf and errors["d"] > 1e100
    assert error_ratio({"a": 0.3, "b": 0.2}, {"a": 0.1, "b": 0.1}) == pytest.approx(3)
    assert error_ratio({"a": 0.1, "b": 0.02}, {"a": 0.1, "b": 0.0}) == pytest.approx(2)  # exact by chance
    assert error_ratio({"a": 0.0}, {"a": 0.0}) == 0


@pytest.mark.parametrize(
    "error, of_definition, largest, is_equal",
    [
        (2e-3, 1e-3, 1e-2, True),
        (4e-3, 1e-3, 1e-2, False),  # the ratio is too large
        (2e-2, 2e-2, 1e-2, False),  # the definition has the same mistake
        (5e-6, 1e-7, 1e-3, True),  # another formula
        (math.inf, 1e-3, 1e-2, False),
    ],
)
def test_what_equal_means(error, of_definition, largest, is_equal):
    expected = torch.ones(4, dtype=torch.float64)
    row = measured_row(lambda: {"a": expected + error}, Check({"a": expected}, {"a": of_definition}, largest), CPU)
    assert row["equal"] == is_equal and ("milliseconds" in row) == is_equal
    assert row["error"] == ("inf" if error == math.inf else pytest.approx(error))


def test_quartiles_and_times():
    assert quartiles([4.0]) == (4, 4, 4) and quartiles([3.0, 1.0, 2.0]) == (1.5, 2, 2.5)
    calls = []
    assert len(device_times(lambda: calls.append(1), CPU)) == 3 and len(calls) == 5
