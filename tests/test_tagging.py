"""Tagging: rows from files and data sets, labels, truncated training sentences, and scores of words only."""

from pathlib import Path

import numpy as np
import pytest
import seqeval.metrics
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from errors import refused
from task_worker import TASKS, WNUT17, sentences_of, written

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.metrics import tagging_scores
from modeling_elmo.run_scripts.fine_tuning.task import SplitOutput
from modeling_elmo.run_scripts.fine_tuning.tasks.tagging import Tagging, TaggingArguments


def tagging(**options) -> Tagging:
    return Tagging.read(TaggingArguments(**(WNUT17 | options)))


def tags_of(path: Path, text: str, **options) -> list[list[str]]:
    return Tagging.read(TaggingArguments(train_file=str(written(path, text)), **options)).data["train"]["tags"][:]


# Rows


def test_files(tmp_path):
    one = written(tmp_path / "a.conll", "EU B-ORG\nrejects O\n\nno O\n")
    two = written(tmp_path / "b.jsonl", '{"tokens": ["EU"], "ner_tags": ["B-ORG"], "tokens2": 1}\n')
    splits = Tagging.read(TaggingArguments(train_file=str(one), test_file=str(two))).data
    assert list(splits) == ["train", "test"] and splits["test"].split == "test"
    assert splits["train"].to_dict() == {"tokens": [["EU", "rejects"], ["no"]], "tags": [["B-ORG", "O"], ["O"]]}
    assert splits["test"].to_dict() == {"tokens": [["EU"]], "tags": [["B-ORG"]]}


def test_tags_of_a_data_set_become_names(tmp_path, caplog):
    names = ClassLabel(names=["O", "B-PER", "I-PER"])
    features = Features(id=Value("int32"), words=[Value("string")], ner_tags=[names], pos_tags=[Value("int32")])
    rows = {"id": [1, 2], "words": [["a", "b"], ["c"]], "ner_tags": [[1, 2], [0]], "pos_tags": [[7, 8], [9]]}
    DatasetDict(train=Dataset.from_dict(rows, features)).save_to_disk(tmp_path / "data")
    options = {"dataset": str(tmp_path / "data"), "tokens_column": "words"}
    data = Tagging.read(TaggingArguments(**options)).data["train"]
    assert data.to_dict() == {"tokens": [["a", "b"], ["c"]], "tags": [["B-PER", "I-PER"], ["O"]]}
    assert not caplog.messages
    data = Tagging.read(TaggingArguments(**options, tags_column="pos_tags")).data["train"]
    assert data["tags"][:] == [["7", "8"], ["9"]]
    assert "'7', '8', '9' are not BIO tags" in caplog.text and "scored by accuracy" in caplog.text
    assert not list((tmp_path / "data" / "train").glob("cache*"))


IOB1 = ["I-A", "I-A", "B-A", "I-B", "O", "I-A", "B-A", "I-A"]
BIO = ["B-A", "I-A", "B-A", "B-B", "O", "B-A", "B-A", "I-A"]


def test_iob1_is_converted_on_request(tmp_path, caplog):
    text = "x O\n\n" + "\n".join(f"w{number} {tag}" for number, tag in enumerate(IOB1))
    assert tags_of(tmp_path / "a.conll", text, tag_scheme="iob1") == [["O"], BIO]
    assert not caplog.messages
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        assert tags_of(tmp_path / "a.conll", text) == [["O"], IOB1]
        (message,) = caplog.messages
        assert "a.conll: entities of 1 sentences begin with I-, first in sentence 2: w0 w1 " in message
        assert "--tag_scheme iob1" in message


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-A I-A E-A S-A B-A E-A B-B E-B O S-B", "O B-A I-A I-A B-A B-A I-A B-B I-B O B-B"),  # IOBES
        ("B-A L-A U-A B-A I-A L-A O", "B-A I-A B-A B-A I-A I-A O"),  # BILOU
        ("B-A M-A E-A S-A", "B-A I-A I-A B-A"),  # BMES
        ("E-A I-A S-A E-A I-B E-A O M-A", "B-A B-A B-A B-A B-B B-A O B-A"),  # no scheme
    ],
)
def test_iobes_is_converted_to_the_same_entities(tmp_path, caplog, tags, expected):
    text = "".join(f"w {tag}\n" for tag in tags.split())
    assert tags_of(tmp_path / "a.conll", text, tag_scheme="iobes") == [expected.split()] and not caplog.messages
    assert tagging_scores([expected.split()], [tags.split()], are_entities=True)["f1"] == 1


