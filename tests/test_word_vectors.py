"""Word vectors from files of GloVe, word2vec and fastText, and the embeddings that a task starts from."""

import gzip
import re

import numpy as np
import pytest
import zstandard

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.head import initial_embeddings, task_vocabulary
from modeling_elmo.run_scripts.vectors.word_vectors import WordVectors, read_word_vectors
from modeling_elmo.tokenization.elmo_characters import SPECIAL_WORDS

GLOVE = "the 0.5 -1 2e-3\n. . . 1 2 3\nNew York .25 0 -0.125 \n\u00a0 7 8 9\nthe 4 5 6\nRoute 66 1 1 1\n\n"
WORDS = ["the", ". . .", "New York", "\u00a0", "Route 66"]
VECTORS = np.array([[0.5, -1, 0.002], [1, 2, 3], [0.25, 0, -0.125], [7, 8, 9], [1, 1, 1]], np.float32)


@pytest.mark.parametrize("ending", ["txt", "vec.gz", "bin.zst"])
@pytest.mark.parametrize("header", ["", "6 3\n", "6 3 \r\n"])
def test_files(tmp_path, caplog, ending, header):
    packed = {"gz": gzip.compress, "zst": zstandard.compress}.get(ending[-3:].strip("."), bytes)
    path = tmp_path / f"a.{ending}"
    path.write_bytes(packed((header + GLOVE).encode()))
    words, vectors = read_word_vectors(path)
    assert words == WORDS and vectors.dtype == np.float32 and np.array_equal(vectors, VECTORS)
    (message,) = caplog.messages
    assert "1 lines repeat an earlier word and are ignored" in message
    assert re.search(r"first 'the' in lines \d and \d", message)
    words, vectors = read_word_vectors(str(path), limit=2)
    assert words == WORDS[:2] and np.array_equal(vectors, VECTORS[:2])
    assert read_word_vectors(path, limit=99).words == WORDS


def test_numbers_are_read_exactly(tmp_path):
    numbers = np.random.default_rng(0).standard_normal((150, 7)).astype(np.float32)
    lines = (f"word{row} " + " ".join(map(repr, map(float, vector))) for row, vector in enumerate(numbers))
    (tmp_path / "a.txt").write_text("\n".join(lines))
    words, vectors = read_word_vectors(tmp_path / "a.txt")
    assert words == [f"word{row}" for row in range(150)] and np.array_equal(vectors, numbers)


@pytest.mark.parametrize("text, width", [("5 3\n6 4\n", 1), ("2 1\n5 3\n6 4\n", 1), ("5 3 1\n", 2)])
def test_numbers_may_be_words(tmp_path, text, width):
    (tmp_path / "a.txt").write_text(text)
    words, vectors = read_word_vectors(tmp_path / "a.txt")
    assert words[0] == "5" and vectors.shape[1] == width and vectors[0, 0] == 3


@pytest.mark.parametrize(
    "text, message",
    [
        ("\n \n", "a.txt has no vectors"),
        ("the\t1\t2\n", "a.txt has no vectors"),
        ("a 1 2 3\nb 1 2 3\nc 1 2\n", "line 3 must have a word and 3 finite numbers, .*: 'c 1 2'"),
        ("a 1 2 3\nb 1 2 3\nc 0.5 1 2 3\n", "line 3 .*: 'c 0.5 1 2 3'"),
        ("a 1 2\nb 1  2\n", "line 2 .* with single spaces: 'b 1  2'"),
        ("a 1 2\n 1 2\n", "line 2"),
        ("a 1 2\nb 1e39 2\n", "line 2"),
        ("3 2\na 1 2\nb 1 2\n", "a.txt has 2 words, but its header promises 3. .* correct its header"),
        (f"2 {10**14}\na 1 2\nb 1 2\n", "line 2 must have a word and 100000000000000 finite"),
    ],
)
def test_bad_files(tmp_path, text, message):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_word_vectors(tmp_path / "a.txt")


def test_initial_embeddings():
    rng = np.random.default_rng(1)
    words = [*(f"word{row}" for row in range(998)), "london", "London"]
    vectors = WordVectors([*words, "</s>", "<unk>"], rng.normal(3, 4, (1002, 50)).astype(np.float32))
    unknown = [f"new{row}" for row in range(1000)]
    vocabulary = [*SPECIAL_WORDS, "London", "LONDON", "Word7", "word7", *unknown]
    lowercased = ELMoTokenizer(lowercase_unknown=True)
    start, found = initial_embeddings(vectors, vocabulary, seed=3, tokenizer=lowercased)
    assert start.shape == (1008, 50) and start.dtype == np.float32 and found == 5
    assert not start[0].any()
    np.testing.assert_allclose(start[3], vectors.vectors.mean(0), rtol=1e-5, atol=1e-6)
    for row, source in ((2, 1000), (4, 999), (5, 998), (6, 7), (7, 7)):
        assert np.array_equal(start[row], vectors.vectors[source])
    deviation = vectors.vectors.astype(np.float64).std()
    assert start[8:].std() == pytest.approx(deviation, rel=0.02) and abs(start[8:].mean()) < 0.05 * deviation
    assert np.unique(start[8:], axis=0).shape == (1000, 50)
    other, _ = initial_embeddings(vectors, vocabulary, seed=4, tokenizer=lowercased)
    assert np.array_equal(other[2:8], start[2:8]) and not np.array_equal(other[8:], start[8:])
    cased, found = initial_embeddings(vectors, vocabulary, seed=3, tokenizer=ELMoTokenizer())
    assert found == 2 and np.flatnonzero((cased != start).any(1)).tolist() == [2, 5, 6]


def test_vocabulary_of_a_task():
    sentences = [["b", "a", "c", "a"], ["<S>", "b", "d", "<S>", "<UNK>"], ["c", "e", "a", "<UNK>", "!!!MAXTERMID"] * 2]
    assert task_vocabulary(iter(sentences)) == ["a", "c", "b", "e"]
    assert task_vocabulary(sentences, min_count=1) == ["a", "c", "b", "e", "d"]
    extra = ["d", "</S>", "the", "a", "<PAD>", "the", "", "\ud800", "\U0010fffdx", "New York"]
    words = task_vocabulary(sentences, 3, extra)
    assert words == ["a", "c", "d", "the", "New York"]
    tokenizer = ELMoTokenizer().with_vocabulary([*SPECIAL_WORDS, *words])
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == [*SPECIAL_WORDS, *words]
