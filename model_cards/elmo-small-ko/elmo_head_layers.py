"""Layers of the heads' networks: the vectors `x_k`, biRNNs over masked rows, and the output layer of taggers, a CRF.

`torch.nn` is the definition of the biRNNs. On CPU, both directions run in one batch with a hand-written backward pass:
the loop of `torch.nn` has a dozen operations per step and direction, each a node of the graph. For a `PackedSequence`,
its backward pass fills, at each step, a gradient as large as the whole sequence, so that time grows with the square of
the length.

Shape suffixes: B batch; T time; D width of the input; S steps of the longest row, for the CRF states of a chain: the
labels, then the boundary, which comes before the first position and after the last; K the two directions, for the CRF
labels; H hidden size; G gates, 3 or 4 times H.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import initialization as init

from .configuration_elmo import ELMoConfig
from .elmo_backends import (
    choose_backend,
    fast_product,
    is_hooked,
    is_unmodified,
    packed,
    product,
    product_dtype,
    suits_onednn,
    tanh,
    weight_gradient,
)
from .elmo_encoder import ELMoCharacterEncoder, distinct_rows

FORBIDDEN = -1e30  # far below any sum of real scores; finite, because minus infinity has NaN gradients
IMPOSSIBLE = -1e6  # a log-probability that is lower, such as minus infinity, counts as this one
NEGLIGIBLE = -80.0  # its exponential does not change a sum of 1, but is still a normal float32
UNKNOWN = -100  # the label of positions without a label, as in all of transformers
LEAST_LOG_PROBABILITY = -1e4  # probability 0, also in half precision; a loss with it is still a usable number


class TokenFeatures(nn.Module):
    """Word vectors for `input_ids` and a character CNN, both trained with the task. One of the two may be missing.

    Args:
        config: the head's options.
        word_vector_std: standard deviation of new word vectors. Default: vectors have length 1.
    """

    def __init__(self, config: ELMoConfig, word_vector_std: float | None = None):
        super().__init__()
        words, width = config.vocab_size, config.task_word_embedding_size
        self.word_vector_std = word_vector_std
        self.word_embeddings = nn.Embedding(words, width, config.pad_token_id) if width else None
        self.char_encoder = ELMoCharacterEncoder(_character_config(config)) if config.task_has_characters else None
        filters = config.task_char_cnn_filters if config.task_has_characters else []
        self.output_size = width + sum(number for _, number in filters)

    def reset_parameters(self):
        if self.word_embeddings is not None:
            std = self.word_vector_std or self.word_embeddings.embedding_dim**-0.5
            init.normal_(self.word_embeddings.weight, std=std)

    def forward(self, character_ids: Tensor | None, input_ids: Tensor | None, mask_BT: Tensor) -> Tensor:
        """`x_k` of every token: `(batch, time, output_size)`, zeros at padding."""
        features = []
        if self.word_embeddings is not None:
            assert input_ids is not None
            features.append(self.word_embeddings(input_ids.long()))
        if self.char_encoder is not None:
            assert character_ids is not None
            features.append(_encode_text(self.char_encoder, character_ids.long(), mask_BT))
        return torch.cat(features, dim=-1).masked_fill(~mask_BT[..., None], 0)


def _encode_text(encoder: ELMoCharacterEncoder, characters_BTW: Tensor, mask_BT: Tensor) -> Tensor:
    """Features `(batch, time, filters)`, from each distinct word once, or from each position if a hook is to see it."""
    if is_hooked(encoder):
        return encoder(characters_BTW)
    distinct_UW, index_N = distinct_rows(characters_BTW[mask_BT])
    features_NF = encoder(distinct_UW)[index_N]
    zeros_BTF = features_NF.new_zeros(*mask_BT.shape, features_NF.shape[1])
    return zeros_BTF.masked_scatter(mask_BT[..., None], features_NF)


def _character_config(config: ELMoConfig) -> ELMoConfig:
    """The configuration of the head's own character encoder."""
    return ELMoConfig(
        char_vocab_size=config.char_vocab_size,
        char_embedding_size=config.task_char_embedding_size,
        char_cnn_filters=config.task_char_cnn_filters,
        num_highway_layers=0,
        max_word_length=config.max_word_length,
    )


