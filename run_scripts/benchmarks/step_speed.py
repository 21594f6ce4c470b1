"""Speed of training steps and of heads: the paper's tagger, BCN, ESIM and reader with their biLM frozen.

A pretraining step is measured for several softmaxes. `sampled-dense` is the sampled softmax with a gradient for the
whole table instead of the rows of the step. `adaptive-bf16` and `adaptive-muon` are the adaptive softmax with `--bf16`
and with `--optim muon`.

Our fine-tuning step reads stored layers of the biLM (`--cache_features`). It is compared with a step that computes the
layers, and with a step on stored layers whose network runs in `torch.nn`. A step makes the batch, reads it, and updates
the network. Inference with a head is compared with its biLM alone: a head should cost little more.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding

import modeling_elmo
from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer, elmo_backend
from modeling_elmo.tokenization.elmo_characters import SPECIAL_WORDS

from ..fine_tuning.features import FeatureCollator, feature_store
from ..pretraining.optimization import OptimizationArguments, clip_gradients, make_optimizers
from .model_speed import backend_context
from .timing import Contest, Implementation, Outputs

NUM_SAMPLED = 8192  # candidates of the sampled softmax
SOFTMAXES = ("full", "sampled", "sampled-dense", "adaptive", "adaptive-bf16", "adaptive-muon")
NUM_LABELS = 13
CONTEXT_SENTENCES = 5
WORD_EMBEDDING_SIZE = 50
TARGET_NAMES = ("labels", "start_positions", "end_positions")
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "tagger": ("ELMoForTokenClassification", {"elmo_placement": "input"}),
    "BCN": ("ELMoForSequenceClassification", {"elmo_placement": "input", "classifier": "bcn"}),
    "ESIM": ("ELMoForSequenceClassification", {"elmo_placement": "input", "classifier": "esim"}),
    "reader": ("ELMoForQuestionAnswering", {"elmo_placement": "both"}),
}


def seeded_loss(model: Any, inputs: Callable[[], dict], backend: str | None = None, bf16: bool = False) -> Tensor:
    torch.manual_seed(0)
    with backend_context(backend), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return model(**inputs()).loss


def take_step(
    loss: Callable[[], Tensor], model: Any, optimizers: Sequence[torch.optim.Optimizer], max_norm: float
) -> Outputs:
    value = loss()
    value.backward()
    clip_gradients(list(model.parameters()), max_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": value.detach()}


def pretraining_contest(
    name: str, batch: list[list[str]], preset: str, softmaxes: Sequence[str], vocabulary_size: int
) -> Contest:
    """Steps of AdamW, or of Muon, on one batch, with dropout. The first loss equals the loss of the plain definition.

    A token's target is the token itself: targets of the same number and frequencies as in training.

    Args:
        vocabulary_size: rows of the softmax. The text uses as many of them as it has words.
    """
    counts = Counter(chain.from_iterable(batch))
    words = [word for word, _ in counts.most_common(vocabulary_size - len(SPECIAL_WORDS))]
    tokenizer = ELMoTokenizer(vocab=[*SPECIAL_WORDS, *words], pre_tokenization="whitespace")
    inputs = dict(tokenizer(batch, is_split_into_words=True, padding=True, return_tensors="pt"))
    inputs["forward_targets"] = inputs["input_ids"]
    inputs["backward_targets"] = inputs["input_ids"]
    num_sampled = min(NUM_SAMPLED, vocabulary_size // 2)
    implementations = []
    for softmax in softmaxes:
        torch.manual_seed(0)
        softmax_type, _, variant = softmax.partition("-")
        config = ELMoConfig.from_preset(
            preset,
            softmax_type=softmax_type,
            vocab_size=vocabulary_size,
            num_sampled=num_sampled,
        )
        model = ELMoForPreTraining(config).train()
        model.softmax.sparse_gradients = softmax == "sampled"
        options = OptimizationArguments(optim="muon" if variant == "muon" else "adamw")
        optimizers = make_optimizers(model, options)
        loss = partial(seeded_loss, model, lambda: inputs, bf16=variant == "bf16")
        expected = {"loss": loss(backend="reference").detach()}
        step = partial(take_step, loss, model, optimizers, 1.0)
        implementations.append(Implementation(softmax, step, expected))
    tokens = int(inputs["attention_mask"].sum())
    return Contest("pretraining", name, tokens, "tokens", implementations)


def random_head(head: str, batch: list[list[str]], preset: str, package: Any = modeling_elmo) -> tuple[Any, list, Any]:
    """A head with random weights, examples with random labels, and the collator that pads them."""
    words = sorted(set(chain.from_iterable(batch)))
    tokenizer = ELMoTokenizer(vocab=[*SPECIAL_WORDS, *words], pre_tokenization="whitespace")
    draw = random.Random(0)
    rows = []
    for number in range(len(batch)):
        sentences = batch[number:] + batch[:number]
        rows.append(random_example(head, sentences, tokenizer, draw))
    padding = DataCollatorForTokenClassification if head == "tagger" else DataCollatorWithPadding
    torch.manual_seed(0)
    class_name, settings = HEADS[head]
    config = package.ELMoConfig.from_preset(
        preset,
        **settings,
        num_labels=NUM_LABELS,
        task_word_embedding_size=WORD_EMBEDDING_SIZE,
        vocab_size=len(tokenizer),
    )
    model = getattr(package, class_name)(config)
    return model, rows, padding(tokenizer)


def head_contest(head: str, name: str, batch: list[list[str]], preset: str, checkout: Any) -> Contest:
    """Inference of a head on one batch, checked against the plain definition."""
    model, rows, collate = random_head(head, batch, preset)
    model.eval()
    inputs = collate(rows)
    for target in TARGET_NAMES:
        inputs.pop(target, None)
    with torch.no_grad(), elmo_backend("reference"):
        expected = first_output(model, inputs)
    call = partial(first_output, model, inputs)
    measured = [Implementation("this package", call, expected)]
    if checkout is not None:
        other, _, _ = random_head(head, batch, preset, checkout)
        other.eval().load_state_dict(model.state_dict())
        call = partial(first_output, other, inputs)
        measured.append(Implementation("other checkout", call, expected))
    bilm = torch.no_grad()(partial(model.elmo, **inputs, unpadded=True))
    measured.append(Implementation("its biLM alone", bilm))
    tokens = int(inputs["attention_mask"].sum())
    return Contest("heads", f"{head}, {name}", tokens, "tokens", measured)


@torch.no_grad()
def first_output(model: Any, inputs: dict[str, Tensor]) -> Outputs:
    return {"logits": model(**inputs)[0]}


def fine_tuning_contest(head: str, name: str, batch: list[list[str]], preset: str, folder: Path) -> Contest:
    """Steps of a head on one batch, whose layers are stored in `folder`. Labels are random."""
    model, rows, padding = random_head(head, batch, preset)
    rows = [{**row, "text_number": number} for number, row in enumerate(rows)]
    store = feature_store(folder, model.train().elmo, Dataset.from_list(rows), padding)
    computing = FeatureCollator(padding, None)
    stored = FeatureCollator(padding, store)

    def step_of(collate: Callable, backend: str | None = None) -> Callable[[], Outputs]:
        copied = copy.deepcopy(model)
        loss = partial(seeded_loss, copied, partial(collate, rows), backend)
        optimizer = torch.optim.Adam(copied.parameters())
        return partial(take_step, loss, copied, [optimizer], 5.0)

    loss = seeded_loss(model, partial(computing, rows))
    expected = {"loss": loss.detach()}
    implementations = [
        Implementation("layers stored", step_of(stored), expected),
        Implementation("layers computed", step_of(computing), expected),
        Implementation("layers stored, torch.nn", step_of(stored, "reference"), expected),
    ]
    return Contest("fine_tuning", f"{head}, {name}", len(rows), "examples", implementations)


def random_example(
    head: str, sentences: list[list[str]], tokenizer: ELMoTokenizer, draw: random.Random
) -> dict[str, Any]:
    """The first sentence with random tags, paired with the next, or as a question about the five after it.

    The answer of the question is one random word. A sentence alone is also the one after it.
    """
    words = sentences[0]
    others = sentences[1:] or sentences
    if head == "tagger":
        tags = [draw.randrange(NUM_LABELS) for _ in words]
        encoding = tokenizer(words, is_split_into_words=True)
        return {**encoding, "labels": [-100, *tags, -100]}
    if head in ("BCN", "ESIM"):
        encoding = tokenizer(words, others[0], is_split_into_words=True)
        return {**encoding, "labels": draw.randrange(NUM_LABELS)}
    context = list(chain.from_iterable(others[:CONTEXT_SENTENCES]))
    encoding = tokenizer(words, context, is_split_into_words=True)
    end = len(encoding["input_ids"]) - 1
    answer = draw.randrange(end - len(context), end)
    return {**encoding, "start_positions": answer, "end_positions": answer}
