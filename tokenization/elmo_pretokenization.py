"""Raw text to words: `whitespace`, `moses` and `treebank`.

The rules read one chunk (the text between two white spaces) and the first character of the next chunk, so the words of
a frequent chunk are computed once. Rules only insert spaces, so every word is a slice of the caller's string. An added
token, such as a marker `[E1]`, is a chunk of its own, and one word.

Letters that are written in parts, such as `e` and an accent, are split as composed ones: rules and added tokens read
Unicode's form NFC of the text.
"""

import re
import sys
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from itertools import accumulate, chain, pairwise
from types import MappingProxyType
from typing import Any

from .elmo_characters import Memory

# Abbreviations that keep their period. The last set keeps it only before a number.
ABBREVIATIONS = frozenset(
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z "  # noqa: SIM905 (a list of 110 literals is unreadable)
    "Apr Aug Dec Feb Jan Jul Jun Mar Nov Oct Sep "
    "DR Dr Drs MM MR MRS MS Messrs Mlle Mme Mr Mrs Ms Msgr Prof "
    "Adj Adm Brig Capt Cmdr Col Comdr Corp Cpl Ens Gen Gov Insp Lt Maj Op Ord Pfc Pvt Sfc Sgt "
    "Adv Asst Bart Bldg Bros Con Hon Hosp Hr Nos Nr Ph Rep Reps Res Rev Rs Rt Sen Sens Sr St Supt Surg "
    "e.g i.e rev v vs".split()
)
TREEBANK_ABBREVIATIONS = ABBREVIATIONS | {"Ave", "Co", "Ft", "Inc", "Jr", "Ltd", "Mt", "Sept"}
ABBREVIATIONS_BEFORE_NUMBERS = frozenset(["Art", "No", "pp"])


def _compiled(rules: list[tuple[str, Any]]) -> list[tuple[re.Pattern, Any]]:
    return [(re.compile(pattern), replacement) for pattern, replacement in rules]


# The Moses rules read character classes (`_moses_class`). A run of periods becomes a run of `m`.
MOSES_RULES = _compiled(
    [
        (r"([#!])", r" \1 "),
        (r"\.{2,}", lambda periods: f" {'m' * len(periods[0])} "),
        (r"([^9]),", r"\1 , "),
        (r",([^9])", r" , \1"),
        (r"9,$", r"9 , "),
        (r"([^as])'([^as])", r"\1 ' \2"),
        (r"([^as9])'([as])", r"\1 ' \2"),
        (r"([as])'([^as])", r"\1 ' \2"),
        (r"([as])'([as])", r"\1 '\2"),
        (r"9's", r"9 's"),
    ]
)

# The treebank rules read the text itself: punctuation, then the period at the end of a sentence, then contractions.
# They split hyphens, slashes and opening quotes as the English Web Treebank does; the older convention does not.
TREEBANK_PUNCTUATION = _compiled(
    [
        (r"(``|''|\")", r" \1 "),
        (r"([:,])(?=\D)", r" \1 "),
        (r"(\.\.\.|--|[;@#$%&?!\[\](){}<>])", r" \1 "),
        (r"(?<=[^\W\d_])([-/])(?=[^\W\d_])", r" \1 "),
        (r"(?i)(?<=\s)'(?!(?:t|tis|twas|s|m|d|ll|re|ve|em|bout|n|cause|cuz)\b)(?=[^\W\d_])", r"' "),
    ]
)
# The rules know ASCII, as the Treebank does, and read typographic signs as those of ASCII. A semicolon, always a word,
# stands for the em dash and the ellipsis. The words have the signs of the text.
ASCII_SIGNS = str.maketrans("‘’‚‛“”„‟‐‑–—―…", "''''\"\"\"\"---;;;")
PLAIN_SIGNS = ASCII_SIGNS | {ord("—"): "--", ord("―"): "--", ord("…"): "..."}
PART_OF_LETTER = "x"  # read in place of a mark that no letter is composed with; no rule has this letter
TREEBANK_FINAL_PERIOD = re.compile(r"(?<!\S)(\S*[^\s.])\.([\s\])}>\"']*)$")
TREEBANK_PAIRS = {"cannot", "gimme", "lemme", "gonna", "wanna", "gotta"}  # of letters only
TREEBANK_CONTRACTIONS = _compiled(
    [
        (r"(?i)(?<=[^'\s])('(?:s|m|d|ll|re|ve)?|n't)(?=\s)", r" \1"),
        (r"(?i)\b(can)(not)\b", r"\1 \2"),
        (r"(?i)\b(gim|lem)(me)\b", r"\1 \2"),
        (r"(?i)\b(gon|wan)(na)\b", r"\1 \2"),
        (r"(?i)\b(got)(ta)\b", r"\1 \2"),
        (r"(?i)\b(d)('ye)\b", r"\1 \2"),
        (r"(?i)\b(more)('n)\b", r"\1 \2"),
        (r"(?i)(?<=\s)('t)(is|was)\b", r"\1 \2"),
    ]
)


