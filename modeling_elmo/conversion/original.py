"""Original ELMo checkpoints (bilm-tf, AllenNLP: options.json and weights.hdf5) to Hugging Face folders, and back.

`KEYS` and `OPTIONS` define the format: each row pairs an original array or option with ours.
"""

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from modeling_elmo.configuration_elmo import ELMoConfig
from modeling_elmo.conversion import files, formats
from modeling_elmo.conversion.formats import REQUIRED, ZERO_ROW, Checkpoint, ConversionRecord, Key, Loaded, Transform
from modeling_elmo.modeling_elmo import ELMoForPreTraining, ELMoModel
from modeling_elmo.tokenization.elmo_characters import (
    MAX_TERM_WORD,
    PAD_WORD,
    SPECIAL_WORDS,
    order_vocabulary,
    vocabulary_lines,
)
from modeling_elmo.tokenization.tokenization_elmo import ELMoTokenizer


def _to_our_gates(blocks: Tensor) -> Tensor:
    i, j, f, o = blocks.chunk(4)
    return torch.cat([i, f, o, j])


def _to_original_gates(blocks: Tensor) -> Tensor:
    i, f, o, g = blocks.chunk(4)
    return torch.cat([i, g, f, o])


TRANSPOSED = Transform(lambda array: (array.T,), lambda tensor: tensor.T)
# (1, width, characters, filters) <-> (filters, characters, width)
FILTERS = Transform(lambda array: (array[0].permute(2, 1, 0),), lambda tensor: tensor.permute(2, 1, 0)[None])
# TensorFlow's gate blocks i, j, f, o <-> ours i, f, o, g. Both add the forget bias at run time.
GATES = Transform(lambda blocks: (_to_our_gates(blocks),), _to_original_gates)
# One kernel over [input, state], (2 * projection, 4 * cell) <-> two matrices (4 * cell, projection)
KERNEL = Transform(
    lambda kernel: _to_our_gates(kernel.T).chunk(2, dim=1),
    lambda inputs, states: _to_original_gates(torch.cat([inputs, states], dim=1)).T,
)


KEYS = (
    # token encoder
    Key(("char_encoder.char_embeddings.weight",), "char_embed", ZERO_ROW),
    Key(("char_encoder.convolutions.{i}.weight",), "CNN/W_cnn_{i}", FILTERS),
    Key(("char_encoder.convolutions.{i}.bias",), "CNN/b_cnn_{i}"),
    Key(("char_encoder.highways.{i}.transform.weight",), "CNN_high_{i}/W_transform", TRANSPOSED),
    Key(("char_encoder.highways.{i}.transform.bias",), "CNN_high_{i}/b_transform"),
    Key(("char_encoder.highways.{i}.carry.weight",), "CNN_high_{i}/W_carry", TRANSPOSED),
    Key(("char_encoder.highways.{i}.carry.bias",), "CNN_high_{i}/b_carry"),
    Key(("token_projection.weight",), "CNN_proj/W_proj", TRANSPOSED),
    Key(("token_projection.bias",), "CNN_proj/b_proj"),
    Key(("word_embeddings.weight",), "embedding", ZERO_ROW, by_word=True),
    *(
        Key(tuple(f"{way}_lstm.layers.{{i}}.{name}" for name in ours), f"{cell}/{original}", transform)
        for way, cell in (
            ("forward", "RNN_0/RNN/MultiRNNCell/Cell{i}/LSTMCell"),
            ("backward", "RNN_1/RNN/MultiRNNCell/Cell{i}/LSTMCell"),
        )
        for ours, original, transform in (
            (("input_linear.weight", "state_linear.weight"), "W_0", KERNEL),
            (("input_linear.bias",), "B", GATES),
            (("projection.weight",), "W_P_0", TRANSPOSED),
        )
    ),
    # language model, in a separate file
    Key(("softmax.weight",), "softmax/W", ZERO_ROW, by_word=True),
    Key(("softmax.bias",), "softmax/b", ZERO_ROW, by_word=True),
)

_FORWARD_ONLY = "This is a forward-only language model; ELMo needs both directions."

