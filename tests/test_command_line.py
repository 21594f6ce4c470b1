"""The `elmo` command, and the options, help, errors and exit statuses of all programs.

Small functions stand in for programs with mistakes of a user and with bugs.
"""

import contextlib
import errno
import io
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import KW_ONLY, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest
import torch
from errors import refused
from places import ROOT
from safetensors.torch import load_file
from transformers import AutoModel, TrainingArguments

from modeling_elmo import ELMoConfig
from modeling_elmo.conversion.files import read_arrays
from modeling_elmo.run_scripts import modeling_elmo_cli
from modeling_elmo.run_scripts.fine_tuning.tasks import TASKS
from modeling_elmo.run_scripts.program.command_line import (
    ProgramParser,
    is_mistake_of_user,
    refuse_replaced_inputs,
    run,
)

COMMAND = ROOT / "run_scripts" / "modeling_elmo_cli.py"


def python(*arguments, stdout=subprocess.PIPE, **environment):
    """A Python process that finds the package in the clone."""
    inherited = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *arguments], env=inherited, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def ends(monkeypatch, capsys):
    """A function that starts a program with a command line, and returns its exit status, output and errors."""

    def started(function, *command):
        monkeypatch.setattr(sys, "argv", list(command))
        with pytest.raises(SystemExit) as ended:
            function()
        return ended.value.code, *capsys.readouterr()

    return started


# The command


def test_the_command_lists_its_programs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["elmo"])
    modeling_elmo_cli.main()
    printed = capsys.readouterr().out
    assert printed.startswith("usage: elmo PROGRAM [options]\n")
    assert all(f"\n  {name} " in printed for name in modeling_elmo_cli.PROGRAMS)
    assert max(map(len, printed.splitlines())) <= 80


def test_the_list_of_programs_comes_at_once():
    """Without torch and transformers, whose import takes seconds."""
    code = (
        f"import runpy, sys; sys.argv = ['elmo', '--help']; runpy.run_path({str(COMMAND)!r}, run_name='__main__');"
        "assert not {'torch', 'transformers', 'numpy', 'modeling_elmo'} & set(sys.modules)"
    )
    assert python("-c", code).returncode == 0


def test_an_unknown_program(ends):
    told = "elmo: error: 'neighbours' is not a program. Did you mean `elmo neighbors`?\n"
    assert ends(modeling_elmo_cli.main, "elmo", "neighbours", "--help") == (2, "", told)


@pytest.mark.slow
def test_accelerate_launches_a_module():
    done = python("-m", "accelerate.commands.launch", "--cpu", "-m", "modeling_elmo.run_scripts.perplexity", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: perplexity.py [-h] --model TEXT\n")


@pytest.mark.slow
def test_a_package_that_is_missing(tmp_path):
    """As where the package was installed without its extras."""
    error = "ModuleNotFoundError(\"No module named 'datasets'\", name='datasets')"
    Path(tmp_path, "datasets.py").write_text(f"raise {error}")
    done = python(COMMAND, "ner", "--help", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    assert done.stderr == (
        "elmo ner: error: No module named 'datasets'. Install the packages that the programs need: "
        'pip install "modeling-elmo[train,convert]"\n'
    )


# Mistakes and bugs


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda: AutoModel.from_pretrained("no/such"), "program.py: error: .*\n"),
        (lambda: Path("no/such/file").read_text(), "program.py: error: no/such/file: No such file or directory\n"),
        (lambda: load_file(__file__), "program.py: error: A .safetensors file cannot be read or written .*\n"),
    ],
)
def test_run_shows_a_mistake_in_one_line(function, message, ends):
    status, _, told = ends(lambda: run(function), "/somewhere/program.py")
    assert status == 2 and re.fullmatch(message, told)


def test_run_shows_bugs_and_with_debug_all_errors(monkeypatch):
    """Trainer's option of this name has its value in the same word."""
    monkeypatch.setattr(sys, "argv", ["program.py", "--debug=tpu_metrics_debug"])
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)
    assert run(lambda: [1]) is None and sys.argv[1:] == ["--debug=tpu_metrics_debug"]
    monkeypatch.setattr(sys, "argv", ["program.py", "--debug", "--seed", "1"])
    with pytest.raises(FileNotFoundError):
        run(Path("no/such/file").read_text)
    assert sys.argv[1:] == ["--seed", "1"]


