"""Task models of AllenNLP. The vectors of `fixtures/elmo_fixtures/archives` are AllenNLP's own."""

import io
import json
import pickle
import tarfile
from collections import OrderedDict
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from errors import refused
from places import ELMO_FIXTURES
from safetensors.torch import load_file

from modeling_elmo import ELMoModel, ELMoTokenizer, ScalarMix
from modeling_elmo.conversion import files
from modeling_elmo.conversion.archive import ARCHIVE_RECORD_FILE, AllenNLPArchive
from modeling_elmo.conversion.formats import convert_checkpoint
from modeling_elmo.conversion.original import OriginalCheckpoint
from modeling_elmo.run_scripts.convert_checkpoint import main
from modeling_elmo.run_scripts.program.files import read_json

ARCHIVES = ELMO_FIXTURES / "archives"
REAL, NER, SRL, BOTH = (
    ARCHIVES / name for name in ("simple_tagger_with_elmo", "ner_elmo", "srl_elmo_v0", "bcn_elmo_both")
)
EMBEDDER = "text_field_embedder.token_embedder_elmo._elmo."
TOLERANCE = 5e-6  # float32 at values of up to 4
TEXTS = [["The", "play", "Zürich"], ["Peter"]]


def members(folder):
    """The files of an archive, by name."""
    with tarfile.open(folder / "model.tar.gz") as archive:
        return {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}


def state_of(folder):
    return torch.load(io.BytesIO(members(folder)["weights.th"]), weights_only=True)


def saved(state, **options):
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


def write(folder, state, weights="weights.th", **contents):
    """An unpacked archive with this state and other files."""
    for name, content in {weights: saved(state), **contents}.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def found(folder, tmp_path, **options):
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    return AllenNLPArchive.find(scratch, folder, **options)


def renamed(state, beginning, new):
    return {name.replace(beginning, new, 1) if name.startswith(beginning) else name: state[name] for name in state}


def bilm_of(state, beginning=EMBEDDER):
    return {name: array for name, array in state.items() if name.startswith(beginning)}


def mixes_in(folder, model):
    mixes = [model.scalar_mix]
    for path in sorted(folder.glob("scalar_mix_*.safetensors")):
        mixes.append(ScalarMix(model.config))
        mixes[-1].load_state_dict(load_file(path))
    return mixes


@torch.no_grad()
def vectors(folder, texts):
    """The vectors of each text by each mix, without markers."""
    model, tokenizer = ELMoModel.from_pretrained(folder), ELMoTokenizer.from_pretrained(folder)
    for words in texts:
        inputs = tokenizer([words], is_split_into_words=True, return_tensors="pt")
        layers = model(**inputs).hidden_states
        yield [mix(layers, inputs["attention_mask"])[0, 1:-1] for mix in mixes_in(folder, model)]


