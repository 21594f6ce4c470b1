"""Experiments of the paper: arms and seeds of a task in one folder, resumed where they stopped; and ensembles."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, product
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from transformers import DataCollatorWithPadding, EarlyStoppingCallback
from transformers.utils import CONFIG_NAME

from modeling_elmo import ELMoConfig, ELMoModel, ELMoTokenizer
from modeling_elmo.tokenization.elmo_characters import SPECIAL_WORDS

from ..cards.card import CardArguments, without_folders
from ..cards.records import BASELINE_NAME, RunRecord, best_record, read_record, splits_of
from ..cards.results import report, write_results
from ..cards.tables import layer_names
from ..fine_tuning.data import training_share
from ..fine_tuning.features import FeatureStore, feature_store
from ..fine_tuning.head import HeadArguments, task_config, task_model, task_tokenizer, train_task
from ..fine_tuning.run import (
    data_digest,
    different_settings,
    holds_model,
    push_model,
    run_record,
    run_settings,
    split_outputs,
    write_predictions,
    write_run,
)
from ..fine_tuning.saved_head import head_trainer
from ..fine_tuning.task import SplitOutput, Task
from ..fine_tuning.trainer import TaskTrainingArguments, checkpoints_in, last_checkpoint
from ..program.command_line import option
from ..program.files import JsonObject, digest, files_named, read_json, sync, write_json
from ..program.models import check_model, load_pretrained, model_digest
from ..program.processes import sole_run
from .reports import PLAN_OUTPUT, RECORDS, add_records, read_records

SETTINGS = "settings.json"  # of a model that was begun
# Settings that name what a digest stands for: another disk may have the same files elsewhere.
FILE_SETTINGS = ("model_name_or_path", "word_vectors", "train_file", "validation_file", "test_file", "dataset")
SPLIT_SETTINGS = ("train_split", "validation_split", "test_split")
ELMO_SETTINGS = ("elmo_placement", "scalar_mix_mode", "scalar_mix_l2", "elmo_dropout", "freeze_bilm")
REFUSED_WITH_ENSEMBLE = (
    "ablation",
    "compare_baseline",
    "cache_features",
    "reuse_from",
    "early_stopping_patience",
    "push_to_hub",
)
TOKENIZATION_COLUMNS = ("example_number", "offset_mapping")  # of encodings: which words a row holds
NOT_COPIED = (RECORDS, "record.json", ".lock", PLAN_OUTPUT)  # the record is written last


class Arm(NamedTuple):
    """One way to configure the network."""

    name: str  # in records and folders
    overrides: JsonObject  # fields of the configuration
    fraction: float = 1.0  # of the training data


BASELINE = Arm(BASELINE_NAME, {"use_elmo": False, "elmo_placement": "input", "freeze_bilm": True})
ABLATIONS = {
    "layers": [
        Arm("top layer", {"scalar_mix_mode": "top"}),
        Arm("average", {"scalar_mix_mode": "average"}),
        Arm("learned, lambda 1", {"scalar_mix_mode": "learned", "scalar_mix_l2": 1.0}),
        Arm("learned, lambda 0.001", {"scalar_mix_mode": "learned", "scalar_mix_l2": 0.001}),
    ],
    "placement": [Arm(place, {"elmo_placement": place}) for place in ("input", "output", "both")],
    "data": [Arm(f"elmo@{share}", {}, share) for share in (0.01, 0.1, 1.0)],
}


def experiment_arms(ablation: str | None, compare_baseline: bool, use_elmo: bool, num_layers: int) -> list[Arm]:
    """The arms that the options ask for. `num_layers` counts the biLM's biLSTM layers."""
    if not use_elmo:
        return [BASELINE]
    if ablation is None:
        arms = [Arm("elmo", {})]
    elif ablation == "each_layer":
        names = layer_names(num_layers + 1)
        arms = [Arm(name, {"scalar_mix_mode": number}) for number, name in enumerate(names)]
    else:
        arms = ABLATIONS[ablation]
    if not compare_baseline:
        return arms
    if ablation != "data":
        return [BASELINE, *arms]
    baselines = [BASELINE._replace(name=f"baseline@{arm.fraction}", fraction=arm.fraction) for arm in arms]
    return arms + baselines


