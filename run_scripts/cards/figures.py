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
LIGHTEST = 0.9  # of the color map of groups; its end is a yellow that is hard to see on white
NUMBER_BOX = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": "black", "linewidth": 0.6}
ERROR_BARS = {"markersize": 5, "linewidth": 1.5, "capsize": 3}
SLANTED_LABELS = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}  # for labels that would overlap
MOST_NUMBERED_LABELS = 15  # a larger confusion matrix has no numbers in its cells
DIRECTIONS = {"perplexity": "both directions", "forward": "forward", "backward": "backward"}  # keys of an evaluation
# Fonts with Hangul or Han of Linux, macOS and Windows.
WIDE_FONTS = (
    *("Noto Sans CJK KR", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK TC", "Noto Sans KR", "Noto Sans SC"),
    *("Noto Sans JP", "Source Han Sans", "NanumGothic", "UnDotum", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei"),
    *("Apple SD Gothic Neo", "AppleGothic", "PingFang SC", "Hiragino Sans", "Heiti TC", "Arial Unicode MS"),
    *("Malgun Gothic", "Microsoft YaHei", "Yu Gothic", "SimHei", "SimSun"),
)
MEASURES_OF_CHANGE = {"apd": "average pairwise distance", "prt": "distance of prototypes"}


def picture(draw: Callable[..., Any]) -> Callable[..., bool]:
    """Gives a function that returns a figure, or None for nothing to draw, one more argument: the picture's path."""

    @wraps(draw)
    def write(*given: Any) -> bool:
        *arguments, path = given
        figure = None
        reason = "its records have nothing to draw"
        try:
            import matplotlib

            with matplotlib.rc_context({"font.family": font_families()}):
                figure = draw(*arguments)
                if figure is not None:
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    figure.savefig(path)
        except ImportError:
            reason = 'that needs matplotlib; pip install "modeling-elmo[train]"'
        if figure is None:
            logger.warning(f"{path} is not drawn: {reason}")
        return figure is not None

    return write


def font_families() -> list[str]:
    """The default fonts, and for letters that they lack those installed fonts that have Hangul or Han."""
    from matplotlib import rcParams
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return [*rcParams["font.family"], *(name for name in WIDE_FONTS if name in installed)]


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
    """The entries of all trainings, whose steps continue, and the last step of each training."""
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
    figure = new_figure(8, 5 + 0.23 * len(groups))
    axis = figure.subplots()
    handles = draw_plane(axis, vectors, groups)
    figure.legend(handles=handles, loc="outside lower center", fontsize=9)
    return figure


def draw_plane(axis, vectors: np.ndarray, groups: Mapping[str, Sequence[int]]) -> list[Any]:
    """Draws all points, and returns what the legend shows: alone, it leaves out names that begin with `_`."""
    points, shares = principal_plane(vectors)
    axis.scatter(*points.T, s=10, color="0.8", label="_")
    handles = []
    for index, (label, rows) in enumerate(groups.items()):
        group = points[list(rows)]
        label = drawable(label, f"query {index + 1}")
        handles.append(axis.scatter(*group.T, s=36, label=label, **point_style(index)))
    label_plane(axis, shares)
    return handles


def label_plane(axis, shares: np.ndarray):
    first, second = shares
    axis.set_xlabel(f"first principal component ({first:.0%} of the variance)")
    axis.set_ylabel(f"second ({second:.0%})")


def group_style(index: int, number: int) -> dict[str, Any]:
    """A color and a marker of a group. The colors go from dark to light, also in gray."""
    from matplotlib import colormaps

    share = LIGHTEST * index / max(1, number - 1)
    return {"color": colormaps["viridis"](share), "marker": MARKERS[index % len(MARKERS)]}


@picture
def draw_change(
    pairs: Sequence[Mapping[str, Any]],
    is_series: bool,
    vectors: Mapping[str, np.ndarray],
    random: Mapping[str, np.ndarray] | None = None,
    typical: Mapping[str, Sequence[tuple[int, str]]] | None = None,
):
    """Distances between groups of uses compared with random splits and control words, and the map of all uses.

    A single pair has the distribution of random splits; several pairs have its range. On the map, groups have colors
    from dark to light, and numbers of typical uses, which are named below.

    Args:
        pairs: pairs of groups with the measures of `MEASURES_OF_CHANGE`, as from `compare_groups`.
        is_series: whether the pairs follow each other, so that a line joins them.
        vectors: of each group. Shape: (uses, dimension).
        random: distances of random splits of a single pair, by measure.
        typical: row and text of some uses of each group.
    """
    figure = new_figure(13, 6)
    panels = figure.subplot_mosaic([["apd", "map"], ["prt", "map"]], width_ratios=[1, 1.2])
    if len(pairs) == 1 and random is not None:
        for name, title in MEASURES_OF_CHANGE.items():
            draw_distribution(panels[name], pairs[0][name], random[name], title)
    else:
        draw_pairs(panels, pairs, is_series)
    panels["apd"].legend(fontsize=9)
    points, shares = principal_plane(np.concatenate([*vectors.values()]))
    ends = np.cumsum([len(uses) for uses in vectors.values()])
    groups = dict(zip(vectors, np.split(points, ends[:-1]), strict=True))
    handles = draw_groups(panels["map"], groups)
    label_plane(panels["map"], shares)
    figure.legend(handles=handles, loc="outside right upper", fontsize=10)
    texts = name_uses(panels["map"], groups, typical or {})
    if texts:
        *_, height = figure.get_size_inches()
        figure.set_figheight(height + 0.25 * len(texts))
        figure.legend(handles=texts, loc="outside lower center", fontsize=10)
    return figure


def draw_groups(axis, groups: Mapping[str, np.ndarray]) -> list[Any]:
    """Draws the points of all groups, and returns what the legend shows."""
    handles = []
    for index, (group, points) in enumerate(groups.items()):
        label = drawable(group, f"group {index + 1}")
        style = group_style(index, len(groups))
        handles.append(axis.scatter(*points.T, s=14, label=label, edgecolor="black", linewidth=0.3, **style))
    return handles


def name_uses(axis, groups: Mapping[str, np.ndarray], typical: Mapping[str, Sequence[tuple[int, str]]]) -> list[Any]:
    """Numbers typical uses on the map, and returns what the legend shows of them."""
    handles = []
    for index, (group, points) in enumerate(groups.items()):
        style = group_style(index, len(groups))
        for row, text in typical.get(group, ()):
            number = len(handles) + 1
            label = f"{number}  {drawable(text, 'a use in letters that no installed font has')}"
            handles.append(axis.scatter(*points[row], s=70, label=label, edgecolor="black", linewidth=1.2, **style))
            axis.annotate(
                str(number), points[row], (5, 5), textcoords="offset points", fontsize=9, bbox=NUMBER_BOX, zorder=5
            )
    return handles


def draw_distribution(axis, measure: Mapping[str, Any], random: np.ndarray, title: str):
    """Draws the distances of random splits as a histogram, the observed one as a line, and controls as ticks."""
    random = random.round(9)  # equal splits differ in the last digits, which no 40 bins can divide
    axis.hist(random, bins=40, color="0.75", label=f"{len(random):,} random splits")
    controls = list(measure.get("controls", {}).values())
    told = f"p = {measure['p']:.3f}"
    if controls:
        heights = np.full(len(controls), -0.06 * axis.get_ylim()[1])
        axis.plot(controls, heights, "|", color=COLORS[1], markersize=12, label=f"{len(controls)} control words")
        told += f", above {1 + len(controls) - measure['rank']} of {len(controls)} control words"
    axis.axvline(measure["distance"], color="black", linewidth=2, label="observed")
    axis.axhline(0, color="0.5", linewidth=0.8)
    axis.set(xlabel=f"{title}: {told}", ylabel="random splits")
    axis.spines[["top", "right"]].set_visible(False)


def draw_pairs(panels: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]], is_series: bool):
    """Draws a panel for each measure, with a place for each pair of groups."""
    for name, title in MEASURES_OF_CHANGE.items():
        draw_distances(panels[name], [pair[name] for pair in pairs], title, is_series)
    places = range(len(pairs))
    labels = []
    for pair in pairs:
        groups = map(plain, pair["groups"])
        labels.append("\n".join(groups))
    panels["apd"].set_xticks(places, [""] * len(pairs))
    panels["prt"].set_xticks(places, labels, **SLANTED_LABELS, fontsize=8)


