"""Files of ELMoForManyLangs: config.json, the architecture file, dictionaries (char.dic, word.dic) and pickles.

Only tensors are loaded from pickles, whoever made them.
"""

import pickle
import re
import struct
import zipfile
from collections.abc import Iterable
from glob import escape
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling_elmo.conversion import files as files

CONFIG, CHARACTERS, WORDS = "config.json", "char.dic", "word.dic"
PICKLES = {"encoder": "encoder.pkl", "token_embedder": "token_embedder.pkl"}  # by the first part of an array's name
IDEOGRAPHIC_SPACE = "\u3000"
# The two architecture files that the original package ships have the same content.
SHIPPED_FILES = ("cnn_50_100_512_4096_sample.json", "cnn_0_100_512_4096_sample.json")

# What torch raises for damaged files, beside `files.DAMAGE`
DAMAGED_PICKLE = (pickle.PickleError, struct.error, AttributeError, AssertionError, MemoryError)


class ManyLangsFiles(NamedTuple):
    """The local files of a checkpoint. `architecture` is `None` for the architecture that the original ships."""

    place: Path
    pickles: list[Path]
    config: Path | None
    architecture: Path | None
    characters: Path | None
    words: Path | None


def find_manylangs_files(weights: str | Path, architecture: str | Path | None, scratch: Path) -> ManyLangsFiles:
    """The files of a checkpoint in a folder or archive; those of an archive are unpacked to `scratch`."""
    place = files.fetch(weights)
    if not (place.is_dir() or files.is_archive(place)):
        raise ValueError(f"{weights} is a single file; pass the folder or archive of the checkpoint.")

    def local(name: str) -> Path | None:
        if place.is_dir() and (place / name).is_file():  # whatever is in folders below
            return place / name
        return files.find(place, (escape(name),), scratch) if files.search(place, (escape(name),)) else None

    pickles = {name: local(name) for name in PICKLES.values()}
    config = local(CONFIG)
    needed = pickles if architecture else {**pickles, CONFIG: config}
    if missing := [name for name, path in needed.items() if path is None]:
        raise FileNotFoundError(
            f"{place} has no {', '.join(missing)}; a checkpoint of ELMoForManyLangs has {', '.join(PICKLES.values())}, "
            f"{CONFIG}, {CHARACTERS}, {WORDS}. Pass a complete copy."
        )
    name = architecture_name(config)
    described = files.find(architecture, ("*.json",), scratch) if architecture else local(name)
    if described is None and name not in SHIPPED_FILES:
        raise FileNotFoundError(
            f"{CONFIG} of {place} names the architecture file {name!r}, which is not beside it, and not one of the two "
            f"that the original ships, {' and '.join(SHIPPED_FILES)}; pass it (`--architecture`)."
        )
    paths = [path for path in pickles.values() if path is not None]
    return ManyLangsFiles(place, paths, config, described, local(CHARACTERS), local(WORDS))


def architecture_name(config: Path | None) -> str:
    return architecture_name_in(files.read_json_object(config, CONFIG)) if config else ""


def architecture_name_in(config: dict[str, Any]) -> str:
    """The last part of `config_path`, which is often an absolute path of another machine."""
    return PureWindowsPath(str(config.get("config_path"))).name


def lexicon_of(place: Path, path: Path | None, name: str, required: Iterable[str]) -> dict[str, int]:
    """The entries of a dictionary file with their ids."""
    if path is None:
        raise FileNotFoundError(f"{place} has no {name}, which its architecture needs; pass a complete copy.")
    lexicon = read_lexicon(path)
    if missing := [entry for entry in required if entry not in lexicon]:
        raise ValueError(f"{path} lacks the entries {', '.join(missing)}; pass another copy.")
    return lexicon


def read_lexicon(path: Path) -> dict[str, int]:
    """Reads lines `entry<TAB>id` as the original does: white space around a line is removed, so that an entry of
    nothing else is gone and stands for U+3000."""
    try:
        lines = path.read_bytes().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}. Pass another copy.") from error
    lexicon = {}
    for number, line in enumerate(lines, 1):
        *entry, index = line.strip().split("\t")
        if len(entry) > 1 or not index.isdecimal() or len(index) > 9:
            raise ValueError(
                f"{path}, line {number}: {line[:80]!r} is not an entry, a tab and an id; pass another copy."
            )
        lexicon["".join(entry) or IDEOGRAPHIC_SPACE] = int(index)
    if sorted(lexicon.values()) != [*range(len(lexicon))]:
        raise ValueError(
            f"{path}: its {len(lexicon)} different entries must have the ids 0 to {len(lexicon) - 1}, each once "
            f"(entries of nothing but white space are the same entry); pass another copy."
        )
    return lexicon


def write_lexicon(lexicon: dict[str, int], path: Path):
    entries = sorted(lexicon, key=lexicon.__getitem__)
    path.write_text("".join(f"{entry}\t{lexicon[entry]}\n" for entry in entries), encoding="utf-8", newline="\n")
    try:
        changed = read_lexicon(path) != lexicon
    except ValueError as error:
        raise ValueError(f"{path.name} has one entry per line, which does not hold this vocabulary: {error}") from error
    if changed:
        wrong = [entry for entry in entries if entry.strip() != entry and entry != IDEOGRAPHIC_SPACE]
        raise ValueError(
            f"{path.name} does not hold the entries {files.first_of(list(map(repr, wrong)))}; remove them."
        )


def read_manylangs_arrays(found: ManyLangsFiles) -> dict[str, Tensor]:
    """All arrays of a checkpoint: `encoder.` or `token_embedder.` before the names of their files."""
    return {
        f"{part}.{name}": array
        for part, path in zip(PICKLES, found.pickles, strict=True)
        for name, array in read_pickle(path).items()
    }


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote, of the old or the new format. Nothing else is loaded.

    Raises:
        ValueError: the file has anything but finite float32 tensors by name.
    """
    check_not_packed(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (*files.DAMAGE, *DAMAGED_PICKLE) as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {foreign[1]}, which is no tensor" if foreign else " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is refused ({reason}); pass the original file.") from error
    kinds = {name: _kind(array) for name, array in content.items()} if isinstance(content, dict) else {"": "no dict"}
    if wrong := [f"{str(name)[:80]} ({kind})" for name, kind in kinds.items() if kind]:
        raise ValueError(f"{path} must have float32 tensors by name; got {', '.join(files.first_of(wrong))}.")
    if sum(array.nbytes for array in content.values()) > path.stat().st_size:
        raise ValueError(f"{path} is damaged (its tensors are larger than the file); pass another copy.")
    files.check_finite(content, path)
    return content


def check_not_packed(path: Path):
    """Refuses a file of the new format, a zip archive, whose entries are larger than the file."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\3\4":  # as torch tells the formats apart
            return
    with files.reading(path), zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > path.stat().st_size:
        raise ValueError(f"{path} is compressed, which torch.save never does; pass another copy.")


def _kind(array: Any) -> str | None:
    """Why an object is not an array of a checkpoint."""
    if not isinstance(array, Tensor):
        return type(array).__name__
    is_plain = array.layout == torch.strided and array.device.type == "cpu"
    return None if is_plain and array.dtype == torch.float32 else f"{array.dtype}, {array.layout}, {array.device}"