@dataclass(kw_only=True)
class ExperimentArguments(CardArguments):
    seeds: int = option(1, "Number of seeds, starting at --seed.")
    compare_baseline: bool = option(False, "Train the same network without ELMo too (Table 1).")
    ablation: Literal["layers", "each_layer", "placement", "data"] | None = option(
        None,
        "Comparison: layer weights (Table 2), each layer alone (Tables 5 and 6; with --head linear a "
        "probe), where ELMo enters (Table 3), or training sizes (Figure 1).",
    )
    cache_features: bool = option(False, "Compute the layers of the frozen biLM once and keep them on disk.")
    ensemble: list[str] = option([], "Folders of trained models whose probabilities are averaged, without training.")
    reuse_from: list[str] = option(
        [], "Folders of earlier experiments, whose models with the same settings are copied."
    )
    early_stopping_patience: int | None = option(
        None, "Number of evaluations without a better score after which training stops."
    )


def run_experiment(
    task: Task, head: HeadArguments, arguments: ExperimentArguments, training: TaskTrainingArguments
) -> list[RunRecord]:
    """Trains all arms and seeds, or averages an ensemble, and writes tables and figures below `output_dir`."""
    check_options(task, head, arguments, training)
    with sole_run(Path(training.output_dir), is_main_process=training.process_index == 0):
        experiment = Experiment(task, head, arguments, training)
        ensemble = arguments.ensemble
        records = [ensemble_record(task, ensemble, training)] if ensemble else experiment.run()
        if training.process_index == 0:
            model = ensemble[0] if ensemble else experiment.best_model(records)
            report(records, experiment.folder, model, arguments.ablation)
            if training.push_to_hub:
                push_model(experiment.best_folder(records), task, training)
    return records


def check_options(task: Task, head: HeadArguments, arguments: ExperimentArguments, training: TaskTrainingArguments):
    ensemble = arguments.ensemble
    last_seed = training.seed + arguments.seeds - 1
    options = vars(arguments) | {"push_to_hub": training.push_to_hub}
    trained = next((name for name in REFUSED_WITH_ENSEMBLE if options[name]), None)
    only_baseline = not head.use_elmo and (arguments.compare_baseline or arguments.ablation)
    no_folder = [folder for folder in arguments.reuse_from if not Path(folder).is_dir()]
    no_validation = arguments.early_stopping_patience is not None and "validation" not in task.data
    mistakes = [
        (last_seed >= 2**32, f"--seeds {arguments.seeds}: the last seed, {last_seed}, must be below {2**32}."),
        (ensemble and trained, f"--ensemble only averages trained models; leave out --{trained}."),
        (ensemble and arguments.seeds != 1, "--ensemble trains nothing; leave out --seeds."),
        (ensemble and not task.can_average, f"--ensemble: each model for {task.name} keeps other spans; pass one."),
        (only_baseline, "--no_use_elmo trains only the baseline; leave out --compare_baseline and --ablation."),
        (training.resume_from_checkpoint, "--resume_from_checkpoint: a stopped experiment resumes by itself; omit it."),
        (no_folder, f"--reuse_from {' '.join(no_folder)}: folder not found; pass another."),
        (
            arguments.cache_features and not head.freeze_bilm,
            "--cache_features needs a frozen biLM; pass --freeze_bilm.",
        ),
        (no_validation, "--early_stopping_patience needs a validation split; pass --validation_file FILE."),
    ]
    for is_made, message in mistakes:
        if is_made:
            raise ValueError(message)
    task.check_splits(is_trained=not ensemble)


def is_same_model(begun: JsonObject, settings: JsonObject) -> bool:
    """Whether the settings are equal, except names of files, whose digests count, and those that a baseline ignores."""
    ignored = FILE_SETTINGS if settings["use_elmo"] else FILE_SETTINGS + ELMO_SETTINGS
    return not different_settings(begun, settings, ignored)


