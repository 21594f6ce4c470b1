"""Sentences of running text, whose lines end anywhere: paragraphs are joined, and split by the package sentencex."""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from modeling_elmo.heads.coreference_pipeline import split_sentences

from .command_line import require
from .data_files import FASTA_SUFFIXES, TEXT_READERS, format_suffix, numbered_texts
from .texts import numbered_lines

logger = logging.get_logger(__name__)

SPLIT_AT_ONCE = 20_000  # characters; a paragraph may be a whole file, of which no more is in memory
JUDGED_LINES, FEWEST_LINES = 1000, 10  # whether they are wrapped
NARROWEST, WIDEST = 40, 200  # characters of a wrapped line
FULL = 0.8  # of the width: the shortest line that is full
# At least so many wrapped lines are full, and at most so many end a sentence. Of texts with a sentence per line, 0.1 to
# 0.2 are as long, and 0.8 to 1.0 end one.
FULL_SHARE, END_SHARE = 0.45, 0.6
GOES_ON_SHARE = 0.3  # of the lines that begin with a letter: a small one; headlines and verses begin with a capital
SENTENCE_END = re.compile(r"[.!?…。！？؟।:;][\"'”’»)\]]*\Z")

NumberedText = tuple[int, Any]  # a line or row, and a text or a list of words
NumberedLine = tuple[int, str]


def text_sentences(path: Path, column: str, language: str | None) -> Iterator[NumberedText]:
    """The texts of `numbered_texts`; with a `language` their sentences, each with the line in which it begins."""
    texts = numbered_texts(path, column)
    return texts if language is None else sentences_of(texts, language, are_lines=has_running_text(path))


def has_running_text(path: Path) -> bool:
    """Whether each line is a text, so that a paragraph may continue in the next line."""
    return format_suffix(path) not in {*TEXT_READERS, *FASTA_SUFFIXES} - {".txt"}


def check_language(language: str | None):
    """Refuses what is not a language of `--split_sentences`, and says how to install the package."""
    if language is None:
        return
    if not re.fullmatch("[a-z]{2,3}", language):
        reason = "the value is the code of a language, such as en or de; other arguments go before the option"
        raise ValueError(f"--split_sentences {language}: {reason}.")
    require("sentencex", extra="coref", purpose="--split_sentences")


def warn_of_split_words(arguments: Any):
    """Warns if sentences of raw text are wanted, but words are separated by spaces only."""
    if arguments.split_sentences is not None and not arguments.raw_text:
        logger.warning(
            "--split_sentences without --raw_text splits words at spaces only, so that a period stays in its word. "
            "Pass --raw_text too, unless spaces separate all words."
        )


def sentences_of(texts: Iterable[NumberedText], language: str, are_lines: bool) -> Iterator[NumberedText]:
    """The sentences of texts, each with the number of the text in which it begins. Lists of words stay as they are.

    Args:
        language: code of a language, for its abbreviations.
        are_lines: whether a paragraph, which ends at a blank line, may continue in the next text.
    """
    paragraph: list[NumberedLine] = []
    size = 0
    for number, line in _lines_of(texts, are_lines):
        if isinstance(line, str) and line:
            paragraph.append((number, line))
            size += len(line)
        else:
            yield from _split(paragraph, language)
            paragraph, size = [], 0
        if not isinstance(line, str):
            yield number, line
        if size > SPLIT_AT_ONCE:
            sentences, paragraph = _split_beginning(paragraph, language)
            size = sum(len(line) for _, line in paragraph)
            yield from sentences
    yield from _split(paragraph, language)


def _lines_of(texts: Iterable[NumberedText], are_lines: bool) -> Iterator[NumberedText]:
    """The lines of texts, with an empty line at the end of each paragraph, and lists of words."""
    for number, text in texts:
        if isinstance(text, str):
            yield from ((number, line.strip()) for line in text.split("\n"))
        else:
            yield number, ""
            yield number, text
        if not are_lines:
            yield number, ""


def _split(paragraph: list[NumberedLine], language: str) -> list[NumberedLine]:
    return [sentence for sentence, _ in _sentences(paragraph, language)]


def _split_beginning(paragraph: list[NumberedLine], language: str) -> tuple[list[NumberedLine], list[NumberedLine]]:
    """The sentences of an unfinished paragraph except the last one, and the lines of the last one."""
    *others, (last, rest) = _sentences(paragraph, language)
    if not others:  # so long a text without an end is no sentence
        return [last], []
    return [sentence for sentence, _ in others], rest


def _sentences(paragraph: list[NumberedLine], language: str) -> Iterator[tuple[NumberedLine, list[NumberedLine]]]:
    """The sentences of a paragraph, each with the number of its first line, and the lines from its beginning on."""
    text = ""
    starts = []
    for _, line in paragraph:
        text += _between(text, line)
        starts.append(len(text))
        text += line
    for start, end in split_sentences(text, language):
        if sentence := text[start:end].strip():
            first = text.index(sentence[0], start)
            index = bisect_right(starts, first) - 1
            number, line = paragraph[index]
            yield (number, sentence), [(number, line[first - starts[index] :]), *paragraph[index + 1 :]]


def _between(text: str, line: str) -> str:
    """What joins a line to the text before it: a space, but nothing between signs of Chinese or Japanese."""
    signs = (text[-1:], line[0])
    are_wide = all(unicodedata.east_asian_width(sign) in "FW" for sign in signs if sign)
    are_hangul = all(unicodedata.name(sign, "").startswith("HANGUL") for sign in signs if sign)
    return "" if not text or (are_wide and not are_hangul) else " "


def warn_of_wrapped_lines(files: Iterable[Path | str]):
    """Warns if the lines of a text file, each of which is read as a sentence, seem to be wrapped."""
    for path in filter(has_running_text, map(Path, files)):
        lines = (line.strip() for _, line in islice(numbered_lines(path), JUDGED_LINES))
        if width := wrapped_width([line for line in lines if line]):
            logger.warning(
                f"{path}: the lines seem to be wrapped at {width} characters, but each line is read as a sentence. "
                "Pass --split_sentences to join the lines of a paragraph and to split it into sentences, unless each "
                "line is one."
            )
            return


def wrapped_width(lines: list[str]) -> int | None:
    """The width at which lines that are not blank were wrapped; `None` if they seem to be sentences."""
    if len(lines) < FEWEST_LINES:
        return None
    lengths = np.array([*map(len, lines)])
    width = int(np.quantile(lengths, 0.95))
    full_share = np.mean(lengths >= FULL * width)
    end_share = np.mean([bool(SENTENCE_END.search(line)) for line in lines])
    is_wrapped = NARROWEST <= width <= WIDEST and full_share >= FULL_SHARE and end_share < END_SHARE
    are_small = [line[0].islower() for line in lines if line[0].lower() != line[0].upper()]
    has_case = 2 * len(are_small) > len(lines)
    goes_on = not has_case or sum(are_small) >= GOES_ON_SHARE * len(are_small)
    return width if is_wrapped and goes_on else None
