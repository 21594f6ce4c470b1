"""Question answering: the span of a context that answers a question, as in SQuAD 1.1 and 2.0."""

import re
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import DataCollatorWithPadding

from modeling_elmo import ELMoForQuestionAnswering, ELMoTokenizer
from modeling_elmo.pipeline_elmo import best_answers, characters_of_contexts
from modeling_elmo.run_scripts.fine_tuning.metrics import answer_scores
from modeling_elmo.run_scripts.fine_tuning.task import Batch, Record, SplitOutput, Task, log_mean_probabilities
from modeling_elmo.run_scripts.fine_tuning.tasks.question_data import QuestionAnsweringArguments, read_questions
from modeling_elmo.run_scripts.fine_tuning.trainer import EMA_HELP, AdadeltaTrainingArguments
from modeling_elmo.run_scripts.program.command_line import option

QUESTION_WORDS = ("what", "which", "who", "whose", "whom", "when", "where", "why", "how")
Characters = tuple[int, int]  # of a word in its context: the first, and the one after the last


@dataclass
class QuestionTrainingArguments(AdadeltaTrainingArguments):
    """Trainer's arguments, with the paper's settings for SQuAD (supplement A.3)."""

    _argument_group_name = "training options"

    ema_decay: float = option(0.999, EMA_HELP)
    per_device_train_batch_size: int = 45


class QuestionAnswering(Task):
    """The paper's SQuAD (section 4): BiDAF with self-attention over `[x_k; ELMo_k]`.

    A long context is read in windows that overlap. The answer is the best span of all windows of a question.
    """

    name = "question-answering"
    metric = "f1"
    model_class = ELMoForQuestionAnswering
    arguments_class = QuestionAnsweringArguments
    training_arguments_class = QuestionTrainingArguments

    def read_data(self) -> DatasetDict:
        return read_questions(self.arguments)

    def prepare(self, data: DatasetDict):
        self.trained_on_unanswered = has_unanswered(data["train"]) if "train" in data else None

    def words(self, split: Dataset, tokenizer: ELMoTokenizer) -> Iterable[list[str]]:
        texts = [*split["question"], *dict.fromkeys(split["context"])]  # each context once
        return map(tokenizer.splitter.words, texts)

    def encode(self, batch: Batch, tokenizer: ELMoTokenizer, is_training: bool) -> Batch:
        return encode_windows(batch, tokenizer, self.arguments, is_training)

    def collator(self, tokenizer: ELMoTokenizer) -> DataCollatorWithPadding:
        tokenizer = copy(tokenizer)
        tokenizer.padding_side = "right"  # padding on the left would shift the positions of answers
        return DataCollatorWithPadding(tokenizer)

    def scores(self, output: SplitOutput) -> dict[str, Any]:
        predicted = [answer for _, answer, _ in self._answers(output)]
        types = [question_word(question) for question in output.examples["question"]]
        return answer_scores(predicted, output.examples["answers"], types)

    def predictions(self, output: SplitOutput) -> Iterable[Record]:
        for example, answer, score in self._answers(output):
            shown = {name: example[name] for name in ("id", "question", "answers")}
            yield {**shown, "predicted": answer, "log_probability": round(score, 4)}

    def average(self, logits: Sequence[Any]) -> tuple[np.ndarray, ...]:
        return tuple(map(log_mean_probabilities, zip(*logits, strict=True)))

    def _answers(self, output: SplitOutput) -> Iterator[tuple[Record, str, float]]:
        """Each question, its answer, and the answer's log-probability."""
        may_be_none = self.trained_on_unanswered
        if may_be_none is None:
            may_be_none = has_unanswered(output.examples)
        best = best_of_windows(output, self.arguments.max_answer_length)
        for example, (answers, none) in zip(output.examples, best, strict=True):
            score, start, end = answers[0]
            if may_be_none and none - score > self.arguments.null_score_diff_threshold:
                score, start, end = none, 0, 0
            yield example, example["context"][start:end], score


def has_unanswered(questions: Dataset) -> bool:
    return any(not answers for answers in questions["answers"])


