"""Files of foreign checkpoints: found in folders, archives or on the Hub; written completely or not at all."""

import gzip
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any

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
WEIGHTS_FILES = ("model.hdf5", "*.hdf5")
OPTIONS_FILES = ("options.json", "meta.json", "*options*.json")
VOCABULARY_FILES = ("vocab.txt", "vocab.txt.gz")
SOFTMAX_FILES = ("*softmax*.hdf5",)

HUB_REFERENCE = re.compile(r"hf://(?P<repo_id>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<filename>.+)")
HUB_ERRORS: dict[type[Exception], str] = {  # GatedRepoError is a RepositoryNotFoundError
    GatedRepoError: "access to {repo_id} is restricted; request access on its page, then run `hf auth login`.",
    RepositoryNotFoundError: "there is no model {repo_id}, or it is private; pass another, or run `hf auth login`.",
    RevisionNotFoundError: "{repo_id} has no revision {revision}; pass a branch, tag or commit of it.",
    RemoteEntryNotFoundError: "{repo_id} has no file {filename}; pass one from the list on its page.",
    LocalEntryNotFoundError: "the Hub cannot be reached and the cache has no copy; try again, or pass a file on disk.",
}


def fetch(reference: str | Path, scratch: Path) -> Path:
    """The local file or folder of a path, of a `.zip` archive (unpacked in `scratch`) or of `hf://...`."""
    if hub := HUB_REFERENCE.fullmatch(str(reference)):
        path = download(hub)
    elif str(reference).startswith("hf://"):
        raise ValueError(f"{reference} is not a file; pass hf://user/repo/path or hf://user/repo@revision/path.")
    else:
        path = Path(reference)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; pass a file, a folder, a .zip archive or hf://user/repo/path.")
    return unpack(path, Path(tempfile.mkdtemp(dir=scratch))) if path.suffix.lower() == ".zip" else path


def download(hub: re.Match[str]) -> Path:
    """The cached file of a match of `HUB_REFERENCE`."""
    try:
        return Path(hf_hub_download(hub["repo_id"], hub["filename"], revision=hub["revision"]))
    except tuple(HUB_ERRORS) as error:
        advice = next(text for kind, text in HUB_ERRORS.items() if isinstance(error, kind))
        raise FileNotFoundError(f"{hub[0]}: {advice.format(**hub.groupdict())}") from error


def unpack(archive: Path, folder: Path) -> Path:
    """Unpacks an archive. Refuses entries outside `folder`, by the path rules of any system."""
    if not zipfile.is_zipfile(archive):
        raise ValueError(f"{archive} is not a complete .zip archive; pass another copy, or the unpacked files.")
    with zipfile.ZipFile(archive) as contents:
        for entry in map(PureWindowsPath, contents.namelist()):
            if entry.anchor or ".." in entry.parts:
                raise ValueError(f"{archive} has the entry {str(entry)!r}, which is outside of its folder.")
        contents.extractall(folder)
    return folder


def search(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    """The only file in `folder` for the first pattern that has any."""
    for pattern in patterns:
        found = sorted(folder.rglob(pattern))
        if len(found) > 1:
            names = ", ".join(str(path.relative_to(folder)) for path in found)
            raise ValueError(f"Several files match {pattern}: {names}. Pass the path of the file to convert.")
        if found:
            return found[0]
    return None


def find(reference: str | Path, patterns: tuple[str, ...], scratch: Path) -> Path:
    """The local, uncompressed file of a reference to a file, or to a folder or archive with the file."""
    local = fetch(reference, scratch)
    path = local if local.is_file() else search(local, patterns)
    if path is None:
        raise FileNotFoundError(f"{reference} has no file {' or '.join(patterns)}; pass the path of the file.")
    return decompress(path, scratch) if path.suffix == ".gz" else path


def find_checkpoint(
    weights: str | Path,
    options: str | Path | None,
    vocabulary: str | Path | None,
    softmax: str | Path | None,
    scratch: Path,
) -> tuple[Path, Path, Path | None, Path | None]:
    """The local files of the four references. A folder or archive of weights may have options and vocabulary too."""
    local = fetch(weights, scratch)
    if local.is_dir():
        vocabulary = vocabulary or search(local, VOCABULARY_FILES)
    elif options is None:
        raise ValueError(f"{weights} is a single file; pass its options.json too.")
    return (
        find(local, WEIGHTS_FILES, scratch),
        find(options or local, OPTIONS_FILES, scratch),
        find(vocabulary, VOCABULARY_FILES, scratch) if vocabulary else None,
        find(softmax, SOFTMAX_FILES, scratch) if softmax else None,
    )


def decompress(path: Path, scratch: Path) -> Path:
    plain = scratch / path.stem
    with gzip.open(path) as packed, plain.open("wb") as file:
        shutil.copyfileobj(packed, file)
    return plain


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A path for a new file or folder, which replaces `target` after success and is deleted after an error.

    A file replaces an older file. A folder replaces an empty folder, also behind a link.
    """
    target = target.resolve() if target.is_dir() else target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as beside:
        staging = Path(beside, target.name)
        yield staging
        if staging.is_dir() and target.is_dir():
            target.rmdir()  # Windows does not rename onto a folder
        staging.replace(target)


def read_arrays(path: Path) -> dict[str, Tensor]:
    """All arrays of an HDF5 file by their full names."""
    h5py = import_h5py()
    if not h5py.is_hdf5(path):
        raise ValueError(f"{path} is not an HDF5 file; pass the weights that dump_weights of bilm-tf wrote.")
    datasets: dict[str, Any] = {}
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} is damaged or incomplete ({error}); pass another copy.") from error
    with file:
        file.visititems(lambda name, item: datasets.update({name: item} if isinstance(item, h5py.Dataset) else {}))
        if other := [f"{name} {item.dtype}" for name, item in datasets.items() if item.dtype != "float32"]:
            raise ValueError(f"{path} must have float32 arrays only, for an exact export; got {', '.join(other)}.")
        return {name: torch.as_tensor(item[()]) for name, item in datasets.items()}


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


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path} is not a JSON file ({error}); pass the checkpoint's options.json.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got {str(content)[:80]!r}; pass the options.json.")
    return content


def write_json_object(content: dict[str, Any], path: Path):
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_words(words: list[str], path: Path):
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8", newline="\n")
