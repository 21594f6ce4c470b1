"""Archives of AllenNLP's task models (model.tar.gz: weights.th, config.json, vocabulary): their biLM and learned mixes.

`ARCHIVE_KEYS` defines the biLM, whose arrays are the same from AllenNLP 0.4 to 2.10. `task_models.py` finds them.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from modeling_elmo.configuration_elmo import ELMoConfig
from modeling_elmo.conversion import files, formats
from modeling_elmo.conversion.formats import HIGHWAY_HALVES, Checkpoint, ConversionRecord, Key, Loaded, option_at
from modeling_elmo.conversion.original import options_to_config
from modeling_elmo.conversion.task_models import (
    CHARACTER_ARRAY,
    CHARACTER_PART,
    FILTER_WEIGHT,
    FIRST_LAYER,
    FIRST_PROJECTION,
    HIGHWAY_WEIGHT,
    LAYER_WEIGHT,
    LSTM_PART,
    BiLM,
    State,
    find_bilms,
    how_many,
    missing_part,
    mix_names,
    named_arrays,
    other_modules,
    read_mix,
)
from modeling_elmo.modeling_elmo import ELMoModel
from modeling_elmo.tokenization.elmo_characters import SPECIAL_WORDS
from modeling_elmo.tokenization.tokenization_elmo import ELMoTokenizer

TABLE_OF_CHARACTERS = f"{CHARACTER_PART}.{CHARACTER_ARRAY}"
WORD_PROJECTION = f"{CHARACTER_PART}._projection.weight"

ARCHIVE_KEYS = (
    Key(("char_encoder.char_embeddings.weight",), TABLE_OF_CHARACTERS),  # it has the row of padding
    Key(("char_encoder.convolutions.{i}.weight",), f"{CHARACTER_PART}.char_conv_{{i}}.weight"),
    Key(("char_encoder.convolutions.{i}.bias",), f"{CHARACTER_PART}.char_conv_{{i}}.bias"),
    *(
        Key(
            (f"char_encoder.highways.{{i}}.transform.{kind}", f"char_encoder.highways.{{i}}.carry.{kind}"),
            f"{CHARACTER_PART}._highways._layers.{{i}}.{kind}",
            HIGHWAY_HALVES,
        )
        for kind in ("weight", "bias")
    ),
    Key(("token_projection.weight",), WORD_PROJECTION),
    Key(("token_projection.bias",), f"{CHARACTER_PART}._projection.bias"),
    *formats.lstm_keys(LSTM_PART),
)
# Options of all models that AllenNLP published. Shapes do not tell them.
LSTM_OPTIONS = {"cell_clip": 3, "proj_clip": 3, "use_skip_connections": True}
CHARACTER_OPTIONS = {"activation": "relu", "max_characters_per_token": 50}

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

STATE_FILES = ("weights.th", "best.th", "model_state_*.th", "*.th")  # best name first
WHOLE_ARCHIVE = "model.tar.gz"  # in the folder of a finished training
SETTINGS_FILE = "config.json"
PACKED_OPTIONS = "fta/*options_file*"  # AllenNLP 0.x packs the files of config.json under the names of their entries
ARCHIVED_OPTIONS = ("options.json", "*options*.json")
FILE_ENTRIES = {"options_file", "weight_file", "options_files", "weight_files"}  # of an ELMo in config.json
EMBEDDER = "elmo_token_embedder"  # its type there; the files have defaults since 1.0
ARCHIVE_RECORD_FILE = "allennlp_archive.json"


@dataclass
class AllenNLPArchive(Checkpoint):
    name = "a task model of AllenNLP"
    patterns = (*STATE_FILES, WHOLE_ARCHIVE)
    option_names = ("options", "bilm")
    record_file = ARCHIVE_RECORD_FILE

    weights: Path
    options: Path | None = None
    config: Path | None = None
    bilm_name: str | None = None
    unread: list[str] = field(default_factory=list)  # names of the other files

    @classmethod
    def find(
        cls, scratch: Path, weights: str | Path, options: str | Path | None = None, bilm: str | None = None
    ) -> "AllenNLPArchive":
        """A folder or archive, or only its file of weights, with what is next to it."""
        place = folder = files.fetch(weights, scratch)
        is_finished = place.is_dir() and not files.search(place, STATE_FILES)
        if is_finished and (archive := files.search(place, (WHOLE_ARCHIVE,))):
            place = files.fetch(archive, scratch)
        found = cls(files.find(place, STATE_FILES, scratch), bilm_name=bilm)
        if (found.weights.parent / SETTINGS_FILE).is_file():
            found.config = found.weights.parent / SETTINGS_FILE
        if options:
            found.options = files.find(options, ARCHIVED_OPTIONS, scratch)
        else:
            found.options = found.own_options()
        if not found.options and folder.is_dir():
            found.options = files.search(place, ARCHIVED_OPTIONS) or files.search(folder, ARCHIVED_OPTIONS)
        if place.is_dir():
            unread = set(files.files_in(place)).difference(found.paths)
            found.unread = sorted(path.relative_to(place).as_posix() for path in unread)
        return found

    @cached_property
    def state(self) -> State:
        """All arrays of the task model."""
        content = files.load_pickle(self.weights)
        state = dict(named_arrays(content))
        if not state:
            raise ValueError(f"{self.weights} has no arrays by name, but {type(content).__name__}; pass another file.")
        if wrong := [name for name in state if not name.isprintable()]:
            raise ValueError(f"{self.weights} has arrays whose names are not text: {files.first_of(wrong)}.")
        return state

    @cached_property
    def bilm(self) -> BiLM:
        """The only biLM, or the one of `bilm_name`."""
        bilms = find_bilms(self.state, self.weights)
        if not bilms:
            raise ValueError(f"{self.weights} has no ELMo: {'. '.join(self.reasons())}.")
        names = [bilm.name for bilm in bilms]
        if self.bilm_name is None and len(bilms) > 1:
            raise ValueError(f"{self.weights} has {len(bilms)} biLMs; pass one of them as --bilm: {', '.join(names)}.")
        if self.bilm_name not in (None, *names):
            raise ValueError(f"--bilm {self.bilm_name}: {self.weights} has {', '.join(names)}; pass a name of these.")
        return bilms[names.index(self.bilm_name) if self.bilm_name is not None else 0]

    @cached_property
    def settings(self) -> dict[str, Any] | None:
        """The content of `config.json`; `None` if there is none that can be read."""
        try:
            return files.read_json_object(self.config, SETTINGS_FILE) if self.config else None
        except ValueError:  # early versions archived Jsonnet
            return None

    @cached_property
    def entry(self) -> dict[str, Any]:
        """The part of `config.json` for this biLM; empty, if there is none."""
        entries = elmo_sections(self.settings)
        return entries[nearest(self.bilm.name, entries)] if entries else {}

    def own_options(self) -> Path | None:
        """The biLM's options that the archive has packed, or that `config.json` names and that are in the archive."""
        folder = self.weights.parent
        packed = {path.name: path for path in folder.glob(PACKED_OPTIONS)}
        if packed:
            return packed[nearest(self.bilm.name, packed)]
        named = self.entry.get("options_file") or self.entry.get("options_files")
        if isinstance(named, dict) and named:  # by language
            named = named[nearest(self.bilm.name, named)]
        if isinstance(named, str):
            path = folder / files.inner_path(named)
            with suppress(OSError):  # an address may be too long for a file
                return path if path.is_file() else None
        return None

    @property
    def left_out(self) -> list[str]:
        """The modules that are not converted."""
        return other_modules(self.state, self.arrays())

    def load(self, pre_tokenization: str) -> Loaded:
        check_precision(self.arrays(), self.weights)
        arrays = {name: array.float() for name, array in self.bilm.arrays(self.state).items()}
        check_bilm(arrays, self.weights)
        if self.options:
            options, described = files.read_json_object(self.options), str(self.options)
        else:
            options, described = options_of_shapes(arrays), f"the arrays of {self.weights}"
        places = ["scalar_mix", *(mix_file(number) for number in range(1, len(self.bilm.mixes)))]
        record: ConversionRecord = {
            "options": options,
            "bilm": {CHARACTER_PART: self.bilm.characters, LSTM_PART: self.bilm.lstm},
            "mixes": dict(zip(places, self.bilm.mixes, strict=False)),  # a biLM may have none
            "not_converted": self.left_out,
        }
        config = archive_config(options, arrays, described, self.entry)
        model = formats.load_arrays(ELMoModel, config, arrays, record, ARCHIVE_KEYS, self.weights, described)
        if self.bilm.mixes:
            model.scalar_mix.load_state_dict(read_mix(self.bilm.mixes[0], self.state))
        tokenizer = ELMoTokenizer(max_word_length=config.max_word_length, pre_tokenization=pre_tokenization)
        return model, tokenizer, record

    def convert(self, folder: Path, pre_tokenization: str | None):
        super().convert(folder, pre_tokenization)
        for number, mix in enumerate(self.bilm.mixes[1:], 1):
            save_file(read_mix(mix, self.state), folder / mix_file(number))

    def arrays(self) -> State:
        """The converted arrays, by the names in the task model."""
        arrays = {self.bilm.full_name(name): array for name, array in self.bilm.arrays(self.state).items()}
        for mix in self.bilm.mixes:
            arrays |= {name: self.state[name] for name in mix_names(mix, self.state)}
        return arrays

    @staticmethod
    def arrays_of_export(folder: Path, scratch: Path) -> State:
        model = formats.load_for_export(ELMoModel, folder)
        record = files.read_json_object(folder / ARCHIVE_RECORD_FILE, ARCHIVE_RECORD_FILE)
        bilm = BiLM(record["bilm"][CHARACTER_PART], record["bilm"][LSTM_PART])
        arrays = formats.to_original(model.state_dict(), record, ARCHIVE_KEYS)
        arrays = {bilm.full_name(name): array for name, array in arrays.items()}
        for place, mix in record["mixes"].items():
            values = model.scalar_mix.state_dict() if place == "scalar_mix" else load_file(folder / place)
            arrays[f"{mix}gamma"] = values["gamma"]
            for layer, scalar in enumerate(values["weights"].split(1)):
                arrays[f"{mix}scalar_parameters.{layer}"] = scalar
        return arrays

    def reasons(self) -> list[str]:
        """Why there is no biLM, and what there is instead."""
        modules = []
        kinds = kinds_of_modules(self.settings)
        for module in other_modules(self.state, ()):
            name = module.rpartition(".")[2].removeprefix("token_embedder_").lstrip("_")
            modules.append(f"{module} ({kinds[name]})" if name in kinds else module)
        reasons = [missing_part(self.state), f"It has {files.first_of(modules)}"]
        if any("_contextualizer" in name for name in self.state):
            reasons.append("A language model that AllenNLP trained has another network than ELMo")
        named: list[str] = []
        for entry in elmo_sections(self.settings).values():
            named += [str(entry[name]) for name in sorted(FILE_ENTRIES.intersection(entry))]
        if named:
            reasons.append(
                f"{SETTINGS_FILE} names the files of an ELMo, which you can convert: {files.first_of(named)}"
            )
        return reasons

    def report(self, output_dir: str | Path) -> list[str]:
        is_trained = is_true(self.entry.get("requires_grad"))
        lines = [
            f"The biLM is {self.bilm.name or 'the whole file'}{', trained with the task' if is_trained else ''}.",
            self.report_options(),
            *self.report_mixes(output_dir),
            "It has no softmax, so the model predicts no words.",
        ]
        dtypes = {str(array.dtype).removeprefix("torch.") for array in self.arrays().values()}.difference({"float32"})
        if dtypes:
            lines.append(f"Arrays of {' and '.join(sorted(dtypes))} are stored as float32.")
        cache = f"{self.bilm.name}._word_embedding.weight".removeprefix(".")
        if cache in self.state:
            lines.append(
                f"{cache} has the vectors of {len(self.state[cache])} words (vocab_to_cache). The model computes them "
                "from characters instead, which differs if they were trained with the task."
            )
        if self.left_out:
            lines.append(f"Not converted: {files.first_of(self.left_out)}.")
        if self.unread:
            lines.append(f"Files not read: {files.first_of(self.unread)}.")
        return lines

    def report_options(self) -> str:
        if self.options:
            return f"Its options come from {files.first_of([self.options.name])}."
        return (
            "Its sizes come from the arrays. There is no options.json, so clips of 3, skip connections, relu and 50 "
            "characters per word are assumed, as in AllenNLP's models; if yours differs, pass --options."
        )

    def report_mixes(self, output_dir: str | Path) -> list[str]:
        if not self.bilm.mixes:
            return ["It has no mix, so scalar_mix is the average of the layers."]
        first, *others = (self.described_mix(mix) for mix in self.bilm.mixes)
        lines = [f"scalar_mix is {first}"]
        for number, learned in enumerate(others, 1):
            path = str(Path(output_dir, mix_file(number)))
            lines.append(
                f"{mix_file(number)} is {learned} Load it with: from safetensors.torch import load_file; "
                f"mix = type(model.scalar_mix)(model.config); mix.load_state_dict(load_file({path!r}))"
            )
        if is_true(self.entry.get("do_layer_norm")):
            lines.append(f"do_layer_norm is true in {SETTINGS_FILE}, so scalar_mix_layer_norm is 'allennlp'.")
        elif not self.entry:
            lines.append(
                f"No {SETTINGS_FILE} says whether the mix had do_layer_norm. If it had, pass "
                "scalar_mix_layer_norm='allennlp' to from_pretrained."
            )
        return lines

    def described_mix(self, mix: str) -> str:
        values = read_mix(mix, self.state)
        shares = ", ".join(f"{share:.3f}" for share in values["weights"].softmax(0).tolist())
        return f"{mix.rstrip('.')}: layers {shares}; gamma {values['gamma'].item():.3f}."


