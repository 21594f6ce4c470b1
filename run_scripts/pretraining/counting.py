"""One pass over a corpus: how often each word occurs, and what a training run wants to know about the lines.

Distinct pieces of text are counted first, and each of them is split into words once. Large files are shared by several
processes, and what they found can be stored for the next run on the same files.
"""

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, islice
from multiprocessing import Pipe, Process, Value, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, cast

import numpy as np
from tqdm.auto import tqdm
from transformers.utils import logging

from modeling_elmo import __version__
from modeling_elmo.conversion.files import staged
from modeling_elmo.tokenization.elmo_characters import BOS_ID, EOS_ID
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter

from ..program.texts import observed_reading
from .split_check import SIGNS_OF_SPLITTING, SplitCheck, signs_of

logger = logging.get_logger(__name__)

WORDS_OF_A_PARAGRAPH = 60  # in a line, on average
MANY_BYTES = 1 << 24  # of files: to start processes for less, or to store what it has, takes longer than to count it
MOST_PROCESSES = 8  # each reads the whole text, and counts a part of it
MARK = re.compile(r"[^\w\s]|_")  # beside which the rules split a piece
BLOCK_TEXTS = 256  # that a process counts together
SECONDS_BETWEEN_UPDATES = 0.2  # of the bar

SentenceText = str | list[str]  # a line of text, or the words of a sentence


class Survey(NamedTuple):
    """Sizes of a corpus."""

    lines: int
    words: int
    longest: int = 0  # words of a sentence
    lengths: dict[int, int] = {}  # number of words by their `word_length`
    counts: dict[int, int] = {}  # number of words by their id in a vocabulary

    def log_frequencies(self, vocab_size: int) -> np.ndarray:
        """The unigram of the text: log-probabilities `(vocab_size,)`, where each word counts half more than it occurs.

        Each sentence has one more word, the marker that a direction predicts at its end.
        """
        counts_V = np.bincount([*self.counts], [*self.counts.values()], minlength=vocab_size)
        counts_V[[BOS_ID, EOS_ID]] = self.lines
        return np.log((counts_V + 0.5) / (self.words + self.lines + vocab_size / 2))


@dataclass
class TextCounts:
    """What one pass over texts finds.

    Attributes:
        lines: the number of sentences.
        longest: the number of words of the longest one.
        words: how often each word occurs, as the text was split.
        signs: the number of sentences with each sign of `SplitCheck`.
        is_split: whether rules have split raw text.
        known: the number of held-out sentences that occur in the text.
        held_out: the number of held-out sentences.
    """

    lines: int = 0
    longest: int = 0
    words: Counter[str] = field(default_factory=Counter)
    signs: Counter[str] = field(default_factory=Counter)
    is_split: bool = False
    known: int = 0
    held_out: int = 0

    def frequencies(self, looked_up: Callable[[str], str]) -> Counter[str]:
        """The count of each word as it is looked up."""
        counts = Counter[str]()
        for word, number in self.words.items():
            counts[looked_up(word)] += number
        return counts

    def survey(self, alphabet: str, id_of: Callable[[str], int] | None) -> Survey:
        """The sizes of the corpus for a tokenizer."""
        lengths, counts = Counter[int](), Counter[int]()
        for word, number in self.words.items():
            lengths[word_length(word, alphabet)] += number
            if id_of is not None:
                counts[id_of(word)] += number
        return Survey(self.lines, self.words.total(), self.longest, dict(lengths), dict(counts))

    def warn_of_rules(self, corpus: object, rules: str):
        """Warns if other rules than a tokenizer's have split the text."""
        SplitCheck(rules, self.lines, self.signs, self.is_split).warn(corpus)

    def warn(self, corpus: object, rules: str):
        """Warns of this, of held-out sentences that occur in the text, and of lines that are rather paragraphs."""
        self.warn_of_rules(corpus, rules)
        if self.known:
            logger.warning(
                f"{self.known:,} of {self.held_out:,} held-out sentences occur in the training text {corpus}: the "
                "perplexity will be too low. Pass other held-out text."
            )
        mean = self.words.total() / self.lines
        if mean > WORDS_OF_A_PARAGRAPH:
            logger.warning(
                f"The lines of {corpus} have {mean:.0f} words on average, like paragraphs. The model reads a line as a "
                "sentence: pass --split_sentences."
            )


