"""Classification of texts and of pairs of texts: one label, several labels, or a number."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import DataCollatorWithPadding

from modeling_elmo import ELMoForSequenceClassification, ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.data import ClassificationArguments, label_names, read_classification
from modeling_elmo.run_scripts.fine_tuning.metrics import classification_scores, multilabel_scores, regression_scores
from modeling_elmo.run_scripts.fine_tuning.task import (
    Batch,
    Record,
    SplitOutput,
    Task,
    label_config,
    log_mean_odds,
    log_mean_probabilities,
)
from modeling_elmo.run_scripts.fine_tuning.trainer import TaskTrainingArguments


@dataclass
class ClassificationTrainingArguments(TaskTrainingArguments):
    """Trainer's arguments, with the learning rate of ESIM (Chen et al. 2017)."""

    _argument_group_name = "training options"

    learning_rate: float = 4e-4  # at 1e-3, a BCN of the paper's size may not leave the accuracy of chance


class Classification(Task):
    """The paper's sentiment and entailment (section 4), and other labels of texts."""

    name = "classification"
    model_class = ELMoForSequenceClassification
    arguments_class = ClassificationArguments
    training_arguments_class = ClassificationTrainingArguments

    def read_data(self) -> DatasetDict:
        return read_classification(self.arguments)

    def prepare(self, data: DatasetDict):
        columns = next(iter(data.values())).column_names
        self.text_columns = [name for name in ("text", "text_pair") if name in columns]
        if self.arguments.classifier == "esim" and len(self.text_columns) < 2:
            raise ValueError(
                "--classifier esim compares two texts, but each example has one; pass --text_pair_column, or "
                "--classifier bcn."
            )
        self.label_type = label_type(data, self.arguments.problem)
        self.metric = self.label_type.metric
        self.config = {**self.label_type.config, "classifier": self.arguments.classifier}

    def words(self, split: Dataset, tokenizer: ELMoTokenizer) -> Iterable[list[str]]:
        return (tokenizer.splitter.words(text) for name in self.text_columns for text in split[name])

    def encode(self, batch: Batch, tokenizer: ELMoTokenizer, is_training: bool) -> Batch:
        most = self.arguments.max_length if is_training else None
        encoding = tokenizer(*(batch[name] for name in self.text_columns), truncation=most is not None, max_length=most)
        return {**encoding, "labels": [self.label_type.target(label) for label in batch["label"]]}

    def collator(self, tokenizer: ELMoTokenizer) -> DataCollatorWithPadding:
        return DataCollatorWithPadding(tokenizer)

    def scores(self, output: SplitOutput) -> dict[str, Any]:
        return self.label_type.evaluate(output.logits, output.labels)

    def predictions(self, output: SplitOutput) -> Iterable[Record]:
        for example, logits in zip(output.examples, output.logits, strict=True):
            yield {**example, "predicted": self.label_type.label(logits)}

    def average(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        return self.label_type.average(logits)


def label_type(data: DatasetDict, problem: str) -> "SingleLabel | Regression":
    if problem == "regression":
        return Regression(data)
    labels = label_names(data, "label")
    return MultiLabel(labels) if isinstance(data["train"][0]["label"], list) else SingleLabel(labels)


class SingleLabel:
    """One label per text: the way from a raw label to a target, and from logits to a raw label and to scores."""

    metric = "accuracy"
    problem_type = "single_label_classification"
    average = staticmethod(log_mean_probabilities)

    def __init__(self, labels: list[str]):
        self.labels = labels
        self.config = {**label_config(labels), "problem_type": self.problem_type}

    def target(self, label: Any) -> Any:
        return self.config["label2id"][label]

    def label(self, logits: np.ndarray) -> Any:
        return self.labels[int(logits.argmax())]

    def evaluate(self, logits: np.ndarray, gold: np.ndarray) -> dict[str, Any]:
        return classification_scores(logits.argmax(-1).tolist(), gold.tolist(), self.labels)


class MultiLabel(SingleLabel):
    """Any number of labels per text: all whose probability is above one half."""

    metric = "micro_f1"
    problem_type = "multi_label_classification"
    average = staticmethod(log_mean_odds)

    def target(self, label: Collection[str]) -> list[float]:
        return [float(name in label) for name in self.labels]

    def label(self, logits: np.ndarray) -> list[str]:
        return [label for label, logit in zip(self.labels, logits, strict=True) if logit > 0]

    def evaluate(self, logits: np.ndarray, gold: np.ndarray) -> dict[str, Any]:
        return multilabel_scores(logits > 0, gold > 0.5, self.labels)


class Regression:
    """A number per text."""

    metric = "pearson"
    config = {"num_labels": 1, "problem_type": "regression"}

    def __init__(self, data: DatasetDict):
        for split, rows in data.items():
            if split != "train" and len(rows) > 1 and len({*rows["label"]}) == 1:
                raise ValueError(
                    f"Split {split!r} has the label {rows[0]['label']} in every row, so its labels seem to be hidden. "
                    f"Pass other data, or --{split}_split none."
                )

    def target(self, label: float) -> float:
        return label

    def label(self, logits: np.ndarray) -> float:
        return float(logits[0])

    def evaluate(self, logits: np.ndarray, gold: np.ndarray) -> dict[str, Any]:
        return regression_scores(logits[:, 0].tolist(), gold.tolist())

    def average(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        return np.mean(logits, axis=0)
