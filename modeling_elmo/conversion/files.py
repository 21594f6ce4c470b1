"""Files of foreign checkpoints: found in folders, archives or on the Hub; written completely or not at all.

A foreign file may be damaged, or made to do harm. Sizes in its headers are checked before memory is allocated,
only what is needed is unpacked, and no other file is read.
"""

import errno
import gzip
import json
import math
import re
import signal
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PureWindowsPath
from threading import current_thread, main_thread
from typing import IO, Any, NamedTuple

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import Tensor

# Best name first. Archives of NLPL have model.hdf5, options.json or meta.json, and vocab.txt.
WEIGHTS_FILES = ("model.hdf5", "*.hdf5", "*.h5")
OPTIONS_FILES = ("options.json", "meta.json", "*options*.json")
VOCABULARY_FILES = ("vocab.txt", "vocab.txt.gz")
SOFTMAX_FILES = ("*softmax*.hdf5", "*softmax*.h5")

HUB_REFERENCE = re.compile(r"hf://(?P<repo_id>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<filename>.+)")
HUB_ERRORS: dict[type[Exception], str] = {  # GatedRepoError is a RepositoryNotFoundError
    GatedRepoError: "access to {repo_id} is restricted; request access on its page, then run `hf auth login`.",
    RepositoryNotFoundError: "there is no model {repo_id}, or it is private; pass another, or run `hf auth login`.",
    RevisionNotFoundError: "{repo_id} has no revision {revision}; pass a branch, tag or commit of it.",
    RemoteEntryNotFoundError: "{repo_id} has no file {filename}; pass one from the list on its page.",
    LocalEntryNotFoundError: "the Hub cannot be reached and the cache has no copy; try again, or pass a file on disk.",
}


ByteStream = IO[bytes] | gzip.GzipFile
Shapes = dict[str, tuple[int, ...]]  # of the arrays of a file, by their full names

