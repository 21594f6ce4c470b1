"""The cross-entropy in triton against float64, in the interpreter on a CPU or on a card, and compiled for two cards.

triton reads `TRITON_INTERPRET` when it is imported, so the kernel runs on CPU if no device was found (`conftest.py`).
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from triton_compiler import words_printed

from modeling_elmo import ELMoConfig, elmo_backend
from modeling_elmo.kernels import softmax_cuda
from modeling_elmo.kernels.softmax_cuda import cross_entropy_in_triton
from modeling_elmo.softmax import ELMoSoftmax, cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest relative RMS error. Logits and errors are rounded to half precision, losses and sums are not.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NUMBER = 7  # of predictions


@pytest.fixture
def kernel(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("modeling_elmo.softmax.uses_softmax_kernel", lambda *_: True)
    assert torch.get_float32_matmul_precision() == "highest"


def make_inputs(dtype, rows=37, width=5):
    """Predictions, weights and a bias with gradients, and targets and scales."""
    generator = torch.Generator().manual_seed(0)
    shapes = (NUMBER, width), (rows, width), (rows,)
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs[1] *= width**-0.5
    inputs = [tensor.to(dtype).to(DEVICE) for tensor in inputs]
    targets = torch.randint(rows, (NUMBER,), generator=generator)
    targets[:2] = torch.tensor([0, rows - 1])
    scale = torch.rand(NUMBER, generator=generator).to(torch.promote_types(dtype, torch.float32))
    return [tensor.requires_grad_() for tensor in inputs], targets.to(DEVICE), scale.to(DEVICE)


def make_rows(rows, targets):
    """Excluded rows, among them some targets, and what is added to logits."""
    generator = torch.Generator().manual_seed(1)
    excluded = (torch.rand(rows, generator=generator) < 0.5).to(DEVICE)
    excluded[targets[0]] = True
    excluded[targets[1]] = False
    return excluded, torch.randn(rows, generator=generator).to(DEVICE)


def in_float64(inputs, targets, scale, excluded=None, offset=None):
    """The definition with autograd: loss, losses and all gradients of the values in `inputs`."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    hidden, weight, bias = exact
    logits = hidden @ weight.t() + bias
    if offset is not None:
        logits = logits + offset.double()
    if excluded is not None:
        is_target = F.one_hot(targets, len(weight)).bool()
        logits = logits.masked_fill(excluded & ~is_target, -math.inf)
    losses = F.cross_entropy(logits, targets, reduction="none")
    loss = (scale.double() * losses).sum()
    return loss, losses.detach(), torch.autograd.grad(loss, exact)


def relative_error(found, expected):
    found, expected = found.detach().double(), expected.detach()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows, width, chunk", [(37, 5, 1 << 25), (2, 1, 5), (130, 33, 300), (4099, 16, 20_000)])
@pytest.mark.parametrize("has_excluded", [False, True])
def test_values_and_gradients(kernel, monkeypatch, dtype, rows, width, chunk, has_excluded):
    """Odd sizes, several blocks of a row, and several chunks of predictions, of which the last is shorter."""
    monkeypatch.setattr("modeling_elmo.softmax.CHUNK_LOGITS", chunk)
    inputs, targets, scale = make_inputs(dtype, rows, width)
    excluded, offset = make_rows(rows, targets) if has_excluded else (None, None)
    loss, losses = cross_entropy(*inputs, targets, scale, excluded, offset)
    gradients = torch.autograd.grad(3 * loss, inputs)
    expected_loss, expected_losses, expected = in_float64(inputs, targets, scale, excluded, offset)
    assert loss.dtype == losses.dtype == torch.promote_types(dtype, torch.float32)
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3
    assert relative_error(loss, expected_loss) < TOLERANCE[dtype]
    assert relative_error(losses, expected_losses) < TOLERANCE[dtype]
    for found, gradient in zip(gradients, expected, strict=True):
        assert relative_error(found, 3 * gradient) < TOLERANCE[dtype]
    with torch.no_grad():
        again, losses_again = cross_entropy(*inputs, targets, scale, excluded, offset)
    torch.testing.assert_close([again, losses_again], [loss.detach(), losses], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_large_logits_of_a_row_stay_finite(kernel):
    """The highest logit of a row may come last, and be the target or another."""
    inputs, targets, scale = make_inputs(torch.float32, rows=4099, width=3)
    with torch.no_grad():
        inputs[2][-1] = 3e4
        inputs[2][0] = -3e4
    loss, losses = cross_entropy(*inputs, targets, scale)
    expected_loss, expected_losses, expected = in_float64(inputs, targets, scale)
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-6, atol=1e-6)
    for found, gradient in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        torch.testing.assert_close(found.double(), gradient, rtol=1e-5, atol=1e-5)
    assert losses.isfinite().all() and losses[0] > 5e4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_that_is_no_number_leaves_the_others(kernel, dtype):
    inputs, targets, scale = make_inputs(dtype)
    expected = cross_entropy(*inputs, targets, scale)[1]
    with torch.no_grad():
        inputs[0][3, 2] = torch.nan
    loss, losses = cross_entropy(*inputs, targets, scale)
    others = torch.arange(NUMBER) != 3
    assert losses[3].isnan() and torch.equal(losses[others], expected[others])
    (gradient,) = torch.autograd.grad(loss, inputs[:1])
    assert gradient[3].isnan().all() and gradient[others].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("target", [-100, 37, 10**6])
