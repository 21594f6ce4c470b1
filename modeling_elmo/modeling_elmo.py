"""ELMo: a character-level bidirectional language model (biLM), and the mix of its layers.

Peters et al. 2018, "Deep contextualized word representations", https://arxiv.org/abs/1802.05365. In reading order: the
layers become one vector (`ScalarMix`); characters become token vectors (`ELMoCharacterEncoder` in `elmo_encoder.py`)
and token vectors become layers (`ELMoLSTM` in `elmo_lstm.py`) in the model (`ELMoModel`); the training objective
(`ELMoForPreTraining`). Task heads are in `modeling_elmo_heads.py`.

Shape suffixes: B batch; T time; N real tokens of the batch; M pairs of neighbouring tokens; C a chunk of tokens; U
distinct words; X the ids of a word (`max_word_length` characters, after the word's id if the model has word vectors);
P `projection_size`; E 2 * P; F features of a word; V words of the vocabulary; L LSTM layers; S sequences.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import ModelOutput, logging

from .configuration_elmo import ELMoConfig
from .elmo_backends import HOW_TO_TRAIN, fast_linear, fetched, is_exporting, is_sharded
from .elmo_encoder import ELMoCharacterEncoder, ELMoHighway, VocabularyCache, distinct_rows, is_hooked
from .elmo_export import padded_lstm
from .elmo_inputs import (
    NO_TORCHSCRIPT,
    TokenBatch,
    check_floats,
    check_ids,
    check_range,
    on_host,
    pack,
    returns_output,
    to_device,
    token_mask,
    unpack_layers,
    word_mask,
)
from .elmo_int8 import ELMoInt8Config, ELMoInt8Quantizer, Int8Linear, int8_obstacle, replace_linears
from .elmo_lstm import ELMoLSTM, ELMoLSTMLayer, inference_in_threads, kernel_of_both, run_both
from .elmo_softmax import CHUNK_LOGITS, Candidates, ELMoSoftmax, chosen_rows

if TYPE_CHECKING:  # saved with every model: the Auto map of the configuration names its heads
    from .modeling_elmo_heads import ELMoTaskModel  # noqa: F401

logger = logging.get_logger(__name__)

# Files that travel with one head only. Once they did with every model.
CODE_OF_SOME_HEADS = (
    *("modeling_elmo_roles.py", "pipeline_elmo_roles.py", "elmo_head_interleaved.py"),
    *("modeling_elmo_coreference.py", "pipeline_elmo_coreference.py", "elmo_head_spans.py"),
)

States = tuple[Tensor, Tensor]


class StatesOutput(ModelOutput):
    """An output whose `final_states` are a pair, and among its `items()` an output of their own.

    Pipelines read the items of a batch, and split by row what they know: tensors and nested outputs, but no pairs.
    """

    def items(self):
        items = dict(super().items())
        if states := items.get("final_states"):
            items["final_states"] = ModelOutput(hidden=states[0], cell=states[1])
        return items.items()

    def __getitem__(self, key):
        return dict(super().items())[key] if isinstance(key, str) else super().__getitem__(key)

    def __setitem__(self, key, value):
        super().__setitem__(key, tuple(value.values()) if key == "final_states" and isinstance(value, dict) else value)


@dataclass
class ELMoModelOutput(StatesOutput):
    """Output of `ELMoModel`. All vectors are zeros at padding.

    Shape:
        last_hidden_state: `(batch, time, 2 * projection_size)`, the top biLSTM layer, forward half first.
        elmo_embeddings: `(batch, time, 2 * projection_size)`, the mix of all layers (equation 1), or `None`.
        hidden_states: `num_hidden_layers + 1` tensors of the same shape. The first is the token layer, twice.
        final_states: `hidden (batch, layers, 2, projection_size)` and `cell (batch, layers, 2, lstm_hidden_size)` at
            the end of each direction, for `initial_states` of the next call; `None` if a row has two texts.
    """

    last_hidden_state: Tensor | None = None
    elmo_embeddings: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    final_states: States | None = None


@dataclass
class ELMoForPreTrainingOutput(StatesOutput):
    """Output of `ELMoForPreTraining`.

    Shape:
        loss: `()`, the mean of both directions' losses (section 3.1), in nats per prediction.
        forward_loss, backward_loss: `()`, the loss of each direction, for reports only: they have no gradient.
        hidden_states: as in `ELMoModelOutput`; only on request, and only if both directions read the same text.
        final_states: as in `ELMoModelOutput`.
    """

    loss: Tensor | None = None
    forward_loss: Tensor | None = None
    backward_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    final_states: States | None = None

    def __getitem__(self, key):
        if key == "logits":
            raise KeyError(
                "The output has losses and no `logits`, which Trainer's `label_smoothing_factor` reads; leave it out."
            )
        return super().__getitem__(key)


@dataclass
class ELMoScores(ModelOutput):
    """Output of `ELMoForPreTraining.score`. The sum over a row is the log-probability of its text.

    Shape:
        forward_log_probs: `(batch, time)`, of each word given the words before it, in nats; 0 at the first of a row.
        backward_log_probs: `(batch, time)`, of each word given the words after it; 0 at the last of a row.
    """

    forward_log_probs: Tensor | None = None
    backward_log_probs: Tensor | None = None


@dataclass
class ELMoPredictions(ModelOutput):
    """Output of `ELMoForPreTraining.predict_words`: `<PAD>` and 0 where nothing is predicted.

    Shape:
        word_ids: `(batch, time, top_k)`, the most likely words at each position, best first.
        log_probs: `(batch, time, top_k)`, in nats.
    """

    word_ids: Tensor | None = None
    log_probs: Tensor | None = None


class ELMoPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation of all ELMo models."""

    config_class = ELMoConfig
    config: ELMoConfig
    base_model_prefix = "elmo"
    main_input_name = "character_ids"
    custom_pipelines: dict[str, Any] = {}  # written into the saved configuration, where `pipeline()` finds them
    # A head's loss is a mean over the batch: Trainer itself divides it by the accumulation steps.
    accepts_loss_kwargs = False
    _keys_to_ignore_on_load_unexpected = [r"scalar_mix\.", r"softmax\."]

    def __init__(self, config: ELMoConfig, *args, **kwargs):
        config.validate_sizes()  # values assigned after construction were checked for their type only
        config.validate_token_encoder()
        super().__init__(config, *args, **kwargs)
        if not config.char_vocab_size:
            self.main_input_name = "input_ids"

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        absent = [*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]
        if any(name.startswith("softmax.") for name in absent):
            model.config.has_softmax = False  # the checkpoint has no softmax of this size: this one is random
        model._freeze_as_configured()  # loading creates every parameter again, with gradients on
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args, **kwargs):
        """Saves the model with its code. The configuration names the classes and pipelines in the saved folder.

        Without its code, and with a warning, where the package is installed without sources.
        """
        if not Path(__file__).with_suffix(".py").is_file():
            logger.warning(
                "The model is saved without its code, because this installation has no sources. It loads only where "
                "modeling_elmo is installed; leave out trust_remote_code there."
            )
        self.config.use_code_of_folder()
        if self.custom_pipelines:
            self.config.custom_pipelines = self.custom_pipelines
        elif hasattr(self.config, "custom_pipelines"):  # from a checkpoint of another class
            del self.config.custom_pipelines
        super().save_pretrained(*args, **kwargs)
        self._remove_code_of_others(*args, **kwargs)

    def _remove_code_of_others(self, save_directory: str | os.PathLike, *_: Any, **__: Any):
        """Removes code of heads that this class does not need, from when every folder had the code of all heads."""
        if self._auto_class is None or type(self).__module__ == "__main__":  # saved without code
            return
        file = sys.modules[type(self).__module__].__file__
        needed = {Path(path).name for path in (file, *get_relative_import_files(file))}
        for name in CODE_OF_SOME_HEADS:
            if name not in needed:
                Path(save_directory, name).unlink(missing_ok=True)

    def quantize(self) -> "ELMoPreTrainedModel":
        """Stores the linear layers of the biLM in 8 bits, in place, and returns the model: for inference on CPU.

        They take a quarter of their memory, and a half once their first use made a copy in the layout of fast products.
        `save_pretrained` and `from_pretrained` keep the 8 bits, `dequantize` turns them back into float32, as rounded.
        Tables, convolutions, the softmax and heads stay in float32, and so do cells and clips. Other devices compute
        with the plain definition, which is slow. A vocabulary cache is dropped: call `cache_vocabulary` afterwards.

        A processor without the instructions for 8 bits gives a warning, and the model stays in float32.

        Raises:
            ValueError: the model is not in float32, or not on CPU, or it is a head without a biLM.
        """
        if not isinstance(self.base_model, ELMoModel):
            raise ValueError("This head has no biLM (`use_elmo=False`), so there is nothing to quantize.")
        weights = [linear.weight for linear in self.base_model.modules() if type(linear) is nn.Linear]
        wrong = [weight for weight in weights if weight.dtype != torch.float32 or weight.device.type != "cpu"]
        if wrong:
            raise ValueError(
                f"The model is in {wrong[0].dtype} on {wrong[0].device}; call `model.to('cpu', torch.float32)` before "
                "`quantize()`."
            )
        if obstacle := int8_obstacle():
            logger.warning(f"The model stays in float32: {obstacle}.")
        elif weights:  # not quantized yet
            quantizer = ELMoInt8Quantizer(ELMoInt8Config(), pre_quantized=False)
            quantizer.preprocess_model(self)
            self.hf_quantizer = quantizer
            quantizer.postprocess_model(self)
        return self

    def _use_int8(self, filled: bool):
        """Replaces the biLM's linear layers, with their values or with room for saved ones."""
        bilm = self.base_model
        parameters = [(name, p) for name, p in bilm.named_parameters() if not name.startswith("scalar_mix.")]
        bilm.held_gradients = [name for name, parameter in parameters if parameter.requires_grad]
        replace_linears(bilm, nn.Linear, Int8Linear.from_linear if filled else Int8Linear)
        if bilm.vocabulary_cache is not None and filled:
            bilm._drop_cache()
        elif bilm.vocabulary_cache is not None:
            bilm.vocabulary_cache = bilm._empty_cache()

    def _use_floats(self):
        self.base_model._drop_cache()
        replace_linears(self.base_model, Int8Linear, Int8Linear.to_linear)
        self._hold_gradients(False)

    def _hold_gradients(self, hold: bool):
        """Turns off the biLM's gradients, which weights in 8 bits do not have, or turns on those that were on."""
        for name in self.base_model.held_gradients:
            self.base_model.get_parameter(name).requires_grad_(not hold)

    def __prepare_scriptable__(self):  # `torch.jit.script` calls it first
        raise ValueError(NO_TORCHSCRIPT)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """A text of two words, each between markers. For heads, the second is a text of its own or a predicate."""
        config = self.config
        word, end = config.unk_token_id, config.eos_token_id
        inputs = {
            "character_ids": torch.ones(1, 5, config.max_word_length, dtype=torch.long),
            "input_ids": torch.tensor([[config.bos_token_id, word, end, word, end]]),
            "token_type_ids": torch.tensor([[0, 0, 0, 1, 0]]),
            "speaker_ids": torch.tensor([0]),
            "genre_ids": torch.tensor(0),
        }
        return {name: each for name, each in inputs.items() if name in signature(type(self).forward).parameters}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, also in a replica of `nn.DataParallel`, which has plain tensors in their place."""
        return super().dtype if (weight := self._weight_of_replica()) is None else weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights, also in a replica of `nn.DataParallel`."""
        return super().device if (weight := self._weight_of_replica()) is None else weight.device

    def _weight_of_replica(self) -> Tensor | None:
        if not getattr(self, "_is_replica", False):
            return None
        values = (value for module in self.modules() for value in vars(module).values() if isinstance(value, Tensor))
        return next(value for value in values if value.is_floating_point())

    def _is_int8(self) -> bool:
        return any(isinstance(module, Int8Linear) for module in self.modules())

    def train(self, mode: bool = True) -> "ELMoPreTrainedModel":
        if mode and self._is_int8():
            raise ValueError(f"A quantized model cannot be trained. {HOW_TO_TRAIN}")
        return super().train(mode)

    def _apply(self, fn, recurse: bool = True):
        if self._is_int8() and (dtype := fn(torch.empty(0, device="cpu")).dtype) != torch.float32:
            raise ValueError(f"A quantized model cannot be converted to {dtype}; call `model.dequantize()` first.")
        return super()._apply(fn, recurse)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Names that DistributedDataParallel leaves alone.

        It would send the vocabulary cache at every step. It supports neither sparse gradients, which `run_pretraining`
        reduces itself, nor sharded parameters.
        """
        cache = [name for name, _ in self.named_buffers() if "vocabulary_cache." in name]
        sparse = [f"{name}." for name, module in self.named_modules() if getattr(module, "sparse_gradients", False)]
        parameters = self.named_parameters()
        return cache + [name for name, p in parameters if is_sharded(p) or name.startswith(tuple(sparse))]

    def _freeze_as_configured(self):
        """Heads freeze their biLM here. The biLM itself has nothing to freeze."""

    @torch.no_grad()
    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resizes the vocabulary: the softmax, and the word vectors if there are any. Characters do not change.

        Args:
            new_num_tokens: the new vocabulary size. Default: the present size.
            pad_to_multiple_of: the size is rounded up to a multiple of this number.
            mean_resizing: new rows are the mean of the present rows; otherwise random, with their standard deviation.

        Raises:
            ValueError: a size that is too small; for an adaptive softmax, one that ends before its last cluster.
        """
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        step = 1 if pad_to_multiple_of is None else pad_to_multiple_of
        if not all(type(number) is int and number > 0 for number in (size, step)):
            raise ValueError(f"Received a size of {size} and a multiple of {step}; pass integers of 1 or more.")
        size, kept = -(-size // step) * step, self.config.vocab_size
        self._choose_rows([row if row < kept else -1 for row in range(size)], mean_resizing)
        return self.get_input_embeddings()

    @torch.no_grad()
    def replace_vocabulary(self, source_rows: Sequence[int]):
        """Replaces the vocabulary: the rows of the softmax, and of the word vectors if there are any.

        Args:
            source_rows: the present id of each new word, or -1 if it has none. Rows of words without an id are the mean
                of the present rows, or random if the checkpoint has no softmax.

        Raises:
            ValueError: ids outside the vocabulary; other words than before ahead of the last cluster of an adaptive
                softmax, which alone can change.
        """
        outside = [row for row in source_rows if not -1 <= row < self.config.vocab_size]
        if outside:
            raise ValueError(
                f"`source_rows` has {outside[:3]}; pass ids of the present vocabulary, 0 to "
                f"{self.config.vocab_size - 1}, or -1 for a new word."
            )
        self._choose_rows(source_rows, self.config.has_softmax)

    def _choose_rows(self, source_rows: Sequence[int], mean: bool):
        size = len(source_rows)
        if size <= max(self.config.bos_token_id, self.config.eos_token_id, self.config.unk_token_id):
            raise ValueError(f"A vocabulary of {size} words has no room for the special words; pass 4 or more.")
        rows_V, modules = torch.tensor(source_rows, device="cpu"), list(self.modules())
        for module in modules:  # first, because an adaptive softmax may refuse
            if isinstance(module, ELMoSoftmax):
                module.choose_rows(rows_V, mean)
                if module.adaptive is not None:
                    self.config.adaptive_cutoffs = module.adaptive.cutoffs[:-1]
        for module in modules:
            if isinstance(words := getattr(module, "word_embeddings", None), nn.Embedding):
                words.weight, words.num_embeddings = chosen_rows(words.weight, rows_V, mean), size
                if isinstance(module, ELMoModel):
                    module._drop_cache()
        self.config.vocab_size = size
        self.tie_weights()

    def _initialize_weights(self, module: nn.Module, *_):
        # For custom code, the base class skips modules that have all parameters in submodules, as most of ours do. It
        # does so to protect loaded values, but `transformers.initialization` protects them anyway.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Initialises as the original does (bilm-tf `training.py`; Glorot and Bengio 2010 for the recurrence).

        | parameter | distribution |
        |---|---|
        | character embedding | U(-1, 1), row 0 zeros |
        | convolution, relu / tanh | U(-0.05, 0.05) / N(0, 1 / sqrt(width * char_dim)), bias 0 |
        | highway | N(0, 1 / sqrt(n)), transform bias 0, carry bias -2 |
        | gates | U(+-sqrt(6 / (in + projection + 4 * hidden))) for both halves, bias 0 |
        | LSTM projection | U(+-sqrt(6 / (hidden + projection))) |
        | softmax | N(0, 1 / sqrt(projection)), bias 0, row `<PAD>` zeros; or the tied word embedding |
        | token projection (in `ELMoModel`) | N(0, 1 / sqrt(n)), bias 0 |
        | word embedding (in `ELMoModel`) | U(+-sqrt(6 / (vocabulary + width))), row `<PAD>` zeros |
        | scalar mix | weights 0, gamma 1 |
        | linear layer of a head | N(0, 0.02), bias 0 |
        | network of a head | `reset_parameters` of its parts |
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
        elif isinstance(module, ELMoSoftmax) and module.adaptive is not None:
            for linear in (part for part in module.modules() if isinstance(part, nn.Linear)):
                init.normal_(linear.weight, std=linear.in_features**-0.5)
                if linear.bias is not None:
                    init.zeros_(linear.bias)
        elif isinstance(module, ELMoSoftmax):
            init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            init.zeros_(module.bias)
            _zero_row(module.weight, module.pad_token_id)
        elif isinstance(module, nn.Linear):
            super()._init_weights(module)


class ScalarMix(nn.Module):
    """Mixes all layers into one vector per token: `gamma * sum_j softmax(s)_j h_j` (equation 1).

    `scalar_mix_mode` can fix the weights: `"average"`, `"top"`, or the number of one layer. Gamma is always learned.
    Exclude both from weight decay, which would pull gamma to 0. `scalar_mix_l2` is the paper's regularisation.
    """

    def __init__(self, config: ELMoConfig):
        super().__init__()
        self.mode = config.scalar_mix_mode
        self.num_layers = config.num_hidden_layers + 1
        self.layer_norm = config.scalar_mix_layer_norm
        self.l2 = config.scalar_mix_l2
        self.weights = nn.Parameter(torch.zeros(self.num_layers)) if self.mode == "learned" else None
        self.gamma = nn.Parameter(torch.ones(1))

    def reset_parameters(self):
        """The average of the layers."""
        init.ones_(self.gamma)
        if self.weights is not None:
            init.zeros_(self.weights)

    def layer_weights(self) -> Tensor:
        """`(layers,)`: the share of each layer. The sum is 1."""
        if self.weights is not None:
            return fetched(self, "weights").softmax(0)
        gamma = fetched(self, "gamma")
        if self.mode == "average":
            return torch.full_like(gamma, 1 / self.num_layers).expand(self.num_layers)
        layer = self.num_layers - 1 if self.mode == "top" else self.mode
        return F.one_hot(torch.tensor(layer, device=gamma.device), self.num_layers).to(gamma.dtype)

    def penalty(self) -> Tensor:
        """`scalar_mix_l2 * ||s||^2` on the raw weights (section 3.3). Large values keep the mix near the average."""
        return self(None)  # an offloaded parameter can be read only inside the call of its module

    def forward(self, hidden_states: tuple[Tensor, ...] | None, attention_mask: Tensor | None = None) -> Tensor:
        """Mixes the layers, each `(batch, time, width)`; zeros where `attention_mask` `(batch, time)` is 0."""
        if hidden_states is None:
            return self.l2 * (self.weights if self.weights is not None else self.gamma.new_zeros(1)).square().sum()
        if len(hidden_states) != self.num_layers:
            raise ValueError(
                f"ScalarMix received {len(hidden_states)} layers; pass all {self.num_layers} of `hidden_states`."
            )
        if attention_mask is None:
            attention_mask = hidden_states[0].new_ones(hidden_states[0].shape[:2])
        mask_BT = attention_mask.bool()
        layers = [self._normalize(layer, mask_BT) for layer in hidden_states] if self.layer_norm else hidden_states
        mixed = sum(weight * layer for weight, layer in zip(self.layer_weights(), layers, strict=True))
        return (self.gamma * mixed).masked_fill(~mask_BT[..., None], 0)

    def _normalize(self, layer: Tensor, mask_BT: Tensor) -> Tensor:
        if self.layer_norm == "token":
            return F.layer_norm(layer, layer.shape[-1:])
        if self.layer_norm == "bilm":  # the original removed the markers first
            mask_BT = mask_BT & (mask_BT.cumsum(1) > 1) & (mask_BT.flip(1).cumsum(1).flip(1) > 1)
        if not mask_BT.any():  # only markers
            return layer
        variance, mean = torch.var_mean(layer[mask_BT].float(), correction=0)
        epsilon = 1e-13 if self.layer_norm == "allennlp" else 1e-12
        return ((layer - mean) / (variance + epsilon).sqrt()).to(layer.dtype)


class ELMoModel(ELMoPreTrainedModel):
    """The bidirectional language model (section 3.1) and a mix of its layers (section 3.2).

    The model is stateless: the same text gives the same vectors in any batch. State is an argument (`initial_states`)
    and a result (`final_states`), and never kept in the module.

    Args:
        config: the model's options.
        add_mixing_layer: whether to return `elmo_embeddings`. Heads have their own mixes.
    """

    _keys_to_ignore_on_load_missing = [r"scalar_mix\."]  # a language model has none; a new mix is the average

    def __init__(self, config: ELMoConfig, add_mixing_layer: bool = True):
        super().__init__(config)
        words, width = config.vocab_size, config.word_embedding_size
        self.char_encoder = ELMoCharacterEncoder(config) if config.char_vocab_size else None
        self.word_embeddings = nn.Embedding(words, width, config.pad_token_id) if width else None
        projected = config.always_project or config.num_features != config.projection_size
        self.token_projection = nn.Linear(config.num_features, config.projection_size) if projected else None
        self.forward_lstm = ELMoLSTM(config)
        self.backward_lstm = ELMoLSTM(config)
        self.scalar_mix = ScalarMix(config) if add_mixing_layer else None
        self.vocabulary_cache: VocabularyCache | None = self._empty_cache() if config.vocabulary_cache_size else None
        self.frozen = False
        self.held_gradients: list[str] = []  # parameters whose gradients come back with `dequantize`
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        # Compared by identity: transformers may execute this file again, and then its classes are others.
        if module is self.scalar_mix:
            self.scalar_mix.reset_parameters()
        elif module is not self:
            super()._init_weights(module)
        else:
            if self.word_embeddings is not None:
                init.xavier_uniform_(self.word_embeddings.weight)
                _zero_row(self.word_embeddings.weight, self.config.pad_token_id)
            if self.token_projection is not None:
                init.normal_(self.token_projection.weight, std=self.token_projection.in_features**-0.5)
                init.zeros_(self.token_projection.bias)

    def freeze(self):
        """Turns off gradients and dropout of the biLM for good, whatever `train()` says. The mix still learns."""
        self.requires_grad_(False)
        if self.scalar_mix is not None:
            self.scalar_mix.requires_grad_(True)
        self.frozen, self.held_gradients = True, []
        self.eval()

    def train(self, mode: bool = True) -> "ELMoPreTrainedModel":
        return super().train(mode and not self.frozen)

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embedding if there is one, else the character embedding."""
        return self.char_encoder.char_embeddings if self.word_embeddings is None else self.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding):
        if self.word_embeddings is None:
            self.char_encoder.char_embeddings = value
        else:
            self.word_embeddings = value

    @torch.compiler.disable  # sizes depend on the words: every text would be compiled anew, with slower kernels
    @returns_output
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
        """Computes contextual vectors of every token.

        Args:
            character_ids: `(batch, time, max_word_length)`, the characters of each word, from `ELMoTokenizer`. On an
                accelerator the model waits least if ids and masks stay on the CPU.
            input_ids: `(batch, time)`, word ids. Only models with word vectors read them.
            attention_mask: `(batch, time)`, 1 at real tokens, which may be at any positions. Default: all words that
                have characters (word-level models: all words but `<PAD>`).
            token_type_ids: `(batch, time)`. A new sequence begins where the type changes: two texts do not mix.
            inputs_embeds: `(batch, time, projection_size)`, token vectors instead of words.
            initial_states: `final_states` of the preceding text. Default: zeros. Their values are not checked: a NaN
                or an infinite number may turn all vectors of its row into NaN, but of no other row.
            output_hidden_states: accepted for compatibility; the model always returns all layers.

        Raises:
            ValueError: an input has the wrong shape, has ids out of range, or contradicts another.
        """
        inputs = (character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds)
        if is_exporting():
            return self._forward_in_export(*inputs, initial_states)
        batch = self.read_tokens(*inputs)
        states = self.starting_states(initial_states, batch.words_UP, len(batch.mask_BT))
        rows_S = batch.host_packing.rows_S
        two_texts = token_type_ids is not None and len(rows_S.unique()) < len(rows_S)
        if two_texts and initial_states is not None:
            raise ValueError(
                "`initial_states` continue one text, but `token_type_ids` mark two texts in a row. Pass one text."
            )
        streams = (batch, batch.packing.forward_N), (batch, batch.packing.backward_N)
        (forward, *forward_ends), (backward, *backward_ends) = self.run_directions(streams, states)
        hidden_states = unpack_layers(batch, forward, backward)
        return ELMoModelOutput(
            last_hidden_state=hidden_states[-1],
            elmo_embeddings=None if self.scalar_mix is None else self.scalar_mix(hidden_states, batch.mask_BT),
            hidden_states=hidden_states,
            final_states=None if two_texts else _join_states(forward_ends, backward_ends),
        )

    def _forward_in_export(
        self, character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, initial_states
    ) -> ELMoModelOutput:
        """`forward` as `torch.export` traces it, for all sizes and masks: on padded rows, without checks of values."""
        if token_type_ids is not None:
            raise ValueError("`token_type_ids` cannot be exported. Leave them out, and give each text its own row.")
        if self.training:
            raise ValueError("A model in training mode cannot be exported. Call `model.eval()` before.")
        mask_BT = token_mask(self.config, character_ids, input_ids, attention_mask, None, inputs_embeds)
        if inputs_embeds is None:
            inputs_embeds = self._compute_words(self._word_ids(character_ids, input_ids).long())
        words_BTP = inputs_embeds.to(self.dtype)
        states = self.starting_states(initial_states, words_BTP, mask_BT.shape[0])
        starts = [[state[:, :, direction] for state in states] for direction in range(2)]
        forward, *forward_ends = padded_lstm(self.forward_lstm, words_BTP, mask_BT, starts[0], reverse=False)
        backward, *backward_ends = padded_lstm(self.backward_lstm, words_BTP, mask_BT, starts[1], reverse=True)
        halves = zip([words_BTP, *forward], [words_BTP, *backward], strict=True)
        hidden_states = tuple(torch.cat(pair, -1).masked_fill(~mask_BT[..., None], 0) for pair in halves)
        return ELMoModelOutput(
            last_hidden_state=hidden_states[-1],
            elmo_embeddings=None if self.scalar_mix is None else self.scalar_mix(hidden_states, mask_BT),
            hidden_states=hidden_states,
            final_states=_join_states(forward_ends, backward_ends),
        )

    def sentence_embeddings(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """The mean of the mix over the words of each row, without markers: `(batch, 2 * projection_size)`.

        A row without words gives zeros.

        Args:
            character_ids, input_ids, attention_mask, token_type_ids: as in `forward`. `input_ids` tell the markers.
        """
        return self._words_and_mean(character_ids, input_ids, attention_mask, token_type_ids)[2][:, 0]

    def token_embeddings(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """The mix of each word; in the place of all other tokens, the mean over the words of the row.

        sentence-transformers calls this method, because the folder's `sentence_bert_config.json` names it. Its pooling
        reads the markers as well, which so change neither a mean nor a maximum.

        Args:
            character_ids, input_ids, attention_mask, token_type_ids: as in `forward`. `input_ids` tell the markers.

        Shape:
            result: `(batch, time, 2 * projection_size)`
        """
        words_BT1, mixed_BTE, mean_B1E = self._words_and_mean(character_ids, input_ids, attention_mask, token_type_ids)
        return torch.where(words_BT1, mixed_BTE, mean_B1E)

    def _words_and_mean(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        words_BT1 = word_mask(self.config, token_mask(self.config, *inputs), inputs[1], None)[..., None]
        mixed_BTE = self(*inputs, return_dict=True).elmo_embeddings
        if mixed_BTE is None:
            raise ValueError("This model has no mix: it was built with add_mixing_layer=False. Leave the argument out.")
        words_BT1 = to_device(words_BT1, mixed_BTE.device)
        sum_B1E = mixed_BTE.masked_fill(~words_BT1, 0).sum(1, keepdim=True)
        return words_BT1, mixed_BTE, sum_B1E / words_BT1.sum(1, keepdim=True).clamp(min=1)

    @torch.compiler.disable  # as `forward`
    def read_tokens(
        self, character_ids=None, input_ids=None, attention_mask=None, token_type_ids=None, inputs_embeds=None
    ) -> TokenBatch:
        """Checks the inputs of `forward`, and encodes each distinct word once, or each position if a hook is to see it.

        The host must know the lengths and the distinct words. So it reads the ids itself, which is the only time that
        it waits for an accelerator, and not at all if the inputs are on the CPU.
        """
        if inputs_embeds is None:
            character_ids, attention_mask = on_host(character_ids), on_host(attention_mask)
            input_ids = input_ids if self.word_embeddings is None else on_host(input_ids)
        mask_BT = token_mask(self.config, character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds)
        packing = pack(mask_BT.cpu(), on_host(token_type_ids))
        if inputs_embeds is not None:
            words_UP, index_N = inputs_embeds.flatten(0, 1).to(self.dtype), packing.positions_N
        elif any(map(is_hooked, self._token_encoder())):
            words_BTX = self._word_ids(character_ids, input_ids).masked_fill(~mask_BT[..., None], 0)
            words_UP, index_N = self.encode_words(words_BTX).flatten(0, 1), packing.positions_N
        else:
            words_NX = self._word_ids(character_ids, input_ids).flatten(0, 1)[packing.positions_N]
            distinct_UX, index_N = distinct_rows(words_NX)
            words_UP = self.encode_words(distinct_UX)
        device = words_UP.device
        return TokenBatch(to_device(mask_BT, device), packing.to(device), words_UP, to_device(index_N, device), packing)

    def _word_ids(self, character_ids: Tensor, input_ids: Tensor) -> Tensor:
        """All ids that a word's vector depends on: its word id, if the model has word vectors, then its characters."""
        ids = [] if self.word_embeddings is None else [input_ids[..., None]]
        return torch.cat(ids if self.char_encoder is None else [*ids, character_ids], dim=-1)

    def encode_words(self, words_UX: Tensor) -> Tensor:
        """Token vectors `(..., projection_size)` of rows of ids: the word id, if used, before the characters.

        Words of `cache_vocabulary` are looked up, unless they need a gradient or a hook is to see them.
        """
        words_UX = words_UX.long()
        if self.word_embeddings is not None:
            check_range("input_ids", words_UX[..., 0], self.config.vocab_size)
        if self.char_encoder is not None:
            check_range("character_ids", words_UX[..., -self.config.max_word_length :], self.config.char_vocab_size)
        cache = self._usable_cache()
        if cache is None:
            return self._compute_words(words_UX)
        words_UX = to_device(words_UX, cache.words.device)
        known_U, rows_U = cache.find(words_UX)
        vectors_UP = cache.vectors[rows_U]
        if not known_U.all():
            vectors_UP[~known_U] = self._compute_words(words_UX[~known_U]).to(vectors_UP)
        return vectors_UP

    def _compute_words(self, words_UX: Tensor) -> Tensor:
        features = []
        if self.word_embeddings is not None:
            features.append(self.word_embeddings(to_device(words_UX[..., 0], self.word_embeddings.weight.device)))
        if self.char_encoder is not None:
            features.append(self.char_encoder(words_UX[..., -self.config.max_word_length :]))
        features_UF = torch.cat(features, dim=-1)
        return features_UF if self.token_projection is None else fast_linear(self.token_projection, features_UF)

    @torch.no_grad()
    def cache_vocabulary(self, words: Iterable[str], tokenizer, save: bool = False, batch_size: int = 1024):
        """Computes the token vectors of words once. The model then looks them up by their characters.

        Other words are computed as before. A cached word takes `4 * (max_word_length + projection_size) + 8` bytes
        (float32). The cache moves with the model. It is dropped, with a warning, if a parameter of the encoder changes.

        Args:
            words: the words, for example `tokenizer.get_vocab()`.
            tokenizer: the tokenizer that was saved with the model.
            save: whether `save_pretrained` saves the cache with the model.
            batch_size: number of words per batch.
        """
        if isinstance(words, str) or not callable(tokenizer):
            raise ValueError(
                f"`cache_vocabulary` received {type(words).__name__} and {type(tokenizer).__name__}; pass a list of "
                "words and the tokenizer that was saved with the model."
            )
        if obstacle := self._cache_obstacle():
            raise ValueError(f"`cache_vocabulary` cannot be used here: {obstacle}.")
        self._drop_cache()
        words = list(dict.fromkeys(words))
        rows = []
        for start in range(0, len(words), batch_size):
            encoding = tokenizer(words[start : start + batch_size], is_split_into_words=True, return_tensors="pt")
            inputs = encoding.get("character_ids"), encoding.get("input_ids")
            token_mask(self.config, *inputs)  # checks the tokenizer's output
            rows.append(self._word_ids(*inputs)[0])
        if not rows:
            raise ValueError("`cache_vocabulary` received no words; pass at least one.")
        distinct_UX = distinct_rows(torch.cat(rows))[0]
        batches = logging.tqdm(distinct_UX.split(batch_size), desc="Encoding the vocabulary", unit="batch")
        vectors_UP = torch.cat([self.encode_words(batch) for batch in batches])
        distinct_UX = distinct_UX.to(vectors_UP.device)
        self.vocabulary_cache = VocabularyCache(distinct_UX, vectors_UP, self._word_parameters(), persistent=save)
        self.config.vocabulary_cache_size = len(distinct_UX) if save else 0

    def _usable_cache(self) -> VocabularyCache | None:
        if self.vocabulary_cache is None or self.vocabulary_cache.words.is_meta or self._cache_obstacle():
            return None
        cache, parameters = self.vocabulary_cache, self._word_parameters()
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
            return None
        if cache.suits(parameters):
            return cache
        logger.warning("The encoder's weights changed: its vocabulary cache is dropped. Call `cache_vocabulary` again.")
        self._drop_cache()
        return None

    def _cache_obstacle(self) -> str | None:
        """The reason why words are computed and not looked up, or `None`."""
        if any(map(is_hooked, self._token_encoder())):
            return "the token encoder has a hook, which is to see all words; remove the hook"
        if any(parameter.is_meta for parameter in self._word_parameters()):
            return "weights of the token encoder are offloaded by `device_map`; load them on a device"
        return "this is a replica of `nn.DataParallel`" if getattr(self, "_is_replica", False) else None

    def _drop_cache(self):
        self.vocabulary_cache = None
        self.config.vocabulary_cache_size = 0

    def _empty_cache(self) -> VocabularyCache:
        """A cache of the right size, which `from_pretrained` fills."""
        config = self.config
        columns = (self.word_embeddings is not None) + (config.max_word_length if config.char_vocab_size else 0)
        words_VX = torch.zeros(config.vocabulary_cache_size, columns, dtype=torch.int32)
        vectors_VP = torch.zeros(len(words_VX), config.projection_size)
        return VocabularyCache(words_VX, vectors_VP, self._word_parameters(), persistent=True)

    def _token_encoder(self) -> list[nn.Module]:
        parts = (self.char_encoder, self.word_embeddings, self.token_projection)
        return [part for part in parts if part is not None]

    def _word_parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self._token_encoder() for parameter in part.parameters()]

    def starting_states(self, states: States | None, words_UP: Tensor, batch_size: int) -> States:
        """Checked `initial_states`, or zeros: `(batch, layers, 2, projection_size)` and `(..., lstm_hidden_size)`."""
        config = self.config
        sizes = (config.projection_size, config.lstm_hidden_size)
        shapes = [(batch_size, config.num_hidden_layers, 2, size) for size in sizes]
        # The cell is a long sum, for which half precision is too coarse.
        cell_dtype = torch.promote_types(words_UP.dtype, torch.float32)
        if states is None:
            return words_UP.new_zeros(shapes[0]), words_UP.new_zeros(shapes[1], dtype=cell_dtype)
        states = tuple(states.values()) if isinstance(states, ModelOutput) else states  # an item of an output
        given = states if isinstance(states, (tuple, list)) else [states]
        received = [tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__ for state in given]
        if received != shapes:
            raise ValueError(
                f"`initial_states` have shapes {received}, but this batch of {batch_size} needs (hidden, cell) of "
                f"shapes {shapes}. Pass the `final_states` of the preceding text of the same rows."
            )
        for state, shape in zip(states, shapes, strict=True):
            check_floats("initial_states", state, shape)
        return states[0].to(words_UP), states[1].to(words_UP.device, cell_dtype)

    def run_directions(self, streams: Sequence[tuple[TokenBatch, Tensor]], states: States) -> list[tuple]:
        """Runs both LSTMs, each over a batch in an order, at once where that is faster. Returns as `run_direction`."""
        lstms, batches = (self.forward_lstm, self.backward_lstm), [batch for batch, _ in streams]
        sizes, other_sizes = (batch.packing.batch_sizes for batch in batches)
        tensors = *(batch.words_UP for batch in batches), *states
        kernel = kernel_of_both(lstms, sizes, *tensors) if sizes == other_sizes else None
        if kernel is None:
            calls = [partial(self.run_direction, number, *stream, states) for number, stream in enumerate(streams)]
            return inference_in_threads(lstms, calls, sizes, *tensors)
        inputs_KND = torch.stack([batch.words_UP[batch.index_N[order_N]] for batch, order_N in streams])
        rows = [batch.packing.rows_S for batch in batches]
        starts = [[state[:, :, number] for state in states] for number in range(2)]
        packed = [
            torch.stack([start[rows_S].transpose(0, 1) for start, rows_S in zip(same, rows, strict=True)])
            for same in zip(*starts, strict=True)
        ]
        outputs, *ends = run_both(kernel, lstms, inputs_KND, sizes, *packed)
        found = []
        for number, rows_S in enumerate(rows):
            news = (end[number].transpose(0, 1) for end in ends)
            states_B = [old.index_copy(0, rows_S, new.to(old)) for old, new in zip(starts[number], news, strict=True)]
            found.append(([output[number] for output in outputs], *states_B))
        return found

    @torch.compiler.disable  # as `forward`
    def run_direction(self, direction: int, batch: TokenBatch, order_N: Tensor, states: States):
        """Runs the forward (0) or backward (1) LSTM over the real tokens in the order `order_N`.

        Returns:
            `(outputs, hidden_BLP, cell_BLH)`: the packed output of each layer, and the state after each row's end.
        """
        lstm, rows_S = self.backward_lstm if direction else self.forward_lstm, batch.packing.rows_S
        starts = [state[:, :, direction] for state in states]
        packed = [state[rows_S].transpose(0, 1) for state in starts]
        outputs, *ends = lstm(batch.words_UP, batch.index_N[order_N], batch.packing.batch_sizes, *packed)
        ends = [old.index_copy(0, rows_S, new.transpose(0, 1).to(old)) for old, new in zip(starts, ends, strict=True)]
        return outputs, *ends


