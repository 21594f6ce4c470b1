"""Scores of coreference: the three of CoNLL-2012 and their mean, and those of GAP.

The formulas are those of Pradhan et al. (2014), with CEAF of entities (phi4) as in Luo (2005). All numerators and
denominators are summed over the documents, so the scores are those of all documents at once, like the official
scorer's. Division by zero gives 0.
"""

from collections.abc import Sequence

import numpy as np

from modeling_elmo.run_scripts.fine_tuning.coreference_data import GapExample, MentionSpan, Offsets
from modeling_elmo.run_scripts.fine_tuning.metrics import Scores

Cluster = Sequence[MentionSpan]

METRICS = ("muc", "b_cubed", "ceaf", "mention")


def coreference_scores(
    predicted: Sequence[Sequence[Cluster]], gold: Sequence[Sequence[Cluster]], singletons: bool
) -> Scores:
    """Scores of clusters of mentions.

    Args:
        predicted: predicted clusters of each document; a mention is `(sentence, first word, last word)`.
        gold: gold clusters of each document.
        singletons: whether clusters of one mention count. If not, they are left out on both sides.

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


def gap_scores(predicted: Sequence[Sequence[bool]], examples: Sequence[GapExample]) -> Scores:
    """Scores of GAP, as computed by its own script (`gap_scorer.py`); but as shares, not percentages.

    Args:
        predicted: for each example, whether the pronoun refers to each of the two names; see `gap_decisions`.
        examples: the examples of `read_gap`.

    Returns:
        `precision`, `recall` and `f1` over all names; `feminine_f1` and `masculine_f1` by pronoun; and `bias`, the
        first divided by the second.
    """
    found, wanted = np.array(predicted, dtype=bool), np.array([example.coreferent for example in examples])
    is_feminine = np.array([example.is_feminine for example in examples])
    rates = _pair_rates(found, wanted)
    feminine, masculine = (_pair_rates(found[rows], wanted[rows])["f1"] for rows in (is_feminine, ~is_feminine))
    bias = feminine / masculine if masculine else 0.0
    return {"f1": rates.pop("f1"), **rates, "feminine_f1": feminine, "masculine_f1": masculine, "bias": bias}


def _pair_rates(found: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    right = (found & wanted).sum()
    return _precision_recall(right, found.sum(), right, wanted.sum())


def gap_decisions(clusters: Sequence[Sequence[Offsets]], example: GapExample) -> tuple[bool, bool]:
    """Whether the pronoun of a GAP example refers to each of its names, by the clusters of a resolver.

    It does if the cluster with the pronoun itself has a mention within the name, or one that the name is part of. This
    is how Joshi et al. (2019) score resolvers of spans: `to_gap_tsv.py` in https://github.com/mandarjoshi90/coref.

    Args:
        clusters: half-open character offsets of the mentions of each cluster.
    """
    mentions = next((cluster for cluster in clusters if example.pronoun in map(tuple, cluster)), ())
    first, second = (any(_is_aligned(mention, name) for mention in mentions) for name in example.names)
    return first, second


def _is_aligned(one: Offsets, other: Offsets) -> bool:
    """Whether one of the two is part of the other."""
    return (one[0] >= other[0] and one[1] <= other[1]) or (other[0] >= one[0] and other[1] <= one[1])
