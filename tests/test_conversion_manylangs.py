import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ELMO_FIXTURES

from modeling_elmo import ELMoConfig, ELMoModel
from modeling_elmo.conversion.formats import convert_checkpoint
from modeling_elmo.conversion.manylangs import (
    CHARACTER_MARKERS,
    MANYLANGS_RECORD_FILE,
    SHIPPED_FILES,
    ManyLangsCheckpoint,
    architecture_to_config,
    export_manylangs_checkpoint,
    read_lexicon,
    read_pickle,
    write_lexicon,
)
from modeling_elmo.run_scripts.program.files import read_json
from modeling_elmo.tokenization.tokenization_elmo import ELMoTokenizer

FIXTURES = ELMO_FIXTURES / "manylangs"
BOTH, WORDS = FIXTURES / "characters_and_words", FIXTURES / "words_only"
ARCHITECTURE = "cnn_5_6_8_20_sample.json"
both_sources = pytest.mark.parametrize("source", [BOTH, WORDS], ids=lambda path: path.name)
GIVEN = {"is_split_into_words": True, "return_tensors": "pt"}
ODD_WORDS = ["<bos>", "<eos>", "<pad>", "<oov>", "<bow>", "<S>", "</S>", "<PAD>", "<UNK>", "<bos>a", "!!!MAXTERMID"]
ODD_WORDS += ["", " ", "\u3000", "a\u3000b", "New York", "\ud800", "a\ud800b", "\ufffd", "chess ", "\0", "a\nb", "É"]
ODD_WORDS += ["e\u0301", "\U0001f600", "\U0010fffd", "a" * 10, "a" * 11, "extraordinary", "extraordinarilylong"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folders = {}

    def converted_once(source):
        if source not in folders:
            folder = tmp_path_factory.mktemp("converted") / "model"
            folders[source] = convert_checkpoint(ManyLangsCheckpoint, source, folder)
        return folders[source]

    return converted_once


@pytest.fixture
def convert(tmp_path):
    """A function that converts a checkpoint into the folder `model`."""

    def convert_to_model(source, **options):
        return convert_checkpoint(ManyLangsCheckpoint, source, tmp_path / "model", **options)

    return convert_to_model


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(BOTH, tmp_path / "copy"))


def change_json(path, **values):
    path.write_text(json.dumps({**read_json(path), **values}))


def sentences(source) -> list[list[str]]:
    return read_json(source / "sentences.json")


def expected_ids(words, characters, forms, width):
    """The ids of the original: of each word in word.dic and, where there are any, of its characters in char.dic."""
    for word in (word[: width - 2] for word in words):
        letters = [word] if word in ("<bos>", "<eos>") else word
        inner = [characters.get(letter, characters["<oov>"]) for letter in letters]
        row = [characters["<eow>"], *inner, characters["<bow>"]]
        yield forms.get(word, forms["<oov>"]), row + [characters["<pad>"]] * (width - len(row))


def check_ids(source, tokenizer, words):
    characters = read_lexicon(BOTH / "char.dic")
    forms = read_lexicon(source / "word.dic")
    encoded = tokenizer(words, **GIVEN)
    rows = read_json(Path(tokenizer.name_or_path) / MANYLANGS_RECORD_FILE)["special_rows"]
    original = [*rows, *(row for row in range(len(forms)) if row not in rows)]
    expected = list(expected_ids(words, characters, forms, 12))
    assert [original[index - 1] for index in encoded["input_ids"][0, 1:-1].tolist()] == [word for word, _ in expected]
    if source == BOTH:
        assert (encoded["character_ids"][0, 1:-1] - 1).tolist() == [row for _, row in expected]


@both_sources
def test_vectors_of_the_original(source, converted):
    model, tokenizer = ELMoModel.from_pretrained(converted(source)), ELMoTokenizer.from_pretrained(converted(source))
    batch = tokenizer(sentences(source), is_split_into_words=True, padding=True, return_tensors="pt")
    with h5py.File(source / "expected.hdf5") as file, torch.no_grad():
        layers = torch.stack(model(**batch).hidden_states).numpy()
        for i, words in enumerate(sentences(source)):
            np.testing.assert_allclose(layers[:, i, 1 : len(words) + 1], file[str(i)][()], rtol=0, atol=1e-5)


