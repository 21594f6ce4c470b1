"""Layers of the heads' networks: biRNNs over masked rows, variational dropout, masked softmax.

Shape suffixes: B batch; T time; D width of the input; S steps of the longest row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .elmo_head_recurrence import at, read_both_ways


class VariationalDropout(nn.Module):
    """Dropout with the same mask at all time steps of a row (Gal and Ghahramani 2016).

    Args:
        rate: dropout rate, in training only.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Shape: `(batch, time, width)`, like the result."""
        if not self.training or not self.rate:
            return x_BTD
        return x_BTD * F.dropout(torch.ones_like(x_BTD[:, :1]), self.rate)


class TaskRNN(nn.Module):
    """A biRNN over the real tokens of each row, at any positions, with variational dropout between its layers.

    `torch.nn` defines it; `elmo_head_recurrence.py` computes it on CPU. Values at padding are never read.

    Args:
        input_size: width of the input.
        hidden_size: width of one direction. `output_size` is twice this.
        num_layers: number of layers.
        dropout: dropout rate between the layers.
        between_size: width of further vectors that the second layer reads beside the output of the first. 0: none.
    """

    cell: type[nn.LSTM] | type[nn.GRU]

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, dropout: float = 0.0, between_size: int = 0
    ):
        super().__init__()
        self.output_size = 2 * hidden_size
        sizes = [input_size, self.output_size + between_size, *[self.output_size] * (num_layers - 2)][:num_layers]
        self.layers = nn.ModuleList(self.cell(size, hidden_size, bidirectional=True) for size in sizes)
        self.dropout = VariationalDropout(dropout)

    @torch.compiler.disable  # a traced loop over time would be compiled again for every length
    def forward(self, x_BTD: Tensor, mask_BT: Tensor, between_BTE: Tensor | None = None) -> Tensor:
        """Reads each row in both directions.

        Args:
            x_BTD: `(batch, time, input_size)`.
            mask_BT: `(batch, time)`, the token mask. A row may have no token.
            between_BTE: `(batch, time, between_size)`, for the second layer.

        Returns:
            `(batch, time, output_size)`, forward half first, zeros at padding.
        """
        lengths_B1 = mask_BT.sum(1, keepdim=True)
        if not mask_BT.numel():
            return x_BTD.new_zeros(*mask_BT.shape, self.output_size)
        longest = max(1, int(lengths_B1.max()))  # without tokens, gradients are zeros and not missing
        real_BS = mask_BT.byte().argsort(dim=1, descending=True, stable=True)[:, :longest]  # real tokens first
        none_BS1 = (torch.arange(longest, device=mask_BT.device) >= lengths_B1)[..., None]
        x_BSD = at(x_BTD, real_BS).masked_fill(none_BS1, 0)
        for depth, layer in enumerate(self.layers):
            x_BSD = self.dropout(x_BSD) if depth else x_BSD
            if depth == 1 and between_BTE is not None:
                x_BSD = torch.cat([x_BSD, at(between_BTE, real_BS).masked_fill(none_BS1, 0)], dim=-1)
            x_BSD = read_both_ways(layer, x_BSD, lengths_B1)
        zeros_BTD = x_BSD.new_zeros(*mask_BT.shape, self.output_size)
        return zeros_BTD.scatter(1, real_BS[..., None].expand_as(x_BSD), x_BSD.masked_fill(none_BS1, 0))

    @torch.no_grad()
    def reset_parameters(self):
        """Initialises the parameters that no checkpoint has filled.

        | parameter | distribution |
        |---|---|
        | input matrix | Glorot-uniform over all gates |
        | recurrent matrix | orthogonal for each gate (Saxe et al. 2014) |
        | biases | 0; forget gate of an LSTM: 1, in the input bias (Jozefowicz et al. 2015) |
        """
        is_lstm = self.cell is nn.LSTM
        for name, parameter in self.layers.named_parameters():
            gates = parameter.chunk(4 if is_lstm else 3)  # i, f, g, o or r, z, n
            if ".weight_ih" in name:
                init.xavier_uniform_(parameter)
            elif ".weight_hh" in name:
                init.copy_(parameter, torch.cat([init.orthogonal_(torch.empty_like(gate)) for gate in gates]))
            else:
                filled = [
                    torch.full_like(gate, is_lstm and ".bias_ih" in name and k == 1) for k, gate in enumerate(gates)
                ]
                init.copy_(parameter, torch.cat(filled))


class TaskLSTM(TaskRNN):
    cell = nn.LSTM


class TaskGRU(TaskRNN):
    cell = nn.GRU


def masked_softmax(scores: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Softmax along `dim` over the scores where `mask` is True. Zeros elsewhere, also if `mask` is False everywhere.

    Shape:
        scores: any.
        mask: bool, broadcastable to the scores.
    """
    # The lowest finite number: a softmax over minus infinities only is NaN, and so are its gradients.
    allowed = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return allowed.softmax(dim).masked_fill(~mask, 0)
