"""Rows and texts of data files, plain or compressed (`.gz`, `.zst`): words in columns, tables, JSON, lines.

Each row comes with its location, for error messages.

The readers are ours because `datasets.load_dataset` (5.2) changes data silently. In tables it fills the missing cells
of short rows with "", drops the first cell of every row if all rows have one cell too many, and splits rows at carriage
returns. In JSON it turns "2020-01-01" into a timestamp, and all integers of a column with a decimal into decimals. It
takes the beginning of an incomplete `.zst` file for the whole.
"""

import csv
import glob
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from transformers.utils import logging

from .command_line import refuse_names_not_utf8
from .files import parse_json, refuse_folder_or_pipe
from .texts import numbered_lines

logger = logging.get_logger(__name__)

Location = str | list[str]  # of a row, or of each word of a sentence
LocatedRow = tuple[Location, Mapping[str, Any]]
RowReader = Callable[[Path], Iterator[LocatedRow]]

CONLLU_COLUMNS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
FASTA_SUFFIXES = (".fasta", ".fa", ".faa")
DEFAULT_TAGS = "tags"
TABLE_SUFFIXES = (".tsv", ".csv")
WORD_SUFFIXES = (".conll", ".bio", ".iob", ".iob2", ".conllu")
COLUMN_SUFFIXES = (*WORD_SUFFIXES, ".tsv", ".txt")  # of a tagger's data
LONGEST_CELL = 2**31 - 1  # of CSV: the largest that Python takes on all systems; its default is 131,072 characters
JUDGED_SENTENCES = 100  # whether their first column has words
RANGE_OR_EMPTY_NODE = re.compile(r"\d+[-.]\d+")  # of CoNLL-U: a multiword token 3-4, or a node 3.1
# A cell with quotes inside, as csv, pandas and Excel write it (doubled quotes), and R (with a backslash).
QUOTED_CELLS = {'""': r'"[^"]*(?:""[^"]*)*"', '\\"': r'"[^"]*(?:(?<=\\)"[^"]*)*"'}
ROW_CELLS = {quote: re.compile(rf'(?:(?<=\t)|\A)({cell}|[^"\t]*)(?=\t|\Z)') for quote, cell in QUOTED_CELLS.items()}
# What R and csv.QUOTE_NONNUMERIC leave without quotes: numbers, dates, truth values, and what is missing.
NOT_QUOTED = re.compile(r"(?i)\s*|na|nan|nat|none|null|true|false|[-+]?inf|[-+]?[0-9][-0-9.,:/ t+]*(?:e[-+]?[0-9]+)?z?")
TAG = re.compile(r"O|[BI]-\S+")
COUNTED = re.compile(r"((?:.*[\W_])?)([0-9]{1,9})\W?")  # 1, 1., 2_1, s2-1; but not w1
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
    sentences = _sentence_lines(path, comments, max(word + 1, tag + 1, 2))
    if word_column is None:
        sentences = _with_words_first(path, sentences, "--word_column", least=3)  # words, tags and others
    for sentence in sentences:
        locations = []
        tokens = []
        tags = []
        for number, fields in sentence:
            locations.append(f"{path}, line {number}")
            tokens.append(fields[word])
            tags.append(fields[tag].strip())
        yield locations, {tokens_column: tokens, tags_column or DEFAULT_TAGS: tags}


def _sentence_lines(path: Path, comments: list[str], least: int) -> Iterator[list[tuple[int, list[str]]]]:
    """Number and fields of the line of each word, by sentence."""
    is_conllu = format_suffix(path) == ".conllu"
    prefixes = (*comments, "#") if is_conllu else tuple(comments)
    width = 0
    sentence: list[tuple[int, list[str]]] = []
    for number, line, fields in chain(column_lines(path), [(0, "", [])]):
        if line.startswith(prefixes):
            continue
        if not line.strip(" \t") or line.startswith(BETWEEN_SENTENCES):
            if sentence:
                yield sentence
            sentence = []
            continue
        width = width or len(fields)
        if len(fields) != width or width < least:
            needed = max(width, least)
            raise ValueError(
                f"{path}, line {number} has {len(fields)} columns, not {needed}: {line!r:.80}. Correct it; a tagger's "
                "--comments names lines to skip."
            )
        if not (is_conllu and _is_range_or_empty_node(f"{path}, line {number}", fields[0])):
            sentence.append((number, fields))


