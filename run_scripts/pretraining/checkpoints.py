"""Checkpoints of a training run. A checkpoint is complete or it does not exist, whenever the run is killed.

A checkpoint is written under a hidden name in the same folder. Renaming it to `checkpoint-STEP` is the commit, so a
folder with this name is complete. Before a checkpoint is removed, it gets a hidden name again:

| name | content |
|---|---|
| `checkpoint-20` | complete |
| `.checkpoint-20.unfinished` | being written |
| `.checkpoint-20.replaced` | complete; a new `checkpoint-20` replaces it |
| `.checkpoint-20.deleted` | being removed |
| `.model.unfinished` | copies of model files, to be published |

Only one process writes; the caller makes the others wait.
"""

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
from modeling_elmo.run_scripts.program.files import MODEL_FILES, sync, sync_folder

TRAINING_STATE = "training_state.pt"

WRITTEN_FIRST = ("vocab.txt", "runs")  # by a run, before its first checkpoint: its counted words, its log

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # torch and safetensors raise the last two for a full disk


def save_state(folder: Path, state: dict[str, Any]):
    """Writes the state of training besides the model: tensors, numbers, strings, `None`, and lists and dicts of them.

    Raises:
        TypeError: `state` holds a value of another type, which `load_state` would refuse.
    """
    torch.save(state, folder / TRAINING_STATE)
    try:
        torch.load(folder / TRAINING_STATE, weights_only=True, mmap=True)  # reads everything but the values of tensors
    except pickle.UnpicklingError as error:
        raise TypeError(
            "The training state holds more than tensors, numbers, strings, lists and dicts, so it cannot be loaded "
            f"again: {_reason(error)}."
        ) from error


def load_state(folder: Path) -> dict[str, Any]:
    """The state that `save_state` wrote, on the CPU. Runs no code from the file."""
    path = folder / TRAINING_STATE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {TRAINING_STATE} but {_listed(folder)}; pass a checkpoint.")
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a broken byte may raise nearly any, from IndexError to UnicodeDecodeError
        raise ValueError(
            f"{path} is broken, or was not written by this program: {_reason(error)}. Pass another checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a training state; pass another checkpoint.")
    return state


