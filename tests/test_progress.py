"""Progress of a process: lines where standard error is a pipe, a bar where it is a terminal."""

import os
import re
import struct
import subprocess
import sys
from contextlib import suppress

import pytest
from places import ROOT

# Bars of four packages, one below another; half of them are over before a line is due.
PROGRAM = """
import sys, types
import modeling_elmo_cli

def work(arguments):
    import time
    from datasets import Dataset
    from huggingface_hub.utils import tqdm as tqdm_of_hub
    from tqdm.auto import tqdm
    from transformers.utils import logging

    with tqdm(total=20) as bar:
        for step in range(20):
            [*logging.tqdm(range(3), desc="Loading weights"), *tqdm_of_hub(range(3), desc="Download")]
            for _ in tqdm(range(2), desc="evaluation", leave=False):
                time.sleep(0.03)
            bar.update()
            bar.set_postfix_str(f"loss {step}", refresh=False)
            print(f"step {step}")
    Dataset.from_list([{"word": "mill"}]).map(lambda row: row, desc="Map")

sys.modules["modeling_elmo.run_scripts.work"] = types.SimpleNamespace(main=work)
modeling_elmo_cli.PROGRAMS["work"] = ("work", "")
modeling_elmo_cli.run_program("work")
"""


def start(stderr: int, **settings: str) -> subprocess.Popen:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "run_scripts")])
    # Without the variables that a program has set in this process, in another test.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TQDM_")}
    environment = {**inherited, "PYTHONPATH": paths, **settings}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, stderr=stderr)


def test_lines_in_a_log(tmp_path):
    """Few, as the variables of the user say; a program writes no bar that is over before the first."""
    seconds = dict.fromkeys(("TQDM_DELAY", "TQDM_MININTERVAL", "TQDM_MAXINTERVAL"), "0.2")
    with open(tmp_path / "log", "wb") as log:
        printed = start(log.fileno(), **seconds).communicate()[0].decode().splitlines()
    assert printed == [f"step {step}" for step in range(20)]
    text = (tmp_path / "log").read_text("utf-8")
    assert "\x1b" not in text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    form = re.compile(r"\d+% \d+/20 \[\d\d:\d\d<\d\d:\d\d, .*it/s, loss \d+]")
    assert all(map(form.fullmatch, lines))
    assert 3 <= len(lines) <= 20
    assert re.match(r"100% 20/20 \[.*, loss 19]", lines[-1])


def test_bars_on_a_terminal():
    pty = pytest.importorskip("pty", reason="pseudo-terminals of POSIX")
    import fcntl
    import termios

    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process, text = start(stderr), b""
    os.close(stderr)
    with suppress(OSError):  # how Linux tells that the other side is closed
        while part := os.read(terminal, 4096):
            text += part
    os.close(terminal)
    assert process.wait() == 0 and "step 19" in process.communicate()[0].decode()
    assert text.count(b"\r") > 100 and b"Loading weights:   0%|" in text and b"evaluation:" in text
