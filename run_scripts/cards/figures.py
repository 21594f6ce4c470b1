"""All figures: training curves, results of experiments, maps of vectors.

The last argument of each function with `@picture` is the path of its picture. It returns whether the picture was
drawn; without matplotlib, or if there is nothing to draw, it logs a warning that names the picture.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from modeling_elmo import ELMoConfig

from ..program.files import JsonObject
from .records import RunRecords, by_arm, mean_and_deviation, mean_layer_weights, scores_on, splits_of
from .tables import ERRORS, layer_names

logger = logging.get_logger(__name__)

LogEntries = Sequence[JsonObject]
Curve = tuple[list[int], list[float]]  # steps and values

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's palette
MARKERS = "os^Dv<>"
ERROR_BARS = {"markersize": 5, "linewidth": 1.5, "capsize": 3}
SLANTED_LABELS = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}  # for labels that would overlap
MOST_NUMBERED_LABELS = 15  # a larger confusion matrix has no numbers in its cells
DIRECTIONS = {"perplexity": "both directions", "forward": "forward", "backward": "backward"}  # keys of an evaluation
MEASURES_OF_CHANGE = {"apd": "average pairwise distance", "prt": "distance of prototypes"}


def picture(draw: Callable[..., Any]) -> Callable[..., bool]:
    """Gives a function that returns a figure, or None for nothing to draw, one more argument: the picture's path."""

    @wraps(draw)
    def write(*given: Any) -> bool:
        *arguments, path = given
        figure = None
        reason = "its records have nothing to draw"
        try:
            figure = draw(*arguments)
        except ImportError:
            reason = 'that needs matplotlib; pip install "modeling-elmo[train]"'
        if figure is None:
            logger.warning(f"{path} is not drawn: {reason}")
            return False
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        return True

    return write


def new_figure(width: float, height: float) -> Any:
    """A figure of this size in inches."""
    from matplotlib.figure import Figure  # saved by Agg; pyplot would choose a backend for the whole process

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


@picture
def draw_curve(trainings: Sequence[JsonObject], config: ELMoConfig):
    """Held-out perplexity and training loss of a biLM's trainings, one after the other, over their steps."""
    log, ends = joined_log(trainings)
    *starts, _ = [0, *ends]
    published_step = trainings[-1]["published_step"] + starts[-1]
    perplexities = curves_of(log, DIRECTIONS)
    losses = curves_of(log, loss_names(config))
    panels = {}
    if perplexities:
        panels["held-out perplexity (log scale)"] = perplexities
    if losses:
        panels["training loss\n(nats per prediction)"] = losses
    if not panels:
        return None
    figure = new_figure(8, 0.5 + 2.75 * len(panels))
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for label, (steps, values) in curves.items():
            axis.plot(steps, values, ".-", label=label, linewidth=1, markersize=4)
        mark_step(axis, published_step, "--", "this model")
        for start in starts[1:]:
            mark_step(axis, start, ":", "trained further")
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
    if perplexities:
        unigrams = [entry["unigram"] for entry in log if entry.get("unigram")]
        for unigram in unigrams[-1:]:
            axes[0].axhline(unigram, color="0.3", linestyle="-.", linewidth=1, label=f"unigram: {unigram:,.2f}")
        axes[0].set_yscale("log")
        plain_ticks(axes[0])
    for axis in axes:
        axis.legend(fontsize=8)
    axes[-1].set_xlabel("optimizer steps")
    axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    return figure


def plain_ticks(axis):
    """Whole numbers instead of powers on a logarithmic scale, and as many as have room."""
    lowest, highest = axis.get_ylim()
    digits = "123456789"
    if highest > 3 * lowest:
        digits = "125" if highest > 30 * lowest else "1234568"

    def label(value: float, _: int) -> str:
        text = f"{value:,.6g}"
        return text if text[0] in digits else ""

    axis.yaxis.set_major_formatter(label)
    axis.yaxis.set_minor_formatter(label)


def joined_log(trainings: Sequence[JsonObject]) -> tuple[LogEntries, list[int]]:
    """The entries of all trainings, whose steps go on, and the last step of each training."""
    log = []
    ends = []
    step = 0
    for training in trainings:
        start = step
        for entry in training["log"]:
            if entry["step"] or not start:  # step 0 of a later training is the end of the one before
                step = start + entry["step"]
                log.append({**entry, "step": step})
        ends.append(step)
    return log, ends


def mark_step(axis, step: int, line: str, event: str):
    axis.axvline(step, color="0.5", linestyle=line, linewidth=1, label=f"{event}: step {step:,}")


def loss_names(config: ELMoConfig) -> dict[str, str]:
    """The softmaxes of the losses in the log."""
    softmax = "adaptive" if config.softmax_type == "adaptive" else "full"
    return {
        "loss": f"{softmax} softmax loss",
        "sampled_loss": f"sampled softmax loss, {config.num_sampled:,} candidates",
    }


