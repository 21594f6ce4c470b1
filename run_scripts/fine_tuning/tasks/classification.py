"""Classification of texts and of pairs of texts: one label, several labels, or a number.

A row of the data has a `text`, perhaps a `text_pair`, and the `label`: a string, a list of strings, or a number.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
from datasets import Dataset, DatasetDict, Features, Value
from transformers import DataCollatorWithPadding
from transformers.utils import logging

from modeling_elmo import ELMoConfig, ELMoForSequenceClassification, ELMoTokenizer
from modeling_elmo.inputs import NO_LABEL

from ...program.command_line import option
from ...program.data_files import JSON_FORMATS, TABLE_SUFFIXES, number_in, table_rows
from ..comparison import Comparison, Item, Segment, View, count_errors, paired
from ..data import (
    DataArguments,
    Source,
    add_counts,
    check_cell,
    class_name,
    is_text,
    scored_labels,
    split_sources,
    unknown_labels,
)
from ..metrics import classification_scores, multilabel_scores, regression_scores
from ..task import Batch, Record, SavedHead, SplitOutput, Task, label_config, log_mean_odds, log_mean_probabilities
from ..trainer import TaskTrainingArguments

logger = logging.get_logger(__name__)

PIPELINE_COLUMNS = [("text", "text_pair"), ("text",)]
# Names of the columns in data sets that have no `text` or `label`.
TEXT_COLUMNS = [("sentence",), ("document",), ("review",), ("content",), ("comment",), ("title",)]
PAIR_COLUMNS = [
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
]
NOT_ONE_HOT = "A list has names or numbers of labels, not 0 or 1 for every label: write [0, 1, 1] as [1, 2]"
LABEL_COLUMNS = ("gold_label", "labels", "class", "category", "sentiment", "target", "stars", "rating", "score")


@dataclass(kw_only=True)
class ClassificationArguments(DataArguments):
    train_file: str | None = option(None, "Training file in UTF-8: .tsv, .csv, .json or .jsonl, also .gz or .zst.")
    text_column: str = option("text", "Key or column of the text. If absent: sentence, document, review and so on.")
    text_pair_column: str | None = option(
        None,
        "Key or column of a second text. Default: text_pair if there is text, sentence2 if there is sentence1, and so "
        "on; else none.",
    )
    label_column: str = option("label", "Key or column of the label. If absent: gold_label, labels, class and so on.")
    column_names: list[str] = option([], "Names of the columns of .tsv and .csv files without a header.")
    problem: Literal["classification", "regression"] = option(
        "classification", "Kind of labels: names or lists of names, or numbers."
    )
    drop_labels: list[str] = option([], "Labels whose samples are left out: - or -1, for example, in SNLI.")
    classifier: Literal["bcn", "esim", "linear"] = option(
        "bcn", "Network: bcn for one text or two, esim for pairs, linear for one linear layer."
    )
    max_length: int | None = option(
        None, "Maximum tokens of a training example, including markers. Other splits are not cut."
    )

    def __post_init__(self):
        if self.drop_labels and self.problem == "regression":
            raise ValueError(f"--drop_labels {' '.join(self.drop_labels)}: the labels of a regression are numbers.")


@dataclass
class ClassificationTrainingArguments(TaskTrainingArguments):
    """Trainer's arguments, with the learning rate of ESIM (Chen et al. 2017)."""

    _argument_group_name = "training options"
    default_learning_rate = 4e-4  # at 1e-3, a BCN of the paper's size may not leave the accuracy of chance


