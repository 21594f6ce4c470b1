"""biRNNs against torch.nn on each row alone; variational dropout; the masked softmax."""

import pytest
import torch
from torch import nn

from modeling_elmo import elmo_backend
from modeling_elmo.elmo_head_layers import TaskGRU, TaskLSTM, VariationalDropout, masked_softmax

MASK = torch.tensor(
    [
        [1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1],  # left padding
        [0, 0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 1],  # gaps
        [0, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1],
    ]
).bool()
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def make_inputs(width=5, mask=MASK):
    x = torch.randn(*mask.shape, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.masked_fill(~mask[..., None], torch.nan)  # must never be read


def make_lstm(num_layers=1, cls=TaskLSTM, **options):
    torch.manual_seed(0)
    return cls(5, 3, num_layers, **options).double()


def torch_rnn(rnn):
    """The biRNN of torch.nn with the same layers and weights."""
    other = rnn.cell(5, 3, len(rnn.layers), bidirectional=True).double()
    for depth, layer in enumerate(rnn.layers):
        for name, parameter in layer.named_parameters():
            getattr(other, name.replace("_l0", f"_l{depth}")).data = parameter.detach().clone()
    return other


# biRNNs


@pytest.mark.parametrize("cls", [TaskLSTM, TaskGRU])
@pytest.mark.parametrize("backend", ["training", "reference"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_equals_torch_on_each_row_alone(num_layers, backend, cls):
    rnn = make_lstm(num_layers, cls)
    other = torch_rnn(rnn)
    ours, theirs = (make_inputs().requires_grad_() for _ in range(2))
    with elmo_backend(backend):
        outputs = rnn(ours, MASK)
    assert outputs.shape == (6, 6, rnn.output_size) == (6, 6, 6)
    assert not outputs[~MASK].any()
    expected = [other(row[real])[0] for row, real in zip(theirs, MASK, strict=True) if real.any()]
    torch.testing.assert_close(outputs[MASK], torch.cat(expected), **EXACT)
    outputs.sin().sum().backward()
    sum(rows.sin().sum() for rows in expected).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)
    for depth, layer in enumerate(rnn.layers):
        for name, parameter in layer.named_parameters():
            expected_grad = getattr(other, name.replace("_l0", f"_l{depth}")).grad
            torch.testing.assert_close(parameter.grad, expected_grad, **EXACT)


@pytest.mark.parametrize("backend", ["training", "reference"])
def test_vectors_enter_between_the_first_two_layers(backend):
    rnn = make_lstm(3, between_size=4)
    assert [layer.input_size for layer in rnn.layers] == [5, 10, 6] and make_lstm(1).layers[0].input_size == 5
    inputs, between = make_inputs(), make_inputs(width=4)
    with elmo_backend(backend):
        outputs = rnn(inputs, MASK, between)
    for row, real in enumerate(MASK):
        if real.any():
            states, _ = rnn.layers[0](inputs[row, real])
            for layer, more in zip(rnn.layers[1:], ([between[row, real]], []), strict=True):
                states, _ = layer(torch.cat([states, *more], -1))
            torch.testing.assert_close(outputs[row, real], states, **EXACT)


def test_without_real_positions_there_are_zeros():
    outputs = make_lstm(2)(make_inputs(), torch.zeros_like(MASK))
    assert outputs.shape == (6, 6, 6) and outputs.dtype == torch.float64 and not outputs.any()


def test_dropout_stands_between_layers_alone():
    one, two = make_lstm(1, dropout=0.9), make_lstm(2, dropout=0.9)
    inputs = make_inputs()
    torch.testing.assert_close(one(inputs, MASK), one.eval()(inputs, MASK))
    seen = []
    two.layers[1].register_forward_pre_hook(lambda _, packed: seen.append(packed[0].data))
    dropped = two(inputs, MASK)
    assert (seen[0] == 0).any(1).all() and not (dropped == 0)[MASK].any()
    assert not torch.allclose(dropped, two.eval()(inputs, MASK))


def test_half_precision():
    lstm, inputs = make_lstm(2), make_inputs()
    exact = lstm(inputs, MASK)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(lstm.float()(inputs.float(), MASK).double(), exact, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initialisation(dtype):
    lstm = TaskLSTM(50, 30, 2).to(dtype)
    for parameter in lstm.parameters():
        nn.init.constant_(parameter, 7.0)
    lstm.layers[1].weight_hh_l0._is_hf_initialized = True  # loading marks parameters of a checkpoint in this way
    lstm.reset_parameters()
    assert (lstm.layers[1].weight_hh_l0 == 7).all()
    for name, parameter in lstm.named_parameters():
        if name == "layers.1.weight_hh_l0":
            continue
        if "weight_ih" in name:
            bound = (6 / sum(parameter.shape)) ** 0.5
            assert 0.97 * bound < parameter.abs().max() <= 1.01 * bound and parameter.mean().abs() < 0.1 * bound
        elif "weight_hh" in name:
            for gate in parameter.detach().float().chunk(4):
                atol = 1e-5 if dtype == torch.float32 else 0.02
                torch.testing.assert_close(gate @ gate.t(), torch.eye(30), atol=atol, rtol=0)
        else:
            forget = 1.0 if "bias_ih" in name else 0.0
            assert [gate.unique().tolist() for gate in parameter.chunk(4)] == [[0.0], [forget], [0.0], [0.0]]


# VariationalDropout


def test_variational_dropout_has_one_mask_for_all_times():
    torch.manual_seed(0)
    x = torch.rand(40, 7, 50) + 1
    scale = VariationalDropout(0.3)(x) / x
    torch.testing.assert_close(scale, scale[:, :1].expand_as(scale))
    assert (scale[:, 0] == 0).logical_or((scale[:, 0] - 1 / 0.7).abs() < 1e-5).all()
    assert len(scale[:, 0].unique(dim=0)) == 40 and len(scale[:, 0].unique(dim=1).t()) == 50  # rows, features
    assert abs((scale[:, 0] == 0).float().mean() - 0.3) < 0.05


def test_variational_dropout_may_be_off():
    x = torch.rand(4, 5, 6)
    assert VariationalDropout(0.5).eval()(x) is x
    assert VariationalDropout(0)(x) is x


# masked_softmax


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_masked_softmax_is_one_of_what_is_allowed(dim):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 5, 6, generator=generator) * 5
    mask = torch.rand(4, 5, 6, generator=generator) < 0.3
    found = masked_softmax(scores, mask, dim).movedim(dim, -1).flatten(0, 1)
    lines = zip(found, scores.movedim(dim, -1).flatten(0, 1), mask.movedim(dim, -1).flatten(0, 1), strict=True)
    for line, line_scores, allowed in lines:
        torch.testing.assert_close(line[allowed], line_scores[allowed].softmax(0))
        assert not line[~allowed].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_masked_softmax_broadcasts_and_ignores_what_is_masked(dtype):
    scores = torch.tensor([[[-3e4, -3e4, torch.nan], [2.0, 1.0, 6e4]]], dtype=dtype).requires_grad_()
    found = masked_softmax(scores, torch.tensor([[True, True, False]])[:, None], -1)
    expected = torch.tensor([[[0.5, 0.5, 0.0], [0.7311, 0.2689, 0.0]]], dtype=dtype)
    torch.testing.assert_close(found, expected, atol=2e-3 if dtype == torch.bfloat16 else 1e-3, rtol=0)
    found.square().sum().backward()
    assert scores.grad.isfinite().all() and not scores.grad[..., 2].any()


def test_masked_softmax_gradients():
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]).bool()
    scores = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for dim in (0, 1):
        assert torch.autograd.gradcheck(lambda scores, dim=dim: masked_softmax(scores, mask, dim), scores)
    with torch.autograd.set_detect_anomaly(True):  # raises at NaN inside the backward pass
        found = masked_softmax(scores, mask, 1)
        found.square().sum().backward()
    assert not found[1].any() and not scores.grad[1].any()
