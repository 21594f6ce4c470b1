"""Checked rows for taggers and classifiers, from files and data sets, and the errors for bad rows."""

import json
import os
import re
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from transformers import HfArgumentParser

from modeling_elmo.run_scripts.fine_tuning.data import (
    ClassificationArguments,
    TaggingDataArguments,
    label_names,
    read_classification,
    read_tagging,
    take_samples,
    training_share,
)
from modeling_elmo.run_scripts.fine_tuning.metrics import tagging_scores


def tags_of(path: Path, text: str, **options) -> list[list[str]]:
    path.write_text(text, encoding="utf-8")
    return read_tagging(TaggingDataArguments(train_file=str(path), **options))["train"]["tags"][:]


def read_rows(path: Path, rows: list[dict], **options) -> Dataset:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return read_classification(ClassificationArguments(train_file=str(path), **options))["train"]


def test_labels_that_look_like_options():
    (labels,) = HfArgumentParser(ClassificationArguments).parse_args_into_dataclasses(["--drop_labels", "-", "-1"])
    assert labels.drop_labels == ["-", "-1"]


def test_tagging_files(tmp_path):
    (tmp_path / "a.conll").write_text("EU B-ORG\nrejects O\n\nno O\n")
    (tmp_path / "b.jsonl").write_text('{"tokens": ["EU"], "ner_tags": ["B-ORG"], "tokens2": 1}\n')
    splits = read_tagging(TaggingDataArguments(train_file=f"{tmp_path}/a.conll", test_file=f"{tmp_path}/b.jsonl"))
    assert list(splits) == ["train", "test"] and splits["test"].split == "test"
    assert splits["train"].to_dict() == {"tokens": [["EU", "rejects"], ["no"]], "tags": [["B-ORG", "O"], ["O"]]}
    assert splits["test"].to_dict() == {"tokens": [["EU"]], "tags": [["B-ORG"]]}
    assert label_names(splits, "tags") == ["O", "B-ORG"]


def test_tags_of_a_data_set_become_names(tmp_path, caplog):
    names = ClassLabel(names=["O", "B-PER", "I-PER"])
    features = Features(id=Value("int32"), words=[Value("string")], ner_tags=[names], pos_tags=[Value("int32")])
    rows = {"id": [1, 2], "words": [["a", "b"], ["c"]], "ner_tags": [[1, 2], [0]], "pos_tags": [[7, 8], [9]]}
    DatasetDict(train=Dataset.from_dict(rows, features)).save_to_disk(tmp_path / "data")
    options = {"dataset": str(tmp_path / "data"), "tokens_column": "words"}
    data = read_tagging(TaggingDataArguments(**options))["train"]
    assert data.to_dict() == {"tokens": [["a", "b"], ["c"]], "tags": [["B-PER", "I-PER"], ["O"]]}
    assert not caplog.messages
    data = read_tagging(TaggingDataArguments(**options, tags_column="pos_tags"))["train"]
    assert data["tags"][:] == [["7", "8"], ["9"]]
    assert "the tags are numbers without names, so they are scored by accuracy" in caplog.text
    assert not [file for file in os.listdir(tmp_path / "data" / "train") if file.startswith("cache")]


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
    caplog.clear()
    assert tags_of(tmp_path / "a.conll", "a B-A\nb I-A\nc O\nd S-I\ne I\n") and not caplog.messages


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
    pairs = tagging_scores([expected.split()], [tags.split()], are_entities=True)
    assert pairs["f1"] == 1


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
        ('{"tokens": ["a"], "tags": ["O"]}\n{"tags": ["O"]}', {}, "line 2: `tokens` is None"),
    ],
)
def test_bad_tags(tmp_path, text, options, shown):
    with pytest.raises(ValueError, match=shown):
        tags_of(tmp_path / ("a.jsonl" if text.startswith("{") else "a.conll"), text, **options)


