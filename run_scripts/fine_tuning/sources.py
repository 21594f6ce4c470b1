"""Where the data of tasks come from: files of many formats, plain, `.gz` or `.zst`, and data sets; record by record.

A record is what stands under each name. Beside it is its place, for messages: that of the record, or of each word.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from datasets import (
    Dataset,
    DatasetDict,
    Features,
    NamedSplit,
    ReadInstruction,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError

from modeling_elmo.run_scripts.program.files import ROWS_AT_ONCE, numbered_lines
from modeling_elmo.tokenization import elmo_pretokenization

DEFAULT_TAGS = "tags"
CONLLU_COLUMNS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")

Place = str | list[str]
Record = tuple[Place, Mapping[str, Any]]
Formats = dict[str, tuple[Callable[..., Iterator[Record]], tuple[str, ...]]]  # by ending: reader, names of its options


@dataclass(kw_only=True)
class DataArguments:
    """Options of every script that trains a task."""

    dataset: str | None = field(
        default=None, metadata={"help": "Instead of files: a `datasets` data set, a folder or a Hub name."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    train_file: str | None = field(
        default=None, metadata={"help": "UTF-8 file of training data, also .gz or .zst; its name tells the format."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "The same, to choose a model by."})
    test_file: str | None = field(default=None, metadata={"help": "The same, to measure the chosen model."})
    train_split: str = field(
        default="train", metadata={"help": "Split of the data set, or parts of some: 'train[100:]'; none: without it."}
    )
    validation_split: str = field(default="validation", metadata={"help": "The same, to choose a model by."})
    test_split: str = field(default="test", metadata={"help": "The same, to measure the chosen model."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first ones alone."})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate on the first ones of each split alone."}
    )
    train_fraction: float = field(
        default=1.0, metadata={"help": "Train on a random share: the same whatever the seed, and part of larger ones."}
    )

    def __post_init__(self):
        if not 0 < self.train_fraction <= 1:
            raise ValueError(f"--train_fraction {self.train_fraction}: pass a number above 0, up to 1.")
        for name in ("max_train_samples", "max_eval_samples"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"--{name} {number}: pass at least 1.")


class Source(NamedTuple):
    """One split: a file, or rows of a data set."""

    name: str
    read: Callable[[], Iterator[Record]]  # from the begin each time
    data: Dataset | None = None

    def first(self) -> Mapping[str, Any]:
        for _, record in self.read():
            return record
        raise ValueError(f"There is no sample in {self.name}. Pass other data.")

    def names(self, column: str) -> list[str] | None:
        """Of the classes whose numbers the column of a data set holds."""
        feature = None if self.data is None else self.data.features[column]
        return getattr(getattr(feature, "feature", feature), "names", None)

    def convert(self, convert: Callable[[Place, Mapping[str, Any]], dict], features: Features, split: str) -> Dataset:
        """Each record through `convert`, in the cache of `datasets`."""
        files = [] if self.data is not None else [Path(self.name)]
        options = {"read": self.read, "convert": convert, "states": (*code_states(), *states_of(files))}
        try:
            return Dataset.from_generator(_converted, features, gen_kwargs=options, split=NamedSplit(split))
        except DatasetGenerationError as error:
            if isinstance(error.__cause__, ValueError):
                raise error.__cause__ from None
            raise


def states_of(files: Iterable[Path]) -> tuple[tuple[int, int], ...]:
    """What tells `datasets`, whose cache goes by arguments alone, that files changed: sizes and times of change."""
    return tuple((state.st_size, state.st_mtime_ns) for state in map(Path.stat, files))


def code_states() -> tuple[tuple[int, int], ...]:
    """The state of the code that makes rows from records: that of the programs and of the tokenizer."""
    folders = (Path(__file__).resolve().parents[1], Path(elmo_pretokenization.__file__).resolve().parent)
    return states_of(file for folder in folders for file in sorted(folder.rglob("*.py")))


def _converted(read: Callable[[], Iterator[Record]], convert: Callable, states: tuple) -> Iterator[dict]:
    return (convert(place, record) for place, record in read())


def sources(arguments: DataArguments, formats: Formats) -> dict[str, Source]:
    """Of the splits that were given; `arguments` has the options of the formats too."""
    named = {split: getattr(arguments, f"{split}_file") for split in ("train", "validation", "test")}
    files = {split: Path(file) for split, file in named.items() if file is not None}
    if bool(files) == (arguments.dataset is not None):
        raise ValueError("Pass either --train_file, --validation_file or --test_file, or --dataset NAME.")
    if arguments.dataset is not None:
        return _data_set(arguments)
    return {split: _file(path, f"--{split}_file", formats, arguments) for split, path in files.items()}


def _file(path: Path, option: str, formats: Formats, arguments: DataArguments) -> Source:
    if _suffix(path) not in formats:
        raise ValueError(f"{option} {path}: its ending tells no format; pass a file that ends in {', '.join(formats)}.")
    if not path.is_file():
        raise FileNotFoundError(f"{option} {path}: there is no such file.")
    read, names = formats[_suffix(path)]
    return Source(str(path), partial(read, path, **{name: getattr(arguments, name) for name in names}))


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz").removesuffix(".zst")).suffix


def _data_set(arguments: DataArguments) -> dict[str, Source]:
    folder, name = str(arguments.dataset), f"--dataset {arguments.dataset}"
    if any(Path(folder, file).is_file() for file in ("dataset_dict.json", "state.json")):  # by `save_to_disk`
        data = load_from_disk(folder)
        data = DatasetDict(train=data) if isinstance(data, Dataset) else data
    else:
        data = load_dataset(folder, arguments.dataset_config)
    wanted = {split: getattr(arguments, f"{split}_split") for split in ("train", "validation", "test")}
    found = {}
    for split, spec in wanted.items():
        if spec in data or spec not in ("none", split):
            part, place = _part(data, spec, name, f"--{split}_split"), f"{name}, {spec}"
            found[split] = Source(place, partial(_rows, part, place), part)
    if not found:
        raise ValueError(f"{name} has the splits {list(data)}; pass --train_split, --validation_split or --test_split.")
    return found


def _part(data: DatasetDict, spec: str, name: str, option: str) -> Dataset:
    sizes = {split: len(part) for split, part in data.items()}
    try:
        parts = ReadInstruction.from_spec(spec).to_absolute(sizes)
    except ValueError as error:
        raise ValueError(f"{name} has the splits {list(data)}; {option} {spec}: {error}") from error
    return concatenate_datasets([data[part.splitname].select(range(part.from_, part.to)) for part in parts])


def _rows(data: Dataset, name: str) -> Iterator[Record]:
    batches = data.iter(batch_size=ROWS_AT_ONCE)
    records = (dict(zip(batch, row, strict=True)) for batch in batches for row in zip(*batch.values(), strict=True))
    return ((f"{name}, row {number}", record) for number, record in enumerate(records))


def _sentences(
    path: Path, tokens_column: str, tags_column: str | None, word_column: int | None, comments: list[str]
) -> Iterator[Record]:
    """Of a file with a word and its tag in each line and blank lines between sentences."""
    is_conllu = _suffix(path) == ".conllu"
    word, tag = _column_numbers(path, word_column, tags_column, is_conllu)
    sentence: list[tuple[str, str, str]] = []
    for place, fields in _column_lines(path, (*comments, "#") if is_conllu else tuple(comments), max(word, tag) + 1):
        if fields and not (is_conllu and _is_no_word(place, fields[0])):
            sentence.append((place, fields[word], fields[tag].strip()))
        if not fields and sentence:
            places, tokens, tags = map(list, zip(*sentence, strict=True))
            yield places, {tokens_column: tokens, tags_column or DEFAULT_TAGS: tags}
            sentence = []


def _column_numbers(path: Path, word: int | None, tag: str | None, is_conllu: bool) -> tuple[int, int]:
    """From 0; -1 is the last."""
    names = CONLLU_COLUMNS if is_conllu else ()
    word = (2 if is_conllu else 1) if word is None else word
    tag = "upos" if tag is None and is_conllu else tag
    number = 0 if tag is None else names.index(tag) + 1 if tag in names else int(tag) if tag.isdecimal() else 0
    if word < 1 or (number < 1 and tag is not None):
        known = f"; a tag's also {', '.join(names)}" if names else ""
        raise ValueError(f"--word_column {word}, --tags_column {tag}: columns of {path} are named 1, 2, ...{known}.")
    return word - 1, number - 1


def _column_lines(path: Path, comments: tuple[str, ...], least: int) -> Iterator[tuple[str, list[str]]]:
    """Where each line stands, and its fields; there are none at the end of a sentence."""
    width = 0
    for number, line in numbered_lines(path):
        place = f"{path}, line {number}"
        if line.startswith(comments):
            continue
        if not line.strip(" \t") or line.startswith("-DOCSTART-"):
            yield place, []
            continue
        fields = line.split("\t") if "\t" in line else list(filter(None, line.split(" ")))
        width = width or len(fields)
        if len(fields) != width or width < max(least, 2):
            raise ValueError(
                f"{place} has {len(fields)} columns: {line!r:.80}. Pass a file with {max(width, least, 2)} in each: "
                "a word, its tag, and what else there is; name the begin of comments as --comments."
            )
        yield place, fields
    yield str(path), []


def _is_no_word(place: str, identifier: str) -> bool:
    """Whether it is the number of a word that is split below (3-4), or of one that is only understood (3.1)."""
    if not re.fullmatch(r"\d+([-.]\d+)?", identifier):
        raise ValueError(f"{place}: the first column of .conllu is a word's number, got {identifier!r:.80}.")
    return not identifier.isdecimal()


def _table(path: Path, column_names: list[str]) -> Iterator[Record]:
    rows = _csv_rows(path) if _suffix(path) == ".csv" else _tsv_rows(path)
    names = column_names or next(rows, (1, []))[1]
    if len(set(names)) < len(names):
        raise ValueError(f"{path} has the columns {names}; give each a name of its own.")
    for number, fields in rows:
        if len(fields) != len(names):
            raise ValueError(f"{path}, line {number} has {len(fields)} columns, but there are {len(names)}: {names}.")
        if fields == names:
            raise ValueError(f"{path}, line {number} holds the names of the columns; leave --column_names out.")
        yield f"{path}, line {number}", dict(zip(names, fields, strict=True))


def _tsv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Quotes are characters like others, as they often stand alone in such files."""
    return ((number, line.split("\t")) for number, line in numbered_lines(path) if line)


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader((f"{line}\n" for _, line in numbered_lines(path)), strict=True)
    number = 1
    try:
        for fields in reader:
            if fields:
                yield number, fields
            number = reader.line_num + 1  # a quoted field may hold line feeds
    except csv.Error as error:
        raise ValueError(f"{path}, line {number} is not CSV: {error}.") from error