def plain_word(word: str) -> str:
    """The word with ASCII's signs in place of typographic ones, and with composed letters (Unicode's form NFC)."""
    return word if word.isascii() else unicodedata.normalize("NFC", word).translate(PLAIN_SIGNS)


def moses_words(
    chunk: str, is_first: bool, following: str, signs: Mapping[int, Any] = MappingProxyType({})
) -> tuple[str, ...]:
    """The English tokenizer of the Moses toolkit, used to train the AI2 models: `didn't` is `didn 't`.

    `following` is the first character of the next chunk, or empty at the end of the text. `signs` are read as others.
    """
    if chunk.isalpha():  # most chunks, which no rule splits
        return (chunk,)
    classes = "".join(map(_moses_class, chunk.translate(signs)))
    classes = ("" if is_first else " ") + classes + (" " if following else "")
    words = []
    start = 0
    for piece in _substitute(MOSES_RULES, classes).split():
        end = start + len(piece)
        word = chunk[start:end]
        next_character = chunk[end : end + 1] or following
        if len(piece) > 1 and piece[-1] == "." and not _keeps_period(word[:-1], next_character):
            words += [word[:-1], "."]
        elif piece.endswith(".'") and not next_character:
            words += [word[:-2], ".", word[-1]]
        elif piece != "!":  # a control character
            words.append(word)
        start = end
    return tuple(filter(None, words))


@lru_cache(maxsize=2**15)
def _moses_class(character: str) -> str:
    """`a` for letters and marks (`s` for an s), `9` for digits, `!` for control characters, else itself or `#`."""
    if character in "s.,'`-":
        return character
    category = unicodedata.category(character)
    if category[0] in "LM":
        return "a"
    if category in ("Nd", "Nl"):
        return "9"
    return "!" if character < " " else "#"


def treebank_words(chunk: str, is_first: bool, following: str) -> tuple[str, ...]:
    """The words of the Penn Treebank: `didn't` is `did n't`.

    A period is split off at the end of every sentence that the next chunk reveals, not only at the end of the text.
    """
    if chunk.isascii() and chunk.isalpha() and chunk.lower() not in TREEBANK_PAIRS:  # most chunks
        return (chunk,)
    text = _substitute(TREEBANK_PUNCTUATION, f" {_treebank_signs(chunk)} ")
    final = TREEBANK_FINAL_PERIOD.search(text)
    if final and not (following and _keeps_period(final[1], following, TREEBANK_ABBREVIATIONS)):
        text = f"{text[: final.end(1)]} . {final[2]}"
    pieces = _substitute(TREEBANK_CONTRACTIONS, text).split()
    ends = accumulate(map(len, pieces), initial=0)
    return tuple(chunk[start:end] for start, end in pairwise(ends))


def _treebank_signs(chunk: str) -> str:
    """The chunk with signs of ASCII, and with letters in place of the marks of letters, such as Indic vowel signs."""
    if chunk.isascii():
        return chunk
    signs: list[str] = []
    for sign in chunk.translate(ASCII_SIGNS):
        is_part = bool(signs) and signs[-1].isalpha() and _is_mark(sign)
        signs.append(PART_OF_LETTER if is_part else sign)
    return "".join(signs)


def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] == "M"


def _keeps_period(word: str, following: str, abbreviations: frozenset[str] = ABBREVIATIONS) -> bool:
    return (
        ("." in word and any(_moses_class(character) in "as" for character in word))
        or word in abbreviations
        or following.islower()
        or (word in ABBREVIATIONS_BEFORE_NUMBERS and "0" <= following <= "9")
    )


