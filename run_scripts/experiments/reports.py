"""The files that runs and experiments leave in their folders: predictions, records, cards, tables and figures.

The file of an experiment, `records.jsonl`, has a line for each finished model, or one with the answer of a program. If
a plan runs the experiment, the first line says what it was begun with: `{"planned": {...}}`.
"""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers.utils import CONFIG_NAME, logging

from ..cards.card import CardArguments, hub_name, without_folders, write_card_facts
from ..cards.figures import draw_ablation, draw_confusion, draw_data_curve, draw_layer_weights
from ..cards.head_card import write_head_card
from ..cards.publishing import push
from ..cards.tables import BASELINE_NAME, RunRecord, best_record, score_table, splits_of, summary_table, write_results
from ..fine_tuning.head import HeadArguments, resolved_options
from ..fine_tuning.task import Record, SplitOutput, Task
from ..fine_tuning.trainer import TaskTrainer, TaskTrainingArguments, checkpoints_in, last_checkpoint
from ..program.files import digest, parse_json, read_json, write_json, write_lines
from ..program.models import model_digest

logger = logging.get_logger(__name__)

RECORDS = "records.jsonl"
PLAN_OUTPUT = "output.log"  # of the program of an experiment that a plan runs
RUN_SETTINGS = "run_settings.json"
LENGTH_OPTIONS = ("num_train_epochs", "max_steps")  # which may change when a run is resumed


def begin_run(task: Task, head: HeadArguments, training: TaskTrainingArguments):
    """Checks the data and the output folder, and keeps the settings for the case that the run is resumed."""
    task.check_splits()
    folder = Path(training.output_dir)
    if (folder / "settings.json").exists():
        raise FileExistsError(f"{folder} holds an experiment of `elmo reproduce`; pass another --output_dir.")
    settings = without_folders(run_settings(task, head, training)) | {
        "data_digest": data_digest(task),
        "model_digest": model_digest(head.model_name_or_path, is_baseline=not head.use_elmo),
    }
    checkpoint = training.checkpoint()
    is_own = checkpoint is not None and Path(checkpoint).resolve().parent == folder.resolve()
    if holds_model(folder) and not is_own:
        advice = ", or run its command with --resume_from_checkpoint last" if last_checkpoint(folder) else ""
        raise FileExistsError(f"{folder} holds a model of another run; pass another --output_dir{advice}.")
    if checkpoint is not None:
        path = Path(checkpoint).parent / RUN_SETTINGS
        is_same = path.is_file() and not different_settings(read_json(path), settings, ())
        if is_own and is_same and (folder / "record.json").is_file():
            raise FileExistsError(
                f"{folder} holds a finished run of this command, of which {checkpoint} is left. To go on from there, "
                "pass a larger --num_train_epochs or --max_steps; to train anew, another --output_dir."
            )
        step = read_json(Path(checkpoint, "trainer_state.json"))["global_step"]
        if 0 < training.max_steps <= step:
            raise ValueError(
                f"--max_steps {training.max_steps}: {checkpoint} is of step {step}, so that nothing is left to train. "
                "Pass a larger number."
            )
        if path.is_file() and (changes := different_settings(read_json(path), settings, LENGTH_OPTIONS)):
            raise ValueError(
                f"--resume_from_checkpoint {training.resume_from_checkpoint}: the run was started with other settings: "
                f"{changes}. Repeat its options, or start again in another --output_dir."
            )
    if training.process_index == 0:
        write_json(folder / RUN_SETTINGS, settings)


def holds_model(folder: Path) -> bool:
    """Whether a folder has a finished model or the checkpoints of a run, also of another program."""
    return any((folder / name).exists() for name in ("record.json", CONFIG_NAME)) or bool(checkpoints_in(folder))


def split_outputs(trainer: TaskTrainer, task: Task, splits: dict[str, Dataset]) -> dict[str, SplitOutput]:
    """The outputs of a model for every split but the training data."""
    trainer.compute_metrics = None  # it scores only the validation split
    outputs = {}
    for split, rows in splits.items():
        if split != "train":
            predicted = trainer.predict(rows, metric_key_prefix=split)
            outputs[split] = SplitOutput(predicted.predictions, predicted.label_ids, task.data[split], rows)
    return outputs


def score_outputs(task: Task, outputs: dict[str, SplitOutput], path: Path, is_main: bool) -> dict[str, Any]:
    """The scores of each split. The main process writes the predictions to `{path}_{split}.jsonl`."""
    for split, output in outputs.items():
        if is_main:
            lines = (json.dumps(record, ensure_ascii=False) for record in task.predictions(output))
            write_lines(path.with_name(f"{path.name}_{split}.jsonl"), lines)
    return {split: task.scores(output) for split, output in outputs.items()}


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


def data_digest(task: Task) -> str:
    return digest(json.dumps(row).encode() for rows in task.data.values() for row in rows)


