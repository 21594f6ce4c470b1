"""Uses of words, with their places, groups and documents, as they stand in files of several formats."""

import unicodedata
from collections import Counter

import pytest
from errors import refused
from task_worker import written

from modeling_elmo.run_scripts.vectors.uses import (
    GroupedText,
    collect_uses,
    count_forms,
    joined_groups,
    read_patterns,
    uses_in_case,
)

ROWS = "year\tspeech\ttext\n1900\ta\tA play is on .\n1901\tb\tWe play .\n\n1900\tc\tPlay it , and play .\n"


@pytest.fixture
def table(tmp_path):
    return written(tmp_path / "a.tsv", ROWS)


def test_uses_have_their_places_and_columns(table):
    text = GroupedText([str(table)], "year", document_column="speech")
    uses = collect_uses(text.sentences(), ["play"], ["it"])
    assert list(uses) == ["play", "it"] and list(uses["it"]) == ["1900", "1901"] and uses["it"]["1901"] == []
    places = [(use.place.line, use.place.document, use.position) for use in uses["play"]["1900"]]
    assert places == [(2, "a", 1), (5, "c", 0), (5, "c", 4)]
    assert uses["play"]["1901"][0].place.columns == {"year": "1901", "speech": "b"}
    assert str(uses["it"]["1900"][0].place) == "a.tsv:5" and uses["it"]["1900"][0].place.file == str(table)
    in_case, left_out = uses_in_case("play", uses["play"])
    assert left_out == 1 and [use.position for use in in_case["1900"]] == [1, 4]
    forms = [*["A", "play", "is", "on", "."], *["Play", "it", ",", "and", "play", "."]]
    assert count_forms(text.sentences())["1900"] == Counter(forms)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize(("word", "expected"), [("Café", [2]), ("caf[éè]s?", [1, 0]), ("말", [0])])
def test_composed_letters_and_letters_in_parts_are_the_same(tmp_path, word, form, expected):
    """One of two files comes from a program that writes letters in parts."""
    text = "a café\ncafés and Café\n말 을 하다"
    files = [str(written(tmp_path / f"{name}.txt", unicodedata.normalize(name, text))) for name in ("NFC", "NFD")]
    pattern = unicodedata.normalize(form, word)
    uses, _ = uses_in_case(pattern, collect_uses(GroupedText(files, "file").sentences(), [pattern])[pattern])
    positions = {name: [use.position for use in members] for name, members in uses.items()}
    assert positions == {"NFC": expected, "NFD": expected}
    words = [use.words[use.position] for use in uses["NFD"]]
    assert words == [unicodedata.normalize("NFD", use.words[use.position]) for use in uses["NFC"]]


def test_equal_sentences_of_a_joined_group_count_once(tmp_path):
    rows = ["1900\tA play .", "1901\tA play .", "1910\tA play .", "1901\tThe play , a play ."]
    table = written(tmp_path / "a.tsv", "year\ttext\n" + "\n".join(rows))
    uses = collect_uses(GroupedText([str(table)], "year").sentences(), ["play"])["play"]
    joined = joined_groups(uses, {"1900": "1900-1909", "1901": "1900-1909", "1910": "1910-1919"})
    places = {group: [use.place.line for use in members] for group, members in joined.items()}
    assert places == {"1900-1909": [2, 5, 5], "1910-1919": [4]}


@pytest.mark.parametrize(
    ("number", "group_by", "column", "documents"),
    [
        (1, "year", None, None),
        (2, "year", None, "file"),
        (2, "file", None, None),
        (2, "folder", None, "file"),
        (2, "file", "year", "year"),
    ],
)
def test_documents_are_files_if_nothing_names_them(tmp_path, number, group_by, column, documents):
    files = [str(written(tmp_path / f"{name}.tsv", "year\ttext\n1900\tA play .")) for name in range(number)]
    text = GroupedText(files, group_by, column)
    assert text.documents == documents
    names = [sentence.place.document for sentence in text.sentences()]
    expected = {None: [""] * number, "file": ["0", "1"], "year": ["1900"] * 2}
    assert names == expected[documents]


@pytest.mark.parametrize(("column", "documents"), [(None, ["a", "b"]), ("file", ["x", "x"])])
def test_a_column_with_the_name_of_files_has_documents_if_asked_for(tmp_path, column, documents):
    files = [str(written(tmp_path / f"{name}.tsv", "year\tfile\ttext\n1900\tx\tA play .")) for name in "ab"]
    text = GroupedText(files, "year", column)
    assert [sentence.place.document for sentence in text.sentences()] == documents


def test_lines_of_files_without_columns(tmp_path):
    lines = written(tmp_path / "a.txt", "A play\n\nthe play\n")
    records = written(tmp_path / "b.jsonl", '{"text": ["a", "play"], "year": 3}\n')
    words = written(tmp_path / "c.conll", "A X\nplay X\n\nthe X\nplay X\n")
    text = GroupedText([str(lines), str(records), str(words)])
    uses = collect_uses(text.sentences(), ["play"])["play"][""]
    assert [(use.place.line, use.place.columns) for use in uses] == [
        (1, {}),
        (3, {}),
        (1, {"year": 3}),
        (1, {}),
        (4, {}),
    ]


def test_words_of_a_file(tmp_path):
    file = written(tmp_path / "words.txt", "play\n\n(?i)hous(e|es)\nplay\n")
    assert read_patterns(file, "--words") == ["play", "(?i)hous(e|es)"]
    with refused(r"--words .*a\.txt, line 2: pla\( is not a regular expression .*; put .* before signs"):
        read_patterns(written(tmp_path / "a.txt", "play\npla("), "--words")
    with refused(r"--words .*b\.txt has no word; write one per line"):
        read_patterns(written(tmp_path / "b.txt", "\n"), "--words")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"document_column": "book"}, r"a\.tsv, line 2 has no column 'book' but .*; pass --document_column NAME"),
        ({"group_by": "decade"}, "line 2 has no column 'decade' .*; pass --group_by NAME"),
        ({"text_column": "words"}, "line 2 has no column 'words' .*; pass --text_column NAME"),
    ],
)
def test_mistakes(table, columns, message):
    with refused(message):
        list(GroupedText([str(table)], **columns).sentences())


def test_a_document_without_a_name(tmp_path):
    table = written(tmp_path / "a.tsv", "speech\ttext\n \tA play .")
    with refused("line 2: the document 'speech' is ' '; pass a name or a number"):
        list(GroupedText([str(table)], document_column="speech").sentences())
