"""The model against a plain float64 implementation; its guarantees to users; its error messages."""

import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import recursively_apply
from head_models import check_weights_on_disk, fails
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_elmo import PlainELMo
from transformers.utils import ModelOutput

import modeling_elmo.modeling_elmo
from modeling_elmo import (
    ELMoConfig,
    ELMoForPreTraining,
    ELMoForTokenClassification,
    ELMoModel,
    ELMoTokenizer,
    ScalarMix,
    elmo_backend,
)

pytestmark = pytest.mark.usefixtures("onednn_at_any_size")

LENGTHS = [6, 1, 4]
both_classes = pytest.mark.parametrize("cls", [ELMoModel, ELMoForPreTraining])  # heads: tests/test_task_heads.py


def make_config(**overrides):
    sizes = {"char_cnn_filters": [[1, 3], [2, 5], [4, 6]], "max_word_length": 9, "char_vocab_size": 30}
    sizes |= {"lstm_hidden_size": 21, "projection_size": 7, "vocab_size": 12}
    return ELMoConfig.from_preset("tiny", **{**sizes, **overrides})


def make_model(cls=ELMoModel, seed=0, **overrides):
    torch.manual_seed(seed)
    return cls(make_config(**overrides)).eval()


def make_batch(config, lengths=LENGTHS, seed=0, side="right"):
    """Random words of 1 to max_word_length characters; id 29 after the end of a word, 0 at padding words."""
    generator = torch.Generator().manual_seed(seed)
    width = config.max_word_length
    time = max(lengths)
    characters = torch.randint(1, 29, (len(lengths), time, width), generator=generator)
    ends = torch.randint(1, width + 1, (len(lengths), time, 1), generator=generator)
    characters = characters.where(torch.arange(width) < ends, 29)
    mask = torch.arange(time) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    words = torch.randint(4, config.vocab_size, mask.shape, generator=generator) * mask
    return {"character_ids": characters * mask[..., None], "input_ids": words, "attention_mask": mask.long()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"char_cnn_activation": "tanh", "num_highway_layers": 0},
        {"use_skip_connections": False, "cell_clip": None, "projection_clip": 0.2, "num_hidden_layers": 3},
        {"lstm_hidden_size": 7, "cell_clip": 0.1, "num_highway_layers": 1},
        {"char_cnn_filters": [[9, 4], [1, 3]], "num_hidden_layers": 1},
        {"word_embedding_size": 4},
        {"word_embedding_size": 7, "char_vocab_size": 0},  # no projection of tokens
    ],
)
@pytest.mark.parametrize("backend", ["reference", "inference"])
def test_all_layers_equal_plain_float64(options, backend):
    model = make_model(**options)
    batch = make_batch(model.config)
    characters, ids = batch["character_ids"].numpy(), batch["input_ids"].numpy()
    if "char_vocab_size" in options:
        del batch["character_ids"]
    with torch.no_grad(), elmo_backend(backend):
        output = model(**batch)
    plain = PlainELMo(model.state_dict(), model.config)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    for row, length in enumerate(LENGTHS):
        expected = plain(characters[row, :length], ids[row, :length] if "word_embedding_size" in options else None)
        layers = torch.stack(output.hidden_states)[:, row]
        np.testing.assert_allclose(layers[:, :length].numpy(), expected, atol=1e-6, rtol=1e-5)
        np.testing.assert_allclose(output.elmo_embeddings[row, :length].numpy(), expected.mean(0), atol=1e-6, rtol=1e-5)
        assert not layers[:, length:].any() and not output.elmo_embeddings[row, length:].any()
    torch.testing.assert_close(output.last_hidden_state, output.hidden_states[-1])


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_same_text_same_vectors(data):
    """In any batch, in any order, with any padding, and with masked positions anywhere."""
    model = make_model()
    rows = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    extra = data.draw(st.integers(0, 3))
    spread = data.draw(st.booleans())
    texts = [make_batch(model.config, [1 + seed], seed)["character_ids"][0] for seed in range(6)]
    time = max(len(texts[row]) for row in rows) + extra
    characters = torch.zeros(len(rows), time, model.config.max_word_length, dtype=torch.long)
    places = []
    for number, row in enumerate(rows):
        free = list(range(time))
        if spread:
            free = sorted(data.draw(st.permutations(free))[: len(texts[row])])
        elif data.draw(st.booleans()):
            free = free[time - len(texts[row]) :]
        places.append(free[: len(texts[row])])
        characters[number, places[-1]] = texts[row]
    with torch.no_grad():
        batched = model(characters)
        for number, row in enumerate(rows):
            alone = model(texts[row][None])
            together = torch.stack(batched.hidden_states)[:, number, places[number]]
            assert (together - torch.stack(alone.hidden_states)[:, 0]).abs().max() <= 2e-6
            for mine, yours in zip(batched.final_states, alone.final_states, strict=True):
                assert (mine[number] - yours[0]).abs().max() <= 2e-6


