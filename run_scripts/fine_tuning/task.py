"""From the folder of a biLM to the head of a task: what a task is, its tokenizer, its data in ids, its model."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers.utils import logging

from modeling_elmo import ELMoConfig, ELMoTokenizer
from modeling_elmo.modeling_elmo_heads import ELMoTaskModel
from modeling_elmo.run_scripts.fine_tuning.data import DataArguments
from modeling_elmo.run_scripts.fine_tuning.sources import code_states
from modeling_elmo.run_scripts.fine_tuning.word_vectors import WordVectors, initial_embeddings, task_vocabulary
from modeling_elmo.tokenization.elmo_characters import SPECIAL_WORDS

logger = logging.get_logger(__name__)

Record = dict[str, Any]


@dataclass(kw_only=True)
class HeadArguments:
    model_name_or_path: str = field(metadata={"help": "A folder or Hub name of an ELMo model."})
    head: Literal["paper", "linear"] = field(
        default="paper", metadata={"help": "The paper's network for the task, or one linear layer on ELMo."}
    )
    use_elmo: bool = field(default=True, metadata={"help": "--no_use_elmo: the same network without ELMo."})
    elmo_placement: Literal["input", "output", "both"] | None = field(
        default=None,
        metadata={"help": "Where ELMo enters the network (section 5.2). Default: both for questions, else input."},
    )
    scalar_mix_mode: str = field(default="learned", metadata={"help": "learned, average, top, or a layer's number."})
    scalar_mix_l2: float | None = field(
        default=None, metadata={"help": "lambda of lambda * ||s||^2 (section 3.3). Default: 0.1 for tags, else 0.001."}
    )
    elmo_dropout: float = field(default=0.5, metadata={"help": "Dropout on ELMo."})
    freeze_bilm: bool = field(default=True, metadata={"help": "--no_freeze_bilm: the biLM is trained too."})
    word_embedding_size: int = field(default=50, metadata={"help": "Width of the network's own word vectors; 0: none."})
    word_min_count: int = field(default=2, metadata={"help": "Rarer words of the training text share one vector."})
    word_vectors: str | None = field(
        default=None, metadata={"help": "A file to start them from: GloVe, word2vec text."}
    )
    word_vectors_limit: int | None = field(default=None, metadata={"help": "Read only so many words of the file."})
    freeze_word_vectors: bool = field(default=False, metadata={"help": "Keep the word vectors as they are."})
    config_overrides: str | None = field(
        default=None, metadata={"help": 'Other fields of ELMoConfig, as JSON: {"task_hidden_size": 100}'}
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Cut longer texts to train on, in words and markers. Others are read whole."}
    )

    def __post_init__(self):
        if self.word_vectors is not None and self.word_embedding_size == 0:
            raise ValueError(f"--word_embedding_size 0: --word_vectors {self.word_vectors} are as wide as their file.")
        for name in ("word_vectors_limit", "freeze_word_vectors"):
            if self.word_vectors is None and getattr(self, name):
                raise ValueError(f"--{name} is for the vectors of a file; pass --word_vectors FILE too.")


class Predicted(NamedTuple):
    """What a head put out for a split.

    Args:
        logits: `(rows, ...)`, or a tuple of such.
        labels: the same.
        examples: of the raw data.
        rows: their encodings, in the order of the logits; `example_number` tells whose each is.
    """

    logits: Any
    labels: Any
    examples: Dataset
    rows: Dataset


@dataclass
class Task:
    """What differs between tasks.

    Args:
        name: for records and folders.
        model_class: of the head.
        metric: the score that chooses the best checkpoint and is compared.
        data: the raw splits `train`, `validation`, `test`, those there are.
        source: where they come from, for the card.
        settings: options, beside those of the head and of the training, that the scores depend on.
        config: fields of the head's configuration that the data set, such as its labels.
        elmo_placement: where ELMo enters the paper's network.
        scalar_mix_l2: the paper's lambda for the task (supplement A).
        words: the words of a split, a list a text.
        encode: a batch of raw examples as the model's inputs and labels, to train on or not. Where an example may have
            several rows, `example_number` tells whose each is, counted within the batch.
        collator: makes a batch of rows.
        scores: figures of what was predicted; single numbers, and tables in dictionaries.
        predictions: what goes into the file of predictions, a record an example.
        average: the logits of several models together, of those of each.
    """

    name: str
    model_class: type[Any]
    metric: str
    data: DatasetDict
    source: dict[str, str]
    settings: dict[str, Any]
    config: dict[str, Any]
    elmo_placement: Literal["input", "output", "both"]
    scalar_mix_l2: float
    words: Callable[[Dataset, ELMoTokenizer], Iterable[Sequence[str]]]
    encode: Callable[[dict[str, list], ELMoTokenizer, bool], dict[str, list]]
    collator: Callable[[ELMoTokenizer], Callable]
    scores: Callable[[Predicted], dict[str, Any]]
    predictions: Callable[[Predicted], Iterable[Record]]
    average: Callable[[Sequence[Any]], Any]


def log_mean_probabilities(logits: Sequence[np.ndarray]) -> np.ndarray:
    """Logarithms of the mean of several models' probabilities, which are a softmax of the last dimension."""
    log_probs = torch.stack([torch.from_numpy(each).log_softmax(-1) for each in logits])
    return (log_probs.logsumexp(0) - math.log(len(logits))).numpy()


