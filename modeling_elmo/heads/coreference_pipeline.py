"""Coreference resolution as a pipeline: `pipeline("coreference-resolution", model=..., trust_remote_code=True)`.

It travels with all `ELMoForCoreferenceResolution` checkpoints. Text that is not split into sentences needs the package
sentencex, a splitter by rules for many languages: `pip install sentencex`.
"""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers.pipelines.base import ChunkPipeline

from .pipeline_inputs import check_integers, is_words, join_words, readable
from .spans import best_antecedents

Mention = tuple[int, int, int]  # sentence, first and last word
# Each mention of one window, with its antecedent, a mention before it or `None`, and its score.
Links = dict[Mention, tuple[Mention | None, float]]


@dataclass
class Document:
    """The text of a document, its sentences, and the characters of each of their words.

    A pipeline passes it on as it is. It would copy plain lists for each window.
    """

    text: str
    sentences: list[Any]  # texts, or lists of words
    characters: list[list[tuple[int, int]]]

    def shown(self, mention: Mention) -> dict[str, Any]:
        sentence, first, last = mention
        start, _ = self.characters[sentence][first]
        _, end = self.characters[sentence][last]
        return {"start": start, "end": end, "text": self.text[start:end]}


class ELMoCoreferencePipeline(ChunkPipeline):
    """Finds who is who in a document.

        pipe("Ada wrote it. She published it in 1843.")          # needs the package sentencex
        pipe(["Ada wrote it.", "She published it in 1843."])     # sentences, as strings
        pipe([["Ada", "wrote", "it", "."], ["She", "published", "it", "in", "1843", "."]])  # or as words
        for result in pipe(dataset): ...  # a torch `Dataset` or a generator of documents

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
        is_one = isinstance(inputs, (str, list, tuple, Mapping))
        are_several = isinstance(inputs, (Iterable, Dataset)) and not is_one
        documents = readable(inputs) if are_several else {"document": inputs}
        if documents == []:
            return []
        return super().__call__(documents, **options)

    def _sanitize_parameters(self, **options: Any) -> tuple[dict, dict, dict]:
        check_integers(options, max_words=1)
        if options.get("singletons") and not self.model.config.train_singletons:
            raise ValueError("`singletons` is True, but this model was trained without singletons; leave it out.")
        genre = options.get("genre")
        genres = self._genres()
        if genre is not None and genre not in genres:
            known = ", ".join(genres) or "no genres"
            raise ValueError(f"`genre` is {genre!r}; this model knows {known}.")
        for_clusters = {}
        if "singletons" in options:
            for_clusters["singletons"] = options.pop("singletons")
        return options, {}, for_clusters

    def preprocess(
        self, inputs: Any, max_words: int = 4000, language: str = "en", genre: str | None = None
    ) -> Iterator[dict]:
        is_wrapped = isinstance(inputs, dict) and "document" in inputs
        document = read_document(inputs["document"] if is_wrapped else inputs, self.tokenizer, language)
        lengths = list(map(len, document.characters))
        for first, begin, end in windows_of(lengths, max_words):
            window = self._inputs(document.sentences[first:end], genre)
            is_last = end == len(lengths)
            yield {"document": document, "sentences": (first, begin), "is_last": is_last, **window}

    def _inputs(self, sentences: list[Any], genre: str | None) -> dict[str, torch.Tensor]:
        inputs = self.tokenizer(
            sentences,
            is_split_into_words=not isinstance(sentences[0], str),
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        if self.model.config.use_speakers:
            inputs["speaker_ids"] = torch.zeros(len(sentences), dtype=torch.long)
        if self.model.config.num_genres:
            number = 0 if genre is None else self._genres()[genre]
            inputs["genre_ids"] = torch.tensor(number)
        return dict(inputs)

    def _genres(self) -> dict[str, int]:
        config = self.model.config
        if not config.num_genres:
            return {}
        return {name: number for number, name in config.id2label.items()}

    def _forward(self, window: dict[str, Any]) -> dict[str, Any]:
        document = window.pop("document")
        first, begin = window.pop("sentences")
        is_last = window.pop("is_last")
        self.model.eval()  # a model that was just trained returns no clusters otherwise
        output = self.model(**window, return_dict=True)
        return {"document": document, "is_last": is_last, "links": links_of(output, first, begin)}

    def postprocess(self, windows: Iterable[dict[str, Any]], singletons: bool | None = None) -> dict[str, list]:
        windows = list(windows)
        document = windows[0]["document"]
        with_singletons = self.model.config.train_singletons if singletons is None else singletons
        links = [window["links"] for window in windows]
        clusters = join_links(links, with_singletons)
        return {"clusters": [list(map(document.shown, cluster)) for cluster in clusters]}


def read_document(document: Any, tokenizer: Any, language: str) -> Document:
    """Reads a text, a list of sentences, or a list of lists of words. Sentences without words are left out."""
    if isinstance(document, str):
        text = document
        spans = split_sentences(text, language)
        sentences: list[Any] = [text[start:end] for start, end in spans]
    else:
        sentences = list(document) if isinstance(document, (list, tuple)) else []
        are_texts = all(isinstance(sentence, str) for sentence in sentences)
        if not sentences or not (are_texts or all(map(is_words, sentences))):
            raise ValueError(f"The document is {document!r:.80}; pass a text, sentences, or the words of each.")
        lines = sentences if are_texts else list(map(" ".join, sentences))
        text, spans = join_words(lines, "\n")
    result = Document(text, [], [])
    for sentence, (start, _) in zip(sentences, spans, strict=True):
        if isinstance(sentence, str):
            encoded = tokenizer(sentence, return_offsets_mapping=True, add_special_tokens=False)
            offsets = encoded["offset_mapping"]
        else:
            _, offsets = join_words(sentence)
        if offsets:
            result.sentences.append(sentence)
            characters = [(start + first, start + end) for first, end in offsets]
            result.characters.append(characters)
    if not result.sentences:
        raise ValueError(f"The document {text!r:.80} has no words; pass a text with words.")
    return result


def split_sentences(text: str, language: str) -> list[tuple[int, int]]:
    """The characters of each sentence of a text, by the rules of the package sentencex for its composed form (NFC)."""
    try:
        from sentencex import get_sentence_boundaries
    except ImportError as error:
        raise ImportError("Raw text needs `pip install sentencex`; or pass a list of sentences.") from error
    composed = unicodedata.normalize("NFC", text)  # as its abbreviations
    plain = re.sub("[\ud800-\udfff]", "\ufffd", composed)  # Rust has no surrogates
    plain = re.sub(r"[^\S\n]", " ", plain)  # the package would break wide spaces
    places = []
    for boundary in get_sentence_boundaries(language, plain):
        if not boundary["is_paragraph_break"]:
            places.append((boundary["start_index"], boundary["end_index"]))
    if composed == text:
        return places
    # Both forms of a text have the same decomposition, where ends are counted.
    ends = _ends_in_decomposition(text)
    composed_ends = _ends_in_decomposition(composed)
    place_of = [bisect_left(ends, end) for end in composed_ends]
    return [(place_of[start], place_of[end]) for start, end in places]


def _ends_in_decomposition(text: str) -> list[int]:
    lengths = (len(unicodedata.normalize("NFD", character)) for character in text)
    return [0, *accumulate(lengths)]


def windows_of(lengths: list[int], max_words: int) -> Iterator[tuple[int, int, int]]:
    """Windows of sentences with at most `max_words` words, or with one longer sentence that no other window has.

    Yields the first sentence of each window, the first that the window before does not have, and the end.
    """
    words_before = [0, *accumulate(lengths)]  # each sentence
    end = 0
    while end < len(lengths):
        begin = end
        # A quarter of the window may repeat the window before, if the first new sentence fits as well.
        repeated = words_before[begin] - max_words // 4
        fitting = words_before[begin + 1] - max_words
        first = min(begin, bisect_left(words_before, max(repeated, fitting)))
        end = bisect_right(words_before, words_before[first] + max_words) - 1
        end = max(begin + 1, end)
        yield first, begin, end


def links_of(output: Any, first: int, begin: int) -> Links:
    """The best antecedent of each kept span in the sentences from `begin` on, of a window that starts at `first`."""
    mentions = []
    for sentence, first_token, last_token, _ in output.clusters[0].tolist():
        mentions.append((first + sentence, first_token - 1, last_token - 1))  # token 0 is a marker
    antecedents = best_antecedents(output.antecedent_scores[0], output.antecedents[0]).tolist()
    scores = output.mention_scores[0].tolist()
    links: Links = {}
    for mention, antecedent, score in zip(mentions, antecedents, scores, strict=True):
        if mention[0] >= begin:
            links[mention] = (None if antecedent < 0 else mentions[antecedent], score)
    return links


def join_links(windows: Iterable[Links], singletons: bool) -> list[list[Mention]]:
    """The clusters of mentions that are linked to each other, in the order of their first mentions.

    With `singletons`, mentions without a link whose score is above 0 are clusters of one.
    """
    clusters: dict[Mention, list[Mention]] = {}
    alone: set[Mention] = set()
    for window in windows:
        for mention, (antecedent, score) in window.items():
            if antecedent is None:
                clusters[mention] = [mention]
                if singletons and score > 0:
                    alone.add(mention)
            else:
                cluster = clusters.setdefault(antecedent, [antecedent])
                cluster.append(mention)
                clusters[mention] = cluster
    results = []
    for mention, cluster in clusters.items():
        is_its_cluster = mention == cluster[0]  # once, and not for all of its mentions
        if is_its_cluster and (len(cluster) > 1 or mention in alone):
            results.append(sorted(cluster))
    return sorted(results)
