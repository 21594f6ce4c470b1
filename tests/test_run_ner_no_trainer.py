"""The plain loop: it learns, keeps its best epoch, and scores in batches as the saved model does one by one."""

import math

import torch
from accelerate.state import AcceleratorState
from errors import refused
from pretraining_worker import arguments_of
from task_worker import bilm, capitals, options_of, sentences_of

from modeling_elmo import ELMoForTokenClassification, ELMoTokenizer
from modeling_elmo.run_scripts import run_ner_no_trainer
from modeling_elmo.run_scripts.fine_tuning.metrics import tagging_scores
from modeling_elmo.run_scripts.program.processes import sole_run


def run(folder, **options) -> list[dict[str, float]]:
    options = options_of(folder, **capitals(folder), per_device_train_batch_size=6, num_train_epochs=3, **options)
    for name in ("use_cpu", "disable_tqdm", "learning_rate"):
        options.pop(name)
    return run_ner_no_trainer.main(arguments_of({**options, "learning_rate": 0.05}))


def test_the_best_epoch_is_kept(tmp_path):
    bilm(tmp_path / "bilm")
    epochs = run(tmp_path)
    model = ELMoForTokenClassification.from_pretrained(tmp_path / "run").eval()
    tokenizer = ELMoTokenizer.from_pretrained(tmp_path / "run")
    gold = sentences_of(tmp_path / "validation.conll")
    predicted = []
    for words, _ in gold:
        with torch.no_grad():
            labels = model(**tokenizer(words, is_split_into_words=True, return_tensors="pt")).predictions[0, 1:-1]
        predicted.append([model.config.id2label[label] for label in labels.tolist()])
    scores = tagging_scores(predicted, [tags for _, tags in gold])
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3] and epochs[-1]["loss"] < epochs[0]["loss"]
    assert scores["f1"] == max(epoch["validation"] for epoch in epochs) > 0
    with refused("run holds a model; pass another --output_dir", FileExistsError):
        run(tmp_path)


def test_a_score_that_needs_no_learning_is_told(tmp_path, monkeypatch, caplog):
    bilm(tmp_path / "bilm")
    monkeypatch.setattr(run_ner_no_trainer.Tagging, "failure", lambda *_: "f1 is 0.00")
    run(tmp_path)
    steps = 3 * math.ceil(len(sentences_of(tmp_path / "train.conll")) / 6)
    message = f"{tmp_path / 'run'}, split 'validation': f1 is 0.00. Likely cause: training ended after step {steps} "
    assert sum(each.startswith(message) for each in caplog.messages) == 1


def test_refused_runs(tmp_path, monkeypatch):
    bilm(tmp_path / "bilm")
    with sole_run(tmp_path / "run"), refused("Another run is writing into .*run", FileExistsError):
        run(tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        run_ner_no_trainer, "has_accelerator", lambda: True
    )  # else it would wait for the second process
    with refused("2 processes were started .WORLD_SIZE., but this run has 1"):
        run(tmp_path)
