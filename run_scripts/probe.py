"""Measures what each layer knows about the tags of words, such as parts of speech: the paper's Table 6.

    elmo probe --model elmo --train_file train.conllu --test_file test.conllu --output results/probe.json

For each layer, a linear classifier learns the tag of a word from the vector of the word alone: logistic regression,
which has no seed. For comparison, each word gets its most frequent tag of the training text. Tags that mark entities,
such as BIO, are scored by the F1 of entities, other tags by accuracy.

Vectors of another program get rows in the same table, with or without a model: `--write_sentences FOLDER` writes the
sentences of each text, and `--vectors FOLDER` reads that program's vectors. `--word_vectors FILE` has one vector per
word.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm.auto import tqdm
from transformers.utils import logging

from modeling_elmo.run_scripts.cards.tables import probe_table
from modeling_elmo.run_scripts.fine_tuning.metrics import tagging_scores
from modeling_elmo.run_scripts.fine_tuning.tasks.tagging import Tagging, TaggingDataArguments
from modeling_elmo.run_scripts.program.command_line import ProgramParser, given_options, print_conclusion, run
from modeling_elmo.run_scripts.program.files import write_json
from modeling_elmo.run_scripts.vectors.layer_sources import LayerSourceArguments, layer_sources, write_sentences

logger = logging.get_logger(__name__)

MAX_ITERATIONS = 1000  # of L-BFGS; parts of speech converge in 100 to 200

WordTags = dict[str, list[list[str]]]  # of each sentence, by split


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = ProgramParser(LayerSourceArguments, TaggingDataArguments, description=__doc__)
    parsed, data_arguments = parser.parse(arguments)
    task = Tagging.read(data_arguments)
    task.check_splits()
    words = {split: list(rows["tokens"]) for split, rows in task.data.items()}
    places = {split: list(map(task.tagged_words, rows["tags"])) for split, rows in task.data.items()}
    tags = {split: chosen(rows["tags"], places[split]) for split, rows in task.data.items()}
    files = {split: getattr(data_arguments, f"{split}_file") or split for split in words}
    if parsed.write_sentences:
        return write_sentences(parsed.write_sentences, files, words)
    known = set(chain.from_iterable(tags["train"]))
    if len(known) < 2:
        raise ValueError(f"{files['train']} has only the tag {known.pop()!r}; a probe needs two. Pass more text.")
    tagged = {split: chosen(words[split], places[split]) for split in words}
    predicted = {"most frequent tag": most_frequent_tags(tagged, tags)}
    for source in layer_sources(parsed, files):
        layers = {}  # `(layers, words, width)` of all words of a split
        for split, sentences in words.items():
            vectors = []
            for of_sentence, of_words in zip(source.read(sentences, files[split]), places[split], strict=True):
                vectors.append(np.asarray(of_sentence, np.float32)[:, of_words])
            layers[split] = np.concatenate(vectors, 1)
        names = source.names(len(layers["train"]))
        for number, name in enumerate(tqdm(names, desc="Training probes", unit="layer")):
            predicted[name] = probe_layer({split: layers[split][number] for split in layers}, tags, name)
    result: dict[str, Any] = {"metric": task.metric}
    for split in words:
        result[split] = describe(files[split], tagged[split])
        if split != "train":
            result[split]["scores"] = {
                name: tagging_scores(tags_of_splits[split], tags[split], task.has_entities)
                for name, tags_of_splits in predicted.items()
            }
    print(probe_table(result))
    tagger = ("elmo", "ner", "--model_name_or_path", parsed.model or "MODEL", *given_options(data_arguments))
    print_conclusion(best_layer(result), *tagger, "--output_dir", "tagger")
    if parsed.output:
        write_json(Path(parsed.output), result)
    return result


def chosen(sentences: Iterable[Sequence[str]], places: Iterable[Sequence[int]]) -> list[list[str]]:
    """The items of each sentence at these places: its words with a tag, for example."""
    return [[items[place] for place in of_words] for items, of_words in zip(sentences, places, strict=True)]


def best_layer(result: Mapping[str, Any]) -> str:
    """The best row of the table on the last split, compared with the most frequent tags."""
    *_, split = [name for name in ("validation", "test") if name in result]
    scores = {name: of_row[result["metric"]] for name, of_row in result[split]["scores"].items()}
    baseline = scores.pop("most frequent tag")
    name, score = max(scores.items(), key=lambda row: row[1])
    best = f"On {split}, the best {result['metric']} belongs to {name}, {100 * score:.1f}"
    return f"{best}; the most frequent tag of each word has {100 * baseline:.1f}."


def describe(file: str, sentences: list[list[str]]) -> dict[str, Any]:
    return {"file": Path(file).name, "sentences": len(sentences), "words": sum(map(len, sentences))}


def probe_layer(vectors: Mapping[str, np.ndarray], tags: WordTags, name: str = "the layer") -> WordTags:
    """The tags that a probe of one layer predicts for all splits but `train` (Peters et al. 2018, section 5.3).

    The probe is multinomial logistic regression on standardized vectors, with scikit-learn's L2 penalty of strength 1,
    by L-BFGS from zero: it has no seed.

    Args:
        vectors: `(words, width)` of each split.
        tags: gold tags of each split, whose sentences divide the words.
        name: of the layer, for a warning that the probe was stopped before it had converged.
    """
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=MAX_ITERATIONS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # which names scikit-learn's options
        probe.fit(vectors["train"], list(chain.from_iterable(tags["train"])))
    if probe[-1].n_iter_.max() >= MAX_ITERATIONS:
        logger.warning(
            f"The probe of {name} was stopped after {MAX_ITERATIONS:,} iterations, before it had converged. Its "
            "scores are approximate: ignore small differences from other layers."
        )
    return {split: divided(tags[split], probe.predict(vectors[split])) for split in tags if split != "train"}


def most_frequent_tags(words: WordTags, tags: WordTags) -> WordTags:
    """The most frequent tag of each word in `train`, for all other splits; unknown words have the commonest tag."""
    counts: dict[str, Counter[str]] = {}
    for word, tag in zip(chain.from_iterable(words["train"]), chain.from_iterable(tags["train"]), strict=True):
        counts.setdefault(word, Counter())[tag] += 1
    other = Counter(chain.from_iterable(tags["train"]))
    frequent = {word: most_common(counter) for word, counter in counts.items()}
    default = most_common(other)
    predicted = {}
    for split, sentences in words.items():
        if split != "train":
            predicted[split] = [[frequent.get(word, default) for word in sentence] for sentence in sentences]
    return predicted


def most_common(counter: Counter[str]) -> str:
    [(tag, _)] = counter.most_common(1)
    return tag


def divided(sentences: list[list[str]], items: np.ndarray) -> list[list[str]]:
    """The items of all words, divided as the sentences are."""
    ends = np.cumsum([len(sentence) for sentence in sentences])
    return [part.tolist() for part in np.split(items, ends[:-1])]


if __name__ == "__main__":
    run(main)
