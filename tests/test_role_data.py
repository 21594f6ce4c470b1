"""Sentences with predicates from all formats, back to their columns, and the errors for bad lines."""

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from task_worker import SPLITS, TASKS

from modeling_elmo.run_scripts.fine_tuning.role_data import KINDS, RoleDataArguments, checked_row, read_roles, role_rows
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
    return read_roles(RoleDataArguments(train_file=str(written(path, text)), **options))["train"].to_list()


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
        RoleDataArguments(**{f"{key}_file": TASKS / f"propbank_{file}.tsv" for key, file in SPLITS.items()})
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
    found = read_roles(RoleDataArguments(train_file=str(tmp_path / "a.txt"), **parts))
    assert [found[split].to_list() for split in found] == [[row] for row in READ]
    with pytest.raises(ValueError, match=r"--train_file a.props has an unknown ending; .*\.tsv, \.conll, .*\.jsonl"):
        read_roles(RoleDataArguments(train_file="a.props", roles_format="conll2005"))
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="--roles_format conll2005 is for files with a word per line, and there is"):
        read_roles(RoleDataArguments(train_file=str(tmp_path / "a.jsonl"), roles_format="conll2005"))


def test_a_lemma_beside_a_later_word(tmp_path):
    """The predicate's first word is marked, and the tag is that of the word with the lemma."""
    text = "a	0	x	XX	-	-	(V*)\na	1	-	HYPH	-	-	*\na	2	rays	NNS	xray	xray.01	(C-V*)\n"
    (row,) = read(tmp_path / "a.tsv", text)
    assert (row["predicate_index"], row["predicate_lemma"], row["predicate_kind"]) == ([0], ["xray"], ["noun"])


@pytest.mark.parametrize(
    "tag, kind",
    [("VBZ", "verb"), ("AUX", "verb"), ("VERB", "verb"), ("NNPS", "noun"), ("PROPN", "noun"), ("NOUN", "noun")]
    + [("JJR", "adjective"), ("ADJ", "adjective"), ("RB", "other"), ("NUM", "other"), ("MD", "other")],
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
    splits = read_roles(RoleDataArguments(dataset=str(tmp_path / "data")))
    assert {split: data.to_list() for split, data in splits.items()} == {"train": READ, "test": READ[:1]}


def test_an_empty_file(tmp_path):
    with pytest.raises(ValueError, match=r"a.tsv has no samples; pass other data"):
        read(tmp_path / "a.tsv", "\n\n")


def replaced(line: int, column: int, cell: str | None) -> Callable[[list[list[str]]], Any]:
    """Another cell in line and column, numbered as in messages; None drops the cell."""

    def change(lines: list[list[str]]):
        lines[line - 1][column - 1 : column] = [] if cell is None else [cell]

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (replaced(3, 8, None), r"line 3 has 7 columns, but its sentence begins with 8: \['a-1', '2', 'out'"),
        (replaced(1, 8, None), "line 2 has 8 columns, but its sentence begins with 7: .* Give all lines of a sentence"),
        (replaced(7, 6, None), r"line 7 has 5 columns, not 6 and one per predicate: .* another --roles_format\."),
        (
            replaced(1, 7, "(ARG1*"),
            r"line 2, column 7: \(V\* begins inside ARG1; roles of a predicate do not nest\. Cl",
        ),
        (replaced(1, 7, "(ARG1(ARG2*))"), r"line 1, column 7: '\(ARG1\(ARG2\*\)\)' is no part of a role; write \(ROLE"),
        (replaced(4, 8, "_"), r"line 4, column 8: '_' is no part of a role"),
        (replaced(4, 8, "(*)"), r"line 4, column 8: '\(\*\)' is no part of a role"),
        (
            replaced(3, 7, "*"),
            r"line 4, column 7: \(ARG2\* begins inside V; roles of a predicate do not nest\. Close V",
        ),
        (replaced(4, 7, "*"), r"line 5, column 7: \*\) closes a role, but none is open\. Write \*, or open the role"),
        (replaced(5, 7, "*"), r"line 5, column 7: the sentence ends inside ARG2; close it with \*\)"),
        (replaced(5, 8, "(ARG2*)"), r"line 5: no word of the predicate's column is \(V\*; mark the predicate"),
        (
            replaced(3, 8, "(V*)"),
            r"line 5: \(V\* begins again, after .*a\.tsv, line 3; write \(C-V\* for further pieces",
        ),
        (
            replaced(3, 6, "go.01"),
            "line 1: the sentence has 3 predicates in column 6, but 2 columns of roles. Give each",
        ),
        (replaced(5, 6, "-"), "line 1: the sentence has 1 predicates in column 6, but 2 columns of roles"),
        (replaced(7, 6, "go.01"), "line 7: the sentence has 1 predicates in column 6, but 0 columns of roles"),
        (replaced(4, 2, "4"), "line 4: the word's index is '4', not 3. Count words from 0, and separate sentences"),
        (replaced(4, 3, ""), "line 4: a token is ''; it must be a string that is not empty"),
        (lambda lines: lines.pop(2), "line 3: the word's index is '3', not 2. Count words from 0, and separate sent"),
        (
            lambda lines: [columns.__setitem__(slice(6, 8), columns[:5:-1]) for columns in lines[:5]],
            r"line 2 has a predicate, but its column has O here, and V at .*a\.tsv, line 5\. Put the predicates' colu",
        ),
    ],
)
def test_bad_lines(tmp_path, change, message):
    lines = [line.split("\t") if line else [] for line in PROPBANK.splitlines()]
    change(lines)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path / 'a.tsv'))}, {message}"):
        read(tmp_path / "a.tsv", "\n".join(map("\t".join, lines)))