@pytest.mark.parametrize(
    "text, options, shown",
    [
        ("a\tO\n\tO\n", {}, "a.conll, line 2: `tokens` is ''"),
        ("a\tO\n\nb\t \n", {}, "a.conll, line 3: `tags` is ''"),
        ("\n-DOCSTART- O\n", {}, "a.conll has no samples"),
        ("a O\nb S-X\n", {"tag_scheme": "iob1"}, "line 2: 'S-X' .* --tag_scheme keep"),
        ("a O\nb B_X\n", {"tag_scheme": "iobes"}, "line 2: 'B_X' .* --tag_scheme keep"),
        ('{"tokens": ["a"], "tags": []}', {}, r"a.jsonl, line 1: `tags` is \[\]"),
        ('{"tokens": "a", "tags": "O"}', {}, "a.jsonl, line 1: `tokens` is 'a'"),
        ('{"tokens": ["a", 1], "tags": ["O", "O"]}', {}, "line 1: `tokens` is 1"),
        ('{"tokens": ["a"], "tags": [null]}', {}, "a.jsonl, line 1: `tags` is None"),
        ('{"tokens": ["a"], "t": ["O"]}', {}, r"no column 'tags', only \['tokens', 't'\]; pass --tags_column"),
        ('{"t": ["a"], "tags": ["O"]}', {}, r"no column 'tokens', only \['t', 'tags'\]; pass --tokens_column"),
    ],
)
def test_bad_tags(tmp_path, text, options, shown):
    with pytest.raises(ValueError, match=shown):
        tags_of(tmp_path / ("a.jsonl" if text.startswith("{") else "a.conll"), text, **options)


# Labels


def test_labels_are_those_of_the_training_data(tmp_path):
    task = tagging()
    tags = {tag for _, tags in sentences_of(TASKS / "wnut17_train.conll") for tag in tags}
    assert set(task.labels) == tags and task.labels[0] == "O" and task.config["num_labels"] == len(tags) == 13
    assert all(task.config["label2id"][name] == number for number, name in task.config["id2label"].items())
    assert (task.name, task.metric) == ("ner", "f1")


def test_tags_that_the_training_data_lacks_are_errors(tmp_path, caplog):
    """As seqeval counts the tags as given; the predictions have them as given, too."""
    text = "New\tB-other\nYork\tI-other\nis\tO\n\nBob\tB-person\nis\tO\n"
    task = tagging(validation_file=str(written(tmp_path / "dev.conll", text)))
    assert "'validation' has labels that do not occur in 'train': B-other (1), I-other (1)." in caplog.text
    assert "B-other" not in task.labels
    tokenizer = ELMoTokenizer()
    tokenizer.padding_side = "left"  # rows are padded on the right all the same
    rows = task.encode_splits(tokenizer, ["validation"])["validation"]
    batch = task.collator(tokenizer)([rows[number] for number in range(2)])
    outside, person = task.labels.index("O"), task.labels.index("B-person")
    expected = [[-100, -100, -100, outside, -100], [-100, person, outside, -100, -100]]
    assert batch["labels"].tolist() == expected
    predicted = [["B-person", "O", "O"], ["B-person", "O"]]
    logits = np.zeros((2, 5, len(task.labels)))
    for row, tags in enumerate(predicted):
        logits[row, range(1, len(tags) + 1), [task.labels.index(tag) for tag in tags]] = 1
    output = SplitOutput(logits, batch["labels"].numpy(), task.data["validation"], rows)
    scores, gold = task.scores(task.predictions(output)), task.data["validation"]["tags"][:]
    assert scores["f1"] == seqeval.metrics.f1_score(gold, predicted) == 0.5
    assert scores["accuracy"] == pytest.approx(3 / 5) and scores["per_type"]["other"]["number"] == 1
    records = list(task.predictions(output))
    assert [row["tags"] for row in records] == gold and [row["predicted"] for row in records] == predicted


