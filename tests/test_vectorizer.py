"""`ELMoVectorizer` in pipelines of scikit-learn."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from task_worker import bilm

from modeling_elmo import ELMoModel, ELMoTokenizer
from modeling_elmo.run_scripts.vectors.vectorizer import ELMoVectorizer

TEXTS = [
    "The film was a delight.",
    "A dull film , and far too long",
    "So bad!",
    "Wonderful actors.",
    "A delight.",
    "Dull.",
]
LABELS = [1, 0, 0, 1, 1, 0]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return str(bilm(tmp_path_factory.mktemp("models") / "elmo-tiny", pre_tokenization="moses"))


def test_vectors_are_those_of_the_model(model_dir):
    model, tokenizer = ELMoModel.from_pretrained(model_dir).eval(), ELMoTokenizer.from_pretrained(model_dir)
    with torch.no_grad():
        outputs = [model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True) for text in TEXTS]
    words = [torch.stack(output.hidden_states)[:, 0, 1:-1] for output in outputs]  # without markers
    for layers, expected in (
        ("average", [each.mean(0).mean(0) for each in words]),
        ("all", [w.mean(1) for w in words]),
    ):
        vectorizer = ELMoVectorizer(model_dir, layers=layers, device="cpu")
        found = vectorizer.fit(TEXTS).transform(TEXTS)
        assert found.dtype == np.float32 and found.shape == (6, len(vectorizer.get_feature_names_out()))
        np.testing.assert_allclose(found, torch.stack(expected).flatten(1), atol=1e-5)
    largest = vectorizer.set_params(layers="top", pooling="max").transform(TEXTS)  # not the options of before
    np.testing.assert_allclose(largest, torch.stack([each[-1].amax(0) for each in words]), atol=1e-5)
    assert np.array_equal(ELMoVectorizer(model_dir, layers="all").transform(np.array(TEXTS)), found)
    words = ["So", "bad!"]  # not split again
    with torch.no_grad():
        expected = model(**tokenizer([words], is_split_into_words=True, return_tensors="pt")).elmo_embeddings[0, 1:-1]
    assert len(expected) == 2
    np.testing.assert_allclose(ELMoVectorizer(model_dir).transform([words])[0], expected.mean(0), atol=1e-5)


def test_pipelines_and_searches(model_dir):
    classifier = make_pipeline(ELMoVectorizer(model_dir), StandardScaler(), LogisticRegression())
    search = GridSearchCV(classifier, {"elmovectorizer__layers": ["mixed", "all"]}, cv=2)
    search.fit(TEXTS, LABELS)
    assert search.predict(TEXTS).tolist() == LABELS
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    assert len(pickle.dumps(again)) < 100_000 and again.predict(TEXTS).tolist() == LABELS
    assert not hasattr(clone(again[0]), "_loaded") and again[0].get_params() == search.best_estimator_[0].get_params()
    columns = ColumnTransformer([("text", ELMoVectorizer(model_dir), 0), ("number", "passthrough", [1])])
    rows = np.array([[text, label] for text, label in zip(TEXTS, LABELS, strict=True)], dtype=object)
    assert columns.fit_transform(rows).shape == (6, len(ELMoVectorizer(model_dir).fit().get_feature_names_out()) + 1)


@pytest.mark.parametrize(
    ("options", "texts", "message"),
    [
        ({}, {"text": TEXTS}, "must be a list, got dict"),
        ({"pooling": "none"}, TEXTS, "pooling is 'none'; pass 'mean' or 'max'"),
        ({"layers": "last"}, TEXTS, "layers is 'last'; pass one of all, top"),
    ],
)
def test_bad_inputs(model_dir, options, texts, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ELMoVectorizer(model_dir, **options).transform(texts)


def test_a_fitted_vectorizer_does_not_look_for_a_relative_folder_again(model_dir, tmp_path, monkeypatch):
    (tmp_path / "model").symlink_to(Path(model_dir).absolute())
    monkeypatch.chdir(tmp_path)
    vectorizer = ELMoVectorizer("model").fit()
    width = vectorizer.transform(["a"]).shape[1]
    monkeypatch.chdir("/")
    assert len(vectorizer.get_feature_names_out()) == width and vectorizer.transform([]).shape == (0, width)
    assert not vectorizer.transform(["", []]).any()