def test_states_continue_a_text():
    model = make_model()
    text = make_batch(model.config, [8, 8])["character_ids"]
    with torch.no_grad():
        whole = model(text)
        first = model(text[:, :3])
        second = model(text[:, 3:], initial_states=first.final_states)
    size = model.config.projection_size
    for layer, (a, b) in enumerate(zip(first.hidden_states, second.hidden_states, strict=True)):
        joined = torch.cat([a, b], 1)[..., :size]  # the forward half read the same words before each word
        torch.testing.assert_close(joined, whole.hidden_states[layer][..., :size], atol=1e-6, rtol=1e-5)
    for mine, yours in zip(second.final_states, whole.final_states, strict=True):
        torch.testing.assert_close(mine[:, :, 0], yours[:, :, 0], atol=1e-6, rtol=1e-5)


def test_a_state_stays_in_its_row():
    """A row of padding keeps its state, and one that is not finite reaches no other row."""
    model = make_model()
    batch = make_batch(model.config, [3, 0, 4])
    states = tuple(torch.randn(3, 2, 2, size, generator=torch.Generator().manual_seed(3)) for size in (7, 21))
    with torch.no_grad():
        output = model(**batch, initial_states=states)
        for before, after in zip(states, output.final_states, strict=True):
            assert torch.equal(before[1], after[1]) and not torch.equal(before[0], after[0])
        assert not output.last_hidden_state[1].any()
        for state, value in zip(states, (torch.nan, torch.inf), strict=True):
            state[0] = value
            found = model(**batch, initial_states=states).last_hidden_state[1:]
            torch.testing.assert_close(found, output.last_hidden_state[1:])


@pytest.mark.parametrize("side", ["right", "left"])
def test_two_texts_in_a_row_do_not_mix(side):
    model = make_model()
    question, context = (make_batch(model.config, [n], seed=n)["character_ids"] for n in (3, 5))
    before, after = (0, 2) if side == "right" else (2, 0)
    pair = F.pad(torch.cat([question, context], 1), (0, 0, before, after))
    types = F.pad(torch.tensor([[0] * 3 + [1] * 5]), (before, after))
    with torch.no_grad():
        output = model(pair, token_type_ids=types)
        alone = torch.cat([model(text).last_hidden_state for text in (question, context)], 1)
    torch.testing.assert_close(output.last_hidden_state[:, before : before + 8], alone, atol=1e-6, rtol=1e-5)
    assert output.final_states is None
    states = tuple(torch.zeros(1, 2, 2, size) for size in (7, 21))
    fails("`token_type_ids` mark two texts in a row", model, pair, token_type_ids=types, initial_states=states)


def test_inputs_embeds_replace_words():
    model = make_model()
    batch = make_batch(model.config)
    with torch.no_grad():
        expected = model(**batch)
        tokens = expected.hidden_states[0][..., : model.config.projection_size]
        for dtype in (torch.float32, torch.float64):
            output = model(inputs_embeds=tokens.to(dtype), attention_mask=batch["attention_mask"])
            torch.testing.assert_close(output.elmo_embeddings, expected.elmo_embeddings)


def test_each_distinct_word_is_encoded_once(monkeypatch):
    model = make_model()
    word = make_batch(model.config, [1])["character_ids"]
    seen = []
    monkeypatch.setattr(model, "encode_words", lambda ids: seen.append(len(ids)) or torch.zeros(len(ids), 7))
    model(word.expand(2, 5, -1))
    assert seen == [1]


STEPS_OF_SECTION_3 = [  # a piece of each line, in the order of the paper
    "embedded = self.char_embeddings(characters)",
    "convolution(embedded).amax(-1)",
    "features = self.activation(maxima)",
    "torch.lerp(features, transformed, gate)",
    "token_vectors = fast_linear(self.token_projection, token_vectors)",
    "gates_SG = (gates_SG + self.state_linear(hidden_SP))",
    "cell_SH = i.sigmoid() * g.tanh() + (f + self.forget_bias).sigmoid() * cell_SH",
    "cell_SH = cell_SH.clamp(-self.cell_clip, self.cell_clip)",
    "hidden_SP = (o.sigmoid() * cell_SH.tanh())",
    "hidden_SP = self.projection(hidden_SP)",
    "hidden_SP = hidden_SP.clamp(-self.projection_clip, self.projection_clip)",
    "output_NP = output_NP + inputs",
    "lstm(stream, *start) for lstm",
    "mixed = self.gamma * sum(",
    "loss, losses_N = self.softmax(",
]


def traced_lines(call):
    """The numbers of the lines of `modeling_elmo.py` that a call reaches, as a debugger would."""
    file, lines = modeling_elmo.modeling_elmo.__file__, set()

    def trace(frame, event, _):
        if frame.f_code.co_filename != file:
            return None
        lines.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def test_a_debugger_reaches_each_step_of_the_paper():
    """As the docstring of the file promises for `elmo_backend("reference")`. Kernels skip the cell and the filters."""
    language_model, model = make_model(ELMoForPreTraining), make_model()
    batch = make_batch(model.config)

    def run():
        with torch.no_grad():
            language_model(**batch, labels=batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100))
            model(**batch)

    source = Path(modeling_elmo.modeling_elmo.__file__).read_text(encoding="utf-8").splitlines()
    numbers = {}
    for step in STEPS_OF_SECTION_3:
        (numbers[step],) = [number for number, line in enumerate(source, 1) if step in line]
    with elmo_backend("reference"):
        reached = traced_lines(run)
    assert [step for step, number in numbers.items() if number not in reached] == []
    assert not {numbers[step] for step in STEPS_OF_SECTION_3[:2]} & traced_lines(run)


