"""ELMo in spaCy pipelines: vectors of tokens that depend on their sentences, for components and for similarities."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import srsly
import torch
from spacy.pipeline.tok2vec import Tok2Vec
from spacy.tokens import Doc, Span, Token
from thinc.api import ArgsKwargs, Dropout, Model, PyTorchWrapper_v3, chain, to_numpy, torch2xp, xp2torch
from thinc.util import get_torch_default_device
from torch import Tensor, nn

from modeling_elmo.inputs import warn_once

from ..program.models import check_model
from ..program.processes import use_one_thread_if_forked
from .embedding import load_model_and_tokenizer, reproducible_batch_tokens
from .lines import NUM_MARKERS, length_sorted_batches
from .neighbors import normalize


class ELMoPipe(Tok2Vec):
    """A `tok2vec` that also gives tokens, spans and documents vectors, from which spaCy computes similarities.

        nlp.add_pipe("elmo", config={"model": {"name": "elmo-tiny", "width": 32}})

    Spans and documents have the mean of their words.
    """

    def set_annotations(self, docs: Sequence[Doc], tokvecses: Any) -> None:
        super().set_annotations(docs, tokvecses)
        for doc in docs:
            self.add_hooks(doc)

    def add_hooks(self, doc: Doc) -> Doc:
        """Makes spaCy read vectors from `doc.tensor`. Call it after `Doc.from_bytes`, which forgets hooks."""
        hooks: dict[str, Any] = {"vector": mean_vector, "has_vector": has_vector, "similarity": cosine}
        doc.user_token_hooks |= {**hooks, "vector": token_vector}
        doc.user_span_hooks |= hooks
        doc.user_hooks |= {**hooks, "vector_norm": vector_norm}
        return doc


class DocumentEncoder(nn.Module):
    """A frozen biLM, which reads the sentences of documents, and a mix of its layers, which learns.

    The words of the model are spaCy's tokens; those of white space are not read, and have zeros. A sentence is a
    sequence of the model, and so is a document without sentence boundaries.

    Args: as of `modeling_elmo_spacy.make_tok2vec`.
    """

    def __init__(self, name: str, width: int, scalar_mix_mode: str | int, batch_tokens: int):
        super().__init__()
        self.name, self.width, self.scalar_mix_mode, self.batch_tokens = name, width, scalar_mix_mode, batch_tokens
        self.bilm: Any = None
        self.tokenizer: Any = None

    def load(self, folder: str) -> None:
        options: dict[str, Any] = {"scalar_mix_mode": self.scalar_mix_mode}
        model, self.tokenizer = load_model_and_tokenizer(folder, str(get_torch_default_device()), **options)
        width = model.config.hidden_size
        if width != self.width:
            raise ValueError(f"width is {self.width}, but {self.name} has vectors of {width} numbers; pass {width}.")
        model.freeze()
        self.bilm = model

    def load_once(self) -> None:
        if self.bilm is None:
            self.load(self.name)

    def forward(self, *docs: Doc) -> Tensor:
        """The vectors of all tokens, document after document: `(tokens, width)`."""
        use_one_thread_if_forked()  # by nlp.pipe(n_process=2)
        self.load_once()
        total = 0
        sentences = []
        for doc in docs:
            sentences += [(total, words) for words in words_of_sentences(doc)]
            total += len(doc)
        longest = max((len(words) for _, words in sentences), default=0)
        if longest > self.batch_tokens:
            longer = f"A sentence has {longest:,} words, more than batch_tokens ({self.batch_tokens:,})"
            warn_once(self, f'{longer}. To split documents: nlp.add_pipe("sentencizer", first=True).')
        gamma = self.bilm.scalar_mix.gamma
        zeros = gamma.new_zeros(total, self.width)
        vectors = [gamma * zeros[:0]]  # a batch without words has a gradient, too
        positions = []
        lengths = [len(words) + NUM_MARKERS for _, words in sentences]
        batch_tokens = reproducible_batch_tokens(self.bilm, self.batch_tokens)
        for batch in length_sorted_batches(lengths, batch_tokens):
            texts = []
            for i in batch:
                _, words = sentences[i]
                texts.append([word.text for word in words])
            inputs = self.tokenizer(
                texts, is_split_into_words=True, padding=True, padding_side="right", return_tensors="pt"
            )
            output = self.bilm(**inputs)
            for i, mixed in zip(batch, output.elmo_embeddings, strict=True):
                start, words = sentences[i]
                vectors.append(mixed[1 : len(words) + 1])
                positions += [start + word.i for word in words]
        places = torch.tensor(positions, dtype=torch.long, device=zeros.device)
        return zeros.index_copy(0, places, torch.cat(vectors))


def wrap_encoder(encoder: DocumentEncoder) -> Model:
    """A model of documents to the vectors of their tokens, with the dropout of spaCy's training."""
    wrapper = PyTorchWrapper_v3(
        encoder,
        convert_outputs=split_documents,
        serialize_model=model_to_bytes,
        deserialize_model=model_from_bytes,
    )
    tok2vec = chain(wrapper, Dropout())
    tok2vec.set_dim("nO", encoder.width)
    return tok2vec


