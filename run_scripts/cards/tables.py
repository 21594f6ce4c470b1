"""Tables of task runs in Markdown: from one record per run to summaries of arms, as in the paper's Table 1.

The training of one arm with one seed leaves a record:

    {"task": "ner", "arm": "elmo", "seed": 1, "metric": "f1", "metrics": {"validation": {"f1": 0.41}, "test": ...},
     "layer_weights": {"input": [0.2, 0.5, 0.3]}, "train_samples": 3394, "epochs": 7.0, "seconds": 81.2, ...}

The name of an arm may end in `@` and a share of the training data: `elmo@0.1`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..program.files import read_json, write_json, write_lines

RunRecord = dict[str, Any]

SPLITS = ("train", "validation", "test")  # in this order; other splits follow
ERRORS = ("mse", "loss")  # lower is better; shown as they are, not in percent
BASELINE_NAME = "baseline"  # the arm without ELMo
MOST_ITEMS = 10  # of a list; a corpus may have hundreds of files
SPECIAL = re.compile(r"[\\`*\[\]<>|~$&]|_(?![^\W_])|(?<![^\W_])_")  # an underscore inside a word is plain text
NO_SCORES = ("lemmas", "instances", "unseen_lemmas")  # in the scores of `elmo senses`
NEEDED_KEYS = ("task", "arm", "seed", "metric", "metrics")


def read_record(path: Path) -> RunRecord:
    """The record in a JSON file, checked for the keys that tables need."""
    record = read_json(path)
    missing = [key for key in NEEDED_KEYS if key not in record] if isinstance(record, dict) else NEEDED_KEYS
    if missing:
        raise ValueError(f"{path} is not the record of a run: it lacks {', '.join(missing)}. Pass a file of a run.")
    for split, scores in record["metrics"].items():
        if record["metric"] not in scores:
            raise ValueError(f"{path} has no {record['metric']} on {split}, only {list(scores)}. Run it again.")
    return record


def by_arm(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """The records of each arm, in the order of their first records. A mean over wrong ones is refused."""
    arms: dict[str, list[RunRecord]] = {}
    for record in records:
        arms.setdefault(record["arm"], []).append(record)
    for arm, runs in arms.items():
        seeds = [run["seed"] for run in runs]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"Arm {arm!r} has the seeds {seeds}; pass one record for each seed.")
        names = [{f"{split} {name}" for split in run["metrics"] for name in numbers_on(run, split)} for run in runs]
        if different := sorted(names[0].union(*names) - names[0].intersection(*names)):
            raise ValueError(f"Arm {arm!r}: not all of the seeds {seeds} have {', '.join(different)}; run them again.")
    return arms


def splits_of(records: Iterable[RunRecord]) -> list[str]:
    found = {split for record in records for split in record["metrics"]}
    return sorted(found, key=lambda split: (SPLITS.index(split) if split in SPLITS else len(SPLITS), split))


def numbers_on(record: RunRecord, split: str) -> dict[str, float]:
    """The scores of a run on a split, without tables such as `per_type`."""
    return {name: value for name, value in record["metrics"].get(split, {}).items() if isinstance(value, (int, float))}


def scores_on(records: Iterable[RunRecord], split: str, metric: str) -> list[float]:
    """The scores of those runs that have them."""
    found = (numbers_on(record, split) for record in records)
    return [scores[metric] for scores in found if metric in scores]


def best_record(records: Sequence[RunRecord]) -> RunRecord:
    """The run with the best score on its first split: validation, or test if there is no other."""
    return max(records, key=lambda record: record["metrics"][splits_of([record])[0]][record["metric"]])


def error_reduction(baseline: float, value: float) -> str:
    """The share of the baseline's errors that is gone, the relative increase of the paper's Table 1; empty without."""
    if not (0 <= baseline < 1 and 0 <= value <= 1):
        return ""
    return f"{((1 - baseline) - (1 - value)) / (1 - baseline):.1%}"


def summary_table(records: Sequence[RunRecord]) -> str:
    """Mean ± standard deviation of each arm on each split, in percent, and the gain over the baseline on the last.

    An arm with a share of the data is compared with the baseline with the same share.
    """
    arms, splits, metric = by_arm(records), splits_of(records), records[0]["metric"]
    rows = [["network", "runs", *splits]]
    for arm, runs in arms.items():
        rows.append([arm, str(len(runs)), *(score_cell(scores_on(runs, split, metric), metric) for split in splits)])
    if has_baseline(records):
        rows[0].append(f"gain on {splits[-1]} (points / share of errors)")
        for row, arm in zip(rows[1:], arms, strict=True):
            compared = BASELINE_NAME if BASELINE_NAME in arms else BASELINE_NAME + "".join(arm.partition("@")[1:])
            before, after = (scores_on(arms.get(name, []), splits[-1], metric) for name in (compared, arm))
            row.append("" if arm == compared else gain_cell(before, after, metric))
    return markdown_table(rows)


def has_baseline(records: Iterable[RunRecord]) -> bool:
    return any(record["arm"].partition("@")[0] == BASELINE_NAME for record in records)


def score_table(records: Sequence[RunRecord]) -> str:
    """All metrics of each arm on the last split; empty if there is only one metric."""
    split = splits_of(records)[-1]
    metrics = list(dict.fromkeys(name for record in records for name in numbers_on(record, split)))
    if len(metrics) < 2:
        return ""
    rows = [[f"network, on {split}", *(metric.replace("_", " ") for metric in metrics)]]
    for arm, runs in by_arm(records).items():
        rows.append([arm, *(score_cell(scores_on(runs, split, metric), metric) for metric in metrics)])
    return markdown_table(rows)


def score_cell(scores: Sequence[float], metric: str) -> str:
    """Mean ± sample standard deviation; empty without scores."""
    return " ± ".join(format_score(value, metric) for value in mean_and_deviation(scores)[: len(scores)])


def mean_and_deviation(scores: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The mean, NaN without scores, and the sample standard deviation, 0 of one score."""
    if not len(scores):
        return np.nan, 0.0
    return float(np.mean(scores)), float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0


