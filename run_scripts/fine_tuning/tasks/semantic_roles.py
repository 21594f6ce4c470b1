"""Semantic role labelling: the arguments of each predicate of a sentence, as in PropBank."""

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding
from transformers.utils import logging

from modeling_elmo import ELMoForSemanticRoleLabeling, ELMoTokenizer
from modeling_elmo.elmo_head_layers import decode_labels
from modeling_elmo.modeling_elmo_roles import NO_WORD
from modeling_elmo.pipeline_elmo import check_numbers, join_words
from modeling_elmo.pipeline_elmo_roles import PredicateTags, labelled_sentence
from modeling_elmo.run_scripts.fine_tuning.task import (
    NO_LABEL,
    Batch,
    Record,
    SplitOutput,
    Task,
    label_config,
    log_mean_odds,
    log_mean_probabilities,
)
from modeling_elmo.run_scripts.fine_tuning.tasks.role_data import SemanticRoleArguments, read_roles
from modeling_elmo.run_scripts.fine_tuning.tasks.role_scores import predicate_scores, role_scores
from modeling_elmo.run_scripts.fine_tuning.trainer import AdadeltaTrainingArguments

logger = logging.get_logger(__name__)

DECODED_ROWS = 256  # at once: their Viterbi scores take some megabytes


@dataclass
class SemanticRoleTrainingArguments(AdadeltaTrainingArguments):
    """Trainer's arguments, with the paper's settings for semantic roles (He et al. 2017)."""

    _argument_group_name = "training options"

    per_device_train_batch_size: int = 80
    max_grad_norm: float = 1.0


