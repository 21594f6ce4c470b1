"""What models say about a text, as arrays and tables: all that the explorer computes, without its page."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers

import modeling_elmo  # noqa: F401 (registers ELMo with the Auto classes)
from modeling_elmo.heads.role_labeler_pipeline import role_spans
from modeling_elmo.prediction import Prediction, predict_texts, score_texts

from ..cards.figures import principal_plane
from ..cards.tables import layer_names
from ..pretraining.corpus import Corpus, words_of
from ..program.models import check_model, load_pretrained
from ..vectors.embedding import embed_sentences, load_model_and_tokenizer
from ..vectors.neighbors import WordUse, find_uses, nearest_uses, normalize, use_vectors

LONGEST_TEXT = 2000  # characters: an answer stays a matter of seconds, also with the largest models
LONGEST_SENTENCE = 100  # words, for semantic roles: each word may be a predicate, for which all are read again
MOST_USES = 300  # of a word in the corpus, for the same reason
SHOWN_USES = 8  # nearest to the chosen one
SHOWN_PREDICTIONS = 5

# Architecture in config.json: the Auto class that loads it, and the pipeline that runs it. A biLM has none.
ARCHITECTURES: dict[str, tuple[Any, str | None]] = {
    "ELMoModel": (transformers.AutoModel, None),
    "ELMoForPreTraining": (transformers.AutoModelForPreTraining, None),
    "ELMoForTokenClassification": (transformers.AutoModelForTokenClassification, "token-classification"),
    "ELMoForSemanticRoleLabeling": (transformers.AutoModelForTokenClassification, "semantic-role-labeling"),
    "ELMoForQuestionAnswering": (transformers.AutoModelForQuestionAnswering, "extractive-question-answering"),
    "ELMoForSequenceClassification": (transformers.AutoModelForSequenceClassification, "text-classification"),
    "ELMoForCoreferenceResolution": (transformers.AutoModelForTokenClassification, "coreference-resolution"),
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
    config = load_pretrained(transformers.AutoConfig, name, trust_remote_code=trust_remote_code)
    architecture = (config.architectures or ["ELMoModel"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{name} has the architecture {architecture}; pass one of {', '.join(ARCHITECTURES)}.")
    auto_class, task = ARCHITECTURES[architecture]
    if auto_class is transformers.AutoModelForPreTraining and not (config.has_softmax and config.vocab_size > 4):
        auto_class = transformers.AutoModel  # nothing but special words, or published without its softmax
    model, tokenizer = load_model_and_tokenizer(name, None, trust_remote_code, auto_class=auto_class)
    return OpenModel(Path(name).resolve().name if Path(name).is_dir() else name, model, tokenizer, task)


def lines_of(text: str | None, name: str = "text") -> list[str]:
    """The lines of a text that are not blank."""
    text = text or ""
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"The {name} has {len(text):,} characters; the limit is {LONGEST_TEXT:,}. Shorten it.")
    if lines := [line.strip() for line in text.splitlines() if line.strip()]:
        return lines
    raise ValueError(f"There is no {name} yet. Type one.")


def named_words(opened: OpenModel, text: str) -> list[list[str]]:
    """A name for each word of each line: the word, with a number from its second use on: `play`, `play (2)`."""
    seen: dict[str, int] = {}
    names = []
    for line in lines_of(text):
        names.append([])
        for word in opened.tokenizer.splitter.words(line):
            seen[word] = seen.get(word, 0) + 1
            names[-1].append(word if seen[word] == 1 else f"{word} ({seen[word]})")
    return names


def words_to_choose(opened: OpenModel, text: str) -> tuple[list[str], str]:
    """The names of all words, and that of a word to begin with: the most frequent, and of these the longest."""
    names = [name for line in named_words(opened, text) for name in line]
    counts = Counter(name.partition(" (")[0] for name in names)
    return names, max(names, key=lambda name: (counts[name], len(name) if name in counts else 0))


def chosen_use(opened: OpenModel, text: str, name: str) -> tuple[list[list[str]], int, int]:
    """The words of all lines; the line and the place of the word with this name."""
    lines = named_words(opened, text)
    for line, names in enumerate(lines):
        if name in names:
            words = [opened.tokenizer.splitter.words(each) for each in lines_of(text)]
            return words, line, names.index(name)
    raise ValueError(f"{opened.name} reads no word {name!r} in this text. Choose one of its words.")


def layer_cosines(opened: OpenModel, text: str, name: str) -> list[tuple[list[str], np.ndarray]]:
    """The words of each line, and the cosines `(layers, words)` of the chosen word with each."""
    words, line, place = chosen_use(opened, text, name)
    vectors = [normalize(each) for _, each in embed_sentences(words, opened.bilm, opened.tokenizer, layers="all")]
    chosen = vectors[line][:, place]
    return [(each, np.einsum("lwd,ld->lw", unit, chosen)) for each, unit in zip(words, vectors, strict=True)]


class SimilarUses(NamedTuple):
    """The uses of a word, in the text and then in the corpus, with their map."""

    uses: list[WordUse]
    query: int  # index of the chosen use
    nearest: list[tuple[int, float]]  # indices of uses in other sentences, and their cosines, best first
    points: np.ndarray  # in the plane of the first two principal components, `(uses, 2)`
    shares: np.ndarray  # of these two in the variance


def similar_uses(opened: OpenModel, text: str, name: str, layer: int, corpus: Corpus | None) -> SimilarUses:
    """The uses of a word that are nearest to the chosen one, in one layer. Case counts, as in `elmo neighbors`."""
    words, line, place = chosen_use(opened, text, name)
    word, split = words[line][place], opened.tokenizer.splitter.words
    pattern = re.escape(word)
    uses = list(find_uses(words, pattern))
    query = uses.index(WordUse(words[line], place))
    texts = () if corpus is None else corpus.texts()
    likely = (text for text in texts if word in " ".join(words_of(text)))  # splitting takes longer
    found = (use for use in find_uses((words_of(text, split) for text in likely), pattern) if use.words not in words)
    uses += islice(found, MOST_USES)
    layer = min(layer, opened.model.config.num_hidden_layers)
    vectors = normalize(use_vectors(uses, opened.bilm, opened.tokenizer, str(layer)))
    return SimilarUses(uses, query, nearest_uses(vectors, uses, query, SHOWN_USES), *principal_plane(vectors))


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
    lines = lines_of(text)
    arguments = (opened.model, opened.tokenizer, lines)
    top_k = min(SHOWN_PREDICTIONS, opened.model.config.vocab_size - 1)
    ways = [predict_texts(*arguments, top_k, direction) for direction in ("forward", "backward", "both")]
    found = []
    for scores, *candidates in zip(score_texts(*arguments), *ways, strict=True):
        words = scores[1:-1]
        ids, _ = opened.tokenizer.encode_words([each.word for each in words])
        tokens = opened.tokenizer.convert_ids_to_tokens(ids.tolist())
        guesses = ([each for _, each in way] for way in candidates)
        found.append(
            [
                Expectation(score.word, token, bits(score.forward), bits(score.backward), *best)
                for score, token, *best in zip(words, tokens, *guesses, strict=True)
            ]
        )
    return found


def bits(log_prob: float | None) -> float:
    """The surprise, -log2 of a probability that is given as its natural logarithm."""
    return -(log_prob or 0.0) / math.log(2)


def mixes_of(opened: OpenModel) -> dict[str, tuple[list[float], float]]:
    """At each place where ELMo enters a head: the share of each layer, and gamma."""
    mixes = opened.model.mixes() if opened.task else {}
    return {place: (mix.layer_weights().tolist(), mix.gamma.item()) for place, mix in mixes.items()}


def needs_pairs(opened: OpenModel) -> bool:
    return opened.task == "text-classification" and opened.model.config.classifier == "esim"


def head_pieces(opened: OpenModel, text: str, question: str | None = "", second: str | None = "") -> list[Piece]:
    """What a head finds in a text, a sentence a line, by its pipeline; with roles, a line for each predicate.

    `question` is for question answering, `second` for classifiers of pairs.
    """
    lines = lines_of(text)
    if needs_pairs(opened):
        lines_of(second, "second text")
    task = str(opened.task)
    run = transformers.pipeline(task, model=opened.model, tokenizer=opened.tokenizer)
    if task == "semantic-role-labeling":
        return role_pieces(run, lines)
    return pieces("\n".join(lines), FINDERS[task](run, lines, question or "", second or ""))


def role_pieces(run: Any, lines: list[str]) -> list[Piece]:
    if (most := max(len(run.tokenizer.splitter.words(line)) for line in lines)) > LONGEST_SENTENCE:
        limit = f"semantic roles are read of up to {LONGEST_SENTENCE}"
        raise ValueError(f"A line has {most:,} words; {limit}. Write each sentence on a line of its own.")
    shown: list[Piece] = []
    for line, found in zip(lines, run(lines), strict=True):
        for verb in found["verbs"]:
            spans = role_spans(verb["tags"])
            shown += [(f"{' '.join(found['words'][first:end])} ", role or None) for role, first, end in spans]
            shown.append(("\n", None))
        if not found["verbs"]:
            shown.append((f"{line} (no predicate)\n", None))
    return shown


def entity_spans(run: Any, lines: list[str], *_: str) -> list[LabeledSpan]:
    is_bio = any(str(name).startswith(("B-", "I-")) for name in run.model.config.id2label.values())
    found = zip(starts(lines), run(lines, aggregation_strategy="simple" if is_bio else "none"), strict=False)
    label = "entity_group" if is_bio else "entity"
    return [(start + each["start"], start + each["end"], each[label]) for start, some in found for each in some]


def answer_spans(run: Any, lines: list[str], question: str, _: str) -> list[LabeledSpan]:
    found = run(question=" ".join(lines_of(question, "question")), context="\n".join(lines))
    return [(found["start"], found["end"], f"{found['score']:.0%}")]


def class_spans(run: Any, lines: list[str], _: str, second: str) -> list[LabeledSpan]:
    pair = {"text_pair": " ".join(lines_of(second))} if second.strip() else {}
    found = [run({"text": line, **pair}) for line in lines]
    best = [each[0] if isinstance(each, list) else each for each in found]
    labels = [f"{each['label']} {each['score']:.0%}" for each in best]
    return [(start, start + len(line), label) for start, line, label in zip(starts(lines), lines, labels, strict=False)]


def cluster_spans(run: Any, lines: list[str], *_: str) -> list[LabeledSpan]:
    numbered = enumerate(run(lines)["clusters"], 1)
    return [(each["start"], each["end"], str(number)) for number, mentions in numbered for each in mentions]


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
        owners[span[0] : span[1]] = [span] * (span[1] - span[0])
    runs = groupby(zip(text, owners, strict=True), key=lambda pair: pair[1])
    return [("".join(letter for letter, _ in run), owner and owner[2]) for owner, run in runs]
