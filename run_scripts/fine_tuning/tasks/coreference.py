"""Coreference resolution: which mentions of a document are the same person, place or thing.

The data are CoNLL-2012 columns (also LitBank's), JSON lines or a data set. A row is a document: its name `document`,
which differs from all others of the split; the words of its `sentences`; its `mentions`, `[sentence, first word, last
word (inclusive), cluster]` each, in the order of the document, where clusters are counted from 0 in the order of their
first mentions; `speakers`, one for each word, empty if the document has none; and the `genre`, empty if unknown.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Features, Value
from torch import Tensor
from transformers import BatchEncoding, TrainerCallback
from transformers.utils import logging

from modeling_elmo import ELMoConfig, ELMoForCoreferenceResolution, ELMoTokenizer
from modeling_elmo.heads.pipeline_inputs import is_words

from ...program.command_line import option
from ...program.data_files import JSON_FORMATS, LocatedRow, RowReader, column_lines
from ..comparison import Comparison, Item, Pair, Segment, View, count_errors, paired
from ..data import DataArguments, Source, check_cell, converted_splits, is_text, label_names, split_sources
from ..features import FeatureStore
from ..metrics import Scores
from ..task import Batch, Record, SavedHead, SplitOutput, Task, label_config
from ..trainer import DECAY_STEPS, TaskTrainingArguments

logger = logging.get_logger(__name__)

TOKEN_COLUMNS = ("input_ids", "character_ids", "attention_mask", "speaker_ids")  # of encodings: one value a token

DOCUMENT_SUFFIXES = (".conll", ".gold_conll", ".auto_conll", ".v4_gold_conll", ".v4_auto_conll")
DOCUMENT_FEATURES = Features(
    document=Value("string"),
    sentences=[[Value("string")]],
    mentions=[[Value("int32")]],
    speakers=[[Value("string")]],
    genre=Value("string"),
)
DOCUMENT_LINE = re.compile(r"#(begin|end) document(?: \((.+)\))?;?(?: part ([0-9]{1,9}))?;? *")
BRACKETS = re.compile(r"(\(?)([0-9]{1,9})(\)?)")
WORD, SPEAKER = 3, 9  # columns, from 0; coreference is the last one
NOTHING = ("-", "_", "")  # of a column without a value

MENTION = "[sentence, first word, last word, cluster], where sentences and words of the document count from 0"
MentionSpan = tuple[int, int, int]  # sentence, first word, last word (inclusive); all from 0
Cluster = Sequence[MentionSpan]
METRICS = ("muc", "b_cubed", "ceaf", "mention")


@dataclass(kw_only=True)
class CoreferenceArguments(DataArguments):
    train_file: str | None = option(
        None,
        f"Training file. CoNLL-2012 columns, also LitBank's: {', '.join(DOCUMENT_SUFFIXES)}; a document "
        "per record: .json, .jsonl. Also .gz or .zst.",
    )
    max_sentences: int = option(
        50,
        "Maximum sentences of a training document: a random window, drawn again in each epoch. Other splits "
        "are read whole.",
    )
    train_singletons: bool = option(
        False, "Learn, return and score singletons too: mentions that no other mention refers to."
    )


@dataclass
class CoreferenceTrainingArguments(TaskTrainingArguments):
    """Trainer's arguments, with the settings of Lee et al. (2017): Adam, and one document per step."""

    _argument_group_name = "training options"
    trainer_options = {"remove_unused_columns": False, "label_names": ["mentions"]}  # for `DocumentCollator`

    lr_decay: float = option(
        0.999, f"Factor of the learning rate after every {DECAY_STEPS} steps; 1 uses --lr_scheduler_type."
    )
    num_train_epochs: float = 150
    per_device_train_batch_size: int = 1
    per_device_eval_batch_size: int = 1

    def __post_init__(self):
        super().__post_init__()
        for name, needed, reason in (
            ("--per_device_train_batch_size", 1, "a batch is a document; --gradient_accumulation_steps joins several"),
            ("--per_device_eval_batch_size", 1, "a batch is a document"),
            ("--dataloader_persistent_workers", False, "these workers repeat the windows of the first epoch"),
            ("n_gpu", 1, "devices would split a document; start torchrun, or set CUDA_VISIBLE_DEVICES=0"),
        ):
            value = getattr(self, name.lstrip("-"))
            if value not in (needed, 0):
                raise ValueError(f"{name} {value}: it must be {needed}, because {reason}.")
        if self.lr_decay < 1 and self.lr_scheduler_type != "constant":
            kind = self.to_dict()["lr_scheduler_type"]
            raise ValueError(f"--lr_scheduler_type {kind}: --lr_decay {self.lr_decay} replaces it; pass --lr_decay 1.")


