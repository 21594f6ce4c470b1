"""Batches that are refused, and the lengths of truncated pairs. test_tokenization_elmo.py tests the encodings."""

import pickle
from itertools import product

import pytest

from modeling_elmo import ELMoTokenizer

GIVEN = {"is_split_into_words": True}


@pytest.fixture(scope="module")
def tokenizer() -> ELMoTokenizer:
    return ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", "the"])


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        ((3,), {}, TypeError, "A text must be a string, got int: 3"),
        ((["a", None],), {}, TypeError, "got NoneType: None"),
        (([["a", "b", "c"]],), {}, TypeError, "lists of words with is_split_into_words=True"),
        (("a b",), GIVEN, TypeError, "A text must be a list of words, got str: 'a b'"),
        ((["a", 3],), GIVEN, TypeError, "Words must be strings, got int: 3"),
        (([["a"], "b"],), GIVEN, TypeError, "a list of words, got str: 'b'"),
        (([["a", ["b"]]],), GIVEN, TypeError, r"Words must be strings, got list: \['b'\]"),
        (
            (["a", "b"], ["c"]),
            {},
            ValueError,
            "A batch of 2 texts needs .* same length; got list of length 1",
        ),
        ((["a", "b"], "c"), {}, ValueError, "needs a `text_pair` of the same length; got str"),
        (("a",), {"split_special_tokens": False}, ValueError, "literal_markers=True"),
        (("a b",), {"truncation": True, "max_length": 1}, ValueError, "max_length=1 has no room for 2 markers"),
        (
            ("a b c",),
            {"truncation": True, "max_length": 4, "stride": 2},
            ValueError,
            "stride=2 must be smaller than the 2 words that max_length=4 leaves",
        ),
        (
            ("a", "a b c"),
            {"truncation": "only_second", "max_length": 6, "stride": 1},
            ValueError,
            "stride=1 must be smaller than the 1 words that max_length=6 leaves",
        ),
    ],
)
def test_bad_texts(tokenizer, arguments, options, error, message):
    with pytest.raises(error, match=message):
        tokenizer(*arguments, **options)
    assert tokenizer("the")["input_ids"] == [1, 4, 2]  # and the tokenizer still works


@pytest.mark.parametrize("strategy", ["longest_first", "only_first", "only_second"])
@pytest.mark.parametrize("stride", [0, 1, 2])
def test_cut_pairs_fit_or_say_why_not(strategy, stride):
    tokenizer = ELMoTokenizer()
    for first, second, length in product(range(5), range(5), range(4, 12)):
        options = {"truncation": strategy, "max_length": length, "stride": stride, "return_overflowing_tokens": True}
        try:
            encoded = tokenizer([["x"] * first], [["y"] * second], is_split_into_words=True, **options)
        except ValueError as error:
            assert f"max_length={length} leaves" in str(error)
        else:
            assert all(len(ids) <= length for ids in encoded["input_ids"])


def test_encodings_are_computed_on_first_use(tokenizer):
    lazy = tokenizer(["the cat", "a"])._encodings
    assert lazy.encodings is None and len(lazy) == 2
    assert [encoding.word_ids for encoding in lazy] == [[None, 0, 1, None], [None, 0, None]]
    assert [encoding.ids for encoding in pickle.loads(pickle.dumps(lazy))] == [[1, 4, 3, 2], [1, 3, 2]]
