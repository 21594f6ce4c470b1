"""Semantic roles: sentences from all formats, rows and their labels, scores, predictions, ensembles, stored layers."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from errors import refused
from task_worker import (
    LEARNING,
    SPLITS,
    TASKS,
    WITHOUT_DROPOUT,
    bilm,
    experiment,
    predictions_of,
    role_sentences_of,
    written,
)

from modeling_elmo import ELMoTokenizer
from modeling_elmo.heads.role_labeler import NO_WORD
from modeling_elmo.run_scripts.fine_tuning.task import SplitOutput
from modeling_elmo.run_scripts.fine_tuning.tasks.semantic_roles import (
    KINDS,
    RoleCollator,
    SemanticRoleArguments,
    SemanticRoles,
    SemanticRoleTrainingArguments,
    checked_row,
    predicate_scores,
    role_rows,
    role_scores,
)

FILES = {f"{split}_file": str(TASKS / f"propbank_{name}.tsv") for split, name in (("train", "train"), ("test", "test"))}
SENTENCES = [  # words; index and tags of each predicate
    (["Ann", "saw", "Bo", "leave"], [(1, "B-ARG0 B-V B-ARG1 I-ARG1"), (3, "O O B-ARG0 B-V")]),
    (["Rain"], []),
    (["Stop", "now"], [(0, "B-V B-ARGM-TMP")]),
]


def write_sentences(path: Path, sentences=SENTENCES) -> str:
    rows = [
        {
            "tokens": words,
            "predicate_index": [index for index, _ in predicates],
            "predicate_tags": [tags.split() for _, tags in predicates],
        }
        for words, predicates in sentences
    ]
    written(path, "".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def task_of(folder: Path, **options) -> SemanticRoles:
    return SemanticRoles.read(SemanticRoleArguments(train_file=write_sentences(folder / "train.jsonl"), **options))


def encoded(task: SemanticRoles, split: str = "train", tokenizer: ELMoTokenizer | None = None) -> Dataset:
    return task.encode_splits(tokenizer or ELMoTokenizer(), [split])[split]


def output_of(task: SemanticRoles, log_probs: np.ndarray, predicate_logits: np.ndarray, split: str) -> SplitOutput:
    """The output for a split, as Trainer makes it of the model's."""
    rows = encoded(task, split)
    for row, ids in zip(predicate_logits, rows["input_ids"], strict=True):
        row[[0, *range(len(ids) - 1, len(row))]] = NO_WORD
    kept = task.preprocess_logits(tuple(map(torch.from_numpy, (log_probs, predicate_logits))))
    return SplitOutput(tuple(array.numpy() for array in kept), None, task.data[split], rows)


def test_the_settings_of_the_paper(tmp_path):
    training = SemanticRoleTrainingArguments(output_dir=str(tmp_path))
    assert (training.adadelta, training.learning_rate, training.ema_decay) == (True, 1.0, 0.0)
    assert (training.per_device_train_batch_size, training.max_grad_norm) == (80, 1.0)
    assert SemanticRoleArguments(**FILES).max_length == 102 and SemanticRoles.elmo_dropout == 0.1


# Sentences

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


def read(path: Path, text: str, **options) -> list[dict]:
    arguments = SemanticRoleArguments(train_file=str(written(path, text)), **options)
    return SemanticRoles.read(arguments).data["train"].to_list()


@pytest.mark.parametrize("ending", ["tsv", "tsv.gz"])
def test_propbank(tmp_path, ending):
    assert read(tmp_path / f"a.{ending}", PROPBANK) == READ
    assert read(tmp_path / f"b.{ending}", PROPBANK.replace("\n", "\r\n") + "\n\n") == READ


def test_conll_2005(tmp_path):
    changes = {"predicate_tags": SHORT_TAGS, "predicate_sense": ["", ""]}
    assert read(tmp_path / "a.conll", CONLL2005) == [ROW | changes, READ[1]]
    lines = [line.split() for line in CONLL2005.splitlines()]
    short = "\n".join("\t".join([columns[0], *columns[5:]]) if columns else "" for columns in lines)
    assert read(tmp_path / "b.txt", short) == [ROW | changes | {"predicate_kind": ["", ""]}, READ[1]]


