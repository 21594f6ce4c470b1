"""Checked questions from SQuAD's files, JSON lines and data sets, and the errors for bad questions."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, Features, Sequence, Value

from modeling_elmo.run_scripts.fine_tuning.tasks.question_data import QuestionAnsweringArguments, read_questions

CONTEXT = "The Seine flows through Paris to Le Havre. Paris is old."
PARIS = {"text": ["Paris", "Paris to Le Havre"], "answer_start": [24, 24]}
NONE: dict[str, list] = {"text": [], "answer_start": []}
READ = {"context": CONTEXT, "answers": PARIS["text"], "answer_starts": PARIS["answer_start"]}


def question(name: str, answers: Any = PARIS, **more) -> dict:
    return {"id": name, "question": f"Where is {name}?", "context": CONTEXT, "answers": answers, **more}


def each(answers: Any) -> Any:
    """A list of answers, as in SQuAD's files."""
    return [dict(zip(answers, pair, strict=True)) for pair in zip(*answers.values(), strict=True)]


def nested(*questions: dict) -> str:
    """A file in SQuAD's format: two articles, with a paragraph for each question."""
    paragraphs = []
    for record in questions:
        part = {name: value for name, value in record.items() if name != "context"}
        if isinstance(part["answers"], dict):
            part["answers"] = each(part["answers"])
        paragraphs.append({"context": record["context"], "qas": [part]})
    articles = [{"title": "Seine", "paragraphs": paragraphs[:1]}, {"title": "Paris", "paragraphs": paragraphs[1:]}]
    return json.dumps({"version": "1.1", "data": articles})


def lines(*questions: dict) -> str:
    return "\n".join(map(json.dumps, questions))


def written(path: Path, text: str) -> str:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def asked(path: Path, text: str, **options) -> list[dict]:
    return read_questions(QuestionAnsweringArguments(train_file=written(path, text), **options))["train"].to_list()


@pytest.mark.parametrize("ending", ["json", "json.gz"])
@pytest.mark.parametrize("indent", [None, 1])
def test_the_files_of_squad(tmp_path, ending, indent):
    text = json.dumps(json.loads(nested(question("q1"), question("q2"))), indent=indent)
    assert asked(tmp_path / f"a.{ending}", text) == [
        {"id": "q1", "question": "Where is q1?", **READ},
        {"id": "q2", "question": "Where is q2?", **READ},
    ]


def test_a_paragraph_has_several_questions(tmp_path):
    article = json.loads(nested(question("q1")))["data"][0]
    article["paragraphs"][0]["qas"] += json.loads(nested(question("q2")))["data"][0]["paragraphs"][0]["qas"]
    found = asked(tmp_path / "a.json", json.dumps({"data": [article]}))
    assert [(row["id"], row["context"]) for row in found] == [("q1", CONTEXT), ("q2", CONTEXT)]
    assert asked(tmp_path / "a.jsonl", json.dumps(article)) == found  # an article a line


def test_the_files_of_squad_2(tmp_path):
    unanswered = question("q2", [], is_impossible=True, plausible_answers=each(PARIS))
    found = asked(tmp_path / "a.json", nested(question("q1", is_impossible=False), unanswered))
    assert [row["answers"] for row in found] == [PARIS["text"], []]
    assert [row["answer_starts"] for row in found] == [PARIS["answer_start"], []]
    assert list(found[0]) == ["id", "question", "context", "answers", "answer_starts"]


@pytest.mark.parametrize("answers", [PARIS, each(PARIS)], ids=["lists", "list"])
@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz"])
def test_a_question_a_line(tmp_path, answers, ending):
    none = NONE if answers is PARIS else []
    records = question("q1", answers), question("q2", none), question("q3", answers, title="Paris")
    found = asked(tmp_path / f"a.{ending}", lines(*records))
    assert found[0] == {"id": "q1", "question": "Where is q1?", **READ}
    assert [row["answers"] for row in found] == [PARIS["text"], [], PARIS["text"]]


def test_other_columns(tmp_path):
    record = {"key": 7, "query": "Where?", "passage": CONTEXT, "spans": PARIS, "question": "Not this one."}
    names = {"id_column": "key", "question_column": "query", "context_column": "passage", "answers_column": "spans"}
    assert asked(tmp_path / "a.jsonl", lines(record), **names) == [{"id": "7", "question": "Where?", **READ}]


