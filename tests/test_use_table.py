"""The table of uses, as pandas, csv and our own reader read it, and its vectors, computed one sentence at a time."""

import csv
import json

import numpy as np
import pandas
import pytest
from bilm_models import plain_layers
from errors import refused
from pretraining_worker import arguments_of
from sklearn.decomposition import PCA
from task_worker import bilm, written

from modeling_elmo.run_scripts.nearest_neighbors import main
from modeling_elmo.run_scripts.program.data_files import table_rows
from modeling_elmo.run_scripts.vectors.neighbors import Place, WordUse
from modeling_elmo.run_scripts.vectors.use_table import columns_of, use_rows, write_use_table, write_use_vectors

ROWS = [
    {"year": 1900, "file": "own", "text": 'A " play " is on .', "tags": ["a", "b"]},
    {"year": 1900, "file": "own", "text": "We play\tit .", "note": "two\nlines"},
    {"year": 1950, "file": "own", "text": "They play and play .", "tags": None},
    {"year": 1950, "file": "own", "text": "No play ."},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return bilm(tmp_path_factory.mktemp("model") / "bilm")


@pytest.fixture
def text(tmp_path):
    return written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, ROWS)))


def run(text, model, output, **options):
    defaults = {"word": "play", "model": model, "device": "cpu", "output": output, "top_k": 1}
    return main([str(text), *arguments_of({**defaults, **options})])


def read_tables(path):
    with path.open(encoding="utf-8", newline="") as file:
        by_csv = list(csv.DictReader(file, delimiter="\t"))
    by_pandas = pandas.read_csv(path, sep="\t", dtype=str, keep_default_na=False).to_dict("records")
    return by_csv, by_pandas, [row for _, row in table_rows(path)]


@pytest.mark.parametrize("group_by", [None, "year"])
def test_every_use_has_its_row_and_its_vector(text, model, tmp_path, group_by):
    options = {"group_by": group_by, "min_uses": 2, "permutations": 9} if group_by else {}
    run(text, model, tmp_path / "play.json", clusters=2, save_vectors=True, **options)
    rows, *others = read_tables(tmp_path / "play.uses.tsv")
    assert all(other == rows for other in others) and len(rows) == 5
    assert [row["sentence"] for row in rows] == [
        'A " play " is on .',
        "We play it .",
        *["They play and play ."] * 2,
        "No play .",
    ]
    assert [row["position"] for row in rows] == ["3", "2", "2", "4", "2"]
    assert [row["line"] for row in rows] == ["1", "2", "3", "3", "4"] and {row["file"] for row in rows} == {str(text)}
    assert [row["year"] for row in rows] == ["1900", "1900", "1950", "1950", "1950"]
    assert {row["table_file"] for row in rows} == {"own"}
    assert [row["note"] for row in rows] == ["", "two\nlines", "", "", ""] and rows[0]["tags"] == '["a", "b"]'
    assert ("group" in rows[0]) == (group_by is not None) and {row["cluster"] for row in rows} == {"1", "2"}
    table = pandas.read_parquet(tmp_path / "play.uses.parquet")
    expected = []
    for row in rows:
        expected.append(plain_layers(model, row["sentence"].split())[2, int(row["position"]) - 1])
    np.testing.assert_allclose(np.stack(table["vector"]), np.stack(expected), atol=1e-5)
    assert table["sentence"].tolist() == [row["sentence"] for row in rows]
    drawn = np.stack(expected).astype(float)
    if group_by is None:  # the map of nearest uses has vectors of length 1
        drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    points = PCA(2).fit_transform(drawn)
    found = np.array([[float(row["x"]), float(row["y"])] for row in rows])
    np.testing.assert_allclose(abs(found), abs(points), atol=1e-4)


def test_a_word_of_many_has_its_rows(text, model, tmp_path):
    words = written(tmp_path / "words.txt", "play\n(?i)a|is|it|and|no|they")
    output = tmp_path / "words.json"
    options = {"group_by": "year", "min_uses": 2, "permutations": 99, "controls": 0}
    main([str(text), "--words", str(words), *arguments_of({"model": model, "output": output, **options})])
    rows, *_ = read_tables(tmp_path / "words.uses.tsv")
    assert [row["form"] for row in rows if row["word"] != "play"] == ["A", "is", "it", "They", "and", "No"]


def test_names_of_columns_that_meet():
    place = Place("a.tsv", 3, {"x": "1", "table_x": "2", "word": 3}, "")
    (row,) = use_rows("play", {"": [WordUse(["play"], 0, place)]}, np.ones((1, 4)))
    assert row["table_x"] == "1" and row["table_word"] == "3" and (row["x"], row["y"]) == (0, 0)
    assert row["table_table_x"] == "2" and len(columns_of([row])) == len(row)


def test_a_single_use_and_no_table(tmp_path):
    rows = list(use_rows("play", {"old": [WordUse(["a", "play"], 1)]}, np.ones((1, 4))))
    write_use_table(tmp_path / "a.tsv", rows)
    assert (tmp_path / "a.tsv").read_text("utf-8").splitlines() == [
        "word\tgroup\tx\ty\tform\tsentence\tposition",
        "play\told\t0.0\t0.0\tplay\ta play\t2",
    ]
    write_use_vectors(tmp_path / "a.parquet", rows, np.ones((1, 4)))
    assert pandas.read_parquet(tmp_path / "a.parquet")["vector"][0].tolist() == [1, 1, 1, 1]


def test_mistakes(text, model, tmp_path):
    with refused("--save_vectors has no effect without --output"):
        run(text, model, None, save_vectors=True)
    with refused("--clusters 1: pass 2 or more"):
        run(text, model, None, clusters=1)
    uses = written(tmp_path / "a.uses.tsv", "text\nA play .\n")
    with refused(r"--output .*a\.json would replace .*a\.uses\.tsv, which is read"):
        run(uses, model, tmp_path / "a.json")
