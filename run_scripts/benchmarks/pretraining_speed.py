"""Where the time of a pretraining step goes, for several softmaxes.

A step is cut where one part hands its vectors to the next, and each part is timed forward and backward. `encoder` turns
the distinct words of the batch into vectors; `recurrence` and `softmax` include both directions; `optimizer` clips and
updates. `sampled-dense` is the sampled softmax with a gradient for the whole table instead of the rows of the step.
`adaptive-bf16` and `adaptive-muon` are the adaptive softmax with `--bf16` and with `--optim muon`.
"""

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.elmo_inputs import starting_states
from modeling_elmo.elmo_lstm import run_directions
from modeling_elmo.run_scripts.benchmarks.timing import Contest, Implementation, Outputs
from modeling_elmo.run_scripts.pretraining.optimization import OptimizationArguments, clip_gradients, make_optimizers
from modeling_elmo.tokenization.elmo_characters import SPECIAL_WORDS

STEP_PARTS = ("encoder", "recurrence", "softmax", "optimizer")
NUM_SAMPLED = 8192  # candidates of the sampled softmax
SOFTMAXES = ("full", "sampled", "sampled-dense", "adaptive", "adaptive-bf16", "adaptive-muon")


@dataclass
class PretrainingStep:
    """A model that takes steps on one batch and keeps the seconds of their parts."""

    model: ELMoForPreTraining
    optimizers: list[torch.optim.Optimizer]
    inputs: dict[str, Tensor]
    bf16: bool = False
    seconds: list[dict[str, float]] = field(default_factory=list)

    def whole_loss(self) -> Outputs:
        """The loss that the step must have, by the model's own `forward`."""
        torch.manual_seed(0)
        targets = {f"{direction}_targets": self.inputs["input_ids"] for direction in ("forward", "backward")}
        with self.precision():
            return {"loss": self.model(**self.inputs, **targets).loss.detach()}

    def precision(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)

    def __call__(self) -> Outputs:
        """Takes a step. Each part has a graph of its own; together they give the model's gradients.

        A token's target is the token itself: targets of the same number and frequencies as in training.
        """
        torch.manual_seed(0)
        self.seconds.append(dict.fromkeys(STEP_PARTS, 0.0))
        bilm, ids = self.model.elmo, self.inputs["input_ids"]
        with self.timed("encoder"), self.precision():
            batch = bilm.read_tokens(**self.inputs)
        words_UP = batch.words_UP.detach().requires_grad_()
        orders = (batch.packing.forward_N, batch.packing.backward_N)
        with self.timed("recurrence"), self.precision():
            states = starting_states(bilm.config, None, words_UP, len(ids))
            streams = [(batch._replace(words_UP=words_UP), order_N) for order_N in orders]
            tops = [outputs[-1] for outputs, *_ in run_directions(bilm.lstms(), streams, states)]
        hidden = [top.detach().requires_grad_() for top in tops]
        targets = [ids.flatten()[batch.packing.positions_N][order_N] for order_N in orders]
        with self.timed("softmax"):
            with self.precision():
                loss, *_ = self.model._losses(list(zip(hidden, targets, strict=True)), None, None)
            loss.backward()
        with self.timed("recurrence"):
            torch.autograd.backward(tops, [each.grad for each in hidden])
        with self.timed("encoder"):
            batch.words_UP.backward(words_UP.grad)
        with self.timed("optimizer"):
            clip_gradients(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return {"loss": loss.detach()}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[-1][part] += time.perf_counter() - start

    def parts_in_milliseconds(self) -> dict[str, float]:
        """Medians over the steps, without the first two, which are the check and the round that is not counted."""
        steps = self.seconds[2:]
        return {part: 1e3 * statistics.median(step[part] for step in steps) for part in STEP_PARTS}


def pretraining_contest(
    name: str, batch: list[list[str]], preset: str, softmaxes: Sequence[str], vocabulary_size: int
) -> Contest:
    """Steps of AdamW, or of Muon, on one batch, with dropout.

    Args:
        vocabulary_size: rows of the softmax. The text uses as many of them as it has words.
    """
    words = Counter(word for sentence in batch for word in sentence).most_common(vocabulary_size - len(SPECIAL_WORDS))
    tokenizer = ELMoTokenizer(vocab=[*SPECIAL_WORDS, *(word for word, _ in words)], pre_tokenization="whitespace")
    inputs = dict(tokenizer(batch, is_split_into_words=True, padding=True, return_tensors="pt"))
    implementations = []
    for softmax in softmaxes:
        torch.manual_seed(0)
        softmax_type, _, variant = softmax.partition("-")
        options = {
            "vocab_size": vocabulary_size,
            "softmax_type": softmax_type,
            "num_sampled": min(NUM_SAMPLED, vocabulary_size // 2),
        }
        model = ELMoForPreTraining(ELMoConfig.from_preset(preset, **options)).train()
        model.softmax.sparse_gradients = softmax == "sampled"
        optim: Any = "muon" if variant == "muon" else "adamw"
        optimizers = make_optimizers(model, OptimizationArguments(optim=optim))
        step = PretrainingStep(model, optimizers, inputs, bf16=variant == "bf16")
        implementations.append(Implementation(softmax, step, step.whole_loss(), step.parts_in_milliseconds))
    return Contest("pretraining", name, int(inputs["attention_mask"].sum()), "tokens", implementations)