def test_conll_2012(tmp_path):
    assert read(tmp_path / "a.v4_gold_conll", CONLL2012) == [ROW | {"predicate_sense": ["15", "01"]}, READ[1]]


def test_the_format_of_another_ending(tmp_path):
    assert read(tmp_path / "a.txt", PROPBANK, roles_format="propbank") == READ
    rows = written(tmp_path / "a.jsonl", json.dumps(ROW))
    with refused("--roles_format is for files with one word per line"):
        SemanticRoles.read(SemanticRoleArguments(train_file=str(rows), roles_format="conll2005"))


def test_a_lemma_beside_a_later_word(tmp_path):
    """The predicate's first word is marked, and the word with the lemma gives the tag."""
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
    least = {name: ROW[name] for name in ("tokens", "predicate_index", "predicate_tags")}
    unknown = dict.fromkeys(("predicate_lemma", "predicate_sense", "predicate_kind"), ["", ""])
    assert read(tmp_path / "b.jsonl", json.dumps(least)) == [ROW | unknown]
    DatasetDict(train=Dataset.from_list(READ)).save_to_disk(tmp_path / "data")
    splits = SemanticRoles.read(SemanticRoleArguments(dataset=str(tmp_path / "data"))).data
    assert splits["train"].to_list() == READ


@pytest.mark.parametrize(
    "line, column, cell, place, value",
    [
        (3, 8, None, 3, "7 columns, not 6 and one for each of 2"),
        (4, 2, "4", 4, "'4'"),
        (4, 3, "", 4, "''"),
        (4, 8, "_", 4, "column 8.*'_'"),
        (1, 7, "(ARG1*", 2, r"column 7.*'\(V\*'.*ARG1 is open"),
        (4, 7, "*", 5, r"column 7.*'\*\)'.*none is open"),
        (5, 7, "*", 5, "column 7: the sentence ends inside ARG2"),
        (5, 8, "(ARG2*)", 5, "column 8.*'B-ARG2'"),
    ],
)
def test_bad_lines(tmp_path, line, column, cell, place, value):
    """Another cell in line and column, or none: the place of the error, and what it shows."""
    lines = [text.split("\t") if text else [] for text in PROPBANK.splitlines()]
    lines[line - 1][column - 1 : column] = [] if cell is None else [cell]
    with refused(f"^{re.escape(str(tmp_path / 'a.tsv'))}, line {place}\\b.*{value}"):
        read(tmp_path / "a.tsv", "\n".join(map("\t".join, lines)))


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.conll", PROPBANK, "line 1 is not conll2005: .*--roles_format"),
        ("a.conll", CONLL2012, "line 1 has 5 columns.*--roles_format"),
        ("a.gold_conll", CONLL2012.replace("win   01", "win   -"), "line 2 has 14 columns, not 12 and one for each of"),
    ],
)
def test_files_in_other_columns(tmp_path, name, text, message):
    with refused(f"{name}, {message}"):
        read(tmp_path / name, text)


TAGS = ROW["predicate_tags"]


@pytest.mark.parametrize(
    "column, value, shown",
    [
        ("tokens", "It turned", "'It turned'"),
        ("predicate_index", None, "None"),
        ("predicate_index", [1, 3], r"3; .*\[4\]"),
        ("predicate_index", [True, 4], "True"),
        ("predicate_lemma", ["turn"], r"\['turn'\]; .* 2 predicates"),
        ("predicate_lemma", ["turn", 4], "4"),
        ("predicate_kind", ["verb", "thing"], "'thing'; .* one of verb, noun"),
        ("predicate_tags", [TAGS[0], TAGS[1][:-1]], r"\['B-C-ARG1', .* 5 words"),
        ("predicate_tags", [TAGS[0], ["B-A", "I-B", "O", "O", "B-V"]], "'I-B'"),
    ],
)
def test_bad_rows(tmp_path, column, value, shown):
    with refused(f"a.jsonl, line 2: `{column}` is {shown}"):
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


def lines_of(path: Path) -> list[list[list[str]]]:
    """The cells of each line of each sentence."""
    sentences = path.read_text("utf-8").rstrip().split("\n\n")
    return [[line.split("\t") for line in sentence.split("\n")] for sentence in sentences]


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = [checked_row(*row) for row in role_rows(path)]
    for row in rows:
        assert set(row.pop("predicate_kind")) <= {"", *KINDS}
    return rows


