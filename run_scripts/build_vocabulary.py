"""The word vocabulary of a language model: counts words over files or a data set, one word a line out.

    python -m modeling_elmo.run_scripts.build_vocabulary --inputs train/*.txt.gz --output vocab.txt --vocab_size 100000

The file has the original format: `<S>`, `</S>` and `<UNK>`, then words by descending frequency. Load it with
`ELMoTokenizer(vocab_file="vocab.txt")`, which puts `<PAD>` first. Texts are read one by one; memory grows with the
number of distinct words alone.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, starmap
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm
from transformers import HfArgumentParser

if __package__ in (None, ""):  # run by path from a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modeling_elmo.run_scripts.text_data import TextArguments, open_dataset, read_file
from modeling_elmo.tokenization.elmo_characters import PAD_WORD, SPECIAL_WORDS, most_frequent_words
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter


@dataclass(kw_only=True)
class VocabularyArguments(TextArguments):
    output: str = field(metadata={"help": "Vocabulary to write."})
    inputs: list[str] = field(
        default_factory=list,
        metadata={"help": "UTF-8 files: .txt, a text a line, or .jsonl, also .gz or .zst."},
    )
    pre_tokenization: Literal["whitespace", "moses", "treebank"] = field(
        default="whitespace", metadata={"help": "How texts are split; the tokenizer must do the same."}
    )
    vocab_size: int | None = field(
        default=None, metadata={"help": "Words to keep, the four special words included. Default: all."}
    )
    min_frequency: int = field(default=1, metadata={"help": "Occurrences that a word needs."})
    alphabet: Literal["utf8", "lexicon"] = field(
        default="utf8", metadata={"help": "What a word is made of, for the report on cut words: bytes or code points."}
    )
    max_word_length: int = field(
        default=50, metadata={"help": "The tokenizer's, for the report on cut words: begin and end are included."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace the output if it exists."})


@dataclass
class VocabularyReport:
    """What was counted; shares are of the words of the text as they stand there, not of distinct ones."""

    texts: int
    words: int
    distinct_words: int
    vocab_size: int
    coverage: float
    cut_share: float
    cut_distinct_words: int

    def __str__(self) -> str:
        return (
            f"{self.words:,} words in {self.texts:,} texts, {self.distinct_words:,} of them different\n"
            f"{self.vocab_size:,} in the vocabulary with the special words; it covers {self.coverage:.2%} of the text\n"
            f"{self.cut_share:.4%} of the text are words that are cut ({self.cut_distinct_words:,} different ones)"
        )


def main(arguments: list[str] | None = None) -> VocabularyReport:
    (parsed,) = HfArgumentParser(VocabularyArguments).parse_args_into_dataclasses(arguments)
    report = build_vocabulary(parsed)
    print(f"{parsed.output}\n{report}")
    return report


def build_vocabulary(arguments: VocabularyArguments) -> VocabularyReport:
    """What the command does."""
    output = Path(arguments.output)
    if output.exists() and not arguments.overwrite:
        raise FileExistsError(f"--output {output} exists; pass --overwrite to replace it.")
    if arguments.vocab_size is not None and arguments.vocab_size <= len(SPECIAL_WORDS):
        raise ValueError(f"--vocab_size {arguments.vocab_size}: pass more than the {len(SPECIAL_WORDS)} special words.")
    if arguments.min_frequency < 1 or arguments.max_word_length < 3:
        raise ValueError(
            f"--min_frequency {arguments.min_frequency} must be at least 1, "
            f"--max_word_length {arguments.max_word_length} at least 3."
        )
    num_texts, counts = count_words(open_texts(arguments), TextSplitter(arguments.pre_tokenization))
    if not counts:
        source = arguments.dataset or ", ".join(arguments.inputs)
        raise ValueError(f"{source}: the {num_texts} texts there hold no words.")
    words = most_frequent_words(counts, arguments.vocab_size, arguments.min_frequency)
    write_lines(output, (word for word in words if word != PAD_WORD))
    return report_on(num_texts, counts, words, arguments)


def count_words(texts: Iterable[str | Sequence[str]], splitter: TextSplitter) -> tuple[int, Counter[str]]:
    """The number of texts, and how often each word occurs in them."""
    counts: Counter[str] = Counter()
    with tqdm(unit=" texts", unit_scale=True, desc="counting") as progress:
        for text in texts:
            counts.update(splitter.words(text) if isinstance(text, str) else text)
            progress.update()
    return progress.n, counts


def report_on(
    num_texts: int, counts: Counter[str], words: list[str], arguments: VocabularyArguments
) -> VocabularyReport:
    room = arguments.max_word_length - 2

    def is_cut(word: str) -> bool:
        return len(word.encode("utf-8", "ignore") if arguments.alphabet == "utf8" else word) > room

    total = counts.total()
    cut = [word for word in counts if is_cut(word)]
    return VocabularyReport(
        texts=num_texts,
        words=total,
        distinct_words=len(counts),
        vocab_size=len(words),
        coverage=sum(counts[word] for word in words[len(SPECIAL_WORDS) :]) / total,
        cut_share=sum(counts[word] for word in cut) / total,
        cut_distinct_words=len(cut),
    )


def open_texts(arguments: VocabularyArguments) -> Iterator[str | Sequence[str]]:
    """Texts, or lists of words, one by one."""
    if bool(arguments.inputs) == (arguments.dataset is not None):
        raise ValueError("Pass either --inputs FILE ... or --dataset NAME.")
    if arguments.dataset is not None:
        return starmap(as_text, open_dataset(arguments)[0])
    missing = [path for path in arguments.inputs if not Path(path).is_file()]
    if missing:
        raise FileNotFoundError(f"--inputs: there is no file {', '.join(missing)}.")
    files = (read_file(Path(path), arguments.text_column) for path in arguments.inputs)
    return starmap(as_text, chain.from_iterable(files))


def as_text(where: str, value: Any) -> str | Sequence[str]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        # A line of the vocabulary can hold no other words.
        return [word for word in value if word and word == word.strip() and "\n" not in word]
    raise ValueError(f"{where}: the text is {value!r:.80}; it must be a string or a list of words.")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """All or nothing: what stood there stays until the new file is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
