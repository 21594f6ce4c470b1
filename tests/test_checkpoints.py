import errno
import fcntl
import os
import random
import re
import resource
import shutil
import stat
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from errors import refused
from safetensors.torch import save_file

from modeling_elmo.run_scripts.pretraining import checkpoints as module
from modeling_elmo.run_scripts.pretraining.checkpoints import TRAINING_STATE, Checkpoints, load_state, on_main_process

MODEL = ("config.json", "model.safetensors", "modeling_elmo.py", "tokenizer.json", "tokenizer_config.json", "README.md")


def writer(step, *others):
    def write(folder):
        for name in (*MODEL, *others):
            (folder / name).write_text(f"{name} of {step}")
        torch.save({"step": step, "tensor": torch.full((100,), step)}, folder / TRAINING_STATE)

    return write


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def saved(folder, *steps, limit=None):
    checkpoints = Checkpoints(folder, limit)
    for step in steps:
        checkpoints.save(step, writer(step))
    return checkpoints


def test_save_and_find(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "run", None)
    assert checkpoints.all() == [] and checkpoints.last() is None and checkpoints.find(5) is None
    for step in (5, 100, 20):
        assert checkpoints.save(step, writer(step)) == tmp_path / "new" / "run" / f"checkpoint-{step}"
    (checkpoints.output_dir / "checkpoint-best").mkdir()
    (checkpoints.output_dir / "checkpoint-200").write_text("a file")
    assert [path.name for path in checkpoints.all()] == ["checkpoint-5", "checkpoint-20", "checkpoint-100"]
    assert checkpoints.last() == checkpoints.find(100) == checkpoints.output_dir / "checkpoint-100"
    state = load_state(checkpoints.last())
    assert state["step"] == 100 and torch.equal(state["tensor"], torch.full((100,), 100))
    with refused("checkpoint-20 cannot be written.* checkpoint-5, checkpoint-20, checkpoint-100", OSError):
        checkpoints.save(20, writer(7))
    assert load_state(checkpoints.find(20))["step"] == 20
    assert not [name for name in names(checkpoints.output_dir) if name.startswith(".")]


def test_files_are_synchronized_where_only_open_for_writing_they_can_be(tmp_path, monkeypatch):
    """As on Windows."""
    fsync = os.fsync

    def fsync_of_windows(descriptor):
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode) and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_RDWR == 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_of_windows)
    assert saved(tmp_path, 1).last().name == "checkpoint-1"


def test_all_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, Path.rename

    def recorded_fsync(descriptor):
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    def recorded_rename(path, target):
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)

    def write(folder):
        (folder / "a").write_text("a")
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text("b")

    Checkpoints(tmp_path, None).save(1, write)
    hidden = ".checkpoint-1.unfinished"
    assert sorted(events[:-3]) == sorted([f"{hidden}/sub/b", f"{hidden}/sub", f"{hidden}/a"])
    assert events.index(f"{hidden}/sub/b") < events.index(f"{hidden}/sub")
    assert events[-3:] == [hidden, "rename", "."]


def fail_to_write(error, folder):
    raise error


def write_too_much(save, folder):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        save({"a": torch.zeros(100_000)}, folder / "weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")


@pytest.mark.parametrize(
    "fail, raised",
    [
        (partial(fail_to_write, KeyboardInterrupt()), KeyboardInterrupt),
        (partial(fail_to_write, FULL), OSError),
        (partial(write_too_much, torch.save), OSError),  # a full disk as torch reports it
        (partial(write_too_much, save_file), OSError),
    ],
)
def test_an_interrupted_write_leaves_no_trace(tmp_path, fail, raised):
    checkpoints = saved(tmp_path, 1, 2)

    def write(folder):
        writer(3)(folder)
        fail(folder)

    with pytest.raises(raised) as caught:
        checkpoints.save(3, write)
    if raised is OSError:
        assert re.search("checkpoint-3 cannot be written: .* checkpoints checkpoint-1, checkpoint-2", str(caught.value))
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert load_state(checkpoints.last())["step"] == 2


