"""Scores of roles: each rule by hand, and figures of the published script."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from task_worker import TASKS

from modeling_elmo.run_scripts.fine_tuning.tasks.role_data import role_rows
from modeling_elmo.run_scripts.fine_tuning.tasks.role_scores import predicate_scores, role_arguments, role_scores


def scored(predicted: str, gold: str) -> tuple[float, float, float]:
    scores = role_scores([predicted.split()], [gold.split()])
    return scores["precision"], scores["recall"], scores["span_f1"]


@pytest.mark.parametrize(
    "tags, arguments",
    [
        ("B-A0 I-A0 O B-V", [("A0", (0, 2)), ("V", (3, 4))]),
        ("B-A0 B-A0", [("A0", (0, 1)), ("A0", (1, 2))]),
        ("B-A1 O B-C-A1 B-C-A1", [("A1", (0, 1), (2, 3), (3, 4))]),
        ("B-A1 B-A0 B-C-A1", [("A1", (0, 1), (2, 3)), ("A0", (1, 2))]),
        ("B-A1 O B-A1 O B-C-A1", [("A1", (0, 1)), ("A1", (2, 3), (4, 5))]),  # of the last A1
        ("B-C-A1 O B-C-A1 B-A1", [("A1", (0, 1), (2, 3)), ("A1", (3, 4))]),  # nothing to continue: it is A1
        ("B-V B-C-V B-R-A0", [("V", (0, 1), (1, 2)), ("R-A0", (2, 3))]),
        ("B-R-A1 B-C-A1", [("R-A1", (0, 1)), ("A1", (1, 2))]),
        ("I-A0 I-A0 I-A1 O I-A1", [("A0", (0, 2)), ("A1", (2, 3)), ("A1", (4, 5))]),  # no BIO sequence
        ("O O", []),
        ("", []),
    ],
)
def test_arguments(tags, arguments):
    assert role_arguments(tags.split()) == [(role, tuple(spans)) for role, *spans in arguments]


@pytest.mark.parametrize(
    "predicted, gold, expected",
    [
        ("B-A0 B-V B-A1", "B-A0 B-V B-A1", (1, 1, 1)),
        ("B-A0 B-V O", "B-A0 O B-V", (1, 1, 1)),  # V is not scored
        ("B-A0 B-V B-C-V", "B-A0 B-V O", (1, 1, 1)),  # nor is C-V
        ("B-A0 O B-C-V", "B-A0 B-V O", (1, 1, 1)),
        ("B-A0 I-A0 B-V", "B-A0 B-V O", (0, 0, 0)),  # all words
        ("B-A0 B-V B-A0", "B-A0 B-V B-A1", (0.5, 0.5, 0.5)),
        ("B-A1 B-V B-C-A1", "B-A1 B-V B-C-A1", (1, 1, 1)),  # one argument
        ("B-A1 B-V O", "B-A1 B-V B-C-A1", (0, 0, 2 / 3)),  # a piece is missing
        ("B-A1 B-V B-C-A1 O", "B-A1 B-V B-C-A1 I-C-A1", (0, 0, 0.5)),  # a piece is shorter
        ("B-A1 I-A1", "B-A1 B-C-A1", (0, 0, 0)),  # the same words in other pieces
        ("B-C-A1 B-V", "B-A1 B-V", (1, 1, 0)),  # C-X without an X
        ("B-A1 B-V B-A1", "B-A1 B-V B-C-A1", (0, 0, 0.5)),
        ("B-R-A0 B-V", "B-A0 B-V", (0, 0, 0)),  # R-X is a role of its own
        ("B-R-A0 B-V B-A0", "B-R-A0 B-V B-A0", (1, 1, 1)),
        ("O B-V", "O B-V", (0, 0, 0)),
        ("B-A0 B-V", "O B-V", (0, 0, 0)),
    ],
)
def test_rules_by_hand(predicted, gold, expected):
    assert scored(predicted, gold) == pytest.approx(expected)


def test_all_scores_by_hand():
    gold = ["B-ARG0 B-V B-ARG1 O", "B-V B-ARG1 B-R-ARG1 B-C-ARG1", "B-V B-ARG0 O O", "B-V O O O"]
    predicted = ["B-ARG0 B-V B-ARG2 O", "B-V B-ARG1 B-R-ARG1 B-C-ARG1", "B-V O B-ARG0 O", "O O O B-ARG1"]
    split = [[tags.split() for tags in side] for side in (predicted, gold)]
    half = {"precision": 0.5, "recall": 0.5, "f1": 0.5}
    assert role_scores(*split, kinds=["verb", "noun", "verb", ""]) == {
        "precision": pytest.approx(3 / 6),
        "recall": pytest.approx(3 / 5),
        "f1": pytest.approx(6 / 11),
        "span_f1": pytest.approx(8 / 13),
        "per_type": {
            "ARG0": half | {"number": 2},
            "ARG1": half | {"number": 2},
            "ARG2": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "number": 0},
            "R-ARG1": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "number": 1},
        },
        "noun_f1": 1.0,
        "verb_f1": pytest.approx(2 / 6),
        "per_kind": {
            "noun": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "number": 2},
            "verb": {"precision": pytest.approx(1 / 3), "recall": pytest.approx(1 / 3), "f1": 1 / 3, "number": 3},
        },
    }
    assert {"per_kind", "verb_f1"}.isdisjoint(role_scores(*split))


def test_equal_arguments_of_different_predicates_are_different():
    tags = ["B-A0", "B-V"]
    assert role_scores([tags, tags], [tags, ["O", "B-V"]])["precision"] == 0.5


def test_the_predicates_must_be_as_many():
    with pytest.raises(ValueError, match="\\[2, 1, 1\\] predicates"):
        role_scores([["O"], ["O"]], [["O"]])
    with pytest.raises(ValueError, match="\\[1, 1, 2\\] predicates"):
        role_scores([["O"]], [["O"]], ["verb", "noun"])


def test_without_arguments_the_rates_are_zero():
    nothing = {"precision": 0.0, "recall": 0.0, "f1": 0.0, "span_f1": 0.0, "per_type": {}}
    assert role_scores([["B-V"]], [["B-V"]]) == role_scores([], []) == nothing


def test_predicates_by_hand():
    found, gold = [[0, 3], [], [1]], [[0, 2], [4], [1, 1]]
    scores = {"predicate_precision": 2 / 3, "predicate_recall": 2 / 4, "predicate_f1": 4 / 7}
    assert predicate_scores(found, gold) == pytest.approx(scores)
    assert predicate_scores([[]], [[]]) == dict.fromkeys(scores, 0.0)


def changed_tags(tags: Sequence[str], known: Sequence[str], share: float, chance: random.Random) -> list[str]:
    return [chance.choice(known) if chance.random() < share else tag for tag in tags]


@pytest.mark.parametrize(
    "name, share, right, excess, missed",
    [("train", 0.1, 169, 110, 38), ("dev", 0.05, 64, 18, 5), ("test", 0.02, 54, 8, 3)],
)
def test_figures_of_the_published_script(name, share, right, excess, missed):
    """`srl-eval.pl` (version of 2005/04/21) counted these arguments of the sample with changed tags."""
    gold = [tags for _, row in role_rows(Path(TASKS, f"propbank_{name}.tsv")) for tags in row["predicate_tags"]]
    known, chance = sorted({tag for tags in gold for tag in tags}), random.Random(name)
    predicted = [changed_tags(tags, known, share, chance) for tags in gold]
    scores = role_scores(predicted, gold)
    assert scores["precision"] == pytest.approx(right / (right + excess))
    assert scores["recall"] == pytest.approx(right / (right + missed))
    assert scores["f1"] == pytest.approx(2 * right / (2 * right + excess + missed))
    assert sum(rates["number"] for rates in scores["per_type"].values()) == right + missed
