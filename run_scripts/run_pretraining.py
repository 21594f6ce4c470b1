"""Trains the biLM from raw text, or trains a checkpoint further, and writes a folder that `AutoModel` loads.

    python -m modeling_elmo.run_scripts.run_pretraining --preset small --vocabulary_size 50000 \\
        --train_file train/*.txt.gz --validation_file heldout.txt --output_dir elmo-small

On several devices: `accelerate launch -m modeling_elmo.run_scripts.run_pretraining ...`, on several CPU processes
`torchrun --nproc_per_node N -m ...`. The output folder holds checkpoints while training, and at the end the model, its
tokenizer, a model card and what it is made of: `results/pretraining.json`.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, is_tensorboard_available, set_seed
from transformers.utils import logging

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.configuration_elmo import PRESETS
from modeling_elmo.run_scripts.cards.bilm_card import write_bilm_card
from modeling_elmo.run_scripts.cards.card import (
    CardArguments,
    hub_name,
    without_folders,
    write_card_facts,
    write_result,
)
from modeling_elmo.run_scripts.cards.publishing import FLAG, push
from modeling_elmo.run_scripts.pretraining.checkpoints import Checkpoints
from modeling_elmo.run_scripts.pretraining.evaluation import held_out_batches, held_out_corpus
from modeling_elmo.run_scripts.pretraining.loop import Pretraining, TrainingArguments
from modeling_elmo.run_scripts.pretraining.streams import (
    Corpus,
    CorpusArguments,
    LMBatch,
    SentenceBatches,
    StreamWindows,
    Survey,
)
from modeling_elmo.run_scripts.pretraining.vocabulary import word_frequencies, write_vocabulary
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.tokenization.elmo_characters import most_frequent_words, read_vocabulary
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter

OF_ONE_START = ("output_dir", "resume_from_checkpoint")  # options that change nothing of what comes out


@dataclass(kw_only=True)
class ModelArguments:
    preset: Literal["tiny", "small", "medium", "original"] | None = field(
        default=None, metadata={"help": "Size of a new model. Default: small."}
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Instead: a checkpoint to train further, a folder or a Hub name."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": 'Other fields of a new model\'s ELMoConfig, as JSON: {"dropout": 0.2}'}
    )
    softmax_type: Literal["full", "sampled", "adaptive"] | None = field(
        default=None, metadata={"help": "Default: full; of a checkpoint: its own."}
    )
    num_sampled: int | None = field(default=None, metadata={"help": "Candidates of a sampled softmax. Default: 8192."})
    vocabulary_file: str | None = field(
        default=None, metadata={"help": "Words to predict, a line each, frequent first."}
    )
    vocabulary_size: int | None = field(
        default=None, metadata={"help": "Instead: the most frequent words of the text, special words included."}
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Instead: a tokenizer, for other alphabets than UTF-8; a folder or a Hub name."}
    )
    vocabulary: Literal["keep", "extend", "replace"] = field(
        default="keep",
        metadata={"help": "What a checkpoint's vocabulary does beside a new one. Words in both keep their vectors."},
    )
    pre_tokenization: Literal["whitespace", "moses", "treebank"] = field(
        default="moses", metadata={"help": "How a new tokenizer splits raw text."}
    )


@dataclass(kw_only=True)
class HubArguments(CardArguments):
    push_to_hub: bool = field(default=False, metadata={"help": "Upload the model and its card at the end."})
    hub_model_id: str | None = field(default=None, metadata={"help": "Repository. Default: the output folder's name."})
    hub_private_repo: bool | None = field(
        default=None, metadata={"help": "Whether a new repository is private. Default: as your account has it.", **FLAG}
    )
    hub_token: str | None = field(default=None, metadata={"help": "Default: that of `hf auth login`."})


def main(arguments: list[str] | None = None) -> Pretraining:
    parser = ProgramParser(ModelArguments, CorpusArguments, TrainingArguments, HubArguments, description=__doc__)
    model_args, corpus_args, training_args, hub_args = parser.parse(arguments)
    held_out = check_corpus_arguments(corpus_args, training_args)
    accelerator = make_accelerator(training_args)
    logging.disable_progress_bar()  # of single files, in the middle of ours
    output_dir = Path(training_args.output_dir)
    checkpoint = checkpoint_to_resume(output_dir, training_args.resume_from_checkpoint, accelerator)
    corpus = Corpus.from_arguments(corpus_args)
    if checkpoint is None:  # what cannot be is told before the text is counted
        check_model_arguments(model_args)
    overrides(model_args)
    if corpus_args.context == "stream":
        StreamWindows.check_workers(training_args.dataloader_num_workers)
    survey = survey_once(corpus, accelerator)
    set_seed(training_args.seed)
    if checkpoint is None:
        model, tokenizer = starting_model(model_args, corpus_args, corpus, output_dir, accelerator)
    else:
        model, tokenizer = load(str(checkpoint), ModelArguments())
        check_same_model(model.config, model_args, checkpoint)
    run = Pretraining(
        accelerator,
        training_args,
        model,
        tokenizer,
        partial(training_text, corpus, tokenizer, corpus_args, training_args, accelerator, survey),
        held_out_text(corpus_args, tokenizer, training_args, accelerator),
        number_of_steps(training_args, corpus_args, survey, accelerator.num_processes),
        carries_states=corpus_args.context == "stream",
    )
    run.progress.base_model = model_args.model_name_or_path
    if checkpoint is not None:
        run.restore(checkpoint)
    run.compare_on(held_out and held_out.order)
    # A checkpoint's model stays as it is, whether or not its options are passed once more.
    of_model = {item.name for item in fields(ModelArguments)}
    settings = {name: value for name, value in (run.progress.settings or {}).items() if name in of_model}
    settings |= without_folders(settings_of(model_args, corpus_args, training_args))  # moved files are the same ones
    run.progress.begin(settings)
    accelerator.init_trackers("runs", config={name: str(value) for name, value in settings.items()})
    run.train()
    if accelerator.is_main_process:
        publish(run, survey, corpus_args, hub_args)
    accelerator.end_training()
    return run


def make_accelerator(arguments: TrainingArguments) -> Accelerator:
    trackers = [name for name in arguments.report_to.split(",") if name != "none"]
    if trackers == ["tensorboard"] and not is_tensorboard_available():
        trackers = []  # it is only the default
    accelerator = Accelerator(
        mixed_precision="bf16" if arguments.bf16 else None,
        cpu=arguments.use_cpu,
        log_with=trackers or None,
        project_dir=arguments.output_dir,
        # While one process counts the words of a large text, the others wait.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=1))],
    )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(f"accelerate was given mixed_precision {accelerator.mixed_precision!r}; pass 'no' or 'bf16'.")
    return accelerator


def check_corpus_arguments(corpus: CorpusArguments, training: TrainingArguments) -> Corpus | None:
    """The held-out text, if there is any: its files must be there before training begins."""
    if corpus.streaming and training.max_steps <= 0:
        raise ValueError("--streaming: the length of the data set is not known; pass --max_steps.")
    if corpus.shuffle_buffer < 1:
        raise ValueError(f"--shuffle_buffer {corpus.shuffle_buffer}: pass at least 1.")
    if corpus.validation_file or corpus.validation_split is not None:
        return held_out_corpus(corpus)
    if training.early_stopping_patience is not None:
        raise ValueError("--early_stopping_patience needs held-out text; pass --validation_file or --validation_split.")
    return None


def survey_once(corpus: Corpus, accelerator: Accelerator) -> Survey | None:
    """Sizes of the text, counted by one process."""
    found = [corpus.survey() if accelerator.is_main_process else None]
    return broadcast_object_list(found)[0]


def checkpoint_to_resume(output_dir: Path, name: str | None, accelerator: Accelerator) -> Path | None:
    checkpoints = Checkpoints(output_dir, save_total_limit=None)
    if accelerator.is_main_process:
        checkpoints.clean()
    accelerator.wait_for_everyone()
    if name is not None:
        found, last = checkpoints.resolve(name), checkpoints.last()
        if last is not None and not last.samefile(found):
            raise ValueError(
                f"--resume_from_checkpoint {name}: --output_dir {output_dir} holds {last.name} too, of a run that this "
                "one would mix with. Go on from there with `last`, or pass another --output_dir."
            )
        return found
    if checkpoints.last() is not None:
        raise FileExistsError(
            f"--output_dir {output_dir} holds {checkpoints.last().name}. Go on with --resume_from_checkpoint last, or "
            "pass another folder."
        )
    return None


def load(name: str, arguments: ModelArguments) -> tuple[ELMoForPreTraining, ELMoTokenizer]:
    options = softmax_options(arguments)
    model = ELMoForPreTraining.from_pretrained(name, dtype=torch.float32, **options)  # however it was saved
    return model, ELMoTokenizer.from_pretrained(name)


def softmax_options(arguments: ModelArguments) -> dict[str, Any]:
    options = {"softmax_type": arguments.softmax_type, "num_sampled": arguments.num_sampled}
    return {name: value for name, value in options.items() if value is not None}


def overrides(arguments: ModelArguments) -> dict[str, Any]:
    try:
        found = json.loads(arguments.config_overrides or "{}")
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"--config_overrides {arguments.config_overrides}: pass a JSON object such as '{{\"dropout\": 0.2}}'."
        )
    if taken := sorted({"vocab_size", "char_vocab_size"} & found.keys()):
        raise ValueError(
            f"--config_overrides: {taken[0]} is that of the tokenizer; pass --vocabulary_size or --tokenizer_name."
        )
    return found


def starting_model(
    arguments: ModelArguments, corpus_args: CorpusArguments, corpus: Corpus, output_dir: Path, accelerator: Accelerator
) -> tuple[ELMoForPreTraining, ELMoTokenizer]:
    """A new model, or a checkpoint whose vocabulary was kept, extended or replaced."""
    old = None if arguments.model_name_or_path is None else load(arguments.model_name_or_path, arguments)
    vocabulary = Path(arguments.vocabulary_file) if arguments.vocabulary_file else output_dir / "vocab.txt"
    if arguments.vocabulary_size is not None:
        if accelerator.is_main_process:
            splitter = TextSplitter(arguments.pre_tokenization) if old is None else old[1].splitter
            splitter = TextSplitter("whitespace") if corpus_args.is_split_into_words else splitter
            _, counts = word_frequencies(corpus, splitter)
            write_vocabulary(vocabulary, most_frequent_words(counts, arguments.vocabulary_size))
        accelerator.wait_for_everyone()
    if old is None:
        return new_model(arguments, vocabulary)
    model, tokenizer = old
    if arguments.vocabulary != "keep":
        words, _ = read_vocabulary(vocabulary)
        tokenizer = change_vocabulary(model, tokenizer, words, keep_all=arguments.vocabulary == "extend")
        if arguments.vocabulary_size is not None and accelerator.is_main_process:  # all words, not those counted alone
            ids = tokenizer.get_vocab()
            write_vocabulary(vocabulary, sorted(ids, key=ids.__getitem__))
    model.config.has_softmax = True  # of a checkpoint without one it is random now, and trained from here on
    return model, tokenizer


def check_model_arguments(arguments: ModelArguments):
    vocabularies = ("vocabulary_file", "vocabulary_size", "tokenizer_name")
    given = [name for name in vocabularies if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise ValueError(f"Received {' and '.join(f'--{name}' for name in given)}; pass one of them.")
    if arguments.model_name_or_path is None:
        if not given:
            raise ValueError(
                "A new model needs a vocabulary: pass --vocabulary_size, --vocabulary_file or --tokenizer_name."
            )
        if arguments.vocabulary != "keep":
            raise ValueError(f"--vocabulary {arguments.vocabulary} is for a checkpoint; pass --model_name_or_path.")
        # Fields out of range raise here; words of a file are not read yet, and no size of theirs may be too small.
        new_config(arguments, vocab_size=arguments.vocabulary_size or sys.maxsize)
        return
    for name in ("preset", "config_overrides", "tokenizer_name"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} is for new models, and --model_name_or_path is given; pass one of them.")
    if bool(given) != (arguments.vocabulary != "keep"):
        raise ValueError(
            f"--vocabulary {arguments.vocabulary} with {f'--{given[0]}' if given else 'no vocabulary'}: pass `extend` "
            "or `replace` together with --vocabulary_file or --vocabulary_size, `keep` without."
        )


def new_model(arguments: ModelArguments, vocabulary: Path) -> tuple[ELMoForPreTraining, ELMoTokenizer]:
    if arguments.tokenizer_name is not None:
        tokenizer = ELMoTokenizer.from_pretrained(arguments.tokenizer_name)
    else:
        widths = {name: value for name, value in overrides(arguments).items() if name == "max_word_length"}
        tokenizer = ELMoTokenizer(vocabulary, pre_tokenization=arguments.pre_tokenization, **widths)
    sizes = {
        "vocab_size": len(tokenizer),
        "char_vocab_size": tokenizer.char_vocab_size,
        "max_word_length": tokenizer.max_word_length,
    }
    return ELMoForPreTraining(new_config(arguments, **sizes)), tokenizer


def new_config(arguments: ModelArguments, **sizes) -> ELMoConfig:
    return ELMoConfig.from_preset(
        arguments.preset or "small", **{**sizes, **softmax_options(arguments), **overrides(arguments)}
    )


def change_vocabulary(
    model: ELMoForPreTraining, tokenizer: ELMoTokenizer, words: list[str], keep_all: bool
) -> ELMoTokenizer:
    """Gives the model another vocabulary; words in both keep their vectors, whatever their new ids.

    Args:
        words: the new ones, special words first.
        keep_all: whether the old ones stay, before those that are new.
    """
    old = tokenizer.get_vocab()
    if keep_all:
        words = [*sorted(old, key=old.__getitem__), *(word for word in words if word not in old)]
    model.replace_vocabulary([old.get(word, -1) for word in words])
    return tokenizer.with_vocabulary(words)


def check_same_model(config: ELMoConfig, arguments: ModelArguments, checkpoint: Path):
    sizes = {name for preset in PRESETS.values() for name in preset} - {"vocab_size", "char_vocab_size"}
    preset = ELMoConfig.from_preset(arguments.preset) if arguments.preset else None
    wanted = {name: getattr(preset, name) for name in sorted(sizes) if preset is not None}
    wanted |= softmax_options(arguments) | overrides(arguments)
    there = {name: getattr(config, name, "no such field") for name in wanted}
    if arguments.vocabulary != "extend" and (arguments.vocabulary_size or math.inf) < config.vocab_size:
        wanted["vocabulary_size"], there["vocabulary_size"] = arguments.vocabulary_size, config.vocab_size
    different = [f"{name} {value} (there: {there[name]})" for name, value in wanted.items() if there[name] != value]
    if different:
        raise ValueError(
            f"{checkpoint} holds another model than the options describe: {', '.join(different)}. Leave these options "
            "out to go on with it, or pass another --output_dir."
        )


def training_text(
    corpus: Corpus,
    tokenizer: ELMoTokenizer,
    corpus_args: CorpusArguments,
    arguments: TrainingArguments,
    accelerator: Accelerator,
    survey: Survey | None,
    position: Any,
) -> SentenceBatches | StreamWindows:
    options = {
        "is_split_into_words": corpus_args.is_split_into_words,
        "shuffle_buffer": corpus_args.shuffle_buffer,
        "seed": arguments.seed,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "position": position,
        "survey": survey,
    }
    if corpus_args.context == "sentence":
        return SentenceBatches(corpus, tokenizer, arguments.per_device_train_batch_tokens, **options)
    return StreamWindows(corpus, tokenizer, arguments.per_device_train_batch_size, arguments.unroll_steps, **options)


def held_out_text(
    corpus_args: CorpusArguments, tokenizer: ELMoTokenizer, arguments: TrainingArguments, accelerator: Accelerator
) -> Callable[[], Iterable[LMBatch]] | None:
    if not corpus_args.validation_file and corpus_args.validation_split is None:
        return None
    return partial(held_out_batches, corpus_args, tokenizer, "sentence", accelerator, vars(arguments))


def number_of_steps(
    arguments: TrainingArguments, corpus_args: CorpusArguments, survey: Survey | None, num_processes: int
) -> int:
    """Exact with `--max_steps`; otherwise what the text should take, for the schedule and the progress bar."""
    if arguments.max_steps > 0:
        return arguments.max_steps
    assert survey is not None  # `check_corpus_arguments`
    if corpus_args.context == "sentence":
        tokens, per_batch = survey.words + 2 * survey.lines, arguments.per_device_train_batch_tokens
    else:
        tokens = survey.words + survey.lines
        per_batch = arguments.per_device_train_batch_size * arguments.unroll_steps
    per_step = per_batch * arguments.gradient_accumulation_steps * num_processes
    return math.ceil(arguments.num_train_epochs * tokens / per_step)


def settings_of(*arguments: Any) -> dict[str, Any]:
    """The options that differ from their defaults, and the optimizer, by which others are to be read.

    Where it is written, and whether it was interrupted, are none of them: it ends as if it had not been.
    """
    settings = {}
    for group in arguments:
        for item in fields(group):
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            is_telling = getattr(group, item.name) != default and item.name not in OF_ONE_START
            if is_telling or item.name == "optim":
                settings[item.name] = getattr(group, item.name)
    return settings


def publish(run: Pretraining, survey: Survey | None, corpus_args: CorpusArguments, hub_args: HubArguments):
    """The best checkpoint, or the last where nothing was held out, becomes the output folder's model."""
    step = run.progress.best_step or run.progress.step
    if run.checkpoints.find(step) is None:  # the run was resumed in another folder, and the best is in the first one
        step = run.progress.step
    output_dir = Path(run.arguments.output_dir)
    run.checkpoints.publish(run.checkpoints.find(step))
    write_result(output_dir, "pretraining", without_folders(record_of(run, step, survey, corpus_args)))
    write_card_facts(output_dir, hub_args)
    name = (hub_args.hub_model_id or output_dir.resolve().name).split("/")[-1]
    write_bilm_card(output_dir, name)
    print(f"{output_dir}: the model of step {step}, with its card; load it with AutoModel.from_pretrained")
    if hub_args.push_to_hub:
        repo_id = hub_args.hub_model_id or output_dir.resolve().name
        push(output_dir, repo_id, "Pretrained biLM", hub_args.hub_private_repo, hub_args.hub_token)


def record_of(run: Pretraining, step: int, survey: Survey | None, corpus_args: CorpusArguments) -> dict[str, Any]:
    config = run.plain_model.config
    data: dict[str, Any] = {
        "train": corpus_args.train_file or [corpus_args.dataset],
        "validation": [*filter(None, corpus_args.validation_file or [corpus_args.validation_split])],
    }
    if survey is not None:
        data |= {"sentences": survey.lines, "words": survey.words, "longest_sentence": survey.longest}
    if survey is not None and run.tokenizer.alphabet == "utf8":
        room = config.max_word_length - 2  # for begin and end
        data["cut_words"] = sum(number for length, number in survey.lengths.items() if length > room)
    return {
        "num_parameters": run.plain_model.num_parameters(),
        "data": data,
        "settings": run.progress.settings,
        "earlier_settings": run.progress.earlier_settings,
        "log": run.progress.log,
        "base_model": run.progress.base_model,
        "base_model_on_hub": hub_name(run.progress.base_model),
        "published_step": step,
    }


if __name__ == "__main__":
    run(main)
