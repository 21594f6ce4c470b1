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
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from datasets import DatasetDict, Features, Value

from modeling_elmo.run_scripts.fine_tuning.sources import DataArguments, check_cell, sentence_of, split_sources
from modeling_elmo.run_scripts.program.command_line import option
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
STRINGS = ("predicate_lemma", "predicate_sense", "predicate_kind")
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
class SemanticRoleArguments(DataArguments):
    train_file: str | None = option(
        None,
        "Training file in UTF-8. A word per line and a column per predicate: .tsv as PropBank EWT, .conll "
        "or .txt as CoNLL-2005, .gold_conll and so on as CoNLL-2012. A sentence per record, with tokens, "
        "predicate_index and predicate_tags: .json, .jsonl. Also .gz or .zst.",
    )
    roles_format: Literal["propbank", "conll2005", "conll2012"] | None = option(
        None, "Columns of files with a word per line. Default: those that the file's ending names."
    )
    max_length: int | None = option(
        102, "Maximum tokens of a training sentence, including two markers. Other splits are not cut."
    )


class Layout(NamedTuple):
    """Indexes of the columns, the first of the roles, and the number of columns after the roles."""

    word: int
    tag: int | None
    lemma: int
    sense: int | None
    mark: int  # has - beside words that are no predicates
    roles: int
    rest: int = 0
    position: int | None = None  # of the word in its sentence


LAYOUTS = {
    "propbank": Layout(word=2, tag=3, lemma=4, sense=5, mark=5, roles=6, position=1),
    "conll2012": Layout(word=3, tag=4, lemma=6, sense=7, mark=7, roles=11, rest=1),
}
Line = tuple[str, list[str]]  # location and columns
OTHER_FORMAT = "Correct it, or pass another --roles_format."


def read_roles(arguments: SemanticRoleArguments) -> DatasetDict:
    """The splits that were given, with the columns that the head of this file explains."""
    read = partial(role_rows, roles_format=arguments.roles_format)
    found = split_sources(arguments, dict.fromkeys(ROLE_FORMATS, read) | JSON_FORMATS)
    files = [file for source in found.values() for file in source.files]
    if arguments.roles_format and not any(format_suffix(file) in ROLE_FORMATS for file in files):
        raise ValueError(
            f"--roles_format {arguments.roles_format} is for files with a word per line, and there is none; leave it "
            "out."
        )
    return DatasetDict({split: source.convert(checked_row, ROLE_FEATURES, split) for split, source in found.items()})


def role_rows(path: Path, roles_format: str | None = None) -> Iterator[LocatedRow]:
    """Sentences of a file with a word per line and a column per predicate; the location is that of each word."""
    name = roles_format or ROLE_FORMATS[format_suffix(path)]
    layout = LAYOUTS.get(name)
    for lines in _sentences(path, name):
        layout = layout or _conll2005_layout(lines)
        yield [location for location, _ in lines], _sentence_row(lines, layout)


def _sentences(path: Path, name: str) -> Iterator[list[Line]]:
    """The lines of each sentence, which have equally many columns."""
    sentence: list[Line] = []
    for number, line in chain(numbered_lines(path), [(0, "")]):
        if line.strip(" \t") and not (name == "conll2012" and line.startswith("#")):
            columns = line.split("\t") if name == "propbank" else re.split("[ \t]+", line.strip(" \t"))
            location = f"{path}, line {number}"
            if sentence and len(columns) != (width := len(sentence[0][1])):
                raise ValueError(
                    f"{location} has {len(columns)} columns, but its sentence begins with {width}: {columns!r:.80}. "
                    f"A blank line ends a sentence. {OTHER_FORMAT}"
                )
            sentence.append((location, columns))
        elif sentence:
            yield sentence
            sentence = []


def _conll2005_layout(lines: list[Line]) -> Layout:
    """The last column without brackets has the lemmas; the first sentence of a file decides."""
    columns = list(zip(*(columns for _, columns in lines), strict=True))
    indexes = tuple(map(str, range(len(lines))))
    roles = len(columns)
    while roles and any("*" in cell or "(" in cell for cell in columns[roles - 1]):
        roles -= 1
    if roles < 2 or indexes in columns[1:3]:
        raise ValueError(
            f"{lines[0][0]} is not conll2005: word, part of speech and so on, a column with lemmas or -, and roles: "
            f"{lines[0][1]!r:.80}. {OTHER_FORMAT}"
        )
    return Layout(word=0, tag=1 if roles > 2 else None, lemma=roles - 1, sense=None, mark=roles - 1, roles=roles)