class Coreference(Task):
    """The paper's coreference resolution (section 4): span ranking (Lee et al. 2017) over `[x_k; ELMo_k]`.

    The main score `f1` is the mean F1 of MUC, B-cubed and CEAF over all documents. It counts singletons, to
    which no other mention refers, only with --train_singletons. If the data has them, both scores are reported.
    """

    name = "coreference-resolution"
    metric = "f1"
    model_class = ELMoForCoreferenceResolution
    arguments_class = CoreferenceArguments
    training_arguments_class = CoreferenceTrainingArguments
    scalar_mix_l2 = 0.0
    head_columns = ("mentions", "speaker_ids", "genre_ids", "max_sentences")
    can_average = False  # models keep different spans

    @staticmethod
    def read_data(arguments: CoreferenceArguments) -> DatasetDict:
        formats: dict[str, RowReader] = dict.fromkeys(DOCUMENT_SUFFIXES, conll_documents)
        sources = split_sources(arguments, formats | JSON_FORMATS)
        data = converted_splits(sources, document_row, DOCUMENT_FEATURES)
        for split, documents in data.items():
            name, count = Counter(documents["document"]).most_common(1)[0]
            if count > 1:
                source = sources[split].name
                raise ValueError(f"{source}: {count} documents have the name {name!r}; give each its own.")
            _warn_of_repeated_mentions(sources[split])
        return data

    def prepare(self, data: DatasetDict):
        train = data.get("train", next(iter(data.values())))
        sizes = {len(cluster) for mentions in train["mentions"] for cluster in clusters_of(mentions)}
        if "train" in data and max(sizes, default=0) < 2:
            raise ValueError(
                "No cluster of the split 'train' has two mentions, so there is nothing to learn. Correct it."
            )
        self.has_singletons = 1 in sizes
        if self.arguments.train_singletons and not self.has_singletons:
            raise ValueError(
                "--train_singletons: no mention of the training data is a singleton, so a model cannot learn them. "
                "Leave it out."
            )
        self.has_speakers = any(train["speakers"])
        self.genres = label_names(data, "genre") if any(train["genre"]) else []
        self.config = {
            "train_singletons": self.arguments.train_singletons,
            "use_speakers": self.has_speakers,
            "num_genres": len(self.genres),
        }
        if self.genres:
            self.config |= label_config(self.genres)  # the pipeline takes names of genres

    def restore(self, data: DatasetDict, saved: SavedHead):
        mentions = chain.from_iterable(documents["mentions"] for documents in data.values())
        self.has_singletons = any(1 in map(len, clusters_of(of_document)) for of_document in mentions)
        self.has_speakers = saved.config.use_speakers
        self.genres = saved.labels if saved.config.num_genres else []
        for file, documents in data.items():
            for document in documents if self.genres else ():
                known = f"{saved.name}: one of {', '.join(self.genres):.200}"
                place = f"{file}, document {document['document']}"
                check_cell(document["genre"] in self.genres, place, "genre", document["genre"], f"a genre of {known}")

    @staticmethod
    def saved_arguments(config: ELMoConfig) -> dict[str, Any]:
        return {"train_singletons": config.train_singletons}

    def words(self, split: Dataset, tokenizer: ELMoTokenizer) -> Iterable[list[str]]:
        return chain.from_iterable(split["sentences"])

    def encode(self, batch: Batch, tokenizer: ELMoTokenizer, is_training: bool) -> Batch:
        encoded: Batch = defaultdict(list)
        for sentences in batch["sentences"]:
            for name, values in encode_sentences(sentences, tokenizer).items():
                encoded[name].append(values)
        if self.has_speakers:
            encoded["speaker_ids"] = list(map(speaker_numbers, batch["sentences"], batch["speakers"]))
        if self.genres:
            encoded["genre_ids"] = [self.genres.index(genre) for genre in batch["genre"]]
        encoded["mentions"] = batch["mentions"]
        encoded["max_sentences"] = [self.arguments.max_sentences if is_training else None] * len(batch["sentences"])
        return encoded

    def collator(self, tokenizer: ELMoTokenizer) -> "DocumentCollator":
        return DocumentCollator()

    def feature_collator(self, tokenizer: ELMoTokenizer, store: FeatureStore | None) -> "DocumentCollator":
        return DocumentCollator(store)

    def predictions(self, output: SplitOutput) -> Iterable[Record]:
        for example, mentions in zip(output.examples, predicted_mentions(output), strict=True):
            shown = {name: example[name] for name in ("document", "sentences", "mentions")}
            yield {**shown, "predicted": mentions}

    def scores(self, predictions: Iterable[Record]) -> dict[str, Any]:
        predicted = []
        gold = []
        for record in predictions:
            predicted.append(clusters_of(record["predicted"]))
            gold.append(clusters_of(record["mentions"]))
        counts_singletons = self.arguments.train_singletons
        numbers = {}
        tables = {}
        ways = [counts_singletons, not counts_singletons] if self.has_singletons else [counts_singletons]
        for singletons in ways:
            scores = coreference_scores(predicted, gold, singletons)
            name = "with_singletons" if singletons else "without_singletons"
            tables[name] = scores  # with precision and recall
            suffix = "" if singletons == counts_singletons else f"_{name}"
            for metric, value in scores.items():
                if metric.endswith("f1"):
                    numbers[f"{metric}{suffix}"] = value
        return numbers | tables

    def compare(self, example: Record, prediction: Record) -> Comparison:
        """The mentions of all clusters that count. Sentences without an error are left out."""
        sentences = prediction["sentences"]
        gold = antecedents_of(prediction["mentions"], self.arguments.train_singletons)
        predicted = antecedents_of(prediction["predicted"], self.arguments.train_singletons)
        cluster_of = {(sentence, first, last): cluster for sentence, first, last, cluster in prediction["mentions"]}
        pairs: list[Pair] = []
        views = []
        for number, words in enumerate(sentences):
            items: list[list[Item]] = []
            for antecedents in (gold, predicted):
                inside = {span: before for span, before in antecedents.items() if span[0] == number}
                items.append(list(mention_items(words, inside, cluster_of)))
            of_sentence = paired(*items)
            pairs += of_sentence
            if count_errors(of_sentence):
                right = {*items[0]} & {*items[1]}
                sides = []
                for antecedents, of_side in zip((gold, predicted), items, strict=True):
                    sides.append([mention_segment(item, number, antecedents, sentences, right) for item in of_side])
                views.append(View(" ".join(words), *sides))
        return Comparison(pairs, views, count_errors(pairs))


