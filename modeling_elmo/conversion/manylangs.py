"""Checkpoints of ELMoForManyLangs (encoder.pkl, token_embedder.pkl, char.dic, word.dic) to our folders, and back.

`MANYLANGS_KEYS` and `MANYLANGS_OPTIONS` define the format. Only tensors are loaded from pickles, whoever made them.
"""

from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor

from modeling_elmo.configuration_elmo import ELMoConfig
from modeling_elmo.conversion import files, formats
from modeling_elmo.conversion.formats import HIGHWAY_HALVES, REQUIRED, ZERO_ROW, Checkpoint, ConversionRecord, Key
from modeling_elmo.modeling_elmo import ELMoModel
from modeling_elmo.tokenization.elmo_characters import SPECIAL_WORDS
from modeling_elmo.tokenization.tokenization_elmo import DISGUISE, ELMoTokenizer

CONFIG, CHARACTERS, WORDS = "config.json", "char.dic", "word.dic"
PICKLES = {"encoder": "encoder.pkl", "token_embedder": "token_embedder.pkl"}  # by the first part of an array's name
IDEOGRAPHIC_SPACE = "\u3000"
# The two architecture files that the original package ships have the same content.
SHIPPED_FILES = ("cnn_50_100_512_4096_sample.json", "cnn_0_100_512_4096_sample.json")


MANYLANGS_KEYS = (
    Key(("word_embeddings.weight",), "token_embedder.word_emb_layer.embedding.weight", ZERO_ROW, by_word=True),
    Key(("char_encoder.char_embeddings.weight",), "token_embedder.char_emb_layer.embedding.weight", ZERO_ROW),
    Key(("char_encoder.convolutions.{i}.weight",), "token_embedder.convolutions.{i}.weight"),
    Key(("char_encoder.convolutions.{i}.bias",), "token_embedder.convolutions.{i}.bias"),
    *(
        Key(
            (f"char_encoder.highways.{{i}}.transform.{kind}", f"char_encoder.highways.{{i}}.carry.{kind}"),
            f"token_embedder.highways._layers.{{i}}.{kind}",
            HIGHWAY_HALVES,
        )
        for kind in ("weight", "bias")
    ),
    Key(("token_projection.weight",), "token_embedder.projection.weight"),
    Key(("token_projection.bias",), "token_embedder.projection.bias"),
    *formats.lstm_keys("encoder"),
)

MANYLANGS_OPTIONS: formats.OptionTable = {
    # option of the architecture file: (field of ELMoConfig, default)
    "encoder.projection_dim": ("projection_size", REQUIRED),
    "encoder.cell_clip": ("cell_clip", None),
    "encoder.proj_clip": ("projection_clip", None),
    "encoder.dim": ("lstm_hidden_size", REQUIRED),
    "encoder.n_layers": ("num_hidden_layers", REQUIRED),
    "token_embedder.activation": ("char_cnn_activation", REQUIRED),
    "token_embedder.filters": ("char_cnn_filters", REQUIRED),
    "token_embedder.n_highway": ("num_highway_layers", REQUIRED),
    "token_embedder.word_dim": ("word_embedding_size", REQUIRED),
    "token_embedder.char_dim": ("char_embedding_size", REQUIRED),
    "token_embedder.max_characters_per_token": ("max_word_length", REQUIRED),
    "dropout": ("dropout", 0.1),
}
NAMES = {"encoder.name": "elmo", "token_embedder.name": "cnn"}  # the kinds of network that the releases have

SHIPPED_ARCHITECTURE = {
    "encoder": {"name": "elmo", "projection_dim": 512, "cell_clip": 3, "proj_clip": 3, "dim": 4096, "n_layers": 2},
    "token_embedder": {
        "name": "cnn",
        "activation": "relu",
        "filters": [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]],
        "n_highway": 2,
        "word_dim": 100,
        "char_dim": 50,
        "max_characters_per_token": 50,
    },
    "classifier": {"name": "sampled_softmax", "n_samples": 8192},
    "dropout": 0.1,
}

