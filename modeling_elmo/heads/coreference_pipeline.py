"""Coreference resolution as a pipeline: `pipeline("coreference-resolution", model=..., trust_remote_code=True)`.

It travels with all `ELMoForCoreferenceResolution` checkpoints. Text that is not split into sentences needs the package
sentencex, a splitter by rules for many languages: `pip install sentencex`.
"""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers.pipelines.base import ChunkPipeline

from .pipeline_inputs import check_integers, is_words, join_words, readable

Mention = tuple[int, int, int]  # sentence, first and last word
# Each mention of one window, with its antecedent, a mention before it or `None`, and its score.
Links = dict[Mention, tuple[Mention | None, float]]


class ELMoCoreferencePipeline(ChunkPipeline):
    """Finds who is who in a document.

        pipe("Ada wrote it. She published it in 1843.")          # needs the package sentencex
        pipe(["Ada wrote it.", "She published it in 1843."])     # sentences, as strings
        pipe([["Ada", "wrote", "it", "."], ["She", "published", "it", "in", "1843", "."]])  # or as words
        for found in pipe(dataset): ...  # a torch `Dataset` or a generator of documents

    The result is `{"clusters": [[{"start": 0, "end": 3, "text": "Ada"}, ...], ...]}`: clusters in the order of their
    first mentions, and mentions in the order of the document. `start` and `end` are character positions in the text.
    Given sentences count as joined by line feeds, and given words as joined by single spaces.

    A list is one document; pass several documents as a data set or an iterator. They are read one at a time, with any
    `batch_size`.

    Args:
        singletons: whether to return mentions of their own, as clusters of one. Default: if the model was trained on
            them.
        max_words: maximum words that are read at once; it bounds the memory. A longer document is read in windows. Each
            begins with sentences of the window before, a quarter of `max_words`, in which its words find antecedents.
        language: language of a text that is not split into sentences, as a code such as `"en"`.
        genre: genre of the text, one of `config.id2label`, for a model that knows genres. Default: the first. A model
            that reads speakers takes the document for the words of one.
    """

    default_input_names = "document"

    def __call__(self, inputs: Any, **options: Any) -> Any:
        options["batch_size"] = 1  # whatever was asked for: the sentences of a document are a batch
        if isinstance(inputs, (str, list, tuple, Mapping)) or not isinstance(inputs, (Iterable, Dataset)):
            return super().__call__({"document": inputs}, **options)
        documents = readable(inputs)
        return [] if documents == [] else super().__call__(documents, **options)

    def _sanitize_parameters(self, **options: Any) -> tuple[dict, dict, dict]:
        check_integers(options, max_words=1)
        if options.get("singletons") and not self.model.config.train_singletons:
            raise ValueError("`singletons` is True, but this model was trained without singletons; leave it out.")
        genres = [*self._genres()]
        if options.get("genre") not in (None, *genres):
            raise ValueError(f"`genre` is {options['genre']!r}; this model knows {', '.join(genres) or 'no genres'}.")
        for_clusters = {"singletons": options.pop("singletons")} if "singletons" in options else {}
        return options, {}, for_clusters

    def preprocess(
        self, inputs: Any, max_words: int = 4000, language: str = "en", genre: str | None = None
    ) -> Iterator[dict]:
        given = inputs["document"] if isinstance(inputs, dict) and "document" in inputs else inputs
        text, sentences, characters = read_document(given, self.tokenizer, language)
        shown = partial(_shown, text, characters)  # a pipeline would copy the lists for each window
        for first, begin, end in windows_of(list(map(len, characters)), max_words):
            kept = {"shown": shown, "sentences": (first, begin), "is_last": end == len(sentences)}
            yield {**kept, **self._inputs(sentences[first:end], genre)}

    def _inputs(self, sentences: list[Any], genre: str | None) -> dict[str, torch.Tensor]:
        options = {"is_split_into_words": not isinstance(sentences[0], str), "padding": True, "padding_side": "right"}
        inputs, config = dict(self.tokenizer(sentences, return_tensors="pt", **options)), self.model.config
        if config.use_speakers:
            inputs["speaker_ids"] = torch.zeros(len(sentences), dtype=torch.long)
        if config.num_genres:
            inputs["genre_ids"] = torch.tensor(0 if genre is None else self._genres()[genre])
        return inputs

    def _genres(self) -> dict[str, int]:
        config = self.model.config
        return {name: number for number, name in config.id2label.items()} if config.num_genres else {}

    def _forward(self, window: dict[str, Any]) -> dict[str, Any]:
        shown, sentences, is_last = (window.pop(name) for name in ("shown", "sentences", "is_last"))
        self.model.eval()  # a model that was just trained returns no clusters otherwise
        output = self.model(**window, return_dict=True)
        return {"shown": shown, "is_last": is_last, "links": links_of(output, *sentences)}

    def postprocess(self, windows: Iterable[dict[str, Any]], singletons: bool | None = None) -> dict[str, list]:
        windows = list(windows)
        with_singletons = self.model.config.train_singletons if singletons is None else singletons
        clusters = join_links((window["links"] for window in windows), with_singletons)
        return {"clusters": [list(map(windows[0]["shown"], cluster)) for cluster in clusters]}


