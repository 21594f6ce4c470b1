"""Where `embed.py` keeps finished lines, and the files that it makes of them.

| file | token vectors | sentence vectors (`--pooling`) |
|---|---|---|
| `.hdf5`, `.h5` | data sets "0", "1", ... | data set `sentence_vectors` |
| `.npz` | arrays "0", "1", ... | array `sentence_vectors` |
| `.parquet`, `.arrow` | rows with columns `text`, `tokens`, `vectors` | the same |

HDF5 is laid out as by the `elmo` command of AllenNLP: `sentence_to_index[0]` is a JSON object from each sentence to its
number as a string, of equal sentences the last (the vectors are the same but for rounding). It takes the memory of the
whole text once, at the end. AllenNLP refuses blank lines; here they have 0 tokens. Parquet is for
`datasets.load_dataset("parquet", data_files=...)`, Arrow for `datasets.Dataset.from_file`.

No format survives being cut off in the middle, so blocks of lines wait in `OUTPUT.parts/`, and the output is put
together from them at the end. For that moment the disk holds the vectors twice.
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
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from modeling_elmo.run_scripts.program.files import require


class Line(NamedTuple):
    text: str
    words: list[str] | None  # None: the tokenizer finds them in the text


@dataclass
class Block:
    """Consecutive lines, and their vectors one after the other.

    Shape:
        flat: `(numbers,)`.
        shape: of one line, -1 for its tokens: `(-1, dim)`, `(layers, -1, dim)`, `(dim,)` or `(layers, dim)`.
    """

    lines: list[Line]
    tokens: list[list[str]]
    shape: tuple[int, ...]
    flat: np.ndarray

    @classmethod
    def empty(cls, lines: list[Line], tokens: list[list[str]], shape: tuple[int, ...], dtype: str) -> "Block":
        return cls(lines, tokens, shape, np.empty(sum(_sizes(shape, tokens)), dtype))

    def vectors(self) -> list[np.ndarray]:
        """Views of `flat`, one for each line."""
        ends = np.cumsum(_sizes(self.shape, self.tokens))
        return [part.reshape(self.shape) for part in np.split(self.flat, ends[:-1])]


def _sizes(shape: tuple[int, ...], tokens: list[list[str]]) -> list[int]:
    return [math.prod(len(words) if size == -1 else size for size in shape) for words in tokens]


class Parts:
    """The finished blocks of a run, as files `FIRST-END.npz`, where a later run finds them.

    Every file is written aside and renamed: it is there complete or not at all. A part holds a digest of all lines up
    to its end, so that a run goes on only over the same lines. settings.json marks the folder as one to go on with: it
    comes before the first part, and goes before the first is removed.
    """

    def __init__(self, output: Path, settings: dict[str, Any]):
        self.output, self.settings, self.folder = output, settings, Path(f"{output}.parts")
        self.record = self.folder / "settings.json"
        if output.exists() and not self.record.exists():
            raise FileExistsError(f"{output} exists already; remove it or pass another --output.")
        self.files = sorted(self.folder.glob("*-*.npz")) if self.record.exists() else []
        self.num_lines = 0
        for file in self.files:
            first, end = map(int, file.stem.split("-"))
            if first != self.num_lines:
                raise ValueError(f"Lines {self.num_lines} to {first} are missing in {self.folder}; remove it.")
            self.num_lines = end
        self._digest = hashlib.sha256()

    @property
    def pooled(self) -> bool:
        return self.settings["pooling"] != "none"

    def skip_finished(self, lines: Iterator[Line]) -> Iterator[Line]:
        """Checks that the finished lines and the settings are those of this run; returns the lines still to do."""
        if self.files:
            self._check_settings(json.loads(self.record.read_text()))
            self._count(islice(lines, self.num_lines))
            if self._digest.hexdigest() != _load(self.files[-1])[1]:
                raise ValueError(
                    f"The input is not that of the interrupted run: its first {self.num_lines} lines differ. Pass the "
                    f"same input, or remove {self.folder} to start again."
                )
        return lines

    def save(self, block: Block):
        if not self.files:
            self._begin()
        self._count(block.lines)
        about = {"lines": block.lines, "tokens": block.tokens, "shape": block.shape, "digest": self._digest.hexdigest()}
        end = self.num_lines + len(block.lines)
        path = self.folder / f"{self.num_lines:012}-{end:012}.npz"
        with self._whole(path) as aside, aside.open("wb") as file:
            np.savez(file, flat=block.flat, about=np.frombuffer(json.dumps(about).encode(), np.uint8))
        self.files.append(path)
        self.num_lines = end

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Number of the first line, and block."""
        for file in tqdm(self.files, unit=" parts", desc=f"writing {self.output.name}"):
            yield int(file.stem.split("-")[0]), _load(file)[0]

    def put_together(self, write: "Writer", keep_sentences: bool):
        with self._whole(self.output) as aside:
            write(aside, self, keep_sentences)
        self.record.unlink()
        shutil.rmtree(self.folder)

    def _check_settings(self, before: dict[str, Any]):
        now = self.settings
        changed = [f"{name} {before.get(name)}, now {now[name]}" for name in now if before.get(name) != now[name]]
        if changed:
            raise ValueError(
                f"{self.folder} was begun with other settings: {'; '.join(changed)}. Pass the same, or remove it to "
                "start again."
            )

    def _begin(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("*-*.npz"):  # of a run that was interrupted while it removed them
            leftover.unlink()
        with self._whole(self.record) as aside:
            aside.write_text(json.dumps(self.settings))

    def _count(self, lines: Iterable[Line]):
        for line in lines:
            self._digest.update(json.dumps(line).encode() + b"\n")

    @contextmanager
    def _whole(self, path: Path) -> Iterator[Path]:
        aside = self.folder / "unfinished"
        yield aside
        os.replace(aside, path)


def _load(file: Path) -> tuple[Block, str]:
    with np.load(file) as part:
        about = json.loads(part["about"].tobytes())
        lines = [Line(*line) for line in about["lines"]]
        return Block(lines, about["tokens"], tuple(about["shape"]), part["flat"]), about["digest"]


def write_hdf5(path: Path, parts: Parts, keep_sentences: bool):
    import h5py

    index: dict[str, str] = {}
    with h5py.File(path, "w") as file:
        for first, block in parts.blocks():
            if parts.pooled:
                matrix = file.require_dataset("sentence_vectors", (parts.num_lines, *block.shape), block.flat.dtype)
                matrix[first : first + len(block.lines)] = block.flat.reshape(-1, *block.shape)
            else:
                for number, vectors in enumerate(block.vectors(), first):
                    file.create_dataset(str(number), data=vectors)
            if keep_sentences:
                index.update((line.text, str(number)) for number, line in enumerate(block.lines, first))
        if keep_sentences:
            file.create_dataset("sentence_to_index", data=[json.dumps(index)], dtype=h5py.string_dtype())


def write_npz(path: Path, parts: Parts, keep_sentences: bool):
    write = _write_matrix if parts.pooled else _write_lines
    with zipfile.ZipFile(path, "w") as archive:
        write(archive, parts)


def _write_lines(archive: zipfile.ZipFile, parts: Parts):
    for first, block in parts.blocks():
        for number, vectors in enumerate(block.vectors(), first):
            with archive.open(f"{number}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, vectors)


def _write_matrix(archive: zipfile.ZipFile, parts: Parts):
    with archive.open("sentence_vectors.npy", "w", force_zip64=True) as file:
        for first, block in parts.blocks():
            if first == 0:
                header = np.lib.format.header_data_from_array_1_0(block.flat)
                header["shape"] = (parts.num_lines, *block.shape)
                np.lib.format.write_array_header_1_0(file, header)
            file.write(block.flat.data)


def write_parquet(path: Path, parts: Parts, keep_sentences: bool):
    from pyarrow import parquet

    _write_tables(parts, lambda schema: parquet.ParquetWriter(path, schema))


def write_arrow(path: Path, parts: Parts, keep_sentences: bool):
    from pyarrow import ipc

    with path.open("wb") as file:
        _write_tables(parts, lambda schema: ipc.new_stream(file, schema))


def _write_tables(parts: Parts, open_writer: Callable[[Any], Any]):
    tables = (_table(block) for _, block in parts.blocks())
    first = next(tables)
    with open_writer(first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)


def _table(block: Block):
    import pyarrow

    *layers, dim = (size for size in block.shape if size != -1)
    vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(block.flat), dim)
    if -1 in block.shape:
        counts = np.repeat([len(words) for words in block.tokens], math.prod(layers))
        vectors = pyarrow.ListArray.from_arrays(np.cumsum([0, *counts], dtype=np.int32), vectors)
    if layers:
        vectors = pyarrow.FixedSizeListArray.from_arrays(vectors, *layers)
    texts = [_scalars(line.text) for line in block.lines]
    tokens = [[_scalars(word) for word in words] for words in block.tokens]
    words_type = pyarrow.list_(pyarrow.string())
    return pyarrow.table({"text": texts, "tokens": pyarrow.array(tokens, words_type), "vectors": vectors})


def _scalars(text: str) -> str:
    """JSON can hold lone surrogates, Arrow cannot."""
    return text.encode("utf-8", "replace").decode()


Writer = Callable[[Path, Parts, bool], None]
WRITERS: dict[str, tuple[Writer, str, str]] = {
    ".hdf5": (write_hdf5, "h5py", "convert"),
    ".h5": (write_hdf5, "h5py", "convert"),
    ".npz": (write_npz, "numpy", ""),
    ".parquet": (write_parquet, "pyarrow", "train"),
    ".arrow": (write_arrow, "pyarrow", "train"),
}


def find_writer(output: str) -> Writer:
    suffix = Path(output).suffix
    if suffix not in WRITERS:
        raise ValueError(f"--output {output}: unknown suffix {suffix!r}; pass one of {', '.join(WRITERS)}.")
    write, module, extra = WRITERS[suffix]
    require(module, extra, f"{suffix} output")
    return write
