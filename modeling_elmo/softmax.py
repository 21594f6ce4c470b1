"""The output layer of the language model: a softmax over words, shared by both directions.

Shape suffixes: N predictions; B predictions of one chunk; P `projection_size`; V `vocab_size`; C candidates of a
sampled softmax; R rows of the output layer in use: all V, or the candidates and the targets.
"""

import math
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .base import chosen_rows, zero_row
from .kernels.plan import forced_backend, make_plan
from .kernels.products import fast_linear, product, suits_mkl, weight_gradient
from .kernels.softmax_cuda import cross_entropy_in_triton, has_softmax_kernel, room_for_logits
from .kernels.torch_state import (
    first_derivative,
    is_unmodified,
    product_dtype,
    sees_values_only,
    to_device,
    to_device_at_once,
)

try:  # optional, only for CUDA
    from cut_cross_entropy import linear_cross_entropy
except (ImportError, RuntimeError):  # triton raises the second if it finds no driver
    linear_cross_entropy = None


CHUNK_LOGITS = 1 << 25  # logits in memory at a time: 128 MB in float32 for every vocabulary
CHUNK_PREDICTIONS = 640  # maximum predictions per chunk on CPU: the logits of a small vocabulary stay in the cache
PAD_LOGIT = -1e4  # finite for kernels, also in float16; its exponential is 0
TRIAL = "trial"  # the backend with kernels that have run on no card yet: nothing else chooses them


class Candidates(NamedTuple):
    """The words of a sampled softmax in one training step. `ELMoSoftmax.sample` draws them."""

    ids_C: Tensor  # (C,) distinct word ids, never pad_token_id; on the CPU, which draws them
    tries: Tensor  # () int64: number of draws until C were distinct


class AdaptiveTargets(NamedTuple):
    """The targets of an adaptive softmax. `ELMoSoftmax.arrange` makes them.

    Attributes:
        classes_N: the class of each prediction in the head: a frequent word, or the cluster of a rare one.
        clusters: of each cluster, the predictions `(M,)` whose targets it has, and the number of each in the cluster.
    """

    classes_N: Tensor
    clusters: list[tuple[Tensor, Tensor]]


