"""From the options of a head and a task's data to a tokenizer and a model."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from bilm_models import make_tokenizer, needs_int8
from datasets import Dataset
from errors import refused
from safetensors.torch import load_file
from task_worker import HEAD, TASKS, WNUT17, bilm, sentences_of

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoForTokenClassification, ELMoTokenizer
from modeling_elmo.run_scripts import reproduce, run_ner_no_trainer, run_task
from modeling_elmo.run_scripts.fine_tuning.head import (
    HeadArguments,
    initial_embeddings,
    task_config,
    task_model,
    task_tokenizer,
)
from modeling_elmo.run_scripts.fine_tuning.tasks.tagging import Tagging, TaggingArguments
from modeling_elmo.run_scripts.vectors.word_vectors import WordVectors, read_word_vectors

SPECIAL = ["<PAD>", "<S>", "</S>", "<UNK>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return bilm(tmp_path_factory.mktemp("base") / "bilm")


@pytest.fixture(scope="module")
def task():
    return Tagging.read(TaggingArguments(**WNUT17))


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    path = tmp_path_factory.mktemp("vectors") / "vectors.txt"
    path.write_text("the 1 2 3\nchicago 4 5 6\ntonight -1 0 1\n", "utf-8")
    return read_word_vectors(path)


def head(folder, **options):
    return HeadArguments(**{"model_name_or_path": str(folder), "config_overrides": json.dumps(HEAD)} | options)


def words_of(tokenizer):
    return tokenizer.convert_ids_to_tokens(range(len(tokenizer)))


def test_a_wrong_name_is_found_before_the_data_are_read(tmp_path):
    options = ["--train_file", "nowhere.conll", "--output_dir", str(tmp_path), "--model_name_or_path"]
    for main, first in [(run_task.main, ["ner"]), (run_ner_no_trainer.main, []), (reproduce.main, ["ner"])]:
        with refused("no/such/model: the folder does not exist", FileNotFoundError):
            main([*first, *options, "no/such/model"])
    (weights := tmp_path / "lm_weights.hdf5").write_bytes(b"an original checkpoint")
    with refused("lm_weights.hdf5 has no config.json; .* elmo convert", FileNotFoundError):
        run_task.main(["ner", *options, str(weights)])


# The tokenizer


@pytest.mark.parametrize("least", [1, 3])
def test_words_of_the_training_text(least, folder, task):
    tokenizer = task_tokenizer(task, head(folder, word_min_count=least), task.data["train"], None)
    counts = Counter(word for words, _ in sentences_of(TASKS / "wnut17_train.conll") for word in words)
    expected = {word for word, count in counts.items() if count >= least}
    first, words = words_of(tokenizer)[:4], words_of(tokenizer)[4:]
    assert first == SPECIAL and set(words) == expected and len(words) == len(expected)
    assert [counts[word] for word in words] == sorted(counts.values(), reverse=True)[: len(words)]
    assert not tokenizer.lowercase_unknown and tokenizer.max_word_length == 16


def test_words_are_counted_as_they_are_looked_up(task, tmp_path):
    bilm(tmp_path, plain_signs=True)
    train = Dataset.from_dict({"tokens": [["“", "is", "n’t"], ["”", "was", "n't", "…"]]})
    tokenizer = task_tokenizer(task, head(tmp_path), train, None)
    assert words_of(tokenizer) == [*SPECIAL, '"', "n't"]
    assert tokenizer.encode_words(["“", "n’t", '"', "…"])[0].tolist() == [4, 5, 4, 3]
    vectors = WordVectors(["the", "“", "n’t", "n't", "”"], np.eye(5, dtype=np.float32))
    tokenizer = task_tokenizer(task, head(tmp_path), train, vectors)
    assert words_of(tokenizer) == [*SPECIAL, '"', "n't", "the"]
    start, found = initial_embeddings(vectors, words_of(tokenizer), 0, tokenizer)
    assert found == 3 and start[4:].argmax(1).tolist() == [1, 3, 0] and start[4:].sum() == 3


@pytest.mark.parametrize("options", [{"head": "linear"}, {"word_embedding_size": 0}])
def test_without_word_vectors_the_vocabulary_stays(options, folder, task):
    assert words_of(task_tokenizer(task, head(folder, **options), task.data["train"], None)) == SPECIAL


def test_the_vocabulary_of_a_bilm_with_word_vectors_stays(tmp_path, task):
    tokenizer = make_tokenizer("the", "of", max_word_length=16)
    config = ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), word_embedding_size=4, max_word_length=16)
    for part in (ELMoForPreTraining(config), tokenizer):
        part.save_pretrained(tmp_path)
    found = task_tokenizer(task, head(tmp_path), task.data["train"], None)
    assert words_of(found) == [*SPECIAL, "the", "of"]
    assert task_model(task, head(tmp_path), found, None, 0).config.vocab_size == 6


def test_words_with_a_vector_have_ids(folder, task, vectors):
    tokenizer = task_tokenizer(task, head(folder, word_min_count=10**6), task.data["train"], vectors)
    assert words_of(tokenizer) == [*SPECIAL, "the", "chicago", "tonight"] and tokenizer.lowercase_unknown
    ids = tokenizer([["Chicago", "TONIGHT", "Boston"]], is_split_into_words=True)["input_ids"][0]
    assert list(ids) == [1, 5, 6, 3, 2]
    with_capitals = WordVectors(["the", "Chicago", "tonight"], vectors.vectors)
    assert not task_tokenizer(task, head(folder), task.data["train"], with_capitals).lowercase_unknown


# The model


def model_of(task, arguments, vectors=None, seed=0, **overrides):
    tokenizer = task_tokenizer(task, arguments, task.data["train"], vectors)
    return task_model(task, arguments, tokenizer, vectors, seed, **overrides), tokenizer


def test_the_head_has_the_bilm_of_the_folder(folder, task):
    model, tokenizer = model_of(task, head(folder, word_embedding_size=7))
    saved = load_file(folder / "model.safetensors")
    own = {name: weight for name, weight in model.state_dict().items() if name.startswith("elmo.")}
    assert own and all(torch.equal(weight, saved[name]) for name, weight in own.items())
    assert not any(parameter.requires_grad for parameter in model.elmo.parameters())
    assert isinstance(model, ELMoForTokenClassification) and list(model.mixes()) == ["input"]
    embeddings = model.token_features.word_embeddings
    assert embeddings.weight.shape == (len(tokenizer), 7) and embeddings.weight.requires_grad
    assert model.config.id2label == task.config["id2label"] and model.task_hidden_size == HEAD["task_hidden_size"]
    trained, _ = model_of(task, head(folder, freeze_bilm=False))
    assert all(parameter.requires_grad for parameter in trained.elmo.parameters())


def test_without_elmo(folder, task):
    model, _ = model_of(task, head(folder, use_elmo=False))
    assert not model.mixes() and not any("elmo" in name for name in model.state_dict())


def test_word_vectors_are_in_their_rows(folder, task, vectors):
    model, tokenizer = model_of(task, head(folder, word_vectors="vectors.txt", freeze_word_vectors=True), vectors)
    weight = model.token_features.word_embeddings.weight
    assert not weight.requires_grad and weight.shape == (len(tokenizer), 3)
    ids = tokenizer.get_vocab()
    assert weight[ids["the"]].tolist() == [1, 2, 3] and weight[ids["tonight"]].tolist() == [-1, 0, 1]
    assert weight[ids["The"]].tolist() == [1, 2, 3]  # "the" has a vector
    assert not weight[0].any() and len(weight.unique(dim=0)) > len(tokenizer) - 5
    other, _ = model_of(task, head(folder, word_vectors="vectors.txt"), vectors, seed=1)
    new = other.token_features.word_embeddings.weight
    assert new.requires_grad and torch.equal(new[ids["the"]], weight[ids["the"]])
    assert not torch.equal(new[ids["you"]], weight[ids["you"]])


def test_which_option_wins(folder, task):
    """`--config_overrides` wins over other options, and an arm over both."""
    more = {"scalar_mix_l2": 0.5, "elmo_dropout": 0.25}
    arguments = head(folder, scalar_mix_l2=0.1, scalar_mix_mode="top", config_overrides=json.dumps(more))
    config = task_config(task, arguments, 9, None)
    assert (config.scalar_mix_l2, config.elmo_dropout, config.num_labels, config.vocab_size) == (0.5, 0.25, 13, 9)
    assert config.scalar_mix_mode == "top" and config.projection_size == 8
    assert task_config(task, arguments, 9, None, scalar_mix_l2=1.0).scalar_mix_l2 == 1.0


@pytest.mark.parametrize("options", [{"scalar_mix_mode": "1"}, {"config_overrides": '{"scalar_mix_mode": 1}'}])
def test_the_number_of_a_layer(options, folder, task):
    model, _ = model_of(task, head(folder, **options))
    assert model.config.scalar_mix_mode == 1 and model.mixes()["input"].layer_weights().tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "overrides, message",
    [
        ('{"task_hidden_sizes": 8}', "task_hidden_sizes.*task_hidden_size"),
        ("task_hidden_size=8", "--config_overrides task_hidden_size=8.*JSON"),
        ("[8]", r"--config_overrides \[8\].*JSON object"),
        ('{"num_labels": 7}', "num_labels"),
        ('{"num_hidden_layers": 3}', "for 8 parameters of the biLM.*--config_overrides"),
        ('{"lstm_hidden_size": 9}', "for .* parameters of the biLM.*--config_overrides"),
    ],
)
def test_overrides_that_are_refused(overrides, message, folder, task):
    with refused(message):
        model_of(task, head(folder, config_overrides=overrides))


def test_fields_of_another_head_are_not_inherited(folder, task, tmp_path):
    """They would be in no setting of the record, and a baseline of this network would count as one of the other."""
    model = ELMoForPreTraining.from_pretrained(folder)
    model.config.update(
        {"task_dropout": 0.9, "max_span_width": 3, "classifier": "esim", "scalar_mix_layer_norm": "token"}
    )
    for part in (model, ELMoTokenizer.from_pretrained(folder)):
        part.save_pretrained(tmp_path)
    config = model_of(task, head(tmp_path))[0].config
    assert (config.task_dropout, config.max_span_width, config.classifier) == (0.1, 10, "bcn")
    assert config.scalar_mix_layer_norm == "token"  # of the biLM
    plain = model_of(task, head(tmp_path, config_overrides="{}"))[0].config
    assert plain.task_dropout is None and plain.task_hidden_size is None


@pytest.mark.parametrize("least", [1, 2], ids=["of as many words", "of others"])
def test_a_trained_head_is_not_reused(least, folder, task, tmp_path, caplog):
    """Its word vectors and labels belong to other data."""
    trained, tokenizer = model_of(task, head(folder), seed=1)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(1)
    for part in (trained, tokenizer):
        part.save_pretrained(tmp_path)
    torch.manual_seed(5)
    model, _ = model_of(task, head(tmp_path, word_min_count=least))
    assert "holds a trained head; a new head is trained on its biLM" in caplog.text
    for (name, new), (_, old) in zip(model.named_parameters(), trained.named_parameters(), strict=True):
        if name.startswith("elmo."):
            assert torch.equal(new, old) and new.requires_grad == old.requires_grad
        else:
            assert new.shape != old.shape or not (new == old).any(), name


@needs_int8
def test_a_quantized_bilm_is_refused(folder, task, tmp_path):
    for part in (ELMoForPreTraining.from_pretrained(folder).quantize(), ELMoTokenizer.from_pretrained(folder)):
        part.save_pretrained(tmp_path)
    with refused("holds a biLM in 8 bits, which cannot be trained. Pass the biLM in float32"):
        model_of(task, head(tmp_path))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"config_overrides": '{"task_word_embedding_size": 8}'}, "task_word_embedding_size"),
        ({"head": "linear"}, "--word_vectors v.txt: a linear head"),
        ({"word_embedding_size": 0}, "--word_embedding_size 0 .*--word_vectors is v.txt"),
        ({"word_vectors": None, "freeze_word_vectors": True}, "--freeze_word_vectors .*without --word_vectors"),
    ],
)
def test_options_of_word_vectors_that_contradict(options, message, folder, task, vectors):
    with refused(message):
        model_of(task, head(folder, **{"word_vectors": "v.txt", **options}), vectors)


@pytest.mark.parametrize("use_elmo", [True, False])
def test_heads_are_trained_in_single_precision(use_elmo, folder, task, tmp_path):
    ELMoForPreTraining.from_pretrained(folder).half().save_pretrained(tmp_path)
    ELMoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    model, _ = model_of(task, head(tmp_path, use_elmo=use_elmo))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
