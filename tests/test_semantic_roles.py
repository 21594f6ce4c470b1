"""Semantic roles: rows and their labels, scores, predictions, ensembles, one stored text per sentence."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from task_worker import (
    LEARNING,
    TASKS,
    WITHOUT_DROPOUT,
    bilm,
    experiment,
    predictions_of,
    read_json,
    role_sentences_of,
)

from modeling_elmo import ELMoTokenizer
from modeling_elmo.modeling_elmo_roles import NO_WORD
from modeling_elmo.run_scripts.fine_tuning.task import SplitOutput
from modeling_elmo.run_scripts.fine_tuning.tasks.role_scores import predicate_scores, role_scores
from modeling_elmo.run_scripts.fine_tuning.tasks.semantic_roles import (
    RoleCollator,
    SemanticRoleArguments,
    SemanticRoles,
    SemanticRoleTrainingArguments,
)

FILES = {f"{split}_file": str(TASKS / f"propbank_{name}.tsv") for split, name in (("train", "train"), ("test", "test"))}
SENTENCES = [  # words; index and tags of each predicate
    (["Ann", "saw", "Bo", "leave"], [(1, "B-ARG0 B-V B-ARG1 I-ARG1"), (3, "O O B-ARG0 B-V")]),
    (["Rain"], []),
    (["Stop", "now"], [(0, "B-V B-ARGM-TMP")]),
]


def label(folder: Path, **options) -> list[dict]:
    return experiment("srl", folder, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("srl")
    bilm(folder / "bilm")
    sizes = {"config_overrides": {"task_hidden_size": 24}}
    label(folder, **LEARNING, **sizes, num_train_epochs=3, per_device_train_batch_size=10)
    return folder


def write_sentences(path: Path, sentences=SENTENCES) -> str:
    rows = [
        {
            "tokens": words,
            "predicate_index": [index for index, _ in predicates],
            "predicate_tags": [tags.split() for _, tags in predicates],
        }
        for words, predicates in sentences
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task_of(folder: Path, **options) -> SemanticRoles:
    return SemanticRoles(SemanticRoleArguments(train_file=write_sentences(folder / "train.jsonl"), **options))


def encoded(task: SemanticRoles, split: str = "train", tokenizer: ELMoTokenizer | None = None) -> Dataset:
    return task.encode_splits(tokenizer or ELMoTokenizer(), [split])[split]


def output_of(task: SemanticRoles, log_probs: np.ndarray, predicate_logits: np.ndarray, split: str) -> SplitOutput:
    """The output for a split, as Trainer makes it of the model's."""
    rows = encoded(task, split)
    for row, ids in zip(predicate_logits, rows["input_ids"], strict=True):
        row[[0, *range(len(ids) - 1, len(row))]] = NO_WORD
    kept = task.preprocess_logits(tuple(map(torch.from_numpy, (log_probs, predicate_logits))))
    return SplitOutput(tuple(array.numpy() for array in kept), None, task.data[split], rows)


def test_the_settings_of_the_paper(tmp_path):
    training = SemanticRoleTrainingArguments(output_dir=str(tmp_path))
    assert (training.adadelta, training.learning_rate, training.ema_decay) == (True, 1.0, 0.0)
    assert (training.per_device_train_batch_size, training.max_grad_norm) == (80, 1.0)
    assert SemanticRoleArguments(**FILES).max_length == 102 and SemanticRoles.elmo_dropout == 0.1


# Rows


def test_a_row_for_each_predicate(tmp_path):
    task = task_of(tmp_path)
    assert task.labels == ["O", "B-ARG0", "B-ARG1", "B-ARGM-TMP", "B-V", "I-ARG1"]
    rows = encoded(task)
    assert rows["example_number"] == [0, 0, 1, 2]
    assert rows["token_type_ids"] == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0], [0, 1, 0, 0]]
    first, second = [-100, 1, 4, 2, 5, -100], [-100, 0, 0, 1, 4, -100]
    assert rows["labels"] == [first, second, [-100] * 3, [-100, 4, 3, -100]]
    known = [[-100, 0, 1, 0, 1, -100], [-100] * 6, [-100, 0, -100], [-100, 1, 0, -100]]
    assert rows["predicate_labels"] == known
    assert [len(ids) for ids in rows["input_ids"]] == [6, 6, 3, 4]


