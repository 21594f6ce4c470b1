"""Processes without access to the clone, for tests of installations."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path


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
