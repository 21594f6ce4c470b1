"""The base class of tasks: encodings, splits, scores that need no learning, and a new task.

The task is one class and uses everything else as it is.
"""

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from errors import refused
from task_worker import HEAD, WNUT17, bilm, predictions_of, sentences_of, written
from transformers import DataCollatorWithPadding

from modeling_elmo import ELMoForSequenceClassification
from modeling_elmo.run_scripts.experiments.experiment import ExperimentArguments, run_experiment
from modeling_elmo.run_scripts.fine_tuning.comparison import Comparison
from modeling_elmo.run_scripts.fine_tuning.data import DataArguments
from modeling_elmo.run_scripts.fine_tuning.head import HeadArguments, task_tokenizer
from modeling_elmo.run_scripts.fine_tuning.task import SplitOutput, Task
from modeling_elmo.run_scripts.fine_tuning.tasks.classification import Classification, ClassificationArguments
from modeling_elmo.run_scripts.fine_tuning.tasks.tagging import Tagging, TaggingArguments
from modeling_elmo.run_scripts.fine_tuning.trainer import TaskTrainingArguments


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return bilm(tmp_path_factory.mktemp("base") / "bilm")


@pytest.fixture(scope="module")
def task() -> Task:
    return Tagging.read(TaggingArguments(**WNUT17))


def head(folder: Path, **options) -> HeadArguments:
    return HeadArguments(model_name_or_path=str(folder), **options)


def test_another_tokenizer_gives_other_encodings(folder, task):
    """`datasets` finds encodings in its cache by a hash of the function and its arguments."""
    found = []
    for least in (1, 10**6, 1):
        tokenizer = task_tokenizer(task, head(folder, word_min_count=least), task.data["train"], None)
        found.append(task.encode_splits(tokenizer, ["train"])["train"]["input_ids"][:])
    assert found[0] == found[2] and {number for ids in found[1] for number in ids} == {1, 2, 3}
    assert 3 not in {number for ids in found[0] for number in ids}


def test_the_hash_of_a_task_has_no_data(task):
    found = pickle.loads(pickle.dumps(task))
    assert found.config == task.config and not hasattr(found, "data")
    assert found.source == WNUT17


def test_splits_that_are_missing():
    task = Tagging.read(TaggingArguments(train_file=WNUT17["train_file"]))
    with refused("no data to evaluate on; pass --validation_file FILE or --test_file FILE"):
        task.check_splits()
    task.data = DatasetDict(test=task.data["train"])
    task.check_splits(is_trained=False)
    with refused("There is no training data, only test; pass --train_file FILE"):
        task.check_splits()
    task.arguments.dataset = "name"
    with refused("There is no training data, only test; pass --train_split SPLIT"):
        task.check_splits()


# Scores that need no learning


def answering(task: Tagging, tags: list[list[str]], split: str = "test") -> SplitOutput:
    """The output of a tagger that predicts these tags for the first sentences of a split."""
    logits = np.zeros((len(tags), 2 + max(map(len, tags)), len(task.labels)))
    for row, names in enumerate(tags):
        logits[row, range(1, len(names) + 1), [task.labels.index(name) for name in names]] = 1
    return SplitOutput(logits, None, task.data[split].select(range(len(tags))), None)


def failure_of(task: Task, output: SplitOutput) -> str | None:
    predictions = list(task.predictions(output))
    return task.failure(predictions, task.scores(predictions))


def test_a_tagger_that_finds_nothing(task):
    gold = task.data["test"]["tags"][:]
    nothing = [["O"] * len(tags) for tags in gold]
    assert failure_of(task, answering(task, nothing)) == "f1 is 0.00, because the model always answers 'O'"
    wrong = answering(task, [[*tags[:-1], "I-product"] for tags in nothing])
    assert failure_of(task, wrong) == "f1 is 0.00, because hardly any answer is right"
    assert failure_of(task, answering(task, gold)) is None
    plain = Dataset.from_dict({"tokens": [["so", "it", "is"]] * 2, "tags": [["O"] * 3] * 2})  # there is nothing to find
    assert failure_of(task, answering(task, plain["tags"])._replace(examples=plain)) is None


