"""Which splits and rows the options name, when cached rows are used again, and the labels of the training data."""

import os

from datasets import Dataset, DatasetDict, Features, Value
from errors import refused

from modeling_elmo.run_scripts.fine_tuning import data as data_of_tasks
from modeling_elmo.run_scripts.fine_tuning.data import (
    DataArguments,
    code_states,
    label_names,
    scored_labels,
    split_sources,
    take_samples,
    training_share,
)
from modeling_elmo.run_scripts.program.data_files import json_rows
from modeling_elmo.run_scripts.program.texts import TextArguments, dataset_texts

FORMATS = {".jsonl": json_rows, ".json": json_rows}


def sources(**options):
    return split_sources(DataArguments(**options), FORMATS)


def read(found):
    return {split: [row["n"] for _, row in source.read()] for split, source in found.items()}


def save_dataset(folder):
    parts = {"train": range(5), "dev": range(5, 7), "test": range(7, 8)}
    DatasetDict({name: Dataset.from_dict({"n": list(rows)}) for name, rows in parts.items()}).save_to_disk(folder)


def rows(folder, **options):
    return read(sources(dataset=str(folder), **options))


def test_a_data_set_without_the_splits_that_are_asked_for(tmp_path):
    DatasetDict({"june": Dataset.from_dict({"n": [1]})}).save_to_disk(tmp_path)
    none = {"train_split": "none", "validation_split": "none"}
    for given, options in (({}, "--train_split or --validation_split or --test_split"), (none, "--test_split")):
        with refused(rf"has the splits \['june'\]; pass {options}\."):
            rows(tmp_path, **given)


def test_splits_of_a_data_set(tmp_path, capsys):
    save_dataset(tmp_path / "data")
    assert rows(tmp_path / "data") == {"train": [0, 1, 2, 3, 4], "test": [7]}
    told = f"--dataset {tmp_path / 'data'}: splits not read: dev; --validation_split may name one\n"
    assert capsys.readouterr().out == told
    rows(tmp_path / "data", validation_split="none")
    parts = {"train_split": "train[:60%]+dev", "validation_split": "train[3:]", "test_split": "none"}
    assert rows(tmp_path / "data", **parts) == {"train": [0, 1, 2, 5, 6], "validation": [3, 4]}
    assert not capsys.readouterr().out
    found = sources(dataset=str(tmp_path / "data"), train_split="dev")
    location, row = list(found["train"].read())[1]
    assert location == f"--dataset {tmp_path / 'data'}, dev, row 1" and row == {"n": 6}

    Dataset.from_dict({"n": [3]}).save_to_disk(tmp_path / "one")
    assert rows(tmp_path / "one") == {"train": [3]}
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.csv").write_text("n\n4\n5\n")
    assert rows(tmp_path / "files") == {"train": [4, 5]}
    with refused("--dataset .*files, --dataset_config other: BuilderConfig 'other' not found"):
        rows(tmp_path / "files", dataset_config="other")
    (tmp_path / "files" / "train.csv").unlink()
    (tmp_path / "files" / "train.jsonl").write_text('{"text": "a b"}\n{"text": "c\n')
    for read_folder in (rows, lambda folder: dataset_texts(TextArguments(dataset=str(folder)))):
        with refused("--dataset .*files.*: .*JSON"):
            read_folder(tmp_path / "files")


def test_splits_that_are_refused(tmp_path):
    save_dataset(tmp_path / "data")
    parts = {name: Dataset.from_dict({name: [1]}) for name in ("train", "test")}
    DatasetDict(parts).save_to_disk(tmp_path / "other")
    for folder, options, shown in (
        ("data", {"train_split": "all"}, r"--train_split all: Unknown split .*\['train', 'dev', 'test'\]"),
        ("data", {"test_split": "dev[:"}, r"--test_split dev\[:: Unrecognized .*'train\[90%:\]' is a part"),
        ("data", {"validation_split": "train[3:]"}, r"--validation_split train\[3:\] is also .*pass .* --train_split"),
        ("data", {"test_split": "train[3:]"}, r"--test_split train\[3:\] is also training data.*pass .* --train_split"),
        (
            "data",
            {"train_split": "none", "test_split": "none"},
            r"\['train', 'dev', 'test'\]; pass --validation_split\.",
        ),
        ("data", {"dataset_config": "en"}, "--dataset_config en: .*data was made by save_to_disk"),
        (
            "other",
            {"train_split": "train+test", "test_split": "none"},
            r"train\+test: .*different columns",
        ),
    ):
        with refused(shown):
            rows(tmp_path / folder, **options)


def test_files_that_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for options, error, shown in (
        ({}, ValueError, "--train_file, --validation_file or --test_file, or --dataset"),
        ({"train_file": "a", "dataset": "b"}, ValueError, "--train_file, .*or --dataset"),
        ({"test_file": "nowhere.json.gz"}, FileNotFoundError, "--test_file nowhere.json.gz"),
        ({"train_file": str(tmp_path)}, IsADirectoryError, f"--train_file {tmp_path}"),
        ({"train_file": str(tmp_path / "pipe")}, ValueError, "--train_file .*/pipe"),
        (
            {"train_file": "a", "dataset_config": "en"},
            ValueError,
            "--dataset_config en has no effect without --dataset",
        ),
        ({"train_file": "a.docx"}, ValueError, r"--train_file a.docx .*\.jsonl, \.json"),
    ):
        with refused(shown, error):
            sources(**options)


