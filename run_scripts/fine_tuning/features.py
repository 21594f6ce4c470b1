"""The layers of a frozen biLM for the texts of a task, computed once and reused over epochs, seeds and arms.

They lie in one file that is mapped into memory, not read: it may be larger than the memory.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers.utils import logging

from modeling_elmo import ELMoModel

Example = dict[str, Any]
# Fields of the configuration that change what the same weights compute.
COMPUTATION = (
    *("char_cnn_activation", "char_cnn_filters", "max_word_length", "num_highway_layers", "num_hidden_layers"),
    *("cell_clip", "projection_clip", "forget_bias", "use_skip_connections"),
)


# Columns of encoded data that no head reads, and its labels, of which the biLM knows nothing.
NO_INPUTS = ("text_number", "example_number", "offset_mapping")
LABELS = ("labels", "start_positions", "end_positions")


class Texts(NamedTuple):
    """The different texts that rows of one or two consist of: the biLM reads each for itself.

    Args:
        of_rows: numbers of the texts of each row, in order.
        places: where each text is found first: row, first token, token after the last.
        digests: of what the biLM reads of each.
    """

    of_rows: list[list[int]]
    places: list[tuple[int, int, int]]
    digests: list[bytes]


def texts_of(rows: Dataset, reads_words: bool) -> Texts:
    """Args: rows: encodings; reads_words: whether the biLM reads `input_ids`."""
    names = {"character_ids", "token_type_ids", "attention_mask"} | ({"input_ids"} if reads_words else set())
    numbers: dict[bytes, int] = {}
    texts = Texts([], [], [])
    for row, example in enumerate(rows.select_columns(sorted(names & {*rows.column_names}))):
        example = {name: np.asarray(values, dtype=np.int32) for name, values in example.items()}
        types = example.pop("token_type_ids", np.zeros(len(example["attention_mask"])))
        bounds = [0, *(np.flatnonzero(np.diff(types)) + 1).tolist(), len(types)]
        texts.of_rows.append([])
        for first, end in pairwise(bounds):
            digest = hashlib.blake2b(digest_size=12)
            for name in sorted(example):
                digest.update(_trimmed(example[name][first:end]).tobytes())
            number = numbers.setdefault(digest.digest(), len(numbers))
            if number == len(texts.places):
                texts.places.append((row, first, end))
                texts.digests.append(digest.digest())
            texts.of_rows[-1].append(number)
    return texts


def _trimmed(ids: np.ndarray) -> np.ndarray:
    """Characters without the columns at their end that are the same in all words: padding, whose number depends on the
    longest word of the row. Each word has one end, so that no two texts become the same."""
    if ids.ndim == 1:
        return ids
    different = np.flatnonzero((ids != ids[:1]).any(0))
    return ids[:, : different[-1] + 1] if len(different) else ids[:, :0]


class FeatureStore:
    """Layers of numbered rows: `store[n]` is `(tokens, layers + 1, 2 * projection_size)`, float32.

    Args:
        path: the file.
        texts: of the rows.
        shape: layers and width of a token.
        mode: `"r"` to read, `"w+"` to make the file.
    """

    def __init__(self, path: Path, texts: Texts, shape: tuple[int, int], mode: str = "r"):
        self.of_rows = texts.of_rows
        self.starts = np.cumsum([0, *(end - first for _, first, end in texts.places)])
        size = (int(self.starts[-1]), *shape)
        if mode != "r":
            _reserve(path, 4 * int(np.prod(size)))
        self.layers = np.memmap(path, np.float32, "r" if mode == "r" else "r+", shape=size)

    def __getitem__(self, row: int) -> np.ndarray:
        return np.concatenate([self.text(number) for number in self.of_rows[row]])

    def text(self, number: int) -> np.ndarray:
        return self.layers[self.starts[number] : self.starts[number + 1]]


def feature_store(
    folder: Path, model: ELMoModel, rows: Dataset, collate: Callable[[list[Example]], Any], batch_tokens: int = 2048
) -> FeatureStore:
    """Layers of all rows, from the file in `folder` if their texts went through this model before.

    A text that occurs in several rows, such as the context of several questions, is computed and kept once.

    Args:
        rows: their encodings.
        collate: makes a batch of examples.
        batch_tokens: tokens of a batch, padding included.
    """
    texts = texts_of(rows, reads_words=model.word_embeddings is not None)
    shape = (model.config.num_hidden_layers + 1, model.config.hidden_size)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_fingerprint(model, texts)}.float32"
    if not path.exists():
        part = path.with_suffix(f".part-{os.getpid()}")
        try:
            _compute(FeatureStore(part, texts, shape, mode="w+"), model, rows, texts, collate, batch_tokens)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return FeatureStore(path, texts, shape)


class FeatureCollator:
    """A stock collator that adds the stored layers of each row, whose number is its `text_number`."""

    def __init__(self, collate: Callable[[list[Example]], Any], store: FeatureStore | None):
        self.collate, self.store = collate, store

    def __call__(self, rows: list[Example]) -> Any:
        batch = self.collate([{name: row[name] for name in row if name not in NO_INPUTS} for row in rows])
        if self.store is None:
            return batch
        mask = batch["attention_mask"].bool()
        layers = torch.zeros(*mask.shape, *self.store.layers.shape[1:])
        for place, row in enumerate(rows):
            layers[place, mask[place]] = torch.from_numpy(self.store[row["text_number"]])
        batch["elmo_hidden_states"] = layers.transpose(1, 2)
        return batch


@torch.no_grad()
def _compute(store: FeatureStore, model: ELMoModel, rows: Dataset, texts: Texts, collate, batch_tokens: int):
    model.eval()
    rows = rows.select_columns([name for name in rows.column_names if name not in (*NO_INPUTS, *LABELS)])

    def text(number: int) -> Example:
        row, first, end = texts.places[number]
        example = {name: values[first:end] for name, values in rows[row].items()}
        return example | ({"token_type_ids": [0] * (end - first)} if "token_type_ids" in example else {})

    lengths = [end - first for _, first, end in texts.places]
    for numbers in logging.tqdm(_batches(lengths, batch_tokens), desc="Computing the biLM's layers", unit="batch"):
        inputs = collate([text(number) for number in numbers]).to(model.device)
        layers = torch.stack(model(**inputs).hidden_states, dim=2).float().cpu()
        for number, found, mask in zip(numbers, layers, inputs["attention_mask"].bool().cpu(), strict=True):
            store.text(number)[:] = found[mask].numpy()
    store.layers.flush()


def _batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Numbers of texts of like length, the longest first: what does not fit into memory fails at once."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > batch_tokens:
            batches.append([])
        batches[-1].append(number)
    return batches


def _fingerprint(model: ELMoModel, texts: Texts) -> str:
    """Of the model and of the texts: another one has another file."""
    digest = hashlib.blake2b(digest_size=12)
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith("scalar_mix."):
            digest.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    digest.update(json.dumps({name: getattr(model.config, name) for name in COMPUTATION}).encode())
    for text in texts.digests:
        digest.update(text)
    return digest.hexdigest()


def _reserve(path: Path, size: int):
    """Makes a file of this size: without the room for it, a mapped file would end the process at some later write."""
    with path.open("wb") as file:
        if not (hasattr(os, "posix_fallocate") and size):
            file.truncate(size)
            return
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            message = f"{error.strerror}: the biLM's layers need {size / 2**30:.2f} GiB; leave out --cache_features"
            raise OSError(error.errno, message, str(path)) from error