class Tally:
    """Counts pieces of texts, from which `counts` makes words.

    Args:
        splitter: splits raw text.
        held_out_keys: of the held-out sentences, to be looked for in the texts.
    """

    def __init__(self, splitter: TextSplitter, held_out_keys: Iterable[int]):
        self.splitter = splitter
        self.held_out_keys = frozenset(held_out_keys)
        self.lines = self.longest = 0
        self.keys, self.words = Counter[Any](), Counter[str]()  # keys of the splitter are still to be split
        self.has_raw_text = False
        self.signs = Counter[str]()
        self.found: set[int] = set()

    def add(self, texts: Iterable[SentenceText]):
        keys: list[Any] = []
        given: list[str] = []
        splitter, has_keys = self.splitter, not self.splitter.added
        for text in texts:
            self.lines += 1
            if isinstance(text, list):
                pieces = text
                given += text
                self.longest = max(self.longest, len(text))
            else:
                pieces = text.split()
                self.has_raw_text = True
                if not has_keys:
                    given += (words := splitter.words(text))
                    self.longest = max(self.longest, len(words))
                else:
                    keys += splitter.keys(pieces)
                    if len(text) > self.longest and most_words(text, len(pieces)) > self.longest:
                        self.longest = max(self.longest, len(splitter.words(text)))
            if not SIGNS_OF_SPLITTING.keys().isdisjoint(pieces):
                self.signs.update(signs_of(pieces))
            if self.held_out_keys and (key := key_of(pieces)) in self.held_out_keys:
                self.found.add(key)
        self.keys.update(keys)
        self.words.update(given)

    def merge(self, other: "Tally"):
        self.lines += other.lines
        self.longest = max(self.longest, other.longest)
        self.keys.update(other.keys)
        self.has_raw_text |= other.has_raw_text
        self.words.update(other.words)
        self.signs.update(other.signs)
        self.found |= other.found

    def split_keys(self):
        """Splits each distinct key."""
        for key, number in self.keys.items():
            for word in self.splitter.words_of_key(key):
                self.words[word] += number
        self.keys.clear()

    def counts(self, held_out_keys: Counter[int]) -> TextCounts:
        self.split_keys()
        known = sum(held_out_keys[key] for key in self.found)
        is_split = self.has_raw_text and self.splitter.name != "whitespace"
        return TextCounts(self.lines, self.longest, self.words, self.signs, is_split, known, held_out_keys.total())


def most_words(text: str, pieces: int) -> int:
    """An upper bound of the number of words of a text: rules split at marks, or a piece without any in two."""
    marks = len(MARK.findall(text))
    return 2 * pieces + 3 * marks


def key_of(words: Iterable[str]) -> int:
    """A hash of the words of a sentence, which takes less memory. It is the same in all processes."""
    text = " ".join(words).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def word_length(word: str, alphabet: str) -> int:
    """The number of characters that a tokenizer reads of a word that is not cut: bytes of UTF-8, or code points."""
    return len(word.encode("utf-8", "ignore") if alphabet == "utf8" else word)


def words_of(text: SentenceText, split: Callable[[str], list[str]] = str.split) -> list[str]:
    """The words of a sentence; `split` is for a line of text."""
    return split(text) if isinstance(text, str) else text


