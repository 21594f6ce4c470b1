"""The `elmo` command, and the options, help, errors and exit statuses of all programs.

Small functions stand in for programs with mistakes of a user and with bugs. Real programs run in processes.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from transformers import AutoModel, TrainingArguments

from modeling_elmo import ELMoConfig, conversion_files
from modeling_elmo.run_scripts import modeling_elmo_cli
from modeling_elmo.run_scripts.program import command_line
from modeling_elmo.run_scripts.program.command_line import ProgramParser, is_mistake_of_user, run
from modeling_elmo.run_scripts.program.files import check_model

ROOT = Path(__file__).parents[1]
COMMAND = ROOT / "run_scripts" / "modeling_elmo_cli.py"
CONVERT = ["convert", "--weights", "missing.hdf5", "--options", "o.json", "--output_dir", "out"]


def elmo(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The `elmo` command in a process of its own."""
    inherited = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, str(COMMAND), *arguments], env=inherited, capture_output=True, text=True)


# The command


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_command_lists_its_programs(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["elmo", *arguments])
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
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert time.monotonic() - started < 2  # 0.05 s on a machine with nothing else to do


def test_version():
    printed = elmo("--version").stdout
    assert printed.startswith("elmo ") and printed[5].isdigit()


@pytest.mark.parametrize(
    ("name", "advice"),
    [("neighbours", "Did you mean `elmo neighbors`?"), ("zzz", "`elmo --help` lists the programs.")],
)
def test_an_unknown_program(name, advice):
    done = elmo(name, "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"elmo: error: {name!r} is not a program. {advice}\n"


def test_the_command_runs_a_program(monkeypatch):
    calls = []
    monkeypatch.setattr(sys, "argv", ["elmo", "embed", "--model", "m"])
    program = SimpleNamespace(main=lambda: calls.append(list(sys.argv)))
    modules = {"modeling_elmo.run_scripts.embed": program, command_line.__name__: command_line}
    monkeypatch.setattr(modeling_elmo_cli, "import_module", modules.__getitem__)
    modeling_elmo_cli.main()
    assert calls == [["elmo embed", "--model", "m"]]


@pytest.mark.parametrize("debug", [False, True])
def test_a_mistake_in_a_process(debug):
    done = elmo(*CONVERT, *(["--debug"] if debug else []))
    message = "missing.hdf5 does not exist; pass a file, a folder, a .zip archive or hf://user/repo/path."
    if debug:
        assert done.returncode == 1
        assert "Traceback" in done.stderr and done.stderr.endswith(f"FileNotFoundError: {message}\n")
    else:
        assert (done.returncode, done.stderr) == (2, f"elmo convert: error: {message}\n")


@pytest.mark.parametrize(
    "start", [["-m", "modeling_elmo.run_scripts.convert_checkpoint"], [str(ROOT / "run_scripts/convert_checkpoint.py")]]
)
def test_programs_without_the_command(start):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *start, *CONVERT[1:]], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("convert_checkpoint.py: error: missing.hdf5 does not exist; ")


def test_accelerate_launches_a_module():
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "-m", "modeling_elmo.run_scripts.perplexity"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*launch, "--help"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: perplexity.py --model TEXT [options]\n")


