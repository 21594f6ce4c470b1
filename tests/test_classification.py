"""Classification: rows from files and data sets; kinds of labels, their targets, predictions and ensembles."""

import json
import re

import numpy as np
import pytest
import sklearn.metrics
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from errors import refused
from task_worker import written

from modeling_elmo.run_scripts.fine_tuning.tasks.classification import (
    Classification,
    ClassificationArguments,
    MultiLabel,
    Regression,
    SingleLabel,
    label_type,
)


def classification(**options):
    return Classification.read_data(ClassificationArguments(**options))


@pytest.fixture
def read_rows(tmp_path):
    """A function that returns the training rows of `a.jsonl`, where it has written these rows."""

    def rows_read(rows, **options):
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
        return classification(train_file=str(path), **options)["train"]

    return rows_read


def test_texts_and_pairs(read_rows, capsys):
    rows = [{"text": " a ", "label": 1, "sentence": "x"}, {"text": "b", "label": 0, "sentence": "y"}]
    assert read_rows(rows).to_dict() == {"text": [" a ", "b"], "label": ["1", "0"]}
    options = {"text_column": "sentence", "text_pair_column": "text"}
    data = read_rows(rows, **options)
    assert data.to_dict() == {"text": ["x", "y"], "text_pair": [" a ", "b"], "label": ["1", "0"]}
    assert "the text is" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "columns, text, pair, label",
    [
        (["id", "document", "label"], "document", None, "label"),
        (["sentence2", "sentence1", "gold_label", "label2"], "sentence1", "sentence2", "gold_label"),
        (["premise", "hypothesis", "label", "labels"], "premise", "hypothesis", "label"),
        (["question", "sentence", "label"], "question", "sentence", "label"),
        (["text", "text_pair", "label"], "text", "text_pair", "label"),  # of the pipelines and of predictions
        (["text_pair", "premise", "hypothesis", "text", "label"], "text", "text_pair", "label"),
    ],
)
def test_columns_of_other_names(read_rows, capsys, columns, text, pair, label):
    (row,) = read_rows([{name: f"the {name}" for name in columns}])
    assert row == {"text": f"the {text}", "label": f"the {label}"} | ({"text_pair": f"the {pair}"} if pair else {})
    printed = capsys.readouterr().out
    assert f"a.jsonl: the text is {text}" in printed and (f"the label is {label}" in printed) == (label != "label")


@pytest.mark.parametrize(
    "columns, unread",
    [
        (["text", "label"], None),
        (["text", "hypothesis", "label"], "hypothesis"),
        (["id", "sentence", "label", "other"], "id, other"),
        (["", "text", "label"], "''"),
        (["id", "text", "text_pair", "label"], None),
    ],
)
def test_a_second_text_is_not_dropped_without_a_word(read_rows, capsys, columns, unread):
    read_rows([{name: f"the {name}" for name in columns}])
    printed = capsys.readouterr().out
    assert printed.count("not read") == (unread is not None)
    assert unread is None or f"a.jsonl: not read: {unread}; --text_pair_column names a second text\n" in printed


def test_a_second_text_that_begins_later_is_refused(read_rows):
    rows = [{"text": "a", "label": 1}, {"text": "b", "text_pair": "c", "label": 0}]
    with refused("line 2: `text_pair` is 'c'; it must be in the first row as well"):
        read_rows(rows)
    rows[1]["text_pair"] = None
    assert read_rows(rows)["text"][:] == ["a", "b"]


@pytest.mark.parametrize(
    "columns, options, option",
    [
        (["content", "title", "label"], {}, "text_column"),
        (["text", "stars", "score"], {}, "label_column"),
        (["text", "label"], {"text_pair_column": "b"}, "text_pair_column"),
        (["text", "stars"], {"label_column": "a"}, "label_column"),
    ],
)
def test_no_column_is_guessed(read_rows, columns, options, option):
    with refused(f"a.jsonl has .*{re.escape(str(columns))}.*--{option}"):
        read_rows([dict.fromkeys(columns, "x")], **options)


def test_a_table_without_its_header(tmp_path):
    path = written(tmp_path / "a.csv", "good,1\nbad,0\n")
    found = classification(train_file=str(path), column_names=["text", "label"])
    assert found["train"].to_dict() == {"text": ["good", "bad"], "label": ["1", "0"]}
    written(path, "text,label\ngood,1\nbad,0\n")
    assert classification(train_file=str(path), column_names=["text", "label"])["train"][:] == found["train"][:]


