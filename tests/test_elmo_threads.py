"""Both directions at once on CPU: values, gradients and counts are those of one direction after the other."""

import multiprocessing
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from plain_elmo import PlainELMo

from modeling_elmo import (
    ELMoConfig,
    ELMoForPreTraining,
    ELMoModel,
    ELMoTokenizer,
    elmo_backend,
    elmo_backends,
    elmo_lstm,
)
from modeling_elmo.elmo_backends import at_once, bfloat16_obstacle, can_use_threads, forced_backend
from modeling_elmo.elmo_operators import int8_obstacle

pytestmark = pytest.mark.usefixtures("onednn_at_any_size", "two_threads")

TEXTS = ["The cat sat on the mat .", "No .", "A dog that nobody knew sat there , too , and said nothing at all ."]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def used(monkeypatch):
    """Numbers of calls that ran at once, in this test; any work is enough for two threads."""
    numbers = []

    def recorded(calls, threads):
        numbers.append(len(calls))
        return at_once(calls, threads)

    monkeypatch.setattr(elmo_lstm, "at_once", recorded)
    monkeypatch.setattr(elmo_lstm, "FEW_MULTIPLICATIONS", 0)
    monkeypatch.setattr(elmo_lstm, "FEW_IN_INT8", 0)
    return numbers


def make_model(model_class=ELMoModel, **options):
    torch.manual_seed(0)
    sizes = {"lstm_hidden_size": 21, "projection_size": 7, "cell_clip": 0.5, "projection_clip": 0.2, "dropout": 0.0}
    return model_class(ELMoConfig.from_preset("tiny", **(sizes | options))).eval()


def encoded(texts=TEXTS):
    return ELMoTokenizer()(texts, padding=True, return_tensors="pt")


@pytest.mark.parametrize("few, calls", [(0, 2), (1e12, 1)])
@pytest.mark.parametrize("mode", ["float32", "int8", "bfloat16"])
def test_vectors_and_states(mode, few, calls, used, monkeypatch):
    if obstacle := {"float32": lambda: None, "int8": int8_obstacle, "bfloat16": bfloat16_obstacle}[mode]():
        pytest.skip(obstacle)
    model, encoding = make_model().requires_grad_(False), encoded()
    monkeypatch.setattr(elmo_lstm, "FEW_MULTIPLICATIONS", few)
    monkeypatch.setattr(elmo_lstm, "FEW_IN_INT8", few)
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
    for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), **tolerance)
    for mine, theirs in zip(found.final_states, expected.final_states, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), **tolerance)


def test_vectors_equal_a_plain_loop_in_float64(used):
    model, encoding = make_model(), encoded(TEXTS[2:])
    with torch.inference_mode():
        layers = model(**encoding).hidden_states
    expected = PlainELMo(model.state_dict(), model.config)(encoding.character_ids[0].numpy())
    torch.testing.assert_close(torch.cat(layers).double(), torch.tensor(expected), atol=2e-6, rtol=1e-5)
    assert used == [2]


@pytest.mark.parametrize("options", [{}, {"lstm_hidden_size": 7}, {"cell_clip": None, "use_skip_connections": False}])
@pytest.mark.parametrize("frozen", [False, True])
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
    layers = {id(node): node for node in nodes if hasattr(node, "threads")}.values()
    assert [vars(layer).keys() for layer in layers] == [{"threads", "sizes"}] * 2  # autograd itself frees the rest
    total.backward()
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


def test_training_with_dropout_repeats_itself(used):
    model = make_model(ELMoForPreTraining, vocab_size=50, dropout=0.4).train()
    encoding = encoded()
    labels = torch.randint(1, 50, encoding.attention_mask.shape)

    def losses():
        torch.manual_seed(1)
        found = []
        for _ in range(3):
            loss = model(**encoding, labels=labels).loss
            loss.backward()
            found.append(loss.item())
        gradient = model.elmo.forward_lstm.layers[1].state_linear.weight.grad.clone()
        model.zero_grad()
        return found, gradient

    (first, gradient), (second, same) = losses(), losses()
    assert first == second and len(set(first)) == 3 and torch.equal(gradient, same)
    assert set(used) == {2}


