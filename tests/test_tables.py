import json
import re

import pytest
from task_records import RECORDS, record

from modeling_elmo.run_scripts.cards.tables import (
    best_record,
    error_reduction,
    mean_layer_weights,
    read_record,
    score_table,
    summary_table,
    type_table,
    write_results,
)


def cells(text: str) -> list[list[str]]:
    header, rule, *rows = text.splitlines()
    assert re.fullmatch(r"\| -{3,} \|( -{2,}: \|)+", rule)
    assert len({len(line) for line in (header, rule, *rows)}) == 1, "columns are aligned"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in (header, *rows)]


REPORT = """# ner

Task `ner`: f1, in percent; mean ± sample standard deviation over the runs, one per seed.

| network  | runs |   validation |         test | gain on test (points / share of errors) |
| -------- | ---: | -----------: | -----------: | --------------------------------------: |
| baseline |    2 | 41.00 ± 1.41 | 32.00 ± 2.83 |                                         |
| elmo     |    3 | 53.00 ± 2.65 | 46.00 ± 3.46 |                          +14.00 / 20.6% |

Gain over `baseline`: the difference, and the share of its errors that is gone.

## Layer weights

Softmax-normalized, mean over the runs.

| layer       | input |
| ----------- | ----: |
| token layer | 0.300 |
| biLSTM 1    | 0.400 |
| biLSTM 2    | 0.300 |

## By type

F1 on test, in percent, mean over the runs.

| type | number | baseline |  elmo |
| ---- | -----: | -------: | ----: |
| PER  |      7 |    32.00 | 46.00 |

## Runs

| network  | seed | validation |  test | train samples | epochs | seconds |
| -------- | ---: | ---------: | ----: | ------------: | -----: | ------: |
| baseline |    1 |      40.00 | 30.00 |         3,394 |    7.0 |      81 |
| elmo     |    1 |      50.00 | 42.00 |         3,394 |    7.0 |      81 |
| baseline |    2 |      42.00 | 34.00 |         3,394 |    7.0 |      81 |
| elmo     |    2 |      54.00 | 48.00 |         3,394 |    7.0 |      81 |
| elmo     |    3 |      55.00 | 48.00 |         3,394 |    7.0 |      81 |
"""


def test_results_are_written_whole(tmp_path):
    """0.206 of the errors are gone: (0.68 - 0.54) / 0.68."""
    assert write_results(tmp_path, RECORDS) == "ner"
    assert (tmp_path / "results" / "ner.md").read_text(encoding="utf-8") == REPORT
    assert json.loads((tmp_path / "results" / "ner.json").read_text(encoding="utf-8")) == {"records": RECORDS}
    before = {path: path.read_bytes() for path in (tmp_path / "results").iterdir()}
    with pytest.raises(TypeError):
        write_results(tmp_path, [{**RECORDS[0], "settings": {1, 2}}])
    assert {path: path.read_bytes() for path in (tmp_path / "results").iterdir()} == before


def test_a_record_may_lack_what_no_table_needs(tmp_path):
    """An ensemble's record does, because it was not trained."""
    needed = ("task", "arm", "seed", "metric", "metrics")
    ensemble = {name: RECORDS[0][name] for name in needed} | {"arm": "a|b", "settings": {"ensemble": ["c"]}}
    assert write_results(tmp_path, [ensemble], "layers") == "ner_layers_ensemble"
    text = (tmp_path / "results" / "ner_layers_ensemble.md").read_text(encoding="utf-8")
    assert cells(text.split("## Runs\n\n")[1].rstrip())[1] == ["a\\|b", "1", "40.00", "30.00", "", "", ""]
    assert "Layer weights" not in text


