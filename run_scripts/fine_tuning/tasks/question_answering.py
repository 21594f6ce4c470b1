"""Question answering: the span of a context that answers a question, as in SQuAD 1.1 and 2.0.

The data are SQuAD's files, JSON lines or a data set. A row has the `id`, the `question`, the `context`, the `answers`,
which are texts, none if the context has no answer, and the `answer_starts`, which are characters of the context.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Features, Value
from transformers import DataCollatorWithPadding
from transformers.utils import logging

from modeling_elmo import ELMoForQuestionAnswering, ELMoTokenizer
from modeling_elmo.heads.reader_pipeline import best_answers, characters_of_contexts
from modeling_elmo.tokenization.elmo_pretokenization import places_of

from ...program.command_line import option
from ...program.data_files import LocatedRow, json_rows
from ..comparison import Comparison, Pair, Segment, View
from ..data import DataArguments, check_cell, converted_splits, is_text, split_sources
from ..metrics import answer_scores
from ..task import Batch, Record, SavedHead, SplitOutput, Task, log_mean_probabilities, right_padding
from ..trainer import ADADELTA_HELP, EMA_HELP, TaskTrainingArguments

logger = logging.get_logger(__name__)

NO_ANSWER = "no answer"
QUESTION_WORDS = ("what", "which", "who", "whose", "whom", "when", "where", "why", "how")
Characters = tuple[int, int]  # of a word in its context: the first, and the one after the last
STRING = Value("string")
ANSWER_COLUMNS = ("id", "context", "answers", "answer_starts")
QUESTION_FEATURES = Features(
    id=STRING, question=STRING, context=STRING, answers=[STRING], answer_starts=[Value("int32")]
)


@dataclass(kw_only=True)
class QuestionAnsweringArguments(DataArguments):
    train_file: str | None = option(
        None, "Training file in SQuAD's format, or with a question per record: .json, .jsonl."
    )
    question_column: str = option("question", "Key or column of the question.")
    context_column: str = option("context", "Key or column of the text with the answer.")
    answers_column: str = option("answers", "Key or column of the answers, each with its text and answer_start.")
    id_column: str = option("id", "Key or column of the question's name, for predictions and messages.")
    max_seq_length: int = option(384, "Maximum tokens of a window, which holds a question and a part of its context.")
    doc_stride: int = option(128, "Tokens that neighboring windows of a context share.")
    max_answer_length: int = option(17, "Maximum words of a predicted answer.")
    null_score_diff_threshold: float = option(
        0.0,
        "Margin of log-probability by which no answer must beat the best answer. Used where some questions "
        "have no answer.",
    )


@dataclass
class QuestionTrainingArguments(TaskTrainingArguments):
    """Trainer's arguments, with the paper's settings for SQuAD (supplement A.3)."""

    _argument_group_name = "training options"
    adadelta: bool = option(True, ADADELTA_HELP)
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

    @staticmethod
    def read_data(arguments: QuestionAnsweringArguments) -> DatasetDict:
        sources = split_sources(arguments, {".json": question_rows, ".jsonl": question_rows})
        columns = {
            "question": arguments.question_column,
            "context": arguments.context_column,
            "answers": arguments.answers_column,
        }
        for source in sources.values():
            source.check_columns(columns)
        columns["id"] = arguments.id_column  # which may be absent
        return converted_splits(sources, partial(_question_row, columns=columns), QUESTION_FEATURES)

    def prepare(self, data: DatasetDict):
        if "train" in data and not any(data["train"]["answers"]):
            raise ValueError("No question of the split 'train' has an answer; pass other training data.")
        unanswered = {split: has_unanswered(questions) for split, questions in data.items()}
        self.trained_on_unanswered = unanswered.get("train")
        for split, has_some in unanswered.items():
            if self.trained_on_unanswered not in (has_some, None):
                having, lacking = (split, "train") if has_some else ("train", split)
                raise ValueError(
                    f"Split {having!r} has questions without an answer, but {lacking!r} has none, as if SQuAD "
                    "2.0 and 1.1 were mixed. Pass splits of one version; from a part of 2.0, pass more rows."
                )

    def restore(self, data: DatasetDict, saved: SavedHead):
        if "train" in data:  # from which the head learns whether each question has an answer
            self.prepare(data)
            return
        unanswered = 0
        for questions in data.values():
            unanswered += sum(not answers for answers in questions["answers"])
        self.trained_on_unanswered = unanswered > 0
        if saved.record:
            scores = saved.record["metrics"].values()
            self.trained_on_unanswered = any("no_answer_accuracy" in of_split for of_split in scores)
        if unanswered and not self.trained_on_unanswered:
            self.unknown_labels = {NO_ANSWER: unanswered}
            logger.warning(
                f"{unanswered:,} questions have no answer, but {saved.name} was trained on questions that have one. It "
                "answers them all, and these answers count as errors. Train on data such as SQuAD 2.0."
            )

    def words(self, split: Dataset, tokenizer: ELMoTokenizer) -> Iterable[list[str]]:
        texts = [*split["question"], *dict.fromkeys(split["context"])]  # each context once
        return map(tokenizer.splitter.words, texts)

    def encode(self, batch: Batch, tokenizer: ELMoTokenizer, is_training: bool) -> Batch:
        """Rows of a question and a window of its context, with the position of the answer.

        Rows that are not for training keep `offset_mapping`: the characters of each word of the context, else `None`.
        """
        windows = tokenize_windows(batch, tokenizer, self.arguments)
        numbers = windows.pop("overflow_to_sample_mapping")
        offsets = characters_of_contexts(windows, tokenizer)
        windows.pop("offset_mapping")
        answers = []
        for name, context, texts, starts_of_texts in zip(*map(batch.get, ANSWER_COLUMNS), strict=True):
            words = list(places_of(tokenizer.splitter.words(context), context))
            answers.append(words_of_answer(words, name, texts, starts_of_texts))
        starts = []
        ends = []
        for number, characters in zip(numbers, offsets, strict=True):
            start, end = answer_positions(characters, answers[number])
            starts.append(start)
            ends.append(end)
        rows = {**windows, "example_number": numbers, "start_positions": starts, "end_positions": ends}
        if not is_training:
            rows["offset_mapping"] = offsets
        return rows

    def collator(self, tokenizer: ELMoTokenizer) -> DataCollatorWithPadding:
        return DataCollatorWithPadding(right_padding(tokenizer))

    def predictions(self, output: SplitOutput) -> Iterable[Record]:
        for example, answer, score in self._answers(output):
            record = {name: example[name] for name in ("id", "question", "answers")}
            yield {**record, "predicted": answer, "log_probability": round(score, 4)}

    def scores(self, predictions: Iterable[Record]) -> dict[str, Any]:
        predicted = []
        gold = []
        types = []
        for record in predictions:
            predicted.append(record["predicted"])
            gold.append(record["answers"])
            types.append(question_word(record["question"]))
        return answer_scores(predicted, gold, types)

    def compare(self, example: Record, prediction: Record) -> Comparison:
        """Of wrong answers, the surest are the worst; then come those that share words with a gold answer."""
        answers = prediction["answers"]
        predicted = prediction["predicted"]
        match = answer_scores([predicted], [answers])
        outcome = "part of an answer"
        if match["exact_match"]:
            outcome = "right"
        elif not answers:
            outcome = "an answer, where there is none"
        elif not predicted:
            outcome = NO_ANSWER
        elif not match["f1"]:
            outcome = "another answer"
        is_right = outcome == "right"
        pair = Pair("right" if is_right else "other class", question_word(example["question"]), outcome, predicted)
        gold = [Segment(text, None, True) for text in dict.fromkeys(answers)] or [Segment(NO_ANSWER, None, True)]
        found = [Segment(predicted or NO_ANSWER, None, is_right)]
        text = f"{example['question']}\n{example['context']}"
        severity = 1 - match["f1"] + math.exp(prediction["log_probability"])
        return Comparison([pair], [View(text, gold, found)], severity)

    def average(self, logits: Sequence[Any]) -> tuple[np.ndarray, ...]:
        starts, ends = zip(*logits, strict=True)
        return log_mean_probabilities(starts), log_mean_probabilities(ends)

    def _answers(self, output: SplitOutput) -> Iterator[tuple[Record, str, float]]:
        """Each question, its best answer over all windows, and the answer's log-probability."""
        may_be_none = self.trained_on_unanswered
        if may_be_none is None:
            may_be_none = has_unanswered(output.examples)
        start_logits, end_logits = output.logits
        starts = torch.from_numpy(np.asarray(start_logits))
        ends = torch.from_numpy(np.asarray(end_logits))
        rows = zip(output.rows["example_number"], starts, ends, output.rows["offset_mapping"], strict=True)
        windows_of_questions = groupby(rows, key=lambda row: row[0])
        for example, (_, windows) in zip(output.examples, windows_of_questions, strict=True):
            parts = []
            for _, window_starts, window_ends, offsets in windows:
                length = len(offsets)
                parts.append((window_starts[:length], window_ends[:length], offsets))
            [(score, start, end)], none = best_answers(parts, self.arguments.max_answer_length, count=1)
            if may_be_none and none - score > self.arguments.null_score_diff_threshold:
                score, start, end = none, 0, 0
            yield example, example["context"][start:end], score


