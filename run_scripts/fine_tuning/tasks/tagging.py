"""Tagging: a label for each word, such as named entities and parts of speech."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import DataCollatorForTokenClassification
from transformers.utils import logging

from modeling_elmo import ELMoForTokenClassification, ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.data import TaggingDataArguments, label_names, read_tagging
from modeling_elmo.run_scripts.fine_tuning.metrics import (
    marks_entities,
    tagging_scores,
    tags_beside_entities,
    tags_that_pipelines_split,
)
from modeling_elmo.run_scripts.fine_tuning.task import (
    NO_LABEL,
    Batch,
    Record,
    SplitOutput,
    Task,
    label_config,
)
from modeling_elmo.run_scripts.program.command_line import option

logger = logging.get_logger(__name__)

SHOWN_TAGS = 3  # in the warnings about tags that fit no scheme


@dataclass(kw_only=True)
class TaggingArguments(TaggingDataArguments):
    max_length: int | None = option(
        None, "Maximum tokens of a training sentence, including two markers. Other splits are not cut."
    )


class Tagging(Task):
    """The paper's named entities (section 4) and other tags: biLSTMs and a CRF over `[x_k; ELMo_k]`.

    Tags that mark entities, such as BIO, are scored by the F1 of entities, other tags by accuracy.
    """

    model_class = ELMoForTokenClassification
    arguments_class = TaggingArguments
    scalar_mix_l2 = 0.1

    def read_data(self) -> DatasetDict:
        return read_tagging(self.arguments)

    def prepare(self, data: DatasetDict):
        self.labels = label_names(data, "tags")
        self.label_ids = {label: number for number, label in enumerate(self.labels)}
        self.has_entities = marks_entities(self.labels)
        self.name, self.metric = ("ner", "f1") if self.has_entities else ("tagging", "accuracy")
        self.config = label_config(self.labels)
        source = self.arguments.train_file or "The training data"
        if others := tags_beside_entities(self.labels):
            logger.warning(
                f"{source}: some tags mark entities, but not {_first_tags(others)}, so all are scored by accuracy. "
                "Remove the header line if the file has one, or rename the tags, as in B-PER."
            )
        if others := tags_that_pipelines_split(self.labels):
            logger.warning(
                f"{source}: {_first_tags(others)} are not BIO tags, and transformers' pipeline groups the words of BIO "
                "entities only (B-PER, I-PER). Pass --tag_scheme iobes for tags such as E-PER, or rename them."
            )

    def words(self, split: Dataset, tokenizer: ELMoTokenizer) -> Iterable[list[str]]:
        return split["tokens"]

    def encode(self, batch: Batch, tokenizer: ELMoTokenizer, is_training: bool) -> Batch:
        most = self.arguments.max_length if is_training else None
        encoding = tokenizer(batch["tokens"], is_split_into_words=True, truncation=most is not None, max_length=most)
        labels = [[NO_LABEL, *(self.label_ids[tag] for tag in tags)] for tags in batch["tags"]]
        rows = zip(labels, encoding["input_ids"], strict=True)
        return {**encoding, "labels": [[*row[: len(ids) - 1], NO_LABEL] for row, ids in rows]}

    def collator(self, tokenizer: ELMoTokenizer) -> DataCollatorForTokenClassification:
        return DataCollatorForTokenClassification(tokenizer)

    def scores(self, output: SplitOutput) -> dict[str, Any]:
        gold = [self._tags(labels[labels != NO_LABEL]) for labels in output.labels]
        return tagging_scores(list(self._predicted(output)), gold, are_entities=self.has_entities)

    def predictions(self, output: SplitOutput) -> Iterable[Record]:
        for example, tags in zip(output.examples, self._predicted(output), strict=True):
            yield {"tokens": example["tokens"], "tags": example["tags"], "predicted": tags}

    def _predicted(self, output: SplitOutput) -> Iterator[list[str]]:
        rows = zip(output.logits.argmax(-1), output.labels, strict=True)
        return (self._tags(predicted[labels != NO_LABEL]) for predicted, labels in rows)

    def _tags(self, numbers: np.ndarray) -> list[str]:
        return [self.labels[number] for number in numbers]


def _first_tags(tags: list[str]) -> str:
    more = f" and {len(tags) - SHOWN_TAGS} more" if len(tags) > SHOWN_TAGS else ""
    return ", ".join(map(repr, tags[:SHOWN_TAGS])) + more