@pytest.mark.parametrize("name", SPLITS.values())
def test_columns_become_tags(name):
    path = TASKS / f"propbank_{name}.tsv"
    assert rows_of(path) == defined(lines_of(path))


def test_damaged_files_are_read_rightly_or_refused(tmp_path):
    chance, counts = random.Random("roles"), {True: 0, False: 0}
    whole = lines_of(TASKS / "propbank_train.tsv")
    for _ in range(300):
        sentences = [[[*cells] for cells in lines] for lines in chance.sample(whole, 3)]
        for _ in range(chance.choice([0, 1, 1, 1, 2])):
            damage(sentences, chance)
        path = written(tmp_path / "a.tsv", "\n\n".join("\n".join(map("\t".join, lines)) for lines in sentences))
        wanted = defined(sentences)
        try:
            found = rows_of(path)
        except ValueError as error:
            found = None
            assert re.match(f"{path}, line [0-9]", str(error))
        assert found == wanted
        counts[wanted is None] += 1
    assert min(counts.values()) > 60, counts


# Rows


def test_a_row_for_each_predicate(tmp_path):
    task = task_of(tmp_path)
    assert task.labels == ["O", "B-ARG0", "B-ARG1", "B-ARGM-TMP", "B-V", "I-ARG1"]
    rows = encoded(task)
    assert rows["example_number"] == [0, 0, 1, 2]
    assert rows["token_type_ids"] == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0], [0, 1, 0, 0]]
    first, second = [-100, 1, 4, 2, 5, -100], [-100, 0, 0, 1, 4, -100]
    assert rows["labels"] == [first, second, [-100] * 3, [-100, 4, 3, -100]]
    known = [[-100, 0, 1, 0, 1, -100], [-100] * 6, [-100, 0, -100], [-100, 1, 0, -100]]
    assert rows["predicate_labels"] == known
    assert [len(ids) for ids in rows["input_ids"]] == [6, 6, 3, 4]


