"""The tagger's program, from files to a folder that stock tools load."""

import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from task_worker import (
    TASKS,
    WITHOUT_DROPOUT,
    assert_same_weights,
    bilm,
    capitals,
    launch,
    options_of,
    predictions_of,
    read_json,
    sentences_of,
    stopping_trainer,
    tag,
    train_tagger,
)
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from modeling_elmo.run_scripts import run_ner
from modeling_elmo.run_scripts.cards.publishing import files_to_upload
from modeling_elmo.run_scripts.fine_tuning.head import BasicHeadArguments
from modeling_elmo.run_scripts.fine_tuning.metrics import tagging_scores
from modeling_elmo.run_scripts.fine_tuning.trainer import last_checkpoint

COUNTS = ("one", "two")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ner")
    bilm(folder / "bilm")
    tag(folder, **capitals(folder), num_train_epochs=3, per_device_train_batch_size=6, learning_rate=0.05)
    return folder


def test_scores_are_those_of_the_predictions(place):
    record = read_json(place / "run" / "record.json")
    rows = predictions_of(place / "run" / "predictions_test.jsonl")
    gold = sentences_of(place / "test.conll")
    assert [(row["tokens"], row["tags"]) for row in rows] == gold
    expected = tagging_scores([row["predicted"] for row in rows], [tags for _, tags in gold])
    assert record["metrics"]["test"] == expected and 0 < expected["f1"] < 1
    assert (record["task"], record["metric"], record["arm"]) == ("ner", "f1", "elmo")


def test_the_folder_predicts_what_was_recorded(place):
    tokenizer = AutoTokenizer.from_pretrained(place / "run")
    model = AutoModelForTokenClassification.from_pretrained(place / "run")
    rows = predictions_of(place / "run" / "predictions_test.jsonl")
    for row in rows[:5]:
        with torch.no_grad():
            logits = model(**tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")).logits[0, 1:-1]
        assert [model.config.id2label[number] for number in logits.argmax(-1).tolist()] == row["predicted"]
    found = pipeline("token-classification", model=str(place / "run"), aggregation_strategy="simple")
    assert all(group["entity_group"] == "NAME" for group in found("We saw Paris and Rome ."))
    assert (place / "run" / "README.md").read_text(encoding="utf-8").count("token-classification") >= 2


def test_two_processes_equal_one(place, tmp_path):
    """On the same batches. The 20 validation sentences fill the batches of two processes: Trainer repeats none.

    Adam would enlarge rounding where a gradient is nearly 0, and would not notice gradients that are summed.
    """
    common = {"config_overrides": WITHOUT_DROPOUT, "test_file": None, "optim": "sgd", "learning_rate": 0.1}
    two = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 5, "output_dir": tmp_path / "two"}
    launch(2, "run_ner", options_of(place, **common, **two))
    tag(place, **common, per_device_train_batch_size=6, output_dir=tmp_path / "one")
    logs = [read_json(Path(last_checkpoint(tmp_path / name)) / "trainer_state.json")["log_history"] for name in COUNTS]
    losses = [[entry["eval_loss"] for entry in log if "eval_loss" in entry] for log in logs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0]
    assert_same_weights(tmp_path / "two", tmp_path / "one", rtol=1e-4, atol=1e-5)
    world_sizes = [read_json(tmp_path / name / "record.json")["settings"]["world_size"] for name in COUNTS]
    assert world_sizes == [1, 2]


def test_a_run_resumes_with_its_own_settings_only(place, tmp_path, monkeypatch):
    """The optimizer keeps the settings of the checkpoint, so a record of others would be false."""
    options = {"output_dir": tmp_path / "stopped", "num_train_epochs": 2, "learning_rate": 0.01}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_ner, "TaskTrainer", stopping_trainer("on_save"))
        tag(place, **options)
    again = options | {"resume_from_checkpoint": "last", "num_train_epochs": 3}
    message = "last: the run was begun with other settings: learning_rate 0.01, now 0.1. Repeat its options, or train"
    with pytest.raises(ValueError, match=message):
        tag(place, **again | {"learning_rate": 0.1})
    other = tmp_path / "train.conll"
    other.write_text((TASKS / "wnut17_train.conll").read_text(encoding="utf-8") + "more\tO\n", encoding="utf-8")
    with pytest.raises(ValueError, match="last: the run was begun with other settings: data_digest '"):
        tag(place, **again | {"train_file": other})
    with pytest.raises(FileExistsError, match="of another run; pass another --output_dir, or --resume_from"):
        tag(place, **options)
    record = tag(place, **again)
    assert record["epochs"] == 3 and record["settings"]["learning_rate"] == 0.01
    assert "run_settings.json" not in files_to_upload(tmp_path / "stopped")
    for checkpoint in (tmp_path / "stopped").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(FileExistsError, match=r"of another run; pass another --output_dir\.$"):  # nothing to resume
        tag(place, **options)


def test_parts_of_speech_are_compared_by_accuracy(tmp_path):
    bilm(tmp_path / "bilm")
    files = capitals(tmp_path)
    for path in files.values():
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("\tO", "\tX").replace("B-NAME", "PROPN").replace("I-NAME", "PROPN"), "utf-8")
    record = tag(tmp_path, **files, max_steps=1, max_length=9)
    assert (record["task"], record["metric"]) == ("tagging", "accuracy")
    rows = predictions_of(tmp_path / "run" / "predictions_test.jsonl")
    assert all(len(row["predicted"]) == len(row["tokens"]) for row in rows)  # evaluation data are not cut


def test_data_to_evaluate_on_are_needed(place, tmp_path):
    with pytest.raises(ValueError, match="no data to evaluate on; pass --validation_file FILE or --test_file FILE"):
        train_tagger(place, tmp_path, validation_file=None, test_file=None)


def test_the_folder_of_an_experiment_is_refused(place, tmp_path):
    (tmp_path / "settings.json").write_text("{}", encoding="utf-8")
    with pytest.raises(FileExistsError, match="holds an experiment of `elmo reproduce`; pass another --output_dir"):
        train_tagger(place, tmp_path)


def test_a_file_as_output_folder(place, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="--output_dir .*file is a file; pass a folder"):
        train_tagger(place, tmp_path / "file")


def test_few_options_beside_those_of_trainer():
    """A newcomer reads them all: the others are options of `elmo reproduce`, or fields of the configuration."""
    options = {each.name for each in fields(BasicHeadArguments)}
    assert options == {"model_name_or_path", "head", "freeze_bilm", "word_vectors", "config_overrides"}
