"""The README's commands run and its Python blocks print what stands below them."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(bash|python|text)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_readme_is_true(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    names, printed, compared = {}, "", 0
    for kind, block in BLOCKS:
        if kind == "bash" and block.startswith("python -m modeling_elmo"):
            command = [sys.executable, *shlex.split(block.replace("\\\n", " "))[1:]]
            subprocess.run(command, check=True, env=environment, capture_output=True)
        elif kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(block, names)
            printed = stdout.getvalue()
        elif kind == "text":
            assert printed == block
            compared += 1
    assert compared == 9
    assert (tmp_path / "vectors.hdf5").is_file() and (tmp_path / "vocab.txt").is_file()