@pytest.mark.parametrize("call", range(1, 9))
def test_a_kill_between_any_two_changes_of_names(tmp_path, monkeypatch, call):
    """Killed before the nth change while it saves and rotates: all checkpoints are complete, also after `clean`."""

    class Killed(BaseException):
        pass

    checkpoints, count = saved(tmp_path, 1, 2, limit=2), 0

    def until_killed(function):
        def wrapped(*args, **kwargs):
            nonlocal count
            count += 1
            if count >= call:
                raise Killed  # also for the clean-up
            return function(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", until_killed(Path.rename))
        patch.setattr(module, "_remove", until_killed(module._remove))
        with pytest.raises(Killed):
            for step in (3, 4):
                checkpoints.save(step, writer(step))
                checkpoints.rotate()
    for _ in range(2):
        assert checkpoints.find(2) in checkpoints.all()
        assert all(load_state(path)["step"] == int(re.findall(r"\d+", path.name)[-1]) for path in checkpoints.all())
        checkpoints.clean()
        assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_clean_removes_only_its_own_folders(tmp_path):
    saved(tmp_path, 1)
    for name in (".checkpoint-2.unfinished", ".checkpoint-1.deleted", ".model.unfinished", ".git", ".notes.unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    Checkpoints(tmp_path, None).clean()
    assert names(tmp_path) == [".git", ".notes.unfinished", "checkpoint-1"]
    Checkpoints(tmp_path / "nowhere", None).clean()


@pytest.mark.parametrize(
    "limit, best, left",
    [(None, None, [1, 2, 3, 4]), (2, None, [3, 4]), (2, 1, [1, 4]), (1, 2, [2, 4]), (1, 4, [4])],
)
def test_rotation(tmp_path, limit, best, left):
    checkpoints = saved(tmp_path, 1, 2, 3, 4, limit=limit)
    checkpoints.rotate(best)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]


def test_a_checkpoint_that_cannot_be_removed_is_not_listed(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 1, 2, limit=1)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda folder, ignore_errors: None)
        checkpoints.rotate()
    assert names(tmp_path) == [".checkpoint-1.deleted", "checkpoint-2"]
    checkpoints.clean()
    assert names(tmp_path) == ["checkpoint-2"]


def test_publish(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    (checkpoints.find(2) / "training_log.json").write_text("[]")
    (tmp_path / "mine.txt").write_text("mine")
    for step in (2, 1):
        checkpoints.publish(checkpoints.find(step))
        assert names(tmp_path) == sorted([*MODEL, "checkpoint-1", "checkpoint-2", "mine.txt"])
        assert [(tmp_path / name).read_text() for name in MODEL] == [f"{name} of {step}" for name in MODEL]
        assert (checkpoints.find(step) / "training_state.pt").exists()


def test_modules_of_somebody_else_are_not_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path, None)
    checkpoint = checkpoints.save(1, writer(1, "modules.json"))
    (checkpoint / "1_Pooling").mkdir()
    (checkpoint / "1_Pooling" / "config.json").write_text("pooling")
    checkpoints.publish(checkpoint)
    assert (tmp_path / "1_Pooling" / "config.json").read_text() == "pooling"
    (tmp_path / "modules.json").write_text("mine")
    shutil.rmtree(tmp_path / "1_Pooling")
    checkpoints.publish(checkpoint)
    assert names(tmp_path) == sorted([*MODEL, "modules.json", "checkpoint-1"])
    assert (tmp_path / "modules.json").read_text() == "mine"


