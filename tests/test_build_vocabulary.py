import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts import build_vocabulary
from modeling_elmo.run_scripts.build_vocabulary import main

TEXT = Path(__file__).parent / "fixtures" / "text"
LINES = [line for name in ("en.txt", "ko.txt") for line in (TEXT / name).read_text(encoding="utf-8").splitlines()]
COUNTS = Counter(word for line in LINES for word in line.split())
ROOT = Path(__file__).parents[1]
WORDS = ("--is_split_into_words", "--train_file")


def build(output: Path, *options) -> build_vocabulary.VocabularyReport:
    return main(["--output", str(output), *map(str, options)])


def words_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_counts_over_files_of_every_kind(tmp_path, capsys):
    third = len(LINES) // 3
    parts = [LINES[:third], LINES[third : 2 * third], LINES[2 * third :]]
    (tmp_path / "a.txt").write_text("\n".join(parts[0]), encoding="utf-8")
    with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(parts[1]))
    records = [{"words": line.split()} if number % 2 else {"words": line} for number, line in enumerate(parts[2])]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    inputs = [tmp_path / name for name in ("a.txt", "b.txt.gz", "c.jsonl")]
    report = build(tmp_path / "vocab.txt", *WORDS, *inputs, "--text_column", "words", "--max_word_length", 12)

    expected = sorted(COUNTS, key=lambda word: (-COUNTS[word], word))
    assert words_of(tmp_path / "vocab.txt") == ["<S>", "</S>", "<UNK>", *expected]
    cut = {word for word in COUNTS if len(word.encode()) > 10}
    assert report.texts == len(LINES)
    assert report.words == COUNTS.total()
    assert report.distinct_words == len(COUNTS) == report.vocab_size - 4
    assert report.coverage == 1.0
    assert report.cut_distinct_words == len(cut) > 100
    assert report.cut_share == pytest.approx(sum(COUNTS[word] for word in cut) / COUNTS.total())
    printed = capsys.readouterr().out
    assert f"{COUNTS.total():,} words in {len(LINES):,} texts" in printed
    assert "which covers 100.00% of the text" in printed


def test_size_frequency_and_coverage(tmp_path):
    report = build(tmp_path / "vocab.txt", *WORDS, TEXT / "en.txt", TEXT / "ko.txt", "--vocabulary_size", 104)
    words = words_of(tmp_path / "vocab.txt")
    assert len(words) == 103 and report.vocab_size == 104
    assert report.coverage == pytest.approx(sum(count for _, count in COUNTS.most_common(100)) / COUNTS.total())
    build(tmp_path / "vocab.txt", *WORDS, TEXT / "en.txt", TEXT / "ko.txt", "--min_frequency", 5, "--overwrite")
    assert set(words_of(tmp_path / "vocab.txt")[3:]) == {word for word, count in COUNTS.items() if count >= 5}


@pytest.mark.parametrize("options", [{}, {"pre_tokenization": "treebank"}], ids=["default", "treebank"])
def test_the_tokenizer_knows_the_words_that_the_report_covers(tmp_path, options):
    flags = [flag for name, value in options.items() for flag in (f"--{name}", value)]
    report = build(tmp_path / "vocab.txt", "--train_file", TEXT / "en_raw.txt", "--vocabulary_size", 500, *flags)
    tokenizer = ELMoTokenizer(vocab_file=tmp_path / "vocab.txt", **options)
    ids = tokenizer((TEXT / "en_raw.txt").read_text(encoding="utf-8").splitlines(), add_special_tokens=False)
    ids = [index for text in ids["input_ids"] for index in text]
    assert len(tokenizer) == 500
    assert len(ids) == report.words
    assert 1 - ids.count(3) / len(ids) == pytest.approx(report.coverage)


def test_cut_words_of_a_lexicon_are_counted_in_characters(tmp_path):
    (tmp_path / "text.txt").write_text("밥밥밥밥 밥 abcde", encoding="utf-8")
    inputs = ["--train_file", tmp_path / "text.txt", "--max_word_length", 6, "--overwrite"]
    assert build(tmp_path / "vocab.txt", *inputs).cut_distinct_words == 2
    assert build(tmp_path / "vocab.txt", *inputs, "--alphabet", "lexicon").cut_distinct_words == 1


