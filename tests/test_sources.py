"""Which splits the options name, and when cached rows are used again."""

import os
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, Features, Value

from modeling_elmo.run_scripts.fine_tuning import sources
from modeling_elmo.run_scripts.fine_tuning.sources import DataArguments, code_states, split_sources
from modeling_elmo.run_scripts.program.data_files import json_rows


def save_dataset(folder: Path):
    parts = {"train": range(5), "dev": range(5, 7), "test": range(7, 8)}
    DatasetDict({name: Dataset.from_dict({"n": list(rows)}) for name, rows in parts.items()}).save_to_disk(folder)


def rows(folder: Path, **options) -> dict:
    found = split_sources(DataArguments(dataset=str(folder), **options), {})
    return {split: [row["n"] for _, row in source.read()] for split, source in found.items()}


def test_splits_of_a_data_set(tmp_path):
    save_dataset(tmp_path / "data")
    assert rows(tmp_path / "data") == {"train": [0, 1, 2, 3, 4], "test": [7]}
    parts = {"train_split": "train[:60%]+dev", "validation_split": "train[3:]", "test_split": "none"}
    assert rows(tmp_path / "data", **parts) == {"train": [0, 1, 2, 5, 6], "validation": [3, 4]}
    found = split_sources(DataArguments(dataset=str(tmp_path / "data"), train_split="dev"), {})
    location, row = list(found["train"].read())[1]
    assert location == f"--dataset {tmp_path / 'data'}, dev, row 1" and row == {"n": 6}

    Dataset.from_dict({"n": [3]}).save_to_disk(tmp_path / "one")
    assert rows(tmp_path / "one") == {"train": [3]}
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.csv").write_text("n\n4\n5\n")
    assert rows(tmp_path / "files") == {"train": [4, 5]}
    with pytest.raises(ValueError, match="--dataset .*files, --dataset_config other: BuilderConfig 'other' not found"):
        rows(tmp_path / "files", dataset_config="other")


@pytest.mark.parametrize(
    "options, shown",
    [
        ({"train_split": "all"}, r"--train_split all: Unknown split .*\['train', 'dev', 'test'\]"),
        ({"test_split": "dev[:"}, r"--test_split dev\[:: Unrecognized instruction format"),
        ({"train_split": "none", "test_split": "none"}, r"has the splits \['train', 'dev', 'test'\]; .*--train_split"),
    ],
)
def test_absent_splits(tmp_path, options, shown):
    save_dataset(tmp_path)
    with pytest.raises(ValueError, match=shown):
        rows(tmp_path, **options)


def test_splits_with_other_classes_are_not_joined(tmp_path):
    parts = {name: Dataset.from_dict({name: [1]}) for name in ("train", "test")}
    DatasetDict(parts).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match=r"--train_split train\+test: .*different columns"):
        rows(tmp_path, train_split="train+test")


FORMATS = {".jsonl": json_rows, ".json": json_rows}


def test_files_that_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for options, error, shown in (
        ({}, ValueError, "--train_file, --validation_file or --test_file, or --dataset"),
        ({"train_file": "a", "dataset": "b"}, ValueError, "--train_file, .*or --dataset"),
        ({"test_file": "nowhere.json.gz"}, FileNotFoundError, "--test_file nowhere.json.gz"),
        ({"train_file": str(tmp_path)}, IsADirectoryError, f"--train_file {tmp_path} is a folder"),
        ({"train_file": str(tmp_path / "pipe")}, ValueError, "--train_file .*/pipe is a pipe"),
        ({"train_file": "a.docx"}, ValueError, r"--train_file a.docx .*\.jsonl, \.json"),
        ({"train_file": "a.gz"}, ValueError, "--train_file a.gz "),
    ):
        with pytest.raises(error, match=shown):
            split_sources(DataArguments(**options), FORMATS)


def test_parts_of_files(tmp_path):
    """As parts of a data set with the same splits."""
    for name, numbers in (("train", range(5)), ("dev", range(5, 7))):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in numbers))
    files = {"train_file": str(tmp_path / "train.jsonl"), "validation_file": str(tmp_path / "dev.jsonl")}

    def numbers(**options) -> dict:
        found = split_sources(DataArguments(**files, **options), FORMATS)
        read = {split: [row["n"] for _, row in source.read()] for split, source in found.items()}
        stored = {split: source.convert(keep, Features(n=Value("int32")), split) for split, source in found.items()}
        assert read == {split: data["n"][:] for split, data in stored.items()}
        return read

    assert numbers() == {"train": [0, 1, 2, 3, 4], "validation": [5, 6]}
    parts = {"train_split": "train[:60%]+validation", "validation_split": "none", "test_split": "train[3:]"}
    assert numbers(**parts) == {"train": [0, 1, 2, 5, 6], "test": [3, 4]}
    source = split_sources(DataArguments(**files, test_split="train[3:]"), FORMATS)["test"]
    assert "--test_split train[3:]" in source.name
    assert next(source.read())[0] == f"{files['train_file']}, line 4"


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
        source = split_sources(DataArguments(train_file=str(path)), {".jsonl": json_rows})["train"]
        found = source.convert(convert, features, "train")["n"][:]
        return found, len(calls.read_text().splitlines())

    path.write_text('{"n": 1}')
    assert numbers() == numbers() == ([1], 1)
    path.write_text('{"n": 2}')
    assert numbers() == ([2], 2)
    script = tmp_path / "script.py"
    script.write_text("1")
    states = code_states(script)
    assert len(states) > 30 and states[:-1] == code_states()
    script.write_text("12")
    assert code_states(script)[-1] != states[-1]
    monkeypatch.setattr(sources, "code_states", lambda *_: states)
    assert numbers() == ([2], 3)
