"""Both directions at once: values, gradients and counts equal one direction after the other."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from bilm_models import tiny_model
from errors import refused

from modeling_elmo import ELMoForPreTraining, ELMoModel, ELMoTokenizer, directions, elmo_backend
from modeling_elmo.kernels import lstm_loop
from modeling_elmo.kernels.int8 import int8_obstacle
from modeling_elmo.kernels.onednn import bfloat16_obstacle
from modeling_elmo.kernels.threads import at_once

TEXTS = ["The cat sat on the mat .", "No .", "A dog that nobody knew sat there , too , and said nothing at all ."]


@pytest.fixture
def used(monkeypatch, onednn_at_any_size, two_threads):
    """Numbers of calls that ran at once, in this test; any work is enough for two threads."""
    numbers = []

    def recorded(calls, threads):
        numbers.append(len(calls))
        return at_once(calls, threads)

    monkeypatch.setattr(directions, "at_once", recorded)
    monkeypatch.setattr(lstm_loop, "at_once", recorded)
    monkeypatch.setattr(directions, "FEW_MULTIPLICATIONS", 0)
    monkeypatch.setattr(directions, "FEW_IN_TRAINING", 0)
    return numbers


def make_model(model_class=ELMoModel, **options):
    sizes = {"lstm_hidden_size": 21, "projection_size": 7, "cell_clip": 0.5, "projection_clip": 0.2}
    return tiny_model(model_class, **(sizes | options))


def encoded(texts=TEXTS):
    return ELMoTokenizer()(texts, padding=True, return_tensors="pt")


@pytest.mark.parametrize("few, calls", [(0, 2), (1e12, 1)])
@pytest.mark.parametrize("mode", ["float32", "int8", "bfloat16"])
def test_vectors_and_states(mode, few, calls, used, monkeypatch):
    if obstacle := {"float32": lambda: None, "int8": int8_obstacle, "bfloat16": bfloat16_obstacle}[mode]():
        pytest.skip(obstacle)
    model, encoding = make_model().requires_grad_(False), encoded()
    monkeypatch.setattr(directions, "FEW_MULTIPLICATIONS", few)
    monkeypatch.setattr(directions, "FEW_IN_TRAINING", few)
    if mode == "int8":
        model = model.quantize()
    context = torch.autocast("cpu", torch.bfloat16) if mode == "bfloat16" else nullcontext()
    with context:
        first = model(**encoding)
        found = model(**encoding, initial_states=first.final_states)
        assert used == [calls] * 2
        with elmo_backend("reference"):
            expected = model(**encoding, initial_states=first.final_states)
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if mode == "float32" else {"rtol": 0.05, "atol": 0.02}
    pairs = ([each.float() for each in (*output.hidden_states, *output.final_states)] for output in (found, expected))
    torch.testing.assert_close(*pairs, **tolerance)


UNCLIPPED = {"cell_clip": None, "use_skip_connections": False}


@pytest.mark.parametrize("options, frozen", [({}, False), ({"lstm_hidden_size": 7}, True), (UNCLIPPED, False)])
def test_gradients_equal_the_definition(options, frozen, used):
    model, encoding = make_model(**options).double(), encoded()
    if frozen:
        model.forward_lstm.layers[0].state_linear.requires_grad_(False)
    states = [state.detach().requires_grad_() for state in model(**encoding).final_states]
    wanted = [*states, *(p for name, p in model.named_parameters() if p.requires_grad and "mix" not in name)]

    def gradients():
        output = model(**encoding, initial_states=states)
        total = output.last_hidden_state.square().sum() + output.final_states[1].sum()
        again = torch.autograd.grad(total, wanted, retain_graph=True)
        assert all(torch.equal(*pair) for pair in zip(again, torch.autograd.grad(total, wanted), strict=True))
        return again

    used.clear()
    found = gradients()
    assert used == [2] * 6  # two layers forward, and two backward passes of them
    with elmo_backend("reference"):
        torch.testing.assert_close(found, gradients())


def test_a_backward_pass_frees_what_was_kept(used):
    model = make_model()
    total = model(**encoded()).last_hidden_state.sum()
    nodes = [total.grad_fn]
    for node in nodes:
        nodes += [following for following, _ in node.next_functions if following]
    layers = {id(node): node for node in nodes if hasattr(node, "settings")}.values()
    assert [vars(layer).keys() for layer in layers] == [{"settings"}] * 2  # of two layers; autograd frees the rest
    total.backward()
    with refused("second time", RuntimeError):
        total.backward()


def test_dropout_repeats_itself(used):
    model, encoding = make_model(ELMoForPreTraining, vocab_size=50, dropout=0.4).train(), encoded()
    labels = torch.randint(1, 50, encoding.attention_mask.shape)
    weight = model.elmo.forward_lstm.layers[1].state_linear.weight
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        losses = [model(**encoding, labels=labels).loss for _ in range(3)]
        found.append([*losses, *torch.autograd.grad(sum(losses), weight)])
    assert all(map(torch.equal, *found)) and len({loss.item() for loss in losses}) == 3 and set(used) == {2}
    used.clear()  # without gradients, both directions draw from one generator, and run one after the other
    for _ in range(2):
        torch.manual_seed(1)
        with torch.no_grad():
            found.append(model.elmo(**encoding).last_hidden_state)
    assert torch.equal(found[2], found[3]) and 2 not in used


def test_hooks_of_parameters_run_once(used):
    model, calls = make_model(), []
    model.forward_lstm.layers[0].projection.weight.register_hook(calls.append)
    model(**encoded()).last_hidden_state.sum().backward()
    assert used and len(calls) == 1


def test_what_watches_operators_sees_both_directions(used):
    model, encoding = make_model().requires_grad_(False), encoded()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(**encoding)
    (sigmoids,) = (event.count for event in profile.key_averages() if event.key == "aten::sigmoid_")
    steps = max(len(text.split()) for text in TEXTS) + 2
    assert sigmoids == 2 * model.config.num_hidden_layers * steps and not used


def test_callers_in_several_threads(used):
    model = make_model().requires_grad_(False)
    encodings = [encoded(TEXTS[: number % 3 + 1]) for number in range(12)]
    expected = [model(**each).last_hidden_state for each in encodings]
    with ThreadPoolExecutor(4, initializer=lambda: torch.set_num_threads(2)) as pool:
        found = list(pool.map(lambda each: model(**each).last_hidden_state, encodings))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
