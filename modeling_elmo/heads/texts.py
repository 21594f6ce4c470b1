"""Texts of different lengths, packed without padding, as the heads' networks read them.

Shape suffixes: B rows; T time; N packed tokens; M 2 N; S texts; R texts of a group, L their longest; D any width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inputs import pack
from ..kernels.rnn import BothWays
from ..kernels.scan import masked_scan
from ..kernels.torch_state import is_exporting

FEW_PAIRS = 2**14  # of tokens: below, padding costs less than a further group


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
    def both_ways(self) -> BothWays:
        """The order in which the kernels of biRNNs read both directions in one batch."""
        sizes = _on_host(self.batch_sizes)
        ahead_N = _on_host(range(len(self.text_N))) + self.starts.repeat_interleave(sizes)
        behind_N = ahead_N + sizes.repeat_interleave(sizes)
        back_M = torch.stack([ahead_N, behind_N[self.turned_N]], 1).flatten()
        first = sum(self.batch_sizes[:1])
        before_N = _on_host(range(first, len(ahead_N))) - sizes[:-1].repeat_interleave(sizes[1:])
        before_M = before_N.new_empty(2 * len(before_N))
        for place_N in (ahead_N, behind_N):
            before_M[place_N[first:] - 2 * first] = place_N[before_N]
        return BothWays(back_M.argsort(), back_M, before_M, self.batch_sizes)


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


def masked_softmax(scores: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Softmax along `dim` over the scores where `mask` is True. Zeros elsewhere, also if `mask` is False everywhere.

    Shape:
        scores: any.
        mask: bool, broadcastable to the scores.
    """
    # The lowest finite number: a softmax over minus infinities only is NaN, and so are its gradients.
    allowed = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return allowed.softmax(dim).masked_fill(~mask, 0)
