"""Fine-tuning of a task head with the stock Trainer: the arms of an experiment, each with several seeds.

An arm is one way to configure the network: with ELMo, without it, with other layer weights. `run_ner.py`,
`run_classification.py` and `run_qa.py` bring a `Task`, what differs between tasks; the rest is here.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from datasets import Dataset, concatenate_datasets
from torch.utils.data import SequentialSampler
from transformers import EarlyStoppingCallback, EvalPrediction, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

from modeling_elmo import ELMoConfig, ELMoModel, ELMoTokenizer
from modeling_elmo.run_scripts.cards.card import CardArguments, hub_name, without_folders, write_card_facts
from modeling_elmo.run_scripts.cards.figures import draw_ablation, draw_confusion, draw_data_curve, draw_layer_weights
from modeling_elmo.run_scripts.cards.head_card import write_head_card
from modeling_elmo.run_scripts.cards.publishing import push
from modeling_elmo.run_scripts.cards.tables import (
    best_record,
    first_split,
    last_split,
    read_record,
    score_table,
    summarize,
    summary_table,
    write_results,
)
from modeling_elmo.run_scripts.fine_tuning.data import training_share
from modeling_elmo.run_scripts.fine_tuning.features import FeatureCollator, FeatureStore, feature_store
from modeling_elmo.run_scripts.fine_tuning.moving_average import MovingAverage
from modeling_elmo.run_scripts.fine_tuning.task import (
    HeadArguments,
    Predicted,
    Record,
    Task,
    elmo_placement,
    encoded,
    rows_of,
    scalar_mix_l2,
    task_config,
    task_model,
    task_tokenizer,
)
from modeling_elmo.run_scripts.fine_tuning.word_vectors import WordVectors, read_word_vectors
from modeling_elmo.run_scripts.program.files import write_json
from modeling_elmo.tokenization.elmo_characters import SPECIAL_WORDS

logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class ExperimentArguments(CardArguments):
    seeds: int = field(
        default=1, metadata={"help": "Trains with --seed and so many next ones; reports mean, deviation."}
    )
    compare_baseline: bool = field(default=False, metadata={"help": "Also the same network without ELMo (Table 1)."})
    ablation: Literal["layers", "each_layer", "placement", "data"] | None = field(
        default=None,
        metadata={
            "help": "Compare layer weights (Table 2), each layer alone (Tables 5 and 6; with --head linear a probe), "
            "places (Table 3), training sizes (Figure 1)."
        },
    )
    cache_features: bool = field(
        default=False, metadata={"help": "Compute the frozen biLM's layers once and keep them on disk."}
    )
    ensemble: list[str] | None = field(
        default=None, metadata={"help": "No training: average the probabilities of these trained models."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after so many evaluations without a better one."}
    )


@dataclass
class TaskTrainingArguments(TrainingArguments):
    """Trainer's, with the defaults of the paper's tagger (AllenNLP's configuration of it)."""

    learning_rate: float = 1e-3
    lr_scheduler_type: str = "constant"
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 64
    num_train_epochs: float = 20
    max_grad_norm: float = 5.0
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int = 1
    load_best_model_at_end: bool = True
    report_to: str = "none"
    adadelta: bool = field(default=False, metadata={"help": "Adadelta (rho 0.95) in place of --optim."})
    ema_decay: float = field(
        default=0.0, metadata={"help": "Evaluate and save an exponential moving average of the weights; 0: themselves."}
    )

    def __post_init__(self):
        if self.metric_for_best_model == "loss" or self.greater_is_better is False:
            raise ValueError(
                "The best checkpoint is that of the best figure of the task: leave out what asks for others."
            )
        super().__post_init__()  # where nothing was asked for, it fills in the loss
        if self.adadelta and self.optim != TrainingArguments.__dataclass_fields__["optim"].default:
            raise ValueError(f"--optim {self.optim.value} beside Adadelta: pass --no_adadelta, or leave it out.")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"--ema_decay {self.ema_decay}: pass a number from 0 up to 1, 1 excluded.")


