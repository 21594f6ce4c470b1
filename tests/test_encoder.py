"""The character encoder against a plain float64 loop, on every path; the vocabulary cache against the encoder."""

import copy
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bilm_models import computed_by, make_batch, make_tokenizer, seeded, tiny_model
from bilm_models import make_model as make_bilm
from errors import refused
from head_models import fails
from plain_elmo import PlainELMo
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modeling_elmo import (
    ELMoForTokenClassification,
    ELMoModel,
    encoder,
)
from modeling_elmo.encoder import distinct_rows, maxima_in_few_sizes

pytestmark = pytest.mark.usefixtures("onednn_at_any_size")

OPTIONS = [
    {},
    {"char_cnn_activation": "tanh", "num_highway_layers": 0},
    {"char_cnn_filters": [[9, 4], [1, 3]]},
    {"char_cnn_filters": [[8, 7]], "projection_size": 7},
    {"char_cnn_filters": [[1, 1]], "char_embedding_size": 1, "num_highway_layers": 3},
]
WORDS = ["play", "plays", "a", "", "an-extremely-long-word-that-is-cut", "밥", "."]


def make_model(**overrides):
    """With random biases of the convolutions: they are 0 at first, which would hide a missing bias."""
    model = make_bilm(**overrides)
    for convolution in model.char_encoder.convolutions:
        convolution.bias.data.normal_()
    return model


def assert_near(found, expected):
    assert_close(found, expected, atol=1e-6, rtol=1e-5)


def make_words(count, config):
    return make_batch(config, [count])["character_ids"][0]


def run(model, words, backend):
    with computed_by(backend), torch.set_grad_enabled(backend != "inference"):
        return model.encode_words(words)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend, count", [("reference", 3), ("inference", 0), ("inference", 101), ("training", 101)])
