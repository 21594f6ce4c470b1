import re

import pytest
from run_records import RECORDS, record

from modeling_elmo.run_scripts.cards.tables import error_reduction, score_table, summary_table, type_table


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


def cells(text: str) -> list[list[str]]:
    header, rule, *rows = text.splitlines()
    assert re.fullmatch(r"\| -{3,} \|( -{2,}: \|)+", rule)
    assert len({len(line) for line in (header, rule, *rows)}) == 1, "columns are aligned"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in (header, *rows)]


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
