"""Task heads on ELMo: the networks of Peters et al. 2018 (sections 3.3 and 4), and linear layers.

Every head has a biLM (`modeling_elmo.py`), a mix of its layers at each place where ELMo enters, and a network that is
trained with the task. The parts of the networks are in `elmo_head_*.py`.

The networks compute real tokens only.

Shape suffixes: B batch; T time; N real tokens of the batch, row after row; D width of the words that a network reads; E
width of an ELMo vector; H width of the encoder's output; K labels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import QuestionAnsweringModelOutput, SequenceClassifierOutput
from transformers.utils import ModelOutput

from .configuration_elmo import ELMoConfig
from .elmo_backends import is_exporting
from .elmo_head_layers import (
    UNKNOWN,
    LinearChainCRF,
    PackedTexts,
    TaskLSTM,
    TaskRNN,
    TokenFeatures,
    VariationalDropout,
    bio_constraints,
    rows_as_texts,
    tags_that_are_not_bio,
)
from .elmo_head_networks import BiattentiveClassifier, ESIMClassifier, SpanReader
from .elmo_inputs import (
    check_floats,
    check_ids,
    check_range,
    check_shape,
    option_that_takes_labels,
    pad,
    returns_output,
    to_device,
    token_mask,
    unpad,
    warn_once,
    word_mask,
)
from .modeling_elmo import ELMoModel, ELMoPreTrainedModel, ScalarMix

LONGEST_ROW = 2**14  # tokens; to compare two such texts takes 1 GB

HEAD_PARTS = (
    BiattentiveClassifier,
    ESIMClassifier,
    LinearChainCRF,
    ScalarMix,
    SpanReader,
    TaskRNN,
    TokenFeatures,
)

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


@dataclass
class ELMoTokenClassifierOutput(ModelOutput):
    """Output of `ELMoForTokenClassification`.

    Shape:
        loss: `()`. Linear head: mean cross-entropy of the labels. CRF: mean over rows of `-log p(labels)`.
        logits: `(batch, time, num_labels)`. CRF in eval mode: log-probabilities. Otherwise: scores.
        predictions: `(batch, time)`, the best label sequence of a CRF in eval mode, -100 at positions without a word.
        hidden_states: as in `ELMoModelOutput`, on request.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    predictions: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


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
    return unpad(torch.arange(mask_BT.shape[0], device=mask_BT.device)[:, None].expand_as(mask_BT), mask_BT)


def is_second(token_type_ids: Tensor, mask_BT: Tensor) -> Tensor:
    """`(batch, time)`: which tokens are of the second text, after a check that no token is of a third."""
    types_BT = token_type_ids.masked_fill(~mask_BT, 0)
    if ((types_BT != 0) & (types_BT != 1)).any():
        raise ValueError(
            f"`token_type_ids` has values from {types_BT.min()} to {types_BT.max()}; pass 0 at the first text and 1 at "
            "the second."
        )
    return types_BT == 1