def test_long_training_sentences_are_cut(tmp_path, caplog):
    task = task_of(tmp_path, test_file=write_sentences(tmp_path / "test.jsonl"), max_length=5)
    assert caplog.text.count("--max_length 5 cuts 1 predicates off the training data") == 1
    rows = encoded(task)
    assert rows["example_number"] == [0, 1, 2]
    assert rows["labels"][0] == [-100, 1, 4, 2, -100] and rows["predicate_labels"][0] == [-100, 0, 1, 0, -100]
    assert encoded(task, "test")["example_number"] == [0, 0, 1, 2]
    rows = encoded(task_of(tmp_path, max_length=3))  # the first sentence loses both
    assert rows["labels"] == [[-100] * 3, [-100] * 3, [-100, 4, -100]]
    assert rows["predicate_labels"] == [[-100, 0, -100], [-100, 0, -100], [-100, 1, -100]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_padded_on_the_right(tmp_path, side):
    tokenizer = ELMoTokenizer(padding_side=side)
    rows = list(encoded(task_of(tmp_path), tokenizer=tokenizer).remove_columns("example_number"))
    batch = RoleCollator(tokenizer)(rows)
    assert tokenizer.padding_side == side and batch["character_ids"].shape[:2] == (4, 6)
    for name, padding in {"labels": -100, "predicate_labels": -100, "token_type_ids": 0, "attention_mask": 0}.items():
        for found, row in zip(batch[name].tolist(), rows, strict=True):
            assert found == [*row[name], *[padding] * (6 - len(row[name]))]


def test_roles_that_training_lacks_are_errors(tmp_path, caplog):
    other = [(["He", "ran", "fast"], [(1, "B-ARG9 B-V B-ARGM-TMP")])]
    task = task_of(tmp_path, test_file=write_sentences(tmp_path / "test.jsonl", other))
    assert "Split 'test' has labels that do not occur in 'train': B-ARG9 (1). A model cannot find them" in caplog.text
    rows = encoded(task, "test")
    assert rows["labels"] == [[-100, -100, 4, 3, -100]]
    log_probs = np.full((1, 5, 6), -9.0, dtype=np.float32)
    log_probs[0, [1, 2, 3], [0, 4, 3]] = -0.1  # the best that is possible
    scores = task.scores(task.predictions(output_of(task, log_probs, np.full((1, 5), -9.0), "test")))
    assert (scores["precision"], scores["recall"], scores["per_type"]["ARG9"]["recall"]) == (1.0, 0.5, 0.0)


def test_roles_come_from_the_training_data(tmp_path):
    with refused("'train', but there are only .'test'."):
        SemanticRoles.read(SemanticRoleArguments(test_file=FILES["test_file"]))
    file = write_sentences(tmp_path / "rain.jsonl", [(["Rain"], []), (["Snow", "too"], [])])
    with refused("No row of the split 'train' has predicate_tags"):
        SemanticRoles.read(SemanticRoleArguments(train_file=file))


# Scores and predictions


def test_best_sequences_and_found_predicates(tmp_path):
    """The likeliest labels would begin ARG1 with I; and another predicate is found."""
    task = task_of(tmp_path, test_file=write_sentences(tmp_path / "test.jsonl"))
    log_probs = np.full((4, 6, 6), -5.0, dtype=np.float32)
    predicate_logits = np.full((4, 6), -1.0, dtype=np.float32)
    gold = encoded(task, "test")["labels"]
    for row, labels in enumerate(gold):
        log_probs[row, range(len(labels)), np.maximum(labels, 0)] = -0.1
    log_probs[0, 1] = [-4, -3, -2, -6, -6, -0.5]  # I-ARG1, where nothing has begun
    predicate_logits[[0, 0, 2], [2, 3, 1]] = 1.0
    predicate_logits[1] = 1.0  # only the first row of a sentence is read
    output = output_of(task, log_probs, predicate_logits, "test")
    first, rain, stop = task.predictions(output)
    verb, other = first["verbs"]
    assert (verb["tags"], other["tags"]) == (["B-ARG1", "B-V", "B-ARG1", "I-ARG1"], ["O", "O", "B-ARG0", "B-V"])
    assert verb["gold_tags"] == SENTENCES[0][1][0][1].split()
    assert verb["description"] == "[ARG1: Ann] [V: saw] [ARG1: Bo leave]"
    span = {"role": "ARG0", "start": 8, "end": 10, "text": "Bo", "score": pytest.approx(np.exp(-0.1))}
    assert other["arguments"] == [span]
    assert (first["predicates"], first["predicted_predicates"]) == ([1, 3], [1, 2])
    assert (rain["verbs"], rain["predicted_predicates"]) == ([], [0])
    assert (stop["verbs"][0]["verb"], stop["predicted_predicates"]) == ("Stop", [])
    scores = task.scores(task.predictions(output))
    assert (scores["precision"], scores["recall"]) == (3 / 4, 3 / 4)
    assert (scores["predicate_precision"], scores["predicate_recall"]) == (1 / 3, 1 / 3)
    assert "per_kind" not in scores  # the file has no kinds
    log_probs[0, 1, 0] = np.nan
    with refused("Some logits are not finite: training diverged"):
        task.scores(task.predictions(output_of(task, log_probs, predicate_logits, "test")))


def test_words_and_what_follows_them(tmp_path):
    """Markers, padding of the model, and Trainer's padding, -100, have no label; words of any score have one."""
    log_probs = np.log(np.full((1, 6, 6), 1 / 6, dtype=np.float32))
    log_probs[0, 5] = -100
    scores = torch.tensor([[NO_WORD, 3.0, -100.0, NO_WORD, NO_WORD, -100.0]])
    labels, probabilities, predicates = task_of(tmp_path).preprocess_logits((torch.from_numpy(log_probs), scores))
    assert (labels[0] >= 0).tolist() == [False, True, True, False, False, False]
    assert predicates is scores and probabilities[0, 1:3].tolist() == pytest.approx([1 / 6, 1 / 6])


def test_a_marker_that_a_sentence_spells_is_no_word_of_a_role(tmp_path):
    sentences = [(["Ann", "saw", "</S>"], [(1, "B-ARG0 B-V O")])]
    task = task_of(tmp_path, test_file=write_sentences(tmp_path / "test.jsonl", sentences))
    log_probs, scores = np.full((1, 5, 6), -3.0, dtype=np.float32), np.full((1, 5), 1.0)
    log_probs[0, :, 1] = -0.1  # B-ARG0
    scores[0, 3] = NO_WORD
    ((verb,),) = (row["verbs"] for row in task.predictions(output_of(task, log_probs, scores, "test")))
    assert verb["tags"] == ["B-ARG0", "B-ARG0", "O"]


# The rules of scores


@pytest.mark.parametrize(
    "predicted, gold, expected",
    [
        ("B-A0 B-V O", "B-A0 O B-V", (1, 1, 1)),  # V is not scored
        ("B-A0 B-V B-C-V", "B-A0 B-V O", (1, 1, 1)),  # nor is C-V
        ("B-A0 I-A0 B-V", "B-A0 B-V O", (0, 0, 0)),  # all words
        ("B-A0 B-V B-A0", "B-A0 B-V B-A1", (0.5, 0.5, 0.5)),
        ("B-A1 B-V B-C-A1", "B-A1 B-V B-C-A1", (1, 1, 1)),  # one argument
        ("B-A1 B-V O", "B-A1 B-V B-C-A1", (0, 0, 2 / 3)),  # a piece is missing
        ("B-A1 B-V B-C-A1 O", "B-A1 B-V B-C-A1 I-C-A1", (0, 0, 0.5)),  # a piece is shorter
        ("B-A1 I-A1", "B-A1 B-C-A1", (0, 0, 0)),  # the same words in other pieces
        ("B-C-A1 B-V", "B-A1 B-V", (1, 1, 0)),  # C-X without an X
        ("B-A1 B-V B-A1", "B-A1 B-V B-C-A1", (0, 0, 0.5)),
        ("B-R-A0 B-V", "B-A0 B-V", (0, 0, 0)),  # R-X is a role of its own
        ("B-A0 B-V", "O B-V", (0, 0, 0)),
    ],
)
def test_rules_by_hand(predicted, gold, expected):
    scores = role_scores([predicted.split()], [gold.split()])
    assert (scores["precision"], scores["recall"], scores["span_f1"]) == pytest.approx(expected)


def test_all_scores_by_hand():
    gold = ["B-ARG0 B-V B-ARG1 O", "B-V B-ARG1 B-R-ARG1 B-C-ARG1", "B-V B-ARG0 O O", "B-V O O O"]
    predicted = ["B-ARG0 B-V B-ARG2 O", "B-V B-ARG1 B-R-ARG1 B-C-ARG1", "B-V O B-ARG0 O", "O O O B-ARG1"]
    split = [[tags.split() for tags in side] for side in (predicted, gold)]
    half = {"precision": 0.5, "recall": 0.5, "f1": 0.5}
    assert role_scores(*split, kinds=["verb", "noun", "verb", ""]) == {
        "precision": pytest.approx(3 / 6),
        "recall": pytest.approx(3 / 5),
        "f1": pytest.approx(6 / 11),
        "span_f1": pytest.approx(8 / 13),
        "per_type": {
            "ARG0": half | {"number": 2},
            "ARG1": half | {"number": 2},
            "ARG2": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "number": 0},
            "R-ARG1": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "number": 1},
        },
        "noun_f1": 1.0,
        "verb_f1": pytest.approx(2 / 6),
        "per_kind": {
            "noun": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "number": 2},
            "verb": {"precision": pytest.approx(1 / 3), "recall": pytest.approx(1 / 3), "f1": 1 / 3, "number": 3},
        },
    }
    assert {"per_kind", "verb_f1"}.isdisjoint(role_scores(*split))


