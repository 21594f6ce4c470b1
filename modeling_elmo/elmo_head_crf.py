"""The output layer of taggers: a linear-chain conditional random field, and constraints on label sequences.

Shape suffixes: B batch; T time; K labels; S states of a chain: the labels, then the boundary, which comes before the
first position and after the last.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

FORBIDDEN = -1e30  # far below any sum of real scores; finite, because minus infinity has NaN gradients
IMPOSSIBLE = -1e6  # a log-probability that is lower, such as minus infinity, counts as this one
NEGLIGIBLE = -80.0  # its exponential does not change a sum of 1, but is still a normal float32
UNKNOWN = -100  # the label of positions without a label, as in all of transformers
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

    Args:
        num_labels: number of labels, K.
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