@both_sources
def test_the_way_back_is_exact(source, converted, tmp_path):
    back = export_manylangs_checkpoint(converted(source), tmp_path / "back")
    names = {path.name for path in source.iterdir()} - {"expected.hdf5", "sentences.json"}
    assert {path.name for path in back.iterdir()} == names
    for path in back.iterdir():
        if path.suffix == ".pkl":
            ours, theirs = read_pickle(path), read_pickle(source / path.name)
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
            assert not zipfile.is_zipfile(path)  # the old format
        elif path.suffix == ".dic":
            assert path.read_bytes() == (source / path.name).read_bytes()
        else:
            expected = read_json(source / path.name)
            if path.name == "config.json":
                expected["config_path"] = Path(expected["config_path"]).name
            assert read_json(path) == expected


@both_sources
def test_ids_of_odd_words(source, converted):
    tokenizer = ELMoTokenizer.from_pretrained(converted(source))
    check_ids(source, tokenizer, ODD_WORDS)
    check_ids(source, tokenizer, [word for words in sentences(source) for word in words])


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.text(st.characters() | st.sampled_from("<bos>playNew ")) | st.sampled_from(ODD_WORDS), min_size=2)
)
def test_ids_of_any_words(converted, words):
    check_ids(BOTH, ELMoTokenizer.from_pretrained(converted(BOTH)), words)


def test_ordinary_words_with_the_names_of_our_special_words(copy, convert, tmp_path):
    words = ["<S>", "</S>", "<PAD>", "<UNK>", "!!!MAXTERMID"]  # in the places of !, :, ...
    lines = (copy / "word.dic").read_text("utf-8").split("\n")
    for place, word in enumerate(words, 8):
        lines[place] = f"{word}\t{place}"
    (copy / "word.dic").write_text("\n".join(lines), "utf-8")
    folder = convert(copy)
    tokenizer = ELMoTokenizer.from_pretrained(folder)
    # The special rows 0 to 2 stay in front, after a row of padding: the ids of other words are one higher.
    assert tokenizer(words[:4], **GIVEN)["input_ids"].tolist() == [[1, 9, 10, 11, 12, 2]]
    assert tokenizer.convert_tokens_to_ids("!!!MAXTERMID") == 13
    back = export_manylangs_checkpoint(folder, tmp_path / "back")
    assert (back / "word.dic").read_bytes() == (copy / "word.dic").read_bytes()


def characters_only(folder, **overrides):
    """Our folder of a model with characters of two scripts and without word vectors."""
    lexicon = {entry: index for index, entry in enumerate([*"नमस्ते", "ж", *CHARACTER_MARKERS])}
    sizes = {"projection_size": 6, "lstm_hidden_size": 6, "char_cnn_filters": [[1, 2], [2, 4]]}  # all widths are equal
    config = {**sizes, "char_vocab_size": len(lexicon) + 1, "char_embedding_size": 3, "max_word_length": 9}
    config |= {"forget_bias": 0, "always_project": True, "has_softmax": False, **overrides}
    ELMoModel(ELMoConfig(**config)).save_pretrained(folder)
    markers = {"begin_of_word": "<eow>", "end_of_word": "<bow>", "literal_markers": True, "cut_before_lookup": True}
    ELMoTokenizer(alphabet="lexicon", lexicon=lexicon, max_word_length=9, **markers).save_pretrained(folder)
    return folder


def test_characters_only(convert, tmp_path):
    folder = characters_only(tmp_path / "first", cell_clip=None)
    files = export_manylangs_checkpoint(folder, tmp_path / "files")
    assert not (files / "word.dic").exists()
    again = convert(files)
    outputs = []
    for place in (folder, again):
        with torch.no_grad():
            inputs = ELMoTokenizer.from_pretrained(place)(["नमस्ते", "ж", "<bos>", "<oov>", "x" * 20], **GIVEN)
            outputs.append(torch.stack(ELMoModel.from_pretrained(place)(**inputs).hidden_states))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", SHIPPED_FILES)
