"""The uses of a word in a text, and their nearest neighbors by cosine."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .embedding import embed_sentences

NAMED_LAYERS = ("top", "average", "mixed")
CONTEXT_WORDS = 8  # on each side of a use


class Place(NamedTuple):
    """Where a sentence was read: its file, the line in which it begins, and the other columns of its row.

    `document` is the name of its document, and "" if nothing names it.
    """

    file: str
    line: int
    columns: Mapping[str, Any]
    document: str = ""

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


class WordUse(NamedTuple):
    """A word in its sentence."""

    words: Sequence[str]
    position: int
    place: Place | None = None

    def __str__(self) -> str:
        return in_context(self.words, self.position, self.position + 1, CONTEXT_WORDS)


def in_context(words: Sequence[str], start: int, end: int, width: int) -> str:
    """Up to `width` words before, the words `start` to `end` in brackets, and up to `width` words after."""
    before = " ".join(words[max(0, start - width) : start])
    middle = " ".join(words[start:end])
    after = " ".join(words[end : end + width])
    return f"{before} [{middle}] {after}".strip()


def check_layer(layer: str, num_layers: int):
    numbers = map(str, range(num_layers + 1))
    if layer not in (*NAMED_LAYERS, *numbers):
        raise ValueError(f"--layer {layer}: pass {', '.join(NAMED_LAYERS)}, or a number up to {num_layers}.")


def composed(text: str) -> str:
    """The text in Unicode's form NFC: letters that are written in parts, such as `e` and an accent, as one."""
    return unicodedata.normalize("NFC", text)


class WordPattern:
    """A word, as a regular expression. It fits whole words, with letters that are composed or written in parts.

    The expression means what its reader sees: in `café?`, the last letter may be missing, not its accent.
    """

    def __init__(self, word: str, flags: int = 0):
        self.pattern = re.compile(composed(word), flags)

    def fits(self, form: str) -> bool:
        forms = {form} if form.isascii() else {form, composed(form), unicodedata.normalize("NFD", form)}
        return any(map(self.pattern.fullmatch, forms))


def find_uses(sentences: Iterable[Sequence[str]], word: str) -> Iterator[WordUse]:
    """Every use of a word, a regular expression. Equal sentences count once, because texts repeat headings."""
    pattern = WordPattern(word)
    seen = set()
    for words in sentences:
        positions = [position for position, form in enumerate(words) if pattern.fits(form)]
        sentence = tuple(words)
        if positions and sentence not in seen:
            seen.add(sentence)
            for position in positions:
                yield WordUse(words, position)


def sample_uses(uses: Sequence[WordUse], max_uses: int, num_queries: int, seed: int) -> tuple[list[WordUse], list[int]]:
    """At most `max_uses` of the uses, in their order, and the indices of the queries among them."""
    generator = np.random.default_rng(seed)
    numbers = generator.permutation(len(uses))[:max_uses]
    numbers.sort()
    drawn = [uses[number] for number in numbers]
    queries = generator.permutation(len(drawn))[:num_queries]
    return drawn, queries.tolist()


def use_vectors(uses: Sequence[WordUse], model, tokenizer, layer: str) -> np.ndarray:
    """The vectors of one layer, or of `NAMED_LAYERS`: `(uses, hidden_size)`. Equal sentences are computed once."""
    rows = [np.empty(0)] * len(uses)
    for number, vector in embedded_uses(uses, model, tokenizer, layer):
        # A copy: a row of an array keeps all layers of the whole sentence in memory.
        rows[number] = vector.copy()
    return np.stack(rows)


def embedded_uses(uses: Sequence[WordUse], model, tokenizer, layer: str) -> Iterator[tuple[int, np.ndarray]]:
    """The number of each use and its vector `(hidden_size,)`, a sentence after the other."""
    numbers_of = defaultdict(list)  # of the uses in each sentence
    for number, use in enumerate(uses):
        numbers_of[tuple(use.words)].append(number)
    is_named = layer in NAMED_LAYERS
    choice: Any = layer if is_named else "all"
    embedded = embed_sentences(list(numbers_of), model, tokenizer, choice)
    for (_, vectors), numbers in zip(embedded, numbers_of.values(), strict=True):
        if not is_named:
            vectors = vectors[int(layer)]
        for number in numbers:
            yield number, vectors[uses[number].position]


def normalize(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12)


def nearest_uses(vectors: np.ndarray, uses: Sequence[WordUse], query: int, top_k: int) -> list[tuple[int, float]]:
    """The indices of the nearest uses in other sentences, with their cosines, by vectors of length 1."""
    cosines = vectors @ vectors[query]
    sentence = uses[query].words
    best_first = (-cosines).argsort(kind="stable").tolist()
    others = [number for number in best_first if uses[number].words is not sentence]
    nearest = others[:top_k]
    return list(zip(nearest, cosines[nearest].tolist(), strict=True))


def format_neighbors(result: dict[str, Any]) -> str:
    """The nearest words by word vectors, if there are any; then each query, and below it its neighbors."""
    lines = []
    if "word_vectors" in result:
        (word, _), *others = result["word_vectors"]
        lines += ["", f"[{word}] without a context"]
        lines += [f"  {cosine:.3f}  {other}" for other, cosine in others]
    for query in result["queries"]:
        lines += ["", f"{query['use']}  ({query['place']})"]
        lines += [f"  {cosine:.3f}  {use}  ({place})" for cosine, use, place in query["neighbors"]]
    return "\n".join(lines[1:])