def antecedents_of(mentions: Iterable[list[int]], singletons: bool) -> dict[MentionSpan, MentionSpan | None]:
    """The mention before each mention of a cluster, `None` for the first. Without `singletons`, these are left out."""
    antecedents: dict[MentionSpan, MentionSpan | None] = {}
    for cluster in clusters_of(mentions):
        if singletons or len(cluster) > 1:
            antecedents |= zip(cluster, [None, *cluster], strict=False)
    return dict(sorted(antecedents.items()))


def mention_items(
    words: Sequence[str],
    antecedents: Mapping[MentionSpan, MentionSpan | None],
    cluster_of: Mapping[MentionSpan, int],
) -> Iterator[Item]:
    """The mentions of a sentence; the class of one says whether, and how well, it is joined with an earlier one."""
    for span, antecedent in antecedents.items():
        _, first, last = span
        name = "first mention"
        if antecedent is not None:
            is_other = span in cluster_of and cluster_of.get(antecedent) != cluster_of[span]
            name = "mention of another" if is_other else "later mention"
        yield Item(name, ((first, last + 1),), " ".join(words[first : last + 1]))


def mention_segment(
    item: Item,
    number: int,
    antecedents: Mapping[MentionSpan, MentionSpan | None],
    sentences: list[list[str]],
    right: set[Item],
) -> Segment:
    """A mention with the words of the mention before it; `number` is the number of its sentence."""
    ((first, end),) = item.spans
    antecedent = antecedents[number, first, end - 1]
    name = item.name
    if antecedent is not None:
        sentence, before, last = antecedent
        name = f"= {' '.join(sentences[sentence][before : last + 1])} (sentence {sentence + 1})"
    return Segment(item.text, name, item in right)


