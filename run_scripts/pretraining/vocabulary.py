"""Word counts of a corpus, and the vocabulary file that is made from them."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tqdm.auto import tqdm

from modeling_elmo.run_scripts.pretraining.corpus import Corpus, words_of
from modeling_elmo.run_scripts.program.files import write_lines
from modeling_elmo.tokenization.elmo_characters import PAD_WORD, SPECIAL_WORDS, most_frequent_words
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter


def word_frequencies(corpus: Corpus, splitter: TextSplitter) -> tuple[int, Counter[str]]:
    """The number of texts, and the count of each word."""
    counts: Counter[str] = Counter()
    num_texts = 0
    for text in tqdm(corpus.texts(), unit=" texts", unit_scale=True, desc="counting"):
        counts.update(words_of(text, splitter.words))
        num_texts += 1
    return num_texts, counts


def check_vocabulary_size(size: int | None):
    """Refuses a size that leaves no room for words of the text."""
    if size is not None and size <= len(SPECIAL_WORDS):
        raise ValueError(f"--vocabulary_size {size}: pass more than the {len(SPECIAL_WORDS)} special words.")


def most_frequent_lines(counts: Counter[str], vocab_size: int | None, min_frequency: int = 1) -> list[str]:
    """`most_frequent_words` without given words that do not fit in a line of a vocabulary file."""
    fitting = {word: count for word, count in counts.items() if word and word == word.strip() and "\n" not in word}
    return most_frequent_words(fitting, vocab_size, min_frequency)


def write_vocabulary(path: Path, words: Iterable[str]):
    """Writes a word per line, without `<PAD>`, whose id is always 0."""
    write_lines(path, (word for word in words if word != PAD_WORD))