class SemanticRoles(Task):
    """The paper's semantic roles (section 4): eight interleaved LSTM layers over `[x_k; ELMo_k; predicate]`.

    Roles are scored for the gold predicates, as by the official `srl-eval.pl`. A second output finds the predicates of
    a sentence, and is scored apart.
    """

    name = "semantic-role-labeling"
    metric = "f1"
    model_class = ELMoForSemanticRoleLabeling
    arguments_class = SemanticRoleArguments
    training_arguments_class = SemanticRoleTrainingArguments
    elmo_dropout = 0.1
    head_columns = ("token_type_ids", "predicate_labels")

    def read_data(self) -> DatasetDict:
        return read_roles(self.arguments)

    def prepare(self, data: DatasetDict):
        if "train" not in data:
            raise ValueError(f"The roles come from the split 'train', but there are only {list(data)}; pass it too.")
        self.labels = sorted(tags_of(data["train"]), key=lambda name: (name != "O", name))
        if not self.labels:
            raise ValueError(
                f"The {len(data['train']):,} training sentences have no predicate; pass data with predicates."
            )
        self.label_ids = {label: number for number, label in enumerate(self.labels)}
        self.config = label_config(self.labels)
        warn_of_unknown_roles(data, self.label_ids)
        most = self.arguments.max_length or math.inf
        if cut := sum(place >= most - 2 for places in data["train"]["predicate_index"] for place in places):
            logger.warning(f"--max_length {most} cuts {cut:,} predicates off the training data; they are left out.")

    def words(self, split: Dataset, tokenizer: ELMoTokenizer) -> Iterable[list[str]]:
        return split["tokens"]

    def encode(self, batch: Batch, tokenizer: ELMoTokenizer, is_training: bool) -> Batch:
        """A row per predicate, or one for a sentence without; the first row of a sentence has all predicate labels."""
        most = self.arguments.max_length if is_training else None
        encoding = tokenizer(batch["tokens"], is_split_into_words=True, truncation=most is not None, max_length=most)
        rows: list[Record] = []
        for number, (places, tags) in enumerate(zip(batch["predicate_index"], batch["predicate_tags"], strict=True)):
            sentence = {name: encoding[name][number] for name in encoding} | {"example_number": number}
            words = range(len(sentence["input_ids"]) - 2)
            unknown = [NO_LABEL for _ in words]
            predicates = [int(word in places) for word in words]
            kept = [pair for pair in zip(places, tags, strict=True) if pair[0] in words]
            for place, names in kept or [(None, None)]:
                marks = [int(word == place) for word in words]
                labels = [self.label_ids.get(names[word], NO_LABEL) for word in words] if names else unknown
                row = {"labels": [NO_LABEL, *labels, NO_LABEL], "predicate_labels": [NO_LABEL, *predicates, NO_LABEL]}
                rows.append({**sentence, **row, "token_type_ids": [0, *marks, 0]})
                predicates = unknown  # in the sentence's other rows
        return {name: [row[name] for row in rows] for name in rows[0]}

    def collator(self, tokenizer: ELMoTokenizer) -> "RoleCollator":
        return RoleCollator(tokenizer)

    def scores(self, output: SplitOutput) -> dict[str, Any]:
        read, examples = list(self._read(output)), output.examples
        predicted = [each.tags for predicates, _ in read for each in predicates]
        gold = [tags for sentence in examples["predicate_tags"] for tags in sentence]
        kinds = [kind for sentence in examples["predicate_kind"] for kind in sentence]
        found = predicate_scores([found for _, found in read], examples["predicate_index"])
        return {**role_scores(predicted, gold, kinds if any(kinds) else None), **found}

    def predictions(self, output: SplitOutput) -> Iterable[Record]:
        for example, (predicates, found) in zip(output.examples, self._read(output), strict=True):
            words = example["tokens"]
            text, characters = join_words(words)
            record = labelled_sentence(text, words, characters, predicates)
            for verb, tags in zip(record["verbs"], example["predicate_tags"], strict=True):
                verb["gold_tags"] = tags
            yield {**record, "predicates": example["predicate_index"], "predicted_predicates": found}

    def preprocess_logits(self, logits: tuple[Tensor, Tensor], labels: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """The best labels of each row, their probabilities, and the scores of its words as predicates.

        The log-probabilities of all labels would take about 4 GB for the development data of OntoNotes.

        Shape:
            logits: `(rows, time, num_labels)` and `(rows, time)`.
            returns: `(rows, time)`, three times. Labels are -100 where there is no word.
        """
        log_probs, predicate_logits = logits
        outside = predicate_logits < NO_WORD / 2
        is_before_end = outside.flip(1).cumsum(1).flip(1) > 0  # Trainer's padding follows the last marker
        best = decode_labels(log_probs, is_before_end & ~outside, tuple(self.labels))
        probabilities = log_probs.gather(-1, best.clamp(min=0)[..., None])[..., 0].exp()
        return best, probabilities, predicate_logits

    def average(self, logits: Sequence[Any]) -> tuple[np.ndarray, ...]:
        labels, predicates = zip(*logits, strict=True)
        mean = (log_mean_probabilities(labels), log_mean_odds(predicates))
        parts = zip(*(torch.from_numpy(array).split(DECODED_ROWS) for array in mean), strict=True)
        return tuple(torch.cat(column).numpy() for column in zip(*map(self.preprocess_logits, parts), strict=True))

    def _read(self, output: SplitOutput) -> Iterator[tuple[list[PredicateTags], list[int]]]:
        """For each sentence, the tags for its gold predicates, and the predicates that were found."""
        rows = zip(*output.logits, strict=True)
        for words, places in zip(output.examples["tokens"], output.examples["predicate_index"], strict=True):
            of_words = slice(1, len(words) + 1)
            first, *others = ([column[of_words] for column in next(rows)] for _ in places or [None])
            found = np.flatnonzero(first[2] > 0).tolist()
            yield [self._tags(place, *row) for place, row in zip(places, [first, *others], strict=False)], found

    def _tags(self, place: int, labels: np.ndarray, probabilities: np.ndarray, _: np.ndarray) -> PredicateTags:
        check_numbers(torch.from_numpy(probabilities))
        # A marker that the sentence spells out is no word, and has no label.
        names = [self.labels[number] if number >= 0 else "O" for number in labels.tolist()]
        return PredicateTags(place, names, probabilities.tolist())


class RoleCollator:
    """Pads rows on the right, and labels of words with -100."""

    def __init__(self, tokenizer: ELMoTokenizer):
        self.tokenizer = copy(tokenizer)
        self.tokenizer.padding_side = "right"  # scores read the words of a row from its left

    def __call__(self, rows: list[Record]) -> BatchEncoding:
        targets = [name for name in ("labels", "predicate_labels") if name in rows[0]]
        inputs = [{name: row[name] for name in row if name not in targets} for row in rows]
        batch = self.tokenizer.pad(inputs, return_tensors="pt")
        for name in targets:
            columns = [torch.tensor(row[name]) for row in rows]
            batch[name] = pad_sequence(columns, batch_first=True, padding_value=NO_LABEL)
        return batch


def tags_of(split: Dataset) -> set[str]:
    return {tag for sentence in split["predicate_tags"] for tags in sentence for tag in tags}


def warn_of_unknown_roles(data: DatasetDict, known: Iterable[str]):
    for split, sentences in data.items():
        if unknown := {tag[2:] for tag in tags_of(sentences) - {*known}}:
            logger.warning(
                f"Split {split!r} has roles that do not occur in 'train': {', '.join(sorted(unknown)):.200}. They "
                "cannot be found, and their arguments count as errors."
            )
