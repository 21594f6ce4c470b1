"""ELMo configuration: the options of the biLM (Peters et al. 2018, section 3) under Hugging Face's names."""

import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

# Released model sizes (https://allenai.org/allennlp, options.json of each), and one for tests.
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

# `save_pretrained` records only the class that it saves, so the whole map is written here: every folder loads under
# every Auto class, with or without the package.
AUTO_MAP = {
    "AutoConfig": "configuration_elmo.ELMoConfig",
    "AutoModel": "modeling_elmo.ELMoModel",
    "AutoModelForPreTraining": "modeling_elmo.ELMoForPreTraining",
    "AutoModelForTokenClassification": "modeling_elmo.ELMoForTokenClassification",
    "AutoModelForSequenceClassification": "modeling_elmo.ELMoForSequenceClassification",
    "AutoModelForQuestionAnswering": "modeling_elmo.ELMoForQuestionAnswering",
}

# What sentence-transformers looks for in a folder: one module, its own, with the name of our method to call. Its
# `Pooling` would count the markers. `modules.json` is written last: where it is, the other is too.
SENTENCE_TRANSFORMERS_FILES: dict[str, Any] = {
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "sentence_embeddings", "method_output_name": None}},
        "module_output_name": "sentence_embedding",
    },
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    ],
}

# What people who come from options.json or from torch.nn.LSTM type first.
OTHER_NAMES = {
    "activation": "char_cnn_activation",
    "char_vocab": "char_vocab_size",
    "dim": "lstm_hidden_size",
    "dropout_rate": "dropout",
    "embedding_dim": "char_embedding_size",
    "filters": "char_cnn_filters",
    "hidden_dim": "lstm_hidden_size",
    "lstm_dim": "lstm_hidden_size",
    "lstm_size": "lstm_hidden_size",
    "max_characters": "max_word_length",
    "max_characters_per_token": "max_word_length",
    "n_characters": "char_vocab_size",
    "n_highway": "num_highway_layers",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_tokens_vocab": "vocab_size",
    "num_highway": "num_highway_layers",
    "num_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "proj_clip": "projection_clip",
    "proj_dim": "projection_size",
    "proj_size": "projection_size",
    "projection_dim": "projection_size",
    "vocabulary_size": "vocab_size",
}