def speaker_numbers(sentences: list[list[str]], speakers: list[list[str]]) -> list[int]:
    """The number of each token's speaker. Markers, and documents without speakers, have the number 0."""
    if not speakers:
        return [0] * sum(len(words) + 2 for words in sentences)
    numbers: dict[str, int] = {}
    of_tokens = []
    for names in speakers:
        of_words = [numbers.setdefault(name, len(numbers)) for name in names]
        of_tokens += [0, *of_words, 0]
    return of_tokens


def encode_sentences(sentences: list[list[str]], tokenizer: ELMoTokenizer) -> dict[str, np.ndarray]:
    """All tokens of a document, one sentence after the other. The biLM reads them apart, by their `token_type_ids`.

    Shape:
        result: `(tokens, ...)` each; `token_type_ids` are the numbers of the sentences.
    """
    padded = tokenizer(sentences, is_split_into_words=True, padding=True, return_tensors="np")
    mask_BT = padded["attention_mask"] == 1
    sentences_N = mask_BT.nonzero()[0].astype(np.int32)  # datasets stores int64 of this name in 8 bits where all fit
    return {name: ids[mask_BT] for name, ids in padded.items()} | {"token_type_ids": sentences_N}


class DocumentCollator(TrainerCallback):
    """Makes a batch of one document: its rows are the sentences, padded on the right.

    A training document is cut to a window of `max_sentences`, which depends on the seed, the epoch and the document
    alone. So a resumed training sees the same windows. Without a store of layers, the model computes them.
    """

    def __init__(self, store: FeatureStore | None = None):
        self.store = store
        self.seed = 0
        self.epoch = 0

    def on_epoch_begin(self, args, state, control, **_):
        self.seed = args.seed if args.data_seed is None else args.data_seed
        self.epoch = int(state.epoch)  # a resumed training begins within an epoch

    def __call__(self, rows: list[dict[str, Any]]) -> BatchEncoding:
        (row,) = rows  # the training options allow no others
        sentences_N = np.asarray(row["token_type_ids"])
        count = int(sentences_N[-1]) + 1
        most = min(row.get("max_sentences") or count, count)
        chance = np.random.default_rng([self.seed, self.epoch, row["example_number"]])
        first = int(chance.integers(count - most + 1))
        end = first + most
        inside = slice(*np.searchsorted(sentences_N, [first, end]))
        lengths_B = np.bincount(sentences_N[inside] - first)
        mask_BT = np.arange(lengths_B.max()) < lengths_B[:, None]
        batch = {}
        for name in TOKEN_COLUMNS:
            if name in row:
                batch[name] = scattered(np.asarray(row[name][inside]), mask_BT)
        if self.store is not None:
            layers = self.store[row["text_number"]][inside]
            batch["elmo_hidden_states"] = scattered(layers, mask_BT).transpose(1, 2)
        if "genre_ids" in row:
            batch["genre_ids"] = torch.tensor(row["genre_ids"])
        mentions_M4 = np.array(row["mentions"], dtype=np.int64).reshape(-1, 4)
        is_inside_M = (mentions_M4[:, 0] >= first) & (mentions_M4[:, 0] < end)
        shift = [-first, 1, 1, 0]  # to the sentence of the window, and to tokens, of which the first is a marker
        batch["mentions"] = torch.from_numpy(mentions_M4[is_inside_M] + shift)[None]
        return BatchEncoding(batch)