def test_texts_and_pairs(tmp_path, capsys):
    rows = [{"text": " a ", "label": 1, "sentence": "x"}, {"text": "b", "label": 0, "sentence": "y"}]
    assert read_rows(tmp_path / "a.jsonl", rows).to_dict() == {"text": [" a ", "b"], "label": ["1", "0"]}
    options = {"text_column": "sentence", "text_pair_column": "text"}
    data = read_rows(tmp_path / "a.jsonl", rows, **options)
    assert data.to_dict() == {"text": ["x", "y"], "text_pair": [" a ", "b"], "label": ["1", "0"]}
    assert "the text is" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "columns, text, pair, label",
    [
        (["id", "document", "label"], "document", None, "label"),
        (["sentence", "stars"], "sentence", None, "stars"),
        (["sentence2", "sentence1", "gold_label", "label2"], "sentence1", "sentence2", "gold_label"),
        (["premise", "hypothesis", "label", "labels"], "premise", "hypothesis", "label"),
        (["question", "sentence", "label"], "question", "sentence", "label"),
    ],
)
def test_columns_of_other_names(tmp_path, capsys, columns, text, pair, label):
    (row,) = read_rows(tmp_path / "a.jsonl", [{name: f"the {name}" for name in columns}])
    assert row == {"text": f"the {text}", "label": f"the {label}"} | ({"text_pair": f"the {pair}"} if pair else {})
    printed = capsys.readouterr().out
    assert f"a.jsonl: the text is {text}" in printed and (f"the label is {label}" in printed) == (label != "label")


@pytest.mark.parametrize(
    "columns, options, option",
    [
        (["content", "title", "label"], {}, "text_column"),
        (["words", "label"], {}, "text_column"),
        (["text", "stars", "score"], {}, "label_column"),
        (["text", "label"], {"text_pair_column": "b"}, "text_pair_column"),
        (["text", "stars"], {"label_column": "a"}, "label_column"),
    ],
)
def test_no_column_is_guessed(tmp_path, columns, options, option):
    with pytest.raises(ValueError, match=f"a.jsonl has .*{re.escape(str(columns))}.*--{option}"):
        read_rows(tmp_path / "a.jsonl", [dict.fromkeys(columns, "x")], **options)


def test_kinds_of_labels(tmp_path):
    path = tmp_path / "a.jsonl"
    numbers = read_rows(path, [{"text": "a", "label": "2.5"}, {"text": "b", "label": 3}], problem="regression")
    assert numbers["label"][:] == [2.5, 3.0] and all(isinstance(label, float) for label in numbers["label"])
    lists = read_rows(path, [{"text": "a", "label": ["y", "x"]}, {"text": "b", "label": []}])
    assert lists["label"][:] == [["y", "x"], []] and label_names(DatasetDict(train=lists), "label") == ["x", "y"]


@pytest.mark.parametrize(
    "rows, options, shown",
    [
        ([("a", "x"), (" ", "x")], {}, "a.jsonl, line 2: `text` is ' '"),
        ([("a", None)], {}, "line 1: `label` is None; .*--drop_labels 'None' or --problem regression"),
        ([("a", 0.5)], {}, "line 1: `label` is 0.5; .*--problem regression"),
        ([("a", "x"), ("b", ["x"])], {}, r"line 2: `label` is \['x'\]"),
        ([("a", [0, 1]), ("b", [0, 1, 0])], {}, r"line 2: `label` is \[0, 1, 0\]; .*each once"),
        ([("a", ["x"]), ("b", "x")], {}, "line 2: `label` is 'x'; it must be a list"),
        ([("a", "nan")], {"problem": "regression"}, "line 1: `label` is 'nan'; it must be a finite number"),
        ([("a", ["1"])], {"problem": "regression"}, r"line 1: `label` is \['1'\]; it must be a finite number"),
        ([("a", "x")], {"drop_labels": ["y"]}, "--drop_labels y: no sample"),
        ([("a", "x")], {"drop_labels": ["x"]}, "--drop_labels x leaves no sample of 'train'"),
        ([("a", "1")], {"drop_labels": ["x"], "problem": "regression"}, "--drop_labels x"),
    ],
)
def test_bad_labels(tmp_path, rows, options, shown):
    with pytest.raises(ValueError, match=shown):
        read_rows(tmp_path / "a.jsonl", [{"text": text, "label": label} for text, label in rows], **options)