def _json_records(path: Path) -> Iterator[Record]:
    """Of JSON lines; in `.json` also those of a list, or of the list `data` of an object."""
    read = _json_lines if _suffix(path) == ".jsonl" or _is_json_lines(path) else _json_list
    for place, record in read(path):
        if not isinstance(record, dict):
            raise ValueError(f"{place} is {record!r:.80}; pass objects, with a key for each column.")
        yield place, record


def _questions(path: Path) -> Iterator[Record]:
    """Of a file as SQuAD's, articles of paragraphs of questions, or with a record for each question."""
    for place, record in _json_records(path):
        if "paragraphs" not in record:
            yield place, record
            continue
        for number, paragraph in enumerate(_list_of(record, "paragraphs", str(place)), 1):
            where = f"{place}, paragraph {number}"
            for count, question in enumerate(_list_of(paragraph, "qas", where), 1):
                named = f"{path}, question {question['id']}" if "id" in question else f"{where}, question {count}"
                yield named, {"context": paragraph.get("context"), **question}


def _list_of(record: Mapping[str, Any], key: str, place: str) -> list[dict[str, Any]]:
    """Objects under a key."""
    values = record.get(key)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError(f"{place}: {key!r} is {values!r:.80}; it must be a list of objects, as in SQuAD's files.")
    return values


