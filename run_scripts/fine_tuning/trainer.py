"""Trainer for task heads: its arguments with the paper's defaults, its optimizer, and averaged weights."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import SequentialSampler
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import is_torch_tf32_available, logging

from ..cards.card import check_repository
from ..program.command_line import option
from ..program.files import sync, writing
from ..program.forecast import Forecast
from ..program.models import broken_weights
from ..program.processes import check_processes, check_workers, computes_bfloat16, has_accelerator

logger = logging.get_logger(__name__)

# Training options that scores depend on.
RECORDED_OPTIONS = """
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps max_grad_norm num_train_epochs
    max_steps per_device_train_batch_size gradient_accumulation_steps bf16 fp16 optim optim_args weight_decay adam_beta1
    adam_beta2 adam_epsilon data_seed eval_strategy eval_steps save_strategy save_steps load_best_model_at_end adadelta
    ema_decay train_sampling_strategy lr_decay
"""
ADAM_OPTIONS = ("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon")  # which Adadelta does not read
# Options that a task decides: the program trains, the head has its own loss, and all predictions are scored in the
# order of the examples.
FIXED_OPTIONS: dict[str, Any] = {
    "do_predict": False,
    "label_smoothing_factor": 0.0,
    "prediction_loss_only": False,
    "eval_do_concat_batches": True,
    "dataloader_drop_last": False,
    "dataloader_in_order": True,
    "greater_is_better": True,
}
NOT_PRINTED = ("_per_second", "epoch", "total_flos")  # of the log
TRAINED = "trained_weights.safetensors"  # in a checkpoint, whose model has the averages
# Schedules that do not depend on the number of steps.
ENDLESS_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy")
DECAY_STEPS = 100  # of `lr_decay`, as in the code of Lee et al. (2017)
STEPS_TO_LEARN = 100  # before which a new network has hardly learned anything
UNUSUAL = 5  # factor between a learning rate and the default, which suits most data
DIVERGED = "training diverged. Pass a smaller --learning_rate, or other options of the optimizer."
ADADELTA_HELP = "Adadelta (rho 0.95); --no_adadelta uses --optim."
EMA_HELP = "Decay per step of the moving average of the weights, which is evaluated and saved. 0: no average."


@dataclass
class TaskTrainingArguments(TrainingArguments):
    """Trainer's arguments, with the defaults of the paper's tagger (as in AllenNLP's configuration)."""

    _argument_group_name = "training options"
    _shown_options = """output_dir max_steps optim warmup_steps gradient_accumulation_steps bf16 logging_steps
        eval_steps save_steps resume_from_checkpoint seed use_cpu push_to_hub hub_model_id"""
    trainer_options: ClassVar[dict[str, Any]] = {"remove_unused_columns": True}  # which a task sets
    default_learning_rate: ClassVar[float] = 1e-3

    learning_rate: float | None = option(
        None, "Initial learning rate. Default: 1 for Adadelta, else 0.001 (elmo classify: 0.0004)."
    )
    lr_scheduler_type: str = "constant"
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 64
    num_train_epochs: float = 20
    max_grad_norm: float = 5.0
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int = 1
    load_best_model_at_end: bool = True
    report_to: str = "none"
    tf32: bool | None = None  # on where it exists
    adadelta: bool = option(False, "Adadelta (rho 0.95) in place of --optim.")
    ema_decay: float = option(0.0, EMA_HELP)

    def __post_init__(self):
        if self.learning_rate is None:
            self.learning_rate = 1.0 if self.adadelta else self.default_learning_rate
        check_workers(self.dataloader_num_workers)
        if self.push_to_hub:
            check_repository(self.hub_model_id or Path(self.output_dir).resolve().name, "--hub_model_id")
        fixed = FIXED_OPTIONS | {"label_names": self.trainer_options.get("label_names")}
        ignored = []
        for name, value in fixed.items():
            if getattr(self, name) not in (value, None):
                setattr(self, name, value)
                ignored.append(name)
        default_optim = TrainingArguments.__dataclass_fields__["optim"].default
        if self.adadelta and self.optim != default_optim:  # type: ignore[has-type]  # an option of TrainingArguments
            self.optim = default_optim
            ignored.append("optim (pass --no_adadelta too)")
        if self.warmup_steps and self.lr_scheduler_type == "constant":  # type: ignore[has-type]  # the same
            self.warmup_steps = 0
            ignored.append("warmup_steps (pass --lr_scheduler_type constant_with_warmup too)")
        for name in ignored:  # not again by the copies of these arguments, which have the values that count
            logger.warning(f"Ignored, because the task or another option decides it: --{name}.")
        if not has_accelerator():
            self.use_cpu = True
        by_launcher = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16" and not self.fp16
        wants_bf16 = self.bf16 or by_launcher  # type: ignore[has-type]  # an option of TrainingArguments
        self.bf16 = wants_bf16 and (not self.use_cpu or computes_bfloat16("cpu", "--bf16"))  # for the record, too
        if self.tf32 is None and not self.use_cpu and is_torch_tf32_available():
            self.tf32 = True
        given = {name: getattr(self, name) for name in ("metric_for_best_model", "greater_is_better")}
        super().__post_init__()
        if wants_bf16 and not self.bf16:
            self.mixed_precision = "no"  # super has read the launcher's
        self.__dict__.update(given)  # which Trainer replaces by the loss; `for_trainer` knows the metric
        check_processes(self.world_size)

    def for_trainer(self, metric: str, has_validation: bool) -> "TaskTrainingArguments":
        """A copy for Trainer, which keeps the checkpoint with the best `metric`.

        The copy holds no Hub token, because Trainer saves its arguments in a file. Our own publishing uploads models.
        """
        if self.metric_for_best_model not in (None, metric):
            logger.warning(f"Ignored, because the metric is {metric}: --metric_for_best_model.")
        options: dict[str, Any] = {"push_to_hub": False, "hub_token": None, **self.trainer_options}
        options |= {"metric_for_best_model": metric, "greater_is_better": True}
        if not has_validation:
            options |= {"eval_strategy": "no", "load_best_model_at_end": False}
        return replace(self, **options)

    def recorded(self) -> dict[str, Any]:
        values = self.to_dict()
        names = [name for name in RECORDED_OPTIONS.split() if name in values]
        if self.adadelta:
            names = [name for name in names if name not in ADAM_OPTIONS]
        return {name: values[name] for name in names}

    def likely_cause(self, steps: int) -> str:
        """Why a model may have learned nothing in so many steps."""
        return likely_cause(steps, self.learning_rate or 0.0, 1.0 if self.adadelta else self.default_learning_rate)

    def checkpoint(self) -> str | None:
        """The checkpoint to resume from: a folder, or with `--resume_from_checkpoint last` the last complete one."""
        passed = self.resume_from_checkpoint
        folder = last_checkpoint(Path(self.output_dir)) if passed in ("last", "true", "True") else passed
        is_complete = folder is not None and Path(folder, "trainer_state.json").is_file()
        if passed is not None and not is_complete:
            raise FileNotFoundError(
                f"--resume_from_checkpoint {passed}: there is no complete checkpoint of Trainer. Pass a folder "
                "checkpoint-N, or leave the option out."
            )
        return folder


def likely_cause(steps: int, learning_rate: float, usual: float) -> str:
    """Why a model may have learned nothing, and what to do."""
    causes = []
    if steps < STEPS_TO_LEARN:
        options = "a larger --num_train_epochs or --max_steps, or smaller batches"
        causes.append(f"training ended after step {steps:,} (pass {options})")
    if not usual / UNUSUAL < learning_rate < usual * UNUSUAL:
        causes.append(f"--learning_rate {learning_rate:g} is far from {usual:g}, the default (leave it out)")
    options = "a larger --num_train_epochs, another --learning_rate, or more data"
    return (
        " and ".join(causes) or f"{steps:,} steps at --learning_rate {learning_rate:g} were not enough (pass {options})"
    )


class MovingAverage(TrainerCallback):
    """After each step, `average <- d * average + (1 - d) * weight` for every trained weight.

    torch's `AveragedModel` copies the whole model, a frozen biLM included; this class keeps the trained weights only.
    `d` is `min(decay, (1 + step) / (10 + step))`: small at first, so that the initial weights are soon forgotten. A
    decay of 0.999 is reached at step 8,990.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.averages: dict[str, Tensor] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if not self.averages:  # a checkpoint has loaded its own
            self.begin()

    def begin(self):
        """Takes the averages from the model."""
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def on_step_end(self, args, state, control, **kwargs):
        decay = min(self.decay, (1 + state.global_step) / (10 + state.global_step))
        torch._foreach_lerp_(list(self.averages.values()), list(self.weights.values()), 1 - decay)

    @torch.no_grad()
    def exchange(self):
        for name, average in self.averages.items():
            weight = self.weights[name]
            before = weight.detach().clone()
            weight.copy_(average)
            average.copy_(before)

    @torch.no_grad()
    def load_trained(self, folder: Path):
        """Takes the averages from the model, which has just loaded them, and loads the weights into it."""
        self.begin()
        for name, weight in load_file(folder / TRAINED).items():
            self.weights[name].copy_(weight)


def log_line(logs: dict[str, float]) -> str:
    """An entry of Trainer's log as text."""
    figures = []
    for name, value in logs.items():
        if not name.endswith(NOT_PRINTED):
            figures.append(f"{name} {value:.4g}")
    return f"epoch {logs['epoch']:.4g}: {', '.join(figures)}"


class ForecastLine(TrainerCallback):
    """Says once when the training will end."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.forecast = Forecast(args.max_steps, args.num_train_epochs)

    def on_step_end(self, args, state, control, **kwargs):
        forecast = self.forecast.after_step(state.global_step / state.max_steps, state.epoch)
        if forecast and state.is_world_process_zero:
            tqdm.write(forecast)


class LogLines(ProgressCallback):
    """Trainer's progress with its log as text, and the loss next to the steps."""

    def on_log(self, args, state, control, logs, **kwargs):
        if self.training_bar is not None:
            self.training_bar.write(log_line(logs))
            if "loss" in logs:
                self.training_bar.set_postfix_str(f"loss {logs['loss']:.4g}")


class PlainLogLines(PrinterCallback):
    """The same without progress."""

    def on_log(self, args, state, control, logs, **kwargs):
        if state.is_local_process_zero:
            print(log_line(logs))


class TaskTrainer(Trainer):
    """Trainer for heads: no weight decay on layer mixes, a log of layer weights, and an error where training diverges.

    `lr_decay` lowers the learning rate as Lee et al. (2017) do. With `ema_decay`, an exponential moving average of the
    weights is evaluated and saved.
    """

    def __init__(self, model, args: TaskTrainingArguments, *others, **options):
        if args.adadelta:  # rho as in Zeiler (2012) and BiDAF
            options["optimizer_cls_and_kwargs"] = (torch.optim.Adadelta, {"lr": args.learning_rate, "rho": 0.95})
        super().__init__(model, args, *others, **options)
        if args.ema_decay and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                f"--ema_decay {args.ema_decay} needs whole weights, but FSDP and DeepSpeed split them; pass 0."
            )
        self.average = MovingAverage(self.model, args.ema_decay) if args.ema_decay else None
        self.resumed_from: TrainerState | None = None
        for callback in (self.average, self.data_collator):  # some collators draw anew in each epoch
            if isinstance(callback, TrainerCallback):
                self.add_callback(callback)
        stock, lines = (PrinterCallback, PlainLogLines) if args.disable_tqdm else (ProgressCallback, LogLines)
        self.remove_callback(stock)  # it prints dictionaries
        self.add_callback(lines)
        self.add_callback(ForecastLine())

    def get_decay_parameter_names(self, model) -> list[str]:
        # Decay would pull gamma to 0. Trainer exempts only biases and layer norms.
        return [name for name in super().get_decay_parameter_names(model) if "_mix." not in name]

    def create_scheduler(self, num_training_steps: int, optimizer=None) -> LRScheduler:
        decay = getattr(self.args, "lr_decay", 1)  # of coreference: a schedule that transformers lacks
        if self.lr_scheduler is None and decay != 1:  # type: ignore[has-type]  # set by Trainer
            self.lr_scheduler = StepLR(optimizer or self.optimizer, DECAY_STEPS, decay)
        has_moved = self.resumed_from is not None and self.resumed_from.max_steps != num_training_steps
        if has_moved and decay == 1 and self.args.lr_scheduler_type not in ENDLESS_SCHEDULES:
            self._tell(
                f"The run had {self.resumed_from.max_steps:,} steps and now has {num_training_steps:,}, which moves "
                f"the {self.args.lr_scheduler_type.value} schedule of the learning rate. To keep the schedule, pass "
                "the same --num_train_epochs and --max_steps."
            )
        return super().create_scheduler(num_training_steps, optimizer)

    def _tell(self, text: str):
        if self.is_world_process_zero():
            print(text)

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler | None:
        # Predictions are matched to examples by order. Trainer would group them by length if training does.
        return SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """A context in which the model has the averages in place of its weights."""
        exchange = self.average.exchange if self.average is not None else lambda: None
        exchange()
        try:
            yield
        finally:
            exchange()

    def train(self, *args, **kwargs):
        output = super().train(*args, **kwargs)
        if self.average is not None:  # no best model was loaded
            self.average.exchange()
            self.average = None
        return output

    def _load_best_model(self):
        super()._load_best_model()
        self.average = None

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        with self._averaged():
            metrics = super().evaluate(*args, **kwargs)
            for place, mix in self.accelerator.unwrap_model(self.model).mixes().items():
                weights = mix.layer_weights().tolist()
                self.log({f"{place}_layer_{number}": weight for number, weight in enumerate(weights)})
        return metrics

    def evaluation_loop(self, *args, **kwargs):
        output = super().evaluation_loop(*args, **kwargs)
        for name, value in output.metrics.items():
            if name.endswith("_loss") and math.isnan(value):
                raise ValueError(f"The {name} is {value}: {DIVERGED}")
        return output

    def save_model(self, output_dir=None, _internal_call: bool = False):
        if name := broken_weights(self.model):
            raise ValueError(f"The weights of {name} are not finite: {DIVERGED}")
        with self._averaged(), writing(output_dir or self.args.output_dir):
            super().save_model(output_dir, _internal_call)
        if self.average is not None and self.args.should_save:
            weights = self.average.weights
            contiguous = {name: weight.detach().contiguous() for name, weight in weights.items()}
            save_file(contiguous, Path(output_dir or self.args.output_dir, TRAINED))

    def _save_checkpoint(self, *args, **kwargs):
        with writing(self.args.output_dir):
            super()._save_checkpoint(*args, **kwargs)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            sync(Path(output_dir))  # before Trainer writes its state, which makes the checkpoint complete

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        state = self.resumed_from = TrainerState.load_from_json(str(Path(resume_from_checkpoint, "trainer_state.json")))
        self._tell(f"Continuing {resume_from_checkpoint} at step {state.global_step:,}, epoch {state.epoch:.4g}.")
        if self.average is not None:
            self.average.load_trained(Path(resume_from_checkpoint))


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """The checkpoints that Trainer has left in a folder, by their step."""
    checkpoints = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            checkpoints[int(step)] = path
    return checkpoints


def last_checkpoint(folder: Path) -> str | None:
    """The last complete checkpoint in a folder: Trainer writes its state last."""
    for _, path in sorted(checkpoints_in(folder).items(), reverse=True):
        if (path / "trainer_state.json").is_file():
            return str(path)
    return None
