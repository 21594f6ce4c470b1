"""Tables in Markdown: summaries of runs by arm, as in the paper's Table 1, and results of other programs."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .records import (
    BASELINE_NAME,
    SPLITS,
    RunRecord,
    by_arm,
    has_baseline,
    mean_and_deviation,
    mean_layer_weights,
    numbers_on,
    scores_on,
    splits_of,
)

ERRORS = ("mse", "loss")  # lower is better; shown as they are, not in percent
MOST_ITEMS = 10  # of a list; a corpus may have hundreds of files
SPECIAL = re.compile(r"[\\`*\[\]<>|~$&]|_(?![^\W_])|(?<![^\W_])_")  # an underscore inside a word is plain text
NO_SCORES = ("lemmas", "instances", "unseen_lemmas")  # in the scores of `elmo senses`


def error_reduction(baseline: float, value: float) -> str:
    """The share of the baseline's errors that is gone, the relative increase of the paper's Table 1; empty without."""
    if not (0 <= baseline < 1 and 0 <= value <= 1):
        return ""
    return f"{((1 - baseline) - (1 - value)) / (1 - baseline):.1%}"


def summary_table(records: Sequence[RunRecord]) -> str:
    """Mean ± standard deviation of each arm on each split, in percent, and the gain over the baseline on the last.

    An arm with a share of the data is compared with the baseline with the same share.
    """
    arms = by_arm(records)
    splits = splits_of(records)
    metric = records[0]["metric"]
    header = ["network", "runs", *splits]
    if has_baseline(records):
        header.append(f"gain on {splits[-1]} (points / share of errors)")
    lines = [header]
    for arm, runs in arms.items():
        line = [arm, str(len(runs)), *(score_cell(scores_on(runs, split, metric), metric) for split in splits)]
        if has_baseline(records):
            baseline = BASELINE_NAME if BASELINE_NAME in arms else BASELINE_NAME + "".join(arm.partition("@")[1:])
            before = scores_on(arms.get(baseline, []), splits[-1], metric)
            after = scores_on(runs, splits[-1], metric)
            line.append("" if arm == baseline else gain_cell(before, after, metric))
        lines.append(line)
    return markdown_table(lines)


def score_table(records: Sequence[RunRecord]) -> str:
    """All metrics of each arm on the last split; empty if there is only one metric."""
    split = splits_of(records)[-1]
    metrics = list(dict.fromkeys(name for record in records for name in numbers_on(record, split)))
    if len(metrics) < 2:
        return ""
    lines = [[f"network, on {split}", *(metric.replace("_", " ") for metric in metrics)]]
    for arm, runs in by_arm(records).items():
        lines.append([arm, *(score_cell(scores_on(runs, split, metric), metric) for metric in metrics)])
    return markdown_table(lines)


def score_cell(scores: Sequence[float], metric: str) -> str:
    """Mean ± sample standard deviation; empty without scores."""
    if not scores:
        return ""
    mean, deviation = mean_and_deviation(scores)
    cell = format_score(mean, metric)
    return f"{cell} ± {format_score(deviation, metric)}" if len(scores) > 1 else cell


def format_score(value: float | np.floating, metric: str) -> str:
    return f"{value:.4f}" if metric in ERRORS else f"{100 * value:.2f}"


def gain_cell(baseline: Sequence[float], scores: Sequence[float], metric: str) -> str:
    if not (baseline and scores):
        return ""
    before = float(np.mean(baseline))
    after = float(np.mean(scores))
    if metric not in ERRORS:
        gain, share = f"{100 * (after - before):+.2f}", error_reduction(before, after)
    else:
        gain, share = f"{before - after:+.4f}", f"{(before - after) / before:.1%}" if before > 0 else ""
    return f"{gain} / {share}" if share else gain


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
    counts: dict[str, int] = {}
    f1_scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in records:
        metrics = record["metrics"][splits_of([record])[-1]]
        for kind, scores in (metrics.get("per_type") or metrics.get("per_label") or {}).items():
            counts[kind] = scores["number"]
            f1_scores[kind, record["arm"]].append(scores["f1"])
    if not counts:
        return ""
    arms = list(by_arm(records))
    lines = [["type", "number", *arms]]
    for kind, count in counts.items():
        groups = [f1_scores[kind, arm] for arm in arms]
        means = [format_score(np.mean(group), "f1") if group else "" for group in groups]
        lines.append([kind, f"{count:,}", *means])
    return markdown_table(lines)


def run_table(records: Sequence[RunRecord], metric: str) -> str:
    """A row per run: its score on each split, and its size and time if they were recorded."""
    splits = splits_of(records)
    optional = {"train_samples": "{:,}", "epochs": "{:.1f}", "seconds": "{:.0f}"}
    lines = [["network", "seed", *splits, *(name.replace("_", " ") for name in optional)]]
    for record in records:
        scores = [record["metrics"].get(split, {}).get(metric) for split in splits]
        cells = ["" if score is None else format_score(score, metric) for score in scores]
        cells += ["" if record.get(name) is None else form.format(record[name]) for name, form in optional.items()]
        lines.append([record["arm"], str(record["seed"]), *cells])
    return markdown_table(lines)


def layer_names(count: int) -> list[str]:
    return ["token layer", *(f"biLSTM {number}" for number in range(1, count))]


def layer_table(weights: dict[str, np.ndarray]) -> str:
    layers = np.transpose(list(weights.values()))
    lines = [["layer", *weights]]
    for name, layer in zip(layer_names(len(layers)), layers, strict=True):
        lines.append([name, *(f"{weight:.3f}" for weight in layer)])
    return markdown_table(lines)


def sense_table(senses: dict[str, Any], paper: dict[str, Any] | None = None) -> str:
    """The result of `elmo senses`: a row per layer and baseline, a column per measure and of the paper."""
    measures = {"same sense@1": senses["same_sense"], "disambiguation": senses.get("disambiguation")}
    columns = {
        measure: {name: score for name, score in scores.items() if name not in NO_SCORES}
        for measure, scores in measures.items()
        if scores
    }
    return percent_table("", columns, paper)


def probe_table(result: dict[str, Any], paper: dict[str, Any] | None = None) -> str:
    """The result of `elmo probe`: a row per layer and baseline, a column per split and of the paper."""
    metric = result["metric"]
    columns = {}
    for split in SPLITS[1:]:
        if split in result:
            columns[split] = {name: scores[metric] for name, scores in result[split]["scores"].items()}
    return percent_table(metric, columns, paper)


def percent_table(corner: str, columns: Mapping[str, dict[str, float]], paper: dict[str, Any] | None) -> str:
    """Columns of scores by the name of their row, in percent; the paper's scores are shown as they are."""
    header = [corner, *columns]
    if paper is not None:
        header.append(f"the paper: {paper['task']}")
    lines = [header]
    for name in dict.fromkeys(name for scores in columns.values() for name in scores):
        line = [name, *(f"{100 * scores[name]:.1f}" if name in scores else "" for scores in columns.values())]
        if paper is not None:
            line.append(str(paper.get(name, "")))
        lines.append(line)
    return markdown_table(lines)


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
    header, *body = [[escape_markdown(cell) for cell in row] for row in rows]
    first, *others = [max(3, *map(len, column)) for column in zip(header, *body, strict=True)]
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in others)]
    form = " | ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return "\n".join(f"| {form.format(*cells)} |" for cells in [header, rule, *body])
