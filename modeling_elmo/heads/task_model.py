"""What all task models share (section 3.3): a biLM, the mixes of its layers, and word features of the head's own.

A head's network reads `[x_k; ELMo_k]`. `x_k` are word vectors and a character CNN that are trained with the task. The
networks compute real tokens only.

Shape suffixes, in all heads: B rows of the batch; T time; N real tokens of the batch, row after row; D width of the
words that a network reads; E width of an ELMo vector; H width of an encoder's output; K labels.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils import logging

from ..base import ELMoPreTrainedModel
from ..configuration_elmo import ELMoConfig
from ..encoder import distinct_rows
from ..inputs import (
    NO_LABEL,
    check_floats,
    check_ids,
    check_range,
    forward_of_model,
    option_that_takes_labels,
    pad,
    token_mask,
    unpad,
    warn_once,
)
from ..kernels.torch_state import is_exporting, is_hooked, to_device
from ..modeling_elmo import ELMoCharacterEncoder, ELMoModel, ScalarMix
from .recurrence import VariationalDropout

logger = logging.get_logger(__name__)

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class TokenFeatures(nn.Module):
    """Word vectors for `input_ids` and a character CNN, both trained with the task. One of the two may be missing.

    Args:
        config: the head's options.
        word_vector_std: standard deviation of new word vectors. Default: vectors have length 1.
    """

    def __init__(self, config: ELMoConfig, word_vector_std: float | None = None):
        super().__init__()
        width = config.task_word_embedding_size
        self.word_vector_std = word_vector_std
        self.word_embeddings = nn.Embedding(config.vocab_size, width, config.pad_token_id) if width else None
        self.char_encoder = None
        self.output_size = width
        if config.task_has_characters:
            self.char_encoder = ELMoCharacterEncoder(_character_config(config))
            self.output_size += sum(number for _, number in config.task_char_cnn_filters)

    def initialize_parameters(self):
        if self.word_embeddings is not None:
            std = self.word_vector_std or self.word_embeddings.embedding_dim**-0.5
            init.normal_(self.word_embeddings.weight, std=std)

    def forward(self, character_ids: Tensor | None, input_ids: Tensor | None, mask_BT: Tensor) -> Tensor:
        """`x_k` of every real token: `(tokens, output_size)`."""
        features = []
        if self.word_embeddings is not None:
            assert input_ids is not None
            features.append(self.word_embeddings(unpad(input_ids, mask_BT).long()))
        if self.char_encoder is not None:
            assert character_ids is not None
            if is_hooked(self.char_encoder) or is_exporting():  # a hook sees every position
                features.append(unpad(self.char_encoder(character_ids.long()), mask_BT))
            else:
                distinct_UW, index_N = distinct_rows(unpad(character_ids.long(), mask_BT))
                features.append(self.char_encoder(distinct_UW)[index_N])
        return torch.cat(features, dim=-1)


def _character_config(config: ELMoConfig) -> ELMoConfig:
    """The configuration of the head's own character encoder."""
    return ELMoConfig(
        char_vocab_size=config.char_vocab_size,
        char_embedding_size=config.task_char_embedding_size,
        char_cnn_filters=config.task_char_cnn_filters,
        num_highway_layers=0,
        max_word_length=config.max_word_length,
    )


def _hub_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in HUB_OPTIONS}


def _wanted_config(name: Any, options: dict[str, Any]) -> tuple[ELMoConfig, dict[str, Any]]:
    """The configuration that options of `from_pretrained` describe, and the other options."""
    given = options.get("config")
    others = {key: value for key, value in options.items() if key not in ("config", "pretrained_model_name_or_path")}
    if isinstance(given, PreTrainedConfig):  # of a class of its own, where a folder's code is loaded twice
        return given, others
    return ELMoConfig.from_pretrained(given or name, return_unused_kwargs=True, **others)


LONGEST_ROW = 2**14  # tokens; to compare two such texts takes 1 GB
Placement = Literal["input", "between", "output", "both"]


class NetworkDefaults(NamedTuple):
    """Options of a head's network that the configuration may leave open."""

    hidden_size: int
    dropout: float
    num_layers: int = 1
    # Standard deviation of new word vectors. `None`: vectors of length 1.
    word_vector_std: float | None = None


