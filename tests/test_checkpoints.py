import errno
import fcntl
import os
import random
import re
import resource
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from modeling_elmo.run_scripts.pretraining import checkpoints as module
from modeling_elmo.run_scripts.pretraining.checkpoints import Checkpoints, load_state, save_state

MODEL = ("config.json", "model.safetensors", "modeling_elmo.py", "tokenizer.json", "tokenizer_config.json", "README.md")


def writer(step: int, *others: str):
    def write(folder: Path):
        for name in (*MODEL, *others):
            (folder / name).write_text(f"{name} of {step}")
        save_state(folder, {"step": step, "tensor": torch.full((100,), step)})

    return write


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saved(folder: Path, *steps: int, limit: int | None = None) -> Checkpoints:
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
    checkpoints.save(20, lambda folder: (folder / "only").write_text("replaces an older one"))
    assert names(checkpoints.find(20)) == ["only"]
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


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TypeError("a mistake")])
@pytest.mark.parametrize("step", [2, 3])
def test_an_interrupted_write_leaves_no_trace(tmp_path, raised, step):
    checkpoints = saved(tmp_path, 1, 2)

    def write(folder):
        writer(step)(folder)
        raise raised

    with pytest.raises(type(raised) if isinstance(raised, Exception) else raised):
        checkpoints.save(step, write)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert load_state(checkpoints.last())["step"] == 2


def test_a_full_disk(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)

    def write(folder):
        (folder / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")

    message = (
        rf"{tmp_path}/checkpoint-3 cannot be written: OSError: \[Errno 28\] No space left on device: "
        r"'model.safetensors'. The disk has \d+\.\d\d GB free. The complete checkpoints in "
        rf"{tmp_path} are checkpoint-1, checkpoint-2."
    )
    with pytest.raises(OSError, match=message) as caught:
        checkpoints.save(3, write)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    with pytest.raises(OSError, match="README.md/run/checkpoint-1 cannot be written: NotADirectoryError"):
        saved(checkpoints.last() / "README.md" / "run", 1)


@pytest.mark.parametrize("save", [torch.save, save_file])
def test_a_full_disk_as_torch_and_safetensors_report_it(tmp_path, save):
    def write(folder):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            save({"a": torch.zeros(100_000)}, folder / "weights")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with pytest.raises(OSError, match="checkpoint-1 cannot be written: .* holds no checkpoints") as caught:
        Checkpoints(tmp_path, None).save(1, write)
    assert not isinstance(caught.value.__cause__, OSError)
    assert names(tmp_path) == []


def test_the_last_step_of_replacing_fails(tmp_path, monkeypatch):
    checkpoints, rename = saved(tmp_path, 1), Path.rename

    def failing(path, target):
        if path.name.endswith(".unfinished"):
            raise OSError(errno.EIO, "disk")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="are checkpoint-1"):
        checkpoints.save(1, writer(7))
    assert names(tmp_path) == ["checkpoint-1"] and load_state(checkpoints.last())["step"] == 1


@pytest.mark.parametrize("call", range(1, 12))
def test_a_kill_between_any_two_changes_of_names(tmp_path, monkeypatch, call):
    """Killed before the nth change while it replaces and rotates: all checkpoints are complete, also after `clean`."""

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
            for step in (2, 3):
                checkpoints.save(step, writer(step))
                checkpoints.rotate()
    for _ in range(2):
        assert checkpoints.find(2) in checkpoints.all()
        assert all(load_state(path)["step"] == int(re.findall(r"\d+", path.name)[-1]) for path in checkpoints.all())
        checkpoints.clean()
        assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_clean_removes_only_its_own_folders(tmp_path):
    saved(tmp_path, 1)
    for name in (".checkpoint-2.unfinished", ".checkpoint-1.deleted", ".checkpoint-1.replaced", ".model.unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / ".checkpoint-3.replaced").mkdir()
    for name in (".git", ".notes.unfinished", "notes"):
        (tmp_path / name).mkdir()
    assert [path.name for path in Checkpoints(tmp_path, None).all()] == ["checkpoint-1", ".checkpoint-3.replaced"]
    Checkpoints(tmp_path, None).clean()
    assert names(tmp_path) == [".git", ".notes.unfinished", "checkpoint-1", "checkpoint-3", "notes"]
    Checkpoints(tmp_path / "nowhere", None).clean()


@pytest.mark.parametrize(
    "limit, keep, left",
    [
        (None, None, [1, 2, 3, 4]),
        (5, None, [1, 2, 3, 4]),
        (2, None, [3, 4]),
        (2, 1, [1, 4]),
        (2, 3, [3, 4]),
        (1, 2, [2, 4]),
        (1, 4, [4]),
    ],
)
def test_rotation(tmp_path, limit, keep, left):
    checkpoints = saved(tmp_path, 1, 2, 3, 4, limit=limit)
    checkpoints.rotate(keep=None if keep is None else checkpoints.find(keep))
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]


