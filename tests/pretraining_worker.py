"""Pretraining runs of a second, in this process, in a forked process, or in several processes of a launcher.

Each process of `launch` calls `python pretraining_worker.py FOLDER`, which makes the runs of FOLDER/runs.json.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from places import ROOT
from safetensors.torch import load_file

from modeling_elmo.run_scripts import perplexity, run_pretraining
from modeling_elmo.run_scripts.cards import bilm_card
from modeling_elmo.run_scripts.pretraining.checkpoints import load_state
from modeling_elmo.run_scripts.pretraining.loop import Pretraining

TEXT = ROOT / "tests" / "fixtures" / "text" / "en.txt"
# Sentences of 3 to 11 words: short ones are fast, and different lengths need padding.
LINES = [" ".join(line.split()[: 3 + number % 9]) for number, line in enumerate(TEXT.read_text("utf-8").splitlines())]
MODEL = {
    "char_embedding_size": 4,
    "char_cnn_filters": [[1, 8], [3, 8]],
    "lstm_hidden_size": 12,
    "projection_size": 8,
    "max_word_length": 12,
}
TIMES = ("words_per_second", "data_wait")

Options = dict[str, Any]


def options_of(folder: Path, **options) -> Options:
    """Options of a run on 60 lines, ten batches an epoch, with the next 20 lines held out."""
    train, held_out = folder / "train.txt", folder / "held_out.txt"
    if not train.exists():
        train.write_text("\n".join(LINES[:60]) + "\n", "utf-8")
        held_out.write_text("\n".join(LINES[60:80]) + "\n", "utf-8")
    overrides = options.pop("config_overrides", {})
    context = options.get("context", "sentence")
    sizes = {"per_device_train_batch_tokens": 60} if context == "sentence" else {"per_device_train_batch_size": 8}
    if context == "stream" or options.get("optim") == "adagrad":
        sizes["unroll_steps"] = 6
    if options.get("softmax_type") == "sampled":
        sizes["num_sampled"] = 20
    defaults = {
        "preset": "tiny",
        "config_overrides": None if overrides is None else json.dumps(MODEL | overrides),
        "vocabulary_size": 120,
        "train_file": train,
        "validation_file": held_out,
        "is_split_into_words": True,
        "output_dir": folder / "run",
        **sizes,
        "max_steps": 24,
        "logging_steps": 7,
        "eval_steps": 7,
        "save_steps": 7,
        "save_total_limit": 100,
        "dataloader_num_workers": 0,
        "report_to": "none",
        "use_cpu": True,
    }
    return defaults | options


def arguments_of(options: Options) -> list[str]:
    """The options as on a command line. Options that are `None` or False are left out."""
    arguments = []
    for name, value in options.items():
        if value is not None and value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            arguments += [f"--{name}", *map(str, values)]
    return arguments


def pretrain(folder: Path, **options) -> Pretraining:
    return train(options_of(folder, **options))


def train(options: Options) -> Pretraining:
    """A run without the picture of its curve, which takes as long as the whole run."""
    with mock.patch.object(bilm_card, "draw_curve", return_value=False):
        return run_pretraining.main(arguments_of(options))


def contents(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[dict[str, Any]]]:
    """Weights, training state and log of a checkpoint."""
    log = json.loads((checkpoint / "training_log.json").read_text("utf-8"))
    return load_file(checkpoint / "model.safetensors"), load_state(checkpoint), log


def assert_same(found: Any, expected: Any, where: str = ""):
    """Bit for bit, except times."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected.keys() - set(TIMES):
            assert_same(found[name], expected[name], f"{where}/{name}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for number, values in enumerate(zip(found, expected, strict=True)):
            assert_same(*values, f"{where}/{number}")
    else:
        assert found == expected, where


def torchrun(launcher: Iterable[str], *command: str | Path, **variables: str) -> subprocess.Popen:
    """Starts processes of one thread each, as on a machine without accelerator, unless the variables show one."""
    # Not `accelerate launch --cpu --num_processes 2`, which starts one process.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= variables
    arguments = [sys.executable, "-m", "torch.distributed.run", *launcher, *command]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def two_machines(num_processes: int) -> list[list[str]]:
    """Options of the launchers of two machines with `num_processes` each, both of which are this machine."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}", "--rdzv_id", str(port)]
    each = ["--nnodes", "2", "--nproc_per_node", str(num_processes), *meeting, "--local_addr", "localhost"]
    return [[*each, "--node_rank", str(rank)] for rank in range(2)]


def launch(folder: Path, program: str, runs: list[Options], **variables: str) -> str:
    """Makes the runs in two processes, whose output it returns. The log or figures of each are in `NUMBER.json`."""
    folder.mkdir(exist_ok=True)
    runs = [{**options, "use_cpu": False} for options in runs]
    (folder / "runs.json").write_text(json.dumps([program, runs], default=str), "utf-8")
    with torchrun(("--standalone", "--nproc_per_node", "2"), __file__, folder, **variables) as launcher:
        output, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, errors[-4000:]
    return output


def main(folder: Path):
    if os.environ["CUDA_VISIBLE_DEVICES"]:  # one GPU, which NCCL refuses to share
        dist.init_process_group("gloo")
        os.environ["LOCAL_RANK"] = "0"
    end, dist.destroy_process_group = dist.destroy_process_group, lambda *_: None  # others follow the first run
    program, runs = json.loads((folder / "runs.json").read_text("utf-8"))
    for number, options in enumerate(runs):
        is_training = program == "run_pretraining"
        found = train(options) if is_training else perplexity.main(arguments_of(options))
        assert dist.get_world_size() == 2
        if dist.get_rank() == 0:
            figures = found.progress.log if is_training else vars(found)
            (folder / f"{number}.json").write_text(json.dumps(figures), "utf-8")
    end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
