"""Scores of semantic roles as `srl-eval.pl` of CoNLL-2005 counts them, and of the search for predicates.

An argument is right if its role and all of its words are. The rules:

- V, the predicate itself, is not scored.
- C-X continues the last X of the same predicate: the pieces are one argument, and each piece must be right. C-V thus
  belongs to V.
- C-X without an X before it counts as X.
- R-X is a role like any other.

A span that begins with I- counts as one that begins with B-. Division by zero gives 0.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from modeling_elmo.pipeline_elmo_roles import PREDICATE_ROLES, role_spans
from modeling_elmo.run_scripts.fine_tuning.metrics import RATES, Scores

Span = tuple[int, int]  # first word, and the word after the last
Argument = tuple[str, tuple[Span, ...]]


def role_scores(
    predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]], kinds: Sequence[str] | None = None
) -> Scores:
    """Scores of the arguments of all predicates together.

    Args:
        predicted, gold: BIO tags of each predicate's sentence, without padding and markers.
        kinds: kind of each predicate, such as "verb", to score the kinds apart; "" if unknown.

    Returns:
        `precision`, `recall` and `f1`; `span_f1`, which counts each piece C-X as a span of its own, except C-V;
        `per_type`: the three rates and the `number` of gold arguments of each role. With `kinds`, `per_kind` has the
        same for each kind, and `verb_f1`, `noun_f1` and so on are its F1.
    """
    counts = [len(predicted), len(gold), len(gold if kinds is None else kinds)]
    if len({*counts}) > 1:
        raise ValueError(f"Predicted tags, gold tags and kinds are those of {counts} predicates; pass equally many.")
    found, wanted = (_numbered(tags, role_arguments) for tags in (predicted, gold))
    scores = argument_rates(found, wanted)
    del scores["number"]
    scores["span_f1"] = argument_rates(*(_numbered(tags, role_spans) for tags in (predicted, gold)))["f1"]
    roles = {role for _, (role, _) in found | wanted}
    scores["per_type"] = _rates_apart(found, wanted, roles, lambda each: each[1][0])
    if kinds is None:
        return scores
    per_kind = _rates_apart(found, wanted, set(kinds) - {""}, lambda each: kinds[each[0]])
    return scores | {f"{kind}_f1": rates["f1"] for kind, rates in per_kind.items()} | {"per_kind": per_kind}


def _rates_apart(found: set, wanted: set, names: Collection[str], name_of: Callable[[Any], str]) -> dict[str, Scores]:
    """`argument_rates` of the arguments of each name."""
    parts = {name: [{each for each in side if name_of(each) == name} for side in (found, wanted)] for name in names}
    return {name: argument_rates(*parts[name]) for name in sorted(names)}


def predicate_scores(found: Sequence[Collection[int]], gold: Sequence[Collection[int]]) -> Scores:
    """Precision, recall and F1 of the indexes of predicates that were found in each sentence."""
    sides = ({(number, index) for number, indexes in enumerate(side) for index in indexes} for side in (found, gold))
    rates = argument_rates(*sides)
    return {f"predicate_{name}": rates[name] for name in ("precision", "recall", "f1")}


def role_arguments(tags: Sequence[str]) -> list[Argument]:
    """Role and spans of each argument and of V, as described above."""
    arguments: list[tuple[str, list[Span]]] = []
    last: dict[str, list[Span]] = {}  # spans of the last argument of each role
    for role, first, end in role_spans(tags):
        continued = role.removeprefix("C-")
        if role != continued and continued in last:
            last[continued].append((first, end))
        elif role:
            last[continued] = [(first, end)]
            arguments.append((continued, last[continued]))
    return [(role, tuple(spans)) for role, spans in arguments]


def argument_rates(found: Collection, wanted: Collection) -> Scores:
    """Precision, recall, F1 and the number of gold elements."""
    right = len(set(found) & set(wanted))
    rates = (right / max(len(found), 1), right / max(len(wanted), 1), 2 * right / max(len(found) + len(wanted), 1))
    return dict(zip(RATES, (*rates, len(wanted)), strict=True))


def _numbered(predicates: Sequence[Sequence[str]], parts_of: Callable[[Sequence[str]], list]) -> set[tuple[int, Any]]:
    """The number of each predicate with each part of its tags, but for the predicate itself and words outside."""
    parts = ((number, part) for number, tags in enumerate(predicates) for part in parts_of(tags))
    return {(number, part) for number, part in parts if part[0] not in ("", *PREDICATE_ROLES)}
