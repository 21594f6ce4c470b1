"""Sentences with predicates from all formats, back to their columns, and the errors for bad lines."""

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from task_worker import SPLITS, TASKS

from modeling_elmo.run_scripts.fine_tuning.tasks.role_data import (
    KINDS,
    SemanticRoleArguments,
    checked_row,
    read_roles,
    role_rows,
)
from modeling_elmo.run_scripts.program.command_line import is_mistake_of_user

PROPBANK = """\
a-1	0	It	PRP	-	-	(ARG1*)	(C-ARG1*)
a-1	1	turned	VBD	turn	turn.15	(V*	*
a-1	2	out	RP	-	-	*)	*
a-1	3	a	DT	-	-	(ARG2*	*
a-1	4	win	NN	win	win.01	*)	(V*)

a-2	0	Yes	UH	-	-
"""
CONLL2005 = """\
It     PRP  (S1(NP*)  *       -   -     (A1*)  (C-A1*)
turned VBD  (VP*      *       15  turn  (V*    *
out    RP   *         *       -   -     *)     *
a      DT   (NP*      *       -   -     (A2*   *
win    NN   *)))      (MISC*) -   win   *)     (V*)

Yes    UH   (S1*)     *       -   -
"""
CONLL2012 = """\
#begin document (a/1); part 000
a/1  0  0  It      PRP  (TOP(NP*)  -     -   -  A  *       (ARG1*)  (C-ARG1*)  (1)
a/1  0  1  turned  VBD  (VP*       turn  15  1  A  *       (V*      *          -
a/1  0  2  out     RP   *          out   -   2  A  *       *)       *          -
a/1  0  3  a       DT   (NP*       -     -   -  A  (NORP*  (ARG2*   *          (2
a/1  0  4  win     NN   *)))       win   01  -  A  *)      *)       (V*)       2)
#end document
#begin document (a/1); part 001
a/1  1  0  Yes     UH   (TOP*)     yes   -   1  A  *       -

#end document
"""
NONE: dict[str, list] = {f"predicate_{name}": [] for name in ("index", "lemma", "sense", "kind", "tags")}
ROW = {
    "tokens": ["It", "turned", "out", "a", "win"],
    "predicate_index": [1, 4],
    "predicate_lemma": ["turn", "win"],
    "predicate_sense": ["turn.15", "win.01"],
    "predicate_kind": ["verb", "noun"],
    "predicate_tags": [["B-ARG1", "B-V", "I-V", "B-ARG2", "I-ARG2"], ["B-C-ARG1", "O", "O", "O", "B-V"]],
}
SHORT_TAGS = [[tag.replace("ARG", "A") for tag in tags] for tags in ROW["predicate_tags"]]
READ = [ROW, {"tokens": ["Yes"], **NONE}]


