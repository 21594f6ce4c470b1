"""What a run leaves in its folder, and figures beside a baseline. Programs and experiments test the rest."""

import copy

import pytest
from endings import conclusion
from task_worker import bilm, predictions_of, read_json, train_head

from modeling_elmo.run_scripts.cards.results import report


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    bilm(folder / "bilm")
    train_head("ner", folder, max_steps=1, language="en", license="mit")
    return folder


def test_a_run_leaves_model_card_record_and_predictions(place):
    run = place / "run"
    record = read_json(run / "record.json")
    assert read_json(run / "results" / "ner.json")["records"] == [record]
    assert (run / "results" / "ner.md").is_file() and (run / "model.safetensors").is_file()
    assert len(predictions_of(run / "predictions_test.jsonl")) == 20
    card = (run / "README.md").read_text("utf-8")
    assert "license: mit" in card and "- en" in card
    assert record["settings"]["elmo_placement"] == "input" and record["settings"]["scalar_mix_l2"] == 0.1
    assert record["settings"]["train_file"] == "wnut17_train.conll"  # no folder of the author's disk


def test_figures(place, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    record = read_json(place / "run" / "record.json")
    baseline = {**copy.deepcopy(record), "arm": "baseline", "layer_weights": {}}
    report([record], place / "run", place / "run")
    found, following = conclusion(capsys.readouterr().out)
    assert found.startswith("On test, f1 is ") and following == ["elmo", "evaluate", str(place / "run"), "FILE"]
    report([baseline, record], tmp_path, place / "run")
    assert {path.name for path in (tmp_path / "results").glob("*.png")} == {"ner.png", "ner_layer_weights.png"}
    assert "| baseline" in capsys.readouterr().out
    shares = [{**each, "arm": f"{each['arm']}@1.0"} for each in (baseline, record)]
    report(shares, tmp_path, place / "run", ablation="data")
    assert (tmp_path / "results" / "ner_data.png").stat().st_size > 1000
