"""Alphabets, the word table, vocabularies, and batches: what raises an error, and the lengths of truncated pairs.

`test_tokenization_elmo.py` tests the encodings.
"""

import copy
import pickle
from itertools import product
from unittest import mock

import numpy as np
import pytest
from bilm_models import make_tokenizer
from datasets import Dataset
from errors import refused
from hypothesis import given
from hypothesis import strategies as st

from modeling_elmo.run_scripts.program.command_line import is_mistake_of_user
from modeling_elmo.tokenization.elmo_characters import (
    LexiconAlphabet,
    Memory,
    Utf8Alphabet,
    WordTable,
    checked_sentences,
    most_frequent_words,
    order_vocabulary,
    read_vocabulary,
)

ANY_TEXT = st.text(alphabet=st.characters())  # with lone surrogates
# Entries of the published example, which has begin and end of word swapped.
LEXICON = {"<bos>": 17679, "<eos>": 17680, "<oov>": 17681, "<pad>": 17682, "<bow>": 17683, "<eow>": 17684}
LEXICON |= {"발": 217, "없": 186, "는": 31, "말": 134, "이": 53, "천": 419, "리": 40, "간": 65, "다": 92}


def table(alphabet=None, max_word_length=50, **options):
    return WordTable(alphabet or Utf8Alphabet(), lambda word: 3, max_word_length, **options)


def encode(words, *texts) -> list[list[int]]:
    return words.character_ids(words.rows(texts)).tolist()


def test_published_dictionary_example():
    alphabet = LexiconAlphabet(LEXICON, begin_of_word="<eow>", end_of_word="<bow>")
    words = table(alphabet, max_word_length=7)
    rows = np.concatenate([[1], words.rows(["발", "없는", "말이", "천리", "간다", "밥"]), [2]])
    pad = 17682
    assert (words.character_ids(rows) - 1).tolist() == [
        [17684, 17679, 17683, pad, pad, pad, pad],
        [17684, 217, 17683, pad, pad, pad, pad],
        [17684, 186, 31, 17683, pad, pad, pad],
        [17684, 134, 53, 17683, pad, pad, pad],
        [17684, 419, 40, 17683, pad, pad, pad],
        [17684, 65, 92, 17683, pad, pad, pad],
        [17684, 17681, 17683, pad, pad, pad, pad],
        [17684, 17680, 17683, pad, pad, pad, pad],
    ]
    assert words.decode(words.character_ids(rows)) == ["<S>", "발", "없는", "말이", "천리", "간다", "\ufffd", "</S>"]


def test_large_alphabets_have_wider_integers():
    assert table().character_ids(np.array([1])).dtype == np.int16
    names = ["<bos>", "<eos>", "<oov>", "<pad>", "<bow>", "<eow>", *map(chr, range(0x4E00, 0x4E00 + 40000))]
    words = table(LexiconAlphabet({name: index for index, name in enumerate(names)}))
    assert words.alphabet.size == 40007
    assert words.character_ids(words.rows([names[-1]]))[0, 1] == 40006


@pytest.mark.parametrize("length", [3, 4, 12, 50])
@given(word=ANY_TEXT)
def test_utf8_row_against_the_definition(length, word):
    data = word.encode("utf-8", "ignore")[: length - 2]
    expected = [258, *data, 259] + [260] * (length - 2 - len(data))
    words = table(max_word_length=length)
    [row] = encode(words, word)
    assert [index - 1 for index in row] == expected
    assert words.decode(np.array([row])) == [data.decode("utf-8", "ignore")]


@given(batches=st.lists(st.lists(ANY_TEXT, max_size=5), max_size=20))
def test_a_full_table_is_emptied_and_stays_right(batches):
    small = table(max_word_length=8, max_words=6)
    for batch in batches:
        assert encode(small, *batch) == encode(table(max_word_length=8), *batch)
        assert small._num_rows <= 7 + len(batch)


def test_memory_is_bounded():
    memory = Memory(str.upper, max_size=10)
    for number in range(100):
        assert memory[f"{number}x"] == f"{number}X" and len(memory) <= 10
    assert memory["x" * 101] == "X" * 101 and "x" * 101 not in memory  # long words are not remembered


def test_the_table_grows_by_more_than_its_first_size():
    many = [str(number) for number in range(5000)]
    words = table()
    assert words.decode(words.character_ids(words.rows(many))) == many
    assert words.decode(words.character_ids(words.rows(many[::-7]))) == many[::-7]


def test_widen_refuses_rows_of_a_wider_tokenizer():
    with refused("have 9 columns, but this tokenizer has 8"):
        table(max_word_length=8).widen(np.ones((2, 9), dtype=int), out=np.zeros((2, 8)))


