import gzip
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from modeling_elmo import conversion_files as files


def make(path, content=b""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def make_zip(path, **entries):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
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
    ("entries", "expected"),
    [
        (NLPL, ["model.hdf5", "meta.json", "vocab.txt"]),
        (NLPL | {"options.json": '{"lstm": 2}'}, ["model.hdf5", "options.json", "vocab.txt"]),
        ({"45/elmo.hdf5": "weights", "45/options.json": "{}"}, ["elmo.hdf5", "options.json", None]),
        ({"a_weights.hdf5": "", "a_options.json": "{}"}, ["a_weights.hdf5", "a_options.json", None]),
        ({"softmax.hdf5": "", "model.hdf5": "", "options.json": ""}, ["model.hdf5", "options.json", None]),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_archives_and_folders(tmp_path, scratch, entries, expected, zipped):
    place = make_zip(tmp_path / "145.ZIP", **entries) if zipped else tmp_path / "145"
    if not zipped:
        for name, content in entries.items():
            make(place / name, content if isinstance(content, bytes) else content.encode())
    *found, softmax = files.find_checkpoint(place, None, None, None, scratch)
    assert [path and path.name for path in found] == expected
    assert softmax is None
    if expected[2]:
        assert found[2].read_text() == "<S>\n</S>\n<UNK>\n"


def test_files_from_several_places(tmp_path, scratch):
    weights, words = make(tmp_path / "w.hdf5"), make(tmp_path / "words.txt")
    archive = make_zip(tmp_path / "more.zip", **{"options.json": "{}", "softmax.hdf5": ""})
    found = files.find_checkpoint(weights, archive, words, archive, scratch)
    assert [path.name for path in found] == ["w.hdf5", "options.json", "words.txt", "softmax.hdf5"]
    assert found[0] == weights and found[1].is_relative_to(scratch)


def test_what_is_not_there(tmp_path, scratch):
    weights, archive = make(tmp_path / "w.hdf5"), make_zip(tmp_path / "a.zip", **{"README": ""})
    damaged = make(tmp_path / "m.zip", b"PK")
    many = make_zip(tmp_path / "b.zip", **{"a.hdf5": "", "b/c.hdf5": "", "options.json": ""})
    for arguments, error, message in [
        ((tmp_path / "no.hdf5", None), FileNotFoundError, "no.hdf5 does not exist; pass a file, a folder, a .zip"),
        ((damaged, None), ValueError, "m.zip is not a complete .zip archive; pass another copy"),
        ((weights, None), ValueError, "w.hdf5 is a single file; pass its options.json too"),
        ((archive, None), FileNotFoundError, r"has no file model.hdf5 or \*.hdf5"),
        ((weights, archive), FileNotFoundError, r"a.zip has no file options.json or meta.json"),
        ((many, None), ValueError, r"Several files match \*.hdf5: a.hdf5, b/c.hdf5. Pass the path of the file"),
        (("hf://user/repo", weights), ValueError, "hf://user/repo is not a file; pass hf://user/repo/path"),
    ]:
        with pytest.raises(error, match=message):
            files.find_checkpoint(*arguments, None, None, scratch)


@pytest.mark.parametrize("name", ["../evil.hdf5", "/evil.hdf5", "a/../../evil.hdf5", "..\\evil.hdf5", "C:\\evil.hdf5"])
def test_archives_cannot_write_outside(tmp_path, scratch, name):
    archive = make_zip(tmp_path / "evil.zip", **{"options.json": "{}", name: "evil"})
    with pytest.raises(ValueError, match="evil.zip has the entry '.*evil.hdf5', which is outside of its folder"):
        files.find_checkpoint(archive, None, None, None, scratch)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path != archive]


@pytest.mark.parametrize(
    ("reference", "revision"), [("hf://nlp/elmo/en/model.hdf5", None), ("hf://nlp/elmo@v1.0/en/model.hdf5", "v1.0")]
)
def test_hub_references(tmp_path, monkeypatch, reference, revision):
    calls = []

    def download(repo_id, filename, *, revision):
        calls.append((repo_id, filename, revision))
        return str(make(tmp_path / "cache" / filename))

    monkeypatch.setattr(files, "hf_hub_download", download)
    assert files.fetch(reference) == tmp_path / "cache/en/model.hdf5"
    assert calls == [("nlp/elmo", "en/model.hdf5", revision)]


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


def test_arrays(tmp_path):
    path = tmp_path / "arrays.hdf5"
    arrays = {"char_embed": torch.randn(3, 2), "RNN_0/RNN/LSTMCell/W_0": torch.randn(4, 2).T}
    files.write_arrays(arrays, path)
    found = files.read_arrays(path)
    assert found.keys() == arrays.keys()
    assert all(torch.equal(found[name], arrays[name]) for name in arrays)
    with h5py.File(path, "a") as file:
        file["double"], file["text"] = np.zeros(2), "words"
    with pytest.raises(ValueError, match=r"arrays.hdf5 must have float32 arrays only.* got double \(float64\), text"):
        files.read_arrays(path)
    with pytest.raises(ValueError, match="version https.* is not an HDF5 file; pass the weights"):
        files.read_arrays(make(tmp_path / "version https.hdf5", b"version https://git-lfs"))
    files.write_arrays({"a": torch.zeros(100, 100)}, path)
    with pytest.raises(ValueError, match="cut.hdf5 is damaged or incomplete"):
        files.read_arrays(make(tmp_path / "cut.hdf5", path.read_bytes()[:3000]))


def test_without_h5py(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"pip install 'modeling-elmo\[convert\]'"):
        files.read_arrays(tmp_path / "w.hdf5")


def test_json(tmp_path):
    path = tmp_path / "o.json"
    files.write_json_object({"a": {"b": 3, "c": 3.0}}, path)
    assert repr(files.read_json_object(path)) == "{'a': {'b': 3, 'c': 3.0}}"
    assert files.read_json_object(make(path, b'\xef\xbb\xbf{"lstm": 1}\r\n')) == {"lstm": 1}  # a byte order mark
    with pytest.raises(ValueError, match=r"o.json must be a JSON object, got '\[1, 2\]'"):
        files.read_json_object(make(path, b"[1, 2]"))
    with pytest.raises(ValueError, match="o.json is not a JSON file .*pass the checkpoint's options.json"):
        files.read_json_object(make(path, b"the\nof\n"))
