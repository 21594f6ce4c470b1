"""Tables and pictures of task runs, from one record a run: the paper's Table 1, Figure 1 and Figure 2.

A record is what the training of one arm with one seed leaves behind:

    {"task": "ner", "arm": "elmo", "seed": 1, "metric": "f1", "metrics": {"validation": {"f1": 0.41}, "test": ...},
     "layer_weights": {"input": [0.2, 0.5, 0.3]}, "train_samples": 3394, "epochs": 7.0, "seconds": 81.2, ...}

The name of an arm may end in `@` and a share of the training data: `elmo@0.1`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from modeling_elmo.run_scripts.program.files import write_json, write_lines

logger = logging.get_logger(__name__)

Record = dict[str, Any]
Figures = dict[str, dict[str, float]]  # by split and metric

SPLITS = ("train", "validation", "test")  # their order; others follow
ERRORS = ("mse", "loss")  # lower is better, and not a share: shown as they are


@dataclass(frozen=True)
class ArmSummary:
    """The runs of an arm: mean and sample standard deviation over its seeds, by split and metric."""

    arm: str
    seeds: list[int]
    mean: Figures
    deviation: Figures


def read_record(path: str | Path) -> Record:
    """The record in a JSON file, with the keys that tables need."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}. Delete it and run that arm and seed again.") from error
    needed = ("task", "arm", "seed", "metric", "metrics")
    missing = [key for key in needed if key not in record] if isinstance(record, dict) else list(needed)
    if missing:
        raise ValueError(f"{path} is no record of a run: it has no {', '.join(missing)}. Pass a file that a run wrote.")
    for split, scores in record["metrics"].items():
        if record["metric"] not in scores:
            raise ValueError(f"{path} has no {record['metric']} on {split}, only {list(scores)}; run it again.")
    return record


def summarize(records: Sequence[Record]) -> list[ArmSummary]:
    """A summary of each arm, in the order of their first records."""
    tasks = list(dict.fromkeys(record["task"] for record in records))
    if len(tasks) != 1:
        raise ValueError(f"Received records of the tasks {tasks}; pass those of one task.")
    arms: dict[str, list[Record]] = {}
    for record in records:
        arms.setdefault(record["arm"], []).append(record)
    return [summarize_arm(arm, members) for arm, members in arms.items()]


def summarize_arm(arm: str, records: Sequence[Record]) -> ArmSummary:
    seeds = [record["seed"] for record in records]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"Arm {arm!r} has the seeds {seeds}; pass one record for each seed.")
    figures = [numbers_of(record) for record in records]
    for seed, found in zip(seeds, figures, strict=True):
        if found.keys() != figures[0].keys():
            different = sorted(" ".join(name) for name in found.keys() ^ figures[0].keys())
            raise ValueError(
                f"Arm {arm!r}: only one of the seeds {seeds[0]} and {seed} has {', '.join(different)}; pass records of "
                "equal runs."
            )
    summary = ArmSummary(arm, seeds, {}, {})
    for split, metric in figures[0]:
        values = [found[split, metric] for found in figures]
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        summary.mean.setdefault(split, {})[metric] = float(np.mean(values))
        summary.deviation.setdefault(split, {})[metric] = deviation
    return summary


def numbers_of(record: Record) -> dict[tuple[str, str], float]:
    """The single numbers among its scores; `per_type` and the like are tables."""
    return {
        (split, name): float(value)
        for split in sorted(record["metrics"], key=place_of_split)
        for name, value in record["metrics"][split].items()
        if isinstance(value, (int, float))
    }


def place_of_split(split: str) -> int:
    return SPLITS.index(split) if split in SPLITS else len(SPLITS)


def relative_error_reduction(baseline: float, value: float) -> float:
    """The share of the baseline's errors that is gone: the relative increase of the paper's Table 1.

    Args:
        baseline, value: scores from 0 to 1.
    """
    for score in (baseline, value):
        if not 0 <= score <= 1:
            raise ValueError(f"Received the score {score}; pass scores from 0 to 1, such as 0.858 for 85.8 %.")
    if baseline == 1:
        raise ValueError("Received a baseline of 1, which makes no errors; there is nothing to reduce.")
    return ((1 - baseline) - (1 - value)) / (1 - baseline)


