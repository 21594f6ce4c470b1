"""The component `elmo` in pipelines of the real spaCy, compared with the model's vectors of one sentence at a time."""

import os
import pickle
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch

spacy = pytest.importorskip("spacy")

import modeling_elmo_spacy  # noqa: E402, F401 (registers the factory in a clone that is not installed)
from task_worker import bilm  # noqa: E402

from modeling_elmo import ELMoModel, ELMoTokenizer  # noqa: E402
from modeling_elmo.run_scripts.vectors.spacy_pipe import ELMoPipe  # noqa: E402

SHIPPED = str(Path(__file__).parents[1] / "model_cards" / "elmo-small-en")
TEXT = "The play was a great success.\n\n  They play chess. The actors in that play were superb."
TEXTS = [TEXT, "", " \n", "A play.", "One sentence of a few words . " * 5, "Don't!"]
LOAD = """
import sys, numpy, spacy
assert spacy.blank("en").has_factory("elmo")
assert "modeling_elmo" not in sys.modules, "every pipeline would import torch and transformers"
numpy.save("vectors.npy", spacy.load("saved")(sys.argv[1]).tensor)
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return str(bilm(tmp_path_factory.mktemp("models") / "elmo-tiny", pre_tokenization="moses"))


@pytest.fixture(scope="module")
def pipeline(model_dir):
    def make(sentences: bool = True, **config):
        nlp = spacy.blank("en")
        if sentences:
            nlp.add_pipe("sentencizer")
        nlp.add_pipe("elmo", config={"model": model_dir, "device": "cpu", **config})
        return nlp

    return make


@pytest.fixture(scope="module")
def nlp(pipeline):
    return pipeline()


@pytest.fixture(scope="module")
def plain_vectors(model_dir):
    """Shape: `(layers, tokens, hidden_size)`."""
    model, tokenizer = ELMoModel.from_pretrained(model_dir).eval(), ELMoTokenizer.from_pretrained(model_dir)

    @torch.no_grad()
    def vectors(doc) -> np.ndarray:
        found = np.zeros((3, len(doc), model.config.hidden_size), np.float32)
        for sentence in doc.sents if doc.has_annotation("SENT_START") else [doc]:
            words = [token for token in sentence if token.text.strip()]
            if words:
                inputs = tokenizer([[word.text for word in words]], is_split_into_words=True, return_tensors="pt")
                layers = torch.stack(model(**inputs).hidden_states)[:, 0, 1:-1]
                found[:, [word.i for word in words]] = layers
        return found

    return vectors


@pytest.mark.parametrize(
    ("layer", "of_layers"),
    [("top", lambda layers: layers[2]), ("average", lambda layers: layers.mean(0)), (1, lambda layers: layers[1])],
)
@pytest.mark.parametrize("sentences", [True, False])
def test_vectors_are_those_of_the_model(pipeline, plain_vectors, layer, of_layers, sentences):
    docs = pipeline(sentences, layer=layer, batch_tokens=8).pipe(TEXTS, batch_size=3)
    for doc, text in zip(docs, TEXTS, strict=True):
        expected = of_layers(plain_vectors(doc))
        assert doc.text == text
        assert doc.tensor.dtype == np.float32 and doc.tensor.shape == expected.shape
        np.testing.assert_allclose(doc.tensor, expected, atol=1e-5)


def test_vectors_of_tokens_spans_and_documents(nlp):
    nlp.vocab.set_vector("play", np.ones(300))  # as in a pipeline with static vectors, which spaCy prefers to tensors
    doc = nlp(TEXT)
    words = [token.i for token in doc if not token.is_space]
    assert len(words) == len(doc) - 1
    assert doc[1].vector is not doc.tensor and np.array_equal(doc[1].vector, doc.tensor[1])
    np.testing.assert_allclose(doc[4:9].vector, doc.tensor[[4, 5, 6, 8]].mean(0), atol=1e-6)  # 7 is white space
    np.testing.assert_allclose(doc.vector, doc.tensor[words].mean(0), atol=1e-6)
    for each in (doc, doc[4:9], doc[1]):
        assert each.has_vector and each.vector_norm == pytest.approx(np.linalg.norm(each.vector), rel=1e-5)
    assert not doc[7].vector.any() and not doc[7].has_vector and doc[7].similarity(doc[1]) == 0
    assert not nlp("").has_vector and nlp("").vector.shape == doc[0].vector.shape


def test_documents_whose_tokens_were_split_or_merged(pipeline):
    nlp = pipeline()  # spaCy cannot merge tokens if the vocabulary has vectors of another width
    doc, other = nlp("They play in NewYork."), nlp("They play chess.")
    assert doc.vector_norm  # spaCy remembers it
    with doc.retokenize() as change:
        change.split(doc[3], ["New", "York"], heads=[(doc[3], 1), doc[2]])
    copies = [doc.copy(), pickle.loads(pickle.dumps(doc))]
    merged = doc.copy()
    with merged.retokenize() as change:
        change.split(merged[0], ["Th", "ey"], heads=[(merged[0], 1), merged[1]])
        change.merge(merged[4:6])
    for each in (doc, *copies, merged, merged[2:].as_doc()):
        mean = np.mean([token.vector for token in each], axis=0)
        np.testing.assert_allclose(each.vector, mean, atol=1e-6)
        assert each.has_vector and each.vector_norm == pytest.approx(np.linalg.norm(mean), rel=1e-5)
        assert 0 < each.similarity(other) < 1
    assert doc[:3].tensor.any(1).all() and not doc[3:5].tensor.any() and doc[5].vector.any()


def test_similarity_depends_on_the_context(pipeline):
    nlp = pipeline(model=SHIPPED)
    doc = nlp(TEXT)
    stage, chess, actors = (token for token in doc if token.text == "play")
    vectors = torch.from_numpy(doc.tensor)
    expected = torch.cosine_similarity(vectors[stage.i], vectors[actors.i], dim=0)
    assert stage.similarity(actors) == pytest.approx(float(expected), abs=1e-5)
    assert stage.similarity(chess) + 0.2 < stage.similarity(actors) < 1
    spans = [doc[each.i : each.i + 1] for each in (stage, chess, actors)]
    assert spans[0].similarity(spans[1]) == pytest.approx(stage.similarity(chess))
    assert doc.similarity(nlp(TEXT)) == pytest.approx(1)


def test_hooks_of_stored_documents(nlp):
    doc = nlp(TEXT)
    again = pickle.loads(pickle.dumps(doc))
    assert again[1].similarity(again[9]) == doc[1].similarity(doc[9]) < 1
    with pytest.warns(UserWarning, match="Unable to save user hooks"):
        stored = spacy.tokens.Doc(nlp.vocab).from_bytes(doc.to_bytes())
    assert stored[1].similarity(stored[9]) == 1  # by spaCy, because the words are the same
    nlp.get_pipe("elmo").add_hooks(stored)
    assert stored[1].similarity(stored[9]) == doc[1].similarity(doc[9])


@pytest.mark.slow
@pytest.mark.skipif(not entry_points(group="spacy_factories", name="elmo"), reason="modeling_elmo is not installed")
def test_a_saved_pipeline_needs_no_import_and_no_other_folder(model_dir, nlp, tmp_path):
    nlp.to_disk(tmp_path / "saved")
    config = tmp_path / "saved" / "config.cfg"
    config.write_text(config.read_text(encoding="utf-8").replace(model_dir, "/another/machine"), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", LOAD, TEXT], cwd=tmp_path, env=environment, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "vectors.npy"), nlp(TEXT).tensor, atol=1e-6)


def test_bytes_pickles_and_configurations(pipeline, nlp):
    empty = pipeline(model="nowhere")
    others = [
        empty.from_bytes(nlp.to_bytes()),
        pickle.loads(pickle.dumps(nlp)),
        spacy.util.load_model_from_config(spacy.util.Config().from_str(nlp.config.to_str())),
    ]
    for other in others:
        np.testing.assert_allclose(other(TEXT).tensor, nlp(TEXT).tensor, atol=1e-6)


def test_mistakes(pipeline, nlp, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no config.json"):
        pipeline(model=str(tmp_path)).initialize()
    with pytest.raises(ValueError, match="elmo -> layer.*'last' is not.*'top', 'average', 'mixed'"):
        pipeline(layer="last")
    with pytest.raises(ValueError, match="elmo -> model\tmissing required argument"):
        spacy.blank("en").add_pipe("elmo")
    nlp.vocab.set_vector("chess", np.ones(300))
    with pytest.raises(ValueError, match=r"\(16,\) and \(300,\)"):
        nlp("Chess")[0].similarity(nlp.vocab["chess"])


def test_a_long_text_without_sentences_is_warned_of(model_dir, nlp, caplog):
    pipe = ELMoPipe("elmo", model_dir, batch_tokens=7)
    pipe(nlp.make_doc("word " * 7))
    assert not caplog.messages
    pipe(nlp.make_doc("word " * 8))
    assert "A sentence has 8 words, more than batch_tokens (7)" in caplog.text and '"sentencizer"' in caplog.text


def test_an_error_handler_gets_the_documents_that_failed(pipeline, model_dir):
    """Of `pipe`. spaCy handles errors of a single call itself, for which the component must raise them."""
    failed = []
    nlp = pipeline(model="nowhere")
    nlp.set_error_handler(lambda name, pipe, docs, error: failed.append((name, len(docs), type(error))))
    assert list(nlp.pipe(["A play.", "A film."])) == [] and failed == [("elmo", 2, FileNotFoundError)]
    broken = ELMoPipe("elmo", model_dir, layer="9")
    broken.set_error_handler(lambda *_: None)
    with pytest.raises(ValueError, match="layer 9: pass top, average, mixed, or a number up to 2"):
        broken(spacy.blank("en")("A play."))
