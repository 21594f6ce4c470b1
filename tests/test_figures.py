import math
import statistics
import sys

import numpy as np
import pytest
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
)

EVALUATIONS = [
    {"step": step, "perplexity": perplexity, "forward": perplexity * 1.25, "backward": perplexity / 1.25}
    for step, perplexity in ((0, math.inf), (50, 500.0), (100, 250.0))
]
STEPS = [{"step": 50, "sampled_loss": 6.5}, {"step": 100, "sampled_loss": 5.5}]
RUN = {"log": [*EVALUATIONS, *STEPS], "published_step": 100}
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
PICTURES = {
    "change": lambda path: draw_change(PAIRS, True, USES, path),
    "pretraining": lambda path: draw_curve([RUN], SAMPLED, path),
    "map": lambda path: draw_map(np.eye(4), {"one": [0, 1], "눈": [2]}, path),
    "layer weights": lambda path: draw_layer_weights(RECORDS, path),
    "ablation": lambda path: draw_ablation(RECORDS, path),
    "data curve": lambda path: draw_data_curve(CURVE, path),
    "confusion": lambda path: draw_confusion([[1, 2], [3, 4]], ["no", "yes"], path),
}


@pytest.fixture
def figures(monkeypatch):
    """The list of figures that are drawn in a test."""
    pytest.importorskip("matplotlib")
    drawn = []
    new_figure = figure_module.new_figure
    monkeypatch.setattr(figure_module, "new_figure", lambda *size: drawn.append(new_figure(*size)) or drawn[-1])
    return drawn


def texts(axis) -> list[str]:
    return [text.get_text() for text in axis.texts]


def labels(ticks) -> list[str]:
    return [label.get_text() for label in ticks]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_files(name, figures, tmp_path, monkeypatch, caplog):
    """Without matplotlib, a warning names the picture."""
    path = tmp_path / "folder" / "picture.png"
    assert PICTURES[name](path) is True and path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert PICTURES[name](tmp_path / "other.png") is False and not (tmp_path / "other.png").exists()
    assert 'other.png is not drawn: that needs matplotlib; pip install "modeling-elmo[train]"' in caplog.messages[-1]


def test_picture_of_a_pretraining_run(figures, tmp_path):
    draw_curve([RUN], SAMPLED, tmp_path / "a.png")
    top, bottom = figures[0].axes
    lines = {line.get_label(): line for axis in (top, bottom) for line in axis.lines}
    assert lines["both directions"].get_xydata().tolist() == [[50, 500], [100, 250]]
    assert lines["forward"].get_xydata().tolist() == [[50, 625], [100, 312.5]]
    assert lines["sampled softmax loss, 3,000 candidates"].get_xydata().tolist() == [[50, 6.5], [100, 5.5]]
    assert set(lines["published: step 100"].get_xdata()) == {100}
    assert top.get_yscale() == "log" and bottom.get_yscale() == "linear"
    assert top.get_ylabel() == "held-out perplexity (log scale)"
    assert "nats" in bottom.get_ylabel() and bottom.get_xlabel() == "optimizer steps"


def test_picture_of_a_biLM_that_was_trained_further(figures, tmp_path):
    """Its steps go on; the evaluation before the second training is that after the first."""
    further = {"log": [{**EVALUATIONS[2], "step": 0}, {**EVALUATIONS[1], "step": 40}], "published_step": 40}
    draw_curve([RUN, further], SAMPLED, tmp_path / "a.png")
    lines = {line.get_label(): line for line in figures[0].axes[0].lines}
    assert lines["both directions"].get_xydata().tolist() == [[50, 500], [100, 250], [140, 500]]
    assert set(lines["trained further: step 100"].get_xdata()) == {100}
    assert set(lines["published: step 140"].get_xdata()) == {140}


@pytest.mark.parametrize(("large", "panels"), [(math.inf, 1), (math.nan, 1), (1e300, 2)])
def test_picture_of_a_diverged_or_empty_run(large, panels, figures, tmp_path, caplog):
    """Points that are no numbers are left out; a panel without points, too."""
    diverged = [{"step": step, "perplexity": large, "forward": large, "backward": large} for step in (0, 100)]
    assert draw_curve([{**RUN, "log": [*diverged, *STEPS]}], SAMPLED, tmp_path / "a.png") is True
    assert len(figures[0].axes) == panels
    assert draw_curve([{**RUN, "log": []}], SAMPLED, tmp_path / "b.png") is False
    assert "b.png is not drawn: its records have nothing to draw" in caplog.text


