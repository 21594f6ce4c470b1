"""ELMo in pipelines of the real spaCy, compared with the model's vectors of one sentence at a time."""

import os
import pickle
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from numpy.testing import assert_allclose
from places import ROOT

spacy = pytest.importorskip("spacy")

import modeling_elmo_spacy  # noqa: E402, F401 (registers the factory in a clone that is not installed)
from bilm_models import plain_layers  # noqa: E402
from spacy.cli.convert import convert  # noqa: E402
from spacy.cli.train import train  # noqa: E402
from spacy.training import Example  # noqa: E402
from spacy.util import load_config, load_model_from_config  # noqa: E402
from task_worker import bilm, written  # noqa: E402, written

from modeling_elmo.run_scripts.vectors.spacy_pipe import DocumentEncoder  # noqa: E402

SHIPPED = str(ROOT / "model_cards" / "elmo-small-en")
CONFIG = ROOT / "docs" / "spacy_ner.cfg"
TEXT = "The play was a great success.\n\n  They play chess. The actors in that play were superb."
TEXTS = [TEXT, "", " \n", "A play.", "One sentence of a few words . " * 5, "Don't!"]
ANNOTATIONS = {  # of all components that a `tok2vec` may serve
    "They play chess": {"tags": ["PRP", "VBP", "NN"], "entities": [(10, 15, "GAME")], "cats": {"now": 1, "then": 0}},
    "We saw Emma": {"tags": ["PRP", "VBD", "NNP"], "entities": [(7, 11, "PERSON")], "cats": {"now": 0, "then": 1}},
}
TREE = {"heads": [1, 1, 1], "deps": ["nsubj", "ROOT", "dobj"]}
LOAD = """
import sys, numpy, spacy
assert spacy.blank("en").has_factory("elmo")
assert "modeling_elmo" not in sys.modules, "every pipeline would import torch and transformers"
numpy.save("vectors.npy", spacy.load("saved")(sys.argv[1]).tensor)
"""


def architecture(name: str, width: int = 16, **options) -> dict[str, Any]:
    return {"@architectures": "modeling_elmo.ELMoTok2Vec.v1", "name": name, "width": width, **options}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return str(bilm(tmp_path_factory.mktemp("models") / "elmo-tiny", pre_tokenization="moses"))


@pytest.fixture(scope="module")
def pipeline(model_dir):
    def make(sentences: bool = True, **options):
        nlp = spacy.blank("en")
        if sentences:
            nlp.add_pipe("sentencizer")
        nlp.add_pipe("elmo", config={"model": architecture(**{"name": model_dir} | options)})
        return nlp

    return make


@pytest.fixture(scope="module")
def nlp(pipeline):
    return pipeline()


@pytest.fixture(scope="module")
def plain_vectors(model_dir):
    """Shape: `(layers, tokens, hidden_size)`."""

    def vectors(doc) -> np.ndarray:
        found = np.zeros((3, len(doc), 16), np.float32)
        for sentence in doc.sents if doc.has_annotation("SENT_START") else [doc]:
            words = [token for token in sentence if token.text.strip()]
            if words:
                found[:, [word.i for word in words]] = plain_layers(model_dir, [word.text for word in words])
        return found

    return vectors


@pytest.mark.parametrize(
    ("mode", "of_layers"),
    [("top", lambda layers: layers[2]), ("learned", lambda layers: layers.mean(0)), (1, lambda layers: layers[1])],
)
@pytest.mark.parametrize("sentences", [True, False])
def test_vectors_are_those_of_the_model(pipeline, plain_vectors, mode, of_layers, sentences):
    docs = pipeline(sentences, scalar_mix_mode=mode, batch_tokens=8).pipe(TEXTS, batch_size=3)
    for doc, text in zip(docs, TEXTS, strict=True):
        expected = of_layers(plain_vectors(doc))
        assert doc.text == text
        assert doc.tensor.dtype == np.float32 and doc.tensor.shape == expected.shape
        assert_allclose(doc.tensor, expected, atol=1e-5)


