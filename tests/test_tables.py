import json
import re
import statistics

import numpy as np
import pytest

from modeling_elmo.run_scripts.cards.tables import (
    ArmSummary,
    best_record,
    mean_layer_weights,
    read_record,
    relative_error_reduction,
    score_table,
    sense_table,
    summarize,
    summary_table,
    type_table,
    write_results,
)


def record(
    arm: str, seed: int, validation: float, test: float, weights=(0.2, 0.5, 0.3), metric="f1", **changes
) -> dict:
    return {
        "task": "ner",
        "arm": arm,
        "seed": seed,
        "metric": metric,
        "metrics": {
            "test": {metric: test, "per_type": {"PER": {"f1": test, "number": 7}}, "confusion": [[1]]},
            "validation": {metric: validation, "per_type": {}, "confusion": [[2]]},
        },
        "layer_weights": {"input": list(weights)} if weights else {},
        "train_samples": 3394,
        "epochs": 7.0,
        "seconds": 81.2,
        "settings": {"learning_rate": 0.001},
        **changes,
    }


RECORDS = [
    record("baseline", 1, 0.40, 0.30, weights=None),
    record("elmo", 1, 0.50, 0.42, weights=(0.2, 0.5, 0.3)),
    record("baseline", 2, 0.42, 0.34, weights=None),
    record("elmo", 2, 0.54, 0.48, weights=(0.4, 0.4, 0.2)),
    record("elmo", 3, 0.55, 0.48, weights=(0.3, 0.3, 0.4)),
]


def cells(text: str) -> list[list[str]]:
    header, rule, *rows = text.splitlines()
    assert re.fullmatch(r"\| -{3,} \|( -{2,}: \|)+", rule)
    assert len({len(line) for line in (header, rule, *rows)}) == 1, "columns are aligned"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in (header, *rows)]


def test_mean_and_deviation_of_each_arm():
    baseline, elmo = summarize(RECORDS)
    assert (baseline.arm, baseline.seeds, elmo.arm, elmo.seeds) == ("baseline", [1, 2], "elmo", [1, 2, 3])
    for summary, split, values in (
        (baseline, "validation", [0.40, 0.42]),
        (baseline, "test", [0.30, 0.34]),
        (elmo, "validation", [0.50, 0.54, 0.55]),
        (elmo, "test", [0.42, 0.48, 0.48]),
    ):
        assert summary.mean[split] == {"f1": pytest.approx(statistics.mean(values))}
        assert summary.deviation[split] == {"f1": pytest.approx(statistics.stdev(values))}
    assert list(elmo.mean) == ["validation", "test"]  # whatever the order in the file
    (single,) = summarize(RECORDS[:1])
    assert single.deviation == {"validation": {"f1": 0.0}, "test": {"f1": 0.0}}


