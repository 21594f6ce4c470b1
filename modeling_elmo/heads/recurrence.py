"""BiRNNs over packed texts, and dropout that is the same at all steps of a text.

Shape suffixes: B rows; T time; N packed tokens; S texts; D width of the input; E width of vectors between layers; H
hidden size; G gates, 3 or 4 times H.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers import initialization as init

from ..kernels.plan import make_plan
from ..kernels.products import fast_product
from ..kernels.rnn import GRULoop, lstm_both_ways
from ..kernels.torch_state import is_unmodified, product_dtype
from .packed_texts import PaddedTexts, Texts, _on_host


class VariationalDropout(nn.Module):
    """Dropout with the same mask at all time steps of a text (Gal and Ghahramani 2016)."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x_ND: Tensor, text_N: Tensor) -> Tensor:
        """Shape: `x_ND` `(tokens, width)`, like the result; `text_N` `(tokens,)`, the text of each token."""
        if not self.training or not self.rate or not len(x_ND):
            return x_ND
        texts = int(text_N.max()) + 1
        factors_SD = F.dropout(x_ND.new_ones(texts, x_ND.shape[1]), self.rate)
        return x_ND * factors_SD[text_N]


class TaskRNN(nn.Module):
    """A biRNN over packed texts, with variational dropout between its layers.

    `torch.nn` defines it; `read_both_ways` computes it on CPU.

    Args:
        hidden_size: width of one direction. `output_size` is twice this.
        between_size: width of further vectors that the second layer reads after the output of the first. 0: none.
    """

    cell: type[nn.LSTM] | type[nn.GRU]

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, dropout: float = 0.0, between_size: int = 0
    ):
        super().__init__()
        self.output_size = 2 * hidden_size
        sizes = [input_size] + [self.output_size] * (num_layers - 1)
        if num_layers > 1:
            sizes[1] += between_size
        self.layers = nn.ModuleList(self.cell(size, hidden_size, bidirectional=True) for size in sizes)
        self.dropout = VariationalDropout(dropout)

    @torch.compiler.disable  # a traced loop over time would be compiled again for every length
    def forward(self, x_ND: Tensor, texts: Texts, between_NE: Tensor | None = None) -> Tensor:
        """Reads each text in both directions.

        Args:
            x_ND: `(tokens, input_size)`, packed tokens.
            between_NE: `(tokens, between_size)`, for the second layer.

        Returns:
            `(tokens, output_size)`, forward half first.
        """
        for depth, layer in enumerate(self.layers):
            if depth > 0:
                x_ND = self.dropout(x_ND, texts.text_N)
            if depth == 1 and between_NE is not None:
                x_ND = torch.cat([x_ND, between_NE], dim=-1)
            x_ND = read_both_ways(layer, x_ND, texts)
        return x_ND

    @torch.no_grad()
    def initialize_parameters(self):
        """Input matrices Glorot-uniform, recurrent ones orthogonal for each gate (Saxe et al. 2014), biases 0.

        The forget gate of an LSTM has an input bias of 1 (Jozefowicz et al. 2015).
        """
        is_lstm = self.cell is nn.LSTM
        gates = 4 if is_lstm else 3  # i, f, g, o or r, z, n
        for name, parameter in self.layers.named_parameters():
            if ".weight_ih" in name:
                init.xavier_uniform_(parameter)
            else:
                reset_gates_(parameter, gates, has_forget_gate=is_lstm and ".bias_hh" not in name)


class TaskLSTM(TaskRNN):
    cell = nn.LSTM


class TaskGRU(TaskRNN):
    cell = nn.GRU


def read_both_ways(layer: nn.Module, x_ND: Tensor, texts: Texts) -> Tensor:
    """Outputs of a bidirectional layer, `(tokens, 2 * hidden_size)`.

    Args:
        layer: a bidirectional `nn.GRU` or `nn.LSTM` with biases.
        x_ND: `(tokens, input_size)`, packed tokens.
    """
    if isinstance(texts, PaddedTexts):
        ahead_NH = _scan_layer(layer, x_ND, texts, "")
        behind_NH = _scan_layer(layer, x_ND, texts, "_reverse")
        return torch.cat([ahead_NH, behind_NH], -1)
    if not len(x_ND):  # which `torch.nn` refuses; gradients are zeros and not missing
        width = 2 * cast(nn.LSTM, layer).hidden_size
        return x_ND.new_zeros(0, width) + sum(0 * tensor.sum() for tensor in (x_ND, *layer.parameters()))
    tensors = [x_ND, *layer.parameters()]
    dtype = product_dtype(x_ND)
    is_plain = is_unmodified(layer, (nn.GRU, nn.LSTM))
    is_alike = all(tensor.dtype == dtype and tensor.device == x_ND.device for tensor in tensors)
    if not is_plain or not is_alike or make_plan([], *tensors).backend == "reference":
        output, _ = layer(PackedSequence(x_ND, _on_host(texts.batch_sizes)))
        return output.data
    ahead = _parameters_of(layer, "")
    behind = _parameters_of(layer, "_reverse")
    if isinstance(layer, nn.LSTM):
        return lstm_both_ways(x_ND, ahead, behind, texts.turned_N, texts.steps)
    weights, recurrent, biases, recurrent_biases = zip(ahead, behind, strict=True)
    gates_N2G = fast_product(x_ND, torch.cat(weights), torch.cat(biases))
    return GRULoop.apply(gates_N2G, torch.stack(recurrent), torch.stack(recurrent_biases), texts.turned_N, texts.steps)


def _parameters_of(layer: nn.Module, suffix: str) -> list[Tensor]:
    """Input weights, recurrent weights, and the biases of both, of one direction."""
    return [getattr(layer, name + suffix) for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")]


def _scan_layer(layer: nn.Module, x_ND: Tensor, texts: PaddedTexts, suffix: str) -> Tensor:
    """Outputs of one direction of an LSTM, `(batch * time, hidden_size)`, as `torch.export` traces them."""
    weight, recurrent, bias, recurrent_bias = _parameters_of(layer, suffix)

    def step(gates_BG: Tensor, states_B2H: Tensor) -> Tensor:
        h_BH, c_BH = states_B2H.chunk(2, -1)
        gates_BG = gates_BG + F.linear(h_BH, recurrent, recurrent_bias)
        enter, forget, new, output = gates_BG.chunk(4, -1)
        c_BH = forget.sigmoid() * c_BH + enter.sigmoid() * new.tanh()
        return torch.cat([output.sigmoid() * c_BH.tanh(), c_BH], -1)

    width = recurrent.shape[1]
    zeros_B2H = x_ND.new_zeros(texts.mask_BT.shape[0], 2 * width)
    _, states_N2H = texts.scan(step, zeros_B2H, F.linear(x_ND, weight, bias), reverse=bool(suffix))
    return states_N2H[:, :width]


def reset_gates_(parameter: Tensor, gates: int, has_forget_gate: bool = True):
    """Orthogonal matrices of all gates; or their biases, 0, and 1 at the second gate if it forgets."""
    values = torch.zeros_like(parameter)
    parts = values.chunk(gates)
    if parameter.dim() > 1:
        for part in parts:
            init.orthogonal_(part)
    elif has_forget_gate:
        parts[1].fill_(1)
    init.copy_(parameter, values)


def glorot_(module: nn.Module, *types: type[nn.Module]):
    """Glorot-uniform weights in all parts of these types (default: linear layers), and biases 0."""
    for part in module.modules():
        if isinstance(part, types or nn.Linear):
            init.xavier_uniform_(part.weight)
            bias = getattr(part, "bias", None)
            if bias is not None:
                init.zeros_(bias)