def test_a_package_that_is_missing(tmp_path):
    """As where the package was installed without its extras."""
    error = "ModuleNotFoundError(\"No module named 'datasets'\", name='datasets')"
    Path(tmp_path, "datasets.py").write_text(f"raise {error}")
    done = elmo("ner", "--help", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    assert done.stderr == (
        "elmo ner: error: No module named 'datasets'. Install the packages that the programs need: "
        'pip install "modeling-elmo[train,convert]"\n'
    )


# Mistakes and bugs


def exit_of(main, capsys, *arguments: str, monkeypatch) -> tuple[int, str]:
    """Exit status and standard error of a program."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/program.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        run(main)
    return ended.value.code, capsys.readouterr().err


def test_run_returns_after_a_success(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program.py"])
    assert run(lambda: [1]) is None


def test_run_shows_a_mistake_in_one_line(monkeypatch, capsys):
    found = exit_of(lambda: AutoModel.from_pretrained("no/such"), capsys, monkeypatch=monkeypatch)
    assert found[0] == 2 and found[1].startswith("program.py: error: ") and found[1].count("\n") == 1


def test_run_names_a_missing_file(monkeypatch, capsys):
    found = exit_of(lambda: Path("no/such/file").read_text(), capsys, monkeypatch=monkeypatch)
    assert found == (2, "program.py: error: no/such/file: No such file or directory\n")


def test_run_shows_a_bug(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program.py"])
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)


def test_run_shows_a_mistake_for_debugging(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program.py", "a.txt", "--debug"])
    with pytest.raises(ValueError, match="no good"):
        run(user_programs()["raised"])
    assert sys.argv == ["program.py", "a.txt"]


@pytest.mark.parametrize(
    ("arguments", "left", "is_debugging"),
    [
        (["--debug"], [], True),
        (["--debug", "--seed", "1"], ["--seed", "1"], True),
        (["--debug", "a.txt"], ["a.txt"], True),
        (["--debug", "underflow_overflow"], ["--debug", "underflow_overflow"], False),
        (["--debug", "underflow_overflow", "--debug"], ["--debug", "underflow_overflow"], True),
        (["--debug=tpu_metrics_debug"], ["--debug=tpu_metrics_debug"], False),
        ([], [], False),
    ],
)
def test_debug_is_also_an_option_of_trainer(arguments, left, is_debugging, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program.py", *arguments])
    assert command_line._take_debug_flag() == is_debugging
    assert sys.argv[1:] == left


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_control_c():
    code = (
        "import time\n"
        "from modeling_elmo.run_scripts.program.command_line import run\n"
        "def main():\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "run(main)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


USER_PROGRAMS = """
from contextlib import ExitStack, contextmanager, suppress

def raised():
    raise ValueError("no good")

def raised_from():
    try:
        int("x")
    except ValueError as error:
        raise ValueError("no good") from error

def raised_again():
    try:
        raised()
    except ValueError:
        raise

def raised_again_by_name():
    try:
        raised()
    except ValueError as error:
        raise error

def raised_in_generator():
    def numbers():
        yield 1
        raise ValueError("no good")
    return sum(numbers())

def raised_in_expression():
    return all(raised() for _ in range(2))

@contextmanager
def opened():
    try:
        yield
    finally:
        len("closed")

@contextmanager
def translated():
    try:
        yield
    except KeyError as error:
        raise ValueError("no good") from error

def raised_through_contexts():
    with opened(), ExitStack() as stack, suppress(TypeError):
        stack.enter_context(opened())
        raised()

def translated_by_context():
    with translated():
        {}["x"]

def raised_in_callback():
    return sorted([2, 1], key=lambda number: raised())

def raised_after_cleaning_up():
    try:
        raised()
    finally:
        with suppress(ValueError):
            int("x")

async def raised_in_coroutine():
    with suppress(TypeError):
        int(None)
    raised()

def run_coroutine():
    import asyncio
    asyncio.run(raised_in_coroutine())
"""
BUGS = """
import json
from contextlib import contextmanager
import numpy as np
import torch

def division():
    return 1 / 0

def wrong_value():
    return int("x")

def numpy_error():
    return np.zeros((2, 3)) @ np.zeros((2, 3))

def torch_error():
    return torch.zeros(2, 3) + torch.zeros(4)

def library_error():
    return json.loads("{")

def missing_key():
    return {}["x"]

def missing_attribute():
    return None.shape

def assertion():
    assert 1 == 2, "never"

def abstract():
    raise NotImplementedError

def raised_again():
    try:
        return int("x")
    except ValueError:
        raise

def raised_again_by_name():
    try:
        return int("x")
    except ValueError as error:
        raise error

@contextmanager
def opened():
    try:
        yield
    finally:
        len("closed")

def raised_through_context():
    with opened():
        return 1 / 0

def raised_in_generator():
    return sum(1 / number for number in (1, 0))

def wrong_number_of_arguments():
    return division(1)

def unknown_name():
    return no_such_name

def bad_import():
    from modeling_elmo import no_such_name

def missing_module_of_ours():
    import modeling_elmo.no_such_module
"""


def functions_of(source: str, module: str) -> dict:
    names = {"__name__": module}
    exec(compile(source, "program.py", "exec"), names)
    names = {name: value for name, value in names.items() if getattr(value, "__module__", "") == module}
    return {name: value for name, value in names.items() if value.__code__.co_argcount == 0 and name != "opened"}


def user_programs(module: str = "modeling_elmo.program") -> dict:
    functions = functions_of(USER_PROGRAMS, module)
    return {name: functions[name] for name in functions if name not in ("translated", "raised_in_coroutine")}


def error_of(function) -> BaseException:
    try:
        function()
    except Exception as error:
        return error
    raise RuntimeError(f"{function.__name__} did not fail")


@pytest.mark.parametrize("name", user_programs())
def test_what_our_code_raises_is_a_mistake_of_the_user(name):
    error = error_of(user_programs()[name])
    assert str(error) == "no good" and is_mistake_of_user(error)
    assert is_mistake_of_user(error_of(user_programs("__main__")[name]))
    assert not is_mistake_of_user(error_of(user_programs("some_library")[name]))


@pytest.mark.parametrize("name", functions_of(BUGS, "modeling_elmo.program"))
def test_every_other_error_is_a_bug(name):
    assert not is_mistake_of_user(error_of(functions_of(BUGS, "modeling_elmo.program")[name]))


def test_errors_are_told_apart_under_a_tracer():
    """Coverage and debuggers rewrite the instructions of a function."""
    traced = []
    before = sys.gettrace()
    sys.settrace(lambda *event: traced.append(event[1]) or (lambda *_: None))
    try:
        mistake, bug = error_of(user_programs()["raised"]), error_of(functions_of(BUGS, "modeling_elmo.x")["division"])
    finally:
        sys.settrace(before)
    assert traced and is_mistake_of_user(mistake) and not is_mistake_of_user(bug)


def test_functions_that_ran_often_are_told_apart():
    """Python specializes the instructions of a function that is called often."""
    raised = user_programs()["raised"]
    assert all(is_mistake_of_user(error_of(raised)) for _ in range(200))


@pytest.mark.parametrize(
    "function",
    [
        lambda: Path("no/such/file").read_text(),
        lambda: AutoModel.from_pretrained("no/such"),
        lambda: ELMoConfig(projection_size="wide"),
        lambda: ELMoConfig(projection_sise=3),
        lambda: conversion_files.read_arrays(__file__),
    ],
    ids=["file", "hub", "config", "misspelt", "hdf5"],
)
def test_errors_of_libraries_that_a_user_can_put_right(function):
    assert is_mistake_of_user(error_of(function))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such", r"no/such: there is no such folder, and the Hub cannot be reached \(.+\)\. Correct the name"),
        ("no/such/model", "no/such/model: there is no such folder, and it is no name on the Hub, user/name"),
        ("", "tests has no config.json; pass the folder of a model"),
    ],
)
def test_a_model_that_does_not_exist(name, message):
    with pytest.raises(FileNotFoundError, match=message) as raised:
        check_model(name or str(ROOT / "tests"))
    assert is_mistake_of_user(raised.value)


# Options and help


@dataclass
class SharedArguments:
    _argument_group_name = "options of the card"
    license: str | None = field(default=None, metadata={"help": "Licence of the weights."})


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
    learning_rate: float = field(default=0.25, metadata={"help": "Learning rate of Adam."})


def parser() -> ProgramParser:
    return ProgramParser(FirstArguments, SecondArguments, prog="elmo test", description="What it does.\n\n  example")


def test_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = parser().format_help()
    own, trainer = text.split("\noptions of transformers' Trainer:\n")
    assert own == EXPECTED_HELP
    assert "--optim TEXT " in trainer and "--max_steps INT " in trainer and "--max-steps" not in trainer
    assert trainer.endswith("\n--debug shows the traceback of an error.\n")
    assert max(map(len, text.splitlines())) <= 100


EXPECTED_HELP = """\
usage: elmo test --model_name_or_path TEXT [options]

What it does.

  example

first options:
  --model_name_or_path TEXT
                        Folder of a model.
  --batch_size INT      Texts per batch. (default: 8)
  --train_file FILE     Training file.
  --share FLOAT         100% or less. (default: 0.5)
  --mode {a,b}          Mode. (default: a)
  --shuffle, --no_shuffle
                        Shuffle the texts. (default: on)
  --lowercase           Lowercase the texts.
  --names TEXT [TEXT ...]
                        Names of the columns.
  --layers TEXT [TEXT ...]
                        Layers. (default: top all)
  --steps INT           Number of steps (default: as many as fit).

training options:
  --learning_rate FLOAT
                        Learning rate of Adam. (default: 0.25)

options of the card:
  --license TEXT        Licence of the weights.
"""


def test_options_become_one_object_per_group():
    first, second = parser().parse(["--model_name_or_path", "m", "--no_shuffle", "--train-file", "t", "--seed", "3"])
    assert (first.model_name_or_path, first.shuffle, first.train_file, second.seed) == ("m", False, "t", 3)
    single = ProgramParser(FirstArguments)
    assert single.parse(["--model_name_or_path", "m"]) == FirstArguments(model_name_or_path="m")
    single.add_argument("texts", help="File of texts.")
    text = single.format_help()
    assert " texts --model_name_or_path TEXT [options]\n" in text
    assert text.index("\narguments:\n") < text.index("\nfirst options:\n")
    arguments, others = single.parse(["--model_name_or_path", "m", "a.txt"])
    assert (arguments.model_name_or_path, others.texts) == ("m", "a.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modle_name_or_path", "m"], "the following arguments are required: --model_name_or_path"),
        (["--model_name_or_path", "m", "--steps", "x"], "argument --steps: invalid int value: 'x'"),
        (["--model_name_or_path", "m", "--mode", "c"], "argument --mode: invalid choice: 'c'"),
        (["--model_name_or_path", "m", "--optim", "sdg"], "argument --optim: invalid choice: 'sdg' (choose from sgd, "),
        (["--model_name_or_path", "m", "--train-file"], "argument --train_file: expected one argument"),
    ],
)
def test_wrong_options_end_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parser().parse(arguments)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert printed.err.startswith(f"elmo test: error: {message}") and len(printed.err) < 150


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sed", "3"], r"--sed is not an option of this program\. Did you mean --seed\?"),
        (["--zzz=3"], r"--zzz=3 is not an option of this program\. --help lists the options\."),
        (["--load_best_model_at_end"], "requires the save and eval strategy to match"),
    ],
)
def test_wrong_options_are_mistakes_of_the_user(arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        parser().parse(["--model_name_or_path", "m", *arguments])
    assert is_mistake_of_user(raised.value)
