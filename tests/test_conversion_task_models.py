import pytest
import torch
from errors import refused

from modeling_elmo.conversion.task_models import (
    BiLM,
    find_bilms,
    how_many,
    missing_part,
    named_arrays,
    other_modules,
)

ONE = torch.ones(1)


def bilm_arrays(characters, lstm, layers=1):
    names = [f"{characters}_char_embedding_weights", f"{characters}char_conv_0.weight"]
    for way in ("forward", "backward"):
        for layer in range(layers):
            names += [f"{lstm}{way}_layer_{layer}.{part}.weight" for part in ("input_linearity", "state_projection")]
    return {name: torch.randn(2, 2) for name in names}


def mix(beginning, scalars=2):
    names = [f"{beginning}gamma", *(f"{beginning}scalar_parameters.{i}" for i in range(scalars))]
    return {name: torch.randn(1) for name in names}


def test_arrays_of_nested_dictionaries():
    content = {"step": 3, "model": {"a": ONE, "none": None, 7: {"b": ONE}}, "sparse": torch.eye(2).to_sparse()}
    content["model"]["itself"] = content
    assert dict(named_arrays(content)) == {"model.a": ONE, "model.7.b": ONE}
    assert not dict(named_arrays([ONE])) and not dict(named_arrays(ONE))


def test_how_many_numbers_without_a_gap():
    assert how_many({"a0", "a1", "a3", "b2"}, "a{}") == 2 and how_many({"a1"}, "a{}") == 0


@pytest.mark.parametrize("root", ["", "a.b."])
def test_the_mix_is_the_nearest(root):
    elmo = f"{root}_elmo."
    state = {
        **mix("task.", 2),
        **mix("bert._scalar_mix.", 12),
        **bilm_arrays(f"{elmo}_elmo_lstm._token_embedder.", f"{elmo}_elmo_lstm._elmo_lstm."),
        **mix(f"{elmo}scalar_mix_0."),
        **mix(f"{elmo}scalar_mix_1."),
        **mix(f"{elmo}scalar_mix_2.", 3),
    }
    [bilm] = find_bilms(state, "w")
    assert bilm.name == f"{elmo}_elmo_lstm" and bilm.mixes == (f"{elmo}scalar_mix_0.", f"{elmo}scalar_mix_1.", "task.")
    del state["task.gamma"], state[f"{elmo}scalar_mix_0.scalar_parameters.1"]
    assert find_bilms(state, "w")[0].mixes == (f"{elmo}scalar_mix_1.",)


def test_each_biLM_has_its_parts_and_mixes():
    state = {**mix("mix_of_both.")}
    for name in ("x", "y"):
        state |= {**bilm_arrays(f"{name}.words.", f"{name}.net.lstm."), **mix(f"{name}.mix.")}
        state[f"{name}.encoder.forward_layer_0.input_linearity.weight"] = ONE  # of the task, without a projection
    assert find_bilms(state, "w") == [
        BiLM("x.words.", "x.net.lstm.", ("x.mix.", "mix_of_both.")),
        BiLM("y.words.", "y.net.lstm.", ("y.mix.", "mix_of_both.")),
    ]


def test_an_LSTM_that_may_belong_to_two_is_refused():
    state = {**bilm_arrays("words.0.", "lstms.0."), **bilm_arrays("words.1.", "lstms.1.")}
    with refused("w has several LSTMs that may belong to words.0._char_embedding_weights: lstms.0.forward_layer_0"):
        find_bilms(state, "w")


def test_what_is_missing():
    assert missing_part({"a.weight": ONE}) == "no array is named _char_embedding_weights"
    state = bilm_arrays("a.words.", "a.lstm.")
    without_words = {name: array for name, array in state.items() if "lstm" in name}
    assert missing_part(without_words).startswith("a.lstm.forward_layer_0.state_projection.weight is in an LSTM of th")
    without_lstm = {name: array for name, array in state.items() if "words" in name}
    assert not find_bilms(without_lstm, "w") and not find_bilms(without_words, "w")
    assert missing_part(without_lstm).startswith("a.words._char_embedding_weights has no LSTM with forward_layer_0.inp")


def test_other_modules_are_as_few_as_possible():
    names = ["f.token_embedder_a.w.x", "f.token_embedder_b.x", "f.token_embedder_b.y", "f.other.x", "head.x.y", "scale"]
    assert other_modules(names, {"f.token_embedder_a.w.x"}) == ["f.token_embedder_b", "f.other", "head", "scale"]
    assert other_modules(names, ()) == ["f.token_embedder_a", "f.token_embedder_b", "f", "head", "scale"]
