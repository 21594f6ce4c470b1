"""From the folder of a biLM to a head on it: options, tokenizer, configuration, model, words and their vectors."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback, set_seed
from transformers.utils import logging

from modeling_elmo import ELMoConfig, ELMoTokenizer
from modeling_elmo.heads.task_model import ELMoTaskModel
from modeling_elmo.tokenization.elmo_characters import PAD_WORD, SPECIAL_WORDS, UNK_WORD, is_text_word

from ..program.command_line import option, refuse_unread
from ..program.files import parse_json_object
from ..program.models import check_model, load_pretrained
from ..vectors.word_vectors import WordVectors, read_word_vectors
from .features import FeatureStore
from .task import Task
from .trainer import TaskTrainer, TaskTrainingArguments

logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class BasicHeadArguments:
    """The options of a head that every program has."""

    _argument_group_name = "model options"

    model_name_or_path: str = option(..., "Folder or Hub name of an ELMo model.")
    head: Literal["paper", "linear"] = option(
        "paper", "Head: the paper's network for the task, or one linear layer on ELMo."
    )
    freeze_bilm: bool = option(True, "Freeze the biLM; --no_freeze_bilm trains it as well.")
    word_vectors: str | None = option(
        None, "File of pretrained word vectors, in the text format of GloVe, word2vec or fastText."
    )
    config_overrides: str | None = option(
        None, 'Other fields of ELMoConfig, as JSON, such as {"task_hidden_size": 100}.'
    )


@dataclass(kw_only=True)
class HeadArguments(BasicHeadArguments):
    """All options of a head, as in the paper's experiments."""

    _argument_group_name = "model options"

    use_elmo: bool = option(True, "Use ELMo; --no_use_elmo trains the same network without it.")
    elmo_placement: Literal["input", "between", "output", "both"] | None = option(
        None,
        "Where ELMo enters the network (section 5.2). Default: both for questions, else input. between: "
        "between the first and the second biLSTM of a tagger, as in TagLM.",
    )
    scalar_mix_mode: str = option("learned", "Layer weights: learned, average, top, or the number of a layer.")
    scalar_mix_l2: float | None = option(
        None,
        "lambda of the penalty lambda * ||s||^2 (section 3.3). Default: 0.1 for tags, 0 for coreference, else 0.001.",
    )
    elmo_dropout: float | None = option(None, "Dropout rate on ELMo. Default: 0.1 for semantic roles, else 0.5.")
    word_embedding_size: int = option(50, "Width of the network's own word vectors. 0: no word vectors.")
    word_min_count: int = option(2, "Minimum count of a word in the training text to have its own vector.")
    word_vectors_limit: int | None = option(None, "Maximum words to read from the file of --word_vectors.")
    freeze_word_vectors: bool = option(False, "Freeze the word vectors of the file. Default: train them as well.")

    def __post_init__(self):
        check_model(self.model_name_or_path)  # before data and word vectors are read
        if self.word_vectors is not None and self.word_embedding_size == 0:
            raise ValueError(
                f"--word_embedding_size 0 means no word vectors, but --word_vectors is {self.word_vectors}; leave one "
                "out. The file determines the width."
            )
        if self.word_vectors is None:
            refuse_unread(self, ("word_vectors_limit", "freeze_word_vectors"), "without --word_vectors FILE.")

    def read_word_vectors(self) -> WordVectors | None:
        return None if self.word_vectors is None else read_word_vectors(self.word_vectors, self.word_vectors_limit)


def task_tokenizer(task: Task, head: HeadArguments, train: Dataset, vectors: WordVectors | None) -> ELMoTokenizer:
    """The biLM's tokenizer, with the words of `train` and of the file of vectors as its vocabulary.

    A biLM that reads only characters ignores `input_ids`, so that they can be the head's words. A biLM with word
    vectors keeps its vocabulary.
    """
    tokenizer = load_pretrained(ELMoTokenizer, head.model_name_or_path)
    if not word_vector_size(head, vectors) or load_pretrained(ELMoConfig, head.model_name_or_path).word_embedding_size:
        return tokenizer
    looked_up = tokenizer.word_table.looked_up
    extra = list(map(looked_up, vectors.words)) if vectors else []
    texts = (map(looked_up, words) for words in task.words(train, tokenizer))
    words = task_vocabulary(texts, head.word_min_count, extra)
    is_lowercase = bool(extra) and all(word == word.lower() for word in extra)
    return tokenizer.with_vocabulary([*SPECIAL_WORDS, *words], lowercase_unknown=is_lowercase)