# What the libraries for archives and HDF5 raise for damaged files, whose bytes may mean anything.
PYTHON_ERRORS = (ArithmeticError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError)
DAMAGE = (*PYTHON_ERRORS, zipfile.BadZipFile, zlib.error)
# A compressed file may expand by this factor, or to this number of bytes. Word lists expand by 4, weights by 1.1.
MOST_EXPANSION, ALWAYS_ALLOWED = 20, 2**26
# Groups and arrays of an HDF5 file, and the letters of their names. The original models have 60, of 43 letters.
MOST_OBJECTS, LONGEST_NAME = 10_000, 200
# Levels and bytes of a JSON object. options.json has 3 levels and 500 bytes.
MOST_LEVELS, LARGEST_JSON = 20, 2**20


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of the library that reads `path` become errors with the name of the file."""
    try:
        yield
    except DAMAGE as error:
        raise ValueError(f"{path} is damaged or incomplete ({error}); pass another copy.") from error


def fetch(reference: str | Path) -> Path:
    """The local file, folder or archive of a path or of `hf://...`."""
    if hub := HUB_REFERENCE.fullmatch(str(reference)):
        path = download(hub)
    elif str(reference).startswith("hf://"):
        raise ValueError(f"{reference} is not a file; pass hf://user/repo/path or hf://user/repo@revision/path.")
    else:
        path = Path(reference)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; pass a file, a folder, a .zip archive or hf://user/repo/path.")
    return path


def download(hub: re.Match[str]) -> Path:
    """The cached file of a match of `HUB_REFERENCE`."""
    try:
        return Path(hf_hub_download(hub["repo_id"], hub["filename"], revision=hub["revision"]))
    except tuple(HUB_ERRORS) as error:
        advice = next(text for kind, text in HUB_ERRORS.items() if isinstance(error, kind))
        raise FileNotFoundError(f"{hub[0]}: {advice.format(**hub.groupdict())}") from error


def is_archive(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() == ".zip"


def names_in(place: Path) -> list[str]:
    """The files of a folder or archive by their paths inside it. Refuses paths that lead outside, on any system.

    The files that a Mac adds for each file (`._name`, in archives below `__MACOSX`) are left out.
    """
    if place.is_dir():
        names = [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]
        return [name for name in names if not _is_from_mac(name)]
    if not zipfile.is_zipfile(place):
        raise ValueError(f"{place} is not a complete .zip archive; pass another copy, or the unpacked files.")
    with reading(place), zipfile.ZipFile(place) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    for entry in map(PureWindowsPath, names):
        if entry.anchor or ".." in entry.parts:
            raise ValueError(f"{place} has the entry {str(entry)!r}, which is outside of its folder.")
    return [name for name in names if not _is_from_mac(name)]


def _is_from_mac(name: str) -> bool:
    path = PureWindowsPath(name)
    return "__MACOSX" in path.parts or path.name.startswith("._")


def search(place: Path, patterns: tuple[str, ...]) -> str | None:
    """The only file of a folder or archive for the first pattern that has any."""
    names = sorted(names_in(place))
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(PureWindowsPath(name).name, pattern)]
        if len(found) > 1:
            advice = "Pass the path of one of them." if place.is_dir() else "Unpack the archive and pass one of them."
            raise ValueError(f"{place}: several files match {pattern}: {', '.join(first_of(found))}. {advice}")
        if found:
            return found[0]
    return None


def find(reference: str | Path, patterns: tuple[str, ...], scratch: Path) -> Path:
    """The local, uncompressed file of a reference to a file, or to a folder or archive with the file."""
    path = fetch(reference)
    if path.is_dir() or is_archive(path):
        name = search(path, patterns)
        if name is None:
            raise FileNotFoundError(f"{reference} has no file {' or '.join(patterns)}; pass the path of the file.")
        path = unpack(path, name, scratch) if is_archive(path) else path / name
    return decompress(path, scratch) if path.suffix == ".gz" else path


def find_checkpoint(
    weights: str | Path,
    options: str | Path | None,
    vocabulary: str | Path | None,
    softmax: str | Path | None,
    scratch: Path,
) -> tuple[Path, Path, Path | None, Path | None]:
    """The local files of the four references. A folder or archive of weights may have options and vocabulary too."""
    local = fetch(weights)
    if local.is_dir() or is_archive(local):
        vocabulary = vocabulary or (local if search(local, VOCABULARY_FILES) else None)
    elif local.name.lower().endswith((".tar", ".tar.gz", ".tgz", ".pkl")):
        what = "one file of a checkpoint" if local.suffix == ".pkl" else "an archive that is not .zip; unpack it"
        raise ValueError(f"{weights} is {what}; pass the folder with the checkpoint's files.")
    elif options is None:
        raise ValueError(f"{weights} is a single file; pass its options.json too.")
    return (
        find(local, WEIGHTS_FILES, scratch),
        find(options or local, OPTIONS_FILES, scratch),
        find(vocabulary, VOCABULARY_FILES, scratch) if vocabulary else None,
        find(softmax, SOFTMAX_FILES, scratch) if softmax else None,
    )


def unpack(archive: Path, name: str, scratch: Path) -> Path:
    """Unpacks one file of an archive."""
    with reading(archive), zipfile.ZipFile(archive) as contents:
        method = contents.getinfo(name).compress_type
    if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # LZMA takes 4 GB of memory if the file says so
        raise ValueError(f"{archive} has {name} in the rare compression {method}; unpack it and pass the folder.")
    plain = Path(tempfile.mkdtemp(dir=scratch), PureWindowsPath(name).name)
    return expand(archive, lambda: zipfile.ZipFile(archive).open(name), plain)


def decompress(path: Path, scratch: Path) -> Path:
    return expand(path, lambda: gzip.open(path), Path(tempfile.mkdtemp(dir=scratch), path.stem))


def expand(packed: Path, unpacked: Callable[[], ByteStream], plain: Path) -> Path:
    """Writes the unpacked stream of a file to `plain`."""
    left = max(MOST_EXPANSION * packed.stat().st_size, ALWAYS_ALLOWED)
    with plain.open("wb") as file:
        for block in _blocks(packed, unpacked):
            file.write(block)
            left -= len(block)
            if left < 0:
                raise ValueError(
                    f"{packed} expands to more than {MOST_EXPANSION} times its size; if {plain.name} is what you "
                    "expect, unpack it and pass the unpacked file."
                )
    return plain


def _blocks(packed: Path, unpacked: Callable[[], ByteStream]) -> Iterator[bytes]:
    with reading(packed), unpacked() as stream:
        while block := stream.read(2**20):
            yield block


def first_of(items: list[str], most: int = 20) -> list[str]:
    """The items that an error lists."""
    return items if len(items) <= most else [*items[:most], f"and {len(items) - most} more"]


def check_empty(output_dir: Path):
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise FileExistsError(f"{output_dir} is not empty; pass a new or an empty folder as output_dir.")


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A path for a new file or folder, which replaces `target` after success and is deleted after an error.

    A file replaces an older file, a folder an empty folder, also behind a link. A device or a pipe is never replaced:
    the content of the file is written into it. SIGTERM deletes the new file or folder, too, and ends the process.
    """
    is_stream = target.exists() and not (target.is_file() or target.is_dir())
    target = target.resolve() if target.is_dir() else target
    target.parent.mkdir(parents=True, exist_ok=True)
    place = tempfile.gettempdir() if is_stream else target.parent
    with _exit_at_sigterm(), tempfile.TemporaryDirectory(dir=place, prefix=f".{target.name}.") as beside:
        staging = Path(beside, target.name)
        try:
            yield staging
            if staging.is_dir() and target.is_dir():
                target.rmdir()  # Windows does not rename onto a folder
            if is_stream:
                target.write_bytes(staging.read_bytes())
            else:
                staging.replace(target)
        except OSError as error:
            if error.errno == errno.ENOSPC and error.filename is None:
                error.filename = str(target)  # a write to a full disk names no file
            raise


@contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """SIGTERM leaves `with` blocks like an error. Only the main thread has signals; others' handlers stay."""
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the shell's exit status
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class ArrayHeader(NamedTuple):
    shape: tuple[int, ...] = ()
    size: int = 0  # number of bytes in the file
    problem: str | None = None  # why the values are not float32 numbers in this file


def read_shapes(path: Path) -> Shapes:
    """The shapes of all arrays of an HDF5 file by their full names. The values are not read.

    Raises:
        ValueError: the values of an array are not float32 numbers, or not in this file. HDF5 reads other files if an
            array says so, and zeros for what was never written.
    """
    h5py = import_h5py()
    if not h5py.is_hdf5(path):
        raise ValueError(f"{path} is not an HDF5 file; pass the weights that dump_weights of bilm-tf wrote.")
    with reading(path), h5py.File(path, "r") as file:
        headers = {name: _header(item) for name, item in islice(_hdf5_objects(file), MOST_OBJECTS)}
    if len(headers) == MOST_OBJECTS or max(map(len, headers), default=0) > LONGEST_NAME:
        raise ValueError(
            f"{path} has {len(headers)} groups and arrays, whose names have up to {max(map(len, headers))} letters; "
            f"biLMs have less than {MOST_OBJECTS}, of up to {LONGEST_NAME}. Pass the weights of a biLM."
        )
    arrays = {name: header for name, header in headers.items() if header is not None}
    if problems := [f"{name} ({header.problem})" for name, header in arrays.items() if header.problem]:
        raise ValueError(
            f"{path} must have float32 arrays only, for an exact export, all of them uncompressed and in this file; "
            f"got {', '.join(first_of(problems))}. Pass the weights that dump_weights of bilm-tf wrote."
        )
    if (size := sum(header.size for header in arrays.values())) > path.stat().st_size:
        raise ValueError(f"{path} is damaged or incomplete (its arrays need {size} bytes); pass another copy.")
    return {name: header.shape for name, header in arrays.items()}


def _hdf5_objects(file: Any) -> Iterator[tuple[str, Any]]:
    """All groups and arrays of an HDF5 file, and its links, which are not followed. Groups may be in themselves."""
    h5py = import_h5py()
    groups = [("", file)]
    for prefix, group in groups:
        for name in group:
            link = group.get(name, getlink=True)
            item = group[name] if isinstance(link, h5py.HardLink) else link
            yield prefix + name, item
            if isinstance(item, h5py.Group) and len(prefix + name) <= LONGEST_NAME:
                groups.append((f"{prefix}{name}/", item))


