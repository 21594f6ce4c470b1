"""Question answering: checked questions, windows and positions of answers, no answer, ensembles, cached layers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Sequence, Value
from errors import refused
from task_worker import (
    FEW_QUESTIONS,
    LEARNING,
    WINDOWS,
    bilm,
    experiment,
    predictions_of,
    questions_of,
    write_questions,
    written,
)

from modeling_elmo import ELMoForQuestionAnswering, ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.tasks.question_answering import (
    QuestionAnswering,
    QuestionAnsweringArguments,
    QuestionTrainingArguments,
    answer_positions,
    question_word,
    words_of_answer,
)


def answer(folder: Path, **options) -> list[dict]:
    return experiment("qa", folder, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qa")
    bilm(folder / "bilm", pre_tokenization="treebank")
    answer(folder, **WINDOWS, **LEARNING, num_train_epochs=3, per_device_train_batch_size=10)
    return folder


def test_the_settings_of_the_paper(tmp_path):
    training = QuestionTrainingArguments(output_dir=str(tmp_path))
    assert (training.adadelta, training.learning_rate, training.ema_decay) == (True, 1.0, 0.999)
    assert training.per_device_train_batch_size == 45 and QuestionAnsweringArguments().max_answer_length == 17
    assert QuestionTrainingArguments(output_dir=str(tmp_path), adadelta=False).learning_rate == 1e-3


# Questions

CONTEXT = "The Seine flows through Paris to Le Havre. Paris is old."
PARIS = {"text": ["Paris", "Paris to Le Havre"], "answer_start": [24, 24]}
NONE: dict[str, list] = {"text": [], "answer_start": []}
READ = {"context": CONTEXT, "answers": PARIS["text"], "answer_starts": PARIS["answer_start"]}


def question(name: str, answers: Any = PARIS, **more) -> dict:
    return {"id": name, "question": f"Where is {name}?", "context": CONTEXT, "answers": answers, **more}


def each(answers: Any) -> Any:
    """A list of answers, as in SQuAD's files."""
    return [dict(zip(answers, pair, strict=True)) for pair in zip(*answers.values(), strict=True)]


def paragraph(*questions: dict) -> dict:
    """The questions as in SQuAD's files, with the context of the first."""
    asked = [{name: value for name, value in record.items() if name != "context"} for record in questions]
    return {"context": questions[0]["context"], "qas": [{**one, "answers": each(one["answers"])} for one in asked]}


def lines(*rows: dict) -> str:
    return "\n".join(map(json.dumps, rows))


def read(path: Path, text: str, **options) -> list[dict]:
    arguments = QuestionAnsweringArguments(train_file=str(written(path, text)), **options)
    return QuestionAnswering.read(arguments).data["train"].to_list()


def test_the_files_of_squad(tmp_path):
    """Articles of paragraphs, as one object or a row a line, or paragraphs; SQuAD 2.0 has questions without answer."""
    none = question("q3", NONE, is_impossible=True, plausible_answers=each(PARIS))
    paragraphs = [paragraph(question("q1"), question("q2", is_impossible=False)), paragraph(none)]
    expected = [{"id": name, "question": f"Where is {name}?", **READ} for name in ("q1", "q2", "q3")]
    expected[2] |= {"answers": [], "answer_starts": []}
    articles = [{"title": "Seine", "paragraphs": paragraphs[:1]}, {"title": "Paris", "paragraphs": paragraphs[1:]}]
    for name, text in (
        ("a.json", json.dumps({"version": "2.0", "data": articles})),
        ("b.json.gz", json.dumps({"version": "2.0", "data": articles}, indent=1)),
        ("c.jsonl", lines(*articles)),
        ("d.json", json.dumps(paragraphs)),
        ("e.jsonl", lines(*paragraphs)),
    ):
        assert read(tmp_path / name, text) == expected


@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz"])
def test_a_question_a_line(tmp_path, ending):
    """With lists of texts and starts, or a list of answers."""
    for answers, none in ((PARIS, NONE), (each(PARIS), [])):
        found = read(tmp_path / f"a.{ending}", lines(question("q1", answers), question("q2", none, title="Paris")))
        assert found[0] == {"id": "q1", "question": "Where is q1?", **READ}
        assert found[1]["answers"] == found[1]["answer_starts"] == []


def test_other_columns(tmp_path):
    record = {"key": 7, "query": "Where?", "passage": CONTEXT, "spans": PARIS, "question": "Not this one."}
    names = {"id_column": "key", "question_column": "query", "context_column": "passage", "answers_column": "spans"}
    assert read(tmp_path / "a.jsonl", lines(record), **names) == [{"id": "7", "question": "Where?", **READ}]


