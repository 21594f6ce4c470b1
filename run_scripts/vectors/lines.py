"""The lines of a corpus, from a file or a data set; the groups and batches in which they are embedded."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from modeling_elmo.run_scripts.program.command_line import refuse_unread
from modeling_elmo.run_scripts.program.data_files import TEXT_SUFFIXES, format_suffix, numbered_texts
from modeling_elmo.run_scripts.program.files import (
    TextArguments,
    dataset_texts,
    numbered_lines,
    refuse_folder_or_pipe,
)

LineUnit = Literal["word", "character"]  # what a token is
FASTA_SUFFIXES = (".fasta", ".fa", ".faa")
NUM_MARKERS = 2  # <S> and </S>
TOKEN = re.compile(r"\w+|[^\w\s]")


class InputLine(NamedTuple):
    """A sentence; `words` is `None` if the tokenizer splits the text, `name` if it is not from FASTA."""

    text: str
    words: list[str] | None
    name: str | None = None

    @property
    def sentence(self) -> str | list[str]:
        """What the tokenizer reads: the text that it splits, or the words."""
        return self.text if self.words is None else self.words


def open_lines(
    arguments: TextArguments, file: str | None, is_raw_text: bool, unit: LineUnit
) -> tuple[Callable[[], Iterator[InputLine]], int | None]:
    """A function that reads the lines of a file or of `arguments.dataset`, and their number if it is known."""
    if (file is None) == (arguments.dataset is None):
        raise ValueError("Pass either --input FILE or --dataset NAME.")
    if file is None:
        texts, total = dataset_texts(arguments)
        return lambda: (
            to_line(f"{arguments.dataset}, row {row}", text, is_raw_text, unit) for row, text in enumerate(texts())
        ), total
    refuse_unread(arguments, ("dataset_config", "split", "streaming"), "without --dataset; leave it out.")
    path = Path(file)
    refuse_folder_or_pipe(path, f"--input {path}")
    kind, known = format_suffix(path), (*TEXT_SUFFIXES, *FASTA_SUFFIXES)
    if kind not in known and path.suffix.lower() == kind or kind == ".json":
        raise ValueError(f"--input {path}: unknown suffix {kind!r}; pass {', '.join(known)}, .gz or .zst.")
    if kind in FASTA_SUFFIXES and is_raw_text:
        raise ValueError(f"--input {path} has sequences, whose tokens are single letters; leave out --raw_text.")

    def lines() -> Iterator[InputLine]:
        if kind in FASTA_SUFFIXES:
            return fasta_records(path)
        texts = numbered_texts(path, arguments.text_column)
        return (to_line(f"{path}, line {number}", text, is_raw_text, unit) for number, text in texts)

    # Reads the whole file once: a mistake in its last line shows now, not after hours.
    total = sum(1 for _ in lines())
    return lines, total


def to_line(where: str, value: Any, is_raw_text: bool, unit: LineUnit) -> InputLine:
    """A sentence, given as a text, or as a list of words, which `is_raw_text` leaves as they are."""
    is_text = isinstance(value, str)
    if not is_text and not (isinstance(value, list) and all(isinstance(word, str) for word in value)):
        raise ValueError(f"{where}: the sentence is {value!r}; pass a text or a list of words.")
    text = value.strip() if is_text else " ".join(value)
    words = text.split() if is_text else value
    if unit == "character":
        words = [letter for word in words for letter in word]
    return InputLine(text, None if is_text and is_raw_text else words)


def fasta_records(path: Path) -> Iterator[InputLine]:
    """The records of a FASTA file, one by one: a header `>NAME description`, then residues on any number of lines."""
    name, residues, lines = "", "", {}  # lines of the headers, by name
    for number, line in chain(numbered_lines(path), [(0, ">")]):
        if not line.startswith(">"):
            residues += (letters := "".join(line.split()))
            if letters and not (name and re.fullmatch(r"[A-Za-z*.-]+", letters)):
                raise ValueError(f"{path}, line {number} is {line!r:.60}; below >NAME, write letters, *, - and . only.")
            continue
        if name and not residues:
            raise ValueError(f"{path}: the record {name!r:.80} has no residues; complete or remove it.")
        if name:
            yield InputLine(residues, list(residues), name)
        if not number:  # the end of the file
            return
        header, residues = re.fullmatch(r">\s*(\S*\w\S*)(\s.*)?", line), ""
        name = header[1] if header else ""
        if not name.isprintable() or not name or "\r" in line:
            raise ValueError(f"{path}, line {number} is {line!r:.80}; write >NAME, and end the line in LF.")
        if (first := lines.setdefault(hdf5_name(name), number)) != number:
            raise ValueError(f"{path}, line {number}: line {first} has the name {name!r:.60} too (/ is _); change it.")


def hdf5_name(name: str) -> str:
    """The name of a record in HDF5, where a slash would make a group."""
    return name.replace("/", "_")


def group_by_tokens(lines: Iterable[InputLine], num_tokens: int) -> Iterator[list[InputLine]]:
    """Groups consecutive lines of at least `num_tokens` tokens together; the last group may have fewer."""
    group, size = [], 0
    for line in lines:
        group.append(line)
        # The tokenizer takes much longer, and every process of a run groups all lines.
        size += NUM_MARKERS + len(TOKEN.findall(line.text) if line.words is None else line.words)
        if size >= num_tokens:
            yield group
            group, size = [], 0
    if group:
        yield group


def length_sorted_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices by decreasing length, in batches of at most `batch_tokens` tokens with padding, or of one index."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