def test_predicates_apart_and_none():
    tags = ["B-A0", "B-V"]
    assert role_scores([tags, tags], [tags, ["O", "B-V"]])["precision"] == 0.5
    nothing = {"precision": 0.0, "recall": 0.0, "f1": 0.0, "span_f1": 0.0, "per_type": {}}
    assert role_scores([["B-V"]], [["B-V"]]) == role_scores([], []) == nothing
    with refused("\\[2, 1, 1\\] predicates"):
        role_scores([["O"], ["O"]], [["O"]])


def test_predicates_by_hand():
    found, gold = [[0, 3], [], [1]], [[0, 2], [4], [1, 1]]
    scores = {"predicate_precision": 2 / 3, "predicate_recall": 2 / 4, "predicate_f1": 4 / 7}
    assert predicate_scores(found, gold) == pytest.approx(scores)
    assert predicate_scores([[]], [[]]) == dict.fromkeys(scores, 0.0)


@pytest.mark.parametrize(
    "name, share, right, excess, missed",
    [("train", 0.1, 169, 110, 38), ("dev", 0.05, 64, 18, 5), ("test", 0.02, 54, 8, 3)],
)
def test_figures_of_the_published_script(name, share, right, excess, missed):
    """`srl-eval.pl` (version of 2005/04/21) counted these arguments of the sample with changed tags."""
    gold = [tags for _, row in role_rows(Path(TASKS, f"propbank_{name}.tsv")) for tags in row["predicate_tags"]]
    known, chance = sorted({tag for tags in gold for tag in tags}), random.Random(name)
    predicted = [[chance.choice(known) if chance.random() < share else tag for tag in tags] for tags in gold]
    scores = role_scores(predicted, gold)
    assert scores["precision"] == pytest.approx(right / (right + excess))
    assert scores["recall"] == pytest.approx(right / (right + missed))
    assert scores["f1"] == pytest.approx(2 * right / (2 * right + excess + missed))
    assert sum(rates["number"] for rates in scores["per_type"].values()) == right + missed