def format_score(value: float | np.floating, metric: str) -> str:
    return f"{value:.4f}" if metric in ERRORS else f"{100 * value:.2f}"


def gain_cell(baseline: Sequence[float], scores: Sequence[float], metric: str) -> str:
    if not (baseline and scores):
        return ""
    before, after = float(np.mean(baseline)), float(np.mean(scores))
    if metric in ERRORS:
        return f"{before - after:+.4f}" + (f" / {(before - after) / before:.1%}" if before > 0 else "")
    return " / ".join(filter(None, (f"{100 * (after - before):+.2f}", error_reduction(before, after))))


def write_results(folder: Path, records: Sequence[RunRecord], ablation: str | None = None) -> str:
    """Writes `results/NAME.json`, the records, and `results/NAME.md`, their tables; returns NAME."""
    kind = "ensemble" if "ensemble" in records[0].get("settings", ()) else None
    name = "_".join(filter(None, (records[0]["task"], ablation, kind)))
    report = results_report(name, records)
    write_json(folder / "results" / f"{name}.json", {"records": list(records)})
    write_lines(folder / "results" / f"{name}.md", [report])
    return name


def results_report(name: str, records: Sequence[RunRecord]) -> str:
    metric = records[0]["metric"]
    unit = "" if metric in ERRORS else ", in percent"
    parts = [
        f"# {name}",
        f"Task `{records[0]['task']}`: {metric}{unit}; mean ± sample standard deviation over the runs, one per seed.",
        summary_table(records),
    ]
    if has_baseline(records):
        parts.append(f"Gain over `{BASELINE_NAME}`: the difference, and the share of its errors that is gone.")
    if scores := score_table(records):
        parts += ["## All scores", scores]
    if weights := mean_layer_weights(records):
        parts += ["## Layer weights", "Softmax-normalized, mean over the runs.", layer_table(weights)]
    if types := type_table(records):
        parts += ["## By type", f"F1 on {splits_of([records[0]])[-1]}, in percent, mean over the runs.", types]
    return "\n\n".join([*parts, "## Runs", run_table(records, metric)])


def type_table(records: Sequence[RunRecord]) -> str:
    """F1 of each type of entity, tag or label on the last split: a row per type, a column per arm."""
    numbers: dict[str, int] = {}
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in records:
        last = record["metrics"][splits_of([record])[-1]]
        for kind, scores in (last.get("per_type") or last.get("per_label") or {}).items():
            numbers[kind] = scores["number"]
            found[kind, record["arm"]].append(scores["f1"])
    arms = list(by_arm(records))
    rows = [["type", "number", *arms]]
    for kind, count in numbers.items():
        means = (format_score(np.mean(found[kind, arm]), "f1") if found[kind, arm] else "" for arm in arms)
        rows.append([kind, f"{count:,}", *means])
    return markdown_table(rows) if numbers else ""