class ELMoSoftmax(nn.Module):
    """A full, sampled or adaptive softmax (`config.softmax_type`). `<PAD>` is not a class and has no probability.

    Full and sampled softmax have the same parameters. The sampled softmax has a cheaper gradient in training, and is
    the full softmax in eval mode. The adaptive softmax (Grave et al. 2017) has the parameters of
    `torch.nn.AdaptiveLogSoftmaxWithLoss` over the words without `<PAD>`. Sampled and adaptive softmax need a vocabulary
    in descending order of frequency, as `elmo vocabulary` writes it.

    Attributes:
        sparse_gradients: whether `weight.grad` and `bias.grad` of a sampled softmax are sparse, with only the rows of
            the step, for optimizers that support it (`torch.optim.Adagrad`, `torch.optim.SparseAdam`).
    """

    sparse_gradients: bool = False
    weight: nn.Parameter  # like `bias`, `None` with an adaptive softmax
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

    def initialize_parameters(self):
        """As bilm-tf: N(0, 1 / n) with n inputs of a unit, and biases 0. `<PAD>` is 0."""
        if self.adaptive is None:
            init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
            init.zeros_(self.bias)
            zero_row(self.weight, self.pad_token_id)
            return
        for linear in self.adaptive.modules():
            if isinstance(linear, nn.Linear):
                init.normal_(linear.weight, std=linear.in_features**-0.5)
                if linear.bias is not None:
                    init.zeros_(linear.bias)

    def forward(
        self,
        hidden_NP: Tensor,
        targets_N: Tensor | AdaptiveTargets | None = None,
        scale_N: Tensor | None = None,
        candidates: Candidates | None = None,
    ) -> Any:
        """The loss for training, and the loss of each prediction for reports; or, without targets, log-probabilities.

        Both are here, because offloaded and sharded parameters can be read only inside the call of their module.

        Args:
            hidden_NP: `(N, projection_size)`.
            targets_N: `(N,)`, word ids other than `<PAD>`. A sampled or adaptive softmax waits least if they are on the
                CPU. An adaptive one also takes them as `arrange` returns them, on its device.
            scale_N: `(N,)`, the weight of each prediction in the loss, without gradient. Default: ones.
            candidates: only for a sampled softmax in training. Default: drawn at this call.

        Returns:
            `sum(scale_N * losses_N)`, and `losses_N` `(N,)`, the negative log-likelihood of each target, without
            gradient. Without targets: `(N, V)`, the log-probabilities of all words under the full softmax, minus
            infinity at `<PAD>`. All are float32, or float64 for float64 inputs.
        """
        if targets_N is None:
            return self._log_probabilities(hidden_NP)
        scale_N = hidden_NP.new_ones(len(hidden_NP), dtype=_sum_dtype(hidden_NP)) if scale_N is None else scale_N
        if isinstance(targets_N, AdaptiveTargets):
            return self._arranged_loss(hidden_NP, targets_N, scale_N)
        if self.adaptive is not None:
            return self._adaptive_loss(hidden_NP, targets_N.cpu(), scale_N)
        if self.training and self.softmax_type == "sampled":
            return self._sampled(hidden_NP, targets_N.cpu(), scale_N, candidates or self.sample())
        targets_N = to_device(targets_N, hidden_NP.device)
        if can_cut_cross_entropy(hidden_NP):
            losses_N = _cut_cross_entropy(hidden_NP, self.weight, self._bias_without_pad(PAD_LOGIT), targets_N)
            losses_N = losses_N.to(_sum_dtype(hidden_NP))
            return (scale_N * losses_N).sum(), losses_N.detach()
        excluded_V = torch.arange(len(self.bias), device=self.bias.device) == self.pad_token_id
        return cross_entropy(hidden_NP, self.weight, self.bias, targets_N, scale_N, excluded_V)

    def _log_probabilities(self, hidden_NP: Tensor) -> Tensor:
        if self.adaptive is not None:
            # torch's module adds float32 to bfloat16 under autocast, which raises.
            with torch.autocast(hidden_NP.device.type, enabled=False):
                words_NV = self.adaptive.log_prob(hidden_NP.to(self.adaptive.head.weight.dtype))
            words_NV = words_NV.to(_sum_dtype(hidden_NP))
            before_NV, after_NV = words_NV[:, : self.pad_token_id], words_NV[:, self.pad_token_id :]
            return torch.cat([before_NV, torch.full_like(words_NV[:, :1], -math.inf), after_NV], 1)
        bias_V = self._bias_without_pad(-math.inf)
        hidden_NP, weight_VP = _for_products(hidden_NP, self.weight)
        fast = make_plan([], hidden_NP, weight_VP, bias_V).backend == "inference"
        logits_NV = product(hidden_NP, weight_VP) if fast else F.linear(hidden_NP, weight_VP)
        return logits_NV.to(_sum_dtype(hidden_NP)).add_(bias_V).log_softmax(1)

    @torch.no_grad()
    def choose_rows(self, rows_V: Tensor, mean: bool):
        """Replaces the words. `rows_V` has the present id of each new word, or -1; `mean`: see `chosen_rows`.

        In an adaptive softmax only the last cluster can change, that of the rarest words.
        """
        if self.adaptive is None:
            self.weight, self.bias = (chosen_rows(table, rows_V, mean) for table in (self.weight, self.bias))
            return
        first, words = self.adaptive.cutoffs[-2], self.adaptive.tail[-1][1]  # type: ignore[index]
        ids = torch.arange(self.adaptive.n_classes + 1, device=rows_V.device)
        ranks = torch.where(ids == self.pad_token_id, -1, ids - (ids > self.pad_token_id).long())
        is_word = torch.arange(len(rows_V), device=rows_V.device) != self.pad_token_id
        kept = torch.where(rows_V < 0, -1, ranks[rows_V])[is_word]
        last = kept[first:]
        if not len(last) or not torch.equal(kept[:first], ids[:first]) or ((last >= 0) & (last < first)).any():
            raise ValueError(
                f"In an adaptive softmax only the words after the first {first + 1:,} can change. Add words at the end "
                "(`--vocabulary extend`), or load the model with softmax_type='full' (`--softmax_type full`)."
            )
        words.weight, words.out_features = chosen_rows(words.weight, (last - first).clamp(-1), mean), len(last)
        self.adaptive.n_classes = self.adaptive.cutoffs[-1] = len(kept)

    @torch.no_grad()
    def sample(self, generator: torch.Generator | None = None) -> Candidates:
        """Draws words log-uniformly over their ranks, until `num_sampled` are distinct.

        Args:
            generator: a CPU generator. Default: torch's global one. Processes that share a step need the same state.
        """
        classes = len(self.bias) - 1 if self.softmax_type == "sampled" else 0
        if not classes:
            raise ValueError(f"`softmax_type` is {self.softmax_type!r}, which has no candidates; pass 'sampled'.")
        if self.num_sampled >= classes:
            raise ValueError(
                f"`num_sampled` is {self.num_sampled}, but there are {classes} words; pass less or softmax_type='full'."
            )
        ranks_C, tries = _draw_distinct(classes, self.num_sampled, generator)
        ids_C = ranks_C + (ranks_C >= self.pad_token_id).long()
        return Candidates(ids_C, tries)

    def _sampled(self, hidden_NP, targets_N, scale_N, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """A softmax over the candidates and each prediction's target (Jean et al. 2015; Bengio and Senecal 2008).

        Subtracting the log of the expected count makes the sum over candidates an estimate of the sum over all words.
        """
        ids_C, tries = candidates.ids_C.cpu(), candidates.tries.cpu()
        rows_R, places = torch.cat([ids_C, targets_N]).unique(return_inverse=True)
        is_candidate = places[: len(ids_C)]
        excluded_R = torch.ones_like(rows_R, dtype=torch.bool).index_fill_(0, is_candidate, False)
        ranks_R = rows_R - (rows_R > self.pad_token_id).long()
        counts_R = _log_expected_count(ranks_R, tries, len(self.bias) - 1, _sum_dtype(hidden_NP))
        there = (rows_R, -counts_R, excluded_R, places[len(ids_C) :])
        rows_R, offset_R, excluded_R, places_N = (to_device(tensor, hidden_NP.device) for tensor in there)
        weight_RP = F.embedding(rows_R, self.weight, sparse=self.sparse_gradients)
        bias_R = torch.gather(self.bias, 0, rows_R, sparse_grad=self.sparse_gradients)
        return cross_entropy(hidden_NP, weight_RP, bias_R, places_N, scale_N, excluded_R, offset_R)

    def _adaptive_loss(self, hidden_NP: Tensor, targets_N: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor]:
        """`torch.nn.AdaptiveLogSoftmaxWithLoss` by `cross_entropy`."""
        layers = [self.adaptive.head, *(layer for cluster in self.adaptive.tail for layer in cluster)]
        if not getattr(self, "_is_replica", False) and not all(is_unmodified(layer, (nn.Linear,)) for layer in layers):
            return self._modified_loss(hidden_NP, self._ranks(targets_N), scale_N)
        classes_N, clusters = self.arrange(targets_N)
        tensors = [classes_N, *chain.from_iterable(clusters)]
        classes_N, *moved = to_device_at_once(tensors, hidden_NP.device)
        clusters = list(zip(moved[::2], moved[1::2], strict=True))
        return self._arranged_loss(hidden_NP, AdaptiveTargets(classes_N, clusters), scale_N)

    def _ranks(self, targets_N: Tensor) -> Tensor:
        """The numbers of words among all words but `<PAD>`."""
        return targets_N - (targets_N > self.pad_token_id).long()

    def arrange(self, targets_N: Tensor) -> AdaptiveTargets:
        """The targets `(N,)`, on the CPU, by the clusters of an adaptive softmax."""
        ranks_N, cutoffs = self._ranks(targets_N), self.adaptive.cutoffs
        clusters_N = torch.bucketize(ranks_N, ranks_N.new_tensor(cutoffs[:-1]), right=True)  # 0: none
        clusters = []
        for number in range(1, len(cutoffs)):
            rows_M = (clusters_N == number).nonzero()[:, 0]
            clusters.append((rows_M, ranks_N[rows_M] - cutoffs[number - 1]))
        return AdaptiveTargets(torch.where(clusters_N > 0, cutoffs[0] + clusters_N - 1, ranks_N), clusters)

    def _arranged_loss(self, hidden_NP: Tensor, targets: AdaptiveTargets, scale_N: Tensor) -> tuple[Tensor, Tensor]:
        """Each rare word adds a loss in its cluster to the loss of the cluster in the head."""
        head = self.adaptive.head
        loss, losses_N = cross_entropy(hidden_NP, head.weight, head.bias, targets.classes_N, scale_N)
        # An empty cluster takes part with a gradient of 0, because DistributedDataParallel waits for it.
        for (narrow, words), (rows_M, ranks_M) in zip(self.adaptive.tail, targets.clusters, strict=True):
            inner_MX = fast_linear(narrow, hidden_NP.index_select(0, rows_M))
            no_bias_R = head.bias.new_zeros(len(words.weight))
            more, more_M = cross_entropy(inner_MX, words.weight, no_bias_R, ranks_M, scale_N[rows_M])
            loss, losses_N = loss + more, losses_N.index_add(0, rows_M, more_M)
        return loss, losses_N

    def _modified_loss(self, hidden_NP: Tensor, ranks_N: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor]:
        """The same by torch's module, which calls the layers: they are wrapped, hooked or offloaded."""
        with torch.autocast(hidden_NP.device.type, enabled=False):  # as in `_log_probabilities`
            hidden_NP = hidden_NP.to(self.adaptive.head.weight.dtype)
            found = self.adaptive(hidden_NP, to_device(ranks_N, hidden_NP.device))  # type: ignore[misc]
            losses_N = -found.output.to(scale_N.dtype)
        return (scale_N * losses_N).sum(), losses_N.detach()

    def _bias_without_pad(self, logit: float) -> Tensor:
        pad = torch.tensor([self.pad_token_id], device=self.bias.device)
        return self.bias.index_fill(0, pad, logit)


def _adaptive_softmax(classes: int, width: int, cutoffs: list[int] | None) -> nn.AdaptiveLogSoftmaxWithLoss:
    """Default cutoffs are a sixteenth and a quarter of the words, close to Baevski and Auli 2019."""
    cutoffs = cutoffs or sorted({max(1, classes // 16), max(1, classes // 4)})
    if width < 4 ** len(cutoffs):
        raise ValueError(f"`adaptive_cutoffs` {cutoffs} leave the last cluster no width of {width}; pass fewer.")
    return nn.AdaptiveLogSoftmaxWithLoss(width, classes, cutoffs, div_value=4.0, head_bias=True)


def _draw_distinct(classes: int, number: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draws ranks with replacement until `number` are distinct. Returns them, ascending, and the number of draws."""
    draws = found = torch.empty(0, dtype=torch.int64, device="cpu")
    while len(found) < number:
        some = torch.rand(max(4 * number, len(draws)), dtype=torch.float64, generator=generator, device="cpu")
        ranks = (some.mul_(math.log(classes + 1)).exp_().long() - 1).clamp_(max=classes - 1)  # rounding may exceed it
        draws = torch.cat([draws, ranks])
        found, places = draws.unique(return_inverse=True)
    order = torch.arange(len(draws), device="cpu")
    first_draw = torch.full_like(found, len(draws)).scatter_reduce_(0, places, order, "amin")
    last = first_draw.kthvalue(number).values
    return found[first_draw <= last], last + 1


def _log_expected_count(ranks: Tensor, tries: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Log-probability that a word is among the candidates after `tries` draws."""
    probability = torch.log1p(1 / (ranks + 1).to(dtype)) / math.log(classes + 1)
    return torch.log(-torch.expm1(tries * torch.log1p(-probability)))


def can_cut_cross_entropy(hidden_NP: Tensor) -> bool:
    """Whether Apple's kernel computes the full softmax: it is installed, on CUDA, and computes in half precision.

    It stays until a card has compared it with ours, which writes the logits of a chunk, but computes them only once.
    """
    if linear_cross_entropy is None or hidden_NP.device.type != "cuda" or not hidden_NP.shape[0]:
        return False
    is_half = product_dtype(hidden_NP) in (torch.float16, torch.bfloat16)
    return is_half and forced_backend() not in ("reference", TRIAL) and not torch.compiler.is_compiling()


def uses_softmax_kernel(hidden_NP: Tensor, weight_RP: Tensor) -> bool:
    """Whether our kernel in triton computes a cross-entropy, of any softmax in any dtype, without float32 logits."""
    if forced_backend() != TRIAL or not has_softmax_kernel(hidden_NP):
        return False
    return sees_values_only(hidden_NP, weight_RP) and not torch.compiler.is_compiling()


def _cut_cross_entropy(hidden_NP: Tensor, weight_VP: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """Losses with Apple's kernel (Wijmans et al. 2024), which never writes logits to memory.

    It has no bias, so a column of ones adds the bias, and columns of zeros keep the rows aligned. Unlike the chunked
    path, it may sum the gradient of the weight in half precision.
    """
    dtype, zeros = product_dtype(hidden_NP), -(hidden_NP.shape[1] + 1) % 16
    hidden = F.pad(F.pad(hidden_NP.to(dtype), (0, 1), value=1.0), (0, zeros))
    weight = F.pad(torch.cat([weight_VP.to(dtype), bias_V[:, None].to(dtype)], 1), (0, zeros))
    with torch.cuda.device_of(hidden):  # triton launches on the current device
        # By default, `filter_eps` leaves out small gradients.
        return linear_cross_entropy(hidden, weight, targets_N, reduction="none", filter_eps=None)


def cross_entropy(
    hidden_NP: Tensor,
    weight_RP: Tensor,
    bias_R: Tensor,
    targets_N: Tensor,
    scale_N: Tensor,
    excluded_R: Tensor | None = None,
    offset_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy over R rows in chunks of predictions: `sum(scale_N * losses_N)` and `losses_N`.

    The forward pass uses each chunk's logits for its losses and for its gradients. So nothing is computed twice, and
    `(N, R)` logits are never in memory. The backward pass only scales the gradients.

    Args:
        targets_N: indices of the R rows.
        excluded_R: rows that take part only where they are the target. Default: none.
        offset_R: added to the logits: minus the log of the expected count of a candidate. Default: 0.
    """
    inputs = hidden_NP, weight_RP, bias_R
    is_on_cpu = make_plan([], *inputs).backend != "reference"
    fast = is_on_cpu and not suits_mkl(len(hidden_NP), weight_RP.t())
    constants = targets_N, scale_N.detach(), excluded_R, offset_R, fast
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
    @first_derivative
    def backward(ctx, grad, _):
        *gradients, unit = ctx.saved_tensors
        # Autograd casts the results to the dtype of the parameters.
        return *(None if kept is None else kept * (grad * unit) for kept in gradients), *(None,) * 5


def _losses_and_gradients(wanted, hidden_NP, weight_RP, bias_R, targets_N, scale_N, excluded_R, offset_R, fast):
    """The loss, `losses_N`, and the gradients for hidden, weight and bias, if wanted, with a factor of all three."""
    sums = _sum_dtype(hidden_NP)
    in_triton = uses_softmax_kernel(hidden_NP, weight_RP)
    added_R = bias_R.to(sums) if offset_R is None else bias_R.to(sums) + offset_R
    competing_R = added_R if excluded_R is None else added_R.masked_fill(excluded_R, -math.inf)
    # On CPU, logits in float32 cost less than logits in bfloat16 and a cast.
    exact = (hidden_NP.to(sums), weight_RP.to(sums)) if fast else None
    hidden_NP, weight_RP = _for_products(hidden_NP, weight_RP)
    wide_NP, wide_RP = exact or (hidden_NP, weight_RP)
    # The largest scale is a separate factor, because 1 / N could underflow in float16. It is never 0.
    unit = torch.cat([scale_N.to(sums).abs(), added_R.new_full((1,), 1e-30)]).amax()
    rates_N1 = (scale_N.to(sums) / unit)[:, None]
    for_hidden_NP = torch.empty_like(hidden_NP) if wanted[0] else None
    for_weight_RP = torch.zeros_like(weight_RP, dtype=sums) if wanted[1] else None
    for_bias_R = torch.zeros_like(added_R) if wanted[2] else None
    losses_N, step = added_R.new_empty(len(targets_N)), max(1, CHUNK_LOGITS // len(bias_R))
    if in_triton:
        gradients = for_hidden_NP, for_weight_RP, for_bias_R
        inputs = hidden_NP, weight_RP, added_R, competing_R, targets_N, rates_N1[:, 0]
        with torch.autocast(hidden_NP.device.type, enabled=False):
            _fill_in_triton(losses_N, gradients, *inputs, step)
        return (scale_N * losses_N).sum(), losses_N, (*gradients, unit)
    step = min(step, CHUNK_PREDICTIONS) if fast else step
    out_BR = added_R.new_empty(min(step, len(targets_N)), len(bias_R))
    with torch.autocast(hidden_NP.device.type, enabled=False):  # the dtypes are chosen
        for start in range(0, len(targets_N), step):
            chunk = slice(start, start + step)
            hidden_BP, targets_B1 = wide_NP[chunk], targets_N[chunk, None]
            own_BP = hidden_BP.to(sums) * wide_RP[targets_N[chunk]].to(sums)
            own_B1 = own_BP.sum(1, keepdim=True) + added_R[targets_B1]
            logits_BR = _logits(hidden_BP, wide_RP, competing_R, fast, out_BR[: len(hidden_BP)])
            highest_B1 = logits_BR.scatter_(1, targets_B1, own_B1).amax(1, keepdim=True)
            total_B1 = logits_BR.sub_(highest_B1).exp_().sum(1, keepdim=True)
            losses_N[chunk] = (total_B1.log() + (highest_B1 - own_B1))[:, 0]
            if not any(wanted):
                continue
            # The derivatives of the losses with respect to the logits, each row times its entry of `total_B1`.
            errors_BR, rates_B1 = logits_BR.scatter_add_(1, targets_B1, -total_B1), rates_N1[chunk]
            if for_bias_R is not None:
                for_bias_R.addmv_(errors_BR.t(), (rates_B1 / total_B1)[:, 0])
            if hidden_NP.dtype == sums:
                rates_B1 = rates_B1 / total_B1  # saves a pass over the errors, which a cast needs anyway
            else:
                errors_BR = errors_BR.div_(total_B1).to(hidden_NP.dtype)
            if for_hidden_NP is not None:
                for_hidden_NP[chunk] = (product if fast else F.linear)(errors_BR, weight_RP.t()) * rates_B1
            if for_weight_RP is not None:
                _add_outer_product(for_weight_RP, errors_BR, hidden_NP[chunk] * rates_B1.to(hidden_NP.dtype), fast)
    return (scale_N * losses_N).sum(), losses_N, (for_hidden_NP, for_weight_RP, for_bias_R, unit)


def _fill_in_triton(
    losses_N: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    hidden_NP: Tensor,
    weight_RP: Tensor,
    added_R: Tensor,
    competing_R: Tensor,
    targets_N: Tensor,
    rates_N: Tensor,
    step: int,
):
    """Writes the losses, and the gradients that are no `None`. Logits and errors have the dtype of products."""
    for_hidden_NP, for_weight_RP, for_bias_R = gradients
    is_wanted = any(gradient is not None for gradient in gradients)
    hidden_NP, weight_RP = hidden_NP.contiguous(), weight_RP.contiguous()
    room_BR = room_for_logits(hidden_NP[:step], len(weight_RP))
    for start in range(0, len(targets_N), step):
        chunk = slice(start, start + step)
        hidden_BP = hidden_NP[chunk]
        logits_BR = torch.mm(hidden_BP, weight_RP.t(), out=room_BR[: len(hidden_BP)])
        rates_B = rates_N[chunk] if is_wanted else None
        operands = hidden_BP, weight_RP, added_R, competing_R, targets_N[chunk], rates_B
        cross_entropy_in_triton(logits_BR, *operands, losses_N[chunk])
        errors_BR = logits_BR
        if for_hidden_NP is not None:
            torch.mm(errors_BR, weight_RP, out=for_hidden_NP[chunk])
        if for_weight_RP is not None:
            _add_outer_product(for_weight_RP, errors_BR, hidden_BP, fast=False)
        if for_bias_R is not None:
            for_bias_R.add_(errors_BR.sum(0, dtype=for_bias_R.dtype))  # which makes no copy in that dtype


def _add_outer_product(sum_RP: Tensor, errors_BR: Tensor, hidden_BP: Tensor, fast: bool):
    if fast:
        sum_RP.add_(weight_gradient(errors_BR, hidden_BP))
    elif sum_RP.dtype == hidden_BP.dtype:
        sum_RP.addmm_(errors_BR.t(), hidden_BP)
    else:
        sum_RP.add_(errors_BR.t() @ hidden_BP)


def _logits(hidden_BP: Tensor, weight_RP: Tensor, added_R: Tensor, fast: bool, out_BR: Tensor) -> Tensor:
    """Logits in the dtype of `added_R`. `out_BR` is their memory, which would be slow to allocate for each chunk."""
    if fast:
        return product(hidden_BP, weight_RP, added_R)
    if hidden_BP.dtype == added_R.dtype:
        return torch.addmm(added_R, hidden_BP, weight_RP.t(), out=out_BR)
    return torch.add(hidden_BP @ weight_RP.t(), added_R, out=out_BR)


def _sum_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _for_products(hidden_NP: Tensor, weight_RP: Tensor) -> tuple[Tensor, Tensor]:
    dtype = product_dtype(hidden_NP)
    return hidden_NP.to(dtype), weight_RP.to(dtype)
