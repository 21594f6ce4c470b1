"""Pictures: what is drawn, in one golden file, and what is not drawn."""

import math
import re
import sys

import numpy as np
import pytest
from golden import check_golden
from run_records import RECORDS, record

from modeling_elmo import ELMoConfig
from modeling_elmo.run_scripts.cards import figures as figure_module
from modeling_elmo.run_scripts.cards.figures import (
    draw_ablation,
    draw_change,
    draw_confusion,
    draw_curve,
    draw_data_curve,
    draw_layer_weights,
    draw_map,
    draw_ranking,
)

EVALUATIONS = [
    {
        "step": step,
        "perplexity": perplexity,
        "forward": perplexity * 1.25,
        "backward": perplexity / 1.25,
        "unigram": 300.0,
    }
    for step, perplexity in ((0, math.inf), (50, 500.0), (100, 250.0))
]
STEPS = [{"step": 50, "sampled_loss": 6.5}, {"step": 100, "sampled_loss": 5.5}]
RUN = {"log": [*EVALUATIONS, *STEPS], "published_step": 100}
# Its steps go on; the evaluation before the second training is that after the first.
FURTHER = {"log": [{**EVALUATIONS[2], "step": 0}, {**EVALUATIONS[1], "step": 40}], "published_step": 40}
SAMPLED = ELMoConfig.from_preset("tiny", softmax_type="sampled", num_sampled=3000)
CURVE = [
    record(f"{family}{ending}", seed, 0.1, score + share / 10 + seed / 100, train_samples=int(1000 * share))
    for family, score in (("elmo", 0.5), ("baseline", 0.3))
    for share, ending in ((1.0, ""), (0.01, "@0.01"), (0.1, "@0.1"))
    for seed in (1, 2)
]
VALUES = {"random_5": 0.2, "random_95": 0.3}
PAIRS = [
    {"groups": ["1990", "2000"], "apd": {"distance": 0.5, **VALUES}, "prt": {"distance": 0.1, **VALUES}},
    {"groups": ["2000", "2010"], "apd": {"distance": 0.4, **VALUES}, "prt": {"distance": 0.2, **VALUES}},
]
USES = {"1990": np.eye(4)[:1], "2000": np.eye(4)[1:], "2010": -np.eye(4)[:2]}
# With control words; the observed distance of PRT is as large as that of one of them.
CONTROLLED = {"p": 0.25, "rank": 2, "controls": {"b": 0.1, "c": 0.35}}
TWO = [{**PAIRS[0], "apd": {**PAIRS[0]["apd"], **CONTROLLED}, "prt": {**PAIRS[0]["prt"], "p": 0.5}}]
RANDOM = {"apd": np.array([0.1, 0.2, 0.2]), "prt": np.array([0.1, 0.1, 0.3])}
TYPICAL = {"1990": [(0, "one [use]")], "2000": [(2, "$a [use]"), (0, "눈 [use]")]}
RANKING = [
    {
        "groups": ["1990", "2000"],
        "words": [
            {"word": "play", "prt": {"distance": 0.5, **VALUES, **CONTROLLED}, "conclusion": "changed"},
            {"word": "눈", "prt": {"distance": 0.1, **VALUES}, "conclusion": "no change"},
        ],
    }
]
COUNTS = [[0, 1000, 2000], [0, 0, 0], [6000, 7000, 8000]]  # the second label is of no text
NAMES = ["$\\frac$", "$a-$b", "label 2"]  # no mathematics
PICTURES = {
    "series": lambda path: draw_change(PAIRS, True, USES, path),
    "pairs": lambda path: draw_change(PAIRS, False, USES, path),
    "pairs with controls": lambda path: draw_change(TWO * 2, False, USES, path),
    "two groups": lambda path: draw_change(TWO, False, {**USES, "2010": np.eye(4)[:0]}, RANDOM, TYPICAL, path),
    "ranking": lambda path: draw_ranking(RANKING, path),
    "pretraining": lambda path: draw_curve([RUN], SAMPLED, path),
    "trained further": lambda path: draw_curve([RUN, FURTHER], SAMPLED, path),
    "map": lambda path: draw_map(np.eye(4), {"one": [0, 1], "눈": [2]}, path),
    "layer weights": lambda path: draw_layer_weights(RECORDS, path),
    "ablation": lambda path: draw_ablation(RECORDS, path),
    "data curve": lambda path: draw_data_curve(CURVE, path),
    "confusion": lambda path: draw_confusion(COUNTS, NAMES, path),
    "large confusion": lambda path: draw_confusion(np.zeros((16, 16)).tolist(), [*"abcdefghijklmnop"], path),
}


@pytest.fixture
def figures(monkeypatch):
    """The list of figures that are drawn in a test."""
    pytest.importorskip("matplotlib")
    drawn = []
    new_figure = figure_module.new_figure
    monkeypatch.setattr(figure_module, "WIDE_FONTS", ())  # this system may have some
    monkeypatch.setattr(figure_module, "new_figure", lambda *size: drawn.append(new_figure(*size)) or drawn[-1])
    return drawn


