"""The interleaved highway LSTM of semantic role labeling (He et al. 2017, section 2), over packed sequences.

Shape suffixes: N real tokens of a batch, time-major; S sequences, longest first; D width of the input; H
hidden size; G = 5 H gates in the order i, f, g (the candidate), o, t (the transform gate).

Tokens are packed step by step (`PackedTexts` in `elmo_head_layers.py`), so that nothing is computed for padding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .elmo_backends import (
    choose_backend,
    fast_linear,
    first_derivative,
    packed,
    product,
    product_dtype,
    tanh,
    weight_gradient,
)
from .elmo_head_layers import PackedTexts, reset_gates_
from .elmo_lstm import shifted

BLOCKS = 5  # gates of a cell


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
        kept_SH = None
        if self.training and self.dropout:
            ones_SH = inputs_ND.new_ones(batch_sizes[0], self.state_linear.in_features)
            kept_SH = F.dropout(ones_SH, self.dropout)
        backend, _ = choose_backend(self.children(), inputs_ND)
        return (reference_highway if backend == "reference" else fast_highway)(self, inputs_ND, batch_sizes, kept_SH)


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
            x_ND = x_ND.index_select(0, texts.turned_N) if depth else x_ND
            x_ND = layer(x_ND, batch_sizes)
        return x_ND if len(self.layers) % 2 else x_ND.index_select(0, texts.turned_N)

    @torch.no_grad()
    def reset_parameters(self):
        """Orthonormal blocks of matrices (Saxe et al. 2014); biases 0, at forget gates 1 (Jozefowicz et al. 2015)."""
        for name, parameter in self.named_parameters():
            reset_gates_(parameter, 1 if "highway_linear" in name else BLOCKS)


def reference_highway(
    layer: HighwayLSTMLayer, inputs_ND: Tensor, batch_sizes: list[int], kept_SH: Tensor | None = None
) -> Tensor:
    """The definition: plain PyTorch, one step at a time, differentiable, for every device and dtype.

    Args:
        kept_SH: `(S, H)`, dropout mask of each sequence, 0 or `1 / (1 - rate)`. Default: no dropout.
    """
    gates_NG, highway_NH = layer.input_linear(inputs_ND), layer.highway_linear(inputs_ND).to(inputs_ND.dtype)
    hidden_SH = cell_SH = inputs_ND.new_zeros(batch_sizes[0], highway_NH.shape[1])
    outputs = []
    for gates_SG, carried_SH in zip(gates_NG.split(batch_sizes), highway_NH.split(batch_sizes), strict=True):
        size = len(gates_SG)
        gates_SG = (gates_SG + layer.state_linear(hidden_SH[:size])).to(inputs_ND.dtype)
        i, f, g, o, t = gates_SG.chunk(BLOCKS, dim=-1)
        cell_SH = i.sigmoid() * g.tanh() + f.sigmoid() * cell_SH[:size]
        hidden_SH = t.sigmoid() * o.sigmoid() * cell_SH.tanh() + (1 - t.sigmoid()) * carried_SH
        hidden_SH = hidden_SH if kept_SH is None else hidden_SH * kept_SH[:size]
        outputs.append(hidden_SH)
    return torch.cat(outputs)


def fast_highway(
    layer: HighwayLSTMLayer, inputs_ND: Tensor, batch_sizes: list[int], kept_SH: Tensor | None = None
) -> Tensor:
    """As `reference_highway`, for CPUs, with a hand-written backward pass. Under autocast, cells stay in float32."""
    dtype = inputs_ND.dtype
    gates_NG, highway_NH = fast_linear(layer.input_linear, inputs_ND), fast_linear(layer.highway_linear, inputs_ND)
    weight_GH = layer.state_linear.weight.to(product_dtype(inputs_ND))
    return _HighwayLSTM.apply(gates_NG, highway_NH.to(dtype), weight_GH, kept_SH, batch_sizes)


class _HighwayLSTM(torch.autograd.Function):
    """The loop over steps. The gradient of the weight is one product after the loop, instead of one per step."""

    @staticmethod
    def forward(ctx, gates_NG, highway_NH, weight_GH, kept_SH, batch_sizes):
        weight, width = packed(weight_GH, keep=False), weight_GH.shape[1]
        values_NG = torch.empty_like(gates_NG, dtype=highway_NH.dtype)
        cells_NH, squashed_NH, states_NH = (torch.empty_like(highway_NH) for _ in range(3))
        hidden_SH = cell_SH = highway_NH.new_zeros(batch_sizes[0], width)
        tensors = (gates_NG, highway_NH, values_NG, cells_NH, squashed_NH, states_NH)
        for plus_SG, carried_SH, values_SG, c_SH, squashed_SH, state_SH in zip(
            *(tensor.split(batch_sizes) for tensor in tensors), strict=True
        ):
            size = len(plus_SG)
            gates_SG = product(hidden_SH[:size].to(weight_GH.dtype), weight, plus_NG=plus_SG).to(values_SG.dtype)
            torch.sigmoid(gates_SG, out=values_SG)
            i, f, g, o, t = values_SG.chunk(BLOCKS, 1)
            g.copy_(tanh(gates_SG[:, 2 * width : 3 * width]))
            torch.mul(f, cell_SH[:size], out=c_SH).addcmul_(i, g)
            tanh(c_SH, out=squashed_SH)
            torch.lerp(carried_SH, o * squashed_SH, t, out=state_SH)
            if kept_SH is not None:
                state_SH.mul_(kept_SH[:size])
            hidden_SH, cell_SH = state_SH, c_SH
        ctx.batch_sizes = batch_sizes
        ctx.save_for_backward(highway_NH, weight_GH, kept_SH, values_NG, cells_NH, squashed_NH, states_NH)
        return states_NH

    @staticmethod
    @first_derivative
    def backward(ctx, grad_NH):
        highway_NH, weight_GH, kept_SH, values_NG, cells_NH, squashed_NH, states_NH = ctx.saved_tensors
        batch_sizes, zeros_SH = ctx.batch_sizes, torch.zeros_like(states_NH[: ctx.batch_sizes[0]])
        i, f, g, o, t = values_NG.chunk(BLOCKS, 1)
        kept_NH = 1 if kept_SH is None else torch.cat([kept_SH[:size] for size in batch_sizes])
        # The gradient of a gate is the gradient of the cell (o and t: of the state) times these factors.
        of_cell = [g * i * (1 - i), shifted(zeros_SH, cells_NH, batch_sizes) * f * (1 - f), i * (1 - g.square())]
        of_state = [t * squashed_NH * o * (1 - o), (o * squashed_NH - highway_NH) * t * (1 - t)]
        of_cell_N3H = torch.stack(of_cell, 1)
        of_state_N2H = torch.stack([factor * kept_NH for factor in of_state], 1)
        to_cell_NH = t * o * (1 - squashed_NH.square()) * kept_NH
        gates_N5H = grad_NH.new_empty(len(grad_NH), BLOCKS, grad_NH.shape[1])
        sums_NH = grad_NH.clone()  # plus the gradients that come from the next step
        next_state_SH = next_cell_SH = None
        tensors = (sums_NH, of_cell_N3H, of_state_N2H, to_cell_NH, f, gates_N5H)
        for state_SH, of_cell_S3H, of_state_S2H, to_cell_SH, forget_SH, gates_S5H in zip(
            *(reversed(tensor.split(batch_sizes)) for tensor in tensors), strict=True
        ):
            if next_state_SH is not None:
                state_SH[: len(next_state_SH)] += next_state_SH
            cell_SH = state_SH * to_cell_SH
            if next_cell_SH is not None:
                cell_SH[: len(next_cell_SH)] += next_cell_SH
            torch.mul(cell_SH[:, None], of_cell_S3H, out=gates_S5H[:, :3])
            torch.mul(state_SH[:, None], of_state_S2H, out=gates_S5H[:, 3:])
            next_state_SH = product(gates_S5H.flatten(1).to(weight_GH.dtype), weight_GH.t())
            next_cell_SH = cell_SH.mul_(forget_SH)
        gates_NG = gates_N5H.flatten(1).to(weight_GH.dtype)
        before_NH = shifted(zeros_SH, states_NH, batch_sizes).to(weight_GH.dtype)
        return gates_NG, sums_NH * (1 - t) * kept_NH, weight_gradient(gates_NG, before_NH), None, None