def test_every_path_equals_plain_float64(options, backend, count):
    model = make_model(**options)
    words = make_words(count, model.config)
    plain = PlainELMo(model.state_dict(), model.config)
    expected = np.array([plain.token(word) for word in words.numpy()]).reshape(count, 7)
    np.testing.assert_allclose(run(model, words, backend).detach().numpy(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "options, count, sizes", [*zip(OPTIONS, [1, 64, 301, 512, 513], [64, 64, 320, 512, 1024], strict=True)]
)
def test_few_sizes_equal_the_definition(options, count, sizes):
    """What accelerators compute. Words are all different, so that no maximum is reached twice but in their padding."""
    model = make_model(max_word_length=23, **options).double()
    words, parts = make_words(count, model.config), model.char_encoder
    words[::3, 1] = 0  # the padding character, which has no gradient
    inputs = []
    for convolution in parts.convolutions:
        convolution.register_forward_pre_hook(lambda _, given: inputs.append(given[0].shape))
    found = maxima_in_few_sizes(parts.char_embeddings, parts.convolutions, words, parts.widest)
    assert {(shape[0], shape[2] % 8 in (0, 23 % 8)) for shape in inputs} == {(sizes, True)}
    expected = parts.convolve(words)
    assert_close(found, expected)
    wanted = [*parts.char_embeddings.parameters(), *parts.convolutions.parameters()]
    gradients = [torch.autograd.grad(maxima.sin().sum(), wanted) for maxima in (found, expected)]
    assert_close(*gradients)


def test_the_first_of_equal_positions_has_the_gradient():
    """In the definition each has an equal part. The gradient of the filter is the same, since the windows are."""
    embedding, convolution = torch.nn.Embedding(3, 1), torch.nn.Conv1d(1, 1, 1)
    embedding.weight.data = torch.tensor([[0.0], [1.0], [1.0]])
    convolution.weight.data.fill_(2.0)
    maxima = maxima_in_few_sizes(embedding, [convolution], torch.tensor([[0, 1, 2, 0]]), 1)
    gradients = torch.autograd.grad(maxima.sum(), [embedding.weight, convolution.weight])
    assert [gradient.flatten().tolist() for gradient in gradients] == [[0, 2, 0], [1]]


@pytest.mark.parametrize("options, count", [*zip(OPTIONS, [1, 301, 301, 301, 301], strict=True)])
def test_gradients_equal_the_definition(options, count):
    model = make_model(**options).double()
    words = make_words(count, model.config)
    words[::3, 1] = 0  # the padding character, which has no gradient
    parameters = model._word_parameters()
    found = [torch.autograd.grad(run(model, words, b).sin().sum(), parameters) for b in ("reference", "training")]
    assert_close(*found)


@pytest.mark.parametrize("backend", ["reference", "inference", "training"])
def test_words_are_cropped(backend):
    """Windows are computed up to the longest word plus one filter, not to max_word_length."""
    model = make_model(max_word_length=50)
    words = make_words(20, model.config).clone()
    words[:, 3:] = 29
    with (
        patch.object(F, "conv1d", wraps=F.conv1d) as convolve,
        patch.object(F, "embedding_bag", wraps=F.embedding_bag) as look_up,
    ):
        run(model, words, backend)
    lengths = [call.args[0].shape[-1] for call in convolve.call_args_list]
    lengths += [len(call.args[0]) // 20 for call in look_up.call_args_list]
    assert lengths and max(lengths) <= 3 + 4


def test_bfloat16_sums_in_float32():
    model = make_model(char_cnn_filters=[[7, 64]], char_embedding_size=16)
    words = make_words(100, model.config)
    exact = run(model, words, "reference")
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 instructions")
    rounded = run(model.bfloat16(), words, "inference")
    assert rounded.dtype == torch.bfloat16
    assert ((rounded - exact).square().mean() / exact.square().mean()).sqrt() < 1e-2


@pytest.mark.parametrize("part", ["char_embeddings", "convolutions.1"])
def test_tables_follow_the_parameters(part):
    model, other = make_model(), make_model(seed=5)
    words = make_words(10, model.config)
    before = run(model, words, "inference")
    weight, new = (m.char_encoder.get_submodule(part).weight for m in (model, other))
    for change in (lambda: weight.data.copy_(new), lambda: setattr(weight, "data", weight.data.clone() * 2)):
        change()
        after = run(model, words, "inference")
        assert (after - before).abs().max() > 1e-3
        assert_near(after, run(model, words, "reference"))
        before = after


def test_a_write_to_a_row_is_seen():
    """Through `.data`, of which torch keeps no version."""
    model = make_model()
    words = make_words(10, model.config)
    for row in range(len(model.char_encoder.char_embeddings.weight)):
        run(model, words, "inference")
        model.char_encoder.char_embeddings.weight.data[row] = 3.0
        expected = run(model, words, "reference")
        assert_near(run(model, words, "inference"), expected)


def test_distinct_rows_survive_equal_hashes(monkeypatch):
    rows = torch.randint(0, 3, (50, 4), generator=seeded())
    for _ in range(2):
        distinct, inverse = distinct_rows(rows)
        assert torch.equal(distinct[inverse], rows)
        assert len(distinct) == len({tuple(row) for row in rows.tolist()})
        monkeypatch.setattr(encoder, "row_hashes", lambda rows: rows.sum(1))


def make_pair(word_embedding_size=0, cls=ELMoModel, seed=0):
    tokenizer = make_tokenizer("play", "plays")
    sizes = {"vocab_size": len(tokenizer), "word_embedding_size": word_embedding_size}
    return tiny_model(cls, seed, **sizes), tokenizer


def vectors(model, tokenizer, words=WORDS):
    encoding = tokenizer(words, is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        return getattr(model, "elmo", model)(**encoding).last_hidden_state


def count_computed(model, monkeypatch):
    counts = []
    compute = model.compute_words
    monkeypatch.setattr(model, "compute_words", lambda words: counts.append(len(words)) or compute(words))
    return counts


@torch.no_grad()
def test_the_cache_reads_rows_in_any_shape():
    model, tokenizer = make_pair(5)
    inputs = tokenizer(WORDS, is_split_into_words=True, return_tensors="pt")
    rows = model.word_ids(inputs["character_ids"], inputs["input_ids"])
    expected = model.encode_words(rows)
    model.cache_vocabulary(WORDS[:4], tokenizer)
    assert_near(model.encode_words(rows), expected)


@pytest.mark.parametrize("width", [0, 5])
def test_known_words_are_looked_up_and_others_computed(width, monkeypatch):
    model, tokenizer = make_pair(width)
    expected = vectors(model, tokenizer)
    model.cache_vocabulary(WORDS[:4] * 2, tokenizer, batch_size=3)
    counts = count_computed(model, monkeypatch)
    assert_near(vectors(model, tokenizer), expected)
    assert counts == [len(WORDS) - 4]  # the cache also has the markers
    vectors(model, tokenizer, WORDS[:4])
    assert counts == [len(WORDS) - 4]
    assert not any("vocabulary_cache" in name for name in model.state_dict())
    encoding = tokenizer(WORDS[:4], is_split_into_words=True, return_tensors="pt")
    model(**encoding).last_hidden_state.sum().backward()  # gradients pass through the characters
    assert len(counts) == 2 and model.char_encoder.char_embeddings.weight.grad.any()
    model.freeze()
    model(**encoding).elmo_embeddings.sum().backward()
    assert len(counts) == 2


def test_words_with_equal_hashes_are_told_apart(monkeypatch):
    model, tokenizer = make_pair()
    expected = vectors(model, tokenizer)
    monkeypatch.setattr(encoder, "row_hashes", lambda rows: rows.long().sum(1) * 0)
    model.cache_vocabulary(WORDS, tokenizer)
    assert_near(vectors(model, tokenizer), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.token_projection.bias.data.add_(1e-3),
        lambda model: model.load_state_dict(make_pair(seed=1)[0].state_dict()),
        lambda model: setattr(model.token_projection, "weight", torch.nn.Parameter(torch.zeros(16, 124))),
    ],
)
def test_a_changed_encoder_drops_the_cache(change):
    """What does not change the encoder keeps it."""
    model, tokenizer = make_pair()
    model.cache_vocabulary(WORDS, tokenizer)
    vectors(model, tokenizer)
    model.load_state_dict(copy.deepcopy(model.state_dict()))  # the same values, written again
    model.forward_lstm.layers[0].state_linear.weight.data.add_(1e-3)
    vectors(model, tokenizer)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        vectors(model.to(dtype), tokenizer, WORDS)
        assert model.vocabulary_cache is not None
    assert copy.deepcopy(model).vocabulary_cache is not None
    change(model)
    fresh, _ = make_pair()
    fresh.load_state_dict(model.state_dict())
    expected = vectors(fresh, tokenizer)
    assert_near(vectors(model, tokenizer), expected)
    assert model.vocabulary_cache is None


@pytest.mark.parametrize("cls, dtype", [(ELMoModel, torch.float32), (ELMoForTokenClassification, torch.bfloat16)])
def test_a_saved_cache_is_loaded(tmp_path, cls, dtype, monkeypatch):
    model, tokenizer = make_pair()
    model.cache_vocabulary(WORDS[:3], tokenizer, save=True)
    model.save_pretrained(tmp_path / "base")
    loaded = cls.from_pretrained(tmp_path / "base", dtype=dtype)
    loaded.save_pretrained(tmp_path / "again")
    loaded = cls.from_pretrained(tmp_path / "again", dtype=dtype)
    counts = count_computed(getattr(loaded, "elmo", loaded), monkeypatch)
    found = vectors(loaded, tokenizer)
    assert counts == [len(WORDS) - 3]
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert_close(found.float(), vectors(model, tokenizer), atol=tolerance, rtol=tolerance)
    model.char_encoder.convolutions[0].weight.data += 1e-3  # a cache of other weights is refused, and saved no more
    model.save_pretrained(tmp_path / "base")
    loaded = cls.from_pretrained(tmp_path / "base", dtype=dtype)
    vectors(loaded, tokenizer)
    loaded.save_pretrained(tmp_path / "again")
    for each in (loaded, cls.from_pretrained(tmp_path / "again")):
        assert getattr(each, "elmo", each).vocabulary_cache is None


def test_several_devices_need_not_exchange_the_cache():
    model, tokenizer = make_pair(cls=ELMoForTokenClassification)
    model.elmo.cache_vocabulary(WORDS, tokenizer)
    ignored = model._ddp_params_and_buffers_to_ignore
    assert set(ignored) == {f"elmo.vocabulary_cache.{name}" for name in ("hashes", "words", "vectors", "sample")}


def test_a_cache_does_not_hide_words_from_a_hook():
    model, tokenizer = make_pair()
    model.cache_vocabulary(WORDS, tokenizer)
    expected, seen = vectors(model, tokenizer), []
    model.char_encoder.register_forward_hook(lambda *call: seen.append(call[2]))
    assert_near(vectors(model, tokenizer), expected)
    assert seen[0].shape[:2] == (1, len(WORDS) + 2)
    with refused("remove the hook"):
        model.cache_vocabulary(WORDS, tokenizer)


def test_a_saved_cache_of_an_offloaded_encoder(tmp_path):
    model, tokenizer = make_pair()
    expected = vectors(model, tokenizer)
    model.cache_vocabulary(WORDS, tokenizer, save=True)
    model.save_pretrained(tmp_path)
    places = {name: "disk" if name == "char_encoder" else "cpu" for name, _ in model.named_children()}
    loaded = ELMoModel.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path).eval()
    assert_near(vectors(loaded, tokenizer), expected)
    with refused("weights of the token encoder are offloaded by `device_map`"):
        loaded.cache_vocabulary(WORDS, tokenizer)


class WithoutFloat64(TorchDispatchMode):
    """A device that has no float64, as MPS."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        assert not any(isinstance(each, torch.Tensor) and each.dtype == torch.float64 for each in tree_leaves(found))
        return found


def test_a_cache_needs_no_float64():
    model, tokenizer = make_pair()
    with WithoutFloat64():
        model.cache_vocabulary(WORDS, tokenizer)
        vectors(model, tokenizer)
    assert model.vocabulary_cache.sums


def test_misuse_of_the_cache_is_explained():
    model, tokenizer = make_pair()
    fails("received str and ELMoTokenizer", model.cache_vocabulary, "play", tokenizer)
    fails("no words", model.cache_vocabulary, [], tokenizer)
    wordless = lambda words, **_: {"input_ids": torch.ones(1, 3)}  # noqa: E731
    fails("pass `character_ids`", model.cache_vocabulary, ["play"], wordless)