def written(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(path: Path, text: str, **options) -> list[dict]:
    return read_roles(SemanticRoleArguments(train_file=str(written(path, text)), **options))["train"].to_list()


def cells_of(tags: list[str]) -> list[str]:
    """The column of a predicate."""
    closing = [after != f"I{tag[1:]}" and tag != "O" for tag, after in zip(tags, [*tags[1:], "O"], strict=True)]
    opening = [f"({tag[2:]}" if tag[0] == "B" else "" for tag in tags]
    return [f"{start}*{')' * end}" for start, end in zip(opening, closing, strict=True)]


@pytest.mark.parametrize("name", SPLITS.values())
def test_columns_become_tags_and_the_same_columns(name):
    path = TASKS / f"propbank_{name}.tsv"
    sentences = path.read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    for sentence, (_, row) in zip(sentences, role_rows(path), strict=True):
        fixed = [line.split("\t")[:6] for line in sentence.split("\n")]
        columns = zip(*(cells_of(tags) for tags in row["predicate_tags"]), strict=True)
        lines = zip(fixed, columns if row["predicate_tags"] else [()] * len(fixed), strict=True)
        assert "\n".join("\t".join([*words, *cells]) for words, cells in lines) == sentence
        assert row["tokens"] == [columns[2] for columns in fixed]
        assert row["predicate_sense"] == [columns[5] for columns in fixed if columns[5] != "-"]
        assert row["predicate_index"] == [tags.index("B-V") for tags in row["predicate_tags"]]


def test_the_sample():
    """The traps: nothing is dropped."""
    splits = read_roles(
        SemanticRoleArguments(**{f"{key}_file": TASKS / f"propbank_{file}.tsv" for key, file in SPLITS.items()})
    )
    assert {split: len(data) for split, data in splits.items()} == {"train": 60, "validation": 20, "test": 20}
    rows = splits["train"].to_list()
    predicates = [tags for row in rows for tags in row["predicate_tags"]]
    assert len(predicates) == 105
    assert sum(not row["predicate_index"] for row in rows) == 8
    assert sum(tags[0] == "B-V" for tags in predicates) == 9
    assert sum("I-V" in tags for tags in predicates) == 3
    assert sum({*tags} <= {"B-V", "I-V", "O"} for tags in predicates) == 16
    assert {"B-C-V", "B-C-ARG2", "B-R-ARG0"} <= {tag for tags in predicates for tag in tags}
    assert {kind for row in rows for kind in row["predicate_kind"]} == {"verb", "noun", "adjective"}


@pytest.mark.parametrize("ending", ["tsv", "tsv.gz"])
def test_propbank(tmp_path, ending):
    assert read(tmp_path / f"a.{ending}", PROPBANK) == READ
    assert read(tmp_path / f"b.{ending}", PROPBANK.replace("\n", "\r\n") + "\n\n") == READ


@pytest.mark.parametrize("ending", ["conll", "txt", "conll.gz"])
def test_conll_2005(tmp_path, ending):
    changes = {"predicate_tags": SHORT_TAGS, "predicate_sense": ["", ""]}
    assert read(tmp_path / f"a.{ending}", CONLL2005) == [ROW | changes, READ[1]]
    lines = [line.split() for line in CONLL2005.splitlines()]
    short = "\n".join("\t".join([columns[0], *columns[5:]]) if columns else "" for columns in lines)
    assert read(tmp_path / f"b.{ending}", short) == [ROW | changes | {"predicate_kind": ["", ""]}, READ[1]]
    yes, it = CONLL2005.split("\n\n")[::-1]
    assert read(tmp_path / f"c.{ending}", f"{yes}\n{it}") == [READ[1], ROW | changes]


@pytest.mark.parametrize("ending", ["gold_conll", "v4_gold_conll", "auto_conll.gz"])
def test_conll_2012(tmp_path, ending):
    assert read(tmp_path / f"a.{ending}", CONLL2012) == [ROW | {"predicate_sense": ["15", "01"]}, READ[1]]


def test_the_format_of_another_ending(tmp_path):
    assert read(tmp_path / "a.txt", PROPBANK, roles_format="propbank") == READ
    assert read(tmp_path / "a.conll", CONLL2012, roles_format="conll2012")[1] == READ[1]
    parts = {"train_split": "train[:50%]", "validation_split": "train[50%:]", "roles_format": "propbank"}
    found = read_roles(SemanticRoleArguments(train_file=str(tmp_path / "a.txt"), **parts))
    assert [found[split].to_list() for split in found] == [[row] for row in READ]
    with pytest.raises(ValueError, match="--train_file a.props"):
        read_roles(SemanticRoleArguments(train_file="a.props", roles_format="conll2005"))
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="--roles_format conll2005"):
        read_roles(SemanticRoleArguments(train_file=str(tmp_path / "a.jsonl"), roles_format="conll2005"))


def test_a_lemma_beside_a_later_word(tmp_path):
    """The predicate's first word is marked, and the tag is that of the word with the lemma."""
    text = "a	0	x	XX	-	-	(V*)\na	1	-	HYPH	-	-	*\na	2	rays	NNS	xray	xray.01	(C-V*)\n"
    (row,) = read(tmp_path / "a.tsv", text)
    assert (row["predicate_index"], row["predicate_lemma"], row["predicate_kind"]) == ([0], ["xray"], ["noun"])


@pytest.mark.parametrize(
    "tag, kind",
    [("VBZ", "verb"), ("AUX", "verb"), ("NNPS", "noun"), ("PROPN", "noun"), ("ADJ", "adjective"), ("MD", "other")],
)
def test_kinds(tmp_path, tag, kind):
    assert read(tmp_path / "a.conll", f"go {tag} go (V*)")[0]["predicate_kind"] == [kind]


