"""The layers of a frozen biLM for the texts of a task, computed once and reused over epochs, seeds and arms.

They lie in one file that is mapped into memory, not read: it may be larger than the memory.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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


class FeatureStore:
    """Layers of numbered texts: `store[n]` is `(tokens, layers + 1, 2 * projection_size)`, float32.

    Args:
        path: the file.
        lengths: tokens of each text.
        shape: layers and width of a token.
        mode: `"r"` to read, `"w+"` to make the file.
    """

    def __init__(self, path: Path, lengths: Sequence[int], shape: tuple[int, int], mode: str = "r"):
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        size = (int(self.starts[-1]), *shape)
        if mode != "r":
            _reserve(path, 4 * int(np.prod(size)))
        self.layers = np.memmap(path, np.float32, "r" if mode == "r" else "r+", shape=size)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.layers[self.starts[number] : self.starts[number + 1]]


def feature_store(
    folder: Path, model: ELMoModel, texts: Dataset, collate: Callable[[list[Example]], Any], batch_tokens: int = 2048
) -> FeatureStore:
    """Layers of all texts, from the file in `folder` if these texts went through this model before.

    Args:
        texts: their encodings.
        collate: makes a batch of examples.
        batch_tokens: tokens of a batch, padding included.
    """
    lengths = [len(ids) for ids in texts["input_ids"]]
    shape = (model.config.num_hidden_layers + 1, model.config.hidden_size)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_fingerprint(model, texts)}.float32"
    if not path.exists():
        part = path.with_suffix(f".part-{os.getpid()}")
        try:
            _compute(
                FeatureStore(part, lengths, shape, mode="w+"), model, texts, collate, _batches(lengths, batch_tokens)
            )
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return FeatureStore(path, lengths, shape)


class FeatureCollator:
    """A stock collator that adds the stored layers of each example's text, whose number is its `text_number`."""

    def __init__(self, collate: Callable[[list[Example]], Any], store: FeatureStore | None):
        self.collate, self.store = collate, store

    def __call__(self, examples: list[Example]) -> Any:
        numbers = [example["text_number"] for example in examples]
        batch = self.collate(
            [{name: example[name] for name in example if name != "text_number"} for example in examples]
        )
        if self.store is None:
            return batch
        mask = batch["attention_mask"].bool()
        layers = torch.zeros(*mask.shape, *self.store.layers.shape[1:])
        for row, number in enumerate(numbers):
            layers[row, mask[row]] = torch.from_numpy(self.store[number].copy())
        batch["elmo_hidden_states"] = layers.transpose(1, 2)
        return batch


@torch.no_grad()
def _compute(store: FeatureStore, model: ELMoModel, texts: Dataset, collate, batches: list[list[int]]):
    model.eval()
    columns = [name for name in texts.column_names if name not in ("labels", "text_number")]
    texts = texts.select_columns(columns)
    for numbers in logging.tqdm(batches, desc="Computing the biLM's layers", unit="batch"):
        inputs = collate([texts[number] for number in numbers]).to(model.device)
        layers = torch.stack(model(**inputs).hidden_states, dim=2).float().cpu()
        for number, text, mask in zip(numbers, layers, inputs["attention_mask"].bool().cpu(), strict=True):
            store[number][:] = text[mask].numpy()
    store.layers.flush()


def _batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Numbers of texts of like length, the longest first: what does not fit into memory fails at once."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > batch_tokens:
            batches.append([])
        batches[-1].append(number)
    return batches


def _fingerprint(model: ELMoModel, texts: Dataset) -> str:
    """Of the model and of the texts: another one has another file."""
    digest = hashlib.blake2b(digest_size=12)
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith("scalar_mix."):
            digest.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    digest.update(json.dumps({name: getattr(model.config, name) for name in COMPUTATION}).encode())
    read = {"character_ids", "token_type_ids"} | ({"input_ids"} if model.word_embeddings is not None else set())
    for example in texts.select_columns(sorted(read & {*texts.column_names})).with_format("numpy"):
        for name in sorted(example):
            digest.update(np.ascontiguousarray(example[name], dtype=np.int32).tobytes())
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
