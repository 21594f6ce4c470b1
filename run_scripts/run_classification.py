"""Trains a classifier of texts, or of pairs of texts, on an ELMo model: sentiment, entailment, similarity.

    python -m modeling_elmo.run_scripts.run_classification --model_name_or_path elmo \
        --train_file train.jsonl --validation_file dev.jsonl --test_file test.jsonl --output_dir classifier

`--classifier bcn` (default) takes one text or two, `--classifier esim` two (paper section 4). `--compare_baseline`
trains the same network without ELMo too; `--seeds 5` tells mean and deviation; `--ablation` gives the paper's tables.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from datasets import DatasetDict
from transformers import DataCollatorWithPadding

from modeling_elmo import ELMoForSequenceClassification
from modeling_elmo.run_scripts.fine_tuning.data import (
    ClassificationDataArguments,
    label_names,
    read_classification,
    take_samples,
)
from modeling_elmo.run_scripts.fine_tuning.experiments import ExperimentArguments, TaskTrainingArguments, fine_tune
from modeling_elmo.run_scripts.fine_tuning.metrics import classification_scores, multilabel_scores, regression_scores
from modeling_elmo.run_scripts.fine_tuning.task import (
    HeadArguments,
    Predicted,
    Record,
    Task,
    log_mean_probabilities,
    source_of,
)
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run


@dataclass(kw_only=True)
class ClassifierArguments:
    classifier: Literal["bcn", "esim", "linear"] = field(
        default="bcn", metadata={"help": "The network: biattentive, ESIM for pairs, or a linear layer."}
    )


def main(arguments: list[str] | None = None) -> list[Record]:
    parser = ProgramParser(
        HeadArguments,
        ClassifierArguments,
        ClassificationDataArguments,
        ExperimentArguments,
        TaskTrainingArguments,
        description=__doc__,
    )
    head, classifier, data, experiment, training = parser.parse(arguments)
    task = classification_task(data, head.max_length)
    task.config = task.config | vars(classifier)
    task.settings = task.settings | vars(classifier)
    return fine_tune(task, head, experiment, training)


def classification_task(arguments: ClassificationDataArguments, max_length: int | None = None) -> Task:
    data = read_classification(arguments)
    columns = [name for name in ("text", "text_pair") if name in next(iter(data.values())).column_names]
    problem: Problem = Regression(data) if arguments.problem == "regression" else problem_of_labels(data)

    def encode(batch, tokenizer, is_training):
        limits = {"truncation": True, "max_length": max_length} if is_training and max_length is not None else {}
        encoding = tokenizer(*(batch[name] for name in columns), **limits)
        return {**encoding, "labels": [problem.number(label) for label in batch["label"]]}

    def words(split, tokenizer) -> Iterable[list[str]]:
        return (tokenizer.splitter.words(text) for name in columns for text in split[name])

    def predictions(found: Predicted) -> Iterable[Record]:
        for example, row in zip(found.examples, found.logits, strict=True):
            yield {**example, "predicted": problem.shown(row)}

    return Task(
        name="classification",
        model_class=ELMoForSequenceClassification,
        metric=problem.metric,
        data=take_samples(data, arguments),
        source=source_of(arguments),
        settings=vars(arguments),
        config=problem.config,
        elmo_placement="input",
        scalar_mix_l2=0.001,
        words=words,
        encode=encode,
        collator=DataCollatorWithPadding,
        scores=lambda found: problem.scores(found.logits, found.labels),
        predictions=predictions,
        average=problem.average,
    )


class Problem(Protocol):
    """What a label is: a head's configuration, and the way from a raw label to its target and back from logits.

    Attributes:
        metric: the score that chooses the best checkpoint.
        config: fields of the head's configuration.
    """

    metric: str
    config: dict[str, Any]

    def number(self, label: Any) -> Any:
        """The target of a raw label."""

    def scores(self, logits: np.ndarray, gold: np.ndarray) -> dict[str, Any]:
        """Figures of all texts."""

    def shown(self, logits: np.ndarray) -> Any:
        """The raw label that is predicted for one text."""

    def average(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        """What several models together put out."""


def problem_of_labels(data: DatasetDict) -> Problem:
    labels = label_names(data, "label")
    is_multilabel = isinstance(data["train"][0]["label"], list)
    return MultiLabel(labels) if is_multilabel else SingleLabel(labels)


class SingleLabel:
    metric = "accuracy"
    problem_type = "single_label_classification"

    def __init__(self, labels: list[str]):
        self.labels, self.numbers = labels, {label: number for number, label in enumerate(labels)}
        self.config = {
            "num_labels": len(labels),
            "id2label": dict(enumerate(labels)),
            "label2id": self.numbers,
            "problem_type": self.problem_type,
        }

    def number(self, label: str) -> Any:
        return self.numbers[label]

    def scores(self, logits: np.ndarray, gold: np.ndarray) -> dict[str, Any]:
        return classification_scores(logits.argmax(-1).tolist(), gold.tolist(), self.labels)

    def shown(self, logits: np.ndarray) -> Any:
        return self.labels[int(logits.argmax())]

    def average(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        return log_mean_probabilities(logits)


class MultiLabel(SingleLabel):
    """Any number of labels a text: those whose probability is above a half."""

    metric = "micro_f1"
    problem_type = "multi_label_classification"

    def number(self, label: Collection[str]) -> list[float]:
        return [float(name in label) for name in self.labels]

    def scores(self, logits: np.ndarray, gold: np.ndarray) -> dict[str, Any]:
        return multilabel_scores(logits > 0, gold > 0.5, self.labels)

    def shown(self, logits: np.ndarray) -> list[str]:
        return [label for label, logit in zip(self.labels, logits, strict=True) if logit > 0]

    def average(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        pairs = [np.stack([np.zeros_like(each), each], -1) for each in logits]  # a sigmoid is a softmax with a 0
        log_probs = log_mean_probabilities(pairs)
        return log_probs[..., 1] - log_probs[..., 0]


class Regression:
    metric = "pearson"
    config = {"num_labels": 1, "problem_type": "regression"}

    def __init__(self, data: DatasetDict):
        for split, rows in data.items():
            if split != "train" and len(rows) > 1 and len({*rows["label"]}) == 1:
                raise ValueError(
                    f"Each label of {split!r} is {rows[0]['label']}: they seem to be hidden. Pass other data, or "
                    f"--{split}_split none."
                )

    def number(self, label: float) -> float:
        return label

    def scores(self, logits: np.ndarray, gold: np.ndarray) -> dict[str, Any]:
        return regression_scores(logits[:, 0].tolist(), gold.tolist())

    def shown(self, logits: np.ndarray) -> float:
        return float(logits[0])

    def average(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        return np.mean(logits, axis=0)


if __name__ == "__main__":
    run(main)
