import copy
import json
import pickle
import re
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.fingerprint import Hasher
from errors import refused
from hypothesis import given
from hypothesis import strategies as st
from places import TEXT
from tokenizers import AddedToken
from transformers import AutoTokenizer, DataCollatorForTokenClassification
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator

from modeling_elmo import ELMoConfig, ELMoTokenizer
from modeling_elmo.run_scripts.program.command_line import is_mistake_of_user
from modeling_elmo.tokenization.elmo_pretokenization import plain_word

SENTENCES = [line.split() for name in ("en.txt", "ko.txt") for line in (TEXT / name).read_text("utf-8").splitlines()]
VOCABULARY = ["</S>", "the", "!!!MAXTERMID", ",", ".", "<UNK>", "of", "밥", "(", ")", "London", "a b", "<S>"]
SPECIAL_LOOK_ALIKES = ["<S>", "</S>", "<UNK>", "<PAD>", "x<S>", "", " ", "a b", "\ud800", "\U0010fffd", "\U0010fffcS>"]
WORD = st.text(alphabet=st.characters()) | st.sampled_from([*SPECIAL_LOOK_ALIKES, *VOCABULARY])  # with lone surrogates
WORDS = st.lists(WORD)
RAW = WORDS.map(" ".join)
GIVEN = {"is_split_into_words": True}
BACKEND = {"return_offsets_mapping": True}  # which our own code does not compute


@pytest.fixture(scope="module")
def tokenizer() -> ELMoTokenizer:
    return ELMoTokenizer(vocab=VOCABULARY)


@pytest.fixture(params=["moses", "treebank", "whitespace", "lowercase_unknown", "plain_signs"], scope="module")
def any_tokenizer(request) -> ELMoTokenizer:
    is_option = request.param in ("lowercase_unknown", "plain_signs")
    options = {request.param: True} if is_option else {"pre_tokenization": request.param}
    return ELMoTokenizer(vocab=VOCABULARY, max_word_length=12, **options)


def row(word: str, width: int = 50) -> list[int]:
    """The definition of a row, independent of the tokenizer."""
    data = word.encode("utf-8", "ignore")[: width - 2]
    return [259, *(byte + 1 for byte in data), 260] + [261] * (width - 2 - len(data))


BOS, EOS = [259, 257, 260] + [261] * 47, [259, 258, 260] + [261] * 47
LEXICON = {"<bos>": 0, "<eos>": 1, "<oov>": 2, "<pad>": 3, "<bow>": 4, "<eow>": 5, "a": 6, "밥": 7}


def equal(left, right) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[key], right[key]) for key in left)


# One text


def test_raw_text(tokenizer):
    encoded = tokenizer("The Londoners didn't, in the U.S. of (London).", return_tensors="pt")
    words = ["The", "Londoners", "didn", "'t", ",", "in", "the", "U.S.", "of", "(", "London", ")", "."]
    assert encoded["input_ids"].tolist() == [[1, 3, 3, 3, 3, 5, 3, 4, 3, 7, 9, 11, 10, 6, 2]]
    assert encoded["character_ids"].tolist() == [[BOS, *map(row, words), EOS]]
    assert encoded["character_ids"].shape == (1, 15, 50)
    assert encoded["attention_mask"].tolist() == [[1] * 15]
    assert {value.dtype for value in encoded.values()} == {torch.int64}
    assert list(encoded) == ["input_ids", "attention_mask", "character_ids"]


def test_without_tensors_a_small_array_per_text(tokenizer):
    encoded = tokenizer("the cat")
    assert encoded["input_ids"] == [1, 4, 3, 2]
    assert encoded["character_ids"].dtype == np.int16
    assert encoded["character_ids"].tolist() == [BOS[:5], row("the", 5), row("cat", 5), EOS[:5]]
    assert [text.shape for text in tokenizer(["the cat", "a"])["character_ids"]] == [(4, 5), (3, 3)]


def test_given_words_are_one_token_each(tokenizer):
    words = ["the", "", "a b", "<S>", "</S>", "<UNK>", "<PAD>", "a\ud800", "\U0010fffdx", "x" * 10_000, "밥", "can't."]
    encoded = tokenizer(words, **GIVEN, return_tensors="np")
    assert encoded["input_ids"].tolist() == [[1, 4, 3, 12, 3, 3, 3, 3, 3, 3, 3, 8, 3, 2]]
    assert encoded["character_ids"][0, 1:-1].tolist() == list(map(row, words))
    assert encoded.word_ids(0) == [None, *range(12), None]
    assert encoded.tokens(0)[1:5] == ["the", "<UNK>", "a b", "<UNK>"]


def test_literal_markers():
    tokenizer = ELMoTokenizer(vocab=VOCABULARY, literal_markers=True, pre_tokenization="whitespace")
    for encoded in (tokenizer(["<S>", "a", "</S>", "<PAD>"], **GIVEN), tokenizer("<S> a </S> <PAD>")):
        assert encoded["input_ids"] == [1, 1, 3, 2, 3, 2] == encoded.encodings[0].ids
        rows = encoded["character_ids"].tolist()
        assert rows == [BOS[:7], BOS[:7], row("a", 7), EOS[:7], row("<PAD>", 7), EOS[:7]]


