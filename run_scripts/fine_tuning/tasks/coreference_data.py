"""Documents with coreference, from CoNLL-2012 columns (also LitBank's), JSON lines or a data set.

splits = read_documents(arguments)  # a row per document: document, sentences, mentions, speakers, genre
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import DatasetDict, Features, Value
from transformers.utils import logging

from modeling_elmo.run_scripts.fine_tuning.sources import (
    DataArguments,
    check_cell,
    is_list_of_words,
    is_text,
    split_sources,
)
from modeling_elmo.run_scripts.program.command_line import option
from modeling_elmo.run_scripts.program.data_files import JSON_FORMATS, LocatedRow, RowReader
from modeling_elmo.run_scripts.program.files import numbered_lines

logger = logging.get_logger(__name__)

DOCUMENT_SUFFIXES = (".conll", ".gold_conll", ".auto_conll", ".v4_gold_conll", ".v4_auto_conll")
DOCUMENT_FEATURES = Features(
    document=Value("string"),
    sentences=[[Value("string")]],
    mentions=[[Value("int32")]],
    speakers=[[Value("string")]],
    genre=Value("string"),
)
BEGIN = re.compile(r"#begin document \((.+)\)(?:; part ([0-9]{1,9}))? *")
BRACKETS = re.compile(r"(\(?)([0-9]{1,9})(\)?)")
WORD, SPEAKER = 3, 9  # columns, from 0; coreference is the last one
NOTHING = ("-", "_", "")  # of a column without a value

MENTION = "[sentence, first word, last word, cluster], where sentences and words of the document count from 0"
MentionSpan = tuple[int, int, int]  # sentence, first word, last word (inclusive); all from 0


@dataclass(kw_only=True)
class CoreferenceArguments(DataArguments):
    train_file: str | None = option(
        None,
        f"Training file. CoNLL-2012 columns, also LitBank's: {', '.join(DOCUMENT_SUFFIXES)}; a document "
        "per record: .json, .jsonl. Also .gz or .zst.",
    )
    max_sentences: int = option(
        50,
        "Maximum sentences of a training document: a random window, drawn anew in each epoch. Other splits "
        "are read whole.",
    )
    train_singletons: bool = option(
        False, "Learn, return and score singletons too: mentions that no other mention refers to."
    )


def read_documents(arguments: CoreferenceArguments) -> DatasetDict:
    """The splits that were given, with a row per document.

    Returns:
        Columns `document`: the name, which differs from all others of the split; `sentences`: their words;
        `mentions`: `[sentence, first word, last word (inclusive), cluster]` each, in the order of the document, where
        clusters are counted from 0 in the order of their first mentions; `speakers`: one for each word, empty if the
        document has none; `genre`: empty if unknown.
    """
    formats: dict[str, RowReader] = dict.fromkeys(DOCUMENT_SUFFIXES, conll_documents)
    found = split_sources(arguments, formats | JSON_FORMATS)
    rows = {split: each._replace(read=partial(_distinct_documents, each.read)) for split, each in found.items()}
    return DatasetDict({split: each.convert(document_row, DOCUMENT_FEATURES, split) for split, each in rows.items()})


def _distinct_documents(read: Callable[[], Iterator[LocatedRow]]) -> Iterator[LocatedRow]:
    """The rows, whose documents must have different names."""
    places: dict[str, Any] = {}
    for location, row in read():
        name: Any = row.get("document")
        check_cell(is_text(name), location, "document", name, "a name that is not empty")
        check_cell(name not in places, location, "document", name, f"another name: it is also at {places.get(name)}")
        places[name] = location
        yield location, row


def document_row(location: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """A checked document with its mentions in order. `speakers` and `genre` may be missing."""
    sentences: Any = row.get("sentences")
    mentions: Any = row.get("mentions")
    speakers, genre = row.get("speakers") or [], row.get("genre") or ""
    check_cell(_has_sentences(sentences), location, "sentences", sentences, "one list of words or more, none empty")
    fits = not speakers or _has_sentences(speakers) and [*map(len, speakers)] == [*map(len, sentences)]
    check_cell(fits, location, "speakers", speakers, "a name for each word, or nothing")
    check_cell(isinstance(genre, str), location, "genre", genre, "a name")
    check_cell(isinstance(mentions, list), location, "mentions", mentions, "a list, which may be empty")
    for mention in mentions:
        check_cell(_is_mention(mention, sentences), location, "mentions", mention, MENTION)
    found = {"document": row["document"], "sentences": sentences, "mentions": _numbered_mentions(location, mentions)}
    return {**found, "speakers": speakers, "genre": genre}


def _has_sentences(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_list_of_words, value))


def _is_mention(mention: Any, sentences: list[list[str]]) -> bool:
    """Whether the value is `MENTION`."""
    if not isinstance(mention, list) or len(mention) != 4 or any(type(number) is not int for number in mention):
        return False
    sentence, first, last, _ = mention
    return 0 <= sentence < len(sentences) and 0 <= first <= last < len(sentences[sentence])


def _numbered_mentions(location: Any, mentions: list[list[int]]) -> list[list[int]]:
    """The mentions in the order of the document, with clusters counted from 0."""
    clusters = _merged_clusters(mentions)
    if len(clusters) < len(mentions):
        logger.warning(
            f"{location}: {len(mentions) - len(clusters)} of {len(mentions)} mentions occur again. They are counted "
            "once, and clusters that share a mention are one cluster. Correct the file if this is a mistake."
        )
    numbers: dict[int, int] = {}
    return [[*span, numbers.setdefault(clusters[span], len(numbers))] for span in sorted(clusters)]


def _merged_clusters(mentions: list[list[int]]) -> dict[MentionSpan, int]:
    """The cluster of each mention. Clusters that share one are merged, as by Lee et al. (2017): OntoNotes has a few."""
    found: dict[MentionSpan, int] = {}
    merged: dict[int, int] = {}  # the cluster that took its mentions

    def name(cluster: int) -> int:
        while cluster in merged:
            cluster = merged[cluster]
        return cluster

    for sentence, start, last, cluster in mentions:
        first = name(found.setdefault((sentence, start, last), cluster))
        if first != name(cluster):
            merged[name(cluster)] = first
    return {span: name(cluster) for span, cluster in found.items()}


def conll_documents(path: Path) -> Iterator[LocatedRow]:
    """Documents of a file with a word per line, from `#begin document (NAME); part 0` to `#end document`.

    Columns are separated by tabs or by spaces. The number of the part is added to the name. The genre is the first
    folder of the name, as in OntoNotes. Mentions of one cluster that cross are read as nested: the bracket that was
    opened last is closed first.
    """
    document = None
    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        if begin := BEGIN.fullmatch(line):
            if document is not None:
                raise ValueError(f"{where}: {document.name!r:.80} has no end; write '#end document' above this line.")
            document = _Document(where, *begin.groups())
        elif document is not None and line.rstrip() == "#end document":
            yield document.where, document.row()
            document = None
        elif document is not None:
            document.read_line(where, line)
        elif line.strip():
            raise ValueError(f"{where} is in no document: {line!r:.80}. Write '#begin document (NAME)' above it.")
    if document is not None:
        raise ValueError(
            f"{document.where}: the document {document.name!r:.80} has no '#end document'; the file is incomplete."
        )


class _Document:
    """A document while its lines are read."""

    def __init__(self, where: str, name: str, part: str | None):
        self.where, self.name, self.part = where, name, part
        self.sentences: list[list[str]] = [[]]
        self.speakers: list[list[str]] = [[]]
        self.mentions: list[list[int]] = []
        # First word and location of the mentions of each cluster that have no end yet.
        self.opened: dict[int, list[tuple[int, str]]] = defaultdict(list)

    def read_line(self, where: str, line: str):
        if not line.strip(" \t"):
            self.end_sentence()
            return
        fields = line.split("\t") if "\t" in line else list(filter(None, line.split(" ")))
        if len(fields) <= WORD + 1 or fields[0] != self.name or not fields[WORD]:
            raise ValueError(
                f"{where} is {line!r:.80}; write the document's name {self.name!r:.80}, its part, the word's number, "
                "the word, and further columns, the last for coreference."
            )
        self.sentences[-1].append(fields[WORD])
        self.speakers[-1].append(fields[SPEAKER] if len(fields) > SPEAKER + 1 else "-")
        if (column := fields[-1].strip(" ")) not in NOTHING:
            for part in column.split("|"):
                self.read_brackets(where, part)

    def read_brackets(self, where: str, part: str):
        """Reads `(3`, `3)` or `(3)`."""
        found = BRACKETS.fullmatch(part)
        if not found or not (found[1] or found[3]):
            raise ValueError(f"{where}: {part!r:.80} is no mention; write (3, 3), (3), several with |, or -.")
        word, cluster = len(self.sentences[-1]) - 1, int(found[2])
        if found[1]:
            self.opened[cluster].append((word, where))
        if found[3]:
            if not self.opened[cluster]:
                raise ValueError(
                    f"{where}: {part} ends a mention that does not begin in this sentence; write ({cluster} at its "
                    "first word. A mention is part of one sentence."
                )
            first, _ = self.opened[cluster].pop()
            self.mentions.append([len(self.sentences) - 1, first, word, cluster])

    def end_sentence(self):
        for cluster, begun in self.opened.items():
            if begun:
                raise ValueError(
                    f"{begun[-1][1]}: ({cluster} begins a mention that has no end in its sentence; write {cluster}) at "
                    "its last word. A mention is part of one sentence."
                )
        if self.sentences[-1]:
            self.sentences.append([])
            self.speakers.append([])

    def row(self) -> dict[str, Any]:
        self.end_sentence()
        if len(self.sentences) == 1:
            raise ValueError(f"{self.where}: the document {self.name!r:.80} has no sentences; remove it.")
        has_speakers = any(name not in NOTHING for names in self.speakers for name in names)
        return {
            "document": self.name if self.part is None else f"{self.name}_{int(self.part)}",
            "sentences": self.sentences[:-1],
            "mentions": self.mentions,
            "speakers": self.speakers[:-1] if has_speakers else [],
            "genre": self.name.split("/")[0] if "/" in self.name else "",
        }