@pytest.mark.parametrize(
    "alphabet, row, message",
    [
        (None, [98, 260, 261], "98, 260, 261.* is not a word, 259"),
        (None, [259, 98, 98], "is not a word, 259 ... 260"),
        (None, [259, 98, 257, 260], "98, 257.* are not bytes"),
        (LexiconAlphabet(LEXICON), [17684, 5, 17685], r"\[5\] are not in the lexicon"),
    ],
)
def test_decode_refuses_wrong_rows(alphabet, row, message):
    with refused(message):
        table(alphabet, max_word_length=5).decode(np.array([row]))


@pytest.mark.parametrize("word", [3, ["a"]])
def test_words_must_be_strings(word):
    with refused(f"got {type(word).__name__}", TypeError):
        table().rows(["a", word])


@pytest.mark.parametrize(
    "lexicon, message",
    [
        (None, "`lexicon` is None"),
        ({"<bos>": 0, "<eos>": 1, "<oov>": 2}, r"\['<pad>', '<bow>', '<eow>'\]"),
        (LEXICON | {"a": "1"}, "the id '1' for 'a'"),
        (LEXICON | {"a": 2**31}, "the id 2147483648 for 'a'"),
        (LEXICON | {"a": 217}, "the id 217 for 'a'"),
    ],
)
def test_bad_lexicons(lexicon, message):
    with refused(message):
        LexiconAlphabet(lexicon)


def write(folder, text):
    path = folder / "vocabulary.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_read_vocabulary_finds_special_words_anywhere(tmp_path):
    path = write(tmp_path, "the\n</S>\r\n!!!MAXTERMID\n밥\n<UNK>\n\n<S>\na\u00a0b\n")
    assert read_vocabulary(path) == ["<PAD>", "<S>", "</S>", "<UNK>", "the", "밥", "a\u00a0b"]
    with_padding = write(tmp_path, "\ufeffcat\n<PAD>\n<UNK>\n</S>\n<S>")  # and a byte order mark
    assert read_vocabulary(with_padding) == ["<PAD>", "<S>", "</S>", "<UNK>", "cat"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("<S>\n</S>\n<UNK>\nthe\ncat\nthe\n", "vocabulary.txt has 'the' twice, in lines 4 and 6"),
        ("<S>\nthe\n", "vocabulary.txt lacks </S>, <UNK>"),
        ("<S>\n<UNK>\n</S>\nthe 59\nof\t20\n", "All words of .*vocabulary.txt have .* first 'the 59' .line 4"),
        ("<S>\n</S>\n<UNK>\n밥\n".encode("cp949"), "vocabulary.txt is not UTF-8 text"),
    ],
)
def test_bad_vocabularies(tmp_path, text, message):
    with refused(message):
        read_vocabulary(write(tmp_path, text))


@given(words=st.lists(ANY_TEXT, unique=True, min_size=1))
def test_the_order_of_a_vocabulary(words):
    lines = list(dict.fromkeys(["<UNK>", *map(str.strip, words), "<S>", "a", "</S>"]))
    special = ["<PAD>", "<S>", "</S>", "<UNK>"]
    assert order_vocabulary(lines) == special + [line for line in lines if line not in (*special, "!!!MAXTERMID", "")]


def test_most_frequent_words():
    counts = {"b": 2, "<S>": 9, "a": 2, "c": 5, "d": 1, "x\ud800": 7, "\U0010fffdx": 8, "!!!MAXTERMID": 3}
    assert most_frequent_words(counts)[4:] == ["c", "a", "b", "d"]
    assert most_frequent_words(counts, vocab_size=6)[4:] == ["c", "a"]
    assert most_frequent_words(counts, min_frequency=2)[4:] == ["c", "a", "b"]
    with refused("vocab_size=4 leaves no room after the 4 special words"):
        most_frequent_words(counts, vocab_size=4)


# Batches

GIVEN = {"is_split_into_words": True}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("the")


@pytest.mark.parametrize(
    "sentences, message",
    [
        ("a text", "got str: 'a text'; pass a list of texts, or of lists of words"),
        (None, "got NoneType: None"),
        ({"text": ["a"]}, "got dict"),
        (["a", b"b"], "Sentence 1 is b'b'; pass"),
        ([["a"], ["a", None]], "Sentence 1 has None; pass"),
        (np.array([["a", "b"]])[None], "Sentence 0 has array"),
        (np.array([["a"], ["a b"]]), r"got ndarray: array\(\[\['a'\],"),
        (np.array([["a b"], [None]], dtype=object), "got ndarray"),
    ],
)
def test_other_things_than_sentences(sentences, message):
    with refused(message, TypeError):
        list(checked_sentences(sentences))


