"""Ensembles: the mean of the probabilities of several trained models."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.cards.card import without_folders
from modeling_elmo.run_scripts.experiments.reports import split_outputs, write_predictions
from modeling_elmo.run_scripts.fine_tuning.task import Record, SplitOutput, Task
from modeling_elmo.run_scripts.fine_tuning.trainer import TaskTrainer, TaskTrainingArguments
from modeling_elmo.run_scripts.program.files import check_model, load_pretrained

# Columns of encodings that tell which words a row holds.
TOKENIZATION_COLUMNS = ("example_number", "offset_mapping")


def ensemble_record(task: Task, folders: Sequence[str], training: TaskTrainingArguments) -> Record:
    """The record of an ensemble. Writes its predictions to `results/`."""
    paths = [os.path.realpath(folder) for folder in folders]
    for number, (folder, path) in enumerate(zip(folders, paths, strict=True)):
        if path in paths[:number]:
            raise ValueError(f"--ensemble: {folders[paths.index(path)]} and {folder} are the same model; pass it once.")
    members = [member_outputs(task, folder, training) for folder in folders]
    scores = {}
    for split in members[0]:
        output = average_outputs(task, [member[split] for member in members], folders)
        scores[split] = task.scores(output)
        if training.process_index == 0:
            write_predictions(Path(training.output_dir, "results", f"ensemble_{split}.jsonl"), task, output)
    return {
        "task": task.name,
        "arm": f"ensemble of {len(folders)}",
        "seed": 0,
        "metric": task.metric,
        "metrics": scores,
        "layer_weights": {},
        "settings": {"ensemble": without_folders(list(folders))},
    }


def member_outputs(task: Task, folder: str, training: TaskTrainingArguments) -> dict[str, SplitOutput]:
    """The outputs of one model for each split except the training data."""
    check_model(folder)
    model = load_pretrained(task.model_class, folder, dtype=torch.float32)
    labels = task.config.get("label2id", model.config.label2id)
    if model.config.label2id != labels or model.num_labels != len(labels):
        raise ValueError(
            f"--ensemble {folder} has the labels {sorted(model.config.label2id)}, but the data has {sorted(labels)}; "
            "pass models that were trained for these labels."
        )
    tokenizer = load_pretrained(ELMoTokenizer, folder)
    arguments = training.for_trainer(task.metric, has_validation=False)
    trainer = TaskTrainer(model, arguments, task.collator(tokenizer))
    splits = task.encode_splits(tokenizer, [name for name in task.data if name != "train"])
    return split_outputs(trainer, task, splits)


def average_outputs(task: Task, members: Sequence[SplitOutput], folders: Sequence[str]) -> SplitOutput:
    first = members[0]
    columns = [name for name in TOKENIZATION_COLUMNS if name in first.rows.column_names]
    for folder, member in zip(folders, members, strict=True):
        if any(list(member.rows[name]) != list(first.rows[name]) for name in columns):
            raise ValueError(
                f"--ensemble {folder} tokenizes differently from {folders[0]}; pass models with one tokenization."
            )
    return first._replace(logits=task.average([member.logits for member in members]))