def table(summaries: Sequence[ArmSummary], metric: str, baseline: str | None = None) -> str:
    """A Markdown table with aligned columns: mean ± standard deviation of each arm on each split, in percent.

    Args:
        baseline: an arm, to which the others are compared on the last split: difference, and share of its errors that
            is gone. Of arms with a share of the data, its name without the share.
    """
    splits = splits_with(summaries, metric)
    rows = [["arm", "runs", *splits]]
    for summary in summaries:
        rows.append([summary.arm, str(len(summary.seeds)), *(cell(summary, split, metric) for split in splits)])
    if baseline is not None:
        rows[0].append(f"gain on {splits[-1]} (absolute / relative)")
        for row, summary in zip(rows[1:], summaries, strict=True):
            row.append(gain(summary, baseline_of(summary.arm, baseline, summaries), splits[-1], metric))
    return aligned(rows)


def score_table(summaries: Sequence[ArmSummary]) -> str:
    """All figures of each arm on the last split; empty where there is but one."""
    split = max((split for summary in summaries for split in summary.mean), key=place_of_split)
    metrics = list(dict.fromkeys(metric for summary in summaries for metric in summary.mean.get(split, {})))
    if len(metrics) < 2:
        return ""
    rows = [[f"arm, on {split}", *(metric.replace("_", " ") for metric in metrics)]]
    rows += [[summary.arm, *(cell(summary, split, metric) for metric in metrics)] for summary in summaries]
    return aligned(rows)


def splits_with(summaries: Sequence[ArmSummary], metric: str) -> list[str]:
    splits = {split for summary in summaries for split, means in summary.mean.items() if metric in means}
    if not splits:
        known = sorted({name for summary in summaries for means in summary.mean.values() for name in means})
        raise ValueError(f"No arm has the metric {metric!r}; pass one of {known}.")
    return sorted(splits, key=lambda split: (place_of_split(split), split))


def cell(summary: ArmSummary, split: str, metric: str) -> str:
    if metric not in summary.mean.get(split, {}):
        return ""
    mean = number(summary.mean[split][metric], metric)
    return mean if len(summary.seeds) == 1 else f"{mean} ± {number(summary.deviation[split][metric], metric)}"


def number(value: float, metric: str) -> str:
    return f"{value:.4f}" if metric in ERRORS else f"{100 * value:.2f}"


def baseline_of(arm: str, baseline: str, summaries: Sequence[ArmSummary]) -> ArmSummary:
    arms = {summary.arm: summary for summary in summaries}
    name = baseline if baseline in arms else baseline + "".join(arm.partition("@")[1:])
    if name not in arms:
        raise ValueError(f"There is no arm {name!r} to compare {arm!r} with; pass a baseline among {list(arms)}.")
    return arms[name]


def gain(summary: ArmSummary, baseline: ArmSummary, split: str, metric: str) -> str:
    if summary is baseline or any(metric not in each.mean.get(split, {}) for each in (summary, baseline)):
        return ""
    before, after = baseline.mean[split][metric], summary.mean[split][metric]
    if metric in ERRORS:
        return f"{before - after:+.4f}" + (f" / {(before - after) / before:.1%}" if before > 0 else "")
    relative = f" / {relative_error_reduction(before, after):.1%}" if 0 <= before < 1 and 0 <= after <= 1 else ""
    return f"{100 * (after - before):+.2f}{relative}"


