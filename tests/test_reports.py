"""The files of a run and of an experiment. Programs and experiments test the rest."""

import copy

import pytest
from task_worker import bilm, predictions_of, read_json, train_head

from modeling_elmo.run_scripts.experiments.reports import (
    RECORDS,
    add_records,
    read_records,
    report,
    results_of,
    write_records,
)


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
    card = (run / "README.md").read_text(encoding="utf-8")
    assert "license: mit" in card and "- en" in card
    assert record["settings"]["elmo_placement"] == "input" and record["settings"]["scalar_mix_l2"] == 0.1
    assert record["settings"]["train_file"] == "wnut17_train.conll"  # no folder of the author's disk


def test_figures(place, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    record = read_json(place / "run" / "record.json")
    baseline = {**copy.deepcopy(record), "arm": "baseline", "layer_weights": {}}
    report([baseline, record], tmp_path)
    assert {path.name for path in (tmp_path / "results").glob("*.png")} == {"ner.png", "ner_layer_weights.png"}
    assert "| baseline" in capsys.readouterr().out
    shares = [{**each, "arm": f"{each['arm']}@1.0"} for each in (baseline, record)]
    report(shares, tmp_path, ablation="data")
    assert (tmp_path / "results" / "ner_data.png").stat().st_size > 1000


def test_records_are_in_the_order_of_the_run_and_others_stay(tmp_path):
    assert read_records(tmp_path) == (None, []) and results_of(tmp_path) is None
    first, second = ({"arm": arm, "seed": 1, "text": "a\u2028b\n"} for arm in ("baseline", "elmo"))
    write_records(tmp_path, {"program": "reproduce ner"}, [second])
    add_records(tmp_path, [first])
    assert read_records(tmp_path) == ({"program": "reproduce ner"}, [first, second])
    add_records(tmp_path, [first, second | {"text": ""}])
    assert results_of(tmp_path) == [first, second | {"text": ""}]
    write_records(tmp_path, None, [{"metric": "accuracy"}])
    assert results_of(tmp_path) == {"metric": "accuracy"}


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / RECORDS).write_text('{"arm": "elmo"}\n{"arm": "el', encoding="utf-8")
    with pytest.raises(ValueError, match=f"{RECORDS}, line 2 is not JSON"):
        read_records(tmp_path)
