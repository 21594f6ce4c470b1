"""The page of `elmo evaluate`: scores and errors in one HTML file that loads nothing. All texts are escaped."""

from collections import Counter
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..program.files import JsonObject, write_lines
from .records import plain_numbers
from .tables import class_rates, error_name, format_score, rate_cell, spaced

MOST_CLASSES_OF_MATRIX = 30
MOST_ERRORS = 100  # kinds of errors in the list
FIRST_ERRORS = 12  # kinds that are shown at once


def write_evaluation_page(path: Path, evaluation: JsonObject):
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"spaced": spaced, "score": format_score, "rate": rate_cell, "error": error_name}
    metrics = evaluation["metrics"]
    errors = evaluation["errors"]
    wrong = [row for row in errors["confusions"] if row["kind"] != "right"]
    values = {
        **evaluation,
        "classes": class_rates(metrics),
        "numbers": {evaluation["metric"]: metrics[evaluation["metric"]], **plain_numbers(metrics)},
        "matrix": confusion_matrix(errors["confusions"]),
        "wrong": wrong[:MOST_ERRORS],
        "first_errors": FIRST_ERRORS,
        "more": len(wrong[MOST_ERRORS:]),
        "filters": sorted({name for example in errors["examples"] for name in example["classes"]}),
    }
    write_lines(path, [environment.get_template("evaluation.html").render(**values)])


def confusion_matrix(confusions: list[JsonObject]) -> dict[str, Any] | None:
    """Counts by gold class (rows) and predicted class (columns), "" for none; `None` if there are too many classes."""
    counts: Counter[tuple[str, str]] = Counter()
    other_words = {}  # although the class is right
    for row in confusions:
        key = (row["gold"] or "", row["predicted"] or "")
        if row["kind"] == "other words":
            other_words[row["gold"]] = row["number"]
            counts[key] += 0
        else:
            counts[key] += row["number"]
    golds = sorted({gold for gold, _ in counts}, key=lambda name: (not name, name))
    predicted = sorted({name for _, name in counts}, key=lambda name: (not name, name))
    if not counts or max(len(golds), len(predicted)) > MOST_CLASSES_OF_MATRIX:
        return None
    return {"golds": golds, "predicted": predicted, "counts": counts, "other_words": other_words}