def mix_file(number: int) -> str:
    return f"scalar_mix_{number}.safetensors"


def check_precision(arrays: State, weights: Path):
    wrong = [f"{name} ({array.dtype})" for name, array in arrays.items() if array.dtype not in FLOAT_DTYPES]
    if wrong:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
        raise ValueError(f"{weights} must have {known} numbers in an ELMo, not {files.first_of(wrong)}.")
    files.check_finite({name: array.float() for name, array in arrays.items()}, weights)


def check_bilm(arrays: State, weights: Path):
    """Refuses arrays that an ELMo does not have, or whose sizes cannot be read."""
    if not any(name.startswith(f"{LSTM_PART}.backward") for name in arrays):
        raise ValueError(f"{weights} has only the forward direction of a biLM; ELMo needs both.")
    dimensions = {TABLE_OF_CHARACTERS: 2, f"{LSTM_PART}.{FIRST_LAYER}": 2}
    for number in range(how_many(arrays, FILTER_WEIGHT)):
        dimensions[FILTER_WEIGHT.format(number)] = 3
    for name, expected in dimensions.items():
        if arrays[name].dim() != expected:
            raise ValueError(f"{weights}: {name} has the shape {tuple(arrays[name].shape)}, not {expected} dimensions.")
    rows = len(arrays[TABLE_OF_CHARACTERS])
    if rows not in (262, 263):
        raise ValueError(f"{weights}: {TABLE_OF_CHARACTERS} has {rows} rows; ELMo has 262 (or 263) characters.")


