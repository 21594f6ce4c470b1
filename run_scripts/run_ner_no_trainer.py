r"""The tagger of `elmo ner` in a plain Accelerate loop, for those who want to change the loop.

    python -m modeling_elmo.run_scripts.run_ner_no_trainer --model_name_or_path elmo \
        --train_file train.conll --validation_file dev.conll --output_dir tagger

It keeps the epoch with the best validation score. `accelerate launch -m` runs it in several processes.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers.utils import CONFIG_NAME, logging

from modeling_elmo.run_scripts.fine_tuning.head import BasicHeadArguments, HeadArguments, task_model, task_tokenizer
from modeling_elmo.run_scripts.fine_tuning.task import SplitOutput
from modeling_elmo.run_scripts.fine_tuning.tasks.tagging import Tagging, TaggingArguments
from modeling_elmo.run_scripts.fine_tuning.trainer import DIVERGED, likely_cause
from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, run
from modeling_elmo.run_scripts.program.models import broken_weights
from modeling_elmo.run_scripts.program.processes import check_processes, has_accelerator, sole_run

logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class LoopArguments:
    """Names as in `TrainingArguments`."""

    output_dir: str = option(..., "Folder for the best model.")
    num_train_epochs: int = option(20, "Number of passes over the training data.")
    learning_rate: float = option(1e-3, "Learning rate of Adam.")
    per_device_train_batch_size: int = option(32, "Sentences per training batch in each process.")
    gradient_accumulation_steps: int = option(1, "Batches per optimizer step.")
    per_device_eval_batch_size: int = option(64, "Sentences per evaluation batch.")
    max_grad_norm: float = option(5.0, "Maximum norm of the gradient.")
    seed: int = option(42, "Seed of new weights, data order and dropout.")


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    """Returns the scores of each epoch."""
    parser = ProgramParser(BasicHeadArguments, TaggingArguments, LoopArguments, description=__doc__)
    model_options, data_options, loop = parser.parse(arguments)
    head, task = HeadArguments(**vars(model_options)), Tagging.read(data_options)
    if not {"train", "validation"} <= {*task.data}:
        raise ValueError(f"There are only the splits {', '.join(task.data)}; pass --train_file and --validation_file.")
    if Path(loop.output_dir, CONFIG_NAME).exists():
        raise FileExistsError(f"{loop.output_dir} holds a model; pass another --output_dir.")
    accelerator = Accelerator(cpu=not has_accelerator(), gradient_accumulation_steps=loop.gradient_accumulation_steps)
    check_processes(accelerator.num_processes)
    with sole_run(Path(loop.output_dir), is_main_process=accelerator.is_main_process):
        epochs = train(accelerator, task, head, loop)
    accelerator.free_memory()  # torch may hang if DistributedDataParallel outlives its process group
    accelerator.end_training()
    return epochs


def train(accelerator: Accelerator, task: Tagging, head: HeadArguments, loop: LoopArguments) -> list[dict[str, float]]:
    """Keeps the model of the best epoch. Returns the scores of each epoch."""
    set_seed(loop.seed)
    vectors = head.read_word_vectors()
    tokenizer = task_tokenizer(task, head, task.data["train"], vectors)
    model = task_model(task, head, tokenizer, vectors, loop.seed)
    splits, loaders = task.encode_splits(tokenizer), {}
    for split, rows in splits.items():
        is_train = split == "train"
        size = loop.per_device_train_batch_size if is_train else loop.per_device_eval_batch_size
        loaders[split] = DataLoader(rows, size, shuffle=is_train, collate_fn=task.feature_collator(tokenizer, None))
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=loop.learning_rate)
    model, optimizer, *prepared = accelerator.prepare(model, optimizer, *loaders.values())
    loaders = dict(zip(loaders, prepared, strict=True))
    epochs: list[dict[str, float]] = []
    best: dict[str, str | None] = {}  # what is wrong with the best epoch, by split
    for epoch in range(1, loop.num_train_epochs + 1):
        loss = train_epoch(accelerator, model, optimizer, loaders["train"], loop.max_grad_norm, epoch)
        scores, failures = {}, {}
        for split in [name for name in splits if name != "train"]:
            output = SplitOutput(*predict(accelerator, model, loaders[split]), task.data[split], splits[split])
            predictions = list(task.predictions(output))
            of_split = task.scores(predictions)
            scores[split], failures[split] = of_split[task.metric], task.failure(predictions, of_split)
        epochs.append({"epoch": epoch, "loss": loss, **scores})
        accelerator.print(epochs[-1])
        if accelerator.is_main_process and max(epochs, key=lambda each: each["validation"]) is epochs[-1]:
            best = failures
            if name := broken_weights(model):
                raise ValueError(f"The weights of {name} are not finite: {DIVERGED}")
            accelerator.unwrap_model(model).save_pretrained(loop.output_dir)
            tokenizer.save_pretrained(loop.output_dir)
    steps = loop.num_train_epochs * math.ceil(len(loaders["train"]) / loop.gradient_accumulation_steps)
    cause = likely_cause(steps, loop.learning_rate, LoopArguments.learning_rate)
    for split, failure in best.items():
        if failure:
            logger.warning(f"{loop.output_dir}, split {split!r}: {failure}. Likely cause: {cause}.")
    return epochs


def train_epoch(accelerator: Accelerator, model, optimizer, batches, max_grad_norm: float, epoch: int) -> float:
    model.train()
    losses = []
    for batch in tqdm(batches, desc=f"epoch {epoch}", disable=not accelerator.is_main_process):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return accelerator.reduce(torch.stack(losses).mean(), "mean").item()


@torch.no_grad()
def predict(accelerator: Accelerator, model, batches) -> tuple[np.ndarray, np.ndarray]:
    """The logits and labels of all sentences, padded with -100 to one length."""
    model.eval()
    logits, labels = [], []
    for batch in batches:
        pair = accelerator.pad_across_processes((model(**batch).logits, batch["labels"]), dim=1, pad_index=-100)
        for rows, found in zip((logits, labels), accelerator.gather_for_metrics(pair), strict=True):
            rows.extend(found.float().cpu())
    padded = [pad_sequence(rows, batch_first=True, padding_value=-100).numpy() for rows in (logits, labels)]
    return padded[0], padded[1].astype(int)


if __name__ == "__main__":
    run(main)
