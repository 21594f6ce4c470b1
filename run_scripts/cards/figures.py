"""All figures: training curves, results of experiments, maps of vectors.

The last argument of each function with `@picture` is the path of its picture. It returns whether the picture was
drawn; without matplotlib, or if there is nothing to draw, it logs a warning that names the picture.
"""

import math
from collections.abc import Callable, Mapping, Sequence
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
    log: list[dict[str, Any]] = []
    ends = []
    for training in trainings:
        before = ends[-1] if ends else 0
        log += [{**entry, "step": entry["step"] + before} for entry in training["log"] if entry["step"] or not before]
        ends.append(log[-1]["step"] if log else 0)
        published_step = training["published_step"] + before
    losses = {loss_kind(name, config): curve_of(log, name) for name in ("loss", "sampled_loss")}
    perplexities = {label: curve_of(log, name) for name, label in DIRECTIONS.items()}
    panels = {"held-out perplexity (log scale)": perplexities, "training loss\n(nats per prediction)": losses}
    panels = {title: curves for title, curves in panels.items() if any(curves.values())}
    if not panels:
        return None
    figure = new_figure(8, 0.5 + 2.75 * len(panels))
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for label, curve in curves.items():
            if curve:
                axis.plot(*zip(*curve, strict=True), ".-", label=label, linewidth=1, markersize=4)
        label = f"published: step {published_step:,}"
        axis.axvline(published_step, color="0.5", linestyle="--", linewidth=1, label=label)
        for end in ends[:-1]:
            axis.axvline(end, color="0.5", linestyle=":", linewidth=1, label=f"trained further: step {end:,}")
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    if any(perplexities.values()):
        axes[0].set_yscale("log")
        axes[0].yaxis.set_major_formatter("{x:,.6g}")
    axes[-1].set_xlabel("optimizer steps")
    axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    return figure


def loss_kind(name: str, config: ELMoConfig) -> str:
    """The softmax that a loss in the log was computed with."""
    if name == "sampled_loss":
        return f"sampled softmax loss, {config.num_sampled:,} candidates"
    return f"{'adaptive' if config.softmax_type == 'adaptive' else 'full'} softmax loss"


def curve_of(entries: LogEntries, name: str) -> Curve:
    return [(entry["step"], entry[name]) for entry in entries if name in entry and math.isfinite(entry[name])]


@picture
def draw_layer_weights(records: Sequence[RunRecord]):
    """The paper's Figure 2: a column for each place where ELMo enters, a shade for the weight of each layer."""
    weights = mean_layer_weights(records)
    if not weights:
        return None
    matrix = np.column_stack(list(weights.values()))
    names = layer_names(len(matrix))
    figure = new_figure(2.6 + 0.9 * len(weights), 1.5 + 0.6 * len(names))
    texts = [[f"{weight:.2f}" for weight in row] for row in matrix]
    axis = draw_shares(figure, matrix, names, list(weights), "weight of the layer", texts)
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
    texts = [[f"{count:,}" for count in row] for row in counts] if has_numbers else []
    draw_shares(figure, shares, labels, labels, "share of the gold label", texts).set(xlabel="predicted", ylabel="gold")
    return figure


