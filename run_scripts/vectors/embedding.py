"""Vectors of many sentences with an ELMo model, in batches of similar length."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import modeling_elmo  # noqa: F401 (makes ELMo known to the Auto classes)
from modeling_elmo.run_scripts.program.files import TextArguments, open_dataset, read_file
from modeling_elmo.run_scripts.vectors.outputs import Block, Line, Parts, find_writer

logger = logging.get_logger(__name__)

LINES_READ_AHEAD = 64  # tokenized in one call

BATCHES_PER_BLOCK = 4  # sorted by length together; more sorts better, needs more memory, loses more when interrupted

Layers = Literal["all", "top", "average", "mixed"]

Pooling = Literal["none", "mean", "max"]

StoredType = Literal["float32", "float16"]


@dataclass(kw_only=True)
class EmbedArguments(TextArguments):
    model: str = field(metadata={"help": "Folder or Hub name of any ELMo model."})
    output: str = field(metadata={"help": "New file: .hdf5, .h5, .npz, .parquet or .arrow."})
    input: str | None = field(
        default=None, metadata={"help": "UTF-8 file, a sentence a line: .txt or .jsonl, also with .gz or .zst behind."}
    )
    raw_text: bool = field(
        default=False,
        metadata={"help": "Text is split by the model's tokenizer; without this, at white space only."},
    )
    layers: Layers = field(
        default="all", metadata={"help": "All layers, the top one, their mean, or the mix that the model has learned."}
    )
    pooling: Pooling = field(
        default="none", metadata={"help": "One vector a sentence: the mean or the maximum over its words."}
    )
    dtype: StoredType = field(
        default="float32", metadata={"help": "Type in the output. (Its formats have no bfloat16.)"}
    )
    compute_dtype: Literal["float32", "bfloat16"] = field(
        default="float32", metadata={"help": "Type in which the model computes."}
    )
    batch_tokens: int = field(default=4096, metadata={"help": "Tokens of a batch, markers and padding included."})
    device: str | None = field(default=None, metadata={"help": "Default: cuda where there is one, else cpu."})
    forget_sentences: bool = field(
        default=False, metadata={"help": "Leave `sentence_to_index`, which holds the whole text, out of HDF5."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})


class Encoded(NamedTuple):
    """A line, its tokens without markers, and what the model reads, not padded yet."""

    line: Line
    tokens: list[str]
    features: dict[str, Any]

    @property
    def length(self) -> int:
        return len(self.features["input_ids"])


def embed_corpus(arguments: EmbedArguments) -> Path:
    """What the command does; returns the path of the output."""
    output, write = Path(arguments.output), find_writer(arguments.output)
    choices = {name: getattr(arguments, name) for name in ("layers", "pooling", "dtype")}
    check_choices(**choices)
    lines, total = open_corpus(arguments)
    model, tokenizer = load_model(
        arguments.model, arguments.device, arguments.trust_remote_code, getattr(torch, arguments.compute_dtype)
    )
    if arguments.layers == "mixed" and not is_trained(model.scalar_mix):
        logger.warning(f"The mix of {arguments.model} was never trained: it is the average of the layers.")
    settings = {"raw_text": arguments.raw_text, "compute_dtype": arguments.compute_dtype, "weights": checksum(model)}
    parts = Parts(output, {**choices, **settings})
    blocks = embed_blocks(parts.skip_finished(lines), model, tokenizer, batch_tokens=arguments.batch_tokens, **choices)
    with tqdm(total=total, initial=parts.num_lines, unit=" lines", desc=output.name) as progress:
        for block in blocks:
            parts.save(block)
            progress.update(len(block.lines))
    if not parts.num_lines:
        raise ValueError(f"{arguments.input or arguments.dataset} holds no line, so there is nothing to embed.")
    parts.put_together(write, keep_sentences=not arguments.forget_sentences)
    return output


def embed_sentences(
    sentences: Iterable[str | Sequence[str]],
    model,
    tokenizer,
    layers: Layers = "mixed",
    pooling: Pooling = "none",
    dtype: StoredType = "float32",
    batch_tokens: int = 4096,
) -> Iterator[tuple[list[str], np.ndarray]]:
    """The tokens and the vectors of each sentence, in order. Reads a bounded number of sentences ahead.

    Args:
        sentences: texts, which the tokenizer splits, or lists of words, which stay as they are.
        model, tokenizer: an `ELMoModel` and its `ELMoTokenizer`.
        layers, pooling, dtype, batch_tokens: as for the command; shapes are at the top of this file.
    """
    check_choices(layers, pooling, dtype)
    lines = (Line(item, None) if isinstance(item, str) else Line(" ".join(item), list(item)) for item in sentences)
    for block in embed_blocks(lines, model, tokenizer, layers, pooling, dtype, batch_tokens):
        yield from zip(block.tokens, block.vectors(), strict=True)


def check_choices(layers: str, pooling: str, dtype: str):
    for name, value, allowed in (
        ("layers", layers, Layers),
        ("pooling", pooling, Pooling),
        ("dtype", dtype, StoredType),
    ):
        if value not in get_args(allowed):
            raise ValueError(f"{name} is {value!r}; pass one of {', '.join(get_args(allowed))}.")


def embed_blocks(
    lines: Iterable[Line], model, tokenizer, layers: Layers, pooling: Pooling, dtype: StoredType, batch_tokens: int
) -> Iterator[Block]:
    """Embeds consecutive lines, some batches at a time."""
    mix, dim = model.scalar_mix, model.config.hidden_size
    if layers == "mixed" and mix is None:
        raise ValueError("This model has no mix of its layers; instead of 'mixed' pass 'all', 'top' or 'average'.")
    shape = (dim,) if pooling != "none" else (-1, dim)
    shape = (model.config.num_hidden_layers + 1, *shape) if layers == "all" else shape
    block_tokens = BATCHES_PER_BLOCK * batch_tokens
    if layers == "mixed" and mix.layer_norm in ("allennlp", "bilm"):
        logger.warning("`scalar_mix_layer_norm` of this model is over a batch, so every line becomes a batch: slow.")
        batch_tokens = 1
    for encoded in _groups_of_tokens(encode(lines, tokenizer), block_tokens):
        block = Block.empty([item.line for item in encoded], [item.tokens for item in encoded], shape, dtype)
        try:
            with np.errstate(over="raise"):
                _fill(block.vectors(), encoded, model, tokenizer, layers, pooling, batch_tokens)
        except FloatingPointError as error:
            raise ValueError("A vector is too large for float16; pass dtype float32.") from error
        yield block


def encode(lines: Iterable[Line], tokenizer) -> Iterator[Encoded]:
    lines = iter(lines)
    while ahead := list(islice(lines, LINES_READ_AHEAD)):
        for given_words, group in groupby(ahead, key=lambda line: line.words is not None):
            run = list(group)
            texts = [line.words if given_words else line.text for line in run]
            encoding = tokenizer(texts, is_split_into_words=given_words, return_offsets_mapping=not given_words)
            offsets = encoding.pop("offset_mapping", None)
            for i, line in enumerate(run):
                tokens = line.words if given_words else [line.text[start:end] for start, end in offsets[i][1:-1]]
                yield Encoded(line, tokens, {name: values[i] for name, values in encoding.items()})


def _groups_of_tokens(items: Iterable[Encoded], num_tokens: int) -> Iterator[list[Encoded]]:
    group, size = [], 0
    for item in items:
        group.append(item)
        size += item.length
        if size >= num_tokens:
            yield group
            group, size = [], 0
    if group:
        yield group


@torch.inference_mode()
def _fill(vectors: list[np.ndarray], encoded: list[Encoded], model, tokenizer, layers, pooling, batch_tokens: int):
    for batch in length_sorted_batches([item.length for item in encoded], batch_tokens):
        features = [encoded[i].features for i in batch]
        inputs = tokenizer.pad(features, padding_side="right", return_tensors="pt").to(model.device)
        chosen = _choose(model(**inputs), layers).float().cpu().numpy()
        for i, line in zip(batch, chosen, strict=True):
            vectors[i][...] = _pool(line[..., 1 : encoded[i].length - 1, :], pooling)


def length_sorted_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices by falling length, in groups of at most `batch_tokens` with padding, or of one index."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _choose(output, layers: Layers) -> torch.Tensor:
    """Shape: `(batch, time, dim)`, for `"all"` `(batch, layers, time, dim)`."""
    if layers == "all":
        return torch.stack(output.hidden_states, dim=1)
    if layers == "average":
        return sum(output.hidden_states) / len(output.hidden_states)
    return output.last_hidden_state if layers == "top" else output.elmo_embeddings


def _pool(vectors: np.ndarray, pooling: Pooling) -> np.ndarray:
    if pooling == "none":
        return vectors
    if vectors.shape[-2] == 0:
        return np.zeros_like(vectors, shape=(*vectors.shape[:-2], vectors.shape[-1]))
    return vectors.mean(-2) if pooling == "mean" else vectors.max(-2)


def load_model(
    name: str, device: str | None = None, trust_remote_code: bool = False, dtype: torch.dtype = torch.float32
):
    """The model of the option `--model` on its device, and its tokenizer.

    Raises:
        FileNotFoundError, ValueError: it is no ELMo model, or not all of one.
    """
    if Path(name).is_dir() and not Path(name, "config.json").is_file():
        raise FileNotFoundError(f"--model {name} has no config.json; an original checkpoint must be converted first.")
    trust = {"trust_remote_code": trust_remote_code}
    model, loading = AutoModel.from_pretrained(name, dtype=dtype, output_loading_info=True, **trust)
    if model.config.model_type != "elmo":
        raise ValueError(f"--model {name} is a {model.config.model_type!r} model; pass an ELMo model.")
    if absent := sorted(key for key in loading["missing_keys"] if not key.startswith("scalar_mix.")):
        raise ValueError(f"--model {name} lacks weights: {', '.join(absent)}. Convert or train it first.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return model.eval().to(device), AutoTokenizer.from_pretrained(name, **trust)


def is_trained(mix) -> bool:
    return mix.mode != "learned" or bool(mix.weights.any() or (mix.gamma != 1).any())


def checksum(model) -> int:
    """Of the weights: vectors of two models must not end up in one output."""
    value = 0
    for tensor in model.state_dict().values():
        value = zlib.crc32(tensor.flatten().view(torch.uint8).cpu().numpy(), value)
    return value


def open_corpus(arguments: EmbedArguments) -> tuple[Iterator[Line], int | None]:
    """The lines, read one by one as they are asked for, and how many they are if that is known."""
    if arguments.dataset is not None and arguments.input is None:
        places, total = open_dataset(arguments)
        return (as_line(where, value, arguments) for where, value in places), total
    if arguments.input is None or arguments.dataset is not None:
        raise ValueError("Pass either --input FILE or --dataset NAME.")
    path = Path(arguments.input)
    kind = path.with_suffix("").suffix if path.suffix in (".gz", ".zst") else path.suffix
    if kind not in (".txt", ".jsonl") and path.suffix == kind or kind in (".json", ".csv", ".tsv"):
        raise ValueError(f"--input {path}: unknown suffix {kind!r}; pass a .txt, .jsonl, .gz or .zst file.")
    if not path.is_file():
        raise FileNotFoundError(f"--input {path}: there is no such file.")

    def lines() -> Iterator[Line]:
        return (as_line(where, value, arguments) for where, value in read_file(path, arguments.text_column))

    # One look at the whole file: a mistake in the last line shows now, not after hours.
    total = sum(1 for _ in lines())
    return lines(), total


def as_line(where: str, value: Any, arguments: EmbedArguments) -> Line:
    if isinstance(value, str):
        text = value.strip()
        return Line(text, None if arguments.raw_text else text.split())
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return Line(" ".join(value), value)
    raise ValueError(f"{where}: the sentence is {value!r}; it must be a text or a list of words.")
