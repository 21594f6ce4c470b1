"""A forecast, once: how long a pass over the training data takes, and when the training ends."""

import time
from datetime import datetime, timedelta

FIRST_MINUTE = 60.0  # seconds


class Forecast:
    """Makes a forecast when a minute has passed after the first step, whose time is not counted: it compiles kernels.

    Args:
        max_steps: number of steps after which the training ends; below 1, it ends after `passes`.
        passes: number of passes over the data.
    """

    def __init__(self, max_steps: int, passes: float):
        self.end = f"{max_steps:,} steps end" if max_steps > 0 else f"{passes:g} passes end"
        if max_steps < 1 and passes == 1:
            self.end = "it ends"  # after `one pass takes`
        self.begun: tuple[float, float, float] | None = None  # time, share and passes after the first step
        self.is_made = False

    def after_step(self, share: float, passes: float) -> str | None:
        """The forecast, at the first step that comes late enough. There is none if the training ends before.

        Args:
            share: part of the training that is done, from 0 to 1.
            passes: passes over the data that are done.
        """
        now = time.monotonic()
        if self.begun is None:
            self.begun = now, share, passes
        seconds, shares, passes_read = (a - b for a, b in zip((now, share, passes), self.begun, strict=True))
        if self.is_made or seconds < FIRST_MINUTE or shares <= 0:
            return None
        self.is_made = True
        rest = timedelta(seconds=seconds / shares * (1 - share))
        text = f"{self.end} at {clock(datetime.now() + rest)}"
        if passes_read > 0:
            text = f"one pass takes {duration(seconds / passes_read)}; {text}"
        return text


def duration(seconds: float) -> str:
    """A duration, such as `58 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def clock(moment: datetime) -> str:
    """The time of a day, with the day unless it is today."""
    if moment.date() == datetime.now().date():
        return f"{moment:%H:%M}"
    return f"{moment:%H:%M on %Y-%m-%d}"
