"""The reader's script from SQuAD's files to a folder that answers; experiments are in test_task_training.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from task_worker import TASKS, WITHOUT_DROPOUT, answer, bilm, launch, options_of, predictions_of, read_json
from transformers import pipeline

from modeling_elmo import ELMoForQuestionAnswering, ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.metrics import answer_scores
from modeling_elmo.run_scripts.run_qa import (
    ReaderArguments,
    ReaderTrainingArguments,
    padded_on_the_right,
    place_in_window,
    question_word,
    windows_of,
    words_of_answer,
)

WINDOWS = {"max_seq_length": 40, "doc_stride": 12}
LEARNING = {"no_adadelta": True, "learning_rate": 0.05, "ema_decay": 0.0}  # as fast as a few steps need
SHORT = {"max_train_samples": 6, "max_eval_samples": 4, "max_steps": 1, "test_file": None}


def questions_of(name: str) -> list[dict]:
    """Of a sample, by a plain loop."""
    articles = read_json(TASKS / f"squadshifts_{name}.json")["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    return [{"context": paragraph["context"], **asked} for paragraph in paragraphs for asked in paragraph["qas"]]


def write_questions(path: Path, questions: list[dict]) -> Path:
    path.write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qa")
    bilm(folder / "bilm", pre_tokenization="treebank")
    answer(folder, **WINDOWS, **LEARNING, num_train_epochs=3, per_device_train_batch_size=10)
    return folder


def test_scores_are_those_of_the_predictions(place):
    record = read_json(place / "run" / "record.json")
    assert (record["task"], record["metric"], record["train_samples"]) == ("question-answering", "f1", 40)
    for split, name in (("validation", "dev"), ("test", "test")):
        rows, questions = predictions_of(place / "run" / f"predictions_{split}.jsonl"), questions_of(name)
        assert [row["id"] for row in rows] == [question["id"] for question in questions]
        assert all(row["predicted"] in question["context"] for row, question in zip(rows, questions, strict=True))
        gold = [[each["text"] for each in question["answers"]] for question in questions]
        expected = answer_scores([row["predicted"] for row in rows], gold)
        assert {key: record["metrics"][split][key] for key in expected} == expected
        kinds = record["metrics"][split]["per_type"]
        assert sum(kind["number"] for kind in kinds.values()) == 20 and "what" in kinds


def test_the_folder_answers_what_was_recorded(place):
    reader = pipeline("question-answering", model=str(place / "run"), trust_remote_code=True)
    rows = predictions_of(place / "run" / "predictions_test.jsonl")
    for row, question in zip(rows, questions_of("test"), strict=True):
        asked = {"question": question["question"], "context": question["context"]}
        found = reader(**asked, max_seq_len=40, doc_stride=12)
        assert found["answer"] == row["predicted"]
        assert np.log(found["score"]) == pytest.approx(row["log_probability"], abs=1e-3)
    card = (place / "run" / "README.md").read_text(encoding="utf-8")
    assert "BiDAF with self-attention" in card and "ask(question=" in card and "at its input and output" in card


def test_thirty_two_questions_are_learned_by_heart(tmp_path):
    bilm(tmp_path / "bilm", pre_tokenization="treebank")
    train = TASKS / "squadshifts_train.json"
    options = {"train_file": train, "validation_file": train, "max_train_samples": 32, "max_eval_samples": 32}
    sizes = {**WITHOUT_DROPOUT, "task_hidden_size": 24, "task_char_cnn_filters": [[3, 24]]}
    training = {"no_adadelta": True, "learning_rate": 0.01, "ema_decay": 0.0, "per_device_train_batch_size": 32}
    words = {"word_embedding_size": 32, "word_min_count": 1}
    (record,) = answer(
        tmp_path,
        **options,
        **training,
        **words,
        config_overrides=sizes,
        test_file=None,
        num_train_epochs=60,
        eval_strategy="no",
        save_strategy="no",
        load_best_model_at_end=False,
    )
    assert record["metrics"]["validation"]["exact_match"] == record["metrics"]["validation"]["f1"] == 1.0


# Windows


@pytest.mark.parametrize("side", ["right", "left"])
def test_windows_cover_the_context_and_mark_the_answer(side):
    """Each window that holds all of the answer has it between the two places; the others say that there is none."""
    tokenizer, questions = ELMoTokenizer(padding_side=side), questions_of("train")
    batch = {key: [question[key] for question in questions] for key in ("id", "question", "context")}
    batch["answers"] = [[each["text"] for each in question["answers"]] for question in questions]
    batch["answer_starts"] = [[each["answer_start"] for each in question["answers"]] for question in questions]
    rows = windows_of(batch, tokenizer, ReaderArguments(**WINDOWS), is_training=False)
    assert len(rows["input_ids"]) > len(questions) and rows["example_number"][-1] == len(questions) - 1
    held = set()
    for row, number in enumerate(rows["example_number"]):
        context, answer_, start = (batch[key][number] for key in ("context", "answers", "answer_starts"))
        characters = rows["offset_mapping"][row]
        words = [pair for pair in characters if pair is not None]
        first, last = rows["start_positions"][row], rows["end_positions"][row]
        text, begin = answer_[0].strip(), start[0]
        is_inside = words[0][0] <= begin and begin + len(text) <= words[-1][1]
        assert is_inside == ((first, last) != (0, 0))
        if is_inside:
            held.add(number)
            shown = context[characters[first][0] : characters[last][1]]
            assert text in shown and len(shown) <= len(text) + 12
    assert held == set(range(len(questions)))
    names = ("input_ids", "character_ids", "attention_mask", "token_type_ids")
    padded = padded_on_the_right(tokenizer)([{name: rows[name][row] for name in names} for row in range(8)])
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
        (["e f"], [10], (0, 0)),  # goes on after it
        ([], [], (0, 0)),
    ],
)
def test_places_of_answers(answers, starts, expected):
    """In a window on `a b c d eee f` that holds all words but the first and the last."""
    words = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 11), (12, 13)]
    characters = [None, None, None, None, *words[1:-1], None]
    assert place_in_window(characters, words_of_answer(words, "q", answers, starts)) == expected


@pytest.mark.parametrize("part, message", [("context", "no word in its context"), ("answer", "no word in the answer")])
def test_what_the_tokenizer_drops_is_no_text(part, message):
    texts = {"context": "\x01 \x02", "answer": "\x02"} if part == "context" else {"context": "a \x01", "answer": "\x01"}
    batch = {"id": ["q7"], "question": ["why"], "context": [texts["context"]], "answers": [[texts["answer"]]]}
    batch["answer_starts"] = [[texts["context"].index(texts["answer"])]]
    with pytest.raises(ValueError, match=f"Question q7: the tokenizer finds {message}"):
        windows_of(batch, ELMoTokenizer(), ReaderArguments(**WINDOWS), is_training=True)


def test_markers_in_a_text_are_no_words(tmp_path):
    """A tokenizer may read `</S>` in a text as its marker, where no answer can stand."""
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>"], pre_tokenization="whitespace", literal_markers=True)
    batch = {
        "id": ["q"],
        "question": ["why"],
        "context": ["a </S> b c"],
        "answers": [["a </S> b"]],
        "answer_starts": [[0]],
    }
    rows = windows_of(batch, tokenizer, ReaderArguments(**WINDOWS), is_training=False)
    ids, first, last = rows["input_ids"][0], rows["start_positions"][0], rows["end_positions"][0]
    assert tokenizer.convert_ids_to_tokens(ids)[first + 1] == "</S>" and last == first + 2
    assert rows["offset_mapping"][0][first : last + 1] == [(0, 1), None, (7, 8)]


@pytest.mark.parametrize(
    "question, word",
    [
        ("In which city, what?", "which"),
        ("What's it?", "what"),
        ("Ada did (who?)", "who"),
        ("Somewhat whoever", "other"),
    ],
)
def test_kinds_of_questions(question, word):
    assert question_word(question) == word


# Questions without an answer


def test_no_answer_is_told_where_some_questions_have_none(tmp_path):
    bilm(tmp_path / "bilm")
    files = {}
    for split, name in (("train", "train"), ("validation", "dev")):
        questions = questions_of(name)
        for question in questions[::2]:
            question["answers"] = []
        files[f"{split}_file"] = write_questions(tmp_path / f"{split}.jsonl", questions)
    found = {}
    for threshold in (-1e6, 0.0, 1e6):
        (record,) = answer(
            tmp_path,
            **files,
            **{**SHORT, "max_train_samples": None},
            output_dir=tmp_path / str(threshold),
            null_score_diff_threshold=threshold,
        )
        found[threshold] = record["metrics"]["validation"]
        rows = predictions_of(tmp_path / str(threshold) / "predictions_validation.jsonl")
        assert found[threshold]["no_answer_accuracy"] == sum(row["predicted"] == "" for row in rows[::2]) / 2
    # Whether there may be none is a matter of the data that is measured on, whatever other data there is.
    options = {**SHORT, "train_file": None, "null_score_diff_threshold": -1e6, "ensemble": [tmp_path / "0.0"]}
    known = write_questions(tmp_path / "test.jsonl", questions_of("dev"))
    (record,) = answer(
        tmp_path,
        **{**options, "validation_file": files["validation_file"], "test_file": known},
        output_dir=tmp_path / "both",
    )
    assert record["metrics"]["validation"] == found[-1e6]
    assert all(row["predicted"] for row in predictions_of(tmp_path / "both" / "results" / "ensemble_test.jsonl"))
    assert found[-1e6]["no_answer_accuracy"] == 1 and found[-1e6]["has_answer_f1"] == 0
    assert found[1e6]["no_answer_accuracy"] == 0 and found[1e6]["f1"] <= 0.5


# Arms, ensembles, stored layers


def test_stored_layers_give_the_same_figures(place, tmp_path):
    training = {"num_train_epochs": 1, "config_overrides": WITHOUT_DROPOUT, "per_device_train_batch_size": 10}
    found = []
    for name, options in (("computed", {}), ("stored", {"cache_features": True})):
        (record,) = answer(place, **WINDOWS, **training, **LEARNING, output_dir=tmp_path / name, **options)
        rows = predictions_of(tmp_path / name / "predictions_test.jsonl")
        found.append((record["layer_weights"], rows))
    (weights, rows), (other_weights, others) = found
    for side in ("input", "output"):
        assert weights[side] == pytest.approx(other_weights[side], abs=1e-5)
        assert max(abs(weight - 1 / 3) for weight in weights[side]) > 1e-3  # something was learned
    assert [row["predicted"] for row in rows] == [row["predicted"] for row in others]
    for row, other in zip(rows, others, strict=True):
        assert row["log_probability"] == pytest.approx(other["log_probability"], abs=2e-3)


def mean_answer(folders: list[Path], question: str, context: str) -> str:
    """By the product of the mean probabilities of start and end, in one window: the contexts are short."""
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


def test_an_ensemble_averages_starts_and_ends(place, tmp_path):
    answer(place, **WINDOWS, **LEARNING, num_train_epochs=1, seed=7, output_dir=tmp_path / "other")
    one, two = (predictions_of(folder / "predictions_test.jsonl") for folder in (place / "run", tmp_path / "other"))
    assert [row["predicted"] for row in one] != [row["predicted"] for row in two]
    for members, name in (([place / "run"] * 2, "same"), ([place / "run", tmp_path / "other"], "both")):
        windows = WINDOWS if name == "same" else {}
        (record,) = answer(place, **windows, ensemble=members, output_dir=tmp_path / name, train_file=None)
        rows = predictions_of(tmp_path / name / "results" / "ensemble_test.jsonl")
        assert record["arm"] == "ensemble of 2" and len(rows) == 20
        if name == "both":
            question, context = (questions_of("test")[0][key] for key in ("question", "context"))
            assert rows[0]["predicted"] == mean_answer([place / "run", tmp_path / "other"], question, context)
        if name == "same":
            alone = predictions_of(place / "run" / "predictions_test.jsonl")
            assert [row["predicted"] for row in rows] == [row["predicted"] for row in alone]
            assert record["metrics"]["test"] == read_json(place / "run" / "record.json")["metrics"]["test"]


def test_answers_are_in_order_however_training_groups(place, tmp_path):
    """Trainer would group what it evaluates by length as well, and answers belong to questions by their number."""
    few = SHORT | {"max_eval_samples": 10}
    answer(place, **WINDOWS, **few, train_sampling_strategy="group_by_length", output_dir=tmp_path / "run")
    answer(place, **WINDOWS, **few | {"train_file": None}, ensemble=[tmp_path / "run"], output_dir=tmp_path / "again")
    found = predictions_of(tmp_path / "run" / "predictions_validation.jsonl")
    again = predictions_of(tmp_path / "again" / "results" / "ensemble_validation.jsonl")
    assert [row["predicted"] for row in found] == [row["predicted"] for row in again]
    for one, two in zip(found, again, strict=True):
        assert one["log_probability"] == pytest.approx(two["log_probability"], abs=1e-3)


def test_members_that_divide_texts_otherwise_are_no_ensemble(place, tmp_path):
    bilm(tmp_path / "bilm", pre_tokenization="whitespace")
    answer(tmp_path, **SHORT)
    members = [place / "run", tmp_path / "run"]
    with pytest.raises(ValueError, match=f"--ensemble {members[1]} divides texts otherwise than {members[0]}"):
        answer(place, ensemble=members, output_dir=tmp_path / "both", train_file=None)


def test_the_baseline_is_compared(place, tmp_path, capsys):
    records = answer(place, **SHORT, compare_baseline=True, output_dir=tmp_path)
    assert [record["arm"] for record in records] == ["baseline", "elmo"]
    assert "gain on validation" in capsys.readouterr().out
    assert not read_json(tmp_path / "baseline" / "seed-42" / "config.json")["use_elmo"]


# What is refused


def test_the_settings_of_the_paper(tmp_path):
    training = ReaderTrainingArguments(output_dir=str(tmp_path))
    assert (training.adadelta, training.learning_rate, training.ema_decay) == (True, 1.0, 0.999)
    assert training.per_device_train_batch_size == 45 and ReaderArguments().max_answer_length == 17
    assert ReaderTrainingArguments(output_dir=str(tmp_path), adadelta=False).learning_rate == 1e-3


def test_a_linear_head_reads_elmo_at_its_input(place, tmp_path):
    answer(place, **SHORT, head="linear", output_dir=tmp_path / "linear")
    assert read_json(tmp_path / "linear" / "config.json")["elmo_placement"] == "input"
    assert read_json(place / "run" / "config.json")["elmo_placement"] == "both"


def test_a_training_that_diverges_says_so(place, tmp_path):
    with pytest.raises(ValueError, match="logits are not finite: training diverged. Pass a smaller learning rate"):
        answer(place, **SHORT, **{**LEARNING, "learning_rate": 1e38}, max_grad_norm=0.0, output_dir=tmp_path)


def test_two_processes_answer_as_one(place, tmp_path):
    """What they saved gives the answers that they recorded, in the order of the questions."""
    options = {**WINDOWS, **LEARNING, "ema_decay": 0.5, "num_train_epochs": 1, "per_device_eval_batch_size": 7}
    launch(2, "run_qa", options_of(place, "squadshifts", **options, output_dir=tmp_path))
    rows = predictions_of(tmp_path / "predictions_test.jsonl")
    reader = pipeline("question-answering", model=str(tmp_path), trust_remote_code=True)
    for row, question in zip(rows, questions_of("test"), strict=True):
        asked = {"question": question["question"], "context": question["context"]}
        assert reader(**asked, max_seq_len=40, doc_stride=12)["answer"] == row["predicted"]


def test_a_question_that_fills_the_window(place, tmp_path):
    questions = questions_of("train")[:3]
    questions[1]["question"] = "why " * 30
    path = write_questions(tmp_path / "train.jsonl", questions)
    name = questions[1]["id"]
    with pytest.raises(ValueError, match=f"Question {name} has 30 words, which leaves too few .*--max_seq_length 40"):
        answer(place, **WINDOWS, train_file=path, max_steps=1, output_dir=tmp_path / "run")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_length": 30}, "--max_length 30: contexts are read in windows; pass --max_seq_length"),
        ({"max_seq_length": 4}, "--max_seq_length 4: pass at least 5"),
        ({"doc_stride": -1}, "--doc_stride -1: pass at least 0"),
        ({"max_answer_length": 0}, "--max_answer_length 0: pass at least 1"),
        ({"max_seq_length": 100, "doc_stride": 98}, "--doc_stride 98 with --max_seq_length 100: windows cannot share"),
        ({"optim": "sgd"}, "--optim sgd beside Adadelta: pass --no_adadelta"),
    ],
)
def test_options_that_make_no_windows(options, message, place, tmp_path):
    with pytest.raises(ValueError, match=message):
        answer(place, **options, output_dir=tmp_path)