def test_dropout_without_gradients_repeats_itself(used):
    """Both directions draw from one generator, so they run one after the other."""
    model, found = make_model(dropout=0.4).train(), []
    for _ in range(4):
        torch.manual_seed(1)
        with torch.no_grad():
            found.append(model(**encoded()).last_hidden_state)
    assert all(torch.equal(vectors, found[0]) for vectors in found) and 2 not in used


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
    per_step = 3  # of the gates, and in each tanh
    assert sigmoids == per_step * 2 * model.config.num_hidden_layers * steps and not used


def test_callers_in_several_threads(used):
    model = make_model().requires_grad_(False)
    encodings = [encoded(TEXTS[: number % 3 + 1]) for number in range(12)]
    expected = [model(**each).last_hidden_state for each in encodings]
    with ThreadPoolExecutor(4, initializer=lambda: torch.set_num_threads(2)) as pool:
        found = list(pool.map(lambda each: model(**each).last_hidden_state, encodings))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_calls_run_together_in_the_modes_of_the_caller():
    together = threading.Barrier(2)

    def call():
        together.wait(timeout=60)  # the other one runs, too
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), dtype, forced_backend()
        return threading.current_thread().name, torch.get_num_threads(), *modes

    for threads in (1, 2, 1):
        found = at_once([call, call], threads)
        assert found[0][0] != found[1][0] == threading.current_thread().name
        assert {each[1:] for each in found} == {(threads, False, True, None, None)}
        assert torch.get_num_threads() == 2
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), elmo_backend("reference"):
        assert at_once([call, call], 1)[0][2:] == (True, False, torch.bfloat16, "reference")
    with torch.no_grad():
        assert at_once([call, call], 1)[0][2:] == (False, False, None, None)


def test_the_number_of_threads_is_the_users_in_all_threads(monkeypatch):
    """Setting it for all threads, even for a moment, would reach a thread that starts in this moment."""
    inside, seen = threading.Barrier(9), []

    def call():
        inside.wait(timeout=60)
        inside.wait(timeout=60)
        return torch.get_num_threads()

    def new_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    with ThreadPoolExecutor(8) as callers, monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda number: pytest.fail(f"set to {number} for all"))
        found = [callers.submit(lambda: (at_once([call], 1), torch.get_num_threads())) for _ in range(8)]
        inside.wait(timeout=60)  # all eight compute with one thread
        seen.append(new_thread())
        inside.wait(timeout=60)
    assert {*seen, new_thread(), torch.get_num_threads()} == {2}
    assert [each.result() for each in found] == [([1], 2)] * 8


def test_the_caller_computes_what_no_thread_is_free_for(monkeypatch):
    for pool, is_busy in ((ThreadPoolExecutor(1), True), (ThreadPoolExecutor(1), False)):
        monkeypatch.setattr(elmo_backends, "_helpers", pool)
        released = threading.Event()
        if is_busy:
            pool.submit(released.wait)
        else:
            pool.shutdown()  # as when the interpreter ends
        names = at_once([lambda: threading.current_thread().name] * 2, 1)
        assert names == [threading.current_thread().name] * 2 and torch.get_num_threads() == 2
        released.set()


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_comes_when_all_calls_have_ended(broken):
    ended, started = [], threading.Event()

    def fail():
        started.wait(timeout=60)
        raise ValueError("no")

    calls = [lambda: started.set() or ended.append(True)] * 2
    calls[broken] = fail
    with pytest.raises(ValueError, match="no"):
        at_once(calls, 1)
    assert ended and torch.get_num_threads() == 2


def test_where_threads_are_not_used():
    assert can_use_threads(torch.device("cpu")) and not can_use_threads(torch.device("meta"))
    torch.set_num_threads(1)
    assert not can_use_threads(torch.device("cpu"))


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_process_starts_its_own_threads():
    at_once([int, int], 1)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_name_of_helper).startswith("elmo")


def _name_of_helper():
    together = threading.Barrier(2)
    return at_once(
        [lambda: together.wait(60) and None or threading.current_thread().name, lambda: together.wait(60)], 1
    )[0]
