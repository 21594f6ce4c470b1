"""Kinds of labels: their targets, predictions and ensembles, computed by hand."""

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from modeling_elmo.run_scripts.fine_tuning.tasks.classification import MultiLabel, Regression, SingleLabel, label_type


def probabilities(*logits: list[float]) -> list[np.ndarray]:
    return [np.array([row], dtype=np.float64) for row in logits]


def test_one_label():
    labels = SingleLabel(["bad", "good"])
    assert (labels.target("good"), labels.label(np.array([0.1, 0.2]))) == (1, "good")
    mean = labels.average(probabilities([0.0, 0.0], [0.0, np.log(3)]))  # (1/2 + 3/4) / 2
    assert np.exp(mean[0]) == pytest.approx([0.375, 0.625])
    assert labels.evaluate(np.array([[1, 0], [1, 0]]), np.array([0, 1]))["accuracy"] == 0.5


def test_several_labels():
    labels = MultiLabel(["a", "b", "c"])
    assert labels.target(["c", "a"]) == [1.0, 0.0, 1.0] and labels.label(np.array([0.1, -0.1, 2.0])) == ["a", "c"]
    mean = labels.average(probabilities([0.0], [np.log(3)]))  # sigmoids 1/2 and 3/4
    assert 1 / (1 + np.exp(-mean[0, 0])) == pytest.approx(0.625)
    assert labels.evaluate(np.array([[1, -1, -1]]), np.array([[1, 0, 1]]))["micro_f1"] == pytest.approx(2 / 3)


def test_numbers():
    data = DatasetDict({split: Dataset.from_dict({"label": [1.0, 2.0]}) for split in ("train", "test")})
    labels = Regression(data)
    assert labels.target(1.5) == 1.5 and labels.label(np.array([2.5])) == 2.5
    assert labels.average(probabilities([1.0], [2.0])).tolist() == [[1.5]]
    assert labels.evaluate(np.array([[1.0], [2.0], [4.0]]), np.array([2.0, 4.0, 8.0]))["pearson"] == pytest.approx(1)


def test_hidden_labels_are_noticed():
    data = DatasetDict(train=Dataset.from_dict({"label": [0.0, 0.0]}), test=Dataset.from_dict({"label": [-1.0, -1.0]}))
    with pytest.raises(ValueError, match="Split 'test' has the label -1.0 in every row.*--test_split none"):
        label_type(data, "regression")
