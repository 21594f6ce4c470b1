"""Data for semantic role labelling: PropBank's and CoNLL's columns, JSON lines, or a data set.

    splits = read_roles(arguments)  # a row per sentence, with or without predicates

A row has the sentence's `tokens` and lists with an entry per predicate: `predicate_index`, its first word, from 0;
`predicate_lemma` and `predicate_sense`, "" if unknown; `predicate_kind`, one of `KINDS`, "" in a file without tags;
`predicate_tags`, the BIO tags of all words, with B-V at the predicate's first word.

In the columns, every word has a line, and every predicate a column of brackets: `(ARG0*`, `*`, `*)`, `(V*)`. Roles are
read as they are written (ARG0, A0). They never nest in one column.

- propbank: sentence id, index of the word from 0, word, part of speech, lemma of a predicate or -, its roleset or -,
  the predicates' columns; separated by tabs.
- conll2005: word, any columns, lemma of a predicate or -, the predicates' columns (Carreras and Màrquez 2005: word,
  part of speech, parse, entities, sense, lemma). The second of three or more columns is the part of speech.
- conll2012: document, part, index of the word, word, part of speech, parse, lemma, frameset of a predicate or -, word
  sense, speaker, entities, the predicates' columns, coreference (Pradhan et al. 2012). Words with a sense have a lemma
  too, so only a frameset marks a predicate. Lines with # separate documents: `cat` joins the files of a corpus.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from datasets import Dataset, DatasetDict, Features, Value

from modeling_elmo.run_scripts.fine_tuning.sources import DataArguments, Source, split_sources
from modeling_elmo.run_scripts.program.data_files import JSON_FORMATS, LocatedRow, Location, format_suffix
from modeling_elmo.run_scripts.program.files import numbered_lines

ROLE_FORMATS = {
    ".tsv": "propbank",
    ".conll": "conll2005",
    ".txt": "conll2005",
    ".gold_conll": "conll2012",
    ".auto_conll": "conll2012",
    ".v4_gold_conll": "conll2012",
    ".v4_auto_conll": "conll2012",
}
KINDS = {"verb": ("VB", "VERB", "AUX"), "noun": ("NN", "NOUN", "PROPN"), "adjective": ("JJ", "ADJ"), "other": ("",)}
ROLE_CELL = re.compile(r"(?:\(([^()*\s]+))?\*(\))?")
PREDICATE_TAGS = ("B-V", "I-V", "B-C-V", "I-C-V")
ROLE_FEATURES = Features(
    tokens=[Value("string")],
    predicate_index=[Value("int32")],
    predicate_lemma=[Value("string")],
    predicate_sense=[Value("string")],
    predicate_kind=[Value("string")],
    predicate_tags=[[Value("string")]],
)


@dataclass(kw_only=True)
class RoleDataArguments(DataArguments):
    train_file: str | None = field(
        default=None,
        metadata={
            "help": "Training file in UTF-8. A word per line and a column per predicate: .tsv as PropBank EWT, .conll "
            "or .txt as CoNLL-2005, .gold_conll and so on as CoNLL-2012. A sentence per record, with tokens, "
            "predicate_index and predicate_tags: .json, .jsonl. Also .gz or .zst."
        },
    )
    roles_format: Literal["propbank", "conll2005", "conll2012"] | None = field(
        default=None,
        metadata={"help": "Columns of files with a word per line. Default: those that the file's ending names."},
    )


class Layout(NamedTuple):
    """Indexes of the columns, the first of the roles, and the number of columns after the roles."""

    word: int
    tag: int | None
    lemma: int
    sense: int | None
    roles: int
    rest: int = 0
    position: int | None = None  # of the word in its sentence

    @property
    def mark(self) -> int:
        """The column that has - beside words that are no predicates."""
        return self.lemma if self.sense is None else self.sense


LAYOUTS = {
    "propbank": Layout(word=2, tag=3, lemma=4, sense=5, roles=6, position=1),
    "conll2012": Layout(word=3, tag=4, lemma=6, sense=7, roles=11, rest=1),
}
Line = tuple[str, list[str]]  # location and columns


def read_roles(arguments: RoleDataArguments) -> DatasetDict:
    """The splits that were given, with the columns that the head of this file explains."""
    read = partial(role_rows, roles_format=arguments.roles_format)
    found = split_sources(arguments, dict.fromkeys(ROLE_FORMATS, read) | JSON_FORMATS)
    files = [file for source in found.values() for file in source.files]
    if arguments.roles_format and not any(format_suffix(file) in ROLE_FORMATS for file in files):
        raise ValueError(
            f"--roles_format {arguments.roles_format} is for files with a word per line, and there is none; leave it "
            "out."
        )
    return DatasetDict({split: _role_split(source, split) for split, source in found.items()})


def _role_split(source: Source, split: str) -> Dataset:
    source.first()  # raises an error if there is none
    return source.convert(checked_row, ROLE_FEATURES, split)


def role_rows(path: Path, roles_format: str | None = None) -> Iterator[LocatedRow]:
    """Sentences of a file with a word per line and a column per predicate; the location is that of each word."""
    name = roles_format or ROLE_FORMATS[format_suffix(path)]
    layout = LAYOUTS.get(name)
    for lines in _sentences(path, name):
        _check_widths(lines)
        layout = layout or _conll2005_layout(lines)
        yield [location for location, _ in lines], _sentence_row(lines, layout)


def _sentences(path: Path, name: str) -> Iterator[list[Line]]:
    sentence: list[Line] = []
    for number, line in chain(numbered_lines(path), [(0, "")]):
        if line.strip(" \t") and not (name == "conll2012" and line.startswith("#")):
            columns = line.split("\t") if name == "propbank" else re.split("[ \t]+", line.strip(" \t"))
            sentence.append((f"{path}, line {number}", columns))
        elif sentence:
            yield sentence
            sentence = []


def _check_widths(lines: list[Line]):
    width = len(lines[0][1])
    for location, columns in lines:
        if len(columns) != width:
            raise ValueError(
                f"{location} has {len(columns)} columns, but its sentence begins with {width}: {columns!r:.80}. Give "
                "all lines of a sentence the same columns, separate sentences by a blank line, or pass another "
                "--roles_format."
            )


def _conll2005_layout(lines: list[Line]) -> Layout:
    """The last column without brackets has the lemmas; the first sentence of a file decides."""
    columns = list(zip(*(columns for _, columns in lines), strict=True))
    indexes = tuple(map(str, range(len(lines))))
    if indexes in columns[1:3]:
        raise ValueError(
            f"{lines[0][0]}: column {columns.index(indexes) + 1} has the words' indexes, which conll2005 has not. Pass "
            "--roles_format propbank or conll2012."
        )
    roles = len(columns)
    while roles and any("*" in cell or "(" in cell for cell in columns[roles - 1]):
        roles -= 1
    if roles < 2:
        raise ValueError(
            f"{lines[0][0]} has no column of lemmas between the word and the roles: {lines[0][1]!r:.80}. Write the "
            "lemma of a predicate, or -, or pass another --roles_format."
        )
    return Layout(word=0, tag=1 if roles > 2 else None, lemma=roles - 1, sense=None, roles=roles)


def _sentence_row(lines: list[Line], layout: Layout) -> dict[str, Any]:
    predicates = _predicate_lines(lines, layout)
    locations, rows = zip(*lines, strict=True)
    columns = list(zip(*rows, strict=True))
    tags = [
        _bio_tags(locations, columns[layout.roles + each], layout.roles + each + 1) for each in range(len(predicates))
    ]

    def cells(column: int | None) -> list[str]:
        return ["" if column is None else columns[column][number] for number in predicates]

    return {
        "tokens": list(columns[layout.word]),
        "predicate_index": [_first_word(locations, *pair) for pair in zip(predicates, tags, strict=True)],
        "predicate_lemma": cells(layout.lemma),
        "predicate_sense": cells(layout.sense),
        "predicate_kind": [kind_of_predicate(tag) for tag in cells(layout.tag)],
        "predicate_tags": tags,
    }


def _predicate_lines(lines: list[Line], layout: Layout) -> list[int]:
    """Numbers of the lines with a predicate, after the columns of the sentence are found to be as many as needed."""
    (location, columns), fixed = lines[0], layout.roles + layout.rest
    if len(columns) < fixed:
        raise ValueError(
            f"{location} has {len(columns)} columns, not {fixed} and one per predicate: {columns!r:.80}. Correct it, "
            "or pass another --roles_format."
        )
    predicates = [number for number, (_, columns) in enumerate(lines) if columns[layout.mark] != "-"]
    if len(columns) != fixed + len(predicates):
        raise ValueError(
            f"{location}: the sentence has {len(predicates)} predicates in column {layout.mark + 1}, but "
            f"{len(columns) - fixed} columns of roles. Give each predicate one column, or pass another --roles_format."
        )
    for number, (location, columns) in enumerate(lines):
        if layout.position is not None and columns[layout.position] != str(number):
            raise ValueError(
                f"{location}: the word's index is {columns[layout.position]!r:.80}, not {number}. Count words from 0, "
                "and separate sentences by a blank line."
            )
    return predicates


def _bio_tags(locations: Sequence[str], cells: Sequence[str], column: int) -> list[str]:
    tags, role = [], None
    for location, cell in zip(locations, cells, strict=True):
        where, match = f"{location}, column {column}", ROLE_CELL.fullmatch(cell)
        if match is None:
            raise ValueError(f"{where}: {cell!r:.80} is no part of a role; write (ROLE*), or (ROLE*, *, *).")
        begins, ends = match.groups()
        if begins and role:
            raise ValueError(f"{where}: {cell} begins inside {role}; roles of a predicate do not nest. Close {role}.")
        if ends and not (begins or role):
            raise ValueError(f"{where}: {cell} closes a role, but none is open. Write *, or open the role.")
        role = begins or role
        tags.append(f"{'B' if begins else 'I'}-{role}" if role else "O")
        role = None if ends else role
    if role:
        raise ValueError(f"{locations[-1]}, column {column}: the sentence ends inside {role}; close it with *).")
    return tags


def _first_word(locations: Sequence[str], number: int, tags: list[str]) -> int:
    """Index of the predicate's first word. Its lemma may stand beside a later word: `cross` reference, `x` - rays."""
    starts = [index for index, tag in enumerate(tags) if tag == "B-V"]
    if not starts:
        raise ValueError(f"{locations[number]}: no word of the predicate's column is (V*; mark the predicate.")
    if len(starts) > 1:
        raise ValueError(
            f"{locations[starts[1]]}: (V* begins again, after {locations[starts[0]]}; write (C-V* for further pieces "
            "of a predicate."
        )
    if tags[number] not in PREDICATE_TAGS:
        raise ValueError(
            f"{locations[number]} has a predicate, but its column has {tags[number]} here, and V at "
            f"{locations[starts[0]]}. Put the predicates' columns in the order of the predicates."
        )
    return starts[0]


