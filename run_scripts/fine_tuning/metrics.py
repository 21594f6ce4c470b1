"""Scores of task heads: entities by seqeval, classes by scikit-learn, correlations by scipy, answers by SQuAD's rules.

These libraries are imported with the first score, since they take a second to load. Division by zero gives 0.

SQuAD's rules are written out here. torchmetrics computes them in single precision, and differs from SQuAD's own script
where an answer consists of articles and punctuation only.
"""

import re
import string
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

Scores = dict[str, Any]

# `O`, `B-PER` or a lone `B`. Part-of-speech tag sets have tags of other forms, such as `N-sg`.
ENTITY_TAG = re.compile(r"O|[BIESLUM](-.+)?", re.DOTALL)
# seqeval does not know these letters of BILOU and BMES and would lose entities; IOBES has the same tags by others.
TO_IOBES = {"L": "E", "U": "S", "M": "I"}
RATES = ("precision", "recall", "f1", "number")


def marks_entities(tags: Iterable[str]) -> bool:
    """Whether the tags mark entities (BIO, IOB1, IOBES, BILOU, BMES), and not parts of speech, for example."""
    return all(ENTITY_TAG.fullmatch(tag) for tag in tags)


def tagging_scores(
    predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]], are_entities: bool | None = None
) -> Scores:
    """Scores of the tags of sentences, without padding and markers. `are_entities` defaults to `marks_entities`.

    Returns:
        `accuracy` over tokens. For entities also `precision`, `recall` and `f1` over all entities, and `per_type`: the
        three rates and the `number` of gold entities of each type. For other tags `macro_f1`, and `per_type` by tag.
    """
    tags = sorted(set(chain(*predicted, *gold)))
    if marks_entities(tags) if are_entities is None else are_entities:
        return _entity_scores(predicted, gold)
    per_tag = _rates(_flat(predicted), _flat(gold), tags)
    macro_f1 = _mean([rates["f1"] for rates in per_tag])
    accuracy = _mean(_flat(predicted) == _flat(gold))
    return {"accuracy": accuracy, "macro_f1": macro_f1, "per_type": dict(zip(tags, per_tag, strict=True))}


