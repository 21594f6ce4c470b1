"""The benchmark of stored layers takes the same steps both ways."""

import json

import pytest
from pretraining_worker import arguments_of
from task_worker import HEAD, TASKS, bilm

from modeling_elmo.run_scripts.benchmark_fine_tuning import main


def test_figures(tmp_path, capsys):
    options = {
        "model_name_or_path": bilm(tmp_path / "bilm"),
        "train_file": TASKS / "wnut17_train.conll",
        "config_overrides": json.dumps(HEAD),
        "per_device_train_batch_size": 8,
        "num_batches": 3,
        "output": tmp_path / "figures.json",
    }
    figures = main(arguments_of(options))
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    assert 0 < figures["lowest"] <= figures["times as fast"] <= figures["highest"]
    assert figures["largest difference of the losses"] < 1e-3
    assert len(capsys.readouterr().out.splitlines()) >= len(figures)
    with pytest.raises(ValueError, match="88 sentences are needed, there are 60; pass fewer --num_batches"):
        main(arguments_of({**options, "num_batches": 10}))
