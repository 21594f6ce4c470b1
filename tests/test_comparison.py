"""Items side by side, counts of errors, and the worst examples of each class."""

import random
from collections import Counter

import pytest

from modeling_elmo.run_scripts.fine_tuning.comparison import (
    MOST_EXAMPLES,
    Comparison,
    Errors,
    Item,
    Pair,
    Segment,
    View,
    compare_items,
    paired,
)
from modeling_elmo.run_scripts.fine_tuning.metrics import tagging_scores
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference import antecedents_of, mention_items
from modeling_elmo.run_scripts.fine_tuning.tasks.tagging import entity_items, tag_items

WORDS = ["Ann", "Lee", "met", "Bo", "in", "New", "York", "City"]


def entity(kind: str, first: int, end: int) -> Item:
    return Item(kind, ((first, end),), " ".join(WORDS[first:end]))


@pytest.mark.parametrize(
    "gold, predicted, expected",
    [
        ([("P", 0, 2)], [("P", 0, 2)], [("right", "P", "P", "Ann Lee")]),
        ([("P", 0, 2)], [("L", 0, 2)], [("other class", "P", "L", "Ann Lee")]),
        ([("P", 0, 2)], [("P", 0, 1)], [("other words", "P", "P", "Ann Lee")]),
        ([("P", 0, 2)], [("L", 1, 3)], [("other class and words", "P", "L", "Ann Lee")]),
        ([("P", 3, 4)], [], [("missed", "P", None, "Bo")]),
        ([], [("P", 3, 4)], [("invented", None, "P", "Bo")]),
        (  # the one with the same words first, then the one that shares most
            [("L", 4, 8), ("P", 0, 2)],
            [("L", 5, 6), ("P", 0, 2), ("L", 6, 8)],
            [
                ("right", "P", "P", "Ann Lee"),
                ("other words", "L", "L", "in New York City"),
                ("invented", None, "L", "New"),
            ],
        ),
    ],
)
def test_which_items_belong_together(gold, predicted, expected):
    sides = [[entity(*item) for item in side] for side in (gold, predicted)]
    assert paired(*sides) == [Pair(*pair) for pair in expected]


def test_pieces_of_an_argument_are_one_item():
    gold, predicted = Item("A1", ((0, 2), (5, 6)), "x"), Item("A1", ((0, 2),), "y")
    assert paired([gold], [predicted]) == [Pair("other words", "A1", "A1", "x")]
    assert paired([gold], [gold]) == [Pair("right", "A1", "A1", "x")]


def test_both_sides_as_a_person_reads_them():
    gold = entity_items(WORDS, ["B-P", "I-P", "O", "B-P", "O", "B-L", "I-L", "I-L"])
    predicted = entity_items(WORDS, ["B-P", "I-P", "O", "O", "O", "B-L", "I-L", "O"])
    comparison = compare_items(WORDS, gold, predicted)
    (view,) = comparison.views
    assert view.gold == [
        Segment("Ann Lee", "P", True),
        Segment("met", None, True),
        Segment("Bo", "P", False),
        Segment("in", None, True),
        Segment("New York City", "L", False),
    ]
    assert view.predicted == [
        Segment("Ann Lee", "P", True),
        Segment("met Bo in", None, True),
        Segment("New York", "L", False),
        Segment("City", None, True),
    ]
    assert comparison.severity == 2


def test_entities_are_counted_as_they_are_scored():
    """In tags of any order, also of broken entities."""
    rng = random.Random(4)
    for _ in range(50):
        gold, predicted = (
            [rng.choices(["O", "B-A", "I-A", "B-B", "I-B", "S-A", "E-B"], k=9) for _ in range(4)] for _ in range(2)
        )
        words = [str(number) for number in range(9)]
        counts = Counter()
        for sides in zip(gold, predicted, strict=True):
            counts.update(pair[:3] for pair in paired(*(entity_items(words, side) for side in sides)))
        for name, rates in tagging_scores(predicted, gold)["per_type"].items():
            right = counts["right", name, name]
            of_gold = sum(number for (_, kind, _), number in counts.items() if kind == name)
            of_predicted = sum(number for (_, _, kind), number in counts.items() if kind == name)
            assert of_gold == rates["number"] and right == pytest.approx(rates["recall"] * of_gold)
            assert right == pytest.approx(rates["precision"] * of_predicted)


def test_a_tag_is_an_item_of_one_word():
    assert paired(*(tag_items(["a", "b", "c"], [*tags, "Z"], [0, 1]) for tags in ("XY", "XZ"))) == [
        Pair("right", "X", "X", "a"),
        Pair("other class", "Y", "Z", "b"),
    ]


def test_mentions_refer_to_an_earlier_one_or_are_the_first():
    gold = [[0, 0, 0, 0], [0, 2, 2, 1], [1, 0, 0, 0], [1, 2, 2, 1], [1, 3, 3, 2]]
    predicted = [[0, 0, 0, 0], [1, 0, 0, 1], [1, 2, 2, 0], [1, 3, 3, 1]]
    assert antecedents_of(gold, singletons=False) == {
        (0, 0, 0): None,
        (0, 2, 2): None,
        (1, 0, 0): (0, 0, 0),
        (1, 2, 2): (0, 2, 2),
    }
    assert antecedents_of(gold, singletons=True)[1, 3, 3] is None
    clusters = {tuple(span): cluster for *span, cluster in gold}
    found = antecedents_of(predicted, singletons=True)
    second = {span: before for span, before in found.items() if span[0] == 1}
    names = [item.name for item in mention_items(["a", "b", "c", "d"], second, clusters)]
    assert names == ["first mention", "mention of another", "mention of another"]


# Counts


def comparison(kind: str, gold: str | None, predicted: str | None, severity: float, text: str = "") -> Comparison:
    return Comparison([Pair(kind, gold, predicted, text)], [View("", [], [])], severity)


def test_counts_and_the_most_frequent_texts():
    errors = Errors()
    for text in ["Bo"] * 3 + ["Al"] + [f"x{number}" for number in range(9)]:
        errors.add({}, comparison("missed", "P", None, 1, text))
    errors.add({}, comparison("right", "P", "P", 0, "Bo"))
    missed, right = errors.report()["confusions"]
    assert (missed["number"], missed["texts"][0], len(missed["texts"])) == (13, ["Bo", 3], 5)
    assert (right["kind"], right["number"], right["texts"]) == ("right", 1, [])


def test_the_worst_examples_of_each_class_are_kept(monkeypatch):
    errors = Errors()
    for number in range(1000):
        errors.add({"number": number}, comparison("other class", "often", "A", number % 100))
    errors.add({"number": 1000}, comparison("missed", "rare", None, 0.5))
    errors.add({"number": 1001}, comparison("right", "rare", "rare", 0))
    errors.add({"number": 1002}, compare_items(["nothing", "here"], [], []))
    numbers = [example["number"] for example in errors.report()["examples"]]
    worst = sorted(range(1000), key=lambda number: (-(number % 100), number))[:MOST_EXAMPLES]
    assert numbers == [*worst, 1000]
    monkeypatch.setattr("modeling_elmo.run_scripts.fine_tuning.comparison.MOST_EXAMPLES_IN_ALL", 3)
    assert [example["number"] for example in errors.report()["examples"]] == [99, 1000]
