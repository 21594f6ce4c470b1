"""The three softmaxes against torch's cross-entropy, definitions in loops, and the distribution of the sampler."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from bilm_models import Largest
from head_models import fails
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_elmo import ELMoConfig, elmo_backend
from modeling_elmo.softmax import (
    ELMoSoftmax,
    _draw_distinct,
    _log_expected_count,
    _logits,
    _losses_and_gradients,
    can_cut_cross_entropy,
    uses_softmax_kernel,
)

PAD = 2  # in the middle, so that ranks and ids differ on one side only


def make_softmax(softmax_type="full", dtype=torch.float32, **options):
    options = {"vocab_size": 30, "projection_size": 16, "pad_token_id": PAD, "num_sampled": 7, **options}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "unk_token_id": 3}
    softmax = ELMoSoftmax(ELMoConfig.from_preset("tiny", softmax_type=softmax_type, **ids, **options)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in softmax.parameters():
        parameter.data.normal_(generator=generator, std=0.5)
    return softmax


def make_predictions(number=11, dtype=torch.float32, words=30, width=16):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(number, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(words - 1, (number,), generator=generator)
    targets[:1] = 0  # one before <PAD>
    scale = torch.rand(number, generator=generator, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    return hidden, targets + (targets >= PAD), scale


def expected_losses(softmax, hidden, targets):
    logits = hidden @ softmax.weight.t() + softmax.bias
    return F.cross_entropy(logits.index_fill(1, torch.tensor([PAD]), -math.inf), targets, reduction="none")


def gradients(loss, softmax, *tensors):
    return torch.autograd.grad(loss, [*tensors, *softmax.parameters()])


@pytest.fixture
def chunks(monkeypatch):
    """The shapes of all computed chunks of logits, and a function that sets their size."""
    sizes, logits = [], _logits

    def record(*arguments):
        result = logits(*arguments)
        sizes.append(tuple(result.shape))
        return result

    monkeypatch.setattr("modeling_elmo.softmax._logits", record)
    return sizes, lambda number: monkeypatch.setattr("modeling_elmo.softmax.CHUNK_LOGITS", number)


# Full


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("products, rows", [("oneDNN", 4), ("MKL", 1), ("reference", 100)])
def test_full_is_cross_entropy(chunks, monkeypatch, onednn_at_any_size, dtype, rows, products):
    sizes, set_chunk = chunks
    set_chunk(30 * rows + 5)
    monkeypatch.setattr("modeling_elmo.kernels.products._is_intel", products == "MKL")
    softmax = make_softmax(dtype=dtype)
    hidden, targets, scale = make_predictions(dtype=dtype)
    with elmo_backend("reference") if products == "reference" else nullcontext():
        loss, losses = softmax(hidden, targets, scale)
    expected = expected_losses(softmax, hidden, targets)
    assert loss.dtype == losses.dtype == dtype and not losses.requires_grad
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(loss, (scale * expected).sum())
    found = gradients(3 * loss, softmax, hidden)
    for mine, theirs in zip(found, gradients(3 * (scale * expected).sum(), softmax, hidden), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not found[1][PAD].any() and found[2][PAD] == 0
    assert sum(size[0] for size in sizes) == 11 and max(size[0] for size in sizes) == min(rows, 11)  # each once


def test_logits_of_all_predictions_never_stand_in_memory(monkeypatch):
    """The largest tensor made, and the bytes kept for the backward pass, of a call whose logits would be 2 MB."""
    monkeypatch.setattr("modeling_elmo.softmax.CHUNK_LOGITS", 10_000)
    softmax, (hidden, targets, _) = make_softmax(vocab_size=1000), make_predictions(500, words=1000)
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        softmax(hidden, targets)[0].backward()
    assert largest.numel == 16_000  # the weight; `(N, V)` would be 500,000
    assert sum(kept) <= hidden.numel() + 17_000 + 1  # only the gradients and their unit, no chunk of logits


def test_only_wanted_gradients_are_computed(monkeypatch):
    wanted, plain = [], _losses_and_gradients

    def record(*arguments):
        *found, gradients = plain(*arguments)
        wanted.append([gradient is not None for gradient in gradients[:3]])
        return *found, gradients

    monkeypatch.setattr("modeling_elmo.softmax._losses_and_gradients", record)
    softmax, (hidden, targets, scale) = make_softmax(), make_predictions()
    with torch.no_grad():
        without = softmax(hidden, targets, scale)[0]
    softmax.weight.requires_grad_(False)
    loss, _ = softmax(hidden, targets, scale)
    loss.backward()
    assert softmax.weight.grad is None and softmax.bias.grad.any() and hidden.grad.any()
    frozen, _ = softmax.requires_grad_(False)(hidden.detach(), targets, scale)
    with torch.inference_mode():
        inference, _ = softmax(hidden, targets, scale)
    assert not frozen.requires_grad and without == loss == frozen == inference
    assert wanted == [[False] * 3, [True, False, True], [False] * 3, [False] * 3]


@pytest.mark.parametrize("softmax_type", ["full", "sampled", "adaptive"])
@pytest.mark.parametrize("number", [0, 1])
def test_no_predictions_and_a_single_one(softmax_type, number):
    softmax, (hidden, targets, scale) = make_softmax(softmax_type), make_predictions(number)
    loss, losses = softmax(hidden, targets, scale)
    loss.backward()
    assert losses.shape == (number,) and hidden.grad.shape == hidden.shape
    grads = [parameter.grad for parameter in softmax.parameters()]
    # Several processes wait for all gradients, also of empty clusters; optimizers of Trainer take dense ones.
    assert all(grad is not None and not grad.is_sparse for grad in grads)
    assert number or (loss.item() == 0 and not any(grad.any() for grad in grads))
    assert softmax(hidden).shape == (number, 30)


@pytest.mark.parametrize("softmax_type", ["full", "sampled", "adaptive"])
def test_bfloat16_autocast_is_near_float32(softmax_type):
    softmax, (hidden, targets, scale) = make_softmax(softmax_type), make_predictions()
    candidates = softmax.sample() if softmax_type == "sampled" else None
    expected = softmax(hidden, targets, scale, candidates)[0]
    with torch.autocast("cpu"):
        loss, losses = softmax(hidden, targets, scale, candidates)
    assert loss.dtype == losses.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    found = list(zip(gradients(loss, softmax), gradients(expected, softmax), strict=True))
    assert not all(torch.equal(mine, theirs) for mine, theirs in found)  # so it computed in bfloat16
    for mine, theirs in found:
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_parameters_in_half_precision_sum_in_float32(chunks):
    """A scale of 1e-7 underflows in float16, and a loss scaler multiplies only in the backward pass."""
    chunks[1](30 * 4)
    for dtype in (torch.bfloat16, torch.float16):
        softmax, (hidden, targets, scale) = make_softmax(dtype=dtype), make_predictions(dtype=dtype)
        loss, losses = softmax(hidden, targets, scale * 1e-7)
        found = gradients(loss * 1e7, softmax, hidden)
        assert losses.dtype == torch.float32 and {gradient.dtype for gradient in found} == {dtype}
        exact, inputs = make_softmax(), hidden.detach().float().requires_grad_()
        exact.load_state_dict(softmax.state_dict())
        expected = gradients((scale * expected_losses(exact, inputs, targets)).sum(), exact, inputs)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.float(), theirs, rtol=2e-2, atol=2e-2)


def test_second_derivatives_are_refused():
    """The loss is the end of the graph, so that the incoming gradient is a constant."""
    softmax, (hidden, targets, scale) = make_softmax(), make_predictions()
    (gradient,) = torch.autograd.grad(softmax(hidden, targets, scale)[0], hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.square().sum().backward()


def test_log_probabilities_of_the_full_softmax():
    for softmax_type in ("full", "sampled"):
        softmax, (hidden, targets, _) = make_softmax(softmax_type).eval(), make_predictions()
        log_probs = softmax(hidden)
        assert (log_probs[:, PAD] == -math.inf).all() and log_probs.dtype == torch.float32
        torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(11))
        loss, losses = softmax(hidden, targets)
        torch.testing.assert_close(-log_probs[range(11), targets], losses)
        torch.testing.assert_close(loss, losses.sum())
        with torch.no_grad():
            torch.testing.assert_close(softmax(hidden), log_probs)
        assert log_probs.requires_grad


# Full softmax on CUDA, with a mock of the kernel


def test_the_path_of_the_full_softmax(monkeypatch):
    def possible(dtype=torch.bfloat16, rows=3, device="cuda"):
        return can_cut_cross_entropy(SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(rows, 16)))

    monkeypatch.setattr("modeling_elmo.softmax.linear_cross_entropy", None)
    assert not possible()
    monkeypatch.setattr("modeling_elmo.softmax.linear_cross_entropy", print)
    assert possible()
    assert not possible(torch.float32) and not possible(rows=0) and not possible(device="cpu")
    with elmo_backend("reference"):
        assert not possible()
    with monkeypatch.context() as trial:  # our own kernel computes
        trial.setattr("modeling_elmo.softmax.forced_backend", lambda: "trial")
        assert not possible()
    # Autocast for CUDA cannot be switched on without a device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    assert possible(torch.float32)


def test_the_kernel_is_called_as_it_can_be(monkeypatch):
    """The kernel takes no bias, aligned widths, and inputs of one dtype."""
    received = []

    def stand_in(e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="high"):
        received.append((e.shape, c.shape, e.dtype, c.dtype, reduction, filter_eps))
        return F.cross_entropy(e.float() @ c.float().t(), targets, ignore_index=ignore_index, reduction=reduction)

    monkeypatch.setattr("modeling_elmo.softmax.linear_cross_entropy", stand_in)
    monkeypatch.setattr("modeling_elmo.softmax.can_cut_cross_entropy", lambda hidden: True)
    softmax, (hidden, targets, scale) = make_softmax(), make_predictions()
    loss, losses = softmax(hidden, targets, scale)
    assert received == [((11, 32), (30, 32), torch.float32, torch.float32, "none", None)]
    expected = expected_losses(softmax, hidden, targets)
    torch.testing.assert_close(losses, expected.detach())
    theirs = gradients((scale * expected).sum(), softmax, hidden)
    for mine, other in zip(gradients(loss, softmax, hidden), theirs, strict=True):
        torch.testing.assert_close(mine, other)
    with torch.autocast("cpu"):
        softmax(hidden, targets, scale)
    assert received[1][2:4] == (torch.bfloat16, torch.bfloat16)


# The kernel of all softmaxes on CUDA, in plain PyTorch: `test_softmax_cuda.py` tests the one in triton


def plain_kernel(logits, hidden, weight, added, competing, targets, rates, losses):
    """What the kernel computes."""
    rows = torch.arange(len(targets))
    exact = logits.to(added.dtype) + competing
    exact[rows, targets] = (hidden.to(added.dtype) * weight[targets].to(added.dtype)).sum(1) + added[targets]
    losses.copy_(exact.logsumexp(1) - exact[rows, targets])
    if rates is not None:
        errors = exact.softmax(1)
        errors[rows, targets] -= 1
        logits.copy_(errors * rates[:, None])


@pytest.fixture
def in_triton(monkeypatch):
    """The dtypes and shapes of the logits that the kernel receives."""
    received = []

    def stand_in(logits, *others):
        received.append((logits.dtype, tuple(logits.shape), others[5] is not None))
        plain_kernel(logits, *others)

    monkeypatch.setattr("modeling_elmo.softmax.uses_softmax_kernel", lambda *_: True)
    monkeypatch.setattr("modeling_elmo.softmax.cross_entropy_in_triton", stand_in)
    return received


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softmax_type", ["full", "sampled", "adaptive"])
def test_the_kernel_computes_all_softmaxes(softmax_type, dtype, in_triton, monkeypatch):
    softmax, (hidden, targets, scale) = make_softmax(softmax_type, dtype), make_predictions(dtype=dtype)
    candidates = softmax.sample(torch.Generator().manual_seed(0)) if softmax_type == "sampled" else None
    monkeypatch.setattr("modeling_elmo.softmax.CHUNK_LOGITS", 100)
    loss, losses = softmax(hidden, targets, scale, candidates)
    found = gradients(3 * loss, softmax, hidden)
    assert {kind for kind, *_ in in_triton} == {dtype} and all(keeps for *_, keeps in in_triton)
    assert sum(rows for _, (rows, columns), _ in in_triton if columns == in_triton[0][1][1]) == 11
    exact = make_softmax(softmax_type, torch.float64)
    exact.load_state_dict(softmax.state_dict())
    inputs = hidden.detach().double().requires_grad_()
    with monkeypatch.context() as without:
        without.setattr("modeling_elmo.softmax.uses_softmax_kernel", lambda *_: False)
        expected_loss, expected = exact(inputs, targets, scale.double(), candidates)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(found, gradients(3 * expected_loss, exact, inputs), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        assert torch.equal(softmax(hidden, targets, scale, candidates)[1], losses)
    assert not in_triton[-1][-1]


def test_the_kernel_needs_no_logits_in_float32(in_triton):
    class Exact(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                Exact.numel = max(Exact.numel, result.numel())
            return result

    softmax, (hidden, targets, scale) = make_softmax(vocab_size=1000), make_predictions(500, words=1000)
    with pytest.MonkeyPatch.context() as patched, torch.autocast("cpu", torch.bfloat16):
        patched.setattr("modeling_elmo.softmax.cross_entropy_in_triton", lambda *arguments: arguments[-1].zero_())
        with Exact():
            softmax(hidden, targets, scale)[0].backward()
    assert Exact.numel == 16_000  # the weight; the logits are 500,000


def test_who_chooses_the_kernel(monkeypatch):
    forced = []
    monkeypatch.setattr("modeling_elmo.softmax.forced_backend", lambda: forced[-1])
    monkeypatch.setattr("modeling_elmo.softmax.has_softmax_kernel", lambda hidden: hidden.shape[0] == 2)
    hidden, weight = torch.ones(2, 3), torch.ones(4, 3)
    for backend, expected in (("trial", True), (None, False), ("reference", False), ("int8", False)):
        forced.append(backend)
        assert uses_softmax_kernel(hidden, weight) == expected
    forced.append("trial")
    assert not uses_softmax_kernel(torch.ones(1, 3), weight)  # triton is missing, or the device is no card
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not uses_softmax_kernel(hidden, weight)


# Sampled


def plain_sampled_losses(softmax, hidden, targets, candidates):
    """The definition for each prediction: the target and all candidates but the target."""
    words, losses = len(softmax.bias), []

    def corrected(vector, word):
        rank = word - (word > PAD)
        expected = 1 - (1 - math.log((rank + 2) / (rank + 1)) / math.log(words)) ** int(candidates.tries)
        return vector @ softmax.weight[word] + softmax.bias[word] - math.log(expected)

    for vector, target in zip(hidden, targets.tolist(), strict=True):
        others = [corrected(vector, word) for word in candidates.ids_C.tolist() if word != target]
        own = corrected(vector, target)
        losses.append(torch.logsumexp(torch.stack([own, *others]), 0) - own)
    return torch.stack(losses)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rows", [2, 100])
def test_sampled_is_its_definition(chunks, sparse, rows):
    chunks[1](20 * rows)
    softmax = make_softmax("sampled", torch.float64)
    softmax.sparse_gradients = sparse
    hidden, targets, scale = make_predictions(dtype=torch.float64)
    candidates = softmax.sample(torch.Generator().manual_seed(0))
    drawn = {*candidates.ids_C.tolist()}
    assert drawn & {*targets.tolist()} and {*targets.tolist()} - drawn
    loss, losses = softmax(hidden, targets, scale, candidates)
    expected = plain_sampled_losses(softmax, hidden, targets, candidates)
    torch.testing.assert_close(losses, expected.detach())
    found = gradients(loss, softmax, hidden)
    theirs = gradients((scale * expected).sum(), softmax, hidden)
    for mine, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(mine.to_dense(), other)
    used = sorted({*candidates.ids_C.tolist(), *targets.tolist()})
    for gradient in found[1:]:
        assert gradient.is_sparse == sparse
        assert gradient.to_dense().view(30, -1).any(1).nonzero()[:, 0].tolist() == used
        assert not sparse or gradient.coalesce().indices().tolist() == [used]


def test_sampled_is_for_training_only():
    softmax, (hidden, targets, scale) = make_softmax("sampled"), make_predictions()
    full = make_softmax()
    full.load_state_dict(softmax.state_dict())  # one checkpoint for both
    expected = full(hidden, targets, scale)[0]
    drawn = [softmax(hidden, targets, scale)[0] for _ in range(2)]
    assert drawn[0] != drawn[1] != expected  # other candidates for each call
    assert softmax.eval()(hidden, targets, scale)[0] == expected


def test_candidates_are_distinct_words():
    for number in (1, 28):
        for _ in range(30):
            ids, tries = make_softmax("sampled", num_sampled=number).sample()
            assert len(set(ids.tolist())) == number <= tries and PAD not in ids and 0 <= ids.min() <= ids.max() < 30


def test_tries_and_inclusion():
    """Against draws one by one, and against the probability of a word given the number of draws."""
    for seed in range(20):
        ranks, tries = _draw_distinct(50, 20, torch.Generator().manual_seed(seed))
        uniform = torch.rand(80, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        draws = (51**uniform).long() - 1
        assert draws[:tries].unique().tolist() == ranks.tolist()
        assert len(draws[: tries - 1].unique()) == 19
    generator, sums, expected = torch.Generator().manual_seed(0), torch.zeros(50), torch.zeros(50).double()
    for _ in range(2000):
        ranks, tries = _draw_distinct(50, 20, generator)
        sums[ranks] += 1 / 2000
        expected += _log_expected_count(torch.arange(50), tries, 50, torch.float64).exp() / 2000
    # The number of tries depends on the draws, so both agree only roughly; 2000 draws have an error of 0.011.
    torch.testing.assert_close(sums.double(), expected, atol=0.03, rtol=0)
    assert expected.sum() == pytest.approx(20, rel=0.03)


def test_expected_counts_are_exact_for_rare_words():
    ranks, tries = torch.tensor([0, 9, 793_469]), torch.tensor(16_000)
    found = _log_expected_count(ranks, tries, 793_470, torch.float32)
    probabilities = [math.log1p(1 / (rank + 1)) / math.log(793_471) for rank in ranks.tolist()]
    expected = [math.log(-math.expm1(16_000 * math.log1p(-p))) for p in probabilities]
    torch.testing.assert_close(found, torch.tensor(expected))


# Adaptive


@pytest.mark.parametrize("cutoffs", [None, [3], [2, 9]])
def test_adaptive(cutoffs):
    assert make_softmax("adaptive", vocab_size=4).adaptive.cutoffs == [1, 3]  # the smallest one
    softmax, (hidden, targets, scale) = make_softmax("adaptive", adaptive_cutoffs=cutoffs), make_predictions()
    assert softmax.adaptive.cutoffs == [*(cutoffs or [1, 7]), 29] and softmax.weight is None and softmax.bias is None
    log_probs = softmax(hidden)
    assert log_probs.shape == (11, 30) and (log_probs[:, PAD] == -math.inf).all()
    loss, losses = softmax(hidden, targets, scale)
    torch.testing.assert_close(losses, -log_probs[range(11), targets].detach())
    assert not losses.requires_grad
    expected = gradients(-(scale * log_probs[range(11), targets]).sum(), softmax, hidden)
    for mine, theirs in zip(gradients(loss, softmax, hidden), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_errors_say_what_to_pass():
    message = "`num_sampled` is 29, but there are 29 words"
    fails(message, make_softmax("sampled", num_sampled=29).sample)
    fails("`softmax_type` is 'adaptive', which has no candidates; pass 'sampled'", make_softmax("adaptive").sample)
    message = r"`adaptive_cutoffs` \[1, 2, 3\] .*no width of 16; pass fewer"
    fails(message, make_softmax, "adaptive", adaptive_cutoffs=[1, 2, 3])


def test_wrapped_layers_of_an_adaptive_softmax_are_called():
    softmax, (hidden, targets, scale) = make_softmax("adaptive", adaptive_cutoffs=[9]), make_predictions()
    loss, losses = softmax(hidden, targets, scale)
    expected, seen = gradients(loss, softmax, hidden), []
    softmax.adaptive.head.register_forward_hook(lambda *_: seen.append(1))
    found, found_losses = softmax(hidden, targets, scale)
    torch.testing.assert_close(found_losses, losses)
    for mine, theirs in zip(gradients(found, softmax, hidden), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert seen and not found_losses.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(softmax(hidden, targets, scale)[0], loss)
