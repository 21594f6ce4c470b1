"""Alphabets, words as rows of character ids, vocabularies, and batches of texts with their lengths.

A row is `begin, characters, end, padding, ...` of width `max_word_length`. The id 0 is reserved for padding words, so
every other id is one higher than in the numbering of the original. Shape suffixes: N words, W max_word_length.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from io import StringIO
from itertools import chain
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding
from transformers import BatchEncoding
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils import PaddingStrategy, logging

logger = logging.get_logger(__name__)

BOS_WORD, EOS_WORD, UNK_WORD, PAD_WORD = "<S>", "</S>", "<UNK>", "<PAD>"
SPECIAL_WORDS = (PAD_WORD, BOS_WORD, EOS_WORD, UNK_WORD)  # in the order of their ids
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
MAX_TERM_WORD = "!!!MAXTERMID"  # a line of the original vocabulary files that is not a word
NO_TEXT_WORDS = frozenset([*SPECIAL_WORDS, MAX_TERM_WORD, ""])
SURROGATES = re.compile("[\ud800-\udfff]")
# A private-use character, which texts do not contain. With a continuation prefix that starts no word, WordPiece
# recognizes whole words only, as WordLevel does, and stock pipelines know that every token is a word.
CONTINUATION = "\U0010fffd"
MIN_WORD_LENGTH = 3  # begin, one character, end
MAX_WORD_LENGTH = 1000  # the word table has a row of this length for each word, and starts with 1024 rows
LONGEST_REMEMBERED = 100  # characters of a word; longer pieces, such as data in base 64, are rare and fill the memory
MAX_ID = 2**31 - 2  # ids, and these numbers plus one, are int32
MAX_PADDED = 2**24  # tokens of a text; their characters take 7 GB


class Utf8Alphabet:
    """The bytes of UTF-8, as in bilm-tf and AllenNLP.

    Ids of the original, before the shift by one: bytes 0 to 255, begin and end of sentence 256 and 257, begin and end
    of word 258 and 259, padding 260.
    """

    size = 262
    markers = (BOS_WORD, EOS_WORD)  # as the original writes them in a text
    begin_sentence, end_sentence, begin_word, end_word, padding = 257, 258, 259, 260, 261

    def encode(self, word: str, limit: int) -> np.ndarray:
        """The ids of the first `limit` bytes of a word. Lone surrogates have no bytes.

        Shape:
            result: (at most limit,)
        """
        first_bytes = word.encode("utf-8", "ignore")[:limit]
        return np.frombuffer(first_bytes, dtype=np.uint8).astype(np.int32) + 1

    def decode(self, ids: np.ndarray) -> str:
        """The text of byte ids, without a last character that is incomplete."""
        if ids.size and not 1 <= ids.min() <= ids.max() <= 256:
            raise ValueError(f"The character ids {ids.tolist()} are not bytes, whose ids are 1 to 256.")
        return bytes((ids - 1).tolist()).decode("utf-8", "ignore")


class LexiconAlphabet:
    """A dictionary of code points, as in ELMoForManyLangs.

    Args:
        lexicon: ids of all characters, of `<bos>`, `<eos>`, `<oov>`, `<pad>` and of the two entries below.
        begin_of_word, end_of_word: the entries that begin and end a word.
    """

    markers = ("<bos>", "<eos>")

    def __init__(self, lexicon: Mapping[str, int] | None, begin_of_word: str = "<bow>", end_of_word: str = "<eow>"):
        lexicon = checked_lexicon(lexicon, ("<bos>", "<eos>", "<oov>", "<pad>", begin_of_word, end_of_word))
        self.size = max(lexicon.values()) + 2
        self.begin_sentence = lexicon["<bos>"] + 1
        self.end_sentence = lexicon["<eos>"] + 1
        self.begin_word = lexicon[begin_of_word] + 1
        self.end_word = lexicon[end_of_word] + 1
        self.unknown = lexicon["<oov>"] + 1
        self.padding = lexicon["<pad>"] + 1
        self._ids = {}
        self._characters = {self.unknown: "\ufffd"}
        for entry, index in lexicon.items():
            if len(entry) == 1:
                self._ids[entry] = index + 1
                self._characters[index + 1] = entry

    def encode(self, word: str, limit: int) -> np.ndarray:
        """The ids of the first `limit` code points. Unknown ones, and lone surrogates, have the id of `<oov>`.

        Shape:
            result: (at most limit,)
        """
        ids = [self._ids.get(character, self.unknown) for character in word[:limit]]
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """The text of character ids, with U+FFFD for unknown characters."""
        missing = {*ids.tolist()} - self._characters.keys()
        if missing:
            raise ValueError(f"The character ids {sorted(missing)} are not in the lexicon.")
        return "".join(map(self._characters.__getitem__, ids.tolist()))


def checked_lexicon(lexicon: Any, required: Iterable[str]) -> Mapping[str, int]:
    """Refuses a wrong character lexicon, before a wrong id reaches an embedding."""
    if not isinstance(lexicon, Mapping) or not lexicon:
        raise ValueError(f'`lexicon` is {lexicon!r:.80}; pass a dictionary: {{"<bos>": 0, "<eos>": 1, ..., "a": 6}}.')
    entries = list(lexicon)  # of any type
    missing = [name for name in required if name not in entries]
    if missing:
        raise ValueError(f"`lexicon` lacks the entries {missing}; add them with their ids.")
    seen: set[int] = set()
    for key, value in lexicon.items():
        if type(value) is not int or not 0 <= value <= MAX_ID or value in seen:
            raise ValueError(f"`lexicon` has the id {value!r} for {key!r}; pass different integers from 0 to {MAX_ID}.")
        seen.add(value)
    return lexicon


def build_alphabet(alphabet: str, max_word_length: int, lexicon: Mapping[str, int] | None, begin: str, end: str):
    if type(max_word_length) is not int or not MIN_WORD_LENGTH <= max_word_length <= MAX_WORD_LENGTH:
        raise ValueError(f"max_word_length={max_word_length!r}; pass {MIN_WORD_LENGTH} to {MAX_WORD_LENGTH}.")
    if alphabet == "lexicon":
        return LexiconAlphabet(lexicon, begin, end)
    if alphabet != "utf8" or lexicon is not None:
        raise ValueError(f'alphabet={alphabet!r}, lexicon={lexicon!r:.80}: pass "utf8", or "lexicon" and a `lexicon`.')
    return Utf8Alphabet()


class Memory(dict):
    """The values of a function, computed once; all are forgotten when it is full. It never remembers long words."""

    def __init__(self, function: Callable, max_size: int = 2**17):
        self.function = function
        self.max_size = max_size

    def __missing__(self, key):
        value = self.function(key)
        word = key if isinstance(key, str) else key[0]
        if len(word) <= LONGEST_REMEMBERED:
            if len(self) >= self.max_size:
                self.clear()
            self[key] = value
        return value


class WordTable:
    """The ids and characters of words, computed once per distinct word.

    A batch of words becomes row numbers of a growing table. Its ids, and its characters, are then one indexing
    operation. The row number of a special word is its id. A batch clears the table first if it has more than
    `max_words` words. Each occurrence of a very long word has a row of its own, so that the table does not remember it.

    Args:
        max_word_length: width of a row; a longer word is cut.
        literal_markers: whether the markers that the alphabet names are markers as words, or spelled out.
        cut_before_lookup: whether a longer word is its first characters, also for its id.
        spelling: how a word is looked up.
    """

    def __init__(
        self,
        alphabet: "Utf8Alphabet | LexiconAlphabet",
        id_of_word: Callable[[str], int],
        max_word_length: int,
        literal_markers: bool = False,
        cut_before_lookup: bool = False,
        spelling: Callable[[str], str] = str,
        max_words: int = 2**18,
    ):
        self.alphabet = alphabet
        self.id_of_word = id_of_word
        self.max_word_length = max_word_length
        self.markers = alphabet.markers if literal_markers else ()
        self.cut_before_lookup = cut_before_lookup
        self.spelling = spelling
        self.max_words = max_words
        self.dtype = np.int16 if alphabet.size <= np.iinfo(np.int16).max else np.int32
        self.clear()

    def clear(self) -> None:
        """Removes all words, which invalidates all row numbers."""
        self._row_of_word = Memory(self.add, max_size=sys.maxsize)  # `rows` clears it
        self._row_of_word.update(zip(self.markers, (BOS_ID, EOS_ID), strict=False))
        self._num_rows = len(SPECIAL_WORDS)
        self._ids_N = np.arange(1024)
        self._lengths_N = np.zeros(1024, dtype=np.int64)  # columns before the in-word padding
        self._characters_NW = np.zeros((1024, self.max_word_length), dtype=self.dtype)
        self._write(BOS_ID, [self.alphabet.begin_sentence])
        self._write(EOS_ID, [self.alphabet.end_sentence])

    def _write(self, row: int, characters: Sequence[int] | np.ndarray) -> None:
        end = len(characters) + 1
        self._characters_NW[row, 0] = self.alphabet.begin_word
        self._characters_NW[row, 1:end] = characters
        self._characters_NW[row, end] = self.alphabet.end_word
        self._characters_NW[row, end + 1 :] = self.alphabet.padding
        self._lengths_N[row] = end + 1

    def add(self, word: str) -> int:
        """Gives a new word its row."""
        if not isinstance(word, str):
            raise TypeError
        looked_up = self.looked_up(word)
        if looked_up != word:
            return self._row_of_word[looked_up]
        row = self._num_rows
        if row == len(self._ids_N):
            self._ids_N = _doubled(self._ids_N)
            self._lengths_N = _doubled(self._lengths_N)
            self._characters_NW = _doubled(self._characters_NW)
        self._ids_N[row] = self.id_of_word(word)
        self._write(row, self.alphabet.encode(word, self.max_word_length - 2))
        self._num_rows += 1
        return row

    def looked_up(self, word: str) -> str:
        """The part of a word that its id depends on, in its spelling."""
        word = self.spelling(word)
        return word[: self.max_word_length - 2] if self.cut_before_lookup else word

    def id_of(self, word: str) -> int:
        """The id of a word, which gets no row."""
        looked_up = self.looked_up(word)
        if looked_up in self.markers:
            return (BOS_ID, EOS_ID)[self.markers.index(looked_up)]
        return self.id_of_word(looked_up)

    def __getstate__(self) -> dict:
        # Without the words: the hash of a tokenizer in `datasets` must not depend on earlier calls.
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self.clear()

    def rows(self, words: Sequence[str]) -> np.ndarray:
        """Row numbers of a batch of words, valid until the next call.

        Shape:
            result: (N,)
        """
        if self._num_rows > self.max_words:
            self.clear()
        try:
            return np.fromiter(map(self._row_of_word.__getitem__, words), dtype=np.int64, count=len(words))
        except TypeError:  # from `add`, or because a word is not hashable
            check_strings(words)
            raise

    def input_ids(self, rows: np.ndarray) -> np.ndarray:
        """The ids of rows, in the same shape."""
        return self._ids_N[rows]

    def character_ids(self, rows: np.ndarray, trim: bool = False) -> np.ndarray:
        """Characters of width `max_word_length` or, with `trim`, as wide as the longest word.

        Shape:
            rows: (...)
            result: (..., W), or narrower
        """
        width = int(self._lengths_N[rows].max(initial=0)) if trim else self.max_word_length
        return self._characters_NW[rows, :width]

    def widen(self, character_ids: np.ndarray, out: np.ndarray) -> None:
        """Writes rows at full width: in-word padding for words, zeros for padding words.

        Shape:
            character_ids: (N, at most W)
            out: (N, W)
        """
        if not len(character_ids):
            return
        width = character_ids.shape[1]
        if width > self.max_word_length:
            raise ValueError(f"`character_ids` have {width} columns, but this tokenizer has {self.max_word_length}.")
        out[:, :width] = character_ids
        out[:, width:] = self.alphabet.padding
        if not character_ids[:, 0].all():
            out[character_ids[:, 0] == 0] = 0

    def decode(self, character_ids: np.ndarray, skip_markers: bool = False) -> list[str]:
        """The words spelled by rows, without padding words. Long words stay cut.

        Shape:
            character_ids: (N, at most W)
        """
        begin = self.alphabet.begin_word
        end = self.alphabet.end_word
        markers = {(self.alphabet.begin_sentence,): BOS_WORD, (self.alphabet.end_sentence,): EOS_WORD}
        words = []
        for row_W in character_ids:
            if not row_W.any():
                continue
            ends = np.flatnonzero(row_W == end)
            if row_W[0] != begin or not ends.size:
                raise ValueError(f"{row_W.tolist()} is not a word, {begin} ... {end}.")
            ids = row_W[1 : ends[0]]
            marker = markers.get(tuple(ids))
            if marker is None:
                words.append(self.alphabet.decode(ids))
            elif not skip_markers:
                words.append(marker)
        return words


def _doubled(column: np.ndarray) -> np.ndarray:
    return np.concatenate([column, np.zeros_like(column)])


def check_strings(words: Sequence) -> None:
    for word in words:
        if not isinstance(word, str):
            raise TypeError(f"Words must be strings, got {type(word).__name__}: {word!r:.60}.")


def read_vocabulary(path: str | PathLike) -> list[str]:
    """The words of a vocabulary with one word per line, in the order of their ids.

    The special words may be on any line, and come first. `<PAD>` is added if missing; `!!!MAXTERMID` and blank lines
    are skipped.
    """
    return order_vocabulary(vocabulary_lines(path), str(path))


def vocabulary_lines(path: str | PathLike) -> list[str]:
    """The lines of a file in UTF-8; if it has no line feed, carriage returns end them."""
    content = Path(path).read_bytes()
    zero = content.find(0)
    try:
        if zero >= 0:
            raise UnicodeDecodeError("utf-8", content, zero, zero + 1, "a zero, as in UTF-16")
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}. Convert the vocabulary to UTF-8.") from error
    lines = StringIO(text, newline="\n" if "\n" in text else "\r")
    return [line.strip() for line in lines]  # stripped, as bilm-tf reads it


def order_vocabulary(lines: Sequence[str], source: str = "the vocabulary") -> list[str]:
    """`read_vocabulary` for words that are in memory; `source` names them in errors."""
    check_strings(lines)
    line_of_word: dict[str, int] = {}
    for number, word in enumerate(lines, 1):
        first = line_of_word.setdefault(word, number)
        if first != number and word:
            raise ValueError(f"{source} has {word!r} twice, in lines {first} and {number}; keep one of them.")
    missing = [word for word in (BOS_WORD, EOS_WORD, UNK_WORD) if word not in line_of_word]
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)}; add a line for each.")
    others = [word for word in line_of_word if word not in NO_TEXT_WORDS]
    if len(others) > 1 and all(len(word.split()) > 1 for word in others):
        first_word = others[0]
        place = f"(line {line_of_word[first_word]})"
        raise ValueError(f"All words of {source} have spaces, first {first_word!r:.80} {place}; omit counts.")
    return [*SPECIAL_WORDS, *others]


def most_frequent_words(counts: Mapping[str, int], vocab_size: int | None = None, min_frequency: int = 1) -> list[str]:
    """The special words and the most frequent words, `vocab_size` in total. Ties are sorted by code points.

    Words with lone surrogates, which cannot be written to a file, and words that start with U+10FFFD are skipped.
    """
    if vocab_size is not None and vocab_size <= len(SPECIAL_WORDS):
        raise ValueError(f"vocab_size={vocab_size} leaves no room after the {len(SPECIAL_WORDS)} special words.")
    words = [word for word, count in counts.items() if count >= min_frequency and is_text_word(word)]
    words.sort(key=lambda word: (-counts[word], word))
    return [*SPECIAL_WORDS, *words][:vocab_size]


def is_text_word(word: str) -> bool:
    """Whether a vocabulary can have the word in addition to the special ones."""
    return word not in NO_TEXT_WORDS and not word.startswith(CONTINUATION) and not SURROGATES.search(word)


def as_batch(text, text_pair, is_split_into_words: bool) -> tuple[list[Sequence], bool]:
    """The parts of every text, one or (for a pair) two, and whether the caller passed a batch."""
    unit = (list, tuple) if is_split_into_words else str
    is_batched = isinstance(text, (list, tuple))
    if is_split_into_words:
        is_batched = is_batched and len(text) > 0 and isinstance(text[0], (list, tuple))
    batch: list[Sequence]
    if not is_batched:
        batch = [(text,) if text_pair is None else (text, text_pair)]
    elif text_pair is None:
        batch = [item if _is_pair(item, unit) else (item,) for item in text]
    elif not isinstance(text_pair, (list, tuple)) or len(text_pair) != len(text):
        raise ValueError(f"A batch of {len(text)} texts needs a list of as many as `text_pair`; got {text_pair!r:.80}.")
    else:
        batch = list(zip(text, text_pair, strict=True))
    needed = "a list of words" if is_split_into_words else "a string"
    for part in chain.from_iterable(batch):
        if not isinstance(part, unit):
            raise TypeError(
                f"A text must be {needed}, got {type(part).__name__}: {part!r:.60}. Pass strings, or lists of words "
                "with is_split_into_words=True."
            )
    return batch, is_batched


def checked_sentences(sentences: Iterable[str | Sequence[str]]) -> Iterator[str | list[str]]:
    """Yields each text, or list of words. All else is a `TypeError`: one text, a table, other sentences."""
    advice = "pass a list of texts, or of lists of words."
    is_wrong = isinstance(sentences, (str, bytes, Mapping)) or hasattr(sentences, "columns") or _is_column(sentences)
    if is_wrong or not isinstance(sentences, Iterable):
        raise TypeError(f"Sentences must be a list, got {type(sentences).__name__}: {sentences!r:.60}; {advice}")
    for number, sentence in enumerate(sentences):
        if isinstance(sentence, str):
            yield sentence
            continue
        if not isinstance(sentence, (Sequence, np.ndarray)) or isinstance(sentence, bytes):
            raise TypeError(f"Sentence {number} is {sentence!r:.60}; {advice}")
        for word in sentence:
            if not isinstance(word, str):
                raise TypeError(f"Sentence {number} has {word!r:.60}; {advice}")
        yield list(sentence)


def _is_column(sentences: Any) -> bool:
    """Whether an array is a table with one column of texts. Its rows are not lists of words."""
    if not isinstance(sentences, np.ndarray) or sentences.shape[1:] != (1,):
        return False
    return any(isinstance(text, str) and len(text.split()) > 1 for text in sentences[:, 0])


def _is_pair(item, unit) -> bool:
    if not isinstance(item, (list, tuple)) or len(item) != 2:
        return False
    return isinstance(item[0], unit) and isinstance(item[1], unit)


def checked_max_length(
    padding_strategy: PaddingStrategy = PaddingStrategy.DO_NOT_PAD,
    max_length: int | None = None,
    stride: int = 0,
    pad_to_multiple_of: int | None = None,
    **_,
) -> int | None:
    """`max_length` of a call, no larger than the backend can count: `model_max_length` is 10^30 if there is none."""
    _check_integer("stride", stride, math.inf)
    if pad_to_multiple_of is not None:
        _check_integer("pad_to_multiple_of", pad_to_multiple_of, MAX_PADDED)
    if max_length is None:
        return None
    _check_integer("max_length", max_length, MAX_PADDED if padding_strategy == PaddingStrategy.MAX_LENGTH else math.inf)
    return min(max_length, sys.maxsize)


def _check_integer(name: str, value: Any, most: float):
    is_integer = isinstance(value, Integral)
    if not is_integer or not 0 <= value <= most:
        raise ValueError(f"`{name}` is {value!r}; pass an integer from 0 to {most}.")


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
    """Whether the backend must encode texts of `lengths` words, because numpy cannot. The options are as in a call.

    Raises:
        ValueError: `max_length` leaves a text that is cut no more words than `stride`.
    """
    remaining = []  # words of each text that is cut
    if truncation_strategy != TruncationStrategy.DO_NOT_TRUNCATE and max_length is not None:
        for parts in lengths:
            room = max_length - 2 * len(parts) * add_special_tokens
            if sum(parts) > room:
                remaining.append(room - _words_beside(parts, truncation_strategy, room))
        if stride > 0:  # the backend always counts the markers of one text
            remaining.append(max_length - 2)
    least = min(remaining, default=math.inf)
    if least <= stride:  # the backend panics, raises a bare exception or returns texts that are too long
        raise ValueError(
            f"max_length={max_length} and truncation={truncation_strategy.value!r} leave {max(least, 0)} words, which "
            f"must be more than stride={stride}; pass a larger max_length or a smaller stride."
        )
    needs_encodings = return_overflowing_tokens or return_special_tokens_mask or return_offsets_mapping
    return bool(remaining) or needs_encodings or return_length


def _words_beside(parts: list[int], strategy: TruncationStrategy, room: int) -> int:
    """Words of the part that is not cut, or of the longer one if both are cut. `"only_second"` needs two parts."""
    if strategy == TruncationStrategy.ONLY_SECOND:
        return parts[0]
    if strategy == TruncationStrategy.LONGEST_FIRST and len(parts) == 2:
        return min(*parts, -(-room // 2))
    return sum(parts[1:])


def values_of_tokens(encoding: Encoding, values: Sequence[Sequence], others: Sequence) -> list:
    """The value of each token's word, by part and place; `others` has the values of markers and of padding."""
    of_tokens = []
    for other, word, part in zip(others, encoding.word_ids, encoding.sequence_ids, strict=True):
        of_tokens.append(other if word is None or part is None else values[part][word])
    return of_tokens


