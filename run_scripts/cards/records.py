"""Records of runs: which of them belong together, and the means and deviations of their scores.

The training of one arm with one seed leaves a record:

    {"task": "ner", "arm": "elmo", "seed": 1, "metric": "f1", "metrics": {"validation": {"f1": 0.41}, "test": ...},
     "layer_weights": {"input": [0.2, 0.5, 0.3]}, "train_samples": 3394, "epochs": 7.0, "seconds": 81.2, ...}

The name of an arm may end in `@` and a share of the training data: `elmo@0.1`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from ..program.files import JsonObject, read_json

RunRecord = JsonObject
RunRecords = Sequence[RunRecord]

SPLITS = ("validation", "test")  # in this order; training data is not scored
BASELINE_NAME = "baseline"  # the arm without ELMo
NEEDED_KEYS = ("task", "arm", "seed", "metric", "metrics")


def checked_record(path: Path, needed: Iterable[str]) -> JsonObject:
    """The record in a JSON file, which must have these keys."""
    record = read_json(path)
    is_object = isinstance(record, dict)
    missing = [key for key in needed if not is_object or key not in record]
    if missing:
        raise ValueError(
            f"{path} is not the record of a run: it lacks {', '.join(missing)}. Copy it from the run, or delete it."
        )
    if not is_object:
        raise ValueError(f"{path} holds a {type(record).__name__} in place of an object. Write it again, or delete it.")
    return record


def read_record(path: Path) -> RunRecord:
    """The record in a JSON file, checked for the keys that tables need."""
    record = checked_record(path, NEEDED_KEYS)
    for split, scores in record["metrics"].items():
        if record["metric"] not in scores:
            raise ValueError(f"{path} has no {record['metric']} on {split}, only {list(scores)}. Run it again.")
    return record


def by_arm(records: RunRecords) -> dict[str, list[RunRecord]]:
    """The records of each arm, in the order of their first records. Wrong ones raise an error."""
    arms = defaultdict(list)
    for record in records:
        arms[record["arm"]].append(record)
    for arm, runs in arms.items():
        check_runs(arm, runs)
    return dict(arms)


def check_runs(arm: str, runs: list[RunRecord]):
    """Refuses a seed that occurs twice, and runs that do not have the same scores."""
    seeds = [run["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"Arm {arm!r} has the seeds {seeds}; pass one record for each seed.")
    first, *others = map(score_names, runs)
    different = first.union(*others) - first.intersection(*others)
    if different:
        raise ValueError(
            f"Arm {arm!r}: not all of the seeds {seeds} have {', '.join(sorted(different))}; run them again."
        )


def has_baseline(records: RunRecords) -> bool:
    return any(record["arm"].partition("@")[0] == BASELINE_NAME for record in records)


def splits_of(records: RunRecords) -> list[str]:
    present = set()
    for record in records:
        present.update(record["metrics"])
    return [split for split in SPLITS if split in present]


def last_metrics(record: RunRecord) -> JsonObject:
    """What was measured on the last split of a run: its test data if it has any."""
    *_, last = splits_of([record])
    return record["metrics"][last]


def numbers_on(record: RunRecord, split: str) -> dict[str, float]:
    """The scores of a run on a split, without tables such as `per_type`."""
    return plain_numbers(record["metrics"].get(split, {}))


def plain_numbers(metrics: JsonObject) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, (int, float))}


def score_names(record: RunRecord) -> set[str]:
    """The scores that a run has, each with its split."""
    names = set()
    for split in record["metrics"]:
        names.update(f"{split} {name}" for name in numbers_on(record, split))
    return names


def scores_on(records: RunRecords, split: str, metric: str) -> list[float]:
    """The scores of those runs that have them."""
    numbers = [numbers_on(record, split) for record in records]
    return [scores[metric] for scores in numbers if metric in scores]


def metrics_on(records: RunRecords, splits: Iterable[str]) -> list[str]:
    """The metrics that any run has on any of the splits."""
    metrics = {}
    for record, split in product(records, splits):
        metrics |= numbers_on(record, split)
    return list(metrics)


def best_record(records: RunRecords) -> RunRecord:
    """The run with the best score on its first split: validation, or test if there is no other."""

    def first_score(record: RunRecord) -> float:
        first, *_ = splits_of([record])
        return record["metrics"][first][record["metric"]]

    return max(records, key=first_score)


def mean_and_deviation(scores: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The mean, NaN without scores, and the sample standard deviation, 0 of one score."""
    if len(scores) == 0:
        return np.nan, 0.0
    mean = float(np.mean(scores))
    deviation = float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0
    return mean, deviation


def mean_layer_weights(records: RunRecords) -> dict[str, np.ndarray]:
    """Mean layer weights by place where ELMo enters, by arm, or by both, as needed to tell them apart."""
    groups = defaultdict(list)
    for record in records:
        arm = record["arm"]
        for place, weights in record.get("layer_weights", {}).items():
            groups[arm, place].append(weights)
    arms = {arm for arm, _ in groups}
    places = {place for _, place in groups}
    means = {}
    for (arm, place), weights in groups.items():
        label = f"{arm}, {place}"
        if len(arms) == 1:
            label = place
        elif len(places) == 1:
            label = arm
        means[label] = np.mean(weights, axis=0)
    return means
