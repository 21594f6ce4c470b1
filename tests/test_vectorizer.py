"""`ELMoVectorizer` in pipelines of scikit-learn."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from bilm_models import plain_layers
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from task_worker import bilm

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
    layers = [plain_layers(model_dir, text) for text in TEXTS]
    for options, expected in (
        ({"layers": "average"}, [each.mean((0, 1)) for each in layers]),
        ({"layers": "all"}, [each.mean(1).flatten() for each in layers]),
        ({"layers": "top", "pooling": "max"}, [each[-1].amax(0) for each in layers]),
    ):
        vectorizer = ELMoVectorizer(model_dir, device="cpu").set_params(**options)
        for texts in (TEXTS, np.array(TEXTS)):
            found = vectorizer.fit(texts).transform(texts)
            assert found.dtype == np.float32 and found.shape == (6, len(vectorizer.get_feature_names_out()))
            np.testing.assert_allclose(found, torch.stack(expected), atol=1e-5)
    words = ["So", "bad!"]  # not split again
    expected = plain_layers(model_dir, words).mean((0, 1))
    np.testing.assert_allclose(ELMoVectorizer(model_dir).transform([words])[0], expected, atol=1e-5)


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