def reads_batch(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`returns_output` for the `forward` of a head, whose inputs and labels may be on the CPU, as the biLM's may."""

    def moved(value: Any, device: torch.device) -> Any:
        return to_device(value, device) if isinstance(value, Tensor) else value

    @wraps(forward)
    def on_device(self, *args, **kwargs):
        arguments = [moved(value, self.device) for value in args]
        return forward(self, *arguments, **{name: moved(value, self.device) for name, value in kwargs.items()})

    return returns_output(on_device)


class ELMoTaskModel(ELMoPreTrainedModel):
    """Common part of all heads (section 3.3).

    A biLM, frozen unless `freeze_bilm` is False; a mix of its layers at each place where ELMo enters; and `x_k`: word
    vectors and a character CNN that are trained with the task.

    Attributes:
        network: the key of `NETWORK_DEFAULTS` unless the head is linear.
        default_elmo_placement: where ELMo enters the network if the configuration does not say.
        head_parts: modules that initialize themselves, by `reset_parameters`.
    """

    network: str
    default_elmo_placement: Placement = "input"
    head_parts: tuple[Any, ...] = HEAD_PARTS

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        config.validate_head()
        placement, defaults = self.resolve_elmo_placement(config), NETWORK_DEFAULTS[self.network_name(config)]
        self.is_linear = self.network_name(config) == "linear"
        self.task_hidden_size = config.task_hidden_size or defaults.hidden_size
        self.task_dropout = defaults.dropout if config.task_dropout is None else config.task_dropout
        self.task_num_layers = config.task_num_layers or defaults.num_layers
        self.num_labels = config.num_labels
        if config.use_elmo:  # transformers would take an attribute `elmo` that is `None` for the base model
            self.elmo = ELMoModel(config, add_mixing_layer=False)
        places = {"both": ("input", "output")}.get(placement, (placement,)) if config.use_elmo else ()
        # Not named `scalar_mix`, as the biLM's own mix is: loading would confuse the two.
        self.input_mix = ScalarMix(config) if "input" in places else None
        self.between_mix = ScalarMix(config) if "between" in places else None
        self.output_mix = ScalarMix(config) if "output" in places else None
        self.dropout = nn.Dropout(config.elmo_dropout)
        has_features = not self.is_linear and (config.task_word_embedding_size or config.task_has_characters)
        self.token_features = TokenFeatures(config, defaults.word_vector_std) if has_features else None
        self.feature_dropout: nn.Module = VariationalDropout(self.task_dropout)
        feature_size = self.token_features.output_size if self.token_features else 0
        self.input_size = config.hidden_size * ("input" in places) + feature_size
        self.output_elmo_size = config.hidden_size * ("output" in places)

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
        if config.elmo_placement == "between" and (cls.network_name(config) != "tagger" or config.task_num_layers == 1):
            raise ValueError(
                "elmo_placement='between' is the place between two biLSTMs of a tagger, but this is "
                f"{cls.__name__} with head={config.head!r} and task_num_layers={config.task_num_layers}. Pass 'input', "
                "'output' or 'both'."
            )
        if cls.network_name(config) != "linear":
            return config.elmo_placement or cls.default_elmo_placement
        if not config.use_elmo or config.elmo_placement not in (None, "input"):
            raise ValueError(
                f"A linear head reads ELMo at its input, but use_elmo={config.use_elmo} and elmo_placement="
                f"{config.elmo_placement!r}. Pass head='paper' (and classifier='bcn') for a network of its own."
            )
        return "input"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        if isinstance(module, self.head_parts):
            module.reset_parameters()
        else:
            super()._init_weights(module)

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
        elmo = {place: self.dropout(mix(layers, mask_BT)) for place, mix in self.mixes().items()}
        tokens = [elmo["input"]] if "input" in elmo else []
        if self.token_features is not None:
            self._check_features(inputs_embeds, character_ids, input_ids)
            tokens.insert(0, self._drop_out(self.token_features(character_ids, input_ids, mask_BT), mask_BT))
        return TaskInputs(torch.cat(tokens, dim=-1), elmo.get("between"), elmo.get("output"), mask_BT, layers)

    def bilm_layers(self, inputs: tuple[Tensor | None, ...], mask_BT: Tensor) -> tuple[Tensor, ...]:
        """All layers of the biLM at the real tokens, each `(tokens, hidden_size)`. The inputs are those of `read`."""
        return self.elmo(*inputs, unpadded=True, return_dict=True).hidden_states

    def _drop_out(self, features_ND: Tensor, mask_BT: Tensor) -> Tensor:
        return self.feature_dropout(features_ND, row_numbers(mask_BT))

    def label_names(self) -> tuple[str, ...]:
        """The names of the labels in the order of their ids.

        Raises:
            ValueError: an id has no name.
        """
        names = self.config.id2label
        if set(names) != set(range(self.num_labels)) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"`config.id2label` is {names}; pass a name for each id from 0 to {self.num_labels - 1}.")
        return tuple(names[label] for label in range(self.num_labels))

    def _given_layers(self, elmo_hidden_states: Tensor, mask_BT: Tensor) -> tuple[Tensor, ...]:
        if not (self.config.use_elmo and self.config.freeze_bilm):
            raise ValueError(
                f"`elmo_hidden_states` need a frozen biLM, but use_elmo={self.config.use_elmo} and freeze_bilm="
                f"{self.config.freeze_bilm}. Leave them out, or set both options."
            )
        batch, time = mask_BT.shape
        shape = (batch, self.config.num_hidden_layers + 1, time, self.config.hidden_size)
        check_floats("elmo_hidden_states", elmo_hidden_states, shape)
        return tuple(unpad(layer, mask_BT) for layer in elmo_hidden_states.to(self.dtype).unbind(1))

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
        part = part or ("the penalty of `scalar_mix_l2`" if self.config.scalar_mix_l2 else None)
        lost = part if option is None else part or loss
        advice = "Pass them" if option is None else f"Trainer takes them away for its `{option}`; leave it out"
        if lost:
            message = f"{type(self).__name__} receives no `labels` in training, so that {lost} is not trained. {advice}"
            warn_once(self, f"{message}, unless you mean to train with another loss of `logits`.")

    def _requested(self, inputs: TaskInputs, output_hidden_states: bool | None) -> tuple[Tensor, ...] | None:
        show = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if not show or inputs.hidden_states is None:
            return None
        return tuple(pad(layer, inputs.mask_BT) for layer in inputs.hidden_states)