def source_of(arguments: DataArguments) -> dict[str, str]:
    """Where the data comes from, as the options named it."""
    names = ("dataset", "dataset_config", "train_file", "validation_file", "test_file")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def task_tokenizer(task: Task, head: HeadArguments, train: Dataset, vectors: WordVectors | None) -> ELMoTokenizer:
    """The biLM's, with the words of `train`, and of the file of vectors, in place of its vocabulary.

    A biLM that reads characters ignores `input_ids`; one with word vectors keeps its vocabulary.
    """
    tokenizer = ELMoTokenizer.from_pretrained(head.model_name_or_path)
    if not word_vector_size(head, vectors) or ELMoConfig.from_pretrained(head.model_name_or_path).word_embedding_size:
        return tokenizer
    extra = vectors.words if vectors else ()
    words = task_vocabulary(task.words(train, tokenizer), head.word_min_count, extra)
    has_no_capitals = bool(extra) and all(word == word.lower() for word in extra)
    return tokenizer.with_vocabulary([*SPECIAL_WORDS, *words], lowercase_unknown=has_no_capitals)


def encoded(task: Task, tokenizer: ELMoTokenizer, splits: Iterable[str] | None = None) -> dict[str, Dataset]:
    """The encodings of all splits, or of some: rows with their number, `text_number`, counted over all of these."""
    found: dict[str, Dataset] = {}
    for split in task.data if splits is None else splits:
        data = task.data[split]
        rows = data.map(
            partial(_rows, encode=task.encode, tokenizer=tokenizer, is_training=split == "train", states=code_states()),
            with_indices=True,
            batched=True,
            remove_columns=data.column_names,
            desc=f"Encoding {split}",
        )
        first = sum(map(len, found.values()))
        found[split] = rows.add_column("text_number", range(first, first + len(rows)))
    return found


def _rows(
    batch: dict[str, list],
    indices: list[int],
    encode: Callable,
    tokenizer: ELMoTokenizer,
    is_training: bool,
    states: tuple,  # for the cache alone
) -> dict:
    rows = dict(encode(batch, tokenizer, is_training))
    return rows | {"example_number": [indices[number] for number in rows.get("example_number", range(len(indices)))]}


def rows_of(rows: Dataset, examples: Iterable[int]) -> Dataset:
    """The rows of some examples."""
    chosen = np.isin(rows["example_number"], list(examples))
    return rows.select(np.flatnonzero(chosen))


