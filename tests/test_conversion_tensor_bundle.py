import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from bundle_writer import entry, header, plain_crc32c, write_bundle, write_index

from modeling_elmo.conversion import tensor_bundle as bundles
from modeling_elmo.conversion.tensor_bundle import TensorBundle, read_index
from modeling_elmo.run_scripts.program.command_line import is_mistake_of_user

SOURCE = Path(__file__).parent / "fixtures" / "elmo_fixtures" / "bilm_tf_checkpoint" / "characters"
INDEX, SHARD = "model.ckpt-180.index", "model.ckpt-180.data-00000-of-00001"


def open_bundle(folder: Path, num_shards: int = 1) -> TensorBundle:
    found, entries = read_index(folder / INDEX)
    assert found == num_shards
    return TensorBundle(entries, [folder / f"model.ckpt-180.data-{i:05}-of-{found:05}" for i in range(found)])


@pytest.fixture
def folder(tmp_path):
    for name in (INDEX, SHARD):
        shutil.copyfile(SOURCE / name, tmp_path / name)
    return tmp_path


def test_crc32c_is_its_definition():
    assert plain_crc32c(b"123456789") == 0xE3069283  # RFC 3720
    for size in (0, 1, 2, 3, 9, 511, 512, 513, 1024, 1025, 5000):
        content = np.random.default_rng(size).bytes(size)
        register = bundles._START
        for start in range(0, size, 700):  # in pieces, as a long tensor is read
            register = bundles._advance(register, np.frombuffer(content[start : start + 700], np.uint8))
        assert register ^ bundles._START == plain_crc32c(content)


def test_shards_blocks_and_dtypes(tmp_path):
    numbers = np.random.default_rng(0)
    arrays = {f"lm/layer_{i}/kernel": numbers.standard_normal((i, 3)).astype(np.float32) for i in range(40)}
    arrays |= {"global_step": np.int64(7), "lm/x": np.float64(0.5), "lm/y": np.arange(3, dtype=np.int32)}
    write_bundle(tmp_path, arrays, num_shards=3)
    bundle = open_bundle(tmp_path, num_shards=3)
    assert list(bundle.entries) == sorted(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(bundle[name].numpy(), array)


def test_damaged_files_are_refused(folder):
    index, shard = (folder / INDEX).read_bytes(), (folder / SHARD).read_bytes()
    (folder / INDEX).write_bytes(index[:-1])
    with pytest.raises(ValueError, match=f"{INDEX} is not the complete index of a TensorFlow checkpoint; pass another"):
        open_bundle(folder)
    (folder / INDEX).write_bytes(index[:20] + b"!" + index[21:])
    with pytest.raises(ValueError, match="is damaged .the checksum of the block at byte 0 differs.; pass another copy"):
        open_bundle(folder)
    (folder / INDEX).write_bytes(index)
    (folder / SHARD).write_bytes(shard[:-1])
    with pytest.raises(ValueError, match=r"is damaged or incomplete \(train_perplexity of shape \(\) needs 4 bytes"):
        open_bundle(folder)
    (folder / SHARD).write_bytes(shard[:100] + b"!" + shard[101:])
    bundle = open_bundle(folder)
    with pytest.raises(
        ValueError, match=f"{SHARD} is damaged .the checksum of lm/CNN/W_cnn_0/Adagrad differs.; pass another"
    ):
        for name in bundle.entries:
            bundle[name]


GOOD = entry(1, (2,), 0, 0, 8, 0)


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        ([(b"", header(1)), (b"a", GOOD)], {"compression": 1}, "compressed blocks .type 1; 1 is snappy., and only"),
        ([(b"", header(1, big_endian=True))], {}, "its numbers are big-endian"),
        ([(b"", header(1)), (b"b", GOOD), (b"a", GOOD)], {}, "its keys are not sorted"),
        ([(b"", header(2**40))], {}, "it has 1099511627776 shards"),
        ([(b"", header(1)), (b"a", entry(1, (2,), 1, 0, 8, 0))], {}, "a is in a shard after the last of 1"),
        ([(b"", header(1)), (b"a", entry(1, (b"2",), 0, 0, 8, 0))], {}, "an entry has text for a number"),
        ([(b"", header(1)), (b"a", entry(7, (2,), 0, 0, 8, 0))], {}, "has a of TensorFlow's type 7; save"),
        ([(b"", header(1)), (b"a", GOOD + b"\x3a\x00")], {}, "has a in slices; save the checkpoint again without"),
        ([(b"", header(1)), (b"a", entry(1, (2**40,), 0, 0, 2**42, 0))], {}, "needs 4398046511104 bytes"),
        ([(b"", header(1)), (b"a" * 300, GOOD)], {}, "a key at byte 4 of a block is broken"),
    ],
)
def test_wrong_entries_are_refused(tmp_path, pairs, options, message):
    write_index(tmp_path / INDEX, pairs, **options)
    (tmp_path / SHARD).write_bytes(bytes(8))
    with pytest.raises(ValueError, match=message):
        open_bundle(tmp_path)