def with_words(encoding: Encoding, ids: list[list], tokens: list[list], places: list[list]) -> Encoding:
    """The encoding, and its windows, with the ids, the tokens and the places of words, each by part."""
    windows = [with_words(window, ids, tokens, places) for window in encoding.overflowing]
    state = json.loads(encoding.__getstate__())
    state["ids"] = values_of_tokens(encoding, ids, encoding.ids)
    state["tokens"] = values_of_tokens(encoding, tokens, encoding.tokens)
    state["offsets"] = values_of_tokens(encoding, places, encoding.offsets)
    state["overflowing"] = [json.loads(window.__getstate__()) for window in windows]
    changed = Encoding()
    changed.__setstate__(json.dumps(state).encode())
    return changed


def texts_of_encodings(encoded: BatchEncoding, texts: Sequence) -> Iterator[tuple[Encoding, Any]]:
    """Each encoding with its element of `texts`; an encoding may be a window of a text."""
    numbers = encoded.get("overflow_to_sample_mapping", range(len(texts)))
    return zip(encoded.encodings, (texts[number] for number in numbers), strict=True)


def by_part(values: np.ndarray, lengths: list[list[int]]) -> list[list[list]]:
    """The values of all words of a batch, one after the other, by text and part."""
    ends = np.cumsum(list(chain.from_iterable(lengths)))
    parts = iter(np.split(values, ends))
    return [[next(parts).tolist() for _ in lengths_of_text] for lengths_of_text in lengths]


class LazyEncodings(Sequence):
    """The backend's encodings of a batch (`word_ids`, `char_to_token`, ...), computed on first use."""

    def __init__(self, length: int, encode: Callable[[], list[Encoding]]):
        self.length = length
        self.encode = cache(encode)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index):
        return self.encode()[index]

    def __reduce__(self):
        return list, (list(self),)
