"""Scores and predictions of words in texts."""

import math

import pytest
from bilm_models import tiny_model
from errors import refused

from modeling_elmo import ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.prediction import predict_texts, score_texts

WORDS = ["the", "cat", "sat", "on", "mat", "."]
VOCABULARY = ["<S>", "</S>", "<UNK>", *WORDS]
TEXTS = ["the cat sat on the mat .", ["the", "dog", "sat"], ""]


@pytest.fixture(scope="module")
def pair():
    tokenizer = ELMoTokenizer(vocab=VOCABULARY, pre_tokenization="whitespace")
    return tiny_model(ELMoForPreTraining, vocab_size=len(tokenizer)), tokenizer


@pytest.mark.parametrize("batch_size, side", [(1, "right"), (2, "left"), (32, "right")])
def test_every_word_has_its_scores(pair, batch_size, side):
    model, tokenizer = pair[0], ELMoTokenizer(vocab=VOCABULARY, pre_tokenization="whitespace", padding_side=side)
    scores = score_texts(model, tokenizer, TEXTS, batch_size=batch_size)
    for text, row in zip(TEXTS, scores, strict=True):
        words = text.split() if isinstance(text, str) else text
        assert [score.word for score in row] == ["<S>", *words, "</S>"]
        assert row[0].forward is None and row[-1].backward is None
        alone = tokenizer([words], is_split_into_words=True, return_tensors="pt")
        loss, count = model(**alone, labels=alone["input_ids"]), len(words) + 1
        assert sum(score.forward for score in row[1:]) / count == pytest.approx(-loss.forward_loss.item(), abs=1e-5)
        assert sum(score.backward for score in row[:-1]) / count == pytest.approx(-loss.backward_loss.item(), abs=1e-5)


def test_predictions_are_aligned_with_words(pair):
    model, tokenizer = pair
    found = predict_texts(model, tokenizer, TEXTS, top_k=9, direction="forward")
    assert [[word for word, _ in text] for text in found] == [TEXTS[0].split(), TEXTS[1], []]
    scores = score_texts(model, tokenizer, TEXTS)
    for text, row in zip(found, scores, strict=True):
        for (word, candidates), score in zip(text, row[1:-1], strict=True):
            assert sum(math.exp(candidate.log_prob) for candidate in candidates) == pytest.approx(1, abs=1e-5)
            known = word if word in WORDS else "<UNK>"
            assert dict(candidates)[known] == pytest.approx(score.forward, abs=1e-5)


def test_what_is_refused(pair):
    for function in (score_texts, predict_texts):
        with refused("got str: 'the cat'", TypeError):
            function(*pair, "the cat")
        with refused("`batch_size` is 0"):
            function(*pair, TEXTS, batch_size=0)
    assert score_texts(*pair, iter(TEXTS)) == score_texts(*pair, TEXTS)
