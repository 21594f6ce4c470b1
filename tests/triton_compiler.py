"""Compiles Triton kernels for a GPU that is not there, from the package or from the generated code that travels."""

import os
import subprocess
import sys

import pytest
from places import ROOT

from modeling_elmo.shipping import MODULES, generate


def words_printed(code, module, folder):
    """What code prints in a process whose triton compiles. `MODULE` in it is the module, perhaps `generated.NAME`."""
    pytest.importorskip("triton", reason="triton is not installed")
    (folder / "generated").mkdir()
    for name in MODULES:
        (folder / "generated" / name).write_bytes(generate(name))
    path = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, "-c", code.replace("MODULE", module)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout.split()
