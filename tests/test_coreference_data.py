"""Documents with coreference from columns, JSON lines and data sets, and the errors for bad files."""

import gzip
import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from modeling_elmo.run_scripts.fine_tuning.tasks.coreference_data import (
    CoreferenceArguments,
    conll_documents,
    document_row,
    read_documents,
)

TASKS = Path(__file__).parent / "fixtures" / "tasks"
BEGIN, END = "#begin document (d); part 0\n", "#end document\n"


def written(path: Path, text: str) -> str:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def documents(path: Path, text: str) -> list[dict]:
    return read_documents(CoreferenceArguments(train_file=written(path, text)))["train"].to_list()


def rows(path: Path, text: str) -> list[dict]:
    """The documents of a file in columns, without the cache of `datasets`."""
    written(path, text)
    return [document_row(*row) for row in conll_documents(path)]


def sentence(*cells: str) -> str:
    """A sentence of the document `d` with these coreference columns."""
    return "".join(f"d\t0\t{number}\tw{number}\t{cell}\n" for number, cell in enumerate(cells)) + "\n"


def cells_of(row: dict) -> list[list[list[str]]]:
    """The brackets of each word, sorted. The inverse of reading."""
    cells: list[list[list[str]]] = [[[] for _ in words] for words in row["sentences"]]
    for number, first, last, cluster in row["mentions"]:
        if first == last:
            cells[number][first].append(f"({cluster})")
        else:
            cells[number][first].append(f"({cluster}")
            cells[number][last].append(f"{cluster})")
    return [[sorted(cell) for cell in words] for words in cells]


@pytest.mark.parametrize("name", ["train", "dev", "test"])
def test_litbank_and_back(name):
    path = TASKS / f"litbank_{name}.conll"
    located = list(conll_documents(path))
    found = [(word, cell) for _, row in located for words, cells in zip(row["sentences"], cells_of(row), strict=True)
             for word, cell in zip(words, cells, strict=True)]  # fmt: skip
    lines = [line.split("\t") for line in path.read_text().splitlines() if "\t" in line]
    assert found == [(line[3], sorted(line[12].split("|")) if line[12] != "-" else []) for line in lines]
    checked = [document_row(*row) for row in located]
    for (_, before), after in zip(located, checked, strict=True):
        pairs = {(old[3], new[3]) for old, new in zip(sorted(before["mentions"]), after["mentions"], strict=True)}
        assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
    arguments = CoreferenceArguments(test_file=str(path))
    assert read_documents(arguments)["test"].to_list() == checked


def test_the_first_document_of_litbank():
    first, second = read_documents(CoreferenceArguments(train_file=str(TASKS / "litbank_train.conll")))["train"]
    assert first["document"] == "1342_pride_and_prejudice_brat_0"
    assert second["document"] == "1400_great_expectations_brat_0"
    assert (first["speakers"], first["genre"]) == ([], "")
    counted = [(len(row["sentences"]), len(row["mentions"])) for row in (first, second)]
    assert counted == [(12, 51), (12, 85)]
    number, start, end, _ = first["mentions"][0]
    assert first["sentences"][number][start : end + 1] == ["a", "single", "man", "in", "possession", "of", "a", "good",
                                                           "fortune"]  # fmt: skip


ONTONOTES = """#begin document (nw/wsj/00/wsj_0001); part 000
nw/wsj/00/wsj_0001   0    0   Pierre   NNP   (TOP(S(NP*   -   -   -   Anna#1   (PERSON*   *   (12
nw/wsj/00/wsj_0001   0    1   Vinken   NNP            *)  -   -   -   Anna#1   *)         *   12)

nw/wsj/00/wsj_0001   0    0   He   PRP   (TOP(S(NP*)   -   -   -   -   *   *   *   (12)|(0
nw/wsj/00/wsj_0001   0    1   said   VBD   *)   -   -   -   -   *   *   *   0)

#end document
#begin document (nw/wsj/00/wsj_0001); part 001
nw/wsj/00/wsj_0001   1    0   No   UH   (TOP(INTJ*))   -   -   -   -   *   *   -

#end document
"""


@pytest.mark.parametrize("ending", ["v4_gold_conll", "v4_gold_conll.gz", "conll", "gold_conll"])
def test_the_columns_of_conll_2012(tmp_path, ending):
    first, second = documents(tmp_path / f"a.{ending}", ONTONOTES)
    assert first == {
        "document": "nw/wsj/00/wsj_0001_0",
        "sentences": [["Pierre", "Vinken"], ["He", "said"]],
        "mentions": [[0, 0, 1, 0], [1, 0, 0, 0], [1, 0, 1, 1]],
        "speakers": [["Anna#1", "Anna#1"], ["-", "-"]],
        "genre": "nw",
    }
    assert second["document"] == "nw/wsj/00/wsj_0001_1"
    assert (second["mentions"], second["speakers"]) == ([], [])