@pytest.mark.parametrize(("is_series", "style"), [(True, "-"), (False, "None")])
def test_picture_of_a_change(is_series, style, figures, tmp_path):
    draw_change(PAIRS, is_series, USES, tmp_path / "a.png")
    apd, uses, prt = figures[0].axes
    assert [line.get_ydata().tolist() for axis in (apd, prt) for line in axis.lines] == [[0.5, 0.4], [0.1, 0.2]]
    assert {line.get_linestyle() for line in (*apd.lines, *prt.lines)} == {style}
    for bar in (*apd.patches, *prt.patches):
        assert (bar.get_y(), bar.get_height()) == pytest.approx((0.2, 0.1))
    assert labels(prt.get_xticklabels()) == ["1990\n2000", "2000\n2010"]
    drawn = {each.get_label(): len(each.get_offsets()) for each in uses.collections}
    assert drawn == {"_": 6, "1990": 1, "2000": 3, "2010": 2}


def test_picture_of_layer_weights(figures, tmp_path, caplog):
    draw_layer_weights(RECORDS, tmp_path / "a.png")
    axis = figures[0].axes[0]
    assert texts(axis) == ["0.30", "0.40", "0.30"]
    assert labels(axis.get_yticklabels()) == ["token layer", "biLSTM 1", "biLSTM 2"]
    assert axis.images[0].get_clim() == (0, 1)  # the same shade in every picture
    assert not axis.yaxis_inverted()  # the token layer at the bottom
    assert draw_layer_weights(RECORDS[:1], tmp_path / "b.png") is False
    assert "b.png is not drawn: its records have nothing to draw" in caplog.text


def test_picture_of_an_ablation(figures, tmp_path):
    draw_ablation(RECORDS, tmp_path / "a.png")
    (axis,) = figures[0].axes
    assert labels(axis.get_yticklabels()) == ["baseline", "elmo"]
    assert axis.get_xlabel() == "f1 (%)"
    found = {each.get_label(): each for each in axis.containers}
    assert list(found) == ["validation", "test"]
    points, _, (bars,) = found["test"]
    np.testing.assert_allclose(points.get_xdata(orig=False), [32, 46])
    half_widths = [np.ptp(segment[:, 0]) / 2 for segment in bars.get_segments()]
    np.testing.assert_allclose(
        half_widths, [100 * statistics.stdev([0.30, 0.34]), 100 * statistics.stdev([0.42, 0.48, 0.48])]
    )


def test_picture_of_a_data_curve(figures, tmp_path):
    draw_data_curve(CURVE, tmp_path / "a.png")
    (axis,) = figures[0].axes
    assert axis.get_xscale() == "log" and axis.get_ylabel() == "f1 on test (%)"
    ticks = dict(zip(axis.get_xticks(), labels(axis.get_xticklabels()), strict=True))
    assert ticks == {1.0: "100 % (1,000)", 0.01: "1 % (10)", 0.1: "10 % (100)"}
    found = {each.get_label(): each[0] for each in axis.containers}
    assert list(found) == ["elmo", "baseline"]
    np.testing.assert_allclose(found["elmo"].get_xdata(orig=False), [0.01, 0.1, 1])
    np.testing.assert_allclose(found["elmo"].get_ydata(orig=False), [51.6, 52.5, 61.5])


@pytest.mark.parametrize("size, has_numbers", [(2, True), (40, False)])
def test_picture_of_a_confusion_matrix(size, has_numbers, figures, tmp_path):
    counts = np.arange(size * size).reshape(size, size) * 1000
    counts[1] = 0  # a label of no text
    names = ["$\\frac$", "$5-$10", *(f"label {number}" for number in range(2, size))]
    draw_confusion(counts.tolist(), names, tmp_path / "a.png")
    axis = figures[0].axes[0]
    shown = [name.replace("$", r"\$") for name in names]  # not as mathematics
    assert labels(axis.get_xticklabels()) == labels(axis.get_yticklabels()) == shown
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("predicted", "gold")
    assert texts(axis) == ([f"{count:,}" for count in counts.ravel()] if has_numbers else [])
    np.testing.assert_allclose(axis.images[0].get_array(), counts / np.maximum(1, counts.sum(1, keepdims=True)))
