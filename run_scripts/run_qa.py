"""Trains a reader on an ELMo model: answers to questions, each a span of a context, as in SQuAD 1.1 and 2.0.

    python -m modeling_elmo.run_scripts.run_qa --model_name_or_path elmo \
        --train_file train.json --validation_file dev.json --output_dir reader

The network of the paper's SQuAD (section 4): BiDAF with self-attention over `[x_k; ELMo_k]`, with the sizes,
optimizer and averaged weights of supplement A.3; the loss is, as in transformers, the mean of start's and end's.
`--compare_baseline` trains the same network without ELMo too; `--seeds 5` tells mean and deviation; `--ablation` gives
the paper's tables.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers import DataCollatorWithPadding

from modeling_elmo import ELMoForQuestionAnswering, ELMoTokenizer
from modeling_elmo.pipeline_elmo import best_answers, characters_of_contexts
from modeling_elmo.run_scripts.fine_tuning.data import take_samples
from modeling_elmo.run_scripts.fine_tuning.experiments import ExperimentArguments, TaskTrainingArguments, fine_tune
from modeling_elmo.run_scripts.fine_tuning.metrics import answer_scores
from modeling_elmo.run_scripts.fine_tuning.question_data import QuestionDataArguments, read_questions
from modeling_elmo.run_scripts.fine_tuning.task import (
    HeadArguments,
    Predicted,
    Record,
    Task,
    log_mean_probabilities,
    source_of,
)
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run

QUESTION_WORDS = ("what", "which", "who", "whose", "whom", "when", "where", "why", "how")


@dataclass(kw_only=True)
class ReaderArguments:
    max_seq_length: int = field(
        default=384, metadata={"help": "Words and markers of a window: a question and a part of its context."}
    )
    doc_stride: int = field(default=128, metadata={"help": "Words that neighbouring windows of a context share."})
    max_answer_length: int = field(default=17, metadata={"help": "Words of a predicted answer."})
    null_score_diff_threshold: float = field(
        default=0.0,
        metadata={"help": "Where some questions have none: log-probability that no answer needs above the best one's."},
    )

    def __post_init__(self):
        for name, least in (("max_seq_length", 5), ("doc_stride", 0), ("max_answer_length", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} {getattr(self, name)}: pass at least {least}.")
        if self.doc_stride >= self.max_seq_length - 4:
            raise ValueError(
                f"--doc_stride {self.doc_stride} with --max_seq_length {self.max_seq_length}: windows cannot share so "
                "many words; pass a smaller stride."
            )


@dataclass
class ReaderTrainingArguments(TaskTrainingArguments):
    """Trainer's, with the paper's settings for SQuAD (supplement A.3)."""

    adadelta: bool = field(default=True, metadata={"help": "--no_adadelta: --optim in place of Adadelta (rho 0.95)."})
    learning_rate: float | None = field(default=None, metadata={"help": "Default: 1 for Adadelta, else 0.001."})
    ema_decay: float = field(
        default=0.999,
        metadata={"help": "Evaluate and save an exponential moving average of the weights; 0: themselves."},
    )
    per_device_train_batch_size: int = 45

    def __post_init__(self):
        if self.learning_rate is None:
            self.learning_rate = 1.0 if self.adadelta else 1e-3
        super().__post_init__()


def main(arguments: list[str] | None = None) -> list[Record]:
    parser = ProgramParser(
        HeadArguments,
        ReaderArguments,
        QuestionDataArguments,
        ExperimentArguments,
        ReaderTrainingArguments,
        description=__doc__,
    )
    head, reader, data, experiment, training = parser.parse(arguments)
    if head.max_length is not None:
        raise ValueError(f"--max_length {head.max_length}: contexts are read in windows; pass --max_seq_length.")
    return fine_tune(question_task(data, reader), head, experiment, training)


def question_task(arguments: QuestionDataArguments, reader: ReaderArguments) -> Task:
    data = read_questions(arguments)
    trained_on_unanswered = has_unanswered(data["train"]) if "train" in data else None

    def encode(batch, tokenizer, is_training) -> dict[str, Any]:
        return windows_of(batch, tokenizer, reader, is_training)

    def words(split, tokenizer) -> Iterable[list[str]]:
        texts = [*split["question"], *dict.fromkeys(split["context"])]  # a context counts once
        return map(tokenizer.splitter.words, texts)

    def answers_of(found: Predicted) -> Iterator[tuple[Record, str, float]]:
        """Each question, its answer, and the logarithm of that one's probability."""
        may_be_none = has_unanswered(found.examples) if trained_on_unanswered is None else trained_on_unanswered
        for example, (answers, none) in zip(found.examples, read_windows(found, reader.max_answer_length), strict=True):
            score, start, end = answers[0]
            if may_be_none and none - score > reader.null_score_diff_threshold:
                score, start, end = none, 0, 0
            yield example, example["context"][start:end], score

    def scores(found: Predicted) -> dict[str, Any]:
        predicted = [answer for _, answer, _ in answers_of(found)]
        return answer_scores(predicted, found.examples["answers"], [*map(question_word, found.examples["question"])])

    def predictions(found: Predicted) -> Iterable[Record]:
        for example, answer, score in answers_of(found):
            shown = {name: example[name] for name in ("id", "question", "answers")}
            yield {**shown, "predicted": answer, "log_probability": round(score, 4)}

    return Task(
        name="question-answering",
        model_class=ELMoForQuestionAnswering,
        metric="f1",
        data=take_samples(data, arguments),
        source=source_of(arguments),
        settings=vars(arguments) | vars(reader),
        config={},
        elmo_placement="both",
        scalar_mix_l2=0.001,
        words=words,
        encode=encode,
        collator=padded_on_the_right,
        scores=scores,
        predictions=predictions,
        average=lambda members: tuple(map(log_mean_probabilities, zip(*members, strict=True))),
    )


