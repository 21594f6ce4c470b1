"""Measures speed: inference, training steps and the tokenizer, on real text with random weights.

    elmo benchmark --text_file corpus.txt
    elmo benchmark --parts inference training --peer run_scripts/benchmarks/peers/peer_allennlp.py:allennlp
    elmo benchmark --parts inference training tokenizer --against ../clone-of-the-last-release
    elmo benchmark --device cuda --output report.json

Each implementation is first checked against the plain definition; if one is wrong, no speed is reported. Then all take
turns, and the tables show medians over the rounds. "speedup" is the time of a row divided by the time of the first row,
in the same round. Speedups carry over to other machines, milliseconds do not.

Batches are named ROWSxWORDS: 32x30 has 32 sentences of 3 to 30 words; in 32x30dense all have 30 words; 63x5+1x400
is two batches in one.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from modeling_elmo import ELMoConfig, ELMoModel
from modeling_elmo.configuration_elmo import PRESETS
from modeling_elmo.kernels.onednn import processor_name
from modeling_elmo.run_scripts.benchmarks import model_speed, step_speed
from modeling_elmo.run_scripts.benchmarks.model_speed import DEVICE_PARTS
from modeling_elmo.run_scripts.benchmarks.step_speed import HEADS, SOFTMAXES
from modeling_elmo.run_scripts.benchmarks.text import draw_batch, read_sentences, tokenizer_contests
from modeling_elmo.run_scripts.benchmarks.timing import Contest, format_rows, measure
from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, run
from modeling_elmo.run_scripts.program.files import check_output, write_json
from modeling_elmo.run_scripts.program.processes import local_device

BENCHMARK_PARTS = ("inference", "heads", "training", "pretraining", "fine_tuning", "tokenizer")


@dataclass(kw_only=True)
class BenchmarkArguments:
    parts: list[str] = option(
        [*BENCHMARK_PARTS], f"Parts to measure: {', '.join(BENCHMARK_PARTS)}.", choices=BENCHMARK_PARTS, metavar="PART"
    )
    device: str = option(
        "cpu", f"Device. On devices other than the CPU, only {' and '.join(DEVICE_PARTS)} are measured."
    )
    text_file: str | None = option(None, "Text file, one sentence per line. Default: a short text of the repository.")
    preset: str = option("original", "Model size.", choices=[*PRESETS])
    batches: list[str] = option(
        ["1x20", "32x30", "32x30dense", "128x30"], "Batches for inference and heads, ROWSxWORDS."
    )
    training_batches: list[str] = option(["32x20", "128x20"], "Batches for all training steps, ROWSxWORDS.")
    softmaxes: list[str] = option(
        ["full", "sampled"], f"Softmaxes: {', '.join(SOFTMAXES)}.", choices=[*SOFTMAXES], metavar="SOFTMAX"
    )
    vocabulary_size: int = option(50_000, "Words of the softmax.")
    against: str | None = option(
        None, "Folder of another clone, to compare in inference, heads, training and tokenizer."
    )
    peer: list[str] = option(
        [], "FILE:FUNCTION of another ELMo, to compare in inference and training: see model_speed.py."
    )
    rounds: int = option(5, "Number of timed runs of each implementation.")
    threads: int | None = option(None, "Threads of torch. Default: torch's own choice.")
    seed: int = option(0, "Seed of the weights and of the choice of sentences.")
    output: str | None = option(None, "JSON file for all figures and their conditions.")

    def __post_init__(self):
        check_output(self.output)
        if self.device != "cpu" and self.parts == [*BENCHMARK_PARTS]:  # the default
            self.parts = [*DEVICE_PARTS]
        if self.device != "cpu" and ({*self.parts} - {*DEVICE_PARTS} or self.against or self.peer):
            raise ValueError(
                f"--device {self.device} is compared with the CPU alone, in {' and '.join(DEVICE_PARTS)}: leave out "
                "other --parts, --against and --peer, or pass --device cpu."
            )
        for name, parts in (("peer", DEVICE_PARTS), ("against", ("inference", "training", "heads", "tokenizer"))):
            if getattr(self, name) and not {*parts} & {*self.parts}:
                chosen = " ".join(self.parts)
                raise ValueError(f"--{name} is not read in --parts {chosen}; pass one of {', '.join(parts)}.")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parsed = ProgramParser(BenchmarkArguments, description=__doc__).parse(arguments)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(parsed.threads or torch.get_num_threads())
    device = local_device(parsed.device)
    conditions = {
        **vars(parsed),
        "threads": torch.get_num_threads(),
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **model_speed.device_conditions(device),
    }
    print(json.dumps(conditions))
    figures: dict[str, Any] = {"conditions": conditions, "rows": [], "tables": []}
    with TemporaryDirectory() as folder:
        for contest in chosen_contests(parsed, Path(folder), device):
            rows = measure(contest, parsed.rounds)
            table = format_rows(contest, rows)
            print(table, flush=True)
            figures["rows"] += rows
            figures["tables"] += table.strip().splitlines()
    if parsed.output:
        write_json(Path(parsed.output), figures)
    return figures


def chosen_contests(parsed: BenchmarkArguments, folder: Path, device: torch.device) -> Iterator[Contest]:
    """All contests of the chosen parts, made one by one."""
    sentences = read_sentences(parsed.text_file)
    code = parsed.against and Path(parsed.against, "modeling_elmo", "__init__.py")
    checkout = model_speed.import_file(code, model_speed.CHECKOUT) if code else None
    names = {"inference": parsed.batches, "heads": parsed.batches, "tokenizer": []}
    inputs = [(part, name) for part in parsed.parts for name in names.get(part, parsed.training_batches)]
    batches = {name: draw_batch(sentences, name, parsed.seed) for _, name in inputs}
    if {"inference", "training"} & {*parsed.parts}:
        torch.manual_seed(parsed.seed)
        model = ELMoModel(ELMoConfig.from_preset(parsed.preset), add_mixing_layer=False).eval()
        peers = dict(model_speed.load_peer(spec, model) for spec in parsed.peer)
        if checkout is not None:
            peers["other checkout"] = model_speed.checkout_peer(checkout, parsed.preset, model)
    for part, name in inputs:
        batch = batches[name]
        if part == "pretraining":
            yield step_speed.pretraining_contest(name, batch, parsed.preset, parsed.softmaxes, parsed.vocabulary_size)
        elif part == "heads":
            yield from (step_speed.head_contest(head, name, batch, parsed.preset, checkout) for head in HEADS)
        elif part == "fine_tuning":
            yield from (step_speed.fine_tuning_contest(head, name, batch, parsed.preset, folder) for head in HEADS)
        else:
            yield model_speed.model_contest(part, name, batch, model, device, peers)
    if "tokenizer" in parsed.parts:
        yield from tokenizer_contests(sentences, checkout)


if __name__ == "__main__":
    run(main)
