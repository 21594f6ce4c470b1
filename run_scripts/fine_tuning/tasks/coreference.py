"""Coreference resolution: which mentions of a document are the same person, place or thing."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, StepLR
from transformers import BatchEncoding, TrainerCallback

from modeling_elmo import ELMoForCoreferenceResolution, ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.features import FeatureStore
from modeling_elmo.run_scripts.fine_tuning.task import Batch, Record, SplitOutput, Task, label_config
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference_data import (
    CoreferenceArguments,
    MentionSpan,
    read_documents,
)
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference_scores import coreference_scores
from modeling_elmo.run_scripts.fine_tuning.trainer import TaskTrainingArguments
from modeling_elmo.run_scripts.program.command_line import option

DECAY_STEPS = 100  # as in the code of Lee et al. (2017)
TOKEN_COLUMNS = ("input_ids", "character_ids", "attention_mask", "speaker_ids")  # of encodings: one value a token


@dataclass
class CoreferenceTrainingArguments(TaskTrainingArguments):
    """Trainer's arguments, with the settings of Lee et al. (2017): Adam, and a document a step."""

    _argument_group_name = "training options"

    lr_decay: float = option(
        0.999, f"Factor of the learning rate after every {DECAY_STEPS} steps. 1: --lr_scheduler_type."
    )
    num_train_epochs: float = 150
    per_device_train_batch_size: int = 1
    per_device_eval_batch_size: int = 1

    def __post_init__(self):
        super().__post_init__()
        has_schedule = self.lr_decay < 1
        for name, needed, reason in (
            ("per_device_train_batch_size", 1, "a batch is one document; --gradient_accumulation_steps joins several"),
            ("per_device_eval_batch_size", 1, "a batch is one document"),
            ("dataloader_persistent_workers", False, "these workers repeat the windows of the first epoch"),
            ("lr_scheduler_type", "constant", f"--lr_decay {self.lr_decay} is the schedule; or pass --lr_decay 1"),
        ):
            if getattr(self, name) != needed and (has_schedule or name != "lr_scheduler_type"):
                raise ValueError(f"--{name} {self.to_dict()[name]}: it must be {needed}, because {reason}.")
        if self.n_gpu > 1:
            raise ValueError(
                f"One process with {self.n_gpu} devices would split a document. Start a process for each device with "
                "torchrun, or show one device, with CUDA_VISIBLE_DEVICES=0."
            )

    def for_trainer(self, metric: str, has_validation: bool) -> TaskTrainingArguments:
        """Trainer keeps all columns, for the collator, and passes on `mentions`, as it does with labels."""
        options = super().for_trainer(metric, has_validation)
        changes: dict[str, Any] = {"remove_unused_columns": False, "label_names": ["mentions"]}
        return replace(options, **changes)

    def own_scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        return None if self.lr_decay == 1 else StepLR(optimizer, DECAY_STEPS, self.lr_decay)


