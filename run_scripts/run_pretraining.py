"""Trains a biLM on raw text, or trains a checkpoint further, and writes a folder that `AutoModel` loads.

    elmo pretrain --preset small --vocabulary_size 50000 \\
        --train_file train/*.txt.gz --validation_file heldout.txt --output_dir elmo-small

On several devices: `accelerate launch -m modeling_elmo.run_scripts.run_pretraining ...`. On several CPU processes:
`torchrun --nproc_per_node N -m modeling_elmo.run_scripts.run_pretraining ...`.

During training the output folder holds checkpoints. After training it also holds the model, its tokenizer, a model
card, and the record of the run, `results/pretraining.json`, from which the card is made.
"""

import math
import os
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, is_tensorboard_available, set_seed
from transformers.utils import logging

from modeling_elmo.run_scripts.cards.bilm_card import perplexity_values, write_bilm_card
from modeling_elmo.run_scripts.cards.card import (
    CardArguments,
    check_repository,
    without_folders,
    write_card_facts,
    write_result,
)
from modeling_elmo.run_scripts.cards.publishing import FLAG, push
from modeling_elmo.run_scripts.pretraining.checkpoints import PROJECT, Checkpoints, on_main_process, step_of
from modeling_elmo.run_scripts.pretraining.corpus import Corpus, CorpusArguments
from modeling_elmo.run_scripts.pretraining.counting import Survey
from modeling_elmo.run_scripts.pretraining.evaluation import check_context
from modeling_elmo.run_scripts.pretraining.loop import Pretraining, PretrainingArguments
from modeling_elmo.run_scripts.pretraining.starting_model import ModelArguments, RunStart, settings_of
from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, print_conclusion, run
from modeling_elmo.run_scripts.program.processes import check_processes, computes_bfloat16, has_accelerator, sole_run
from modeling_elmo.run_scripts.program.trackers import TENSORBOARD_FOLDER, where_to_look
from modeling_elmo.tokenization.elmo_characters import UNK_ID

logger = logging.get_logger(__name__)

FEW_STEPS = 300  # of a new model


@dataclass(kw_only=True)
class HubArguments(CardArguments):
    """Options of the card and of the upload."""

    push_to_hub: bool = option(False, "Upload the model and its card after training.")
    hub_model_id: str | None = option(None, "Repository on the Hub. Default: the name of the output folder.")
    hub_private_repo: bool | None = option(
        None, "Whether a new repository is private. Default: as set in your account.", **FLAG
    )
    hub_token: str | None = option(None, "Access token of the Hub. Default: the token of `hf auth login`.")


def main(arguments: list[str] | None = None) -> Pretraining:
    parser = ProgramParser(ModelArguments, CorpusArguments, PretrainingArguments, HubArguments, description=__doc__)
    model_args, corpus_args, training_args, hub_args = parser.parse(arguments)
    if training_args.resume_from_checkpoint is None:
        model_args.check()
    held_out = check_texts(corpus_args, training_args)
    logging.disable_progress_bar()  # for single files
    accelerator = make_accelerator(training_args)
    with sole_run(Path(training_args.output_dir), is_main_process=accelerator.is_main_process):
        training = pretrain(accelerator, held_out, model_args, corpus_args, training_args, hub_args)
    # DistributedDataParallel that outlives its process group may hang: torch waits for a thread that needs the GIL.
    training.model = training.plain_model
    accelerator.free_memory()
    accelerator.end_training()
    return training


def pretrain(
    accelerator: Accelerator,
    held_out: Corpus | None,
    model_args: ModelArguments,
    corpus_args: CorpusArguments,
    training_args: PretrainingArguments,
    hub_args: HubArguments,
) -> Pretraining:
    output_dir = Path(training_args.output_dir)
    if hub_args.push_to_hub:
        check_repository(hub_args.hub_model_id or output_dir.resolve().name, "--hub_model_id")
    checkpoint = checkpoint_to_resume(output_dir, training_args.resume_from_checkpoint, accelerator)
    trackers = list(map(str, accelerator.log_with))
    # Accelerate gives TensorBoard's folder and the projects of other trackers one name.
    project = TENSORBOARD_FOLDER if trackers == ["tensorboard"] else PROJECT
    accelerator.print(where_to_look(trackers, output_dir / project, project))
    corpus = Corpus.from_arguments(corpus_args)
    set_seed(training_args.seed)
    start = RunStart(accelerator, model_args, corpus_args, training_args, corpus, held_out)
    training = start.begin() if checkpoint is None else start.resume(checkpoint)
    if message := training.progress.evaluate_on(held_out.order if held_out else None):
        accelerator.print(message)
    settings = without_folders(settings_of(model_args, corpus_args, training_args))
    if accelerator.num_processes > 1:  # each has batches of its own
        settings["num_processes"] = accelerator.num_processes
    settings["pre_tokenization"] = training.tokenizer.pre_tokenization
    settings = training.progress.begin(settings, names_of_model={item.name for item in fields(ModelArguments)})
    warn_of_few_steps(training)
    names = {tracker: {"name": output_dir.resolve().name} for tracker in ("wandb", "trackio") if tracker in trackers}
    accelerator.init_trackers(project, {name: str(value) for name, value in settings.items()}, names)
    training.train()
    if accelerator.is_main_process:
        publish(training, hub_args)
    return training