class Checkpoints:
    """The folders `checkpoint-STEP` in `output_dir`.

    Args:
        save_total_limit: number of checkpoints that `rotate` keeps; `None`: all.
    """

    def __init__(self, output_dir: Path, save_total_limit: int | None):
        self.output_dir, self.save_total_limit = output_dir, save_total_limit

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Lets `write` fill an empty folder, and renames it to `checkpoint-STEP` when all of it is on the disk.

        Raises:
            OSError: it cannot be written. Its files are removed, and older checkpoints stay.
        """
        checkpoint = self.output_dir / f"checkpoint-{step}"
        unfinished = _hidden(checkpoint, "unfinished")
        with self._all_or_nothing(checkpoint):
            _remove(unfinished)
            unfinished.mkdir(parents=True)
            write(unfinished)
            sync(unfinished)
            self._commit(unfinished, checkpoint)
        _remove(_hidden(checkpoint, "replaced"))
        return checkpoint

    def all(self) -> list[Path]:
        """Complete checkpoints by step, including one that was being replaced when the run was killed."""
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
        """Removes the oldest checkpoints beyond the limit, but never the last or `keep`."""
        checkpoints = self.all()
        excess = max(0, len(checkpoints) - (self.save_total_limit or len(checkpoints)))
        others = [path for path in checkpoints[:-1] if keep is None or path.name != keep.name]
        for path in others[:excess]:
            deleted = _hidden(path, "deleted")
            _remove(deleted)
            path.rename(deleted)
            _remove(deleted)

    def to_resume(self, name: str | None) -> Path | None:
        """The checkpoint that `--resume_from_checkpoint` names, and no other run in `output_dir`; else `None`."""
        last = self.last()
        if name is None and last is not None:
            raise FileExistsError(
                f"--output_dir {self.output_dir} already holds {last.name}. Continue with --resume_from_checkpoint "
                "last, or pass another folder."
            )
        if last is None:
            self._refuse_foreign_files()
        found = None if name is None else self.resolve(name)
        if found is not None and last is not None and not last.samefile(found):
            raise ValueError(
                f"--resume_from_checkpoint {name}: --output_dir {self.output_dir} already holds {last.name}, and the "
                "two runs would mix. Pass `last`, or another --output_dir."
            )
        return found

    def _refuse_foreign_files(self):
        names = sorted(path.name for path in self.output_dir.glob("[!.]*") if path.name not in WRITTEN_FIRST)
        if names:
            raise FileExistsError(
                f"--output_dir {self.output_dir} holds {_listed(self.output_dir)}, and no checkpoint of this program. "
                "Pass a new or an empty folder."
            )

    def resolve(self, resume_from_checkpoint: str) -> Path:
        """The checkpoint to resume from: a folder, or for `last` (or `True`) the checkpoint with the highest step."""
        passed = f"--resume_from_checkpoint {resume_from_checkpoint}"
        is_last = resume_from_checkpoint.lower() in ("last", "true")
        path = self.last() if is_last else Path(resume_from_checkpoint)
        if path is None:
            raise FileNotFoundError(f"{passed}: {self._contents()} Leave the option out to start a new training.")
        if not path.is_dir():
            raise FileNotFoundError(f"{passed}: this folder does not exist. {self._contents()}")
        if re.fullmatch(r"\..*\.(unfinished|deleted)", path.name):
            raise ValueError(f"{passed}: it is incomplete, because the run was killed. {self._contents()}")
        if not (path / TRAINING_STATE).is_file():
            raise ValueError(
                f"{passed}: {path} is not a checkpoint. It holds {_listed(path)}, but no {TRAINING_STATE}. Pass `last` "
                f"or a folder checkpoint-STEP. {self._contents()}"
            )
        return path

    def publish(self, checkpoint: Path):
        """Copies the model of a checkpoint, without its training state, to `output_dir`.

        All copies are on the disk before the first file of an older model is replaced. config.json is replaced last.
        If the weights have several files, which could be mixed with older ones, the old config.json is removed first.
        """
        # Like `save_pretrained`: modules that somebody else wrote are not replaced.
        others = () if (self.output_dir / "modules.json").exists() else SENTENCE_TRANSFORMERS_FILES
        sources = [path for pattern in (*others, *MODEL_FILES) for path in sorted(checkpoint.glob(pattern))]
        num_weights = sum(path.suffix == ".safetensors" for path in sources)
        if not num_weights or sources[-1].name != "config.json":
            raise FileNotFoundError(f"{checkpoint} holds no model but {_listed(checkpoint)}. Pass a checkpoint.")
        unfinished = _hidden(self.output_dir / "model", "unfinished")
        with self._all_or_nothing(self.output_dir / "config.json"):
            _remove(unfinished)
            unfinished.mkdir()
            names = [path.relative_to(checkpoint) for path in sources]
            for name in names:
                (unfinished / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(checkpoint / name, unfinished / name)
            sync(unfinished)
            if num_weights > 1:
                (self.output_dir / "config.json").unlink(missing_ok=True)
                for path in self.output_dir.glob("*.safetensors"):  # transformers would load an older single file first
                    path.unlink()
            for name in names:
                (self.output_dir / name).parent.mkdir(exist_ok=True)
                (unfinished / name).replace(self.output_dir / name)
            for folder in {(self.output_dir / name).parent for name in names}:
                sync_folder(folder)
        _remove(unfinished)

    def clean(self):
        """Removes the unfinished folders of killed runs, and renames a complete checkpoint that was being replaced."""
        for path in self.output_dir.glob(".*"):
            match = re.fullmatch(r"\.(checkpoint-\d+|model)\.(unfinished|replaced|deleted)", path.name)
            if match and match[2] == "replaced" and not (self.output_dir / match[1]).exists():
                path.rename(self.output_dir / match[1])
            elif match:
                _remove(path)

    def _commit(self, unfinished: Path, checkpoint: Path):
        """Renames a checkpoint. An older one that it replaces has a hidden name in between, by which `all` finds it."""
        replaced = _hidden(checkpoint, "replaced")
        if checkpoint.exists():
            _remove(replaced)
            checkpoint.rename(replaced)
        unfinished.rename(checkpoint)
        sync_folder(self.output_dir)

    @contextmanager
    def _all_or_nothing(self, target: Path) -> Iterator[None]:
        try:
            yield
        except WRITE_ERRORS as error:
            existing = (path for path in (self.output_dir, *self.output_dir.absolute().parents) if path.is_dir())
            free = shutil.disk_usage(next(existing)).free
            self.clean()
            raise OSError(
                f"{target} cannot be written: {_reason(error)}. The disk has {free / 1e9:.2f} GB free. "
                f"{self._contents()}"
            ) from error
        except BaseException:
            self.clean()
            raise

    def _contents(self) -> str:
        names = [path.name for path in self.all()]
        if not names:
            return f"{self.output_dir} holds no checkpoints."
        return f"The complete checkpoints in {self.output_dir} are {', '.join(names)}."


def _hidden(path: Path, kind: str) -> Path:
    """A hidden name in the same folder, because renaming is atomic only within a file system."""
    name = path.name.removeprefix(".").removesuffix(".replaced")
    return path.with_name(f".{name}.{kind}")


def _remove(folder: Path):
    """Files that cannot be removed now, such as open files on a network file system, are left to the next `clean`."""
    shutil.rmtree(folder, ignore_errors=True)


def _listed(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*"))
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") or "nothing"


def _reason(error: Exception) -> str:
    """The first sentence of an error. torch adds advice, for example to run code from the file."""
    text = str(error).split("WeightsUnpickler error: ")[-1].strip()
    return f"{type(error).__name__}: " + re.split(r"(?<=\w)\.\s|\n", text)[0].rstrip(".")