# Experiments: cached layers, ensembles, the baseline, placement


@pytest.mark.slow
def test_cached_layers_give_the_same_roles_and_a_sentence_is_stored_once(tmp_path):
    bilm(tmp_path / "bilm")
    training = {"num_train_epochs": 1, "config_overrides": WITHOUT_DROPOUT, "per_device_train_batch_size": 20}
    found = []
    for name, options in (("computed", {}), ("stored", {"cache_features": True})):
        (record,) = experiment("srl", tmp_path, **training, **LEARNING, output_dir=tmp_path / name, **options)
        found.append((record["layer_weights"]["input"], predictions_of(tmp_path / name / "predictions_test.jsonl")))
    (weights, rows), (other_weights, others) = found
    assert weights == pytest.approx(other_weights, abs=1e-5)
    assert max(weights) > 1 / 3 + 1e-3  # something was learned
    for row, other in zip(rows, others, strict=True):
        assert [verb["tags"] for verb in row["verbs"]] == [verb["tags"] for verb in other["verbs"]]
    files = [TASKS / f"propbank_{name}.tsv" for name in SPLITS.values()]
    texts = {tuple(words) for file in files for words, *_ in role_sentences_of(file)}
    (file,) = (tmp_path / "stored" / "features").iterdir()
    assert file.stat().st_size == 4 * 3 * 16 * sum(len(words) + 2 for words in texts)  # layers, width, tokens


def test_averages_of_probabilities(tmp_path):
    """The mean is decoded. The second model alone would give ARG1 one word."""
    task = task_of(tmp_path)  # O, B-ARG0, B-ARG1, B-ARGM-TMP, B-V, I-ARG1
    words = [
        [[0.02, 0.02, 0.32, 0.02, 0.02, 0.6], [0.22, 0.02, 0.02, 0.02, 0.02, 0.7]],
        [[0.02, 0.02, 0.52, 0.02, 0.02, 0.4], [0.62, 0.02, 0.02, 0.02, 0.02, 0.3]],
    ]
    marker = np.full(6, 1 / 6)
    one, two = (np.log([[marker, *model, marker]] * 300) for model in words)  # the rows are decoded in parts
    odds = [np.array([[NO_WORD, value, value, NO_WORD]] * 300) for value in (0.0, np.log(3.0))]
    labels, probabilities, predicates = task.average([(one, odds[0]), (two, odds[1])])
    assert labels.tolist() == [[-100, 2, 5, -100]] * 300
    np.testing.assert_allclose(probabilities[:, 1:3], [[0.42, 0.5]] * 300)
    mean = np.log(0.625 / 0.375)
    np.testing.assert_allclose(predicates, [[NO_WORD, mean, mean, NO_WORD]] * 300)
