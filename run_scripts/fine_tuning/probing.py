"""A probe: how well does a linear classifier tell the tag of a word from its vector in one layer?"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from modeling_elmo.run_scripts.vectors.layer_sources import Sentences

MAX_ITERATIONS = 300  # of L-BFGS; parts of speech converge in 100 to 200

WordTags = dict[str, list[list[str]]]  # predicted tags of each sentence, by split


def probe_layer(vectors: Mapping[str, np.ndarray], tags: Mapping[str, Sentences]) -> WordTags:
    """The tags that a probe of one layer predicts for all splits but `train` (Peters et al. 2018, section 5.3).

    The probe is multinomial logistic regression on standardized vectors, with scikit-learn's L2 penalty of strength 1,
    by L-BFGS from zero: it has no seed.

    Args:
        vectors: `(words, width)` of each split.
        tags: gold tags of each split, whose sentences divide the words.
    """
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=MAX_ITERATIONS))
    probe.fit(vectors["train"], flat(tags["train"]))
    return {split: divided(tags[split], probe.predict(vectors[split])) for split in tags if split != "train"}


def most_frequent_tags(words: Mapping[str, Sentences], tags: Mapping[str, Sentences]) -> WordTags:
    """The most frequent tag of each word in `train`, for all other splits. An unknown word has that of all words."""
    counts: dict[str, Counter[str]] = {}
    for word, tag in zip(flat(words["train"]), flat(tags["train"]), strict=True):
        counts.setdefault(word, Counter())[tag] += 1
    other = Counter(flat(tags["train"]))
    return {
        split: [[counts.get(word, other).most_common(1)[0][0] for word in sentence] for sentence in words[split]]
        for split in words
        if split != "train"
    }


def flat(sentences: Sentences) -> list[str]:
    return [item for sentence in sentences for item in sentence]


def divided(sentences: Sentences, items: np.ndarray) -> list[list[str]]:
    """The items of all words, divided as the sentences are."""
    ends = np.cumsum([len(sentence) for sentence in sentences])
    return [part.tolist() for part in np.split(items, ends[:-1])]