def run_record(
    trainer: TaskTrainer, task: Task, splits: dict[str, Dataset], settings: dict[str, Any], start: float | None
) -> Record:
    """The record of a trained model, with the scores of each split, whose predictions are written to files.

    `start` is None for a resumed run, whose time is unknown and left out.
    """
    outputs, folder = split_outputs(trainer, task, splits), Path(trainer.args.output_dir)
    scores = score_outputs(task, outputs, folder / "predictions", trainer.is_world_process_zero())
    score, log = f"eval_{task.metric}", trainer.state.log_history
    warn_of_failures(trainer, task, outputs, scores)
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
        "curve": [[entry["epoch"], entry[score]] for entry in log if score in entry],  # on the validation split
        "settings": without_folders(settings),
        "base_model": hub_name(settings["model_name_or_path"]),
        "dataset": hub_name(task.source.get("dataset")),
    }
    return record if start is None else record | {"seconds": time.monotonic() - start}


def warn_of_failures(trainer: TaskTrainer, task: Task, outputs: dict[str, SplitOutput], scores: dict[str, Any]):
    cause = trainer.args.likely_cause(trainer.state.global_step)
    for split, output in outputs.items() if trainer.is_world_process_zero() else ():
        if failure := task.failure(output, scores[split]):
            logger.warning(f"{trainer.args.output_dir}, split {split!r}: {failure}. Likely cause: {cause}.")


def write_run(folder: Path, record: Record, card: CardArguments, training: TaskTrainingArguments):
    """Writes the model card, with the facts from the options, and last the record: a folder that holds it is whole."""
    write_card_facts(folder, card)
    write_head_card(folder, repository_name(training).split("/")[-1], record)
    write_json(folder / "record.json", record)


def repository_name(training: TaskTrainingArguments) -> str:
    return training.hub_model_id or Path(training.output_dir).resolve().name


def push_model(folder: Path, task: Task, training: TaskTrainingArguments):
    message = f"Fine-tuned: {task.name}"
    push(folder, repository_name(training), message, training.hub_private_repo, training.hub_token)


def report(records: Sequence[Record], folder: Path, ablation: str | None = None):
    """Prints the tables of all runs, and writes them to `results/` with the records and figures."""
    name, results = write_results(folder, records, ablation), folder / "results"
    print(*filter(None, (summary_table(records), score_table(records))), sep="\n\n")
    if any(record["layer_weights"] for record in records):
        draw_layer_weights(records, results / f"{name}_layer_weights.png")
    if ablation == "data":
        draw_data_curve(records, results / f"{name}.png")
    elif len({record["arm"] for record in records}) > 1:
        draw_ablation(records, results / f"{name}.png")
    best = best_record(records)
    scores = best["metrics"][splits_of([best])[-1]]
    if "confusion" in scores:
        draw_confusion(scores["confusion"], list(scores["per_label"]), results / f"{name}_confusion.png")
    print(f"{results}: {name}.json, {name}.md and figures")


def read_records(folder: Path) -> tuple[dict[str, Any] | None, list[RunRecord]]:
    """What a plan began the experiment with, and its results so far."""
    path = folder / RECORDS
    text = path.read_text(encoding="utf-8").removesuffix("\n") if path.is_file() else None
    texts = [] if text is None else text.split("\n")
    lines = [parse_json(line, f"{path}, line {number}") for number, line in enumerate(texts, 1)]
    planned = lines.pop(0)["planned"] if lines and "planned" in lines[0] else None
    return planned, lines


def write_records(folder: Path, planned: dict[str, Any] | None, results: Iterable[RunRecord]):
    """Replaces the file in one step: a kill leaves the old one or the new one."""
    first = [] if planned is None else [{"planned": planned}]
    write_lines(folder / RECORDS, (json.dumps(line, ensure_ascii=False) for line in [*first, *results]))


def add_records(folder: Path, records: Sequence[RunRecord]):
    """Adds the records of finished models in the order of the run. Those of other arms and seeds stay, after them."""
    planned, before = read_records(folder)
    arms_and_seeds = {(record["arm"], record["seed"]) for record in records}
    after = [*records, *(each for each in before if (each["arm"], each["seed"]) not in arms_and_seeds)]
    if after != before:
        write_records(folder, planned, after)


def results_of(folder: Path) -> Any:
    """What an experiment left: the records of its models, the answer of another program, or `None`."""
    _, results = read_records(folder)
    if not results:
        return None
    return results if "arm" in results[0] else results[0]


def different_settings(found: dict[str, Any], now: dict[str, Any], may_change: Iterable[str] = ()) -> str:
    """The settings that differ from those of now, as text: `name 1, now 2`. Empty if none does."""
    names = sorted({*found, *now} - {*may_change})
    return ", ".join(
        f"{name} {found.get(name)!r}, now {now.get(name)!r}" for name in names if found.get(name) != now.get(name)
    )