@pytest.mark.parametrize("cut, ids", [(True, [13, 13, 13]), (False, [13, 14, 3])])
def test_long_words_are_cut_before_the_look_up(cut, ids):
    vocabulary = [*VOCABULARY, "chess", "chessboard"]
    tokenizer = ELMoTokenizer(vocab=vocabulary, max_word_length=7, cut_before_lookup=cut)
    for options in ({}, BACKEND):
        encoded = tokenizer(["chess", "chessboard", "chessmen"], **GIVEN, **options)
        assert encoded["input_ids"] == [1, *ids, 2] == encoded.encodings[0].ids


def test_words_with_lone_surrogates_are_unknown():
    """Also beside the word that the backend reads in their place."""
    tokenizer = ELMoTokenizer(vocab=[*VOCABULARY, "a\ufffd"])
    for options in ({}, BACKEND):
        assert tokenizer(["a\ud800", "a\ufffd"], **GIVEN, **options)["input_ids"] == [1, 3, 13, 2]


def test_a_vocabulary_of_nothing_but_special_words():
    tokenizer = ELMoTokenizer()
    assert tokenizer.get_vocab() == {"<PAD>": 0, "<S>": 1, "</S>": 2, "<UNK>": 3}
    assert tokenizer("Hello there")["input_ids"] == [1, 3, 3, 2] and tokenizer.char_vocab_size == 262
    ids = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id
    assert ids == (0, 1, 2, 3)


def test_no_words_and_no_texts(tokenizer):
    for text, options in (("", {}), (" \n", {}), ([], GIVEN)):
        encoded = tokenizer(text, **options)
        assert encoded["input_ids"] == [1, 2]
        assert encoded["character_ids"].tolist() == [BOS[:3], EOS[:3]]
    assert tokenizer("", add_special_tokens=False)["character_ids"].shape == (0, 0)
    assert dict(tokenizer([])) == {"input_ids": [], "attention_mask": [], "character_ids": []}
    assert tokenizer([], return_tensors="pt")["character_ids"].shape == (0, 0, 50)


# Batches


@pytest.mark.filterwarnings("ignore:`max_length` is ignored when `padding`=`True`")
@given(batch=st.lists(RAW | st.tuples(RAW, RAW), min_size=1, max_size=4), data=st.data())
def test_numpy_and_the_backend_encode_alike(any_tokenizer, batch, data):
    """Every key is equal, so that other tests of batches may use either."""
    if data.draw(st.booleans(), label="given words"):
        batch = [tuple(part.split(" ") for part in ([text] if isinstance(text, str) else text)) for text in batch]
        batch = [text[0] if len(text) == 1 else text for text in batch]
        kind = GIVEN
    else:
        kind = {}
    options = data.draw(
        st.fixed_dictionaries(
            {"add_special_tokens": st.booleans(), "padding": st.sampled_from([False, True, "max_length"])},
            optional={
                "padding_side": st.sampled_from(["left", "right"]),
                "pad_to_multiple_of": st.sampled_from([3, 8]),
                "max_length": st.integers(1, 40),
                "return_token_type_ids": st.booleans(),
                "return_attention_mask": st.booleans(),
            },
        )
    )
    options |= kind | {"truncation": False}
    fast = any_tokenizer(batch, **options)
    slow = any_tokenizer(batch, **options, return_length=True)
    slow.pop("length")
    characters, expected = fast.pop("character_ids"), slow.pop("character_ids")
    assert dict(fast) == dict(slow)
    assert all(map(np.array_equal, characters, expected))
    for row, (encoding, ids) in enumerate(zip(fast.encodings, fast["input_ids"], strict=True)):
        assert encoding.ids == slow.encodings[row].ids == ids
        assert fast.tokens(row) == slow.tokens(row) == any_tokenizer.convert_ids_to_tokens(ids)


@given(words=WORDS)
def test_given_words_keep_their_number_place_and_characters(tokenizer, words):
    encoded = tokenizer(words, **GIVEN, return_offsets_mapping=True, return_special_tokens_mask=True)
    assert len(encoded.tokens()) == len(words) + 2
    assert {len(value) for value in encoded.values()} == {len(words) + 2}
    assert encoded.word_ids() == [None, *range(len(words)), None]
    assert encoded["special_tokens_mask"] == [1, *[0] * len(words), 1]
    assert encoded["offset_mapping"] == [(0, 0), *((0, len(word)) for word in words), (0, 0)]
    cut = [word.encode("utf-8", "ignore")[:48].decode("utf-8", "ignore") for word in words]
    assert tokenizer.decode_characters(encoded["character_ids"]) == ["<S>", *cut, "</S>"]


@given(text=RAW)
def test_offsets_of_raw_text(any_tokenizer, text):
    encoded = any_tokenizer(text, return_offsets_mapping=True)
    words = [text[start:end] for start, end in encoded["offset_mapping"][1:-1]]
    assert words == any_tokenizer.splitter.words(text)
    decoded = any_tokenizer.decode_characters(encoded["character_ids"], skip_special_tokens=True)
    read = map(plain_word, words) if any_tokenizer.splitter.plain_signs else words
    assert decoded == [word.encode("utf-8", "ignore")[:10].decode("utf-8", "ignore") for word in read]
    for place, (start, end) in enumerate(encoded["offset_mapping"][1:-1], start=1):
        assert encoded.token_to_chars(place) == (start, end)
        assert encoded.char_to_token(start) == place


