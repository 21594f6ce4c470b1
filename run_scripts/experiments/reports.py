"""The file of an experiment, `records.jsonl`: a line for each finished model, or one with the answer of a program.

If a plan runs the experiment, the first line says what it was started with: `{"planned": {...}}`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..cards.records import RunRecord, RunRecords
from ..program.files import JsonObject, parse_json, write_lines

RECORDS = "records.jsonl"
PLAN_OUTPUT = "output.log"  # of the program of an experiment that a plan runs


def read_records(folder: Path) -> tuple[JsonObject | None, list[RunRecord]]:
    """What a plan began the experiment with, and its results so far."""
    path = folder / RECORDS
    if not path.is_file():
        return None, []
    text = path.read_text(encoding="utf-8").removesuffix("\n")
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        lines.append(parse_json(line, f"{path}, line {number}"))
    planned = None
    if "planned" in lines[0]:
        planned = lines.pop(0)["planned"]
    return planned, lines


def write_records(folder: Path, planned: JsonObject | None, results: Iterable[RunRecord]):
    """Replaces the file in one step: a kill leaves the old one or the new one."""
    lines = list(results)
    if planned is not None:
        lines.insert(0, {"planned": planned})
    write_lines(folder / RECORDS, [json.dumps(line, ensure_ascii=False) for line in lines])


def add_records(folder: Path, records: RunRecords):
    """Adds the records of finished models in the order of the run. Records of other arms and seeds stay, after them."""
    planned, before = read_records(folder)
    arms_and_seeds = {(record["arm"], record["seed"]) for record in records}
    others = [record for record in before if (record["arm"], record["seed"]) not in arms_and_seeds]
    after = [*records, *others]
    if after != before:
        write_records(folder, planned, after)


def results_of(folder: Path) -> Any:
    """What an experiment left: the records of its models, the answer of another program, or `None`."""
    _, results = read_records(folder)
    if not results:
        return None
    return results if "arm" in results[0] else results[0]