def task_model(
    task: Task, head: HeadArguments, tokenizer: ELMoTokenizer, vectors: WordVectors | None, seed: int, **overrides
) -> ELMoTaskModel:
    """A head on the biLM, or without it, as the options and `overrides`, fields of its configuration, say."""
    config = task_config(task, head, len(tokenizer), vectors, **overrides)
    model = head_on_bilm(task, head, config) if config.use_elmo else task.model_class(config)
    if vectors is not None and model.token_features is None:
        raise ValueError(f"--word_vectors {head.word_vectors}: a linear head reads none; leave the option out.")
    if vectors is not None:
        words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        start = initial_embeddings(vectors, words, seed, tokenizer.lowercase_unknown)
        logger.warning(f"{start.found:,} of {len(words):,} words have a vector in {head.word_vectors}.")
        model.token_features.word_embeddings.weight.data.copy_(torch.from_numpy(start.vectors))
    return model


def head_on_bilm(task: Task, head: HeadArguments, config: ELMoConfig) -> ELMoTaskModel:
    """A new head on the biLM of a folder; a trained head in that folder knows other words and labels."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # that the head is new goes without saying
    try:
        # In single precision, whatever the biLM is kept in: so is the head, and the baseline.
        model, found = task.model_class.from_pretrained(
            head.model_name_or_path,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    finally:
        logging.set_verbosity(verbosity)
    new = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    missing = sorted(name for name in new if name.startswith("elmo."))
    if missing:
        raise ValueError(
            f"{head.model_name_or_path} has no weights for {len(missing)} parameters of the biLM that was asked for, "
            f"{missing[0]} among them, or of another size; pass a folder that has, or leave such fields out of "
            "--config_overrides."
        )
    if not all(name.startswith("elmo.") or name in new for name, _ in model.named_parameters()):
        logger.warning(f"{head.model_name_or_path} holds a trained head beside its biLM; a new head is trained here.")
        bilm, model = model.elmo, task.model_class(config)
        model.elmo = bilm
    return model


def task_config(
    task: Task, head: HeadArguments, vocab_size: int, vectors: WordVectors | None, **overrides
) -> ELMoConfig:
    values: dict[str, Any] = {
        **{name: getattr(head, name) for name in ("head", "use_elmo", "elmo_dropout", "freeze_bilm")},
        "elmo_placement": elmo_placement(task, head),
        "scalar_mix_mode": int(head.scalar_mix_mode) if head.scalar_mix_mode.isdecimal() else head.scalar_mix_mode,
        "scalar_mix_l2": scalar_mix_l2(task, head),
        "task_word_embedding_size": word_vector_size(head, vectors),
        "freeze_word_embeddings": head.freeze_word_vectors,
        "vocab_size": vocab_size,
        "softmax_type": "full",  # a head has none, and the clusters of an adaptive one may not suit the words
        "adaptive_cutoffs": None,
        **overrides_of(head, task),
        **task.config,
        **overrides,
    }
    config = ELMoConfig.from_pretrained(head.model_name_or_path, **values)
    config.validate()
    return config


def overrides_of(head: HeadArguments, task: Task) -> dict[str, Any]:
    """What `--config_overrides` holds, fields of the configuration alone."""
    text = head.config_overrides or "{}"
    try:
        overrides = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f'--config_overrides {text} is not JSON: {error}. Pass {{"name": value, ...}}.') from error
    known = [each.name for each in fields(ELMoConfig)]
    if not isinstance(overrides, dict):
        raise ValueError(f'--config_overrides {text} is no JSON object; pass {{"name": value, ...}}.')
    for name in overrides:
        if name in task.config:
            raise ValueError(f"--config_overrides: {name} is set by the data or by an option of its own; leave it out.")
        if name not in known:
            close = get_close_matches(name, known, 1)
            advice = f"Did you mean {close[0]}?" if close else f"Pass some of {', '.join(sorted(known))}."
            raise ValueError(f"--config_overrides: ELMoConfig has no field {name}. {advice}")
    return overrides


def elmo_placement(task: Task, head: HeadArguments) -> str:
    return head.elmo_placement or ("input" if head.head == "linear" else task.elmo_placement)


def scalar_mix_l2(task: Task, head: HeadArguments) -> float:
    return task.scalar_mix_l2 if head.scalar_mix_l2 is None else head.scalar_mix_l2


def word_vector_size(head: HeadArguments, vectors: WordVectors | None) -> int:
    if head.head == "linear":
        return 0
    return head.word_embedding_size if vectors is None else vectors.vectors.shape[1]
