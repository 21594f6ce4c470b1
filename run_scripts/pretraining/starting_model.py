"""The model that a run starts from: a new one, or a checkpoint whose vocabulary is kept, extended or replaced."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.configuration_elmo import PRESETS
from modeling_elmo.tokenization.elmo_characters import read_vocabulary
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter

from ..program.command_line import option, refuse_unread
from ..program.files import parse_json_object
from ..program.models import check_model, load_pretrained
from .checkpoints import on_main_process
from .corpus import (
    Corpus,
    CorpusArguments,
    check_vocabulary_size,
    most_frequent_lines,
    word_frequencies,
    write_vocabulary,
)

VOCABULARY_OPTIONS = ("vocabulary_size", "vocabulary_file", "tokenizer_name")
NEW_OPTIONS = ("preset", "config_overrides", "tokenizer_name", "pre_tokenization")  # only of new models
START_OPTIONS = {"model_name_or_path", "vocabulary", *VOCABULARY_OPTIONS}


@dataclass(kw_only=True)
class ModelArguments:
    """Options of the model to start from."""

    preset: Literal["tiny", "small", "medium", "original"] | None = option(None, "Size of a new model. Default: small.")
    model_name_or_path: str | None = option(
        None, "Checkpoint to train further instead of a new model: a folder or a Hub name."
    )
    config_overrides: str | None = option(None, 'Fields of a new model\'s ELMoConfig, as JSON: {"dropout": 0.2}')
    softmax_type: Literal["full", "sampled", "adaptive"] | None = option(
        None, "Softmax in training. Default: full, or the softmax of the checkpoint."
    )
    num_sampled: int | None = option(None, "Number of candidates of a sampled softmax. Default: 8192.")
    vocabulary_file: str | None = option(None, "File of the words to predict, one per line, by descending frequency.")
    vocabulary_size: int | None = option(
        None, "Number of words to predict: the most frequent ones of the text, and the special words."
    )
    tokenizer_name: str | None = option(
        None, "Tokenizer with the words to predict: a folder or a Hub name. For any alphabet."
    )
    vocabulary: Literal["keep", "extend", "replace"] = option(
        "keep", "Change of a checkpoint's vocabulary. Words in the old and the new one keep their vectors."
    )
    pre_tokenization: Literal["whitespace", "moses", "treebank"] | None = option(
        None, "Rules by which a new tokenizer splits raw text. Default: moses."
    )

    def __post_init__(self):
        decided = ["vocab_size", "char_vocab_size", *(["max_word_length"] if self.tokenizer_name else [])]
        if names := [name for name in decided if name in self.overrides]:
            raise ValueError(
                f"--config_overrides: the tokenizer decides {names[0]}; leave it out. Pass --vocabulary_size, or a "
                f"--tokenizer_name that was saved with {names[0]}={self.overrides[names[0]]}."
            )

    @property
    def overrides(self) -> dict[str, Any]:
        return parse_json_object(self.config_overrides or "{}", f"--config_overrides {self.config_overrides}")

    @property
    def softmax_options(self) -> dict[str, Any]:
        options = {"softmax_type": self.softmax_type, "num_sampled": self.num_sampled}
        return {name: value for name, value in options.items() if value is not None}

    def config(self, **sizes: int) -> ELMoConfig:
        values = {**sizes, **self.softmax_options, **self.overrides}
        try:
            return ELMoConfig.from_preset(self.preset or "small", **values)
        except TypeError as error:  # an unknown field
            raise ValueError(f"--config_overrides {self.config_overrides}: {error}") from error

    def check(self):
        """Refuses options that contradict each other, before the text is counted."""
        given = [f"--{name}" for name in VOCABULARY_OPTIONS if getattr(self, name) is not None]
        is_new = self.model_name_or_path is None
        if len(given) > 1 or (is_new and not given):
            raise ValueError(
                f"Received {' and '.join(given) or 'no vocabulary'}; pass one of --{', --'.join(VOCABULARY_OPTIONS)}."
            )
        check_vocabulary_size(self.vocabulary_size)
        if not is_new:
            refuse_unread(self, NEW_OPTIONS, "with --model_name_or_path: leave it out.")
            if bool(given) != (self.vocabulary != "keep"):
                raise ValueError(
                    f"--vocabulary {self.vocabulary} with {given[0] if given else 'no new vocabulary'}: pass `extend` "
                    "or `replace` together with --vocabulary_file or --vocabulary_size, and `keep` without them."
                )
            return
        refuse_unread(self, ["vocabulary"], "without --model_name_or_path: leave it out.")
        if self.tokenizer_name is not None:
            refuse_unread(self, ["pre_tokenization"], "with --tokenizer_name, whose tokenizer has rules: leave it out.")
        # Raises for fields out of range; an unknown size of the vocabulary must not seem too small.
        self.check_softmax(self.config(vocab_size=self.vocabulary_size or 2**24))  # the most that a configuration takes

    def check_softmax(self, config: ELMoConfig):
        config.check_softmax()
        if config.softmax_type != "sampled":
            reason = f"on a softmax of type {config.softmax_type}: leave it out, or pass --softmax_type sampled."
            refuse_unread(self, ["num_sampled"], reason)


def settings_of(*arguments: Any) -> dict[str, Any]:
    """The options that differ from their defaults, and the optimizer, which decides some of the defaults.

    Options of a single start are left out, because an interrupted and resumed run gives the same result.
    """
    settings = {}
    for group in arguments:
        for item in fields(group):
            value = getattr(group, item.name)
            is_default = value in (item.default, [])  # lists are empty by default
            if item.name == "optim" or not (is_default or item.name in ("output_dir", "resume_from_checkpoint")):
                settings[item.name] = value
    return settings


def load_checkpoint(name: str, **options: Any) -> tuple[ELMoForPreTraining, ELMoTokenizer]:
    """A checkpoint and its tokenizer, in single precision even if it was saved in another."""
    check_model(name)
    model = load_pretrained(ELMoForPreTraining, name, dtype=torch.float32, **options)
    for parameter in model.parameters():
        # Loaded tensors are unaligned views of the file. MKL rounds differently on them, so a resumed run would differ.
        parameter.data = parameter.data.clone()
    return model, load_pretrained(ELMoTokenizer, name)


def make_starting_model(
    arguments: ModelArguments, corpus_args: CorpusArguments, corpus: Corpus, output_dir: Path, accelerator: Accelerator
) -> tuple[ELMoForPreTraining, ELMoTokenizer]:
    """The model and its tokenizer. Writes a counted vocabulary to `output_dir/vocab.txt`."""
    path = Path(arguments.vocabulary_file) if arguments.vocabulary_file else output_dir / "vocab.txt"
    rules = arguments.pre_tokenization or "moses"

    def count(split: Callable[[str], list[str]], looked_up: Callable[[str], str] = str):
        _, counts = word_frequencies(corpus, str.split if corpus_args.is_split_into_words else split, looked_up)
        write_vocabulary(path, most_frequent_lines(counts, arguments.vocabulary_size))

    if arguments.model_name_or_path is None:
        if arguments.vocabulary_size is not None:
            on_main_process(accelerator, partial(count, TextSplitter(rules).words))
        return new_model(arguments, path, rules)
    model, tokenizer = load_checkpoint(arguments.model_name_or_path, **arguments.softmax_options)
    arguments.check_softmax(model.config)
    if arguments.vocabulary_size is not None:
        on_main_process(accelerator, partial(count, tokenizer.splitter.words, tokenizer.word_table.looked_up))
    if arguments.vocabulary != "keep":
        words = read_vocabulary(path)
        tokenizer = change_vocabulary(model, tokenizer, words, keep_all=arguments.vocabulary == "extend")
        if arguments.vocabulary_size is not None:  # with the old words, if they were kept
            words = list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
            on_main_process(accelerator, partial(write_vocabulary, path, words))
    return model, tokenizer


def new_model(arguments: ModelArguments, vocabulary: Path, rules: str) -> tuple[ELMoForPreTraining, ELMoTokenizer]:
    if arguments.tokenizer_name is not None:
        if not Path(arguments.tokenizer_name).is_dir():  # a folder needs no model
            check_model(arguments.tokenizer_name)
        tokenizer = load_pretrained(ELMoTokenizer, arguments.tokenizer_name)
    else:
        widths = {name: value for name, value in arguments.overrides.items() if name == "max_word_length"}
        tokenizer = ELMoTokenizer(vocabulary, pre_tokenization=rules, **widths)
    sizes = {name: getattr(tokenizer, name) for name in ("char_vocab_size", "max_word_length")}
    return ELMoForPreTraining(arguments.config(vocab_size=len(tokenizer), **sizes)), tokenizer


@torch.no_grad()
def begin_with_frequencies(model: ELMoForPreTraining, log_frequencies_V: np.ndarray):
    """Sets the biases of a new softmax, so that the model begins near the unigram of its text."""
    bias_V, softmax = torch.from_numpy(log_frequencies_V), model.softmax
    if softmax.adaptive is None:
        softmax.bias.copy_(bias_V)
        return
    words_V = torch.cat([bias_V[: softmax.pad_token_id], bias_V[softmax.pad_token_id + 1 :]])
    head, *clusters = words_V.tensor_split(softmax.adaptive.cutoffs[:-1])
    softmax.adaptive.head.bias.copy_(torch.cat([head, torch.stack([each.logsumexp(0) for each in clusters])]))


def change_vocabulary(
    model: ELMoForPreTraining, tokenizer: ELMoTokenizer, words: list[str], keep_all: bool
) -> ELMoTokenizer:
    """Gives the model another vocabulary. Words in both keep their vectors, even if their ids change.

    `words` has special words first; `keep_all` keeps the old words before them. Words that the tokenizer looks up as
    one are one.
    """
    old, words = tokenizer.get_vocab(), [*dict.fromkeys(map(tokenizer.word_table.looked_up, words))]
    if keep_all:
        words = [*sorted(old, key=old.__getitem__), *(word for word in words if word not in old)]
    tokenizer = tokenizer.with_vocabulary(words)  # it may have more words: markers that were added to the tokenizer
    words = list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    model.replace_vocabulary([old.get(word, -1) for word in words])
    return tokenizer


def check_same_model(
    config: ELMoConfig, tokenizer: ELMoTokenizer, settings: dict[str, Any], arguments: ModelArguments, checkpoint: Path
):
    """Refuses options that describe another model or tokenizer than the checkpoint to resume from."""
    wanted, passed = arguments.softmax_options | arguments.overrides, settings_of(arguments)
    if arguments.preset:
        preset = ELMoConfig.from_preset(arguments.preset)
        sizes = {name for each in PRESETS.values() for name in each} - {"vocab_size", "char_vocab_size"}
        wanted = {name: getattr(preset, name) for name in sorted(sizes)} | wanted
    found = {name: getattr(config, name, "no such field") for name in wanted}
    if "pre_tokenization" in passed:
        wanted["pre_tokenization"], found["pre_tokenization"] = passed["pre_tokenization"], tokenizer.pre_tokenization
    for name in sorted(START_OPTIONS & passed.keys()):
        # Folders are not recorded, and may have another path now.
        wanted[name], found[name] = (Path(str(options.get(name))).name for options in (passed, settings))
    different = [f"{name} {value} (there: {found[name]})" for name, value in wanted.items() if found[name] != value]
    if different:
        raise ValueError(
            f"{checkpoint} holds another model than the options describe: {', '.join(different)}. Leave these options "
            "out to continue with its model, or pass another --output_dir."
        )
