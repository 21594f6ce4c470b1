"""Every program is run by a test: in the test file of its name, or here."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from modeling_elmo.run_scripts import demo

NO_PROGRAMS = ("__init__", "modeling_elmo_spacy")
PROGRAMS = sorted(path.stem for path in (ROOT / "run_scripts").glob("*.py") if path.stem not in NO_PROGRAMS)
WITH_OPTIONS = [name for name in PROGRAMS if name != "demo"]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("demo", "modeling_elmo_cli")])
def test_every_program_has_a_test_file(name):
    assert (ROOT / "tests" / f"test_{name}.py").is_file()


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_help_lists_the_options(name, capsys, monkeypatch):
    script = str(ROOT / "run_scripts" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ") and "--" in printed


# Python runs it at the start of a process. At the end, the program and a process that it spawns import a package.
AT_THE_END = """
import atexit, multiprocessing, os

def show(place):
    import export
    print("\\n" + place, export.__file__, flush=True)

def show_here_and_in_a_spawned_process():
    show("program")
    child = multiprocessing.get_context("spawn").Process(target=show, args=("child",))
    child.start()
    child.join()

if os.environ.pop("IS_PROGRAM", None):  # which the child does not inherit
    atexit.register(show_here_and_in_a_spawned_process)
"""


@pytest.mark.slow
def test_packages_are_found_before_programs_of_their_names(tmp_path):
    (tmp_path / "export.py").touch()
    (tmp_path / "sitecustomize.py").write_text(AT_THE_END, "utf-8")
    finished = subprocess.run(
        [sys.executable, ROOT / "run_scripts" / "build_vocabulary.py", "--help"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "IS_PROGRAM": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    lines = finished.stdout.splitlines()
    assert lines[-3:] == [f"program {tmp_path / 'export.py'}", "", f"child {tmp_path / 'export.py'}"], finished.stderr


def shorten(path: Path, end: str, count: int):
    path.write_text(end.join(path.read_text(encoding="utf-8").split(end)[:count]) + end, "utf-8")


@pytest.mark.slow
def test_demo(tmp_path, monkeypatch, capsys):
    texts = shutil.copytree(demo.DEMO_TEXTS, tmp_path / "texts")
    shorten(texts / "film_reviews_heldout.txt", end="\n", count=60)
    shorten(texts / "wnut17_train.conll", end="\n\n", count=100)
    for name, value in {"DEMO_TEXTS": texts, "OUTPUT": tmp_path / "demo", "STEPS": 12, "EPOCHS": 1}.items():
        monkeypatch.setattr(demo, name, value)
    demo.main()
    printed = capsys.readouterr().out
    assert "['<S>', 'The', 'play', 'was', 'a', 'great'" in printed
    _, play, chess = re.findall(r"characters alone 1.00, layer 1 (.*), layer 2 (.*)", printed)
    assert all(one > other for one, other in zip(play, chess, strict=True))
    assert printed.count("[play]") == 15
    before, *_, after = (float(each) for each in re.findall(r": perplexity ([\d.]+)", printed))
    assert after < 0.8 * before
    assert re.search(r"\| baseline .*\n\| elmo ", printed)
    assert all((tmp_path / "demo" / path).is_file() for path in demo.PICTURES)
    shown = re.search(r"\| perplexity of film reviews.* \| +([\d.]+) \| +([\d.]+) \|", printed)
    assert [*map(float, shown.groups())] == [pytest.approx(value, abs=0.06) for value in (before, after)]
    table = re.findall(r"\| (?:baseline|elmo) +\| +1 \| +([\d.]+) \|", printed)
    shown = re.search(r"\| F1 of names .* \| +([\d.]+) \| +([\d.]+) \|\n\n.*: F1 ([-+][\d.]+)\.\n", printed)
    without, with_elmo, gain = map(float, shown.groups())
    assert [without, with_elmo] == [pytest.approx(float(value), abs=0.06) for value in table]
    assert gain == pytest.approx(with_elmo - without, abs=0.11)
    commands = printed.partition("files like yours:\n\n")[2].partition("\n\n")[0].splitlines()
    assert commands == demo.next_commands() and len(commands) == 3
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for command in (*commands[:2], f"{commands[2]} --max_steps 1"):
        subprocess.run(command, shell=True, check=True)
    assert (tmp_path / "demo" / "vectors.hdf5").is_file() and (tmp_path / "demo" / "my-tagger").is_dir()