PARTS = ["char_encoder", "char_encoder.char_embeddings", "char_encoder.convolutions.1", "char_encoder.highways.0.carry"]
HOOKS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@pytest.mark.filterwarnings("ignore:Full backward hook")  # ids have no gradient
@pytest.mark.parametrize("part", [*PARTS, "word_embeddings", "token_projection"])
def test_a_hook_sees_every_position_of_the_text(part):
    """Also of repeated words, and of padding. Words are not cropped, and the vectors are the same."""
    model = make_model(word_embedding_size=4)
    batch = make_batch(model.config)
    for ids in (batch["character_ids"], batch["input_ids"]):
        ids[:, 3] = ids[:, 0]
    batch["character_ids"][:, :, 4:] = 29
    batch["character_ids"] *= batch["attention_mask"][..., None]
    expected = model(**batch).last_hidden_state
    for kind in HOOKS:
        seen = []
        handle = getattr(model.get_submodule(part), f"register_{kind}")(lambda *call, seen=seen: seen.append(call[-1]))
        found = model(**batch).last_hidden_state
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        handle.remove()
        tensor = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
        shape = (18,) if "convolutions" in part else (3, 6)
        assert len(seen) == 1 and tensor.shape[: len(shape)] == shape, kind
        if part.endswith("char_embeddings"):
            assert tensor.shape[2] == model.config.max_word_length


def test_a_hook_can_change_one_of_two_equal_words():
    model = make_model()
    characters = make_batch(model.config, [1])["character_ids"].expand(1, 3, -1)
    expected = model(characters).hidden_states[0]
    factors = torch.tensor([1.0, 2.0, 1.0])[:, None, None]
    model.char_encoder.char_embeddings.register_forward_hook(lambda _, ids, vectors: vectors * factors)
    changes = (model(characters).hidden_states[0] - expected).abs().amax(-1)
    assert (changes > 1e-3).tolist() == [[False, True, False]]


# The mix


def plain_mix(layers, mask, mode, weights, gamma, norm):
    """Equation 1 in float64 numpy; `norm` as AllenNLP's `scalar_mix.py` and bilm-tf's `elmo.py` define it."""
    layers, mask = layers.astype(np.float64), mask.astype(bool)
    count = {"learned": lambda: np.exp(weights) / np.exp(weights).sum(), "average": lambda: np.full(len(layers), 1 / 3)}
    shares = count[mode]() if mode in count else np.eye(len(layers))[-1 if mode == "top" else mode]
    if norm == "token":
        layers = (layers - layers.mean(-1, keepdims=True)) / np.sqrt(layers.var(-1, keepdims=True) + 1e-5)
    elif norm:
        counted = mask.copy()
        if norm == "bilm":
            for row in counted:
                real = np.flatnonzero(row)
                row[real[[0, -1]]] = False
        layers = np.stack([(h - h[counted].mean()) / np.sqrt(h[counted].var() + 1e-12) for h in layers])
    return gamma * np.einsum("l,lbtd->btd", shares, layers) * mask[..., None]


