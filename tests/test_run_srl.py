"""The program of semantic roles, from files to a folder that labels sentences."""

from pathlib import Path

import pytest
from task_worker import (
    LEARNING,
    TASKS,
    WITHOUT_DROPOUT,
    assert_same_weights,
    bilm,
    label,
    launch,
    options_of,
    predictions_of,
    role_sentences_of,
    stopping_trainer,
)
from transformers import pipeline

from modeling_elmo.run_scripts import run_srl

FEW = {"max_train_samples": 6, "max_eval_samples": 4, "max_steps": 1, "test_file": None}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("srl")
    bilm(folder / "bilm")
    sizes = {"config_overrides": {"task_hidden_size": 24}}
    label(folder, **LEARNING, **sizes, num_train_epochs=3, per_device_train_batch_size=10)
    return folder


def test_the_folder_labels_what_was_recorded(place):
    labeller = pipeline("semantic-role-labeling", model=str(place / "run"), trust_remote_code=True)
    for row in predictions_of(place / "run" / "predictions_test.jsonl"):
        found = labeller(row["words"], is_split_into_words=True, predicates=row["predicates"])
        assert found["words"] == row["words"]
        for verb, expected in zip(found["verbs"], row["verbs"], strict=True):
            del expected["gold_tags"]
            scores = [[argument.pop("score") for argument in each["arguments"]] for each in (verb, expected)]
            assert verb == expected and scores[0] == pytest.approx(scores[1], abs=1e-4)
        again = labeller(row["words"], is_split_into_words=True)
        assert [verb["verb"] for verb in again["verbs"]] == [row["words"][word] for word in row["predicted_predicates"]]
    card = (place / "run" / "README.md").read_text(encoding="utf-8")
    assert "interleaved LSTMs with highway connections (He et al. 2017)" in card
    assert "pipeline('semantic-role-labeling', model=name, trust_remote_code=True)" in card
    assert "Roles are scored for the gold predicates" in card and "| predicate_f1 |" in card.replace(" |\n", " |")


def test_thirty_two_sentences_are_memorized(tmp_path):
    bilm(tmp_path / "bilm")
    train = TASKS / "propbank_train.tsv"
    options = {"train_file": train, "validation_file": train, "max_train_samples": 32, "max_eval_samples": 32}
    sizes = {"task_hidden_size": 48, "task_num_layers": 2, "task_char_cnn_filters": [[3, 24]]}
    options |= {"config_overrides": WITHOUT_DROPOUT | sizes, "test_file": None, "num_train_epochs": 50}
    options |= LEARNING | {"learning_rate": 0.02, "per_device_train_batch_size": 16}
    options |= {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    record = label(tmp_path, **options, lr_scheduler_type="linear")
    scores = record["metrics"]["validation"]
    assert scores["f1"] == scores["span_f1"] == scores["predicate_f1"] == 1.0
    columns = [column for _, _, each in role_sentences_of(train)[:32] for column in each]
    pieces = sum(cell[0] == "(" and cell[:3] != "(V*" for column in columns for cell in column)
    assert 100 < sum(role["number"] for role in scores["per_type"].values()) <= pieces


def test_a_stopped_run_resumes(tmp_path, monkeypatch):
    bilm(tmp_path / "bilm")
    options = {**LEARNING, "num_train_epochs": 2, "per_device_train_batch_size": 20, "test_file": None}
    label(tmp_path, **options, output_dir=tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_srl, "TaskTrainer", stopping_trainer("on_save"))
        label(tmp_path, **options)
    label(tmp_path, **options, resume_from_checkpoint="last")
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_a_training_that_diverges_says_so(place, tmp_path):
    with pytest.raises(ValueError, match="training diverged. Pass a smaller"):
        label(place, **FEW, **LEARNING | {"learning_rate": 1e38}, max_grad_norm=0.0, output_dir=tmp_path)


def test_two_processes_label_as_one(place, tmp_path):
    options = {**LEARNING, "num_train_epochs": 1, "per_device_eval_batch_size": 7}
    launch(2, "run_srl", options_of(place, "propbank", **options, output_dir=tmp_path))
    labeller = pipeline("semantic-role-labeling", model=str(tmp_path), trust_remote_code=True)
    for row in predictions_of(tmp_path / "predictions_test.jsonl"):
        found = labeller(row["words"], is_split_into_words=True, predicates=row["predicates"])
        assert [verb["tags"] for verb in found["verbs"]] == [verb["tags"] for verb in row["verbs"]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"optim": "sgd"}, "--optim sgd has no effect beside Adadelta: pass --no_adadelta"),
        ({"max_length": 2}, "--max_length 2: pass at least 3, for a word and two markers"),
        ({"max_seq_length": 30}, "--max_seq_length.*is not an option.*Did you mean --max_length"),
        ({"train_file": TASKS / "snli_dev.jsonl"}, "snli_dev.jsonl, line 1: `tokens` is None"),
    ],
)
def test_options_that_are_refused(options, message, place, tmp_path):
    with pytest.raises(ValueError, match=message):
        label(place, **options, output_dir=tmp_path)
