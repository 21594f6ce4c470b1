"""Data for question answering: SQuAD's files, or a data set, as a `DatasetDict` of checked questions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from datasets import Dataset, DatasetDict, Features, Value

from modeling_elmo.run_scripts.fine_tuning.sources import QUESTION_FORMATS, DataArguments, Place, Source, sources

STRING = Value("string")
FEATURES = Features(
    id=STRING,
    question=STRING,
    context=STRING,
    answers=[STRING],
    answer_starts=[Value("int32")],
    is_impossible=Value("bool"),  # as a file of SQuAD 2.0 says; none where it does not
)


@dataclass(kw_only=True)
class QuestionDataArguments(DataArguments):
    question_column: str = field(default="question", metadata={"help": "Key or column of the question."})
    context_column: str = field(default="context", metadata={"help": "That of the text that holds the answer."})
    answers_column: str = field(
        default="answers", metadata={"help": "That of the answers, each with its text and its answer_start."}
    )
    id_column: str = field(default="id", metadata={"help": "That of the question's name in predictions and messages."})


def read_questions(arguments: QuestionDataArguments) -> DatasetDict:
    """The splits that were given, with the columns `id`, `question`, `context`, `answers` (texts, none where the
    context has no answer) and `answer_starts` (characters of the context)."""
    found = sources(arguments, QUESTION_FORMATS)
    splits = DatasetDict({split: _asked(source, split, arguments) for split, source in found.items()})
    _check_versions(splits)
    return splits.remove_columns("is_impossible")


def _asked(source: Source, split: str, arguments: QuestionDataArguments) -> Dataset:
    columns = {name: getattr(arguments, f"{name}_column") for name in ("question", "context", "answers", "id")}
    first = list(source.first())
    for name, column in columns.items():
        if column not in first and name != "id":
            raise ValueError(f"{source.name} has no column {column!r} but {first}; pass --{name}_column.")
    data = source.convert(partial(_row, columns=columns), FEATURES, split)
    flags = data["is_impossible"]
    if None in flags and any(flag is not None for flag in flags):
        without, having = (
            next(row for row in data if (row["is_impossible"] is None) is wanted) for wanted in (True, False)
        )
        raise ValueError(
            f"{source.name} mixes SQuAD 1.1 and 2.0: question {having['id']} has is_impossible, question "
            f"{without['id']} has not. Pass files of one version."
        )
    return data


def _check_versions(splits: DatasetDict):
    """Questions without an answer are there in all splits or in none, training data included."""
    unanswered = {split: _first_unanswered(data) for split, data in splits.items()}
    has_train = "train" in unanswered
    odd = [split for split, name in unanswered.items() if has_train and (name is None) != (unanswered["train"] is None)]
    if not odd:
        return
    with_split, without = ("train", odd[0]) if unanswered["train"] is not None else (odd[0], "train")
    raise ValueError(
        f"Split {with_split!r} has questions without an answer, {unanswered[with_split]} the first, and {without!r} "
        "has none: SQuAD 2.0 beside 1.1. Pass splits of one version; of a part of 2.0, more than its first rows."
    )


def _first_unanswered(data: Dataset) -> str | None:
    pairs = zip(data["id"], data["answers"], strict=True)
    return next((name for name, answers in pairs if not answers), None)


def _row(place: Place, record: Mapping[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    name = record.get(columns["id"])
    is_named = name is None or str(place).endswith(f", question {name}")
    where = str(place) if is_named else f"{place}, question {name}"
    row: dict[str, Any] = {"id": str(place if name is None else name)}
    for part in ("question", "context"):
        row[part] = record.get(columns[part])
        if not isinstance(row[part], str) or not row[part].strip():
            raise ValueError(f"{where}: the {part} is {row[part]!r:.80}; it must be a text that is not empty.")
    is_impossible = record.get("is_impossible")
    if is_impossible not in (None, True, False):
        raise ValueError(f"{where}: is_impossible is {is_impossible!r:.80}; it must be true or false.")
    answers = _answers(where, record.get(columns["answers"]))
    if is_impossible is not None and is_impossible == bool(answers):
        raise ValueError(
            f"{where}: is_impossible is {is_impossible}, but there are {len(answers)} answers; correct one of both."
        )
    for text, start in answers:
        _check_answer(where, row["context"], text, start)
    texts, starts = ([answer[part] for answer in answers] for part in (0, 1))
    return {**row, "answers": texts, "answer_starts": starts, "is_impossible": is_impossible}


def _answers(where: str, value: Any) -> list[tuple[Any, Any]]:
    """Of a list of answers, as in SQuAD's files, or of a list for each of their parts, as in its data set."""
    if isinstance(value, Mapping) and {"text", "answer_start"} <= set(value):
        texts, starts = value["text"], value["answer_start"]
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            return list(zip(texts, starts, strict=True))
    elif isinstance(value, list) and all(
        isinstance(each, Mapping) and {"text", "answer_start"} <= set(each) for each in value
    ):
        return [(each["text"], each["answer_start"]) for each in value]
    raise ValueError(f"{where}: the answers are {value!r:.80}; each needs a text and an answer_start.")


def _check_answer(where: str, context: str, text: Any, start: Any):
    if not isinstance(text, str) or not text.strip() or not isinstance(start, int) or isinstance(start, bool):
        raise ValueError(
            f"{where}: an answer is {text!r:.80} at {start!r:.80}; it needs a text and its first character."
        )
    if not 0 <= start < len(context):
        raise ValueError(
            f"{where}: the answer {text!r:.80} begins at {start}, but the context has {len(context):,} characters."
        )
    if context[start : start + len(text)] != text:
        place = context.find(text)
        advice = f"it begins at {place}" if place >= 0 else "the context does not hold it"
        raise ValueError(
            f"{where}: at character {start} of the context stands {context[start : start + len(text)]!r:.80} and not "
            f"the answer {text!r:.80}; {advice}. Correct answer_start, which counts characters, not bytes."
        )