@pytest.mark.parametrize("norm", [None, "allennlp", "bilm", "token"])
@pytest.mark.parametrize("mode", ["learned", "average", "top", 0, 1])
def test_scalar_mix_is_equation_1(mode, norm):
    mix = ScalarMix(make_config(scalar_mix_mode=mode, scalar_mix_layer_norm=norm, scalar_mix_l2=0.1))
    generator = torch.Generator().manual_seed(0)
    layers = torch.randn(3, 2, 5, 14, generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]])
    weights = torch.randn(3, generator=generator)
    with torch.no_grad():
        mix.gamma.fill_(1.7)
        if mode == "learned":
            mix.weights.copy_(weights)
        mixed = mix(tuple(layers), mask)
    expected = plain_mix(layers.numpy(), mask.numpy(), mode, weights.double().numpy(), 1.7, norm)
    np.testing.assert_allclose(mixed.numpy(), expected, atol=2e-5)
    penalty = 0.1 * weights.square().sum() if mode == "learned" else torch.tensor(0.0)
    torch.testing.assert_close(mix.penalty(), penalty)
    assert mix(tuple(layers[:, :, :2]), torch.ones(2, 2)).isfinite().all()  # nothing but markers
    if norm != "bilm":  # which finds the markers by the rows
        whole = mix(tuple(layers), torch.ones(2, 5))
        torch.testing.assert_close(mix(tuple(layers)), whole)
        torch.testing.assert_close(mix(tuple(layers.flatten(1, 2))), whole.flatten(0, 1))
    else:
        fails("the layers have no rows; pass `attention_mask`", mix, tuple(layers.flatten(1, 2)))
    fails("received 2 layers; pass all 3", mix, tuple(layers[:2]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_sentence_embeddings_are_means_over_words(side):
    """Rows with one text, two texts, only markers, and only padding."""
    model = make_model()
    torch.nn.init.normal_(model.scalar_mix.weights)
    batch = make_batch(model.config, [6, 5, 2, 0], side=side)
    markers = torch.tensor([[1, 0, 0, 0, 0, 2], [1, 0, 2, 1, 2, 0], [1, 2, 0, 0, 0, 0], [0] * 6])
    shift = int(side == "left")
    if shift:
        markers = torch.stack([row.roll(6 - length) for row, length in zip(markers, [6, 5, 2, 0], strict=True)])
    batch["input_ids"] = torch.where(markers > 0, markers, batch["input_ids"])
    batch["token_type_ids"] = torch.zeros_like(markers)
    batch["token_type_ids"][1, 3 + shift :] = 1
    mixed = model(**batch).elmo_embeddings
    expected = torch.stack([mixed[0, 1:5].mean(0), mixed[1, 1 + shift], mixed[2, 0] * 0, mixed[3, 0] * 0])
    torch.testing.assert_close(model.sentence_embeddings(**batch), expected, rtol=0, atol=1e-6)
    words = (batch["attention_mask"] * (batch["input_ids"] > 2)).bool()
    tokens = torch.where(words[..., None], mixed, expected[:, None])
    torch.testing.assert_close(model.token_embeddings(**batch), tokens, rtol=0, atol=1e-6)
    fails("`input_ids` are missing", model.sentence_embeddings, batch["character_ids"])
    fails("add_mixing_layer=False", ELMoModel(model.config, add_mixing_layer=False).token_embeddings, **batch)


# Training


@both_classes
def test_every_parameter_gets_a_gradient(cls):
    model = make_model(cls, word_embedding_size=4, scalar_mix_layer_norm="token").train()
    batch = make_batch(model.config)
    if cls is ELMoModel:
        model(**batch).elmo_embeddings.square().sum().backward()
    else:
        model(**batch, labels=batch["input_ids"].where(batch["attention_mask"].bool(), -100)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_dropout_acts_in_training_alone():
    model = make_model(dropout=0.5)
    batch = make_batch(model.config)
    torch.testing.assert_close(model(**batch).last_hidden_state, model(**batch).last_hidden_state)
    model.train()
    assert not torch.equal(model(**batch).last_hidden_state, model(**batch).last_hidden_state)
    model.freeze()
    model.train()
    torch.testing.assert_close(model(**batch).last_hidden_state, model(**batch).last_hidden_state)
    learns = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learns == {"scalar_mix.weights", "scalar_mix.gamma"}


def test_initialization_table():
    config = ELMoConfig.from_preset("small", vocab_size=2000, word_embedding_size=32)
    torch.manual_seed(0)
    model = ELMoForPreTraining(config)

    def uniform(parameter, bound):
        assert parameter.abs().max() <= bound
        assert abs(parameter.std() * math.sqrt(3) / bound - 1) < 0.1

    def normal(parameter, std):
        assert abs(parameter.std() / std - 1) < 0.1 and abs(parameter.mean()) < 0.1 * std

    elmo, encoder = model.elmo, model.elmo.char_encoder
    uniform(encoder.char_embeddings.weight[1:], 1)
    assert not encoder.char_embeddings.weight[0].any()
    uniform(encoder.convolutions[3].weight, 0.05)
    normal(encoder.highways[0].transform.weight, 2048**-0.5)
    assert (encoder.highways[0].carry.bias == -2).all() and not encoder.highways[0].transform.bias.any()
    normal(elmo.token_projection.weight, 2080**-0.5)
    layer = elmo.backward_lstm.layers[1]
    uniform(layer.input_linear.weight, math.sqrt(6 / (128 + 128 + 4096)))
    uniform(layer.state_linear.weight, math.sqrt(6 / (128 + 128 + 4096)))
    uniform(layer.projection.weight, math.sqrt(6 / (1024 + 128)))
    assert not layer.input_linear.bias.any()
    uniform(elmo.word_embeddings.weight[1:], math.sqrt(6 / (2000 + 32)))
    assert not elmo.word_embeddings.weight[0].any()
    normal(model.softmax.weight[1:], 128**-0.5)
    assert not model.softmax.weight[0].any() and not model.softmax.bias.any()
    tanh = ELMoModel(ELMoConfig.from_preset("small", char_cnn_activation="tanh"))
    normal(tanh.char_encoder.convolutions[5].weight, (6 * 16) ** -0.5)


# The language model


def plain_log_probs(model, batch, row):
    """Log-probabilities `(2, time, classes)` of both directions for one row's tokens in float64, without <PAD>.

    They are 0 at positions that a direction does not predict.
    """
    plain = PlainELMo(model.elmo.state_dict(), model.config)
    weight, bias = model.softmax.weight.detach().double().numpy(), model.softmax.bias.detach().double().numpy()
    top = plain(batch["character_ids"][row][batch["attention_mask"][row].bool()].numpy())[-1]
    forward, backward = np.split(top, 2, axis=1)
    found = np.zeros((2, len(top), len(weight) - 1))
    for position in range(len(top)):
        for direction, source in ((0, position - 1), (1, position + 1)):
            if 0 <= source < len(top):
                logits = (weight @ (backward if direction else forward)[source] + bias)[1:]
                found[direction, position] = logits - np.log(np.exp(logits).sum())
    return found


@pytest.mark.parametrize("side", ["right", "left"])
def test_scores_are_log_probabilities_and_the_loss_is_their_mean(side):
    model = make_model(ELMoForPreTraining)
    with torch.no_grad():
        model.softmax.bias.uniform_(-1, 1)
    batch = make_batch(model.config, side=side)
    expected = np.zeros((2, *batch["input_ids"].shape))
    for row, real in enumerate(batch["attention_mask"].bool()):
        targets = batch["input_ids"][row, real] - 1  # without <PAD>
        expected[:, row, real] = plain_log_probs(model, batch, row)[:, range(len(targets)), targets]
    scores = model.score(**batch)
    np.testing.assert_allclose(scores.forward_log_probs, expected[0], atol=1e-6)
    np.testing.assert_allclose(scores.backward_log_probs, expected[1], atol=1e-6)

    labels = batch["input_ids"].where(batch["attention_mask"].bool(), -100)
    labels[0, 2] = -100
    expected *= (labels != -100).numpy()
    forward, backward = (-each.sum() / np.count_nonzero(each) for each in expected)
    output = model(**batch, labels=labels)
    assert not output.forward_loss.requires_grad and not output.backward_loss.requires_grad
    assert output.forward_loss.item() == pytest.approx(forward, abs=1e-6)
    assert output.backward_loss.item() == pytest.approx(backward, abs=1e-6)
    assert output.loss.item() == pytest.approx((forward + backward) / 2, abs=1e-6)
    counted = model(**batch, labels=labels, num_items_in_batch=10)
    assert counted.loss.item() == pytest.approx(-expected.sum() / 20, abs=1e-6)
    assert torch.equal(model(**batch, labels=labels.to(torch.int8)).loss, output.loss)


def test_two_streams_equal_one_text_read_twice():
    """The backward direction reads its own stream left to right; here that stream is the text reversed."""
    model = make_model(ELMoForPreTraining)
    batch = make_batch(model.config, [5, 5])
    words = batch["input_ids"]
    one = model(**batch, labels=words, output_hidden_states=True)
    ignored = torch.full((2, 1), -100)
    two = model(
        **batch,
        forward_targets=torch.cat([words[:, 1:], ignored], 1),
        backward_character_ids=batch["character_ids"].flip(1),
        backward_targets=torch.cat([words.flip(1)[:, 1:], ignored], 1),
    )
    torch.testing.assert_close(one.forward_loss, two.forward_loss)
    torch.testing.assert_close(one.backward_loss, two.backward_loss)
    for mine, yours in zip(one.final_states, two.final_states, strict=True):
        torch.testing.assert_close(mine, yours)
    assert len(one.hidden_states) == 3 and two.hidden_states is None


@both_classes
@pytest.mark.parametrize("options", [{}, {"char_vocab_size": 0, "word_embedding_size": 7}], ids=["char", "word"])
def test_special_words_with_one_id_are_refused_where_they_are_needed(cls, options):
    """By masks and the softmax. Tools for all models give them one id, and pass an attention mask."""
    model, batch = make_model(cls, **options), make_batch(make_config(), lengths=[6, 4])
    same = make_model(cls, **options, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0))
    same.load_state_dict(model.state_dict())
    batch = {name: tensor for name, tensor in batch.items() if name != "character_ids" or not options}
    show = {"output_hidden_states": True}
    assert all(map(torch.equal, same(**batch, **show).hidden_states, model(**batch, **show).hidden_states))
    message = "'pad_token_id': 0, 'bos_token_id': 0, 'eos_token_id': 0, .*; pass different ids"
    without_mask = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    if options:
        fails(message, same, **without_mask)
    else:
        same(**without_mask)
    if cls is ELMoForPreTraining:
        fails(message, same, **batch, labels=batch["input_ids"].where(batch["attention_mask"] > 0, -100))
        fails(message, same.score, **batch)
        fails(message, same.predict_words, **batch)
    else:
        fails(message, same.sentence_embeddings, **batch)
        fails(message, same.token_embeddings, **batch)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"char_vocab_size": 0, "word_embedding_size": 5},
        {"char_vocab_size": 0, "word_embedding_size": 7, "softmax_type": "adaptive", "adaptive_cutoffs": [4]},
    ],
)
def test_a_softmax_that_cannot_be_tied_is_refused_where_it_is_needed(options, tmp_path):
    """Tools for all models set `tie_word_embeddings`. Models without a softmax, or that do not call it, ignore it."""
    batch = make_batch(make_config(), lengths=[6, 4])
    for cls in (ELMoModel, ELMoForPreTraining):
        model, tied = make_model(cls, **options), make_model(cls, **options, tie_word_embeddings=True)
        tied.save_pretrained(tmp_path)
        tied = cls.from_pretrained(tmp_path)
        assert all(map(torch.equal, tied.state_dict().values(), model.state_dict().values()))
        found = tied(**batch, output_hidden_states=True), model(**batch, output_hidden_states=True)
        assert all(map(torch.equal, *(output.hidden_states for output in found)))
    message = "`tie_word_embeddings` is True; pass it with a word-level model"
    fails(message, tied, **batch, labels=batch["input_ids"].where(batch["attention_mask"] > 0, -100))
    fails(message, tied.score, **batch)
    tied.resize_token_embeddings(14)
    model.resize_token_embeddings(14)
    assert all(weight.shape == tied.state_dict()[name].shape for name, weight in model.state_dict().items())


