"""Processes without access to the clone, and distributions built from it, for tests of installations."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_SOURCE = (".*", "demo_output", "*.safetensors", "__pycache__", "build", "dist", "*.egg-info")


def run(python: Path | str, *arguments: str, cwd: Path, **environment: str) -> str:
    """Standard output of a Python or another program, run without the caller's `PYTHON*` variables."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [str(python), *arguments]
    finished = subprocess.run(command, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def new_environment(folder: Path) -> Path:
    """A new Python that borrows the packages of the running one, except those found through `.pth` files."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    site_packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(site_packages, "borrowed.pth").write_text("\n".join(sorted(borrowed)))
    return python


def copy_of_the_clone(folder: Path) -> Path:
    return shutil.copytree(ROOT, folder / "clone", ignore=shutil.ignore_patterns(*NOT_SOURCE))


def pip(python: Path, *arguments: str, cwd: Path) -> None:
    offline = ("--no-index", "--no-deps", "--no-build-isolation")
    run(python, "-m", "pip", "--disable-pip-version-check", *arguments, *offline, cwd=cwd)


def build_wheel(python: Path, folder: Path, source: Path | None = None) -> Path:
    """The wheel of an sdist, or of a copy of the clone."""
    clone = source or copy_of_the_clone(folder)
    pip(python, "wheel", "--wheel-dir", str(folder), str(clone), cwd=folder)
    if source is None:
        shutil.rmtree(clone)
    (wheel,) = folder.glob("*.whl")
    return wheel


def build_sdist(python: Path, folder: Path) -> Path:
    clone = copy_of_the_clone(folder)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    run(python, "-c", build, cwd=clone)
    shutil.rmtree(clone)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist
