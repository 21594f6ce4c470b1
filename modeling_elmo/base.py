"""The base class of all ELMo models: loading, saving, initialization, changes of the vocabulary, weights in 8 bits."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import logging

from .configuration_elmo import ELMoConfig
from .inputs import NO_TORCHSCRIPT
from .kernels.int8 import ELMoInt8Config, ELMoInt8Quantizer, Int8Linear, int8_obstacle, replace_linears
from .kernels.plan import HOW_TO_TRAIN
from .kernels.torch_state import is_sharded

logger = logging.get_logger(__name__)


class ELMoPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialization of all ELMo models."""

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
        config.validate_words()
        config.validate_layers()
        super().__init__(config, *args, **kwargs)
        self.warnings_given: set[str] = set()  # by `warn_once`
        if not config.char_vocab_size:
            self.main_input_name = "input_ids"

    def post_init(self):
        super().post_init()
        self._freeze_as_configured()

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        absent = [*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]
        if any(name.startswith("softmax.") for name in absent):
            model.config.has_softmax = False  # the checkpoint has no softmax of this size: this one is random
        model._freeze_as_configured()  # loading creates every parameter again, with gradients on
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args, **kwargs):
        """Saves the model with its code. The configuration names the classes and pipelines in the saved folder."""
        if self.custom_pipelines:
            self.config.custom_pipelines = self.custom_pipelines
        elif hasattr(self.config, "custom_pipelines"):  # from a checkpoint of another class
            del self.config.custom_pipelines
        super().save_pretrained(*args, **kwargs)

    def quantize(self) -> "ELMoPreTrainedModel":
        """Stores the linear layers of the biLM in 8 bits, in place, and returns the model: for inference on CPU.

        They take a quarter of their memory, and a half once their first use made a copy in the layout of fast products.
        A biLM of the original size computes faster; with one as small as `elmo-small-en` only memory is gained.
        `save_pretrained` and `from_pretrained` keep the 8 bits, `dequantize` turns them back into float32, as rounded.
        Tables, convolutions, the softmax and heads stay in float32, and so do cells and clips. Other devices compute
        with the plain definition, which is slow. A vocabulary cache is dropped: call `cache_vocabulary` afterwards.

        A processor without the instructions for 8 bits gives a warning, and the model stays in float32.

        Raises:
            ValueError: the model is not in float32, or not on CPU, or it is a head without a biLM.
        """
        if not hasattr(self.base_model, "forward_lstm"):
            raise ValueError("This head has no biLM (`use_elmo=False`), so there is nothing to quantize.")
        weights = [linear.weight for linear in self.base_model.modules() if type(linear) is nn.Linear]
        wrong = [weight for weight in weights if weight.dtype != torch.float32 or weight.device.type != "cpu"]
        if wrong:
            raise ValueError(
                f"The model is in {wrong[0].dtype} on {wrong[0].device}; call `model.to('cpu', torch.float32)` first."
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
            bilm.drop_cache()
        elif bilm.vocabulary_cache is not None:
            bilm.vocabulary_cache = bilm.empty_cache()

    def _use_floats(self):
        self.base_model.drop_cache()
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
            raise ValueError(f"`source_rows` has {outside[:3]}; pass 0 to {self.config.vocab_size - 1}, or -1.")
        self._choose_rows(source_rows, self.config.has_softmax)

    def _choose_rows(self, source_rows: Sequence[int], mean: bool):
        size = len(source_rows)
        if size <= max(self.config.bos_token_id, self.config.eos_token_id, self.config.unk_token_id):
            raise ValueError(f"A vocabulary of {size} words has no room for the special words; pass 4 or more.")
        rows_V, modules, cutoffs = torch.tensor(source_rows, device="cpu"), list(self.modules()), None
        for module in modules:  # first, because an adaptive softmax may refuse
            if hasattr(module, "choose_rows"):
                module.choose_rows(rows_V, mean)
                cutoffs = None if module.adaptive is None else module.adaptive.cutoffs[:-1]
        self.config.adaptive_cutoffs = cutoffs
        for module in modules:
            if isinstance(words := getattr(module, "word_embeddings", None), nn.Embedding):
                words.weight, words.num_embeddings = chosen_rows(words.weight, rows_V, mean), size
                if hasattr(module, "vocabulary_cache"):
                    module.drop_cache()
        self.config.vocab_size = size
        self.tie_weights()

    def _initialize_weights(self, module: nn.Module, *_):
        # For custom code, the base class skips modules that have all parameters in submodules, as most of ours do. It
        # does so to protect loaded values, but `transformers.initialization` protects them anyway.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """A module of ours initializes itself, and its parts, whose own turn comes before."""
        if (initialize := getattr(module, "initialize_parameters", None)) is not None:
            initialize()
        elif isinstance(module, nn.Linear):
            super()._init_weights(module)


@torch.no_grad()
def zero_row(weight: Tensor, row: int):
    if not getattr(weight, "_is_hf_initialized", False):  # a slice of the weight would lose this flag
        init.zeros_(weight[row])


def chosen_rows(parameter: Tensor, rows_V: Tensor, mean: bool) -> nn.Parameter:
    """The given rows of a table. Rows -1 are the mean of the table, or random with its standard deviation."""
    rows_V = rows_V.to(parameter.device)
    chosen = parameter[rows_V.clamp(min=0)]
    is_new_V = rows_V < 0
    extra = parameter.new_zeros(int(is_new_V.sum()), *parameter.shape[1:])
    if mean:
        extra += parameter.mean(0)
    elif parameter.dim() > 1:
        extra.normal_(std=parameter.std().item())
    chosen[is_new_V] = extra
    return nn.Parameter(chosen, requires_grad=parameter.requires_grad)