class ELMoForPreTraining(ELMoPreTrainedModel):
    """The biLM with its softmax, trained on the joint log-likelihood of both directions (section 3.1)."""

    accepts_loss_kwargs = True  # the losses are divided by Trainer's own number of predictions
    _tied_weights_keys = {"softmax.weight": "elmo.word_embeddings.weight"}  # with `config.tie_word_embeddings`

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # Trainer then counts all labels except the first of each row
        self.elmo = ELMoModel(config, add_mixing_layer=False)
        self.softmax = ELMoSoftmax(config)
        if self.elmo.word_embeddings is None:
            self._tied_weights_keys = {}  # there is nothing to share
        self.post_init()

    @returns_output
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
        """Computes the losses of both directions, on one text or on two independent streams.

        Args:
            character_ids, input_ids, attention_mask, initial_states: as in `ELMoModel`.
            labels: `(batch, time)`, the word id at each position (pass `input_ids`), -100 where nothing is predicted.
                They are shifted inside: forward predicts the next word, backward the preceding one.
            forward_targets, backward_targets: `(batch, time)`, instead of `labels`: the target of each position.
            backward_character_ids, backward_input_ids, backward_attention_mask: the stream of the backward direction,
                if it is not the forward text. It is in its own reading order, last word first.
            num_items_in_batch: predictions of one direction in all accumulated batches; the losses are divided by it.
                Trainer's number is right for rows padded on the right, which is the default.
            candidates: for a sampled softmax in training, from `softmax.sample()`. Pass the same candidates to all
                batches of a step, on every device. Default: drawn at this call.

        Raises:
            ValueError: labels are missing or contradict each other, or the checkpoint has no softmax.
        """
        two_streams = backward_character_ids is not None or backward_input_ids is not None
        self._check_labels(labels, forward_targets, backward_targets, two_streams)
        # The host reads all ids before the device has work, so that nothing after that waits.
        character_ids, backward_character_ids = on_host(character_ids), on_host(backward_character_ids)
        labels, forward_targets, backward_targets = map(on_host, (labels, forward_targets, backward_targets))
        batch = stream = self.elmo.read_tokens(character_ids, input_ids, attention_mask)
        orders = [batch.host_packing.forward_N, batch.host_packing.backward_N]
        if two_streams:
            stream = self.elmo.read_tokens(backward_character_ids, backward_input_ids, backward_attention_mask)
            orders[1] = stream.host_packing.forward_N
            if len(stream.mask_BT) != len(batch.mask_BT):
                rows = len(batch.mask_BT), len(stream.mask_BT)
                raise ValueError(f"The two streams have {rows[0]} and {rows[1]} rows; pass the same number.")
        states = self.elmo.starting_states(initial_states, batch.words_UP, len(batch.mask_BT))
        backward_order_N = stream.packing.forward_N if two_streams else batch.packing.backward_N
        (forward, *forward_ends), (backward, *backward_ends) = self.elmo.run_directions(
            ((batch, batch.packing.forward_N), (stream, backward_order_N)), states
        )
        predictions = []
        streams = (
            (batch, orders[0], forward, forward_targets),
            (stream, orders[1], backward, backward_targets),
        )
        for direction, (tokens, order_N, outputs, aligned) in enumerate(streams):
            if labels is not None:
                targets_N = _shifted_targets(labels, direction, tokens, self.config)
            elif aligned is not None:
                targets_N = _token_targets("forward_targets, backward_targets", aligned, tokens, self.config)
            else:
                continue
            predictions.append((outputs[-1], targets_N[order_N]))
        losses = self._losses(predictions, num_items_in_batch, candidates) if predictions else (None, None, None)
        show = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return ELMoForPreTrainingOutput(
            *losses,
            hidden_states=unpack_layers(batch, forward, backward) if show and not two_streams else None,
            final_states=_join_states(forward_ends, backward_ends),
        )

    def _losses(self, predictions: list[tuple[Tensor, Tensor]], num_items_in_batch, candidates) -> list[Tensor]:
        """The mean of both directions' losses, which has the gradient, and the loss of each direction.

        Args:
            predictions: hidden states on the model's device, and targets on the CPU.
        """
        hidden, targets, scales = [], [], []
        for hidden_NP, targets_N in predictions:
            predicted_M = (targets_N != -100).nonzero()[:, 0]
            count = max(1, len(predicted_M)) if num_items_in_batch is None else num_items_in_batch
            rows_M = to_device(predicted_M, hidden_NP.device)
            hidden.append(F.dropout(hidden_NP, self.config.dropout, self.training)[rows_M])
            targets.append(targets_N[predicted_M])
            scales.append(hidden_NP.new_ones(len(rows_M), dtype=torch.float32) / count)
        scale_N = torch.cat(scales) / 2
        # One call for both directions: they share the softmax and the candidates of a sampled softmax.
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
        """Log-probabilities of the words of a text in each direction, under the full softmax.

        Args:
            character_ids, input_ids, attention_mask, initial_states: as in `ELMoModel`. The words to score are
                `input_ids`; a word outside the vocabulary gets the probability of `<UNK>`.

        Raises:
            ValueError: the checkpoint has no softmax, or the model is in training mode.
        """
        batch, hidden = self._read_both_ways(character_ids, input_ids, attention_mask, initial_states)
        if input_ids is None:
            raise ValueError("Scores are scores of words: pass `input_ids` with `character_ids`.")
        scores = []
        for direction, hidden_NP in enumerate(hidden):
            here_M, there_M = _neighbor_tokens(direction, batch)
            positions_M = batch.host_packing.positions_N[there_M]
            targets_M = input_ids.cpu().flatten()[positions_M].long()
            _check_targets("input_ids", targets_M, self.config)
            _, losses_M = self.softmax(hidden_NP[to_device(here_M, hidden_NP.device)], targets_M)
            positions_M = to_device(positions_M, losses_M.device)
            scores.append(losses_M.new_zeros(batch.mask_BT.numel()).index_copy_(0, positions_M, -losses_M))
        return ELMoScores(*(score.view(batch.mask_BT.shape) for score in scores))

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
        """The most likely words at each position, given the other words of the text.

        Args:
            character_ids, input_ids, attention_mask, initial_states: as in `ELMoModel`.
            top_k: number of words per position.
            direction: `"forward"`, given the words before; `"backward"`, given the words after; `"both"`, the
                normalized product of the two distributions, which are independent. The first and the last position of a
                row have one direction only.

        Raises:
            ValueError: as in `score`; an unknown direction; a `top_k` larger than the vocabulary.
        """
        directions = {"forward": [0], "backward": [1], "both": [0, 1]}.get(direction)
        if directions is None:
            raise ValueError(f"`direction` is {direction!r}; pass 'forward', 'backward' or 'both'.")
        if not 1 <= top_k < self.config.vocab_size:
            raise ValueError(f"`top_k` is {top_k}; pass 1 to {self.config.vocab_size - 1}, the words without <PAD>.")
        batch, hidden = self._read_both_ways(character_ids, input_ids, attention_mask, initial_states)
        sources = []
        for index in directions:
            neighbors = _neighbor_tokens(index, batch)
            sources.append((hidden[index], *(to_device(rows_M, hidden[index].device) for rows_M in neighbors)))
        word_ids = batch.mask_BT.new_zeros(batch.mask_BT.numel(), top_k, dtype=torch.long) + self.config.pad_token_id
        log_probs = torch.zeros_like(word_ids, dtype=torch.promote_types(hidden[0].dtype, torch.float32))
        predicted_N = torch.cat([there_M for _, _, there_M in sources]).unique()
        for some_C in predicted_N.split(max(1, CHUNK_LOGITS // self.config.vocab_size)):
            log_probs_CV = sum(self._log_probs_at(some_C, *source) for source in sources).log_softmax(-1)
            positions_C = batch.packing.positions_N[some_C]
            log_probs[positions_C], word_ids[positions_C] = log_probs_CV.topk(top_k)
        shape = *batch.mask_BT.shape, top_k
        return ELMoPredictions(word_ids.view(shape), log_probs.view(shape))

    def _log_probs_at(self, some_C: Tensor, hidden_NP: Tensor, here_M: Tensor, there_M: Tensor) -> Tensor:
        """One direction's log-probabilities `(C, V)` of the word at some tokens; 0 where it predicts none."""
        source_N = torch.full((len(hidden_NP),), -1, device=hidden_NP.device).index_copy_(0, there_M, here_M)
        source_C = source_N[some_C]
        log_probs_CV = self.softmax(hidden_NP[source_C])
        return log_probs_CV.masked_fill((source_C < 0)[:, None], 0)

    def _read_both_ways(self, character_ids, input_ids, attention_mask, initial_states):
        """The token batch, and the top output `(tokens, projection_size)` of each direction in reading order."""
        if self.training:
            raise ValueError("The model is in training mode, with dropout; call `model.eval()` first.")
        self._check_vocabulary()
        batch = self.elmo.read_tokens(character_ids, input_ids, attention_mask)
        states = self.elmo.starting_states(initial_states, batch.words_UP, len(batch.mask_BT))
        hidden, orders = [], (batch.packing.forward_N, batch.packing.backward_N)
        both = self.elmo.run_directions([(batch, order_N) for order_N in orders], states)
        for order_N, (outputs, *_) in zip(orders, both, strict=True):
            hidden.append(torch.empty_like(outputs[-1]).index_copy_(0, order_N, outputs[-1]))
        return batch, hidden

    def _check_labels(self, labels, forward_targets, backward_targets, two_streams: bool):
        targets = {"forward_targets": forward_targets, "backward_targets": backward_targets}
        aligned = [name for name, given in targets.items() if given is not None]
        if labels is not None and (aligned or two_streams):
            raise ValueError(
                "`labels` are shifted inside and need one text; with two streams or aligned targets pass "
                "`forward_targets` and `backward_targets` instead."
            )
        if len(aligned) == 1:
            raise ValueError(f"Received `{aligned[0]}` alone; pass `forward_targets` and `backward_targets` together.")
        if labels is not None or aligned:
            self._check_vocabulary()

    def _check_vocabulary(self):
        if self.config.vocab_size <= 4:
            raise ValueError(
                "The vocabulary has only special words, so there is nothing to predict. Build a vocabulary with `elmo "
                "vocabulary` and call `resize_token_embeddings(len(tokenizer))`; with `elmo pretrain` pass "
                "--vocabulary replace --vocabulary_size NUMBER."
            )
        if not self.config.has_softmax and not self.training:
            raise ValueError(
                "This checkpoint was published without its softmax, so it gives no probabilities. Convert it with its "
                "softmax file, or train a new softmax first."
            )
        if not self.config.has_softmax:
            logger.warning("The checkpoint has no such softmax: training starts a new one.")
            self.config.has_softmax = True


def _token_targets(name: str, given: Tensor, batch: TokenBatch, config: ELMoConfig) -> Tensor:
    """The entry `(N,)` of `given` `(batch, time)` at each real token, in reading order, after a check; on the CPU."""
    check_ids(name, given, tuple(batch.mask_BT.shape))
    words_N = given.flatten()[batch.host_packing.positions_N].long()
    _check_targets(name, words_N[words_N != -100], config)
    return words_N


def _shifted_targets(labels: Tensor, direction: int, batch: TokenBatch, config: ELMoConfig) -> Tensor:
    """The target `(N,)` of each real token in reading order: the label of its neighbour, or -100 without one."""
    words_N = _token_targets("labels", labels, batch, config)
    here_M, there_M = _neighbor_tokens(direction, batch)
    return torch.full_like(words_N, -100).index_copy_(0, here_M, words_N[there_M])


def _neighbor_tokens(direction: int, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The real tokens that predict a neighbour in their row, and these neighbours: next (0) or preceding (1).

    Both are `(M,)`, on the CPU.
    """
    rows_N = batch.host_packing.positions_N // batch.mask_BT.shape[1]
    first_M = (rows_N[1:] == rows_N[:-1]).nonzero(as_tuple=True)[0]
    return (first_M + 1, first_M) if direction else (first_M, first_M + 1)


def _check_targets(name: str, targets_M: Tensor, config: ELMoConfig):
    check_range(name, targets_M, config.vocab_size, "or call `resize_token_embeddings(len(tokenizer))`")
    if (targets_M == config.pad_token_id).any():
        raise ValueError(f"`{name}` has <PAD> at a word, which is never predicted; pass -100 where nothing is.")


def _join_states(forward: list[Tensor], backward: list[Tensor]) -> States:
    hidden, cell = (torch.stack(pair, dim=2) for pair in zip(forward, backward, strict=True))
    return hidden, cell


@torch.no_grad()
def _zero_row(weight: Tensor, row: int):
    if not getattr(weight, "_is_hf_initialized", False):  # a slice of the weight would lose this flag
        init.zeros_(weight[row])


__all__ = [
    "ELMoForPreTraining",
    "ELMoForPreTrainingOutput",
    "ELMoModel",
    "ELMoModelOutput",
    "ELMoPreTrainedModel",
    "ELMoPredictions",
    "ELMoScores",
    "ScalarMix",
]
