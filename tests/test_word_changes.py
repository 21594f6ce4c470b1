"""The ranking of many words, on texts in which one word is known to change, and its measures, compared with scipy."""

import random
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from bilm_models import plain_layers
from endings import conclusion
from errors import refused
from pretraining_worker import arguments_of
from scipy import stats
from scipy.spatial.distance import cdist, cosine, pdist
from task_worker import bilm, read_json, written

from modeling_elmo.run_scripts.nearest_neighbors import main
from modeling_elmo.run_scripts.vectors import word_changes
from modeling_elmo.run_scripts.vectors.usage_change import permuted_distances, smallest_p

CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"
SYLLABLES = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
NOUNS = [one + other for one, other in zip(SYLLABLES, SYLLABLES[7:] + SYLLABLES[:7], strict=True)] + SYLLABLES
COMPARED, CONTROLS = NOUNS[:50], NOUNS[50:100]
PLANTED = COMPARED[17]
OLD = ("The {} was {} by the {} of the town .", "We have {1} the {0} of our {2} .")
NEW = "They {0} often and {1} with the {2} again !"
VERBS = ["praised", "seen", "loved", "lost", "made", "given", "left", "known"]
PEOPLE = ["people", "men", "women", "friends", "children", "ladies", "boys", "girls"]


def speeches() -> list[list[str]]:
    """Eight speeches in each period, with two uses of each word. One word gets another place in its sentences."""
    draw = random.Random(0)
    rows = []
    for number in range(16):
        period = "new" if number >= 8 else "old"
        for word in (*COMPARED, *CONTROLS):
            templates = [NEW, NEW] if (word, period) == (PLANTED, "new") else OLD
            for template in templates:
                sentence = template.format(word, draw.choice(VERBS), draw.choice(PEOPLE))
                rows.append([period, f"speech {number}", f"{sentence} {number}"])
    draw.shuffle(rows)
    return rows


ROWS = sorted(speeches(), key=lambda row: row[0] == "new")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("words")
    bilm(place / "bilm")
    table = [["period", "speech", "text"], *ROWS]
    written(place / "speeches.tsv", "\n".join(map("\t".join, table)))
    written(place / "words.txt", "\n".join([*COMPARED, "xyzzy", "ladies"]))
    written(place / "controls.txt", "\n".join(CONTROLS[:30]))
    return place


@pytest.fixture(scope="module")
def run(folder):
    return partial(change, folder)


def change(folder: Path, **options) -> dict:
    defaults = {
        "words": folder / "words.txt",
        "model": folder / "bilm",
        "device": "cpu",
        "group_by": "period",
        "document_column": "speech",
        "permutations": 1500,
    }
    options = {name: value for name, value in {**defaults, **options}.items() if value is not None}
    return main([str(folder / "speeches.tsv"), *arguments_of(options)])


def vectors_of(folder: Path, word: str) -> dict[str, np.ndarray]:
    """The top layer of each use by period, computed one sentence at a time."""
    vectors = {}
    for period in ("old", "new"):
        rows = []
        for period_of_row, _, text in ROWS:
            words = text.split()
            if period_of_row == period and word in words:
                rows.append(plain_layers(folder / "bilm", words)[2, words.index(word)])
        vectors[period] = np.stack(rows)
    return vectors


