"""The lines of a corpus, from a file or a data set; the groups and batches in which they are embedded."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers.utils import logging

from ..program.command_line import refuse_unread
from ..program.data_files import (
    FASTA_SUFFIXES,
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    files_of,
    format_suffix,
    numbered_rows,
)
from ..program.sentences import check_language, sentences_of, text_sentences, warn_of_wrapped_lines
from ..program.texts import TextArguments, dataset_texts, numbered_lines

logger = logging.get_logger(__name__)

LineUnit = Literal["word", "character"]  # what a token is
NUM_MARKERS = 2  # <S> and </S>
OUTPUT_COLUMNS = ("name", "file", "line", "text", "tokens", "vectors")  # of Parquet
TOKEN = re.compile(r"\w+|[^\w\s]")


class InputLine(NamedTuple):
    """A sentence.

    `words` is `None` if the tokenizer splits the text, and `name` if it is not from FASTA. `file` and `number`, of the
    line in which it begins, are there where the place of an entry in the output is not that of a line in one file.
    `columns` are the other cells of its row in a table, by their names, where they are kept.
    """

    text: str
    words: list[str] | None
    name: str | None = None
    file: str | None = None
    number: int | None = None
    columns: dict[str, str | None] | None = None

    @property
    def sentence(self) -> str | list[str]:
        """What the tokenizer reads: the text that it splits, or the words."""
        return self.text if self.words is None else self.words


def open_lines(
    arguments: TextArguments,
    patterns: Sequence[str],
    is_raw_text: bool,
    unit: LineUnit,
    keeps_columns: bool = False,
) -> Callable[[], Iterator[InputLine]]:
    """A function that reads the lines of files or of `arguments.dataset`.

    With `arguments.split_sentences`, it reads sentences, and there is none for a blank line.

    Args:
        keeps_columns: whether lines have the other columns of all tables among the files, `None` in other files.
    """
    if bool(patterns) == (arguments.dataset is not None):
        raise ValueError("Pass either --input FILE ... or --dataset NAME.")
    check_language(arguments.split_sentences)
    as_line = partial(to_line, is_raw_text=is_raw_text, unit=unit)
    if not patterns:
        texts, _ = dataset_texts(arguments)
        return partial(_lines_of_dataset, arguments, texts, as_line)
    refuse_unread(arguments, ("dataset_config", "split", "streaming"), "without --dataset; leave it out.")
    files = _input_files(patterns, is_raw_text)
    if arguments.split_sentences is None:
        warn_of_wrapped_lines(files)
    columns = other_columns(files, arguments.text_column) if keeps_columns else []
    return partial(_lines_of_files, arguments, files, columns, as_line)


def _input_files(patterns: Sequence[str], is_raw_text: bool) -> list[Path]:
    """The files of `--input`: texts, or FASTA files."""
    files = list(map(Path, files_of(patterns)))
    known = (*TEXT_SUFFIXES, *FASTA_SUFFIXES)
    for path in files:
        suffix = format_suffix(path)
        if suffix not in known and path.suffix.lower() == suffix:
            raise ValueError(f"--input {path}: unknown suffix {suffix!r}; pass {', '.join(known)}, .gz or .zst.")
    fasta_files = list(filter(_is_fasta, files))
    if fasta_files and is_raw_text:
        raise ValueError(
            f"--input {fasta_files[0]} has sequences, whose tokens are single letters; leave out --raw_text."
        )
    if len(fasta_files) not in (0, len(files)):
        raise ValueError("--input has FASTA files, whose records have names, and texts. Pass one kind at a time.")
    return files


def _is_fasta(path: Path) -> bool:
    return format_suffix(path) in FASTA_SUFFIXES


def _lines_of_dataset(
    arguments: TextArguments, texts: Callable[[], Iterable[Any]], as_line: Callable[[str, Any], InputLine]
) -> Iterator[InputLine]:
    language = arguments.split_sentences
    numbered: Iterable[tuple[int, Any]] = enumerate(texts())
    if language is not None:
        numbered = sentences_of(numbered, language, are_lines=False)
    for row, text in numbered:
        line = as_line(f"{arguments.dataset}, row {row}", text)
        if language is not None:
            line = line._replace(file=arguments.dataset, number=row)
        yield line


def _lines_of_files(
    arguments: TextArguments, files: Sequence[Path], columns: Sequence[str], as_line: Callable[[str, Any], InputLine]
) -> Iterator[InputLine]:
    has_places = len(files) > 1 or arguments.split_sentences is not None
    files_of_names: dict[str, str] = {}
    for path in files:
        lines = fasta_records(path) if _is_fasta(path) else _lines_of_texts(arguments, path, columns, as_line)
        for number, line in lines:
            if has_places:
                line = line._replace(file=str(path), number=number)
            if has_places and line.name is not None:
                other = files_of_names.setdefault(hdf5_name(line.name), str(path))
                if other != str(path):
                    raise ValueError(f"{path}: {other} has the name {line.name!r:.60} too (/ is _); change it.")
            yield line


def _lines_of_texts(
    arguments: TextArguments, path: Path, columns: Sequence[str], as_line: Callable[[str, Any], InputLine]
) -> Iterator[tuple[int, InputLine]]:
    """The lines of a file, each with its number."""
    cells = cells_of_lines(path)
    for number, text in text_sentences(path, arguments.text_column, arguments.split_sentences):
        line = as_line(f"{path}, line {number}", text)
        if columns:
            row = cells(number)
            line = line._replace(columns={name: row.get(name) for name in columns})
        yield number, line


def other_columns(files: Iterable[Path], text_column: str) -> list[str]:
    """The columns of all tables, without that of the text, and without those that the output has itself."""
    names: dict[str, None] = {}
    for path in files:
        if format_suffix(path) not in TABLE_SUFFIXES:
            continue
        _, row = next(numbered_rows(path), (0, {}))
        names |= dict.fromkeys(row)
        names.pop(text_column, None)
        for name in [name for name in row if name in names and name in OUTPUT_COLUMNS]:
            logger.warning(f"{path}: the column {name!r} is left out, because the output has one of this name itself.")
            names.pop(name)
    return list(names)


def cells_of_lines(path: Path) -> Callable[[int], dict[str, str]]:
    """A function that returns the row of a table that begins in a line; a later call asks for a later row, or the same.

    Rows of other files have no cells.
    """
    rows = numbered_rows(path) if format_suffix(path) in TABLE_SUFFIXES else iter(())
    current: tuple[int, dict[str, str]] = (0, {})

    def row_of(number: int) -> dict[str, str]:
        nonlocal current
        while current[0] < number:
            current = next(rows, (number, {}))
        return current[1]

    return row_of


def to_line(where: str, value: Any, is_raw_text: bool, unit: LineUnit) -> InputLine:
    """A sentence, given as a text, or as a list of words, which `is_raw_text` leaves as they are."""
    if isinstance(value, str):
        text = value.strip()
        words = None if is_raw_text else text.split()
    elif isinstance(value, list) and all(isinstance(word, str) for word in value):
        text = " ".join(value)
        words = value
    else:
        raise ValueError(f"{where}: the sentence is {value!r}; pass a text or a list of words.")
    if unit == "character" and words is not None:
        words = list("".join(words))
    return InputLine(text, words)


def fasta_records(path: Path) -> Iterator[tuple[int, InputLine]]:
    """The records of a FASTA file, each with the line of its header.

    A record is a header `>NAME description`, then residues on any number of lines.
    """
    name = ""
    residues = ""
    lines = {}  # of the headers, by name
    for number, line in chain(numbered_lines(path), [(0, ">")]):
        if not line.startswith(">"):
            letters = "".join(line.split())
            residues += letters
            if letters and not (name and re.fullmatch(r"[A-Za-z*.-]+", letters)):
                raise ValueError(f"{path}, line {number} is {line!r:.60}; below >NAME, write letters, *, - and . only.")
            continue
        if name and not residues:
            raise ValueError(f"{path}: the record {name!r:.80} has no residues; complete or remove it.")
        if name:
            yield lines[hdf5_name(name)], InputLine(residues, list(residues), name)
        if not number:  # the end of the file
            return
        residues = ""
        header = re.fullmatch(r">\s*(\S*\w\S*)(\s.*)?", line)
        name = header[1] if header else ""
        if not name.isprintable() or not name or "\r" in line:
            raise ValueError(f"{path}, line {number} is {line!r:.80}; write >NAME, and end the line in LF.")
        first = lines.setdefault(hdf5_name(name), number)
        if first != number:
            raise ValueError(f"{path}, line {number}: line {first} has the name {name!r:.60} too (/ is _); change it.")


def hdf5_name(name: str) -> str:
    """The name of a record in HDF5, where a slash would make a group."""
    return name.replace("/", "_")


def group_by_tokens(lines: Iterable[InputLine], num_tokens: int) -> Iterator[list[InputLine]]:
    """Groups consecutive lines of at least `num_tokens` tokens together; the last group may have fewer."""
    group = []
    size = 0
    for line in lines:
        group.append(line)
        words = line.words
        if words is None:
            words = TOKEN.findall(line.text)  # the tokenizer takes much longer, and every process groups all lines
        size += NUM_MARKERS + len(words)
        if size >= num_tokens:
            yield group
            group = []
            size = 0
    if group:
        yield group


def length_sorted_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices by decreasing length, in batches of at most `batch_tokens` tokens with padding, or of one index."""
    batch = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