def test_pairs(tokenizer):
    expected = {
        "input_ids": [[1, 4, 3, 2, 1, 8, 2]],
        "token_type_ids": [[0, 0, 0, 0, 1, 1, 1]],
        "attention_mask": [[1] * 7],
        "character_ids": [[BOS, row("the"), row("cat"), EOS, BOS, row("밥"), EOS]],
    }
    for arguments, options in (
        (("the cat", "밥"), {}),
        ((["the cat"], ["밥"]), {}),
        (([("the cat", "밥")],), {}),
        (([["the cat", "밥"]],), {}),
        ((["the", "cat"], ["밥"]), GIVEN),
        (([["the", "cat"]], [["밥"]]), GIVEN),
        (([(["the", "cat"], ["밥"])],), GIVEN),
    ):
        encoded = tokenizer(*arguments, **options, return_tensors="pt")
        assert {key: value.tolist() for key, value in encoded.items()} == expected
        assert encoded.sequence_ids(0) == [None, 0, 0, None, None, 1, None]
    assert tokenizer("the", "")["input_ids"] == [1, 4, 2, 1, 2]
    assert "token_type_ids" not in tokenizer("the")
    assert tokenizer("the", return_token_type_ids=True)["token_type_ids"] == [0, 0, 0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(tokenizer, side):
    texts = ["the cat", "the"]
    encoded = tokenizer(texts, padding=True, padding_side=side, pad_to_multiple_of=8, return_tensors="np")
    assert encoded["character_ids"].shape == (2, 8, 50)
    for place, length in enumerate([4, 3]):
        alone = tokenizer(texts[place], return_tensors="np")
        for key, value in encoded.items():
            padding, real = np.split(value[place] if side == "left" else value[place, ::-1], [8 - length])
            assert np.array_equal(real if side == "left" else real[::-1], alone[key][0])
            assert not padding.any()


@pytest.mark.parametrize("options", [{}, {"return_offsets_mapping": True}, {"truncation": True, "max_length": 6}])
def test_tensors_of_a_call_are_on_the_default_device(tokenizer, options):
    batch = [("the cat", "the"), ("a", "b c")]
    with torch.device("meta"):
        encoded = tokenizer(batch, padding=True, return_tensors="pt", **options)
        padded = tokenizer.pad([tokenizer("the cat"), tokenizer("a")], return_tensors="pt")
        single = tokenizer("the", return_tensors="pt", **options)
    assert {value.device.type for each in (encoded, padded, single) for value in each.values()} == {"meta"}


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation(side):
    tokenizer = ELMoTokenizer(vocab=VOCABULARY, truncation_side=side)
    words = SENTENCES[0]
    encoded = tokenizer(words, **GIVEN, truncation=True, max_length=7)
    assert tokenizer.decode_characters(encoded["character_ids"])[1:-1] == (words[:5] if side == "right" else words[-5:])
    whole = tokenizer(words, **GIVEN, truncation=True, max_length=len(words) + 2)
    assert tokenizer.decode_characters(whole["character_ids"])[1:-1] == words


def test_overflow_with_stride(tokenizer):
    texts = [list("abcdefg"), list("xy")]
    options = {"truncation": True, "max_length": 5, "return_overflowing_tokens": True}
    encoded = tokenizer(texts, **GIVEN, stride=1, padding=True, return_tensors="np", **options)
    assert encoded["overflow_to_sample_mapping"].tolist() == [0, 0, 0, 1]
    windows = tokenizer.decode_characters(encoded["character_ids"], skip_special_tokens=True)
    assert windows == [list("abc"), list("cde"), list("efg"), list("xy")]


def test_windows_are_refused_where_tokenizers_loses_the_end_of_a_text(tokenizer, monkeypatch):
    """0.23.1 and 0.23.2 read no further than `max_length` words, so that a long text had its first windows only."""
    options = {"truncation": True, "max_length": 4, "return_overflowing_tokens": True}
    windows = list(map(tokenizer.decode_characters, tokenizer("a b c d e f g", **options)["character_ids"]))
    assert [window[1:-1] for window in windows] == [["a", "b"], ["c", "d"], ["e", "f"], ["g"]]
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.23.2")
    assert len(tokenizer("a b c d", truncation=True, max_length=4)["input_ids"]) == 4
    with refused(r"tokenizers>=0\.23\.3 .* found tokenizers==0\.23\.2", ImportError):
        tokenizer("a b c d e f g", **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_offsets_mapping": True, "padding": True, "padding_side": "left"},
        {"truncation": True, "max_length": 4, "stride": 1, "return_overflowing_tokens": True},
    ],
)
def test_characters_of_given_words_are_those_of_the_words(options):
    """Not those of the words that the backend reads: it knows no empty words, and words that are cut are shorter."""
    how = {"alphabet": "lexicon", "lexicon": LEXICON, "max_word_length": 5, "cut_before_lookup": True}
    tokenizer = ELMoTokenizer(literal_markers=True, **how)
    texts = [["Ana", "", "longer", "<bos>", "\ud800", ""], ["", "a"], [""]]
    encoded = tokenizer(texts, **GIVEN, **options)
    rows = encoded.get("overflow_to_sample_mapping", range(len(texts)))
    for row, (encoding, text) in enumerate(zip(encoded.encodings, rows, strict=True)):
        places = [place for place, word in enumerate(encoding.word_ids) if word is not None]
        for place in places:
            word = encoding.word_ids[place]
            characters = (0, len(texts[text][word]))
            assert encoding.offsets[place] == encoded.token_to_chars(row, place) == characters
            assert encoded.word_to_chars(row, word) == characters
            assert "offset_mapping" not in encoded or encoded["offset_mapping"][row][place] == characters
        filled = [place for place in places if texts[text][encoding.word_ids[place]]]
        assert encoded.char_to_token(row, 0) == (filled[0] if filled else None)
        assert encoded.char_to_word(row, 0) == (encoding.word_ids[filled[0]] if filled else None)