def scattered(values_N: np.ndarray, mask_BT: np.ndarray) -> Tensor:
    """The values of the real tokens at their positions, and 0 elsewhere.

    Shape:
        values_N: `(tokens, ...)`
        mask_BT: `(batch, time)`
        result: `(batch, time, ...)`
    """
    result = np.zeros((*mask_BT.shape, *values_N.shape[1:]), dtype=values_N.dtype)
    result[mask_BT] = values_N
    return torch.from_numpy(result)


def predicted_mentions(output: SplitOutput) -> Iterator[list[list[int]]]:
    """The mentions of each document that are in a cluster, as in the data: sentence, first and last word, cluster."""
    clusters, mention_scores = output.logits
    if not np.isfinite(mention_scores).all():
        raise ValueError("Some mention scores are not finite: training diverged. Pass a smaller learning rate.")
    for mentions in clusters:
        # Below 0 are spans without a cluster, and Trainer's padding where documents have different numbers of spans.
        in_cluster = mentions[mentions[:, 3] >= 0]
        yield (in_cluster - [0, 1, 1, 0]).tolist()


def clusters_of(mentions: Iterable[list[int]]) -> list[list[MentionSpan]]:
    clusters: dict[int, list[MentionSpan]] = {}
    for sentence, first, last, cluster in mentions:
        clusters.setdefault(cluster, []).append((sentence, first, last))
    return list(clusters.values())