def curves_of(log: LogEntries, labels: Mapping[str, str]) -> dict[str, Curve]:
    """The curves of some keys of the log. A key without finite values has none."""
    curves = {}
    for name, label in labels.items():
        entries = [entry for entry in log if math.isfinite(entry.get(name, math.nan))]
        if entries:
            steps = [entry["step"] for entry in entries]
            curves[label] = (steps, [entry[name] for entry in entries])
    return curves


@picture
def draw_layer_weights(records: RunRecords):
    """The paper's Figure 2: a column for each place where ELMo enters, a shade for the weight of each layer."""
    weights = mean_layer_weights(records)
    if not weights:
        return None
    matrix = np.column_stack([*weights.values()])
    names = layer_names(len(matrix))
    figure = new_figure(2.6 + 0.9 * len(weights), 1.5 + 0.6 * len(names))
    axis = draw_shares(figure, matrix, names, [*weights], "weight of the layer")
    write_cells(axis, matrix, matrix, ".2f")
    axis.invert_yaxis()  # the first layer at the bottom, as in the network
    return figure


@picture
def draw_confusion(matrix: Sequence[Sequence[int]], labels: Sequence[str]):
    """Counts of texts by gold label (row) and predicted label (column); a shade is the share of the row."""
    counts = np.array(matrix)
    has_numbers = len(labels) <= MOST_NUMBERED_LABELS
    size = 0.6 * len(labels)
    if not has_numbers:
        size = np.clip(0.2 * len(labels), 9, 30)
    figure = new_figure(size + 3.5, size + 2)
    texts = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(texts, 1)
    axis = draw_shares(figure, shares, labels, labels, "share of the gold label")
    if has_numbers:
        write_cells(axis, shares, counts, ",")
    axis.set(xlabel="predicted", ylabel="gold")
    return figure


def draw_shares(figure, shares: np.ndarray, rows: Sequence[str], columns: Sequence[str], title: str) -> Any:
    """Draws a matrix of shares as shades, and returns its axis."""
    axis = figure.subplots()
    image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    figure.colorbar(image, label=title)
    axis.set_xticks(range(len(columns)), map(plain, columns), **SLANTED_LABELS)
    axis.set_yticks(range(len(rows)), map(plain, rows))
    return axis


def write_cells(axis, shares: np.ndarray, numbers: np.ndarray, form: str):
    """Writes a number in each cell of a matrix of shares."""
    for place, number in np.ndenumerate(numbers):
        color = "white" if shares[place] > 0.6 else "black"
        axis.text(*place[::-1], format(number, form), ha="center", va="center", color=color, fontsize=9)


@picture
def draw_ablation(records: RunRecords):
    """The mean of each arm on each split, with its standard deviation."""
    arms = by_arm(records)
    splits = splits_of(records)
    figure = new_figure(7, 1.3 + 0.45 * len(arms))
    axis = figure.subplots()
    rows = np.arange(len(arms))
    middle = (len(splits) - 1) / 2
    for index, split in enumerate(splits):
        means, deviations = shown_scores(arms.values(), split)
        heights = rows + 0.2 * (index - middle)
        axis.errorbar(means, heights, xerr=deviations, label=split, linestyle="", **point_style(index), **ERROR_BARS)
    axis.set_yticks(rows, [*arms])
    axis.set_ylim(len(arms) - 0.5, -0.5)  # the first arm at the top
    style_scores(axis, "x", records[0]["metric"], splits)
    return figure


@picture
def draw_data_curve(records: RunRecords):
    """The paper's Figure 1: scores on the last split over the share of the training data, a line for each family.

    The name of an arm is `family@share`; an arm without a share saw all data.
    """
    figure = new_figure(6, 4)
    axis = figure.subplots()
    axis.set_xscale("log")
    *_, split = splits_of(records)
    families = defaultdict(list)
    labels = {}
    for arm, runs in by_arm(records).items():
        family, _, ending = arm.partition("@")
        share = float(ending or 1)
        families[family].append((share, runs))
        size = runs[0].get("train_samples")
        labels[share] = f"{100 * share:g} %"
        if size:
            labels[share] += f" ({size:,})"
    for index, (family, arms) in enumerate(families.items()):
        arms.sort(key=itemgetter(0))
        shares, runs_of_shares = zip(*arms, strict=True)
        means, deviations = shown_scores(runs_of_shares, split)
        axis.errorbar(shares, means, yerr=deviations, label=family, **point_style(index), **ERROR_BARS)
    axis.set_xticks([*labels], labels.values(), **SLANTED_LABELS)
    axis.minorticks_off()
    axis.set_xlabel("share of the training data (examples)")
    style_scores(axis, "y", records[0]["metric"], [split])
    return figure


