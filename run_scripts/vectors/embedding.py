"""Vectors of many sentences, in batches of similar length."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
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
# MPS copies in the background from memory that may be freed before (pytorch issue 139550).
WITHOUT_EVENTS = ("cpu", "mps")


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
        TypeError: `sentences` is one text, or has something else than texts and lists of words; or the model is a head
            or a language model.
        ValueError: the model is in training mode.

    Shape:
        vectors: `(tokens, dim)`, with a pooling `(dim,)`; with `layers="all"` one more dimension in front, `layers`.
    """
    check_choice("layers", layers, LayerChoice)
    check_choice("pooling", pooling, PoolingChoice)
    check_choice("dtype", dtype, StoredDtype)
    if not hasattr(model, "scalar_mix"):
        raise TypeError(f"The model is an {type(model).__name__}; pass its biLM, `model.base_model`.")
    if model.training:
        raise ValueError("The model is in training mode, with dropout; call `model.eval()` first.")
    lines = (to_line("", sentence, True, "word") for sentence in checked_sentences(sentences))
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens}; pass a number of at least 1.")
    groups = group_by_tokens(lines, BATCHES_PER_BLOCK * batch_tokens)
    if layers == "mixed":
        batch_tokens = reproducible_batch_tokens(model, batch_tokens)
    for group in groups:
        encoded = encode_block(group, tokenizer, batch_tokens)
        block = finish_block(compute_block(encoded, model, layers), pooling, dtype)
        for words, vectors in zip(block.tokens, block.vectors, strict=True):
            yield words, np.stack(vectors) if layers == "all" else vectors[0].copy()


def check_choice(name: str, value: str, choices: Any):
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; pass one of {', '.join(allowed)}.")


class EncodedBlock(NamedTuple):
    """Consecutive lines as the model reads them: the lines of each batch, by index, and its padded inputs."""

    lines: list[InputLine]
    tokens: list[list[str]]
    batches: list[tuple[list[int], Any]]


class ComputedBlock(NamedTuple):
    """What a model returned for a block, and the event after which the values are there, if a device computes them.

    Shape:
        layers: for each batch the chosen layers, each `(batch, time, dim)`, on the CPU.
    """

    block: EncodedBlock
    layers: list[list[Tensor]]
    states: tuple[Tensor, ...]
    is_there: torch.Event | None


def encode_block(lines: list[InputLine], tokenizer, batch_tokens: int | None) -> EncodedBlock:
    """The host's part of the work, which needs no model.

    Args:
        batch_tokens: `None` if the lines are one batch, in their order.
    """
    tokens, inputs = encode_lines(lines, tokenizer)
    batches = [list(range(len(lines)))]
    if batch_tokens is not None:
        lengths = [len(encoding["input_ids"]) for encoding in inputs]
        batches = list(length_sorted_batches(lengths, batch_tokens))
    padded = []
    for batch in batches:
        rows = [inputs[i] for i in batch]
        padded.append((batch, tokenizer.pad(rows, padding_side="right", return_tensors="pt")))
    return EncodedBlock(lines, tokens, padded)


@torch.no_grad()
def compute_block(
    block: EncodedBlock, model, layers: LayerChoice, states: tuple[Tensor, ...] | None = None
) -> ComputedBlock:
    """Runs the model on all batches. An accelerator is only told to: the host does not wait for it.

    Args:
        states: what the block before left, `()` at first. Then the block is one batch, whose rows continue its rows.
    """
    found = []
    for rows, inputs in block.batches:
        output = model(**inputs, initial_states=rows_of(states or (), len(rows)))  # it moves ids that it needs
        found.append([to_host(layer.float()) for layer in chosen_layers(output, layers)])
    is_there = None
    if model.device.type not in WITHOUT_EVENTS:
        is_there = torch.Event(device=model.device)
        is_there.record()
    after = () if states is None else states_after(states, output.final_states)
    return ComputedBlock(block, found, after, is_there)


