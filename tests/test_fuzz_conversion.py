"""Hundreds of damaged checkpoints: each is converted exactly, or refused in one line that names the file."""

import copy
import gzip
import json
import math
import random
import zipfile
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest

from modeling_elmo.conversion import files as files
from modeling_elmo.conversion.original import OPTIONS, load_original_checkpoint, to_original
from modeling_elmo.run_scripts.program.command_line import is_mistake_of_user

SOURCE = Path(__file__).parent / "fixtures" / "elmo_fixtures" / "variants" / "no_clip"
WEIGHTS = (SOURCE / "weights.hdf5").read_bytes()
OPTIONS_OF_SOURCE = (SOURCE / "options.json").read_bytes()
ARRAYS = list(files.read_shapes(SOURCE / "weights.hdf5"))
VALUES = [None, True, False, -1, 0, 1, 2, 3, 50, 10**9, 10**30, 0.5, 1e300, math.inf, math.nan, "", "relu", "8", [], {}]
VALUES += [[1], [[1, 4]], [[1, 4], [2, 8]], [[2, 10**9]], [["a", None]], {"dim": 4}, {"a": {"b": [[]]}}, "\ud800", [{}]]


def change_bytes(random, content: bytes) -> bytes:
    """Some bytes are replaced, removed, inserted or repeated."""
    content, size = bytearray(content), len(content)
    for _ in range(random.choice((1, 1, 1, 8))):
        start, length = random.randrange(size), random.choice((1, 1, 1, 1, 4, 8, 64, 2048))
        digits = bytes(random.choices(b"0123456789 ", k=length))
        repeated = content[start // 2 :][:length]
        new = random.choice((bytes(length), b"\xff" * length, random.randbytes(length), repeated, digits))
        place = slice(start, start + random.choice((length, length, length, 0)))
        content[place] = new if random.random() < 0.95 else b""
    return bytes(content[: random.randrange(size)] if random.random() < 0.1 else content)


def change_headers(random, content: bytes, names: int = 1500) -> bytes:
    """Changes only the parts that are not numbers: most bytes of a checkpoint are."""
    header = change_bytes(random, content[:names])
    return header + content[names:] if len(header) == names else change_bytes(random, content)


def change_options(random, options: dict):
    """A value of any depth is replaced, removed or added."""
    section = options
    while (inner := [value for value in section.values() if isinstance(value, dict)]) and random.random() < 0.7:
        section = random.choice(inner)
    name = random.choice([*section, "more", "n_tokens_vocab", "bidirectional"])
    section[name] = copy.deepcopy(random.choice(VALUES))
    if random.random() < 0.15:
        del section[name]


def change_array(random, file: h5py.File, folder: Path):
    """An array becomes another object, or an array of another kind."""
    name = random.choice(ARRAYS)
    array, other = file[name][()], random.choice(list(file))
    del file[name]
    source = h5py.VirtualLayout(array.shape, "f4")
    source[...] = h5py.VirtualSource(str(folder / "other.hdf5"), "x", array.shape)
    ways = [
        lambda: None,
        lambda: file.update({name: array}),
        lambda: file.update({f"{name}s": array}),
        lambda: file.update({name: array.T.copy()}),
        lambda: file.update({name: array.astype(random.choice(("f8", "f2", ">f4", "i4", "S4", "c8", "?")))}),
        lambda: file.update({name: h5py.Empty(random.choice(("f4", "f8")))}),
        lambda: file.update({name: random.choice((1.0, "words", b"", np.float32(1), np.void(b"abcd")))}),
        lambda: file.update({name: np.where(array > array.flat[0], array, random.choice((np.nan, np.inf, -np.inf)))}),
        lambda: file.update({name: h5py.SoftLink(random.choice(("/char_embed", "/", "nowhere", "..")))}),
        lambda: file.update({name: h5py.ExternalLink(str(folder / random.choice(("other.hdf5", "none"))), "x")}),
        lambda: file.update({name: file[other]}),
        lambda: file.update({f"{name}/more": array}),
        lambda: file.update({name: np.dtype("f4")}),
        lambda: file.create_dataset(name, array.shape, "f4", fillvalue=random.choice((0, 1))),
        lambda: file.create_dataset(name, (60_000,) * min(array.ndim, 2), "f4"),
        lambda: file.create_dataset(name, array.shape, "f4", external=[(str(folder / "text"), 0, array.nbytes)]),
        lambda: file.create_virtual_dataset(name, source),
        lambda: file.create_dataset(name, data=array, chunks=tuple(random.randint(1, size) for size in array.shape)),
        lambda: file.create_dataset(name, data=array, maxshape=(None,) * array.ndim),
        lambda: file.create_dataset(name, data=array, **random.choice(({"compression": "gzip"}, {"shuffle": True}))),
        lambda: file.create_dataset(name, array.shape, "f4", chunks=True)[:1].sum(),
    ]
    random.choice(ways)()


def change_archive(random, path: Path):
    """Files are missing, renamed, repeated, empty or compressed otherwise; then some bytes may change."""
    names = ["model.hdf5", "options.json", "vocab.txt.gz", "README", "more/", "old.hdf5"]
    contents = [WEIGHTS, OPTIONS_OF_SOURCE, gzip.compress(b"<S>\n</S>\n<UNK>\n"), b"", b"", bytes(10**5)]
    others = [
        "",
        "../model.hdf5",
        "/etc/passwd",
        "C:\\w.hdf5",
        "a/b.hdf5",
        "meta.json",
        "vocab.txt",
        "\xe9.hdf5",
        "x" * 300,
    ]
    method = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in zip(names, contents, strict=True):
            if random.random() < 0.95:
                archive.writestr(name, content if random.random() < 0.97 else b"")
                archive.infolist()[-1].filename = random.choice(others) if random.random() < 0.05 else name
    if random.random() < 0.6:
        path.write_bytes(change_bytes(random, path.read_bytes()))


def written_checkpoint(random, kind: str, folder: Path) -> tuple[Path, Path | None, Path | None]:
    """The files of a damaged checkpoint: weights or archive, options, vocabulary."""
    weights, options, vocabulary = folder / "weights.hdf5", folder / "options.json", None
    weights.write_bytes(change_headers(random, WEIGHTS) if kind == "bytes" else WEIGHTS)
    options.write_bytes(change_bytes(random, OPTIONS_OF_SOURCE) if kind == "text" else OPTIONS_OF_SOURCE)
    if kind == "arrays":
        with h5py.File(weights, "a") as file:
            change_array(random, file, folder)
    if kind == "options":
        content = json.loads(OPTIONS_OF_SOURCE)
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            change_options(random, content)
        options.write_text(json.dumps(content))
    if kind == "vocabulary":
        vocabulary = folder / "vocab.txt.gz"
        vocabulary.write_bytes(change_bytes(random, gzip.compress(b"<S>\n</S>\n<UNK>\nthe\ncat\n" * 1)))
    if kind == "archive":
        weights, options = folder / "archive.zip", None
        change_archive(random, weights)
    return weights, options, vocabulary


def check_answer(found, model, tokenizer, record):
    """Arrays are those of the file, sizes those of the options, words those of the vocabulary."""
    weights, options, vocabulary, _ = found
    with h5py.File(weights) as file:
        for name, array in to_original(model.state_dict(), record).items():
            assert array.isfinite().all()
            np.testing.assert_array_equal(array.numpy(), file[name][()])
    content = json.loads(options.read_text(encoding="utf-8-sig"))
    for path, (field, default) in OPTIONS.items():
        section, _, name = path.rpartition(".")
        section = (
            content["char_cnn"]["embedding"] if name == "dim" and section != "lstm" else content.get(section, content)
        )
        value = section.get(name)
        if field != "char_vocab_size":
            assert getattr(model.config, field) == (default if value is None else value), path
    if vocabulary:
        words = vocabulary.read_text(encoding="utf-8-sig").split("\n")
        assert set(tokenizer.get_vocab()) >= {word.strip() for word in words} - {"", "!!!MAXTERMID"}


def outcome(random, kind: str, folder: Path) -> str:
    weights, options, vocabulary = written_checkpoint(random, kind, folder)
    (folder / "scratch").mkdir()
    try:
        found = files.find_checkpoint(weights, options, vocabulary, None, folder / "scratch")
        loaded = load_original_checkpoint(*found)
    except (ValueError, OSError) as error:
        assert is_mistake_of_user(error), error
        assert str(folder) in str(error) or "pass the training vocabulary" in str(error), error
        return "refused"
    check_answer(found, *loaded)
    return "converted"


@pytest.mark.parametrize(
    ("kind", "count"),
    [("options", 150), ("text", 100), ("arrays", 100), ("bytes", 150), ("archive", 100), ("vocabulary", 100)],
)
def test_damaged_checkpoints_are_converted_or_refused(tmp_path, kind, count):
    numbers = random.Random(f"{kind} 2018")
    (tmp_path / "text").write_bytes(b"private " * 10_000)
    counts = Counter()
    for case in range(count):
        (folder := tmp_path / str(case)).mkdir()
        counts[outcome(numbers, kind, folder)] += 1
    print(f"{kind}: {count} inputs, {dict(counts)}")
    assert sum(counts.values()) == count and counts["refused"] and counts["converted"]
