"""Vectors of words from `model.onnx`. This folder, numpy and onnxruntime are all it needs.

    python onnx_vectors.py "They play chess ." "We saw a play ."

A word is a row of ids: begin of word, its UTF-8 bytes plus 1, end of word, and padding up to a fixed width. A sentence
is its words between two markers, which are words of one id. Zeros follow a sentence that is shorter than the longest.
Models that have read no typographic signs read ASCII's in their place, and composed letters.
"""

import json
import sys
import unicodedata
from pathlib import Path

import numpy as np
import onnxruntime

BEGIN_SENTENCE, END_SENTENCE, BEGIN_WORD, END_WORD, PADDING = 257, 258, 259, 260, 261
SIGNS = str.maketrans("‘’‚‛“”„‟‐‑–", "''''\"\"\"\"---") | {ord("—"): "--", ord("―"): "--", ord("…"): "..."}


def spell(ids, width):
    row = [BEGIN_WORD, *ids[: width - 2], END_WORD]
    return row + [PADDING] * (width - len(row))


def with_plain_signs(word):
    return unicodedata.normalize("NFC", word).translate(SIGNS)


def encode(sentences, width, plain_signs=False):
    """Lists of words as `character_ids` (batch, time, width) and `attention_mask` (batch, time)."""
    longest = max(map(len, sentences))
    character_ids = np.zeros((len(sentences), longest + 2, width), dtype=np.int64)
    for sentence, words in enumerate(sentences):
        rows = [spell([BEGIN_SENTENCE], width)]
        for word in words:
            if plain_signs:
                word = with_plain_signs(word)
            ids = [byte + 1 for byte in word.encode("utf-8", "ignore")]
            rows.append(spell(ids, width))
        rows.append(spell([END_SENTENCE], width))
        character_ids[sentence, : len(rows)] = rows
    attention_mask = character_ids.any(-1).astype(np.int64)
    return {"character_ids": character_ids, "attention_mask": attention_mask}


def embed(session, sentences, plain_signs=False):
    """The first output of the model for each word: `(words, width)` for each sentence, without its markers."""
    first_input = session.get_inputs()[0]
    inputs = encode(sentences, first_input.shape[-1], plain_signs)
    outputs = session.run(None, inputs)[0]
    return [output[1 : len(words) + 1] for words, output in zip(sentences, outputs, strict=True)]


if __name__ == "__main__":
    here = Path(__file__)
    model = onnxruntime.InferenceSession(here.with_name("model.onnx"))
    settings = json.loads(here.with_name("tokenizer_config.json").read_text(encoding="utf-8"))
    if len(sys.argv) == 1:
        sys.exit('Pass texts: python onnx_vectors.py "They play chess ."')
    texts = [text.split() for text in sys.argv[1:]]
    vectors_of_texts = embed(model, texts, settings["plain_signs"])
    for words, vectors in zip(texts, vectors_of_texts, strict=True):
        for word, vector in zip(words, vectors, strict=True):
            print(word, vector.shape, vector[:3])