def test_a_checkpoint_that_is_being_removed_is_not_listed(tmp_path, monkeypatch):
    checkpoints, seen = saved(tmp_path, 1, 2, limit=1), []

    def busy(folder, ignore_errors):
        assert ignore_errors
        seen.append([path.name for path in checkpoints.all()])

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", busy)
        checkpoints.rotate()
    assert seen == [["checkpoint-1", "checkpoint-2"], ["checkpoint-2"]]
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
    others = ["modules.json", "sentence_bert_config.json"]
    checkpoints = Checkpoints(tmp_path, None)
    checkpoints.save(1, writer(1, *others))
    (checkpoints.find(1) / "1_Pooling").mkdir()
    (checkpoints.find(1) / "1_Pooling" / "config.json").write_text("pooling")
    checkpoints.publish(checkpoints.find(1))
    assert names(tmp_path) == sorted([*MODEL, *others, "1_Pooling", "checkpoint-1"])
    assert (tmp_path / "1_Pooling" / "config.json").read_text() == "pooling"
    (tmp_path / "modules.json").write_text("mine")
    (tmp_path / "sentence_bert_config.json").unlink()
    shutil.rmtree(tmp_path / "1_Pooling")
    checkpoints.publish(checkpoints.find(1))
    assert names(tmp_path) == sorted([*MODEL, "modules.json", "checkpoint-1"])
    assert (tmp_path / "modules.json").read_text() == "mine"


@pytest.mark.parametrize("shards", [1, 2])
def test_a_model_that_is_half_published_has_no_new_config(tmp_path, monkeypatch, shards):
    others = ["model-2.safetensors", "model.safetensors.index.json"][: 2 * shards - 2]
    checkpoints = Checkpoints(tmp_path, None)
    for step in (1, 2):
        checkpoints.save(step, writer(step, *others))
    checkpoints.publish(checkpoints.find(1))
    replace, order = Path.replace, []

    def failing(path, target):
        order.append(path.name)
        if path.name == "config.json":
            raise OSError(errno.EIO, "disk")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(OSError, match="config.json cannot be written.*checkpoint-1, checkpoint-2"):
        checkpoints.publish(checkpoints.find(2))
    assert sorted(order) == sorted([*MODEL, *others]) and order[-1] == "config.json"
    config = tmp_path / "config.json"
    assert not config.exists() if shards > 1 else config.read_text() == "config.json of 1"
    assert not (tmp_path / ".model.unfinished").exists()


def test_parts_replace_a_single_file(tmp_path):
    """transformers would load the single file first."""
    checkpoints = saved(tmp_path, 1, 2)
    checkpoints.publish(checkpoints.find(1))
    parts = checkpoints.find(2)
    (parts / "model.safetensors").rename(parts / "model-00001-of-00002.safetensors")
    (parts / "model-00002-of-00002.safetensors").write_text("more")
    checkpoints.publish(parts)
    found = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert found == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_publish_needs_a_model(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "config.json").touch()
    with pytest.raises(FileNotFoundError, match="checkpoint-1 holds no model but config.json. Pass a checkpoint."):
        Checkpoints(tmp_path, None).publish(tmp_path / "checkpoint-1")


