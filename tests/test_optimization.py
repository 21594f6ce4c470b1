import copy
import math

import pytest
import torch
import torch.distributed as dist
from errors import refused
from safetensors.torch import save_file
from torch import nn
from torch.multiprocessing import start_processes
from torch.testing import assert_close

from modeling_elmo.run_scripts.pretraining import optimization
from modeling_elmo.run_scripts.pretraining.optimization import (
    COEFFICIENTS,
    Muon,
    OptimizationArguments,
    clip_gradients,
    learning_rate_factor,
    load_accumulators,
    make_optimizers,
    orthogonal,
    reduce_sparse_gradients,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch.optim.Adagrad's own tensors

ROWS, WIDTH = 12, 5


class Softmax(nn.Module):
    def __init__(self, sparse_gradients: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.bias = nn.Parameter(torch.randn(ROWS))
        self.sparse_gradients = sparse_gradients


class Model(nn.Module):
    """The parts of a language model that optimizers use."""

    def __init__(self, sparse_gradients: bool):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gamma = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.softmax = Softmax(sparse_gradients)

    def put_gradients(self, rows: list[int], seed: int):
        """Random gradients. The softmax has them only in `rows`, which may repeat."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in (self.linear.weight, self.linear.bias, self.gamma):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for parameter in (self.softmax.weight, self.softmax.bias):
            values = torch.randn(len(rows), *parameter.shape[1:], generator=generator)
            gradient = torch.sparse_coo_tensor([rows], values, parameter.shape, check_invariants=True)
            parameter.grad = gradient if self.softmax.sparse_gradients else gradient.to_dense()


STEPS = ([0, 3, 7], [3, 3, 11], [7, 1, 3], [5])


def train(model: Model, optimizers: list[torch.optim.Optimizer], steps=STEPS) -> Model:
    for seed, rows in enumerate(steps):
        model.put_gradients(rows, seed)
        for optimizer in optimizers:
            optimizer.step()
    return model


def trained(model: Model, arguments: OptimizationArguments, steps=STEPS) -> Model:
    return train(model, make_optimizers(model, arguments), steps)


def assert_equal(ours: nn.Module, expected: nn.Module):
    found, wanted = (dict(model.named_parameters()) for model in (ours, expected))
    assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sparse", [False, True])
def test_adagrad_is_tensorflows(sparse):
    model, reference = Model(sparse), Model(False)
    expected = {name: parameter.detach().double() for name, parameter in reference.named_parameters()}
    accumulators = {name: torch.ones_like(value) for name, value in expected.items()}
    for seed, rows in enumerate(STEPS):
        reference.put_gradients(rows, seed)
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.double()
                accumulators[name] += gradient**2
                expected[name] -= 0.2 * gradient / accumulators[name].sqrt()
    trained(model, OptimizationArguments(optim="adagrad"))
    found = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_adamw_on_dense_gradients():
    arguments = OptimizationArguments(learning_rate=0.01, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9)
    model, expected = trained(Model(False), arguments), Model(False)
    options = {"lr": 0.01, "betas": (0.8, 0.9)}
    optimizers = [
        torch.optim.AdamW([expected.linear.weight, expected.softmax.weight], weight_decay=0.1, **options),
        torch.optim.AdamW([expected.linear.bias, expected.softmax.bias, expected.gamma], weight_decay=0.0, **options),
    ]
    assert_equal(model, train(expected, optimizers))


def test_sparse_adam_changes_the_rows_of_a_step_alone():
    model = Model(True)
    optimizers = make_optimizers(model, OptimizationArguments(weight_decay=0.1))
    assert [type(optimizer).__name__ for optimizer in optimizers] == ["AdamW", "SparseAdam"]
    for rows in STEPS:
        before = [tensor.detach().clone() for tensor in model.softmax.parameters()]
        train(model, optimizers, steps=[rows])
        for tensor, old in zip(model.softmax.parameters(), before, strict=True):
            changed = (tensor != old).reshape(ROWS, -1).any(1).nonzero().flatten().tolist()
            assert changed == sorted(set(rows))


def test_sparse_adam_is_adam_for_rows_of_every_step():
    every = 4 * [range(ROWS)]
    assert_equal(*(trained(Model(sparse), OptimizationArguments(), every) for sparse in (True, False)))


def test_muon_trains_matrices_and_adamw_the_rest():
    model, adamw = (
        trained(Model(True), OptimizationArguments(optim=optim, learning_rate=1e-2), steps=STEPS[:1])
        for optim in ("muon", "adamw")
    )
    expected = Model(True)
    expected.put_gradients(STEPS[0], seed=0)
    Muon([expected.linear.weight], lr=1e-2).step()
    assert torch.equal(model.linear.weight, expected.linear.weight)
    model.linear.weight.data = adamw.linear.weight.data
    assert_equal(model, adamw)


@pytest.mark.parametrize("optim", ["adagrad", "adamw", "muon"])
@pytest.mark.parametrize("sparse", [False, True])
def test_each_trained_parameter_has_one_optimizer(optim, sparse):
    model = Model(sparse)
    optimizers = make_optimizers(model, OptimizationArguments(optim=optim, weight_decay=0.1))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    given = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(given) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    decayed = {id(parameter) for group in groups if group.get("weight_decay") for parameter in group["params"]}
    assert decayed == {id(p) for p in (model.linear.weight, *([] if sparse else [model.softmax.weight]))}
    if optim == "adagrad" and sparse:  # a weight decay of a sparse gradient would raise
        trained(model, OptimizationArguments(optim=optim, weight_decay=0.1))


@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0])
@pytest.mark.parametrize("sparse", [False, True])
def test_clipping_is_torchs(max_norm, sparse):
    model, expected = Model(sparse), Model(False)
    for each in (model, expected):
        each.put_gradients([3, 3, 11, 0], seed=1)
    norm = clip_gradients(model.parameters(), max_norm)
    assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), max_norm or math.inf))
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        if other.grad is not None:
            assert parameter.grad.is_sparse == (sparse and parameter.shape[0] == ROWS)
            assert_close(parameter.grad.to_dense(), other.grad)


def test_clipping_gradients_that_are_empty_missing_or_no_numbers():
    model = Model(True)
    model.put_gradients([], seed=0)
    model.linear.weight.grad.fill_(0.0)
    model.linear.bias.grad.fill_(0.0)
    model.gamma.grad.fill_(-2.0)
    assert clip_gradients(model.parameters(), 1.0) == 2
    assert model.gamma.grad.item() == pytest.approx(-1.0, abs=1e-5)
    model.gamma.grad.fill_(math.nan)
    assert clip_gradients(model.parameters(), 1.0).isnan()


@pytest.mark.gpu
def test_clipping_does_not_wait_for_the_device():
    model = Model(True)
    model.put_gradients([0, 3], seed=0)
    for parameter in model.parameters():
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.cuda()
        if gradient is not None:
            parameter.grad = (gradient.coalesce() if gradient.is_sparse else gradient).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_gradients(model.parameters(), 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


ROWS_OF_PROCESSES = [  # sampled rows of each process, by step; `None`: no gradient
    ([0, 3, 3, 7], [3, 11]),
    (None, [1, 2, 1]),
    ([], [4]),
    ([], None),
]


def gradients(step: int, rank: int) -> Model:
    model, rows = Model(True), ROWS_OF_PROCESSES[step][rank]
    model.put_gradients(rows or [], seed=10 * step + rank)
    if rows is None:
        model.softmax.weight.grad = model.softmax.bias.grad = None
    return model


def _reduce(rank: int, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = []
    for step in range(len(ROWS_OF_PROCESSES)):
        model = gradients(step, rank)
        reduce_sparse_gradients(model.parameters())
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_reduction_over_processes(tmp_path):
    start_processes(_reduce, args=(tmp_path,), nprocs=2, start_method="fork")
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for step, rows in enumerate(ROWS_OF_PROCESSES):
        models = [gradients(step, rank) for rank in (0, 1)]
        for name in ("softmax.weight", "softmax.bias"):
            found = [results[step][name] for results in both]
            if not any(rows):
                assert found == [None, None]
                continue
            dense = [model.get_parameter(name).grad for model in models]
            expected = sum(gradient.to_dense() for gradient in dense if gradient is not None) / 2
            assert all(gradient.is_sparse and gradient.is_coalesced() for gradient in found)
            assert found[0].indices().tolist() == [sorted({*(rows[0] or []), *(rows[1] or [])})]
            assert torch.equal(found[0].to_dense(), found[1].to_dense())
            assert_close(found[0].to_dense(), expected)
        for results, model in zip(both, models, strict=True):
            assert torch.equal(results[step]["linear.weight"], model.linear.weight.grad)  # left to DDP


def factors(num_steps: int, **options) -> list[float]:
    factor = learning_rate_factor(OptimizationArguments(**options), num_steps)
    return [factor(step) for step in range(num_steps + 1)]


def test_schedules():
    # two steps of warm-up (1 %), then half a cosine over 198
    cosine = [0, 0.5, *(0.5 + 0.5 * math.cos(math.pi * step / 198) for step in range(199))]
    assert factors(200) == pytest.approx(cosine, abs=1e-12)
    assert factors(6, optim="adagrad", warmup_steps=4) == [0, 0.25, 0.5, 0.75, 1, 1, 1]
    linear = factors(6, lr_scheduler_type="linear", warmup_steps=2)
    assert linear == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25, 0])
    stable = {"lr_scheduler_type": "warmup_stable_decay"}
    falling = [1 - 0.5 * part**0.5 for part in range(5)]
    for decay_steps in (4, 0.5):
        found = factors(10, **stable, warmup_steps=2, decay_steps=decay_steps)
        assert found == pytest.approx([0, 0.5, 1, 1, 1, 1, *falling])
    assert factors(1, **stable) == [0, 0]  # one step of warm-up, and a share of none
    with refused("--decay_steps 2.5: pass a whole number, or a share"):
        OptimizationArguments(decay_steps=2.5)
    with refused("--decay_steps 7 is more than the 6 steps that are left for it"):
        factors(10, **stable, warmup_steps=4, decay_steps=7)


def test_defaults():
    adagrad = OptimizationArguments(optim="adagrad", unroll_steps=35)
    names = ("learning_rate", "lr_scheduler_type", "warmup_steps", "max_grad_norm", "gradient_scale")
    assert [getattr(adagrad, name) for name in names] == [0.2, "constant", 0, 10.0, 35.0]
    given = OptimizationArguments(optim="adagrad", max_grad_norm=0, gradient_scale=1.0)
    assert (given.max_grad_norm, given.gradient_scale) == (0, 1.0)


def test_accumulators_of_another_model_are_refused(tmp_path):
    model = nn.Linear(2, 3)
    optimizers = make_optimizers(model, OptimizationArguments(optim="adagrad"))
    save_file({"weight": torch.ones(4, 2)}, tmp_path / "state.safetensors")
    with refused(r"state.safetensors .* weight has shape \(4, 2\) in the file and \(3, 2\) in"):
        load_accumulators(model, optimizers, tmp_path / "state.safetensors", ())


# Muon

SHAPES = ((12, 7), (7, 12), (12, 7), (1, 5))


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request, monkeypatch):
    slow = request.param == "float32"
    monkeypatch.setattr(optimization, "bfloat16_obstacle", lambda: "no instructions" if slow else None)
    return request.param


def matrices(seed: int, *shapes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_it_is_torchs_muon(weight_decay, dtype):
    ours = [nn.Parameter(matrix) for matrix in matrices(0, *SHAPES)]
    theirs = copy.deepcopy(ours)
    optimizer = Muon(ours, lr=0.05, weight_decay=weight_decay)
    reference = torch.optim.Muon(theirs, lr=0.05, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for our, their, gradient in zip(ours, theirs, matrices(step, *SHAPES), strict=True):
            our.grad = their.grad = 10.0**step * gradient
        optimizer.step()
        reference.step()
    for our, their, start in zip(ours, theirs, matrices(0, *SHAPES), strict=True):
        moved = (their - start).norm()
        assert moved > 0.01 and (our - their).norm() < 0.02 * moved  # torch's rounds to bfloat16
    found, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert found.keys() == expected.keys()
    for number in found:
        assert_close(found[number], expected[number])


def test_a_matrix_becomes_orthogonal(dtype):
    """Against a plain loop in float64."""
    found = orthogonal(torch.stack(matrices(1, *3 * [(20, 8)])))
    for matrix, result in zip(matrices(1, *3 * [(20, 8)]), found, strict=True):
        expected = matrix.double() / matrix.double().norm()
        for _ in range(5):
            square = expected.T @ expected
            a, b, c = COEFFICIENTS
            expected = a * expected + expected @ (b * square + c * square @ square)
        rounding = 1e-5 if dtype == "float32" else 3e-2
        assert_close(result.double(), expected, rtol=0, atol=rounding)


def test_parameters_without_a_gradient_and_zeros_stay(dtype):
    without, zero = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    zero.grad = torch.zeros(3, 4)
    Muon([without, zero]).step()
    assert (without == 1).all() and (zero == 1).all()
