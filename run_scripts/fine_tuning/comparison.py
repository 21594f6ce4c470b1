"""Gold and predicted items side by side: which are right, counts of the errors by class, and the worst examples.

An item is what a task finds: an entity, the tag of a word, an argument of a predicate, a mention, the label of a text.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

MOST_EXAMPLES = 20  # of a class
MOST_EXAMPLES_IN_ALL = 500
MOST_TEXTS_OF_ERROR = 5  # of a kind of error
LONGEST_ITEM = 60  # characters of an item's text in a count

Span = tuple[int, int]  # first word, and the word after the last
Kind = Literal["right", "missed", "invented", "other class", "other words", "other class and words"]


class Item(NamedTuple):
    """What a task finds. Two items are equal if their classes and words are."""

    name: str  # of its class
    spans: tuple[Span, ...] = ()
    text: str = ""


class Pair(NamedTuple):
    """A gold item and the predicted item for it; `None` where one of them is missing."""

    kind: Kind
    gold: str | None  # classes
    predicted: str | None
    text: str = ""


class Segment(NamedTuple):
    """A part of what a person reads."""

    text: str
    name: str | None  # of the class, if it is an item
    is_right: bool


class View(NamedTuple):
    """An example as a person reads it: what was asked, and both answers."""

    text: str
    gold: list[Segment]
    predicted: list[Segment]


class Comparison(NamedTuple):
    """All items of an example."""

    pairs: list[Pair]
    views: list[View]
    severity: float  # of the error; an example that is right is never shown


def paired(gold: Sequence[Item], predicted: Sequence[Item]) -> list[Pair]:
    """Pairs of items with the same words, then of those that share most words, and then items without a partner."""
    pairs = []
    by_spans = {item.spans: item for item in predicted}
    rest = []
    for item in gold:
        other = by_spans.pop(item.spans, None)
        if other is None:
            rest.append(item)
        else:
            kind: Kind = "right" if other.name == item.name else "other class"
            pairs.append(Pair(kind, item.name, other.name, item.text))
    for item in rest:
        other = max(by_spans.values(), key=lambda other: shared_words(item, other), default=None)
        if other is None or not shared_words(item, other):
            pairs.append(Pair("missed", item.name, None, item.text))
            continue
        del by_spans[other.spans]
        kind = "other words" if other.name == item.name else "other class and words"
        pairs.append(Pair(kind, item.name, other.name, item.text))
    for item in by_spans.values():
        pairs.append(Pair("invented", None, item.name, item.text))
    return pairs


def shared_words(item: Item, other: Item) -> int:
    shared = 0
    for first, end in item.spans:
        for other_first, other_end in other.spans:
            shared += max(0, min(end, other_end) - max(first, other_first))
    return shared


def count_errors(pairs: Iterable[Pair]) -> int:
    return sum(pair.kind != "right" for pair in pairs)


def compare_items(words: Sequence[str], gold: Sequence[Item], predicted: Sequence[Item]) -> Comparison:
    """The items of a sentence. The more of them are wrong, the worse."""
    pairs = paired(gold, predicted)
    right = {item[:2] for item in gold} & {item[:2] for item in predicted}
    view = View("", *(list(segments(words, side, right)) for side in (gold, predicted)))
    return Comparison(pairs, [view], count_errors(pairs))


def segments(words: Sequence[str], items: Iterable[Item], right: set) -> Iterator[Segment]:
    """The words of a sentence, where no word is in two items."""
    spans = []
    for item in items:
        for first, end in item.spans:
            spans.append((first, end, item))
    place = 0
    for first, end, item in sorted(spans, key=lambda span: span[0]):
        if place < first:
            yield Segment(" ".join(words[place:first]), None, True)
        yield Segment(" ".join(words[first:end]), item.name, item[:2] in right)
        place = end
    if place < len(words):
        yield Segment(" ".join(words[place:]), None, True)


def view_record(view: View) -> dict[str, Any]:
    """The view for a file."""
    sides = {side: [segment._asdict() for segment in getattr(view, side)] for side in ("gold", "predicted")}
    return {"text": view.text, **sides}


class Errors:
    """The errors of many examples, in memory that grows with the number of different errors, not of examples."""

    def __init__(self) -> None:
        self.number = 0
        self.counts: Counter[tuple[Kind, str | None, str | None]] = Counter()
        self.texts: dict[tuple, Counter[str]] = defaultdict(Counter)
        self.worst: dict[str, list] = defaultdict(list)  # heaps by class: severity, order, example

    def add(self, place: dict[str, Any], comparison: Comparison):
        """Counts an example; `place` says where it is."""
        self.number += 1
        wrong = []
        for pair in comparison.pairs:
            self.counts[pair[:3]] += 1
            if pair.kind != "right":
                wrong.append(pair)
                if pair.text:
                    self.texts[pair[:3]][pair.text[:LONGEST_ITEM]] += 1
        if wrong or (not comparison.pairs and comparison.severity):  # of a regression; not a sentence without entities
            self._keep(place, wrong, comparison)

    def _keep(self, place: dict[str, Any], wrong: list[Pair], comparison: Comparison):
        classes = {name for pair in wrong for name in pair[1:3] if name is not None}
        views = [view_record(view) for view in comparison.views]
        example = {**place, "classes": sorted(classes), "errors": [pair._asdict() for pair in wrong], "views": views}
        entry = (comparison.severity, -self.number, example)  # numbers differ, so no examples are compared
        for name in classes or {""}:
            heap = self.worst[name]
            if len(heap) < MOST_EXAMPLES:
                heapq.heappush(heap, entry)
            else:
                heapq.heappushpop(heap, entry)

    def report(self) -> dict[str, Any]:
        """What was counted, for a file: `confusions` by gold and predicted class, and the worst `examples` of each."""
        confusions = []
        for key, number in self.counts.most_common():
            kind, gold, predicted = key
            texts = list(map(list, self.texts[key].most_common(MOST_TEXTS_OF_ERROR)))
            row = {"kind": kind, "gold": gold, "predicted": predicted, "number": number, "texts": texts}
            confusions.append(row)
        most = max(1, MOST_EXAMPLES_IN_ALL // max(1, len(self.worst)))
        kept = {}
        for heap in self.worst.values():
            for severity, order, example in heapq.nlargest(most, heap):
                kept[severity, order] = example
        return {"confusions": confusions, "examples": [kept[key] for key in sorted(kept, reverse=True)]}
