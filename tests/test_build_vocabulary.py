import json
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from endings import conclusion
from errors import refused
from places import TEXT
from pretraining_worker import arguments_of

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.build_vocabulary import main

LINES = [line for name in ("en.txt", "ko.txt") for line in (TEXT / name).read_text("utf-8").splitlines()]
COUNTS = Counter(word for line in LINES for word in line.split())
BOTH = ("--is_split_into_words", "--train_file", TEXT / "en.txt", TEXT / "ko.txt")


@pytest.fixture
def vocab(tmp_path):
    """The file of the vocabulary."""
    return tmp_path / "vocab.txt"


def build(output, *options):
    return main(["--output", str(output), *map(str, options)])


def words_of(path):
    return path.read_text("utf-8").splitlines()


def test_counts(vocab, capsys):
    report = build(vocab, *BOTH, "--max_word_length", 12)
    expected = sorted(COUNTS, key=lambda word: (-COUNTS[word], word))
    assert words_of(vocab) == ["<S>", "</S>", "<UNK>", *expected]
    cut = {word for word in COUNTS if len(word.encode()) > 10}
    assert report["texts"] == len(LINES)
    assert report["words"] == COUNTS.total()
    assert report["distinct_words"] == len(COUNTS) == report["vocab_size"] - 4
    assert report["coverage"] == 1.0
    assert report["cut_distinct_words"] == len(cut) > 100
    assert report["cut_share"] == pytest.approx(sum(COUNTS[word] for word in cut) / COUNTS.total())
    printed = capsys.readouterr().out
    assert f"{COUNTS.total():,} words in {len(LINES):,} texts" in printed
    share = f"{1 - report['coverage']:.2%} of the words as <UNK>.\nNext: elmo pretrain --vocabulary_file"
    assert share in printed


def test_size_frequency_and_coverage(vocab):
    report = build(vocab, *BOTH, "--vocabulary_size", 104)
    words = words_of(vocab)
    assert len(words) == 103 and report["vocab_size"] == 104
    assert report["coverage"] == pytest.approx(sum(count for _, count in COUNTS.most_common(100)) / COUNTS.total())
    build(vocab, *BOTH, "--min_frequency", 5, "--overwrite")
    assert set(words_of(vocab)[3:]) == {word for word, count in COUNTS.items() if count >= 5}


@pytest.mark.parametrize("options", [{}, {"pre_tokenization": "treebank"}], ids=["default", "treebank"])
def test_the_tokenizer_knows_the_words_that_the_report_covers(vocab, options, capsys):
    flags = arguments_of(options)
    report = build(vocab, "--train_file", TEXT / "en_raw.txt", "--vocabulary_size", 500, *flags)
    _, following = conclusion(capsys.readouterr().out)
    of_text = ["--train_file", str(TEXT / "en_raw.txt"), *flags]
    assert following == ["elmo", "pretrain", "--vocabulary_file", str(vocab), *of_text, "--output_dir", "bilm"]
    tokenizer = ELMoTokenizer(vocab_file=vocab, **options)
    ids = tokenizer((TEXT / "en_raw.txt").read_text("utf-8").splitlines(), add_special_tokens=False)
    ids = [index for text in ids["input_ids"] for index in text]
    assert len(tokenizer) == 500
    assert len(ids) == report["words"]
    assert 1 - ids.count(3) / len(ids) == pytest.approx(report["coverage"])


def test_cut_words_of_a_lexicon_are_counted_in_characters(vocab, tmp_path):
    (tmp_path / "text.txt").write_text("밥밥밥밥 밥 abcde", "utf-8")
    inputs = ["--train_file", tmp_path / "text.txt", "--max_word_length", 6, "--overwrite"]
    assert build(vocab, *inputs)["cut_distinct_words"] == 2
    assert build(vocab, *inputs, "--alphabet", "lexicon")["cut_distinct_words"] == 1


@pytest.mark.parametrize("kind", ["single", "in splits", "streamed"])
def test_data_sets(vocab, tmp_path, kind):
    data = Dataset.from_dict({"tokens": [["a", "b c", "", "x\ny", " d"], ["a"]]})
    options = ["--dataset", tmp_path / "data", "--text_column", "tokens"]
    if kind == "streamed":
        data.to_json(tmp_path / "data" / "train.jsonl")
        options += ["--streaming"]
    elif kind == "in splits":
        DatasetDict({"dev": data}).save_to_disk(tmp_path / "data")
        options += ["--split", "dev"]
    else:
        data.save_to_disk(tmp_path / "data")
    assert build(vocab, *options)["texts"] == 2
    assert words_of(vocab)[3:] == ["a", "b c"]
    assert len(ELMoTokenizer(vocab_file=vocab)) == 6


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "--train_file FILE"),
        (["--train_file", "text.txt", "--vocabulary_size", "4"], "--vocabulary_size 4"),
        (["--train_file", "text.txt", "--min_frequency", "0"], "--min_frequency 0"),
        (["--train_file", "blank.txt"], "no sentence in blank.txt"),
        (["--train_file", "text.txt", "--output", "mine.txt"], "mine.txt exists; pass --overwrite"),
        (["--train_file", "*t.txt", "--output", "text.txt", "--overwrite"], "would replace .*t.txt"),
        (["--dataset", "data"], r"no column 'text' but \['tokens'\]; pass --text_column"),
        (["--dataset", "data", "--split", "dev"], r"--split dev: .*'train'"),
    ],
)
def test_bad_input(vocab, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    for name, text in (("text.txt", "a"), ("blank.txt", "\n \n"), ("mine.txt", "mine")):
        Path(name).write_text(text, "utf-8")
    Dataset.from_dict({"tokens": [["a"]]}).save_to_disk("data")
    with refused(message, (ValueError, OSError)):
        build(Path("vocab.txt"), *options)
    assert not Path("vocab.txt").exists() and Path("mine.txt").read_text("utf-8") == "mine"


def test_words_that_do_not_fit_in_a_line_are_counted_as_unknown(vocab, tmp_path):
    """But a text with no other words raises an error."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": ["a", "", "x\ny", "b"]}), "utf-8")
    report = build(vocab, "--train_file", tmp_path / "a.jsonl")
    assert (report["words"], report["coverage"], report["vocab_size"]) == (4, 0.5, 6)
    (tmp_path / "b.txt").write_text("\x01", "utf-8")
    with refused("no word in .*b.txt"):
        build(tmp_path / "b.vocab.txt", "--train_file", tmp_path / "b.txt")