def test_resolve(tmp_path):
    checkpoints = saved(tmp_path, 5, 10)
    for name in ("last", "True", "true"):
        assert checkpoints.resolve(name) == tmp_path / "checkpoint-10"
    assert checkpoints.resolve(str(tmp_path / "checkpoint-5")) == tmp_path / "checkpoint-5"
    (tmp_path / "checkpoint-10").rename(tmp_path / ".checkpoint-10.replaced")  # as after a kill
    assert load_state(checkpoints.resolve("last"))["step"] == 10


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    """But not the traces of a run that was killed before its first checkpoint."""
    checkpoints = Checkpoints(tmp_path, None)
    for name in ("vocab.txt", "runs", ".lock", ".checkpoint-5.unfinished"):
        (tmp_path / name).touch()
    assert checkpoints.to_resume(None) is None
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(
        FileExistsError, match="holds .*thesis.tex.*, and no checkpoint of this .*Pass a new or an empty"
    ):
        checkpoints.to_resume(None)
    with pytest.raises(FileExistsError, match="Pass a new or an empty folder"):
        checkpoints.to_resume(str(saved(tmp_path.with_name("other"), 5).last()))


def test_two_runs_do_not_mix_in_a_folder(tmp_path):
    checkpoints, other = saved(tmp_path / "run", 5, 10), saved(tmp_path / "other", 5)
    assert checkpoints.to_resume("last") == tmp_path / "run" / "checkpoint-10"
    assert Checkpoints(tmp_path / "new", None).to_resume(None) is None
    assert Checkpoints(tmp_path / "new", None).to_resume(str(other.last())) == other.last()
    with pytest.raises(FileExistsError, match="run already holds checkpoint-10. Continue with --resume_from_"):
        checkpoints.to_resume(None)
    with pytest.raises(ValueError, match="already holds checkpoint-10, and the two runs would mix. Pass `last`, or"):
        checkpoints.to_resume(str(other.last()))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("checkpoint-6", FileNotFoundError, "-6: this folder does not exist. The complete .* checkpoint-10."),
        ("model", ValueError, "model is not a checkpoint. It holds config.json, but no training_state.pt. Pass `last`"),
        ("", ValueError, "run is not a checkpoint. .* are checkpoint-5, checkpoint-10."),
        (".checkpoint-11.unfinished", ValueError, "it is incomplete, because the run was killed."),
    ],
)
def test_folders_that_cannot_be_resumed(tmp_path, name, error, message):
    checkpoints = saved(tmp_path / "run", 5, 10)
    for folder in ("model", ".checkpoint-11.unfinished"):
        (tmp_path / "run" / folder).mkdir()
        (tmp_path / "run" / folder / "config.json").touch()
    with pytest.raises(error, match=message):
        checkpoints.resolve(str(tmp_path / "run" / name))
    with pytest.raises(FileNotFoundError, match="last: .*empty holds no checkpoints. Leave the option out to start a"):
        Checkpoints(tmp_path / "empty", None).resolve("last")


@pytest.mark.parametrize("value", [np.zeros(3), Path("x"), np.float64(1.0)])
def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path, value):
    checkpoints = saved(tmp_path, 1)
    with pytest.raises(
        TypeError, match="more than tensors, numbers, .* loaded again: UnpicklingError: Unsupported global"
    ):
        checkpoints.save(2, lambda folder: save_state(folder, {"value": value}))
    assert names(tmp_path) == ["checkpoint-1"]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_broken_states(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no training_state.pt but nothing; pass a checkpoint."):
        load_state(tmp_path)
    path = tmp_path / "training_state.pt"
    save_state(tmp_path, {"a": torch.arange(100.0), "b": [1, "x"]})
    whole, chance = path.read_bytes(), random.Random(0)
    cut = [whole[:length] for length in range(0, len(whole), 37)]
    noise = [chance.randbytes(chance.randrange(1, 100)) for _ in range(100)]
    message = r"training_state.pt (is broken|holds a).*[Pp]ass another checkpoint"
    for content in [*cut, *noise, b"hello\n"]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            load_state(tmp_path)
        assert "weights_only" not in str(caught.value)  # without torch's advice to run code from the file
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="holds a list, not a training state; pass another checkpoint"):
        load_state(tmp_path)
