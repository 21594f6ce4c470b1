"""Layers of words to compare: of a model, of vectors from elsewhere in files, or of static word vectors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from tqdm.auto import tqdm

from modeling_elmo.run_scripts.cards.tables import layer_names
from modeling_elmo.run_scripts.program.command_line import option
from modeling_elmo.run_scripts.program.files import require, write_lines
from modeling_elmo.run_scripts.vectors.embedding import embed_sentences, load_model_and_tokenizer
from modeling_elmo.run_scripts.vectors.neighbors import check_json_output
from modeling_elmo.run_scripts.vectors.word_vectors import read_word_vectors

Sentences = Sequence[Sequence[str]]


@dataclass(kw_only=True)
class LayerSourceArguments:
    model: str | None = option(None, "Folder or Hub name of an ELMo model.")
    vectors: str | None = option(
        None,
        "Folder with vectors from elsewhere: X.hdf5 or X.npz for the file X, with an array (layers, words, "
        "width) or (words, width) for each sentence, under its number from 0.",
    )
    word_vectors: str | None = option(None, "File of word vectors without a context, in the text format of GloVe.")
    write_sentences: str | None = option(
        None,
        "Folder for the sentences, and nothing else: X.txt for the file X, a line per sentence, with a "
        "space between words.",
    )
    output: str | None = option(None, "JSON file for the figures.")
    device: str | None = option(None, "Device. Default: cuda if available, else cpu.")
    trust_remote_code: bool = option(False, "Run code from the model's folder.")

    def __post_init__(self):
        check_json_output(self.output)
        given = [name for name in ("model", "vectors", "word_vectors") if getattr(self, name) is not None]
        if not given and self.write_sentences is None:
            raise ValueError("There are no vectors: pass --model, --vectors or --word_vectors; or --write_sentences.")
        if given and self.write_sentences is not None:
            received = f"--{given[0]} is {getattr(self, given[0])}"
            raise ValueError(f"--write_sentences only writes sentences, but {received}; leave one out.")


class LayerSource(NamedTuple):
    """Vectors of one kind.

    Args:
        read: yields the layers `(layers, words, width)` of the sentences of a file.
        names: the names of a number of layers.
        average: the name of the average of the layers.
    """

    read: Callable[[Sentences, str], Iterator[np.ndarray]]
    names: Callable[[int], list[str]]
    average: str = "average"


def layer_sources(arguments: LayerSourceArguments) -> list[LayerSource]:
    """The sources that the options name. Files and models are found before any vector is computed."""
    sources = []
    if arguments.model is not None:
        model, tokenizer = load_model_and_tokenizer(arguments.model, arguments.device, arguments.trust_remote_code)
        sources.append(LayerSource(partial(computed_layers, model, tokenizer), layer_names))
    if arguments.vectors is not None:
        sources.append(LayerSource(StoredLayers(Path(arguments.vectors)), numbered_layers, "average of layers"))
    if arguments.word_vectors is not None:
        found = read_word_vectors(arguments.word_vectors)
        rows = dict(zip(found.words, found.vectors, strict=True))
        sources.append(LayerSource(partial(static_layers, rows), lambda count: ["word vectors"]))
    return sources


def numbered_layers(count: int) -> list[str]:
    """Names for layers from elsewhere."""
    return ["vectors"] if count == 1 else [f"layer {number}" for number in range(count)]


def computed_layers(model: Any, tokenizer: Any, sentences: Sentences, file: str) -> Iterator[np.ndarray]:
    bar = tqdm(sentences, unit=" sentences", desc=Path(file).name)
    return (layers for _, layers in embed_sentences(bar, model, tokenizer, layers="all"))


def static_layers(vectors: Mapping[str, np.ndarray], sentences: Sentences, file: str) -> Iterator[np.ndarray]:
    """One vector per word, the same in all sentences: `(1, words, width)` of each sentence.

    A word without a vector has that of its lower-case form, or zeros.
    """
    none = np.zeros_like(next(iter(vectors.values())))
    for words in tqdm(sentences, unit=" sentences", desc=Path(file).name):
        rows = [vectors.get(word, vectors.get(word.lower(), none)) for word in words]
        yield np.reshape(rows, (1, len(words), len(none)))


def text_name(file: str) -> str:
    """`X` of a file of words, such as `X.conllu`, `X.data.xml.gz`."""
    name = Path(file).name.removesuffix(".gz").removesuffix(".zst").removesuffix(".xml")
    return name.rpartition(".")[0] or name


def write_sentences(
    arguments: LayerSourceArguments, files: Mapping[str, str], sentences: Mapping[str, Sentences]
) -> dict[str, str] | None:
    """With `--write_sentences`, writes a line per sentence of each split, and returns the paths.

    Args:
        files: the file of each split.
        sentences: the sentences of each split.
    """
    if not (arguments.write_sentences or arguments.vectors):
        return None
    names: dict[str, str] = {}
    for file in filter(None, files.values()):
        if (other := names.setdefault(text_name(file), file)) != file:
            raise ValueError(f"The vectors of {other} and {file} would have one name; rename one of the two.")
    if not arguments.write_sentences:
        return None
    paths = {split: Path(arguments.write_sentences, f"{text_name(files[split])}.txt") for split in sentences}
    for split, path in paths.items():
        if path.exists() and Path(files[split]).exists() and path.samefile(files[split]):
            raise ValueError(f"--write_sentences would replace {path}, which is read. Pass another folder.")
        write_lines(path, map(" ".join, sentences[split]))
        print(f"{path}: {len(sentences[split]):,} sentences")
    return {split: str(path) for split, path in paths.items()}


class StoredLayers:
    """The layers of the sentences of files, from `X.hdf5` or `X.npz` in a folder for the file `X`.

    All files have one number of layers and one width: those of the first sentence that is read.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.sizes: tuple[int, int] | None = None  # layers and width

    def __call__(self, sentences: Sentences, file: str) -> Iterator[np.ndarray]:
        """Yields the layers `(layers, words, width)` of each sentence."""
        paths = [self.folder / f"{text_name(file)}{suffix}" for suffix in (".hdf5", ".npz")]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise FileNotFoundError(
                f"--vectors {self.folder} has neither {paths[0].name} nor {paths[1].name}, for {file}."
            )
        with _open_arrays(path) as arrays:
            for number, words in enumerate(tqdm(sentences, unit=" sentences", desc=Path(file).name)):
                try:
                    layers = np.asarray(arrays[str(number)])
                except (KeyError, ValueError) as error:  # it is missing, or has objects
                    raise ValueError(
                        f"{path}, array {number} cannot be read: {error}. Pass an array of numbers for each of the "
                        f"{len(sentences)} sentences."
                    ) from error
                yield self._checked(f"{path}, array {number}", layers[None] if layers.ndim == 2 else layers, words)

    def _checked(self, where: str, layers: np.ndarray, words: Sequence[str]) -> np.ndarray:
        if layers.dtype.kind not in "fiu" or not np.isfinite(layers).all():
            raise ValueError(f"{where} has type {layers.dtype}, or NaN; pass finite numbers.")
        is_complete = layers.ndim == 3 and layers.shape[1] == len(words) and layers.shape[0] and layers.shape[2]
        sizes = layers.shape[::2]
        self.sizes = self.sizes or sizes
        if not is_complete or sizes != self.sizes:
            raise ValueError(
                f"{where} has shape {layers.shape}, but its sentence has {len(words)} words: {' '.join(words)!r:.60}. "
                f"Pass (layers, words, width) or (words, width); layers and width are {self.sizes} in the first array."
            )
        return layers


def _open_arrays(path: Path) -> Any:
    try:
        if path.suffix == ".npz":
            if isinstance(arrays := np.load(path), np.ndarray):  # it refuses pickles
                raise ValueError("it is a single array, as np.save writes; np.savez writes several")
            return arrays
        require("h5py", "convert", path.name)
        import h5py

        return h5py.File(path)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}. Write it again.") from error
