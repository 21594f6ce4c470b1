"""The bar of `elmo embed`, the size of its output, and what it says of a disk that is too slow or too small."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest
from bilm_models import save, tiny_model
from errors import refused

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts import embed
from modeling_elmo.run_scripts.vectors import pace
from modeling_elmo.run_scripts.vectors.lines import InputLine
from modeling_elmo.run_scripts.vectors.outputs import EntryShape, LinePlan
from modeling_elmo.run_scripts.vectors.pace import Pace, check_room, in_words

SHAPE = EntryShape(3, 512, False, "float32")
ON_CPU = SimpleNamespace(is_there=None)


@pytest.fixture
def plan():
    """Three blocks of 2 lines, which have 10 words each."""
    plan = LinePlan()
    for block in range(3):
        plan.add([InputLine(f"{block} {line}", None) for line in range(2)], [10, 10])
    return plan


def written_after(seconds):
    future = Future()
    Timer(seconds, future.set_result, [None]).start()
    return future


@pytest.mark.parametrize(
    "size, words", [(0, "0 bytes"), (999, "999 bytes"), (1_480_361_200, "1.48 GB"), (5e16, "50,000 TB")]
)
def test_bytes_in_words(size, words):
    assert in_words(size).replace("5e+04", "50,000") == words


def test_the_bar_shows_words_and_megabytes_per_second(plan, monkeypatch, capsys):
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=0.0)
    monkeypatch.setattr(pace, "time", clock)
    with Pace("v.hdf5", plan, SHAPE, 1, is_shown=True) as shown:  # an earlier run has written a block
        assert shown.bar.n == 2 and shown.bar.total == 6
        clock.now = 2.0
        shown.show(2)
        assert shown.bar.n == 4 and shown.bar.postfix == "10 words/s, 0 MB/s"  # 20 words in 2 seconds
        clock.now = 2.00001
        shown.num_bytes = 10**9
        shown.show(3)
    assert shown.bar.n == 6 and "500 MB/s" in shown.bar.postfix


@pytest.mark.parametrize("is_busy, warnings", [(None, 1), (False, 1), (True, 0)])
def test_a_run_that_waits_for_its_disk(is_busy, warnings, plan, monkeypatch, caplog):
    """The message comes once, and not while a device still computes."""
    monkeypatch.setattr(pace, "JUDGED_AFTER", 0.1)
    latest = ON_CPU if is_busy is None else SimpleNamespace(is_there=SimpleNamespace(query=lambda: not is_busy))
    with Pace("v.hdf5", plan, SHAPE, 0, is_shown=True) as shown:
        for number in range(1, 4):
            shown.wait(written_after(0.15), latest)
            shown.show(number)
    found = [message for message in caplog.messages if "waits for its disk" in message]
    assert len(found) == warnings
    for message in found:
        assert all(option in message for option in ("--dtype float16", "--layers", "--pooling"))


def test_a_fast_disk_is_not_worth_a_word(plan, monkeypatch, caplog):
    monkeypatch.setattr(pace, "JUDGED_AFTER", 0.0)
    with Pace("v.hdf5", plan, SHAPE, 0, is_shown=True) as shown:
        shown.start -= 1  # of computing
        shown.wait(written_after(0.1), ON_CPU)
        shown.show(1)
    assert not caplog.messages


def test_an_error_of_the_writer_is_raised(plan):
    failed = Future()
    failed.set_exception(OSError("disk"))
    with Pace("v.hdf5", plan, SHAPE, 0, is_shown=False) as shown, pytest.raises(OSError, match="disk"):
        shown.wait(failed, ON_CPU)


def test_room(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=400_000_000))
    check_room(Path("v.hdf5"), tmp_path, 400_000_000, 0)
    check_room(Path("v.hdf5"), tmp_path, 3_000_000_000, 2_600_000_000)
    both = r"v\.hdf5 needs up to 1\.48 GB of room, and its disk has 400 MB\. .*--dtype float16.*--layers.*--pooling"
    with refused(both, OSError):
        check_room(Path("v.hdf5"), tmp_path, 1_480_361_200, 0)


@pytest.mark.parametrize("name", ["v.hdf5", "v.parquet"])
def test_the_size_is_told_and_a_small_disk_refused(name, tmp_path, monkeypatch, capsys):
    """Before anything is computed. The file is no larger than announced, and in HDF5 hardly smaller."""
    save(tmp_path / "m", tiny_model(), ELMoTokenizer())
    text = tmp_path / "c.txt"
    text.write_text("the cat sat on the mat , and the dog lay beside it .\n" * 200)
    options = ["--model", str(tmp_path / "m"), "--input", str(text), "--output", str(tmp_path / name)]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        patch.setattr(embed, "compute_block", None)
        with refused(f"{name} needs up to .* of room, and its disk has 1 kB. ", OSError):
            embed.main(options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.txt", "m"]
    announced = []
    monkeypatch.setattr(embed, "check_room", lambda *arguments: announced.append(arguments[2]))
    size = embed.main(options).stat().st_size
    told = f"{name}: 200 lines, 2,800 tokens, at most {in_words(announced[0])}"
    assert told in capsys.readouterr().out
    least = 0.005 if name.endswith("parquet") else 0.8  # of equal lines, which are compressed
    assert least * announced[0] < size <= announced[0]