def test_kinds_of_labels(read_rows):
    numbers = read_rows([{"text": "a", "label": "2.5"}, {"text": "b", "label": 3}], problem="regression")
    assert numbers["label"][:] == [2.5, 3.0] and all(isinstance(label, float) for label in numbers["label"])
    lists = read_rows([{"text": "a", "label": ["y", "x"]}, {"text": "b", "label": []}])
    assert lists["label"][:] == [["y", "x"], []]
    assert label_type(DatasetDict(train=lists), "classification").labels == ["x", "y"]
    with refused("'train' are 'a'; a classifier needs two"):
        label_type(DatasetDict(train=Dataset.from_dict({"label": ["a", "a"]})), "classification")


@pytest.mark.parametrize("labels", [[[0, 1], [1, 0]], [[False, True], [True, False]], [["1", "0"], ["0", "1"]]])
def test_labels_of_which_each_has_a_0_or_1_are_refused(read_rows, labels):
    rows = [{"text": "a", "label": label} for label in labels]
    with refused(r"same labels, .* not 0 or 1 for every label: write \[0, 1, 1\] as \[1, 2\]"):
        label_type(DatasetDict(train=read_rows(rows)), "classification")


def test_lists_of_numbers_of_classes(tmp_path):
    """Also of a data set that was saved in the format of numpy."""
    features = Features(text=Value("string"), label=[ClassLabel(names=["no", "yes"])])
    data = Dataset.from_dict({"text": ["a", "b"], "label": [[0, 1], [1, 0]]}, features).with_format("numpy")
    DatasetDict(train=data).save_to_disk(tmp_path)
    found = classification(dataset=str(tmp_path))
    assert found["train"]["label"][:] == [["no", "yes"], ["yes", "no"]]


@pytest.mark.parametrize(
    "rows, options, shown",
    [
        ([("a", "x"), (" ", "x")], {}, "a.jsonl, line 2: `text` is ' '"),
        ([("a", None)], {}, "line 1: `label` is None; .*--drop_labels 'None' or --problem regression"),
        ([("a", 0.5)], {}, "line 1: `label` is 0.5; .*--problem regression"),
        ([("a", [0, 1]), ("b", [0, 1, 0])], {}, r"line 2: `label` is \[0, 1, 0\]; .*each once"),
        ([("a", [0.0, 1.0])], {}, r"line 1: `label` is 0.0; .* not 0 or 1 for every label: write"),
        ([("a", ["x"]), ("b", "x")], {}, "line 2: `label` is 'x'; it must be a list"),
        ([("a", "nan")], {"problem": "regression"}, "line 1: `label` is 'nan'; it must be a finite number"),
        ([("a", "1_000")], {"problem": "regression"}, "line 1: `label` is '1_000'; it must be a finite number"),
        ([("a", ["1"])], {"problem": "regression"}, r"line 1: `label` is \['1'\]; it must be a finite number"),
        ([("a", "x")], {"drop_labels": ["x"]}, "--drop_labels x leaves no sample of 'train'"),
        ([("a", "1")], {"drop_labels": ["x"], "problem": "regression"}, "--drop_labels x"),
    ],
)
def test_bad_labels(read_rows, rows, options, shown):
    with refused(shown):
        read_rows([{"text": text, "label": label} for text, label in rows], **options)


