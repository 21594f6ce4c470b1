"""Uses of a word, their nearest neighbors by cosine, and a map of all uses."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modeling_elmo.run_scripts.vectors.embedding import embed_sentences

NAMED_LAYERS = ("top", "average", "mixed")

WORDS_SHOWN = 8  # on each side of a use


class Use(NamedTuple):
    """A word in its sentence."""

    words: Sequence[str]
    place: int

    def __str__(self) -> str:
        left = self.words[max(0, self.place - WORDS_SHOWN) : self.place]
        right = self.words[self.place + 1 : self.place + 1 + WORDS_SHOWN]
        return " ".join([*left, f"[{self.words[self.place]}]", *right])


def check_output(path: str | None):
    if path is not None and Path(path).suffix != ".json":
        raise ValueError(f"--output {path}: pass a file that ends in .json; the map is written beside it.")


def find_uses(sentences: Iterable[Sequence[str]], word: str) -> Iterator[Use]:
    """Every use, in sentences that differ: texts repeat headings and phrases whole."""
    pattern, seen = re.compile(word), set()
    for words in sentences:
        places = [place for place, each in enumerate(words) if pattern.fullmatch(each)]
        if places and tuple(words) not in seen:
            seen.add(tuple(words))
            yield from (Use(words, place) for place in places)


def check_layer(layer: str, num_layers: int):
    if layer not in (*NAMED_LAYERS, *map(str, range(num_layers + 1))):
        raise ValueError(f"--layer {layer}: pass {', '.join(NAMED_LAYERS)}, or a number up to {num_layers}.")


def vectors_of_uses(uses: Sequence[Use], model, tokenizer, layer: str) -> np.ndarray:
    """Shape: `(uses, hidden_size)`."""
    named = layer in NAMED_LAYERS
    embedded = embed_sentences((use.words for use in uses), model, tokenizer, layer if named else "all")
    vectors = [vectors if named else vectors[int(layer)] for _, vectors in embedded]
    return np.stack([each[use.place] for each, use in zip(vectors, uses, strict=True)])


def normalized(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def neighbors(vectors: np.ndarray, uses: Sequence[Use], query: int, top_k: int) -> list[tuple[int, float]]:
    """The nearest uses in other sentences, with their cosines.

    Args:
        vectors: `(uses, hidden_size)`, of length 1.
    """
    cosines = vectors @ vectors[query]
    others = (near for near in (-cosines).argsort(kind="stable") if uses[near].words is not uses[query].words)
    return [(int(near), float(cosines[near])) for near, _ in zip(others, range(top_k), strict=False)]


def shown_neighbors(found: dict[str, Any]) -> str:
    lines = []
    for query in found["queries"]:
        lines += ["", query["use"], *(f"  {cosine:.3f}  {use}" for cosine, use in query["neighbors"])]
    return "\n".join(lines[1:])
