"""biGRU and biLSTM layers of the heads on CPU, with both directions in one batch and a hand-written backward pass.

`torch.nn` is the definition. Its loop has a dozen operations per step and direction, each a node of the graph. For a
`PackedSequence`, the backward pass of each step fills a gradient as large as the whole sequence, so that time grows
with the square of the length.

Shape suffixes: S steps; K the two directions; B batch; H hidden size; G gates, 3 or 4 times H; D width of the input.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .elmo_backends import (
    choose_backend,
    fast_product,
    is_unmodified,
    packed,
    product,
    product_dtype,
    suits_onednn,
    tanh,
    weight_gradient,
)


def read_both_ways(layer: nn.Module, x_BSD: Tensor, lengths_B1: Tensor) -> Tensor:
    """Outputs of a bidirectional layer, `(batch, steps, 2 * hidden_size)`, undefined after the end of a row.

    Args:
        layer: a bidirectional `nn.GRU` or `nn.LSTM` with biases.
        x_BSD: `(batch, steps, input_size)`. Each row begins at step 0.
        lengths_B1: `(batch, 1)`, number of steps of each row.
    """
    if not _fits_kernel(layer, x_BSD) or choose_backend([], x_BSD, *layer.parameters())[0] == "reference":
        rows = pack_padded_sequence(x_BSD, lengths_B1[:, 0].clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(layer(rows)[0], batch_first=True, total_length=x_BSD.shape[1])[0]
    weights, recurrent, biases, recurrent_biases = (
        [getattr(layer, name), getattr(layer, f"{name}_reverse")]
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    )
    steps_S = torch.arange(x_BSD.shape[1], device=x_BSD.device)
    turned_BS = torch.where(steps_S < lengths_B1, lengths_B1 - 1 - steps_S, steps_S)
    ahead_BSG, back_BSG = fast_product(x_BSD, torch.cat(weights), torch.cat(biases)).chunk(2, -1)
    gates_SKBG = torch.stack([ahead_BSG, at(back_BSG, turned_BS)]).permute(2, 0, 1, 3).contiguous()
    function = _GRU if isinstance(layer, nn.GRU) else _LSTM
    states_SKBH = function.apply(gates_SKBG, torch.stack(recurrent), torch.stack(recurrent_biases))
    ahead_BSH, back_BSH = states_SKBH.permute(1, 2, 0, 3)
    return torch.cat([ahead_BSH, at(back_BSH, turned_BS)], -1)


def _fits_kernel(layer: nn.Module, x_BSD: Tensor) -> bool:
    kind = product_dtype(x_BSD), x_BSD.device
    same = all((p.dtype, p.device) == kind for p in (x_BSD, *layer.parameters()))
    return same and is_unmodified(layer, (nn.GRU, nn.LSTM))


def at(x_BTD: Tensor, positions_BS: Tensor) -> Tensor:
    """`x[b, positions[b, s]]`."""
    batch, time = x_BTD.shape[:2]
    starts_B1 = torch.arange(0, batch * time, time, device=x_BTD.device)[:, None]
    rows = x_BTD.flatten(0, 1).index_select(0, (starts_B1 + positions_BS).flatten())
    return rows.unflatten(0, positions_BS.shape)


class _GRU(torch.autograd.Function):
    """`r, z = sigmoid(x + W h + b);  n = tanh(x_n + r * (W_n h + b_n));  h' = n + z * (h - n)`."""

    @staticmethod
    def forward(ctx, gates_SKBG: Tensor, weight_KGH: Tensor, bias_KG: Tensor) -> Tensor:
        size, read = weight_KGH.shape[2], _products(gates_SKBG.shape[2], weight_KGH, bias_KG)
        x_rz, x_n = gates_SKBG.split([2 * size, size], -1)
        rz_SKBG = torch.empty_like(x_rz)
        news, candidates, states = (torch.empty_like(x_n) for _ in range(3))  # n; W_n h + b_n; h
        h_KBH = x_n.new_zeros(x_n.shape[1:])
        views = (x_rz.unbind(), x_n.unbind(), rz_SKBG.unbind(), candidates.unbind(), news.unbind(), states.unbind())
        for x_rz_KBG, x_n_KBH, rz_KBG, candidate_KBH, new_KBH, state_KBH in zip(*views, strict=True):
            read_rz, read_n = read(h_KBH).split([2 * size, size], -1)
            torch.add(x_rz_KBG, read_rz, out=rz_KBG).sigmoid_()
            reset_KBH, update_KBH = rz_KBG.chunk(2, -1)
            candidate_KBH.copy_(read_n)
            tanh(torch.addcmul(x_n_KBH, reset_KBH, read_n, out=new_KBH), out=new_KBH)
            h_KBH = torch.lerp(new_KBH, h_KBH, update_KBH, out=state_KBH)
        ctx.save_for_backward(weight_KGH, rz_SKBG, candidates, news, states)
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_SKBH: Tensor):
        weight_KGH, rz_SKBG, candidates, news, states = ctx.saved_tensors
        reset, update = rz_SKBG.chunk(2, -1)
        before = _before(states)
        # What a step's gates get is its state's gradient times these, which need no loop.
        to_new = (1 - update) * (1 - news.square())
        to_reset = to_new * candidates * reset * (1 - reset)
        to_update = (before - news) * update * (1 - update)
        factors = torch.stack([to_reset, to_update, to_new * reset], -2)
        recurrent, grads = torch.empty_like(factors), torch.empty_like(states)
        carried_KBH, carry = torch.zeros_like(states[0]), _products(states.shape[2], weight_KGH.transpose(1, 2))
        views = (grad_SKBH.unbind(), factors.unbind(), update.unbind(), recurrent.unbind(), grads.unbind())
        for given_KBH, factor, update_KBH, gates, grad_KBH in zip(*map(reversed, views), strict=True):
            torch.add(given_KBH, carried_KBH, out=grad_KBH)
            torch.mul(grad_KBH[..., None, :], factor, out=gates)
            carried_KBH = carry(gates.flatten(2)).addcmul_(grad_KBH, update_KBH)
        recurrent_SKBG = recurrent.flatten(3)
        inputs_SKBG = torch.cat([recurrent[..., :2, :].flatten(3), grads * to_new], -1)
        return inputs_SKBG, _weight_gradient(recurrent_SKBG, before), recurrent_SKBG.sum((0, 2))


class _LSTM(torch.autograd.Function):
    """`i, f, o = sigmoid(x + W h + b);  g = tanh(x_g + W_g h + b_g);  c' = f * c + i * g;  h' = o * tanh(c')`."""

    @staticmethod
    def forward(ctx, gates_SKBG: Tensor, weight_KGH: Tensor, bias_KG: Tensor) -> Tensor:
        size, read = weight_KGH.shape[2], _products(gates_SKBG.shape[2], weight_KGH, bias_KG)
        values_SKBG = torch.empty_like(gates_SKBG)
        cells, squashed, states = (gates_SKBG.new_empty(*gates_SKBG.shape[:3], size) for _ in range(3))
        h_KBH = c_KBH = gates_SKBG.new_zeros(*gates_SKBG.shape[1:3], size)
        views = (each.unbind() for each in (gates_SKBG, values_SKBG, cells, squashed, states))
        for x_KBG, gates_KBG, cell_KBH, squashed_KBH, state_KBH in zip(*views, strict=True):
            torch.add(x_KBG, read(h_KBH), out=gates_KBG)
            gates_KBG[..., : 2 * size].sigmoid_()
            tanh(gates_KBG[..., 2 * size : 3 * size], out=gates_KBG[..., 2 * size : 3 * size])
            gates_KBG[..., 3 * size :].sigmoid_()
            input_KBH, forget_KBH, new_KBH, output_KBH = gates_KBG.chunk(4, -1)
            torch.mul(forget_KBH, c_KBH, out=cell_KBH).addcmul_(input_KBH, new_KBH)
            tanh(cell_KBH, out=squashed_KBH)
            h_KBH, c_KBH = torch.mul(output_KBH, squashed_KBH, out=state_KBH), cell_KBH
        ctx.save_for_backward(weight_KGH, values_SKBG, cells, squashed, states)
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_SKBH: Tensor):
        weight_KGH, gates_SKBG, cells, squashed, states = ctx.saved_tensors
        enter, forget, new, output = gates_SKBG.chunk(4, -1)
        # The gradient of the gates is the gradient of the cell (output gate: of the state) times these factors.
        of_cell = torch.stack(
            [new * enter * (1 - enter), _before(cells) * forget * (1 - forget), enter * (1 - new.square())], -2
        )
        of_state = squashed * output * (1 - output)
        to_cell = output * (1 - squashed.square())
        gates = of_state.new_empty(*of_state.shape[:3], 4, of_state.shape[3])
        carry = _products(states.shape[2], weight_KGH.transpose(1, 2))
        state_KBH = cell_KBH = torch.zeros_like(states[0])  # gradients from the next step
        views = (each.unbind() for each in (grad_SKBH, of_cell, of_state, to_cell, forget, gates))
        for given_KBH, of_cell_, of_state_, to_cell_, forget_KBH, gates_ in zip(*map(reversed, views), strict=True):
            state_KBH = state_KBH + given_KBH
            cell_KBH = torch.addcmul(cell_KBH, state_KBH, to_cell_)
            torch.mul(cell_KBH[..., None, :], of_cell_, out=gates_[..., :3, :])
            torch.mul(state_KBH, of_state_, out=gates_[..., 3, :])
            state_KBH = carry(gates_.flatten(2))
            cell_KBH = cell_KBH * forget_KBH
        gates_SKBG = gates.flatten(3)
        return gates_SKBG, _weight_gradient(gates_SKBG, _before(states)), gates_SKBG.sum((0, 2))


def _before(states_SKBH: Tensor) -> Tensor:
    """The state that each step reads: zeros, then the state of the preceding step."""
    return torch.cat([torch.zeros_like(states_SKBH[:1]), states_SKBH[:-1]])


def _products(rows: int, weight_KGD: Tensor, bias_KG: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """The function `x_KBD @ weight.T + bias` of both directions: small products as one batch, others with oneDNN."""
    if suits_onednn(rows, weight_KGD[0]):
        weights = [packed(weight_GD, keep=False) for weight_GD in weight_KGD]
        biases = (None, None) if bias_KG is None else bias_KG
        return lambda x_KBD: torch.stack([product(*each) for each in zip(x_KBD, weights, biases, strict=True)])
    weight_KDG = weight_KGD.transpose(1, 2)
    if bias_KG is None:
        return lambda x_KBD: x_KBD @ weight_KDG
    return lambda x_KBD: torch.baddbmm(bias_KG[:, None], x_KBD, weight_KDG)


def _weight_gradient(gates_SKBG: Tensor, before_SKBH: Tensor) -> Tensor:
    sides = (each.transpose(0, 1).contiguous().flatten(1, 2) for each in (gates_SKBG, before_SKBH))
    return torch.stack([weight_gradient(*each) for each in zip(*sides, strict=True)])
