"""Word senses: annotated text, nearest-neighbor disambiguation, and tables of both figures."""

import gzip
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from tqdm.auto import tqdm

from modeling_elmo.run_scripts.cards.figures import draw_map
from modeling_elmo.run_scripts.program.files import numbered_lines, write_json
from modeling_elmo.run_scripts.vectors.embedding import embed_sentences
from modeling_elmo.run_scripts.vectors.neighbors import normalized

MOST_SENSES = 6  # of a map, in colour

MOST_INSTANCES = 2000  # of a lemma that are compared with one another


class Instance(NamedTuple):
    """An annotated word or phrase: words `start` to `end` of a sentence."""

    lemma: tuple[str, str]  # with its part of speech
    senses: frozenset[str]
    sentence: int
    start: int
    end: int


class Annotated(NamedTuple):
    sentences: list[list[str]]
    instances: list[Instance]


def measured(
    instances: Sequence[Sequence[Instance]],
    vectors: Sequence[np.ndarray],
    inventory: dict[tuple[str, str], list[str]],
    names: list[str],
) -> dict[str, Any]:
    """Both figures; disambiguation, where there is a second text, which is disambiguated by the first."""
    found: dict[str, Any] = {
        "train": {"instances": len(instances[0])},
        "same_sense": same_sense(instances[0], vectors[0], inventory, names),
    }
    if len(instances) > 1:
        senses = sense_averages(instances[0], vectors[0])
        train, test = instances
        found["test"] = {"instances": len(test)}
        found["disambiguation"] = disambiguation(train, test, senses, vectors[1], inventory, names)
    return found


def write(found: dict[str, Any], instances: Sequence[Instance], top: np.ndarray, lemma: str | None, output: Path):
    """The figures, and beside them the map of a lemma in the top layer `(instances, hidden_size)`."""
    if lemma:
        found["map"] = {"lemma": lemma}
    write_json(output, found)
    if lemma:
        draw_senses(instances, top, lemma, output.with_suffix(".png"))


def read_annotated(path: Path) -> Annotated:
    """The sentences of `X.data.xml`, with the senses that `X.gold.key.txt` has; phrases such as `took_place` are split.

    Raises:
        FileNotFoundError: one of the two is missing.
        ValueError: an instance has no sense, or the file is not of this format.
    """
    keys_path = path.with_name(path.name.replace(".data.xml", ".gold.key.txt"))
    if ".data.xml" not in path.name or not path.is_file() or not keys_path.is_file():
        raise FileNotFoundError(f"{path}: pass a file X.data.xml (or X.data.xml.gz) with X.gold.key.txt beside it.")
    senses = {name: keys for name, *keys in map(str.split, lines_of(keys_path))}
    found = Annotated([], [])
    for sentence in root_of(path).iter("sentence"):
        words: list[str] = []
        for element in sentence:
            start, text = len(words), (element.text or "").strip()
            words += text.split("_") if text.strip("_") else [text]
            if element.tag == "instance":
                name = element.attrib["id"]
                if not senses.get(name):
                    raise ValueError(f"{path}: instance {name} has no sense in {keys_path.name}.")
                lemma = element.attrib["lemma"].lower(), element.attrib["pos"]
                keys = frozenset(senses[name])
                found.instances.append(Instance(lemma, keys, len(found.sentences), start, len(words)))
        found.sentences.append(words)
    if not found.instances:
        raise ValueError(f"{path} has no <instance> in a <sentence>; pass text annotated as by Raganato et al. (2017).")
    return found


def root_of(path: Path) -> ElementTree.Element:
    packed = gzip.open if path.suffix == ".gz" else open
    try:
        with packed(path, "rb") as file:
            return ElementTree.parse(file).getroot()
    except (ElementTree.ParseError, OSError, EOFError) as error:
        raise ValueError(f"{path} is not a complete XML file: {error}.") from error


def lines_of(path: Path) -> Iterator[str]:
    return (line for _, line in numbered_lines(path) if line.strip())


def read_inventory(path: Path) -> dict[tuple[str, str], list[str]]:
    found = {}
    for number, line in enumerate(lines_of(path), start=1):
        fields = line.rstrip("\n").split("\t")
        if len(fields) != 3:
            raise ValueError(f"{path}:{number}: {line.strip()!r:.80}; a line is lemma<TAB>pos<TAB>key key ...")
        found[fields[0].lower(), fields[1]] = fields[2].split()
    return found


def vectors_of(text: Annotated, model, tokenizer) -> np.ndarray:
    """The mean over the words of each instance, of length 1, in each layer and in their average.

    Shape: `(instances, layers + 1, hidden_size)`, float16.
    """
    embedded = embed_sentences(tqdm(text.sentences, unit=" sentences"), model, tokenizer, layers="all")
    shape = (len(text.instances), model.config.num_hidden_layers + 2, model.config.hidden_size)
    found, number = np.empty(shape, dtype=np.float16), 0
    for sentence, (_, layers) in enumerate(embedded):
        layers = np.concatenate([layers, layers.mean(0, keepdims=True)])
        while number < len(text.instances) and text.instances[number].sentence == sentence:
            instance = text.instances[number]
            found[number] = normalized(layers[:, instance.start : instance.end].mean(1))
            number += 1
    return found


