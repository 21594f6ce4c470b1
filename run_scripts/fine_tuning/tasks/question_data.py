"""Data for question answering: SQuAD's files, JSON lines, or a data set, as a `DatasetDict` of checked questions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Value

from modeling_elmo.run_scripts.fine_tuning.sources import DataArguments, Source, check_cell, is_text, split_sources
from modeling_elmo.run_scripts.program.command_line import option
from modeling_elmo.run_scripts.program.data_files import LocatedRow, json_rows

STRING = Value("string")
QUESTION_FEATURES = Features(
    id=STRING,
    question=STRING,
    context=STRING,
    answers=[STRING],
    answer_starts=[Value("int32")],
    is_impossible=Value("bool"),  # in files of SQuAD 2.0 only
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
    doc_stride: int = option(128, "Tokens that neighbouring windows of a context share.")
    max_answer_length: int = option(17, "Maximum words of a predicted answer.")
    null_score_diff_threshold: float = option(
        0.0,
        "Margin of log-probability by which no answer must beat the best answer. Used where some questions "
        "have no answer.",
    )

    def __post_init__(self):
        if self.doc_stride >= self.max_seq_length - 4:
            raise ValueError(
                f"--doc_stride {self.doc_stride} is too large for windows of --max_seq_length {self.max_seq_length}: "
                "pass a smaller stride, or larger windows."
            )


def read_questions(arguments: QuestionAnsweringArguments) -> DatasetDict:
    """The splits that were given, with the columns `id`, `question`, `context`, `answers` and `answer_starts`.

    The answers are texts, none if the context has no answer. Their starts are characters of the context.
    """
    found = split_sources(arguments, {".json": question_rows, ".jsonl": question_rows})
    splits = DatasetDict({split: _question_split(source, split, arguments) for split, source in found.items()})
    _check_squad_versions(splits)
    return splits.remove_columns("is_impossible")


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
                named = f"{path}, question {question['id']}" if "id" in question else f"{where}, question {count}"
                yield named, {"context": paragraph.get("context"), **question}


def _objects(row: Mapping[str, Any], key: str, location: str) -> list[dict[str, Any]]:
    values: Any = row.get(key)
    fits = isinstance(values, list) and all(isinstance(value, dict) for value in values)
    check_cell(fits, location, key, values, "a list of objects, as in SQuAD's files")
    return values


def _question_split(source: Source, split: str, arguments: QuestionAnsweringArguments) -> Dataset:
    columns = {name: getattr(arguments, f"{name}_column") for name in ("question", "context", "answers", "id")}
    first = source.first()
    for name in ("question", "context", "answers"):
        source.check_column(columns[name], first, f"{name}_column")
    data = source.convert(partial(_question_row, columns=columns), QUESTION_FEATURES, split)
    names = {flag is not None: name for name, flag in zip(data["id"], data["is_impossible"], strict=True)}
    if len(names) == 2:
        raise ValueError(
            f"{source.name} mixes SQuAD 1.1 and 2.0: question {names[True]} has is_impossible, question "
            f"{names[False]} does not. Pass files of one version."
        )
    return data


def _check_squad_versions(splits: DatasetDict):
    """Raises an error if only the training data, or only other splits, have questions without an answer."""
    unanswered = {
        split: next((row["id"] for row in data.select_columns(["id", "answers"]) if not row["answers"]), None)
        for split, data in splits.items()
    }
    for split, name in unanswered.items():
        if "train" in splits and (name is None) != (unanswered["train"] is None):
            having, lacking = (split, "train") if unanswered["train"] is None else ("train", split)
            raise ValueError(
                f"Split {having!r} has questions without an answer, first {unanswered[having]}, but {lacking!r} has "
                "none: SQuAD 2.0 beside 1.1. Pass splits of one version; from a part of 2.0, pass more rows."
            )


def _question_row(location: str, row: Mapping[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    name = row.get(columns["id"])
    is_named = name is None or location.endswith(f", question {name}")
    where = location if is_named else f"{location}, question {name}"
    found: dict[str, Any] = {"id": str(location if name is None else name)}
    for part in ("question", "context"):
        found[part] = row.get(columns[part])
        check_cell(is_text(found[part]), where, columns[part], found[part], "a text that is not empty")
    texts, starts = _answers(where, columns["answers"], row.get(columns["answers"]))
    is_impossible = row.get("is_impossible")
    fits = is_impossible in (None, True, False) and is_impossible != bool(texts)
    check_cell(fits, where, "is_impossible", is_impossible, f"true if there is no answer, else false: {texts}")
    for text, start in zip(texts, starts, strict=True):
        _check_answer(where, columns["answers"], found["context"], text, start)
    return {**found, "answers": texts, "answer_starts": starts, "is_impossible": is_impossible}


def _answers(where: str, column: str, value: Any) -> tuple[list, list]:
    """Texts and starts of the answers, from a list of answers (SQuAD's files) or from a dict of lists (data sets)."""
    keys = ("text", "answer_start")
    texts: Any = None
    starts: Any = None
    if isinstance(value, Mapping):
        texts, starts = map(value.get, keys)
    elif isinstance(value, list) and all(isinstance(each, Mapping) and {*keys} <= {*each} for each in value):
        texts, starts = ([each[key] for each in value] for key in keys)
    fits = isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)
    check_cell(fits, where, column, value, "answers that have a text and an answer_start each")
    return texts, starts


def _check_answer(where: str, column: str, context: str, text: Any, start: Any):
    fits = is_text(text) and type(start) is int
    check_cell(fits, where, column, {"text": text, "answer_start": start}, "a text and the number of a character")
    found = context.find(text)
    place = f"it is at {found}" if found >= 0 else "it is nowhere in the context"
    fits = start >= 0 and context.startswith(text, start)
    check_cell(fits, where, "answer_start", start, f"the character, not byte, where {text!r:.80} begins; {place}")
