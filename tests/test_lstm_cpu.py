"""The recurrent kernel against torch.nn.LSTM (clips off) and a plain float64 loop (clips on)."""

from unittest.mock import patch

import pytest
import torch
from bilm_models import LSTM_LENGTHS, computed_by, make_config, make_lstm, make_sequences, run_lstm
from numpy.testing import assert_allclose
from plain_elmo import PlainELMo
from torch import nn
from torch.testing import assert_close

from modeling_elmo import elmo_backend
from modeling_elmo.inputs import pack
from modeling_elmo.kernels import lstm_cpu, onednn, plan
from modeling_elmo.kernels.products import _remembered, product
from modeling_elmo.kernels.sequences import Stream

pytestmark = pytest.mark.usefixtures("onednn_at_any_size")


def in_torchs_order(gates):
    """Gates in the order of torch.nn.LSTM: i, f, g, o."""
    i, f, o, g = gates.detach().chunk(4)
    return torch.cat([i, f, g, o])


def torch_lstm(lstm, config):
    """torch.nn.LSTM with the same weights."""
    proj_size = config.projection_size if config.has_projection else 0
    sizes = config.projection_size, config.lstm_hidden_size, config.num_hidden_layers
    other = nn.LSTM(*sizes, batch_first=True, proj_size=proj_size).to(next(lstm.parameters()).dtype)
    for depth, layer in enumerate(lstm.layers):
        i, f, o, g = layer.input_linear.bias.chunk(4)
        bias = torch.cat([i, f + config.forget_bias, o, g])
        getattr(other, f"weight_ih_l{depth}").data = in_torchs_order(layer.input_linear.weight)
        getattr(other, f"weight_hh_l{depth}").data = in_torchs_order(layer.state_linear.weight)
        getattr(other, f"bias_ih_l{depth}").data = in_torchs_order(bias)
        getattr(other, f"bias_hh_l{depth}").data.zero_()
        if config.has_projection:
            getattr(other, f"weight_hr_l{depth}").data = layer.projection.weight.detach().clone()
    return other


@pytest.mark.parametrize("backend", ["reference", "training"])
@pytest.mark.parametrize("inner, outer, forget_bias", [(21, 7, 1.0), (7, 7, 0.0), (64, 33, 0.5)])
def test_unclipped_equals_torch_lstm(inner, outer, forget_bias, backend):
    config = make_config(
        lstm_hidden_size=inner,
        projection_size=outer,
        cell_clip=None,
        projection_clip=None,
        forget_bias=forget_bias,
        use_skip_connections=False,
    )
    lstm = make_lstm(config, dtype=torch.float64)
    other = torch_lstm(lstm, config)
    tokens, mask, hidden, cell = make_sequences(config, torch.float64)
    ours, theirs = ([t.clone().requires_grad_() for t in (tokens, hidden, cell)] for _ in range(2))

    with computed_by(backend):
        outputs, final_hidden, final_cell = run_lstm(lstm, ours[0], mask, *ours[1:])
    packed = nn.utils.rnn.pack_padded_sequence(theirs[0], torch.tensor(LSTM_LENGTHS), True, enforce_sorted=False)
    packed, (their_hidden, their_cell) = other(packed, tuple(theirs[1:]))
    their_outputs, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)

    assert_close([outputs[-1], final_hidden, final_cell], [their_outputs, their_hidden, their_cell])
    for out, h, c in ((outputs[-1], final_hidden, final_cell), (their_outputs, their_hidden, their_cell)):
        (out.sin().sum() + h.cos().sum() + c.square().sum()).backward()
    assert_close([tensor.grad for tensor in ours], [tensor.grad for tensor in theirs])
    for depth, layer in enumerate(lstm.layers):
        mine = layer.state_linear.weight, layer.input_linear.weight, layer.input_linear.bias
        yours = [getattr(other, f"{name}_l{depth}").grad for name in ("weight_hh", "weight_ih", "bias_ih")]
        assert_close([in_torchs_order(parameter.grad) for parameter in mine], yours)
        if config.has_projection:
            assert_close(layer.projection.weight.grad, getattr(other, f"weight_hr_l{depth}").grad)


