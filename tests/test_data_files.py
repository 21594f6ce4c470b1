"""The rows and locations that each file format gives, and the errors of damaged files.

`DOORS` has every kind of file that a program reads. All of them agree on what ends a line, and on what is no text.
"""

import csv
import gzip
import io
import json
from pathlib import PureWindowsPath

import pytest
import zstandard
from errors import refused
from places import FIXTURES
from task_worker import written

from modeling_elmo.run_scripts.benchmarks.text import read_sentences
from modeling_elmo.run_scripts.fine_tuning.tasks import TASKS, task_class
from modeling_elmo.run_scripts.minimal_pairs import read_pairs
from modeling_elmo.run_scripts.modeling_elmo_cli import PROGRAMS
from modeling_elmo.run_scripts.pretraining.corpus import Corpus
from modeling_elmo.run_scripts.program import data_files
from modeling_elmo.run_scripts.program.data_files import (
    column_rows,
    json_rows,
    numbered_texts,
    table_rows,
)
from modeling_elmo.run_scripts.program.texts import TextArguments
from modeling_elmo.run_scripts.vectors.lines import open_lines
from modeling_elmo.run_scripts.vectors.senses import read_annotated, read_inventory
from modeling_elmo.run_scripts.vectors.uses import GroupedText
from modeling_elmo.run_scripts.vectors.word_vectors import read_word_vectors
from modeling_elmo.tokenization.elmo_characters import read_vocabulary

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


def tagged(path, tags=None, word=None, comments=()):
    return list(column_rows(path, "tokens", tags, word, list(comments)))


def table(path, *column_names):
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


@pytest.mark.parametrize(
    "text, names, expected",
    [
        ("a b,1\n\nc,2\n", ("text", "label"), [{"text": "a b", "label": "1"}, {"text": "c", "label": "2"}]),
        ("text\na\ntext\n", (), [{"text": "a"}, {"text": "text"}]),  # a text may be the name of its column
        ("\n\ntext,label\na,1\n", (), [{"text": "a", "label": "1"}]),
    ],
)
def test_headers_of_tables(tmp_path, text, names, expected):
    assert [row for _, row in table(written(tmp_path / "a.csv", text), *names)] == expected


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


def texts(path, column="text"):
    return list(numbered_texts(path, column))


def rows(path):
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
        ("a.csv", "a,b\r1,2\nc,d", table, "line 1 is not CSV: a carriage return"),
        ("a.csv", "a,b\n1,2,3\n4,5,6\n", table, r"line 2 has 3 columns, not 2: \['a', 'b'\]"),
        ("a.tsv", "a\ta\n1\t2\n", table, r"the columns \['a', 'a'\]"),
        ("a.tsv", "1\t2\na\tb\n", lambda path: table(path, "a", "b"), "line 2 is a header; remove the line"),
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
    with refused(f"^{path}.*{message}"):
        read(path)


def corpus(path):
    return list(Corpus.from_files([str(path)]).texts())


def embedded(path):
    lines = open_lines(TextArguments(), [str(path)], False, "word")
    return [line.words for line in lines()]


def groups(path):
    return list(GroupedText([str(path)], "year" if path.suffix in (".tsv", ".jsonl") else "file").sentences())


def task(name):
    kind = task_class(name)
    return lambda path: kind.read(kind.arguments_class(train_file=str(path))).data["train"].to_list()


def senses(path):
    keys = path.with_name("a.gold.key.txt")
    keys.write_text("1 play%1\n2 play%2\n", "utf-8")
    return list(read_annotated(path).instances)


def keys(path):
    text = path.with_name("a.data.xml")
    text.write_text(SENSES, "utf-8")
    return list(read_annotated(text).instances)


def word_vectors(path):
    words, vectors = read_word_vectors(path)
    return [words, vectors.tolist()]


