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
    "options, message",
    [
        ({"train_split": "all"}, r"--train_split all: Unknown split .* The splits are \['train', 'dev', 'test'\]"),
        ({"test_split": "dev[:"}, r"--test_split dev\[:: Unrecognized instruction format"),
        ({"train_split": "none", "test_split": "none"}, r"has the splits \[.*; pass --train_split, --validation_split"),
    ],
)
def test_absent_splits(tmp_path, options, message):
    save_dataset(tmp_path)
    with pytest.raises(ValueError, match=message):
        rows(tmp_path, **options)


def test_either_files_or_a_data_set():
    for options in ({}, {"train_file": "a", "dataset": "b"}):
        with pytest.raises(ValueError, match="Pass either --train_file, --validation_file or --test_file, or --datas"):
            split_sources(DataArguments(**options), {})


def test_files(tmp_path):
    formats = {".jsonl": json_rows, ".json": json_rows}
    with pytest.raises(FileNotFoundError, match="--test_file nowhere.json.gz does not exist; pass an existing file"):
        split_sources(DataArguments(test_file="nowhere.json.gz"), formats)
    with pytest.raises(IsADirectoryError, match=f"--train_file {tmp_path} is a folder; pass a file"):
        split_sources(DataArguments(train_file=str(tmp_path)), formats)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="--train_file .*/pipe is a pipe or a device, which cannot be read twice; pas"):
        split_sources(DataArguments(train_file=str(tmp_path / "pipe")), formats)
    for name in ("a.docx", "a.gz"):
        message = rf"--train_file {name} has an unknown ending; pass a file that ends in .jsonl, .json\."
        with pytest.raises(ValueError, match=message):
            split_sources(DataArguments(train_file=name), formats)


def test_parts_of_files(tmp_path):
    """As parts of a data set with the same splits."""
    for name, numbers in (("train", range(5)), ("dev", range(5, 7))):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in numbers))
    files = {"train_file": str(tmp_path / "train.jsonl"), "validation_file": str(tmp_path / "dev.jsonl")}

    def numbers(**options) -> dict:
        found = split_sources(DataArguments(**files, **options), {".jsonl": json_rows})
        read = {split: [row["n"] for _, row in source.read()] for split, source in found.items()}
        stored = {split: source.convert(keep, Features(n=Value("int32")), split) for split, source in found.items()}
        assert read == {split: data["n"][:] for split, data in stored.items()}
        return read

    assert numbers() == {"train": [0, 1, 2, 3, 4], "validation": [5, 6]}
    parts = {"train_split": "train[:60%]+validation", "validation_split": "none", "test_split": "train[3:]"}
    assert numbers(**parts) == {"train": [0, 1, 2, 5, 6], "test": [3, 4]}
    source = split_sources(DataArguments(**files, test_split="train[3:]"), {".jsonl": json_rows})["test"]
    assert source.name == f"{files['train_file']} (--test_split train[3:])"
    assert next(source.read())[0] == f"{files['train_file']}, line 4"
    with pytest.raises(
        ValueError, match=r"--test_split dev: Unknown split .* The splits are \['train', 'validation'\]"
    ):
        numbers(test_split="dev")
    with pytest.raises(ValueError, match="The files are train, validation; pass --train_split, --validation_split or"):
        numbers(train_split="none", validation_split="none")


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