def test_a_question_without_a_name_is_named_by_its_location(tmp_path):
    nameless = {"context": CONTEXT, "question": "Why?", "answers": PARIS}
    found = read(tmp_path / "a.jsonl", lines(nameless | {"id": None}))
    assert found[0]["id"] == f"{tmp_path / 'a.jsonl'}, line 1"
    found = read(tmp_path / "b.jsonl", lines(paragraph(nameless, nameless)))
    assert found[1]["id"] == f"{tmp_path / 'b.jsonl'}, line 1, paragraph 1, question 2"


# The features of the data sets `squad` and `squad_v2` on the Hub.
FEATURES = Features(
    id=Value("string"),
    title=Value("string"),
    context=Value("string"),
    question=Value("string"),
    answers=Sequence({"text": Value("string"), "answer_start": Value("int32")}),
)


def test_the_data_set_of_squad(tmp_path):
    rows = [{"title": "Seine", **row} for row in (question("q1"), question("q2", NONE))]
    parts = {"train": rows, "validation": rows[::-1], "test": [rows[0] | {"context": ""}]}
    DatasetDict({name: Dataset.from_list(part, FEATURES) for name, part in parts.items()}).save_to_disk(tmp_path)
    options = {"dataset": str(tmp_path), "validation_split": "validation[:1]"}
    splits = QuestionAnswering.read(QuestionAnsweringArguments(**options, test_split="none")).data
    assert splits["train"][0] == {"id": "q1", "question": "Where is q1?", **READ}
    assert splits["validation"]["answers"][:] == [[]] and splits["validation"].split == "validation"
    with refused(r"--dataset .*, test, row 0, id q1: `context` is ''"):
        QuestionAnswering.read(QuestionAnsweringArguments(**options))


def of(text: Any, start: Any) -> dict:
    return {"answers": {"text": [text], "answer_start": [start]}}


