"""Checkpoints of a training run: a folder is there complete or not at all, whenever the run is killed.

Everything is written below a hidden name in the same folder. Renaming it to `checkpoint-STEP` is the commit; what has
that name is complete and needs no marker. Before it is removed a checkpoint gets a hidden name again:

| name | what |
|---|---|
| `checkpoint-20` | complete |
| `.checkpoint-20.unfinished` | being written |
| `.checkpoint-20.replaced` | complete; a new `checkpoint-20` is about to take its place, or has |
| `.checkpoint-20.deleted` | being removed |
| `.model.unfinished` | copies of model files, about to be published |

One process writes; where there are several, the caller lets the others wait.
"""

import errno
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from modeling_elmo.configuration_elmo import SENTENCE_TRANSFORMERS_FILES
from modeling_elmo.run_scripts.program.files import MODEL_FILES

TRAINING_STATE = "training_state.pt"

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # for a full disk torch and safetensors have the last two


def save_state(folder: Path, state: dict[str, Any]):
    """Writes what training needs besides the model: tensors, numbers, strings, `None`, and lists and dicts of them.

    Raises:
        TypeError: something else is in `state`, which `load_state` would refuse.
    """
    torch.save(state, folder / TRAINING_STATE)
    try:
        torch.load(folder / TRAINING_STATE, weights_only=True, mmap=True)  # reads all but the tensors' numbers
    except pickle.UnpicklingError as error:
        raise TypeError(
            "The training state holds more than tensors, numbers, strings, lists and dicts, so that it could not be "
            f"loaded again: {_reason(error)}."
        ) from error


def load_state(folder: Path) -> dict[str, Any]:
    """What `save_state` wrote, on the CPU. Runs no code from the file."""
    path = folder / TRAINING_STATE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {TRAINING_STATE} but {_listed(folder)}; pass a checkpoint.")
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # nearly any, from IndexError to UnicodeDecodeError, by what a broken byte means
        raise ValueError(
            f"{path} is broken, or was not written by this program: {_reason(error)}. Pass another checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a training state; pass another checkpoint.")
    return state


