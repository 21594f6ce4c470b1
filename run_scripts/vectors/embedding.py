"""Vectors of many sentences, in batches of similar length."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import modeling_elmo  # noqa: F401 (registers ELMo with the Auto classes)
from modeling_elmo.inputs import warn_once
from modeling_elmo.tokenization.elmo_characters import checked_sentences

from ..program.models import check_model, load_pretrained
from ..program.processes import computes_bfloat16, local_device
from .lines import InputLine, group_by_tokens, length_sorted_batches, to_line
from .outputs import VectorBlock

BATCHES_PER_BLOCK = 4  # sorted by length together; more need more memory, and an interruption loses more

LayerChoice = Literal["all", "top", "average", "sum", "mixed"]
PoolingChoice = Literal["none", "mean", "max"]
StoredDtype = Literal["float32", "float16"]  # the output formats have no bfloat16


def embed_sentences(
    sentences: Iterable[str | Sequence[str]],
    model,
    tokenizer,
    layers: LayerChoice = "mixed",
    pooling: PoolingChoice = "none",
    dtype: StoredDtype = "float32",
    batch_tokens: int = 4096,
) -> Iterator[tuple[list[str], np.ndarray]]:
    """Yields the tokens and the vectors of each sentence, in order. Reads a bounded number of sentences ahead.

    Args:
        sentences: texts, which the tokenizer splits, or lists of words, which are not changed.
        model, tokenizer: an `ELMoModel` and its `ELMoTokenizer`.
        layers, pooling, dtype, batch_tokens: as for `elmo embed`.

    Raises:
        TypeError: `sentences` is one text, or has something else than texts and lists of words.

    Shape:
        vectors: `(tokens, dim)`, with a pooling `(dim,)`; with `layers="all"` one more dimension in front, `layers`.
    """
    choices = (("layers", layers, LayerChoice), ("pooling", pooling, PoolingChoice), ("dtype", dtype, StoredDtype))
    for name, value, allowed in choices:
        if value not in get_args(allowed):
            raise ValueError(f"{name} is {value!r}; pass one of {', '.join(get_args(allowed))}.")
    lines = (to_line("", each, True, "word") for each in checked_sentences(sentences))
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens}; pass a number of at least 1.")
    for group in group_by_tokens(lines, BATCHES_PER_BLOCK * batch_tokens):
        block = embed_block(group, model, tokenizer, layers, pooling, dtype, batch_tokens)
        yield from zip(block.tokens, block.vectors, strict=True)


@torch.inference_mode()
def embed_block(
    lines: list[InputLine],
    model,
    tokenizer,
    layers: LayerChoice,
    pooling: PoolingChoice,
    dtype: StoredDtype,
    batch_tokens: int,
    states: tuple[Tensor, ...] | None = None,
) -> VectorBlock:
    """The vectors of some lines.

    Args:
        states: what the block before left, `()` at first. Then the lines are one batch, whose rows continue its rows.
    """
    if layers == "mixed" and states is None:
        batch_tokens = reproducible_batch_tokens(model, batch_tokens)
    tokens, inputs = encode_lines(lines, tokenizer)
    lengths = [len(each["input_ids"]) for each in inputs]
    vectors = [np.empty(0)] * len(lines)
    in_order = [range(len(lines))]
    for batch in length_sorted_batches(lengths, batch_tokens) if states is None else in_order:
        padded = tokenizer.pad([inputs[i] for i in batch], padding_side="right", return_tensors="pt")
        output = model(**padded.to(model.device), initial_states=rows_of(states or (), len(batch)))
        chosen = chosen_layers(output, layers).float().cpu().numpy()
        for i, found in zip(batch, chosen, strict=True):
            with np.errstate(over="ignore"):  # it is refused below
                vectors[i] = pool_words(found[..., 1 : lengths[i] - 1, :], pooling).astype(dtype)
            if not np.isfinite(vectors[i]).all():
                found = f"Vectors of {lines[i].text!r:.80} are too large for {dtype}, or not numbers"
                raise ValueError(f"{found}; pass dtype float32, or another model.")
    if states is not None:
        ends = tuple(state.cpu() for state in output.final_states)
        rest = (state[len(lines) :] for state in states or ends)
        states = tuple(map(torch.cat, zip(ends, rest, strict=True)))
    return VectorBlock(lines, tokens, vectors, states or ())


def reproducible_batch_tokens(model, batch_tokens: int) -> int:
    """The tokens of a batch whose mixed vectors depend on nothing but their sentences."""
    if (mix := model.scalar_mix) is None:
        raise ValueError("This model has no mix of its layers; pass other layers: 'all', 'top', 'average' or 'sum'.")
    if mix.layer_norm not in ("allennlp", "bilm"):
        return batch_tokens
    warn_once(model, "`scalar_mix_layer_norm` of this model is over a batch, so each line is one: this is slow.")
    return 1


def rows_of(states: tuple[Tensor, ...], number: int) -> tuple[Tensor, ...] | None:
    """The states of the first rows, `(number, ...)`; zeros where there were fewer rows."""
    padded = (F.pad(state[:number], (0, 0) * (state.dim() - 1) + (0, max(0, number - len(state)))) for state in states)
    return tuple(padded) or None


def encode_lines(lines: list[InputLine], tokenizer) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """The tokens of each line without markers, and its unpadded inputs for the model."""
    tokens, inputs = [], []
    for given_words, group in groupby(lines, key=lambda line: line.words is not None):
        run = list(group)
        texts = [line.sentence for line in run]
        encoding = tokenizer(texts, is_split_into_words=given_words, return_offsets_mapping=not given_words)
        offsets = encoding.pop("offset_mapping", [[]] * len(run))
        for i, line in enumerate(run):
            tokens.append(line.words or [line.text[start:end] for start, end in offsets[i][1:-1]])
            inputs.append({name: values[i] for name, values in encoding.items()})
    return tokens, inputs


def chosen_layers(output, layers: LayerChoice) -> Tensor:
    """Shape: `(batch, time, dim)`, for `"all"` `(batch, layers, time, dim)`."""
    if layers == "all":
        return torch.stack(output.hidden_states, dim=1)
    if layers in ("sum", "average"):
        return sum(output.hidden_states) / (len(output.hidden_states) if layers == "average" else 1)
    return output.last_hidden_state if layers == "top" else output.elmo_embeddings


def pool_words(vectors: np.ndarray, pooling: PoolingChoice) -> np.ndarray:
    if pooling == "none":
        return vectors
    if vectors.shape[-2] == 0:
        return np.zeros_like(vectors, shape=(*vectors.shape[:-2], vectors.shape[-1]))
    return vectors.mean(-2) if pooling == "mean" else vectors.max(-2)


def load_model_and_tokenizer(
    name: str,
    device: str | None = None,
    trust_remote_code: bool = False,
    compute_dtype: str = "float32",
    auto_class: Any = AutoModel,
    **config: Any,
):
    """The model of `--model` on its device, in eval mode, and its tokenizer. 8 bits are for CPUs: their default device.

    Args:
        config: options to change in its configuration.

    Raises:
        FileNotFoundError, ValueError: the folder has no ELMo model, or its weights are incomplete.
    """
    check_model(name)
    int8 = compute_dtype == "int8"
    if int8 and torch.device(device or "cpu").type != "cpu":
        raise ValueError(f"--compute_dtype int8 is for CPUs, not for --device {device}; pass bfloat16.")
    place = local_device(device or ("cpu" if int8 else None))
    trust = {"trust_remote_code": trust_remote_code}
    is_float32 = int8 or (compute_dtype == "bfloat16" and not computes_bfloat16(place.type, "--compute_dtype bfloat16"))
    dtype = torch.float32 if is_float32 else getattr(torch, compute_dtype)
    model = load_pretrained(auto_class, name, dtype=dtype, **trust, **config)
    model = model.quantize() if int8 else model
    return model.eval().to(place), load_pretrained(AutoTokenizer, name, **trust)
