"""Word senses: annotated text, disambiguation by the nearest average, and how often nearest uses share a sense."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np

from ..cards.figures import draw_map
from ..program.data_files import column_lines
from ..program.texts import numbered_lines
from .neighbors import in_context, normalize

MAX_COLORED_SENSES = 6  # of a map
MAX_COMPARED_USES = 2000  # of a lemma
EQUAL_COSINES = 1e-5  # vectors of one form differ by the rounding of float16, and by little more than this
LEGEND_WORDS = 5  # on each side of a use in the legend

Lemma = tuple[str, str]  # in lower case, with its part of speech
Inventory = dict[Lemma, list[str]]  # senses of each lemma, first sense first


class SenseInstance(NamedTuple):
    """An annotated word or phrase: words `start` to `end` of a sentence."""

    lemma: Lemma
    senses: frozenset[str]
    sentence: int
    start: int
    end: int


Instances = Sequence[SenseInstance]


class AnnotatedText(NamedTuple):
    sentences: list[list[str]]
    instances: list[SenseInstance]


def read_annotated(path: Path) -> AnnotatedText:
    """Reads `X.data.xml` with the senses of `X.gold.key.txt`. Phrases such as `took_place` are split into words."""
    has_suffix = ".data.xml" in path.name
    keys_name = path.name.replace(".data.xml", ".gold.key.txt")
    keys_path = path.with_name(keys_name)
    if not has_suffix or not path.is_file() or not keys_path.is_file():
        needed = keys_path.name if has_suffix else "X.gold.key.txt"
        raise FileNotFoundError(f"{path}: pass X.data.xml or X.data.xml.gz, with {needed} in its folder.")
    senses, key_lines = read_keys(keys_path)
    uses = Counter()
    sentences = []
    instances = []
    for sentence in _xml_root(path).iter("sentence"):
        words = []
        for element in sentence:
            start = len(words)
            text = (element.text or "").strip()
            if text.strip("_"):
                words += text.split("_")
            else:
                words.append(text)
            if element.tag != "instance":
                continue
            for attribute in ("id", "lemma", "pos"):
                if attribute not in element.attrib:
                    raise ValueError(f"{path}: the instance {text!r} has no {attribute!r}; add it, as in X.data.xml.")
            name = element.attrib["id"]
            if not senses.get(name):
                raise ValueError(f"{path}: instance {name} has no sense in {keys_path.name}.")
            uses[name] += 1
            instance = SenseInstance(
                lemma=(element.attrib["lemma"].lower(), element.attrib["pos"]),
                senses=frozenset(senses[name]),
                sentence=len(sentences),
                start=start,
                end=len(words),
            )
            instances.append(instance)
        sentences.append(words)
    for name, count in uses.items():
        if count > 1 and count != len(key_lines[name]):
            raise ValueError(f"{path}: {count} instances have the id {name}; give each its own.")
    if not instances:
        raise ValueError(f"{path} has no <instance> in a <sentence>; pass text as of Raganato et al. (2017).")
    return AnnotatedText(sentences, instances)


def _xml_root(path: Path) -> ElementTree.Element:
    lines = [f"{line}\n" for _, line in numbered_lines(path)]
    try:
        return ElementTree.fromstringlist(lines)
    except ElementTree.ParseError as error:
        raise ValueError(f"{path} is not a complete XML file: {error}.") from error


def read_keys(path: Path) -> tuple[dict[str, list[str]], dict[str, list[int]]]:
    """The senses of each instance, and the lines that say them."""
    senses = {}
    lines = defaultdict(list)
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        name, *keys = line.split()
        before = senses.setdefault(name, keys)
        if set(before) != set(keys):
            first, *_ = lines[name]
            raise ValueError(
                f"{path}, line {number}: line {first} gives {' '.join(before)} to the instance {name}; give each its "
                "own id."
            )
        lines[name].append(number)
    return senses, lines


def read_inventory(path: Path) -> Inventory:
    inventory = {}
    lines = {}
    for number, line, columns in column_lines(path):
        if "\t" in line and len(columns) == 3:
            word, part_of_speech, keys = columns
            lemma = (word.lower(), part_of_speech)
            senses = keys.split()
            if inventory.setdefault(lemma, senses) != senses:
                twice = f"line {lines[lemma]} has other senses of {' '.join(lemma)} (in lower case)"
                raise ValueError(f"{path}, line {number}: {twice}; write the senses of both in one line.")
            lines.setdefault(lemma, number)
        elif line.strip():
            raise ValueError(f"{path}, line {number} is {line!r:.80}; write lemma<TAB>pos<TAB>key key ...")
    return inventory


def instance_vectors(text: AnnotatedText, layers_of_sentences: Iterable[np.ndarray]) -> np.ndarray:
    """The mean over the words of each instance, in each layer and in the average of several layers, with length 1.

    Args:
        layers_of_sentences: `(layers, words, width)` of each sentence.

    Shape: `(instances, layers + 1, width)`, or `(instances, 1, width)` of one layer, float16.
    """
    numbers_of = defaultdict(list)
    for number, instance in enumerate(text.instances):
        numbers_of[instance.sentence].append(number)
    means = np.empty(0, dtype=np.float16)
    for sentence, layers in enumerate(layers_of_sentences):
        if len(layers) > 1:
            layers = np.concatenate([layers, layers.mean(0, keepdims=True)])
        if sentence == 0:
            count, _, width = layers.shape
            means = np.empty((len(text.instances), count, width), dtype=np.float16)
        for number in numbers_of[sentence]:
            instance = text.instances[number]
            words = layers[:, instance.start : instance.end]
            means[number] = normalize(words.mean(1))
    return means


def instances_by_lemma(instances: Instances) -> dict[Lemma, list[int]]:
    numbers = defaultdict(list)
    for number, instance in enumerate(instances):
        numbers[instance.lemma].append(number)
    return numbers


def same_sense(instances: Instances, vectors: np.ndarray, inventory: Inventory, names: list[str]) -> dict[str, Any]:
    """How often the nearest use in another sentence has a sense of the use, by layer.

    Uses of one form are equally near in the token layer. Then the share of them that has a sense of the use counts.
    `chance` is the same for a random other use. `first sense` is how often the use has the first sense of its lemma in
    the inventory; without one, its most frequent sense in these uses counts, as `most frequent sense`.
    """
    hits = np.zeros(len(names))
    chance = 0.0
    with_first = total = lemmas = 0
    for lemma, members in instances_by_lemma(instances).items():
        members = members[:MAX_COMPARED_USES]
        uses = [instances[number] for number in members]
        senses = senses_by_frequency(uses)
        sentences = np.array([use.sentence for use in uses])
        others = sentences[:, None] != sentences
        if len(senses) < 2 or not others.any():
            continue
        agree = np.empty((len(uses), len(uses)), dtype=bool)
        for row, use in enumerate(uses):
            agree[row] = [not use.senses.isdisjoint(other.senses) for other in uses]
        for layer in range(len(names)):
            in_layer = vectors[members, layer].astype(np.float32)
            cosines = np.where(others, in_layer @ in_layer.T, -2)
            nearest = others & (cosines >= cosines.max(1, keepdims=True) - EQUAL_COSINES)
            hits[layer] += _shares(nearest, agree).sum()
        chance += _shares(others, agree).sum()
        first, *_ = inventory.get(lemma) or senses
        with_first += sum(first in use.senses for use in uses)
        total += len(uses)
        lemmas += 1
    if not total:
        raise ValueError("No lemma of --train_file has two senses in two sentences; pass more text.")
    always = "first sense" if inventory else "most frequent sense"
    shares = (hits / total).tolist()
    return {
        "lemmas": lemmas,
        "instances": total,
        "chance": chance / total,
        always: with_first / total,
        **dict(zip(names, shares, strict=True)),
    }


def _shares(chosen: np.ndarray, agree: np.ndarray) -> np.ndarray:
    """In each row, the share of the chosen uses that agree."""
    right = chosen & agree
    return right.sum(1) / chosen.sum(1)


def senses_by_frequency(instances: Instances) -> list[str]:
    """Senses by decreasing frequency; equally frequent senses in the order of their first occurrence."""
    counts = Counter()
    for instance in instances:
        counts.update(sorted(instance.senses))
    return [sense for sense, _ in counts.most_common()]


def sense_averages(instances: Instances, vectors: np.ndarray) -> dict[Lemma, dict[str, np.ndarray]]:
    """The average vector of each sense of each lemma, with length 1. Shape: `(layers + 1, hidden_size)`."""
    averages = defaultdict(dict)
    for instance, vector in zip(instances, vectors, strict=True):
        senses = averages[instance.lemma]
        for sense in instance.senses:
            senses[sense] = senses.get(sense, 0) + vector.astype(np.float32)
    for senses in averages.values():
        for sense, total in senses.items():
            senses[sense] = normalize(total)
    return averages


def disambiguation(
    train: Instances,
    test: Instances,
    averages: dict[Lemma, dict[str, np.ndarray]],
    vectors: np.ndarray,
    inventory: Inventory,
    names: list[str],
) -> dict[str, Any]:
    """Accuracy on the test text, by layer and of two baselines. Any sense of an instance with several is correct.

    Senses with uses of one form are equally near in the token layer. Then the share of them that is correct counts.
    """
    frequent = {}
    for lemma, members in instances_by_lemma(train).items():
        senses = senses_by_frequency([train[number] for number in members])
        frequent[lemma] = senses[0]
    baselines = ["first sense", "most frequent sense"] if inventory else ["most frequent sense"]
    correct = dict.fromkeys(baselines + names, 0.0)
    unseen = 0
    for instance, vector in zip(test, vectors, strict=True):
        lemma = instance.lemma
        first = next(iter(inventory.get(lemma, ())), None)
        has_first = first in instance.senses
        if inventory:
            correct["first sense"] += has_first
        correct["most frequent sense"] += frequent.get(lemma, first) in instance.senses
        if lemma not in averages:
            unseen += 1
            for name in names:
                correct[name] += has_first
            continue
        averages_of_senses = np.stack([*averages[lemma].values()])
        cosines = np.einsum("sld,ld->sl", averages_of_senses, vector.astype(np.float32))
        nearest = cosines >= cosines.max(0) - EQUAL_COSINES
        agree = np.array([sense in instance.senses for sense in averages[lemma]])
        for name, share in zip(names, _shares(nearest.T, agree), strict=True):
            correct[name] += float(share)
    shares = {name: count / len(test) for name, count in correct.items()}
    return {"instances": len(test), "unseen_lemmas": unseen / len(test), **shares}


def uses_of_lemma(lemma: str, instances: Instances) -> list[int]:
    members = []
    for number, instance in enumerate(instances):
        word, _ = instance.lemma
        if word == lemma.lower():
            members.append(number)
    if len(members) < 3:
        raise ValueError(f"--lemma {lemma} has {len(members)} use(s) in --train_file; pass a more frequent lemma.")
    return members


def draw_senses(text: AnnotatedText, vectors: np.ndarray, lemma: str, path: Path) -> bool:
    """Draws the uses of a lemma, its most frequent senses in color; the legend has the use nearest to their average."""
    members = uses_of_lemma(lemma, text.instances)
    uses = [text.instances[number] for number in members]
    points = vectors[members].astype(np.float32)
    groups = {}
    for sense in senses_by_frequency(uses)[:MAX_COLORED_SENSES]:
        rows = [row for row, use in enumerate(uses) if sense in use.senses]
        group = points[rows]
        nearness = group @ group.mean(0)
        typical = uses[rows[nearness.argmax()]]
        words = text.sentences[typical.sentence]
        context = in_context(words, typical.start, typical.end, LEGEND_WORDS)
        groups[f"{context}    ({sense}, {len(rows)} uses)"] = rows
    return draw_map(points, groups, path)
