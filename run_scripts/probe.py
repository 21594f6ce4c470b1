"""Measures what each layer knows of the tags of words, such as parts of speech: the paper's Table 6.

    elmo probe --model elmo --train_file train.conllu --test_file test.conllu --output results/probe.json

For each layer, a linear classifier learns the tag of a word from the vector of the word alone: logistic regression,
which has no seed. For comparison, each word gets its most frequent tag of the training text. Tags that mark entities,
such as BIO, are scored by the F1 of entities, other tags by accuracy.

Vectors from elsewhere stand in the same table, alone or beside those of a model: `--write_sentences FOLDER` writes the
sentences of each text for another program, and `--vectors FOLDER` reads what it made of them. `--word_vectors FILE` has
one vector per word.
"""

from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from modeling_elmo.run_scripts.cards.tables import probe_table
from modeling_elmo.run_scripts.fine_tuning.metrics import tagging_scores
from modeling_elmo.run_scripts.fine_tuning.probing import flat, most_frequent_tags, probe_layer
from modeling_elmo.run_scripts.fine_tuning.tasks.tagging import Tagging, TaggingDataArguments
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.run_scripts.program.files import write_json
from modeling_elmo.run_scripts.vectors.layer_sources import LayerSourceArguments, layer_sources, write_sentences


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = ProgramParser(LayerSourceArguments, TaggingDataArguments, description=__doc__)
    parsed, data_arguments = parser.parse(arguments)
    task = Tagging(data_arguments)
    task.check_splits()
    words = {split: list(rows["tokens"]) for split, rows in task.data.items()}
    tags = {split: list(rows["tags"]) for split, rows in task.data.items()}
    files = {split: getattr(data_arguments, f"{split}_file") or split for split in words}
    if parsed.write_sentences:
        return write_sentences(parsed.write_sentences, files, words)
    if len(known := set(flat(tags["train"]))) < 2:
        raise ValueError(f"{files['train']} has only the tag {known.pop()!r}; a probe needs two. Pass more text.")
    predicted = {"most frequent tag": most_frequent_tags(words, tags)}
    for source in layer_sources(parsed):
        layers = {  # `(layers, words, width)` of all words of a split
            split: np.concatenate([np.asarray(each, np.float32) for each in source.read(sentences, files[split])], 1)
            for split, sentences in words.items()
        }
        names = source.names(len(layers["train"]))
        for number, name in enumerate(tqdm(names, desc="Training probes", unit="layer")):
            predicted[name] = probe_layer({split: layers[split][number] for split in layers}, tags)
    found = {"metric": task.metric, "train": describe(files["train"], words["train"])}
    for split in [split for split in words if split != "train"]:
        scores = {
            name: tagging_scores(of_splits[split], tags[split], task.has_entities)
            for name, of_splits in predicted.items()
        }
        found[split] = {**describe(files[split], words[split]), "scores": scores}
    print(probe_table(found))
    if parsed.output:
        write_json(Path(parsed.output), found)
    return found


def describe(file: str, sentences: list[list[str]]) -> dict[str, Any]:
    return {"file": Path(file).name, "sentences": len(sentences), "words": sum(map(len, sentences))}


if __name__ == "__main__":
    run(main)
