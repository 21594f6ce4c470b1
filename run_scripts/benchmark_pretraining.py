"""Where the time of a training step goes, for several softmaxes that take turns in one process.

    python run_scripts/benchmark_pretraining.py --train_file corpus.txt.gz --is_split_into_words --preset small

A step is cut where one part hands its vectors to the next, and each part is timed forward and backward: the encoder
(distinct words of the batch), the recurrence and the softmax (both directions), the optimizer (clipping and update).
`data` is the making of the batch, which training leaves to another process. `sampled-dense` is the sampled softmax with
a gradient for the whole table instead of the step's rows. Medians over batches, in milliseconds; words a second
without the data.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.run_scripts.pretraining.batches import LMBatch, SentenceBatches
from modeling_elmo.run_scripts.pretraining.corpus import Corpus
from modeling_elmo.run_scripts.pretraining.optimization import OptimizationArguments, clip_gradients, make_optimizers
from modeling_elmo.run_scripts.pretraining.vocabulary import word_frequencies
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.run_scripts.program.files import write_json
from modeling_elmo.tokenization.elmo_characters import most_frequent_words
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter

DEFAULT_TEXT = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "text" / "inaugural.txt.gz"
SOFTMAXES = ("full", "sampled", "sampled-dense", "adaptive")
PARTS = ("encoder", "recurrence", "softmax", "optimizer")


@dataclass(kw_only=True)
class BenchmarkArguments:
    train_file: list[str] = field(
        default_factory=lambda: [str(DEFAULT_TEXT)], metadata={"help": "Text. Default: the sample of the repository."}
    )
    is_split_into_words: bool = field(default=True, metadata={"help": "Words are separated by spaces already."})
    preset: str = field(default="small", metadata={"help": "Size of the model."})
    vocabulary_size: int = field(default=50_000, metadata={"help": "Rows of the softmax, used by the text or not."})
    num_sampled: int = field(default=8192, metadata={"help": "Candidates of the sampled softmax."})
    softmaxes: list[str] = field(default_factory=lambda: ["full", "sampled", "sampled-dense"])
    optim: str = field(default="adamw", metadata={"help": "adamw or adagrad."})
    per_device_train_batch_tokens: int = field(default=4096, metadata={"help": "Tokens of a batch, padding included."})
    num_batches: int = field(default=5, metadata={"help": "Batches that are timed, after one that is not."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the figures."})


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self):
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


def main(arguments: list[str] | None = None) -> list[dict]:
    parsed = ProgramParser(BenchmarkArguments, description=__doc__).parse(arguments)
    unknown = sorted({*parsed.softmaxes} - {*SOFTMAXES})
    if unknown:
        raise ValueError(f"--softmaxes {' '.join(unknown)}: pass some of {', '.join(SOFTMAXES)}.")
    tokenizer, batches, data_seconds = read(parsed)
    models = {name: make_model(name, tokenizer, parsed) for name in parsed.softmaxes}
    clocks: dict[str, list[Clock]] = {name: [] for name in models}
    for batch in batches:
        for name, (model, optimizers) in models.items():
            clocks[name].append(timed_step(model, optimizers, batch))
    rows = [row_of(name, clocks[name][1:], batches[1:], data_seconds) for name in models]
    print_table(rows)
    if parsed.output:
        write_json(Path(parsed.output), rows)
    return rows


def read(arguments: BenchmarkArguments) -> tuple[ELMoTokenizer, list[LMBatch], float]:
    """A tokenizer for the text, batches, and the median seconds that making one takes."""
    corpus = Corpus.from_files(arguments.train_file)
    _, counts = word_frequencies(corpus, TextSplitter("whitespace"))
    tokenizer = ELMoTokenizer(vocab=most_frequent_words(counts, arguments.vocabulary_size))
    source = iter(
        SentenceBatches(
            corpus,
            tokenizer,
            arguments.per_device_train_batch_tokens,
            is_split_into_words=arguments.is_split_into_words,
        )
    )
    batches, seconds = [], []
    for _ in range(arguments.num_batches + 1):
        start = time.perf_counter()
        batches += islice(source, 1)
        seconds.append(time.perf_counter() - start)
    return tokenizer, batches, statistics.median(seconds[1:])


def make_model(name: str, tokenizer: ELMoTokenizer, arguments: BenchmarkArguments):
    torch.manual_seed(0)
    config = ELMoConfig.from_preset(
        arguments.preset,
        vocab_size=arguments.vocabulary_size,
        softmax_type=name.removesuffix("-dense"),
        num_sampled=arguments.num_sampled,
    )
    model = ELMoForPreTraining(config).train()
    model.softmax.sparse_gradients = name == "sampled"
    return model, make_optimizers(model, OptimizationArguments(optim=arguments.optim))


def timed_step(model: ELMoForPreTraining, optimizers: list[torch.optim.Optimizer], batch: LMBatch) -> Clock:
    """A training step in parts, each with its own graph; the gradients are those of the whole."""
    clock, inputs = Clock(), batch.inputs
    with clock.part("encoder"):
        text = model.elmo.read_tokens(inputs["character_ids"], inputs["input_ids"], inputs["attention_mask"])
    words_UP = text.words_UP.detach().requires_grad_()
    states = model.elmo.starting_states(None, words_UP, len(text.mask_BT))
    with clock.part("recurrence"):
        orders = (text.packing.forward_N, text.packing.backward_N)
        packed = text._replace(words_UP=words_UP)
        tops = [model.elmo.run_direction(i, packed, order_N, states)[0][-1] for i, order_N in enumerate(orders)]
    hidden_NP = torch.cat([top.detach() for top in tops]).requires_grad_()
    with clock.part("softmax"):
        loss = softmax_loss(model, hidden_NP, torch.cat([text_targets(inputs, text, order_N) for order_N in orders]))
        loss.backward()
    with clock.part("recurrence"):
        torch.autograd.backward(tops, hidden_NP.grad.split([len(top) for top in tops]))
    with clock.part("encoder"):
        text.words_UP.backward(words_UP.grad)
    with clock.part("optimizer"):
        clip_gradients(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return clock


def text_targets(inputs: dict[str, Tensor], text, order_N: Tensor) -> Tensor:
    """As many targets as words, of the same frequencies: which of them stands where costs nothing."""
    return inputs["labels"].flatten()[text.packing.positions_N][order_N]


def softmax_loss(model: ELMoForPreTraining, hidden_NP: Tensor, targets_N: Tensor) -> Tensor:
    loss, _ = model.softmax(hidden_NP, targets_N, torch.full((len(targets_N),), 1 / len(targets_N)))
    return loss


def row_of(name: str, clocks: list[Clock], batches: list[LMBatch], data_seconds: float) -> dict:
    steps = [sum(clock.seconds.values()) for clock in clocks]
    medians = {part: 1e3 * statistics.median(clock.seconds[part] for clock in clocks) for part in PARTS}
    return {
        "variant": name,
        **medians,
        "step": 1e3 * statistics.median(steps),
        "data": 1e3 * data_seconds,
        "fastest": 1e3 * min(steps),
        "slowest": 1e3 * max(steps),
        "words/s": statistics.median(batch.num_predictions / step for batch, step in zip(batches, steps, strict=True)),
    }


def print_table(rows: list[dict]):
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        shares = {part: f" ({row[part] / row['step']:.0%})" for part in PARTS}
        cells = [v if isinstance(v, str) else f"{v:,.0f}{shares.get(name, '')}" for name, v in row.items()]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    run(main)
