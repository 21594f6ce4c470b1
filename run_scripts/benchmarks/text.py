"""The text of a benchmark, and batches of its sentences."""

import random
import re
from itertools import islice
from pathlib import Path

from modeling_elmo.run_scripts.pretraining.corpus import words_of
from modeling_elmo.run_scripts.program.data_files import numbered_texts

FIXTURE_TEXT = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "text" / "en.txt"
SHORTEST_SENTENCE, MOST_SENTENCES = 3, 20_000


def read_sentences(path: str | None) -> list[list[str]]:
    """The sentences of a file with one sentence per line, split at spaces; of a short fixture if `path` is `None`."""
    if path is None and not FIXTURE_TEXT.is_file():
        raise ValueError(
            "An installed package measures a text of yours: pass --text_file, one sentence per line. A clone of the "
            "repository has a text, and AllenNLP as a peer."
        )
    texts = (text for _, text in numbered_texts(Path(path or FIXTURE_TEXT), "text"))
    words = map(words_of, texts)
    sentences = list(islice((each for each in words if len(each) >= SHORTEST_SENTENCE), MOST_SENTENCES))
    if not sentences:
        raise ValueError(
            f"--text_file {path} has no sentence of {SHORTEST_SENTENCE} words or more; pass a text file with one "
            "sentence per line."
        )
    return sentences


def draw_batch(sentences: list[list[str]], name: str, seed: int) -> list[list[str]]:
    """Draws the sentences of a batch ROWSxWORDS. If too few are short enough, longer ones are cut.

    At least one sentence has exactly WORDS words; with the ending `dense` all have.
    """
    parsed = re.fullmatch(r"([1-9]\d*)x(\d+)(dense)?", name)
    if not parsed or int(parsed[2]) < SHORTEST_SENTENCE:
        raise ValueError(
            f"{name!r} is not the name of a batch; pass ROWSxWORDS or ROWSxWORDSdense, with at least "
            f"{SHORTEST_SENTENCE} words."
        )
    rows, longest = int(parsed[1]), int(parsed[2])
    cut = [words[:longest] for words in sentences]
    full = [words for words in cut if len(words) == longest]
    uncut = [words for words in sentences if len(words) <= longest]
    pool = full if parsed[3] else uncut if len(uncut) >= rows else cut
    if not full or len(pool) < rows:
        raise ValueError(f"The text has too few sentences for the batch {name}; pass a longer text or smaller batches.")
    generator = random.Random(f"{seed} {name}")
    first = generator.choice([words for words in uncut if len(words) == longest] or full)
    return [first, *generator.sample(pool, rows - 1)]