def test_a_program_leaves_its_group_of_processes(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", world_size=1, rank=0)
    run(lambda: None)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 100_000])
def test_an_output_that_nobody_reads(lines):
    """It fails while the program runs, or when the last of it is written."""
    code = f"from {run.__module__} import run\nrun(lambda: [print('line') for _ in range({lines})])"
    reader, output = os.pipe()
    os.close(reader)
    done = python("-c", code, stdout=output)
    os.close(output)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]], ids=" ".join)
def test_help_that_nobody_reads(arguments):
    reader, output = os.pipe()
    os.close(reader)
    done = python(COMMAND, *arguments, stdout=output, PYTHONUNBUFFERED="")
    os.close(output)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "number, status, message",
    [(errno.EINVAL, 141, ""), (errno.ENOSPC, 2, "a.py: error: The output: No space left on device\n")],
    ids=["closed pipe of Windows", "full disk"],
)
def test_an_output_that_cannot_be_written(number, status, message, ends, monkeypatch, tmp_path):
    class Output(io.FileIO):
        def write(self, data):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(Output(tmp_path / "a", "w"))))
    assert ends(lambda: run(lambda: print("line")), "a.py") == (status, "", message)


@pytest.mark.slow
def test_an_output_whose_encoding_lacks_signs():
    code = f"from {run.__module__} import run\nrun(lambda: print('\\u4e2d \\udce9'))"
    done = python("-c", code, PYTHONIOENCODING="cp1252")
    assert (done.returncode, done.stdout) == (0, "\\u4e2d \\udce9\n")


@pytest.mark.parametrize("start", [lambda: run(interrupted), modeling_elmo_cli.main])
def test_control_c(start, ends, monkeypatch):
    """In a program, and while its module is imported."""
    monkeypatch.setattr(modeling_elmo_cli, "import_module", interrupted)
    assert ends(start, "elmo", "embed") == (130, "", "")


def interrupted(*_):
    raise KeyboardInterrupt


def raised():
    raise ValueError("no good")


BUGS = [lambda: torch.zeros(2, 3) + torch.zeros(4), lambda: raised(1), lambda: {}["x"], lambda: 1 / 0]
BUGS += [lambda: import_module("modeling_elmo.no_such_module")]
MISTAKES = [raised, lambda: ELMoConfig(projection_size="wide"), lambda: read_arrays(__file__)]


@pytest.mark.parametrize("function", [*BUGS, *MISTAKES])
def test_errors_that_a_user_can_put_right_and_bugs(function):
    with pytest.raises(Exception) as error:
        function()
    assert is_mistake_of_user(error.value) == (function in MISTAKES)


# Options and help


@dataclass
class SharedArguments:
    _argument_group_name = "options of the card"
    license: str | None = field(default=None, metadata={"help": "License of the weights."})


@dataclass
class BaseArguments(SharedArguments):
    batch_size: int = field(default=4, metadata={"help": "Texts per batch."})


@dataclass
class FirstArguments(BaseArguments):
    batch_size: int = 8  # no help of its own
    _: KW_ONLY
    model_name_or_path: str = field(metadata={"help": "Folder of a model."})
    train_file: str | None = field(default=None, metadata={"help": "Training file."})
    share: float = field(default=0.5, metadata={"help": "100%% or less."})
    mode: Literal["a", "b"] = field(default="a", metadata={"help": "Mode."})
    shuffle: bool = field(default=True, metadata={"help": "Shuffle the texts."})
    lowercase: bool = field(default=False, metadata={"help": "Lowercase the texts."})
    names: list[str] = field(default_factory=list, metadata={"help": "Names of the columns."})
    layers: list[str] = field(default_factory=lambda: ["top", "all"], metadata={"help": "Layers."})
    steps: int = field(default=5, metadata={"help": "Number of steps (default: as many as fit)."})


@dataclass
class SecondArguments(TrainingArguments):
    _argument_group_name = "training options"
    _shown_options = "bf16"
    learning_rate: float = field(default=0.25, metadata={"help": "Learning rate of Adam."})


def parser():
    text = "What it does.\n\n  example"
    return ProgramParser(FirstArguments, SecondArguments, prog="elmo test", description=text, epilog="More.")


