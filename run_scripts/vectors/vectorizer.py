"""Texts to vectors as a step of a scikit-learn pipeline."""

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from transformers import AutoConfig

from modeling_elmo.tokenization.elmo_characters import checked_sentences

from .embedder import Embedder
from .embedding import LayerChoice


class ELMoVectorizer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A vector for each text: its words' vectors, pooled.

        make_pipeline(ELMoVectorizer("elmo-tiny"), LogisticRegression()).fit(texts, labels)

    It learns nothing from texts. The model is loaded at the first use, and neither cloned nor pickled.

    Args:
        model: folder or Hub name of any ELMo model.
        layers: `"mixed"`, `"average"`, `"sum"`, `"top"`, or `"all"`, one after the other.
        pooling: `"mean"` or `"max"` over the words.
        batch_tokens, device, trust_remote_code: as for `elmo embed`.
    """

    def __init__(
        self,
        model: str,
        *,
        layers: LayerChoice = "mixed",
        pooling: Literal["mean", "max"] = "mean",
        batch_tokens: int = 4096,
        device: str | None = None,
        trust_remote_code: bool = False,
    ):
        self.model, self.layers, self.pooling = model, layers, pooling
        self.batch_tokens, self.device, self.trust_remote_code = batch_tokens, device, trust_remote_code

    def fit(self, texts: Any = None, labels: Any = None) -> "ELMoVectorizer":
        """Finds the width of the vectors, without the model's weights."""
        config = AutoConfig.from_pretrained(self.model, trust_remote_code=self.trust_remote_code)
        layers = config.num_hidden_layers + 1 if self.layers == "all" else 1
        self._n_features_out = config.hidden_size * layers
        return self

    def transform(self, texts: Iterable[str | list[str]]) -> np.ndarray:
        """The vectors of texts, which the tokenizer splits, or of lists of words, which are not changed.

        Shape:
            result: `(texts, width)`, float32.

        Raises:
            TypeError: `texts` is one text or a table, or has something else than texts and lists of words.
        """
        sentences = list(checked_sentences(texts))
        if self.pooling not in ("mean", "max"):
            raise ValueError(f"pooling is {self.pooling!r}; pass 'mean' or 'max'.")
        options = self.get_params()
        if getattr(self, "_options", None) != options:
            self._options = options
            self._embedder = Embedder(**options)
        batch = self._embedder({"text": sentences})
        vectors = [vector.reshape(-1) for vector in batch["vectors"]]
        if not vectors and not hasattr(self, "_n_features_out"):
            self.fit()
        return np.stack(vectors) if vectors else np.zeros((0, self._n_features_out), np.float32)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        tags.input_tags.string, tags.input_tags.two_d_array = True, False
        return tags
