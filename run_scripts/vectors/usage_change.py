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
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from ..cards.figures import MEASURES_OF_CHANGE
from ..cards.tables import markdown_table
from .neighbors import normalize
from .word_vectors import is_number

LEVEL = 0.05  # of significance
EQUAL_DISTANCES = 1e-12  # the same split, drawn again, may differ in the last digits


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


def compare_groups(
    vectors: Mapping[str, np.ndarray],
    permutations: int,
    seed: int,
    documents: Mapping[str, Sequence[str]] | None = None,
) -> list[dict[str, Any]]:
    """Both measures for each pair of groups, of whose uses there are vectors `(uses, hidden_size)`.

    Args:
        documents: the name of the document of each use, by group. `None`: each use is a document of its own.

    Returns:
        For each pair, its `groups`, their numbers of `documents`, whether they are `consecutive`, the `smallest_p` that
        so many documents allow, and for each measure what `describe_distances` returns.
    """
    generator = np.random.default_rng(seed)
    consecutive = list(pairwise(vectors))
    pairs = []
    for one, other in combinations(vectors, 2):
        names = None
        sizes = [len(vectors[one]), len(vectors[other])]
        if documents is not None:
            names = (documents[one], documents[other])
            sizes = [len(set(names_of_group)) for names_of_group in names]
        pair = {
            "groups": [one, other],
            "consecutive": (one, other) in consecutive,
            "documents": sizes if documents is not None else None,
            "smallest_p": rounded(smallest_p(sizes[0], sizes[1], permutations)),
        }
        measures = compare_pair(vectors[one], vectors[other], permutations, generator, names)
        pairs.append(pair | measures)
    return pairs


def smallest_p(one: int, other: int, permutations: int) -> float:
    """The smallest p that splits of so many documents can give. A split and its mirror image are equally far."""
    splits = math.comb(one + other, one)
    if one == other:
        splits //= 2
    return max(1 / splits, 1 / (1 + permutations))


def compare_pair(
    one: np.ndarray,
    other: np.ndarray,
    permutations: int,
    generator: np.random.Generator,
    documents: tuple[Sequence[str], Sequence[str]] | None = None,
) -> dict[str, dict[str, Any]]:
    """What `describe_distances` says of each measure of two groups."""
    both_distances = permuted_distances(one, other, permutations, generator, documents)
    return {name: describe_distances(both_distances[row]) for row, name in enumerate(MEASURES_OF_CHANGE)}


def describe_distances(distances: np.ndarray) -> dict[str, Any]:
    """A measure of two groups: its `distance`, what random splits give, and the probability of such a distance.

    `random_mean` is the mean distance of random splits, `random_5` and `random_95` are quantiles, and `random` has all
    of them. `p` is the share of splits, the observed one and random ones, whose distance is at least as large as the
    observed.

    Args:
        distances: the observed one, then the random splits.
    """
    random = distances[1:]
    return {
        "distance": rounded(distances[0]),
        "random_5": rounded(np.quantile(random, LEVEL)),
        "random_mean": rounded(random.mean()),
        "random_95": rounded(np.quantile(random, 1 - LEVEL)),
        "p": rounded((distances >= distances[0] - EQUAL_DISTANCES).mean()),
        "random": random,
    }


def rounded(number: float | np.floating) -> float:
    return round(float(number), 6)


def permuted_distances(
    one: np.ndarray,
    other: np.ndarray,
    permutations: int,
    generator: np.random.Generator,
    documents: tuple[Sequence[str], Sequence[str]] | None = None,
) -> np.ndarray:
    """Both measures of the observed split, and of random splits into as many documents.

    A document with uses in both groups counts as a document in each. A random split moves whole documents, so that the
    numbers of uses differ from split to split.

    Shape:
        one, other: `(uses, hidden_size)`.
        result: `(2, 1 + permutations)`.
    """
    vectors = np.concatenate([one, other]).astype(np.float64)
    numbers = np.arange(len(vectors))  # of the document of each use
    first_documents = len(one)
    if documents is not None:
        number_of: dict[tuple[int, str], int] = {}
        places = [(group, name) for group, names in enumerate(documents) for name in names]
        numbers = np.array([number_of.setdefault(place, len(number_of)) for place in places])
        first_documents = len(set(documents[0]))
    observed = np.arange(numbers.max() + 1) < first_documents
    splits = np.tile(observed, (1 + permutations, 1))
    splits[1:] = generator.permuted(splits[1:], axis=1)
    sums = sums_by_number(vectors, numbers)
    sums_of_directions = sums_by_number(normalize(vectors), numbers)
    return split_distances(sums_of_directions, sums, np.bincount(numbers), splits)