def run_table(records: Sequence[RunRecord], metric: str) -> str:
    """A row per run: its score on each split, and its size and time if they were recorded."""
    splits = splits_of(records)
    optional = {"train_samples": "{:,}", "epochs": "{:.1f}", "seconds": "{:.0f}"}
    rows = [["network", "seed", *splits, *(name.replace("_", " ") for name in optional)]]
    for record in records:
        scores = [record["metrics"].get(split, {}).get(metric) for split in splits]
        cells = ["" if score is None else format_score(score, metric) for score in scores]
        cells += ["" if record.get(name) is None else form.format(record[name]) for name, form in optional.items()]
        rows.append([record["arm"], str(record["seed"]), *cells])
    return markdown_table(rows)


def mean_layer_weights(records: Sequence[RunRecord]) -> dict[str, np.ndarray]:
    """Mean layer weights by place where ELMo enters, by arm, or by both, as needed to tell them apart."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for record in records:
        for place, weights in record.get("layer_weights", {}).items():
            found.setdefault((record["arm"], place), []).append(weights)
    arms, places = ({key[part] for key in found} for part in (0, 1))
    labels = {key: key[1] if len(arms) == 1 else key[0] if len(places) == 1 else ", ".join(key) for key in found}
    return {labels[key]: np.mean(group, axis=0) for key, group in found.items()}


def layer_names(count: int) -> list[str]:
    return ["token layer", *(f"biLSTM {number}" for number in range(1, count))]


def layer_table(weights: dict[str, np.ndarray]) -> str:
    columns = [[f"{weight:.3f}" for weight in column] for column in weights.values()]
    rows = zip(layer_names(len(columns[0])), *columns, strict=True)
    return markdown_table([["layer", *weights], *rows])


def sense_table(senses: dict[str, Any], paper: dict[str, Any] | None = None) -> str:
    """The result of `elmo senses`: a row per layer and baseline, a column per measure and of the paper."""
    measures = {"same sense@1": senses["same_sense"], "disambiguation": senses.get("disambiguation")}
    columns = {
        measure: {name: score for name, score in scores.items() if name not in NO_SCORES}
        for measure, scores in measures.items()
        if scores
    }
    return percent_table("", columns, paper)


def probe_table(found: dict[str, Any], paper: dict[str, Any] | None = None) -> str:
    """The result of `elmo probe`: a row per layer and baseline, a column per split and of the paper."""
    metric, splits = found["metric"], [split for split in SPLITS[1:] if split in found]
    scores = {split: {name: each[metric] for name, each in found[split]["scores"].items()} for split in splits}
    return percent_table(metric, scores, paper)


def percent_table(corner: str, columns: Mapping[str, dict[str, float]], paper: dict[str, Any] | None) -> str:
    """Columns of scores by the name of their row, in percent; the paper's scores are shown as they are."""
    names = dict.fromkeys(name for scores in columns.values() for name in scores)
    rows = [[corner, *columns]]
    for name in names:
        rows.append([name, *(f"{100 * scores[name]:.1f}" if name in scores else "" for scores in columns.values())])
    if paper is not None:
        cells = [f"the paper: {paper['task']}", *(str(paper.get(name, "")) for name in names)]
        rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
    return markdown_table(rows)


def one_line(value: Any, most: int = MOST_ITEMS) -> str:
    """The value on one line. A list shows its first `most` items and the number of the others."""
    if isinstance(value, (list, tuple)):
        more = [f"and {len(value) - most:,} more"] if len(value) > most else []
        return ", ".join([*map(one_line, value[:most]), *more])
    return " ".join(str(value).split())


def escape_markdown(value: Any) -> str:
    """The value as one line of plain text in Markdown, also inside a table."""
    return SPECIAL.sub(r"\\\g<0>", one_line(value))


def link_or_text(value: Any) -> str:
    """The value as a link if it is an address, else as plain text."""
    text = one_line(value)
    return f"<{text}>" if re.fullmatch(r"https?://[^\s<>]+", text) else escape_markdown(text)


def code_span(value: Any) -> str:
    """The value as inline code. The fence is longer than every run of backticks in the value."""
    text = one_line(value)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns. The first row is the header; the first column is left-aligned, the others right."""
    rows = [[escape_markdown(cell) for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * (width - 1) + (":" if place else "-") for place, width in enumerate(widths)]
    form = " | ".join(f"{{:{'>' if place else '<'}{width}}}" for place, width in enumerate(widths))
    return "\n".join(f"| {form.format(*row)} |" for row in [rows[0], rule, *rows[1:]])