def test_errors_of_the_language_model():
    model = make_model(ELMoForPreTraining, has_softmax=False)
    batch = make_batch(model.config)
    words = batch["input_ids"]
    assert model(**batch).loss is None
    for call in (model.score, lambda **batch: model(**batch, labels=words)):
        fails("no softmax for probabilities", call, **batch)
    model.train()
    assert model(**batch, labels=words).loss.isfinite() and model.config.has_softmax
    fails("labels` are shifted inside", model, **batch, labels=words, forward_targets=words)
    fails("Received `forward_targets` alone", model, **batch, forward_targets=words)
    fails("only special words", make_model(ELMoForPreTraining, vocab_size=4), **batch, labels=words)
    fails("`labels` has dtype torch.bool", model, **batch, labels=words.bool())
    fails(r"`labels` has shape \(3, 2\); pass shape \(3, 6\)", model, **batch, labels=words[:, :2])
    fails("ids from 12 to 12", model, **batch, labels=torch.full_like(words, 12))
    fails("`labels` has <PAD> at a word", model, **batch, labels=torch.zeros_like(words))
    fails(r"call `model.eval\(\)` first", model.predict_words, **batch)
    model.eval()
    fails("`direction` is 'left'", model.predict_words, **batch, direction="left")
    fails("`top_k` is 12; pass 1 to 11", model.predict_words, **batch, top_k=12)
    fails("pass `input_ids` with `character_ids`", model.score, batch["character_ids"])


