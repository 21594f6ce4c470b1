"""Words per second of pretraining on a device, and where the time goes: to arithmetic, or to waiting.

The loop is the one of `elmo pretrain --bf16 --optim muon --softmax_type adaptive`, on made-up text with the word
frequencies of English. After the timed steps, a few more are profiled, and the arithmetic of the last one is counted.
"""

import json
import time
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from modeling_elmo import elmo_backend

from ..pretraining.corpus import Corpus, CorpusArguments
from ..pretraining.graph import FEW_BATCHES
from ..pretraining.loop import Pretraining, PretrainingArguments
from ..pretraining.starting_model import ModelArguments, RunStart
from .model_speed import backend_context, computing_in
from .text import made_up_sentences

WINDOWS = 5  # entries of the log that count; the steps before them, which compile or record, do not
PROFILED = 4  # steps


class StepRecorder:
    """Takes the place of a run's step. It counts the steps, and looks at those after the timed ones."""

    def __init__(self, training: Pretraining, timed: int):
        self.training = training
        self.plain_step, self.plain_backward = training._step, training._backward
        self.device, self.timed = training.accelerator.device, timed
        self.number = 0
        self.busy_seconds: float | None = None
        self.operations = self.words = 0
        self.profiler = profile(activities=[ProfilerActivity.CUDA]) if self.device.type == "cuda" else None

    def step(self, *arguments: Any):
        self.number += 1
        if self.number == self.timed + 1 and self.profiler:
            torch.cuda.synchronize()
            self.profiler.start()
        if self.number > self.timed + PROFILED:
            self.training.graph = None
        self.plain_step(*arguments)
        if self.number == self.timed + PROFILED and self.profiler:
            torch.cuda.synchronize()
            self.profiler.stop()
            self.busy_seconds = 1e-6 * sum(map(time_of_kernel, self.profiler.key_averages())) / PROFILED

    def backward(self, batch: Any, *arguments: Any):
        if self.number <= self.timed + PROFILED:
            return self.plain_backward(batch, *arguments)
        with elmo_backend("reference"), FlopCounterMode(display=False) as counter:  # it sees torch's operators alone
            losses = self.plain_backward(batch, *arguments)
        self.operations, self.words = counter.get_total_flops(), batch.num_predictions
        return losses


def time_of_kernel(event: Any) -> float:
    """In microseconds; 0 for what the host does, and for spans that torch names on the device's timeline."""
    is_kernel = event.device_type != DeviceType.CPU and not event.is_user_annotation
    return event.self_device_time_total if is_kernel else 0.0


def pretraining_rows(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """One row, for batches of `case["tokens"]` and a backend."""
    per_window = case["steps"] // WINDOWS
    first = per_window
    if case["cuda_graph"]:
        first *= ceil((FEW_BATCHES + 2) / per_window)
    timed = first + per_window * WINDOWS
    in_tf32 = computing_in(device, "tf32")  # as `--tf32`; bfloat16 is the accelerator's matter
    with TemporaryDirectory() as folder, backend_context(case["backend"]), in_tf32:
        training = begin(case, device, Path(folder), per_window, timed + PROFILED + 1)
        if case["cuda_graph"] and training.graph is None:
            yield {"failure": "this run has no CUDA graph"}
            return
        recorder = StepRecorder(training, timed)
        vars(training).update(_step=recorder.step, _backward=recorder.backward)
        start = time.perf_counter()
        training.train()
        seconds = time.perf_counter() - start
    entries = [entry for entry in training.progress.log if first < entry["step"] <= timed]
    assert len(entries) == WINDOWS and recorder.words
    predictions = training.progress.predictions / training.progress.step
    yield {
        "words_per_second": [entry["words_per_second"] for entry in entries],
        "data_wait": sum(entry["data_wait"] for entry in entries) / WINDOWS,
        "busy_seconds_per_step": recorder.busy_seconds,
        "words_per_step": predictions,
        "operations_per_word": recorder.operations / recorder.words,
        "loss": entries[-1]["loss"],
        "in_cuda_graph": [entry.get("in_cuda_graph", 0) for entry in entries],
        "seconds": seconds,
    }


def begin(case: dict[str, Any], device: torch.device, folder: Path, logging_steps: int, steps: int) -> Pretraining:
    text = folder / "train.txt"
    sentences = made_up_sentences(case["words"])
    text.write_text("".join(" ".join(words) + "\n" for words in sentences), encoding="utf-8")
    is_cpu = device.type == "cpu"
    accelerator = Accelerator(mixed_precision="no" if is_cpu else "bf16", cpu=is_cpu)
    model = ModelArguments(
        preset=case["preset"],
        config_overrides=json.dumps(case["config"]),
        softmax_type="adaptive",
        vocabulary_size=case["vocabulary_size"],
    )
    corpus = CorpusArguments(train_file=[str(text)], is_split_into_words=True)
    arguments = PretrainingArguments(
        output_dir=str(folder / "run"),
        per_device_train_batch_tokens=case["tokens"],
        max_steps=steps,
        logging_steps=logging_steps,
        save_steps=steps,
        optim="muon",
        cuda_graph=case["cuda_graph"],
        dataloader_num_workers=case["workers"],
        bf16=not is_cpu,
        use_cpu=is_cpu,
        report_to="none",
    )
    source = Corpus.from_arguments(corpus)
    training = RunStart(accelerator, model, corpus, arguments, source, None).begin()
    accelerator.init_trackers("runs")
    return training
