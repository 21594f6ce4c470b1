"""The page of `elmo evaluate`: one file that loads nothing, where all texts are escaped."""

import re
from html.parser import HTMLParser

import pytest

from modeling_elmo.run_scripts.cards.evaluation_page import confusion_matrix, write_evaluation_page

RATES = {"precision": 0.5, "recall": 0.25, "f1": 1 / 3, "number": 4}
EVIL = "</script><script>alert('1')</script>\"'&"


def confusion(kind: str, gold: str | None, predicted: str | None, number: int, *texts: str) -> dict:
    counts = [[text, 2] for text in texts]
    return {"kind": kind, "gold": gold, "predicted": predicted, "number": number, "texts": counts}


def evaluation(name: str = "person") -> dict:
    metrics = {"f1": 1 / 3, "precision": 0.5, "recall": 0.25, "accuracy": 0.9, "per_type": {name: RATES}}
    segments = [{"text": name, "name": name, "is_right": False}, {"text": "came", "name": None, "is_right": True}]
    error = {"kind": "missed", "gold": name, "predicted": None, "text": name}
    view = {"text": "", "gold": segments, "predicted": [{"text": f"{name} came", "name": None, "is_right": True}]}
    example = {"file": f"{name}.conll", "number": 1234, "classes": [name], "errors": [error], "views": [view]}
    return {
        "model": name,
        "task": "ner",
        "metric": "f1",
        "metrics": metrics,
        "averages": {"micro": RATES},
        "files": {f"{name}.conll": {"samples": 1234, "metrics": metrics}, "b": {"samples": 1, "metrics": metrics}},
        "unknown_labels": {f"B-{name}": 2},
        "errors": {
            "confusions": [
                confusion("right", name, name, 1),
                confusion("other words", name, name, 2),
                confusion("missed", name, None, 3, name),
            ],
            "examples": [example],
        },
    }


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def page_of(folder, values: dict) -> str:
    write_evaluation_page(folder / "page.html", values)
    return (folder / "page.html").read_text("utf-8")


def test_the_page_shows_scores_classes_and_errors(tmp_path):
    page = Page(page_of(tmp_path, evaluation()))
    text = " ".join(page.text.split())
    for shown in (
        "33.33",
        "all files",
        "1,235",
        "micro average",
        "B-person (2)",
        "missed person",
        "person (2)",
        "1 + 2",
    ):
        assert shown in text
    cells = [attributes.get("class") for tag, attributes in page.tags if tag == "td"]
    assert (cells.count("right"), cells.count("wrong")) == (1, 1)  # in the matrix
    options = [attributes.get("value") for tag, attributes in page.tags if tag == "option"]
    assert options == ["", "person", "", None, None]  # all and each class, all and each kind of error
    (errors,) = [attributes["data-errors"] for tag, attributes in page.tags if tag == "article"]
    assert '"gold": "person"' in errors and '"kind": "missed"' in errors


def test_texts_are_escaped_and_nothing_is_loaded(tmp_path):
    plain, evil = page_of(tmp_path, evaluation()), page_of(tmp_path, evaluation(EVIL))
    found = Page(evil)
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in Page(plain).tags]
    assert EVIL in found.text
    for _, attributes in found.tags:
        assert not attributes.keys() & {"src", "href", "action", "data", "srcset"}
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"url\(|@import|fetch|XMLHttp|https?://", plain)
    assert "default-src 'none'" in plain


@pytest.mark.parametrize("classes", [30, 31])
def test_a_large_matrix_is_left_out(classes, tmp_path):
    rows = [confusion("right", f"class {number}", f"class {number}", 1) for number in range(classes)]
    assert (confusion_matrix(rows) is None) == (classes > 30)


def test_a_page_without_classes_or_errors(tmp_path):
    values = evaluation() | {"metrics": {"pearson": 0.5, "mse": 2.0}, "metric": "pearson", "unknown_labels": {}}
    values |= {"averages": {}, "errors": {"confusions": [], "examples": []}}
    text = page_of(tmp_path, values)
    assert "There is no error." in text and "<h2>Classes" not in text and "<script>" not in text


def test_the_matrix_says_0_where_only_other_words_were_found(tmp_path):
    values = evaluation()
    values["errors"]["confusions"] = [confusion("other words", "person", "person", 3)]
    page = Page(page_of(tmp_path, values))
    assert "0 + 3" in page.text
    assert [attributes["class"] for tag, attributes in page.tags if tag == "td" and "class" in attributes][:1] == [
        "wrong"
    ]


def test_the_metric_of_the_task_is_the_first_score(tmp_path):
    head = page_of(tmp_path, {**evaluation(), "metric": "recall"}).partition("samples")[2]
    assert re.findall(r"<th>(\w+)</th>", head)[:2] == ["recall", "f1"]


def test_many_errors_are_cut(tmp_path):
    values = evaluation()
    values["errors"]["confusions"] = [confusion("missed", f"class {number}", None, 1) for number in range(103)]
    page = page_of(tmp_path, values)
    assert "3 rarer kinds of errors are in evaluation.json." in page
    shown, _, folded = page.partition("<summary>Rarer kinds of errors")
    assert shown.count("<tr data-classes") == 12 and folded.count("<tr data-classes") == 88