@pytest.mark.parametrize("direction, chunk", [("forward", 1000), ("backward", 1), ("both", 1)])
def test_predicted_words_are_the_likeliest(direction, chunk, monkeypatch):
    monkeypatch.setattr("modeling_elmo.scoring.CHUNK_LOGITS", chunk)
    model = make_model(ELMoForPreTraining)
    batch = make_batch(model.config)
    found = model.predict_words(**batch, top_k=4, direction=direction)
    for row, length in enumerate(LENGTHS):
        log_probs = plain_log_probs(model, batch, row)
        log_probs = log_probs.sum(0) if direction == "both" else log_probs[int(direction == "backward")]
        for position in range(found.word_ids.shape[1]):
            word_ids, values = found.word_ids[row, position], found.log_probs[row, position]
            if position >= length or not log_probs[position].any():
                assert not word_ids.any() and not values.any()
                continue
            expected = log_probs[position] - np.log(np.exp(log_probs[position]).sum())
            assert word_ids.tolist() == (np.argsort(-expected)[:4] + 1).tolist()
            np.testing.assert_allclose(values, np.sort(expected)[::-1][:4], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_predicting_and_scoring_in_other_dtypes(dtype):
    model = make_model(ELMoForPreTraining)
    batch = make_batch(model.config)
    expected, scores = model.predict_words(**batch), model.score(**batch)
    found, found_scores = model.to(dtype).predict_words(**batch), model.score(**batch)
    atol = 0.1 if dtype == torch.bfloat16 else 1e-5
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=atol)
    np.testing.assert_allclose(found_scores.forward_log_probs, scores.forward_log_probs, atol=atol)
    cells = model(**batch).final_states[1]
    assert cells.dtype == torch.promote_types(dtype, torch.float32)  # never in half precision


@pytest.mark.parametrize("cls", [ELMoModel, ELMoForTokenClassification])
def test_a_checkpoint_without_softmax_predicts_nothing(cls, tmp_path):
    make_model(cls).save_pretrained(tmp_path)
    model = ELMoForPreTraining.from_pretrained(tmp_path)
    batch = make_batch(model.config)
    fails("no softmax for probabilities", model, **batch, labels=batch["input_ids"])
    make_model(ELMoForPreTraining).save_pretrained(tmp_path)
    assert ELMoForPreTraining.from_pretrained(tmp_path).config.has_softmax
    sizes = {"vocab_size": 30, "ignore_mismatched_sizes": True}  # the softmax of the checkpoint does not fit
    assert not ELMoForPreTraining.from_pretrained(tmp_path, **sizes).config.has_softmax


