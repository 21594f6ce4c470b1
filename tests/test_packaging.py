"""One import name and one command for every installation: wheel, editable, strict editable, and a clone as it is.

Each installation has a virtual environment of its own, which borrows the heavy dependencies from the running one. pip
builds without isolation and without dependencies, so nothing is downloaded.
"""

import json
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from clean_python import new_environment, run

import modeling_elmo

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "modeling_elmo": "modeling_elmo",
    "tokenization": "modeling_elmo/tokenization",
    "run_scripts": "modeling_elmo/run_scripts",
}
NOT_SOURCE = (".*", "demo_output", "*.safetensors", "__pycache__", "build", "dist", "*.egg-info")
# What `-c` and `-m` find, in one process: importing torch and transformers takes seconds.
PROBE = """
import json, runpy, sys
from pathlib import Path
import modeling_elmo, modeling_elmo.run_scripts, modeling_elmo.tokenization.tokenization_elmo as tokenization
import modeling_elmo.run_scripts.program.command_line as command_line
assert list((Path(modeling_elmo.run_scripts.__file__).parents[1] / "model_cards").glob("*.md"))  # templates of cards
from modeling_elmo.conversion_catalogue import published_checkpoints
assert published_checkpoints()
names = [modeling_elmo.ELMoConfig, modeling_elmo.ELMoModel, modeling_elmo.ELMoTokenizer]
print(json.dumps({
    "files": [module.__file__ for module in (modeling_elmo, modeling_elmo.run_scripts, tokenization, command_line)],
    "modules": [name.__module__ for name in names],
}))
sys.argv = ["embed", "--help"]
runpy.run_module("modeling_elmo.run_scripts.embed", run_name="__main__", alter_sys=True)
"""


def copy_of_the_clone(folder: Path) -> Path:
    return shutil.copytree(ROOT, folder / "clone", ignore=shutil.ignore_patterns(*NOT_SOURCE))


def pip(python: Path, *arguments: str, cwd: Path) -> None:
    offline = ("--no-index", "--no-deps", "--no-build-isolation")
    run(python, "-m", "pip", "--disable-pip-version-check", *arguments, *offline, cwd=cwd)


def build_wheel(python: Path, folder: Path) -> Path:
    clone = copy_of_the_clone(folder)
    pip(python, "wheel", "--wheel-dir", str(folder), str(clone), cwd=folder)
    shutil.rmtree(clone)
    (wheel,) = folder.glob("*.whl")
    return wheel


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
            "usage: embed.py --model TEXT --output TEXT [options]"
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
    assert run(*command, "embed", "--help", cwd=where).startswith(
        "usage: elmo embed --model TEXT --output TEXT [options]"
    )


def test_wheel_has_the_package_and_nothing_else(tmp_path):
    wheel = zipfile.ZipFile(build_wheel(Path(sys.executable), tmp_path))
    sources = {
        f"{target}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for file in (ROOT / folder).rglob("*.py")
    }
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name for name in found if name.endswith(".py")} == sources | {
        "modeling_elmo_cli.py",
        "modeling_elmo_spacy.py",
    }
    others = {name for name in found if not name.endswith(".py")}
    templates = {name for name in others if name.startswith("modeling_elmo/model_cards/")}
    plan = "modeling_elmo/run_scripts/fine_tuning/paper_plan.json"
    assert others == templates | {"modeling_elmo/py.typed", "modeling_elmo/published_checkpoints.tsv", plan}
    assert templates and not any(name.count("/") > 2 for name in templates), "checkpoints are no part of the wheel"
    assert f'version = "{modeling_elmo.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    metadata = {name.split(".dist-info/")[1]: wheel.read(name).decode() for name in set(wheel.namelist()) - found}
    assert set(metadata["top_level.txt"].split()) == {"modeling_elmo", "modeling_elmo_cli", "modeling_elmo_spacy"}
    assert metadata["entry_points.txt"].split("\n")[:2] == ["[console_scripts]", "elmo = modeling_elmo_cli:main"]
    assert "Apache License" in metadata["licenses/LICENSE"]
    assert "License-Expression: Apache-2.0" in metadata["METADATA"]
