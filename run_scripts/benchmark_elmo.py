"""How fast the tokenizer and the model are on real text: correctness first, then interleaved runs, medians and spread.

python run_scripts/benchmark_elmo.py --text_file corpus.txt            (sentences, one a line)

Rows are named sentences x longest length in words. Every backend of the LSTM takes its turn in every round, so that a
busy machine slows all of them alike: compare the ratios, not the milliseconds, between machines.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

if __package__ in (None, ""):  # run by path from a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modeling_elmo import ELMoConfig, ELMoModel, ELMoTokenizer, lstm_backend  # noqa: E402
from modeling_elmo.configuration_elmo import PRESETS  # noqa: E402

BACKENDS = {"inference": ("reference", "onednn"), "training": ("reference", "bptt")}
TOLERANCE = 1e-3  # share of the outputs' RMS by which two float32 paths may differ; rounding of random weights


def main(arguments: list[str] | None = None):
    args = parse(arguments)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    sentences = read_sentences(args.text_file)
    tokenizer = ELMoTokenizer(pre_tokenization="whitespace")
    results: dict[str, dict] = {"tokenizer": time_tokenizer(tokenizer, sentences, args.rounds)}
    model = ELMoModel(ELMoConfig.from_preset(args.preset), add_mixing_layer=False).eval()
    print(f"{args.preset}: {model.num_parameters() / 1e6:.1f} M parameters, {torch.get_num_threads()} threads")
    for name in args.batches:
        batch = draw(sentences, name)
        for mode in ("inference", "training") if args.training else ("inference",):
            results[f"{name} {mode}"] = time_model(model, tokenizer, batch, args.rounds, mode)
            report(f"{name} {mode}", results[f"{name} {mode}"])
    if args.output:
        Path(args.output).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of ELMoTokenizer and ELMoModel on real text.")
    parser.add_argument("--text_file", required=True, help="sentences, one a line, words separated by spaces")
    parser.add_argument("--preset", choices=PRESETS, default="original", help="model size (random weights)")
    parser.add_argument("--batches", nargs="+", default=["1x20", "32x30"], metavar="ROWSxWORDS")
    parser.add_argument("--training", action="store_true", help="also a forward and backward pass, without optimizer")
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of each backend")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="JSON file for the figures")
    return parser.parse_args(arguments)


def read_sentences(path: str) -> list[list[str]]:
    sentences = [line.split() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    sentences = [words for words in sentences if len(words) >= 3]
    if not sentences:
        raise ValueError(f"{path} has no sentence of 3 words or more; pass a text file with one sentence a line.")
    return sentences


def draw(sentences: list[list[str]], name: str) -> list[list[str]]:
    """`"32x30"`: 32 sentences of 3 to 30 words, the longest of 30; one row alone has the full length."""
    rows, longest = (int(number) for number in name.split("x"))
    exact = [words for words in sentences if len(words) == longest]
    shorter = [words for words in sentences if len(words) <= longest]
    if not exact or len(shorter) < rows:
        raise ValueError(
            f"The text has too few sentences for a batch of {name}; pass a longer text or smaller batches."
        )
    return [random.choice(exact), *random.sample(shorter, rows - 1)]


def time_tokenizer(tokenizer: ELMoTokenizer, sentences: list[list[str]], rounds: int) -> dict[str, float]:
    """Words per second from batches of 1,000 texts to tensors, after one pass that fills the character cache."""
    texts = [" ".join(words) for words in sentences[:10_000]]
    batches = [texts[start : start + 1000] for start in range(0, len(texts), 1000)]
    words = sum(len(words) for words in sentences[: len(texts)])
    seconds = clock({"tokenizer": lambda: [tokenizer(b, padding=True, return_tensors="pt") for b in batches]}, rounds)
    figures = summary(seconds["tokenizer"], words)
    print(f"tokenizer: {figures['tokens_per_second']:,.0f} words/s ({words:,} words, text to padded tensors)")
    return figures


def time_model(
    model: ELMoModel, tokenizer: ELMoTokenizer, batch: list[list[str]], rounds: int, mode: str
) -> dict[str, dict]:
    """Each backend's times, after its vectors (in training: a weight's gradient) were compared with the reference's."""
    encoding = tokenizer(batch, is_split_into_words=True, padding=True, return_tensors="pt")
    weights = list(model.parameters())  # the first are the character vectors, whose gradient has passed through all

    def run(backend: str) -> torch.Tensor:
        with lstm_backend(backend), torch.set_grad_enabled(mode == "training"):
            vectors = model(**encoding).last_hidden_state
            if mode == "inference":
                return vectors
            return torch.autograd.grad(vectors.square().sum(), weights)[0]

    expected = run("reference")
    for backend in BACKENDS[mode]:
        error = ((run(backend) - expected).square().mean() / expected.square().mean()).sqrt().item()
        if error > TOLERANCE:
            raise RuntimeError(f"{backend} differs from the reference by {error:.1e} of its RMS; no figures are given.")
    seconds = clock({backend: lambda backend=backend: run(backend) for backend in BACKENDS[mode]}, rounds)
    tokens = int(encoding.attention_mask.sum())
    return {backend: summary(seconds[backend], tokens) for backend in BACKENDS[mode]}


def clock(functions: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run; the functions take turns, and one round before does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def summary(seconds: list[float], tokens: int) -> dict[str, float]:
    median = statistics.median(seconds)
    return {
        "milliseconds": 1e3 * median,
        "fastest": 1e3 * min(seconds),
        "slowest": 1e3 * max(seconds),
        "tokens": tokens,
        "tokens_per_second": tokens / median,
    }


def report(name: str, figures: dict[str, dict]):
    base = figures["reference"]["milliseconds"]
    for backend, row in figures.items():
        print(
            f"{name:>16} {backend:<10} {row['milliseconds']:8.1f} ms ({row['fastest']:.1f} to {row['slowest']:.1f})"
            f" {row['tokens_per_second']:9,.0f} tokens/s {base / row['milliseconds']:5.2f} x reference"
        )


if __name__ == "__main__":
    main()