def draw_distances(axis, distances: Sequence[Mapping[str, Any]], title: str, is_series: bool):
    """Draws the distances of pairs of groups above bars, the range of random splits, with controls as ticks."""
    axis.use_sticky_edges = False  # else no space below the bars
    draw_ranges(axis, distances, vertical=True)
    line = "-" if is_series else "none"
    observed = [distance["distance"] for distance in distances]
    axis.plot(observed, label="observed", linestyle=line, markersize=5, **point_style(0))
    axis.set(ylabel=title, xlim=(-0.6, len(distances) - 0.4))
    axis.grid(axis="y", alpha=0.3)


def draw_ranges(axis, distances: Sequence[Mapping[str, Any]], vertical: bool):
    """Draws the range of random splits as a bar in each place, and the distances of control words as ticks."""
    places = range(len(distances))
    low = np.array([distance["random_5"] for distance in distances])
    high = np.array([distance["random_95"] for distance in distances])
    label = "90 % of random splits"
    if vertical:
        axis.bar(places, high - low, bottom=low, width=0.6, color="0.8", label=label)
    else:
        axis.barh(places, high - low, left=low, height=0.6, color="0.8", label=label)
    label = "control words"
    for place, distance in enumerate(distances):
        controls = list(distance.get("controls", {}).values())
        if controls:
            points = [[place] * len(controls), controls]
            x, y = points if vertical else points[::-1]
            marker = "_" if vertical else "|"
            axis.plot(x, y, marker, color=COLORS[1], markersize=5, markeredgewidth=0.8, label=label)
            label = "_"


