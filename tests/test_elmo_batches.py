"""Batches that are refused, and the lengths of truncated pairs. test_tokenization_elmo.py tests the encodings."""

import pickle
from itertools import product

import numpy as np
import pytest
from datasets import Dataset

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.program.command_line import is_mistake_of_user
from modeling_elmo.tokenization.elmo_characters import checked_sentences

GIVEN = {"is_split_into_words": True}


@pytest.fixture(scope="module")
def tokenizer() -> ELMoTokenizer:
    return ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", "the"])


@pytest.mark.parametrize(
    "sentences, message",
    [
        ("a text", "must be a list, got str: 'a text'; pass a list of texts, or of lists of words"),
        (b"a text", "must be a list, got bytes: b'a text'"),
        (None, "must be a list, got NoneType: None"),
        (3, "must be a list, got int: 3"),
        ({"text": ["a"]}, "must be a list, got dict"),
        ([None], "Sentence 0 is None; pass a list of texts, or of lists of words"),
        (["a", b"b"], "Sentence 1 is b'b'; pass"),
        (["a", {"b": 1}], "Sentence 1 is {'b': 1}; pass"),
        ([["a"], ["a", None]], "Sentence 1 has None; pass"),
        ([["one", 2]], "Sentence 0 has 2; pass"),
        ([[["a"]]], r"Sentence 0 has \['a'\]; pass"),
        (np.array([["a", "b"]])[None], "Sentence 0 has array"),
    ],
)
def test_other_things_than_sentences(sentences, message):
    with pytest.raises(TypeError, match=message):
        list(checked_sentences(sentences))


def test_sentences():
    texts, words = ["a b", ""], [["a", "b"], []]
    for given in (texts, tuple(texts), iter(texts), np.array(texts), Dataset.from_dict({"text": texts})["text"]):
        assert list(checked_sentences(given)) == texts
    for given in (words, map(tuple, words), [np.array(each, dtype=object) for each in words]):
        assert list(checked_sentences(given)) == words


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
        (("a",), {"padding_side": "top"}, ValueError, 'padding_side=\'top\'; pass "left" or "right"'),
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
        (
            (["a"],),
            {"truncation": "only_second", "max_length": 2, "return_overflowing_tokens": True},
            ValueError,
            "truncation='only_second' with max_length=2, but a text of 1 words has no second text to cut. Pass `text_p",
        ),
        (("a b",), {"truncation": "only_second", "max_length": 3}, ValueError, "a text of 2 words has no second text"),
        (("a",), {"stride": -1}, ValueError, "`stride` is -1; pass an integer of at least 0"),
        (("a",), {"max_length": 2.5, "truncation": True}, ValueError, "`max_length` is 2.5; pass an integer"),
        (("a",), {"pad_to_multiple_of": "8", "padding": True}, ValueError, "`pad_to_multiple_of` is '8'; pass"),
        (("a",), {"max_length": 10**20, "padding": "max_length"}, ValueError, "would be padded to 1000.* at most 167"),
        (("a",), {"pad_to_multiple_of": 10**20, "padding": True}, ValueError, "would be padded to 10000000000000"),
        (
            ("a",),
            {"truncation": True, "max_length": 40, "stride": 10**20, "return_overflowing_tokens": True},
            ValueError,
            "stride=100000000000000000000 must be smaller than the 38 words that max_length=40 leaves",
        ),
    ],
)
def test_bad_texts(tokenizer, arguments, options, error, message):
    with pytest.raises(error, match=message):
        tokenizer(*arguments, **options)
    assert tokenizer("the")["input_ids"] == [1, 4, 2]  # and the tokenizer still works


@pytest.mark.parametrize("strategy", ["longest_first", "only_first", "only_second"])
@pytest.mark.parametrize("stride", [0, 1, 2, 10**20])
@pytest.mark.parametrize("markers", [True, False])
def test_cut_texts_fit_or_say_why_not(strategy, stride, markers):
    tokenizer = ELMoTokenizer()
    options = {"truncation": strategy, "stride": stride, "add_special_tokens": markers, **GIVEN}
    for first, second, length in product(range(5), [None, *range(5)], range(12)):
        pair = None if second is None else [["y"] * second]
        for overflow in (False, True):
            try:
                encoded = tokenizer(
                    [["x"] * first], pair, **options, max_length=length, return_overflowing_tokens=overflow
                )
            except ValueError as error:
                assert f"max_length={length}" in str(error) and is_mistake_of_user(error)
            else:
                assert all(len(ids) <= length for ids in encoded["input_ids"])


@pytest.mark.parametrize("options", [{}, {"return_overflowing_tokens": True}])
def test_a_tokenizer_without_a_maximum_does_not_cut(tokenizer, options):
    length = tokenizer.model_max_length  # 10^30, more than the backend can count
    assert tokenizer(["the cat"], truncation=True, max_length=length, **options)["input_ids"] == [[1, 4, 3, 2]]


def test_later_settings_do_not_change_encodings():
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", "the"])
    texts, options = ["the cat", "a"], {"padding": True}
    lazy, computed = tokenizer(texts, **options), tokenizer(texts, **options, return_special_tokens_mask=True)
    tokenizer.padding_side = "left"
    tokenizer.add_tokens(["cat"])
    for place in range(2):
        assert lazy.word_ids(place) == computed.word_ids(place)
        assert lazy.tokens(place) == computed.tokens(place)
        assert lazy[place].ids == lazy["input_ids"][place]
    assert tokenizer(texts, **options).tokens(0) == ["<S>", "the", "cat", "</S>"]
    assert tokenizer(texts, **options).word_ids(1) == [None, None, 0, None]


def test_encodings_are_computed_on_first_use(tokenizer):
    lazy = tokenizer(["the cat", "a"])._encodings
    assert lazy.encodings is None and len(lazy) == 2
    assert [encoding.word_ids for encoding in lazy] == [[None, 0, 1, None], [None, 0, None]]
    assert [encoding.ids for encoding in pickle.loads(pickle.dumps(lazy))] == [[1, 4, 3, 2], [1, 3, 2]]
