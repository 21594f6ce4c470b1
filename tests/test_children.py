"""Processes with a case each: their rows, deadlines, failures, and what is left of them."""

import os
import sys
import time

import pytest

from modeling_elmo.run_scripts.benchmarks import children

# Counts to a number. At a number that the case names, it waits for ever or ends.
COUNTER = """
import json, os, sys, time
case = json.loads(sys.stdin.readline())
print("a line of another program", file=sys.stderr)
for number in range(case["count"]):
    if number == case.get("hang"):
        print("no row", flush=True)
        time.sleep(1000)
    if number == case.get("crash"):
        sys.exit("illegal memory access")
    print("ROW " + json.dumps({"number": number, "process": os.getpid()}), flush=True)
"""


@pytest.fixture
def counters():
    with children.Children([sys.executable, "-c", COUNTER], ahead=2) as started:
        yield started


def numbers(answer):
    return [row["number"] for row in answer.rows]


def test_each_case_has_a_process_that_was_there_before(counters):
    waiting = [process.pid for process in counters.waiting]
    answers = [counters.run({"count": 2}, seconds=60) for _ in range(2)]
    assert [numbers(answer) for answer in answers] == [[0, 1], [0, 1]]
    assert [answer.rows[0]["process"] for answer in answers] == waiting
    assert [answer.failure for answer in answers] == [None, None] and len(counters.waiting) == 2


def test_a_case_that_hangs_is_killed_and_keeps_its_rows(counters):
    start = time.monotonic()
    answer = counters.run({"count": 5, "hang": 2}, seconds=5)
    assert time.monotonic() - start < 60
    assert numbers(answer) == [0, 1] and answer.failure == "no answer within 5 s"
    with pytest.raises(ProcessLookupError):
        os.kill(answer.rows[0]["process"], 0)
    assert numbers(counters.run({"count": 1}, seconds=60)) == [0]  # the next case is not its business


def test_a_case_that_crashes_says_why(counters):
    answer = counters.run({"count": 5, "crash": 1}, seconds=60)
    assert numbers(answer) == [0] and answer.failure == "ended with status 1: illegal memory access"


def test_no_process_stays_behind():
    with children.Children([sys.executable, "-c", COUNTER], ahead=3) as started:
        waiting = list(started.waiting)
        assert len(waiting) == 3 and all(process.poll() is None for process in waiting)
    assert all(process.poll() is not None for process in waiting)
    assert children.last_line_of(" \n") == "it printed no error"


@pytest.mark.slow
def test_cases_side_by_side(tmp_path):
    """One that hangs is killed, and the others run; none begins after the time."""
    code = "import json, sys, time; case = json.loads(sys.stdin.readline()); open(case['file'], 'w').close();"
    command = [sys.executable, "-c", code + "time.sleep(case['seconds'])"]
    cases = [{"file": str(tmp_path / str(number)), "seconds": 1000 * (number == 1)} for number in range(4)]
    start = time.monotonic()
    children.run_side_by_side(command, cases, seconds=10, processes=2)
    assert len(list(tmp_path.iterdir())) == 4 and 10 <= time.monotonic() - start < 60
    children.run_side_by_side(command, [{"file": str(tmp_path / "late"), "seconds": 0}], seconds=0, processes=2)
    assert not (tmp_path / "late").exists()


def test_a_process_whose_parent_has_ended_measures_nothing(monkeypatch, capsys, tmp_path):
    for text, expected in (("", ""), ('{"count": 2}\n', 'ROW {"n": 0}\nROW {"n": 1}\n')):
        with (tmp_path / "case").open("w+", encoding="utf-8") as file:
            file.write(text)
            file.seek(0)
            monkeypatch.setattr(sys, "stdin", file)
            children.answer_case(lambda case: ({"n": number} for number in range(case["count"])))
        assert capsys.readouterr().out == expected
