"""Products and their gradients against torch.nn.functional.linear; tanh against torch's, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from modeling_elmo.kernels import onednn, plan, products
from modeling_elmo.kernels.onednn import onednn_dtypes
from modeling_elmo.kernels.plan import make_plan
from modeling_elmo.kernels.products import Transposed, fast_linear, packed, product, tanh


@pytest.fixture(params=["oneDNN", "oneDNN on Intel", "public operators"])
def operators(request, monkeypatch):
    if request.param == "public operators":
        monkeypatch.setattr(onednn, "onednn_dtypes", frozenset)
        monkeypatch.setattr(plan, "onednn_dtypes", frozenset)
    elif not onednn_dtypes():
        pytest.skip("this build of torch has no oneDNN linear operators")
    monkeypatch.setattr(products, "FEW_PRODUCTS", 0)
    monkeypatch.setattr(products, "_is_intel", request.param == "oneDNN on Intel")
    return request.param


@pytest.mark.parametrize("rows, keep", [(0, None), (1, True), (5, False), (130, None), (1, "transposed")])
def test_product_equals_linear(operators, rows, keep):
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(24, 17)), torch.randn(24)
    inputs, other = torch.randn(rows, 17), torch.randn(rows, 24)
    with torch.no_grad():
        if keep == "transposed":
            stored = Transposed(weight.t().contiguous())
        else:
            stored = weight if keep is None else packed(weight, keep)
        expected = F.linear(inputs, weight, bias)
        assert_close(product(inputs, stored, bias), expected)
        assert_close(product(inputs, stored), F.linear(inputs, weight))
        assert_close(product(inputs, stored, bias, plus_NG=other.clone()), expected + other)
        assert_close(product(inputs, stored, plus_NG=other.clone()), F.linear(inputs, weight) + other)
        clipped = product(inputs, stored, bias, clip=0.5)
        assert_close(clipped, expected.clamp(-0.5, 0.5))
        assert not rows or (clipped.abs() == 0.5).any()
        assert clipped.is_contiguous()


def outcome(linear, inputs):
    """The output, and the gradients that are wanted."""
    wanted = [tensor for tensor in (inputs, *linear.parameters()) if tensor.requires_grad]
    for output in (fast_linear(linear, inputs), linear(inputs)):
        yield [output, *torch.autograd.grad(output.sin().sum(), wanted)]


FROZEN = [(), ("weight", "bias"), ("inputs",)]


@pytest.mark.parametrize("frozen, bias", [*((names, True) for names in FROZEN), ((), False)])
def test_gradients_equal_linear(operators, frozen, bias):
    torch.manual_seed(0)
    linear, inputs = nn.Linear(17, 24, bias=bias), torch.randn(9, 17, requires_grad="inputs" not in frozen)
    for name, parameter in linear.named_parameters():
        parameter.requires_grad_(name not in frozen)
    assert make_plan([linear], inputs).backend == "training"
    assert_close(*outcome(linear, inputs))


def test_parts_of_larger_matrices(monkeypatch):
    monkeypatch.setattr(products, "FEW_PRODUCTS", 1)
    values = torch.randn(2, 3, 12)
    for part in (values[..., :6], values[..., ::2], values[:, 0, 6:], values[:0, :, :6]):
        assert_close(*outcome(nn.Linear(6, 4), part.requires_grad_()))


def test_a_changed_linear_is_called():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    inputs, hooked = torch.randn(4, 3), nn.Linear(3, 2)
    hooked.register_forward_hook(lambda module, arguments, output: output + 1)
    for linear in (Doubled(3, 2), hooked):
        assert_close(fast_linear(linear, inputs), linear(inputs))
    with torch.autocast("cpu"):
        assert fast_linear(nn.Linear(3, 2), inputs).dtype == torch.bfloat16
    calls, linear = [], nn.Linear(3, 2)
    linear.register_full_backward_hook(lambda *_: calls.append(1))
    fast_linear(linear, inputs.requires_grad_()).sum().backward()
    assert calls == [1]


def test_tanh_is_exact_to_rounding():
    values = torch.cat([torch.linspace(-12, 12, 100_001), torch.tensor([0.0, math.inf, -math.inf, 1e-30])])
    for out in (None, torch.empty_like(values)):
        found = tanh(values, out)
        assert out is None or found is out
        assert_close(found.double(), values.double().tanh(), rtol=0, atol=2e-7)
    assert tanh(torch.tensor(math.nan)).isnan()
    assert_close(tanh(values.double()), values.double().tanh(), rtol=0, atol=0)
