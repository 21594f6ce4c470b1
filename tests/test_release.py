"""What is published: the files of sdist and wheel, one version everywhere, workflows that call what exists."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from clean_python import ROOT, build_sdist, build_wheel
from packaging.requirements import Requirement
from packaging.version import Version

import modeling_elmo

FOLDERS = ("modeling_elmo", "tokenization", "run_scripts")
MODULES = ("modeling_elmo_cli", "modeling_elmo_spacy")
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
WORKFLOWS = {path.name: path.read_text("utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def lowest_torch(package: str, extra: str) -> str:
    found = [each for each in map(Requirement, requires(package) or []) if each.name == "torch"]
    [wanted] = [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]
    return next(each.version for each in wanted.specifier if each.operator == ">=")


def test_the_lowest_torch_is_one_that_transformers_accepts_and_that_is_tested():
    [ours] = re.findall('"torch>=(.*?)"', PYPROJECT)
    assert Version(ours) >= Version(lowest_torch("transformers", extra="torch"))
    tested = yaml.safe_load(WORKFLOWS["checks.yml"])["jobs"]["torch"]["strategy"]["matrix"]["torch"]
    assert tested == [f"torch=={ours}.0", "torch"]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """An sdist and the wheel of it: those that `make release` has built in the folder RELEASE, or new ones."""
    if "RELEASE" in os.environ:
        folder = Path(os.environ["RELEASE"])
        ((sdist,), (wheel,)) = folder.glob("*.tar.gz"), folder.glob("*.whl")
        return sdist, wheel
    folder = tmp_path_factory.mktemp("distributions")
    sdist = build_sdist(Path(sys.executable), folder)
    return sdist, build_wheel(Path(sys.executable), folder, sdist)


def sources() -> dict[str, str]:
    """The package's files: the path in the clone, and the path in the wheel."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.parent.name != "peers"]
    files += (ROOT / "modeling_elmo" / name for name in ("py.typed", "conversion/published_checkpoints.tsv"))
    data = ("experiments/paper_plan.json", "cards/evaluation.html")
    files += [*(ROOT / "run_scripts" / name for name in data), *(ROOT / "model_cards").glob("*.md")]
    clone = [path.relative_to(ROOT).as_posix() for path in files]
    return {path: path if path.startswith("modeling_elmo/") else f"modeling_elmo/{path}" for path in clone}


def test_wheel_has_the_package_and_nothing_else(distributions):
    wheel = zipfile.ZipFile(distributions[1])
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == {*sources().values(), *(f"{name}.py" for name in MODULES)}, "checkpoints are no part of the wheel"
    metadata = {name.split(".dist-info/")[1]: wheel.read(name).decode() for name in set(wheel.namelist()) - found}
    assert set(metadata["top_level.txt"].split()) == {"modeling_elmo", *MODULES}
    assert metadata["entry_points.txt"].split("\n")[:2] == ["[console_scripts]", "elmo = modeling_elmo_cli:main"]
    assert "Apache License" in metadata["licenses/LICENSE"]
    assert "License-Expression: Apache-2.0" in metadata["METADATA"]


def test_sdist_has_the_sources_and_builds_the_same_wheel(distributions, tmp_path):
    sdist, wheel = distributions
    with tarfile.open(sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    documents = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "constraints.txt"}
    generated = {"PKG-INFO", "setup.cfg", *(name for name in found if name.startswith("modeling_elmo.egg-info/"))}
    assert found - generated == {*sources(), *documents, "pyproject.toml", "MANIFEST.in"}
    assert sdist.stat().st_size < 1_000_000 and wheel.stat().st_size < 1_000_000
    assert contents(wheel) == contents(build_wheel(Path(sys.executable), tmp_path))


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel by name, without those in which the builder names its own version."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith(("/WHEEL", "/RECORD"))}


def test_all_places_name_the_same_version():
    version = re.search(r'^version = "(.*)"$', PYPROJECT, re.MULTILINE)[1]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert modeling_elmo.__version__ == citation["version"] == version


def test_the_lowest_python_is_checked_and_named():
    lowest = re.search(r'^requires-python = ">=(.*)"$', PYPROJECT, re.MULTILINE)[1]
    pythons = yaml.safe_load(WORKFLOWS["checks.yml"])["jobs"]["linux"]["strategy"]["matrix"]["python"]
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    assert lowest == pythons[0] == named[0] and pythons[-1] == named[-1]


def test_all_folders_with_pinned_actions_are_updated():
    [updates] = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text("utf-8"))["updates"]
    assert (updates["package-ecosystem"], updates["directory"]) == ("github-actions", "/")  # all of .github/workflows


BINARY = (".safetensors", ".hdf5", ".pkl", ".gz", ".zip", ".png", ".index", ".data-00000-of-00001")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is not a clone")
def test_git_changes_no_byte_of_a_file():
    """Windows gets the same line ends, and weights are not text; `eolinfo` describes the index and the disk."""
    command = ["git", "ls-files", "--eol"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    for info, name in (line.split("\t") for line in listed):
        index, disk, attributes = info.split(maxsplit=2)
        if name.endswith(BINARY):
            assert attributes.strip() == "attr/-text", name
        else:
            assert attributes.strip() == "attr/text=auto eol=lf", name
            assert (index, disk) in {("i/lf", "w/lf"), ("i/none", "w/none")}, name
    assert len(listed) > 500


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_is_pinned_and_has_least_permissions(name):
    actions = re.findall(r"uses: (.*)", WORKFLOWS[name])
    assert actions and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", action) for action in actions)
    workflow = yaml.safe_load(WORKFLOWS[name])
    assert workflow["permissions"] == {"contents": "read"} and "concurrency" in workflow
    assert "secrets." not in WORKFLOWS[name]
    allowed = {job: facts["permissions"] for job, facts in workflow["jobs"].items() if "permissions" in facts}
    assert allowed == ({"publish": {"id-token": "write"}} if name == "release.yml" else {})
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_calls_what_exists(name):
    steps = [step for job in yaml.safe_load(WORKFLOWS[name])["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert {*re.findall(r"\bmake ([\w-]+)", commands)} <= {*targets}
    files = re.findall(r"\.ci/\w+|tests/[\w*]+\.py|\w+\.(?:txt|toml|md)\b", commands)
    assert files and all([*ROOT.glob(file)] for file in files), files
