"""What all batches of a language model are made with: words to arrays, and where in the text a batch stands.

Shape suffixes: B rows, T steps, W max_word_length, N tokens.
"""

import string
from collections.abc import Iterable, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from modeling_elmo.run_scripts.pretraining.corpus import Corpus, Place, Survey, Text, number_of_words
from modeling_elmo.tokenization.elmo_characters import BOS_ID, EOS_ID
from modeling_elmo.tokenization.tokenization_elmo import CallLock

PUNCTUATION = string.punctuation.encode()
CONTROLS = bytes({*range(32), 127} - {*b"\t\n\v\f\r"})  # moses splits there
# To spaces, as is what `bytes.split`, unlike `str.split`, does not take for white space.
SPACES = bytes.maketrans(gaps := PUNCTUATION + CONTROLS, b" " * len(gaps))


class Tokens(NamedTuple):
    """What stands at the positions of a text, and what is predicted there.

    Shape:
        input_ids, labels: `(N,)` or `(B, T)`
        character_ids: `(N, W)` or `(B, T, W)`
    """

    input_ids: np.ndarray
    character_ids: np.ndarray
    labels: np.ndarray


class Encoder:
    """Turns sentences into arrays by the tokenizer's table of words.

    Args:
        tokenizer: an `ELMoTokenizer`.
        is_split_into_words: whether white space separates the words; otherwise the tokenizer splits the text.
    """

    def __init__(self, tokenizer, is_split_into_words: bool):
        if not hasattr(tokenizer, "word_table"):
            raise TypeError(f"Received a {type(tokenizer).__name__}; pass an ELMoTokenizer, which knows characters.")
        self.table, self.lock = tokenizer.word_table, tokenizer.lock
        self.by_spaces = is_split_into_words or tokenizer.splitter.name == "whitespace"
        self.split = str.split if self.by_spaces else tokenizer.splitter.words

    def words(self, text: Text) -> list[str]:
        return self.split(text) if isinstance(text, str) else text

    def max_words(self, text: Text) -> int:
        """At least the number of words, and cheap: every word that a rule splits off begins at a punctuation mark or at
        the letters behind one. (The treebank rules for `cannot` and the like are left out of it.)"""
        if self.by_spaces or not isinstance(text, str):
            return number_of_words(text)
        if not text.isascii():
            return len(self.split(text))
        characters = text.encode()
        marks = len(characters) - len(characters.translate(None, PUNCTUATION))
        return len(characters.translate(SPACES).split()) + marks

    @CallLock.held
    def batch(self, sentences: list[list[str]]) -> Tokens:
        """Sentences as rows with their markers; the labels are the row's own words, -100 at padding."""
        lengths_B = np.array([len(words) + 2 for words in sentences])
        places_T, last_B = np.arange(lengths_B.max()), lengths_B[:, None] - 1
        rows_BT = np.zeros((len(sentences), len(places_T)), dtype=np.int64)  # of the table; its row 0 is padding
        rows_BT[(places_T > 0) & (places_T < last_B)] = self.table.rows(list(chain.from_iterable(sentences)))
        rows_BT[:, 0] = BOS_ID
        np.put_along_axis(rows_BT, last_B, EOS_ID, axis=1)
        ids_BT = self.table.input_ids(rows_BT)
        return Tokens(ids_BT, self.table.character_ids(rows_BT), np.where(places_T <= last_B, ids_BT, -100))

    @CallLock.held
    def stream(self, words: list[str], backward: bool) -> Tokens:
        """A sentence as a part of a stream: `<S> a b` predicts `a b </S>`; read backward, `</S> b a` does `b a <S>`."""
        rows_N = np.concatenate([[BOS_ID], self.table.rows(words), [EOS_ID]])
        rows_N = rows_N[::-1] if backward else rows_N
        ids_N = self.table.input_ids(rows_N)
        return Tokens(ids_N[:-1], self.table.character_ids(rows_N[:-1]), ids_N[1:])


class LMBatch(NamedTuple):
    """A batch, and where it comes from.

    Args:
        inputs: keyword arguments of `ELMoForPreTraining.forward`.
        num_predictions: of one direction.
        num_unknown: how many of them, in the forward direction, are `<UNK>`.
        epoch: the epoch that its text belongs to. Rows of a stream may already be in the next.
        fraction: the part of that epoch that has been read, None if the size of the corpus is unknown.
        position: where reading goes on behind it; None for held-out streams.
        places: the lines that are in it.
        begins: of a stream, `(2, B)`: the rows of each direction that start anew, from zero states.
    """

    inputs: dict[str, Tensor]
    num_predictions: int
    num_unknown: int
    epoch: int
    fraction: float | None
    position: dict[str, Any] | None
    places: list[Place]
    begins: Tensor | None = None


class CorpusBatches(IterableDataset):
    """What both ways of making batches share.

    Args:
        corpus: the text.
        tokenizer: an `ELMoTokenizer`.
        is_split_into_words: whether white space separates the words; otherwise the tokenizer splits the text.
        seed, shuffle_buffer: together with the number of the epoch they decide the order.
        shuffle: whether the order changes at all.
        repeat: whether the next epoch follows; otherwise ranks may get different numbers of batches.
        position: of the last batch, or what `merge_positions` made of those of all ranks; default the beginning.
        rank, world_size: this process and how many share the batches.
        survey: of the corpus; tells how far an epoch is.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer,
        *,
        is_split_into_words: bool,
        seed: int = 0,
        shuffle_buffer: int = 100_000,
        shuffle: bool = True,
        repeat: bool = True,
        position: dict[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        survey: Survey | None = None,
        **settings: int,
    ):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} of world_size={world_size}: pass a rank from 0 to {world_size - 1}.")
        for name, value in {**settings, "shuffle_buffer": shuffle_buffer}.items():
            if value < 1:
                raise ValueError(f"{name}={value}: pass at least 1.")
        self.corpus, self.survey = corpus, survey
        self.encoder = Encoder(tokenizer, is_split_into_words)
        self.seed, self.shuffle_buffer, self.shuffle, self.repeat = seed, shuffle_buffer, shuffle, repeat
        self.rank, self.world_size = rank, world_size
        order = {"seed": seed, "shuffle": shuffle, "shuffle_buffer": shuffle_buffer}
        text = {"is_split_into_words": is_split_into_words, "text": corpus.order, "lines": survey and survey.lines}
        self.settings = {"batches": type(self).__name__, **settings, **order, **text}
        self.position = position
        for name in self.settings if position is not None else ():
            self._check(name, position.get(name), self.settings[name])

    @staticmethod
    def _check(name: str, saved: Any, now: Any):
        # A stream has no lines, and older positions do not say what the text was.
        if saved != now and not (name in ("lines", "text", "is_split_into_words") and None in (saved, now)):
            raise ValueError(
                f"The position was saved with {name}={saved!r}, but here it is {now!r}: the batches behind it would be "
                "others. Go on with the same, or begin anew without a position."
            )

    def _epochs(self, first: int) -> Iterable[int]:
        return count(first) if self.repeat else (first,)

    def _shuffled(self, items: Sequence | np.ndarray, *seed: int) -> np.ndarray:
        """Numbers of items, in an order of the seeds."""
        return np.random.default_rng(seed).permutation(len(items)) if self.shuffle else np.arange(len(items))


def as_tensors(**arrays: np.ndarray) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
