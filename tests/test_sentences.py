"""Sentences of running text: joined lines against the text before it was wrapped, and what is told of wrapped lines."""

import gzip
import json
import random
import textwrap
from itertools import chain
from pathlib import Path

import pytest
from places import TEXT
from task_worker import bilm

from modeling_elmo.run_scripts import build_vocabulary, embed, nearest_neighbors
from modeling_elmo.run_scripts.pretraining.corpus import Corpus, CorpusArguments
from modeling_elmo.run_scripts.program import sentences
from modeling_elmo.run_scripts.program.sentences import sentences_of, text_sentences, wrapped_width

RAW = (TEXT / "en_raw.txt").read_text("utf-8").splitlines()
# The splitter must know that Mr. ends no sentence.
SENTENCES = [f"The word {number} is here, and Mr. Smith reads it with {number + 1} friends." for number in range(40)]
pytest.importorskip("sentencex")


def paragraphs(seed: int) -> list[list[str]]:
    draw, found, place = random.Random(seed), [], 0
    while place < len(SENTENCES):
        count = draw.randint(1, 6)
        found.append(SENTENCES[place : place + count])
        place += count
    return found


@pytest.mark.parametrize("width", [30, 60, 72, 500])
@pytest.mark.parametrize("at_once", [150, 1000, sentences.SPLIT_AT_ONCE])
def test_wrapped_paragraphs_and_back(tmp_path, monkeypatch, width, at_once):
    monkeypatch.setattr(sentences, "SPLIT_AT_ONCE", at_once)
    lines = []
    for paragraph in paragraphs(width):
        lines += ["", *textwrap.wrap(" ".join(paragraph), width)]
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    found = list(text_sentences(path, "text", "en"))
    assert [sentence for _, sentence in found] == SENTENCES
    for number, sentence in found:  # the line in which it begins
        start = lines[number - 1]
        assert any(start.endswith(sentence[:size]) or sentence[:size] in start for size in (3, len(start)))


def test_each_record_is_a_text_of_its_own(tmp_path):
    rows = [(2, "One goes\non. Two begins\n\nand ends"), (3, ["given", "words"]), (4, "here. Three"), (5, "\n")]
    expected = [(2, "One goes on."), (2, "Two begins"), (2, "and ends"), (3, ["given", "words"])]
    assert list(sentences_of(rows, "en", are_lines=False)) == [*expected, (4, "here."), (4, "Three")]
    as_lines = [(1, "One goes"), (2, "on. Two"), (3, "  "), (4, "and ends"), (5, ["given"]), (6, "here.")]
    expected = [(1, "One goes on."), (2, "Two"), (4, "and ends"), (5, ["given"]), (6, "here.")]
    assert list(sentences_of(as_lines, "en", are_lines=True)) == expected
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for _, text in rows))
    assert list(text_sentences(path, "text", "en"))[3:] == [(2, ["given", "words"]), (3, "here."), (3, "Three")]


def test_the_language_has_its_abbreviations():
    text = [(1, "Er hat z.B. Brot. Sie kommt.")]
    assert [each for _, each in sentences_of(text, "de", are_lines=True)] == ["Er hat z.B. Brot.", "Sie kommt."]


@pytest.mark.parametrize("space", "\u00a0\u202f\u3000\u2009\u2003\u0085\u2028")
@pytest.mark.parametrize("language", ["en", "de", "ja", "zh", "ko"])
def test_wide_spaces(space, language):
    text = f"It was I{space}. Then he left{space}Vitamin C{space}."
    found = [each for _, each in sentences_of([(1, text)], language, are_lines=True)]
    assert " ".join(found).split() == text.split()


@pytest.mark.parametrize(
    "language, lines, expected",
    [
        ("zh", ["今天天气很", "好。我们去公", "园玩。"], [(1, "今天天气很好。"), (2, "我们去公园玩。")]),
        ("ja", ["これは", "本です。それは", "ペンだ。"], [(1, "これは本です。"), (2, "それはペンだ。")]),
        ("ko", ["나는 학교에", "갔다. 在 China", "中国。"], [(1, "나는 학교에 갔다."), (2, "在 China 中国。")]),
    ],
)
def test_chinese_and_japanese_lines_are_joined_without_a_space(language, lines, expected):
    assert list(sentences_of(enumerate(lines, 1), language, are_lines=True)) == expected


