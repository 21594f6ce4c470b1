"""A head that is trained further with new data: it keeps its labels, words and settings, and may get new ones."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from transformers.utils import logging

from modeling_elmo import ELMoTokenizer
from modeling_elmo.heads.crf import tags_that_are_not_bio
from modeling_elmo.heads.task_model import ELMoTaskModel
from modeling_elmo.tokenization.elmo_characters import UNK_WORD

from ..program.command_line import option, refuse_unread
from ..program.models import load_pretrained
from ..vectors.word_vectors import WordVectors
from .head import BasicHeadArguments, HeadArguments, initial_embeddings, task_vocabulary
from .saved_head import saved_head, task_name
from .task import SavedHead, Task, label_config

logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class ContinuationArguments:
    """The options of a head that is trained further."""

    _argument_group_name = "model options"

    continue_head: bool = option(
        False, "Train the head of --model_name_or_path further. It keeps its network, labels, words and word vectors."
    )
    new_labels: Literal["refuse", "add"] = option(
        "refuse", "With --continue_head: labels of the training data that the head lacks."
    )
    new_words: Literal["ignore", "add"] = option(
        "ignore", "With --continue_head: words of the training data that the head's word vectors lack."
    )

    def __post_init__(self):
        if not self.continue_head:
            refuse_unread(self, ("new_labels", "new_words"), "without --continue_head.")


class Continuation(NamedTuple):
    """A saved head, and how it is trained further."""

    saved: SavedHead
    options: ContinuationArguments

    @classmethod
    def of(cls, name: str, task: str, options: ContinuationArguments) -> "Continuation":
        """Of the head in a folder or on the Hub, if it is one of this task."""
        saved = saved_head(name)
        if (own := task_name(saved)) != task:
            raise ValueError(f"--continue_head: {name} is a head of `elmo {own}`, not of `elmo {task}`.")
        return cls(saved, options)

    def head_arguments(self, basic: BasicHeadArguments) -> HeadArguments:
        """All options of the head, with those of its further training."""
        refuse_unread(
            basic, ("head", "config_overrides"), "with --continue_head, which keeps the network; leave it out."
        )
        if basic.word_vectors is not None and self.options.new_words != "add":
            raise ValueError(
                f"--word_vectors {basic.word_vectors} has no effect with --continue_head, which keeps the head's word "
                "vectors. Pass --new_words add too: the file is then for the new words."
            )
        config = self.saved.config
        kept = {
            "head": config.head,
            "use_elmo": config.use_elmo,
            "elmo_placement": config.elmo_placement,
            "scalar_mix_mode": str(config.scalar_mix_mode),
            "scalar_mix_l2": config.scalar_mix_l2,
            "elmo_dropout": config.elmo_dropout,
            "word_embedding_size": config.task_word_embedding_size,
        }
        return HeadArguments(**{**vars(basic), **kept})

    def task(self, task_type: type[Task], arguments: Any) -> Task:
        """The task with new data, and with the labels of the head first."""
        defaults = {item.name: item.default for item in fields(arguments)}
        for name, value in task_type.saved_arguments(self.saved.config).items():
            given = getattr(arguments, name)
            if given not in (value, defaults[name]):
                raise ValueError(f"--{name} {given}: {self.saved.name} was trained with {value}; leave the option out.")
            setattr(arguments, name, value)
        data = task_type.read_data(arguments)
        missing = task_type.missing_labels(data["train"], self.saved) if "train" in data else {}
        return task_type(arguments, data, with_labels(self.saved, missing, self.options.new_labels))

    def tokenizer(self, task: Task, head: HeadArguments) -> ELMoTokenizer:
        """The head's tokenizer, if wanted with words of the training data that it does not know."""
        tokenizer = load_pretrained(ELMoTokenizer, self.saved.name)
        if self.options.new_words == "ignore":
            return tokenizer
        config = self.saved.config
        if config.word_embedding_size or not config.task_word_embedding_size:
            reason = "its biLM also has word vectors" if config.word_embedding_size else "it has no word vectors"
            raise ValueError(f"--new_words add: {self.saved.name} learns no new words, because {reason}; leave it out.")
        texts = (map(tokenizer.word_table.looked_up, words) for words in task.words(task.data["train"], tokenizer))
        frequent = task_vocabulary(texts, head.word_min_count)
        unknown = tokenizer.convert_tokens_to_ids(UNK_WORD)
        new = [word for word in frequent if tokenizer.convert_tokens_to_ids(word) == unknown]
        print(f"{len(new):,} new words that occur {head.word_min_count} times or more get word vectors")
        return tokenizer.with_vocabulary([*vocabulary_of(tokenizer), *new])

    def model(
        self, task: Task, head: HeadArguments, tokenizer: ELMoTokenizer, vectors: WordVectors | None, seed: int
    ) -> ELMoTaskModel:
        """The head. New labels, and new words without a vector in the file, begin as in a new head."""
        options = {"freeze_bilm": head.freeze_bilm}
        if task.label_column is not None and "id2label" in task.config:  # a regression has no labels
            options["id2label"] = task.config["id2label"]
        model = load_pretrained(task.model_class, self.saved.name, dtype=torch.float32, **options)
        known = model.config.vocab_size
        if len(tokenizer) > known:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
            if vectors is not None:
                fill_rows(model, vocabulary_of(tokenizer)[known:], vectors, seed, tokenizer)
        return model


def with_labels(saved: SavedHead, missing: dict[str, int], new_labels: str) -> SavedHead:
    """The saved head with more labels after its own: the missing ones, and the other half of a pair of BIO tags."""
    if not missing:
        return saved
    shown = ", ".join(f"{name} ({count:,})" for name, count in missing.items())
    if new_labels == "refuse":
        raise ValueError(
            f"The training data has labels that {saved.name} lacks: {shown}. Correct them, or pass --new_labels add."
        )
    labels = [*saved.labels]
    has_pairs = "O" in labels and not tags_that_are_not_bio([*labels, *missing])
    for name in sorted(missing, key=lambda name: (name[2:], name) if has_pairs else ("", name)):
        pair = [f"B-{name[2:]}", f"I-{name[2:]}"] if has_pairs else [name]
        labels += [each for each in pair if each not in labels]
    config = saved.config.from_dict({**saved.config.to_dict(), **label_config(labels)})
    return saved._replace(config=config)


def vocabulary_of(tokenizer: ELMoTokenizer) -> list[str]:
    return list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))


def fill_rows(model: ELMoTaskModel, words: Sequence[str], vectors: WordVectors, seed: int, tokenizer: ELMoTokenizer):
    """Gives the last words of the vocabulary the values of a file."""
    table = model.token_features.word_embeddings.weight.data
    if vectors.vectors.shape[1] != table.shape[1]:
        raise ValueError(
            f"--word_vectors has vectors of {vectors.vectors.shape[1]} numbers, and the head's have {table.shape[1]}; "
            "pass the file with which it was trained."
        )
    start, with_vector = initial_embeddings(vectors, words, seed, tokenizer)
    logger.warning(f"{with_vector:,} of {len(words):,} new words have a vector in the file.")
    table[-len(words) :] = torch.from_numpy(start)
