"""The published checkpoints: what `elmo convert --list` prints, and CHECKPOINTS.md shows.

They are in `published_checkpoints.tsv`. Addresses are as published: nothing is downloaded. A size or a license that no
source states is `unknown`.
"""

import shlex
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("published_checkpoints.tsv")
UNREADABLE_FORMAT = "TensorFlow Hub module"  # a graph


class PublishedCheckpoint(NamedTuple):
    """A row of the table."""

    language: str  # or the kind of text
    name: str
    format: str
    size: str  # parameters, and the width of an LSTM / of its projection; `output`: the width of both directions
    license: str
    source: str  # the page that describes the checkpoint
    files: str  # addresses of the weights and, if they are another file, of the options; empty: see the page

    @property
    def command(self) -> str:
        if self.format == UNREADABLE_FORMAT:
            return "(elmo convert does not read this format)"
        weights, *options = (address.rpartition("/")[2] for address in self.files.split() or ["FOLDER"])
        given = ["--weights", weights, *(word for name in options for word in ("--options", name))]
        return f"elmo convert {shlex.join(given)} --output_dir DIR"


def published_checkpoints(words: str = "") -> list[PublishedCheckpoint]:
    """The checkpoints whose rows have all of the words, in upper or lower case.

    Raises:
        ValueError: there is none.
    """
    _, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [PublishedCheckpoint(*line.split("\t")) for line in lines]
    chosen = rows
    for word in words.lower().split():
        chosen = [row for row in chosen if word in " ".join(row).lower()]
    if not chosen:
        raise ValueError(f"--list {words}: none of the {len(rows)} checkpoints has these words; pass fewer, or none.")
    return chosen


def format_catalog(checkpoints: list[PublishedCheckpoint]) -> str:
    """A paragraph for each checkpoint."""
    paragraphs = []
    for row in checkpoints:
        first = f"{row.language}: {row.name} [{row.format}; size {row.size}; license {row.license}]"
        paragraphs.append("\n  ".join([first, row.source, *row.files.split(), row.command]))
    legend = (
        f"{len(checkpoints)} checkpoints. Addresses are as published; none was tried. Sizes are numbers of parameters, "
        "and the width of an LSTM / of its projection. FOLDER has the files of a checkpoint."
    )
    return "\n\n".join([*paragraphs, legend])