# `pad` and the stock collators


@pytest.mark.parametrize("as_lists", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_token_classification_collator(as_lists, side):
    tokenizer = ELMoTokenizer(vocab=VOCABULARY, padding_side=side)
    examples = [{**tokenizer(words, **GIVEN), "labels": [-100, *range(len(words)), -100]} for words in SENTENCES[:40]]
    if as_lists:
        examples = [{**example, "character_ids": example["character_ids"].tolist()} for example in examples]
    batch = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=16)(examples)
    assert batch.pop("labels").shape == batch["input_ids"].shape
    assert equal(batch, tokenizer(SENTENCES[:40], **GIVEN, padding=True, pad_to_multiple_of=16, return_tensors="pt"))
    assert batch["character_ids"].dtype == torch.int64


@pytest.mark.parametrize("length", [8, 5], ids=["whole", "cut"])
def test_a_collator_that_only_stacks(tokenizer, length):
    """Rows with full padding have equal widths, whatever their words are."""
    texts = ["a", "the internationalisation of the cat"]
    options = {"padding": "max_length", "max_length": length, "truncation": True}
    rows = Dataset.from_dict({"text": texts}).map(lambda row: tokenizer(row["text"], **options))
    alone = [dict(tokenizer(text, **options)) for text in texts]
    expected = tokenizer(texts, return_tensors="pt", **options)
    for batch in (alone, [*rows.remove_columns("text")]):
        assert equal(default_data_collator(batch), expected)


@pytest.mark.parametrize("kind, type_", [(None, list), ("np", np.ndarray), ("pt", torch.Tensor)])
def test_pad(tokenizer, kind, type_):
    """One text to a length; a batch to its longest text, in the kind of numbers that `pad` was given."""
    padded = tokenizer.pad(tokenizer("the"), padding="max_length", max_length=5, return_tensors=kind)
    assert isinstance(padded["input_ids"], type_)
    assert np.array_equal(padded["character_ids"], [BOS, row("the"), EOS, [0] * 50, [0] * 50])
    texts = [tokenizer([text], return_tensors=kind) for text in ("the cat", "a")]
    padded = tokenizer.pad([{key: value[0] for key, value in text.items()} for text in texts])
    assert isinstance(padded["input_ids"], type_)
    assert equal(padded, tokenizer(["the cat", "a"], padding=True, return_tensors=kind))


def test_pad_without_characters_texts_or_padding(tokenizer):
    assert tokenizer.pad({"input_ids": [[1, 2], [1]]})["input_ids"] == [[1, 2], [1, 0]]
    assert tokenizer.pad({"input_ids": [], "character_ids": []})["input_ids"] == []
    with refused("input_ids"):
        tokenizer.pad({"character_ids": [[[259, 260]]]})
    with refused("3 `character_ids` do not fit 2 `input_ids`"):
        tokenizer.pad({"input_ids": [[1, 2]], "character_ids": [[BOS, row("the"), EOS]]})
    with refused("padding_side='top'"):
        tokenizer.pad(tokenizer("the"), padding=False, padding_side="top")
    padded = tokenizer.pad([tokenizer("the cat"), tokenizer("a")], padding=False)
    assert [text.shape for text in padded["character_ids"]] == [(4, 50), (3, 50)]


@pytest.mark.parametrize("kind, type_", [("np", np.ndarray), ("pt", torch.Tensor)])
def test_pad_converts_other_columns_as_the_stock_method(tokenizer, kind, type_):
    examples = [{**tokenizer(text), "labels": label} for text, label in (("a", 0.5), ("the cat", 1.0))]
    padded = tokenizer.pad(examples, return_tensors=kind)
    assert {type(value) for value in padded.values()} == {type_}
    assert padded["labels"].dtype == {"np": np.float64, "pt": torch.float32}[kind]
    ragged = [{**example, "labels": [1] * number} for number, example in enumerate(examples)]
    assert tokenizer.pad(ragged)["labels"] == [[], [1]]


