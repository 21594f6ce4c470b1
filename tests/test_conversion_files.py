import errno
import gzip
import io
import os
import signal
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from errors import refused

from modeling_elmo.conversion import files
from modeling_elmo.conversion.original import OriginalCheckpoint

WITH_PIPES_AND_SIGNALS = pytest.mark.skipif(os.name == "nt", reason="Windows has neither")


def make(path, content=b""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def make_zip(path, **entries):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def tar_member(name, content=b"", **fields):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, io.BytesIO(content)


def make_tar(path, *members, mode="w:gz", **options):
    with tarfile.open(path, mode, **options) as archive:
        for member, content in members:
            archive.addfile(member, content)
    return path


@pytest.fixture
def scratch(tmp_path):
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


NLPL = {
    "LIST": "",
    "README": "A model.",
    "meta.json": '{"lstm": 1}',
    "model.hdf5": "weights",
    "vocab.txt.gz": gzip.compress(b"<S>\n</S>\n<UNK>\n"),
}


@pytest.mark.parametrize(
    "entries, expected",
    [
        (NLPL, ["model.hdf5", "meta.json", "vocab.txt"]),
        ({"a/softmax.hdf5": "", "model.hdf5": "", "a/options.json": ""}, ["model.hdf5", "options.json"]),
        ({"../w.hdf5": "", "/o/options.json": "{}", "__MACOSX/._w.hdf5": ""}, ["w.hdf5", "options.json"]),
    ],
)
@pytest.mark.parametrize("kind", ["zip", "tar", "folder"])
def test_archives_and_folders(tmp_path, scratch, entries, expected, kind):
    contents = {name: content if isinstance(content, bytes) else content.encode() for name, content in entries.items()}
    place = tmp_path / {"zip": "145.ZIP", "tar": "145.tar.gz", "folder": "145"}[kind]
    if kind == "zip":
        make_zip(place, **contents)
    elif kind == "tar":
        make_tar(place, *(tar_member(*entry) for entry in contents.items()))
    else:
        for name, content in contents.items():
            make(place / name.strip("./"), content)
    found = OriginalCheckpoint.find(scratch, place)
    assert [path.name for path in found.paths] == expected
    in_scratch = [kind != "folder" or path.name == "vocab.txt" for path in found.paths]
    assert [path.is_relative_to(scratch) for path in found.paths] == in_scratch
    if found.vocabulary:
        assert found.vocabulary.read_text() == "<S>\n</S>\n<UNK>\n"


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("name", ["model.tar.gz", "MODEL.TAR", "model.zip", "3f2a.b5", "model"])
def test_tar_archives_are_told_by_their_content(tmp_path, scratch, mode, name):
    """Downloads have wrong names, and AllenNLP's cache names a file by digests."""
    contents = (
        tar_member("./a/weights.th", b"w"),
        tar_member("a/._weights.th", b"Mac"),
        tar_member("config.json", b"{}"),
    )
    folder = files.fetch(make_tar(tmp_path / name, *contents, mode=mode), scratch)
    assert folder.name == name and tree(folder)["a/weights.th"] == b"w" and tree(folder)["config.json"] == b"{}"
    assert [path.name for path in files.files_in(folder)] == ["weights.th", "config.json"]


def test_a_zip_archive_with_the_name_of_a_tar(tmp_path, scratch):
    folder = files.fetch(make_zip(tmp_path / "model.tar.gz", **{"a/weights.th": "w"}), scratch)
    assert tree(folder) == {"a/weights.th": b"w"}
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.th")  # a zip file that is no archive
    assert files.fetch(tmp_path / "weights.th", scratch) == tmp_path / "weights.th"


@WITH_PIPES_AND_SIGNALS
def test_a_pipe_is_not_read_to_know_what_it_is(tmp_path, scratch):
    os.mkfifo(tmp_path / "words")
    assert files.fetch(tmp_path / "words", scratch) == tmp_path / "words"


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_writes_only_into_its_folder(tmp_path, scratch, format):
    secret = make(tmp_path / "secret.txt", b"secret")
    up = "../" * 30
    links = {"symbolic": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}
    members = [
        tar_member(f"{up}{tmp_path}/above.txt", b"above"),
        tar_member(f"{tmp_path}/absolute.txt", b"absolute"),
        tar_member("a/../../../b/inside.txt", b"inside"),
        tar_member("fifo", type=tarfile.FIFOTYPE),
        tar_member("device", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
        tar_member("loop", type=tarfile.SYMTYPE, linkname="loop"),
        tar_member("away", type=tarfile.SYMTYPE, linkname=str(tmp_path)),
        tar_member("away/through.txt", b"through a link"),
        tar_member("secret.txt", type=tarfile.SYMTYPE, linkname=str(secret)),
        tar_member("secret.txt", b"written through a link"),
        *(tar_member(f"{name}_secret", type=kind, linkname=str(secret)) for name, kind in links.items()),
        *(tar_member(f"{name}_above", type=kind, linkname=f"{up}{secret}") for name, kind in links.items()),
        tar_member("c/symbolic", type=tarfile.SYMTYPE, linkname="../best.th"),
        tar_member("c/hard", type=tarfile.LNKTYPE, linkname="best.th"),
        tar_member("best.th", b"best", mode=0),
    ]
    before = {path for path in tmp_path.rglob("*") if scratch not in path.parents}
    folder = files.fetch(make_tar(scratch / "x.tar", *members, mode="w", format=format), scratch)
    assert {path for path in tmp_path.rglob("*") if scratch not in path.parents} == before
    assert secret.read_bytes() == b"secret" and not any(path.is_symlink() for path in folder.rglob("*"))
    root = tmp_path.relative_to("/").as_posix()
    assert tree(folder) == {
        f"{root}/above.txt": b"above",
        f"{root}/absolute.txt": b"absolute",
        "b/inside.txt": b"inside",
        "away/through.txt": b"through a link",
        "secret.txt": b"written through a link",
        "c/symbolic": b"best",
        "c/hard": b"best",
        "best.th": b"best",
    }


def test_damaged_and_hostile_tars(tmp_path, scratch, monkeypatch):
    content = make_tar(tmp_path / "good.tar.gz", tar_member("w", bytes(range(256)) * 400)).read_bytes()
    plain = gzip.decompress(content)
    long_name, _ = tar_member("x", type=tarfile.GNUTYPE_LONGNAME, size=2**33 - 1)
    negative = tar_member("x", b"", pax_headers={"size": "-1024"})
    for name, bad, message in [
        ("cut.tar.gz", content[:-30], "Compressed file ended"),
        ("cut.tar", plain[:50_000], "unexpected end of data"),
        ("short.tar.gz", content[:15], r"not a zip file or tar archive, and begins with b.\\x1f\\x8b"),
        ("page.tar.gz", b"<!DOCTYPE html><html>", "not a zip file or tar archive, and begins with b'<!DOCTYPE html>"),
        ("empty.tar.gz", b"", "not a zip file or tar archive, and begins with b''"),
        ("changed.tar.gz", content[:200] + b"ABCDEFGH" + content[208:], "CRC check failed"),
        ("name.tar", plain[:102912] + long_name.tobuf() + bytes(9999), "a header has 8589934591 bytes"),
        (
            "back.tar",
            make_tar(tmp_path / "2", negative, mode="w", format=tarfile.PAX_FORMAT).read_bytes(),
            "x has -1024",
        ),
        ("file.tar", make_tar(tmp_path / "3", tar_member("a", b"1"), tar_member("a/b", b"2")).read_bytes(), "a"),
        ("name2.tar", make_tar(tmp_path / "4", tar_member("n" * 300, b"1")).read_bytes(), "File name too long"),
    ]:
        with refused(f"{name} cannot be read .*({message}).*It is damaged or incomplete; pass another copy"):
            files.fetch(make(tmp_path / name, bad), scratch)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(free=102_399))
    with refused("good.tar.gz needs more than the 102,399 bytes that are free to unpack it: .*scratch", OSError):
        files.fetch(tmp_path / "good.tar.gz", scratch)


def test_files_from_several_places(tmp_path, scratch):
    """Two of them have one name."""
    weights, softmax = (make(tmp_path / name / "w.hdf5.gz", gzip.compress(name.encode())) for name in "ab")
    archive = make_zip(tmp_path / "more.zip", **{"options.json": "c", "README": ""})
    found = OriginalCheckpoint.find(scratch, weights, archive, make(tmp_path / "words.txt", b"d"), softmax)
    assert [path.name for path in found.paths] == ["w.hdf5", "options.json", "words.txt", "w.hdf5"]
    assert [path.read_text() for path in found.paths] == ["a", "c", "d", "b"]


def test_what_is_not_there(tmp_path, scratch):
    weights, archive = make(tmp_path / "w.hdf5"), make_zip(tmp_path / "a.zip", **{"README": ""})
    damaged = make(tmp_path / "m.zip", b"PK")
    changed = make(
        tmp_path / "c.zip", make_zip(tmp_path / "d.zip", **NLPL).read_bytes().replace(b"weights", b"waights")
    )
    cut = make(tmp_path / "vocab.txt.gz", NLPL["vocab.txt.gz"][:-9])
    folder = make(tmp_path / "b" / "a.hdf5").parent
    make(folder / "b" / "c.hdf5")
    for arguments, error, message in [
        ((tmp_path / "no.hdf5",), FileNotFoundError, "no.hdf5 does not exist; pass"),
        ((damaged,), ValueError, "m.zip cannot be read .*not a zip file.*; pass another copy"),
        ((changed,), ValueError, "c.zip cannot be read .*Bad CRC-32"),
        ((weights, weights, cut), ValueError, "vocab.txt.gz cannot be read .*end-of-stream.*; pass another copy"),
        ((weights,), ValueError, "w.hdf5 is a single file; pass its options.json too"),
        ((archive,), FileNotFoundError, r"a.zip has no file model.hdf5 or \*.hdf5 or \*.h5"),
        ((weights, archive), FileNotFoundError, r"a.zip has no file options.json or meta.json"),
        ((folder,), ValueError, r"several files match \*.hdf5: a.hdf5, b/c.hdf5. Pass the path of one"),
        (("hf://user/repo", weights), FileNotFoundError, "hf://user/repo does not exist; pass .*hf://user/repo.*/path"),
    ]:
        with refused(message, error):
            OriginalCheckpoint.find(scratch, *arguments)


def test_names_of_files_are_written_out():
    assert files.first_of(["a\x1b[1m", "b\udcff\n", "é 한"]) == r"a\x1b[1m, b\udcff\n, é 한"


def test_a_disk_that_is_full_is_no_damage(tmp_path):
    with refused("No space left", OSError), files.reading(tmp_path / "a.zip"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_hub_references(tmp_path, scratch, monkeypatch):
    calls = []

    def download(repo_id, filename, *, revision):
        calls.append((repo_id, filename, revision))
        return str(make(tmp_path / "cache" / filename))

    monkeypatch.setattr(files, "hf_hub_download", download)
    for reference in ("hf://nlp/elmo/en/model.hdf5", "hf://nlp/elmo@v1.0/en/model.hdf5"):
        assert files.fetch(reference, scratch) == tmp_path / "cache/en/model.hdf5"
    assert calls == [("nlp/elmo", "en/model.hdf5", revision) for revision in (None, "v1.0")]


def test_staged_is_all_or_nothing(tmp_path):
    (tmp_path / "new").mkdir()
    make(tmp_path / "old.json", b"old")
    for target in (tmp_path / "new", tmp_path / "a" / "file.json", tmp_path / "old.json"):
        with pytest.raises(RuntimeError), files.staged(target) as path:
            make(path / "part" if target.name == "new" else path)
            raise RuntimeError
    assert (tmp_path / "old.json").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "new", "old.json"]
    with files.staged(tmp_path / "new") as path, files.staged(tmp_path / "old.json") as file:
        make(path / "part")
        make(file, b"new")
        assert not any((tmp_path / "new").iterdir()) and (tmp_path / "old.json").read_bytes() == b"old"
    assert (tmp_path / "new" / "part").is_file() and (tmp_path / "old.json").read_bytes() == b"new"


def test_staged_links_and_the_present_folder(tmp_path, monkeypatch):
    for name in ("real", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "here")
    for target in (tmp_path / "link", Path(".")):
        with files.staged(target) as folder:
            make(folder / "written")
    assert (tmp_path / "real" / "written").is_file() and (tmp_path / "link").is_symlink()
    assert (tmp_path / "here" / "written").is_file()

    (tmp_path / "link.json").symlink_to(make(tmp_path / "cached.json", b"old"))
    with files.staged(tmp_path / "link.json") as file:  # the file of a cache stays
        make(file, b"new")
    assert (tmp_path / "link.json").read_bytes() == b"new" and (tmp_path / "cached.json").read_bytes() == b"old"
    with pytest.raises(OSError), files.staged(tmp_path / "real") as file:  # a folder is not replaced by a file
        make(file)
    assert (tmp_path / "real" / "written").is_file()


@WITH_PIPES_AND_SIGNALS
def test_a_full_disk_is_named():
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with refused("No space left on device: '/dev/full'", OSError), files.staged(Path("/dev/full")) as file:
        file.write_text("x")


@WITH_PIPES_AND_SIGNALS
def test_staged_writes_into_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with files.staged(pipe) as file:
        make(file, b"words")
    assert os.read(reader, 100) == b"words" and pipe.is_fifo()
    os.close(reader)


@WITH_PIPES_AND_SIGNALS
def test_sigterm_deletes_what_is_staged(tmp_path):
    with pytest.raises(SystemExit) as ended, files.staged(tmp_path / "outer") as outer, files.staged(outer / "inner"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM and not [*tmp_path.iterdir()]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_arrays(tmp_path):
    path = tmp_path / "arrays.hdf5"
    arrays = {"char_embed": torch.randn(3, 2), "RNN_0/RNN/LSTMCell/W_0": torch.randn(4, 2).T}
    files.write_arrays(arrays, path)
    found = files.read_arrays(path)
    assert found.keys() == arrays.keys()
    assert all(torch.equal(found[name], arrays[name]) for name in arrays)
    for name, content in (("pointer", b"version https://git-lfs"), ("cut", path.read_bytes()[:3000])):
        with refused(f"{name}.hdf5 cannot be read .*pass another copy"):
            files.read_arrays(make(tmp_path / f"{name}.hdf5", content))
    files.write_arrays({"a/b": torch.tensor([1.0, -torch.inf]), "c": torch.ones(2)}, path)
    with refused("arrays.hdf5 has NaN or infinite values in a/b; pass another copy"):
        files.read_arrays(path)


def external(file, folder):
    make(folder / "words.txt", b"private words " * 16)
    file.create_dataset("w", (56,), "f4", external=[(str(folder / "words.txt"), 0, h5py.h5f.UNLIMITED)])


def virtual(file, folder):
    with h5py.File(folder / "other.hdf5", "w") as other:
        other["x"] = np.ones(3, np.float32)
    layout = h5py.VirtualLayout((3,), "f4")
    layout[...] = h5py.VirtualSource(str(folder / "other.hdf5"), "x", (3,))
    file.create_virtual_dataset("w", layout)


def partly_written(file, folder):
    file.create_dataset("w", (5, 5), "f4", chunks=(4, 4))[:, :4] = 1


@pytest.mark.parametrize(
    "write, problem",
    [
        (external, "values in another file"),
        (virtual, "values in another file"),
        (lambda file, _: file.update({"w": h5py.Empty("f4")}), "no values"),
        (lambda file, _: file.create_dataset("w", (3,), "f4"), "values never written"),
        (partly_written, "values never written"),
        (
            lambda file, _: file.create_dataset("w", data=np.ones(9, "f4"), compression="gzip"),
            "compressed, which h5repack",
        ),
        (lambda file, _: file.update({"w": np.ones(3, ">f4")}), ">f4"),
        (lambda file, _: file.update({"w": "words"}), "object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_must_be_numbers_in_the_file(tmp_path, write, problem):
    path = tmp_path / "arrays.hdf5"
    files.write_arrays({"char_embed": torch.ones(3)}, path)
    with h5py.File(path, "a") as file:
        write(file, tmp_path)
    with refused(rf"arrays.hdf5 cannot be read \(all arrays must be .*; got w \({problem}"):
        files.read_arrays(path)


def test_all_ways_to_store_an_array(tmp_path):
    with h5py.File(tmp_path / "w.hdf5", "w") as file:
        file["scalar"], file["none"] = np.float32(2), np.ones((0, 3), np.float32)
        file.create_dataset("chunks", data=np.ones((5, 7), np.float32), chunks=(4, 4))
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        file.create_dataset("compact", data=np.arange(3, dtype=np.float32), dcpl=compact)
    found = files.read_arrays(tmp_path / "w.hdf5")
    assert found["scalar"] == 2 and found["none"].shape == (0, 3) and found["chunks"].sum() == 35
    assert found["compact"].tolist() == [0, 1, 2]


def test_json(tmp_path):
    path = tmp_path / "o.json"
    files.write_json_object({"a": {"b": 3, "c": 3.0}}, path)
    assert repr(files.read_json_object(path)) == "{'a': {'b': 3, 'c': 3.0}}"
    assert files.read_json_object(make(path, b'\xef\xbb\xbf{"lstm": 1}\r\n')) == {"lstm": 1}  # a byte order mark
    for content in (b"[1, 2]", b"the\nof\n"):
        with refused("o.json .*; pass the .*options.json"):
            files.read_json_object(make(path, content))
