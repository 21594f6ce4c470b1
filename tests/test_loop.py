"""The training loop on runs of a second: interruptions, errors, several processes, and the step itself."""

import copy
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from threading import RLock, Thread
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from errors import refused
from pretraining_worker import (
    LINES,
    ROOT,
    TEXT,
    arguments_of,
    assert_same,
    contents,
    launch,
    options_of,
    pretrain,
    train,
)
from safetensors.torch import load_file
from torch.func import functional_call
from torch.testing import assert_close
from torch.torch_version import TorchVersion
from tqdm import auto, std
from transformers import AutoModelForPreTraining

from modeling_elmo import ELMoConfig, ELMoForPreTraining
from modeling_elmo.run_scripts import run_pretraining
from modeling_elmo.run_scripts.cards.card import read_result
from modeling_elmo.run_scripts.pretraining import loop
from modeling_elmo.run_scripts.pretraining.checkpoints import Checkpoints
from modeling_elmo.run_scripts.pretraining.loop import Pretraining, PretrainingArguments, StopSignal
from modeling_elmo.run_scripts.program.files import read_json


def last_of(folder):
    return Checkpoints(folder, None).last()


def steps_of(folder):
    return [int(path.name.split("-")[-1]) for path in Checkpoints(folder, None).all()]


def change_steps(monkeypatch, before=lambda run, group: None, after=lambda run: None):
    """Calls a function before and after each step of a run."""
    step = Pretraining._step

    def changed(self, group, *others):
        before(self, group)
        step(self, group, *others)
        after(self)

    monkeypatch.setattr(Pretraining, "_step", changed)


def break_weights(run):
    with torch.no_grad():
        next(run.plain_model.elmo.forward_lstm.parameters())[0, 0] = math.nan


# Exact resumption

# Any two options occur together in one of these; the newest optimizer, in half precision; and an unlogged rest.
RESUMED = [
    {"context": "sentence", "optim": "adamw", "softmax_type": "full", "dataloader_num_workers": 0},
    {"context": "sentence", "optim": "adagrad", "softmax_type": "sampled", "dataloader_num_workers": 1},
    {"context": "stream", "optim": "adamw", "softmax_type": "sampled", "dataloader_num_workers": 1},
    {"context": "stream", "optim": "adagrad", "softmax_type": "full", "gradient_accumulation_steps": 2},
    {"optim": "muon", "bf16": True, "lr_scheduler_type": "warmup_stable_decay", "logging_steps": 5},
]


@pytest.mark.parametrize("options", RESUMED, ids=lambda options: "-".join(map(str, options.values())))
def test_resuming_changes_nothing(options, tmp_path):
    """As if the process had been killed after a checkpoint in the first epoch, or in a later one."""
    AcceleratorState._reset_state()  # it allows one precision per process
    run = pretrain(tmp_path, **options)
    for step in (7, 21):
        again = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "run" / f"checkpoint-{step}", again / f"checkpoint-{step}")
        pretrain(tmp_path, output_dir=again, resume_from_checkpoint="last", **options)
        assert_same(contents(last_of(again)), contents(last_of(tmp_path / "run")))
    AcceleratorState._reset_state()
    assert run.progress.step == 24 and run.progress.epoch >= 2


def test_saving_changes_nothing(tmp_path):
    often, never = tmp_path / "often", tmp_path / "never"
    run = pretrain(tmp_path, output_dir=often, max_steps=10, save_steps=1, eval_steps=100)
    other = pretrain(tmp_path, output_dir=never, max_steps=10, save_steps=100, eval_steps=100)
    assert steps_of(often) == [*range(1, 11)] and steps_of(never) == [10]
    assert_same(contents(last_of(often))[:1], contents(last_of(never))[:1])
    assert_same(run.progress.log, other.progress.log)


