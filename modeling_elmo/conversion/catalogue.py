"""The published checkpoints: what `elmo convert --list` prints, and CHECKPOINTS.md shows.

They are in `published_checkpoints.tsv`. Addresses are as published: nothing is downloaded. A size or a licence that no
source states is `unknown`.
"""

import shlex
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

TABLE = Path(__file__).with_name("published_checkpoints.tsv")
UNREADABLE_FORMAT = "TensorFlow Hub module"  # a graph


class PublishedCheckpoint(NamedTuple):
    """A row of the table.

    Args:
        language: or the kind of text.
        size: parameters, and the width of an LSTM / of its output. `output` is the width of both directions together.
        source: the page that describes the checkpoint.
        files: addresses of the weights and, if they are another file, of the options. Empty: see the page.
    """

    language: str
    name: str
    format: str
    size: str
    licence: str
    source: str
    files: str

    @property
    def command(self) -> str:
        if self.format == UNREADABLE_FORMAT:
            return "(elmo convert does not read this format)"
        weights, *options = (address.rpartition("/")[2] for address in self.files.split() or ["FOLDER"])
        if ".tar." in weights:
            weights = "FOLDER"  # of the unpacked files
        given = ["--weights", weights, *(word for name in options for word in ("--options", name))]
        return f"elmo convert {shlex.join(given)} --output_dir DIR"


def published_checkpoints(words: str = "") -> list[PublishedCheckpoint]:
    """The checkpoints whose rows have all of the words, in upper or lower case.

    Raises:
        ValueError: there is none.
    """
    _, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [PublishedCheckpoint(*line.split("\t")) for line in lines]
    found = [row for row in rows if all(word in " ".join(row).lower() for word in words.lower().split())]
    if not found:
        raise ValueError(f"--list {words}: none of the {len(rows)} checkpoints has these words; pass fewer, or none.")
    return found


def format_catalogue(checkpoints: list[PublishedCheckpoint], width: int) -> str:
    """A paragraph for each checkpoint. Lines have at most `width` characters, if no address is longer."""
    paragraphs = []
    for each in checkpoints:
        first = f"{each.language}: {each.name} [{each.format}; size {each.size}; licence {each.licence}]"
        below = [wrap(text, width, indent="  ") for text in (each.source, *each.files.split(), each.command)]
        paragraphs.append("\n".join([wrap(first, width), *below]))
    legend = (
        f"{len(checkpoints)} checkpoints. Addresses are as published; none was tried. Sizes are numbers of parameters, "
        "and the width of an LSTM / of its output. FOLDER has the unpacked files."
    )
    return "\n\n".join([*paragraphs, wrap(legend, width)])


def wrap(text: str, width: int, indent: str = "") -> str:
    """The text in lines of at most `width` characters; longer words, such as addresses, stay whole."""
    more = indent + "  "
    return fill(
        text, width, initial_indent=indent, subsequent_indent=more, break_long_words=False, break_on_hyphens=False
    )
