"""Every script runs: those with a test file of their own there, the others here."""

import json
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from modeling_elmo import elmo_lstm
from modeling_elmo.run_scripts import benchmark_elmo, demo

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path.stem for path in (ROOT / "run_scripts").glob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8")
)
TEXT = ROOT / "tests" / "fixtures" / "demo" / "play.txt"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_run_by_a_test(name):
    own = ROOT / "tests" / f"test_{name}.py"
    assert own.is_file() or f"{name}.main(" in Path(__file__).read_text("utf-8")


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "demo"])
def test_help_says_what_the_options_are(name, tmp_path):
    command = [sys.executable, str(ROOT / "run_scripts" / f"{name}.py"), "--help"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "usage:" in printed and "--" in printed


def test_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "OUTPUT", tmp_path / "demo" / "vectors.hdf5")
    demo.main()
    printed = capsys.readouterr().out
    assert "['<S>', 'The', 'play', 'was', 'staged', '.', '</S>']" in printed
    assert "tiny test model" in printed and printed.count("[play]") == 12
    with h5py.File(tmp_path / "demo" / "vectors.hdf5") as vectors:
        assert len(vectors) == 201 and vectors["0"].shape == (3, 8, 32)


def arguments(*more: str) -> list[str]:
    return ["--text_file", str(TEXT), "--preset", "tiny", "--rounds", "2", *more]


def test_benchmark_writes_its_figures(tmp_path, capsys):
    output = tmp_path / "figures.json"
    benchmark_elmo.main(arguments("--batches", "1x8", "4x12", "--training", "--output", str(output)))
    figures = json.loads(output.read_text())
    assert figures.keys() == {"tokenizer", "1x8 inference", "1x8 training", "4x12 inference", "4x12 training"}
    assert figures["1x8 training"].keys() == {"reference", "bptt"}
    row = figures["1x8 inference"]["onednn"]
    assert row["tokens"] == 10 and row["fastest"] <= row["milliseconds"] <= row["slowest"]
    assert row["tokens_per_second"] == pytest.approx(1e3 * row["tokens"] / row["milliseconds"])
    assert "x reference" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["onednn", "bptt"])
def test_benchmark_gives_no_figure_without_correctness(backend, monkeypatch):
    def doubled(layer, inputs, *rest):
        outputs, *states = elmo_lstm.reference_lstm(layer, inputs, *rest)
        return 2 * outputs, *states

    monkeypatch.setitem(elmo_lstm.BACKENDS, backend, doubled)
    with pytest.raises(RuntimeError, match=f"{backend} differs from the reference by .* no figures are given"):
        benchmark_elmo.main(arguments("--batches", "1x8", "--training"))


def test_benchmark_needs_enough_text():
    with pytest.raises(ValueError, match="too few sentences for a batch of 500x12"):
        benchmark_elmo.main(arguments("--batches", "500x12"))
