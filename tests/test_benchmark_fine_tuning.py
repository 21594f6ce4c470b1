"""The benchmark of stored layers takes the same steps both ways."""

import json

import pytest
from pretraining_worker import arguments_of
from task_worker import HEAD, TASKS, bilm

from modeling_elmo.run_scripts.benchmark_fine_tuning import main


@pytest.mark.parametrize(
    "task, file", [("tagging", "wnut17_train.conll"), ("question-answering", "squadshifts_train.json")]
)
def test_figures(task, file, tmp_path, capsys):
    options = {
        "task": task,
        "model_name_or_path": bilm(tmp_path / "bilm"),
        "train_file": TASKS / file,
        "config_overrides": json.dumps(HEAD),
        "per_device_train_batch_size": 8,
        "num_batches": 3,
        "output": tmp_path / "figures.json",
    }
    figures = main(arguments_of(options))
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    for what in ("stored layers", "our own biRNNs"):
        lowest, middle, highest = (figures[f"{what}, {name}"] for name in ("lowest", "times as fast", "highest"))
        assert 0 < lowest <= middle <= highest
    assert figures["largest difference of the losses"] < 1e-3
    assert len(capsys.readouterr().out.splitlines()) >= len(figures)
    with pytest.raises(ValueError, match="168 examples are needed, there are [46]0; pass fewer --num_batches"):
        main(arguments_of({**options, "num_batches": 20}))
