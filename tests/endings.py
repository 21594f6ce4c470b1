"""The last lines of a program: what it found, and the next command."""

import contextlib
import io
import re
import shlex
from importlib import import_module

import pytest

from modeling_elmo.run_scripts.modeling_elmo_cli import PROGRAMS


def conclusion(printed: str) -> tuple[str, list[str]]:
    """The sentence, and the words of the next command, whose program and options exist."""
    *_, finding, following = printed.splitlines()
    assert finding.endswith(".") and following.startswith("Next: "), printed
    words = shlex.split(following.removeprefix("Next: "))
    if words[0] == "elmo":
        file, _ = PROGRAMS[words[1]]
        tasks = {"run_task": [words[1]], "reproduce": [words[2]]}.get(file, [])
        with contextlib.redirect_stdout(io.StringIO()) as stdout, pytest.raises(SystemExit):
            import_module(f"modeling_elmo.run_scripts.{file}").main([*tasks, "--help"])
        known = re.findall(r"--\w+", stdout.getvalue())
        assert {word for word in words if word.startswith("--")} <= {*known}, following
    return finding, words


def printed_by(code: str) -> str:
    """The output of Python that a conclusion names."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        exec(code, {})
    return stdout.getvalue()
