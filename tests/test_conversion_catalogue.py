"""The catalogue of published checkpoints: its rows, its print, and the same table in CHECKPOINTS.md."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from modeling_elmo.conversion.catalogue import PublishedCheckpoint, published_checkpoints
from modeling_elmo.run_scripts.convert_checkpoint import main

ROOT = Path(__file__).parents[1]
FORMATS = {"HDF5", "ELMoForManyLangs", "TensorFlow checkpoint", "TensorFlow Hub module"}
HEADER = """\
| language | checkpoint | format | size | licence | files | command |
|---|---|---|---|---|---|---|
"""


def markdown_row(row: PublishedCheckpoint) -> str:
    files = " ".join(f"[{address.rpartition('/')[2]}]({address})" for address in row.files.split()) or "see the page"
    command = f"`{row.command}`" if row.command.startswith("elmo") else "not read"
    cells = (row.language, f"[{row.name}]({row.source})", row.format, row.size, row.licence, files, command)
    return f"| {' | '.join(cells)} |\n"


def test_the_document_has_the_table():
    """After a change of the table, put what this test expects below the text of CHECKPOINTS.md."""
    expected = HEADER + "".join(map(markdown_row, published_checkpoints()))
    text, found = (ROOT / "docs" / "CHECKPOINTS.md").read_text(encoding="utf-8").partition(HEADER)[::2]
    assert HEADER + found == expected and text.startswith("# Published checkpoints\n")


def test_rows_are_complete():
    rows = published_checkpoints()
    assert len({(row.language, row.name) for row in rows}) == len(rows) > 80
    assert sum(row.name == "ELMoForManyLangs" and row.licence == "MIT" for row in rows) == 45  # two are Chinese
    for row in rows:
        assert all(part == part.strip() and "|" not in part for part in row) and all(row[:6]), row
        assert row.format in FORMATS, row
        for address in (row.source, *row.files.split()):
            assert urlsplit(address).scheme in ("http", "https") and urlsplit(address).netloc, row


def test_words_filter():
    german = published_checkpoints("GERMAN")
    assert [row.files.rpartition("/")[2] for row in german] == ["", "201.zip", "142.zip"]
    assert published_checkpoints("german mit") == german[2:]
    message = "--list klingon mit: none of the 8. checkpoints has these words; pass fewer, or none."
    with pytest.raises(ValueError, match=message):
        published_checkpoints("klingon mit")


def test_the_program_prints_and_ends(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--list", "german", "many"])
    [row] = published_checkpoints("german many")
    printed, legend = capsys.readouterr().out.split("\n\n")
    assert ended.value.code == 0 and legend.startswith("1 checkpoints. Addresses are as published")
    lines = [row.source, *row.files.split(), row.command]
    assert printed.splitlines()[1:] == [f"  {line}" for line in lines] and row.licence in printed
