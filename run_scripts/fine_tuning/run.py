"""One fine-tuning run: how it begins, and the predictions, record and card that it leaves in its folder."""

import json
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers.utils import CONFIG_NAME, logging

from ..cards.card import CardArguments, hub_name, without_folders, write_card_facts
from ..cards.head_card import write_head_card
from ..cards.publishing import push
from ..cards.records import BASELINE_NAME, RunRecord
from ..program.files import digest, read_json, write_json, write_lines
from ..program.models import model_digest
from .head import HeadArguments, resolved_options
from .task import Record, SplitOutput, Task
from .trainer import TaskTrainer, TaskTrainingArguments, checkpoints_in, last_checkpoint

logger = logging.get_logger(__name__)

RUN_SETTINGS = "run_settings.json"
LENGTH_OPTIONS = ("num_train_epochs", "max_steps")  # which may change when a run is resumed


def begin_run(task: Task, head: HeadArguments, training: TaskTrainingArguments, settings: dict[str, Any]):
    """Checks the data and the output folder, and writes the settings, which a resumed run must have again."""
    task.check_splits()
    folder = Path(training.output_dir)
    if (folder / "settings.json").exists():
        raise FileExistsError(f"{folder} holds an experiment of `elmo reproduce`; pass another --output_dir.")
    settings = without_folders(settings) | {
        "data_digest": data_digest(task),
        "model_digest": model_digest(head.model_name_or_path, is_baseline=not head.use_elmo),
    }
    checkpoint = training.checkpoint()
    continues_here = checkpoint is not None and Path(checkpoint).resolve().parent == folder.resolve()
    if holds_model(folder) and not continues_here:
        advice = ", or run its command with --resume_from_checkpoint last" if last_checkpoint(folder) else ""
        raise FileExistsError(f"{folder} holds a model of another run; pass another --output_dir{advice}.")
    if checkpoint is not None:
        has_finished = continues_here and (folder / "record.json").is_file()
        _check_resumed(Path(checkpoint), settings, training, has_finished)
    if training.process_index == 0:
        write_json(folder / RUN_SETTINGS, settings)


def _check_resumed(checkpoint: Path, settings: dict[str, Any], training: TaskTrainingArguments, has_finished: bool):
    """Refuses a checkpoint of other settings, or one that leaves nothing to train."""
    path = checkpoint.parent / RUN_SETTINGS
    begun_with = read_json(path) if path.is_file() else None
    if has_finished and begun_with is not None and not different_settings(begun_with, settings):
        raise FileExistsError(
            f"{Path(training.output_dir)} holds a finished run of this command, of which {checkpoint} is left. To "
            "continue, pass a larger --num_train_epochs or --max_steps; to train again, another --output_dir."
        )
    step = read_json(checkpoint / "trainer_state.json")["global_step"]
    if 0 < training.max_steps <= step:
        raise ValueError(
            f"--max_steps {training.max_steps}: {checkpoint} has step {step}, so nothing is left to train. "
            "Pass a larger number."
        )
    if begun_with is not None and (changes := different_settings(begun_with, settings, LENGTH_OPTIONS)):
        raise ValueError(
            f"--resume_from_checkpoint {training.resume_from_checkpoint}: the run was started with other settings: "
            f"{changes}. Repeat its options, or start again in another --output_dir."
        )


def holds_model(folder: Path) -> bool:
    """Whether a folder has a finished model or the checkpoints of a run, also of another program."""
    has_files = (folder / "record.json").exists() or (folder / CONFIG_NAME).exists()
    return has_files or bool(checkpoints_in(folder))


def run_settings(task: Task, head: HeadArguments, training: TaskTrainingArguments) -> dict[str, Any]:
    """All options that the scores of a run depend on."""
    return {
        "max_length": None,  # a key of all records, though questions are read in windows instead
        **resolved_options(task, head),
        **vars(task.arguments),
        **training.recorded(),
        "early_stopping_patience": None,
        "world_size": training.world_size,
        "seed": training.seed,
    }