def kind_of_predicate(tag: str) -> str:
    return next(kind for kind, beginnings in KINDS.items() if tag.startswith(beginnings)) if tag else ""


def checked_row(location: Location, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of `ROLE_FEATURES`, with "" for lemmas, senses and kinds that are absent."""
    where = location[0] if isinstance(location, list) else location
    tokens = row.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"{where}: tokens is {tokens!r:.80}; it must be a list of words that is not empty.")
    for each, token in zip(location if isinstance(location, list) else [where] * len(tokens), tokens, strict=True):
        if not isinstance(token, str) or not token:
            raise ValueError(f"{each}: a token is {token!r:.80}; it must be a string that is not empty.")
    parts = _predicate_parts(where, row)
    for index, tags in zip(parts["predicate_index"], parts["predicate_tags"], strict=True):
        _check_predicate(where, len(tokens), index, tags)
    return {"tokens": tokens, **parts}


def _predicate_parts(where: str, row: Mapping[str, Any]) -> dict[str, list]:
    """The lists with an entry per predicate."""
    parts: dict[str, Any] = {name: row.get(name) for name in ROLE_FEATURES if name != "tokens"}
    index = parts["predicate_index"]
    if not isinstance(index, list):
        raise ValueError(
            f"{where}: predicate_index is {index!r:.80}; it must be a list of the predicates' first words, from 0."
        )
    for name in ("predicate_lemma", "predicate_sense", "predicate_kind"):
        if parts[name] is None:
            parts[name] = [""] * len(index)
        if isinstance(parts[name], list) and not all(isinstance(value, str) for value in parts[name]):
            raise ValueError(f"{where}: {name} is {parts[name]!r:.80}; it must be a list of strings.")
    for name, value in parts.items():
        if not isinstance(value, list) or len(value) != len(index):
            raise ValueError(
                f"{where}: {name} is {value!r:.80} beside predicate_index {index!r:.80}; pass lists with an entry per "
                "predicate."
            )
    if unknown := [kind for kind in parts["predicate_kind"] if kind and kind not in KINDS]:
        raise ValueError(f"{where}: predicate_kind is {unknown[0]!r:.80}; pass one of {', '.join(KINDS)}, or ''.")
    return parts


def _check_predicate(where: str, words: int, index: Any, tags: Any):
    if not isinstance(tags, list) or len(tags) != words:
        raise ValueError(f"{where}: the tags of a predicate are {tags!r:.80}; pass a tag for each of {words} tokens.")
    for before, tag in zip(["O", *tags], tags, strict=False):
        is_tag = isinstance(tag, str) and (tag == "O" or (tag[:2] in ("B-", "I-") and len(tag) > 2))
        if not is_tag or (tag[0] == "I" and before not in (tag, f"B{tag[1:]}")):
            raise ValueError(f"{where}: the tag {tag!r:.80} after {before!r:.80} is not BIO (O, B-ROLE, I-ROLE).")
    starts = [number for number, tag in enumerate(tags) if tag == "B-V"]
    if type(index) is not int or starts != [index]:  # True and 1.0 equal 1
        raise ValueError(
            f"{where}: predicate_index is {index!r:.80}, but B-V is at {starts}. Each predicate has one B-V, at its "
            "first word."
        )