def has_unanswered(questions: Dataset) -> bool:
    return any(not answers for answers in questions["answers"])


def padded_on_the_right(tokenizer: ELMoTokenizer) -> DataCollatorWithPadding:
    """Answers are places in a row, which padding before it would shift."""
    tokenizer = copy(tokenizer)
    tokenizer.padding_side = "right"
    return DataCollatorWithPadding(tokenizer)


def windows_of(
    batch: dict[str, list], tokenizer: ELMoTokenizer, reader: ReaderArguments, is_training: bool
) -> dict[str, Any]:
    """The stock pre-processing: rows of a question and a window of its context, and where the answer stands in it."""
    windows = _tokenized(batch, tokenizer, reader)
    numbers = windows.pop("overflow_to_sample_mapping")
    offsets = characters_of_contexts(windows, tokenizer)
    windows.pop("offset_mapping")
    words: list[set[Characters]] = [set() for _ in batch["id"]]
    for number, characters in zip(numbers, offsets, strict=True):
        words[number].update(pair for pair in characters if pair is not None)
    spans = [
        words_of_answer(sorted(found), name, answers, starts)
        for found, name, answers, starts in zip(
            words, *(batch[key] for key in ("id", "answers", "answer_starts")), strict=True
        )
    ]
    places = [place_in_window(row, spans[number]) for row, number in zip(offsets, numbers, strict=True)]
    rows = {**windows, "example_number": numbers}
    rows |= {"start_positions": [place.first for place in places], "end_positions": [place.last for place in places]}
    return rows if is_training else rows | {"offset_mapping": offsets}


def _tokenized(batch: dict[str, list], tokenizer: ELMoTokenizer, reader: ReaderArguments):
    options = {"max_length": reader.max_seq_length, "stride": reader.doc_stride, "truncation": "only_second"}
    options |= {"return_overflowing_tokens": True, "return_offsets_mapping": True}
    try:
        return tokenizer(batch["question"], batch["context"], **options)
    except ValueError:
        for name, question, context in zip(*(batch[key] for key in ("id", "question", "context")), strict=True):
            try:
                tokenizer(question, context, **options)
            except ValueError as error:
                words = len(tokenizer(question)["input_ids"]) - 2
                raise ValueError(
                    f"Question {name} has {words:,} words, which leaves too few of its context in a window of "
                    f"--max_seq_length {reader.max_seq_length} with --doc_stride {reader.doc_stride}: {error}"
                ) from error
        raise


Characters = tuple[int, int]  # the first, and that after the last


class Place(NamedTuple):
    """Of an answer: its first and its last token in the row; the row's first token twice where there is none."""

    first: int
    last: int


def words_of_answer(
    words: Sequence[Characters], name: str, answers: Sequence[str], starts: Sequence[int]
) -> tuple[Characters, Characters] | None:
    """The characters of the first and of the last word that the first answer touches; None if there is no answer.

    Args:
        words: the characters of each word of the context.
        name: of the question.
    """
    if not words:
        raise ValueError(f"Question {name}: the tokenizer finds no word in its context; pass other text.")
    if not answers:
        return None
    end = starts[0] + len(answers[0])
    inside = [(first, after) for first, after in words if first < end and after > starts[0]]
    if not inside:
        raise ValueError(f"Question {name}: the tokenizer finds no word in the answer {answers[0]!r:.80}; correct it.")
    return inside[0], inside[-1]


def place_in_window(characters: Sequence[Characters | None], span: tuple[Characters, Characters] | None) -> Place:
    """Of these two words, if both are in the window."""
    if span is None or any(pair not in characters for pair in span):
        return Place(0, 0)
    return Place(*map(characters.index, span))


def read_windows(found: Predicted, max_length: int) -> Iterator[tuple[list[tuple[float, int, int]], float]]:
    """The best answer to each question, over all its windows; see `best_answers`."""
    rows = enumerate(zip(found.rows["example_number"], found.rows["offset_mapping"], strict=True))
    starts, ends = map(torch.from_numpy, map(np.asarray, found.logits))
    for _, windows in groupby(rows, key=lambda row: row[1][0]):
        parts = [(starts[row, : len(place)], ends[row, : len(place)], place) for row, (_, place) in windows]
        yield best_answers(parts, max_length, count=1)


def question_word(question: str) -> str:
    """The first that occurs; `other` where none does."""
    words = re.findall(r"[^\W_]+", question.lower())
    return next((word for word in words if word in QUESTION_WORDS), "other")


if __name__ == "__main__":
    run(main)