@strict
class ELMoConfig(PreTrainedConfig):
    """Configuration of every ELMo model. The defaults are the released "original" model (93.6 M parameters).

    Token encoder (Kim et al. 2015; Jozefowicz et al. 2016):
        vocab_size: words of the language model's output vocabulary, `<PAD>`, `<S>`, `</S>`, `<UNK>` included.
        char_vocab_size: character ids, 0 (padding word) included; 262 are UTF-8 bytes with markers. 0: no characters.
        char_embedding_size: width of a character vector.
        char_cnn_filters: `[width, number]` of each convolution.
        char_cnn_activation: `"relu"` or `"tanh"`, applied after the maximum over positions.
        num_highway_layers: highway layers over the concatenated filters (their nonlinearity is always relu).
        max_word_length: character positions of a word, its begin and end markers included.
        word_embedding_size: width of a word vector that stands before the character features; with
            `char_vocab_size=0` the model is word-level and reads `input_ids`. 0: no word vectors.
        vocabulary_cache_size: words whose vectors are saved with the model; `ELMoModel.cache_vocabulary` sets it.

    biLM (section 3.1):
        projection_size: width of the token vectors and of one direction's output; `hidden_size` is twice this.
        lstm_hidden_size: width of the LSTM cell. Equal to `projection_size`: no projection and no projection clip.
        num_hidden_layers: biLSTM layers.
        cell_clip, projection_clip: bounds of the cell and of the projected state; `None`: no bound.
        forget_bias: added to the forget gate at run time, never stored in the bias.
        use_skip_connections: from layer 2 on, the output adds the layer's input.
        dropout: at the input of every LSTM layer and on the top output in pretraining; off while the biLM is frozen.
        pad_token_id, bos_token_id, eos_token_id, unk_token_id: ids of `<PAD>`, `<S>`, `</S>`, `<UNK>`.

    Language model (`ELMoForPreTraining`):
        softmax_type: `"full"`, `"sampled"` or `"adaptive"`.
        num_sampled: candidates of the sampled softmax, fewer than the words to predict.
        adaptive_cutoffs: cluster borders of the adaptive softmax, ranks of words. Default: a sixteenth and a quarter of
            the words.
        has_softmax: False for a checkpoint whose softmax was not published.

    Tasks (section 3.2 and 3.3):
        scalar_mix_mode: `"learned"` (equation 1), `"average"`, `"top"`, or the number of one layer (0: tokens).
        scalar_mix_l2: lambda of `lambda * ||s||^2` on the raw layer weights, added to a head's loss.
        scalar_mix_layer_norm: `None`, `"allennlp"` (over batch, time and width, markers counted), `"bilm"` (the same
            without the first and last token of a row) or `"token"` (each vector on its own; recommended).
        elmo_dropout: on the mixed vectors that a head reads.
        elmo_placement: `"input"`, `"output"` or `"both"`: whether ELMo stands beside the word vectors that a head's own
            network reads, beside what its first biRNN puts out (section 5.2), or both, each with a mix of its own.
        freeze_bilm: a head's biLM gets no gradients and stays in eval mode whatever `train()` says.
        use_elmo: False builds a head's network without ELMo, the baseline: it reads x_k alone.
        head: `"paper"`, the networks of section 4, or `"linear"`, one linear layer on the mix.
        classifier: the paper's network for whole texts: `"bcn"` (one text or two), `"esim"` (two), or `"linear"`.
        task_hidden_size, task_dropout: of a head's own network. Default: 200 and 0.5 (tagger), 300 and 0.3 (bcn), 300
            and 0.5 (esim), 90 and 0.2 (reader).
        task_num_layers: biLSTM layers of the tagger.
        task_word_embedding_size: width of the head's own word vectors, by `input_ids`. 0: none.
        freeze_word_embeddings: keeps the head's word vectors as they are.
        task_char_embedding_size, task_char_cnn_filters: of the head's own character CNN, where there are characters. No
            filters: none.
    """

    model_type = "elmo"
    # What Trainer need not gather in evaluation: at the original size 16 KB a token and 74 KB a row.
    keys_to_ignore_at_inference = ["hidden_states", "elmo_embeddings", "final_states", "predictions"]

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

    scalar_mix_mode: str | int = "learned"
    scalar_mix_l2: float | int = 0.0
    scalar_mix_layer_norm: Literal["allennlp", "bilm", "token"] | None = None
    elmo_dropout: float | int = 0.5
    elmo_placement: Literal["input", "output", "both"] | None = None
    freeze_bilm: bool = True
    use_elmo: bool = True
    head: Literal["paper", "linear"] = "paper"
    classifier: Literal["bcn", "esim", "linear"] = "bcn"
    task_hidden_size: int | None = None
    task_dropout: float | int | None = None
    task_num_layers: int = 2
    task_word_embedding_size: int = 0
    freeze_word_embeddings: bool = False
    task_char_embedding_size: int = 16
    task_char_cnn_filters: list | tuple = ((3, 128),)

    def __post_init__(self, **kwargs):
        self._refuse_near_misses(kwargs)
        hidden_size = kwargs.pop("hidden_size", None)
        # A copy for each config: saving writes into it.
        kwargs["auto_map"] = {**AUTO_MAP, **(kwargs.get("auto_map") or {})}
        super().__post_init__(**kwargs)
        if hidden_size is not None:
            self.hidden_size = hidden_size
        for name in ("char_cnn_filters", "task_char_cnn_filters"):
            filters = getattr(self, name)  # copied, as they may be those of a preset
            setattr(self, name, [list(item) if isinstance(item, (list, tuple)) else item for item in filters])
        if self.adaptive_cutoffs is not None:
            self.adaptive_cutoffs = list(self.adaptive_cutoffs)

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "ELMoConfig":
        """The configuration of a released size (`"small"`, `"medium"`, `"original"`) or of the `"tiny"` test size.

        Args:
            name: one of `PRESETS`.
            overrides: fields that differ from the preset.
        """
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}; pass one of {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **overrides})

    @property
    def hidden_size(self) -> int:
        """Width of a contextual vector: both directions."""
        return 2 * self.projection_size

    @hidden_size.setter
    def hidden_size(self, value: int):
        if value != 2 * self.projection_size:
            raise ValueError(
                f"`hidden_size` is {value}, but it is twice `projection_size` ({self.projection_size}). "
                f"Pass `projection_size={value / 2:g}` instead."
            )

    @property
    def num_features(self) -> int:
        """Width of a word before `token_projection`: its word vector and its character filters."""
        filters = sum(number for _, number in self.char_cnn_filters) if self.char_vocab_size else 0
        return self.word_embedding_size + filters

    @property
    def task_has_characters(self) -> bool:
        """Whether a head of the paper has a character CNN of its own."""
        return bool(self.char_vocab_size and self.task_char_cnn_filters)

    @property
    def has_projection(self) -> bool:
        """Whether the LSTM projects its output; the original leaves the projection out when the widths agree."""
        return self.lstm_hidden_size != self.projection_size

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "hidden_size": self.hidden_size}

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs):
        """As transformers', and beside a biLM what sentence-transformers reads, if there is no `modules.json` yet.

        Models save their configuration through this; with `push_to_hub` they upload only what is written meanwhile.
        """
        super().save_pretrained(save_directory, *args, **kwargs)
        is_bilm = bool({"ELMoModel", "ELMoForPreTraining"} & set(self.architectures or []))
        if is_bilm and not Path(save_directory, "modules.json").exists():
            for name, content in SENTENCE_TRANSFORMERS_FILES.items():
                Path(save_directory, name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _refuse_near_misses(self, kwargs: dict[str, Any]):
        fields = [name for name in type(self).__annotations__ if name not in PreTrainedConfig.__annotations__]
        for name in kwargs:
            close = OTHER_NAMES.get(name) or next(
                iter(get_close_matches(name, [*fields, "hidden_size"], 1, 0.85)), name
            )
            if close != name:
                raise TypeError(f"ELMoConfig has no field `{name}`. Did you mean `{close}`?")

    def validate_sizes(self):
        """Every size, clip and rate lies in its range."""
        for name in ("projection_size", "lstm_hidden_size", "num_hidden_layers", "vocab_size", "num_sampled"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "an integer of at least 1")
        for name in ("char_vocab_size", "num_highway_layers", "word_embedding_size", "vocabulary_cache_size"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("dropout", "elmo_dropout"):
            _check(0 <= getattr(self, name) < 1, name, getattr(self, name), "a rate in [0, 1)")
        for name in ("cell_clip", "projection_clip"):
            value = getattr(self, name)
            _check(value is None or value > 0, name, value, "a positive bound, or None for no bound")
        _check(self.scalar_mix_l2 >= 0, "scalar_mix_l2", self.scalar_mix_l2, "0 or more")

    def validate_token_encoder(self):
        """A word has characters, a vector, or both, and the filters fit into it."""
        if not self.char_vocab_size and not self.word_embedding_size:
            raise ValueError(
                "`char_vocab_size` and `word_embedding_size` are both 0: the model would read nothing. Pass "
                "`char_vocab_size=262` for UTF-8 characters or `word_embedding_size` for a word-level model."
            )
        if not self.char_vocab_size:
            return
        _check(self.char_embedding_size >= 1, "char_embedding_size", self.char_embedding_size, "1 or more")
        _check(self.max_word_length >= 3, "max_word_length", self.max_word_length, "3 or more (two are markers)")
        _check(bool(self.char_cnn_filters), "char_cnn_filters", self.char_cnn_filters, "at least one [width, number]")
        self._check_filters("char_cnn_filters")
        self._check_filters("task_char_cnn_filters")

    def _check_filters(self, name: str):
        for item in getattr(self, name):
            valid = isinstance(item, list) and len(item) == 2 and all(type(n) is int and n > 0 for n in item)
            _check(valid, name, item, "pairs [width, number] of positive integers")
            _check(item[0] <= self.max_word_length, name, item, "widths up to `max_word_length`")

    def validate_special_tokens(self):
        """The four special words have ids of their own inside the vocabulary."""
        names = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")
        ids = {name: getattr(self, name) for name in names}
        for name, value in ids.items():
            _check(0 <= value < self.vocab_size, name, value, f"an id below `vocab_size` ({self.vocab_size})")
        if len(set(ids.values())) < len(ids):
            raise ValueError(f"Special words share an id: {ids}. Pass a different id for each.")

    def validate_head(self):
        """A head's network has sizes that exist, and something to read."""
        for name in ("task_hidden_size", "task_num_layers", "task_char_embedding_size"):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, value, "an integer of at least 1")
        _check(
            self.task_word_embedding_size >= 0, "task_word_embedding_size", self.task_word_embedding_size, "0 or more"
        )
        _check(
            self.task_dropout is None or 0 <= self.task_dropout < 1,
            "task_dropout",
            self.task_dropout,
            "a rate in [0, 1)",
        )
        if self.head == "linear" and not (self.use_elmo and self.elmo_placement in (None, "input")):
            raise ValueError(
                f"The linear head is a layer on ELMo, at its input; got use_elmo={self.use_elmo} and elmo_placement="
                f"{self.elmo_placement!r}. Pass head='paper' for a network of its own."
            )
        reads_elmo = self.use_elmo and self.elmo_placement != "output"
        if not (reads_elmo or self.task_word_embedding_size or self.task_has_characters):
            raise ValueError(
                "Without ELMo at its input a head's network reads its own word vectors or characters, and it has "
                "neither: pass `task_word_embedding_size` or `task_char_cnn_filters`."
            )

    def validate_tasks(self):
        """The mix names a layer that exists; the cutoffs of the adaptive softmax rise inside the vocabulary."""
        mode, layers = self.scalar_mix_mode, self.num_hidden_layers
        valid = mode in ("learned", "average", "top") if isinstance(mode, str) else 0 <= mode <= layers
        _check(valid, "scalar_mix_mode", mode, f"'learned', 'average', 'top' or a layer number from 0 to {layers}")
        cutoffs = self.adaptive_cutoffs
        if cutoffs is not None:
            rising = all(isinstance(cut, int) for cut in cutoffs) and sorted({*cutoffs}) == cutoffs
            words = self.vocab_size - 1  # without <PAD>
            valid = bool(cutoffs) and rising and cutoffs[0] > 0 and cutoffs[-1] < words
            _check(valid, "adaptive_cutoffs", cutoffs, f"rising integers between 0 and `vocab_size - 1` ({words})")


def _check(valid: bool, field: str, value: Any, expected: str):
    if not valid:
        raise ValueError(f"`{field}` is {value!r}; pass {expected}.")


__all__ = ["ELMoConfig"]
