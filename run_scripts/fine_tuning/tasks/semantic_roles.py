"""Semantic role labeling: the arguments of each predicate of a sentence, as in PropBank.

The data are PropBank's and CoNLL's columns, JSON lines or a data set. A row has the sentence's `tokens` and lists with
an entry per predicate: `predicate_index`, its first word, from 0; `predicate_lemma` and `predicate_sense`, "" if
unknown; `predicate_kind`, one of `KINDS`, "" in a file without tags; `predicate_tags`, the BIO tags of all words, with
B-V at the predicate's first word.

In the columns, every word has a line, and every predicate a column of brackets: `(ARG0*`, `*`, `*)`, `(V*)`. Roles are
read as they are written (ARG0, A0). Roles that nest in one column, of which OntoNotes has some, raise an error.

- propbank: sentence id, index of the word from 0, word, part of speech, lemma of a predicate or -, its roleset or -,
  the predicates' columns; separated by tabs.
- conll2005: word, any columns, lemma of a predicate or -, the predicates' columns (Carreras and Màrquez 2005: word,
  part of speech, parse, entities, sense, lemma). The second of three or more columns is the part of speech.
- conll2012: document, part, index of the word, word, part of speech, parse, lemma, frameset of a predicate or -, word
  sense, speaker, entities, the predicates' columns, coreference (Pradhan et al. 2012). Words with a sense have a lemma
  too, so only a frameset marks a predicate. Lines with # separate documents: `cat` joins the files of a corpus.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Features, Value
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding
from transformers.utils import logging

from modeling_elmo import ELMoForSemanticRoleLabeling, ELMoTokenizer
from modeling_elmo.heads.crf import decode_labels
from modeling_elmo.heads.pipeline_inputs import check_numbers, join_words
from modeling_elmo.heads.role_labeler import NO_WORD
from modeling_elmo.heads.role_labeler_pipeline import PREDICATE_ROLES, PredicateTags, labeled_sentence, role_spans
from modeling_elmo.inputs import NO_LABEL

from ...program.command_line import option
from ...program.data_files import JSON_FORMATS, LocatedRow, Location, column_lines, format_suffix, not_words
from ..comparison import Comparison, Item, Span, compare_items, count_errors
from ..data import (
    DataArguments,
    add_counts,
    check_cell,
    continues,
    converted_splits,
    scored_labels,
    sentence_of,
    split_sources,
    unknown_labels,
)
from ..metrics import Scores
from ..task import (
    Batch,
    Record,
    SavedHead,
    SplitOutput,
    Task,
    label_config,
    log_mean_odds,
    log_mean_probabilities,
    right_padding,
    tokenize_sentences,
)
from ..trainer import ADADELTA_HELP, TaskTrainingArguments

logger = logging.get_logger(__name__)

ROLE_FORMATS = {
    ".tsv": "propbank",
    **dict.fromkeys((".conll", ".txt"), "conll2005"),
    **dict.fromkeys((".gold_conll", ".auto_conll", ".v4_gold_conll", ".v4_auto_conll"), "conll2012"),
}
KINDS = {"verb": ("VB", "VERB", "AUX"), "noun": ("NN", "NOUN", "PROPN"), "adjective": ("JJ", "ADJ"), "other": ("",)}
ROLE_CELL = re.compile(r"(?:\(([^()*\s]+))?\*(\))?")
BIO_TAG = re.compile("O|[BI]-.+", re.DOTALL)
STRINGS = ("predicate_lemma", "predicate_sense", "predicate_kind")
PREDICATE_TAGS = ("B-V", "I-V", "B-C-V", "I-C-V")
ROLE_FEATURES = Features(
    tokens=[Value("string")],
    predicate_index=[Value("int32")],
    **dict.fromkeys(STRINGS, [Value("string")]),
    predicate_tags=[[Value("string")]],
)
OTHER_FORMAT = "Correct it, or pass another --roles_format."
DECODED_ROWS = 256  # at once: their Viterbi scores take some megabytes


class Layout(NamedTuple):
    """Indexes of the columns, the first of the roles, and the number of columns after the roles."""

    word: int
    tag: int | None
    lemma: int
    sense: int | None
    mark: int  # has - beside words that are no predicates
    roles: int
    rest: int = 0
    position: int | None = None  # of the word in its sentence


LAYOUTS = {
    "propbank": Layout(word=2, tag=3, lemma=4, sense=5, mark=5, roles=6, position=1),
    "conll2012": Layout(word=3, tag=4, lemma=6, sense=7, mark=7, roles=11, rest=1),
}


@dataclass(kw_only=True)
class SemanticRoleArguments(DataArguments):
    train_file: str | None = option(
        None,
        "Training file in UTF-8. One word per line, one column per predicate: .tsv as PropBank EWT, .conll "
        "or .txt as CoNLL-2005, .gold_conll and so on as CoNLL-2012. A sentence per record, with tokens, "
        "predicate_index and predicate_tags: .json, .jsonl. Also .gz or .zst.",
    )
    roles_format: Literal["propbank", "conll2005", "conll2012"] | None = option(
        None, "Columns of files with one word per line. Default: by the suffix of the file."
    )
    max_length: int | None = option(
        102, "Maximum tokens of a training sentence, including two markers. Other splits are not cut."
    )


@dataclass
class SemanticRoleTrainingArguments(TaskTrainingArguments):
    """Trainer's arguments, with the paper's settings for semantic roles (He et al. 2017)."""

    _argument_group_name = "training options"
    adadelta: bool = option(True, ADADELTA_HELP)
    per_device_train_batch_size: int = 80
    max_grad_norm: float = 1.0


class SemanticRoles(Task):
    """The paper's semantic roles (section 4): eight interleaved LSTM layers over `[x_k; ELMo_k; predicate]`.

    Roles are scored for the gold predicates, as by the official `srl-eval.pl`. A second output finds the predicates of
    a sentence, and is scored separately.
    """

    name = "semantic-role-labeling"
    label_column = "predicate_tags"
    metric = "f1"
    model_class = ELMoForSemanticRoleLabeling
    arguments_class = SemanticRoleArguments
    training_arguments_class = SemanticRoleTrainingArguments
    elmo_dropout = 0.1
    head_columns = ("token_type_ids", "predicate_labels")

    @staticmethod
    def read_data(arguments: SemanticRoleArguments) -> DatasetDict:
        read = partial(role_rows, roles_format=arguments.roles_format)
        sources = split_sources(arguments, dict.fromkeys(ROLE_FORMATS, read) | JSON_FORMATS)
        return converted_splits(sources, checked_row, ROLE_FEATURES)

    def prepare(self, data: DatasetDict):
        files = [Path(name) for split, name in self.source.items() if split.endswith("_file")]
        if self.arguments.roles_format and not any(format_suffix(file) in ROLE_FORMATS for file in files):
            raise ValueError("--roles_format is for files with one word per line, and there is none; leave it out.")
        self.labels = scored_labels(data, "predicate_tags")
        self.config = label_config(self.labels)
        most = self.arguments.max_length
        if most is not None:
            places = chain.from_iterable(data["train"]["predicate_index"])
            cut = sum(place >= most - 2 for place in places)
            if cut:
                logger.warning(f"--max_length {most} cuts {cut:,} predicates off the training data; they are left out.")

    def restore(self, data: DatasetDict, saved: SavedHead):
        self.labels = saved.labels
        self.config = label_config(self.labels)
        for file, sentences in data.items():
            unknown = unknown_labels(sentences, "predicate_tags", self.labels, file, saved.name)
            self.unknown_labels = add_counts(self.unknown_labels, unknown)

    def words(self, split: Dataset, tokenizer: ELMoTokenizer) -> Iterable[list[str]]:
        return split["tokens"]

    def encode(self, batch: Batch, tokenizer: ELMoTokenizer, is_training: bool) -> Batch:
        """A row per predicate, or one for a sentence without; the first row of a sentence has all predicate labels."""
        encoding = tokenize_sentences(batch["tokens"], tokenizer, self.arguments.max_length if is_training else None)
        ids = self.config["label2id"]
        rows: list[Record] = []
        for number, (places, tags) in enumerate(zip(batch["predicate_index"], batch["predicate_tags"], strict=True)):
            sentence = {name: encoding[name][number] for name in encoding}
            length = len(sentence["input_ids"])
            words = range(length - 2)
            unknown = [NO_LABEL] * length
            predicate_labels = [NO_LABEL, *(int(word in places) for word in words), NO_LABEL]
            no_predicate = {"labels": unknown, "token_type_ids": [0] * length}
            of_predicates = []
            for place, names in zip(places, tags, strict=True):
                if place in words:  # not cut off
                    labels = [ids.get(names[word], NO_LABEL) for word in words]
                    marks = [0] * length
                    marks[place + 1] = 1
                    of_predicates.append({"labels": [NO_LABEL, *labels, NO_LABEL], "token_type_ids": marks})
            for of_predicate in of_predicates or [no_predicate]:
                known = {"example_number": number, "predicate_labels": predicate_labels}
                rows.append({**sentence, **known, **of_predicate})
                predicate_labels = unknown  # in the sentence's other rows
        return {name: [row[name] for row in rows] for name in rows[0]}

    def collator(self, tokenizer: ELMoTokenizer) -> "RoleCollator":
        return RoleCollator(tokenizer)

    def predictions(self, output: SplitOutput) -> Iterable[Record]:
        for example, (predicates, places) in zip(output.examples, self._read(output), strict=True):
            words = example["tokens"]
            text, characters = join_words(words)
            record = labeled_sentence(text, words, characters, predicates)
            columns = (example["predicate_tags"], example["predicate_kind"])
            for verb, tags, kind in zip(record["verbs"], *columns, strict=True):
                verb["gold_tags"] = tags
                verb["kind"] = kind
            yield {**record, "predicates": example["predicate_index"], "predicted_predicates": places}

    def scores(self, predictions: Iterable[Record]) -> dict[str, Any]:
        predicted = []
        gold = []
        kinds = []
        predicates = []
        predicted_predicates = []
        for record in predictions:
            for verb in record["verbs"]:
                predicted.append(verb["tags"])
                gold.append(verb["gold_tags"])
                kinds.append(verb["kind"])
            predicates.append(record["predicates"])
            predicted_predicates.append(record["predicted_predicates"])
        scores = role_scores(predicted, gold, kinds if any(kinds) else None)
        return {**scores, **predicate_scores(predicted_predicates, predicates)}

    def compare(self, example: Record, prediction: Record) -> Comparison:
        """The arguments of all predicates; those of V are not scored."""
        words = prediction["words"]
        pairs = []
        views = []
        for place, verb in zip(prediction["predicates"], prediction["verbs"], strict=True):
            of_verb = compare_items(words, role_items(words, verb["gold_tags"]), role_items(words, verb["tags"]))
            pairs += of_verb.pairs
            views += [view._replace(text=f"{verb['verb']} (word {place + 1})") for view in of_verb.views]
        return Comparison(pairs, views, count_errors(pairs))

    def preprocess_logits(self, logits: tuple[Tensor, Tensor], labels: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """The best labels of each row, their probabilities, and the scores of its words as predicates.

        The log-probabilities of all labels would take about 4 GB for the development data of OntoNotes.

        Shape:
            logits: `(rows, time, num_labels)` and `(rows, time)`.
            returns: `(rows, time)`, three times. Labels are -100 where there is no word.
        """
        log_probs, predicate_logits = logits
        outside = predicate_logits < NO_WORD / 2
        is_before_end = outside.flip(1).cumsum(1).flip(1) > 0  # Trainer's padding follows the last marker
        best = decode_labels(log_probs, is_before_end & ~outside, tuple(self.labels))
        labels_of_words = best.clamp(min=0)
        best_log_probs = log_probs.gather(-1, labels_of_words[..., None]).squeeze(-1)
        return best, best_log_probs.exp(), predicate_logits

    def average(self, logits: Sequence[Any]) -> tuple[np.ndarray, ...]:
        labels, predicates = zip(*logits, strict=True)
        log_probs = torch.from_numpy(log_mean_probabilities(labels))
        predicate_logits = torch.from_numpy(log_mean_odds(predicates))
        parts = zip(log_probs.split(DECODED_ROWS), predicate_logits.split(DECODED_ROWS), strict=True)
        columns = zip(*map(self.preprocess_logits, parts), strict=True)
        return tuple(torch.cat(column).numpy() for column in columns)

    def _read(self, output: SplitOutput) -> Iterator[tuple[list[PredicateTags], list[int]]]:
        """For each sentence, the tags for its gold predicates, and the predicates that were found."""
        labels, probabilities, predicate_logits = output.logits
        row = 0
        for words, places in zip(output.examples["tokens"], output.examples["predicate_index"], strict=True):
            of_words = slice(1, len(words) + 1)
            places_found = np.flatnonzero(predicate_logits[row, of_words] > 0).tolist()
            predicates = []
            for number, place in enumerate(places, row):
                predicates.append(self._tags(place, labels[number, of_words], probabilities[number, of_words]))
            yield predicates, places_found
            row += max(1, len(places))

    def _tags(self, place: int, labels: np.ndarray, probabilities: np.ndarray) -> PredicateTags:
        check_numbers(torch.from_numpy(probabilities))
        # A marker that the sentence spells out is no word, and has no label.
        names = [self.labels[number] if number >= 0 else "O" for number in labels.tolist()]
        return PredicateTags(place, names, probabilities.tolist())


class RoleCollator:
    """Pads rows on the right, and labels of words with -100."""

    def __init__(self, tokenizer: ELMoTokenizer):
        self.tokenizer = right_padding(tokenizer)

    def __call__(self, rows: list[Record]) -> BatchEncoding:
        inputs = [dict(row) for row in rows]
        targets = {}
        for name in ("labels", "predicate_labels"):
            if name in rows[0]:
                labels = [torch.tensor(row.pop(name)) for row in inputs]
                targets[name] = pad_sequence(labels, batch_first=True, padding_value=NO_LABEL)
        batch = self.tokenizer.pad(inputs, return_tensors="pt")
        batch.update(targets)
        return batch


def role_rows(path: Path, roles_format: str | None = None) -> Iterator[LocatedRow]:
    """Sentences of a file with a word per line and a column per predicate, and the location of each word."""
    name = roles_format or ROLE_FORMATS[format_suffix(path)]
    layout = LAYOUTS.get(name)

    def has_word(numbered: tuple[int, str, list[str]]) -> bool:
        _, line, _ = numbered
        is_comment = name == "conll2012" and line.startswith("#")
        return bool(line.strip(" \t")) and not is_comment

    for are_words, block in groupby(column_lines(path), key=has_word):
        if not are_words:
            continue
        locations = []
        rows = []
        for number, _, cells in block:
            locations.append(f"{path}, line {number}")
            if name != "propbank":  # whose words may have spaces
                cells = re.split(" +", " ".join(cells).strip(" "))
            rows.append(cells)
        layout = layout or _conll2005_layout(locations[0], rows)
        yield locations, _sentence_row(locations, rows, layout)


def _conll2005_layout(location: str, rows: list[list[str]]) -> Layout:
    """The last column without brackets has the lemmas; the first sentence of a file decides."""
    columns = list(zip(*rows, strict=False))
    roles = len(columns)
    while roles and any("*" in cell or "(" in cell for cell in columns[roles - 1]):
        roles -= 1
    word_indexes = tuple(map(str, range(len(rows))))
    if roles < 2 or word_indexes in columns[1:3] or not_words([rows]):
        raise ValueError(
            f"{location} is not conll2005: word, part of speech and so on, a column with lemmas or -, and roles: "
            f"{rows[0]!r:.80}. {OTHER_FORMAT}"
        )
    lemma = roles - 1
    tag = 1 if roles > 2 else None
    return Layout(word=0, tag=tag, lemma=lemma, sense=None, mark=lemma, roles=roles)


def _sentence_row(locations: list[str], rows: list[list[str]], layout: Layout) -> dict[str, Any]:
    fixed = layout.roles + layout.rest
    predicates = []
    for number, row in enumerate(rows):
        if len(row) > layout.mark and row[layout.mark] != "-":
            predicates.append(number)
    for number, (location, row) in enumerate(zip(locations, rows, strict=True)):
        if len(row) != fixed + len(predicates):
            raise ValueError(
                f"{location} has {len(row)} columns, not {fixed} and one for each of {len(predicates)} predicates of "
                f"its sentence, which a blank line ends: {row!r:.80}. {OTHER_FORMAT}"
            )
        index = number if layout.position is None else row[layout.position]
        needed = f"{number}, as in its sentence"
        check_cell(str(index) == str(number), location, "index of the word", index, needed)
    columns = list(zip(*rows, strict=True))
    tags = []
    for column, number in enumerate(predicates, layout.roles):
        of_predicate = _bio_tags(locations, columns[column], column + 1)
        tag = of_predicate[number]
        # The lemma of a predicate may stand beside a later word: `cross` reference, `x` - rays.
        fits = of_predicate.count("B-V") == 1 and tag in PREDICATE_TAGS
        check_cell(fits, locations[number], f"column {column + 1}", tag, "in the column's one V, or its C-V")
        tags.append(of_predicate)

    def cells(column: int | None) -> list[str]:
        if column is None:
            return [""] * len(predicates)
        return [columns[column][number] for number in predicates]

    return {
        "tokens": list(columns[layout.word]),
        "predicate_index": [of_predicate.index("B-V") for of_predicate in tags],
        "predicate_lemma": cells(layout.lemma),
        "predicate_sense": cells(layout.sense),
        "predicate_kind": [kind_of_predicate(tag) for tag in cells(layout.tag)],
        "predicate_tags": tags,
    }


def _bio_tags(locations: Sequence[str], cells: Sequence[str], column: int) -> list[str]:
    tags = []
    role = None  # that is open
    for location, cell in zip(locations, cells, strict=True):
        match = ROLE_CELL.fullmatch(cell)
        begins, ends = match.groups() if match else (None, None)
        fits = match and not (begins and role) and (not ends or begins or role)
        needed = f"a part of a role, (ROLE*) or (ROLE*, *, *), and {role or 'none'} is open before it"
        check_cell(fits, location, f"column {column}", cell, needed)
        if begins:
            role = begins
            tags.append(f"B-{role}")
        elif role:
            tags.append(f"I-{role}")
        else:
            tags.append("O")
        if ends:
            role = None
    if role:
        raise ValueError(f"{locations[-1]}, column {column}: the sentence ends inside {role}; close it with *).")
    return tags


def kind_of_predicate(tag: str) -> str:
    for kind, beginnings in KINDS.items():
        if tag and tag.startswith(beginnings):
            return kind
    return ""


def checked_row(location: Location, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of `ROLE_FEATURES`, with "" for lemmas, senses and kinds that are absent."""
    tokens, (where, *_) = sentence_of(location, row)
    indexes: Any = row.get("predicate_index")
    check_cell(isinstance(indexes, list), where, "predicate_index", indexes, "a list of the predicates' first words")
    checked: dict[str, Any] = {"tokens": tokens}
    for name in ("predicate_index", *STRINGS, "predicate_tags"):
        value: Any = row.get(name)
        if value is None and name in STRINGS:
            value = [""] * len(indexes)
        fits = isinstance(value, list) and len(value) == len(indexes)
        check_cell(fits, where, name, value, f"a list with an entry for each of {len(indexes)} predicates")
        checked[name] = value
    for name in STRINGS:
        for entry in checked[name]:
            fits = isinstance(entry, str) and (name != "predicate_kind" or entry in ("", *KINDS))
            needed = f"a string, for a kind one of {', '.join(KINDS)}, or ''"
            check_cell(fits, where, name, entry, needed)
    for index, tags in zip(indexes, checked["predicate_tags"], strict=True):
        _check_predicate(where, len(tokens), index, tags)
    return checked


