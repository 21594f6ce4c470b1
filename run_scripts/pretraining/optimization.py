"""Optimizers, schedules and gradients of a language model, also with a sampled softmax.

A sampled softmax gives `softmax.weight` and `softmax.bias` sparse gradients, which hold only the rows of the words in
the step: about one of a hundred with the original's 793,471 words. Clipping, reducing and updating touch only them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from transformers import get_scheduler

from modeling_elmo.kernels.onednn import bfloat16_obstacle
from modeling_elmo.kernels.torch_state import is_sharded

from ..program.command_line import option

# Defaults by optimizer. adagrad has the original's.
COSINE: dict[str, Any] = {"lr_scheduler_type": "cosine", "warmup_steps": 0.01, "max_grad_norm": 1.0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "adagrad": {"learning_rate": 0.2, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 10.0},
    "adamw": {"learning_rate": 1e-3, **COSINE},
    "muon": {"learning_rate": 3e-3, **COSINE},
}

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's polynomial, which brings singular values to 0.7 ... 1.2


@dataclass(kw_only=True)
class OptimizationArguments:
    """Options of the optimizers, named as in transformers' `TrainingArguments` wherever it has the same option.

    `None` is replaced by the default of the optimizer.
    """

    optim: Literal["adagrad", "adamw", "muon"] = option(
        "adamw",
        "Optimizer. adagrad is the original's; muon needs the fewest steps: it trains matrices, adamw the rest.",
    )
    learning_rate: float | None = option(
        None, "Peak learning rate. Default: 0.2 for adagrad, 0.001 for adamw, 0.003 for muon."
    )
    weight_decay: float = option(0.0, "Weight decay of all matrices but a sampled softmax; L2 penalty with adagrad.")
    adam_beta1: float = option(0.9, "Decay rate of the mean gradient (adamw).")
    adam_beta2: float = option(0.999, "Decay rate of the mean squared gradient (adamw).")
    adam_epsilon: float = option(1e-8, "Constant in the denominator of the update (adamw).")
    lr_scheduler_type: Literal["constant", "cosine", "linear", "warmup_stable_decay"] | None = option(
        None, "Learning rate schedule. Default: constant for adagrad, else cosine."
    )
    warmup_steps: float | None = option(
        None, "Steps in which the learning rate rises from 0; below 1: share of all. Default: 0 for adagrad, else 0.01."
    )
    decay_steps: float = option(
        0.2,
        "Steps at the end in which the learning rate of warmup_stable_decay falls to 0, as 1 minus the square root of "
        "their progress (Hägele et al. 2024); below 1: share of the steps after warm-up.",
    )
    max_grad_norm: float | None = option(
        None, "Maximum norm of the gradient; 0: no clipping. Default: 10 for adagrad, else 1."
    )
    gradient_scale: float | None = option(
        None,
        "Factor of the loss before the backward pass, for clipping and adagrad's initial accumulator of 1. "
        "Default: --unroll_steps for adagrad, else 1.",
    )
    unroll_steps: int = option(20, "Number of tokens of a row in a batch (context stream).")

    def __post_init__(self):
        scale = float(self.unroll_steps) if self.optim == "adagrad" else 1.0
        for name, default in (DEFAULTS[self.optim] | {"gradient_scale": scale}).items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        for name in ("warmup_steps", "decay_steps"):
            if getattr(self, name) > 1 and getattr(self, name) % 1:
                raise ValueError(f"--{name} {getattr(self, name)}: pass a whole number, or a share below 1.")


def make_optimizers(model: nn.Module, arguments: OptimizationArguments) -> list[Optimizer]:
    """One to three optimizers: for most parameters, for the matrices of Muon, and for sparse gradients.

    Adagrad is the original's: accumulators begin at 1, so it needs no epsilon. A gradient of zero changes nothing, so
    updating only the rows of a step is exact. AdamW would change every row in every step; SparseAdam ("lazy" Adam)
    changes the moments and weights of a row only in steps that sample the row, and has no weight decay.
    """
    sparse = _parameters_with_sparse_gradients(model)
    matrices = _matrices_of_muon(model) if arguments.optim == "muon" else []
    others = {*sparse, *matrices}
    # A group is updated at once, so its tensors must be all sharded or all plain.
    kinds = defaultdict(list)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter not in others:
            kinds[parameter.ndim > 1, is_sharded(parameter)].append(parameter)
    groups = [
        {"params": params, "weight_decay": arguments.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), params in kinds.items()
    ]
    rate: Any = arguments.learning_rate
    if arguments.optim == "adagrad":
        options: dict[str, Any] = {"initial_accumulator_value": 1.0, "eps": 0.0}
        # Two, because a sparse gradient makes Adagrad update all of its tensors one at a time.
        parts: list[Any] = [groups, sparse]
        return [torch.optim.Adagrad(part, rate, **options) for part in parts if part]
    options = {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    # One pass over the weights of an accelerator.
    fused = next(model.parameters()).device.type not in ("cpu", "mps", "meta") or None
    optimizers: list[Optimizer] = [torch.optim.AdamW(groups, rate, fused=fused, **options)]
    if matrices:
        optimizers.append(Muon(matrices, rate, arguments.weight_decay))
    if sparse:
        optimizers.append(torch.optim.SparseAdam(sparse, rate, **options))
    return optimizers


def _parameters_with_sparse_gradients(model: nn.Module) -> list[Tensor]:
    parts = [part for part in model.modules() if getattr(part, "sparse_gradients", False)]
    parameters = chain.from_iterable(part.parameters(recurse=False) for part in parts)
    return [parameter for parameter in parameters if parameter.requires_grad]


def _matrices_of_muon(model: nn.Module) -> list[Tensor]:
    """The weights of linear layers that are trained, except those of the softmax."""
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    weights = [part.weight for name, part in linears.items() if "softmax" not in name.split(".")]
    return [weight for weight in weights if weight.requires_grad]


def learning_rate_factor(arguments: OptimizationArguments, num_training_steps: int) -> Callable[[float], float]:
    """The schedule: a function from steps, or fractions of steps, to the factor of the learning rate."""
    warmup_steps = _number_of_steps("warmup_steps", arguments, num_training_steps)
    name: Any = arguments.lr_scheduler_type
    if name == "constant":  # transformers' "constant" has no warm-up
        name = "constant_with_warmup"
    options = {}
    if name == "warmup_stable_decay":
        decay_steps = _number_of_steps("decay_steps", arguments, num_training_steps - warmup_steps)
        options = {"num_decay_steps": decay_steps, "decay_type": "1-sqrt"}
    unused = torch.optim.SGD([torch.zeros(1)])
    schedule = get_scheduler(name, unused, warmup_steps, num_training_steps, scheduler_specific_kwargs=options)
    return schedule.lr_lambdas[0]


def _number_of_steps(name: str, arguments: OptimizationArguments, num_steps: int) -> int:
    """A number of steps that was given as a number or as a share of `num_steps`."""
    given: float = getattr(arguments, name)
    if given < 1:
        return math.ceil(num_steps * given)
    if given > num_steps:
        raise ValueError(
            f"--{name} {given} is more than the {num_steps} steps that are left for it. Pass fewer, or a share below 1."
        )
    return int(given)


def load_accumulators(model: nn.Module, optimizers: list[Optimizer], path: Path, skipped: tuple[str, ...]) -> list[str]:
    """Gives Adagrad the accumulators of a converted checkpoint. Returns the names of the parameters that have none.

    Args:
        path: file that `elmo convert --optimizer_state` wrote, of the same model.
        skipped: beginnings of the names of parameters that begin with new accumulators.
    """
    saved, without = load_file(path), []
    for optimizer in optimizers:
        state = optimizer.state_dict()
        for name, values in zip(parameter_names(optimizer, model), state["state"].values(), strict=True):
            if name not in saved or name.startswith(skipped):
                without.append(name)
            elif saved[name].shape != values["sum"].shape:
                raise ValueError(
                    f"{path} belongs to another model: {name} has shape {tuple(saved[name].shape)} in the file and "
                    f"{tuple(values['sum'].shape)} in the model. Delete the file to start with new accumulators."
                )
            else:
                values["sum"] = saved[name].clone()  # a view of the file
        load_gathered(optimizer, state)
    return without


def parameter_names(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """The names of an optimizer's parameters in the order of its state, which sharding changes."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def gathered(state: Any) -> Any:
    """A state with its sharded tensors gathered. All processes must call it."""
    return tree_map(lambda value: value.full_tensor() if is_sharded(value) else value, state)