@pytest.mark.parametrize(
    "name, old, new, message",
    [
        ("a.conll", "(A2*  ", "A2*)", r"line 4, column 7: 'A2\*\)' is no part of a role; write"),
        ("a.conll", "win   *)     (V*)", "win *) * *", "line 5 has 9 columns, but its sentence begins with 8"),
        ("a.conll", "*       -   -\n", "* - go\n", "line 7: the sentence has 1 predicates in column 6, but 0 columns"),
        ("a.conll", "\nYes    UH ", "\nYes", "line 7 has 5 columns, not 6 and one per predicate"),
        ("a.conll", CONLL2005, "Yes (A0*)", r"line 1 has no column of lemmas between the word and the roles: \['Yes'"),
        ("a.gold_conll", "win   01", "win   -", "line 2: the sentence has 1 predicates in column 8, but 2 columns of"),
        ("a.gold_conll", "#begin document (a/1); part 001\n", "", None),
        ("a.gold_conll", "(V*)  ", "*", r"line 6: no word of the predicate's column is \(V\*"),
    ],
)
def test_bad_lines_of_conll(tmp_path, name, old, new, message):
    text = CONLL2012 if name == "a.gold_conll" else CONLL2005
    assert text.count(old) == 1
    if message is None:
        assert len(read(tmp_path / name, text.replace(old, new))) == 2
        return
    with pytest.raises(ValueError, match=f"{name}, {message}"):
        read(tmp_path / name, text.replace(old, new))


def test_a_file_in_another_format(tmp_path):
    with pytest.raises(ValueError, match="line 1 has 8 columns, not 12 .*or pass another --roles_format"):
        read(tmp_path / "a.gold_conll", PROPBANK)
    for text in (PROPBANK, re.sub("#.*", "", CONLL2012)):
        with pytest.raises(
            ValueError, match="a.conll, line [12]: column [23] has the words' indexes, .*--roles_format pro"
        ):
            read(tmp_path / "a.conll", text)
    with pytest.raises(ValueError, match="line 2 has 14 columns, but its sentence begins with 5: .*--roles_format"):
        read(tmp_path / "a.conll", CONLL2012)


