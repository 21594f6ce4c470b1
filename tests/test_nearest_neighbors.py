"""The uses of a word and their nearest neighbors, compared with scikit-learn."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
from bilm_models import pair_in, plain_layers
from endings import conclusion
from errors import refused
from places import FIXTURES
from pretraining_worker import arguments_of
from scipy.spatial.distance import pdist
from sklearn.neighbors import NearestNeighbors
from task_worker import bilm, read_json, written

from modeling_elmo.run_scripts.cards import figures as figure_module
from modeling_elmo.run_scripts.cards.figures import draw_map
from modeling_elmo.run_scripts.nearest_neighbors import main, words_in_file
from modeling_elmo.run_scripts.vectors import embedding, neighbors
from modeling_elmo.run_scripts.vectors.neighbors import WordUse, find_uses, use_vectors

TEXT = FIXTURES / "demo" / "play.txt"
LINES = [line.split() for line in TEXT.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return bilm(tmp_path_factory.mktemp("model") / "bilm", pre_tokenization="treebank")


def run_neighbors(folder: Path, *texts: Path | str, **options) -> dict:
    return main([*map(str, texts or [TEXT]), *arguments_of({"word": "play", "model": folder, **options})])


def plain_vectors(folder: Path, uses: list[WordUse], layer: int) -> np.ndarray:
    return np.stack([plain_layers(folder, list(use.words))[layer, use.position] for use in uses])


@pytest.mark.parametrize(("layer", "number"), [("top", 2), ("1", 1)])
def test_neighbors_equal_those_of_scikit_learn(folder, tmp_path, capsys, layer, number):
    output = tmp_path / "results" / "play.json"
    found = run_neighbors(folder, layer=layer, queries=5, top_k=3, output=output)
    assert read_json(output) == found
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    uses = list(find_uses(LINES, "play"))
    assert found["uses"] == len(uses) >= 150 and len(found["queries"]) == 5
    vectors = plain_vectors(folder, uses, number)
    told, following = conclusion(printed)
    cosines = [cosine for query in found["queries"] for cosine, _, _ in query["neighbors"]]
    assert f"cosines from {min(cosines):.2f} to {max(cosines):.2f}; two random uses have" in told
    random = 1 - pdist(vectors, "cosine").mean()
    assert float(re.search(r"have (\S+) on average", told)[1]) == pytest.approx(random, abs=0.006)
    assert following[:3] == ["elmo", "neighbors", str(TEXT)] and following[-1] == "--clusters"
    index = NearestNeighbors(metric="cosine", algorithm="brute").fit(vectors)
    for query in found["queries"]:
        lines = [f"  {cosine:.3f}  {use}  ({place})" for cosine, use, place in query["neighbors"]]
        assert "\n".join([f"{query['use']}  ({query['place']})", *lines]) in printed
        place = [str(use) for use in uses].index(query["use"])
        distances, numbers = (each[0] for each in index.kneighbors(vectors[[place]], n_neighbors=10))
        others = [pair for pair in zip(distances, numbers, strict=True) if uses[pair[1]].words is not uses[place].words]
        for (cosine, use, shown_place), (distance, near) in zip(query["neighbors"], others, strict=False):
            assert cosine == pytest.approx(1 - distance, abs=2e-3)
            assert use == str(uses[near]) or abs(distance - others[0][0]) < 1e-3
            name, line = shown_place.split(":")
            assert name == "play.txt" and use.split("[")[0].strip() in " ".join(LINES[int(line) - 1])


def test_nearest_words_without_a_context(folder, tmp_path, capsys):
    names = ["match", "play", "plays", *map(str, range(20))]
    vectors = np.random.default_rng(0).normal(size=(len(names), 8)).round(3)
    vectors[2] = 2 * vectors[1]
    lines = (f"{name} {' '.join(map(str, vector))}" for name, vector in zip(names, vectors, strict=True))
    file = written(tmp_path / "glove.txt", "\n".join(lines))
    found = run_neighbors(folder, word="plays?", word_vectors=file, queries=1)["word_vectors"]
    index = NearestNeighbors(metric="cosine", algorithm="brute").fit(vectors)
    distances, numbers = (each[0] for each in index.kneighbors(vectors[[1]], n_neighbors=11))
    assert [name for name, _ in found[:2]] == ["play", "plays"] and {n for n, _ in found} == {names[k] for k in numbers}
    assert [cosine for _, cosine in found] == pytest.approx(1 - distances, abs=1e-3)
    assert capsys.readouterr().out.startswith(
        f"[play] without a context\n  1.000  plays\n  {found[2][1]:.3f}  {found[2][0]}\n"
    )
    parts = written(tmp_path / "parts.txt", "cafe\u0301 1 2\ntea 1 3\n")
    assert words_in_file(str(parts), "caf\u00e9")[0] == ("cafe\u0301", 1)
    with refused("glove.txt has no word that fits 'gioca'; pass another file or --word"):
        words_in_file(str(file), "gioca")


def test_the_explorer_gets_a_text_that_it_reads_in_the_same_way(folder, tmp_path, capsys):
    explore = ["elmo", "explore", str(folder)]
    run_neighbors(folder, clusters=2, split_sentences="en", raw_text=True)
    assert conclusion(capsys.readouterr().out)[1] == [*explore, "--corpus", str(TEXT), "--split_sentences", "en"]
    rows = ["sentence\tyear", *(f"{' '.join(words)}\t1990" for words in LINES)]
    table = written(tmp_path / "play.tsv", "\n".join(rows))
    run_neighbors(folder, table, clusters=2, text_column="sentence")
    assert conclusion(capsys.readouterr().out)[1] == explore  # which has no option for the column


def test_uses_are_drawn_by_the_seed(folder):
    seen = [[query["use"] for query in run_neighbors(folder, seed=seed)["queries"]] for seed in (0, 0, 1)]
    assert seen[0] == seen[1] != seen[2]
    few = run_neighbors(folder, max_uses=12)
    assert few["uses"] == 12 < few["uses_in_text"] == run_neighbors(folder)["uses"]


def test_a_sentence_with_many_uses_is_computed_once(folder, monkeypatch):
    sentences = [["a", "play", "play"], ["play"], ["no", "play", "a", "play"]]
    uses = [*find_uses(sentences, "play")][::-1]
    embedded, kept, stack = [], [], np.stack

    def embed_sentences(read, *others, **options):
        embedded.extend(read := [*read])
        return embedding.embed_sentences(read, *others, **options)

    with monkeypatch.context() as patch:
        patch.setattr(neighbors, "embed_sentences", embed_sentences)
        patch.setattr(neighbors.np, "stack", lambda rows: kept.append(rows) or stack(rows))
        found = use_vectors(uses, *pair_in(folder), "2")
    assert sorted(map(tuple, embedded)) == sorted(map(tuple, sentences))
    rows = kept[-1]  # the others are layers of a sentence
    assert len(rows) == len(uses) and all(
        row.base is None for row in rows
    )  # a part would keep all layers of its sentence in memory
    np.testing.assert_allclose(found, plain_vectors(folder, uses, 2), atol=1e-5)


def test_uses_are_whole_words_in_sentences_that_differ():
    sentences = [["a", "play"], ["plays", "and", "play"], ["a", "play"], ["replay"], ["Play", "play", "play"]]
    assert [(use.words, use.position) for use in find_uses(sentences, "play")] == [
        (sentences[0], 1),
        (sentences[1], 2),
        (sentences[4], 1),
        (sentences[4], 2),
    ]
    assert [use.position for use in find_uses(sentences, "(?i)plays?")] == [1, 0, 2, 0, 1, 2]
    long = [*"abcdefghijkl", "play", *"mnopqrstuvw"]
    assert str(WordUse(long, 12)) == "e f g h i j k l [play] m n o p q r s t"


def test_letters_may_be_composed_or_written_in_parts():
    cafes = [["caf\u00e9"], ["cafe\u0301"], ["caf"], ["cafe"]]
    for word, number in (("caf\u00e9", 2), ("cafe\u0301", 2), (r"\w+\u0301", 2), ("cafe\u0301?", 3)):
        assert [use.words for use in find_uses(cafes, word)] == cafes[:number]


def test_map_shows_groups_in_their_plane(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(figure_module, "WIDE_FONTS", ())  # this system may have some
    monkeypatch.setattr(Figure, "savefig", lambda self, *args: (figures.append(self), save(self, *args)))
    draw = random.Random(0)
    flat = np.array([[draw.gauss(0, 3), draw.gauss(0, 2)] for _ in range(30)])
    vectors = np.pad(flat - flat.mean(0), ((0, 0), (0, 4)))  # a plane in six dimensions
    dollars = "from $ 5 , up 10 % , to $ 6"  # not a formula
    draw_map(vectors, {"one": [0, 1], "눈": [2], dollars: [3]}, tmp_path / "map.png")
    (axis,) = figures[0].axes
    drawn = {each.get_label(): np.asarray(each.get_offsets()) for each in axis.collections}
    assert list(drawn)[1:] == ["one", "query 2", dollars.replace("$", r"\$")]  # no Hangul in the font
    distances = [np.linalg.norm(points[:, None] - points[None], axis=-1) for points in (drawn["_"], flat)]
    np.testing.assert_allclose(*distances, atol=1e-6)
    shares = [int(re.search(r"(\d+)%", label)[1]) for label in (axis.get_xlabel(), axis.get_ylabel())]
    assert sum(shares) in (99, 100, 101)


def test_case_counts_and_is_told(folder, tmp_path, warnings_of_transformers):
    file = written(tmp_path / "a.txt", "A play is on\nThe play is on\nPlay it\nWe PLAY\nThey play")
    assert run_neighbors(folder, file, top_k=1)["uses"] == 3
    message = "--word play: 2 uses in another case are left out, and 3 are found. Pass '(?i)play' for all of them."
    assert warnings_of_transformers.messages == [message]
    assert run_neighbors(folder, file, top_k=1, word="(?i)play")["uses"] == 5
    assert warnings_of_transformers.messages == [message]


@pytest.mark.parametrize(
    "options, text, expected",
    [
        (
            {"pre_tokenization": "treebank"},
            "A play.\nThe play, it seems.\nWe play!\nPlay it again.\n",
            {"A [play] .", "The [play] , it seems .", "We [play] !"},
        ),
        (
            {"pre_tokenization": "moses", "plain_signs": True, "extra_special_tokens": ["[E]"]},
            "We didn’t play.\nThe play[E] it.\nA play…\n",
            {"We didn ’t [play] .", "The [play] [E] it .", "A [play] …"},
        ),
    ],
)
def test_raw_text_is_split_by_the_tokenizer(options, text, expected, tmp_path):
    """Also at added words and as with plain signs."""
    model, file = bilm(tmp_path / "bilm", **options), written(tmp_path / "raw.txt", text)
    (query,) = run_neighbors(model, file, raw_text=True, queries=1, top_k=2)["queries"]
    assert {query["use"], *(use for _, use, _ in query["neighbors"])} == expected


@pytest.mark.parametrize(("ending", "beginning"), [("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_the_picture_has_the_format_of_the_output(folder, tmp_path, ending, beginning):
    found = run_neighbors(folder, output=tmp_path / f"play.{ending}")
    assert (tmp_path / f"play.{ending}").read_bytes().startswith(beginning)
    assert read_json(tmp_path / "play.json") == found and (tmp_path / "play.uses.tsv").exists()
    assert not (tmp_path / "play.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"word": "xyzzy"}, r"0 use\(s\) of 'xyzzy', too few for --top_k 2"),
        ({"word": "pla("}, r"--word pla\( is not a regular expression"),
        ({"layer": "3"}, "--layer 3: pass top, average, mixed, or a number up to 2"),
        ({"min_uses": 5}, "--min_uses 5 .* without --group_by"),
        ({"max_uses": 2}, "--max_uses 2: pass more than --top_k 2"),
        ({"output": "play.txt"}, r"--output play\.txt: pass a file that ends in \.json, \.png, \.pdf, \.svg"),
    ],
)
def test_mistakes(folder, options, message):
    with refused(message):
        run_neighbors(folder, **options)
