"""Pretrained word vectors in text files, and what a task makes of them: its vocabulary and the vectors to start from.

The files are those of GloVe (a word and its numbers in each line), of word2vec and of fastText (a first line with the
number of words and the width), plain, `.gz` or `.zst`.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from math import isfinite
from pathlib import Path
from statistics import mode
from typing import NamedTuple

import numpy as np
from tqdm.auto import tqdm
from transformers.utils import logging

from modeling_elmo.run_scripts.program.files import numbered_lines
from modeling_elmo.tokenization.elmo_characters import (
    CONTINUATION,
    MAX_TERM_WORD,
    PAD_WORD,
    SPECIAL_WORDS,
    SURROGATES,
    UNK_WORD,
)

logger = logging.get_logger(__name__)

FIRST_LINES = 100  # where no header tells the width, it is that of most of these


class WordVectors(NamedTuple):
    words: list[str]
    vectors: np.ndarray  # (words, width), float32


class InitialEmbeddings(NamedTuple):
    vectors: np.ndarray  # (words of the vocabulary, width), float32
    found: int  # words of the vocabulary that have a vector in the file


def read_word_vectors(path: str | Path, limit: int | None = None) -> WordVectors:
    """Reads vectors of words, which may hold spaces; of a word that stands there twice the first vector.

    Args:
        path: the file.
        limit: how many words to read, from the first; None: all.

    Returns:
        `WordVectors`: the words, and their vectors of shape `(words, width)`.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: pass the number of words to read, at least 1, or None for all.")
    width, count, lines = _opened(Path(path))
    total = min(filter(None, (count, limit)), default=None)
    rows: dict[str, int] = {}
    numbers, twice = array("f"), 0  # an array, as it grows without a copy of each number as an object
    for number, line in tqdm(lines, desc=Path(path).name, total=total, unit=" words", unit_scale=True):
        word, vector = _parsed(line, width, f"{path}, line {number}")
        if word in rows:
            twice += 1
            continue
        rows[word] = len(rows)
        numbers.extend(vector)
        if len(rows) == limit:
            break
    if count not in (None, len(rows) + twice) and len(rows) != limit:
        raise ValueError(
            f"{path} begins with the number of its words, {count}, but holds {len(rows) + twice}. Pass the complete "
            f"file, or --word_vectors_limit {len(rows)}."
        )
    if twice:
        logger.warning(f"{path}: {twice:,} lines hold a word that stands above; its first vector is taken.")
    return WordVectors(list(rows), np.frombuffer(numbers, np.float32).reshape(len(rows), width))


def _opened(path: Path) -> tuple[int, int | None, Iterator[tuple[int, str]]]:
    """The width, the number of words where a header tells it, and their lines."""
    lines = ((number, line) for number, line in numbered_lines(path) if line.strip(" "))
    begin = list(islice(lines, FIRST_LINES))
    if not begin:
        raise ValueError(f"{path} is empty; pass a file with a word and its vector in each line.")
    widths = [line.rstrip(" ").count(" ") for _, line in begin]
    told, below = begin[0][1].split(), mode(widths[1:] or [0])
    count, width = None, mode(widths)
    if len(told) == 2 and all(map(str.isdecimal, told)) and (below != 1 or told[1] == "1"):
        (count, width), begin = map(int, told), begin[1:]
    if width < 1:
        raise ValueError(f"{path} has no numbers beside words; pass a file with a word and numbers, parted by spaces.")
    return width, count, chain(begin, lines)


def _parsed(line: str, width: int, place: str) -> tuple[str, array]:
    """A word and its vector."""
    word, *fields = line.rstrip(" ").rsplit(" ", width)
    try:
        vector = array("f", map(float, fields))
    except ValueError:
        strange = next(text for text in fields if not _is_number(text))
        raise ValueError(
            f"{place}: {strange!r:.80} is not a number, and the last {width} must be. Correct it."
        ) from None
    more = word.split(" ")[1:]
    if len(fields) < width or (more and all(map(_is_number, more)) and not all(map(str.isdecimal, more))):
        found = len(fields) + len(more)
        raise ValueError(f"{place} has {found} numbers, where others have {width}: {line!r:.80}. Correct it.")
    if not word:
        raise ValueError(f"{place} has no word before its numbers: {line!r:.80}. Take the line out.")
    if not isfinite(sum(vector)):
        raise ValueError(f"{place}: the vector of {word!r:.80} is not finite in float32. Take the line out.")
    return word, vector


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def initial_embeddings(
    vectors: WordVectors, vocabulary: Sequence[str], seed: int, lowercase: bool
) -> InitialEmbeddings:
    """The vector of each word; where there is none, random numbers that are as large as those of the file.

    `<PAD>` has zeros, and `<UNK>` the mean of the file's vectors.

    Args:
        vectors: those of the file.
        vocabulary: the words in the order of their ids.
        seed: of the random numbers.
        lowercase: whether a word that has no vector takes that of its lower-case form.

    Returns:
        `InitialEmbeddings`: vectors of shape `(len(vocabulary), width)`, and how many words have one in the file.
    """
    rows = {word: row for row, word in enumerate(vectors.words)}
    own = np.array([_row_of(word, rows, lowercase) for word in vocabulary])
    start = np.random.default_rng(seed).standard_normal((len(vocabulary), vectors.vectors.shape[1]), np.float32)
    start *= _standard_deviation(vectors.vectors)
    start[own >= 0] = vectors.vectors[own[own >= 0]]
    for index, word in enumerate(vocabulary):
        if word in (PAD_WORD, UNK_WORD):
            start[index] = 0 if word == PAD_WORD else vectors.vectors.mean(0, dtype=np.float64)
    return InitialEmbeddings(start, int((own >= 0).sum()))


def _row_of(word: str, rows: dict[str, int], lowercase: bool) -> int:
    if word in (PAD_WORD, UNK_WORD):
        return -1
    return rows.get(word, rows.get(word.lower(), -1) if lowercase else -1)


def _standard_deviation(values: np.ndarray) -> float:
    """`values.std()` in double precision, without a copy of large ones."""
    mean = values.mean(dtype=np.float64)
    return float(np.sqrt(np.einsum("nw,nw->", values, values, dtype=np.float64) / values.size - mean**2))


def task_vocabulary(sentences: Iterable[Sequence[str]], min_count: int = 2, extra: Sequence[str] = ()) -> list[str]:
    """The words that occur `min_count` times in the training text, frequent ones first, and then those of `extra`.

    Rarer ones share `<UNK>`, which is trained thereby. Left out are the special words, which stand in front of these
    in a tokenizer, and what cannot be a word of one.
    """
    counts = Counter(chain.from_iterable(sentences))
    frequent = (word for word, count in counts.most_common() if count >= min_count)
    return [word for word in dict.fromkeys(chain(frequent, extra)) if _can_be_word(word)]


def _can_be_word(word: str) -> bool:
    no_words = (*SPECIAL_WORDS, MAX_TERM_WORD, "")
    return word not in no_words and not word.startswith(CONTINUATION) and not SURROGATES.search(word)
