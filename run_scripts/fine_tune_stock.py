"""Fine-tunes a tagger of named entities with transformers' Trainer, `datasets` and seqeval. Copy it and change it.

    python run_scripts/fine_tune_stock.py --model_name_or_path model_cards/elmo-small-en --train_file train.conll \
        --validation_file dev.conll --output_dir tagger --num_train_epochs 10 --learning_rate 1e-3

Files have a word and its tag in each line, and an empty line between sentences; `--dataset NAME` reads a data set with
the columns `tokens` and `ner_tags` instead. `elmo ner` adds what this script leaves out: other formats and tag schemes,
words of the training data, records, a card with figures, and resuming with the same data and settings only. If the
model's folder has its code, delete `import modeling_elmo`; the script then needs only transformers.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset
from seqeval.metrics import f1_score, precision_score, recall_score
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

import modeling_elmo  # noqa: F401 (registers ELMo; folders of `model_cards/` have no code)

IGNORED = -100  # label of the markers and of padding, which the loss leaves out


@dataclass
class StockArguments:
    model_name_or_path: str = field(metadata={"help": "Folder or Hub name of a biLM."})
    train_file: str | None = field(default=None, metadata={"help": "Training file."})
    validation_file: str | None = field(default=None, metadata={"help": "Validation file."})
    dataset: str | None = field(default=None, metadata={"help": "Name on the Hub, or folder, instead of files."})


def sentences(path: str) -> list[dict[str, list[str]]]:
    """The words (first column) and tags (last column) of each sentence. Columns end at tabs, or at spaces without."""
    data = Path(path).read_bytes()
    if b"\0" in data or (b"\r" in data and b"\n" not in data):
        raise ValueError(f"{path} has NUL bytes (UTF-16?), or lines end in carriage returns. Save it as UTF-8 text.")
    blocks: list[list[list[str]]] = [[]]
    width = 0
    for number, line in enumerate(data.decode("utf-8-sig").split("\n"), 1):
        line = line.rstrip("\r")
        if not line.strip(" \t") or line.startswith("-DOCSTART-"):
            blocks.append([])
            continue
        if "\t" in line:
            fields = [cell.strip(" ") for cell in line.split("\t")]
        else:
            fields = [cell for cell in line.split(" ") if cell]
        width = width or max(len(fields), 2)
        if len(fields) != width or not (fields[0] and fields[-1]):
            raise ValueError(f"{path}, line {number} has no {width} columns, a word first and its tag last: {line!r}")
        blocks[-1].append(fields)
    rows = [[*zip(*block, strict=True)] for block in blocks if block]
    if are_no_words([words for words, *_ in rows if len(words) > 1]):
        raise ValueError(f"{path}: the first column has no words. Remove it. The columns begin with {rows[0]!s:.200}.")
    return [{"tokens": [*words], "tags": [*tags]} for words, *_, tags in rows]


def are_no_words(columns: list[tuple[str, ...]]) -> bool:
    """Whether the column counts the words of each sentence, or repeats a name."""
    if not columns:
        return False
    have_one_name = all(len(set(column)) == 1 for column in columns)
    return have_one_name or all(map(counts_up, columns))


def counts_up(column: tuple[str, ...]) -> bool:
    """From 0 or from 1."""
    numbers = tuple(map(str, range(len(column) + 1)))
    return column in (numbers[:-1], numbers[1:])


def read_data(arguments: StockArguments) -> DatasetDict:
    """The splits `train` and `validation`, with the columns `tokens` and `tags`."""
    if arguments.dataset is None:
        files = {"train": arguments.train_file, "validation": arguments.validation_file}
        if None in files.values():
            raise ValueError("Pass --train_file FILE and --validation_file FILE, or --dataset NAME.")
        return DatasetDict({split: Dataset.from_list(sentences(str(path))) for split, path in files.items()})
    data = load_dataset(arguments.dataset)
    names = data["train"].features["ner_tags"].feature.names
    return data.map(lambda row: {"tags": [names[number] for number in row["ner_tags"]]})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Returns the scores of the validation data."""
    options, training = HfArgumentParser((StockArguments, TrainingArguments)).parse_args_into_dataclasses(arguments)
    set_seed(training.seed)
    data = read_data(options)
    labels = sorted({tag for tags in data["train"]["tags"] for tag in tags} | {"O"})
    label_ids = {label: number for number, label in enumerate(labels)}
    unknown = {tag for tags in data["validation"]["tags"] for tag in tags}.difference(labels)
    if unknown:
        raise ValueError(f"The training data has no {min(unknown)!r}; pass more, or correct the validation data.")

    # A frozen biLM, the learned mix of its layers, and the paper's new network: biLSTMs and a CRF.
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path, trust_remote_code=True)
    model = AutoModelForTokenClassification.from_pretrained(
        options.model_name_or_path,
        trust_remote_code=True,
        id2label=dict(enumerate(labels)),
        label2id=label_ids,
    )

    def encode(batch: dict[str, list]) -> dict[str, Any]:
        encoding = tokenizer(batch["tokens"], is_split_into_words=True)
        numbers = []
        for row, tags in enumerate(batch["tags"]):
            words = encoding.word_ids(row)
            numbers.append([IGNORED if word is None else label_ids[tags[word]] for word in words])
        return {**encoding, "labels": numbers}

    def scores(output: Any) -> dict[str, float]:
        predicted = np.argmax(output.predictions, -1)  # labels of the best path through the CRF
        gold_tags = []
        predicted_tags = []
        for gold_row, predicted_row in zip(output.label_ids, predicted, strict=True):
            is_word = gold_row != IGNORED
            gold_tags.append([labels[number] for number in gold_row[is_word]])
            predicted_tags.append([labels[number] for number in predicted_row[is_word]])
        metrics = {"precision": precision_score, "recall": recall_score, "f1": f1_score}
        return {name: metric(gold_tags, predicted_tags) for name, metric in metrics.items()}

    rows = data.map(encode, batched=True, remove_columns=data["train"].column_names)
    trainer = Trainer(
        model,
        training,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        compute_metrics=scores,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    return trainer.evaluate()


if __name__ == "__main__":
    print(main())