def test_stored_columns(tokenizer, tmp_path):
    rows = Dataset.from_dict({"words": SENTENCES}).map(
        lambda batch: tokenizer(batch["words"], **GIVEN), batched=True, batch_size=50, remove_columns=["words"]
    )
    assert str(rows.features["character_ids"]) == "List(List(Value('int16')))"
    rows.save_to_disk(tmp_path / "rows")
    rows = Dataset.load_from_disk(tmp_path / "rows")
    expected = tokenizer(SENTENCES, **GIVEN, padding=True, return_tensors="pt")
    for form in (None, "numpy", "torch"):
        stored = rows.with_format(form)
        batch = DataCollatorWithPadding(tokenizer)([stored[place] for place in range(len(stored))])
        assert equal(batch, expected)


# Words and text back


def test_decode_skips_words_that_were_added_as_special(tokenizer):
    added = copy.deepcopy(tokenizer)
    added.add_tokens(["<E>"], special_tokens=True)
    added.add_tokens(["dogs"])
    ids = added("the <E> dogs").input_ids
    assert added.decode(ids) == "<S> the <E> dogs </S>"
    assert added.decode(ids, skip_special_tokens=True) == "the dogs"
    assert added.convert_ids_to_tokens(ids, skip_special_tokens=True) == ["the", "dogs"]


def test_decode_keeps_unknown_words(tokenizer):
    ids = tokenizer("the cat of London", padding="max_length", max_length=8)["input_ids"]
    assert tokenizer.decode(ids) == "<S> the <UNK> of London </S> <PAD> <PAD>"
    for same in (ids, torch.tensor(ids)):
        assert tokenizer.decode(same, skip_special_tokens=True) == "the <UNK> of London"
    assert (tokenizer.decode(4), tokenizer.decode([])) == ("the", "")
    assert tokenizer.batch_decode([ids[1:3]]) == ["the <UNK>"]
    assert tokenizer.convert_ids_to_tokens([4, 3, 2], skip_special_tokens=True) == ["the", "<UNK>"]
    assert tokenizer.convert_ids_to_tokens(11) == "London"
    assert tokenizer.convert_tokens_to_ids(["the", "cat"]) == [4, 3]
    for index in (-1, 13):
        with refused(f"{index} is out of range; .*0 to 12"):
            tokenizer.decode([4, index])


def test_decode_characters(tokenizer):
    texts = ["naïve cats", "a"]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")["character_ids"]
    assert tokenizer.decode_characters(encoded) == [["<S>", "naïve", "cats", "</S>"], ["<S>", "a", "</S>"]]
    assert tokenizer.decode_characters(encoded[0], skip_special_tokens=True) == ["naïve", "cats"]
    assert tokenizer.decode_characters(encoded[0].tolist())[1] == "naïve"
    for wrong in (encoded[0, 0], encoded.float()):
        with refused(re.escape(f"{wrong.numpy().dtype} {tuple(wrong.shape)}; pass integers")):
            tokenizer.decode_characters(wrong)


def test_encode_words(tokenizer):
    ids, characters = tokenizer.encode_words(["the", "cat", "<S>"])
    assert ids.tolist() == [4, 3, 3]
    assert characters.tolist() == [row("the"), row("cat"), row("<S>")]


# Vocabulary


def test_vocabulary_file(tmp_path, tokenizer):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(VOCABULARY), "utf-8")
    from_file = ELMoTokenizer(vocab_file=path)
    words = [*("<PAD>", "<S>", "</S>", "<UNK>", "the", ",", ".", "of", "밥", "(", ")", "London", "a b")]
    assert from_file.get_vocab() == {word: index for index, word in enumerate(words)} == tokenizer.get_vocab()
    assert ELMoTokenizer(vocab=from_file.get_vocab()).get_vocab() == from_file.get_vocab()  # a mapping
    assert len(from_file) == from_file.vocab_size == 13


def test_train_new_from_iterator():
    texts = ["the cat, the dog", "the cat's <S> \ud800", "don't"]
    base = ELMoTokenizer(max_word_length=9, pre_tokenization="treebank", extra_special_tokens=["[E]"])
    for iterator in (iter(texts), [texts[:2], texts[2:]]):
        trained = base.train_new_from_iterator(iterator, vocab_size=100)
        words = ["<PAD>", "<S>", "</S>", "<UNK>", "the", "cat", "'s", ",", "<", ">", "S", "do", "dog", "n't", "[E]"]
        assert trained.convert_ids_to_tokens(range(len(trained))) == words
    assert (trained.max_word_length, trained.pre_tokenization) == (9, "treebank")
    assert len(base.train_new_from_iterator(texts, vocab_size=6)) == 7
    assert len(base.train_new_from_iterator(texts, vocab_size=100, min_frequency=2)) == 7
    more = base.train_new_from_iterator(texts, vocab_size=5, new_special_tokens=["[F]"])
    assert more.all_special_tokens[-2:] == ["[E]", "[F]"]
    base.add_special_tokens({"mask_token": "[MASK]"})
    assert base.train_new_from_iterator(["a [MASK]"], vocab_size=5).mask_token == "[MASK]"
    with refused("special words of ELMo have fixed names"):
        base.train_new_from_iterator(texts, 5, special_tokens_map={"<S>": "<s>"})


