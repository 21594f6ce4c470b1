"""Measures again what this repository publishes: the perplexity of its English biLM, and distances to original vectors.

    python -m modeling_elmo.run_scripts.benchmarks.published

It needs a clone, where the held-out text and tiny checkpoints of other programs with their own vectors are below
`tests/fixtures/`. Published figures are read from the model's records and from docs/RESULTS.md.
"""

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from tqdm.auto import tqdm

from modeling_elmo import ELMoForPreTraining, ELMoModel, ELMoTokenizer
from modeling_elmo.conversion.archive import AllenNLPArchive
from modeling_elmo.conversion.formats import convert_checkpoint
from modeling_elmo.conversion.original import OriginalCheckpoint
from modeling_elmo.kernels.onednn import processor_name
from modeling_elmo.modeling_elmo import ScalarMix

from ..pretraining.corpus import Corpus
from ..pretraining.evaluation import evaluate, held_out_batches
from ..program.command_line import run
from ..program.files import read_json

REPOSITORY = Path(__file__).resolve().parents[2]
FIXTURES = REPOSITORY / "tests" / "fixtures"
ORIGINALS = FIXTURES / "elmo_fixtures"
SHIPPED_MODEL = REPOSITORY / "model_cards" / "elmo-small-en"
HELD_OUT = FIXTURES / "text" / "heldout.txt"


class Figure(NamedTuple):
    name: str
    published: str
    measure: Callable[[], float]
    form: str


def main() -> list[tuple[str, str, str]]:
    """Prints and returns the name of each figure, as published and as measured."""
    if not HELD_OUT.is_file():
        raise FileNotFoundError(f"{HELD_OUT} does not exist: run this in a clone of the repository.")
    transformers.logging.disable_progress_bar()
    rows = []
    print(f"On {processor_name()}, torch {torch.__version__}:\n")
    print("| figure | published | measured now | seconds |\n|---|---:|---:|---:|")
    for figure in figures():
        start = time.perf_counter()
        measured = format(figure.measure(), figure.form).replace("e-0", "e-")
        print(f"| {figure.name} | {figure.published} | {measured} | {time.perf_counter() - start:.0f} |", flush=True)
        rows.append((figure.name, figure.published, measured))
    print("\nDifferences come from rounding, so they change in their last digits with the processor.")
    return rows


def figures() -> Iterable[Figure]:
    record = read_json(SHIPPED_MODEL / "results" / "pretraining.json")
    [best] = [entry for entry in record["log"] if entry["step"] == record["published_step"] and "perplexity" in entry]
    yield Figure("largest difference to bilm-tf's vectors", published("seven more option sets"), of_bilm_tf, ".1e")
    yield Figure("largest difference to AllenNLP's vectors", published("AllenNLP's biLM fixture"), of_allennlp, ".1e")
    yield Figure(
        "largest difference to its task models' vectors", published("four of AllenNLP's task"), of_task_models, ".1e"
    )
    name = f"perplexity of {SHIPPED_MODEL.name} on {HELD_OUT.name}"
    yield Figure(name, f"{best['perplexity']:.2f}", held_out_perplexity, ".2f")


def published(reference: str) -> str:
    """The last cell of the row of docs/RESULTS.md that begins so."""
    page = (REPOSITORY / "docs" / "RESULTS.md").read_text("utf-8")
    return re.findall(rf"^\| {re.escape(reference)}.*\| ([^|]+) \|$", page, re.MULTILINE)[0]


def held_out_perplexity() -> float:
    """As `elmo perplexity --is_split_into_words` measures it."""
    model, tokenizer = ELMoForPreTraining.from_pretrained(SHIPPED_MODEL), ELMoTokenizer.from_pretrained(SHIPPED_MODEL)
    accelerator = Accelerator(cpu=True)
    corpus = Corpus.from_files([str(HELD_OUT)])
    batches = held_out_batches(corpus, True, "sentence", 4096, tokenizer, accelerator)
    return evaluate(model, tqdm(batches, desc="reading", unit=" batches", leave=False), accelerator).perplexity


