"""FASTA files are read to the letter, or refused with the line that is wrong; batches of similar length."""

import re

import pytest
from errors import refused
from hypothesis import given
from hypothesis import strategies as st
from places import FIXTURES

from modeling_elmo.run_scripts.vectors.lines import InputLine, fasta_records, length_sorted_batches, to_line

PROTEINS = FIXTURES / "proteins" / "proteins.fasta"
BASE = ">a first\nMK\n"


def records(folder, content):
    path = folder / "x.fasta"
    path.write_bytes(content.encode())
    return [record for _, record in fasta_records(path)]


@pytest.mark.parametrize("value, words", [(" New  York ", ["New", "York"]), (["New", "York"], ["New", "York"])])
def test_units_of_texts_and_of_lists_of_words(value, words):
    given = "New  York" if isinstance(value, str) else "New York"
    assert to_line("line 1", value, False, "word") == InputLine(given, words)
    assert to_line("line 1", value, False, "character") == InputLine(given, list("NewYork"))
    assert to_line("line 1", value, True, "word").sentence == (given if isinstance(value, str) else words)


def test_three_proteins():
    found = [record for _, record in fasta_records(PROTEINS)]
    assert [(each.name, len(each.words)) for each in found] == [
        ("sp|P01308|INS_HUMAN", 110),
        ("sp|P00698|LYSC_CHICK", 147),
        ("UBIQ_HUMAN/1-76", 76),
    ]
    assert found[0].text.startswith("MALWMRLL") and found[0].text.endswith("QLENYCN")


@pytest.mark.parametrize(
    "content, expected",
    [
        ("\ufeff>a\r\nMK\r\nLV\r\n", {"a": "MKLV"}),  # of Windows
        ("\n\n>a|b.1 c d\n\nMKL VFF\n\tAW\n\n>b\nX", {"a|b.1": "MKLVFFAW", "b": "X"}),  # blanks, no last end
        (">a\nmkLv*\n>b\n--MK..\n", {"a": "mkLv*", "b": "--MK.."}),  # nothing is changed
        ("> a\nM\n", {"a": "M"}),
        (">a\rMKT\rL\r>b\rMK\r", {"a": "MKTL", "b": "MK"}),  # of old Macs
        ("", {}),
    ],
)
def test_residues_are_kept(tmp_path, content, expected):
    found = records(tmp_path, content)
    assert {each.name: each.text for each in found} == expected
    assert all(each.words == list(each.text) for each in found)


@pytest.mark.parametrize(
    "content, message",
    [
        ("MKLV\n" + BASE, "x.fasta, line 1 is 'MKLV'"),
        (BASE + "M1\n", "x.fasta, line 3 is 'M1'"),
        (BASE + ">\nMK\n", "x.fasta, line 3 is '>'"),
        (BASE + ">b\0\nMK\n", "x.fasta, line 3 is not UTF-8: a zero, as in UTF-16, at byte 2"),
        (BASE + ">b\n", "x.fasta: the record 'b' has no residues"),
        (">a\rMKT\n>b\nMK\n", r"x.fasta, line 1 is '>a\rMKT'; write >NAME, and end the line in LF"),
        (">b/1\nM\n>b_1\nM\n", "x.fasta, line 3: line 1 has the name 'b_1' too"),
    ],
)
def test_damaged_files(tmp_path, content, message):
    with refused(re.escape(message)):
        records(tmp_path, content)


def test_records_are_read_one_by_one(tmp_path):
    path = tmp_path / "x.fasta"
    path.write_text(BASE + ">b\nLV\n1\n")
    found = fasta_records(path)
    assert next(found) == (1, InputLine("MK", ["M", "K"], "a"))
    with refused("line 5 is '1'"):
        next(found)


@given(st.lists(st.integers(2, 40)), st.integers(1, 100))
def test_batches_hold_every_line_once_within_the_budget(lengths, budget):
    batches = list(length_sorted_batches(lengths, budget))
    assert sorted(sum(batches, [])) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget for batch in batches)
    sizes = [lengths[i] for batch in batches for i in batch]
    assert sizes == sorted(lengths, reverse=True)
