"""A table of uses: a row for each use, with its sentence, place, groups and coordinates, as TSV or Parquet."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modeling_elmo.conversion.files import staged

from ..cards.figures import principal_plane
from ..program.command_line import require
from .neighbors import WordUse

OWN_COLUMNS = (
    *("word", "group", "cluster", "x", "y", "form", "sentence", "position", "file", "line", "document"),
    "vector",
)
NAME_OF_TABLE = "table_"  # before the name of a column of the text that is one of ours

UseRow = dict[str, Any]


def use_rows(
    word: str, groups: Mapping[str, Sequence[WordUse]], vectors: np.ndarray, clusters: np.ndarray | None = None
) -> Iterator[UseRow]:
    """The rows of the uses of a word.

    `x` and `y` are coordinates in the plane of the first two principal components, as on the map. `position` is
    the place of the word in its sentence, from 1. The columns of its row in the text follow, with the text as
    `sentence`.

    Args:
        groups: the uses of each group; the name "" is left out.
        vectors: of the uses of all groups. Shape: `(uses, hidden_size)`.
        clusters: number of the cluster of each use. Shape: `(uses,)`.
    """
    points, _ = principal_plane(vectors)
    number = 0
    for group, uses in groups.items():
        for use in uses:
            row: UseRow = {"word": word}
            if group:
                row["group"] = group
            if clusters is not None:
                row["cluster"] = int(clusters[number])
            x, *y = points[number]
            row |= {"x": round(float(x), 6), "y": round(float(sum(y)), 6)}
            row |= {"form": use.words[use.position], "sentence": " ".join(use.words), "position": 1 + use.position}
            if use.place is not None:
                row |= {"file": use.place.file, "line": use.place.line}
                if use.place.document:
                    row["document"] = use.place.document
                row |= _table_columns(use.place.columns)
            yield row
            number += 1


def _table_columns(columns: Mapping[str, Any]) -> dict[str, str]:
    """The columns of the text as strings, under names that are not ours."""
    values = {}
    for name, value in columns.items():
        while name in OWN_COLUMNS or name in values:
            name = NAME_OF_TABLE + name
        values[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return values


def columns_of(rows: Sequence[UseRow]) -> list[str]:
    """All columns of the rows, ours first."""
    names = {}  # a dictionary keeps their order
    for row in rows:
        names |= dict.fromkeys(row)
    own = [name for name in OWN_COLUMNS if name in names]
    return own + [name for name in names if name not in own]


def write_use_table(path: Path, rows: Sequence[UseRow]):
    """Writes tab-separated values. Cells with a quote, a tab or a line feed are quoted, as pandas and R read them."""
    with staged(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns_of(rows), restval="", delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_use_vectors(path: Path, rows: Sequence[UseRow], vectors: np.ndarray):
    """Writes Parquet with the columns of the table, and `vector`.

    Shape:
        vectors: `(rows, hidden_size)`, float32.
    """
    require("pyarrow", extra="train", purpose="--save_vectors")
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in columns_of(rows)}
    flat = pyarrow.array(np.ascontiguousarray(vectors, dtype=np.float32).ravel())
    columns["vector"] = pyarrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
    with staged(path) as unfinished:
        parquet.write_table(pyarrow.table(columns), unfinished)
