"""The end of a run: a signal, after which the step is finished and saved, or an error, which all processes raise."""

import signal
from collections.abc import Callable
from threading import current_thread, main_thread
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

Result = TypeVar("Result")


class Stopped(SystemExit):
    """A run ended after a signal, with a checkpoint. The exit status is the shell's for that signal."""


class StopSignal:
    """Within its `with` block, remembers the first SIGTERM or Ctrl-C. A second one acts as usual.

    Python gives signals to the main thread only: in another thread, nothing is remembered.
    """

    def __init__(self):
        self.received: int | None = None

    def __enter__(self) -> "StopSignal":
        numbers = (signal.SIGTERM, signal.SIGINT) if current_thread() is main_thread() else ()
        self.handlers = {number: signal.signal(number, self._remember) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _):
        self.received = number
        self.__exit__()


def on_main_process(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """The result of `work`, which the main process does alone, on all processes.

    An error is raised on all of them, too: raised by one, it would leave the others waiting for that process.
    """
    result: Any = None
    failed: Exception | None = None
    if accelerator.is_main_process:
        try:
            result = work()
        except Exception as error:
            failed = error
    result, reason = broadcast_object_list([result, None if failed is None else str(failed)])
    if failed is not None:
        raise failed
    if reason is not None:
        raise OSError(f"The main process has ended: {reason}")
    return result
