"""Speed of the tokenizer: raw text to padded tensors, beside transformers' `BertTokenizer`."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

from transformers import BertTokenizer

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.benchmarks.timing import Contest, Implementation, Outputs

MOST_TEXTS, TEXTS_PER_BATCH = 10_000, 1000


def tokenizer_contests(sentences: list[list[str]], checkout: ModuleType | None) -> Iterator[Contest]:
    """A contest for each pre-tokenization. One pass before the rounds fills the caches of our tokenizer."""
    texts = [" ".join(words) for words in sentences[:MOST_TEXTS]]
    batches = [texts[start : start + TEXTS_PER_BATCH] for start in range(0, len(texts), TEXTS_PER_BATCH)]
    bert = bert_tokenizer(texts)
    for name in ("whitespace", "moses", "treebank"):
        tokenizer = ELMoTokenizer(pre_tokenization=name)
        ours = partial(tokenize_batches, tokenizer, batches)
        implementations = [Implementation("this package", ours)]
        if checkout is not None:
            other = partial(tokenize_batches, checkout.ELMoTokenizer(pre_tokenization=name), batches)
            implementations.append(Implementation("other checkout", other, expected=ours()))
        implementations.append(Implementation("BertTokenizer", lambda: tokenize_batches(bert, batches)))
        words = sum(len(text.split()) for text in texts)
        yield Contest("tokenizer", f"{name}, {len(texts)} texts", words, "words", implementations)


def tokenize_batches(tokenizer: Callable, batches: list[list[str]]) -> Outputs:
    """Tokenizes all batches; returns the tensors of the last one."""
    for batch in batches:
        encoding = tokenizer(batch, padding=True, return_tensors="pt")
    return dict(encoding)


def bert_tokenizer(texts: list[str]) -> BertTokenizer:
    """Its vocabulary has all words of the texts, so that nearly every word is one piece: its fastest case."""
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)})
    characters = sorted(set("".join(words)))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{c}" for c in characters), *words]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return BertTokenizer(vocab=vocab, do_lower_case=False)
