import gzip
import json
from pathlib import Path

import pytest
import zstandard
from datasets import Dataset, DatasetDict

from modeling_elmo.run_scripts.fine_tuning.data import ClassificationDataArguments, TaggingDataArguments
from modeling_elmo.run_scripts.fine_tuning.sources import (
    CLASSIFICATION_FORMATS,
    TAGGING_FORMATS,
    DataArguments,
    numbered_lines,
    sources,
)

CONLL = "-DOCSTART- -X- O O\n\nEU NNP B-ORG\nrejects VBZ O\n\n\n# NN O\n#tag  NN O"
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


def tagged(path: Path, **options) -> list:
    return list(sources(TaggingDataArguments(train_file=str(path), **options), TAGGING_FORMATS)["train"].read())


def classified(path: Path, **options) -> list:
    arguments = ClassificationDataArguments(train_file=str(path), **options)
    return list(sources(arguments, CLASSIFICATION_FORMATS)["train"].read())


def written(path: Path, text: str) -> Path:
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(packed(text.encode()))
    return path


@pytest.mark.parametrize("ending", ["conll", "bio.gz", "iob", "iob2.zst", "txt", "tsv"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_words_in_columns(tmp_path, ending, line_end):
    path = written(tmp_path / f"a.{ending}", "\ufeff" + CONLL.replace("\n", line_end))
    first, second = tagged(path)
    assert first == ([f"{path}, line 3", f"{path}, line 4"], {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]})
    assert second == ([f"{path}, line 7", f"{path}, line 8"], {"tokens": ["#", "#tag"], "tags": ["O", "O"]})
    ((_, first), _) = tagged(path, word_column=2, tags_column="1")
    assert first == {"tokens": ["NNP", "VBZ"], "1": ["EU", "rejects"]}


def test_tabs_part_what_may_hold_spaces(tmp_path):
    path = written(tmp_path / "a.conll", "#begin\nNew York\tB-LOC\n10\u00a0000\tO \n\t\n#end\n\u3000\tO\n")
    records = [record for _, record in tagged(path, comments=["#begin", "#end"])]
    assert records[0] == {"tokens": ["New York", "10\u00a0000"], "tags": ["B-LOC", "O"]}
    assert records[1] == {"tokens": ["\u3000"], "tags": ["O"]}


def test_conllu(tmp_path):
    path = written(tmp_path / "a.conllu.gz", CONLLU)
    (places, first), (_, second) = tagged(path)
    assert first == {"tokens": ["vamos", "nos", "al mar"], "tags": ["VERB", "PRON", "NOUN"]}
    assert places == [f"{path}, line {number}" for number in (3, 4, 6)]
    assert second == {"tokens": ["#"], "tags": ["SYM"]}
    ((_, first), _) = tagged(path, word_column=3, tags_column="xpos")
    assert first == {"tokens": ["ir", "nosotros", "mar"], "xpos": ["V", "P", "_"]}
    assert tagged(path, tags_column="xpos")[1][1]["xpos"] == tagged(path, tags_column="5")[1][1]["5"] == ["S"]


def test_tsv_takes_quotes_as_they_are_and_csv_does_not(tmp_path):
    text = 'label\ttext\n1\t"so, so\n\n0\ta " b\t'
    with pytest.raises(ValueError, match=r"a.tsv, line 4 has 3 columns, but there are 2: \['label', 'text'\]"):
        classified(written(tmp_path / "a.tsv", text))
    path = written(tmp_path / "a.tsv.gz", text.rstrip("\t"))
    assert classified(path) == [
        (f"{path}, line 2", {"label": "1", "text": '"so, so'}),
        (f"{path}, line 4", {"label": "0", "text": 'a " b'}),
    ]
    path = written(tmp_path / "a.csv", 'label,text\r\n1,"so, ""so""\r\nsaid he"\r\n\r\n0,b\r\n')
    assert classified(path) == [
        (f"{path}, line 2", {"label": "1", "text": 'so, "so"\nsaid he'}),
        (f"{path}, line 5", {"label": "0", "text": "b"}),
    ]


@pytest.mark.parametrize("ending, mark", [("tsv", "\t"), ("csv.zst", ",")])
def test_without_a_header(tmp_path, ending, mark):
    path = written(tmp_path / f"a.{ending}", f"a b{mark}1\nc{mark}2\n")
    records = [record for _, record in classified(path, column_names=["text", "label"])]
    assert records == [{"text": "a b", "label": "1"}, {"text": "c", "label": "2"}]


RECORDS = [{"text": "a", "label": 1}, {"text": "밥\u2028 b", "label": 0, "more": {"x": []}}]


@pytest.mark.parametrize(
    "ending, text, place",
    [
        ("jsonl", "\n\n".join(json.dumps(record) for record in RECORDS), "line 3"),
        ("json.gz", "\n" + "\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS), "line 3"),
        ("json", json.dumps(RECORDS), "record 2"),
        ("json.zst", json.dumps(RECORDS, indent=2), "record 2"),
        ("json", json.dumps({"version": 1, "data": RECORDS}), "record 2"),
        ("json", json.dumps({"version": 1, "data": RECORDS}, indent=1), "record 2"),
    ],
)
def test_json(tmp_path, ending, text, place):
    path = written(tmp_path / f"a.{ending}", text)
    assert [record for _, record in classified(path)] == RECORDS == [record for _, record in tagged(path)]
    assert classified(path)[1][0] == f"{path}, {place}"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_lines_keep_their_spaces(tmp_path, name):
    path = written(tmp_path / name, "\ufeff\ta \r\n\u0085\x0cb\u2028c\n\n \ufeff")
    assert list(numbered_lines(path)) == [(1, "\ta "), (2, "\u0085\x0cb\u2028c"), (3, ""), (4, " \ufeff")]


@pytest.mark.parametrize(
    "name, content, options, message",
    [
        (
            "a.conll",
            "a O\n\nb\n",
            {},
            r"a.conll, line 3 has 1 columns: 'b'. Pass a file with 2 in each: a word, its tag",
        ),
        (
            "a.conll",
            "# id 7\na O\n",
            {},
            r"a.conll, line 2 has 2 columns: 'a O'. Pass a file with 3 in each: .*--comments",
        ),
        ("a.conll", "a\n", {}, r"line 1 has 1 columns: 'a'. Pass a file with 2 in each"),
        ("a.conll", "a O\n", {"tags_column": "3"}, "line 1 has 2 columns: 'a O'. Pass a file with 3 in each"),
        ("a.conll", "a O\n", {"word_column": 3}, "line 1 has 2 columns: 'a O'. Pass a file with 3 in each"),
        ("a.conll", "a O\n", {"word_column": 0}, "--word_column 0, --tags_column None: columns of .* named 1, 2"),
        ("a.conll", "a O\n", {"tags_column": "0"}, "--word_column 1, --tags_column 0: columns of .* named 1, 2"),
        (
            "a.conll",
            "a O\n",
            {"tags_column": "upos"},
            r"--tags_column upos: columns of .*a.conll are named 1, 2, \.\.\.\.$",
        ),
        ("a.conllu", "1\ta\n", {"tags_column": "pos"}, "--word_column 2, --tags_column pos: .* a tag's also id, form,"),
        ("a.conllu", "a\tb\tc\td\n", {}, "a.conllu, line 1: the first column of .conllu is a word's number, got 'a'"),
        ("a.conll", b"a O\n\xe9t\xe9 O\n", {}, "a.conll, line 2 is not UTF-8: .* Convert the file with iconv"),
        ("a.conll.gz", gzip.compress(b"a O\n" * 99, mtime=0)[:-9], {}, "a.conll.gz is not a complete gzip file"),
        ("a.conll.zst", zstandard.compress(b"a O\n" * 99)[:-3], {}, "a.conll.zst is not a complete Zstandard file"),
        (
            "a.docx",
            "a O\n",
            {},
            r"--train_file .*a.docx: its ending tells no format; pass a file that ends in .conll, .b",
        ),
        ("a.gz", "a O\n", {}, r"--train_file .*a.gz: its ending tells no format"),
        (
            "a.csv",
            "a,O\n",
            {},
            r"a.csv: its ending tells no format; .* .conll, .bio, .iob, .iob2, .conllu, .tsv, .txt, .json",
        ),
        ("a.jsonl", '{"a": 1}\n{"a" 1}\n', {}, "a.jsonl, line 2 is not JSON: Expecting ':' delimiter"),
        ("a.jsonl", '{"a": "\\ud83d\\ude00"}\n{"a": "\\ud83d"}\n', {}, "line 2 is not JSON: .* surrogates not allowed"),
        ("a.jsonl", '{"a": 1}\n[1]\n', {}, r"a.jsonl, line 2 is \[1\]; pass objects, with a key for each column"),
        ("a.json", "[{},\n2]", {}, "a.json, record 2 is 2; pass objects"),
        ("a.json", "[{},\n1 2]", {}, "a.json is not JSON: Expecting .* line 2 column"),
        ("a.json", '{"version":\n 1}', {}, "a.json holds no list of records; pass one, an object with one as `data`"),
    ],
)
def test_bad_files_of_tags(tmp_path, name, content, options, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        tagged(tmp_path / name, **options)


@pytest.mark.parametrize(
    "name, content, options, message",
    [
        ("a.csv", 'a,b\n1,2\n3,"4\n5,6\n', {}, "a.csv, line 3 is not CSV: unexpected end of data"),
        ("a.csv", "a,b\n1,2,3\n", {}, r"a.csv, line 2 has 3 columns, but there are 2: \['a', 'b'\]"),
        ("a.tsv", "a\ta\n1\t2\n", {}, r"a.tsv has the columns \['a', 'a'\]; give each a name of its own"),
        (
            "a.tsv",
            "a\tb\n1\t2\n",
            {"column_names": ["a", "b"]},
            "line 1 holds the names of the columns; leave --column_na",
        ),
        ("a.tsv", "a\tb\n1\t2\n", {"column_names": ["a"]}, r"a.tsv, line 1 has 2 columns, but there are 1: \['a'\]"),
        (
            "a.txt",
            "a\n",
            {},
            r"a.txt: its ending tells no format; pass a file that ends in .tsv, .csv, .jsonl, .json\.",
        ),
    ],
)
def test_bad_files_of_labels(tmp_path, name, content, options, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        classified(tmp_path / name, **options)


def data_set(folder: Path) -> DataArguments:
    parts = {"train": range(5), "dev": range(5, 7), "test": range(7, 8)}
    DatasetDict({name: Dataset.from_dict({"n": list(rows)}) for name, rows in parts.items()}).save_to_disk(folder)
    return DataArguments(dataset=str(folder))


def rows(folder: Path, **options) -> dict:
    found = sources(DataArguments(dataset=str(folder), **options), {})
    return {split: [record["n"] for _, record in source.read()] for split, source in found.items()}


def test_splits_of_a_data_set(tmp_path):
    data_set(tmp_path / "data")
    assert rows(tmp_path / "data") == {"train": [0, 1, 2, 3, 4], "test": [7]}
    parts = {"train_split": "train[:60%]+dev", "validation_split": "train[3:]", "test_split": "none"}
    assert rows(tmp_path / "data", **parts) == {"train": [0, 1, 2, 5, 6], "validation": [3, 4]}
    found = sources(DataArguments(dataset=str(tmp_path / "data"), train_split="dev"), {})
    place, record = list(found["train"].read())[1]
    assert place == f"--dataset {tmp_path / 'data'}, dev, row 1" and record == {"n": 6}

    Dataset.from_dict({"n": [3]}).save_to_disk(tmp_path / "one")
    assert rows(tmp_path / "one") == {"train": [3]}
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.csv").write_text("n\n4\n5\n")
    assert rows(tmp_path / "files") == {"train": [4, 5]}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"train_split": "all"}, r"has the splits \['train', 'dev', 'test'\]; --train_split all: Unknown split"),
        ({"test_split": "dev[:"}, r"has the splits \[.*\]; --test_split dev\[:: Unrecognized instruction format"),
        (
            {"train_split": "none", "test_split": "none"},
            r"has the splits \[.*; pass --train_split, --validation_split or",
        ),
    ],
)
def test_splits_that_are_not_there(tmp_path, options, message):
    data_set(tmp_path)
    with pytest.raises(ValueError, match=message):
        rows(tmp_path, **options)


def test_either_files_or_a_data_set():
    for options in ({}, {"train_file": "a", "dataset": "b"}):
        with pytest.raises(
            ValueError, match="Pass either --train_file, --validation_file or --test_file, or --dataset"
        ):
            sources(DataArguments(**options), {})
    with pytest.raises(FileNotFoundError, match="--test_file nowhere.conll: there is no such file"):
        sources(TaggingDataArguments(test_file="nowhere.conll"), TAGGING_FORMATS)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"train_fraction": 0.0}, "--train_fraction 0.0: pass a number above 0, up to 1"),
        ({"train_fraction": 1.5}, "--train_fraction 1.5: pass a number above 0, up to 1"),
        ({"max_train_samples": 0}, "--max_train_samples 0: pass at least 1"),
        ({"max_eval_samples": -1}, "--max_eval_samples -1: pass at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        DataArguments(**options)