def help_of(option, ends):
    status, printed, told = ends(lambda: parser().parse(["--seed", "3", option]))
    assert (status, told) == (0, "")
    return printed


def test_help(monkeypatch, ends):
    monkeypatch.setenv("COLUMNS", "100")
    own, ending = help_of("--help", ends).split("\n\n--help_all ")
    assert re.sub(r"(?<=  --bf16) .*(\n {10}.*)*", "", own) == EXPECTED_HELP  # a text of transformers
    count = len(fields(TrainingArguments)) - len(("learning_rate", "bf16"))
    rest = f"also lists {count} other options of transformers' Trainer."
    assert ending == f"{rest}\n\nMore.\n\n--debug shows the traceback of an error.\n"


def test_the_help_of_all_options(monkeypatch, ends):
    monkeypatch.setenv("COLUMNS", "100")
    text, short = help_of("--help_all", ends), help_of("-h", ends)
    own, trainer = text.split("\n\noptions of transformers' Trainer:\n")
    assert own == short.split("\n\n--help_all")[0]
    names = {item.name for item in fields(TrainingArguments)} - {"learning_rate", "bf16"}
    assert {*re.findall(r"^  --(\w+)", trainer, re.MULTILINE)} == names
    assert "--optim TEXT " in trainer and "--max_steps INT " in trainer and "--max-steps" not in trainer
    assert trainer.endswith("\n\nMore.\n\n--debug shows the traceback of an error.\n")
    assert max(map(len, text.splitlines())) <= 100


EXPECTED_HELP = """\
usage: elmo test [-h] --model_name_or_path TEXT

What it does.

  example

options:
  --model_name_or_path TEXT
                        Folder of a model.
  --batch_size INT      Texts per batch. (default: 8)
  --train_file FILE     Training file.
  --share FLOAT         100% or less. (default: 0.5)
  --mode {a,b}          Mode. (default: a)
  --shuffle, --no_shuffle
                        Shuffle the texts. (default: True)
  --lowercase           Lowercase the texts.
  --names TEXT [TEXT ...]
                        Names of the columns.
  --layers TEXT [TEXT ...]
                        Layers. (default: ['top', 'all'])
  --steps INT           Number of steps (default: as many as fit).

options of the card:
  --license TEXT        License of the weights.

training options:
  --learning_rate FLOAT
                        Learning rate of Adam. (default: 0.25)
  --bf16"""


OPTIONS = ROOT / "tests" / "fixtures" / "options.txt"


def test_the_options_of_all_programs_are_in_the_list():
    """A line for each option, with its programs: a name has one meaning in all of them."""
    programs = defaultdict(list)
    for name, (module, _) in modeling_elmo_cli.PROGRAMS.items():
        tasks = [[name]] if module == "run_task" else [[]]
        if name == "reproduce":
            tasks = [[task] for task in (*TASKS, "all")]
        for task in tasks:
            for option in options_in_help(module, *task, "--help"):
                programs[option].append(" ".join([name] if module == "run_task" else [name, *task]))
    lines = [f"{option}: {', '.join(names)}" for option, names in sorted(programs.items())]
    listed = OPTIONS.read_text("utf-8").splitlines()
    differences = [f"+ {line}" for line in lines if line not in listed]
    differences += [f"- {line}" for line in listed if line not in lines]
    advice = "Options have changed. Describe a new one on its page in docs/, then bring the list up to date:"
    if differences:
        pytest.fail("\n".join([f"{OPTIONS}: {advice}", *differences]), pytrace=False)


def options_in_help(module, *arguments):
    with contextlib.redirect_stdout(io.StringIO()) as stdout, pytest.raises(SystemExit):
        import_module(f"modeling_elmo.run_scripts.{module}").main([*arguments])
    return re.findall(r"^  (--\w+)", stdout.getvalue(), re.MULTILINE)


def test_options_become_one_object_per_group():
    first, second = parser().parse(["--model_name_or_path", "m", "--no_shuffle", "--train-file", "t", "--seed", "3"])
    assert (first.model_name_or_path, first.shuffle, first.train_file, second.seed) == ("m", False, "t", 3)
    single = ProgramParser(FirstArguments)
    assert single.parse(["--model_name_or_path", "m"]) == FirstArguments(model_name_or_path="m")
    single.add_argument("texts", help="File of texts.")
    assert " --model_name_or_path TEXT texts\n" in single.format_help()
    arguments, others = single.parse(["--model_name_or_path", "m", "a.txt"])
    assert (arguments.model_name_or_path, others.texts) == ("m", "a.txt")


