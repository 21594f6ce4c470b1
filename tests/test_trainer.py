"""Trainer for task heads: its checks, weight decay, Adadelta, averaged weights, checkpoints to resume from."""

import math
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from bilm_models import pair_in
from errors import refused
from safetensors import SafetensorError
from safetensors.torch import load_file
from task_worker import assert_same_weights, bilm, capitals, interrupted, predictions_of, trainer_with
from task_worker import train_tagger as train
from transformers import TrainerCallback, training_args

from modeling_elmo import ELMoForTokenClassification
from modeling_elmo.run_scripts.fine_tuning import head, trainer
from modeling_elmo.run_scripts.fine_tuning.tasks.classification import ClassificationTrainingArguments
from modeling_elmo.run_scripts.fine_tuning.trainer import (
    TRAINED,
    TaskTrainer,
    TaskTrainingArguments,
    last_checkpoint,
)
from modeling_elmo.run_scripts.program import processes


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a biLM and data."""
    folder = tmp_path_factory.mktemp("place")
    bilm(folder / "bilm")
    capitals(folder)
    return folder


# Options


FIXED = {
    "do_predict": True,
    "label_names": ["a"],
    "label_smoothing_factor": 0.1,
    "prediction_loss_only": True,
    "eval_do_concat_batches": False,
}
FIXED |= {"dataloader_drop_last": True, "dataloader_in_order": False, "greater_is_better": False}
IGNORED = FIXED | {"warmup_steps": 5, "optim": "sgd", "metric_for_best_model": "loss"}


def test_options_that_are_ignored_are_named(tmp_path, warnings_of_transformers):
    plain = TaskTrainingArguments(output_dir=str(tmp_path), adadelta=True).for_trainer("f1", has_validation=True)
    assert not warnings_of_transformers.text
    for _ in range(2):  # in each run of a process
        warnings_of_transformers.clear()
        given = TaskTrainingArguments(output_dir=str(tmp_path), adadelta=True, **IGNORED)
        found = given.for_trainer("f1", has_validation=True)
        assert all(f"--{name}" in warnings_of_transformers.text for name in IGNORED)
        assert len(warnings_of_transformers.records) == len(IGNORED)
    for name in (*FIXED, "metric_for_best_model"):
        assert getattr(found, name) == getattr(plain, name)


def test_what_the_library_refuses_is_its_own_error(place, tmp_path):
    with refused("does not support .* checkpointing"):
        train(place, tmp_path, gradient_checkpointing=True)
    train(place, tmp_path, max_steps=1)  # the folder is not blocked


def test_a_name_that_the_hub_refuses_is_refused_before_any_work(tmp_path):
    TaskTrainingArguments(output_dir=str(tmp_path / "my model"))
    for options in ({"output_dir": str(tmp_path / "my model")}, {"output_dir": "run", "hub_model_id": "my model"}):
        with refused("--hub_model_id: .*'my model'. Pass USER/NAME."):
            TaskTrainingArguments(**options, push_to_hub=True)


def test_weights_and_losses_that_are_not_numbers_are_refused(place, tmp_path, monkeypatch):
    def spoiling(trainer):
        trainer.model.classifier.bias.data.fill_(math.nan)

    monkeypatch.setattr(head, "TaskTrainer", trainer_with(spoiling))
    with refused("The eval_loss is nan: training diverged. Pass a smaller --learning_rate"):
        train(place, tmp_path, max_steps=1)
    with refused("The weights of .* are not finite: training diverged"):
        train(place, tmp_path, max_steps=1, validation_file=None)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left"), RuntimeError("failed writing file")])
def test_a_full_disk_is_named(error, place, tmp_path, monkeypatch):
    monkeypatch.setattr(ELMoForTokenClassification, "save_pretrained", MagicMock(side_effect=error))
    with refused(f"^{tmp_path}.*cannot be written: .*{error}", OSError):
        train(place, tmp_path, max_steps=1)


@pytest.mark.parametrize("given, chosen", [(None, [True]), (False, [False])])
def test_tf32_is_on_where_it_exists(given, chosen, tmp_path, monkeypatch):
    assert TaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True).tf32 is None
    received: list[bool] = []
    monkeypatch.setattr(trainer, "has_accelerator", lambda: True)
    for module in (trainer, training_args):
        monkeypatch.setattr(module, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(training_args, "enable_tf32", received.append)
    TaskTrainingArguments(output_dir=str(tmp_path), tf32=given)
    assert received == chosen


@pytest.mark.parametrize("by_launcher", [False, True])
@pytest.mark.parametrize("obstacle, precision", [(None, "bf16"), ("no instructions", "no")])
def test_bfloat16_needs_its_instructions(obstacle, precision, by_launcher, tmp_path, monkeypatch):
    """Without them a CPU computes in float32, and the record says so."""
    monkeypatch.setattr(processes, "bfloat16_obstacle", lambda: obstacle)
    if by_launcher:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    given = TaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=not by_launcher)
    for training in (given, given.for_trainer("f1", has_validation=True)):
        assert training.recorded()["bf16"] == (precision == "bf16")
        assert training.mixed_precision == precision


def test_each_process_on_its_own_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(trainer, "has_accelerator", lambda: True)  # else it would wait for the second process
    with refused("2 processes were started .WORLD_SIZE., but this run has 1"):
        TaskTrainingArguments(output_dir=str(tmp_path))


def test_a_checkpoint_reaches_the_disk_before_it_is_complete(place, tmp_path, monkeypatch):
    contents = []
    monkeypatch.setattr(trainer, "sync", lambda folder: contents.append({path.name for path in folder.iterdir()}))
    train(place, tmp_path, num_train_epochs=1)
    (files,) = contents
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth"} <= files and "trainer_state.json" not in files


def test_trainer_neither_uploads_nor_keeps_a_token(tmp_path):
    training = TaskTrainingArguments(output_dir=str(tmp_path), push_to_hub=True, hub_token="a-token")
    found = training.for_trainer("f1", has_validation=True)
    assert (found.push_to_hub, found.hub_token, found.metric_for_best_model) == (False, None, "f1")
    assert found.greater_is_better and found.eval_strategy == "epoch" and found.load_best_model_at_end
    found = training.for_trainer("f1", has_validation=False)
    assert found.eval_strategy == "no" and not found.load_best_model_at_end


@pytest.mark.parametrize("cls, rate", [(TaskTrainingArguments, 1e-3), (ClassificationTrainingArguments, 4e-4)])
def test_default_learning_rates(cls, rate, tmp_path):
    output = {"output_dir": str(tmp_path)}
    rates = [cls(**output, **more).learning_rate for more in ({}, {"adadelta": True}, {"learning_rate": 0.5})]
    assert rates == [rate, 1.0, 0.5]


def test_the_checkpoint_to_resume_from(tmp_path):
    for name in ("checkpoint-6", "checkpoint-12", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").touch()
    (tmp_path / "checkpoint-18").mkdir()  # an interrupted one, without its state
    first, last = str(tmp_path / "checkpoint-6"), str(tmp_path / "checkpoint-12")
    for wanted, expected in ((None, None), (first, first), ("last", last), ("true", last)):
        training = TaskTrainingArguments(output_dir=str(tmp_path), resume_from_checkpoint=wanted)
        assert training.checkpoint() == expected
    for output, wanted in ((tmp_path / "new", "last"), (tmp_path, "elsewhere")):
        training = TaskTrainingArguments(output_dir=str(output), resume_from_checkpoint=wanted)
        with refused(f"--resume_from_checkpoint {wanted}: .*no complete checkpoint", FileNotFoundError):
            training.checkpoint()


# Weight decay


def test_mixes_are_not_decayed(place, tmp_path, monkeypatch):
    made: list[TaskTrainer] = []
    monkeypatch.setattr(head, "TaskTrainer", trainer_with(made.append))
    train(place, tmp_path, max_steps=1, weight_decay=0.1, config_overrides={"elmo_placement": "both"})
    (trainer,) = made
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    decays = {names[id(p)]: group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    matrices = {name for name in decays if "_mix." not in name and trainer.model.get_parameter(name).dim() > 1}
    assert "classifier.weight" in matrices and all(decays[name] == 0.1 for name in matrices)
    mixes = {f"{place}_mix.{name}" for place in ("input", "output") for name in ("weights", "gamma")}
    assert not any(decays[name] for name in (*mixes, "classifier.bias"))
    assert not any(name.startswith("elmo.") for name in decays)


# Averages of the weights, and Adadelta


@pytest.fixture
def steps(monkeypatch) -> list[dict[str, torch.Tensor]]:
    """The trained weights at the start and after each step."""
    seen: list[dict[str, torch.Tensor]] = []

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            seen.append({name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})

        on_train_begin = on_step_end

    monkeypatch.setattr(head, "TaskTrainer", trainer_with(lambda trainer: trainer.add_callback(Note)))
    return seen


def average_of(steps: list[dict[str, torch.Tensor]], decay: float) -> dict[str, torch.Tensor]:
    """The average after all these steps, by the formula."""
    average = steps[0]
    for number, weights in enumerate(steps[1:], 1):
        share = min(decay, (1 + number) / (10 + number))
        average = {name: share * average[name] + (1 - share) * weights[name] for name in average}
    return average


@pytest.mark.parametrize("has_dev", [True, False])
def test_the_average_of_the_weights_is_evaluated_and_saved(has_dev, place, tmp_path, steps):
    """The average at the end of the best epoch, or of the last one without validation data."""
    options = {} if has_dev else {"validation_file": None}
    record = train(place, tmp_path, ema_decay=0.3, **options)
    assert list(record["metrics"]) == (["validation", "test"] if has_dev else ["test"])
    ends = [average_of(steps[: end + 1], decay=0.3) for end in (6, 12, 18)]
    found = load_file(tmp_path / "model.safetensors")
    held = [end for end in ends if all(torch.allclose(found[name], end[name], atol=1e-5) for name in end)]
    assert len(held) == 1 and not torch.equal(found["classifier.weight"], steps[18]["classifier.weight"])
    assert has_dev or held[0] is ends[-1]
    model, tokenizer = pair_in(tmp_path, ELMoForTokenClassification)
    for row in predictions_of(tmp_path / "predictions_test.jsonl")[:5]:  # the saved model made these predictions
        logits = model(**tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")).logits[0, 1:-1]
        assert [model.config.id2label[number] for number in logits.argmax(-1).tolist()] == row["predicted"]


def test_a_stopped_run_resumes_with_its_weights_and_its_average(place, tmp_path, steps):
    options = {"ema_decay": 0.9, "adadelta": True, "learning_rate": 1.0}
    expected = train(place, tmp_path / "whole", **options)
    with interrupted(number=2):
        train(place, tmp_path / "stopped", **options)
    assert not (tmp_path / "stopped" / "record.json").exists()
    saved = load_file(Path(last_checkpoint(tmp_path / "stopped"), TRAINED))
    assert "classifier.weight" in saved and not any(name.startswith("elmo.") for name in saved)  # which is frozen
    steps.clear()
    record = train(place, tmp_path / "stopped", **options, resume_from_checkpoint="last")
    assert len(steps) == 1 + 6  # the start, and each step after the second checkpoint
    assert record["metrics"] == expected["metrics"] and record["epochs"] == 3
    assert record["curve"] == expected["curve"] and "seconds" not in record
    assert_same_weights(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_a_resumed_run_tells_where_it_continues_and_whether_the_schedule_moved(schedule, place, tmp_path, capsys):
    options = {"lr_scheduler_type": schedule}
    with interrupted():
        train(place, tmp_path / "same", **options)
    shutil.copytree(tmp_path / "same", tmp_path / "longer")
    assert "Continuing" not in capsys.readouterr().out
    train(place, tmp_path / "same", **options, resume_from_checkpoint="last")
    told = capsys.readouterr().out
    assert f"Continuing {tmp_path / 'same' / 'checkpoint-6'} at step 6, epoch 1.\n" in told and "moves" not in told
    train(place, tmp_path / "longer", **options, num_train_epochs=4, resume_from_checkpoint="last")
    moved = "The run had 18 steps and now has 24, which moves the linear schedule of the learning rate. To keep"
    assert (moved in capsys.readouterr().out) == (schedule == "linear")


def test_adadelta_takes_zeilers_steps(place, tmp_path, steps):
    """The size of the first step hardly depends on the gradient."""
    train(place, tmp_path, adadelta=True, learning_rate=1.0, max_steps=1)
    before, after = (each["classifier.weight"] for each in steps)
    moved = (after - before).abs()
    # sqrt(eps) / sqrt((1 - rho) g^2 + eps) * g: near its maximum, sqrt(eps / (1 - rho)), for all but tiny gradients
    assert moved.max() == pytest.approx((1e-6 / 0.05) ** 0.5, rel=0.01)
    assert moved.median() > 0.5 * moved.max()


# The log


def test_the_log_is_text_without_a_terminal(place, tmp_path, capsys):
    train(place, tmp_path, disable_tqdm=None, logging_steps=8)
    first, *lines = capsys.readouterr().out.splitlines()
    assert "--report_to tensorboard" in first
    assert re.fullmatch(r"epoch 1: eval_loss [\d.]+, eval_precision .*, eval_runtime [\d.e-]+", lines[0])
    assert re.fullmatch(r"epoch 1: input_layer_0 0[\d.]+, input_layer_1 0[\d.]+, input_layer_2 0[\d.]+", lines[1])
    assert re.fullmatch(r"epoch 1.333: loss [\d.]+, grad_norm [\d.]+, learning_rate 0.05", lines[2])


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("has_bar", [True, False])
def test_no_log_has_dictionaries(is_terminal, has_bar, place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    train(place, tmp_path, max_steps=1, disable_tqdm=None if has_bar else "true", logging_steps=1)
    printed = capsys.readouterr()
    lines = [line.split()[:3] for line in printed.out.splitlines() if line.startswith(("epoch", "{"))]
    assert [kind for _, _, kind in lines] == ["loss", "eval_loss", "input_layer_0", "train_runtime"]
    assert ("loss " in printed.err) == has_bar


# A model that has learned nothing


@pytest.mark.parametrize(
    ("steps", "rate", "shown"),
    [
        (
            99,
            1e-3,
            "training ended after step 99 (pass a larger --num_train_epochs or --max_steps, or smaller batches)",
        ),
        (100, 1e-3, "100 steps at --learning_rate 0.001 were not enough (pass a larger --num_train_epochs, another "),
        (5000, 5e-5, "--learning_rate 5e-05 is far from 0.001, the default (leave it out)"),
        (99, 0.5, "smaller batches) and --learning_rate 0.5 is far from 0.001"),
    ],
)
def test_the_likely_cause_comes_from_the_numbers(steps, rate, shown, tmp_path):
    assert shown in TaskTrainingArguments(output_dir=str(tmp_path), learning_rate=rate).likely_cause(steps)
    assert "--learning_rate 1 were" in TaskTrainingArguments(output_dir=str(tmp_path), adadelta=True).likely_cause(5000)
