"""A saved head on labeled files: its task and settings as they were saved, and its predictions, a part at a time."""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from datasets import DatasetDict
from transformers.utils import cached_file, logging

from modeling_elmo import ELMoConfig, ELMoTokenizer

from ..program.files import read_json
from ..program.models import check_model, load_pretrained
from .data import DataArguments, take_samples
from .task import Record, SavedHead, SplitOutput, Task
from .tasks import TASKS, task_class
from .trainer import TaskTrainer, TaskTrainingArguments

# Arguments of tasks that say nothing about a file. `Task.saved_arguments` has those that the model knows.
ARGUMENTS_OF_TRAINING = ("max_length", "max_sentences", "problem", "classifier", "train_singletons")
EXAMPLES_AT_ONCE = 1024  # whose outputs are in memory: whole batches of all usual sizes, as in an evaluation at once


def saved_head(name: str) -> SavedHead:
    """The configuration and the record of a trained head."""
    check_model(name)
    config = load_pretrained(ELMoConfig, name)
    path = cached_file(name, "record.json", _raise_exceptions_for_missing_entries=False)
    return SavedHead(name, config, {} if path is None else read_json(Path(path)))


def task_name(saved: SavedHead) -> str:
    """The name of the head's task, as the `elmo` command has it."""
    [architecture] = saved.config.architectures or ["ELMoModel"]
    for name in TASKS:
        if task_class(name).model_class.__name__ == architecture:
            return name
    programs = ", ".join(f"elmo {name}" for name in TASKS)
    raise ValueError(f"{saved.name} is {architecture}, which has no labels; pass a model of {programs}.")


def file_arguments(task_type: type[Task]) -> type:
    """A group of options: those of the task that say how a file is read, and how a model answers."""
    types = get_type_hints(task_type.arguments_class)
    left_out = {*ARGUMENTS_OF_TRAINING, *(item.name for item in fields(DataArguments))}
    items = [item for item in fields(task_type.arguments_class) if item.name not in left_out]
    return make_dataclass("FileArguments", [(item.name, types[item.name], copy(item)) for item in items], kw_only=True)


def saved_settings(saved: SavedHead, arguments_class: type) -> dict[str, Any]:
    """The options of the head's training that are in a group of options."""
    settings = saved.record.get("settings", {})
    return {item.name: settings[item.name] for item in fields(arguments_class) if item.name in settings}


def task_on_files(saved: SavedHead, sources: Mapping[str, Mapping[str, Any]], **options: Any) -> Task:
    """The head's task with labeled data, each source by its name.

    Args:
        sources: the options of a training that name the source as its test split.
    """
    task_type = task_class(task_name(saved))
    data = DatasetDict()
    for file, of_source in sources.items():
        values = {**options, **of_source, **task_type.saved_arguments(saved.config)}
        arguments = task_type.arguments_class(**values)
        try:
            data[file] = task_type.read_data(arguments)["test"]
        except (ValueError, OSError) as error:
            reason = str(error).replace("--test_file ", "")  # an option that this program does not have
            if isinstance(error, ValueError):
                reason += f" {saved.name} needs files with labels, as `elmo {task_name(saved)}` reads them; for text "
                reason += "without labels, use the pipeline on its card."
            raise type(error)(reason) from error
    return task_type(arguments, take_samples(data, arguments), saved)  # whose unknown labels are counted


def head_trainer(task: Task, name: str, training: TaskTrainingArguments, preprocess_logits: Any = None) -> TaskTrainer:
    """A Trainer that predicts with a saved head."""
    model = load_pretrained(task.model_class, name, dtype=torch.float32)
    tokenizer = load_pretrained(ELMoTokenizer, name)
    return TaskTrainer(
        model,
        training.for_trainer(task.metric, has_validation=False),
        data_collator=task.feature_collator(tokenizer, None),
        processing_class=tokenizer,
        preprocess_logits_for_metrics=preprocess_logits,
    )


def predicted_records(task: Task, trainer: TaskTrainer) -> Iterator[tuple[str, Record]]:
    """The predictions for all examples, each with its file. The outputs of a part are in memory at once."""
    encoded = task.encode_splits(trainer.processing_class)
    number = sum(map(len, task.data.values()))
    with logging.tqdm(total=number, desc="Predicting", unit="example") as progress:
        for file, examples in task.data.items():
            numbers = np.asarray(encoded[file]["example_number"])
            for first in range(0, len(examples), EXAMPLES_AT_ONCE):
                of_part = range(first, min(first + EXAMPLES_AT_ONCE, len(examples)))
                rows = encoded[file].select(range(*np.searchsorted(numbers, [of_part.start, of_part.stop]).tolist()))
                predicted = trainer.predict(rows)
                output = SplitOutput(predicted.predictions, predicted.label_ids, examples.select(of_part), rows)
                for record in task.predictions(output):
                    yield file, record
                progress.update(len(of_part))
