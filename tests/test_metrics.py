"""Scores equal figures computed by hand, and independent references where the definition is ours."""

import json
import random

import numpy as np
import pytest

from modeling_elmo.run_scripts.cards.tables import rate_cell
from modeling_elmo.run_scripts.fine_tuning.metrics import (
    answer_scores,
    classification_scores,
    marks_entities,
    multilabel_scores,
    normalized_answer,
    regression_scores,
    tagging_scores,
)


def test_bilou_is_read_as_seqevals_strict_scheme_reads_it():
    from seqeval.metrics import f1_score, precision_score, recall_score
    from seqeval.scheme import BILOU

    def tags(rng: random.Random) -> list[str]:
        spans = [[], ["O"], ["U-A"], ["U-B"], ["B-A", "L-A"], ["B-B", "I-B", "L-B"]]
        return [tag for span in rng.choices(spans, k=6) for tag in span] + ["O"] * 18

    rng = random.Random(3)
    options = {"mode": "strict", "scheme": BILOU, "zero_division": 0}
    for _ in range(100):
        gold, predicted = ([tags(rng)[:18] for _ in range(4)] for _ in range(2))
        found = tagging_scores(predicted, gold)
        assert found["precision"] == pytest.approx(precision_score(gold, predicted, **options))
        assert found["recall"] == pytest.approx(recall_score(gold, predicted, **options))
        assert found["f1"] == pytest.approx(f1_score(gold, predicted, **options))


@pytest.mark.parametrize(
    "tags, bio",
    [
        ("I-A I-A O I-A", "B-A I-A O B-A"),  # IOB1
        ("B-A I-B I-B", "B-A B-B I-B"),  # the type changes
        ("B-a-b I-a-b I-b", "B-a-b I-a-b B-b"),
        ("B-A E-A S-A S-B", "B-A I-A B-A B-B"),  # IOBES
        ("E-A E-A I-A", "B-A B-A B-A"),
        ("U-A U-A B-A L-A I-A L-A", "B-A B-A B-A I-A B-A I-A"),  # BILOU
        ("B-A M-A M-A E-A S-A", "B-A I-A I-A I-A B-A"),  # BMES
        ("B M E S O I", "B I I B O B"),  # no types
    ],
)
def test_entities_of_other_schemes_and_odd_sequences(tags, bio):
    found = tagging_scores([tags.split()], [bio.split()])
    assert found["f1"] == 1.0
    assert sum(rates["number"] for rates in found["per_type"].values()) == sum(tag[0] == "B" for tag in bio.split())


def test_tagging_scores_by_hand():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC"]]
    predicted = [["B-PER", "I-PER", "B-LOC", "O"], ["O", "I-LOC"]]  # PER; LOC moved; LOC though it starts with I
    assert tagging_scores(predicted, gold) == {
        "precision": pytest.approx(2 / 3),
        "recall": pytest.approx(2 / 3),
        "f1": pytest.approx(2 / 3),
        "accuracy": pytest.approx(3 / 6),
        "per_type": {
            "LOC": {"precision": 0.5, "recall": 0.5, "f1": 0.5, "number": 2},
            "PER": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "number": 1},
        },
    }


