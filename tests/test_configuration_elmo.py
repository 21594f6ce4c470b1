"""The configuration: every field is checked and read, and misspelled names raise an error."""

import json
import re
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest
import torch
from errors import refused
from huggingface_hub.errors import StrictDataclassError
from places import ROOT
from transformers import AutoConfig, PreTrainedConfig

import modeling_elmo
from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoForTokenClassification, ELMoModel
from modeling_elmo.configuration_elmo import AUTO_CLASS_NAMES, FIELD_OF_NAME, HEAD_FIELDS, PRESETS
from modeling_elmo.run_scripts.program.files import read_json

FIELDS = set(ELMoConfig.__annotations__) - set(PreTrainedConfig.__annotations__)


def test_presets():
    with refused("'large'; pass one of tiny, small, medium, original"):
        ELMoConfig.from_preset("large")
    assert ELMoConfig.from_preset("tiny", dropout=0.3).dropout == 0.3 and "dropout" not in PRESETS["tiny"]


@pytest.mark.parametrize(
    "preset, hidden, projection, highways, parameters",
    [  # the released sizes and their published parameter counts, in millions
        ("small", 1024, 128, 1, 13.6),
        ("medium", 2048, 256, 1, 28.0),
        ("original", 4096, 512, 2, 93.6),
    ],
)
def test_presets_are_the_released_models(preset, hidden, projection, highways, parameters):
    config = ELMoConfig.from_preset(preset)
    sizes = config.lstm_hidden_size, config.projection_size, config.num_highway_layers
    assert sizes == (hidden, projection, highways)
    assert config.hidden_size == 2 * projection and config.num_features == 2048
    with torch.device("meta"):
        model = ELMoModel(config, add_mixing_layer=False)
    assert model.num_parameters() / 1e6 == pytest.approx(parameters, abs=0.05)


def test_what_a_saved_configuration_says(tmp_path):
    ELMoConfig(cell_clip=3, char_cnn_filters=((1, 4), (2, 8)), num_labels=5).save_pretrained(tmp_path)
    written = read_json(tmp_path / "config.json")
    assert written["hidden_size"] == 1024 and written["char_cnn_filters"] == [[1, 4], [2, 8]]
    tasks = ("PreTraining", "CausalLM", "TokenClassification", "SequenceClassification", "QuestionAnswering")
    assert set(written["auto_map"]) == {"AutoConfig", "AutoModel", *(f"AutoModelFor{task}" for task in tasks)}
    again = AutoConfig.from_pretrained(tmp_path, projection_size=64)
    assert type(again) is ELMoConfig and (again.num_labels, again.hidden_size) == (5, 128)


def test_a_field_of_the_first_commits_is_refused_where_it_would_change_numbers():
    assert not hasattr(ELMoConfig(coarse_pruning=False), "coarse_pruning")
    with refused("`coarse_pruning` is True"):
        ELMoConfig(coarse_pruning=True)


def test_a_bilm_leaves_out_the_defaults_of_heads(tmp_path):
    head = "ELMoForTokenClassification"
    for architectures, are_written in ((["ELMoModel"], False), (["ELMoForCausalLM"], False), ([head], True)):
        config = ELMoConfig(architectures=architectures, task_num_layers=5)
        config.save_pretrained(tmp_path)
        written = read_json(tmp_path / "config.json")
        assert written["task_num_layers"] == 5
        assert ({*HEAD_FIELDS} <= written.keys()) == are_written and ("freeze_bilm" in written) == are_written
        again = AutoConfig.from_pretrained(tmp_path)
        again._name_or_path = config._name_or_path
        assert again.to_dict() == config.to_dict()


