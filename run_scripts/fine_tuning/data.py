"""Data for tagging and classification: files of common formats, or a data set, as a `DatasetDict` of checked rows.

    splits = read_tagging(arguments)          # tokens: list[str], tags: list[str]
    splits = read_classification(arguments)   # text: str, (text_pair: str,) label: str, float or list[str]
    labels = label_names(splits, "tags")      # of the training data
    splits = take_samples(splits, arguments)  # limited by --train_fraction and --max_*_samples

The rows are kept in the cache of `datasets`, and read again when their file changes.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
from datasets import Dataset, DatasetDict, Features, Value
from transformers.utils import logging

from modeling_elmo.run_scripts.fine_tuning.sources import (
    DataArguments,
    Source,
    check_cell,
    is_text,
    sentence_of,
    split_sources,
)
from modeling_elmo.run_scripts.program.command_line import option
from modeling_elmo.run_scripts.program.data_files import (
    COLUMN_SUFFIXES,
    DEFAULT_TAGS,
    JSON_FORMATS,
    TABLE_SUFFIXES,
    Location,
    column_rows,
    table_rows,
)
from modeling_elmo.run_scripts.program.files import ROWS_AT_ONCE

logger = logging.get_logger(__name__)

TAG_COLUMNS = (DEFAULT_TAGS, "ner_tags", "pos_tags", "upos", "labels")
# Names of the columns in data sets that have no `text` or `label`.
TEXT_COLUMNS = [("sentence",), ("document",), ("review",), ("content",), ("comment",), ("title",)]
PAIR_COLUMNS = [
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
]
LABEL_COLUMNS = ("gold_label", "labels", "class", "category", "sentiment", "target", "stars", "rating", "score")


SCHEME_LETTERS = {"iob1": "BI", "iobes": "BIESLUM"}  # BILOU has L and U for E and S, BMES has M for I


@dataclass(kw_only=True)
class TaggingDataArguments(DataArguments):
    train_file: str | None = option(
        None,
        f"Training file in UTF-8. A word and its tag per line: {', '.join(COLUMN_SUFFIXES)}; a sentence "
        "per record: .json, .jsonl. Also .gz or .zst.",
    )
    tokens_column: str = option("tokens", "Key or column of a sentence's words.")
    tags_column: str | None = option(
        None,
        f"Key or column of the tags. Default: the first of {', '.join(TAG_COLUMNS)} in the data. In a file "
        "with a word per line, it is the number of the column, from 1. Default: the last; upos in .conllu.",
    )
    word_column: int | None = option(
        None, "Number of the words' column in a file with a word per line, from 1. Default: the first; form in .conllu."
    )
    comments: list[str] = option(
        [],
        "Beginnings of lines to skip in a file with a word per line, such as '# id'. Lines with # are "
        "always skipped in .conllu.",
    )
    tag_scheme: Literal["keep", "iob1", "iobes"] = option(
        "keep",
        "iob1: convert tags from IOB1, where B- only separates adjacent entities, to BIO. iobes: convert "
        "tags from IOBES (BIOES), BILOU or BMES to BIO, which transformers' pipeline groups into entities.",
    )


@dataclass(kw_only=True)
class ClassificationArguments(DataArguments):
    train_file: str | None = option(None, "Training file in UTF-8: .tsv, .csv, .json or .jsonl, also .gz or .zst.")
    text_column: str = option("text", "Key or column of the text. If absent: sentence, document, review and so on.")
    text_pair_column: str | None = option(
        None, "Key or column of a second text. Default: sentence2 beside sentence1 and so on, else none."
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


def read_tagging(arguments: TaggingDataArguments) -> DatasetDict:
    """The splits that were given, with the columns `tokens` and `tags`: lists of strings of equal length."""
    options = ("tokens_column", "tags_column", "word_column", "comments")
    read_columns = partial(column_rows, **{name: getattr(arguments, name) for name in options})
    found = split_sources(arguments, dict.fromkeys(COLUMN_SUFFIXES, read_columns) | JSON_FORMATS)
    return DatasetDict({split: _tagged_split(source, split, arguments) for split, source in found.items()})


def _tagged_split(source: Source, split: str, arguments: TaggingDataArguments) -> Dataset:
    columns = list(source.first())
    tags = arguments.tags_column or next((name for name in TAG_COLUMNS if name in columns), DEFAULT_TAGS)
    source.check_column(arguments.tokens_column, columns, "tokens_column")
    source.check_column(tags, columns, "tags_column")
    names = source.class_names(tags)
    convert = partial(_tagging_row, columns=(arguments.tokens_column, tags), names=names, scheme=arguments.tag_scheme)
    data = source.convert(convert, Features(tokens=[Value("string")], tags=[Value("string")]), split)
    kept = data["tags"] if arguments.tag_scheme == "keep" else []
    if inside := [number for number, row in enumerate(kept) if _begins_inside(row)]:
        logger.warning(
            f"{source.name}: entities of {len(inside):,} sentences begin with I-, first in sentence {inside[0] + 1:,}: "
            f"{' '.join(data[inside[0]]['tokens']):.80}. The tags are kept; if they are IOB1, pass --tag_scheme iob1."
        )
    if names is None and all(str(tag).isdecimal() for tag in data[0]["tags"]):
        logger.warning(
            f"{source.name}: the tags are numbers without names, so they are scored by accuracy, like parts of speech. "
            "If they mark entities, pass data with names such as B-PER."
        )
    return data


def _tagging_row(
    location: Location, row: Mapping[str, Any], columns: tuple[str, str], names: list[str] | None, scheme: str
) -> dict[str, Any]:
    tokens, locations = sentence_of(location, row, columns[0])
    given: Any = row.get(columns[1])
    is_complete = isinstance(given, list) and len(given) == len(tokens)
    check_cell(is_complete, locations[0], columns[1], given, f"a list with a tag for each of {len(tokens)} words")
    tags = [_class_name(each, columns[1], tag, names) for each, tag in zip(locations, given, strict=True)]
    return {"tokens": tokens, "tags": tags if scheme == "keep" else _to_bio(locations, tags, scheme)}


def _begins_inside(tags: list[str]) -> bool:
    """Whether an entity begins with `I-TYPE`."""
    pairs = zip(["O", *tags], tags, strict=False)
    return any(tag[:2] == "I-" and before not in (tag, f"B{tag[1:]}") for before, tag in pairs)


def _to_bio(locations: list[str], tags: list[str], scheme: str) -> list[str]:
    """Converts to BIO without changing entities. Tags that do not fit together are read as by conlleval and seqeval."""
    letters = SCHEME_LETTERS[scheme]
    for location, tag in zip(locations, tags, strict=True):
        if tag != "O" and (tag[:1] not in letters or tag[1:2] != "-"):
            forms = ", ".join(f"{letter}-TYPE" for letter in letters)
            raise ValueError(
                f"{location}: {tag!r} is not an {scheme.upper()} tag (O, {forms}); pass --tag_scheme keep."
            )
    converted = []
    for before, tag in zip(["O", *tags], tags, strict=False):
        goes_on = tag[0] in "IMEL" and before[0] in "BIM" and before[1:] == tag[1:]
        converted.append(tag if tag == "O" else f"{'I' if goes_on else 'B'}{tag[1:]}")
    return converted


def read_classification(arguments: ClassificationArguments) -> DatasetDict:
    """The splits that were given, with the columns `text`, `text_pair` if there is one, and `label`.

    A label is a string, the number of a regression, or a list of strings if texts have several labels.
    """
    read_table = partial(table_rows, column_names=arguments.column_names)
    found = split_sources(arguments, dict.fromkeys(TABLE_SUFFIXES, read_table) | JSON_FORMATS)
    splits = DatasetDict({split: _classified_split(source, split, arguments) for split, source in found.items()})
    if len({str(data.features) for data in splits.values()}) > 1:
        features = {split: data.features for split, data in splits.items()}
        raise ValueError(f"The splits differ: {features}. Pass --text_column, --text_pair_column and --label_column.")
    return _without_labels(splits, arguments.drop_labels) if arguments.drop_labels else splits


def _classified_split(source: Source, split: str, arguments: ClassificationArguments) -> Dataset:
    first = source.first()
    columns = _text_columns(source, list(first), arguments) | {"label": _label_column(source, list(first), arguments)}
    is_list, is_number = isinstance(first[columns["label"]], list), arguments.problem == "regression"
    convert = partial(
        _classification_row,
        columns=columns,
        names=source.class_names(columns["label"]),
        kind="number" if is_number else "list" if is_list else "name",
        dropped=arguments.drop_labels,
    )
    string = Value("string")
    label = Value("float64") if is_number else [string] if is_list else string
    return source.convert(convert, Features(dict.fromkeys(columns, string) | {"label": label}), split)


def _text_columns(source: Source, columns: list[str], arguments: ClassificationArguments) -> dict[str, str]:
    given = {"text": arguments.text_column, "text_pair": arguments.text_pair_column}
    if given == {"text": "text", "text_pair": None} and "text" not in columns:
        pairs, texts = (
            [names for names in known if set(names) <= set(columns)] for known in (PAIR_COLUMNS, TEXT_COLUMNS)
        )
        found = pairs or texts  # `question` and `sentence` are a pair, although `sentence` alone is a text
        if len(found) != 1:
            raise ValueError(
                f"{source.name} has the columns {columns}; pass --text_column, or also --text_pair_column."
            )
        given = dict(zip(given, found[0], strict=False))
        print(f"{source.name}: the text is {' and '.join(found[0])}")
    chosen = {name: column for name, column in given.items() if column is not None}
    for name, column in chosen.items():
        source.check_column(column, columns, f"{name}_column")
    return chosen


def _label_column(source: Source, columns: list[str], arguments: ClassificationArguments) -> str:
    found = [name for name in LABEL_COLUMNS if name in columns]
    if arguments.label_column == "label" and "label" not in columns and len(found) == 1:
        print(f"{source.name}: the label is {found[0]}")
        return found[0]
    source.check_column(arguments.label_column, columns, "label_column")
    return arguments.label_column


def _classification_row(
    location: str, row: Mapping[str, Any], columns: dict[str, str], names: list[str] | None, kind: str, dropped: list
) -> dict[str, Any]:
    cells = {name: row.get(column) for name, column in columns.items()}
    label = cells.pop("label")
    for name, text in cells.items():
        check_cell(is_text(text), location, columns[name], text, "a text that is not empty")
    column, advice = columns["label"], f", or pass --drop_labels '{label!s:.80}' or --problem regression"
    if kind == "number":
        return cells | {"label": _finite_number(location, column, label)}
    if kind == "name":
        return cells | {"label": _class_name(location, column, label, names, dropped, advice)}
    check_cell(isinstance(label, list), location, column, label, "a list, as in the first row")
    found = [_class_name(location, column, name, names, dropped, advice) for name in label]
    names_only = "the names or numbers of a text's labels, each once, not 0 or 1 for every label"
    check_cell(len(set(found)) == len(found), location, column, label, names_only)
    return cells | {"label": found}


def _class_name(
    location: str, column: str, value: Any, names: list[str] | None, dropped: Sequence[str] = (), advice: str = ""
) -> str:
    """The label or tag as a string; the number of a class becomes its name."""
    if names is None and isinstance(value, (str, int)) and str(value).strip():
        return str(value)
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    if value == -1:
        advice += "; if the split has no public labels, leave it out: --test_split none"
    known = f"one of {names}" if names else "the name or the number of a class"
    check_cell(str(value) in dropped, location, column, value, f"{known}{advice}")
    return str(value)


def _finite_number(location: str, column: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    check_cell(math.isfinite(number), location, column, value, "a finite number, for a regression")
    return number


def _without_labels(splits: DatasetDict, dropped: list[str]) -> DatasetDict:
    counts = Counter(name for data in splits.values() for _, name in _row_labels(data, "label") if name in dropped)
    if absent := [name for name in dropped if name not in counts]:
        raise ValueError(f"--drop_labels {' '.join(absent)}: no sample has this label; leave it out.")
    kept = splits.filter(
        lambda label: set(dropped).isdisjoint([label] if isinstance(label, str) else label), input_columns="label"
    )
    for split, data in splits.items():
        print(f"{split}: {len(data) - len(kept[split]):,} of {len(data):,} samples have a dropped label")
        if not len(kept[split]):
            raise ValueError(f"--drop_labels {' '.join(dropped)} leaves no sample of {split!r}; pass data with labels.")
    return kept


def label_names(splits: DatasetDict, column: str) -> list[str]:
    """The labels or tags of the training data, sorted, with `O` first; other splits may have no others."""
    if "train" not in splits:
        raise ValueError(f"The labels come from the split 'train', but there are only {list(splits)}; pass it too.")
    names = {name for _, name in _row_labels(splits["train"], column)}
    for split, data in splits.items():
        for row, name in _row_labels(data, column):
            if name not in names:
                raise ValueError(
                    f"Split {split!r}, row {row}: {name!r} does not occur in 'train', which has "
                    f"{', '.join(sorted(names)):.200}. Correct it, or pass training data with it."
                )
    if not names:
        raise ValueError(f"No row of the split 'train' has {column}; pass training data with two or more.")
    if len(names) == 1 and not isinstance(splits["train"][column][0], list):
        raise ValueError(f"All {column} of the split 'train' are {names.pop()!r}; a classifier needs two or more.")
    return sorted(names, key=lambda name: (name != "O", name))


def _row_labels(data: Dataset, column: str) -> Iterator[tuple[int, str]]:
    """Row number and name of each label."""
    batches = data.select_columns([column]).iter(batch_size=ROWS_AT_ONCE)
    for row, value in enumerate(chain.from_iterable(batch[column] for batch in batches)):
        for name in value if isinstance(value, list) else [value]:
            yield row, name


def take_samples(splits: DatasetDict, arguments: DataArguments) -> DatasetDict:
    """The samples that `train_fraction` and `max_*_samples` leave, in the order of the data."""
    taken = DatasetDict()
    for split, data in splits.items():
        is_training = split == "train"
        rows = training_share(len(data), arguments.train_fraction if is_training else 1.0)
        rows = rows[: arguments.max_train_samples if is_training else arguments.max_eval_samples]
        taken[split] = data if len(rows) == len(data) else data.select(rows)
        if len(rows) < len(data):
            print(f"{split}: {len(rows):,} of {len(data):,} samples are used")
    return taken


def training_share(count: int, fraction: float) -> list[int]:
    """Row numbers of a random share: the same in every run, and part of every larger share."""
    return sorted(np.random.default_rng(0).permutation(count)[: math.ceil(fraction * count)].tolist())