def test_half_precision_is_near_single_precision(tmp_path, monkeypatch):
    monkeypatch.setattr(run_pretraining, "computes_bfloat16", lambda *_: True)  # on all processors
    losses = []
    for number, bf16 in enumerate((False, True)):
        AcceleratorState._reset_state()  # it allows one precision per process
        (tmp_path / str(number)).mkdir()
        run = pretrain(tmp_path / str(number), bf16=bf16, max_steps=14, logging_steps=1)
        losses.append([entry["loss"] for entry in run.progress.log if "loss" in entry])
        assert all(parameter.dtype == torch.float32 for parameter in run.plain_model.parameters())
    AcceleratorState._reset_state()
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=5e-3) and losses[1][-1] < losses[1][0]


def test_dropout_is_on_and_can_be_repeated(tmp_path):
    logs = []
    for rate in (0.0, 0.3, 0.3):
        run = pretrain(tmp_path, max_steps=3, config_overrides={"dropout": rate})
        logs.append([entry.get("loss") for entry in run.progress.log])
        shutil.rmtree(tmp_path / "run")
    assert logs[0] != logs[1] == logs[2]


@pytest.mark.parametrize("finish", [{"max_steps": 9}, {"early_stopping_patience": 1, "learning_rate": 1e-12}], ids=str)
def test_resuming_what_is_finished_changes_nothing(finish, tmp_path):
    """Also in the log, where an evaluation could appear twice."""
    options = {"eval_steps": 4, "optim": "adagrad", **finish}
    first = pretrain(tmp_path, **options)
    again = pretrain(tmp_path, resume_from_checkpoint="last", **options)
    assert again.progress.step == first.progress.step
    assert_same(again.progress.log, first.progress.log)


def test_the_state_of_another_program_is_refused(tmp_path):
    pretrain(tmp_path, max_steps=2)
    torch.save({"step": 2, "optim": "adamw"}, last_of(tmp_path / "run") / "training_state.pt")
    with refused("training_state.pt was not written by this program: it lacks optimizers, parameter_names"):
        pretrain(tmp_path, max_steps=4, resume_from_checkpoint="last")


def test_a_new_learning_rate_counts_on_resuming(tmp_path, capsys):
    """As the message for a loss that is not a number advises. A constant schedule does not move."""
    pretrain(tmp_path, optim="adagrad", max_steps=7)
    run = pretrain(tmp_path, optim="adagrad", learning_rate=0.01, max_steps=14, resume_from_checkpoint="last")
    assert run.progress.log[-2]["learning_rate"] == pytest.approx(0.01)
    printed = capsys.readouterr().out
    assert "--learning_rate was 0.2 and is now 0.01, which changes the learning rate: " in printed
    assert "at step 7 of 14, " in printed and "moves" not in printed


@pytest.mark.parametrize(
    "more, received",
    [
        ({"max_steps": 14}, "at step 7 of 14, epoch 0.70.\n"),
        ({"max_steps": 28}, "moves the linear schedule: the learning rate is 0.0075 here, and was 0.005. To keep"),
        ({"num_train_epochs": 3}, "--max_steps was 14 and is now -1 and --num_train_epochs was 10.0 and is now 3.0, "),
    ],
    ids=str,
)
def test_a_resumed_run_tells_where_it_continues_and_whether_the_schedule_moved(more, received, tmp_path, capsys):
    """With a linear schedule without warm-up, whose learning rates are easily computed."""
    options = {"lr_scheduler_type": "linear", "warmup_steps": 0, "learning_rate": 0.01, "max_steps": 14}
    pretrain(tmp_path, **options)
    shutil.rmtree(tmp_path / "run" / "checkpoint-14")
    capsys.readouterr()
    pretrain(tmp_path, resume_from_checkpoint="last", **options | {"max_steps": None} | more)
    printed = capsys.readouterr().out
    assert f"Continuing {tmp_path / 'run' / 'checkpoint-7'} at step 7" in printed
    assert received in printed and ("moves" in printed) == (more != {"max_steps": 14})


