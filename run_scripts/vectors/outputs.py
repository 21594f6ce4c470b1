"""The output files of `elmo embed`, and the folder in which they grow.

| file | token vectors | sentence vectors (`--pooling`) |
|---|---|---|
| `.hdf5`, `.h5` | data sets "0", "1", ... | data set `sentence_vectors` |
| `.parquet` | rows with columns `text`, `tokens`, `vectors`, and the columns of a table (`.csv`, `.tsv`) | the same |

HDF5 has the layout of AllenNLP's `elmo` command: `sentence_to_index[0]` is a JSON object from each sentence to its
number as a string. Of equal sentences it has the last number. The whole text is in memory once, at the beginning.
AllenNLP refuses blank lines; here they have 0 tokens. `datasets.load_dataset("parquet", data_files=...)` reads Parquet.

Where the entries are not the lines of one file, the output names the file and the line in which each begins: HDF5 in
the data sets `files` and `lines`, Parquet in columns `file` and `line`. Rows of a data set count from 0.

The records of a FASTA file have names. HDF5 then has one data set for each record under its name, with `/` as `_`, also
with `--pooling`, and nothing else. Parquet has the names in one more column, `name`.

Every vector is written once, into a file in `OUTPUT.unfinished/` that gets its name when it is complete. A process may
be killed at any moment:

- HDF5: the library changes tables in many places of a file, and a kill in between leaves a file that nobody can open.
  So the library creates all data sets first, without values, and closes the file. Nothing but values changes after
  that: they are written as plain bytes to the places that the library names (`H5Dget_offset`). This needs the number of
  tokens of each line beforehand, so the words of all lines are counted when the input is checked.
- Parquet: blocks of lines are appended as row groups, each with a footer of its own, as if it were the last. The footer
  of the whole file, at its end, joins them, and no reader looks at the others.
"""

import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from modeling_elmo.conversion.files import staged

from ..program.command_line import require
from ..program.files import digest, read_json, sync_file, sync_folder
from ..program.processes import values_of_all
from .lines import InputLine, group_by_tokens, hdf5_name

# Most bytes of an entry beside its vectors and its text, as measured: in HDF5 its header and its place in the tables of
# the file, and its number in `sentence_to_index`. A whole file has some more.
HDF5_ENTRY, HDF5_NUMBER, PARQUET_ENTRY, ANY_FILE = 1150, 24, 100, 10_000
# Vectors take four fifths of the room that they take with snappy and a dictionary, in less time.
ZSTD: dict[str, Any] = {"compression": "zstd", "compression_level": 1}


class VectorBlock(NamedTuple):
    """Consecutive lines, their tokens and their vectors, and the states of the model after them, if they run on.

    Shape:
        vectors: for each line one array `(tokens, dim)` per chosen layer, with a pooling `(dim,)`.
    """

    lines: list[InputLine]
    tokens: list[list[str]]
    vectors: list[list[np.ndarray]]
    states: tuple[Tensor, ...] = ()


class EntryShape(NamedTuple):
    """The shape of an entry without its tokens; `layers` is `None` where an entry has one layer only."""

    layers: int | None
    dim: int
    is_pooled: bool
    dtype: str

    def of(self, tokens: int) -> tuple[int, ...]:
        outer = () if self.layers is None else (self.layers,)
        return (*outer, self.dim) if self.is_pooled else (*outer, tokens, self.dim)

    def num_bytes(self, tokens: int, lines: int) -> int:
        vectors = lines if self.is_pooled else tokens
        return vectors * (self.layers or 1) * self.dim * np.dtype(self.dtype).itemsize


@dataclass
class LinePlan:
    """The lines as the first reading finds them: what blocks they are cut into, and how many tokens each has."""

    blocks: list[tuple[int, str]] = field(default_factory=list)  # the number of lines, and a digest of them
    tokens: array = field(default_factory=lambda: array("I"))  # of each line
    text_bytes: int = 0
    first_name: str | None = None  # of the first line, if the lines are records of FASTA

    def add(self, lines: list[InputLine], tokens: list[int]):
        self.blocks.append((len(lines), digest([json.dumps(lines).encode()])))
        self.tokens.extend(tokens)
        if len(self.blocks) == 1:
            self.first_name = lines[0].name
        for line in lines:
            texts = [line.text, *filter(None, (line.columns or {}).values())]
            self.text_bytes += sum(len(text.encode("utf-8", "replace")) for text in texts)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)


class OutputWriter(Protocol):
    """Writes a file in blocks. It need not be on the disk when `write` returns."""

    shape: EntryShape

    def size(self, plan: LinePlan) -> int:
        """The most bytes that the file will have."""

    def begin(self, path: Path, plan: LinePlan, lines: Iterator[InputLine]): ...

    def write(self, path: Path, first: int, block: VectorBlock, end: int) -> int:
        """Writes a block whose lines begin at number `first`. Returns the bytes of the file, which were `end`."""

    def complete(self, path: Path, ends: list[int]):
        """Makes the file readable, given its bytes after each block."""