def shown_scores(arms: Iterable[RunRecords], split: str) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and deviation of the scores of each arm on a split, in percent except for errors."""
    shown = []
    for runs in arms:
        metric = runs[0]["metric"]
        scores = np.array(scores_on(runs, split, metric))
        if metric not in ERRORS:
            scores *= 100
        shown.append(mean_and_deviation(scores))
    means, deviations = zip(*shown, strict=True)
    return means, deviations


def point_style(index: int) -> dict[str, Any]:
    """A pair of color and marker; the first 49 differ."""
    shift, color = divmod(index, len(COLORS))
    marker = (index + shift) % len(MARKERS)
    return {"color": COLORS[color], "marker": MARKERS[marker]}


def style_scores(axis, along: str, metric: str, splits: Sequence[str]):
    """Labels the axis of the scores (`along`: x or y), and adds a legend if there are several lines."""
    label = metric.replace("_", " ")
    if len(splits) == 1:
        label += f" on {splits[0]}"
    if metric not in ERRORS:
        label += " (%)"
    axis.set(**{f"{along}label": label})
    axis.grid(axis=along, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    if len(axis.containers) > 1:
        axis.figure.legend(loc="outside upper center", ncols=4, frameon=False)


@picture
def draw_map(vectors: np.ndarray, groups: Mapping[str, Sequence[int]]):
    """All vectors in the plane of their first two principal components, with groups in color.

    Args:
        vectors: Shape: (vectors, dimension).
        groups: rows of `vectors` by label. A label that the font cannot draw becomes a number.
    """
    figure = new_figure(8, 5 + 0.2 * len(groups))
    axis = figure.subplots()
    draw_plane(axis, vectors, groups)
    figure.legend(loc="outside lower center", fontsize=8)
    return figure


def draw_plane(axis, vectors: np.ndarray, groups: Mapping[str, Sequence[int]], size: int = 36):
    points, (first, second) = principal_plane(vectors)
    axis.scatter(*points.T, s=10, color="0.8", label="_")
    for index, (label, rows) in enumerate(groups.items()):
        label = plain(label) if can_draw(label) else f"query {index + 1}"
        group = points[list(rows)]
        axis.scatter(*group.T, s=size, label=label, **point_style(index))
    axis.set_xlabel(f"first principal component ({first:.0%} of the variance)")
    axis.set_ylabel(f"second ({second:.0%})")


@picture
def draw_change(pairs: Sequence[Mapping[str, Any]], is_series: bool, vectors: Mapping[str, np.ndarray]):
    """Distances between groups of uses above the range of random splits, and the map of all uses, colored by group.

    Args:
        pairs: pairs of groups with the measures of `MEASURES_OF_CHANGE`, as from `compare_groups`.
        is_series: whether the pairs follow each other, so that a line joins them.
        vectors: of each group. Shape: (uses, dimension).
    """
    figure = new_figure(13, 6)
    panels = figure.subplot_mosaic([["apd", "map"], ["prt", "map"]], width_ratios=[1, 1.2])
    for name, title in MEASURES_OF_CHANGE.items():
        distances = [pair[name] for pair in pairs]
        draw_distances(panels[name], distances, title, is_series)
    places = range(len(pairs))
    labels = []
    for pair in pairs:
        groups = map(plain, pair["groups"])
        labels.append("\n".join(groups))
    panels["apd"].set_xticks(places, [""] * len(pairs))
    panels["prt"].set_xticks(places, labels, **SLANTED_LABELS, fontsize=8)
    panels["apd"].legend(fontsize=8)
    rows = {}
    end = 0
    for group, uses in vectors.items():
        start = end
        end += len(uses)
        rows[group] = range(start, end)
    draw_plane(panels["map"], np.concatenate([*vectors.values()]), rows, size=14)
    handles, labels = panels["map"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    return figure


def draw_distances(axis, distances: Sequence[Mapping[str, float]], title: str, is_series: bool):
    """Draws the distances of pairs of groups above bars, the range of random splits."""
    values = [(distance["distance"], distance["random_5"], distance["random_95"]) for distance in distances]
    observed, low, high = np.transpose(values)
    places = range(len(distances))
    axis.bar(places, high - low, bottom=low, width=0.6, color="0.8", label="90 % of random splits")
    line = "-" if is_series else "none"
    axis.plot(observed, label="observed", linestyle=line, markersize=5, **point_style(0))
    axis.set(ylabel=title, xlim=(-0.6, len(distances) - 0.4))
    axis.use_sticky_edges = False  # else no space below the bars
    axis.grid(axis="y", alpha=0.3)


def principal_plane(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors in the plane of their first two principal components, and the shares of these in the variance.

    Shape: `(vectors, dimension)` to `(vectors, 2)` and `(2,)`; 1 instead of 2 for a single vector.
    """
    centered = vectors - vectors.mean(0)
    _, sizes, components = np.linalg.svd(centered, full_matrices=False)
    variances = sizes**2
    total = max(variances.sum(), 1e-12)
    return centered @ components[:2].T, variances[:2] / total


def plain(text: str) -> str:
    """The text for matplotlib, which would read mathematics between dollar signs."""
    return text.replace("$", r"\$")


def can_draw(text: str) -> bool:
    """Whether matplotlib's font has these letters; it has no Hangul, for example."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    return all(font.get_char_index(ord(letter)) for letter in text)
