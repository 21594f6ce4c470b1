"""`make bench-gpu`: its cases, tables and processes, on the CPU at tiny sizes; no test depends on time."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from modeling_elmo.run_scripts.benchmarks import device_timing, gpu_cases, gpu_report, pretraining_speed
from modeling_elmo.run_scripts.benchmarks.gpu_report import SIZES_OF_CASES
from modeling_elmo.run_scripts.benchmarks.text import draw_batch, made_up_sentences

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
CONDITIONS = {
    "name": "GPU of a test",
    "device": "cuda",
    "memory": 80 * 2**30,
    "capability": "9.0",
    "driver": "580.95",
    "toolkit": "CUDA 13.2",
    "triton": "3.6.0",
    "torch": "2.15.0+cu132",
    "allennlp": False,
    "peaks": {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12},
    "date": "2026-11-28 06:22 UTC",
    "commit": "0123456789ab-dirty",
    "against": None,
}


def arguments_of(**options):
    return gpu_report.GPUReportArguments(**options)


def all_cases(allennlp=False, **options):
    return list(gpu_report.cases(arguments_of(**options), {**CONDITIONS, "allennlp": allennlp}))


@pytest.mark.slow
def test_a_report_of_the_cpu(tmp_path, capsys, monkeypatch):
    """All parts but the tests, in processes, as on a card."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    output = tmp_path / "figures.json"
    parts = ["layers", "pretraining", "inference"]
    arguments = ["--device", "cpu", "--seconds", "500", "--against", str(ROOT), "--output", str(output)]
    found = gpu_report.main([*arguments, "--parts", *parts])
    stored = json.loads(output.read_text(encoding="utf-8"))
    assert stored["rows"] == json.loads(json.dumps(found["rows"]))
    assert stored["conditions"]["torch"] == torch.__version__ and stored["conditions"]["peaks"]["bfloat16"] > 0
    assert stored["conditions"]["commit"] and stored["conditions"]["against"] == stored["conditions"]["commit"]
    assert not [row for row in stored["rows"] if "failure" in row]
    assert all(row["equal"] for row in stored["rows"] if row["part"] != "pretraining")
    assert {row["part"] for row in stored["rows"]} == {*parts}
    of_inference = {row["implementation"] for row in stored["rows"] if row["part"] == "inference"}
    assert of_inference == {"this package", "plain definition", "torch.nn.LSTM", "other checkout"}
    tables = output.with_suffix(".md").read_text(encoding="utf-8")
    assert tables in capsys.readouterr().out
    assert all(f"## {part.capitalize()}\n" in tables for part in parts) and "## Tests" not in tables