def test_the_planted_change_is_first_and_numbers_are_those_of_scipy(run, folder, tmp_path, capsys):
    found = run(output=tmp_path / "words.json", save_vectors=True)
    assert read_json(tmp_path / "words.json") == found
    (ranking,) = found["ranking"]
    rows = {row["word"]: row for row in ranking["words"]}
    assert ranking["groups"] == ["old", "new"] and len(rows) == 51 and next(iter(rows)) == PLANTED
    changed = [word for word, row in rows.items() if row["conclusion"] == "changed"]  # by q
    assert changed == [PLANTED]
    for word in (PLANTED, COMPARED[0]):
        one, other = vectors_of(folder, word).values()
        (result,) = [result for result in found["words"] if result["word"] == word]
        assert [group["distance_within"] for group in result["groups"]] == pytest.approx(
            [pdist(one, "cosine").mean(), pdist(other, "cosine").mean()], abs=1e-5
        )
        assert rows[word]["apd"]["distance"] == pytest.approx(cdist(one, other, "cosine").mean(), abs=1e-5)
        assert rows[word]["prt"]["distance"] == pytest.approx(cosine(one.mean(0), other.mean(0)), abs=1e-5)
        assert rows[word]["documents"] == [8, 8] and rows[word]["uses"] == [16, 16]
    assert {*rows[PLANTED]["prt"]["controls"]} <= {*CONTROLS, *VERBS, *PEOPLE}
    for control in list(rows[PLANTED]["prt"]["controls"])[:3]:
        one, other = vectors_of(folder, control).values()
        distances = rows[PLANTED]["apd"]["controls"][control], rows[PLANTED]["prt"]["controls"][control]
        expected = cdist(one, other, "cosine").mean(), cosine(one.mean(0), other.mean(0))
        assert distances == pytest.approx(expected, abs=1e-5)
    for measure in ("apd", "prt"):
        corrected = stats.false_discovery_control([row[measure]["p"] for row in rows.values()])
        assert [row[measure]["q"] for row in rows.values()] == pytest.approx(corrected, abs=1e-6)
    changes = [row["prt"]["distance"] - row["prt"]["random_mean"] for row in rows.values()]
    assert changes == sorted(changes, reverse=True)
    printed = capsys.readouterr().out
    assert f"Changed: {PLANTED}. PRT is larger" in printed and "xyzzy (no use)" in printed
    assert "Random splits move whole documents (speech)." in printed
    told, following = conclusion(printed)
    assert told == f"1 of 51 compared words are shown to have changed: {PLANTED}."
    assert {*following} >= {"neighbors", "--word", PLANTED}
    assert {*following}.isdisjoint(["--words", "--output", "--save_vectors"])  # the last needs an output


def test_one_word_has_the_numbers_of_many(run, tmp_path):
    options = {"controls": 0, "permutations": 50}
    (ranking,) = run(**options)["ranking"]
    (row,) = [row for row in ranking["words"] if row["word"] == PLANTED]
    found = run(words=None, word=PLANTED, **options)
    (pair,) = found["pairs"]
    for measure in ("apd", "prt"):
        assert pair[measure] == {name: value for name, value in row[measure].items() if name != "q"}
    assert found["documents"] == "speech" and pair["conclusion"] == "p alone"


def test_text_is_read_twice_and_each_sentence_computed_once(run, folder, monkeypatch):
    read, computed = [], []
    sentences, embedded_uses = word_changes.GroupedText.sentences, word_changes.encode_uses.__globals__["embedded_uses"]
    monkeypatch.setattr(word_changes.GroupedText, "sentences", lambda text: read.append(1) or sentences(text))

    def counted(uses, *others):
        computed.append({tuple(use.words) for use in uses})
        return embedded_uses(uses, *others)

    monkeypatch.setitem(word_changes.encode_uses.__globals__, "embedded_uses", counted)
    run(permutations=10)
    assert len(read) == 2 and len(computed) == 1
    run(permutations=10, controls=0)
    assert len(read) == 3 and len(computed) == 2


def test_too_few_splits_for_many_words_are_told(run, warnings_of_transformers):
    run(permutations=100, controls=0)
    expected = (
        "--permutations 100: with 51 words, no q can be below 0.505, unless several words change; pass at least 1019"
    )
    assert expected in warnings_of_transformers.text


def test_given_controls(run, folder, capsys):
    found = run(words=None, word=PLANTED, control_words=folder / "controls.txt")
    (pair,) = found["pairs"]
    assert [*pair["prt"]["controls"]] == CONTROLS[:30] and pair["prt"]["rank"] == 1
    assert pair["prt"]["percentile"] == 100 and pair["conclusion"] == "changed"
    printed = capsys.readouterr().out
    assert "30 of 30" in printed and conclusion(printed)[1][-1] == "--clusters"


def test_too_few_controls_and_documents_are_told(run, folder, capsys):
    few = written(folder / "few.txt", "\n".join(CONTROLS[:5]))
    run(words=None, word=PLANTED, control_words=few)
    assert "at least 19 control words, add words to --control_words" in capsys.readouterr().out
    run(words=None, word=PLANTED)
    assert "at least 19 control words, pass --controls 100, or --control_words FILE" in capsys.readouterr().out
    found = run(words=None, word=PLANTED, document_column="period", control_words=folder / "controls.txt")
    assert found["pairs"][0]["documents"] == [1, 1] and found["pairs"][0]["smallest_p"] == 1
    assert "Believe the controls: old, new. PRT is in the top" in capsys.readouterr().out
    run(words=None, word=PLANTED, document_column=None)
    assert "Random splits move single uses, so p is too small" in capsys.readouterr().out