def _header(item: Any) -> ArrayHeader | None:
    """The header of an object of an HDF5 file; `None` for a group."""
    h5py = import_h5py()
    if isinstance(item, h5py.Group):
        return None
    if not isinstance(item, h5py.Dataset):
        return ArrayHeader(problem="a link or a type")
    if item.dtype != "float32" or item.shape is None:
        return ArrayHeader(problem="no values" if item.shape is None else f"{item.dtype!s:.80}")
    if item.external or item.is_virtual:
        return ArrayHeader(problem="values in another file")
    if item.id.get_create_plist().get_nfilters():
        return ArrayHeader(problem="compressed, which h5repack -f NONE undoes")
    blocks = item.chunks or item.shape
    rounded = (-(-rows // block) * block for rows, block in zip(item.shape, blocks, strict=True))
    size = 4 * math.prod(rounded) if item.size else 0
    is_written = item.id.get_storage_size() >= size
    return ArrayHeader(item.shape, size, None if is_written else "values never written")


def read_arrays(path: Path) -> dict[str, Tensor]:
    """All arrays of an HDF5 file by their full names; see [`read_shapes`]."""
    shapes = read_shapes(path)
    with reading(path), import_h5py().File(path, "r") as file:
        arrays = {name: torch.as_tensor(file[name][()]) for name in shapes}
    check_finite(arrays, path)
    return arrays


def check_finite(arrays: dict[str, Tensor], path: Path):
    if wrong := [name for name, array in arrays.items() if not array.isfinite().all()]:
        raise ValueError(f"{path} has NaN or infinite values in {', '.join(first_of(wrong))}; pass another copy.")


def shapes_of(arrays: dict[str, Tensor]) -> Shapes:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def num_equal(arrays: dict[str, Tensor], others: dict[str, Tensor]) -> int:
    """The number of arrays that are bit for bit among the others, under the same name."""
    return sum(name in others and torch.equal(array, others[name]) for name, array in arrays.items())


def num_rows(shapes: Shapes, name: str) -> int:
    """The number of rows of an array; 0 if it has none, or if there is no such array."""
    return (*shapes.get(name, ()), 0)[0]


def check_shapes(found: Shapes, expected: Shapes, weights: Path, options: Path):
    problems = [
        f"{name}: the file has {found.get(name, 'none (missing)')}, "
        f"the options require {expected.get(name, 'none (unexpected)')}"
        for name in sorted(expected | found)
        if found.get(name) != expected.get(name)
    ]
    if problems:
        raise ValueError("\n  ".join([f"{weights} does not match {options}:", *first_of(problems)]))


def write_arrays(arrays: dict[str, Tensor], path: Path):
    with import_h5py().File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array.numpy())


def import_h5py():
    try:
        import h5py
    except ImportError as error:
        raise ImportError("HDF5 files need h5py: pip install 'modeling-elmo[convert]'") from error
    return h5py


def read_json_object(path: Path, name: str = "options.json") -> dict[str, Any]:
    if (size := path.stat().st_size) > LARGEST_JSON:
        raise ValueError(f"{path} has {size} bytes, at most {LARGEST_JSON} are read; pass the checkpoint's {name}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep
        raise ValueError(f"{path} is not a JSON file ({error}); pass the checkpoint's {name}.") from error
    if has_more_levels(content, MOST_LEVELS):
        raise ValueError(f"{path} is nested more than {MOST_LEVELS} levels deep; pass the checkpoint's {name}.")
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got {str(content)[:80]!r}; pass the {name}.")
    return content


def has_more_levels(content: Any, levels: int) -> bool:
    level = [content]
    for _ in range(levels + 1):
        inner = [
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, (dict, list))
        ]
        level = [value for values in inner for value in values]
    return bool(level)


def write_json_object(content: dict[str, Any], path: Path):
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_words(words: list[str], path: Path):
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8", newline="\n")
