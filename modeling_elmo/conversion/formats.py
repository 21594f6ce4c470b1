"""Checkpoint formats of other programs: the interface, and how a table of keys is applied in both directions.

`original.py`, `tensorflow.py`, `manylangs.py` and `archive.py` have a class of `Checkpoint` each. A row of a table
(`Key`) pairs an original array with ours; `from_original` and `to_original` apply the rows.
"""

import re
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers.utils import cached_file

from modeling_elmo.base import ELMoPreTrainedModel
from modeling_elmo.configuration_elmo import ELMoConfig
from modeling_elmo.conversion import files
from modeling_elmo.modeling_elmo import ELMoModel, ScalarMix
from modeling_elmo.tokenization.tokenization_elmo import ELMoTokenizer

REQUIRED = object()  # default of an option that has none
OptionTable = dict[str, tuple[str, Any]]  # path of an option: field of ELMoConfig, default
# Saved with the model: facts that an exact export needs and the configuration does not have.
ConversionRecord = dict[str, Any]
Loaded = tuple[ELMoPreTrainedModel, ELMoTokenizer, ConversionRecord]


@dataclass
class Checkpoint:
    """The local files of a checkpoint. Its class is a format, as `elmo convert` uses it."""

    name: ClassVar[str]  # of the format
    patterns: ClassVar[tuple[str, ...]]  # any such file in a folder or archive tells the format
    option_names: ClassVar[tuple[str, ...]]  # of `elmo convert`, beside --weights: arguments of `find`
    record_file: ClassVar[str]
    pre_tokenization: ClassVar[str] = "moses"  # of the released models

    @classmethod
    def find(cls, scratch: Path, weights: str | Path) -> Any:
        """The checkpoint of a reference; archives are unpacked to `scratch`."""
        raise NotImplementedError

    @property
    def paths(self) -> list[Path]:
        paths: list[Path] = []
        for value in vars(self).values():
            values = value if isinstance(value, list) else [value]
            paths += [path for path in values if isinstance(path, Path)]
        return paths

    def load(self, pre_tokenization: str) -> Loaded:
        """The model, its tokenizer and the record for an export."""
        raise NotImplementedError

    def arrays(self) -> dict[str, Tensor]:
        raise NotImplementedError

    @staticmethod
    def arrays_of_export(folder: Path, scratch: Path) -> dict[str, Tensor]:
        """The arrays of a converted folder, converted back."""
        raise NotImplementedError

    def report(self, output_dir: str | Path) -> list[str]:
        """What a user should know about the conversion to `output_dir`, a sentence or two each."""
        return []

    def convert(self, folder: Path, pre_tokenization: str | None):
        model, tokenizer, record = self.load(pre_tokenization or self.pre_tokenization)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        files.write_json_object(record, folder / self.record_file)


def convert_checkpoint(
    source: type[Checkpoint],
    weights: str | Path,
    output_dir: str | Path,
    pre_tokenization: str | None = None,
    **options: Any,
) -> Path:
    """Converts a checkpoint of another program to a folder for `from_pretrained`, and returns `output_dir`.

    Args:
        source: the format: `OriginalCheckpoint`, `TensorFlowCheckpoint`, `ManyLangsCheckpoint` or `AllenNLPArchive`.
        weights: a folder, a `.zip` or `.tar.gz` archive, a file of weights, or `hf://user/repo[@revision]/path`.
        output_dir: new or empty folder. After an error it is unchanged.
        pre_tokenization: how the tokenizer splits raw text, see `ELMoTokenizer`. Default: as the released models.
        options: arguments of the format's `find`, such as `options` and `vocabulary`: see `elmo convert --help`.
    """
    output_dir = Path(output_dir)
    files.check_empty(output_dir)
    with tempfile.TemporaryDirectory() as scratch, files.staged(output_dir) as folder:
        source.find(Path(scratch), weights, **options).convert(folder, pre_tokenization)
    return output_dir


def load_for_export(model_class: type[ELMoPreTrainedModel], model_dir: str | Path) -> ELMoPreTrainedModel:
    """A model in float32, without what the original formats have no place for."""
    if Path(model_dir).is_dir() and not Path(model_dir, "config.json").is_file():  # transformers would take defaults
        raise FileNotFoundError(f"{model_dir} has no config.json; pass a folder that save_pretrained wrote.")
    model, loading = model_class.from_pretrained(model_dir, dtype=torch.float32, output_loading_info=True)
    files.check_complete(loading["missing_keys"], model_dir)
    if model._is_int8():
        raise ValueError(f"{model_dir} is quantized, which the format cannot store; save `model.dequantize()`.")
    model.base_model.drop_cache()
    return model