def split_documents(model: Model, docs_and_vectors: tuple[list[Doc], Tensor], is_train: bool) -> tuple[list, Callable]:
    docs, vectors = docs_and_vectors

    def join_gradients(gradients: list) -> ArgsKwargs:
        joined = xp2torch(model.ops.flatten(gradients), device=vectors.device)
        return ArgsKwargs(args=(vectors,), kwargs={"grad_tensors": joined})

    lengths = model.ops.asarray1i([len(doc) for doc in docs])
    return model.ops.unflatten(torch2xp(vectors), lengths), join_gradients


def model_to_bytes(encoder: DocumentEncoder) -> bytes:
    """The name of the model, and its files with the files of its tokenizer."""
    encoder.load_once()
    with TemporaryDirectory() as folder:
        encoder.bilm.save_pretrained(folder)
        encoder.tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
        return srsly.msgpack_dumps({"name": encoder.name, "files": files})


def model_from_bytes(encoder: DocumentEncoder, data: bytes, device: torch.device) -> DocumentEncoder:
    """The model as it was saved, with the mix that the configuration of today names."""
    saved = srsly.msgpack_loads(data)
    check_name(encoder.name, saved["name"])
    with TemporaryDirectory() as folder:
        for name, content in saved["files"].items():
            Path(folder, Path(name).name).write_bytes(content)
        encoder.load(folder)
    return encoder


def check_name(name: str, saved_name: str) -> None:
    """Refuses the name of another model. A name that only another machine knows may stand for the saved model."""
    if Path(name).resolve() == Path(saved_name).resolve():
        return
    try:
        check_model(name)
    except FileNotFoundError:
        return
    raise ValueError(
        f"The configuration names the model {name}, but the saved pipeline contains {saved_name}. Pass "
        f"name = {saved_name!r}, or make a new pipeline with {name}."
    )


def words_of_sentences(doc: Doc) -> Iterator[list[Token]]:
    """The tokens of each sentence that are not white space. Sentences without any are left out."""
    sentences = doc.sents if doc.has_annotation("SENT_START") else (doc,)
    for sentence in sentences:
        words = [token for token in sentence if not token.is_space]
        if words:
            yield words


# The hooks are functions of a module: a pickled document names them.


def token_vector(token: Token) -> np.ndarray:
    return to_numpy(token.doc.tensor[token.i])


def mean_vector(tokens: Doc | Span) -> np.ndarray:
    vectors = to_numpy(tokens.tensor)[: len(tokens)]  # spaCy leaves a row behind when it splits a token
    words = vectors[[not token.is_space for token in tokens]]
    return words.mean(0) if len(words) else np.zeros_like(vectors, shape=vectors.shape[1:])


def vector_norm(doc: Doc) -> float:
    """Computed each time, because spaCy keeps the norm of a document whose tokens were split or merged."""
    return float(np.linalg.norm(mean_vector(doc)))


def has_vector(tokens: Doc | Span | Token) -> bool:
    return bool(tokens.vector.any())


def cosine(one: Doc | Span | Token, other: Any) -> float:
    """The cosine of two vectors; 0 if one is zeros. spaCy's own similarity of equal words is 1 in any two contexts."""
    vector: Any = one.vector
    other_vector: Any = other.vector
    if vector.shape != other_vector.shape:
        shapes = f"{vector.shape} and {other_vector.shape}"
        raise ValueError(f"similarity received vectors of the shapes {shapes}; pass two of the same pipeline.")
    return float(np.dot(normalize(vector), normalize(other_vector)))