def has_unanswered(questions: Dataset) -> bool:
    return any(not answers for answers in questions["answers"])


def tokenize_windows(batch: Batch, tokenizer: ELMoTokenizer, arguments: QuestionAnsweringArguments) -> dict[str, Any]:
    try:
        return tokenizer(
            batch["question"],
            batch["context"],
            max_length=arguments.max_seq_length,
            stride=arguments.doc_stride,
            truncation="only_second",
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
    except ValueError as error:
        lengths = [len(ids) - 2 for ids in tokenizer(batch["question"])["input_ids"]]
        words, name = max(zip(lengths, batch["id"], strict=True))
        raise ValueError(
            f"Question {name} has {words:,} words, too many for windows of --max_seq_length {arguments.max_seq_length} "
            f"with --doc_stride {arguments.doc_stride}. Pass larger windows, or a smaller stride. ({error})"
        ) from error


def words_of_answer(
    words: Sequence[Characters], name: str, answers: Sequence[str], starts: Sequence[int]
) -> tuple[Characters, Characters] | None:
    """The characters of the first and the last word that the first answer overlaps; `None` without an answer."""
    if not words:
        raise ValueError(f"Question {name}: the tokenizer finds no word in its context; pass another text.")
    if not answers:
        return None
    start = starts[0]
    end = start + len(answers[0])
    inside = [word for word in words if word[0] < end and word[1] > start]
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


def question_word(question: str) -> str:
    """The first question word that occurs, or `other`."""
    words = re.findall(r"[^\W_]+", question.lower())
    return next((word for word in words if word in QUESTION_WORDS), "other")


def question_rows(path: Path) -> Iterator[LocatedRow]:
    """Questions of a JSON file. A row is an article or a paragraph, as in SQuAD's files, or a question."""
    for location, row in json_rows(path):
        if not {"paragraphs", "qas"} & row.keys():
            yield location, row
            continue
        paragraphs = [row] if "qas" in row else _objects(row, "paragraphs", str(location))
        for number, paragraph in enumerate(paragraphs, 1):
            where = f"{location}, paragraph {number}"
            for count, question in enumerate(_objects(paragraph, "qas", where), 1):
                yield f"{where}, question {count}", {"context": paragraph.get("context"), **question}


def _objects(row: Mapping[str, Any], key: str, location: str) -> list[dict[str, Any]]:
    values: Any = row.get(key)
    fits = isinstance(values, list) and all(isinstance(value, dict) for value in values)
    check_cell(fits, location, key, values, "a list of objects, as in SQuAD's files")
    return values


def _question_row(location: str, row: Mapping[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    name = row.get(columns["id"])
    question: Any = row.get(columns["question"])
    context: Any = row.get(columns["context"])
    where = location if name is None else f"{location}, id {name}"
    check_cell(is_text(question), where, columns["question"], question, "a non-empty text")
    check_cell(is_text(context), where, columns["context"], context, "a non-empty text")
    texts, starts = _texts_and_starts(where, columns["answers"], row.get(columns["answers"]))
    is_impossible = row.get("is_impossible")  # in files of SQuAD 2.0
    fits = is_impossible in (None, True, False) and is_impossible != bool(texts)
    check_cell(fits, where, "is_impossible", is_impossible, f"true if there is no answer, else false: {texts}")
    for text, start in zip(texts, starts, strict=True):
        answer = {"text": text, "answer_start": start}
        fits = is_text(text) and type(start) is int
        check_cell(fits, where, columns["answers"], answer, "a text and the number of a character")
        needed = f"the character, not byte, where {text!r:.80} begins: {context.find(text)} (-1: nowhere)"
        check_cell(start >= 0 and context.startswith(text, start), where, "answer_start", start, needed)
    return {
        "id": str(location if name is None else name),
        "question": question,
        "context": context,
        "answers": texts,
        "answer_starts": starts,
    }


def _texts_and_starts(where: str, column: str, value: Any) -> tuple[list, list]:
    """Texts and starts of the answers, from a list of answers (SQuAD's files) or from a dict of lists (data sets)."""
    columns: list[Any] = []
    for name in ("text", "answer_start"):
        if isinstance(value, Mapping):
            columns.append(value.get(name))
        elif isinstance(value, list) and all(isinstance(answer, Mapping) and name in answer for answer in value):
            columns.append([answer[name] for answer in value])
    fits = len(columns) == 2 and all(isinstance(values, list) for values in columns)
    fits = fits and len(columns[0]) == len(columns[1])
    check_cell(fits, where, column, value, "answers that have a text and an answer_start each")
    return columns[0], columns[1]
