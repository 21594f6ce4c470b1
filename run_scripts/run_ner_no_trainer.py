"""The tagger of `run_ner.py`, trained by a plain Accelerate loop: for those who want to change the loop.

    python -m modeling_elmo.run_scripts.run_ner_no_trainer --model_name_or_path elmo \
        --train_file train.conll --validation_file dev.conll --output_dir tagger

One seed, no experiments. Several processes share each batch of `--per_device_train_batch_size` times their number.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from modeling_elmo.run_scripts.fine_tuning.data import TaggingDataArguments
from modeling_elmo.run_scripts.fine_tuning.features import FeatureCollator
from modeling_elmo.run_scripts.fine_tuning.task import HeadArguments, Predicted, encoded, task_model, task_tokenizer
from modeling_elmo.run_scripts.fine_tuning.word_vectors import read_word_vectors
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.run_scripts.run_ner import tagging_task


@dataclass(kw_only=True)
class LoopArguments:
    """Named as in `TrainingArguments`."""

    output_dir: str = field(metadata={"help": "Folder for the best model."})
    num_train_epochs: int = field(default=20, metadata={"help": "Passes over the training data."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Of Adam."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Sentences of a step."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Batches of a step."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Sentences at a time in evaluation."})
    max_grad_norm: float = field(default=5.0, metadata={"help": "Bound of the gradient's norm."})
    seed: int = field(default=42, metadata={"help": "Of the network's start, the order of the data, and dropout."})


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    """Returns the scores of each epoch."""
    parser = ProgramParser(HeadArguments, TaggingDataArguments, LoopArguments, description=__doc__)
    head, data, loop = parser.parse(arguments)
    task = tagging_task(data, head.max_length)
    if not {"train", "validation"} <= {*task.data}:
        raise ValueError("The loop needs --train_file and --validation_file, to keep the best epoch.")
    accelerator = Accelerator(gradient_accumulation_steps=loop.gradient_accumulation_steps)
    set_seed(loop.seed)
    vectors = None if head.word_vectors is None else read_word_vectors(head.word_vectors, head.word_vectors_limit)
    tokenizer = task_tokenizer(task, head, task.data["train"], vectors)
    model = task_model(task, head, tokenizer, vectors, loop.seed)
    collate, rows = FeatureCollator(task.collator(tokenizer), store=None), encoded(task, tokenizer)
    loaders = {split: data_loader(data, split == "train", collate, loop) for split, data in rows.items()}
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=loop.learning_rate)
    model, optimizer, *prepared = accelerator.prepare(model, optimizer, *loaders.values())
    loaders = dict(zip(loaders, prepared, strict=True))
    epochs: list[dict[str, float]] = []
    for epoch in range(1, loop.num_train_epochs + 1):
        loss = train_epoch(accelerator, model, optimizer, loaders["train"], loop.max_grad_norm, epoch)
        figures = {}
        for split in [name for name in rows if name != "train"]:
            found = Predicted(*predict(accelerator, model, loaders[split]), task.data[split], rows[split])
            figures[split] = task.scores(found)[task.metric]
        epochs.append({"epoch": epoch, "loss": loss, **figures})
        accelerator.print(epochs[-1])
        if accelerator.is_main_process and max(epochs, key=lambda found: found["validation"]) is epochs[-1]:
            accelerator.unwrap_model(model).save_pretrained(loop.output_dir)
            tokenizer.save_pretrained(loop.output_dir)
    accelerator.end_training()
    return epochs


def data_loader(rows: Dataset, is_train: bool, collate: FeatureCollator, loop: LoopArguments) -> DataLoader:
    size = loop.per_device_train_batch_size if is_train else loop.per_device_eval_batch_size
    return DataLoader(rows, size, shuffle=is_train, collate_fn=collate)


def train_epoch(accelerator: Accelerator, model, optimizer, batches, max_grad_norm: float, epoch: int) -> float:
    """The mean loss."""
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
    """Logits and labels of all sentences, padded with -100 to one length."""
    model.eval()
    logits, labels = [], []
    for batch in batches:
        pair = accelerator.pad_across_processes((model(**batch).logits, batch["labels"]), dim=1, pad_index=-100)
        for rows, found in zip((logits, labels), accelerator.gather_for_metrics(pair), strict=True):
            rows.extend(found.float().cpu().numpy())
    return padded(logits), padded(labels).astype(int)


def padded(rows: list[np.ndarray]) -> np.ndarray:
    longest = max(map(len, rows))
    return np.stack(
        [np.pad(row, [(0, longest - len(row)), *[(0, 0)] * (row.ndim - 1)], constant_values=-100) for row in rows]
    )


if __name__ == "__main__":
    run(main)