# Another value than the default of every field but `tie_word_embeddings`, which excludes others.
CHANGED = {
    "vocab_size": 60,
    "char_vocab_size": 30,
    "char_embedding_size": 3,
    "char_cnn_filters": [[2, 7]],
    "char_cnn_activation": "tanh",
    "num_highway_layers": 1,
    "max_word_length": 9,
    "word_embedding_size": 5,
    "vocabulary_cache_size": 4,
    "projection_size": 6,
    "lstm_hidden_size": 8,
    "num_hidden_layers": 3,
    "cell_clip": None,
    "projection_clip": 2,
    "forget_bias": 0,
    "always_project": True,
    "dropout": 0.25,
    "use_skip_connections": False,
    "softmax_type": "adaptive",
    "num_sampled": 7,
    "adaptive_cutoffs": [20, 40],
    "has_softmax": False,
    "scalar_mix_mode": 1,
    "scalar_mix_l2": 0.5,
    "scalar_mix_layer_norm": "token",
    "elmo_dropout": 0,
    "elmo_placement": "input",
    "freeze_bilm": False,
    "use_elmo": False,
    "head": "linear",
    "classifier": "esim",
    "task_hidden_size": 7,
    "task_dropout": 0,
    "task_num_layers": 2,
    "task_word_embedding_size": 4,
    "freeze_word_embeddings": True,
    "task_char_embedding_size": 2,
    "task_char_cnn_filters": [],
    "max_span_width": 3,
    "spans_per_word": 2,
    "max_antecedents": 5,
    "train_singletons": True,
    "lexical_dropout": 0.25,
    "use_speakers": True,
    "num_genres": 2,
    "pad_token_id": 4,
    "bos_token_id": 5,
    "eos_token_id": 6,
    "unk_token_id": 7,
}


@pytest.mark.parametrize("architectures", [["ELMoModel"], ["ELMoForPreTraining"], ["ELMoForTokenClassification"], None])
def test_every_saved_value_is_kept(tmp_path, architectures):
    config, default = ELMoConfig(**CHANGED, architectures=architectures), ELMoConfig()
    assert {name for name in CHANGED if getattr(default, name) != CHANGED[name]} == FIELDS - {"tie_word_embeddings"}
    config.save_pretrained(tmp_path)
    for again in (ELMoConfig.from_dict(config.to_dict()), AutoConfig.from_pretrained(tmp_path)):
        assert {name: getattr(again, name) for name in CHANGED} == CHANGED


def test_a_saved_folder_names_its_own_code(tmp_path):
    """Folders of the Hub may name a repository. Classes that are not ours keep their file."""
    auto_map = {auto_class: f"modeling_elmo.{names[0]}" for auto_class, names in AUTO_CLASS_NAMES.items()}
    auto_map["AutoConfig"] = "configuration_elmo.ELMoConfig"
    given = {auto_class: f"someone/elmo--{reference}" for auto_class, reference in auto_map.items()}
    config = ELMoConfig.from_preset("tiny", auto_map=given)
    assert config.auto_map == given and not hasattr(ELMoConfig(), "auto_map")
    ELMoModel(config).save_pretrained(tmp_path)
    assert read_json(tmp_path / "config.json")["auto_map"] == auto_map
    assert all(hasattr(modeling_elmo, name) for names in AUTO_CLASS_NAMES.values() for name in names)
    mine = {"AutoModelForTokenClassification": "mine.MyTagger", "AutoModelForMaskedLM": "someone/elmo--other.Model"}
    assert ELMoConfig(auto_map=mine).auto_map_of_folder() == {**auto_map, **mine}


@pytest.mark.parametrize("name, meant", [("cel_clip", "cell_clip"), *FIELD_OF_NAME.items()])
def test_near_misses_are_refused(name, meant):
    with refused(f"`{name}`.*`{meant}`", TypeError):
        ELMoConfig(**{name: 1})
    assert ELMoConfig(my_own_note=3).my_own_note == 3  # as in other configurations


LIMITS = {
    100: ("num_hidden_layers", "num_highway_layers", "task_num_layers", "max_word_length"),
    2**16: ("num_labels",),
    2**20: ("projection_size", "word_embedding_size", "char_embedding_size", "task_hidden_size"),
    2**24: ("vocab_size", "vocabulary_cache_size", "char_vocab_size"),
}
WITHOUT_ELMO = [{"use_elmo": False}, {"elmo_placement": "output"}]  # at the input of a head's network


