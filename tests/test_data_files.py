"""The rows and locations that each file format gives, and the errors of damaged files."""

import gzip
import json
import os
import socket
from pathlib import Path

import pytest
import zstandard
from task_worker import written

from modeling_elmo.run_scripts.program.data_files import (
    column_rows,
    json_rows,
    numbered_texts,
    table_rows,
)
from modeling_elmo.run_scripts.program.files import check_output

CONLL = "-DOCSTART- -X- O O\n\nEU NNP B-ORG\nrejects VBZ O\n\n\n# NN O\n#tag  NN O"
CONLL_2012 = """\
#begin document (a); part 0
a 0 0 It
a 0 1 is
#end document
#begin document (b); part 0
b 0 0 #1
#end document
"""
CONLLU = """\
# text = vámonos al mar
1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\tV\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\tP\t_\t1\tobj\t_\t_
2.1\tya\tya\tADV\tA\t_\t_\t_\t1:advmod\t_
3\tal mar\tmar\tNOUN\t_\t_\t1\tobl\t_\t_

# text = #
1\t#\t#\tSYM\tS\t_\t0\troot\t_\t_
"""


def tagged(path: Path, tags: str | None = None, word: int | None = None, comments: tuple[str, ...] = ()) -> list:
    return list(column_rows(path, "tokens", tags, word, list(comments)))


def table(path: Path, *column_names: str) -> list:
    return list(table_rows(path, list(column_names)))


