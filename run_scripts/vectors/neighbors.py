"""The uses of a word in a text, and their nearest neighbors by cosine."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from .embedding import LayerChoice, embed_sentences

NAMED_LAYERS = ("top", "average", "mixed")
CONTEXT_WORDS = 8  # on each side of a use


class WordUse(NamedTuple):
    """A word in its sentence."""

    words: Sequence[str]
    position: int

    def __str__(self) -> str:
        return in_context(self.words, self.position, self.position + 1, CONTEXT_WORDS)


def in_context(words: Sequence[str], start: int, end: int, width: int) -> str:
    """Up to `width` words before, the words `start` to `end` in brackets, and up to `width` words after."""
    parts = words[max(0, start - width) : start], words[start:end], words[end : end + width]
    return "{} [{}] {}".format(*map(" ".join, parts)).strip()


def check_layer(layer: str, num_layers: int):
    if layer not in (*NAMED_LAYERS, *map(str, range(num_layers + 1))):
        raise ValueError(f"--layer {layer}: pass {', '.join(NAMED_LAYERS)}, or a number up to {num_layers}.")


def find_uses(sentences: Iterable[Sequence[str]], word: str | re.Pattern[str]) -> Iterator[WordUse]:
    """Every use of a word, a regular expression. Equal sentences count once, because texts repeat headings."""
    pattern, seen = re.compile(word), set()
    for words in sentences:
        positions = [position for position, each in enumerate(words) if pattern.fullmatch(each)]
        if positions and tuple(words) not in seen:
            seen.add(tuple(words))
            yield from (WordUse(words, position) for position in positions)


def sample_uses(uses: Sequence[WordUse], max_uses: int, num_queries: int, seed: int) -> tuple[list[WordUse], list[int]]:
    """At most `max_uses` of the uses, in their order, and the indices of the queries among them."""
    generator = np.random.default_rng(seed)
    drawn = [uses[number] for number in sorted(generator.permutation(len(uses))[:max_uses])]
    return drawn, generator.permutation(len(drawn))[:num_queries].tolist()


def use_vectors(uses: Sequence[WordUse], model, tokenizer, layer: str) -> np.ndarray:
    """The vectors of one layer, or of `NAMED_LAYERS`: `(uses, hidden_size)`. Equal sentences are computed once."""
    members: dict[tuple[str, ...], list[int]] = {}
    for number, use in enumerate(uses):
        members.setdefault(tuple(use.words), []).append(number)
    found: dict[int, np.ndarray] = {}
    is_named = layer in NAMED_LAYERS
    computed = embed_sentences([*members], model, tokenizer, cast(LayerChoice, layer if is_named else "all"))
    for (_, vectors), numbers in zip(computed, members.values(), strict=True):
        each = vectors if is_named else vectors[int(layer)]
        # Copies: a row of an array keeps all layers of the whole sentence in memory.
        found |= {number: each[uses[number].position].copy() for number in numbers}
    return np.stack([found[number] for number in range(len(uses))])


def normalize(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def nearest_uses(vectors: np.ndarray, uses: Sequence[WordUse], query: int, top_k: int) -> list[tuple[int, float]]:
    """The indices of the nearest uses in other sentences, with their cosines, by vectors of length 1."""
    cosines = vectors @ vectors[query]
    others = (near for near in (-cosines).argsort(kind="stable") if uses[near].words is not uses[query].words)
    return [(int(near), float(cosines[near])) for near, _ in zip(others, range(top_k), strict=False)]


def format_neighbors(found: dict[str, Any]) -> str:
    """The nearest words by word vectors, if there are any; then each query, and below it its neighbors."""
    lines = []
    if "word_vectors" in found:
        (word, _), *others = found["word_vectors"]
        lines += ["", f"[{word}] without a context", *(f"  {cosine:.3f}  {other}" for other, cosine in others)]
    for query in found["queries"]:
        lines += ["", query["use"], *(f"  {cosine:.3f}  {use}" for cosine, use in query["neighbors"])]
    return "\n".join(lines[1:])