def test_values_that_are_not_numbers_are_refused(tmp_path):
    write_bundle(tmp_path, {"lm/char_embed": np.array([1, np.nan], np.float32)})
    with pytest.raises(ValueError, match=f"{SHARD} has NaN or infinite values in lm/char_embed; pass another copy"):
        open_bundle(tmp_path)["lm/char_embed"]


def test_random_damage_is_refused(folder):
    """Bytes of the index and the shard change: all values are right, or the reader refuses in one line."""
    numbers, originals = random.Random("2018"), open_bundle(folder)
    expected = {name: originals[name] for name in originals.entries}
    contents = {name: (folder / name).read_bytes() for name in (INDEX, SHARD)}
    counts = {"read": 0, "refused": 0}
    for case in range(600):
        name = (INDEX, SHARD)[case % 2]
        content = bytearray(contents[name])
        start = numbers.randrange(len(content))
        place = slice(start, start + numbers.choice((1, 1, 4, 64)))
        content[place] = numbers.randbytes(numbers.choice((0, 1, 4, 64)))
        (folder / name).write_bytes(content)
        try:
            bundle = open_bundle(folder)
            found = {name: bundle[name] for name in numbers.sample(list(bundle.entries), 3)}
            assert all(torch.equal(values, expected[name]) for name, values in found.items())
            counts["read"] += 1
        except ValueError as error:
            assert is_mistake_of_user(error) and str(folder) in str(error) and "\n" not in str(error)
            counts["refused"] += 1
        (folder / name).write_bytes(contents[name])
    assert counts["refused"] > 300 and counts["read"]


def test_random_entries_are_refused(folder):
    """Blocks with right checksums and random contents, as somebody may make them to do harm."""
    numbers = random.Random("2018")
    for _ in range(400):
        value = bytearray(GOOD * 2)
        for _ in range(3):
            value[numbers.randrange(len(value))] = numbers.randrange(256)
        top = bytes(numbers.choice((header(1), header(2**31), numbers.randbytes(4))))
        write_index(folder / INDEX, [(b"", top), (b"a", bytes(value))])
        try:
            found, entries = read_index(folder / INDEX)
            TensorBundle(entries, [folder / SHARD] * min(found, 100))["a"]
        except (ValueError, IndexError) as error:
            assert is_mistake_of_user(error), error


@pytest.mark.slow
def test_tensorflow_reads_the_same():
    tensorflow = pytest.importorskip("tensorflow", reason="tensorflow is not installed; it is the reference")
    reader, bundle = tensorflow.train.load_checkpoint(str(SOURCE / "model.ckpt-180")), open_bundle(SOURCE)
    assert set(reader.get_variable_to_shape_map()) == set(bundle.entries)
    for name in bundle.entries:
        np.testing.assert_array_equal(bundle[name].numpy(), reader.get_tensor(name))
