"""The output files of `elmo embed`, and the folder in which finished blocks wait for them.

| file | token vectors | sentence vectors (`--pooling`) |
|---|---|---|
| `.hdf5`, `.h5` | data sets "0", "1", ... | data set `sentence_vectors` |
| `.parquet` | rows with columns `text`, `tokens`, `vectors` | the same |

HDF5 has the layout of AllenNLP's `elmo` command: `sentence_to_index[0]` is a JSON object from each sentence to its
number as a string. Of equal sentences it has the last number. The whole text is in memory once, at the end. AllenNLP
refuses blank lines; here they have 0 tokens. `datasets.load_dataset("parquet", data_files=...)` reads Parquet.

The records of a FASTA file have names. HDF5 then has one data set for each record under its name, with `/` as `_`, also
with `--pooling`, and nothing else. Parquet has the names in one more column, `name`.

Neither format survives an interruption. So blocks of lines are saved in `OUTPUT.parts/`, and the output is assembled
from them at the end. The disk then holds the vectors twice for a moment.
"""

import hashlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm
from transformers.utils import logging

from modeling_elmo.run_scripts.program.files import require, sync_file, sync_folder
from modeling_elmo.run_scripts.vectors.fasta import hdf5_name
from modeling_elmo.run_scripts.vectors.lines import InputLine

logger = logging.get_logger(__name__)

PARTS = "*-*.npz"


@dataclass
class VectorBlock:
    """Consecutive lines and their vectors.

    Shape:
        flat: `(numbers,)`, the vectors of all lines, one after the other.
        shape: of one line, -1 for its tokens: `(-1, dim)`, `(layers, -1, dim)`, `(dim,)` or `(layers, dim)`.
    """

    lines: list[InputLine]
    tokens: list[list[str]]
    shape: tuple[int, ...]
    flat: np.ndarray

    @classmethod
    def empty(cls, lines: list[InputLine], tokens: list[list[str]], shape: tuple[int, ...], dtype: str):
        block = cls(lines, tokens, shape, np.empty(0, dtype))
        block.flat = np.empty(sum(block.sizes()), dtype)
        return block

    def sizes(self) -> list[int]:
        return [math.prod(len(words) if size == -1 else size for size in self.shape) for words in self.tokens]

    def vectors(self) -> list[np.ndarray]:
        """Views of `flat`, one for each line."""
        ends = np.cumsum(self.sizes())
        return [vectors.reshape(self.shape) for vectors in np.split(self.flat, ends[:-1])]