def options_of_shapes(arrays: State) -> dict[str, Any]:
    """An options.json for these arrays."""
    gates, projection = arrays[f"{LSTM_PART}.{FIRST_LAYER}"].shape
    filters = []
    for number in range(how_many(arrays, FILTER_WEIGHT)):
        size, _, width = arrays[FILTER_WEIGHT.format(number)].shape
        filters.append([width, size])
    return {
        "lstm": {
            "dim": gates // 4,
            "projection_dim": projection,
            "n_layers": how_many(arrays, LAYER_WEIGHT),
            **LSTM_OPTIONS,
        },
        "char_cnn": {
            "n_characters": 262,
            "embedding": {"dim": arrays[TABLE_OF_CHARACTERS].shape[1]},
            "filters": filters,
            "n_highway": how_many(arrays, HIGHWAY_WEIGHT),
            **CHARACTER_OPTIONS,
        },
    }


def archive_config(options: dict[str, Any], arrays: State, source: str, entry: dict[str, Any]) -> ELMoConfig:
    """The configuration for `options`, read from `source`, and for the biLM's `entry` in config.json."""
    if isinstance(lstm := options.get("lstm"), dict):
        clips = {name: lstm.get(name) or None for name in ("cell_clip", "proj_clip")}  # 0 is no clip
        options = {**options, "lstm": {**lstm, **clips}}
    rows = len(arrays[TABLE_OF_CHARACTERS])
    config = options_to_config(options, rows - 1, len(SPECIAL_WORDS), False, source)
    config.char_vocab_size = rows
    config.forget_bias = 0.0  # it is part of the bias
    # AllenNLP also projects to the same width.
    inner_sizes = {f"{LSTM_PART}.{FIRST_PROJECTION}": config.lstm_hidden_size, WORD_PROJECTION: config.num_features}
    for name, size in inner_sizes.items():
        if name in arrays and size == config.projection_size:
            config.always_project = True
    if is_true(entry.get("do_layer_norm")):
        config.scalar_mix_layer_norm = "allennlp"
    dropout = as_number(entry.get("dropout"))
    if dropout is not None and 0 <= dropout < 1:
        config.elmo_dropout = dropout
    return config


