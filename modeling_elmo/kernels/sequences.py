"""What the kernels of the LSTM read: the weights of a layer, and packed sequences.

Tokens are packed step by step (see `pack` in `inputs.py`): the sequences that are still running at a step are a prefix
of the state, and nothing is computed for padding.

Shape suffixes, here and in all kernels: N real tokens of a batch, time-major; C a chunk of them; S sequences, longest
first; U distinct words; T steps; D width of the input; H `lstm_hidden_size`; P `projection_size`; G = 4 H gates in the
order i, f, o, g (the candidate); K directions; L layers; B rows of the batch.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .int8 import Int8Linear
from .torch_state import to_device

Linear = nn.Linear | Int8Linear


class LSTMWeights(NamedTuple):
    """The linear layers of one layer of one direction, and its options. `ELMoLSTMLayer` defines what they compute."""

    input_linear: Linear
    state_linear: Linear
    projection: Linear | None
    forget_bias: float
    cell_clip: float | None
    projection_clip: float | None

    def tensors(self) -> list[Tensor]:
        """Input weight, bias, state weight and, if there is one, the projection's, as they are at this call."""
        projection = [] if self.projection is None else [self.projection.weight]
        return [self.input_linear.weight, self.bias_G, self.state_linear.weight, *projection]

    @property
    def bias_G(self) -> Tensor:
        assert self.input_linear.bias is not None
        return self.input_linear.bias


class Steps:
    """The steps of packed tokens, `(N, ...)`: each has the next `batch_sizes` rows.

    Args:
        batch_sizes: the number of sequences that are still running at each step.
        device: of the tokens.
    """

    def __init__(self, batch_sizes: list[int], device: torch.device):
        self.batch_sizes = batch_sizes
        self.device = device

    def to(self, device: torch.device) -> "Steps":
        return Steps(self.batch_sizes, device)

    def chunks(self, most: int) -> Iterator[tuple["Steps", slice]]:
        """Consecutive steps with at most this number of tokens, or one step, and their rows."""
        sizes: list[int] = []
        start = end = 0
        for size in self.batch_sizes:
            if sizes and end - start + size > most:
                yield Steps(sizes, self.device), slice(start, end)
                sizes, start = [], end
            sizes.append(size)
            end += size
        if sizes:
            yield (self if start == 0 else Steps(sizes, self.device)), slice(start, end)

    def new_rows(self, like: Tensor, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory `(K, N, ...)` in which a kernel writes the row of each token."""
        return like.new_empty(sizes, dtype=dtype)

    @cached_property
    def on_device(self) -> Tensor:
        """The number of steps, then the sizes of all steps, as a kernel on the device reads them: `(1 + T,)` int32."""
        numbers = torch.tensor([len(self.batch_sizes), *self.batch_sizes], dtype=torch.int32, device="cpu")
        return to_device(numbers, self.device)

    @cached_property
    def rows(self) -> list[slice]:
        """The rows of each step."""
        ends = [*accumulate(self.batch_sizes)]
        return [slice(end - size, end) for size, end in zip(self.batch_sizes, ends, strict=True)]

    @cached_property
    def _starts(self) -> tuple[Tensor, Tensor]:
        sizes_T = torch.tensor(self.batch_sizes, device="cpu")
        return sizes_T, sizes_T.cumsum(0) - sizes_T

    @cached_property
    def last_S(self) -> Tensor:
        """The row of each sequence's last token."""
        sizes_T, starts_T = self._starts
        sequence_S = torch.arange(self.batch_sizes[0], device="cpu")
        lengths_S = (sizes_T[:, None] > sequence_S).sum(0)
        return to_device(starts_T[lengths_S - 1] + sequence_S, self.device)

    @cached_property
    def before_N(self) -> Tensor:
        """The row of the preceding token of each token, after S rows for the state at the start."""
        sizes_T, starts_T = self._starts
        step_N = torch.arange(len(sizes_T), device="cpu").repeat_interleave(sizes_T)
        sequence_N = torch.arange(len(step_N), device="cpu") - starts_T[step_N]
        first_row_N = torch.where(step_N > 0, self.batch_sizes[0] + starts_T[step_N - 1], 0)
        return to_device(first_row_N + sequence_N, self.device)


class StepsInRoom(Steps):
    """Steps whose number and sizes only the device knows: a kernel launched once serves all batches with fewer tokens.

    Args:
        sizes, last_S, before_N: the results of `numbers`, with zeros after them: `(1 + N,)`, `(S,)` and `(N,)` for the
            N tokens and S sequences of the room. Rows after the last token are 0 in all that the steps compute.
    """

    def __init__(self, sizes: Tensor, last_S: Tensor, before_N: Tensor):
        self.device = sizes.device
        self.on_device = sizes.int()
        self.last_S = last_S
        self.before_N = before_N

    @staticmethod
    def numbers(steps: Steps, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a room with this number of sequences holds of some steps."""
        here, before_N = steps.batch_sizes[0], steps.before_N
        is_token_N = before_N >= here  # else, a state at the start
        return steps.on_device, steps.last_S, torch.where(is_token_N, before_N + sequences - here, before_N)

    def chunks(self, most: int) -> Iterator[tuple[Steps, slice]]:
        yield self, slice(None)

    def new_rows(self, like: Tensor, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return like.new_zeros(sizes, dtype=dtype)


class Stream(NamedTuple):
    """Packed tokens in the order in which an LSTM, or a layer of it, reads them.

    Shape:
        inputs: `(N, D)`, a vector for each token; with `index_N`, `(U, D)`, a vector for each distinct word.
        steps: the steps in which the tokens are read.
        index_N: the distinct word of each token.
    """

    inputs: Tensor
    steps: Steps
    index_N: Tensor | None = None

    @property
    def tokens_ND(self) -> Tensor:
        if self.index_N is None:
            return self.inputs
        return F.embedding(self.index_N, self.inputs)  # on CUDA its gradient takes a tenth of an index's


LSTMOutput = tuple[Tensor, Tensor, Tensor]  # outputs_NP; hidden_SP and cell_SH after each sequence's end
Kernel = Callable[[LSTMWeights, Stream, Tensor, Tensor], LSTMOutput]  # with hidden_SP and cell_SH at the start
