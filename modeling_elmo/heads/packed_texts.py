"""Texts of different lengths, packed without padding, as the heads' networks read them.

Shape suffixes: B rows; T time; N packed tokens; M 2 N, or the tokens of a group; S texts; R texts of a group, L their
longest; D any width; E width of an ELMo vector.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inputs import pack
from ..kernels.scan import masked_scan
from ..kernels.torch_state import is_exporting, to_device, to_device_at_once

FEW_PAIRS = 2**14  # of tokens: below, padding costs less than a further group


class Places(NamedTuple):
    """Where the tokens of some texts are among packed tokens.

    Shape:
        tokens_RL: `(texts, length)`, the place of each token, 0 at padding.
        mask_RL: `(texts, length)` bool, the tokens of each text.
        inside_M: flat position in (texts * length) of each token.
    """

    tokens_RL: Tensor
    mask_RL: Tensor
    inside_M: Tensor

    def read(self, x_ND: Tensor) -> Tensor:
        """The values of packed tokens as `(texts, length, width)`, zeros at padding."""
        if not len(x_ND):
            x_ND = F.pad(x_ND, (0, 0, 0, 1))
        x_RLD = x_ND.index_select(0, self.tokens_RL.flatten()).unflatten(0, self.tokens_RL.shape)
        return x_RLD.masked_fill(~self.mask_RL[..., None], 0)


class PackedTexts:
    """Texts of different lengths without padding: step by step, the longest text first, as in a `PackedSequence`.

    Args:
        texts_ST: `(texts, time)` bool, the tokens of each text. Text `s` is in row `s % batch` of the batch.
        mask_BT: `(batch, time)` bool, the token mask.

    Attributes:
        lengths: the number of tokens of each text. A text may have none.
        steps: the steps in which the texts are read.
        batch_sizes: the number of texts that have a token at each step.
        starts: the first packed token of each step.
        ranks_S: the place of each text in the order of the longest text first.

    Shape:
        tokens_N: the number of each packed token among the real tokens of the batch, row after row.
        text_N: its text.
        turned_N: the packed token that takes its place if all texts are read backward.
    """

    @torch.compiler.disable  # sizes depend on values
    def __init__(self, texts_ST: Tensor, mask_BT: Tensor):
        texts_ST = texts_ST.cpu()
        packing = pack(texts_ST)
        self.lengths = texts_ST.sum(1).tolist()
        self.steps = packing.steps.to(mask_BT.device)
        self.batch_sizes = packing.steps.batch_sizes
        sizes = _on_host(self.batch_sizes)
        self.starts = sizes.cumsum(0) - sizes
        self.ranks_S = _on_host([0] * len(texts_ST))
        self.ranks_S[packing.rows_S] = _on_host(range(len(packing.rows_S)))

        order_N = packing.forward_N
        positions_N = packing.positions_N[order_N] % mask_BT.numel()
        rank_N = _on_host(range(len(order_N))) - self.starts.repeat_interleave(sizes)
        text_N = packing.rows_S[rank_N]
        turned_N = order_N.argsort()[packing.backward_N]
        orders = to_device_at_once((positions_N, text_N, turned_N), mask_BT.device)
        positions_N, self.text_N, self.turned_N = orders
        numbers = mask_BT.flatten().cumsum(0) - 1  # of the real tokens of the batch
        self.tokens_N = numbers[positions_N]

    def pack(self, x_ND: Tensor) -> Tensor:
        """The values of the texts' tokens, from the values of all real tokens of the batch."""
        return x_ND.index_select(0, self.tokens_N)

    def unpack(self, x_ND: Tensor, num_tokens: int) -> Tensor:
        """Values of the texts' tokens among all real tokens of the batch, `(num_tokens, width)`; else 0."""
        return x_ND.new_zeros(num_tokens, *x_ND.shape[1:]).index_copy(0, self.tokens_N, x_ND)

    def sum(self, x_ND: Tensor) -> Tensor:
        """The sum over the tokens of each text, `(texts, width)`; 0 for an empty text."""
        return x_ND.new_zeros(len(self.lengths), x_ND.shape[1]).index_add(0, self.text_N, x_ND)

    def mean(self, x_ND: Tensor) -> Tensor:
        lengths_S = to_device(torch.tensor(self.lengths, dtype=x_ND.dtype, device="cpu"), x_ND.device)
        return self.sum(x_ND) / lengths_S.clamp(min=1)[:, None]

    def max(self, x_ND: Tensor) -> Tensor:
        zeros_SD = x_ND.new_zeros(len(self.lengths), x_ND.shape[1])
        text_ND = self.text_N[:, None].expand_as(x_ND)
        return zeros_SD.scatter_reduce(0, text_ND, x_ND, "amax", include_self=False)

    def softmax(self, scores_N1: Tensor) -> Tensor:
        """The softmax over the tokens of each text."""
        highest_S1 = self.max(scores_N1.detach())
        powers_N1 = (scores_N1 - highest_S1[self.text_N]).exp()
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
        steps = x_ND.split(self.batch_sizes)
        state = start_SX[:0] if reverse else start_SX
        ended = []  # states of the texts that end before each step
        states = [start_SX[:0]]
        for values in reversed(steps) if reverse else steps:
            size = len(values)
            if len(state) > size:
                ended.append(state[size:])
                state = state[:size]
            elif len(state) < size:  # read backward, the longest text begins first
                state = torch.cat([state, start_SX[len(state) : size]])
            if before:
                states.append(state)
            state = step(values, state)
            if not before:
                states.append(state)
        if reverse:
            states.reverse()
        return torch.cat([state, *reversed(ended)]), torch.cat(states)

    def pairs(self, others: "PackedTexts", turn: int = 0) -> Iterator[tuple[Places, Places]]:
        """Groups of similar lengths of each text and its partner, text `(s + turn) % S` of the others.

        All pairs of a token and a token of the partner are at least half of what a group has with its padding.
        """
        partners = {}
        sizes = {}  # of each text with tokens, and of its partner
        for text, length in enumerate(self.lengths):
            if length:
                partners[text] = (text + turn) % len(self.lengths)
                sizes[text] = (length, max(1, others.lengths[partners[text]]))
        for group in _groups_of_similar(sizes):
            other_group = [partners[text] for text in group]
            yield self._places(group), others._places(other_group)

    def _places(self, texts: list[int]) -> Places:
        device = self.text_N.device
        lengths = [self.lengths[text] for text in texts]
        longest = max(lengths, default=0)
        steps_L = _on_host(range(max(1, longest)))
        mask_RL = steps_L < _on_host(lengths)[:, None]
        starts_L = F.pad(self.starts, (0, 1))[: len(steps_L)]
        tokens_RL = (starts_L + self.ranks_S[texts][:, None]).masked_fill(~mask_RL, 0)
        inside_M = mask_RL.flatten().nonzero()[:, 0]
        flat_tokens, inside_M = to_device_at_once((tokens_RL.flatten(), inside_M), device)
        return Places(flat_tokens.view_as(tokens_RL), to_device(mask_RL, device), inside_M)

    def join(self, groups: Iterable[tuple[Places, Tensor]]) -> Tensor:
        """Packed values `(tokens, width)` from the values of groups of texts, `(texts, length, width)`."""
        places = []
        values = []
        for group, values_RLD in groups:
            places.append(group.tokens_RL.flatten().index_select(0, group.inside_M))
            values.append(values_RLD.flatten(0, 1).index_select(0, group.inside_M))
        values_ND = torch.cat(values)
        return torch.empty_like(values_ND).index_copy(0, torch.cat(places), values_ND)

    def attend(self, others: "PackedTexts", attention: Callable[[Places, Places], Tensor], turn: int = 0) -> Tensor:
        """Packed values `(tokens, width)` from what `attention` computes for `pairs`, `(texts, length, width)`."""
        return self.join((places, attention(places, other)) for places, other in self.pairs(others, turn))


