"""Experiments: arms and seeds, what is finished and what was stopped, stored features, ensembles."""

import json
import shutil
import statistics
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from task_worker import (
    HEAD,
    WITHOUT_DROPOUT,
    assert_same_weights,
    bilm,
    capitals,
    predictions_of,
    read_json,
    sentences_of,
    tag,
)
from transformers import TrainerCallback

from modeling_elmo import ELMoForTokenClassification, ELMoTokenizer
from modeling_elmo.run_scripts.cards import publishing
from modeling_elmo.run_scripts.fine_tuning import experiments, features
from modeling_elmo.run_scripts.fine_tuning.experiments import (
    ABLATIONS,
    ExperimentArguments,
    TaskTrainer,
    arms_of,
    report,
)

DRAWINGS = ("draw_layer_weights", "draw_ablation", "draw_data_curve", "draw_confusion")
# Six steps an epoch: enough for each epoch and each member to have another score.
RUN = {"per_device_train_batch_size": 10, "learning_rate": 0.05, "num_train_epochs": 3}
SHORT = {"max_steps": 1, "max_eval_samples": 2}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing them takes as long as a run here."""
    for name in DRAWINGS:
        monkeypatch.setattr(experiments, name, lambda *_: True)


@pytest.fixture
def trainers(monkeypatch) -> list[TaskTrainer]:
    """Those that are made while a test runs."""
    made = []

    class Remembered(TaskTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(experiments, "TaskTrainer", Remembered)
    return made


def stop_in(monkeypatch, event: str, number: int = 1):
    """Ctrl-C at this `event` of a training."""
    events = []

    def pressed(*_, **__):
        events.append(event)
        if len(events) == number:
            raise KeyboardInterrupt

    class Stopped(TaskTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(type("Stop", (TrainerCallback,), {event: pressed}))

    monkeypatch.setattr(experiments, "TaskTrainer", Stopped)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A biLM and data."""
    folder = tmp_path_factory.mktemp("place")
    bilm(folder / "bilm")
    capitals(folder)
    return folder


def train(place: Path, output: Path | str, **options) -> list[dict]:
    files = {f"{split}_file": place / f"{split}.conll" for split in ("train", "validation", "test")}
    return tag(place, **{**RUN, **files, "output_dir": output, **options})


