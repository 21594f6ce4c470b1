"""Evaluates a trained head on files with labels, and shows its errors.

    elmo evaluate tagger new.conll
    elmo evaluate tagger --dataset NAME
    elmo evaluate tagger --help

The last command also lists the options for the files of the model's task. Labels and settings come from the model, so
the scores are what its training would print for the file; no training data is needed.

The output folder has all scores and errors in `evaluation.json`, the model's answers in `predictions.jsonl`, and a page
to read in a browser, `evaluation.html`, which loads nothing from elsewhere.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from modeling_elmo.conversion.files import check_empty, staged
from modeling_elmo.run_scripts.cards.evaluation_page import write_evaluation_page
from modeling_elmo.run_scripts.cards.records import last_metrics, splits_of
from modeling_elmo.run_scripts.cards.tables import (
    average_rates,
    class_table,
    error_lines,
    file_table,
    finding,
    format_score,
    spaced,
)
from modeling_elmo.run_scripts.fine_tuning.comparison import Errors
from modeling_elmo.run_scripts.fine_tuning.saved_head import (
    file_arguments,
    head_trainer,
    predicted_records,
    saved_head,
    saved_settings,
    task_name,
    task_on_files,
)
from modeling_elmo.run_scripts.fine_tuning.task import Record, SavedHead, Task
from modeling_elmo.run_scripts.fine_tuning.tasks import task_class
from modeling_elmo.run_scripts.fine_tuning.trainer import TaskTrainer
from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, print_conclusion, refuse_unread, run
from modeling_elmo.run_scripts.program.data_files import refuse_other_spellings
from modeling_elmo.run_scripts.program.files import JsonObject, write_json, write_lines
from modeling_elmo.run_scripts.program.processes import check_processes, has_accelerator

SHOWN_ERRORS = 10  # kinds of errors that are printed


@dataclass(kw_only=True)
class EvaluationArguments:
    output_dir: str = option("evaluation", "New or empty folder for scores, predictions and errors.")
    max_eval_samples: int | None = option(None, "Maximum number of samples of each file; the first are used.")
    per_device_eval_batch_size: int | None = option(None, "Rows in a batch. Default: 64; of documents, 1.")
    use_cpu: bool = option(False, "Use the CPU where there is an accelerator.")


@dataclass(kw_only=True)
class LabeledDatasetArguments:
    dataset: str | None = option(None, "Data set to use instead of files: a folder, or a name on the Hub.")
    dataset_config: str | None = option(None, "Configuration of the data set.")
    test_split: str = option("test", "Split of the data set, or a part: 'validation[:90%%]'.")

    def sources(self, files: list[str]) -> dict[str, JsonObject]:
        """The options of a training that read each file, or the split of the data set, as test data."""
        if bool(files) == (self.dataset is not None):
            raise ValueError("Pass either files with labels, or --dataset NAME.")
        if self.dataset is None:
            refuse_unread(self, ("dataset_config", "test_split"), "without --dataset; leave it out.")
            refuse_other_spellings(files)
            return {file: {"test_file": file} for file in files}
        others = {"train_split": "none", "validation_split": "none"}
        return {f"{self.dataset}, {self.test_split}": {**vars(self), **others}}


def main(arguments: list[str] | None = None) -> JsonObject:
    """Returns the content of `evaluation.json`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    saved = saved_head(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    groups: list[type] = [EvaluationArguments, LabeledDatasetArguments]
    if saved is not None:
        groups.append(file_arguments(task_class(task_name(saved))))
    parser = ProgramParser(*groups, description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="Folder or Hub name of a trained head.")
    has_dataset = any(word.partition("=")[0] == "--dataset" for word in arguments)
    number = "*" if has_dataset else "+"  # argparse takes none for * if options are before the files
    parser.add_argument("files", metavar="FILE", nargs=number, help="Files with labels, as for the training.")
    if saved is None:
        parser.parse(arguments)
        raise ValueError(f"{arguments[0]} is an option before the model; write elmo evaluate MODEL FILE, then options.")
    parser.set_defaults(**saved_settings(saved, groups[-1]))
    options, dataset, of_files, positional = parser.parse(arguments)
    folder = Path(options.output_dir)
    try:
        check_empty(folder)
    except FileExistsError as error:
        raise FileExistsError(f"{folder} is not empty; pass --output_dir with a new or an empty folder.") from error
    check_processes(1)
    sources = dataset.sources(positional.files)
    task = task_on_files(saved, sources, max_eval_samples=options.max_eval_samples, **vars(of_files))
    with staged(folder) as unfinished:
        unfinished.mkdir()
        trainer = trainer_of(task, saved, options, unfinished)
        evaluation = evaluate_head(task, trainer, saved, unfinished)
    print(f"\n{file_table(evaluation)}")
    if classes := class_table(evaluation["metrics"]):
        print(f"\nClasses, in percent:\n\n{classes}")
    if errors := error_lines(evaluation["errors"], SHOWN_ERRORS):
        print("\nMost frequent errors:\n", *errors, sep="\n")
    print(f"\n{folder}: evaluation.json and predictions.jsonl. Open {folder / 'evaluation.html'} to read the errors.")
    place = next(iter(sources)) if len(sources) == 1 else f"{len(sources)} files"
    print_conclusion(
        finding(evaluation["metrics"], task.metric, place) + score_of_training(saved, task.metric),
        *("elmo", task_name(saved), "--model_name_or_path", saved.name, "--continue_head"),
        *("--train_file", "TRAIN", "--validation_file", "DEV", "--output_dir", "NEW_MODEL"),
    )
    return evaluation


def score_of_training(saved: SavedHead, metric: str) -> str:
    """A sentence with the score that the head had on the last split of its training; empty if no record says it."""
    if not any(saved.record.get("metrics", {}).values()):
        return ""
    split = splits_of([saved.record])[-1]
    score = last_metrics(saved.record).get(metric)
    return (
        "" if score is None else f" After its training, {spaced(metric)} on {split} was {format_score(score, metric)}."
    )


def trainer_of(task: Task, saved: SavedHead, options: EvaluationArguments, folder: Path) -> TaskTrainer:
    """A Trainer with the precision of the training, on which scores depend."""
    settings = saved.record.get("settings", {})
    training = {"bf16": settings.get("bf16", False), "fp16": settings.get("fp16", False) and has_accelerator()}
    if options.per_device_eval_batch_size is not None:
        training["per_device_eval_batch_size"] = options.per_device_eval_batch_size
    arguments = task.training_arguments_class(
        output_dir=str(folder), use_cpu=options.use_cpu, disable_tqdm=True, **training
    )
    return head_trainer(task, saved.name, arguments, task.preprocess_logits)


def evaluate_head(task: Task, trainer: TaskTrainer, saved: SavedHead, folder: Path) -> JsonObject:
    """Writes predictions, scores and errors. Predictions are read again from their file, which may be large."""
    path = folder / "predictions.jsonl"
    lines = (
        json.dumps({"file": file, **record}, ensure_ascii=False) for file, record in predicted_records(task, trainer)
    )
    write_lines(path, lines)
    files: dict[str, JsonObject] = {}
    for file, records in groupby(predictions_in(path), key=lambda record: record["file"]):
        files[file] = {"samples": len(task.data[file]), "metrics": task.scores(records)}
    [metrics, *others] = [scores["metrics"] for scores in files.values()]
    if others:
        metrics = task.scores(predictions_in(path))
    evaluation = {
        "model": saved.name,
        "task": task.name,
        "metric": task.metric,
        "metrics": metrics,
        "averages": average_rates(metrics),
        "files": files,
        "unknown_labels": task.unknown_labels,
        "errors": count_all_errors(task, path),
    }
    write_json(folder / "evaluation.json", evaluation)
    write_evaluation_page(folder / "evaluation.html", evaluation)
    return evaluation


def predictions_in(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def count_all_errors(task: Task, path: Path) -> JsonObject:
    errors = Errors()
    records = predictions_in(path)
    for file, examples in task.data.items():
        for number, example in enumerate(examples, 1):
            errors.add({"file": file, "number": number}, task.compare(example, next(records)))
    return errors.report()


if __name__ == "__main__":
    run(main)
