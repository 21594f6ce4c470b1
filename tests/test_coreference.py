"""The task of coreference: documents as batches, windows, scores, options, cached layers."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from task_worker import TASKS, WITHOUT_DROPOUT, bilm, experiment, predictions_of

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.fine_tuning.task import SplitOutput
from modeling_elmo.run_scripts.fine_tuning.tasks import coreference
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference import (
    Coreference,
    CoreferenceArguments,
    CoreferenceTrainingArguments,
    DocumentCollator,
    known_genres,
)
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference_scores import coreference_scores

FILES = {f"{split}_file": str(TASKS / f"litbank_{name}.conll") for split, name in (("train", "train"), ("test", "dev"))}
SENTENCES = [["Ann", "saw", "Bo"], ["She", "left"], ["Bo", "and", "his", "dog", "stayed"], ["Rain"]]
MENTIONS = [[0, 0, 0, 0], [0, 2, 2, 1], [1, 0, 0, 0], [2, 0, 0, 1], [2, 2, 2, 1], [2, 2, 3, 2], [3, 0, 0, 3]]
ROW = {"document": "d", "sentences": SENTENCES, "mentions": MENTIONS, "speakers": [], "genre": ""}
PAIR = [(0, "She", "(0)"), (1, "the", "(1"), (2, "old", "-"), (3, "dog", "1)")]  # a sentence
FEW = {"max_steps": 1, "test_file": None}


def documents(*rows, **columns) -> DatasetDict:
    return DatasetDict(train=Dataset.from_list([{**ROW, **row, **columns} for row in rows or [{}]]))


@pytest.fixture
def task_of(monkeypatch):
    def made(data: DatasetDict, **options) -> Coreference:
        monkeypatch.setattr(coreference, "read_documents", lambda arguments: data)
        return Coreference(CoreferenceArguments(train_file="d.conll", **options))

    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("coref")
    bilm(folder / "bilm")
    return folder


# Batches


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_batch_is_a_document(side, task_of):
    speakers = [["x"] * 3, ["y", "x"], ["x"] * 5, ["z"]]
    other = {"speakers": speakers, "genre": "nw"}
    task = task_of(documents(other, {"genre": "bc", "sentences": [["a"]], "mentions": []}))
    tokenizer = ELMoTokenizer(padding_side=side, pre_tokenization="whitespace")
    rows = task.encode_splits(tokenizer)["train"]
    batch = task.collator(tokenizer)([rows[0]])
    expected = tokenizer(SENTENCES, is_split_into_words=True, padding=True, padding_side="right", return_tensors="pt")
    for name in ("input_ids", "character_ids", "attention_mask"):
        assert torch.equal(batch[name], expected[name]), name
    assert batch["mentions"].tolist() == [[[s, a + 1, b + 1, cluster] for s, a, b, cluster in MENTIONS]]
    assert batch["speaker_ids"][1].tolist() == [0, 1, 0, 0, 0, 0, 0] and batch["speaker_ids"][3, 1] == 2
    assert batch["genre_ids"] == 1 and batch["genre_ids"].shape == ()
    empty = task.collator(tokenizer)([rows[1]])
    assert empty["mentions"].shape == (1, 0, 4) and empty["genre_ids"] == 0 and not empty["speaker_ids"].any()
    assert task.config["use_speakers"] and task.config["num_genres"] == 2
    assert task.config["id2label"] == {0: "bc", 1: "nw"}


def at_epoch(collator: DocumentCollator, epoch: float, seed: int = 1, data_seed: int | None = None):
    collator.on_epoch_begin(SimpleNamespace(seed=seed, data_seed=data_seed), SimpleNamespace(epoch=epoch), None)


def test_a_training_document_is_a_window_that_differs_by_epoch(task_of):
    task = task_of(documents(*[{}] * 3), max_sentences=2)
    tokenizer = ELMoTokenizer(pre_tokenization="whitespace")
    rows, whole = task.encode_splits(tokenizer)["train"], task.encode({**documents()["train"][:]}, tokenizer, False)
    collator, seen = task.collator(tokenizer), {}
    document = {name: column[0] for name, column in whole.items()} | {"example_number": 0}
    assert len(collator([document])["input_ids"]) == 4
    for epoch in range(20):
        at_epoch(collator, epoch)
        seen[epoch] = [tokenizer.batch_decode(collator([row])["input_ids"]) for row in rows]
        for row in rows:
            batch = collator([row])
            first = [0, 1, 2][[3, 2, 5].index(int(batch["attention_mask"][0].sum()) - 2)]
            inside = [[s - first, a + 1, b + 1, c] for s, a, b, c in MENTIONS if first <= s < first + 2]
            assert batch["mentions"].tolist() == [inside] and len(batch["input_ids"]) == 2
    assert len({str(windows) for windows in seen.values()}) > 5  # drawn anew in each epoch ...
    assert len({str(window) for windows in seen.values() for window in windows}) == 3  # ... from all windows
    assert any(windows[0] != windows[1] for windows in seen.values())  # ... for each document
    other = task.collator(tokenizer)
    at_epoch(other, 7.25)  # within an epoch: a resumed training
    assert [tokenizer.batch_decode(other([row])["input_ids"]) for row in rows] == seen[7]
    found = []
    for options in ({"seed": 2}, {"seed": 2, "data_seed": 1}):
        changed = []
        for epoch in seen:
            at_epoch(other, epoch, **options)
            changed.append([tokenizer.batch_decode(other([row])["input_ids"]) for row in rows])
        found.append(changed == list(seen.values()))
    assert found == [False, True]


# Scores


def padded(rows: list[list[list[int]]]) -> np.ndarray:
    """As Trainer pads them; one token is a marker before the words."""
    longest = max(map(len, rows))
    tokens = [[[s, a + 1, b + 1, cluster] for s, a, b, cluster in row] for row in rows]
    return np.array([row + [[-100] * 4] * (longest - len(row)) for row in tokens])


@pytest.mark.parametrize("train_singletons", [True, False])
def test_scores_of_both_ways(train_singletons, task_of):
    task = task_of(documents({}, {}), train_singletons=train_singletons)
    predicted = [MENTIONS[:5] + [[2, 3, 3, -1]], [[0, 0, 0, 0], [1, 0, 0, 0], [2, 2, 3, 1]]]
    output = SplitOutput((padded(predicted), np.zeros((2, 6))), None, task.data["train"], None)
    scores = task.scores(output)
    clusters = [[[(0, 0, 0), (1, 0, 0)], [(0, 2, 2), (2, 0, 0), (2, 2, 2)]], [[(0, 0, 0), (1, 0, 0)], [(2, 2, 3)]]]
    gold = [[*clusters[0], [(2, 2, 3)], [(3, 0, 0)]]] * 2
    both = {way: coreference_scores(clusters, gold, singletons=way) for way in (True, False)}
    assert scores["with_singletons"] == both[True] and scores["without_singletons"] == both[False]
    assert both[True]["f1"] != both[False]["f1"]
    other = "without_singletons" if train_singletons else "with_singletons"
    for name in ("f1", "muc_f1", "b_cubed_f1", "ceaf_f1", "mention_f1"):
        assert scores[name] == both[train_singletons][name]
        assert scores[f"{name}_{other}"] == both[not train_singletons][name]
    lines = list(task.predictions(output))
    assert [line["predicted"] for line in lines] == [predicted[0][:5], predicted[1]]
    assert lines[0]["mentions"] == MENTIONS and lines[0]["sentences"] == SENTENCES


def test_data_without_singletons_have_one_way(task_of):
    task = task_of(documents(mentions=MENTIONS[:5]))
    output = SplitOutput((padded([MENTIONS[:5]]), np.zeros((1, 5))), None, task.data["train"], None)
    scores = task.scores(output)
    assert scores["f1"] == 1 and "with_singletons" not in scores and "f1_with_singletons" not in scores
    with pytest.raises(ValueError, match="--train_singletons"):
        task_of(documents(mentions=MENTIONS[:5]), train_singletons=True)


def test_genres_of_the_training_data():
    splits = {name: documents(genre=name)["train"] for name in ("bc", "nw")}
    data = DatasetDict(train=splits["bc"], validation=splits["nw"])
    with pytest.raises(ValueError, match="'validation' .*'nw', .*'train' only bc"):
        known_genres(data)
    data["train"] = documents()["train"]  # without genres, the model does not read them
    assert known_genres(data) == [] and known_genres(DatasetDict(train=splits["bc"])) == ["bc"]


# Options


def training(folder: Path, **options) -> CoreferenceTrainingArguments:
    return CoreferenceTrainingArguments(output_dir=str(folder), use_cpu=True, **options)


def test_the_settings_of_the_paper(tmp_path):
    found = training(tmp_path)
    assert (found.learning_rate, found.lr_decay, found.max_grad_norm) == (1e-3, 0.999, 5.0)
    assert found.num_train_epochs == 150 and not found.adadelta and found.weight_decay == 0
    assert CoreferenceArguments().max_sentences == 50 and Coreference.scalar_mix_l2 == 0
    assert "lr_decay" in found.recorded()
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=found.learning_rate)
    scheduler, rates = found.own_scheduler(optimizer), []
    for _ in range(301):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert all(math.isclose(rate, 1e-3 * 0.999 ** (step // 100)) for step, rate in enumerate(rates))
    assert training(tmp_path, lr_decay=1.0, lr_scheduler_type="linear").own_scheduler(optimizer) is None


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_batch_size": 2},
        {"dataloader_persistent_workers": True, "dataloader_num_workers": 1},
        {"lr_scheduler_type": "linear"},
    ],
    ids=str,
)
def test_training_options_that_are_refused(options, tmp_path):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"--{name} {value}: it must be"):
        training(tmp_path, **options)


def test_two_devices_in_one_process_would_split_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(CoreferenceTrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="2 devices .*torchrun"):
        training(tmp_path)


# Experiments


def test_ensembles_are_refused(place, tmp_path):
    with pytest.raises(ValueError, match="--ensemble: .*coreference-resolution"):
        experiment("coref", place, ensemble=["one", "two"], output_dir=tmp_path)


@pytest.mark.slow
def test_cached_layers_give_the_same_clusters(place, tmp_path):
    """Each sentence is stored once, and the windows of training take their part of the layers."""
    overrides = {**WITHOUT_DROPOUT, "lexical_dropout": 0.0, "max_span_width": 4}
    options = {"num_train_epochs": 2, "max_sentences": 5, "config_overrides": overrides, "learning_rate": 0.01}
    found = []
    for name, cached in (("computed", {}), ("stored", {"cache_features": True})):
        (record,) = experiment("coref", place, **options, **cached, output_dir=tmp_path / name)
        found.append((record["layer_weights"]["input"], predictions_of(tmp_path / name / "predictions_test.jsonl")))
    (weights, rows), (other_weights, others) = found
    assert weights == pytest.approx(other_weights, abs=1e-5) and max(abs(each - 1 / 3) for each in weights) > 1e-3
    assert rows == others
    (file,) = (tmp_path / "stored" / "features").iterdir()
    sentences = {tuple(words) for name in ("train", "dev", "test") for words in sentences_of(f"litbank_{name}.conll")}
    assert file.stat().st_size == sum(len(words) + 2 for words in sentences) * 3 * 16 * 4


def sentences_of(name: str) -> list[list[str]]:
    """The words of each sentence, read by a plain loop."""
    blocks = (TASKS / name).read_text(encoding="utf-8").split("\n\n")
    lines = [[line for line in block.splitlines() if line and line[0] != "#"] for block in blocks]
    return [[line.split("\t")[3] for line in block] for block in lines if block]


def test_cached_layers_of_a_document_with_many_sentences(place, tmp_path):
    """More than 127 numbers of sentences need other integers than those of the training data."""
    rows = ["\t".join(["long", "0", str(place), word, *"------", mark]) for place, word, mark in PAIR]
    lines = ["#begin document (long); part 0", *[*rows, ""] * 150]
    file = tmp_path / "long.conll"
    file.write_text("\n".join([*lines, "#end document\n"]), encoding="utf-8")
    options = {"max_steps": 1, "cache_features": True, "config_overrides": {"max_span_width": 2}}
    (record,) = experiment("coref", place, **options, test_file=file, output_dir=tmp_path / "run")
    assert record["gold_mentions"]["test"] == {"all": 300, "too_wide": 150}
    assert record["gold_mentions"]["train"]["too_wide"] > 0