def _substitute(rules, text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _memory(words_of_chunk: Callable) -> Memory:
    """A key has all arguments, or is a chunk without periods between two others, the most frequent case."""

    def words_of_key(key: str | tuple[str, bool, str]) -> tuple[str, ...]:
        chunk, *others = (key, False, "#") if isinstance(key, str) else key
        composed = unicodedata.normalize("NFC", chunk)
        words = words_of_chunk(composed, *others)
        return tuple(filter(None, _slices(chunk, composed, places_of(words, composed))))

    return Memory(words_of_key)


def _slices(text: str, composed: str, places: Iterable[tuple[int, int]]) -> Iterator[str]:
    """The slices of a text at places that are counted in its composed form.

    Both have the same decomposition, so that a place in one is a place in the other.
    """
    if composed == text:
        yield from (text[start:end] for start, end in places)
        return
    ends_in_text = _decomposed_ends(text)
    ends_in_composed = _decomposed_ends(composed)
    for start, end in places:
        first = bisect_left(ends_in_text, ends_in_composed[start])
        last = bisect_left(ends_in_text, ends_in_composed[end])
        yield text[first:last]


def _decomposed_ends(text: str) -> list[int]:
    lengths = (len(unicodedata.normalize("NFD", character)) for character in text)
    return [0, *accumulate(lengths)]


PRE_TOKENIZATIONS = ("moses", "treebank", "whitespace")
WORDS_OF_CHUNK = {
    ("moses", False): _memory(moses_words),
    ("moses", True): _memory(partial(moses_words, signs=ASCII_SIGNS)),
    **dict.fromkeys([("treebank", False), ("treebank", True)], _memory(treebank_words)),
}


class TextSplitter:
    """Splits raw text into words.

    Args:
        added: tokens that are words wherever the text has them, unless a letter or digit of theirs continues a word of
            the text.
        plain_signs: whether the text is split as one with plain signs.
    """

    def __init__(self, pre_tokenization: str, added: Iterable[str] = (), plain_signs: bool = False):
        if pre_tokenization not in PRE_TOKENIZATIONS:
            raise ValueError(f"pre_tokenization={pre_tokenization!r} is unknown; pass one of {PRE_TOKENIZATIONS}.")
        self.name = pre_tokenization
        self.plain_signs = plain_signs
        self.added = dict.fromkeys(sorted(added, key=lambda token: (-len(token), token)))  # the longest is found first
        self._composed = {unicodedata.normalize("NFC", token): token for token in self.added}
        self._added = re.compile(f"({'|'.join(map(_no_part_of_a_word, self._composed))})")

    @property
    def rules(self) -> tuple[Any, ...]:
        """Splitters with equal rules split all texts alike."""
        return self.name, self.plain_signs, *self.added

    def words(self, text: str) -> list[str]:
        chunks = self._chunks(text) if self.added else text.split()
        return chunks if self.name == "whitespace" else list(chain.from_iterable(self._words_of_chunks(chunks)))

    def keys(self, chunks: list[str]) -> list[Any]:
        """What the words of each chunk depend on: equal keys have equal words, as in `words_of_key`.

        The rules read more than the chunk at both ends of the text, and where there is a period. To count keys, and to
        split each distinct one, is faster than to split all texts. Added tokens have no keys.
        """
        keys: list[Any] = [*chunks]
        if self.name == "whitespace" or not chunks:
            return keys
        if "." in "".join(chunks):
            for i, (chunk, following) in enumerate(pairwise(chunks)):
                if "." in chunk:
                    keys[i] = chunk, False, following[0]
        keys[0] = chunks[0], True, chunks[1][0] if len(chunks) > 1 else ""
        if len(chunks) > 1:
            keys[-1] = chunks[-1], False, ""
        return keys

    def words_of_key(self, key: Any) -> tuple[str, ...]:
        return (key,) if self.name == "whitespace" else WORDS_OF_CHUNK[self.name, self.plain_signs][key]

    def _chunks(self, text: str) -> list[str]:
        composed = unicodedata.normalize("NFC", text)
        ends = [0, *accumulate(map(len, self._added.split(composed)))]
        chunks: list[str] = []
        for number, part in enumerate(_slices(text, composed, pairwise(ends))):
            is_added = number % 2 == 1
            chunks += [part] if is_added else part.split()
        return chunks

    def _words_of_chunks(self, chunks: list[str]) -> list[tuple[str, ...]]:
        words_of_key = WORDS_OF_CHUNK[self.name, self.plain_signs]
        words = list(map(words_of_key.__getitem__, self.keys(chunks)))
        if self.added:
            for i, chunk in enumerate(chunks):
                if unicodedata.normalize("NFC", chunk) in self._composed:
                    words[i] = (chunk,)
        return words


def places_of(words: Iterable[str], text: str) -> Iterator[tuple[int, int]]:
    """First character and end of each word of a text."""
    end = 0
    for word in words:
        start = text.index(word, end)
        end = start + len(word)
        yield start, end


def _no_part_of_a_word(token: str) -> str:
    """A pattern for a token that no letter or digit touches with which its own first or last one would be a word."""
    part = rf"[\w{_marks()}]"
    before = f"(?<!{part})" if re.match(part, token) else ""
    behind = f"(?!{part})" if re.search(rf"{part}\Z", token) else ""
    return before + re.escape(token) + behind


@cache
def _marks() -> str:
    """All marks of Unicode, such as accents and vowel signs, for which regular expressions have no name."""
    return "".join(filter(_is_mark, map(chr, range(sys.maxunicode + 1))))