def different_settings(before: dict[str, Any], now: dict[str, Any], may_change: Iterable[str] = ()) -> str:
    """The settings that have changed, as text: `name 1, now 2`. Empty if none does."""
    changes = []
    for name in sorted({*before, *now} - {*may_change}):
        first = before.get(name)
        second = now.get(name)
        if first != second:
            changes.append(f"{name} {first!r}, now {second!r}")
    return ", ".join(changes)


def data_digest(task: Task) -> str:
    rows = chain.from_iterable(task.data.values())
    return digest(json.dumps(row).encode() for row in rows)


def run_record(
    trainer: TaskTrainer, task: Task, splits: dict[str, Dataset], settings: dict[str, Any], start: float | None
) -> RunRecord:
    """The record of a trained model, with the scores of each split, whose predictions are written to files.

    `start` is None for a resumed run, whose time is unknown and left out.
    """
    outputs = split_outputs(trainer, task, splits)
    path = Path(trainer.args.output_dir, "predictions")
    predictions = write_predictions(task, outputs, path, trainer.is_world_process_zero())
    scores = {split: task.scores(of_split) for split, of_split in predictions.items()}
    warn_of_failures(trainer, task, predictions, scores)
    score = f"eval_{task.metric}"  # on the validation split
    record = {
        "task": task.name,
        "arm": "elmo" if trainer.model.config.use_elmo else BASELINE_NAME,
        "seed": settings["seed"],
        "metric": task.metric,
        "metrics": scores,
        "layer_weights": {place: mix.layer_weights().tolist() for place, mix in trainer.model.mixes().items()},
        "data": without_folders(task.source),
        "columns": task.data["train"].column_names,
        "train_samples": len(task.data["train"]),
        "epochs": trainer.state.epoch,
        "curve": [[entry["epoch"], entry[score]] for entry in trainer.state.log_history if score in entry],
        "settings": without_folders(settings),
        "base_model": hub_name(settings["model_name_or_path"]),
        "dataset": hub_name(task.source.get("dataset")),
    }
    if start is not None:
        record["seconds"] = time.monotonic() - start
    return record


def split_outputs(trainer: TaskTrainer, task: Task, splits: dict[str, Dataset]) -> dict[str, SplitOutput]:
    """The outputs of a model for every split but the training data."""
    trainer.compute_metrics = None  # it scores only the validation split
    outputs = {}
    for split, encodings in splits.items():
        if split != "train":
            predicted = trainer.predict(encodings, metric_key_prefix=split)
            outputs[split] = SplitOutput(predicted.predictions, predicted.label_ids, task.data[split], encodings)
    return outputs


def write_predictions(
    task: Task, outputs: dict[str, SplitOutput], path: Path, is_main: bool
) -> dict[str, list[Record]]:
    """The predictions for each split, which the main process writes to `{path}_{split}.jsonl`."""
    predictions = {split: list(task.predictions(output)) for split, output in outputs.items()}
    if is_main:
        for split, records in predictions.items():
            lines = (json.dumps(record, ensure_ascii=False) for record in records)
            write_lines(path.with_name(f"{path.name}_{split}.jsonl"), lines)
    return predictions


def warn_of_failures(
    trainer: TaskTrainer, task: Task, predictions: dict[str, list[Record]], scores: dict[str, dict[str, Any]]
):
    if not trainer.is_world_process_zero():
        return
    cause = trainer.args.likely_cause(trainer.state.global_step)
    for split, records in predictions.items():
        if failure := task.failure(records, scores[split]):
            logger.warning(f"{trainer.args.output_dir}, split {split!r}: {failure}. Likely cause: {cause}.")


def write_run(folder: Path, record: RunRecord, card: CardArguments, training: TaskTrainingArguments):
    """Writes the model card, with the facts from the options, and last the record: a folder that holds it is whole."""
    write_card_facts(folder, card)
    write_head_card(folder, repository_name(training).split("/")[-1], record)
    write_json(folder / "record.json", record)


def repository_name(training: TaskTrainingArguments) -> str:
    return training.hub_model_id or Path(training.output_dir).resolve().name


def push_model(folder: Path, task: Task, training: TaskTrainingArguments):
    message = f"Fine-tuned: {task.name}"
    push(folder, repository_name(training), message, training.hub_private_repo, training.hub_token)