@picture
def draw_ranking(ranking: Sequence[Mapping[str, Any]]):
    """The PRT of many words, with the range of random splits and control words; a panel for each pair of groups.

    Args:
        ranking: pairs of groups, each with its words by decreasing change.
    """
    most = max(len(pair["words"]) for pair in ranking)
    figure = new_figure(2 + 5 * len(ranking), 1.5 + 0.24 * most)
    axes = figure.subplots(1, len(ranking), squeeze=False)[0]
    for axis, pair in zip(axes, ranking, strict=True):
        words = pair["words"]
        measures = [row["prt"] for row in words]
        draw_ranges(axis, measures, vertical=False)
        for is_changed, fill in ((True, "black"), (False, "white")):
            rows = [place for place, row in enumerate(words) if (row["conclusion"] == "changed") == is_changed]
            if rows:
                distances = [measures[place]["distance"] for place in rows]
                label = "changed" if is_changed else "not shown to change"
                axis.plot(distances, rows, "o", color="black", markerfacecolor=fill, markersize=5, label=label)
        names = [drawable(row["word"], f"word {place + 1}") for place, row in enumerate(words)]
        axis.set_yticks(range(len(words)), names, fontsize=9)
        axis.set_ylim(len(words) - 0.4, -0.6)  # the first word at the top
        axis.set_xlim(left=0)
        groups = " and ".join(map(plain, pair["groups"]))
        axis.set_xlabel(f"{MEASURES_OF_CHANGE['prt']} between {groups}")
        axis.grid(axis="x", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
    return figure


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


def drawable(text: str, replacement: str) -> str:
    """The text for matplotlib, or a replacement if no font has its letters, which a warning tells."""
    if can_draw(text):
        return plain(text)
    logger.warning_once(
        "The fonts that matplotlib found lack some letters, such as Hangul or Han, so the picture has English words "
        "in their place. Install a font with these letters, such as Noto Sans CJK."
    )
    return replacement


def can_draw(text: str) -> bool:
    """Whether one of matplotlib's fonts has each letter; its own font has no Hangul, for example."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties, findfont, get_font

    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in rcParams["font.family"]]
    return all(any(font.get_char_index(ord(letter)) for font in fonts) for letter in text)
