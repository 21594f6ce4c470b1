"""Word counts of a corpus, and the vocabulary file that is made from them."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tqdm.auto import tqdm

from modeling_elmo.run_scripts.pretraining.corpus import Corpus
from modeling_elmo.run_scripts.program.files import write_lines
from modeling_elmo.tokenization.elmo_characters import PAD_WORD, SPECIAL_WORDS
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter


def word_frequencies(corpus: Corpus, splitter: TextSplitter) -> tuple[int, Counter[str]]:
    """The number of texts, and the count of each word. Given words that do not fit in a line are left out."""
    counts: Counter[str] = Counter()
    num_texts = 0
    for text in tqdm(corpus.texts(), unit=" texts", unit_scale=True, desc="counting"):
        counts.update(splitter.words(text) if isinstance(text, str) else filter(fits_in_a_line, text))
        num_texts += 1
    return num_texts, counts


def check_vocabulary_size(size: int | None):
    """Refuses a size that leaves no room for words of the text."""
    if size is not None and size <= len(SPECIAL_WORDS):
        raise ValueError(f"--vocabulary_size {size}: pass more than the {len(SPECIAL_WORDS)} special words.")


def write_vocabulary(path: Path, words: Iterable[str]):
    """Writes a word per line, without `<PAD>`, whose id is always 0."""
    write_lines(path, (word for word in words if word != PAD_WORD))


def fits_in_a_line(word: str) -> bool:
    return bool(word) and word == word.strip() and "\n" not in word
