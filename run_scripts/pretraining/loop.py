"""The training loop of the biLM: steps, evaluation and checkpoints, on one or several processes.

A step depends only on the seed, its number and the position in the text, because the generators of dropout and of
sampled candidates are seeded for each step. So an interrupted run continues exactly as if nothing had happened.
"""

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm

from modeling_elmo import ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.kernels.torch_state import is_sharded, to_device

from ..program.command_line import option
from ..program.forecast import Forecast
from ..program.processes import check_workers
from .batches import LMBatch, SentenceBatches, StreamWindows, batch_loader
from .checkpoints import TRAINING_STATE, Checkpoints, Progress, load_state, on_main_process
from .corpus import Corpus, CorpusArguments, Survey
from .evaluation import evaluate, held_out_batches
from .graph import StepGraph
from .optimization import (
    OptimizationArguments,
    clip_gradients,
    gathered,
    learning_rate_factor,
    make_optimizers,
    parameter_names,
    reduce_sparse_gradients,
    restore_optimizer,
)

STATE_KEYS = {"progress", "position", "states", "unlogged", "optim", "optimizers", "parameter_names"}
OF_SCHEDULE = ("max_steps", "num_train_epochs", "learning_rate", "lr_scheduler_type", "warmup_steps", "decay_steps")


@dataclass(kw_only=True)
class PretrainingArguments(OptimizationArguments):
    """Options of the loop, named as in transformers' `TrainingArguments` wherever it has the same option."""

    output_dir: str = option(..., "Folder for checkpoints and, after training, for the model.")
    per_device_train_batch_tokens: int = option(4096, "Maximum tokens per batch, including padding (context sentence).")
    per_device_train_batch_size: int = option(128, "Number of rows that are read in parallel (context stream).")
    per_device_eval_batch_tokens: int = option(
        4096, "Maximum tokens per batch of held-out sentences, including padding."
    )
    gradient_accumulation_steps: int = option(1, "Number of batches per step on each device.")
    max_steps: int = option(-1, "Number of training steps; overrides --num_train_epochs. -1: no maximum.")
    num_train_epochs: float = option(10.0, "Number of passes over the training text.")
    logging_steps: int = option(50, "Steps between two entries of the log.")
    eval_steps: int | None = option(
        None, "Steps between two evaluations on held-out text. Default: a tenth of all, 50 to 1000."
    )
    save_steps: int = option(1000, "Steps between two checkpoints.")
    save_total_limit: int | None = option(2, "Number of checkpoints to keep; the best and the last are always kept.")
    early_stopping_patience: int | None = option(
        None, "Number of evaluations without a lower perplexity that ends the training."
    )
    resume_from_checkpoint: str | None = option(None, "Checkpoint to resume from: `last`, or its folder.")
    seed: int = option(42, "Seed of initial weights, order of the text, dropout and sampled candidates.")
    dataloader_num_workers: int = option(
        1, "Number of processes per device that prepare batches (context stream: 0 or 1)."
    )
    fsdp_softmax: bool = option(
        False, "Shard a full or adaptive softmax and its optimizer state over the devices (FSDP 2)."
    )
    bf16: bool = option(False, "Mixed precision in bfloat16; float32 on a CPU without its instructions.")
    tf32: bool = option(True, "TF32 for products of float32 matrices on CUDA.")
    cuda_graph: bool = option(
        False,
        "A trial: launch the forward and backward pass of a batch at once (context sentence, one process). For batches "
        "up to some sizes, which are enlarged during the training; the log says how many that were.",
    )
    use_cpu: bool = option(False, "Train on the CPU even if there is an accelerator.")
    report_to: str = option("tensorboard", "Trackers that Accelerate supports, separated by commas; or `none`.")

    def __post_init__(self):
        super().__post_init__()
        check_workers(self.dataloader_num_workers)

    def number_of_steps(self, context: str, survey: Survey | None, num_processes: int) -> int:
        """`--max_steps`, or an estimate from the size of the text."""
        if self.max_steps > 0:
            return self.max_steps
        assert survey is not None  # a streamed data set needs --max_steps
        if context == "sentence":
            tokens, per_batch = survey.words + 2 * survey.lines, self.per_device_train_batch_tokens
        else:
            tokens, per_batch = survey.words + survey.lines, self.per_device_train_batch_size * self.unroll_steps
        return math.ceil(
            self.num_train_epochs * tokens / (per_batch * self.gradient_accumulation_steps * num_processes)
        )


