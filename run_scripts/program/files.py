"""The files of the scripts: texts, in lines or data sets, read one by one; results, written whole or not at all."""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO


@dataclass(kw_only=True)
class TextArguments:
    """Options of every script that reads texts."""

    dataset: str | None = field(
        default=None, metadata={"help": "Instead of files: a `datasets` data set, a folder or a Hub name."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    split: str = field(default="train", metadata={"help": "Split of the data set."})
    streaming: bool = field(default=False, metadata={"help": "Read the data set without downloading it first."})
    text_column: str = field(
        default="text", metadata={"help": "Key or column that holds the text, or a list of its words."}
    )


# Where a text stands (for messages), and a text or a list of words.
Place = tuple[str, Any]

# What a published model consists of, in the order in which it appears. A folder without config.json is no model, so it
# comes last: nobody loads new code or weights before they are all there.
MODEL_FILES = ("*.py", "*.md", "*.txt", "*token*.json", "*.safetensors", "*.safetensors.index.json", "config.json")
ROWS_AT_ONCE = 1000  # of a data set; one by one they take ten times as long


def read_file(path: Path, column: str) -> Iterator[Place]:
    """Every text of a file, as `numbered_texts`, with the words in which a message names its place."""
    return ((f"{path}, line {number}", text) for number, text in numbered_texts(path, column))


def numbered_texts(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    """A text a line, counted from 1: `.jsonl` files hold it under the key `column`, others as it is; either may be
    compressed (`.gz`, `.zst`)."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    return (
        _json_texts(path, column)
        if name.endswith(".jsonl")
        else ((number, line.strip()) for number, line in numbered_lines(path))
    )


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file, also a compressed one, counted from 1; spaces and tabs at their ends stay.

    They end at line feeds alone, which is how `wc -l` counts.
    """
    number = 0
    # Named here, as a generator that is alive when Python exits is closed after the modules are emptied.
    broken = (EOFError, gzip.BadGzipFile, zlib.error)
    with path.open("rb") as file:
        try:
            for number, line in enumerate(_unpacked(file, path), 1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, line {number} is not UTF-8: {error.reason} at byte {error.start}. Convert the file with "
                "iconv, for example."
            ) from error
        except broken as error:
            kind = "Zstandard" if path.suffix == ".zst" else "gzip"
            raise ValueError(f"{path} is not a complete {kind} file: {error}.") from error


def _unpacked(file: BinaryIO, path: Path) -> Iterable[bytes]:
    """The lines of an open file."""
    if path.suffix == ".zst":
        require("zstandard", extra="train", purpose=str(path))
        return _lines_of_blocks(_zstandard_blocks(file))
    return gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file


def _zstandard_blocks(file: BinaryIO) -> Iterator[bytes]:
    """The library's own reader takes a file that was cut off for one that ends there."""
    import zstandard

    frame = None
    while packed := file.read(2**16):
        while packed:  # one frame may end and the next begin in what was read
            # The largest window that the format allows, as `zstd --long=31` makes it.
            frame = frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            try:
                yield frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise EOFError(error) from error
            packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("its last frame has no end")


def _lines_of_blocks(blocks: Iterable[bytes]) -> Iterator[bytes]:
    begun: list[bytes] = []  # a list, as a line may be as long as many blocks
    for block in blocks:
        first, *others = block.split(b"\n")
        begun.append(first)
        if others:
            yield b"".join(begun)
            yield from others[:-1]
            begun = others[-1:]
    if last := b"".join(begun):
        yield last


def _json_texts(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    for number, line in numbered_lines(path):
        text = line.strip()
        try:
            record = json.loads(text) if text else {column: ""}
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}.") from error
        if not isinstance(record, dict) or column not in record:
            raise ValueError(f"{path}, line {number} has no key {column!r}: {text:.80} Pass --text_column.")
        yield number, record[column]


def open_dataset(arguments: TextArguments) -> tuple[Iterator[Place], int | None]:
    """The texts of `arguments.dataset`, and how many they are if that is known."""
    texts, total = dataset_texts(arguments)
    return ((f"{arguments.dataset}, row {number}", text) for number, text in enumerate(texts)), total


def dataset_texts(arguments: TextArguments) -> tuple[Iterator[Any], int | None]:
    """The same without the places, which are the rows counted from 0."""
    require("datasets", extra="train", purpose="--dataset")
    import datasets

    name, split, column = str(arguments.dataset), arguments.split, arguments.text_column
    if any(Path(name, file).is_file() for file in ("dataset_dict.json", "state.json")):  # by `save_to_disk`
        data = datasets.load_from_disk(name)
        if isinstance(data, datasets.DatasetDict):
            if split not in data:
                raise ValueError(f"--dataset {name} has no split {split!r} but {list(data)}; pass --split.")
            data = data[split]
        elif split != TextArguments.split:
            raise ValueError(f"--dataset {name} is one set and has no split {split!r}; pass a folder of a DatasetDict.")
    else:
        data = datasets.load_dataset(name, arguments.dataset_config, split=split, streaming=arguments.streaming)
    if data.column_names is not None:
        if column not in data.column_names:
            raise ValueError(f"--dataset {name} has no column {column!r} but {data.column_names}; pass --text_column.")
        data = data.select_columns([column])
    total = None if isinstance(data, datasets.IterableDataset) else len(data)
    # By `iter`, which reads all of a stream also in a worker of a `DataLoader`, where the stream's own iterator takes
    # a share of it.
    batches = data.iter(batch_size=ROWS_AT_ONCE)
    return (text for batch in batches for text in batch.get(column, [None])), total


def require(module: str, extra: str, purpose: str):
    if find_spec(module) is None:
        raise ImportError(f'{purpose} needs {module}: pip install "modeling-elmo[{extra}]"')


def write_lines(path: Path, lines: Iterable[str]):
    """All or nothing: what stood there stays until the new file is complete. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, value: Any):
    """As `write_lines`."""
    write_lines(path, [json.dumps(value, indent=1, ensure_ascii=False)])


def read_json(path: Path) -> Any:
    """
    Raises:
        ValueError: the file is not JSON, which the message says by its name.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON in UTF-8: {error}. Make it anew, or delete it.") from error
