"""Progress of a process: lines where standard error is a pipe, a bar where it is a terminal."""

import os
import re
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Bars of four packages, one below another; half of them are over before a line is due.
PROGRAM = """
import sys, time
from datasets import Dataset
from huggingface_hub.utils import tqdm as tqdm_of_hub
from tqdm.auto import tqdm
from transformers.utils import logging
from modeling_elmo.run_scripts.program import command_line

command_line.LINE_SECONDS = 0.2

def work():
    start = time.time()
    with tqdm(total=20) as bar:
        for step in range(20):
            [*logging.tqdm(range(3), desc="Loading weights"), *tqdm_of_hub(range(3), desc="Download")]
            for _ in tqdm(range(2), desc="evaluation", leave=False):
                time.sleep(0.03)
            bar.update()
            bar.set_postfix_str(f"loss {step}")
            tqdm.write(f"step {step}")
    Dataset.from_list([{"word": "mill"}]).map(lambda row: row, desc="Map")
    print(time.time() - start)

sys.argv[0] = "elmo pretrain"
command_line.run(work)
"""


def start(stderr: int) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, stderr=stderr)


def test_lines_in_a_log(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        *printed, seconds = start(log.fileno()).communicate()[0].decode().splitlines()
    assert printed == [f"step {step}" for step in range(20)]
    text = (tmp_path / "log").read_bytes().decode()
    assert "\r" not in text and "\x1b" not in text
    lines, form = text.splitlines(), re.compile(r"elmo pretrain: +\d+% \d+/20 \[\d\d:\d\d<\d\d:\d\d, .*it/s, loss \d+]")
    assert all(map(form.fullmatch, lines))
    assert 3 <= len(lines) <= float(seconds) / 0.2 + 1  # one of them at the end
    assert re.match(r"elmo pretrain: 100% 20/20 \[.*, loss 19]", lines[-1])


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
    assert text.count(b"\r") > 100 and b"Loading weights:   0%|" in text and b"elmo pretrain" not in text
