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

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm
from transformers.utils import logging

from modeling_elmo.run_scripts.program.files import read_json, require, sync_file, sync_folder
from modeling_elmo.run_scripts.vectors.lines import InputLine, group_by_tokens, hdf5_name

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
    damaged nevertheless, the next run computes it again. settings.json marks a folder that a run can continue: it is
    written before the first part and removed before the parts are.

    The processes of a run cut the same lines into the same blocks, and each process saves its share of them.

    Args:
        settings: options that the vectors depend on.
        process: the number of this process in the run.

    Attributes:
        ends: first line of each block -> the line after its last; blocks that are finished, or given out by `missing`.
    """

    def __init__(self, output: Path, settings: dict[str, Any], process: int = 0):
        self.output, self.settings, self.process, self.folder = output, settings, process, parts_folder(output)
        self.settings_file = self.folder / "settings.json"
        self.ends: dict[int, int] = {}

    @property
    def num_lines(self) -> int:
        return max(self.ends.values(), default=0)

    def num_finished(self) -> int:
        """Number of lines of which there are parts."""
        return sum(end - first for first, end in map(lines_in_name, self.folder.glob(PARTS)))

    def resume(self, lines: Iterator[InputLine]):
        """Finds the parts of an interrupted run, if it had the settings and the lines of this run."""
        if self.settings_file.exists():
            self._check_settings(read_json(self.settings_file))
        elif self.output.exists():
            raise FileExistsError(f"--output {self.output} exists; remove it or pass another file.")
        else:
            for file in self.folder.glob(PARTS):  # of a run that was interrupted while it removed its parts
                file.unlink()
        position = 0
        for file in sorted(self.folder.glob(PARTS)):
            first, end = lines_in_name(file)
            try:
                block = load_part(file)  # its checksums are compared
            except Exception:  # a broken byte may raise nearly any
                block = None
            if block is None or first < position:
                logger.warning(f"{file} is damaged, or overlaps another part: computing its lines again.")
                file.unlink()
            elif block.lines != [*islice(lines, first - position, end - position)]:
                raise ValueError(
                    f"Lines {first + 1} to {end} differ from the input of the interrupted run. Pass the same input, or "
                    f"remove {self.folder} to start again."
                )
            else:
                self.ends[first] = position = end

    def follow(self, main: "PartsFolder"):
        """Continues where the main process does."""
        self._check_settings(main.settings)
        if not main.folder.is_dir():
            raise FileNotFoundError(
                f"--output {self.output}: process {self.process} does not find {main.folder}, which the main process "
                "made. Pass a path on a file system that all machines share."
            )
        self.ends = dict(main.ends)

    def compare(self, folders: "list[PartsFolder]"):
        """Checks that all processes had the same blocks; with other inputs, each would write other lines."""
        for other in folders:
            if other.ends != self.ends:
                raise ValueError(
                    f"Processes {self.process} and {other.process} read different lines. Pass the same input to all, "
                    f"and remove {self.folder} to start again."
                )

    def missing(self, lines: Iterator[InputLine], num_tokens: int) -> Iterator[tuple[int, list[InputLine]]]:
        """The lines that no part has, in blocks of `num_tokens` tokens, with the number of their first line."""
        position = 0
        for first, end in [*sorted(self.ends.items()), (sys.maxsize, sys.maxsize)]:
            for block in group_by_tokens(islice(lines, first - position), num_tokens):
                self.ends[position] = position + len(block)
                yield position, block
                position += len(block)
            position += sum(1 for _ in islice(lines, end - first))

    def save(self, first: int, block: VectorBlock):
        if not self.settings_file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._replacing(self.settings_file) as unfinished:
                unfinished.write_text(json.dumps(self.settings), encoding="utf-8")
        about = {"lines": block.lines, "tokens": block.tokens, "shape": block.shape}
        end = first + len(block.lines)
        with self._replacing(self.folder / part_name(first, end)) as unfinished, unfinished.open("wb") as file:
            np.savez(file, flat=block.flat, about=np.frombuffer(json.dumps(about).encode(), np.uint8))

    def blocks(self) -> Iterator[tuple[int, VectorBlock]]:
        """The number of the first line of each block, and the block."""
        for first, end in tqdm(sorted(self.ends.items()), unit=" parts", desc=f"writing {self.output.name}"):
            yield first, load_part(self.folder / part_name(first, end))

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

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[Path]:
        unfinished = self.folder / f"unfinished-{self.process}"
        try:
            yield unfinished
            sync_file(unfinished)
            os.replace(unfinished, path)
            sync_folder(path.parent)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise OSError(
                f"{path} cannot be written: {error.strerror or error}. {self.num_finished():,} lines are finished; run "
                "the same command again to continue."
            ) from error


def parts_folder(output: Path) -> Path:
    return Path(f"{output}.parts")


def part_name(first: int, end: int) -> str:
    return f"{first:012}-{end:012}.npz"


def lines_in_name(file: Path) -> tuple[int, int]:
    """The first line of a part, and the line after its last."""
    first, end = file.stem.split("-")
    return int(first), int(end)


def load_part(file: Path) -> VectorBlock:
    with np.load(file) as part:
        about = json.loads(part["about"].tobytes())
        lines = [InputLine(*line) for line in about["lines"]]
        return VectorBlock(lines, about["tokens"], tuple(about["shape"]), part["flat"])


def write_hdf5(path: Path, parts: PartsFolder, keep_sentences: bool):
    import h5py

    index: dict[str, str] = {}
    with h5py.File(path, "w") as file:
        for first, block in parts.blocks():
            if block.lines[0].name is not None:  # of all lines, or of none
                keep_sentences = False
                for line, vectors in zip(block.lines, block.vectors(), strict=True):
                    file.create_dataset(hdf5_name(str(line.name)), data=vectors)
            elif parts.settings["pooling"] != "none":
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