OPTIONS: formats.OptionTable = {
    # option: (field of ELMoConfig, default)
    "lstm.dim": ("lstm_hidden_size", REQUIRED),
    "lstm.projection_dim": ("projection_size", REQUIRED),
    "lstm.n_layers": ("num_hidden_layers", 1),
    "lstm.cell_clip": ("cell_clip", None),
    "lstm.proj_clip": ("projection_clip", None),
    "lstm.use_skip_connections": ("use_skip_connections", False),
    "char_cnn.n_characters": ("char_vocab_size", REQUIRED),
    "char_cnn.embedding.dim": ("char_embedding_size", REQUIRED),
    "char_cnn.filters": ("char_cnn_filters", REQUIRED),
    "char_cnn.activation": ("char_cnn_activation", REQUIRED),
    "char_cnn.n_highway": ("num_highway_layers", 0),
    "char_cnn.max_characters_per_token": ("max_word_length", REQUIRED),
    "dropout": ("dropout", 0.1),
    "share_embedding_softmax": ("tie_word_embeddings", False),
}

# Best name first. Archives of NLPL have model.hdf5, options.json or meta.json, and vocab.txt.
WEIGHTS_FILES = ("model.hdf5", "*.hdf5", "*.h5")
OPTIONS_FILES = ("options.json", "meta.json", "*options*.json")
VOCABULARY_FILES = ("vocab.txt", "vocab.txt.gz")
SOFTMAX_FILES = ("*softmax*.hdf5", "*softmax*.h5")

RECORD_FILE = "original_checkpoint.json"

# In our vocabulary, the name of a row that bilm-tf has but never looks up; see `read_original_vocabulary`.
UNUSED_ROW = re.compile(r"(?P<line>.*?) ?\[row (?P<row>\d+)\]")


@dataclass
class OriginalCheckpoint(Checkpoint):
    name = "HDF5 weights of bilm-tf or AllenNLP"
    patterns: ClassVar[tuple[str, ...]] = WEIGHTS_FILES
    option_names: ClassVar[tuple[str, ...]] = ("options", "vocabulary", "softmax")
    record_file = RECORD_FILE

    weights: Path
    options: Path
    vocabulary: Path | None = None
    softmax: Path | None = None

    @classmethod
    def find(
        cls,
        scratch: Path,
        weights: str | Path,
        options: str | Path | None = None,
        vocabulary: str | Path | None = None,
        softmax: str | Path | None = None,
    ) -> "OriginalCheckpoint":
        """A folder or archive of weights may have options and vocabulary too."""
        place = files.fetch(weights, scratch)
        if place.is_dir():
            vocabulary = vocabulary or files.search(place, VOCABULARY_FILES)
        elif options is None:
            raise ValueError(f"{weights} is a single file; pass its options.json too, or the folder with all files.")
        return cls(
            files.find(place, WEIGHTS_FILES, scratch),
            files.find(options or place, OPTIONS_FILES, scratch),
            files.find(vocabulary, VOCABULARY_FILES, scratch) if vocabulary else None,
            files.find(softmax, SOFTMAX_FILES, scratch) if softmax else None,
        )

    @property
    def has_softmax(self) -> bool:
        return self.softmax is not None

    def load(self, pre_tokenization: str) -> Loaded:
        arrays = self.arrays()
        if any(name.startswith("rnn/") for name in arrays):
            raise ValueError(f"{self.weights} has arrays rnn/... {_FORWARD_ONLY}")
        options = files.read_json_object(self.options)
        described = str(self.options)
        words = self.read_words(arrays, options)
        if words is not None:
            described += f" and {self.vocabulary} with {len(words)} words"
        record: ConversionRecord = {
            "options": options,
            "one_layer_spelling": any("/RNN/LSTMCell/" in name for name in arrays),
            "special_rows": words and [words.index(word) for word in SPECIAL_WORDS[1:]],  # <S>, </S>, <UNK>
            "global_step": None,  # of the original training, if the checkpoint tells it
        }
        num_characters = _num_rows(arrays.get("char_embed"))
        vocab_size = len(words or SPECIAL_WORDS[1:]) + 1
        config = options_to_config(options, num_characters, vocab_size, self.has_softmax, str(self.options))
        model_class = ELMoForPreTraining if self.has_softmax else ELMoModel
        model = formats.load_arrays(model_class, config, arrays, record, KEYS, self.weights, described)
        tokenizer = ELMoTokenizer(
            vocab=words, max_word_length=config.max_word_length, pre_tokenization=pre_tokenization
        )
        return model, tokenizer, record

    def read_words(self, arrays: dict[str, Tensor], options: dict[str, Any]) -> list[str] | None:
        """The words of the rows of arrays; `None` without a vocabulary, if no array needs it."""
        tables = [arrays[name] for name in ("embedding", "softmax/W", "softmax/b") if name in arrays]
        if self.vocabulary is None:
            if tables or options.get("char_cnn") is None:
                raise ValueError("Word-level models and softmaxes have rows of words; pass the training vocabulary.")
            return None
        told = options.get("n_tokens_vocab")
        words = read_original_vocabulary(self.vocabulary, _num_rows(tables[0]) if tables else told)
        if told not in (None, len(words)):
            raise ValueError(
                f"{self.vocabulary} has {len(words)} words (without blank lines, <PAD> and !!!MAXTERMID), but "
                f"{self.options} has n_tokens_vocab {told}; pass the training vocabulary."
            )
        return words

    def arrays(self) -> dict[str, Tensor]:
        arrays = files.read_arrays(self.weights)
        if self.softmax:
            arrays |= files.read_arrays(self.softmax)
        return arrays

    @staticmethod
    def arrays_of_export(folder: Path, scratch: Path) -> dict[str, Tensor]:
        softmax = scratch / "softmax.hdf5" if ELMoConfig.from_pretrained(folder).has_softmax else None
        again = OriginalCheckpoint(scratch / "weights.hdf5", scratch / "options.json", softmax=softmax)
        export_original_checkpoint(folder, again.weights, again.options, softmax=softmax)
        return again.arrays()


