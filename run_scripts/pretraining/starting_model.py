"""How a run starts: with a new model, with a checkpoint to train further, or where an interrupted run stopped.

The vocabulary of a checkpoint is kept, extended or replaced.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from transformers.utils import cached_file

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.configuration_elmo import PRESETS
from modeling_elmo.conversion.tensorflow import OPTIMIZER_STATE
from modeling_elmo.tokenization.elmo_characters import read_vocabulary
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter

from ..cards.bilm_card import PRETRAINING_KEYS
from ..cards.card import hub_name
from ..cards.records import checked_record
from ..program.command_line import option, refuse_unread
from ..program.files import parse_json_object
from ..program.models import check_model, load_pretrained
from .checkpoints import COUNTS, on_main_process
from .corpus import (
    WHITESPACE,
    Corpus,
    CorpusArguments,
    check_vocabulary_size,
    most_frequent_lines,
    write_vocabulary,
)
from .counting import Survey, TextCounts, count_words
from .loop import Pretraining, PretrainingArguments
from .optimization import load_accumulators

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
        decided = ["vocab_size", "char_vocab_size"]
        if self.tokenizer_name:
            decided.append("max_word_length")
        for name in decided:
            if name in self.overrides:
                raise ValueError(
                    f"--config_overrides: the tokenizer decides {name}; leave it out. Pass --vocabulary_size, or a "
                    f"--tokenizer_name that was saved with {name}={self.overrides[name]}."
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
            config = ELMoConfig.from_preset(self.preset or "small", **values)
        except TypeError as error:  # a name that is like the name of a field
            raise ValueError(f"--config_overrides {self.config_overrides}: {error}") from error
        known = {item.name for item in fields(ELMoConfig)}
        if wrong := [name for name in self.overrides if name not in known]:
            raise ValueError(
                f"--config_overrides: {', '.join(wrong)} is not a field of ELMoConfig; pass {', '.join(sorted(known))}."
            )
        return config

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


@dataclass
class RunStart:
    """The options, texts and processes of a run. `begin` and `resume` give the training."""

    accelerator: Accelerator
    model_args: ModelArguments
    corpus_args: CorpusArguments
    training_args: PretrainingArguments
    corpus: Corpus
    held_out: Corpus | None

    def __post_init__(self):
        self._counted: dict[tuple, TextCounts] = {}  # by the rules that split the text

    def begin(self) -> Pretraining:
        """The training of a new model, or the further training of a checkpoint."""
        name = self.model_args.model_name_or_path
        training = self._training(*self.starting_model(), is_new=name is None)
        if name is not None:
            training.progress.base_model = name
            training.progress.base_model_on_hub = hub_name(name)
            training.progress.earlier_trainings = trainings_of(name)
            continue_adagrad(training, name, self.model_args.vocabulary)
        return training

    def resume(self, checkpoint: Path) -> Pretraining:
        """The training that stopped at a checkpoint."""
        training = self._training(*load_checkpoint(str(checkpoint)))
        learning_rate = training.restore(checkpoint)
        check_same_model(training, self.model_args, checkpoint)
        training.tell_where_it_continues(checkpoint, learning_rate)
        return training

    def _training(self, model: ELMoForPreTraining, tokenizer: ELMoTokenizer, is_new: bool = False) -> Pretraining:
        survey = on_main_process(self.accelerator, lambda: self._survey(tokenizer))
        if is_new and survey is not None:
            begin_with_frequencies(model, survey.log_frequencies(len(tokenizer)))
        texts = self.corpus, self.corpus_args, survey, self.held_out
        return Pretraining(self.accelerator, self.training_args, model, tokenizer, *texts)

    def starting_model(self) -> tuple[ELMoForPreTraining, ELMoTokenizer]:
        """The model and its tokenizer. Writes a counted vocabulary to `output_dir/vocab.txt`."""
        arguments = self.model_args
        path = Path(arguments.vocabulary_file or Path(self.training_args.output_dir, "vocab.txt"))
        if arguments.model_name_or_path is None:
            rules = arguments.pre_tokenization or "moses"
            self._count_vocabulary(path, TextSplitter(rules))
            return new_model(arguments, path, rules)
        model, tokenizer = load_checkpoint(arguments.model_name_or_path, **arguments.softmax_options)
        arguments.check_softmax(model.config)
        if arguments.vocabulary == "keep":
            return model, tokenizer
        self._count_vocabulary(path, tokenizer.splitter, tokenizer.word_table.looked_up)
        tokenizer = change_vocabulary(
            model, tokenizer, read_vocabulary(path), keep_all=arguments.vocabulary == "extend"
        )
        if arguments.vocabulary_size is not None:  # with the old words, if they were kept
            words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
            on_main_process(self.accelerator, lambda: write_vocabulary(path, words))
        return model, tokenizer

    def _count_vocabulary(self, path: Path, splitter: TextSplitter, looked_up: Callable[[str], str] = str):
        """Writes the most frequent words of the text, if their number is given."""
        size = self.model_args.vocabulary_size
        if size is None:
            return

        def write():
            frequencies = self._counts(splitter).frequencies(looked_up)
            write_vocabulary(path, most_frequent_lines(frequencies, size))

        on_main_process(self.accelerator, write)

    def _survey(self, tokenizer: ELMoTokenizer) -> Survey | None:
        """The sizes of the training text, with warnings of its flaws; `None` for a streamed data set."""
        if self.corpus.is_streamed:
            return None
        counts = self._counts(tokenizer.splitter)
        counts.warn(self.corpus, tokenizer.pre_tokenization)
        return counts.survey(tokenizer.alphabet, tokenizer.word_table.id_of)

    def _counts(self, splitter: TextSplitter) -> TextCounts:
        """The text is read once for the vocabulary and the survey, unless they split it by different rules."""
        if self.corpus_args.is_split_into_words:
            splitter = WHITESPACE
        if splitter.rules not in self._counted:
            held_out = None if self.corpus.is_streamed else self.held_out
            stored = Path(self.training_args.output_dir, COUNTS)
            self._counted[splitter.rules] = count_words(self.corpus, splitter, held_out, stored)
        return self._counted[splitter.rules]


def trainings_of(name: str) -> list[dict[str, Any]]:
    """The records of the trainings of a biLM, oldest first, as far as its folder has them."""
    path = cached_file(name, "results/pretraining.json", _raise_exceptions_for_missing_entries=False)
    if path is None:
        return []
    record = checked_record(Path(path), PRETRAINING_KEYS)
    return [*record.pop("earlier_trainings", ()), record]


def continue_adagrad(training: Pretraining, name: str, vocabulary: str):
    """Loads the accumulators of a converted TensorFlow checkpoint, if it has them."""
    path = cached_file(name, OPTIMIZER_STATE, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return
    if training.arguments.optim != "adagrad":
        training.accelerator.print(f"{path} is for --optim adagrad; {training.arguments.optim} begins without it.")
        return
    changed = () if vocabulary == "keep" else ("softmax.", "elmo.word_embeddings.")
    without = load_accumulators(training.plain_model, training.optimizers, Path(path), changed)
    new = f", except for {', '.join(without)}" if without else ""
    training.accelerator.print(f"Adagrad continues with the accumulators of {path}{new}.")


def new_model(arguments: ModelArguments, vocabulary: Path, rules: str) -> tuple[ELMoForPreTraining, ELMoTokenizer]:
    if arguments.tokenizer_name is not None:
        if not Path(arguments.tokenizer_name).is_dir():  # a folder needs no model
            check_model(arguments.tokenizer_name)
        tokenizer = load_pretrained(ELMoTokenizer, arguments.tokenizer_name)
    else:
        widths = {name: value for name, value in arguments.overrides.items() if name == "max_word_length"}
        tokenizer = ELMoTokenizer(vocabulary, pre_tokenization=rules, **widths)
    config = arguments.config(
        vocab_size=len(tokenizer),
        char_vocab_size=tokenizer.char_vocab_size,
        max_word_length=tokenizer.max_word_length,
    )
    return ELMoForPreTraining(config), tokenizer


@torch.no_grad()
def begin_with_frequencies(model: ELMoForPreTraining, log_frequencies_V: np.ndarray):
    """Sets the biases of a new softmax, so that the model begins near the unigram of its text."""
    bias_V = torch.from_numpy(log_frequencies_V)
    softmax = model.softmax
    if softmax.adaptive is None:
        softmax.bias.copy_(bias_V)
        return
    words_V = torch.cat([bias_V[: softmax.pad_token_id], bias_V[softmax.pad_token_id + 1 :]])
    head, *clusters = words_V.tensor_split(softmax.adaptive.cutoffs[:-1])
    of_clusters = torch.stack([cluster.logsumexp(0) for cluster in clusters])
    softmax.adaptive.head.bias.copy_(torch.cat([head, of_clusters]))


def change_vocabulary(
    model: ELMoForPreTraining, tokenizer: ELMoTokenizer, words: list[str], keep_all: bool
) -> ELMoTokenizer:
    """Gives the model another vocabulary. Words in both keep their vectors, even if their ids change.

    `words` has special words first; `keep_all` keeps the old words before them. Words that the tokenizer looks up as
    one are one.
    """
    old = tokenizer.get_vocab()
    words = [tokenizer.word_table.looked_up(word) for word in words]
    if keep_all:
        words = sorted(old, key=old.__getitem__) + words
    # It may have more words: markers that were added to the tokenizer.
    tokenizer = tokenizer.with_vocabulary([*dict.fromkeys(words)])
    words = list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    model.replace_vocabulary([old.get(word, -1) for word in words])
    return tokenizer


def check_same_model(training: Pretraining, arguments: ModelArguments, checkpoint: Path):
    """Refuses options that describe another model or tokenizer than the checkpoint to resume from."""
    config = training.plain_model.config
    expected = arguments.softmax_options | arguments.overrides
    if arguments.preset:
        preset = ELMoConfig.from_preset(arguments.preset)
        sizes = {name for values in PRESETS.values() for name in values} - {"vocab_size", "char_vocab_size"}
        expected = {name: getattr(preset, name) for name in sorted(sizes)} | expected
    there = {name: getattr(config, name, "no such field") for name in expected}
    passed = settings_of(arguments)
    if "pre_tokenization" in passed:
        expected["pre_tokenization"] = passed["pre_tokenization"]
        there["pre_tokenization"] = training.tokenizer.pre_tokenization
    settings = training.progress.settings or {}
    for name in sorted(START_OPTIONS & passed.keys()):
        # Folders are not recorded, and may have another path now.
        expected[name] = Path(str(passed[name])).name
        there[name] = Path(str(settings.get(name))).name
    different = [f"{name} {value} (there: {there[name]})" for name, value in expected.items() if there[name] != value]
    if different:
        raise ValueError(
            f"{checkpoint} holds another model than the options describe: {', '.join(different)}. Leave these options "
            "out to continue with its model, or pass another --output_dir."
        )
