"""Which records belong together, and what is computed from them."""

import json

import pytest
from errors import refused
from run_records import RECORDS, record

from modeling_elmo.run_scripts.cards.records import best_record, by_arm, mean_layer_weights, read_record


@pytest.mark.parametrize(
    "other, received",
    [
        (RECORDS[0], r"'baseline'.*\[1, 1\]"),
        (RECORDS[2] | {"metrics": {"validation": {"f1": 0.4, "accuracy": 0.9}}}, "'baseline'.*test f1, .*accuracy"),
    ],
)
def test_records_whose_mean_would_be_wrong(other, received):
    with refused(received):
        by_arm([RECORDS[0], other])


def test_layer_weights_are_means_over_seeds():
    both = {"input": [1, 0, 0], "output": [0, 0, 1]}
    several = [record("a", 1, 0, 0, layer_weights=both), record("b", 1, 0, 0, layer_weights=both)]
    assert list(mean_layer_weights(several)) == ["a, input", "a, output", "b, input", "b, output"]
    assert list(mean_layer_weights([record("a", 1, 0, 0), record("b", 1, 0, 0)])) == ["a", "b"]


def test_the_best_run_is_chosen_on_validation_data():
    assert best_record(RECORDS) == RECORDS[4]
    assert best_record([record("a", 1, 0.5, 0.1), record("a", 2, 0.4, 0.9)])["seed"] == 1
    tests = [{"test": {"f1": score}} for score in (0.1, 0.9)]
    assert best_record([record("a", seed, 0, 0, metrics=each) for seed, each in enumerate(tests)])["seed"] == 1


@pytest.mark.parametrize(
    "content, received",
    [
        ("[1, 2]", "record.json .* lacks task, arm, seed, metric, metrics"),
        ('{"task": "ner", "arm": "elmo", "seed": 1}', "lacks metric, metrics"),
        (json.dumps(RECORDS[0] | {"metric": "recall"}), r"no recall on test.*f1"),
    ],
)
def test_reading_a_broken_record(tmp_path, content, received):
    (tmp_path / "record.json").write_text(content, "utf-8")
    with refused(received):
        read_record(tmp_path / "record.json")
