"""Files of foreign checkpoints: found in folders, archives or on the Hub; written completely or not at all."""

import errno
import gzip
import json
import math
import os
import pickle
import re
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import Tensor

try:
    from lzma import LZMAError
except ImportError:  # some builds of Python lack it
    LZMAError = EOFError  # type: ignore[misc, assignment]

HUB_REFERENCE = re.compile(r"hf://(?P<repo_id>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<filename>.+)")
# What the libraries for archives and HDF5 raise for damaged files, whose bytes may mean anything.
PYTHON_ERRORS = (ArithmeticError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError)
DAMAGE = (*PYTHON_ERRORS, zipfile.BadZipFile, tarfile.TarError, zlib.error, LZMAError)
MOST_LISTED = 20  # names in an error
ARCHIVE_NAME = re.compile(r".+\.(zip|tar|tgz|tbz2|txz|tar\.\w+)", re.IGNORECASE)
TORCH_FILES = (b"PK\x03\x04", b"\x80\x02")  # first bytes of what torch.save wrote since 1.6, and before
MOST_HEADER = 2**20  # bytes of a name in a tar archive


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of the library that reads `path` become errors with the name of the file."""
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # of the disk to which a file is unpacked
            raise
        raise ValueError(f"{path} cannot be read ({error}). It is damaged or incomplete; pass another copy.") from error


def fetch(reference: str | Path, scratch: Path) -> Path:
    """The local file or folder of a path or of `hf://...`. An archive is unpacked to a folder of its name.

    The content of a file shows whether it is a tar archive, because caches name files by digests.
    """
    path = Path(reference)
    if hub := HUB_REFERENCE.fullmatch(str(reference)):
        try:
            path = Path(hf_hub_download(hub["repo_id"], hub["filename"], revision=hub["revision"]))
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise FileNotFoundError(f"{reference} cannot be downloaded: {' '.join(str(error).split())}") from error
    if not path.exists():
        if Path(f"{path}.index").is_file():
            raise FileNotFoundError(
                f"{reference} is the prefix of a TensorFlow checkpoint; pass the folder {path.parent}."
            )
        raise FileNotFoundError(
            f"{reference} does not exist; pass a file, a folder, a .zip, a .tar.gz or hf://user/repo/path."
        )
    if not path.is_file():  # a folder, or a pipe, which can be read only once
        return path
    is_tar = _is_tar(path)
    if not is_tar and not ARCHIVE_NAME.fullmatch(path.name):
        return path
    folder = Path(tempfile.mkdtemp(dir=scratch), path.name)
    folder.mkdir()
    with reading(path):
        if is_tar:
            _unpack_tar(path, folder)
        elif not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                raise ValueError(f"it is not a zip file or tar archive, and begins with {file.read(20)!r}")
        else:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder)
    return folder


def _is_tar(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (EOFError, zlib.error, LZMAError):  # it ends, or is damaged, before the first name
        return False


class _TarHeader(tarfile.TarInfo):
    """A header in a tar archive. Else tarfile reads a name of any length into memory."""

    def _proc_member(self, archive):  # tarfile's own place for what each type of header needs
        if self.size > MOST_HEADER and not self.isreg():
            raise tarfile.ReadError(f"a header has {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc] # typeshed leaves it out


def _unpack_tar(path: Path, folder: Path):
    """Writes the files of a tar archive into `folder`, whatever their names. A link to one of them is the same file.

    Devices and links to other places are left out.
    """
    free = shutil.disk_usage(folder).free
    size = 0
    links = {}
    with tarfile.open(path, tarinfo=_TarHeader) as archive:
        for member in archive:
            target = folder / inner_path(member.name)
            size += member.size
            if member.size < 0:  # tarfile would go back in the file, without an end
                raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
            if size > free:
                problem = f"{path} needs more than the {free:,} bytes that are free to unpack it"
                raise OSError(errno.ENOSPC, problem, str(folder.parent))
            if member.islnk():
                links[target] = folder / inner_path(member.linkname)
            elif member.issym():
                links[target] = folder / inner_path(os.path.join(os.path.dirname(member.name), member.linkname))
            elif content := archive.extractfile(member):
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, target.open("wb") as file:
                    shutil.copyfileobj(content, file)
        while archive.fileobj.read(2**20):  # to the checksum of a compressed file, which tarfile does not reach
            pass
    for target, source in links.items():
        if source.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(source, target)


def inner_path(name: str) -> Path:
    """The path in an archive without its root and without steps to folders above, as zipfile makes it."""
    path = Path(os.path.normpath(name))
    return Path(*(part for part in path.parts if part not in ("..", path.anchor)))


def files_in(folder: Path) -> list[Path]:
    """All files, also in folders below, without the file `._name` that a Mac adds for each."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("._"))


def search(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    """The only file for the first pattern that has any."""
    for pattern in patterns:
        paths = [path for path in files_in(folder) if fnmatchcase(path.name, pattern)]
        if len(paths) > 1:
            names = first_of(path.relative_to(folder).as_posix() for path in paths)
            raise ValueError(f"{folder}: several files match {pattern}: {names}. Pass the path of one.")
        if paths:
            return paths[0]
    return None


def find(reference: str | Path, patterns: tuple[str, ...], scratch: Path) -> Path:
    """The local, uncompressed file of a reference to a file, or to a folder or archive with the file."""
    place = fetch(reference, scratch)
    path = search(place, patterns) if place.is_dir() else place
    if path is None:
        raise FileNotFoundError(f"{reference} has no file {' or '.join(patterns)}; pass the path of the file.")
    if path.suffix != ".gz":
        return path
    plain = Path(tempfile.mkdtemp(dir=scratch), path.stem)
    with reading(path), gzip.open(path) as packed, plain.open("wb") as file:
        shutil.copyfileobj(packed, file)
    return plain


def first_of(items: Iterable[str], separator: str = ", ") -> str:
    """The items that an error lists. Names in foreign files may have control characters, which are written out."""
    items = ["".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in item) for item in items]
    if len(items) > MOST_LISTED:
        items[MOST_LISTED:] = [f"and {len(items) - MOST_LISTED} more"]
    return separator.join(items)