@pytest.mark.parametrize(
    "labels, answers, expected",
    [
        ("xyxx", [0, 0, 0, 0], "accuracy is 75.00, because the model always answers 'x'"),
        ("xyxx", [0, 1, 0, 1], None),
        ("xx", [0, 0], None),  # right
    ],
)
def test_a_classifier_that_always_answers_the_same(labels, answers, expected, tmp_path):
    files = {}
    for split, of_split in (("train", "xy"), ("test", labels)):
        rows = "\n".join(json.dumps({"text": "a", "label": label}) for label in of_split)
        files[f"{split}_file"] = str(written(tmp_path / f"{split}.jsonl", rows))
    task = Classification.read(ClassificationArguments(**files))
    assert failure_of(task, SplitOutput(np.eye(2)[answers], None, task.data["test"], None)) == expected


# A new task is one class


@dataclass(kw_only=True)
class CapitalArguments(DataArguments):
    sentences_per_document: int = field(default=5, metadata={"help": "Number of sentences per document."})


class CountCapitals(Task):
    """The number of capitalized words of a document: one row per sentence, one score for the whole split."""

    name = "capitals"
    metric = "closeness"
    model_class = ELMoForSequenceClassification
    arguments_class = CapitalArguments

    @staticmethod
    def read_data(arguments):
        size = arguments.sentences_per_document
        splits = {}
        for split in ("train", "validation"):
            words = [words for words, _ in sentences_of(Path(getattr(arguments, f"{split}_file")))]
            documents = [words[first : first + size] for first in range(0, len(words), size)]
            splits[split] = Dataset.from_dict({"sentences": documents})
        return DatasetDict(splits)

    def prepare(self, data):
        self.config = {"num_labels": 1, "problem_type": "regression"}

    def restore(self, data, saved):
        self.prepare(data)

    def words(self, split, tokenizer):
        return (words for document in split["sentences"] for words in document)

    def encode(self, batch, tokenizer, is_training):
        rows = [(number, words) for number, document in enumerate(batch["sentences"]) for words in document]
        encoding = tokenizer([words for _, words in rows], is_split_into_words=True)
        labels = [float(capitals_of(words)) for _, words in rows]
        return {**encoding, "labels": labels, "example_number": [number for number, _ in rows]}

    def collator(self, tokenizer):
        return DataCollatorWithPadding(tokenizer)

    def scores(self, predictions):
        errors = [abs(record["predicted"] - record["capitals"]) for record in predictions]
        return {"closeness": 1 / (1 + sum(errors) / len(errors)), "documents": len(errors)}

    def predictions(self, output):
        for number, example in enumerate(output.examples):
            rows = [row for row, owner in enumerate(output.rows["example_number"]) if owner == number]
            capitals = sum(map(capitals_of, example["sentences"]))
            yield {"capitals": capitals, "predicted": float(output.logits[rows].sum())}

    def compare(self, example, prediction):
        return Comparison([], [], abs(prediction["predicted"] - prediction["capitals"]))


def capitals_of(words: list[str]) -> int:
    return sum(word[0].isupper() for word in words)


def test_a_new_task_is_one_class(folder, tmp_path):
    files = {name: WNUT17[name] for name in ("train_file", "validation_file")}
    task = CountCapitals.read(CapitalArguments(**files))
    options = {"num_train_epochs": 4, "learning_rate": 0.05, "use_cpu": True, "disable_tqdm": True}
    training = TaskTrainingArguments(output_dir=str(tmp_path), **options)
    arguments = ExperimentArguments(compare_baseline=True, cache_features=True)
    records = run_experiment(task, head(folder, config_overrides=json.dumps(HEAD)), arguments, training)
    assert [record["arm"] for record in records] == ["baseline", "elmo"]
    for record in records:
        scores = record["metrics"]["validation"]
        rows = predictions_of(tmp_path / record["arm"] / "seed-42" / "predictions_validation.jsonl")
        errors = [abs(row["predicted"] - row["capitals"]) for row in rows]
        assert scores["closeness"] == pytest.approx(1 / (1 + sum(errors) / len(errors)))
        assert scores["documents"] == len(rows) == 4 and record["task"] == "capitals"
