"""biRNNs of heads against torch.nn on each row alone; variational dropout has one mask for a text."""

import pytest
import torch
from bilm_models import computed_by
from head_models import on_rows
from torch import nn
from torch.testing import assert_close

from modeling_elmo.heads.recurrence import TaskGRU, TaskLSTM, VariationalDropout

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


@pytest.mark.parametrize("cls, num_layers", [(TaskLSTM, 3), (TaskGRU, 1), (TaskGRU, 3)])
@pytest.mark.parametrize("backend", ["training", "reference"])
def test_equals_torch_on_each_row_alone(cls, num_layers, backend):
    rnn = make_lstm(num_layers, cls)
    other = torch_rnn(rnn)
    ours, theirs = (make_inputs().requires_grad_() for _ in range(2))
    with computed_by(backend):
        outputs = on_rows(rnn, ours, MASK)
    assert outputs.shape == (6, 6, rnn.output_size) == (6, 6, 6)
    assert not outputs[~MASK].any()
    expected = [other(row[real])[0] for row, real in zip(theirs, MASK, strict=True) if real.any()]
    assert_close(outputs[MASK], torch.cat(expected), **EXACT)
    with computed_by("inference"), torch.no_grad():
        assert_close(on_rows(rnn, ours, MASK), outputs, **EXACT)
    outputs.sin().sum().backward()
    sum(rows.sin().sum() for rows in expected).backward()
    assert_close(ours.grad, theirs.grad, **EXACT)
    for depth, layer in enumerate(rnn.layers):
        for name, parameter in layer.named_parameters():
            expected_grad = getattr(other, name.replace("_l0", f"_l{depth}")).grad
            assert_close(parameter.grad, expected_grad, **EXACT)


@pytest.mark.parametrize("backend", ["training", "reference"])
def test_vectors_enter_between_the_first_two_layers(backend):
    rnn = make_lstm(3, between_size=4)
    assert [layer.input_size for layer in rnn.layers] == [5, 10, 6] and make_lstm(1).layers[0].input_size == 5
    inputs, between = make_inputs(), make_inputs(width=4)
    with computed_by(backend):
        outputs = on_rows(rnn, inputs, MASK, between)
    for row, real in enumerate(MASK):
        if real.any():
            states, _ = rnn.layers[0](inputs[row, real])
            for layer, more in zip(rnn.layers[1:], ([between[row, real]], []), strict=True):
                states, _ = layer(torch.cat([states, *more], -1))
            assert_close(outputs[row, real], states, **EXACT)


def test_dropout_stands_between_layers_alone():
    one, two = make_lstm(1, dropout=0.9), make_lstm(2, dropout=0.9)
    inputs = make_inputs()
    assert_close(on_rows(one, inputs, MASK), on_rows(one.eval(), inputs, MASK))
    seen = []
    two.layers[1].register_forward_pre_hook(lambda _, packed: seen.append(packed[0].data))
    dropped = on_rows(two, inputs, MASK)
    assert (seen[0] == 0).any(1).all() and not (dropped == 0)[MASK].any()
    assert not torch.allclose(dropped, on_rows(two.eval(), inputs, MASK))


def test_initialization():
    lstm = TaskLSTM(50, 30, 2)
    loaded = lstm.layers[1].weight_hh_l0
    nn.init.constant_(loaded, 7.0)
    loaded._is_hf_initialized = True  # loading marks parameters of a checkpoint in this way
    lstm.initialize_parameters()
    assert (loaded == 7).all()
    for name, parameter in lstm.named_parameters():
        if "weight_ih" in name:
            bound = (6 / sum(parameter.shape)) ** 0.5
            assert 0.97 * bound < parameter.abs().max() <= bound and parameter.mean().abs() < 0.1 * bound
        elif "weight_hh" in name:
            for gate in parameter.chunk(4) if parameter is not loaded else ():
                assert_close(gate @ gate.t(), torch.eye(30), atol=1e-5, rtol=0)
        else:
            forget = 1.0 if "bias_ih" in name else 0.0
            assert [gate.unique().tolist() for gate in parameter.chunk(4)] == [[0.0], [forget], [0.0], [0.0]]


def test_variational_dropout_has_one_mask_for_all_times():
    torch.manual_seed(0)
    x, text = torch.rand(40 * 7, 50) + 1, torch.arange(40).repeat_interleave(7)
    assert VariationalDropout(0.5).eval()(x, text) is x and VariationalDropout(0)(x, text) is x
    scale = (VariationalDropout(0.3)(x, text) / x).view(40, 7, 50)
    assert_close(scale, scale[:, :1].expand_as(scale))
    assert (scale[:, 0] == 0).logical_or((scale[:, 0] - 1 / 0.7).abs() < 1e-5).all()
    assert len(scale[:, 0].unique(dim=0)) == 40 and len(scale[:, 0].unique(dim=1).t()) == 50  # rows, features
    assert abs((scale[:, 0] == 0).float().mean() - 0.3) < 0.05
