"""Finds the uses of a word that are most alike: the paper's Table 4, with a map of all uses.

    elmo neighbors heldout.txt --word play --model elmo

A few uses are drawn at random (`--seed`). Each is shown with its nearest uses in other sentences, by cosine.
`--word_vectors glove.txt` also shows the nearest words by vectors without a context.
`--output neighbors.json` writes the results, and next to them a map (.png) and a table of the uses (.uses.tsv).

`--group_by` asks how the use differs between periods, genres or authors:

    elmo neighbors speeches.tsv --word energy --model elmo --group_by year --bin_width 10 --output energy.json

The text is a table with a column `text` and a column of groups; `--group_by file` makes a group of each file, and
`--group_by folder` of the files of each folder. For each pair of groups, the average pairwise distance of their uses
(APD) and the distance of their mean vectors (PRT) are compared with random splits of the same uses, and with the
distances of control words of like frequency (`--controls`, `--control_words`). A sentence says what to believe.

`--clusters` groups the uses without an inventory of senses, with typical uses and the share of each group. `--output`
also writes a table of the uses with all columns of the text, and `--save_vectors` their vectors.

`--words FILE` instead of `--word` ranks many words. The text is read and encoded once for all of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from modeling_elmo.run_scripts.cards.figures import draw_change, draw_map, draw_ranking
from modeling_elmo.run_scripts.cards.tables import one_line
from modeling_elmo.run_scripts.program.command_line import (
    ProgramParser,
    given_options,
    option,
    print_conclusion,
    refuse_unread,
    require,
    run,
)
from modeling_elmo.run_scripts.program.files import check_output, write_json
from modeling_elmo.run_scripts.program.sentences import warn_of_split_words
from modeling_elmo.run_scripts.program.texts import RunningTextArguments
from modeling_elmo.run_scripts.vectors.controls import FEWEST_CONTROLS
from modeling_elmo.run_scripts.vectors.embedding import load_model_and_tokenizer
from modeling_elmo.run_scripts.vectors.neighbors import (
    WordPattern,
    check_layer,
    format_neighbors,
    nearest_uses,
    normalize,
    sample_uses,
    use_vectors,
)
from modeling_elmo.run_scripts.vectors.usage_change import LEVEL, distance_within, shown_pairs, typical_uses
from modeling_elmo.run_scripts.vectors.use_clusters import (
    BY_SILHOUETTE,
    cluster_uses,
    describe_clusters,
    format_clusters,
)
from modeling_elmo.run_scripts.vectors.use_table import UseRow, use_rows, write_use_table, write_use_vectors
from modeling_elmo.run_scripts.vectors.uses import (
    GroupedText,
    UsesOfGroups,
    check_pattern,
    collect_uses,
    joined_groups,
    read_patterns,
)
from modeling_elmo.run_scripts.vectors.word_changes import (
    ChangeSettings,
    WordChange,
    compare_words,
    format_ranking,
    format_word,
    rank_words,
    read_uses,
    uses_of_words,
)
from modeling_elmo.run_scripts.vectors.word_vectors import read_word_vectors

logger = logging.get_logger(__name__)

PICTURE_SUFFIXES = (".png", ".pdf", ".svg")
SHOWN_WORDS = 10  # nearest by word vectors, as in Table 4
LEAST_USES = 2  # of a group: one has no distance within
DEFAULT_CONTROLS = 100  # with half as many, other draws often lead to another conclusion


@dataclass(kw_only=True)
class NeighborArguments(RunningTextArguments):
    word: str | None = option(
        None,
        "Word, or a regular expression for several forms: 'plays?|played'. Case counts; '(?i)play' finds Play too.",
    )
    model: str = option(..., "Folder or Hub name of an ELMo model.")
    word_vectors: str | None = option(None, "Text file of word vectors, to show the nearest words without context.")
    layer: str = option("top", "Layer: top, average, mixed, or a number (0 is the token layer).")
    queries: int = option(4, "Number of uses to show with their neighbors.")
    top_k: int = option(2, "Number of neighbors per use, or of typical uses per group.")
    max_uses: int = option(2000, "Maximum number of uses to compare, in all or per group; drawn at random.")
    seed: int = option(0, "Seed of drawn uses, control words and random splits.")
    raw_text: bool = option(False, "Split lines with the model's tokenizer. Default: at spaces.")
    clusters: int | None = option(
        None,
        "Number of clusters of the uses. Without a number, the one with the largest silhouette. Default: no clusters.",
        nargs="?",
        const=BY_SILHOUETTE,
    )
    output: str | None = option(
        None,
        "File for the results (.json) or the picture (.png, .pdf, .svg). Both are written, with a table of the uses "
        "(.uses.tsv) next to them; the picture of .json is a .png.",
    )
    save_vectors: bool = option(False, "Also write the uses with their vectors next to --output (.uses.parquet).")
    device: str | None = option(None, "Device. Default: cuda if available, else cpu.")
    trust_remote_code: bool = option(False, "Run code from the model's folder.")

    def __post_init__(self):
        if self.max_uses <= self.top_k:
            raise ValueError(f"--max_uses {self.max_uses}: pass more than --top_k {self.top_k}.")
        check_output(self.output)
        if self.output is not None and Path(self.output).suffix not in (".json", *PICTURE_SUFFIXES):
            raise ValueError(f"--output {self.output}: pass a file that ends in .json, {', '.join(PICTURE_SUFFIXES)}.")
        if self.output is None:
            refuse_unread(self, ["save_vectors"], "without --output, next to which they are written.")
        if self.save_vectors:
            require("pyarrow", extra="train", purpose="--save_vectors")
        if self.clusters == 1:
            raise ValueError("--clusters 1: pass 2 or more, or no number for the one with the largest silhouette.")
        if self.word is not None:
            check_pattern(self.word, "--word")


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
    words: str | None = option(None, "File with a word or regular expression per line, instead of --word: a ranking.")
    controls: int | None = option(
        None, f"Number of control words of like frequency, drawn at random. Default: {DEFAULT_CONTROLS} with --words."
    )
    control_words: str | None = option(None, "File with a control word or regular expression per line, not drawn.")
    document_column: str | None = option(
        None,
        "Column of tables with the document, file or folder: random splits move whole documents. Default: file if "
        "there are several, unless each is a group; else single uses are moved.",
    )

    def __post_init__(self):
        if self.min_uses < LEAST_USES:
            raise ValueError(f"--min_uses {self.min_uses}: pass at least {LEAST_USES}.")
        if self.group_by is None:
            options = ("words", "controls", "control_words", "document_column", "bin_width", "min_uses", "permutations")
            refuse_unread(self, options, "without --group_by; leave it out.")
        if self.control_words is not None:
            refuse_unread(self, ("controls",), "with --control_words, which draws none.")

    @property
    def num_controls(self) -> int:
        """How many are drawn."""
        if self.control_words is not None:
            return 0
        default = 0 if self.words is None else DEFAULT_CONTROLS
        return default if self.controls is None else self.controls


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = ProgramParser(NeighborArguments, GroupArguments, description=__doc__)
    parser.add_argument("text", nargs="+", help="Text files, folders or patterns, one sentence per line; or tables.")
    parsed, groups, positional = parser.parse(arguments)
    if (parsed.word is None) == (groups.words is None):
        raise ValueError("Pass either --word WORD, or --words FILE with --group_by COLUMN.")
    if groups.group_by:
        refuse_unread(parsed, ["word_vectors", "queries"], "with --group_by, which shows --top_k uses per group.")
    warn_of_split_words(parsed)
    model, tokenizer = load_model_and_tokenizer(parsed.model, parsed.device, parsed.trust_remote_code)
    check_layer(parsed.layer, model.config.num_hidden_layers)
    text = GroupedText(
        positional.text,
        groups.group_by,
        groups.document_column,
        groups.text_column,
        parsed.split_sentences,
        tokenizer.splitter.words if parsed.raw_text else str.split,
    )
    text.check()
    if parsed.output and table_of_uses(parsed).resolve() in [path.resolve() for path in text.files]:
        raise ValueError(
            f"--output {parsed.output} would replace {table_of_uses(parsed)}, which is read. Pass another."
        )
    if groups.group_by:
        return find_change(parsed, groups, text, model, tokenizer)
    return find_neighbors(parsed, groups, text, model, tokenizer)


def find_neighbors(
    parsed: NeighborArguments, groups: GroupArguments, text: GroupedText, model, tokenizer
) -> dict[str, Any]:
    """The nearest uses of some uses of the word."""
    word = str(parsed.word)
    collected = collect_uses(text.sentences(), [word])
    joined = {word: joined_groups(collected[word], dict.fromkeys(collected[word], ""))}
    all_uses = uses_of_words(joined, [word])[word].get("", [])
    if len(all_uses) <= parsed.top_k:
        counted = f"The text has {len(all_uses)} use(s) of {word!r}, too few for --top_k {parsed.top_k}"
        raise ValueError(f"{counted}. Pass more text, another --word, or a smaller --top_k.")
    if parsed.word_vectors is not None:
        nearest_words = words_in_file(parsed.word_vectors, word)
    uses, queries = sample_uses(all_uses, parsed.max_uses, parsed.queries, parsed.seed)
    unscaled = use_vectors(uses, model, tokenizer, parsed.layer)
    vectors = normalize(unscaled)
    result: dict[str, Any] = {
        "word": word,
        "layer": parsed.layer,
        "text": [Path(name).name for name in text.patterns],
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
        shown = [[round(cosine, 3), str(uses[near]), str(uses[near].place)] for near, cosine in neighbors]
        result["queries"].append({"use": use, "place": str(uses[query].place), "neighbors": shown})
        colored[use] = [query, *(near for near, _ in neighbors)]
    rows = described_uses(parsed, result, {"": uses}, vectors)
    print(format_neighbors(result))
    if "clusters" in result:
        print("\n" + format_clusters(result["clusters"]))
    if parsed.output:
        output = Path(parsed.output)
        write_json(output.with_suffix(".json"), result)
        write_uses(parsed, rows, unscaled)
        draw_map(vectors, colored, picture_path(output))
    print_conclusion(how_alike(result, 1 - distance_within(vectors)), *next_neighbors_command(text, parsed, groups))
    return result


def how_alike(result: Mapping[str, Any], random: float) -> str:
    """The cosines of the shown neighbors, compared with the mean cosine of two uses."""
    cosines = [cosine for query in result["queries"] for cosine, _, _ in query["neighbors"]]
    if not cosines:
        return f"All uses of {result['word']} are in one sentence, and have no neighbors in others."
    range_of_cosines = f"{min(cosines):.2f} to {max(cosines):.2f}"
    return f"The shown neighbors have cosines from {range_of_cosines}; two random uses have {random:.2f} on average."


def next_neighbors_command(text: GroupedText, parsed: NeighborArguments, groups: GroupArguments) -> list[str]:
    """The same command with control words for groups, or with clusters; the explorer if there are both."""
    words = ["elmo", "neighbors", *text.patterns, *given_options(parsed, groups)]
    if groups.group_by is not None and not groups.num_controls and groups.control_words is None:
        return [*words, "--controls", str(DEFAULT_CONTROLS)]
    if parsed.clusters is None:
        return [*words, "--clusters"]
    command = ["elmo", "explore", parsed.model]
    if text.text_column != "text":  # it reads no other column
        return command
    language = [] if text.language is None else ["--split_sentences", text.language]
    return [*command, "--corpus", *text.patterns, *language]


def described_uses(
    parsed: NeighborArguments, result: dict[str, Any], groups: UsesOfGroups, vectors: np.ndarray
) -> list[UseRow]:
    """The rows of the uses of a word. With `--clusters`, the result gets a description of the clusters.

    Shape:
        vectors: `(uses, hidden_size)`, of all groups.
    """
    numbers = None
    if parsed.clusters is not None:
        clusters = cluster_uses(vectors, parsed.clusters, parsed.seed)
        if clusters is None:
            logger.warning(f"--clusters: {len(vectors)} uses of {result['word']!r} are too few for clusters.")
        else:
            numbers = clusters.numbers
            result["clusters"] = describe_clusters(clusters, groups, vectors, parsed.top_k)
    return list(use_rows(result["word"], groups, vectors, numbers))


def write_uses(parsed: NeighborArguments, rows: Sequence[UseRow], vectors: np.ndarray):
    write_use_table(table_of_uses(parsed), rows)
    if parsed.save_vectors:
        write_use_vectors(table_of_uses(parsed).with_suffix(".parquet"), rows, vectors)


def table_of_uses(parsed: NeighborArguments) -> Path:
    return Path(str(parsed.output)).with_suffix(".uses.tsv")


def find_change(
    parsed: NeighborArguments, groups: GroupArguments, text: GroupedText, model, tokenizer
) -> dict[str, Any]:
    """Compares the uses of one word, or of many, in groups of texts."""
    words, control_words = words_of_options(parsed, groups)
    settings = ChangeSettings(
        layer=parsed.layer,
        bin_width=groups.bin_width,
        min_uses=groups.min_uses,
        max_uses=parsed.max_uses,
        top_k=parsed.top_k,
        permutations=groups.permutations,
        num_controls=groups.num_controls,
        seed=parsed.seed,
    )
    uses = read_uses(text, words, control_words, settings)
    changes = compare_words(uses, text.documents is not None, model, tokenizer, settings)
    if not changes:
        raise ValueError(too_few_uses(groups, uses.words))
    result: dict[str, Any] = {
        "layer": parsed.layer,
        "text": [Path(name).name for name in text.patterns],
        "group_by": groups.group_by,
        "bin_width": groups.bin_width,
        "ordered": uses.are_ordered,
        "min_uses": groups.min_uses,
        "max_uses": parsed.max_uses,
        "seed": parsed.seed,
        "permutations": groups.permutations,
        "documents": text.documents,
    }
    results = [change.result for change in changes]
    rows = []
    for change in changes:
        rows += described_uses(parsed, change.result, change.uses, np.concatenate([*change.vectors.values()]))
    if groups.words is None:
        result = {"word": parsed.word, **result, **results[0]}
        print(format_word(result, control_advice(groups)))
        if "clusters" in result:
            print("\n" + format_clusters(result["clusters"]))
        finding = largest_change(result)
        following = next_neighbors_command(text, parsed, groups)
    else:
        warn_of_few_permutations(groups.permutations, len(results))
        result["words"] = results
        result["not_compared"] = uses_of_others(uses.words, results)
        result["ranking"] = rank_words(results, uses.are_ordered)
        print(format_ranking(result, control_advice(groups)))
        finding = changed_words(result)
        first = result["ranking"][0]["words"][0]["word"]
        of_word = given_options(parsed, groups, but=["words", "output", "save_vectors"])
        following = ["elmo", "neighbors", *text.patterns, "--word", first, *of_word]
    if parsed.output:
        output = Path(parsed.output)
        write_json(output.with_suffix(".json"), result)
        write_uses(parsed, rows, np.concatenate([vectors for change in changes for vectors in change.vectors.values()]))
        if groups.words is None:
            draw_word(result, changes[0], parsed.top_k, picture_path(output))
        else:
            draw_ranking(result["ranking"], picture_path(output))
    print_conclusion(finding, *following)
    return result


def largest_change(result: Mapping[str, Any]) -> str:
    """The pair of groups whose PRT is furthest above random splits."""
    pair = max(shown_pairs(result), key=lambda pair: pair["prt"]["distance"] - pair["prt"]["random_mean"])
    one, other = pair["groups"]
    prt = pair["prt"]
    return (
        f"{result['word']} differs most between {one} and {other}: PRT is {prt['distance']:.3f}, in random splits "
        f"{prt['random_mean']:.3f} on average (p {prt['p']:.3f})."
    )


def changed_words(result: Mapping[str, Any]) -> str:
    """How many words are shown to have changed, by both tests, in any pair of groups."""
    rows = [row for pair in result["ranking"] for row in pair["words"]]
    changed = dict.fromkeys(row["word"] for row in rows if row["conclusion"] == "changed")
    words = f": {one_line(list(changed))}" if changed else ""
    number = len({row["word"] for row in rows})
    return f"{len(changed):,} of {number:,} compared words are shown to have changed{words}."


def warn_of_few_permutations(permutations: int, words: int):
    lowest_q = words / (1 + permutations)
    if lowest_q > LEVEL:
        needed = math.ceil(words / LEVEL) - 1
        logger.warning(
            f"--permutations {permutations}: with {words} words, no q can be below {min(1, lowest_q):.3f}, "
            f"unless several words change; pass at least {needed}."
        )


def draw_word(result: dict[str, Any], change: WordChange, top_k: int, path: Path):
    """Draws the change of a word, with typical uses: `top_k` of each group if there are two groups, else one."""
    number = top_k if len(change.uses) == 2 else 1
    typical = {}
    for group, uses in change.uses.items():
        typical[group] = [(row, str(uses[row])) for row in typical_uses(change.vectors, group, number)]
    pairs = shown_pairs(result)
    random = change.random[tuple(pairs[0]["groups"])]
    draw_change(pairs, result["ordered"], change.vectors, random, typical, path)


def picture_path(output: Path) -> Path:
    return output if output.suffix in PICTURE_SUFFIXES else output.with_suffix(".png")


def words_of_options(parsed: NeighborArguments, groups: GroupArguments) -> tuple[list[str], list[str]]:
    """The words to compare, and the control words that are given."""
    words = [str(parsed.word)]
    if groups.words is not None:
        words = read_patterns(Path(groups.words), "--words")
    control_words = []
    if groups.control_words is not None:
        control_words = read_patterns(Path(groups.control_words), "--control_words")
    for word in words:
        if word in control_words:
            raise ValueError(f"--control_words {groups.control_words} has {word!r}, which is compared; remove it.")
    return words, control_words


def too_few_uses(groups: GroupArguments, uses: Mapping[str, UsesOfGroups]) -> str:
    word, uses_of_groups = next(iter(uses.items()))
    counts = ", ".join(f"{name} {len(members)}" for name, members in uses_of_groups.items()) or "none"
    found = f"found: {counts}" if len(uses) == 1 else f"no word of --words has them; {word!r} has: {counts}"
    return (
        f"--group_by {groups.group_by} needs two groups with --min_uses {groups.min_uses} of {word!r}; {found}. Pass "
        "more text, or larger groups."
    )


def uses_of_others(uses: Mapping[str, UsesOfGroups], results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """The number of uses by group of the words that have no result."""
    compared = {result["word"] for result in results}
    others = {}
    for word, uses_of_groups in uses.items():
        if word not in compared:
            others[word] = {group: len(members) for group, members in uses_of_groups.items() if members}
    return others


def control_advice(groups: GroupArguments) -> str:
    """How to get more control words."""
    if groups.control_words is not None:
        return "add words to --control_words"
    if groups.num_controls < FEWEST_CONTROLS:
        return f"pass --controls {DEFAULT_CONTROLS}, or --control_words FILE"
    return "pass --control_words FILE, or more text, which has too few words of like frequency"


def words_in_file(file: str, word: str) -> list[tuple[str, float]]:
    """The first word of a file that fits a regular expression, with cosine 1, and its nearest words with theirs."""
    words, vectors = read_word_vectors(file)
    fitting = filter(WordPattern(word).fits, words)
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
