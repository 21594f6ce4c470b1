import os
import pickle
import shutil
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from modeling_elmo.conversion.manylangs import convert_manylangs_checkpoint
from modeling_elmo.conversion.manylangs_files import read_lexicon, read_pickle

BOTH = Path(__file__).parent / "fixtures" / "elmo_fixtures" / "manylangs" / "characters_and_words"


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(BOTH, tmp_path / "copy"))


def test_white_space_alone_is_the_ideographic_space(tmp_path):
    (tmp_path / "char.dic").write_bytes("a\t0\r\n\u2003\t1\nb c\t2\n".encode())
    assert read_lexicon(tmp_path / "char.dic") == {"a": 0, "\u3000": 1, "b c": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\t0\n\xff\t1\n", "is not UTF-8 text"),
        (b"a\t0\nb\n", "line 2: 'b' is not an entry, a tab and an id"),
        (b"a\t0\n\nb\t1\n", "line 2: '' is not an entry"),
        (b"a\t0\nb\tc\t1\n", "line 2: .* is not an entry"),
        (b"a\t0\nb\t2\n", "its 2 different entries must have the ids 0 to 1"),
        ("\u3000\t0\n\xa0\t1\n".encode(), "its 1 different entries .*white space are the same entry"),
    ],
)
def test_wrong_dictionaries(tmp_path, content, message):
    (tmp_path / "char.dic").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_lexicon(tmp_path / "char.dic")


def test_archives(tmp_path):
    with zipfile.ZipFile(tmp_path / "179.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in BOTH.iterdir():
            archive.write(path, f"korean.model/{path.name}")
    folder = convert_manylangs_checkpoint(tmp_path / "179.zip", tmp_path / "model")
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["config.json", "encoder.pkl", "token_embedder.pkl", "char.dic", "word.dic"])
def test_half_a_checkpoint(copy, tmp_path, name):
    (copy / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"copy has no {name}.*pass|copy has no {name}.*Pass"):
        convert_manylangs_checkpoint(copy, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_single_files_and_full_folders(copy, tmp_path):
    with pytest.raises(ValueError, match="encoder.pkl is a single file; pass the folder or archive"):
        convert_manylangs_checkpoint(copy / "encoder.pkl", tmp_path / "model")
    with pytest.raises(FileExistsError, match="is not empty; pass a new or an empty folder"):
        convert_manylangs_checkpoint(copy, copy)


class Command:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("is_zip", [False, True])
def test_pickles_that_are_refused(tmp_path, is_zip):
    file, run = tmp_path / "encoder.pkl", tmp_path / "run"
    array = torch.zeros(2, 3)
    for content, message in [
        ({"a": array, "b": Command(run)}, r"is refused \(it asks for posix.system, which is no tensor\)"),
        (Command(run), "it asks for posix.system"),
        ([array], r"must have float32 tensors by name; got .*no dict"),
        ({"a": 1}, r"got a \(int\)"),
        ({"a": array.double()}, r"got a \(torch.float64, torch.strided, cpu\)"),
        ({"a": array.to_sparse()}, "torch.sparse_coo"),
        ({"a": array / 0}, "has NaN or infinite values in a"),
        ({"a": array[:1, :1].expand(1000, 1000)}, "its tensors are larger than the file"),
    ]:
        torch.save(content, file, _use_new_zipfile_serialization=is_zip)
        with pytest.raises(ValueError, match=rf"encoder.pkl .*{message}"):
            read_pickle(file)
    file.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"encoder.pkl is (damaged|refused)"):
        read_pickle(file)
    with tarfile.open(file, "w") as archive:  # the oldest format
        archive.add(BOTH / "char.dic", "storages")
    with pytest.raises(ValueError, match=r"encoder.pkl is refused \(.*legacy .tar format") as caught:
        read_pickle(file)
    assert "\n" not in str(caught.value)
    assert not run.exists()


def test_pickles_of_the_new_format(tmp_path):
    file = tmp_path / "encoder.pkl"
    torch.save(OrderedDict(a=torch.ones(300, 300)), file)
    assert torch.equal(read_pickle(file)["a"], torch.ones(300, 300))
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(tmp_path / "packed.pkl", "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with pytest.raises(ValueError, match="packed.pkl is compressed"):
        read_pickle(tmp_path / "packed.pkl")
