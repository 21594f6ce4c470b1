"""Vectors as columns of a table: what `datasets.map` and Ray Data's `map_batches` call in their workers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..program.processes import local_device, use_one_thread_if_forked
from .embedding import LayerChoice, PoolingChoice, StoredDtype, embed_sentences, load_model_and_tokenizer


class Embedder:
    """Adds the columns `tokens` and `vectors` to batches of rows.

        data.map(Embedder("elmo-tiny"), batched=True, num_proc=2)  # datasets
        data.map_batches(Embedder, fn_constructor_args=["elmo-tiny"], concurrency=2)  # Ray

    A worker loads the model at its first batch. An embedder is pickled without the model, before and after.

    Args:
        model: folder or Hub name of any ELMo model.
        column: has texts, which the tokenizer splits, or lists of words, which are not changed.
        layers, pooling, dtype, batch_tokens, device, trust_remote_code: as for `elmo embed`.

    Shape:
        vectors: as from `embed_sentences`.
    """

    def __init__(
        self,
        model: str,
        column: str = "text",
        layers: LayerChoice = "mixed",
        pooling: PoolingChoice = "none",
        dtype: StoredDtype = "float32",
        batch_tokens: int = 4096,
        device: str | None = None,
        trust_remote_code: bool = False,
    ):
        # A worker may have another working directory.
        folder = Path(model)
        self.model = str(folder.resolve()) if folder.is_dir() else model
        self.column, self.device, self.trust_remote_code = column, device, trust_remote_code
        self.choices: dict[str, Any] = dict(layers=layers, pooling=pooling, dtype=dtype, batch_tokens=batch_tokens)
        self._loaded: tuple[Any, Any] | None = None

    def __call__(self, batch: Mapping[str, Any], rank: int | None = None) -> dict[str, Any]:
        """The columns of a batch, and two more. `rank`, of `datasets.map(with_rank=True)`, chooses the CUDA device."""
        if self.column not in batch:
            raise ValueError(f"The rows have no column {self.column!r} but {list(batch)}; pass column=NAME.")
        if is_row(batch):
            raise ValueError(f"The column {self.column!r} has one row, not a batch; pass batched=True to map.")
        if self._loaded is None:
            use_one_thread_if_forked()
            device = str(local_device(self.device, rank))
            self._loaded = load_model_and_tokenizer(self.model, device, self.trust_remote_code)
        tokens_of_rows = []
        vectors_of_rows = []
        for tokens, vectors in embed_sentences(batch[self.column], *self._loaded, **self.choices):
            tokens_of_rows.append(tokens)
            vectors_of_rows.append(vectors)
        return {**batch, "tokens": tokens_of_rows, "vectors": vectors_of_rows}

    def __getstate__(self) -> dict[str, Any]:
        """Includes the times of the model's files: `datasets` caches the result for as long as this is the same."""
        files = []
        for path in sorted(Path(self.model).glob("*")):
            files.append((path.name, path.stat().st_mtime_ns))
        return {**vars(self), "_loaded": None, "files": files}


def is_row(batch: Mapping[str, Any]) -> bool:
    """Whether this is a row, as `datasets` gives it without `batched=True`. The columns of a batch are equally long."""
    kind = type(batch).__name__
    if kind in ("LazyRow", "LazyBatch"):  # of `datasets`; to look at columns that nobody reads may decode pictures
        return kind == "LazyRow"
    lengths = {number_of_rows(batch[column]) for column in batch}
    return None in lengths or len(lengths) > 1


def number_of_rows(values: Any) -> int | None:
    """The length of a column of a batch; `None` for another value."""
    if isinstance(values, (str, bytes, Mapping)):
        return None
    try:
        return len(values)
    except TypeError:
        return None