def test_rows_of_json_and_of_a_data_set(tmp_path):
    assert read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, READ))) == READ
    assert read(tmp_path / "a.json", json.dumps(READ)) == READ
    least = [{name: row[name] for name in ("tokens", "predicate_index", "predicate_tags")} for row in READ]
    unknown = dict.fromkeys(("predicate_lemma", "predicate_sense", "predicate_kind"), ["", ""])
    assert read(tmp_path / "b.jsonl", "\n".join(map(json.dumps, least))) == [ROW | unknown, READ[1]]
    DatasetDict(train=Dataset.from_list(READ), test=Dataset.from_list(READ[:1])).save_to_disk(tmp_path / "data")
    splits = read_roles(SemanticRoleArguments(dataset=str(tmp_path / "data")))
    assert {split: data.to_list() for split, data in splits.items()} == {"train": READ, "test": READ[:1]}


def test_an_empty_file(tmp_path):
    with pytest.raises(ValueError, match=r"a.tsv has no samples; pass other data"):
        read(tmp_path / "a.tsv", "\n\n")


@pytest.mark.parametrize(
    "line, column, cell, place, value",
    [
        (3, 8, None, 3, "7 columns"),
        (7, 6, None, 7, "5 columns, not 6"),
        (3, 6, "go.01", 1, "8 columns, not 6 and one for each of 3"),
        (4, 2, "4", 4, "'4'"),
        (4, 3, "", 4, "''"),
        (4, 8, "_", 4, "column 8.*'_'"),
        (1, 7, "(ARG1*", 2, r"column 7.*'\(V\*'.*ARG1 is open"),
        (4, 7, "*", 5, r"column 7.*'\*\)'.*none is open"),
        (5, 7, "*", 5, "column 7: the sentence ends inside ARG2"),
        (5, 8, "(ARG2*)", 5, "at no word"),
        (3, 8, "(V*)", 5, "line 3, .*line 5"),
    ],
)
def test_bad_lines(tmp_path, line, column, cell, place, value):
    """Another cell in line and column, or none: the place of the error, and what it shows."""
    lines = [text.split("\t") if text else [] for text in PROPBANK.splitlines()]
    lines[line - 1][column - 1 : column] = [] if cell is None else [cell]
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path / 'a.tsv'))}, line {place}\\b.*{value}"):
        read(tmp_path / "a.tsv", "\n".join(map("\t".join, lines)))


def test_columns_in_another_order_than_the_predicates(tmp_path):
    lines = [text.split("\t") for text in PROPBANK.split("\n\n")[0].splitlines()]
    with pytest.raises(ValueError, match="a.tsv, line 2 has a predicate, but its column has O here.*line 5"):
        read(tmp_path / "a.tsv", "\n".join("\t".join([*cells[:6], cells[7], cells[6]]) for cells in lines))


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.conll", "Yes (A0*)", r"line 1 is not conll2005: .*\['Yes', .*--roles_format"),
        ("a.conll", PROPBANK, "line 1 is not conll2005: .*--roles_format"),
        ("a.conll", CONLL2012, "line 2 has 14 columns.*--roles_format"),
        ("a.gold_conll", CONLL2012.replace("win   01", "win   -"), "line 2 has 14 columns, not 12 and one for each of"),
        ("a.gold_conll", PROPBANK, "line 1 has 8 columns, not 12 .*--roles_format"),
    ],
)
def test_files_in_other_columns(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=f"{name}, {message}"):
        read(tmp_path / name, text)


TAGS = ROW["predicate_tags"]


@pytest.mark.parametrize(
    "column, value, shown",
    [
        ("tokens", "It turned", "'It turned'"),
        ("tokens", ["It", 3, "out", "a", "win"], "3"),
        ("predicate_index", None, "None"),
        ("predicate_index", [1, 3], r"3; .*\[4\]"),
        ("predicate_index", [True, 4], "True"),
        ("predicate_lemma", ["turn"], r"\['turn'\]; .* 2 predicates"),
        ("predicate_lemma", ["turn", 4], r"\['turn', 4\]"),
        ("predicate_kind", ["verb", "thing"], "'thing'; it must be one of verb, noun"),
        ("predicate_tags", [TAGS[0], TAGS[1][:-1]], r"\['B-C-ARG1', .* 5 words"),
        ("predicate_tags", [TAGS[0], ["B-A", "I-B", "O", "O", "B-V"]], "'I-B'"),
        ("predicate_tags", [TAGS[0], ["B-", "O", "O", "O", "B-V"]], "'B-'"),
    ],
)
def test_bad_rows(tmp_path, column, value, shown):
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: `{column}` is {shown}"):
        read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, [ROW, ROW | {column: value}])))