def _sentence_row(lines: list[Line], layout: Layout) -> dict[str, Any]:
    predicates = _predicate_lines(lines, layout)
    locations, rows = zip(*lines, strict=True)
    columns = list(zip(*rows, strict=True))
    roles = range(layout.roles, layout.roles + len(predicates))
    tags = [_bio_tags(locations, columns[column], column + 1) for column in roles]

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
    """Numbers of the lines with a predicate. The sentence has as many columns as they need."""
    (location, first), fixed = lines[0], layout.roles + layout.rest
    marks = [columns[layout.mark] for _, columns in lines if len(first) >= fixed]
    predicates = [number for number, mark in enumerate(marks) if mark != "-"]
    if len(first) != fixed + len(predicates):
        raise ValueError(
            f"{location} has {len(first)} columns, not {fixed} and one for each of {len(predicates)} predicates: "
            f"{first!r:.80}. {OTHER_FORMAT}"
        )
    if layout.position is not None:
        for number, (location, columns) in enumerate(lines):
            index = columns[layout.position]
            check_cell(index == str(number), location, "index of the word", index, f"{number}, counted in its sentence")
    return predicates


def _bio_tags(locations: Sequence[str], cells: Sequence[str], column: int) -> list[str]:
    tags, role = [], None
    for location, cell in zip(locations, cells, strict=True):
        begins, ends = match.groups() if (match := ROLE_CELL.fullmatch(cell)) else (None, None)
        fits = match and not (begins and role) and not (ends and not begins and not role)
        needed = f"a part of a role, (ROLE*) or (ROLE*, *, *), and {role or 'none'} is open before it"
        check_cell(fits, location, f"column {column}", cell, needed)
        role = begins or role
        tags.append(f"{'B' if begins else 'I'}-{role}" if role else "O")
        role = None if ends else role
    if role:
        raise ValueError(f"{locations[-1]}, column {column}: the sentence ends inside {role}; close it with *).")
    return tags


def _first_word(locations: Sequence[str], number: int, tags: list[str]) -> int:
    """Index of the predicate's first word. Its lemma may stand beside a later word: `cross` reference, `x` - rays."""
    starts = [index for index, tag in enumerate(tags) if tag == "B-V"]
    if len(starts) != 1 or tags[number] not in PREDICATE_TAGS:
        places = ", ".join(locations[start] for start in starts) or "no word"
        raise ValueError(
            f"{locations[number]} has a predicate, but its column has {tags[number]} here, and (V* at {places}. The "
            "columns have the order of the predicates, and one (V* each; further pieces are (C-V*."
        )
    return starts[0]


def kind_of_predicate(tag: str) -> str:
    return next(kind for kind, beginnings in KINDS.items() if tag.startswith(beginnings)) if tag else ""


def checked_row(location: Location, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of `ROLE_FEATURES`, with "" for lemmas, senses and kinds that are absent."""
    tokens, (where, *_) = sentence_of(location, row)
    indexes: Any = row.get("predicate_index")
    check_cell(isinstance(indexes, list), where, "predicate_index", indexes, "a list of the predicates' first words")
    absent = [""] * len(indexes)
    parts: dict[str, Any] = {name: absent if row.get(name) is None else row[name] for name in STRINGS} | {
        "predicate_index": indexes
    }
    parts["predicate_tags"] = row.get("predicate_tags")
    for name, value in parts.items():
        fits = isinstance(value, list) and len(value) == len(indexes)
        fits = fits and (name not in STRINGS or all(isinstance(entry, str) for entry in value))
        each = "string" if name in STRINGS else "list of tags"
        check_cell(fits, where, name, value, f"a list with a {each} for each of {len(indexes)} predicates")
    for kind in parts["predicate_kind"]:
        check_cell(kind in ("", *KINDS), where, "predicate_kind", kind, f"one of {', '.join(KINDS)}, or ''")
    for index, tags in zip(indexes, parts["predicate_tags"], strict=True):
        _check_predicate(where, len(tokens), index, tags)
    return {"tokens": tokens, **parts}


def _check_predicate(where: str, words: int, index: Any, tags: Any):
    fits = isinstance(tags, list) and len(tags) == words
    check_cell(fits, where, "predicate_tags", tags, f"lists with a tag for each of {words} words")
    for before, tag in zip(["O", *tags], tags, strict=False):
        is_tag = isinstance(tag, str) and (tag == "O" or (tag[:2] in ("B-", "I-") and len(tag) > 2))
        fits = is_tag and (tag[0] != "I" or before in (tag, f"B{tag[1:]}"))
        check_cell(fits, where, "predicate_tags", tag, "a BIO tag (O, B-ROLE, I-ROLE) that fits the one before")
    starts = [number for number, tag in enumerate(tags) if tag == "B-V"]
    fits = type(index) is int and starts == [index]  # True and 1.0 equal 1
    check_cell(fits, where, "predicate_index", index, f"the place of a predicate's one B-V, which is at {starts}")