def test_a_text_without_ends_is_read_in_pieces(monkeypatch):
    monkeypatch.setattr(sentences, "SPLIT_AT_ONCE", 50)
    found = list(sentences_of(((number, "no end of it") for number in range(100)), "en", are_lines=True))
    assert len(found) == 20 and " ".join(text for _, text in found) == " ".join(["no end of it"] * 100)


@pytest.mark.parametrize("width", [60, 72, 80, 100])
@pytest.mark.parametrize("name", ["en_raw.txt", "inaugural_heldout.txt", "ko.txt"])
def test_wrapped_lines_are_recognized_and_sentences_are_not(name, width):
    lines = (TEXT / name).read_text("utf-8").splitlines()
    assert wrapped_width([line for line in lines if line.strip()]) is None
    whole = [
        line for place in range(0, len(lines), 4) for line in textwrap.wrap(" ".join(lines[place : place + 4]), width)
    ]
    assert width - 5 <= wrapped_width(whole) <= width
    assert wrapped_width(whole[:9]) is None  # too few to tell


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return bilm(tmp_path_factory.mktemp("model") / "bilm", pre_tokenization="treebank")


@pytest.fixture
def wrapped(tmp_path) -> Path:
    path = tmp_path / "wrapped.txt"
    paragraphs_of_raw_text = (" ".join(RAW[place : place + 5]) for place in range(0, len(RAW), 5))
    path.write_text("\n\n".join(textwrap.fill(each, 60) for each in paragraphs_of_raw_text) + "\n")
    return path


def programs(folder: Path, path: Path, output: Path) -> dict[str, tuple]:
    """Programs that read text, and their arguments."""
    return {
        "embed": (embed.main, ["--model", folder, "--input", path, "--output", output / "a.hdf5", "--raw_text"]),
        "neighbors": (nearest_neighbors.main, [path, "--word", "the", "--model", folder, "--raw_text"]),
        "vocabulary": (build_vocabulary.main, ["--train_file", path, "--output", output / "vocab.txt"]),
        "groups": (
            nearest_neighbors.main,
            [path, TEXT / "en_raw.txt", "--word", "the", "--model", folder, "--group_by", "file", "--min_uses", 2],
        ),
    }


@pytest.mark.parametrize("name", ["embed", "neighbors", "vocabulary", "groups"])
def test_programs_warn_of_wrapped_lines_and_split(folder, wrapped, tmp_path, warnings_of_transformers, name):
    main, arguments = programs(folder, wrapped, tmp_path)[name]
    main([*map(str, arguments)])
    (message,) = [each for each in warnings_of_transformers.messages if "wrapped" in each]
    assert message.startswith(f"{wrapped}: the lines seem to be wrapped at 60 characters")
    assert "Pass --split_sentences" in message
    warnings_of_transformers.clear()
    (tmp_path / "more").mkdir()
    main, arguments = programs(folder, wrapped, tmp_path / "more")[name]
    main([*map(str, arguments), "--split_sentences"])
    assert "wrapped" not in warnings_of_transformers.text


def test_corpora_of_files_and_data_sets(tmp_path):
    from datasets import Dataset

    wrapped = tmp_path / "a.txt"
    wrapped.write_text("\n\n".join(textwrap.fill(" ".join(each), 60) for each in paragraphs(0)))
    whole = Corpus.from_arguments(CorpusArguments(train_file=[str(wrapped)], split_sentences="en"))
    assert list(whole.texts()) == SENTENCES
    assert "sentences by the rules of en" in whole.order and whole.order != Corpus.from_files([str(wrapped)]).order
    part = whole.part("train[:25%]", "--split")
    assert list(part.texts()) == SENTENCES[:10]
    Dataset.from_dict({"text": [" ".join(each) for each in paragraphs(1)]}).save_to_disk(tmp_path / "data")
    rows = Corpus.from_arguments(CorpusArguments(dataset=str(tmp_path / "data"), split_sentences="en"))
    assert list(rows.texts()) == list(chain.from_iterable(paragraphs(1)))


def test_a_file_in_place_of_a_language():
    with pytest.raises(
        ValueError, match=r"--split_sentences a.txt: the value is the code of a language, such as en or de"
    ):
        Corpus.from_files([__file__], language="a.txt")