# Of the training's options those that figures depend on.
SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps", "max_grad_norm"),
    *("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16"),
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "data_seed"),
    *("eval_strategy", "eval_steps", "save_strategy", "save_steps", "load_best_model_at_end"),
    *("adadelta", "ema_decay", "train_sampling_strategy"),
)
OF_OPTIM = ("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon")  # which Adadelta replaces


# Columns of encoded data that tell where its words stand in the texts.
PLACES = ("example_number", "offset_mapping")


class Arm(NamedTuple):
    """A way to configure the network, and the share of the training data that it sees."""

    name: str
    overrides: dict[str, Any]
    fraction: float = 1.0


BASELINE = Arm("baseline", {"use_elmo": False, "elmo_placement": "input", "freeze_bilm": True})
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


def arms_of(arguments: ExperimentArguments, use_elmo: bool = True, num_layers: int = 2) -> list[Arm]:
    if not use_elmo:
        return [BASELINE]
    alone = [
        Arm(f"biLSTM {layer}" if layer else "token layer", {"scalar_mix_mode": layer})
        for layer in range(num_layers + 1)
    ]
    sets = {**ABLATIONS, "each_layer": alone, "": [Arm("elmo", {})]}
    arms = sets[arguments.ablation or ""]
    if not arguments.compare_baseline:
        return arms
    if arguments.ablation == "data":
        return [*arms, *(BASELINE._replace(name=f"baseline@{arm.fraction}", fraction=arm.fraction) for arm in arms)]
    return [BASELINE, *arms]


def fine_tune(
    task: Task, head: HeadArguments, arguments: ExperimentArguments, training: TaskTrainingArguments
) -> list[Record]:
    """Trains, or averages an ensemble, and writes tables and pictures below `training.output_dir`."""
    check_arguments(task, head, arguments, training)
    experiment = Experiment(task, head, arguments, training)
    records = [experiment.average(arguments.ensemble)] if arguments.ensemble else experiment.run()
    if training.process_index == 0:
        report(records, Path(training.output_dir), arguments)
        if training.push_to_hub:
            name = training.hub_model_id or experiment.folder.resolve().name
            best = experiment.best_folder(records)
            push(best, name, f"Fine-tuned: {task.name}", training.hub_private_repo, training.hub_token)
    return records


def check_arguments(task: Task, head: HeadArguments, arguments: ExperimentArguments, training: TaskTrainingArguments):
    if arguments.seeds < 1:
        raise ValueError(f"--seeds {arguments.seeds}: pass how many, at least 1.")
    beside = ("ablation", "compare_baseline", "cache_features", "early_stopping_patience")
    given = [name for name in beside if getattr(arguments, name)] + ["push_to_hub"] * training.push_to_hub
    if arguments.ensemble and given:
        raise ValueError(f"--{given[0]} is for a model that is trained, and an --ensemble is none; leave one out.")
    if not head.use_elmo and (arguments.compare_baseline or arguments.ablation):
        raise ValueError("--no_use_elmo is the baseline alone: nothing of --compare_baseline or --ablation differs.")
    if training.label_smoothing_factor:
        raise ValueError(
            "--label_smoothing_factor would replace the head's own loss, of its CRF or labels; leave it out."
        )
    if training.metric_for_best_model not in (None, "loss", task.metric):
        raise ValueError(f"--metric_for_best_model {training.metric_for_best_model}: it is {task.metric} here.")
    if training.prediction_loss_only or not training.eval_do_concat_batches:
        raise ValueError(
            "--prediction_loss_only and --eval_do_concat_batches false leave nothing to score; leave them out."
        )
    if training.resume_from_checkpoint:
        raise ValueError("--resume_from_checkpoint: a stopped run goes on by itself with the same --output_dir.")
    if arguments.early_stopping_patience is not None and "validation" not in task.data:
        raise ValueError("--early_stopping_patience counts evaluations on --validation_file, or a split; pass one.")
    if not arguments.ensemble and "train" not in task.data:
        raise ValueError(f"There is nothing to train on, only {', '.join(task.data)}; pass --train_file FILE.")
    if not {"validation", "test"} & {*task.data}:
        raise ValueError("There is nothing to measure on; pass --validation_file FILE or --test_file FILE.")


