"""Question answering: windows and positions of answers, no answer, ensembles, cached layers."""

from pathlib import Path

import pytest
import torch
from task_worker import (
    FEW_QUESTIONS,
    LEARNING,
    WINDOWS,
    WITHOUT_DROPOUT,
    bilm,
    experiment,
    predictions_of,
    questions_of,
    write_questions,
)

from modeling_elmo import ELMoForQuestionAnswering, ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.tasks.question_answering import (
    QuestionAnswering,
    QuestionAnsweringArguments,
    QuestionTrainingArguments,
    answer_positions,
    encode_windows,
    question_word,
    words_of_answer,
)


def answer(folder: Path, **options) -> list[dict]:
    return experiment("qa", folder, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qa")
    bilm(folder / "bilm", pre_tokenization="treebank")
    answer(folder, **WINDOWS, **LEARNING, num_train_epochs=3, per_device_train_batch_size=10)
    return folder


def test_the_settings_of_the_paper(tmp_path):
    training = QuestionTrainingArguments(output_dir=str(tmp_path))
    assert (training.adadelta, training.learning_rate, training.ema_decay) == (True, 1.0, 0.999)
    assert training.per_device_train_batch_size == 45 and QuestionAnsweringArguments().max_answer_length == 17
    assert QuestionTrainingArguments(output_dir=str(tmp_path), adadelta=False).learning_rate == 1e-3


# Windows


@pytest.mark.parametrize("side", ["right", "left"])
def test_windows_cover_the_context_and_mark_the_answer(side):
    """A window that holds the whole answer has it between the two positions; other windows have no answer."""
    tokenizer, questions = ELMoTokenizer(padding_side=side), questions_of("train")
    batch = {key: [question[key] for question in questions] for key in ("id", "question", "context")}
    batch["answers"] = [[each["text"] for each in question["answers"]] for question in questions]
    batch["answer_starts"] = [[each["answer_start"] for each in question["answers"]] for question in questions]
    rows = encode_windows(batch, tokenizer, QuestionAnsweringArguments(**WINDOWS), is_training=False)
    assert len(rows["input_ids"]) > len(questions) and rows["example_number"][-1] == len(questions) - 1
    held = set()
    for row, number in enumerate(rows["example_number"]):
        context, answer_, start = (batch[key][number] for key in ("context", "answers", "answer_starts"))
        characters = rows["offset_mapping"][row]
        words = [pair for pair in characters if pair is not None]
        first, last = rows["start_positions"][row], rows["end_positions"][row]
        text, begin = answer_[0].strip(), start[0]
        is_inside = words[0][0] <= begin and begin + len(text) <= words[-1][1]
        assert is_inside == ((first, last) != (0, 0))
        if is_inside:
            held.add(number)
            shown = context[characters[first][0] : characters[last][1]]
            assert text in shown and len(shown) <= len(text) + 12
    assert held == set(range(len(questions)))
    names = ("input_ids", "character_ids", "attention_mask", "token_type_ids")
    inputs = [{name: rows[name][row] for name in names} for row in range(8)]
    padded = QuestionAnswering.collator(None, tokenizer)(inputs)
    assert padded["attention_mask"][:, 0].all() and not padded["attention_mask"].all()
    assert tokenizer.padding_side == side


@pytest.mark.parametrize(
    "answers, starts, expected",
    [
        (["b"], [2], (4, 4)),
        (["b c"], [2], (4, 5)),
        ([" b "], [1], (4, 4)),
        (["ee"], [9], (7, 7)),  # a part of a word
        (["d e", "b"], [6, 2], (6, 7)),  # the first answer
        (["a"], [0], (0, 0)),  # before the window
        (["e f"], [10], (0, 0)),  # continues after the window
        ([], [], (0, 0)),
    ],
)
def test_positions_of_answers(answers, starts, expected):
    """In a window of `a b c d eee f` without its first and its last word."""
    words = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 11), (12, 13)]
    characters = [None, None, None, None, *words[1:-1], None]
    assert answer_positions(characters, words_of_answer(words, "q", answers, starts)) == expected