@pytest.mark.parametrize(
    "options, received",
    [
        ({"hidden_size": 512}, "`hidden_size` is 512; pass 1024"),
        ({"projection_size": "512"}, "'projection_size' expected int, got str"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0; pass an integer of at least 1"),
        ({"num_highway_layers": -1}, "`num_highway_layers` is -1; pass 0 or more"),
        *(
            ({name: 10**9}, f"`{name}` is 1000000000; pass at most {limit}")
            for limit, names in LIMITS.items()
            for name in names
        ),
        ({"lstm_hidden_size": 10**18}, "`lstm_hidden_size` is 10+; pass at most 1099511627776"),
        ({"char_cnn_filters": [[1, 10**9]]}, r"`char_cnn_filters` is \[1, 1000000000\]; pass numbers up to 1048576"),
        ({"task_char_cnn_filters": [[1, 1]] * 101}, "`task_char_cnn_filters` is '101 filters'; pass at most 100"),
        ({"cell_clip": 0}, "`cell_clip` is 0"),
        ({"cell_clip": float("inf")}, "`cell_clip` is inf"),
        ({"projection_clip": 10**400}, "`projection_clip` is 10+; "),
        ({"dropout": 1.0}, "`dropout` is 1.0"),
        ({"elmo_dropout": -0.1}, "`elmo_dropout` is -0.1"),
        ({"char_embedding_size": 0}, "`char_embedding_size` is 0"),
        ({"char_cnn_filters": []}, r"`char_cnn_filters` is \[\]"),
        ({"char_cnn_filters": [[1, 4], [2]]}, r"`char_cnn_filters` is \[2\]"),
        ({"task_char_cnn_filters": [[51, 4]]}, r"`task_char_cnn_filters` is \[51, 4\]"),
        ({"max_word_length": 2}, "`max_word_length` is 2; pass 3 or more"),
        ({"char_vocab_size": 0}, r"`char_vocab_size, word_embedding_size` is \(0, 0\)"),
        ({"vocab_size": 3}, r"'unk_token_id': 3.*`vocab_size` \(3\)"),
        ({"scalar_mix_mode": "best"}, "`scalar_mix_mode` is 'best'"),
        ({"scalar_mix_mode": 3}, "`scalar_mix_mode` is 3; pass .* from 0 to 2"),
        ({"adaptive_cutoffs": [20, 10], "vocab_size": 99}, r"`adaptive_cutoffs` is \[20, 10\]"),
        *(({name: "other"}, name) for name in ("char_cnn_activation", "scalar_mix_layer_norm", "softmax_type", "head")),
        *(({name: "other"}, name) for name in ("classifier", "elmo_placement")),
        *(({**without, "task_char_cnn_filters": []}, "`task_word_embedding_size`") for without in WITHOUT_ELMO),
        ({"use_elmo": False, "char_vocab_size": 0, "word_embedding_size": 8}, "`task_word_embedding_size`"),
    ],
)
def test_bad_values_are_named(options, received):
    with refused(re.compile(received, re.DOTALL), (ValueError, TypeError, StrictDataclassError)):
        ELMoConfig(**options)


def test_the_largest_sizes_are_far_above_all_models():
    """And a model of them is built on a device without memory: no size of a tensor overflows."""
    rows = {"vocab_size": 2**24, "char_vocab_size": 2**24, "vocabulary_cache_size": 2**24}
    widths = {"projection_size": 2**20, "word_embedding_size": 2**20, "char_embedding_size": 2**20}
    largest = {**rows, **widths, "char_cnn_filters": [[1000, 2**20]], "max_word_length": 1000}
    original = ELMoConfig.from_preset("original", vocab_size=793_471, word_embedding_size=300)
    assert all(size >= 20 * getattr(original, name) for name, size in largest.items() if name != "char_cnn_filters")
    with torch.device("meta"):
        model = ELMoModel(ELMoConfig(**largest))
    assert model.word_embeddings.weight.shape == (2**24, 2**20)


WORD_LEVEL = {"char_vocab_size": 0, "word_embedding_size": 8, "projection_size": 8}


@pytest.mark.parametrize(
    "options, received",
    [
        ({"bos_token_id": 2}, "'bos_token_id': 2, 'eos_token_id': 2, .*; pass different ids"),
        (dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0), "'bos_token_id': 0, 'eos_token_id': 0"),
        ({"tie_word_embeddings": True}, "`tie_word_embeddings` is True; .*'char_vocab_size': 262"),
        ({"tie_word_embeddings": True, **WORD_LEVEL, "projection_size": 9}, "'word_embedding_size': 8, .*: 9"),
        ({"tie_word_embeddings": True, **WORD_LEVEL, "softmax_type": "adaptive"}, "'softmax_type': 'adaptive'"),
    ],
)
def test_what_only_a_softmax_needs_is_refused_there(options, received, tmp_path):
    """Tools for all models set these fields on any model. A configuration with them is made, saved and loaded."""
    ELMoConfig(**options).save_pretrained(tmp_path)
    with refused(received):
        AutoConfig.from_pretrained(tmp_path).check_softmax()
    ELMoConfig(**WORD_LEVEL, tie_word_embeddings=True).check_softmax()