def test_architectures_that_the_original_ships(copy, name):
    (copy / ARCHITECTURE).unlink()
    change_json(copy / "config.json", config_path=f"C:\\somewhere\\{name}")
    found = ManyLangsCheckpoint.find(copy, copy)
    architecture = found.record["architecture"]
    config = architecture_to_config(architecture, 6000, 100_000, found.source)
    sizes = config.projection_size, config.lstm_hidden_size, config.num_hidden_layers, config.word_embedding_size
    assert sizes == (512, 4096, 2, 100)
    assert (config.char_embedding_size, config.max_word_length, config.num_highway_layers) == (50, 50, 2)
    assert (config.cell_clip, config.projection_clip, config.forget_bias, config.dropout) == (3, 3, 0, 0.1)
    assert config.char_cnn_filters == [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]]
    with refused(f"does not match the shipped {name}"):
        found.load("whitespace")


def test_architecture_file_elsewhere(copy, convert, tmp_path):
    (copy / ARCHITECTURE).rename(tmp_path / "config.json")  # the name of the other file
    with refused(r"copy has no config.json that .*; pass it \(`--architecture`\)", FileNotFoundError):
        convert(copy)
    (copy / "config.json").unlink()
    convert(copy, architecture=tmp_path / "config.json")
    back = export_manylangs_checkpoint(tmp_path / "model", tmp_path / "back")
    assert read_json(back / "config.json") == {"config_path": "architecture.json"}
    assert (back / "architecture.json").exists()


@pytest.mark.parametrize(
    "section, changes, message",
    [
        ("encoder", {"name": "lstm"}, r"has {'encoder.name': 'lstm'}; only .* can be converted"),
        ("encoder", {"dim": None}, r"missing \['encoder.dim'\]"),
        ("encoder", {"dim": 21}, r"the file has \(80, 8\), the options require \(84, 8\)"),
        ("token_embedder", {"activation": "elu"}, "char_cnn_activation"),
        ("encoder", {"n_layers": 10**9}, r".*1000000000; pass at most 100\.$"),
        ("encoder", {"n_layers": 3}, r"encoder.backward_layer_2.input_linearity.weight: .* none \(missing\)"),
        ("token_embedder", {"n_highway": 10**9}, r".*1000000000; pass at most 100\.$"),
        ("token_embedder", {"word_dim": 10**9}, r".*1000000000; pass at most 1048576\.$"),
        ("token_embedder", {"filters": [[1, 1]] * 101}, r"'101 filters'; pass at most 100\.$"),
    ],
)
def test_other_architectures(copy, convert, tmp_path, section, changes, message):
    change_json(copy / ARCHITECTURE, **{section: read_json(copy / ARCHITECTURE)[section] | changes})
    with refused(f"(?s){ARCHITECTURE}.*{message}") as error:
        convert(copy)
    assert not message.endswith("$") or f"Correct {section}.{[*changes][0]} in " in str(error.value)
    assert not (tmp_path / "model").exists()


def test_no_clips(copy, convert, tmp_path):
    encoder = read_json(copy / ARCHITECTURE)["encoder"] | {"cell_clip": 0, "proj_clip": None}
    change_json(copy / ARCHITECTURE, encoder=encoder)
    folder = convert(copy)
    config = ELMoConfig.from_pretrained(folder)
    assert (config.cell_clip, config.projection_clip) == (None, None)
    back = export_manylangs_checkpoint(folder, tmp_path / "back")
    assert read_json(back / ARCHITECTURE)["encoder"] == encoder


def test_dictionary_of_another_checkpoint(copy, convert):
    with (copy / "char.dic").open("a", encoding="utf-8") as file:
        file.write("ж\t46\n")
    with refused(r"(?s)47 entries in char.dic .*has \(46, 5\), the options require \(47, 5\)"):
        convert(copy)
    lines = (BOTH / "char.dic").read_text("utf-8").replace("<bow>", "<eoe>")
    (copy / "char.dic").write_text(lines, "utf-8")
    with refused("char.dic.* include <bow>;"):
        convert(copy)


def test_models_that_the_format_cannot_hold(tmp_path):
    wrong = {"forget_bias": 1.0, "use_skip_connections": False, "always_project": False, "vocab_size": 5}
    folder = characters_only(tmp_path / "model", **wrong)
    parts = "a forget bias of 1.0.*skip connections.*without a projection.*4 words in the tokenizer and 5 in the"
    with refused(f"ELMoForManyLangs does not support {parts}"):
        export_manylangs_checkpoint(folder, tmp_path / "files")
    assert not (tmp_path / "files").exists()