class StopSignal:
    """Within its `with` block, remembers the first SIGTERM or Ctrl-C in the main thread. A second one acts as usual."""

    received: int | None = None

    def __enter__(self) -> "StopSignal":
        self.handlers: dict[signal.Signals, Any] = {}
        if current_thread() is main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self.handlers[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _):
        self.received = number
        self.__exit__()


@dataclass(eq=False)
class Pretraining:
    """A training run on the batches of this process."""

    accelerator: Accelerator
    arguments: PretrainingArguments
    model: ELMoForPreTraining  # with the weights to start from
    tokenizer: ELMoTokenizer
    corpus: Corpus
    corpus_args: CorpusArguments
    survey: Survey | None  # of the corpus
    held_out: Corpus | None

    def __post_init__(self):
        accelerator, arguments, model = self.accelerator, self.arguments, self.model
        self.checkpoints = Checkpoints(Path(arguments.output_dir), arguments.save_total_limit)
        self.is_sampled = model.config.softmax_type == "sampled"
        # Word vectors have dense gradients, so a softmax that shares their table has them, too.
        model.softmax.sparse_gradients = self.is_sampled and not model.config.tie_word_embeddings
        if model.softmax.sparse_gradients and accelerator.device.type == "mps" and torch.__version__ < "2.9":
            raise ValueError(
                f"--softmax_type sampled needs sparse tensors, which torch {torch.__version__} lacks on mps. Install "
                "torch 2.9 or newer, or pass --use_cpu or --softmax_type full."
            )
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default, but torch's Adagrad warns unless it is set
        self.plain_model = model.train().to(accelerator.device)
        if arguments.fsdp_softmax:
            self._shard_softmax()
        self.model = accelerator.prepare(model)
        self.optimizers = make_optimizers(model, arguments)
        # Exact or estimated, for the schedule and the progress bar.
        self.num_steps = arguments.number_of_steps(self.corpus_args.context, self.survey, accelerator.num_processes)
        self.rate_factor = learning_rate_factor(arguments, self.num_steps)
        self.eval_steps = arguments.eval_steps or min(1000, max(50, self.num_steps // 10))
        self.log_frequencies_V = self.survey and self.survey.log_frequencies(model.config.vocab_size)
        self.progress = Progress()
        self._set_learning_rates()
        self.graph = self._graph() if arguments.cuda_graph else None
        self.states: tuple[Tensor, Tensor] | None = None  # of the LSTMs, at the end of the last window of a stream
        self.position: Any = None  # of this process in the training text
        # Joint, forward and backward loss and norm of the gradient of each step since the last entry of the log, on the
        # device, so that no step waits for them.
        self.unlogged: list[Tensor] = []
        self.seconds_waited, self.log_start, self.predictions_since_log = 0.0, time.perf_counter(), 0
        self.signal = StopSignal()
        # Numbers that the host needs at each step have a group on the CPU: it need not wait for the accelerator.
        self.host_group = dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None

    def _graph(self) -> StepGraph | None:
        """A message says why there is none."""
        arguments, graph = self.arguments, None
        if self.corpus_args.context != "sentence":
            obstacle: str | None = f"it is for --context sentence, not {self.corpus_args.context}"
        elif self.accelerator.num_processes > 1:
            obstacle = "several processes share their gradients in the middle of the backward pass"
        else:
            tokens, scale = arguments.per_device_train_batch_tokens, arguments.gradient_scale
            assert scale is not None  # the options set a default
            graph = StepGraph(self.plain_model, tokens, scale, self.accelerator.autocast)
            obstacle = graph.obstacle()
        if obstacle is not None:
            self._print(f"--cuda_graph has no effect here: {obstacle}.")
            return None
        return graph

    def train(self):
        """Trains from the step of `self.progress` to the end. Raises `SystemExit` after SIGTERM or Ctrl-C."""
        if self.progress.step == 0 and self.plain_model.config.has_softmax:  # a new softmax of a checkpoint is random
            self._evaluate()
        self.batches = self._batches()
        batches = iter(batch_loader(self.batches, self.arguments.dataloader_num_workers))
        self.log_start = time.perf_counter()
        self.forecast = Forecast(self.arguments.max_steps, self.arguments.num_train_epochs)
        done, is_hidden = self.progress.step, not self.accelerator.is_main_process
        bar = tqdm(initial=done, total=self.num_steps, unit="step", disable=is_hidden, dynamic_ncols=True)
        with self.signal, bar:
            self._train(batches, bar)
            self._log(bar)
            if not self.progress.step:
                raise ValueError(
                    f"--num_train_epochs {self.arguments.num_train_epochs} ends within the first batch. Pass more, or "
                    "pass --max_steps."
                )
            self._evaluate()
            self._save()

    def _batches(self) -> SentenceBatches | StreamWindows:
        """The batches of this process after its position, or from the beginning of the text."""
        arguments = self.arguments
        options = {
            "is_split_into_words": self.corpus_args.is_split_into_words,
            "shuffle_buffer": self.corpus_args.shuffle_buffer,
            "seed": arguments.seed,
            "rank": self.accelerator.process_index,
            "world_size": self.accelerator.num_processes,
            "position": self.position,
            "survey": self.survey,
            "config": self.plain_model.config,
        }
        source = self.corpus, self.tokenizer
        if self.corpus_args.context == "sentence":
            return SentenceBatches(*source, arguments.per_device_train_batch_tokens, **options)
        return StreamWindows(*source, arguments.per_device_train_batch_size, arguments.unroll_steps, **options)

    def _train(self, batches: Iterator[LMBatch], bar: tqdm):
        accumulation, processes = self.arguments.gradient_accumulation_steps, self.accelerator.num_processes
        is_checkpoint_due = False
        while not self._is_finished():
            start = time.perf_counter()
            group = [next(batches) for _ in range(accumulation)]
            self.seconds_waited += time.perf_counter() - start
            predictions, over, stop, epochs = self._sum_over_processes(
                sum(batch.num_predictions for batch in group),
                all(map(self._is_after_the_last_epoch, group)),
                bool(self.signal.received),
                group[-1].epochs_read,
            )
            if over == processes:
                break
            if is_checkpoint_due:  # not before it is known that another step follows: the last evaluation belongs to it
                self._save()
            self._step(group, int(predictions), epochs / processes)
            bar.update()
            is_checkpoint_due = self._after_step(bar)
            if stop:
                self._stop()

    def _is_finished(self) -> bool:
        patience = self.arguments.early_stopping_patience
        has_no_patience = patience is not None and self.progress.evaluations_since_best >= patience
        return has_no_patience or 0 < self.arguments.max_steps <= self.progress.step

    def _is_after_the_last_epoch(self, batch: LMBatch) -> bool:
        epochs = self.arguments.num_train_epochs if self.arguments.max_steps <= 0 else math.inf
        return batch.epoch >= epochs or batch.epochs_read > epochs

    def _shard_softmax(self):
        config = self.plain_model.config
        if self.is_sampled or config.tie_word_embeddings or self.accelerator.num_processes == 1:
            raise ValueError(
                f"--fsdp_softmax with --softmax_type {config.softmax_type} on "
                f"{self.accelerator.num_processes} process(es): it needs several processes, and a softmax that is full "
                "or adaptive and has a table of its own."
            )
        from torch.distributed.fsdp import fully_shard  # an import of a second

        fully_shard(self.plain_model.softmax)

    def _step(self, group: list[LMBatch], predictions: int, epoch: float):
        """A step on the batches of a group, which have `predictions` forward predictions on all processes."""
        arguments, number = self.arguments, self.progress.step
        prepared: list[Tensor | None] = [None] * len(group)
        if self.graph is not None:
            prepared = self.graph.prepare([batch.inputs for batch in group], predictions)
        candidates = None
        if self.is_sampled:  # the same ones on every device
            generator = torch.Generator().manual_seed(_seed(arguments.seed, number))
            candidates = self.plain_model.softmax.sample(generator)
        torch.manual_seed(_seed(arguments.seed, number, 1 + self.accelerator.process_index))
        share = predictions / self.accelerator.num_processes  # DistributedDataParallel takes the mean
        losses = []
        for batch, in_room in zip(group, prepared, strict=True):
            if in_room is None:
                losses.append(self._backward(batch, share, candidates, batch is group[-1]))
            else:
                losses.append(self.graph.run(in_room))
        parameters = list(self.plain_model.parameters())
        reduce_sparse_gradients(parameters)
        norm = clip_gradients(parameters, arguments.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.graph is None)  # which adds to the same memory at each step
        self.position = group[-1].position
        self.predictions_since_log += predictions
        self.progress.step += 1
        self.progress.predictions += predictions
        self.progress.epoch = epoch
        self._set_learning_rates()
        self.unlogged.append(torch.cat([torch.stack(losses).sum(0), norm[None]]))

    def _set_learning_rates(self):
        rate, done = self.arguments.learning_rate, self._steps_done()
        assert rate is not None  # the options set a default
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * self.rate_factor(done)

    def _steps_done(self) -> float:
        """The number of steps, or without --max_steps their share by the part of the text that has been read."""
        if self.arguments.max_steps > 0:
            return float(self.progress.step)
        return self.num_steps * min(1.0, self.progress.epoch / self.arguments.num_train_epochs)

    def _backward(self, batch: LMBatch, num_items: float, candidates, is_last: bool) -> Tensor:
        """Adds the gradient of a batch. Returns its losses `(3,)`: joint, forward, backward."""
        if self.states is not None:
            resets_B121 = to_device(batch.resets.T[:, None, :, None], self.accelerator.device)
            hidden, cell = (state.masked_fill(resets_B121, 0) for state in self.states)
            self.states = hidden, cell
        with nullcontext() if is_last else self.accelerator.no_sync(self.model):
            output = self.model(
                **batch.inputs, initial_states=self.states, num_items_in_batch=num_items, candidates=candidates
            )
            self.accelerator.backward(output.loss * self.arguments.gradient_scale)
        if batch.resets is not None:
            hidden, cell = output.final_states
            self.states = hidden.detach(), cell.detach()
        return torch.stack([output.loss, output.forward_loss, output.backward_loss]).detach().float()

    def _after_step(self, bar: tqdm) -> bool:
        """Logs and evaluates if it is time. Returns whether it is time for a checkpoint."""
        arguments, step = self.arguments, self.progress.step
        if forecast := self.forecast.after_step(self._steps_done() / self.num_steps, self.progress.epoch):
            self._print(forecast)
        if step % arguments.logging_steps == 0:
            self._log(bar)
        is_best = step % self.eval_steps == 0 and self._evaluate()
        return is_best or step % arguments.save_steps == 0

    def _log(self, bar: tqdm):
        if not self.unlogged:
            return
        joint, forward, backward, norm = self._checked_figures().double().mean(0).tolist()
        seconds = time.perf_counter() - self.log_start
        entry = {
            "sampled_loss" if self.is_sampled else "loss": joint,
            "forward_loss": forward,
            "backward_loss": backward,
            "gradient_norm": norm,
            "learning_rate": self.optimizers[0].param_groups[0]["lr"],
            "words_per_second": self.predictions_since_log / seconds,
            "data_wait": self.seconds_waited / seconds,
        }
        if self.graph is not None:
            entry["in_cuda_graph"] = self.graph.share_since_last_call()
        bar.set_postfix_str(
            f"loss {joint:.3f}, {entry['words_per_second']:,.0f} words/s, epoch {self.progress.epoch:.2f}"
        )
        self._add_to_log(entry)
        self.unlogged, self.seconds_waited, self.predictions_since_log = [], 0.0, 0
        self.log_start = time.perf_counter()

    def _checked_figures(self) -> Tensor:
        """On the CPU, the figures `(steps, 4)` since the last entry of the log, means over all processes."""
        figures_S4 = self.accelerator.reduce(torch.stack(self.unlogged), "mean").cpu()
        is_finite_S4 = figures_S4.isfinite()
        if not is_finite_S4.all():
            first = int((~is_finite_S4.all(1)).nonzero()[0])
            raise FloatingPointError(
                f"The {'gradient' if is_finite_S4[first, :3].all() else 'loss'} of step "
                f"{self.progress.step - len(self.unlogged) + 1 + first} is not a number. "
                f"{self._again_with('a lower --learning_rate or --max_grad_norm')}"
            )
        return figures_S4

    def _again_with(self, options: str) -> str:
        last = self.checkpoints.last()
        if last is None:
            return f"There is no checkpoint yet. Run the same command with {options}."
        resume = "--resume_from_checkpoint last"
        return f"The last good checkpoint is {last}. Run the same command with {resume} and {options}."

    def _evaluate(self) -> bool:
        """Measures held-out perplexity. Returns whether it is the lowest so far."""
        evaluated = {entry["step"] for entry in self.progress.log if "perplexity" in entry}
        if self.held_out is None or self.progress.step in evaluated:
            return False
        start = time.perf_counter()
        if self.arguments.fsdp_softmax:  # gathered once: the processes have different numbers of held-out batches
            self.plain_model.softmax.unshard()
        how = self.corpus_args.is_split_into_words, "sentence", self.arguments.per_device_eval_batch_tokens
        batches = held_out_batches(self.held_out, *how, self.tokenizer, self.accelerator)
        found = evaluate(self.plain_model, batches, self.accelerator, self.log_frequencies_V)
        if self.arguments.fsdp_softmax:
            self.plain_model.softmax.reshard()
        if message := self.progress.evaluate_over(found.predictions):
            self._print(message)
        self._print(f"step {self.progress.step}: {found}")
        self._add_to_log(asdict(found))
        self.log_start += time.perf_counter() - start
        return self.progress.is_best(found.perplexity)

    def _add_to_log(self, entry: dict[str, Any]):
        self.progress.log.append({"step": self.progress.step, "epoch": round(self.progress.epoch, 4), **entry})
        numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
        self.accelerator.log(numbers, step=self.progress.step)

    def _save(self):
        """Writes a checkpoint of this step, unless there is one. All processes call it; the main process writes."""
        start = time.perf_counter()
        unlogged = self._checked_figures() if self.unlogged else None
        self._check_weights()
        states = None if self.states is None else [state.cpu() for state in self.accelerator.gather(self.states)]
        weights = gathered(self.plain_model.state_dict())
        state = {
            "progress": asdict(self.progress),
            "position": self.batches.merge_positions(gather_object([self.position])),
            "states": states,
            "unlogged": unlogged,
            "optim": self.arguments.optim,
            "optimizers": gathered([optimizer.state_dict() for optimizer in self.optimizers]),
            "graph": self.graph and self.graph.state_dict(),
            "parameter_names": [parameter_names(optimizer, self.plain_model) for optimizer in self.optimizers],
        }
        on_main_process(self.accelerator, lambda: self._write(weights, state))
        self.log_start += time.perf_counter() - start

    def _write(self, weights: dict[str, Tensor], state: dict[str, Any]):
        def fill(folder: Path):
            self.plain_model.save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)
            (folder / "training_log.json").write_text(json.dumps(self.progress.log, indent=1), encoding="utf-8")
            torch.save(state, folder / TRAINING_STATE)

        if self.checkpoints.find(self.progress.step) is None:
            self.checkpoints.save(self.progress.step, fill)
        self.checkpoints.rotate(self.progress.best_step)

    def _check_weights(self):
        """Loss and gradient of the last step were computed with the weights before it."""
        own = (weight.to_local() if is_sharded(weight) else weight for weight in self.plain_model.parameters())
        is_finite = torch.stack([weight.isfinite().all() for weight in own]).all().float()
        if self.accelerator.reduce(is_finite) < self.accelerator.num_processes:  # each has its part of sharded weights
            raise FloatingPointError(
                f"Weights after step {self.progress.step} are not numbers. "
                f"{self._again_with('a lower --learning_rate')}"
            )

    def restore(self, checkpoint: Path) -> float:
        """Continues from a checkpoint, whose weights the model already has. Returns its learning rate."""
        state = load_state(checkpoint)
        if missing := sorted(STATE_KEYS.difference(state)):
            raise ValueError(
                f"{checkpoint / TRAINING_STATE} was not written by this program: it lacks {', '.join(missing)}. Pass "
                "another checkpoint."
            )
        if state["optim"] != self.arguments.optim:
            raise ValueError(
                f"{checkpoint} was trained with --optim {state['optim']}, not {self.arguments.optim}. Pass the former."
            )
        self.progress, self.position = Progress(**state["progress"]), state["position"]
        self.unlogged = [] if state["unlogged"] is None else [*state["unlogged"].to(self.accelerator.device)]
        for optimizer, *saved in zip(self.optimizers, state["optimizers"], state["parameter_names"], strict=True):
            restore_optimizer(optimizer, self.plain_model, *saved)
        self._set_learning_rates()
        if self.graph is not None and state.get("graph"):
            self.graph.load_state_dict(state["graph"])
        if state["states"] is not None:
            rows = self.arguments.per_device_train_batch_size
            first = rows * self.accelerator.process_index
            hidden, cell = (tensor[first : first + rows].to(self.accelerator.device) for tensor in state["states"])
            self.states = hidden, cell
        return float(state["optimizers"][0]["param_groups"][0]["lr"])

    def tell_where_it_continues(self, checkpoint: Path, rate_before: float):
        """Prints the step and the epoch, and the options that move the schedule of the learning rate, if any do."""
        progress, rate = self.progress, self.optimizers[0].param_groups[0]["lr"]
        steps, epochs = self.arguments.max_steps, self.arguments.num_train_epochs
        place = f"step {progress.step:,}, epoch {progress.epoch:.2f} of {epochs:g}"
        end, is_over = f"epoch {epochs:g}", progress.epoch > epochs  # `num_steps` is an estimate
        if steps > 0:
            place = f"step {progress.step:,} of {steps:,}, epoch {progress.epoch:.2f}"
            end, is_over = f"step {steps:,}", progress.step > steps
        if is_over:
            self._print(
                f"{checkpoint} is at {place}, and this run ends after {end}: nothing is left to train. Pass a larger "
                "--max_steps or --num_train_epochs to continue."
            )
            return
        self._print(f"Continuing {checkpoint} at {place}.")
        kind = self.arguments.lr_scheduler_type
        effect, constant = f"moves the {kind} schedule", "the schedule"
        if kind == "constant":
            effect, constant = "changes the learning rate", "the learning rate"
        changes = self._changes_of_the_schedule()
        if changes and (rate != rate_before or kind != "constant"):
            self._print(
                f"{' and '.join(changes)}, which {effect}: the learning rate is {rate:.3g} here, and was "
                f"{rate_before:.3g}. To keep {constant}, pass the same options."
            )

    def _changes_of_the_schedule(self) -> list[str]:
        now = vars(self.arguments)
        before = {item.name: item.default for item in fields(self.arguments)} | (self.progress.settings or {})
        names = [name for name in OF_SCHEDULE if before[name] != now[name]]
        if min(before["max_steps"], now["max_steps"]) > 0 and "num_train_epochs" in names:
            names.remove("num_train_epochs")  # the steps decide
        return [f"--{name} was {before[name]} and is now {now[name]}" for name in names]

    def _stop(self):
        self._save()
        number = int(self.signal.received or signal.SIGTERM)  # another process may have received it
        self._print(
            f"Stopped at step {self.progress.step} by signal {number}; "
            f"{self.checkpoints.find(self.progress.step)} is complete. To continue, run the same command with "
            "--resume_from_checkpoint last."
        )
        raise SystemExit(128 + number)  # the shell's exit status

    def _print(self, text: str):
        if self.accelerator.is_main_process:
            tqdm.write(text)

    def _sum_over_processes(self, *values: float) -> list[float]:
        sums = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if self.host_group is not None:
            dist.all_reduce(sums, group=self.host_group)
        return sums.tolist()


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