BAD = [("forget_bias", float("nan")), ("scalar_mix_l2", float("inf")), ("dtype", "float99"), ("dtype", 3)]


@pytest.mark.parametrize("name, value", BAD)
@pytest.mark.parametrize("read", [ELMoConfig.from_pretrained, AutoConfig.from_pretrained])
def test_a_bad_value_in_a_file_is_named_with_the_file(tmp_path, read, name, value):
    ELMoConfig().save_pretrained(tmp_path)
    content = read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({**content, name: value}))
    with refused(f"(?s){tmp_path}: config.json: .*{name}.*{value}", (ValueError, StrictDataclassError)):
        read(tmp_path)


def test_assignment_is_checked_too():
    config = ELMoConfig.from_preset("tiny")
    config.num_hidden_layers = 0
    with refused("`num_hidden_layers` is 0"):
        ELMoModel(config)
    config = ELMoConfig.from_preset("tiny")
    config.pad_token_id = config.vocab_size
    with refused(r"'pad_token_id': 4, .*; pass ids below `vocab_size` \(4\)"):
        ELMoForPreTraining(config)
    with pytest.raises(StrictDataclassError):
        config.dropout = "high"
    with refused("`hidden_size` is 100"):
        config.hidden_size = 100


def test_options_of_from_pretrained_are_checked_and_kept(tmp_path):
    """transformers assigns them to the configuration after it was checked."""
    config = ELMoConfig.from_preset("tiny", vocab_size=20)
    ELMoModel(config).save_pretrained(tmp_path)
    for value in (7, "avg"):
        with refused(f"`scalar_mix_mode` is {value!r}; pass 'learned', "):
            ELMoModel.from_pretrained(tmp_path, scalar_mix_mode=value)
    filters = {"task_char_cnn_filters": ((3, 12),), "char_cnn_filters": tuple(map(tuple, config.char_cnn_filters))}
    cutoffs = {"softmax_type": "adaptive", "adaptive_cutoffs": (4,)}
    model = ELMoForTokenClassification.from_pretrained(tmp_path, **filters, num_labels=3)
    softmax = ELMoForPreTraining.from_pretrained(tmp_path, **cutoffs)
    for each in (model, softmax):
        each.save_pretrained(tmp_path / "saved")
        saved = ELMoConfig.from_pretrained(tmp_path / "saved")
        assert (saved.task_char_cnn_filters == [[3, 12]]) == (each is model)
        assert (saved.adaptive_cutoffs == [4]) == (each is softmax)


def test_every_field_is_read_somewhere():
    folder = Path(modeling_elmo.__file__).parent
    models = "".join(path.read_text("utf-8") for path in folder.rglob("*.py") if "config" not in path.name)
    assert not {name for name in FIELDS if not re.search(rf"config\.{name}\b", models)}


@pytest.mark.parametrize("name", ["modeling_elmo.configuration_elmo", "modeling_elmo.tokenization.tokenization_elmo"])
def test_an_older_transformers_is_named_with_the_needed_version(name, monkeypatch):
    """Loaded files come without pip's check of requirements; all places name the same version."""
    lowest = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))[1]
    assert f"LOWEST := {lowest}.0\n" in (ROOT / "Makefile").read_text("utf-8")
    assert f"transformers {lowest}, or newer" in (ROOT / "model_cards" / "card.md").read_text("utf-8")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "5.8.1")
    spec = find_spec(name)
    with refused(rf"transformers>={lowest} .* found transformers==5\.8\.1", ImportError):
        spec.loader.exec_module(module_from_spec(spec))
