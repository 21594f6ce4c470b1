"""Measures what each layer knows about word senses: the paper's Table 5, on text annotated like SemCor.

    elmo senses --model elmo --train_file train.data.xml --test_file test.data.xml --sense_inventory inventory.tsv \\
        --lemma play --output results/word_senses.json

The files have the format of Raganato et al. (2017): `X.data.xml` with `X.gold.key.txt`, each also with `.gz`.
The result has two figures:

- Disambiguation: an instance gets the sense whose average vector in the training text is nearest by cosine. Lemmas that
  do not occur there get the first sense of the inventory (section 5.3 of the paper).
- Same sense: how often the nearest use of a lemma in another sentence has the same sense. It covers all lemmas of the
  training text with two senses or more, and nothing is trained for it.

`--lemma` draws a map of the uses of a lemma in the training text, colored by sense, as a .png next to `--output`.

Vectors of another program get rows in the same table, with or without a model: `--write_sentences FOLDER` writes the
sentences of each text, and `--vectors FOLDER` reads that program's vectors. `--word_vectors FILE` has one vector per
word.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modeling_elmo.run_scripts.cards.tables import sense_scores, sense_table, spaced
from modeling_elmo.run_scripts.program.command_line import ProgramParser, given_options, option, print_conclusion, run
from modeling_elmo.run_scripts.program.files import write_json
from modeling_elmo.run_scripts.vectors.layer_sources import LayerSourceArguments, layer_sources, write_sentences
from modeling_elmo.run_scripts.vectors.senses import (
    disambiguation,
    draw_senses,
    instance_vectors,
    read_annotated,
    read_inventory,
    same_sense,
    sense_averages,
    uses_of_lemma,
)

BASELINES = ("chance", "first sense", "most frequent sense")


@dataclass(kw_only=True)
class SenseArguments(LayerSourceArguments):
    train_file: str = option(..., "Annotated text (X.data.xml), used to learn the senses.")
    test_file: str | None = option(None, "Annotated text (X.data.xml) to disambiguate.")
    sense_inventory: str | None = option(None, "Senses, first sense first, in lines lemma<TAB>pos<TAB>key key ...")
    lemma: str | None = option(None, "Lemma whose uses are drawn as a map, colored by sense: a .png next to --output.")

    def __post_init__(self):
        super().__post_init__()
        if self.lemma and not self.output:
            raise ValueError(f"--lemma {self.lemma} draws a map next to --output; pass both.")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parsed = ProgramParser(SenseArguments, description=__doc__).parse(arguments)
    inventory = read_inventory(Path(parsed.sense_inventory)) if parsed.sense_inventory else {}
    files = {"train": parsed.train_file}
    if parsed.test_file:
        files["test"] = parsed.test_file
    texts = {split: read_annotated(Path(path)) for split, path in files.items()}
    if parsed.write_sentences:
        return write_sentences(parsed.write_sentences, files, {split: texts[split].sentences for split in texts})
    train = texts["train"].instances
    if parsed.lemma:
        uses_of_lemma(parsed.lemma, train)  # a mistake shows before hours of work
    result: dict[str, Any] = {}
    for split, figure in (("train", "same_sense"), ("test", "disambiguation")):
        if split in texts:
            result[split] = {"instances": len(texts[split].instances), "file": Path(files[split]).name}
            result[figure] = {}
    for source in layer_sources(parsed, files):
        vectors = {}
        for split, text in texts.items():
            vectors[split] = instance_vectors(text, source.read(text.sentences, files[split]))
        count = vectors["train"].shape[1]  # with the average, which comes last
        names = source.names(count) if count == 1 else [*source.names(count - 1), source.average]
        if parsed.lemma and not result["same_sense"]:
            top_layer = vectors["train"][:, max(0, count - 2)]
        result["same_sense"] |= same_sense(train, vectors["train"], inventory, names)
        if "test" in texts:
            averages = sense_averages(train, vectors["train"])
            test = texts["test"].instances
            result["disambiguation"] |= disambiguation(train, test, averages, vectors["test"], inventory, names)
    if parsed.lemma:
        result["map"] = {"lemma": parsed.lemma}
    print(sense_table(result))
    unseen = result.get("disambiguation", {}).get("unseen_lemmas")
    if unseen and not inventory:
        print(
            f"{unseen:.1%} of the uses in the test text have a lemma that the training text lacks. Without "
            "--sense_inventory they count as wrong."
        )
    if parsed.output:
        output = Path(parsed.output)
        write_json(output, result)
        if parsed.lemma:
            draw_senses(texts["train"], top_layer, parsed.lemma, output.with_suffix(".png"))
    print_conclusion(best_sense_layer(result), *next_senses_command(parsed))
    return result


def best_sense_layer(result: dict[str, Any]) -> str:
    """The best row of the table in its last column, compared with the baselines."""
    measure, scores = list(sense_scores(result).items())[-1]
    baselines = {name: scores[name] for name in BASELINES if name in scores}
    name, score = max((row for row in scores.items() if row[0] not in baselines), key=lambda row: row[1])
    others = ", ".join(f"{baseline} has {100 * value:.1f}" for baseline, value in baselines.items())
    return f"{spaced(measure).capitalize()} is best with {name}, {100 * score:.1f} %; without vectors, {others}."


def next_senses_command(parsed: SenseArguments) -> list[str]:
    """The same with what is missing: a test text, or a map."""
    words = ["elmo", "senses", *given_options(parsed)]
    if parsed.test_file is None:
        return [*words, "--test_file", "TEST"]
    if parsed.lemma is None:
        output = [] if parsed.output else ["--output", "senses.json"]
        return [*words, "--lemma", "LEMMA", *output]
    return ["elmo", "neighbors", "TEXT", "--word", parsed.lemma, "--model", parsed.model or "MODEL"]


if __name__ == "__main__":
    run(main)
