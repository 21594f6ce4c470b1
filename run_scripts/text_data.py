"""Where the texts of the scripts come from: files with a text a line, and data sets; read one by one."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any


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


def read_file(path: Path, column: str) -> Iterator[Place]:
    """A text a line: `.jsonl` files hold it under the key `column`, others as it is; either may be gzipped (`.gz`)."""
    is_jsonl = path.name.removesuffix(".gz").endswith(".jsonl")
    return _json_texts(path, column) if is_jsonl else _lines(path)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines end at line feeds alone, which is how `wc -l` counts."""
    number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, 1):
                yield f"{path}, line {number}", line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, line {number} is not UTF-8: {error.reason} at byte {error.start}. Convert the file with "
                "iconv, for example."
            ) from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is not a complete gzip file: {error}.") from error


def _json_texts(path: Path, column: str) -> Iterator[Place]:
    for where, text in _lines(path):
        try:
            record = json.loads(text) if text else {column: ""}
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}.") from error
        if not isinstance(record, dict) or column not in record:
            raise ValueError(f"{where} has no key {column!r}: {text:.80} Pass --text_column.")
        yield where, record[column]


def open_dataset(arguments: TextArguments) -> tuple[Iterator[Place], int | None]:
    """The texts of `arguments.dataset`, and how many they are if that is known."""
    require("datasets", extra="train", purpose="--dataset")
    import datasets

    name, split, column = str(arguments.dataset), arguments.split, arguments.text_column
    if any(Path(name, file).is_file() for file in ("dataset_dict.json", "state.json")):  # by `save_to_disk`
        data = datasets.load_from_disk(name)
        if isinstance(data, datasets.DatasetDict):
            if split not in data:
                raise ValueError(f"--dataset {name} has no split {split!r} but {list(data)}; pass --split.")
            data = data[split]
    else:
        data = datasets.load_dataset(name, arguments.dataset_config, split=split, streaming=arguments.streaming)
    if data.column_names is not None and column not in data.column_names:
        raise ValueError(f"--dataset {name} has no column {column!r} but {data.column_names}; pass --text_column.")
    total = None if isinstance(data, datasets.IterableDataset) else len(data)
    return ((f"{name}, row {i}", row.get(column)) for i, row in enumerate(data)), total


def require(module: str, extra: str, purpose: str):
    if find_spec(module) is None:
        raise ImportError(f'{purpose} needs {module}: pip install "modeling-elmo[{extra}]"')
