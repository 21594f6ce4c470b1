"""The catalogue of published checkpoints: its rows, its print, and the same rows in CHECKPOINTS.md."""

from urllib.parse import urlsplit

import pytest
from errors import refused
from places import ROOT

from modeling_elmo.conversion.catalogue import published_checkpoints
from modeling_elmo.run_scripts.convert_checkpoint import main

FORMATS = {"HDF5", "ELMoForManyLangs", "TensorFlow checkpoint", "TensorFlow Hub module"}
TABLE = """\
| language | checkpoint | format | size | license | files |
|---|---|---|---|---|---|
"""
MANYLANGS = "size 4096/512 and the license MIT:\n\n"


def markdown_row(row):
    files = ", ".join(
        f"[{name}]({address})" for name, address in zip(("weights", "options"), row.files.split(), strict=False)
    )
    cells = (row.language, f"[{row.name}]({row.source})", row.format, row.size, row.license, files or "see the page")
    return f"| {' | '.join(cells)} |"


def is_one_of_manylangs(row):
    """Whether the row is in the list below the table: 45 models of one page, format, size and license."""
    return row[1:6] == (
        "ELMoForManyLangs",
        "ELMoForManyLangs",
        "4096/512",
        "MIT",
        "https://github.com/HIT-SCIR/ELMoForManyLangs",
    )


def test_the_document_has_the_catalogue():
    """After a change of the catalogue, write what this test expects into CHECKPOINTS.md."""
    document = (ROOT / "docs" / "CHECKPOINTS.md").read_text("utf-8")
    rows = published_checkpoints()
    table = [markdown_row(row) for row in rows if not is_one_of_manylangs(row)]
    links = [f"[{row.language}]({row.files})" for row in rows if is_one_of_manylangs(row)]
    for header, expected in ((TABLE, "\n".join(table)), (MANYLANGS, ",\n".join(links))):
        assert document.partition(header)[2].partition("\n\n")[0].rstrip("\n") == expected


def test_rows_are_complete():
    rows = published_checkpoints()
    assert len({(row.language, row.name) for row in rows}) == len(rows) > 80
    assert sum(row.name == "ELMoForManyLangs" and row.license == "MIT" for row in rows) == 45  # two are Chinese
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
    with refused(message):
        published_checkpoints("klingon mit")


def test_the_program_prints_and_ends(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--list", "german", "many"])
    [row] = published_checkpoints("german many")
    printed, legend = capsys.readouterr().out.split("\n\n")
    assert ended.value.code == 0 and legend.startswith("1 checkpoints. Addresses are as published")
    lines = [row.source, *row.files.split(), row.command]
    assert printed.splitlines()[1:] == [f"  {line}" for line in lines] and row.license in printed
