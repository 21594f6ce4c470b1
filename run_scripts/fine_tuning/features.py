"""The layers of a frozen biLM for the texts of a task, computed once and reused for all epochs, seeds and arms.

They are kept in one file that is mapped into memory, so that it may be larger than the memory.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers.utils import logging

from modeling_elmo import ELMoModel
from modeling_elmo.conversion.files import staged

from ..program.files import digest
from ..vectors.embedding import length_sorted_batches

Example = dict[str, Any]
# Fields of the configuration that change the layers of a biLM with the same weights.
COMPUTATION_FIELDS = """
    char_cnn_activation char_cnn_filters max_word_length num_highway_layers num_hidden_layers cell_clip projection_clip
    forget_bias use_skip_connections
"""
BOOKKEEPING_COLUMNS = ("text_number", "example_number", "offset_mapping")  # of encodings; no head reads them
DIGEST_SIZE = 12  # bytes
TARGET_COLUMNS = ("labels", "start_positions", "end_positions")  # only the head reads them


class DistinctTexts(NamedTuple):
    """The distinct texts of rows that have one text or two; the biLM reads each text by itself."""

    of_rows: list[list[int]]  # numbers of the texts of each row, in order
    spans: list[tuple[int, int, int]]  # first occurrence of each text: row, first token, end
    digests: list[bytes]  # of each text, as the biLM reads it


def distinct_texts(rows: Dataset, reads_words: bool) -> DistinctTexts:
    """The distinct texts of encoded rows; `reads_words` says whether the biLM reads `input_ids`."""
    inputs = {"character_ids", "token_type_ids", "attention_mask"}
    if reads_words:
        inputs.add("input_ids")
    numbers: dict[bytes, int] = {}
    of_rows: list[list[int]] = []
    spans: list[tuple[int, int, int]] = []
    for row, example in enumerate(rows.select_columns(sorted(inputs & {*rows.column_names}))):
        example = {name: np.asarray(values, dtype=np.int32) for name, values in example.items()}
        types = example.pop("token_type_ids", np.zeros(len(example["attention_mask"])))
        changes = np.flatnonzero(np.diff(types)) + 1
        texts = []
        for first, end in pairwise([0, *changes.tolist(), len(types)]):
            parts = (_without_padding(values[first:end]).tobytes() for _, values in sorted(example.items()))
            key = bytes.fromhex(digest(parts, DIGEST_SIZE))
            number = numbers.setdefault(key, len(numbers))
            if number == len(spans):
                spans.append((row, first, end))
            texts.append(number)
        of_rows.append(texts)
    return DistinctTexts(of_rows, spans, list(numbers))


def _without_padding(ids: np.ndarray) -> np.ndarray:
    """Character ids without the last columns that are equal in all words.

    These are padding, whose width depends on the longest word of the row. Each word has an end marker, so that
    different texts stay different.
    """
    if ids.ndim == 1:
        return ids
    different = np.flatnonzero((ids != ids[:1]).any(0))
    width = different[-1] + 1 if len(different) else 0
    return ids[:, :width]


class FeatureStore:
    """The layers of numbered rows: `store[n]` has the shape `(tokens, layers + 1, 2 * projection_size)`, in float32."""

    def __init__(self, path: Path, texts: DistinctTexts, shape: tuple[int, int], is_new: bool = False):
        self.of_rows = texts.of_rows
        lengths = [end - first for _, first, end in texts.spans]
        self.starts = np.cumsum([0, *lengths])
        self.path = path.absolute()
        self.shape = (int(self.starts[-1]), *shape)
        self.mode: Literal["r", "r+"] = "r+" if is_new else "r"
        if is_new:
            _reserve(path, 4 * math.prod(self.shape))

    @cached_property
    def layers(self) -> np.memmap:
        return np.memmap(self.path, np.float32, self.mode, shape=self.shape)

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is not forked maps the file again: numpy would send all of its values.
        return {name: value for name, value in vars(self).items() if name != "layers"}

    def __getitem__(self, row: int) -> np.ndarray:
        return np.concatenate([self.text(number) for number in self.of_rows[row]])

    def text(self, number: int) -> np.ndarray:
        return self.layers[self.starts[number] : self.starts[number + 1]]


def feature_store(
    folder: Path, model: ELMoModel, rows: Dataset, collate: Callable[[list[Example]], Any], batch_tokens: int = 2048
) -> FeatureStore:
    """The layers of all rows, read from `folder` if this model has already computed them for the same texts.

    A text that occurs in several rows, such as the context of several questions, is computed and stored once.
    """
    texts = distinct_texts(rows, reads_words=model.word_embeddings is not None)
    shape = (model.config.num_hidden_layers + 1, model.config.hidden_size)
    path = folder / f"{_fingerprint(model, texts)}.float32"
    if not path.exists():
        with staged(path) as part:
            _compute(FeatureStore(part, texts, shape, is_new=True), model, rows, texts, collate, batch_tokens)
    return FeatureStore(path, texts, shape)


class FeatureCollator:
    """A stock collator that adds the stored layers of each row; without a store, the biLM computes them."""

    def __init__(self, collate: Callable[[list[Example]], Any], store: FeatureStore | None):
        self.collate, self.store = collate, store

    def __call__(self, rows: list[Example]) -> Any:
        inputs = []
        for row in rows:
            inputs.append({name: value for name, value in row.items() if name not in BOOKKEEPING_COLUMNS})
        batch = self.collate(inputs)
        if self.store is None:
            return batch
        token_mask = batch["attention_mask"].bool()
        layers = torch.zeros(*token_mask.shape, *self.store.shape[1:])
        for index, row in enumerate(rows):
            layers[index, token_mask[index]] = torch.from_numpy(self.store[row["text_number"]])
        batch["elmo_hidden_states"] = layers.transpose(1, 2)
        return batch


@torch.no_grad()
def _compute(store: FeatureStore, model: ELMoModel, rows: Dataset, texts: DistinctTexts, collate, batch_tokens: int):
    model.eval()
    rows = rows.remove_columns(sorted({*BOOKKEEPING_COLUMNS, *TARGET_COLUMNS} & {*rows.column_names}))

    def text(number: int) -> Example:
        row, first, end = texts.spans[number]
        example = {name: values[first:end] for name, values in rows[row].items()}
        if "token_type_ids" in example:
            example["token_type_ids"] = [0] * (end - first)
        return example

    lengths = [end - first for _, first, end in texts.spans]
    batches = list(length_sorted_batches(lengths, batch_tokens))  # a batch too large for the memory fails at once
    for numbers in logging.tqdm(batches, desc="Computing the biLM's layers", unit="batch"):
        inputs = collate([text(number) for number in numbers]).to(model.device)
        layers = torch.stack(model(**inputs).hidden_states, dim=2).float().cpu()
        for number, of_text, mask in zip(numbers, layers, inputs["attention_mask"].bool().cpu(), strict=True):
            store.text(number)[:] = of_text[mask].numpy()
    store.layers.flush()


def _fingerprint(model: ELMoModel, texts: DistinctTexts) -> str:
    """Digest of everything that the layers depend on; it names their file."""

    def contents() -> Iterator[bytes]:
        for name, tensor in sorted(model.state_dict().items()):
            if not name.startswith("scalar_mix."):
                yield name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        options = {name: getattr(model.config, name) for name in COMPUTATION_FIELDS.split()}
        yield json.dumps(options).encode()
        yield from texts.digests

    return digest(contents(), DIGEST_SIZE)


def _reserve(path: Path, size: int):
    """Makes a file with reserved disk space: writing to a mapped file on a full disk would kill the process."""
    with path.open("wb") as file:
        if not (hasattr(os, "posix_fallocate") and size):
            file.truncate(size)
            return
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            message = f"{error.strerror}: the biLM's layers need {size / 2**30:.2f} GiB; leave out --cache_features"
            raise OSError(error.errno, message, str(path)) from error