class Coreference(Task):
    """The paper's coreference resolution (section 4): span ranking (Lee et al. 2017) over `[x_k; ELMo_k]`.

    The main score `f1` is the mean F1 of MUC, B-cubed and CEAF over all documents. It counts singletons, which are
    mentions of their own, with --train_singletons only. If the data has them, there are scores of both ways.
    """

    name = "coreference-resolution"
    metric = "f1"
    model_class = ELMoForCoreferenceResolution
    arguments_class = CoreferenceArguments
    training_arguments_class = CoreferenceTrainingArguments
    scalar_mix_l2 = 0.0
    head_columns = ("mentions", "speaker_ids", "genre_ids", "max_sentences")
    can_average = False  # models keep different spans

    def read_data(self) -> DatasetDict:
        return read_documents(self.arguments)

    def prepare(self, data: DatasetDict):
        train = data.get("train", next(iter(data.values())))
        counts = (Counter(cluster for *_, cluster in mentions) for mentions in train["mentions"])
        self.has_singletons = any(1 in sizes.values() for sizes in counts)
        if self.arguments.train_singletons and not self.has_singletons:
            raise ValueError(
                "--train_singletons: no mention of the training data is a singleton, so a model cannot learn them. "
                "Leave it out."
            )
        self.has_speakers, self.genres = any(train["speakers"]), known_genres(data)
        self.config = {
            "train_singletons": self.arguments.train_singletons,
            "use_speakers": self.has_speakers,
            "num_genres": len(self.genres),
            **(label_config(self.genres) if self.genres else {}),  # the pipeline takes names of genres
        }

    def words(self, split: Dataset, tokenizer: ELMoTokenizer) -> Iterable[list[str]]:
        return chain.from_iterable(split["sentences"])

    def encode(self, batch: Batch, tokenizer: ELMoTokenizer, is_training: bool) -> Batch:
        most = self.arguments.max_sentences if is_training else None
        rows = [encode_sentences(sentences, tokenizer) for sentences in batch["sentences"]]
        encoded: Batch = {name: [row[name] for row in rows] for name in rows[0]}
        if self.has_speakers:
            encoded["speaker_ids"] = list(map(speaker_numbers, batch["sentences"], batch["speakers"]))
        if self.genres:
            encoded["genre_ids"] = list(map(self.genres.index, batch["genre"]))
        return {**encoded, "mentions": batch["mentions"], "max_sentences": [most] * len(rows)}

    def collator(self, tokenizer: ELMoTokenizer) -> "DocumentCollator":
        return DocumentCollator()

    def feature_collator(self, tokenizer: ELMoTokenizer, store: FeatureStore | None) -> "DocumentCollator":
        return DocumentCollator(store)

    def scores(self, output: SplitOutput) -> dict[str, Any]:
        found = [clusters_of(mentions) for mentions in predicted_mentions(output)]
        gold = [clusters_of(mentions) for mentions in output.examples["mentions"]]
        main = self.arguments.train_singletons
        ways = [main, not main] if self.has_singletons else [main]
        every = {way: coreference_scores(found, gold, singletons=way) for way in ways}
        numbers, tables = {}, {}
        for way, scores in every.items():
            name = "with_singletons" if way else "without_singletons"
            suffix = "" if way == main else f"_{name}"
            numbers |= {key + suffix: value for key, value in scores.items() if key.endswith("f1")}
            tables[name] = scores  # with precision and recall
        return numbers | tables

    def predictions(self, output: SplitOutput) -> Iterable[Record]:
        for example, mentions in zip(output.examples, predicted_mentions(output), strict=True):
            shown = {name: example[name] for name in ("document", "sentences", "mentions")}
            yield {**shown, "predicted": mentions}

    def further_scores(self, model: ELMoForCoreferenceResolution, tokenizer: ELMoTokenizer) -> dict[str, Any]:
        widest = model.config.max_span_width
        counts = {}
        for split, documents in self.data.items():
            widths = [last - first + 1 for mentions in documents["mentions"] for _, first, last, _ in mentions]
            counts[split] = {"all": len(widths), "too_wide": sum(width > widest for width in widths)}  # never found
        return {"gold_mentions": counts}


def known_genres(data: DatasetDict) -> list[str]:
    """The genres of the training data, none if its documents have none. Other splits may have no others."""
    first, *others = data.items()
    genres = {*first[1]["genre"]}
    for split, documents in others:
        if genres != {""} and (unknown := {*documents["genre"]} - genres):
            raise ValueError(
                f"Split {split!r} has the genre {min(unknown)!r}, but {first[0]!r} only {', '.join(sorted(genres))}; "
                "pass training data with it."
            )
    return [] if genres == {""} else sorted(genres)


def speaker_numbers(sentences: list[list[str]], speakers: list[list[str]]) -> list[int]:
    """The number of each token's speaker. Markers, and documents without speakers, have the number 0."""
    numbers: dict[str, int] = {}
    names = speakers or [[""] * len(words) for words in sentences]
    rows = ([0, *(numbers.setdefault(name, len(numbers)) for name in row), 0] for row in names)
    return list(chain.from_iterable(rows))