def test_splits_must_be_alike(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"sentence": "a", "label": "x"}')
    (tmp_path / "b.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "label": "x"}')
    with refused("The splits differ: .*text_pair.* Pass --text_column, --text_pair_column and"):
        classification(train_file=f"{tmp_path}/a.jsonl", validation_file=f"{tmp_path}/b.jsonl")


@pytest.mark.parametrize(("row", "column"), [("NA,good", "text"), ("fine,None", "label")])
def test_words_that_a_data_set_reads_as_empty(row, column, tmp_path):
    (tmp_path / "train.csv").write_text(f"text,label\n{row}\nso so,bad\n")
    with refused(
        rf"row 0: `{column}` is None; .*\(`datasets` reads cells of CSV such as None and NA as empty; --train_f"
    ):
        classification(dataset=str(tmp_path))
    found = classification(train_file=str(tmp_path / "train.csv"))
    assert found["train"][column][0] == dict(zip(("text", "label"), row.split(","), strict=True))[column]


def test_labels_that_are_missing_are_dropped_on_request(tmp_path, capsys):
    names = Features(text=Value("string"), label=ClassLabel(names=["no", "yes"]))
    splits = {"train": [1, -1, 0, 1], "test": [-1, 1]}
    rows = {name: {"text": [f"t{label}" for label in labels], "label": labels} for name, labels in splits.items()}
    DatasetDict({name: Dataset.from_dict(row, names) for name, row in rows.items()}).save_to_disk(tmp_path)
    with refused(r"row 1: `label` is -1; it must be one of \['no', .*--test_split none"):
        classification(dataset=str(tmp_path))
    found = classification(dataset=str(tmp_path), drop_labels=["-1"])
    assert found["train"].to_dict() == {"text": ["t1", "t0", "t1"], "label": ["yes", "no", "yes"]}
    assert found["test"]["label"][:] == ["yes"]
    assert "train: 1 of 4 samples have a dropped label\ntest: 1 of 2 samples" in capsys.readouterr().out


def probabilities(*logits):
    return [np.array([row], dtype=np.float64) for row in logits]


def test_one_label():
    labels = SingleLabel(["bad", "good"])
    assert (labels.target("good"), labels.label(np.array([0.1, 0.2]))) == (1, "good")
    mean = labels.average(probabilities([0.0, 0.0], [0.0, np.log(3)]))  # (1/2 + 3/4) / 2
    assert np.exp(mean[0]) == pytest.approx([0.375, 0.625])
    assert labels.scores(["bad", "bad"], ["bad", "good"])["accuracy"] == 0.5


def test_several_labels():
    labels = MultiLabel(["a", "b", "c"])
    assert labels.target(["c", "a"]) == [1.0, 0.0, 1.0] and labels.label(np.array([0.1, -0.1, 2.0])) == ["a", "c"]
    mean = labels.average(probabilities([0.0], [np.log(3)]))  # sigmoids 1/2 and 3/4
    assert 1 / (1 + np.exp(-mean[0, 0])) == pytest.approx(0.625)
    assert labels.scores([["a"]], [["a", "c"]])["micro_f1"] == pytest.approx(2 / 3)


def test_numbers():
    data = DatasetDict({split: Dataset.from_dict({"label": [1.0, 2.0]}) for split in ("train", "test")})
    labels = Regression(data)
    assert labels.target(1.5) == 1.5 and labels.label(np.array([2.5])) == 2.5
    assert labels.average(probabilities([1.0], [2.0])).tolist() == [[1.5]]
    assert labels.scores([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])["pearson"] == pytest.approx(1)


def test_hidden_labels_are_noticed():
    data = DatasetDict(train=Dataset.from_dict({"label": [0.0, 0.0]}), test=Dataset.from_dict({"label": [-1.0, -1.0]}))
    with refused("Split 'test' has the label -1.0 in every row.*--test_split none"):
        label_type(data, "regression")


def test_labels_that_the_training_data_lacks_are_errors():
    """As scikit-learn counts the labels as given."""
    labels = SingleLabel(["bad", "good"])
    predicted, gold = ["bad", "good", "good", "bad"], ["bad", "odd", "good", "odd"]
    assert [labels.target(name) for name in gold] == [0, -100, 1, -100]
    scores = labels.scores(predicted, gold)
    assert scores["accuracy"] == sklearn.metrics.accuracy_score(gold, predicted)
    assert scores["macro_f1"] == sklearn.metrics.f1_score(gold, predicted, average="macro", zero_division=0)
    matrix = sklearn.metrics.confusion_matrix(gold, predicted, labels=["bad", "good", "odd"])
    assert scores["confusion"] == matrix.tolist()
    assert scores["per_label"]["odd"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "number": 2}

    sets, found, wanted = MultiLabel(["a", "b"]), [["a"], ["a", "b"]], [["a"], ["b", "z"]]
    assert sets.target(["b", "z"]) == [0.0, 1.0]
    scores = sets.scores(found, wanted)
    matrices = np.array([[1, 0, 0], [0, 1, 1]]), np.array([[1, 0, 0], [1, 1, 0]])  # gold and predicted: a, b, z
    for average in ("micro", "macro"):
        expected = sklearn.metrics.f1_score(*matrices, average=average, zero_division=0)
        assert scores[f"{average}_f1"] == pytest.approx(expected)
    assert scores["subset_accuracy"] == 0.5
