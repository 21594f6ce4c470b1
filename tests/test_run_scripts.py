"""Every script runs: those with a test file of their own there, the others here."""

import re
import runpy
import sys
from pathlib import Path

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
    monkeypatch.setattr(demo, "OUTPUT", tmp_path / "demo")
    monkeypatch.setattr(demo, "STEPS", 6)
    monkeypatch.setattr(demo, "EPOCHS", 1)
    demo.main()
    printed = capsys.readouterr().out
    assert "['<S>', 'The', 'play', 'was', 'a', 'great'" in printed
    same = re.findall(r"characters alone (.*), layer 1 (.*), layer 2 (.*)", printed)
    assert [line[0] for line in same] == ["1.00"] * 3  # the token layer knows no context
    play, chess = (list(map(float, line[1:])) for line in same[1:])
    assert all(one > other for one, other in zip(play, chess, strict=True))
    assert printed.count("[play]") == 15
    before, *_, after = (float(each) for each in re.findall(r": perplexity ([\d.]+)", printed))
    assert after < 0.8 * before
    assert re.search(r"\| baseline .*\n\| elmo ", printed)
    assert sorted(path.stem for path in (tmp_path / "demo").glob("*.png")) == sorted(demo.PICTURES)
