"""Data for tagging and classification: files of the usual formats, or a data set, as a `DatasetDict` of checked rows.

    splits = read_tagging(arguments)          # tokens: list[str], tags: list[str]
    splits = read_classification(arguments)   # text: str, (text_pair: str,) label: str, float or list[str]
    labels = label_names(splits, "tags")      # of all training data
    splits = take_samples(splits, arguments)  # what --train_fraction and --max_*_samples leave

Files are read row by row into the cache of `datasets`, and anew when they changed.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
from datasets import Dataset, DatasetDict, Features, Value
from transformers.utils import logging

from modeling_elmo.run_scripts.fine_tuning.sources import (
    CLASSIFICATION_FORMATS,
    DEFAULT_TAGS,
    TAGGING_FORMATS,
    DataArguments,
    Place,
    Source,
    sources,
)
from modeling_elmo.run_scripts.program.files import ROWS_AT_ONCE

logger = logging.get_logger(__name__)

TAGS = (DEFAULT_TAGS, "ner_tags", "pos_tags", "upos", "labels")
# What data sets call their columns where it is not `text` and `label`.
TEXTS = [("sentence",), ("document",), ("review",), ("content",), ("comment",), ("title",)]
PAIRS = [("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence")]
LABELS = ("gold_label", "labels", "class", "category", "sentiment", "target", "stars", "rating", "score")


@dataclass(kw_only=True)
class TaggingDataArguments(DataArguments):
    tokens_column: str = field(default="tokens", metadata={"help": "Key or column that holds a sentence's words."})
    tags_column: str | None = field(
        default=None,
        metadata={
            "help": f"Key or column that holds their tags. Default: the first of {', '.join(TAGS)} that is there. "
            "Of a file with a word a line: the column's number, from 1. Default: the last; of .conllu: upos."
        },
    )
    word_column: int | None = field(
        default=None,
        metadata={"help": "Number of the word's column in such a file, from 1. Default: the first; of .conllu: form."},
    )
    comments: list[str] = field(
        default_factory=list,
        metadata={"help": "What lines to skip in such a file begin with, '# id' for example. Of .conllu: always #."},
    )
    tag_scheme: Literal["keep", "iob1"] = field(
        default="keep", metadata={"help": "iob1: the tags are IOB1, where B- only parts neighbours; make them BIO."}
    )


@dataclass(kw_only=True)
class ClassificationDataArguments(DataArguments):
    text_column: str = field(
        default="text", metadata={"help": "Key or column of the text. Where it is not there: sentence, document, ..."}
    )
    text_pair_column: str | None = field(
        default=None,
        metadata={"help": "That of a second text. Default: none; sentence2 beside sentence1, hypothesis and so on."},
    )
    label_column: str = field(
        default="label", metadata={"help": "Key or column of the label. Where it is not there: gold_label, class, ..."}
    )
    column_names: list[str] = field(
        default_factory=list, metadata={"help": "Names of the columns of .tsv and .csv files without a header."}
    )
    problem: Literal["classification", "regression"] = field(
        default="classification", metadata={"help": "Whether labels are names (or lists of them), or numbers."}
    )
    drop_labels: list[str] = field(
        default_factory=list, metadata={"help": "Leave out what has these labels: - or -1, for example, in SNLI."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.drop_labels and self.problem == "regression":
            raise ValueError(f"--drop_labels {' '.join(self.drop_labels)}: the labels of a regression are numbers.")


def read_tagging(arguments: TaggingDataArguments) -> DatasetDict:
    """The splits that were given, with the columns `tokens` and `tags`: lists of strings of one length."""
    found = sources(arguments, TAGGING_FORMATS)
    return DatasetDict({split: _tagged(source, split, arguments) for split, source in found.items()})


def read_classification(arguments: ClassificationDataArguments) -> DatasetDict:
    """The splits that were given, with the columns `text`, `text_pair` where there is one, and `label`: a string, the
    number of a regression, or a list of strings where several labels hold."""
    found = sources(arguments, CLASSIFICATION_FORMATS)
    splits = DatasetDict({split: _classified(source, split, arguments) for split, source in found.items()})
    if len({str(data.features) for data in splits.values()}) > 1:
        features = {split: data.features for split, data in splits.items()}
        raise ValueError(f"The splits differ: {features}. Pass --text_column, --text_pair_column and --label_column.")
    return _without(splits, arguments.drop_labels) if arguments.drop_labels else splits


def label_names(splits: DatasetDict, column: str, training: str = "train") -> list[str]:
    """The labels or tags of the training data, sorted, `O` first; no other split may hold another one."""
    if training not in splits:
        raise ValueError(f"Labels are those of the split {training!r}, but there are only {list(splits)}; pass it too.")
    names = {name for _, name in _labels(splits[training], column)}
    for split, data in splits.items():
        for row, name in _labels(data, column):
            if name not in names:
                raise ValueError(
                    f"Split {split!r}, row {row}: {name!r} occurs nowhere in {training!r}, whose {column} are "
                    f"{', '.join(sorted(names)):.200}. Correct it, or pass training data with it."
                )
    if len(names) == 1 and not isinstance(splits[training][column][0], list):
        raise ValueError(f"All {column} of the split {training!r} are {names.pop()!r}; a classifier needs two or more.")
    return sorted(names, key=lambda name: (name != "O", name))


def _labels(data: Dataset, column: str) -> Iterator[tuple[int, str]]:
    batches = data.select_columns([column]).iter(batch_size=ROWS_AT_ONCE)
    for row, value in enumerate(chain.from_iterable(batch[column] for batch in batches)):
        for name in value if isinstance(value, list) else [value]:
            yield row, name


def take_samples(splits: DatasetDict, arguments: DataArguments) -> DatasetDict:
    """What `train_fraction` and `max_*_samples` leave, in the order of the data."""
    taken = DatasetDict()
    for split, data in splits.items():
        is_training = split == "train"
        rows = training_share(len(data), arguments.train_fraction if is_training else 1.0)
        rows = rows[: arguments.max_train_samples if is_training else arguments.max_eval_samples]
        taken[split] = data if len(rows) == len(data) else data.select(rows)
        if len(rows) < len(data):
            print(f"{split}: {len(rows):,} of {len(data):,} samples are taken")
    return taken


def training_share(count: int, fraction: float) -> list[int]:
    """Rows of a random share: always the same ones, and among those of a larger share."""
    return sorted(np.random.default_rng(0).permutation(count)[: math.ceil(fraction * count)].tolist())


def _tagged(source: Source, split: str, arguments: TaggingDataArguments) -> Dataset:
    columns = list(source.first())
    tags = arguments.tags_column or next((name for name in TAGS if name in columns), DEFAULT_TAGS)
    for option, name in (("tokens_column", arguments.tokens_column), ("tags_column", tags)):
        _check_column(source, columns, name, option)
    convert = partial(
        _tagging_row, columns=(arguments.tokens_column, tags), names=source.names(tags), scheme=arguments.tag_scheme
    )
    strings = [Value("string")]
    features = Features(tokens=strings, tags=strings, inside=Value("int32"), place=Value("string"))
    data = source.convert(convert, features, split)
    if count := sum(data["inside"]):
        place = next(place for place, inside in zip(data["place"], data["inside"], strict=True) if inside)
        logger.warning(
            f"{source.name}: {count:,} entities begin with I-, the first is {place}. They are kept so; if these are "
            "IOB1 tags, pass --tag_scheme iob1."
        )
    if source.names(tags) is None and all(str(tag).isdecimal() for tag in data[0]["tags"]):
        logger.warning(
            f"{source.name}: the tags are numbers without names, so accuracy is measured, as of parts of speech. If "
            "they stand for B-PER and so on, pass data that say so."
        )
    return data.select_columns(["tokens", "tags"])


def _tagging_row(
    place: Place, record: Mapping[str, Any], columns: tuple[str, str], names: list[str] | None, scheme: str
) -> dict:
    where = place[0] if isinstance(place, list) else place
    tokens, tags = (_value(where, record, column) for column in columns)
    if not isinstance(tokens, list) or not isinstance(tags, list) or len(tokens) != len(tags) or not tokens:
        raise ValueError(f"{where}: {tokens!r:.80} with {tags!r:.80}; pass as many tags as tokens, and one at least.")
    places = place if isinstance(place, list) else [place] * len(tokens)
    for word_place, token in zip(places, tokens, strict=True):
        if not isinstance(token, str) or not token:
            raise ValueError(f"{word_place}: a token is {token!r}; it must be a string that is not empty.")
    tags = [_name(word_place, tag, names, "tag") for word_place, tag in zip(places, tags, strict=True)]
    inside = _begun_inside(tags)
    first = "".join(f"{places[index]}, {tokens[index]!r} with {tags[index]}" for index in inside[:1])
    if scheme == "iob1":
        tags, inside = _as_bio(places, tags, inside), []
    return {"tokens": tokens, "tags": tags, "inside": len(inside), "place": first}


def _begun_inside(tags: list[str]) -> list[int]:
    """Where an entity begins with `I-TYPE`."""
    pairs = enumerate(zip(["O", *tags], tags, strict=False))
    return [index for index, (before, tag) in pairs if tag[:2] == "I-" and before not in (tag, f"B{tag[1:]}")]


def _as_bio(places: list[str], tags: list[str], inside: list[int]) -> list[str]:
    for place, tag in zip(places, tags, strict=True):
        if tag != "O" and tag[:2] not in ("B-", "I-"):
            raise ValueError(f"{place}: IOB1 has no tag {tag!r}, but O, B-TYPE and I-TYPE; pass --tag_scheme keep.")
    return [f"B{tag[1:]}" if index in inside else tag for index, tag in enumerate(tags)]


def _classified(source: Source, split: str, arguments: ClassificationDataArguments) -> Dataset:
    first = source.first()
    columns = _text_columns(source, list(first), arguments) | {"label": _label_column(source, list(first), arguments)}
    several, regression = isinstance(first[columns["label"]], list), arguments.problem == "regression"
    convert = partial(
        _classification_row,
        columns=columns,
        names=source.names(columns["label"]),
        kind="number" if regression else "list" if several else "name",
        dropped=arguments.drop_labels,
    )
    string = Value("string")
    label = Value("float64") if regression else [string] if several else string
    return source.convert(convert, Features(dict.fromkeys(columns, string) | {"label": label}), split)


def _text_columns(source: Source, columns: list[str], arguments: ClassificationDataArguments) -> dict[str, str]:
    given = {"text": arguments.text_column, "text_pair": arguments.text_pair_column}
    if given == {"text": "text", "text_pair": None} and "text" not in columns:
        pairs, texts = ([names for names in known if set(names) <= set(columns)] for known in (PAIRS, TEXTS))
        found = pairs or texts  # of `question` and `sentence` both, not `sentence` alone
        if len(found) != 1:
            raise ValueError(
                f"{source.name} has the columns {columns}; pass --text_column, or also --text_pair_column."
            )
        given = dict(zip(given, found[0], strict=False))
        print(f"{source.name}: the text is {' and '.join(found[0])}")
    chosen = {name: column for name, column in given.items() if column is not None}
    for name, column in chosen.items():
        _check_column(source, columns, column, f"{name}_column")
    return chosen


def _label_column(source: Source, columns: list[str], arguments: ClassificationDataArguments) -> str:
    found = [name for name in LABELS if name in columns]
    if arguments.label_column == "label" and "label" not in columns and len(found) == 1:
        print(f"{source.name}: the label is {found[0]}")
        return found[0]
    _check_column(source, columns, arguments.label_column, "label_column")
    return arguments.label_column


def _check_column(source: Source, columns: list[str], name: str, option: str):
    if name not in columns:
        raise ValueError(
            f"{source.name} has no column {name!r} but {columns}; pass --{option}, or --column_names where a file of "
            "columns has no header."
        )


def _classification_row(
    place: str, record: Mapping[str, Any], columns: dict[str, str], names: list[str] | None, kind: str, dropped: list
) -> dict:
    row = {name: _value(place, record, column) for name, column in columns.items()}
    label = row.pop("label")
    for name, text in row.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{place}: {columns[name]!r} is {text!r:.80}; it must be a text that is not empty.")
    if kind == "number":
        return row | {"label": _number(place, label)}
    if kind == "name":
        return row | {"label": _name(place, label, names, "label", dropped)}
    if not isinstance(label, list):
        raise ValueError(f"{place}: the label is {label!r:.80}; it must be a list, as that of the first row is.")
    held = [_name(place, name, names, "label", dropped) for name in label]
    if len(set(held)) < len(held):
        raise ValueError(
            f"{place}: the labels are {label!r:.80}, and each may stand there once; pass those that hold, by name or "
            "number, not a zero or one for each."
        )
    return row | {"label": held}


def _value(place: str, record: Mapping[str, Any], column: str) -> Any:
    if column not in record:
        raise ValueError(f"{place} has no {column!r} but {list(record)}; give every row the same columns.")
    return record[column]


def _name(place: str, value: Any, names: list[str] | None, kind: str, dropped: Sequence[str] = ()) -> str:
    """A label as text; numbers of classes become their `names`."""
    if names is None and isinstance(value, (str, int)) and str(value).strip():
        return str(value)
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    if str(value) in dropped:
        return str(value)
    known = f"one of {names}" if names else "a name or the number of a class"
    advice = f", or pass --drop_labels '{value!s:.80}', or --problem regression" if kind == "label" else ""
    if value == -1:
        advice += "; of a split whose labels are withheld, none: --test_split none"
    raise ValueError(f"{place}: the {kind} is {value!r:.80}; it must be {known}. Correct it{advice}.")


def _number(place: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not math.isfinite(number):
        raise ValueError(f"{place}: the label is {value!r:.80}; a regression needs finite numbers.")
    return number


def _without(splits: DatasetDict, dropped: list[str]) -> DatasetDict:
    counts = Counter(name for data in splits.values() for _, name in _labels(data, "label") if name in dropped)
    if absent := [name for name in dropped if name not in counts]:
        raise ValueError(f"--drop_labels {' '.join(absent)}: no row has this label; leave it out.")
    kept = splits.filter(_is_kept, fn_kwargs={"dropped": dropped})
    for split, data in splits.items():
        print(f"{split}: {len(data) - len(kept[split]):,} of {len(data):,} samples have a label that is dropped")
        if not len(kept[split]):
            raise ValueError(f"--drop_labels {' '.join(dropped)} leaves nothing of {split!r}; pass data with labels.")
    return kept


def _is_kept(row: dict, dropped: list[str]) -> bool:
    return not set(dropped).intersection(row["label"] if isinstance(row["label"], list) else [row["label"]])