def test_a_model_that_is_half_published_has_no_new_config(tmp_path, monkeypatch):
    checkpoints, replace, order = saved(tmp_path, 1, 2), Path.replace, []
    checkpoints.publish(checkpoints.find(1))

    def failing(path, target):
        order.append(path.name)
        if path.name == "config.json":
            raise OSError(errno.EIO, "disk")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", failing)
    with refused("model cannot be written.*checkpoint-1, checkpoint-2", OSError):
        checkpoints.publish(checkpoints.find(2))
    assert sorted(order) == sorted(MODEL) and order[-1] == "config.json"
    assert (tmp_path / "config.json").read_text() == "config.json of 1"
    assert not (tmp_path / ".model.unfinished").exists()


def test_what_is_resumed(tmp_path):
    """A folder may have the traces of a run that was killed before its first checkpoint."""
    checkpoints, other = saved(tmp_path / "run", 5, 10), saved(tmp_path / "other", 5)
    for name in ("last", "True", str(tmp_path / "run" / "checkpoint-10")):
        assert checkpoints.to_resume(name) == tmp_path / "run" / "checkpoint-10"
    (tmp_path / "new").mkdir()
    for name in ("vocab.txt", "counts.json.gz", "runs", "elmo", ".lock", ".checkpoint-5.unfinished"):
        (tmp_path / "new" / name).touch()
    assert Checkpoints(tmp_path / "new", None).to_resume(None) is None
    assert Checkpoints(tmp_path / "new", None).to_resume(str(other.last())) == other.last()


@pytest.mark.parametrize(
    "folder, name, message",
    [
        (
            "run",
            None,
            "run already holds checkpoint-10.*, or run the command that wrote it with --resume_from_checkpoint",
        ),
        ("run", "other/checkpoint-5", "other/checkpoint-5: .*run already holds checkpoint-10, and the two runs"),
        ("run", "run", "run: .*training_state.pt.* checkpoint-5, checkpoint-10"),
        ("run", "run/.checkpoint-11.unfinished", "not a complete checkpoint"),
        ("thesis", None, "thesis already holds thesis.tex. Pass a new or an empty folder.$"),
        ("thesis", "other/checkpoint-5", "thesis already holds thesis.tex"),
        ("new", "last", "last: .*new holds no checkpoints"),
    ],
)
def test_folders_that_are_refused(tmp_path, monkeypatch, folder, name, message):
    saved(tmp_path / "run", 5, 10)
    saved(tmp_path / "other", 5).last().rename(tmp_path / "run" / ".checkpoint-11.unfinished")
    saved(tmp_path / "other", 5)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").touch()
    monkeypatch.chdir(tmp_path)
    with refused(message, (OSError, ValueError)):
        Checkpoints(tmp_path / folder, None).to_resume(name)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_broken_states(tmp_path):
    path = tmp_path / "training_state.pt"
    torch.save({"a": torch.arange(100.0), "b": [1, "x"]}, path)
    whole, chance = path.read_bytes(), random.Random(0)
    cut = [whole[:length] for length in range(0, len(whole), 37)]
    noise = [chance.randbytes(chance.randrange(1, 100)) for _ in range(100)]
    torch.save([1, 2], path)
    for content in [path.read_bytes(), *cut, *noise, b"hello\n"]:
        path.write_bytes(content)
        with refused("training_state.pt is broken") as caught:
            load_state(tmp_path)
        assert "weights_only" not in str(caught.value)  # without torch's advice to run code from the file


def test_an_error_of_the_main_process_is_raised_by_all(monkeypatch):
    sent = []
    monkeypatch.setattr(
        module, "broadcast_object_list", lambda values: sent[-1] if sent else sent.append(values) or values
    )

    def full():
        raise OSError("The disk is full.")

    for is_main_process, message in ((True, "^The disk is full.$"), (False, "has ended: The disk is full.")):
        with refused(message, OSError):
            on_main_process(SimpleNamespace(is_main_process=is_main_process), full)
    sent.clear()
    assert [on_main_process(SimpleNamespace(is_main_process=each), lambda: 7) for each in (True, False)] == [7, 7]