def test_without_a_card(monkeypatch, tmp_path):
    """Before anything is started."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_report, "Children", None)
    expected = f"--device cuda: torch {torch.__version__} finds no CUDA device; this report needs one."
    with pytest.raises(ValueError) as raised:
        gpu_report.main([])
    assert str(raised.value) == expected
    with pytest.raises(FileNotFoundError, match="--against .* is not the folder of a clone"):
        arguments_of(against=str(tmp_path))


@pytest.mark.slow
def test_without_a_card_the_program_ends_with_one_line():
    command = [sys.executable, "-m", "modeling_elmo.run_scripts.benchmarks.gpu_report"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""})
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2 and not done.stdout
    assert line.startswith("gpu_report.py: error: --device cuda: ") and line.endswith("this report needs one.")


def test_cases_of_a_card(monkeypatch):
    """Smallest first; kernels that must be asked for, and other packages, have processes of their own."""
    monkeypatch.setattr(gpu_report, "TRIALS", ("trial",))
    monkeypatch.setattr(gpu_report, "LAYERS_KERNELS", ("fused", "new"))
    found = all_cases(allennlp=True, against=str(ROOT))
    layers = [case for case in found if case["part"] == "layers"]
    shapes = [tuple(case[name] for name in ("cells", "projection", "sequences", "steps")) for case in layers[::2]]
    assert shapes == list(SIZES_OF_CASES["cuda"].layers)
    sizes = [(3 * projection * cells) * sequences * steps for cells, projection, sequences, steps in shapes]
    assert sizes[0] == min(sizes) and sizes[-1] == max(sizes)
    both = {tuple(case["implementations"]) for case in layers}
    assert both == {("fused", "plain definition", "torch.nn.LSTM"), ("new",)}
    names = "tokens", "backend", "cuda_graph"
    pretraining = [tuple(case[name] for name in names) for case in found if case["part"] == "pretraining"]
    sizes = [(tokens, None, cuda_graph) for tokens in (4096, 16_384, 65_536) for cuda_graph in (False, True)]
    assert pretraining == [*sizes, (16_384, "trial", True)]
    names = [case["implementations"] for case in found if case["part"] == "inference"]
    assert names == [
        ["this package", "plain definition", "torch.nn.LSTM"],
        ["this package, trial"],
        ["AllenNLP"],
        ["other checkout"],
    ]
    compiled = gpu_report.compilations(found)
    assert [case["implementations"] for case in compiled] == [["new"]] * len(SIZES_OF_CASES["cuda"].layers)
    assert {case["part"] for case in compiled} == {"compilation"}
    assert [case["part"] for case in all_cases(parts=["pretraining"])] == ["pretraining"] * 7
    assert [case["part"] for case in all_cases(device="cpu")] == ["layers", "pretraining", "inference"]


def test_a_case_after_the_time_is_named():
    answer = SimpleNamespace(rows=[{"batch": "1x8"}], failure="no answer within 60 s")
    children = SimpleNamespace(run=lambda case, seconds: answer)
    case = {"part": "inference", "implementations": ["this package"], "seconds": 60}
    rows = gpu_report.measured_rows(children, case, deadline=float("inf"))
    assert rows == [{**case, "batch": "1x8"}, {**case, "failure": "no answer within 60 s"}]
    (row,) = gpu_report.measured_rows(children, case, deadline=0)
    assert row["failure"] == "not measured: out of time"


def layer_row(implementation, kind, milliseconds, **more):
    shape = {"cells": 1024, "projection": 256, "sequences": 32, "steps": 32}
    check = {"equal": True, "error": 1e-3, "error_ratio": 0.914}
    row = {"part": "layers", **shape, "precision": "bfloat16", "implementation": implementation, "pass": kind}
    return {**row, **check, "milliseconds": milliseconds, **more}


def test_the_table_of_layers():
    rows = [
        layer_row("fused", "forward", [4.0, 4.4, 4.8]),
        layer_row("fused", "with gradients", [14.0]),
        layer_row("plain definition", "forward", [9.0]),
        layer_row("torch.nn.LSTM", "forward", [2.2]),
        layer_row("torch.nn.LSTM", "with gradients", [28.0]),
        layer_row("new", "forward", None, equal=False, error_ratio="inf"),
        layer_row("new", "with gradients", [1.0]),
    ]
    del rows[-2]["milliseconds"]
    shape = {name: rows[0][name] for name in ("part", "cells", "projection", "sequences", "steps")}
    rows.append({**shape, "implementations": ["hangs"], "failure": "no answer within 25 s"})
    lines = gpu_report.table_of_layers(rows, CONDITIONS).splitlines()
    where = "| 1024/256 | 32x32 | bfloat16 |"
    assert lines[2:] == [
        f"{where} fused | yes, 0.91 | 4.4 (4.2 to 4.6) | 14 (14 to 14) | 0.50 / 2.00 |",
        f"{where} plain definition | yes, 0.91 | 9 (9 to 9) | - | 0.24 / - |",
        f"{where} torch.nn.LSTM | yes, 0.91 | 2.2 (2.2 to 2.2) | 28 (28 to 28) | 1.00 / 1.00 |",
        f"{where} new | NO, inf | - | 1 (1 to 1) | - / 28.00 |",
        "| 1024/256 | 32x32 | - | hangs | - | no answer within 25 s | - | - |",
        "",
        "Slower than `torch.nn.LSTM`:",
        "",
        "- 1024/256, 32x32, bfloat16, fused, forward: 0.50 times as fast",
    ]
    faster = gpu_report.table_of_layers([layer_row("torch.nn.LSTM", "forward", [2.0])], CONDITIONS)
    assert faster.endswith("No measured kernel of this package is slower than `torch.nn.LSTM`.")


def test_the_table_of_pretraining():
    row = {"part": "pretraining", "tokens": 16_384, "backend": None, "words_per_second": [90e3, 100e3, 110e3]}
    row |= {"operations_per_word": 80e6, "busy_seconds_per_step": 0.03, "words_per_step": 15_000.0}
    row |= {"data_wait": 0.015, "loss": 7.25, "cuda_graph": False}
    failed = {"part": "pretraining", "tokens": 65_536, "backend": "trial", "cuda_graph": True, "failure": "no answer"}
    lines = gpu_report.table_of_pretraining([row, failed], CONDITIONS).splitlines()
    assert lines[2:] == [
        "| 16,384 | this package | 100,000 (95,000 to 105,000) | 8 | 1.0% | 20% | 1.5% | 7.250 |",
        "| 65,536 | this package, trial, CUDA graph | no answer | - | - | - | - | - |",
    ]
    assert all(line.count("|") == 9 for line in lines)


def test_the_table_of_inference():
    case = {"part": "inference", "batch": "1x20", "tokens": 22, "precision": "float32"}
    check = {"equal": True, "error": 1e-6, "error_ratio": 7.66}
    rows = [
        {**case, "implementation": "this package", **check, "milliseconds": [10.0, 11.0, 12.0]},
        {**case, "implementation": "plain definition", "failure": "RuntimeError: out of memory"},
        {**case, "implementation": "AllenNLP", **check, "milliseconds": [22.0]},
        {"part": "inference", "implementations": ["other checkout"], "failure": "no answer within 60 s"},
    ]
    lines = gpu_report.table_of_inference(rows, CONDITIONS).splitlines()
    assert lines[2:] == [
        "| 1x20 | 22 | float32 | this package | yes, 7.7 | 11 (10.5 to 11.5) | 2,000 | 1.00 |",
        "| 1x20 | 22 | float32 | plain definition | - | RuntimeError: out of memory | - | - |",
        "| 1x20 | 22 | float32 | AllenNLP | yes, 7.7 | 22 (22 to 22) | 1,000 | 2.00 |",
        "| - | - | - | other checkout | - | no answer within 60 s | - | - |",
    ]


def test_the_heading():
    text = gpu_report.heading(CONDITIONS)
    assert text.startswith("# GPU of a test\n")
    for fact in ("80 GiB", "compute capability 9.0", "driver 580.95", "triton 3.6.0", "torch 2.15.0+cu132"):
        assert fact in text
    assert "commit 0123456789ab-dirty; 2026-11-28 06:22 UTC; AllenNLP cannot be imported." in text
    assert "50.0 in float32, 400.0 in tf32, 800.0 in bfloat16 TFLOP/s" in text
    assert "other checkout ba98" in gpu_report.heading({**CONDITIONS, "against": "ba98"})
    assert gpu_report.commit_of(None) is None and gpu_report.commit_of("/") == "unknown"


def test_the_tests_of_a_card(tmp_path, monkeypatch):
    """All that are marked, and every model; a run that hangs is ended."""
    commands = gpu_report.card_tests()
    marked = {Path(argument).name for argument in commands["marked `gpu`"][0][2:]}
    assert {"test_lstm_cpu.py", "test_optimization.py"} <= marked
    assert all(Path(part).is_file() for arguments, *_ in commands.values() for part in arguments if part.endswith("py"))
    assert [variables for _, variables, _ in commands.values()] == [{}, {}, {"ELMO_TEST_DEVICE": "cuda"}]
    file = tmp_path / "test_of_a_card.py"
    file.write_text(
        "import os, time\n"
        "def test_right(): assert os.environ['OF_A_TEST'] == '1'\n"
        "def test_wrong(): assert False\n"
        "def test_hangs(): time.sleep(1000)\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(gpu_report, "find_spec", lambda name: None)  # xdist would take seconds
    options = ["-k", "not hangs", "-c", "/dev/null", str(file)]
    found = gpu_report.result_of_pytest(options, {"OF_A_TEST": "1"}, seconds=100)
    assert found["status"] == 1 and found["summary"].startswith("1 failed, 1 passed, 1 deselected in ")
    (failed,) = found["failed"]
    assert failed.endswith("test_of_a_card.py::test_wrong")
    late = gpu_report.result_of_pytest(["-c", "/dev/null", str(file)], {}, seconds=2)
    assert late == {"failure": "not finished within 2 s"}
    table = gpu_report.table_of_tests([{"tests": "marked", **found}, {"tests": "others", **late}], CONDITIONS)
    assert f"| marked | {found['summary']} |" in table and "| others | not finished within 2 s |" in table
    assert table.endswith(f"- failed: `{failed}`")
    monkeypatch.setattr(gpu_report, "result_of_pytest", lambda *_: found)
    rows = list(gpu_report.rows_of_tests(arguments_of(), deadline=0))
    assert [row["failure"] for row in rows] == ["not run: out of time"] * 3
    assert next(gpu_report.rows_of_tests(arguments_of(), float("inf")))["status"] == 1
    assert gpu_report.whole_report(CONDITIONS, rows).count("not run: out of time") == 3


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the sources are not in a repository")
def test_the_commit_of_a_clone():
    answer = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    commit = gpu_report.commit_of(ROOT).removesuffix("-dirty")
    assert len(commit) == 12 and answer.stdout.startswith(commit)


def test_facts():
    (row,) = gpu_cases.rows_of_case(CPU, {"part": "facts", "size": 8})
    assert row["device"] == "cpu" and row["torch"] == torch.__version__ and "driver" not in row
    assert {*row["peaks"]} == {"float32", "tf32", "bfloat16"} and min(row["peaks"].values()) > 0


def test_a_peer_is_moved_to_the_device():
    moved = []
    peer = {"to": moved.append, "model": lambda prepared: prepared + 1, "prepare": lambda encoding: encoding["ids"]}
    call = gpu_cases.peer_call(peer, CPU, {"ids": torch.ones(2)})
    assert moved == [CPU] and call().tolist() == [2, 2]
    del peer["prepare"]
    peer["model"] = len
    assert gpu_cases.peer_call(peer, CPU, {"ids": 1, "mask": 2})() == 2  # an encoding stays where it is


def test_a_wrong_model_has_no_time(monkeypatch):
    monkeypatch.setattr(device_timing, "MOST_RUNS", 3)
    wrong = lambda name, model, device, case: lambda encoding: lambda: torch.ones(2, 10, 64)  # noqa: E731
    monkeypatch.setattr(gpu_cases, "model_call", wrong)
    case = {"part": "inference", "preset": "tiny", "batches": ["2x8"], "implementations": ["this package"]}
    rows = list(gpu_cases.rows_of_case(CPU, case))
    assert len(rows) == 3 and not any(row["equal"] or "milliseconds" in row for row in rows)


def test_steps_of_pretraining(monkeypatch):
    """Those before and after the timed ones are not counted, and the arithmetic of the last one is."""
    case = {**SIZES_OF_CASES["cpu"].pretraining, "part": "pretraining", "tokens": 64, "words": 1500}
    case |= {"backend": None, "cuda_graph": False}
    (row,) = gpu_cases.rows_of_case(CPU, case)
    assert len(row["words_per_second"]) == pretraining_speed.WINDOWS and 0 <= row["data_wait"] <= 1
    assert row["busy_seconds_per_step"] is None and 0 < row["words_per_step"] < 64
    assert 1e4 < row["operations_per_word"] < 1e8 and 0 < row["loss"] < 20
    forced = []
    monkeypatch.setattr(pretraining_speed, "backend_context", lambda name: forced.append(name) or torch.no_grad())
    with pytest.raises(RuntimeError):  # without gradients there is no step
        list(gpu_cases.rows_of_case(CPU, {**case, "backend": "trial"}))
    assert forced == ["trial"]


def test_only_kernels_make_a_device_busy():
    kernel = SimpleNamespace(device_type=DeviceType.CUDA, is_user_annotation=False, self_device_time_total=5.0)
    span = SimpleNamespace(device_type=DeviceType.CUDA, is_user_annotation=True, self_device_time_total=7.0)
    launch = SimpleNamespace(device_type=DeviceType.CPU, is_user_annotation=False, self_device_time_total=5.0)
    assert [*map(pretraining_speed.time_of_kernel, (kernel, span, launch))] == [5, 0, 0]


def test_made_up_sentences():
    sentences = made_up_sentences(20_000)
    assert sentences == made_up_sentences(20_000)
    words = [word for sentence in sentences for word in sentence]
    assert 20_000 <= len(words) < 20_100 and min(map(len, sentences)) >= 3 and max(map(len, sentences)) <= 100
    assert 4000 < len({*words}) < 10_000  # as in English
    assert words.count(max({*words}, key=words.count)) > 500
    assert len(draw_batch(sentences, "128x30", seed=0)) == 128
