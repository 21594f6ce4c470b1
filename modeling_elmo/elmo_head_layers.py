"""Layers of the heads' networks: the vectors `x_k`, biRNNs over packed texts, and the output layer of taggers, a CRF.

`torch.nn` is the definition of the biRNNs. On CPU, both directions run in one batch with a hand-written backward pass:
the loop of `torch.nn` has a dozen operations per step and direction, each a node of the graph. For a `PackedSequence`,
its backward pass fills, at each step, a gradient as large as the whole sequence, so that time grows with the square of
the length.

Shape suffixes: B batch; T time; N tokens; S texts, for the CRF states of a chain: the labels, then the boundary, which
comes before the first position and after the last; R texts of a group, L their longest; D width of the input; K the two
directions, for the CRF labels; M 2 N; H hidden size; G gates, 3 or 4 times H.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers import initialization as init

from .configuration_elmo import ELMoConfig
from .elmo_backends import (
    choose_backend,
    fast_product,
    first_derivative,
    is_exporting,
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
from .elmo_inputs import pack, pad, unpad
from .elmo_lstm import masked_scan

FORBIDDEN = -1e30  # far below any sum of real scores; finite, because minus infinity has NaN gradients
IMPOSSIBLE = -1e6  # a log-probability that is lower, such as minus infinity, counts as this one
NEGLIGIBLE = -80.0  # its exponential does not change a sum of 1, but is still a normal float32
UNKNOWN = -100  # the label of positions without a label, as in all of transformers
FEW_PAIRS = 2**14  # of tokens: below, padding costs less than a further group
SHOWN_TAGS = 3  # in a message about tags that are not BIO
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
        """`x_k` of every real token: `(tokens, output_size)`."""
        features = []
        if self.word_embeddings is not None:
            assert input_ids is not None
            features.append(self.word_embeddings(unpad(input_ids, mask_BT).long()))
        if self.char_encoder is not None:
            assert character_ids is not None
            if is_hooked(self.char_encoder) or is_exporting():  # a hook sees every position
                features.append(unpad(self.char_encoder(character_ids.long()), mask_BT))
            else:
                distinct_UW, index_N = distinct_rows(unpad(character_ids.long(), mask_BT))
                features.append(self.char_encoder(distinct_UW)[index_N])
        return torch.cat(features, dim=-1)


def _character_config(config: ELMoConfig) -> ELMoConfig:
    """The configuration of the head's own character encoder."""
    return ELMoConfig(
        char_vocab_size=config.char_vocab_size,
        char_embedding_size=config.task_char_embedding_size,
        char_cnn_filters=config.task_char_cnn_filters,
        num_highway_layers=0,
        max_word_length=config.max_word_length,
    )


class Places(NamedTuple):
    """Where the tokens of some texts are among packed tokens.

    Shape:
        tokens_RL: `(texts, length)`, the place of each token, 0 at padding.
        mask_RL: `(texts, length)` bool, the tokens of each text.
    """

    tokens_RL: Tensor
    mask_RL: Tensor

    def read(self, x_ND: Tensor) -> Tensor:
        """The values of packed tokens as `(texts, length, width)`, zeros at padding."""
        x_ND = x_ND if len(x_ND) else F.pad(x_ND, (0, 0, 0, 1))
        rows = x_ND.index_select(0, self.tokens_RL.flatten()).unflatten(0, self.tokens_RL.shape)
        return rows.masked_fill(~self.mask_RL[..., None], 0)


