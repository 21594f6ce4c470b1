"""Files of all programs: texts are read one at a time, results are written completely or not at all."""

import errno
import gzip
import hashlib
import io
import json
import os
import pickle
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from safetensors import SafetensorError
from transformers import PreTrainedConfig
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME, cached_file, extract_commit_hash

from modeling_elmo.conversion.files import check_complete, staged

from .command_line import flat_message, is_mistake_of_user, option


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


# The files of a published model, in the order of writing. config.json is the last: without it the folder is not a
# model, so nobody loads a folder that is half written.
MODEL_FILES = (
    *("*.py", "README.md", "vocab.txt", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),  # of transformers 4
    *("model*.safetensors", "*.safetensors.index.json", "config.json"),
)
SPLIT_SIZE = 10**12  # stands for a size that is not known yet; no split is larger
BLOCK_BYTES = 2**11  # of the lines of a file that are read together
ROWS_AT_ONCE = 1000  # rows read from a data set at once; single rows take ten times as long


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers from 1, each with the line of a UTF-8 file, which may be compressed (`.gz`, `.zst`).

    Only a line feed ends a line, as for `wc -l`; in a file without any line feed, carriage returns do, as on old Macs.
    Spaces and tabs at the end of a line stay. No line has a zero byte: English in UTF-16 would else pass for UTF-8.
    """
    number = 0
    # A local name: Python empties the modules before it closes a generator that is still alive at exit.
    damaged = (EOFError, OSError, zlib.error)
    with path.open("rb") as file:
        try:
            for block in iter(partial(_unpacked(file, path).readlines, BLOCK_BYTES), []):
                if not number:
                    block = [block[0].removeprefix(BOM_UTF8), *block[1:]]
                    block = block if block[0].endswith(b"\n") else block[0].splitlines()
                has_zero = b"\0" in b"".join(block)  # a look at each line would take a third of the time
                for line in block:
                    number += 1
                    if has_zero and (zero := line.find(0)) >= 0:
                        raise UnicodeDecodeError("utf-8", line, zero, zero + 1, "a zero, as in UTF-16,")
                    yield number, line.decode().rstrip("\r\n")
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

    name, split, column = str(arguments.dataset), arguments.split, arguments.text_column
    if splits := saved_splits(name, arguments.dataset_config):
        sizes = {whole: len(rows) for whole, rows in splits.items()}
        parts = split_parts(split, sizes, f"--dataset {name}, {split_option} {split}")
        data = datasets.concatenate_datasets(
            [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
        )
    else:
        options = {"split": split, "streaming": arguments.streaming}
        data = load_dataset(name, arguments.dataset_config, f"--dataset {name}, {split_option} {split}", **options)
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
    """`datasets.load_dataset`, whose errors tell the mistake in the data, its splits or its configurations."""
    import datasets

    try:
        return datasets.load_dataset(name, config, **options)
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        if isinstance(cause, OSError):  # a full disk, for example
            raise cause from None
        of_config = "" if config is None else f", --dataset_config {config}"
        raise ValueError(f"{where}{of_config}: {flat_message(cause or error):.500}") from error


def saved_splits(folder: str, config: str | None) -> Mapping[str, Any]:
    """The splits of a folder that `save_to_disk` has made; none of any other."""
    import datasets

    if not any(Path(folder, file).is_file() for file in ("dataset_dict.json", "state.json")):
        return {}
    if config is not None:
        raise ValueError(f"--dataset_config {config}: {folder} was made by save_to_disk; leave it out.")
    data = datasets.load_from_disk(folder)
    return data if isinstance(data, datasets.DatasetDict) else {TextArguments.split: data}


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

    sizes = {piece.split("[")[0].strip(): SPLIT_SIZE for piece in f"{held_out}+{train}".split("+")}

    def parts(split: str) -> list[tuple[bool, Any]]:
        """Whether each part is in percent, and the part."""
        in_percent = ["%" in piece for piece in split.split("+")]
        return [*zip(in_percent, ReadInstruction.from_spec(split).to_absolute(sizes), strict=True)]

    try:
        ours, theirs = parts(held_out), parts(train)
    except ValueError:
        return  # `split_parts` refuses it, and knows the names of the splits
    for (in_percent, part), (other_in_percent, other) in product(ours, theirs):
        # Rows and percents can be compared only if one of the parts is the whole split.
        is_comparable = in_percent == other_in_percent or SPLIT_SIZE in (part.to - part.from_, other.to - other.from_)
        overlaps = max(part.from_, other.from_) < min(part.to, other.to)
        if (name := part.splitname) == other.splitname and is_comparable and overlaps:
            rest = f"pass another or none, or {train_option} with the rest, such as '{name}[:90%]' for '{name}[90%:]'"
            raise ValueError(f"{held_out_option} {held_out} is also training data ({train}); {rest}.")


def check_model(name_or_path: str):
    """Checks that a folder or the Hub has an ELMo model of this name, before a program works for it."""
    if (folder := Path(name_or_path)).exists():
        if not Path(folder, CONFIG_NAME).is_file():
            raise FileNotFoundError(f"{folder} has no config.json; pass a model, or convert one with elmo convert.")
        config = read_json(folder / CONFIG_NAME)
    else:
        try:
            config, _ = PreTrainedConfig.get_config_dict(name_or_path)
        except OSError as error:
            reason = f"there is no such folder, and the Hub gives no model ({flat_message(error):.300})"
            raise FileNotFoundError(f"{name_or_path}: {reason}. Correct it, or run `hf auth login`.") from error
    if (kind := config.get("model_type") if isinstance(config, dict) else None) != "elmo":
        raise ValueError(f"{name_or_path} is a {kind!r} model; pass an ELMo model.")


def load_pretrained(kind: Any, name_or_path: str | Path, **options: Any) -> Any:
    """`kind.from_pretrained(name_or_path, **options)`, of a model or a tokenizer, with checked weights.

    All weights must be there, unless `output_loading_info` is asked for.
    """
    is_model = hasattr(kind, "_model_mapping") or issubclass(kind, torch.nn.Module)
    is_whole = is_model and "output_loading_info" not in options
    try:
        loaded = kind.from_pretrained(name_or_path, **({"output_loading_info": True} if is_whole else {}), **options)
    except Exception as error:  # of torch, safetensors, tokenizers, json: whatever the files hold
        if is_mistake_of_user(error) and str(name_or_path) in str(error):
            raise
        is_pickle = isinstance(error, pickle.UnpicklingError)  # whose message advises to run the code in the file
        reason = "a pickle is damaged, or holds more than tensors" if is_pickle else flat_message(error).rstrip(".")
        raise ValueError(f"{name_or_path} cannot be loaded: {reason:.300}. Copy it again, or pass another.") from error
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # beside `output_loading_info`
    if isinstance(model, torch.nn.Module) and (name := broken_weights(model)):
        raise ValueError(f"{name_or_path}: the weights of {name} are not finite. Pass another checkpoint.")
    if is_whole:
        check_complete(loaded[1]["missing_keys"], name_or_path)
    return model if is_whole else loaded


def model_digest(name_or_path: str, is_baseline: bool = False) -> str:
    """A digest of a model's files without its code, whichever transformers wrote them, or its commit on the Hub.

    Args:
        is_baseline: whether only the tokenizer is read.
    """
    config = Path(cached_file(name_or_path, CONFIG_NAME))
    if commit := extract_commit_hash(str(config), None):
        return commit
    kinds = ("tokenizer*.json",) if is_baseline else ("*.safetensors", "tokenizer*.json")
    files = [path for kind in kinds for path in config.parent.glob(kind)]
    options = {} if is_baseline else {**read_json(config), "transformers_version": None, "auto_map": None}
    parts = map(_bytes_with_code, sorted(files))
    return digest(chain([json.dumps(options, sort_keys=True).encode()], parts))


def _bytes_with_code(path: Path) -> bytes:
    """A file of a model. The configuration of a tokenizer without code names code, as transformers writes it."""
    content = path.read_bytes()
    if path.name != TOKENIZER_CONFIG_FILE or b'"auto_map"' in content:
        return content
    config = {**read_json(path), "auto_map": {"AutoTokenizer": ["tokenization_elmo.ELMoTokenizer", None]}}
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def broken_weights(model: torch.nn.Module) -> str | None:
    """The name of the first parameter with a value that is infinite or not a number."""
    return next((name for name, weights in model.named_parameters() if not weights.isfinite().all()), None)


@contextmanager
def writing(target: Path | str) -> Iterator[None]:
    """Names what cannot be written: torch and safetensors tell a full disk without its name, as errors of their own."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        raise OSError(f"{target} cannot be written: {flat_message(error)}. Free space on this disk.") from error