def test_training_counts_words_that_are_cut():
    cut = ELMoTokenizer(max_word_length=8, cut_before_lookup=True).train_new_from_iterator(["extraordinary"], 9)
    assert cut.encode_words(["extraordinary", "extrao"])[0].tolist() == [4, 4]


def test_added_tokens_are_words(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    assert tokenizer("cat")["input_ids"] == [1, 3, 2]
    assert tokenizer.add_tokens(["cat", "the", "cat"]) == 1
    assert tokenizer.add_special_tokens({"extra_special_tokens": ["[E]"]}) == 1
    assert len(tokenizer) == 15
    assert tokenizer(["cat", "concat", "[E]", "a cat"], **GIVEN)["input_ids"] == [1, 13, 3, 14, 3, 2]
    assert tokenizer.decode([13, 14, 3], skip_special_tokens=True) == "cat <UNK>"


MARKED = "[E1] Anna[/E1], of New York. [E1]"  # words that the rules would split


@pytest.mark.parametrize("pre_tokenization", ["moses", "treebank", "whitespace"])
@pytest.mark.parametrize("is_special", [True, False])
def test_added_tokens_are_whole_in_raw_text(tmp_path, pre_tokenization, is_special):
    made = ELMoTokenizer(vocab=VOCABULARY, pre_tokenization=pre_tokenization)
    made(MARKED)  # remembers the words without them
    tokens = ["[E1]", "[/E1]", "New York", ""]
    assert made.add_tokens([AddedToken(token, special=is_special) for token in tokens]) == 3
    made.save_pretrained(tmp_path)
    other = made.with_vocabulary(made.get_vocab(), max_word_length=9)
    text = MARKED if is_special or pre_tokenization != "whitespace" else "[E1] Anna [/E1] , of New York . [E1]"
    words = ["[E1]", "Anna", "[/E1]", ",", "of", "New York", ".", "[E1]"]
    for tokenizer in (made, pickle.loads(pickle.dumps(made)), ELMoTokenizer.from_pretrained(tmp_path), other):
        ids = tokenizer.convert_tokens_to_ids(words)
        assert 3 in ids[1:2] and 3 not in ids[::2]
        for options in ({}, {"return_offsets_mapping": True}, {"truncation": True, "max_length": 10}):
            encoded = tokenizer([text, (text, text)], **options)
            cut = slice(None, 3) if "truncation" in options else slice(None)
            assert encoded["input_ids"] == [[1, *ids, 2], [1, *ids[cut], 2, 1, *ids[cut], 2]]
            assert [text[slice(*encoded.token_to_chars(0, place))] for place in range(1, 9)] == words
        assert tokenizer([words], **GIVEN)["input_ids"] == [[1, *ids, 2]]
        assert tokenizer([["x [E1] y"]], **GIVEN)["input_ids"] == [[1, 3, 2]]


# Unknown words with a known lowercase form


@pytest.mark.parametrize("options", [{}, {"truncation": True, "max_length": 8, "return_offsets_mapping": True}])
def test_lowercase_unknown(options):
    tokenizer = ELMoTokenizer(vocab=VOCABULARY, lowercase_unknown=True)
    words = ["The", "LONDON", "London", "of", "OF", "A B", "<UNK>", "<S>", "<s>", "밥", "Cat", "ÎLE", "", "the"]
    ids = [4, 3, 11, 7, 7, 12, 3, 3, 3, 8, 3, 3, 3, 4]
    encoded, plain = (each([words], **GIVEN, **options) for each in (tokenizer, ELMoTokenizer(vocab=VOCABULARY)))
    assert encoded.pop("input_ids") == [[1, *(ids[:6] if options else ids), 2]] != plain.pop("input_ids")
    assert np.array_equal(encoded.pop("character_ids")[0], plain.pop("character_ids")[0])  # case is kept
    assert dict(encoded) == dict(plain)
    assert tokenizer.tokenize("OF Cat") == ["of", "<UNK>"]
    assert tokenizer.encode_words(["The", "the"])[0].tolist() == [4, 4]
    assert tokenizer.with_vocabulary(["<S>", "</S>", "<UNK>", "cat"])(["Cat"], **GIVEN)["input_ids"] == [1, 4, 2]


# Words in another form of Unicode


SIGNS = {  # a text, and the same with plain signs
    "They won’t go.": "They won't go.",
    "“Yes”, she said: ‘No’.": "\"Yes\", she said: 'No'.",
    "Wait… what—no – 1990–2000": "Wait ... what -- no - 1990-2000",
    "a café (naïve) 한국": unicodedata.normalize("NFC", "a café (naïve) 한국"),
    "it’s e‑mail": "it's e-mail",
}


@pytest.mark.parametrize("pre_tokenization", ["moses", "treebank"])
@pytest.mark.parametrize("options", [{}, BACKEND], ids=["numpy", "backend"])
def test_typographic_signs_are_looked_up_as_plain_ones(pre_tokenization, options, tmp_path):
    words = [*VOCABULARY, "'", '"', "--", "...", "-", "café", "n't", "'t", "'s", "e-mail"]
    ELMoTokenizer(vocab=words, pre_tokenization=pre_tokenization, plain_signs=True).save_pretrained(tmp_path)
    tokenizer = ELMoTokenizer.from_pretrained(tmp_path)
    exact = ELMoTokenizer.from_pretrained(tmp_path, plain_signs=False)
    for text, plain in SIGNS.items():
        text = unicodedata.normalize("NFD", text) if "é" in text else text
        words = tokenizer.splitter.words(text)
        wanted = exact(plain)
        assert not np.array_equal(exact(text)["character_ids"], wanted["character_ids"])
        raw, split = tokenizer(text, **options), tokenizer(words, **GIVEN, **options)
        for encoded in (raw, split):
            assert encoded["input_ids"] == wanted["input_ids"] and encoded.tokens() == wanted.tokens()
            assert np.array_equal(encoded["character_ids"], wanted["character_ids"])
        spans = [raw.token_to_chars(place) for place in range(1, len(words) + 1)]
        assert [text[start:end] for start, end in spans] == words and "".join(words) == "".join(text.split())
        assert [split.token_to_chars(place)[1] for place in range(1, len(words) + 1)] == list(map(len, words))
    counted = tokenizer.train_new_from_iterator([["“it’s” “it’s”"]], 20).get_vocab()
    assert {'"', "'s"} <= counted.keys() and "“" not in counted


@pytest.mark.parametrize("options", [{}, GIVEN, BACKEND], ids=["raw", "given", "backend"])
def test_decomposed_words_are_told_once(warnings_of_transformers, options):
    tokenizer = ELMoTokenizer(vocab=[*VOCABULARY, "re\u0301"])
    read = lambda *words: tokenizer([*words] if "is_split_into_words" in options else " ".join(words), **options)  # noqa: E731
    assert read("밥", "é", "the", "cat", "re\u0301", "\ud800")["input_ids"] == [1, 8, 3, 4, 3, 13, 3, 2]
    assert not warnings_of_transformers.records
    for _ in range(2):
        assert read("the", unicodedata.normalize("NFD", "밥"), "e\u0301")["input_ids"] == [1, 4, 3, 3, 2]
    [record] = warnings_of_transformers.records
    assert "not in Unicode's form NFC" in record.message
    assert 'pass unicodedata.normalize("NFC", text)' in record.message
    used, new = Hasher.hash(tokenizer), ELMoTokenizer(vocab=[*VOCABULARY, "re\u0301"])
    assert Hasher.hash(new) == used  # a warning that was given is no part of it
    new("e\u0301")
    assert len(warnings_of_transformers.records) == 2


# Saving and loading


def corpus_ids(tokenizer: ELMoTokenizer) -> list:
    words = [*SENTENCES[::20], SPECIAL_LOOK_ALIKES, VOCABULARY, ["cat", "[E]"]]
    batches = tokenizer(words, **GIVEN, padding=True), tokenizer([" ".join(text) for text in words], padding=True)
    return [np.asarray(value).tolist() for batch in batches for value in batch.values()]


OPTIONS = [
    {},
    {"pre_tokenization": "treebank", "max_word_length": 7, "padding_side": "left", "truncation_side": "left"},
    {"pre_tokenization": "whitespace", "literal_markers": True, "model_max_length": 512},
    {"alphabet": "lexicon", "lexicon": LEXICON, "begin_of_word": "<eow>", "end_of_word": "<bow>"},
    {"lowercase_unknown": True, "pre_tokenization": "treebank"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_two_rounds_of_saving(tmp_path, options):
    tokenizer = ELMoTokenizer(vocab=VOCABULARY, extra_special_tokens=["[E]"], **options)
    tokenizer.add_tokens(["cat"])
    expected = corpus_ids(tokenizer)
    previous = tokenizer
    for load in (ELMoTokenizer.from_pretrained, AutoTokenizer.from_pretrained):
        previous(["the cat is here"], truncation=True, max_length=3, padding="max_length")  # not saved
        previous.save_pretrained(tmp_path)
        previous = load(tmp_path, **({"trust_remote_code": True} if load != ELMoTokenizer.from_pretrained else {}))
        assert corpus_ids(previous) == expected
        assert previous.get_vocab() == tokenizer.get_vocab()
        for name, value in options.items():
            assert getattr(previous, name) == value
        assert previous.backend_tokenizer.truncation is None and previous.backend_tokenizer.padding is None
    previous.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    assert not {"is_local", "local_files_only"} & written.keys()  # state of the call that loaded it


def test_use_leaves_no_trace(tokenizer):
    """Otherwise `datasets` would compute cached results again."""
    fresh = copy.deepcopy(tokenizer)
    before = Hasher.hash(fresh)
    fresh(SENTENCES, **GIVEN, padding=True, truncation=True, max_length=9)
    fresh(["raw text."], return_offsets_mapping=True)
    assert Hasher.hash(fresh) == before
    assert fresh.backend_tokenizer.pre_tokenizer is None


def test_pickle_and_copy(tokenizer):
    expected = corpus_ids(tokenizer)
    for other in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert corpus_ids(other) == expected
    encoded = pickle.loads(pickle.dumps(tokenizer(["the cat", "a"])))
    assert encoded.word_ids(0) == [None, 0, 1, None]


# Errors


@pytest.mark.parametrize(
    "options, error, received",
    [
        ({"alphabet": "utf-8"}, ValueError, "alphabet='utf-8'"),
        ({"lexicon": LEXICON}, ValueError, "alphabet='utf8', lexicon={'<bos>'"),
        ({"max_word_length": 2}, ValueError, "max_word_length=2; pass 3 to 1000"),
        ({"literal_markers": "false"}, ValueError, "literal_markers='false'"),
        ({"cut_before_lookup": "yes"}, ValueError, "cut_before_lookup='yes'; pass True or False"),
        ({"alphabet": "lexicon", "lexicon": LEXICON, "end_of_word": [3]}, ValueError, r"lacks the entries \[\[3\]\]"),
        ({"pretokenization": "treebank"}, TypeError, "`pretokenization`.*`pre_tokenization`"),
        ({"padding_side": "top"}, ValueError, "padding_side='top'"),
        ({"do_lower_case": True}, ValueError, "do_lower_case=True"),
        ({"pre_tokenization": "bert"}, ValueError, "pre_tokenization='bert'"),
        ({"bos_token": "[CLS]"}, ValueError, r"bos_token='\[CLS\]'.*'<S>'"),
        ({"vocab": "vocab.txt"}, TypeError, "'vocab.txt'.*`vocab_file`"),
        ({"vocab": {"<PAD>": 0, 3: 1}}, TypeError, "int: 3"),
        ({"vocab": {"<PAD>": 0, "<S>": 1, "</S>": 2, "<UNK>": 4}}, ValueError, "`vocab` .*0 to 3.*'<UNK>': 4.* ids .3"),
        ({"vocab": {"<S>": 0, "</S>": 1, "<UNK>": 2, "a": 3}}, ValueError, "`vocab` .*'<S>': 0"),
        ({"vocab": [*VOCABULARY, "\U0010fffdx"]}, ValueError, "U\\+10FFFD"),
        ({"vocab_file": "no/such/vocab.txt"}, FileNotFoundError, "no/such/vocab.txt"),
    ],
)
def test_bad_options(options, error, received):
    with refused(received, error):
        ELMoTokenizer(**options)


@pytest.mark.parametrize(
    "name, value",
    [("pad_token", None), ("eos_token_id", 3), ("split_special_tokens", False), ("truncation_side", None)]
    + [("add_eos_token", False), ("max_word_length", 8)],
)
def test_settings_that_cannot_be_set(tokenizer, name, value):
    before = getattr(tokenizer, name, None)
    for each in (tokenizer, copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        with refused(name) as caught:
            setattr(each, name, value)
        assert is_mistake_of_user(caught.value) and getattr(each, name, None) == before
        setattr(each, name, before)


def changed(content: str, *keys: str, value=None) -> str:
    """A JSON text with another value at a place."""
    whole = part = json.loads(content)
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    return json.dumps(whole)


SAVED, CONFIG = "tokenizer.json", "tokenizer_config.json"


@pytest.mark.parametrize(
    "file, change, message",
    [
        (SAVED, lambda text: text[:500], "EOF"),
        (SAVED, lambda text: changed(text, "added_tokens", value=[]), "not saved by ELMoTokenizer"),
        (SAVED, lambda text: changed(text, "model", "vocab", "London", value=99), r" ids \[11\]"),
        (CONFIG, lambda text: "[" * 100_000, "not a JSON object"),
        (CONFIG, lambda text: "[]", "not a JSON object"),
    ],
)
def test_damaged_tokenizer_files(tmp_path, tokenizer, file, change, message):
    """Each error is raised by us, so that programs print one line."""
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / file).write_text(change((tmp_path / file).read_text(encoding="utf-8")), "utf-8")
    with refused(f"(?s){file}.*{message}") as caught:
        ELMoTokenizer.from_pretrained(tmp_path)
    assert is_mistake_of_user(caught.value)


@pytest.mark.parametrize("options", [{}, {"return_offsets_mapping": True}])
def test_threads_share_a_tokenizer(options):
    """Threads share the word table and the settings of the backend; calls take turns."""
    shared = ELMoTokenizer()

    def read(thread: int) -> bool:
        sentences = [f"w{thread}x{number} the q{number}" for number in range(300)]
        return all(
            shared.decode_characters(shared(text, **options)["character_ids"], skip_special_tokens=True) == text.split()
            for text in sentences
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(4)))


def test_a_checkpoint_without_a_tokenizer(tmp_path):
    """The default alphabet may differ from the model's, and without a vocabulary every word would be unknown."""
    ELMoConfig.from_preset("tiny").save_pretrained(tmp_path)
    for load in (ELMoTokenizer.from_pretrained, AutoTokenizer.from_pretrained):
        with refused(rf"{tmp_path} has no tokenizer\.json or vocab\.txt", OSError):
            load(tmp_path)
    assert ELMoTokenizer.from_pretrained(tmp_path, vocab=VOCABULARY)("London")["input_ids"] == [1, 11, 2]
    (tmp_path / "vocab.txt").write_text("<S>\n</S>\n<UNK>\nword\n")
    assert len(ELMoTokenizer.from_pretrained(tmp_path)) == 5
