"""Training runs of a task that take a second: in this process, or in several that a launcher starts."""

import gzip
import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import zstandard
from bilm_models import save
from pretraining_worker import ROOT, arguments_of, torchrun
from safetensors.torch import load_file
from transformers import TrainerCallback

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.run_scripts import reproduce, run_task
from modeling_elmo.run_scripts.fine_tuning import head
from modeling_elmo.run_scripts.fine_tuning.trainer import TaskTrainer

TASKS = Path(__file__).parent / "fixtures" / "tasks"
ENDINGS = {"wnut17": "conll", "snli": "jsonl", "rt_polarity": "tsv", "squadshifts": "json", "propbank": "tsv"}
ENDINGS |= {"litbank": "conll"}
BILM = {"char_cnn_filters": [[1, 8], [3, 8]], "lstm_hidden_size": 12, "projection_size": 8, "max_word_length": 16}
WITHOUT_DROPOUT = {"task_dropout": 0.0, "elmo_dropout": 0.0}
HEAD = {"task_hidden_size": 8, "task_num_layers": 1, "task_char_cnn_filters": [[3, 8]]}
HEAD |= {"task_dropout": 0.1, "elmo_dropout": 0.1}
FIXTURES = {"ner": "wnut17", "classify": "rt_polarity", "qa": "squadshifts", "srl": "propbank", "coref": "litbank"}
SPLITS = {"train": "train", "validation": "dev", "test": "test"}
WNUT17 = {f"{split}_file": str(TASKS / f"wnut17_{name}.conll") for split, name in SPLITS.items()}
WINDOWS = {"max_seq_length": 40, "doc_stride": 12}
LEARNING = {"no_adadelta": True, "learning_rate": 0.05, "ema_decay": 0.0}  # as fast as a few steps need
FEW_QUESTIONS = {"max_train_samples": 6, "max_eval_samples": 4, "max_steps": 1, "test_file": None}


def bilm(folder: Path, seed: int = 0, **options) -> Path:
    """A folder with a random biLM and its tokenizer, by default without a vocabulary."""
    tokenizer = ELMoTokenizer(**{"max_word_length": 16, "pre_tokenization": "whitespace"} | options)
    torch.manual_seed(seed)
    return save(
        folder, ELMoForPreTraining(ELMoConfig.from_preset("tiny", **BILM, vocab_size=len(tokenizer))), tokenizer
    )


def options_of(folder: Path, data: str = "wnut17", **options) -> dict[str, Any]:
    """The options of a run of two epochs, four steps, on the biLM in `folder / "bilm"`."""
    defaults = {
        "model_name_or_path": folder / "bilm",
        "config_overrides": json.dumps(HEAD | options.pop("config_overrides", {})),
        **{f"{split}_file": TASKS / f"{data}_{file}.{ENDINGS[data]}" for split, file in SPLITS.items()},
        "output_dir": folder / "run",
        "num_train_epochs": 2,
        "learning_rate": 0.02,
        "use_cpu": True,
        "disable_tqdm": "true",
    }
    return defaults | options


def train_head(task: str, folder: Path, data: str | None = None, **options) -> dict[str, Any]:
    """The record of `elmo TASK`."""
    return run_task.main([task, *arguments_of(options_of(folder, data or FIXTURES[task], **options))])


def experiment(task: str, folder: Path, **options) -> list[dict[str, Any]]:
    """The records of `elmo reproduce TASK`."""
    return reproduce.main([task, *arguments_of(options_of(folder, FIXTURES[task], **options))])


def tagger_options(folder: Path, output: Path, **options) -> dict[str, Any]:
    """The options of three epochs of six steps on the files of `capitals`: each epoch and model has another score."""
    files = {f"{split}_file": folder / f"{split}.conll" for split in ("train", "validation", "test")}
    run = {"per_device_train_batch_size": 10, "learning_rate": 0.05, "num_train_epochs": 3, "output_dir": output}
    return {**files, **run, **options}


def train_tagger(folder: Path, output: Path, **options) -> dict[str, Any]:
    """The record of `elmo ner`."""
    return train_head("ner", folder, **tagger_options(folder, output, **options))