class Classification(Task):
    """The paper's sentiment and entailment (section 4), and other labels of texts."""

    name = "classification"
    label_column = "label"
    model_class = ELMoForSequenceClassification
    arguments_class = ClassificationArguments
    training_arguments_class = ClassificationTrainingArguments

    @staticmethod
    def read_data(arguments: ClassificationArguments) -> DatasetDict:
        read_table = partial(table_rows, column_names=arguments.column_names)
        sources = split_sources(arguments, dict.fromkeys(TABLE_SUFFIXES, read_table) | JSON_FORMATS)
        splits = DatasetDict()
        for split, source in sources.items():
            splits[split] = _classified_split(source, split, arguments)
        features = {split: data.features for split, data in splits.items()}
        if len(set(map(str, features.values()))) > 1:
            advice = "Pass --text_column, --text_pair_column and --label_column."
            raise ValueError(f"The splits differ: {features}. {advice}")
        return _without_labels(splits, arguments.drop_labels) if arguments.drop_labels else splits

    def prepare(self, data: DatasetDict):
        self._set_columns(data)
        if self.arguments.classifier == "esim" and len(self.text_columns) < 2:
            raise ValueError(
                "--classifier esim compares two texts, but each example has one; pass --text_pair_column, or "
                "--classifier bcn."
            )
        self.label_type = label_type(data, self.arguments.problem)
        self.metric = self.label_type.metric
        self.config = {**self.label_type.config, "classifier": self.arguments.classifier}

    def restore(self, data: DatasetDict, saved: SavedHead):
        self._set_columns(data)
        read = saved.record.get("columns", [*self.text_columns, "label"])
        for file, rows in data.items():
            if set(rows.column_names) != {*read}:
                raise ValueError(
                    f"{file} has {' and '.join(rows.column_names)}, but {saved.name} was trained with "
                    f"{' and '.join(read)}; pass --text_column, --text_pair_column and --label_column."
                )
        self.label_type = saved_label_type(saved, data)
        self.metric = self.label_type.metric
        self.config = self.label_type.config
        if isinstance(self.label_type, SingleLabel):
            for file, rows in data.items():
                self.label_type.check_kind(file, rows[0]["label"], saved.name)
                unknown = unknown_labels(rows, "label", saved.labels, file, saved.name)
                self.unknown_labels = add_counts(self.unknown_labels, unknown)

    @classmethod
    def missing_labels(cls, train: Dataset, saved: SavedHead) -> dict[str, int]:
        return {} if saved.config.problem_type == "regression" else super().missing_labels(train, saved)

    @staticmethod
    def saved_arguments(config: ELMoConfig) -> dict[str, Any]:
        problem = "regression" if config.problem_type == "regression" else "classification"
        return {"problem": problem, "classifier": config.classifier}

    def _set_columns(self, data: DatasetDict):
        columns = next(iter(data.values())).column_names
        self.text_columns = ["text", "text_pair"] if "text_pair" in columns else ["text"]

    def words(self, split: Dataset, tokenizer: ELMoTokenizer) -> Iterable[list[str]]:
        for name in self.text_columns:
            yield from map(tokenizer.splitter.words, split[name])

    def encode(self, batch: Batch, tokenizer: ELMoTokenizer, is_training: bool) -> Batch:
        texts = [batch[name] for name in self.text_columns]
        most = self.arguments.max_length if is_training else None
        encoding = tokenizer(*texts, truncation=most is not None, max_length=most)
        return {**encoding, "labels": [self.label_type.target(label) for label in batch["label"]]}

    def collator(self, tokenizer: ELMoTokenizer) -> DataCollatorWithPadding:
        return DataCollatorWithPadding(tokenizer)

    def predictions(self, output: SplitOutput) -> Iterable[Record]:
        for example, logits in zip(output.examples, output.logits, strict=True):
            predicted = self.label_type.label(logits)
            yield {**example, "predicted": predicted, **self.label_type.certainty(logits)}

    def scores(self, predictions: Iterable[Record]) -> dict[str, Any]:
        gold = []
        predicted = []
        for record in predictions:
            gold.append(record["label"])
            predicted.append(record["predicted"])
        return self.label_type.scores(predicted, gold)

    def compare(self, example: Record, prediction: Record) -> Comparison:
        text = "\n".join(prediction[name] for name in self.text_columns)
        return self.label_type.compare(text, prediction)

    def average(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        return self.label_type.average(logits)


def saved_label_type(saved: SavedHead, data: DatasetDict) -> "SingleLabel | Regression":
    """The kind of labels of a saved head. Its numbers are checked as for a new head if it is trained further."""
    kind = saved.config.problem_type
    if kind == "regression":
        return Regression(data if "train" in data else DatasetDict())
    return (MultiLabel if kind == MultiLabel.problem_type else SingleLabel)(saved.labels)


def label_type(data: DatasetDict, problem: str) -> "SingleLabel | Regression":
    if problem == "regression":
        return Regression(data)
    labels = scored_labels(data, "label")
    if isinstance(data["train"][0]["label"], list):
        if len({*map(frozenset, data["train"]["label"])}) == 1:
            raise ValueError(
                f"All texts of the split 'train' have the same labels, {', '.join(labels):.200}. {NOT_ONE_HOT}."
            )
        return MultiLabel(labels)
    if len(labels) == 1:
        raise ValueError(f"All labels of the split 'train' are {labels[0]!r}; a classifier needs two or more.")
    return SingleLabel(labels)


class SingleLabel:
    """One label per text: the way from a raw label to a target, from logits to a raw label, and to scores.

    A label that the training data lacks is not a target, and counts as an error.
    """

    metric = "accuracy"
    problem_type = "single_label_classification"
    average = staticmethod(log_mean_probabilities)

    def __init__(self, labels: list[str]):
        self.labels = labels
        self.config = {**label_config(labels), "problem_type": self.problem_type}

    def target(self, label: Any) -> Any:
        return self.config["label2id"].get(label, NO_LABEL)

    def label(self, logits: np.ndarray) -> Any:
        return self.labels[int(logits.argmax())]

    def scores(self, predicted: Sequence[Any], gold: Sequence[Any]) -> dict[str, Any]:
        names = self.with_unknown(gold)
        ids = {name: number for number, name in enumerate(names)}
        return classification_scores([ids[label] for label in predicted], [ids[label] for label in gold], names)

    def certainty(self, logits: np.ndarray) -> dict[str, float]:
        """The probability of the predicted label."""
        scaled = np.exp(logits - logits.max())
        return {"probability": round(float(scaled.max() / scaled.sum()), 4)}

    def check_kind(self, file: str, label: Any, model: str):
        if isinstance(label, list):
            raise ValueError(f"{file} has lists of labels, but {model} gives each text one label; pass another file.")

    def compare(self, text: str, prediction: Record) -> Comparison:
        """The surest mistakes are the worst."""
        pairs = paired([Item(prediction["label"])], [Item(prediction["predicted"])])
        is_right = prediction["label"] == prediction["predicted"]
        gold = [Segment("", prediction["label"], is_right)]
        predicted = [Segment("", prediction["predicted"], is_right)]
        return Comparison(pairs, [View(text, gold, predicted)], prediction["probability"])

    def with_unknown(self, gold: Iterable[str]) -> list[str]:
        unknown = set(gold).difference(self.labels)
        return [*self.labels, *sorted(unknown)]


class MultiLabel(SingleLabel):
    """Any number of labels per text: all whose probability is above one half."""

    metric = "micro_f1"
    problem_type = "multi_label_classification"
    average = staticmethod(log_mean_odds)

    def certainty(self, logits: np.ndarray) -> dict[str, float]:
        return {}

    def check_kind(self, file: str, label: Any, model: str):
        if not isinstance(label, list):
            raise ValueError(f"{file} has one label per text, but {model} gives several; write lists in JSON lines.")

    def compare(self, text: str, prediction: Record) -> Comparison:
        """The more labels are wrong, the worse."""
        gold = prediction["label"]
        predicted = prediction["predicted"]
        right = {*gold} & {*predicted}
        pairs = []
        for name in dict.fromkeys([*gold, *predicted]):
            pairs += paired([Item(name)] * (name in gold), [Item(name)] * (name in predicted))
        sides = ([Segment("", name, name in right) for name in side] for side in (gold, predicted))
        return Comparison(pairs, [View(text, *sides)], count_errors(pairs))

    def target(self, label: Collection[str]) -> list[float]:
        return [float(name in label) for name in self.labels]

    def label(self, logits: np.ndarray) -> list[str]:
        return [label for label, logit in zip(self.labels, logits, strict=True) if logit > 0]

    def scores(self, predicted: Sequence[Any], gold: Sequence[Any]) -> dict[str, Any]:
        names = self.with_unknown(chain.from_iterable(gold))
        is_predicted = [[name in labels for name in names] for labels in predicted]
        is_gold = [[name in labels for name in names] for labels in gold]
        return multilabel_scores(is_predicted, is_gold, names)


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

    def certainty(self, logits: np.ndarray) -> dict[str, float]:
        return {}

    def compare(self, text: str, prediction: Record) -> Comparison:
        """The larger the difference, the worse."""
        gold = [Segment(f"{prediction['label']:g}", None, True)]
        predicted = [Segment(f"{prediction['predicted']:.4g}", None, True)]
        difference = abs(prediction["label"] - prediction["predicted"])
        return Comparison([], [View(text, gold, predicted)], difference)

    def scores(self, predicted: Sequence[float], gold: Sequence[float]) -> dict[str, Any]:
        return regression_scores(predicted, gold)

    def average(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        return np.mean(logits, axis=0)


def _classified_split(source: Source, split: str, arguments: ClassificationArguments) -> Dataset:
    first = source.first()
    given = list(first)
    if not first.get("text_pair", True):  # a column may be empty
        given.remove("text_pair")
    columns = _chosen_columns(source.name, given, arguments)
    source.check_columns(columns)
    if "text_pair" not in columns:
        source.tell_unread(columns.values(), "--text_pair_column names a second text")
    features: dict[str, Any] = dict.fromkeys(columns, Value("string"))
    kind = "name"
    if arguments.problem == "regression":
        kind = "number"
        features["label"] = Value("float64")
    elif isinstance(first[columns["label"]], list):
        kind = "list"
        features["label"] = [Value("string")]
    label_column = columns["label"]
    names = source.class_names(label_column)
    dropped = arguments.drop_labels

    def convert(location: str, row: Mapping[str, Any]) -> dict[str, Any]:
        texts = _checked_texts(location, row, columns)
        label = row.get(label_column)
        return {**texts, "label": _checked_label(location, label_column, label, kind, names, dropped)}

    return source.convert(convert, Features(features), split)


def _chosen_columns(name: str, given: list[str], arguments: ClassificationArguments) -> dict[str, str]:
    """The columns that the options name; where their defaults are absent, columns of known names, if one fits."""
    columns = {"text": arguments.text_column}
    if arguments.text_pair_column is not None:
        columns["text_pair"] = arguments.text_pair_column
    elif arguments.text_column == "text":
        texts = _known_text_columns(given)
        if texts is not None and texts != ("text",):
            columns = dict(zip(("text", "text_pair"), texts, strict=False))
            print(f"{name}: the text is {' and '.join(texts)}")
    columns["label"] = arguments.label_column
    labels = [column for column in LABEL_COLUMNS if column in given]
    if arguments.label_column == "label" and "label" not in given and len(labels) == 1:
        columns["label"] = labels[0]
        print(f"{name}: the label is {labels[0]}")
    return columns


def _known_text_columns(given: list[str]) -> tuple[str, ...] | None:
    """The only columns of known names. `question` and `sentence` are a pair, although `sentence` alone is a text."""
    for known in (PIPELINE_COLUMNS, PAIR_COLUMNS, TEXT_COLUMNS):
        fitting = [columns for columns in known if set(columns) <= set(given)]
        if len(fitting) == 1 or known is PIPELINE_COLUMNS and fitting:
            return fitting[0]
        if fitting:
            break
    return None


def _checked_texts(location: str, row: Mapping[str, Any], columns: dict[str, str]) -> dict[str, str]:
    texts: dict[str, Any] = {}
    for name, column in columns.items():
        if name != "label":
            texts[name] = row.get(column)
            check_cell(is_text(texts[name]), location, column, texts[name], "a non-empty text")
    if columns["text"] == "text" and "text_pair" not in columns:  # by default, the first row decides
        check_cell(not row.get("text_pair"), location, "text_pair", row.get("text_pair"), "in the first row as well")
    return texts


def _checked_label(
    location: str, column: str, label: Any, kind: str, names: list[str] | None, dropped: list[str]
) -> float | str | list[str]:
    if kind == "number":
        return _finite_number(location, column, label)
    if kind == "name":
        is_list = isinstance(label, str) and re.fullmatch(r"\[.*[,'\"].*\]", label)
        check_cell(not is_list, location, column, label, "one name. A table has no lists: write JSON lines (.jsonl)")
        advice = f", or pass --drop_labels '{label!s:.80}' or --problem regression"
        return class_name(location, column, label, names, dropped, advice)
    check_cell(isinstance(label, list), location, column, label, "a list, as in the first row")
    labels = [class_name(location, column, name, names, dropped, f". {NOT_ONE_HOT}") for name in label]
    needed = f"the names or numbers of a text's labels, each once. {NOT_ONE_HOT}"
    check_cell(len(set(labels)) == len(labels), location, column, label, needed)
    return labels


def _finite_number(location: str, column: str, value: Any) -> float:
    number = number_in(value)
    check_cell(math.isfinite(number), location, column, value, "a finite number, for a regression")
    return number


def _without_labels(splits: DatasetDict, dropped: list[str]) -> DatasetDict:
    def has_none(label: str | list[str]) -> bool:
        labels = [label] if isinstance(label, str) else label
        return set(dropped).isdisjoint(labels)

    given = f"--drop_labels {' '.join(dropped)}"
    remaining = splits.filter(has_none, input_columns="label")
    for split, data in splits.items():
        count = len(remaining[split])
        left_out = len(data) - count
        print(f"{split}: {left_out:,} of {len(data):,} samples have a dropped label")
        if not count:
            raise ValueError(f"{given} leaves no sample of {split!r}; pass data with labels.")
    if remaining.num_rows == splits.num_rows:
        logger.warning(f"{given}: no sample has such a label.")  # the option may come from the training of a head
    return remaining
