"""What the kernels of the LSTM read: the weights of a layer, and packed sequences.

Tokens are packed step by step (see `pack` in `inputs.py`): the sequences that are still running at a step are a prefix
of the state, and nothing is computed for padding.

Shape suffixes, here and in all kernels: N real tokens of a batch, time-major; C a chunk of them; S sequences, longest
first; U distinct words; T steps; D width of the input; H `lstm_hidden_size`; P `projection_size`; G = 4 H gates in the
order i, f, o, g (the candidate); K directions; L layers; B rows of the batch.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
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


class Sequences(NamedTuple):
    """Input of a layer: packed tokens, and the state at their start.

    Shape:
        inputs: `(N, D)`, a vector for each token; with `index_N`, `(U, D)`, a vector for each distinct word.
        batch_sizes: the number of sequences that are still running at each step.
        index_N: the distinct word of each token.
    """

    inputs: Tensor
    batch_sizes: list[int]
    hidden_SP: Tensor
    cell_SH: Tensor
    index_N: Tensor | None = None

    @property
    def tokens_ND(self) -> Tensor:
        return self.inputs if self.index_N is None else self.inputs[self.index_N]


LSTMOutput = tuple[Tensor, Tensor, Tensor]  # outputs_NP; hidden_SP and cell_SH after each sequence's end
Kernel = Callable[[LSTMWeights, Sequences], LSTMOutput]


class Steps(NamedTuple):
    """Rows of packed tokens, `(N, ...)`, of which each step has the next `batch_sizes`.

    Shape:
        last_S: the row of each sequence's last token.
        before_N: the row of the preceding token of each token, after S rows for the state at the start.
    """

    batch_sizes: list[int]
    last_S: Tensor
    before_N: Tensor

    @classmethod
    def of(cls, batch_sizes: list[int], device: torch.device) -> "Steps":
        count = partial(torch.arange, device="cpu")
        sizes_T = torch.tensor(batch_sizes, device="cpu")
        starts_T = sizes_T.cumsum(0) - sizes_T
        step_N = count(len(batch_sizes)).repeat_interleave(sizes_T)
        sequence_N = count(len(step_N)) - starts_T[step_N]
        sequence_S = count(batch_sizes[0])
        lengths_S = (sizes_T[:, None] > sequence_S).sum(0)
        before_N = torch.where(step_N > 0, batch_sizes[0] + starts_T[step_N - 1], 0) + sequence_N
        last_S = starts_T[lengths_S - 1] + sequence_S
        return cls(batch_sizes, to_device(last_S, device), to_device(before_N, device))


def shifted(first_SX: Tensor, rows_NX: Tensor, batch_sizes: list[int]) -> Tensor:
    """The state before each row: `first_SX`, then the rows of the preceding step."""
    steps = rows_NX.split(batch_sizes)
    before = [first_SX[: batch_sizes[0]]]
    for step, size in zip(steps, batch_sizes[1:], strict=False):
        before.append(step[:size])
    return torch.cat(before)
