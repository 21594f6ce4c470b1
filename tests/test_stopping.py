import os
import signal

import pytest

from modeling_elmo.run_scripts.pretraining.stopping import StopSignal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_remembered_and_a_second_one_acts(number):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
