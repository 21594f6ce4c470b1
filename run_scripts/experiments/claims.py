"""The paper's claims beside a plan's results: how much a change gains, and whether that is more than chance."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from modeling_elmo.run_scripts.cards.markdown import markdown_table
from modeling_elmo.run_scripts.cards.tables import RunRecord, last_split

CONFIDENCE = 0.95
AS_IT_WAS, FURTHER = "the biLM as it was", "trained further"
# The changes that the paper makes, by table: the arm before and the arm after it.
CHANGES = {
    "1": [("baseline", "elmo")],
    "2": [
        ("baseline", "top layer"),
        ("top layer", "average"),
        ("top layer", "learned, lambda 1"),
        ("learned, lambda 1", "learned, lambda 0.001"),
    ],
    "3": [("output", "input"), ("input", "both")],
    "domain": [(AS_IT_WAS, FURTHER)],
    "figure 1": [("baseline@1.0", "elmo@0.1"), ("baseline@1.0", "elmo@1.0")],
}
LAYERS = ("biLSTM 1", "biLSTM 2")  # Tables 5 and 6 compare these two, without seeds
ScoresOfSeeds = dict[str, dict[int, float]]  # by arm and seed, from 0 to 1


class Gain(NamedTuple):
    """What a change adds to a score, over the seeds that both arms have.

    Args:
        mean: mean difference.
        margin: half the width of its confidence interval, by Student's t over paired seeds. None: one seed.
        seeds: number of seeds.
    """

    mean: float
    margin: float | None
    seeds: int


def scores_by_arm(records: Sequence[RunRecord]) -> ScoresOfSeeds:
    """The scores on the last split."""
    scores: ScoresOfSeeds = {}
    for record in records:
        scores.setdefault(record["arm"], {})[record["seed"]] = record["metrics"][last_split(record)][record["metric"]]
    return scores


def gain(before: dict[int, float], after: dict[int, float]) -> Gain | None:
    """What the second arm adds to the first; `None` if no seed has both."""
    differences = np.array([after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())])
    if not len(differences):
        return None
    if len(differences) == 1:
        return Gain(float(differences[0]), None, 1)
    from scipy.stats import t

    error = differences.std(ddof=1) / np.sqrt(len(differences))
    margin = float(t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1) * error)
    return Gain(float(differences.mean()), margin, len(differences))


def layer_gain(results: dict[str, Any]) -> Gain | None:
    """What the second layer adds to the first, in the answer of `elmo senses` or `elmo probe`.

    The margin is that of two samples of the same size. They are the same words, so it is rather too wide.
    """
    if "disambiguation" in results:
        shares, number = results["disambiguation"], results["disambiguation"]["instances"]
    elif "test" in results and "scores" in results["test"]:
        scores = results["test"]["scores"]
        shares = {layer: scores[layer][results["metric"]] for layer in scores}
        number = results["test"]["words"]
    else:
        return None
    if any(layer not in shares for layer in LAYERS):
        return None
    from scipy.stats import norm

    before, after = (shares[layer] for layer in LAYERS)
    error = np.sqrt((before * (1 - before) + after * (1 - after)) / number)
    return Gain(after - before, float(norm.ppf((1 + CONFIDENCE) / 2) * error), 0)


def verdict(found: Gain, expected: float) -> str:
    """Whether a gain has the sign of `expected`, if its interval excludes 0."""
    if found.margin is None or abs(found.mean) <= found.margin:
        return "cannot be told"
    return "yes" if found.mean * expected > 0 else "no"


def claims_table(entries: Sequence[dict[str, Any]], found: dict[str, Any]) -> str:
    """A row for each change of each task; empty if no task has both arms of a change.

    Args:
        entries: experiments of a plan that have results.
        found: the results of each experiment, by name.
    """
    rows = [["task", "change", "the paper", "here", "seeds", "as in the paper?"]]
    for entry in entries:
        results = found[entry["name"]]
        if isinstance(results, list):
            scores = scores_by_arm(results)
            if entry["table"] == "domain":
                general = scores_by_arm(found.get(entry["beside"], []))
                scores = {AS_IT_WAS: general.get("elmo", {}), FURTHER: scores.get("elmo", {})}
            for change in CHANGES.get(entry["table"], []):
                rows += claim_row(entry, change, gain(*(scores.get(arm, {}) for arm in change)))
        elif entry["table"] in ("5", "6"):
            rows += claim_row(entry, LAYERS, layer_gain(results))
    return markdown_table(rows) if len(rows) > 1 else ""


def claim_row(entry: dict[str, Any], change: tuple[str, str], found: Gain | None) -> Iterator[list[str]]:
    """The row of a change; none if it was not measured. The paper gains where it has no figure for the task."""
    if found is None:
        return
    paper, (before, after) = entry.get("paper", {}), change
    published = round(paper[after] - paper[before], 2) if before in paper and after in paper else None
    margin = "" if found.margin is None else f" ± {100 * found.margin:.1f}"
    cells = ["" if published is None else f"{published:+.1f}", f"{100 * found.mean:+.1f}{margin}"]
    cells += [str(found.seeds or ""), verdict(found, 1.0 if published is None else published)]
    yield [entry["title"], f"{before} → {after}", *cells]


def epochs_table(entries: Sequence[dict[str, Any]], found: dict[str, Any]) -> str:
    """How soon the arm with ELMo is as good as the baseline ever is; empty if no task has learning curves of both.

    Every figure is a mean over seeds. A seed whose ELMo never reaches the baseline's best leaves the last cell empty.
    """
    rows = [["task", "best epoch without ELMo", "with ELMo", "epochs until ELMo reaches the best without"]]
    for entry in entries:
        curves = {(record["arm"], record["seed"]): record.get("curve", []) for record in found[entry["name"]]}
        seeds = sorted({seed for _, seed in curves})
        pairs = [(curves.get(("baseline", seed), []), curves.get(("elmo", seed), [])) for seed in seeds]
        pairs = [pair for pair in pairs if all(pair)]
        if pairs:
            reached = [first_epoch(elmo, best_score(baseline)) for baseline, elmo in pairs]
            cells = [np.mean([best_epoch(pair[arm]) for pair in pairs]) for arm in (0, 1)]
            epochs = [epoch for epoch in reached if epoch is not None]
            cells += [np.mean(epochs)] if len(epochs) == len(pairs) else []
            rows.append([entry["title"], *(f"{cell:.1f}" for cell in cells)] + [""] * (3 - len(cells)))
    return markdown_table(rows) if len(rows) > 1 else ""


def best_score(curve: Sequence[Sequence[float]]) -> float:
    return max(score for _, score in curve)


def first_epoch(curve: Sequence[Sequence[float]], least: float) -> float | None:
    """The first epoch with a score of at least `least`."""
    return next((epoch for epoch, score in curve if score >= least), None)


def best_epoch(curve: Sequence[Sequence[float]]) -> float:
    """The first epoch with the best score."""
    return max(curve, key=lambda point: point[1])[0]