class VariationalDropout(nn.Module):
    """Dropout with the same mask at all time steps of a row (Gal and Ghahramani 2016)."""

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

    `torch.nn` defines it; `elmo_head_layers.py` computes it on CPU. Values at padding are never read.

    Args:
        hidden_size: width of one direction. `output_size` is twice this.
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
        x_BSD = rows_at(x_BTD, real_BS).masked_fill(none_BS1, 0)
        for depth, layer in enumerate(self.layers):
            x_BSD = self.dropout(x_BSD) if depth else x_BSD
            if depth == 1 and between_BTE is not None:
                x_BSD = torch.cat([x_BSD, rows_at(between_BTE, real_BS).masked_fill(none_BS1, 0)], dim=-1)
            x_BSD = read_both_ways(layer, x_BSD, lengths_B1)
        zeros_BTD = x_BSD.new_zeros(*mask_BT.shape, self.output_size)
        return zeros_BTD.scatter(1, real_BS[..., None].expand_as(x_BSD), x_BSD.masked_fill(none_BS1, 0))

    @torch.no_grad()
    def reset_parameters(self):
        """Input matrices Glorot-uniform, recurrent ones orthogonal for each gate (Saxe et al. 2014), biases 0.

        The forget gate of an LSTM has an input bias of 1 (Jozefowicz et al. 2015).
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
    gates_SKBG = torch.stack([ahead_BSG, rows_at(back_BSG, turned_BS)]).permute(2, 0, 1, 3).contiguous()
    function = _GRU if isinstance(layer, nn.GRU) else _LSTM
    states_SKBH = function.apply(gates_SKBG, torch.stack(recurrent), torch.stack(recurrent_biases))
    ahead_BSH, back_BSH = states_SKBH.permute(1, 2, 0, 3)
    return torch.cat([ahead_BSH, rows_at(back_BSH, turned_BS)], -1)


def _fits_kernel(layer: nn.Module, x_BSD: Tensor) -> bool:
    kind = product_dtype(x_BSD), x_BSD.device
    same = all((p.dtype, p.device) == kind for p in (x_BSD, *layer.parameters()))
    return same and is_unmodified(layer, (nn.GRU, nn.LSTM))


def glorot_(module: nn.Module, *types: type[nn.Module]):
    """Glorot-uniform weights in all parts of these types (default: linear layers), and biases 0."""
    for part in module.modules():
        if isinstance(part, types or nn.Linear):
            init.xavier_uniform_(part.weight)
            if getattr(part, "bias", None) is not None:
                init.zeros_(part.bias)


def rows_at(x_BTD: Tensor, positions_BS: Tensor) -> Tensor:
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


class Constraints(NamedTuple):
    """Allowed labels and transitions, as bool tensors. `bio_constraints` makes them."""

    start: Tensor  # (K,): the label may come first
    transitions: Tensor  # (K, K): the second label may follow the first
    end: Tensor  # (K,): the label may come last


class LinearChainCRF(nn.Module):
    """Conditional random field over chains of labels (Lafferty et al. 2001).

    `p(y | x) = exp(start[y_1] + sum_t emissions[t, y_t] + sum_t transitions[y_t, y_{t+1}] + end[y_n]) / Z(x)`

    The chain of a row connects its unmasked positions, wherever they are. Values at other positions are ignored.
    Half-precision emissions are computed in float32.
    """

    def __init__(self, num_labels: int):
        super().__init__()
        if num_labels < 1:
            raise ValueError(f"`num_labels` is {num_labels}; pass 1 or more.")
        self.transitions = nn.Parameter(torch.empty(num_labels, num_labels))  # (from, to)
        self.start = nn.Parameter(torch.empty(num_labels))
        self.end = nn.Parameter(torch.empty(num_labels))

    def reset_parameters(self) -> None:
        """All three from U(-0.1, 0.1), as in pytorch-crf."""
        for parameter in self.parameters():
            init.uniform_(parameter, -0.1, 0.1)

    def log_likelihood(self, emissions_BTK: Tensor, labels_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Log-probability of each row's labels; 0 for a row without positions.

        Args:
            emissions_BTK: `(batch, time, labels)`.
            labels_BT: `(batch, time)`, label ids. -100 at an unmasked position means unknown: all labels count.
            mask_BT: `(batch, time)` bool, the positions of the chain.

        Returns:
            `(batch,)`, in float32 or float64.
        """
        scores_BTS, table_SS = self(emissions_BTK, mask_BT)
        states_S = torch.arange(len(table_SS), device=labels_BT.device)
        other_BTS = (labels_BT[..., None] != states_S) & (labels_BT[..., None] != UNKNOWN)
        agreeing_BTS = scores_BTS.masked_fill(other_BTS, FORBIDDEN)
        # One loop for both sums: its cost depends on the number of steps, not on their width.
        ends_BS = _forward(torch.cat([agreeing_BTS, scores_BTS]), mask_BT.repeat(2, 1), table_SS)[-1]
        agreeing_B, every_B = _log_sum(ends_BS + table_SS[:, -1], 1).chunk(2)
        return agreeing_B - every_B

    @torch.compiler.disable  # a traced loop over time would be compiled again for every length
    @torch.no_grad()
    def decode(self, emissions_BTK: Tensor, mask_BT: Tensor, allowed: Constraints | None = None) -> Tensor:
        """The most likely label sequence of each row (Viterbi), `(batch, time)`, -100 where the mask is False.

        Args:
            emissions_BTK, mask_BT: as in `log_likelihood`.
            allowed: constraints on the sequence. Default: none.
        """
        scores_BTS, table_SS = self(emissions_BTK, mask_BT, allowed)
        return _best_labels(scores_BTS, table_SS, mask_BT)

    @torch.compiler.disable  # as `decode`
    def log_marginals(self, emissions_BTK: Tensor, mask_BT: Tensor, allowed: Constraints | None = None) -> Tensor:
        """Log-probability of each label at each position given the row (forward-backward), `(batch, time, labels)`.

        Every position has a distribution, which is uniform where the mask is False. Impossible labels have a
        log-probability of -1e4.

        Args:
            emissions_BTK, mask_BT, allowed: as in `decode`.
        """
        scores_BTS, table_SS = self(emissions_BTK, mask_BT, allowed)
        ahead_BTS = torch.stack(_forward(scores_BTS, mask_BT, table_SS), 1)[:, 1:]
        behind_BTS = torch.stack(_forward(scores_BTS.flip(1), mask_BT.flip(1), table_SS.t()), 1)[:, 1:].flip(1)
        joint_BTS = ahead_BTS + behind_BTS - scores_BTS  # both include the score of the position itself
        log_probs_BTK = joint_BTS[..., :-1].masked_fill(~mask_BT[..., None], 0).log_softmax(-1)
        return log_probs_BTK.clamp(min=LEAST_LOG_PROBABILITY)

    def forward(
        self, emissions_BTK: Tensor, mask_BT: Tensor, allowed: Constraints | None = None
    ) -> tuple[Tensor, Tensor]:
        """What `_chain` returns. Parameters are read only here: they may be offloaded outside of a module's call."""
        return _chain(emissions_BTK, mask_BT, (self.start, self.transitions, self.end), allowed)