def test_vectors_of_tokens_spans_and_documents(nlp):
    nlp.vocab.set_vector("play", np.ones(300))  # as in a pipeline with static vectors, which spaCy prefers to tensors
    doc = nlp(TEXT)
    words = [token.i for token in doc if not token.is_space]
    assert doc[1].vector is not doc.tensor and np.array_equal(doc[1].vector, doc.tensor[1])
    for part, places in ((doc, words), (doc[4:9], [4, 5, 6, 8])):  # 7 is white space
        assert_allclose(part.vector, doc.tensor[places].mean(0), atol=1e-6)
    for part in (doc, doc[4:9], doc[1]):
        assert part.has_vector and part.vector_norm == pytest.approx(np.linalg.norm(part.vector), rel=1e-5)
    assert not doc[7].vector.any() and not doc[7].has_vector and doc[7].similarity(doc[1]) == 0
    assert not nlp("").has_vector and nlp("").vector.shape == doc[0].vector.shape


def test_documents_whose_tokens_were_split_or_merged(pipeline):
    nlp = pipeline()  # spaCy cannot merge tokens if the vocabulary has vectors of another width
    doc, other = nlp("They play in NewYork."), nlp("They play chess.")
    assert doc.vector_norm  # spaCy remembers it
    with doc.retokenize() as change:
        change.split(doc[3], ["New", "York"], heads=[(doc[3], 1), doc[2]])
    merged = doc.copy()
    with merged.retokenize() as change:
        change.merge(merged[4:6])
    for each in (doc, pickle.loads(pickle.dumps(doc)), merged, merged[2:].as_doc()):
        mean = np.mean([token.vector for token in each], axis=0)
        assert_allclose(each.vector, mean, atol=1e-6)
        assert each.has_vector and each.vector_norm == pytest.approx(np.linalg.norm(mean), rel=1e-5)
        assert 0 < each.similarity(other) < 1
    assert doc[:3].tensor.any(1).all() and not doc[3:5].tensor.any() and doc[5].vector.any()