def _check_predicate(where: str, words: int, index: Any, tags: Any):
    fits = isinstance(tags, list) and len(tags) == words
    check_cell(fits, where, "predicate_tags", tags, f"lists with a tag for each of {words} words")
    for before, tag in zip(["O", *tags], tags, strict=False):
        is_tag = isinstance(tag, str) and BIO_TAG.fullmatch(tag) is not None
        fits = is_tag and (tag[0] != "I" or continues(before, tag))
        check_cell(fits, where, "predicate_tags", tag, "a BIO tag (O, B-ROLE, I-ROLE) that fits the one before")
    starts = [number for number, tag in enumerate(tags) if tag == "B-V"]
    fits = type(index) is int and starts == [index]  # True and 1.0 equal 1
    check_cell(fits, where, "predicate_index", index, f"the place of a predicate's one B-V, which is at {starts}")


def role_scores(
    predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]], kinds: Sequence[str] | None = None
) -> Scores:
    """Scores of the arguments of all predicates together, as `srl-eval.pl` of CoNLL-2005 counts them.

    An argument is right if its role and all of its words are. V, the predicate itself, is not scored; `role_arguments`
    has the other rules. Division by zero gives 0.

    Args:
        predicted, gold: BIO tags of each predicate's sentence, without padding and markers.
        kinds: kind of each predicate, such as "verb", to score the kinds apart; "" if unknown.

    Returns:
        `precision`, `recall` and `f1`; `span_f1`, which counts each piece C-X as a span of its own, except C-V;
        `per_type`: the three rates and the `number` of gold arguments of each role. With `kinds`, `per_kind` has the
        same for each kind, and `verb_f1`, `noun_f1` and so on are its F1.
    """
    counts = [len(predicted), len(gold), len(gold)]
    if kinds is not None:
        counts[-1] = len(kinds)
    if len({*counts}) > 1:
        raise ValueError(f"Received predicted tags, gold tags and kinds of {counts} predicates; pass equally many.")
    predicted_arguments = _numbered(predicted, role_arguments)
    gold_arguments = _numbered(gold, role_arguments)
    scores = argument_rates(predicted_arguments, gold_arguments)
    del scores["number"]
    span_rates = argument_rates(_numbered(predicted, role_spans), _numbered(gold, role_spans))
    scores["span_f1"] = span_rates["f1"]

    def role_of(argument: tuple[int, Any]) -> str:
        return argument[1][0]

    roles = set(map(role_of, predicted_arguments | gold_arguments))
    scores["per_type"] = _rates_apart(predicted_arguments, gold_arguments, roles, role_of)
    if kinds is None:
        return scores

    def kind_of(argument: tuple[int, Any]) -> str:
        return kinds[argument[0]]

    per_kind = _rates_apart(predicted_arguments, gold_arguments, set(kinds) - {""}, kind_of)
    for kind, rates in per_kind.items():
        scores[f"{kind}_f1"] = rates["f1"]
    return {**scores, "per_kind": per_kind}