@torch.compiler.disable  # as `LinearChainCRF.decode`
@torch.no_grad()
def decode_labels(log_probs_BTK: Tensor, mask_BT: Tensor, names: tuple[str, ...]) -> Tensor:
    """The BIO sequence with the highest sum of log-probabilities in each row (Viterbi).

    `I-X` follows only `B-X` or `I-X`, and never comes first (He et al. 2017, "BIO Constraints").

    Args:
        log_probs_BTK: `(batch, time, labels)`, log-probabilities, or other scores that are summed. Half precision is
            computed in float32.
        mask_BT: `(batch, time)` bool, the words, at any positions.
        names: names of the labels in the order of their ids: `"O"`, `"B-X"`, or `"I-X"` with a `"B-X"`.

    Returns:
        `(batch, time)`, label ids, -100 where the mask is False.

    Raises:
        ValueError: the names are no BIO scheme, or not one for each label.
    """
    check_bio(names)
    if log_probs_BTK.shape[-1] != len(names):
        raise ValueError(f"There are log-probabilities of {log_probs_BTK.shape[-1]} labels, but {len(names)} names.")
    wide = torch.promote_types(log_probs_BTK.dtype, torch.float32)
    possible_BTK = log_probs_BTK.to(wide).clamp(min=IMPOSSIBLE)  # forbidden sequences must stay worse
    zeros_K = possible_BTK.new_zeros(len(names))
    chain = _chain(possible_BTK, mask_BT, (zeros_K, torch.outer(zeros_K, zeros_K), zeros_K), bio_constraints(names))
    return _best_labels(*chain, mask_BT)


def check_bio(names: tuple[str, ...]):
    """Raises an error unless all names are `"O"`, `"B-X"`, or `"I-X"` with a `"B-X"`."""
    wrong = [name for name in names if not re.fullmatch("O|[BI]-.+", name)]
    wrong = wrong or [name for name in names if name.startswith("I-") and f"B-{name[2:]}" not in names]
    if wrong:
        raise ValueError(
            f"The label {wrong[0]!r} is not BIO. Name labels 'O', 'B-X', or 'I-X' with a 'B-X': "
            'id2label={0: "O", 1: "B-ARG0", 2: "I-ARG0"}.'
        )


def _chain(
    emissions_BTK: Tensor, mask_BT: Tensor, potentials: tuple[Tensor, Tensor, Tensor], allowed: Constraints | None
) -> tuple[Tensor, Tensor]:
    """Scores `(B, T, S)` of states at positions, and `(S, S)` of transitions between states.

    A chain begins and ends at the boundary, so that a chain without positions has score 0.

    Args:
        emissions_BTK, mask_BT, allowed: as in `LinearChainCRF.decode`.
        potentials: scores of starts `(K,)`, of transitions `(K, K)`, of ends `(K,)`.
    """
    wide = torch.promote_types(emissions_BTK.dtype, torch.float32)
    real_BTK = emissions_BTK.to(wide).masked_fill(~mask_BT[..., None], 0)
    # Adding a constant to a position changes no probability. This one keeps the sums small, and so precise.
    scores_BTS = F.pad(real_BTK.log_softmax(-1), (0, 1), value=FORBIDDEN)
    table_SS = _with_boundary(*potentials).to(wide)
    if allowed is not None:
        table_SS = table_SS.masked_fill(~_with_boundary(*allowed).to(table_SS.device), FORBIDDEN)
    return scores_BTS, table_SS


