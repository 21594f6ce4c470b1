"""One import name and one command for every installation: wheel, editable, strict editable, and a clone as it is.

Each installation has a virtual environment of its own, which borrows the heavy dependencies from the running one. pip
builds without isolation and without dependencies, so nothing is downloaded.
"""

import compileall
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from clean_python import ROOT, build_wheel, copy_of_the_clone, new_environment, pip, run

import modeling_elmo

# What `-c` and `-m` find, in one process: importing torch and transformers takes seconds.
PROBE = """
import json, runpy, sys
from pathlib import Path
import modeling_elmo, modeling_elmo.run_scripts, modeling_elmo.tokenization.tokenization_elmo as tokenization
import modeling_elmo.run_scripts.program.command_line as command_line
assert list((Path(modeling_elmo.run_scripts.__file__).parents[1] / "model_cards").glob("*.md"))  # templates of cards
from modeling_elmo.conversion.catalog import published_checkpoints
assert published_checkpoints()
names = [modeling_elmo.ELMoConfig, modeling_elmo.ELMoModel, modeling_elmo.ELMoTokenizer]
print(json.dumps({
    "files": [module.__file__ for module in (modeling_elmo, modeling_elmo.run_scripts, tokenization, command_line)],
    "modules": [name.__module__ for name in names],
}))
sys.argv = ["embed", "--help"]
runpy.run_module("modeling_elmo.run_scripts.embed", run_name="__main__", alter_sys=True)
"""


@dataclass
class Installation:
    mode: str
    python: Path
    clone: Path
    elsewhere: Path

    def run(self, *arguments: str, where: str, found: bool = False) -> str:
        """Runs Python in the clone's root or elsewhere, where PYTHONPATH must name a clone that is not installed."""
        needs_path = self.mode == "uninstalled" and where == "elsewhere" and not found
        path = {"PYTHONPATH": str(self.clone)} if needs_path else {}
        return run(self.python, *arguments, cwd=self.clone if where == "root" else self.elsewhere, **path)


pytestmark = pytest.mark.slow  # each installation is another Python


@pytest.fixture(scope="module", params=["wheel", "editable", "strict", "uninstalled"])
def installation(request, tmp_path_factory) -> Installation:
    folder = tmp_path_factory.mktemp(request.param)
    python, clone, elsewhere = new_environment(folder / "venv"), copy_of_the_clone(folder), folder / "elsewhere"
    elsewhere.mkdir()
    if request.param == "wheel":
        pip(python, "install", str(build_wheel(python, elsewhere)), cwd=elsewhere)
    elif request.param == "editable":
        pip(python, "install", "--editable", str(clone), cwd=elsewhere)
    elif request.param == "strict":
        pip(python, "install", "--config-settings", "editable_mode=strict", "--editable", str(clone), cwd=elsewhere)
    return Installation(request.param, python, clone, elsewhere)


@pytest.mark.parametrize("where", ["root", "elsewhere"])
def test_imports_and_scripts_come_from_one_place(installation, where):
    places = {"wheel": installation.python.parents[1], "strict": installation.clone / "build"}
    # the clone shadows what is installed, as a whole
    expected = installation.clone if where == "root" else places.get(installation.mode, installation.clone)
    printed, usage = installation.run("-c", PROBE, where=where).split("\n", maxsplit=1)
    found = json.loads(printed)
    assert all(Path(file).is_relative_to(expected) for file in found["files"]), found
    assert all(module.startswith("modeling_elmo.") for module in found["modules"]), found
    assert usage.startswith("usage: ")


def test_program_runs_by_path(installation):
    script = str(installation.clone / "run_scripts" / "embed.py")
    if installation.mode == "uninstalled":
        with pytest.raises(AssertionError, match="No module named 'modeling_elmo'"):
            installation.run(script, "--help", where="elsewhere", found=True)
    else:
        assert installation.run(script, "--help", where="elsewhere").startswith(
            "usage: embed.py [-h] --model TEXT --output TEXT"
        )


def test_command(installation):
    """`elmo` where the package is installed; the module of the command from the root of any clone."""
    command, where = [str(installation.python.with_name("elmo"))], installation.elsewhere
    if installation.mode == "uninstalled":
        assert not Path(*command).exists()
        command = [str(installation.python), "-m", "modeling_elmo.run_scripts.modeling_elmo_cli"]
        where = installation.clone
    assert run(*command, "--version", cwd=where) == f"elmo {modeling_elmo.__version__}\n"
    assert "\n  neighbors " in run(*command, "--help", cwd=where)
    assert run(*command, "embed", "--help", cwd=where).startswith("usage: elmo embed [-h] --model TEXT --output TEXT")


WITHOUT_SOURCES = """
import modeling_elmo
from modeling_elmo.run_scripts import run_pretraining, run_task
assert modeling_elmo.__file__.endswith(".pyc")
modeling_elmo.ELMoModel(modeling_elmo.ELMoConfig.from_preset("tiny")).save_pretrained("saved")
modeling_elmo.ELMoTokenizer.from_pretrained(NAME).save_pretrained("saved")
print(modeling_elmo.transformers.AutoModel.from_pretrained("saved").config.model_type)
"""


def test_an_installation_without_sources_saves_models_without_code(tmp_path):
    """As `compileall -b` makes it, or a program that freezes Python."""
    package = shutil.copytree(ROOT / "modeling_elmo", tmp_path / "modeling_elmo")
    for name in ("tokenization", "run_scripts"):
        shutil.copytree(ROOT / name, package / name)
    compileall.compile_dir(package, quiet=2, legacy=True)
    for file in package.rglob("*.py"):
        file.unlink()
    code = WITHOUT_SOURCES.replace("NAME", repr(str(ROOT / "model_cards" / "elmo-small-en")))
    finished = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 0 and finished.stdout == "elmo\n", finished.stderr
    assert finished.stderr.count("The model is saved without its code, because this installation has no sources") == 1
    assert not [*Path(tmp_path, "saved").glob("*.py*")]