def export_original_checkpoint(
    model_dir: str | Path,
    weights: str | Path,
    options: str | Path,
    vocabulary: str | Path | None = None,
    softmax: str | Path | None = None,
):
    """Writes a biLM for bilm-tf and AllenNLP: the exact inverse of `convert_checkpoint`.

    Args:
        model_dir: folder or Hub name of any ELMo model. Parameters of a task are skipped.
        weights, options, vocabulary, softmax: new files. `None` skips a file; after an error none is written.
    """
    new_files = [Path(path) for path in (weights, options, vocabulary, softmax) if path]
    if taken := [str(path) for i, path in enumerate(new_files) if path.exists() or path in new_files[:i]]:
        raise FileExistsError(f"{', '.join(taken)} exists, or is named twice; pass names of new files.")
    model = formats.load_for_export(ELMoForPreTraining if softmax else ELMoModel, model_dir)
    config = model.config
    check_expressible(config)
    if softmax and not config.has_softmax:
        raise ValueError(f"{model_dir} has no softmax; omit `softmax`.")
    record = read_original_record(model_dir, config)
    arrays = formats.to_original(model.state_dict(), record, KEYS)
    softmax_arrays = {name: array for name, array in arrays.items() if name.startswith("softmax/")}
    bilm_arrays = {name: array for name, array in arrays.items() if name not in softmax_arrays}
    words = original_words(model_dir, record) if vocabulary else []
    if vocabulary and len(words) != config.vocab_size - 1:
        raise ValueError(f"{model_dir}: tokenizer of {len(words) + 1} words, model of {config.vocab_size}; save both.")
    contents: list[tuple[str | Path | None, Callable, Any]] = [
        (weights, files.write_arrays, bilm_arrays),
        (options, files.write_json_object, record["options"]),
        (vocabulary, files.write_words, words),
        (softmax, files.write_arrays, softmax_arrays),
    ]
    with ExitStack() as all_or_nothing:
        for path, write, content in contents:
            if path:
                write(content, all_or_nothing.enter_context(files.staged(Path(path))))


def _num_rows(table: Tensor | None) -> int:
    return len(table) if table is not None and table.dim() else 0


def original_words(model_dir: str | Path, record: ConversionRecord) -> list[str]:
    _, *words = formats.words_by_id(ELMoTokenizer.from_pretrained(model_dir).get_vocab())  # the original has no <PAD>
    lines = []
    for row, index in enumerate(formats.word_rows(record, len(words)).argsort().tolist()):
        line = words[index]
        unused = UNUSED_ROW.fullmatch(line)
        if unused and int(unused["row"]) == row:
            line = unused["line"]
        lines.append(line)
    return lines


