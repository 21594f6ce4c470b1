"""The text of a language model: files of many kinds, or a data set, as sentences that can be read again and again."""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from modeling_elmo.run_scripts.program.files import TextArguments, dataset_texts, numbered_texts

TEXT_SUFFIXES = tuple(kind + packing for kind in (".txt", ".jsonl") for packing in ("", ".gz", ".zst"))

Place = tuple[str, int]  # a file and the line from 1, or a data set and the row from 0
Text = str | list[str]  # or its words, which then stay as they are
Sentence = tuple[Place, Text]


@dataclass(kw_only=True)
class SentencesArguments(TextArguments):
    is_split_into_words: bool = field(
        default=False, metadata={"help": "Words are separated by spaces already. Default: the tokenizer splits text."}
    )


@dataclass(kw_only=True)
class TrainTextArguments(SentencesArguments):
    """The text that a language model is trained on, or its vocabulary is counted over."""

    train_file: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Files, patterns, or folders of UTF-8 text, a sentence a line; .jsonl: of records with a text. "
            "Either may be compressed (.gz, .zst)."
        },
    )


@dataclass(kw_only=True)
class HeldOutArguments(SentencesArguments):
    """The text that it is measured on."""

    validation_file: list[str] = field(
        default_factory=list, metadata={"help": "Held-out text: files, patterns or folders, as those to train on."}
    )
    validation_split: str | None = field(default=None, metadata={"help": "Split of the data set that is held out."})
    context: Literal["sentence", "stream"] = field(
        default="sentence", metadata={"help": "Each sentence alone, or text without end with LSTM states carried on."}
    )


@dataclass(kw_only=True)
class CorpusArguments(TrainTextArguments, HeldOutArguments):
    """Options of every script that trains a language model."""

    shuffle_buffer: int = field(default=100_000, metadata={"help": "Sentences that are shuffled together."})


class Survey(NamedTuple):
    """Sizes of a corpus: its sentences, and their words by white space.

    `longest` is the number of words of the longest sentence, `lengths` how many words have how many bytes.
    """

    lines: int
    words: int
    longest: int = 0
    lengths: dict[int, int] = {}


@dataclass(frozen=True)
class Corpus:
    """Sentences that can be read again and again; files are opened when they are, in each process.

    A sentence is a line of a file, or a line of the text of a record or row, or the list of words there. Blank ones are
    left out.
    """

    files: tuple[str, ...] = ()
    column: str = "text"
    dataset: TextArguments | None = None

    @classmethod
    def from_arguments(cls, arguments: TrainTextArguments) -> "Corpus":
        """What `--train_file` or `--dataset` names."""
        if bool(arguments.train_file) == (arguments.dataset is not None):
            raise ValueError("Pass either --train_file FILE ..., or --dataset NAME.")
        if arguments.train_file:
            return cls.from_files(arguments.train_file, arguments.text_column)
        return cls.from_dataset(arguments, arguments.split)

    @classmethod
    def from_files(cls, patterns: Sequence[str], column: str = "text") -> "Corpus":
        """Files, folders (all .txt and .jsonl below them, also compressed ones) and patterns such as `a/*.gz`."""
        if not patterns:
            raise ValueError("No files were given; pass at least one file, folder or pattern.")
        return cls(tuple(dict.fromkeys(chain.from_iterable(map(find_files, patterns)))), column)

    @classmethod
    def from_dataset(cls, arguments: TextArguments, split: str) -> "Corpus":
        """A split of `arguments.dataset`, which is prepared here so that no worker has to."""
        arguments = replace(arguments, split=split)
        dataset_texts(arguments)
        return cls(dataset=arguments)

    def __str__(self) -> str:
        if self.dataset is not None:
            return f"{self.dataset.dataset} (split {self.dataset.split})"
        more = f" and {len(self.files) - 3} more" if len(self.files) > 3 else ""
        return ", ".join(self.files[:3]) + more

    @property
    def order(self) -> str:
        """Tells texts and the order of their files apart; their folders may have moved."""
        if self.dataset is not None:
            return str(self)
        names = [os.path.basename(file) for file in self.files]
        digest = hashlib.blake2b("\0".join(names).encode(), digest_size=4).hexdigest()
        return f"{len(names)} file(s) from {names[0]} on, {digest}"

    def survey(self) -> Survey | None:
        """Reads all of it once, which also finds mistakes in the last line before training; None for a stream."""
        if self.dataset is not None and self.dataset.streaming:
            return None
        sentences: Counter[int] = Counter()
        lengths: Counter[int] = Counter()
        for _, text in tqdm(self.sentences(shuffle_files=False), desc="counting", unit=" lines", unit_scale=True):
            words = words_of(text)
            sentences[len(words)] += 1
            lengths.update(len(word.encode(errors="ignore")) for word in words)
        if not sentences:
            raise self.emptiness()
        return Survey(sentences.total(), lengths.total(), max(sentences), dict(lengths))

    def emptiness(self) -> ValueError:
        return ValueError(f"There is no sentence in {self}: nothing but blank lines. Pass another text.")

    def sentences(self, epoch: int = 0, seed: int = 0, shuffle_files: bool = True) -> Iterator[Sentence]:
        """All of it once, files in an order of `seed` and `epoch`, or as given."""
        if self.dataset is not None:
            yield from as_sentences(str(self.dataset.dataset), enumerate(dataset_texts(self.dataset)[0]))
        order = np.arange(len(self.files))
        for number in np.random.default_rng([seed, epoch]).permutation(order) if shuffle_files else order:
            file = self.files[number]
            yield from as_sentences(file, numbered_texts(Path(file), self.column))


def find_files(pattern: str) -> list[str]:
    if os.path.isdir(pattern):
        found = sorted(str(path) for path in Path(pattern).rglob("*") if path.name.endswith(TEXT_SUFFIXES))
        advice = f"below it ends in {', '.join(TEXT_SUFFIXES)}. Pass a pattern for other names: '{pattern}/*'."
    else:
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        advice = "is named so. Pass files, folders, or patterns such as 'train/*.txt.gz'."
    if arrays := [file for file in found if file.removesuffix(".gz").removesuffix(".zst").endswith(".json")]:
        raise ValueError(
            f"{arrays[0]}: text is read from .txt and .jsonl, a record a line; convert or rename the file."
        )
    if files := list(filter(os.path.isfile, found)):
        return files
    raise FileNotFoundError(f"{pattern}: no file {advice}")


def as_sentences(source: str, texts: Iterable[tuple[int, Any]]) -> Iterator[Sentence]:
    for number, value in texts:
        if isinstance(value, str):
            for line in value.split("\n") if "\n" in value else (value,):
                if text := line.strip():
                    yield (source, number), text
        elif isinstance(value, list) and all(isinstance(word, str) for word in value):
            if value:
                yield (source, number), value
        else:
            raise ValueError(f"{source}:{number}: the text is {value!r:.80}; it must be a string or a list of words.")


def number_of_words(text: Text) -> int:
    return len(words_of(text))


def words_of(text: Text) -> list[str]:
    return text.split() if isinstance(text, str) else text
