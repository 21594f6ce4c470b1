"""Clusters of uses, compared with scipy's linkage and with a loop over silhouettes."""

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform
from sklearn.metrics import adjusted_rand_score

from modeling_elmo.run_scripts.vectors import use_clusters
from modeling_elmo.run_scripts.vectors.neighbors import Place, WordUse
from modeling_elmo.run_scripts.vectors.use_clusters import cluster_uses, describe_clusters, format_clusters

SIZES = (30, 20, 10)


def senses(spread: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Uses of three senses in random order, and their senses."""
    generator = np.random.default_rng(0)
    labels = generator.permutation(np.repeat(range(3), SIZES))
    centers = 3 * np.eye(3, 8)
    return centers[labels] + spread * generator.normal(size=(len(labels), 8)), labels


def plain_silhouette(distances: np.ndarray, labels: np.ndarray) -> float:
    values = []
    for row, label in enumerate(labels):
        within = (labels == label).sum() - 1
        if not within:
            values.append(0.0)
            continue
        near = distances[row][labels == label].sum() / within
        far = min(distances[row][labels == other].mean() for other in set(labels) - {label})
        values.append((far - near) / max(near, far))
    return float(np.mean(values))


@pytest.mark.parametrize("spread", [0.3, 1.5])
def test_clusters_equal_those_of_scipy(spread):
    vectors, labels = senses(spread)
    distances = pdist(vectors, "cosine")
    tree = linkage(distances, "complete")
    silhouettes = {}
    for number in range(2, 11):
        parts = fcluster(tree, number, "maxclust")
        silhouettes[number] = plain_silhouette(squareform(distances), parts)
        found = cluster_uses(vectors, number)
        assert adjusted_rand_score(parts, found.numbers) == 1 and len(set(found.numbers)) == number
        assert found.silhouette == pytest.approx(silhouettes[number])
    best = cluster_uses(vectors)
    assert len(set(best.numbers)) == max(silhouettes, key=silhouettes.get)
    if spread < 1:
        assert adjusted_rand_score(labels, best.numbers) == 1
        assert np.bincount(best.numbers).tolist() == [0, *SIZES]  # the largest is first


def test_shares_and_typical_uses_of_clusters():
    vectors, labels = senses()
    uses = [WordUse(["a", "play", f"sense{label}"], 1, Place("a.tsv", row, {})) for row, label in enumerate(labels)]
    groups = {"old": uses[:24], "new": uses[24:]}
    described = describe_clusters(cluster_uses(vectors), groups, vectors, 2)
    for number, cluster in enumerate(described["clusters"]):
        assert cluster["uses"] == SIZES[number]
        assert cluster["share"]["old"] == pytest.approx((labels[:24] == number).mean(), abs=1e-6)
        assert cluster["share"]["new"] == pytest.approx((labels[24:] == number).mean(), abs=1e-6)
        assert all(f"sense{number}" in use for use, _ in cluster["typical_uses"])
    printed = format_clusters(described)
    assert f"Cluster 1: 30 uses, {described['clusters'][0]['share']['old']:.0%} of old, " in printed
    assert "The clusters are apart." in printed
    low = format_clusters({**described, "silhouette": 0.2})
    assert "Mean silhouette 0.20. Below 0.25 the clusters run into each other" in low


def test_of_many_uses_a_sample_is_clustered_and_told(monkeypatch):
    monkeypatch.setattr(use_clusters, "MOST_CLUSTERED_USES", 25)
    vectors, labels = senses()
    found, again, other = (cluster_uses(vectors, seed=seed) for seed in (0, 0, 1))
    assert found.clustered == 25 and len(found.numbers) == 60
    assert adjusted_rand_score(labels, found.numbers) == 1
    np.testing.assert_array_equal(found.numbers, again.numbers)
    assert found.silhouette == again.silhouette != other.silhouette
    uses = [WordUse(["play"], 0)] * 60
    printed = format_clusters(describe_clusters(found, {"": uses}, vectors, 1))
    assert "25 of 60 uses were clustered, drawn at random." in printed and "% of" not in printed


@pytest.mark.parametrize(("uses", "number"), [(2, 0), (5, 5), (5, 9)])
def test_too_few_uses(uses, number):
    assert cluster_uses(np.eye(10)[:uses], number) is None


def test_equal_uses():
    assert cluster_uses(np.ones((6, 4)), 2).numbers.tolist().count(1) >= 3
