"""Optimizers, schedules and gradients of a language model whose softmax may see a sample of its words at a step.

A sampled softmax gives `softmax.weight` and `softmax.bias` sparse gradients, which hold the rows of the step's words
alone. Of 793,471 rows that is one in a hundred: clipping, reducing and updating take those rows and leave the table be.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_map
from transformers import get_scheduler

# What `None` stands for; adagrad's are those of the original.
DEFAULTS: dict[str, dict[str, Any]] = {
    "adagrad": {"learning_rate": 0.2, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 10.0},
    "adamw": {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 0.01, "max_grad_norm": 1.0},
}

# Under transformers' names; without warm-up steps "constant_with_warmup" is its "constant".
SCHEDULES = {"constant": "constant_with_warmup", "cosine": "cosine", "linear": "linear"}


@dataclass(kw_only=True)
class OptimizationArguments:
    """Options of training, under the names of transformers' `TrainingArguments` wherever it has one.

    Once constructed no option is `None`: each has the value that it was given, or the default of `optim`.
    """

    optim: Literal["adagrad", "adamw"] = field(
        default="adamw", metadata={"help": "Optimizer. The original used adagrad; the defaults below follow it."}
    )
    learning_rate: float | None = field(
        default=None, metadata={"help": "Highest learning rate. Default: 0.2 for adagrad, 0.001 for adamw."}
    )
    weight_decay: float = field(
        default=0.0,
        metadata={
            "help": "Of weight matrices other than a sampled softmax; not of biases, norms and the scalar mix. adamw "
            "takes it off the weights, adagrad adds it to the gradient."
        },
    )
    adam_beta1: float = field(default=0.9, metadata={"help": "Decay of the mean of gradients (adamw)."})
    adam_beta2: float = field(default=0.999, metadata={"help": "Decay of the mean of squared gradients (adamw)."})
    adam_epsilon: float = field(default=1e-8, metadata={"help": "Added to the denominator (adamw)."})
    lr_scheduler_type: Literal["constant", "cosine", "linear"] | None = field(
        default=None, metadata={"help": "Course of the learning rate. Default: constant for adagrad, cosine for adamw."}
    )
    warmup_steps: float | None = field(
        default=None,
        metadata={
            "help": "Steps in which the learning rate rises from 0; below 1: as a share of all steps. Default: 0 for "
            "adagrad, 0.01 for adamw."
        },
    )
    max_grad_norm: float | None = field(
        default=None, metadata={"help": "Global norm to clip to; 0: do not clip. Default: 10 for adagrad, 1 for adamw."}
    )
    gradient_scale: float | None = field(
        default=None,
        metadata={
            "help": "The loss is multiplied by this before the gradient is taken, which counts for adagrad's initial "
            "accumulator of 1 and for clipping. Default: --unroll_steps for adagrad, 1 for adamw."
        },
    )
    unroll_steps: int = field(default=20, metadata={"help": "Tokens of a row that are read in a step."})

    def __post_init__(self):
        _check_choice("optim", self.optim, DEFAULTS)
        scale = float(self.unroll_steps) if self.optim == "adagrad" else 1.0
        for name, default in (DEFAULTS[self.optim] | {"gradient_scale": scale}).items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        _check_choice("lr_scheduler_type", self.lr_scheduler_type, SCHEDULES)
        self._check_numbers()

    def _check_numbers(self):
        for name in ("learning_rate", "adam_epsilon", "gradient_scale", "unroll_steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name} {getattr(self, name)}: pass a number above 0.")
        for name in ("weight_decay", "warmup_steps", "max_grad_norm"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"--{name} {getattr(self, name)}: pass 0 or more.")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: pass a number from 0 to below 1.")
        if (self.warmup_steps or 0) > 1 and (self.warmup_steps or 0) % 1:
            raise ValueError(f"--warmup_steps {self.warmup_steps}: pass a whole number, or a share below 1.")

    def get_warmup_steps(self, num_training_steps: int) -> int:
        given = self.warmup_steps or 0
        return int(given) if given >= 1 else math.ceil(num_training_steps * given)


def _check_choice(name: str, value: Any, choices: Iterable[str]):
    if value not in choices:
        raise ValueError(f"--{name} {value!r}: pass one of {', '.join(choices)}.")


def sparse_parameter_names(model: nn.Module) -> list[str]:
    """Parameters of the modules whose `sparse_gradients` is true: those that DistributedDataParallel must leave out."""
    modules = ((prefix, part) for prefix, part in model.named_modules() if getattr(part, "sparse_gradients", False))
    return [name for prefix, part in modules for name, _ in part.named_parameters(prefix, recurse=False)]


def make_optimizers(model: nn.Module, arguments: OptimizationArguments) -> list[Optimizer]:
    """The optimizer of all parameters with dense gradients and, where there are any, that of the sparse ones.

    Adagrad is the original's: accumulators begin at 1, which needs no epsilon. A gradient of zero changes neither
    weight nor accumulator, so that updating a step's rows alone is exact.

    AdamW is not so: it moves a row by its old gradients for many steps after, and decays its moments, in every step and
    over the whole table. SparseAdam ("lazy" Adam) changes moments and weights of a row only when the row is in the
    sample. For a row that is always there it is Adam; a rare word keeps the moments of when it was last seen. It has no
    weight decay.
    """
    sparse_names = set(sparse_parameter_names(model))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    dense = [parameter for name, parameter in trained if name not in sparse_names]
    sparse = [parameter for name, parameter in trained if name in sparse_names]
    # Sharded parameters apart: tensors of a group are updated at once, and must be of one kind.
    kinds = {(p.ndim > 1, isinstance(p, DTensor)): [] for p in dense}
    for parameter in dense:
        kinds[parameter.ndim > 1, isinstance(parameter, DTensor)].append(parameter)
    groups = [
        {"params": params, "weight_decay": arguments.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), params in kinds.items()
    ]
    if arguments.optim == "adagrad":
        options: dict[str, Any] = {"lr": arguments.learning_rate, "initial_accumulator_value": 1.0, "eps": 0.0}
        # Apart, because one sparse gradient takes all tensors of an Adagrad off the path that updates them at once.
        optimizers: list[Optimizer] = [torch.optim.Adagrad(groups, **options)]
        return [*optimizers, torch.optim.Adagrad(sparse, **options)] if sparse else optimizers
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    options = {"lr": arguments.learning_rate, "betas": betas, "eps": arguments.adam_epsilon}
    optimizers = [torch.optim.AdamW(groups, **options)]
    return [*optimizers, torch.optim.SparseAdam(sparse, **options)] if sparse else optimizers


def make_schedules(
    optimizers: list[Optimizer], arguments: OptimizationArguments, num_training_steps: int
) -> list[LambdaLR]:
    """One for each optimizer: what its learning rate is multiplied by, step by step."""
    warmup_steps = arguments.get_warmup_steps(num_training_steps)
    if warmup_steps > num_training_steps:
        raise ValueError(
            f"--warmup_steps {arguments.warmup_steps} is more than the {num_training_steps} steps of the training; "
            "pass fewer, or a share below 1."
        )
    name = SCHEDULES[str(arguments.lr_scheduler_type)]
    return [get_scheduler(name, optimizer, warmup_steps, num_training_steps) for optimizer in optimizers]


def whole(state: Any) -> Any:
    """A state with sharded tensors put together. All processes must call it."""
    return tree_map(lambda value: value.full_tensor() if isinstance(value, DTensor) else value, state)


def load_whole(optimizer: Optimizer, state: dict[str, Any]):
    """`optimizer.load_state_dict` of what `whole` gave, each process taking its shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        parameter = parameters[index]
        for name, value in values.items():
            if isinstance(parameter, DTensor) and value.shape == parameter.shape:
                values[name] = distribute_tensor(
                    value.to(parameter.device), parameter.device_mesh, parameter.placements
                )
    optimizer.load_state_dict(state)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scales all gradients, dense, sparse and sharded, to a common norm of at most `max_norm`; 0 or `None`: does not.

    As `torch.nn.utils.clip_grad_norm_` on the same gradients as dense ones. Never waits for the device, unless sparse
    gradients come uncoalesced.

    Returns:
        `()`, the norm before.
    """
    found = _coalesced_gradients(parameters)
    if not found:
        return torch.zeros(())
    sharded = [gradient for gradient in found if isinstance(gradient, DTensor)]
    own = [gradient for gradient in found if not isinstance(gradient, DTensor)]
    gradients = [gradient.values() if gradient.is_sparse else gradient for gradient in own]
    norms = [torch.linalg.vector_norm(gradient).full_tensor() for gradient in sharded]
    norm = torch.linalg.vector_norm(torch.stack([*torch._foreach_norm(gradients), *norms]))
    gradients += [gradient.to_local() for gradient in sharded]
    if max_norm:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _coalesced_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """A row that stands twice in a sparse gradient counts as the sum of both."""
    found = []
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
            found.append(parameter.grad)
    return found


@torch.no_grad()
def reduce_sparse_gradients(parameters: Iterable[nn.Parameter]):
    """Replaces sparse gradients by their mean over all processes, as DistributedDataParallel does with dense ones.

    Each process may have other rows, none, or no gradient at all where others have one. Dense gradients are left
    alone. Call it on every process, with the same parameters. All sum the same rows in the same order, so that their
    tables stay equal.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # A missing gradient may be a sparse one elsewhere.
    reduced = [p for p in parameters if p.requires_grad and (p.grad is None or p.grad.is_sparse)]
    if not reduced:
        return
    _coalesced_gradients(reduced)
    for parameter, counts in zip(reduced, _gather_counts(reduced), strict=True):
        if max(counts) >= 0:
            parameter.grad = _mean_over_processes(parameter, [max(0, count) for count in counts])


def _gather_counts(parameters: list[nn.Parameter]) -> list[list[int]]:
    """For each parameter the rows in its gradient on each process, -1 where there is none."""
    own = [-1 if parameter.grad is None else len(parameter.grad.values()) for parameter in parameters]
    counts = torch.tensor(own, device=parameters[0].device)
    gathered = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, counts)
    return torch.stack(gathered, 1).tolist()


def _mean_over_processes(parameter: nn.Parameter, counts: list[int]) -> Tensor:
    rows = parameter.new_empty(0, dtype=torch.long) if parameter.grad is None else parameter.grad.indices()[0]
    values = parameter.new_empty(0, *parameter.shape[1:]) if parameter.grad is None else parameter.grad.values()
    all_rows, all_values = _gather(rows, counts), _gather(values, counts)
    mean_values = all_values / len(counts)
    # False: the check would make the host wait, and its default warns.
    return torch.sparse_coo_tensor(all_rows[None], mean_values, parameter.shape, check_invariants=False).coalesce()


def _gather(own: Tensor, counts: list[int]) -> Tensor:
    """`(rows of all processes, ...)`; sent as equal shapes, and never empty, which all backends can."""
    padded = own.new_zeros(max(1, *counts), *own.shape[1:])
    padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