def draw_shares(figure, shares, rows: Sequence[str], columns: Sequence[str], title: str, texts) -> Any:
    """Draws a matrix of shares as shades, with texts in the cells, and returns its axis."""
    axis = figure.subplots()
    figure.colorbar(axis.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto"), label=title)
    axis.set_xticks(range(len(columns)), map(plain, columns), **SLANTED_LABELS)
    axis.set_yticks(range(len(rows)), map(plain, rows))
    for (row, column), text in np.ndenumerate(texts):
        color = "white" if shares[row, column] > 0.6 else "black"
        axis.text(column, row, text, ha="center", va="center", color=color, fontsize=9)
    return axis


@picture
def draw_ablation(records: Sequence[RunRecord]):
    """The mean of each arm on each split, with its standard deviation."""
    arms, splits = by_arm(records), splits_of(records)
    figure = new_figure(7, 1.3 + 0.45 * len(arms))
    axis = figure.subplots()
    for index, split in enumerate(splits):
        shift = 0.2 * (index - (len(splits) - 1) / 2)
        points = [(row + shift, *shown_score(runs, split)) for row, runs in enumerate(arms.values())]
        heights, means, deviations = zip(*points, strict=True)
        style = {**point_style(index), **ERROR_BARS}
        axis.errorbar(means, heights, xerr=deviations, label=split, linestyle="", **style)
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
    axis, split = figure.subplots(), splits_of(records)[-1]
    axis.set_xscale("log")
    families: dict[str, list[tuple[float, float, float]]] = {}
    for arm, runs in by_arm(records).items():
        families.setdefault(arm.partition("@")[0], []).append((data_share(arm), *shown_score(runs, split)))
    for index, (family, points) in enumerate(families.items()):
        shares, means, deviations = zip(*sorted(points), strict=True)
        axis.errorbar(shares, means, yerr=deviations, label=family, **point_style(index), **ERROR_BARS)
    sizes = {data_share(record["arm"]): record.get("train_samples") for record in records}
    labels = [f"{100 * share:g} %" + (f" ({size:,})" if size else "") for share, size in sizes.items()]
    axis.set_xticks(list(sizes), labels, **SLANTED_LABELS)
    axis.minorticks_off()
    axis.set_xlabel("share of the training data (examples)")
    style_scores(axis, "y", records[0]["metric"], [split])
    return figure


def data_share(arm: str) -> float:
    """The share of the training data that the name of an arm ends in."""
    return float(arm.partition("@")[2] or 1)


def shown_score(runs: Sequence[RunRecord], split: str) -> tuple[float, float]:
    """Mean and deviation of the runs' scores on a split, in percent except for errors."""
    metric = runs[0]["metric"]
    return mean_and_deviation(np.array(scores_on(runs, split, metric)) * (1 if metric in ERRORS else 100))


def point_style(index: int) -> dict[str, Any]:
    """A pair of color and marker; the first 49 differ."""
    shift = index // len(COLORS)
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[(index + shift) % len(MARKERS)]}


def style_scores(axis, along: str, metric: str, splits: Sequence[str]):
    """Labels the axis of the scores (`along`: x or y), and adds a legend if there are several lines."""
    on = f" on {splits[0]}" if len(splits) == 1 else ""
    axis.set(**{f"{along}label": f"{metric.replace('_', ' ')}{on}{'' if metric in ERRORS else ' (%)'}"})
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
    panels = figure.subplot_mosaic([[name, "map"] for name in MEASURES_OF_CHANGE], width_ratios=[1, 1.2])
    labels = ["\n".join(map(plain, pair["groups"])) for pair in pairs]
    for name, title in MEASURES_OF_CHANGE.items():
        axis = panels[name]
        low = np.array([pair[name]["random_5"] for pair in pairs])
        high = np.array([pair[name]["random_95"] for pair in pairs])
        axis.bar(range(len(pairs)), high - low, bottom=low, width=0.6, color="0.8", label="90 % of random splits")
        line = {**point_style(0), "linestyle": "-" if is_series else "none", "markersize": 5}
        axis.plot([pair[name]["distance"] for pair in pairs], label="observed", **line)
        axis.set(ylabel=title, xlim=(-0.6, len(pairs) - 0.4))
        axis.use_sticky_edges = False  # else no space below the bars
        axis.set_xticks(range(len(pairs)), labels if name == "prt" else [""] * len(pairs), **SLANTED_LABELS, fontsize=8)
        axis.grid(axis="y", alpha=0.3)
    panels["apd"].legend(fontsize=8)
    rows: dict[str, range] = {}
    end = 0
    for group, of_group in vectors.items():
        rows[group] = range(end, end + len(of_group))
        end += len(of_group)
    draw_plane(panels["map"], np.concatenate(list(vectors.values())), rows, size=14)
    figure.legend(*panels["map"].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


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