def read_document(document: Any, tokenizer: Any, language: str) -> tuple[str, list[Any], list[list[tuple[int, int]]]]:
    """The text of a document, its sentences, and the characters of each of their words.

    A document is a text, a list of sentences, or a list of lists of words. Sentences without words are left out.
    """
    if isinstance(document, str):
        text, spans = document, split_sentences(document, language)
        sentences: list[Any] = [text[start:end] for start, end in spans]
    else:
        sentences = list(document) if isinstance(document, (list, tuple)) else []
        if not sentences or not (all(isinstance(each, str) for each in sentences) or all(map(is_words, sentences))):
            raise ValueError(f"The document is {document!r:.80}; pass a text, sentences, or the words of each.")
        text, spans = join_words([each if isinstance(each, str) else " ".join(each) for each in sentences], "\n")
    kept, characters = [], []
    for sentence, (start, _) in zip(sentences, spans, strict=True):
        if isinstance(sentence, str):
            offsets = tokenizer(sentence, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
        else:
            offsets = join_words(sentence)[1]
        if offsets:
            kept.append(sentence)
            characters.append([(start + first, start + end) for first, end in offsets])
    if not kept:
        raise ValueError(f"The document {text!r:.80} has no words; pass a text with words.")
    return text, kept, characters


def split_sentences(text: str, language: str) -> list[tuple[int, int]]:
    """The characters of each sentence of a text, by the rules of the package sentencex for its composed form (NFC)."""
    try:
        from sentencex import get_sentence_boundaries
    except ImportError as error:
        raise ImportError("Raw text needs `pip install sentencex`; or pass a list of sentences.") from error
    composed = unicodedata.normalize("NFC", text)  # as its abbreviations
    readable = re.sub(r"[^\S\n]", " ", re.sub("[\ud800-\udfff]", "\ufffd", composed))
    found = get_sentence_boundaries(language, readable)  # Rust has no surrogates, and this package breaks wide spaces
    places = [(each["start_index"], each["end_index"]) for each in found if not each["is_paragraph_break"]]
    if composed == text:
        return places
    # Both forms of a text have the same decomposition, where ends are counted.
    ends, composed_ends = _ends_in_decomposition(text), _ends_in_decomposition(composed)
    return [(bisect_left(ends, composed_ends[start]), bisect_left(ends, composed_ends[end])) for start, end in places]


def _ends_in_decomposition(text: str) -> list[int]:
    return [0, *accumulate(len(unicodedata.normalize("NFD", character)) for character in text)]


def windows_of(lengths: list[int], max_words: int) -> Iterator[tuple[int, int, int]]:
    """Windows of sentences with at most `max_words` words, or with one longer sentence that no other window has.

    Yields the first sentence of each window, the first that the window before does not have, and the end.
    """
    before, end = [0, *accumulate(lengths)], 0  # number of words before each sentence
    while end < len(lengths):
        begin = end
        first = bisect_left(before, max(before[begin] - max_words // 4, before[begin + 1] - max_words))
        first = min(first, begin)
        end = max(begin + 1, bisect_right(before, before[first] + max_words) - 1)
        yield first, begin, end


def links_of(output: Any, first: int, begin: int) -> Links:
    """The best antecedent of each kept span in the sentences from `begin` on, of a window that starts at `first`."""
    spans = output.clusters[0, :, :3].cpu().numpy() + np.array([first, -1, -1])  # the first token is a marker
    best = output.antecedent_scores[0].argmax(-1, keepdim=True)
    linked = F.pad(output.antecedents[0], (1, 0), value=-1).gather(-1, best)[:, 0].tolist()
    mentions: list[Mention] = [tuple(span) for span in spans.tolist()]
    scores = output.mention_scores[0].tolist()
    rows = zip(mentions, linked, scores, strict=True)
    return {
        mention: (None if link < 0 else mentions[link], score) for mention, link, score in rows if mention[0] >= begin
    }


def join_links(windows: Iterable[Links], singletons: bool) -> list[list[Mention]]:
    """The clusters of mentions that are linked to each other, in the order of their first mentions.

    With `singletons`, mentions without a link whose score is above 0 are clusters of one.
    """
    clusters: dict[Mention, list[Mention]] = {}
    alone: set[Mention] = set()
    for window in windows:
        for mention, (antecedent, score) in window.items():
            cluster = [] if antecedent is None else clusters.setdefault(antecedent, [antecedent])
            cluster.append(mention)
            clusters[mention] = cluster
            if singletons and score > 0:
                alone.add(mention)
    different = {id(cluster): sorted(cluster) for cluster in clusters.values()}.values()
    return sorted(cluster for cluster in different if len(cluster) > 1 or cluster[0] in alone)


def _shown(text: str, characters: list[list[tuple[int, int]]], mention: Mention) -> dict[str, Any]:
    sentence, first, last = mention
    start, end = characters[sentence][first][0], characters[sentence][last][1]
    return {"start": start, "end": end, "text": text[start:end]}