def check_texts(corpus: CorpusArguments, training: PretrainingArguments) -> Corpus | None:
    """Refuses options of the texts that do not fit the loop. Returns the held-out text, if there is one."""
    if training.resume_from_checkpoint and not corpus.train_file and corpus.dataset is None:
        raise ValueError(
            f"--resume_from_checkpoint {training.resume_from_checkpoint}: the training text is missing. Run the same "
            "command as before, with this option added."
        )
    if corpus.streaming and training.max_steps <= 0:
        raise ValueError("--streaming: the size of the data set is unknown; pass --max_steps.")
    if corpus.context == "stream" and training.dataloader_num_workers > 1:
        raise ValueError(
            f"--dataloader_num_workers {training.dataloader_num_workers} with --context stream, whose rows are read in "
            "order: pass 0 or 1."
        )
    rows = ["per_device_train_batch_size"]
    if training.optim != "adagrad":  # its default --gradient_scale is --unroll_steps
        rows.append("unroll_steps")
    check_context(training, corpus.context, {"sentence": ["per_device_train_batch_tokens"], "stream": rows})
    if corpus.validation_file or corpus.validation_split is not None:
        return Corpus.held_out(corpus)
    if training.early_stopping_patience is not None:
        raise ValueError("--early_stopping_patience needs held-out text; pass --validation_file or --validation_split.")
    return None


def make_accelerator(arguments: PretrainingArguments) -> Accelerator:
    trackers = [name for name in arguments.report_to.split(",") if name != "none"]
    if trackers == ["tensorboard"] and not is_tensorboard_available():
        trackers = []  # tensorboard is only the default
    is_cpu = arguments.use_cpu or not has_accelerator()
    precision = "bf16" if arguments.bf16 else os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision == "bf16" and is_cpu and not computes_bfloat16("cpu", "--bf16"):
        precision = "no"
    accelerator = Accelerator(
        mixed_precision=precision,
        cpu=is_cpu,
        log_with=trackers or None,
        project_dir=arguments.output_dir,
        # The other processes wait while the main process counts the words of a large text.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=1))],
    )
    if absent := {*trackers} - {"all", *map(str, accelerator.log_with)}:
        raise ValueError(f"--report_to {absent.pop()}: its package is not installed. Install it, or leave it out.")
    if accelerator.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if arguments.tf32 else "highest")
    check_processes(accelerator.num_processes)
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(f"accelerate was given mixed_precision {accelerator.mixed_precision!r}; pass 'no' or 'bf16'.")
    arguments.bf16 = accelerator.mixed_precision == "bf16"  # for the record of the run
    return accelerator


def checkpoint_to_resume(output_dir: Path, name: str | None, accelerator: Accelerator) -> Path | None:
    checkpoints = Checkpoints(output_dir, save_total_limit=None)
    checkpoints.to_resume(name)  # nothing is removed from a folder that is refused
    accelerator.wait_for_everyone()
    on_main_process(accelerator, checkpoints.clean)
    return checkpoints.to_resume(name)


def warn_of_few_steps(training: Pretraining):
    is_new = training.progress.base_model is None and not training.progress.step
    if not is_new or training.num_steps >= FEW_STEPS:
        return
    more = "a larger --max_steps:"
    if training.arguments.max_steps < 0:
        more = "fewer --per_device_train_batch_tokens, or more --num_train_epochs, for"
    logger.warning(f"A new model hardly learns in {training.num_steps} steps. Pass {more} {FEW_STEPS} steps or more.")