def test_tags_that_are_not_read_are_named(tmp_path, capsys):
    row = '{"tokens": ["a", "b"], "pos_tags": ["X", "Y"], "ner_tags": ["O", "B-A"], "id": 1}'
    assert tags_of(tmp_path / "a.jsonl", row) == [["O", "B-A"]]
    assert "a.jsonl: not read: pos_tags, id; --tags_column names other tags\n" in capsys.readouterr().out


def test_one_tag_is_not_learned(tmp_path):
    """As in the last column of CoNLL-2012 without coreference."""
    with refused("All tags of the split 'train' are '-'; a tagger needs two or more. Pass --tags_column if"):
        tags_of(tmp_path / "a.conll", "a NN -\nb VB -\n")


@pytest.mark.parametrize(
    ("tags", "metric", "told"),
    [
        ("O B-A I-A", "f1", None),
        ("O I-A", "f1", None),  # IO and IOB1 are grouped
        ("NN VB IN", "accuracy", None),
        ("N-sg O", "accuracy", None),
        ("O B NN", "accuracy", None),
        ("O B-A E-A S-A", "f1", "'E-A', 'S-A' are"),
        ("O B-A L-A U-A", "f1", "'L-A', 'U-A' are"),
        ("B M E S", "f1", "'B', 'E', 'M' and 1 more are"),
        ("O B_A I_A", "accuracy", "'B_A', 'I_A' are"),
        ("tag O B-A X-A", "accuracy", "'X-A', 'tag' are"),  # a header
        ("B-A p q r s t", "accuracy", "'p', 'q', 'r' and 2 more are"),
    ],
)
def test_tags_that_are_not_bio_are_told(tmp_path, caplog, tags, metric, told):
    path = written(tmp_path / "train.conll", "".join(f"x {tag}\n" for tag in tags.split()))
    assert Tagging.read(TaggingArguments(train_file=str(path))).metric == metric
    messages = [message for message in caplog.messages if "not BIO tags" in message]
    assert len(messages) == (told is not None)
    if told:
        assert f"{path}: {told}" in messages[0] and ("scored by accuracy" in messages[0]) == (metric == "accuracy")


# Rows of a model


def test_only_training_sentences_are_cut_with_their_labels():
    task, tokenizer = tagging(max_length=6), ELMoTokenizer(max_word_length=16)
    splits = task.encode_splits(tokenizer)
    sizes = [len(words) + 2 for words, _ in sentences_of(TASKS / "wnut17_test.conll")]
    assert [*map(len, splits["test"]["labels"])] == [*map(len, splits["test"]["input_ids"])] == sizes
    for row, (words, tags) in zip(splits["train"], sentences_of(TASKS / "wnut17_train.conll"), strict=True):
        assert row["input_ids"] == list(tokenizer(words[:4], is_split_into_words=True)["input_ids"])
        assert row["labels"] == [-100, *(task.config["label2id"][tag] for tag in tags[:4]), -100]


def test_markers_and_padding_are_not_scored():
    task = tagging()
    examples = task.data["test"].select(range(2))
    gold = examples["tags"][:]
    predicted = [["O"] * len(tags) for tags in gold]
    predicted[0][0] = "B-person"
    logits = np.zeros((2, max(map(len, gold)) + 2, len(task.labels)))
    logits[..., 3] = 1  # wrong at every marker and padding
    labels = np.full(logits.shape[:2], -100)
    for row, (tags, found) in enumerate(zip(gold, predicted, strict=True)):
        places = range(1, len(tags) + 1)
        labels[row, places] = [task.labels.index(tag) for tag in tags]
        logits[row, places, [task.labels.index(tag) for tag in found]] = 2
    output = SplitOutput(logits, labels, examples, None)
    assert task.scores(task.predictions(output)) == tagging_scores(predicted, gold, are_entities=True)
    assert [row["predicted"] for row in task.predictions(output)] == predicted