def of_bilm_tf() -> float:
    """All layers of seven tiny biLMs with other options, in batches that carry states."""
    differences = []
    for folder in sorted(path.parent for path in ORIGINALS.glob("variants/*/weights.hdf5")):
        vocabulary = folder / "vocab.txt"
        given = {"vocabulary": vocabulary} if vocabulary.exists() else {}
        arrays = stored_arrays(folder / "expected.hdf5")
        for k, i, layers in vectors_of_batches(folder / "weights.hdf5", folder / "sentences.json", **given):
            differences.append(np.abs(layers - arrays[f"{k}/{i}"]).max())
    return max(differences)


def of_allennlp() -> float:
    """The top layer of AllenNLP's own fixture: three rows of ten batches that carry states."""
    folder = ORIGINALS / "allennlp"
    rows = [stored_arrays(folder / f"lm_embeddings_{k}.hdf5") for k in range(3)]
    differences = []
    for k, i, layers in vectors_of_batches(folder / "lm_weights.hdf5", folder / "sentences.json"):
        expected = np.concatenate(rows[k][str(i)], axis=-1)
        differences.append(np.abs(layers[-1] - expected).max())
    return max(differences)


def vectors_of_batches(weights: Path, sentences: Path, **options: Any) -> Iterable[tuple[int, int, np.ndarray]]:
    """Row, batch and layers `(layers, tokens, dim)` of each sentence. States run on from batch to batch."""
    model, tokenizer = converted(OriginalCheckpoint, weights, options=weights.with_name("options.json"), **options)
    states = None
    for i, batch in enumerate(zip(*read_json(sentences), strict=True)):
        words = [sentence.split() for sentence in batch]
        output = model(
            **tokenizer(words, is_split_into_words=True, padding=True, return_tensors="pt"), initial_states=states
        )
        states = output.final_states
        for k, sentence in enumerate(words):
            yield k, i, torch.stack(output.hidden_states)[:, k, 1 : len(sentence) + 1].numpy()


def of_task_models() -> float:
    """All mixes in four archives of AllenNLP's trainer."""
    differences = []
    for archive in sorted(ORIGINALS.glob("archives/*/model.tar.gz")):
        expected = read_json(archive.with_name("expected_elmo.json"))
        with TemporaryDirectory() as scratch:
            folder = convert_checkpoint(AllenNLPArchive, archive, Path(scratch, "model"))
            model, tokenizer = ELMoModel.from_pretrained(folder), ELMoTokenizer.from_pretrained(folder)
            mixes = [model.scalar_mix, *further_mixes(folder, model)]
        for words, vectors in zip(expected["texts"], expected["elmo"], strict=True):
            inputs = tokenizer([words], is_split_into_words=True, return_tensors="pt")
            layers = model(**inputs).hidden_states
            for mix, theirs in zip(mixes, vectors, strict=True):
                ours = mix(layers, inputs["attention_mask"])[0, 1:-1]
                differences.append(float((ours - torch.tensor(theirs)).abs().max()))
    return max(differences)


def further_mixes(folder: Path, model: ELMoModel) -> Iterable[ScalarMix]:
    for path in sorted(folder.glob("scalar_mix_*.safetensors")):
        mix = ScalarMix(model.config)
        mix.load_state_dict(load_file(path))
        yield mix


def converted(source: Any, weights: Path, **options: Any) -> tuple[ELMoModel, ELMoTokenizer]:
    with TemporaryDirectory() as scratch:
        folder = convert_checkpoint(source, weights, Path(scratch, "model"), "whitespace", **options)
        return ELMoModel.from_pretrained(folder).eval(), ELMoTokenizer.from_pretrained(folder)


def stored_arrays(path: Path) -> dict[str, np.ndarray]:
    """All data sets of an HDF5 file, by their full names. `conversion.files.read_arrays` is for weights."""
    arrays = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: arrays.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return arrays


if __name__ == "__main__":
    with torch.no_grad():
        run(main)