@pytest.mark.parametrize("ending", ["conll", "bio.gz", "iob2.zst"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_words_in_columns(tmp_path, ending, line_end):
    path = written(tmp_path / f"a.{ending}", "\ufeff" + CONLL.replace("\n", line_end))
    first, second = tagged(path)
    assert first == ([f"{path}, line 3", f"{path}, line 4"], {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]})
    assert second == ([f"{path}, line 7", f"{path}, line 8"], {"tokens": ["#", "#tag"], "tags": ["O", "O"]})
    ((_, first), _) = tagged(path, "1", word=2)
    assert first == {"tokens": ["NNP", "VBZ"], "1": ["EU", "rejects"]}


def test_words_in_columns_of_tabs_may_have_spaces(tmp_path):
    path = written(tmp_path / "a.conll", "#begin\n New York \tB-LOC\n10\u00a0000\tO \n\t\n#end\n\u3000\tO\n")
    rows = [row for _, row in tagged(path, comments=("#begin", "#end"))]
    assert rows[0] == {"tokens": ["New York", "10\u00a0000"], "tags": ["B-LOC", "O"]}
    assert rows[1] == {"tokens": ["\u3000"], "tags": ["O"]}


def test_conllu(tmp_path):
    path = written(tmp_path / "a.conllu.gz", CONLLU)
    (locations, first), (_, second) = tagged(path)
    assert first == {"tokens": ["vamos", "nos", "al mar"], "tags": ["VERB", "PRON", "NOUN"]}
    assert locations == [f"{path}, line {number}" for number in (3, 4, 6)]
    assert second == {"tokens": ["#"], "tags": ["SYM"]}
    ((_, first), _) = tagged(path, "xpos", word=3)
    assert first == {"tokens": ["ir", "nosotros", "mar"], "xpos": ["V", "P", "_"]}
    assert tagged(path, "xpos")[1][1]["xpos"] == tagged(path, "5")[1][1]["5"] == ["S"]


@pytest.mark.parametrize(
    "name, content, column, expected",
    [
        ("a.txt.gz", " a b \n\nc\n", "text", [(1, "a b"), (2, ""), (3, "c")]),
        ("a.jsonl", '{"text": "a b"}\n{"text": ["c"]}\n', "text", [(1, "a b"), (2, ["c"])]),
        ("a.tsv.zst", "label\tsentence\n1\t a  b \n0\t\n\n\n", "sentence", [(2, "a  b"), (3, "")]),
        ("a.tsv", "text\na b\n\nc\n", "text", [(2, "a b"), (3, ""), (4, "c")]),
        ("a.csv.gz", 'text\r\na\r\n\r\n"b\r\n\r\nc"\r\n\r\n', "text", [(2, "a"), (3, ""), (4, "b\n\nc"), (7, "")]),
        ("a.csv", 'text,label\n"a, b\nc",1\nd,0\n', "text", [(2, "a, b\nc"), (4, "d")]),
        ("A.CSV", "text\na\n", "text", [(2, "a")]),
        ("a.csv", f"text,n\n{'x' * 140_000},1\n", "text", [(2, "x" * 140_000)]),
        ("a.JSONL.GZ", '{"text": "a"}\n', "text", [(1, "a")]),
        ("a.bio.gz", "\na O\nb O\n\n\nc O\n", "text", [(2, ["a", "b"]), (6, ["c"])]),
        ("a.iob2", "a x O\nb y O\n", "2", [(1, ["x", "y"])]),
        ("a.conll", "a\nb\n\nc\n", "text", [(1, ["a", "b"]), (4, ["c"])]),
        ("a.conll", CONLL_2012, "4", [(2, ["It", "is"]), (6, ["#1"])]),
        ("a.conllu", CONLLU, "text", [(3, ["vamos", "nos", "al mar"]), (9, ["#"])]),
        ("a.conllu", CONLLU, "lemma", [(3, ["ir", "nosotros", "mar"]), (9, ["#"])]),
    ],
)
def test_texts(tmp_path, name, content, column, expected):
    assert list(numbered_texts(written(tmp_path / name, content), column)) == expected


def test_quotes_are_characters_in_tsv_and_enclose_cells_in_csv(tmp_path):
    text = 'label\ttext\n1\t"so, so\n0\ta " b\n\tNA \r\x0c\u0085\u2028x'
    path = written(tmp_path / "a.tsv.gz", text)
    assert table(path) == [
        (f"{path}, line 2", {"label": "1", "text": '"so, so'}),
        (f"{path}, line 3", {"label": "0", "text": 'a " b'}),
        (f"{path}, line 4", {"label": "", "text": "NA \r\x0c\u0085\u2028x"}),
    ]
    path = written(tmp_path / "a.csv", 'label,text\r\n1,"so, ""so""\r\nsaid he"\r\n01,null\r\n\r\n')
    assert table(path) == [
        (f"{path}, line 2", {"label": "1", "text": 'so, "so"\nsaid he'}),
        (f"{path}, line 4", {"label": "01", "text": "null"}),
    ]


def test_tables_without_a_header(tmp_path):
    rows = [row for _, row in table(written(tmp_path / "a.csv.zst", "a b,1\n\nc,2\n"), "text", "label")]
    assert rows == [{"text": "a b", "label": "1"}, {"text": "c", "label": "2"}]


def test_a_text_may_be_the_name_of_its_column(tmp_path):
    assert [row for _, row in table(written(tmp_path / "a.csv", "text\na\ntext\n"))] == [
        {"text": "a"},
        {"text": "text"},
    ]


ROWS = [{"text": "2020-01-01", "label": 1}, {"text": "밥\u2028 b", "label": 0.5, "more": {"x": []}}]


@pytest.mark.parametrize(
    "ending, text, location",
    [
        ("jsonl", "\n\n".join(json.dumps(row) for row in ROWS), "line 3"),
        ("json.gz", "\n" + "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), "line 3"),
        ("json", json.dumps(ROWS), "element 2"),
        ("json.zst", json.dumps(ROWS, indent=2), "element 2"),
        ("json", json.dumps({"version": 1, "data": ROWS}), "element 2"),
        ("json", json.dumps({"version": 1, "data": ROWS}, indent=1), "element 2"),
    ],
)
def test_json(tmp_path, ending, text, location):
    path = written(tmp_path / f"a.{ending}", text)
    found = list(json_rows(path))
    assert [row for _, row in found] == ROWS and isinstance(found[0][1]["label"], int)
    assert found[1][0] == f"{path}, {location}"


def texts(path: Path, column: str = "text") -> list:
    return list(numbered_texts(path, column))


def rows(path: Path) -> list:
    return list(json_rows(path))


DEEP = "[" * 100_000
PACKED = gzip.compress(b"a O\n" * 99, mtime=0)


@pytest.mark.parametrize(
    "name, content, read, message",
    [
        # words in columns
        ("a.conll", "a O\n\nb\n", tagged, "line 3 has 1 columns, not 2: 'b'"),
        ("a.conll", "# id 7\na O\n", tagged, "line 2 has 2 columns, not 3: 'a O'.*--comments"),
        ("a.conll", "a O\n", lambda path: tagged(path, "3"), "line 1 has 2 columns, not 3: 'a O'"),
        ("a.conll", "a O\n", lambda path: tagged(path, word=0), "no such column: --word_column 0"),
        ("a.conll", "a O\n", lambda path: tagged(path, "upos"), "no such column: .*--tags_column upos; pass 1, 2"),
        ("a.conllu", "1\ta\n", lambda path: tagged(path, "pos"), "--tags_column pos; pass .* id, form, "),
        ("a.conllu", "a\tb\tc\td\n", tagged, "line 1: the first column is 'a'; in .conllu"),
        # files
        ("a.conll", b"a O\n\xe9t\xe9 O\n", tagged, "line 2 is not UTF-8"),
        ("a.conll.gz", PACKED[:-9], tagged, "cannot be unpacked: Compressed file ended"),
        ("a.conll.zst", zstandard.compress(b"a O\n" * 99)[:-3], tagged, "cannot be unpacked: Truncated"),
        # texts
        ("a.csv", "words\na\n", texts, r"no column 'text', only \['words'\]; pass --text_column"),
        ("a.jsonl", '{"a": "b"}', texts, "line 1 has no key 'text'.*--text_column"),
        ("a.conll", "a O\n", lambda path: texts(path, "3"), "line 1 has 2 columns, not 3: 'a O'"),
        ("a.conll", "a O\n", lambda path: texts(path, "0"), "no column 0; pass --text_column 1, 2"),
        # tables
        ("a.csv", 'a,b\n1,2\n3,"4\n5,6\n', table, "line 3 is not CSV"),
        ("a.csv", "a,b\r1,2\r", table, "line 1 is not CSV: a carriage return"),
        ("a.csv", "a,b\n1,2,3\n4,5,6\n", table, r"line 2 has 3 columns, not 2: \['a', 'b'\]"),
        ("a.tsv", "a\ta\n1\t2\n", table, r"the columns \['a', 'a'\]"),
        ("a.tsv", "a\tb\n1\t2\n", lambda path: table(path, "a", "b"), "line 1 is a header; leave out --column_names"),
        ("a.csv", "a,b\n1,2\na,b\n", table, "line 3 is a header; remove the line"),
        # JSON
        ("a.jsonl", '{"a": 1}\n{"a" 1}\n', rows, "line 2 is not JSON.*Expecting ':' delimiter"),
        ("a.jsonl", '{"a": "\\ud83d\\ude00"}\n{"a": "\\ud83d"}\n', rows, "line 2 is not JSON.* surrogate"),
        ("a.jsonl", '{"a": 1}\n[1]\n', rows, r"line 2 is \[1\]; each row must be a JSON object"),
        ("a.json", "[{},\n2]", rows, "element 2 is 2; each row must be a JSON object"),
        ("a.json", "[{},\n1 2]", rows, "is not JSON.*line 2 column"),
        ("a.json", '{"version":\n 1}', rows, "no list of rows"),
        ("a.jsonl", DEEP, rows, "line 1 is not JSON.*maximum recursion depth"),
    ],
)
def test_files_that_are_refused(tmp_path, name, content, read, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"^{path}.*{message}"):
        read(path)


def test_outputs_that_are_no_files(tmp_path):
    pipe, listener = tmp_path / "pipe", socket.socket(socket.AF_UNIX)
    os.mkfifo(pipe)
    check_output(pipe)
    check_output(Path(os.devnull))
    with listener, pytest.raises(PermissionError, match="--output .*socket cannot be written"):
        listener.bind(str(tmp_path / "socket"))
        check_output(tmp_path / "socket")