def is_true(option: Any) -> bool:
    """Whether an option of config.json is on. AllenNLP also takes strings, and numbers as in Jsonnet."""
    return str(option).lower() in ("true", "1")


def as_number(option: Any) -> float | None:
    try:
        return float(option)
    except (TypeError, ValueError, OverflowError):
        return None


def sections(settings: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    """All objects of config.json, by their paths."""
    waiting = [("", settings)]
    while waiting:
        path, item = waiting.pop()
        if isinstance(item, dict):
            yield path, item
            waiting += [(f"{path}.{name}", value) for name, value in item.items()]


def elmo_sections(settings: Any) -> dict[str, dict[str, Any]]:
    """The parts of config.json that describe an ELMo, by their paths."""
    found = {}
    for path, section in sections(settings):
        if FILE_ENTRIES.intersection(section) or EMBEDDER in str(section.get("type")):
            found[path] = section
    return found


def kinds_of_modules(settings: Any) -> dict[str, str]:
    """The types in the model of config.json, by the names of its parts; of two, the type of the outer part."""
    kinds = {}
    for path, section in sorted(sections(option_at(settings, "model")), key=lambda item: -item[0].count(".")):
        if "type" in section:
            kinds[path.rpartition(".")[2]] = str(section["type"])
    return kinds


def nearest(name: str, paths: Iterable[str]) -> str:
    """The path that has the most words of the name of a module, and the fewest others."""
    words = path_words(name)
    return max(paths, key=lambda path: (len(words & path_words(path)), -len(path_words(path) - words)))


def path_words(path: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", path.lower()))
