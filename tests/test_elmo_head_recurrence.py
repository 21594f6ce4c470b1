"""Our biRNN kernels: gradients, backends, and when torch.nn runs instead. `test_elmo_head_layers.py` compares rows."""

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from modeling_elmo import elmo_backend, elmo_backends, elmo_head_layers
from modeling_elmo.elmo_backends import product
from modeling_elmo.elmo_head_layers import _GRU, _LSTM, read_both_ways

LENGTHS = [7, 1, 4, 7, 2]
both_kinds = pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])


def make_layer(kind, inputs=5, size=3, dtype=torch.float64):
    torch.manual_seed(0)
    layer = kind(inputs, size, bidirectional=True, batch_first=True).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.6)
    return layer


def make_rows(inputs=5, dtype=torch.float64):
    """Rows with random values after their ends."""
    x = torch.randn(len(LENGTHS), max(LENGTHS), inputs, generator=torch.Generator().manual_seed(1), dtype=dtype)
    ends = torch.tensor(LENGTHS)[:, None]
    return x.masked_fill((torch.arange(max(LENGTHS)) >= ends)[..., None], 50.0), ends


@both_kinds
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_backends_agree(kind, dtype, tolerance):
    layer, (x, ends) = make_layer(kind, 40, 30, dtype), make_rows(40, dtype)
    outputs = []
    for backend in ("reference", "training", "inference"):
        with elmo_backend(backend), torch.set_grad_enabled(backend == "training"):
            read = read_both_ways(layer, x, ends)
            outputs.append(torch.cat([read[row, :length] for row, length in enumerate(LENGTHS)]))
            assert read.dtype == dtype and read.shape == (5, 7, 60)
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=tolerance, atol=tolerance)


@both_kinds
@pytest.mark.parametrize("few", [0, 10**9], ids=["products of oneDNN", "a batch of both"])
@pytest.mark.parametrize("rows", [1, 5])
def test_gradients_are_those_of_torchs_own(kind, few, rows, monkeypatch):
    monkeypatch.setattr(elmo_backends, "FEW_PRODUCTS", few)
    monkeypatch.setattr(elmo_backends, "_is_intel", False)
    rows_of_steps = []
    monkeypatch.setattr(
        elmo_head_layers, "product", lambda x, *others: rows_of_steps.append(len(x)) or product(x, *others)
    )
    layer, (x, ends) = make_layer(kind, 40, 30, torch.float32), make_rows(40, torch.float32)
    x, ends = x[:rows], ends[:rows]
    read_BS1 = (torch.arange(7) < ends)[..., None]
    gradients = []
    for backend in ("reference", "training"):
        inputs = x.clone().requires_grad_()
        with elmo_backend(backend):
            outputs = read_both_ways(layer, inputs, ends).where(read_BS1, 0)
        gradients.append(torch.autograd.grad(outputs.sin().sum(), [inputs, *layer.parameters()]))
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    two_directions_two_ways = 4 * 7  # steps
    has_products = few == 0 and torch.backends.mkldnn.is_available()
    assert rows_of_steps == [rows] * (two_directions_two_ways if has_products else 0)


@pytest.mark.parametrize("function, gates", [(_GRU, 3), (_LSTM, 4)])
def test_gradients_are_those_of_differences(function, gates):
    torch.manual_seed(0)
    shapes = [(4, 2, 3, gates * 2), (2, gates * 2, 2), (2, gates * 2)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(function.apply, inputs)


@both_kinds
def test_torchs_own_is_taken_where_ours_cannot_be(kind, monkeypatch):
    layer, (x, ends) = make_layer(kind), make_rows()
    expected = read_both_ways(layer, x, ends)
    calls = []
    monkeypatch.setattr(_GRU, "apply", lambda *_: calls.append("ours"))
    monkeypatch.setattr(_LSTM, "apply", lambda *_: calls.append("ours"))
    hook = layer.register_forward_hook(lambda *_: calls.append("hook"))
    found = read_both_ways(layer, x, ends)
    hook.remove()
    with elmo_backend("reference"):
        same = read_both_ways(layer, x, ends)
    with torch.autocast("cpu", torch.bfloat16):
        rough = read_both_ways(layer.float(), x.float(), ends)
    assert calls == ["hook"]
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(found[row, :length], expected[row, :length])
        torch.testing.assert_close(same[row, :length], expected[row, :length])
        torch.testing.assert_close(rough[row, :length].double(), expected[row, :length], rtol=0.1, atol=0.1)


class Quantizable(nn.Module):
    """A model with a biRNN, like a head."""

    def __init__(self, kind):
        super().__init__()
        self.layer = make_layer(kind, dtype=torch.float32)

    def forward(self, x, ends):
        return read_both_ways(self.layer, x, ends)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:.*quantized tensor creation")
@both_kinds
def test_modules_that_quantizers_or_offloading_changed_are_called(kind):
    quantization = pytest.importorskip("torch.ao.quantization")
    model, (x, ends) = Quantizable(kind), make_rows(dtype=torch.float32)
    with torch.no_grad():
        expected = model(x, ends)
        quantized = quantization.quantize_dynamic(model, {nn.GRU, nn.LSTM})(x, ends)
        offloaded = cpu_offload(model, execution_device=torch.device("cpu"))(x, ends)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(quantized[row, :length], expected[row, :length], rtol=0.1, atol=0.05)
        torch.testing.assert_close(offloaded[row, :length], expected[row, :length])
