"""ELMo configuration: the options of the biLM (Peters et al. 2018, section 3) under Hugging Face's names."""

import json
import os
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers.utils import CONFIG_NAME
from transformers.utils.versions import require_version

require_version("transformers>=5.17")  # here, because an older version lacks the next import

from transformers import PreTrainedConfig

from .folder_code import code_of_folder, saved_code

# The released model sizes (https://allenai.org/allennlp, options.json of each), and a size for tests.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "char_embedding_size": 4,
        "char_cnn_filters": [[1, 4], [2, 8], [3, 16], [4, 32], [5, 64]],
        "lstm_hidden_size": 64,
        "projection_size": 16,
    },
    "small": {"num_highway_layers": 1, "lstm_hidden_size": 1024, "projection_size": 128},
    "medium": {"num_highway_layers": 1, "lstm_hidden_size": 2048, "projection_size": 256},
    "original": {},
}

# The classes of each Auto class, under all of which every folder loads. If there are several, a folder loads the class
# that `architectures` of its configuration names, or else the first.
AUTO_CLASS_NAMES = {
    "AutoConfig": ("ELMoConfig",),
    "AutoModel": ("ELMoModel",),
    "AutoModelForPreTraining": ("ELMoForPreTraining",),
    "AutoModelForCausalLM": ("ELMoForCausalLM",),
    "AutoModelForTokenClassification": (
        "ELMoForTokenClassification",
        "ELMoForSemanticRoleLabeling",
        "ELMoForCoreferenceResolution",
    ),
    "AutoModelForSequenceClassification": ("ELMoForSequenceClassification",),
    "AutoModelForQuestionAnswering": ("ELMoForQuestionAnswering",),
}
CODE_FILES = ("configuration_elmo.py", "modeling_elmo.py")  # of a saved folder, beside that of the tokenizer
BILM_CLASSES = {"ELMoModel", "ELMoForPreTraining"}
# Fields that only heads read. The config.json of a biLM leaves them out.
HEAD_FIELDS = (
    *("elmo_dropout", "elmo_placement", "freeze_bilm", "use_elmo", "head", "classifier"),
    *("task_hidden_size", "task_dropout", "task_num_layers", "task_word_embedding_size", "freeze_word_embeddings"),
    *("task_char_embedding_size", "task_char_cnn_filters", "max_span_width", "spans_per_word", "max_antecedents"),
    *("train_singletons", "lexical_dropout", "use_speakers", "num_genres"),
)

# Files that make a folder a sentence-transformers model: its own `Transformer` module, which calls our method
# `token_embeddings`, and its own `Pooling`. `modules.json` is written last, so that it is never there alone.
SENTENCE_TRANSFORMERS_FILES: dict[str, Any] = {
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "token_embeddings", "method_output_name": None}},
        "module_output_name": "token_embeddings",
    },
    "1_Pooling/config.json": {"pooling_mode": "mean"},  # and "embedding_dimension", which depends on the model
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        },
    ],
}


# Names that users of options.json or of torch.nn.LSTM are likely to try, for each field.
OTHER_NAMES = {
    "char_cnn_activation": "activation",
    "char_cnn_filters": "filters",
    "char_embedding_size": "embedding_dim",
    "char_vocab_size": "char_vocab n_characters",
    "dropout": "dropout_rate",
    "lstm_hidden_size": "dim hidden_dim lstm_dim lstm_size",
    "max_word_length": "max_characters max_characters_per_token",
    "num_hidden_layers": "n_layer n_layers num_layer num_layers",
    "num_highway_layers": "n_highway num_highway",
    "projection_clip": "proj_clip",
    "projection_size": "proj_dim proj_size projection_dim",
    "vocab_size": "n_tokens_vocab vocabulary_size",
}
FIELD_OF_NAME = {name: field for field, names in OTHER_NAMES.items() for name in names.split()}

# Upper bounds, far above those of all models. Beyond them, a model takes minutes or all memory before its sizes are
# compared with the weights, or sizes of tensors overflow.
MOST_LAYERS, MOST_COLUMNS, MOST_ROWS, MOST_CHARACTERS = 100, 2**20, 2**24, 1000
MOST_CELLS = 2**40  # no matrix has them in both dimensions
MOST_LABELS = 2**16  # the base class gives each a name


