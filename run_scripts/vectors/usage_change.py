"""Change of a word's use between groups of texts, such as periods or genres.

Two measures of lexical semantic change compare the vectors of the uses in two groups (Giulianelli et al. 2020,
"Analysing Lexical Semantic Change with Contextualised Word Representations"; Kutuzov and Giulianelli 2020, "UiO-UvA at
SemEval-2020 Task 1"):

- `apd`: the average pairwise distance, the mean cosine distance of a use in one group to a use in the other. It also
  grows with the variety of uses within the groups.
- `prt`: the cosine distance between the prototypes, the mean vectors of the groups. The papers report its similarity c,
  or 1 / c; this is 1 - c.

Neither is 0 for groups of the same text, so a permutation test compares each with random splits of all uses.
"""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from ..cards.figures import MEASURES_OF_CHANGE
from ..cards.tables import markdown_table
from .neighbors import normalize
from .word_vectors import is_number

LEVEL = 0.05  # of significance


def order_groups(names: Iterable[str], bin_width: float | None) -> tuple[dict[str, str], bool]:
    """The group of each name, numbers by size and others as they come, and whether all are numbers.

    `bin_width` puts numbers into bins that begin at its multiples: 10 puts "1984" into "1980-1989".
    """
    names = list(names)
    for name in names:
        if not is_number(name):
            if bin_width is not None:
                raise ValueError(f"--bin_width {bin_width:g} needs numbers, but a group is {name!r}; leave it out.")
            return {name: name for name in names}, False
    groups = {}
    for name in sorted(names, key=float):
        if bin_width is None:
            groups[name] = re.sub(r"\.0+\Z", "", name)  # 1990 and 1990.0 are one; 7 and 007 are not
        else:
            groups[name] = bin_name(float(name), bin_width)
    return groups, True


def bin_name(number: float, width: float) -> str:
    """`1980-1989` for widths that are whole numbers, `1980` for the width 1, `0.5-1` for others."""
    bins_below = math.floor(round(number / width, 9))  # 0.3 / 0.1 is below 3
    start = bins_below * width
    if width == 1:
        return f"{start:.10g}"
    end = start + width
    if width == int(width):
        end -= 1
    return f"{start:.10g}-{end:.10g}"


def compare_groups(vectors: Mapping[str, np.ndarray], permutations: int, seed: int) -> list[dict[str, Any]]:
    """Both measures for each pair of groups, of whose uses there are vectors `(uses, hidden_size)`."""
    generator = np.random.default_rng(seed)
    pairs = []
    for (place, one), (other_place, other) in combinations(enumerate(vectors), 2):
        measures = compare_pair(vectors[one], vectors[other], permutations, generator)
        pairs.append({"groups": [one, other], "consecutive": other_place == place + 1, **measures})
    return pairs


def compare_pair(
    one: np.ndarray, other: np.ndarray, permutations: int, generator: np.random.Generator
) -> dict[str, dict[str, float]]:
    """Each measure of two groups: its `distance`, what random splits give, and the probability of such a distance.

    `random_mean` is the mean distance of random splits, `random_5` and `random_95` are quantiles. `p` is the share of
    splits, the observed one and random ones, whose distance is at least as large as the observed.
    """
    vectors = np.concatenate([one, other]).astype(np.float64)
    observed = np.arange(len(vectors)) < len(one)
    random_splits = generator.permuted(np.tile(observed, (permutations, 1)), axis=1)
    distances = split_distances(vectors, np.vstack([observed, random_splits]))
    measures = {}
    for name, of_splits in zip(MEASURES_OF_CHANGE, distances, strict=True):
        distance = of_splits[0]
        random = of_splits[1:]
        low, high = np.quantile(random, [LEVEL, 1 - LEVEL])
        # The same split, drawn again, may differ in the last digits.
        at_least_as_large = 1 + np.count_nonzero(random >= distance - 1e-12)
        values = {
            "distance": distance,
            "random_5": low,
            "random_mean": random.mean(),
            "random_95": high,
            "p": at_least_as_large / (1 + permutations),
        }
        measures[name] = {key: round(float(value), 6) for key, value in values.items()}
    return measures


def split_distances(vectors: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Both measures of each split. The mean of all pairs' cosines is the product of the mean vectors of length 1.

    Shape:
        vectors: `(uses, hidden_size)`.
        splits: `(splits, uses)`, true for the uses in the first of two groups.
        result: `(2, splits)`.
    """
    one, other = _group_means(normalize(vectors), splits)
    mean_of_cosines = (one * other).sum(-1)
    prototype, other_prototype = _group_means(vectors, splits)
    cosine_of_means = (normalize(prototype) * normalize(other_prototype)).sum(-1)
    return 1 - np.stack([mean_of_cosines, cosine_of_means])


def _group_means(vectors: np.ndarray, splits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sums = splits @ vectors
    sizes = splits.sum(1, keepdims=True)
    other_sums = vectors.sum(0) - sums
    return sums / sizes, other_sums / (len(vectors) - sizes)


def distance_within(vectors: np.ndarray) -> float:
    """The mean cosine distance of two different uses of a group: how varied they are."""
    count = len(vectors)
    sum_of_cosines = np.linalg.norm(normalize(vectors).sum(0, dtype=np.float64)) ** 2  # with each use itself, too
    return float(1 - (sum_of_cosines - count) / (count * (count - 1)))


def typical_uses(vectors: Mapping[str, np.ndarray], group: str, top_k: int) -> list[int]:
    """The uses of a group that are nearest to its uses, and farthest from those of the others."""
    uses = normalize(vectors[group])
    others = [normalize(vectors[name]) for name in vectors if name != group]
    direction = uses.mean(0) - np.concatenate(others).mean(0)
    scores = uses @ direction
    return (-scores).argsort(kind="stable")[:top_k].tolist()


def shown_pairs(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The consecutive pairs of groups that are numbers, or all pairs."""
    if not found["ordered"]:
        return found["pairs"]
    return [pair for pair in found["pairs"] if pair["consecutive"]]


def format_change(found: Mapping[str, Any]) -> str:
    """The groups with their typical uses, and `shown_pairs`."""
    lines = [f"{found['word']} by {found['group_by']}"]
    for group in found["groups"]:
        distance = group["distance_within"]
        lines += ["", f"{group['name']}: {group['uses']} uses, with a mean distance of {distance:.3f}"]
        lines += [f"  {use}" for use in group["typical_uses"]]
    header = [""]
    for name in MEASURES_OF_CHANGE:
        header += [name.upper(), f"{name.upper()} at random", f"{name.upper()} p"]
    rows = [header]
    for pair in shown_pairs(found):
        row = [", ".join(pair["groups"])]
        for name in MEASURES_OF_CHANGE:
            row += [f"{pair[name][key]:.3f}" for key in ("distance", "random_mean", "p")]
        rows.append(row)
    lines += ["", markdown_table(rows)]
    if found["left_out"]:
        left_out = [f"{name} ({uses})" for name, uses in found["left_out"].items()]
        lines += ["", f"Left out, with fewer than --min_uses {found['min_uses']}: {', '.join(left_out)}"]
    return "\n".join(lines)