def encode_sentences(sentences: list[list[str]], tokenizer: ELMoTokenizer) -> dict[str, np.ndarray]:
    """All tokens of a document, one sentence after the other. The biLM reads them apart, by their `token_type_ids`.

    Shape:
        result: `(tokens, ...)` each; `token_type_ids` are the numbers of the sentences.
    """
    padded = tokenizer(sentences, is_split_into_words=True, padding=True, return_tensors="np")
    mask_BT = padded["attention_mask"] == 1
    sentences_N = mask_BT.nonzero()[0].astype(np.int32)  # datasets stores int64 of this name in 8 bits where all fit
    return {name: ids[mask_BT] for name, ids in padded.items()} | {"token_type_ids": sentences_N}


class DocumentCollator(TrainerCallback):
    """Makes a batch of one document: its rows are the sentences, padded on the right.

    A training document is cut to a window of `max_sentences`, which depends on the seed, the epoch and the document
    alone. So a resumed training sees the same windows. Without a store of layers, the model computes them.
    """

    def __init__(self, store: FeatureStore | None = None):
        self.store, self.seed, self.epoch = store, 0, 0

    def on_epoch_begin(self, args, state, control, **_):
        self.seed = args.seed if args.data_seed is None else args.data_seed
        self.epoch = int(state.epoch)  # a resumed training begins within an epoch

    def __call__(self, rows: list[dict[str, Any]]) -> BatchEncoding:
        (row,) = rows  # the training options allow no others
        sentences_N = np.asarray(row["token_type_ids"])
        first, end = self._window(row, int(sentences_N[-1]) + 1)
        inside = slice(*np.searchsorted(sentences_N, [first, end]))
        lengths_B = np.bincount(sentences_N[inside] - first)
        mask_BT = np.arange(lengths_B.max()) < lengths_B[:, None]
        names = [name for name in TOKEN_COLUMNS if name in row]
        batch = {name: scattered(np.asarray(row[name][inside]), mask_BT) for name in names}
        if self.store is not None:
            batch["elmo_hidden_states"] = scattered(self.store[row["text_number"]][inside], mask_BT).transpose(1, 2)
        if "genre_ids" in row:
            batch["genre_ids"] = torch.tensor(row["genre_ids"])
        kept = [mention for mention in row["mentions"] if first <= mention[0] < end]
        shift = [-first, 1, 1, 0]  # to the sentence of the window, and to tokens, of which the first is a marker
        batch["mentions"] = torch.from_numpy(np.array(kept, dtype=np.int64).reshape(1, -1, 4) + shift)
        return BatchEncoding(batch)

    def _window(self, row: dict[str, Any], count: int) -> tuple[int, int]:
        """First sentence and end."""
        most = row.get("max_sentences") or count
        if most >= count:
            return 0, count
        first = int(np.random.default_rng([self.seed, self.epoch, row["example_number"]]).integers(count - most + 1))
        return first, first + most


def scattered(values_N: np.ndarray, mask_BT: np.ndarray) -> Tensor:
    """The values of the real tokens at their positions, and 0 elsewhere.

    Shape:
        values_N: `(tokens, ...)`
        mask_BT: `(batch, time)`
        result: `(batch, time, ...)`
    """
    result = np.zeros((*mask_BT.shape, *values_N.shape[1:]), dtype=values_N.dtype)
    result[mask_BT] = values_N
    return torch.from_numpy(result)


def predicted_mentions(output: SplitOutput) -> Iterator[list[list[int]]]:
    """The mentions of each document that are in a cluster, as in the data: sentence, first and last word, cluster."""
    clusters, mention_scores = output.logits
    if not np.isfinite(mention_scores).all():
        raise ValueError("Some mention scores are not finite: training diverged. Pass a smaller learning rate.")
    for mentions in clusters:
        # Below 0 are spans without a cluster, and Trainer's padding where documents have different numbers of spans.
        yield (mentions[mentions[:, 3] >= 0] - [0, 1, 1, 0]).tolist()


def clusters_of(mentions: Iterable[list[int]]) -> list[list[MentionSpan]]:
    """The mentions of each cluster."""
    found: dict[int, list[MentionSpan]] = {}
    for sentence, first, last, cluster in mentions:
        found.setdefault(cluster, []).append((sentence, first, last))
    return list(found.values())