def test_without_entities_the_rates_are_zero():
    assert tagging_scores([["B-A"], ["I-A"]], [["B-A"], ["I-A"]])["per_type"]["A"]["number"] == 2  # not one entity
    nothing = {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert tagging_scores([["O", "O"], []], [["O", "O"], []]) == {**nothing, "accuracy": 1.0, "per_type": {}}
    spurious = tagging_scores([["O", "S-A"]], [["O", "O"]])
    assert spurious == {**nothing, "accuracy": 0.5, "per_type": {"A": {**nothing, "number": 0}}}


def test_parts_of_speech_are_scored_by_tag():
    found = tagging_scores([["DT", "NN", "NN"], ["JJ", "B-X"]], [["DT", "NN", "VB"], ["NN", "B-X"]])
    f1 = {"DT": 1, "NN": 0.5, "VB": 0, "JJ": 0, "B-X": 1}
    assert found.keys() == {"accuracy", "macro_f1", "per_type"}
    assert (found["accuracy"], found["macro_f1"]) == (3 / 5, pytest.approx(2.5 / 5))
    assert {tag: rates["f1"] for tag, rates in found["per_type"].items()} == f1
    assert found["per_type"]["NN"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "number": 2}


@pytest.mark.parametrize(
    "tags, expected",
    [
        ("O", True),
        ("S-X E-X U-X L-X M-X B-a-b O", True),
        ("B M E S", True),
        (". , DT", False),
        ("B- B-A", False),
    ],
)
def test_which_tags_mark_entities(tags, expected):
    assert marks_entities(tags.split()) is expected
    row = [tags.split()]
    assert ("f1" in tagging_scores(row, row)) is expected
    for said in (True, False):
        assert ("f1" in tagging_scores(row, row, are_entities=said)) is said


def test_classification_scores_by_hand():
    found = classification_scores([0, 0, 1, 1], [0, 1, 1, 1], ["no", "yes", "never"])
    assert found == {
        "accuracy": 0.75,
        "macro_f1": pytest.approx((2 / 3 + 4 / 5) / 2),  # without "never", which does not occur
        "per_label": {
            "no": {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "number": 1},
            "yes": {"precision": 1.0, "recall": pytest.approx(2 / 3), "f1": pytest.approx(4 / 5), "number": 3},
            "never": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "number": 0},
        },
        "confusion": [[1, 0, 0], [1, 2, 0], [0, 0, 0]],
    }
    assert json.loads(json.dumps(found)) == found


def test_the_number_of_a_class_is_whole_where_nothing_is_right():
    wrong = {"precision": 0.0, "recall": 0.0, "f1": 0.0, "number": 1}
    found = classification_scores([1, 0], [0, 1], ["no", "yes"])
    assert found["per_label"] == {"no": wrong, "yes": wrong}
    assert rate_cell(found["per_label"]["no"], "number") == "1"


def test_multilabel_scores_by_hand():
    found = multilabel_scores(
        [[1, 0, 0], [1, 1, 0]], np.array([[True, False, False], [False, True, False]]), ["a", "b", "c"]
    )
    assert found["micro_f1"] == pytest.approx(4 / 5)
    assert (found["micro_precision"], found["micro_recall"]) == (pytest.approx(2 / 3), 1.0)
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found["subset_accuracy"] == 0.5
    assert found["per_label"]["a"] == {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "number": 1}
    assert json.loads(json.dumps(found)) == found


def test_multilabel_scores_of_a_single_label():
    """scikit-learn takes a single column for two classes."""
    found = multilabel_scores([[1], [1], [0], [0]], [[1], [0], [0], [1]], ["a"])
    rates = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "number": 2}
    micro = {"micro_precision": 0.5, "micro_recall": 0.5, "micro_f1": 0.5}
    assert found == {**micro, "macro_f1": 0.5, "subset_accuracy": 0.5, "per_label": {"a": rates}}


def test_regression_scores_by_hand():
    found = regression_scores([1, 2, 3, 4], [1, 4, 9, 16])
    assert found["spearman"] == pytest.approx(1.0)
    assert found["pearson"] == pytest.approx(25 / np.sqrt(5 * 129))
    assert found["mse"] == pytest.approx((0 + 4 + 36 + 144) / 4)
    constant = regression_scores([0.1, 0.1, 0.1], [1, 2, 3])
    assert constant == {"pearson": 0.0, "spearman": 0.0, "mse": pytest.approx((0.81 + 3.61 + 8.41) / 3)}
    with pytest.raises(ValueError, match="not finite"):
        regression_scores([1, float("nan")], [1, 2])


