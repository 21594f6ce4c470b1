"""The classifier's program on texts and on pairs, with every kind of label."""

import json

import pytest
from task_worker import TASKS, bilm, classify, predictions_of, read_json
from transformers import pipeline


def share_right(rows: list[dict]) -> float:
    return sum(row["predicted"] == row["label"] for row in rows) / len(rows)


@pytest.mark.parametrize("data, options", [("rt_polarity", {}), ("snli", {}), ("snli", {"classifier": "esim"})])
def test_accuracy_is_that_of_the_predictions(data, options, tmp_path):
    bilm(tmp_path / "bilm")
    classify(tmp_path, data, **options)
    record = read_json(tmp_path / "run" / "record.json")
    rows = predictions_of(tmp_path / "run" / "predictions_test.jsonl")
    assert record["metrics"]["test"]["accuracy"] == pytest.approx(share_right(rows))
    classifier = pipeline("text-classification", model=str(tmp_path / "run"))
    for row in rows[:3]:
        text = {name: row[name] for name in ("text", "text_pair") if name in row}
        assert classifier(text)["label"] == row["predicted"]


def test_esim_wants_pairs(tmp_path):
    bilm(tmp_path / "bilm")
    with pytest.raises(ValueError, match="--classifier esim compares two texts, .* one; pass --text_pair_column"):
        classify(tmp_path, "rt_polarity", classifier="esim", max_steps=1)


@pytest.mark.parametrize(
    "label, options, metric",
    [
        (lambda text: float(len(text)) / 100, {"problem": "regression"}, "pearson"),
        (lambda text: [name for name in "man" if name in text], {}, "micro_f1"),
    ],
)
def test_numbers_and_sets_of_labels(label, options, metric, tmp_path):
    bilm(tmp_path / "bilm")
    files = {}
    for split, name in (("train", "train"), ("validation", "dev")):
        lines = (TASKS / f"snli_{name}.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [next(value for value in json.loads(line).values() if " " in str(value)) for line in lines]
        files[f"{split}_file"] = tmp_path / f"{split}.jsonl"
        rows = "".join(json.dumps({"text": text, "label": label(text)}) + "\n" for text in texts)
        files[f"{split}_file"].write_text(rows, encoding="utf-8")
    record = classify(tmp_path, "snli", **files, **options, test_file=None, max_steps=2)
    assert record["metric"] == metric and isinstance(record["metrics"]["validation"][metric], float)
