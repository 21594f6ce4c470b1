"""Texts of files and data sets: which of them the options name, and their lines and rows, read one at a time."""

import gzip
import io
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import IO, Any, BinaryIO

from .command_line import flat_message, option, require

BLOCK_BYTES = 2**11  # of the lines of a file that are read together
ROWS_AT_ONCE = 1000  # rows read from a data set at once; single rows take ten times as long
_observer: ContextVar[Callable[[int], Any] | None] = ContextVar("observer of reading", default=None)
SPLIT_SIZE = 10**12  # stands for a size that is not known yet; no split is larger


@dataclass(kw_only=True)
class RunningTextArguments:
    """The option of every program that reads raw text."""

    split_sentences: str | None = option(
        None,
        "Join the lines of each paragraph, and split it into sentences by the rules of a language: en if no code is "
        "given. Default: each line is a sentence.",
        nargs="?",
        const="en",
    )


@dataclass(kw_only=True)
class DatasetArguments(RunningTextArguments):
    """Options of every program that reads texts."""

    _argument_group_name = "options of a data set"

    dataset: str | None = option(None, "Data set to read instead of files: a folder or a name on the Hub.")
    dataset_config: str | None = option(None, "Configuration of the data set.")
    streaming: bool = option(False, "Read the data set while it is downloaded, without a copy on disk.")
    text_column: str = option("text", "Column or key of the text or its words; in .conll, a number (default: 1).")


@dataclass(kw_only=True)
class TextArguments(DatasetArguments):
    """Options of programs that read the texts of one split."""

    _argument_group_name = "options of a data set"

    split: str = option("train", "Split to read.")


