"""The loops of our biRNNs against torch.nn's own, which is taken where they cannot be."""

from unittest.mock import patch

import pytest
import torch
from accelerate import cpu_offload
from bilm_models import computed_by
from head_models import on_rows
from torch import nn
from torch.testing import assert_close

from modeling_elmo.heads import recurrence
from modeling_elmo.heads.recurrence import read_both_ways
from modeling_elmo.kernels.products import product
from modeling_elmo.kernels.rnn import GRULoop

LENGTHS = [7, 1, 4, 7, 2]
REAL = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
both_kinds = pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])


def make_layer(kind, inputs=5, size=3):
    torch.manual_seed(0)
    layer = kind(inputs, size, bidirectional=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.6)
    return layer


def make_rows(inputs=5):
    """Rows with random values after their ends."""
    x = torch.randn(len(LENGTHS), max(LENGTHS), inputs, generator=torch.Generator().manual_seed(1))
    return x.masked_fill(~REAL[..., None], 50.0)


def read(layer, x, real=REAL):
    return on_rows(lambda x_ND, texts: read_both_ways(layer, x_ND, texts), x, real)


@both_kinds
@pytest.mark.parametrize("few, rows", [(0, 5), (10**9, 1), (10**9, 5)])  # products of oneDNN, or a batch of both
def test_gradients_are_those_of_torchs_own(kind, few, rows, monkeypatch):
    monkeypatch.setattr("modeling_elmo.kernels.products.FEW_PRODUCTS", few)
    monkeypatch.setattr("modeling_elmo.kernels.products._is_intel", False)
    layer, x = make_layer(kind, 40, 30), make_rows(40)[:rows].requires_grad_()
    gradients = []
    for backend in ("reference", "training"):
        with computed_by(backend), patch("modeling_elmo.kernels.lstm_cpu.product", wraps=product) as products:
            outputs = read(layer, x, REAL[:rows])
            gradients.append(torch.autograd.grad(outputs.sin().sum(), [x, *layer.parameters()]))
    assert_close(*gradients, rtol=1e-4, atol=1e-4)
    has_products = few == 0 and torch.backends.mkldnn.is_available()
    two_directions_two_ways = 4 * 7  # steps
    assert products.call_count == (two_directions_two_ways if has_products else 0)


@both_kinds
def test_torchs_own_is_taken_where_ours_cannot_be(kind, monkeypatch):
    layer, x = make_layer(kind), make_rows()
    expected = read(layer, x)
    calls = []
    monkeypatch.setattr(GRULoop, "apply", lambda *_: calls.append("ours"))
    monkeypatch.setattr(recurrence, "lstm_both_ways", lambda *_: calls.append("ours"))
    hook = layer.register_forward_hook(lambda *_: calls.append("hook"))
    assert_close(read(layer, x), expected)
    hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(read(layer, x).float(), expected, rtol=0.1, atol=0.1)
    cpu_offload(layer, execution_device=torch.device("cpu"))
    assert_close(read(layer, x), expected)
    assert calls == ["hook"]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:.*quantized tensor creation")
@both_kinds
def test_modules_that_quantizers_changed_are_called(kind):
    quantization = pytest.importorskip("torch.ao.quantization")
    model, x = nn.Sequential(make_layer(kind)), make_rows()
    quantized = quantization.quantize_dynamic(model, {nn.GRU, nn.LSTM})
    found, expected = (read(each[0], x) for each in (quantized, model))
    assert_close(found, expected, rtol=0.1, atol=0.05)