def test_words_that_a_line_holds(tmp_path):
    for word in ("", " chess", "\u2003", "a\tb", "a\nb", "a\x85"):
        with refused("word.dic cannot hold the entries"):
            write_lexicon({word: 0}, tmp_path / "word.dic")
    (tmp_path / "char.dic").write_bytes("a\t0\r\n\u2003\t1\nb c\t2\n".encode())  # white space alone is U+3000
    assert read_lexicon(tmp_path / "char.dic") == {"a": 0, "\u3000": 1, "b c": 2}
    lexicon = {"chess ": 0, "\u3000": 1, "New York": 2, "\ufeff": 3}
    write_lexicon(lexicon, tmp_path / "word.dic")
    assert read_lexicon(tmp_path / "word.dic") == lexicon


def test_a_changed_model_and_no_record(converted, tmp_path):
    folder = Path(shutil.copytree(converted(BOTH), tmp_path / "model"))
    ELMoConfig.from_pretrained(folder, projection_clip=4).save_pretrained(folder)
    expected = read_json(BOTH / ARCHITECTURE)
    expected["encoder"]["proj_clip"] = 4
    back = export_manylangs_checkpoint(folder, tmp_path / "changed")
    assert read_json(back / ARCHITECTURE) == expected
    (folder / MANYLANGS_RECORD_FILE).unlink()
    back = export_manylangs_checkpoint(folder, tmp_path / "files")
    assert read_lexicon(back / "word.dic") == read_lexicon(BOTH / "word.dic")  # <oov>, <bos>, <eos> first
    found = read_json(back / "cnn_8_20.json")
    assert found == {name: expected[name] for name in found}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"a\t0\n\xff\t1\n", "is not UTF-8 text"),
        (b"a\t0\nb\n", "line 2: 'b' is not entry, tab and id"),
        (b"a\t0\nb\t2\n", "its 2 different entries must have the ids 0 to 1"),
        ("\u3000\t0\n\xa0\t1\n".encode(), "its 1 different entries .*white space are the same entry"),
    ],
)
def test_wrong_dictionaries(tmp_path, content, message):
    (tmp_path / "char.dic").write_bytes(content)
    with refused(f"char.dic.*{message}"):
        read_lexicon(tmp_path / "char.dic")


def test_archives_and_other_checkpoints_in_folders_below(copy, tmp_path):
    shutil.copytree(WORDS, copy / "words")
    with zipfile.ZipFile(tmp_path / "179.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in BOTH.iterdir():
            archive.write(path, f"korean.model/{path.name}")
    for place in (copy, tmp_path / "179.zip"):
        folder = convert_checkpoint(ManyLangsCheckpoint, place, tmp_path / f"from_{place.name}")
        assert ELMoConfig.from_pretrained(folder).char_vocab_size == 47


@pytest.mark.parametrize("name", ["config.json", "encoder.pkl", "token_embedder.pkl", "char.dic", "word.dic"])
def test_half_a_checkpoint(copy, convert, tmp_path, name):
    (copy / name).unlink()
    with refused(f"copy.*{name}", FileNotFoundError):
        convert(copy)
    assert not (tmp_path / "model").exists()


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("is_zip", [False, True])
def test_pickles_that_are_refused(tmp_path, is_zip):
    file, run = tmp_path / "encoder.pkl", tmp_path / "run"
    array = torch.zeros(2, 3)
    for content, message in [
        ({"a": array, "b": Command(run)}, "more than tensors"),
        ([array], "not list"),
        ({"a": 1}, "not a"),
        ({"a": array.double()}, "not a"),
        ({"a": array.to_sparse()}, "not a"),
        ({"a": array / 0}, "has NaN or infinite values in a"),
    ]:
        torch.save(content, file, _use_new_zipfile_serialization=is_zip)
        with refused(rf"encoder.pkl .*{message}"):
            read_pickle(file)
    for damaged in (pickle.dumps({"a": 1}), file.read_bytes()[:200]):
        file.write_bytes(damaged)
        with refused("encoder.pkl is damaged, or contains more than tensors"):
            read_pickle(file)
    assert not run.exists()