TAGS = ROW["predicate_tags"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": []}, r"tokens is \[\]; it must be a list of words that is not empty"),
        ({"tokens": "It turned"}, "tokens is 'It turned'; it must be a list of words"),
        ({"tokens": ["It", "", "out", "a", "win"]}, "a token is ''; it must be a string that is not empty"),
        ({"tokens": ["It", 3, "out", "a", "win"]}, "a token is 3; it must be a string that is not empty"),
        (
            {"predicate_index": None},
            "predicate_index is None; it must be a list of the predicates' first words, from 0",
        ),
        ({"predicate_index": 1}, "predicate_index is 1; it must be a list of the predicates' first words"),
        ({"predicate_tags": None}, r"predicate_tags is None beside predicate_index \[1, 4\]; pass lists with an entry"),
        ({"predicate_index": [1]}, r"predicate_lemma is \['turn', 'win'\] beside predicate_index \[1\]; pass lists"),
        ({"predicate_tags": TAGS[:1]}, r"predicate_tags is \[\[.* beside predicate_index \[1, 4\]; pass lists"),
        ({"predicate_lemma": ["turn", 4]}, r"predicate_lemma is \['turn', 4\]; it must be a list of strings"),
        (
            {"predicate_kind": ["verb", "thing"]},
            "predicate_kind is 'thing'; pass one of verb, noun, adjective, other, or",
        ),
        (
            {"predicate_tags": [TAGS[0], TAGS[1][:-1]]},
            "the tags of a predicate are .*; pass a tag for each of 5 tokens",
        ),
        ({"predicate_tags": [TAGS[0], "BOOOB"]}, "the tags of a predicate are 'BOOOB'; pass a tag for each"),
        (
            {"predicate_tags": [TAGS[0], ["O", "I-A", "O", "O", "B-V"]]},
            r"the tag 'I-A' after 'O' is not BIO \(O, B-ROLE",
        ),
        ({"predicate_tags": [TAGS[0], ["B-A", "I-B", "O", "O", "B-V"]]}, "the tag 'I-B' after 'B-A' is not BIO"),
        ({"predicate_tags": [TAGS[0], ["B-", "O", "O", "O", "B-V"]]}, "the tag 'B-' after 'O' is not BIO"),
        ({"predicate_tags": [TAGS[0], ["A0", "O", "O", "O", "B-V"]]}, "the tag 'A0' after 'O' is not BIO"),
        ({"predicate_tags": [TAGS[0], [None, "O", "O", "O", "B-V"]]}, "the tag None after 'O' is not BIO"),
        (
            {"predicate_index": [1, 3]},
            r"predicate_index is 3, but B-V is at \[4\]\. Each predicate has one B-V, at its",
        ),
        ({"predicate_index": [1, 4.0]}, r"predicate_index is 4\.0, but B-V is at \[4\]"),
        ({"predicate_index": [True, 4]}, r"predicate_index is True, but B-V is at \[1\]"),
        ({"predicate_tags": [TAGS[0], ["B-V", "O", "O", "O", "B-V"]]}, r"predicate_index is 4, but B-V is at \[0, 4\]"),
    ],
)
def test_bad_rows(tmp_path, changes, message):
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: {message}"):
        read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, [ROW, ROW | changes])))


def test_a_bad_row_of_a_data_set(tmp_path):
    DatasetDict(train=Dataset.from_list([ROW, ROW | {"predicate_index": [1, 0]}])).save_to_disk(tmp_path / "data")
    with pytest.raises(ValueError, match=r"data, train, row 1: predicate_index is 0, but B-V is at \[4\]"):
        read_roles(RoleDataArguments(dataset=str(tmp_path / "data")))


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
    """One accident: another cell, or a cell, a line or a blank line that is lost, repeated or inserted."""
    cells = ["*", "*)", "(V*)", "(V*", "(C-V*)", "(ARG1*)", "(ARG1*", "(A(B*))", "-", "go.01", "0", "1", "", "(", "x y"]
    number = chance.randrange(len(sentences))
    lines = sentences[number]
    line = chance.randrange(len(lines))
    column = chance.randrange(len(lines[line]))
    match chance.choice(
        ["cell", "cell", "cell", "lose", "repeat", "swap", "lose line", "repeat line", "split", "join"]
    ):
        case "cell":
            lines[line][column] = chance.choice(cells)
        case "lose":
            del lines[line][column]
        case "repeat":
            lines[line].insert(column, lines[line][column])
        case "swap":
            other = chance.randrange(len(lines))
            lines[line][-1], lines[other][-1] = lines[other][-1], lines[line][-1]
        case "lose line" if len(lines) > 1:
            del lines[line]
        case "repeat line":
            lines.insert(line, [*lines[line]])
        case "split":
            sentences[number : number + 1] = [part for part in (lines[:line], lines[line:]) if part]
        case "join":
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
