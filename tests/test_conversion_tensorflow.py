import json
import shutil
import zipfile

import numpy as np
import pytest
import torch
from bundle_writer import entry, header, masked, plain_crc32c, write_bundle, write_index
from errors import refused
from numpy.testing import assert_array_equal
from places import ELMO_FIXTURES
from safetensors.torch import load_file

from modeling_elmo import ELMoForPreTraining, ELMoModel, ELMoTokenizer
from modeling_elmo.conversion import tensor_bundle
from modeling_elmo.conversion.files import read_arrays
from modeling_elmo.conversion.formats import convert_checkpoint, to_original
from modeling_elmo.conversion.original import KEYS, export_original_checkpoint, read_original_record
from modeling_elmo.conversion.tensor_bundle import crc32c, read_index, read_tensor
from modeling_elmo.conversion.tensorflow import (
    OPTIMIZER_STATE,
    TensorFlowCheckpoint,
    original_name,
)
from modeling_elmo.run_scripts.program.files import read_json

FIXTURES = ELMO_FIXTURES / "bilm_tf_checkpoint"
KINDS = ["characters", "words"]
INDEX, SHARD = "model.ckpt-180.index", "model.ckpt-180.data-00000-of-00001"


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the checkpoint with words, without the HDF5 file."""
    shutil.copytree(FIXTURES / "words", tmp_path / "original", ignore=shutil.ignore_patterns("*.hdf5", "e*.json"))
    return tmp_path / "original"


@pytest.fixture
def convert(tmp_path):
    """A function that converts a checkpoint into the folder `model`."""

    def convert_to_model(source, **options):
        return convert_checkpoint(TensorFlowCheckpoint, source, tmp_path / "model", **options)

    return convert_to_model


def read_bundle(folder, step=180):
    """The arrays of a checkpoint by the names of its variables."""
    num_shards, entries = read_index(folder / f"model.ckpt-{step}.index")
    shards = [folder / f"model.ckpt-{step}.data-{i:05}-of-{num_shards:05}" for i in range(num_shards)]
    return {name: read_tensor(shards[entry.shard], name, entry).numpy() for name, entry in entries.items()}


def read(kind):
    return read_bundle(FIXTURES / kind)


def write(folder, arrays, step=180, num_shards=1, **options):
    for path in folder.glob(f"model.ckpt-{step}.*"):
        path.unlink()
    write_bundle(folder, arrays, step, num_shards)
    content = read_json(folder / "options.json")
    (folder / "options.json").write_text(json.dumps(content | options))


def arrays_of(folder):
    model = ELMoForPreTraining.from_pretrained(folder)
    return to_original(model.state_dict(), read_original_record(folder, model.config), KEYS)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_are_those_of_dump_weights(convert, kind):
    folder = convert(FIXTURES / kind)
    found, variables = arrays_of(folder), read(kind)
    expected = read_arrays(FIXTURES / kind / "dumped_weights.hdf5")
    expected |= {f"softmax/{name}": torch.from_numpy(variables[f"lm/softmax/{name}"]) for name in "Wb"}
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    record = read_json(folder / "original_checkpoint.json")
    assert record["global_step"] == 180
    assert kind == "words" or record["options"]["char_cnn"]["n_characters"] == 262  # for bilm-tf's inference
    words = (FIXTURES / kind / "vocab.txt").read_text().split()
    assert ELMoTokenizer.from_pretrained(folder).get_vocab() == {word: i for i, word in enumerate(["<PAD>", *words])}
    assert not (folder / OPTIMIZER_STATE).exists()


def test_variables_of_one_layer_and_of_old_versions():
    cell = "RNN_1/RNN/MultiRNNCell/Cell1/LSTMCell/"
    assert original_name("lm/RNN_0/rnn/lstm_cell/kernel") == "RNN_0/RNN/LSTMCell/W_0"
    assert original_name("lm/RNN_1/rnn/multi_rnn_cell/cell_1/lstm_cell/projection/kernel") == f"{cell}W_P_0"
    assert original_name(f"lm/{cell}B") == f"{cell}B"


def test_shards_special_words_and_archives(checkpoint, convert, tmp_path):
    """Rows are permuted with the words; the tensors are in three shards, in a folder of an archive."""
    order = np.random.default_rng(0).permutation(32)
    words, arrays = (checkpoint / "vocab.txt").read_text().split(), read("words")
    for name in ("lm/embedding", "lm/softmax/W", "lm/softmax/b"):
        arrays[name] = arrays[name][order]
    (checkpoint / "vocab.txt").write_text("".join(f"{words[row]}\n" for row in order))
    write(checkpoint, arrays, num_shards=3)
    with zipfile.ZipFile(tmp_path / "lm.zip", "w") as archive:
        for path in checkpoint.iterdir():
            archive.write(path, f"save_dir/{path.name}")
    folder, original = convert(tmp_path / "lm.zip"), read("words")
    model, ids = ELMoForPreTraining.from_pretrained(folder), ELMoTokenizer.from_pretrained(folder).get_vocab()
    rows = [ids[word] for word in words]
    for name, table in (("softmax/W", model.softmax.weight), ("embedding", model.elmo.word_embeddings.weight)):
        assert_array_equal(table[rows].detach().numpy(), original[f"lm/{name}"])


def test_newest_checkpoint_and_step(checkpoint, tmp_path):
    arrays = read("words")
    write(checkpoint, arrays | {"global_step": np.float32(90)}, step=90)

    def found(step=None):
        return TensorFlowCheckpoint.find(tmp_path, checkpoint, step=step).weights.name

    assert found() == "model.ckpt-180.index"
    assert found(90) == "model.ckpt-90.index"
    for path in ("/home/nobody/save_dir/model.ckpt-90", r"C:\\users\\nobody\\model.ckpt-90"):
        (checkpoint / "checkpoint").write_text(f'model_checkpoint_path: "{path}"\n')
        assert found() == "model.ckpt-90.index"
    for state, step in (("nothing", 7), ("nothing", None), ('model_checkpoint_path: "ckpt-200"', None), (None, None)):
        (checkpoint / "checkpoint").write_text(state) if state else (checkpoint / "checkpoint").unlink()
        with refused("model.ckpt-180, model.ckpt-90, of which . are .* --step"):
            found(step)


@pytest.mark.parametrize("missing", ["*.index", "*.data*", "options.json", "vocab.txt"])
def test_half_a_checkpoint(checkpoint, convert, tmp_path, missing):
    path = next(checkpoint.glob(missing))
    path.unlink()
    with refused(path.name, FileNotFoundError):
        convert(checkpoint)
    assert not (tmp_path / "model").exists()


def test_wrong_checkpoints_are_refused(checkpoint, convert):
    arrays = read("words")
    lacking = {name: array for name, array in arrays.items() if name != "lm/softmax/b/Adagrad"}
    for case, message in [
        ({"w": arrays["lm/embedding"]}, "has no variables lm/..., but w; pass another"),
        (arrays | {"lm/softmax/b": np.zeros(32)}, "must have float32 variables, but lm/softmax/b have another type"),
        (lacking, "has no lm/softmax/b/Adagrad; omit --optimizer_state."),
    ]:
        write(checkpoint, case)
        with refused(message):
            convert(checkpoint, optimizer_state=True)


@pytest.mark.parametrize("kind", KINDS)
def test_accumulators_have_the_layout_of_the_parameters(convert, kind):
    folder = convert(FIXTURES / kind, optimizer_state=True)
    found, model = load_file(folder / OPTIMIZER_STATE), ELMoForPreTraining.from_pretrained(folder)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name: values.shape for name, values in found.items()} == shapes
    back, arrays = to_original(found, read_original_record(folder, model.config), KEYS), read(kind)
    slots = {original_name(name.removesuffix("/Adagrad")): name for name in arrays if name.endswith("/Adagrad")}
    assert back.keys() == slots.keys()
    for original, name in slots.items():
        assert_array_equal(back[original].numpy(), arrays[name])
    assert found["softmax.weight"][0].eq(1).all()  # <PAD>: an accumulator of 0 would divide by 0


@pytest.fixture
def tied(checkpoint, convert):
    arrays = {name: array for name, array in read("words").items() if not name.startswith("lm/softmax/W")}
    write(checkpoint, arrays, share_embedding_softmax=True)
    return convert(checkpoint, optimizer_state=True)


def test_a_shared_table_is_loaded_saved_and_exported_once(tied, tmp_path):
    model = ELMoForPreTraining.from_pretrained(tied)
    assert model.softmax.weight is model.elmo.word_embeddings.weight and model.config.has_softmax
    assert_array_equal(model.softmax.weight[1:].detach().numpy(), read("words")["lm/embedding"])
    assert set(load_file(tied / "model.safetensors")) == set(load_file(tied / OPTIMIZER_STATE))
    model.save_pretrained(tmp_path / "again")
    again = ELMoForPreTraining.from_pretrained(tmp_path / "again")
    assert again.softmax.weight is again.elmo.word_embeddings.weight
    assert all(torch.equal(values, model.state_dict()[name]) for name, values in again.state_dict().items())
    assert torch.equal(ELMoModel.from_pretrained(tied).word_embeddings.weight, model.softmax.weight)
    export_original_checkpoint(tied, *(tmp_path / name for name in ("w.hdf5", "o.json", "v.txt", "s.hdf5")))
    assert torch.equal(read_arrays(tmp_path / "w.hdf5")["embedding"], model.softmax.weight[1:])
    assert [*read_arrays(tmp_path / "s.hdf5")] == ["softmax/b"]
    assert read_json(tmp_path / "o.json")["share_embedding_softmax"] is True


def test_a_shared_table_is_trained_and_resized_once(tied):
    model = ELMoForPreTraining.from_pretrained(tied)
    inputs = ELMoTokenizer.from_pretrained(tied)(["of the"], return_tensors="pt")
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    gradient = model.softmax.weight.grad
    assert (gradient[1:].abs().sum(1) > 0).all() and not gradient[0].any()
    model.resize_token_embeddings(40)
    assert model.softmax.weight is model.elmo.word_embeddings.weight and model.softmax.weight.shape == (40, 8)
    table = model.softmax.weight.clone()
    model.replace_vocabulary([0, 1, 2, 3, 7, -1])
    assert model.softmax.weight is model.elmo.word_embeddings.weight
    assert torch.equal(model.softmax.weight[:5], table[[0, 1, 2, 3, 7]]) and len(model.softmax.bias) == 6


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
    found = read_bundle(tmp_path)
    assert list(found) == sorted(arrays)
    for name, array in arrays.items():
        assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    "name, change, message",
    [
        (INDEX, lambda content: content[:-1], "cannot be read .*the index of a TensorFlow checkpoint"),
        (INDEX, lambda content: content[:20] + b"!" + content[21:], "cannot be read .*the block at byte 0"),
        (SHARD, lambda content: content[:-1], r"is damaged or incomplete \(train_perplexity of shape \(\) needs 4"),
        (SHARD, lambda content: content[:100] + b"!" + content[101:], "is damaged .the checksum of lm/CNN/W_cnn_0/Ada"),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, change, message):
    for file in (INDEX, SHARD):
        content = (FIXTURES / "characters" / file).read_bytes()
        (tmp_path / file).write_bytes(change(content) if file == name else content)
    with refused(f"{name} {message}"):
        read_bundle(tmp_path)


GOOD = entry(1, (2,), 0, 0, 8, 0)


@pytest.mark.parametrize(
    "pairs, options, message",
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
    with refused(message):
        read_bundle(tmp_path)


def test_values_that_are_not_numbers_are_refused(tmp_path):
    write_bundle(tmp_path, {"lm/char_embed": np.array([1, np.nan], np.float32)})
    with refused(f"{SHARD} has NaN or infinite values in lm/char_embed; pass another copy"):
        read_bundle(tmp_path)


@pytest.mark.slow
def test_tensorflow_reads_the_same():
    tensorflow = pytest.importorskip("tensorflow", reason="tensorflow is not installed; it is the reference")
    reader = tensorflow.train.load_checkpoint(str(FIXTURES / "characters" / "model.ckpt-180"))
    found = read("characters")
    assert set(reader.get_variable_to_shape_map()) == set(found)
    for name, array in found.items():
        assert_array_equal(array, reader.get_tensor(name))
