"""Options of the pretraining loop. Options of optimizers are in `optimization.py`, options of texts in `corpus.py`."""

import math
from dataclasses import dataclass
from typing import Any

from modeling_elmo.run_scripts.pretraining.corpus import Survey
from modeling_elmo.run_scripts.pretraining.optimization import OptimizationArguments
from modeling_elmo.run_scripts.program.command_line import option, refuse_unread
from modeling_elmo.run_scripts.program.processes import check_workers


@dataclass(kw_only=True)
class PretrainingArguments(OptimizationArguments):
    """Options of the loop, named as in transformers' `TrainingArguments` wherever it has the same option."""

    output_dir: str = option(..., "Folder for checkpoints and, after training, for the model.")
    per_device_train_batch_tokens: int = option(4096, "Maximum tokens per batch, including padding (context sentence).")
    per_device_train_batch_size: int = option(128, "Number of rows that are read side by side (context stream).")
    per_device_eval_batch_tokens: int = option(
        4096, "Maximum tokens per batch of held-out sentences, including padding."
    )
    gradient_accumulation_steps: int = option(1, "Number of batches per step on each device.")
    max_steps: int = option(-1, "Number of training steps; overrides --num_train_epochs. -1: no maximum.")
    num_train_epochs: float = option(10.0, "Number of passes over the training text.")
    logging_steps: int = option(50, "Steps between two entries of the log.")
    eval_steps: int = option(1000, "Steps between two evaluations on held-out text.")
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
    bf16: bool = option(False, "Mixed precision in bfloat16.")
    tf32: bool = option(True, "Products of float32 matrices in TF32 on CUDA.")
    torch_compile: bool = option(False, "Compile the model with torch.compile, except the loop over time steps.")
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


def check_context(arguments: Any, context: str, options: dict[str, list[str]]):
    """Refuses options that are not read in this context; `options` has those that only one context reads."""
    (other,) = options.keys() - {context}
    advice = f"pass --{options[context][0]} instead, or --context {other}."
    refuse_unread(arguments, options[other], f"with --context {context}: {advice}")