class Transform(NamedTuple):
    load: Callable[[Tensor], tuple[Tensor, ...]]  # original array -> our tensors
    dump: Callable[..., Tensor]  # our tensors -> original array


def _swapped_gates(blocks: Tensor) -> Tensor:
    first, second, third, fourth = blocks.chunk(4)
    return torch.cat([first, second, fourth, third])


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    transform, carry = rows.chunk(2)
    return transform, -carry


SAME = Transform(lambda array: (array,), lambda tensor: tensor)
# Row 0 of our tables is padding, all zeros; original files start with the first real row.
ZERO_ROW = Transform(lambda rows: (torch.cat([torch.zeros_like(rows[:1]), rows]),), lambda table: table[1:])
# Gate blocks i, f, g, o <-> ours i, f, o, g. The forget bias is part of the stored bias.
GATES_IFGO = Transform(lambda blocks: (_swapped_gates(blocks),), _swapped_gates)
# One highway layer is [transform; gate]. Their gate is the share of the input: sigmoid(-z) = 1 - sigmoid(z).
HIGHWAY_HALVES = Transform(_halves, lambda transform, carry: torch.cat([transform, -carry]))


class Key(NamedTuple):
    ours: tuple[str, ...]
    original: str
    transform: Transform = SAME
    by_word: bool = False  # rows are words and permuted with the vocabulary

    def numbered(self, i: int) -> "Key":
        return self._replace(ours=tuple(name.format(i=i) for name in self.ours), original=self.original.format(i=i))


def lstm_keys(module: str) -> tuple[Key, ...]:
    """The rows for the LSTM of AllenNLP, which others have taken over; `module` is the beginning of their names."""
    parts = (
        ("input_linear.weight", "input_linearity.weight", GATES_IFGO),
        ("state_linear.weight", "state_linearity.weight", GATES_IFGO),
        ("input_linear.bias", "state_linearity.bias", GATES_IFGO),
        ("projection.weight", "state_projection.weight", SAME),
    )
    keys = []
    for way in ("forward", "backward"):
        for ours, original, transform in parts:
            keys.append(Key((f"{way}_lstm.layers.{{i}}.{ours}",), f"{module}.{way}_layer_{{i}}.{original}", transform))
    return tuple(keys)


# bilm-tf writes one-layer models without `MultiRNNCell/Cell0`, but reads them with it. We read both.
ONE_LAYER_SPELLING = ("/MultiRNNCell/Cell0/", "/")


def keys_of(parameters: Collection[str], record: ConversionRecord, table: tuple[Key, ...]) -> list[tuple[str, Key]]:
    """The original name and the numbered row of the `table` of every array of a model with these parameters."""
    left_out = ["scalar_mix."]  # it belongs to a task
    if option_at(record, "options.share_embedding_softmax"):
        left_out.append("softmax.weight")  # the one table is stored as `embedding`
    parameters = {name for name in parameters if not name.startswith(tuple(left_out))}
    numbers = {0}
    for name in parameters:
        numbers.update(map(int, re.findall(r"\.(\d+)\.", name)))
    numbered = dict.fromkeys(key.numbered(i) for key in table for i in sorted(numbers))
    keys = [key for key in numbered if key.ours[0] in parameters]
    unknown = parameters.difference(*(key.ours for key in keys))
    if unknown:
        raise ValueError(f"The original format has no array for {', '.join(sorted(unknown))}.")
    spelling = ONE_LAYER_SPELLING if record.get("one_layer_spelling") else ("", "")
    return [(key.original.replace(*spelling), key) for key in keys]


def load_arrays(
    model_class: type[ELMoPreTrainedModel],
    config: ELMoConfig,
    arrays: dict[str, Tensor],
    record: ConversionRecord,
    table: tuple[Key, ...],
    weights: Path,
    options: str | Path,
) -> ELMoPreTrainedModel:
    """A model with the original arrays of `weights`, which must have the shapes that `options` require.

    Each array is taken out of `arrays` when it is converted, so that it is in memory once.
    """
    with torch.device("meta"):  # the options may ask for any size
        model = model_class(config)
        expected = to_original(model.state_dict(), record, table)
    files.check_shapes(arrays, expected, weights, options)
    model.load_state_dict(from_original(arrays, model.state_dict(), record, table), assign=True)
    if isinstance(model, ELMoModel):  # no original has a mix
        model.scalar_mix = ScalarMix(config)
    model.tie_weights()
    return model.eval()


