"""The output files of `elmo embed`, and the folder in which finished blocks wait for them.

| file | token vectors | sentence vectors (`--pooling`) |
|---|---|---|
| `.hdf5`, `.h5` | data sets "0", "1", ... | data set `sentence_vectors` |
| `.parquet` | rows with columns `text`, `tokens`, `vectors` | the same |

HDF5 has the layout of AllenNLP's `elmo` command: `sentence_to_index[0]` is a JSON object from each sentence to its
number as a string. Of equal sentences it has the last number. The whole text is in memory once, at the end. AllenNLP
refuses blank lines; here they have 0 tokens. `datasets.load_dataset("parquet", data_files=...)` reads Parquet.

Where the entries are not the lines of one file, the output names the file and the line in which each begins: HDF5 in
the data sets `files` and `lines`, Parquet in columns `file` and `line`. Rows of a data set count from 0.

The records of a FASTA file have names. HDF5 then has one data set for each record under its name, with `/` as `_`, also
with `--pooling`, and nothing else. Parquet has the names in one more column, `name`.

Neither format survives an interruption. So blocks of lines are saved in `OUTPUT.parts/`, and the output is assembled
from them at the end. The disk then holds the vectors twice for a moment.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.utils import logging

from modeling_elmo.conversion.files import staged

from ..program.command_line import require
from ..program.files import read_json, sync_file, sync_folder
from .lines import InputLine, group_by_tokens, hdf5_name

logger = logging.get_logger(__name__)


class VectorBlock(NamedTuple):
    """Consecutive lines, their tokens and their vectors, and the states of the model after them, if they run on."""

    lines: list[InputLine]
    tokens: list[list[str]]
    vectors: list[np.ndarray]
    states: tuple[Tensor, ...] = ()

    def flat(self) -> np.ndarray:
        return np.concatenate([array.ravel() for array in self.vectors])


class PartsFolder:
    """The finished blocks of a run, as files `FIRST-END.npz` in `OUTPUT.parts/`, where a later run finds them.

    Each file is complete and on the disk when it gets its name. If one is damaged nevertheless, its lines are computed
    again. settings.json marks a folder that a run can continue: it is written before the first part and removed before
    the parts are.

    All processes cut the same lines into the same blocks, and each saves its share of them. A later run cuts as the
    first did, so that no number depends on interruptions.

    Args:
        settings: options that the vectors depend on.
        block_tokens: number of tokens in a block of a new run.
        block_lines: number of lines in a block. Default: that of `block_tokens`.
    """

    def __init__(self, output: Path, settings: dict[str, Any], block_tokens: int, block_lines: int | None = None):
        self.output = output
        self.settings = settings
        self.block_tokens = block_tokens
        self.block_lines = block_lines
        self.folder = Path(f"{output}.parts")
        self.settings_file = self.folder / "settings.json"
        self.finished: dict[int, int] = {}  # first line of each part that is there -> the line after its last
        self.ends: dict[int, int] = {}  # the same of the blocks of this run, as far as they were read

    @property
    def num_lines(self) -> int:
        return max(self.ends.values(), default=0)

    def resume(self):
        """Finds the parts of an interrupted run, if it had the settings of this run."""
        files = sorted(self.folder.glob("*-*.npz"))
        if self.settings_file.exists():
            before = read_json(self.settings_file)
            self._check_settings(before)
            self.block_tokens = before.get("block_tokens", self.block_tokens)
            for file in files:
                first, end = map(int, file.stem.split("-"))
                self.finished[first] = end
        elif self.output.exists():
            raise FileExistsError(f"--output {self.output} exists; remove it or pass another file.")
        else:
            for file in files:  # of a run that was interrupted while it removed its parts
                file.unlink()

    def follow(self, main: "PartsFolder"):
        self._check_settings(main.settings)
        if not main.folder.is_dir():
            raise FileNotFoundError(f"--output {self.output}: not all machines find {main.folder}. Pass a shared path.")
        self.block_tokens = main.block_tokens
        self.finished = main.finished

    def blocks(self, lines: Iterator[InputLine]) -> Iterator[tuple[int, list[InputLine]]]:
        """All lines, in blocks with the number of their first line."""
        if self.block_lines is None:
            blocks = group_by_tokens(lines, self.block_tokens)
        else:
            blocks = iter(lambda: list(islice(lines, self.block_lines)), [])  # until no line is left
        for block in blocks:
            first = self.num_lines
            self.ends[first] = first + len(block)
            yield first, block

    def finished_block(self, first: int, lines: list[InputLine]) -> VectorBlock | None:
        if first not in self.finished:
            return None
        file = self._part(first, self.finished[first])
        try:
            block = load_part(file)  # its checksums are compared
        except Exception:  # a broken byte may raise nearly any
            logger.warning(f"{file} is damaged: computing its lines again.")
            return None
        if block.lines != lines:
            rows = f"lines {first + 1} to {self.finished[first]}"
            raise ValueError(f"{self.folder} has other {rows}. Pass the same input, or remove the folder.")
        return block

    def compare(self, folders: "list[PartsFolder]"):
        """Checks that all processes had the same blocks; with other inputs, each would write other lines."""
        if any(other.ends != self.ends for other in folders):
            raise ValueError(f"The processes read different lines. Pass the same input, and remove {self.folder}.")

    def save(self, first: int, block: VectorBlock):
        if not self.settings_file.exists():
            with self._replacing(self.settings_file) as unfinished:
                settings = {**self.settings, "block_tokens": self.block_tokens}
                unfinished.write_text(json.dumps(settings), encoding="utf-8")
        shapes = [array.shape for array in block.vectors]
        about = {"lines": block.lines, "tokens": block.tokens, "shapes": shapes}
        encoded = np.frombuffer(json.dumps(about).encode(), np.uint8)
        states = [state.float().numpy() for state in block.states]
        with self._replacing(self._part(first, first + len(block.lines))) as unfinished:
            np.savez(unfinished, *states, flat=block.flat(), about=encoded)

    def parts(self) -> Iterator[tuple[int, VectorBlock]]:
        """The number of the first line of each block, and the block."""
        for first, end in tqdm(self.ends.items(), unit=" parts", desc=f"writing {self.output.name}"):
            yield first, load_part(self._part(first, end))

    def assemble(self, write_output: "OutputWriter", keep_sentences: bool):
        """Writes the output from all parts, then removes them."""
        with self._replacing(self.folder / "output") as unfinished:
            write_output(unfinished, self, keep_sentences)
        os.replace(self.folder / "output", self.output)
        sync_folder(self.output.parent)
        self.settings_file.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)  # Windows does not remove the lock of this run

    def _check_settings(self, before: dict[str, Any]):
        changes = []
        for name, value in self.settings.items():
            if before.get(name) != value:
                changes.append(f"{name} {before.get(name)}, now {value}")
        if changes:
            difference = f"{self.folder} has other settings: {'; '.join(changes)}"
            raise ValueError(f"{difference}. Pass the same settings, or remove the folder.")

    def _part(self, first: int, end: int) -> Path:
        return self.folder / f"{first:012}-{end:012}.npz"

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[Path]:
        with staged(path) as unfinished:
            yield unfinished
            sync_file(unfinished)
        sync_folder(self.folder)


def load_part(file: Path) -> VectorBlock:
    with np.load(file) as part:
        about = json.loads(part["about"].tobytes())
        lines = [InputLine(*line) for line in about["lines"]]
        flat = part["flat"]
        vectors = []
        start = 0
        for shape in about["shapes"]:
            end = start + math.prod(shape)
            vectors.append(flat[start:end].reshape(shape))
            start = end
        states = tuple(torch.from_numpy(part[name]) for name in part.files if name.startswith("arr_"))
        return VectorBlock(lines, about["tokens"], vectors, states)


def write_hdf5(path: Path, parts: PartsFolder, keep_sentences: bool):
    import h5py

    index: dict[str, str] = {}
    files: list[str] = []
    numbers: list[int | None] = []
    with h5py.File(path, "w") as file:
        for first, block in parts.parts():
            if block.lines[0].name is not None:  # of FASTA, as all lines are
                keep_sentences = False
                for line, vectors in zip(block.lines, block.vectors, strict=True):
                    file.create_dataset(hdf5_name(str(line.name)), data=vectors)
                continue
            if parts.settings["pooling"] != "none":
                rows = np.stack(block.vectors)
                matrix = file.require_dataset("sentence_vectors", (parts.num_lines, *rows.shape[1:]), rows.dtype)
                matrix[first : first + len(rows)] = rows
            else:
                for number, vectors in enumerate(block.vectors, first):
                    file.create_dataset(str(number), data=vectors)
            for number, line in enumerate(block.lines, first):
                if keep_sentences:
                    index[line.text] = str(number)
                if line.file is not None:
                    files.append(line.file)
                    numbers.append(line.number)
        if files:
            file.create_dataset("files", data=files, dtype=h5py.string_dtype())
            file.create_dataset("lines", data=numbers)
        if keep_sentences:
            file.create_dataset("sentence_to_index", data=[json.dumps(index)], dtype=h5py.string_dtype())


def write_parquet(path: Path, parts: PartsFolder, keep_sentences: bool):
    from pyarrow import parquet

    with ExitStack() as stack:
        writer = None
        for _, block in parts.parts():
            table = arrow_table(block, is_pooled=parts.settings["pooling"] != "none")
            if writer is None:
                writer = stack.enter_context(parquet.ParquetWriter(path, table.schema))
            writer.write_table(table)


def arrow_table(block: VectorBlock, is_pooled: bool):
    import pyarrow

    *layers, dim = block.vectors[0].shape
    if not is_pooled:
        layers.pop()  # the tokens
    vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(block.flat()), dim)
    if not is_pooled:
        counts = np.repeat([len(words) for words in block.tokens], math.prod(layers))
        vectors = pyarrow.ListArray.from_arrays(np.cumsum([0, *counts], dtype=np.int32), vectors)
    if layers:
        vectors = pyarrow.FixedSizeListArray.from_arrays(vectors, *layers)
    columns: dict[str, Any] = {}
    for column, field in (("name", "name"), ("file", "file"), ("line", "number")):
        values = [getattr(line, field) for line in block.lines]
        if values[0] is not None:  # as in all lines
            columns[column] = values
    columns["text"] = [without_surrogates(line.text) for line in block.lines]
    tokens = []
    for words in block.tokens:
        tokens.append([without_surrogates(word) for word in words])
    columns["tokens"] = pyarrow.array(tokens, pyarrow.list_(pyarrow.string()))
    columns["vectors"] = vectors
    return pyarrow.table(columns)


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
        raise ValueError(f"--output {output}: unknown suffix {suffix!r}; pass one of {', '.join(WRITERS)}.")
    write, module, extra = WRITERS[suffix]
    require(module, extra, f"{suffix} output")
    return write