def count_words(
    corpus: Any, splitter: TextSplitter, held_out: Any = None, stored: Path | None = None, processes: int | None = None
) -> TextCounts:
    """Reads a corpus once, which finds broken lines before training.

    Args:
        corpus, held_out: of the class `Corpus`.
        stored: a file that keeps the counts of large files for the next run, which says so and does not count again.
        processes: that share the text. Default: one for each core, but one for little text and for data sets.
    """
    size = sum(os.path.getsize(file) for file in corpus.files)
    stored = stored if size >= MANY_BYTES else None
    source = source_of(corpus, splitter, held_out)
    if stored is not None and (counts := load_counts(stored, source)) is not None:
        print(f"{stored} has the counts of {corpus}, whose files have not changed: they are not counted again.")
        return counts
    if processes is None:
        processes = min(available_cores(), MOST_PROCESSES) if size >= MANY_BYTES else 1
    held_out_keys = Counter(map(key_of, map(words_of, held_out.texts()))) if held_out else Counter[int]()
    unit = "B" if size else " lines"
    with tqdm(desc="counting", total=size or None, unit=unit, unit_scale=True) as bar:
        if processes > 1:
            tally = _count_in_processes(corpus, Tally(splitter, held_out_keys), processes, bar)
        else:
            tally = Tally(splitter, held_out_keys)
            _count_share(corpus, tally, 0, 1, bar.update if size else None, None if size else bar.update)
    counts = tally.counts(held_out_keys)
    if stored is not None:
        store_counts(stored, source, counts)
    return counts


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count_share(
    corpus: Any,
    tally: Tally,
    rank: int,
    processes: int,
    on_bytes: Callable[[int], Any] | None = None,
    on_texts: Callable[[int], Any] | None = None,
):
    """Counts every block of texts whose turn it is."""
    with observed_reading(on_bytes) if on_bytes else nullcontext():
        texts = corpus.texts()
        for number in count():
            block = list(islice(texts, BLOCK_TEXTS))
            if not block:
                return
            if number % processes == rank:
                tally.add(block)
            if on_texts:
                on_texts(len(block))


def _count_in_processes(corpus: Any, tally: Tally, processes: int, bar: tqdm) -> Tally:
    """Each process reads the whole text, and counts its share. The bar shows the progress of the first one."""
    place = Value("q", 0)
    started: dict[Connection, Process] = {}
    try:
        for rank in range(processes):
            receiver, sender = Pipe(duplex=False)
            process = Process(target=_work, args=(sender, corpus, tally, rank, processes, place), daemon=True)
            process.start()
            sender.close()
            started[receiver] = process
        waiting = [*started]
        while waiting:
            for receiver in cast(list[Connection], wait(waiting, timeout=SECONDS_BETWEEN_UPDATES)):
                waiting.remove(receiver)
                tally.merge(_received(receiver))
            bar.update(place.value - bar.n)
    finally:
        for process in started.values():
            process.terminate()
            process.join()
    return tally


def _work(sender: Connection, corpus: Any, tally: Tally, rank: int, processes: int, place: Any):
    """What a process does: it sends its counts, or its error."""
    Thread(target=_end_with_the_parent, daemon=True).start()

    def on_bytes(number: int):
        place.value += number

    try:
        _count_share(corpus, tally, rank, processes, None if rank else on_bytes)
        tally.split_keys()
        result: Tally | Exception = tally
    except Exception as error:
        result = error
    sender.send(result)


def _end_with_the_parent():
    """A parent that was killed cannot end its processes, which would wait for ever until somebody reads."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _received(receiver: Connection) -> Tally:
    try:
        result = receiver.recv()
    except EOFError:
        raise ChildProcessError("A process that counted words has ended without a result. Start again.") from None
    if isinstance(result, Exception):
        raise result
    return result


def source_of(corpus: Any, splitter: TextSplitter, held_out: Any) -> dict[str, Any]:
    """What counts depend on: the files with their sizes and times of change, and how they are read."""
    texts = []
    for part in filter(None, (corpus, held_out)):
        files = [[str(Path(file).absolute()), os.path.getsize(file), os.stat(file).st_mtime_ns] for file in part.files]
        texts.append([files, part.column, part.language, part.split, str(part.dataset)])
    return {"version": __version__, "texts": texts, "rules": [*splitter.rules]}


def store_counts(path: Path, source: dict[str, Any], counts: TextCounts):
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged(path) as unfinished, gzip.open(unfinished, "wt", encoding="ascii", compresslevel=1) as file:
        json.dump({"source": source, **vars(counts)}, file)


def load_counts(path: Path, source: dict[str, Any]) -> TextCounts | None:
    """The stored counts, if they come from the same source."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            values = json.load(file)
    except (EOFError, OSError, ValueError, zlib.error):
        return None
    if values.pop("source", None) != source:
        return None
    for name in ("words", "signs"):
        values[name] = Counter(values[name])
    return TextCounts(**values)