def check_complete(missing: Iterable[str], source: str | Path):
    """Refuses a checkpoint without weights that would be random. A mix is new in a biLM; a softmax may be absent."""
    new = ("scalar_mix.", "softmax.")
    if absent := sorted(key for key in missing if not key.removeprefix("elmo.").startswith(new)):
        raise ValueError(f"{source} lacks weights: {first_of(absent)}. Convert or train it first.")


def check_empty(output_dir: Path):
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise FileExistsError(f"{output_dir} is not empty; pass a new or an empty folder.")


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A path for a new file or folder, which replaces `target` after success and is deleted after an error.

    A file replaces an older file, a folder an empty folder, also behind a link. A device or a pipe is never replaced:
    the content of the file is written into it. SIGTERM also deletes the new file or folder, and ends the process.
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


def read_arrays(path: Path) -> dict[str, Tensor]:
    """All arrays of an HDF5 file by their full names.

    Raises:
        ValueError: the values of an array are not finite float32 numbers, or not in this file. HDF5 reads zeros for
            what was never written.
    """
    import h5py

    datasets: dict[str, Any] = {}

    def keep(name: str, item: Any):
        if isinstance(item, h5py.Dataset):
            datasets[name] = item

    with reading(path), h5py.File(path, "r") as file:
        file.visititems(keep)
        problems = []
        for name, dataset in datasets.items():
            if problem := _problem(dataset):
                problems.append(f"{name} ({problem})")
        if problems:
            raise ValueError(f"all arrays must be float32 and uncompressed; got {first_of(problems)}")
        arrays = {name: torch.as_tensor(dataset[()]) for name, dataset in datasets.items()}
    check_finite(arrays, path)
    return arrays


def _problem(array: Any) -> str | None:
    """Why the values of an array of HDF5 are not float32 numbers in its file."""
    if array.dtype != "float32" or array.shape is None:
        return "no values" if array.shape is None else f"{array.dtype!s:.80}"
    if array.external or array.is_virtual:
        return "values in another file"
    blocks = array.chunks or array.shape
    rounded = (-(-rows // block) * block for rows, block in zip(array.shape, blocks, strict=True))
    if array.size and array.id.get_storage_size() < 4 * math.prod(rounded):
        return "compressed, which h5repack -f NONE undoes" if array.compression else "values never written"
    return None


def check_finite(arrays: dict[str, Tensor], path: Path):
    if wrong := [name for name, array in arrays.items() if not array.isfinite().all()]:
        raise ValueError(f"{path} has NaN or infinite values in {first_of(wrong)}; pass another copy.")


def check_shapes(arrays: dict[str, Tensor], required: dict[str, Tensor], weights: Path, options: str | Path):
    problems = []
    for name in sorted(arrays.keys() | required.keys()):
        shape = tuple(arrays[name].shape) if name in arrays else "none (missing)"
        expected = tuple(required[name].shape) if name in required else "none (unexpected)"
        if shape != expected:
            problems.append(f"{name}: the file has {shape}, the options require {expected}")
    if problems:
        lines = first_of(problems, separator="\n  ")
        raise ValueError(f"{weights} does not match {options}:\n  {lines}")


def is_torch_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith(TORCH_FILES)


def load_pickle(path: Path) -> Any:
    """The content of a file that `torch.save` wrote, of the old or the new format: tensors, numbers and containers.

    Raises:
        ValueError: the file is damaged, or has anything else. None of its code runs.
    """
    damage = (*DAMAGE, pickle.PickleError, struct.error, AttributeError, AssertionError, MemoryError)
    with path.open("rb") as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except damage as error:  # whose message advises to run the code in the file
            damaged = f"{path} is damaged, or contains more than tensors"
            if code := re.search(r"GLOBAL ([\w.]+)", str(error)):
                raise ValueError(f"{damaged} ({code[1]}). Pass a file with the `state_dict()` of its model.") from error
            raise ValueError(f"{damaged}. Pass another copy.") from error


def is_array(item: Any) -> bool:
    """Whether an item of `load_pickle` is a tensor that has all of its values in the file.

    A view that repeats a few values may have any size, and would fill the memory.
    """
    if type(item) not in (Tensor, torch.nn.Parameter) or item.layout != torch.strided:
        return False
    if item.is_nested or item.device.type != "cpu":
        return False
    return item.numel() * item.element_size() <= item.untyped_storage().nbytes()


def write_arrays(arrays: dict[str, Tensor], path: Path):
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array.numpy())


def read_json_object(path: Path, name: str = "options.json") -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep
        raise ValueError(f"{path} is not a JSON file ({error}); pass the checkpoint's {name}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got {str(content)[:80]!r}; pass the {name}.")
    return content


def write_json_object(content: dict[str, Any], path: Path):
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_words(words: list[str], path: Path):
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8", newline="\n")