WORD_MARKERS = ("<bos>", "<eos>", "<oov>")  # in the order of <S>, </S>, <UNK>
SWAPPED = {"begin_of_word": "<eow>", "end_of_word": "<bow>"}  # as the original has them
CHARACTER_MARKERS = (*WORD_MARKERS, "<pad>", *SWAPPED.values())

MANYLANGS_RECORD_FILE = "original_manylangs.json"


@dataclass
class ManyLangsCheckpoint(Checkpoint):
    name = "a checkpoint of ELMoForManyLangs"
    patterns = tuple(PICKLES.values())
    option_names = ("architecture",)
    record_file = MANYLANGS_RECORD_FILE
    pre_tokenization = "whitespace"

    folder: Path
    record: ConversionRecord  # without the rows of special words
    source: str  # of the architecture, in errors

    @classmethod
    def find(cls, scratch: Path, weights: str | Path, architecture: str | Path | None = None) -> "ManyLangsCheckpoint":
        encoder = PICKLES["encoder"]
        folder = files.fetch(weights, scratch)
        if not (folder / encoder).is_file():  # else another checkpoint may be in a folder below
            folder = files.find(folder, (encoder,), scratch).parent
        config = files.read_json_object(folder / CONFIG, CONFIG) if (folder / CONFIG).is_file() else {}
        path = files.find(architecture, ("*.json",), scratch) if architecture else folder / architecture_name(config)
        described = SHIPPED_ARCHITECTURE
        source = f"the shipped {path.name}"
        if path.is_file():
            described = files.read_json_object(path, "architecture file")
            source = str(path)
        elif path.name not in SHIPPED_FILES:
            raise FileNotFoundError(f"{folder} has no {CONFIG} that names an architecture; pass it (`--architecture`).")
        config["config_path"] = "architecture.json" if path.name == CONFIG else path.name
        return cls(folder, {"architecture": described, "config": config}, source)

    @property
    def paths(self) -> list[Path]:
        beside = [self.folder / name for name in (*PICKLES.values(), CONFIG, CHARACTERS, WORDS)]
        return [path for path in (*beside, Path(self.source)) if path.is_file()]

    def load(self, pre_tokenization: str) -> formats.Loaded:
        characters = self.lexicon(CHARACTERS, CHARACTER_MARKERS, "char_dim")
        words = self.lexicon(WORDS, (*WORD_MARKERS, "<pad>"), "word_dim")
        record = {**self.record, "special_rows": None}
        if words:
            record["special_rows"] = [words[word] for word in WORD_MARKERS]
        config = architecture_to_config(record["architecture"], len(characters), len(words), self.source)
        described = f"{self.source} with {len(characters)} entries in {CHARACTERS} and {len(words)} in {WORDS}"
        model = formats.load_arrays(ELMoModel, config, self.arrays(), record, MANYLANGS_KEYS, self.folder, described)
        return model, build_tokenizer(config, characters, words, record, pre_tokenization), record

    def lexicon(self, name: str, markers: tuple[str, ...], width: str) -> dict[str, int]:
        """The ids of a dictionary; empty if the option `width` of the embedder is 0 or missing."""
        if not formats.option_at(self.record["architecture"], f"token_embedder.{width}"):
            return {}
        return read_lexicon(self.folder / name, markers)

    def arrays(self) -> dict[str, Tensor]:
        """`encoder.` or `token_embedder.` before the names of their files."""
        arrays = {}
        for part, file in PICKLES.items():
            for name, array in read_pickle(self.folder / file).items():
                arrays[f"{part}.{name}"] = array
        return arrays

    @staticmethod
    def arrays_of_export(folder: Path, scratch: Path) -> dict[str, Tensor]:
        return ManyLangsCheckpoint.find(scratch, export_manylangs_checkpoint(folder, scratch / "back")).arrays()


