"""The uses of words in texts, with their places, in groups such as periods or genres."""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..program.data_files import ROW_READERS, LocatedRow, files_of, format_suffix
from ..program.sentences import check_language, sentences_of, text_sentences, warn_of_wrapped_lines
from ..program.texts import numbered_lines
from .layer_sources import text_name
from .lines import to_line
from .neighbors import Place, WordPattern, WordUse

GROUP_BY_FILE, GROUP_BY_FOLDER = "file", "folder"
LINE_OF_LOCATION = re.compile(r"(?:line|element) (\d+)\Z")

UsesOfGroups = dict[str, list[WordUse]]


class LocatedSentence(NamedTuple):
    """The words of a sentence, its place, and the name of its group."""

    words: list[str]
    place: Place
    group: str


@dataclass(frozen=True)
class GroupedText:
    """The sentences of files, each with its place and its group. Each loop reads the files again.

    Attributes:
        patterns: files, patterns and folders.
        group_by: column of tables; `file` or `folder`; `None`: all sentences are one group.
        document_column: column of tables; `file` or `folder`; `None`: the file if there are several files, unless each
            is a group of its own.
        text_column: column of tables, or key of `.jsonl`, with the text or the list of its words.
        language: code of the language whose rules split texts into sentences; `None`: each line is one.
        split: splits a text into words.
    """

    patterns: Sequence[str]
    group_by: str | None = None
    document_column: str | None = None
    text_column: str = "text"
    language: str | None = None
    split: Callable[[str], list[str]] = str.split

    @property
    def files(self) -> list[Path]:
        return list(map(Path, files_of(self.patterns)))

    @property
    def documents(self) -> str | None:
        """The column that names documents; `None` if nothing does."""
        if self.document_column is not None:
            return self.document_column
        are_documents = len(self.files) > 1 and self.group_by != GROUP_BY_FILE
        return GROUP_BY_FILE if are_documents else None

    def check(self):
        """Refuses an unknown language, and warns of wrapped lines."""
        check_language(self.language)
        if self.language is None:
            warn_of_wrapped_lines(self.files)

    def sentences(self) -> Iterator[LocatedSentence]:
        """
        Raises:
            ValueError: a row has no text, or no name of its group or document.
        """
        files = self.files
        names = different_names(files, [text_name(str(path)) for path in files])
        folders = different_names([path.parent for path in files], [path.resolve().parent.name for path in files])
        document_column = self.documents
        columns = {
            "--text_column": self.text_column,
            "--group_by": self.group_by,
            "--document_column": document_column,
        }
        for path, name, folder in zip(files, names, folders, strict=True):
            for location, row in located_rows(path, self.text_column, self.language):
                named = {GROUP_BY_FILE: name, GROUP_BY_FOLDER: folder, **row}
                for flag, column in columns.items():
                    if column is not None and column not in named:
                        raise ValueError(f"{location} has no column {column!r} but {list(row)}; pass {flag} NAME.")
                # Without the option it is the file itself, whatever a column of this name has.
                documents = {GROUP_BY_FILE: name} if self.document_column is None else named
                place = Place(
                    file=str(path),
                    line=line_number(location),
                    columns={column: value for column, value in row.items() if column != self.text_column},
                    document=name_in(documents, document_column, "document", str(location)),
                )
                group = name_in(named, self.group_by, "group", str(location))
                for part in self._sentences_of(row[self.text_column]):
                    sentence = to_line(str(location), part, is_raw_text=True, unit="word").sentence
                    words = self.split(sentence) if isinstance(sentence, str) else sentence
                    yield LocatedSentence(words, place, group)

    def _sentences_of(self, text: Any) -> list[Any]:
        if self.language is not None:
            return [part for _, part in sentences_of([(0, text)], self.language, are_lines=False)]
        return text.split("\n") if isinstance(text, str) else [text]


def different_names(paths: list[Path], names: list[str]) -> list[str]:
    """The names of paths; the paths themselves where two different paths have the same name."""
    is_clear = len({*names}) == len({*paths})
    return names if is_clear else list(map(str, paths))


