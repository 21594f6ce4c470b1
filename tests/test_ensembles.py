"""Ensembles of taggers beside a plain mean of probabilities. Question answering is in test_question_answering.py."""

from pathlib import Path

import numpy as np
import pytest
import torch
from task_worker import (
    bilm,
    capitals,
    experiment,
    predictions_of,
    read_json,
    sentences_of,
    tagger_experiment,
    train_tagger,
)

from modeling_elmo import ELMoForTokenClassification, ELMoTokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a biLM, data, and two trained taggers."""
    folder = tmp_path_factory.mktemp("place")
    bilm(folder / "bilm")
    capitals(folder)
    for seed in (42, 43):
        train_tagger(folder, folder / f"seed-{seed}", seed=seed)
    return folder


def members_of(place: Path) -> list[Path]:
    return [place / f"seed-{seed}" for seed in (42, 43)]


def probabilities(folder: Path, sentences: list[list[str]]) -> list[np.ndarray]:
    """The probabilities of each word's labels, one sentence at a time."""
    model, tokenizer = ELMoForTokenClassification.from_pretrained(folder).eval(), ELMoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        inputs = (tokenizer([words], is_split_into_words=True, return_tensors="pt") for words in sentences)
        return [model(**each).logits[0, 1:-1].double().softmax(-1).numpy() for each in inputs]


def test_an_ensemble_is_the_mean_of_probabilities(place, tmp_path):
    members = members_of(place)
    (record,) = tagger_experiment(place, tmp_path, ensemble=members)
    labels = read_json(members[0] / "config.json")["id2label"]
    sentences = [words for words, _ in sentences_of(place / "test.conll")]
    pairs = zip(*(probabilities(folder, sentences) for folder in members), strict=True)
    means = [np.mean(pair, axis=0) for pair in pairs]
    expected = [[labels[str(label)] for label in mean.argmax(-1)] for mean in means]
    rows = predictions_of(tmp_path / "results" / "ensemble_test.jsonl")
    assert [row["predicted"] for row in rows] == expected and [row["tokens"] for row in rows] == sentences
    right = [found == tag for row in rows for found, tag in zip(row["predicted"], row["tags"], strict=True)]
    assert record["metrics"]["test"]["accuracy"] == pytest.approx(sum(right) / len(right))
    assert record["arm"] == "ensemble of 2"
    assert read_json(tmp_path / "results" / "ner_ensemble.json")["records"] == [record]
    single = [[row["predicted"] for row in predictions_of(folder / "predictions_test.jsonl")] for folder in members]
    assert expected not in single  # else the mean could be missing


def test_an_ensemble_of_one_is_that_model(place, tmp_path):
    member = members_of(place)[0]
    (record,) = tagger_experiment(place, tmp_path, ensemble=[member])
    assert record["metrics"] == read_json(member / "record.json")["metrics"] and record["arm"] == "ensemble of 1"


@pytest.mark.parametrize("name", ["ablation", "compare_baseline", "cache_features", "push_to_hub"])
def test_an_ensemble_only_averages(name, place, tmp_path):
    options = {name: "layers" if name == "ablation" else True}
    with pytest.raises(ValueError, match=f"--ensemble .* leave out --{name}"):
        tagger_experiment(place, tmp_path, ensemble=members_of(place), **options)


def test_a_model_counts_once(place, tmp_path):
    member, other = members_of(place)[:2]
    with pytest.raises(ValueError) as refused:
        tagger_experiment(place, tmp_path, ensemble=[member, other, f"{other}/", f"{member}/"])
    assert str(refused.value) == f"--ensemble: {other} and {other}/ are the same model; pass it once."


def test_members_with_other_labels_are_refused(place, tmp_path):
    member = members_of(place)[0]
    with pytest.raises(ValueError, match=r"--ensemble .*seed-42 has the labels .*B-NAME.*but the data has.*B-person"):
        experiment("ner", tmp_path, model_name_or_path=member, ensemble=[member])