class PartsFolder:
    """The finished blocks of a run, as files `FIRST-END.npz` in `OUTPUT.parts/`, where a later run finds them.

    Each file is written under another name, reaches the disk and is renamed, so it is complete or missing. If a part is
    damaged nevertheless, the next run computes it and the parts after it again. A part holds a digest of all lines up
    to its end, so a run continues only with the same lines. settings.json marks a folder that a run can continue: it
    is written before the first part and removed before the parts are.

    Args:
        settings: options that the vectors depend on.
    """

    def __init__(self, output: Path, settings: dict[str, Any]):
        self.output, self.settings, self.folder = output, settings, parts_folder(output)
        self.settings_file = self.folder / "settings.json"
        if output.exists() and not self.settings_file.exists():
            raise FileExistsError(f"--output {output} exists; remove it or pass another file.")
        self.num_lines = 0
        self.files = list(self._intact_parts()) if self.settings_file.exists() else []
        self._digest = hashlib.sha256()

    @property
    def is_pooled(self) -> bool:
        return self.settings["pooling"] != "none"

    def _intact_parts(self) -> Iterator[Path]:
        for file in sorted(self.folder.glob(PARTS)):
            first, end = map(int, file.stem.split("-"))
            if first != self.num_lines or not is_intact(file):
                logger.warning(f"{file} is damaged, or a part before it is missing: computing from there on again.")
                return
            self.num_lines = end
            yield file

    def skip_finished(self, lines: Iterator[InputLine]) -> Iterator[InputLine]:
        """Returns the remaining lines, if the finished part has the settings and the lines of this run."""
        if self.files:
            self._check_settings(json.loads(self.settings_file.read_text()))
            self._update_digest(islice(lines, self.num_lines))
            if self._digest.hexdigest() != load_part(self.files[-1])[1]:
                raise ValueError(
                    f"The first {self.num_lines} lines differ from the input of the interrupted run. Pass the same "
                    f"input, or remove {self.folder} to start again."
                )
            self._remove_parts_but(self.files)
        return lines

    def save(self, block: VectorBlock):
        if not self.files:
            self._begin()
        self._update_digest(block.lines)
        about = {"lines": block.lines, "tokens": block.tokens, "shape": block.shape, "digest": self._digest.hexdigest()}
        end = self.num_lines + len(block.lines)
        path = self.folder / f"{self.num_lines:012}-{end:012}.npz"
        with self._replacing(path) as unfinished, unfinished.open("wb") as file:
            np.savez(file, flat=block.flat, about=np.frombuffer(json.dumps(about).encode(), np.uint8))
        self.files.append(path)
        self.num_lines = end

    def blocks(self) -> Iterator[tuple[int, VectorBlock]]:
        """The number of the first line of each block, and the block."""
        for file in tqdm(self.files, unit=" parts", desc=f"writing {self.output.name}"):
            yield int(file.stem.split("-")[0]), load_part(file)[0]

    def assemble(self, write_output: "OutputWriter", keep_sentences: bool):
        """Writes the output from all parts, then removes them."""
        with self._replacing(self.output) as unfinished:
            write_output(unfinished, self, keep_sentences)
        self.settings_file.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)  # Windows does not remove the lock of this run

    def _check_settings(self, before: dict[str, Any]):
        now = self.settings
        changed = [f"{name} {before.get(name)}, now {now[name]}" for name in now if before.get(name) != now[name]]
        if changed:
            raise ValueError(
                f"{self.folder} has other settings: {'; '.join(changed)}. Pass the same settings, or remove the folder "
                "to start again."
            )

    def _begin(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_parts_but([])  # of a run that was interrupted while it removed its parts
        with self._replacing(self.settings_file) as unfinished:
            unfinished.write_text(json.dumps(self.settings))

    def _remove_parts_but(self, kept: list[Path]):
        for file in {*self.folder.glob(PARTS)} - {*kept}:
            file.unlink()

    def _update_digest(self, lines: Iterable[InputLine]):
        for line in lines:
            self._digest.update(json.dumps(line).encode() + b"\n")

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[Path]:
        unfinished = self.folder / "unfinished"
        try:
            yield unfinished
            sync_file(unfinished)
            os.replace(unfinished, path)
            sync_folder(path.parent)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise OSError(
                f"{path} cannot be written: {error.strerror or error}. {self.num_lines:,} lines are finished; run the "
                "same command again to continue."
            ) from error


def parts_folder(output: Path) -> Path:
    return Path(f"{output}.parts")


def is_intact(file: Path) -> bool:
    """Whether the checksums of a part are right."""
    # Each of these was seen after single bytes had been changed.
    damages = (OSError, EOFError, NotImplementedError, RuntimeError, ValueError, zipfile.BadZipFile)
    try:
        with zipfile.ZipFile(file) as part:
            return part.testzip() is None and {"flat.npy", "about.npy"} <= {*part.namelist()}
    except damages:
        return False


def load_part(file: Path) -> tuple[VectorBlock, str]:
    """The block of a part, and the digest of all lines up to its end."""
    with np.load(file) as part:
        about = json.loads(part["about"].tobytes())
        lines = [InputLine(*line) for line in about["lines"]]
        return VectorBlock(lines, about["tokens"], tuple(about["shape"]), part["flat"]), about["digest"]


def write_hdf5(path: Path, parts: PartsFolder, keep_sentences: bool):
    import h5py

    index: dict[str, str] = {}
    with h5py.File(path, "w") as file:
        for first, block in parts.blocks():
            if block.lines[0].name is not None:  # of all lines, or of none
                keep_sentences = False
                for line, vectors in zip(block.lines, block.vectors(), strict=True):
                    file.create_dataset(hdf5_name(str(line.name)), data=vectors)
            elif parts.is_pooled:
                matrix = file.require_dataset("sentence_vectors", (parts.num_lines, *block.shape), block.flat.dtype)
                matrix[first : first + len(block.lines)] = block.flat.reshape(-1, *block.shape)
            else:
                for number, vectors in enumerate(block.vectors(), first):
                    file.create_dataset(str(number), data=vectors)
            if keep_sentences:
                index.update((line.text, str(number)) for number, line in enumerate(block.lines, first))
        if keep_sentences:
            file.create_dataset("sentence_to_index", data=[json.dumps(index)], dtype=h5py.string_dtype())


def write_parquet(path: Path, parts: PartsFolder, keep_sentences: bool):
    from pyarrow import parquet

    tables = (arrow_table(block) for _, block in parts.blocks())
    first = next(tables)
    with parquet.ParquetWriter(path, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)


def arrow_table(block: VectorBlock):
    import pyarrow

    *layers, dim = (size for size in block.shape if size != -1)
    vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(block.flat), dim)
    if -1 in block.shape:
        counts = np.repeat([len(words) for words in block.tokens], math.prod(layers))
        vectors = pyarrow.ListArray.from_arrays(np.cumsum([0, *counts], dtype=np.int32), vectors)
    if layers:
        vectors = pyarrow.FixedSizeListArray.from_arrays(vectors, *layers)
    texts = [without_surrogates(line.text) for line in block.lines]
    tokens = [[without_surrogates(word) for word in words] for words in block.tokens]
    words_type = pyarrow.list_(pyarrow.string())
    names = {} if block.lines[0].name is None else {"name": [line.name for line in block.lines]}
    return pyarrow.table({**names, "text": texts, "tokens": pyarrow.array(tokens, words_type), "vectors": vectors})


def without_surrogates(text: str) -> str:
    """JSON can hold lone surrogates, Arrow cannot."""
    return text.encode("utf-8", "replace").decode()


OutputWriter = Callable[[Path, PartsFolder, bool], None]
# Suffix -> writer, the library that it needs, and the extra of this package that installs the library.
WRITERS: dict[str, tuple[OutputWriter, str, str]] = {
    ".hdf5": (write_hdf5, "h5py", "convert"),
    ".h5": (write_hdf5, "h5py", "convert"),
    ".parquet": (write_parquet, "pyarrow", "train"),
}


def find_writer(output: str) -> OutputWriter:
    suffix = Path(output).suffix
    if suffix not in WRITERS:
        raise ValueError(
            f"--output {output}: unknown suffix {suffix!r}; pass a file that ends in {', '.join(WRITERS)}."
        )
    write, module, extra = WRITERS[suffix]
    require(module, extra, f"{suffix} output")
    return write