def from_original(
    arrays: dict[str, Tensor], state: dict[str, Tensor], record: ConversionRecord, table: tuple[Key, ...]
) -> dict[str, Tensor]:
    """A copy of a model's `state` with the values of the original `arrays`, which is empty then."""
    names = {name.removeprefix("elmo."): name for name in state}
    loaded = dict(state)
    for original, key in keys_of(names, record, table):
        array = arrays.pop(original)
        if key.by_word:
            array = array[word_rows(record, len(array))]
        for ours, tensor in zip(key.ours, key.transform.load(array), strict=True):
            loaded[names[ours]] = tensor.contiguous()
    return loaded


def to_original(state: dict[str, Tensor], record: ConversionRecord, table: tuple[Key, ...]) -> dict[str, Tensor]:
    """The original arrays of a model's `state`."""
    state = {name.removeprefix("elmo."): tensor for name, tensor in state.items()}
    arrays = {}
    for original, key in keys_of(state, record, table):
        array = key.transform.dump(*(state[ours] for ours in key.ours))
        if key.by_word:
            array = array[word_rows(record, len(array)).argsort()]
        arrays[original] = array
    return arrays


def word_rows(record: ConversionRecord, num_words: int) -> Tensor:
    """The original row of each of our words: `<S>`, `</S>`, `<UNK>`, then the others in the order of the file.

    Shape:
        (num_words,)
    """
    first = record.get("special_rows") or [0, 1, 2]
    others = [row for row in range(num_words) if row not in first]
    return torch.tensor(first + others)


def words_by_id(ids: dict[str, int]) -> list[str]:
    return sorted(ids, key=ids.__getitem__)


def refuse_obstacles(obstacles: dict[str, Any], format_name: str):
    """Refuses an export if the format has no place for something; `obstacles` says for each whether it is there."""
    present = [obstacle for obstacle, is_present in obstacles.items() if is_present]
    if present:
        raise ValueError(f"{format_name} does not support {' and '.join(present)}.")


def read_conversion_record(model_dir: str | Path, name: str, section: str, num_words: int) -> ConversionRecord:
    """The record of a conversion, for a vocabulary of `num_words`; empty for a model that was not converted."""
    file = cached_file(model_dir, name, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return {}
    record = files.read_json_object(Path(file), name)
    rows = record.get("special_rows")
    has_rows = rows is None or len(rows) == len(set(rows).intersection(range(num_words))) == 3
    if not has_rows or not isinstance(record.get(section), dict):
        raise ValueError(f"{file} is not a record of this model; delete it to export the model with its config.json.")
    return record


def read_options(options: dict[str, Any], table: OptionTable, source: str, **others) -> ELMoConfig:
    """The configuration for options, read from `source`, and for other fields, which come first."""
    values: dict[str, Any] = {}
    missing = []
    for path, (field, default) in table.items():
        value = option_at(options, path)
        values[field] = default if value is None else value
        if values[field] is REQUIRED:
            missing.append(path)
    if missing:
        raise ValueError(f"Correct {source}: missing {missing}.")
    try:
        return ELMoConfig(**values | others)
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())
        wrong = [path for path, (field, _) in table.items() if re.search(rf"\b{field}\b", reason)]
        place = f"{', '.join(wrong)} in {source}" if wrong else source
        raise ValueError(f"Correct {place}: {reason}") from error


def option_at(options: Any, path: str) -> Any:
    for name in path.split("."):
        options = options.get(name) if isinstance(options, dict) else None
    return options


def write_options(config: ELMoConfig, table: OptionTable, recorded: dict[str, Any] | None = None) -> dict[str, Any]:
    """The inverse of [`read_options`]. Recorded options stay where they still say what the configuration has."""
    options = recorded or {}
    for path, (field, default) in table.items():
        value = getattr(config, field)
        before = option_at(options, path)
        if value == before or (recorded and not before and value == default):
            continue
        *sections, name = path.split(".")
        section = options
        for key in sections:
            section = section.setdefault(key, {})
        section[name] = value
    return options
