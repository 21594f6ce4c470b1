"""Probabilities of words in texts: `ELMoForPreTraining.score` and `predict_words` with the tokenizer."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from transformers import BatchEncoding

from .modeling_elmo import ELMoForPreTraining
from .tokenization.elmo_characters import checked_sentences
from .tokenization.tokenization_elmo import ELMoTokenizer


class WordScore(NamedTuple):
    """A word of a text (or `<S>`, `</S>`), and its log-probability in nats, given the words before and the words after.

    `None` where a direction predicts nothing: forward at the first word, `<S>`; backward at the last, `</S>`.
    """

    word: str
    forward: float | None
    backward: float | None


class Prediction(NamedTuple):
    """A word that is possible at a position, and its log-probability in nats."""

    word: str
    log_prob: float


def score_texts(
    model: ELMoForPreTraining, tokenizer: ELMoTokenizer, texts: Iterable[str | Sequence[str]], batch_size: int = 32
) -> list[list[WordScore]]:
    """Scores each word of each text, or list of words, in its context. Unknown words are scored as `<UNK>`."""
    scores = []
    for encoding, words in _encoded_batches(tokenizer, texts, batch_size):
        found = model.score(**encoding)
        rows = zip(words, found.forward_log_probs.tolist(), found.backward_log_probs.tolist(), strict=True)
        for text, forward, backward in rows:
            forward_scores = [None, *forward[1 : len(text)]]
            backward_scores = [*backward[: len(text) - 1], None]
            scores.append([WordScore(*item) for item in zip(text, forward_scores, backward_scores, strict=True)])
    return scores


def predict_texts(
    model: ELMoForPreTraining,
    tokenizer: ELMoTokenizer,
    texts: Iterable[str | Sequence[str]],
    top_k: int = 5,
    direction: str = "both",
    batch_size: int = 32,
) -> list[list[tuple[str, list[Prediction]]]]:
    """The `top_k` most likely words at each word of each text, or list of words, given only its context.

    `top_k` and `direction` are as for `ELMoForPreTraining.predict_words`.
    """
    predictions = []
    for encoding, words in _encoded_batches(tokenizer, texts, batch_size):
        found = model.predict_words(**encoding, top_k=top_k, direction=direction)
        for text, ids, log_probs in zip(words, found.word_ids.tolist(), found.log_probs.tolist(), strict=True):
            candidates = [
                list(map(Prediction, tokenizer.convert_ids_to_tokens(ids_K), log_probs_K))
                for ids_K, log_probs_K in zip(ids[: len(text)], log_probs[: len(text)], strict=True)
            ]
            predictions.append(list(zip(text[1:-1], candidates[1:-1], strict=True)))
    return predictions


def _encoded_batches(
    tokenizer: ELMoTokenizer, texts: Iterable[str | Sequence[str]], batch_size: int
) -> Iterator[tuple[BatchEncoding, list[list[str]]]]:
    """Yields encoded batches, padded on the right, and the words of each text with the markers."""
    if batch_size < 1:
        raise ValueError(f"`batch_size` is {batch_size}; pass a number of at least 1.")
    sentences = [tokenizer.splitter.words(text) if isinstance(text, str) else text for text in checked_sentences(texts)]
    for start in range(0, len(sentences), batch_size):
        some = sentences[start : start + batch_size]
        encoding = tokenizer(some, is_split_into_words=True, padding=True, padding_side="right", return_tensors="pt")
        words = [[tokenizer.bos_token, *text, tokenizer.eos_token] for text in some]
        yield encoding, words