@pytest.fixture(scope="module")
def experiment(place) -> Path:
    """Two arms with two seeds; the folder is not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in DRAWINGS:
            patch.setattr(experiments, name, lambda *_: True)
        train(place, place / "experiment", compare_baseline=True, seeds=2)
    return place / "experiment"


MEMBERS = [f"{arm}/seed-{seed}" for arm in ("baseline", "elmo") for seed in (42, 43)]


def scores_of(experiment: Path, arm: str, split: str = "test") -> list[float]:
    records = (read_json(experiment / arm / f"seed-{seed}" / "record.json") for seed in (42, 43))
    return [record["metrics"][split]["f1"] for record in records]


# Arms


def test_arms():
    assert [arm.name for arm in arms_of(ExperimentArguments())] == ["elmo"]
    assert [arm.name for arm in arms_of(ExperimentArguments(compare_baseline=True))] == ["baseline", "elmo"]
    assert [arm.name for arm in arms_of(ExperimentArguments(), use_elmo=False)] == ["baseline"]
    arms = arms_of(ExperimentArguments(ablation="data", compare_baseline=True))
    assert {arm.name: (arm.fraction, arm.overrides.get("use_elmo", True)) for arm in arms} == {
        **{f"elmo@{share}": (share, True) for share in (0.01, 0.1, 1.0)},
        **{f"baseline@{share}": (share, False) for share in (0.01, 0.1, 1.0)},
    }


def test_members_and_their_folders(experiment):
    assert sorted(str(path.parent.relative_to(experiment)) for path in experiment.rglob("model.safetensors")) == MEMBERS
    for member in MEMBERS:
        arm, seed = member.split("/seed-")
        record, config = (read_json(experiment / member / name) for name in ("record.json", "config.json"))
        assert (record["arm"], record["seed"], record["task"], record["metric"]) == (arm, int(seed), "ner", "f1")
        assert config["use_elmo"] is (arm == "elmo") and config["task_hidden_size"] == HEAD["task_hidden_size"]
        assert set(record["layer_weights"]) == ({"input"} if arm == "elmo" else set())
        assert record["epochs"] == 3 and record["train_samples"] == 60 and record["seconds"] > 0
        assert not list((experiment / member).glob("checkpoint-*")) and not list(experiment.rglob("*.part"))
    assert all(value > 0 for arm in ("baseline", "elmo") for value in scores_of(experiment, arm))


def test_layer_weights_are_those_of_the_saved_model(experiment):
    record = read_json(experiment / "elmo" / "seed-42" / "record.json")
    raw = load_file(experiment / "elmo" / "seed-42" / "model.safetensors")["input_mix.weights"]
    assert record["layer_weights"]["input"] == pytest.approx((raw.exp() / raw.exp().sum()).tolist(), rel=1e-5)
    assert raw.any()


def test_results_of_all_members(experiment):
    results = read_json(experiment / "results" / "ner.json")
    records = [read_json(experiment / member / "record.json") for member in MEMBERS]
    assert results["records"] == records
    for summary in results["summaries"]:
        values = scores_of(experiment, summary["arm"])
        assert summary["seeds"] == [42, 43]
        assert summary["mean"]["test"]["f1"] == pytest.approx(statistics.mean(values))
        assert summary["deviation"]["test"]["f1"] == pytest.approx(statistics.stdev(values))


def test_the_table_compares_both_arms(experiment, place, capsys):
    train(place, experiment, compare_baseline=True, seeds=2)
    printed = capsys.readouterr().out
    baseline, elmo = (statistics.mean(scores_of(experiment, arm)) for arm in ("baseline", "elmo"))
    deviation = statistics.stdev(scores_of(experiment, "elmo"))
    gain = f"{100 * (elmo - baseline):+.2f} / {(elmo - baseline) / (1 - baseline):.1%}"
    for text in (printed, (experiment / "results" / "ner.md").read_text(encoding="utf-8")):
        lines = text.partition("## ")[0].partition("arm, on")[0].splitlines()
        rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
        assert gain in rows["elmo"] and f"{100 * elmo:.2f} ± {100 * deviation:.2f}" in rows["elmo"]
        assert f"{100 * baseline:.2f} ±" in rows["baseline"]


def test_pictures(experiment, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.undo()
    records = [read_json(experiment / member / "record.json") for member in MEMBERS]
    report(records, tmp_path, ExperimentArguments(compare_baseline=True))
    assert {path.name for path in (tmp_path / "results").glob("*.png")} == {"ner.png", "ner_layer_weights.png"}
    shares = [{**record, "arm": f"{record['arm']}@1.0"} for record in records]
    report(shares, tmp_path, ExperimentArguments(compare_baseline=True, ablation="data"))
    assert (tmp_path / "results" / "ner_data.png").stat().st_size > 1000


# Each saved configuration has the fields that an arm stands for.
SAVED = {
    "layers": [
        ("top-layer", {"scalar_mix_mode": "top"}),
        ("average", {"scalar_mix_mode": "average"}),
        ("learned-lambda-1", {"scalar_mix_mode": "learned", "scalar_mix_l2": 1.0}),
        ("learned-lambda-0-001", {"scalar_mix_mode": "learned", "scalar_mix_l2": 0.001}),
    ],
    "placement": [(where, {"elmo_placement": where, "use_elmo": True}) for where in ("input", "output", "both")],
    "each_layer": [
        (name, {"scalar_mix_mode": layer}) for layer, name in enumerate(("token-layer", "biLSTM-1", "biLSTM-2"))
    ],
    "data": [
        *((f"elmo-{share}", {"use_elmo": True}) for share in ("0-01", "0-1", "1-0")),
        *((f"baseline-{share}", {"use_elmo": False}) for share in ("0-01", "0-1", "1-0")),
    ],
}


@pytest.mark.parametrize("ablation", [*ABLATIONS, "each_layer"])
def test_ablations(ablation, place, tmp_path):
    records = train(place, tmp_path, **SHORT, ablation=ablation, compare_baseline=ablation == "data")
    assert len(records) == len(SAVED[ablation]) and len(list(tmp_path.rglob("record.json"))) == len(records)
    for (name, fields), record in zip(SAVED[ablation], records, strict=True):
        config = read_json(tmp_path / name / "seed-42" / "config.json")
        assert {field: config[field] for field in fields} == fields
        assert set(record["layer_weights"]) == {
            where for where in ("input", "output") if config["use_elmo"] and config["elmo_placement"] in (where, "both")
        }
    if ablation == "data":
        assert [record["train_samples"] for record in records] == [1, 6, 60, 1, 6, 60]
        sizes = [read_json(tmp_path / name / "seed-42" / "config.json")["vocab_size"] for name, _ in SAVED["data"]]
        assert sizes[:3] == sizes[3:] and sizes[0] < sizes[1] < sizes[2]
    assert (tmp_path / "results" / f"ner_{ablation}.md").is_file()


# What is finished


def test_what_is_finished_is_not_trained_again(experiment, place, trainers):
    files = [*experiment.rglob("*.safetensors"), *experiment.rglob("record.json"), *experiment.rglob("*.jsonl")]
    before = {path: path.stat().st_mtime_ns for path in files}
    records = train(place, experiment, compare_baseline=True, seeds=2)
    assert not trainers and {path: path.stat().st_mtime_ns for path in files} == before
    assert records == [read_json(experiment / member / "record.json") for member in MEMBERS]


def test_what_is_missing_is_trained(experiment, place, tmp_path, trainers):
    for arm in ("baseline", "elmo"):
        shutil.copytree(experiment / arm / "seed-42", tmp_path / arm / "seed-42")
    records = train(place, tmp_path, compare_baseline=True, seeds=2, seed=41, num_train_epochs=3)
    assert [record["seed"] for record in records] == [41, 42, 41, 42] and len(trainers) == 2


OTHERS = [
    ({"learning_rate": 0.01}, "learning_rate"),
    ({"num_train_epochs": 4}, "num_train_epochs"),
    ({"per_device_train_batch_size": 5}, "per_device_train_batch_size"),
    ({"weight_decay": 0.1}, "weight_decay"),
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
    ({"lr_scheduler_type": "linear"}, "lr_scheduler_type"),
    ({"max_grad_norm": 1.0}, "max_grad_norm"),
    ({"early_stopping_patience": 1}, "early_stopping_patience"),
    ({"word_min_count": 1}, "word_min_count"),
    ({"elmo_placement": "both"}, "elmo_placement"),
    ({"max_length": 7}, "max_length"),
    ({"config_overrides": {"task_hidden_size": 9}}, "task_hidden_size"),
    ({"train_file": "validation.conll"}, "train_file"),
    ({"test_file": "validation.conll"}, "test_file"),
    ({"test_file": None}, "test_file"),
    ({"max_train_samples": 10}, "max_train_samples"),
    ({"max_eval_samples": 10}, "max_eval_samples"),
    ({"train_fraction": 0.5}, "train_fraction"),
    ({"tag_scheme": "iob1"}, "tag_scheme"),
]


@pytest.mark.parametrize("options, name", OTHERS, ids=[str(options) for options, _ in OTHERS])
def test_other_settings_are_refused(options, name, experiment, place, trainers):
    files = {key: place / file for key, file in options.items() if key.endswith("_file") and file}
    with pytest.raises(FileExistsError, match=f"(?s)seed-42 was made with other settings.*{name}.*--output_dir"):
        train(place, experiment / "elmo" / "seed-42", **{**options, **files})
    assert not trainers


def test_other_data_under_the_same_name_is_noticed(place, tmp_path):
    train_file = shutil.copy(place / "train.conll", tmp_path / "mine.conll")
    train(place, tmp_path / "run", **SHORT, train_file=train_file)
    Path(train_file).write_text(Path(train_file).read_text("utf-8").replace("the\tO", "teh\tO"), encoding="utf-8")
    with pytest.raises(FileExistsError, match="(?s)other settings.*data_digest"):
        train(place, tmp_path / "run", **SHORT, train_file=train_file)


def test_another_bilm_under_the_same_name_is_noticed(place, tmp_path):
    folder = bilm(tmp_path / "bilm")
    train(place, tmp_path / "run", **SHORT, model_name_or_path=folder)
    bilm(folder, seed=1)
    with pytest.raises(FileExistsError, match="(?s)other settings.*model_digest"):
        train(place, tmp_path / "run", **SHORT, model_name_or_path=folder)


def test_other_word_vectors_or_another_tokenizer_under_the_same_name_are_noticed(place, tmp_path):
    vectors, folder = tmp_path / "vectors.txt", bilm(tmp_path / "bilm")
    options = {**SHORT, "word_vectors": vectors, "model_name_or_path": folder}
    vectors.write_text("the 1 2\nin 3 4\n")
    train(place, tmp_path / "run", **options)
    vectors.write_text("the 1 2\nin 3 5\n")
    with pytest.raises(FileExistsError, match="(?s)other settings.*word_vectors_digest"):
        train(place, tmp_path / "run", **options)
    vectors.write_text("the 1 2\nin 3 4\n")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"pre_tokenization": "treebank"}), "utf-8")
    with pytest.raises(FileExistsError, match="(?s)other settings.*model_digest"):
        train(place, tmp_path / "run", **options)


def test_a_start_that_failed_does_not_block_its_folder(place, tmp_path, monkeypatch):
    stop_in(monkeypatch, "on_train_begin")
    with pytest.raises(KeyboardInterrupt):
        train(place, tmp_path, **SHORT)
    monkeypatch.setattr(experiments, "TaskTrainer", TaskTrainer)
    (record,) = train(place, tmp_path, **SHORT, learning_rate=0.01)
    assert record["settings"]["learning_rate"] == 0.01


@pytest.mark.parametrize(
    "options, message",
    [
        ({"no_use_elmo": True, "compare_baseline": True}, "--no_use_elmo is the baseline alone"),
        ({"label_smoothing_factor": 0.1}, "--label_smoothing_factor would replace"),
        ({"metric_for_best_model": "accuracy"}, "--metric_for_best_model accuracy: it is f1 here"),
        ({"metric_for_best_model": "loss"}, "The best checkpoint is that of the best figure of the task"),
        ({"greater_is_better": "false"}, "The best checkpoint is that of the best figure of the task"),
        ({"prediction_loss_only": True}, "leave nothing to score"),
        ({"eval_do_concat_batches": "false"}, "leave nothing to score"),
        ({"resume_from_checkpoint": "last"}, "--resume_from_checkpoint: a stopped run goes on by itself"),
        ({"seeds": 0}, "--seeds 0: pass how many"),
        ({"head": "linear", "ablation": "placement"}, "linear head"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, message, place, tmp_path, trainers):
    with pytest.raises(Exception, match=message):
        train(place, tmp_path, **SHORT, **options)
    assert not trainers


def test_a_setting_that_is_left_out_is_another_one(place, tmp_path):
    train(place, tmp_path, **SHORT, max_length=7)
    with pytest.raises(FileExistsError, match="(?s)other settings.*max_length"):
        train(place, tmp_path, **SHORT)


# What was stopped


def test_a_stopped_run_goes_on_to_the_same_model(experiment, place, tmp_path, monkeypatch):
    """And is that of the same arm and seed in a larger experiment."""
    stop_in(monkeypatch, "on_save")
    with pytest.raises(KeyboardInterrupt):
        train(place, tmp_path, seed=43)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
    assert not (tmp_path / "record.json").exists()
    monkeypatch.setattr(experiments, "TaskTrainer", TaskTrainer)
    (record,) = train(place, tmp_path, seed=43)
    expected = experiment / "elmo" / "seed-43"
    assert_same_weights(tmp_path, expected)
    different = ("seconds", "settings")
    known = read_json(expected / "record.json")
    assert {key: record[key] for key in record if key not in different} == {
        key: known[key] for key in known if key not in different
    }
    for split in ("validation", "test"):
        name = f"predictions_{split}.jsonl"
        assert (tmp_path / name).read_text("utf-8") == (expected / name).read_text("utf-8")


def test_a_run_that_was_stopped_after_its_training(experiment, place, tmp_path, monkeypatch):
    stop_in(monkeypatch, "on_predict")
    with pytest.raises(KeyboardInterrupt):
        train(place, tmp_path)
    monkeypatch.setattr(experiments, "TaskTrainer", TaskTrainer)
    (record,) = train(place, tmp_path)
    assert_same_weights(tmp_path, experiment / "elmo" / "seed-42")
    assert record["metrics"] == read_json(experiment / "elmo" / "seed-42" / "record.json")["metrics"]


def test_a_stopped_run_does_not_go_on_with_other_settings(place, tmp_path, monkeypatch):
    stop_in(monkeypatch, "on_save")
    with pytest.raises(KeyboardInterrupt):
        train(place, tmp_path)
    monkeypatch.setattr(experiments, "TaskTrainer", TaskTrainer)
    with pytest.raises(FileExistsError, match="(?s)other settings.*learning_rate"):
        train(place, tmp_path, learning_rate=0.01)


# Which checkpoint


def evaluations(trainer: TaskTrainer) -> list[float]:
    return [entry["eval_f1"] for entry in trainer.state.log_history if "eval_f1" in entry]


def test_the_best_epoch_is_kept(place, tmp_path, trainers):
    (record,) = train(place, tmp_path, num_train_epochs=4, config_overrides=WITHOUT_DROPOUT)
    found = evaluations(trainers[0])
    assert len(found) == 4 and len(set(found)) > 1
    assert record["metrics"]["validation"]["f1"] == max(found)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_early_stopping(is_stopped, place, tmp_path, monkeypatch, trainers):
    """After two epochs that are no better than the first, as a learning rate of nearly 0 has it; also when stopped."""
    options = {"early_stopping_patience": 2, "learning_rate": 1e-9, "num_train_epochs": 9}
    remembered = experiments.TaskTrainer
    if is_stopped:
        stop_in(monkeypatch, "on_save", number=2)
        with pytest.raises(KeyboardInterrupt):
            train(place, tmp_path, **options)
        monkeypatch.setattr(experiments, "TaskTrainer", remembered)
    (record,) = train(place, tmp_path, **options)
    assert record["epochs"] == 3 and len(evaluations(trainers[0])) == 3
    assert record["settings"]["num_train_epochs"] == 9


def test_early_stopping_needs_a_validation_file(place, tmp_path):
    with pytest.raises(ValueError, match="--early_stopping_patience.*--validation_file"):
        train(place, tmp_path, **SHORT, early_stopping_patience=2, validation_file=None)


# Weight decay


def test_mixes_are_not_decayed(place, tmp_path, trainers):
    train(place, tmp_path, **SHORT, weight_decay=0.1, elmo_placement="both")
    (trainer,) = trainers
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    decays = {names[id(p)]: group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    mixes = {f"{place}_mix.{name}" for place in ("input", "output") for name in ("weights", "gamma")}
    assert {name for name in decays if "_mix." in name} == mixes and not any(decays[name] for name in mixes)
    matrices = [name for name in decays if "_mix." not in name and trainer.model.get_parameter(name).dim() > 1]
    assert "classifier.weight" in matrices and len(matrices) > 5 and all(decays[name] == 0.1 for name in matrices)
    assert not decays["classifier.bias"] and not any(name.startswith("elmo.") for name in decays)


# Stored features


@pytest.fixture(scope="module")
def cached(place) -> Path:
    """An epoch, computed and out of stored layers. The steps of Adam would tell rounding errors apart."""
    options = {"optim": "sgd", "learning_rate": 0.1, "num_train_epochs": 1}
    with pytest.MonkeyPatch.context() as patch:
        for name in DRAWINGS:
            patch.setattr(experiments, name, lambda *_: True)
        for name, is_cached in (("computed", False), ("cached", True)):
            train(place, place / name, **options, cache_features=is_cached)
    return place


def test_stored_features_change_nothing(cached):
    found, expected = cached / "cached", cached / "computed"
    assert_same_weights(found, expected, rtol=1e-4, atol=1e-5)
    ours, theirs = (read_json(folder / "record.json") for folder in (found, expected))
    assert ours["metrics"] == theirs["metrics"]
    assert predictions_of(found / "predictions_test.jsonl") == predictions_of(expected / "predictions_test.jsonl")
    start = load_file(cached / "bilm" / "model.safetensors")
    assert all(
        torch.equal(weight, start[name])
        for name, weight in load_file(found / "model.safetensors").items()
        if name.startswith("elmo.")
    )


def test_all_members_share_a_file(cached, monkeypatch, trainers):
    folder = cached / "cached"
    (file,) = (folder / "features").iterdir()
    made = file.stat().st_mtime_ns
    files = [cached / f"{split}.conll" for split in ("train", "validation", "test")]
    sentences = {tuple(words) for path in files for words, _ in sentences_of(path)}  # one that comes again is kept once
    tokens = sum(len(words) + 2 for words in sentences)
    assert file.stat().st_size == 4 * tokens * 3 * 16
    monkeypatch.setattr(features, "_compute", None)
    train(cached, folder, max_steps=1, cache_features=True, ablation="placement", seeds=2, word_min_count=3)
    train(cached, folder, max_steps=1, cache_features=True, ablation="data", compare_baseline=True)
    assert len(trainers) == 12 and list((folder / "features").iterdir()) == [file]
    assert file.stat().st_mtime_ns == made


def test_other_texts_or_another_bilm_have_another_file(place, tmp_path):
    folder = tmp_path / "features"
    train(place, tmp_path, **SHORT, cache_features=True)
    for number, options in enumerate(
        ({"max_length": 7}, {"max_train_samples": 20}, {"model_name_or_path": bilm(tmp_path / "bilm", seed=1)}), 2
    ):
        for name in ("record.json", "settings.json"):
            (tmp_path / name).unlink()
        train(place, tmp_path, **{**SHORT, "cache_features": True, **options})
        assert len(list(folder.iterdir())) == number


def test_features_are_those_of_the_head_s_own_bilm(place, tmp_path):
    options = {"config_overrides": {"cell_clip": 0.01}, "optim": "sgd", **SHORT}
    for name, is_cached in (("computed", False), ("cached", True)):
        train(place, tmp_path / name, **options, cache_features=is_cached)
    assert_same_weights(tmp_path / "cached", tmp_path / "computed", rtol=1e-4, atol=1e-5)


def test_features_of_a_bilm_that_is_trained_are_refused(place, tmp_path):
    with pytest.raises(ValueError, match="--cache_features keeps what a frozen biLM puts out.*--no_freeze_bilm"):
        train(place, tmp_path, **SHORT, cache_features=True, no_freeze_bilm=True)


# Averages of the weights, and Adadelta


@pytest.fixture
def steps(monkeypatch) -> list[dict[str, torch.Tensor]]:
    """The weights that learn: as training starts, and after each step."""
    seen: list[dict[str, torch.Tensor]] = []

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            seen.append({name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})

        on_train_begin = on_step_end

    class Noted(TaskTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(Note)

    monkeypatch.setattr(experiments, "TaskTrainer", Noted)
    return seen


def average_of(steps: list[dict[str, torch.Tensor]], decay: float) -> dict[str, torch.Tensor]:
    """After all these steps, by the formula."""
    average = steps[0]
    for number, weights in enumerate(steps[1:], 1):
        share = min(decay, (1 + number) / (10 + number))
        average = {name: share * average[name] + (1 - share) * weights[name] for name in average}
    return average


def assert_holds(folder: Path, expected: dict[str, torch.Tensor]):
    found = load_file(folder / "model.safetensors")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, msg=name)


@pytest.mark.parametrize("has_dev", [True, False])
def test_what_is_saved_is_the_average_of_the_weights(has_dev, place, tmp_path, steps):
    """Of the last step, or of the best epoch's last one."""
    options = {} if has_dev else {"validation_file": None}
    (record,) = train(place, tmp_path, ema_decay=0.3, early_stopping_patience=9 if has_dev else None, **options)
    ends = [average_of(steps[: end + 1], decay=0.3) for end in (6, 12, 18)]
    if not has_dev:
        assert_holds(tmp_path, ends[-1])
        return
    found = load_file(tmp_path / "model.safetensors")
    best = [end for end in ends if all(torch.allclose(found[name], end[name], atol=1e-5) for name in end)]
    assert len(best) == 1 and not any(torch.equal(found[name], steps[18][name]) for name in ("classifier.weight",))
    model = ELMoForTokenClassification.from_pretrained(tmp_path)
    rows = predictions_of(tmp_path / "predictions_test.jsonl")
    tokenizer = ELMoTokenizer.from_pretrained(tmp_path)
    for row in rows[:5]:  # what was measured is what was saved
        logits = model(**tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")).logits[0, 1:-1]
        assert [model.config.id2label[number] for number in logits.argmax(-1).tolist()] == row["predicted"]


def test_a_stopped_run_goes_on_with_its_weights_and_its_average(place, tmp_path, monkeypatch):
    options = {"ema_decay": 0.9, "adadelta": True, "learning_rate": 1.0}
    train(place, tmp_path / "whole", **options)
    stop_in(monkeypatch, "on_save", 2)
    with pytest.raises(KeyboardInterrupt):
        train(place, tmp_path / "stopped", **options)
    monkeypatch.setattr(experiments, "TaskTrainer", TaskTrainer)
    train(place, tmp_path / "stopped", **options)
    assert_same_weights(tmp_path / "stopped", tmp_path / "whole")
    with pytest.raises(FileExistsError, match="(?s)other settings.*ema_decay"):
        train(place, tmp_path / "whole", **{**options, "ema_decay": 0.8})


def test_adadelta_takes_zeilers_steps(place, tmp_path, steps):
    """Of a weight whose gradients are known: those of the first step tell its size, whatever they are."""
    train(place, tmp_path, adadelta=True, learning_rate=1.0, max_steps=1)
    before, after = (each["classifier.weight"] for each in steps)
    moved = (after - before).abs()
    # sqrt(eps) / sqrt((1 - rho) g^2 + eps) * g: at most sqrt(eps / (1 - rho)), by all but tiny gradients
    assert moved.max() == pytest.approx((1e-6 / 0.05) ** 0.5, rel=0.01)
    assert moved.median() > 0.5 * moved.max()


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_that_is_none(decay, place, tmp_path):
    with pytest.raises(ValueError, match=f"--ema_decay {decay}: pass a number from 0 up to 1, 1 excluded"):
        train(place, tmp_path, **SHORT, ema_decay=decay)


# Ensembles


def log_probabilities(folder: Path, sentences: list[list[str]]) -> list[np.ndarray]:
    """Of each word, every sentence alone."""
    model, tokenizer = ELMoForTokenClassification.from_pretrained(folder).eval(), ELMoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        inputs = (tokenizer([words], is_split_into_words=True, return_tensors="pt") for words in sentences)
        return [model(**each).logits[0, 1:-1].double().log_softmax(-1).numpy() for each in inputs]


def test_an_ensemble_is_the_mean_of_probabilities(experiment, place, tmp_path):
    members = [experiment / "elmo" / f"seed-{seed}" for seed in (42, 43)]
    (record,) = train(place, tmp_path, ensemble=members)
    labels = read_json(members[0] / "config.json")["id2label"]
    sentences = [words for words, _ in sentences_of(place / "test.conll")]
    every = [log_probabilities(folder, sentences) for folder in members]
    means = [np.mean([np.exp(found[number]) for found in every], axis=0) for number in range(len(sentences))]
    expected = [[labels[str(label)] for label in mean.argmax(-1)] for mean in means]
    rows = predictions_of(tmp_path / "results" / "ensemble_test.jsonl")
    assert [row["predicted"] for row in rows] == expected and [row["tokens"] for row in rows] == sentences
    right = [found == tag for row in rows for found, tag in zip(row["predicted"], row["tags"], strict=True)]
    assert record["metrics"]["test"]["accuracy"] == pytest.approx(sum(right) / len(right))
    assert record["arm"] == "ensemble of 2" and read_json(tmp_path / "results" / "ner_ensemble.json")["records"] == [
        record
    ]
    single = [[row["predicted"] for row in predictions_of(folder / "predictions_test.jsonl")] for folder in members]
    assert expected not in single  # else the mean could be missing


def test_an_ensemble_of_one_is_that_model(experiment, place, tmp_path):
    (record,) = train(place, tmp_path, ensemble=[experiment / "elmo" / "seed-42"])
    known = read_json(experiment / "elmo" / "seed-42" / "record.json")
    assert record["metrics"] == known["metrics"] and record["arm"] == "ensemble of 1"


def test_what_does_not_go_with_an_ensemble(experiment, place, tmp_path):
    member = experiment / "elmo" / "seed-42"
    for options in ({"ablation": "layers"}, {"compare_baseline": True}, {"cache_features": True}):
        with pytest.raises(ValueError, match=f"--{next(iter(options))} is for a model that is trained"):
            train(place, tmp_path, ensemble=[member], **options)


def test_members_with_other_labels_are_refused(experiment, tmp_path):
    member = experiment / "elmo" / "seed-42"
    with pytest.raises(ValueError, match=r"--ensemble .*seed-42 has the labels .*B-NAME.*but the data has.*B-person"):
        tag(tmp_path, model_name_or_path=member, ensemble=[member])


# Publishing


@pytest.fixture
def hub(monkeypatch) -> MagicMock:
    """In place of `HfApi`: the class; its `return_value` is what is called."""
    monkeypatch.setattr(publishing, "HfApi", MagicMock())
    return publishing.HfApi


@pytest.mark.parametrize("name", [None, "someone/tagger"])
def test_push_to_hub(name, experiment, place, hub):
    options = {"push_to_hub": True, "hub_model_id": name, "hub_private_repo": "true", "hub_token": "a-token"}
    train(place, experiment, compare_baseline=True, seeds=2, **options)
    hub.assert_called_once_with(token="a-token")
    upload = hub.return_value.upload_folder.call_args.kwargs
    folder, scores = Path(upload["folder_path"]), scores_of(experiment, "elmo", "validation")
    assert folder == experiment / "elmo" / f"seed-{42 + scores.index(max(scores))}"
    hub.return_value.create_repo.assert_called_once_with(name or "experiment", private=True, exist_ok=True)
    assert upload["repo_id"] == hub.return_value.create_repo.return_value.repo_id
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    files = set(filter_repo_objects(paths, allow_patterns=upload["allow_patterns"]))
    assert files >= {"config.json", "model.safetensors", "modeling_elmo.py", "tokenizer.json", "tokenization_elmo.py"}
    assert files >= {"README.md", "record.json"} and not [file for file in files if "/" in file]
    assert not files & {"settings.json", "training_args.bin"}
    assert not [file for file in files if file.endswith(".jsonl")]  # the data
    sent = "".join((folder / file).read_text("utf-8", "ignore") for file in files)
    assert "a-token" not in sent and str(place) not in sent and str(experiment) not in sent


def test_an_ensemble_is_not_pushed(experiment, place, tmp_path, hub):
    """It is no model."""
    with pytest.raises(ValueError, match="--push_to_hub.*--ensemble|--ensemble.*--push_to_hub"):
        train(place, tmp_path, ensemble=[experiment / "elmo" / "seed-42"], push_to_hub=True)
    assert not hub.called


def test_nothing_is_pushed_unasked(experiment, place, hub):
    train(place, experiment, compare_baseline=True, seeds=2)
    assert not hub.called
