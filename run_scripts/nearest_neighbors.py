"""Finds the uses of a word that are most alike: the paper's Table 4, with a map of all uses.

    elmo neighbors heldout.txt --word play --model elmo

A few uses are drawn at random (`--seed`). Each is shown with its nearest uses in other sentences, by the cosine of
their vectors. `--word_vectors glove.txt` also shows the nearest words by vectors without a context, one for each word.
`--output neighbors.json` writes the table, and a map as a .png beside it. In the folder `results/` of a
checkpoint, both appear on its card.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modeling_elmo.run_scripts.cards.figures import draw_map
from modeling_elmo.run_scripts.pretraining.corpus import Corpus
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.run_scripts.program.files import write_json
from modeling_elmo.run_scripts.vectors.embedding import load_model_and_tokenizer
from modeling_elmo.run_scripts.vectors.neighbors import (
    check_json_output,
    check_layer,
    find_uses,
    format_neighbors,
    nearest_uses,
    nearest_words,
    normalize,
    sample_uses,
    use_vectors,
)
from modeling_elmo.run_scripts.vectors.word_vectors import read_word_vectors
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter


@dataclass(kw_only=True)
class NeighborArguments:
    word: str = field(metadata={"help": "Word, or a regular expression for several forms: 'plays?|played'."})
    model: str = field(metadata={"help": "Folder or Hub name of an ELMo model."})
    word_vectors: str | None = field(
        default=None,
        metadata={
            "help": "File of word vectors, in the text format of GloVe, word2vec or fastText: the nearest words of its "
            "first word that fits --word are shown, too."
        },
    )
    layer: str = field(
        default="top", metadata={"help": "Layer: top, average, mixed, or a number (0 is the token layer)."}
    )
    queries: int = field(default=4, metadata={"help": "Number of uses to show with their neighbors."})
    top_k: int = field(default=2, metadata={"help": "Number of neighbors per use."})
    max_uses: int = field(default=2000, metadata={"help": "Maximum number of uses to compare, drawn at random."})
    seed: int = field(default=0, metadata={"help": "Seed of the drawn uses."})
    raw_text: bool = field(
        default=False, metadata={"help": "Split lines with the model's tokenizer. Default: at spaces."}
    )
    output: str | None = field(default=None, metadata={"help": "JSON file for the table; the map is a .png beside it."})
    device: str | None = field(default=None, metadata={"help": "Device. Default: cuda if available, else cpu."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code from the model's folder."})

    def __post_init__(self):
        for name in ("queries", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: pass at least 1.")
        if self.max_uses <= self.top_k:
            raise ValueError(f"--max_uses {self.max_uses}: pass more than --top_k {self.top_k}.")
        check_json_output(self.output)
        try:
            re.compile(self.word)
        except re.error as error:
            raise ValueError(
                f"--word {self.word} is not a regular expression ({error}); put \\ before signs such as . ( *"
            ) from None


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = ProgramParser(NeighborArguments, description=__doc__)
    parser.add_argument("text", nargs="+", help="Text files, folders or patterns, one sentence per line.")
    parsed, positional = parser.parse(arguments)
    model, tokenizer = load_model_and_tokenizer(parsed.model, parsed.device, parsed.trust_remote_code)
    check_layer(parsed.layer, model.config.num_hidden_layers)
    splitter = TextSplitter(tokenizer.pre_tokenization if parsed.raw_text else "whitespace")
    texts = (text for _, text in Corpus.from_files(positional.text).sentences(shuffle_files=False))
    words = (splitter.words(text) if isinstance(text, str) else text for text in texts)
    all_uses = list(find_uses(words, parsed.word))
    if len(all_uses) <= parsed.top_k:
        raise ValueError(
            f"The text has {len(all_uses)} use(s) of {parsed.word!r}, too few for --top_k {parsed.top_k}. Pass more "
            "text, another --word (a regular expression for its forms), or a smaller --top_k."
        )
    nearest_by_file = [] if parsed.word_vectors is None else words_in_file(parsed.word_vectors, parsed.word)
    uses, queries = sample_uses(all_uses, parsed.max_uses, parsed.queries, parsed.seed)
    vectors = normalize(use_vectors(uses, model, tokenizer, parsed.layer))
    nearest = {query: nearest_uses(vectors, uses, query, parsed.top_k) for query in queries}
    found = {
        "word": parsed.word,
        "layer": parsed.layer,
        "text": [Path(name).name for name in positional.text],
        "uses": len(uses),
        "uses_in_text": len(all_uses),
        "seed": parsed.seed,
        **({"word_vectors": nearest_by_file} if nearest_by_file else {}),
        "queries": [
            {"use": str(uses[query]), "neighbors": [[round(cosine, 3), str(uses[near])] for near, cosine in pairs]}
            for query, pairs in nearest.items()
        ],
    }
    print(format_neighbors(found))
    if parsed.output:
        output = Path(parsed.output)
        write_json(output, found)
        groups = {str(uses[query]): [query, *(near for near, _ in pairs)] for query, pairs in nearest.items()}
        draw_map(vectors, groups, output.with_suffix(".png"))
    return found


def words_in_file(file: str, word: str) -> list[tuple[str, float]]:
    """The first word of a file that fits a regular expression, with cosine 1, and its nearest words with theirs."""
    found = read_word_vectors(file)
    row = next((row for row, each in enumerate(found.words) if re.fullmatch(word, each)), None)
    if row is None:
        raise ValueError(f"--word_vectors {file} has no word that fits {word!r}; pass another file or --word.")
    return nearest_words(found.words, normalize(found.vectors), row)


if __name__ == "__main__":
    run(main)