class ELMoForTokenClassification(ELMoTaskModel):
    """Labels each word: biLSTMs over `[x_k; ELMo_k]` and a CRF (section 4, named entities), or a linear layer.

    With the CRF in eval mode, `logits` are the log-probability of each label at each word given the whole text, under
    the constraints of label names such as `B-LOC` and `I-LOC`. At each word, the label of the best sequence (Viterbi)
    is swapped with the most likely label. The result is still a distribution, and its argmax is `predictions`.

    Leave Trainer's `label_smoothing_factor` at 0: it replaces the CRF's loss by a loss of single labels.
    """

    network = "tagger"

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        # Trainer divides a CRF's loss, a mean over rows, by the accumulation steps.
        self.accepts_loss_kwargs = self.is_linear
        self.encoder, self.crf, size = None, None, self.input_size
        if not self.is_linear:
            between_size = 0 if self.between_mix is None else config.hidden_size
            sizes = (size, self.task_hidden_size, self.task_num_layers)
            self.encoder = TaskLSTM(*sizes, self.task_dropout, between_size)
            self.encoder_dropout = VariationalDropout(self.task_dropout)
            self.crf = LinearChainCRF(config.num_labels)
            size = self.encoder.output_size + self.output_elmo_size
        self.classifier = nn.Linear(size, config.num_labels)
        self.post_init()

    def save_pretrained(self, *args, **kwargs):
        """As in `ELMoPreTrainedModel`, with a warning if transformers' pipeline cannot group the labels."""
        labels = [*map(str, self.config.id2label.values())]
        prefixes = {label[:2] for label in labels}  # the pipeline joins equal labels without prefixes
        if prefixes & {"E-", "S-", "L-", "U-", "M-"} and prefixes & {"O", "B-", "I-"}:
            others = tags_that_are_not_bio(labels)
            warn_once(
                self,
                f"The labels {others} are not BIO tags (B-PER, I-PER), and transformers' pipeline groups the words of "
                "BIO entities only: others are returned in pieces. Train with BIO tags, or group the words yourself.",
            )
        super().save_pretrained(*args, **kwargs)

    @reads_batch
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        elmo_hidden_states: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> ELMoTokenClassifierOutput:
        """Computes the logits of every label, and the loss if `labels` are given.

        Args:
            character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds: as in `ELMoModel`. A CRF needs
                `input_ids` to leave the markers out of its chain.
            elmo_hidden_states: `(batch, layers + 1, time, hidden_size)`, layers of the frozen biLM, computed before.
            labels: `(batch, time)`, label ids, -100 where there is none. At a word, -100 means unknown: the CRF's
                likelihood is then the sum over all labels of the word.
            output_hidden_states: whether to return the layers of the biLM.
            num_items_in_batch: linear head: number of labels in all accumulated batches; the loss is divided by it.
        """
        inputs = self.read(character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, elmo_hidden_states)
        scores_NK = self._scores(inputs)
        logits, loss, predictions = pad(scores_NK, inputs.mask_BT), None, None
        if labels is not None:
            check_ids("labels", labels, tuple(logits.shape[:2]))
            labels = labels.long()
            check_range("labels", labels[labels != UNKNOWN], self.num_labels, "load it with num_labels=...")
        else:
            self._warn_without_labels(None if self.crf is None else "the CRF")
        if self.crf is None:
            loss = None if labels is None else self._linear_loss(logits, labels, num_items_in_batch)
        else:
            words_BT = word_mask(self.config, inputs.mask_BT, input_ids, inputs_embeds)
            if labels is not None:
                loss = self.penalty() - self.crf.log_likelihood(logits, labels, words_BT).mean()
            if not self.training:
                logits, predictions = self._decode(logits, words_BT)
        return ELMoTokenClassifierOutput(
            loss=loss,
            logits=logits,
            predictions=predictions,
            hidden_states=self._requested(inputs, output_hidden_states),
        )

    def _scores(self, inputs: TaskInputs) -> Tensor:
        if self.encoder is None:
            return self.classifier(inputs.tokens_ND)
        texts = rows_as_texts(inputs.mask_BT)
        between_NE = None if inputs.between_NE is None else texts.pack(inputs.between_NE)
        hidden_NH = self.encoder(texts.pack(inputs.tokens_ND), texts, between_NE)
        hidden_NH = self.encoder_dropout(hidden_NH, texts.text_N)
        if inputs.output_NE is not None:
            hidden_NH = torch.cat([hidden_NH, texts.pack(inputs.output_NE)], dim=-1)
        return texts.unpack(self.classifier(hidden_NH), hidden_NH.shape[0])

    def _linear_loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        count = (labels != UNKNOWN).sum()
        items = count if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=count.device)
        items = items.clamp(min=1)
        loss = self.loss_function(logits, labels, self.config, num_items_in_batch=items)
        return loss + count / items * self.penalty()

    def _decode(self, emissions: Tensor, words_BT: Tensor) -> tuple[Tensor, Tensor]:
        predictions, logits = self.crf.decode(emissions, words_BT, bio_constraints(self.label_names()))
        likeliest = logits.argmax(-1, keepdim=True)
        best = torch.where(predictions[..., None] < 0, likeliest, predictions[..., None])
        swapped = logits.scatter(-1, likeliest, logits.gather(-1, best)).scatter(-1, best, logits.gather(-1, likeliest))
        return swapped, predictions


