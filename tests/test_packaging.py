"""One import name, however the package is reached: wheel, editable, strict editable, or a clone not installed at all.

Every installation gets its own virtual environment, which borrows the heavy dependencies from the running one; pip
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

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "modeling_elmo": "modeling_elmo",
    "tokenization": "modeling_elmo/tokenization",
    "run_scripts": "modeling_elmo/run_scripts",
}
NOT_SOURCE = (
    ".git",
    "demo_output",
    "*.safetensors",
    ".venv*",
    ".*_cache",
    ".hypothesis",
    "__pycache__",
    "build",
    "dist",
    "*.egg-info",
)
# What `-c` and `-m` find; both in one process, since importing torch and transformers takes seconds.
PROBE = """
import json, runpy, sys
import modeling_elmo, modeling_elmo.run_scripts, modeling_elmo.tokenization.tokenization_elmo as tokenization
from modeling_elmo.run_scripts.cards.card import TEMPLATES
assert (TEMPLATES / "card.md").read_text(encoding="utf-8").startswith("---")
names = [modeling_elmo.ELMoConfig, modeling_elmo.ELMoModel, modeling_elmo.ELMoTokenizer]
print(json.dumps({
    "files": [modeling_elmo.__file__, modeling_elmo.run_scripts.__file__, tokenization.__file__],
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
        """As a user would from the clone's root or from elsewhere, where an uninstalled clone must be on the path."""
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


def test_script_runs_by_path(installation):
    script = str(installation.clone / "run_scripts" / "embed.py")
    assert "usage: " in installation.run(script, "--help", where="elsewhere", found=True)


def test_wheel_holds_the_package_and_nothing_else(tmp_path):
    wheel = zipfile.ZipFile(build_wheel(Path(sys.executable), tmp_path))
    sources = {f"{target}/{file.name}" for folder, target in FOLDERS.items() for file in (ROOT / folder).glob("*.py")}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == sources | {"modeling_elmo/py.typed", "modeling_elmo/model_cards/template.md"}
    metadata = {name.split(".dist-info/")[1]: wheel.read(name).decode() for name in set(wheel.namelist()) - held}
    assert metadata["top_level.txt"].split() == ["modeling_elmo"]
    assert "Apache License" in metadata["licenses/LICENSE"]
    assert "License-Expression: Apache-2.0" in metadata["METADATA"]