def restore_optimizer(optimizer: Optimizer, model: nn.Module, saved: dict[str, Any], saved_names: list[str]):
    """Loads a state whose parameters may have another order. Its options, such as the learning rate, stay."""
    values_of = {saved_names[number]: values for number, values in saved["state"].items()}
    state = optimizer.state_dict()
    names = enumerate(parameter_names(optimizer, model))
    state["state"] = {number: values_of[name] for number, name in names if name in values_of}
    load_gathered(optimizer, state)


def load_gathered(optimizer: Optimizer, state: dict[str, Any]):
    """Loads a state that `gathered` returned; each process takes its shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        parameter = parameters[index]
        for name, value in values.items():
            if is_sharded(parameter) and value.shape == parameter.shape:
                placed = value.to(parameter.device), parameter.device_mesh, parameter.placements
                values[name] = dist.tensor.distribute_tensor(*placed)
    optimizer.load_state_dict(state)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Clips dense, sparse and sharded gradients to a global norm of at most `max_norm`; 0 or `None`: no clipping.

    Equals `torch.nn.utils.clip_grad_norm_` on dense gradients. Waits for the device only if sparse gradients are not
    coalesced. Returns the norm before clipping, `()`.
    """
    plain: list[Tensor] = []
    sharded: list[Any] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # rows that occur twice are added up
            plain.append(parameter.grad.values())
        elif is_sharded(parameter.grad):
            sharded.append(parameter.grad)
        else:
            plain.append(parameter.grad)
    norms = [torch.linalg.vector_norm(gradient).full_tensor() for gradient in sharded]
    norm = torch.linalg.vector_norm(torch.stack([*torch._foreach_norm(plain), *norms]))
    if max_norm:
        gradients = plain + [gradient.to_local() for gradient in sharded]
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@torch.no_grad()
def reduce_sparse_gradients(parameters: Iterable[nn.Parameter]):
    """Replaces sparse gradients by their mean over all processes, as DistributedDataParallel does with dense ones.

    The processes may have different rows, no rows, or no gradient. Dense gradients stay. All processes must call it
    with the same parameters. They add up the rows in the same order, so their weights stay equal.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # Another process may have a sparse gradient where this one has none.
    reduced = [p for p in parameters if p.requires_grad and (p.grad is None or p.grad.is_sparse)]
    if not reduced:
        return
    own = [_rows_of_gradient(parameter) for parameter in reduced]
    numbers = torch.tensor([len(rows) for rows, _ in own], device=reduced[0].device)
    of_processes = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(of_processes, numbers)
    counts_by_parameter = torch.stack(of_processes, 1).tolist()
    for parameter, (rows, values), counts in zip(reduced, own, counts_by_parameter, strict=True):
        parameter.grad = None
        if any(counts):
            mean = _gather(rows, counts)[None], _gather(values, counts) / len(counts), parameter.shape
            # False, because the check would make the host wait; the default warns.
            parameter.grad = torch.sparse_coo_tensor(*mean, check_invariants=False).coalesce()


def _rows_of_gradient(parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """The numbers and values of the rows of a sparse gradient, or of none."""
    if parameter.grad is None:
        return parameter.new_empty(0, dtype=torch.long), parameter.new_empty(0, *parameter.shape[1:])
    gradient = parameter.grad.coalesce()
    return gradient.indices()[0], gradient.values()


def _gather(own: Tensor, counts: list[int]) -> Tensor:
    """The rows of all processes, `(rows, ...)`. They are sent as equal shapes, never empty, for all backends."""
    padded = own.new_zeros(max(1, *counts), *own.shape[1:])
    padded[: len(own)] = own
    of_processes = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(of_processes, padded)
    return torch.cat([part[:count] for part, count in zip(of_processes, counts, strict=True)])


class Muon(Optimizer):
    """Muon (Jordan et al. 2024): Nesterov's momentum of a matrix, made orthogonal before each step.

    Its steps have the size of AdamW's (Liu et al. 2025):

        m = momentum m + (1 - momentum) g
        w = (1 - lr weight_decay) w - 0.2 lr sqrt(max(rows, columns)) orthogonal(momentum m + (1 - momentum) g)

    Equals `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` up to rounding, and has the same state. Torch's is slower
    than the training itself on a processor without instructions for bfloat16.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 3e-3, weight_decay: float = 0.0, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            equal_shapes = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    equal_shapes[matrix.shape].append(matrix)
            for matrices in equal_shapes.values():
                self._update(matrices, group["lr"], group["weight_decay"], group["momentum"])

    def _update(self, matrices: list[Any], lr: float, weight_decay: float, momentum: float):
        gradients = [matrix.grad for matrix in matrices]
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        updates = orthogonal(torch.stack(torch._foreach_lerp(gradients, momenta, momentum)))
        torch._foreach_mul_(matrices, 1 - lr * weight_decay)
        torch._foreach_add_(matrices, list(updates), alpha=-0.2 * lr * max(matrices[0].shape) ** 0.5)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices `(number, rows, columns)` with the same singular vectors, and singular values of about 1.

    Five iterations of Newton and Schulz, in bfloat16 unless the processor lacks its instructions.
    """
    a, b, c = COEFFICIENTS
    slow = matrices.device.type == "cpu" and bfloat16_obstacle()
    values = matrices if slow else matrices.bfloat16()
    is_tall = values.shape[1] > values.shape[2]
    if is_tall:
        values = values.mT
    values = values / torch.linalg.matrix_norm(values, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = values @ values.mT
        values = torch.baddbmm(values, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), values, beta=a)
    return (values.mT if is_tall else values).to(matrices.dtype)
