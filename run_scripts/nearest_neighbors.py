"""What the uses of a word are near to: the paper's Table 4, with a map of all uses.

    python -m modeling_elmo.run_scripts.nearest_neighbors heldout.txt --word play --model elmo

Uses are drawn by `--seed`, not picked; with each come the nearest ones in other sentences, by the cosine of their
vectors. `--output neighbors.json` keeps the table, and the map beside it: in `results/` of a checkpoint, for its card.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import HfArgumentParser

if __package__ in (None, ""):  # run by path from a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modeling_elmo.run_scripts.embed import embed_sentences, load_model
from modeling_elmo.run_scripts.lm_corpus import Corpus
from modeling_elmo.run_scripts.task_results import COLORS, MARKERS, new_figure
from modeling_elmo.run_scripts.text_data import write_json
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter

NAMED_LAYERS = ("top", "average", "mixed")
WORDS_SHOWN = 8  # on each side of a use


@dataclass(kw_only=True)
class NeighborArguments:
    word: str = field(metadata={"help": "The word; for several forms a regular expression: 'plays?|played'."})
    model: str = field(metadata={"help": "Folder or Hub name."})
    layer: str = field(default="top", metadata={"help": "top, average, mixed, or a number: 0 is the token layer."})
    queries: int = field(default=4, metadata={"help": "Uses to look at."})
    top_k: int = field(default=2, metadata={"help": "Nearest uses to show of each."})
    max_uses: int = field(default=2000, metadata={"help": "Uses to compare; of more, so many are drawn."})
    seed: int = field(default=0, metadata={"help": "Which uses are drawn."})
    raw_text: bool = field(default=False, metadata={"help": "Let the tokenizer split lines, not white space."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the table; the map is a .png beside it."})
    device: str | None = field(default=None, metadata={"help": "Default: cuda where there is one, else cpu."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})

    def __post_init__(self):
        for name in ("queries", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: pass at least 1.")
        if self.max_uses <= self.top_k:
            raise ValueError(f"--max_uses {self.max_uses}: pass more than --top_k {self.top_k}.")
        check_output(self.output)
        try:
            re.compile(self.word)
        except re.error as error:
            raise ValueError(
                f"--word {self.word} is no regular expression ({error}); put \\ before signs such as . ( *"
            ) from None


class Use(NamedTuple):
    """A word in its sentence."""

    words: Sequence[str]
    place: int

    def __str__(self) -> str:
        left = self.words[max(0, self.place - WORDS_SHOWN) : self.place]
        right = self.words[self.place + 1 : self.place + 1 + WORDS_SHOWN]
        return " ".join([*left, f"[{self.words[self.place]}]", *right])


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = HfArgumentParser(NeighborArguments, description="What the uses of a word are near to.")
    parser.add_argument("text", nargs="+", help="files, folders or patterns of text, a sentence a line")
    parsed, others = parser.parse_args_into_dataclasses(arguments)
    model, tokenizer = load_model(parsed.model, parsed.device, parsed.trust_remote_code)
    check_layer(parsed.layer, model.config.num_hidden_layers)
    splitter = TextSplitter(tokenizer.pre_tokenization if parsed.raw_text else "whitespace")
    texts = (text for _, text in Corpus.from_files(others.text).sentences(shuffle_files=False))
    words = (splitter.words(text) if isinstance(text, str) else text for text in texts)
    uses, generator = list(find_uses(words, parsed.word)), np.random.default_rng(parsed.seed)
    check_number(len(uses), parsed)
    there, drawn = len(uses), sorted(generator.permutation(len(uses))[: parsed.max_uses])
    uses = [uses[number] for number in drawn]
    vectors = normalized(vectors_of_uses(uses, model, tokenizer, parsed.layer))
    queries = generator.permutation(len(uses))[: parsed.queries].tolist()
    nearest = {query: neighbors(vectors, uses, query, parsed.top_k) for query in queries}
    found = {
        "word": parsed.word,
        "layer": parsed.layer,
        "text": [Path(name).name for name in others.text],
        "uses": len(uses),
        "uses_in_text": there,
        "seed": parsed.seed,
        "queries": [
            {"use": str(uses[query]), "neighbors": [[round(cosine, 3), str(uses[near])] for near, cosine in pairs]}
            for query, pairs in nearest.items()
        ],
    }
    print(shown_neighbors(found))
    if parsed.output:
        output = Path(parsed.output)
        write_json(output, found)
        groups = {str(uses[query]): [query, *(near for near, _ in pairs)] for query, pairs in nearest.items()}
        draw_map(vectors, groups, output.with_suffix(".png"))
    return found


def check_output(path: str | None):
    if path is not None and Path(path).suffix != ".json":
        raise ValueError(f"--output {path}: pass a file that ends in .json; the map is written beside it.")


def check_number(found: int, arguments: NeighborArguments):
    if found <= arguments.top_k:
        raise ValueError(
            f"The text has {found} use(s) of {arguments.word!r}, and --top_k {arguments.top_k} are to be shown beside "
            "one: pass more text, another --word (a regular expression for its forms), or a smaller --top_k."
        )


def find_uses(sentences: Iterable[Sequence[str]], word: str) -> Iterator[Use]:
    """Every use, in sentences that differ: texts repeat headings and phrases whole."""
    pattern, seen = re.compile(word), set()
    for words in sentences:
        places = [place for place, each in enumerate(words) if pattern.fullmatch(each)]
        if places and tuple(words) not in seen:
            seen.add(tuple(words))
            yield from (Use(words, place) for place in places)


def check_layer(layer: str, num_layers: int):
    if layer not in (*NAMED_LAYERS, *map(str, range(num_layers + 1))):
        raise ValueError(f"--layer {layer}: pass {', '.join(NAMED_LAYERS)}, or a number up to {num_layers}.")


def vectors_of_uses(uses: Sequence[Use], model, tokenizer, layer: str) -> np.ndarray:
    """Shape: `(uses, hidden_size)`."""
    named = layer in NAMED_LAYERS
    embedded = embed_sentences((use.words for use in uses), model, tokenizer, layer if named else "all")
    vectors = [vectors if named else vectors[int(layer)] for _, vectors in embedded]
    return np.stack([each[use.place] for each, use in zip(vectors, uses, strict=True)])


def normalized(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def neighbors(vectors: np.ndarray, uses: Sequence[Use], query: int, top_k: int) -> list[tuple[int, float]]:
    """The nearest uses in other sentences, with their cosines.

    Args:
        vectors: `(uses, hidden_size)`, of length 1.
    """
    cosines = vectors @ vectors[query]
    others = (near for near in (-cosines).argsort(kind="stable") if uses[near].words is not uses[query].words)
    return [(int(near), float(cosines[near])) for near, _ in zip(others, range(top_k), strict=False)]


def shown_neighbors(found: dict[str, Any]) -> str:
    lines = []
    for query in found["queries"]:
        lines += ["", query["use"], *(f"  {cosine:.3f}  {use}" for cosine, use in query["neighbors"])]
    return "\n".join(lines[1:])


def draw_map(vectors: np.ndarray, groups: Mapping[str, Sequence[int]], path: Path) -> bool:
    """All vectors in the plane in which they differ most (principal components), those of groups in colour.

    Args:
        groups: numbers of vectors by label. Labels that the font lacks letters for become numbers.
    """
    figure = new_figure(path, 8, 5 + 0.2 * len(groups))
    if figure is None:
        return False
    centred = vectors - vectors.mean(0)
    _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
    points, shares = centred @ axes[:2].T, (sizes**2 / max((sizes**2).sum(), 1e-12))[:2]
    axis = figure.subplots()
    axis.scatter(*points.T, s=10, color="0.8", label="_")
    for number, (label, members) in enumerate(groups.items()):
        look = {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}
        label = label.replace("$", r"\$") if can_draw(label) else f"query {number + 1}"
        axis.scatter(*points[list(members)].T, s=36, label=label, **look)
    axis.set_xlabel(f"first principal component ({shares[0]:.0%} of the variance)")
    axis.set_ylabel(f"second ({shares[1]:.0%})")
    figure.legend(loc="outside lower center", fontsize=8)
    figure.savefig(path)
    return True


def can_draw(text: str) -> bool:
    """Whether matplotlib's font has these letters; it has no Hangul, for one."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    return all(font.get_char_index(ord(letter)) for letter in text)


if __name__ == "__main__":
    main()
