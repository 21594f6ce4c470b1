"""The model that a run starts from: a new one, or a checkpoint whose vocabulary is kept, extended or replaced."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.configuration_elmo import PRESETS
from modeling_elmo.run_scripts.pretraining.checkpoints import on_main_process
from modeling_elmo.run_scripts.pretraining.corpus import (
    Corpus,
    CorpusArguments,
    check_vocabulary_size,
    most_frequent_lines,
    word_frequencies,
    write_vocabulary,
)
from modeling_elmo.run_scripts.pretraining.records import settings_of
from modeling_elmo.run_scripts.program.command_line import option
from modeling_elmo.run_scripts.program.files import check_model, load_pretrained, parse_json_object
from modeling_elmo.tokenization.elmo_characters import read_vocabulary
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter

NEW_PRE_TOKENIZATION = "moses"
VOCABULARY_OPTIONS = ("vocabulary_size", "vocabulary_file", "tokenizer_name")
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
        if names := sorted({"vocab_size", "char_vocab_size"} & self.overrides.keys()):
            raise ValueError(
                f"--config_overrides: the tokenizer decides {names[0]}. Pass --vocabulary_size or --tokenizer_name."
            )

    @property
    def overrides(self) -> dict[str, Any]:
        return parse_json_object(self.config_overrides or "{}", f"--config_overrides {self.config_overrides}")

    @property
    def softmax_options(self) -> dict[str, Any]:
        options = {"softmax_type": self.softmax_type, "num_sampled": self.num_sampled}
        return {name: value for name, value in options.items() if value is not None}

    def config(self, **sizes: int) -> ELMoConfig:
        """The configuration of a new model."""
        values = {**sizes, **self.softmax_options, **self.overrides}
        try:
            return ELMoConfig.from_preset(self.preset or "small", **values)
        except TypeError as error:  # an unknown field
            raise ValueError(f"--config_overrides {self.config_overrides}: {error}") from error

    def check(self):
        """Refuses options that contradict each other, before the text is counted."""
        given = [f"--{name}" for name in VOCABULARY_OPTIONS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"Received {' and '.join(given)}; pass one of them.")
        check_vocabulary_size(self.vocabulary_size)
        is_new = self.model_name_or_path is None
        tokenizer = "tokenizer_name" if is_new else "model_name_or_path"
        if self.pre_tokenization is not None and getattr(self, tokenizer) is not None:
            raise ValueError(
                f"--pre_tokenization {self.pre_tokenization} is for new tokenizers, but --{tokenizer} has one. Pass "
                "only one of them."
            )
        for name in () if is_new else ("preset", "config_overrides", "tokenizer_name"):
            if getattr(self, name) is not None:
                raise ValueError(f"--{name} is for new models, but --model_name_or_path is given; pass one of them.")
        if not is_new and bool(given) != (self.vocabulary != "keep"):
            raise ValueError(
                f"--vocabulary {self.vocabulary} with {given[0] if given else 'no new vocabulary'}: pass `extend` or "
                "`replace` together with --vocabulary_file or --vocabulary_size, and `keep` without them."
            )
        if is_new and not given:
            raise ValueError(f"A new model needs a vocabulary: pass one of --{', --'.join(VOCABULARY_OPTIONS)}.")
        if is_new and self.vocabulary != "keep":
            raise ValueError(f"--vocabulary {self.vocabulary} is for a checkpoint; pass --model_name_or_path.")
        if self.tokenizer_name is not None and "max_word_length" in self.overrides:
            raise ValueError(
                "--config_overrides: the tokenizer of --tokenizer_name decides max_word_length. Leave it out, and save "
                f"a tokenizer with max_word_length={self.overrides['max_word_length']}."
            )
        if is_new:  # raises for fields out of range; an unknown size of the vocabulary must not seem too small
            self.check_softmax(self.config(vocab_size=self.vocabulary_size or 2**31 - 1))

    def check_softmax(self, config: ELMoConfig):
        """Refuses candidates for a softmax that samples none."""
        if self.num_sampled is not None and config.softmax_type != "sampled":
            raise ValueError(
                f"--num_sampled {self.num_sampled} has no effect on a softmax of type {config.softmax_type}: leave it "
                "out, or pass --softmax_type sampled."
            )


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
    if arguments.model_name_or_path is None:
        model, tokenizer = None, None
        splitter = TextSplitter(arguments.pre_tokenization or NEW_PRE_TOKENIZATION)
    else:
        model, tokenizer = load_checkpoint(arguments.model_name_or_path, **arguments.softmax_options)
        arguments.check_softmax(model.config)
        splitter = tokenizer.splitter
    path = Path(arguments.vocabulary_file) if arguments.vocabulary_file else output_dir / "vocab.txt"
    if arguments.vocabulary_size is not None:
        splitter = TextSplitter("whitespace") if corpus_args.is_split_into_words else splitter
        on_main_process(accelerator, partial(count_vocabulary, corpus, splitter, arguments.vocabulary_size, path))
    if model is None or tokenizer is None:
        return new_model(arguments, path)
    if arguments.vocabulary != "keep":
        words, _ = read_vocabulary(path)
        tokenizer = change_vocabulary(model, tokenizer, words, keep_all=arguments.vocabulary == "extend")
        if arguments.vocabulary_size is not None:  # with the old words, if they were kept
            on_main_process(accelerator, partial(write_vocabulary, path, _words_by_id(tokenizer)))
    return model, tokenizer


def count_vocabulary(corpus: Corpus, splitter: TextSplitter, vocab_size: int, path: Path):
    _, counts = word_frequencies(corpus, splitter)
    write_vocabulary(path, most_frequent_lines(counts, vocab_size))


def new_model(arguments: ModelArguments, vocabulary: Path) -> tuple[ELMoForPreTraining, ELMoTokenizer]:
    if arguments.tokenizer_name is not None:
        if not Path(arguments.tokenizer_name).is_dir():  # a folder needs no model
            check_model(arguments.tokenizer_name)
        tokenizer = load_pretrained(ELMoTokenizer, arguments.tokenizer_name)
    else:
        widths = {name: value for name, value in arguments.overrides.items() if name == "max_word_length"}
        rules = arguments.pre_tokenization or NEW_PRE_TOKENIZATION
        tokenizer = ELMoTokenizer(vocabulary, pre_tokenization=rules, **widths)
    sizes = {
        "vocab_size": len(tokenizer),
        "char_vocab_size": tokenizer.char_vocab_size,
        "max_word_length": tokenizer.max_word_length,
    }
    return ELMoForPreTraining(arguments.config(**sizes)), tokenizer


def change_vocabulary(
    model: ELMoForPreTraining, tokenizer: ELMoTokenizer, words: list[str], keep_all: bool
) -> ELMoTokenizer:
    """Gives the model another vocabulary. Words in both keep their vectors, even if their ids change.

    `words` has special words first; `keep_all` keeps the old words before them.
    """
    old = tokenizer.get_vocab()
    if keep_all:
        words = [*_words_by_id(tokenizer), *(word for word in words if word not in old)]
    tokenizer = tokenizer.with_vocabulary(words)  # it may have more words: markers that were added to the tokenizer
    model.replace_vocabulary([old.get(word, -1) for word in _words_by_id(tokenizer)])
    return tokenizer


def _words_by_id(tokenizer: ELMoTokenizer) -> list[str]:
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def check_same_model(
    config: ELMoConfig,
    tokenizer: ELMoTokenizer,
    settings: dict[str, Any] | None,
    arguments: ModelArguments,
    checkpoint: Path,
):
    """Refuses options that describe another model or tokenizer than the checkpoint to resume from."""
    sizes = {name for preset in PRESETS.values() for name in preset} - {"vocab_size", "char_vocab_size"}
    preset = ELMoConfig.from_preset(arguments.preset) if arguments.preset else None
    wanted = {name: getattr(preset, name) for name in sorted(sizes) if preset is not None}
    wanted |= arguments.softmax_options | arguments.overrides
    found = {name: getattr(config, name, "no such field") for name in wanted}
    passed = settings_of(arguments)
    if "pre_tokenization" in passed:
        wanted["pre_tokenization"], found["pre_tokenization"] = passed["pre_tokenization"], tokenizer.pre_tokenization
    for name in sorted(START_OPTIONS & passed.keys()) if settings is not None else ():
        # Folders are not recorded, and may have another path now.
        wanted[name], found[name] = (Path(str(options.get(name))).name for options in (passed, settings))
    different = [f"{name} {value} (there: {found[name]})" for name, value in wanted.items() if found[name] != value]
    if different:
        raise ValueError(
            f"{checkpoint} holds another model than the options describe: {', '.join(different)}. Leave these options "
            "out to continue with its model, or pass another --output_dir."
        )
