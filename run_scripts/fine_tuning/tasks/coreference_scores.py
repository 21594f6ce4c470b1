"""Scores of coreference: the three of CoNLL-2012 and their mean.

The formulas are those of Pradhan et al. (2014), with CEAF of entities (phi4) as in Luo (2005). All numerators and
denominators are summed over the documents, so the scores are those of all documents at once, like the official
scorer's. Division by zero gives 0.
"""

from collections.abc import Sequence

import numpy as np

from modeling_elmo.run_scripts.fine_tuning.metrics import Scores
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference_data import MentionSpan

Cluster = Sequence[MentionSpan]

METRICS = ("muc", "b_cubed", "ceaf", "mention")


def coreference_scores(
    predicted: Sequence[Sequence[Cluster]], gold: Sequence[Sequence[Cluster]], singletons: bool
) -> Scores:
    """Scores of the clusters of each document; without `singletons`, those of one mention do not count on either side.

    Returns:
        `f1`, the mean F1 of MUC, B-cubed and CEAF; `X_precision`, `X_recall` and `X_f1` for the X `muc`, `b_cubed`,
        `ceaf`, and `mention`: the mentions that are found. MUC counts links, so it ignores singletons anyway.
    """
    totals = np.zeros((len(METRICS), 4))
    for found, wanted in zip(predicted, gold, strict=True):
        totals += _document_counts(_mention_sets(found, singletons), _mention_sets(wanted, singletons))
    scores: Scores = {}
    for name, counts in zip(METRICS, totals, strict=True):
        rates = _precision_recall(*counts)
        scores |= {f"{name}_{rate}": value for rate, value in rates.items()}
    return {"f1": float(np.mean([scores[f"{name}_f1"] for name in METRICS[:3]])), **scores}


def _mention_sets(clusters: Sequence[Cluster], singletons: bool) -> list[set[MentionSpan]]:
    sets = [set(cluster) for cluster in clusters]
    if len(set().union(*sets)) < sum(map(len, clusters)):
        raise ValueError("A mention is in a document's clusters twice; pass clusters that have no mention in common.")
    return [mentions for mentions in sets if len(mentions) > (0 if singletons else 1)]


def _document_counts(found: list[set[MentionSpan]], wanted: list[set[MentionSpan]]) -> np.ndarray:
    """For each metric the numerator and denominator of precision, then of recall. Shape: `(4, 4)`."""
    from scipy.optimize import linear_sum_assignment

    # Shape: `(found, wanted)`, `(found, 1)`, `(1, wanted)`.
    common = np.array([[len(one & other) for other in wanted] for one in found]).reshape(len(found), len(wanted))
    found_sizes = np.array([*map(len, found)], dtype=float)[:, None]
    wanted_sizes = np.array([*map(len, wanted)], dtype=float)[None]
    # A cluster of n mentions has n - 1 links; the part that two clusters share keeps its size - 1.
    links = (common - 1).clip(0).sum()
    similarity = 2 * common / (found_sizes + wanted_sizes)
    aligned = similarity[linear_sum_assignment(similarity, maximize=True)].sum()
    sizes = found_sizes.sum(), wanted_sizes.sum()
    return np.array(
        [
            [links, sizes[0] - len(found), links, sizes[1] - len(wanted)],
            [(common**2 / found_sizes).sum(), sizes[0], (common**2 / wanted_sizes).sum(), sizes[1]],
            [aligned, len(found), aligned, len(wanted)],
            [common.sum(), sizes[0], common.sum(), sizes[1]],
        ]
    )


def _precision_recall(right_found: float, found: float, right_wanted: float, wanted: float) -> dict[str, float]:
    precision, recall = float(right_found / found) if found else 0.0, float(right_wanted / wanted) if wanted else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}
