"""ELMo in spaCy pipelines: vectors of tokens, spans and documents that depend on their sentences."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import srsly
from spacy.language import Language
from spacy.pipeline import Pipe
from spacy.tokens import Doc, Span, Token
from spacy.util import minibatch
from transformers.utils import logging

from modeling_elmo.run_scripts.program.processes import use_one_thread_if_forked
from modeling_elmo.run_scripts.vectors.embedding import load_model_and_tokenizer
from modeling_elmo.run_scripts.vectors.neighbors import check_layer, layer_vectors, normalize

logger = logging.get_logger(__name__)


class ELMoPipe(Pipe):
    """Sets `doc.tensor`, and what spaCy reads from it: the vectors and similarities of tokens, spans and documents.

        nlp.add_pipe("elmo", config={"model": "elmo-tiny"})

    The words of the model are spaCy's tokens; those of white space are not read, and have zeros. A sentence is a
    sequence of the model, and so is a document without sentence boundaries. Spans and documents have mean vectors.

    The model is loaded with the first text, or by `nlp.initialize()`. A saved pipeline contains the model.

    Args:
        name: of the component in its pipeline.
        model: folder or Hub name of any ELMo model.
        layer: `"top"`, `"average"`, `"mixed"`, or a number (`"0"` is the token layer).
        batch_tokens, device, trust_remote_code: as for `elmo embed`.

    Shape:
        doc.tensor: `(tokens, hidden_size)`, float32.
    """

    def __init__(
        self,
        name: str,
        model: str,
        layer: str = "top",
        batch_tokens: int = 4096,
        device: str | None = None,
        trust_remote_code: bool = False,
    ):
        self.name, self.model, self.layer, self.batch_tokens = name, model, layer, batch_tokens
        self.device, self.trust_remote_code = device, trust_remote_code
        self._loaded: tuple[Any, Any] | None = None

    def __call__(self, doc: Doc) -> Doc:
        self._set_vectors([doc])
        return doc

    def pipe(self, stream: Iterable[Doc], *, batch_size: int = 128) -> Iterator[Doc]:
        """The documents in their order, with vectors. Sentences of `batch_size` documents are sorted by length."""
        for docs in minibatch(stream, size=batch_size):
            try:
                self._set_vectors(docs)
                yield from docs
            except Exception as error:  # spaCy's handler decides which documents may be lost
                self.get_error_handler()(self.name, self, docs, error)

    def initialize(self, get_examples: Any = None, *, nlp: Language | None = None) -> None:
        """Loads the model. It learns nothing from the examples."""
        self._model_and_tokenizer()

    def add_hooks(self, doc: Doc) -> Doc:
        """Makes spaCy read vectors from `doc.tensor`. Call it after `Doc.from_bytes`, which forgets hooks."""
        hooks: dict[str, Callable[..., Any]] = {"vector": mean_vector, "has_vector": has_vector, "similarity": cosine}
        doc.user_token_hooks |= {**hooks, "vector": token_vector}
        doc.user_span_hooks |= hooks
        doc.user_hooks |= {**hooks, "vector_norm": vector_norm}
        return doc

    def to_disk(self, path: str | Path, *, exclude: Iterable[str] = ()) -> None:
        for each in self._model_and_tokenizer():
            each.save_pretrained(path)

    def from_disk(self, path: str | Path, *, exclude: Iterable[str] = ()) -> "ELMoPipe":
        self._loaded = load_model_and_tokenizer(str(path), self.device, self.trust_remote_code)
        return self

    def to_bytes(self, *, exclude: Iterable[str] = ()) -> bytes:
        """The files of `to_disk`, without its folder for sentence-transformers."""
        with TemporaryDirectory() as folder:
            self.to_disk(folder)
            files = (path for path in Path(folder).iterdir() if path.is_file())
            return srsly.msgpack_dumps({path.name: path.read_bytes() for path in files})

    def from_bytes(self, data: bytes, *, exclude: Iterable[str] = ()) -> "ELMoPipe":
        with TemporaryDirectory() as folder:
            for name, content in srsly.msgpack_loads(data).items():
                Path(folder, Path(name).name).write_bytes(content)
            return self.from_disk(folder)

    def _model_and_tokenizer(self) -> tuple[Any, Any]:
        if self._loaded is None:
            model, tokenizer = load_model_and_tokenizer(self.model, self.device, self.trust_remote_code)
            check_layer(self.layer, model.config.num_hidden_layers, option="layer")
            self._loaded = model, tokenizer
        return self._loaded

    def _set_vectors(self, docs: list[Doc]) -> None:
        use_one_thread_if_forked()  # by nlp.pipe(n_process=2)
        model, tokenizer = self._model_and_tokenizer()
        for doc in docs:
            self.add_hooks(doc).tensor = np.zeros((len(doc), model.config.hidden_size), np.float32)
        sentences = [(doc, words) for doc in docs for words in words_of_sentences(doc)]
        if (longest := max((len(words) for _, words in sentences), default=0)) > self.batch_tokens:
            longer = f"A sentence has {longest:,} words, more than batch_tokens ({self.batch_tokens:,})"
            logger.warning_once(f'{longer}. To split documents: nlp.add_pipe("sentencizer", before="elmo").')
        texts = ([word.text for word in words] for _, words in sentences)
        found = layer_vectors(texts, model, tokenizer, self.layer, self.batch_tokens)
        for (doc, words), vectors in zip(sentences, found, strict=True):
            doc.tensor[[word.i for word in words]] = vectors


def words_of_sentences(doc: Doc) -> Iterator[list[Token]]:
    """The tokens of each sentence that are not white space. Sentences without any are left out."""
    for sentence in doc.sents if doc.has_annotation("SENT_START") else (doc,):
        if words := [token for token in sentence if not token.is_space]:
            yield words


# The hooks are functions of a module: a pickled document names them.


def token_vector(token: Token) -> np.ndarray:
    return token.doc.tensor[token.i]


def mean_vector(tokens: Doc | Span) -> np.ndarray:
    vectors = np.asarray(tokens.tensor)[: len(tokens)]  # spaCy leaves a row behind when it splits a token
    words = vectors[[not token.is_space for token in tokens]]
    return words.mean(0) if len(words) else np.zeros_like(vectors, shape=vectors.shape[1:])


def vector_norm(doc: Doc) -> float:
    """Computed anew each time, because spaCy keeps the norm of a document whose tokens were split or merged."""
    return float(np.linalg.norm(mean_vector(doc)))


def has_vector(each: Doc | Span | Token) -> bool:
    return bool(each.vector.any())


def cosine(one: Doc | Span | Token, other: Any) -> float:
    """The cosine of two vectors; 0 if one is zeros. spaCy's own similarity of equal words is 1 in any two contexts."""
    vectors = one.vector, other.vector
    if vectors[0].shape != vectors[1].shape:
        shapes = f"{vectors[0].shape} and {vectors[1].shape}"
        raise ValueError(f"similarity received vectors of the shapes {shapes}; pass two of the same pipeline.")
    return float(np.dot(*map(normalize, vectors)))
