"""Stored layers equal the layers that the model computes, and no incomplete file is left."""

import errno
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from errors import refused
from task_worker import TASKS, bilm, sentences_of
from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding

from modeling_elmo import ELMoConfig, ELMoForTokenClassification, ELMoModel, ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning import features
from modeling_elmo.run_scripts.fine_tuning.features import FeatureCollator, FeatureStore, feature_store

WORDS = [words for words, _ in sentences_of(TASKS / "wnut17_train.conll")[:12]]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return bilm(tmp_path_factory.mktemp("base") / "bilm")


@pytest.fixture(scope="module")
def model(base):
    return ELMoModel.from_pretrained(base).eval()


@pytest.fixture
def tokenizer(base):
    return ELMoTokenizer.from_pretrained(base)


def encodings(tokenizer, words: list[list[str]] = WORDS):
    inputs = tokenizer(words, is_split_into_words=True)
    labels = [[-100, *range(len(sentence)), -100] for sentence in words]
    columns = {name: [row.tolist() if isinstance(row, np.ndarray) else row for row in inputs[name]] for name in inputs}
    return Dataset.from_dict({**columns, "labels": labels, "text_number": list(range(len(words)))})


def stored(folder, model, tokenizer, words=WORDS, **options):
    collate = DataCollatorForTokenClassification(tokenizer)
    return feature_store(folder, model, encodings(tokenizer, words), collate, **options)


