import json
import shutil

import h5py
import numpy as np
import pytest
import torch
from bilm_models import needs_int8
from errors import refused
from places import ELMO_FIXTURES

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoForTokenClassification, ELMoModel
from modeling_elmo.conversion.formats import convert_checkpoint
from modeling_elmo.conversion.original import (
    RECORD_FILE,
    OriginalCheckpoint,
    export_original_checkpoint,
    options_to_config,
)
from modeling_elmo.run_scripts.program.files import read_json
from modeling_elmo.tokenization.tokenization_elmo import ELMoTokenizer

ALLENNLP = ELMO_FIXTURES / "allennlp"
VARIANTS = "no_clip no_cnn_projection no_highway no_lstm_projection one_layer three_layers word_level"
WEIGHTS = ["allennlp/lm_weights.hdf5", *(f"variants/{name}/weights.hdf5" for name in VARIANTS.split(" "))]
WEIGHTS.append("variants/one_layer/weights_inference_names.hdf5")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folders = {}

    def convert(weights):
        if weights not in folders:
            source, folder = ELMO_FIXTURES / weights, tmp_path_factory.mktemp("converted")
            vocabulary = source.with_name("vocab.txt") if "word_level" in weights else None
            options = {"options": source.with_name("options.json"), "vocabulary": vocabulary}
            folders[weights] = convert_checkpoint(OriginalCheckpoint, source, folder / "model", "whitespace", **options)
        return folders[weights]

    return convert


def original(name="no_clip"):
    """Arrays and options of a variant."""
    folder = ELMO_FIXTURES / "variants" / name
    return read(folder / "weights.hdf5"), read_json(folder / "options.json")


def read(path):
    arrays = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: arrays.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return arrays


