"""Coreference: documents from columns, JSON lines and data sets, batches, windows, scores, options, cached layers."""

import json
import math
import random
import re
from collections import defaultdict
from statistics import harmonic_mean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from errors import refused
from task_worker import TASKS, WITHOUT_DROPOUT, bilm, experiment, predictions_of, written

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.task import SplitOutput
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference import (
    Coreference,
    CoreferenceArguments,
    CoreferenceTrainingArguments,
    conll_documents,
    coreference_scores,
    document_row,
)
from modeling_elmo.run_scripts.fine_tuning.trainer import TaskTrainer

SENTENCES = [["Ann", "saw", "Bo"], ["She", "left"], ["Bo", "and", "his", "dog", "stayed"], ["Rain"]]
MENTIONS = [[0, 0, 0, 0], [0, 2, 2, 1], [1, 0, 0, 0], [2, 0, 0, 1], [2, 2, 2, 1], [2, 2, 3, 2], [3, 0, 0, 3]]
ROW = {"document": "d", "sentences": SENTENCES, "mentions": MENTIONS, "speakers": [], "genre": ""}
PAIR = [(0, "She", "(0)"), (1, "the", "(1"), (2, "old", "-"), (3, "dog", "1)")]  # a sentence


def documents(*rows, **columns):
    return DatasetDict(train=Dataset.from_list([{**ROW, **row, **columns} for row in rows or [{}]]))


def task_of(data, **options):
    return Coreference(CoreferenceArguments(**options), data)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coref")
    bilm(folder / "bilm")
    return folder


# Documents

BEGIN, END = "#begin document (d); part 0\n", "#end document\n"


def documents_of(path, text):
    return Coreference.read_data(CoreferenceArguments(train_file=str(written(path, text))))["train"].to_list()


@pytest.fixture
def read(tmp_path):
    """A function that returns the documents of a file in columns, without the cache of `datasets`."""

    def rows_of(text):
        return [document_row(*row) for row in conll_documents(written(tmp_path / "a.conll", text))]

    return rows_of


def sentence(*cells):
    """A sentence of the document `d` with these coreference columns."""
    return "".join(f"d\t0\t{number}\tw{number}\t{cell}\n" for number, cell in enumerate(cells)) + "\n"


def cells_of(row) -> list[list[list[str]]]:
    """The brackets of each word, sorted. The inverse of reading."""
    cells = [[[] for _ in words] for words in row["sentences"]]
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
    found = []
    for _, row in located:
        for words, cells in zip(row["sentences"], cells_of(row), strict=True):
            found += zip(words, cells, strict=True)
    lines = [line.split("\t") for line in path.read_text().splitlines() if "\t" in line]
    assert found == [(line[3], sorted(line[12].split("|")) if line[12] != "-" else []) for line in lines]
    data = Coreference.read(CoreferenceArguments(test_file=str(path))).data["test"]
    assert data.to_list() == [document_row(*row) for row in located]


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


@pytest.mark.parametrize("ending", ["v4_gold_conll.gz", "conll"])
def test_the_columns_of_conll_2012(tmp_path, ending):
    first, second = documents_of(tmp_path / f"a.{ending}", ONTONOTES)
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
        (["(4|(4)", "-", "4)"], [[0, 0, 0, 0], [0, 0, 2, 0]]),
        (["(4", "(4", "4)|4)"], [[0, 0, 2, 0], [0, 1, 2, 0]]),
        (["(4", "(5", "4)", "5)"], [[0, 0, 2, 0], [0, 1, 3, 1]]),
        (["(4", "4)|(4", "4)"], [[0, 0, 1, 0], [0, 1, 2, 0]]),  # they cross
        (["(4|4)", "_", ""], [[0, 0, 0, 0]]),
    ],
)
def test_nested_mentions(read, cells, expected):
    (row,) = read(BEGIN + sentence(*cells) + END)
    assert row["mentions"] == expected


