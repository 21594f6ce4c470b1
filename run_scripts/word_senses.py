"""What a biLM knows of word senses, layer by layer: the paper's Table 5, on text annotated like SemCor.

    python -m modeling_elmo.run_scripts.word_senses --model elmo --train_file train.data.xml \\
        --test_file test.data.xml --sense_inventory inventory.tsv --lemma play --output results/word_senses.json

Files are those of Raganato et al. (2017): `X.data.xml` with its `X.gold.key.txt`, either also with `.gz`. Two figures:

- Disambiguation: an instance gets the sense whose average vector in the training text is nearest (by cosine); lemmas
  that do not occur there get the first sense of the inventory (section 5.3 of the paper).
- Same sense: how often the nearest use of a lemma in another sentence has its sense, over all lemmas of the training
  text with two senses or more. Nothing is trained for it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modeling_elmo.run_scripts.cards.tables import sense_table
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.run_scripts.vectors.embedding import load_model
from modeling_elmo.run_scripts.vectors.neighbors import check_output
from modeling_elmo.run_scripts.vectors.senses import (
    measured,
    read_annotated,
    read_inventory,
    uses_of,
    vectors_of,
    write,
)


@dataclass(kw_only=True)
class SenseArguments:
    model: str = field(metadata={"help": "Folder or Hub name."})
    train_file: str = field(metadata={"help": "Annotated text (X.data.xml) that senses are learned from."})
    test_file: str | None = field(default=None, metadata={"help": "Annotated text to disambiguate."})
    sense_inventory: str | None = field(
        default=None, metadata={"help": "Senses of each lemma, first sense first: `lemma<TAB>pos<TAB>key key ...`."}
    )
    lemma: str | None = field(default=None, metadata={"help": "Lemma whose uses are drawn as a map, by sense."})
    output: str | None = field(
        default=None, metadata={"help": "JSON file for the figures; the map is a .png beside it."}
    )
    device: str | None = field(default=None, metadata={"help": "Default: cuda where there is one, else cpu."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})

    def __post_init__(self):
        check_output(self.output)
        if self.lemma and not self.output:
            raise ValueError(f"--lemma {self.lemma} is for the map, which lies beside --output; pass both.")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parsed = ProgramParser(SenseArguments, description=__doc__).parse(arguments)
    inventory = read_inventory(Path(parsed.sense_inventory)) if parsed.sense_inventory else {}
    texts = [read_annotated(Path(path)) for path in (parsed.train_file, parsed.test_file) if path]
    if parsed.lemma:
        uses_of(parsed.lemma, texts[0].instances)
    model, tokenizer = load_model(parsed.model, parsed.device, parsed.trust_remote_code)
    vectors = [vectors_of(text, model, tokenizer) for text in texts]
    names = ["token layer", *(f"biLSTM {number + 1}" for number in range(model.config.num_hidden_layers)), "average"]
    found = measured([text.instances for text in texts], vectors, inventory, names)
    for split, path in (("train", parsed.train_file), ("test", parsed.test_file)):
        if path:
            found[split]["file"] = Path(path).name
    print(sense_table(found))
    if parsed.output:
        write(found, texts[0].instances, vectors[0][:, -2], parsed.lemma, Path(parsed.output))
    return found


if __name__ == "__main__":
    run(main)