def aligned(rows: list[list[str]]) -> str:
    """Markdown; the first column reads from the left, numbers from the right."""
    rows = [[text.replace("|", "\\|") for text in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * (width - 1) + ":" if place else "-" * width for place, width in enumerate(widths)]
    sides = ["<", *">" * (len(widths) - 1)]
    form = " | ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join(f"| {form.format(*row)} |" for row in [rows[0], rule, *rows[1:]])


def write_results(folder: str | Path, name: str, records: Sequence[Record], baseline: str | None = None) -> None:
    """Writes `results/{name}.json`, the records and their summaries, and `results/{name}.md`, their tables.

    Args:
        baseline: as in `table`.
    """
    if Path(name).name != name:
        raise ValueError(f"Received the name {name!r}; pass a plain file name, without folder.")
    metrics = list(dict.fromkeys(record["metric"] for record in records))
    if len(metrics) != 1:
        raise ValueError(f"Received records with the metrics {metrics}; pass those with one.")
    summaries, results = summarize(records), Path(folder, "results")
    text = report(name, records, summaries, metrics[0], baseline)
    whole = {"records": list(records), "summaries": [asdict(summary) for summary in summaries]}
    write_json(results / f"{name}.json", whole)
    write_lines(results / f"{name}.md", [text])


def report(
    name: str, records: Sequence[Record], summaries: Sequence[ArmSummary], metric: str, baseline: str | None
) -> str:
    unit = "" if metric in ERRORS else ", in percent"
    parts = [
        f"# {name}",
        f"Task `{records[0]['task']}`: {metric}{unit}; mean ± sample standard deviation over the runs, one a seed.",
        table(summaries, metric, baseline),
    ]
    if baseline is not None:
        parts.append(f"Gain over `{baseline}`: the difference, and the share of its errors that is gone.")
    if scores := score_table(summaries):
        parts += ["## All scores", scores]
    weights = mean_layer_weights(records)
    if weights:
        parts += ["## Layer weights", "Softmax-normalised, mean over the runs.", layer_table(weights)]
    if types := type_table(records):
        parts += ["## By type", f"F1 on {last_split(records[0])}, in percent, mean over the runs.", types]
    return "\n\n".join([*parts, "## Runs", run_table(records, metric)])


def last_split(record: Record) -> str:
    return max(record["metrics"], key=place_of_split)


def best_record(records: Sequence[Record]) -> Record:
    """The run with the best score on the first split, which is no test unless there is no other."""

    return max(records, key=lambda record: record["metrics"][first_split(record)][record["metric"]])


def first_split(record: Record) -> str:
    return min(record["metrics"], key=place_of_split)


def tables_by_type(record: Record) -> dict[str, Any]:
    scores = record["metrics"][last_split(record)]
    return scores.get("per_type") or scores.get("per_label") or {}


def type_table(records: Sequence[Record]) -> str:
    """F1 of each type of entity, tag or label on the last split: a row a type, a column an arm."""
    numbers: dict[str, int] = {}
    found: dict[tuple[str, str], list[float]] = {}
    for record in records:
        for kind, scores in tables_by_type(record).items():
            numbers[kind] = scores["number"]
            found.setdefault((kind, record["arm"]), []).append(scores["f1"])
    if not numbers:
        return ""
    arms = list(dict.fromkeys(record["arm"] for record in records))
    rows = [["type", "number", *arms]]
    for kind, count in numbers.items():
        means = [f"{100 * np.mean(found[kind, arm]):.2f}" if (kind, arm) in found else "" for arm in arms]
        rows.append([kind, f"{count:,}", *means])
    return aligned(rows)


def run_table(records: Sequence[Record], metric: str) -> str:
    splits = sorted({split for record in records for split in record["metrics"]}, key=place_of_split)
    optional: dict[str, str] = {"train_samples": "{:,}", "epochs": "{:.1f}", "seconds": "{:.0f}"}
    rows = [["arm", "seed", *splits, *(name.replace("_", " ") for name in optional)]]
    for record in records:
        scores = [record["metrics"].get(split, {}).get(metric) for split in splits]
        shown = ["" if score is None else number(score, metric) for score in scores]
        others = ["" if record.get(name) is None else form.format(record[name]) for name, form in optional.items()]
        rows.append([record["arm"], str(record["seed"]), *shown, *others])
    return aligned(rows)


def mean_layer_weights(records: Sequence[Record]) -> dict[str, np.ndarray]:
    """Weights of the layers where ELMo enters, the mean over seeds, by arm and place as far as these differ."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for record in records:
        for place, weights in record.get("layer_weights", {}).items():
            found.setdefault((record["arm"], place), []).append(weights)
    if len({len(weights) for group in found.values() for weights in group}) > 1:
        sizes = {", ".join(key): sorted({len(weights) for weights in group}) for key, group in found.items()}
        raise ValueError(f"The runs mix different numbers of layers: {sizes}; pass records of one model.")
    arms, places = ({key[part] for key in found} for part in (0, 1))
    labels = {key: key[1] if len(arms) == 1 else key[0] if len(places) == 1 else ", ".join(key) for key in found}
    return {labels[key]: np.mean(group, axis=0) for key, group in found.items()}


def layer_names(weights: dict[str, np.ndarray]) -> list[str]:
    count = len(next(iter(weights.values())))
    return ["token layer", *(f"biLSTM {number}" for number in range(1, count))]


def layer_table(weights: dict[str, np.ndarray]) -> str:
    columns = [[f"{weight:.3f}" for weight in column] for column in weights.values()]
    rows = map(list, zip(layer_names(weights), *columns, strict=True))
    return aligned([["layer", *weights], *rows])


def sense_table(found: dict[str, Any]) -> str:
    """Both figures side by side, in percent."""
    columns = {"same sense@1": found["same_sense"], "disambiguation": found.get("disambiguation")}
    columns = {name: figures for name, figures in columns.items() if figures}
    rows = dict.fromkeys(row for figures in columns.values() for row in figures)
    shown = [row for row in rows if row not in ("lemmas", "instances", "unseen_lemmas")]
    cells = [[row, *(f"{100 * each[row]:.1f}" if row in each else "" for each in columns.values())] for row in shown]
    return aligned([["", *columns], *cells])