def publish(training: Pretraining, hub_args: HubArguments):
    """Copies the model of the best checkpoint to the output folder, the last one without held-out text."""
    progress, output_dir = training.progress, Path(training.arguments.output_dir)
    best_step = progress.best_step or progress.step
    checkpoint = training.checkpoints.find(best_step) or training.checkpoints.last()
    if checkpoint is None:
        raise FileNotFoundError(f"{output_dir} has no checkpoint; the last one was removed during the run.")
    training.checkpoints.publish(checkpoint)
    step = step_of(checkpoint)
    if step != best_step:  # that of a run that was resumed in another folder is in the first one
        logger.warning(
            f"{output_dir} lacks checkpoint-{best_step}, which has the lowest held-out perplexity. The model comes "
            f"from step {step:,}. For the other one, copy the checkpoint there, and resume with the same command."
        )
    record = record_of_run(training, step)
    write_result(output_dir, "pretraining", without_folders(record))
    write_card_facts(output_dir, hub_args)
    repo_id = hub_args.hub_model_id or output_dir.resolve().name
    write_bilm_card(output_dir, repo_id.split("/")[-1])
    print(f"{output_dir}: the model of step {step}, with its card; load it with AutoModel.from_pretrained")
    values = perplexity_values(record)
    judge(values, training.survey)
    print_conclusion(how_good(values), *next_pretraining_command(values, output_dir))
    if hub_args.push_to_hub:
        push(output_dir, repo_id, "Pretrained biLM", hub_args.hub_private_repo, hub_args.hub_token)


def record_of_run(training: Pretraining, published_step: int) -> dict[str, Any]:
    """The content of `results/pretraining.json`."""
    corpus, progress, survey = training.corpus_args, training.progress, training.survey
    data: dict[str, Any] = {
        "train": corpus.train_file or [str(corpus.dataset)],
        "validation": corpus.validation_file or [*filter(None, [corpus.validation_split])],
    }
    if survey is not None:
        data |= {"sentences": survey.lines, "words": survey.words, "longest_sentence": survey.longest}
        room = training.plain_model.config.max_word_length - 2  # without the characters for begin and end of word
        data["cut_words"] = sum(number for length, number in survey.lengths.items() if length > room)
    return {
        "num_parameters": training.plain_model.num_parameters(),
        "data": data,
        "settings": progress.settings,
        "earlier_settings": progress.earlier_settings,
        "log": progress.log,
        "earlier_trainings": progress.earlier_trainings,
        "base_model": progress.base_model,
        "base_model_on_hub": progress.base_model_on_hub,
        "published_step": published_step,
    }


def judge(values: dict[str, Any], survey: Survey | None):
    """Warns of a model that is worse than before, or than counting words; `values` are the values of its card."""
    if "perplexity" not in values:
        return
    figures = values["perplexity"]
    perplexity, unigram = figures["perplexity"], figures.get("unigram")
    before = values.get("perplexity_before")
    if unigram and unigram < perplexity:
        logger.warning(
            f"The held-out perplexity {perplexity:,.2f} is above the {unigram:,.2f} of a unigram, which only knows "
            "how often each word occurs. Train for more steps; if the text is small, with smaller "
            "--per_device_train_batch_tokens and --preset tiny."
        )
    if survey is not None and not survey.counts.get(UNK_ID) and figures.get("unknown_rate"):
        logger.warning(
            f"{figures['unknown_rate']:.1%} of the held-out words are <UNK>, of which the model has learned nothing: "
            "the vocabulary has every word of the training text. Pass a smaller --vocabulary_size."
        )
    if before and before < perplexity:
        logger.warning(
            f"The held-out perplexity {perplexity:,.2f} is above the {before:,.2f} before the training; a lower "
            "--learning_rate may help."
        )


def how_good(values: dict[str, Any]) -> str:
    """The held-out perplexity, compared with a unigram and the model before."""
    if "perplexity" not in values:
        return (
            "The perplexity was not measured. Pass --validation_file, or a part of the text with --split 'train[:90%]' "
            "--validation_split 'train[90%:]'."
        )
    figures = values["perplexity"]
    sentence = f"The held-out perplexity is {figures['perplexity']:,.2f}"
    if figures.get("unigram"):
        sentence += f"; a unigram, which only knows how often each word occurs, has {figures['unigram']:,.2f}"
    if "perplexity_before" in values:
        sentence += f"; before the training it was {values['perplexity_before']:,.2f}"
    return f"{sentence}."


def next_pretraining_command(values: dict[str, Any], folder: Path) -> list[object]:
    """What to do with a model: measure it, train it further if counting words is better, or train a task."""
    figures = values.get("perplexity")
    if figures is None:
        return ["elmo", "perplexity", "--model", folder, "--validation_file", "TEXT"]
    if figures["perplexity"] > (figures.get("unigram") or math.inf):
        return ["elmo", "pretrain", "--model_name_or_path", folder, "--train_file", "TEXT", "--output_dir", "NEW_MODEL"]
    command = ["elmo", "ner", "--model_name_or_path", folder, "--train_file", "TRAIN", "--validation_file", "DEV"]
    return [*command, "--output_dir", "tagger"]


if __name__ == "__main__":
    run(main)
