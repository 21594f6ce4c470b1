"""Rows and texts of data files, plain or compressed (`.gz`, `.zst`): words in columns, tables, JSON, lines.

Each row comes with its location, for error messages.

The readers are ours because `datasets.load_dataset` (5.2) changes data silently. In tables it fills the missing cells
of short rows with "", drops the first cell of every row if all rows have one cell too many, and splits rows at carriage
returns. In JSON it turns "2020-01-01" into a timestamp, and all integers of a column with a decimal into decimals. It
takes the beginning of an incomplete `.zst` file for the whole.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from modeling_elmo.run_scripts.program.files import numbered_lines, parse_json

Location = str | list[str]  # of a row, or of each word of a sentence
LocatedRow = tuple[Location, Mapping[str, Any]]
RowReader = Callable[[Path], Iterator[LocatedRow]]

CONLLU_COLUMNS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
DEFAULT_TAGS = "tags"
TABLE_SUFFIXES = (".tsv", ".csv")
WORD_SUFFIXES = (".conll", ".bio", ".iob", ".iob2", ".conllu")
COLUMN_SUFFIXES = (*WORD_SUFFIXES, ".tsv", ".txt")  # of a tagger's data
LONGEST_CELL = 2**31 - 1  # of CSV: the largest that Python takes on all systems; its default is 131,072 characters
BETWEEN_SENTENCES = ("-DOCSTART-", "#begin document", "#end document")  # lines of CoNLL-2003 and CoNLL-2012


def format_suffix(path: Path) -> str:
    """The ending that names the format, in lower case: `.csv` of `A.CSV.gz`."""
    return Path(path.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def column_rows(
    path: Path, tokens_column: str, tags_column: str | None, word_column: int | None, comments: list[str]
) -> Iterator[LocatedRow]:
    """Sentences of a file with a word and its tag in each line, and blank lines between sentences.

    The columns are separated by tabs or by spaces. `tokens_column` and `tags_column` name words and tags in the rows;
    `tags_column` is also the number of the tag's column, from 1, or its name in CoNLL-U. The options explain the rest.
    """
    word, tag = _column_indexes(path, word_column, tags_column)
    for sentence in _sentence_lines(path, comments, max(word + 1, tag + 1, 2)):
        tokens, tags = [fields[word] for _, fields in sentence], [fields[tag].strip() for _, fields in sentence]
        locations = [f"{path}, line {number}" for number, _ in sentence]
        yield locations, {tokens_column: tokens, tags_column or DEFAULT_TAGS: tags}


def _sentence_lines(path: Path, comments: list[str], least: int) -> Iterator[list[tuple[int, list[str]]]]:
    """Number and fields of the line of each word, by sentence."""
    is_conllu, width = format_suffix(path) == ".conllu", 0
    prefixes = (*comments, *("#" if is_conllu else ""))
    sentence: list[tuple[int, list[str]]] = []
    for number, line in chain(numbered_lines(path), [(0, "")]):
        if line.startswith(prefixes):
            continue
        if not line.strip(" \t") or line.startswith(BETWEEN_SENTENCES):
            if sentence:
                yield sentence
            sentence = []
            continue
        is_table = "\t" in line
        fields = [each.strip(" ") for each in line.split("\t")] if is_table else list(filter(None, line.split(" ")))
        width = width or len(fields)
        if len(fields) != width or width < least:
            found = f"{path}, line {number} has {len(fields)} columns, not {max(width, least)}: {line!r:.80}"
            raise ValueError(f"{found}. Correct it; a tagger's --comments names lines to skip.")
        if not (is_conllu and _is_range_or_empty_node(f"{path}, line {number}", fields[0])):
            sentence.append((number, fields))


def _column_indexes(path: Path, word: int | None, tag: str | None) -> tuple[int, int]:
    """Indexes of the word and of the tag; -1 is the last column."""
    names, first, last = (CONLLU_COLUMNS, 2, "upos") if format_suffix(path) == ".conllu" else ((), 1, None)
    word, tag = first if word is None else word, tag or last
    number = 0 if tag is None else names.index(tag) + 1 if tag in names else int(tag) if tag.isdecimal() else 0
    if word < 1 or (number < 1 and tag is not None):
        known = ", ".join(["1, 2, ...", *names])
        raise ValueError(f"{path} has no such column: --word_column {word}, --tags_column {tag}; pass {known}.")
    return word - 1, number - 1


def _is_range_or_empty_node(location: str, identifier: str) -> bool:
    """Whether the CoNLL-U line has the number of a multiword token (3-4) or of an empty node (3.1)."""
    if not re.fullmatch(r"\d+([-.]\d+)?", identifier):
        raise ValueError(f"{location}: the first column is {identifier!r:.80}; in .conllu it must be a word's number.")
    return not identifier.isdecimal()


def table_rows(path: Path, column_names: list[str]) -> Iterator[LocatedRow]:
    """Rows of a CSV or TSV file, whose first line is the header unless there are `column_names`."""
    return ((f"{path}, line {number}", row) for number, row in _numbered_rows(path, column_names))


def _numbered_rows(path: Path, column_names: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    rows = _numbered_cells(path)
    first, names = (0, column_names) if column_names else next(rows, (0, []))
    if len(set(names)) < len(names):
        raise ValueError(f"{path} has the columns {names}; give each column a different name.")
    for number, cells in rows:
        location = f"{path}, line {number}"
        if not cells and len(names) > 1:
            continue
        cells = cells or [""]  # of a table with one column
        if len(cells) != len(names):
            raise ValueError(f"{location} has {len(cells)} columns, not {len(names)}: {names}. Correct the line.")
        if cells == names and (column_names or len(names) > 1):
            advice = "leave out --column_names" if column_names else "remove the line, which repeats it"
            raise ValueError(f"{location} is a header; {advice}.")
        yield number, dict(zip(names, cells, strict=True))


def _numbered_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """First line and cells of each row; a blank line has none. In TSV files, quotes are ordinary characters."""
    lines = numbered_lines(path)
    if format_suffix(path) == ".tsv":
        yield from ((number, line.split("\t") if line else []) for number, line in lines)
        return
    csv.field_size_limit(LONGEST_CELL)
    reader, number = csv.reader((f"{line}\n" for _, line in lines), strict=True), 1
    try:
        for cells in reader:
            yield number, cells
            number = reader.line_num + 1  # a quoted cell may have line feeds
    except csv.Error as error:
        is_return = "new-line character" in str(error)
        reason = "a carriage return ends a line; end lines with line feeds" if is_return else error
        raise ValueError(f"{path}, line {number} is not CSV: {reason}.") from error


def json_rows(path: Path) -> Iterator[LocatedRow]:
    """Objects of JSON lines. A `.json` file may also be a list of objects, or an object with this list as `data`."""
    if format_suffix(path) == ".jsonl" or _begins_with_row(path):
        lines = ((f"{path}, line {number}", line) for number, line in numbered_lines(path) if line.strip())
        rows = ((location, _parsed_row(line, location)) for location, line in lines)
    else:
        rows = ((f"{path}, element {number}", row) for number, row in enumerate(_json_list(path), 1))
    for location, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{location} is {row!r:.80}; each row must be a JSON object, with a key for each column.")
        yield location, row


def _parsed_row(text: str, location: str) -> Any:
    """The value of a JSON text without the escape of half a surrogate pair, which data sets and tables cannot hold."""
    value = parse_json(text, location)
    try:
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"{location} is not JSON in UTF-8: {error}. Correct it.") from error
    return value


def _begins_with_row(path: Path) -> bool:
    try:
        row = parse_json(next((line for _, line in numbered_lines(path) if line.strip()), ""), path)
    except ValueError:
        return False
    return isinstance(row, dict) and not isinstance(row.get("data"), list)


def _json_list(path: Path) -> list[Any]:
    whole = _parsed_row("\n".join(line for _, line in numbered_lines(path)), str(path))
    rows = whole.get("data") if isinstance(whole, dict) else whole
    if not isinstance(rows, list):
        raise ValueError(f"{path} has no list of rows; pass a list, an object with a list as `data`, or JSON lines.")
    return rows


def numbered_texts(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    """Line numbers from 1, each with the text that begins there, or with a list of words.

    | ending | texts |
    |---|---|
    | `.jsonl` | values of the key `column` |
    | `.csv`, `.tsv` | cells of `column`, which the first line names |
    | `.conll`, `.conllu`, `.bio`, `.iob`, `.iob2` | lists of words: the first column or `form`; or number `column` |
    | others | lines |
    """
    return TEXT_READERS.get(format_suffix(path), _line_texts)(path, column)


def _line_texts(path: Path, column: str) -> Iterator[tuple[int, str]]:
    return ((number, line.strip()) for number, line in numbered_lines(path))


def _json_texts(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    for number, line in numbered_lines(path):
        text = line.strip()
        record = parse_json(text, f"{path}, line {number}") if text else {column: ""}
        if not isinstance(record, dict) or column not in record:
            raise ValueError(f"{path}, line {number} has no key {column!r}: {text:.80} Pass --text_column.")
        yield number, record[column]


def _table_texts(path: Path, column: str) -> Iterator[tuple[int, str]]:
    for number, row in _numbered_rows(path, []):
        if column not in row:
            raise ValueError(f"{path} has no column {column!r}, only {list(row)}; pass --text_column.")
        yield number, row[column].strip()


def _column_texts(path: Path, column: str) -> Iterator[tuple[int, list[str]]]:
    names = CONLLU_COLUMNS if format_suffix(path) == ".conllu" else ()
    # Other names are of other files: a corpus may have several kinds.
    number = names.index(column) + 1 if column in names else int(column) if column.isdecimal() else None
    if number == 0:
        raise ValueError(f"{path} has no column {column}; pass --text_column {', '.join(['1, 2, ...', *names])}.")
    word, _ = _column_indexes(path, number, None)
    for sentence in _sentence_lines(path, [], word + 1):
        yield sentence[0][0], [fields[word] for _, fields in sentence]


JSON_FORMATS: dict[str, RowReader] = {".jsonl": json_rows, ".json": json_rows}
TABLE_FORMATS: dict[str, RowReader] = dict.fromkeys(TABLE_SUFFIXES, partial(table_rows, column_names=[]))
ROW_READERS = TABLE_FORMATS | JSON_FORMATS
TEXT_READERS: dict[str, Callable[[Path, str], Iterator[tuple[int, Any]]]] = {
    ".txt": _line_texts,
    ".jsonl": _json_texts,
    **dict.fromkeys(TABLE_SUFFIXES, _table_texts),
    **dict.fromkeys(WORD_SUFFIXES, _column_texts),
}
TEXT_SUFFIXES = tuple(TEXT_READERS)