@dataclass
class Experiment:
    """All arms of a task, each with all seeds. Finished models are not trained again, and a stopped one resumes.

    A model is in `output_dir/ARM/seed-N`, or in `output_dir` if it is the only or was the first one.
    """

    task: Task
    head: HeadArguments
    arguments: ExperimentArguments
    training: TaskTrainingArguments

    def __post_init__(self):
        self.folder = Path(self.training.output_dir)
        self.is_main = self.training.process_index == 0
        self.trainer_arguments = self.training.for_trainer(self.task.metric, "validation" in self.task.data)
        self.word_vectors = self.head.read_word_vectors()
        num_layers = load_pretrained(ELMoConfig, self.head.model_name_or_path).num_hidden_layers
        arguments = self.arguments
        self.arms = experiment_arms(arguments.ablation, arguments.compare_baseline, self.head.use_elmo, num_layers)
        first = self.training.seed
        # All arms of a seed, so that a stopped experiment has compared them.
        self.members = list(product(range(first, first + arguments.seeds), self.arms))

    def run(self) -> list[RunRecord]:
        """Trains the missing models, and returns the record of each, which is in the file once the model is whole."""
        for arm in self.arms:  # a network that cannot be built fails before any training
            with torch.device("meta"):
                self.task.model_class(task_config(self.task, self.head, len(SPECIAL_WORDS) + 1, None, **arm.overrides))
        for seed, arm in self.members:
            self._check_settings(arm, seed)
        records = []
        for seed, arm in self.members:
            record = self._finished(arm, seed) or self._train(arm, seed)
            records.append(record)
            if self.is_main:
                add_records(self.folder, records)
                if arm is self.arms[-1]:
                    write_results(self.folder, records, self.arguments.ablation)
        return records

    def best_model(self, records: list[RunRecord]) -> Path:
        """The folder of the best model on the first split, with ELMo if any has it."""
        best = best_record(records_with_elmo(records))
        return self._folder_of(best["arm"], best["seed"])

    def best_folder(self, records: list[RunRecord]) -> Path:
        """The same folder, which must have the model. Its card says how it was chosen."""
        candidates = records_with_elmo(records)
        best = best_record(candidates)
        folder = self.best_model(records)
        if not (folder / CONFIG_NAME).is_file():
            raise FileNotFoundError(
                f"{self.folder} holds the record of the best model without the model. Train it in another "
                "--output_dir, or leave out --push_to_hub."
            )
        if len(candidates) > 1:
            best = best | {"best_of": len(candidates), "best_on": splits_of([best])[0]}
            write_run(folder, best, self.arguments, self.training)
        return folder

    def _folder_of(self, arm: str, seed: int) -> Path:
        inner = self.folder / re.sub(r"\W+", "-", arm) / f"seed-{seed}"
        first = self.folder / "record.json"  # of an experiment that had one model
        if first.is_file():
            is_outer = is_member(read_record(first), arm, seed)
        else:
            is_outer = len(self.members) == 1 and not (inner / "record.json").is_file()
        return self.folder if is_outer else inner

    def _recorded(self, arm: Arm, seed: int) -> RunRecord | None:
        _, records = read_records(self.folder)
        for record in records:
            if is_member(record, arm.name, seed):
                return record
        return None

    def _finished(self, arm: Arm, seed: int) -> RunRecord | None:
        """The record of a model that was trained before, here or with the same settings in another experiment."""
        with self.training.main_process_first(desc="looking for the model"):  # the others see what it finds
            if self.is_main and self._recorded(arm, seed) is None:
                self._look_for(arm, seed)
            record = self._recorded(arm, seed)
        if self.is_main and record is not None:
            print(f"{self._folder_of(arm.name, seed)} is finished; its recorded scores are used.", flush=True)
        return record

    def _look_for(self, arm: Arm, seed: int):
        """Looks for a model with the same settings that is not in the file, and copies it from another folder.

        A record without its model, such as those that we ship, is enough for the tables.
        """
        folder = self._folder_of(arm.name, seed)
        settings = without_folders(self._settings(arm, seed))
        places = map(Path, self.arguments.reuse_from)
        for record, other in chain.from_iterable(map(known_records, [self.folder, *places])):
            if not is_same_model(record.get("settings", {}), settings):
                continue
            record["arm"] = arm.name
            record.pop("best_of", None)
            record.pop("best_on", None)
            if other is not None and other != folder:
                folder.mkdir(parents=True, exist_ok=True)
                for file in other.iterdir():
                    if file.is_file() and file.name not in NOT_COPIED:
                        shutil.copy2(file, folder)
                write_run(folder, record, self.arguments, self.training)
                print(f"{folder} is a copy of {other}, which has the same settings.", flush=True)
            add_records(self.folder, [record])
            return

    def _check_settings(self, arm: Arm, seed: int):
        folder = self._folder_of(arm.name, seed)
        path = folder / SETTINGS
        settings = without_folders(self._settings(arm, seed))
        record = self._recorded(arm, seed)
        if record:
            begun = record["settings"]
        elif holds_model(folder):
            begun = read_json(path) if path.exists() else {}
        else:  # a new model of the arm: only its seed may differ, or its fold
            folder = self.folder
            _, records = read_records(folder)
            begun = next((record["settings"] for record in records if record["arm"] == arm.name), settings)
            may_differ = ["seed"]
            if any(begun.get(name) != settings.get(name) for name in SPLIT_SETTINGS):
                may_differ += ["data_digest", *SPLIT_SETTINGS]
            begun = begun | {name: settings[name] for name in may_differ if name in settings}
        if not is_same_model(begun, settings):
            raise FileExistsError(
                f"{folder} was made with other settings: {different_settings(begun, settings)}. Pass another "
                "--output_dir, or delete the folder."
            )

    def _settings(self, arm: Arm, seed: int) -> JsonObject:
        """All options that the scores of a model depend on."""
        return {
            **run_settings(self.task, self.head, self.training),
            "early_stopping_patience": self.arguments.early_stopping_patience,
            **self._digests[arm.overrides.get("use_elmo", True)],
            **arm.overrides,
            "train_fraction": arm.fraction * self.task.arguments.train_fraction,
            "seed": seed,
        }

    @cached_property
    def _digests(self) -> dict[bool, dict[str, str]]:
        """The digests of what a model reads, with ELMo and without: a file may change and keep its name."""
        shared = {"data_digest": data_digest(self.task)}
        if self.word_vectors is not None:
            words, vectors = self.word_vectors
            shared["word_vectors_digest"] = digest([json.dumps(words).encode(), vectors.tobytes()])
        digests = {}
        for use_elmo in (True, False):
            of_model = model_digest(self.head.model_name_or_path, is_baseline=not use_elmo)
            digests[use_elmo] = shared | {"model_digest": of_model}
        return digests

    def _train(self, arm: Arm, seed: int) -> RunRecord:
        folder = self._folder_of(arm.name, seed)
        settings = self._settings(arm, seed)
        begun = last_checkpoint(folder)
        start = time.monotonic() if begun is None else None
        if begun is None and self.is_main:
            write_json(folder / SETTINGS, without_folders(settings))
        train = self.task.data["train"]
        share = training_share(len(train), arm.fraction)
        tokenizer = task_tokenizer(self.task, self.head, train.select(share), self.word_vectors)
        splits = self._encoded(tokenizer)
        numbers = splits["train"]["example_number"]
        rows = np.flatnonzero(np.isin(numbers, list(share)))
        splits["train"] = splits["train"].select(rows)
        store = self.features if arm.overrides.get("use_elmo", True) else None
        changes: JsonObject = {
            "output_dir": str(folder),
            "seed": seed,
            "restore_callback_states_from_checkpoint": True,  # early stopping keeps its count
            # Stored layers are found by `text_number`.
            "remove_unused_columns": store is None and self.trainer_arguments.remove_unused_columns,
        }
        arguments = replace(self.trainer_arguments, **changes)
        patience = self.arguments.early_stopping_patience
        callbacks = None if patience is None else [EarlyStoppingCallback(patience)]
        make_model = partial(task_model, self.task, self.head, tokenizer, self.word_vectors, **arm.overrides)
        trainer = train_task(self.task, make_model, arguments, tokenizer, splits, begun, store, callbacks)
        record = run_record(trainer, self.task, splits, settings, start)
        record |= {"arm": arm.name, "train_samples": len(share)}
        if trainer.is_world_process_zero():
            write_run(folder, record, self.arguments, self.training)
            sync(folder)
            for checkpoint in checkpoints_in(folder).values():  # the folder itself holds the best of them now
                shutil.rmtree(checkpoint)
        return record

    def _encoded(self, tokenizer: ELMoTokenizer) -> dict[str, Dataset]:
        with self.training.main_process_first(desc="encoding"):  # the others read it from the cache
            splits = self.task.encode_splits(tokenizer)
        return number_rows(splits) if self.arguments.cache_features else splits

    @cached_property
    def features(self) -> FeatureStore | None:
        """The frozen biLM's layers for all texts, if they are to be cached."""
        if not self.arguments.cache_features:
            return None
        name = self.head.model_name_or_path
        tokenizer = load_pretrained(ELMoTokenizer, name)
        config = task_config(self.task, self.head, len(tokenizer), None)
        model = load_pretrained(ELMoModel, name, config=config, dtype=torch.float32)
        model.to(self.training.device)
        splits = self._encoded(tokenizer).values()
        shared = set.intersection(*(set(rows.column_names) for rows in splits))
        columns = sorted(shared.difference(self.task.head_columns))
        all_rows = concatenate_datasets([rows.select_columns(columns) for rows in splits])
        with self.training.main_process_first(desc="computing the biLM's layers"):
            return feature_store(self.folder / "features", model, all_rows, DataCollatorWithPadding(tokenizer))


