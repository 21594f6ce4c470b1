import random

import numpy as np
import pytest
import seqeval.metrics
import sklearn.metrics
from golden import check_golden
from run_records import RECORDS, record

from modeling_elmo.run_scripts.cards.tables import (
    average_rates,
    class_rates,
    class_table,
    error_reduction,
    finding,
    score_table,
    summary_table,
    type_table,
)
from modeling_elmo.run_scripts.fine_tuning.metrics import classification_scores, multilabel_scores, tagging_scores


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


def test_tables():
    """One golden file: gains, types and scores.

    Errors are better when lower; a score below 0 has no share of errors; a split or type that an arm lacks is empty.
    """
    labels = {"test": {"f1": 0.5, "per_label": {"a": {"f1": 1.0, "number": 1234}, "b": {"f1": 0.0, "number": 0}}}}
    other = {"test": {"f1": 0.5, "per_label": {"a": {"f1": 0.25, "number": 1234}}}}
    scores = [{"f1": f1, "exact_match": exact, "mse": 2.0, "per_type": {}} for f1, exact in ((0.5, 0.25), (0.7, 0.75))]
    metrics = [{"test": each, "validation": {"f1": 0}} for each in scores]
    tables = [
        summary_table([record(arm, 1, 0.5, score) for arm, score in SHARES]),
        summary_table(pair("mse", 1.6, 1.2)),
        summary_table(pair("pearson", -0.1, 0.2)),
        summary_table([RECORDS[0], RECORDS[1] | {"metrics": {"validation": {"f1": 0.5}}}]),
        type_table([record("one", 1, 0, 0, metrics=labels), record("other", 1, 0, 0, metrics=other)]),
        score_table([record("elmo", seed, 0, 0, metrics=each) for seed, each in enumerate(metrics)]),
    ]
    check_golden("\n\n".join(tables) + "\n", "pages/tables.md")
    assert score_table(RECORDS) == type_table([record("one", 1, 0, 0, metrics={"test": {"pearson": 0.5}})]) == ""


# Classes


def assert_report(scores: dict, report: dict):
    """Compares rates and averages with a report of seqeval or scikit-learn."""
    found = class_rates(scores) | {f"{name} avg": rates for name, rates in average_rates(scores).items()}
    expected = {name: rates for name, rates in report.items() if name not in ("accuracy", "samples avg")}
    assert found.keys() == expected.keys()
    for name, rates in expected.items():
        ours = {"f1-score" if key == "f1" else key: value for key, value in found[name].items()}
        ours["support"] = ours.pop("number")
        assert ours == pytest.approx(rates), name


def test_rates_and_averages_are_those_of_the_libraries():
    """Gold labels that are never predicted, predicted ones that are never gold, and entities with broken tags."""
    rng = random.Random(1)
    options = {"output_dict": True, "zero_division": 0}
    for _ in range(20):
        gold = [rng.choices(["O", "B-A", "I-A", "B-B", "I-B", "B-C"], k=12) for _ in range(3)]
        predicted = [rng.choices(["O", "B-A", "I-A", "B-B", "B-D"], k=12) for _ in range(3)]
        assert_report(
            tagging_scores(predicted, gold), seqeval.metrics.classification_report(gold, predicted, **options)
        )
        tags = [tag for sentence in gold for tag in sentence], [tag for sentence in predicted for tag in sentence]
        report = sklearn.metrics.classification_report(*tags, **options)
        assert_report(tagging_scores(predicted, gold, are_entities=False), report)
        names = ["a", "b", "c", "never"]
        ids = rng.choices(range(2), k=9), rng.choices((0, 2), k=9)
        report = sklearn.metrics.classification_report(*ids, **options)
        report = {names[int(name)] if name.isdecimal() else name: rates for name, rates in report.items()}
        nothing = {"precision": 0, "recall": 0, "f1-score": 0, "support": 0}
        assert_report(classification_scores(*ids[::-1], names), {**dict.fromkeys(names, nothing), **report})
        several = np.array(rng.choices([0, 1], k=24)).reshape(2, 4, 3)
        report = sklearn.metrics.classification_report(*several, target_names=names[:3], **options)
        assert_report(multilabel_scores(several[1], several[0], names[:3]), report)


def test_tables_of_classes():
    """One golden file: entities, answers, coreference. Of many labels, the most frequent are shown."""
    gold = [["B-PER", "I-PER", "O", "B-LOC", "B-|"]]
    many = classification_scores(
        [0] * 1500, [0] * 1395 + list(range(105)), [f"label {number}" for number in range(105)]
    )
    answers = {"f1": 0.75, "exact_match": 0.5, "per_type": {"who": {"f1": 0.75, "exact_match": 0.5, "number": 2}}}
    ways = {}
    for way, share in (("with_singletons", 0.25), ("without_singletons", 0.5)):
        names = [
            f"{name}_{rate}" for name in ("muc", "b_cubed", "ceaf", "mention") for rate in ("precision", "recall", "f1")
        ]
        ways[way] = dict.fromkeys(names, share)
    coreference = {"f1": 0.25, "f1_without_singletons": 0.5, **ways}
    tables = [
        class_table(tagging_scores([["B-PER", "I-PER", "B-LOC", "O", "O"]], gold)),
        class_table(answers),
        class_table(coreference),
    ]
    check_golden("\n\n".join(tables) + "\n", "pages/classes.md")
    assert class_table(many).count("\n| label ") == 100 and class_table(many).endswith(
        "\n\n5 rarer classes are not shown."
    )
    assert class_table({"pearson": 0.5, "mse": 2.0}) == ""


def test_what_was_found_in_words():
    labels = classification_scores([0, 0, 0, 1], [0, 0, 1, 2], ["no", "yes", "odd"])
    told = (
        "On test, accuracy is 50.00; always answering 'no' would give 50.00. 2 of 3 classes are never right: yes, odd."
    )
    assert finding(labels, "accuracy", "test") == told
    entities = tagging_scores([["B-PER", "O"]], [["B-PER", "B-LOC"]])
    assert finding(entities, "f1", "a.conll") == "On a.conll, f1 is 66.67. 1 of 2 classes is never right: LOC."
    assert finding({"pearson": 0.5, "mse": 2.0}, "pearson", "test") == "On test, pearson is 50.00."
