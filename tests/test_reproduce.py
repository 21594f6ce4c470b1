"""The program of the paper's experiments: its options, and experiments that were made before it existed."""

import json
import sys
from pathlib import Path

import pytest
from places import ROOT
from task_worker import FIXTURES, bilm, launch, options_of, read_json, written

from modeling_elmo.run_scripts import reproduce, run_task
from modeling_elmo.run_scripts.experiments import experiment
from modeling_elmo.run_scripts.fine_tuning.tasks import TASKS
from modeling_elmo.run_scripts.program.command_line import ProgramParser

# The settings that run_ner, run_classification and run_qa saved by default when they had all these options.
SETTINGS = read_json(ROOT / "tests" / "fixtures" / "experiments" / "settings.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a biLM and the fixtures, at the relative paths in `SETTINGS`."""
    folder = tmp_path_factory.mktemp("place")
    bilm(folder / "bilm", pre_tokenization="treebank")
    (folder / "tests").symlink_to(ROOT / "tests")
    return folder


def default_options(task: str, output: Path) -> list[str]:
    names = ("train_file", "validation_file", "test_file")
    files = [part for name in names for part in (f"--{name}", SETTINGS[task][name])]
    return [task, "--model_name_or_path", "bilm", *files, "--use_cpu", "--output_dir", str(output)]


@pytest.mark.parametrize("task", ["ner", *(pytest.param(name, marks=pytest.mark.slow) for name in ("classify", "qa"))])
def test_an_experiment_made_before_is_recognized_as_finished(task, place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(experiment, "report", lambda *_: None)
    monkeypatch.setattr(experiment, "write_results", lambda *_: None)
    arm_and_seed = {"arm": "elmo", "seed": 42}
    scores = {"metric": "f1", "metrics": {"test": {"f1": 0.5}}}
    monkeypatch.setattr(
        experiment.Experiment, "_train", lambda self, *each: arm_and_seed | scores | self._settings(*each)
    )
    (settings,) = reproduce.main(default_options(task, tmp_path / "new"))
    for name in ("arm", *scores):
        settings.pop(name)
    known = SETTINGS[task] | {"model_digest": settings["model_digest"]}
    assert {name: settings.get(name) for name in known} == known
    assert set(settings) - set(known) <= {"warmup_ratio"}  # an option of older releases of transformers
    (tmp_path / "old").mkdir()
    record = {"task": task, **arm_and_seed, **scores, "settings": known}
    for name, value in (("settings", known), ("record", record)):
        written(tmp_path / "old" / f"{name}.json", json.dumps(value))
    assert reproduce.main(default_options(task, tmp_path / "old")) == [record]
    with pytest.raises(FileExistsError, match="other settings: elmo_dropout 0.5, now 0.4. Pass another --output_dir"):
        reproduce.main([*default_options(task, tmp_path / "old"), "--elmo_dropout", "0.4"])


@pytest.mark.parametrize("task", TASKS)
def test_the_program_of_a_task_has_the_same_defaults(task, monkeypatch):
    """`elmo classify` had the learning rate of taggers once, at which its network may not learn."""
    parsers = []
    monkeypatch.setattr(ProgramParser, "parse", lambda self, arguments: parsers.append(self) or sys.exit(0))
    for main in (run_task.main, reproduce.main):
        with pytest.raises(SystemExit):
            main([task])
    program, experiment = ({each.dest: each.default for each in parser._actions} for parser in parsers)
    shared = program.keys() & experiment
    assert "learning_rate" in shared
    assert {name: program[name] for name in shared} == {name: experiment[name] for name in shared}


@pytest.mark.parametrize("main", [run_task.main, reproduce.main])
def test_a_task_is_needed(main, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["nerr"])
    assert ended.value.code == 2 and "TASK" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes(place, tmp_path):
    options = options_of(place, FIXTURES["ner"], output_dir=tmp_path, max_steps=2, cache_features=True)
    launch(2, "reproduce", options, "ner")
    record = read_json(tmp_path / "record.json")
    assert record["settings"]["world_size"] == 2 and record["metrics"]["test"]["accuracy"] > 0
