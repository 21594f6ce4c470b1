"""A task: its data, its encoding, its scores and its predictions. One subclass a task."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import BatchEncoding, EvalPrediction

from modeling_elmo import ELMoConfig, ELMoTokenizer

from .comparison import Comparison
from .data import DataArguments, code_states, row_labels, take_samples
from .features import FeatureCollator, FeatureStore
from .trainer import TaskTrainingArguments

LOW_SCORE = 0.01  # of a model that has learned nothing

Record = dict[str, Any]
Batch = dict[str, list]  # columns of a batch of examples


class SplitOutput(NamedTuple):
    """The outputs of a head for a whole split."""

    logits: Any  # `(rows, ...)`, or a tuple of such arrays: what `Task.preprocess_logits` left of them
    labels: Any  # of the same shapes as the model's labels
    examples: Dataset  # as they were read
    rows: Dataset  # their encodings, in the order of the logits; `example_number` is the index of a row's example


class SavedHead(NamedTuple):
    """A trained head in a folder or on the Hub."""

    name: str
    config: ELMoConfig
    record: Record  # of its training, empty if it has none

    @property
    def labels(self) -> list[str]:
        return [self.config.id2label[number] for number in range(self.config.num_labels)]


AnyTask = TypeVar("AnyTask", bound="Task")


class Task(ABC):
    """The base class of tasks: everything that differs between them.

    CONTRIBUTING.md says how to add a task. Override the abstract methods; also `average` if logits are more than one
    array with classes in the last dimension, `preprocess_logits` if those of a split are too large for memory, and
    `answers` if a record has several.

    Predictions see the rows of many examples at once (`SplitOutput`), so that they may join rows of one example and
    decode structures. Scores are computed from the predictions alone, which have the gold labels beside those of the
    model. `encode` may return several rows for an example.
    """

    name: str  # in records and files
    metric: str  # the score that selects the best checkpoint and is compared
    model_class: Any  # a subclass of `ELMoTaskModel` that is built from its configuration alone
    arguments_class: type[DataArguments]
    training_arguments_class: type[TaskTrainingArguments] = TaskTrainingArguments
    scalar_mix_l2: float = 0.001  # the paper's lambda for the task (supplement A)
    elmo_dropout: float = 0.5
    unknown_labels: dict[str, int]  # in the data of a saved head, which lacks them; with their numbers
    label_column: str | None = None  # of examples, with the labels that name classes of a head; None: it has none
    head_columns: tuple[str, ...] = ()  # of encodings; only the head reads them, so they differ between rows of a text
    can_average: bool = True  # the outputs of several models

    def __init__(self, arguments: Any, data: DatasetDict, saved: SavedHead | None = None):
        self.arguments = arguments
        self.config: dict[str, Any] = {}  # fields of `ELMoConfig` that the data set determines, such as labels
        self.unknown_labels = {}
        if saved is None:
            self.prepare(data)
        else:
            self.restore(data, saved)
        self.data = take_samples(data, arguments)  # of `train`, `validation` and `test` those that were given

    @classmethod
    def read(cls: type[AnyTask], arguments: Any) -> AnyTask:
        """The task with the data that its options name, which are read and checked here."""
        return cls(arguments, cls.read_data(arguments))

    @staticmethod
    @abstractmethod
    def read_data(arguments: Any) -> DatasetDict:
        """The checked splits that the options name."""

    @abstractmethod
    def prepare(self, data: DatasetDict):
        """Sets `config`, and keeps the properties of the data that later methods need, such as its labels."""

    @abstractmethod
    def restore(self, data: DatasetDict, saved: SavedHead):
        """Sets the same properties from a saved head. Labels of the data that it lacks are `unknown_labels`."""

    @classmethod
    def missing_labels(cls, train: Dataset, saved: SavedHead) -> dict[str, int]:
        """The numbers of the labels of training data that a saved head lacks."""
        if cls.label_column is None:
            return {}
        counts = Counter(name for _, name in row_labels(train, cls.label_column))
        return {name: count for name, count in counts.most_common() if name not in saved.labels}

    @staticmethod
    def saved_arguments(config: ELMoConfig) -> dict[str, Any]:
        """The arguments of a task that are fields of a saved head's configuration."""
        return {}

    @abstractmethod
    def words(self, split: Dataset, tokenizer: ELMoTokenizer) -> Iterable[Sequence[str]]:
        """The words of a split, one list per text. They become the head's vocabulary."""

    @abstractmethod
    def encode(self, batch: Batch, tokenizer: ELMoTokenizer, is_training: bool) -> Batch:
        """The model's inputs and labels for a batch of examples.

        Where an example may have several rows, add a column `example_number`: its index in the batch, for each row.
        """

    @abstractmethod
    def collator(self, tokenizer: ELMoTokenizer) -> Callable[[list[dict]], Any]:
        """The function that makes a batch of rows."""

    def feature_collator(self, tokenizer: ELMoTokenizer, store: FeatureStore | None) -> Callable[[list[dict]], Any]:
        """The collator that adds the stored layers of a frozen biLM, if there are any."""
        return FeatureCollator(self.collator(tokenizer), store)

    @abstractmethod
    def predictions(self, output: SplitOutput) -> Iterable[Record]:
        """The lines of the file of predictions: a record for each example, with gold and predicted labels."""

    @abstractmethod
    def scores(self, predictions: Iterable[Record]) -> dict[str, Any]:
        """The scores of these lines: numbers, `metric` among them, and tables in dictionaries."""

    @abstractmethod
    def compare(self, example: Record, prediction: Record) -> Comparison:
        """The errors of a prediction, and both sides as a person reads them."""

    def answers(self, predictions: Iterable[Record]) -> Iterator[Any]:
        """What the model says, one by one. A model that always says the same has learned nothing."""
        return (record["predicted"] for record in predictions if "predicted" in record)

    def failure(self, predictions: Iterable[Record], scores: dict[str, Any]) -> str | None:
        """What is wrong with a score that needs no learning: near 0, or as of a model that always answers the same."""
        score = scores[self.metric]
        if 1 in (score, scores.get("accuracy")):
            return None
        answers = self.answers(predictions)
        first = next(answers, None)
        second = next(answers, None)
        if second is not None and second == first and all(answer == first for answer in answers):
            return f"{self.metric} is {100 * score:.2f}, because the model always answers {first!r:.80}"
        if abs(score) < LOW_SCORE:
            return f"{self.metric} is {100 * score:.2f}, because hardly any answer is right"
        return None

    def preprocess_logits(self, logits: Any, labels: Any) -> Any:
        """What Trainer keeps of a batch's logits until a whole split is scored: by default all."""
        return logits

    def average(self, logits: Sequence[Any]) -> Any:
        """What is kept of an ensemble, from all logits of its members: by default the mean of their probabilities."""
        return log_mean_probabilities(logits)

    @property
    def source(self) -> dict[str, str]:
        """Where the data come from, as named by the options."""
        names = ("dataset", "dataset_config", "train_file", "validation_file", "test_file")
        values = {name: getattr(self.arguments, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def check_splits(self, is_trained: bool = True):
        kind = "file" if self.arguments.dataset is None else "split"
        value = f"{kind} {kind.upper()}"
        if is_trained and "train" not in self.data:
            raise ValueError(f"There is no training data, only {', '.join(self.data)}; pass --train_{value}.")
        if not {"validation", "test"} & {*self.data}:
            raise ValueError(f"There is no data to evaluate on; pass --validation_{value} or --test_{value}.")

    def encode_splits(self, tokenizer: ELMoTokenizer, splits: Iterable[str] | None = None) -> dict[str, Dataset]:
        """The encodings of all splits, or of some. Column `example_number` is the index of a row's example."""
        encoded = {}
        for split in self.data if splits is None else splits:
            encoded[split] = self.data[split].map(
                self._encoded_rows,
                with_indices=True,
                batched=True,
                remove_columns=self.data[split].column_names,
                fn_kwargs={"tokenizer": tokenizer, "is_training": split == "train", "states": code_states()},
                desc=f"Encoding {split}",
            )
        return encoded

    def _encoded_rows(
        self, batch: Batch, indices: list[int], tokenizer: ELMoTokenizer, is_training: bool, states: tuple
    ) -> Batch:
        """The rows of a batch, with indices of examples in the split. `states` is only for the hash of `datasets`."""
        rows = dict(self.encode(batch, tokenizer, is_training))
        numbers = rows.get("example_number", range(len(indices)))
        return rows | {"example_number": [indices[number] for number in numbers]}

    def compute_metrics(self, splits: dict[str, Dataset]) -> Callable[[EvalPrediction], dict[str, float]] | None:
        """Trainer's `compute_metrics` for the validation split: the scores that are single numbers."""
        if "validation" not in splits:
            return None

        def metrics(predicted: EvalPrediction) -> dict[str, float]:
            parts = (predicted.predictions, predicted.label_ids, self.data["validation"], splits["validation"])
            scores = self.scores(self.predictions(SplitOutput(*parts)))
            return {name: value for name, value in scores.items() if isinstance(value, (int, float))}

        return metrics

    def __getstate__(self) -> dict[str, Any]:
        """The state without the data. `datasets` hashes it to find encodings in its cache, and knows the data."""
        return {name: value for name, value in self.__dict__.items() if name != "data"}


def log_mean_probabilities(logits: Sequence[np.ndarray]) -> np.ndarray:
    """The logarithm of the mean of several models' probabilities, a softmax over the last dimension."""
    log_probs = torch.stack([torch.from_numpy(of_model).log_softmax(-1) for of_model in logits])
    return (log_probs.logsumexp(0) - math.log(len(logits))).numpy()


def log_mean_odds(logits: Sequence[np.ndarray]) -> np.ndarray:
    """The log-odds of the mean of several models' probabilities, sigmoids of their logits."""
    pairs = [np.stack([np.zeros_like(of_model), of_model], -1) for of_model in logits]
    log_probs = log_mean_probabilities(pairs)
    return log_probs[..., 1] - log_probs[..., 0]


def label_config(labels: list[str]) -> dict[str, Any]:
    """The fields of the configuration that name the classes of a head."""
    label2id = {label: number for number, label in enumerate(labels)}
    return {"num_labels": len(labels), "id2label": dict(enumerate(labels)), "label2id": label2id}


def tokenize_sentences(sentences: list[list[str]], tokenizer: ELMoTokenizer, max_length: int | None) -> BatchEncoding:
    """The unpadded inputs of sentences, cut after `max_length` tokens, of which two are markers."""
    return tokenizer(sentences, is_split_into_words=True, truncation=max_length is not None, max_length=max_length)


def right_padding(tokenizer: ELMoTokenizer) -> ELMoTokenizer:
    """A copy that pads on the right: labels and scores count the words of a row from its left."""
    tokenizer = copy(tokenizer)
    tokenizer.padding_side = "right"
    return tokenizer
