import pytest
from golden import check_golden
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
