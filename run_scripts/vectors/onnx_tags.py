"""Tags of words from `model.onnx`, a tagger. This folder, numpy and onnxruntime are all it needs.

    python onnx_tags.py "They play chess ." "We saw a play ."

Separate words and signs by spaces. `onnx_vectors.py` spells the words. A tagger with vectors of words also reads their
ids, by the vocabulary in `tokenizer.json`. Its outputs are `logits` (batch, time, labels), and with a CRF `predictions`
(batch, time), the labels of the best sequence. `config.json` has their names.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from onnx_vectors import encode, with_plain_signs  # type: ignore[import-not-found]  # beside this file in an exported folder

NO_WORDS = ("<PAD>", "<S>", "</S>", "<UNK>")
SPELLED_OUT = "\U0010fffc"  # in the vocabulary, the first sign of a special word that a text spells out


def word_ids(sentences, width, vocabulary, settings):
    """Lists of words as `input_ids` (batch, time)."""
    padding, begin, end, unknown = (vocabulary[word] for word in NO_WORDS)
    longest = max(map(len, sentences))
    ids = np.full((len(sentences), longest + 2), padding, dtype=np.int64)
    for sentence, words in enumerate(sentences):
        row = [begin]
        for word in words:
            if settings["plain_signs"]:
                word = with_plain_signs(word)
            if settings["cut_before_lookup"]:
                word = word[: width - 2]
            forms = [word, word.lower()] if settings["lowercase_unknown"] else [word]
            known = [vocabulary[in_vocabulary(form)] for form in forms if in_vocabulary(form) in vocabulary]
            row.append(known[0] if known else unknown)
        row.append(end)
        ids[sentence, : len(row)] = row
    return ids


def in_vocabulary(word):
    return SPELLED_OUT + word[1:] if word in NO_WORDS else word


def tag(session, sentences, labels, vocabulary, settings):
    """The tag of each word: a list for each sentence."""
    width = session.get_inputs()[0].shape[-1]
    inputs = encode(sentences, width, settings["plain_signs"])
    if "input_ids" in [each.name for each in session.get_inputs()]:
        inputs["input_ids"] = word_ids(sentences, width, vocabulary, settings)
    names = [each.name for each in session.get_outputs()]
    outputs = dict(zip(names, session.run(None, inputs), strict=True))
    best = outputs["predictions"] if "predictions" in names else outputs["logits"].argmax(-1)
    tags = []
    for words, row in zip(sentences, best, strict=True):
        tags.append([labels[str(number)] for number in row[1 : len(words) + 1]])
    return tags


if __name__ == "__main__":
    here = Path(__file__)
    model = onnxruntime.InferenceSession(here.with_name("model.onnx"))
    files = {}
    for name in ("tokenizer_config", "tokenizer", "config"):
        files[name] = json.loads(here.with_name(f"{name}.json").read_text(encoding="utf-8"))
    if len(sys.argv) == 1:
        sys.exit('Pass texts: python onnx_tags.py "They play chess ."')
    texts = [text.split() for text in sys.argv[1:]]
    known_words = files["tokenizer"]["model"]["vocab"]
    tags_of_texts = tag(model, texts, files["config"]["id2label"], known_words, files["tokenizer_config"])
    for words, tags in zip(texts, tags_of_texts, strict=True):
        for pair in zip(words, tags, strict=True):
            print(*pair, sep="\t")
