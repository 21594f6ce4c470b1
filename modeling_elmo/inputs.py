"""Inputs of the models: checks, the token mask, and batches packed for the LSTMs.

Shape suffixes: B rows; T time; N real tokens of the batch; S sequences, longest first; U distinct words; P
`projection_size`; L layers; X the ids of a word, or any width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from inspect import signature
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import ModelOutput, can_return_tuple, logging

from .configuration_elmo import ELMoConfig
from .kernels.sequences import Steps, Stream
from .kernels.threads import own_share
from .kernels.torch_state import is_exporting, to_device_at_once

logger = logging.get_logger(__name__)


NO_LABEL = -100  # the label of positions without a label, as in all of transformers
NO_TORCHSCRIPT = (
    "TorchScript (`torch.jit`) cannot follow this model, whose steps depend on the words and their number. Use "
    "`torch.export.export`, or `elmo export` for a file in ONNX's format."
)
ID_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
States = tuple[Tensor, Tensor]  # hidden and cell, as `ELMoModelOutput.final_states`


@dataclass(eq=False)
class PackedBatch:
    """The real tokens of a batch without padding, as the LSTMs visit them, and its words. `pack` makes it, on the CPU.

    Attributes:
        shape: `(batch, time)`, with padding.
        steps: the steps in which the LSTMs read the packed rows.
        source: the same on the CPU, of a batch on a device.

    Shape:
        positions_N: flat position in (batch * time) of each real token, in reading order.
        forward_N, backward_N: the real token in each packed row, for a left-to-right and a right-to-left pass.
        rows_S: the batch row of each sequence.
        index_N: the distinct word at each real token, in reading order.
        ids_UX: the ids of each distinct word, on the CPU.
        words_UP: `(distinct words, projection_size)`, one vector for each distinct word, or for each position.
    """

    shape: torch.Size
    steps: Steps
    positions_N: Tensor
    forward_N: Tensor
    backward_N: Tensor
    rows_S: Tensor
    index_N: Any = None
    ids_UX: Any = None
    words_UP: Any = None
    source: "PackedBatch | None" = None

    def encoded(self, words_UP: Tensor) -> "PackedBatch":
        """This batch with the vectors of its words, and on their device, to which one copy brings it."""
        device = words_UP.device
        steps = self.steps.to(device)
        orders = self.positions_N, self.forward_N, self.backward_N, self.rows_S, self.index_N
        positions_N, forward_N, backward_N, rows_S, index_N = to_device_at_once(orders, device)
        return PackedBatch(
            self.shape, steps, positions_N, forward_N, backward_N, rows_S, index_N, words_UP=words_UP, source=self
        )

    @property
    def host(self) -> "PackedBatch":
        """This batch on the CPU, where sizes can be read without waiting for a device."""
        return self if self.source is None else self.source

    @cached_property
    def mask_BT(self) -> Tensor:
        """`(batch, time)` bool, the token mask."""
        mask = torch.zeros(self.shape.numel(), dtype=torch.bool, device=self.positions_N.device)
        return mask.index_fill_(0, self.positions_N, True).view(self.shape)

    def ids_BTX(self) -> Tensor:
        """The ids of the word at each position, 0 at padding."""
        ids_UX: Tensor = self.ids_UX
        zeros = ids_UX.new_zeros(self.shape.numel(), ids_UX.shape[1])
        return zeros.index_copy_(0, self.positions_N, ids_UX[self.index_N]).unflatten(0, self.shape)

    def left_to_right(self) -> Stream:
        return Stream(self.words_UP, self.steps, self.index_N[self.forward_N])

    def right_to_left(self) -> Stream:
        return Stream(self.words_UP, self.steps, self.index_N[self.backward_N])

    def has_two_texts(self) -> bool:
        """Whether a row has two texts, as `token_type_ids` mark them."""
        rows_S = self.host.rows_S
        return len(rows_S.unique()) < len(rows_S)


def on_host(value: Any) -> Any:
    """A tensor on the CPU, which waits for its device; all other values as they are."""
    return value.cpu() if isinstance(value, Tensor) else value


def pack(mask_BT: Tensor, token_type_ids_BT: Tensor | None = None) -> PackedBatch:
    """Finds the sequences of a batch: the real tokens of each row, split where the token type changes.

    The packed order is time-major and the longest sequence comes first. The sequences that are still running at a step
    are therefore a prefix of the state, and nothing is computed for padding. A backward pass is a left-to-right pass
    over reversed sequences.

    Args:
        mask_BT: `(batch, time)`, nonzero at real tokens, at any positions.
        token_type_ids_BT: `(batch, time)`; two texts in one row become two sequences.
    """
    rows_N, columns_N = mask_BT.nonzero(as_tuple=True)
    begins_N = torch.ones_like(rows_N)
    begins_N[1:] = rows_N[1:] != rows_N[:-1]
    if token_type_ids_BT is not None:
        types_N = token_type_ids_BT[rows_N, columns_N]
        begins_N[1:] |= types_N[1:] != types_N[:-1]
    sequences_N = begins_N.cumsum(0) - 1
    lengths_S = sequences_N.bincount()
    order_S = lengths_S.argsort(descending=True, stable=True)
    starts_S = lengths_S.cumsum(0) - lengths_S
    ranks_N = order_S.argsort()[sequences_N]
    steps_N = torch.arange(len(rows_N), device=rows_N.device) - starts_S[sequences_N]
    reverse_steps_N = lengths_S[sequences_N] - 1 - steps_N
    return PackedBatch(
        shape=mask_BT.shape,
        steps=Steps(steps_N.bincount().tolist(), mask_BT.device),
        positions_N=rows_N * mask_BT.shape[1] + columns_N,
        forward_N=(steps_N * len(lengths_S) + ranks_N).argsort(),
        backward_N=(reverse_steps_N * len(lengths_S) + ranks_N).argsort(),
        rows_S=rows_N[starts_S[order_S]],
    )


def unpack_layers(
    batch: PackedBatch, forward: list[Tensor], backward: list[Tensor], unpadded: bool = False
) -> tuple[Tensor, ...]:
    """All layers as `(batch, time, 2 * projection_size)`. The token layer is its own second half.

    Args:
        forward, backward: packed outputs `(tokens, projection_size)` of each layer of the two directions.
        unpadded: whether to return real tokens only, `(tokens, 2 * projection_size)`.
    """
    positions_N = batch.positions_N
    rows = torch.Size([len(positions_N)]) if unpadded else batch.shape
    if unpadded:
        positions_N = torch.arange(len(positions_N), device=positions_N.device)

    def joined(forward_NP: Tensor, forward_N: Tensor, backward_NP: Tensor, backward_N: Tensor) -> Tensor:
        size = forward_NP.shape[1]
        layer = forward_NP.new_zeros(rows.numel(), 2 * size)
        layer[:, :size].index_copy_(0, forward_N, forward_NP)
        layer[:, size:].index_copy_(0, backward_N, backward_NP)
        return layer.unflatten(0, rows)

    tokens_NP = F.embedding(batch.index_N, batch.words_UP)
    orders = positions_N[batch.forward_N], positions_N[batch.backward_N]
    layers = (joined(f, orders[0], b, orders[1]) for f, b in zip(forward, backward, strict=True))
    return joined(tokens_NP, positions_N, tokens_NP, positions_N), *layers


@torch.compiler.disable  # sizes depend on values
def unpad(values: Tensor, mask_BT: Tensor) -> Tensor:
    """The values `(batch, time, ...)` of the real tokens, `(tokens, ...)`. A traced export keeps every position."""
    return values.flatten(0, 1) if is_exporting() else values[mask_BT]


@torch.compiler.disable  # as `unpad`
def pad(values: Tensor, mask_BT: Tensor) -> Tensor:
    """Values `(tokens, ...)` at the positions of their tokens, `(batch, time, ...)`, and zeros at padding."""
    if is_exporting():
        values_BT = values.unflatten(0, mask_BT.shape)
        return values_BT.masked_fill(~mask_BT.view(*mask_BT.shape, *[1] * (values.dim() - 1)), 0)
    positions_N = mask_BT.flatten().nonzero().squeeze(1)
    zeros = values.new_zeros(mask_BT.numel(), *values.shape[1:])
    return zeros.index_copy(0, positions_N, values).unflatten(0, mask_BT.shape)


def starting_states(config: ELMoConfig, states: States | None, words_UP: Tensor, batch_size: int) -> States:
    """Checked `initial_states`, or zeros: `(batch, layers, 2, projection_size)` and `(..., lstm_hidden_size)`."""
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


def states_of_sequences(states: States, direction: int, rows_S: Tensor) -> list[Tensor]:
    """The states of one direction for its LSTM: `(layers, sequences, width)`, hidden and cell."""
    return [state[:, :, direction][rows_S].transpose(0, 1) for state in states]


def states_of_rows(states: States, direction: int, rows_S: Tensor, ends: Sequence[Tensor]) -> list[Tensor]:
    """The states of one direction after its LSTM, `(batch, layers, width)`. A row without tokens keeps its state."""
    after = []
    for state, end_LSX in zip(states, ends, strict=True):
        before_BLX = state[:, :, direction]
        after.append(before_BLX.index_copy(0, rows_S, end_LSX.transpose(0, 1).to(before_BLX)))
    return after


def join_states(forward: list[Tensor], backward: list[Tensor]) -> States:
    """`final_states` of a batch from the states of each direction, `(batch, layers, width)`."""
    hidden, cell = (torch.stack(pair, dim=2) for pair in zip(forward, backward, strict=True))
    return hidden, cell


@torch.compiler.disable  # its checks read values
def token_mask(
    config: ELMoConfig,
    character_ids: Tensor | None = None,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
) -> Tensor:
    """Checks that the inputs fit together, and returns the token mask `(batch, time)`: True at real tokens.

    Raises:
        ValueError: an input is missing, has the wrong shape or dtype, or contradicts another.
    """
    readable_BT = _readable_positions(config, character_ids, input_ids, inputs_embeds)
    for name, ids in (("input_ids", input_ids), ("token_type_ids", token_type_ids)):
        if ids is not None:
            check_ids(name, ids, tuple(readable_BT.shape))
    if attention_mask is None:
        if input_ids is not None and not config.char_vocab_size:
            config.check_special_words()  # this mask leaves out `<PAD>`
        return readable_BT
    check_shape("attention_mask", attention_mask, tuple(readable_BT.shape))
    mask_BT = attention_mask.bool()
    if is_exporting():  # values are unknown
        return mask_BT
    if not torch.equal(mask_BT.to(attention_mask.dtype), attention_mask):
        raise ValueError("`attention_mask` has values other than 0 and 1; pass 1 at real tokens and 0 at padding.")
    if (mask_BT & ~readable_BT).any() and config.char_vocab_size:
        position = tuple((mask_BT & ~readable_BT).nonzero()[0].tolist())
        raise ValueError(
            f"`attention_mask` marks (row, position) {position} as a token, but its `character_ids` are all 0, which "
            "is padding. Pass the mask that the tokenizer returned with these `character_ids`."
        )
    return mask_BT


def _readable_positions(
    config: ELMoConfig, character_ids: Tensor | None, input_ids: Tensor | None, inputs_embeds: Tensor | None
) -> Tensor:
    """The positions `(batch, time)` that have something to read: the token mask if there is no `attention_mask`."""
    if inputs_embeds is not None:
        if character_ids is not None or input_ids is not None:
            raise ValueError(
                "`inputs_embeds` replace the words; pass them without `character_ids` and without `input_ids`."
            )
        check_floats("inputs_embeds", inputs_embeds, ("batch", "time", config.projection_size))
        return inputs_embeds.new_ones(inputs_embeds.shape[:2], dtype=torch.bool)
    if not config.char_vocab_size:
        if input_ids is None:
            raise ValueError("This is a word-level model: pass `input_ids` of shape (batch, time).")
        check_ids("input_ids", input_ids, ("batch", "time"))
        return input_ids != config.pad_token_id
    if character_ids is None:
        raise ValueError(
            "ELMo reads characters: pass `character_ids` of shape (batch, time, max_word_length), as "
            "`model(**tokenizer(text, return_tensors='pt'))` does; `input_ids` alone are not enough."
        )
    check_ids("character_ids", character_ids, ("batch", "time", config.max_word_length))
    if config.word_embedding_size and input_ids is None:
        raise ValueError("This model also has word vectors: pass `input_ids` with `character_ids`.")
    return character_ids.any(-1)


def word_mask(config: ELMoConfig, mask_BT: Tensor, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """The token mask `(batch, time)` without the markers `<S>` and `</S>`, which only `input_ids` can tell."""
    if input_ids is None and inputs_embeds is None:
        raise ValueError(
            "`input_ids` are missing, and only they tell the markers <S> and </S> from words; pass them with "
            "`character_ids`, as `model(**tokenizer(text, return_tensors='pt'))` does."
        )
    if input_ids is None:
        return mask_BT
    config.check_special_words()
    return mask_BT & (input_ids != config.bos_token_id) & (input_ids != config.eos_token_id)


def forward_of_model(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What each `forward` of a model needs around it, for code that calls all models of transformers alike.

    It returns a tuple on request. An argument that the model does not have may be None or False; other values ask for
    something, and are an error. Calls of several threads share the cores. TorchScript is not supported.
    """
    known = signature(forward).parameters

    @wraps(forward)
    def checked(self, *args, **kwargs):
        if torch.jit.is_tracing():
            raise ValueError(NO_TORCHSCRIPT)
        unknown = kwargs.keys() - known
        for name in unknown:
            value = kwargs.pop(name)
            if value is not None and value is not False:
                shown = "a tensor" if isinstance(value, Tensor) else value
                raise ValueError(f"`{name}` is {shown}, but {type(self).__name__} has no such input; leave it out.")
        with own_share():
            return forward(self, *args, **kwargs)

    return can_return_tuple(checked)


