"""Clusters of the uses of a word, without an inventory of senses."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..program.command_line import require
from .neighbors import WordUse, normalize
from .usage_change import rounded, typical_uses

BY_SILHOUETTE = 0  # the value of --clusters without a number
MOST_CLUSTERS = 10  # that are tried
MOST_CLUSTERED_USES = 4000  # the distances of all pairs then take 128 MB, and silhouettes some copies
SEPARATED = 0.25  # silhouette; below it, Kaufman and Rousseeuw (1990) find no substantial structure


class UseClusters(NamedTuple):
    """The number of the cluster of each use, from 1 for the largest, and the mean silhouette.

    `clustered` is the number of uses that were clustered. Others are in the cluster with the nearest mean.
    """

    numbers: np.ndarray
    silhouette: float
    clustered: int


def cluster_uses(vectors: np.ndarray, number: int = BY_SILHOUETTE, seed: int = 0) -> UseClusters | None:
    """Agglomerative clusters of cosine distances; `None` for fewer than three uses, or too few for the number.

    Linkage is complete: average linkage puts single unusual uses into clusters of their own.

    Args:
        number: of clusters; 0: the number up to `MOST_CLUSTERS` with the largest mean silhouette.
        seed: of the sample that is clustered if there are more than `MOST_CLUSTERED_USES`.

    Shape:
        vectors: `(uses, hidden_size)`.
    """
    require("sklearn", extra="train", purpose="--clusters")
    from sklearn.cluster import AgglomerativeClustering
    from sklearn.metrics import silhouette_score
    from sklearn.metrics.pairwise import cosine_distances

    sample = np.sort(np.random.default_rng(seed).permutation(len(vectors))[:MOST_CLUSTERED_USES])
    numbers = [number] if number else range(2, MOST_CLUSTERS + 1)
    possible = [count for count in numbers if count < len(sample)]
    if not possible:
        return None
    distances = cosine_distances(vectors[sample])
    best_labels = np.empty(0)
    best_silhouette = -2.0
    for count in possible:
        clustering = AgglomerativeClustering(n_clusters=count, metric="precomputed", linkage="complete")
        labels = clustering.fit_predict(distances)
        silhouette = silhouette_score(distances, labels, metric="precomputed")
        if silhouette > best_silhouette:
            best_labels, best_silhouette = labels, silhouette
    sizes = np.bincount(best_labels)
    rank_of = np.empty(len(sizes), dtype=int)
    rank_of[(-sizes).argsort(kind="stable")] = 1 + np.arange(len(sizes))
    sampled_numbers = rank_of[best_labels]
    means = [vectors[sample][sampled_numbers == rank].mean(0) for rank in range(1, 1 + len(sizes))]
    all_numbers = 1 + (normalize(vectors) @ normalize(np.stack(means)).T).argmax(1)
    all_numbers[sample] = sampled_numbers
    return UseClusters(all_numbers, float(best_silhouette), len(sample))


def describe_clusters(
    clusters: UseClusters, groups: Mapping[str, Sequence[WordUse]], vectors: np.ndarray, top_k: int
) -> dict[str, Any]:
    """Each cluster with its uses, its share in each group, and its typical uses.

    Args:
        groups: the uses of each group.
        vectors: of the uses of all groups. Shape: `(uses, hidden_size)`.
    """
    uses = [use for members in groups.values() for use in members]
    names = np.repeat(np.array(list(groups)), [len(members) for members in groups.values()])
    numbers = np.unique(clusters.numbers)
    vectors_of = {str(number): vectors[clusters.numbers == number] for number in numbers}
    descriptions = []
    for number in numbers:
        rows = np.flatnonzero(clusters.numbers == number)
        shares = {}
        for group in groups:
            shares[group] = rounded(np.mean(clusters.numbers[names == group] == number))
        typical = [uses[rows[row]] for row in typical_uses(vectors_of, str(number), top_k)]
        description = {
            "cluster": int(number),
            "uses": len(rows),
            "share": shares,
            "typical_uses": [[str(use), str(use.place)] for use in typical],
        }
        descriptions.append(description)
    return {"silhouette": rounded(clusters.silhouette), "clustered": clusters.clustered, "clusters": descriptions}


def format_clusters(described: Mapping[str, Any]) -> str:
    """Each cluster with its typical uses, and how well they are separated."""
    lines = []
    for cluster in described["clusters"]:
        parts = [f"{cluster['uses']:,} uses"]
        parts += [f"{share:.0%} of {group}" for group, share in cluster["share"].items() if group]
        lines += ["", f"Cluster {cluster['cluster']}: {', '.join(parts)}"]
        lines += [f"  {use}  ({place})" for use, place in cluster["typical_uses"]]
    silhouette = described["silhouette"]
    advice = "The clusters are apart. Compare their typical uses with a dictionary."
    if silhouette < SEPARATED:
        advice = (
            f"Below {SEPARATED} the clusters run into each other, so read them as a sorting of the uses, not as senses."
        )
    lines += ["", f"Mean silhouette {silhouette:.2f}. {advice}"]
    total = sum(cluster["uses"] for cluster in described["clusters"])
    if described["clustered"] < total:
        lines.append(
            f"{described['clustered']:,} of {total:,} uses were clustered, drawn at random. The others are in the "
            "cluster with the nearest mean."
        )
    return "\n".join(lines[1:])
