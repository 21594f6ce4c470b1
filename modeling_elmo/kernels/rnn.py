"""The recurrent loops of the heads' networks on CPU, with hand-written backward passes.

`torch.nn.GRU`, `torch.nn.LSTM` and `reference_highway` are the definitions. Both directions of the first two run in one
batch: the loop of `torch.nn` has a dozen operations per step and direction, each a node of the graph. For a
`PackedSequence`, its backward pass fills, at each step, a gradient as large as the whole sequence, so that time grows
with the square of the length.

Shape suffixes: N packed tokens; M 2 N, the tokens of both directions; S texts; B texts of a step; K directions; H
hidden size; G gates, 3 to 5 times H.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .products import packed, product, suits_onednn, tanh, weight_gradient
from .torch_state import first_derivative


class BothWays(NamedTuple):
    """Orders of a buffer `(2 * tokens, ...)` in which each step has the texts read forward, then backward.

    Its rows are steps of `2 * batch_sizes` rows.

    Shape:
        forth_M: gathers the buffer from `(tokens * 2, ...)`, which has, for each packed token, what a forward and a
            backward pass read there.
        back_M: the inverse order.
        before_M: for each row but those of the first step, the row of the same text and direction in the step before.
    """

    forth_M: Tensor
    back_M: Tensor
    before_M: Tensor
    batch_sizes: list[int]


class BothWaysGRU(torch.autograd.Function):
    """`r, z = sigmoid(x + W h + b);  n = tanh(x_n + r * (W_n h + b_n));  h' = n + z * (h - n)`."""

    @staticmethod
    def forward(ctx, gates_N2G: Tensor, weight_KGH: Tensor, bias_KG: Tensor, ways: BothWays) -> Tensor:
        size = weight_KGH.shape[2]
        values_MG, read = _in_steps(gates_N2G, ways), _products(weight_KGH, bias_KG)
        news, candidates, states = (values_MG.new_empty(len(values_MG), size) for _ in range(3))  # n; W_n h + b_n; h
        h_KBH = None
        for gates_KBG, candidate_KBH, new_KBH, state_KBH in _steps(ways, values_MG, candidates, news, states):
            h_KBH = torch.zeros_like(state_KBH) if h_KBH is None else h_KBH[:, : state_KBH.shape[1]]
            read_rz, read_n = read(h_KBH).split([2 * size, size], -1)
            reset_KBH, update_KBH = gates_KBG[..., : 2 * size].add_(read_rz).sigmoid_().chunk(2, -1)
            candidate_KBH.copy_(read_n)
            torch.addcmul(gates_KBG[..., 2 * size :], reset_KBH, read_n, out=new_KBH)
            h_KBH = torch.lerp(tanh(new_KBH, out=new_KBH), h_KBH, update_KBH, out=state_KBH)
        ctx.ways = ways
        ctx.save_for_backward(weight_KGH, values_MG, candidates, news, states)
        return states.index_select(0, ways.back_M).view(len(gates_N2G), 2 * size)

    @staticmethod
    @first_derivative
    def backward(ctx, grad_N2H: Tensor):
        weight_KGH, values_MG, candidates, news, states = ctx.saved_tensors
        ways, size = ctx.ways, states.shape[1]
        reset, update = values_MG[:, : 2 * size].chunk(2, -1)
        before = _before(states, ways)
        # What a step's gates get is its state's gradient times these, which need no loop.
        to_new = (1 - update) * (1 - news.square())
        to_reset = to_new * candidates * reset * (1 - reset)
        to_update = (before - news) * update * (1 - update)
        factors = torch.stack([to_reset, to_update, to_new * reset], 1)
        grads = _in_steps(grad_N2H, ways)
        recurrent, carried_KBH, carry = torch.empty_like(factors), None, _products(weight_KGH.transpose(1, 2))
        for grad_KBH, factor, update_KBH, gates in reversed(_steps(ways, grads, factors, update, recurrent)):
            if carried_KBH is not None:
                grad_KBH[:, : carried_KBH.shape[1]] += carried_KBH
            torch.mul(grad_KBH[..., None, :], factor, out=gates)
            carried_KBH = carry(gates.flatten(2)).addcmul_(grad_KBH, update_KBH)
        inputs_MG = torch.cat([recurrent[:, :2].flatten(1), grads * to_new], -1)
        return *_gradients(ways, inputs_MG, recurrent.flatten(1), before), None


class BothWaysLSTM(torch.autograd.Function):
    """`i, f, o = sigmoid(x + W h + b);  g = tanh(x_g + W_g h + b_g);  c' = f * c + i * g;  h' = o * tanh(c')`."""

    @staticmethod
    def forward(ctx, gates_N2G: Tensor, weight_KGH: Tensor, bias_KG: Tensor, ways: BothWays) -> Tensor:
        size = weight_KGH.shape[2]
        values_MG, read = _in_steps(gates_N2G, ways), _products(weight_KGH, bias_KG)
        cells, squashed, states = (values_MG.new_empty(len(values_MG), size) for _ in range(3))
        h_KBH = None
        for gates_KBG, cell_KBH, squashed_KBH, state_KBH in _steps(ways, values_MG, cells, squashed, states):
            if h_KBH is None:
                h_KBH = c_KBH = torch.zeros_like(state_KBH)
            rows = state_KBH.shape[1]
            gates_KBG.add_(read(h_KBH[:, :rows]))
            gates_KBG[..., : 2 * size].sigmoid_()
            tanh(gates_KBG[..., 2 * size : 3 * size], out=gates_KBG[..., 2 * size : 3 * size])
            gates_KBG[..., 3 * size :].sigmoid_()
            input_KBH, forget_KBH, new_KBH, output_KBH = gates_KBG.chunk(4, -1)
            torch.mul(forget_KBH, c_KBH[:, :rows], out=cell_KBH).addcmul_(input_KBH, new_KBH)
            tanh(cell_KBH, out=squashed_KBH)
            h_KBH, c_KBH = torch.mul(output_KBH, squashed_KBH, out=state_KBH), cell_KBH
        ctx.ways = ways
        ctx.save_for_backward(weight_KGH, values_MG, cells, squashed, states)
        return states.index_select(0, ways.back_M).view(len(gates_N2G), 2 * size)

    @staticmethod
    @first_derivative
    def backward(ctx, grad_N2H: Tensor):
        weight_KGH, values_MG, cells, squashed, states = ctx.saved_tensors
        ways, (enter, forget, new, output) = ctx.ways, values_MG.chunk(4, -1)
        # The gradient of the gates is the gradient of the cell (output gate: of the state) times these factors.
        of_cell = [new * enter * (1 - enter), _before(cells, ways) * forget * (1 - forget), enter * (1 - new.square())]
        of_state, to_cell = squashed * output * (1 - output), output * (1 - squashed.square())
        gates = of_state.new_empty(len(of_state), 4, of_state.shape[1])
        grads, carry = _in_steps(grad_N2H, ways), _products(weight_KGH.transpose(1, 2))
        state_KBH = cell_KBH = None  # gradients from the next step
        tensors = (grads, torch.stack(of_cell, 1), of_state, to_cell, forget, gates)
        for grad_KBH, of_cell_, of_state_, to_cell_, forget_KBH, gates_ in reversed(_steps(ways, *tensors)):
            if state_KBH is not None:
                grad_KBH[:, : state_KBH.shape[1]] += state_KBH
            grad_cell_KBH = grad_KBH * to_cell_
            if cell_KBH is not None:
                grad_cell_KBH[:, : cell_KBH.shape[1]] += cell_KBH
            torch.mul(grad_cell_KBH[..., None, :], of_cell_, out=gates_[..., :3, :])
            torch.mul(grad_KBH, of_state_, out=gates_[..., 3, :])
            state_KBH, cell_KBH = carry(gates_.flatten(2)), grad_cell_KBH * forget_KBH
        gates_MG = gates.flatten(1)
        return *_gradients(ways, gates_MG, gates_MG, _before(states, ways)), None


def _in_steps(x_N2D: Tensor, ways: BothWays) -> Tensor:
    """Values of both directions at each token, in the order of `BothWays`."""
    return x_N2D.reshape(2 * len(x_N2D), x_N2D.shape[1] // 2).index_select(0, ways.forth_M)


def _steps(ways: BothWays, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Views `(2, texts, ...)` of each step of buffers in the order of `BothWays`."""
    sizes = [2 * size for size in ways.batch_sizes]
    return list(zip(*([step.unflatten(0, (2, -1)) for step in each.split(sizes)] for each in tensors), strict=True))