def located_rows(path: Path, text_column: str, language: str | None) -> Iterator[LocatedRow]:
    """The rows of a table. The texts of other files are rows of one column."""
    if format_suffix(path) in ROW_READERS:
        return ROW_READERS[format_suffix(path)](path)
    texts = text_sentences(path, text_column, language)
    return ((f"{path}, line {number}", {text_column: text}) for number, text in texts)


def line_number(location: str | list[str]) -> int:
    """The line, or the element of a list in JSON, of a location such as `a.tsv, line 3`."""
    number = LINE_OF_LOCATION.search(str(location))
    assert number is not None, location
    return int(number[1])


def name_in(row: Mapping[str, Any], column: str | None, what: str, location: str) -> str:
    """The name of a group or document in a row; "" without a column."""
    if column is None:
        return ""
    name = row[column]
    if not isinstance(name, (str, int, float)) or not str(name).strip():
        raise ValueError(f"{location}: the {what} {column!r} is {name!r}; pass a name or a number.")
    return str(name).strip()


def read_patterns(path: Path, flag: str) -> list[str]:
    """The words of a file, a word or regular expression per line, each once."""
    words = {}  # a dictionary keeps their order
    for number, line in numbered_lines(path):
        if word := line.strip():
            check_pattern(word, f"{flag} {path}, line {number}:")
            words[word] = None
    if not words:
        raise ValueError(f"{flag} {path} has no word; write one per line.")
    return list(words)


def check_pattern(word: str, where: str):
    try:
        re.compile(word)
    except re.error as error:
        reason = f"{where} {word} is not a regular expression ({error})"
        raise ValueError(f"{reason}; put \\ before signs such as . ( *") from None


def count_forms(sentences: Iterable[LocatedSentence]) -> dict[str, Counter[str]]:
    """How often each form occurs in each group. Equal sentences count each time."""
    counts = defaultdict(Counter)
    for sentence in sentences:
        counts[sentence.group].update(sentence.words)
    return counts


def collect_uses(
    sentences: Iterable[LocatedSentence], words: Collection[str], forms: Collection[str] = ()
) -> dict[str, UsesOfGroups]:
    """The uses in each group of all words, in any case, and of all forms. Reads the sentences once.

    Args:
        words: regular expressions.
        forms: words as they are written.

    Returns:
        The uses in each group, also in groups without any, by word and by form.
    """
    patterns = {word: WordPattern(word, re.IGNORECASE) for word in words}

    @cache  # a text has far fewer forms than words
    def names_of(form: str) -> list[str]:
        names = [word for word, pattern in patterns.items() if pattern.fits(form)]
        return names + [form] * (form in forms)

    groups = {}  # a dictionary keeps their order
    uses = defaultdict(lambda: defaultdict(list))
    for sentence in sentences:
        groups[sentence.group] = None
        kept: list[str] = []
        for position, form in enumerate(sentence.words):
            for name in names_of(form):
                kept = kept or list(map(sys.intern, sentence.words))  # a string of each form, not of each word
                uses[name][sentence.group].append(WordUse(kept, position, sentence.place))
    return {name: {group: uses[name][group] for group in groups} for name in (*words, *forms)}


def joined_groups(uses: Mapping[str, list[WordUse]], groups: Mapping[str, str]) -> UsesOfGroups:
    """The uses in larger groups, such as bins of years. Equal sentences of a group count once.

    Args:
        groups: the larger group of each group.
    """
    joined = {group: [] for group in groups.values()}
    for name, group in groups.items():
        joined[group] += uses[name]
    return {group: distinct_uses(members) for group, members in joined.items()}


def distinct_uses(uses: Iterable[WordUse]) -> list[WordUse]:
    """The uses without those in a sentence that occurred before, because texts repeat headings."""
    first_sentences: dict[tuple[str, ...], Any] = {}
    distinct = []
    for use in uses:
        if first_sentences.setdefault(tuple(use.words), use.words) is use.words:
            distinct.append(use)
    return distinct


def uses_in_case(word: str, uses: UsesOfGroups) -> tuple[UsesOfGroups, int]:
    """The uses that have the case of the regular expression, and the number of the others."""
    pattern = WordPattern(word)
    in_case = {}
    number = 0
    for group, members in uses.items():
        in_case[group] = [use for use in members if pattern.fits(use.words[use.position])]
        number += len(members) - len(in_case[group])
    return in_case, number
