"""The text of a language model: sentences from files or from a data set, and the vocabulary of their words."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers.utils import logging

from modeling_elmo.tokenization.elmo_characters import PAD_WORD, SPECIAL_WORDS, most_frequent_words
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter

from ..program.command_line import option, refuse_unread
from ..program.data_files import files_of
from ..program.files import digest, write_lines
from ..program.sentences import check_language, sentences_of, text_sentences, warn_of_wrapped_lines
from ..program.texts import DatasetArguments, TextArguments, dataset_texts, refuse_training_data, split_parts
from .counting import SentenceText, Survey, count_words

logger = logging.get_logger(__name__)

WHITESPACE = TextSplitter("whitespace")

SourceLine = tuple[str, int]  # a file and the line, from 1; or a data set and the row, from 0
SourceSentence = tuple[SourceLine, SentenceText]


@dataclass(kw_only=True)
class SentencesArguments(DatasetArguments):
    """Options of programs that read sentences."""

    is_split_into_words: bool = option(
        False, "Words are separated by spaces already. Default: the tokenizer splits text."
    )


@dataclass(kw_only=True)
class TrainTextArguments(SentencesArguments, TextArguments):
    """The text to train a language model on, or to count its vocabulary in."""

    train_file: list[str] = option(
        [],
        "Training text: UTF-8 files, patterns or folders. .txt: one sentence per line; .jsonl, .csv, .tsv: one "
        "record with a text per line; .conll, .conllu: one word per line. All may be compressed (.gz, .zst).",
    )


@dataclass(kw_only=True)
class HeldOutArguments(SentencesArguments):
    """The text to evaluate a language model on, and how it is read. `elmo pretrain` evaluates by sentence."""

    validation_file: list[str] = option([], "Held-out text: files, patterns or folders, as for --train_file.")
    validation_split: str | None = option(None, "Held-out split of --dataset.")
    context: Literal["sentence", "stream"] = option(
        "sentence", "Context of each prediction: one sentence, or a stream of text with carried LSTM states."
    )


@dataclass(kw_only=True)
class CorpusArguments(TrainTextArguments, HeldOutArguments):
    """The texts of a training run."""

    validation_split: str | None = option(
        None, "Held-out split of --dataset, or part of --train_file: 'train[90%%:]' with --split 'train[:90%%]'."
    )
    shuffle_buffer: int = option(100_000, "Number of sentences to shuffle together.")


@dataclass(frozen=True)
class Corpus:
    """Sentences from files or from a split of a data set. Each process opens its own files when it reads them.

    A sentence is a line of a text file, a line of the text of a record or row, or the list of words of a record or row.
    Blank lines and empty lists are skipped. With a `language`, texts are split into sentences by its rules.
    """

    files: tuple[str, ...] = ()
    column: str = "text"
    language: str | None = None
    dataset: TextArguments | None = None
    split: str = "train"  # of the files: all sentences, or a part
    ranges: tuple[list[tuple[int, int]], ...] = ()  # of a part: the sentences of each file

    @classmethod
    def from_arguments(cls, arguments: TrainTextArguments) -> "Corpus":
        """The corpus of `--train_file` or of `--dataset`: its `--split`."""
        if bool(arguments.train_file) == (arguments.dataset is not None):
            raise ValueError("Pass either --train_file FILE ..., or --dataset NAME with --split SPLIT.")
        return cls._of_split(arguments, arguments.train_file, arguments.split, "--split")

    @classmethod
    def held_out(cls, arguments: HeldOutArguments) -> "Corpus":
        """The corpus of `--validation_file`, or the `--validation_split` of `--dataset` or `--train_file`."""
        files, split = arguments.validation_file, arguments.validation_split
        sources = files or getattr(arguments, "train_file", [])
        if bool(files) == (split is not None) or not (sources or arguments.dataset):
            raise ValueError("Pass either --validation_file FILE ..., or --dataset NAME with --validation_split SPLIT.")
        if split is not None and isinstance(arguments, TextArguments):
            refuse_training_data(split, "--validation_split", arguments.split, "--split")
        return cls._of_split(arguments, sources, split or cls.split, "--validation_split")

    @classmethod
    def _of_split(cls, arguments: DatasetArguments, files: list[str], split: str, split_option: str) -> "Corpus":
        if files:
            if arguments.dataset is None:
                refuse_unread(arguments, ("dataset_config", "streaming"), "without --dataset; leave it out.")
            corpus = cls.from_files(files, arguments.text_column, arguments.split_sentences)
            return corpus.part(split, split_option)
        check_language(arguments.split_sentences)
        options = {item.name: getattr(arguments, item.name) for item in fields(DatasetArguments)}
        dataset = TextArguments(**options, split=split)
        dataset_texts(dataset, split_option)  # prepares it, before any worker reads it
        return cls(dataset=dataset, language=arguments.split_sentences)

    @classmethod
    def from_files(cls, patterns: Sequence[str], column: str = "text", language: str | None = None) -> "Corpus":
        """A corpus of files, patterns such as `a/*.gz`, and folders."""
        check_language(language)
        files = tuple(files_of(patterns))
        if language is None:
            warn_of_wrapped_lines(files)
        return cls(files, column, language)

    def part(self, split: str, split_option: str) -> "Corpus":
        """The sentences of files that an expression such as `train[:90%]` names, in the order of the files."""
        if split == self.split:
            return self
        counts = [sum(1 for _ in self._file_sentences(file)) for file in self.files]
        parts = split_parts(split, {self.split: sum(counts)}, f"{split_option} {split}")
        bounds = np.array([(part.from_, part.to) for part in parts])
        firsts = [0, *accumulate(counts)]  # of each file, in the whole text
        ranges = tuple(np.clip(bounds - first, 0, num).tolist() for first, num in zip(firsts, counts, strict=False))
        return replace(self, split=split, ranges=ranges)

    def __str__(self) -> str:
        if self.dataset is not None:
            return f"{self.dataset.dataset} (split {self.dataset.split})"
        text = ", ".join(self.files[:3])
        if len(self.files) > 3:
            text += f" and {len(self.files) - 3} more"
        if self.ranges:
            text += f" (split {self.split})"
        return text

    @property
    def is_streamed(self) -> bool:
        return self.dataset is not None and self.dataset.streaming

    @property
    def order(self) -> str:
        """A name that identifies the text and the order of its files, but not their folders, which may be moved."""
        rules = "" if self.language is None else f", sentences by the rules of {self.language}"
        if self.dataset is not None:
            name = str(self.dataset.dataset)
            if os.path.isdir(name):
                name = os.path.basename(os.path.abspath(name))
            return f"{name} (split {self.dataset.split}){rules}"
        names = [os.path.basename(file) for file in self.files]
        text = f"{len(names)} file(s) from {names[0]} on, " + digest(["\0".join(names).encode()], size=4) + rules
        return f"{text}, {self.split}" if self.ranges else text

    def survey(
        self,
        held_out: "Corpus | None" = None,
        splitter: TextSplitter = WHITESPACE,
        alphabet: str = "utf8",
        id_of: Callable[[str], int] | None = None,
        rules: str = "whitespace",
    ) -> Survey | None:
        """Reads the whole corpus once, as `count_words` does; `None` for a streamed data set. Warns of its flaws.

        Args:
            splitter: of raw text.
            alphabet, id_of, rules: of the tokenizer.
        """
        if self.is_streamed:
            return None
        counts = count_words(self, splitter, held_out)
        counts.warn(self, rules)
        return counts.survey(alphabet, id_of)

    def texts(self) -> Iterator[SentenceText]:
        """All sentences in their order, without their places."""
        return (text for _, text in self.sentences(shuffle_files=False))

    def sentences(self, epoch: int = 0, seed: int = 0, shuffle_files: bool = True) -> Iterator[SourceSentence]:
        """All sentences once. `seed` and `epoch` decide the order of the files if they are shuffled."""
        sentence = None
        for sentence in chain.from_iterable(self._sources(epoch, seed, shuffle_files)):
            yield sentence
        if sentence is None:
            raise ValueError(f"There is no sentence in {self}: no lines, or only blank ones. Pass another text.")

    def _sources(self, epoch: int, seed: int, shuffle_files: bool) -> Iterator[Iterable[SourceSentence]]:
        if self.dataset is not None:
            rows: Iterable[tuple[int, Any]] = enumerate(dataset_texts(self.dataset)[0]())
            if self.language is not None:
                rows = sentences_of(rows, self.language, are_lines=False)
            yield as_sentences(str(self.dataset.dataset), rows)
        order = np.arange(len(self.files))
        if shuffle_files:
            order = np.random.default_rng([seed, epoch]).permutation(order)
        for number in order:
            ranges = self.ranges[number] if self.ranges else [(0, None)]
            for first, end in ranges:
                yield islice(self._file_sentences(self.files[number]), first, end)

    def _file_sentences(self, file: str) -> Iterator[SourceSentence]:
        return as_sentences(file, text_sentences(Path(file), self.column, self.language))


def as_sentences(source: str, texts: Iterable[tuple[int, Any]]) -> Iterator[SourceSentence]:
    for number, value in texts:
        if isinstance(value, str):
            for line in value.split("\n"):
                if text := line.strip():
                    yield (source, number), text
        elif isinstance(value, list) and all(isinstance(word, str) for word in value):
            if value:
                yield (source, number), value
        else:
            raise ValueError(f"{source}:{number}: the text is {value!r:.80}; it must be a string or a list of words.")


def check_vocabulary_size(size: int | None):
    """Refuses a size that leaves no room for words of the text."""
    if size is not None and size <= len(SPECIAL_WORDS):
        raise ValueError(f"--vocabulary_size {size}: pass more than the {len(SPECIAL_WORDS)} special words.")


def most_frequent_lines(counts: Counter[str], vocab_size: int | None, min_frequency: int = 1) -> list[str]:
    """`most_frequent_words` without given words that do not fit in a line of a vocabulary file."""
    fitting = {word: count for word, count in counts.items() if word and word == word.strip() and "\n" not in word}
    return most_frequent_words(fitting, vocab_size, min_frequency)


def write_vocabulary(path: Path, words: Iterable[str]):
    """Writes a word per line, without `<PAD>`, whose id is always 0."""
    write_lines(path, (word for word in words if word != PAD_WORD))