LINES = "the cat sat .\na dog ran .\n"
WORDS = "Ana B-PER\nwent O\n\nIt O\nwas O\n\n"
TABLE = "text\tyear\nthe cat sat\t1900\na dog ran\t1901\n"
RECORDS = '{"text": "the cat sat", "year": 1900}\n{"text": "a dog ran", "year": 1901}\n'
TAGGED = '{"tokens": ["Ana"], "tags": ["B-PER"]}\n{"tokens": ["It"], "tags": ["O"]}\n'
PROPBANK = "x\t0\tIt\tPRP\t-\t-\t(A1*)\nx\t1\tran\tVBD\trun\trun.01\t(V*)\n\n"
SENSES = """<corpus>
<sentence><instance id="1" lemma="play" pos="NOUN">play</instance></sentence>
<sentence><instance id="2" lemma="play" pos="NOUN">play</instance></sentence>
</corpus>
"""
ANSWERS = {"question": "Who?", "context": "Ana went", "answers": {"text": ["Ana"], "answer_start": [0]}, "id": "1"}
TEXT_DOORS = {".txt": LINES, ".jsonl": RECORDS, ".tsv": TABLE, ".conll": WORDS, ".conllu": CONLLU}
TEXT_DOORS |= {".csv": TABLE.replace("\t", ",")}
DOORS = {
    **{f"pretrain {suffix}": (suffix, text, corpus) for suffix, text in TEXT_DOORS.items()},
    **{f"embed {suffix}": (suffix, text, embedded) for suffix, text in TEXT_DOORS.items()},
    "embed .fasta": (".fasta", ">a\nMK\nL\n>b\nM\n", embedded),
    **{f"neighbors {suffix}": (suffix, text, groups) for suffix, text in TEXT_DOORS.items() if suffix != ".csv"},
    "neighbors vectors": (".vec", "the 1 2\ncat 3 4\n", word_vectors),
    "benchmark .txt": (".txt", LINES, lambda path: read_sentences(str(path))),
    **{f"ner {suffix}": (suffix, WORDS.replace(" ", "\t"), task("ner")) for suffix in (".conll", ".tsv", ".bio")},
    "ner .conllu": (".conllu", CONLLU, task("ner")),
    "ner .jsonl": (".jsonl", TAGGED, task("ner")),
    "classify .tsv": (".tsv", TABLE.replace("year", "label"), task("classify")),
    "classify .csv": (".csv", TABLE.replace("year", "label").replace("\t", ","), task("classify")),
    "classify .jsonl": (".jsonl", RECORDS.replace("year", "label"), task("classify")),
    "qa .jsonl": (".jsonl", json.dumps(ANSWERS) + "\n" + json.dumps({**ANSWERS, "id": "2"}) + "\n", task("qa")),
    "qa .json": (".json", json.dumps({"data": [ANSWERS]}, indent=1), task("qa")),
    "srl .tsv": (".tsv", PROPBANK * 2, task("srl")),
    "srl .conll": (".conll", "It - (A1*)\nran run (V*)\n\n" * 2, task("srl")),
    "coref .conll": (
        ".conll",
        "#begin document (a); part 0\na 0 0 It (0)\na 0 1 is -\na 0 2 it (0)\n\n#end document\n",
        task("coref"),
    ),
    "pairs .tsv": (".tsv", "phenomenon\tgood\tbad\nx\ta b\tb a\n", lambda path: read_pairs(path, "phenomenon")),
    "senses .xml": (".data.xml", SENSES, senses),
    "senses .key": (".gold.key.txt", "1 play%1\n2 play%2\n", keys),
    "senses inventory": (".tsv", "play\tNOUN\tplay%1 play%2\nrun\tVERB\trun%1\n", read_inventory),
    "convert vocabulary": (".txt", "<S>\n</S>\n<UNK>\nthe\ncat\n", read_vocabulary),
}
SAME_READERS = {"perplexity": "pretrain", "vocabulary": "pretrain", "explore": "pretrain", "probe": "ner"}
SAME_READERS |= dict.fromkeys(("reproduce", "evaluate"), "ner, classify, qa, srl, coref")
NO_TEXTS = {"export", "push", "doctor"}


def test_no_program_is_forgotten():
    assert {name.split()[0] for name in DOORS} | {*SAME_READERS} | NO_TEXTS == {*PROGRAMS}
    assert {*TASKS} <= {name.split()[0] for name in DOORS}


