"""Experiments: arms and seeds, finished and stopped models, cached layers, ensembles, publishing."""

import re
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from endings import conclusion
from errors import refused
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from task_worker import (
    HEAD,
    assert_same_weights,
    bilm,
    capitals,
    predictions_of,
    read_json,
    sentences_of,
    stopping_trainer,
    tagger_experiment,
    train_tagger,
    trainer_with,
)
from task_worker import experiment as task_experiment

from modeling_elmo import ELMoForTokenClassification, ELMoTokenizer
from modeling_elmo.run_scripts.cards import publishing, results
from modeling_elmo.run_scripts.cards.tables import summary_table
from modeling_elmo.run_scripts.experiments import experiment
from modeling_elmo.run_scripts.experiments.reports import RECORDS, read_records
from modeling_elmo.run_scripts.fine_tuning import features
from modeling_elmo.run_scripts.fine_tuning import head as head_module
from modeling_elmo.run_scripts.fine_tuning.trainer import TaskTrainer

SHORT = {"max_steps": 1, "max_eval_samples": 2}


@pytest.fixture(scope="module", autouse=True)
def no_figures():
    """Drawing takes as long as a run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_layer_weights", "draw_ablation", "draw_data_curve", "draw_confusion"):
            patch.setattr(results, name, lambda *_: True)
        yield


@pytest.fixture
def trainers(monkeypatch):
    """The trainers that are made during a test."""
    made = []
    monkeypatch.setattr(head_module, "TaskTrainer", trainer_with(made.append))
    return made


def stop_in(monkeypatch, event, number=1):
    monkeypatch.setattr(head_module, "TaskTrainer", stopping_trainer(event, number))


@pytest.fixture
def hub(monkeypatch):
    """A mock of the class `HfApi`."""
    monkeypatch.setattr(publishing, "HfApi", MagicMock())
    return publishing.HfApi


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a biLM and data."""
    folder = tmp_path_factory.mktemp("place")
    bilm(folder / "bilm")
    capitals(folder)
    return folder


@pytest.fixture(scope="module")
def train(place):
    """A function of an output folder and options, which returns the records of an experiment."""
    return partial(tagger_experiment, place)


@pytest.fixture(scope="module")
def finished(place, train):
    """A finished experiment: two arms with two seeds. Tests must not change it."""
    train(place / "experiment", **PAIRS)
    return place / "experiment"


PAIRS = {"compare_baseline": True, "seeds": 2}
MEMBERS = [f"{arm}/seed-{seed}" for seed in (42, 43) for arm in ("baseline", "elmo")]


def records_in(folder, members=MEMBERS):
    return [read_json(folder / member / "record.json") for member in members]


def scores_of(folder, arm, split="test"):
    members = [member for member in MEMBERS if member.startswith(arm)]
    return [record["metrics"][split]["f1"] for record in records_in(folder, members)]


def assert_same_record(record, folder):
    """Compares a record with the one in a folder, without their times and settings."""
    known = read_json(folder / "record.json")
    different = {"seconds": None, "settings": None}
    assert record | different == known | different


# Arms


def test_members_and_their_folders(finished):
    found = {path.parent.relative_to(finished).as_posix() for path in finished.rglob("model.safetensors")}
    assert found == {*MEMBERS}
    for member in MEMBERS:
        arm, seed = member.split("/seed-")
        record, config = (read_json(finished / member / name) for name in ("record.json", "config.json"))
        assert (record["arm"], record["seed"], record["task"], record["metric"]) == (arm, int(seed), "ner", "f1")
        assert config["use_elmo"] is (arm == "elmo") and config["task_hidden_size"] == HEAD["task_hidden_size"]
        assert set(record["layer_weights"]) == ({"input"} if arm == "elmo" else set())
        assert record["epochs"] == 3 and record["train_samples"] == 60 and record["seconds"] > 0
        assert [epoch for epoch, _ in record["curve"]] == [1, 2, 3]
        scores = [score for _, score in record["curve"]]  # the best epoch is kept
        assert max(scores) == record["metrics"]["validation"]["f1"] > min(scores)
        assert not list((finished / member).glob("checkpoint-*")) and not list(finished.rglob("*.part"))
    assert all(value > 0 for arm in ("baseline", "elmo") for value in scores_of(finished, arm))


