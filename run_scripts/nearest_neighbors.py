"""What the uses of a word are near to: the paper's Table 4, with a map of all uses.

    python -m modeling_elmo.run_scripts.nearest_neighbors heldout.txt --word play --model elmo

Uses are drawn by `--seed`, not picked; with each come the nearest ones in other sentences, by the cosine of their
vectors. `--output neighbors.json` keeps the table, and the map beside it: in `results/` of a checkpoint, for its card.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import HfArgumentParser

from modeling_elmo.run_scripts.cards.figures import draw_map
from modeling_elmo.run_scripts.pretraining.corpus import Corpus
from modeling_elmo.run_scripts.program.command_line import run
from modeling_elmo.run_scripts.program.files import write_json
from modeling_elmo.run_scripts.vectors.embedding import load_model
from modeling_elmo.run_scripts.vectors.neighbors import (
    check_layer,
    check_output,
    find_uses,
    neighbors,
    normalized,
    shown_neighbors,
    vectors_of_uses,
)
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter


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


def check_number(found: int, arguments: NeighborArguments):
    if found <= arguments.top_k:
        raise ValueError(
            f"The text has {found} use(s) of {arguments.word!r}, and --top_k {arguments.top_k} are to be shown beside "
            "one: pass more text, another --word (a regular expression for its forms), or a smaller --top_k."
        )


if __name__ == "__main__":
    run(main)
