"""A pretraining step in a room of fixed sizes, on the CPU. `test_devices.py` records and repeats it as a graph."""

from contextlib import nullcontext

import pytest
import torch
from bilm_models import computed_by, filled_with_nan, layers_by_steps, make_batch, make_config, make_model
from pretraining_worker import pretrain

from modeling_elmo import ELMoForPreTraining
from modeling_elmo.encoder import pack_words
from modeling_elmo.run_scripts.pretraining import graph as module
from modeling_elmo.run_scripts.pretraining.graph import Room, StepGraph, room_for

MODELS = {
    "full": {},
    "adaptive": {"softmax_type": "adaptive", "vocab_size": 60, "adaptive_cutoffs": [20, 40], "projection_size": 16},
    "one cluster is empty": {"softmax_type": "adaptive", "vocab_size": 60, "adaptive_cutoffs": [58]},
    "characters and words": {"word_embedding_size": 5},
    "words": {"char_vocab_size": 0, "word_embedding_size": 5},
    "tied": {"char_vocab_size": 0, "word_embedding_size": 7, "tie_word_embeddings": True},
    "one layer": {"num_hidden_layers": 1, "use_skip_connections": False},
}


def make_inputs(config, lengths):
    batch = make_batch(config, lengths)
    if not config.char_vocab_size:
        del batch["character_ids"]
    labels = batch["input_ids"].where(batch["attention_mask"] > 0, -100)
    return batch, {"packed_batch": pack_words(config, **batch), "labels": labels}


def gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("tokens", [11, 40])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_losses_and_gradients_in_a_room(options, tokens):
    model = make_model(ELMoForPreTraining, **options).train()
    batch, inputs = make_inputs(model.config, [6, 1, 4])
    expected = model(**batch, labels=inputs["labels"], num_items_in_batch=17)
    (3 * expected.loss).backward()
    expected_gradients = gradients(model)
    graph = StepGraph(model, tokens, 3.0, nullcontext)
    numbers = graph._read(**inputs, num_predictions=17)
    graph.room = room_for(numbers).with_reserve()
    graph.flat = graph._in_room(numbers)
    with computed_by("persistent"), layers_by_steps(), filled_with_nan():
        losses = graph._backward()
    three = torch.stack([expected.loss, expected.forward_loss, expected.backward_loss])
    torch.testing.assert_close(losses, three.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(model), expected_gradients, rtol=1e-4, atol=1e-6)


def test_ids_that_the_model_does_not_know():
    model = make_model(ELMoForPreTraining)
    _, inputs = make_inputs(make_config(char_vocab_size=40), [3])
    inputs["packed_batch"].ids_UX[0, 0] = 30
    with pytest.raises(ValueError, match="`character_ids` has ids from .* to 30, but this model knows 0 to 29"):
        StepGraph(model, 40, 1.0, nullcontext).prepare([inputs], 3)


def test_rooms_follow_the_batches(monkeypatch):
    recorded = []
    monkeypatch.setattr(
        StepGraph, "_record", lambda graph, _: recorded.append(graph.room) or setattr(graph, "graph", 1)
    )
    graph = StepGraph(make_model(ELMoForPreTraining, **MODELS["adaptive"]), 100, 1.0, nullcontext)

    def share_of(words, number):
        monkeypatch.setattr(module, "room_for", lambda _: Room(words, 9, (words // 2,)))
        for _ in range(number):
            graph.prepare([make_inputs(graph.model.config, [3])[1]], 2)
        return graph.share_since_last_call()

    # 9 batches have no room. The first room is 1.1 times as large, in multiples of 512. Few large ones change nothing.
    assert share_of(1000, 8) == 0 and share_of(600, 2) == 1
    assert recorded == [Room(1536, 9, (1024,))]
    assert share_of(1536, 100) == 1 and share_of(1537, 10) == 0 and len(recorded) == 1
    assert graph.prepare([make_inputs(graph.model.config, [101])[1]], 2) == [None]  # more tokens than the option says
    state = graph.state_dict()
    assert share_of(1700, 10) > 0 and recorded[1:] == [Room(2048, 9, (1024,))]
    again = StepGraph(graph.model, 100, 1.0, nullcontext)
    again.load_state_dict(state)
    assert again.state_dict() == state and again.room == recorded[0]


@pytest.mark.parametrize(
    "options, reason",
    [
        ({}, "it is for CUDA, not for cpu"),
        ({"context": "stream"}, "it is for --context sentence, not stream"),
    ],
)
def test_without_a_graph_a_run_says_why(options, reason, tmp_path, capsys):
    run = pretrain(tmp_path, cuda_graph=True, max_steps=1, validation_file=None, **options)
    assert run.graph is None and f"--cuda_graph has no effect here: {reason}" in capsys.readouterr().out


def test_models_without_a_graph(monkeypatch):
    monkeypatch.setattr("modeling_elmo.run_scripts.pretraining.graph.is_accelerator", bool)

    def obstacle(**options):
        model = make_model(ELMoForPreTraining, **options).train()
        if options.get("dropout"):
            model.elmo.forward_lstm.register_forward_hook(print)
        return StepGraph(model, 40, 1.0, nullcontext).obstacle()

    with computed_by("persistent"):
        assert obstacle() is None
        assert obstacle(dropout=0.1) == "a part of the model is wrapped or has a hook"
        assert obstacle(softmax_type="sampled") == "the host draws the candidates of a sampled softmax"
    with computed_by("fused"):
        assert obstacle() == "forced"  # the reason of the plan for an LSTM whose host launches the steps
