"""What models say about a text, as arrays and tables: all that the explorer computes, without its page."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

import modeling_elmo  # noqa: F401 (registers ELMo with the Auto classes)
from modeling_elmo.heads.role_labeler_pipeline import role_spans
from modeling_elmo.prediction import Prediction, predict_texts, score_texts

from ..cards.figures import principal_plane
from ..cards.tables import layer_names
from ..pretraining.corpus import Corpus
from ..pretraining.counting import words_of
from ..program.models import check_model, load_pretrained
from ..vectors.embedding import embed_sentences, load_model_and_tokenizer
from ..vectors.neighbors import WordUse, composed, find_uses, nearest_uses, normalize, use_vectors

LONGEST_TEXT = 2000  # characters: an answer stays a matter of seconds, also with the largest models
LONGEST_SENTENCE = 100  # words, for semantic roles: each word may be a predicate, for which all are read again
MOST_USES = 300  # of a word in the corpus, for the same reason
SHOWN_USES = 8  # nearest to the chosen one
SHOWN_PREDICTIONS = 5

# Architecture in config.json: the Auto class that loads it, and the pipeline that runs it. A biLM has none.
ARCHITECTURES: dict[str, tuple[Any, str | None]] = {
    "ELMoModel": (AutoModel, None),
    "ELMoForPreTraining": (AutoModelForPreTraining, None),
    "ELMoForTokenClassification": (AutoModelForTokenClassification, "token-classification"),
    "ELMoForSemanticRoleLabeling": (AutoModelForTokenClassification, "semantic-role-labeling"),
    "ELMoForQuestionAnswering": (AutoModelForQuestionAnswering, "extractive-question-answering"),
    "ELMoForSequenceClassification": (AutoModelForSequenceClassification, "text-classification"),
    "ELMoForCoreferenceResolution": (AutoModelForTokenClassification, "coreference-resolution"),
}

Piece = tuple[str, str | None]  # a piece of a text, and its label
LabeledSpan = tuple[int, int, str]  # start, end and label


@dataclass(frozen=True)
class OpenModel:
    name: str  # on the Hub, or of its folder
    model: Any
    tokenizer: Any
    task: str | None  # of its pipeline; `None` for a biLM

    @property
    def layers(self) -> list[str]:
        return layer_names(self.model.config.num_hidden_layers + 1)

    @property
    def predicts(self) -> bool:
        """Whether it has a softmax over words."""
        return self.task is None and hasattr(self.model, "predict_words")

    @property
    def bilm(self) -> Any:
        return getattr(self.model, "elmo", self.model)


def open_model(name: str, trust_remote_code: bool = False) -> OpenModel:
    """Loads a biLM or a trained head, as its config.json says."""
    check_model(name)
    config = load_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    architecture, *_ = config.architectures or ["ELMoModel"]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{name} has the architecture {architecture}; pass one of {', '.join(ARCHITECTURES)}.")
    auto_class, task = ARCHITECTURES[architecture]
    predicts = config.has_softmax and config.vocab_size > 4
    if auto_class is AutoModelForPreTraining and not predicts:
        auto_class = AutoModel  # nothing but special words, or published without its softmax
    model, tokenizer = load_model_and_tokenizer(name, None, trust_remote_code, auto_class=auto_class)
    if Path(name).is_dir():
        name = Path(name).resolve().name
    return OpenModel(name, model, tokenizer, task)


def lines_of(text: str | None, name: str = "text") -> list[str]:
    """The lines of a text that are not blank."""
    text = text or ""
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"The {name} has {len(text):,} characters; the limit is {LONGEST_TEXT:,}. Shorten it.")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"There is no {name} yet. Type one.")
    return lines


def named_words(opened: OpenModel, text: str) -> list[list[str]]:
    """A name for each word of each line: the word, with a number from its second use on: `play`, `play (2)`."""
    counts = Counter()
    lines = []
    for words in split_lines(opened, text):
        names = []
        for word in words:
            counts[word] += 1
            count = counts[word]
            names.append(word if count == 1 else f"{word} ({count})")
        lines.append(names)
    return lines


def split_lines(opened: OpenModel, text: str) -> list[list[str]]:
    return list(map(opened.tokenizer.splitter.words, lines_of(text)))


def words_to_choose(opened: OpenModel, text: str) -> tuple[list[str], str]:
    """The names of all words, and the name of a word to begin with: the most frequent, and of these the longest."""
    names = list(chain.from_iterable(named_words(opened, text)))
    counts = Counter(chain.from_iterable(split_lines(opened, text)))
    return names, max(counts, key=lambda word: (counts[word], len(word)))


def chosen_use(opened: OpenModel, text: str, name: str) -> tuple[list[list[str]], int, int]:
    """The words of all lines; the line and the place of the word with this name."""
    for line, names in enumerate(named_words(opened, text)):
        if name in names:
            return split_lines(opened, text), line, names.index(name)
    raise ValueError(f"{opened.name} reads no word {name!r} in this text. Choose one of its words.")


def layer_cosines(opened: OpenModel, text: str, name: str) -> list[tuple[list[str], np.ndarray]]:
    """The words of each line, and the cosines `(layers, words)` of the chosen word with each."""
    words_of_lines, line, place = chosen_use(opened, text, name)
    embedded = embed_sentences(words_of_lines, opened.bilm, opened.tokenizer, layers="all")
    vectors_of_lines = [normalize(vectors) for _, vectors in embedded]
    chosen = vectors_of_lines[line][:, place]
    cosines = []
    for words, vectors in zip(words_of_lines, vectors_of_lines, strict=True):
        cosines.append((words, np.einsum("lwd,ld->lw", vectors, chosen)))
    return cosines


class SimilarUses(NamedTuple):
    """The uses of a word, in the text and then in the corpus, with their map."""

    uses: list[WordUse]
    query: int  # index of the chosen use
    nearest: list[tuple[int, float]]  # indices of uses in other sentences, and their cosines, best first
    points: np.ndarray  # in the plane of the first two principal components, `(uses, 2)`
    shares: np.ndarray  # of these two in the variance


def similar_uses(opened: OpenModel, text: str, name: str, layer: int, corpus: Corpus | None) -> SimilarUses:
    """The uses of a word that are nearest to the chosen one, in one layer. Case counts, as in `elmo neighbors`."""
    words_of_lines, line, place = chosen_use(opened, text, name)
    words = words_of_lines[line]
    pattern = re.escape(words[place])
    uses = list(find_uses(words_of_lines, pattern))
    query = uses.index(WordUse(words, place))
    if corpus is not None:
        in_corpus = find_uses(sentences_with(words[place], corpus, opened), pattern)
        new = (use for use in in_corpus if use.words not in words_of_lines)
        uses += islice(new, MOST_USES)
    layer = min(layer, opened.model.config.num_hidden_layers)
    vectors = normalize(use_vectors(uses, opened.bilm, opened.tokenizer, str(layer)))
    nearest = nearest_uses(vectors, uses, query, SHOWN_USES)
    points, shares = principal_plane(vectors)
    return SimilarUses(uses, query, nearest, points, shares)


def sentences_with(word: str, corpus: Corpus, opened: OpenModel) -> Iterator[list[str]]:
    """The words of the sentences of a corpus that have a word, and of some others."""
    for text in corpus.texts():
        if composed(word) in composed(" ".join(words_of(text))):  # splitting takes longer
            yield words_of(text, opened.tokenizer.splitter.words)


class Expectation(NamedTuple):
    """A word of a text, and what is expected in its place, best first, given the words before, after, or both."""

    word: str
    token: str  # the word of the vocabulary that is predicted, or <UNK>
    forward_bits: float  # of surprise
    backward_bits: float
    forward: list[Prediction]
    backward: list[Prediction]
    both: list[Prediction]


def expectations(opened: OpenModel, text: str) -> list[list[Expectation]]:
    """What a biLM with a softmax expects at each word of each line. A word that it does not know counts as `<UNK>`."""
    tokenizer = opened.tokenizer
    arguments = (opened.model, tokenizer, lines_of(text))
    top_k = min(SHOWN_PREDICTIONS, opened.model.config.vocab_size - 1)
    predictions = [predict_texts(*arguments, top_k, direction) for direction in ("forward", "backward", "both")]
    lines = []
    for scores, *predictions_of_line in zip(score_texts(*arguments), *predictions, strict=True):
        scores = scores[1:-1]  # without markers
        ids, _ = tokenizer.encode_words([score.word for score in scores])
        tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
        line = []
        for score, token, *guesses in zip(scores, tokens, *predictions_of_line, strict=True):
            _, best = zip(*guesses, strict=True)
            line.append(Expectation(score.word, token, bits(score.forward), bits(score.backward), *best))
        lines.append(line)
    return lines


def bits(log_prob: float | None) -> float:
    """The surprise, -log2 of a probability that is given as its natural logarithm."""
    if log_prob is None:
        return 0.0
    return -log_prob / math.log(2)


def mixes_of(opened: OpenModel) -> dict[str, tuple[list[float], float]]:
    """At each place where ELMo enters a head: the share of each layer, and gamma."""
    if opened.task is None:
        return {}
    mixes = {}
    for place, mix in opened.model.mixes().items():
        shares = mix.layer_weights().tolist()
        mixes[place] = (shares, mix.gamma.item())
    return mixes


def needs_pairs(opened: OpenModel) -> bool:
    return opened.task == "text-classification" and opened.model.config.classifier == "esim"


def head_pieces(opened: OpenModel, text: str, question: str | None = "", second: str | None = "") -> list[Piece]:
    """What a head finds in a text with one sentence per line, by its pipeline; with roles, a line for each predicate.

    `question` is for question answering, `second` for classifiers of pairs.
    """
    lines = lines_of(text)
    if needs_pairs(opened):
        lines_of(second, "second text")
    task = str(opened.task)
    run = pipeline(task, model=opened.model, tokenizer=opened.tokenizer)
    if task == "semantic-role-labeling":
        return role_pieces(run, lines)
    spans = FINDERS[task](run, lines, question or "", second or "")
    return pieces("\n".join(lines), spans)


def role_pieces(run: Any, lines: list[str]) -> list[Piece]:
    longest = max(map(len, map(run.tokenizer.splitter.words, lines)))
    if longest > LONGEST_SENTENCE:
        limit = f"semantic roles are read of up to {LONGEST_SENTENCE}"
        raise ValueError(f"A line has {longest:,} words; {limit}. Write each sentence on a line of its own.")
    shown: list[Piece] = []
    for line, sentence in zip(lines, run(lines), strict=True):
        verbs = sentence["verbs"]
        for verb in verbs:
            for role, first, end in role_spans(verb["tags"]):
                words = " ".join(sentence["words"][first:end])
                shown.append((f"{words} ", role or None))
            shown.append(("\n", None))
        if not verbs:
            shown.append((f"{line} (no predicate)\n", None))
    return shown


def entity_spans(run: Any, lines: list[str], *_: str) -> list[LabeledSpan]:
    labels = run.model.config.id2label.values()
    is_bio = any(str(name).startswith(("B-", "I-")) for name in labels)
    strategy, label = ("simple", "entity_group") if is_bio else ("none", "entity")
    spans = []
    for start, entities in zip(starts(lines), run(lines, aggregation_strategy=strategy), strict=False):
        for entity in entities:
            spans.append((start + entity["start"], start + entity["end"], entity[label]))
    return spans


def answer_spans(run: Any, lines: list[str], question: str, _: str) -> list[LabeledSpan]:
    words = lines_of(question, "question")
    answer = run(question=" ".join(words), context="\n".join(lines))
    return [(answer["start"], answer["end"], f"{answer['score']:.0%}")]


def class_spans(run: Any, lines: list[str], _: str, second: str) -> list[LabeledSpan]:
    pair = {}
    if second.strip():
        pair["text_pair"] = " ".join(lines_of(second))
    spans = []
    for start, line in zip(starts(lines), lines, strict=False):
        result = run({"text": line, **pair})
        best = result[0] if isinstance(result, list) else result
        label = f"{best['label']} {best['score']:.0%}"
        spans.append((start, start + len(line), label))
    return spans


def cluster_spans(run: Any, lines: list[str], *_: str) -> list[LabeledSpan]:
    spans = []
    for number, mentions in enumerate(run(lines)["clusters"], 1):
        for mention in mentions:
            spans.append((mention["start"], mention["end"], str(number)))
    return spans


FINDERS: dict[str, Callable[..., list[LabeledSpan]]] = {
    "token-classification": entity_spans,
    "extractive-question-answering": answer_spans,
    "text-classification": class_spans,
    "coreference-resolution": cluster_spans,
}


def starts(lines: Iterable[str]) -> Iterator[int]:
    """The place of each line in the whole text."""
    return accumulate((len(line) + 1 for line in lines), initial=0)


def pieces(text: str, spans: Iterable[LabeledSpan]) -> list[Piece]:
    """The text, cut at the ends of its spans. Where spans overlap, the shortest counts."""
    owners: list[LabeledSpan | None] = [None] * len(text)
    for span in sorted(spans, key=lambda span: span[0] - span[1]):
        start, end, _ = span
        owners[start:end] = [span] * (end - start)
    cut = []
    end = 0
    for owner, places in groupby(owners):
        start = end
        end += len(list(places))
        label = owner[2] if owner else None
        cut.append((text[start:end], label))
    return cut
