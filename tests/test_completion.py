"""The script of `elmo completion`, asked in a real bash, beside what the help of each program says."""

import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import pytest
from test_readme import TASKS, module_of

from modeling_elmo.run_scripts import completion
from modeling_elmo.run_scripts.modeling_elmo_cli import PROGRAMS
from modeling_elmo.run_scripts.vectors.embedding import LayerChoice

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    """The script, in a folder with a file and a folder that the answers may name."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "corpus.txt").touch()
    (folder / "cards").mkdir()
    path = folder / "elmo.bash"
    path.write_text(completion.shtab.complete(completion.command_parser(), "bash"), encoding="utf-8")
    return path


def ask(script: Path, *lines: str) -> list[set[str]]:
    """What bash offers for the last word of each line, which is still being typed."""
    questions = [f"source {shlex.quote(script.name)}"]
    for words in (line.split(" ") for line in lines):
        questions += [f"COMP_WORDS=({shlex.join(words)})", f"COMP_CWORD={len(words) - 1}", "_shtab_elmo"]
        questions += ['echo "${COMPREPLY[*]}"']
    shell = ["bash", "--norc", "--noprofile", "-c", "\n".join(questions)]
    printed = subprocess.run(shell, cwd=script.parent, capture_output=True, text=True, check=True).stdout
    return [set(answer.split()) for answer in printed.split("\n")[:-1]]


@needs_bash
def test_names_of_programs(script):
    lines = ("elmo ", "elmo ne", "elmo reproduce ", "elmo completion ", "elmo --v")
    assert ask(script, *lines) == [{*PROGRAMS}, {"ner", "neighbors"}, {*TASKS}, {"bash", "zsh", "fish"}, {"--version"}]


@needs_bash
def test_options_are_those_of_the_help(script, capsys):
    commands = [(name,) for name in PROGRAMS if name != "reproduce"] + [("reproduce", task) for task in TASKS]
    answers = ask(script, *(f"elmo {' '.join(command)} --" for command in commands))
    for command, answer in zip(commands, answers, strict=True):
        with pytest.raises(SystemExit):
            module_of(command[0]).main([*command[1:], "--help"])
        entries = re.findall(r"^  (--\w+)(?:, (--\w+))?", capsys.readouterr().out, re.MULTILINE)
        assert answer == {"--help", *filter(None, (name for entry in entries for name in entry))}, command


@needs_bash
def test_values_of_options(script):
    """Choices, files, folders, nothing for a number; after a value or a flag come options again."""
    lines = ["--layers ", "--input c", "--raw_text --inp", "--layers all --lay"]
    expected = [{*get_args(LayerChoice)}, {"corpus.txt", "cards"}, {"--input"}, {"--layers"}]
    assert ask(script, *(f"elmo embed {line}" for line in lines)) == expected
    assert ask(script, "elmo ner --output_dir c", "elmo ner --seed ", "elmo ner --output_dir cards --se") == [
        {"cards"},
        set(),
        {"--seed"},
    ]


@needs_bash
def test_an_answer_comes_at_once(script):
    started = time.monotonic()
    ask(script, "elmo reproduce ner --optim ")
    assert time.monotonic() - started < 3  # an import of torch takes longer


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_script(shell, tmp_path, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    completion.main([shell])
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    subprocess.run([shell, "-n", path], check=True)  # reads, and does not execute


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_programs_and_options(tmp_path, capsys):
    completion.main(["fish"])
    path = tmp_path / "elmo.fish"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    words = ("elmo prob", "elmo embed --comp", "elmo reproduce n")
    asked = [f"source {path}", *(f"complete -C '{line}'" for line in words)]
    output = subprocess.run(["fish", "-c", "; ".join(asked)], check=True, capture_output=True, text=True).stdout
    assert [line.split("\t")[0] for line in output.splitlines()] == ["probe", "--compute_dtype", "ner"]


def test_a_program_without_its_packages_keeps_its_name(capsys):
    missing = ModuleNotFoundError("No module named 'datasets'")
    with (
        patch.dict(completion.PROGRAMS, {"embed": completion.PROGRAMS["embed"]}, clear=True),
        patch.object(completion, "import_module", side_effect=missing),
    ):
        completion.main(["bash"])
    printed = capsys.readouterr()
    assert "subparsers=(embed)" in printed.out
    assert printed.err == "elmo completion: no options of `elmo embed`: No module named 'datasets'\n"