# Tags in the wild


def conllu(*tags: str) -> str:
    return "".join(f"{place}\tw{place}\t_\t{tag}\t_\t_\t0\t_\t_\t_\n" for place, tag in enumerate(tags, 1)) + "\n"


def test_a_word_without_a_tag_is_neither_learned_nor_scored(tmp_path, caplog):
    """Treebanks have _ where a part of speech is unknown, in any split."""
    train = written(tmp_path / "train.conllu", conllu("NOUN", "_", "VERB") + conllu("_", "_"))
    test = written(tmp_path / "test.conllu", conllu("_", "NOUN", "VERB"))
    task = Tagging.read(TaggingArguments(train_file=str(train), test_file=str(test)))
    assert (task.labels, task.metric) == (["NOUN", "VERB"], "accuracy")
    assert caplog.messages == [
        "train: 3 words have the tag _, which means no tag. They are not learned and not scored.",
        "test: 1 words have the tag _, which means no tag. They are not learned and not scored.",
    ]
    with refused("test: all words have the tag _, which means no tag. Pass tagged data, or leave it out"):
        blind = written(tmp_path / "blind.conllu", conllu("_", "_"))
        Tagging.read(TaggingArguments(train_file=str(train), test_file=str(blind)))
    splits = task.encode_splits(ELMoTokenizer())
    assert splits["train"]["labels"][:] == [[-100, 0, -100, 1, -100], [-100] * 4]
    logits = np.zeros((1, 5, 2))
    logits[0, [1, 2, 3], [1, 0, 0]] = 1
    (record,) = task.predictions(SplitOutput(logits, None, task.data["test"], None))
    assert record["predicted"] == ["VERB", "NOUN", "NOUN"] and record["tags"] == ["_", "NOUN", "VERB"]
    scores = task.scores([record])
    assert scores["accuracy"] == 0.5 and set(scores["per_type"]) == {"NOUN", "VERB"}
    pairs = task.compare(task.data["test"][0], record).pairs
    assert [(pair.kind, pair.text) for pair in pairs] == [("right", "w2"), ("other class", "w3")]


def test_words_without_any_tag_cannot_be_learned(tmp_path):
    train = written(tmp_path / "train.conllu", conllu("_", "_"))
    with pytest.raises(ValueError, match="No row of the split 'train' has tags"):
        Tagging.read(TaggingArguments(train_file=str(train)))


def test_an_underline_beside_entities_is_a_tag(tmp_path, caplog):
    """Some files write it for O, so that it is named, and no word is lost."""
    train = written(tmp_path / "train.conll", "Ana B-PER\nsaw _\nBo B-PER\n")
    task = Tagging.read(TaggingArguments(train_file=str(train)))
    assert task.labels == ["B-PER", "_"] and "'_' are not BIO tags" in caplog.text


@pytest.mark.parametrize(
    ("tags", "told"),
    [
        ("o b-PER i-PER o", "as BIO in small letters: 'b-PER'"),
        ("O b-PER i-PER O", "as BIO in small letters: 'b-PER'"),
        ("(PER* *) * (LOC)", "as columns of brackets: '(PER*'"),
        ("* (PER*) *", "as columns of brackets: '(PER*)'"),
        ("O O O PER creative-work", "as types alone: 'PER'"),
        ("O O O PER", "as types alone: 'PER'"),
        ("N V O O O ^ !", None),  # O is a pronoun in tweets
        ("O NN NN VB", None),
        ("( NN ) * . ''", None),
        ("DT NN s-x", None),
        ("O O O , NN", None),
    ],
)
def test_tags_that_may_mark_entities_are_told(tmp_path, caplog, tags, told):
    path = written(tmp_path / "train.conll", "".join(f"x {tag}\n" for tag in tags.split()))
    task = Tagging.read(TaggingArguments(train_file=str(path)))
    messages = [message for message in caplog.messages if "may mark entities" in message]
    assert task.metric == "accuracy" and len(messages) == (told is not None)
    if told:
        assert messages[0].startswith(f"{path}: the tags may mark entities, {told}. They are learned as tags of words")
