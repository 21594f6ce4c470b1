"""Control words of like frequency, compared with plain loops; ranks among them, and what to conclude."""

from collections import Counter

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import cdist, cosine

from modeling_elmo.run_scripts.vectors.controls import (
    CONCLUSIONS,
    compare_with_controls,
    conclude,
    draw_controls,
    format_conclusions,
    group_pairs,
    place_among,
    word_frequencies,
)
from modeling_elmo.run_scripts.vectors.usage_change import compare_groups

PAIR = ("old", "new")


def letters(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in str(number))


def counts_of_texts() -> dict[str, Counter]:
    """Words whose frequencies are all pairs of numbers, and others that are no controls."""
    counts = {"old": Counter(), "new": Counter()}
    for old in range(5, 60, 5):
        for new in range(5, 60, 5):
            counts["old"][f"x{letters(old)}x{letters(new)}"] = old
            counts["new"][f"x{letters(old)}x{letters(new)}"] = new
    for word, frequency in (("play", 20), ("Plays", 20), ("plays", 4), ("1990", 20), ("...", 20)):
        counts["old"][word] = counts["new"][word] = frequency
    return counts


def test_controls_are_of_like_frequency_in_both_groups():
    counts = counts_of_texts()
    assert word_frequencies(counts, "plays?") == {"old": 24, "new": 24}
    (drawn,) = draw_controls(counts, ["plays?"], {"plays?": [PAIR]}, 1000, 15, 0)["plays?"].values()
    expected = set()
    for form in counts["old"].keys() - {"play", "Plays", "plays", "1990", "..."}:
        if all(counts[group][form] >= 15 and 12 <= counts[group][form] <= 48 for group in PAIR):
            expected.add(form)
    assert set(drawn) == expected and len(drawn) == len(expected) > 40


@pytest.mark.parametrize(
    "words", [["(c)a.*", r"(\w)\1a"], ["(?P<x>c)a.*", "(?P<x>b)?ba"], ["(?x) c a .* # a note", "bba"]]
)
def test_each_word_is_a_regular_expression_of_its_own(words):
    forms = Counter({"cab": 9, "bba": 9, "Bba": 9, "dog": 9})
    drawn = draw_controls(dict.fromkeys(PAIR, forms), words, {words[0]: [PAIR]}, 10, 5, 0)
    assert drawn == {words[0]: {PAIR: ["dog"]}}


def test_letters_in_parts_are_those_of_the_word():
    counts = {"old": Counter({"Cafe\u0301": 4, "caf\u00e9": 3, "tea": 5}), "new": Counter({"cafe\u0301": 6, "tea": 5})}
    word = "(?i)caf\u00e9"
    assert word_frequencies(counts, word) == {"old": 7, "new": 6}
    assert draw_controls(counts, [word], {word: [PAIR]}, 9, 1, 0) == {word: {PAIR: ["tea"]}}


def test_controls_are_drawn_by_the_seed_and_shared():
    counts = counts_of_texts()
    counts["old"]["house"] = counts["new"]["house"] = 21
    pairs = {"play": [PAIR], "house": [PAIR]}
    first, again, other = (draw_controls(counts, ["play", "house"], pairs, 10, 10, seed) for seed in (0, 0, 1))
    assert first == again != other and len(first["play"][PAIR]) == 10
    assert len({*first["play"][PAIR]} & {*first["house"][PAIR]}) >= 6  # of 49 that fit both
    assert "house" not in {*first["play"][PAIR], *other["play"][PAIR]}


def test_a_flag_inside_a_word_stays_with_it():
    counts = {"old": Counter(Play=20, play=20, xa=20), "new": Counter(Play=20, play=20, xa=20)}
    words = ["(?i)play", "house"]
    assert draw_controls(counts, words, {"house": [], "(?i)play": [PAIR]}, 9, 5, 0)["(?i)play"][PAIR] == ["xa"]


def test_distances_of_controls_equal_those_of_scipy():
    generator = np.random.default_rng(0)
    uses = {word: {group: generator.normal(1, 1, (9, 6)) for group in PAIR} for word in ("play", "xa", "xb")}
    uses["xc"] = {"old": generator.normal(1, 1, (9, 6))}  # too rare in the other group
    means = {}
    for word, groups in uses.items():
        means[word] = {}
        for group, vectors in groups.items():
            directions = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            means[word][group] = np.stack([directions.mean(0), vectors.mean(0)])
    (pair,) = compare_groups(uses["play"], 50, 0)
    compared = compare_with_controls(pair, ["xa", "xb", "xc"], means)
    for word in ("xa", "xb"):
        one, other = uses[word].values()
        assert compared["apd"]["controls"][word] == pytest.approx(cdist(one, other, "cosine").mean(), abs=1e-6)
        assert compared["prt"]["controls"][word] == pytest.approx(cosine(one.mean(0), other.mean(0)), abs=1e-6)
    assert list(compared["prt"]["controls"]) == ["xa", "xb"]


def test_ranks_and_percentiles_equal_those_of_scipy():
    generator = np.random.default_rng(0)
    controls = {letters(number): value for number, value in enumerate(generator.normal(size=40).round(1))}
    for distance in (-9.0, 0.0, float(controls["b"]), 9.0):
        found = place_among(distance, controls)
        assert found["percentile"] == pytest.approx(stats.percentileofscore([*controls.values()], distance, "strict"))
        ranks = stats.rankdata([-distance, *(-value for value in controls.values())], "max")
        assert found["rank"] == ranks[0] and found["p_controls"] == pytest.approx(ranks[0] / 41, abs=1e-6)


def measure(p: float, number: int, rank: int) -> dict:
    return {"p": p, **({"controls": dict.fromkeys(range(number)), "p_controls": rank / (1 + number)} if number else {})}


@pytest.mark.parametrize(
    ("p", "number", "rank", "smallest_p", "conclusion"),
    [
        (0.01, 50, 1, 0.001, "changed"),
        (0.01, 50, 20, 0.001, "as controls"),
        (0.2, 50, 1, 0.001, "as random"),
        (0.2, 50, 20, 0.001, "no change"),
        (0.01, 0, 1, 0.001, "p alone"),
        (0.01, 18, 1, 0.001, "p alone"),
        (0.01, 19, 1, 0.001, "changed"),
        (0.2, 0, 1, 0.001, "no change"),
        (0.1, 50, 1, 0.1, "above controls"),
        (0.1, 50, 20, 0.1, "too few documents"),
        (0.1, 0, 1, 0.1, "too few documents"),
    ],
)
def test_what_to_believe(p, number, rank, smallest_p, conclusion):
    assert conclude(measure(p, number, rank), smallest_p) == conclusion
    (line,) = format_conclusions({"play": conclusion}, "pass --controls 100")
    assert line.startswith(CONCLUSIONS[conclusion].split("{")[0]) and "play" in line and "{" not in line


def test_words_with_one_conclusion_share_a_sentence():
    lines = format_conclusions({"play": "changed", "house": "no change", "gay": "changed"}, "")
    assert [line.split(".")[0] for line in lines] == ["Changed: play, gay", "No change is shown: house"]
    (line,) = format_conclusions({"1900, 1910": "changed", "1910, 1920": "changed"}, "")
    assert line.startswith("Changed: 1900, 1910; 1910, 1920. ")


def test_pairs_of_groups():
    assert group_pairs("abc", True) == [("a", "b"), ("b", "c")]
    assert group_pairs("abc", False) == [("a", "b"), ("a", "c"), ("b", "c")]
