import importlib
import json
import random
import shutil
import socket
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from modeling_elmo.run_scripts.fine_tuning import metrics
from modeling_elmo.run_scripts.fine_tuning.metrics import (
    answer_scores,
    classification_scores,
    entities,
    marks_entities,
    multilabel_scores,
    normalized,
    regression_scores,
    tagging_scores,
)

evaluate_metric = metrics.evaluate_metric
why_offline = metrics.why_offline


@pytest.fixture(autouse=True)
def without_evaluate(monkeypatch):
    """Most tests are of our own figures, and `evaluate` takes seconds to import."""
    monkeypatch.setattr(metrics, "evaluate_metric", lambda *_: None)


def random_tags(rng: random.Random, letters: str, kinds: list[str], lone: str, longest: int) -> list[str]:
    """Up to `longest` tags, of these letters and types; the letters in `lone` also come without a type."""

    def tag() -> str:
        letter = rng.choice(letters)
        return (
            "O" if letter == "O" else rng.choice([letter] * (letter in lone) + [f"{letter}-{kind}" for kind in kinds])
        )

    return [tag() for _ in range(rng.randint(0, longest))]


LETTERS = {"BIO": "BIO", "IOB1": "IIIBO", "IOBES": "BIOES", "odd ones": "BIOESX.M"}


@pytest.mark.parametrize("letters", LETTERS.values(), ids=LETTERS)
def test_entities_are_those_of_seqeval(letters):
    get_entities = pytest.importorskip("seqeval.metrics.sequence_labeling").get_entities
    rng = random.Random(1)
    for _ in range(1500):
        tags = random_tags(rng, letters, ["PER", "LOC", "a-b", "-"], lone=letters, longest=9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert entities(tags) == get_entities(tags), tags


@pytest.mark.parametrize("letters", LETTERS.values(), ids=LETTERS)
def test_tagging_scores_are_those_of_seqeval(letters):
    metrics = pytest.importorskip("seqeval.metrics")
    rng = random.Random(2)
    for _ in range(150):
        kinds, size = ["PER", "LOC", "a-b"], rng.randint(1, 6)
        gold = [*(random_tags(rng, letters, kinds, lone="BIESM", longest=12) for _ in range(size)), ["O"]]
        other = ["O", "B-PER", "I-LOC"]
        predicted = [[tag if rng.random() < 0.7 else rng.choice(other) for tag in tags] for tags in gold]
        found = tagging_scores(predicted, gold)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = metrics.classification_report(gold, predicted, output_dict=True)
            assert found["accuracy"] == pytest.approx(metrics.accuracy_score(gold, predicted))
        for average in ("macro avg", "weighted avg"):
            del report[average]
        ours = {"micro avg": found, **found["per_type"]}
        assert ours.keys() == report.keys()
        for kind, numbers in report.items():
            for name, theirs in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
                assert ours[kind][name] == pytest.approx(numbers[theirs], abs=1e-12)
            assert kind == "micro avg" or ours[kind]["number"] == numbers["support"]


def test_bilou_is_read_as_the_scheme_and_not_by_its_letters():
    pytest.importorskip("seqeval")
    from seqeval.metrics import f1_score, precision_score, recall_score
    from seqeval.scheme import BILOU

    def tags(rng: random.Random) -> list[str]:
        spans = [[], ["O"], ["U-A"], ["U-B"], ["B-A", "L-A"], ["B-B", "I-B", "L-B"]]
        return [tag for span in rng.choices(spans, k=6) for tag in span] + ["O"] * 18

    rng = random.Random(3)
    options = {"mode": "strict", "scheme": BILOU, "zero_division": 0}
    for _ in range(100):
        gold, predicted = ([tags(rng)[:18] for _ in range(4)] for _ in range(2))
        found = tagging_scores(predicted, gold)
        assert found["precision"] == pytest.approx(precision_score(gold, predicted, **options))
        assert found["recall"] == pytest.approx(recall_score(gold, predicted, **options))
        assert found["f1"] == pytest.approx(f1_score(gold, predicted, **options))
    assert entities(["U-A", "U-A", "B-A", "L-A", "B-A", "I-A", "L-A"]) == [
        ("A", 0, 0),
        ("A", 1, 1),
        ("A", 2, 3),
        ("A", 4, 6),
    ]


def test_tagging_scores_by_hand():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC"]]
    predicted = [["B-PER", "I-PER", "B-LOC", "O"], ["O", "I-LOC"]]  # PER; LOC moved; LOC though it starts with I
    assert tagging_scores(predicted, gold) == {
        "precision": pytest.approx(2 / 3),
        "recall": pytest.approx(2 / 3),
        "f1": pytest.approx(2 / 3),
        "accuracy": pytest.approx(3 / 6),
        "per_type": {
            "LOC": {"precision": 0.5, "recall": 0.5, "f1": 0.5, "number": 2},
            "PER": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "number": 1},
        },
    }