def records_with_elmo(records: list[RunRecord]) -> list[RunRecord]:
    """The records of models with ELMo, or all if there are none."""
    return [record for record in records if record.get("layer_weights")] or records


def is_member(record: RunRecord, arm: str, seed: int) -> bool:
    return (record["arm"], record["seed"]) == (arm, seed)


def known_records(folder: Path) -> Iterator[tuple[RunRecord, Path | None]]:
    """The records below a folder: first of models, with their folders, and then all that experiments keep."""
    for path in files_named("record.json", folder):
        yield read_record(path), path.parent
    for path in files_named(RECORDS, folder):
        _, records = read_records(path.parent)
        for record in records:
            yield record, None


def number_rows(splits: dict[str, Dataset]) -> dict[str, Dataset]:
    """Adds a column `text_number`, which counts the rows of all splits."""
    numbered = {}
    first = 0
    for split, rows in splits.items():
        end = first + len(rows)
        numbered[split] = rows.add_column("text_number", range(first, end))
        first = end
    return numbered


def ensemble_record(task: Task, folders: Sequence[str], training: TaskTrainingArguments) -> RunRecord:
    """The record of an ensemble: the mean of the probabilities of several models. Writes its predictions."""
    if len({*map(os.path.realpath, folders)}) < len(folders):
        raise ValueError(f"--ensemble {' '.join(folders)} has a model twice; pass it once.")
    members = [member_outputs(task, folder, training) for folder in folders]
    outputs = {}
    for split in members[0]:
        of_split = [member[split] for member in members]
        outputs[split] = average_outputs(task, of_split, folders)
    path = Path(training.output_dir, "results", "ensemble")
    predictions = write_predictions(task, outputs, path, training.process_index == 0)
    return {
        "task": task.name,
        "arm": f"ensemble of {len(folders)}",
        "seed": 0,
        "metric": task.metric,
        "metrics": {split: task.scores(records) for split, records in predictions.items()},
        "layer_weights": {},
        "settings": {"ensemble": without_folders(list(folders))},
    }


def member_outputs(task: Task, folder: str, training: TaskTrainingArguments) -> dict[str, SplitOutput]:
    check_model(folder)
    trainer = head_trainer(task, folder, training)
    model = trainer.model
    trained_for = model.config.label2id
    labels = task.config.get("label2id", trained_for)
    if trained_for != labels or model.num_labels != len(labels):
        raise ValueError(
            f"--ensemble {folder} has the labels {sorted(trained_for)}, but the data has {sorted(labels)}; pass "
            "models that were trained for these labels."
        )
    splits = task.encode_splits(trainer.processing_class, [name for name in task.data if name != "train"])
    return split_outputs(trainer, task, splits)


def average_outputs(task: Task, members: Sequence[SplitOutput], folders: Sequence[str]) -> SplitOutput:
    first = members[0]
    columns = [name for name in TOKENIZATION_COLUMNS if name in first.rows.column_names]
    for folder, member in zip(folders, members, strict=True):
        for name in columns:
            if list(member.rows[name]) != list(first.rows[name]):
                raise ValueError(
                    f"--ensemble {folder} tokenizes differently from {folders[0]}; pass models with one tokenization."
                )
    return first._replace(logits=task.average([member.logits for member in members]))