def report(records: list[Record], folder: Path, arguments: ExperimentArguments):
    """Tables on the screen, and in `results/` with the records and pictures."""
    metric, task = records[0]["metric"], records[0]["task"]
    name = "_".join(filter(None, (task, arguments.ablation, "ensemble" if arguments.ensemble else None)))
    summaries = summarize(records)
    baseline = BASELINE.name if BASELINE.name in {summary.arm.partition("@")[0] for summary in summaries} else None
    write_results(folder, name, records, baseline)
    print(*filter(None, (summary_table(summaries, metric, baseline), score_table(summaries))), sep="\n\n")
    results = folder / "results"
    if any(record["layer_weights"] for record in records):
        draw_layer_weights(records, results / f"{name}_layer_weights.png")
    if arguments.ablation == "data":
        draw_data_curve(records, metric, results / f"{name}.png")
    elif len(summaries) > 1:
        draw_ablation(summaries, metric, results / f"{name}.png")
    best = best_record(records)
    scores = best["metrics"][last_split(best)]
    if "confusion" in scores:
        draw_confusion(scores["confusion"], list(scores["per_label"]), results / f"{name}_confusion.png")
    print(f"{results}: {name}.json, {name}.md and pictures")


@dataclass
class Experiment:
    """All arms of a task, each with all seeds, below `training.output_dir`.

    What is finished is not trained again: a stopped experiment goes on with the same command.
    """

    task: Task
    head: HeadArguments
    arguments: ExperimentArguments
    training: TaskTrainingArguments

    def __post_init__(self):
        self.folder = Path(self.training.output_dir)

    def run(self) -> list[Record]:
        """Trains what is missing, and returns the record of each member."""
        for arm in self._arms():  # what cannot be built is told before anything is trained
            with torch.device("meta"):
                self.task.model_class(task_config(self.task, self.head, len(SPECIAL_WORDS) + 1, None, **arm.overrides))
        members = [(arm, seed) for arm in self._arms() for seed in self._seeds()]
        for member in members:
            self._check_settings(*member)
        return [self._finished(arm, seed) or self._train(arm, seed) for arm, seed in members]

    def best_folder(self, records: list[Record]) -> Path:
        """The model, with ELMo unless there is no other, that is best on the first split; its card says so."""
        arms = {arm.name: arm for arm in self._arms()}
        candidates = [record for record in records if record["layer_weights"]] or records
        best = best_record(candidates)
        folder = self._folder_of(arms[best["arm"]], best["seed"])
        if len(candidates) > 1:
            best = best | {"best_of": len(candidates), "best_on": first_split(best)}
            write_head_card(folder, self._name(), best)
            write_json(folder / "record.json", best)
        return folder

    def _arms(self) -> list[Arm]:
        config = ELMoConfig.from_pretrained(self.head.model_name_or_path)
        return arms_of(self.arguments, self.head.use_elmo, config.num_hidden_layers)

    def _seeds(self) -> range:
        return range(self.training.seed, self.training.seed + self.arguments.seeds)

    def _folder_of(self, arm: Arm, seed: int) -> Path:
        """The output folder itself, where there is one member."""
        if len(self._arms()) * self.arguments.seeds == 1:
            return self.folder
        return self.folder / re.sub(r"\W+", "-", arm.name) / f"seed-{seed}"

    def _finished(self, arm: Arm, seed: int) -> Record | None:
        folder = self._folder_of(arm, seed)
        path = folder / "record.json"
        if not path.exists():
            return None
        record = read_record(path)
        logger.warning(f"{folder} is finished: {self.task.metric} as recorded there.")
        return record

    def _check_settings(self, arm: Arm, seed: int):
        """What was begun in this folder, if anything, had these settings; notes them if nothing was."""
        path, settings = self._folder_of(arm, seed) / "settings.json", self._settings(arm, seed)
        is_begun = (path.parent / "record.json").exists() or last_checkpoint(path.parent) is not None
        if not (path.exists() and is_begun):
            if self.training.process_index == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, settings)
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        other = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
        if other:
            changes = ", ".join(f"{name} {found.get(name)!r}, now {settings.get(name)!r}" for name in other)
            raise FileExistsError(
                f"{path.parent} was made with other settings: {changes}. Pass another --output_dir, or delete it."
            )

    def _settings(self, arm: Arm, seed: int) -> dict[str, Any]:
        """What a member's figures depend on."""
        training = self.training.to_dict()
        left_out = OF_OPTIM if self.training.adadelta else ()
        return {
            **vars(self.head),
            "elmo_placement": elmo_placement(self.task, self.head),
            "scalar_mix_l2": scalar_mix_l2(self.task, self.head),
            **self.task.settings,
            **{name: training[name] for name in SETTINGS if name in training and name not in left_out},
            "early_stopping_patience": self.arguments.early_stopping_patience,
            "world_size": self.training.world_size,
            **self._digests,
            **arm.overrides,
            "train_fraction": arm.fraction * self.task.settings["train_fraction"],
            "seed": seed,
        }

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Of the data, the biLM and the word vectors: under the same name there may be others tomorrow."""
        folder = Path(self.head.model_name_or_path)
        files = [path for kind in ("*.safetensors", "config.json", "tokenizer*.json") for path in folder.glob(kind)]
        config = ELMoConfig.from_pretrained(self.head.model_name_or_path)
        digests = {
            "data_digest": digest(json.dumps(row).encode() for rows in self.task.data.values() for row in rows),
            "model_digest": getattr(config, "_commit_hash", None)
            or digest(path.read_bytes() for path in sorted(files)),
        }
        if self.word_vectors is not None:
            parts = (json.dumps(self.word_vectors.words).encode(), self.word_vectors.vectors.tobytes())
            digests["word_vectors_digest"] = digest(parts)
        return digests

    def _train(self, arm: Arm, seed: int) -> Record:
        start, folder = time.monotonic(), self._folder_of(arm, seed)
        share = training_share(len(self.task.data["train"]), arm.fraction)
        tokenizer = task_tokenizer(self.task, self.head, self.task.data["train"].select(share), self.word_vectors)
        splits = self._encoded(tokenizer)
        splits["train"] = rows_of(splits["train"], share)
        set_seed(seed)
        model = task_model(self.task, self.head, tokenizer, self.word_vectors, seed, **arm.overrides)
        trainer = self._trainer(model, tokenizer, splits, seed, folder)
        trainer.train(resume_from_checkpoint=last_checkpoint(folder))
        trainer.compute_metrics = None  # it knows the validation split alone
        record = {
            "task": self.task.name,
            "arm": arm.name,
            "seed": seed,
            "metric": self.task.metric,
            "metrics": {},
            "layer_weights": {place: mix.layer_weights().tolist() for place, mix in model.mixes().items()},
            "data": without_folders(self.task.source),
            "columns": self.task.data["train"].column_names,
            "train_samples": len(share),
            "epochs": trainer.state.epoch,
            "settings": without_folders(self._settings(arm, seed)),
            "base_model": hub_name(self.head.model_name_or_path),
            "dataset": hub_name(self.task.source.get("dataset")),
        }
        for split in [name for name in splits if name != "train"]:
            output = trainer.predict(splits[split], metric_key_prefix=split)
            found = Predicted(output.predictions, output.label_ids, self.task.data[split], splits[split])
            record["metrics"][split] = self.task.scores(found)
            self._write_predictions(folder, f"predictions_{split}", found)
        trainer.save_model(str(folder))
        record["seconds"] = time.monotonic() - start
        if trainer.is_world_process_zero():
            write_card_facts(folder, self.arguments)
            write_head_card(folder, self._name(), record)
            write_json(folder / "record.json", record)  # the last: what has one is finished
            for checkpoint in folder.glob("checkpoint-*"):  # the best of them is the model now
                shutil.rmtree(checkpoint)
        return record

    def _trainer(self, model, tokenizer: ELMoTokenizer, splits: dict[str, Dataset], seed: int, folder: Path) -> Trainer:
        has_dev = "validation" in splits
        options = {} if has_dev else {"eval_strategy": "no", "load_best_model_at_end": False}
        arguments = self._replaced(
            output_dir=str(folder),
            seed=seed,
            restore_callback_states_from_checkpoint=True,  # early stopping goes on counting
            **options,
        )
        patience = self.arguments.early_stopping_patience
        return TaskTrainer(
            model,
            arguments,
            data_collator=FeatureCollator(
                self.task.collator(tokenizer), self.features if model.config.use_elmo else None
            ),
            train_dataset=splits["train"],
            eval_dataset=splits.get("validation"),
            processing_class=tokenizer,
            compute_metrics=partial(self._scalars, splits["validation"]) if has_dev else None,
            callbacks=[EarlyStoppingCallback(patience)] if patience is not None and has_dev else None,
        )

    def _encoded(self, tokenizer: ELMoTokenizer) -> dict[str, Dataset]:
        with self.training.main_process_first(desc="encoding"):  # the others find it in the cache
            return encoded(self.task, tokenizer)

    def _replaced(self, **options: Any) -> TaskTrainingArguments:
        """The training's arguments with others in place of some, and what a member's Trainer always has."""
        # The best member is pushed, at the end; Trainer keeps its arguments in a file, which is no place for a token.
        # The collator needs `text_number`, which no head does.
        always: dict[str, Any] = {"push_to_hub": False, "hub_token": None, "remove_unused_columns": False}
        always |= {"metric_for_best_model": self.task.metric, "greater_is_better": True}
        return replace(self.training, **always, **options)

    def _name(self) -> str:
        return (self.training.hub_model_id or self.folder.resolve().name).split("/")[-1]

    def _scalars(self, rows: Dataset, prediction: EvalPrediction) -> dict[str, float]:
        examples = self.task.data["validation"]
        scores = self.task.scores(Predicted(prediction.predictions, prediction.label_ids, examples, rows))
        return {name: value for name, value in scores.items() if isinstance(value, (int, float))}

    @cached_property
    def word_vectors(self) -> WordVectors | None:
        path = self.head.word_vectors
        return None if path is None else read_word_vectors(path, self.head.word_vectors_limit)

    @cached_property
    def features(self) -> FeatureStore | None:
        if not self.arguments.cache_features:
            return None
        if not self.head.freeze_bilm:
            raise ValueError("--cache_features keeps what a frozen biLM puts out; leave it or --no_freeze_bilm out.")
        tokenizer = ELMoTokenizer.from_pretrained(self.head.model_name_or_path)
        config = task_config(self.task, self.head, len(tokenizer), None)
        model = ELMoModel.from_pretrained(self.head.model_name_or_path, config=config, dtype=torch.float32)
        model.to(self.training.device)
        splits = self._encoded(tokenizer).values()
        names = set.intersection(*(set(rows.column_names) for rows in splits))
        rows = concatenate_datasets([each.select_columns(sorted(names)) for each in splits])
        with self.training.main_process_first(desc="computing the biLM's layers"):
            return feature_store(self.folder / "features", model, rows, self.task.collator(tokenizer))

    def average(self, folders: Sequence[str]) -> Record:
        """The record of an ensemble: the mean of its members' probabilities."""
        members: dict[str, list[Predicted]] = {}
        splits = [split for split in self.task.data if split != "train"]
        for folder in folders:
            model = self.task.model_class.from_pretrained(folder, dtype=torch.float32)
            expected = self.task.config.get("label2id", model.config.label2id)
            if model.config.label2id != expected or model.num_labels != len(expected):
                raise ValueError(
                    f"--ensemble {folder} has the labels {sorted(model.config.label2id)}, but the data has "
                    f"{sorted(expected)}; pass models that were trained for these."
                )
            tokenizer = ELMoTokenizer.from_pretrained(folder)
            arguments = self._replaced(eval_strategy="no", load_best_model_at_end=False)
            trainer = TaskTrainer(model, arguments, FeatureCollator(self.task.collator(tokenizer), None))
            for split, rows in encoded(self.task, tokenizer, splits).items():
                output = trainer.predict(rows)
                found = Predicted(output.predictions, output.label_ids, self.task.data[split], rows)
                members.setdefault(split, []).append(found)
        means = {split: self._mean(found, folders) for split, found in members.items()}
        for split, mean in means.items():
            self._write_predictions(self.folder / "results", f"ensemble_{split}", mean)
        return {
            "task": self.task.name,
            "arm": f"ensemble of {len(folders)}",
            "seed": 0,
            "metric": self.task.metric,
            "metrics": {split: self.task.scores(mean) for split, mean in means.items()},
            "layer_weights": {},
            "settings": {"ensemble": without_folders(list(folders))},
        }

    def _mean(self, members: Sequence[Predicted], folders: Sequence[str]) -> Predicted:
        first = members[0]
        names = [name for name in PLACES if name in first.rows.column_names]
        for folder, member in zip(folders, members, strict=True):
            if any(list(member.rows[name]) != list(first.rows[name]) for name in names):
                raise ValueError(f"--ensemble {folder} divides texts otherwise than {folders[0]}; pass one kind.")
        return first._replace(logits=self.task.average([member.logits for member in members]))

    def _write_predictions(self, folder: Path, name: str, found: Predicted):
        if self.training.process_index != 0:
            return
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.task.predictions(found))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