def sync(folder: Path):
    """Writes files to the disk, and then the folders that contain them."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync_file(Path(path, name))
        sync_folder(Path(path))


def sync_file(path: Path):
    # Windows flushes only files that are open for writing, and other systems let nobody write to a read-only file.
    with path.open("rb+" if os.access(path, os.W_OK) else "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path):
    if os.name == "nt":  # it cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot synchronize folders
            raise
    finally:
        os.close(descriptor)


def require(module: str, extra: str, purpose: str):
    if find_spec(module) is None:
        raise ImportError(f'{purpose} needs {module}: pip install "modeling-elmo[{extra}]"')


def refuse_folder_or_pipe(path: Path, passed: str):
    """Refuses what exists, but cannot be read twice as a file. Files are read to find mistakes, and then again."""
    if path.is_dir():
        raise IsADirectoryError(f"{passed} is a folder; pass a file.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{passed} is a pipe or a device, which cannot be read twice; pass a file.")


def check_output(output: Path | str | None, suffix: str = ""):
    """Refuses an output that is a folder, or cannot be written, before the work is done. A pipe is written into."""
    if output is None:
        return
    path = Path(output)
    if not path.name.endswith(suffix):
        raise ValueError(f"--output {path}: pass a file that ends in {suffix}.")
    if path.is_dir():
        raise IsADirectoryError(f"--output {path} is a folder; pass the name of a file, such as {path / 'a.json'}.")
    is_replaced = path.is_file() or not path.exists()
    place = next(folder for folder in path.absolute().parents if folder.exists()) if is_replaced else path
    if path.is_socket() or place.is_dir() != is_replaced or not os.access(place, os.W_OK):
        raise PermissionError(f"--output {path} cannot be written: {place} cannot. Pass another file.")


def write_lines(path: Path, lines: Iterable[str]):
    """Writes a file that replaces an older one only when it is complete. Creates the folder if necessary."""
    with staged(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def write_json(path: Path, value: Any):
    write_lines(path, [json.dumps(value, indent=1, ensure_ascii=False)])


def read_json(path: Path) -> Any:
    return parse_json(path.read_bytes(), path)


def parse_json(text: str | bytes, source: Path | str) -> Any:
    """The value of a JSON text; `source` names the text in the error. No object may have a key twice."""
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(decoded, object_pairs_hook=_object_of_pairs)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON in UTF-8: {error}. Write it again, or pass another.") from error


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r:.80} twice")
    return found


def parse_json_object(text: str, source: str) -> dict[str, Any]:
    """The same for a text that must be an object."""
    if not isinstance(value := parse_json(text, source), dict):
        raise ValueError(f'{source} is not a JSON object; pass {{"name": value, ...}}.')
    return value


def digest(parts: Iterable[bytes], size: int = 8) -> str:
    """A digest of `size` bytes, which names what settings and caches depend on."""
    found = hashlib.blake2b(digest_size=size)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def files_named(name: str, folder: Path) -> list[Path]:
    """All files of a name below a folder. Another process may delete folders meanwhile."""
    return sorted(Path(place, name) for place, _, files in os.walk(folder) if name in files)