def document_row(location: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """A checked document with its mentions in order. `speakers` and `genre` may be missing."""
    name: Any = row.get("document")
    sentences: Any = row.get("sentences")
    mentions: Any = row.get("mentions")
    speakers = row.get("speakers") or []
    genre = row.get("genre") or ""
    check_cell(is_text(name), location, "document", name, "a non-empty name")
    check_cell(_has_sentences(sentences), location, "sentences", sentences, "one list of words or more, none empty")
    if speakers:
        fits = _has_sentences(speakers) and list(map(len, speakers)) == list(map(len, sentences))
        check_cell(fits, location, "speakers", speakers, "a name for each word, or nothing")
    check_cell(isinstance(genre, str), location, "genre", genre, "a name")
    check_cell(isinstance(mentions, list), location, "mentions", mentions, "a list, which may be empty")
    for mention in mentions:
        check_cell(_is_mention(mention, sentences), location, "mentions", mention, MENTION)
    numbered = _numbered_mentions(mentions)
    return {"document": name, "sentences": sentences, "mentions": numbered, "speakers": speakers, "genre": genre}


def _has_sentences(value: Any) -> bool:
    """Whether the value is a list of one sentence or more."""
    return isinstance(value, list) and bool(value) and all(map(is_words, value))


def _is_mention(mention: Any, sentences: list[list[str]]) -> bool:
    if not isinstance(mention, list) or [type(number) for number in mention] != [int] * 4:
        return False
    sentence, first, last, _ = mention
    return 0 <= sentence < len(sentences) and 0 <= first <= last < len(sentences[sentence])


def _warn_of_repeated_mentions(source: Source):
    """Reads the rows again, because the converted rows may come from the cache."""
    for location, row in source.read():
        mentions = row["mentions"]
        again = len(mentions) - len({tuple(span) for *span, _ in mentions})
        if again:
            logger.warning(
                f"{location}: {again} of {len(mentions)} mentions occur again. They are counted once, and clusters "
                "that share a mention are one cluster. Correct the file if this is a mistake."
            )


def _numbered_mentions(mentions: list[list[int]]) -> list[list[int]]:
    """The mentions in order, with clusters from 0. Clusters that share one are merged, as by Lee et al. (2017)."""
    from scipy.cluster.hierarchy import DisjointSet

    clusters: dict[MentionSpan, int] = {}
    merged = DisjointSet(cluster for *_, cluster in mentions)
    for sentence, first, last, cluster in mentions:
        merged.merge(clusters.setdefault((sentence, first, last), cluster), cluster)
    numbers: dict[int, int] = {}
    numbered = []
    for span in sorted(clusters):
        cluster = merged[clusters[span]]
        numbered.append([*span, numbers.setdefault(cluster, len(numbers))])
    return numbered


def conll_documents(path: Path) -> Iterator[LocatedRow]:
    """Documents of a file with a word per line, from `#begin document (NAME); part 0` to `#end document`.

    Columns are separated by tabs or by spaces. The part may be missing, and the end may repeat the name. The number
    of the part is added to the name. The genre is the first folder of the name, as in OntoNotes. Mentions of one
    cluster that cross are read as nested: the bracket that was opened last is closed first.
    """
    begin: tuple[str, str, str | None] | None = None
    lines: list[tuple[str, str, list[str]]] = []
    for number, line, cells in column_lines(path):
        where = f"{path}, line {number}"
        match = DOCUMENT_LINE.fullmatch(line)
        kind, name, part = match.groups() if match else (None, None, None)
        if kind == "begin" and name:
            if begin is not None:
                raise ValueError(f"{where}: {begin[1]!r:.80} has no end; write '#end document' above this line.")
            begin = (where, name, part)
            lines = []
        elif begin is not None and kind == "end":
            if name not in (None, begin[1]):
                raise ValueError(f"{where} ends {name!r:.80}, but the document is {begin[1]!r:.80}. Correct the file.")
            yield begin[0], _document(*begin, lines)
            begin = None
        elif begin is not None:
            lines.append((where, line, cells))
        elif line.strip():
            advice = "Begin a document with a line '#begin document (NAME); part 0', or without the part"
            raise ValueError(f"{where} is in no document: {line!r:.80}. {advice}.")
    if begin is not None:
        raise ValueError(f"{begin[0]}: the document {begin[1]!r:.80} has no '#end document'; the file is incomplete.")


def _document(where: str, name: str, part: str | None, lines: list[tuple[str, str, list[str]]]) -> dict[str, Any]:
    """The row of a document; `where` is its first line, and `part` the digits of its part."""
    sentences = []
    mentions = []
    speakers = []
    for has_words, block in groupby(lines, key=lambda line: bool(line[1].strip(" \t"))):
        if not has_words:
            continue
        words = []
        names = []
        cells = []
        for location, line, columns in block:
            if len(columns) <= WORD + 1 or columns[0] != name or not columns[WORD]:
                raise ValueError(
                    f"{location} is {line!r:.80}; write the document's name {name!r:.80}, its part, the word's number, "
                    "the word, and further columns, the last for coreference."
                )
            words.append(columns[WORD])
            names.append(columns[SPEAKER] if len(columns) > SPEAKER + 1 else "-")
            cells.append((location, columns[-1].strip(" ")))
        for mention in _brackets(cells):
            mentions.append([len(sentences), *mention])
        sentences.append(words)
        speakers.append(names)
    if not sentences:
        raise ValueError(f"{where}: the document {name!r:.80} has no sentences; remove it.")
    return {
        "document": name if part is None else f"{name}_{int(part)}",
        "sentences": sentences,
        "mentions": mentions,
        "speakers": speakers if any(speaker not in NOTHING for speaker in chain(*speakers)) else [],
        "genre": name.split("/")[0] if "/" in name else "",
    }


def _brackets(cells: list[tuple[str, str]]) -> list[list[int]]:
    """First word, last word and cluster of each mention: `(3` begins one, `3)` ends it, `(3)` is one word."""
    mentions: list[list[int]] = []
    opened: dict[int, list[tuple[int, str]]] = defaultdict(list)  # first word and location, by cluster
    for word, (where, cell) in enumerate(cells):
        if cell in NOTHING:
            continue
        for part in cell.split("|"):
            match = BRACKETS.fullmatch(part)
            if not match or match[0] == match[2]:
                raise ValueError(f"{where}: {part!r:.80} is not a mention; write (3, 3), (3), several with |, or -.")
            begins, number, ends = match.groups()
            cluster = int(number)
            if begins:
                opened[cluster].append((word, where))
            if not ends:
                continue
            if not opened[cluster]:
                raise ValueError(f"{where}: {part} ends a mention, but ({cluster} does not begin it in this sentence.")
            first, _ = opened[cluster].pop()
            mentions.append([first, word, cluster])
    for cluster, begun in opened.items():
        if begun:
            raise ValueError(
                f"{begun[-1][1]}: ({cluster} begins a mention that {cluster}) does not end in its sentence."
            )
    return mentions


def coreference_scores(
    predicted: Sequence[Sequence[Cluster]], gold: Sequence[Sequence[Cluster]], singletons: bool
) -> Scores:
    """Scores of the clusters of each document; without `singletons`, those of one mention do not count on either side.

    The formulas come from Pradhan et al. (2014), with CEAF of entities (phi4) as in Luo (2005). All numerators and
    denominators are summed over the documents, like the official scorer's. Division by zero gives 0.

    Returns:
        `f1`, the mean F1 of MUC, B-cubed and CEAF; `X_precision`, `X_recall` and `X_f1` for the X `muc`, `b_cubed`,
        `ceaf`, and `mention`: the mentions that are found. MUC counts links, so it ignores singletons anyway.
    """
    totals = np.zeros((len(METRICS), 4))
    for clusters, gold_clusters in zip(predicted, gold, strict=True):
        totals += _document_counts(_mention_sets(clusters, singletons), _mention_sets(gold_clusters, singletons))
    scores: Scores = {"f1": 0.0}
    for name, (right, number, gold_right, gold_number) in zip(METRICS, totals.tolist(), strict=True):
        precision = _share(right, number)
        recall = _share(gold_right, gold_number)
        scores[f"{name}_precision"] = precision
        scores[f"{name}_recall"] = recall
        scores[f"{name}_f1"] = _share(2 * precision * recall, precision + recall)
    scores["f1"] = float(np.mean([scores["muc_f1"], scores["b_cubed_f1"], scores["ceaf_f1"]]))
    return scores


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _mention_sets(clusters: Sequence[Cluster], singletons: bool) -> list[set[MentionSpan]]:
    sets = [set(cluster) for cluster in clusters]
    if len(set().union(*sets)) < sum(map(len, clusters)):
        raise ValueError("A mention is in a document's clusters twice; pass clusters that have no mention in common.")
    least = 1 if singletons else 2
    return [mentions for mentions in sets if len(mentions) >= least]


def _document_counts(predicted: list[set[MentionSpan]], gold: list[set[MentionSpan]]) -> np.ndarray:
    """For each metric the numerator and denominator of precision, then of recall. Shape: `(4, 4)`."""
    from scipy.optimize import linear_sum_assignment

    common = np.zeros((len(predicted), len(gold)), dtype=int)
    for row, cluster in enumerate(predicted):
        common[row] = [len(cluster & gold_cluster) for gold_cluster in gold]
    # Shape: `(predicted, 1)`, `(gold,)`.
    sizes = np.array(list(map(len, predicted)), dtype=float)[:, None]
    gold_sizes = np.array(list(map(len, gold)), dtype=float)
    # A cluster of n mentions has n - 1 links; the part that two clusters share keeps its size - 1.
    links = (common - 1).clip(0).sum()
    similarity = 2 * common / (sizes + gold_sizes)
    aligned = similarity[linear_sum_assignment(similarity, maximize=True)].sum()
    mentions = sizes.sum()
    gold_mentions = gold_sizes.sum()
    b_cubed_precision = (common**2 / sizes).sum()
    b_cubed_recall = (common**2 / gold_sizes).sum()
    return np.array(
        [
            [links, mentions - len(predicted), links, gold_mentions - len(gold)],
            [b_cubed_precision, mentions, b_cubed_recall, gold_mentions],
            [aligned, len(predicted), aligned, len(gold)],
            [common.sum(), mentions, common.sum(), gold_mentions],
        ]
    )
