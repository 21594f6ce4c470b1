"""Change of one word or of many between groups of texts: read once, encoded once, compared and ranked."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers.utils import logging

from ..cards.figures import MEASURES_OF_CHANGE
from ..cards.tables import markdown_table
from ..program.command_line import require
from .controls import (
    RANKED_MEASURE,
    GroupPair,
    compare_with_controls,
    conclude,
    draw_controls,
    encode_uses,
    format_conclusions,
    group_pairs,
    word_frequencies,
)
from .neighbors import sample_uses
from .usage_change import (
    compare_groups,
    controls_below,
    distance_within,
    format_change,
    order_groups,
    rounded,
    shown_pairs,
    typical_uses,
)
from .uses import GroupedText, UsesOfGroups, collect_uses, count_forms, joined_groups, uses_in_case

logger = logging.get_logger(__name__)

MOST_GROUPS = 50  # without a warning

DrawnControls = dict[str, dict[GroupPair, list[str]]]


@dataclass(frozen=True)
class ChangeSettings:
    """What decides the numbers of a comparison; the options of `elmo neighbors` explain each."""

    layer: str = "top"
    bin_width: float | None = None
    min_uses: int = 10
    max_uses: int = 2000
    top_k: int = 2
    permutations: int = 1000
    num_controls: int = 0
    seed: int = 0


class GroupedUses(NamedTuple):
    """All uses of words and of control words, by group; which controls were drawn; whether the groups are numbers."""

    words: dict[str, UsesOfGroups]
    controls: dict[str, UsesOfGroups]
    drawn: DrawnControls
    are_ordered: bool


class WordChange(NamedTuple):
    """The compared uses of a word with their vectors `(uses, hidden_size)`, by group, and the results.

    `random` has the distances of random splits for each pair of groups and each measure.
    """

    result: dict[str, Any]
    uses: UsesOfGroups
    vectors: dict[str, np.ndarray]
    random: dict[GroupPair, dict[str, np.ndarray]]


def read_uses(
    text: GroupedText, words: Sequence[str], control_words: Sequence[str], settings: ChangeSettings
) -> GroupedUses:
    """Reads the uses of all words, and draws control words, for which the text is read once before.

    Args:
        words, control_words: regular expressions.
    """
    drawn: DrawnControls = {}
    if settings.num_controls:
        drawn = _drawn_controls(text, words, settings)
    forms = {}  # a dictionary keeps their order
    for controls_of_pairs in drawn.values():
        for controls in controls_of_pairs.values():
            forms |= dict.fromkeys(controls)
    patterns = [*words, *control_words]
    collected = collect_uses(text.sentences(), patterns, forms)
    names, are_ordered = order_groups(collected[words[0]], settings.bin_width)
    number = len({*names.values()})
    if number > MOST_GROUPS:
        logger.warning(
            f"--group_by {text.group_by} makes {number:,} groups. Those with fewer uses than --min_uses are left out, "
            "and each pair of the others is compared. For fewer groups, pass --group_by folder if each file is one, or "
            "a --bin_width if they are numbers."
        )
    joined = {name: joined_groups(uses, names) for name, uses in collected.items()}
    in_case = uses_of_words(joined, patterns)
    return GroupedUses(
        words={word: in_case[word] for word in words},
        controls={name: in_case.get(name, joined[name]) for name in (*control_words, *forms)},
        drawn=drawn,
        are_ordered=are_ordered,
    )


def _drawn_controls(text: GroupedText, words: Sequence[str], settings: ChangeSettings) -> DrawnControls:
    counts_of_names = count_forms(text.sentences())
    names, are_ordered = order_groups(counts_of_names, settings.bin_width)
    counts = {group: Counter() for group in names.values()}
    for name, group in names.items():
        counts[group].update(counts_of_names[name])
    pairs = {}
    for word in words:
        frequencies = word_frequencies(counts, word)
        large = [group for group, frequency in frequencies.items() if frequency >= settings.min_uses]
        pairs[word] = group_pairs(large, are_ordered)
    return draw_controls(counts, words, pairs, settings.num_controls, settings.min_uses, settings.seed)


def uses_of_words(uses: Mapping[str, UsesOfGroups], words: Sequence[str]) -> dict[str, UsesOfGroups]:
    """The uses of words in their case; a warning says how many are in another case."""
    in_case = {}
    for word in words:
        in_case[word], left_out = uses_in_case(word, uses[word])
        if left_out:
            number = sum(map(len, in_case[word].values()))
            logger.warning(
                f"--word {word}: {left_out:,} uses in another case are left out, and {number:,} are found. Pass "
                f"'(?i){word}' for all of them."
            )
    return in_case


def compare_words(
    grouped: GroupedUses, has_documents: bool, model, tokenizer, settings: ChangeSettings
) -> list[WordChange]:
    """The change of each word that has `min_uses` uses in two groups. Each sentence is computed once for all words."""
    words = {}
    for word, uses in grouped.words.items():
        sampled = sampled_uses(uses, settings)
        if len(sampled) > 1:
            words[word] = sampled
    controls = {control: sampled_uses(uses, settings) for control, uses in grouped.controls.items()}
    given = [] if grouped.drawn else list(controls)
    vectors, means = encode_uses(words, controls, model, tokenizer, settings.layer)
    changes = []
    for word, uses in words.items():
        documents = documents_of(uses) if has_documents else None
        pairs = []
        random = {}
        for pair in compare_groups(vectors[word], settings.permutations, settings.seed, documents):
            key = (pair["groups"][0], pair["groups"][1])
            random[key] = {measure: pair[measure].pop("random") for measure in MEASURES_OF_CHANGE}
            of_pair = grouped.drawn.get(word, {}).get(key, [])
            pairs.append(compare_with_controls(pair, [*given, *of_pair], means))
        result = {
            "word": word,
            "groups": describe_groups(uses, grouped.words[word], vectors[word], documents, settings.top_k),
            "left_out": left_out_groups(grouped.words[word], settings.min_uses),
            "pairs": pairs,
        }
        changes.append(WordChange(result, uses, vectors[word], random))
    return changes


def sampled_uses(uses: UsesOfGroups, settings: ChangeSettings) -> UsesOfGroups:
    """At most `max_uses` uses of each group that has `min_uses`."""
    sampled = {}
    for group, members in uses.items():
        if len(members) >= settings.min_uses:
            sampled[group], _ = sample_uses(members, settings.max_uses, 0, settings.seed)
    return sampled


def documents_of(uses: UsesOfGroups) -> dict[str, list[str]]:
    """The document of each use, by group."""
    return {group: [use.place.document for use in members if use.place] for group, members in uses.items()}


def describe_groups(
    uses: UsesOfGroups,
    all_uses: UsesOfGroups,
    vectors: Mapping[str, np.ndarray],
    documents: Mapping[str, Sequence[str]] | None,
    top_k: int,
) -> list[dict[str, Any]]:
    descriptions = []
    for group, members in uses.items():
        description = {"name": group, "uses": len(members), "uses_in_text": len(all_uses[group])}
        if documents is not None:
            description["documents"] = len(set(documents[group]))
        typical = [members[row] for row in typical_uses(vectors, group, top_k)]
        description |= {
            "distance_within": rounded(distance_within(vectors[group])),
            "typical_uses": [[str(use), str(use.place)] for use in typical],
        }
        descriptions.append(description)
    return descriptions


def left_out_groups(uses: UsesOfGroups, min_uses: int) -> dict[str, int]:
    """The number of uses of each group that has some, but fewer than `min_uses`."""
    return {group: len(members) for group, members in uses.items() if 0 < len(members) < min_uses}


def rank_words(results: Sequence[Mapping[str, Any]], are_ordered: bool) -> list[dict[str, Any]]:
    """The words of each pair of groups by decreasing change.

    They are ordered by PRT above its mean in random splits: rare words have a larger PRT by chance. `q` of a measure
    is its p after Benjamini and Hochberg's correction for all words of the pair, and decides on the conclusion.
    """
    require("scipy", extra="train", purpose="--words")
    from scipy.stats import false_discovery_control

    rows_of_pairs: dict[GroupPair, list[dict[str, Any]]] = {}
    for result in results:
        sizes = {group["name"]: group["uses"] for group in result["groups"]}
        for pair in shown_pairs({**result, "ordered": are_ordered}):
            row = {**pair, "word": result["word"], "uses": [sizes[group] for group in pair["groups"]]}
            one, other = pair["groups"]
            rows_of_pairs.setdefault((one, other), []).append(row)
    ranking = []
    for groups, rows in rows_of_pairs.items():
        for measure in MEASURES_OF_CHANGE:
            corrected = false_discovery_control([row[measure]["p"] for row in rows])
            for row, q in zip(rows, corrected, strict=True):
                row[measure] = {**row[measure], "q": rounded(q)}
        for row in rows:
            with_q = {**row[RANKED_MEASURE], "p": row[RANKED_MEASURE]["q"]}
            row["conclusion"] = conclude(with_q, row["smallest_p"])
        rows.sort(key=lambda row: row[RANKED_MEASURE]["random_mean"] - row[RANKED_MEASURE]["distance"])
        ranking.append({"groups": list(groups), "words": rows})
    return ranking


def format_ranking(result: Mapping[str, Any], advice: str) -> str:
    """A table of words for each pair of groups, what to conclude, and what was not compared.

    Args:
        advice: how to get more control words.
    """
    lines = []
    for pair in result["ranking"]:
        one, other = pair["groups"]
        table = [["", "uses", "PRT", "at random", "p", "q", "above controls", "APD", "APD p", "above controls"]]
        for row in pair["words"]:
            prt, apd = row["prt"], row["apd"]
            cells = [row["word"], ", ".join(map(str, row["uses"]))]
            cells += [f"{prt[key]:.4f}" for key in ("distance", "random_mean")]
            cells += [f"{prt[key]:.3f}" for key in ("p", "q")]
            cells += [controls_below(prt), f"{apd['distance']:.3f}", f"{apd['p']:.3f}", controls_below(apd)]
            table.append(cells)
        conclusions = {row["word"]: row["conclusion"] for row in pair["words"]}
        lines += ["", f"{one}, {other}", "", markdown_table(table), ""]
        lines += format_conclusions(conclusions, advice)
    others = []
    for word, counts in result["not_compared"].items():
        found = ", ".join(f"{group} {count}" for group, count in counts.items()) or "no use"
        others.append(f"{word} ({found})")
    if others:
        lines += [f"Not compared, without two groups of --min_uses {result['min_uses']}: {'; '.join(others)}"]
    lines += ["These sentences take q for p: it is corrected for the number of words (Benjamini and Hochberg)."]
    lines += [split_note(result["documents"])]
    return "\n".join(lines[1:])


def format_word(result: Mapping[str, Any], advice: str) -> str:
    """The groups and pairs of one word, and what to conclude of each pair."""
    conclusions = {}
    for pair in shown_pairs(result):
        conclusions[", ".join(pair["groups"])] = pair["conclusion"]
    lines = [format_change(result), "", *format_conclusions(conclusions, advice), split_note(result["documents"])]
    return "\n".join(lines)


def split_note(documents: str | None) -> str:
    if documents is None:
        return (
            "Random splits move single uses, so p is too small if uses in one document are alike. --document_column "
            "names the column of the document."
        )
    return f"Random splits move whole documents ({documents})."