def _is_json_lines(path: Path) -> bool:
    """Whether the first line is a record of its own."""
    first = next((line for _, line in numbered_lines(path) if line.strip()), "{}")
    try:
        record = json.loads(first)
    except json.JSONDecodeError:
        return False
    return isinstance(record, dict) and not isinstance(record.get("data"), list)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in numbered_lines(path):
        if line.strip():
            yield f"{path}, line {number}", _parsed(line, f"{path}, line {number}")


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    whole = _parsed("\n".join(line for _, line in numbered_lines(path)), str(path))
    records = whole.get("data") if isinstance(whole, dict) else whole
    if not isinstance(records, list):
        raise ValueError(f"{path} holds no list of records; pass one, an object with one as `data`, or JSON lines.")
    return ((f"{path}, record {number}", record) for number, record in enumerate(records, 1))


def _parsed(text: str, place: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:  # half of a character may be written so, which no other format can hold
            json.dumps(value, ensure_ascii=False).encode()
    except (json.JSONDecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"{place} is not JSON: {error}.") from error
    return value


_COLUMNS = (_sentences, ("tokens_column", "tags_column", "word_column", "comments"))
_TABLE = (_table, ("column_names",))
_JSON: Formats = dict.fromkeys((".jsonl", ".json"), (_json_records, ()))
TAGGING_FORMATS: Formats = {
    **dict.fromkeys((".conll", ".bio", ".iob", ".iob2", ".conllu", ".tsv", ".txt"), _COLUMNS),
    **_JSON,
}
CLASSIFICATION_FORMATS: Formats = {".tsv": _TABLE, ".csv": _TABLE, **_JSON}
QUESTION_FORMATS: Formats = dict.fromkeys((".json", ".jsonl"), (_questions, ()))