@pytest.mark.parametrize(
    "cells, expected, again",
    [
        (["(3)|(3)", "(4)"], [[0, 0, 0, 0], [0, 1, 1, 1]], "1 of 3"),
        (["(3", "3)", "(4|(5", "4)|5)", "(4)|(3)"], [[0, 0, 1, 0], [0, 2, 3, 0], [0, 4, 4, 0]], "2 of 5"),
        (["(1)|(2)", "(3)|(4)", "(2)|(4)", "(1)", "(3)"], [[0, word, word, 0] for word in range(5)], "3 of 8"),
    ],
)
def test_clusters_that_share_a_mention_are_one(tmp_path, cells, expected, again, caplog):
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        (row,) = documents_of(tmp_path / "a.conll", BEGIN + sentence(*cells) + END)
        assert row["mentions"] == expected
        (message,) = caplog.messages
        assert f"a.conll, line 1: {again} mentions occur again. They are counted once, " in message


def test_documents_without_coreference_are_no_training_data():
    """As where the last column has something else."""
    apart = {"mentions": [[0, 0, 0, 0], [1, 0, 0, 1]]}
    with refused("No cluster of the split 'train' has two mentions, so there is nothing to learn. Correct it."):
        task_of(documents(apart), train_singletons=True)
    task_of(DatasetDict(test=documents(apart)["train"]))


def random_document(chance):
    """A document whose clusters are nested or apart, so that brackets have one meaning."""
    sizes = [chance.randint(1, 9) for _ in range(chance.randint(1, 5))]
    spans = {(number, *sorted(chance.choices(range(size), k=2))) for number, size in enumerate(sizes) for _ in range(6)}
    clusters = defaultdict(list)
    for span in sorted(spans):
        cluster = chance.randrange(4)
        crosses = (one[0] == span[0] and one[1] < span[1] <= one[2] < span[2] for one in clusters[cluster])
        clusters[cluster if not any(crosses) else 10 + len(clusters)].append(span)
    numbers = {}
    names = {span: cluster for cluster, members in clusters.items() for span in members}
    ordered = [[*span, numbers.setdefault(names[span], len(numbers))] for span in sorted(spans)]
    sentences = [[f"w{word}" for word in range(size)] for size in sizes]
    return {"document": "d_0", "sentences": sentences, "mentions": ordered, "speakers": [], "genre": ""}


def test_random_documents_and_back(read):
    chance = random.Random(0)
    for _ in range(300):
        row = random_document(chance)
        text = ""
        for words in cells_of(row):
            # Brackets of words that end and begin mentions: the ends come first.
            cells = [sorted(cell, key=lambda part: part[0] == "(") for cell in words]
            text += sentence(*("|".join(cell) or "-" for cell in cells))
        assert read(BEGIN + text + END) == [row]
        shuffled = row | {"mentions": chance.sample(row["mentions"], len(row["mentions"]))}
        assert document_row("here", shuffled) == row


WORDS = sentence("-", "-")


@pytest.mark.parametrize(
    "text, line, shown",
    [
        (sentence("-", "(3", "-") + WORDS, 3, r"\(3 begins"),
        (sentence("(3", "3)|3)"), 3, r"3\) ends"),
        (sentence("3"), 2, "'3'"),
        (sentence("(3)|"), 2, "''"),
        (sentence("(٣)"), 2, "'"),
        ("\n\n", 1, "'d' has no sentences"),
        (WORDS + BEGIN, 5, "'d' has no end"),
        ("e\t0\t0\tw\t-\n", 2, r"'e\\t0\\t0\\tw\\t-'"),
        ("d\t0\t0\tw\n", 2, r"'d\\t0\\t0\\tw'"),
    ],
)
def test_bad_lines(read, text, line, shown):
    with refused(f"a.conll, line {line}\\b.*{shown}"):
        read(BEGIN + text + END)


@pytest.mark.parametrize(
    "text, shown",
    [
        (BEGIN + WORDS + END + END, ", line 6 is in no document: '#end document'"),
        (BEGIN + WORDS + END + BEGIN.replace("0", "1") + WORDS, ", line 6: the document 'd' has no '#end document'"),
        ((BEGIN + WORDS + END) * 2, ": 2 documents have the name 'd_0'"),
        ("\n", " has no samples"),
        (BEGIN + WORDS + "#end document (e)\n", ", line 5 ends 'e', but the document is 'd'"),
    ],
)
def test_bad_documents(tmp_path, text, shown):
    with refused(f"a.conll{shown}"):
        documents_of(tmp_path / "a.conll", text)


