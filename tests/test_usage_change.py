"""Measures of changed usage, compared with scipy, with loops, and with texts whose words are known to change."""

import csv
import itertools
import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from endings import conclusion
from errors import refused
from pretraining_worker import arguments_of
from scipy import stats
from scipy.spatial.distance import cdist, cosine, pdist
from task_worker import bilm, read_json, written

from modeling_elmo.run_scripts.nearest_neighbors import main
from modeling_elmo.run_scripts.vectors.usage_change import (
    bin_name,
    compare_groups,
    compare_pair,
    distance_within,
    format_change,
    order_groups,
)

STAGE = "The {0} play was {1} by the {2} of the theatre ."
GAMES = "They often play {0} with the {2} and {1} the game ."
HOUSE = "The {0} house was {1} by the {2} of the town ."
FILLERS = (
    ["new", "old", "long", "short", "first", "last", "great", "good"],
    ["praised", "seen", "loved", "lost", "made", "given", "left", "known"],
    ["people", "men", "women", "friends", "children", "ladies", "boys", "girls"],
)


def vectors_of(*sizes: int, shift: float = 0.0) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.normal(size=(size, 6)) + 1 + shift * number * np.arange(6) for number, size in enumerate(sizes)]


def distances_of(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    return cdist(one, other, "cosine").mean(), cosine(one.mean(0), other.mean(0))


def test_measures_equal_those_of_scipy():
    one, other = vectors_of(7, 5, shift=0.3)
    found = compare_pair(one, other, 10, np.random.default_rng(0))
    assert (found["apd"]["distance"], found["prt"]["distance"]) == pytest.approx(distances_of(one, other), abs=1e-6)
    assert distance_within(one) == pytest.approx(pdist(one, "cosine").mean())


@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_random_splits_equal_all_splits(shift):
    """With 4 and 3 uses there are only 35 splits: the exact test is a loop over them."""
    one, other = vectors_of(4, 3, shift=shift)
    together = np.concatenate([one, other])
    splits = [list(rows) for rows in itertools.combinations(range(7), 4)]
    every = np.array([distances_of(together[rows], np.delete(together, rows, 0)) for rows in splits])
    found = compare_pair(one, other, 5000, np.random.default_rng(1))
    for number, name in enumerate(("apd", "prt")):
        exact = (every[:, number] >= every[0, number] - 1e-12).mean()
        assert found[name]["p"] == pytest.approx(exact, abs=0.02)
        assert found[name]["random_mean"] == pytest.approx(every[:, number].mean(), abs=0.01 * every[:, number].max())
        assert found[name]["random_5"] <= found[name]["random_mean"] <= found[name]["random_95"]


def test_p_is_uniform_without_a_change():
    generator = np.random.default_rng(0)
    found = [compare_pair(*generator.normal(1, 1, (2, 8, 4)), 200, generator)["apd"]["p"] for _ in range(200)]
    assert stats.kstest(found, "uniform").pvalue > 0.01


def test_all_pairs_in_the_order_of_groups():
    """Of numbers, the printed table has consecutive pairs."""
    vectors = dict(zip(("1980", "1990", "2000"), vectors_of(5, 6, 7, shift=1.0), strict=True))
    pairs = compare_groups(vectors, 20, seed=0)
    names = [["1980", "1990"], ["1980", "2000"], ["1990", "2000"]]
    assert [pair["groups"] for pair in pairs] == names
    assert str(pairs) == str(compare_groups(vectors, 20, seed=0)) != str(compare_groups(vectors, 20, seed=1))
    assert pairs[1]["apd"]["distance"] == pytest.approx(distances_of(vectors["1980"], vectors["2000"])[0], abs=1e-6)
    found = {"word": "play", "group_by": "year", "ordered": True, "groups": [], "pairs": pairs, "left_out": {}}
    rows = [line.split("|")[1].strip() for line in format_change(found).splitlines()[3:]]
    assert rows == ["----------", "1980, 1990", "1990, 2000"]
    assert "1980, 2000" in format_change({**found, "ordered": False})


def test_order_and_bins():
    assert order_groups(["1990", "1985.5", "900"], None) == ({"900": "900", "1985.5": "1985.5", "1990": "1990"}, True)
    mixed = {"1990": "1990", "1990.0": "1990", "1991.0": "1991"}  # pandas writes decimals beside a missing value
    names = ["007", "7", "1e2", "100", "1234567890123456789", "1234567890123456790"]
    assert order_groups(names, None) == (dict(zip(names, names, strict=True)), True)
    assert order_groups(["1991.0", "1990", "1990.0"], None) == (mixed, True)
    seasons = {"2020_21": "2020_21", "2019_20": "2019_20"}
    assert order_groups([*seasons], None) == (seasons, False)
    assert order_groups(["b", "a", "10"], None) == ({"b": "b", "a": "a", "10": "10"}, False)
    years = ["1999", "1984", "-1", "1980", "0"]
    bins = {"-1": "-10--1", "0": "0-9", "1980": "1980-1989", "1984": "1980-1989", "1999": "1990-1999"}
    assert order_groups(years, 10) == (bins, True) and list(order_groups(years, 10)[0]) == list(bins)
    assert bin_name(0.7, 0.5) == "0.5-1"
    assert order_groups(["1990", "1990.5", "1991"], 1)[0] == {"1990": "1990", "1990.5": "1990", "1991": "1991"}
    assert [bin_name(number / 10, 0.1) for number in range(12)] == [f"{n / 10:g}-{(n + 1) / 10:g}" for n in range(12)]
    for name in ("circa 1850", "nan"):
        with refused(f"--bin_width 50 needs numbers, but a group is '{name}'; leave it out"):
            order_groups(["1800", name], 50)


def sentences(template: str, number: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    every = [template.format(*words) for words in itertools.product(*FILLERS)]
    return draw.sample(every, number)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """Before 1900, plays are on a stage; later, they are games. Houses stay."""
    path = tmp_path_factory.mktemp("table") / "periods.tsv"
    rows = []
    for period, template in ((1850, STAGE), (1900, GAMES)):
        texts = [*sentences(template, 30, period), *sentences(HOUSE, 30, period + 1)]
        rows += [[str(period + number % 50), "ab"[number % 2], text] for number, text in enumerate(texts)]
    rows.append(["1999", "c", "A house ."])
    random.Random(0).shuffle(rows)
    written(path, "\n".join(map("\t".join, [["year", "genre", "text"], *rows])))
    return path


@pytest.fixture(scope="module")
def run_change(tmp_path_factory):
    model = bilm(tmp_path_factory.mktemp("models") / "elmo-tiny")
    return partial(change, model)


def change(model: Path, path: Path, *more: Path, **options) -> dict:
    defaults = {"word": "play", "group_by": "year", "bin_width": 50, "permutations": 200}
    options = {"model": model, "device": "cpu", **defaults, **options}
    return main([*map(str, (path, *more)), *arguments_of(options)])


def test_the_word_that_changes_is_found(run_change, table, tmp_path, capsys):
    found = {word: run_change(table, word=word, output=tmp_path / f"{word}.json") for word in ("play", "house")}
    for word, result in found.items():
        (pair,) = result["pairs"]
        groups = [(group["name"], group["uses"]) for group in result["groups"]]
        assert groups == [("1850-1899", 30), ("1900-1949", 30)]
        for name in ("apd", "prt"):
            assert (pair[name]["p"] < 0.01) == (word == "play") == (pair[name]["distance"] > pair[name]["random_95"])
    assert found["house"]["left_out"] == {"1950-1999": 1}
    assert all("theatre" in use for use, _ in found["play"]["groups"][0]["typical_uses"])
    printed = capsys.readouterr().out
    assert "1850-1899: 30 uses" in printed and "1950-1999 (1)" in printed
    told, following = conclusion(printed)
    (pair,) = found["house"]["pairs"]  # which is printed last
    prt = f"PRT is {pair['prt']['distance']:.3f}, in random splits {pair['prt']['random_mean']:.3f} on average"
    assert told == f"house differs most between 1850-1899 and 1900-1949: {prt} (p {pair['prt']['p']:.3f})."
    assert {*following} >= {"elmo", "neighbors", str(table), "--word", "house", "--group_by"}
    assert following[-2:] == ["--controls", "100"]
    assert read_json(tmp_path / "play.json") == found["play"]
    assert (tmp_path / "play.png").read_bytes().startswith(b"\x89PNG")


def write_csv(path: Path, rows: list) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def test_files_and_formats_give_the_same_groups(run_change, table, tmp_path):
    header, *rows = (line.split("\t") for line in table.read_text("utf-8").splitlines())
    records = [{"year": int(year), "words": text.split()} for year, _, text in rows]
    periods, cells = {"1900": [], "1850": []}, {}
    for year, _, text in rows:
        periods["1900" if year >= "1900" else "1850"].append(text)
        cells.setdefault(year, []).append(text)
    files = [written(tmp_path / f"{name}.txt", "\n".join(texts)) for name, texts in periods.items()]
    several_lines = [("year", "text"), *((year, "\n".join(texts)) for year, texts in cells.items())]
    json_lines = written(tmp_path / "table.jsonl", "\n".join(map(json.dumps, records)))
    results = [
        run_change(table),
        run_change(write_csv(tmp_path / "table.csv", [header, *rows])),
        run_change(write_csv(tmp_path / "lines.csv", several_lines)),
        run_change(json_lines, text_column="words"),
        run_change(*files, group_by="file", bin_width=None),
    ]
    assert [group["name"] for group in results[-1]["groups"]] == ["1850", "1900"] and results[-1]["ordered"]
    assert len({result["pairs"][0]["apd"]["distance"] for result in results}) == 1


def test_groups_of_names_and_many_uses(run_change, table):
    genres = run_change(table, group_by="genre", bin_width=None, max_uses=12)
    assert {group["name"] for group in genres["groups"]} == {"a", "b"} and not genres["ordered"]
    assert [(group["uses"], group["uses_in_text"]) for group in genres["groups"]] == [(12, 30)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_by": "decade"}, r"line 2 has no column 'decade' but \['year', 'genre', 'text'\]; pass --group_by"),
        ({"group_by": "genre"}, "--bin_width 50 .* '[abc]'"),
        ({"bin_width": 500}, "needs two groups .* 1500-1999 60"),
        ({"group_by": None}, "--bin_width 50.0 .* without --group_by"),
        ({"queries": 2}, "--queries 2 .* with --group_by"),
        ({"min_uses": 1}, "--min_uses 1"),
    ],
)
def test_mistakes(run_change, table, options, message):
    with refused(message):
        run_change(table, **options)


@pytest.mark.parametrize("group_by, given, named", [("file", "same/a.txt", "same/a.txt"), ("folder", "", "same")])
def test_files_and_folders_of_one_name_are_groups(group_by, given, named, run_change, tmp_path):
    tops = [tmp_path / "x", tmp_path / "y"]
    for top in tops:
        (top / "same").mkdir(parents=True)
        written(top / "same" / "a.txt", f"A play {top.name} .\nThe play {top.name} .\n")
    found = run_change(*(top / given for top in tops), group_by=group_by, bin_width=None, min_uses=2)
    assert [group["name"] for group in found["groups"]] == [str(top / named) for top in tops]


def test_folders_are_groups_and_many_groups_are_told(run_change, tmp_path, warnings_of_transformers):
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        for number in range(26):
            written(tmp_path / folder / f"{number}.txt", f"The {folder} play {number} .\nPlay it .\n")
    folders, options = (tmp_path / "old", tmp_path / "new"), {"bin_width": None, "min_uses": 2, "permutations": 9}
    found = run_change(*folders, group_by="folder", **options)
    assert [(group["name"], group["uses"]) for group in found["groups"]] == [("old", 26), ("new", 26)]
    (message,) = warnings_of_transformers.messages
    assert "--word play: 2 uses in another case are left out, and 52 are found" in message  # equal ones once
    with refused("needs two groups"):
        run_change(*folders, group_by="file", **options)
    assert "--group_by file makes 52 groups" in warnings_of_transformers.text
    assert "pass --group_by folder" in warnings_of_transformers.text.replace("\n", " ")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": 5, "year": 1850}', "a.jsonl, line 1: the sentence is 5"),
        ('{"text": "A play .", "year": null}', "a.jsonl, line 1: the group 'year' is None"),
    ],
)
def test_mistakes_in_texts_and_groups(run_change, tmp_path, row, message):
    with refused(message):
        run_change(written(tmp_path / "a.jsonl", row))