def test_recorded_layer_weights_are_in_the_saved_model(finished):
    record = read_json(finished / "elmo" / "seed-42" / "record.json")
    raw = load_file(finished / "elmo" / "seed-42" / "model.safetensors")["input_mix.weights"]
    assert record["layer_weights"]["input"] == pytest.approx((raw.exp() / raw.exp().sum()).tolist(), rel=1e-5)
    assert raw.any()


def test_a_finished_experiment_writes_its_results_and_trains_nothing(finished, train, capsys, hub, trainers):
    files = [*finished.rglob("*.safetensors"), *finished.rglob("record.json"), *finished.rglob("*.jsonl")]
    before = {path: path.stat().st_mtime_ns for path in files}
    records = train(finished, **PAIRS)
    assert records == records_in(finished)
    assert read_json(finished / "results" / "ner.json")["records"] == records == read_records(finished)[1]
    table = summary_table(records)
    printed = capsys.readouterr().out
    told, following = conclusion(printed)
    (better, best), (worse, other) = sorted(
        (
            (np.mean([record["metrics"]["test"]["f1"] for record in records if record["arm"] == arm]), arm)
            for arm in ("elmo", "baseline")
        ),
        reverse=True,
    )
    assert re.fullmatch(
        rf"On test, f1 is {100 * better:.2f} ± \S+ with {best}, and {100 * worse:.2f} ± \S+ with {other}\.", told
    )
    assert following[:2] == ["elmo", "evaluate"] and (Path(following[2]) / "model.safetensors").is_file()
    for text in (printed, (finished / "results" / "ner.md").read_text("utf-8")):
        assert table in text
    assert not hub.called and not trainers and {path: path.stat().st_mtime_ns for path in files} == before