def test_parts_of_files(tmp_path):
    """As parts of a data set with the same splits."""
    for name, numbers in (("train", range(5)), ("dev", range(5, 7))):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in numbers))
    parts = {"train_split": "train[:60%]+validation", "validation_split": "none", "test_split": "train[3:]"}
    files = {"train_file": str(tmp_path / "train.jsonl"), "validation_file": str(tmp_path / "dev.jsonl")}
    found = sources(**files, **parts)
    stored = {split: source.convert(keep, Features(n=Value("int32")), split) for split, source in found.items()}
    assert (
        read(found)
        == {"train": [0, 1, 2, 5, 6], "test": [3, 4]}
        == {split: data["n"][:] for split, data in stored.items()}
    )
    assert "--test_split train[3:]" in found["test"].name
    assert next(found["test"].read())[0] == f"{files['train_file']}, line 4"


def keep(location, row):
    return row


def test_cached_rows_are_used_until_file_or_code_changes(tmp_path, monkeypatch):
    path, calls = tmp_path / "a.jsonl", tmp_path / "calls"
    features = Features(n=Value("int32"))

    def convert(location, row):
        with calls.open("a") as file:
            file.write("call\n")
        return row

    def numbers() -> tuple[list[int], int]:
        source = sources(train_file=str(path))["train"]
        found = source.convert(convert, features, "train")["n"][:]
        return found, len(calls.read_text().splitlines())

    path.write_text('{"n": 1}')
    assert numbers() == numbers() == ([1], 1)
    before = path.stat()
    path.write_text('{"n": 2}')  # of the same size, and of the same time as in an archive
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert numbers() == ([2], 2)
    states = code_states()
    assert len(states) > 30
    monkeypatch.setattr(data_of_tasks, "code_states", lambda: states[1:])
    assert numbers() == ([2], 3)


def splits_of(**labels):
    return DatasetDict({split: Dataset.from_dict({"tags": values}) for split, values in labels.items()})


def test_label_names():
    assert label_names(splits_of(train=["b", "a", "b"], test=["a"]), "tags") == ["a", "b"]
    assert label_names(splits_of(train=[["I-A", "O", "B-A"]]), "tags") == ["O", "B-A", "I-A"]
    unknown = splits_of(train=[["O", "B-A"]], validation=[["O"]] * 1200 + [["B-B"]])
    for splits, shown in (
        (unknown, "'validation', row 1200: 'B-B' .*O, B-A"),
        (splits_of(test=["a"]), r"'train', .*\['test'\]"),
        (splits_of(train=[[], []]), "No row of the split 'train'"),
    ):
        with refused(shown):
            label_names(splits, "tags")


def test_labels_that_are_scored_as_errors(caplog):
    splits = splits_of(train=[["O", "B-A"]], validation=[["O", "B-B"]] * 1200 + [["I-C"]], test=[["B-A"], []])
    assert scored_labels(splits, "tags") == ["O", "B-A"]
    (message,) = caplog.messages
    assert "Split 'validation' has labels that do not occur in 'train': B-B (1,200), I-C (1)." in message
    assert "they count as errors" in message
    with refused(r"Split 'test' has none of the labels of 'train' \(a, b\), but 0 \(2\), 1 \(1\)"):
        scored_labels(splits_of(train=["a", "b"], test=["0", "1", "0"]), "tags")


def test_samples(capsys):
    splits = splits_of(train=list(map(str, range(200))), validation=["0"] * 9, test=["0"])
    assert take_samples(splits, DataArguments())["train"] is splits["train"]
    assert capsys.readouterr().out == ""
    taken = take_samples(splits, DataArguments(train_fraction=0.1, max_train_samples=7, max_eval_samples=3))
    assert taken["train"]["tags"][:] == list(map(str, training_share(200, 0.1)[:7]))
    assert {split: len(data) for split, data in taken.items()} == {"train": 7, "validation": 3, "test": 1}
    printed = capsys.readouterr().out
    assert printed == "train: 7 of 200 samples are used\nvalidation: 3 of 9 samples are used\n"


def test_a_share_is_part_of_larger_ones():
    tenth, half = training_share(1000, 0.1), training_share(1000, 0.5)
    assert len(tenth) == 100 and len(half) == 500 and tenth == sorted(set(tenth)) and set(tenth) < set(half)
    assert 300 < sum(half) / 500 < 700 and half != list(range(500))
    assert training_share(1000, 1.0) == list(range(1000)) and len(training_share(7, 0.001)) == 1
    assert [len(training_share(100, percent / 100)) for percent in range(1, 101)] == list(range(1, 101))