def sums_by_number(vectors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The sum of the vectors with each number. Shape: `(vectors, dimension)` to `(numbers, dimension)`."""
    sums = np.zeros((numbers.max() + 1, vectors.shape[1]))
    np.add.at(sums, numbers, vectors)
    return sums


def split_distances(
    sums_of_directions: np.ndarray, sums: np.ndarray, sizes: np.ndarray, splits: np.ndarray
) -> np.ndarray:
    """Both measures of each split of documents.

    Args:
        sums_of_directions, sums: of the vectors of the uses in each document; directions have length 1.
        sizes: number of uses in each document.
        splits: true for the documents in the first of two groups.

    Shape:
        sums_of_directions, sums: `(documents, hidden_size)`.
        sizes: `(documents,)`.
        splits: `(splits, documents)`.
        result: `(2, splits)`.
    """
    return mean_distances(_group_means(sums_of_directions, sizes, splits), _group_means(sums, sizes, splits))


def _group_means(sums: np.ndarray, sizes: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Shape: `(2, splits, hidden_size)`."""
    first_sums = splits @ sums
    first_sizes = (splits @ sizes)[:, None]
    other_sums = sums.sum(0) - first_sums
    other_sizes = sizes.sum() - first_sizes
    return np.stack([first_sums / first_sizes, other_sums / other_sizes])


def mean_distances(mean_directions: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Both measures of pairs of groups. The mean of all pairs' cosines is the product of the mean directions.

    Shape:
        mean_directions, means: `(2, pairs, hidden_size)`.
        result: `(2, pairs)`.
    """
    mean_of_cosines = mean_directions.prod(0).sum(-1)
    cosine_of_means = normalize(means).prod(0).sum(-1)
    return 1 - np.stack([mean_of_cosines, cosine_of_means])


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
        lines += ["", format_group(group)]
        lines += [f"  {use}  ({place})" for use, place in group["typical_uses"]]
    pairs = shown_pairs(result)
    has_controls = any("controls" in pair[name] for pair in pairs for name in MEASURES_OF_CHANGE)
    rows = [[""]]
    for name in map(str.upper, MEASURES_OF_CHANGE):
        rows[0] += [name, f"{name} at random", f"{name} p"]
        rows[0] += [f"{name} above controls"] * has_controls
    for pair in pairs:
        row = [", ".join(pair["groups"])]
        for name in MEASURES_OF_CHANGE:
            row += [f"{pair[name][key]:.3f}" for key in ("distance", "random_mean", "p")]
            row += [controls_below(pair[name])] * has_controls
        rows.append(row)
    lines += ["", markdown_table(rows)]
    if result["left_out"]:
        left_out = [f"{name} ({uses})" for name, uses in result["left_out"].items()]
        lines += ["", f"Left out, with fewer than --min_uses {result['min_uses']}: {', '.join(left_out)}"]
    return "\n".join(lines)


def format_group(group: Mapping[str, Any]) -> str:
    uses = f"{group['uses']:,} uses"
    if group["uses"] < group["uses_in_text"]:
        uses = f"{group['uses']:,} of {group['uses_in_text']:,} uses, drawn at random,"
    if "documents" in group:
        uses += f" in {group['documents']:,} documents"
    return f"{group['name']}: {uses}, with a mean distance of {group['distance_within']:.3f}".replace(",,", ",")


def controls_below(measure: Mapping[str, Any]) -> str:
    """How many control words have a smaller distance."""
    if "controls" not in measure:
        return ""
    number = len(measure["controls"])
    return f"{1 + number - measure['rank']} of {number}"
