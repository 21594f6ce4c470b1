"""The interleaved highway LSTM against a plain loop over words, and its fast path against the reference."""

import math

import pytest
import torch
from bilm_models import computed_by, seeded
from head_models import on_rows
from torch import nn
from torch.testing import assert_close

from modeling_elmo.heads.interleaved import InterleavedLSTM, fast_highway, reference_highway
from modeling_elmo.kernels.plan import make_plan

# Odd lengths, left padding, gaps, no token, one token.
MASK = torch.tensor(
    [[1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0, 1], [0] * 7, [0, 0, 0, 1, 0, 0, 0], [1] * 7]
).bool()
SIZES = [5, 4, 4, 2, 1]  # sequences at each step of packed tokens
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}


def make_network(inputs=5, size=3, layers=4, dtype=torch.float64, dropout=0.0):
    torch.manual_seed(0)
    network = InterleavedLSTM(inputs, size, layers, dropout).to(dtype)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.6)
    return network


def make_rows(inputs=5, dtype=torch.float64):
    """Random words, NaN at padding."""
    x = torch.randn(*MASK.shape, inputs, generator=seeded(1), dtype=dtype)
    return x.masked_fill(~MASK[..., None], math.nan).requires_grad_()


def plain_highway(layer, words, kept=None):
    """One layer over the words of one row, in the order of reading; every gate by its formula."""
    w, u, b = (
        part.chunk(5) for part in (layer.input_linear.weight, layer.state_linear.weight, layer.input_linear.bias)
    )
    hidden = cell = torch.zeros_like(b[0])
    states = []
    for word in words:
        i, f, g, o, t = (w[k] @ word + u[k] @ hidden + b[k] for k in range(5))
        cell = torch.sigmoid(i) * torch.tanh(g) + torch.sigmoid(f) * cell
        share = torch.sigmoid(t)
        hidden = share * torch.sigmoid(o) * torch.tanh(cell) + (1 - share) * (layer.highway_linear.weight @ word)
        hidden = hidden if kept is None else kept * hidden
        states.append(hidden)
    return states


def plain_interleaved(network, x, mask):
    """The first layer reads forward, the second backward, and so on."""
    rows = []
    for row, real in zip(x, mask, strict=True):
        words = [word for word, is_real in zip(row, real, strict=True) if is_real]
        for depth, layer in enumerate(network.layers):
            turn = -1 if depth % 2 else 1
            words = plain_highway(layer, words[::turn])[::turn]
        read = iter(words)
        zeros = torch.zeros(network.output_size, dtype=x.dtype)
        rows.append(torch.stack([next(read) if is_real else zeros for is_real in real]))
    return torch.stack(rows)


def with_gradients(output, *inputs):
    """The output, and the gradients of a sum with different weights."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("backend", ["reference", "training"])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_equals_a_plain_loop_over_words(layers, backend):
    network, x = make_network(layers=layers), make_rows()
    inputs = [x, *network.parameters()]
    expected = with_gradients(plain_interleaved(network, x, MASK), *inputs)
    with computed_by(backend):
        found = with_gradients(on_rows(network, x, MASK), *inputs)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not found[0][~MASK].any() and found[0].shape == (6, 7, 3)
    assert not found[1][~MASK].any()  # padding, here NaN, is never read


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_fast_path_equals_the_reference(dtype, dropout):
    layer = make_network(41, 30, 1, dtype).layers[0]
    generator = seeded(2)
    inputs_ND = torch.randn(sum(SIZES), 41, generator=generator, dtype=dtype, requires_grad=True)
    kept_SH = ((torch.rand(5, 30, generator=generator) < 0.9) / 0.9).to(dtype) if dropout else None
    inputs = [inputs_ND, *layer.parameters()]
    expected = with_gradients(reference_highway(layer, inputs_ND, SIZES, kept_SH), *inputs)
    found = with_gradients(fast_highway(layer, inputs_ND, SIZES, kept_SH), *inputs)
    assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert {tensor.dtype for tensor in found} == {dtype}
    with torch.no_grad():
        assert_close(fast_highway(layer, inputs_ND, SIZES, kept_SH), found[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("path", [reference_highway, fast_highway])
def test_the_mask_drops_the_state_of_each_step(path):
    layer = make_network(5, 30, 1).layers[0]
    words = torch.randn(3, 5, generator=seeded(), dtype=torch.float64)
    kept = ((torch.rand(30, generator=seeded(1)) < 0.5) / 0.5).double()
    found = path(layer, words, [1, 1, 1], kept[None])
    assert_close(found, torch.stack(plain_highway(layer, list(words), kept)), rtol=1e-12, atol=1e-12)
    assert torch.equal(found == 0, (kept == 0).expand(3, 30)) and 5 < (kept == 0).sum() < 25


def test_dropout_only_in_training_and_the_same_at_all_steps():
    network, x = make_network(5, 40, 1, dropout=0.5), make_rows()
    assert_close(on_rows(network.eval(), x, MASK), on_rows(network, x, MASK))
    dropped = on_rows(network.train(), x, MASK) == 0
    for row, real in zip(dropped, MASK, strict=True):
        assert (row[real] == row[real][:1]).all()  # the same units at all words
    assert 0.3 < dropped[MASK].double().mean() < 0.7 and not torch.equal(dropped[0, 0], dropped[5, 0])


def test_under_autocast_products_are_in_bfloat16():
    network, x = make_network(40, 30, 3, torch.float32), make_rows(40, torch.float32)
    network.initialize_parameters()
    expected = with_gradients(on_rows(network, x, MASK), x, *network.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        for backend in ("reference", make_plan([], x).backend):
            with computed_by(backend):
                found = with_gradients(on_rows(network, x, MASK), x, *network.parameters())
            for one, other in zip(found, expected, strict=True):
                assert one.dtype == torch.float32
                scale = other.abs().max()
                assert_close(one / scale, other / scale, rtol=0, atol=0.03)
            assert not torch.equal(found[0], expected[0])


@pytest.mark.parametrize("name", ["input_linear", "state_linear", "highway_linear"])
def test_wrapped_and_hooked_linear_layers_are_called(name):
    network, x = make_network(layers=1), make_rows()
    layer, calls = network.layers[0], []
    expected = on_rows(network, x, MASK)
    linear = getattr(layer, name)
    linear.register_forward_hook(lambda *_: calls.append(name))
    assert_close(on_rows(network, x, MASK), expected, rtol=1e-12, atol=1e-12)
    wrapped = nn.Sequential(linear)
    wrapped.in_features = linear.in_features
    setattr(layer, name, wrapped)
    assert_close(on_rows(network, x, MASK), expected, rtol=1e-12, atol=1e-12)
    assert len(calls) == 2 * (7 if name == "state_linear" else 1)


def test_parameters_start_orthonormal_and_loaded_ones_stay():
    network = InterleavedLSTM(8, 6, 2)
    loaded = network.layers[1].state_linear.weight
    nn.init.constant_(loaded, 3.0)
    loaded._is_hf_initialized = True
    network.initialize_parameters()
    assert (loaded == 3).all()
    first = network.layers[0]
    for matrix, blocks in ((first.input_linear, 5), (first.state_linear, 5), (first.highway_linear, 1)):
        for block in matrix.weight.chunk(blocks):
            assert_close(block @ block.T, torch.eye(6), rtol=0, atol=1e-5)
    distinct = {tuple(block.flatten().tolist()) for block in first.state_linear.weight.chunk(5)}
    assert len(distinct) == 5
    for layer in network.layers:
        assert [block.unique().tolist() for block in layer.input_linear.bias.chunk(5)] == [[0], [1], [0], [0], [0]]
