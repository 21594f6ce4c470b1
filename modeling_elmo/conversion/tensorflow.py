"""TensorFlow checkpoints of bilm-tf (model.ckpt-N.index and .data-..., options.json, vocab.txt) to folders of ours.

The variables hold the arrays of `KEYS` in `original.py`, under other names: `original_name` translates them, as
`dump_weights` of bilm-tf does. A checkpoint also has the softmax and the accumulators of Adagrad.
"""

import re
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from modeling_elmo.conversion import files as files
from modeling_elmo.conversion.original import (
    RECORD_FILE,
    ZERO_ROW,
    OriginalRecord,
    empty_model,
    from_original,
    keys_of,
    make_tokenizer,
    original_arrays,
    read_original_record,
    save_converted,
)
from modeling_elmo.conversion.tensor_bundle import FLOAT32, TensorBundle, read_index
from modeling_elmo.modeling_elmo import ELMoForPreTraining

# One of these files tells a TensorFlow checkpoint. TensorFlow names the newest in a file `checkpoint` beside them.
CHECKPOINT_FILES = ("*.index", "*.data-?????-of-?????")
NEWEST = re.compile(r'^model_checkpoint_path:\s*"(.+)"', re.MULTILINE)
OPTIMIZER_STATE = "optimizer_state.safetensors"  # Adagrad's accumulators, by the names of our parameters
INITIAL_ACCUMULATOR = 1.0  # of the original, and here of padding, which the original does not have
SLOT = "/Adagrad"
SPELLINGS = (
    # variables of TensorFlow 1.2 and later, and in HDF5 files, which have the names of TensorFlow 0.x
    ("/rnn/", "/RNN/"),
    ("/multi_rnn_cell/cell_", "/MultiRNNCell/Cell"),
    ("/lstm_cell/", "/LSTMCell/"),
    ("/projection/kernel", "/W_P_0"),
    ("/kernel", "/W_0"),
    ("/bias", "/B"),
)


class TensorFlowCheckpoint(NamedTuple):
    index_file: Path
    bundle: TensorBundle
    options: Path
    vocabulary: Path


class Variables:
    """The variables of a bundle by their names in `KEYS`, or their slots."""

    def __init__(self, bundle: TensorBundle, slot: str = ""):
        self.bundle, self.slot = bundle, slot
        self.names = {original_name(name): name for name in bundle.entries if is_parameter(name, bundle)}

    def __getitem__(self, original: str) -> Tensor:
        return self.bundle[self.names[original] + self.slot]


def convert_tensorflow_checkpoint(
    weights: str | Path,
    output_dir: str | Path,
    *,
    options: str | Path | None = None,
    vocabulary: str | Path | None = None,
    step: int | None = None,
    optimizer_state: bool = False,
    pre_tokenization: str = "moses",
) -> Path:
    """Converts a checkpoint that bilm-tf trained to a folder with an `ELMoForPreTraining`, and returns `output_dir`.

    Args:
        weights: folder or `.zip` archive with the checkpoint.
        output_dir: new or empty folder. After an error it is unchanged.
        options, vocabulary: options.json and vocab.txt of the training. Default: the files in `weights`.
        step: the checkpoint of this step. Default: the newest, which the file `checkpoint` names.
        optimizer_state: whether to write `optimizer_state.safetensors`, from which `elmo pretrain --optim adagrad`
            continues with the original's accumulators.
        pre_tokenization: how the tokenizer splits raw text, see `ELMoTokenizer`.
    """
    output_dir = Path(output_dir)
    files.check_empty(output_dir)
    with tempfile.TemporaryDirectory() as scratch, files.staged(output_dir) as folder:
        found = find_tensorflow_checkpoint(weights, options, vocabulary, step, Path(scratch))
        parameters, record = _convert_model(found, folder, pre_tokenization)
        if optimizer_state:
            _convert_slots(found, folder, parameters, record)
    return output_dir


def _convert_model(
    found: TensorFlowCheckpoint, folder: Path, pre_tokenization: str
) -> tuple[dict[str, Tensor], OriginalRecord]:
    """Writes the model. Returns its parameters without their values, so that its memory is free again."""
    model, record = load_tensorflow_checkpoint(found)
    tokenizer = make_tokenizer(model.config, found.vocabulary, pre_tokenization)
    save_converted(folder, model, tokenizer, record, RECORD_FILE)
    return {name: parameter.detach().to("meta") for name, parameter in model.named_parameters()}, record


def load_tensorflow_checkpoint(found: TensorFlowCheckpoint) -> tuple[ELMoForPreTraining, OriginalRecord]:
    """The language model of a checkpoint, and the record for an export. Each array is in memory once."""
    variables, entries = Variables(found.bundle), found.bundle.entries
    if not variables.names:
        raise ValueError(
            f"{found.index_file} has no variables lm/..., but {', '.join(files.first_of(list(entries)))}; pass a "
            "checkpoint that bilm-tf trained."
        )
    if wrong := [name for name in variables.names.values() if entries[name].dtype != FLOAT32]:
        raise ValueError(f"{found.index_file} must have float32 variables, but {', '.join(wrong)} are of another type.")
    shapes = {original: entries[name].shape for original, name in variables.names.items()}
    model, record = empty_model(shapes, found.index_file, found.options, found.vocabulary, has_softmax=True)
    assert isinstance(model, ELMoForPreTraining)
    model.load_state_dict(from_original(variables, model.state_dict(), record), assign=True)
    model.tie_weights()
    if "char_cnn" in record.options:
        record.options["char_cnn"]["n_characters"] = 262  # training has 261; bilm-tf's inference asks for this edit
    if "global_step" in entries:
        record.global_step = int(found.bundle["global_step"].sum())
    return model.eval(), record