def test_splits_must_be_alike(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"sentence": "a", "label": "x"}')
    (tmp_path / "b.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "label": "x"}')
    arguments = ClassificationArguments(train_file=f"{tmp_path}/a.jsonl", validation_file=f"{tmp_path}/b.jsonl")
    with pytest.raises(ValueError, match="The splits differ: .*text_pair.* Pass --text_column, --text_pair_column and"):
        read_classification(arguments)


def test_labels_that_are_missing_are_dropped_on_request(tmp_path, capsys):
    names = Features(text=Value("string"), label=ClassLabel(names=["no", "yes"]))
    splits = {"train": [1, -1, 0, 1], "test": [-1, 1]}
    rows = {name: {"text": [f"t{label}" for label in labels], "label": labels} for name, labels in splits.items()}
    DatasetDict({name: Dataset.from_dict(row, names) for name, row in rows.items()}).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match=r"row 1: `label` is -1; it must be one of \['no', .*--test_split none"):
        read_classification(ClassificationArguments(dataset=str(tmp_path)))
    found = read_classification(ClassificationArguments(dataset=str(tmp_path), drop_labels=["-1"]))
    assert found["train"].to_dict() == {"text": ["t1", "t0", "t1"], "label": ["yes", "no", "yes"]}
    assert found["test"]["label"][:] == ["yes"]
    assert "train: 1 of 4 samples have a dropped label\ntest: 1 of 2 samples" in capsys.readouterr().out


def splits_of(**labels: list) -> DatasetDict:
    return DatasetDict({split: Dataset.from_dict({"tags": values}) for split, values in labels.items()})


def test_label_names():
    assert label_names(splits_of(train=["b", "a", "b"], test=["a"]), "tags") == ["a", "b"]
    assert label_names(splits_of(train=[["I-A", "O", "B-A"]]), "tags") == ["O", "B-A", "I-A"]
    unknown = splits_of(train=[["O", "B-A"]], validation=[["O"]] * 1200 + [["B-B"]])
    for splits, shown in (
        (unknown, "'validation', row 1200: 'B-B' .*B-A, O"),
        (splits_of(test=["a"]), r"'train', .*\['test'\]"),
        (splits_of(train=[[], []]), "No row of the split 'train'"),
        (splits_of(train=["a", "a"], test=["a"]), "'train' are 'a'"),
    ):
        with pytest.raises(ValueError, match=shown):
            label_names(splits, "tags")


def test_samples(capsys):
    splits = splits_of(train=list(map(str, range(200))), validation=["0"] * 9, test=["0"])
    assert take_samples(splits, TaggingDataArguments())["train"] is splits["train"]
    assert capsys.readouterr().out == ""
    taken = take_samples(splits, TaggingDataArguments(train_fraction=0.1, max_train_samples=7, max_eval_samples=3))
    assert taken["train"]["tags"][:] == list(map(str, training_share(200, 0.1)[:7]))
    assert {split: len(data) for split, data in taken.items()} == {"train": 7, "validation": 3, "test": 1}
    printed = capsys.readouterr().out
    assert printed == "train: 7 of 200 samples are used\nvalidation: 3 of 9 samples are used\n"


def test_a_share_is_part_of_larger_ones():
    tenth, half = training_share(1000, 0.1), training_share(1000, 0.5)
    assert len(tenth) == 100 and len(half) == 500 and tenth == sorted(set(tenth)) and set(tenth) < set(half)
    assert 300 < sum(half) / 500 < 700 and half != list(range(500))
    assert training_share(1000, 1.0) == list(range(1000)) and len(training_share(7, 0.001)) == 1


def test_a_table_without_its_header(tmp_path):
    path = str(tmp_path / "a.csv")
    Path(path).write_text("good,1\nbad,0\n")
    with pytest.raises(ValueError, match=r"a.csv has no column 'text', only \['good', '1'\]; pass --text_column, or -"):
        read_classification(ClassificationArguments(train_file=path, text_pair_column="1"))
    found = read_classification(ClassificationArguments(train_file=path, column_names=["text", "label"]))
    assert found["train"].to_dict() == {"text": ["good", "bad"], "label": ["1", "0"]}