def _rates_apart(predicted: set, gold: set, names: set[str], name_of: Callable[[Any], str]) -> dict[str, Scores]:
    """The rates of the arguments of each name."""
    rates = {}
    for name in sorted(names):
        parts = []
        for arguments in (predicted, gold):
            parts.append({argument for argument in arguments if name_of(argument) == name})
        rates[name] = argument_rates(*parts)
    return rates


def predicate_scores(predicted: Sequence[Collection[int]], gold: Sequence[Collection[int]]) -> Scores:
    """Precision, recall and F1 of the indexes of predicates that were found in each sentence."""
    rates = argument_rates(_numbered_elements(predicted), _numbered_elements(gold))
    del rates["number"]
    return {f"predicate_{name}": rate for name, rate in rates.items()}


def _numbered_elements(elements: Iterable[Iterable[Any]]) -> set[tuple[int, Any]]:
    """The number of each sentence, or of each predicate, with each of its elements."""
    return {(number, element) for number, of_one in enumerate(elements) for element in of_one}


def role_arguments(tags: Sequence[str]) -> list[tuple[str, tuple[Span, ...]]]:
    """Role and spans of each argument and of V.

    C-X continues the last X of the same predicate: the pieces are one argument, and each piece must be right. C-V thus
    belongs to V. C-X without an X before it counts as X, R-X is a role like any other, and a span that begins with I-
    counts as one that begins with B-.
    """
    arguments: list[tuple[str, list[Span]]] = []
    last: dict[str, list[Span]] = {}  # spans of the last argument of each role
    for role, first, end in role_spans(tags):
        continued = role.removeprefix("C-")
        if role != continued and continued in last:
            last[continued].append((first, end))
        elif role:
            last[continued] = [(first, end)]
            arguments.append((continued, last[continued]))
    return [(role, tuple(spans)) for role, spans in arguments]


def role_items(words: Sequence[str], tags: Sequence[str]) -> list[Item]:
    items = []
    for role, spans in role_arguments(tags):
        if role not in PREDICATE_ROLES:
            text = " ... ".join(" ".join(words[first:end]) for first, end in spans)
            items.append(Item(role, spans, text))
    return items


def argument_rates(predicted: set, gold: set) -> Scores:
    """Precision, recall, F1 and the number of gold elements."""
    right = len(predicted & gold)
    return {
        "precision": right / max(len(predicted), 1),
        "recall": right / max(len(gold), 1),
        "f1": 2 * right / max(len(predicted) + len(gold), 1),
        "number": len(gold),
    }


def _numbered(predicates: Sequence[Sequence[str]], parts_of: Callable[[Sequence[str]], list]) -> set[tuple[int, Any]]:
    """The number of each predicate with each part of its tags, except the predicate itself and words outside."""
    parts = _numbered_elements(map(parts_of, predicates))
    return {(number, part) for number, part in parts if part[0] not in ("", *PREDICATE_ROLES)}
