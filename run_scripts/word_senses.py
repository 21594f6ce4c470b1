"""Measures what each layer knows of word senses: the paper's Table 5, on text annotated like SemCor.

    elmo senses --model elmo --train_file train.data.xml --test_file test.data.xml --sense_inventory inventory.tsv \\
        --lemma play --output results/word_senses.json

The files have the format of Raganato et al. (2017): `X.data.xml` with `X.gold.key.txt` beside it, each also with `.gz`.
The result has two figures:

- Disambiguation: an instance gets the sense whose average vector in the training text is nearest by cosine. Lemmas that
  do not occur there get the first sense of the inventory (section 5.3 of the paper).
- Same sense: how often the nearest use of a lemma in another sentence has the same sense. It covers all lemmas of the
  training text with two senses or more, and nothing is trained for it.

`--lemma` draws a map of the uses of a lemma in the training text, colored by sense, as a .png beside `--output`.

Vectors from elsewhere stand in the same table: `--write_sentences FOLDER` writes the sentences of each text for another
program, and `--vectors FOLDER` reads what it made of them. `--word_vectors FILE` has one vector per word.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from modeling_elmo.run_scripts.cards.tables import layer_names, sense_table
from modeling_elmo.run_scripts.fine_tuning.word_vectors import read_word_vectors
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.run_scripts.program.files import write_json, write_lines
from modeling_elmo.run_scripts.vectors.embedding import embed_sentences, load_model_and_tokenizer
from modeling_elmo.run_scripts.vectors.neighbors import check_json_output
from modeling_elmo.run_scripts.vectors.senses import (
    AnnotatedText,
    draw_senses,
    instance_vectors,
    measure_senses,
    read_annotated,
    read_inventory,
    static_layers,
    stored_layers,
    text_name,
    uses_of_lemma,
)


@dataclass(kw_only=True)
class SenseArguments:
    model: str | None = field(default=None, metadata={"help": "Folder or Hub name of an ELMo model."})
    vectors: str | None = field(
        default=None,
        metadata={
            "help": "Folder with vectors from elsewhere, instead of --model: X.hdf5 or X.npz for X.data.xml, with an "
            "array (layers, words, width) or (words, width) for each sentence, under its number from 0."
        },
    )
    word_vectors: str | None = field(
        default=None,
        metadata={"help": "File of word vectors, in the text format of GloVe, instead of --model."},
    )
    write_sentences: str | None = field(
        default=None,
        metadata={
            "help": "Folder for the sentences, and nothing else: X.txt for X.data.xml, a line per sentence, with a "
            "space between words."
        },
    )
    train_file: str = field(metadata={"help": "Annotated text (X.data.xml), used to learn the senses."})
    test_file: str | None = field(default=None, metadata={"help": "Annotated text (X.data.xml) to disambiguate."})
    sense_inventory: str | None = field(
        default=None, metadata={"help": "Senses of each lemma, first sense first: `lemma<TAB>pos<TAB>key key ...`."}
    )
    lemma: str | None = field(default=None, metadata={"help": "Lemma whose uses are drawn as a map, colored by sense."})
    output: str | None = field(
        default=None, metadata={"help": "JSON file for the figures; the map is a .png beside it."}
    )
    device: str | None = field(default=None, metadata={"help": "Device. Default: cuda if available, else cpu."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code from the model's folder."})

    def __post_init__(self):
        check_json_output(self.output)
        if self.lemma and not self.output:
            raise ValueError(f"--lemma {self.lemma} draws a map beside --output; pass both.")
        ways = ("model", "vectors", "word_vectors", "write_sentences")
        given = [f"--{name}" for name in ways if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"Received {' and '.join(given) or 'no vectors'}; pass one of --model, --vectors, --word_vectors and "
                "--write_sentences."
            )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parsed = ProgramParser(SenseArguments, description=__doc__).parse(arguments)
    inventory = read_inventory(Path(parsed.sense_inventory)) if parsed.sense_inventory else {}
    files = {"train": parsed.train_file, "test": parsed.test_file}
    texts = {split: read_annotated(Path(path)) for split, path in files.items() if path}
    if parsed.write_sentences:
        return {split: write_text(Path(parsed.write_sentences), files[split], text) for split, text in texts.items()}
    instances = {split: text.instances for split, text in texts.items()}
    if parsed.lemma:
        uses_of_lemma(parsed.lemma, instances["train"])  # a mistake shows before hours of work
    layers, names = layers_of_sentences(parsed)
    vectors = {split: instance_vectors(text, layers(text.sentences, files[split])) for split, text in texts.items()}
    found = measure_senses(instances, vectors, inventory, names or numbered_layers(vectors))
    for split in texts:
        found[split]["file"] = Path(files[split]).name
    if parsed.lemma:
        found["map"] = {"lemma": parsed.lemma}
    print(sense_table(found))
    if parsed.output:
        output = Path(parsed.output)
        write_json(output, found)
        if parsed.lemma:
            top_layer = vectors["train"][:, -2 if vectors["train"].shape[1] > 1 else 0]  # the last is the average
            draw_senses(texts["train"], top_layer, parsed.lemma, output.with_suffix(".png"))
    return found


def layers_of_sentences(parsed: SenseArguments) -> tuple[Callable[[list[list[str]], str], Iterator[np.ndarray]], list]:
    """A function of sentences and their file that yields the layers of each; and the names of layers, if known."""
    if parsed.vectors is not None:
        return partial(stored_layers, Path(parsed.vectors)), []
    if parsed.word_vectors is not None:
        found = read_word_vectors(parsed.word_vectors)
        rows = dict(zip(found.words, found.vectors, strict=True))
        return lambda sentences, _: static_layers(tqdm(sentences, unit=" sentences"), rows), ["word vectors"]
    model, tokenizer = load_model_and_tokenizer(str(parsed.model), parsed.device, parsed.trust_remote_code)

    def computed(sentences, _) -> Iterator[np.ndarray]:
        bar = tqdm(sentences, unit=" sentences")
        return (layers for _, layers in embed_sentences(bar, model, tokenizer, layers="all"))

    return computed, [*layer_names(model.config.num_hidden_layers + 1), "average"]


def numbered_layers(vectors: dict[str, np.ndarray]) -> list[str]:
    """Names for layers from elsewhere."""
    count = vectors["train"].shape[1]
    return ["vectors"] if count == 1 else [*(f"layer {number}" for number in range(count - 1)), "average"]


def write_text(folder: Path, file: str, text: AnnotatedText) -> str:
    path = folder / f"{text_name(file)}.txt"
    write_lines(path, map(" ".join, text.sentences))
    print(f"{path}: {len(text.sentences):,} sentences")
    return str(path)


if __name__ == "__main__":
    run(main)