def _entity_scores(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> Scores:
    """Entities are read as `conlleval` and seqeval's default mode do, which give every tag sequence a reading."""
    from seqeval.metrics import classification_report

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about unusual tags and absent types, at every evaluation
        report = classification_report(_iobes(gold), _iobes(predicted), output_dict=True, zero_division=0)
    per_type = {}
    for kind, rates in report.items():
        if kind not in ("macro avg", "weighted avg"):
            numbers = (value.item() for value in rates.values())
            per_type[kind] = dict(zip(RATES, numbers, strict=True))
    overall = per_type.pop("micro avg")
    del overall["number"]
    return {**overall, "accuracy": _mean(_flat(predicted) == _flat(gold)), "per_type": per_type}


def _iobes(sentences: Sequence[Sequence[str]]) -> list[list[str]]:
    def converted(tag: str) -> str:
        letter = tag[0]
        return TO_IOBES.get(letter, letter) + tag[1:]

    return [list(map(converted, tags)) for tags in sentences]


def scored_entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Type, first word and end of each entity of a sentence, as the scores count them."""
    from seqeval.metrics.sequence_labeling import get_entities

    (converted,) = _iobes([tags])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about unusual tags
        return [(kind, first, last + 1) for kind, first, last in get_entities(converted)]


def _flat(sentences: Sequence[Sequence[str]]) -> np.ndarray:
    return np.array(list(chain.from_iterable(sentences)))


def classification_scores(predicted: Sequence[int], gold: Sequence[int], labels: Sequence[str]) -> Scores:
    """Scores of a classifier, from the class of each text, a number from 0.

    Returns:
        `accuracy`; `macro_f1`, the mean over the labels that occur in `predicted` or `gold`; `per_label`: `precision`,
        `recall`, `f1` and `number` of each label; `confusion[i][j]`: texts of label `i` with the prediction `j`.
    """
    from sklearn.metrics import confusion_matrix, f1_score

    predicted_ids = np.array(predicted)
    gold_ids = np.array(gold)
    ids = range(len(labels))
    return {
        "accuracy": _mean(predicted_ids == gold_ids),
        "macro_f1": float(f1_score(gold_ids, predicted_ids, average="macro", zero_division=0)),
        "per_label": dict(zip(labels, _rates(predicted_ids, gold_ids, ids), strict=True)),
        "confusion": confusion_matrix(gold_ids, predicted_ids, labels=ids).tolist(),
    }


def multilabel_scores(
    predicted: Sequence[Sequence[bool]] | np.ndarray, gold: Sequence[Sequence[bool]] | np.ndarray, labels: Sequence[str]
) -> Scores:
    """Scores of a classifier that gives each text any number of labels, from `(texts, labels)`.

    Returns:
        `micro_precision`, `micro_recall` and `micro_f1`; `macro_f1`, the mean over all labels; `subset_accuracy`, the
        share of texts whose labels are all right; `per_label` as in `classification_scores`.
    """
    predicted = np.array(predicted, dtype=bool)
    gold = np.array(gold, dtype=bool)
    per_label = []
    for predicted_column, gold_column in zip(predicted.T, gold.T, strict=True):
        # One label at a time: scikit-learn takes a single column for two classes.
        per_label += _rates(predicted_column, gold_column, [True])
    overall = _rates(predicted.ravel(), gold.ravel(), [True])[0]
    return {
        "micro_f1": overall["f1"],
        "micro_precision": overall["precision"],
        "micro_recall": overall["recall"],
        "macro_f1": _mean([rates["f1"] for rates in per_label]),
        "subset_accuracy": _mean((predicted == gold).all(1)),
        "per_label": dict(zip(labels, per_label, strict=True)),
    }


def _rates(predicted: np.ndarray, gold: np.ndarray, classes: Sequence[Any]) -> list[Scores]:
    """Precision, recall, F1 and gold number of each class."""
    from sklearn.metrics import precision_recall_fscore_support

    *rates, numbers = precision_recall_fscore_support(gold, predicted, labels=classes, zero_division=0)
    columns = [*rates, numbers.astype(int)]  # scikit-learn counts in floats where nothing is right
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [dict(zip(RATES, row, strict=True)) for row in rows]


def regression_scores(predicted: Sequence[float], gold: Sequence[float]) -> Scores:
    """`pearson` and `spearman` correlations, 0 where one side is constant, and the mean squared error `mse`."""
    from scipy.stats import pearsonr, spearmanr

    predicted_values = np.array(predicted, dtype=float)
    gold_values = np.array(gold, dtype=float)
    if not np.isfinite(predicted_values).all():
        raise ValueError("A predicted number is not finite: training diverged. Pass a smaller learning rate.")
    scores = {"pearson": 0.0, "spearman": 0.0, "mse": _mean((predicted_values - gold_values) ** 2)}
    if np.ptp(predicted_values) and np.ptp(gold_values):
        scores["pearson"] = float(pearsonr(predicted_values, gold_values).statistic)
        scores["spearman"] = float(spearmanr(predicted_values, gold_values).statistic)
    return scores


def answer_scores(
    predicted: Sequence[str], gold: Sequence[Sequence[str]], types: Sequence[str] | None = None
) -> Scores:
    """Scores of answers to questions, as computed by SQuAD's own script.

    Args:
        predicted: answer to each question, "" for none.
        gold: answers to each question, empty if there is none; the closest one counts.
        types: of each question, to score them apart.

    Returns:
        `f1` over words and `exact_match`, means over all questions. If some questions have no answer, also
        `has_answer_f1`, `has_answer_exact_match` and `no_answer_accuracy`. With `types`, also `per_type`: `f1`,
        `exact_match` and `number` of each type.
    """
    has_answer = np.array([bool(answers) for answers in gold])
    is_squad_2 = not has_answer.all()
    matches = []
    for answer, gold_answers in zip(predicted, gold, strict=True):
        matches.append(_answer_match(answer, gold_answers, is_squad_2))
    exact, f1 = np.array(matches).T

    def means(questions: Any) -> Scores:
        return {"f1": _mean(f1[questions]), "exact_match": _mean(exact[questions])}

    scores = means(slice(None))
    if is_squad_2 and has_answer.any():
        scores |= {f"has_answer_{name}": value for name, value in means(has_answer).items()}
    if is_squad_2:
        scores["no_answer_accuracy"] = _mean(exact[~has_answer])
    if types is not None:
        scores["per_type"] = {}
        for kind in sorted(set(types)):
            has_type = np.array(types) == kind
            scores["per_type"][kind] = {**means(has_type), "number": int(has_type.sum())}
    return scores


def _answer_match(predicted: str, gold: Sequence[str], is_squad_2: bool) -> tuple[float, float]:
    """Exact match and F1 with the closest gold answers.

    SQuAD 2.0 ignores gold answers that normalize to nothing, and no answer matches no answer.
    """
    answers = [normalized_answer(answer) for answer in gold]
    if is_squad_2:
        answers = [answer for answer in answers if answer] or [""]
    normalized = normalized_answer(predicted)
    words = normalized.split()
    f1 = max(_word_f1(words, answer.split(), is_squad_2) for answer in answers)
    return float(normalized in answers), f1


def normalized_answer(answer: str) -> str:
    """The answer in lower case, without ASCII punctuation, articles and extra spaces."""
    letters = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def _word_f1(predicted: Sequence[str], gold: Sequence[str], is_squad_2: bool) -> float:
    if is_squad_2 and not (predicted and gold):
        return float(predicted == gold)
    common = (Counter(predicted) & Counter(gold)).total()
    return 2 * common / (len(predicted) + len(gold)) if common else 0.0


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values))