def export_manylangs_checkpoint(model_dir: str | Path, output_dir: str | Path) -> Path:
    """Writes a biLM for ELMoForManyLangs: the exact inverse of `convert_checkpoint`.

    Args:
        model_dir: folder or Hub name of an ELMo model. Parameters of a task are skipped.
        output_dir: new or empty folder. After an error it is unchanged.
    """
    output_dir = Path(output_dir)
    files.check_empty(output_dir)
    model = formats.load_for_export(ELMoModel, model_dir)
    tokenizer = ELMoTokenizer.from_pretrained(model_dir)
    config = model.config
    check_manylangs_expressible(config, tokenizer)
    record = read_manylangs_record(model_dir, config)
    arrays = formats.to_original(model.state_dict(), record, MANYLANGS_KEYS)
    with files.staged(output_dir) as folder:
        folder.mkdir()
        files.write_json_object(record["config"], folder / CONFIG)
        files.write_json_object(record["architecture"], folder / architecture_name(record["config"]))
        for part, file in PICKLES.items():
            content = {}
            for name, array in arrays.items():
                if name.startswith(f"{part}."):
                    content[name.removeprefix(f"{part}.")] = array.clone()
            torch.save(content, folder / file, _use_new_zipfile_serialization=False)  # as the original wrote them
        if config.char_vocab_size:
            write_lexicon(tokenizer.lexicon, folder / CHARACTERS)
        if config.word_embedding_size:
            write_lexicon(manylangs_words(tokenizer, record), folder / WORDS)
    return output_dir


def architecture_to_config(
    architecture: dict[str, Any], num_characters: int, num_words: int, source: str = "the architecture file"
) -> ELMoConfig:
    """The configuration for an architecture, read from `source`, and dictionaries with these numbers of entries."""
    wrong = {}
    for path, name in NAMES.items():
        given = formats.option_at(architecture, path)
        if str(given).lower() != name:
            wrong[path] = given
    if wrong:
        raise ValueError(f"{source} has {wrong}; only {NAMES} can be converted, which all releases have.")
    return formats.read_options(
        architecture,
        MANYLANGS_OPTIONS,
        source,
        cell_clip=formats.option_at(architecture, "encoder.cell_clip") or None,  # 0 is no clip
        projection_clip=formats.option_at(architecture, "encoder.proj_clip") or None,
        char_vocab_size=num_characters + 1 if num_characters else 0,
        vocab_size=num_words + 1 if num_words else len(SPECIAL_WORDS),
        forget_bias=0.0,
        always_project=True,
        has_softmax=False,
    )


def build_tokenizer(
    config: ELMoConfig,
    characters: dict[str, int],
    words: dict[str, int],
    record: ConversionRecord,
    pre_tokenization: str,
) -> ELMoTokenizer:
    tokenizer = ELMoTokenizer(
        alphabet="lexicon",  # without characters, one in which every character is unknown
        lexicon=characters or {name: index for index, name in enumerate(CHARACTER_MARKERS)},
        max_word_length=config.max_word_length,
        pre_tokenization=pre_tokenization,
        literal_markers=True,
        cut_before_lookup=True,
        **SWAPPED,  # type: ignore[arg-type]
    )
    if not words:
        return tokenizer
    originals = formats.words_by_id(words)
    vocabulary = list(SPECIAL_WORDS)
    for row in formats.word_rows(record, len(words))[3:].tolist():
        # An ordinary word `<S>` has the form in which the tokenizer looks it up.
        vocabulary.append(tokenizer.disguised(originals[row]))
    return tokenizer.with_vocabulary({word: index for index, word in enumerate(vocabulary)})  # type: ignore[arg-type]


def manylangs_words(tokenizer: ELMoTokenizer, record: ConversionRecord) -> dict[str, int]:
    """The entries of word.dic."""
    words = list(WORD_MARKERS)
    for word in formats.words_by_id(tokenizer.get_vocab())[len(SPECIAL_WORDS) :]:
        words.append(word.replace(DISGUISE, "<"))
    rows = formats.word_rows(record, len(words)).argsort().tolist()
    return {words[index]: row for row, index in enumerate(rows)}


