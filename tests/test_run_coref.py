"""The program of coreference, from files to a folder that resolves documents."""

import json
from pathlib import Path

import pytest
from task_worker import (
    TASKS,
    WITHOUT_DROPOUT,
    assert_same_weights,
    bilm,
    launch,
    options_of,
    predictions_of,
    read_json,
    resolve,
    stopping_trainer,
)
from transformers import Trainer, TrainingArguments, pipeline

from modeling_elmo import ELMoForCoreferenceResolution, ELMoTokenizer
from modeling_elmo.run_scripts import run_coref
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference import Coreference, CoreferenceArguments
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference_data import read_documents

LITBANK = {split: TASKS / f"litbank_{split}.conll" for split in ("train", "dev", "test")}
WITHOUT_EVALUATION = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("coref")
    bilm(folder / "bilm")
    sizes = {**WITHOUT_DROPOUT, "lexical_dropout": 0.0, "max_span_width": 2, "task_hidden_size": 32}
    options = {"config_overrides": sizes, "num_train_epochs": 15, "learning_rate": 0.005, "train_singletons": True}
    resolve(folder, **options, test_file=LITBANK["train"], **WITHOUT_EVALUATION)
    return folder


def characters_of(row: dict) -> list[list[tuple[int, int]]]:
    """The characters of the predicted mentions, in words joined by spaces and sentences joined by line feeds."""
    clusters, starts, position = {}, [], 0
    for words in row["sentences"]:
        starts.append([])
        for word in words:
            starts[-1].append((position, position + len(word)))
            position += len(word) + 1
    for sentence, first, last, cluster in row["predicted"]:
        clusters.setdefault(cluster, []).append((starts[sentence][first][0], starts[sentence][last][1]))
    return sorted(map(sorted, clusters.values()))


def assert_resolves_as_recorded(folder: Path, split: str) -> int:
    """Compares the pipeline of the folder with the predictions, and returns the number of clusters."""
    resolver, count = pipeline("coreference-resolution", model=str(folder), trust_remote_code=True), 0
    for row in predictions_of(folder / f"predictions_{split}.jsonl"):
        found = resolver(row["sentences"])["clusters"]
        spans = [[(mention["start"], mention["end"]) for mention in cluster] for cluster in found]
        assert sorted(map(sorted, spans)) == characters_of(row)
        count += len(found)
    return count


def test_the_folder_resolves_what_was_recorded(place):
    assert assert_resolves_as_recorded(place / "run", "test") > 1
    record = read_json(place / "run" / "record.json")
    assert (record["task"], record["metric"], record["train_samples"]) == ("coreference-resolution", "f1", 2)
    card = (place / "run" / "README.md").read_text(encoding="utf-8")
    assert "span ranking (Lee et al. 2017)" in card and 'print(pipe(["The play was staged in Paris.", ' in card
    assert "It also returns singletons" in card and "| f1_without_singletons |" in card and "Labels:" not in card


def passages(path: Path) -> Path:
    """The sentences 1 to 4 of the second training document and of the one for validation, as JSON lines."""
    arguments = CoreferenceArguments(train_file=str(LITBANK["train"]), validation_file=str(LITBANK["dev"]))
    data = read_documents(arguments)
    with path.open("w", encoding="utf-8") as file:
        for row in (data["train"][1], data["validation"][0]):
            row["sentences"], row["speakers"] = row["sentences"][1:5], []
            row["mentions"] = [[number - 1, *rest] for number, *rest in row["mentions"] if 1 <= number < 5]
            file.write(json.dumps(row) + "\n")
    return path