def same_state(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("source", [REAL, NER, SRL, BOTH], ids=lambda path: path.name)
def test_vectors_of_allennlp(source, tmp_path):
    folder = convert_checkpoint(AllenNLPArchive, source / "model.tar.gz", tmp_path / "model")
    expected = read_json(source / "expected_elmo.json")
    for words, of_text, ours in zip(
        expected["texts"], expected["elmo"], vectors(folder, expected["texts"]), strict=True
    ):
        assert len(of_text) == len(ours) == (2 if source == BOTH else 1)
        for theirs, mixed in zip(of_text, ours, strict=True):
            torch.testing.assert_close(mixed, torch.tensor(theirs), rtol=0, atol=TOLERANCE)
            assert len(mixed) == len(words)
    with_mixes = {name: array for name, array in state_of(source).items() if "elmo" in name.lower()}
    assert same_state(with_mixes, AllenNLPArchive.arrays_of_export(folder, tmp_path))


def loaded_by_allennlp(weights, beginning):
    """The state of AllenNLP's `Elmo` after it has read HDF5 weights, as its `elmo.py` and `elmo_lstm.py` read them."""
    state = {}
    encoder, lstm = f"{beginning}_elmo_lstm._token_embedder.", f"{beginning}_elmo_lstm._elmo_lstm."
    with h5py.File(weights) as file:
        rows = file["char_embed"][...]
        state[f"{encoder}_char_embedding_weights"] = np.concatenate([np.zeros_like(rows[:1]), rows])
        for i in range(len(file["CNN"]) // 2):
            state[f"{encoder}char_conv_{i}.weight"] = file[f"CNN/W_cnn_{i}"][0].transpose(2, 1, 0)
            state[f"{encoder}char_conv_{i}.bias"] = file[f"CNN/b_cnn_{i}"][...]
        for i in range(sum(name.startswith("CNN_high") for name in file)):
            highway = file[f"CNN_high_{i}"]
            weight = [highway["W_transform"][...].T, -1.0 * highway["W_carry"][...].T]
            state[f"{encoder}_highways._layers.{i}.weight"] = np.concatenate(weight)
            bias = [highway["b_transform"][...], -1.0 * highway["b_carry"][...]]
            state[f"{encoder}_highways._layers.{i}.bias"] = np.concatenate(bias)
        state[f"{encoder}_projection.weight"] = file["CNN_proj/W_proj"][...].T
        state[f"{encoder}_projection.bias"] = file["CNN_proj/b_proj"][...]
        for number, way in enumerate(("forward", "backward")):
            cells = file[f"RNN_{number}/RNN/MultiRNNCell"]
            for i in range(len(cells)):
                cell, layer = cells[f"Cell{i}/LSTMCell"], f"{lstm}{way}_layer_{i}."
                kernel, bias = (np.split(cell[name][...].T, 4) for name in ("W_0", "B"))  # i, g, f, o
                kernel = np.concatenate([kernel[0], kernel[2], kernel[1], kernel[3]])
                width = kernel.shape[1] // 2
                state[f"{layer}input_linearity.weight"] = kernel[:, :width]
                state[f"{layer}state_linearity.weight"] = kernel[:, width:]
                state[f"{layer}state_linearity.bias"] = np.concatenate([bias[0], bias[2] + 1, bias[1], bias[3]])
                state[f"{layer}state_projection.weight"] = cell["W_P_0"][...].T
    return {name: torch.tensor(array) for name, array in state.items()}


@pytest.mark.parametrize("name", ["one_layer", "three_layers", "no_highway", "no_clip"])
def test_vectors_of_other_sizes(name, tmp_path):
    """The numbers of bilm-tf for weights that AllenNLP loads; their first sentences start from a zero state."""
    source = ELMO_FIXTURES / "variants" / name
    weights = source / ("weights_inference_names.hdf5" if name == "one_layer" else "weights.hdf5")
    options = source / "options.json" if name == "no_clip" else None  # others are told by the arrays
    (tmp_path / "weights.th").write_bytes(saved(loaded_by_allennlp(weights, "net.elmo.")))
    folder = convert_checkpoint(AllenNLPArchive, tmp_path / "weights.th", tmp_path / "model", options=options)
    model, tokenizer = ELMoModel.from_pretrained(folder), ELMoTokenizer.from_pretrained(folder)
    with h5py.File(source / "expected.hdf5") as file:
        for k, [first, *_] in enumerate(read_json(source / "sentences.json")):
            inputs = tokenizer([first.split()], is_split_into_words=True, return_tensors="pt")
            with torch.no_grad():
                layers = torch.stack(model(**inputs).hidden_states)[:, 0, 1:-1]
            torch.testing.assert_close(layers, torch.tensor(file[f"{k}/0"][...]), rtol=0, atol=TOLERANCE)


def test_it_is_the_published_model(tmp_path):
    """Before the training, the real archive had the weights of AllenNLP's fixture, and `requires_grad` was off."""
    published = ELMO_FIXTURES / "allennlp"
    convert_checkpoint(
        OriginalCheckpoint, published / "lm_weights.hdf5", tmp_path / "published", options=published / "options.json"
    )
    convert_checkpoint(AllenNLPArchive, REAL / "model.tar.gz", tmp_path / "archive")
    theirs, ours = (ELMoModel.from_pretrained(tmp_path / name) for name in ("published", "archive"))
    assert theirs.config.forget_bias == 1 and ours.config.forget_bias == 0
    for name, array in ours.state_dict().items():
        other = theirs.state_dict()[name]
        if name.endswith("input_linear.bias"):  # of i, f, o, g
            other = torch.cat([part + (number == 1) for number, part in enumerate(other.chunk(4))])
        assert torch.equal(array, other) != name.startswith("scalar_mix"), name


def test_a_biLM_that_was_trained_with_the_task_is_kept(tmp_path):
    state = state_of(NER)
    trained = {name: array * 1.01 + 0.01 if name.startswith(EMBEDDER) else array for name, array in state.items()}
    config = {"model": {"text_field_embedder": {"elmo": {"options_file": "a", "requires_grad": True}}}}
    source = found(write(tmp_path / "trained", trained, **{"config.json": config}), tmp_path)
    source.convert(tmp_path / "model", None)
    convert_checkpoint(AllenNLPArchive, NER / "model.tar.gz", tmp_path / "published")
    again = AllenNLPArchive.arrays_of_export(tmp_path / "model", tmp_path)
    assert same_state(again, bilm_of(trained)) and not any(torch.equal(again[name], state[name]) for name in again)
    for ours, published in zip(*(vectors(tmp_path / name, TEXTS) for name in ("model", "published")), strict=True):
        assert (ours[0] - published[0]).abs().max() > 0.1
    assert source.report("x")[0] == f"The biLM is {EMBEDDER}_elmo_lstm, trained with the task."


@pytest.mark.parametrize(
    "beginning",
    ["", "elmo.", "module._text_field_embedder.token_embedder_elmo._elmo.", "a.b.1._module.", "state_dict.net.elmo."],
)
def test_any_beginning_of_names(beginning, tmp_path):
    state = renamed(state_of(NER), EMBEDDER, beginning)
    source = found(write(tmp_path / "renamed", state) / "weights.th", tmp_path)
    source.convert(tmp_path / "model", None)
    assert source.bilm.name == f"{beginning}_elmo_lstm" and source.bilm.mixes == (f"{beginning}scalar_mix_0.",)
    assert same_state(source.arrays(), source.arrays_of_export(tmp_path / "model", tmp_path))
    assert same_state(source.arrays(), renamed(bilm_of(state_of(NER)), EMBEDDER, beginning))
    assert source.left_out[0].endswith("text_field_embedder.token_embedder_tokens")


def test_own_names_of_modules(tmp_path):
    """A class of a user's own may have the parts and the mix as attributes of any names."""
    state = bilm_of(state_of(NER))
    for part, own in (("_elmo_lstm._token_embedder.", "words.encoder."), ("_elmo_lstm._elmo_lstm.", "bilm.")):
        state = renamed(state, EMBEDDER + part, own)
    state = renamed(state, f"{EMBEDDER}scalar_mix_0.", "mix.")
    state["tagger.forward_layer_0.input_linearity.weight"] = torch.ones(64, 8)  # StackedBidirectionalLstm
    source = found(write(tmp_path / "own", {"step": 3, "model": state}) / "weights.th", tmp_path)
    assert source.bilm == ("model.words.encoder.", "model.bilm.", ("model.mix.",))
    model, _, record = source.load("moses")
    expected, _, _ = found(NER / "model.tar.gz", tmp_path).load("moses")
    assert same_state(model.state_dict(), expected.state_dict())
    assert record["not_converted"] == ["model.tagger"]


def test_options(tmp_path):
    """Of the user, of the archive, or those of the arrays."""
    state, given = state_of(SRL), read_json(SRL / "elmo_options.json")
    changed = {**given, "lstm": {**given["lstm"], "cell_clip": 0, "proj_clip": 2.5}}
    changed["char_cnn"] = {**given["char_cnn"], "activation": "tanh", "max_characters_per_token": 20}
    plain = found(write(tmp_path / "plain", state), tmp_path)
    packed = found(write(tmp_path / "packed", state, fta__model_x_options_file=changed), tmp_path)
    beside = found(write(tmp_path / "beside", state, **{"options.json": changed}), tmp_path)
    (tmp_path / "o.json").write_text(json.dumps(given))
    told = found(tmp_path / "beside", tmp_path, options=tmp_path / "o.json")
    configs = [source.load("moses")[0].config for source in (plain, packed, beside, told)]
    assert configs[0].to_dict() == configs[3].to_dict() and configs[1].to_dict() == configs[2].to_dict()
    values = ["cell_clip", "projection_clip", "char_cnn_activation", "max_word_length"]
    assert [getattr(configs[0], name) for name in values] == [3, 3, "relu", 50]
    assert [getattr(configs[1], name) for name in values] == [None, 2.5, "tanh", 20]
    assert "There is no options.json, so clips of 3, skip" in plain.report("x")[1]
    assert told.report("x")[1] == "Its options come from o.json." and "Its options" in packed.report("x")[1]

    config = {"model": {"elmo": {"options_file": "/home/me/../elmo/small.json"}}}
    contents = {
        "config.json": config,
        "home__elmo__small.json": changed,
        "a__options.json": given,
        "b__options.json": {},
    }
    named = found(write(tmp_path / "named", state, **contents), tmp_path)
    assert named.options == tmp_path / "named" / "home" / "elmo" / "small.json"

    wrong = {**given, "lstm": {**given["lstm"], "dim": 32}}
    (tmp_path / "o.json").write_text(json.dumps(wrong))
    with refused(
        r"weights.th does not match .*o.json:\n.*_layer_0.input.*has \(64, 8\), the options require \(128, 8\)"
    ):
        found(tmp_path / "plain", tmp_path, options=tmp_path / "o.json").load("moses")


def test_settings_of_the_mix(tmp_path):
    """AllenNLP normalizes a layer by the mean and the variance of all its numbers, markers included."""
    options = {"type": "elmo_token_embedder", "do_layer_norm": "true", "dropout": "0.25"}
    config = {"model": {"tagger": {"x": {"token_embedders": {"elmo": options}}}}}
    source = found(write(tmp_path / "normed", state_of(NER), **{"config.json": config}), tmp_path)
    source.convert(tmp_path / "model", None)
    model, tokenizer = ELMoModel.from_pretrained(tmp_path / "model"), ELMoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.elmo_dropout == 0.25
    assert "do_layer_norm is true in config.json, so scalar_mix_layer_norm is 'allennlp'." in source.report("x")
    with torch.no_grad():
        output = model(**tokenizer(TEXTS[:1], is_split_into_words=True, return_tensors="pt"))
    scalars = torch.cat([source.state[f"{EMBEDDER}scalar_mix_0.scalar_parameters.{i}"] for i in range(3)]).softmax(0)
    expected = 0
    for scalar, layer in zip(scalars, output.hidden_states, strict=True):
        expected += scalar * (layer - layer.mean()) / (layer.var(correction=0) + 1e-12).sqrt()
    expected *= source.state[f"{EMBEDDER}scalar_mix_0.gamma"]
    torch.testing.assert_close(output.elmo_embeddings, expected, rtol=0, atol=TOLERANCE)


def test_no_settings(tmp_path):
    write(tmp_path / "none", state_of(NER))
    jsonnet = write(tmp_path / "jsonnet", state_of(NER), **{"config.json": b"{ model: std.x }  // Jsonnet"})
    names = (
        {"options_file": "https://a/" + "b" * 999},
        {"options_files": {}},
        {"options_file": 7},
        {"weight_file": "\0"},
    )
    for number, entry in enumerate(names):
        settings = {"config.json": {"model": entry}}
        place = write(tmp_path / str(number), state_of(NER), **settings)
        assert found(place, tmp_path).load("moses")[0].config.scalar_mix_layer_norm is None
    for place in (tmp_path / "none", jsonnet):
        report = "\n".join(found(place, tmp_path).report("x"))
        assert "No config.json says whether the mix had do_layer_norm" in report


def test_lines_that_load_further_mixes(tmp_path):
    source = found(BOTH / "model.tar.gz", tmp_path)
    source.convert(tmp_path / "model", None)
    [line] = [line for line in source.report(tmp_path / "model") if line.startswith("scalar_mix_1")]
    assert line.startswith("scalar_mix_1.safetensors is _elmo.scalar_mix_1: layers 0.419, 0.294, 0.287; gamma 1.300.")
    names = {"model": ELMoModel.from_pretrained(tmp_path / "model")}
    exec(line.partition("Load it with: ")[2], names)
    state = state_of(BOTH)
    expected = torch.cat([state[f"_elmo.scalar_mix_1.scalar_parameters.{i}"] for i in range(3)])
    assert torch.equal(names["mix"].weights.data, expected)
    assert torch.equal(names["mix"].gamma.data, state["_elmo.scalar_mix_1.gamma"])
    assert read_json(tmp_path / "model" / ARCHIVE_RECORD_FILE)["mixes"] == {
        "scalar_mix": "_elmo.scalar_mix_0.",
        "scalar_mix_1.safetensors": "_elmo.scalar_mix_1.",
    }


def test_without_a_mix(tmp_path):
    state = {name: array for name, array in state_of(NER).items() if "scalar_mix" not in name}
    source = found(write(tmp_path / "bilm", state), tmp_path)
    model, _, _ = source.load("moses")
    assert not model.scalar_mix.weights.any() and model.scalar_mix.gamma == 1
    assert "It has no mix, so scalar_mix is the average of the layers." in source.report("x")


def test_several_biLMs(tmp_path):
    """`elmo_token_embedder_multilang` has one for each language."""
    state, embedder = state_of(NER), "text_field_embedder.token_embedder_elmo."
    languages = renamed(state, EMBEDDER, f"{embedder}elmo_en.")
    languages |= {name: array + 1 for name, array in renamed(bilm_of(state), EMBEDDER, f"{embedder}elmo_fr.").items()}
    languages[f"{embedder}aligning_fr.weight"] = torch.eye(16)
    options = {language: f"{language}.json" for language in ("en", "fr")}
    config = {"model": {"text_field_embedder": {"elmo": {"options_files": options, "do_layer_norm": True}}}}
    folder = write(tmp_path / "two", languages, **{"config.json": config})
    fitting = read_json(NER / "elmo_options.json")
    for language, clip in (("en", 3), ("fr", 5)):
        name = f"fta__model.text_field_embedder.elmo.options_files.{language}"
        write(folder, languages, **{name: {**fitting, "lstm": {**fitting["lstm"], "cell_clip": clip}}})
    names = f"{embedder}elmo_en._elmo_lstm, {embedder}elmo_fr._elmo_lstm"
    with refused(f"has 2 biLMs; pass one of them as --bilm: {names}."):
        found(folder, tmp_path)
    with refused(f"--bilm elmo_fr: .*weights.th has {names}; pass a name of these"):
        found(folder, tmp_path, bilm="elmo_fr")
    for language, clip in (("en", 3), ("fr", 5)):
        source = found(folder, tmp_path, bilm=f"{embedder}elmo_{language}._elmo_lstm")
        model, _, _ = source.load("moses")
        assert source.bilm.mixes == (f"{embedder}elmo_{language}.scalar_mix_0.",)
        assert model.config.cell_clip == clip and model.config.scalar_mix_layer_norm == "allennlp"
        assert f"{embedder}aligning_fr" in source.left_out
        assert same_state(source.arrays(), {name: languages[name] for name in source.arrays()})


def test_one_biLM_in_several_embedders(tmp_path):
    """A module with two names is saved twice; a frozen biLM with another mix is another embedder."""
    state = bilm_of(state_of(NER))
    twice = {**state, **renamed(state, EMBEDDER, "same."), **renamed(state, EMBEDDER, "other._elmo.")}
    twice["other._elmo.scalar_mix_0.gamma"] = torch.tensor([5.0])
    source = found(write(tmp_path / "twice", twice), tmp_path)
    assert source.bilm.mixes == (f"{EMBEDDER}scalar_mix_0.", "other._elmo.scalar_mix_0.")
    assert source.left_out == ["same", "other._elmo._elmo_lstm"]


def test_cached_words(tmp_path):
    state = {**state_of(NER), f"{EMBEDDER}_elmo_lstm._word_embedding.weight": torch.ones(7, 8)}
    source = found(write(tmp_path / "cached", state), tmp_path)
    assert f"{EMBEDDER}_elmo_lstm._word_embedding" in source.left_out
    assert "_word_embedding.weight has the vectors of 7 words (vocab_to_cache)" in "\n".join(source.report("x"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_precisions(dtype, tmp_path):
    state = {name: array.to(dtype) for name, array in state_of(NER).items()}
    state[f"{EMBEDDER}scalar_mix_0.gamma"] = torch.tensor([0.1], dtype=torch.float64)
    source = found(write(tmp_path / "x", state), tmp_path)
    source.convert(tmp_path / "model", None)
    again = source.arrays_of_export(tmp_path / "model", tmp_path)
    unequal = [name for name, array in source.arrays().items() if not torch.equal(array, again[name])]
    assert unequal == [f"{EMBEDDER}scalar_mix_0.gamma"]
    assert again[unequal[0]] == torch.tensor(0.1)
    names = {torch.float16: "float16 and float64", torch.float64: "float64"}
    assert f"Arrays of {names[dtype]} are stored as float32." in source.report("x")


def test_no_projection_and_projections_to_the_same_width(tmp_path):
    """AllenNLP's LSTM projects, and bounds what it projects, at any width."""
    width = {"_projection.weight": (20, 20), "_projection.bias": (20,), "_linearity.bias": (80,)}
    width |= {"_linearity.weight": (80, 20), "state_projection.weight": (20, 20)}
    state = dict(state_of(NER))
    for name in bilm_of(state):
        for end, shape in width.items():
            if name.endswith(end):
                state[name] = torch.randn(shape)
    model, _, _ = found(write(tmp_path / "same", state), tmp_path).load("moses")
    assert model.config.always_project and model.forward_lstm.layers[1].projection_clip == 3
    state = {name: array for name, array in state.items() if "projection" not in name or name.startswith("tag")}
    model, _, _ = found(write(tmp_path / "none", state), tmp_path).load("moses")
    assert not model.config.always_project and model.forward_lstm.layers[1].projection is None


def without(*parts):
    return lambda state: {name: array for name, array in state.items() if not any(part in name for part in parts)}


def with_array(name, array):
    return lambda state: {**state, EMBEDDER + name: array}


TABLE, LAYER = "_elmo_lstm._token_embedder._char_embedding_weights", "_elmo_lstm._elmo_lstm.forward_layer_0."


@pytest.mark.parametrize(
    "change, message",
    [
        (without("elmo"), "has no ELMo: no array is named _char_embedding_weights. It has text_field_embedder.token_emb"
         "edder_tokens .embedding., text_field_embedder.token_embedder_token_characters .character_encoding., encoder "
         ".lstm., tag_projection_layer, crf."),
        (without("elmo"), "config.json names the files of an ELMo, which you can convert: https:.*options.json, h"),
        (without("forward_layer", "backward_layer"), f"no ELMo: {EMBEDDER}{TABLE} has no LSTM with forward_layer_0"),
        (without("_char_embedding_weights"), "forward_layer_0.state_projection.weight is in an LSTM of this kind, but"),
        (without("backward"), "weights.th has only the forward direction of a biLM; ELMo needs both"),
        (without("_highways._layers.0"), "does not match the arrays of .*weights.th:\n .*_highways._layers.1"),
        (without("_token_embedder._projection.bias"), "_projection.bias: the file has none"),
        (without("char_conv"), "Correct char_cnn.filters in the arrays of .*weights.th: .*filters. is \\[\\]"),
        (with_array(TABLE, torch.ones(261, 4)), "has 261 rows; ELMo has 262 .or 263. characters"),
        (with_array(TABLE, torch.ones(4)), r"has the shape \(4,\), not 2 dimensions"),
        (with_array(TABLE, torch.ones(262, 4).int()), r"float64 numbers in an ELMo, not .*weights \(torch.int32\)"),
        (with_array(TABLE, torch.full((262, 4), torch.nan)), "NaN or infinite values in .*_char_embedding_weights"),
        (with_array(TABLE, torch.ones(1).expand(262, 4)), "has no ELMo: .* no array is named _char_embedding_weights"),
        (with_array("scalar_mix_0.gamma", torch.tensor([torch.inf])), "NaN or infinite values in .*scalar_mix_0.gamma"),
        (with_array(f"{LAYER}input_linearity.bias", torch.ones(64)), "the options require none .unexpected."),
        (with_array(TABLE, torch.ones(262, 4).to_sparse()), "has no ELMo: .* no array is named _char_embedding"),
        (with_array("\x1b[1m\n\ud800", torch.ones(1)), r"names are not text: .*elmo\.\\x1b\[1m\\n\\ud800\."),
        (lambda state: {"_contextualizer.x": torch.ones(1)}, "has another network than ELMo"),
        (lambda state: torch.ones(3), "weights.th has no arrays by name, but Tensor; pass another file"),
        (lambda state: {}, "weights.th has no arrays by name, but dict; pass another file"),
        (
            lambda state: {**state, **renamed(bilm_of(state), f"{EMBEDDER}_elmo_lstm._elmo_lstm.",
                                              f"{EMBEDDER}_elmo_lstm.copy.")},
            "has several LSTMs that may belong to",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(change, message, tmp_path):
    config = json.loads(members(NER)["config.json"])
    folder = write(tmp_path / "wrong", change(dict(state_of(NER))), **{"config.json": config})
    with refused(message):
        found(folder, tmp_path).load("moses")


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


def test_code_in_weights_does_not_run(tmp_path):
    for number, (content, advice) in enumerate(
        [
            (saved({"a": Evil()}), r" \(exec\). Pass a file with the `state_dict\(\)` of its model"),
            (saved(torch.nn.Linear(2, 2)), r" \(torch.nn.modules.linear.Linear\). Pass a file with the `state_dict"),
            (pickle.dumps(Evil()), ". Pass another copy"),
        ]
    ):
        path = write(tmp_path / str(number), {}, **{"weights.th": content}) / "weights.th"
        with refused(f"weights.th is damaged, or contains more than tensors{advice}"):
            found(path, tmp_path).load("moses")


class OldPickler(pickle.Pickler):
    """Tensors as torch 0.3 wrote them."""

    def reducer_override(self, item):
        if not isinstance(item, torch.Tensor):
            return NotImplemented
        values = item._typed_storage(), item.storage_offset(), tuple(item.shape), item.stride()
        return torch._utils._rebuild_tensor, values


def test_old_pickles_with_arrays_of_a_gpu(tmp_path):
    state = OrderedDict(bilm_of(state_of(SRL)))
    old = SimpleNamespace(Pickler=OldPickler, dump=pickle.dump, __name__="pickle")
    for pickle_module, written in ((pickle, b"_rebuild_tensor_v2\n"), (old, b"_rebuild_tensor\n")):
        content = saved(state, _use_new_zipfile_serialization=False, pickle_module=pickle_module)
        for before, now in ((b"ctorch\nFloat", b"ctorch.cuda\nFloat"), (b"\x03\0\0\0cpu", b"\x06\0\0\0cuda:1")):
            assert before in content
            content = content.replace(before, now)
        assert written in content and content[:4] == b"\x80\x02\x8a\n"
        (tmp_path / "gpu.th").write_bytes(content)
        assert same_state(found(tmp_path / "gpu.th", tmp_path).arrays(), state)


def test_folders_of_a_training(tmp_path):
    state = state_of(NER)
    folder = write(tmp_path / "run", state, "model_state_epoch_0.th")
    write(folder, {"optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}, "training_state_epoch_0.th")
    assert found(folder, tmp_path).weights.name == "model_state_epoch_0.th"
    write(folder, state, "model_state_epoch_1.th")
    with refused(
        "several files match model_state_.*: model_state_epoch_0.th, model_state_epoch_1.th. Pass the path of"
    ):
        found(folder, tmp_path)
    assert found(folder / "model_state_epoch_1.th", tmp_path).weights.name == "model_state_epoch_1.th"
    assert found(write(folder, state, "best.th"), tmp_path).weights.name == "best.th"
    source = found(write(folder, state, config__x=b""), tmp_path)
    assert source.weights.name == "weights.th" and "model_state_epoch_1.th" in source.unread
    finished = found(NER, tmp_path)  # with model.tar.gz and elmo_options.json
    assert finished.weights.name == "weights.th" and same_state(finished.state, state)
    assert finished.options == NER / "elmo_options.json"


def test_the_program(tmp_path, capsys):
    output = tmp_path / "model"
    main(["--weights", str(BOTH / "model.tar.gz"), "--output_dir", str(output), "--origin", "a model"])
    printed = capsys.readouterr().out
    for text in (
        "model.tar.gz: a task model of AllenNLP\n",
        "The biLM is _elmo._elmo_lstm.\n",
        "scalar_mix is _elmo.scalar_mix_0: layers 0.124, 0.360, 0.516; gamma 1.300.\n",
        f"load_file('{output / 'scalar_mix_1.safetensors'}')",
        "It has no softmax, so the model predicts no words.\n",
        "Not converted: _text_field_embedder.token_embedder_tokens, _pre_encode_feedforward, _encoder, _integrator, ",
        "Files not read: vocabulary/labels.txt, ",
    ):
        assert text in printed
    card = (output / "README.md").read_text("utf-8")
    assert "37 of 37 arrays equal the original arrays bit for bit" in card
    assert "\n- scalar_mix is \\_elmo.scalar_mix_0: layers " in card and str(tmp_path) not in card
    for option in ("--vocabulary", "--softmax", "--step"):
        with refused(f"{option} 4 has no effect because .* is a task model of AllenNLP; leave it out"):
            main(["--weights", str(SRL / "model.tar.gz"), "--output_dir", str(tmp_path / "x"), option, "4"])
    weights = tmp_path / "pytorch_model.bin"
    weights.write_bytes(members(SRL)["weights.th"])
    main(["--weights", str(weights), "--output_dir", str(tmp_path / "of_a_file")])
    assert "pytorch_model.bin: a task model of AllenNLP\n" in capsys.readouterr().out
    assert files.read_json_object(tmp_path / "of_a_file" / ARCHIVE_RECORD_FILE)["not_converted"][0] == "encoder"