def test_the_lists_of_an_option_that_is_given_twice_are_joined():
    """And replace a default; of other options, the last value counts."""
    given = "--model_name_or_path m --names a b --names c --layers x --steps 1 --layers y z --steps 2 --names d"
    for _ in range(2):
        first = ProgramParser(FirstArguments).parse(given.split())
        assert (first.names, first.layers, first.steps) == (["a", "b", "c", "d"], ["x", "y", "z"], 2)
    assert ProgramParser(FirstArguments).parse(["--model_name_or_path", "m"]).layers == ["top", "all"]


@pytest.mark.parametrize("wrong", ["--steps x", "--mode c", "--train-file"])
def test_options_that_argparse_refuses_end_in_one_line(wrong, ends):
    status, printed, told = ends(lambda: parser().parse(["--model_name_or_path", "m", *wrong.split()]))
    assert (status, printed, told.count("\n")) == (2, "", 1)
    name = wrong.split()[0].replace("-f", "_f")
    assert told.startswith(f"elmo test: error: argument {name}: ") and len(told) < 150


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--sed 3", r"--sed is not an option of this program\. Did you mean --seed\?"),
        ("--load_best_model_at_end", "requires the save and eval strategy to match"),
        ("--seed 4294967296", r"--seed 4294967296: pass a number from 0 to 4294967295\."),
        ("--weight_decay nan", r"--weight_decay nan: pass 0 or more\."),
        ("--share nan", r"--share nan: pass a number\."),  # an option without bounds
        ("--accelerator_config {a}", r"--accelerator_config {a}: Expecting .*\. Pass another value"),
        ("--train_file caf\udce9", "^caf\udce9 is not UTF-8; if it is the name of a file, rename the file"),
    ],
)
def test_wrong_options_are_mistakes_of_the_user(arguments, message):
    with refused(message) as error:
        parser().parse(["--model_name_or_path", "m", *arguments.split()])
    assert is_mistake_of_user(error.value)


@pytest.mark.parametrize(
    "inputs",
    [
        {"train_file": ["*.txt"]},
        {"train_file": ["."]},
        {"text": ["link.txt"]},
        {"pairs": "a.txt"},
        {"output": "model/vocab.txt", "model": "model"},
        {"output": None, "output_dir": "model", "model_name_or_path": "link-to-model"},
        {"output": None, "output_dir": "model", "vocabulary_file": "model/vocab.txt"},
    ],
    ids=str,
)
def test_an_output_that_is_an_input_is_refused(inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "texts"):
        Path(name).mkdir()
    for name in ("a.txt", "model/config.json", "model/vocab.txt"):
        Path(name).touch()
    Path("link.txt").symlink_to("a.txt")
    Path("link-to-model").symlink_to("model")
    with refused(r"--output\w* \S+ would replace \S+, which is read. Pass another path."):
        refuse_replaced_inputs({"output": "a.txt"} | inputs)


def test_other_outputs_may_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model", "results").mkdir(parents=True)
    for name in ("model/results/probe.json", "model/found.json", "model/results/vocab.txt", "a.txt", "b.txt"):
        Path(name).touch()
    for output in ("model/results/probe.json", "model/found.json", "b.txt", "c.txt"):
        refuse_replaced_inputs({"output": output, "model": "model", "train_file": ["a.txt"], "hub_model_id": "b.txt"})
    refuse_replaced_inputs({"output_dir": "model", "resume_from_checkpoint": "model", "text": None})
    refuse_replaced_inputs({"output_dir": "model/results", "model_name_or_path": "model"})


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc is a library of Linux")
def test_freed_memory_is_kept_for_the_next_array():
    """Unless the user decides by a variable of glibc."""
    code = (
        "import numpy, resource\n"
        "from modeling_elmo.run_scripts.program.memory import keep_memory; keep_memory()\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "numpy.ones(2**24); before = faults(); numpy.ones(2**24); print(faults() - before)"
    )
    kept, returned = (int(python("-c", code, **options).stdout) for options in ({}, {"MALLOC_ARENA_MAX": "8"}))
    assert 10 * kept < returned
