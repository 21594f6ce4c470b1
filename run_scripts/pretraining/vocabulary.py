"""Word counts of a corpus, and the vocabulary file that is made from them."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tqdm.auto import tqdm

from modeling_elmo.run_scripts.pretraining.corpus import Corpus
from modeling_elmo.run_scripts.program.files import write_lines
from modeling_elmo.tokenization.elmo_characters import PAD_WORD
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter


def word_frequencies(corpus: Corpus, splitter: TextSplitter) -> tuple[int, Counter[str]]:
    """The number of texts, and the count of each word. Given words that do not fit in a line are left out."""
    counts: Counter[str] = Counter()
    with tqdm(unit=" texts", unit_scale=True, desc="counting") as progress:
        for _, text in corpus.sentences(shuffle_files=False):
            counts.update(splitter.words(text) if isinstance(text, str) else filter(fits_in_a_line, text))
            progress.update()
    return progress.n, counts


def write_vocabulary(path: Path, words: Iterable[str]):
    """Writes a word per line, without `<PAD>`, whose id is always 0."""
    write_lines(path, (word for word in words if word != PAD_WORD))


def fits_in_a_line(word: str) -> bool:
    return bool(word) and word == word.strip() and "\n" not in word