def write(path, arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return path


def convert_arrays(folder, arrays, options, **others):
    """Writes a checkpoint and converts it."""
    weights, file = write(folder / "weights.hdf5", arrays), folder / "options.json"
    file.write_text(json.dumps(options))
    return convert_checkpoint(OriginalCheckpoint, weights, folder / "model", options=file, **others)


def vectors_of_batches(folder, sentences, carry_states):
    """`vectors[k][i]`, `(layers + 1, tokens, 2 * projection)`: batch i has sentence i of every list k."""
    model, tokenizer = ELMoModel.from_pretrained(folder), ELMoTokenizer.from_pretrained(folder)
    vectors, states = [[] for _ in sentences], None
    for batch in zip(*sentences, strict=True):
        words = [sentence.split() for sentence in batch]
        inputs = tokenizer(words, is_split_into_words=True, padding=True, return_tensors="pt")
        with torch.no_grad():
            output = model(**inputs, initial_states=states)
        states = output.final_states if carry_states else None
        layers = torch.stack(output.hidden_states).numpy()
        for k, sentence in enumerate(words):
            vectors[k].append(layers[:, k, 1 : len(sentence) + 1])
    return vectors


def differences(vectors, expected):
    """The largest difference per batch of two results of `vectors_of_batches`."""
    lists = zip(vectors, expected, strict=True)
    return np.max([[np.abs(a - b).max() for a, b in zip(*rows, strict=True)] for rows in lists], axis=0)


@pytest.mark.parametrize("carry_states", [True, False])
def test_numbers_of_allennlp(converted, carry_states):
    sentences = read_json(ALLENNLP / "sentences.json")
    expected = []
    for k in range(3):
        halves = read(ALLENNLP / f"lm_embeddings_{k}.hdf5")
        expected.append([np.concatenate(halves[str(i)], axis=-1) for i in range(10)])
    vectors = vectors_of_batches(converted(WEIGHTS[0]), sentences, carry_states)
    found = differences([[layers[-1] for layers in row] for row in vectors], expected)
    assert found[0] <= 1e-5
    if carry_states:
        assert found.max() <= 1e-5
    else:
        assert found[1:].min() > 1  # the reference continues from the batch before


def test_token_vectors_of_allennlp(converted):
    tokenizer = ELMoTokenizer(literal_markers=True)
    model = ELMoModel.from_pretrained(converted(WEIGHTS[0]))
    words = (ALLENNLP / "vocab_test.txt").read_text("utf-8").split("\n")
    inputs = tokenizer([[word] for word in words], is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        tokens = model(**inputs).hidden_states[0][:, 1]
    expected = read(ALLENNLP / "elmo_token_embeddings.hdf5")["embedding"]
    assert np.abs(tokens[:, :16].numpy() - expected).max() <= 1e-5
    assert torch.equal(tokens[:, :16], tokens[:, 16:])


@pytest.mark.parametrize("weights", WEIGHTS[1:])
def test_numbers_of_bilm_tf(converted, weights):
    expected = read((ELMO_FIXTURES / weights).with_name("expected.hdf5"))
    sentences = read_json((ELMO_FIXTURES / weights).with_name("sentences.json"))
    vectors = vectors_of_batches(converted(weights), sentences, carry_states=True)
    found = differences(vectors, [[expected[f"{k}/{i}"] for i in range(4)] for k in range(3)])
    assert found.max() <= 1e-5


def round_trip(model_dir, tmp_path, **others):
    export_original_checkpoint(model_dir, tmp_path / "back.hdf5", tmp_path / "back.json", **others)
    return read(tmp_path / "back.hdf5"), read_json(tmp_path / "back.json")


def assert_equal_arrays(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_round_trip_is_exact_and_the_folder_is_a_model(converted, tmp_path, weights):
    folder = converted(weights)
    arrays, options = round_trip(folder, tmp_path)
    assert_equal_arrays(arrays, read(ELMO_FIXTURES / weights))
    assert options == read_json((ELMO_FIXTURES / weights).with_name("options.json"))

    config, tokenizer = ELMoConfig.from_pretrained(folder), ELMoTokenizer.from_pretrained(folder)
    assert (config.architectures, config.has_softmax, config.vocab_size) == (["ELMoModel"], False, len(tokenizer))
    _, report = ELMoModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())


def test_a_changed_model_still_exports(converted, tmp_path):
    """A head in half precision with a vocabulary cache, saved without the record of the conversion."""
    config = ELMoConfig.from_pretrained(converted(WEIGHTS[0]), num_labels=3)
    head = ELMoForTokenClassification.from_pretrained(converted(WEIGHTS[0]), config=config, dtype=torch.bfloat16)
    head.elmo.cache_vocabulary(["Paris"], ELMoTokenizer.from_pretrained(converted(WEIGHTS[0])), save=True)
    head.save_pretrained(tmp_path / "head")
    arrays, options = round_trip(tmp_path / "head", tmp_path)
    expected = read(ALLENNLP / "lm_weights.hdf5")
    assert_equal_arrays(arrays, {name: torch.tensor(array).bfloat16().float() for name, array in expected.items()})
    others = {"bidirectional": True, "dropout": 0.1, "share_embedding_softmax": False}
    assert options == read_json(ALLENNLP / "options.json") | others


@needs_int8
def test_a_quantized_model_is_refused(converted, tmp_path):
    ELMoModel.from_pretrained(converted(WEIGHTS[0])).quantize().save_pretrained(tmp_path / "int8")
    with refused("int8 is quantized, which the format"):
        round_trip(tmp_path / "int8", tmp_path)


def test_options():
    """Of each: given, and missing or null, for which the original has a default."""
    _, options = original()
    options["lstm"] |= {"cell_clip": 3, "proj_clip": None}
    del options["lstm"]["n_layers"], options["lstm"]["use_skip_connections"], options["char_cnn"]["n_highway"]
    config = options_to_config(options, num_characters=261, vocab_size=4, has_softmax=False)
    assert (config.cell_clip, config.projection_clip) == (3.0, None)
    assert (config.num_hidden_layers, config.use_skip_connections, config.num_highway_layers) == (1, False, 0)


@pytest.mark.parametrize("n_characters, num_characters", [(261, 261), (262, 261), (262, 262)])
def test_options_and_tables_of_the_training(tmp_path, n_characters, num_characters):
    arrays, options = original()
    options |= {"dropout": 0.2, "n_tokens_vocab": 793471, "unroll_steps": 20, "all_clip_norm_val": 10.0}
    options["char_cnn"]["n_characters"] = n_characters
    arrays["char_embed"] = arrays["char_embed"][[*range(261), 0]][:num_characters]
    folder = convert_arrays(tmp_path, arrays, options)
    table = ELMoModel.from_pretrained(folder).get_input_embeddings().weight
    assert table.shape == (num_characters + 1, 4) and not table[0].any()
    arrays_back, options_back = round_trip(folder, tmp_path)
    assert_equal_arrays(arrays_back, arrays)
    assert repr(options_back) == repr(options)  # 3 is not 3.0


WORDS = ["the", "<UNK>", "cat", "</S>", "sat", "<S>", "mat"]


def language_model(tmp_path):
    """Arrays, options, softmax arrays and files of a checkpoint with special words anywhere in its vocabulary."""
    arrays, options = original()
    random = np.random.default_rng(0).normal(size=(7, 9)).astype(np.float32)
    softmax = {"softmax/W": random[:, :8], "softmax/b": random[:, 8]}
    (tmp_path / "words.txt").write_text("\n".join(WORDS) + "\n")
    files = {"vocabulary": tmp_path / "words.txt", "softmax": write(tmp_path / "softmax.hdf5", softmax)}
    return arrays, {**options, "n_tokens_vocab": 7}, softmax, files


@pytest.mark.parametrize(
    "words, unused",
    [
        (WORDS, {}),
        (["the", "<UNK>", "cat", "</S>", "the", "<S>", "the"], {0: "the [row 0]", 4: "the [row 4]"}),
        (["<S>", "", "<UNK>", "cat", "", "</S>", "<S>"], {0: "<S> [row 0]", 1: "[row 1]", 4: "[row 4]"}),
        (["<PAD>", "<S>", "</S>", "<UNK>", "cat", "sat", "mat"], {0: "<PAD> [row 0]"}),
    ],
    ids=["special words anywhere", "repeated", "blank", "padding"],
)
def test_softmax_rows_go_with_their_words(tmp_path, words, unused):
    """Each line has a row, and a repeated word has the last, as in `Vocabulary` of bilm-tf."""
    arrays, options, softmax, files = language_model(tmp_path)
    files["vocabulary"].write_text("\n".join([*words[:3], "!!!MAXTERMID", *words[3:]]) + "\n")
    folder = convert_arrays(tmp_path, arrays, options, **files)
    model, tokenizer = ELMoForPreTraining.from_pretrained(folder), ELMoTokenizer.from_pretrained(folder)
    assert model.config.architectures == ["ELMoForPreTraining"] and len(tokenizer) == model.config.vocab_size == 8
    rows = {word: row for row, word in enumerate(words)} | {name: row for row, name in unused.items()}
    for word in rows.keys() - {"", "<PAD>"}:
        token_id = tokenizer.convert_tokens_to_ids(word)
        np.testing.assert_array_equal(model.softmax.weight[token_id].detach(), softmax["softmax/W"][rows[word]])
        assert model.softmax.bias[token_id].item() == softmax["softmax/b"][rows[word]]
    assert not model.softmax.weight[0].any() and model.softmax.bias[0] == 0
    text = tokenizer(" ".join(unused.values()))["input_ids"]
    assert not {*map(tokenizer.convert_tokens_to_ids, unused.values())} & {*text}

    back = {"vocabulary": tmp_path / "back.txt", "softmax": tmp_path / "back_softmax.hdf5"}
    arrays_back, options_back = round_trip(folder, tmp_path, **back)
    assert_equal_arrays(arrays_back, arrays)
    assert_equal_arrays(read(back["softmax"]), softmax)
    assert options_back == options
    assert back["vocabulary"].read_text().split("\n") == [*words, ""]
    with refused("model is not empty; pass a new or an empty folder.", FileExistsError):
        convert_arrays(tmp_path, arrays, options, **files)


def spoil(name="no_clip", arrays=(), options=()):
    """A variant with some arrays and options (`section.name`) replaced, or removed (`None`)."""
    new_arrays, new_options = original(name)
    new_arrays |= arrays
    for path, value in dict(options).items():
        *sections, key = path.split(".")
        section = new_options[sections[0]] if sections else new_options
        section[key] = value
    return ({key: value for key, value in part.items() if value is not None} for part in (new_arrays, new_options))


FLOATS = np.zeros((3, 2), dtype=np.float32)


@pytest.mark.parametrize(
    "spoilt, message",
    [
        (
            dict(arrays={"char_embed": None, "CNN/b_cnn_1": FLOATS, "extra": FLOATS}),
            r"CNN/b_cnn_1: .*\(3, 2\), .*\(8,\)\n  char_embed: .*missing.*\(261, 4\)\n  extra: .*\(3, 2\).*unexpected",
        ),
        (dict(arrays={"rnn/MultiRNNCell/Cell0/LSTMCell/kernel": FLOATS}), "has arrays rnn/.* forward-only"),
        (dict(options={"bidirectional": False}), "options.json says `bidirectional: false`. .* forward-only"),
        (dict(options={"lstm": None}), r"missing \['lstm.dim', 'lstm.projection_dim'\]"),
        (dict(options={"lstm.peepholes": True}), r"unknown \['lstm.peepholes'\]"),
        (dict(options={"char_cnn.n_characters": 60}), "n_characters is 60, not 261 or 262"),
        (dict(options={"char_cnn.activation": "gelu"}), "(?s)Correct .*options.json: .*char_cnn_activation.*gelu"),
        (dict(name="word_level"), "rows of words; pass the training vocabulary"),
        (dict(options={"lstm.n_layers": 10**9}), r"Correct lstm.n_layers in .*: .*1000000000.*; pass .*\d\.$"),
        (
            dict(options={"char_cnn.filters": [[1, 10**9]]}),
            r"Correct char_cnn.filters in .*; pass numbers up to 1048576",
        ),
        (dict(options={"lstm.n_layers": 3}), r"Cell2/LSTMCell/B: the file has none \(missing\)"),
        (dict(options={"lstm.dim": 10**9}), r"Cell0/LSTMCell/B: the file has .*, the options require \(4000000000,\)"),
        # Sizes are compared before memory is allocated.
        (dict(options={"lstm.n_layers": 40, "lstm.dim": 2**40}), "does not match .*options.json:\n(.*\n){20}  and 220"),
    ],
)
def test_files_that_do_not_match_are_refused(tmp_path, spoilt, message):
    with refused(message):
        convert_arrays(tmp_path, *spoil(**spoilt))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["options.json", "weights.hdf5"]


@pytest.mark.parametrize(
    "words, rows, message",
    [
        (WORDS[:-1], 7, r"has 6 words .* has n_tokens_vocab 7; pass the training vocabulary"),
        (WORDS[:-1], 6, r"with 6 words:\n  softmax/W: the file has \(7, 8\), the options"),
        (None, 7, "rows of words; pass the training vocabulary"),
    ],
)
def test_softmax_that_does_not_match_is_refused(tmp_path, words, rows, message):
    arrays, options, _, files = language_model(tmp_path)
    if words is None:
        del files["vocabulary"]
    else:
        files["vocabulary"].write_text("\n".join(words))
    with refused(message):
        convert_arrays(tmp_path, arrays, options | {"n_tokens_vocab": rows}, **files)


def test_export_writes_all_or_nothing(converted, tmp_path):
    (tmp_path / "back.json").write_text("mine")
    with refused("back.json exists", FileExistsError):
        round_trip(converted(WEIGHTS[0]), tmp_path)
    (tmp_path / "back.json").unlink()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):  # raised after the arrays are written: the vocabulary's folder is a file
        round_trip(converted(WEIGHTS[0]), tmp_path, vocabulary=tmp_path / "file" / "vocab.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_export_refuses_what_the_format_does_not_support(tmp_path):
    options = {"word_embedding_size": 5, "char_vocab_size": 6000, "lstm_hidden_size": 8, "forget_bias": 0.5}
    ELMoModel(ELMoConfig.from_preset("tiny", **options)).save_pretrained(tmp_path / "model")
    message = "alphabet of 6000 .* word vectors of width 5 .* projections from 8 to 16 .* forget bias of 0.5"
    with refused(message):
        round_trip(tmp_path / "model", tmp_path)
    options = {"always_project": True, "lstm_hidden_size": 16}
    ELMoModel(ELMoConfig.from_preset("tiny", **options)).save_pretrained(tmp_path / "projected")
    with refused("does not support projections between equal sizes"):
        round_trip(tmp_path / "projected", tmp_path)


def test_export_of_a_changed_configuration(converted, tmp_path):
    """Other options keep the spelling of the original."""
    folder = shutil.copytree(converted("variants/word_level/weights.hdf5"), tmp_path / "model")
    model = ELMoModel.from_pretrained(folder, cell_clip=None, projection_clip=4)
    model.resize_token_embeddings(80)
    model.save_pretrained(folder)
    arrays, options = round_trip(folder, tmp_path)
    expected = read_json(ELMO_FIXTURES / "variants/word_level/options.json")
    expected["lstm"] |= {"cell_clip": None, "proj_clip": 4}
    assert options == {**expected, "n_tokens_vocab": 79} and len(arrays["embedding"]) == 79


@pytest.mark.parametrize("change", [{"options": []}, {"special_rows": [0, 1, 1]}, {"special_rows": [0, 1, 10**9]}])
def test_a_damaged_record_is_refused(converted, tmp_path, change):
    folder = shutil.copytree(converted("variants/word_level/weights.hdf5"), tmp_path / "model")
    content = read_json(folder / RECORD_FILE)
    (folder / RECORD_FILE).write_text(json.dumps({**content, **change}))
    with refused(f"{RECORD_FILE} is not a record of this model; delete it"):
        round_trip(folder, tmp_path)


def test_export_says_what_the_folder_lacks(tmp_path):
    tagger = ELMoForTokenClassification(ELMoConfig.from_preset("tiny"))
    tagger.save_pretrained(tmp_path / "tagger")
    ELMoTokenizer().save_pretrained(tmp_path / "tagger")
    files = [tmp_path / name for name in ("w.hdf5", "o.json", "v.txt", "s.hdf5")]
    with refused("tagger has no softmax; omit `softmax`"):
        export_original_checkpoint(tmp_path / "tagger", *files)
    tagger.resize_token_embeddings(50)
    tagger.save_pretrained(tmp_path / "tagger")
    with refused("tokenizer of 4 words, model of 50"):
        export_original_checkpoint(tmp_path / "tagger", *files[:3])
    with refused("has no config.json", FileNotFoundError):
        export_original_checkpoint(ALLENNLP, *files[:2])
    assert not any(path.exists() for path in files)