@pytest.mark.parametrize("backend", ["reference", "inference", "inference without oneDNN", "training"])
@pytest.mark.parametrize(
    "options, order",
    [
        ({"cell_clip": 0.7, "projection_clip": None}, "backward_N"),
        ({"cell_clip": None, "projection_clip": 0.5, "use_skip_connections": False}, "forward_N"),
        ({"cell_clip": 0.7, "projection_clip": 0.5, "lstm_hidden_size": 7}, "backward_N"),
        ({"num_hidden_layers": 3, "cell_clip": 0.7, "forget_bias": 0.3, "lstm_hidden_size": 130}, "forward_N"),
    ],
)
def test_clipped_equals_plain_float64(backend, order, options, monkeypatch):
    if backend == "inference without oneDNN":
        monkeypatch.setattr(onednn, "onednn_dtypes", frozenset)
        monkeypatch.setattr(plan, "onednn_dtypes", frozenset)
    monkeypatch.setattr(lstm_cpu, "CHUNK_ROWS", 7)  # several chunks of steps
    config = make_config(**options)
    lstm = make_lstm(config)
    tokens, mask, hidden, cell = make_sequences(config)
    with torch.no_grad(), computed_by(backend.split()[0]):
        outputs, final_hidden, final_cell = run_lstm(lstm, tokens, mask, hidden, cell, order)

    name = order.removesuffix("_N")
    plain = PlainELMo({f"{name}_lstm.{key}": value for key, value in lstm.state_dict().items()}, config)
    for row, length in enumerate(LSTM_LENGTHS):
        states = [(hidden[i, row].double().numpy(), cell[i, row].double().numpy()) for i in range(len(lstm.layers))]
        sequence = tokens[row, :length].double().numpy()
        sequence = sequence[::-1] if order == "backward_N" else sequence
        expected = plain.direction(name, sequence, states)
        for output, layer in zip(outputs, expected, strict=True):
            layer = layer[::-1] if order == "backward_N" else layer
            assert_allclose(output[row, :length].numpy(), layer, atol=2e-6, rtol=1e-5)
        for depth, (h, c) in enumerate(states):
            assert_allclose(final_hidden[depth, row].numpy(), h, atol=2e-6, rtol=1e-5)
            assert_allclose(final_cell[depth, row].numpy(), c, atol=2e-6, rtol=1e-5)
    if config.cell_clip == 0.7:  # some values reach the bound
        assert (final_cell.abs() == 0.7).float().mean() > 0.1


def gradients(lstm, config, backend, order, device="cpu", dtype=torch.float64):
    """Outputs, and gradients of inputs, states and weights for a loss that depends on all outputs."""
    tokens, mask, *states = (tensor.to(device) for tensor in make_sequences(config, dtype))
    inputs = [tensor.requires_grad_() for tensor in (tokens, *states)]
    lstm.zero_grad()
    with computed_by(backend):
        outputs, final_hidden, final_cell = run_lstm(lstm, inputs[0], mask, *inputs[1:], order)
    sum(value.sin().sum() for value in (*outputs, final_hidden, final_cell)).backward()
    return [*outputs, final_hidden, final_cell, *(value.grad for value in (*inputs, *lstm.parameters()))]


OPTIONS = [{}, {"lstm_hidden_size": 7}, {"cell_clip": None}, {"projection_clip": None}]


on_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("backend", ["training", "fused"])
@pytest.mark.parametrize("options, order", [*zip(OPTIONS, ["forward_N", "backward_N"] * 2, strict=True)])
def test_hand_written_gradients_equal_autograd(options, order, backend, device):
    config = make_config(**{"cell_clip": 0.7, "projection_clip": 0.5, "num_hidden_layers": 3, **options})
    lstm = make_lstm(config, dtype=torch.float64).to(device)
    found, expected = (gradients(lstm, config, name, order, device) for name in (backend, "reference"))
    assert_close(found, expected)


def second_derivatives(lstm, config, loss):
    """A product of the second derivatives with a vector, and the same from differences of gradients."""
    batch = [tensor.double() for tensor in make_sequences(config, torch.float64)]
    tokens, mask = batch[0], batch[1].bool()
    vector = torch.linspace(-1, 1, tokens.numel(), dtype=torch.float64).view_as(tokens)

    def gradient(tokens, **options):
        tokens = tokens.clone().requires_grad_()
        output = loss(run_lstm(lstm, tokens, mask, *batch[2:])[0][-1])
        return tokens, torch.autograd.grad(output, tokens, **options)[0]

    tokens, found = gradient(tokens, create_graph=True)
    (found,) = torch.autograd.grad((found * vector).sum(), tokens)
    above, below = (gradient(tokens.detach() + sign * 1e-5 * vector)[1] for sign in (1, -1))
    return found, (above - below) / 2e-5


@pytest.mark.parametrize("loss", [torch.sum, lambda output: output.square().sum()], ids=["linear", "square"])
def test_second_derivatives_are_exact_or_refused(loss):
    """The gradient of a linear loss does not depend on the output: torch's own check takes it for a constant."""
    config = make_config(lstm_hidden_size=5, projection_size=3, cell_clip=None, projection_clip=None)
    lstm = make_lstm(config, dtype=torch.float64)
    with elmo_backend("reference"):
        found, expected = second_derivatives(lstm, config, loss)
    assert expected.abs().max() > 0.01
    assert_close(found, expected, rtol=1e-6, atol=1e-8)
    for backend in ("training", "fused"):
        with computed_by(backend), pytest.raises(RuntimeError, match=r"no second derivative.*elmo_backend"):
            second_derivatives(lstm, config, loss)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here")
