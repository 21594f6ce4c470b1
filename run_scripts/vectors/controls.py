"""Change of words compared with control words of like frequency, and which of the two tests to believe.

Two groups of texts that differ in topic or genre differ in the uses of nearly every word, and a permutation test finds
that. Control words show how much words of like frequency differ between the same groups (Dubossarsky et al. 2017,
"Outta Control: Laws of Semantic Change and Inherent Biases in Word Representation Models").
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ..cards.figures import MEASURES_OF_CHANGE
from .neighbors import WordPattern, embedded_uses, normalize
from .usage_change import EQUAL_DISTANCES, LEVEL, mean_distances, rounded
from .uses import UsesOfGroups

LIKE_FREQUENCY = 2  # a control word is at most so many times more or less frequent, in each of two groups
RANKED_MEASURE = "prt"  # APD also grows with the variety of a word's uses, whatever changes
FEWEST_CONTROLS = 19  # that can give a p of LEVEL: 1 / (1 + 19)

GroupPair = tuple[str, str]

# What to conclude from both tests, with what to do next.
CONCLUSIONS = {
    "changed": "Changed: {names}. PRT is larger than in random splits, and in the top 5 % of control words. Read the "
    "uses to see what has changed.",
    "as controls": "Believe the controls, not p: {names}. Random splits seldom give such a PRT, but it is not in the "
    "top 5 % of control words. So the groups differ in topic, genre or authors, and nothing shows a change of these "
    "words.",
    "as random": "Believe p, not the controls: {names}. PRT is in the top 5 % of control words, but random splits "
    "often give it. So chance or a few documents may be the reason, and uses from more documents are needed.",
    "no change": "No change is shown: {names}. Random splits often give such a PRT.",
    "above controls": "Believe the controls: {names}. PRT is in the top 5 % of control words, but there are too few "
    "documents for a permutation test, whose p cannot be as low as {level}.",
    "too few documents": "Undecided: {names}. There are too few documents for a permutation test, whose p cannot be "
    "as low as {level}, and PRT is not shown to be in the top 5 % of at least {fewest} control words.",
    "p alone": "Undecided: {names}. PRT is larger than in random splits, as for most words if groups differ in topic "
    "or genre. To compare with at least {fewest} control words, {advice}.",
}


def group_pairs(groups: Iterable[str], are_ordered: bool) -> list[GroupPair]:
    """Consecutive pairs of groups that are ordered, or all pairs."""
    return list(pairwise(groups) if are_ordered else combinations(groups, 2))


def word_frequencies(counts: Mapping[str, Counter[str]], word: str) -> dict[str, int]:
    """How often the forms of a word, a regular expression, occur in each group."""
    pattern = WordPattern(word)
    fitting = list(filter(pattern.fits, set().union(*counts.values())))
    return {group: sum(forms[form] for form in fitting) for group, forms in counts.items()}


def draw_controls(
    counts: Mapping[str, Counter[str]],
    words: Collection[str],
    pairs_of_words: Mapping[str, Sequence[GroupPair]],
    number: int,
    min_uses: int,
    seed: int,
) -> dict[str, dict[GroupPair, list[str]]]:
    """Control words at random, for each word and each pair of groups.

    They consist of letters, are at least half and at most twice as frequent as the word in both groups, and occur at
    least `min_uses` times. They fit none of the words, in any case. All words draw in one random order, so that words
    of like frequency share most of their controls.

    Args:
        counts: frequencies of all forms, by group.
        words: regular expressions.
        number: of controls that are drawn, if there are so many.
    """
    patterns = [WordPattern(word, re.IGNORECASE) for word in words]
    forms = sorted(filter(str.isalpha, set().union(*counts.values())))
    candidates = [form for form in forms if not any(pattern.fits(form) for pattern in patterns)]
    order = np.random.default_rng(seed).permutation(len(candidates))
    candidates = [candidates[place] for place in order]
    table = {group: np.array([count[form] for form in candidates]) for group, count in counts.items()}
    controls = {}
    for word, pairs in pairs_of_words.items():
        frequencies = word_frequencies(counts, word)
        controls[word] = {}
        for pair in pairs:
            is_like = np.ones(len(candidates), dtype=bool)
            for group in pair:
                frequency = frequencies[group]
                is_like &= table[group] >= max(min_uses, frequency / LIKE_FREQUENCY)
                is_like &= table[group] <= frequency * LIKE_FREQUENCY
            controls[word][pair] = [candidates[place] for place in np.flatnonzero(is_like)[:number]]
    return controls


def encode_uses(
    words: Mapping[str, UsesOfGroups], controls: Mapping[str, UsesOfGroups], model, tokenizer, layer: str
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, dict[str, np.ndarray]]]:
    """The vectors of all uses of words, and the means of the uses of controls. Each sentence is computed once.

    Shape:
        vectors: `(uses, hidden_size)`, by word and group.
        means: `(2, hidden_size)`, the mean direction and the mean vector, by control and group.
    """
    flat = [use for groups in words.values() for uses in groups.values() for use in uses]
    slots = []  # of the control and the group of each use
    of_controls = []
    places = [(control, group) for control, groups in controls.items() for group in groups]
    for slot, (control, group) in enumerate(places):
        uses = controls[control][group]
        of_controls += uses
        slots += [slot] * len(uses)
    width = model.config.hidden_size
    vectors = np.empty((len(flat), width), dtype=np.float32)
    sums = np.zeros((len(places), 2, width))
    embedded = embedded_uses([*flat, *of_controls], model, tokenizer, layer)
    for number, vector in tqdm(embedded, total=len(flat) + len(of_controls), unit=" uses", unit_scale=True):
        if number < len(flat):
            vectors[number] = vector
        else:
            slot = slots[number - len(flat)]
            sums[slot, 0] += normalize(vector)
            sums[slot, 1] += vector
    vectors_of_words = defaultdict(dict)
    start = 0
    for word, groups in words.items():
        for group, uses in groups.items():
            vectors_of_words[word][group] = vectors[start : start + len(uses)]
            start += len(uses)
    means = defaultdict(dict)
    for (control, group), total in zip(places, sums, strict=True):
        means[control][group] = total / max(1, len(controls[control][group]))
    return dict(vectors_of_words), dict(means)


def compare_with_controls(
    pair: dict[str, Any], controls: Iterable[str], means: Mapping[str, Mapping[str, np.ndarray]]
) -> dict[str, Any]:
    """A pair of `compare_groups` with the controls that have uses in both groups, and a conclusion.

    Each measure gets the distances of the `controls`; the `rank` of the word among them and itself, 1 for the largest;
    the `percentile`, the share of controls that are below in percent; and `p_controls`, the rank as a share.
    """
    one, other = pair["groups"]
    names = [control for control in controls if {one, other} <= means.get(control, {}).keys()]
    compared = dict(pair)
    if names:
        both_groups = np.stack([[means[name][group] for name in names] for group in (one, other)])
        distances = mean_distances(both_groups[:, :, 0], both_groups[:, :, 1])
        for row, measure in enumerate(MEASURES_OF_CHANGE):
            of_controls = dict(zip(names, map(rounded, distances[row]), strict=True))
            compared[measure] = {**pair[measure], **place_among(pair[measure]["distance"], of_controls)}
    return {**compared, "conclusion": conclude(compared[RANKED_MEASURE], compared["smallest_p"])}


def place_among(distance: float, controls: Mapping[str, float]) -> dict[str, Any]:
    number = len(controls)
    at_least_as_large = sum(other >= distance - EQUAL_DISTANCES for other in controls.values())
    rank = 1 + at_least_as_large
    return {
        "controls": dict(controls),
        "rank": rank,
        "percentile": round(100 * (number - at_least_as_large) / number, 1),
        "p_controls": rounded(rank / (1 + number)),
    }


def conclude(measure: Mapping[str, Any], lowest_p: float) -> str:
    """A key of `CONCLUSIONS`: a change needs both tests, and the one that sees no change is to be believed."""
    can_test = lowest_p <= LEVEL
    has_controls = len(measure.get("controls", ())) >= FEWEST_CONTROLS
    is_above_random = can_test and measure["p"] <= LEVEL
    is_above_controls = has_controls and measure["p_controls"] <= LEVEL
    if not can_test:
        return "above controls" if is_above_controls else "too few documents"
    if not is_above_random:
        return "as random" if is_above_controls else "no change"
    if not has_controls:
        return "p alone"
    return "changed" if is_above_controls else "as controls"


def format_conclusions(conclusions: Mapping[str, str], advice: str) -> list[str]:
    """A sentence for each conclusion, with the names of the words or pairs that have it.

    Args:
        conclusions: keys of `CONCLUSIONS`, by name.
        advice: how to get more control words.
    """
    names_of = defaultdict(list)
    for name, conclusion in conclusions.items():
        names_of[conclusion].append(name)
    lines = []
    for conclusion, sentence in CONCLUSIONS.items():
        if names := names_of[conclusion]:
            separator = "; " if any("," in name for name in names) else ", "
            values = {"level": LEVEL, "fewest": FEWEST_CONTROLS, "advice": advice}
            lines.append(sentence.format(names=separator.join(names), **values))
    return lines