@pytest.mark.parametrize(
    "changes, shown",
    [
        ({"context": None}, "`context` is None"),
        ({"question": " \n"}, r"`question` is ' \\n'"),
        (of("Paris", 23), "`answer_start` is 23; .*'Paris' begins: 24"),
        (of("Rouen", 24), "`answer_start` is 24; .*'Rouen' begins: -1 .*nowhere"),
        (of(".", -1), "`answer_start` is -1; .*: 41"),
        ({"context": "Où, 🗼? Île 🗼"} | of("Île 🗼", len("Où, 🗼? ".encode())), "`answer_start` is 11; .*byte.*: 7"),
        ({"answers": {"text": ["Paris"] * 2, "answer_start": [24, 44]}}, "`answer_start` is 44"),
        (of(" ", 3), "`answers` is {'text': ' ', 'answer_start': 3}"),
        (of("h", True), "`answers` is {'text': 'h', 'answer_start': True}"),
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
    with refused(f"a.jsonl, line 2, id q7: {shown}"):
        read(tmp_path / "a.jsonl", lines(question("q1"), question("q7", **changes)))


@pytest.mark.parametrize("column", ["question", "context", "answers"])
def test_columns_that_are_not_there(tmp_path, column):
    with refused(rf"a.jsonl has no column 'x', only \['id', .*--{column}_column"):
        read(tmp_path / "a.jsonl", lines(question("q1")), **{f"{column}_column": "x"})


@pytest.mark.parametrize(
    "paragraph, shown",
    [
        ("b", r"a.json, element 1: `paragraphs` is \['b'\]"),
        ({"context": "b"}, "a.json, element 1, paragraph 1: `qas` is None"),
        ({"context": CONTEXT, "qas": []}, "a.json has no samples"),
    ],
)
def test_files_that_are_not_as_squads(tmp_path, paragraph, shown):
    with refused(shown):
        read(tmp_path / "a.json", json.dumps({"data": [{"paragraphs": [paragraph]}]}))


def test_splits_of_both_versions(tmp_path):
    one = str(written(tmp_path / "one.jsonl", lines(question("q1"))))
    two = str(written(tmp_path / "two.jsonl", lines(question("q2"), question("q3", NONE))))
    for files, having, without in (((one, two), "test", "train"), ((two, one), "train", "test")):
        with refused(f"'{having}' has questions without an answer, but '{without}' has none"):
            QuestionAnswering.read(QuestionAnsweringArguments(train_file=files[0], test_file=files[1]))
    with refused("No question of the split 'train' has an answer; pass other training data"):
        read(tmp_path / "none.jsonl", lines(question("q4", NONE)))
    QuestionAnswering.read(QuestionAnsweringArguments(validation_file=one, test_file=two))  # without training data


# Windows


def encoded(batch: dict, tokenizer: ELMoTokenizer, is_training: bool) -> dict:
    task = SimpleNamespace(arguments=QuestionAnsweringArguments(**WINDOWS))
    return QuestionAnswering.encode(task, batch, tokenizer, is_training)


@pytest.mark.parametrize("side", ["right", "left"])
def test_windows_cover_the_context_and_mark_the_answer(side):
    """A window that holds the whole answer has it between the two positions; other windows have no answer."""
    tokenizer, questions = ELMoTokenizer(padding_side=side), questions_of("train")
    batch = {key: [question[key] for question in questions] for key in ("id", "question", "context")}
    batch["answers"] = [[each["text"] for each in question["answers"]] for question in questions]
    batch["answer_starts"] = [[each["answer_start"] for each in question["answers"]] for question in questions]
    rows = encoded(batch, tokenizer, is_training=False)
    held = set()
    for row, number in enumerate(rows["example_number"]):
        characters = rows["offset_mapping"][row]
        words = [pair for pair in characters if pair is not None]
        first, last = rows["start_positions"][row], rows["end_positions"][row]
        text, begin = batch["answers"][number][0].strip(), batch["answer_starts"][number][0]
        is_inside = words[0][0] <= begin and begin + len(text) <= words[-1][1]
        assert is_inside == ((first, last) != (0, 0))
        if is_inside:
            held.add(number)
            shown = batch["context"][number][characters[first][0] : characters[last][1]]
            assert text in shown and len(shown) <= len(text) + 12
    assert held == set(range(len(questions))) and len(rows["input_ids"]) > len(questions)
    names = ("input_ids", "character_ids", "attention_mask", "token_type_ids")
    inputs = [{name: rows[name][row] for name in names} for row in range(8)]
    padded = QuestionAnswering.collator(None, tokenizer)(inputs)
    assert padded["attention_mask"][:, 0].all() and not padded["attention_mask"].all()
    assert tokenizer.padding_side == side


@pytest.mark.parametrize(
    "answers, starts, expected",
    [
        (["b"], [2], (4, 4)),
        (["b c"], [2], (4, 5)),
        ([" b "], [1], (4, 4)),
        (["ee"], [9], (7, 7)),  # a part of a word
        (["d e", "b"], [6, 2], (6, 7)),  # the first answer
        (["a"], [0], (0, 0)),  # before the window
        (["e f"], [10], (0, 0)),  # continues after the window
        ([], [], (0, 0)),
    ],
)
def test_positions_of_answers(answers, starts, expected):
    """In a window of `a b c d eee f` without its first and its last word."""
    words = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 11), (12, 13)]
    characters = [None, None, None, None, *words[1:-1], None]
    assert answer_positions(characters, words_of_answer(words, "q", answers, starts)) == expected


@pytest.mark.parametrize(
    "context, answer, message",
    [("\x01 \x02", "\x02", "no word in its context"), ("a \x01", "\x01", "no word in the answer")],
)
def test_text_without_words_is_refused(context, answer, message):
    batch = {"id": ["q7"], "question": ["why"], "context": [context]}
    batch |= {"answers": [[answer]], "answer_starts": [[2]]}
    with refused(f"Question q7: the tokenizer finds {message}"):
        encoded(batch, ELMoTokenizer(), is_training=True)


def test_markers_in_a_text_are_no_words(tmp_path):
    """A tokenizer may read `</S>` in a text as a marker, which no answer can start or end at."""
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>"], pre_tokenization="whitespace", literal_markers=True)
    batch = {"id": ["q"], "question": ["why"], "context": ["a </S> b c"]}
    batch |= {"answers": [["a </S> b"]], "answer_starts": [[0]]}
    rows = encoded(batch, tokenizer, is_training=False)
    ids, first, last = rows["input_ids"][0], rows["start_positions"][0], rows["end_positions"][0]
    assert tokenizer.convert_ids_to_tokens(ids)[first + 1] == "</S>" and last == first + 2
    assert rows["offset_mapping"][0][first : last + 1] == [(0, 1), None, (7, 8)]


def test_kinds_of_questions():
    questions = ("In which city, what?", "What's it?", "Ada did (who?)", "Somewhat whoever")
    assert [*map(question_word, questions)] == ["which", "what", "who", "other"]


# Questions without an answer


