"""The output layer of the language model: a softmax over words, shared by both directions.

Shape suffixes: N predictions; B those of one chunk; P `projection_size`; V `vocab_size`; C candidates of a sampled
softmax; R rows of the output layer that take part: all V, or the candidates and the targets.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .elmo_backends import choose_backend, forced_backend, product, suits_mkl, weight_gradient

try:  # optional, for CUDA only
    from cut_cross_entropy import linear_cross_entropy
except (ImportError, RuntimeError):  # the second from triton where it finds no driver
    linear_cross_entropy = None

CHUNK_LOGITS = 1 << 25  # logits held at a time: 128 MB in float32, whatever the vocabulary
PAD_LOGIT = -1e4  # finite for kernels, also in float16; its exponential is 0


class Candidates(NamedTuple):
    """The words a step is trained against; made by `ELMoSoftmax.sample`."""

    ids_C: Tensor  # (C,) distinct word ids, never pad_token_id
    tries: Tensor  # () int64: raw draws it took to find C distinct ones


class Competition(NamedTuple):
    """What is added to the logits of the R rows."""

    offset_R: Tensor  # minus the log of how often a candidate was expected; 0 for all words
    excluded_R: Tensor  # rows that compete only where they are the target


class ELMoSoftmax(nn.Module):
    """Full, sampled or adaptive, as `config.softmax_type` says; `<PAD>` is no class and has no probability.

    Full and sampled have the same parameters; the second is a cheaper gradient for training, and in eval mode the
    first. Adaptive (Grave et al. 2017) is `torch.nn.AdaptiveLogSoftmaxWithLoss` over the words without `<PAD>`, rarer
    words in narrower clusters; its products and probabilities have the dtype of its weights, whatever autocast says.
    All but the full one need a vocabulary in descending order of frequency, as `build_vocabulary` writes it.

    Attributes:
        sparse_gradients: with a sampled softmax in training, `weight.grad` and `bias.grad` are sparse and hold only the
            rows of the step, for optimizers that read these (`torch.optim.Adagrad`, `torch.optim.SparseAdam`).
    """

    sparse_gradients: bool = False
    weight: nn.Parameter  # and `bias` None where there is an `adaptive`
    bias: nn.Parameter
    adaptive: nn.AdaptiveLogSoftmaxWithLoss | None

    def __init__(self, config):
        super().__init__()
        self.softmax_type, self.num_sampled = config.softmax_type, config.num_sampled
        self.pad_token_id = config.pad_token_id
        self.adaptive = None
        if config.softmax_type == "adaptive":
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
            self.adaptive = _adaptive_softmax(config.vocab_size - 1, config.projection_size, config.adaptive_cutoffs)
        else:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, config.projection_size))
            self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(
        self, hidden_NP: Tensor, targets_N: Tensor, scale_N: Tensor | None = None, candidates: Candidates | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss that is trained, and each prediction's own for reports.

        Args:
            hidden_NP: `(N, projection_size)`.
            targets_N: `(N,)`, word ids, none of them `<PAD>`.
            scale_N: `(N,)`, the weight of each prediction in the loss, a constant; default: ones.
            candidates: of a sampled softmax in training; default: drawn for this call. Nothing else reads them.

        Returns:
            `sum(scale_N * losses_N)`, and `losses_N` `(N,)`, each target's negative log-likelihood, without gradient.
            Both in float32, or in float64 for inputs of that type.
        """
        scale_N = hidden_NP.new_ones(len(targets_N), dtype=_sum_dtype(hidden_NP)) if scale_N is None else scale_N
        if self.adaptive is not None:
            losses_N = -self._adaptive(self.adaptive, hidden_NP, targets_N - (targets_N > self.pad_token_id).long())[0]
        elif self.training and self.softmax_type == "sampled":
            return self._sampled(hidden_NP, targets_N, scale_N, candidates or self.sample())
        elif choose_path(hidden_NP)[0] == "cut_cross_entropy":
            losses_N = _cut_cross_entropy(hidden_NP, self.weight, self._bias_without_pad(PAD_LOGIT), targets_N)
        else:
            excluded_V = torch.arange(len(self.bias), device=self.bias.device) == self.pad_token_id
            competition = Competition(torch.zeros_like(excluded_V, dtype=_sum_dtype(hidden_NP)), excluded_V)
            return cross_entropy(hidden_NP, self.weight, self.bias, competition, targets_N, scale_N)
        losses_N = losses_N.to(_sum_dtype(hidden_NP))
        loss = (scale_N * losses_N).sum()
        if self.adaptive is not None:  # torch skips clusters without a target; several processes wait for all gradients
            loss = loss + 0 * sum(parameter.flatten()[0] for parameter in self.adaptive.tail.parameters())
        return loss, losses_N.detach()

    def log_probabilities(self, hidden_NP: Tensor) -> Tensor:
        """Log-probabilities `(N, V)` of all words, minus infinity at `<PAD>`, in float32 (float64 for such inputs).

        The caller gives as many rows at a time as it has room for. A sampled softmax has those of the full one.
        """
        if self.adaptive is not None:
            words_NV = self._adaptive(self.adaptive.log_prob, hidden_NP).to(_sum_dtype(hidden_NP))
            before_NV, after_NV = words_NV[:, : self.pad_token_id], words_NV[:, self.pad_token_id :]
            return torch.cat([before_NV, torch.full_like(words_NV[:, :1], -math.inf), after_NV], 1)
        bias_V = self._bias_without_pad(-math.inf)
        hidden_NP, weight_VP = _for_products(hidden_NP, self.weight)
        fast = choose_backend([], hidden_NP, weight_VP, bias_V)[0] == "inference"
        logits_NV = product(hidden_NP, weight_VP) if fast else F.linear(hidden_NP, weight_VP)
        return logits_NV.to(_sum_dtype(hidden_NP)).add_(bias_V).log_softmax(1)

    @torch.no_grad()
    def sample(self, generator: torch.Generator | None = None) -> Candidates:
        """Draws `num_sampled` words, log-uniformly over their ranks, until so many are distinct.

        Args:
            generator: of the CPU; default: torch's own. Processes that share a step need equal ones.
        """
        classes = len(self.bias) - 1 if self.softmax_type == "sampled" else 0
        if not classes:
            raise ValueError(f"`softmax_type` is {self.softmax_type!r}, which has no candidates; pass 'sampled'.")
        if self.num_sampled >= classes:
            raise ValueError(
                f"`num_sampled` is {self.num_sampled}, of a vocabulary with {classes} words to predict. Pass a smaller "
                "`num_sampled`, or softmax_type='full'."
            )
        ranks_C, tries = _draw_distinct(classes, self.num_sampled, generator)
        ids_C = ranks_C + (ranks_C >= self.pad_token_id).long()
        return Candidates(ids_C.to(self.weight.device), tries.to(self.weight.device))

    def _sampled(self, hidden_NP, targets_N, scale_N, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """A softmax over the candidates and a prediction's own target (Jean et al. 2015; Bengio and Senecal 2008).

        Subtracting the log of the expected count makes the sum over candidates an estimate of the sum over all words.
        """
        rows_R, places = torch.cat([candidates.ids_C, targets_N]).unique(return_inverse=True)
        is_candidate = places[: len(candidates.ids_C)]
        excluded_R = torch.ones_like(rows_R, dtype=torch.bool).index_fill_(0, is_candidate, False)
        ranks_R = rows_R - (rows_R > self.pad_token_id).long()
        counts_R = _log_expected_count(ranks_R, candidates.tries, len(self.bias) - 1, _sum_dtype(hidden_NP))
        weight_RP = F.embedding(rows_R, self.weight, sparse=self.sparse_gradients)
        bias_R = torch.gather(self.bias, 0, rows_R, sparse_grad=self.sparse_gradients)
        places_N = places[len(candidates.ids_C) :]
        return cross_entropy(hidden_NP, weight_RP, bias_R, Competition(-counts_R, excluded_R), places_N, scale_N)

    def _adaptive(self, function: Callable, hidden_NP: Tensor, *ranks_N: Tensor):
        # torch's module adds float32 to bfloat16 under autocast, which raises.
        with torch.autocast(hidden_NP.device.type, enabled=False):
            return function(hidden_NP.to(self.adaptive.head.weight.dtype), *ranks_N)

    def _bias_without_pad(self, logit: float) -> Tensor:
        pad = torch.tensor([self.pad_token_id], device=self.bias.device)
        return self.bias.index_fill(0, pad, logit)


def _adaptive_softmax(classes: int, width: int, cutoffs: list[int] | None) -> nn.AdaptiveLogSoftmaxWithLoss:
    """With a sixteenth and a quarter of the words as cutoffs where none are given, about those of Baevski and Auli."""
    cutoffs = cutoffs or sorted({max(1, classes // 16), max(1, classes // 4)})
    if width < 4 ** len(cutoffs):
        raise ValueError(
            f"The adaptive softmax has cutoffs {cutoffs}, and its last cluster a width of `projection_size` ({width}) "
            f"divided by {4 ** len(cutoffs)}, which is below 1. Pass fewer `adaptive_cutoffs`."
        )
    return nn.AdaptiveLogSoftmaxWithLoss(width, classes, cutoffs, div_value=4.0, head_bias=True)


def _draw_distinct(classes: int, number: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Ranks drawn with replacement until `number` are distinct: those, ascending, and the draws that it took."""
    draws = found = torch.empty(0, dtype=torch.int64)
    while len(found) < number:
        some = torch.rand(max(4 * number, len(draws)), dtype=torch.float64, generator=generator)
        ranks = (some.mul_(math.log(classes + 1)).exp_().long() - 1).clamp_(max=classes - 1)  # rounding may pass it
        draws = torch.cat([draws, ranks])
        found, places = draws.unique(return_inverse=True)
    first_draw = torch.full_like(found, len(draws)).scatter_reduce_(0, places, torch.arange(len(draws)), "amin")
    last = first_draw.kthvalue(number).values
    return found[first_draw <= last], last + 1


def _log_expected_count(ranks: Tensor, tries: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Log of the probability that a word is among the candidates after so many draws."""
    probability = torch.log1p(1 / (ranks + 1).to(dtype)) / math.log(classes + 1)
    return torch.log(-torch.expm1(tries * torch.log1p(-probability)))


def choose_path(hidden_NP: Tensor) -> tuple[str, str]:
    """Which path the full softmax takes, `"cut_cross_entropy"` or `"chunked"`, and why."""
    dtype = _product_dtype(hidden_NP)
    if forced_backend() == "reference":
        return "chunked", "forced"
    if linear_cross_entropy is None:
        return "chunked", "cut_cross_entropy is not installed"
    if hidden_NP.device.type != "cuda":
        return "chunked", f"cut_cross_entropy needs CUDA, not {hidden_NP.device}"
    if torch.compiler.is_compiling():
        return "chunked", "the model is being compiled"
    if not hidden_NP.shape[0]:
        return "chunked", "there is nothing to predict"
    if dtype not in (torch.float16, torch.bfloat16):
        return "chunked", f"cut_cross_entropy computes in half precision, not in {dtype}"
    return "cut_cross_entropy", f"CUDA, {dtype}"


def _cut_cross_entropy(hidden_NP: Tensor, weight_VP: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """Losses by Apple's kernel (Wijmans et al. 2024), which never writes a logit to memory.

    It needs CUDA: the tests run a stand-in of its signature, never the kernel. It knows no bias, so a column of ones
    carries it; the zeros behind keep the rows aligned. Unlike the chunked path it may sum the gradient of the weight in
    half precision.
    """
    dtype, zeros = _product_dtype(hidden_NP), -(hidden_NP.shape[1] + 1) % 16
    hidden = F.pad(F.pad(hidden_NP.to(dtype), (0, 1), value=1.0), (0, zeros))
    weight = F.pad(torch.cat([weight_VP.to(dtype), bias_V[:, None].to(dtype)], 1), (0, zeros))
    return linear_cross_entropy(hidden, weight, targets_N, reduction="none", filter_eps=None)  # None: no gradient cut


def cross_entropy(
    hidden_NP: Tensor, weight_RP: Tensor, bias_R: Tensor, competition: Competition, targets_N: Tensor, scale_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy over R rows in chunks of predictions: `sum(scale_N * losses_N)` and `losses_N`.

    A chunk's logits serve its losses and at once its gradients, so that nothing is computed again and `(N, R)` never
    stands in memory; the backward pass only multiplies. Targets are places among the R rows.
    """
    inputs = hidden_NP, weight_RP, bias_R
    fast = choose_backend([], *inputs)[0] in ("inference", "training") and not suits_mkl(hidden_NP, weight_RP.t())
    constants = *competition, targets_N, scale_N.detach(), fast
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _CrossEntropy.apply(*inputs, *constants)
    return _losses_and_gradients((False, False, False), *inputs, *constants)[:2]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        loss, losses_N, gradients = _losses_and_gradients(ctx.needs_input_grad[:3], *arguments)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(losses_N)
        return loss, losses_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        *gradients, unit = ctx.saved_tensors
        # Autograd casts what it gets to the dtype of the parameter.
        return *(None if kept is None else kept * (grad * unit) for kept in gradients), *(None,) * 5


def _losses_and_gradients(wanted, hidden_NP, weight_RP, bias_R, offset_R, excluded_R, targets_N, scale_N, fast):
    """The loss, `losses_N`, and the loss's gradients for hidden, weight and bias, which the fourth multiplies."""
    sums = _sum_dtype(hidden_NP)
    added_R = bias_R.to(sums) + offset_R
    competing_R = added_R.masked_fill(excluded_R, -math.inf)
    hidden_NP, weight_RP = _for_products(hidden_NP, weight_RP)
    gradients = _Gradients(wanted, hidden_NP, weight_RP, scale_N.to(sums), fast)
    losses_N, step = added_R.new_empty(len(targets_N)), max(1, CHUNK_LOGITS // len(bias_R))
    room_BR = added_R.new_empty(min(step, len(targets_N)), len(bias_R))
    for start in range(0, len(targets_N), step):
        chunk = slice(start, start + step)
        hidden_BP, targets_B1 = hidden_NP[chunk], targets_N[chunk, None]
        own_BP = hidden_BP.to(sums) * weight_RP[targets_N[chunk]].to(sums)
        own_B1 = own_BP.sum(1, keepdim=True) + added_R[targets_B1]
        logits_BR = _logits(hidden_BP, weight_RP, competing_R, fast, room_BR[: len(hidden_BP)])
        highest_B1 = logits_BR.scatter_(1, targets_B1, own_B1).amax(1, keepdim=True)
        total_B1 = logits_BR.sub_(highest_B1).exp_().sum(1, keepdim=True)
        losses_N[chunk] = (total_B1.log() + (highest_B1 - own_B1))[:, 0]
        if any(wanted):
            gradients.add(chunk, logits_BR.scatter_add_(1, targets_B1, -total_B1), total_B1)
    return (scale_N * losses_N).sum(), losses_N, gradients.kept()


class _Gradients:
    """The gradients for hidden, weight and bias, as far as wanted, summed chunk by chunk."""

    def __init__(self, wanted, hidden_NP: Tensor, weight_RP: Tensor, scale_N: Tensor, fast: bool):
        self.hidden_NP, self.weight_RP, self.fast = hidden_NP, weight_RP, fast
        # The largest scale is kept apart: one such as 1 / N would vanish in float16. Not empty, and never 0.
        self.unit = torch.cat([scale_N.abs(), scale_N.new_full((1,), 1e-30)]).amax()
        self.rates_N1 = (scale_N / self.unit)[:, None]
        sums = scale_N.dtype
        self.for_hidden_NP = torch.empty_like(hidden_NP) if wanted[0] else None
        self.for_weight_RP = torch.zeros_like(weight_RP, dtype=sums) if wanted[1] else None
        self.for_bias_R = weight_RP.new_zeros(len(weight_RP), dtype=sums) if wanted[2] else None

    def add(self, chunk: slice, errors_BR: Tensor, total_B1: Tensor):
        """Adds a chunk's, given the derivatives of its losses by its logits, each row times its total."""
        rates_B1, hidden_BP = self.rates_N1[chunk], self.hidden_NP[chunk]
        if self.for_bias_R is not None:
            self.for_bias_R.addmv_(errors_BR.t(), (rates_B1 / total_B1)[:, 0])
        if hidden_BP.dtype == errors_BR.dtype:
            rates_B1 = rates_B1 / total_B1  # spares a pass over the errors, which a cast makes anyway
        else:
            errors_BR = errors_BR.div_(total_B1).to(hidden_BP.dtype)
        if self.for_hidden_NP is not None:
            self.for_hidden_NP[chunk] = (product if self.fast else F.linear)(errors_BR, self.weight_RP.t()) * rates_B1
        if self.for_weight_RP is not None:
            self._add_for_weight(errors_BR, hidden_BP * rates_B1.to(hidden_BP.dtype))

    def _add_for_weight(self, errors_BR: Tensor, hidden_BP: Tensor):
        if self.fast:
            self.for_weight_RP.add_(weight_gradient(errors_BR, hidden_BP))
        elif self.for_weight_RP.dtype == hidden_BP.dtype:
            self.for_weight_RP.addmm_(errors_BR.t(), hidden_BP)
        else:
            self.for_weight_RP.add_(errors_BR.t() @ hidden_BP)

    def kept(self) -> tuple[Tensor | None, ...]:
        return self.for_hidden_NP, self.for_weight_RP, self.for_bias_R, self.unit


def _logits(hidden_BP: Tensor, weight_RP: Tensor, added_R: Tensor, fast: bool, room_BR: Tensor) -> Tensor:
    """In the dtype of what is added, and where `product` is not ahead in `room_BR`: new memory for each costs more."""
    if fast and hidden_BP.dtype == added_R.dtype:
        return product(hidden_BP, weight_RP, added_R)
    if hidden_BP.dtype == added_R.dtype:
        return torch.addmm(added_R, hidden_BP, weight_RP.t(), out=room_BR)
    return torch.add(hidden_BP @ weight_RP.t(), added_R, out=room_BR)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _sum_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _for_products(hidden_NP: Tensor, weight_RP: Tensor) -> tuple[Tensor, Tensor]:
    dtype = _product_dtype(hidden_NP)
    return hidden_NP.to(dtype), weight_RP.to(dtype)