def to_host(tensor: Tensor) -> Tensor:
    """A tensor on the CPU: at once, or from a device into pinned memory, where it is when an event later says so."""
    return tensor.to("cpu", non_blocking=tensor.device.type not in WITHOUT_EVENTS)


def finish_block(computed: ComputedBlock, pooling: PoolingChoice, dtype: StoredDtype) -> VectorBlock:
    """Waits for the device, and takes the vectors of each line out of its batch."""
    if computed.is_there is not None:
        computed.is_there.synchronize()
    lines, tokens, batches = computed.block
    vectors: list[list[np.ndarray]] = [[]] * len(lines)
    for (batch, _), layers in zip(batches, computed.layers, strict=True):
        arrays = [layer.numpy() for layer in layers]
        for row, i in enumerate(batch):
            of_words = slice(1, 1 + len(tokens[i]))  # without the markers
            with np.errstate(over="ignore"):  # it is refused below
                vectors[i] = [pool_words(array[row, of_words], pooling).astype(dtype, copy=False) for array in arrays]
            if not all(np.isfinite(array).all() for array in vectors[i]):
                reason = f"Vectors of {lines[i].text!r:.80} are too large for {dtype}, or not numbers"
                raise ValueError(f"{reason}; pass dtype float32, or another model.")
    return VectorBlock(lines, tokens, vectors, computed.states)


def states_after(before: tuple[Tensor, ...], final_states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The final states of the rows of a batch, and the states of further rows that a larger batch before had."""
    ends = tuple(state.cpu() for state in final_states)
    if not before:
        return ends
    states = []
    for state, end in zip(before, ends, strict=True):
        further_rows = state[len(end) :]
        states.append(torch.cat([end, further_rows]))
    return tuple(states)


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
    rows = []
    for state in states:
        missing = state.new_zeros(max(0, number - len(state)), *state.shape[1:])
        rows.append(torch.cat([state[:number], missing]))
    return tuple(rows) or None


def encode_lines(lines: list[InputLine], tokenizer) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """The tokens of each line without markers, and its unpadded inputs for the model."""
    tokens = []
    inputs = []
    for given_words, group in groupby(lines, key=lambda line: line.words is not None):
        run = list(group)
        texts = [line.sentence for line in run]
        encoding = tokenizer(texts, is_split_into_words=given_words, return_offsets_mapping=not given_words)
        offsets = encoding.pop("offset_mapping", None)
        for i, line in enumerate(run):
            words = line.words
            if words is None:
                words = [line.text[start:end] for start, end in offsets[i][1:-1]]
            tokens.append(words)
            inputs.append({name: values[i] for name, values in encoding.items()})
    return tokens, inputs


def chosen_layers(output, layers: LayerChoice) -> Sequence[Tensor]:
    """All layers, or one: each `(batch, time, dim)`."""
    if layers == "all":
        return output.hidden_states
    if layers == "top":
        return [output.last_hidden_state]
    if layers == "mixed":
        return [output.elmo_embeddings]
    total = sum(output.hidden_states)
    if layers == "average":
        total /= len(output.hidden_states)
    return [total]


def pool_words(vectors: np.ndarray, pooling: PoolingChoice) -> np.ndarray:
    if pooling == "none":
        return vectors
    if vectors.shape[-2] == 0:
        return vectors.sum(-2)  # zeros
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
    is_int8 = compute_dtype == "int8"
    if is_int8:
        device = device or "cpu"
        if torch.device(device).type != "cpu":
            raise ValueError(f"--compute_dtype int8 is for CPUs, not for --device {device}; pass bfloat16.")
    place = local_device(device)
    dtype = torch.float32
    if compute_dtype == "bfloat16" and computes_bfloat16(place.type, "--compute_dtype bfloat16"):
        dtype = torch.bfloat16
    model = load_pretrained(auto_class, name, dtype=dtype, trust_remote_code=trust_remote_code, **config)
    if is_int8:
        model = model.quantize()
    tokenizer = load_pretrained(AutoTokenizer, name, trust_remote_code=trust_remote_code)
    return model.eval().to(place), tokenizer
