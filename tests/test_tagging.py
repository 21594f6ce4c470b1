"""Tagging: labels, truncated training sentences, and scores of words only."""

import numpy as np
import pytest
from task_worker import TASKS, WNUT17, sentences_of

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.metrics import tagging_scores
from modeling_elmo.run_scripts.fine_tuning.task import SplitOutput
from modeling_elmo.run_scripts.fine_tuning.tasks.tagging import Tagging, TaggingArguments


def tagging(**options) -> Tagging:
    return Tagging(TaggingArguments(**(WNUT17 | options)))


def test_labels_are_those_of_the_training_data():
    task = tagging()
    tags = {tag for _, tags in sentences_of(TASKS / "wnut17_train.conll") for tag in tags}
    assert set(task.labels) == tags and task.labels[0] == "O" and task.config["num_labels"] == len(tags) == 13
    assert all(task.config["label2id"][name] == number for number, name in task.config["id2label"].items())
    assert (task.name, task.metric) == ("ner", "f1")


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
    gold = [example["tags"] for example in examples]
    predicted = [["O"] * len(tags) for tags in gold]
    predicted[0][0] = "B-person"
    width = max(map(len, gold)) + 2
    labels, logits = np.full((2, width), -100), np.zeros((2, width, len(task.labels)))
    logits[..., 3] = 1  # wrong at every marker and padding
    for row, (tags, found) in enumerate(zip(gold, predicted, strict=True)):
        labels[row, 1 : len(tags) + 1] = [task.labels.index(tag) for tag in tags]
        logits[row, np.arange(len(tags)) + 1, [task.labels.index(tag) for tag in found]] = 2
    output = SplitOutput(logits, labels, examples, None)
    assert task.scores(output) == tagging_scores(predicted, gold, are_entities=True)
    assert [row["predicted"] for row in task.predictions(output)] == predicted


def test_a_tag_that_is_not_in_the_training_data(tmp_path):
    (tmp_path / "dev.conll").write_text("a\tB-other\n", encoding="utf-8")
    with pytest.raises(ValueError, match="'B-other' does not occur in 'train'"):
        tagging(validation_file=str(tmp_path / "dev.conll"))


def test_a_header_among_entities_is_told(tmp_path, caplog):
    path = tmp_path / "train.conll"
    for text, metric, told in (
        ("token tag\n\nSeoul B-LOC\nis O\n", "accuracy", "but not 'tag'"),
        ("Seoul B-LOC\n" + "".join(f"x {tag}\n" for tag in "pqrst"), "accuracy", "but not 'p', 'q', 'r' and 2 more"),
        ("Seoul B-LOC\nis O\n", "f1", None),
    ):
        caplog.clear()
        path.write_text(text, encoding="utf-8")
        assert tagging(train_file=str(path), test_file=None, validation_file=None).metric == metric
        assert not caplog.messages if told is None else f"{path}: " in caplog.text and told in caplog.text


@pytest.mark.parametrize(
    ("tags", "told"),
    [
        (["O", "B-A", "I-A"], None),
        (["O", "I-A"], None),  # IO and IOB1 are grouped
        (["NN", "VB", "IN"], None),
        (["O", "B-A", "E-A", "S-A"], "'E-A', 'S-A' are"),
        (["O", "B-A", "L-A", "U-A"], "'L-A', 'U-A' are"),
        (["B", "M", "E", "S"], "'B', 'E', 'M' and 1 more are"),
        (["O", "B_A", "I_A"], "'B_A', 'I_A' are"),
    ],
)
def test_tags_that_the_pipeline_splits_are_told(tmp_path, caplog, tags, told):
    path = tmp_path / "train.conll"
    path.write_text("".join(f"x {tag}\n" for tag in tags))
    tagging(train_file=str(path), test_file=None, validation_file=None)
    messages = [message for message in caplog.messages if "BIO" in message and "pipeline" in message]
    assert (f"{path}: {told} not BIO tags" in messages[0] and len(messages) == 1) if told else not messages