class TaskTrainer(Trainer):
    """The stock one, but the mixes are spared weight decay, their layer weights are logged, and with `ema_decay` the
    averages of the weights are evaluated and saved."""

    def __init__(self, model, args: TaskTrainingArguments, *others, **options):
        if args.adadelta:  # as Zeiler (2012) and BiDAF have it
            options["optimizer_cls_and_kwargs"] = (torch.optim.Adadelta, {"lr": args.learning_rate, "rho": 0.95})
        super().__init__(model, args, *others, **options)
        if args.ema_decay and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError("--ema_decay averages whole weights, and FSDP or DeepSpeed has parts of them; pass 0.")
        self.average = MovingAverage(self.model, args.ema_decay) if args.ema_decay else None
        if self.average is not None:
            self.add_callback(self.average)

    def get_decay_parameter_names(self, model) -> list[str]:
        # Decay would pull gamma to 0; by name it spares nothing but biases and layer norms.
        return [name for name in super().get_decay_parameter_names(model) if "_mix." not in name]

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler | None:
        # Examples are told by their number. Trainer's own would group them by length if training does.
        return SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None

    def _averaged(self) -> AbstractContextManager:
        return nullcontext() if self.average is None else self.average.in_model()

    def train(self, *args, **kwargs):
        output = super().train(*args, **kwargs)
        if self.average is not None:  # no best model was loaded
            self.average.keep()
            self.average = None
        return output

    def _load_best_model(self):
        super()._load_best_model()
        self.average = None

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        with self._averaged():
            metrics = super().evaluate(*args, **kwargs)
            for place, mix in self.accelerator.unwrap_model(self.model).mixes().items():
                weights = mix.layer_weights().tolist()
                self.log({f"{place}_layer_{number}": weight for number, weight in enumerate(weights)})
        return metrics

    def save_model(self, output_dir=None, _internal_call: bool = False):
        with self._averaged():
            super().save_model(output_dir, _internal_call)
        if self.average is not None and self.args.should_save:
            self.average.save_trained(Path(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.average is not None:
            self.average.load_trained(Path(resume_from_checkpoint))


def digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def last_checkpoint(folder: Path) -> str | None:
    """The last one that was written to its end: Trainer writes its state last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda path: int(path.name.split("-")[-1]))) if whole else None
