"""Files: checked before the work begins, written completely or not at all, and named by digests of their content."""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from modeling_elmo.conversion.files import staged

from .command_line import flat_message

JsonObject = dict[str, Any]


def refuse_folder_or_pipe(path: Path, passed: str):
    """Refuses what exists, but cannot be read twice as a file. Files are read to find mistakes, and then again."""
    if path.is_dir():
        raise IsADirectoryError(f"{passed} is a folder; pass a file.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{passed} is a pipe or a device, which cannot be read twice; pass a file.")


def check_output(output: Path | str | None, suffix: str = ""):
    """Before the work is done, refuses an output that is a folder or cannot be written. A pipe can be written into."""
    if output is None:
        return
    path = Path(output)
    if not path.name.endswith(suffix):
        raise ValueError(f"--output {path}: pass a file that ends in {suffix}.")
    if path.is_dir():
        raise IsADirectoryError(f"--output {path} is a folder; pass the name of a file, such as {path / 'a.json'}.")
    is_replaced = path.is_file() or not path.exists()
    place = path
    if is_replaced:
        place = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_socket() or place.is_dir() != is_replaced or not os.access(place, os.W_OK):
        raise PermissionError(f"--output {path} cannot be written: {place} cannot. Pass another file.")


def write_lines(path: Path, lines: Iterable[str]):
    """Writes a file that replaces an older one only when it is complete. Creates the folder if necessary."""
    with staged(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


@contextmanager
def writing(target: Path | str) -> Iterator[None]:
    """Names what cannot be written: torch and safetensors report a full disk by errors of their own, without a name."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        raise OSError(f"{target} cannot be written: {flat_message(error)}. Free space on this disk.") from error


def sync(folder: Path):
    """Writes files to the disk, and then the folders that contain them."""
    for place, _, file_names in os.walk(folder, topdown=False):
        for file_name in file_names:
            sync_file(Path(place, file_name))
        sync_folder(Path(place))


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


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> JsonObject:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r:.80} twice")
    return mapping


def parse_json_object(text: str, source: str) -> JsonObject:
    """The same for a text that must be an object."""
    value = parse_json(text, source)
    if not isinstance(value, dict):
        raise ValueError(f'{source} is not a JSON object; pass {{"name": value, ...}}.')
    return value


def digest(parts: Iterable[bytes], size: int = 8) -> str:
    """A digest of `size` bytes, which names what settings and caches depend on."""
    content_hash = hashlib.blake2b(digest_size=size)
    for part in parts:
        content_hash.update(part)
    return content_hash.hexdigest()


def files_named(name: str, folder: Path) -> list[Path]:
    """All files of a name below a folder. Another process may delete folders meanwhile."""
    paths = []
    for place, _, file_names in os.walk(folder):
        if name in file_names:
            paths.append(Path(place, name))
    return sorted(paths)