class Checkpoints:
    """The folders `checkpoint-STEP` below `output_dir`.

    Args:
        save_total_limit: how many `rotate` leaves; `None`: all.
    """

    def __init__(self, output_dir: Path, save_total_limit: int | None):
        if save_total_limit is not None and save_total_limit < 1:
            raise ValueError(f"--save_total_limit {save_total_limit}: pass 1 or more, or leave it out to keep all.")
        self.output_dir, self.save_total_limit = output_dir, save_total_limit

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Lets `write` fill an empty folder, and makes it `checkpoint-STEP` once all of it is on the disk.

        Raises:
            OSError: it could not be written. Nothing is left of it, and older checkpoints are as they were.
        """
        checkpoint = self.output_dir / f"checkpoint-{step}"
        unfinished = _hidden(checkpoint, "unfinished")
        with self._all_or_nothing(checkpoint):
            _remove(unfinished)
            unfinished.mkdir(parents=True)
            write(unfinished)
            _sync(unfinished)
            self._commit(unfinished, checkpoint)
        _remove(_hidden(checkpoint, "replaced"))
        return checkpoint

    def all(self) -> list[Path]:
        """Complete checkpoints by step; one that was about to be replaced when the run was killed is among them."""
        found = {}
        for pattern in (r"\.checkpoint-(\d+)\.replaced", r"checkpoint-(\d+)"):
            for path in self.output_dir.glob("*"):
                match = re.fullmatch(pattern, path.name)
                if match and path.is_dir():
                    found[int(match[1])] = path
        return [found[step] for step in sorted(found)]

    def last(self) -> Path | None:
        return next(reversed(self.all()), None)

    def find(self, step: int) -> Path | None:
        names = (f"checkpoint-{step}", f".checkpoint-{step}.replaced")
        return next((path for path in self.all() if path.name in names), None)

    def rotate(self, keep: Path | None = None):
        """Removes the oldest checkpoints beyond the limit, but neither the last nor `keep`, the best for example."""
        checkpoints = self.all()
        excess = max(0, len(checkpoints) - (self.save_total_limit or len(checkpoints)))
        others = [path for path in checkpoints[:-1] if keep is None or path.name != keep.name]
        for path in others[:excess]:
            deleted = _hidden(path, "deleted")
            _remove(deleted)
            path.rename(deleted)
            _remove(deleted)

    def resolve(self, resume_from_checkpoint: str) -> Path:
        """The checkpoint to go on from: `last` (or `True`) stands for the one with the highest step."""
        passed = f"--resume_from_checkpoint {resume_from_checkpoint}"
        is_last = resume_from_checkpoint.lower() in ("last", "true")
        path = self.last() if is_last else Path(resume_from_checkpoint)
        if path is None:
            raise FileNotFoundError(f"{passed}: {self._contents()} Leave it out to begin a new training.")
        if not path.is_dir():
            raise FileNotFoundError(f"{passed}: there is no such folder. {self._contents()}")
        if re.fullmatch(r"\..*\.(unfinished|deleted)", path.name):
            raise ValueError(f"{passed}: the run was killed while it wrote or removed this. {self._contents()}")
        if not (path / TRAINING_STATE).is_file():
            raise ValueError(
                f"{passed}: {path} is no checkpoint. It holds {_listed(path)}, and no {TRAINING_STATE}. Pass `last` or "
                f"a folder checkpoint-STEP. {self._contents()}"
            )
        return path

    def publish(self, checkpoint: Path):
        """Puts the model of a checkpoint, without the state of its training, into `output_dir` itself.

        Copies are complete and on the disk before the first file of an older model is replaced. Each file is replaced
        at once; config.json is the last. Weights in several files could be mixed with older ones, so there the old
        config.json goes first, and for a moment there is no model.
        """
        # as `save_pretrained` does: not over those of another hand
        others = () if (self.output_dir / "modules.json").exists() else SENTENCE_TRANSFORMERS_FILES
        sources = [path for pattern in (*others, *MODEL_FILES) for path in sorted(checkpoint.glob(pattern))]
        num_weights = sum(path.suffix == ".safetensors" for path in sources)
        if not num_weights or sources[-1].name != "config.json":
            raise FileNotFoundError(f"{checkpoint} holds no model but {_listed(checkpoint)}; pass a checkpoint.")
        unfinished = _hidden(self.output_dir / "model", "unfinished")
        with self._all_or_nothing(self.output_dir / "config.json"):
            _remove(unfinished)
            unfinished.mkdir()
            copies = [Path(shutil.copyfile(path, unfinished / path.name)) for path in sources]
            _sync(unfinished)
            if num_weights > 1:
                (self.output_dir / "config.json").unlink(missing_ok=True)
                for path in self.output_dir.glob("*.safetensors"):  # an older single file would be loaded first
                    path.unlink()
            for path in copies:
                path.replace(self.output_dir / path.name)
            _sync_folder(self.output_dir)
        _remove(unfinished)

    def clean(self):
        """Removes what killed runs left, and gives a complete checkpoint its name back."""
        for path in self.output_dir.glob(".*"):
            match = re.fullmatch(r"\.(checkpoint-\d+|model)\.(unfinished|replaced|deleted)", path.name)
            if match and match[2] == "replaced" and not (self.output_dir / match[1]).exists():
                path.rename(self.output_dir / match[1])
            elif match:
                _remove(path)

    def _commit(self, unfinished: Path, checkpoint: Path):
        """Between the two renames of a checkpoint that is there already, `all` finds the old one by its hidden name."""
        replaced = _hidden(checkpoint, "replaced")
        if checkpoint.exists():
            _remove(replaced)
            checkpoint.rename(replaced)
        unfinished.rename(checkpoint)
        _sync_folder(self.output_dir)

    @contextmanager
    def _all_or_nothing(self, target: Path) -> Iterator[None]:
        try:
            yield
        except WRITE_ERRORS as error:
            existing = (path for path in (self.output_dir, *self.output_dir.absolute().parents) if path.is_dir())
            free = shutil.disk_usage(next(existing)).free
            self.clean()
            raise OSError(
                f"{target} could not be written: {_reason(error)}. The disk has {free / 1e9:.2f} GB free. "
                f"{self._contents()}"
            ) from error
        except BaseException:
            self.clean()
            raise

    def _contents(self) -> str:
        names = [path.name for path in self.all()]
        if not names:
            return f"{self.output_dir} holds no checkpoint."
        return f"The last complete checkpoint in {self.output_dir} is {names[-1]}; there are {', '.join(names)}."


def _hidden(path: Path, kind: str) -> Path:
    """Below the same folder, because renaming is atomic only within one file system."""
    name = path.name.removeprefix(".").removesuffix(".replaced")
    return path.with_name(f".{name}.{kind}")


def _remove(folder: Path):
    """What cannot be removed now, open files on a network file system for example, is left to the next `clean`."""
    shutil.rmtree(folder, ignore_errors=True)


def _sync(folder: Path):
    """Files before the folders that name them."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            with open(Path(path, name), "rb") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(path))


def _sync_folder(folder: Path):
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such operation for folders
            raise
    finally:
        os.close(descriptor)


def _listed(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*"))
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") or "nothing"


def _reason(error: Exception) -> str:
    """The sentence that tells what happened: torch surrounds it with advice, for example to run the file."""
    text = str(error).split("WeightsUnpickler error: ")[-1].strip()
    return f"{type(error).__name__}: " + re.split(r"(?<=\w)\.\s|\n", text)[0].rstrip(".")