@pytest.mark.slow
def test_no_answer_is_predicted_if_some_questions_have_none(tmp_path):
    bilm(tmp_path / "bilm")
    files = {}
    for split, name in (("train", "train"), ("validation", "dev")):
        questions = questions_of(name)
        for question in questions[::2]:
            question["answers"] = []
        files[f"{split}_file"] = write_questions(tmp_path / f"{split}.jsonl", questions)
    options = FEW_QUESTIONS | files | {"max_train_samples": None}
    found = {}
    for threshold in (-1e6, 0.0, 1e6):
        run = {"null_score_diff_threshold": threshold, "output_dir": tmp_path / str(threshold)}
        (record,) = answer(tmp_path, **options, **run)
        found[threshold] = record["metrics"]["validation"]
        rows = predictions_of(tmp_path / str(threshold) / "predictions_validation.jsonl")
        assert found[threshold]["no_answer_accuracy"] == sum(row["predicted"] == "" for row in rows[::2]) / 2
    assert found[-1e6]["no_answer_accuracy"] == 1 and found[-1e6]["has_answer_f1"] == 0
    assert found[1e6]["no_answer_accuracy"] == 0 and found[1e6]["f1"] <= 0.5
    # Without training data, each split decides for itself whether a question may have no answer.
    options |= {"train_file": None, "test_file": write_questions(tmp_path / "test.jsonl", questions_of("dev"))}
    options |= {"null_score_diff_threshold": -1e6, "ensemble": [tmp_path / "0.0"], "output_dir": tmp_path / "both"}
    (record,) = answer(tmp_path, **options)
    assert record["metrics"]["validation"] == found[-1e6]
    assert all(row["predicted"] for row in predictions_of(tmp_path / "both" / "results" / "ensemble_test.jsonl"))


# Experiments: cached layers, ensembles, the baseline


def mean_answer(folders: list[Path], question: str, context: str) -> str:
    """The best product of mean probabilities of start and end, in one window, because the contexts are short."""
    sums = 0
    for folder in folders:
        tokenizer = ELMoTokenizer.from_pretrained(folder)
        inputs = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
        offsets, texts = inputs.pop("offset_mapping")[0].tolist(), inputs.sequence_ids(0)
        with torch.no_grad():
            output = ELMoForQuestionAnswering.from_pretrained(folder)(**inputs)
        sums = sums + torch.stack([output.start_logits[0], output.end_logits[0]]).softmax(1)
    words = [place for place, text in enumerate(texts) if text == 1]
    spans = [(first, last) for first in words for last in words if first <= last < first + 17]
    first, last = max(spans, key=lambda span: sums[0, span[0]] * sums[1, span[1]])
    return context[offsets[first][0] : offsets[last][1]]


@pytest.mark.slow
def test_an_ensemble_averages_starts_and_ends(place, tmp_path):
    answer(place, **WINDOWS, **LEARNING, num_train_epochs=1, seed=7, output_dir=tmp_path / "other")
    members = [place / "run", tmp_path / "other"]
    one, two = (predictions_of(folder / "predictions_test.jsonl") for folder in members)
    assert [row["predicted"] for row in one] != [row["predicted"] for row in two]
    (record,) = answer(place, ensemble=members, output_dir=tmp_path / "both", train_file=None)
    rows = predictions_of(tmp_path / "both" / "results" / "ensemble_test.jsonl")
    assert record["arm"] == "ensemble of 2" and len(rows) == 20
    for row, asked in zip(rows[:5], questions_of("test")[:5], strict=True):
        assert row["predicted"] == mean_answer(members, asked["question"], asked["context"])


@pytest.mark.slow
def test_answers_stay_in_order_if_training_groups_by_length(place, tmp_path):
    """Trainer would group evaluation data by length too, but answers are matched to questions by order."""
    few = WINDOWS | FEW_QUESTIONS | {"max_eval_samples": 10}
    answer(place, **few, train_sampling_strategy="group_by_length", output_dir=tmp_path / "run")
    answer(place, **few | {"train_file": None}, ensemble=[tmp_path / "run"], output_dir=tmp_path / "again")
    found = predictions_of(tmp_path / "run" / "predictions_validation.jsonl")
    again = predictions_of(tmp_path / "again" / "results" / "ensemble_validation.jsonl")
    assert [row["predicted"] for row in found] == [row["predicted"] for row in again]


@pytest.mark.slow
def test_members_that_tokenize_differently_are_no_ensemble(place, tmp_path):
    bilm(tmp_path / "bilm", pre_tokenization="whitespace")
    answer(tmp_path, **FEW_QUESTIONS)
    members = [place / "run", tmp_path / "run"]
    with refused(f"--ensemble {members[1]} .*{members[0]}"):
        answer(place, ensemble=members, output_dir=tmp_path / "both", train_file=None)
