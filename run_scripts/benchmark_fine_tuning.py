"""How much faster a tagger trains with the biLM's layers stored (`--cache_features`): steps with and without, in turns.

    python run_scripts/benchmark_fine_tuning.py --model_name_or_path elmo --train_file train.conll

Every batch takes a step of training both ways, on two equal models with equal dropout, whose losses are compared. A
step is what an epoch repeats: the batch is made, read, and the network updated. Storing is timed once.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import HfArgumentParser

if __package__ in (None, ""):  # run by path from a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modeling_elmo import ELMoModel
from modeling_elmo.run_scripts.run_ner import tagging_task
from modeling_elmo.run_scripts.task_data import TaggingDataArguments
from modeling_elmo.run_scripts.task_features import FeatureCollator, feature_store
from modeling_elmo.run_scripts.task_model import HeadArguments, encoded, task_model, task_tokenizer


@dataclass(kw_only=True)
class BenchmarkArguments:
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Sentences of a batch."})
    num_batches: int = field(default=20, metadata={"help": "Batches that are timed, after one that is not."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the figures."})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = HfArgumentParser((HeadArguments, TaggingDataArguments, BenchmarkArguments))
    head, data, benchmark = parser.parse_args_into_dataclasses(arguments)
    task = tagging_task(data)
    tokenizer = task_tokenizer(task, head, task.data["train"], None)
    texts, size = encoded(task, tokenizer, ["train"])["train"], benchmark.per_device_train_batch_size
    wanted = size * (benchmark.num_batches + 1)
    if len(texts) < wanted:
        raise ValueError(f"{wanted} sentences are needed, there are {len(texts)}; pass fewer --num_batches.")
    texts = texts.shuffle(seed=0).select(range(wanted))
    texts = texts.map(lambda _, number: {"text_number": number}, with_indices=True)
    models = [task_model(task, head, tokenizer, None, 0) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with TemporaryDirectory() as folder:
        start = time.perf_counter()
        bilm = ELMoModel.from_pretrained(head.model_name_or_path, dtype=torch.float32)
        store = feature_store(Path(folder), bilm, texts, task.collator(tokenizer))
        storing = time.perf_counter() - start
        collators = [FeatureCollator(task.collator(tokenizer), source) for source in (None, store)]
        trained = [
            (model, collator, torch.optim.Adam(model.parameters()))
            for model, collator in zip(models, collators, strict=True)
        ]
        steps = []
        for first in range(0, wanted, size):
            examples = [texts[number] for number in range(first, first + size)]
            steps.append([timed_step(*each, examples) for each in trained])
    (computed, losses), (stored, same) = (zip(*each, strict=True) for each in zip(*steps[1:], strict=True))
    ratios = [one / other for one, other in zip(computed, stored, strict=True)]
    figures = {
        "computed, ms a step": 1e3 * statistics.median(computed),
        "stored, ms a step": 1e3 * statistics.median(stored),
        "times as fast": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "storing, ms for a step's sentences": 1e3 * storing / len(steps),
        "largest difference of the losses": max(abs(a - b) for a, b in zip(losses, same, strict=True)),
    }
    print("\n".join(f"{name}: {value:,.3g}" for name, value in figures.items()))
    if benchmark.output:
        Path(benchmark.output).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
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
    main()
