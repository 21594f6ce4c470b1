"""Speed of a pretraining step, for several softmaxes.

`sampled-dense` is the sampled softmax with a gradient for the whole table instead of the rows of the step.
`adaptive-bf16` and `adaptive-muon` are the adaptive softmax with `--bf16` and with `--optim muon`.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer, elmo_backend
from modeling_elmo.run_scripts.benchmarks.timing import Contest, Implementation, take_step
from modeling_elmo.run_scripts.pretraining.optimization import OptimizationArguments, clip_gradients, make_optimizers
from modeling_elmo.tokenization.elmo_characters import SPECIAL_WORDS

NUM_SAMPLED = 8192  # candidates of the sampled softmax
SOFTMAXES = ("full", "sampled", "sampled-dense", "adaptive", "adaptive-bf16", "adaptive-muon")


def loss_of_step(
    model: ELMoForPreTraining, inputs: dict[str, Tensor], bf16: bool, backend: str | None = None
) -> Tensor:
    """A token's target is the token itself: targets of the same number and frequencies as in training."""
    with elmo_backend(backend) if backend else nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return model(**inputs, forward_targets=inputs["input_ids"], backward_targets=inputs["input_ids"]).loss


def pretraining_contest(
    name: str, batch: list[list[str]], preset: str, softmaxes: Sequence[str], vocabulary_size: int
) -> Contest:
    """Steps of AdamW, or of Muon, on one batch, with dropout. The first loss is that of the plain definition.

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
        optimizers, bf16 = make_optimizers(model, OptimizationArguments(optim=optim)), variant == "bf16"
        torch.manual_seed(0)
        expected = {"loss": loss_of_step(model, inputs, bf16, "reference").detach()}
        clip = partial(clip_gradients, list(model.parameters()), 1.0)
        step = partial(take_step, partial(loss_of_step, model, inputs, bf16), optimizers, clip)
        implementations.append(Implementation(softmax, step, expected))
    return Contest("pretraining", name, int(inputs["attention_mask"].sum()), "tokens", implementations)
