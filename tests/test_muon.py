import copy

import pytest
import torch
from torch import nn

from modeling_elmo.run_scripts.pretraining import muon
from modeling_elmo.run_scripts.pretraining.muon import COEFFICIENTS, Muon, orthogonal

SHAPES = ((12, 7), (7, 12), (9, 9), (12, 7), (1, 5))


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request, monkeypatch):
    slow = request.param == "float32"
    monkeypatch.setattr(muon, "bfloat16_obstacle", lambda: "no instructions" if slow else None)
    return request.param


def matrices(seed: int, *shapes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def put_gradients(parameters: list[nn.Parameter], seed: int, scale: float = 1.0):
    for parameter, gradient in zip(parameters, matrices(seed, *SHAPES), strict=True):
        parameter.grad = scale * gradient


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_it_is_torchs_muon(weight_decay, dtype):
    ours = [nn.Parameter(matrix) for matrix in matrices(0, *SHAPES)]
    theirs = copy.deepcopy(ours)
    optimizer = Muon(ours, lr=0.05, weight_decay=weight_decay)
    reference = torch.optim.Muon(theirs, lr=0.05, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for parameters in (ours, theirs):
            put_gradients(parameters, step, scale=10.0**step)
        optimizer.step()
        reference.step()
    for our, their, start in zip(ours, theirs, matrices(0, *SHAPES), strict=True):
        moved = (their - start).norm()
        assert moved > 0.01 and (our - their).norm() < 0.02 * moved  # torch's rounds to bfloat16
    found, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert found.keys() == expected.keys()
    for number in found:
        torch.testing.assert_close(found[number], expected[number])


def test_a_matrix_becomes_orthogonal(dtype):
    """Against a plain loop in float64, and against the singular vectors."""
    found = orthogonal(torch.stack(matrices(1, *3 * [(20, 8)])))
    for matrix, result in zip(matrices(1, *3 * [(20, 8)]), found, strict=True):
        expected = matrix.double() / matrix.double().norm()
        for _ in range(5):
            square = expected.T @ expected
            a, b, c = COEFFICIENTS
            expected = a * expected + expected @ (b * square + c * square @ square)
        rounding = 1e-5 if dtype == "float32" else 3e-2
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=rounding)
        u, values, v = torch.linalg.svd(result.double(), full_matrices=False)
        assert values.min() > 0.6 and values.max() < 1.3
        left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        torch.testing.assert_close(u @ v, left @ right, rtol=0, atol=0.05)


def test_parameters_without_a_gradient_and_zeros_stay(dtype):
    without, zero = (nn.Parameter(matrix) for matrix in matrices(2, (3, 4), (3, 4)))
    zero.grad = torch.zeros(3, 4)
    optimizer = Muon([without, zero])
    optimizer.step()
    for parameter, start in zip((without, zero), matrices(2, (3, 4), (3, 4)), strict=True):
        assert torch.equal(parameter, start)
    assert len(optimizer.state) == 1


def test_a_parameter_that_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"Muon trains matrices, but received a parameter of shape \(5,\)\."):
        Muon([nn.Parameter(torch.zeros(5))])