class ELMoForSequenceClassification(ELMoTaskModel):
    """Predicts a label, several labels, or a number for each row, which has one text or two.

    `config.classifier` selects the network: `"bcn"`, the biattentive classification network (McCann et al. 2017), in
    which a single text attends to itself; `"esim"` (Chen et al. 2017), for pairs; `"linear"`, a linear layer on the
    mean of the mix.
    """

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        if self.is_linear:
            self.classifier: nn.Module = nn.Linear(self.input_size, config.num_labels)
        else:
            network_class = {"bcn": BiattentiveClassifier, "esim": ESIMClassifier}[config.classifier]
            sizes = (self.input_size, self.task_hidden_size, config.num_labels, self.task_dropout)
            self.classifier = network_class(*sizes, output_elmo_size=self.output_elmo_size)
        self.post_init()

    @classmethod
    def network_name(cls, config: ELMoConfig) -> str:
        return "linear" if config.head == "linear" else config.classifier

    @reads_batch
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        elmo_hidden_states: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> SequenceClassifierOutput:
        """Computes logits `(batch, num_labels)`, and the loss of `config.problem_type` if `labels` are given.

        Args:
            character_ids, input_ids, attention_mask, inputs_embeds: as in `ELMoModel`.
            token_type_ids: `(batch, time)`, 0 at the first text and 1 at the second. The biLM reads them separately.
            elmo_hidden_states, output_hidden_states: as in `ELMoForTokenClassification`.
            labels: `(batch,)` label ids or regression targets, or `(batch, num_labels)`.
        """
        inputs = self.read(character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, elmo_hidden_states)
        batch = inputs.mask_BT.shape[0]
        if self.is_linear:
            sums_BD = inputs.tokens_ND.new_zeros(batch, inputs.tokens_ND.shape[1])
            sums_BD = sums_BD.index_add(0, row_numbers(inputs.mask_BT), inputs.tokens_ND)
            logits = self.classifier(sums_BD / inputs.mask_BT.sum(1, keepdim=True).clamp(min=1))
        else:
            texts = PackedTexts(self._texts(inputs.mask_BT, token_type_ids), inputs.mask_BT)
            logits = self.classifier(inputs.tokens_ND, texts, batch, inputs.output_NE)
        if labels is None:
            is_single = self.config.problem_type in (None, "single_label_classification") and self.num_labels > 1
            self._warn_without_labels(None, None if is_single else "its own loss")
        return SequenceClassifierOutput(
            loss=None if labels is None else self._loss(logits, labels),
            logits=logits,
            hidden_states=self._requested(inputs, output_hidden_states),
        )

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of `config.problem_type`. If it is `None`, the shape of the labels decides."""
        kind, is_row = self.config.problem_type, isinstance(labels, Tensor) and labels.dim() == 1
        if kind == "single_label_classification" or kind is None and is_row and self.num_labels > 1:
            check_ids("labels", labels, (len(logits),))
            labels = labels.long()
            advice = "load it with num_labels=..., or remove rows without a label (-1)"
            check_range("labels", labels[labels != UNKNOWN], self.num_labels, advice)
            count = (labels != UNKNOWN).sum().clamp(min=1)
            return self.loss_function(labels, logits, self.config, num_items_in_batch=count) + self.penalty()
        check_shape("labels", labels, (len(logits),) if is_row and self.num_labels == 1 else tuple(logits.shape))
        labels = labels if labels.is_floating_point() else labels.to(logits.dtype)
        return self.loss_function(labels, logits, self.config) + self.penalty()

    def _texts(self, mask_BT: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """The masks of all first texts, then of all second texts, `(2 * batch, time)`. A single text counts as both.

        If all rows have a single text, each is there once.
        """
        second_BT = torch.zeros_like(mask_BT) if token_type_ids is None else is_second(token_type_ids, mask_BT)
        single_B = ~second_BT.any(1) | (second_BT | ~mask_BT).all(1)
        alone_B = single_B & mask_BT.any(1)  # a row of padding has no text
        if alone_B.any() and self.config.classifier == "esim":
            raise ValueError(
                f"ESIM compares two texts, but row {int(alone_B.nonzero()[0])} has one. Pass pairs with their "
                "`token_type_ids`, as tokenizer(premises, hypotheses) returns them, or use classifier='bcn'."
            )
        if single_B.all():
            return mask_BT
        own_BT = mask_BT & single_B[:, None]  # the whole row
        return torch.cat([own_BT | (mask_BT & ~second_BT), own_BT | second_BT])


class ELMoForQuestionAnswering(ELMoTaskModel):
    """Finds the answer to a question in a context: BiDAF with self-attention (Clark and Gardner 2017), or a linear
    layer.

    A row is `tokenizer(question, context)`, which the biLM reads as two texts. The logits cover the whole row. Answers
    are words of the context; the row's first token means "no answer here". All other logits are very low.
    """

    network = "reader"
    default_elmo_placement = "both"
    custom_pipelines = {
        "question-answering": {
            "impl": "modeling_elmo.ELMoQuestionAnsweringPipeline",
            "pt": ["AutoModelForQuestionAnswering"],
        }
    }

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        if self.is_linear:
            self.qa_outputs = nn.Linear(self.input_size, 2)
        else:
            self.reader = SpanReader(self.input_size, self.task_hidden_size, self.task_dropout, self.output_elmo_size)
        self.post_init()

    @reads_batch
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        elmo_hidden_states: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> QuestionAnsweringModelOutput:
        """Computes logits of starts and ends `(batch, time)`, and the mean of their losses if both positions are given.

        Args:
            character_ids, input_ids, attention_mask, inputs_embeds: as in `ELMoModel`. `input_ids` tell the markers.
            token_type_ids: `(batch, time)`, 0 at the question and 1 at the context.
            elmo_hidden_states, output_hidden_states: as in `ELMoForTokenClassification`.
            start_positions, end_positions: `(batch,)`, position of the answer's first and last token in the row. Both
                are the row's first token if this context has no answer, and -100 if the row does not count.
        """
        inputs = self.read(character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, elmo_hidden_states)
        if token_type_ids is None:
            raise ValueError(
                "A row has a question and a context: pass the `token_type_ids` of tokenizer(question, context)."
            )
        words_BT = word_mask(self.config, inputs.mask_BT, input_ids, inputs_embeds)
        second_BT = is_second(token_type_ids, inputs.mask_BT)
        context_BT, first_BT = words_BT & second_BT, inputs.mask_BT & (inputs.mask_BT.cumsum(1) == 1)
        if self.is_linear:
            start_BT, end_BT = pad(self.qa_outputs(inputs.tokens_ND), inputs.mask_BT).unbind(-1)
        else:
            masks = words_BT & ~second_BT, context_BT
            questions, contexts = (PackedTexts(each_BT, inputs.mask_BT) for each_BT in masks)
            *scores, none_B = self.reader(inputs.tokens_ND, questions, contexts, inputs.output_NE)
            found = (pad(contexts.unpack(each_M, len(inputs.tokens_ND)), inputs.mask_BT) for each_M in scores)
            start_BT, end_BT = (torch.where(first_BT, none_B[:, None], each_BT) for each_BT in found)
        allowed_BT = context_BT | first_BT
        lowest = torch.finfo(start_BT.dtype).min / 4  # the sum of a start and an end stays finite
        logits = [each_BT.masked_fill(~allowed_BT, lowest) for each_BT in (start_BT, end_BT)]
        return QuestionAnsweringModelOutput(
            loss=self._loss(logits, start_positions, end_positions, allowed_BT),
            start_logits=logits[0],
            end_logits=logits[1],
            hidden_states=self._requested(inputs, output_hidden_states),
        )

    def _loss(self, logits: list[Tensor], start_positions, end_positions, allowed_BT: Tensor) -> Tensor | None:
        if start_positions is None and end_positions is None:
            return None
        if start_positions is None or end_positions is None:
            raise ValueError("Pass `start_positions` and `end_positions` together.")
        start_B = self._checked_positions("start_positions", start_positions, allowed_BT)
        end_B = self._checked_positions("end_positions", end_positions, allowed_BT)
        losses = [
            F.cross_entropy(each_BT, position_B, reduction="sum") / (position_B != UNKNOWN).sum().clamp(min=1)
            for each_BT, position_B in zip(logits, (start_B, end_B), strict=True)
        ]
        return (losses[0] + losses[1]) / 2 + self.penalty()

    def _checked_positions(self, name: str, position_B: Tensor, allowed_BT: Tensor) -> Tensor:
        check_ids(name, position_B, (len(allowed_BT),))
        position_B = position_B.long()
        inside_B = (position_B >= 0) & (position_B < allowed_BT.shape[1])
        allowed_B = inside_B & allowed_BT.gather(1, (position_B * inside_B)[:, None]).squeeze(1)
        wrong_B = ~allowed_B & (position_B != UNKNOWN)
        if wrong_B.any():
            row = int(wrong_B.nonzero()[0])
            raise ValueError(
                f"`{name}` is {int(position_B[row])} in row {row}, which is not a word of the context. Pass the "
                "position of a word, or of the row's first token if there is no answer."
            )
        return position_B