def test_long_training_sentences_are_cut(tmp_path, caplog):
    task = task_of(tmp_path, test_file=write_sentences(tmp_path / "test.jsonl"), max_length=5)
    assert caplog.text.count("--max_length 5 cuts 1 predicates off the training data") == 1
    rows, test_rows = encoded(task), encoded(task, "test")
    assert rows["example_number"] == [0, 1, 2] and test_rows["example_number"] == [0, 0, 1, 2]
    assert rows["labels"][0] == [-100, 1, 4, 2, -100] and rows["predicate_labels"][0] == [-100, 0, 1, 0, -100]
    assert max(map(len, rows["input_ids"])) == 5 and max(map(len, test_rows["input_ids"])) == 6
    rows = encoded(task_of(tmp_path, max_length=3))  # the first sentence loses both
    assert rows["example_number"] == [0, 1, 2] and rows["token_type_ids"] == [[0] * 3, [0] * 3, [0, 1, 0]]
    assert rows["labels"] == [[-100] * 3, [-100] * 3, [-100, 4, -100]]
    assert rows["predicate_labels"] == [[-100, 0, -100], [-100, 0, -100], [-100, 1, -100]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_padded_on_the_right(tmp_path, side):
    tokenizer = ELMoTokenizer(padding_side=side)
    rows = list(encoded(task_of(tmp_path), tokenizer=tokenizer).remove_columns("example_number"))
    batch = RoleCollator(tokenizer)(rows)
    assert tokenizer.padding_side == side and batch["character_ids"].shape[:2] == (4, 6)
    for name, padding in (("labels", -100), ("predicate_labels", -100), ("token_type_ids", 0), ("attention_mask", 0)):
        expected = [[*row[name], *[padding] * (6 - len(row[name]))] for row in rows]
        assert batch[name].tolist() == expected and batch[name].dtype == torch.long


def test_roles_that_training_lacks_are_errors(tmp_path, caplog):
    other = [(["He", "ran", "fast"], [(1, "B-ARG9 B-V B-ARGM-TMP")])]
    task = task_of(tmp_path, test_file=write_sentences(tmp_path / "test.jsonl", other))
    assert "Split 'test' has roles that do not occur in 'train': ARG9. They cannot be found" in caplog.text
    rows = encoded(task, "test")
    assert rows["labels"] == [[-100, -100, 4, 3, -100]]
    log_probs = np.full((1, 5, 6), -9.0, dtype=np.float32)
    log_probs[0, [1, 2, 3], [0, 4, 3]] = -0.1  # the best that is possible
    scores = task.scores(output_of(task, log_probs, np.full((1, 5), -9.0), "test"))
    assert (scores["precision"], scores["recall"], scores["per_type"]["ARG9"]["recall"]) == (1.0, 0.5, 0.0)


def test_roles_come_from_the_training_data(tmp_path):
    with pytest.raises(ValueError, match="'train', but there are only .'test'."):
        SemanticRoles(SemanticRoleArguments(test_file=FILES["test_file"]))
    file = write_sentences(tmp_path / "rain.jsonl", [(["Rain"], []), (["Snow", "too"], [])])
    with pytest.raises(ValueError, match="The 2 training sentences have no predicate"):
        SemanticRoles(SemanticRoleArguments(train_file=file))


# Scores and predictions


def test_best_sequences_and_found_predicates(tmp_path):
    """The likeliest labels would begin ARG1 with I; and another predicate is found."""
    task = task_of(tmp_path, test_file=write_sentences(tmp_path / "test.jsonl"))
    log_probs = np.full((4, 6, 6), -5.0, dtype=np.float32)
    predicate_logits = np.full((4, 6), -1.0, dtype=np.float32)
    gold = encoded(task, "test")["labels"]
    for row, labels in enumerate(gold):
        for position, number in enumerate(labels):
            log_probs[row, position, max(number, 0)] = -0.1
    log_probs[0, 1] = [-4, -3, -2, -6, -6, -0.5]  # I-ARG1, where nothing has begun
    predicate_logits[[0, 0, 2], [2, 3, 1]] = 1.0
    predicate_logits[1] = 1.0  # only the first row of a sentence is read
    output = output_of(task, log_probs, predicate_logits, "test")
    first, rain, stop = task.predictions(output)
    assert first["words"] == SENTENCES[0][0]
    assert [verb["tags"] for verb in first["verbs"]] == [
        ["B-ARG1", "B-V", "B-ARG1", "I-ARG1"],
        ["O", "O", "B-ARG0", "B-V"],
    ]
    assert [verb["gold_tags"] for verb in first["verbs"]] == [tags.split() for _, tags in SENTENCES[0][1]]
    assert first["verbs"][0]["description"] == "[ARG1: Ann] [V: saw] [ARG1: Bo leave]"
    span = {"role": "ARG0", "start": 8, "end": 10, "text": "Bo", "score": pytest.approx(np.exp(-0.1))}
    assert first["verbs"][1]["arguments"] == [span]
    assert (first["predicates"], first["predicted_predicates"]) == ([1, 3], [1, 2])
    assert rain["verbs"] == [] and (rain["predicates"], rain["predicted_predicates"]) == ([], [0])
    assert (stop["verbs"][0]["verb"], stop["predicted_predicates"]) == ("Stop", [])
    scores = task.scores(output)
    assert (scores["precision"], scores["recall"]) == (3 / 4, 3 / 4)
    assert (scores["predicate_precision"], scores["predicate_recall"]) == (1 / 3, 1 / 3)
    assert "per_kind" not in scores  # the file has no kinds
    log_probs[0, 1, 0] = np.nan
    with pytest.raises(ValueError, match="Some logits are not finite: training diverged"):
        task.scores(output_of(task, log_probs, predicate_logits, "test"))


def test_words_and_what_follows_them(tmp_path):
    """Markers, padding of the model, and Trainer's padding, -100, have no label; words of any score have one."""
    log_probs = np.log(np.full((1, 6, 6), 1 / 6, dtype=np.float32))
    log_probs[0, 5] = -100
    scores = torch.tensor([[NO_WORD, 3.0, -100.0, NO_WORD, NO_WORD, -100.0]])
    labels, probabilities, predicates = task_of(tmp_path).preprocess_logits((torch.from_numpy(log_probs), scores))
    assert (labels[0] >= 0).tolist() == [False, True, True, False, False, False]
    assert predicates is scores and probabilities[0, 1:3].tolist() == pytest.approx([1 / 6, 1 / 6])


def test_a_marker_that_a_sentence_spells_is_no_word_of_a_role(tmp_path):
    sentences = [(["Ann", "saw", "</S>"], [(1, "B-ARG0 B-V O")])]
    task = task_of(tmp_path, test_file=write_sentences(tmp_path / "test.jsonl", sentences))
    log_probs, scores = np.full((1, 5, 6), -3.0, dtype=np.float32), np.full((1, 5), 1.0)
    log_probs[0, :, 1] = -0.1  # B-ARG0
    scores[0, 3] = NO_WORD
    ((verb,),) = (row["verbs"] for row in task.predictions(output_of(task, log_probs, scores, "test")))
    assert verb["tags"] == ["B-ARG0", "B-ARG0", "O"]


def test_scores_are_those_of_the_predictions(place):
    record = read_json(place / "run" / "record.json")
    assert (record["task"], record["metric"]) == ("semantic-role-labeling", "f1")
    settings = record["settings"]
    assert (settings["elmo_placement"], settings["scalar_mix_l2"], settings["max_length"]) == ("input", 0.001, 102)
    for split, name in (("validation", "dev"), ("test", "test")):
        rows = predictions_of(place / "run" / f"predictions_{split}.jsonl")
        sentences = role_sentences_of(TASKS / f"propbank_{name}.tsv")
        assert [row["words"] for row in rows] == [words for words, _, _ in sentences]
        assert [len(row["verbs"]) for row in rows] == [len(columns) for _, _, columns in sentences]
        verbs = [verb for row in rows for verb in row["verbs"]]
        expected = role_scores([verb["tags"] for verb in verbs], [verb["gold_tags"] for verb in verbs])
        expected |= predicate_scores(*([row[key] for row in rows] for key in ("predicted_predicates", "predicates")))
        found = record["metrics"][split]
        assert {key: found[key] for key in expected} == expected
        assert found["per_kind"].keys() >= {"verb", "noun"} and found["verb_f1"] == found["per_kind"]["verb"]["f1"]
        assert 0 < found["f1"] < 1 and 0 < found["predicate_f1"] < 1


# Experiments: cached layers, ensembles, the baseline, placement


@pytest.mark.slow
def test_cached_layers_give_the_same_roles_and_a_sentence_is_stored_once(place, tmp_path):
    training = {"num_train_epochs": 1, "config_overrides": WITHOUT_DROPOUT, "per_device_train_batch_size": 20}
    found = []
    for name, options in (("computed", {}), ("stored", {"cache_features": True})):
        (record,) = label(place, **training, **LEARNING, output_dir=tmp_path / name, **options)
        found.append((record["layer_weights"]["input"], predictions_of(tmp_path / name / "predictions_test.jsonl")))
    (weights, rows), (other_weights, others) = found
    assert weights == pytest.approx(other_weights, abs=1e-5)
    assert max(abs(weight - 1 / 3) for weight in weights) > 1e-3  # something was learned
    for row, other in zip(rows, others, strict=True):
        assert [verb["tags"] for verb in row["verbs"]] == [verb["tags"] for verb in other["verbs"]]
    sentences = [
        each for name in ("train", "dev", "test") for each in role_sentences_of(TASKS / f"propbank_{name}.tsv")
    ]
    assert max(len(columns) for _, _, columns in sentences) >= 3
    texts = {tuple(words) for words, _, _ in sentences}
    (file,) = (tmp_path / "stored" / "features").iterdir()
    assert file.stat().st_size == 4 * 3 * 16 * sum(len(words) + 2 for words in texts)  # layers, width, tokens


@pytest.mark.slow
def test_an_ensemble_averages_probabilities(place, tmp_path):
    label(place, **LEARNING, num_train_epochs=1, seed=7, output_dir=tmp_path / "other")
    copy = shutil.copytree(place / "run", tmp_path / "copy")
    (record,) = label(place, ensemble=[place / "run", copy], output_dir=tmp_path / "same")
    assert record["arm"] == "ensemble of 2"
    assert record["metrics"]["test"] == read_json(place / "run" / "record.json")["metrics"]["test"]
    (record,) = label(place, ensemble=[place / "run", tmp_path / "other"], output_dir=tmp_path / "both")
    one, two, both = (
        predictions_of(path)
        for path in (
            place / "run" / "predictions_test.jsonl",
            tmp_path / "other" / "predictions_test.jsonl",
            tmp_path / "both" / "results" / "ensemble_test.jsonl",
        )
    )
    tags = [[verb["tags"] for row in rows for verb in row["verbs"]] for rows in (one, two, both)]
    assert tags[0] != tags[1] and tags[2] != tags[1]


def test_averages_of_probabilities(tmp_path):
    """The mean is decoded. The second model alone would give ARG1 one word."""
    task = task_of(tmp_path)  # O, B-ARG0, B-ARG1, B-ARGM-TMP, B-V, I-ARG1
    one, two = np.full((2, 300, 4, 6), 0.02)  # probabilities; the rows are decoded in parts
    one[:, 1, [2, 5]], two[:, 1, [2, 5]] = [0.3, 0.6], [0.5, 0.4]
    one[:, 2, [0, 5]], two[:, 2, [0, 5]] = [0.2, 0.7], [0.6, 0.3]
    odds = [np.full((300, 4), NO_WORD), np.full((300, 4), NO_WORD)]
    odds[0][:, 1:3], odds[1][:, 1:3] = 0.0, np.log(3.0)
    one, two = (each / each.sum(-1, keepdims=True) for each in (one, two))
    labels, probabilities, predicates = task.average([(np.log(one), odds[0]), (np.log(two), odds[1])])
    assert labels.tolist() == [[-100, 2, 5, -100]] * 300
    mean = (one + two)[0] / 2
    np.testing.assert_allclose(probabilities[:, 1:3], [[mean[1, 2], mean[2, 5]]] * 300)
    np.testing.assert_allclose(predicates, [[NO_WORD, np.log(0.625 / 0.375), np.log(0.625 / 0.375), NO_WORD]] * 300)


@pytest.mark.slow
def test_the_baseline_and_places_are_compared(place, tmp_path):
    few = {"max_train_samples": 6, "max_eval_samples": 6, "max_steps": 1}
    records = label(place, **few, compare_baseline=True, ablation="placement", output_dir=tmp_path)
    assert [record["arm"] for record in records] == ["baseline", "input", "output", "both"]
    assert [[*record["layer_weights"]] for record in records] == [[], ["input"], ["output"], ["input", "output"]]
    assert not read_json(tmp_path / "baseline" / "seed-42" / "config.json")["use_elmo"]