def by_lemma(instances: Sequence[Instance]) -> dict[tuple[str, str], list[int]]:
    found = defaultdict(list)
    for number, instance in enumerate(instances):
        found[instance.lemma].append(number)
    return found


def same_sense(
    instances: Sequence[Instance], vectors: np.ndarray, inventory: dict[tuple[str, str], list[str]], names: list[str]
) -> dict[str, Any]:
    """How often the nearest use in another sentence has one of the senses of a use, by layer.

    Where several are equally near, as uses of one form are in the token layer, the share of them that do. `chance` is
    that of any other use, `first sense` how often the use itself has the first sense of its lemma.
    """
    hits, chance, first, total, lemmas = np.zeros(len(names)), 0.0, 0, 0, 0
    for lemma, members in by_lemma(instances).items():
        members = members[:MOST_INSTANCES]
        found = [instances[number] for number in members]
        if len({sense for each in found for sense in each.senses}) < 2 or len({each.sentence for each in found}) < 2:
            continue
        agree = np.array([[not a.senses.isdisjoint(b.senses) for b in found] for a in found])
        others = np.array([[a.sentence != b.sentence for b in found] for a in found])
        for layer in range(len(names)):
            each = vectors[members, layer].astype(np.float32)
            cosines = np.where(others, each @ each.T, -2)
            nearest = others & (cosines >= cosines.max(1, keepdims=True) - 1e-3)  # float16 has no more digits
            hits[layer] += ((nearest & agree).sum(1) / nearest.sum(1)).sum()
        chance += ((others & agree).sum(1) / others.sum(1)).sum()
        first += sum((inventory.get(lemma) or most_frequent(found))[0] in each.senses for each in found)
        total, lemmas = total + len(found), lemmas + 1
    if not total:
        raise ValueError("No lemma of the training text has two senses in two sentences: pass more of it.")
    shares = {name: float(value / total) for name, value in zip(names, hits, strict=True)}
    return {"lemmas": lemmas, "instances": total, "chance": chance / total, "first sense": first / total, **shares}


def most_frequent(instances: Sequence[Instance]) -> list[str]:
    """Senses by falling frequency, of equally frequent ones the first that occurs first."""
    return [sense for sense, _ in Counter(sense for each in instances for sense in sorted(each.senses)).most_common()]


def sense_averages(instances: Sequence[Instance], vectors: np.ndarray) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    """The average of the vectors of each sense, of length 1. Shape of each: `(layers + 1, hidden_size)`."""
    sums: dict[tuple[str, str], dict[str, np.ndarray]] = defaultdict(dict)
    for instance, each in zip(instances, vectors, strict=True):
        for sense in instance.senses:
            known = sums[instance.lemma].get(sense)
            sums[instance.lemma][sense] = each.astype(np.float32) if known is None else known + each
    return {lemma: {sense: normalized(total) for sense, total in senses.items()} for lemma, senses in sums.items()}


def disambiguation(
    train: Sequence[Instance],
    test: Sequence[Instance],
    senses: dict[tuple[str, str], dict[str, np.ndarray]],
    vectors: np.ndarray,
    inventory: dict[tuple[str, str], list[str]],
    names: list[str],
) -> dict[str, Any]:
    """Accuracy on the test text, by layer and of two baselines; an instance with several senses may get any of them."""
    frequent = {
        lemma: most_frequent([train[number] for number in members])[0] for lemma, members in by_lemma(train).items()
    }
    right, unseen = Counter(), 0
    for instance, each in zip(test, vectors, strict=True):
        first = next(iter(inventory.get(instance.lemma, ())), None)
        if inventory:
            right["first sense"] += first in instance.senses
        right["most frequent sense"] += frequent.get(instance.lemma, first) in instance.senses
        known = senses.get(instance.lemma)
        if known is None:
            unseen += 1
            right.update(dict.fromkeys(names, int(first in instance.senses)))
            continue
        cosines = np.einsum("sld,ld->sl", np.stack(list(known.values())), each.astype(np.float32))
        for name, best in zip(names, cosines.argmax(0), strict=True):
            right[name] += list(known)[best] in instance.senses
    baselines = ("first sense", "most frequent sense")[not inventory :]
    shares = {name: right[name] / len(test) for name in (*baselines, *names)}
    return {"instances": len(test), "unseen_lemmas": unseen / len(test), **shares}


def uses_of(lemma: str, instances: Sequence[Instance]) -> list[int]:
    members = [number for number, instance in enumerate(instances) if instance.lemma[0] == lemma.lower()]
    if len(members) < 3:
        raise ValueError(
            f"--lemma {lemma}: {len(members)} use(s) in the training text; pass one that is frequent there."
        )
    return members


def draw_senses(instances: Sequence[Instance], vectors: np.ndarray, lemma: str, path: Path) -> bool:
    """A map of the uses of a lemma, whatever its part of speech, its most frequent senses in colour."""
    members = uses_of(lemma, instances)
    found = [instances[number] for number in members]
    groups = {
        f"{sense} ({sum(sense in each.senses for each in found)})": [
            place for place, each in enumerate(found) if sense in each.senses
        ]
        for sense in most_frequent(found)[:MOST_SENSES]
    }
    return draw_map(vectors[members].astype(np.float32), groups, path)
