"""All figures: training curves, results of experiments, maps of vectors.

The last argument of each function with `@picture` is the path of its picture. It returns whether the picture was
drawn; without matplotlib, or if there is nothing to draw, it logs a warning that names the picture.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from modeling_elmo import ELMoConfig

from .records import RunRecord, by_arm, mean_and_deviation, mean_layer_weights, scores_on, splits_of
from .tables import ERRORS, layer_names

logger = logging.get_logger(__name__)

LogEntries = Sequence[dict[str, Any]]
Curve = list[tuple[int, float]]  # steps and values

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
        try:
            figure, reason = draw(*arguments), "its records have nothing to draw"
        except ImportError:
            figure, reason = None, 'that needs matplotlib; pip install "modeling-elmo[train]"'
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
def draw_curve(trainings: Sequence[dict[str, Any]], config: ELMoConfig):
    """Held-out perplexity and training loss of a biLM's trainings, one after the other, over their steps."""
    log, ends = joined_log(trainings)
    before = ends[-2] if len(ends) > 1 else 0
    published_step = trainings[-1]["published_step"] + before
    losses = {loss_kind(name, config): curve_of(log, name) for name in ("loss", "sampled_loss")}
    perplexities = {label: curve_of(log, name) for name, label in DIRECTIONS.items()}
    panels = {}
    if any(perplexities.values()):
        panels["held-out perplexity (log scale)"] = perplexities
    if any(losses.values()):
        panels["training loss\n(nats per prediction)"] = losses
    if not panels:
        return None
    figure = new_figure(8, 0.5 + 2.75 * len(panels))
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for label, curve in curves.items():
            if curve:
                steps, values = zip(*curve, strict=True)
                axis.plot(steps, values, ".-", label=label, linewidth=1, markersize=4)
        mark_step(axis, published_step, "--", "published")
        for end in ends[:-1]:
            mark_step(axis, end, ":", "trained further")
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    if any(perplexities.values()):
        axes[0].set_yscale("log")
        axes[0].yaxis.set_major_formatter("{x:,.6g}")
    axes[-1].set_xlabel("optimizer steps")
    axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    return figure


def joined_log(trainings: Sequence[dict[str, Any]]) -> tuple[LogEntries, list[int]]:
    """The entries of all trainings, whose steps go on, and the last step of each training."""
    log: list[dict[str, Any]] = []
    ends: list[int] = []
    for training in trainings:
        before = ends[-1] if ends else 0
        for entry in training["log"]:
            if entry["step"] or not before:  # step 0 of a later training is the end of the one before
                log.append({**entry, "step": entry["step"] + before})
        ends.append(log[-1]["step"] if log else 0)
    return log, ends


def mark_step(axis, step: int, line: str, event: str):
    axis.axvline(step, color="0.5", linestyle=line, linewidth=1, label=f"{event}: step {step:,}")


def loss_kind(name: str, config: ELMoConfig) -> str:
    """The softmax that a loss in the log was computed with."""
    if name == "sampled_loss":
        return f"sampled softmax loss, {config.num_sampled:,} candidates"
    return f"{'adaptive' if config.softmax_type == 'adaptive' else 'full'} softmax loss"


def curve_of(entries: LogEntries, name: str) -> Curve:
    return [(entry["step"], entry[name]) for entry in entries if math.isfinite(entry.get(name, math.nan))]


@picture
def draw_layer_weights(records: Sequence[RunRecord]):
    """The paper's Figure 2: a column for each place where ELMo enters, a shade for the weight of each layer."""
    weights = mean_layer_weights(records)
    if not weights:
        return None
    matrix = np.column_stack(list(weights.values()))
    names = layer_names(len(matrix))
    figure = new_figure(2.6 + 0.9 * len(weights), 1.5 + 0.6 * len(names))
    axis = draw_shares(figure, matrix, names, list(weights), "weight of the layer")
    write_cells(axis, matrix, matrix, ".2f")
    axis.invert_yaxis()  # the first layer at the bottom, as in the network
    return figure


@picture
def draw_confusion(matrix: Sequence[Sequence[int]], labels: Sequence[str]):
    """Counts of texts by gold label (row) and predicted label (column); a shade is the share of the row."""
    counts = np.array(matrix)
    has_numbers = len(labels) <= MOST_NUMBERED_LABELS
    size = 0.6 * len(labels) if has_numbers else min(max(9, 0.2 * len(labels)), 30)
    figure = new_figure(size + 3.5, size + 2)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
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
    for (row, column), number in np.ndenumerate(numbers):
        color = "white" if shares[row, column] > 0.6 else "black"
        axis.text(column, row, format(number, form), ha="center", va="center", color=color, fontsize=9)


