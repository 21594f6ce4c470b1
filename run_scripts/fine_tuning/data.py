"""The data of a task: the splits of files or of a data set, as a `DatasetDict` of checked rows, and their labels.

A task reads the rows of each split with `split_sources`, and checks and converts them one by one (`Source.convert`).
They are kept in the cache of `datasets`, and read again when their file changes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from datasets import Dataset, DatasetDict, Features
from datasets.exceptions import DatasetGenerationError
from transformers.utils import logging

from modeling_elmo.tokenization import elmo_pretokenization

from ..program.command_line import option, refuse_unread
from ..program.data_files import LocatedRow, Location, RowReader, format_suffix
from ..program.files import digest, refuse_folder_or_pipe
from ..program.texts import ROWS_AT_ONCE, load_dataset, refuse_training_data, saved_splits, split_parts

logger = logging.get_logger(__name__)

DATA_SPLITS = ("train", "validation", "test")


@dataclass(kw_only=True)
class DataArguments:
    """Options of every program that trains a task."""

    train_file: str | None = option(None, "Training file.")
    validation_file: str | None = option(None, "Validation file, used to select the checkpoint.")
    test_file: str | None = option(None, "Test file, used to score the selected checkpoint.")
    dataset: str | None = option(None, "Data set to use instead of files: a folder, or a name on the Hub.")
    dataset_config: str | None = option(None, "Configuration of the data set.")
    train_split: str = option(
        "train", "Training split of the data set or of the files, or a part: 'train[:90%%]'; 'none' for none."
    )
    validation_split: str = option(
        "validation", "Validation split, used to select the checkpoint; 'train[90%%:]' is a part of another."
    )
    test_split: str = option("test", "Test split, used to score the selected checkpoint.")
    max_train_samples: int | None = option(None, "Maximum number of training samples; the first are used.")
    max_eval_samples: int | None = option(None, "Maximum number of samples in each other split; the first are used.")
    train_fraction: float = option(
        1.0, "Random share of the training data; the same for all seeds, and part of larger shares."
    )


class Source(NamedTuple):
    """One split of the data."""

    name: str  # for messages: a file, or a data set and its split
    read: Callable[[], Iterator[LocatedRow]]
    features: Features | None = None  # of a data set
    files: tuple[Path, ...] = ()

    def first(self) -> Mapping[str, Any]:
        for _, row in self.read():
            return row
        raise ValueError(f"{self.name} has no samples; pass other data.")

    def check_columns(self, columns: Mapping[str, str]):
        """Raises an error if a column is missing; the option `--text_column` names the column of `text`, and so on."""
        given = list(self.first())
        for name, column in columns.items():
            if column not in given:
                raise ValueError(f"{self.name} has no column {column!r}, only {given}; pass --{name}_column.")

    def tell_unread(self, columns: Iterable[str], advice: str):
        unread = [column or "''" for column in self.first() if column not in columns]  # pandas' index has no name
        if unread:
            print(f"{self.name}: not read: {', '.join(unread)}; {advice}")

    def class_names(self, column: str) -> list[str] | None:
        """Names of the classes, if a column of a data set has the numbers of classes."""
        feature = None if self.features is None else self.features[column]
        return getattr(getattr(feature, "feature", feature), "names", None)

    def convert(self, convert: Callable[[Any, Mapping[str, Any]], dict], features: Features, split: str) -> Dataset:
        """The rows after `convert(location, row)`, from the cache of `datasets` if it has them; at least one."""

        def rows(states: tuple) -> Iterator[dict[str, Any]]:
            for location, row in self.read():
                yield convert(location, row)

        self.first()
        states = (*code_states(), digest(path.read_bytes() for path in self.files))
        try:
            return Dataset.from_generator(
                rows, features, gen_kwargs={"states": states}, split=datasets.NamedSplit(split)
            )
        except DatasetGenerationError as error:
            if isinstance(error.__cause__, (ValueError, OSError)):  # of the data, or of a full disk
                raise error.__cause__ from None
            raise


def code_states() -> tuple[tuple[int, int], ...]:
    """Size and modification time of our code.

    `datasets` finds cached data by the arguments of a function. These states are one of them, so that new code is not
    answered with old data.
    """
    states = []
    for folder in (Path(__file__).resolve().parents[1], Path(elmo_pretokenization.__file__).resolve().parent):
        for file in sorted(folder.rglob("*.py")):
            state = file.stat()
            states.append((state.st_size, state.st_mtime_ns))
    return tuple(states)


def split_sources(arguments: DataArguments, formats: Mapping[str, RowReader]) -> dict[str, Source]:
    """The source of each split that was given; `formats` has the reader of each file ending."""
    files = {}
    for split in DATA_SPLITS:
        file = getattr(arguments, f"{split}_file")
        if file is not None:
            files[split] = Path(file)
    if bool(files) == (arguments.dataset is not None):
        raise ValueError("Pass either --train_file, --validation_file or --test_file, or --dataset NAME.")
    wholes: dict[str, Source] = {}
    if arguments.dataset is None:
        refuse_unread(arguments, ("dataset_config",), "without --dataset; leave it out.")
        name = ", ".join(map(str, files.values()))
        for split, path in files.items():
            wholes[split] = _file_source(path, f"--{split}_file", formats)
    else:
        name = f"--dataset {arguments.dataset}"
        for split, part in _load(str(arguments.dataset), arguments.dataset_config).items():
            place = f"{name}, {split}"
            wholes[split] = Source(place, partial(_dataset_rows, part, place), part.features)
    given = {}
    for split in DATA_SPLITS:
        expression = getattr(arguments, f"{split}_split")
        if expression in wholes or expression not in ("none", split):
            given[split] = expression
    absent = [split for split in DATA_SPLITS if split not in given and getattr(arguments, f"{split}_split") == split]
    if not given:
        options = " or ".join(f"--{split}_split" for split in absent or DATA_SPLITS)
        raise ValueError(f"{name} has the splits {list(wholes)}; pass {options}.")
    if absent:
        _tell_unread_splits(name, wholes, given, absent)
    for split in ("validation", "test"):
        if {split, "train"} <= given.keys():
            refuse_training_data(given[split], f"--{split}_split", given["train"], "--train_split")
    parts = {}
    for split, expression in given.items():
        parts[split] = _part(wholes, expression, f"{name}; --{split}_split {expression}")
    return parts


def _tell_unread_splits(name: str, wholes: Iterable[str], given: Mapping[str, str], absent: Iterable[str]):
    """Says which splits no expression names, such as `dev`, where splits with the default names are absent."""
    parts = "+".join(given.values()).split("+")
    read = {part.split("[")[0].strip() for part in parts}
    unread = [split for split in wholes if split not in read]
    if unread:
        options = " or ".join(f"--{split}_split" for split in absent)
        print(f"{name}: splits not read: {', '.join(unread)}; {options} may name one")


def converted_splits(
    sources: Mapping[str, Source], convert: Callable[[Any, Mapping[str, Any]], dict], features: Features
) -> DatasetDict:
    """All splits after `convert(location, row)`."""
    data = DatasetDict()
    for split, source in sources.items():
        data[split] = source.convert(convert, features, split)
    return data


def _part(wholes: Mapping[str, Source], expression: str, name: str) -> Source:
    """The split, or the parts of splits, that an expression such as `train[:80%]+extra` names."""
    if expression in wholes:
        return wholes[expression]
    sizes = {}
    for split, source in wholes.items():
        sizes[split] = sum(1 for _ in source.read())
    parts = split_parts(expression, sizes, name)
    sources = [wholes[part.splitname] for part in parts]
    features = sources[0].features
    if any(source.features != features for source in sources):
        raise ValueError(f"{name}: the splits have different columns or classes; pass one of them.")

    def read() -> Iterator[LocatedRow]:
        for source, part in zip(sources, parts, strict=True):
            yield from islice(source.read(), part.from_, part.to)

    files = chain.from_iterable(source.files for source in sources)
    return Source(name, read, features, tuple(files))


def _file_source(path: Path, option: str, formats: Mapping[str, RowReader]) -> Source:
    refuse_folder_or_pipe(path, f"{option} {path}")
    suffix = format_suffix(path)
    if suffix not in formats:
        raise ValueError(f"{option} {path} has an unknown ending; pass a file that ends in {', '.join(formats)}.")
    if not path.is_file():
        raise FileNotFoundError(f"{option} {path} does not exist; pass an existing file.")
    return Source(str(path), partial(formats[suffix], path), files=(path,))


def _load(folder: str, config: str | None) -> Mapping[str, Dataset]:
    return saved_splits(folder, config) or load_dataset(folder, config, f"--dataset {folder}")


def _dataset_rows(data: Dataset, name: str) -> Iterator[LocatedRow]:
    number = 0
    for batch in data.with_format(None).iter(batch_size=ROWS_AT_ONCE):  # a saved data set may have the format of numpy
        for cells in zip(*batch.values(), strict=True):
            yield f"{name}, row {number}", dict(zip(batch, cells, strict=True))
            number += 1


def check_cell(fits: Any, location: Location, column: str, value: Any, needed: str):
    """Raises an error that names the row, the column, its value and what is needed, unless the value fits."""
    if not fits:
        if value is None and str(location).startswith("--dataset"):
            needed += " (`datasets` reads cells of CSV such as None and NA as empty; --train_file does not)"
        raise ValueError(f"{location}: `{column}` is {value!r:.80}; it must be {needed}.")


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def sentence_of(location: Location, row: Mapping[str, Any], column: str = "tokens") -> tuple[list[str], list[str]]:
    """The words of a row, and the location of each."""
    words: Any = row.get(column)
    first = location[0] if isinstance(location, list) else location
    check_cell(isinstance(words, list) and words, first, column, words, "a list of words")
    places = location if isinstance(location, list) else [location] * len(words)
    for place, word in zip(places, words, strict=True):
        check_cell(isinstance(word, str) and word, place, column, word, "non-empty words")
    return words, places


def continues(before: str, tag: str) -> bool:
    """Whether `I-TYPE` continues the tag before it."""
    return before in (tag, f"B{tag[1:]}")


def class_name(
    location: str, column: str, value: Any, names: list[str] | None, dropped: Iterable[str] = (), advice: str = ""
) -> str:
    """The label or tag as a string; the number of a class becomes its name."""
    if names is None and isinstance(value, (str, int)):
        name = str(value).strip()
        if name:
            return name
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    if value == -1:
        advice += "; if the split has no public labels, leave it out: --test_split none"
    known = f"one of {names}" if names else "the name or the number of a class"
    check_cell(str(value) in dropped, location, column, value, f"{known}{advice}")
    return str(value)


def training_labels(splits: DatasetDict, column: str, ignored: Iterable[str] = ()) -> list[str]:
    """The labels or tags of the training data without the ignored ones, sorted, with `O` first."""
    if "train" not in splits:
        raise ValueError(f"The labels come from the split 'train', but there are only {list(splits)}; pass it too.")
    labels = sorted({name for _, name in row_labels(splits["train"], column)}.difference(ignored))
    if not labels:
        raise ValueError(f"No row of the split 'train' has {column}; pass training data with two or more.")
    if "O" in labels:
        labels.remove("O")
        labels.insert(0, "O")
    return labels


def scored_labels(splits: DatasetDict, column: str, ignored: Iterable[str] = ()) -> list[str]:
    """As `training_labels`, with a warning about other labels in other splits, which count as errors."""
    labels = training_labels(splits, column, ignored)
    for split, data in splits.items():
        unknown_labels(data, column, [*labels, *ignored], f"Split {split!r}", "'train'")
    return labels


def unknown_labels(data: Dataset, column: str, labels: list[str], place: str, owner: str) -> dict[str, int]:
    """The numbers of labels in `place` that `owner`, the training data or a model, lacks; a warning names them."""
    counts = Counter(name for _, name in row_labels(data, column))
    known = {*labels}
    unknown = {name: count for name, count in counts.most_common() if name not in known}
    shown = ", ".join(f"{name} ({count:,})" for name, count in unknown.items())
    if unknown and len(unknown) == len(counts):
        raise ValueError(
            f"{place} has none of the labels of {owner} ({', '.join(labels):.200}), but {shown:.200}. Correct them, or "
            "pass other data."
        )
    if unknown:
        logger.warning(
            f"{place} has labels that do not occur in {owner}: {shown:.200}. A model cannot find them, so they count "
            "as errors. Correct them, or train on data with them."
        )
    return unknown


def add_counts(counts: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(counts) + Counter(others))


def label_names(splits: DatasetDict, column: str) -> list[str]:
    """The same where other splits may have no other labels, because the model reads them."""
    labels = training_labels(splits, column)
    known = {*labels}
    for split, data in splits.items():
        for row, name in row_labels(data, column):
            if name not in known:
                raise ValueError(
                    f"Split {split!r}, row {row}: {name!r} does not occur in 'train', which has "
                    f"{', '.join(labels):.200}. Correct it, or pass training data with it."
                )
    return labels


def row_labels(data: Dataset, column: str) -> Iterator[tuple[int, str]]:
    """Row number and name of each label, of which a row has one, a list, or lists."""

    row = 0
    for batch in data.select_columns([column]).iter(batch_size=ROWS_AT_ONCE):
        for value in batch[column]:
            for name in _flattened(value):
                yield row, name
            row += 1


def _flattened(value: Any) -> Iterator[str]:
    if not isinstance(value, list):
        yield value
        return
    for part in value:
        yield from _flattened(part)


def take_samples(splits: DatasetDict, arguments: DataArguments) -> DatasetDict:
    """The samples that `train_fraction` and `max_*_samples` leave, in the order of the data."""
    taken = DatasetDict()
    for split, data in splits.items():
        if split == "train":
            rows = training_share(len(data), arguments.train_fraction)[: arguments.max_train_samples]
        else:
            rows = list(range(len(data)))[: arguments.max_eval_samples]
        taken[split] = data
        if len(rows) < len(data):
            taken[split] = data.select(rows)
            print(f"{split}: {len(rows):,} of {len(data):,} samples are used")
    return taken


def training_share(count: int, fraction: float) -> list[int]:
    """Row numbers of a random share: the same in every run, and part of every larger share."""
    shuffled = np.random.default_rng(0).permutation(count).tolist()
    number = math.ceil(round(fraction * count, 9))  # 0.07 * 100 is 7.000000000000001
    return sorted(shuffled[:number])