def _before(states_MH: Tensor, ways: BothWays) -> Tensor:
    """The state that each step reads: zeros, then the state of the preceding step."""
    before_MH = states_MH.index_select(0, ways.before_M)
    return torch.cat([states_MH.new_zeros(len(states_MH) - len(before_MH), states_MH.shape[1]), before_MH])


def _products(weight_KGD: Tensor, bias_KG: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """The function `x_KBD @ weight.T + bias` of both directions: small products as one batch, others with oneDNN."""
    weight_KDG, biases = weight_KGD.transpose(1, 2), (None, None) if bias_KG is None else bias_KG
    weights: list[Any] = []

    def multiply(x_KBD: Tensor) -> Tensor:
        if suits_onednn(x_KBD.shape[1], weight_KGD[0]):
            weights[:] = weights or [packed(weight_GD, keep=False) for weight_GD in weight_KGD]
            return torch.stack([product(*each) for each in zip(x_KBD, weights, biases, strict=True)])
        return x_KBD @ weight_KDG if bias_KG is None else torch.baddbmm(bias_KG[:, None], x_KBD, weight_KDG)

    return multiply


def _gradients(ways: BothWays, inputs_MG: Tensor, gates_MG: Tensor, before_MH: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a layer's input gates, recurrent weights and biases, from those of all gates."""
    back_M = ways.back_M
    sides = [back_M[direction::2] for direction in range(2)]
    pairs = [(gates_MG.index_select(0, rows), before_MH.index_select(0, rows)) for rows in sides]
    inputs_N2G = inputs_MG.index_select(0, back_M).view(len(back_M) // 2, 2 * inputs_MG.shape[1])
    biases = torch.stack([gates_NG.sum(0) for gates_NG, _ in pairs])
    return inputs_N2G, torch.stack([weight_gradient(*pair) for pair in pairs]), biases


BLOCKS = 5  # gates of a cell


class HighwayLoop(torch.autograd.Function):
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


def shifted(first_SX: Tensor, rows_NX: Tensor, batch_sizes: list[int]) -> Tensor:
    """The state before each row: `first_SX`, then the rows of the preceding step."""
    steps = rows_NX.split(batch_sizes)
    before = [first_SX[: batch_sizes[0]]]
    for step, size in zip(steps, batch_sizes[1:], strict=False):
        before.append(step[:size])
    return torch.cat(before)