def _groups_of_similar(sizes: dict[int, tuple[int, int]]) -> list[list[int]]:
    """Texts in groups in which at most half of the pairs of tokens are padding, or few. Without texts: one empty group.

    Args:
        sizes: the length of each text and of its partner.
    """
    groups: list[list[int]] = []
    pairs = width = other_width = 0  # of the last group
    for text in sorted(sizes, key=sizes.__getitem__, reverse=True):
        length, other_length = sizes[text]
        pairs += length * other_length
        other_width = max(other_width, other_length)
        if groups and (len(groups[-1]) + 1) * width * other_width <= max(2 * pairs, FEW_PAIRS):
            groups[-1].append(text)
        else:
            groups.append([text])
            pairs = length * other_length
            width = length  # a group's first text is its longest
            other_width = other_length
    return groups or [[]]


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
        def step_of_one(values_BD: Tensor, state_BX: Tensor) -> list[Tensor]:
            return [step(values_BD, state_BX)]

        x_BTD = x_ND.clone(memory_format=torch.contiguous_format).unflatten(0, self.mask_BT.shape)
        x_TBD = x_BTD.transpose(0, 1)
        [end_BX], states_TBX = masked_scan(step_of_one, [start_BX], x_TBD, self.mask_BT, reverse, before)
        return end_BX, states_TBX.transpose(0, 1).contiguous().flatten(0, 1)


Texts = PackedTexts | PaddedTexts


def rows_as_texts(mask_BT: Tensor) -> Texts:
    """The real tokens of each row as a text."""
    if is_exporting():
        return PaddedTexts(mask_BT)
    return PackedTexts(mask_BT, mask_BT)


def with_elmo(x_ND: Tensor, texts: Texts, elmo_NE: Tensor | None) -> Tensor:
    """Packed vectors with the ELMo vectors of the same tokens behind them, if there are any (section 3.3)."""
    if elmo_NE is None:
        return x_ND
    return torch.cat([x_ND, texts.pack(elmo_NE)], dim=-1)


def masked_softmax(scores: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Softmax along `dim` over the scores where `mask` is True. Zeros elsewhere, also if `mask` is False everywhere.

    Shape:
        scores: any.
        mask: bool, broadcastable to the scores.
    """
    # The lowest finite number: a softmax over minus infinities only is NaN, and so are its gradients.
    allowed = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return allowed.softmax(dim).masked_fill(~mask, 0)
