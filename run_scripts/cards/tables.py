"""Tables in Markdown: summaries of runs by arm, as in the paper's Table 1, and results of other programs."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..program.files import JsonObject
from .records import (
    BASELINE_NAME,
    SPLITS,
    RunRecords,
    by_arm,
    has_baseline,
    last_metrics,
    mean_and_deviation,
    mean_layer_weights,
    metrics_on,
    plain_numbers,
    scores_on,
    splits_of,
)

LayerScores = dict[str, float]  # by layer or baseline

ERRORS = ("mse", "loss")  # lower is better; shown as they are, not in percent
MOST_CLASSES = 100  # in a table
MOST_ITEMS = 10  # of a list; a corpus may have hundreds of files
SPECIAL = re.compile(r"[\\`*\[\]<>|~$&]|_(?![^\W_])|(?<![^\W_])_")  # an underscore inside a word is plain text
NO_SCORES = ("lemmas", "instances", "unseen_lemmas")  # in the scores of `elmo senses`
OPTIONAL_COLUMNS = {"train_samples": ",", "epochs": ".1f", "seconds": ".0f"}  # of runs, with their formats


def error_reduction(baseline: float, value: float) -> str:
    """The share of the baseline's errors that is gone, the relative increase of the paper's Table 1; empty without."""
    if not (0 <= baseline < 1 and 0 <= value <= 1):
        return ""
    return f"{((1 - baseline) - (1 - value)) / (1 - baseline):.1%}"


def summary_table(records: RunRecords) -> str:
    """Mean ± standard deviation of each arm on each split, in percent, and the gain over the baseline on the last.

    An arm with a share of the data is compared with the baseline with the same share.
    """
    arms = by_arm(records)
    splits = splits_of(records)
    last = splits[-1]
    metric = records[0]["metric"]
    shows_gain = has_baseline(records)
    rows = [["network", "runs", *splits]]
    if shows_gain:
        rows[0].append(f"gain on {last} (points / share of errors)")
    for arm, runs in arms.items():
        row = [arm, str(len(runs))]
        row += [score_cell(scores_on(runs, split, metric), metric) for split in splits]
        if shows_gain:
            baseline = baseline_of(arm, arms)
            before = scores_on(arms.get(baseline, []), last, metric)
            after = scores_on(runs, last, metric)
            row.append(gain_cell(before, after, metric) if arm != baseline else "")
        rows.append(row)
    return markdown_table(rows)


def baseline_of(arm: str, arms: Mapping[str, Any]) -> str:
    if BASELINE_NAME in arms:
        return BASELINE_NAME
    _, at, share = arm.partition("@")
    return BASELINE_NAME + at + share


def score_table(records: RunRecords) -> str:
    """All metrics of each arm on the last split; empty if there is only one metric."""
    *_, split = splits_of(records)
    metrics = metrics_on(records, [split])
    if len(metrics) < 2:
        return ""
    columns = map(spaced, metrics)
    rows = [[f"network, on {split}", *columns]]
    for arm, runs in by_arm(records).items():
        cells = [score_cell(scores_on(runs, split, metric), metric) for metric in metrics]
        rows.append([arm, *cells])
    return markdown_table(rows)


def spaced(name: str) -> str:
    return name.replace("_", " ")


def score_cell(scores: Iterable[float], metric: str) -> str:
    """Mean ± sample standard deviation; empty without scores."""
    scores = list(scores)
    if not scores:
        return ""
    mean, deviation = mean_and_deviation(scores)
    cell = format_score(mean, metric)
    if len(scores) > 1:
        cell += f" ± {format_score(deviation, metric)}"
    return cell


def format_score(value: float | np.floating, metric: str) -> str:
    return f"{value:.4f}" if metric in ERRORS else f"{100 * value:.2f}"


def gain_cell(baseline: Sequence[float], scores: Sequence[float], metric: str) -> str:
    if not (baseline and scores):
        return ""
    before = float(np.mean(baseline))
    after = float(np.mean(scores))
    if metric not in ERRORS:
        gain = f"{100 * (after - before):+.2f}"
        share = error_reduction(before, after)
    else:
        gain = f"{before - after:+.4f}"
        share = f"{(before - after) / before:.1%}" if before > 0 else ""
    return f"{gain} / {share}" if share else gain


def results_report(name: str, records: RunRecords) -> str:
    first = records[0]
    metric = first["metric"]
    unit = "" if metric in ERRORS else ", in percent"
    parts = [
        f"# {name}",
        f"Task `{first['task']}`: {metric}{unit}; mean ± sample standard deviation over the runs, one per seed.",
        summary_table(records),
    ]
    if has_baseline(records):
        parts.append(f"Gain over `{BASELINE_NAME}`: the difference, and the share of its errors that is gone.")
    scores = score_table(records)
    if scores:
        parts += ["## All scores", scores]
    weights = mean_layer_weights(records)
    if weights:
        parts += ["## Layer weights", "Softmax-normalized, mean over the runs.", layer_table(weights)]
    types = type_table(records)
    if types:
        *_, split = splits_of([first])
        parts += ["## By type", f"F1 on {split}, in percent, mean over the runs.", types]
    parts += ["## Runs", run_table(records, metric)]
    return "\n\n".join(parts)


def type_table(records: RunRecords) -> str:
    """F1 of each type of entity, tag or label on the last split: a row per type, a column per arm."""
    counts = {}
    f1_scores = defaultdict(list)
    for record in records:
        metrics = last_metrics(record)
        types = metrics.get("per_type") or metrics.get("per_label") or {}
        for name, scores in types.items():
            counts[name] = scores["number"]
            f1_scores[name, record["arm"]].append(scores["f1"])
    if not counts:
        return ""
    arms = list(by_arm(records))
    rows = [["type", "number", *arms]]
    for name, count in counts.items():
        row = [name, f"{count:,}"]
        for arm in arms:
            scores = f1_scores[name, arm]
            row.append(format_score(np.mean(scores), "f1") if scores else "")
        rows.append(row)
    return markdown_table(rows)


def class_rates(metrics: JsonObject) -> dict[str, JsonObject]:
    """The rates of each class in the scores of a task: types, tags, labels, roles, question words; empty if none.

    Coreference has no classes, but rates of each of its metrics.
    """
    for way in ("with_singletons", "without_singletons"):
        if way in metrics and f"f1_{way}" not in metrics:  # the way that `f1` counts
            return coreference_rates(metrics[way])
    return metrics.get("per_type") or metrics.get("per_label") or {}


def coreference_rates(scores: JsonObject) -> dict[str, JsonObject]:
    rates = {}
    for name in ("muc", "b_cubed", "ceaf", "mention"):
        rates[name] = {rate: scores[f"{name}_{rate}"] for rate in ("precision", "recall", "f1")}
    return rates


def average_rates(metrics: JsonObject) -> dict[str, JsonObject]:
    """Averages over the classes: micro, over all that was found; macro, the mean; weighted by the gold number.

    As in seqeval and scikit-learn, macro and weighted leave out a label that is neither gold nor predicted, unless a
    text may have several labels. Answers to questions have no precision, and only the weighted average.
    """
    classes = class_rates(metrics)
    confusion = np.array(metrics.get("confusion", ()))
    if confusion.size:
        occurs = confusion.sum(0) + confusion.sum(1) > 0
        classes = {name: classes[name] for name, does in zip(classes, occurs, strict=True) if does}
    if not any("number" in rates for rates in classes.values()):
        return {}
    numbers = [rates["number"] for rates in classes.values()]
    names = [name for name in next(iter(classes.values())) if name != "number"]
    averages: dict[str, JsonObject] = {"micro": {}, "macro": {}, "weighted": {}}
    for name in names:
        values = [rates[name] for rates in classes.values()]
        averages["weighted"][name] = float(np.average(values, weights=numbers)) if any(numbers) else 0.0
        if "precision" in names:
            averages["macro"][name] = float(np.mean(values))
            micro = metrics.get(f"micro_{name}", metrics.get(name))
            averages["micro"] |= {} if micro is None else {name: micro}
    return {name: {**rates, "number": sum(numbers)} for name, rates in averages.items() if rates}


def class_table(metrics: JsonObject) -> str:
    """Rates and gold number, the support, of each class and their averages; empty if the task has no classes.

    Of many classes, the most frequent ones are shown.
    """
    classes = class_rates(metrics)
    if not classes:
        return ""
    shown = sorted(classes, key=lambda name: -classes[name].get("number", 0))[:MOST_CLASSES]
    rows = {name: rates for name, rates in classes.items() if name in shown}
    for name, rates in average_rates(metrics).items():
        rows[f"{name} average"] = rates
    columns = list(next(iter(rows.values())))
    table = [["class", *(spaced(name).replace("number", "support") for name in columns)]]
    for row, rates in rows.items():
        table.append([row, *(rate_cell(rates, name) for name in columns)])
    text = markdown_table(table)
    left_out = len(classes) - len(shown)
    return f"{text}\n\n{left_out:,} rarer classes are not shown." if left_out else text


def rate_cell(rates: JsonObject, name: str) -> str:
    if name not in rates:
        return ""
    return f"{rates[name]:,}" if name == "number" else format_score(rates[name], name)


def file_table(evaluation: JsonObject) -> str:
    """The scores of `elmo evaluate`: a row per file, and one for all of them if there are several."""
    files = evaluation["files"]
    samples = {file: of_file["samples"] for file, of_file in files.items()}
    scores = {file: plain_numbers(of_file["metrics"]) for file, of_file in files.items()}
    if len(files) > 1:
        samples["all files"] = sum(samples.values())
        scores["all files"] = plain_numbers(evaluation["metrics"])
    metrics = dict.fromkeys([evaluation["metric"], *chain.from_iterable(scores.values())])
    rows = [["file", "samples", *map(spaced, metrics)]]
    for file, of_file in scores.items():
        cells = [format_score(of_file[metric], metric) if metric in of_file else "" for metric in metrics]
        rows.append([file, f"{samples[file]:,}", *cells])
    return markdown_table(rows)


def error_lines(errors: JsonObject, most: int) -> list[str]:
    """The most frequent errors of `elmo evaluate`: number, error, and its most frequent texts."""
    wrong = [row for row in errors["confusions"] if row["kind"] != "right"]
    lines = []
    for row in wrong[:most]:
        texts = [f"{text} ({number:,})" if number > 1 else text for text, number in row["texts"]]
        shown = f": {', '.join(texts)}" if texts else ""
        lines.append(f"{row['number']:8,}  {error_name(row)}{shown}")
    return lines


def error_name(row: JsonObject) -> str:
    """An error in words: missed person, invented person, person as location, person with other words."""
    gold, predicted = row["gold"], row["predicted"]
    if gold is None or predicted is None:
        return f"{row['kind']} {predicted if gold is None else gold}"
    name = gold if gold == predicted else f"{gold} as {predicted}"
    return f"{name} with other words" if row["kind"].endswith("words") else name


def finding(metrics: JsonObject, metric: str, place: str) -> str:
    """The score of a task in words, with the score of the most frequent label, and the classes that are never right."""
    sentence = f"On {place}, {spaced(metric)} is {format_score(metrics[metric], metric)}"
    classes = {name: rates for name, rates in class_rates(metrics).items() if rates.get("number")}
    if metric == "accuracy" and classes:
        name, rates = max(classes.items(), key=lambda row: row[1]["number"])
        share = rates["number"] / sum(row["number"] for row in classes.values())
        sentence += f"; always answering {name!r} would give {format_score(share, metric)}"
    never = [name for name, rates in classes.items() if not rates["f1"]]
    if never:
        verb = "is" if len(never) == 1 else "are"
        sentence += f". {len(never):,} of {len(classes):,} classes {verb} never right: {one_line(never)}"
    return f"{sentence}."


def comparison(records: RunRecords) -> str:
    """The mean score of the best arm on the last split, compared with its baseline; or of two arms."""
    *_, split = splits_of(records)
    metric = records[0]["metric"]
    arms = {arm: scores_on(runs, split, metric) for arm, runs in by_arm(records).items()}
    sign = -1 if metric in ERRORS else 1
    best, *others = sorted(filter(arms.get, arms), key=lambda arm: -sign * np.mean(arms[arm]))
    other = baseline_of(best, arms)
    if other not in others:
        other = others[0] if others else best
    sentence = f"On {split}, {spaced(metric)} is {score_cell(arms[best], metric)} with {best}"
    if other != best:
        sentence += f", and {score_cell(arms[other], metric)} with {other}"
    few = ". That is one seed: pass --seeds 5 to see how much scores vary" if len(arms[best]) == 1 else ""
    return f"{sentence}{few}."


def run_table(records: RunRecords, metric: str) -> str:
    """A row per run: its score on each split, and its size and time if they were recorded."""
    splits = splits_of(records)
    columns = map(spaced, OPTIONAL_COLUMNS)
    rows = [["network", "seed", *splits, *columns]]
    for record in records:
        row = [record["arm"], str(record["seed"])]
        row += [score_cell(scores_on([record], split, metric), metric) for split in splits]
        for name, form in OPTIONAL_COLUMNS.items():
            row.append(format(record[name], form) if name in record else "")
        rows.append(row)
    return markdown_table(rows)


def layer_names(count: int) -> list[str]:
    lstms = [f"biLSTM {number}" for number in range(1, count)]
    return ["token layer", *lstms]


def layer_table(weights: dict[str, np.ndarray]) -> str:
    layers = np.transpose(list(weights.values()))
    names = layer_names(len(layers))
    rows = [["layer", *weights]]
    for name, layer in zip(names, layers, strict=True):
        cells = [f"{weight:.3f}" for weight in layer]
        rows.append([name, *cells])
    return markdown_table(rows)


def object_in(result: JsonObject, key: str) -> JsonObject:
    """The object under a key; empty if something else or nothing is there, as in a result of another program."""
    value = result.get(key)
    return value if isinstance(value, dict) else {}


def sense_scores(result: JsonObject) -> dict[str, LayerScores]:
    """The scores in a result of `elmo senses`: by measure, then by layer and baseline."""
    measures: dict[str, LayerScores] = {}
    for measure in ("same_sense", "disambiguation"):
        if scores := plain_numbers(object_in(result, measure)):
            measures[measure] = {place: score for place, score in scores.items() if place not in NO_SCORES}
    return measures


def probe_scores(result: JsonObject) -> dict[str, LayerScores]:
    """The scores in a result of `elmo probe`: by split, then by layer and baseline."""
    splits = {}
    for split in SPLITS:
        if scores := object_in(object_in(result, split), "scores"):
            splits[split] = {place: metrics[result["metric"]] for place, metrics in scores.items()}
    return splits


def sense_table(result: JsonObject, paper: JsonObject | None = None) -> str:
    """The result of `elmo senses`: a row per layer and baseline, a column per measure and of the paper."""
    scores = sense_scores(result)
    return percent_table("", {"same sense@1": scores.pop("same_sense"), **scores}, paper)


def probe_table(result: JsonObject, paper: JsonObject | None = None) -> str:
    """The result of `elmo probe`: a row per layer and baseline, a column per split and of the paper."""
    return percent_table(result["metric"], probe_scores(result), paper)


def percent_table(corner: str, columns: Mapping[str, LayerScores], paper: JsonObject | None) -> str:
    """Columns of scores by the name of their row, in percent; the paper's scores are shown as they are."""
    header = [corner, *columns]
    if paper is not None:
        header.append(f"the paper: {paper['task']}")
    names = dict.fromkeys(chain.from_iterable(columns.values()))
    rows = []
    for name in names:
        row = [name]
        for scores in columns.values():
            row.append(f"{100 * scores[name]:.1f}" if name in scores else "")
        if paper is not None:
            row.append(str(paper.get(name, "")))
        rows.append(row)
    return markdown_table([header, *rows])


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
    is_link = re.fullmatch(r"https?://[^\s<>]+", text)
    return f"<{text}>" if is_link else escape_markdown(text)


def code_span(value: Any) -> str:
    """The value as inline code. The fence is longer than every run of backticks in the value."""
    text = one_line(value)
    fence = "`"
    while fence in text:
        fence += "`"
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns. The first row is the header; the first column is left-aligned, the others right."""
    table = [list(map(escape_markdown, row)) for row in rows]
    widths = []
    for column in zip(*table, strict=True):
        lengths = map(len, column)
        widths.append(max(3, *lengths))
    rule = [(width - 1) * "-" + ":" for width in widths]
    rule[0] = widths[0] * "-"
    table.insert(1, rule)
    lines = []
    for first, *others in table:
        cells = [first.ljust(widths[0])]
        cells += map(str.rjust, others, widths[1:])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