def test_an_entity_does_not_go_on_in_the_next_sentence():
    assert tagging_scores([["B-A"], ["I-A"]], [["B-A"], ["I-A"]])["per_type"]["A"]["number"] == 2


def test_no_entities_are_no_error():
    nothing = {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert tagging_scores([["O", "O"], []], [["O", "O"], []]) == {**nothing, "accuracy": 1.0, "per_type": {}}
    spurious = tagging_scores([["O", "S-A"]], [["O", "O"]])
    assert spurious == {**nothing, "accuracy": 0.5, "per_type": {"A": {**nothing, "number": 0}}}


def test_parts_of_speech_are_scored_by_tag():
    gold = [["DT", "NN", "VB", "."], ["NN", "B-X"]]
    predicted = [["DT", "NN", "NN", "."], ["JJ", "B-X"]]
    found = tagging_scores(predicted, gold)
    f1 = {"DT": 1, "NN": 0.5, "VB": 0, ".": 1, "JJ": 0, "B-X": 1}
    assert found.keys() == {"accuracy", "macro_f1", "per_type"}
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert found["macro_f1"] == pytest.approx(sum(f1.values()) / 6)
    assert {tag: rates["f1"] for tag, rates in found["per_type"].items()} == f1
    assert found["per_type"]["NN"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "number": 2}


@pytest.mark.parametrize(
    "tags, expected",
    [
        ("O", True),
        ("O B-PER I-PER", True),
        ("S-X E-X U-X L-X M-X B-a-b O", True),
        ("B M E S", True),
        ("B I O", True),
        ("NN VB O", False),
        ("O PER", False),
        (". , DT", False),
    ],
)
def test_which_tags_mark_entities(tags, expected):
    assert marks_entities(tags.split()) is expected
    row = [tags.split()]
    assert ("f1" in tagging_scores(row, row)) is expected
    for said in (True, False):
        assert ("f1" in tagging_scores(row, row, are_entities=said)) is said


@pytest.mark.parametrize(
    "predicted, gold, message",
    [
        ([["O"]], [["O"], ["O"]], "predictions for 1 sentences and gold answers for 2; pass both"),
        ([["O"], ["O"]], [["O"], ["O", "O"]], "Sentence 1 has 1 predicted and 2 gold tags; pass a tag for each token"),
        ([], [], "Received no sentences; pass at least one"),
        ([[], []], [[], []], "The 2 sentences have no tokens; pass the tags"),
        ([["O", ""]], [["O", "O"]], "Sentence 0 has the tag ''; pass names of tags"),
        ([[3]], [["O"]], "Sentence 0 has the tag 3; pass names of tags"),
    ],
)
def test_tags_that_do_not_fit(predicted, gold, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        tagging_scores(predicted, gold)


def test_classification_scores_by_hand():
    found = classification_scores([0, 0, 1, 1], [0, 1, 1, 1], ["no", "yes", "never"])
    assert found == {
        "accuracy": 0.75,
        "macro_f1": pytest.approx((2 / 3 + 4 / 5) / 2),  # "never" occurs nowhere, and does not count
        "per_label": {
            "no": {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "number": 1},
            "yes": {"precision": 1.0, "recall": pytest.approx(2 / 3), "f1": pytest.approx(4 / 5), "number": 3},
            "never": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "number": 0},
        },
        "confusion": [[1, 0, 0], [1, 2, 0], [0, 0, 0]],
    }
    assert json.loads(json.dumps(found)) == found


@pytest.mark.filterwarnings("ignore:A single label was found")
def test_classification_scores_are_those_of_sklearn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(1)
    for classes in (1, 2, 3, 7):
        labels = [f"label {number}" for number in range(classes)]
        for size in (1, 2, 5, 40):
            predicted, gold = rng.integers(classes, size=(2, size))
            found = classification_scores(predicted.tolist(), gold, labels)
            assert found["accuracy"] == pytest.approx(metrics.accuracy_score(gold, predicted))
            expected = metrics.f1_score(gold, predicted, average="macro", zero_division=0)
            assert found["macro_f1"] == pytest.approx(expected)
            assert found["confusion"] == metrics.confusion_matrix(gold, predicted, labels=range(classes)).tolist()
            columns = metrics.precision_recall_fscore_support(gold, predicted, labels=range(classes), zero_division=0)
            for rates, column in zip(found["per_label"].values(), zip(*columns, strict=True), strict=True):
                assert list(rates.values()) == pytest.approx(column)


def test_multilabel_scores_by_hand():
    found = multilabel_scores(
        [[1, 0, 0], [1, 1, 0]], np.array([[True, False, False], [False, True, False]]), ["a", "b", "c"]
    )
    assert found["micro_f1"] == pytest.approx(4 / 5)
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found["subset_accuracy"] == 0.5
    assert found["per_label"]["a"] == {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "number": 1}


def test_multilabel_scores_are_those_of_sklearn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(2)
    for size in (1, 3, 30):
        predicted, gold = rng.random((2, size, 4)) < 0.3
        found = multilabel_scores(predicted, gold, list("abcd"))
        for average in ("micro", "macro"):
            expected = metrics.f1_score(gold, predicted, average=average, zero_division=0)
            assert found[f"{average}_f1"] == pytest.approx(expected)
        assert found["subset_accuracy"] == pytest.approx(metrics.accuracy_score(gold, predicted))


def test_regression_scores_by_hand():
    found = regression_scores([1, 2, 3, 4], [1, 4, 9, 16])
    assert found["spearman"] == pytest.approx(1.0)
    assert found["pearson"] == pytest.approx(25 / np.sqrt(5 * 129))
    assert found["mse"] == pytest.approx((0 + 4 + 36 + 144) / 4)
    constant = regression_scores([0.1, 0.1, 0.1], [1, 2, 3])
    assert constant == {"pearson": 0.0, "spearman": 0.0, "mse": pytest.approx((0.81 + 3.61 + 8.41) / 3)}


def test_regression_scores_are_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(3)
    for size in (3, 10, 200):
        predicted, gold = rng.integers(5, size=(2, size)) + [[0.1], [1000.0]]  # with ties
        predicted[0], gold[0] = 7, 2000
        found = regression_scores(predicted, gold)
        assert found["pearson"] == pytest.approx(stats.pearsonr(predicted, gold).statistic)
        assert found["spearman"] == pytest.approx(stats.spearmanr(predicted, gold).statistic)


@pytest.mark.parametrize(
    "scores, arguments, message",
    [
        (classification_scores, ([0], [0, 1], ["a", "b"]), "predictions for 1 texts and gold answers for 2; pass both"),
        (classification_scores, ([], [], ["a", "b"]), "Received no texts; pass at least one"),
        (classification_scores, ([0], [-100], ["a", "b"]), "gold holds the class -100; pass numbers from 0 to 1"),
        (classification_scores, ([2], [0], ["a", "b"]), "predicted holds the class 2; pass numbers from 0 to 1"),
        (
            classification_scores,
            ([0.5], [0], ["a", "b"]),
            "predicted has shape (1,) and type float64; pass one class id",
        ),
        (classification_scores, ([[0, 1]], [0], ["a", "b"]), "predicted has shape (1, 2) and type int64; pass one"),
        (
            classification_scores,
            ([0], [0], ["a", "a"]),
            "labels ['a', 'a']; pass the name of each class, all different",
        ),
        (multilabel_scores, ([[1]], [[1, 0]], ["a", "b"]), "predicted has shape (1, 1); pass (texts, 2)"),
        (multilabel_scores, ([[0.7, 0]], [[1, 0]], ["a", "b"]), "predicted holds 0.7; pass True or False"),
        (multilabel_scores, ([], [], ["a", "b"]), "Received no texts; pass at least one"),
        (regression_scores, ([1, 2], [1]), "predictions for 2 texts and gold answers for 1; pass both"),
        (regression_scores, ([[1], [2]], [1, 2]), "predicted has shape (2, 1); pass one number for each text"),
        (regression_scores, ([1, 2], [1, float("nan")]), "gold holds nan; pass finite numbers"),
        (regression_scores, ([], []), "Received no texts; pass at least one"),
    ],
)
def test_answers_that_do_not_fit(scores, arguments, message):
    with pytest.raises(ValueError) as error:
        scores(*arguments)
    assert message in str(error.value)


# Stand-ins for the metrics on the Hub: the same inputs and the same libraries behind them.
MODULES = {
    "seqeval": """
from seqeval.metrics import accuracy_score, classification_report

class Seqeval(evaluate.Metric):
    def _info(self):
        return info(datasets.Sequence(datasets.Value("string")))

    def _compute(self, predictions, references):
        report = classification_report(references, predictions, output_dict=True)
        names = {"precision": "precision", "recall": "recall", "f1-score": "f1", "support": "number"}
        report = {kind: {names[name]: row[name] for name in names} for kind, row in report.items()}
        del report["macro avg"], report["weighted avg"]
        overall = report.pop("micro avg")
        del overall["number"]
        accuracy = accuracy_score(references, predictions)
        return {**report, **{f"overall_{name}": value for name, value in overall.items()}, "overall_accuracy": accuracy}
""",
    "accuracy": """
from sklearn.metrics import accuracy_score

class Accuracy(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int32")
        return info(datasets.Sequence(number) if self.config_name == "multilabel" else number)

    def _compute(self, predictions, references):
        return {"accuracy": float(accuracy_score(references, predictions))}
""",
    "f1": """
from sklearn.metrics import f1_score

class F1(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int32")
        return info(datasets.Sequence(number) if self.config_name == "multilabel" else number)

    def _compute(self, predictions, references, average="binary"):
        return {"f1": float(f1_score(references, predictions, average=average))}
""",
    "squad": """
from torchmetrics.functional.text import squad

class Squad(evaluate.Metric):
    def _info(self):
        return info(*of_answers())

    def _compute(self, predictions, references):
        return {name: float(score) for name, score in squad(predictions, references).items()}
""",
    "squad_v2": """
from torchmetrics.functional.text import squad

class SquadV2(evaluate.Metric):
    def _info(self):
        return info(*of_answers(no_answer_probability=datasets.Value("float32")))

    def _compute(self, predictions, references):
        for reference in references:
            reference["answers"]["text"] = reference["answers"]["text"] or [""]
        scores = squad(predictions, references)
        return {"exact": float(scores["exact_match"]), "f1": float(scores["f1"])}
""",
}
HEADER = """
import datasets
import evaluate

def info(predictions, references=None):
    features = datasets.Features({"predictions": predictions, "references": references or predictions})
    return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

def of_answers(**more):
    string = datasets.Value("string")
    answers = datasets.Sequence({"text": string, "answer_start": datasets.Value("int32")})
    return {"id": string, "prediction_text": string, **more}, {"id": string, "answers": answers}
"""


@pytest.fixture
def evaluate(monkeypatch, caplog):
    """`evaluate` as if nothing had been loaded yet, with the functions that load it."""
    caplog.set_level("INFO", logger=metrics.__name__)
    module = pytest.importorskip("evaluate")
    monkeypatch.setattr(metrics, "evaluate_metric", evaluate_metric)
    for function in (evaluate_metric, why_offline):
        function.cache_clear()
    yield module
    for function in (evaluate_metric, why_offline):
        function.cache_clear()


@pytest.fixture
def network(evaluate, monkeypatch):
    """As if the environment did not forbid it; the tests themselves reach only this machine."""
    monkeypatch.setattr(metrics.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", False)


@pytest.fixture
def cached_modules(evaluate):
    """The metrics in the cache of `evaluate`, as an earlier run with a network leaves them."""
    for name in ("seqeval", "sklearn", "torchmetrics"):
        pytest.importorskip(name)
    folder = Path(evaluate.config.HF_MODULES_CACHE, "evaluate_modules", "metrics")
    for name, text in MODULES.items():
        file = folder / f"evaluate-metric--{name}" / ("0" * 64) / f"{name}.py"
        file.parent.mkdir(parents=True)
        for package in (folder.parent, folder, file.parents[1], file.parent):
            (package / "__init__.py").touch()
        file.write_text(HEADER + text, encoding="utf-8")
    importlib.invalidate_caches()
    yield
    shutil.rmtree(folder)
    for name in [name for name in sys.modules if name.startswith("evaluate_modules")]:
        del sys.modules[name]


def figures() -> list[dict]:
    rng = np.random.default_rng(4)
    predicted, gold = rng.choice(["O", "B-A", "I-A", "B-B"], size=(2, 20, 9)).tolist()
    bilou = [[["U-A", "B-A", "L-A", "O"], ["O", "U-B"]], [["U-A", "U-A", "U-A", "O"], ["O", "U-B"]]]
    numbers = rng.integers(4, size=(2, 50)).tolist()
    found = [
        tagging_scores(predicted, gold),
        tagging_scores(*bilou),
        tagging_scores([["O"]], [["O"]]),
        tagging_scores([["NN", "VB"]], [["NN", "NN"]]),
        classification_scores(*numbers, list("abcdefg")),
        multilabel_scores([[1, 0], [1, 1]], [[1, 0], [0, 1]], ["a", "b"]),
        # Figures that are exact in the single precision of torchmetrics, which computes them through `evaluate` here.
        answer_scores(["the Seine", "old Paris", "", "Rouen"], [["Seine"], ["x", "in Paris"], ["Paris"], ["Rouen!"]]),
        answer_scores(["the Seine", "old Paris", "", "Rouen"], [["Seine"], ["x", "in Paris"], [], []], list("abab")),
    ]
    assert json.loads(json.dumps(found)) == found
    return found


def test_evaluate_gives_the_same_figures(cached_modules, monkeypatch, caplog):
    through_evaluate = figures()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # those of `seqeval` for every zero division are kept from the log
        assert figures() == through_evaluate
    for name in MODULES:
        assert f"{name} is computed by `evaluate` " in caplog.text
    assert "is computed here" not in caplog.text
    monkeypatch.setattr(metrics, "evaluate_metric", lambda *_: None)
    for found, own in zip(through_evaluate, figures(), strict=True):
        assert flat(found) == pytest.approx(flat(own), abs=1e-12)


def flat(value, name: str = "") -> dict[str, float]:
    if isinstance(value, (dict, list)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: number for key, part in pairs for path, number in flat(part, f"{name}/{key}").items()}
    return {name: value}


def test_it_is_evaluate_that_computes(evaluate, monkeypatch):
    class Metric:
        def compute(self, predictions, references, **options):
            return {"accuracy": 0.125, "f1": 0.25}

    monkeypatch.setattr(evaluate, "load", lambda *_, **__: Metric())
    found = classification_scores([0, 1], [0, 1], ["a", "b"])
    assert (found["accuracy"], found["macro_f1"]) == (0.125, 0.25)


def test_without_a_copy_offline(evaluate, monkeypatch, caplog):
    """Under `HF_HUB_OFFLINE`, which the whole suite sets, nothing asks the network."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("asked the network"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("asked the network"))
    for _ in range(2):
        assert tagging_scores([["B-A"]], [["B-A"]])["f1"] == 1
    (line,) = caplog.messages
    assert "seqeval is computed here, by the same definition, and not by `evaluate`: offline mode is set" in line


def test_a_hub_that_never_answers_is_left_alone(network, evaluate, monkeypatch, caplog):
    asked = []

    def load(*_, **__):
        asked.append(evaluate.config.HF_EVALUATE_OFFLINE)
        raise FileNotFoundError("Couldn't find a module script")

    monkeypatch.setattr(evaluate, "load", load)
    monkeypatch.setattr(metrics, "SECONDS_TO_ANSWER", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(evaluate.config, "HF_ENDPOINT", endpoint)
        start = time.monotonic()
        assert classification_scores([0], [0], ["a"])["accuracy"] == 1
        assert time.monotonic() - start < 2  # of asking once, and not for ever
    assert asked == [True, True]  # accuracy and f1, from the cache alone
    assert evaluate.config.HF_EVALUATE_OFFLINE is False
    assert (
        f"accuracy is computed here, by the same definition, and not by `evaluate`: {endpoint} does not" in caplog.text
    )
    assert "no copy" in caplog.text


@pytest.mark.parametrize("error", [ConnectionError("cut"), FileNotFoundError("gone"), ImportError("needs seqeval")])
def test_a_metric_that_does_not_load(network, evaluate, monkeypatch, caplog, error):
    def load(name, config_name, **_):
        assert not evaluate.config.HF_EVALUATE_OFFLINE
        raise error

    monkeypatch.setattr(evaluate, "load", load)
    monkeypatch.setattr("requests.head", lambda *_, **__: None)
    assert tagging_scores([["B-A"]], [["B-A"]])["f1"] == 1
    assert f"not by `evaluate`: {error}." in caplog.text


def test_a_metric_that_fails(evaluate, monkeypatch, caplog):
    """As some do when their library is newer; a run must not end for it."""

    class Metric:
        def compute(self, predictions, references, **options):
            return {"f1": predictions.size.size}

    monkeypatch.setattr(evaluate, "load", lambda *_, **__: Metric())
    for _ in range(2):
        assert classification_scores([0, 1], [0, 1], ["a", "b"])["macro_f1"] == 1
    (line,) = (line for line in caplog.messages if line.startswith("f1 is computed here"))
    assert "not by `evaluate`: it does not suit a library here: AttributeError: 'int' object has no attribute" in line


def test_evaluate_need_not_be_installed(evaluate, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "evaluate", None)
    assert tagging_scores([["B-A"]], [["B-A"]])["f1"] == 1
    assert "seqeval is computed here" in caplog.text and "evaluate" in caplog.text.split("`evaluate`:")[1]


@pytest.mark.parametrize(
    "answer, expected",
    [
        ("SEINE", "seine"),
        ("  the \t Eiffel\n\u00a0Tower ", "eiffel tower"),
        ("The apple, an egg; a pear", "apple egg pear"),
        ("theatre of Anna", "theatre of anna"),
        ("U.S.A.", "usa"),
        ("the_end", "theend"),  # without punctuation first, so that no article is left
        ("«Île»", "«île»"),  # the punctuation of ASCII alone
        ("The... a", ""),
    ],
)
def test_answers_are_compared_without_case_punctuation_articles_and_spaces(answer, expected):
    assert normalized(answer) == expected
    assert answer_scores([answer], [[f"{expected} x"]])["exact_match"] == 0
    assert answer_scores([f"x {answer}"], [[f"x {expected}"]]) == {"f1": 1.0, "exact_match": 1.0}


@pytest.mark.parametrize(
    "predicted, gold, f1",
    [
        ("the old river Seine", ["Seine, river"], 4 / 5),  # 2 of 3 words, 2 of 2
        ("Seine river", ["river Seine"], 1),
        ("York York York", ["York"], 1 / 2),  # 1 of 3 words, 1 of 1
        ("New New York", ["New York, New York"], 6 / 7),  # 3 of 3 words, 3 of 4
        ("city Paris", ["Paris", "the city of Paris", "Rouen"], 4 / 5),  # 2/3 with the first
        ("Paris", ["Rouen", "Le Havre"], 0),
        ("", ["Paris"], 0),
        ("the", ["Paris"], 0),
    ],
)
def test_f1_of_the_words_of_the_closest_answer(predicted, gold, f1):
    for answers in (gold, gold[::-1]):
        assert answer_scores([predicted], [answers]) == {"f1": pytest.approx(f1), "exact_match": 0.0}
        both = answer_scores([predicted, ""], [answers, []])  # of SQuAD 2.0
        assert both["has_answer_f1"] == pytest.approx(f1) and both["f1"] == pytest.approx((f1 + 1) / 2)


def test_any_answer_will_do():
    assert answer_scores(["paris"], [["Rouen", "Paris!", "Paris, France"]]) == {"f1": 1.0, "exact_match": 1.0}


def test_answers_of_which_nothing_is_left():
    """They are equal, but share no words; SQuAD 2.0 does not count them among the right ones."""
    assert answer_scores([""], [["The"]]) == {"f1": 0.0, "exact_match": 1.0}
    second = answer_scores(["", "", "an", ""], [["The", "Seine"], ["The"], ["A"], []])
    assert (second["has_answer_f1"], second["has_answer_exact_match"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))


def test_questions_without_an_answer():
    predicted = ["", "the", "Seine", "Seine", "old Seine", ""]
    gold = [[], [], [], ["Seine"], ["the Seine"], ["Seine"]]
    assert answer_scores(predicted, gold) == {
        "f1": pytest.approx((1 + 1 + 0 + 1 + 2 / 3 + 0) / 6),
        "exact_match": pytest.approx(3 / 6),
        "has_answer_f1": pytest.approx((1 + 2 / 3 + 0) / 3),
        "has_answer_exact_match": pytest.approx(1 / 3),
        "no_answer_accuracy": pytest.approx(2 / 3),
    }
    assert answer_scores(["", "x"], [[], []]) == {"f1": 0.5, "exact_match": 0.5, "no_answer_accuracy": 0.5}


def test_answers_by_type_of_question():
    found = answer_scores(["Seine", "old Paris", "1889"], [["Seine"], ["Paris"], ["1890"]], ["what", "where", "what"])
    assert found == {
        "f1": pytest.approx((1 + 2 / 3 + 0) / 3),
        "exact_match": pytest.approx(1 / 3),
        "per_type": {
            "what": {"f1": 0.5, "exact_match": 0.5, "number": 2},
            "where": {"f1": pytest.approx(2 / 3), "exact_match": 0.0, "number": 1},
        },
    }
    assert list(found["per_type"]) == ["what", "where"] and json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("is_second", [False, True])
def test_answer_scores_are_those_of_torchmetrics(is_second):
    squad = pytest.importorskip("torchmetrics.functional.text").squad
    rng = random.Random(5)

    def text() -> str:
        words = ["the", "An", "--", "of", "Seine", "seine,", "Île", "U.S.", "us"]
        return " ".join(rng.choices(words, k=rng.randint(0, 4)))

    for size in (1, 7, 60):
        predicted = [text() for _ in range(size)]
        # An answer of which nothing is left it reads as neither version does.
        gold = [[f"{text()} Seine" for _ in range(rng.randint(1, 3))] for _ in range(size)]
        if is_second:
            gold = [[], *(answers if rng.random() < 0.6 else [] for answers in gold[1:])]
        found = answer_scores(predicted, gold)
        theirs = squad(
            [{"id": str(number), "prediction_text": answer} for number, answer in enumerate(predicted)],
            [{"id": str(number), "answers": {"text": answers or [""]}} for number, answers in enumerate(gold)],
        )
        for name, percentage in theirs.items():
            assert found[name] == pytest.approx(percentage.item() / 100, rel=1e-5)


@pytest.mark.parametrize("name, exact", [("squad", "exact_match"), ("squad_v2", "exact")])
def test_answers_go_through_evaluate(evaluate, monkeypatch, name, exact):
    asked = []

    class Metric:
        def compute(self, predictions, references):
            asked.extend([predictions, references])
            return {exact: 12.5, "f1": 25.0}

    monkeypatch.setattr(evaluate, "load", lambda found, *_, **__: {name: Metric()}[found])
    is_second = name == "squad_v2"
    last = [] if is_second else ["Rouen"]
    found = answer_scores(["Seine", "x"], [["Seine", "river"], last], ["what", "where"])
    assert (found["f1"], found["exact_match"]) == (0.25, 0.125)
    assert found["per_type"]["what"] == {"f1": 1.0, "exact_match": 1.0, "number": 1}
    assert ("has_answer_f1" in found) is is_second
    more = {"no_answer_probability": 0.0} if is_second else {}
    assert asked == [
        [{"id": "0", "prediction_text": "Seine", **more}, {"id": "1", "prediction_text": "x", **more}],
        [
            {"id": "0", "answers": {"text": ["Seine", "river"], "answer_start": [0, 0]}},
            {"id": "1", "answers": {"text": last, "answer_start": [0] * len(last)}},
        ],
    ]


def test_answers_to_other_questions():
    with pytest.raises(ValueError, match="predictions for 1 questions and gold answers for 2; pass both for all"):
        answer_scores(["a"], [["a"], ["b"]])
    with pytest.raises(ValueError, match="Received no questions; pass at least one"):
        answer_scores([], [])
