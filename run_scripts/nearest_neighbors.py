"""Finds the uses of a word that are most alike: the paper's Table 4, with a map of all uses.

    elmo neighbors heldout.txt --word play --model elmo

A few uses are drawn at random (`--seed`). Each is shown with its nearest uses in other sentences, by cosine.
`--word_vectors glove.txt` also shows the nearest words by vectors without a context.
`--output neighbors.json` writes the table, and a map as a .png next to it.

`--group_by` asks how the use differs between periods, genres or authors:

    elmo neighbors speeches.tsv --word energy --model elmo --group_by year --bin_width 10 --output energy.json

The text is a table with a column `text` and a column of groups; `--group_by file` makes a group of each file, and
`--group_by folder` of the files of each folder. For each pair of groups, the average pairwise distance of their uses
(APD) and the distance of their mean vectors (PRT) are compared with random splits of the same uses. `p` is too small if
many uses of a group are from the same document.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from modeling_elmo.run_scripts.cards.figures import draw_change, draw_map
from modeling_elmo.run_scripts.pretraining.corpus import Corpus
from modeling_elmo.run_scripts.pretraining.counting import SentenceText, words_of
from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, refuse_unread, run
from modeling_elmo.run_scripts.program.data_files import ROW_READERS, LocatedRow, format_suffix
from modeling_elmo.run_scripts.program.files import check_output, write_json
from modeling_elmo.run_scripts.program.sentences import sentences_of, text_sentences, warn_of_split_words
from modeling_elmo.run_scripts.program.texts import RunningTextArguments
from modeling_elmo.run_scripts.vectors.embedding import load_model_and_tokenizer
from modeling_elmo.run_scripts.vectors.layer_sources import text_name
from modeling_elmo.run_scripts.vectors.lines import to_line
from modeling_elmo.run_scripts.vectors.neighbors import (
    WordUse,
    check_layer,
    find_uses,
    format_neighbors,
    nearest_uses,
    normalize,
    sample_uses,
    use_vectors,
)
from modeling_elmo.run_scripts.vectors.usage_change import (
    compare_groups,
    distance_within,
    format_change,
    order_groups,
    shown_pairs,
    typical_uses,
)
from modeling_elmo.run_scripts.vectors.word_vectors import read_word_vectors

logger = logging.get_logger(__name__)

GROUP_BY_FILE, GROUP_BY_FOLDER = "file", "folder"
MOST_GROUPS = 50  # without a warning
Split = Callable[[str], list[str]]  # of a text into words
SHOWN_WORDS = 10  # nearest by word vectors, as in Table 4
LEAST_USES = 2  # of a group: one has no distance within


@dataclass(kw_only=True)
class NeighborArguments(RunningTextArguments):
    word: str = option(
        ..., "Word, or a regular expression for several forms: 'plays?|played'. Case counts; '(?i)play' finds Play too."
    )
    model: str = option(..., "Folder or Hub name of an ELMo model.")
    word_vectors: str | None = option(None, "Text file of word vectors, to show the nearest words without context.")
    layer: str = option("top", "Layer: top, average, mixed, or a number (0 is the token layer).")
    queries: int = option(4, "Number of uses to show with their neighbors.")
    top_k: int = option(2, "Number of neighbors per use, or of typical uses per group.")
    max_uses: int = option(2000, "Maximum number of uses to compare, in all or per group; drawn at random.")
    seed: int = option(0, "Seed of the drawn uses.")
    raw_text: bool = option(False, "Split lines with the model's tokenizer. Default: at spaces.")
    output: str | None = option(None, "JSON file for the table; the picture is a .png next to it.")
    device: str | None = option(None, "Device. Default: cuda if available, else cpu.")
    trust_remote_code: bool = option(False, "Run code from the model's folder.")

    def __post_init__(self):
        if self.max_uses <= self.top_k:
            raise ValueError(f"--max_uses {self.max_uses}: pass more than --top_k {self.top_k}.")
        check_output(self.output, ".json")
        try:
            re.compile(self.word)
        except re.error as error:
            reason = f"--word {self.word} is not a regular expression ({error})"
            raise ValueError(f"{reason}; put \\ before signs such as . ( *") from None


@dataclass(kw_only=True)
class GroupArguments:
    _argument_group_name = "options of groups"

    group_by: str | None = option(
        None, "Column of tables with the group, such as year; file or folder: each is a group."
    )
    text_column: str = option("text", "Column of tables, or key of .jsonl, with the text or the list of its words.")
    bin_width: float | None = option(None, "Width of the bins of numeric groups: 10 makes decades of years.")
    min_uses: int = option(10, "Minimum uses of a group; smaller groups are left out.")
    permutations: int = option(1000, "Number of random splits for each pair of groups.")

    def __post_init__(self):
        if self.min_uses < LEAST_USES:
            raise ValueError(f"--min_uses {self.min_uses}: pass at least {LEAST_USES}.")
        if self.group_by is None:
            refuse_unread(self, ("bin_width", "min_uses", "permutations"), "without --group_by; leave it out.")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = ProgramParser(NeighborArguments, GroupArguments, description=__doc__)
    parser.add_argument("text", nargs="+", help="Text files, folders or patterns, one sentence per line; or tables.")
    parsed, groups, positional = parser.parse(arguments)
    if groups.group_by:
        refuse_unread(parsed, ["word_vectors", "queries"], "with --group_by, which shows --top_k uses per group.")
    warn_of_split_words(parsed)
    model, tokenizer = load_model_and_tokenizer(parsed.model, parsed.device, parsed.trust_remote_code)
    check_layer(parsed.layer, model.config.num_hidden_layers)
    split = tokenizer.splitter.words if parsed.raw_text else str.split
    if groups.group_by:
        return find_change(parsed, groups, positional.text, model, tokenizer, split)
    texts = Corpus.from_files(positional.text, groups.text_column, parsed.split_sentences).texts()
    words = (words_of(text, split) for text in texts)
    (all_uses,) = uses_in_case({"text": words}, parsed.word).values()
    if len(all_uses) <= parsed.top_k:
        counted = f"The text has {len(all_uses)} use(s) of {parsed.word!r}, too few for --top_k {parsed.top_k}"
        raise ValueError(f"{counted}. Pass more text, another --word, or a smaller --top_k.")
    if parsed.word_vectors is not None:
        nearest_words = words_in_file(parsed.word_vectors, parsed.word)
    uses, queries = sample_uses(all_uses, parsed.max_uses, parsed.queries, parsed.seed)
    vectors = normalize(use_vectors(uses, model, tokenizer, parsed.layer))
    result = {
        "word": parsed.word,
        "layer": parsed.layer,
        "text": [Path(name).name for name in positional.text],
        "uses": len(uses),
        "uses_in_text": len(all_uses),
        "seed": parsed.seed,
    }
    if parsed.word_vectors is not None:
        result["word_vectors"] = nearest_words
    result["queries"] = []
    colored = {}  # on the map
    for query in queries:
        use = str(uses[query])
        neighbors = nearest_uses(vectors, uses, query, parsed.top_k)
        shown = [[round(cosine, 3), str(uses[near])] for near, cosine in neighbors]
        result["queries"].append({"use": use, "neighbors": shown})
        colored[use] = [query, *(near for near, _ in neighbors)]
    print(format_neighbors(result))
    if parsed.output:
        output = Path(parsed.output)
        write_json(output, result)
        draw_map(vectors, colored, output.with_suffix(".png"))
    return result


def uses_in_case(groups: Mapping[str, Iterable[Sequence[str]]], word: str) -> dict[str, list[WordUse]]:
    """The uses of a word in the sentences of each group; a warning tells how many are in another case."""
    pattern = re.compile(word)
    in_any_case = re.compile(word, re.IGNORECASE)
    uses = {}
    number = 0
    left_out = 0
    for name, sentences in groups.items():
        all_uses = list(find_uses(sentences, in_any_case))
        uses[name] = [use for use in all_uses if pattern.fullmatch(use.words[use.position])]
        number += len(uses[name])
        left_out += len(all_uses) - len(uses[name])
    if left_out:
        logger.warning(
            f"--word {word}: {left_out:,} uses in another case are left out, and {number:,} are found. Pass "
            f"'(?i){word}' for all of them."
        )
    return uses


def find_change(
    parsed: NeighborArguments, groups: GroupArguments, files: list[str], model, tokenizer, split: Split
) -> dict[str, Any]:
    """Compares the uses of the word in groups of texts."""
    all_uses, is_ordered = grouped_uses(parsed, groups, files, split)
    uses = {}
    left_out = {}
    for name, uses_of_group in all_uses.items():
        count = len(uses_of_group)
        if count >= groups.min_uses:
            uses[name], _ = sample_uses(uses_of_group, parsed.max_uses, 0, parsed.seed)
        elif count:
            left_out[name] = count
    if len(uses) < 2:
        counts = ", ".join(f"{name} {len(uses_of_group)}" for name, uses_of_group in all_uses.items()) or "none"
        raise ValueError(
            f"--group_by {groups.group_by} needs two groups with --min_uses {groups.min_uses} of {parsed.word!r}; "
            f"found: {counts}. Pass more text, or larger groups."
        )
    together = use_vectors(list(chain.from_iterable(uses.values())), model, tokenizer, parsed.layer)
    *ends, _ = accumulate(map(len, uses.values()))
    vectors = dict(zip(uses, np.split(together, ends), strict=True))
    descriptions = []
    for name, compared in uses.items():
        description = {
            "name": name,
            "uses": len(compared),
            "uses_in_text": len(all_uses[name]),
            "distance_within": round(distance_within(vectors[name]), 6),
            "typical_uses": [str(compared[row]) for row in typical_uses(vectors, name, parsed.top_k)],
        }
        descriptions.append(description)
    result: dict[str, Any] = {
        "word": parsed.word,
        "layer": parsed.layer,
        "text": [Path(name).name for name in files],
        "group_by": groups.group_by,
        "bin_width": groups.bin_width,
        "ordered": is_ordered,
        "min_uses": groups.min_uses,
        "seed": parsed.seed,
        "permutations": groups.permutations,
        "groups": descriptions,
        "left_out": left_out,
        "pairs": compare_groups(vectors, groups.permutations, parsed.seed),
    }
    print(format_change(result))
    if parsed.output:
        output = Path(parsed.output)
        write_json(output, result)
        draw_change(shown_pairs(result), is_ordered, vectors, output.with_suffix(".png"))
    return result


def grouped_uses(
    parsed: NeighborArguments, groups: GroupArguments, files: list[str], split: Split
) -> tuple[dict[str, list[WordUse]], bool]:
    """The uses in each group, in the order of the groups, and whether they have the order of numbers."""
    pattern = re.compile(parsed.word, re.IGNORECASE)
    sentences = defaultdict(list)
    group_by = str(groups.group_by)
    for name, text in grouped_sentences(files, group_by, groups.text_column, parsed.split_sentences):
        words = words_of(text, split)
        has_word = any(map(pattern.fullmatch, words))
        sentences[name] += [words] if has_word else []
    names, is_ordered = order_groups(sentences, groups.bin_width)
    members = defaultdict(list)
    for name, group in names.items():
        members[group] += sentences[name]
    if len(members) > MOST_GROUPS:
        logger.warning(
            f"--group_by {group_by} makes {len(members):,} groups. Those with fewer uses than --min_uses are left out, "
            "and each pair of the others is compared. For fewer groups, pass --group_by folder if each file is one, or "
            "a --bin_width if they are numbers."
        )
    return uses_in_case(members, parsed.word), is_ordered


def grouped_sentences(
    patterns: list[str], group_by: str, text_column: str, language: str | None = None
) -> Iterator[tuple[str, SentenceText]]:
    """Each sentence with the name of its group: the value of a column, or the name of the file or of its folder."""
    files = list(map(Path, Corpus.from_files(patterns, text_column, language).files))
    names = different_names(files, [text_name(str(path)) for path in files])
    folders = different_names([path.parent for path in files], [path.resolve().parent.name for path in files])
    for path, name, folder in zip(files, names, folders, strict=True):
        for location, columns in located_rows(path, text_column, language):
            row = {GROUP_BY_FILE: name, GROUP_BY_FOLDER: folder, **columns}
            for flag, column in (("--text_column", text_column), ("--group_by", group_by)):
                if column not in row:
                    raise ValueError(f"{location} has no column {column!r} but {list(columns)}; pass {flag} NAME.")
            group = row[group_by]
            if not isinstance(group, (str, int, float)) or not str(group).strip():
                raise ValueError(f"{location}: the group {group_by!r} is {group!r}; pass a name or a number.")
            text = row[text_column]
            parts = text.split("\n") if isinstance(text, str) else [text]
            if language is not None:
                parts = [part for _, part in sentences_of([(0, text)], language, are_lines=False)]
            for part in parts:
                yield str(group).strip(), to_line(str(location), part, is_raw_text=True, unit="word").sentence


def different_names(paths: list[Path], names: list[str]) -> list[str]:
    """The names of paths; the paths themselves where two different paths have the same name."""
    is_clear = len({*names}) == len({*paths})
    return names if is_clear else list(map(str, paths))


def located_rows(path: Path, text_column: str, language: str | None) -> Iterator[LocatedRow]:
    """The rows of a table. The texts of other files are rows of one column."""
    if format_suffix(path) in ROW_READERS:
        return ROW_READERS[format_suffix(path)](path)
    texts = text_sentences(path, text_column, language)
    return ((f"{path}, line {number}", {text_column: text}) for number, text in texts)


def words_in_file(file: str, word: str) -> list[tuple[str, float]]:
    """The first word of a file that fits a regular expression, with cosine 1, and its nearest words with theirs."""
    words, vectors = read_word_vectors(file)
    fitting = filter(re.compile(word).fullmatch, words)
    first = next(fitting, None)
    if first is None:
        raise ValueError(f"--word_vectors {file} has no word that fits {word!r}; pass another file or --word.")
    row = words.index(first)
    vectors = normalize(vectors)
    cosines = vectors @ vectors[row]
    cosines[row] = 2  # before words with the same vector
    nearest = (-cosines).argsort(kind="stable")[: SHOWN_WORDS + 1]
    return [(words[near], round(min(1.0, float(cosines[near])), 3)) for near in nearest]


if __name__ == "__main__":
    run(main)
