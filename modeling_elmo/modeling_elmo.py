"""ELMo: a character-CNN, bidirectional LSTM language model whose layers are mixed per task.

Peters et al. 2018, "Deep contextualized word representations", https://arxiv.org/abs/1802.05365. In reading order:
characters -> token vectors (`ELMoCharacterEncoder` in `elmo_encoder.py`), token vectors -> layers (`ELMoLSTM` in
`elmo_lstm.py`), layers -> one vector (`ScalarMix`), the model (`ELMoModel`), its training objective
(`ELMoForPreTraining`), task heads.

Shape suffixes: B batch; T time; N real tokens of the batch; U distinct words; X `max_word_length`, and the word's id if
used; F features; P `projection_size`; L LSTM layers; S sequences.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import QuestionAnsweringModelOutput, SequenceClassifierOutput
from transformers.utils import ModelOutput, can_return_tuple, logging

from .configuration_elmo import ELMoConfig
from .elmo_backends import fast_linear
from .elmo_encoder import ELMoCharacterEncoder, ELMoHighway, VocabularyCache, distinct_rows
from .elmo_head_classifiers import BiattentiveClassifier, ESIMClassifier
from .elmo_head_crf import LinearChainCRF, bio_constraints
from .elmo_head_features import TokenFeatures
from .elmo_head_layers import TaskLSTM, TaskRNN, VariationalDropout
from .elmo_head_reader import SpanReader
from .elmo_lstm import ELMoLSTM, ELMoLSTMLayer, Packing, pack
from .elmo_mix import ScalarMix
from .elmo_softmax import CHUNK_LOGITS, Candidates, ELMoSoftmax

if TYPE_CHECKING:  # named so that it is saved with every checkpoint
    from .pipeline_elmo import ELMoQuestionAnsweringPipeline  # noqa: F401

logger = logging.get_logger(__name__)

States = tuple[Tensor, Tensor]
TASK_NETWORKS = (BiattentiveClassifier, ESIMClassifier, LinearChainCRF, SpanReader, TaskRNN, TokenFeatures)


@dataclass
class ELMoModelOutput(ModelOutput):
    """What `ELMoModel` returns. Rows of padding are zeros everywhere.

    Shape:
        last_hidden_state: `(batch, time, 2 * projection_size)`, the top biLSTM layer, forward half first.
        elmo_embeddings: `(batch, time, 2 * projection_size)`, the mix of all layers (equation 1); `None` without one.
        hidden_states: `num_hidden_layers + 1` tensors of that shape; the first is the token layer, twice side by side.
        final_states: `hidden (batch, layers, 2, projection_size)` and `cell (batch, layers, 2, lstm_hidden_size)`
            where each direction ended, to be passed on as `initial_states`; `None` if a row holds two texts.
    """

    last_hidden_state: Tensor | None = None
    elmo_embeddings: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    final_states: States | None = None


@dataclass
class ELMoForPreTrainingOutput(ModelOutput):
    """What `ELMoForPreTraining` returns.

    Shape:
        loss: `()`, the mean of the two directions' losses (section 3.1), in nats a prediction.
        forward_loss, backward_loss: `()`, each direction's own, for reports: the gradient goes through `loss`.
        hidden_states: as in `ELMoModelOutput`, on request, if both directions read the same text.
        final_states: as in `ELMoModelOutput`.
    """

    loss: Tensor | None = None
    forward_loss: Tensor | None = None
    backward_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    final_states: States | None = None


@dataclass
class ELMoTokenClassifierOutput(ModelOutput):
    """What `ELMoForTokenClassification` returns.

    Shape:
        loss: `()`, linear head: the mean cross-entropy of the labels; CRF: the mean over rows of `-log p(labels)`.
        logits: `(batch, time, num_labels)`, log-probabilities of a CRF in eval mode, else scores.
        predictions: `(batch, time)`, the best sequence of a CRF in eval mode, -100 where there is no word.
        hidden_states: as in `ELMoModelOutput`, on request.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    predictions: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class ELMoScores(ModelOutput):
    """What `ELMoForPreTraining.score` returns: 0 where nothing is predicted, so that a row's sum is its text's.

    Shape:
        forward_log_probs: `(batch, time)`, of each word after those before it, in nats; 0 at the first of a row.
        backward_log_probs: `(batch, time)`, of each word before those after it; 0 at the last.
    """

    forward_log_probs: Tensor | None = None
    backward_log_probs: Tensor | None = None


@dataclass
class ELMoPredictions(ModelOutput):
    """What `ELMoForPreTraining.predict_words` returns; `<PAD>` and 0 where nothing is predicted.

    Shape:
        word_ids: `(batch, time, top_k)`, the likeliest words at each position, best first.
        log_probs: `(batch, time, top_k)`, in nats.
    """

    word_ids: Tensor | None = None
    log_probs: Tensor | None = None


class TokenBatch(NamedTuple):
    """A checked batch: which positions hold a token, how they are visited, and what stands there.

    Shape:
        mask_BT: `(batch, time)` bool.
        words_UP: `(words, projection_size)`, the vector of each distinct word.
        index_N: `(tokens,)`, which of them each real token is, in reading order.
    """

    mask_BT: Tensor
    packing: Packing
    words_UP: Tensor
    index_N: Tensor


class ELMoPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation, shared by all ELMo models."""

    config_class = ELMoConfig
    config: ELMoConfig
    base_model_prefix = "elmo"
    main_input_name = "character_ids"
    custom_pipelines: dict[str, Any] = {}  # what `pipeline()` looks for in a checkpoint's configuration
    # A head whose loss is a mean over the batch; Trainer then divides by the accumulation steps itself.
    accepts_loss_kwargs = False
    _keys_to_ignore_on_load_unexpected = [r"scalar_mix\.", r"softmax\."]

    def __init__(self, config: ELMoConfig, *args, **kwargs):
        config.validate_sizes()  # assignments since the making of the config were only checked for their types
        config.validate_token_encoder()
        super().__init__(config, *args, **kwargs)
        if not config.char_vocab_size:
            self.main_input_name = "input_ids"

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if any(name.startswith("softmax.") for name in info["missing_keys"]):
            model.config.has_softmax = False  # the checkpoint is of a class without one: this one is random
        model._freeze_as_configured()  # loading rebuilds every parameter with gradients on
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args, **kwargs):
        """As transformers', and the folder's configuration names the pipelines that travel with it."""
        if self.custom_pipelines:
            self.config.custom_pipelines = self.custom_pipelines
        elif hasattr(self.config, "custom_pipelines"):  # those of a checkpoint of another class
            del self.config.custom_pipelines
        return super().save_pretrained(*args, **kwargs)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Read by DistributedDataParallel: it would send the vocabulary cache around at every step, and it knows
        neither sparse gradients, which `run_pretraining` reduces, nor parameters that are sharded."""
        cache = [name for name, _ in self.named_buffers() if "vocabulary_cache." in name]
        sparse = [f"{name}." for name, module in self.named_modules() if getattr(module, "sparse_gradients", False)]
        parameters = self.named_parameters()
        return cache + [name for name, p in parameters if isinstance(p, DTensor) or name.startswith(tuple(sparse))]

    def _freeze_as_configured(self):
        """What a head does about `config.freeze_bilm`; nothing in the biLM itself."""

    def token_mask(
        self, character_ids=None, input_ids=None, attention_mask=None, token_type_ids=None, inputs_embeds=None
    ) -> Tensor:
        """The positions that hold a token, `(batch, time)` bool, after all inputs were found to fit together."""
        config = self.config
        if inputs_embeds is not None:
            if character_ids is not None or input_ids is not None:
                raise ValueError(
                    "`inputs_embeds` stand in place of words; pass them without `character_ids` / `input_ids`."
                )
            _check_shape("inputs_embeds", inputs_embeds, ("batch", "time", config.projection_size))
            default, shape = inputs_embeds.new_ones(inputs_embeds.shape[:2], dtype=torch.bool), inputs_embeds.shape[:2]
        elif not config.char_vocab_size:
            if input_ids is None:
                raise ValueError("This is a word-level model: pass `input_ids` of shape (batch, time).")
            _check_shape("input_ids", input_ids, ("batch", "time"))
            default, shape = input_ids != config.pad_token_id, input_ids.shape
        else:
            if character_ids is None:
                raise ValueError(
                    "ELMo reads characters: pass `character_ids` of shape (batch, time, max_word_length), as "
                    "`model(**tokenizer(text, return_tensors='pt'))` does; `input_ids` alone are not enough."
                )
            _check_shape("character_ids", character_ids, ("batch", "time", config.max_word_length))
            default, shape = character_ids.any(-1), character_ids.shape[:2]
            if config.word_embedding_size and input_ids is None:
                raise ValueError("This model has word vectors too: pass `input_ids` beside `character_ids`.")
        for name, ids in (("character_ids", character_ids), ("input_ids", input_ids)):
            if isinstance(ids, Tensor) and ids.is_floating_point():
                raise ValueError(f"`{name}` holds {ids.dtype}; pass integer ids.")
        others = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        for name, tensor in others.items():
            if tensor is not None:
                _check_shape(name, tensor, tuple(shape))
        if attention_mask is None:
            return default
        mask = attention_mask.bool()
        if not torch.equal(mask.to(attention_mask.dtype), attention_mask):
            raise ValueError(
                "`attention_mask` holds values other than 0 and 1; pass 1 at real tokens and 0 at padding."
            )
        if (mask & ~default).any() and config.char_vocab_size:
            position = tuple((mask & ~default).nonzero()[0].tolist())
            raise ValueError(
                f"`attention_mask` marks (row, position) {position} as a token, but its `character_ids` are all 0: "
                "padding. Pass the mask that the tokenizer returned with these `character_ids`."
            )
        return mask

    def words(self, mask_BT: Tensor, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """The positions that hold a word, not a marker; those are told by `input_ids`."""
        if input_ids is None and inputs_embeds is None:
            raise ValueError(
                f"{type(self).__name__} runs over words and tells the markers by `input_ids`; pass them beside "
                "`character_ids`, as `model(**tokenizer(text, return_tensors='pt'))` does."
            )
        if input_ids is None:
            return mask_BT
        return mask_BT & (input_ids != self.config.bos_token_id) & (input_ids != self.config.eos_token_id)

    @torch.no_grad()
    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Gives the softmax, and the word vectors where there are any, `new_num_tokens` rows; characters stay.

        Args:
            new_num_tokens: the new vocabulary size; default the present one.
            pad_to_multiple_of: round it up.
            mean_resizing: new rows are the mean of the present ones; otherwise they are drawn as for a new model.
        """
        size, step = new_num_tokens or self.config.vocab_size, pad_to_multiple_of or 1
        if not (isinstance(size, int) and isinstance(step, int)):
            raise ValueError(f"Received a size of {size} and a multiple of {step}; pass integers.")
        size, kept = -(-size // step) * step, self.config.vocab_size
        self._choose_rows([row if row < kept else -1 for row in range(size)], mean_resizing)
        return self.get_input_embeddings()

    @torch.no_grad()
    def replace_vocabulary(self, source_rows: Sequence[int]):
        """Gives the softmax, and the word vectors where there are any, the words of another vocabulary.

        Args:
            source_rows: for each new word its present id, -1 if it has none: such rows are the mean of the present ones
                (drawn as for a new model if the checkpoint came without its softmax).
        """
        outside = [row for row in source_rows if not -1 <= row < self.config.vocab_size]
        if outside:
            raise ValueError(
                f"`source_rows` hold {outside[:3]}; pass ids of the present vocabulary, 0 to "
                f"{self.config.vocab_size - 1}, or -1 for a new word."
            )
        self._choose_rows(source_rows, self.config.has_softmax)

    def _choose_rows(self, source_rows: Sequence[int], mean: bool):
        size = len(source_rows)
        if size <= max(self.config.bos_token_id, self.config.eos_token_id, self.config.unk_token_id):
            raise ValueError(f"A vocabulary of {size} words has no room for the special words; pass 4 or more.")
        rows_V = torch.tensor(source_rows)
        for module in list(self.modules()):
            if isinstance(module, ELMoSoftmax) and module.adaptive is not None:
                raise ValueError("An adaptive softmax has clusters of fixed sizes; train one of the new size instead.")
            if isinstance(module, ELMoSoftmax):
                module.weight, module.bias = (_chosen(table, rows_V, mean) for table in (module.weight, module.bias))
            elif isinstance(module, (ELMoModel, TokenFeatures)) and module.word_embeddings is not None:
                table = module.word_embeddings
                table.weight, table.num_embeddings = _chosen(table.weight, rows_V, mean), size
        self.config.vocab_size = size

    def _initialize_weights(self, module: nn.Module, *_):
        # For custom code the base class skips modules whose parameters all sit in their children: most of ours. It
        # does so to protect loaded values, which `transformers.initialization` protects anyway.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """The original's initialisation (bilm-tf `training.py`, Glorot and Bengio 2010 for the recurrence).

        | parameter | distribution |
        |---|---|
        | character embedding | U(-1, 1), row 0 zeros |
        | convolution, relu / tanh | U(-0.05, 0.05) / N(0, 1 / sqrt(width * char_dim)), bias 0 |
        | highway | N(0, 1 / sqrt(n)), transform bias 0, carry bias -2 |
        | token projection | N(0, 1 / sqrt(n)), bias 0 |
        | gates | U(+-sqrt(6 / (in + projection + 4 * hidden))) for both halves, bias 0 |
        | LSTM projection | U(+-sqrt(6 / (hidden + projection))) |
        | word embedding | U(+-sqrt(6 / (vocabulary + width))), row `<PAD>` zeros |
        | softmax | N(0, 1 / sqrt(projection)), bias 0, row `<PAD>` zeros |
        | scalar mix | weights 0, gamma 1 |
        | a head's linear layer | N(0, 0.02), bias 0 |
        | a head's own network | its parts' `reset_parameters` |
        """
        if isinstance(module, ELMoCharacterEncoder):
            init.uniform_(module.char_embeddings.weight, -1, 1)
            _zero_row(module.char_embeddings.weight, 0)
            for conv in module.convolutions:
                if module.activation is torch.relu:
                    init.uniform_(conv.weight, -0.05, 0.05)
                else:
                    init.normal_(conv.weight, std=conv.weight[0].numel() ** -0.5)  # type: ignore[index]
                init.zeros_(conv.bias)
        elif isinstance(module, ELMoHighway):
            for linear, bias in ((module.transform, 0), (module.carry, -2)):
                init.normal_(linear.weight, std=linear.in_features**-0.5)
                init.constant_(linear.bias, bias)
        elif isinstance(module, ELMoLSTMLayer):
            gates, size = module.input_linear.weight.shape
            bound = (6 / (2 * size + gates)) ** 0.5
            init.uniform_(module.input_linear.weight, -bound, bound)
            init.uniform_(module.state_linear.weight, -bound, bound)
            init.zeros_(module.input_linear.bias)
            if module.projection is not None:
                init.xavier_uniform_(module.projection.weight)
        elif isinstance(module, ELMoModel):
            if module.word_embeddings is not None:
                init.xavier_uniform_(module.word_embeddings.weight)
                _zero_row(module.word_embeddings.weight, self.config.pad_token_id)
            if module.token_projection is not None:
                init.normal_(module.token_projection.weight, std=module.token_projection.in_features**-0.5)
                init.zeros_(module.token_projection.bias)
        elif isinstance(module, ELMoSoftmax) and module.adaptive is not None:
            for linear in (part for part in module.modules() if isinstance(part, nn.Linear)):
                init.normal_(linear.weight, std=linear.in_features**-0.5)
                if linear.bias is not None:
                    init.zeros_(linear.bias)
        elif isinstance(module, ELMoSoftmax):
            init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            init.zeros_(module.bias)
            _zero_row(module.weight, module.pad_token_id)
        elif isinstance(module, ScalarMix):
            init.ones_(module.gamma)
            if module.weights is not None:
                init.zeros_(module.weights)
        elif isinstance(module, TASK_NETWORKS):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            super()._init_weights(module)


class ELMoModel(ELMoPreTrainedModel):
    """The bidirectional language model (section 3.1) and a mix of its layers (section 3.2).

    Stateless: the same text gives the same vectors in any batch. State is an argument (`initial_states`) and a result
    (`final_states`), never kept in the module.

    Args:
        config: the model's options.
        add_mixing_layer: whether to return `elmo_embeddings`; heads bring mixes of their own.
    """

    _keys_to_ignore_on_load_missing = [r"scalar_mix\."]  # a language model has none; a new one is the average

    def __init__(self, config: ELMoConfig, add_mixing_layer: bool = True):
        super().__init__(config)
        words, width = config.vocab_size, config.word_embedding_size
        self.char_encoder = ELMoCharacterEncoder(config) if config.char_vocab_size else None
        self.word_embeddings = nn.Embedding(words, width, config.pad_token_id) if width else None
        projected = config.num_features != config.projection_size
        self.token_projection = nn.Linear(config.num_features, config.projection_size) if projected else None
        self.forward_lstm = ELMoLSTM(config)
        self.backward_lstm = ELMoLSTM(config)
        self.scalar_mix = ScalarMix(config) if add_mixing_layer else None
        self.vocabulary_cache: VocabularyCache | None = self._empty_cache() if config.vocabulary_cache_size else None
        self.frozen = False
        self.post_init()

    def freeze(self):
        """Switches gradients and dropout of the biLM off for good, whatever `train()` says; the mix still learns."""
        self.requires_grad_(False)
        if self.scalar_mix is not None:
            self.scalar_mix.requires_grad_(True)
        self.frozen = True
        self.eval()

    def train(self, mode: bool = True) -> "ELMoModel":
        return super().train(mode and not self.frozen)

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embedding where there is one, else the character embedding."""
        return self.char_encoder.char_embeddings if self.word_embeddings is None else self.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding):
        if self.word_embeddings is None:
            self.char_encoder.char_embeddings = value
        else:
            self.word_embeddings = value

    @can_return_tuple
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        initial_states: States | None = None,
        output_hidden_states: bool | None = None,
    ) -> ELMoModelOutput:
        """Contextual vectors of every token.

        Args:
            character_ids: `(batch, time, max_word_length)`, each word's characters, as `ELMoTokenizer` makes them.
            input_ids: `(batch, time)`, word ids; only models with word vectors read them.
            attention_mask: `(batch, time)`, 1 at real tokens, which may stand anywhere. Default: words that have
                characters (word-level models: that are not `<PAD>`).
            token_type_ids: `(batch, time)`; where the type changes a new sequence begins: two texts do not mix.
            inputs_embeds: `(batch, time, projection_size)`, token vectors in place of words.
            initial_states: `final_states` of the text before; default zeros.
            output_hidden_states: accepted for compatibility; all layers are always returned.

        Raises:
            ValueError: an input has the wrong shape, holds ids out of range, or does not match the others.
        """
        text = self.read_tokens(character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds)
        states = self.starting_states(initial_states, text.words_UP, len(text.mask_BT))
        rows_S = text.packing.rows_S
        two_texts = token_type_ids is not None and len(rows_S.unique()) < len(rows_S)
        if two_texts and initial_states is not None:
            raise ValueError(
                "`initial_states` continue one text, but `token_type_ids` mark two in a row. Pass one text."
            )
        forward, *forward_ends = self.run_direction(0, text, text.packing.forward_N, states)
        backward, *backward_ends = self.run_direction(1, text, text.packing.backward_N, states)
        hidden_states = _unpack(text, forward, backward)
        return ELMoModelOutput(
            last_hidden_state=hidden_states[-1],
            elmo_embeddings=None if self.scalar_mix is None else self.scalar_mix(hidden_states, text.mask_BT),
            hidden_states=hidden_states,
            final_states=None if two_texts else _join_states(forward_ends, backward_ends),
        )

    def sentence_embeddings(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """One vector for each row, `(batch, 2 * projection_size)`: the mean of the mix over its words.

        Markers do not count; a row without words is zeros. sentence-transformers calls this, as the folder's
        `sentence_bert_config.json` says.

        Args:
            character_ids, input_ids, attention_mask, token_type_ids: as in `forward`. The markers are told by
                `input_ids`.
        """
        inputs = (character_ids, input_ids, attention_mask, token_type_ids)
        words_BT1 = self.words(self.token_mask(*inputs), input_ids, None)[..., None]
        mixed_BTE = self(*inputs, return_dict=True).elmo_embeddings
        if mixed_BTE is None:
            raise ValueError("A model built with add_mixing_layer=False has no mix; leave the argument out.")
        return mixed_BTE.masked_fill(~words_BT1, 0).sum(1) / words_BT1.sum(1).clamp(min=1)

    def read_tokens(
        self, character_ids=None, input_ids=None, attention_mask=None, token_type_ids=None, inputs_embeds=None
    ) -> TokenBatch:
        """Checks the inputs of `forward` and encodes each distinct word once."""
        mask_BT = self.token_mask(character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds)
        packing = pack(mask_BT, token_type_ids)
        if inputs_embeds is not None:
            return TokenBatch(mask_BT, packing, inputs_embeds.flatten(0, 1), packing.positions_N)
        words_NX = self._rows_of_ids(character_ids, input_ids).flatten(0, 1)[packing.positions_N]
        distinct_UX, index_N = distinct_rows(words_NX)
        return TokenBatch(mask_BT, packing, self.encode_words(distinct_UX), index_N)

    def _rows_of_ids(self, character_ids: Tensor, input_ids: Tensor) -> Tensor:
        """What a word's vector depends on: its id, if there are word vectors, before its characters."""
        ids = [] if self.word_embeddings is None else [input_ids[..., None]]
        return torch.cat(ids if self.char_encoder is None else [*ids, character_ids], dim=-1)

    def encode_words(self, words_UX: Tensor) -> Tensor:
        """Token vectors `(words, projection_size)` of rows of ids: the word's id, if used, before its characters.

        Words of `cache_vocabulary` are looked up, unless a gradient must pass through them.
        """
        words_UX = words_UX.long()
        if self.word_embeddings is not None:
            _check_range("input_ids", words_UX[:, 0], self.config.vocab_size)
        if self.char_encoder is not None:
            _check_range("character_ids", words_UX[:, -self.config.max_word_length :], self.config.char_vocab_size)
        cache = self._usable_cache()
        if cache is None:
            return self._compute_words(words_UX)
        known_U, rows_U = cache.find(words_UX)
        vectors_UP = cache.vectors[rows_U]
        if not known_U.all():
            vectors_UP[~known_U] = self._compute_words(words_UX[~known_U]).to(vectors_UP)
        return vectors_UP

    def _compute_words(self, words_UX: Tensor) -> Tensor:
        features = [] if self.word_embeddings is None else [self.word_embeddings(words_UX[:, 0])]
        if self.char_encoder is not None:
            features.append(self.char_encoder(words_UX[:, -self.config.max_word_length :]))
        features_UF = torch.cat(features, dim=-1)
        return features_UF if self.token_projection is None else fast_linear(self.token_projection, features_UF)

    @torch.no_grad()
    def cache_vocabulary(self, words: Iterable[str], tokenizer, save: bool = False, batch_size: int = 1024):
        """Computes the token vectors of words once: from then on they are looked up, by their characters.

        Others are computed as ever. A word takes `4 * (max_word_length + projection_size) + 8` bytes (float32). The
        cache moves with the model, and is dropped with a warning when a parameter of the encoder changes.

        Args:
            words: for example `tokenizer.get_vocab()`.
            tokenizer: the one that was saved with the model.
            save: whether `save_pretrained` writes the cache, for `from_pretrained` to read.
            batch_size: words computed at a time.
        """
        if isinstance(words, str) or not callable(tokenizer):
            raise ValueError(
                f"`cache_vocabulary` received {type(words).__name__} and {type(tokenizer).__name__}; pass a list of "
                "words and the tokenizer that was saved with the model."
            )
        self._drop_cache()
        words = list(dict.fromkeys(words))
        rows = []
        for start in range(0, len(words), batch_size):
            encoding = tokenizer(words[start : start + batch_size], is_split_into_words=True, return_tensors="pt")
            inputs = encoding.get("character_ids"), encoding.get("input_ids")
            self.token_mask(*inputs)  # checks them
            rows.append(self._rows_of_ids(*inputs)[0])
        if not rows:
            raise ValueError("`cache_vocabulary` received no words; pass at least one.")
        distinct_UX = distinct_rows(torch.cat(rows))[0]
        batches = logging.tqdm(distinct_UX.split(batch_size), desc="Encoding the vocabulary", unit="batch")
        vectors_UP = torch.cat([self.encode_words(batch.to(self.device)) for batch in batches])
        distinct_UX = distinct_UX.to(self.device)
        self.vocabulary_cache = VocabularyCache(distinct_UX, vectors_UP, self._word_parameters(), persistent=save)
        self.config.vocabulary_cache_size = len(distinct_UX) if save else 0

    def _usable_cache(self) -> VocabularyCache | None:
        if self.vocabulary_cache is None:
            return None
        cache, parameters = self.vocabulary_cache, self._word_parameters()
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
            return None
        if cache.suits(parameters):
            return cache
        logger.warning("The encoder's weights changed: its vocabulary cache is dropped. Call `cache_vocabulary` again.")
        self._drop_cache()
        return None

    def _drop_cache(self):
        self.vocabulary_cache = None
        self.config.vocabulary_cache_size = 0

    def _empty_cache(self) -> VocabularyCache:
        """For `from_pretrained` to fill."""
        config = self.config
        columns = (self.word_embeddings is not None) + (config.max_word_length if config.char_vocab_size else 0)
        words_VX = torch.zeros(config.vocabulary_cache_size, columns, dtype=torch.int32)
        vectors_VP = torch.zeros(len(words_VX), config.projection_size)
        return VocabularyCache(words_VX, vectors_VP, self._word_parameters(), persistent=True)

    def _word_parameters(self) -> list[nn.Parameter]:
        modules = (self.char_encoder, self.word_embeddings, self.token_projection)
        return [parameter for module in modules if module is not None for parameter in module.parameters()]

    def starting_states(self, states: States | None, words_UP: Tensor, batch_size: int) -> States:
        """`initial_states`, checked, or zeros: `(batch, layers, 2, projection_size)` and `(..., lstm_hidden_size)`."""
        config = self.config
        sizes = (config.projection_size, config.lstm_hidden_size)
        shapes = [(batch_size, config.num_hidden_layers, 2, size) for size in sizes]
        # The cell is a long sum: half precision would lose it.
        cell_dtype = torch.promote_types(words_UP.dtype, torch.float32)
        if states is None:
            return words_UP.new_zeros(shapes[0]), words_UP.new_zeros(shapes[1], dtype=cell_dtype)
        received = [tuple(state.shape) for state in states]
        if received != shapes:
            raise ValueError(
                f"`initial_states` have shapes {received}; for this batch of {batch_size} pass (hidden, cell) of "
                f"shapes {shapes}, the `final_states` of the same rows' text before."
            )
        return states[0].to(words_UP), states[1].to(words_UP.device, cell_dtype)

    def run_direction(self, direction: int, text: TokenBatch, order_N: Tensor, states: States):
        """Runs the forward (0) or backward (1) LSTM over the real tokens, visited in `order_N`.

        Returns:
            `(outputs, hidden_BLP, cell_BLH)`: each layer's packed output, and the state after each row's end.
        """
        lstm, rows_S = self.backward_lstm if direction else self.forward_lstm, text.packing.rows_S
        starts = [state[:, :, direction] for state in states]
        packed = [state[rows_S].transpose(0, 1) for state in starts]
        outputs, *ends = lstm(text.words_UP, text.index_N[order_N], text.packing.batch_sizes, *packed)
        ends = [old.index_copy(0, rows_S, new.transpose(0, 1).to(old)) for old, new in zip(starts, ends, strict=True)]
        return outputs, *ends


class ELMoForPreTraining(ELMoPreTrainedModel):
    """The biLM with its softmax: the joint log-likelihood of both directions (section 3.1)."""

    accepts_loss_kwargs = True  # losses are divided by Trainer's own count of predictions

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # Trainer then counts all labels but the first of each row
        self.elmo = ELMoModel(config, add_mixing_layer=False)
        self.softmax = ELMoSoftmax(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        forward_targets: Tensor | None = None,
        backward_character_ids: Tensor | None = None,
        backward_input_ids: Tensor | None = None,
        backward_attention_mask: Tensor | None = None,
        backward_targets: Tensor | None = None,
        initial_states: States | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        candidates: Candidates | None = None,
    ) -> ELMoForPreTrainingOutput:
        """Losses of both directions, either on one text or on two streams that are read independently.

        Args:
            character_ids, input_ids, attention_mask, initial_states: as in `ELMoModel`.
            labels: `(batch, time)`, word ids of the same positions (`input_ids` will do), -100 where nothing is
                predicted. Shifted inside: the forward direction predicts the next word, the backward one the previous.
            forward_targets, backward_targets: `(batch, time)`, instead of `labels`: the target of each position.
            backward_character_ids, backward_input_ids, backward_attention_mask: the text of the backward direction, in
                its own reading order (last word first), if it is not that of the forward direction.
            num_items_in_batch: predictions of one direction over all accumulated batches; the losses are divided by it.
                (Trainer's count is right for rows that are padded on the right, as they are by default.)
            candidates: of a sampled softmax in training, from `softmax.sample()`: pass the same to all batches of a
                step, on every device. Default: drawn for this call.

        Raises:
            ValueError: labels are missing or contradict each other, or the checkpoint has no softmax.
        """
        two_streams = backward_character_ids is not None or backward_input_ids is not None
        self._check_labels(labels, forward_targets, backward_targets, two_streams)
        text = stream = self.elmo.read_tokens(character_ids, input_ids, attention_mask)
        backward_order_N = text.packing.backward_N
        if two_streams:
            stream = self.elmo.read_tokens(backward_character_ids, backward_input_ids, backward_attention_mask)
            backward_order_N = stream.packing.forward_N
            if len(stream.mask_BT) != len(text.mask_BT):
                rows = len(text.mask_BT), len(stream.mask_BT)
                raise ValueError(f"The two streams have {rows[0]} and {rows[1]} rows; pass as many of each.")
        states = self.elmo.starting_states(initial_states, text.words_UP, len(text.mask_BT))
        forward, *forward_ends = self.elmo.run_direction(0, text, text.packing.forward_N, states)
        backward, *backward_ends = self.elmo.run_direction(1, stream, backward_order_N, states)
        predictions = []
        streams = (
            (text, text.packing.forward_N, forward, forward_targets),
            (stream, backward_order_N, backward, backward_targets),
        )
        for direction, (reading, order_N, outputs, aligned) in enumerate(streams):
            given = labels if aligned is None else aligned
            if given is not None:
                targets_N = _targets(given, labels is not None, direction, reading, self.config)
                predictions.append((outputs[-1], targets_N[order_N]))
        losses = self._losses(predictions, num_items_in_batch, candidates) if predictions else (None, None, None)
        show = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return ELMoForPreTrainingOutput(
            *losses,
            hidden_states=_unpack(text, forward, backward) if show and not two_streams else None,
            final_states=_join_states(forward_ends, backward_ends),
        )

    def _losses(self, predictions: list[tuple[Tensor, Tensor]], num_items_in_batch, candidates) -> list[Tensor]:
        """The mean of both directions' losses, which carries the gradient, and each direction's own."""
        hidden, targets, scales = [], [], []
        for hidden_NP, targets_N in predictions:
            predicted_N = targets_N != -100
            count = predicted_N.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            hidden.append(F.dropout(hidden_NP, self.config.dropout, self.training)[predicted_N])
            targets.append(targets_N[predicted_N])
            scales.append(torch.ones_like(targets[-1], dtype=torch.float32) / count)
        scale_N = torch.cat(scales) / 2
        # Both directions at once: they share the softmax, and the candidates of a sampled one.
        loss, losses_N = self.softmax(torch.cat(hidden), torch.cat(targets), scale_N, candidates)
        own = (2 * scale_N * losses_N).split([len(scale) for scale in scales])
        return [loss, *(losses.sum() for losses in own)]

    @torch.no_grad()
    def score(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        initial_states: States | None = None,
    ) -> ELMoScores:
        """Log-probabilities of the words of a text, of each direction, under the full softmax.

        Args:
            character_ids, input_ids, attention_mask, initial_states: as in `ELMoModel`; `input_ids` are what is scored.
                A word outside the vocabulary gets the probability of `<UNK>`.

        Raises:
            ValueError: the checkpoint has no softmax, or the model is in training mode.
        """
        text, hidden = self._read_both_ways(character_ids, input_ids, attention_mask, initial_states)
        if input_ids is None:
            raise ValueError("Scores are those of words: pass `input_ids` beside `character_ids`.")
        positions_N, scores = text.packing.positions_N, []
        for direction, hidden_NP in enumerate(hidden):
            here_M, there_M = _neighbors(direction, text)
            targets_M = input_ids.flatten()[positions_N[there_M]]
            _check_targets(targets_M, self.config)
            _, losses_M = self.softmax(hidden_NP[here_M], targets_M)
            scores.append(losses_M.new_zeros(text.mask_BT.numel()).index_copy_(0, positions_N[there_M], -losses_M))
        return ELMoScores(*(score.view(text.mask_BT.shape) for score in scores))

    @torch.no_grad()
    def predict_words(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        initial_states: States | None = None,
        top_k: int = 5,
        direction: str = "both",
    ) -> ELMoPredictions:
        """The likeliest words at each position, given the others.

        Args:
            character_ids, input_ids, attention_mask, initial_states: as in `ELMoModel`.
            top_k: how many words.
            direction: `"forward"`, from the words before; `"backward"`, from those after; `"both"`: the product of the
                two distributions, normalized (the directions know nothing of each other); at a row's first and last
                position the one that there is.

        Raises:
            ValueError: as in `score`; an unknown direction, or a `top_k` beyond the vocabulary.
        """
        directions = {"forward": [0], "backward": [1], "both": [0, 1]}.get(direction)
        if directions is None:
            raise ValueError(f"`direction` is {direction!r}; pass 'forward', 'backward' or 'both'.")
        if not 1 <= top_k < self.config.vocab_size:
            raise ValueError(f"`top_k` is {top_k}; pass 1 to {self.config.vocab_size - 1}, the words without <PAD>.")
        text, hidden = self._read_both_ways(character_ids, input_ids, attention_mask, initial_states)
        sources = [(hidden[index], *_neighbors(index, text)) for index in directions]
        flat = text.mask_BT.new_zeros(text.mask_BT.numel(), top_k, dtype=torch.long) + self.config.pad_token_id
        word_ids = flat
        log_probs = torch.zeros_like(flat, dtype=torch.promote_types(hidden[0].dtype, torch.float32))
        predicted_N = torch.cat([there_M for _, _, there_M in sources]).unique()
        for some_C in predicted_N.split(max(1, CHUNK_LOGITS // self.config.vocab_size)):
            log_probs_CV = sum(self._log_probs_at(some_C, *source) for source in sources).log_softmax(-1)
            places_C = text.packing.positions_N[some_C]
            log_probs[places_C], word_ids[places_C] = log_probs_CV.topk(top_k)
        shape = *text.mask_BT.shape, top_k
        return ELMoPredictions(word_ids.view(shape), log_probs.view(shape))

    def _log_probs_at(self, some_C: Tensor, hidden_NP: Tensor, here_M: Tensor, there_M: Tensor) -> Tensor:
        """One direction's log-probabilities `(C, V)` of the word at some tokens; 0 where it predicts none."""
        source_N = torch.full((len(hidden_NP),), -1, device=hidden_NP.device).index_copy_(0, there_M, here_M)
        source_C = source_N[some_C]
        log_probs_CV = self.softmax.log_probabilities(hidden_NP[source_C])
        return log_probs_CV.masked_fill((source_C < 0)[:, None], 0)

    def _read_both_ways(self, character_ids, input_ids, attention_mask, initial_states):
        """The checked text, and each direction's top output `(tokens, projection_size)` in reading order."""
        if self.training:
            raise ValueError("The model is in training mode, with dropout; call `model.eval()` first.")
        self._check_vocabulary()
        text = self.elmo.read_tokens(character_ids, input_ids, attention_mask)
        states = self.elmo.starting_states(initial_states, text.words_UP, len(text.mask_BT))
        hidden = []
        for direction, order_N in enumerate((text.packing.forward_N, text.packing.backward_N)):
            outputs, *_ = self.elmo.run_direction(direction, text, order_N, states)
            hidden.append(torch.empty_like(outputs[-1]).index_copy_(0, order_N, outputs[-1]))
        return text, hidden

    def _check_labels(self, labels, forward_targets, backward_targets, two_streams: bool):
        aligned = [
            name for name, given in (("forward", forward_targets), ("backward", backward_targets)) if given is not None
        ]
        if labels is not None and (aligned or two_streams):
            raise ValueError(
                "`labels` are shifted inside and belong to one text; with two streams or aligned labels pass "
                "`forward_targets` and `backward_targets` instead."
            )
        if len(aligned) == 1:
            raise ValueError(
                f"Received `{aligned[0]}_labels` alone; pass `forward_targets` and `backward_targets` together."
            )
        if labels is not None or aligned:
            self._check_vocabulary()

    def _check_vocabulary(self):
        if self.config.vocab_size <= 4:
            raise ValueError(
                "The vocabulary holds nothing but special words, so there is nothing to predict. Build one (see "
                "`build_vocabulary`) and call `resize_token_embeddings(len(tokenizer))`; with `run_pretraining` pass "
                "--vocabulary replace --vocabulary_size NUMBER."
            )
        if not self.config.has_softmax and not self.training:
            raise ValueError(
                "This checkpoint was published without its softmax, so it gives no probabilities. Convert it with its "
                "softmax file, or train a new one first."
            )
        if not self.config.has_softmax:
            logger.warning("This checkpoint was published without its softmax: training starts a new one.")
            self.config.has_softmax = True


# Trainer evaluates a loss only if every argument named like a label is there; those of two streams are for other loops.
_signature = inspect.signature(ELMoForPreTraining.forward)
_parameters = [p for name, p in _signature.parameters.items() if name not in ("forward_targets", "backward_targets")]
ELMoForPreTraining.forward.__signature__ = _signature.replace(parameters=_parameters)


# A head's own network: hidden size and dropout, where the configuration leaves them open.
NETWORKS = {"linear": (0, 0.0), "tagger": (200, 0.5), "bcn": (300, 0.3), "esim": (300, 0.5), "reader": (90, 0.2)}
# Deviation of new word vectors where it is not that of length 1. The reader's attention multiplies them, and learns
# late if they are small; 0.4 is about that of GloVe's. (A tagger without ELMo loses 4 points of accuracy by it.)
WORD_STD = {"reader": 0.4}


class TaskInputs(NamedTuple):
    """What a head's own network reads.

    Shape:
        tokens_BTD: `(batch, time, width)`, `[x_k; ELMo_k]`, of which one may be missing.
        output_BTE: `(batch, time, hidden_size)`, ELMo once more, for the output of the first biRNN; or `None`.
        mask_BT: `(batch, time)` bool, the positions that hold a token.
        hidden_states: the biLM's layers; `None` without it.
    """

    tokens_BTD: Tensor
    output_BTE: Tensor | None
    mask_BT: Tensor
    hidden_states: tuple[Tensor, ...] | None


class ELMoTaskModel(ELMoPreTrainedModel):
    """What all task heads share (section 3.3): a biLM, frozen unless `freeze_bilm` is off; a mix of its layers for each
    place where ELMo enters; and `x_k`, word vectors and a character CNN that are trained with the task.

    Args:
        config: the model's options.
        network: one of `NETWORKS`.
    """

    default_elmo_placement = "input"

    def __init__(self, config: ELMoConfig, network: str):
        super().__init__(config)
        config.validate_head()
        is_linear = network == "linear"
        placement = self.resolve_elmo_placement(config)
        if is_linear and not (config.use_elmo and placement == "input"):
            raise ValueError("A linear head is a layer on ELMo, at its input; pass head='paper', classifier='bcn'.")
        size, rate = NETWORKS[network]
        self.task_hidden_size = config.task_hidden_size or size
        self.task_dropout = rate if config.task_dropout is None else config.task_dropout
        self.num_labels = config.num_labels
        if config.use_elmo:  # an attribute of this name that holds `None` would pass for the base model
            self.elmo = ELMoModel(config, add_mixing_layer=False)
        at_input, at_output = (config.use_elmo and placement in (at, "both") for at in ("input", "output"))
        # Not named as the biLM's own mix: loading would take the one for the other.
        self.input_mix = ScalarMix(config) if at_input else None
        self.output_mix = ScalarMix(config) if at_output else None
        self.dropout = nn.Dropout(config.elmo_dropout)
        has_features = config.task_word_embedding_size or config.task_has_characters
        self.token_features = None
        if has_features and not is_linear:
            self.token_features = TokenFeatures(config, WORD_STD.get(network))
        self.feature_dropout = VariationalDropout(self.task_dropout)
        self.input_size = config.hidden_size * at_input + (
            self.token_features.output_size if self.token_features else 0
        )
        self.output_elmo_size = config.hidden_size * at_output

    @classmethod
    def resolve_elmo_placement(cls, config: ELMoConfig) -> str:
        """`config.elmo_placement`, or the head's own default where it is `None`."""
        return config.elmo_placement or ("input" if config.head == "linear" else cls.default_elmo_placement)

    def _freeze_as_configured(self):
        if self.config.use_elmo and self.config.freeze_bilm:
            self.elmo.freeze()
        if self.token_features is not None and self.token_features.word_embeddings is not None:
            self.token_features.word_embeddings.requires_grad_(not self.config.freeze_word_embeddings)

    def get_input_embeddings(self) -> nn.Embedding:
        """The biLM's; without it, the head's own word vectors or characters."""
        if self.config.use_elmo:
            return self.elmo.get_input_embeddings()
        features = self.token_features
        return features.word_embeddings or features.char_encoder.char_embeddings

    def mixes(self) -> dict[str, ScalarMix]:
        """The mix of each place where ELMo enters, `"input"` and `"output"`."""
        places = {"input": self.input_mix, "output": self.output_mix}
        return {place: mix for place, mix in places.items() if mix is not None}

    def penalty(self) -> Tensor | float:
        """`lambda * ||s||^2` of all mixes, a part of the loss."""
        return sum((mix.penalty() for mix in self.mixes().values()), 0.0)

    def read(
        self, character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, elmo_hidden_states
    ) -> TaskInputs:
        """Checks a head's inputs and embeds its tokens."""
        inputs = (character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds)
        mask_BT = self.token_mask(*inputs)
        layers = None
        if elmo_hidden_states is not None:
            layers = self._given_layers(elmo_hidden_states, mask_BT)
        elif self.config.use_elmo:
            layers = self.elmo(*inputs, return_dict=True).hidden_states
        elmo = {place: self.dropout(mix(layers, mask_BT)) for place, mix in self.mixes().items()}
        tokens = [elmo["input"]] if "input" in elmo else []
        if self.token_features is not None:
            self._check_features(inputs_embeds, character_ids, input_ids)
            tokens.insert(0, self.feature_dropout(self.token_features(character_ids, input_ids, mask_BT)))
        return TaskInputs(torch.cat(tokens, dim=-1), elmo.get("output"), mask_BT, layers)

    def _given_layers(self, elmo_hidden_states: Tensor, mask_BT: Tensor) -> tuple[Tensor, ...]:
        if not (self.config.use_elmo and self.config.freeze_bilm):
            raise ValueError(
                f"`elmo_hidden_states` are a frozen biLM's, but use_elmo={self.config.use_elmo} and freeze_bilm="
                f"{self.config.freeze_bilm}; leave them out, or set both."
            )
        batch, time = mask_BT.shape
        shape = (batch, self.config.num_hidden_layers + 1, time, self.config.hidden_size)
        _check_shape("elmo_hidden_states", elmo_hidden_states, shape)
        return elmo_hidden_states.to(self.dtype).unbind(1)

    def _check_features(self, inputs_embeds, character_ids, input_ids):
        if inputs_embeds is not None:
            raise ValueError(
                "`inputs_embeds` are the biLM's; this head reads words of its own too. Pass `character_ids` and "
                "`input_ids`, or use head='linear'."
            )
        if self.token_features.char_encoder is not None:
            _check_range("character_ids", character_ids, self.config.char_vocab_size)
        if self.token_features.word_embeddings is not None:
            if input_ids is None:
                raise ValueError("This head has word vectors: pass `input_ids` beside `character_ids`.")
            _check_range("input_ids", input_ids, self.config.vocab_size)

    def _shown(self, hidden_states, output_hidden_states: bool | None):
        show = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return hidden_states if show else None


class ELMoForTokenClassification(ELMoTaskModel):
    """A label for each word: biLSTMs over `[x_k; ELMo_k]` and a CRF (section 4, named entities), or a linear layer.

    With the CRF, and not in training mode, `logits` are the log-probability of each label at each word given the whole
    text, under the constraints that names such as `B-LOC` and `I-LOC` carry, but the label of the best sequence
    (Viterbi) has changed places with the likeliest one: still a distribution, and its largest entry is `predictions`.

    Trainer's `label_smoothing_factor` would replace the CRF's loss by one that knows no chain: leave it at 0.
    """

    def __init__(self, config: ELMoConfig):
        is_linear = config.head == "linear"
        super().__init__(config, "linear" if is_linear else "tagger")
        # A CRF's loss is a mean over rows, which Trainer divides by the accumulation steps.
        self.accepts_loss_kwargs = is_linear
        self.encoder, self.crf, size = None, None, self.input_size
        if not is_linear:
            self.encoder = TaskLSTM(size, self.task_hidden_size, config.task_num_layers, self.task_dropout)
            self.encoder_dropout = VariationalDropout(self.task_dropout)
            self.crf = LinearChainCRF(config.num_labels)
            size = self.encoder.output_size + self.output_elmo_size
        self.classifier = nn.Linear(size, config.num_labels)
        self.post_init()
        self._freeze_as_configured()

    @can_return_tuple
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
        """Logits of every label, and the loss if `labels` are given.

        Args:
            character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds: as in `ELMoModel`. A CRF tells the
                markers, which are no part of its chain, by `input_ids`.
            elmo_hidden_states: `(batch, layers + 1, time, hidden_size)`, a frozen biLM's layers, computed before.
            labels: `(batch, time)`, label ids, -100 where there is none. At a word that means unknown: the CRF's
                likelihood is the sum over all labels there.
            output_hidden_states: whether to return the biLM's layers.
            num_items_in_batch: linear head: labels over all accumulated batches; the loss is divided by it.
        """
        text = self.read(character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, elmo_hidden_states)
        hidden_BTH = text.tokens_BTD
        if self.encoder is not None:
            hidden_BTH = self.encoder_dropout(self.encoder(hidden_BTH, text.mask_BT))
            hidden_BTH = hidden_BTH if text.output_BTE is None else torch.cat([hidden_BTH, text.output_BTE], dim=-1)
        logits, loss, predictions = self.classifier(hidden_BTH), None, None
        if labels is not None:
            _check_shape("labels", labels, tuple(logits.shape[:2]))
            _check_range("labels", labels[labels != -100], self.num_labels, "or pass num_labels=...")
        if self.crf is None:
            loss = None if labels is None else self._linear_loss(logits, labels, num_items_in_batch)
        else:
            words_BT = self.words(text.mask_BT, input_ids, inputs_embeds)
            if labels is not None:
                loss = self.penalty() - self.crf.log_likelihood(logits, labels, words_BT).mean()
            if not self.training:
                logits, predictions = self._decode(logits, words_BT)
        return ELMoTokenClassifierOutput(
            loss=loss,
            logits=logits,
            predictions=predictions,
            hidden_states=self._shown(text.hidden_states, output_hidden_states),
        )

    def _linear_loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        share = 1 if num_items_in_batch is None else (labels != -100).sum() / num_items_in_batch
        loss = self.loss_function(logits, labels, self.config, num_items_in_batch=num_items_in_batch)
        return loss + share * self.penalty()

    def _decode(self, emissions: Tensor, words_BT: Tensor) -> tuple[Tensor, Tensor]:
        names = self.config.id2label
        if set(names) != set(range(self.num_labels)) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"`config.id2label` is {names}; pass a name for each id from 0 to {self.num_labels - 1}.")
        allowed = bio_constraints(tuple(names[label] for label in range(self.num_labels)))
        predictions = self.crf.decode(emissions, words_BT, allowed)
        logits = self.crf.log_marginals(emissions, words_BT, allowed)
        likeliest = logits.argmax(-1, keepdim=True)
        best = torch.where(predictions[..., None] < 0, likeliest, predictions[..., None])
        swapped = logits.scatter(-1, likeliest, logits.gather(-1, best)).scatter(-1, best, logits.gather(-1, likeliest))
        return swapped, predictions


class ELMoForSequenceClassification(ELMoTaskModel):
    """A label, several, or a number for each row, which holds one text or two.

    `config.classifier` is the network: `"bcn"`, the biattentive classification network (McCann et al. 2017), where a
    single text attends to itself; `"esim"` (Chen et al. 2017), for pairs; `"linear"`, a layer on the mean of the mix.
    """

    def __init__(self, config: ELMoConfig):
        network = "linear" if config.head == "linear" else config.classifier
        super().__init__(config, network)
        self.is_linear = network == "linear"
        if self.is_linear:
            self.classifier: nn.Module = nn.Linear(self.input_size, config.num_labels)
        else:
            network_class = {"bcn": BiattentiveClassifier, "esim": ESIMClassifier}[network]
            sizes = (self.input_size, self.task_hidden_size, config.num_labels, self.task_dropout)
            self.classifier = network_class(*sizes, output_elmo_size=self.output_elmo_size)
        self.post_init()
        self._freeze_as_configured()

    @can_return_tuple
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
        """Logits `(batch, num_labels)`, and the loss of `config.problem_type` if `labels` are given.

        Args:
            character_ids, input_ids, attention_mask, inputs_embeds: as in `ELMoModel`.
            token_type_ids: `(batch, time)`, 0 at the first text and 1 at the second; the biLM reads each on its own.
            elmo_hidden_states: `(batch, layers + 1, time, hidden_size)`, a frozen biLM's layers, computed before.
            labels: `(batch,)` label ids or regression targets, or `(batch, num_labels)`.
            output_hidden_states: whether to return the biLM's layers.
        """
        text = self.read(character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, elmo_hidden_states)
        if self.is_linear:
            count = text.mask_BT.sum(1, keepdim=True).clamp(min=1)
            logits = self.classifier(text.tokens_BTD.sum(1) / count)
        else:
            logits = self.classifier(text.tokens_BTD, *self._texts(text.mask_BT, token_type_ids), text.output_BTE)
        loss = None
        if labels is not None:
            if labels.dim() == 1 and self.num_labels > 1 and not labels.is_floating_point():
                _check_range("labels", labels[labels != -100], self.num_labels, "or leave out what has no label (-1)")
            loss = self.loss_function(labels, logits, self.config) + self.penalty()
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=self._shown(text.hidden_states, output_hidden_states)
        )

    def _texts(self, mask_BT: Tensor, token_type_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """The positions of each row's first text and of its second; of a single text twice."""
        types_BT = torch.zeros_like(mask_BT) if token_type_ids is None else token_type_ids.masked_fill(~mask_BT, 0)
        if (types_BT > 1).any() or (types_BT < 0).any():
            raise ValueError(
                f"`token_type_ids` hold values from {types_BT.min()} to {types_BT.max()}; pass 0 at the first text and "
                "1 at the second."
            )
        second_BT = types_BT == 1
        single_B = ~second_BT.any(1) | (second_BT | ~mask_BT).all(1)
        if single_B.any() and self.config.classifier == "esim":
            raise ValueError(
                f"ESIM compares two texts, but row {int(single_B.nonzero()[0])} holds one. Pass pairs, as "
                "tokenizer(premises, hypotheses) makes them with their `token_type_ids`, or use classifier='bcn'."
            )
        if single_B.all():
            return mask_BT, mask_BT
        own_BT = mask_BT & single_B[:, None]  # the whole row
        return own_BT | (mask_BT & ~second_BT), own_BT | second_BT


class ELMoForQuestionAnswering(ELMoTaskModel):
    """Where a context holds the answer to a question: BiDAF with self-attention (Clark and Gardner 2017), or a linear
    layer.

    A row is `tokenizer(question, context)`, which the biLM reads as two texts. Logits are over the whole row: the words
    of the context, and the row's first token, which stands for "no answer here"; elsewhere they are too low to matter.
    """

    default_elmo_placement = "both"
    custom_pipelines = {
        "question-answering": {
            "impl": "pipeline_elmo.ELMoQuestionAnsweringPipeline",
            "pt": ["AutoModelForQuestionAnswering"],
        }
    }

    def __init__(self, config: ELMoConfig):
        network = "linear" if config.head == "linear" else "reader"
        super().__init__(config, network)
        self.is_linear = network == "linear"
        if self.is_linear:
            self.qa_outputs = nn.Linear(self.input_size, 2)
        else:
            self.reader = SpanReader(self.input_size, self.task_hidden_size, self.task_dropout, self.output_elmo_size)
        self.post_init()
        self._freeze_as_configured()

    @can_return_tuple
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
        """Logits of starts and ends `(batch, time)`, and the loss, their mean, if both positions are given.

        Args:
            character_ids, input_ids, attention_mask, inputs_embeds: as in `ELMoModel`. The markers are told by
                `input_ids`.
            token_type_ids: `(batch, time)`, 0 at the question and 1 at the context.
            elmo_hidden_states: `(batch, layers + 1, time, hidden_size)`, a frozen biLM's layers, computed before.
            start_positions, end_positions: `(batch,)`, the answer's first and last token in the row; where this
                context has no answer, the row's first token twice.
            output_hidden_states: whether to return the biLM's layers.
        """
        text = self.read(character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, elmo_hidden_states)
        if token_type_ids is None:
            raise ValueError(
                "A row holds a question and a context: pass the `token_type_ids` of tokenizer(question, context)."
            )
        words_BT = self.words(text.mask_BT, input_ids, inputs_embeds)
        context_BT, first_BT = words_BT & (token_type_ids == 1), text.mask_BT & (text.mask_BT.cumsum(1) == 1)
        if self.is_linear:
            start_BT, end_BT = self.qa_outputs(text.tokens_BTD).unbind(-1)
        else:
            question_BT = words_BT & (token_type_ids == 0)
            start_BT, end_BT, none_B = self.reader(text.tokens_BTD, question_BT, context_BT, text.output_BTE)
            start_BT, end_BT = (torch.where(first_BT, none_B[:, None], each_BT) for each_BT in (start_BT, end_BT))
        allowed_BT = context_BT | first_BT
        lowest = torch.finfo(start_BT.dtype).min / 4  # the sum of a start and an end stays finite
        logits = [each_BT.masked_fill(~allowed_BT, lowest) for each_BT in (start_BT, end_BT)]
        loss = None
        if start_positions is not None and end_positions is not None:
            self._check_positions("start_positions", start_positions, allowed_BT)
            self._check_positions("end_positions", end_positions, allowed_BT)
            losses = map(F.cross_entropy, logits, (start_positions, end_positions))
            loss = sum(losses) / 2 + self.penalty()
        elif start_positions is not None or end_positions is not None:
            raise ValueError("Pass `start_positions` and `end_positions` together.")
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=logits[0],
            end_logits=logits[1],
            hidden_states=self._shown(text.hidden_states, output_hidden_states),
        )

    def _check_positions(self, name: str, position_B: Tensor, allowed_BT: Tensor):
        _check_shape(name, position_B, (len(allowed_BT),))
        inside_B = (position_B >= 0) & (position_B < allowed_BT.shape[1])
        wrong_B = ~(inside_B & allowed_BT.gather(1, (position_B * inside_B)[:, None]).squeeze(1))
        if wrong_B.any():
            row = int(wrong_B.nonzero()[0])
            raise ValueError(
                f"`{name}` is {int(position_B[row])} in row {row}, where no word of the context stands; pass the place "
                "of one, or of the row's first token if there is no answer."
            )


def _chosen(parameter: Tensor, rows_V: Tensor, mean: bool) -> nn.Parameter:
    """Rows of a table; those numbered -1 are its mean, or drawn as for a new model."""
    rows_V = rows_V.to(parameter.device)
    chosen = parameter[rows_V.clamp(min=0)]
    is_new_V = rows_V < 0
    extra = parameter.new_zeros(int(is_new_V.sum()), *parameter.shape[1:])
    if mean:
        extra += parameter.mean(0)
    elif parameter.dim() > 1:
        extra.normal_(std=parameter.shape[1] ** -0.5)
    chosen[is_new_V] = extra
    return nn.Parameter(chosen, requires_grad=parameter.requires_grad)


def _unpack(text: TokenBatch, forward: list[Tensor], backward: list[Tensor]) -> tuple[Tensor, ...]:
    """All layers as `(batch, time, 2 * projection_size)`; the token layer stands twice side by side."""
    positions_N = text.packing.positions_N
    forward_N, backward_N = positions_N[text.packing.forward_N], positions_N[text.packing.backward_N]

    def joined(forward_NP: Tensor, forward_N: Tensor, backward_NP: Tensor, backward_N: Tensor) -> Tensor:
        size = forward_NP.shape[1]
        layer = forward_NP.new_zeros(*text.mask_BT.shape, 2 * size)
        layer.flatten(0, 1)[:, :size].index_copy_(0, forward_N, forward_NP)
        layer.flatten(0, 1)[:, size:].index_copy_(0, backward_N, backward_NP)
        return layer

    tokens_NP = text.words_UP[text.index_N]
    layers = (joined(f, forward_N, b, backward_N) for f, b in zip(forward, backward, strict=True))
    return joined(tokens_NP, positions_N, tokens_NP, positions_N), *layers


def _join_states(forward: list[Tensor], backward: list[Tensor]) -> States:
    hidden, cell = (torch.stack(pair, dim=2) for pair in zip(forward, backward, strict=True))
    return hidden, cell


def _targets(given: Tensor, shifted: bool, direction: int, text: TokenBatch, config: ELMoConfig) -> Tensor:
    """The target `(N,)` of each real token in reading order, -100 where there is none.

    Args:
        given: `(batch, time)`, each position's own word if `shifted`, else its target.
    """
    _check_shape("labels", given, tuple(text.mask_BT.shape))
    words_N = given.flatten()[text.packing.positions_N]
    _check_targets(words_N[words_N != -100], config)
    if not shifted:
        return words_N
    here_M, there_M = _neighbors(direction, text)
    return torch.full_like(words_N, -100).index_copy_(0, here_M, words_N[there_M])


def _neighbors(direction: int, text: TokenBatch) -> tuple[Tensor, Tensor]:
    """Which real tokens `(M,)` predict which others, in reading order: the next of the row, or the one before."""
    rows_N = text.packing.positions_N // text.mask_BT.shape[1]
    first_M = (rows_N[1:] == rows_N[:-1]).nonzero(as_tuple=True)[0]
    return (first_M + 1, first_M) if direction else (first_M, first_M + 1)


def _check_targets(targets_M: Tensor, config: ELMoConfig):
    _check_range("labels", targets_M, config.vocab_size, "or call `resize_token_embeddings(len(tokenizer))`")
    if (targets_M == config.pad_token_id).any():
        raise ValueError("`labels` hold <PAD> at a word, which is never predicted; pass -100 where nothing is.")


def _check_shape(name: str, tensor: Tensor, expected: tuple):
    """Raises unless the shape fits; names in `expected` stand for any size."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"`{name}` is a {type(tensor).__name__}; pass a tensor: tokenizer(..., return_tensors='pt').")
    fits = tensor.dim() == len(expected) and all(
        isinstance(size, str) or size == actual for size, actual in zip(expected, tensor.shape, strict=True)
    )
    if not fits:
        shape = ", ".join(map(str, expected))
        raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}; pass shape ({shape}).")


def _check_range(name: str, ids: Tensor, size: int, otherwise: str = ""):
    low, high = ids.aminmax() if ids.numel() else (ids.new_zeros(()),) * 2
    if low < 0 or high >= size:
        raise ValueError(
            f"`{name}` holds ids from {low} to {high}, but this model knows 0 to {size - 1}. Use the tokenizer that "
            f"was saved with the model{', ' + otherwise if otherwise else ''}."
        )


@torch.no_grad()
def _zero_row(weight: Tensor, row: int):
    if not getattr(weight, "_is_hf_initialized", False):  # a slice of the weight would lose this flag
        init.zeros_(weight[row])


__all__ = [
    "ELMoForPreTraining",
    "ELMoForPreTrainingOutput",
    "ELMoForQuestionAnswering",
    "ELMoForSequenceClassification",
    "ELMoForTokenClassification",
    "ELMoModel",
    "ELMoModelOutput",
    "ELMoPredictions",
    "ELMoPreTrainedModel",
    "ELMoScores",
    "ELMoTokenClassifierOutput",
    "ScalarMix",
]
