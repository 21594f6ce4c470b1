"""The interleaved highway LSTM of semantic role labeling (He et al. 2017, section 2), over packed texts.

Shape suffixes: N packed tokens; S texts, longest first; D width of the input; H hidden size; G = 5 H gates in the order
i, f, g (the candidate), o, t (the transform gate).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.plan import make_plan
from ..kernels.products import fast_linear
from ..kernels.rnn import BLOCKS, HighwayLoop
from ..kernels.torch_state import product_dtype
from .packed_texts import PackedTexts
from .recurrence import reset_gates_


class HighwayLSTMLayer(nn.Module):
    """One layer, in one direction, with a highway connection from its input (He et al. 2017, "Highway Connections").

        i, f, g, o, t = x_k W + h_{k-1} U + b
        c_k = sigmoid(i) * tanh(g) + sigmoid(f) * c_{k-1}
        h_k = z * (t' * sigmoid(o) * tanh(c_k) + (1 - t') * x_k V),  t' = sigmoid(t)

    In training, z is a dropout mask of the sequence, the same at all steps ("Recurrent Dropout"; Gal and Ghahramani
    2016).
    """

    def __init__(self, input_size: int, hidden_size: int, dropout: float = 0.0):
        super().__init__()
        self.input_linear = nn.Linear(input_size, BLOCKS * hidden_size)
        self.state_linear = nn.Linear(hidden_size, BLOCKS * hidden_size, bias=False)
        self.highway_linear = nn.Linear(input_size, hidden_size, bias=False)
        self.dropout = dropout

    @torch.compiler.disable  # a traced time loop would be compiled again for every length
    def forward(self, inputs_ND: Tensor, batch_sizes: list[int]) -> Tensor:
        """The output `(N, H)` at every token, in the dtype of the input.

        Args:
            inputs_ND: `(N, input_size)`, packed tokens in the order of reading.
            batch_sizes: the number of sequences that are still running at each step; at least one step.
        """
        drop_SH = None
        if self.training and self.dropout:
            ones_SH = inputs_ND.new_ones(batch_sizes[0], self.state_linear.in_features)
            drop_SH = F.dropout(ones_SH, self.dropout)
        backend = make_plan(self.children(), inputs_ND).backend
        if backend == "reference":
            return reference_highway(self, inputs_ND, batch_sizes, drop_SH)
        return fast_highway(self, inputs_ND, batch_sizes, drop_SH)


class InterleavedLSTM(nn.Module):
    """Highway LSTM layers with alternating directions; the first layer reads forward (He et al. 2017).

    Variational dropout is on every layer's output, which is also its state.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int, dropout: float = 0.0):
        super().__init__()
        self.output_size = hidden_size
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        self.layers = nn.ModuleList(HighwayLSTMLayer(size, hidden_size, dropout) for size in sizes)

    def forward(self, x_ND: Tensor, texts: PackedTexts) -> Tensor:
        """The output `(tokens, hidden_size)` for packed tokens `(tokens, input_size)`."""
        batch_sizes = texts.batch_sizes or [0]  # without tokens, gradients are zeros and not missing
        for depth, layer in enumerate(self.layers):
            if depth > 0:
                x_ND = x_ND.index_select(0, texts.turned_N)
            x_ND = layer(x_ND, batch_sizes)
        if len(self.layers) % 2 == 0:  # the last layer has read backward
            x_ND = x_ND.index_select(0, texts.turned_N)
        return x_ND

    @torch.no_grad()
    def initialize_parameters(self):
        """Orthonormal blocks of matrices (Saxe et al. 2014); biases 0, at forget gates 1 (Jozefowicz et al. 2015)."""
        for name, parameter in self.named_parameters():
            blocks = 1 if "highway_linear" in name else BLOCKS
            reset_gates_(parameter, blocks)


def reference_highway(
    layer: HighwayLSTMLayer, inputs_ND: Tensor, batch_sizes: list[int], drop_SH: Tensor | None = None
) -> Tensor:
    """The definition: plain PyTorch, one step at a time, differentiable, for every device and dtype.

    Args:
        drop_SH: `(S, H)`, dropout mask of each sequence, 0 or `1 / (1 - rate)`. Default: no dropout.
    """
    dtype = inputs_ND.dtype
    gates_NG = layer.input_linear(inputs_ND)
    highway_NH = layer.highway_linear(inputs_ND).to(dtype)
    hidden_SH = cell_SH = inputs_ND.new_zeros(batch_sizes[0], highway_NH.shape[1])
    outputs = []
    for gates_SG, carried_SH in zip(gates_NG.split(batch_sizes), highway_NH.split(batch_sizes), strict=True):
        size = len(gates_SG)
        gates_SG = gates_SG + layer.state_linear(hidden_SH[:size])
        i, f, g, o, t = gates_SG.to(dtype).chunk(BLOCKS, dim=-1)
        cell_SH = i.sigmoid() * g.tanh() + f.sigmoid() * cell_SH[:size]
        hidden_SH = t.sigmoid() * o.sigmoid() * cell_SH.tanh() + (1 - t.sigmoid()) * carried_SH
        if drop_SH is not None:
            hidden_SH = hidden_SH * drop_SH[:size]
        outputs.append(hidden_SH)
    return torch.cat(outputs)


def fast_highway(
    layer: HighwayLSTMLayer, inputs_ND: Tensor, batch_sizes: list[int], drop_SH: Tensor | None = None
) -> Tensor:
    """As `reference_highway`, for CPUs, with a hand-written backward pass. Under autocast, cells stay in float32."""
    gates_NG = fast_linear(layer.input_linear, inputs_ND)
    highway_NH = fast_linear(layer.highway_linear, inputs_ND)
    weight_GH = layer.state_linear.weight.to(product_dtype(inputs_ND))
    return HighwayLoop.apply(gates_NG, highway_NH.to(inputs_ND.dtype), weight_GH, drop_SH, batch_sizes)
