"""Tagging: a label for each word, such as named entities and parts of speech.

A row of the data has the `tokens` of a sentence and their `tags`, lists of strings of equal length.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

from datasets import Dataset, DatasetDict, Features, Value
from transformers import DataCollatorForTokenClassification
from transformers.utils import logging

from modeling_elmo import ELMoForTokenClassification, ELMoTokenizer
from modeling_elmo.heads.crf import tags_that_are_not_bio
from modeling_elmo.inputs import NO_LABEL

from ...program.command_line import option
from ...program.data_files import COLUMN_SUFFIXES, DEFAULT_TAGS, JSON_FORMATS, Location, column_rows
from ..comparison import Comparison, Item, compare_items
from ..data import (
    DataArguments,
    Source,
    add_counts,
    check_cell,
    class_name,
    continues,
    row_labels,
    scored_labels,
    sentence_of,
    split_sources,
    unknown_labels,
)
from ..metrics import marks_entities, scored_entities, tagging_scores
from ..task import Batch, Record, SavedHead, SplitOutput, Task, label_config, right_padding, tokenize_sentences

logger = logging.get_logger(__name__)

UNTAGGED = "_"  # of CoNLL-U
SMALL_BIO = re.compile("[besilum]-.+")
BRACKET = re.compile(r"\([^\W\d_][^()*]*(\*\)?|\))")  # (PER*, (PER*) or (PER)
BARE_TYPE = re.compile(r"[^\W\d_]{2,}([-_./]\w+)*")  # PER or creative-work
TAG_COLUMNS = (DEFAULT_TAGS, "ner_tags", "pos_tags", "upos", "labels")
TAGGING_FEATURES = Features(tokens=[Value("string")], tags=[Value("string")])
SCHEME_LETTERS = {"iob1": "BI", "iobes": "BIESLUM"}  # BILOU has L and U for E and S, BMES has M for I


@dataclass(kw_only=True)
class TaggingDataArguments(DataArguments):
    train_file: str | None = option(
        None,
        f"Training file in UTF-8. One word and its tag per line: {', '.join(COLUMN_SUFFIXES)}; one sentence "
        "per record: .json, .jsonl. Also .gz or .zst.",
    )
    tokens_column: str = option("tokens", "Key or column of a sentence's words.")
    tags_column: str | None = option(
        None,
        f"Key or column of the tags. Default: the first of {', '.join(TAG_COLUMNS)} in the data. In files with one "
        "word per line, the number of the column, from 1. Default: the last; upos in .conllu.",
    )
    word_column: int | None = option(
        None, "Column of the words in files with one word per line, from 1. Default: the first; form in .conllu."
    )
    comments: list[str] = option(
        [],
        "Prefixes of lines to skip in files with one word per line, such as '# id'. Lines with # are "
        "always skipped in .conllu.",
    )
    tag_scheme: Literal["keep", "iob1", "iobes"] = option(
        "keep",
        "iob1: convert tags from IOB1, where B- only separates adjacent entities, to BIO. iobes: convert "
        "tags from IOBES (BIOES), BILOU or BMES to BIO, which transformers' pipeline groups into entities.",
    )


@dataclass(kw_only=True)
class TaggingArguments(TaggingDataArguments):
    max_length: int | None = option(
        None, "Maximum tokens of a training sentence, including two markers. Other splits are not cut."
    )


class Tagging(Task):
    """The paper's named entities (section 4) and other tags: biLSTMs and a CRF over `[x_k; ELMo_k]`.

    Tags that mark entities, such as BIO, are scored by the F1 of entities, other tags by accuracy. Among other tags,
    `_` is none, as in CoNLL-U: such words are neither learned nor scored.
    """

    model_class = ELMoForTokenClassification
    arguments_class = TaggingArguments
    scalar_mix_l2 = 0.1
    label_column = "tags"

    @staticmethod
    def read_data(arguments: TaggingDataArguments) -> DatasetDict:
        read_columns = partial(
            column_rows,
            tokens_column=arguments.tokens_column,
            tags_column=arguments.tags_column,
            word_column=arguments.word_column,
            comments=arguments.comments,
        )
        sources = split_sources(arguments, dict.fromkeys(COLUMN_SUFFIXES, read_columns) | JSON_FORMATS)
        data = DatasetDict()
        for split, source in sources.items():
            data[split] = _tagged_split(source, split, arguments)
        return data

    def prepare(self, data: DatasetDict):
        counts = Counter(tag for _, tag in row_labels(data["train"], "tags")) if "train" in data else Counter()
        tags = {*counts} - {UNTAGGED}
        self.ignored = ignored_tags(tags)
        self._set_labels(scored_labels(data, "tags", self.ignored))
        if len(self.labels) == 1:
            raise ValueError(
                f"All tags of the split 'train' are {self.labels[0]!r}; a tagger needs two or more. Pass --tags_column "
                "if other tags are in another column."
            )
        self._tell_untagged(data)
        place = self.arguments.train_file or "The training data"
        if others := tags_that_are_not_bio(self.labels):
            scored = "" if self.has_entities else ", and all tags are scored by accuracy"
            logger.warning(
                f"{place}: {others} are not BIO tags (B-PER, I-PER), and transformers' pipeline groups the words of "
                f"BIO entities only{scored}. Pass --tag_scheme iobes for tags such as E-PER, rename others, or remove "
                "a header line."
            )
        elif not self.has_entities and (form := form_of_entities(counts)):
            logger.warning(
                f"{place}: the tags may mark entities, {form}. They are learned as tags of words, and scored by "
                "accuracy. For entities, write BIO tags: B-PER, I-PER, O."
            )

    def restore(self, data: DatasetDict, saved: SavedHead):
        self._set_labels(saved.labels)
        self.ignored = ignored_tags(self.labels)
        self._tell_untagged(data)
        for file, sentences in data.items():
            unknown = unknown_labels(sentences, "tags", [*self.labels, *self.ignored], file, saved.name)
            self.unknown_labels = add_counts(self.unknown_labels, unknown)

    @classmethod
    def missing_labels(cls, train: Dataset, saved: SavedHead) -> dict[str, int]:
        missing = super().missing_labels(train, saved)
        return {tag: count for tag, count in missing.items() if tag not in ignored_tags(saved.labels)}

    def _tell_untagged(self, data: DatasetDict):
        for split, sentences in data.items():
            are_untagged = [tag in self.ignored for _, tag in row_labels(sentences, "tags")]
            count = sum(are_untagged)
            if all(are_untagged):
                raise ValueError(
                    f"{split}: all words have the tag _, which means no tag. Pass tagged data, or leave it out."
                )
            if count:
                logger.warning(
                    f"{split}: {count:,} words have the tag _, which means no tag. They are not learned and not scored."
                )

    def _set_labels(self, labels: list[str]):
        self.labels = labels
        self.has_entities = marks_entities(labels)
        self.name = "ner" if self.has_entities else "tagging"
        self.metric = "f1" if self.has_entities else "accuracy"
        self.config = label_config(labels)

    def words(self, split: Dataset, tokenizer: ELMoTokenizer) -> Iterable[list[str]]:
        return split["tokens"]

    def encode(self, batch: Batch, tokenizer: ELMoTokenizer, is_training: bool) -> Batch:
        encoding = tokenize_sentences(batch["tokens"], tokenizer, self.arguments.max_length if is_training else None)
        ids = self.config["label2id"]
        labels = []
        for tags, tokens in zip(batch["tags"], encoding["input_ids"], strict=True):
            of_words = [ids.get(tag, NO_LABEL) for tag in tags[: len(tokens) - 2]]
            labels.append([NO_LABEL, *of_words, NO_LABEL])
        return {**encoding, "labels": labels}

    def collator(self, tokenizer: ELMoTokenizer) -> DataCollatorForTokenClassification:
        return DataCollatorForTokenClassification(right_padding(tokenizer))

    def predictions(self, output: SplitOutput) -> Iterable[Record]:
        for numbers, example in zip(output.logits.argmax(-1), output.examples, strict=True):
            of_words = numbers[1 : len(example["tokens"]) + 1]
            # Also gold tags that the training data lacks, which have no label.
            yield {**example, "predicted": list(map(self.labels.__getitem__, of_words))}

    def scores(self, predictions: Iterable[Record]) -> dict[str, Any]:
        gold = []
        predicted = []
        for record in predictions:
            places = self.tagged_words(record["tags"])
            gold.append([record["tags"][place] for place in places])
            predicted.append([record["predicted"][place] for place in places])
        return tagging_scores(predicted, gold, are_entities=self.has_entities)

    def compare(self, example: Record, prediction: Record) -> Comparison:
        words = prediction["tokens"]
        sides = prediction["tags"], prediction["predicted"]
        if self.has_entities:
            return compare_items(words, *(entity_items(words, side) for side in sides))
        places = self.tagged_words(prediction["tags"])
        return compare_items(words, *(tag_items(words, side, places) for side in sides))

    def tagged_words(self, tags: Sequence[str]) -> list[int]:
        """The places of the words that have a tag."""
        return [place for place, tag in enumerate(tags) if tag not in self.ignored]

    def answers(self, predictions: Iterable[Record]) -> Iterator[str]:
        return chain.from_iterable(super().answers(predictions))


def ignored_tags(labels: Collection[str]) -> tuple[str, ...]:
    """The tags among these labels that mean no tag."""
    is_label = UNTAGGED in labels or (labels and marks_entities(labels))
    return () if is_label else (UNTAGGED,)


def entity_items(words: Sequence[str], tags: Sequence[str]) -> list[Item]:
    items = []
    for kind, first, end in scored_entities(tags):
        items.append(Item(kind, ((first, end),), " ".join(words[first:end])))
    return items


def tag_items(words: Sequence[str], tags: Sequence[str], places: Iterable[int]) -> list[Item]:
    return [Item(tags[place], ((place, place + 1),), words[place]) for place in places]


def form_of_entities(counts: Counter[str]) -> str | None:
    """How tags that are not BIO seem to mark entities, if they do; `counts` has the number of each tag."""
    examples = [repr(tag) for tag in counts if SMALL_BIO.fullmatch(tag)]
    if examples and {"o", "O"} & counts.keys():
        return f"as BIO in small letters: {examples[0]}"
    examples = [repr(tag) for tag in counts if BRACKET.fullmatch(tag)]
    if examples:
        return f"as columns of brackets: {examples[0]}"
    (most_frequent, _), *others = counts.most_common()
    if most_frequent == "O" and others and all(BARE_TYPE.fullmatch(tag) for tag, _ in others):
        return f"as types alone: {others[0][0]!r}"
    return None


def _tagged_split(source: Source, split: str, arguments: TaggingDataArguments) -> Dataset:
    tags_column = arguments.tags_column
    if not tags_column:
        known = [name for name in TAG_COLUMNS if name in source.first()]
        tags_column = known[0] if known else DEFAULT_TAGS
    columns = {"tokens": arguments.tokens_column, "tags": tags_column}
    source.check_columns(columns)
    source.tell_unread(columns.values(), "--tags_column names other tags")
    names = source.class_names(tags_column)
    scheme = arguments.tag_scheme

    def convert(location: Location, row: Mapping[str, Any]) -> dict[str, Any]:
        tokens, locations = sentence_of(location, row, columns["tokens"])
        tags = _row_tags(locations, row.get(tags_column), tags_column, names)
        if scheme != "keep":
            tags = _to_bio(locations, tags, scheme)
        return {"tokens": tokens, "tags": tags}

    data = source.convert(convert, TAGGING_FEATURES, split)
    if scheme == "keep":
        _warn_of_iob1(source.name, data)
    return data


def _warn_of_iob1(name: str, data: Dataset):
    inside = [number for number, tags in enumerate(data["tags"]) if _begins_inside(tags)]
    if inside:
        first = inside[0]
        words = " ".join(data[first]["tokens"])
        logger.warning(
            f"{name}: entities of {len(inside):,} sentences begin with I-, first in sentence {first + 1:,}: "
            f"{words:.80}. The tags are kept; if they are IOB1, pass --tag_scheme iob1."
        )


def _row_tags(locations: list[str], tags: Any, column: str, names: list[str] | None) -> list[str]:
    """The tag of each word; `locations` has the place of each word."""
    is_complete = isinstance(tags, list) and len(tags) == len(locations)
    check_cell(is_complete, locations[0], column, tags, f"a list with a tag for each of {len(locations)} words")
    return [class_name(place, column, tag, names) for place, tag in zip(locations, tags, strict=True)]


def _begins_inside(tags: list[str]) -> bool:
    """Whether an entity begins with `I-TYPE`."""
    before = "O"
    for tag in tags:
        if tag[:2] == "I-" and not continues(before, tag):
            return True
        before = tag
    return False


def _to_bio(locations: list[str], tags: list[str], scheme: str) -> list[str]:
    """Converts to BIO without changing entities. Tags that do not fit together are read as by conlleval and seqeval."""
    letters = SCHEME_LETTERS[scheme]
    converted = []
    for location, before, tag in zip(locations, ["O", *tags], tags, strict=False):
        if tag == "O":
            converted.append(tag)
            continue
        if tag[:1] not in letters or tag[1:2] != "-":
            forms = ", ".join(f"{letter}-TYPE" for letter in letters)
            raise ValueError(
                f"{location}: {tag!r} is not an {scheme.upper()} tag (O, {forms}); pass --tag_scheme keep."
            )
        is_same_type = before[1:] == tag[1:]
        goes_on = is_same_type and tag[0] in "IMEL" and before[0] in "BIM"
        letter = "I" if goes_on else "B"
        converted.append(f"{letter}{tag[1:]}")
    return converted