def column_lines(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Number, text and cells of each line, which are separated by tabs if the line has one, else by spaces."""
    quote = quotes_of_cells(path, lines_are_rows=True)
    for number, line in numbered_lines(path):
        if "\t" not in line:
            yield number, line, list(filter(None, line.split(" ")))
            continue
        cells = line.split("\t") if quote is None else unquoted_cells(line, quote)
        yield number, line, [cell.strip(" ") for cell in cells]


def _with_words_first(
    path: Path, sentences: Iterator[list[tuple[int, list[str]]]], option: str, least: int
) -> Iterator[list[tuple[int, list[str]]]]:
    """The same sentences, if the first of `least` columns or more may have their words; `option` names another."""
    start = list(islice(sentences, JUDGED_SENTENCES))
    if not start or format_suffix(path) == ".conllu":
        return chain(start, sentences)
    number, first_row = start[0][0]
    rows = [[fields for _, fields in sentence] for sentence in start]
    reason = not_words(rows) if len(first_row) >= least else None
    if reason is None and len(first_row) > 1:
        reason = has_tags(rows)
    if reason is not None:
        columns = ", ".join(f"{column}: {cell!r:.30}" for column, cell in enumerate(first_row, 1))
        others = ", and --tags_column" if option == "--word_column" else ""
        raise ValueError(
            f"{path}: the first column {reason}; line {number} has the columns {columns:.300}. Pass {option} with the "
            f"number of the column of the words (1 if it is the first){others}."
        )
    return chain(start, sentences)


def not_words(sentences: list[list[list[str]]]) -> str | None:
    """Why the first column of sentences, each a list of rows of cells, cannot have their words; `None` if it may."""
    several = []
    for sentence in sentences:
        words = [row for row in sentence if not RANGE_OR_EMPTY_NODE.fullmatch(row[0])]
        if len(words) > 1:
            several.append(words)
    if not several:
        return None
    firsts = [[row[0] for row in words] for words in several]
    if all(map(_count_up, firsts)):
        return "counts the words of each sentence"
    rows = list(chain.from_iterable(several))
    distinct = [len(set(column)) for column in zip(*rows, strict=False)]
    has_one_name = all(len(set(cells)) == 1 for cells in firsts)
    if has_one_name and len(rows) > 2 and max(distinct) > distinct[0]:
        return f"repeats {firsts[0][0]!r:.60} in all words of a sentence"
    return None


def _count_up(cells: list[str]) -> bool:
    """Whether the last numbers in the cells count up, and what is before them is equal: 1 and 2, or 7_1 and 7_2."""
    counters = set()
    for place, cell in enumerate(cells):
        part = COUNTED.fullmatch(cell)
        if part is None:
            return False
        counters.add((part[1], int(part[2]) - place))
    return len(counters) == 1


def has_tags(sentences: list[list[list[str]]]) -> str | None:
    """Why the first column of sentences has tags, and not words; `None` if it may have words."""
    rows = list(chain.from_iterable(sentences))
    first = {row[0] for row in rows}
    if _are_tags(first) and not _are_tags({row[-1] for row in rows}):
        return f"has tags ({', '.join(sorted(first)):.60})"
    return None


def _are_tags(cells: set[str]) -> bool:
    return cells > {"O"} and all(map(TAG.fullmatch, cells))


def _column_indexes(path: Path, word: int | None, tag: str | None) -> tuple[int, int]:
    """Indexes of the word and of the tag; -1 is the last column."""
    names: Sequence[str] = ()
    if format_suffix(path) == ".conllu":
        names = CONLLU_COLUMNS
        word = 2 if word is None else word
        tag = tag or "upos"
    word = 1 if word is None else word
    number = 0 if tag is None else _column_number(tag, names) or 0
    if word < 1 or (number < 1 and tag is not None):
        known = ", ".join(["1, 2, ...", *names])
        raise ValueError(f"{path} has no such column: --word_column {word}, --tags_column {tag}; pass {known}.")
    return word - 1, number - 1


def _column_number(column: str, names: Sequence[str]) -> int | None:
    """The number of a column that is one of `names`, or is a number itself."""
    if column in names:
        return names.index(column) + 1
    return int(column) if column.isdecimal() else None


def _is_range_or_empty_node(location: str, identifier: str) -> bool:
    """Whether the CoNLL-U line has the number of a multiword token (3-4) or of an empty node (3.1)."""
    if RANGE_OR_EMPTY_NODE.fullmatch(identifier):
        return True
    if not identifier.isdecimal():
        raise ValueError(f"{location}: the first column is {identifier!r:.80}; in .conllu it must be a word's number.")
    return False


def number_in(cell: Any) -> float:
    """The number in a cell; NaN if there is none, as in `2019_20`, which is a number for Python."""
    if isinstance(cell, str) and "_" in cell:
        return math.nan
    try:
        return float(cell)
    except (TypeError, ValueError):
        return math.nan


def table_rows(path: Path, column_names: Sequence[str] = ()) -> Iterator[LocatedRow]:
    """Rows of a CSV or TSV file, whose first line is the header; with `column_names` it may be missing."""
    for number, row in numbered_rows(path, column_names):
        yield f"{path}, line {number}", row


def numbered_rows(path: Path, column_names: Sequence[str] = ()) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a file, each with the number of its first line."""
    rows = _numbered_cells(path)
    names = list(column_names)
    while not names:
        _, names = next(rows, (0, [""]))
    if len(names) == 1 and (sign := re.search(r"[;|\t]", names[0])):
        separated = f"its columns seem to be separated by {sign[0]!r}. Write commas (.csv) or tabs (.tsv)"
        raise ValueError(f"{path} begins with {names[0]!r:.80}: {separated}.")
    if len(set(names)) < len(names):
        raise ValueError(f"{path} has the columns {names}; give each column a different name.")
    for number, cells in rows:
        location = f"{path}, line {number}"
        if not cells and len(names) > 1:
            continue
        cells = cells or [""]  # of a table with one column
        if len(cells) != len(names):
            raise ValueError(f"{location} has {len(cells)} columns, not {len(names)}: {names}. Correct the line.")
        if cells == names and column_names and number == 1:  # the names may come from the training of a head
            continue
        if cells == names and (column_names or len(names) > 1):
            raise ValueError(f"{location} is a header; remove the line, which repeats it.")
        yield number, dict(zip(names, cells, strict=True))


def _numbered_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """First line and cells of each row; a blank line has none.

    In TSV files, quotes are ordinary characters, as in the files of GLUE, unless `quotes_of_cells` finds others.
    """
    lines = numbered_lines(path)
    if format_suffix(path) == ".tsv":
        quote = quotes_of_cells(path)
        for number, row in lines if quote is None else joined_lines(lines, quote):
            cells = row.split("\t") if quote is None else unquoted_cells(row, quote)
            yield number, cells if row else []
        return
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader((f"{line}\n" for _, line in lines), strict=True)
    number = 1
    try:
        for cells in reader:
            yield number, cells
            number = reader.line_num + 1  # a quoted cell may have line feeds
    except csv.Error as error:
        is_return = "new-line character" in str(error)
        reason = "a carriage return ends a line; end lines with line feeds" if is_return else error
        raise ValueError(f"{path}, line {number} is not CSV: {reason}.") from error


def quotes_of_cells(path: Path, lines_are_rows: bool = False) -> str | None:
    """How quotes inside a cell are written if the cells between tabs are quoted, else `None`; a line says so.

    pandas, R and Excel quote cells: each cell with a quote begins and ends with one, and those between are doubled, or
    have a backslash. To be sure, one of them must have such a quote, a tab or a line feed, or all cells that are not
    numbers must be quoted. A quote that is a word of a sentence, or that begins a text, is not such a cell.

    Args:
        lines_are_rows: whether no cell can have a line feed. It cannot if all lines have equally many tabs, either.
    """
    tabs = set()
    has_quotes = False
    for _, line in numbered_lines(path):
        if line:
            tabs.add(line.count("\t"))
            has_quotes = has_quotes or '"' in line
    if not has_quotes or (lines_are_rows and tabs == {0}):
        return None
    lines_are_rows = lines_are_rows or (len(tabs) == 1 and tabs != {0})
    for quote in QUOTED_CELLS:
        if reason := _reason_for_quotes(path, quote, lines_are_rows):
            logger.warning_once(
                f"{path} is read as a table with quoted cells ({reason}): the quotes around a cell are left out, and "
                f"{quote} becomes one quote."
            )
            return quote
    return None


def _reason_for_quotes(path: Path, quote: str, lines_are_rows: bool) -> str | None:
    """What shows that cells are quoted; `None` if nothing does, or if a cell is not quoted in this way."""
    is_quoted = re.compile(QUOTED_CELLS[quote]).fullmatch
    needs_quotes = re.compile(f"{re.escape(quote)}|[\t\n]").search
    lines = numbered_lines(path)
    example = None
    are_all_quoted = True
    widths = set()
    for number, row in lines if lines_are_rows else joined_lines(lines, quote):
        if not row or (lines_are_rows and "\t" not in row):
            continue
        cells = row.split("\t") if lines_are_rows else ROW_CELLS[quote].findall(row)
        widths.add(len(cells))
        if "\t".join(cells) != row:
            return None
        for cell in cells:
            if '"' not in cell:
                are_all_quoted = are_all_quoted and bool(NOT_QUOTED.fullmatch(cell))
            elif not is_quoted(cell):
                return None
            elif example is None and needs_quotes(cell[1:-1]):
                example = f"line {number}: {cell!r:.60}"
    if not lines_are_rows and len(widths) > 1:
        return None
    return example or ("all texts are quoted" if are_all_quoted else None)


def joined_lines(lines: Iterable[tuple[int, str]], quote: str) -> Iterator[tuple[int, str]]:
    """The rows of a table with quoted cells, which may have line feeds, each with the number of its first line."""
    first = 0
    parts: list[str] = []
    is_open = False
    for number, line in lines:
        if not parts:
            first = number
        parts.append(line)
        is_open ^= line.replace(quote, "").count('"') % 2 == 1
        if not is_open:
            yield first, "\n".join(parts)
            parts = []
    if parts:
        yield first, "\n".join(parts)


def unquoted_cells(row: str, quote: str) -> list[str]:
    cells = ROW_CELLS[quote].findall(row)
    return [cell[1:-1].replace(quote, '"') if '"' in cell else cell for cell in cells]


def json_rows(path: Path) -> Iterator[LocatedRow]:
    """Objects of JSON lines. A `.json` file may also be a list of objects, or an object with this list as `data`."""
    for location, row in _json_values(path):
        if not isinstance(row, dict):
            raise ValueError(f"{location} is {row!r:.80}; each row must be a JSON object, with a key for each column.")
        yield location, row


def _json_values(path: Path) -> Iterator[tuple[str, Any]]:
    if format_suffix(path) == ".jsonl" or _begins_with_row(path):
        for number, line in numbered_lines(path):
            if line.strip():
                location = f"{path}, line {number}"
                yield location, _parsed_row(line, location)
    else:
        for number, row in enumerate(_json_list(path), 1):
            yield f"{path}, element {number}", row


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
    first = next((line for _, line in numbered_lines(path) if line.strip()), "")
    try:
        row = parse_json(first, path)
    except ValueError:
        return False
    return isinstance(row, dict) and not isinstance(row.get("data"), list)


def _json_list(path: Path) -> list[Any]:
    text = "\n".join(line for _, line in numbered_lines(path))
    whole = _parsed_row(text, str(path))
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
    for number, row in numbered_rows(path):
        if column not in row:
            raise ValueError(f"{path} has no column {column!r}, only {list(row)}; pass --text_column.")
        yield number, row[column].strip()


def _column_texts(path: Path, column: str) -> Iterator[tuple[int, list[str]]]:
    names = CONLLU_COLUMNS if format_suffix(path) == ".conllu" else ()
    number = _column_number(column, names)  # without one, `column` belongs to files of another kind in the corpus
    if number == 0:
        raise ValueError(f"{path} has no column {column}; pass --text_column {', '.join(['1, 2, ...', *names])}.")
    word, _ = _column_indexes(path, number, None)
    sentences = _sentence_lines(path, [], word + 1)
    if number is None:
        sentences = _with_words_first(path, sentences, "--text_column", least=2)
    for sentence in sentences:
        words = [fields[word] for _, fields in sentence]
        if "" in words:
            number, fields = sentence[words.index("")]
            raise ValueError(f"{path}, line {number}: column {word + 1} is empty, without a word: {fields!r:.80}.")
        yield sentence[0][0], words


JSON_FORMATS: dict[str, RowReader] = {".jsonl": json_rows, ".json": json_rows}
ROW_READERS: dict[str, RowReader] = {**dict.fromkeys(TABLE_SUFFIXES, table_rows), **JSON_FORMATS}
TEXT_READERS: dict[str, Callable[[Path, str], Iterator[tuple[int, Any]]]] = {
    ".txt": _line_texts,
    ".jsonl": _json_texts,
    **dict.fromkeys(TABLE_SUFFIXES, _table_texts),
    **dict.fromkeys(WORD_SUFFIXES, _column_texts),
}
TEXT_SUFFIXES = tuple(TEXT_READERS)


def files_of(patterns: Sequence[str]) -> list[str]:
    """The files of paths, patterns and folders, each once."""
    files = list(dict.fromkeys(chain.from_iterable(map(find_files, patterns))))
    refuse_other_spellings(files)
    return files


def refuse_other_spellings(files: Iterable[str]):
    """Refuses two different paths of one file, which would count twice."""
    places: dict[str, str] = {}
    for file in files:
        other = places.setdefault(os.path.realpath(file), file)
        if other != file:
            raise ValueError(f"{other} and {file} are the same file; pass it once.")


def find_files(pattern: str) -> list[str]:
    """The files of a path, a pattern, or a folder, in the same order on all systems."""
    if os.path.isdir(pattern):
        paths = [str(path) for path in Path(pattern).rglob("*") if format_suffix(path) in TEXT_SUFFIXES]
    else:
        refuse_folder_or_pipe(Path(pattern), pattern)
        paths = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
    files = sorted(filter(os.path.isfile, paths), key=lambda file: Path(file).as_posix())
    if not files:
        raise FileNotFoundError(
            f"{pattern}: no file found. Pass files, patterns such as 'train/*.txt.gz', or folders with files that end "
            f"in {', '.join(TEXT_SUFFIXES)}, also with .gz or .zst."
        )
    for file in files:
        if format_suffix(Path(file)) == ".json":
            raise ValueError(
                f"{file}: text is read from .txt, and from .jsonl with a record per line. Convert or rename the file."
            )
    refuse_names_not_utf8(files)
    return files
