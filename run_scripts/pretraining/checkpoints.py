"""Checkpoints of a training run. A checkpoint is complete or it does not exist, whenever the run is killed.

A checkpoint is written under a hidden name in the same folder. Renaming it to `checkpoint-STEP` is the commit, so a
folder with this name is complete. Before a checkpoint is removed, it gets a hidden name again:

| name | content |
|---|---|
| `checkpoint-20` | complete |
| `.checkpoint-20.unfinished` | being written |
| `.checkpoint-20.deleted` | being removed |
| `.model.unfinished` | copies of model files, to be published |

Only one process writes. The others wait in `on_main_process`.
"""

import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError

from modeling_elmo.configuration_elmo import SENTENCE_TRANSFORMERS_FILES

from ..program.files import sync, sync_folder
from ..program.models import MODEL_FILES
from ..program.trackers import TENSORBOARD_FOLDER

TRAINING_STATE = "training_state.pt"
# What a run writes before its first checkpoint: words, their counts, and the files of trackers.
COUNTS = "counts.json.gz"
PROJECT = "elmo"  # under which trackers collect runs; the name of TensorBoard's folder beside other trackers
WRITTEN_FIRST = ("vocab.txt", COUNTS, TENSORBOARD_FOLDER, PROJECT)


@dataclass
class Progress:
    """Everything that changes during training, except tensors. The names are part of saved checkpoints."""

    step: int = 0
    epoch: float = 0.0
    predictions: int = 0  # in one direction, over all processes
    best_perplexity: float = math.inf
    best_step: int | None = None
    evaluations_since_best: int = 0
    held_out: str | None = None  # identifies the text of the perplexities
    base_model: str | None = None
    base_model_on_hub: str | None = None  # as at the start: later, a folder may be gone or elsewhere
    earlier_trainings: list[dict[str, Any]] = field(default_factory=list)  # records of the base model, oldest first
    settings: dict[str, Any] | None = None
    earlier_settings: list[dict[str, Any]] = field(default_factory=list)  # settings that a resumed run has changed
    log: list[dict[str, Any]] = field(default_factory=list)

    def is_best(self, perplexity: float) -> bool:
        """Takes note of a perplexity. Returns whether it is the lowest so far; the one before training is not."""
        if self.step == 0 or not perplexity < self.best_perplexity:
            self.evaluations_since_best += self.step > 0
            return False
        self.best_perplexity, self.best_step, self.evaluations_since_best = perplexity, self.step, 0
        return True

    def begin(self, settings: dict[str, Any], names_of_model: set[str]) -> dict[str, Any]:
        """Takes note of the settings of a run that starts or resumes here, which cannot change the model."""
        if self.settings is not None:
            of_model = {name: value for name, value in self.settings.items() if name in names_of_model}
            others = {name: value for name, value in settings.items() if name not in names_of_model}
            settings = of_model | others
        if self.settings not in (None, settings):
            self.earlier_settings.append({"until_step": self.step, "settings": self.settings})
        self.settings = settings
        return settings

    def evaluate_on(self, held_out: str | None) -> str | None:
        """Takes note of the held-out text. Forgets the perplexities of another text, and returns a message then."""
        before, self.held_out = self.held_out, held_out
        if before == held_out:
            return None
        return self._forget_perplexities(f"was {before or 'another text'}, and is now {held_out or 'missing'}")

    def evaluate_over(self, predictions: int) -> str | None:
        """The same for a text that has changed under its name, and with it the number of predictions."""
        numbers = {entry["predictions"] for entry in self.log if "perplexity" in entry}
        if numbers <= {predictions}:
            return None
        return self._forget_perplexities(f"had {max(numbers):,} predictions, and has {predictions:,} now")

    def _forget_perplexities(self, change: str) -> str | None:
        """The model that is published is then the best one from here on, or the last one without held-out text."""
        others = [entry for entry in self.log if "perplexity" not in entry]
        if len(others) == len(self.log):
            return None
        self.log, self.best_perplexity, self.best_step, self.evaluations_since_best = others, math.inf, None, 0
        return (
            f"The held-out text {change}. The perplexities so far leave the log, and the best step is searched again "
            "from here on."
        )


def on_main_process(accelerator: Accelerator, work: Callable[[], Any]) -> Any:
    """The result of `work`, which the main process does alone, on all processes.

    An error is raised on all of them, too: raised by one, it would leave the others waiting for that process.
    """
    outcome: list[Any] = [None, None]
    failed: Exception | None = None
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except Exception as error:
            failed, outcome[1] = error, str(error)
    result, reason = broadcast_object_list(outcome)
    if reason is not None:
        raise failed or OSError(f"The main process has ended: {reason}")
    return result


def load_state(folder: Path) -> dict[str, Any]:
    """The state of training besides the model, on the CPU. Runs no code from the file."""
    path = folder / TRAINING_STATE
    try:
        return dict(torch.load(path, weights_only=True, map_location="cpu"))
    except Exception as error:  # a broken byte may raise nearly any, from IndexError to UnicodeDecodeError
        raise ValueError(
            f"{path} is broken, or was not written by this program: {_reason(error)}. Pass another checkpoint."
        ) from error


