"""Damaged checkpoints of all formats: each is converted exactly, or refused in one line that names the file."""

import json
import shutil
from collections import Counter
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ELMO_FIXTURES

from modeling_elmo.conversion.archive import ARCHIVE_KEYS, AllenNLPArchive
from modeling_elmo.conversion.files import fetch
from modeling_elmo.conversion.formats import to_original
from modeling_elmo.conversion.manylangs import MANYLANGS_KEYS, PICKLES, ManyLangsCheckpoint
from modeling_elmo.conversion.original import KEYS, OriginalCheckpoint
from modeling_elmo.conversion.tensorflow import TensorFlowCheckpoint
from modeling_elmo.run_scripts.program.command_line import is_mistake_of_user

HDF5, MANYLANGS, TENSORFLOW = "variants/no_clip", "manylangs/characters_and_words", "bilm_tf_checkpoint/words"
ARCHIVE = "archives/srl_elmo_v0"
FORMATS = {HDF5: OriginalCheckpoint, MANYLANGS: ManyLangsCheckpoint, TENSORFLOW: TensorFlowCheckpoint}
FORMATS[ARCHIVE] = AllenNLPArchive
TABLES = {MANYLANGS: MANYLANGS_KEYS, ARCHIVE: ARCHIVE_KEYS}
VALUES = [None, True, -1, 0, 1, 3, 50, 0.5, 1e300, float("nan"), "", "relu", "8", [], {}, [[1, 4]], [["a", None]], [{}]]
# Bytes that replace others, mostly as many, at a place of the header
changes = st.lists(
    st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=64), st.sampled_from([0, 0, 0, 0, -1, 9])),
    min_size=1,
    max_size=3,
)
values = st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.sampled_from(VALUES))


def changed_bytes(content, replaced: list[tuple[int, bytes, int]]):
    for start, new, more in replaced:
        start %= len(content)
        content = content[:start] + new + content[start + len(new) + more :]
    return content


def changed_value(content, replaced: tuple[list[int], Any]):
    """A value of any depth of a JSON object is replaced."""
    path, value = replaced
    section = root = json.loads(content)
    for number in path:
        name = [*section][number % len(section)]
        if not isinstance(section[name], dict):
            break
        section = section[name]
    section[name] = value
    return json.dumps(root).encode()


def read_state(folder):
    return torch.load(folder / "weights.th", weights_only=True)


def arrays_in(source, folder):
    """The arrays of a checkpoint as other libraries read them; TensorFlow's are what they were before the damage."""
    if source == MANYLANGS:
        parts = {part: torch.load(folder / name, weights_only=True) for part, name in PICKLES.items()}
        return {f"{part}.{name}": array.numpy() for part, arrays in parts.items() for name, array in arrays.items()}
    if source == ARCHIVE:
        return {name.partition("._elmo_lstm.")[2]: array.numpy() for name, array in read_state(folder).items()}
    if source == TENSORFLOW:
        return TensorFlowCheckpoint.find(folder, ELMO_FIXTURES / source).arrays()
    found = {}
    with h5py.File(folder / "weights.hdf5") as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if hasattr(item, "shape") else None)
    return found


def check(source, folder, scratch):
    try:
        found = FORMATS[source].find(scratch, folder)
        model, tokenizer, record = found.load("whitespace")
    except (ValueError, OSError) as error:
        assert is_mistake_of_user(error), error
        assert str(folder) in str(error) or str(scratch) in str(error) or "pass the training vocabulary" in str(error)
        return "refused"
    expected = arrays_in(source, found.paths[0].parent)
    for name, array in to_original(model.state_dict(), record, TABLES.get(source, KEYS)).items():
        assert array.isfinite().all()
        np.testing.assert_array_equal(array.numpy(), expected[name])
    assert len(tokenizer) == model.config.vocab_size
    return "converted"


@pytest.fixture
def copy(request, tmp_path):
    ignored = shutil.ignore_patterns("expected.*", "sentences.json", "text.txt", "dumped_weights.hdf5")
    shutil.copytree(ELMO_FIXTURES / request.getfixturevalue("source"), tmp_path / "copy", ignore=ignored)
    if (tmp_path / "copy" / "model.tar.gz").exists():
        unpacked = fetch(tmp_path / "copy" / "model.tar.gz", tmp_path)
        shutil.copytree(unpacked, tmp_path / "copy", dirs_exist_ok=True)
    return tmp_path / "copy"


@pytest.mark.parametrize(
    "source, name, change, drawn",
    [
        *((HDF5, name, changed_bytes, changes) for name in ("weights.hdf5", "options.json")),
        *(
            (MANYLANGS, name, changed_bytes, changes)
            for name in ("config.json", "char.dic", "word.dic", *PICKLES.values())
        ),
        *((TENSORFLOW, f"model.ckpt-180.{end}", changed_bytes, changes) for end in ("index", "data-00000-of-00001")),
        (ARCHIVE, "weights.th", changed_bytes, changes),
        (ARCHIVE, "config.json", changed_value, values),
        (ARCHIVE, "fta/model.text_field_embedder.elmo.options_file", changed_value, values),
        (HDF5, "options.json", changed_value, values),
        (MANYLANGS, "cnn_5_6_8_20_sample.json", changed_value, values),
    ],
)
def test_damaged_files(copy, tmp_path, source, name, change, drawn):
    content, counts = (copy / name).read_bytes(), Counter()

    @settings(max_examples=60, derandomize=True, deadline=None)
    @given(drawn)
    def each(damage):
        (copy / name).write_bytes(change(content, damage))
        counts[check(source, copy, tmp_path)] += 1

    each()
    is_optional = (source, name) == (ARCHIVE, "config.json")
    assert counts["refused"] or is_optional, counts
    assert counts["converted"] or change is changed_bytes, counts
