"""The training loop of the biLM: steps, evaluation, checkpoints, on any number of processes.

What happens in a step depends on the seed, the step's number and the position in the text alone, so that a run that was
interrupted goes on as if it had not been: dropout and the candidates of a sampled softmax are drawn from generators
seeded anew for each step.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm

from modeling_elmo import ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.run_scripts.pretraining.checkpoints import Checkpoints, load_state, save_state
from modeling_elmo.run_scripts.pretraining.evaluation import evaluate
from modeling_elmo.run_scripts.pretraining.optimization import (
    OptimizationArguments,
    clip_gradients,
    load_whole,
    make_optimizers,
    make_schedules,
    reduce_sparse_gradients,
    whole,
)
from modeling_elmo.run_scripts.pretraining.streams import LMBatch, SentenceBatches, StreamWindows, data_loader


@dataclass(kw_only=True)
class TrainingArguments(OptimizationArguments):
    """Under the names of transformers' own `TrainingArguments` wherever it has one."""

    output_dir: str = field(metadata={"help": "Folder for checkpoints, and at the end for the model itself."})
    per_device_train_batch_tokens: int = field(
        default=4096, metadata={"help": "Tokens of a batch, padding included (context sentence)."}
    )
    per_device_train_batch_size: int = field(
        default=128, metadata={"help": "Rows that are read side by side (context stream)."}
    )
    per_device_eval_batch_tokens: int = field(
        default=4096, metadata={"help": "The same for held-out text, which is read sentence by sentence."}
    )
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Batches of a step on each device."})
    max_steps: int = field(default=-1, metadata={"help": "Steps to train; overrides --num_train_epochs."})
    num_train_epochs: float = field(default=10.0, metadata={"help": "Times to read the text."})
    logging_steps: int = field(default=50, metadata={"help": "Steps between two entries of the log."})
    eval_steps: int = field(default=1000, metadata={"help": "Steps between two evaluations on held-out text."})
    save_steps: int = field(default=1000, metadata={"help": "Steps between two checkpoints."})
    save_total_limit: int | None = field(
        default=2, metadata={"help": "Checkpoints to keep; the best and the last stay in any case."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Evaluations without a lower perplexity after which training ends."}
    )
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "`last`, or a checkpoint's folder: goes on there, exactly."}
    )
    seed: int = field(default=42, metadata={"help": "Of initial weights, order of the text, dropout and candidates."})
    dataloader_num_workers: int = field(
        default=1, metadata={"help": "Processes of each device that prepare batches (context stream: 0 or 1)."}
    )
    fsdp_softmax: bool = field(
        default=False,
        metadata={"help": "Shard the softmax and its optimizer's state over the devices (FSDP 2); not a sampled one."},
    )
    bf16: bool = field(default=False, metadata={"help": "Mixed precision: products in bfloat16."})
    torch_compile: bool = field(default=False, metadata={"help": "torch.compile all but the recurrence's loop."})
    use_cpu: bool = field(default=False, metadata={"help": "Leave accelerators alone."})
    report_to: str = field(
        default="tensorboard", metadata={"help": "Trackers, separated by commas: those that Accelerate knows; or none."}
    )

    def __post_init__(self):
        super().__post_init__()
        batches = ("per_device_train_batch_tokens", "per_device_train_batch_size", "per_device_eval_batch_tokens")
        for name in (*batches, "gradient_accumulation_steps", "logging_steps", "eval_steps", "save_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: pass at least 1.")
        if self.early_stopping_patience is not None and self.early_stopping_patience < 1:
            raise ValueError(f"--early_stopping_patience {self.early_stopping_patience}: pass at least 1.")
        if self.dataloader_num_workers < 0:
            raise ValueError(f"--dataloader_num_workers {self.dataloader_num_workers}: pass 0 or more.")
        if self.max_steps <= 0 and self.num_train_epochs <= 0:
            raise ValueError(
                f"--max_steps {self.max_steps} and --num_train_epochs {self.num_train_epochs}: pass one above 0."
            )