NETWORK_DEFAULTS = {
    "linear": NetworkDefaults(0, 0.0),
    "tagger": NetworkDefaults(200, 0.5, num_layers=2),
    "roles": NetworkDefaults(300, 0.1, num_layers=8),
    "coreference": NetworkDefaults(200, 0.2),
    "bcn": NetworkDefaults(300, 0.3),
    "esim": NetworkDefaults(300, 0.5),
    # The reader's attention multiplies word vectors and learns late if they are small; GloVe's deviate by about 0.4.
    # (A tagger without ELMo loses 4 points of accuracy with 0.4.)
    "reader": NetworkDefaults(90, 0.2, word_vector_std=0.4),
}


class TaskInputs(NamedTuple):
    """Input of a head's network: vectors of the real tokens.

    Shape:
        tokens_ND: `(tokens, width)`, `[x_k; ELMo_k]`, or one of the two.
        between_NE: `(tokens, hidden_size)`, ELMo for the input of a tagger's second biLSTM, or `None`.
        output_NE: the same for the output of the first biRNN.
        mask_BT: `(batch, time)` bool, the token mask.
        hidden_states: the layers of the biLM, each `(tokens, hidden_size)`, or `None` without a biLM.
    """

    tokens_ND: Tensor
    between_NE: Tensor | None
    output_NE: Tensor | None
    mask_BT: Tensor
    hidden_states: tuple[Tensor, ...] | None


def row_numbers(mask_BT: Tensor) -> Tensor:
    """The row of each real token: `(tokens,)`."""
    rows_B = torch.arange(mask_BT.shape[0], device=mask_BT.device)
    return unpad(rows_B[:, None].expand_as(mask_BT), mask_BT)


def is_second(token_type_ids: Tensor, mask_BT: Tensor) -> Tensor:
    """The tokens of the second text, `(batch, time)` bool. Raises an error if `token_type_ids` name a third text."""
    types_BT = token_type_ids.masked_fill(~mask_BT, 0)
    if ((types_BT != 0) & (types_BT != 1)).any():
        raise ValueError(
            f"`token_type_ids` has values from {types_BT.min()} to {types_BT.max()}; pass 0 at the first text and 1 at "
            "the second."
        )
    return types_BT == 1