def read_original_vocabulary(path: Path, num_words: int | None) -> list[str]:
    """The words of the rows of original arrays; `num_words` is their number, if the checkpoint states it.

    bilm-tf gives each line a row, and looks up a repeated word in its last row. Other rows are named `word [row 7]`,
    which is not a word of raw text. So are the rows of blank lines and `<PAD>`, if `num_words` includes them.
    """
    lines = [line for line in vocabulary_lines(path) if line != MAX_TERM_WORD]
    if len(lines) != num_words:
        lines = [line for line in lines if line not in ("", PAD_WORD)]
    last = {line: row for row, line in enumerate(lines) if line not in ("", PAD_WORD)}
    words = []
    for row, line in enumerate(lines):
        is_word = last.get(line) == row
        words.append(line if is_word else f"{line} [row {row}]".strip())
    order_vocabulary(words, str(path))  # refuses a vocabulary without the special words
    return words


def options_to_config(
    options: dict[str, Any], num_characters: int, vocab_size: int, has_softmax: bool, source: str = "options.json"
) -> ELMoConfig:
    """The configuration for `options`, read from `source`. `num_characters` is the number of rows of `char_embed`."""
    if formats.option_at(options, "bidirectional") is False:
        raise ValueError(f"{source} says `bidirectional: false`. {_FORWARD_ONLY}")
    others = {"vocab_size": vocab_size, "has_softmax": has_softmax}
    has_characters = options.get("char_cnn") is not None
    if has_characters:
        n_characters = formats.option_at(options, "char_cnn.n_characters")
        if n_characters not in (261, 262):
            raise ValueError(f"Correct {source}: char_cnn.n_characters is {n_characters!r}, not 261 or 262.")
        # One more than the original, for padding words. Early versions trained a 262nd row, which no character uses.
        others["char_vocab_size"] = 263 if num_characters == n_characters == 262 else 262
    else:
        others |= {"char_vocab_size": 0, "word_embedding_size": formats.option_at(options, "lstm.projection_dim")}
    config = formats.read_options(options, _table_for(has_characters), source, **others)
    unknown = []
    for section in ("lstm", "char_cnn"):
        for name in options.get(section) or ():
            path = f"{section}.{name}"
            if not any(f"{known}.".startswith(f"{path}.") for known in OPTIONS):
                unknown.append(path)
    if unknown:
        raise ValueError(f"Correct {source}: unknown {unknown}.")
    return config


def _table_for(has_characters: bool) -> formats.OptionTable:
    return {path: row for path, row in OPTIONS.items() if has_characters or not path.startswith("char_cnn.")}


def check_expressible(config: ELMoConfig):
    word_vectors = config.word_embedding_size
    characters = config.char_vocab_size
    cell = config.lstm_hidden_size
    is_projected = config.always_project and config.projection_size in (cell, config.num_features)
    obstacles = {
        f"an alphabet of {characters} characters": characters not in (0, 262, 263),
        f"word vectors of width {word_vectors}": word_vectors != (0 if characters else config.projection_size),
        f"projections from {cell} to {config.projection_size}": config.projection_size > cell,
        "projections between equal sizes": is_projected,
        f"a forget bias of {config.forget_bias}": config.forget_bias != 1,
    }
    formats.refuse_obstacles(obstacles, "The original format")


def read_original_record(model_dir: str | Path, config: ELMoConfig) -> ConversionRecord:
    """The record of the conversion, if there was one, with options for the configuration of today."""
    record = formats.read_conversion_record(model_dir, RECORD_FILE, "options", config.vocab_size - 1)
    table = _table_for(bool(config.char_vocab_size))
    table.pop("char_cnn.n_characters", None)
    options = formats.write_options(config, table, record.get("options"))
    if config.char_vocab_size:
        options["char_cnn"].setdefault("n_characters", 262)
    if record:
        counts_words = "n_tokens_vocab" in options and record.get("special_rows")
    else:
        counts_words = config.vocab_size > len(SPECIAL_WORDS)
        options["bidirectional"] = True
    if counts_words:
        options["n_tokens_vocab"] = config.vocab_size - 1
    return {**record, "options": options}
