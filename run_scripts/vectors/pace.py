"""How fast `elmo embed` is, how much it will write, and whether it waits for the disk."""

import shutil
import time
from concurrent.futures import Future, wait
from pathlib import Path

from tqdm.auto import tqdm
from transformers.utils import logging

from .embedding import ComputedBlock
from .outputs import EntryShape, LinePlan

logger = logging.get_logger(__name__)

TICK = 0.02  # seconds between two looks at a device
JUDGED_AFTER = 10.0  # seconds: until then, memory takes what the disk cannot
SMALLER = "--dtype float16 halves the output, and fewer --layers or a --pooling make it smaller still."


def in_words(size: float) -> str:
    """A number of bytes, such as `1.48 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def check_room(output: Path, folder: Path, size: int, written: int):
    """Refuses an output of `size` bytes, of which some are written, if the disk of the folder has less room."""
    needed = size - written
    room = shutil.disk_usage(folder).free
    if needed > room:
        rest = "more " if written else ""
        raise OSError(
            f"--output {output} needs up to {in_words(needed)} {rest}of room, and its disk has {in_words(room)}. Pass "
            f"another place: {SMALLER}"
        )


class Pace:
    """The bar of a run, which shows words/s and MB/s. Within its `with` block, it counts the time since the beginning.

    Args:
        num_finished: number of blocks that an earlier run has written.
    """

    def __init__(self, name: str, plan: LinePlan, shape: EntryShape, num_finished: int, is_shown: bool):
        self.plan = plan
        self.shape = shape
        self.num_blocks = num_finished
        self.num_lines = sum(lines for lines, _ in plan.blocks[:num_finished])
        self.num_tokens = 0
        self.num_bytes = 0
        self.seconds_waited = 0.0
        self.is_told = not is_shown
        self.bar = tqdm(desc=name, unit=" lines", initial=self.num_lines, total=len(plan.tokens), disable=not is_shown)

    def __enter__(self) -> "Pace":
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_):
        self.bar.close()

    def wait(self, written: Future, latest: ComputedBlock):
        """Waits until a block is written. Time in which a device still computes the latest one is not lost."""
        while not written.done():
            begin = time.perf_counter()
            wait([written], timeout=TICK)
            if latest.is_there is None or latest.is_there.query():
                self.seconds_waited += time.perf_counter() - begin
        written.result()  # its error, if there was one

    def show(self, num_blocks: int):
        """Moves the bar to the number of blocks that are written."""
        seconds = time.perf_counter() - self.start
        for lines, _ in self.plan.blocks[self.num_blocks : num_blocks]:
            tokens = sum(self.plan.tokens[self.num_lines : self.num_lines + lines])
            self.num_lines += lines
            self.num_tokens += tokens
            self.num_bytes += self.shape.num_bytes(tokens, lines)
        self.num_blocks = num_blocks
        speed = self.num_bytes / seconds / 1e6
        self.bar.set_postfix_str(f"{self.num_tokens / seconds:,.0f} words/s, {speed:,.0f} MB/s", refresh=False)
        self.bar.update(self.num_lines - self.bar.n)
        if not self.is_told and seconds >= JUDGED_AFTER and self.seconds_waited >= seconds / 2:
            self.is_told = True
            share = self.seconds_waited / seconds
            logger.warning(f"This run waits for its disk for {share:.0%} of its time, at {speed:,.0f} MB/s. {SMALLER}")
