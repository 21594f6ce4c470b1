"""Every script runs: those with a test file of their own there, the others here."""

import runpy
import sys
from pathlib import Path

import h5py
import pytest

from modeling_elmo.run_scripts import demo

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path.stem for path in (ROOT / "run_scripts").glob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8")
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_run_by_a_test(name):
    own = ROOT / "tests" / f"test_{name}.py"
    assert own.is_file() or f"{name}.main(" in Path(__file__).read_text("utf-8")


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "demo"])
def test_help_says_what_the_options_are(name, capsys, monkeypatch):
    script = str(ROOT / "run_scripts" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the script adds to
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and "usage:" in printed and "--" in printed


def test_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "OUTPUT", tmp_path / "demo" / "vectors.hdf5")
    monkeypatch.setattr(demo, "STEPS", 60)
    monkeypatch.setattr(demo, "SECONDS", 6)
    demo.main()
    printed = capsys.readouterr().out
    assert "['<S>', 'The', 'play', 'was', 'staged', '.', '</S>']" in printed
    assert "tiny test model" in printed and printed.count("[play]") == 12
    first, *_, last = (float(line.split()[3]) for line in printed.splitlines() if ": perplexity " in line)
    assert first == pytest.approx(3000, rel=0.2) and last < first / 2
    with h5py.File(tmp_path / "demo" / "vectors.hdf5") as vectors:
        assert len(vectors) == 201 and vectors["0"].shape == (3, 8, 32)
