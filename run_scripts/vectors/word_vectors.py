"""Pretrained word vectors from text files.

The files may come from GloVe (a word and its numbers in each line), word2vec or fastText (a header with the number of
words and the width), plain or compressed (`.gz`, `.zst`).
"""

import re
from array import array
from collections.abc import Iterator
from itertools import chain, islice
from math import isfinite
from pathlib import Path
from statistics import mode
from typing import NamedTuple

import numpy as np
from tqdm.auto import tqdm
from transformers.utils import logging

from ..program.data_files import number_in
from ..program.texts import numbered_lines

logger = logging.get_logger(__name__)

LINES_FOR_WIDTH = 100  # without a header, the width is the most frequent one in these first lines


class WordVectors(NamedTuple):
    words: list[str]
    vectors: np.ndarray  # (words, width), float32


def read_word_vectors(path: str | Path, limit: int | None = None) -> WordVectors:
    """Reads words, which may contain spaces, and their vectors.

    Published files repeat some words: the first vector is kept, and a warning names the first word with another one.

    Args:
        limit: maximum number of words, from the start of the file; None for all.
    """
    width, count, lines = _width_and_lines(Path(path))
    total = min(filter(None, (count, limit)), default=None)
    rows = {}
    numbers = array("f")  # an array takes 4 or 8 bytes per number, a list 32
    first_lines = array("L")
    twice = 0  # lines with a word of an earlier line
    others = []  # of these, the lines with another vector
    bar = tqdm(lines, desc=Path(path).name, total=total, unit=" words", unit_scale=True)
    for number, line in bar:
        word, vector = _word_and_vector(line, width, f"{path}, line {number}")
        if word in rows:
            twice += 1
            row = rows[word]
            if numbers[row * width : (row + 1) * width] != vector:
                others.append(f"{word!r:.60} in lines {first_lines[row]:,} and {number:,}")
            continue
        rows[word] = len(rows)
        numbers.extend(vector)
        first_lines.append(number)
        if len(rows) == limit:
            break
    read = len(rows) + twice
    if count not in (None, read) and len(rows) != limit:
        raise ValueError(
            f"{path} has {read} words, but its header promises {count}. Pass the complete file, or correct its header."
        )
    if others:
        logger.warning(
            f"{path}: {len(others):,} lines repeat an earlier word and are ignored, although their vector is another: "
            f"first {others[0]}."
        )
    vectors = np.frombuffer(numbers, np.float32)
    return WordVectors(list(rows), vectors.reshape(len(rows), width))


def _width_and_lines(path: Path) -> tuple[int, int | None, Iterator[tuple[int, str]]]:
    """The width, the number of words if a header gives it, and the numbered lines of the words."""
    lines = (numbered for numbered in numbered_lines(path, keeps_marks=True) if numbered[1].strip(" "))
    start = list(islice(lines, LINES_FOR_WIDTH))
    widths = [line.rstrip(" ").count(" ") for _, line in start]
    width = mode(widths or [0])
    width_below = mode(widths[1:] or [0])
    count = None
    header = re.fullmatch(r"(\d{1,15}) +(\d{1,15})\s*", start[0][1]) if start else None
    if header and (width_below != 1 or header[2] == "1"):  # words may be numbers, with a vector of width 1
        count, width = map(int, header.groups())
        del start[0]
    if width < 1:
        raise ValueError(f"{path} has no vectors; pass a file with a word and its numbers in each line, with spaces.")
    return width, count, chain(start, lines)


def _word_and_vector(line: str, width: int, location: str) -> tuple[str, array]:
    word, *fields = line.rstrip(" ").rsplit(" ", width)
    extra = word.split(" ")[1:]
    # "Route 66" is a word with a space; "Route 0.5" is a word with a number too many.
    has_extra_numbers = all(map(is_number, extra)) and not all(map(str.isdecimal, extra))
    try:
        vector = array("f", map(float, fields))
    except ValueError:
        vector = array("f")
    if not word or has_extra_numbers or len(vector) != width or not isfinite(sum(vector)):
        raise ValueError(
            f"{location} must have a word and {width} finite numbers, with single spaces: {line!r:.80}. Correct or "
            "remove it."
        )
    return word, vector


def is_number(text: str) -> bool:
    return isfinite(number_in(text))