@pytest.mark.parametrize(
    "other, message",
    [
        (RECORDS[0], "Arm 'baseline' has the seeds [1, 1]; pass one record for each seed"),
        (
            {**RECORDS[2], "metrics": {"validation": {"f1": 0.4, "accuracy": 0.9}}},
            "only one of the seeds 1 and 2 has test f1, validation accuracy; pass records of equal runs",
        ),
    ],
)
def test_records_that_cannot_be_summarized(other, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        summarize([RECORDS[0], other])


@pytest.mark.parametrize(
    "name, baseline, value, published",
    [
        ("SQuAD", 81.1, 85.8, 24.9),
        ("SNLI", 88.0, 88.7, 5.8),
        ("SRL", 81.4, 84.6, 17.2),
        ("Coref", 67.2, 70.4, 9.8),
        ("NER", 90.15, 92.22, 21),
        ("SST-5", 51.4, 54.7, 6.8),
    ],
)
def test_relative_increases_of_the_papers_first_table(name, baseline, value, published):
    found = 100 * relative_error_reduction(baseline / 100, value / 100)
    digits = 1 if isinstance(published, float) else 0
    assert round(found, digits) == published


def test_table_in_percent():
    assert cells(summary_table(summarize(RECORDS), "f1")) == [
        ["network", "runs", "validation", "test"],
        ["baseline", "2", "41.00 ± 1.41", "32.00 ± 2.83"],
        ["elmo", "3", "53.00 ± 2.65", "46.00 ± 3.46"],
    ]
    assert cells(summary_table(summarize(RECORDS[:1]), "f1"))[1] == ["baseline", "1", "40.00", "30.00"]


def test_table_with_the_gain_over_a_baseline():
    header, *rows = cells(summary_table(summarize(RECORDS), "f1", baseline="baseline"))
    assert header[-1] == "gain on test (points / share of errors)"
    assert [row[-1] for row in rows] == ["", "+14.00 / 20.6%"]  # (0.68 - 0.54) / 0.68
    worse = cells(summary_table(summarize(RECORDS), "f1", baseline="elmo"))
    assert [row[-1] for row in worse[1:]] == ["-14.00 / -25.9%", ""]


def test_arms_with_a_share_of_the_data_have_a_baseline_with_the_same():
    records = [
        record(f"{family}@{share}", 1, 0.5, score)
        for family, share, score in (
            ("elmo", 0.1, 0.4),
            ("elmo", 1.0, 0.6),
            ("baseline", 0.1, 0.2),
            ("baseline", 1.0, 0.5),
        )
    ]
    gains = [row[-1] for row in cells(summary_table(summarize(records), "f1", baseline="baseline"))[1:]]
    assert gains == ["+20.00 / 25.0%", "+10.00 / 20.0%", "", ""]
    with pytest.raises(ValueError, match="no arm 'plain@0.1' to compare 'elmo@0.1' with; pass a baseline among"):
        summary_table(summarize(records), "f1", baseline="plain")


def test_errors_are_better_when_lower_and_no_percentages():
    records = [record("baseline", 1, 2.0, 1.6, metric="mse"), record("elmo", 1, 1.0, 1.2, metric="mse")]
    rows = cells(summary_table(summarize(records), "mse", baseline="baseline"))
    assert rows[1:] == [["baseline", "1", "2.0000", "1.6000", ""], ["elmo", "1", "1.0000", "1.2000", "+0.4000 / 25.0%"]]


def test_a_correlation_below_zero_has_no_relative_gain():
    records = [record("baseline", 1, 0, -0.1, metric="pearson"), record("elmo", 1, 0, 0.2, metric="pearson")]
    assert cells(summary_table(summarize(records), "pearson", baseline="baseline"))[2][-1] == "+30.00"


def test_a_split_that_one_arm_lacks_is_empty():
    records = [RECORDS[0], {**RECORDS[1], "metrics": {"test": {"f1": 0.5}}}]
    assert cells(summary_table(summarize(records), "f1"))[2] == ["elmo", "1", "", "50.00"]


def test_odd_names_are_escaped():
    assert "a\\|b" in cells(summary_table(summarize([record("a|b", 1, 0.5, 0.5)]), "f1"))[1][0]


def test_layer_weights_are_means_over_seeds():
    assert mean_layer_weights(RECORDS[:1]) == {}
    found = mean_layer_weights(RECORDS)
    assert found.keys() == {"input"}
    np.testing.assert_allclose(found["input"], [0.3, 0.4, 0.3])
    both = {"input": [1, 0, 0], "output": [0, 0, 1]}
    several = [record("a", 1, 0, 0, layer_weights=both), record("b", 1, 0, 0, layer_weights=both)]
    assert list(mean_layer_weights(several)) == ["a, input", "a, output", "b, input", "b, output"]
    assert list(mean_layer_weights([record("a", 1, 0, 0), record("b", 1, 0, 0)])) == ["a", "b"]


def test_table_of_types_has_means_over_runs():
    assert cells(type_table(RECORDS)) == [
        ["type", "number", "baseline", "elmo"],
        ["PER", "7", "32.00", "46.00"],
    ]
    labels = {"test": {"f1": 0.5, "per_label": {"a": {"f1": 1.0, "number": 1234}, "b": {"f1": 0.0, "number": 0}}}}
    other = {"test": {"f1": 0.5, "per_label": {"a": {"f1": 0.25, "number": 1234}}}}
    records = [record("one", 1, 0, 0, metrics=labels), record("other", 1, 0, 0, metrics=other)]
    assert cells(type_table(records))[1:] == [["a", "1,234", "100.00", "25.00"], ["b", "0", "0.00", ""]]
    assert type_table([record("one", 1, 0, 0, metrics={"test": {"pearson": 0.5}})]) == ""


def test_table_of_all_scores():
    scores = [{"f1": f1, "exact_match": exact, "mse": 2.0, "per_type": {}} for f1, exact in ((0.5, 0.25), (0.7, 0.75))]
    records = [
        record("elmo", seed, 0, 0, metrics={"test": each, "validation": {"f1": 0}}) for seed, each in enumerate(scores)
    ]
    assert cells(score_table(summarize(records))) == [
        ["network, on test", "f1", "exact match", "mse"],
        ["elmo", "60.00 ± 14.14", "50.00 ± 35.36", "2.0000 ± 0.0000"],
    ]
    assert score_table(summarize(RECORDS)) == ""


def test_the_best_run_is_chosen_on_validation_data():
    assert best_record(RECORDS) == RECORDS[4]
    assert best_record([record("a", 1, 0.5, 0.1), record("a", 2, 0.4, 0.9)])["seed"] == 1
    tests = [{"test": {"f1": score}} for score in (0.1, 0.9)]
    assert best_record([record("a", seed, 0, 0, metrics=each) for seed, each in enumerate(tests)])["seed"] == 1


def test_results_are_written_whole(tmp_path, monkeypatch):
    write_results(tmp_path, "table", RECORDS, baseline="baseline")
    found = json.loads((tmp_path / "results" / "table.json").read_text(encoding="utf-8"))
    assert found["records"] == RECORDS
    assert [ArmSummary(**summary) for summary in found["summaries"]] == summarize(RECORDS)
    text = (tmp_path / "results" / "table.md").read_text(encoding="utf-8")
    assert text.startswith("# table\n\nTask `ner`: f1, in percent; mean ± sample standard deviation")
    assert summary_table(summarize(RECORDS), "f1", "baseline") in text
    assert ["biLSTM 1", "0.400"] in cells(text.split("over the runs.\n\n")[1].split("\n\n")[0])
    runs = cells(text.split("## Runs\n\n")[1].rstrip())
    assert runs[0] == ["network", "seed", "validation", "test", "train samples", "epochs", "seconds"]
    assert runs[2] == ["elmo", "1", "50.00", "42.00", "3,394", "7.0", "81"]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["table.json", "table.md"]


def test_a_failed_write_leaves_what_was_there(tmp_path):
    write_results(tmp_path, "table", RECORDS)
    before = {path: path.read_bytes() for path in (tmp_path / "results").iterdir()}
    with pytest.raises(TypeError):
        write_results(tmp_path, "table", [{**RECORDS[0], "settings": {1, 2}}])
    assert {path: path.read_bytes() for path in (tmp_path / "results").iterdir()} == before


def test_a_record_may_lack_what_no_table_needs(tmp_path):
    """An ensemble's record does, because it was not trained."""
    needed = ("task", "arm", "seed", "metric", "metrics")
    write_results(tmp_path, "ensemble", [{name: RECORDS[0][name] for name in needed}])
    text = (tmp_path / "results" / "ensemble.md").read_text(encoding="utf-8")
    assert cells(text.split("## Runs\n\n")[1].rstrip())[1] == ["baseline", "1", "40.00", "30.00", "", "", ""]
    assert "Layer weights" not in text


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"task": "ner", "arm"', "record.json is not JSON in UTF-8: .*Write it again"),
        (b"\xff\xfe\x00", "record.json is not JSON"),
        (b"[1, 2]", "is not the record of a run: it lacks task, arm, seed, metric, metrics. Pass a file of a"),
        (b'{"task": "ner", "arm": "elmo", "seed": 1}', "it lacks metric, metrics"),
        (
            b'{"task": "", "arm": "", "seed": 1, "metric": "f1", "metrics": {"test": {"accuracy": 1}}}',
            r"has no f1 on test, only \['accuracy'\]\. Run it again",
        ),
    ],
)
def test_reading_a_broken_record(tmp_path, content, message):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_record(path)


def test_table_of_word_senses():
    same = {"lemmas": 3, "instances": 8, "chance": 0.25, "token layer": 0.375}
    told = {"instances": 7, "unseen_lemmas": 0.125, "token layer": 0.625, "first sense": 0.75}
    assert cells(sense_table({"same_sense": same, "disambiguation": told})) == [
        ["", "same sense@1", "disambiguation"],
        ["chance", "25.0", ""],
        ["token layer", "37.5", "62.5"],
        ["first sense", "", "75.0"],
    ]
    assert cells(sense_table({"same_sense": same}))[0] == ["", "same sense@1"]