@pytest.mark.parametrize("in_splits", [False, True])
def test_data_sets(tmp_path, in_splits):
    data = Dataset.from_dict({"tokens": [["a", "b c", "", "x\ny", " d"], ["a"]]})
    (DatasetDict({"dev": data}) if in_splits else data).save_to_disk(tmp_path / "data")
    options = ["--dataset", tmp_path / "data", "--text_column", "tokens"]
    if in_splits:
        options += ["--split", "dev"]
    else:
        with pytest.raises(ValueError, match="is a single set without splits. Leave out the split 'dev'"):
            build(tmp_path / "vocab.txt", *options, "--split", "dev")
    assert build(tmp_path / "vocab.txt", *options).texts == 2
    assert words_of(tmp_path / "vocab.txt")[3:] == ["a", "b c"]
    assert len(ELMoTokenizer(vocab_file=tmp_path / "vocab.txt")) == 6


def test_streamed_data_set(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "the cat"}\n{"text": "the"}\n', encoding="utf-8")
    build(tmp_path / "vocab.txt", "--dataset", tmp_path / "data", "--streaming")
    assert words_of(tmp_path / "vocab.txt")[3:] == ["the", "cat"]


def test_a_failed_run_leaves_the_old_file_alone(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("new words", encoding="utf-8")
    output = tmp_path / "vocab.txt"
    output.write_text("old", encoding="utf-8")

    def interrupted(path, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(output, "--train_file", tmp_path / "text.txt", "--overwrite")
    assert output.read_text(encoding="utf-8") == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "vocab.txt"]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ([], ValueError, "Pass either --train_file FILE ..., or --dataset NAME"),
        (["--train_file", "{text}", "--dataset", "x"], ValueError, "Pass either --train_file"),
        (
            ["--train_file", "{text}", "no.txt"],
            FileNotFoundError,
            "no.txt: no file has this name. Pass files",
        ),
        (
            ["--train_file", "{text}", "--vocabulary_size", "4"],
            ValueError,
            "--vocabulary_size 4: pass more than the 4 special words",
        ),
        (["--train_file", "{text}", "--min_frequency", "0"], ValueError, "--min_frequency 0 must be at least 1"),
        (["--train_file", "{text}", "--max_word_length", "2"], ValueError, "--max_word_length 2 at least 3"),
        (["--train_file", "{blank}"], ValueError, "There is no sentence in .*blank.txt: nothing but blank lines"),
        (["--dataset", "{data}"], ValueError, r"has no column 'text' but \['tokens'\]; pass --text_column"),
        (["--dataset", "{splits}"], ValueError, r"has no split 'train' but \['dev'\]; pass --split"),
    ],
)
def test_bad_input(tmp_path, options, error, message):
    (tmp_path / "text.txt").write_text("a", encoding="utf-8")
    (tmp_path / "blank.txt").write_text("\n \n", encoding="utf-8")
    data = Dataset.from_dict({"tokens": [["a"]]})
    data.save_to_disk(tmp_path / "data")
    DatasetDict({"dev": data}).save_to_disk(tmp_path / "splits")
    names = {"text": "text.txt", "blank": "blank.txt", "data": "data", "splits": "splits"}
    paths = {name: tmp_path / file for name, file in names.items()}
    with pytest.raises(error, match=message):
        build(tmp_path / "vocab.txt", *(option.format(**paths) for option in options))
    assert not (tmp_path / "vocab.txt").exists()


def test_an_existing_file_is_not_replaced_unasked(tmp_path):
    (tmp_path / "vocab.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match="vocab.txt exists; pass --overwrite to replace it"):
        build(tmp_path / "vocab.txt", *WORDS, TEXT / "en.txt")
    assert words_of(tmp_path / "vocab.txt") == ["mine"]


def test_as_a_program(tmp_path):
    command = [sys.executable, ROOT / "run_scripts" / "build_vocabulary.py", *WORDS, TEXT / "en.txt"]
    done = subprocess.run(
        [*command, "--output", "vocab.txt"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "250 texts" in done.stdout
    assert "counting" in done.stderr
    assert words_of(tmp_path / "vocab.txt")[:5] == ["<S>", "</S>", "<UNK>", "the", ","]