def reads_batch(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward_of_model` for the `forward` of a head, whose inputs and labels may be on the CPU, as the biLM's may."""

    def moved(value: Any, device: torch.device) -> Any:
        return to_device(value, device) if isinstance(value, Tensor) else value

    @wraps(forward)
    def on_device(self, *args, **kwargs):
        args = tuple(moved(value, self.device) for value in args)
        for name, value in kwargs.items():
            kwargs[name] = moved(value, self.device)
        return forward(self, *args, **kwargs)

    return forward_of_model(on_device)


class ELMoTaskModel(ELMoPreTrainedModel):
    """Common part of all heads (section 3.3).

    A biLM, frozen unless `freeze_bilm` is False; a mix of its layers at each place where ELMo enters; and `x_k`: word
    vectors and a character CNN that are trained with the task.

    Attributes:
        network: the key of `NETWORK_DEFAULTS` unless the head is linear.
        default_elmo_placement: where ELMo enters the network if the configuration does not say.
    """

    network: str
    default_elmo_placement: Placement = "input"

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        config.validate_head()
        placement = self.resolve_elmo_placement(config)
        network = self.network_name(config)
        defaults = NETWORK_DEFAULTS[network]
        self.is_linear = network == "linear"
        self.task_hidden_size = config.task_hidden_size or defaults.hidden_size
        self.task_dropout = defaults.dropout if config.task_dropout is None else config.task_dropout
        self.task_num_layers = config.task_num_layers or defaults.num_layers
        self.num_labels = config.num_labels
        # Not named `scalar_mix`, as the biLM's own mix is: loading would confuse the two.
        self.input_mix = self.between_mix = self.output_mix = None
        if config.use_elmo:  # transformers would take an attribute `elmo` that is `None` for the base model
            self.elmo = ELMoModel(config, add_mixing_layer=False)
            self.input_mix = ScalarMix(config) if placement in ("input", "both") else None
            self.between_mix = ScalarMix(config) if placement == "between" else None
            self.output_mix = ScalarMix(config) if placement in ("output", "both") else None
        self.input_size = config.hidden_size if self.input_mix else 0
        self.output_elmo_size = config.hidden_size if self.output_mix else 0
        self.dropout = nn.Dropout(config.elmo_dropout)
        self.feature_dropout: nn.Module = VariationalDropout(self.task_dropout)
        self.token_features = None
        if not self.is_linear and (config.task_word_embedding_size or config.task_has_characters):
            self.token_features = TokenFeatures(config, defaults.word_vector_std)
            self.input_size += self.token_features.output_size

    @classmethod
    def network_name(cls, config: ELMoConfig) -> str:
        """The key of `NETWORK_DEFAULTS` that the configuration selects for this class."""
        return "linear" if config.head == "linear" else cls.network

    @classmethod
    def resolve_elmo_placement(cls, config: ELMoConfig) -> Placement:
        """Where ELMo enters the network: `config.elmo_placement`, or the default of this class if it is `None`.

        Raises:
            ValueError: a linear head without ELMo, or with ELMo anywhere but at its input; another head than a tagger,
                or a tagger of one biLSTM, with ELMo between two.
        """
        network = cls.network_name(config)
        if config.elmo_placement == "between" and (network != "tagger" or config.task_num_layers == 1):
            raise ValueError(
                "elmo_placement='between' is the place between two biLSTMs of a tagger, but this is "
                f"{cls.__name__} with head={config.head!r} and task_num_layers={config.task_num_layers}. Pass 'input', "
                "'output' or 'both'."
            )
        if network != "linear":
            return config.elmo_placement or cls.default_elmo_placement
        if not config.use_elmo or config.elmo_placement not in (None, "input"):
            raise ValueError(
                f"A linear head reads ELMo at its input, but use_elmo={config.use_elmo} and elmo_placement="
                f"{config.elmo_placement!r}. Pass head='paper' (and classifier='bcn') for a network of its own."
            )
        return "input"

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers. `num_labels` or `id2label` may differ from a saved head: see `choose_labels`.

        Labels without names of their own take those of the head. With `ignore_mismatched_sizes`, all are new.
        """
        name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        asks_for_labels = bool({"config", "num_labels", "id2label"} & kwargs.keys())
        if name is None or not asks_for_labels or kwargs.get("ignore_mismatched_sizes"):
            return super().from_pretrained(*args, output_loading_info=output_loading_info, **kwargs)
        saved = ELMoConfig.from_pretrained(name, **_hub_options(kwargs))
        wanted, options = _wanted_config(name, kwargs)
        if saved.architectures != [cls.__name__] or wanted.id2label == saved.id2label:
            return super().from_pretrained(*args, output_loading_info=output_loading_info, **kwargs)
        config = deepcopy(wanted)
        config.id2label, config.label2id = saved.id2label, saved.label2id
        options |= {**_hub_options(kwargs), "config": config}
        model, info = super().from_pretrained(name, *args[1:], output_loading_info=True, **options)
        labels, own = list(wanted.id2label.values()), list(saved.id2label.values())
        if labels == [f"LABEL_{number}" for number in range(len(labels))]:
            labels = [*own[: len(labels)], *labels[len(own) :]]
        model.choose_labels(labels)
        return (model, info) if output_loading_info else model

    def label_layers(self) -> list[nn.Module]:
        """The layers all of whose parameters have a row, and in a CRF also a column, for each label."""
        return []

    @torch.no_grad()
    def choose_labels(self, labels: Sequence[str]):
        """Replaces the labels. Those that the head has keep their weights, and new ones begin as in a new head.

        Raises:
            ValueError: the head has no labels, its weights are on disk, or a label is given twice.
        """
        layers, present = self.label_layers(), list(self.label_names())
        if not layers or self.config.problem_type == "regression":
            raise ValueError(f"This {type(self).__name__} has no labels to choose; leave them out.")
        if not labels or len({*labels}) < len(labels):
            raise ValueError(f"The labels are {list(labels)}; pass one or more, each once.")
        if any(parameter.is_meta for layer in layers for parameter in layer.parameters()):
            raise ValueError("The weights of the labels are offloaded by `device_map`; load them on a device.")
        rows_of = {label: row for row, label in enumerate(present)}
        sources_K = torch.tensor([rows_of.get(label, -1) for label in labels], device="cpu")
        for layer in layers:
            self._choose_rows_of_labels(layer, sources_K)
        self.num_labels = len(labels)
        self.config.id2label = dict(enumerate(labels))
        self.config.label2id = {label: number for number, label in enumerate(labels)}
        changes = {
            "new, and not trained": [label for label in labels if label not in present],
            "left out": [label for label in present if label not in labels],
        }
        named = [f"{what}: {', '.join(which)}" for what, which in changes.items() if which]
        if named:
            logger.warning(f"{type(self).__name__} keeps {int((sources_K >= 0).sum())} labels; {'; '.join(named)}.")

    def _choose_rows_of_labels(self, layer: nn.Module, sources_K: Tensor):
        """New parameters, as of a new head, with the rows of the present ones; -1 where a label has none."""
        before = dict(layer.named_parameters(recurse=False))
        is_linear = isinstance(layer, nn.Linear)  # else, a table of two labels has columns of labels, too
        for name, old in before.items():
            dims = 1 if is_linear else old.dim()
            fresh = old.new_empty(*[len(sources_K)] * dims, *old.shape[dims:])
            setattr(layer, name, nn.Parameter(fresh, old.requires_grad))
        self._init_labels(layer)
        rows = (sources_K >= 0).nonzero()[:, 0]
        sources = sources_K[rows]
        for name, old in before.items():
            fresh = getattr(layer, name)
            if old.dim() == 1 or is_linear:
                fresh[rows] = old[sources]
            else:
                fresh[rows[:, None], rows] = old[sources[:, None], sources]
        if isinstance(layer, nn.Linear):
            layer.out_features = len(sources_K)

    def _init_labels(self, layer: nn.Module):
        """As in a new head."""
        self._init_weights(layer)

    def _freeze_as_configured(self):
        if self.config.use_elmo and self.config.freeze_bilm:
            self.elmo.freeze()
        if self.token_features is not None and self.token_features.word_embeddings is not None:
            self.token_features.word_embeddings.requires_grad_(not self.config.freeze_word_embeddings)

    def get_input_embeddings(self) -> nn.Embedding:
        """The biLM's embedding; without a biLM, the head's own word vectors or characters."""
        if self.config.use_elmo:
            return self.elmo.get_input_embeddings()
        features = self.token_features
        return features.word_embeddings or features.char_encoder.char_embeddings

    def set_input_embeddings(self, value: nn.Embedding):
        """Replaces what `get_input_embeddings` returns, by a table of the same shape."""
        if self.config.use_elmo:
            self.elmo.set_input_embeddings(value)
        elif self.token_features.word_embeddings is not None:
            self.token_features.word_embeddings = value
        else:
            self.token_features.char_encoder.char_embeddings = value
        self._freeze_as_configured()

    def mixes(self) -> dict[str, ScalarMix]:
        """The mix at each place where ELMo enters: `"input"`, `"between"`, `"output"`."""
        places = {"input": self.input_mix, "between": self.between_mix, "output": self.output_mix}
        return {place: mix for place, mix in places.items() if mix is not None}

    def penalty(self) -> Tensor | float:
        """`lambda * ||s||^2` of all mixes, a part of the loss."""
        return sum((mix.penalty() for mix in self.mixes().values()), 0.0)

    def read(
        self, character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, elmo_hidden_states
    ) -> TaskInputs:
        """Checks a head's inputs and embeds its tokens."""
        inputs = (character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds)
        mask_BT = token_mask(self.config, *inputs)
        if not is_exporting() and mask_BT.shape[1] > LONGEST_ROW:
            raise ValueError(
                f"The longest row has {mask_BT.shape[1]} tokens. Heads read up to {LONGEST_ROW}: split it."
            )
        layers = None
        if elmo_hidden_states is not None:
            layers = self._given_layers(elmo_hidden_states, mask_BT)
        elif self.config.use_elmo:
            layers = self.bilm_layers(inputs, mask_BT)
        elmo: dict[str, Tensor] = {}
        for place, mix in self.mixes().items():
            elmo[place] = self.dropout(mix(layers, mask_BT))
        tokens = []
        if self.token_features is not None:
            self._check_features(inputs_embeds, character_ids, input_ids)
            features_ND = self.token_features(character_ids, input_ids, mask_BT)
            tokens.append(self._drop_out(features_ND, mask_BT))
        if "input" in elmo:
            tokens.append(elmo["input"])
        return TaskInputs(
            tokens_ND=torch.cat(tokens, dim=-1),
            between_NE=elmo.get("between"),
            output_NE=elmo.get("output"),
            mask_BT=mask_BT,
            hidden_states=layers,
        )

    def bilm_layers(self, inputs: tuple[Tensor | None, ...], mask_BT: Tensor) -> tuple[Tensor, ...]:
        """All layers of the biLM at the real tokens, each `(tokens, hidden_size)`. The inputs are as for `read`."""
        return self.elmo(*inputs, unpadded=True, return_dict=True).hidden_states

    def _drop_out(self, features_ND: Tensor, mask_BT: Tensor) -> Tensor:
        return self.feature_dropout(features_ND, row_numbers(mask_BT))

    def label_names(self) -> tuple[str, ...]:
        """The names of the labels in the order of their ids.

        Raises:
            ValueError: an id has no name.
        """
        names = self.config.id2label
        are_texts = all(isinstance(name, str) for name in names.values())
        if not are_texts or set(names) != set(range(self.num_labels)):
            raise ValueError(f"`config.id2label` is {names}; pass a name for each id from 0 to {self.num_labels - 1}.")
        return tuple(names[label] for label in range(self.num_labels))

    def _checked_labels(self, labels: Tensor, mask_BT: Tensor) -> Tensor:
        """Labels of words as int64: an unsigned type has no -100."""
        check_ids("labels", labels, tuple(mask_BT.shape))
        labels = labels.long()
        check_range("labels", labels[labels != NO_LABEL], self.num_labels, "load it with num_labels=...")
        return labels

    def _given_layers(self, elmo_hidden_states: Tensor, mask_BT: Tensor) -> tuple[Tensor, ...]:
        if not (self.config.use_elmo and self.config.freeze_bilm):
            raise ValueError(
                f"`elmo_hidden_states` need a frozen biLM, but use_elmo={self.config.use_elmo} and freeze_bilm="
                f"{self.config.freeze_bilm}. Leave them out, or set both options."
            )
        batch, time = mask_BT.shape
        shape = (batch, self.config.num_hidden_layers + 1, time, self.config.hidden_size)
        check_floats("elmo_hidden_states", elmo_hidden_states, shape)
        layers = elmo_hidden_states.to(self.dtype).unbind(1)
        return tuple(unpad(layer, mask_BT) for layer in layers)

    def _check_features(self, inputs_embeds, character_ids, input_ids):
        if inputs_embeds is not None:
            raise ValueError(
                "`inputs_embeds` replace the words of the biLM, but this head also reads words itself. Pass "
                "`character_ids` and `input_ids`, or use head='linear'."
            )
        if self.token_features.char_encoder is not None:
            check_range("character_ids", character_ids, self.config.char_vocab_size)
        if self.token_features.word_embeddings is not None:
            if input_ids is None:
                raise ValueError("This head has word vectors: pass `input_ids` with `character_ids`.")
            check_range("input_ids", input_ids, self.config.vocab_size)

    def _warn_without_labels(self, part: str | None, loss: str | None = None):
        """Warns in training that another loss is computed from `logits`.

        Args:
            part: what only the model's own loss trains.
            loss: the model's own loss, if Trainer's label smoothing is wrong in its place.
        """
        if not self.training or not torch.is_grad_enabled():
            return
        option = option_that_takes_labels()
        if part is None and self.config.scalar_mix_l2:
            part = "the penalty of `scalar_mix_l2`"
        advice = "Pass them"
        if option is not None:
            part = part or loss
            advice = f"Trainer takes them away for its `{option}`; leave it out"
        if part is not None:
            message = f"{type(self).__name__} receives no `labels` in training, so that {part} is not trained. {advice}"
            warn_once(self, f"{message}, unless you mean to train with another loss of `logits`.")

    def _requested(self, inputs: TaskInputs, output_hidden_states: bool | None) -> tuple[Tensor, ...] | None:
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if not output_hidden_states or inputs.hidden_states is None:
            return None
        return tuple(pad(layer, inputs.mask_BT) for layer in inputs.hidden_states)