@pytest.mark.parametrize(
    "cells, expected",
    [
        (["(4", "(7)", "4)"], [[0, 0, 2, 0], [0, 1, 1, 1]]),
        (["(4|(7", "7)", "4)"], [[0, 0, 1, 0], [0, 0, 2, 1]]),
        (["(7|(4", "7)", "4)"], [[0, 0, 1, 0], [0, 0, 2, 1]]),
        (["(4|(4)", "-", "4)"], [[0, 0, 0, 0], [0, 0, 2, 0]]),
        (["(4", "(4", "4)", "4)"], [[0, 0, 3, 0], [0, 1, 2, 0]]),
        (["(4|(4", "4)", "4)"], [[0, 0, 1, 0], [0, 0, 2, 0]]),
        (["(4", "(4", "4)|4)"], [[0, 0, 2, 0], [0, 1, 2, 0]]),
        (["(4", "(5", "4)", "5)"], [[0, 0, 2, 0], [0, 1, 3, 1]]),
        (["(4", "4)|(4", "4)"], [[0, 0, 1, 0], [0, 1, 2, 0]]),
        (["(4|4)", "_", ""], [[0, 0, 0, 0]]),
        (["-", "-"], []),
    ],
)
def test_nested_mentions(tmp_path, cells, expected):
    (row,) = rows(tmp_path / "a.conll", BEGIN + sentence(*cells) + END)
    assert row["mentions"] == expected


@pytest.mark.parametrize(
    "cells, expected, again",
    [
        (["(3)|(3)", "(4)"], [[0, 0, 0, 0], [0, 1, 1, 1]], "1 of 3"),
        (["(3", "3)", "(4|(5", "4)|5)", "(4)|(3)"], [[0, 0, 1, 0], [0, 2, 3, 0], [0, 4, 4, 0]], "2 of 5"),
        (["(3", "3)", "(4|(5", "4)|5)", "(4)"], [[0, 0, 1, 0], [0, 2, 3, 1], [0, 4, 4, 1]], "1 of 4"),
        (["(1)|(2)", "(3)|(4)", "(2)|(4)", "(1)", "(3)"], [[0, word, word, 0] for word in range(5)], "3 of 8"),
    ],
)
def test_clusters_that_share_a_mention_are_one(tmp_path, cells, expected, again, caplog):
    (row,) = rows(tmp_path / "a.conll", BEGIN + sentence(*cells) + END)
    assert row["mentions"] == expected
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'a.conll'}, line 1: {again} mentions occur again. They are counted once, ")


def random_document(chance: random.Random) -> dict:
    """A document whose clusters are nested or apart, so that brackets have one meaning."""
    sizes = [chance.randint(1, 9) for _ in range(chance.randint(1, 5))]
    spans = {(number, *sorted(chance.choices(range(size), k=2))) for number, size in enumerate(sizes) for _ in range(6)}
    clusters: dict[int, list[tuple]] = defaultdict(list)
    for span in sorted(spans):
        cluster = chance.randrange(4)
        crosses = (one[0] == span[0] and one[1] < span[1] <= one[2] < span[2] for one in clusters[cluster])
        clusters[cluster if not any(crosses) else 10 + len(clusters)].append(span)
    numbers: dict[int, int] = {}
    names = {span: cluster for cluster, members in clusters.items() for span in members}
    ordered = [[*span, numbers.setdefault(names[span], len(numbers))] for span in sorted(spans)]
    sentences = [[f"w{word}" for word in range(size)] for size in sizes]
    return {"document": "d_0", "sentences": sentences, "mentions": ordered, "speakers": [], "genre": ""}


def test_random_documents_and_back(tmp_path):
    chance = random.Random(0)
    for _ in range(300):
        row = random_document(chance)
        # Brackets of words that end and begin mentions: the ends come first.
        cells = [["|".join(sorted(cell, key=lambda part: part[0] == "(")) or "-" for cell in words]
                 for words in cells_of(row)]  # fmt: skip
        assert rows(tmp_path / "a.conll", BEGIN + "".join(sentence(*words) for words in cells) + END) == [row]
        shuffled = row | {"mentions": chance.sample(row["mentions"], len(row["mentions"]))}
        assert document_row("here", shuffled) == row


WORDS = sentence("-", "-")


@pytest.mark.parametrize(
    "text, line, shown",
    [
        (sentence("-", "(3", "-") + WORDS, 3, r"\(3 begins"),
        (sentence("(3", "3)|3)"), 3, r"3\) ends"),
        (sentence("(3", "4)"), 3, r"4\) ends"),
        (sentence("3"), 2, "'3'"),
        (sentence("(3)|"), 2, "''"),
        (sentence("(9999999999)"), 2, r"'\(9999999999\)'"),
        (sentence("(٣)"), 2, "'"),
        ("\n\n", 1, "'d' has no sentences"),
        (WORDS + BEGIN, 5, "'d' has no end"),
        ("e\t0\t0\tw\t-\n", 2, r"'e\\t0\\t0\\tw\\t-'"),
        ("d\t0\t0\tw\n", 2, r"'d\\t0\\t0\\tw'"),
        ("d\t0\t0\t\t-\n", 2, r"'d\\t0\\t0\\t\\t-'"),
    ],
)
def test_bad_lines(tmp_path, text, line, shown):
    with pytest.raises(ValueError, match=f"a.conll, line {line}\\b.*{shown}"):
        rows(tmp_path / "a.conll", BEGIN + text + END)


