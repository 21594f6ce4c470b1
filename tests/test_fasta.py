"""FASTA files are read to the letter, or refused with the line that is wrong."""

import gzip
import re
from pathlib import Path

import pytest

from modeling_elmo.run_scripts.vectors.fasta import FastaRecord, fasta_records

PROTEINS = Path(__file__).parent / "fixtures" / "proteins" / "proteins.fasta"
BASE = ">a first\nMK\n"


def records(folder: Path, content: str) -> list[FastaRecord]:
    path = folder / "x.fasta"
    path.write_bytes(content.encode())
    return list(fasta_records(path))


def test_three_proteins():
    found = list(fasta_records(PROTEINS))
    assert [(each.line, each.name, len(each.residues)) for each in found] == [
        (1, "sp|P01308|INS_HUMAN", 110),
        (4, "sp|P00698|LYSC_CHICK", 147),
        (8, "UBIQ_HUMAN/1-76", 76),
    ]
    assert found[0].residues.startswith("MALWMRLL") and found[0].residues.endswith("QLENYCN")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("\ufeff>a\r\nMK\r\nLV\r\n", [(1, "a", "MKLV")]),  # of Windows
        ("\n\n>a|b.1 c d\n\nMKL VFF\n\tAW\n\n>b\nX", [(3, "a|b.1", "MKLVFFAW"), (8, "b", "X")]),  # blanks, no last end
        (">a\nmkLv*\n>b\n--MK..\n", [(1, "a", "mkLv*"), (3, "b", "--MK..")]),  # nothing is changed
        ("> a\nM\n", [(1, "a", "M")]),
        ("", []),
    ],
)
def test_residues_are_kept(tmp_path, content, expected):
    assert records(tmp_path, content) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("MKLV\n" + BASE, "x.fasta, line 1: 'MKLV' is before the first header; write >NAME above it."),
        (BASE + "M1\n", "x.fasta, line 3: '1' is no residue; write letters, *, and the gaps - and . only."),
        (BASE + "MK>b\nLV\n", "x.fasta, line 3: '>' is no residue"),
        (BASE + ">b\nMÄ\n", "x.fasta, line 4: 'Ä' is no residue"),
        (BASE + ">b\nM\0\n", r"x.fasta, line 4: '\x00' is no residue"),
        (BASE + ">\nMK\n", "x.fasta, line 3: the header has no name, but ''; write >NAME."),
        (BASE + "> . .\nMK\n", "x.fasta, line 3: the header has no name, but '.'; write >NAME."),
        (BASE + ">b\0\nMK\n", r"x.fasta, line 3: the header has no name, but 'b\x00'"),
        (BASE + ">b c\n>d\nMK\n", "x.fasta, line 3: the record 'b' has no residues; complete or remove it."),
        (">a\rMKT\r>b\rMK\r", "x.fasta, line 1: lines end in CR alone, as on old Macs; end them in LF"),
        (BASE + ">b\n", "x.fasta, line 3: the record 'b' has no residues"),
        (
            BASE + ">a second\nMK\n",
            "x.fasta, line 3: line 1 has the name 'a' too (/ counts as _); the words after > must differ.",
        ),
        (">b/1\nM\n>b_1\nM\n", "x.fasta, line 3: line 1 has the name 'b_1' too"),
    ],
)
def test_damaged_files(tmp_path, content, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        records(tmp_path, content)


def test_damaged_archives(tmp_path):
    path = tmp_path / "x.fa.gz"
    path.write_bytes(gzip.compress(PROTEINS.read_bytes())[:-20])
    with pytest.raises(ValueError, match="x.fa.gz cannot be unpacked: .* pass another copy"):
        list(fasta_records(path))


def test_records_are_read_one_by_one(tmp_path):
    path = tmp_path / "x.fasta"
    path.write_text(BASE + ">b\nLV\n1\n")
    found = fasta_records(path)
    assert next(found) == (1, "a", "MK")
    with pytest.raises(ValueError, match="line 5: '1' is no residue"):
        next(found)
