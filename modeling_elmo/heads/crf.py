"""The output layer of taggers: a conditional random field, its constraints, and the decoding of BIO labels.

Shape suffixes: B rows; T time; N packed tokens; K labels; S states of a chain: the labels, then the boundary, which
comes before the first position and after the last; R chains of a step.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..inputs import NO_LABEL, pad, unpad
from .packed_texts import PackedTexts, PaddedTexts, Texts, rows_as_texts

FORBIDDEN = -1e30  # far below any sum of real scores; finite, because minus infinity has NaN gradients
IMPOSSIBLE = -1e6  # a log-probability that is lower, such as minus infinity, counts as this one
NEGLIGIBLE = -80.0  # its exponential does not change a sum of 1, but is still a normal float32
SHOWN_TAGS = 3  # in a message about tags that are not BIO
LEAST_LOG_PROBABILITY = -1e4  # probability 0, also in half precision; a loss with it is still a usable number


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

    def initialize_parameters(self) -> None:
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
        states_S = torch.arange(len(table_SS), device=labels_BT.device)
        is_other_NS = (labels_N1 != states_S) & (labels_N1 != NO_LABEL)
        # One loop for both sums: its cost depends on the number of steps, not on their width.
        both_N2S = torch.stack([scores_NS.masked_fill(is_other_NS, FORBIDDEN), scores_NS], 1)
        ends_R2S, _ = _sums(both_N2S, table_SS, texts)
        sums_R2 = _log_sum(ends_R2S + table_SS[:, -1], -1)
        given_R, all_R = sums_R2.unbind(1)
        rows_R = texts.text_N[: len(all_R)]
        return all_R.new_zeros(len(mask_BT)).index_copy(0, rows_R, given_R - all_R)

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
        log_probs_NK = joint_NS[:, :-1].log_softmax(-1)
        log_probs_BTK = pad(texts.unpack(log_probs_NK, joint_NS.shape[0]), mask_BT)
        uniform = -math.log(self.start.numel())
        log_probs_BTK = log_probs_BTK.masked_fill(~mask_BT[..., None], uniform)
        labels_BT = _best_labels(scores_NS.detach(), table_SS.detach(), texts, mask_BT)
        return labels_BT, log_probs_BTK.clamp(min=LEAST_LOG_PROBABILITY)

    def forward(self, emissions_NK: Tensor, texts: Texts, allowed: Constraints | None = None) -> tuple[Tensor, Tensor]:
        """What `_chain` returns. Parameters are read only here: they may be offloaded outside of a module's call."""
        potentials = (self.start, self.transitions, self.end)
        return _chain(texts.pack(emissions_NK), potentials, allowed)


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
        ValueError: the names are not a BIO scheme, or not one for each label.
    """
    check_bio(names)
    num_labels = log_probs_BTK.shape[-1]
    if num_labels != len(names):
        raise ValueError(f"There are log-probabilities of {num_labels} labels, but {len(names)} names.")
    texts = rows_as_texts(mask_BT)
    log_probs_NK = texts.pack(unpad(log_probs_BTK, mask_BT))
    wide = torch.promote_types(log_probs_NK.dtype, torch.float32)
    possible_NK = log_probs_NK.to(wide).clamp(min=IMPOSSIBLE)  # forbidden labels must stay worse
    zeros_K = possible_NK.new_zeros(num_labels)
    zeros_KK = possible_NK.new_zeros(num_labels, num_labels)
    scores_NS, table_SS = _chain(possible_NK, (zeros_K, zeros_KK, zeros_K), bio_constraints(names))
    return _best_labels(scores_NS, table_SS, texts, mask_BT)


def check_bio(names: tuple[str, ...]):
    """Raises an error unless all names are `"O"`, `"B-X"`, or `"I-X"` with a `"B-X"`."""
    for name in names:
        begin = f"B-{name[2:]}"
        is_alone = name.startswith("I-") and begin not in names
        if is_alone or not re.fullmatch("O|[BI]-.+", name):
            raise ValueError(
                f"The label {name!r} is not BIO. Name labels 'O', 'B-X', or 'I-X' with a 'B-X': "
                'id2label={0: "O", 1: "B-ARG0", 2: "I-ARG0"}.'
            )


def tags_that_are_not_bio(tags: Iterable[str]) -> str:
    """The tags that are not BIO, for a message, or "" if none marks entities in another way.

    They do if one of the tags, as `B-PER`, or all of them, as `B_PER` and `3`, mark entities.
    """
    tags = list(tags)
    is_one = any(re.fullmatch("(?s)[BIESLUM]-.+", tag) for tag in tags)
    are_all = all(re.fullmatch(r"(?s)O|\d+|[BIESLUM]([\W_].+)?", tag) for tag in tags)
    if not (is_one or are_all):
        return ""
    others = [repr(tag) for tag in tags if not re.fullmatch("(?s)O|[BI]-.+", tag)]
    shown = ", ".join(others[:SHOWN_TAGS])
    rest = len(others) - SHOWN_TAGS
    return f"{shown} and {rest} more" if rest > 0 else shown


def _log_sum(scores: Tensor, dim: int) -> Tensor:
    """`torch.logsumexp` without underflow, which would make the exponentials many times slower on CPUs."""
    highest = scores.detach().amax(dim, keepdim=True)
    powers = (scores - highest).clamp(min=NEGLIGIBLE).exp()
    return powers.sum(dim).log() + highest.squeeze(dim)


def _chain(
    emissions_NK: Tensor, potentials: tuple[Tensor, Tensor, Tensor], allowed: Constraints | None
) -> tuple[Tensor, Tensor]:
    """Scores `(N, S)` of states at positions, and `(S, S)` of transitions; a chain begins and ends at the boundary.

    The potentials are scores of starts `(K,)`, of transitions `(K, K)`, of ends `(K,)`.
    """
    wide = torch.promote_types(emissions_NK.dtype, torch.float32)
    # Adding a constant to a position changes no probability. This one keeps the sums small, and so precise.
    log_probs_NK = emissions_NK.to(wide).log_softmax(-1)
    scores_NS = F.pad(log_probs_NK, (0, 1), value=FORBIDDEN)
    table_SS = _with_boundary(*potentials).to(wide)
    if allowed is not None:
        allowed_SS = _with_boundary(*allowed).to(table_SS.device)
        table_SS = table_SS.masked_fill(~allowed_SS, FORBIDDEN)
    return scores_NS, table_SS


def _best_labels(scores_NS: Tensor, table_SS: Tensor, texts: Texts, mask_BT: Tensor) -> Tensor:
    """The best path (Viterbi) through the scores of `_chain`, `(B, T)`, -100 where the mask is False."""
    ends_RS, before_NS = _sums(scores_NS, table_SS, texts, torch.amax, before=True)

    def step_back(before_RS: Tensor, label_R1: Tensor) -> Tensor:
        to_label_RS = table_SS.t()[label_R1.squeeze(1)]
        return (before_RS + to_label_RS).argmax(1, keepdim=True)

    last_R1 = (ends_RS + table_SS[:, -1]).argmax(1, keepdim=True)
    _, labels_N1 = texts.scan(step_back, last_R1, before_NS, reverse=True, before=True)
    labels_N = texts.unpack(labels_N1.squeeze(1), len(scores_NS))
    return pad(labels_N, mask_BT).masked_fill(~mask_BT, NO_LABEL)


@torch.compiler.disable  # as `decode`
def _sums(
    scores: Tensor, table_SS: Tensor, texts: Texts, over: Callable[[Tensor, int], Tensor] = _log_sum, **order: bool
) -> tuple[Tensor, Tensor]:
    """`scan` of scores `(N, ..., S)`: each entry reduces, with `over`, the scores of all chains that end in a state."""

    def step(scores: Tensor, states: Tensor) -> Tensor:
        return over(states[..., None] + table_SS, -2) + scores

    if isinstance(texts, PaddedTexts):
        chains = texts.mask_BT.shape[0]
    elif texts.batch_sizes:
        chains = texts.batch_sizes[0]
    else:  # no token: gradients are zeros and not missing
        return scores, scores
    start = scores.new_full((chains, *scores.shape[1:]), FORBIDDEN)
    start[..., -1] = 0  # all chains begin at the boundary
    return texts.scan(step, start, scores, **order)


def _with_boundary(start_K: Tensor, transitions_KK: Tensor, end_K: Tensor) -> Tensor:
    from_labels_KS = torch.cat([transitions_KK, end_K[:, None]], 1)
    from_boundary_S = F.pad(start_K, (0, 1))
    return torch.cat([from_labels_KS, from_boundary_S[None]])


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
        an end) or a text of one word could have no label. IOB1 in which every type also has `B-X` looks like IOB2:
        convert it first (`--tag_scheme iob1`).
    """
    matches = [re.fullmatch("O|([BIELMSU])-(.+)", label) for label in labels]
    tags = [match.groups("O") for match in matches if match]
    if len(tags) < len(labels):
        return None
    prefixes = [prefix for prefix, _ in tags]
    kinds = [kind for _, kind in tags]
    by_prefix: dict[str, set[str]] = defaultdict(set)
    for prefix, kind in tags:
        by_prefix[prefix].add(kind)
    begun = by_prefix["B"]
    ended = by_prefix["E"] | by_prefix["L"]
    continued = ended | by_prefix["I"] | by_prefix["M"]
    closes = bool(ended | by_prefix["S"] | by_prefix["U"])
    is_closed = ended == begun or not closes
    if not continued or not continued <= begun or not is_closed:
        return None
    with torch.device("cpu"):  # not the device of the caller's context: the cache outlives it
        kinds_K = torch.tensor([kinds.index(kind) for kind in kinds])
        continues_K = torch.tensor([prefix in "IELM" for prefix in prefixes])
        opens_K = torch.tensor([prefix in "BIM" for prefix in prefixes])
    may_end_K = ~opens_K if closes else torch.ones_like(opens_K)
    if not (may_end_K & ~continues_K).any():
        return None
    may_continue_KK = opens_K[:, None] & (kinds_K[:, None] == kinds_K)
    transitions_KK = torch.where(continues_K, may_continue_KK, may_end_K[:, None])
    return Constraints(~continues_K, transitions_KK, may_end_K)
