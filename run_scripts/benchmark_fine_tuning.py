"""How much faster a head trains with the biLM's layers stored (`--cache_features`), and with our own biRNNs on CPU.

    python run_scripts/benchmark_fine_tuning.py --model_name_or_path elmo --train_file train.conll
    python run_scripts/benchmark_fine_tuning.py --task question-answering --model_name_or_path elmo --train_file q.json

Every batch takes a step of training in each way, in turns, on equal models with equal dropout, whose losses are
compared: the biLM's layers computed, stored, and stored with the recurrences of `torch.nn`. A step is what an epoch
repeats: the batch is made, read, and the network updated. Storing is timed once. Options of the head and of the data
are those of `run_ner` and `run_qa`.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from transformers import HfArgumentParser

from modeling_elmo import ELMoModel, elmo_backend
from modeling_elmo.run_scripts.fine_tuning.data import TaggingDataArguments
from modeling_elmo.run_scripts.fine_tuning.features import FeatureCollator, feature_store
from modeling_elmo.run_scripts.fine_tuning.question_data import QuestionDataArguments
from modeling_elmo.run_scripts.fine_tuning.task import HeadArguments, encoded, task_model, task_tokenizer
from modeling_elmo.run_scripts.program.command_line import run
from modeling_elmo.run_scripts.program.files import write_json
from modeling_elmo.run_scripts.run_ner import tagging_task
from modeling_elmo.run_scripts.run_qa import ReaderArguments, question_task

TASKS = {
    "tagging": ((HeadArguments, TaggingDataArguments), tagging_task),
    "question-answering": ((HeadArguments, QuestionDataArguments, ReaderArguments), question_task),
}
WAYS = ("computed", "stored", "stored, torch.nn")


@dataclass(kw_only=True)
class BenchmarkArguments:
    task: Literal["tagging", "question-answering"] = field(default="tagging", metadata={"help": "Which head."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Examples of a batch."})
    num_batches: int = field(default=20, metadata={"help": "Batches that are timed, after one that is not."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the figures."})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    first = HfArgumentParser(BenchmarkArguments, add_help=False)  # --task tells what else may be passed
    kinds, make_task = TASKS[first.parse_args_into_dataclasses(arguments, return_remaining_strings=True)[0].task]
    benchmark, head, *data = HfArgumentParser((BenchmarkArguments, *kinds)).parse_args_into_dataclasses(arguments)
    task = make_task(*data)
    tokenizer = task_tokenizer(task, head, task.data["train"], None)
    rows, size = encoded(task, tokenizer, ["train"])["train"], benchmark.per_device_train_batch_size
    wanted = size * (benchmark.num_batches + 1)
    if len(rows) < wanted:
        raise ValueError(f"{wanted} examples are needed, there are {len(rows)}; pass fewer --num_batches.")
    rows = rows.shuffle(seed=0).select(range(wanted))
    rows = rows.map(lambda _, number: {"text_number": number}, with_indices=True)
    models = [task_model(task, head, tokenizer, None, 0) for _ in WAYS]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    with TemporaryDirectory() as folder:
        start = time.perf_counter()
        bilm = ELMoModel.from_pretrained(head.model_name_or_path, dtype=torch.float32)
        store = feature_store(Path(folder), bilm, rows, task.collator(tokenizer))
        storing = time.perf_counter() - start
        collators = [FeatureCollator(task.collator(tokenizer), source) for source in (None, store, store)]
        steps = []
        for first in range(0, wanted, size):
            examples = [rows[number] for number in range(first, first + size)]
            for way, parts in zip(WAYS, zip(models, collators, optimizers, strict=True), strict=True):
                with elmo_backend("reference") if way == "stored, torch.nn" else nullcontext():
                    steps.append(timed_step(*parts, examples))
    seconds, losses = np.array(steps).reshape(-1, len(WAYS), 2)[1:].transpose(2, 1, 0)
    figures = {f"{way}, ms a step": 1e3 * float(np.median(times)) for way, times in zip(WAYS, seconds, strict=True)}
    for name, other in (("stored layers", 0), ("our own biRNNs", 2)):
        ratios = seconds[other] / seconds[1]
        figures |= {f"{name}, times as fast": float(np.median(ratios))}
        figures |= {f"{name}, lowest": float(ratios.min()), f"{name}, highest": float(ratios.max())}
    figures |= {"storing, ms for a step's examples": 1e3 * storing / (benchmark.num_batches + 1)}
    figures |= {"largest difference of the losses": float(np.ptp(losses, axis=0).max())}
    print("\n".join(f"{name}: {value:,.3g}" for name, value in figures.items()))
    if benchmark.output:
        write_json(Path(benchmark.output), figures)
    return figures


def timed_step(model, collator, optimizer: torch.optim.Optimizer, examples: list[dict]) -> tuple[float, float]:
    """Seconds and loss of a step."""
    torch.manual_seed(0)
    start = time.perf_counter()
    loss = model.train()(**collator(examples)).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start, loss.item()


if __name__ == "__main__":
    run(main)