def check_manylangs_expressible(config: ELMoConfig, tokenizer: ELMoTokenizer):
    unprojected = (config.num_features, config.lstm_hidden_size)
    options = {name: getattr(tokenizer, name) for name in ("alphabet", *SWAPPED)}
    words = len(tokenizer.get_vocab())
    obstacles = {
        f"a forget bias of {config.forget_bias}, which is not part of the bias": config.forget_bias != 0,
        "layers without skip connections": not config.use_skip_connections,
        "words or LSTM outputs without a projection": config.projection_size in unprojected
        and not config.always_project,
        f"a tokenizer with {options}": config.char_vocab_size and options != {"alphabet": "lexicon", **SWAPPED},
        f"{words} words in the tokenizer and {config.vocab_size} in the model": words != config.vocab_size,
        "a vocabulary without <pad>": config.word_embedding_size and "<pad>" not in tokenizer.get_vocab(),
    }
    formats.refuse_obstacles(obstacles, "The format of ELMoForManyLangs")


def read_manylangs_record(model_dir: str | Path, config: ELMoConfig) -> ConversionRecord:
    """The record of the conversion, if there was one, with an architecture for the configuration of today."""
    record = formats.read_conversion_record(model_dir, MANYLANGS_RECORD_FILE, "architecture", config.vocab_size - 1)
    architecture = formats.write_options(config, MANYLANGS_OPTIONS, record.get("architecture"))
    if not record:
        architecture["encoder"]["name"], architecture["token_embedder"]["name"] = "elmo", "cnn"
    if not config.char_vocab_size:
        architecture["token_embedder"]["char_dim"] = 0
    defaults = {
        "config": {"config_path": f"cnn_{config.projection_size}_{config.lstm_hidden_size}.json"},
        "special_rows": [1, 2, 0],  # the original writes <oov>, <bos>, <eos> first
    }
    return {**defaults, **record, "architecture": architecture}


def architecture_name(config: dict[str, Any]) -> str:
    """The last part of `config_path`, which is often an absolute path of another machine."""
    return PureWindowsPath(str(config.get("config_path"))).name


def read_lexicon(path: Path, required: tuple[str, ...] = ()) -> dict[str, int]:
    """Reads lines `entry<TAB>id` as the original does: white space around a line is removed, so that an entry of
    nothing else is gone and stands for U+3000."""
    try:
        lines = path.read_bytes().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}. Pass another copy.") from error
    lexicon = {}
    for number, line in enumerate(lines, 1):
        *entry, index = line.strip().split("\t")
        if len(entry) > 1 or not index.isdecimal() or len(index) > 9:
            raise ValueError(f"{path}, line {number}: {line[:80]!r} is not entry, tab and id; pass another copy.")
        lexicon["".join(entry) or IDEOGRAPHIC_SPACE] = int(index)
    missing = [entry for entry in required if entry not in lexicon]
    if missing or sorted(lexicon.values()) != [*range(len(lexicon))]:
        raise ValueError(
            f"{path}: its {len(lexicon)} different entries must have the ids 0 to {len(lexicon) - 1}, each once "
            f"(entries of nothing but white space are the same entry), and include {' '.join(missing or required)}; "
            "pass another copy."
        )
    return lexicon


def write_lexicon(lexicon: dict[str, int], path: Path):
    entries = formats.words_by_id(lexicon)
    wrong = []
    for entry in entries:
        is_line = entry.lstrip().replace("\t", "\n").splitlines() == [entry]
        if not is_line and entry != IDEOGRAPHIC_SPACE:
            wrong.append(repr(entry))
    if wrong:
        raise ValueError(f"A line of {path.name} cannot hold the entries {files.first_of(wrong)}; remove them.")
    files.write_words([f"{entry}\t{lexicon[entry]}" for entry in entries], path)


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote, of the old or the new format. Nothing else is loaded.

    Raises:
        ValueError: the file has anything but finite float32 tensors by name.
    """
    content = files.load_pickle(path)
    arrays = content if isinstance(content, dict) else {type(content).__name__: content}
    wrong = []
    for name, array in arrays.items():
        if not files.is_array(array) or array.dtype != torch.float32:
            wrong.append(f"{name!s:.80}")
    if wrong:
        raise ValueError(f"{path} must have dense float32 tensors by name, not {files.first_of(wrong)}.")
    files.check_finite(arrays, path)
    return arrays
