"""FASTA files: a header `>NAME description`, then residues on any number of lines.

Residues stay as they are: lower case, `*` and the gaps `-` and `.` are letters like all others, each with a vector.
White space within a sequence is dropped.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from modeling_elmo.run_scripts.program.files import numbered_lines

FASTA_SUFFIXES = (".fasta", ".fa", ".faa")


class FastaRecord(NamedTuple):
    """A sequence; `line` is the number of its header, counted from 1."""

    line: int
    name: str
    residues: str


def fasta_records(path: Path) -> Iterator[FastaRecord]:
    """The records of a file, which may be compressed, one by one. A name is the header up to the first white space.

    Raises:
        ValueError: text before the first header, a letter that is no residue, or a record without residues, without
            a name, or with the name of another record.
    """
    lines: dict[str, int] = {}  # of the headers, by name
    for record in _unchecked_records(path):
        where, name = f"{path}, line {record.line}", record.name
        if not re.search(r"\w", name) or not name.isprintable():
            raise ValueError(f"{where}: the header has no name, but {name!r:.80}; write >NAME.")
        if not record.residues:
            raise ValueError(f"{where}: the record {name!r:.80} has no residues; complete or remove it.")
        if (first := lines.setdefault(hdf5_name(name), record.line)) != record.line:
            raise ValueError(
                f"{where}: line {first} has the name {name!r:.80} too (/ counts as _); the words after > must differ."
            )
        yield record


def _unchecked_records(path: Path) -> Iterator[FastaRecord]:
    header, parts = None, []
    for number, line in numbered_lines(path):
        if "\r" in line.removesuffix("\r"):
            raise ValueError(f"{path}, line {number}: lines end in CR alone, as on old Macs; end them in LF.")
        if line.startswith(">"):
            if header is not None:
                yield FastaRecord(*header, "".join(parts))
            header, parts = (number, (line[1:].split() or [""])[0]), []
            continue
        residues = "".join(line.split())
        if residues and header is None:
            raise ValueError(
                f"{path}, line {number}: {residues!r:.80} is before the first header; write >NAME above it."
            )
        if wrong := re.search(r"[^A-Za-z*.-]", residues):
            raise ValueError(
                f"{path}, line {number}: {wrong[0]!r} is no residue; write letters, *, and the gaps - and . only."
            )
        parts.append(residues)
    if header is not None:
        yield FastaRecord(*header, "".join(parts))


def hdf5_name(name: str) -> str:
    """The name of a record in HDF5, where a slash would make a group."""
    return name.replace("/", "_")
