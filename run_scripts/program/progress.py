"""Progress in a log: lines in place of bars, which only a terminal can draw."""

import sys
import time
from pathlib import Path
from typing import Any

from tqdm.std import tqdm  # the class below all bars, also those of transformers, datasets and huggingface_hub

LINE_SECONDS = 30.0
close_bar = tqdm.close


def show_lines() -> None:
    """From now on, a bar is a line every `LINE_SECONDS`, and one at its end. A shorter bar is not shown."""
    tqdm.display, tqdm.clear, tqdm.close = display, lambda *_, **__: None, close


def display(bar: Any, msg: str | None = None, pos: int | None = None) -> None:
    """Writes a line, if one is due: task, steps, time passed and left, mean speed, and what the loop has added."""
    now = time.time()  # the clock of `start_t`, which tqdm sets after it has displayed a bar for the first time
    last = getattr(bar, "last_line_t", getattr(bar, "start_t", now))
    if now - last >= LINE_SECONDS or (bar.disable and hasattr(bar, "last_line_t")):
        bar.last_line_t = now
        name = bar.desc or f"{Path(sys.argv[0]).name}: "
        bar.fp.write(bar.format_meter(**bar.format_dict | {"prefix": name, "ncols": 0, "rate": None}) + "\n")


def close(bar: Any) -> None:
    is_open = not getattr(bar, "disable", True)
    bar.sp = None  # tqdm itself then writes nothing
    close_bar(bar)
    if is_open and bar.leave:
        display(bar)