def task_model(
    task: Task, head: HeadArguments, tokenizer: ELMoTokenizer, vectors: WordVectors | None, seed: int, **overrides: Any
) -> ELMoTaskModel:
    """A new head, on the biLM or without it. `overrides` are fields of its configuration."""
    config = task_config(task, head, len(tokenizer), vectors, **overrides)
    if config.use_elmo:
        model = head_on_bilm(task.model_class, head.model_name_or_path, config)
    else:
        model = task.model_class(config)
    if vectors is None:
        return model
    if model.token_features is None:
        raise ValueError(
            f"--word_vectors {head.word_vectors}: a linear head has no word vectors; leave the option out."
        )
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    start, with_vector = initial_embeddings(vectors, words, seed, tokenizer)
    logger.warning(f"{with_vector:,} of {len(words):,} words have a vector in {head.word_vectors}.")
    model.token_features.word_embeddings.weight.data.copy_(torch.from_numpy(start))
    return model


def train_task(
    task: Task,
    make_model: Callable[[int], ELMoTaskModel],  # from a seed
    arguments: TaskTrainingArguments,
    tokenizer: ELMoTokenizer,
    splits: dict[str, Dataset],  # encoded
    checkpoint: str | None = None,  # to resume from
    store: FeatureStore | None = None,
    callbacks: list[TrainerCallback] | None = None,
) -> TaskTrainer:
    """Trains a head, and saves it."""
    set_seed(arguments.seed)
    trainer = TaskTrainer(
        make_model(arguments.seed),
        arguments,
        data_collator=task.feature_collator(tokenizer, store),
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        compute_metrics=task.compute_metrics(splits),
        preprocess_logits_for_metrics=task.preprocess_logits,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    return trainer


def head_on_bilm(model_class: Any, name_or_path: str, config: ELMoConfig) -> ELMoTaskModel:
    """A new head on the biLM of a folder. If the folder holds a trained head, only its biLM is used."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # no warning that the head is new
    try:
        # Single precision, whatever precision the biLM is stored in: the head and the baseline have it too.
        model, loaded = load_pretrained(
            model_class,
            name_or_path,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    finally:
        logging.set_verbosity(verbosity)
    if getattr(model, "is_quantized", False):
        raise ValueError(
            f"{name_or_path} holds a biLM in 8 bits, which cannot be trained. Pass the biLM in float32, and call "
            "`quantize()` on the trained model."
        )
    new = set(loaded["missing_keys"])
    new.update(name for name, *_ in loaded["mismatched_keys"])
    missing = sorted(name for name in new if name.startswith("elmo."))
    if missing:
        raise ValueError(
            f"{name_or_path} has no weights, or weights of another size, for {len(missing)} parameters of the biLM, "
            f"such as {missing[0]}. Pass another folder, or leave fields of the biLM out of --config_overrides."
        )
    if not all(name.startswith("elmo.") or name in new for name, _ in model.named_parameters()):
        logger.warning(f"{name_or_path} holds a trained head; a new head is trained on its biLM.")
        bilm, model = model.elmo, model_class(config)
        model.elmo = bilm
    return model


def task_config(
    task: Task, head: HeadArguments, vocab_size: int, vectors: WordVectors | None, **overrides: Any
) -> ELMoConfig:
    """The biLM's configuration with the head's fields: options, then `--config_overrides`, data, and `overrides`."""
    reserved = [*task.config, *([] if vectors is None else ["task_word_embedding_size"])]
    defaults = {item.name: item.default for item in fields(ELMoConfig)}
    of_heads = list(defaults)[list(defaults).index("head") :]
    values: dict[str, Any] = {
        **{name: defaults[name] for name in of_heads},  # not inherited: the folder may hold a head of another task
        **{name: getattr(head, name) for name in ("head", "use_elmo", "elmo_placement", "freeze_bilm")},
        **mix_options(task, head),
        "scalar_mix_mode": int(head.scalar_mix_mode) if head.scalar_mix_mode.isdecimal() else head.scalar_mix_mode,
        "task_word_embedding_size": word_vector_size(head, vectors),
        "freeze_word_embeddings": head.freeze_word_vectors,
        "vocab_size": vocab_size,
        "softmax_type": "full",  # a head has no softmax, and the cutoffs of an adaptive one may not fit its words
        "adaptive_cutoffs": None,
        **parse_overrides(head.config_overrides, reserved),
        **task.config,
        **overrides,
    }
    config = ELMoConfig.from_pretrained(head.model_name_or_path, **values)
    config.validate()
    return config


def parse_overrides(text: str | None, reserved: Collection[str]) -> dict[str, Any]:
    """The value of `--config_overrides`: fields of the configuration, except the reserved ones."""
    overrides = parse_json_object(text or "{}", f"--config_overrides {text}")
    known = {item.name for item in fields(ELMoConfig)} - {*reserved}
    if wrong := [name for name in overrides if name not in known]:
        raise ValueError(
            f"--config_overrides: {', '.join(wrong)} is not a field of ELMoConfig, or is set by the data or an option; "
            f"pass {', '.join(sorted(known))}."
        )
    return overrides


def resolved_options(task: Task, head: HeadArguments) -> dict[str, Any]:
    """All options of a head for a record, with the task's defaults filled in."""
    config = ELMoConfig(head=head.head, elmo_placement=head.elmo_placement)
    placement = task.model_class.resolve_elmo_placement(config)
    return {**vars(head), "elmo_placement": placement, **mix_options(task, head)}


def mix_options(task: Task, head: HeadArguments) -> dict[str, float]:
    """The options whose defaults depend on the task."""
    return {
        "scalar_mix_l2": task.scalar_mix_l2 if head.scalar_mix_l2 is None else head.scalar_mix_l2,
        "elmo_dropout": task.elmo_dropout if head.elmo_dropout is None else head.elmo_dropout,
    }


def word_vector_size(head: HeadArguments, vectors: WordVectors | None) -> int:
    if head.head == "linear":
        return 0
    return head.word_embedding_size if vectors is None else vectors.vectors.shape[1]


def initial_embeddings(
    vectors: WordVectors, vocabulary: Sequence[str], seed: int, tokenizer: ELMoTokenizer
) -> tuple[np.ndarray, int]:
    """The initial embedding of each word: its vector, or random numbers with the vectors' standard deviation.

    `<PAD>` gets zeros, and `<UNK>` the mean of all vectors. A word without a vector gets that of the first word which
    the tokenizer looks up as the same, or with `lowercase_unknown` that of its lower-case form. Also returns the number
    of words with a vector.
    """
    row_of_word = {word: row for row, word in enumerate(vectors.words)}
    row_of_word |= {PAD_WORD: -1, UNK_WORD: -1}
    for word, row in list(row_of_word.items()):
        row_of_word.setdefault(tokenizer.word_table.looked_up(word), row)

    def row_of(word: str) -> int:
        if word not in row_of_word and tokenizer.lowercase_unknown:
            word = word.lower()
        return row_of_word.get(word, -1)

    rows = np.array(list(map(row_of, vocabulary)))
    has_vector = rows >= 0
    values = vectors.vectors
    start = np.random.default_rng(seed).standard_normal((len(vocabulary), values.shape[1]), np.float32)
    mean = values.mean(dtype=np.float64)  # in double precision, without a copy of the vectors
    square = np.einsum("nw,nw->", values, values, dtype=np.float64) / values.size
    start *= float(np.sqrt(square - mean**2))
    start[has_vector] = values[rows[has_vector]]
    start[[word == PAD_WORD for word in vocabulary]] = 0
    start[[word == UNK_WORD for word in vocabulary]] = values.mean(0, dtype=np.float64)
    return start, int(has_vector.sum())


def task_vocabulary(sentences: Iterable[Iterable[str]], min_count: int = 2, extra: Sequence[str] = ()) -> list[str]:
    """The words that occur at least `min_count` times in the training text, by frequency, and then `extra` words.

    Rarer words share `<UNK>`, which is trained by them. Special words are left out, because a tokenizer puts them in
    front, and so are strings that cannot be a word of a tokenizer.
    """
    counts = Counter(chain.from_iterable(sentences))
    frequent = (word for word, count in counts.most_common() if count >= min_count)
    return list(filter(is_text_word, dict.fromkeys(chain(frequent, extra))))
