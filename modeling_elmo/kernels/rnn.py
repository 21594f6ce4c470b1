"""The recurrent loops of the heads' networks on CPU, with hand-written backward passes.

`torch.nn.GRU`, `torch.nn.LSTM` and `reference_highway` are the definitions. Both directions of the first two run at
once: the loop of `torch.nn` has a dozen operations per step and direction, each a node of the graph. For a
`PackedSequence`, its backward pass fills, at each step, a gradient as large as the whole sequence, so that time grows
with the square of the length.

Shape suffixes: N packed tokens; S texts of a step; K the two directions; H hidden size; G gates, 3 to 5 times H.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .lstm_cpu import CPUArithmetic
from .lstm_loop import StackedLayer, run_groups
from .products import fast_product, packed, product, tanh, weight_gradient
from .sequences import Steps
from .torch_state import first_derivative


def both_directions(x_N2D: Tensor, turned_N: Tensor) -> Tensor:
    """Values of both directions at each token, `(2, N, D)`, in the order in which each reads.

    Args:
        turned_N: the packed token that takes its place if all texts are read backward.
    """
    ahead_ND, behind_ND = x_N2D.chunk(2, -1)
    return torch.stack([ahead_ND, behind_ND.index_select(0, turned_N)])


def of_tokens(x_KND: Tensor, turned_N: Tensor) -> Tensor:
    """The inverse: `(N, 2 * D)`."""
    ahead_ND, behind_ND = x_KND
    return torch.cat([ahead_ND, behind_ND.index_select(0, turned_N)], -1)


class GRULoop(torch.autograd.Function):
    """`r, z = sigmoid(x + W h + b);  n = tanh(x_n + r * (W_n h + b_n));  h' = n + z * (h - n)`, in both directions."""

    @staticmethod
    def forward(ctx, gates_N2G: Tensor, weight_KGH: Tensor, bias_KG: Tensor, turned_N: Tensor, steps: Steps) -> Tensor:
        arithmetic, size = CPUArithmetic(), weight_KGH.shape[2]
        weight = arithmetic.prepare(weight_KGH)
        values_KNG = both_directions(gates_N2G, turned_N)
        news_KNH = values_KNG.new_empty(*values_KNG.shape[:2], size)  # n
        candidates_KNH = torch.empty_like(news_KNH)  # W_n h + b_n
        states_KNH = torch.empty_like(news_KNH)
        h_KSH = values_KNG.new_zeros(2, steps.batch_sizes[0], size)
        for rows in steps.rows:
            h_KSH = h_KSH[:, : rows.stop - rows.start]
            read_KSG = arithmetic.multiply(h_KSH, weight, bias_KG=bias_KG)
            gates_KSG, new_KSH = values_KNG[:, rows], news_KNH[:, rows]
            gates_KSG[..., : 2 * size].add_(read_KSG[..., : 2 * size]).sigmoid_()
            reset_KSH, update_KSH, input_KSH = gates_KSG.chunk(3, -1)
            candidates_KNH[:, rows] = read_KSG[..., 2 * size :]
            torch.addcmul(input_KSH, reset_KSH, candidates_KNH[:, rows], out=new_KSH)
            tanh(new_KSH, out=new_KSH)
            h_KSH = torch.lerp(new_KSH, h_KSH, update_KSH, out=states_KNH[:, rows])
        ctx.steps = steps
        ctx.save_for_backward(weight_KGH, values_KNG, candidates_KNH, news_KNH, states_KNH, turned_N)
        return of_tokens(states_KNH, turned_N)

    @staticmethod
    @first_derivative
    def backward(ctx, grad_N2H: Tensor):
        weight_KGH, values_KNG, candidates, news, states_KNH, turned_N = ctx.saved_tensors
        arithmetic, steps = CPUArithmetic(), ctx.steps
        reset, update, _ = values_KNG.chunk(3, -1)
        zeros_KSH = states_KNH.new_zeros(2, steps.batch_sizes[0], states_KNH.shape[2])
        before = torch.cat([zeros_KSH, states_KNH], 1).index_select(1, steps.before_N)
        # What a step's gates get is its state's gradient times these, which need no loop.
        to_new = (1 - update) * (1 - news.square())
        to_reset = to_new * candidates * reset * (1 - reset)
        to_update = (before - news) * update * (1 - update)
        factors_KN3H = torch.stack([to_reset, to_update, to_new * reset], 2)
        grads_KNH = both_directions(grad_N2H, turned_N)
        recurrent_KN3H = torch.empty_like(factors_KN3H)
        back, carried_KSH = arithmetic.prepare_back(weight_KGH), None
        for rows in reversed(steps.rows):
            grad_KSH = grads_KNH[:, rows]
            if carried_KSH is not None:
                grad_KSH[:, : carried_KSH.shape[1]] += carried_KSH
            gates_KS3H = torch.mul(grad_KSH[:, :, None], factors_KN3H[:, rows], out=recurrent_KN3H[:, rows])
            carried_KSH = arithmetic.multiply(gates_KS3H.flatten(2), back)
            carried_KSH.addcmul_(grad_KSH, update[:, rows])
        recurrent_KNG = recurrent_KN3H.flatten(2)
        inputs_KNG = torch.cat([recurrent_KN3H[:, :, :2].flatten(2), grads_KNH * to_new], -1)
        grad_weight_KGH = arithmetic.weight_gradient(recurrent_KNG, before)
        return of_tokens(inputs_KNG, turned_N), grad_weight_KGH, recurrent_KNG.sum(1), None, None


def lstm_both_ways(
    x_ND: Tensor, ahead: Sequence[Tensor], behind: Sequence[Tensor], turned_N: Tensor, steps: Steps
) -> Tensor:
    """Outputs `(N, 2 * H)` of `torch.nn.LSTM`, which is the layer of a biLM without projection and clips.

    Args:
        ahead, behind: input weight, recurrent weight and both biases of a direction, with the gates i, f, g, o.
    """
    joined = []
    for parameters in zip(ahead, behind, strict=True):
        parts = []
        for parameter in parameters:
            i, f, g, o = parameter.chunk(4)
            parts += [i, f, o, g]
        joined.append(torch.cat(parts))
    input_weight_2GD, weight_2GH, bias_2G, recurrent_bias_2G = joined
    gates_N2G = fast_product(x_ND, input_weight_2GD, bias_2G + recurrent_bias_2G)
    weight_KGH = weight_2GH.unflatten(0, (2, -1))
    layer = StackedLayer(None, None, weight_KGH, None, None, None)
    zeros_KSH = x_ND.new_zeros(2, steps.batch_sizes[0], weight_KGH.shape[2])
    gates_KNG = both_directions(gates_N2G, turned_N)
    [(outputs_KNH, _, _)] = run_groups(CPUArithmetic(), [layer], [gates_KNG], [zeros_KSH], [zeros_KSH], steps)
    return of_tokens(outputs_KNH, turned_N)


BLOCKS = 5  # gates of a cell


class HighwayLoop(torch.autograd.Function):
    """The loop over steps. The gradient of the weight is one product after the loop, instead of one per step."""

    @staticmethod
    def forward(ctx, gates_NG, highway_NH, weight_GH, drop_SH, batch_sizes):
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
            if drop_SH is not None:
                state_SH.mul_(drop_SH[:size])
            hidden_SH, cell_SH = state_SH, c_SH
        ctx.batch_sizes = batch_sizes
        ctx.save_for_backward(highway_NH, weight_GH, drop_SH, values_NG, cells_NH, squashed_NH, states_NH)
        return states_NH

    @staticmethod
    @first_derivative
    def backward(ctx, grad_NH):
        highway_NH, weight_GH, drop_SH, values_NG, cells_NH, squashed_NH, states_NH = ctx.saved_tensors
        batch_sizes, zeros_SH = ctx.batch_sizes, torch.zeros_like(states_NH[: ctx.batch_sizes[0]])
        i, f, g, o, t = values_NG.chunk(BLOCKS, 1)
        drop_NH = 1 if drop_SH is None else torch.cat([drop_SH[:size] for size in batch_sizes])
        # The gradient of a gate is the gradient of the cell (o and t: of the state) times these factors.
        of_cell = [g * i * (1 - i), shifted(zeros_SH, cells_NH, batch_sizes) * f * (1 - f), i * (1 - g.square())]
        of_state = [t * squashed_NH * o * (1 - o), (o * squashed_NH - highway_NH) * t * (1 - t)]
        of_cell_N3H = torch.stack(of_cell, 1)
        of_state_N2H = torch.stack([factor * drop_NH for factor in of_state], 1)
        to_cell_NH = t * o * (1 - squashed_NH.square()) * drop_NH
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
        return gates_NG, sums_NH * (1 - t) * drop_NH, weight_gradient(gates_NG, before_NH), None, None


def shifted(first_SX: Tensor, rows_NX: Tensor, batch_sizes: list[int]) -> Tensor:
    """The state before each row: `first_SX`, then the rows of the preceding step."""
    steps = rows_NX.split(batch_sizes)
    before = [first_SX[: batch_sizes[0]]]
    for step, size in zip(steps, batch_sizes[1:], strict=False):
        before.append(step[:size])
    return torch.cat(before)