@contextmanager
def observed_reading(observer: Callable[[int], Any]) -> Iterator[None]:
    """Inside the block, `observer` is told the number of bytes whenever some of a file were read."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def numbered_lines(path: Path, keeps_marks: bool = False) -> Iterator[tuple[int, str]]:
    """Line numbers from 1, each with the line of a UTF-8 file, which may be compressed (`.gz`, `.zst`).

    Only a line feed ends a line, as for `wc -l`; in a file without any line feed, carriage returns do, as on old Macs.
    Spaces and tabs at the end of a line stay. No line has a zero byte: English in UTF-16 would else pass for UTF-8.

    Args:
        keeps_marks: whether a line other than the first may begin with a byte order mark, as words with vectors do. In
            texts it is where a file was joined to another.
    """
    number = 0
    # A local name: Python empties the modules before it closes a generator that is still alive at exit.
    damaged = (EOFError, OSError, zlib.error)
    place, observer = 0, _observer.get()
    with path.open("rb") as file:
        try:
            for block in iter(partial(_unpacked(file, path).readlines, BLOCK_BYTES), []):
                if number == 0:
                    block[0] = block[0].removeprefix(BOM_UTF8)
                    if not block[0].endswith(b"\n"):
                        block = block[0].splitlines()
                joined = b"".join(block)  # a look at each line would take a third of the time
                has_zero = b"\0" in joined
                if not keeps_marks and BOM_UTF8[:1] in joined:  # one byte is found in less time than three
                    block = [line.removeprefix(BOM_UTF8) for line in block]
                for line in block:
                    number += 1
                    if has_zero and (zero := line.find(0)) >= 0:
                        raise UnicodeDecodeError("utf-8", line, zero, zero + 1, "a zero, as in UTF-16,")
                    yield number, line.decode().rstrip("\r\n")
                if observer is not None and (end := file.tell()) > place:
                    observer(end - place)
                    place = end
        except UnicodeDecodeError as error:
            reason = f"{error.reason} at byte {error.start}"
            raise ValueError(f"{path}, line {number} is not UTF-8: {reason}. Convert it, or name it .gz.") from error
        except damaged as error:
            if isinstance(error, OSError) and error.errno:  # of the disk
                raise
            raise ValueError(f"{path} cannot be unpacked: {error}; pass another copy.") from error


def _unpacked(file: BinaryIO, path: Path) -> IO[bytes] | gzip.GzipFile:
    suffix = path.suffix.lower()
    if suffix not in (".gz", ".zst"):
        return file
    if not path.stat().st_size:
        raise EOFError("the file is empty")
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    require("pyarrow", extra="train", purpose=str(path))
    import pyarrow  # the reader of the package zstandard does not notice a truncated file

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


def dataset_texts(
    arguments: TextArguments, split_option: str = "--split"
) -> tuple[Callable[[], Iterator[Any]], int | None]:
    """A function that reads the texts of `arguments.dataset`, and their number, `None` if it is unknown."""
    require("datasets", extra="train", purpose="--dataset")
    import datasets

    name = str(arguments.dataset)
    split = arguments.split
    column = arguments.text_column
    where = f"--dataset {name}, {split_option} {split}"
    if splits := saved_splits(name, arguments.dataset_config):
        sizes = {split_name: len(data) for split_name, data in splits.items()}
        parts = split_parts(split, sizes, where)
        data = datasets.concatenate_datasets(
            [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
        )
    else:
        options = {"split": split, "streaming": arguments.streaming}
        data = load_dataset(name, arguments.dataset_config, where, **options)
    if data.column_names is not None:
        if column not in data.column_names:
            raise ValueError(f"--dataset {name} has no column {column!r} but {data.column_names}; pass --text_column.")
        data = data.select_columns([column])
    total = None if isinstance(data, datasets.IterableDataset) else len(data)

    def texts() -> Iterator[Any]:
        # In a worker of a `DataLoader` the stream's own iterator reads a share of the rows only; `iter` reads them all.
        for batch in data.iter(batch_size=ROWS_AT_ONCE):
            yield from batch.get(column, [None])

    return texts, total


def load_dataset(name: str, config: str | None, where: str, **options: Any) -> Any:
    """`datasets.load_dataset`, whose errors name the mistake in the data, its splits or its configurations."""
    import datasets

    try:
        return datasets.load_dataset(name, config, **options)
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        if isinstance(cause, OSError):  # a full disk, for example
            raise cause from None
        if config is not None:
            where += f", --dataset_config {config}"
        raise ValueError(f"{where}: {flat_message(cause or error):.500}") from error


def saved_splits(folder: str, config: str | None) -> Mapping[str, Any]:
    """The splits of a folder that `save_to_disk` has made; an empty mapping for any other folder."""
    import datasets

    if not any(Path(folder, file).is_file() for file in ("dataset_dict.json", "state.json")):
        return {}
    if config is not None:
        raise ValueError(f"--dataset_config {config}: {folder} was made by save_to_disk; leave it out.")
    # A saved format of arrays or tensors would change lists of words, and one of some columns would hide the others.
    data = datasets.load_from_disk(folder).with_format(None)
    if isinstance(data, datasets.DatasetDict):
        return data
    return {TextArguments.split: data}


def split_parts(split: str, sizes: Mapping[str, int], where: str) -> list[Any]:
    """The parts of splits that an expression such as `train[:80%]+extra` names: `splitname`, `from_` and `to`."""
    require("datasets", extra="train", purpose=where)
    from datasets import ReadInstruction

    try:
        return ReadInstruction.from_spec(split).to_absolute(dict(sizes))
    except ValueError as error:
        raise ValueError(f"{where}: {error} The splits are {list(sizes)}; '{[*sizes][0]}[90%:]' is a part.") from error


def refuse_training_data(held_out: str, held_out_option: str, train: str, train_option: str):
    """Refuses a held-out part of splits that overlaps with the training data, whatever the sizes of large splits.

    The training data themselves, all of them, may be evaluated on.
    """
    if held_out == train:
        return
    require("datasets", extra="train", purpose=f"{held_out_option} {held_out}")
    from datasets import ReadInstruction

    expressions = f"{held_out}+{train}".split("+")
    sizes = {expression.split("[")[0].strip(): SPLIT_SIZE for expression in expressions}

    def parts(split: str) -> list[tuple[bool, Any]]:
        """Whether each part is in percent, and the part."""
        in_percent = ["%" in expression for expression in split.split("+")]
        return list(zip(in_percent, ReadInstruction.from_spec(split).to_absolute(sizes), strict=True))

    try:
        pairs = list(product(parts(held_out), parts(train)))
    except ValueError:
        return  # `split_parts` refuses it, and knows the names of the splits
    for (in_percent, part), (other_in_percent, other) in pairs:
        name = part.splitname
        sizes_of_parts = (part.to - part.from_, other.to - other.from_)
        # Rows and percents can be compared only if one of the parts is the whole split.
        is_comparable = in_percent == other_in_percent or SPLIT_SIZE in sizes_of_parts
        overlaps = max(part.from_, other.from_) < min(part.to, other.to)
        if name == other.splitname and is_comparable and overlaps:
            rest = f"pass another or none, or {train_option} with the rest, such as '{name}[:90%]' for '{name}[90%:]'"
            raise ValueError(f"{held_out_option} {held_out} is also training data ({train}); {rest}.")