def test_names_and_parts(tmp_path):
    text = "".join(
        f"#begin document {name}\n" + WORDS.replace("d\t", f"{word}\t") + END
        for name, word in (("(d); part 012", "d"), ("(d)", "d"), ("(a (b))", "a (b)"))
    )
    assert [row["document"] for row in documents_of(tmp_path / "a.conll", text)] == ["d_12", "d", "a (b)"]


@pytest.mark.parametrize("begin", ["(d);", "(d); part 000", "(d);  ", "(d)"])
@pytest.mark.parametrize("end", ["", " (d)", " (d);", " (d); part 000", ";", "  "])
def test_lines_of_other_programs(read, begin, end):
    """The official scorer's tests and many converters write the name without a part, or again at the end."""
    text = f"#begin document {begin}\n" + sentence("(0)", "-", "(0)") + f"#end document{end}\n"
    (row,) = read(text)
    name = "d_0" if "part" in begin else "d"
    expected = {"document": name, "sentences": [["w0", "w1", "w2"]], "mentions": [[0, 0, 0, 0], [0, 2, 2, 0]]}
    assert expected.items() <= row.items()


def test_windows_line_ends_and_spaces_in_words(read):
    text = BEGIN + "d\t0\t0\tNew York\t(1)\nd\t0\t1\tx\u00a0y\t-\n \n" + WORDS + END
    (row,) = read(text.replace("\n", "\r\n"))
    assert row["sentences"] == [["New York", "x\u00a0y"], ["w0", "w1"]] and row["mentions"] == [[0, 0, 0, 0]]


