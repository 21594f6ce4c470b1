"""Scores of task heads: through `evaluate` where its metric can be loaded, and by the same definitions where not.

Tags that mark entities are read as `conlleval` and the default mode of `seqeval` do. What is divided by zero is 0, as
in `seqeval` and scikit-learn.
"""

import re
import string
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
from huggingface_hub import constants
from transformers.utils import logging

logger = logging.get_logger(__name__)

Scores = dict[str, Any]
Entity = tuple[str, int, int]

# Of `evaluate`'s metrics; `seqeval` reads these two letters of BILOU as unknown ones, and would lose entities.
BILOU = {"L": "E", "U": "S"}
# `O`, `B-PER`, a lone `B`, and any other letter before a type. A set of part-of-speech tags has tags that are none.
ENTITY_TAG = re.compile(r"O|[BIESLUM]|.-.+", re.DOTALL)
COMPUTED_HERE = "is computed here, by the same definition, and not by `evaluate`:"
SECONDS_TO_ANSWER = 5  # for the Hub; `evaluate` itself would wait up to 100 s, several times


def marks_entities(tags: Iterable[str]) -> bool:
    """Whether these are tags of entities (BIO, IOB1, IOBES, BILOU, BMES) and not, say, parts of speech."""
    return all(ENTITY_TAG.fullmatch(tag) for tag in tags)


def tagging_scores(
    predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]], are_entities: bool | None = None
) -> Scores:
    """Scores of a tagger.

    Args:
        predicted: tags of each sentence, without those of padding and markers.
        gold: the right ones.
        are_entities: whether the tags mark entities; by default, whether they look so (`marks_entities`).

    Returns:
        `accuracy` over tokens and, where the tags mark entities, `precision`, `recall` and `f1` over all entities, and
        `per_type`: the three and the `number` of gold entities by type. For other tags `macro_f1`, and `per_type` by
        tag.
    """
    check_sentences(predicted, gold)
    tags = sorted({tag for sentence in (*predicted, *gold) for tag in sentence})
    if marks_entities(tags) if are_entities is None else are_entities:
        return entity_scores(predicted, gold)
    ids = {tag: number for number, tag in enumerate(tags)}
    found, wanted = ([ids[tag] for sentence in sentences for tag in sentence] for sentences in (predicted, gold))
    scores = classification_scores(found, wanted, tags)
    return {"accuracy": scores["accuracy"], "macro_f1": scores["macro_f1"], "per_type": scores["per_label"]}


