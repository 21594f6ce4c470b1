"""A saved biLM is a sentence-transformers model, with and without the package."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from bilm_models import pair_in, plain_layers, save, tiny_model
from clean_python import new_environment, run
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_worker import TEXTS, train

from modeling_elmo import (
    ELMoForPreTraining,
    ELMoForQuestionAnswering,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
    ELMoModel,
    ELMoTokenizer,
)
from modeling_elmo.configuration_elmo import SENTENCE_TRANSFORMERS_FILES

FILES = {"modules.json", "sentence_bert_config.json", "1_Pooling"}
MIX = {"scalar_mix.weights", "scalar_mix.gamma"}
VOCABULARY = ["<S>", "</S>", "<UNK>", "He", "is", "in", "London"]


def saved(folder: Path, model_class) -> Path:
    """A biLM whose mix is neither the average nor one layer."""
    tokenizer = ELMoTokenizer(vocab=VOCABULARY)
    model = tiny_model(model_class, vocab_size=len(tokenizer))
    if model_class is ELMoModel:
        with torch.no_grad():
            model.scalar_mix.weights.copy_(torch.tensor([0.5, -1.0, 1.0]))
            model.scalar_mix.gamma.fill_(2.0)
    return save(folder, model, tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("sentences") / "elmo", ELMoModel)


def load(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")


def mixed_words(folder: Path, text: str) -> torch.Tensor:
    """Equation 1 for the words of a text."""
    mix = pair_in(folder)[0].scalar_mix
    shares = mix.weights.detach().exp() / mix.weights.detach().exp().sum()
    return mix.gamma.item() * torch.einsum("l,lth->th", shares, plain_layers(folder, text))


def mean_vectors(folder: Path, texts=TEXTS) -> np.ndarray:
    """The means over the words of each text alone; zeros without words."""
    return torch.stack([mixed_words(folder, text).mean(0).nan_to_num() for text in texts]).numpy()


def assert_same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_vectors_are_means_of_the_mixed_words(folder):
    model, expected = load(folder), mean_vectors(folder)
    assert_same(model.encode(TEXTS, batch_size=4), expected)
    assert_same([model.encode(text) for text in TEXTS], expected)
    assert not expected[TEXTS.index("")].any() and np.abs(expected[TEXTS.index("He")]).max() > 0.01
    assert model.get_embedding_dimension() == expected.shape[1] == 32
    assert model.preprocess(TEXTS)["character_ids"].shape[2] == 50


def test_vectors_of_tokens(folder):
    """Of each text alone, with both markers, whose vectors are the mean of the words."""
    model, means = load(folder), mean_vectors(folder)
    options = {"output_value": "token_embeddings"}
    dictionaries = model.encode(TEXTS, output_value=None)
    for found in (
        model.encode(TEXTS, batch_size=4, **options),
        model.encode_query(TEXTS, batch_size=4, **options),
        [model.encode(text, **options) for text in TEXTS],
        [each["token_embeddings"][each["attention_mask"].bool()] for each in dictionaries],
    ):
        for text, vectors, mean in zip(TEXTS, found, means, strict=True):
            assert_same(vectors, np.concatenate([[mean], mixed_words(folder, text), [mean]]))
    assert_same([each["sentence_embedding"].numpy() for each in dictionaries], means)


def test_options_of_the_configuration_choose_a_layer(folder):
    tokens = SentenceTransformer(str(folder), device="cpu", config_kwargs={"scalar_mix_mode": 0})
    expected = 2 * plain_layers(folder, "He is in London.")[0].mean(0)  # gamma
    assert_same(tokens.encode("He is in London."), expected.numpy())


def test_prompts_and_lengths(folder, tmp_path):
    model = load(folder)
    cut, whole, other = mean_vectors(folder, ["He is", "He is in London.", "London."])
    assert_same(model.encode("in London.", prompt="He is "), whole)
    assert_same(model.encode_query("London."), other)
    long = " ".join(["He"] * 600)  # longer than the limit of most models
    assert_same(model.encode(long), mean_vectors(folder, [long])[0])
    model.max_seq_length = 4  # two words between markers
    model.prompts = {"where": "He "}
    model.save_pretrained(str(tmp_path))
    for each in (model, load(tmp_path)):
        assert_same(each.encode("He is in London."), cut)
        assert_same(each.encode("is in London.", prompt_name="where"), cut)


@pytest.mark.parametrize("frozen", [True, False])
def test_trainer_moves_the_mix(folder, tmp_path, frozen):
    """The whole biLM is trained too, unless it is frozen."""
    model = load(folder)
    model.encode(TEXTS)  # must not prevent gradients afterwards
    bilm = model.transformers_model
    if frozen:
        bilm.freeze()
    before = {name: parameter.detach().clone() for name, parameter in bilm.named_parameters()}
    train(model, tmp_path)
    changed = {name for name, parameter in bilm.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == (MIX if frozen else set(before))


def test_modules_of_another_hand_are_kept(folder, tmp_path):
    """Maximum over the tokens of the top layer."""
    other = Transformer(str(folder))
    model = SentenceTransformer(modules=[other, Pooling(other.get_embedding_dimension(), "max")], device="cpu")
    model.save_pretrained(str(tmp_path))
    before = load(tmp_path).encode(TEXTS)
    ELMoModel.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "1_Pooling" / "config.json").read_text())["pooling_mode"] == "max"
    assert_same(load(tmp_path).encode(TEXTS), before)


def test_only_bilms_are_sentence_models(tmp_path):
    heads = (ELMoForTokenClassification, ELMoForSequenceClassification, ELMoForQuestionAnswering)
    for model_class in (ELMoModel, ELMoForPreTraining, *heads):
        folder = saved(tmp_path / model_class.__name__, model_class)
        assert FILES & {path.name for path in folder.iterdir()} == (set() if model_class in heads else FILES)
    ELMoForTokenClassification.from_pretrained(folder.with_name("ELMoModel")).save_pretrained(tmp_path / "head")
    assert not FILES & {path.name for path in (tmp_path / "head").iterdir()}


def test_files_are_uploaded(folder, tmp_path, monkeypatch):
    uploads = []
    repository = type("Repository", (), {"repo_id": "someone/elmo"})
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *_, **__: repository)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", lambda *_, operations, **__: uploads.extend(operations))
    ELMoModel.from_pretrained(folder).save_pretrained(tmp_path / "new", push_to_hub=True)
    expected = {*SENTENCE_TRANSFORMERS_FILES, "config.json", "model.safetensors"}
    assert expected <= {upload.path_in_repo for upload in uploads}


@pytest.fixture(scope="module")
def strangers(tmp_path_factory) -> Path:
    """Folders in `saved`; the folders that a process without the package saved in `resaved`; its vectors, `found`."""
    root = tmp_path_factory.mktemp("strangers")
    for model_class in (ELMoModel, ELMoForPreTraining):
        saved(root / "saved" / model_class.__name__, model_class)
    worker = shutil.copy(Path(__file__).with_name("sentence_worker.py"), root)
    home = root / "home"
    home.mkdir()
    arguments = (str(root / "saved"), str(root / "found"), str(root / "resaved"))
    environment = {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules")}
    run(new_environment(root / "venv"), str(worker), *arguments, cwd=home, **environment)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ELMoModel", "ELMoForPreTraining"])
def test_strangers_find_the_same_vectors(strangers, name):
    found = load_file(strangers / "found")
    assert_same(found[f"{name}/loaded"], mean_vectors(strangers / "saved" / name))
    assert_same(found[f"{name}/trained"], mean_vectors(strangers / "resaved" / name))
    assert_same(found[f"{name}/trained"], load(strangers / "resaved" / name).encode(TEXTS))
    old, new = (ELMoModel.from_pretrained(strangers / place / name).state_dict() for place in ("saved", "resaved"))
    assert {key for key in old if not torch.equal(old[key], new[key])} == MIX