RECORD = {
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
    found = documents_of(tmp_path / f"a.{ending}", "\n".join(map(json.dumps, (RECORD, bare))))
    assert found == [READ, READ | {"document": "2", "speakers": [], "genre": ""}]


def test_a_data_set(tmp_path):
    part = Dataset.from_list([RECORD, RECORD | {"document": "2", "speakers": [], "genre": None}])
    DatasetDict(train=part, validation=part).save_to_disk(tmp_path / "data")
    splits = Coreference.read(CoreferenceArguments(dataset=str(tmp_path / "data"))).data
    assert splits["train"].to_list() == [READ, READ | {"document": "2", "speakers": [], "genre": ""}]
    assert splits["validation"].to_list() == splits["train"].to_list()


NOT_MENTIONS = [[0, 0, 0], [0, 0, True, 1], "(0)", [2, 0, 0, 1], [-1, 0, 0, 1], [0, 0, 2, 1], [0, 1, 0, 1]]


@pytest.mark.parametrize(
    "column, value, shown",
    [
        ("document", None, None),
        ("sentences", [], []),
        ("sentences", ["He said"], ["He said"]),
        ("sentences", [["He", ""]], [["He", ""]]),
        ("mentions", None, None),
        ("speakers", [["Ann"], ["Bob"] * 3], [["Ann"], ["Bob"] * 3]),
        ("genre", 3, 3),
        *(("mentions", [[0, 0, 1, 1], mention], mention) for mention in NOT_MENTIONS),
    ],
)
def test_bad_records(tmp_path, column, value, shown):
    lines = map(json.dumps, (RECORD | {"document": "first"}, RECORD | {column: value}))
    with refused(re.escape(f"a.jsonl, line 2: `{column}` is {shown!r}; it must be ")):
        documents_of(tmp_path / "a.jsonl", "\n".join(lines))


# Batches


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_batch_is_a_document(side):
    speakers = [["x"] * 3, ["y", "x"], ["x"] * 5, ["z"]]
    other = {"speakers": speakers, "genre": "nw"}
    task = task_of(documents(other, {"genre": "bc", "sentences": [["a"]], "mentions": []}))
    tokenizer = ELMoTokenizer(padding_side=side, pre_tokenization="whitespace")
    rows = task.encode_splits(tokenizer)["train"]
    batch = task.collator(tokenizer)([rows[0]])
    expected = tokenizer(SENTENCES, is_split_into_words=True, padding=True, padding_side="right", return_tensors="pt")
    for name in ("input_ids", "character_ids", "attention_mask"):
        assert torch.equal(batch[name], expected[name]), name
    assert batch["mentions"].tolist() == [[[s, a + 1, b + 1, cluster] for s, a, b, cluster in MENTIONS]]
    assert batch["speaker_ids"][1].tolist() == [0, 1, 0, 0, 0, 0, 0] and batch["speaker_ids"][3, 1] == 2
    assert batch["genre_ids"] == 1 and batch["genre_ids"].shape == ()
    empty = task.collator(tokenizer)([rows[1]])
    assert empty["mentions"].shape == (1, 0, 4) and empty["genre_ids"] == 0 and not empty["speaker_ids"].any()
    assert task.config["use_speakers"] and task.config["num_genres"] == 2
    assert task.config["id2label"] == {0: "bc", 1: "nw"}


def at_epoch(collator, epoch, seed=1, data_seed=None):
    collator.on_epoch_begin(SimpleNamespace(seed=seed, data_seed=data_seed), SimpleNamespace(epoch=epoch), None)


def test_a_training_document_is_a_window_that_differs_by_epoch():
    task = task_of(documents(*[{}] * 3), max_sentences=2)
    tokenizer = ELMoTokenizer(pre_tokenization="whitespace")
    rows, whole = task.encode_splits(tokenizer)["train"], task.encode({**documents()["train"][:]}, tokenizer, False)
    collator = task.collator(tokenizer)
    document = {name: column[0] for name, column in whole.items()} | {"example_number": 0}
    assert len(collator([document])["input_ids"]) == 4

    def windows(epoch, **options) -> list[list[str]]:
        at_epoch(collator, epoch, **options)
        return [tokenizer.batch_decode(collator([row])["input_ids"]) for row in rows]

    seen = [windows(epoch) for epoch in range(20)]
    for epoch in range(20):
        at_epoch(collator, epoch)
        for row in rows:
            batch = collator([row])
            first = [0, 1, 2][[3, 2, 5].index(int(batch["attention_mask"][0].sum()) - 2)]
            inside = [[s - first, a + 1, b + 1, c] for s, a, b, c in MENTIONS if first <= s < first + 2]
            assert batch["mentions"].tolist() == [inside] and len(batch["input_ids"]) == 2
    assert len(set(map(str, seen))) > 5  # drawn anew in each epoch ...
    assert len({str(window) for epoch in seen for window in epoch}) == 3  # ... from all windows
    assert any(first != second for first, second, _ in seen)  # ... for each document
    assert windows(7.25) == seen[7]  # within an epoch: a resumed training
    assert [windows(epoch, seed=2) for epoch in range(20)] != seen
    assert [windows(epoch, seed=2, data_seed=1) for epoch in range(20)] == seen


# Scores


def padded(rows: list[list[list[int]]]):
    """As Trainer pads them; one token is a marker before the words."""
    longest = max(map(len, rows))
    tokens = [[[s, a + 1, b + 1, cluster] for s, a, b, cluster in row] for row in rows]
    return np.array([row + [[-100] * 4] * (longest - len(row)) for row in tokens])


@pytest.mark.parametrize("train_singletons", [True, False])
def test_scores_of_both_ways(train_singletons):
    task = task_of(documents({}, {}), train_singletons=train_singletons)
    predicted = [MENTIONS[:5] + [[2, 3, 3, -1]], [[0, 0, 0, 0], [1, 0, 0, 0], [2, 2, 3, 1]]]
    output = SplitOutput((padded(predicted), np.zeros((2, 6))), None, task.data["train"], None)
    scores = task.scores(task.predictions(output))
    clusters = [[[(0, 0, 0), (1, 0, 0)], [(0, 2, 2), (2, 0, 0), (2, 2, 2)]], [[(0, 0, 0), (1, 0, 0)], [(2, 2, 3)]]]
    gold = [[*clusters[0], [(2, 2, 3)], [(3, 0, 0)]]] * 2
    both = {way: coreference_scores(clusters, gold, singletons=way) for way in (True, False)}
    assert scores["with_singletons"] == both[True] and scores["without_singletons"] == both[False]
    assert both[True]["f1"] != both[False]["f1"]
    other = "without_singletons" if train_singletons else "with_singletons"
    for name in ("f1", "muc_f1", "b_cubed_f1", "ceaf_f1", "mention_f1"):
        assert scores[name] == both[train_singletons][name]
        assert scores[f"{name}_{other}"] == both[not train_singletons][name]
    lines = list(task.predictions(output))
    assert [line["predicted"] for line in lines] == [predicted[0][:5], predicted[1]]
    assert lines[0]["mentions"] == MENTIONS and lines[0]["sentences"] == SENTENCES


def test_data_without_singletons_have_one_way():
    task = task_of(documents(mentions=MENTIONS[:5]))
    output = SplitOutput((padded([MENTIONS[:5]]), np.zeros((1, 5))), None, task.data["train"], None)
    scores = task.scores(task.predictions(output))
    assert scores["f1"] == 1 and "with_singletons" not in scores and "f1_with_singletons" not in scores
    with refused("--train_singletons"):
        task_of(documents(mentions=MENTIONS[:5]), train_singletons=True)


def test_genres_of_the_training_data():
    splits = {name: documents(genre=name)["train"] for name in ("bc", "nw", "")}
    with refused("'validation', row 0: 'nw' .*'train', which has bc"):
        task_of(DatasetDict(train=splits["bc"], validation=splits["nw"]))
    assert task_of(DatasetDict(train=splits["bc"])).genres == ["bc"]
    assert task_of(DatasetDict(train=splits[""], validation=splits["nw"])).genres == []  # the model reads none


NAMES = {"muc": "muc", "b_cubed": "b_cubed", "ceaf": "ceaf_e"}  # ours, scorch's


def clusters(*words) -> list[list[tuple[int, int, int]]]:
    """A cluster for each string: a letter is a mention."""
    return [[(0, ord(letter), ord(letter)) for letter in word] for word in words]


def rates(scores, name):
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


def random_clusters(chance) -> list[list[tuple[int, int, int]]]:
    """Up to 14 of 16 mentions in up to 8 clusters; singletons are frequent, and there may be nothing."""
    found = defaultdict(list)
    for word in chance.sample(range(16), chance.choice([0, 1, 6, 14])):
        found[chance.randrange(chance.choice([2, 8]))].append((0, word, word))
    return list(found.values())


def together(documents):
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
    gold = []
    for row in conll_documents(TASKS / "litbank_train.conll"):
        groups = defaultdict(list)
        for *span, cluster in document_row(*row)["mentions"]:
            groups[cluster].append(tuple(span))
        gold.append(list(groups.values()))
    found = coreference_scores(gold, gold, singletons)
    assert set(found.values()) == {1.0} and len(found) == 13
    assert json.loads(json.dumps(found)) == found
    nothing = coreference_scores([[], []], gold, singletons)
    assert set(nothing.values()) == {0.0} and nothing == coreference_scores(gold, [[], []], singletons)
    assert nothing == coreference_scores([], [], singletons)


@pytest.mark.parametrize("wrong", [("ab", "bc"), ("aab",)])
def test_a_mention_twice(wrong):
    for pair in ((clusters(*wrong), clusters("ab")), (clusters("ab"), clusters(*wrong))):
        with refused("twice"):
            coreference_scores([pair[0]], [pair[1]], singletons=True)


# Options


def training(folder, **options):
    return CoreferenceTrainingArguments(output_dir=str(folder), use_cpu=True, **options)


def test_the_settings_of_the_paper(tmp_path):
    found = training(tmp_path)
    assert (found.learning_rate, found.lr_decay, found.max_grad_norm) == (1e-3, 0.999, 5.0)
    assert found.num_train_epochs == 150 and not found.adadelta and found.weight_decay == 0
    assert CoreferenceArguments().max_sentences == 50 and Coreference.scalar_mix_l2 == 0
    assert "lr_decay" in found.recorded()
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=found.learning_rate)
    trainer = TaskTrainer(torch.nn.Linear(1, 1), found.for_trainer("f1", False), optimizers=(optimizer, None))
    scheduler, rates = trainer.create_scheduler(400), []
    for _ in range(301):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert all(math.isclose(rate, 1e-3 * 0.999 ** (step // 100)) for step, rate in enumerate(rates))
    options = {"lr_scheduler_type": "linear", "eval_strategy": "no", "load_best_model_at_end": False}
    linear = training(tmp_path, lr_decay=1.0, **options)
    trainer = TaskTrainer(torch.nn.Linear(1, 1), linear, optimizers=(optimizer, None))
    assert trainer.create_scheduler(400).lr_lambdas[0](200) == 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_batch_size": 2},
        {"dataloader_persistent_workers": True, "dataloader_num_workers": 1},
        {"lr_scheduler_type": "linear"},
    ],
    ids=str,
)
def test_training_options_that_are_refused(options, tmp_path):
    name, value = next(iter(options.items()))
    with refused(f"--{name} {value}: "):
        training(tmp_path, **options)


def test_two_devices_in_one_process_would_split_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(CoreferenceTrainingArguments, "n_gpu", 2)
    with refused("n_gpu 2: .*torchrun"):
        training(tmp_path)


# Experiments


def test_ensembles_are_refused(place, tmp_path):
    with refused("--ensemble: .*coreference-resolution"):
        experiment("coref", place, ensemble=["one", "two"], output_dir=tmp_path)


@pytest.mark.slow
def test_cached_layers_give_the_same_clusters(place, tmp_path):
    """Each sentence is stored once, and the windows of training take their part of the layers."""
    overrides = {**WITHOUT_DROPOUT, "lexical_dropout": 0.0, "max_span_width": 4}
    options = {"num_train_epochs": 2, "max_sentences": 5, "config_overrides": overrides, "learning_rate": 0.01}
    found = []
    for name, cached in (("computed", {}), ("stored", {"cache_features": True})):
        (record,) = experiment("coref", place, **options, **cached, output_dir=tmp_path / name)
        found.append((record["layer_weights"]["input"], predictions_of(tmp_path / name / "predictions_test.jsonl")))
    (weights, rows), (other_weights, others) = found
    assert weights == pytest.approx(other_weights, abs=1e-5) and max(abs(each - 1 / 3) for each in weights) > 1e-3
    assert rows == others
    (file,) = (tmp_path / "stored" / "features").iterdir()
    sentences = {tuple(words) for name in ("train", "dev", "test") for words in sentences_of(f"litbank_{name}.conll")}
    assert file.stat().st_size == sum(len(words) + 2 for words in sentences) * 3 * 16 * 4


def sentences_of(name) -> list[list[str]]:
    """The words of each sentence, read by a plain loop."""
    blocks = (TASKS / name).read_text("utf-8").split("\n\n")
    lines = [[line for line in block.splitlines() if line and line[0] != "#"] for block in blocks]
    return [[line.split("\t")[3] for line in block] for block in lines if block]


def test_cached_layers_of_a_document_with_many_sentences(place, tmp_path):
    """More than 127 numbers of sentences need other integers than those of the training data."""
    rows = ["\t".join(["long", "0", str(place), word, *"------", mark]) for place, word, mark in PAIR]
    lines = ["#begin document (long); part 0", *[*rows, ""] * 150]
    file = tmp_path / "long.conll"
    file.write_text("\n".join([*lines, "#end document\n"]), "utf-8")
    options = {"max_steps": 1, "cache_features": True, "config_overrides": {"max_span_width": 2}}
    experiment("coref", place, **options, test_file=file, output_dir=tmp_path / "run")
    (row,) = predictions_of(tmp_path / "run" / "predictions_test.jsonl")
    assert len(row["sentences"]) == 150
