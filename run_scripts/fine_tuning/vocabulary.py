"""The vocabulary of a task and its initial word embeddings."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from modeling_elmo.run_scripts.vectors.word_vectors import WordVectors
from modeling_elmo.tokenization.elmo_characters import (
    CONTINUATION,
    MAX_TERM_WORD,
    PAD_WORD,
    SPECIAL_WORDS,
    SURROGATES,
    UNK_WORD,
)


def initial_embeddings(
    vectors: WordVectors, vocabulary: Sequence[str], seed: int, lowercase: bool
) -> tuple[np.ndarray, int]:
    """The initial embedding of each word: its vector, or random numbers with the vectors' standard deviation.

    `<PAD>` gets zeros, and `<UNK>` the mean of all vectors. With `lowercase`, a word without a vector gets the vector
    of its lower-case form. Also returns the number of words with a vector.
    """
    rows = {word: row for row, word in enumerate(vectors.words)} | {PAD_WORD: -1, UNK_WORD: -1}
    found = np.array([rows.get(word, rows.get(word.lower(), -1) if lowercase else -1) for word in vocabulary])
    start = np.random.default_rng(seed).standard_normal((len(vocabulary), vectors.vectors.shape[1]), np.float32)
    mean = vectors.vectors.mean(dtype=np.float64)  # in double precision, without a copy of the vectors
    square = np.einsum("nw,nw->", vectors.vectors, vectors.vectors, dtype=np.float64) / vectors.vectors.size
    start *= float(np.sqrt(square - mean**2))
    start[found >= 0] = vectors.vectors[found[found >= 0]]
    for index, word in enumerate(vocabulary):
        if word in (PAD_WORD, UNK_WORD):
            start[index] = 0 if word == PAD_WORD else vectors.vectors.mean(0, dtype=np.float64)
    return start, int((found >= 0).sum())


def task_vocabulary(sentences: Iterable[Sequence[str]], min_count: int = 2, extra: Sequence[str] = ()) -> list[str]:
    """The words that occur at least `min_count` times in the training text, by frequency, and then `extra` words.

    Rarer words share `<UNK>`, which is trained by them. Special words are left out, because a tokenizer puts them in
    front, and so are strings that cannot be a word of a tokenizer.
    """
    counts = Counter(chain.from_iterable(sentences))
    frequent = (word for word, count in counts.most_common() if count >= min_count)
    return [word for word in dict.fromkeys(chain(frequent, extra)) if _can_be_word(word)]


def _can_be_word(word: str) -> bool:
    return (
        word not in (*SPECIAL_WORDS, MAX_TERM_WORD, "")
        and not word.startswith(CONTINUATION)
        and not SURROGATES.search(word)
    )