def _convert_slots(
    found: TensorFlowCheckpoint, folder: Path, parameters: dict[str, Tensor], record: OriginalRecord
) -> None:
    """Writes Adagrad's accumulators, which have the shapes of the variables and the same layout."""
    slots = Variables(found.bundle, SLOT)
    missing = [name + SLOT for name in slots.names.values() if name + SLOT not in found.bundle.entries]
    if missing:
        raise ValueError(
            f"{found.index_file} has no {', '.join(files.first_of(missing))}; convert it without --optimizer_state."
        )
    accumulators = from_original(slots, parameters, record)
    names = {name.removeprefix("elmo."): name for name in parameters}
    for _, key in keys_of(names, record):
        if key.transform is ZERO_ROW:
            accumulators[names[key.ours[0]]][0] = INITIAL_ACCUMULATOR
    save_file(accumulators, folder / OPTIMIZER_STATE, {"optimizer": "adagrad", "step": str(record.global_step)})


def count_equal_arrays(found: TensorFlowCheckpoint, folder: str | Path) -> tuple[int, int]:
    """The number of arrays of a checkpoint, and how many of them the converted folder gives back bit for bit."""
    model = ELMoForPreTraining.from_pretrained(folder)
    variables = Variables(found.bundle)
    written = original_arrays(model.state_dict(), read_original_record(folder, model.config))
    return len(variables.names), sum(torch.equal(array, variables[name]) for name, array in written)


def original_name(variable: str) -> str:
    """The name in `KEYS` of a variable, as `dump_weights` of bilm-tf writes it."""
    name = variable.removeprefix("lm/")
    for spelling in SPELLINGS:
        name = name.replace(*spelling)
    return name


def is_parameter(name: str, bundle: TensorBundle) -> bool:
    """Whether a variable is a parameter of the language model. The slots of an optimizer stand below their variable."""
    return name.startswith("lm/") and str(PurePosixPath(name).parent) not in bundle.entries


def find_tensorflow_checkpoint(
    weights: str | Path,
    options: str | Path | None,
    vocabulary: str | Path | None,
    step: int | None,
    scratch: Path,
) -> TensorFlowCheckpoint:
    """The local files of a checkpoint in a folder or archive."""
    place = files.fetch(weights)
    names = files.names_in(place)
    prefix = _choose(place, names, step, scratch)
    index = _local(place, f"{prefix}.index", names, scratch)
    num_shards, entries = read_index(index)
    shards = [f"{prefix}.data-{number:05}-of-{num_shards:05}" for number in range(num_shards)]
    bundle = TensorBundle(entries, [_local(place, shard, names, scratch) for shard in shards])
    return TensorFlowCheckpoint(
        index,
        bundle,
        files.find(options or place, files.OPTIONS_FILES, scratch),
        files.find(vocabulary or place, files.VOCABULARY_FILES, scratch),
    )


def _choose(place: Path, names: list[str], step: int | None, scratch: Path) -> str:
    """The path of a checkpoint without its suffixes: of a step, or the newest."""
    found = sorted({re.sub(r"\.(index|data-\d+-of-\d+)$", "", name) for name in names if is_checkpoint_file(name)})
    listed = ", ".join(files.first_of(found))
    if step is not None:
        of_step = [prefix for prefix in found if prefix.endswith(f"-{step}")]
        if len(of_step) != 1:
            raise ValueError(f"{place} has {len(of_step)} checkpoints of step {step}; pass one of {listed}.")
        return of_step[0]
    state = files.search(place, ("checkpoint",))
    if state is None and len(found) > 1:
        raise ValueError(f"{place} has no file `checkpoint`, which names the newest of {listed}; pass --step.")
    if state is None:
        return found[0]
    path = _local(place, state, names, scratch)
    newest = NEWEST.search(path.read_text(encoding="utf-8", errors="replace")[:100_000])
    if newest is None:
        raise ValueError(f"{path} names no checkpoint in a line model_checkpoint_path; delete it, or pass --step.")
    # The path may be of another machine, of any system.
    prefix = str(Path(state).with_name(PureWindowsPath(newest[1]).name))
    if prefix not in found:
        raise FileNotFoundError(f"{path} names {prefix}, but there is only {listed}; copy its files, or pass --step.")
    return prefix


def is_checkpoint_file(name: str) -> bool:
    return any(fnmatchcase(PureWindowsPath(name).name, pattern) for pattern in CHECKPOINT_FILES)


def _local(place: Path, name: str, names: list[str], scratch: Path) -> Path:
    if name not in names:
        raise FileNotFoundError(
            f"{place} has no {name}, but {', '.join(files.first_of(sorted(names)))}; copy the missing file, too."
        )
    return files.unpack(place, name, scratch) if files.is_archive(place) else place / name
