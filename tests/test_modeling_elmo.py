"""The model against a plain float64 implementation; its guarantees to users; its error messages."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bilm_models import LENGTHS, both_classes, computed_by, make_batch, make_config, make_model
from head_models import fails
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from plain_elmo import PlainELMo
from torch.testing import assert_close

import modeling_elmo.modeling_elmo
from modeling_elmo import (
    ELMoConfig,
    ELMoForPreTraining,
    ELMoModel,
    ScalarMix,
    elmo_backend,
)

pytestmark = pytest.mark.usefixtures("onednn_at_any_size")


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
    with torch.no_grad(), computed_by(backend):
        output = model(**batch)
    plain = PlainELMo(model.state_dict(), model.config)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    for row, length in enumerate(LENGTHS):
        expected = plain(characters[row, :length], ids[row, :length] if "word_embedding_size" in options else None)
        layers = torch.stack(output.hidden_states)[:, row]
        assert_allclose(layers[:, :length].numpy(), expected, atol=1e-6, rtol=1e-5)
        assert_allclose(output.elmo_embeddings[row, :length].numpy(), expected.mean(0), atol=1e-6, rtol=1e-5)
        assert not layers[:, length:].any() and not output.elmo_embeddings[row, length:].any()
    assert_close(output.last_hidden_state, output.hidden_states[-1])


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
        assert_close(joined, whole.hidden_states[layer][..., :size], atol=1e-6, rtol=1e-5)
    for mine, yours in zip(second.final_states, whole.final_states, strict=True):
        assert_close(mine[:, :, 0], yours[:, :, 0], atol=1e-6, rtol=1e-5)


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
            assert_close(found, output.last_hidden_state[1:])


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
    assert_close(output.last_hidden_state[:, before : before + 8], alone, atol=1e-6, rtol=1e-5)
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
            assert_close(output.elmo_embeddings, expected.elmo_embeddings)


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
    "output_NP = output_NP + stream.inputs",
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

    source = Path(modeling_elmo.modeling_elmo.__file__).read_text("utf-8").splitlines()
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
        assert_close(found, expected)
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
    assert_allclose(mixed.numpy(), expected, atol=2e-5)
    penalty = 0.1 * weights.square().sum() if mode == "learned" else torch.tensor(0.0)
    assert_close(mix.penalty(), penalty)
    assert mix(tuple(layers[:, :, :2]), torch.ones(2, 2)).isfinite().all()  # nothing but markers
    if norm != "bilm":  # which finds the markers by the rows
        whole = mix(tuple(layers), torch.ones(2, 5))
        assert_close(mix(tuple(layers)), whole)
        assert_close(mix(tuple(layers.flatten(1, 2))), whole.flatten(0, 1))
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
    assert_close(model.sentence_embeddings(**batch), expected, rtol=0, atol=1e-6)
    words = (batch["attention_mask"] * (batch["input_ids"] > 2)).bool()
    tokens = torch.where(words[..., None], mixed, expected[:, None])
    assert_close(model.token_embeddings(**batch), tokens, rtol=0, atol=1e-6)
    fails("`input_ids` are missing", model.sentence_embeddings, batch["character_ids"])
    fails("add_mixing_layer=False", ELMoModel(model.config, add_mixing_layer=False).token_embeddings, **batch)


# Training


@both_classes
def test_every_parameter_gets_a_gradient(cls):
    model = make_model(cls, word_embedding_size=4, scalar_mix_layer_norm="token", dropout=0.1).train()
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
    assert_close(model(**batch).last_hidden_state, model(**batch).last_hidden_state)
    model.train()
    assert not torch.equal(model(**batch).last_hidden_state, model(**batch).last_hidden_state)
    model.freeze()
    model.train()
    assert_close(model(**batch).last_hidden_state, model(**batch).last_hidden_state)
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
    assert_close(one.forward_loss, two.forward_loss)
    assert_close(one.backward_loss, two.backward_loss)
    for mine, yours in zip(one.final_states, two.final_states, strict=True):
        assert_close(mine, yours)
    assert len(one.hidden_states) == 3 and two.hidden_states is None


@both_classes
@pytest.mark.parametrize("options", [{}, {"char_vocab_size": 0, "word_embedding_size": 7}], ids=["char", "word"])
def test_special_words_with_one_id_are_refused_where_they_are_needed(cls, options):
    """By masks and the softmax. Tools for all models give them one id, and pass an attention mask."""
    model, batch = make_model(cls, **options), make_batch(make_config(), lengths=[6, 4])
    same = make_model(cls, **options, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    labels = batch["input_ids"].where(batch["attention_mask"] > 0, -100)
    if options:
        del batch["character_ids"]
    hidden = (each(**batch, output_hidden_states=True).hidden_states for each in (same, model))
    assert all(map(torch.equal, *hidden))
    message = "'pad_token_id': 0, 'bos_token_id': 0, 'eos_token_id': 0, .*; pass different ids"
    if cls is ELMoForPreTraining:
        fails(message, same, **batch, labels=labels)
        fails(message, same.score, **batch)
        fails(message, same.predict_words, **batch)
    else:
        fails(message, same.sentence_embeddings, **batch)
        fails(message, same.token_embeddings, **batch)
    del batch["attention_mask"]
    if options:
        fails(message, same, **batch)
    else:
        same(**batch)


@both_classes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"char_vocab_size": 0, "word_embedding_size": 5},
        {"char_vocab_size": 0, "word_embedding_size": 7, "softmax_type": "adaptive", "adaptive_cutoffs": [4]},
    ],
)
def test_a_softmax_that_cannot_be_tied_is_refused_where_it_is_needed(cls, options, tmp_path):
    """Tools for all models set `tie_word_embeddings`. Models without a softmax, or that do not call it, ignore it."""
    batch = make_batch(make_config(), lengths=[6, 4])
    model = make_model(cls, **options)
    make_model(cls, **options, tie_word_embeddings=True).save_pretrained(tmp_path)
    tied = cls.from_pretrained(tmp_path)
    hidden = (each(**batch, output_hidden_states=True).hidden_states for each in (tied, model))
    assert all(map(torch.equal, *hidden))
    if cls is ELMoForPreTraining:
        message = "`tie_word_embeddings` is True; pass it with a word-level model"
        fails(message, tied, **batch, labels=batch["input_ids"].where(batch["attention_mask"] > 0, -100))
        fails(message, tied.score, **batch)
    for each in (tied, model):
        each.resize_token_embeddings(14)
    shapes = ({name: weight.shape for name, weight in each.state_dict().items()} for each in (tied, model))
    assert next(shapes) == next(shapes)


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


@pytest.mark.parametrize("rows, time", [(0, 4), (2, 0)])
def test_an_empty_batch_gives_empty_vectors(rows, time):
    model = make_model()
    output = model(torch.zeros(rows, time, model.config.max_word_length, dtype=torch.long))
    assert output.last_hidden_state.shape == output.elmo_embeddings.shape == (rows, time, 14)


def test_torch_compile_leaves_the_bilm_to_its_kernels():
    """No shape is compiled, so none is compiled again; the vectors are identical bit for bit."""
    graphs, model = [], make_model()
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for lengths in ([3, 2], [5, 1, 4], [1], [7, 7]):
        batch = make_batch(model.config, lengths)
        with torch.no_grad():
            assert torch.equal(compiled(**batch).elmo_embeddings, model(**batch).elmo_embeddings)
    assert not graphs