# A second definition of the columns of propbank: each column is one string, matched as a whole.
SPAN = r"\(([^()* ]+)\*(?: \*)* \*\) |\(([^()* ]+)\*\) |\* "


def defined(sentences: list[list[list[str]]]) -> list[dict[str, Any]] | None:
    """The rows of the sentences, or None if one of them has no meaning."""
    rows = [defined_row(lines) for lines in sentences if lines]
    return None if None in rows or not rows else rows


def defined_row(lines: list[list[str]]) -> dict[str, Any] | None:
    if len({len(cells) for cells in lines}) > 1 or len(lines[0]) < 6:
        return None
    index, words, _, lemmas, senses = list(zip(*lines, strict=True))[1:6]
    predicates = [number for number, sense in enumerate(senses) if sense != "-"]
    columns = ["".join(f"{cells[number]} " for cells in lines) for number in range(6, len(lines[0]))]
    if list(index) != [str(number) for number in range(len(lines))] or "" in words or len(columns) != len(predicates):
        return None
    found = []
    for number, column in zip(predicates, columns, strict=True):
        if not re.fullmatch(f"(?:{SPAN})*", column) or column.count("(V*") != 1:
            return None
        tags = []
        for match in re.finditer(SPAN, column):
            role, size = match[1] or match[2], match[0].count(" ")
            tags += [f"B-{role}", *[f"I-{role}"] * (size - 1)] if role else ["O"]
        if tags[number][2:] not in ("V", "C-V"):
            return None
        found.append((tags.index("B-V"), lemmas[number], senses[number], tags))
    names = ("predicate_index", "predicate_lemma", "predicate_sense", "predicate_tags")
    return {"tokens": [*words], **{name: [each[number] for each in found] for number, name in enumerate(names)}}


def damage(sentences: list[list[list[str]]], chance: random.Random):
    """One accident: another cell, or a cell, a line or a blank line that is lost or repeated."""
    cells = ["*", "*)", "(V*)", "(V*", "(C-V*)", "(ARG1*)", "(ARG1*", "(A(B*))", "-", "go.01", "0", "1", "", "(", "x y"]
    number = chance.randrange(len(sentences))
    lines = sentences[number]
    line = chance.randrange(len(lines))
    column = chance.randrange(len(lines[line]))
    kind, times = chance.choice(["cell", "cell", "cells", "lines", "blank"]), chance.choice([0, 2])
    if kind == "cell":
        lines[line][column] = chance.choice(cells)
    elif kind == "cells":
        lines[line][column : column + 1] *= times
    elif kind == "lines" and (times or len(lines) > 1):
        lines[line : line + 1] = [[*lines[line]] for _ in range(times)]
    elif kind == "blank" and times:
        sentences[number : number + 1] = [part for part in (lines[:line], lines[line:]) if part]
    elif kind == "blank":
        sentences[number : number + 2] = [[cells for part in sentences[number : number + 2] for cells in part]]


def test_damaged_files_are_read_rightly_or_refused(tmp_path):
    chance, counts = random.Random("roles"), {True: 0, False: 0}
    path = TASKS / "propbank_train.tsv"
    whole = [[line.split("\t") for line in text.split("\n")] for text in path.read_text("utf-8").rstrip().split("\n\n")]
    for _ in range(300):
        sentences = [[[*cells] for cells in lines] for lines in chance.sample(whole, 3)]
        for _ in range(chance.choice([0, 1, 1, 1, 2])):
            damage(sentences, chance)
        path = written(tmp_path / "a.tsv", "\n\n".join("\n".join(map("\t".join, lines)) for lines in sentences))
        wanted = defined(sentences)
        try:
            found = [checked_row(*each) for each in role_rows(path)]
        except Exception as error:
            assert wanted is None and is_mistake_of_user(error) and re.match(f"{path}, line [0-9]", str(error)), error
        else:
            for row in found:
                assert set(row.pop("predicate_kind")) <= {"", *KINDS}
            assert found == wanted
        counts[wanted is None] += 1
    assert min(counts.values()) > 60, counts
