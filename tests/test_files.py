"""Outputs that cannot be written, and JSON that is damaged. Checkpoints and programs test the rest."""

import os
import socket
from pathlib import Path

import pytest
from errors import refused

from modeling_elmo.run_scripts.program.files import check_output, parse_json


def test_outputs_that_are_no_files(tmp_path):
    pipe, listener = tmp_path / "pipe", socket.socket(socket.AF_UNIX)
    os.mkfifo(pipe)
    check_output(pipe)
    check_output(Path(os.devnull))
    with listener, pytest.raises(PermissionError, match="--output .*socket cannot be written"):
        listener.bind(str(tmp_path / "socket"))
        check_output(tmp_path / "socket")


def test_json_with_a_key_twice():
    with refused("^a.jsonl, line 2 is not JSON.*an object has the key 'text' twice"):
        parse_json('{"text": "b", "n": 1, "text": "c"}', "a.jsonl, line 2")