def test_a_target_that_is_no_row_has_no_loss(kernel, target):
    """And nothing beside the weights is read."""
    (hidden, weight, bias), targets, _ = make_inputs(torch.float32)
    targets[2] = target
    losses = hidden.new_zeros(NUMBER)
    logits = (hidden @ weight.t()).detach()
    cross_entropy_in_triton(logits, hidden, weight, bias, bias, targets, None, losses)
    others = torch.arange(NUMBER) != 2
    assert losses[2].isnan() and losses[others].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("softmax_type", ["full", "sampled", "adaptive"])
def test_a_model_with_the_newest_kernels_takes_it(softmax_type, monkeypatch):
    """On a card, where nothing else chooses it."""
    calls = []
    record = lambda *arguments: calls.append(1) or cross_entropy_in_triton(*arguments)  # noqa: E731
    monkeypatch.setattr("modeling_elmo.softmax.cross_entropy_in_triton", record)
    sizes = {"vocab_size": 60, "num_sampled": 16, "projection_size": 16, "softmax_type": softmax_type}
    config = ELMoConfig.from_preset("tiny", **sizes)
    torch.manual_seed(0)
    softmax = ELMoSoftmax(config).cuda().train()
    softmax.initialize_parameters()
    candidates = softmax.sample() if softmax_type == "sampled" else None
    hidden = torch.randn(9, 16, device="cuda", requires_grad=True)
    targets = torch.arange(4, 13)
    found = []
    for name in ("reference", "trial"):
        with elmo_backend(name):
            loss, losses = softmax(hidden, targets, candidates=candidates)
        found.append([losses, *torch.autograd.grad(loss, [hidden, *softmax.parameters()])])
        assert bool(calls) == (name == "trial")
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_rows_of_logits_are_aligned():
    """Otherwise a program would read one logit at a time."""
    for rows in (1, 16, 3127):
        room = softmax_cuda.room_for_logits(torch.ones(4, 3, dtype=torch.bfloat16), rows)
        assert room.shape == (4, rows) and room.dtype == torch.bfloat16
        assert room.stride(0) % 16 == 0 and room.stride(0) < rows + 16


def test_it_launches_on_the_device_of_the_tensors(monkeypatch):
    current, launched = [0], []
    exchanged = lambda index: (current[0], current.__setitem__(0, index))[0]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "_exchange_device", exchanged)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchanged)
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: lambda *_, **__: launched.append((*grid, *current))})
    monkeypatch.setattr(softmax_cuda, "_cross_entropy_kernel", kernel())
    monkeypatch.setattr(softmax_cuda, "triton", SimpleNamespace(next_power_of_2=int))

    class OnSecondDevice(SimpleNamespace):
        def __len__(self):
            return self.shape[0]

    tensor = OnSecondDevice(
        device=torch.device("cuda", 1), is_cuda=True, get_device=lambda: 1, shape=(5, 3), stride=lambda _: 3
    )
    assert softmax_cuda.has_softmax_kernel(tensor)
    cross_entropy_in_triton(*(tensor,) * 8)
    assert launched == [(5, 1)] and current == [0]


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from MODULE import _cross_entropy_kernel as kernel

dtypes = {"fp64": "fp64", "fp32": "fp32", "bf16": "fp32", "fp16": "fp32"}
for card in (80, 90):
    for dtype, exact in dtypes.items():
        types = dict.fromkeys(kernel.arg_names, "i32") | {"BLOCK": "constexpr", "BLOCK_P": "constexpr"}
        types |= dict.fromkeys(("logits", "hidden", "weight"), f"*{dtype}")
        types |= dict.fromkeys(("added", "competing", "rates", "losses"), f"*{exact}") | {"targets": "*i64"}
        constants = {"BLOCK": 4096, "BLOCK_P": 512}
        if dtype == "fp16":  # without gradients
            types["rates"], constants["rates"] = "constexpr", None
        source = ASTSource(kernel, types, constants)
        print(len(compile(source, target=GPUTarget("cuda", card, 32), options={"num_warps": 8}).asm["cubin"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["modeling_elmo.kernels.softmax_cuda", "generated.modeling_elmo"])
def test_it_compiles_for_two_cards(module, tmp_path):
    """Without a GPU. The interpreter takes more Python than the compiler. Triton reads the source of a kernel."""
    sizes = words_printed(COMPILE, module, tmp_path)
    assert len(sizes) == 8 and all(int(size) > 0 for size in sizes)