@pytest.mark.parametrize("door", DOORS)
def test_what_ends_a_line_and_what_is_no_text(tmp_path, door):
    """Files of old Macs and of Windows are read as those of Unix; UTF-16 is an error, with its mark and without it."""
    suffix, text, read = DOORS[door]
    found = {}
    for name, end in (("unix", "\n"), ("windows", "\r\n"), ("mac", "\r")):
        (tmp_path / name).mkdir()
        path = tmp_path / name / f"a{suffix}"
        path.write_bytes(text.replace("\n", end).encode())
        found[name] = str(read(path)).replace(f"/{name}/", "/")
    assert len(found["unix"]) > 20 and found["windows"] == found["mac"] == found["unix"]
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        path.write_bytes(text.encode(encoding))
        with refused(f"{path}.* is not UTF-8"):
            read(path)
    place = text.index("\n", len(text) // 2) - 1  # of a letter or sign before a line end
    path.write_bytes(text[:place].encode() + b"\0" + text[place:].encode())
    with refused(f"{path}.* is not UTF-8.*zero"):
        read(path)


def test_a_carriage_return_beside_line_feeds_is_a_character(tmp_path):
    assert corpus(written(tmp_path / "a.txt", "a\rb\nc\n")) == ["a\rb", "c"]
    assert corpus(written(tmp_path / "b.txt.gz", "a\rb\rc")) == ["a", "b", "c"]


# Tables

QUOTED_ROWS = [['He said "good film" .', "1"], ["bad film", "0"], ['"great" play', "1"]]


def as_csv(rows, **options):
    file = io.StringIO()
    csv.writer(file, delimiter="\t", lineterminator="\n", **options).writerows(rows)
    return file.getvalue()


@pytest.mark.parametrize(
    "text, expected",
    [
        (as_csv([["text", "label"], *QUOTED_ROWS]), QUOTED_ROWS),  # as pandas writes it
        (as_csv([["text", "label"], ["a\tb", "1"], ["c", "0"]]), [["a\tb", "1"], ["c", "0"]]),
        (as_csv([["text", "label"], ["a\n\nb", "1"], ["c", "0"]]), [["a\n\nb", "1"], ["c", "0"]]),
        (as_csv([["text"], ["a\nb"], ["c"]]), [["a\nb"], ["c"]]),
        (as_csv([["text", "label"], ["a b", "x"], ["c", ""]], quoting=csv.QUOTE_ALL), [["a b", "x"], ["c", ""]]),
        ('"text"\t"label"\n"a b"\t1\n"c"\tNA\n', [["a b", "1"], ["c", "NA"]]),  # as R writes it
        (
            '"text"\t"label"\n"He said \\"hi\\" ."\t"1"\n"a \\" b"\t"0"\n',
            [['He said "hi" .', "1"], ['a " b', "0"]],
        ),  # the same
        ('"text"\t"label"\n"a"\t2020-01-01\n"b"\tInf\n"c"\tTRUE\n', [["a", "2020-01-01"], ["b", "Inf"], ["c", "TRUE"]]),
        # Quotes of GLUE are characters: alone, inside a cell, around a part, around some cells.
        ('text\tlabel\n"so, so\t1\na " b"\t0\n', [['"so, so', "1"], ['a " b"', "0"]]),
        ('text\tlabel\n"so" he said\t1\n""" b"\t0\n', [['"so" he said', "1"], ['""" b"', "0"]]),
        ('text\tlabel\n"so"\t1\nso\t0\n', [['"so"', "1"], ["so", "0"]]),
        ('text\tlabel\n"so\t1\nx\t0\nso"\t1\n', [['"so', "1"], ["x", "0"], ['so"', "1"]]),
        ('text\tlabel\n""\t1\n"\t0\n', [['""', "1"], ['"', "0"]]),
        ("text\tlabel\n'so'\t1\nit''s\t0\n", [["'so'", "1"], ["it''s", "0"]]),
    ],
)
def test_quoted_cells_of_tsv(tmp_path, warnings_of_transformers, text, expected):
    path = written(tmp_path / "a.tsv", text)
    assert [list(row.values()) for _, row in table(path)] == expected
    is_unquoted = "\t".join(expected[0]) not in text.split("\n")
    told = [message for message in warnings_of_transformers.messages if "quoted cells" in message]
    assert len(told) == is_unquoted and all(str(path) in message for message in told)
    if is_unquoted:  # every program reads the same texts
        texts = [row[0].strip() for row in expected]
        assert [text for _, text in numbered_texts(path, "text")] == texts
        quoting = {"doublequote": False, "escapechar": "\\"} if "\\" in text else {}
        reader = csv.reader(io.StringIO(text), delimiter="\t", strict=True, **quoting)
        assert list(reader)[1:] == expected


def test_quoted_cells_of_columns(tmp_path, warnings_of_transformers):
    quoted = 'He\tO\nsaid\tO\n""""\tO\nyes\tO\n"5"""\tO\n'
    for name in ("a.conll", "a.tsv"):
        ((_, row),) = tagged(written(tmp_path / name, quoted))
        assert row["tokens"] == ["He", "said", '"', "yes", '5"']
    for words in (['"', "a", '"'], ['""', '"'], ['"', '""', '"'], ['"a"', "b"]):  # quotes that are words
        for sign in "\t ":
            ((_, row),) = tagged(written(tmp_path / "b.conll", "".join(f"{word}{sign}O\n" for word in words)))
            assert row["tokens"] == words
    assert [message for message in warnings_of_transformers.messages if "b.conll" in message] == []
    of_r = '"EU"\t"B-ORG"\n"said"\t"O"\n"\\""\t"O"\n'
    ((_, row),) = tagged(written(tmp_path / "r.conll", of_r))
    assert row == {"tokens": ["EU", "said", '"'], "tags": ["B-ORG", "O", "O"]}
    ((_, row),) = tagged(written(tmp_path / "c.conllu", '1\t"\t"\tPUNCT\n2\ta\ta\tX\n'), word=2)
    assert row["tokens"] == ['"', "a"]


# First columns

CONLL_X = "1\tThe\tthe\tDET\n2\tcat\tcat\tNOUN\n3\tsat\tsit\tVERB\n\n1\tA\ta\tDET\n2\tdog\tdog\tNOUN\n"
LITBANK = FIXTURES / "tasks" / "litbank_dev.conll"


@pytest.mark.parametrize(
    "text, reason",
    [
        (CONLL_X, "counts the words of each sentence"),
        (CONLL_X.replace("\t", " "), "counts the words of each sentence"),
        ("0\tI\tX\n1\tgo\tX\n\n0\tYes\tX\n", "counts"),
        ("1\tI\tX\n2\tgo\tX\n\n3\tShe\tX\n4\twent\tX\n", "counts"),  # through the document
        ("1-2\tvámonos\t_\n1\tvamos\tX\n2\tnos\tX\n", "counts"),
        ("7_1\tDer\tX\n7_2\tHund\tX\n\n8_1\tEr\tX\n8_2\tging\tX\n", "counts"),  # of TIGER
        ("O\tX\tshow\nB-A\tX\tthe\nI-A\tX\tfilm\n", r"has tags \(B-A, I-A, O\)"),  # of MIT Movie
        ("d 0 I X\nd 1 go X\nd 2 . X\n", "repeats 'd' in all words of a sentence"),
        ("a I X\na go X\n\nb She X\nb went X\n", "repeats 'a'"),
        (LITBANK.read_text("utf-8"), "repeats '2489_moby_dick_brat'"),
    ],
)
def test_first_columns_without_words(tmp_path, text, reason):
    path = written(tmp_path / "a.conll", text)
    shown = "has the columns 1: .*, 2: .*, 3: .*"
    with refused(f"{path}: the first column {reason}.*{shown}.*Pass --text_column"):
        corpus(path)
    with refused(f"{path}: the first column {reason}.*{shown}.*Pass --word_column"):
        tagged(path)
    with refused(f"{reason}.*--text_column"):
        embedded(path)
    assert list(numbered_texts(path, "1")) and list(numbered_texts(path, "2")) and tagged(path, word=2)


@pytest.mark.parametrize(
    "text",
    [
        "2\tO\n+\tO\n2\tO\n",  # numbers
        "1\tO\n2\tO\n\nThe\tO\ncat\tO\n",  # one sentence that counts
        "ha\tB\nha\tI\n",  # one word
        "no X O\nno X O\nno X O\n",
        "Yes X O\n\nNo X O\n",
        "w0 O\nw1 O\nw2 O\n",
        "O B-X\nB-1 O\n",  # tags are in the last column
        "O Interjection\n",
    ],
)
def test_first_columns_with_words(tmp_path, text):
    path = written(tmp_path / "a.conll", text)
    words = [line.split()[0] for line in text.splitlines() if line]
    assert [word for _, row in tagged(path) for word in row["tokens"]] == words
    assert sum(corpus(path), []) == words


def test_tags_before_words_in_two_columns(tmp_path):
    path = written(tmp_path / "a.bio", "O\tshow\nB-ACTOR\ttom\n\nO\tit\n")
    with refused(r"has tags \(B-ACTOR, O\).*--word_column .*, and --tags_column"):
        tagged(path)
    assert tagged(path, "1", word=2)[0][1] == {"tokens": ["show", "tom"], "1": ["O", "B-ACTOR"]}


def test_tables_that_others_write(tmp_path):
    with refused(r"a\.csv begins with 'text;label': its columns seem to be separated by ';'"):
        table(written(tmp_path / "a.csv", "text;label\na;1\n"))
    path = written(tmp_path / "kaggle.conll", "Sentence: 1\tThousands\tO\n\tof\tO\n")
    with refused(r"kaggle\.conll, line 2: column 1 is empty, without a word"):
        corpus(path)


def test_files_have_one_order_on_all_systems(monkeypatch):
    """Of `a/b.txt` and `a.txt`, a backslash would be the last in the order of code points, and a slash is not."""
    monkeypatch.setattr(data_files.glob, "glob", lambda *_, **__: ["aZ.txt", "a\\b.txt", "a.txt"])
    monkeypatch.setattr(data_files, "Path", PureWindowsPath)
    monkeypatch.setattr(data_files.os.path, "isfile", lambda file: "*" not in file)
    monkeypatch.setattr(data_files, "refuse_folder_or_pipe", lambda *_: None)
    assert data_files.find_files("*.txt") == ["a.txt", "a\\b.txt", "aZ.txt"]