@pytest.mark.parametrize("size", [6, 20])
def test_resizing_keeps_the_rows_that_remain(size):
    model = make_model(ELMoForPreTraining, word_embedding_size=4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table = model.resize_token_embeddings(size)
    assert model.config.vocab_size == model.elmo.config.vocab_size == size
    assert table.weight.shape == (size, 4) and model.softmax.bias.shape == (size,)
    for name, tensor in model.state_dict().items():
        kept = min(len(before[name]), len(tensor))
        assert torch.equal(tensor[:kept], before[name][:kept]), name
    batch = make_batch(model.config)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert model.resize_token_embeddings(pad_to_multiple_of=8).weight.shape[0] % 8 == 0
    fails("A vocabulary of 3 words has no room", model.resize_token_embeddings, 3)
    fails("a size of 8.0 and a multiple of 0", model.resize_token_embeddings, 8.0, 0)


@pytest.mark.parametrize("size", [7, 12, 40])
def test_resizing_changes_the_last_cluster_of_an_adaptive_softmax(size, tmp_path):
    """Compared with torch's module, built for the new size with the rows that remain and the mean of the cluster."""
    options = {"projection_size": 16, "softmax_type": "adaptive", "adaptive_cutoffs": [2, 5]}
    model = make_model(ELMoForPreTraining, **options).eval()
    rows, width = model.softmax.adaptive.tail[-1][1].weight.detach(), model.config.projection_size
    expected = torch.nn.AdaptiveLogSoftmaxWithLoss(width, size - 1, [2, 5], div_value=4.0, head_bias=True)
    changed = torch.cat([rows, rows.mean(0).expand(size, -1)])[: size - 1 - 5]
    expected.load_state_dict(model.softmax.adaptive.state_dict() | {"tail.1.1.weight": changed})
    model.resize_token_embeddings(size)
    hidden = torch.randn(3, width)
    found = model.softmax(hidden)
    assert found.shape == (3, size) and found[:, 0].isneginf().all()
    torch.testing.assert_close(found[:, 1:], expected.log_prob(hidden))
    batch = make_batch(model.config)
    loss = model(**batch, labels=batch["input_ids"]).loss
    model.save_pretrained(tmp_path)
    again = ELMoForPreTraining.from_pretrained(tmp_path)
    assert torch.equal(again.eval()(**batch, labels=batch["input_ids"]).loss, loss)
    bilm = ELMoModel.from_pretrained(tmp_path)
    bilm.resize_token_embeddings(5)  # it has no softmax whose clusters could be too large
    bilm.save_pretrained(tmp_path)
    assert ELMoModel.from_pretrained(tmp_path).config.vocab_size == 5


def test_other_clusters_of_an_adaptive_softmax_stay():
    options = {"projection_size": 16, "softmax_type": "adaptive", "adaptive_cutoffs": [2, 5]}
    model = make_model(ELMoForPreTraining, word_embedding_size=4, **options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    message = "only the words after the first 6 can change"
    fails(message, model.resize_token_embeddings, 6)
    for rows in ([0, 2, 1, *range(3, 12)], [0, 1, 2, 3, 4, 5, 6, 5], [0, 1, 2, 3, 4, -1, 6]):
        fails(message, model.replace_vocabulary, rows)
    assert model.elmo.word_embeddings.num_embeddings == model.config.vocab_size == 12  # nothing has changed
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.replace_vocabulary([0, 1, 2, 3, 4, 5, 9, -1, 7])
    rows = before["softmax.adaptive.tail.1.1.weight"]
    assert torch.equal(model.softmax.adaptive.tail[1][1].weight, torch.stack([rows[3], rows.mean(0), rows[1]]))


def test_new_words_are_random_as_the_present_ones():
    model = make_model(word_embedding_size=100, vocab_size=2004)
    before = model.word_embeddings.weight.detach().std()
    table = model.resize_token_embeddings(4000, mean_resizing=False)
    assert table.weight[2004:].std().item() == pytest.approx(before.item(), rel=0.05)


def test_a_cache_of_the_former_word_vectors_is_not_saved(tmp_path):
    tokenizer = ELMoTokenizer(vocab=["<PAD>", "<S>", "</S>", "<UNK>", "the"])
    model = ELMoModel(ELMoConfig.from_preset("tiny", word_embedding_size=4, vocab_size=5)).eval()
    model.cache_vocabulary(["the"], tokenizer, save=True)
    model.resize_token_embeddings(20)
    model.save_pretrained(tmp_path)
    assert model.vocabulary_cache is None and ELMoModel.from_pretrained(tmp_path).vocabulary_cache is None


def test_another_vocabulary_takes_the_rows_of_shared_words():
    model = make_model(ELMoForPreTraining, word_embedding_size=4)
    with torch.no_grad():
        model.softmax.bias.uniform_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = [0, 1, 2, 3, -1, 9, 4, -1]
    model.replace_vocabulary(rows)
    assert model.config.vocab_size == 8
    for name in ("softmax.weight", "softmax.bias", "elmo.word_embeddings.weight"):
        expected = torch.stack([before[name].mean(0) if row < 0 else before[name][row] for row in rows])
        torch.testing.assert_close(model.state_dict()[name], expected)
    message = r"`source_rows` has \[8\]; pass 0 to 7"
    fails(message, model.replace_vocabulary, [0, 1, 2, 3, 8])
    unpublished = make_model(ELMoForPreTraining, has_softmax=False, vocab_size=4)
    unpublished.replace_vocabulary([0, 1, 2, 3, -1, -1])  # random rows; with the mean, all words would be equal
    assert not torch.equal(*unpublished.softmax.weight[-2:])


OFFLOADED = {
    "full": ("softmax", {}),
    "sampled": ("softmax", {"softmax_type": "sampled", "num_sampled": 3}),
    "adaptive": ("softmax", {"softmax_type": "adaptive", "projection_size": 16, "adaptive_cutoffs": [5]}),
    "encoder": ("elmo.char_encoder", {"word_embedding_size": 4}),
    "LSTM": ("elmo.forward_lstm", {}),
}


@pytest.mark.parametrize(("part", "options"), OFFLOADED.values(), ids=OFFLOADED)
def test_parts_may_be_on_disk(part, options, tmp_path):
    model = make_model(ELMoForPreTraining, **options)
    batch = make_batch(model.config)

    def call(each):
        output = each(**batch, labels=batch["input_ids"], output_hidden_states=True)
        return [output.to_tuple(), each.score(**batch).to_tuple(), each.predict_words(**batch, top_k=3).to_tuple()]

    check_weights_on_disk(model, call, tmp_path, [part])


# Bad input


def test_errors_name_what_was_received():
    model = make_model()
    batch = make_batch(model.config)
    words, characters, mask = batch["input_ids"], batch["character_ids"], batch["attention_mask"]
    states, vectors = model(characters).final_states, characters[..., :7].float()
    for message, options in {
        "pass `character_ids`": {"character_ids": None, "input_ids": words},
        r"`character_ids` has shape \(3, 6\); pass shape \(batch, time, 9\)": {"character_ids": words},
        "`character_ids` has ids from 1 to 30, .* 0 to 29": {"character_ids": characters.where(characters < 29, 30)},
        "`character_ids` has dtype torch.float32": {"character_ids": characters.float()},
        r"`attention_mask` has shape \(3, 5\); pass shape \(3, 6\)": {"attention_mask": mask[:, :5]},
        "has values other than 0 and 1": {"attention_mask": (1 - mask) * -10000.0},
        r"\(row, position\) \(1, 1\)": {"attention_mask": torch.ones_like(mask)},
        "without `character_ids`": {"inputs_embeds": vectors},
        r"`inputs_embeds` has shape \(3, 6, 6\)": {"character_ids": None, "inputs_embeds": vectors[..., 1:]},
        "`inputs_embeds` has dtype torch.complex64": {"character_ids": None, "inputs_embeds": vectors.cfloat()},
        r"\[\(2, 2, 2, 7\), \(2, 2, 2, 21\)\]": {"initial_states": [s[:2] for s in states]},
        r"\['int'\]": {"initial_states": 3},
        "`initial_states` has dtype torch.int64": {"initial_states": tuple(state.long() for state in states)},
    }.items():
        fails(message, model, **{"character_ids": characters, **options})
    with pytest.raises(TypeError, match="`character_ids` is a list; pass a tensor: .*return_tensors='pt'"):
        model(characters.tolist())
    fails("pass `input_ids`", make_model(char_vocab_size=0, word_embedding_size=7), character_ids=characters)


@both_classes
def test_final_states_are_a_pair_whose_items_have_rows(cls):
    """Pipelines read `items()`. What is made of these items, or of a pickle, has the pair again."""
    model = make_model(cls).requires_grad_(False)
    output = model(**make_batch(model.config))
    states = dict(output.items())["final_states"]
    assert isinstance(states, ModelOutput) and list(states) == ["hidden", "cell"]
    batch = make_batch(model.config)
    torch.testing.assert_close(
        model(**batch, initial_states=states), model(**batch, initial_states=output.final_states)
    )
    others = type(output)(output.items()), recursively_apply(torch.clone, output), pickle.loads(pickle.dumps(output))
    for pair in (output["final_states"], output.to_tuple()[-1], *(other.final_states for other in others)):
        assert type(pair) is tuple
        torch.testing.assert_close(pair, output.final_states)
    torch.testing.assert_close(model(**batch, return_dict=False), output.to_tuple())


@pytest.mark.parametrize("rows, time", [(0, 4), (2, 0)])
def test_an_empty_batch_gives_empty_vectors(rows, time):
    model = make_model()
    output = model(torch.zeros(rows, time, model.config.max_word_length, dtype=torch.long))
    assert output.last_hidden_state.shape == output.elmo_embeddings.shape == (rows, time, 14)


def test_torch_compile_leaves_the_bilm_to_its_kernels():
    """No shape is compiled, so none is compiled again; the vectors have the same bits."""
    graphs, model = [], make_model()
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for lengths in ([3, 2], [5, 1, 4], [1], [7, 7]):
        batch = make_batch(model.config, lengths)
        with torch.no_grad():
            assert torch.equal(compiled(**batch).elmo_embeddings, model(**batch).elmo_embeddings)
    assert not graphs