def test_uses_above_the_maximum_are_drawn_and_told(run, capsys):
    found = run(words=None, word=PLANTED, max_uses=11)
    assert [group["uses"] for group in found["groups"]] == [11, 11]
    assert "old: 11 of 16 uses, drawn at random, in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"word": "play"}, "Pass either --word WORD, or --words FILE"),
        ({"words": None}, "Pass either --word WORD, or --words FILE"),
        ({"group_by": None}, "--words .* without --group_by"),
        ({"control_words": "words.txt", "controls": 3}, "--controls 3 .* with --control_words"),
        ({"min_uses": 200, "controls": 0}, "--min_uses 200 .* no word of --words has them; .* has: old 16, new 16"),
    ],
)
def test_mistakes(run, options, message):
    with refused(message):
        run(**options)


def test_a_control_word_is_no_compared_word(run, folder):
    with refused(f"--control_words .*controls.txt has '{CONTROLS[3]}', which is compared; remove it"):
        run(words=None, word=CONTROLS[3], control_words=folder / "controls.txt")


def grouped_vectors(sizes: list[int], seed: int, spread: float) -> tuple[np.ndarray, list[str]]:
    """Uses of documents, whose vectors are alike in a document."""
    generator = np.random.default_rng(seed)
    centers = generator.normal(1, spread, (len(sizes), 5))
    vectors = [generator.normal(center, 1, (size, 5)) for center, size in zip(centers, sizes, strict=True)]
    return np.concatenate(vectors), [f"document {number}" for number, size in enumerate(sizes) for _ in range(size)]


def test_random_splits_of_documents_equal_all_splits():
    """With 4 and 3 documents there are 35 splits: the exact test is a loop over them."""
    sizes = [1, 5, 2, 3, 4, 2, 1]
    vectors, names = grouped_vectors(sizes, 3, 1.0)
    first = sum(sizes[:4])
    documents = (names[:first], names[first:])
    found = permuted_distances(vectors[:first], vectors[first:], 6000, np.random.default_rng(0), documents)
    every = []
    for chosen in combinations(sorted(set(names)), 4):
        is_first = np.isin(names, chosen)
        one, other = vectors[is_first], vectors[~is_first]
        every.append((cdist(one, other, "cosine").mean(), cosine(one.mean(0), other.mean(0))))
    for row, distances in enumerate(np.transpose(every)):
        assert found[row, 0] == pytest.approx(distances[0])
        assert {*found[row].round(8)} == {*distances.round(8)}
        exact = (distances >= distances[0] - 1e-12).mean()
        assert (found[row] >= found[row, 0] - 1e-12).mean() == pytest.approx(exact, abs=0.02)


def test_p_is_uniform_if_documents_move_and_too_small_if_uses_do():
    p_of = {"documents": [], "uses": []}
    for seed in range(150):
        vectors, names = grouped_vectors([6] * 12, seed, 1.0)
        generator = np.random.default_rng(seed)
        for unit, documents in (("documents", (names[:36], names[36:])), ("uses", None)):
            prt = permuted_distances(vectors[:36], vectors[36:], 200, generator, documents)[1]
            p_of[unit].append((prt >= prt[0]).mean())
    assert stats.kstest(p_of["documents"], "uniform").pvalue > 0.01
    assert np.mean(np.array(p_of["uses"]) <= 0.05) > 0.5


def test_a_document_in_both_groups_counts_in_each():
    vectors, _ = grouped_vectors([4, 4], 0, 1.0)
    documents = (["a", "a", "b", "b"], ["b", "b", "c", "c"])
    apart = (documents[0], ["x", "x", "c", "c"])
    splits = [
        permuted_distances(vectors[:4], vectors[4:], 20, np.random.default_rng(0), it) for it in (documents, apart)
    ]
    np.testing.assert_array_equal(*splits)


@pytest.mark.parametrize(
    ("one", "other", "expected"), [(1, 1, 1), (1, 2, 1 / 3), (2, 2, 1 / 3), (3, 4, 1 / 35), (99, 99, 0.01)]
)
def test_smallest_p(one, other, expected):
    assert smallest_p(one, other, 99) == pytest.approx(expected)
