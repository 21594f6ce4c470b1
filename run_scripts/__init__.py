"""Command line programs, each run as `python -m modeling_elmo.run_scripts.NAME`."""

import sys
from pathlib import Path

# Python finds the folder of a program that runs by path before all packages, and `export`, `cards` and others of its
# names are names of packages, too. Spawned processes take sys.path from their parent.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]
