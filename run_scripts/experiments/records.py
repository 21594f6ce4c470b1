"""The file of an experiment, `records.jsonl`: a line for each finished model, or one with the answer of a program.

If a plan runs the experiment, the first line says what it was begun with: `{"planned": {...}}`.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from modeling_elmo.run_scripts.cards.tables import RunRecord
from modeling_elmo.run_scripts.program.files import parse_json, write_lines

RECORDS = "records.jsonl"
PLAN_OUTPUT = "output.log"  # of the program of an experiment that a plan runs


def read_records(folder: Path) -> tuple[dict[str, Any] | None, list[RunRecord]]:
    """What a plan began the experiment with, and its results so far."""
    path = folder / RECORDS
    text = path.read_text(encoding="utf-8").removesuffix("\n") if path.is_file() else None
    texts = [] if text is None else text.split("\n")
    lines = [parse_json(line, f"{path}, line {number}") for number, line in enumerate(texts, 1)]
    planned = lines.pop(0)["planned"] if lines and "planned" in lines[0] else None
    return planned, lines


def write_records(folder: Path, planned: dict[str, Any] | None, results: Iterable[RunRecord]):
    """Replaces the file in one step: a kill leaves the old one or the new one."""
    first = [] if planned is None else [{"planned": planned}]
    write_lines(folder / RECORDS, (json.dumps(line, ensure_ascii=False) for line in [*first, *results]))


def add_records(folder: Path, records: Sequence[RunRecord]):
    """Adds the records of finished models in the order of the run. Those of other arms and seeds stay, after them."""
    planned, before = read_records(folder)
    arms_and_seeds = {(record["arm"], record["seed"]) for record in records}
    after = [*records, *(each for each in before if (each["arm"], each["seed"]) not in arms_and_seeds)]
    if after != before:
        write_records(folder, planned, after)


def results_of(folder: Path) -> Any:
    """What an experiment left: the records of its models, the answer of another program, or `None`."""
    _, results = read_records(folder)
    if not results:
        return None
    return results if "arm" in results[0] else results[0]


def different_settings(found: dict[str, Any], now: dict[str, Any], may_change: Iterable[str] = ()) -> str:
    """The settings that differ from those of now, as text: `name 1, now 2`. Empty if none does."""
    names = sorted({*found, *now} - {*may_change})
    return ", ".join(
        f"{name} {found.get(name)!r}, now {now.get(name)!r}" for name in names if found.get(name) != now.get(name)
    )