def test_a_run_of_epochs_continues_beyond_the_estimate_of_its_steps(tmp_path, capsys):
    """Padding adds steps to the estimate. The epochs decide whether anything is left to train."""
    options = {"max_steps": None, "num_train_epochs": 2, "save_steps": 1, "save_total_limit": None}
    run = pretrain(tmp_path, **options)
    steps = run.progress.step
    assert run.num_steps < steps - 1
    for found in (tmp_path / "run").iterdir():
        if found.name != f"checkpoint-{steps - 1}":
            shutil.rmtree(found) if found.is_dir() else found.unlink()
    capsys.readouterr()
    again = pretrain(tmp_path, resume_from_checkpoint="last", **options)
    printed = capsys.readouterr().out
    assert f"at step {steps - 1}, epoch 1." in printed and " of 2.\n" in printed and "nothing is left" not in printed
    assert_same(again.progress.log, run.progress.log)
    pretrain(tmp_path, resume_from_checkpoint="last", **options | {"num_train_epochs": 1})
    told = f"is at step {steps}, epoch 2.00 of 1, and this run ends after epoch 1: nothing is left to train"
    assert told in capsys.readouterr().out


# A process that is killed or stopped


def run_counting_steps(options, done):
    """A run in a forked process, which counts its steps for the parent."""
    for bar in (std.tqdm, auto.tqdm):  # `thread_map` gives the second a lock of its own
        bar.set_lock(RLock())  # the parent's lock is shared, and a killed process may never release it

    def count(run):
        done.value = run.progress.step

    with pytest.MonkeyPatch.context() as patch:
        change_steps(patch, after=count)
        train(options)


def start(options):
    context = multiprocessing.get_context("fork")  # imports would take ten times as long as a run
    done = context.Value("i", 0, lock=False)  # a killed process may never release a lock
    process = context.Process(target=run_counting_steps, args=(options, done))
    process.start()
    return process, done


def send_at(step, number, process, done, delay=0.0):
    """Sends a signal after `step` steps. Returns the step that was done then, 0 if the run was already over."""
    deadline = time.monotonic() + 120
    while done.value < step and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay)
    alive, met = process.is_alive(), done.value
    if alive:
        os.kill(process.pid, number)
    process.join(60)
    assert not process.is_alive()
    return met if alive else 0


@pytest.mark.slow
@pytest.mark.parametrize("context", ["sentence", "stream"])
def test_twenty_kills(context, tmp_path):
    folder, chance, saved, save_steps = tmp_path / "run", random.Random(1), 0, 4
    options = {"save_steps": save_steps, "save_total_limit": 2, "eval_steps": 6, "logging_steps": 2, "max_steps": 60}
    options |= {"context": context, "softmax_type": "sampled"}
    pretrain(tmp_path, output_dir=tmp_path / "whole", **options)
    for _ in range(20):
        run = options_of(tmp_path, resume_from_checkpoint="last" if saved else None, **options)
        process, done = start(run)
        target = saved + chance.randint(1, 5)
        met = send_at(target, signal.SIGKILL, process, done, delay=chance.uniform(0, 0.3))
        saved_before, steps = saved, steps_of(folder)
        saved = max(steps, default=0)
        assert saved >= saved_before and met - saved <= save_steps
        for step in steps:
            model = AutoModelForPreTraining.from_pretrained(folder / f"checkpoint-{step}")
            assert all(weight.isfinite().all() for weight in model.parameters())
        if saved >= options["max_steps"] - save_steps:  # start again
            shutil.rmtree(folder)
            saved = 0
    pretrain(tmp_path, resume_from_checkpoint="last" if saved else None, **options)
    assert_same(contents(last_of(folder)), contents(last_of(tmp_path / "whole")))
    assert not list(folder.glob(".*"))


def test_a_signal_stops_with_a_checkpoint(tmp_path, capfd):
    options = {"save_steps": 100, "eval_steps": 100, "max_steps": 20, "logging_steps": 1}
    process, done = start(options_of(tmp_path, **options))
    met = send_at(5, signal.SIGTERM, process, done)
    assert 5 <= met < 18  # not at the end of the run
    assert process.exitcode == 128 + signal.SIGTERM
    (step,) = steps_of(tmp_path / "run")
    assert met <= step <= met + 2  # the current step, and the next one if its batch was already read
    told = capfd.readouterr().out
    assert re.search(rf"Stopped at step {step} by signal 15; \S+/checkpoint-{step} is complete", told)
    assert "To continue, run the same command with --resume_from_checkpoint last." in told
    assert not (tmp_path / "run" / "config.json").exists()  # not published
    pretrain(tmp_path, resume_from_checkpoint="last", **options)
    pretrain(tmp_path, output_dir=tmp_path / "whole", **options)
    assert_same(contents(last_of(tmp_path / "run")), contents(last_of(tmp_path / "whole")))


def test_a_signal_in_the_last_evaluation_keeps_the_run(tmp_path, monkeypatch):
    evaluate = Pretraining._evaluate

    def interrupted(run):
        if run.progress.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        evaluate(run)

    monkeypatch.setattr(Pretraining, "_evaluate", interrupted)
    pretrain(tmp_path, max_steps=5, eval_steps=100, save_steps=100)
    assert steps_of(tmp_path / "run") == [5] and (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_a_signal_to_the_whole_group_stops_with_a_checkpoint(tmp_path):
    """A terminal or a batch system also signals the processes that prepare batches."""
    options = options_of(tmp_path, max_steps=100_000, num_train_epochs=1e6, save_steps=5, dataloader_num_workers=1)
    options |= {"eval_steps": 1_000_000, "save_total_limit": 1}
    command = [sys.executable, str(ROOT / "run_scripts" / "run_pretraining.py"), *arguments_of(options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes)
    deadline = time.monotonic() + 120
    while not steps_of(tmp_path / "run") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, errors[-2000:]
    assert f"{last_of(tmp_path / 'run')} is complete" in printed


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_remembered_and_a_second_one_acts(number):
    before = handlers()
    with StopSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number
        assert handlers() == before


def test_a_run_in_a_thread_leaves_the_signals_alone():
    before, found = handlers(), []

    def work():
        with StopSignal():
            found.append(handlers())

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


# Errors


def test_weights_of_another_process_that_are_not_numbers_are_an_error_here():
    accelerator = SimpleNamespace(reduce=lambda is_finite: is_finite + 1, num_processes=2)
    model, progress = torch.nn.Linear(2, 2), SimpleNamespace(step=7)
    run = SimpleNamespace(accelerator=accelerator, plain_model=model, progress=progress, _again_with=str)
    Pretraining._check_weights(run)
    accelerator.reduce = lambda is_finite: is_finite + 0
    with refused("Weights after step 7 are not numbers", FloatingPointError):
        Pretraining._check_weights(run)


def test_sparse_gradients_on_mps_need_torch_2_9(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.8.0"))
    model = ELMoForPreTraining(ELMoConfig.from_preset("tiny", vocab_size=40, softmax_type="sampled", num_sampled=5))
    accelerator, arguments = SimpleNamespace(device=torch.device("mps")), PretrainingArguments(output_dir=str(tmp_path))
    with refused("--softmax_type sampled .*torch 2.8.0 .*mps"):
        Pretraining(accelerator, arguments, model, None, None, None, None, None)


def test_a_loss_that_is_not_a_number(tmp_path, monkeypatch):
    change_steps(monkeypatch, before=lambda run, _: break_weights(run) if run.progress.step == 5 else None)
    message = "loss of step 6 .*run/checkpoint-5.*--resume_from_checkpoint last .*--learning_rate or --max_grad_norm"
    with refused(message, FloatingPointError):
        pretrain(tmp_path, save_steps=1, logging_steps=100, eval_steps=100, max_steps=7)
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5]


def test_a_loss_that_is_not_a_number_before_the_first_checkpoint(tmp_path, monkeypatch):
    change_steps(monkeypatch, before=lambda run, _: break_weights(run))
    with refused("no checkpoint yet.* --learning", FloatingPointError):
        pretrain(tmp_path, logging_steps=1)


def test_broken_weights_are_not_saved(tmp_path, monkeypatch):
    """The last step changes the weights after its loss and gradient were checked."""
    change_steps(monkeypatch, after=lambda run: break_weights(run) if run.progress.step == 8 else None)
    with refused("checkpoint-4", FloatingPointError):
        pretrain(tmp_path, max_steps=8, save_steps=4, validation_file=None)
    assert steps_of(tmp_path / "run") == [4] and not (tmp_path / "run" / "config.json").exists()


# Course of a run


def perplexities(monkeypatch, *values):
    """Sets the held-out perplexities of a run."""
    plain, left = loop.evaluate, list(values)

    def evaluated(*arguments):
        found = plain(*arguments)
        found.perplexity = left.pop(0)
        return found

    monkeypatch.setattr(loop, "evaluate", evaluated)


def test_early_stopping_and_the_best_checkpoint(tmp_path, monkeypatch):
    perplexities(monkeypatch, 1, 50, 40, 45, 40, 42, 30)
    run = pretrain(tmp_path, eval_steps=2, save_steps=3, early_stopping_patience=3, save_total_limit=1, max_steps=20)
    assert run.progress.step == 10 and (run.progress.best_step, run.progress.best_perplexity) == (4, 40)
    assert steps_of(tmp_path / "run") == [4, 10]
    files = [tmp_path / "run" / name / "model.safetensors" for name in (".", "checkpoint-4", "checkpoint-10")]
    published, best, last = (file.read_bytes() for file in files)
    assert published == best != last


def test_the_best_on_other_text_is_not_published(tmp_path, monkeypatch, capsys):
    perplexities(monkeypatch, 90, 10, 50, 40)
    options = {"eval_steps": 3, "save_steps": 3}
    pretrain(tmp_path, max_steps=3, **options)
    published = tmp_path / "run" / "model.safetensors"
    best = published.read_bytes()
    options |= {"resume_from_checkpoint": "last"}
    run = pretrain(tmp_path, max_steps=9, validation_file=other_text(tmp_path), **options)
    assert (run.progress.best_step, run.progress.best_perplexity, run.progress.evaluations_since_best) == (9, 40, 0)
    assert [entry["step"] for entry in run.progress.log if "perplexity" in entry] == [6, 9]
    told = capsys.readouterr().out
    assert "The held-out text was 1 file(s) from held_out.txt on" in told
    assert "is now 1 file(s) from other.txt on" in told
    assert published.read_bytes() != best
    run = pretrain(tmp_path, max_steps=12, validation_file=None, **options)
    assert run.progress.best_step is None
    assert published.read_bytes() == (tmp_path / "run" / "checkpoint-12" / published.name).read_bytes()


def other_text(folder):
    (folder / "other.txt").write_text("Another text .\n", "utf-8")
    return folder / "other.txt"


def test_held_out_text_that_has_changed_under_its_name(tmp_path, monkeypatch, capsys):
    perplexities(monkeypatch, 90, 10, 50, 40)
    options = {"eval_steps": 3, "save_steps": 3}
    pretrain(tmp_path, max_steps=3, **options)
    with (tmp_path / "held_out.txt").open("a", encoding="utf-8") as file:
        file.write("The cat sat .\n")
    run = pretrain(tmp_path, max_steps=9, resume_from_checkpoint="last", **options)
    assert (run.progress.best_step, run.progress.best_perplexity) == (9, 40)
    assert [entry["step"] for entry in run.progress.log if "perplexity" in entry] == [6, 9]
    told = "The held-out text had 165 predictions, and has 170 now. The perplexities so far leave the log"
    assert told in capsys.readouterr().out


def test_a_finished_run_on_other_text_measures_that_text(tmp_path):
    pretrain(tmp_path, max_steps=3)
    run = pretrain(tmp_path, max_steps=3, validation_file=other_text(tmp_path), resume_from_checkpoint="last")
    (found,) = (entry for entry in run.progress.log if "perplexity" in entry)
    assert (found["step"], found["predictions"]) == (3, 4) and run.progress.best_step == 3


@pytest.mark.parametrize("context", ["sentence", "stream"])
def test_epochs_end_where_the_text_does(context, tmp_path, monkeypatch):
    batches = []
    change_steps(monkeypatch, before=lambda _, group: batches.extend(group))
    run = pretrain(tmp_path, max_steps=None, num_train_epochs=2, context=context, save_steps=1)
    assert run.progress.epoch == pytest.approx(2, abs=0.05)
    assert_same(contents(last_of(tmp_path / "run"))[2], run.progress.log)  # with the last evaluation
    if context == "sentence":
        assert sum(len(batch.inputs["labels"]) for batch in batches) == 2 * 60
        assert run.progress.predictions == 2 * sum(len(line.split()) + 1 for line in LINES[:60])


def test_the_learning_rate_is_used_up_when_the_text_is(tmp_path):
    """It neither rises again nor reaches 0 long before the end."""
    text = TEXT.with_name("en_raw.txt").read_text("utf-8").splitlines()
    (tmp_path / "text.txt").write_text("\n".join(text[:60]), "utf-8")
    options = {"train_file": tmp_path / "text.txt", "validation_file": None, "is_split_into_words": False}
    sizes = {"per_device_train_batch_tokens": 200, "max_steps": None, "num_train_epochs": 2, "save_steps": 1000}
    run = pretrain(tmp_path, **options, **sizes, learning_rate=1e-3, warmup_steps=0, logging_steps=1)
    rates = [entry["learning_rate"] for entry in run.progress.log]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 1e-4 and rates[-1 - len(rates) // 10] > 0


def test_entries_of_the_log(tmp_path):
    run = pretrain(tmp_path, max_steps=8, softmax_type="sampled", logging_steps=3, eval_steps=6)
    log = read_result(tmp_path / "run", "pretraining")["log"]
    assert_same(log, run.progress.log)
    assert [entry["step"] for entry in log if "perplexity" in entry] == [0, 6, 8]
    training = [entry for entry in log if "perplexity" not in entry]
    assert [entry["step"] for entry in training] == [3, 6, 8]
    names = {"step", "epoch", "sampled_loss", "forward_loss", "backward_loss", "gradient_norm", "learning_rate"}
    for entry in training:
        assert entry.keys() == {*names, "words_per_second", "data_wait"}
        mean = (entry["forward_loss"] + entry["backward_loss"]) / 2
        assert entry["sampled_loss"] == pytest.approx(mean, rel=1e-5)
        assert entry["words_per_second"] > 0 and 0 <= entry["data_wait"] < 1


# Several processes

PROCESSES = [
    {"softmax_type": "full"},
    {"softmax_type": "sampled"},
    {"softmax_type": "full", "optim": "adamw"},
    {"softmax_type": "full", "fsdp_softmax": True},
    {"softmax_type": "adaptive", "config_overrides": {"dropout": 0.0, "adaptive_cutoffs": [60]}},
]
STREAM = {"context": "stream", "softmax_type": "sampled", "unroll_steps": 3, "gradient_scale": 3}
STREAM |= {"per_device_train_batch_size": 2}
# Two processes add up in another order than one. Measured: no difference for the same batches, 1e-7 of losses, norms
# and weights where one process has the rows of two.
TOLERANCE = {"rtol": 3e-6, "atol": 1e-6}


def several(folder) -> list[tuple[dict, dict]]:
    """Options of two processes, and of a single process that reads the same batches."""
    common = {"config_overrides": {"dropout": 0.0}, "optim": "adagrad"}
    common |= {"max_steps": 6, "logging_steps": 1, "eval_steps": 3, "save_steps": 3}
    one = {"gradient_accumulation_steps": 2, "fsdp_softmax": False}
    pairs = [(kind, kind | one) for kind in PROCESSES]
    # The rows of the second process are additional rows of the single one, while all are in their first blocks.
    pairs.append((STREAM, STREAM | {"per_device_train_batch_size": 4}))
    return [(options_of(folder, **common | two), options_of(folder, **common | one)) for two, one in pairs]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Runs of two processes in the folders `two-0`, `two-1`, ... One launch for all, because it takes longest."""
    folder = tmp_path_factory.mktemp("processes")
    runs = [two | {"output_dir": folder / f"two-{number}"} for number, (two, _) in enumerate(several(folder))]
    launch(folder, "run_pretraining", runs)
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("softmax", ["full", "adaptive"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_two_processes_on_one_gpu_equal_one(bf16, softmax, tmp_path):
    overrides = {"dropout": 0.0, "projection_size": 16, "lstm_hidden_size": 32}
    options = {"use_cpu": False, "no_tf32": True, "bf16": bf16, "softmax_type": softmax, "config_overrides": overrides}
    options |= {"max_steps": 6, "logging_steps": 1, "eval_steps": 3, "save_steps": 6}
    two = options_of(tmp_path, **options, output_dir=tmp_path / "two")
    launch(tmp_path, "run_pretraining", [two], CUDA_VISIBLE_DEVICES="0")
    AcceleratorState._reset_state(True)  # it allows one precision per process, and had the CPU
    log = pretrain(tmp_path, **options, output_dir=tmp_path / "one", gradient_accumulation_steps=2).progress.log
    AcceleratorState._reset_state(True)
    found = json.loads((tmp_path / "0.json").read_text("utf-8"))
    for name in ("loss", "gradient_norm", "perplexity"):
        expected = [entry[name] for entry in log if name in entry]
        assert len(expected) >= 3
        assert [entry[name] for entry in found if name in entry] == pytest.approx(expected, rel=2e-2 if bf16 else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6), ids=["full", "sampled", "adamw", "fsdp", "adaptive", "stream"])
def test_two_processes_equal_one(number, two_processes):
    folder, options = two_processes, several(two_processes)[number][1]
    one = folder / f"one-{number}"
    log = train(options | {"output_dir": one}).progress.log
    found = json.loads((folder / f"{number}.json").read_text("utf-8"))
    assert len(log) == 9
    for entry, expected in zip(found, log, strict=True):
        assert entry.keys() == expected.keys()
        for name in entry.keys() - {"words_per_second", "data_wait", "protocol", "epoch"}:
            assert entry[name] == pytest.approx(expected[name], rel=TOLERANCE["rtol"]), (entry["step"], name)
        assert entry["epoch"] == pytest.approx(expected["epoch"], abs=0.11)  # plus or minus a batch
    two, *_ = contents(last_of(folder / f"two-{number}"))
    for name, weight in load_file(one / "checkpoint-6" / "model.safetensors").items():
        assert_close(two[name], weight, msg=name, **TOLERANCE)
    records = (read_json(run / "results" / "pretraining.json") for run in (one, folder / f"two-{number}"))
    assert [record["settings"].get("num_processes") for record in records] == [None, 2]


@pytest.mark.slow
def test_a_sharded_run_resumes_on_one_process(two_processes):
    """Sharding changes the order of the optimizer's parameters."""
    number, again = 3, two_processes / "one-again"
    shutil.copytree(two_processes / f"two-{number}" / "checkpoint-3", again / "checkpoint-3")
    train(several(two_processes)[number][1] | {"output_dir": again, "resume_from_checkpoint": "last"})
    expected, *_ = contents(last_of(two_processes / f"two-{number}"))
    for name, weight in load_file(again / "checkpoint-6" / "model.safetensors").items():
        assert_close(weight, expected[name], msg=name, **TOLERANCE)


@pytest.mark.slow
def test_two_processes_resume_exactly(two_processes):
    """Each process has its own rows and states in the checkpoint."""
    folder, runs = two_processes, []
    for number, (options, _) in enumerate(several(folder)):
        again = folder / "again" / f"{number}"
        shutil.copytree(folder / f"two-{number}" / "checkpoint-3", again / "checkpoint-3")
        runs.append(options | {"output_dir": again, "resume_from_checkpoint": "last"})
    launch(folder / "again", "run_pretraining", runs)
    for number in range(len(runs)):
        found, expected = folder / "again" / f"{number}", folder / f"two-{number}"
        assert_same(contents(last_of(found)), contents(last_of(expected)))


# The step against a plain one


def losses_by_position(model, weights, batch, states):
    """The losses `(3,)`: joint, forward, backward, one position at a time; and the states after the window."""
    total = torch.zeros(3, dtype=torch.float64)
    if states is not None:
        states = [state.clone() for state in states]
        for direction, row in batch.resets.nonzero().tolist():
            for state in states:
                state[row, :, direction] = 0
    padded = {name: values for name, values in batch.inputs.items() if isinstance(values, torch.Tensor)}
    for prefix in ("", "backward_"):
        packed = batch.inputs[f"{prefix}packed_batch"]
        padded |= {f"{prefix}character_ids": packed.ids_BTX(), f"{prefix}attention_mask": packed.mask_BT.long()}
    for position in range(padded["forward_targets"].shape[1]):
        inputs = {name: values[:, position : position + 1] for name, values in padded.items()}
        inputs |= {"initial_states": states, "num_items_in_batch": batch.num_predictions}
        output = functional_call(model, weights, (), inputs)
        losses, states = [output.loss, output.forward_loss, output.backward_loss], output.final_states
        total = total + torch.stack(losses)
    return total, [state.detach() for state in states]


def test_steps_of_the_stream_recipe(tmp_path, monkeypatch):
    """Losses, unclipped gradients and weights of steps on consecutive windows, which cover two blocks, in float64."""
    batches, weights, gradients, clip = [], [], [], loop.clip_gradients

    def record(run, group):
        batches.extend(group)
        weights.append({name: value.detach().double() for name, value in run.plain_model.named_parameters()})

    def recorded_clip(parameters, max_norm):
        gradients.append([parameter.grad.double() for parameter in parameters])
        return clip(parameters, max_norm)

    change_steps(monkeypatch, before=record)
    monkeypatch.setattr(loop, "clip_gradients", recorded_clip)
    options = {"context": "stream", "optim": "adagrad", "max_steps": 12, "logging_steps": 1}
    run = pretrain(tmp_path, **options, config_overrides={"dropout": 0.0, "cell_clip": 0.1, "projection_clip": 0.05})
    log = [entry for entry in run.progress.log if "loss" in entry]
    assert (torch.stack([batch.resets for batch in batches[1:]]).sum((0, 2)) > 0).all()
    model, states, accumulators = copy.deepcopy(run.plain_model).double(), None, {}
    for number, batch in enumerate(batches):
        leaves = {name: value.requires_grad_() for name, value in weights[number].items()}
        losses, states = losses_by_position(model, leaves, batch, states)
        found = [log[number]["forward_loss"], log[number]["backward_loss"]]
        assert found == pytest.approx(losses[1:].tolist(), rel=1e-5)
        assert losses[0].item() == pytest.approx(sum(found) / 2, rel=1e-5)
        expected = torch.autograd.grad(6 * losses[0], list(leaves.values()))  # 6: --unroll_steps
        for name, gradient, found in zip(leaves, expected, gradients[number], strict=True):
            assert_close(found, gradient, rtol=1e-5, atol=1e-6, msg=name)
        norm = torch.stack([gradient.norm() for gradient in expected]).norm()
        assert log[number]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)
        # Adagrad: w -= 0.2 * g / sqrt(1 + sum g^2), after the global norm was clipped to 10.
        after = dict(run.plain_model.named_parameters()) if number == 11 else weights[number + 1]
        for (name, before), gradient in zip(leaves.items(), expected, strict=True):
            gradient = gradient * min(1.0, 10 / norm.item())
            accumulators[name] = accumulators.get(name, 1.0) + gradient.square()
            updated = before.detach() - 0.2 * gradient / accumulators[name].sqrt()
            assert_close(after[name].detach().double(), updated, rtol=1e-5, atol=1e-6, msg=name)