@dataclass
class Progress:
    """What changes while training, besides tensors; part of every checkpoint."""

    step: int = 0
    epoch: float = 0.0
    predictions: int = 0  # of one direction, over all processes
    best_perplexity: float = math.inf
    best_step: int | None = None
    evaluations_since_best: int = 0
    held_out: str | None = None  # the text that they are of
    base_model: str | None = None
    settings: dict[str, Any] | None = None
    earlier_settings: list[dict[str, Any]] = field(default_factory=list)  # those that were changed by a resumed run
    log: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, settings: dict[str, Any]):
        """Notes the options of a run that starts or goes on here."""
        if self.settings not in (None, settings):
            self.earlier_settings.append({"until_step": self.step, "settings": self.settings})
        self.settings = settings


class Step(NamedTuple):
    """What is kept of a step until the next entry of the log, so that no step waits for its loss."""

    number: int
    figures: Tensor  # (4,): joint, forward and backward loss, norm of the gradient
    places: list[tuple[str, int]]


class Stopped(SystemExit):
    """After a signal, with a checkpoint written; the exit status is the shell's for that signal."""


class Pretraining:
    """A run: `train()` until the end, a signal, or an error that leaves the checkpoints as they are.

    Args:
        model: with the weights to start from.
        make_dataset: the text to train on, for this process, from a position on (`None`: the beginning).
        held_out: makes the batches of held-out text; `None` where there is none.
        num_steps: how many there will be, for the schedule and the progress bar.
        carries_states: whether a batch goes on where the one before it ended.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        arguments: TrainingArguments,
        model: ELMoForPreTraining,
        tokenizer: ELMoTokenizer,
        make_dataset: Callable[[Any], SentenceBatches | StreamWindows],
        held_out: Callable[[], Iterable[LMBatch]] | None,
        num_steps: int,
        carries_states: bool = False,
    ):
        self.accelerator, self.arguments, self.tokenizer = accelerator, arguments, tokenizer
        self.make_dataset, self.held_out, self.num_steps = make_dataset, held_out, num_steps
        self.checkpoints = Checkpoints(Path(arguments.output_dir), arguments.save_total_limit)
        self.is_sampled = model.config.softmax_type == "sampled"
        model.softmax.sparse_gradients = self.is_sampled
        torch.sparse.check_sparse_tensor_invariants.disable()  # torch's Adagrad warns unless this is said
        self.plain_model = model.train().to(accelerator.device)
        if arguments.fsdp_softmax:
            self._shard_softmax()
        if arguments.torch_compile:
            model.compile(dynamic=True)
        self.model = accelerator.prepare(model)
        self.optimizers = make_optimizers(model, arguments)
        self.schedules = make_schedules(self.optimizers, arguments, num_steps)
        self.progress, self.carries_states = Progress(), carries_states
        self.states: tuple[Tensor, Tensor] | None = None  # of the LSTMs, carried from window to window
        self.position: Any = None  # where this process goes on to read
        self.unlogged: list[Step] = []
        self.written: tuple[int, int] | None = None  # step of the last checkpoint, and length of its log
        self.waited, self.since, self.predicted = 0.0, time.perf_counter(), 0
        self.signal: int | None = None
        # Of its own, for what the host must know at every step: it would wait for the accelerator's work otherwise.
        self.host_group = dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None

    def train(self):
        """Trains from where `self.progress` stands.

        Raises:
            FloatingPointError: a loss or a gradient is not a number.
            OSError: a checkpoint cannot be written.
            Stopped: after SIGTERM or Ctrl-C.
        """
        if self.progress.step == 0:
            self._evaluate()
        batches = self._batches()
        self.since = time.perf_counter()
        with self._catch_signals(), self._progress_bar() as bar:
            self._train(batches, bar)
            self._log(bar)
        self._evaluate()
        self._save()

    def _train(self, batches: Iterator[LMBatch], bar: tqdm):
        accumulation, processes = self.arguments.gradient_accumulation_steps, self.accelerator.num_processes
        while not self._is_enough():
            group = [self._next(batches) for _ in range(accumulation)]
            predictions, over, stop, epochs = self._sum_over_processes(
                sum(batch.num_predictions for batch in group),
                all(map(self._is_over, group)),
                bool(self.signal),
                group[-1].epoch + (group[-1].fraction or 0),
            )
            if over == processes and not self.progress.step:
                raise ValueError(
                    f"--num_train_epochs {self.arguments.num_train_epochs} is less than the first batch reads. Pass "
                    "more, or --max_steps."
                )
            if over == processes:
                break
            self._step(group, predictions, epochs / processes)
            bar.update()
            self._after_step(bar)
            if stop:
                self._stop()

    def _is_enough(self) -> bool:
        patience = self.arguments.early_stopping_patience
        if patience is not None and self.progress.evaluations_since_best >= patience:
            return True
        return 0 < self.arguments.max_steps <= self.progress.step

    def _shard_softmax(self):
        if self.is_sampled or self.accelerator.num_processes == 1:
            raise ValueError(
                f"--fsdp_softmax with softmax_type {self.plain_model.config.softmax_type!r} on "
                f"{self.accelerator.num_processes} process(es): pass it with a full or adaptive softmax, on several."
            )
        from torch.distributed.fsdp import fully_shard  # torch 2.6 and newer

        fully_shard(self.plain_model.softmax)

    def _batches(self) -> Iterator[LMBatch]:
        dataset = self.make_dataset(self.position)
        workers = self.arguments.dataloader_num_workers
        return iter(data_loader(dataset, workers, pin_memory=self.accelerator.device.type == "cuda"))

    def _next(self, batches: Iterator[LMBatch]) -> LMBatch:
        start = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - start
        return batch

    def _is_over(self, batch: LMBatch) -> bool:
        """Whether the text that was to be read ends before this batch."""
        epochs = self.arguments.num_train_epochs if self.arguments.max_steps <= 0 else math.inf
        return batch.epoch >= epochs or batch.epoch + (batch.fraction or 0) > epochs

    def _step(self, group: list[LMBatch], predictions: float, epoch: float):
        arguments, number = self.arguments, self.progress.step
        candidates = None
        if self.is_sampled:  # the same on every device
            generator = torch.Generator().manual_seed(_seed(arguments.seed, number))
            candidates = self.plain_model.softmax.sample(generator)
        torch.manual_seed(_seed(arguments.seed, number, 1 + self.accelerator.process_index))
        share = predictions / self.accelerator.num_processes  # DistributedDataParallel takes the mean
        losses = [self._backward(batch, share, candidates, batch is group[-1]) for batch in group]
        parameters = list(self.plain_model.parameters())
        reduce_sparse_gradients(parameters)
        norm = clip_gradients(parameters, arguments.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.position = group[-1].position
        self.predicted += int(predictions)
        self.progress.step += 1
        self.progress.predictions += int(predictions)
        self.progress.epoch = epoch
        self._set_learning_rates()
        places = [place for batch in group for place in batch.places]
        self.unlogged.append(Step(self.progress.step, torch.cat([torch.stack(losses).sum(0), norm[None]]), places))

    def _set_learning_rates(self):
        """By the steps done; where the text decides when to end, by how much of it was read: steps are estimated."""
        done, arguments = float(self.progress.step), self.arguments
        if arguments.max_steps <= 0:
            done = self.num_steps * min(1.0, self.progress.epoch / arguments.num_train_epochs)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            factors = zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
            for group, rate, factor in factors:
                group["lr"] = rate * factor(done)

    def _backward(self, batch: LMBatch, num_items: float, candidates, is_last: bool) -> Tensor:
        """Adds the gradient of a batch. Returns its losses `(3,)`: joint, forward, backward."""
        inputs = _to_device(batch.inputs, self.accelerator.device)
        if self.states is not None:
            begins_B121 = batch.begins.T[:, None, :, None].to(self.accelerator.device, non_blocking=True)
            hidden, cell = (state.masked_fill(begins_B121, 0) for state in self.states)
            self.states = hidden, cell
        with nullcontext() if is_last else self.accelerator.no_sync(self.model):
            output = self.model(
                **inputs, initial_states=self.states, num_items_in_batch=num_items, candidates=candidates
            )
            self.accelerator.backward(output.loss * self.arguments.gradient_scale)
        if self.carries_states:
            hidden, cell = output.final_states
            self.states = hidden.detach(), cell.detach()
        return torch.stack([output.loss, output.forward_loss, output.backward_loss]).detach().float()

    def _after_step(self, bar: tqdm):
        arguments, step = self.arguments, self.progress.step
        if step % arguments.logging_steps == 0:
            self._log(bar)
        is_best = step % arguments.eval_steps == 0 and self._evaluate()
        if is_best or step % arguments.save_steps == 0:
            self._save()

    def _log(self, bar: tqdm):
        """Looks at the steps since the last entry, and writes one."""
        if not self.unlogged:
            return
        joint, forward, backward, norm = self._checked_figures().cpu().double().mean(0).tolist()  # mps has no float64
        seconds = time.perf_counter() - self.since
        entry = {
            "sampled_loss" if self.is_sampled else "loss": joint,
            "forward_loss": forward,
            "backward_loss": backward,
            "gradient_norm": norm,
            "learning_rate": self.optimizers[0].param_groups[0]["lr"],
            "words_per_second": self.predicted / seconds,
            "data_wait": self.waited / seconds,
        }
        bar.set_postfix_str(
            f"loss {joint:.3f}, {entry['words_per_second']:,.0f} words/s, epoch {self.progress.epoch:.2f}"
        )
        self._record(entry)
        self.unlogged, self.waited, self.since, self.predicted = [], 0.0, time.perf_counter(), 0

    def _checked_figures(self) -> Tensor:
        """The means over all processes, `(steps, 4)`, of the steps since the last entry of the log."""
        figures_S4 = torch.stack([step.figures for step in self.unlogged])
        figures_S4 = self.accelerator.reduce(figures_S4, "mean")
        broken_S = ~figures_S4.isfinite().all(1)
        if broken_S.any():
            first = int(broken_S.nonzero()[0])
            self._refuse(self.unlogged[first], "gradient" if figures_S4[first, :3].isfinite().all() else "loss")
        return figures_S4

    def _refuse(self, step: Step, what: str):
        lines = ", ".join(f"{name} line {line}" for name, line in step.places[:20])
        more = f" and {len(step.places) - 20} more" if len(step.places) > 20 else ""
        raise FloatingPointError(
            f"The {what} of step {step.number} is not a number. This process read {lines}{more} there. The last good "
            f"checkpoint is {self.checkpoints.last()}. Look at these lines, or go on from there with a lower "
            "--learning_rate or --max_grad_norm."
        )

    def _evaluate(self) -> bool:
        """Measures held-out perplexity. Returns whether it is the lowest so far."""
        is_done = any(entry["step"] == self.progress.step for entry in self.progress.log if "perplexity" in entry)
        if self.held_out is None or is_done:
            return False
        start = time.perf_counter()
        with self._gathered_softmax():
            found = evaluate(self.plain_model, self.held_out(), "sentence", self.accelerator)
        self._print(f"step {self.progress.step}: {found}")
        self._record(asdict(found))
        self.since += time.perf_counter() - start
        progress = self.progress
        if progress.step == 0 or not found.perplexity < progress.best_perplexity:
            progress.evaluations_since_best += progress.step > 0
            return False
        progress.best_perplexity, progress.best_step, progress.evaluations_since_best = (
            found.perplexity,
            progress.step,
            0,
        )
        return True

    @contextmanager
    def _gathered_softmax(self):
        """Put together once, for processes that have different numbers of batches."""
        softmax = self.plain_model.softmax
        if self.arguments.fsdp_softmax:
            softmax.unshard()
        yield
        if self.arguments.fsdp_softmax:
            softmax.reshard()

    def _record(self, entry: dict[str, Any]):
        self.progress.log.append({"step": self.progress.step, "epoch": round(self.progress.epoch, 4), **entry})
        numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
        self.accelerator.log(numbers, step=self.progress.step)

    def _save(self):
        """Writes a checkpoint of this step, unless it is there."""
        step, start = self.progress.step, time.perf_counter()
        unlogged = self._checked_figures().cpu() if self.unlogged else None
        self._check_weights()
        positions = gather_object([self.position])
        states = None if self.states is None else [state.cpu() for state in self.accelerator.gather(self.states)]
        weights = whole(self.plain_model.state_dict())
        optimizers = whole([optimizer.state_dict() for optimizer in self.optimizers])
        if self.accelerator.is_main_process:
            written = step, len(self.progress.log)
            if self.written != written or self.checkpoints.find(step) is None:
                merged = self.make_dataset(None).merge_positions(positions)
                whole_state = merged, states, unlogged
                self.checkpoints.save(step, lambda folder: self._write(folder, weights, optimizers, *whole_state))
            self.written = written
            best = self.progress.best_step
            self.checkpoints.rotate(keep=None if best is None else self.checkpoints.find(best))
        self.accelerator.wait_for_everyone()
        self.since += time.perf_counter() - start

    def _check_weights(self):
        """Those of the last step: its loss and gradient were of the weights before."""
        if not all(parameter.isfinite().all() for parameter in self.plain_model.parameters()):
            raise FloatingPointError(
                f"The weights after step {self.progress.step} are not all numbers. The last good checkpoint is "
                f"{self.checkpoints.last()}. Go on from there with a lower --learning_rate."
            )

    def _write(self, folder: Path, weights: dict, optimizers: list[dict], position: Any, states, unlogged):
        self.plain_model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        (folder / "training_log.json").write_text(json.dumps(self.progress.log, indent=1), encoding="utf-8")
        state = {
            "progress": asdict(self.progress),
            "position": position,
            "states": states,
            "unlogged": unlogged,
            "optim": self.arguments.optim,
            "optimizers": optimizers,
        }
        save_state(folder, state)

    def restore(self, checkpoint: Path):
        """Goes on where a checkpoint was written; its weights are loaded by the caller."""
        state = load_state(checkpoint)
        if state["optim"] != self.arguments.optim:
            raise ValueError(f"{checkpoint} was trained with --optim {state['optim']}, not {self.arguments.optim}.")
        self.progress, self.position = Progress(**state["progress"]), state["position"]
        self.written = self.progress.step, len(self.progress.log)
        unlogged = [] if state["unlogged"] is None else state["unlogged"].to(self.accelerator.device)
        first = self.progress.step - len(unlogged) + 1
        self.unlogged = [Step(number, figures, []) for number, figures in enumerate(unlogged, first)]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            # Options such as the learning rate are those of this run.
            load_whole(optimizer, {**saved, "param_groups": optimizer.state_dict()["param_groups"]})
        self._set_learning_rates()
        if state["states"] is not None:
            rows = slice(
                *(self.arguments.per_device_train_batch_size * (self.accelerator.process_index + i) for i in (0, 1))
            )
            hidden, cell = (tensor[rows].to(self.accelerator.device) for tensor in state["states"])
            self.states = hidden, cell

    def compare_on(self, held_out: str | None):
        """Names the held-out text of this run: of another one the lowest perplexity so far says nothing.

        The model that is published is then the best from here on, or the last, if nothing is held out any more.
        """
        progress = self.progress
        if progress.held_out != held_out and progress.best_step is not None:
            self._print(
                f"Step {progress.best_step} was the best on {progress.held_out or 'other text'}, and here "
                f"{held_out or 'nothing'} is held out: the best step is looked for anew."
            )
            progress.best_perplexity, progress.best_step, progress.evaluations_since_best = math.inf, None, 0
        progress.held_out = held_out

    def _stop(self):
        self._save()
        number = int(self.signal or signal.SIGTERM)  # another process may be the one that got it
        self._print(
            f"Stopped at step {self.progress.step} by signal {number}; "
            f"{self.checkpoints.find(self.progress.step)} is complete. Go on with --resume_from_checkpoint last."
        )
        raise Stopped(128 + number)

    @contextmanager
    def _catch_signals(self):
        """The first SIGTERM or Ctrl-C ends the step with a checkpoint; a second one acts as ever."""

        def remember(number, _):
            self.signal = number
            restore()

        def restore():
            for number, handler in before.items():
                signal.signal(number, handler)

        before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            restore()

    def _progress_bar(self) -> tqdm:
        done, hidden = self.progress.step, not self.accelerator.is_main_process
        return tqdm(initial=done, total=self.num_steps, unit="step", disable=hidden, dynamic_ncols=True)

    def _print(self, text: str):
        if self.accelerator.is_main_process:
            tqdm.write(text)

    def _sum_over_processes(self, *values: float) -> list[float]:
        sums = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if self.host_group is not None:
            dist.all_reduce(sums, group=self.host_group)
        return sums.tolist()


def _to_device(inputs: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