def encode_windows(
    batch: Batch, tokenizer: ELMoTokenizer, arguments: QuestionAnsweringArguments, is_training: bool
) -> dict[str, Any]:
    """Rows of a question and a window of its context, with the position of the answer, as in transformers' examples.

    Rows that are not for training keep `offset_mapping`: the characters of each word of the context, else `None`.
    """
    windows = tokenize_windows(batch, tokenizer, arguments)
    numbers = windows.pop("overflow_to_sample_mapping")
    offsets = characters_of_contexts(windows, tokenizer)
    windows.pop("offset_mapping")
    words: list[set[Characters]] = [set() for _ in batch["id"]]
    for number, characters in zip(numbers, offsets, strict=True):
        words[number].update(pair for pair in characters if pair is not None)
    examples = zip(words, *(batch[key] for key in ("id", "answers", "answer_starts")), strict=True)
    answers = [words_of_answer(sorted(found), *example) for found, *example in examples]
    positions = [answer_positions(row, answers[number]) for row, number in zip(offsets, numbers, strict=True)]
    starts, ends = map(list, zip(*positions, strict=True))
    rows = {**windows, "example_number": numbers, "start_positions": starts, "end_positions": ends}
    return rows if is_training else rows | {"offset_mapping": offsets}


def tokenize_windows(batch: Batch, tokenizer: ELMoTokenizer, arguments: QuestionAnsweringArguments) -> dict[str, Any]:
    options = {"max_length": arguments.max_seq_length, "stride": arguments.doc_stride, "truncation": "only_second"}
    options |= {"return_overflowing_tokens": True, "return_offsets_mapping": True}
    try:
        return tokenizer(batch["question"], batch["context"], **options)
    except ValueError as error:
        lengths = [len(ids) - 2 for ids in tokenizer(batch["question"])["input_ids"]]
        words, name = max(zip(lengths, batch["id"], strict=True))
        raise ValueError(
            f"Question {name} has {words:,} words, which leaves too little room for its context in a window of "
            f"--max_seq_length {arguments.max_seq_length} with --doc_stride {arguments.doc_stride}. Pass a larger "
            f"--max_seq_length. ({error})"
        ) from error


def words_of_answer(
    words: Sequence[Characters], name: str, answers: Sequence[str], starts: Sequence[int]
) -> tuple[Characters, Characters] | None:
    """The characters of the first and the last word that the first answer overlaps; `None` without an answer."""
    if not words:
        raise ValueError(f"Question {name}: the tokenizer finds no word in its context; pass another text.")
    if not answers:
        return None
    end = starts[0] + len(answers[0])
    inside = [(first, after) for first, after in words if first < end and after > starts[0]]
    if not inside:
        raise ValueError(f"Question {name}: the tokenizer finds no word in the answer {answers[0]!r:.80}; correct it.")
    return inside[0], inside[-1]


def answer_positions(
    characters: Sequence[Characters | None], answer: tuple[Characters, Characters] | None
) -> tuple[int, int]:
    """The tokens of the answer's first and last word. Both are 0, the row's first token, if a row lacks one of them."""
    if answer is None or any(pair not in characters for pair in answer):
        return 0, 0
    return characters.index(answer[0]), characters.index(answer[1])


def best_of_windows(output: SplitOutput, max_length: int) -> Iterator[tuple[list[tuple[float, int, int]], float]]:
    """The best answer to each question over all its windows; see `best_answers`."""
    rows = enumerate(zip(output.rows["example_number"], output.rows["offset_mapping"], strict=True))
    starts, ends = map(torch.from_numpy, map(np.asarray, output.logits))
    for _, windows in groupby(rows, key=lambda row: row[1][0]):
        parts = [(starts[row, : len(offsets)], ends[row, : len(offsets)], offsets) for row, (_, offsets) in windows]
        yield best_answers(parts, max_length, count=1)


def question_word(question: str) -> str:
    """The first question word that occurs, or `other`."""
    words = re.findall(r"[^\W_]+", question.lower())
    return next((word for word in words if word in QUESTION_WORDS), "other")
