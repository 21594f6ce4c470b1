"""Counts the words of files or of a data set, and writes the word vocabulary of a language model.

    elmo vocabulary --train_file 'train/*.gz' --output vocab.txt

The file has the original format: `<S>`, `</S>` and `<UNK>`, then words by descending frequency, one per line. Load it
with `ELMoTokenizer(vocab_file="vocab.txt")`, which puts `<PAD>` first, or pass it to `elmo pretrain --vocabulary_file`.
Texts are read one at a time, so memory grows only with the number of distinct words.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from modeling_elmo.run_scripts.pretraining.corpus import (
    Corpus,
    TrainTextArguments,
    check_vocabulary_size,
    most_frequent_lines,
    write_vocabulary,
)
from modeling_elmo.run_scripts.pretraining.counting import count_words, word_length
from modeling_elmo.run_scripts.program.command_line import ProgramParser, given_options, option, print_conclusion, run
from modeling_elmo.run_scripts.program.files import check_output
from modeling_elmo.tokenization.elmo_characters import SPECIAL_WORDS
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter


@dataclass(kw_only=True)
class VocabularyArguments(TrainTextArguments):
    output: str = option(..., "Vocabulary file to write.")
    pre_tokenization: Literal["whitespace", "moses", "treebank"] = option(
        "moses", "Rules by which the tokenizer splits raw text."
    )
    vocabulary_size: int | None = option(None, "Number of words to keep, with four special words. Default: all.")
    min_frequency: int = option(1, "Minimum count of a word.")
    alphabet: Literal["utf8", "lexicon"] = option("utf8", "Alphabet of the tokenizer, to report cut words.")
    max_word_length: int = option(50, "Maximum word length of the tokenizer, with begin and end, to report cut words.")
    overwrite: bool = option(False, "Replace the output if it exists.")


# The others, which say how the text is read, are also options of `elmo pretrain`.
OPTIONS_OF_VOCABULARY = ("output", "vocabulary_size", "min_frequency", "alphabet", "max_word_length", "overwrite")

# Shares are of all words of the text, not of distinct words.
REPORT = """\
{words:,} words in {texts:,} texts, {distinct_words:,} distinct words
{vocab_size:,} in the vocabulary with special words, which covers {coverage:.2%} of the text
{cut_share:.4%} of the words of the text are cut ({cut_distinct_words:,} distinct words)"""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Returns the figures of the report."""
    parsed = ProgramParser(VocabularyArguments, description=__doc__).parse(arguments)
    output = Path(parsed.output)
    check_output(output)
    if output.is_file() and not parsed.overwrite:
        raise FileExistsError(f"--output {output} exists; pass --overwrite to replace it.")
    check_vocabulary_size(parsed.vocabulary_size)
    corpus = Corpus.from_arguments(parsed)
    splitter = TextSplitter("whitespace" if parsed.is_split_into_words else parsed.pre_tokenization)
    stored = output.with_name(f"{output.name}.counts.json.gz")
    counted = count_words(corpus, splitter, stored=stored)
    counted.warn_of_rules(corpus, parsed.pre_tokenization)
    counts = counted.words
    if not counts:
        raise ValueError(f"There is no word in {corpus}. Pass another text.")
    words = most_frequent_lines(counts, parsed.vocabulary_size, parsed.min_frequency)
    write_vocabulary(output, words)
    total = counts.total()
    cut = [word for word in counts if word_length(word, parsed.alphabet) > parsed.max_word_length - 2]
    report = {
        "texts": counted.lines,
        "words": total,
        "distinct_words": len(counts),
        "vocab_size": len(words),
        "coverage": sum(counts[word] for word in words[len(SPECIAL_WORDS) :]) / total,
        "cut_share": sum(counts[word] for word in cut) / total,
        "cut_distinct_words": len(cut),
    }
    print(output, REPORT.format(**report), sep="\n")
    of_text = given_options(parsed, but=OPTIONS_OF_VOCABULARY)
    print_conclusion(
        f"A biLM with this vocabulary learns {1 - report['coverage']:.2%} of the words as <UNK>.",
        *("elmo", "pretrain", "--vocabulary_file", output, *of_text, "--output_dir", "bilm"),
    )
    return report


if __name__ == "__main__":
    run(main)