@strict
class ELMoConfig(PreTrainedConfig):
    """Configuration of every ELMo model. The defaults are the released "original" model (93.6 M parameters).

    Token encoder (Kim et al. 2015; Jozefowicz et al. 2016):

    - vocab_size: words in the language model's output vocabulary, with `<PAD>`, `<S>`, `</S>`, `<UNK>`.
    - char_vocab_size: number of character ids, with 0 (padding word). 262: UTF-8 bytes and markers. 0: no characters.
    - char_embedding_size: width of a character vector.
    - char_cnn_filters: `[width, number]` of each convolution.
    - char_cnn_activation: `"relu"` or `"tanh"`, applied after the maximum over positions.
    - num_highway_layers: number of highway layers over the concatenated filters. Their nonlinearity is always relu.
    - max_word_length: character positions per word, with its begin and end markers.
    - word_embedding_size: width of a word vector, which is concatenated before the character features. With
      `char_vocab_size=0` the model is word-level and reads `input_ids`. 0: no word vectors.
    - vocabulary_cache_size: number of words whose vectors are saved with the model, set by
      `ELMoModel.cache_vocabulary`.

    biLM (section 3.1):

    - projection_size: width of the token vectors and of one direction's output. `hidden_size` is twice this.
    - lstm_hidden_size: width of the LSTM cell. If equal to `projection_size`: no projection, no projection clip,
      unless `always_project`.
    - num_hidden_layers: number of biLSTM layers.
    - cell_clip, projection_clip: bounds of the cell and of the projected state. `None`: no bound.
    - forget_bias: added to the forget gate at run time, never stored in the bias.
    - always_project: whether words and LSTM outputs are projected even if the widths are equal (ELMoForManyLangs).
    - use_skip_connections: whether, from layer 2 on, the output adds the layer's input.
    - dropout: dropout rate in pretraining, at the input of every LSTM layer and on the top output. A frozen
      biLM has none, but its top output in `ELMoForPreTraining` keeps it.
    - pad_token_id, bos_token_id, eos_token_id, unk_token_id: ids of `<PAD>`, `<S>`, `</S>`, `<UNK>`. Masks and the
      softmax need four different ids.

    Language model (`ELMoForPreTraining`):

    - softmax_type: `"full"`, `"sampled"` or `"adaptive"`.
    - num_sampled: number of candidates of the sampled softmax, less than `vocab_size - 1`.
    - adaptive_cutoffs: ranks of words at which the clusters of the adaptive softmax end. Default: a sixteenth and a
      quarter of the words.
    - has_softmax: False for a checkpoint that was published without its softmax.
    - tie_word_embeddings: whether the softmax is the table of the word vectors, which then has its width. Models
      without a softmax ignore it.

    Tasks (sections 3.2 and 3.3):

    - scalar_mix_mode: `"learned"` (equation 1), `"average"`, `"top"`, or the number of one layer (0: tokens).
    - scalar_mix_l2: lambda of `lambda * ||s||^2` on the raw layer weights, added to a head's loss.
    - scalar_mix_layer_norm: `None`, `"allennlp"` (over batch, time and width, with markers), `"bilm"` (the same
      without the first and last token of a row) or `"token"` (each vector separately; recommended).
    - elmo_dropout: dropout rate on the mixed vectors that a head reads.
    - elmo_placement: where ELMo enters a head's network: `"input"`, with the word vectors; `"output"`, with the
      output of the first biRNN (section 5.2); `"both"`, with a mix each; `"between"` the first and the second
      biLSTM of a tagger (TagLM, Peters et al. 2017). `None`: the default of the head's class.
    - freeze_bilm: whether a head's biLM has no gradients and stays in eval mode whatever `train()` says.
    - use_elmo: whether a head has a biLM. False builds the baseline, which reads only x_k.
    - head: `"paper"`, the networks of section 4, or `"linear"`, one linear layer on the mix.
    - classifier: the paper's network for whole texts: `"bcn"` (one text or two), `"esim"` (two), or `"linear"`.
    - task_hidden_size, task_dropout: hidden size and dropout rate of a head's network. Default: 200 and 0.5 (tagger),
      300 and 0.3 (bcn), 300 and 0.5 (esim), 90 and 0.2 (reader), 300 and 0.1 (roles), 200 and
      0.2 (coreference).
    - task_num_layers: number of layers of the LSTM. Default: 2 (tagger), 8 (roles), 1 (coreference).
    - task_word_embedding_size: width of the head's own word vectors, read by `input_ids`. 0: none.
    - freeze_word_embeddings: whether the head's word vectors stay fixed in training.
    - task_char_embedding_size, task_char_cnn_filters: the head's own character CNN, for models with characters. No
      filters: none.

    Coreference resolution (`ELMoForCoreferenceResolution`; Lee et al. 2017):

    - max_span_width: number of words of the longest span.
    - spans_per_word: number of spans that are kept, as a share of the document's words.
    - max_antecedents: number of earlier spans that each kept span is compared with.
    - train_singletons: whether mentions that corefer with no other are learned and returned.
    - lexical_dropout: dropout rate of word vectors and character features.
    - use_speakers: whether the network reads whether two spans have the same speaker.
    - num_genres: number of genres of documents. 0: the network does not read them.
    """

    model_type = "elmo"
    # Trainer does not gather these in evaluation. At the original size they take 16 KB per token and 74 KB per row. A
    # loss is among the predictions if Trainer misses a label.
    keys_to_ignore_at_inference = ["loss", "hidden_states", "elmo_embeddings", "final_states", "predictions"]
    keys_to_ignore_at_inference += ["antecedent_scores", "antecedents"]  # of coreference: 350,000 pairs in a document

    vocab_size: int = 4
    char_vocab_size: int = 262
    char_embedding_size: int = 16
    char_cnn_filters: list | tuple = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))
    char_cnn_activation: Literal["relu", "tanh"] = "relu"
    num_highway_layers: int = 2
    max_word_length: int = 50
    word_embedding_size: int = 0
    vocabulary_cache_size: int = 0
    projection_size: int = 512
    lstm_hidden_size: int = 4096
    num_hidden_layers: int = 2
    cell_clip: float | int | None = 3.0
    projection_clip: float | int | None = 3.0
    forget_bias: float | int = 1.0
    always_project: bool = False
    use_skip_connections: bool = True
    dropout: float | int = 0.1
    pad_token_id: int = 0
    bos_token_id: int = 1
    eos_token_id: int = 2
    unk_token_id: int = 3

    softmax_type: Literal["full", "sampled", "adaptive"] = "full"
    num_sampled: int = 8192
    adaptive_cutoffs: list | tuple | None = None
    has_softmax: bool = True
    tie_word_embeddings: bool = False

    scalar_mix_mode: str | int = "learned"
    scalar_mix_l2: float | int = 0.0
    scalar_mix_layer_norm: Literal["allennlp", "bilm", "token"] | None = None
    elmo_dropout: float | int = 0.5
    elmo_placement: Literal["input", "between", "output", "both"] | None = None
    freeze_bilm: bool = True
    use_elmo: bool = True
    head: Literal["paper", "linear"] = "paper"
    classifier: Literal["bcn", "esim", "linear"] = "bcn"
    task_hidden_size: int | None = None
    task_dropout: float | int | None = None
    task_num_layers: int | None = None
    task_word_embedding_size: int = 0
    freeze_word_embeddings: bool = False
    task_char_embedding_size: int = 16
    task_char_cnn_filters: list | tuple = ((3, 128),)

    max_span_width: int = 10
    spans_per_word: float | int = 0.4
    max_antecedents: int = 250
    train_singletons: bool = False
    lexical_dropout: float | int = 0.5
    use_speakers: bool = False
    num_genres: int = 0

    def __post_init__(self, **kwargs):
        self._refuse_near_misses(kwargs)
        if kwargs.pop("coarse_pruning", False):  # a field of the first commits
            raise ValueError("`coarse_pruning` is True, which this version cannot compute; train the resolver again.")
        hidden_size = kwargs.pop("hidden_size", None)
        is_dtype = isinstance(self.dtype, torch.dtype) or isinstance(getattr(torch, str(self.dtype), None), torch.dtype)
        _check(self.dtype is None or is_dtype, "dtype", self.dtype, "the name of a dtype of torch, such as 'float32'")
        labels = kwargs.get("num_labels") or 0
        _check(not isinstance(labels, int) or labels <= MOST_LABELS, "num_labels", labels, f"at most {MOST_LABELS}")
        super().__post_init__(**kwargs)
        # Auto classes with several models iterate over it.
        self.architectures = self.architectures or []  # type: ignore[has-type] # a field of the base class
        if hidden_size is not None:
            self.hidden_size = hidden_size
        for name in ("char_cnn_filters", "task_char_cnn_filters"):
            filters = getattr(self, name)  # copied, because they may belong to a preset
            setattr(self, name, [list(item) if isinstance(item, (list, tuple)) else item for item in filters])
        if self.adaptive_cutoffs is not None:
            self.adaptive_cutoffs = list(self.adaptive_cutoffs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        kwargs.setdefault("name_or_path", pretrained_model_name_or_path)  # for `from_dict`, as `AutoConfig` does
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        try:
            return super().from_dict(config_dict, **kwargs)
        except (AttributeError, StrictDataclassError, TypeError, ValueError) as error:
            if "name_or_path" in kwargs:
                error.args = (f"{kwargs['name_or_path']}: config.json: {error}",)
            raise

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "ELMoConfig":
        """The configuration of a released size (`"small"`, `"medium"`, `"original"`) or of the `"tiny"` test size.

        Args:
            name: name of the preset, one of `PRESETS`.
            overrides: fields that differ from the preset.
        """
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}; pass one of {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **overrides})

    @property
    def hidden_size(self) -> int:
        """Width of a contextual vector, which has both directions."""
        return 2 * self.projection_size

    @hidden_size.setter
    def hidden_size(self, value: int):
        is_valid = 1 <= self.projection_size <= MOST_COLUMNS  # else `validate_sizes` names it
        if is_valid and value != 2 * self.projection_size:
            raise ValueError(f"`hidden_size` is {value!r}; pass {2 * self.projection_size}, twice `projection_size`.")

    @property
    def num_features(self) -> int:
        """Width of a word before `token_projection`: word vector and character filters."""
        filters = sum(number for _, number in self.char_cnn_filters) if self.char_vocab_size else 0
        return self.word_embedding_size + filters

    @property
    def task_has_characters(self) -> bool:
        """Whether a head has a character CNN of its own."""
        return bool(self.char_vocab_size and self.task_char_cnn_filters)

    @property
    def has_projection(self) -> bool:
        """Whether the LSTM projects its output. The original has no projection if both widths are equal."""
        return self.always_project or self.lstm_hidden_size != self.projection_size

    @property
    def special_word_ids(self) -> dict[str, int]:
        """The ids of `<PAD>`, `<S>`, `</S>` and `<UNK>` by the names of their fields."""
        return {name: getattr(self, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")}

    @property
    def can_tie_softmax(self) -> bool:
        """Whether the softmax can be the table of the word vectors."""
        has_table = not self.char_vocab_size and self.softmax_type != "adaptive"
        return has_table and self.word_embedding_size == self.projection_size

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "hidden_size": self.hidden_size}

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json has: all fields of a head, and the fields of a biLM without the defaults of heads."""
        values = super().to_diff_dict()
        if not self.architectures or not set(self.architectures) <= {*BILM_CLASSES, "ELMoForCausalLM"}:
            return values
        defaults = type(self)().to_dict()
        for name in HEAD_FIELDS:
            if name in values and values[name] == defaults[name]:
                del values[name]
        return values

    def auto_map_of_folder(self) -> dict[str, str]:
        """The Auto map for a folder that is being saved, whose code has all our classes. Classes of others stay."""
        auto_map = dict(getattr(self, "auto_map", None) or {})
        for auto_class, names in AUTO_CLASS_NAMES.items():
            name = next((name for name in names if name in (self.architectures or [])), names[0])
            if auto_map.get(auto_class, name).rpartition(".")[2] not in names:
                continue
            if code_of_folder(*CODE_FILES):
                file = CODE_FILES[auto_class != "AutoConfig"]
                auto_map[auto_class] = f"{Path(file).stem}.{name}"
            else:
                auto_map.pop(auto_class, None)
        return auto_map

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs):
        """Saves the configuration and the code of the models, and names their classes in the Auto map.

        For a biLM, also saves the files of sentence-transformers, if they are missing. Models save their configuration
        through this method. With `push_to_hub` they upload what it writes.
        """
        self.auto_map = self.auto_map_of_folder()
        with saved_code(save_directory, CONFIG_NAME, *CODE_FILES):
            super().save_pretrained(save_directory, *args, **kwargs)
        is_bilm = bool(BILM_CLASSES & set(self.architectures or []))
        if is_bilm and not Path(save_directory, "modules.json").exists():
            for name, content in SENTENCE_TRANSFORMERS_FILES.items():
                path = Path(save_directory, name)
                path.parent.mkdir(exist_ok=True)
                if "pooling_mode" in content:
                    content = {"embedding_dimension": self.hidden_size, **content}
                path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _upload_modified_files(self, working_dir, repo_id, files_timestamps: dict[str, float], **options):
        for name in CODE_FILES:  # written before the stock method noted the times of the files
            files_timestamps.pop(name, None)
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **options)

    def _refuse_near_misses(self, kwargs: dict[str, Any]):
        fields = [name for name in type(self).__annotations__ if name not in PreTrainedConfig.__annotations__]
        for name in kwargs:
            similar = get_close_matches(name, [*fields, "hidden_size"], 1, 0.85)
            close = FIELD_OF_NAME.get(name) or (similar or [name])[0]
            if close != name:
                raise TypeError(f"ELMoConfig has no field `{name}`. Did you mean `{close}`?")

    def validate_sizes(self):
        """Checks that every size, clip and rate is in its range."""
        sizes = "projection_size lstm_hidden_size num_hidden_layers vocab_size num_sampled "
        sizes += "max_span_width max_antecedents task_hidden_size task_num_layers task_char_embedding_size"
        counts = "char_vocab_size num_highway_layers word_embedding_size vocabulary_cache_size scalar_mix_l2 "
        counts += "task_word_embedding_size num_genres"
        rates, bounds = "dropout elmo_dropout task_dropout lexical_dropout", "cell_clip projection_clip spans_per_word"
        layers = "num_hidden_layers num_highway_layers task_num_layers"
        widths = "projection_size word_embedding_size char_embedding_size "
        widths += "task_hidden_size task_word_embedding_size task_char_embedding_size"
        rows = "vocab_size char_vocab_size vocabulary_cache_size max_span_width num_genres"
        largest = sys.float_info.max
        for names, is_valid, expected in (
            (sizes, lambda value: value >= 1, "an integer of at least 1"),
            ("max_word_length", lambda value: value >= 3, "3 or more (two are markers)"),
            (counts, lambda value: value >= 0, "0 or more"),
            (layers, lambda value: value <= MOST_LAYERS, f"at most {MOST_LAYERS}"),
            (widths, lambda value: value <= MOST_COLUMNS, f"at most {MOST_COLUMNS}"),
            ("lstm_hidden_size", lambda value: value <= MOST_CELLS, f"at most {MOST_CELLS}"),
            (rows, lambda value: value <= MOST_ROWS, f"at most {MOST_ROWS}"),
            ("max_word_length", lambda value: value <= MOST_CHARACTERS, f"at most {MOST_CHARACTERS}"),
            ("forget_bias scalar_mix_l2", lambda value: abs(value) <= largest, "a finite number"),
            (rates, lambda value: 0 <= value < 1, "a rate in [0, 1)"),
            (bounds, lambda value: 0 < value <= largest, "a positive number (of a clip, None means no bound)"),
        ):
            for name in names.split():
                value = getattr(self, name)  # `None`, where the type allows it, has no range
                _check(value is None or is_valid(value), name, value, expected)

    def validate_token_encoder(self):
        """Checks that a word has characters, a vector, or both, and that the filters fit into it."""
        sizes = (self.char_vocab_size, self.word_embedding_size)
        names = "char_vocab_size, word_embedding_size"
        _check(any(sizes), names, sizes, "262 for UTF-8 characters, or the width of word vectors")
        if not self.char_vocab_size:
            return
        _check(self.char_embedding_size >= 1, "char_embedding_size", self.char_embedding_size, "1 or more")
        _check(bool(self.char_cnn_filters), "char_cnn_filters", self.char_cnn_filters, "at least one [width, number]")
        for name in ("char_cnn_filters", "task_char_cnn_filters"):
            number = len(getattr(self, name))
            _check(number <= MOST_LAYERS, name, f"{number} filters", f"at most {MOST_LAYERS}")
            for item in getattr(self, name):
                valid = isinstance(item, (list, tuple)) and [type(n) for n in item] == [int, int] and min(item) > 0
                valid = valid and item[0] <= self.max_word_length
                _check(valid, name, item, "pairs [width, number] of positive integers, widths up to `max_word_length`")
                _check(item[1] <= MOST_COLUMNS, name, item, f"numbers up to {MOST_COLUMNS}")

    def validate_words(self):
        """Checks that the four special words are in the vocabulary."""
        ids = self.special_word_ids
        valid = all(0 <= value < self.vocab_size for value in ids.values())
        _check(valid, "*_token_id", ids, f"ids below `vocab_size` ({self.vocab_size})")

    # Tools for all models give special words the same id, or set `tie_word_embeddings`. A model that reads neither is
    # right, so only masks and the softmax call these two checks.

    def check_special_words(self):
        """Raises an error if two special words share an id: a mask or a softmax would take one for the other."""
        ids = self.special_word_ids
        _check(len(set(ids.values())) == len(ids), "*_token_id", ids, "different ids, those of the tokenizer")

    def check_softmax(self):
        """Raises an error if special words share an id, or if the softmax cannot be the table that it should be."""
        self.check_special_words()
        names = ("char_vocab_size", "softmax_type", "word_embedding_size", "projection_size")
        values = {name: getattr(self, name) for name in names}
        expected = "it with a word-level model, whose word vectors are as wide as its full or sampled softmax, not with"
        valid = self.can_tie_softmax or not self.tie_word_embeddings
        _check(valid, "tie_word_embeddings", True, f"{expected} {values}")

    def validate_head(self):
        """Checks that a head's network has something to read."""
        reads_elmo = self.use_elmo and self.elmo_placement not in ("between", "output")
        reads = reads_elmo or self.task_word_embedding_size or self.task_has_characters
        expected = "`task_word_embedding_size` or `task_char_cnn_filters`, because no ELMo is at the head's input"
        _check(bool(reads), "use_elmo, elmo_placement", (self.use_elmo, self.elmo_placement), expected)

    def validate_layers(self):
        """Checks that the mix names an existing layer, and that the cutoffs of the adaptive softmax ascend."""
        mode, layers = self.scalar_mix_mode, self.num_hidden_layers
        valid = mode in ("learned", "average", "top") if isinstance(mode, str) else 0 <= mode <= layers
        _check(valid, "scalar_mix_mode", mode, f"'learned', 'average', 'top' or a layer number from 0 to {layers}")
        cutoffs, words = self.adaptive_cutoffs, self.vocab_size - 1  # without <PAD>
        if cutoffs is not None:
            valid = bool(cutoffs) and all(isinstance(cut, int) for cut in cutoffs) and sorted({*cutoffs}) == [*cutoffs]
            valid = valid and cutoffs[0] > 0 and cutoffs[-1] < words
            expected = f"ascending integers between 0 and `vocab_size - 1` ({words}), or None"
            _check(valid, "adaptive_cutoffs", cutoffs, expected)


def _check(valid: bool, field: str, value: Any, expected: str):
    if not valid:
        raise ValueError(f"`{field}` is {value!r}; pass {expected}.")