def test_similarity_depends_on_the_context(pipeline):
    doc = pipeline(name=SHIPPED, width=512, scalar_mix_mode="top")(TEXT)
    stage, chess, actors = (token for token in doc if token.text == "play")
    vectors = torch.from_numpy(doc.tensor)
    expected = torch.cosine_similarity(vectors[stage.i], vectors[actors.i], dim=0)
    assert stage.similarity(actors) == pytest.approx(float(expected), abs=1e-5)
    assert stage.similarity(chess) + 0.2 < stage.similarity(actors) < 1
    spans = [doc[each.i : each.i + 1] for each in (stage, chess)]
    assert spans[0].similarity(spans[1]) == pytest.approx(stage.similarity(chess))


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
    written(config, config.read_text("utf-8").replace(model_dir, "/another/machine"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", LOAD, TEXT], cwd=tmp_path, env=environment, check=True)
    assert_allclose(np.load(tmp_path / "vectors.npy"), nlp(TEXT).tensor, atol=1e-6)


def test_bytes_pickles_and_configurations(pipeline, nlp):
    for other in (
        pipeline(name="nowhere").from_bytes(nlp.to_bytes()),
        pickle.loads(pickle.dumps(nlp)),
        load_model_from_config(spacy.util.Config().from_str(nlp.config.to_str())),
    ):
        assert_allclose(other(TEXT).tensor, nlp(TEXT).tensor, atol=1e-6)


@pytest.mark.parametrize(
    ("saved_mode", "mode", "weights"),
    [("top", 0, [1, 0, 0]), ("learned", "top", [0, 0, 1]), (1, "average", [1 / 3] * 3), (0, "learned", [1 / 3] * 3)],
)
def test_a_saved_pipeline_has_the_mix_of_its_configuration(
    pipeline, plain_vectors, tmp_path, saved_mode, mode, weights
):
    saved = pipeline(scalar_mix_mode=saved_mode)
    saved.to_disk(tmp_path)
    loaded = spacy.load(tmp_path, config={"components.elmo.model.scalar_mix_mode": mode})
    for changed in (loaded, pipeline(scalar_mix_mode=mode).from_bytes(saved.to_bytes())):
        doc = changed(TEXT)
        assert_allclose(doc.tensor, np.tensordot(weights, plain_vectors(doc), 1), atol=1e-5)


def test_other_fields_of_a_saved_pipeline(pipeline, nlp, model_dir, tmp_path, monkeypatch):
    nlp.to_disk(tmp_path / "saved")
    other = str(bilm(tmp_path / "elmo-other", pre_tokenization="moses"))

    def load(**fields):
        return spacy.load(tmp_path / "saved", config={"components": {"elmo": {"model": fields}}})

    for field, value, message in (
        ("name", other, f"{other}, but the saved pipeline contains {model_dir}. Pass name = '{model_dir}', or make"),
        ("width", 32, "Attempt to change dimension 'nO' .* from 32 to 16"),
        ("scalar_mix_mode", 7, "`scalar_mix_mode` is 7; pass .* a layer number from 0 to 2"),
    ):
        with refused(message):
            load(**{field: value})
    monkeypatch.chdir(Path(model_dir).parent)
    loaded = load(batch_tokens=100, name=Path(model_dir).name)  # another path of the same folder
    assert loaded.get_pipe("elmo").model.layers[0].shims[0]._model.batch_tokens == 100
    assert_allclose(loaded(TEXT).tensor, nlp(TEXT).tensor, atol=1e-6)


def test_mistakes(pipeline, nlp, tmp_path):
    with refused(f"{tmp_path} has no config.json", FileNotFoundError):
        pipeline(name=str(tmp_path)).initialize()
    with refused("scalar_mix_mode.*'last' is not.*'learned', 'average', 'top'"):
        pipeline(scalar_mix_mode="last")
    with refused("name\tmissing required argument"):
        spacy.blank("en").add_pipe("elmo")
    with refused("width is 512, but .*elmo-tiny has vectors of 16 numbers; pass 16"):
        pipeline(width=512).initialize()
    nlp.vocab.set_vector("chess", np.ones(300))
    with refused(r"\(16,\) and \(300,\)"):
        nlp("Chess")[0].similarity(nlp.vocab["chess"])


def test_a_long_text_without_sentences_is_warned_of(pipeline, caplog):
    for _ in range(2):  # two pipelines
        caplog.clear()
        nlp = pipeline(sentences=False, batch_tokens=7)
        nlp("word " * 7)
        assert not caplog.messages
        nlp("word " * 8)
        nlp("word " * 8)
        (message,) = caplog.messages
        assert "A sentence has 8 words, more than batch_tokens (7)" in message and '"sentencizer"' in message


def test_an_error_handler_gets_the_documents_that_failed(pipeline):
    failed = []
    nlp = pipeline(name="nowhere")
    nlp.set_error_handler(lambda name, pipe, docs, error: failed.append((name, len(docs), type(error))))
    assert list(nlp.pipe(["A play.", "A film."])) == [] and failed == [("elmo", 2, FileNotFoundError)]


@pytest.mark.slow
def test_processes_give_the_same_vectors(nlp):
    for doc, expected in zip(nlp.pipe(TEXTS, n_process=2, batch_size=2), nlp.pipe(TEXTS), strict=True):
        assert_allclose(doc.tensor, expected.tensor, atol=1e-6)


def test_gradients_of_the_mix(model_dir, plain_vectors):
    """Those of equation 1, from torch, for the first step; the biLM has none. A step changes what is read and saved."""
    nlp = spacy.blank("en")
    model = nlp.add_pipe("tok2vec", config={"model": architecture(model_dir)}).model
    docs = [nlp.make_doc(text) for text in TEXTS]
    _, backprop = model.begin_update([nlp.make_doc(" "), nlp.make_doc("")])  # no words, no gradient
    backprop([np.ones((1, 16), np.float32), np.ones((0, 16), np.float32)])
    vectors, backprop = model.begin_update(docs)
    factors = [np.random.default_rng(0).normal(size=each.shape).astype(np.float32) for each in vectors]
    backprop(factors)
    weights, gamma = torch.zeros(3, requires_grad=True), torch.ones(1, requires_grad=True)
    for doc, factor in zip(docs, factors, strict=True):
        mixed = gamma * torch.einsum("l,lte->te", weights.softmax(0), torch.from_numpy(plain_vectors(doc)))
        (mixed * torch.from_numpy(factor)).sum().backward()
    encoder = model.layers[0].shims[0]._model
    found = {name: each.grad for name, each in encoder.bilm.named_parameters() if each.grad is not None}
    assert found.keys() == {"scalar_mix.weights", "scalar_mix.gamma"}
    torch.testing.assert_close(found["scalar_mix.weights"], weights.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["scalar_mix.gamma"], gamma.grad, rtol=1e-4, atol=1e-4)
    model.finish_update(spacy.util.registry.optimizers.get("SGD.v1")(0.1))
    mix = encoder.bilm.scalar_mix
    assert mix.gamma != 1 and mix.weights.any()
    again = nlp.from_bytes(nlp.to_bytes())(TEXT).tensor
    expected = np.tensordot(mix.layer_weights().detach(), plain_vectors(docs[0]), 1)  # the biLM has not changed
    assert_allclose(again, mix.gamma.item() * expected, atol=1e-5)


def test_components_learn_and_share_one_reading(tmp_path, monkeypatch):
    """A tagger, a parser, an entity recognizer and a classifier, saved together, without the folder of the model."""
    folder = shutil.copytree(SHIPPED, tmp_path / "bilm")
    nlp = spacy.blank("en")
    nlp.add_pipe("elmo", config={"model": architecture(str(folder), width=512)})
    listener = {"@architectures": "spacy.Tok2VecListener.v1", "width": 512}
    for kind, options in {"tagger": {}, "parser": {"min_action_freq": 1}, "ner": {}, "textcat": {}}.items():
        nlp.add_pipe(kind, config={"model": {"tok2vec": listener}, **options})
    examples = [Example.from_dict(nlp.make_doc(text), {**TREE, **each}) for text, each in ANNOTATIONS.items()]
    optimizer = nlp.initialize(lambda: examples)
    optimizer.learn_rate = 0.01
    read, forward = [], DocumentEncoder.forward
    monkeypatch.setattr(DocumentEncoder, "forward", lambda self, *docs: read.append(docs) or forward(self, *docs))
    for _ in range(15):
        losses = nlp.update(examples, sgd=optimizer)
    assert len(read) == 15 and losses.keys() == {*nlp.pipe_names}
    nlp.to_disk(tmp_path / "saved")
    shutil.rmtree(folder)
    for pipeline in (nlp, spacy.load(tmp_path / "saved")):
        for doc, (text, gold) in zip(pipeline.pipe(ANNOTATIONS), ANNOTATIONS.items(), strict=True):
            assert [token.tag_ for token in doc] == gold["tags"]
            assert [token.dep_ for token in doc] == TREE["deps"]
            assert [(each.start_char, each.end_char, each.label_) for each in doc.ents] == gold["entities"]
            assert max(doc.cats, key=doc.cats.get) == max(gold["cats"], key=gold["cats"].get), text


def test_the_configuration_of_the_documents_trains(model_dir, tmp_path):
    """Of `docs/spacy_ner.cfg`, also with the architecture inside of the component."""
    for part in ("train", "dev"):
        data = ROOT / "tests" / "fixtures" / "tasks" / f"wnut17_{part}.conll"
        convert(data, tmp_path, file_type="spacy", converter="ner", n_sents=1, silent=True)
    overrides = {f"paths.{part}": str(tmp_path / f"wnut17_{part}.spacy") for part in ("train", "dev")}
    overrides |= {"components.tok2vec.model.name": model_dir, "components.tok2vec.model.width": 16}
    overrides |= {"training.max_steps": 3, "training.eval_frequency": 3}
    train(CONFIG, tmp_path / "shared", overrides=overrides)
    config = load_config(tmp_path / "shared" / "model-last" / "config.cfg", interpolate=True)
    config["components"]["ner"]["model"]["tok2vec"] = config["components"].pop("tok2vec")["model"]
    config["nlp"]["pipeline"] = ["ner"]
    config.to_disk(tmp_path / "own.cfg")
    train(tmp_path / "own.cfg", tmp_path / "own")
    for name in ("shared", "own"):
        nlp = spacy.load(tmp_path / name / "model-last")
        mix = [node for _, pipe in nlp.pipeline for node in pipe.model.walk() if node.shims][0].shims[0]._model.bilm
        assert mix.scalar_mix.gamma != 1 and mix.scalar_mix.weights.any()
        assert [doc.text for doc in nlp.pipe(TEXTS)] == TEXTS