def entity_scores(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> Scores:
    theirs = through_evaluate("seqeval", without_bilou(predicted), without_bilou(gold))
    return own_entity_scores(predicted, gold) if theirs is None else scores_of_seqeval(theirs)


def own_entity_scores(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> Scores:
    # One sequence, as in `seqeval`: odd tags at the start of a sentence depend on there being one before it.
    found, wanted = ([tag for sentence in tags for tag in (*sentence, "O")] for tags in (predicted, gold))
    found_entities, wanted_entities = set(entities(found)), set(entities(wanted))
    counts = [
        Counter(kind for kind, _, _ in group)
        for group in (found_entities & wanted_entities, found_entities, wanted_entities)
    ]
    overall = rates(*(count.total() for count in counts))
    return {
        **{name: overall[name] for name in ("precision", "recall", "f1")},
        "accuracy": token_accuracy(predicted, gold),
        "per_type": {kind: rates(*(count[kind] for count in counts)) for kind in sorted(counts[1] | counts[2])},
    }


def scores_of_seqeval(found: Scores) -> Scores:
    per_type = {kind: numbers for kind, numbers in found.items() if isinstance(numbers, dict)}
    return {
        **{name: float(found[f"overall_{name}"]) for name in ("precision", "recall", "f1", "accuracy")},
        "per_type": {
            kind: {name: int(value) if name == "number" else float(value) for name, value in numbers.items()}
            for kind, numbers in per_type.items()
        },
    }


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence: type, first and last token.

    Any sequence of tags has a reading: an entity also starts at an `I` or `E` with nothing before it or after another
    type, and ends where the type changes. The type of a lone letter is `_`. L and U of BILOU are read as E and S.
    """
    found, start = [], 0
    last_letter, last_kind = "O", ""
    for place, tag in enumerate([*tags, "O"]):
        letter, kind = BILOU.get(tag[0], tag[0]), tag[1:].split("-", 1)[-1] or "_"
        changes = kind != last_kind
        if ends(last_letter, letter) or (changes and last_letter not in "O."):
            found.append((last_kind, start, place - 1))
        if starts(last_letter, letter) or (changes and letter not in "O."):
            start = place
        last_letter, last_kind = letter, kind
    return found


def ends(last_letter: str, letter: str) -> bool:
    return last_letter in "ES" or (last_letter in "BI" and letter in "BSO")


def starts(last_letter: str, letter: str) -> bool:
    return letter in "BS" or (last_letter in "ESO" and letter in "EI")


def without_bilou(sentences: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[BILOU.get(tag[0], tag[0]) + tag[1:] for tag in sentence] for sentence in sentences]


def classification_scores(predicted: Sequence[int], gold: Sequence[int], labels: Sequence[str]) -> Scores:
    """Scores of a classifier.

    Args:
        predicted: a class for each text, a number from 0.
        gold: the right ones.
        labels: names of the classes.

    Returns:
        `accuracy`; `macro_f1`, the mean over the labels that occur in `predicted` or `gold`; `per_label`: `precision`,
        `recall`, `f1` and `number` by label; `confusion`: how often label `i` was taken for label `j`.
    """
    check_labels(labels)
    found, wanted = (class_ids(values, name, labels) for values, name in ((predicted, "predicted"), (gold, "gold")))
    check_counts(found, wanted)
    confusion = np.zeros((len(labels), len(labels)), dtype=int)
    np.add.at(confusion, (wanted, found), 1)
    correct, columns, rows = np.diag(confusion), confusion.sum(0), confusion.sum(1)
    per_label = [rates(*counts) for counts in zip(correct.tolist(), columns.tolist(), rows.tolist(), strict=True)]
    macro = np.mean([rate["f1"] for rate, count in zip(per_label, columns + rows, strict=True) if count])
    return {
        "accuracy": headline("accuracy", found, wanted, own=np.mean(found == wanted)),
        "macro_f1": headline("f1", found, wanted, own=macro, average="macro"),
        "per_label": dict(zip(labels, per_label, strict=True)),
        "confusion": confusion.tolist(),
    }


def multilabel_scores(
    predicted: Sequence[Sequence[bool]] | np.ndarray, gold: Sequence[Sequence[bool]] | np.ndarray, labels: Sequence[str]
) -> Scores:
    """Scores of a classifier that gives each text any number of labels.

    Args:
        predicted: whether each text has each label, `(texts, labels)`.
        gold: the right answers.
        labels: their names.

    Returns:
        `micro_f1`; `macro_f1`, the mean over all labels; `subset_accuracy`, the share of texts with all labels right;
        `per_label` as in `classification_scores`.
    """
    check_labels(labels)
    found, wanted = (flags(values, name, labels) for values, name in ((predicted, "predicted"), (gold, "gold")))
    check_counts(found, wanted)
    counts = (found & wanted).sum(0), found.sum(0), wanted.sum(0)
    per_label = [rates(*(int(count) for count in column)) for column in zip(*counts, strict=True)]
    micro, macro = rates(*(int(count.sum()) for count in counts))["f1"], np.mean([rate["f1"] for rate in per_label])
    kind = "multilabel"
    exact = (found == wanted).all(1).mean()
    return {
        "micro_f1": headline("f1", found, wanted, kind, own=micro, average="micro"),
        "macro_f1": headline("f1", found, wanted, kind, own=macro, average="macro"),
        "subset_accuracy": headline("accuracy", found, wanted, kind, own=exact),
        "per_label": dict(zip(labels, per_label, strict=True)),
    }


def regression_scores(predicted: Sequence[float], gold: Sequence[float]) -> Scores:
    """`pearson` and `spearman` (ties share their mean rank), 0 where one side is constant, and `mse`."""
    found, wanted = (figures(values, name) for values, name in ((predicted, "predicted"), (gold, "gold")))
    check_counts(found, wanted)
    return {
        "pearson": correlation(found, wanted),
        "spearman": correlation(ranks(found), ranks(wanted)),
        "mse": float(np.mean((found - wanted) ** 2)),
    }


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    if np.ptp(first) == 0 or np.ptp(second) == 0:  # their deviations are rounding errors
        return 0.0
    deviations = [values - values.mean() for values in (first, second)]
    first, second = (values / np.linalg.norm(values) for values in deviations)
    return float(np.clip(first @ second, -1, 1))


def ranks(values: np.ndarray) -> np.ndarray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def answer_scores(
    predicted: Sequence[str], gold: Sequence[Sequence[str]], types: Sequence[str] | None = None
) -> Scores:
    """Scores of answers to questions, as SQuAD's own script has them: without case, punctuation and articles.

    Args:
        predicted: an answer to each question, "" for none.
        gold: the right ones, any of which will do; of a question that has no answer, an empty list.
        types: of the questions, to count them apart.

    Returns:
        `f1` of the words and `exact_match`, means over all questions. Where some have no answer, `has_answer_f1`,
        `has_answer_exact_match` and `no_answer_accuracy` too. With `types`, `per_type`: both, and the `number`.
    """
    check_counts(predicted, gold, "questions")
    has_answer = np.array([bool(answers) for answers in gold])
    is_second = not has_answer.all()
    pairs = zip(predicted, gold, strict=True)
    exact, f1 = np.array([best_match(*pair, is_second) for pair in pairs]).T
    theirs = squad_of_evaluate(predicted, gold, is_second)
    scores: Scores = {"f1": float(f1.mean()), "exact_match": float(exact.mean())} if theirs is None else theirs
    if is_second and has_answer.any():
        scores["has_answer_f1"] = float(f1[has_answer].mean())
        scores["has_answer_exact_match"] = float(exact[has_answer].mean())
    if is_second:
        scores["no_answer_accuracy"] = float(exact[~has_answer].mean())
    if types is not None:
        chosen = {kind: np.array([each == kind for each in types]) for kind in sorted(set(types))}
        scores["per_type"] = {
            kind: {"f1": float(f1[rows].mean()), "exact_match": float(exact[rows].mean()), "number": int(rows.sum())}
            for kind, rows in chosen.items()
        }
    return scores


def squad_of_evaluate(predicted: Sequence[str], gold: Sequence[Sequence[str]], is_second: bool) -> Scores | None:
    """`f1` and `exact_match` from 0 to 1."""
    extra = {"no_answer_probability": 0.0} if is_second else {}
    found = [{"id": str(number), "prediction_text": text, **extra} for number, text in enumerate(predicted)]
    wanted = [
        {"id": str(number), "answers": {"text": list(answers), "answer_start": [0] * len(answers)}}
        for number, answers in enumerate(gold)
    ]
    theirs = through_evaluate("squad_v2" if is_second else "squad", found, wanted)
    if theirs is None:
        return None
    return {"f1": theirs["f1"] / 100, "exact_match": theirs["exact" if is_second else "exact_match"] / 100}


def best_match(predicted: str, gold: Sequence[str], is_second: bool) -> tuple[float, float]:
    """Exact match and F1 with the answers that are closest.

    The second edition knows questions without an answer: there, gold answers of which normalising leaves nothing are
    left out, and nothing equals nothing.
    """
    answers = [normalized(answer) for answer in gold]
    if is_second:
        answers = [answer for answer in answers if answer] or [""]
    found = normalized(predicted)
    return (
        max(float(found == answer) for answer in answers),
        max(word_f1(found.split(), answer.split(), is_second) for answer in answers),
    )


def normalized(answer: str) -> str:
    """Lower case, without ASCII punctuation, articles and further spaces."""
    letters = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def word_f1(found: Sequence[str], wanted: Sequence[str], is_second: bool) -> float:
    if is_second and not (found and wanted):
        return float(found == wanted)
    common = (Counter(found) & Counter(wanted)).total()
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def rates(correct: int, predicted: int, gold: int) -> Scores:
    """Precision, recall and F1 of counts."""
    return {
        "precision": correct / predicted if predicted else 0.0,
        "recall": correct / gold if gold else 0.0,
        "f1": 2 * correct / (predicted + gold) if predicted + gold else 0.0,
        "number": gold,
    }


def token_accuracy(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> float:
    pairs = zip(predicted, gold, strict=True)
    right = [tag == other for sentence, tags in pairs for tag, other in zip(sentence, tags, strict=True)]
    return sum(right) / len(right)


def headline(
    name: str, found: np.ndarray, wanted: np.ndarray, config_name: str | None = None, *, own: float, **options: Any
) -> float:
    theirs = through_evaluate(name, found.astype(int), wanted.astype(int), config_name, **options)
    return float(own if theirs is None else theirs[name])


def through_evaluate(
    name: str, found: Any, wanted: Any, config_name: str | None = None, **options: Any
) -> Scores | None:
    metric = evaluate_metric(name, config_name)
    if metric is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # every zero division would tell of itself, at every evaluation
            return metric.compute(predictions=found, references=wanted, **options)
    except (AttributeError, TypeError, ValueError) as error:  # `f1` of evaluate 0.4.3 does, with scikit-learn 1.6
        logger.warning_once(f"{name} {COMPUTED_HERE} it does not suit a library here: {type(error).__name__}: {error}.")
        return None


@cache  # asked at every evaluation
def evaluate_metric(name: str, config_name: str | None = None) -> Any:
    """A metric of `evaluate`, or `None` where it cannot be loaded; the log says which, and why.

    The Hub is left alone where `HF_EVALUATE_OFFLINE` or `HF_HUB_OFFLINE` is set, and where it does not answer at once:
    then `evaluate` has what it loaded in earlier runs.
    """
    why = ""
    try:
        import evaluate

        why = why_offline()
        with offline(evaluate.config) if why else nullcontext():
            metric = evaluate.load(name, config_name, module_type="metric", keep_in_memory=True)
    except (ImportError, OSError, SyntaxError) as error:  # the last: a network's login page instead of the metric
        reason = f"{why}, and it has no copy" if why and isinstance(error, OSError) else error
        logger.warning(f"{name} {COMPUTED_HERE} {reason}.")
        return None
    logger.info(f"{name} is computed by `evaluate` {evaluate.__version__}.")
    return metric


@cache
def why_offline() -> str:
    import requests  # by which `evaluate` asks, and so with the same proxies
    from evaluate import config

    if constants.HF_HUB_OFFLINE or config.HF_EVALUATE_OFFLINE:
        return "offline mode is set"
    try:
        requests.head(config.HF_ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except OSError as error:
        return f"{config.HF_ENDPOINT} does not answer ({type(error).__name__})"
    return ""


@contextmanager
def offline(config: Any) -> Iterator[None]:
    """`evaluate` reads only `HF_EVALUATE_OFFLINE`, once, and has no argument for it."""
    before, config.HF_EVALUATE_OFFLINE = config.HF_EVALUATE_OFFLINE, True
    try:
        yield
    finally:
        config.HF_EVALUATE_OFFLINE = before


def check_sentences(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]):
    check_counts(predicted, gold, "sentences")
    for number, (found, wanted) in enumerate(zip(predicted, gold, strict=True)):
        if len(found) != len(wanted):
            raise ValueError(
                f"Sentence {number} has {len(found)} predicted and {len(wanted)} gold tags; pass a tag for each token, "
                "without padding and markers."
            )
        odd = [tag for tag in (*found, *wanted) if not isinstance(tag, str) or not tag]
        if odd:
            raise ValueError(f"Sentence {number} has the tag {odd[0]!r}; pass names of tags such as 'B-PER' or 'NN'.")
    if not any(map(len, gold)):
        raise ValueError(f"The {len(gold)} sentences have no tokens; pass the tags of at least one.")


def check_counts(predicted: Sized, gold: Sized, unit: str = "texts"):
    if len(predicted) != len(gold):
        raise ValueError(
            f"Received predictions for {len(predicted)} {unit} and gold answers for {len(gold)}; pass both for all."
        )
    if not len(gold):
        raise ValueError(f"Received no {unit}; pass at least one.")


def check_labels(labels: Sequence[str]):
    if len(set(labels)) != len(labels) or not len(labels):
        raise ValueError(f"Received labels {list(labels)}; pass the name of each class, all different.")


def class_ids(values: Sequence[int], name: str, labels: Sequence[str]) -> np.ndarray:
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} has shape {ids.shape} and type {ids.dtype}; pass one class id (an int) for each text."
        )
    wrong = ids[(ids < 0) | (ids >= len(labels))]
    if wrong.size:
        raise ValueError(
            f"{name} holds the class {wrong[0]}; pass numbers from 0 to {len(labels) - 1}, as in `labels`."
        )
    return ids.astype(int)


def flags(values: Sequence[Sequence[bool]] | np.ndarray, name: str, labels: Sequence[str]) -> np.ndarray:
    found = np.asarray(values)
    if not found.size:
        return found.reshape(0, len(labels)).astype(bool)
    if found.ndim != 2 or found.shape[1] != len(labels):
        raise ValueError(f"{name} has shape {found.shape}; pass (texts, {len(labels)}), a column for each label.")
    if not np.isin(found, (0, 1)).all():
        raise ValueError(f"{name} holds {found[~np.isin(found, (0, 1))][0]}; pass True or False, not a score.")
    return found.astype(bool)


def figures(values: Sequence[float], name: str) -> np.ndarray:
    found = np.asarray(values, dtype=float)
    if found.ndim != 1:
        raise ValueError(f"{name} has shape {found.shape}; pass one number for each text.")
    if not np.isfinite(found).all():
        raise ValueError(f"{name} holds {found[~np.isfinite(found)][0]}; pass finite numbers.")
    return found