class Checkpoints:
    """The folders `checkpoint-STEP` in `output_dir`, of which `rotate` keeps `save_total_limit` (`None`: all)."""

    def __init__(self, output_dir: Path, save_total_limit: int | None):
        self.output_dir, self.save_total_limit = output_dir, save_total_limit

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Lets `write` fill an empty folder, and renames it to `checkpoint-STEP` when all of it is on the disk."""
        checkpoint = self._path(step)
        with self._unfinished(checkpoint) as folder:
            write(folder)
            sync(folder)
            folder.rename(checkpoint)
            sync_folder(self.output_dir)
        return checkpoint

    def all(self) -> list[Path]:
        """Complete checkpoints by step."""
        found = [path for path in self.output_dir.glob("*") if re.fullmatch(r"checkpoint-\d+", path.name)]
        return sorted(filter(Path.is_dir, found), key=step_of)

    def last(self) -> Path | None:
        return next(reversed(self.all()), None)

    def find(self, step: int) -> Path | None:
        path = self._path(step)
        return path if path in self.all() else None

    def _path(self, step: int) -> Path:
        return self.output_dir / f"checkpoint-{step}"

    def rotate(self, best_step: int | None = None):
        """Removes the oldest checkpoints beyond the limit, but never the last or the best."""
        checkpoints = self.all()
        excess = max(0, len(checkpoints) - (self.save_total_limit or len(checkpoints)))
        others = [path for path in checkpoints[:-1] if path.name != f"checkpoint-{best_step}"]
        for path in others[:excess]:
            deleted = _hidden(path, "deleted")
            _remove(deleted)
            path.rename(deleted)
            _remove(deleted)

    def to_resume(self, name: str | None) -> Path | None:
        """The checkpoint that `--resume_from_checkpoint` names, and no other run in `output_dir`; else `None`.

        `last` (or `True`) is the checkpoint with the highest step.
        """
        last = self.last()
        others = [path.name for path in self.output_dir.glob("[!.]*") if path.name not in WRITTEN_FIRST]
        if others and (name is None or last is None):
            advice = "Pass a new or an empty folder"
            if last is not None:
                advice += ", or run the command that wrote it with --resume_from_checkpoint last to continue it"
            raise FileExistsError(
                f"--output_dir {self.output_dir} already holds {', '.join(sorted(others)[:10])}. {advice}."
            )
        if name is None:
            return None
        found = last if name.lower() in ("last", "true") else Path(name)
        if found is None or found.name.startswith(".") or not (found / TRAINING_STATE).is_file():
            raise FileNotFoundError(
                f"--resume_from_checkpoint {name}: this is not a complete checkpoint with a {TRAINING_STATE}. "
                f"{self._contents()} Pass a folder checkpoint-STEP, or leave the option out."
            )
        if last is not None and not last.samefile(found):
            raise ValueError(
                f"--resume_from_checkpoint {name}: --output_dir {self.output_dir} already holds {last.name}, and the "
                "two runs would mix. Pass `last`, or another --output_dir."
            )
        return found

    def publish(self, checkpoint: Path):
        """Copies the model of a checkpoint, without its training state, to `output_dir`.

        All copies are on the disk before the first file of an older model is replaced. config.json is replaced last.
        """
        # Like `save_pretrained`: modules that somebody else wrote are not replaced.
        others = () if (self.output_dir / "modules.json").exists() else SENTENCE_TRANSFORMERS_FILES
        sources = [path for pattern in (*others, *MODEL_FILES) for path in sorted(checkpoint.glob(pattern))]
        names = [path.relative_to(checkpoint) for path in sources]
        with self._unfinished(self.output_dir / "model") as folder:
            for name in names:
                for place in (folder, self.output_dir):
                    (place / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(checkpoint / name, folder / name)
            sync(folder)
            for name in names:
                (folder / name).replace(self.output_dir / name)
            for place in {(self.output_dir / name).parent for name in names}:
                sync_folder(place)
        _remove(folder)

    def clean(self):
        """Removes the hidden folders of killed runs."""
        for path in self.output_dir.glob(".*"):
            if re.fullmatch(r"\.(checkpoint-\d+|model)\.(unfinished|deleted)", path.name):
                _remove(path)

    @contextmanager
    def _unfinished(self, target: Path) -> Iterator[Path]:
        """An empty folder for the files of `target`, which is removed after an error."""
        folder = _hidden(target, "unfinished")
        try:
            _remove(folder)
            folder.mkdir(parents=True)
            yield folder
        except BaseException as error:
            self.clean()
            if isinstance(error, (OSError, RuntimeError, SafetensorError)):  # torch and safetensors, for a full disk
                raise OSError(f"{target} cannot be written: {_reason(error)}. {self._contents()}") from error
            raise

    def _contents(self) -> str:
        names = ", ".join(path.name for path in self.all())
        return f"{self.output_dir} holds {f'the complete checkpoints {names}' if names else 'no checkpoints'}."


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _hidden(path: Path, kind: str) -> Path:
    """A hidden name in the same folder, because renaming is atomic only within a file system."""
    return path.with_name(f".{path.name}.{kind}")


def _remove(folder: Path):
    """Files that cannot be removed now, such as open files on a network file system, are left to the next `clean`."""
    shutil.rmtree(folder, ignore_errors=True)


def _reason(error: Exception) -> str:
    """The first sentence of an error. torch adds advice, for example to run code from the file."""
    text = str(error).split("WeightsUnpickler error: ")[-1].strip()
    return f"{type(error).__name__}: " + re.split(r"(?<=\w)\.\s|\n", text)[0].rstrip(".")
