"""Held-out perplexity of a biLM: the exponential of the mean loss over all words of a text."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from modeling_elmo import ELMoForPreTraining, ELMoTokenizer

from ..program.command_line import refuse_unread
from .batches import LMBatch, SentenceBatches, StreamWindows
from .corpus import Corpus

STREAM_STEPS = 20  # tokens of a row in a window; the figures do not depend on it


@dataclass
class Perplexity:
    """`perplexity` is `exp((L_forward + L_backward) / 2)`, with mean losses in nats.

    `forward` and `backward` are the perplexities of the directions, `predictions` the predictions of one direction.
    `unigram` is the perplexity of a model that only knows how often each word occurs in the training text.
    """

    perplexity: float
    forward: float
    backward: float
    predictions: int
    unknown_rate: float
    vocabulary_size: int
    protocol: str
    unigram: float | None = None

    def __str__(self) -> str:
        unigram = "" if self.unigram is None else f"; a unigram has {self.unigram:,.1f}"
        return (
            f"perplexity {self.perplexity:.2f} (forward {self.forward:.2f}, backward {self.backward:.2f}); over "
            f"all {self.vocabulary_size:,} words, {self.predictions:,} predictions per direction, "
            f"{self.unknown_rate:.2%} of them <UNK>; {self.protocol}{unigram}"
        )


def check_context(arguments: Any, context: str, options: dict[str, list[str]]):
    """Refuses options that are not read in this context; `options` has those that only one context reads."""
    (other,) = options.keys() - {context}
    advice = f"pass --{options[context][0]} instead, or --context {other}."
    refuse_unread(arguments, options[other], f"with --context {context}: {advice}")


def held_out_batches(
    corpus: Corpus,
    is_split_into_words: bool,
    context: str,
    size: int,
    tokenizer: ELMoTokenizer,
    accelerator: Accelerator,
) -> Iterable[LMBatch]:
    """The batches of this process from held-out text, once and in order.

    `size` is the maximum of tokens per batch, unless one sentence is longer; or the number of rows of a stream, which
    are pieces of the text.
    """
    options: dict[str, Any] = {
        "is_split_into_words": is_split_into_words,
        "shuffle": False,
        "repeat": False,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
    }
    if context == "sentence":
        return SentenceBatches(corpus, tokenizer, size, **options)
    return StreamWindows(corpus, tokenizer, size, STREAM_STEPS, survey=corpus.survey(), **options)


@torch.no_grad()
def evaluate(
    model: ELMoForPreTraining,
    batches: Iterable[LMBatch],
    accelerator: Accelerator,
    log_frequencies_V: np.ndarray | None = None,
) -> Perplexity:
    """Perplexity over the batches of all processes, in eval mode. A stream carries the states from batch to batch.

    Args:
        log_frequencies_V: `(vocab_size,)` of the training text, for the unigram, with batches of sentences.
    """
    was_training = model.training
    model.eval()
    # Forward and backward losses, predictions, unknown words, and losses of the unigram.
    sums, states = torch.zeros(5, dtype=torch.float64), None
    for batch in batches:
        with accelerator.autocast():
            output = model(**batch.inputs, initial_states=states, num_items_in_batch=1)
        states = None if batch.resets is None else output.final_states  # of a stream
        unigram = 0.0
        if log_frequencies_V is not None:
            targets = batch.forward_targets
            unigram = -log_frequencies_V[targets[targets != -100].numpy()].sum()
        counts = batch.num_predictions, batch.num_unknown
        sums += torch.tensor([output.forward_loss, output.backward_loss, *counts, unigram], dtype=torch.float64)
    model.train(was_training)
    protocol = "each sentence on its own from a zero state"
    if states is not None:
        pieces = len(states[0]) * accelerator.num_processes
        text = "one piece" if pieces == 1 else f"{pieces} pieces of the text side by side"
        protocol = f"states carried from sentence to sentence, both directions in file order, in {text}"
    device = "cpu" if accelerator.device.type == "mps" else accelerator.device  # mps has no float64
    forward, backward, predictions, unknown, unigram = accelerator.reduce(sums.to(device)).tolist()
    means = torch.tensor([(forward + backward) / 2, forward, backward, unigram], dtype=torch.float64) / predictions
    joint, forward, backward, unigram = means.exp().tolist()  # infinity above the limit of float64
    return Perplexity(
        perplexity=joint,
        forward=forward,
        backward=backward,
        predictions=int(predictions),
        unknown_rate=unknown / predictions,
        vocabulary_size=model.config.vocab_size,
        protocol=protocol,
        unigram=None if log_frequencies_V is None else unigram,
    )