def test_bad_documents(tmp_path):
    path = tmp_path / "a.conll"
    with pytest.raises(ValueError, match="a.conll, line 6 is in no document: '#end document'"):
        documents(path, BEGIN + WORDS + END + END)
    with pytest.raises(ValueError, match="a.conll, line 6: the document 'd' has no '#end document'"):
        documents(path, BEGIN + WORDS + END + BEGIN.replace("0", "1") + WORDS)
    with pytest.raises(ValueError, match="a.conll, line 6: `document` is 'd_0'.*a.conll, line 1"):
        documents(path, (BEGIN + WORDS + END) * 2)
    with pytest.raises(ValueError, match="a.conll has no samples"):
        documents(path, "\n")


def test_names_and_parts(tmp_path):
    text = "".join(
        f"#begin document {name}\n" + WORDS.replace("d\t", f"{word}\t") + END
        for name, word in (("(d); part 012", "d"), ("(d)", "d"), ("(a (b))", "a (b)"))
    )
    assert [row["document"] for row in documents(tmp_path / "a.conll", text)] == ["d_12", "d", "a (b)"]


def test_windows_line_ends_and_spaces_in_words(tmp_path):
    text = (BEGIN + "d\t0\t0\tNew York\t(1)\nd\t0\t1\tx\u00a0y\t-\n \n" + WORDS + END).replace("\n", "\r\n")
    (row,) = rows(tmp_path / "a.conll", text)
    assert row["sentences"] == [["New York", "x\u00a0y"], ["w0", "w1"]] and row["mentions"] == [[0, 0, 0, 0]]


RECORD: dict[str, Any] = {
    "document": "bc/1",
    "sentences": [["He", "said"], ["She", "did", "too"]],
    "mentions": [[1, 0, 2, 7], [0, 0, 0, 3], [1, 0, 0, 3]],
    "speakers": [["Ann", "Ann"], ["Bob", "Bob", "Bob"]],
    "genre": "bc",
}
READ = RECORD | {"mentions": [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 2, 1]]}


@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz"])
def test_json_lines(tmp_path, ending):
    bare = {name: RECORD[name] for name in ("document", "sentences", "mentions")} | {"document": "2", "other": 1}
    found = documents(tmp_path / f"a.{ending}", "\n".join(map(json.dumps, (RECORD, bare))))
    assert found == [READ, READ | {"document": "2", "speakers": [], "genre": ""}]


def test_a_data_set(tmp_path):
    part = Dataset.from_list([RECORD, RECORD | {"document": "2", "speakers": [], "genre": None}])
    DatasetDict(train=part, validation=part).save_to_disk(tmp_path / "data")
    splits = read_documents(CoreferenceArguments(dataset=str(tmp_path / "data")))
    assert splits["train"].to_list() == [READ, READ | {"document": "2", "speakers": [], "genre": ""}]
    assert splits["validation"].to_list() == splits["train"].to_list()
    with pytest.raises(ValueError, match="data, train, row 0: `document` is 'bc/1'; .*also at .*, row 0"):
        read_documents(CoreferenceArguments(dataset=str(tmp_path / "data"), train_split="train[:1]+train"))


@pytest.mark.parametrize(
    "column, value",
    [
        ("document", None),
        ("document", " "),
        ("document", "first"),
        ("sentences", []),
        ("sentences", ["He said"]),
        ("sentences", [["He"], []]),
        ("sentences", [["He", ""]]),
        ("mentions", None),
        ("speakers", [["Ann"], ["Bob"] * 3]),
        ("speakers", "Ann"),
        ("genre", 3),
    ],
)
def test_bad_records(tmp_path, column, value):
    lines = map(json.dumps, (RECORD | {"document": "first"}, RECORD | {column: value}))
    with pytest.raises(ValueError, match=re.escape(f"a.jsonl, line 2: `{column}` is {value!r}; it must be ")):
        documents(tmp_path / "a.jsonl", "\n".join(lines))


NOT_MENTIONS = [[0, 0, 0], [0, 0, True, 1], [0, 0, 0.0, 1], "(0)", [2, 0, 0, 1], [-1, 0, 0, 1], [0, 0, 2, 1]]


@pytest.mark.parametrize("mention", [*NOT_MENTIONS, [0, 1, 0, 1], [0, -1, 0, 1]])
def test_mentions_are_words_of_a_sentence(tmp_path, mention):
    record = json.dumps(RECORD | {"mentions": [[0, 0, 1, 1], mention]})
    with pytest.raises(
        ValueError, match=re.escape(f"a.jsonl, line 1: `mentions` is {mention!r}; it must be [sentence")
    ):
        documents(tmp_path / "a.jsonl", record)
