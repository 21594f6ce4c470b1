import os
import signal
from threading import Thread
from types import SimpleNamespace

import pytest

from modeling_elmo.run_scripts.pretraining import stopping
from modeling_elmo.run_scripts.pretraining.stopping import StopSignal, on_main_process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_remembered_and_a_second_one_acts(number):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_run_in_a_thread_leaves_the_signals_alone():
    before, found = signal.getsignal(signal.SIGTERM), []

    def work():
        with StopSignal() as stop:
            found.append((stop.received, signal.getsignal(signal.SIGTERM)))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(None, before)]


def test_an_error_of_the_main_process_is_raised_by_all(monkeypatch):
    sent = []
    monkeypatch.setattr(
        stopping, "broadcast_object_list", lambda values: sent[-1] if sent else sent.append(values) or values
    )

    def full():
        raise OSError("The disk is full.")

    with pytest.raises(OSError, match="^The disk is full.$"):
        on_main_process(SimpleNamespace(is_main_process=True), full)
    with pytest.raises(OSError, match="The main process has ended: The disk is full."):
        on_main_process(SimpleNamespace(is_main_process=False), full)
    sent.clear()
    assert [on_main_process(SimpleNamespace(is_main_process=each), lambda: 7) for each in (True, False)] == [7, 7]