@pytest.mark.parametrize("part, message", [("context", "no word in its context"), ("answer", "no word in the answer")])
def test_text_without_words_is_refused(part, message):
    texts = {"context": "\x01 \x02", "answer": "\x02"} if part == "context" else {"context": "a \x01", "answer": "\x01"}
    batch = {"id": ["q7"], "question": ["why"], "context": [texts["context"]], "answers": [[texts["answer"]]]}
    batch["answer_starts"] = [[texts["context"].index(texts["answer"])]]
    with pytest.raises(ValueError, match=f"Question q7: the tokenizer finds {message}"):
        encode_windows(batch, ELMoTokenizer(), QuestionAnsweringArguments(**WINDOWS), is_training=True)


def test_markers_in_a_text_are_no_words(tmp_path):
    """A tokenizer may read `</S>` in a text as a marker, which no answer can start or end at."""
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>"], pre_tokenization="whitespace", literal_markers=True)
    batch = {"id": ["q"], "question": ["why"], "context": ["a </S> b c"]}
    batch |= {"answers": [["a </S> b"]], "answer_starts": [[0]]}
    rows = encode_windows(batch, tokenizer, QuestionAnsweringArguments(**WINDOWS), is_training=False)
    ids, first, last = rows["input_ids"][0], rows["start_positions"][0], rows["end_positions"][0]
    assert tokenizer.convert_ids_to_tokens(ids)[first + 1] == "</S>" and last == first + 2
    assert rows["offset_mapping"][0][first : last + 1] == [(0, 1), None, (7, 8)]


def test_kinds_of_questions():
    questions = ("In which city, what?", "What's it?", "Ada did (who?)", "Somewhat whoever")
    assert [*map(question_word, questions)] == ["which", "what", "who", "other"]


# Questions without an answer


@pytest.mark.slow
def test_no_answer_is_predicted_if_some_questions_have_none(tmp_path):
    bilm(tmp_path / "bilm")
    files = {}
    for split, name in (("train", "train"), ("validation", "dev")):
        questions = questions_of(name)
        for question in questions[::2]:
            question["answers"] = []
        files[f"{split}_file"] = write_questions(tmp_path / f"{split}.jsonl", questions)
    found = {}
    for threshold in (-1e6, 0.0, 1e6):
        options = {**FEW_QUESTIONS, "max_train_samples": None, "null_score_diff_threshold": threshold}
        (record,) = answer(tmp_path, **files, **options, output_dir=tmp_path / str(threshold))
        found[threshold] = record["metrics"]["validation"]
        rows = predictions_of(tmp_path / str(threshold) / "predictions_validation.jsonl")
        assert found[threshold]["no_answer_accuracy"] == sum(row["predicted"] == "" for row in rows[::2]) / 2
    # Without training data, each split decides for itself whether a question may have no answer.
    options = {**FEW_QUESTIONS, "train_file": None, "null_score_diff_threshold": -1e6, "ensemble": [tmp_path / "0.0"]}
    options |= {"validation_file": files["validation_file"]}
    options |= {"test_file": write_questions(tmp_path / "test.jsonl", questions_of("dev"))}
    (record,) = answer(tmp_path, **options, output_dir=tmp_path / "both")
    assert record["metrics"]["validation"] == found[-1e6]
    assert all(row["predicted"] for row in predictions_of(tmp_path / "both" / "results" / "ensemble_test.jsonl"))
    assert found[-1e6]["no_answer_accuracy"] == 1 and found[-1e6]["has_answer_f1"] == 0
    assert found[1e6]["no_answer_accuracy"] == 0 and found[1e6]["f1"] <= 0.5


# Experiments: cached layers, ensembles, the baseline