class PackedTexts:
    """Texts of different lengths without padding: step by step, the longest text first, as in a `PackedSequence`.

    Args:
        texts_ST: `(texts, time)` bool, the tokens of each text. Text `s` is in row `s % batch` of the batch.
        mask_BT: `(batch, time)` bool, the token mask.

    Attributes:
        lengths: the number of tokens of each text. A text may have none.
        batch_sizes: the number of texts that have a token at each step.

    Shape:
        tokens_N: the number of each packed token among the real tokens of the batch, row after row.
        text_N: its text.
        turned_N: the packed token that takes its place if all texts are read backward.
    """

    @torch.compiler.disable  # sizes depend on values
    def __init__(self, texts_ST: Tensor, mask_BT: Tensor):
        texts_ST, device = texts_ST.cpu(), mask_BT.device
        packing, numbers = pack(texts_ST), mask_BT.flatten().cumsum(0) - 1
        order_N = packing.forward_N
        sizes = _on_host(packing.batch_sizes)
        self.batch_sizes, self.lengths = packing.batch_sizes, texts_ST.sum(1).tolist()
        self.starts = sizes.cumsum(0) - sizes  # of each step
        rank_N = _on_host(range(len(order_N))) - self.starts.repeat_interleave(sizes)
        self.ranks_S = _on_host([0] * len(texts_ST))
        self.ranks_S[packing.rows_S] = _on_host(range(len(packing.rows_S)))
        self.tokens_N = numbers[(packing.positions_N[order_N] % mask_BT.numel()).to(device)]
        self.text_N = packing.rows_S[rank_N].to(device)
        self.turned_N = order_N.argsort()[packing.backward_N].to(device)

    def pack(self, x_ND: Tensor) -> Tensor:
        """The values of the texts' tokens, from those of all real tokens of the batch."""
        return x_ND.index_select(0, self.tokens_N)

    def unpack(self, x_ND: Tensor, num_tokens: int) -> Tensor:
        """Values of the texts' tokens among those of all real tokens of the batch, `(num_tokens, width)`; else 0."""
        return x_ND.new_zeros(num_tokens, *x_ND.shape[1:]).index_copy(0, self.tokens_N, x_ND)

    def sum(self, x_ND: Tensor) -> Tensor:
        """The sum over the tokens of each text, `(texts, width)`; 0 for an empty text."""
        return x_ND.new_zeros(len(self.lengths), x_ND.shape[1]).index_add(0, self.text_N, x_ND)

    def mean(self, x_ND: Tensor) -> Tensor:
        counts_S = torch.tensor(self.lengths, dtype=x_ND.dtype, device=x_ND.device).clamp(min=1)
        return self.sum(x_ND) / counts_S[:, None]

    def max(self, x_ND: Tensor) -> Tensor:
        zeros_SD = x_ND.new_zeros(len(self.lengths), x_ND.shape[1])
        return zeros_SD.scatter_reduce(0, self.text_N[:, None].expand_as(x_ND), x_ND, "amax", include_self=False)

    def softmax(self, scores_N1: Tensor) -> Tensor:
        """The softmax over the tokens of each text."""
        powers_N1 = (scores_N1 - self.max(scores_N1.detach())[self.text_N]).exp()
        return powers_N1 / self.sum(powers_N1)[self.text_N]

    def scan(
        self,
        step: Callable[[Tensor, Tensor], Tensor],
        start_SX: Tensor,
        x_ND: Tensor,
        reverse: bool = False,
        before: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The state of each text after its end, `(texts with tokens, ...)`, and after each token, `(tokens, ...)`.

        Args:
            step: the new states for `step(values of the tokens at a step, states)`.
            start_SX: the states at the start, the longest text first.
            reverse: whether to read from the last token to the first.
            before: whether to return the states before each token instead.
        """
        parts = x_ND.split(self.batch_sizes)
        state, ended, found = start_SX[:0] if reverse else start_SX, [start_SX[:0]], [start_SX[:0]]
        for part in reversed(parts) if reverse else parts:
            read = state
            if len(state) > len(part):
                ended.append(state[len(part) :])
                read = state[: len(part)]
            elif len(state) < len(part):
                read = torch.cat([state, start_SX[len(state) : len(part)]])
            state = step(part, read)
            found.append(read if before else state)
        return torch.cat([*ended, state][::-1]), torch.cat(found[::-1] if reverse else found)

    def pairs(self, others: "PackedTexts", turn: int = 0) -> Iterator[tuple[Places, Places]]:
        """Groups of similar lengths of each text and its partner, text `(s + turn) % S` of the others.

        All pairs of a token and a token of the partner are at least half of what a group has with its padding.
        """
        count, device = len(self.lengths), self.text_N.device
        partner = [(text + turn) % count for text in range(count)]
        sizes = {text: (self.lengths[text], max(1, others.lengths[partner[text]])) for text in range(count)}
        groups: list[list[int]] = [[]]
        real = width = other_width = 0
        for text in sorted(filter(self.lengths.__getitem__, sizes), key=sizes.__getitem__, reverse=True):
            own, other = sizes[text]
            real, width, other_width = real + own * other, max(width, own), max(other_width, other)
            if groups[-1] and (len(groups[-1]) + 1) * width * other_width > max(2 * real, FEW_PAIRS):
                groups.append([])
                real, width, other_width = own * other, own, other
            groups[-1].append(text)
        for group in groups:
            yield self._places(group, device), others._places([partner[text] for text in group], device)

    def _places(self, texts: list[int], device: torch.device) -> Places:
        lengths = [self.lengths[text] for text in texts]
        mask_RL = _on_host(range(max([1, *lengths]))) < _on_host(lengths)[:, None]
        starts_L = F.pad(self.starts, (0, 1))[: mask_RL.shape[1]]
        tokens_RL = (starts_L + self.ranks_S[texts][:, None]).masked_fill(~mask_RL, 0)
        return Places(tokens_RL.to(device), mask_RL.to(device))

    def join(self, found: Iterable[tuple[Places, Tensor]]) -> Tensor:
        """Packed values `(tokens, width)` from those of groups of texts, `(texts, length, width)`."""
        rows = [(places.tokens_RL[places.mask_RL], values[places.mask_RL]) for places, values in found]
        order_N, values_ND = map(torch.cat, zip(*rows, strict=True))
        return torch.empty_like(values_ND).index_copy(0, order_N, values_ND)

    @cached_property
    def both_ways(self) -> tuple[Tensor, Tensor, Tensor]:
        """Orders of a buffer `(2 * tokens, ...)` in which each step has the texts read forward, then backward.

        Its rows are steps of `2 * batch_sizes` rows. The first order gathers it from `(tokens * 2, ...)`: for each
        packed token, what a forward and a backward pass read there; the second is its inverse. The third has, for each
        row but those of the first step, the row of the same text and direction in the step before.
        """
        sizes = _on_host(self.batch_sizes)
        ahead_N = _on_host(range(len(self.text_N))) + self.starts.repeat_interleave(sizes)
        behind_N = ahead_N + sizes.repeat_interleave(sizes)
        back_M = torch.stack([ahead_N, behind_N[self.turned_N]], 1).flatten()
        first = sum(self.batch_sizes[:1])
        before_N = _on_host(range(first, len(ahead_N))) - sizes[:-1].repeat_interleave(sizes[1:])
        before_M = before_N.new_empty(2 * len(before_N))
        for place_N in (ahead_N, behind_N):
            before_M[place_N[first:] - 2 * first] = place_N[before_N]
        return back_M.argsort(), back_M, before_M


def _on_host(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long, device="cpu")


class PaddedTexts:
    """`PackedTexts` while `torch.export` traces a model: each row is a text, and its padding stays."""

    def __init__(self, mask_BT: Tensor):
        self.mask_BT = self.text_N = mask_BT

    def pack(self, x_ND: Tensor) -> Tensor:
        return x_ND

    def unpack(self, x_ND: Tensor, num_tokens: int) -> Tensor:
        return x_ND

    def scan(
        self,
        step: Callable[[Tensor, Tensor], Tensor],
        start_BX: Tensor,
        x_ND: Tensor,
        reverse: bool = False,
        before: bool = False,
    ) -> tuple[Tensor, Tensor]:
        x_TBD = x_ND.clone(memory_format=torch.contiguous_format).unflatten(0, self.mask_BT.shape).transpose(0, 1)
        step_of_one = lambda *arguments: [step(*arguments)]  # noqa: E731
        [end_BX], found_TBX = masked_scan(step_of_one, [start_BX], x_TBD, self.mask_BT, reverse, before)
        return end_BX, found_TBX.transpose(0, 1).contiguous().flatten(0, 1)


Texts = PackedTexts | PaddedTexts


def rows_as_texts(mask_BT: Tensor) -> Texts:
    """The real tokens of each row as a text."""
    return PaddedTexts(mask_BT) if is_exporting() else PackedTexts(mask_BT, mask_BT)


class VariationalDropout(nn.Module):
    """Dropout with the same mask at all time steps of a text (Gal and Ghahramani 2016)."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x_ND: Tensor, text_N: Tensor) -> Tensor:
        """Shape: `x_ND` `(tokens, width)`, like the result; `text_N` `(tokens,)`, the text of each token."""
        if not self.training or not self.rate or not len(x_ND):
            return x_ND
        return x_ND * F.dropout(x_ND.new_ones(int(text_N.max()) + 1, x_ND.shape[1]), self.rate)[text_N]


class TaskRNN(nn.Module):
    """A biRNN over packed texts, with variational dropout between its layers.

    `torch.nn` defines it; `read_both_ways` computes it on CPU.

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
    def forward(self, x_ND: Tensor, texts: Texts, between_NE: Tensor | None = None) -> Tensor:
        """Reads each text in both directions.

        Args:
            x_ND: `(tokens, input_size)`, packed tokens.
            between_NE: `(tokens, between_size)`, for the second layer.

        Returns:
            `(tokens, output_size)`, forward half first.
        """
        for depth, layer in enumerate(self.layers):
            x_ND = self.dropout(x_ND, texts.text_N) if depth else x_ND
            if depth == 1 and between_NE is not None:
                x_ND = torch.cat([x_ND, between_NE], dim=-1)
            x_ND = read_both_ways(layer, x_ND, texts)
        return x_ND

    @torch.no_grad()
    def reset_parameters(self):
        """Input matrices Glorot-uniform, recurrent ones orthogonal for each gate (Saxe et al. 2014), biases 0.

        The forget gate of an LSTM has an input bias of 1 (Jozefowicz et al. 2015).
        """
        is_lstm = self.cell is nn.LSTM  # with the gates i, f, g, o, not r, z, n
        for name, parameter in self.layers.named_parameters():
            if ".weight_ih" in name:
                init.xavier_uniform_(parameter)
            else:
                reset_gates_(parameter, 4 if is_lstm else 3, has_forget_gate=is_lstm and ".bias_hh" not in name)


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


def read_both_ways(layer: nn.Module, x_ND: Tensor, texts: Texts) -> Tensor:
    """Outputs of a bidirectional layer, `(tokens, 2 * hidden_size)`.

    Args:
        layer: a bidirectional `nn.GRU` or `nn.LSTM` with biases.
        x_ND: `(tokens, input_size)`, packed tokens.
    """
    if isinstance(texts, PaddedTexts):
        return torch.cat([_scan_layer(layer, x_ND, texts, suffix) for suffix in ("", "_reverse")], -1)
    kind, tensors = (product_dtype(x_ND), x_ND.device), (x_ND, *layer.parameters())
    is_plain = all((p.dtype, p.device) == kind for p in tensors) and is_unmodified(layer, (nn.GRU, nn.LSTM))
    if not is_plain or choose_backend([], *tensors)[0] == "reference":
        if not len(x_ND):  # which `torch.nn` refuses; gradients are zeros and not missing
            width = 2 * cast(nn.LSTM, layer).hidden_size
            return x_ND.new_zeros(0, width) + sum(0 * weight.sum() for weight in layer.parameters())
        return layer(PackedSequence(x_ND, _on_host(texts.batch_sizes)))[0].data
    weights, recurrent, biases, recurrent_biases = (
        [getattr(layer, name), getattr(layer, f"{name}_reverse")]
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    )
    gates_N2G = fast_product(x_ND, torch.cat(weights), torch.cat(biases))
    function = _GRU if isinstance(layer, nn.GRU) else _LSTM
    return function.apply(gates_N2G, torch.stack(recurrent), torch.stack(recurrent_biases), texts)


def _scan_layer(layer: nn.Module, x_ND: Tensor, texts: PaddedTexts, suffix: str) -> Tensor:
    """Outputs of one direction of an LSTM, `(batch * time, hidden_size)`, as `torch.export` traces them."""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    weight, recurrent, bias, recurrent_bias = (getattr(layer, name + suffix) for name in names)

    def step(gates_BG: Tensor, states_B2H: Tensor) -> Tensor:
        h_BH, c_BH = states_B2H.chunk(2, -1)
        enter, forget, new, output = (gates_BG + F.linear(h_BH, recurrent, recurrent_bias)).chunk(4, -1)
        c_BH = forget.sigmoid() * c_BH + enter.sigmoid() * new.tanh()
        return torch.cat([output.sigmoid() * c_BH.tanh(), c_BH], -1)

    zeros_B2H = x_ND.new_zeros(texts.mask_BT.shape[0], 2 * recurrent.shape[1])
    return texts.scan(step, zeros_B2H, F.linear(x_ND, weight, bias), reverse=bool(suffix))[1].chunk(2, -1)[0]


def reset_gates_(parameter: Tensor, gates: int, has_forget_gate: bool = True):
    """Orthogonal matrices of all gates; or their biases, 0, and 1 at the second gate if it forgets."""
    parts = parameter.chunk(gates)
    if parameter.dim() > 1:
        parts = tuple(init.orthogonal_(torch.empty_like(part)) for part in parts)
    else:
        parts = tuple(torch.full_like(part, has_forget_gate and k == 1) for k, part in enumerate(parts))
    init.copy_(parameter, torch.cat(parts))


def glorot_(module: nn.Module, *types: type[nn.Module]):
    """Glorot-uniform weights in all parts of these types (default: linear layers), and biases 0."""
    for part in module.modules():
        if isinstance(part, types or nn.Linear):
            init.xavier_uniform_(part.weight)
            if getattr(part, "bias", None) is not None:
                init.zeros_(part.bias)


class _GRU(torch.autograd.Function):
    """`r, z = sigmoid(x + W h + b);  n = tanh(x_n + r * (W_n h + b_n));  h' = n + z * (h - n)`."""

    @staticmethod
    def forward(ctx, gates_N2G: Tensor, weight_KGH: Tensor, bias_KG: Tensor, texts: PackedTexts) -> Tensor:
        size = weight_KGH.shape[2]
        values_MG, read = _in_steps(gates_N2G, texts), _products(weight_KGH, bias_KG)
        news, candidates, states = (values_MG.new_empty(len(values_MG), size) for _ in range(3))  # n; W_n h + b_n; h
        h_KBH = None
        for gates_KBG, candidate_KBH, new_KBH, state_KBH in _steps(texts, values_MG, candidates, news, states):
            h_KBH = torch.zeros_like(state_KBH) if h_KBH is None else h_KBH[:, : state_KBH.shape[1]]
            read_rz, read_n = read(h_KBH).split([2 * size, size], -1)
            reset_KBH, update_KBH = gates_KBG[..., : 2 * size].add_(read_rz).sigmoid_().chunk(2, -1)
            candidate_KBH.copy_(read_n)
            torch.addcmul(gates_KBG[..., 2 * size :], reset_KBH, read_n, out=new_KBH)
            h_KBH = torch.lerp(tanh(new_KBH, out=new_KBH), h_KBH, update_KBH, out=state_KBH)
        ctx.texts = texts
        ctx.save_for_backward(weight_KGH, values_MG, candidates, news, states)
        return states.index_select(0, texts.both_ways[1]).view(len(gates_N2G), 2 * size)

    @staticmethod
    @first_derivative
    def backward(ctx, grad_N2H: Tensor):
        weight_KGH, values_MG, candidates, news, states = ctx.saved_tensors
        texts, size = ctx.texts, states.shape[1]
        reset, update = values_MG[:, : 2 * size].chunk(2, -1)
        before = _before(states, texts)
        # What a step's gates get is its state's gradient times these, which need no loop.
        to_new = (1 - update) * (1 - news.square())
        to_reset = to_new * candidates * reset * (1 - reset)
        to_update = (before - news) * update * (1 - update)
        factors = torch.stack([to_reset, to_update, to_new * reset], 1)
        grads = _in_steps(grad_N2H, texts)
        recurrent, carried_KBH, carry = torch.empty_like(factors), None, _products(weight_KGH.transpose(1, 2))
        for grad_KBH, factor, update_KBH, gates in reversed(_steps(texts, grads, factors, update, recurrent)):
            if carried_KBH is not None:
                grad_KBH[:, : carried_KBH.shape[1]] += carried_KBH
            torch.mul(grad_KBH[..., None, :], factor, out=gates)
            carried_KBH = carry(gates.flatten(2)).addcmul_(grad_KBH, update_KBH)
        inputs_MG = torch.cat([recurrent[:, :2].flatten(1), grads * to_new], -1)
        return *_gradients(texts, inputs_MG, recurrent.flatten(1), before), None


class _LSTM(torch.autograd.Function):
    """`i, f, o = sigmoid(x + W h + b);  g = tanh(x_g + W_g h + b_g);  c' = f * c + i * g;  h' = o * tanh(c')`."""

    @staticmethod
    def forward(ctx, gates_N2G: Tensor, weight_KGH: Tensor, bias_KG: Tensor, texts: PackedTexts) -> Tensor:
        size = weight_KGH.shape[2]
        values_MG, read = _in_steps(gates_N2G, texts), _products(weight_KGH, bias_KG)
        cells, squashed, states = (values_MG.new_empty(len(values_MG), size) for _ in range(3))
        h_KBH = None
        for gates_KBG, cell_KBH, squashed_KBH, state_KBH in _steps(texts, values_MG, cells, squashed, states):
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
        ctx.texts = texts
        ctx.save_for_backward(weight_KGH, values_MG, cells, squashed, states)
        return states.index_select(0, texts.both_ways[1]).view(len(gates_N2G), 2 * size)

    @staticmethod
    @first_derivative
    def backward(ctx, grad_N2H: Tensor):
        weight_KGH, values_MG, cells, squashed, states = ctx.saved_tensors
        texts, (enter, forget, new, output) = ctx.texts, values_MG.chunk(4, -1)
        # The gradient of the gates is the gradient of the cell (output gate: of the state) times these factors.
        of_cell = [new * enter * (1 - enter), _before(cells, texts) * forget * (1 - forget), enter * (1 - new.square())]
        of_state, to_cell = squashed * output * (1 - output), output * (1 - squashed.square())
        gates = of_state.new_empty(len(of_state), 4, of_state.shape[1])
        grads, carry = _in_steps(grad_N2H, texts), _products(weight_KGH.transpose(1, 2))
        state_KBH = cell_KBH = None  # gradients from the next step
        tensors = (grads, torch.stack(of_cell, 1), of_state, to_cell, forget, gates)
        for grad_KBH, of_cell_, of_state_, to_cell_, forget_KBH, gates_ in reversed(_steps(texts, *tensors)):
            if state_KBH is not None:
                grad_KBH[:, : state_KBH.shape[1]] += state_KBH
            grad_cell_KBH = grad_KBH * to_cell_
            if cell_KBH is not None:
                grad_cell_KBH[:, : cell_KBH.shape[1]] += cell_KBH
            torch.mul(grad_cell_KBH[..., None, :], of_cell_, out=gates_[..., :3, :])
            torch.mul(grad_KBH, of_state_, out=gates_[..., 3, :])
            state_KBH, cell_KBH = carry(gates_.flatten(2)), grad_cell_KBH * forget_KBH
        gates_MG = gates.flatten(1)
        return *_gradients(texts, gates_MG, gates_MG, _before(states, texts)), None


def _in_steps(x_N2D: Tensor, texts: PackedTexts) -> Tensor:
    """Values of both directions at each token, as the rows of `PackedTexts.both_ways`."""
    return x_N2D.reshape(2 * len(x_N2D), x_N2D.shape[1] // 2).index_select(0, texts.both_ways[0])


def _steps(texts: PackedTexts, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Views `(2, texts, ...)` of each step of buffers as in `PackedTexts.both_ways`."""
    sizes = [2 * size for size in texts.batch_sizes]
    return list(zip(*([step.unflatten(0, (2, -1)) for step in each.split(sizes)] for each in tensors), strict=True))


def _before(states_MH: Tensor, texts: PackedTexts) -> Tensor:
    """The state that each step reads: zeros, then the state of the preceding step."""
    before_MH = states_MH.index_select(0, texts.both_ways[2])
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


def _gradients(texts: PackedTexts, inputs_MG: Tensor, gates_MG: Tensor, before_MH: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a layer's input gates, recurrent weights and biases, from those of all gates."""
    back_M = texts.both_ways[1]
    sides = [back_M[direction::2] for direction in range(2)]
    pairs = [(gates_MG.index_select(0, rows), before_MH.index_select(0, rows)) for rows in sides]
    inputs_N2G = inputs_MG.index_select(0, back_M).view(len(back_M) // 2, 2 * inputs_MG.shape[1])
    biases = torch.stack([gates_NG.sum(0) for gates_NG, _ in pairs])
    return inputs_N2G, torch.stack([weight_gradient(*pair) for pair in pairs]), biases


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

    @torch.compiler.disable  # a traced loop over time would be compiled again for every length
    def log_likelihood(self, emissions_BTK: Tensor, labels_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Log-probability of each row's labels; 0 for a row without positions.

        Args:
            emissions_BTK: `(batch, time, labels)`.
            labels_BT: `(batch, time)`, label ids. -100 at an unmasked position means unknown: all labels count.
            mask_BT: `(batch, time)` bool, the positions of the chain.

        Returns:
            `(batch,)`, in float32 or float64.
        """
        texts = PackedTexts(mask_BT, mask_BT)
        scores_NS, table_SS = self(unpad(emissions_BTK, mask_BT), texts)
        labels_N1 = texts.pack(labels_BT[mask_BT])[:, None]
        other_NS = (labels_N1 != torch.arange(len(table_SS), device=labels_BT.device)) & (labels_N1 != UNKNOWN)
        # One loop for both sums: its cost depends on the number of steps, not on their width.
        both_N2S = torch.stack([scores_NS.masked_fill(other_NS, FORBIDDEN), scores_NS], 1)
        ends_R2S, _ = _sums(both_N2S, table_SS, texts)
        sums_R2 = _log_sum(ends_R2S + table_SS[:, -1], -1)
        zeros_B = sums_R2.new_zeros(len(mask_BT))
        return zeros_B.index_copy(0, texts.text_N[: len(sums_R2)], sums_R2[:, 0] - sums_R2[:, 1])

    @torch.compiler.disable  # as `log_likelihood`
    def decode(
        self, emissions_BTK: Tensor, mask_BT: Tensor, allowed: Constraints | None = None
    ) -> tuple[Tensor, Tensor]:
        """The most likely labels of each row (Viterbi), and log-probabilities of all labels (forward-backward).

        Args:
            emissions_BTK, mask_BT: as in `log_likelihood`.
            allowed: constraints on the sequence. Default: none.

        Returns:
            `(batch, time)`: label ids, -100 where the mask is False.
            `(batch, time, labels)`: log-probability of each label at a position given the row, -1e4 for impossible
            labels. Every position has a distribution, which is uniform where the mask is False.
        """
        texts = rows_as_texts(mask_BT)
        scores_NS, table_SS = self(unpad(emissions_BTK, mask_BT), texts, allowed)
        _, ahead_NS = _sums(scores_NS, table_SS, texts)
        _, behind_NS = _sums(scores_NS, table_SS.t(), texts, reverse=True)
        joint_NS = ahead_NS + behind_NS - scores_NS  # both include the score of the position itself
        log_probs_NK = texts.unpack(joint_NS[:, :-1].log_softmax(-1), joint_NS.shape[0])
        log_probs_BTK = pad(log_probs_NK, mask_BT).masked_fill(~mask_BT[..., None], -math.log(self.start.numel()))
        labels_BT = _best_labels(scores_NS.detach(), table_SS.detach(), texts, mask_BT)
        return labels_BT, log_probs_BTK.clamp(min=LEAST_LOG_PROBABILITY)

    def forward(self, emissions_NK: Tensor, texts: Texts, allowed: Constraints | None = None) -> tuple[Tensor, Tensor]:
        """What `_chain` returns. Parameters are read only here: they may be offloaded outside of a module's call."""
        return _chain(texts.pack(emissions_NK), (self.start, self.transitions, self.end), allowed)


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
    texts, zeros_K = rows_as_texts(mask_BT), log_probs_BTK.new_zeros(len(names), dtype=wide)
    # Forbidden labels must stay worse.
    possible_NK = texts.pack(unpad(log_probs_BTK, mask_BT)).to(wide).clamp(min=IMPOSSIBLE)
    chain = _chain(possible_NK, (zeros_K, torch.outer(zeros_K, zeros_K), zeros_K), bio_constraints(names))
    return _best_labels(*chain, texts, mask_BT)


def check_bio(names: tuple[str, ...]):
    """Raises an error unless all names are `"O"`, `"B-X"`, or `"I-X"` with a `"B-X"`."""
    wrong = [name for name in names if not re.fullmatch("O|[BI]-.+", name)]
    wrong = wrong or [name for name in names if name.startswith("I-") and f"B-{name[2:]}" not in names]
    if wrong:
        raise ValueError(
            f"The label {wrong[0]!r} is not BIO. Name labels 'O', 'B-X', or 'I-X' with a 'B-X': "
            'id2label={0: "O", 1: "B-ARG0", 2: "I-ARG0"}.'
        )


def tags_that_are_not_bio(tags: Iterable[str]) -> str:
    """The tags that are not BIO, for a message, or "" if none marks entities in another way.

    They do if one of the tags, as `B-PER`, or all of them, as `B_PER` and `3`, mark entities.
    """
    tags = [*tags]
    is_one = any(re.fullmatch("[BIESLUM]-.+", tag, re.DOTALL) for tag in tags)
    are_all = all(re.fullmatch(r"O|\d+|[BIESLUM]([\W_].+)?", tag, re.DOTALL) for tag in tags)
    others = [repr(tag) for tag in tags if (is_one or are_all) and not re.fullmatch("O|[BI]-.+", tag, re.DOTALL)]
    more = f" and {len(others) - SHOWN_TAGS} more" if len(others) > SHOWN_TAGS else ""
    return ", ".join(others[:SHOWN_TAGS]) + more


def _log_sum(scores: Tensor, dim: int) -> Tensor:
    """`torch.logsumexp` without underflow, which would make the exponentials many times slower on CPUs."""
    highest = scores.detach().amax(dim, keepdim=True)
    return (scores - highest).clamp(min=NEGLIGIBLE).exp().sum(dim).log() + highest.squeeze(dim)


def _chain(
    emissions_NK: Tensor, potentials: tuple[Tensor, Tensor, Tensor], allowed: Constraints | None
) -> tuple[Tensor, Tensor]:
    """Scores `(N, S)` of states at positions, and `(S, S)` of transitions; a chain begins and ends at the boundary.

    The potentials are scores of starts `(K,)`, of transitions `(K, K)`, of ends `(K,)`.
    """
    wide = torch.promote_types(emissions_NK.dtype, torch.float32)
    # Adding a constant to a position changes no probability. This one keeps the sums small, and so precise.
    scores_NS = F.pad(emissions_NK.to(wide).log_softmax(-1), (0, 1), value=FORBIDDEN)
    table_SS = _with_boundary(*potentials).to(wide)
    if allowed is not None:
        table_SS = table_SS.masked_fill(~_with_boundary(*allowed).to(table_SS.device), FORBIDDEN)
    return scores_NS, table_SS


def _best_labels(scores_NS: Tensor, table_SS: Tensor, texts: Texts, mask_BT: Tensor) -> Tensor:
    """The best path (Viterbi) through the scores of `_chain`, `(B, T)`, -100 where the mask is False."""
    ends_RS, before_NS = _sums(scores_NS, table_SS, texts, torch.amax, before=True)

    def step(states_RS: Tensor, after_R1: Tensor) -> Tensor:
        return (states_RS + table_SS.t()[after_R1.squeeze(1)]).argmax(1, keepdim=True)

    last_R1 = (ends_RS + table_SS[:, -1]).argmax(1, keepdim=True)
    _, labels_N1 = texts.scan(step, last_R1, before_NS, reverse=True, before=True)
    return pad(texts.unpack(labels_N1.squeeze(1), len(scores_NS)), mask_BT).masked_fill(~mask_BT, UNKNOWN)


@torch.compiler.disable  # as `decode`
def _sums(
    scores: Tensor, table_SS: Tensor, texts: Texts, over: Callable[[Tensor, int], Tensor] = _log_sum, **order: bool
) -> tuple[Tensor, Tensor]:
    """`scan` of scores `(N, ..., S)`: each entry reduces, with `over`, the scores of all chains that end in a state."""

    def step(scores: Tensor, states: Tensor) -> Tensor:
        return over(states[..., None] + table_SS, -2) + scores

    *middle, states = scores.shape[1:]
    chains = texts.mask_BT.shape[0] if isinstance(texts, PaddedTexts) else sum(texts.batch_sizes[:1])
    if not chains:  # so that gradients are zeros and not missing
        return scores, scores
    start = F.pad(scores.new_full((chains, *middle, states - 1), FORBIDDEN), (0, 1))  # at the boundary
    return texts.scan(step, start, scores, **order)


def _with_boundary(start_K: Tensor, transitions_KK: Tensor, end_K: Tensor) -> Tensor:
    return torch.cat([torch.cat([transitions_KK, end_K[:, None]], 1), F.pad(start_K, (0, 1))[None]])


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
