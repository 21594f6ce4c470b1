"""A run that is told to stop by a signal finishes its step and saves a checkpoint."""

import signal


class Stopped(SystemExit):
    """A run ended after a signal, with a checkpoint. The exit status is the shell's for that signal."""


class StopSignal:
    """Within its `with` block, remembers the first SIGTERM or Ctrl-C. A second one acts as usual."""

    def __init__(self):
        self.received: int | None = None

    def __enter__(self) -> "StopSignal":
        self.handlers = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _):
        self.received = number
        self.__exit__()