def assert_layers(store, number, expected):
    np.testing.assert_allclose(store[number], expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def layers_alone(model, tokenizer, *texts):
    """Layers of one row, computed in a batch of its own. Shape: `(tokens, layers, width)`."""
    inputs = tokenizer(*([text] for text in texts), is_split_into_words=True, return_tensors="pt")
    return torch.stack(model(**inputs).hidden_states, dim=2)[0]


@pytest.mark.parametrize(
    "side, batch_tokens, is_reserved", [("right", 1, True), ("left", 60, True), ("right", 2048, False)]
)
def test_each_text_has_its_own_layers(side, batch_tokens, is_reserved, tmp_path, base, model, monkeypatch):
    if not is_reserved:  # as on macOS
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    tokenizer = ELMoTokenizer.from_pretrained(base, padding_side=side)
    store = stored(tmp_path, model, tokenizer, batch_tokens=batch_tokens)
    for number, words in enumerate(WORDS):
        expected = layers_alone(model, tokenizer, words)
        assert store[number].shape == expected.shape == (len(words) + 2, 3, 16)
        assert_layers(store, number, expected)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 4 * 3 * 16 * sum(len(words) + 2 for words in WORDS)


def test_a_text_of_several_rows_is_stored_once(tmp_path, tokenizer, model):
    """For example the context of several questions."""
    collate = DataCollatorWithPadding(tokenizer)
    pairs = [(WORDS[0], WORDS[1]), (WORDS[2], WORDS[1]), (WORDS[1], WORDS[1])]
    inputs = tokenizer([list(pair) for pair in pairs], is_split_into_words=True)
    columns = {name: [list(map(np.ndarray.tolist, map(np.asarray, row))) for row in inputs[name]] for name in inputs}
    store = feature_store(tmp_path, model, Dataset.from_dict(columns), collate)
    for number, pair in enumerate(pairs):
        assert_layers(store, number, layers_alone(model, tokenizer, *pair))
    assert len(store.layers) == sum(len(words) + 2 for words in WORDS[:3])
    assert len({np.shape(ids)[1] for ids in columns["character_ids"]}) > 1  # the rows have different widths


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_head_computes_the_same_from_stored_layers(side, tmp_path, base, model):
    tokenizer = ELMoTokenizer.from_pretrained(base, padding_side=side)
    config = ELMoConfig.from_pretrained(base, num_labels=20, elmo_placement="both", task_hidden_size=8)
    torch.manual_seed(0)
    head = ELMoForTokenClassification.from_pretrained(base, config=config).eval()
    store, examples = stored(tmp_path, model, tokenizer), list(encodings(tokenizer))
    collate = DataCollatorForTokenClassification(tokenizer)
    with torch.no_grad():
        computed, read = (head(**FeatureCollator(collate, place)(examples)) for place in (None, store))
    torch.testing.assert_close(read.logits, computed.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(read.loss, computed.loss)


def test_the_file_is_used_again(tmp_path, base, tokenizer, model, monkeypatch):
    first = stored(tmp_path, model, tokenizer)
    (file,) = tmp_path.iterdir()
    made = file.stat().st_mtime_ns
    monkeypatch.setattr(ELMoModel, "forward", None)
    again = stored(tmp_path, ELMoModel.from_pretrained(base), tokenizer)
    assert file.stat().st_mtime_ns == made and list(tmp_path.iterdir()) == [file]
    assert np.array_equal(again.layers, first.layers) and isinstance(again.layers, np.memmap)
    with refused("read-only"):
        again.text(3)[0] = 0


def test_changes_that_keep_the_file(tmp_path, base, tokenizer, model):
    """Labels, word ids, padding side and the mix do not change the layers."""
    stored(tmp_path, model, tokenizer)
    other = ELMoModel.from_pretrained(base)
    torch.nn.init.normal_(other.scalar_mix.weights)
    words = tokenizer.with_vocabulary(["<S>", "</S>", "<UNK>", *WORDS[0]], padding_side="left")
    relabeled = encodings(words).map(lambda example: {"labels": example["labels"][::-1]})
    feature_store(tmp_path, other, relabeled, DataCollatorForTokenClassification(words))
    assert len(list(tmp_path.iterdir())) == 1


def test_changes_that_need_a_new_file(tmp_path, base, tokenizer, model):
    """The biLM, the texts, their order, the borders of words, truncation, and the configuration."""
    stored(tmp_path, model, tokenizer)
    other = bilm(tmp_path.parent / f"{tmp_path.name}-other", seed=1)
    stored(tmp_path, ELMoModel.from_pretrained(other), tokenizer)
    assert len(list(tmp_path.iterdir())) == 2
    joined = [[words[0] + words[1], *words[2:]] for words in WORDS]
    cut = [words[:3] for words in WORDS]
    for number, words in enumerate(([*WORDS[1:], WORDS[0]], WORDS[:-1], joined, cut), 3):
        stored(tmp_path, model, tokenizer, words)
        assert len(list(tmp_path.iterdir())) == number
    clipped = ELMoModel.from_pretrained(base, cell_clip=0.01).eval()
    store = stored(tmp_path, clipped, tokenizer)
    assert_layers(store, 0, layers_alone(clipped, tokenizer, WORDS[0]))


def test_a_word_level_bilm_reads_ids(tmp_path):
    vocabulary = ["<S>", "</S>", "<UNK>", *dict.fromkeys(word for words in WORDS for word in words)]
    tokenizer = ELMoTokenizer(vocab=vocabulary)
    sizes = {"char_vocab_size": 0, "word_embedding_size": 16, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = ELMoModel(ELMoConfig.from_preset("tiny", **sizes)).eval()
    folder = tmp_path / "features"
    store = stored(folder, model, tokenizer)
    assert_layers(store, 4, layers_alone(model, tokenizer, WORDS[4]))
    ordered = ["<S>", "</S>", "<UNK>", *sorted(vocabulary[3:])]
    stored(folder, model, tokenizer.with_vocabulary(ordered))
    assert len(list(folder.iterdir())) == 2


def disk_is_full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_reported_before_the_computation(tmp_path, tokenizer, model, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", disk_is_full)
    monkeypatch.setattr(ELMoModel, "forward", None)
    with refused("--cache_features", OSError):
        stored(tmp_path / "features", model, tokenizer)
    assert not list((tmp_path / "features").iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_stopped_computation_leaves_no_file(error, tmp_path, base, tokenizer, monkeypatch):
    model, forward, calls = ELMoModel.from_pretrained(base), ELMoModel.forward, []

    def stopped(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(ELMoModel, "forward", stopped)
    with pytest.raises(error):
        stored(tmp_path, model, tokenizer, batch_tokens=1)
    assert len(calls) == 3 and not list(tmp_path.iterdir())
    store = stored(tmp_path, model, tokenizer, batch_tokens=1)
    monkeypatch.undo()
    assert_layers(store, 0, layers_alone(model.eval(), tokenizer, WORDS[0]))


def test_a_worker_maps_the_file_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = features.DistinctTexts([[0]], [(0, 0, 1000)], [b""])
    FeatureStore(Path("layers"), texts, (3, 16), is_new=True).layers[:] = 0.5
    store = FeatureStore(Path("layers"), texts, (3, 16))
    pickled = pickle.dumps(store)
    monkeypatch.chdir("/")
    again = pickle.loads(pickled)
    assert len(pickled) < 1000 and isinstance(again.layers, np.memmap) and np.array_equal(again[0], store[0])