@pytest.mark.parametrize(
    "other, received",
    [
        (RECORDS[0], r"'baseline'.*\[1, 1\]"),
        (RECORDS[2] | {"metrics": {"validation": {"f1": 0.4, "accuracy": 0.9}}}, "'baseline'.*test f1, .*accuracy"),
    ],
)
def test_records_whose_mean_would_be_wrong(other, received):
    with pytest.raises(ValueError, match=received):
        summary_table([RECORDS[0], other])


@pytest.mark.parametrize(
    "task, baseline, value, published",
    [
        ("SQuAD", 81.1, 85.8, "24.9"),
        ("SNLI", 88.0, 88.7, "5.8"),
        ("SRL", 81.4, 84.6, "17.2"),
        ("Coref", 67.2, 70.4, "9.8"),
        ("NER", 90.15, 92.22, "21.0"),  # 21 in the paper
        ("SST-5", 51.4, 54.7, "6.8"),
    ],
)
def test_relative_increases_of_the_papers_first_table(task, baseline, value, published):
    assert error_reduction(baseline / 100, value / 100) == f"{published}%"


def pair(metric: str, baseline: float, elmo: float) -> list[dict]:
    return [record("baseline", 1, 0, baseline, metric=metric), record("elmo", 1, 0, elmo, metric=metric)]


SHARES = [("elmo@0.1", 0.4), ("elmo@1.0", 0.6), ("baseline@0.1", 0.2), ("baseline@1.0", 0.5), ("elmo@0.5", 0.5)]


@pytest.mark.parametrize(
    "records, gains",
    [
        ([record(arm, 1, 0.5, score) for arm, score in SHARES], ["+20.00 / 25.0%", "+10.00 / 20.0%", "", "", ""]),
        (pair("mse", 1.6, 1.2), ["", "+0.4000 / 25.0%"]),  # errors are better when lower
        (pair("pearson", -0.1, 0.2), ["", "+30.00"]),  # below 0 there is no share of errors
        ([RECORDS[0], RECORDS[1] | {"metrics": {"validation": {"f1": 0.5}}}], ["", ""]),  # a split that an arm lacks
    ],
)
def test_gains(records, gains):
    assert [row[-1] for row in cells(summary_table(records))[1:]] == gains


def test_layer_weights_are_means_over_seeds():
    both = {"input": [1, 0, 0], "output": [0, 0, 1]}
    several = [record("a", 1, 0, 0, layer_weights=both), record("b", 1, 0, 0, layer_weights=both)]
    assert list(mean_layer_weights(several)) == ["a, input", "a, output", "b, input", "b, output"]
    assert list(mean_layer_weights([record("a", 1, 0, 0), record("b", 1, 0, 0)])) == ["a", "b"]


def test_table_of_types_and_of_all_scores():
    labels = {"test": {"f1": 0.5, "per_label": {"a": {"f1": 1.0, "number": 1234}, "b": {"f1": 0.0, "number": 0}}}}
    other = {"test": {"f1": 0.5, "per_label": {"a": {"f1": 0.25, "number": 1234}}}}
    records = [record("one", 1, 0, 0, metrics=labels), record("other", 1, 0, 0, metrics=other)]
    assert cells(type_table(records))[1:] == [["a", "1,234", "100.00", "25.00"], ["b", "0", "0.00", ""]]
    assert type_table([record("one", 1, 0, 0, metrics={"test": {"pearson": 0.5}})]) == ""
    scores = [{"f1": f1, "exact_match": exact, "mse": 2.0, "per_type": {}} for f1, exact in ((0.5, 0.25), (0.7, 0.75))]
    metrics = [{"test": each, "validation": {"f1": 0}} for each in scores]
    assert cells(score_table([record("elmo", seed, 0, 0, metrics=each) for seed, each in enumerate(metrics)])) == [
        ["network, on test", "f1", "exact match", "mse"],
        ["elmo", "60.00 ± 14.14", "50.00 ± 35.36", "2.0000 ± 0.0000"],
    ]
    assert score_table(RECORDS) == ""


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
    (tmp_path / "record.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=received):
        read_record(tmp_path / "record.json")
