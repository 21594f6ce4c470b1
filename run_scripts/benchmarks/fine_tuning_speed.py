"""Speed of a fine-tuning step of the paper's tagger, ESIM and reader, with their biLM frozen.

Our step reads stored layers of the biLM (`--cache_features`). It is compared with a step that computes the layers, and
with a step on stored layers whose network runs in `torch.nn`. A step makes the batch, reads it, and updates the
network.
"""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding

from modeling_elmo import (
    ELMoConfig,
    ELMoForQuestionAnswering,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
    ELMoTokenizer,
    elmo_backend,
)
from modeling_elmo.run_scripts.benchmarks.timing import Contest, Implementation, Outputs, take_step
from modeling_elmo.run_scripts.fine_tuning.features import FeatureCollator, feature_store
from modeling_elmo.tokenization.elmo_characters import SPECIAL_WORDS

NUM_LABELS, CONTEXT_SENTENCES, WORD_EMBEDDING_SIZE = 13, 5, 50
HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tagger": (ELMoForTokenClassification, {"elmo_placement": "input"}),
    "ESIM": (ELMoForSequenceClassification, {"elmo_placement": "input", "classifier": "esim"}),
    "reader": (ELMoForQuestionAnswering, {"elmo_placement": "both"}),
}


def loss_of_head(model: Any, collate: Callable, rows: list[dict[str, Any]], backend: str | None = None) -> Tensor:
    with elmo_backend(backend) if backend else nullcontext():
        return model(**collate(rows)).loss


def fine_tuning_contest(head: str, name: str, batch: list[list[str]], preset: str, folder: Path) -> Contest:
    """Steps of a head on one batch, whose layers are stored in `folder`. Labels are random."""
    words = sorted({word for sentence in batch for word in sentence})
    tokenizer = ELMoTokenizer(vocab=[*SPECIAL_WORDS, *words], pre_tokenization="whitespace")
    draw = random.Random(0)
    rows = [
        {**random_example(head, batch[number:] + batch[:number], tokenizer, draw), "text_number": number}
        for number in range(len(batch))
    ]
    padding = DataCollatorForTokenClassification if head == "tagger" else DataCollatorWithPadding
    torch.manual_seed(0)
    model_class, own = HEADS[head]
    options = {"num_labels": NUM_LABELS, "task_word_embedding_size": WORD_EMBEDDING_SIZE, "vocab_size": len(tokenizer)}
    model = model_class(ELMoConfig.from_preset(preset, **own, **options)).train()
    store = feature_store(folder, model.elmo, Dataset.from_list(rows), padding(tokenizer))
    computing, stored = (FeatureCollator(padding(tokenizer), source) for source in (None, store))

    def step_of(collate: Callable, backend: str | None = None) -> Callable[[], Outputs]:
        copied = copy.deepcopy(model)
        clip = partial(torch.nn.utils.clip_grad_norm_, list(copied.parameters()), 5.0)
        return partial(
            take_step,
            partial(loss_of_head, copied, collate, rows, backend),
            [torch.optim.Adam(copied.parameters())],
            clip,
        )

    torch.manual_seed(0)
    expected = {"loss": loss_of_head(model, computing, rows).detach()}
    implementations = [
        Implementation("layers stored", step_of(stored), expected),
        Implementation("layers computed", step_of(computing), expected),
        Implementation("layers stored, torch.nn", step_of(stored, "reference"), expected),
    ]
    return Contest("fine_tuning", f"{head}, {name}", len(rows), "examples", implementations)


def random_example(
    head: str, sentences: list[list[str]], tokenizer: ELMoTokenizer, draw: random.Random
) -> dict[str, Any]:
    """The first sentence with random tags, paired with the second, or as a question about the five after it.

    The answer of the question is one random word.
    """
    words = sentences[0]
    if head == "tagger":
        labels = [-100, *(draw.randrange(NUM_LABELS) for _ in words), -100]
        return {**tokenizer(words, is_split_into_words=True), "labels": labels}
    if head == "ESIM":
        return {**tokenizer(words, sentences[1], is_split_into_words=True), "labels": draw.randrange(NUM_LABELS)}
    context = [word for sentence in sentences[1 : 1 + CONTEXT_SENTENCES] for word in sentence]
    encoding = tokenizer(words, context, is_split_into_words=True)
    answer = draw.randrange(len(encoding["input_ids"]) - len(context) - 1, len(encoding["input_ids"]) - 1)
    return {**encoding, "start_positions": answer, "end_positions": answer}