class UnfinishedOutput:
    """The output of a run in the folder `OUTPUT.unfinished/`, where a later run finds and continues it.

    settings.json marks an output that a run can continue: it is written after the file was created, and removed when
    the file has got its name. progress.npz has the bytes of the file after each block that is on the disk, and the
    states of the model after the last one. It is written again after each block.

    All processes cut the same lines into the same blocks, and each computes its share of them. They write in turn, in
    the order of the blocks, so that several processes write the same file as one. A later run cuts as the first did, so
    that no number depends on interruptions.

    Args:
        settings: options that the vectors depend on.
        block_tokens: number of tokens in a block of a new run.
        block_lines: number of lines in a block. Default: as `block_tokens` gives it.
    """

    def __init__(
        self,
        output: Path,
        writer: OutputWriter,
        settings: dict[str, Any],
        block_tokens: int,
        block_lines: int | None = None,
    ):
        self.output = output
        self.writer = writer
        self.settings = settings
        self.block_tokens = block_tokens
        self.block_lines = block_lines
        self.folder = Path(f"{output}.unfinished")
        self.file = self.folder / f"output{output.suffix}"
        self.settings_file = self.folder / "settings.json"
        self.progress_file = self.folder / "progress.npz"
        self.ends: list[int] = []  # bytes of the file after each finished block
        self.states: tuple[Tensor, ...] = ()  # after the last of them

    @property
    def can_continue(self) -> bool:
        return self.settings_file.exists() and self.file.exists()

    def find(self):
        """Looks for the file of an interrupted run, which must have had the settings of this run."""
        if self.can_continue:
            before = read_json(self.settings_file)
            self._check_settings(before)
            self.block_tokens = before["block_tokens"]
        elif self.output.exists():
            raise FileExistsError(f"--output {self.output} exists; remove it or pass another file.")

    def follow(self, main: "UnfinishedOutput"):
        self._check_settings(main.settings)
        if not main.folder.is_dir():
            raise FileNotFoundError(f"--output {self.output}: not all machines find {main.folder}. Pass a shared path.")
        self.block_tokens = main.block_tokens

    def plan(self, lines: Iterator[InputLine], count_tokens: Callable[[InputLine], int]) -> LinePlan:
        """Reads all lines once. A mistake in the last line shows now, not after hours."""
        plan = LinePlan()
        for block in self.blocks(lines):
            plan.add(block, list(map(count_tokens, block)))
        return plan

    def blocks(self, lines: Iterator[InputLine]) -> Iterator[list[InputLine]]:
        if self.block_lines is None:
            return group_by_tokens(lines, self.block_tokens)
        return iter(lambda: list(islice(lines, self.block_lines)), [])  # until no line is left

    @property
    def num_bytes_written(self) -> int:
        """Bytes that the file takes on the disk, without places for values that are not there yet."""
        if not self.can_continue:
            return 0
        about = self.file.stat()
        return getattr(about, "st_blocks", about.st_size // 512) * 512  # Windows does not tell the blocks

    def begin(self, plan: LinePlan, lines: Iterator[InputLine]):
        """Creates the file, or continues the file of an interrupted run."""
        if self.can_continue:
            self._continue(plan)
            return
        self.writer.begin(self.file, plan, lines)
        sync_file(self.file)
        with self._replacing(self.settings_file) as unfinished:
            content = {**self.settings, "block_tokens": self.block_tokens, "blocks": plan.blocks}
            unfinished.write_text(json.dumps(content), encoding="utf-8")

    def _continue(self, plan: LinePlan):
        first = 0
        for before, now in zip_longest(map(tuple, read_json(self.settings_file)["blocks"]), plan.blocks):
            end = first + (before or now)[0]
            if before != now:
                rows = f"lines {first + 1} to {end}"
                raise ValueError(f"{self.folder} has other {rows}. Pass the same input, or remove the folder.")
            first = end
        if not self.progress_file.exists():
            return
        try:
            with np.load(self.progress_file) as progress:
                self.ends = progress["ends"].tolist()
                self.states = tuple(torch.from_numpy(progress[f"arr_{i}"]) for i in range(len(progress.files) - 1))
            is_damaged = self.file.stat().st_size < self.ends[-1]
        except Exception:  # a broken byte may raise nearly any
            is_damaged = True
        if is_damaged:
            raise ValueError(f"{self.folder} is damaged. Remove it, and run the same command again.")

    def append(self, number: int, first: int, block: VectorBlock, processes: int):
        """Writes block `number`, whose lines begin at number `first`, when all blocks before are written."""
        self.wait_for(number, processes)
        try:
            end = self.writer.write(self.file, first, block, self.ends[-1] if self.ends else 0)
            sync_file(self.file)
            with self._replacing(self.progress_file) as unfinished, unfinished.open("wb") as file:
                np.savez(file, *(state.float().numpy() for state in block.states), ends=[*self.ends, end])
        except OSError as error:
            if error.errno and error.filename is None:
                error.filename = str(self.output)  # a write to a full disk names no file
            raise
        self._take_turn(end, processes)

    def wait_for(self, number: int, processes: int):
        """Waits until the other processes have written all blocks before a number. Each process must come here."""
        while len(self.ends) < number:
            self._take_turn(None, processes)

    def _take_turn(self, end: int | None, processes: int):
        owner = len(self.ends) % processes
        self.ends.append(values_of_all(end, processes)[owner])

    def complete(self):
        """Gives the file its name."""
        self.writer.complete(self.file, self.ends)
        sync_file(self.file)
        self.file.replace(self.output)
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

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[Path]:
        with staged(path) as unfinished:
            yield unfinished
            sync_file(unfinished)
        sync_folder(self.folder)


class HDF5Writer:
    def __init__(self, shape: EntryShape, keep_sentences: bool):
        self.shape = shape
        self.keep_sentences = keep_sentences

    def size(self, plan: LinePlan) -> int:
        lines = len(plan.tokens)
        entries = 1 if self.shape.is_pooled and plan.first_name is None else lines
        size = self.shape.num_bytes(plan.num_tokens, lines) + HDF5_ENTRY * entries + ANY_FILE
        if self.keep_sentences:
            size += 2 * plan.text_bytes + HDF5_NUMBER * lines  # JSON has letters of three bytes as `\\u1234`
        return size

    def begin(self, path: Path, plan: LinePlan, lines: Iterator[InputLine]):
        import h5py

        index: dict[str, str] = {}
        files: list[str] = []
        numbers: list[int | None] = []
        is_matrix = self.shape.is_pooled
        keep_sentences = self.keep_sentences
        with h5py.File(path, "w") as file:
            reserve = reserving(file, self.shape.dtype)
            for number, (line, tokens) in enumerate(zip(lines, plan.tokens, strict=True)):
                if line.name is not None:  # of FASTA, as all lines are
                    reserve(hdf5_name(line.name), self.shape.of(tokens))
                    keep_sentences = is_matrix = False
                    continue
                if not self.shape.is_pooled:
                    reserve(str(number), self.shape.of(tokens))
                if keep_sentences:
                    index[line.text] = str(number)
                if line.file is not None:
                    files.append(line.file)
                    numbers.append(line.number)
            if is_matrix:
                reserve("sentence_vectors", (len(plan.tokens), *self.shape.of(0)))
            if files:
                file.create_dataset("files", data=files, dtype=h5py.string_dtype())
                file.create_dataset("lines", data=numbers)
            if keep_sentences:
                file.create_dataset("sentence_to_index", data=[json.dumps(index)], dtype=h5py.string_dtype())

    def write(self, path: Path, first: int, block: VectorBlock, end: int) -> int:
        with path.open("rb+") as file:
            for place, vectors in zip(self._places(path, first, block), block.vectors, strict=True):
                if place is not None:  # which no blank line has
                    file.seek(place)
                    for layer in vectors:
                        file.write(np.ascontiguousarray(layer).data)
        return path.stat().st_size

    def _places(self, path: Path, first: int, block: VectorBlock) -> list[int | None]:
        """The byte at which the vectors of each line begin."""
        import h5py

        names = [
            str(first + row) if line.name is None else hdf5_name(line.name) for row, line in enumerate(block.lines)
        ]
        with h5py.File(path, "r") as file:
            if "sentence_vectors" in file and block.lines[0].name is None:
                start = file["sentence_vectors"].id.get_offset()
                size = self.shape.num_bytes(0, 1)
                return [start + size * (first + row) for row in range(len(block.lines))]
            return [h5py.h5d.open(file.id, name.encode()).get_offset() for name in names]

    def complete(self, path: Path, ends: list[int]):
        """Nothing is left to do."""


def reserving(file: Any, dtype: str) -> Callable[[str, tuple[int, ...]], None]:
    """A function that creates a data set with a place in the file, but without values.

    h5py's own function takes several times as long. The type and the options are made once, because making them takes
    as long as creating a data set.
    """
    from h5py import h5d, h5p, h5s, h5t

    stored = h5t.py_create(np.dtype(dtype))
    options = h5p.create(h5p.DATASET_CREATE)
    options.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    options.set_fill_time(h5d.FILL_TIME_NEVER)
    options.set_obj_track_times(False)  # as in h5py: equal runs write equal files

    def reserve(name: str, shape: tuple[int, ...]):
        h5d.create(file.id, name.encode(), stored, h5s.create_simple(shape), options)

    return reserve


class ParquetWriter:
    def __init__(self, shape: EntryShape, keep_sentences: bool):
        self.shape = shape

    def size(self, plan: LinePlan) -> int:
        lines = len(plan.tokens)
        size = self.shape.num_bytes(plan.num_tokens, lines) + PARQUET_ENTRY * lines + ANY_FILE
        return size + 2 * plan.text_bytes  # with the tokens

    def begin(self, path: Path, plan: LinePlan, lines: Iterator[InputLine]):
        path.touch()

    def write(self, path: Path, first: int, block: VectorBlock, end: int) -> int:
        import pyarrow
        from pyarrow import parquet

        table = arrow_table(block, self.shape)
        others = [name for name in table.column_names if name != "vectors"]
        footers: list[Any] = []
        os.truncate(path, end)  # after a kill
        with pyarrow.OSFile(str(path), mode="a") as file:
            # The writer refuses to append, so it is shown the beginning. But all it writes goes to the end, and its
            # footer has the places in this file.
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            options = {**ZSTD, "use_dictionary": others, "write_statistics": others, "metadata_collector": footers}
            with parquet.ParquetWriter(file, table.schema, **options) as writer:
                writer.write_table(table)
        place = footers[0].row_group(0).column(0).data_page_offset
        if place < end:
            version = pyarrow.__version__
            raise ImportError(
                f"pyarrow {version} cannot append a row group. Install version 26, or pass an .hdf5 file."
            )
        return path.stat().st_size

    def complete(self, path: Path, ends: list[int]):
        with path.open("rb+") as file:
            footers = [read_footer(file, end) for end in ends]
            joined = footers[0]
            for footer in footers[1:]:
                joined.append_row_groups(footer)
            file.seek(ends[-1])
            file.truncate()
            joined.write_metadata_file(file)


def read_footer(file: BinaryIO, end: int) -> Any:
    """The metadata of a row group that ends, with its footer, at a byte of the file."""
    import pyarrow
    from pyarrow import parquet

    file.seek(end - 8)
    size = int.from_bytes(file.read(4), "little") + 8
    file.seek(end - size)
    return parquet.read_metadata(pyarrow.BufferReader(b"PAR1" + file.read(size)))


def arrow_table(block: VectorBlock, shape: EntryShape):
    import pyarrow

    flat = np.concatenate([layer.ravel() for vectors in block.vectors for layer in vectors])
    vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(flat), shape.dim)
    if not shape.is_pooled:
        counts = np.repeat([len(words) for words in block.tokens], shape.layers or 1)
        vectors = pyarrow.ListArray.from_arrays(np.cumsum([0, *counts], dtype=np.int32), vectors)
    if shape.layers is not None:
        vectors = pyarrow.FixedSizeListArray.from_arrays(vectors, shape.layers)
    columns: dict[str, Any] = {}
    for column, attribute in (("name", "name"), ("file", "file"), ("line", "number")):
        values = [getattr(line, attribute) for line in block.lines]
        if values[0] is not None:  # as in all lines
            columns[column] = values
    columns["text"] = [without_surrogates(line.text) for line in block.lines]
    tokens = []
    for words in block.tokens:
        tokens.append([without_surrogates(word) for word in words])
    columns["tokens"] = pyarrow.array(tokens, pyarrow.list_(pyarrow.string()))
    columns["vectors"] = vectors
    for name in block.lines[0].columns or ():
        cells = [line.columns[name] for line in block.lines]  # type: ignore[index]  # all lines have the same
        columns[name] = pyarrow.array(cells, pyarrow.string())
    return pyarrow.table(columns)


def without_surrogates(text: str) -> str:
    """JSON can hold lone surrogates, Arrow cannot."""
    return text.encode("utf-8", "replace").decode()


# Suffix -> writer, the library that it needs, and the extra of this package that installs the library.
WRITERS: dict[str, tuple[Callable[[EntryShape, bool], OutputWriter], str, str]] = {
    ".hdf5": (HDF5Writer, "h5py", "convert"),
    ".h5": (HDF5Writer, "h5py", "convert"),
    ".parquet": (ParquetWriter, "pyarrow", "train"),
}


def find_writer(output: str) -> Callable[[EntryShape, bool], OutputWriter]:
    suffix = Path(output).suffix
    if suffix not in WRITERS:
        raise ValueError(f"--output {output}: unknown suffix {suffix!r}; pass one of {', '.join(WRITERS)}.")
    writer, module, extra = WRITERS[suffix]
    require(module, extra, f"{suffix} output")
    return writer
