"""Calls at once against calls one after the other; callers share the cores."""

import multiprocessing
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bilm_models import make_batch, make_model

from modeling_elmo import elmo_backend
from modeling_elmo.kernels import threads
from modeling_elmo.kernels.plan import forced_backend
from modeling_elmo.kernels.threads import at_once, can_use_threads, own_share


def test_callers_share_the_threads_of_torch(two_threads):
    """The second of two callers at the same time computes alone, and each has its own number again afterwards."""

    def compute():
        with own_share(), own_share():  # a head, and the biLM in it
            inside = torch.get_num_threads()
        return inside, torch.get_num_threads()

    with ThreadPoolExecutor(1) as second:
        assert second.submit(compute).result() == (2, 2)
        with own_share():
            assert second.submit(compute).result() == (1, 2) and torch.get_num_threads() == 2
    model, inside = make_model().requires_grad_(False), []
    model.char_encoder.register_forward_hook(lambda *_: inside.append(torch.get_num_threads()))
    with own_share(), ThreadPoolExecutor(1) as second:
        second.submit(lambda: model(**make_batch(model.config))).result()
    assert inside == [1]


def test_calls_run_together_in_the_modes_of_the_caller(two_threads):
    together = threading.Barrier(2)

    def call():
        together.wait(timeout=60)  # the other one runs, too
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), dtype, forced_backend()
        return threading.current_thread().name, torch.get_num_threads(), *modes

    for number in (1, 2, 1):
        found = at_once([call, call], number)
        assert found[0][0] != found[1][0] == threading.current_thread().name
        assert {each[1:] for each in found} == {(number, False, True, None, None)}
        assert torch.get_num_threads() == 2
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), elmo_backend("reference"):
        assert at_once([call, call], 1)[0][2:] == (True, False, torch.bfloat16, "reference")


def test_the_number_of_threads_is_the_users_in_all_threads(monkeypatch, two_threads):
    """Setting it for all threads, even for a moment, would reach a thread that starts in this moment."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: pytest.fail(f"set to {number} for all"))

    def new_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    assert at_once([torch.get_num_threads, new_thread], 1) == [1, 2] and new_thread() == torch.get_num_threads() == 2
    monkeypatch.undo()
    assert can_use_threads(torch.device("cpu")) and not can_use_threads(torch.device("meta"))
    torch.set_num_threads(1)
    assert not can_use_threads(torch.device("cpu"))


def test_the_caller_computes_what_no_thread_is_free_for(monkeypatch, two_threads):
    for pool, is_busy in ((ThreadPoolExecutor(1), True), (ThreadPoolExecutor(1), False)):
        monkeypatch.setattr(threads, "_helpers", pool)
        released = threading.Event()
        if is_busy:
            pool.submit(released.wait)
        else:
            pool.shutdown()  # as when the interpreter ends
        names = at_once([lambda: threading.current_thread().name] * 2, 1)
        assert names == [threading.current_thread().name] * 2 and torch.get_num_threads() == 2
        released.set()


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_comes_when_all_calls_have_ended(broken, two_threads):
    ended, started = [], threading.Event()

    def fail():
        started.wait(timeout=60)
        raise ValueError("no")

    calls = [lambda: started.set() or ended.append(True)] * 2
    calls[broken] = fail
    with pytest.raises(ValueError, match="no"):
        at_once(calls, 1)
    assert ended and torch.get_num_threads() == 2


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
