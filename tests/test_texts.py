"""Lines of packed files, and parts of splits that overlap. The files of readers and programs test the rest."""

import gzip
import itertools
import tracemalloc

import pytest
import zstandard
from datasets import Dataset, DatasetDict, ReadInstruction
from errors import refused

from modeling_elmo.run_scripts.program import command_line
from modeling_elmo.run_scripts.program.texts import (
    TextArguments,
    dataset_texts,
    numbered_lines,
    refuse_training_data,
    saved_splits,
)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_memory_does_not_grow_with_the_number_of_lines(tmp_path, pack):
    path = tmp_path / ("a.txt.gz" if pack is gzip.compress else "a.txt.zst")
    path.write_bytes(pack((b"a b c " * 16_000 + b"\n") * 2000))
    tracemalloc.start()
    assert sum(len(text) for _, text in numbered_lines(path)) == 2000 * 96_000
    assert tracemalloc.get_traced_memory()[1] < 50e6 and path.stat().st_size < 1e6
    tracemalloc.stop()


def test_joined_files_have_a_mark_each(tmp_path):
    """As `cat` joins files of Windows. A mark inside a line is a character."""
    (tmp_path / "a.txt").write_bytes("".join(f"\ufeff{name} \ufeffb\nc\n" for name in "xy").encode())
    assert [*numbered_lines(tmp_path / "a.txt")] == [(1, "x \ufeffb"), (2, "c"), (3, "y \ufeffb"), (4, "c")]
    assert [*numbered_lines(tmp_path / "a.txt", keeps_marks=True)][2] == (3, "\ufeffy \ufeffb")
    (tmp_path / "mac.txt").write_bytes(b"\xef\xbb\xbfa\rb\r")
    assert [*numbered_lines(tmp_path / "mac.txt")] == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("columns", [None, ["n"]], ids=["all", "one"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "arrow", "pandas"])
@pytest.mark.parametrize("in_splits", [False, True])
def test_the_format_of_a_saved_data_set_does_not_matter(tmp_path, kind, columns, in_splits):
    content = {"text": ["a b", "c"], "words": [["a", "b"], ["c", "d"]], "n": [1, 2]}
    data = Dataset.from_dict(content).with_format(kind, columns=columns)
    (DatasetDict(train=data) if in_splits else data).save_to_disk(tmp_path)
    assert saved_splits(str(tmp_path), None)["train"].to_dict() == content
    for column in ("text", "words"):
        texts, _ = dataset_texts(TextArguments(dataset=str(tmp_path), text_column=column))
        assert list(texts()) == content[column]


def test_pyarrow_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"a"))
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    with refused(r'a.txt.zst needs pyarrow: pip install "modeling-elmo\[train\]"', ImportError):
        next(numbered_lines(tmp_path / "a.txt.zst"))


PARTS = ["train", "train[90%:]", "train[:95%]", "train[-10%:]", "train[50%:90%]", "train+test", "test[:1%]+train[:5%]"]
PARTS += ["test", "train[950:]", "train[:10]+test", "train[-10:]", "validation+test[5:]", "validation"]
PARTS += ["train[:10]+train[50%:]", "train[:90%]+test[:50]"]


@pytest.mark.parametrize(("held_out", "train"), [*itertools.permutations(PARTS, 2)])
def test_parts_that_overlap_with_training_data_are_refused(held_out, train):
    """Unless one counts rows and the other percents: then it depends on the size."""
    data = DatasetDict({name: Dataset.from_dict({"n": range(1000)}) for name in ("train", "validation", "test")})

    def rows(split):
        (part,) = ReadInstruction.from_spec(split).to_absolute(data.num_rows)
        return {(part.splitname, row) for row in range(part.from_, part.to)}

    pairs = [*itertools.product(held_out.split("+"), train.split("+"))]
    certain = [
        pair for pair in pairs if not ("[" in pair[0] and "[" in pair[1] and ("%" in pair[0]) != ("%" in pair[1]))
    ]
    overlaps = any(rows(ours) & rows(theirs) for ours, theirs in certain)
    is_refused = False
    try:
        refuse_training_data(held_out, "--validation_split", train, "--train_split")
    except ValueError as error:
        is_refused = True
        assert f"--validation_split {held_out} is also training data" in str(error)
    assert is_refused == overlaps
