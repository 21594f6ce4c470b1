"""A folder belongs to one run, and a run has all processes that were started."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from errors import refused
from places import ROOT

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoForTokenClassification
from modeling_elmo.run_scripts.program import processes
from modeling_elmo.run_scripts.program.processes import (
    LOCK,
    check_processes,
    check_workers,
    computes_bfloat16,
    join_processes,
    local_device,
    sole_run,
    values_of_all,
)

SHARDED = ("pretraining", "layers", "frozen", "trained")
# A run with a worker, as of a DataLoader. The worker outlives it for a while.
HOLDER = """
import multiprocessing, sys, time
from pathlib import Path
from modeling_elmo.run_scripts.program.processes import sole_run
with sole_run(Path(sys.argv[1])):
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    print(worker.pid, flush=True)
    time.sleep(60)
"""


def test_processes_that_do_not_know_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_processes(2)
    with refused("2 processes were started .*this run has 1: .* set ACCELERATE_USE_CPU=true"):
        check_processes(1)
    monkeypatch.delenv("WORLD_SIZE")
    check_processes(1)


def test_a_group_of_processes(monkeypatch):
    """One process needs no others; of several, the end of another is an error."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_processes() == (1, 0) and values_of_all("value", 1) == ["value"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.distributed, "init_process_group", MagicMock())
    monkeypatch.setattr(torch.distributed, "all_gather_object", MagicMock(side_effect=RuntimeError("closed")))
    assert join_processes() == (2, 1)
    with refused("One of 2 processes has ended", ConnectionError):
        values_of_all(None, 2)


def make_parts(kind: str) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """A model, and the parts of it that are sharded one by one."""
    torch.manual_seed(0)
    options = {"vocab_size": 40, "dropout": 0.0, "elmo_dropout": 0.0, "task_dropout": 0.0, "task_hidden_size": 6}
    config = ELMoConfig.from_preset("tiny", **options, num_labels=3, freeze_bilm=kind == "frozen")
    model = (ELMoForPreTraining if kind in ("pretraining", "layers") else ELMoForTokenClassification)(config)
    model._freeze_as_configured()
    if kind == "layers":  # as accelerate finds them
        parts = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        assert len(parts) == 2 * config.num_hidden_layers
        return model, parts
    parts = [*model.elmo.children(), *(part for part in model.children() if part is not model.elmo)]
    return model, [part for part in parts if [*part.parameters()]]


def losses_of(model, rows: slice) -> list[float]:
    """The losses of four steps on rows of a batch, which have the same number of words."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(4, 40, (4, 6), generator=generator)[rows]
    characters = torch.randint(1, 200, (4, 6, 50), generator=generator)[rows]
    labels = words if isinstance(model, ELMoForPreTraining) else words % 3
    for _ in range(4):
        loss = model(character_ids=characters, input_ids=words, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_sharded(rank: int, folder: Path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for kind in SHARDED:
        model, parts = make_parts(kind)
        for part in [*parts, model]:
            torch.distributed.fsdp.fully_shard(part)
        losses = values_of_all(losses_of(model, slice(2 * rank, 2 * rank + 2)), 2)
        (folder / kind).write_text(json.dumps([sum(pair) / 2 for pair in zip(*losses, strict=True)]))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_sharded_parts_equal_one_process(tmp_path):
    """FSDP 2 on the children of the biLM and of the head, then on the model."""
    torch.multiprocessing.spawn(train_sharded, (tmp_path,), nprocs=2)
    for kind in SHARDED:
        expected = losses_of(make_parts(kind)[0], slice(None))
        assert expected[-1] < expected[0]
        assert json.loads((tmp_path / kind).read_text()) == pytest.approx(expected, rel=1e-6)


def test_each_process_of_a_machine_has_its_own_device(monkeypatch):
    """More processes than devices share them. Each sets its device, where triton launches, for example."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device() == local_device("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:3", "gpu", "meta", "xpu"):
        with refused(f"--device {name}: torch cannot compute on it here; pass cpu, cuda"):
            local_device(name)
    monkeypatch.setattr(torch, "ones", MagicMock())  # on cards that are not here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert local_device("cpu") == torch.device("cpu") and local_device("cuda:3") == torch.device("cuda", 3)
    for rank, index in (("0", 0), ("1", 1), ("2", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert local_device() == local_device("cuda") == torch.device("cuda", index)
    monkeypatch.delenv("LOCAL_RANK")
    assert local_device() == torch.device("cuda", 0)
    assert [device.index for device in current] == [3, 0, 0, 1, 1, 0, 0, 0]


def test_a_temporary_folder_with_a_long_path_has_no_workers(tmp_path, monkeypatch):
    long = tmp_path / ("t" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(long))
    check_workers(0)
    with refused("--dataloader_num_workers 2: .*Set TMPDIR, or pass 0"):
        check_workers(2)
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", tempfile.mkdtemp(dir="/tmp"))
    check_workers(2)


def test_a_folder_belongs_to_one_run(tmp_path):
    folder = tmp_path / "a" / "run"
    with sole_run(folder):
        with refused("Another run is writing into .*run", FileExistsError), sole_run(folder):
            pass
        with sole_run(folder, is_main_process=False):  # another process of the first run
            pass
        (folder / "model").touch()
    assert os.listdir(folder) == ["model"]
    with sole_run(folder):
        pass


def test_a_folder_without_files_is_removed_only_if_the_run_made_it(tmp_path):
    for folder in (tmp_path / "new", tmp_path):
        with pytest.raises(ZeroDivisionError), sole_run(folder):
            raise ZeroDivisionError
    assert tmp_path.exists() and not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="workers that inherit open files")
def test_a_killed_run_holds_no_folder(tmp_path):
    """Its file stays; its worker, which still lives, does not hold the lock either."""
    command = [sys.executable, "-c", HOLDER, tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as holder:
        worker = int(holder.stdout.readline())
        try:
            with refused("Another run", FileExistsError), sole_run(tmp_path):
                pass
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            assert (tmp_path / LOCK).exists()
            with sole_run(tmp_path):
                pass
        finally:
            os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("obstacle", [None, "this processor has no instructions for bfloat16"])
def test_a_processor_without_bfloat16_computes_in_float32(obstacle, monkeypatch, warnings_of_transformers):
    monkeypatch.setattr(processes, "bfloat16_obstacle", lambda: obstacle)
    assert computes_bfloat16("cuda", "--bf16")
    assert [computes_bfloat16("cpu", "--bf16") for _ in range(2)] == [obstacle is None] * 2
    told = [f"--bf16: {obstacle}, so float32 is faster. This run computes in float32."]
    assert warnings_of_transformers.messages == (told if obstacle else [])