@pytest.mark.parametrize("nameless", [{}, {"id": None}])
def test_a_question_without_a_name_is_named_by_its_location(tmp_path, nameless):
    record = {name: value for name, value in question("q1").items() if name != "id"} | nameless
    (found,) = asked(tmp_path / "a.jsonl", lines(record))
    assert found["id"] == f"{tmp_path / 'a.jsonl'}, line 1"
    with pytest.raises(ValueError, match="a.jsonl, line 1: `question` is ''"):
        asked(tmp_path / "a.jsonl", lines(record | {"question": ""}))


def test_offsets_count_characters(tmp_path):
    context, answers = "Où, 🗼? Île 🗼", {"text": ["Île 🗼"], "answer_start": [7]}
    (found,) = asked(tmp_path / "a.jsonl", lines(question("q1", answers, context=context)))
    assert found["answer_starts"] == [7]
    answers["answer_start"] = [len("Où, 🗼? ".encode())]
    with pytest.raises(ValueError, match="q1: `answer_start` is 11; .*not byte, where 'Île 🗼' begins; it is at 7"):
        asked(tmp_path / "a.jsonl", lines(question("q1", answers, context=context)))


# The features of the data sets `squad` and `squad_v2` on the Hub.
FEATURES = Features(
    id=Value("string"),
    title=Value("string"),
    context=Value("string"),
    question=Value("string"),
    answers=Sequence({"text": Value("string"), "answer_start": Value("int32")}),
)


def data_set(folder: Path, **splits: list[dict]) -> str:
    parts = {
        split: Dataset.from_list([{"title": "Seine", **row} for row in rows], FEATURES)
        for split, rows in splits.items()
    }
    DatasetDict(parts).save_to_disk(folder)
    return str(folder)


def test_the_data_set_of_squad(tmp_path):
    folder = data_set(tmp_path / "data", train=[question("q1"), question("q2")], validation=[question("q3")])
    splits = read_questions(QuestionAnsweringArguments(dataset=folder))
    assert {split: data["id"][:] for split, data in splits.items()} == {"train": ["q1", "q2"], "validation": ["q3"]}
    assert splits["validation"].to_list() == [{"id": "q3", "question": "Where is q3?", **READ}]
    assert splits["validation"].split == "validation"


def test_the_data_set_of_squad_2(tmp_path):
    rows = [question("q1"), question("q2", NONE)]
    folder = data_set(tmp_path / "data", train=rows, validation=rows[::-1])
    splits = read_questions(QuestionAnsweringArguments(dataset=folder, validation_split="validation[:1]"))
    assert splits["train"]["answers"][:] == [PARIS["text"], []] and splits["validation"]["answers"][:] == [[]]


def test_a_bad_row_of_a_data_set(tmp_path):
    folder = data_set(tmp_path / "data", train=[question("q1"), question("q2", context="")])
    with pytest.raises(ValueError, match=r"--dataset .*data, train, row 1, question q2: `context` is ''"):
        read_questions(QuestionAnsweringArguments(dataset=folder))


def answer(text: Any, start: Any) -> dict:
    return {"answers": {"text": [text], "answer_start": [start]}}


@pytest.mark.parametrize(
    "changes, shown",
    [
        ({"context": None}, "`context` is None"),
        ({"question": " \n"}, r"`question` is ' \\n'"),
        (answer("Paris", 23), "`answer_start` is 23; .*'Paris' begins; it is at 24"),
        (answer("Rouen", 24), "`answer_start` is 24; .*'Rouen' begins; it is nowhere"),
        (answer(".", -1), "`answer_start` is -1; .* it is at 41"),
        ({"answers": {"text": ["Paris"] * 2, "answer_start": [24, 44]}}, "`answer_start` is 44"),
        (answer(" ", 3), "`answers` is {'text': ' ', 'answer_start': 3}"),
        (answer("h", True), "`answers` is {'text': 'h', 'answer_start': True}"),
        ({"answers": None}, "`answers` is None"),
        ({"answers": [{"text": "Paris"}]}, r"`answers` is \[\{'text': 'Paris'\}\]"),
        ({"answers": {"text": "Th", "answer_start": [0, 1]}}, r"`answers` is \{'text': 'Th', "),
        ({"answers": {"text": ["Th"], "answer_start": []}}, r"`answers` is \{'text': "),
        ({"answers": [], "is_impossible": False}, r"`is_impossible` is False; .* \[\]"),
        ({"is_impossible": True}, "`is_impossible` is True; .*'Paris'"),
        ({"is_impossible": "false"}, "`is_impossible` is 'false'"),
    ],
)
def test_bad_questions(tmp_path, changes, shown):
    with pytest.raises(ValueError, match=f"a.jsonl, line 2, question q7: {shown}"):
        asked(tmp_path / "a.jsonl", lines(question("q1"), question("q7", **changes)))