def described(axis):
    """What a panel shows, a line each: its texts, scales and marks with their places; not matplotlib's own ticks."""

    def rounded(places):
        return np.asarray(places, dtype=float).round(4).tolist()

    ticks = [label.get_text() for label in (*axis.get_xticklabels(), *axis.get_yticklabels())]
    names = [name for name in ticks if re.search(r"[^\W\d]|%|\n", name)]
    lines = [
        str(
            [
                axis.get_xlabel(),
                axis.get_ylabel(),
                axis.get_xscale(),
                axis.get_yscale(),
                bool(axis.yaxis_inverted()),
                *names,
            ]
        )
    ]
    lines += [f"text {text.get_text()}" for text in axis.texts]
    lines += [f"line {each.get_label()} {each.get_linestyle()} {rounded(each.get_xydata())}" for each in axis.lines]
    lines += [f"bar {rounded(each.get_bbox().get_points())}" for each in axis.patches]
    lines += [f"group {each.get_label()}" for each in axis.containers]
    named = [each for each in axis.collections if not each.get_label().startswith(("_child", "_no"))]
    lines += [f"points {each.get_label()} {len(each.get_offsets())}" for each in named]
    lines += [f"image {each.get_clim()} {rounded(each.get_array())[:3]}" for each in axis.images]
    return lines


def test_pictures(figures, tmp_path):
    found = []
    for name, draw in PICTURES.items():
        assert draw(tmp_path / "folder" / f"{name}.png") is True
        assert (tmp_path / "folder" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        for number, axis in enumerate(figures[-1].axes, 1):
            found += [f"{name}, panel {number}", *(f"  {line}" for line in described(axis))]
    check_golden("\n".join(found) + "\n", "pages/pictures.txt")


def test_installed_fonts_have_letters_that_others_lack(figures, monkeypatch, tmp_path, warnings_of_transformers):
    letter = "\u1d81"  # in a font that comes with matplotlib, and not in its default font
    assert figure_module.can_draw("play") and not figure_module.can_draw(letter)
    draw_map(np.eye(4), {letter: [0]}, tmp_path / "a.png")
    assert (
        "the picture has English words in their place. Install a font with these letters"
        in warnings_of_transformers.text
    )
    monkeypatch.setattr(figure_module, "WIDE_FONTS", ("No such font", "STIXGeneral"))
    for ending in ("png", "pdf", "svg"):
        draw_map(np.eye(4), {letter: [0]}, tmp_path / f"b.{ending}")
    labels = [axis.get_legend_handles_labels()[1] for figure in figures for axis in figure.axes]
    assert labels == [["query 1"], *[[letter]] * 3]
    assert (tmp_path / "b.pdf").read_bytes().startswith(b"%PDF") and b"<svg" in (tmp_path / "b.svg").read_bytes()


def test_each_group_of_a_map_is_in_its_legend(figures, tmp_path):
    """Also one whose name begins with `_`, as emphasis in plain texts does, which matplotlib leaves out by itself."""
    names = ["_It_ was a [play] .", "a [play]"]
    draw_map(np.eye(4), {name: [row] for row, name in enumerate(names)}, tmp_path / "map.png")
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == names


def test_random_splits_of_one_document_in_each_group_are_equally_far(figures, tmp_path):
    """Up to the last digits, in which sums in another order differ."""
    distance = TWO[0]["prt"]["distance"]
    equal = np.array([distance, np.nextafter(distance, 1), distance])
    assert draw_change(TWO, False, USES, dict.fromkeys(("apd", "prt"), equal), TYPICAL, tmp_path / "change.png")
    panels = [axis for axis in figures[0].axes if axis.get_ylabel() == "random splits"]
    assert [max(bar.get_height() for bar in axis.patches) for axis in panels] == [3, 3]


def test_groups_are_ordered_and_apart_in_gray():
    from matplotlib.colors import to_rgb

    for number in (2, 5, 9):
        grays = []
        for index in range(number):
            red, green, blue = to_rgb(figure_module.group_style(index, number)["color"])
            grays.append(0.299 * red + 0.587 * green + 0.114 * blue)
        steps = np.diff(grays)
        assert steps.min() > 0.4 / number and grays[-1] < 0.85


@pytest.mark.parametrize("name", PICTURES)
def test_without_matplotlib_a_warning_names_the_picture(name, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert PICTURES[name](tmp_path / "other.png") is False and not (tmp_path / "other.png").exists()
    assert 'other.png is not drawn: that needs matplotlib; pip install "modeling-elmo[train]"' in caplog.messages[-1]


@pytest.mark.parametrize("large, panels", [(math.inf, 1), (math.nan, 1), (1e300, 2)])
def test_picture_of_a_diverged_or_empty_run(large, panels, figures, tmp_path, caplog):
    """Points that are not numbers are left out, and so is a panel without points."""
    diverged = [{"step": step, "perplexity": large, "forward": large, "backward": large} for step in (0, 100)]
    assert draw_curve([{**RUN, "log": [*diverged, *STEPS]}], SAMPLED, tmp_path / "a.png") is True
    assert len(figures[0].axes) == panels
    assert draw_curve([{**RUN, "log": []}], SAMPLED, tmp_path / "b.png") is False
    assert draw_layer_weights(RECORDS[:1], tmp_path / "c.png") is False
    for name in "bc":
        assert f"{name}.png is not drawn: its records have nothing to draw" in caplog.text
