"""Layers that task networks are made of: biRNNs over masked rows, their dropout, a softmax over what is allowed.

Shape suffixes: B batch; T time; D width of the input; S steps, as many as the longest row has real positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .elmo_head_recurrence import at, read_both_ways


class VariationalDropout(nn.Module):
    """Dropout with one mask for each row and feature, the same at all times (Gal and Ghahramani 2016).

    Args:
        rate: share of the features that is dropped, in training only.
    """

    def __init__(self, rate: float):
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"The dropout rate is {rate}; pass a number from 0 to below 1.")
        self.rate = rate

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Shape: `(batch, time, width)`, like the result."""
        if not self.training or not self.rate:
            return x_BTD
        return x_BTD * F.dropout(torch.ones_like(x_BTD[:, :1]), self.rate)


class TaskRNN(nn.Module):
    """A biRNN over the real positions of each row, wherever they stand; between its layers variational dropout.

    `torch.nn` defines it; what computes it on CPU is in `elmo_head_recurrence`. Nothing at other positions is read.

    Args:
        input_size: width of the input.
        hidden_size: width of one direction; `output_size` is twice that.
        num_layers: biLSTM layers, each reading the one before.
        dropout: between the layers.
    """

    cell: type[nn.LSTM] | type[nn.GRU]

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, dropout: float = 0.0):
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"`num_layers` is {num_layers}; pass 1 or more.")
        self.output_size = 2 * hidden_size
        sizes = [input_size] + [self.output_size] * (num_layers - 1)
        self.layers = nn.ModuleList(self.cell(size, hidden_size, bidirectional=True) for size in sizes)
        self.dropout = VariationalDropout(dropout)

    def forward(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """Reads each row both ways.

        Args:
            x_BTD: `(batch, time, input_size)`.
            mask_BT: `(batch, time)`, true at real positions; a row may be without any.

        Returns:
            `(batch, time, output_size)`, forward half first, zeros at positions that are not real.
        """
        if mask_BT.shape != x_BTD.shape[:2]:
            raise ValueError(f"The mask is {tuple(mask_BT.shape)}; pass {tuple(x_BTD.shape[:2])}, (batch, time) of x.")
        lengths_B1 = mask_BT.sum(1, keepdim=True)
        longest = int(lengths_B1.max()) if mask_BT.numel() else 0
        if not longest:
            return x_BTD.new_zeros(*mask_BT.shape, self.output_size)
        real_BS = mask_BT.byte().argsort(dim=1, descending=True, stable=True)[:, :longest]  # the real positions first
        none_BS1 = (torch.arange(longest, device=mask_BT.device) >= lengths_B1)[..., None]
        x_BSD = at(x_BTD, real_BS).masked_fill(none_BS1, 0)
        for depth, layer in enumerate(self.layers):
            x_BSD = self.dropout(x_BSD) if depth else x_BSD
            x_BSD = read_both_ways(layer, x_BSD, lengths_B1)
        zeros_BTD = x_BSD.new_zeros(*mask_BT.shape, self.output_size)
        return zeros_BTD.scatter(1, real_BS[..., None].expand_as(x_BSD), x_BSD.masked_fill(none_BS1, 0))

    @torch.no_grad()
    def reset_parameters(self):
        """Fills what no checkpoint has filled.

        | parameter | distribution |
        |---|---|
        | input matrix | Glorot-uniform over all gates |
        | recurrent matrix | orthogonal for each gate (Saxe et al. 2014) |
        | biases | 0; that of an LSTM's forget gate 1, with its input (Jozefowicz et al. 2015) |
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
    """Softmax along `dim` over the scores where `mask` is true; zeros elsewhere, also where nothing is true.

    Shape:
        scores: any.
        mask: bool, of a shape that broadcasts to that of the scores.
    """
    # The least finite number: over minus infinities alone the softmax is NaN, and so is its backward pass inside.
    allowed = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return allowed.softmax(dim).masked_fill(~mask, 0)