def test_a_bad_question_in_squads_format(tmp_path):
    with pytest.raises(ValueError, match="a.json, question q7: `context` is None"):
        asked(tmp_path / "a.json", nested(question("q1"), question("q7", context=None)))


def test_a_name_that_ends_the_location_is_shown_too(tmp_path):
    with pytest.raises(ValueError, match="a1.jsonl, line 1, question 1: `question` is ''"):
        asked(tmp_path / "a1.jsonl", lines(question("1", question="")))


@pytest.mark.parametrize("column", ["question", "context", "answers"])
def test_columns_that_are_not_there(tmp_path, column):
    with pytest.raises(ValueError, match=rf"a.jsonl has no column 'x', only \['id', .*--{column}_column"):
        asked(tmp_path / "a.jsonl", lines(question("q1")), **{f"{column}_column": "x"})
    record = {name: value for name, value in question("q2").items() if name != column}
    with pytest.raises(ValueError, match=f"a.jsonl, line 2, question q2: `{column}` is None"):
        asked(tmp_path / "a.jsonl", lines(question("q1"), record))


def test_rows_may_be_paragraphs(tmp_path):
    paragraphs = [
        part for article in json.loads(nested(question("q1"), question("q2")))["data"] for part in article["paragraphs"]
    ]
    expected = [{"id": name, "question": f"Where is {name}?", **READ} for name in ("q1", "q2")]
    assert asked(tmp_path / "a.json", json.dumps(paragraphs, indent=1)) == expected
    assert asked(tmp_path / "a.jsonl", lines(*paragraphs)) == expected


@pytest.mark.parametrize(
    "article, shown",
    [
        ({"paragraphs": ["b"]}, r"a.json, element 1: `paragraphs` is \['b'\]"),
        ({"paragraphs": [{"context": "b"}]}, "a.json, element 1, paragraph 1: `qas` is None"),
        ({"paragraphs": [{"qas": []}, {"qas": ["b"]}]}, r"element 1, paragraph 2: `qas` is \['b'\]"),
        ({"paragraphs": [{"context": CONTEXT, "qas": []}]}, "a.json has no samples"),
    ],
)
def test_files_that_are_not_as_squads(tmp_path, article, shown):
    with pytest.raises(ValueError, match=shown):
        asked(tmp_path / "a.json", json.dumps({"data": [article]}))


def test_endings():
    with pytest.raises(ValueError, match="a.csv has an unknown ending"):
        read_questions(QuestionAnsweringArguments(test_file="a.csv"))


def test_a_file_of_both_versions(tmp_path):
    first, second = question("q1"), question("q2", [], is_impossible=True)
    for records in ([first, second], [second, first]):
        with pytest.raises(ValueError, match="mixes SQuAD 1.1 and 2.0: question q2 has is_impossible, question q1"):
            asked(tmp_path / "a.json", nested(*records))


@pytest.mark.parametrize("split", ["validation", "test"])
def test_splits_of_both_versions(tmp_path, split):
    one = written(tmp_path / "one.json", nested(question("q1"), question("q2")))
    two = written(tmp_path / "two.json", nested(question("q3"), question("q4", []), question("q5", [])))
    for train, other, having, without in ((one, two, split, "train"), (two, one, "train", split)):
        message = f"'{having}' has questions without an answer, first q4, but '{without}' has none"
        with pytest.raises(ValueError, match=message):
            read_questions(QuestionAnsweringArguments(train_file=train, **{f"{split}_file": other}))


def test_splits_without_training_data_may_differ(tmp_path):
    one = written(tmp_path / "one.json", nested(question("q1")))
    two = written(tmp_path / "two.json", nested(question("q2", [])))
    splits = read_questions(QuestionAnsweringArguments(validation_file=one, test_file=two))
    assert {split: data["id"][:] for split, data in splits.items()} == {"validation": ["q1"], "test": ["q2"]}
