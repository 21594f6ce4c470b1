"""The text of a benchmark, batches of its sentences, and the speed of tokenizers on it.

Our tokenizer and transformers' `BertTokenizer` turn raw text into padded tensors.
"""

import math
import random
import re
import string
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType

from transformers import BertTokenizer

from modeling_elmo import ELMoTokenizer

from ..pretraining.counting import words_of
from ..program.data_files import numbered_texts
from .timing import Contest, Implementation, Outputs

FIXTURE_TEXT = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "text" / "en.txt"
SHORTEST_SENTENCE, MOST_SENTENCES = 3, 20_000
MOST_TEXTS, TEXTS_PER_BATCH = 10_000, 1000
MADE_UP_WORDS, MOST_MADE_UP = 70_000, 100  # spellings, and words of a sentence


def read_sentences(path: str | None) -> list[list[str]]:
    """The sentences of a file with one sentence per line, split at spaces; of a short fixture if `path` is `None`."""
    if path is None and not FIXTURE_TEXT.is_file():
        raise ValueError("Only a clone of the repository has a text; pass --text_file, one sentence per line.")
    sentences = []
    for _, text in numbered_texts(Path(path or FIXTURE_TEXT), "text"):
        words = words_of(text)
        if len(words) >= SHORTEST_SENTENCE:
            sentences.append(words)
        if len(sentences) == MOST_SENTENCES:
            break
    if not sentences:
        raise ValueError(f"--text_file {path} has no line of {SHORTEST_SENTENCE} words or more; pass another text.")
    return sentences


def draw_batch(sentences: list[list[str]], name: str, seed: int) -> list[list[str]]:
    """Draws the sentences of a batch ROWSxWORDS. If too few are short enough, longer ones are cut.

    At least one sentence has exactly WORDS words; with the ending `dense` all have. `63x5+1x400` is two batches in one.
    """
    part, plus, rest = name.partition("+")
    if plus:
        return draw_batch(sentences, part, seed) + draw_batch(sentences, rest, seed)
    parsed = re.fullmatch(r"([1-9]\d*)x(\d+)(dense)?", name)
    if not parsed or int(parsed[2]) < SHORTEST_SENTENCE:
        raise ValueError(f"{name!r} is not a batch; pass ROWSxWORDS, with {SHORTEST_SENTENCE} words or more.")
    rows = int(parsed[1])
    longest = int(parsed[2])
    cut = [words[:longest] for words in sentences]
    full = [words for words in cut if len(words) == longest]
    uncut = [words for words in sentences if len(words) <= longest]
    full_uncut = [words for words in uncut if len(words) == longest]
    pool = uncut if len(uncut) >= rows else cut
    if parsed[3]:
        pool = full
    if not full or len(pool) < rows:
        raise ValueError(f"The text has too few sentences for the batch {name}; pass a longer text or smaller batches.")
    generator = random.Random(f"{seed} {name}")
    first = generator.choice(full_uncut or full)
    others = generator.sample(pool, rows - 1)
    return [first, *others]


def made_up_sentences(words: int) -> list[list[str]]:
    """Sentences with about `words` words by Zipf's law: as many distinct ones as in English, rare ones longer.

    What is computed depends on the number of distinct words and on the lengths of sentences, but not on the words.
    """
    generator = random.Random(0)
    spellings = []
    for rank in range(1, MADE_UP_WORDS + 1):
        length = max(1, round(generator.gauss(1.5 + math.log2(rank) / 2, 1.5)))
        spellings.append("".join(generator.choices(string.ascii_lowercase, k=length)) + f"{rank:x}"[-2:])
    weights = list(accumulate(1 / (rank + 2.7) for rank in range(MADE_UP_WORDS)))  # Mandelbrot's 2.7
    sentences = []
    left = words
    while left > 0:
        length = min(MOST_MADE_UP, max(SHORTEST_SENTENCE, round(generator.gammavariate(4, 6))))  # 24 on average
        sentences.append(generator.choices(spellings, cum_weights=weights, k=length))
        left -= length
    return sentences


def tokenizer_contests(sentences: list[list[str]], checkout: ModuleType | None) -> Iterator[Contest]:
    """A contest for each pre-tokenization. One pass before the rounds fills the caches of our tokenizer."""
    texts = list(map(" ".join, sentences[:MOST_TEXTS]))
    number_of_words = sum(len(text.split()) for text in texts)
    batches = [texts[start : start + TEXTS_PER_BATCH] for start in range(0, len(texts), TEXTS_PER_BATCH)]
    bert = partial(tokenize_batches, bert_tokenizer(texts), batches)
    for name in ("whitespace", "moses", "treebank"):
        tokenizer = ELMoTokenizer(pre_tokenization=name)
        ours = partial(tokenize_batches, tokenizer, batches)
        implementations = [Implementation("this package", ours)]
        if checkout is not None:
            tokenizer = checkout.ELMoTokenizer(pre_tokenization=name)
            other = partial(tokenize_batches, tokenizer, batches)
            implementations.append(Implementation("other checkout", other, expected=ours()))
        implementations.append(Implementation("BertTokenizer", bert))
        yield Contest("tokenizer", f"{name}, {len(texts)} texts", number_of_words, "words", implementations)


def tokenize_batches(tokenizer: Callable, batches: list[list[str]]) -> Outputs:
    """Tokenizes all batches; returns the tensors of the last one."""
    for batch in batches:
        encoding = tokenizer(batch, padding=True, return_tensors="pt")
    return dict(encoding)


def bert_tokenizer(texts: list[str]) -> BertTokenizer:
    """Its vocabulary has all words of the texts, so that nearly every word is one piece: its fastest case."""
    words = set(re.findall(r"\w+|[^\w\s]", "\n".join(texts)))
    characters = sorted(set("".join(words)))
    continued = [f"##{character}" for character in characters]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *continued, *sorted(words)]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return BertTokenizer(vocab=vocab, do_lower_case=False)