@pytest.mark.parametrize("order", ["forward_N", "backward_N"])
def test_training_under_autocast_is_near_float64(order):
    """Products in bfloat16, cells in float32: as near as the definition under autocast, in values and gradients."""
    config = make_config(lstm_hidden_size=64, projection_size=16, cell_clip=0.7, projection_clip=0.5)
    exact = gradients(make_lstm(config, dtype=torch.float64), config, "reference", order)
    errors = {}
    for backend in ("training", "reference"):
        lstm = make_lstm(config)
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(lstm, config, backend, order, dtype=torch.float32)
        assert (found[2].dtype, found[3].dtype) == (torch.bfloat16, torch.float32)  # final hidden state, final cell
        assert {parameter.grad.dtype for parameter in lstm.parameters()} == {torch.float32}
        pairs = list(zip(found, exact, strict=True))
        errors[backend] = [float((one - two).detach().norm() / two.detach().norm()) for one, two in pairs]
    assert max(errors["reference"]) < 0.1  # where a value is near its bound, one of them has no gradient
    for kernel, definition in zip(errors["training"], errors["reference"], strict=True):
        assert kernel < 1.5 * definition + 1e-3


@pytest.mark.parametrize("most", [1024, 3])
def test_the_gates_of_a_repeated_word_are_computed_once(most, monkeypatch):
    config = make_config()
    lstm, (_, mask, hidden, cell) = make_lstm(config), make_sequences(config)
    words, packing = torch.randn(4, config.projection_size), pack(mask)
    index = torch.randint(0, 4, (int(mask.sum()),))[packing.backward_N]
    stream = Stream(words, packing.steps, index)
    given = stream, hidden[:, packing.rows_S], cell[:, packing.rows_S]
    monkeypatch.setattr(lstm_cpu, "MOST_WORDS", most)
    with (
        torch.no_grad(),
        computed_by("inference"),
        patch("modeling_elmo.kernels.lstm_cpu.product", wraps=product) as products,
    ):
        found = lstm(*given)
    with torch.no_grad(), elmo_backend("reference"):
        assert_close(found, lstm(*given), atol=2e-6, rtol=1e-5)
    assert len(products.call_args_list[0].args[0]) == (4 if most == 1024 else len(index))


def test_a_hooked_linear_is_called():
    config = make_config()
    lstm, batch = make_lstm(config), make_sequences(config)
    before, *_ = run_lstm(lstm, *batch)
    lstm.layers[0].projection.register_forward_hook(lambda layer, arguments, output: 2 * output)
    after, *_ = run_lstm(lstm, *batch)
    assert (before[0] - after[0]).abs().max() > 0.1


CHANGES = {
    "in place": lambda mine, new: mine.copy_(new),
    "data": lambda mine, new: setattr(mine, "data", new.data.clone()),
    "data in place": lambda mine, new: mine.data.copy_(new.data),
    "all but a row": lambda mine, new: mine.data[1:].copy_(new.data[1:]),
    "all but a column": lambda mine, new: mine.data[..., 1:].copy_(new.data[..., 1:]),
    "dtype": lambda mine, new: setattr(mine, "data", new.data.bfloat16().float()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_packed_weights_follow_the_parameters(change):
    config = make_config(lstm_hidden_size=64, projection_size=16)
    lstm, new, batch = make_lstm(config), make_lstm(config, seed=5), make_sequences(config)
    with torch.no_grad():
        before, *_ = run_lstm(lstm, *batch)
        for mine, other in zip(lstm.parameters(), new.parameters(), strict=True):
            CHANGES[change](mine, other)
        outputs, *_ = run_lstm(lstm, *batch)
        with elmo_backend("reference"):
            expected, *_ = run_lstm(lstm, *batch)
    assert_close(outputs[-1], expected[-1], atol=1e-5, rtol=1e-5)
    assert (outputs[-1] - before[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("backend", ["training", "fused"])
def test_weights_that_were_assigned_again_have_their_place(backend):
    """`torch.nn.utils.prune.remove` and others assign a weight, which is then the last parameter of its module."""
    config = make_config()
    lstm = make_lstm(config, dtype=torch.float64)
    linear = lstm.layers[0].input_linear
    weight = linear.weight
    del linear.weight
    linear.weight = torch.nn.Parameter(weight.detach().clone())
    assert [name for name, _ in linear.named_parameters()] == ["bias", "weight"]
    found, expected = (gradients(lstm, config, name, "forward_N") for name in (backend, "reference"))
    assert_close(found, expected)


def test_packed_weights_die_with_their_parameters():
    config = make_config()
    before = len(_remembered)
    lstm = make_lstm(config)
    with torch.no_grad():
        run_lstm(lstm, *make_sequences(config))
    assert len(_remembered) == before + 4
    del lstm
    assert len(_remembered) == before
