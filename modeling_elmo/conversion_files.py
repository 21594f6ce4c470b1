"""The files of foreign checkpoints: in folders, archives or on the Hub, arrays in HDF5; written whole or not at all."""

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

# Best name first. NLPL's archives hold model.hdf5, options.json or meta.json, vocab.txt.
WEIGHTS_FILES = ("model.hdf5", "*.hdf5")
OPTIONS_FILES = ("options.json", "meta.json", "*options*.json")
VOCABULARY_FILES = ("vocab.txt", "vocab.txt.gz")
SOFTMAX_FILES = ("*softmax*.hdf5",)

HUB_REFERENCE = re.compile(r"hf://(?P<repo_id>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<filename>.+)")
HUB_ERRORS: dict[type[Exception], str] = {  # a gated repository is also one that is not found
    GatedRepoError: "access to {repo_id} is restricted; ask for it on the repository's page, then run `hf auth login`.",
    RepositoryNotFoundError: "there is no model {repo_id}, or it is private; pass another, or run `hf auth login`.",
    RevisionNotFoundError: "{repo_id} has no revision {revision}; pass a branch, tag or commit that it has.",
    RemoteEntryNotFoundError: "{repo_id} has no file {filename}; pass one that its page lists under `Files`.",
    LocalEntryNotFoundError: "the Hub cannot be reached, and no earlier download is there; try again, or pass a file.",
}


def fetch(reference: str | Path, scratch: Path) -> Path:
    """The local file or folder of a path, a `.zip` archive (unpacked below `scratch`) or `hf://user/repo[@revision]/path`."""
    if hub := HUB_REFERENCE.fullmatch(str(reference)):
        path = download(hub)
    elif str(reference).startswith("hf://"):
        raise ValueError(f"{reference} names no file; pass hf://user/repo/path or hf://user/repo@revision/path.")
    else:
        path = Path(reference)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; pass a file, a folder, a .zip archive or hf://user/repo/path.")
    return unpack(path, Path(tempfile.mkdtemp(dir=scratch))) if path.suffix.lower() == ".zip" else path


def download(hub: re.Match[str]) -> Path:
    """The file in the cache of what `HUB_REFERENCE` matched."""
    try:
        return Path(hf_hub_download(hub["repo_id"], hub["filename"], revision=hub["revision"]))
    except tuple(HUB_ERRORS) as error:
        advice = next(text for kind, text in HUB_ERRORS.items() if isinstance(error, kind))
        raise FileNotFoundError(f"{hub[0]}: {advice.format(**hub.groupdict())}") from error


def unpack(archive: Path, folder: Path) -> Path:
    """Unpacks an archive unless an entry, by the rules of any system, would lie outside `folder`."""
    if not zipfile.is_zipfile(archive):
        raise ValueError(f"{archive} is no complete .zip archive; pass another copy, or the files themselves.")
    with zipfile.ZipFile(archive) as contents:
        for entry in map(PureWindowsPath, contents.namelist()):
            if entry.anchor or ".." in entry.parts:
                raise ValueError(f"{archive} holds {str(entry)!r}, which would be written outside of its folder.")
        contents.extractall(folder)
    return folder


def search(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    """The one file below `folder` that bears the first of the names that are found there."""
    for pattern in patterns:
        found = sorted(folder.rglob(pattern))
        if len(found) > 1:
            names = ", ".join(str(path.relative_to(folder)) for path in found)
            raise ValueError(f"There are several files like {pattern}: {names}. Pass the path of the one to convert.")
        if found:
            return found[0]
    return None


def find(reference: str | Path, patterns: tuple[str, ...], scratch: Path) -> Path:
    """The local, uncompressed file of a reference: itself, or the one in the folder or archive that it names."""
    place = fetch(reference, scratch)
    path = place if place.is_file() else search(place, patterns)
    if path is None:
        raise FileNotFoundError(f"{reference} holds no file like {' or '.join(patterns)}.")
    return decompress(path, scratch) if path.suffix == ".gz" else path


def find_checkpoint(
    weights: str | Path,
    options: str | Path | None,
    vocabulary: str | Path | None,
    softmax: str | Path | None,
    scratch: Path,
) -> tuple[Path, Path, Path | None, Path | None]:
    """The four as local files. A folder or archive of weights is searched for options and vocabulary too."""
    place = fetch(weights, scratch)
    if place.is_dir():
        vocabulary = vocabulary or search(place, VOCABULARY_FILES)
    elif options is None:
        raise ValueError(f"{weights} is a single file; pass its options.json too.")
    return (
        find(place, WEIGHTS_FILES, scratch),
        find(options or place, OPTIONS_FILES, scratch),
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
    """A path to write to, file or folder, that becomes `target` if the block succeeds and vanishes if it fails."""
    target = target.resolve()  # a link stays, what it points to is written
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as beside:
        staging = Path(beside, target.name)
        yield staging
        if target.is_dir():
            target.rmdir()  # empty; Windows does not rename onto it
        staging.rename(target)


def read_arrays(path: Path) -> dict[str, Tensor]:
    """All arrays of an HDF5 file by their full names."""
    h5py = import_h5py()
    if not h5py.is_hdf5(path):
        raise ValueError(f"{path} is no HDF5 file; pass the weights that bilm-tf's dump_weights wrote.")
    datasets: dict[str, Any] = {}
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} is damaged or cut off ({error}); pass another copy.") from error
    with file:
        file.visititems(lambda name, item: datasets.update({name: item} if isinstance(item, h5py.Dataset) else {}))
        if other := [f"{name} {item.dtype}" for name, item in datasets.items() if item.dtype != "float32"]:
            raise ValueError(
                f"{path} holds other arrays than float32, which an exact way back needs: {', '.join(other)}."
            )
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


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # no JSON, or no text at all
        raise ValueError(f"{path} is no JSON file ({error}); pass the checkpoint's options.json.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object, but {str(content)[:80]!r}.")
    return content


def write_json(content: dict[str, Any], path: Path):
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_lines(lines: list[str], path: Path):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