@picture
def draw_ablation(records: Sequence[RunRecord]):
    """The mean of each arm on each split, with its standard deviation."""
    arms = by_arm(records)
    splits = splits_of(records)
    figure = new_figure(7, 1.3 + 0.45 * len(arms))
    axis = figure.subplots()
    for index, split in enumerate(splits):
        means, deviations = shown_scores(arms.values(), split)
        heights = np.arange(len(arms)) + 0.2 * (index - (len(splits) - 1) / 2)
        axis.errorbar(means, heights, xerr=deviations, label=split, linestyle="", **point_style(index), **ERROR_BARS)
    axis.set_yticks(range(len(arms)), list(arms))
    axis.set_ylim(len(arms) - 0.5, -0.5)  # the first arm at the top
    style_scores(axis, "x", records[0]["metric"], splits)
    return figure


@picture
def draw_data_curve(records: Sequence[RunRecord]):
    """The paper's Figure 1: scores on the last split over the share of the training data, a line for each family.

    The name of an arm is `family@share`; an arm without a share saw all data.
    """
    figure = new_figure(6, 4)
    axis = figure.subplots()
    axis.set_xscale("log")
    split = splits_of(records)[-1]
    families: dict[str, dict[float, list[RunRecord]]] = defaultdict(dict)
    for arm, runs in by_arm(records).items():
        families[arm.partition("@")[0]][data_share(arm)] = runs
    for index, (family, by_share) in enumerate(families.items()):
        shares = sorted(by_share)
        means, deviations = shown_scores([by_share[share] for share in shares], split)
        axis.errorbar(shares, means, yerr=deviations, label=family, **point_style(index), **ERROR_BARS)
    labels = {}
    for record in records:
        share = data_share(record["arm"])
        size = record.get("train_samples")
        labels[share] = f"{100 * share:g} % ({size:,})" if size else f"{100 * share:g} %"
    axis.set_xticks(list(labels), labels.values(), **SLANTED_LABELS)
    axis.minorticks_off()
    axis.set_xlabel("share of the training data (examples)")
    style_scores(axis, "y", records[0]["metric"], [split])
    return figure


def data_share(arm: str) -> float:
    """The share of the training data that the name of an arm ends in."""
    return float(arm.partition("@")[2] or 1)


def shown_scores(arms: Iterable[Sequence[RunRecord]], split: str) -> tuple[list[float], list[float]]:
    """Mean and deviation of the scores of each arm on a split, in percent except for errors."""
    means = []
    deviations = []
    for runs in arms:
        metric = runs[0]["metric"]
        scores = np.array(scores_on(runs, split, metric))
        mean, deviation = mean_and_deviation(scores if metric in ERRORS else 100 * scores)
        means.append(mean)
        deviations.append(deviation)
    return means, deviations


def point_style(index: int) -> dict[str, Any]:
    """A pair of color and marker; the first 49 differ."""
    shift = index // len(COLORS)
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[(index + shift) % len(MARKERS)]}


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
    draw_plane(figure.subplots(), vectors, groups)
    figure.legend(loc="outside lower center", fontsize=8)
    return figure


def draw_plane(axis, vectors: np.ndarray, groups: Mapping[str, Sequence[int]], size: int = 36):
    points, shares = principal_plane(vectors)
    axis.scatter(*points.T, s=10, color="0.8", label="_")
    for index, (label, rows) in enumerate(groups.items()):
        label = plain(label) if can_draw(label) else f"query {index + 1}"
        axis.scatter(*points[list(rows)].T, s=size, label=label, **point_style(index))
    axis.set_xlabel(f"first principal component ({shares[0]:.0%} of the variance)")
    axis.set_ylabel(f"second ({shares[1]:.0%})")


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
    labels = ["\n".join(map(plain, pair["groups"])) for pair in pairs]
    for name, title in MEASURES_OF_CHANGE.items():
        draw_distances(panels[name], [pair[name] for pair in pairs], title, is_series)
    panels["apd"].set_xticks(range(len(pairs)), [""] * len(pairs))
    panels["prt"].set_xticks(range(len(pairs)), labels, **SLANTED_LABELS, fontsize=8)
    panels["apd"].legend(fontsize=8)
    rows: dict[str, range] = {}
    end = 0
    for group, uses in vectors.items():
        rows[group] = range(end, end + len(uses))
        end += len(uses)
    draw_plane(panels["map"], np.concatenate(list(vectors.values())), rows, size=14)
    figure.legend(*panels["map"].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def draw_distances(axis, distances: Sequence[Mapping[str, float]], title: str, is_series: bool):
    """Draws the distances of pairs of groups above bars, the range of random splits."""
    observed = [distance["distance"] for distance in distances]
    low = np.array([distance["random_5"] for distance in distances])
    high = np.array([distance["random_95"] for distance in distances])
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
    return centered @ components[:2].T, (sizes**2 / max((sizes**2).sum(), 1e-12))[:2]


def plain(text: str) -> str:
    """The text for matplotlib, which would read mathematics between dollar signs."""
    return text.replace("$", r"\$")


def can_draw(text: str) -> bool:
    """Whether matplotlib's font has these letters; it has no Hangul, for example."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    return all(font.get_char_index(ord(letter)) for letter in text)
