"""The forecast of a training run: one line after its first minute, from the steps after the first one."""

import re
from datetime import datetime, timedelta

import pytest
from pretraining_worker import pretrain
from transformers import TrainerControl, TrainerState

from modeling_elmo.run_scripts.fine_tuning.trainer import ForecastLine, TaskTrainingArguments
from modeling_elmo.run_scripts.program import forecast
from modeling_elmo.run_scripts.program.forecast import Forecast, clock, duration


class Clock:
    """Time that passes only when it is told to; 2026-03-01, 12:00:00, is its beginning."""

    seconds = 0.0

    def monotonic(self):
        return self.seconds

    def now(self):
        return datetime(2026, 3, 1, 12) + timedelta(seconds=self.seconds)


@pytest.fixture
def time(monkeypatch):
    time = Clock()
    monkeypatch.setattr(forecast, "time", time)
    monkeypatch.setattr(forecast, "datetime", time)
    return time


def lines_of(time, forecast, step_seconds, shares, passes):
    lines = []
    for share, read in zip(shares, passes, strict=True):
        lines.append(forecast.after_step(share, read))
        time.seconds += step_seconds
    return lines


def test_after_the_first_minute_and_once(time):
    """A step in 10 seconds is a hundredth of three passes: 1000 seconds in all, of which 70 are over."""
    shares = [n / 100 for n in range(1, 20)]
    lines = lines_of(time, Forecast(-1, 3), 10, shares, [3 * share for share in shares])
    assert [line for line in lines if line] == ["one pass takes 6 min; 3 passes end at 12:16"]
    assert lines[6] is not None  # at 12:01:00; 93 of 100 steps are left, which take 930 seconds


def test_the_first_step_is_not_counted(time):
    forecast = Forecast(-1, 1)
    time.seconds = 500  # it compiled kernels
    shares = [0.1, 0.2, 0.3]
    lines = lines_of(time, forecast, 60, shares, shares)
    assert lines == [None, "one pass takes 10 min; it ends at 12:17", None]


def test_of_steps_without_passes(time):
    """A stream, whose size nobody knows; then a run that was resumed, and one that ends the next day."""
    assert lines_of(time, Forecast(4000, 3), 60, [0.25, 0.5], [0, 0])[1] == "4,000 steps end at 12:03"
    assert lines_of(time, Forecast(-1, 2), 60, [0.9, 0.91], [1.8, 1.82])[1].startswith("one pass takes 50 min")
    line = lines_of(time, Forecast(-1, 2), 60, [0.001, 0.002], [0.002, 0.004])[1]
    assert line == "one pass takes 8.3 h; 2 passes end at 04:43 on 2026-03-02"


@pytest.mark.parametrize(
    "seconds, words",
    [(1, "1 s"), (99, "99 s"), (100, "2 min"), (3480, "58 min"), (9000, "2.5 h"), (200_000, "2.3 days")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_a_time_of_today_has_no_day():
    now = datetime.now()
    assert clock(now) == f"{now:%H:%M}"
    assert re.fullmatch(r"\d\d:\d\d on \d{4}-\d\d-\d\d", clock(now + timedelta(days=1)))


@pytest.mark.parametrize(
    "options, end", [({"max_steps": 8}, "8 steps end"), ({"max_steps": -1, "num_train_epochs": 2}, "2 passes end")]
)
def test_of_pretraining(options, end, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(forecast, "FIRST_MINUTE", 0.001)
    pretrain(tmp_path, **options, per_device_train_batch_tokens=400)
    lines = [line for line in capsys.readouterr().out.splitlines() if "one pass takes" in line]
    assert len(lines) == 1 and re.fullmatch(rf"one pass takes \d+ s; {end} at \d\d:\d\d.*", lines[0])


def test_of_a_task(time, tmp_path, capsys):
    arguments = TaskTrainingArguments(tmp_path, num_train_epochs=4, use_cpu=True, report_to="none")
    callback, state = ForecastLine(), TrainerState(max_steps=40, is_world_process_zero=True)
    callback.on_train_begin(arguments, state, TrainerControl())
    for step in range(1, 10):
        state.global_step, state.epoch = step, step / 10
        callback.on_step_end(arguments, state, TrainerControl())
        time.seconds += 30
    assert capsys.readouterr().out == "one pass takes 5 min; 4 passes end at 12:19\n"
