"""Layers of words to compare: of a model, of another program's vectors in files, or of static word vectors."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from modeling_elmo.conversion.files import reading

from ..cards.tables import layer_names
from ..program.command_line import option, require
from ..program.files import check_output, write_lines
from .embedding import embed_sentences, load_model_and_tokenizer
from .word_vectors import read_word_vectors

Sentences = Sequence[Sequence[str]]


@dataclass(kw_only=True)
class LayerSourceArguments:
    model: str | None = option(None, "Folder or Hub name of an ELMo model.")
    vectors: str | None = option(
        None, "Folder of other vectors: X.hdf5 for each file X, with arrays (layers, words, width) under 0, 1, ..."
    )
    word_vectors: str | None = option(None, "File of word vectors without a context, in the text format of GloVe.")
    write_sentences: str | None = option(None, "New folder for the sentences of each file X: X.txt, one per line.")
    output: str | None = option(None, "JSON file for the figures.")
    device: str | None = option(None, "Device. Default: cuda if available, else cpu.")
    trust_remote_code: bool = option(False, "Run code from the model's folder.")

    def __post_init__(self):
        check_output(self.output, ".json")
        sources = (self.model, self.vectors, self.word_vectors)
        has_source = sources != (None, None, None)
        if has_source == (self.write_sentences is not None):
            raise ValueError(
                f"Received --model {self.model}, --vectors {self.vectors} and --word_vectors {self.word_vectors}. "
                "Pass one or more of them, or only --write_sentences."
            )


class LayerSource(NamedTuple):
    read: Callable[[Sentences, str], Iterator[np.ndarray]]  # layers `(layers, words, width)` of a file's sentences
    names: Callable[[int], list[str]]  # of a number of layers
    average: str = "average"  # the name of the average of the layers


def layer_sources(arguments: LayerSourceArguments, files: Mapping[str, str]) -> list[LayerSource]:
    """The sources that the options name. Files and models are found before any vector is computed."""
    sources = []
    if arguments.model is not None:
        model, tokenizer = load_model_and_tokenizer(arguments.model, arguments.device, arguments.trust_remote_code)
        read = partial(computed_layers, model, tokenizer)
        sources.append(LayerSource(read, layer_names))
    if arguments.vectors is not None:
        check_names(files.values())
        read = partial(stored_layers, Path(arguments.vectors), [])
        sources.append(LayerSource(read, numbered_layers, "average of layers"))
    if arguments.word_vectors is not None:
        words, vectors = read_word_vectors(arguments.word_vectors)
        vectors_of_words = dict(zip(words, vectors, strict=True))
        read = partial(static_layers, vectors_of_words)
        sources.append(LayerSource(read, lambda count: ["word vectors"]))
    return sources


def numbered_layers(count: int) -> list[str]:
    if count == 1:
        return ["vectors"]
    return [f"layer {number}" for number in range(count)]


def computed_layers(model: Any, tokenizer: Any, sentences: Sentences, file: str) -> Iterator[np.ndarray]:
    bar = tqdm(sentences, unit=" sentences", desc=Path(file).name)
    return (layers for _, layers in embed_sentences(bar, model, tokenizer, layers="all"))


def static_layers(vectors: Mapping[str, np.ndarray], sentences: Sentences, file: str) -> Iterator[np.ndarray]:
    """One vector per word in all sentences: its own, or the vector of its lower-case form, or zeros."""
    first, *_ = vectors.values()
    zeros = np.zeros_like(first)
    for words in tqdm(sentences, unit=" sentences", desc=Path(file).name):
        layer = np.empty((len(words), len(zeros)), zeros.dtype)
        for place, word in enumerate(words):
            layer[place] = vectors.get(word, vectors.get(word.lower(), zeros))
        yield layer[None]


def stored_layers(folder: Path, sizes: list[int], sentences: Sentences, file: str) -> Iterator[np.ndarray]:
    """From `X.hdf5` in a folder for the file `X`. The first sentence sets `sizes`: layers and width of all files."""
    path = folder / f"{text_name(file)}.hdf5"
    if not path.is_file():
        raise FileNotFoundError(f"--vectors {folder} has no {path.name}, for {file}.")
    require("h5py", "convert", path.name)
    import h5py

    with reading(path), h5py.File(path) as arrays:
        stored = sum(map(str.isdecimal, arrays))
        bar = tqdm(sentences, unit=" sentences", desc=Path(file).name)
        for number, words in enumerate(bar):
            layers = np.asarray(arrays[str(number)])
            if layers.ndim == 2:
                layers = layers[None]
            if not sizes:
                sizes[:] = layers.shape[::2]
            shape = (*sizes[:1], len(words), *sizes[1:])
            is_finite = layers.dtype.kind in "fiu" and np.isfinite(layers).all()
            if not is_finite or layers.shape != shape or 0 in sizes:
                raise ValueError(
                    f"array {number} is {layers.dtype} of shape {layers.shape}; its sentence needs finite numbers of "
                    f"shape {shape}"
                )
            yield layers
    if stored > len(sentences):
        raise ValueError(
            f"{path} has {stored:,} arrays for {len(sentences):,} sentences, so they may belong to others. Pass the "
            "options with which --write_sentences wrote the sentences."
        )


def check_names(files: Iterable[str]):
    """Refuses files that would share a file of sentences or vectors."""
    files_of_names = {}
    for file in files:
        name = text_name(file)
        other = files_of_names.setdefault(name, file)
        if other != file:
            raise ValueError(f"{other} and {file} are both called {name!r} here; rename one of them.")


def text_name(file: str) -> str:
    """`X` of a file of words, such as `X.conllu`, `X.data.xml.gz`."""
    name = Path(file).name
    for suffix in (".gz", ".zst", ".xml"):
        name = name.removesuffix(suffix)
    stem, _, _ = name.rpartition(".")
    return stem or name


def write_sentences(folder: str, files: Mapping[str, str], sentences: Mapping[str, Sentences]) -> dict[str, str]:
    """Writes the sentences of each split, `X.txt` for the file `X`, and returns the paths."""
    check_names(files.values())
    paths = {}
    for split, rows in sentences.items():
        path = Path(folder, f"{text_name(files[split])}.txt")
        if path.exists():
            raise FileExistsError(f"--write_sentences would replace {path}; pass a new folder.")
        write_lines(path, map(" ".join, rows))
        print(f"{path}: {len(rows):,} sentences")
        paths[split] = str(path)
    return paths
