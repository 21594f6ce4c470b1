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
from collections.abc import Collection, Mapping
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from ..cards.figures import MEASURES_OF_CHANGE
from ..cards.tables import markdown_table
from .neighbors import normalize
from .word_vectors import is_number

LEVEL = 0.05  # of significance


def order_groups(names: Collection[str], bin_width: float | None) -> tuple[dict[str, str], bool]:
    """The group of each name, numbers by size and others as they come, and whether all are numbers.

    `bin_width` puts numbers into bins that begin at its multiples: 10 puts "1984" into "1980-1989".
    """
    others = [name for name in names if not is_number(name)]
    if others and bin_width is not None:
        raise ValueError(f"--bin_width {bin_width:g} needs numbers, but a group is {others[0]!r}; leave it out.")
    if others:
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
    consecutive = list(pairwise(vectors))
    pairs = []
    for one, other in combinations(vectors, 2):
        pair = {"groups": [one, other], "consecutive": (one, other) in consecutive}
        measures = compare_pair(vectors[one], vectors[other], permutations, generator)
        pairs.append(pair | measures)
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
    splits = np.tile(observed, (1 + permutations, 1))
    splits[1:] = generator.permuted(splits[1:], axis=1)
    measures = {}
    both_distances = split_distances(vectors, splits)
    for name, distances in zip(MEASURES_OF_CHANGE, both_distances, strict=True):
        random = distances[1:]
        # The same split, drawn again, may differ in the last digits.
        is_as_large = distances >= distances[0] - 1e-12
        measures[name] = {
            "distance": rounded(distances[0]),
            "random_5": rounded(np.quantile(random, LEVEL)),
            "random_mean": rounded(random.mean()),
            "random_95": rounded(np.quantile(random, 1 - LEVEL)),
            "p": rounded(is_as_large.mean()),
        }
    return measures


def rounded(number: np.floating) -> float:
    return round(float(number), 6)


def split_distances(vectors: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Both measures of each split. The mean of all pairs' cosines is the product of the mean vectors of length 1.

    Shape:
        vectors: `(uses, hidden_size)`.
        splits: `(splits, uses)`, true for the uses in the first of two groups.
        result: `(2, splits)`.
    """
    directions = _group_means(normalize(vectors), splits)
    prototypes = normalize(_group_means(vectors, splits))
    mean_of_cosines = directions.prod(0).sum(-1)
    cosine_of_means = prototypes.prod(0).sum(-1)
    return 1 - np.stack([mean_of_cosines, cosine_of_means])


def _group_means(vectors: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Shape: `(2, splits, hidden_size)`."""
    sums = splits @ vectors
    sizes = splits.sum(1, keepdims=True)
    other_sums = vectors.sum(0) - sums
    other_sizes = len(vectors) - sizes
    return np.stack([sums / sizes, other_sums / other_sizes])


def distance_within(vectors: np.ndarray) -> float:
    """The mean cosine distance of two different uses of a group: how varied they are."""
    count = len(vectors)
    total = normalize(vectors).sum(0, dtype=np.float64)
    sum_of_cosines = np.linalg.norm(total) ** 2  # with each use itself, too
    pairs = count * (count - 1)
    return float(1 - (sum_of_cosines - count) / pairs)


def typical_uses(vectors: Mapping[str, np.ndarray], group: str, top_k: int) -> list[int]:
    """The uses of a group that are nearest to its uses, and farthest from those of the others."""
    uses = normalize(vectors[group])
    others = [normalize(vectors[name]) for name in vectors if name != group]
    direction = uses.mean(0) - np.concatenate(others).mean(0)
    scores = uses @ direction
    best_first = (-scores).argsort(kind="stable")
    return best_first[:top_k].tolist()


def shown_pairs(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The consecutive pairs of groups that are numbers, or all pairs."""
    pairs = result["pairs"]
    if not result["ordered"]:
        return pairs
    return [pair for pair in pairs if pair["consecutive"]]


def format_change(result: Mapping[str, Any]) -> str:
    """The groups with their typical uses, and `shown_pairs`."""
    lines = [f"{result['word']} by {result['group_by']}"]
    for group in result["groups"]:
        lines += ["", "{name}: {uses} uses, with a mean distance of {distance_within:.3f}".format(**group)]
        lines += [f"  {use}" for use in group["typical_uses"]]
    rows = [["", "APD", "APD at random", "APD p", "PRT", "PRT at random", "PRT p"]]
    for pair in shown_pairs(result):
        row = [", ".join(pair["groups"])]
        for name in MEASURES_OF_CHANGE:
            measure = pair[name]
            row += [f"{measure[key]:.3f}" for key in ("distance", "random_mean", "p")]
        rows.append(row)
    lines += ["", markdown_table(rows)]
    if result["left_out"]:
        left_out = [f"{name} ({uses})" for name, uses in result["left_out"].items()]
        lines += ["", f"Left out, with fewer than --min_uses {result['min_uses']}: {', '.join(left_out)}"]
    return "\n".join(lines)