def _best_labels(scores_BTS: Tensor, table_SS: Tensor, mask_BT: Tensor) -> Tensor:
    """The best path (Viterbi) through the scores of `_chain`, `(B, T)`, -100 where the mask is False."""
    *before, ends_BS = _forward(scores_BTS, mask_BT, table_SS, torch.amax)
    best_B = (ends_BS + table_SS[:, -1]).argmax(1)
    labels_BT = torch.full_like(mask_BT, UNKNOWN, dtype=torch.long)
    for step in reversed(range(len(before))):
        real_B = mask_BT[:, step]
        labels_BT[:, step] = torch.where(real_B, best_B, UNKNOWN)
        best_B = torch.where(real_B, (before[step] + table_SS.t()[best_B]).argmax(1), best_B)
    return labels_BT


def _with_boundary(start_K: Tensor, transitions_KK: Tensor, end_K: Tensor) -> Tensor:
    return torch.cat([torch.cat([transitions_KK, end_K[:, None]], 1), F.pad(start_K, (0, 1))[None]])


def _log_sum(scores: Tensor, dim: int) -> Tensor:
    """`torch.logsumexp` without underflow, which would make the exponentials many times slower on CPUs."""
    highest = scores.detach().amax(dim, keepdim=True)
    return (scores - highest).clamp(min=NEGLIGIBLE).exp().sum(dim).log() + highest.squeeze(dim)


@torch.compiler.disable  # as `decode`
def _forward(
    scores_BTS: Tensor, mask_BT: Tensor, table_SS: Tensor, over: Callable[[Tensor, int], Tensor] = _log_sum
) -> list[Tensor]:
    """T + 1 tensors `(B, S)`, before the first position and after each position.

    Each entry reduces, with `over`, the scores of all chains that end in a state.
    """
    states = [F.pad(scores_BTS.new_full((len(scores_BTS), len(table_SS) - 1), FORBIDDEN), (0, 1))]
    for scores_BS, real_B in zip(scores_BTS.unbind(1), mask_BT.unbind(1), strict=True):
        arriving_BS = over(states[-1][:, :, None] + table_SS, 1) + scores_BS
        states.append(torch.where(real_B[:, None], arriving_BS, states[-1]))
    return states


@lru_cache
@torch.compiler.disable
def bio_constraints(labels: tuple[str, ...]) -> Constraints | None:
    """The constraints of a tagging scheme, read from the names of its labels. The tensors are on the CPU.

    BIO (IOB2): `I-X` follows only `B-X` or `I-X`. If there are end labels (`E-X`, `L-X`) or single labels (`S-X`,
    `U-X`), as in BIOES, BIOUL and BMES: an end label also follows only `B-X` or `I-X`, and only `I-X` or an end label
    follows `B-X` or `I-X`. The `M-X` of BMES is `I-X` by another letter.

    Args:
        labels: names of the labels, in the order of their ids.

    Returns:
        `None` without constraints: a name is neither `"O"` nor like `"B-X"`; no name continues a chunk; or the scheme
        is a different one, in which some label could never occur (`I-X` without `B-X`, as in IO and IOB1; `B-X` without
        an end) or a text of one word could have no label. IOB1 in which every type also has `B-X` cannot be told from
        IOB2: convert it first (`--tag_scheme iob1`).
    """
    tags = [match.groups("O") for match in map(re.compile(r"O|([BIELMSU])-(.+)").fullmatch, labels) if match]
    begun, continued, ended = ({kind for prefix, kind in tags if prefix in some} for some in ("B", "IELM", "EL"))
    closes = any(prefix in "ELSU" for prefix, _ in tags)
    if len(tags) < len(labels) or not continued or not continued <= begun or closes and begun != ended:
        return None
    with torch.device("cpu"):  # not the device of the caller's context: the cache outlives it
        same_KK = torch.tensor([[kind == other for _, other in tags] for _, kind in tags])
        continues_K = torch.tensor([prefix in "IELM" for prefix, _ in tags])
        opens_K = torch.tensor([prefix in "BIM" for prefix, _ in tags])
    may_end_K = ~opens_K if closes else torch.ones_like(opens_K)
    transitions_KK = torch.where(continues_K, opens_K[:, None] & same_KK, may_end_K[:, None])
    return Constraints(~continues_K, transitions_KK, may_end_K) if (may_end_K & ~continues_K).any() else None