# The fields of each arm's saved configuration.
SAVED = {
    "placement": [(where, {"elmo_placement": where, "use_elmo": True}) for where in ("input", "output", "both")],
    "data": [
        *((f"elmo-{share}", {"use_elmo": True}) for share in ("0-01", "0-1", "1-0")),
        *((f"baseline-{share}", {"use_elmo": False}) for share in ("0-01", "0-1", "1-0")),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("ablation", SAVED)
def test_ablations(ablation, train, tmp_path):
    records = train(tmp_path, **SHORT, ablation=ablation, compare_baseline=ablation == "data")
    assert len(records) == len(SAVED[ablation]) and len(list(tmp_path.rglob("record.json"))) == len(records)
    for (name, fields), record in zip(SAVED[ablation], records, strict=True):
        config = read_json(tmp_path / name / "seed-42" / "config.json")
        assert {field: config[field] for field in fields} == fields
        places = {None: ["input"], "both": ["input", "output"]}.get(
            config["elmo_placement"], [config["elmo_placement"]]
        )
        assert [*record["layer_weights"]] == (places if config["use_elmo"] else [])
    if ablation == "data":
        assert [record["train_samples"] for record in records] == [1, 6, 60, 1, 6, 60]
        sizes = [read_json(tmp_path / name / "seed-42" / "config.json")["vocab_size"] for name, _ in SAVED["data"]]
        assert sizes[:3] == sizes[3:] and sizes[0] < sizes[1] < sizes[2]
    assert (tmp_path / "results" / f"ner_{ablation}.md").is_file()


def test_arms_that_no_other_test_trains():
    arms = experiment.experiment_arms("each_layer", False, True, num_layers=3)
    assert [arm.name for arm in arms] == ["token layer", "biLSTM 1", "biLSTM 2", "biLSTM 3"]
    assert [arm.overrides for arm in arms] == [{"scalar_mix_mode": layer} for layer in range(4)]
    assert [arm.name for arm in experiment.experiment_arms(None, False, False, num_layers=2)] == ["baseline"]
    arms = experiment.experiment_arms("layers", False, True, num_layers=2)
    assert [(*arm.overrides.values(),) for arm in arms] == [
        ("top",),
        ("average",),
        ("learned", 1.0),
        ("learned", 0.001),
    ]


# Finished models


def test_missing_models_are_trained(finished, train, tmp_path, trainers):
    for arm in ("baseline", "elmo"):  # without the file of records, as after a kill just before it was written
        shutil.copytree(finished / arm / "seed-42", tmp_path / arm / "seed-42")
    records = train(tmp_path, **PAIRS, seed=41, num_train_epochs=3)
    assert [record["seed"] for record in records] == [41, 41, 42, 42] and len(trainers) == 2


def test_a_single_model_stays_when_the_experiment_gets_more(place, train, tmp_path, trainers):
    (first,) = train(tmp_path, **SHORT)
    records = train(tmp_path, **SHORT, seeds=2)
    assert records[0] == first and [record["seed"] for record in records] == [42, 43] and len(trainers) == 2
    assert {*tmp_path.rglob("model.safetensors")} == {
        tmp_path / "model.safetensors",
        tmp_path / "elmo" / "seed-43" / "model.safetensors",
    }
    assert train(tmp_path, **SHORT, seed=43) == records[1:] and len(trainers) == 2
    other_data = {"train_file": str(place / "other.conll")}
    (place / "other.conll").write_text((place / "train.conll").read_text() + "\nPlay O\n")
    for changes, shown in (({"learning_rate": 0.5}, "learning_rate 0.05, now 0.5"), (other_data, "data_digest")):
        with refused(f"{tmp_path} was made with other settings: .*{shown}", FileExistsError):
            train(tmp_path, **{**SHORT, **changes}, seed=44)
    folds = {"train_split": "train[:90%]", "validation_split": "train[90%:]"}  # as those of a plan with one arm
    (third,) = train(tmp_path, **SHORT, **folds, seed=44)
    assert read_records(tmp_path)[1] == [third, *reversed(records)]


def test_tables_are_written_after_each_seed(finished, train, tmp_path, monkeypatch):
    copy = tmp_path / "experiment"
    shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("results", "seed-43", RECORDS))
    train_first = experiment.Experiment._train

    def stop(self, arm, seed):
        if arm.name == "elmo":
            raise KeyboardInterrupt
        return train_first(self, arm, seed)

    monkeypatch.setattr(experiment.Experiment, "_train", stop)
    with pytest.raises(KeyboardInterrupt):
        train(copy, **PAIRS)
    records = read_json(copy / "results" / "ner.json")["records"]
    assert [(record["arm"], record["seed"]) for record in records] == [("baseline", 42), ("elmo", 42)]
    assert records_in(copy, MEMBERS[:3]) == read_records(copy)[1]


@pytest.mark.slow
def test_models_of_other_experiments_are_copied(finished, place, train, tmp_path, trainers):
    options = {"ablation": "placement", "seeds": 2, "reuse_from": place, "num_train_epochs": 3}
    records = train(tmp_path, **options)
    assert [record["arm"] for record in records] == ["input", "output", "both"] * 2
    assert len(trainers) == 4  # the paper's tagger reads ELMo at its input
    for seed, record in zip((42, 43), records[::3], strict=True):
        copy, known = tmp_path / "input" / f"seed-{seed}", finished / "elmo" / f"seed-{seed}"
        assert record == read_json(known / "record.json") | {"arm": "input"} == read_json(copy / "record.json")
        assert_same_weights(copy, known)
        assert (copy / "predictions_test.jsonl").read_bytes() == (known / "predictions_test.jsonl").read_bytes()
    assert train(tmp_path, **options) == records and len(trainers) == 4
    train(tmp_path / "other", seeds=1, reuse_from=place, learning_rate=0.01, **SHORT)
    assert len(trainers) == 5
    options = {"elmo_placement": "output", "scalar_mix_mode": "top", "scalar_mix_l2": 0.5, "elmo_dropout": 0.2}
    (record, _) = train(tmp_path / "top", reuse_from=place, compare_baseline=True, num_train_epochs=3, **options)
    assert record == records_in(finished)[0] and len(trainers) == 6


OTHERS = [  # an option of Trainer, the experiment, the head, the network, the data and the task
    ({"learning_rate": 0.01}, "learning_rate"),
    ({"early_stopping_patience": 1}, "early_stopping_patience"),
    ({"elmo_placement": "both"}, "elmo_placement"),
    ({"config_overrides": {"task_hidden_size": 9}}, "task_hidden_size"),
    ({"test_file": "validation.conll"}, "test_file"),
    ({"tag_scheme": "iob1"}, "tag_scheme"),
]


@pytest.mark.parametrize("options, name", OTHERS, ids=[str(options) for options, _ in OTHERS])
def test_other_settings_are_refused(options, name, finished, place, train, trainers):
    files = {key: place / file for key, file in options.items() if key.endswith("_file") and file}
    with refused(f"(?s)seed-42 was made with other settings.*{name}.*--output_dir", FileExistsError):
        train(finished / "elmo" / "seed-42", **{**options, **files})
    assert not trainers


def test_other_files_under_the_same_name_are_noticed(place, train, tmp_path):
    folder, train_file, vectors = bilm(tmp_path / "bilm"), tmp_path / "mine.conll", tmp_path / "vectors.txt"
    shutil.copy(place / "train.conll", train_file)
    vectors.write_text("the 1 2\nin 3 4\n")
    options = {**SHORT, "train_file": train_file, "word_vectors": vectors, "model_name_or_path": folder}
    train(tmp_path / "run", **options)
    for path, old, new, name in (
        (train_file, b"the\tO", b"teh\tO", "data_digest"),
        (vectors, b"3 4", b"3 5", "word_vectors_digest"),
        (folder / "tokenizer_config.json", b"whitespace", b"treebank", "model_digest"),
    ):
        content = path.read_bytes()
        path.write_bytes(content.replace(old, new))
        with refused(f"(?s)other settings.*{name}", FileExistsError):
            train(tmp_path / "run", **options)
        path.write_bytes(content)
    bilm(folder, seed=1)
    with refused("(?s)other settings.*model_digest", FileExistsError):
        train(tmp_path / "run", **options)


def test_records_alone_are_enough_for_tables_but_not_for_the_hub(finished, place, train, tmp_path, trainers):
    """With the same data and biLM under other names, as on another disk. The records name no folder."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    shutil.copy2(finished / RECORDS, shipped)
    moved = {f"{split}_file": tmp_path / f"{split}-moved.conll" for split in ("train", "validation", "test")}
    for file in moved.values():
        shutil.copy(place / file.name.replace("-moved", ""), file)
    options = {**moved, "model_name_or_path": shutil.copytree(place / "bilm", tmp_path / "moved-bilm")}
    options |= {"compare_baseline": True, "seeds": 2, "reuse_from": shipped}
    records = train(tmp_path / "run", **options)
    assert records == records_in(finished) and not trainers
    settings = read_records(tmp_path / "run")[1][0]["settings"]
    assert (settings["model_name_or_path"], settings["train_file"]) == ("bilm", "train.conll")
    with refused("run holds the record of the best model without the model", FileNotFoundError):
        train(tmp_path / "run", **options, push_to_hub=True)


def test_a_start_that_failed_does_not_block_its_folder(train, tmp_path, monkeypatch):
    stop_in(monkeypatch, "on_train_begin")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, **SHORT)
    monkeypatch.setattr(head_module, "TaskTrainer", TaskTrainer)
    (record,) = train(tmp_path, **SHORT, learning_rate=0.01)
    assert record["settings"]["learning_rate"] == 0.01


@pytest.mark.parametrize(
    "options, received",
    [
        ({"no_use_elmo": True, "compare_baseline": True}, "--no_use_elmo.*--compare_baseline"),
        ({"resume_from_checkpoint": "last"}, "--resume_from_checkpoint"),
        ({"seed": 2**32 - 2, "seeds": 3}, "--seeds 3: .*4294967296"),
        ({"head": "linear", "ablation": "placement"}, "linear head"),
        ({"train_file": None, "validation_file": None, "test_file": None}, "--train_file"),
        ({"reuse_from": "nowhere"}, "--reuse_from nowhere"),
        ({"early_stopping_patience": 2, "validation_file": None}, "--early_stopping_patience.*--validation_file"),
        ({"cache_features": True, "no_freeze_bilm": True, "compare_baseline": True}, "--cache_features"),
    ],
)
def test_mistakes_end_before_training(options, received, train, tmp_path, trainers):
    with pytest.raises(Exception, match=received):
        train(tmp_path, **SHORT, **options)
    assert not trainers


def test_both_programs_train_the_same_model(finished, place, tmp_path):
    record, expected = train_tagger(place, tmp_path), finished / "elmo" / "seed-42"
    assert_same_weights(tmp_path, expected)
    assert_same_record(record, expected)
    assert record["settings"].items() <= read_json(expected / "record.json")["settings"].items()


# Stopped models


def test_a_stopped_run_resumes_to_the_same_model(finished, train, tmp_path, monkeypatch):
    """It equals the model of the same arm and seed in a larger experiment."""
    stop_in(monkeypatch, "on_save")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, seed=43)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
    assert not (tmp_path / "record.json").exists()
    monkeypatch.setattr(head_module, "TaskTrainer", TaskTrainer)
    with refused("(?s)other settings.*learning_rate", FileExistsError):
        train(tmp_path, seed=43, learning_rate=0.01)
    steps, training_step = [], TaskTrainer.training_step
    monkeypatch.setattr(TaskTrainer, "training_step", lambda *args: steps.append(1) or training_step(*args))
    synced = []
    monkeypatch.setattr(experiment, "sync", lambda folder: synced.append({path.name for path in folder.iterdir()}))
    (record,) = train(tmp_path, seed=43)
    (files,) = synced  # the model reaches the disk before its checkpoints are removed
    assert {"model.safetensors", "record.json"} <= files and any(name.startswith("checkpoint-") for name in files)
    assert len(steps) == 12  # of the second and third epoch
    expected = finished / "elmo" / "seed-43"
    assert_same_weights(tmp_path, expected)
    assert_same_record(record, expected)
    assert "seconds" not in record  # the time before it was stopped is not known
    for split in ("validation", "test"):
        name = f"predictions_{split}.jsonl"
        assert (tmp_path / name).read_text("utf-8") == (expected / name).read_text("utf-8")


@pytest.mark.slow
def test_early_stopping_keeps_its_count_when_it_resumes(train, tmp_path, monkeypatch):
    """A learning rate near 0 makes no epoch better than the first, so patience of 2 stops after the third."""
    options = {"early_stopping_patience": 2, "learning_rate": 1e-9, "num_train_epochs": 9}
    stop_in(monkeypatch, "on_save", number=2)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, **options)
    monkeypatch.setattr(head_module, "TaskTrainer", TaskTrainer)
    (record,) = train(tmp_path, **options)
    assert record["epochs"] == 3 and len(record["curve"]) == 3
    assert record["settings"]["num_train_epochs"] == 9


# Cached layers


CLIPPED = {"config_overrides": {"cell_clip": 0.01}}  # changes the layers


@pytest.fixture(scope="module")
def cached(place, train):
    """One epoch on computed and on cached layers. SGD, because the steps of Adam amplify rounding errors."""
    options = {"optim": "sgd", "learning_rate": 0.1, "num_train_epochs": 1, **CLIPPED}
    for name, is_cached in (("computed", False), ("cached", True)):
        train(place / name, **options, cache_features=is_cached)
    return place


def test_cached_layers_change_nothing(cached):
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


@pytest.mark.slow
def test_all_members_share_a_file(train, cached, monkeypatch, trainers):
    folder = cached / "cached"
    (file,) = (folder / "features").iterdir()
    made = file.stat().st_mtime_ns
    files = [cached / f"{split}.conll" for split in ("train", "validation", "test")]
    distinct = {tuple(words) for path in files for words, _ in sentences_of(path)}
    assert file.stat().st_size == 4 * 3 * 16 * sum(len(words) + 2 for words in distinct)
    monkeypatch.setattr(features, "_compute", None)
    options = {**SHORT, "max_eval_samples": None, "cache_features": True, **CLIPPED}
    train(folder, **options, ablation="placement", word_min_count=3)
    train(folder, **options, ablation="data", compare_baseline=True)
    assert len(trainers) == 9 and list((folder / "features").iterdir()) == [file]
    assert file.stat().st_mtime_ns == made


# Ensembles. Those of other tasks are in their test files.


def probabilities(folder, sentences: list[list[str]]):
    """The probabilities of each word's labels, one sentence at a time."""
    model, tokenizer = ELMoForTokenClassification.from_pretrained(folder).eval(), ELMoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        inputs = (tokenizer([words], is_split_into_words=True, return_tensors="pt") for words in sentences)
        return [model(**each).logits[0, 1:-1].double().softmax(-1).numpy() for each in inputs]


def test_an_ensemble_is_the_mean_of_probabilities(finished, place, train, tmp_path, capsys):
    members = [finished / name for name in MEMBERS[1::2]]
    (record,) = train(tmp_path, ensemble=members)
    labels = read_json(members[0] / "config.json")["id2label"]
    sentences = [words for words, _ in sentences_of(place / "test.conll")]
    pairs = zip(*(probabilities(folder, sentences) for folder in members), strict=True)
    expected = [[labels[str(label)] for label in np.mean(pair, axis=0).argmax(-1)] for pair in pairs]
    rows = predictions_of(tmp_path / "results" / "ensemble_test.jsonl")
    assert [row["predicted"] for row in rows] == expected and [row["tokens"] for row in rows] == sentences
    right = [found == tag for row in rows for found, tag in zip(row["predicted"], row["tags"], strict=True)]
    assert record["metrics"]["test"]["accuracy"] == pytest.approx(sum(right) / len(right))
    assert record["arm"] == "ensemble of 2"
    assert conclusion(capsys.readouterr().out)[1] == ["elmo", "evaluate", str(members[0]), "FILE"]
    assert read_json(tmp_path / "results" / "ner_ensemble.json")["records"] == [record]
    single = [[row["predicted"] for row in predictions_of(folder / "predictions_test.jsonl")] for folder in members]
    assert expected not in single  # else the mean could be missing


@pytest.mark.parametrize("name, value", [("compare_baseline", True), ("push_to_hub", True), ("seeds", 2)])
def test_an_ensemble_only_averages(name, value, finished, train, tmp_path):
    with refused(f"--ensemble .* leave out --{name}"):
        train(tmp_path, ensemble=[finished / MEMBERS[1]], **{name: value})


def test_members_are_different_models_with_the_labels_of_the_data(finished, train, tmp_path):
    member = finished / MEMBERS[1]
    with refused("--ensemble .*seed-42.* has a model twice"):
        train(tmp_path, ensemble=[member, f"{member}/"])
    with refused(r"--ensemble .*seed-42 has the labels .*B-NAME.*but the data has.*B-person"):
        task_experiment("ner", tmp_path, model_name_or_path=member, ensemble=[member])


# Publishing


@pytest.mark.parametrize("name", [None, "someone/tagger"])
def test_push_to_hub(name, finished, place, train, hub):
    options = {"push_to_hub": True, "hub_model_id": name, "hub_private_repo": "true", "hub_token": "a-token"}
    train(finished, **PAIRS, **options)
    hub.assert_called_once_with(token="a-token")
    upload = hub.return_value.upload_folder.call_args.kwargs
    folder, scores = Path(upload["folder_path"]), scores_of(finished, "elmo", "validation")
    assert folder == finished / "elmo" / f"seed-{42 + scores.index(max(scores))}"
    hub.return_value.create_repo.assert_called_once_with(name or "experiment", private=True, exist_ok=True)
    assert upload["repo_id"] == hub.return_value.create_repo.return_value.repo_id
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    files = set(filter_repo_objects(paths, allow_patterns=upload["allow_patterns"]))
    assert files >= {"README.md", "record.json", "model.safetensors"} and "settings.json" not in files
    assert not [file for file in files if file.endswith(".jsonl")]  # the data
    sent = "".join((folder / file).read_text("utf-8", "ignore") for file in files)
    assert "a-token" not in sent and str(place) not in sent and str(finished) not in sent