def test_two_documents_are_memorized(tmp_path):
    """Mentions of their clusters have up to two words. A span that is not kept is not learned, so most are kept."""
    bilm(tmp_path / "bilm")
    file = passages(tmp_path / "documents.jsonl")
    sizes = {"task_hidden_size": 32, "task_char_cnn_filters": [[3, 24]], "max_span_width": 2, "spans_per_word": 2.0}
    options = {"config_overrides": {**WITHOUT_DROPOUT, **sizes, "lexical_dropout": 0.0}, "test_file": None}
    options |= {"train_file": file, "validation_file": file, "num_train_epochs": 30, "learning_rate": 0.005}
    record = resolve(tmp_path, **options, **WITHOUT_EVALUATION)
    assert record["metrics"]["validation"]["f1"] > 0.99
    assert assert_resolves_as_recorded(tmp_path / "run", "validation") == 4


@pytest.mark.parametrize("is_within_an_epoch", [False, True])
def test_a_stopped_run_resumes_with_the_same_windows(is_within_an_epoch, tmp_path, monkeypatch):

    bilm(tmp_path / "bilm")
    steps = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 3, "eval_steps": 3}
    options = {"num_train_epochs": 3, "max_sentences": 4, "test_file": None, "max_eval_samples": 1}
    options |= steps if is_within_an_epoch else {}
    resolve(tmp_path, **options, output_dir=tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_coref, "TaskTrainer", stopping_trainer("on_save"))
        resolve(tmp_path, **options)
    resolve(tmp_path, **options, resume_from_checkpoint="last")
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_two_processes_resolve_as_one(place, tmp_path):
    """Documents of different numbers of spans."""
    options = {"num_train_epochs": 1, "validation_file": LITBANK["train"], "output_dir": tmp_path}
    launch(2, "run_coref", options_of(place, "litbank", **options))
    rows = predictions_of(tmp_path / "predictions_validation.jsonl")
    assert [len(row["sentences"]) for row in rows] == [12, 12]
    assert len({sum(map(len, row["sentences"])) for row in rows}) == 2
    assert_resolves_as_recorded(tmp_path, "validation")
    assert_resolves_as_recorded(tmp_path, "test")


def test_stock_trainer_trains_and_evaluates(place, tmp_path):
    """It needs `label_names`, and all columns for the collator."""
    task = Coreference(CoreferenceArguments(train_file=str(LITBANK["train"]), test_file=str(LITBANK["test"])))
    tokenizer = ELMoTokenizer.from_pretrained(place / "run")
    rows = task.encode_splits(tokenizer)
    options = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "remove_unused_columns": False}
    options |= {"label_names": ["mentions"], "max_steps": 2, "report_to": "none", "use_cpu": True}
    trainer = Trainer(
        ELMoForCoreferenceResolution.from_pretrained(place / "run"),
        TrainingArguments(output_dir=str(tmp_path), **options),
        data_collator=task.collator(tokenizer),
        train_dataset=rows["train"],
    )
    trainer.train()
    found = trainer.predict(rows["train"])
    clusters, scores = found.predictions
    assert found.label_ids.shape == (2, 85, 4) and (found.label_ids[0, 51:] == -100).all()
    assert clusters.shape == (*scores.shape, 4) and len(clusters) == 2 and found.metrics["test_loss"] > 0
    assert (clusters[0] == -100).all(-1).any() and not (clusters[1] == -100).any()


def test_a_training_that_diverges_says_so(place, tmp_path):
    options = {"learning_rate": 1e38, "max_grad_norm": 0.0, "max_steps": 1, "test_file": None, "output_dir": tmp_path}
    with pytest.raises(ValueError, match="training diverged. Pass a smaller"):
        resolve(place, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"per_device_train_batch_size": 4}, "--per_device_train_batch_size 4: .*a batch is one document"),
        ({"dataloader_persistent_workers": True}, "these workers repeat the windows of the first epoch"),
        ({"max_length": 30}, "--max_length.*is not an option"),
        ({"config_overrides": {"train_singletons": True}}, "train_singletons is set by the data or by its own option"),
        ({"head": "linear"}, "Coreference resolution has no linear head, but head is 'linear'; pass head='paper'"),
    ],
)
def test_options_that_are_refused(options, message, place, tmp_path):
    with pytest.raises(ValueError, match=message):
        resolve(place, **options, output_dir=tmp_path)