def test_sentences():
    texts, words = ["a b", ""], [["a", "b"], []]
    for given_texts in (texts, iter(texts), np.array(texts), Dataset.from_dict({"text": texts})["text"]):
        assert list(checked_sentences(given_texts)) == texts
    for given_words in (words, map(tuple, words), [np.array(each, dtype=object) for each in words]):
        assert list(checked_sentences(given_words)) == words
    for rectangle in ([["a"], ["b"]], [["a", "New York"]]):  # of words, as from `datasets`
        assert list(checked_sentences(np.array(rectangle, dtype=object))) == rectangle


CUT = {"truncation": True}


@pytest.mark.parametrize(
    "arguments, options, error, received",
    [
        (([["a", "b", "c"]],), {}, TypeError, "lists of words with is_split_into_words=True"),
        (([["a"], "b"],), GIVEN, TypeError, "a list of words, got str: 'b'"),
        ((["a", "b"], ["c"]), {}, ValueError, r"2 texts .*got \['c'\]"),
        ((["a", "b"], "c"), {}, ValueError, "got 'c'"),
        (("a",), {"padding_side": "top"}, ValueError, "padding_side='top'"),
        (("a b c",), {**CUT, "max_length": 4, "stride": 2}, ValueError, "max_length=4 .* 2 words.*stride=2"),
        (("a",), {**CUT, "max_length": 40, "stride": 10**20}, ValueError, "max_length=40 .*stride=10{20}"),
        (("a b",), {"truncation": "only_second", "max_length": 3}, ValueError, "truncation='only_second'"),
        (("a",), {"stride": -1}, ValueError, "`stride` is -1"),
        (("a",), {**CUT, "max_length": 2.5}, ValueError, "`max_length` is 2.5"),
        (("a",), {"padding": True, "pad_to_multiple_of": "8"}, ValueError, "`pad_to_multiple_of` is '8'"),
        (("a",), {"padding": "max_length", "max_length": 10**20}, ValueError, "`max_length` is 10{20}; .*16777216"),
    ],
)
def test_bad_texts(tokenizer, arguments, options, error, received):
    with refused(received, error) as caught:
        tokenizer(*arguments, **options)
    assert error is TypeError or is_mistake_of_user(caught.value)
    assert tokenizer("the")["input_ids"] == [1, 4, 2]  # and the tokenizer still works


@pytest.mark.parametrize("strategy", ["longest_first", "only_first", "only_second"])
@pytest.mark.parametrize("stride", [0, 1, 2])
def test_cut_texts_fit_or_say_why_not(tokenizer, strategy, stride):
    """The backend would panic, or return texts that are too long."""
    counts = product(range(4), [None, *range(4)], range(9), [False, True], [False, True])
    for first, second, length, markers, overflow in counts:
        pair, options = None if second is None else [["y"] * second], {"truncation": strategy, "stride": stride}
        options |= {"max_length": length, "add_special_tokens": markers, "return_overflowing_tokens": overflow}
        try:
            encoded = tokenizer([["x"] * first], pair, **GIVEN, **options)
        except ValueError as error:
            assert f"max_length={length} and truncation='{strategy}'" in str(error)
        else:
            assert all(len(ids) <= length for ids in encoded["input_ids"])


@pytest.mark.parametrize("options", [{}, {"return_overflowing_tokens": True}])
def test_a_tokenizer_without_a_maximum_does_not_cut(tokenizer, options):
    length = tokenizer.model_max_length  # 10^30, more than the backend can count
    assert tokenizer(["the cat"], truncation=True, max_length=length, **options)["input_ids"] == [[1, 4, 3, 2]]
    limited = copy.copy(tokenizer)
    for limit, cut in ((3, [1, 4, 2]), (None, [1, 4, 3, 2])):  # sentence-transformers assigns both
        limited.model_max_length = limit
        assert limited(["the cat"], truncation=True, **options)["input_ids"][0] == cut
    assert limited.model_max_length == length


def test_later_settings_do_not_change_encodings():
    tokenizer = make_tokenizer("the")
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


def test_encodings_are_computed_on_first_use(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "_encode_in_backend", mock.Mock(wraps=tokenizer._encode_in_backend))
    lazy = tokenizer(["the cat", "a"])._encodings
    assert not tokenizer._encode_in_backend.called and len(lazy) == 2
    assert [encoding.word_ids for encoding in lazy] == [[None, 0, 1, None], [None, 0, None]]
    assert [encoding.ids for encoding in pickle.loads(pickle.dumps(lazy))] == [[1, 4, 3, 2], [1, 3, 2]]
    assert tokenizer._encode_in_backend.call_count == 1