@torch.compiler.disable  # it looks at its callers
def option_that_takes_labels() -> str | None:
    """The option for which Trainer takes the labels of this batch away, to compute a loss from `logits` itself.

    Trainers of other packages have methods of this name, and losses on purpose.
    """
    call = _caller("compute_loss")
    if call is None or call.f_globals.get("__name__") != "transformers.trainer" or call.f_locals.get("labels") is None:
        return None
    return "label_smoothing_factor" if call.f_locals["self"].compute_loss_func is None else "compute_loss_func"


def _caller(name: str) -> FrameType | None:
    """The nearest running call of a function with this name, which calls the model."""
    return next((frame for frame, _ in walk_stack(None) if frame.f_code.co_name == name), None)


@torch.compiler.disable  # it remembers
def warn_once(subject: Any, message: str):
    """Gives a warning once for a model. `logger.warning_once` gives it once for all of a process.

    The subject keeps its messages. A model has a set of them from the beginning, which the replicas of
    `nn.DataParallel` share.
    """
    messages = vars(subject).setdefault("warnings_given", set())
    if message not in messages:
        messages.add(message)
        logger.warning(message)


def check_shape(name: str, tensor: Tensor, expected: tuple):
    """Raises an error unless the tensor has the expected shape. A name in `expected` allows any size."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"`{name}` is a {type(tensor).__name__}; pass a tensor: tokenizer(..., return_tensors='pt').")
    fits = tensor.dim() == len(expected) and all(
        isinstance(size, str) or size == actual for size, actual in zip(expected, tensor.shape, strict=True)
    )
    if not fits:
        shape = ", ".join(map(str, expected))
        raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}; pass shape ({shape}).")


def check_ids(name: str, ids: Tensor, expected: tuple):
    """Raises an error unless the tensor has the expected shape and integers."""
    check_shape(name, ids, expected)
    if ids.dtype not in ID_DTYPES:
        raise ValueError(f"`{name}` has dtype {ids.dtype}; pass integer ids.")


def check_floats(name: str, tensor: Tensor, expected: tuple):
    """Raises an error unless the tensor has the expected shape and floating-point numbers."""
    check_shape(name, tensor, expected)
    if not tensor.is_floating_point():
        raise ValueError(f"`{name}` has dtype {tensor.dtype}; pass floating-point numbers.")


@torch.compiler.disable  # as `token_mask`
def check_range(name: str, ids: Tensor, size: int, advice: str = "use the tokenizer that was saved with the model"):
    """Raises an error unless all ids are between 0 and `size - 1`. The message ends with the advice."""
    if is_exporting():
        return
    low, high = torch.stack(ids.aminmax()).tolist() if ids.numel() else (0, 0)  # read at once
    if low < 0 or high >= size:
        raise ValueError(f"`{name}` has ids from {low} to {high}, but this model knows 0 to {size - 1}; {advice}.")
