"""The catalog of published checkpoints: its rows, its print, and the same rows in CHECKPOINTS.md."""

import runpy
from urllib.parse import urlsplit

import pytest
from errors import refused
from places import ROOT

from modeling_elmo.conversion.catalog import published_checkpoints
from modeling_elmo.run_scripts.convert_checkpoint import main

FORMATS = {"HDF5", "ELMoForManyLangs", "TensorFlow checkpoint", "TensorFlow Hub module"}


def test_the_page_is_what_make_checkpoints_writes():
    """After a change of the catalog, run `make checkpoints`."""
    page = runpy.run_path(str(ROOT / ".ci" / "write_checkpoints"))["page"]
    document = (ROOT / "docs" / "CHECKPOINTS.md").read_text("utf-8")
    assert page(document) == document
    lines = document.splitlines()
    for row in published_checkpoints():
        cells = [f"[{row.name}]({row.source})", row.format, row.size, row.license]
        end = f" | {' | '.join(cells)} |".replace("unknown", "")
        [text] = [line.removesuffix(end) for line in lines if line.endswith(end)]
        weights, *options = row.files.split() or [None]
        assert (f"[{row.language}]({weights})" if weights else f" {row.language}") in text, row
        assert all(f"[options]({address})" in text for address in options), row
    assert page(document.replace("Arabic", "Latin")) == document


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
