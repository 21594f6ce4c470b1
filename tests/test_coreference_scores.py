"""Scores of coreference against examples by hand and against scorch."""

import json
import random
from pathlib import Path
from statistics import harmonic_mean

import pytest

from modeling_elmo.run_scripts.fine_tuning.tasks.coreference_data import conll_documents, document_row
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference_scores import coreference_scores

TASKS = Path(__file__).parent / "fixtures" / "tasks"
NAMES = {"muc": "muc", "b_cubed": "b_cubed", "ceaf": "ceaf_e"}  # ours, scorch's


def clusters(*words: str) -> list[list[tuple[int, int, int]]]:
    """A cluster for each string: a letter is a mention."""
    return [[(0, ord(letter), ord(letter)) for letter in word] for word in words]


def rates(scores: dict, name: str) -> tuple[float, float, float]:
    return tuple(scores[f"{name}_{rate}"] for rate in ("recall", "precision", "f1"))


def test_the_example_of_luo():
    """Luo (2005), figure 1: the two answers of Vilain et al. (1995) that MUC cannot tell apart."""
    gold = clusters("12345", "67", "89ABC")
    first, second = clusters("12345", "6789ABC"), clusters("1234589ABC", "67")
    for predicted, b_cubed, ceaf in ((first, 16 / 21, 0.733), (second, 7 / 12, 0.667)):
        found = coreference_scores([predicted], [gold], singletons=True)
        assert rates(found, "muc") == pytest.approx((1, 9 / 10, 18 / 19))
        assert found["b_cubed_precision"] == pytest.approx(b_cubed) and found["b_cubed_recall"] == 1
        assert found["ceaf_f1"] == pytest.approx(ceaf, abs=1e-3)
        assert rates(found, "mention") == (1, 1, 1)


def test_the_example_of_pradhan():
    """Pradhan et al. (2014), section 4: gold abc, defg; predicted ab, cd, fghi."""
    found = coreference_scores([clusters("ab", "cd", "fghi")], [clusters("abc", "defg")], singletons=True)
    assert rates(found, "muc") == pytest.approx((2 / 5, 2 / 5, 2 / 5))
    assert rates(found, "b_cubed") == pytest.approx((5 / 12, 1 / 2, 5 / 11))
    assert rates(found, "ceaf")[:2] == pytest.approx((13 / 20, 13 / 30))
    assert found["f1"] == pytest.approx((2 / 5 + 5 / 11 + 0.52) / 3)
    assert rates(found, "mention") == pytest.approx((6 / 7, 6 / 8, 4 / 5))


def random_clusters(chance: random.Random) -> list[list[tuple[int, int, int]]]:
    """Up to 14 of 16 mentions in up to 8 clusters; singletons are frequent, and there may be nothing."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for mention in chance.sample([(0, word, word) for word in range(16)], chance.choice([0, 1, 6, 14])):
        found.setdefault(chance.randrange(chance.choice([2, 8])), []).append(mention)
    return list(found.values())


def together(documents: list) -> list[set]:
    return [{(number, *span) for span in cluster} for number, found in enumerate(documents) for cluster in found]


@pytest.mark.parametrize("singletons", [True, False])
def test_scores_are_those_of_scorch(singletons, monkeypatch):
    scorch = pytest.importorskip("scorch.scores")
    # Its rates are numpy's numbers, whose division by zero is no error; Python's mean expects one.
    monkeypatch.setattr(scorch, "harmonic_mean", lambda pair: harmonic_mean([*map(float, pair)]))
    chance = random.Random(1)
    for size in [1] * 150 + [5] * 50:
        predicted, gold = ([random_clusters(chance) for _ in range(size)] for _ in range(2))
        found = coreference_scores(predicted, gold, singletons)
        sides = [[group for group in together(side) if singletons or len(group) > 1] for side in (gold, predicted)]
        for ours, theirs in NAMES.items():
            assert rates(found, ours) == pytest.approx(getattr(scorch, theirs)(*sides), rel=1e-12)
        assert found["f1"] == pytest.approx(scorch.conll2012(*sides), rel=1e-12)


@pytest.mark.parametrize("singletons", [True, False])
def test_gold_against_gold(singletons):
    rows = [document_row(*row) for row in conll_documents(TASKS / "litbank_train.conll")]
    gold = []
    for row in rows:
        groups: dict[int, list] = {}
        for *span, cluster in row["mentions"]:
            groups.setdefault(cluster, []).append(tuple(span))
        gold.append(list(groups.values()))
    found = coreference_scores(gold, gold, singletons)
    assert set(found.values()) == {1.0} and len(found) == 13
    assert json.loads(json.dumps(found)) == found
    nothing = coreference_scores([[], []], gold, singletons)
    assert set(nothing.values()) == {0.0} and nothing == coreference_scores(gold, [[], []], singletons)
    assert nothing == coreference_scores([], [], singletons)


def test_singletons():
    predicted, gold = [clusters("ab", "c", "d")], [clusters("ab", "c", "e")]
    found, without = (coreference_scores(predicted, gold, singletons) for singletons in (True, False))
    assert rates(found, "ceaf") == pytest.approx((2 / 3,) * 3) and rates(found, "mention") == (0.75,) * 3
    assert rates(found, "muc") == rates(without, "muc") == (1, 1, 1)
    assert set(without.values()) == {1.0}
    # A mention that is alone on one side only is lost on that side.
    without = coreference_scores([clusters("a", "bc")], [clusters("abc")], singletons=False)
    assert rates(without, "mention") == pytest.approx((2 / 3, 1, 4 / 5))


def test_documents_are_apart():
    one, other = clusters("ab"), clusters("cd")
    both = coreference_scores([one, other], [other, one], singletons=True)
    assert set(both.values()) == {0.0}
    # Sums over documents, not means of documents.
    found = coreference_scores([clusters("ab"), []], [clusters("ab"), clusters("abcdefg")], singletons=True)
    assert rates(found, "muc") == pytest.approx((1 / 7, 1, 1 / 4))
    with pytest.raises(ValueError, match="zip"):
        coreference_scores([one], [one, other], singletons=True)


@pytest.mark.parametrize("wrong", [("ab", "bc"), ("aab",)])
def test_a_mention_twice(wrong):
    for pair in ((clusters(*wrong), clusters("ab")), (clusters("ab"), clusters(*wrong))):
        with pytest.raises(ValueError, match="twice"):
            coreference_scores([pair[0]], [pair[1]], singletons=True)