def tagger_experiment(folder: Path, output: Path, **options) -> list[dict[str, Any]]:
    """The records of `elmo reproduce ner`."""
    return experiment("ner", folder, **tagger_options(folder, output, **options))


def trainer_with(action: Callable[[TaskTrainer], Any]) -> type[TaskTrainer]:
    """A class of trainers; each new trainer is passed to `action`."""

    class TrainerWithAction(TaskTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            action(self)

    return TrainerWithAction


@contextmanager
def interrupted(event: str = "on_save", number: int = 1):
    """Ctrl-C ends the training inside at this event of a callback."""
    with patch.object(head, "TaskTrainer", stopping_trainer(event, number)), pytest.raises(KeyboardInterrupt):
        yield


def stopping_trainer(event: str, number: int = 1) -> type[TaskTrainer]:
    """A trainer that Ctrl-C interrupts at this event of a callback."""
    events = []

    def interrupt(*_, **__):
        events.append(event)
        if len(events) == number:
            raise KeyboardInterrupt

    return trainer_with(lambda trainer: trainer.add_callback(type("Stop", (TrainerCallback,), {event: interrupt})))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def written(path: Path, text: str) -> Path:
    """The path, after the text was written there: compressed, if its ending says so."""
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix.lower(), bytes)
    path.write_bytes(packed(text.encode()))
    return path


def predictions_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def sentences_of(path: Path) -> list[tuple[list[str], list[str]]]:
    """Words and tags of a file with a word per line, read by a plain loop."""
    pairs = [[]]
    for line in path.read_text("utf-8").splitlines():
        if line.strip():
            pairs[-1].append(tuple(line.split("\t")))
        elif pairs[-1]:
            pairs.append([])
    return [tuple(map(list, zip(*sentence, strict=True))) for sentence in pairs if sentence]


def questions_of(name: str) -> list[dict[str, Any]]:
    """The questions of a fixture, read by a plain loop."""
    articles = read_json(TASKS / f"squadshifts_{name}.json")["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    return [{"context": paragraph["context"], **asked} for paragraph in paragraphs for asked in paragraph["qas"]]


def write_questions(path: Path, questions: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(question) + "\n" for question in questions), "utf-8")
    return path


def role_sentences_of(path: Path) -> list[tuple[list[str], list[str], list[list[str]]]]:
    """Words, lemmas or -, and brackets of each predicate, of a file of PropBank, read by a plain loop."""
    sentences = []
    for block in path.read_text("utf-8").strip().split("\n\n"):
        columns = list(map(list, zip(*(line.split("\t") for line in block.splitlines()), strict=True)))
        sentences.append((columns[2], columns[4], columns[6:]))
    return sentences


def capitals(folder: Path) -> dict[str, Path]:
    """The sentences of `wnut17` with capitalized words as entities: easy enough for a run of one epoch."""
    files = {}
    for split, name in SPLITS.items():
        lines = []
        for words, _ in sentences_of(TASKS / f"wnut17_{name}.conll"):
            before = "O"
            for word in words:
                tag = ("B-NAME" if before == "O" else "I-NAME") if word[0].isupper() else "O"
                lines.append(f"{word}\t{tag}\n")
                before = tag
            lines.append("\n")
        files[f"{split}_file"] = folder / f"{split}.conll"
        files[f"{split}_file"].write_text("".join(lines), "utf-8")
    return files


def assert_same_weights(found: Path, expected: Path, **tolerance):
    """Compares the models in two folders, bit for bit unless a tolerance is given."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (found, expected))
    assert ours.keys() == theirs.keys()
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, msg=f"{name}: {{}}".format, **tolerance)


def launch(processes: int, script: str, options: dict[str, Any], *first: str):
    """Starts a program as on a machine without accelerator."""
    options = {name: value for name, value in options.items() if name != "use_cpu"}
    command = [ROOT / "run_scripts" / f"{script}.py", *first, *arguments_of(options)]
    process = torchrun(["--standalone", "--nproc_per_node", str(processes)], *command)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-4000:]