@pytest.mark.parametrize(
    "answer, expected",
    [
        ("SEINE", "seine"),
        ("  the \t Eiffel\n\u00a0Tower ", "eiffel tower"),
        ("The apple, an egg; a pear", "apple egg pear"),
        ("theatre of Anna", "theatre of anna"),
        ("U.S.A.", "usa"),
        ("the_end", "theend"),  # punctuation is removed first, so that `the` is no word
        ("«Île»", "«île»"),  # only ASCII punctuation is removed
        ("The... a", ""),
    ],
)
def test_answers_are_compared_without_case_punctuation_articles_and_spaces(answer, expected):
    assert normalized_answer(answer) == expected
    assert answer_scores([answer], [[f"{expected} x"]])["exact_match"] == 0
    assert answer_scores([f"x {answer}"], [[f"x {expected}"]]) == {"f1": 1.0, "exact_match": 1.0}


def test_word_f1_of_the_closest_answer():
    """2 of 3 words and 2 of 2 are in common with the first. torchmetrics computes the rest, below."""
    answers = ["Paris", "the city of Paris", "Rouen"]
    assert answer_scores(["city Paris"], [answers]) == {"f1": pytest.approx(4 / 5), "exact_match": 0.0}


def test_answers_that_normalize_to_nothing():
    """They match exactly, but share no words. SQuAD 2.0 ignores such gold answers."""
    assert answer_scores([""], [["The"]]) == {"f1": 0.0, "exact_match": 1.0}
    second = answer_scores(["", "", "an", ""], [["The", "Seine"], ["The"], ["A"], []])
    assert (second["has_answer_f1"], second["has_answer_exact_match"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))


def test_questions_without_an_answer():
    predicted = ["", "the", "Seine", "Seine", "old Seine", ""]
    gold = [[], [], [], ["Seine"], ["the Seine"], ["Seine"]]
    assert answer_scores(predicted, gold) == {
        "f1": pytest.approx((1 + 1 + 0 + 1 + 2 / 3 + 0) / 6),
        "exact_match": pytest.approx(3 / 6),
        "has_answer_f1": pytest.approx((1 + 2 / 3 + 0) / 3),
        "has_answer_exact_match": pytest.approx(1 / 3),
        "no_answer_accuracy": pytest.approx(2 / 3),
    }
    assert answer_scores(["", "x"], [[], []], ["why", "who"]) == {
        **{"f1": 0.5, "exact_match": 0.5, "no_answer_accuracy": 0.5},
        "per_type": {
            "who": {"f1": 0.0, "exact_match": 0.0, "number": 1},
            "why": {"f1": 1.0, "exact_match": 1.0, "number": 1},
        },
    }


@pytest.mark.parametrize("is_squad_2", [False, True])
def test_answer_scores_are_those_of_torchmetrics(is_squad_2):
    from torchmetrics.functional.text import squad

    rng = random.Random(5)

    def text() -> str:
        words = ["the", "An", "--", "of", "Seine", "seine,", "Île", "U.S.", "us"]
        return " ".join(rng.choices(words, k=rng.randint(0, 4)))

    for size in (1, 7, 60):
        predicted = [text() for _ in range(size)]
        # Each answer has a word, since torchmetrics reads answers without one as neither version of SQuAD does.
        gold = [[f"{text()} Seine" for _ in range(rng.randint(1, 3))] for _ in range(size)]
        if is_squad_2:
            gold = [[], *(answers if rng.random() < 0.6 else [] for answers in gold[1:])]
        found = answer_scores(predicted, gold)
        theirs = squad(
            [{"id": str(number), "prediction_text": answer} for number, answer in enumerate(predicted)],
            [{"id": str(number), "answers": {"text": answers or [""]}} for number, answers in enumerate(gold)],
        )
        for name, percentage in theirs.items():
            assert found[name] == pytest.approx(percentage.item() / 100, rel=1e-5)