@pytest.mark.slow
def test_cached_layers_give_the_same_answers(place, tmp_path):
    training = {"num_train_epochs": 1, "config_overrides": WITHOUT_DROPOUT, "per_device_train_batch_size": 10}
    found = []
    for name, options in (("computed", {}), ("stored", {"cache_features": True})):
        (record,) = answer(place, **WINDOWS, **training, **LEARNING, output_dir=tmp_path / name, **options)
        rows = predictions_of(tmp_path / name / "predictions_test.jsonl")
        found.append((record["layer_weights"], rows))
    (weights, rows), (other_weights, others) = found
    for side in ("input", "output"):
        assert weights[side] == pytest.approx(other_weights[side], abs=1e-5)
        assert max(abs(weight - 1 / 3) for weight in weights[side]) > 1e-3  # something was learned
    assert [row["predicted"] for row in rows] == [row["predicted"] for row in others]
    for row, other in zip(rows, others, strict=True):
        assert row["log_probability"] == pytest.approx(other["log_probability"], abs=2e-3)


def mean_answer(folders: list[Path], question: str, context: str) -> str:
    """The best product of mean probabilities of start and end, in one window, because the contexts are short."""
    sums = 0
    for folder in folders:
        tokenizer = ELMoTokenizer.from_pretrained(folder)
        inputs = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
        offsets, texts = inputs.pop("offset_mapping")[0].tolist(), inputs.sequence_ids(0)
        with torch.no_grad():
            output = ELMoForQuestionAnswering.from_pretrained(folder)(**inputs)
        sums = sums + torch.stack([output.start_logits[0], output.end_logits[0]]).softmax(1)
    words = [place for place, text in enumerate(texts) if text == 1]
    spans = [(first, last) for first in words for last in words if first <= last < first + 17]
    first, last = max(spans, key=lambda span: sums[0, span[0]] * sums[1, span[1]])
    return context[offsets[first][0] : offsets[last][1]]


@pytest.mark.slow
def test_an_ensemble_averages_starts_and_ends(place, tmp_path):
    answer(place, **WINDOWS, **LEARNING, num_train_epochs=1, seed=7, output_dir=tmp_path / "other")
    members = [place / "run", tmp_path / "other"]
    one, two = (predictions_of(folder / "predictions_test.jsonl") for folder in members)
    assert [row["predicted"] for row in one] != [row["predicted"] for row in two]
    (record,) = answer(place, ensemble=members, output_dir=tmp_path / "both", train_file=None)
    rows = predictions_of(tmp_path / "both" / "results" / "ensemble_test.jsonl")
    assert record["arm"] == "ensemble of 2" and len(rows) == 20
    for row, asked in list(zip(rows, questions_of("test"), strict=True))[:5]:
        assert row["predicted"] == mean_answer(members, asked["question"], asked["context"])


@pytest.mark.slow
def test_answers_stay_in_order_if_training_groups_by_length(place, tmp_path):
    """Trainer would group evaluation data by length too, but answers are matched to questions by order."""
    few = FEW_QUESTIONS | {"max_eval_samples": 10}
    answer(place, **WINDOWS, **few, train_sampling_strategy="group_by_length", output_dir=tmp_path / "run")
    answer(place, **WINDOWS, **few | {"train_file": None}, ensemble=[tmp_path / "run"], output_dir=tmp_path / "again")
    found = predictions_of(tmp_path / "run" / "predictions_validation.jsonl")
    again = predictions_of(tmp_path / "again" / "results" / "ensemble_validation.jsonl")
    assert [row["predicted"] for row in found] == [row["predicted"] for row in again]
    for one, two in zip(found, again, strict=True):
        assert one["log_probability"] == pytest.approx(two["log_probability"], abs=1e-3)


@pytest.mark.slow
def test_members_that_tokenize_differently_are_no_ensemble(place, tmp_path):
    bilm(tmp_path / "bilm", pre_tokenization="whitespace")
    answer(tmp_path, **FEW_QUESTIONS)
    members = [place / "run", tmp_path / "run"]
    with pytest.raises(ValueError, match=f"--ensemble {members[1]} .*{members[0]}"):
        answer(place, ensemble=members, output_dir=tmp_path / "both", train_file=None)
