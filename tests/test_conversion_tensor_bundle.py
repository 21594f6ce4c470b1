from pathlib import Path

import numpy as np
import pytest
from bundle_writer import entry, header, masked, plain_crc32c, write_bundle, write_index

from modeling_elmo.conversion import tensor_bundle
from modeling_elmo.conversion.tensor_bundle import crc32c, read_index, read_tensor

SOURCE = Path(__file__).parent / "fixtures" / "elmo_fixtures" / "bilm_tf_checkpoint" / "characters"
INDEX, SHARD = "model.ckpt-180.index", "model.ckpt-180.data-00000-of-00001"


def read(folder: Path, num_shards: int = 1) -> dict[str, np.ndarray]:
    found, entries = read_index(folder / INDEX)
    assert found == num_shards
    shards = [folder / f"model.ckpt-180.data-{i:05}-of-{found:05}" for i in range(found)]
    return {name: read_tensor(shards[entry.shard], name, entry).numpy() for name, entry in entries.items()}


def test_crc32c_is_its_definition(monkeypatch):
    monkeypatch.setattr(tensor_bundle, "CHUNK", 700)
    assert plain_crc32c(b"123456789") == 0xE3069283  # RFC 3720
    for size in (0, 1, 2, 3, 9, 511, 512, 513, 1024, 1025, 5000):
        content = np.random.default_rng(size).bytes(size)
        assert crc32c(np.frombuffer(content, np.uint8)) == masked(content)


def test_shards_blocks_and_dtypes(tmp_path):
    numbers = np.random.default_rng(0)
    arrays = {f"lm/layer_{i}/kernel": numbers.standard_normal((i, 3)).astype(np.float32) for i in range(40)}
    arrays |= {"global_step": np.int64(7), "lm/x": np.float64(0.5), "lm/y": np.arange(3, dtype=np.int32)}
    write_bundle(tmp_path, arrays, num_shards=3)
    found = read(tmp_path, num_shards=3)
    assert list(found) == sorted(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (INDEX, lambda content: content[:-1], "cannot be read .*the index of a TensorFlow checkpoint.*pass another"),
        (INDEX, lambda content: content[:20] + b"!" + content[21:], "cannot be read .*checksum of the block at byte 0"),
        (SHARD, lambda content: content[:-1], r"is damaged or incomplete \(train_perplexity of shape \(\) needs 4"),
        (SHARD, lambda content: content[:100] + b"!" + content[101:], "is damaged .the checksum of lm/CNN/W_cnn_0/Ada"),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, change, message):
    for file in (INDEX, SHARD):
        content = (SOURCE / file).read_bytes()
        (tmp_path / file).write_bytes(change(content) if file == name else content)
    with pytest.raises(ValueError, match=f"{name} {message}"):
        read(tmp_path)


GOOD = entry(1, (2,), 0, 0, 8, 0)


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        ([(b"", header(1)), (b"a", GOOD)], {"compression": 1}, "its blocks are compressed"),
        ([(b"", header(1, big_endian=True))], {}, "its numbers are big-endian"),
        ([(b"", header(1)), (b"a", entry(7, (2,), 0, 0, 8, 0))], {}, "has a of TensorFlow's type 7; save"),
        ([(b"", header(1)), (b"a", GOOD + b"\x3a\x00")], {}, "has a in slices; save the checkpoint again without"),
        ([(b"", header(1)), (b"a", entry(1, (2**40,), 0, 0, 2**42, 0))], {}, "needs 4398046511104 bytes"),
    ],
)
def test_wrong_entries_are_refused(tmp_path, pairs, options, message):
    write_index(tmp_path / INDEX, pairs, **options)
    (tmp_path / SHARD).write_bytes(bytes(8))
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_values_that_are_not_numbers_are_refused(tmp_path):
    write_bundle(tmp_path, {"lm/char_embed": np.array([1, np.nan], np.float32)})
    with pytest.raises(ValueError, match=f"{SHARD} has NaN or infinite values in lm/char_embed; pass another copy"):
        read(tmp_path)


@pytest.mark.slow
def test_tensorflow_reads_the_same():
    tensorflow = pytest.importorskip("tensorflow", reason="tensorflow is not installed; it is the reference")
    reader, found = tensorflow.train.load_checkpoint(str(SOURCE / "model.ckpt-180")), read(SOURCE)
    assert set(reader.get_variable_to_shape_map()) == set(found)
    for name, array in found.items():
        np.testing.assert_array_equal(array, reader.get_tensor(name))
