"""TensorFlow checkpoints of bilm-tf (model.ckpt-N.index and .data-..., options.json, vocab.txt) to folders of ours.

The variables hold the arrays of `KEYS` in `original.py`, under other names: `original_name` translates them, as
`dump_weights` of bilm-tf does. A checkpoint also has the softmax and the accumulators of Adagrad.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch
from safetensors.torch import save_file
from torch import Tensor

from modeling_elmo.configuration_elmo import ELMoConfig
from modeling_elmo.conversion import files
from modeling_elmo.conversion.formats import ZERO_ROW, Loaded, from_original, keys_of
from modeling_elmo.conversion.original import (
    KEYS,
    OPTIONS_FILES,
    VOCABULARY_FILES,
    OriginalCheckpoint,
    read_original_record,
)
from modeling_elmo.conversion.tensor_bundle import FLOAT32, read_index, read_tensor
from modeling_elmo.modeling_elmo import ELMoForPreTraining

# One of these files tells a TensorFlow checkpoint. TensorFlow names the newest in a file `checkpoint` beside them.
CHECKPOINT_FILES = ("*.index", "*.data-?????-of-?????")
SUFFIX = re.compile(r"\.(index|data-\d{5}-of-\d{5})$")
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


@dataclass
class TensorFlowCheckpoint(OriginalCheckpoint):
    name = "a TensorFlow checkpoint of bilm-tf"
    patterns = CHECKPOINT_FILES
    option_names = ("options", "vocabulary", "step", "optimizer_state")
    has_softmax = True
    shards: list[Path] = field(default_factory=list)
    optimizer_state: bool = False  # whether Adagrad's accumulators are converted, too

    @classmethod
    def find(  # type: ignore[override]  # it has other options
        cls,
        scratch: Path,
        weights: str | Path,
        options: str | Path | None = None,
        vocabulary: str | Path | None = None,
        step: int | None = None,
        optimizer_state: bool = False,
    ) -> "TensorFlowCheckpoint":
        place = files.fetch(weights, scratch)
        prefix = find_prefix(place, step)
        index = Path(f"{prefix}.index")
        num_shards, _ = read_index(index)
        return cls(
            index,
            files.find(options or place, OPTIONS_FILES, scratch),
            files.find(vocabulary or place, VOCABULARY_FILES, scratch),
            shards=[Path(f"{prefix}.data-{number:05}-of-{num_shards:05}") for number in range(num_shards)],
            optimizer_state=optimizer_state,
        )

    def load(self, pre_tokenization: str) -> Loaded:
        model, tokenizer, record = super().load(pre_tokenization)
        if characters := record["options"].get("char_cnn"):
            characters["n_characters"] = 262  # training has 261; bilm-tf's inference asks for this edit
        _, entries = read_index(self.weights)
        if step := entries.get("global_step"):
            record["global_step"] = int(read_tensor(self.shards[step.shard], "global_step", step).sum())
        return model, tokenizer, record

    def arrays(self) -> dict[str, Tensor]:
        return read_variables(self)

    def convert(self, folder: Path, pre_tokenization: str | None):
        super().convert(folder, pre_tokenization)
        if self.optimizer_state:
            convert_accumulators(self, folder)


def read_variables(checkpoint: TensorFlowCheckpoint, slot: str = "") -> dict[str, Tensor]:
    """The variables of the language model, or their slots, by the names of `KEYS`."""
    index = checkpoint.weights
    _, entries = read_index(index)
    variables = {}  # by their entries
    for name in entries:
        is_slot = str(PurePosixPath(name).parent) in entries  # the slots of an optimizer stand below their variable
        if name.startswith("lm/") and not is_slot:
            variables[name + slot] = name
    if not variables:
        raise ValueError(f"{index} has no variables lm/..., but {files.first_of(entries)}; pass another.")
    if missing := [name for name in variables if name not in entries]:
        raise ValueError(f"{index} has no {files.first_of(missing)}; omit --optimizer_state.")
    if wrong := [variable for name, variable in variables.items() if entries[name].dtype != FLOAT32]:
        raise ValueError(f"{index} must have float32 variables, but {', '.join(wrong)} have another type.")
    arrays = {}
    for name, variable in variables.items():
        entry = entries[name]
        arrays[original_name(variable)] = read_tensor(checkpoint.shards[entry.shard], name, entry)
    return arrays


def convert_accumulators(checkpoint: TensorFlowCheckpoint, folder: Path):
    """Writes Adagrad's accumulators, which have the shapes of the variables and the same layout."""
    with torch.device("meta"):
        model = ELMoForPreTraining(ELMoConfig.from_pretrained(folder))
    parameters = dict(model.named_parameters())
    record = read_original_record(folder, model.config)
    accumulators = from_original(read_variables(checkpoint, SLOT), parameters, record, KEYS)
    names = {name.removeprefix("elmo."): name for name in parameters}
    for _, key in keys_of(names, record, KEYS):
        if key.transform is ZERO_ROW:
            accumulators[names[key.ours[0]]][0] = INITIAL_ACCUMULATOR
    save_file(accumulators, folder / OPTIMIZER_STATE, {"optimizer": "adagrad", "step": str(record["global_step"])})


def original_name(variable: str) -> str:
    """The name in `KEYS` of a variable, as `dump_weights` of bilm-tf writes it."""
    name = variable.removeprefix("lm/")
    for spelling in SPELLINGS:
        name = name.replace(*spelling)
    return name


def find_prefix(place: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the one that the file `checkpoint` names, or the only one, without suffixes."""
    if not place.is_dir():
        raise ValueError(f"{place} is one file; pass the folder of the checkpoint, and --step if it has several.")
    paths = [path for path in files.files_in(place) if SUFFIX.search(path.name)]
    prefixes = sorted({path.with_name(SUFFIX.sub("", path.name)) for path in paths})
    chosen = prefixes
    needed = "to choose from, without a file `checkpoint`"
    if step is not None:
        needed = f"of step {step}"
        chosen = [prefix for prefix in prefixes if prefix.name.endswith(f"-{step}")]
    elif state := files.search(place, ("checkpoint",)):
        newest = NEWEST.search(state.read_text(encoding="utf-8", errors="replace"))
        # The path may be of another machine, of any system.
        name = PureWindowsPath(newest[1]).name if newest else "a line model_checkpoint_path"
        needed = f"{name}, as {state} says"
        chosen = [prefix for prefix in prefixes if prefix == state.with_name(name)]
    if len(chosen) != 1:
        names = files.first_of(prefix.relative_to(place).as_posix() for prefix in prefixes)
        raise ValueError(f"{place} has the checkpoints {names}, of which {len(chosen)} are {needed}; pass --step.")
    return chosen[0]
