"""Batches of texts: their checks, their lengths after truncation and padding, and the tokens of their encodings."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from numbers import Integral

import numpy as np
from tokenizers import Encoding
from transformers import BatchEncoding
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils import PaddingStrategy

from .elmo_characters import SPECIAL_WORDS

MAX_PADDED = 2**24  # tokens of a text; their characters take 7 GB


def as_batch(text, text_pair, is_split_into_words: bool) -> tuple[list[tuple], bool]:
    """Every text as a tuple of its parts, one or (for a pair) two, and whether the caller passed a batch."""
    unit = (list, tuple) if is_split_into_words else str
    is_batched = isinstance(text, (list, tuple))
    if is_split_into_words:
        is_batched = is_batched and len(text) > 0 and isinstance(text[0], (list, tuple))
    if not is_batched:
        batch = [(text,) if text_pair is None else (text, text_pair)]
    elif text_pair is None:
        batch = [tuple(item) if _is_pair(item, unit) else (item,) for item in text]
    elif not isinstance(text_pair, (list, tuple)) or len(text_pair) != len(text):
        raise ValueError(
            f"A batch of {len(text)} texts needs a `text_pair` of the same length; got {type(text_pair).__name__}"
            f"{f' of length {len(text_pair)}' if isinstance(text_pair, (list, tuple)) else ''}."
        )
    else:
        batch = list(zip(text, text_pair, strict=True))
    for part in chain.from_iterable(batch):
        if not isinstance(part, unit):
            raise TypeError(
                f"A text must be {'a list of words' if is_split_into_words else 'a string'}, got "
                f"{type(part).__name__}: {part!r:.60}. Pass strings, or lists of words with is_split_into_words=True."
            )
    return [tuple(part if isinstance(part, str) else list(part) for part in parts) for parts in batch], is_batched


def checked_sentences(sentences: Iterable[str | Sequence[str]]) -> Iterator[str | list[str]]:
    """Yields each text, or list of words.

    Raises:
        TypeError: the sentences are one text or a table, or a sentence is neither a text nor a list of words.
    """
    advice = "pass a list of texts, or of lists of words."
    is_table = isinstance(sentences, Mapping) or hasattr(sentences, "columns")
    if is_table or isinstance(sentences, (str, bytes)) or not isinstance(sentences, Iterable):
        raise TypeError(f"Sentences must be a list, got {type(sentences).__name__}: {sentences!r:.60}; {advice}")
    for number, sentence in enumerate(sentences):
        if isinstance(sentence, str):
            yield sentence
            continue
        is_list = isinstance(sentence, (Sequence, np.ndarray)) and not isinstance(sentence, bytes)
        wrong = [word for word in sentence if not isinstance(word, str)] if is_list else [sentence]
        if wrong:
            raise TypeError(f"Sentence {number} {'has' if is_list else 'is'} {wrong[0]!r:.60}; {advice}")
        yield list(sentence)


def _is_pair(item, unit) -> bool:
    return isinstance(item, (list, tuple)) and len(item) == 2 and all(isinstance(part, unit) for part in item)


def checked_max_length(
    padding_strategy: PaddingStrategy = PaddingStrategy.DO_NOT_PAD,
    max_length: int | None = None,
    stride: int = 0,
    pad_to_multiple_of: int | None = None,
    **_,
) -> int | None:
    """`max_length` of a call, no larger than the backend can count: `model_max_length` is 10^30 if there is none.

    Raises:
        ValueError: a number of tokens is not an integer, is negative, or would pad a text without end.
    """
    for name, value in {"max_length": max_length, "stride": stride, "pad_to_multiple_of": pad_to_multiple_of}.items():
        is_default = value is None and name != "stride"
        if not is_default and (not isinstance(value, Integral) or value < 0):
            raise ValueError(f"`{name}` is {value!r}; pass an integer of at least 0.")
    most = max(pad_to_multiple_of or 0, (max_length or 0) if padding_strategy == PaddingStrategy.MAX_LENGTH else 0)
    if most > MAX_PADDED:
        raise ValueError(f"Each text would be padded to {most} tokens; pass at most {MAX_PADDED}.")
    return None if max_length is None else min(max_length, sys.maxsize)


def checked_side(name: str, side: str) -> str:
    if side not in ("left", "right"):
        raise ValueError(f'{name}={side!r}; pass "left" or "right".')
    return side


def needs_backend(
    lengths: list[list[int]],
    add_special_tokens: bool = True,
    truncation_strategy: TruncationStrategy = TruncationStrategy.DO_NOT_TRUNCATE,
    max_length: int | None = None,
    stride: int = 0,
    return_overflowing_tokens: bool = False,
    return_special_tokens_mask: bool = False,
    return_offsets_mapping: bool = False,
    return_length: bool = False,
    **_,
) -> bool:
    """Whether the backend must encode texts of `lengths` words, because numpy cannot. The options are those of a call.

    Raises:
        ValueError: `max_length` or `stride` does not fit a text, or only the second text may be cut and there is none.
    """
    markers = 2 if add_special_tokens else 0
    is_cut = False
    if truncation_strategy != TruncationStrategy.DO_NOT_TRUNCATE and max_length is not None:
        if 0 < stride >= max_length - 2:  # the backend always counts the markers of one text
            raise ValueError(_too_large(stride, max(max_length - 2, 0), max_length))
        for parts in lengths:
            needed = markers * len(parts)
            room = max_length - needed
            if room < 0:
                raise ValueError(f"max_length={max_length} has no room for {needed} markers; pass a larger one.")
            if sum(parts) > room:
                _check_room(parts, truncation_strategy, room, max_length, stride, return_overflowing_tokens)
                is_cut = True
    return is_cut or return_overflowing_tokens or return_special_tokens_mask or return_offsets_mapping or return_length


def _check_room(
    parts: list[int], strategy: TruncationStrategy, room: int, max_length: int, stride: int, overflowing: bool
) -> None:
    """Refuses lengths on which the backend panics, raises a bare exception or returns texts that are too long."""
    if strategy == TruncationStrategy.ONLY_SECOND and len(parts) == 1:
        raise ValueError(
            f"truncation='only_second' with max_length={max_length}, but a text of {parts[0]} words has no second text "
            "to cut. Pass `text_pair`, or truncation=True."
        )
    for length, share in zip(parts, _shares(parts, strategy, room), strict=True):
        emptied = share == 0 and (overflowing or (room > 0 and strategy != TruncationStrategy.LONGEST_FIRST))
        if share < length and (share < 0 or emptied or 0 < share <= stride):
            raise ValueError(_too_large(stride, max(share, 0), max_length))


def _too_large(stride: int, words: int, max_length: int) -> str:
    return (
        f"stride={stride} must be smaller than the {words} words that max_length={max_length} leaves; pass a smaller "
        "stride or a larger max_length."
    )


def _shares(parts: list[int], strategy: TruncationStrategy, room: int) -> list[int]:
    """Number of words of each part that the backend keeps, for `room` words in total."""
    if strategy == TruncationStrategy.ONLY_FIRST:
        return [room - sum(parts[1:]), *parts[1:]]
    if strategy == TruncationStrategy.ONLY_SECOND:
        return [parts[0], *(room - parts[0] for _ in parts[1:])]
    if len(parts) == 1:
        return [room]
    short = min(parts) if min(parts) <= room - min(parts) else room // 2
    return [short, room - short] if parts[0] <= parts[1] else [room - short, short]


def positions_of_tokens(encoded: BatchEncoding, lengths: list[list[int]]) -> list[list[int]]:
    """The place of each token of encodings among the special words and the words of the batch, one after the other."""
    starts = accumulate(chain.from_iterable(lengths), initial=len(SPECIAL_WORDS))
    starts_of_texts = [[next(starts) for _ in parts] for parts in lengths]
    texts = encoded.get("overflow_to_sample_mapping", range(len(lengths)))
    return [
        _positions(encoding, starts_of_texts[text]) for encoding, text in zip(encoded.encodings, texts, strict=True)
    ]


def _positions(encoding: Encoding, starts: list[int]) -> list[int]:
    return [
        index if word is None or part is None else starts[part] + word
        for index, word, part in zip(encoding.ids, encoding.word_ids, encoding.sequence_ids, strict=True)
    ]


def padded_lengths(
    lengths_B: np.ndarray, strategy: PaddingStrategy, max_length: int | None, multiple: int | None
) -> np.ndarray:
    """The number of tokens of each text with its padding."""
    if strategy == PaddingStrategy.DO_NOT_PAD:
        return lengths_B
    target = max_length if strategy == PaddingStrategy.MAX_LENGTH and max_length is not None else int(lengths_B.max())
    if multiple:
        target = -(-target // multiple) * multiple
    return np.maximum(lengths_B, target)


class LazyEncodings(Sequence):
    """The backend's encodings of a batch (`word_ids`, `char_to_token`, ...), computed on first use."""

    def __init__(self, length: int, encode: Callable[[], list[Encoding]]):
        self.length = length
        self.encode = encode
        self.encodings: list[Encoding] | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index):
        if self.encodings is None:
            self.encodings = self.encode()
        return self.encodings[index]

    def __reduce__(self):
        return list, (list(self),)
