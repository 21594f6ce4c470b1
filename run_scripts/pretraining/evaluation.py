"""Held-out perplexity of a biLM: exp of the mean loss over all words of a text."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor

from modeling_elmo import ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.run_scripts.pretraining.streams import (
    Corpus,
    HeldOutArguments,
    LMBatch,
    SentenceBatches,
    StreamWindows,
    data_loader,
)


@dataclass
class Perplexity:
    """`perplexity` is `exp((L_forward + L_backward) / 2)` with mean losses in nats; the others each direction's own."""

    perplexity: float
    forward: float
    backward: float
    predictions: int
    unknown_rate: float
    vocabulary_size: int
    protocol: str

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.2f} (forward {self.forward:.2f}, backward {self.backward:.2f}); over "
            f"all {self.vocabulary_size:,} words, {self.predictions:,} predictions a direction, "
            f"{self.unknown_rate:.2%} of them <UNK>; {self.protocol}"
        )


def held_out_batches(
    corpus: HeldOutArguments,
    tokenizer: ELMoTokenizer,
    context: Literal["sentence", "stream"],
    accelerator: Accelerator,
    sizes: dict,
) -> Iterable[LMBatch]:
    """This process's share of the held-out text, once, in a fixed order."""
    options: dict[str, Any] = {
        "is_split_into_words": corpus.is_split_into_words,
        "shuffle": False,
        "repeat": False,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
    }
    text = held_out_corpus(corpus)
    if context == "stream":
        rows = sizes["per_device_eval_batch_size"]
        windows = StreamWindows(text, tokenizer, rows, unroll_steps=20, survey=text.survey(), **options)
        return data_loader(windows, num_workers=0)
    return data_loader(SentenceBatches(text, tokenizer, sizes["per_device_eval_batch_tokens"], **options), 0)


def held_out_corpus(arguments: HeldOutArguments) -> Corpus:
    if bool(arguments.validation_file) == (arguments.validation_split is not None):
        raise ValueError("Pass either --validation_file FILE ..., or --dataset NAME with --validation_split SPLIT.")
    if arguments.validation_split is not None and arguments.dataset is None:
        raise ValueError(f"--validation_split {arguments.validation_split} is one of --dataset NAME; pass both.")
    if arguments.validation_file:
        return Corpus.from_files(arguments.validation_file, arguments.text_column)
    return Corpus.from_dataset(arguments, str(arguments.validation_split))


@torch.no_grad()
def evaluate(
    model: ELMoForPreTraining, batches: Iterable[LMBatch], context: str, accelerator: Accelerator
) -> Perplexity:
    """Runs the model over all batches of all processes; in eval mode, whatever it was in before."""
    was_training = model.training
    model.eval()
    sums, states = torch.zeros(4, dtype=torch.float64), None  # forward and backward losses, predictions, unknown words
    for batch in batches:
        inputs = {name: tensor.to(accelerator.device) for name, tensor in batch.inputs.items()}
        with accelerator.autocast():
            output = model(**inputs, initial_states=states, num_items_in_batch=1)
        states = output.final_states if context == "stream" else None
        sums += torch.tensor([output.forward_loss, output.backward_loss, batch.num_predictions, batch.num_unknown])
    model.train(was_training)
    protocol = "each sentence on its own from a zero state"
    if context == "stream":
        pieces = 0 if states is None else len(states[0]) * accelerator.num_processes
        protocol = f"states carried from sentence to sentence, in {pieces} pieces of the text side by side"
    return _from_sums(accelerator.reduce(sums.to(_sum_device(accelerator))), model.config.vocab_size, protocol)


def _sum_device(accelerator: Accelerator) -> torch.device:
    return torch.device("cpu") if accelerator.device.type == "mps" else accelerator.device  # mps has no float64


def _from_sums(sums: Tensor, vocabulary_size: int, protocol: str) -> Perplexity:
    forward, backward, predictions, unknown = sums.tolist()
    if not predictions:
        raise ValueError("The held-out text holds no words; pass another --validation_file.")
    return Perplexity(
        perplexity=_exp((forward + backward) / 2 / predictions),
        forward=_exp(forward / predictions),
        backward=_exp(backward / predictions),
        predictions=int(predictions),
        unknown_rate=unknown / predictions,
        vocabulary_size=vocabulary_size,
        protocol=protocol,
    )


def _exp(loss: float) -> float:
    return math.inf if loss > 700 else math.exp(loss)  # 700: where float64 ends
