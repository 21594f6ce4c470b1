"""The reader's program, from SQuAD's files to a folder that answers."""

from pathlib import Path

import numpy as np
import pytest
from task_worker import (
    FEW_QUESTIONS,
    LEARNING,
    TASKS,
    WINDOWS,
    WITHOUT_DROPOUT,
    answer,
    bilm,
    launch,
    options_of,
    predictions_of,
    questions_of,
    read_json,
    write_questions,
)
from transformers import pipeline

from modeling_elmo.run_scripts.fine_tuning.metrics import answer_scores


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
    rows, equal = predictions_of(place / "run" / "predictions_test.jsonl"), []
    for row, question in zip(rows, questions_of("test"), strict=True):
        asked = {"question": question["question"], "context": question["context"]}
        found = reader(**asked, max_seq_len=40, doc_stride=12)
        equal.append(found["answer"] == row["predicted"])
        assert np.log(found["score"]) == pytest.approx(row["log_probability"], abs=1e-3)
    assert sum(equal) >= len(equal) - 2  # the model is young: spans may be equally probable
    card = (place / "run" / "README.md").read_text(encoding="utf-8")
    assert "BiDAF with self-attention" in card and "pipe(question=" in card and "at its input and output" in card


def test_thirty_two_questions_are_memorized(tmp_path):
    bilm(tmp_path / "bilm", pre_tokenization="treebank")
    train = TASKS / "squadshifts_train.json"
    options = {"train_file": train, "validation_file": train, "max_train_samples": 32, "max_eval_samples": 32}
    sizes = {"task_hidden_size": 24, "task_char_cnn_filters": [[3, 24]], "task_word_embedding_size": 32}
    options |= {"config_overrides": WITHOUT_DROPOUT | sizes, "test_file": None, "num_train_epochs": 60}
    options |= LEARNING | {"learning_rate": 0.01, "per_device_train_batch_size": 32}
    record = answer(tmp_path, **options, eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
    assert record["metrics"]["validation"]["exact_match"] == record["metrics"]["validation"]["f1"] == 1.0


def test_a_training_that_diverges_says_so(place, tmp_path):
    with pytest.raises(ValueError, match="training diverged. Pass a smaller"):
        answer(place, **FEW_QUESTIONS, **{**LEARNING, "learning_rate": 1e38}, max_grad_norm=0.0, output_dir=tmp_path)


def test_two_processes_answer_as_one(place, tmp_path):
    """The saved model gives the recorded answers, in the order of the questions."""
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
    message = f"Question {questions[1]['id']} has 30 words, which leaves too little room .*--max_seq_length 40"
    with pytest.raises(ValueError, match=message):
        answer(place, **WINDOWS, train_file=path, max_steps=1, output_dir=tmp_path / "run")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_length": 30}, "--max_length.*Did you mean --max_seq_length"),
        ({"max_seq_length": 4}, "--max_seq_length 4: pass at least 5"),
        ({"max_seq_length": 100, "doc_stride": 98}, "--doc_stride 98 is too large for windows of --max_seq_length 100"),
        ({"optim": "sgd"}, "--optim sgd has no effect beside Adadelta: pass --no_adadelta"),
    ],
)
def test_options_that_are_refused(options, message, place, tmp_path):
    with pytest.raises(ValueError, match=message):
        answer(place, **options, output_dir=tmp_path)
