"""Fine-tunes the paper's network for a task on a biLM: a tagger, classifier, reader, labeler or resolver.

    elmo ner --model_name_or_path elmo --train_file train.conll --validation_file dev.conll --output_dir tagger

`elmo ner`, `classify`, `qa`, `srl` and `coref` are this program. `fine_tune_stock.py` does the same for named entities
with transformers' Trainer alone, and `run_ner_no_trainer.py` in a plain loop.
"""

import inspect
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from modeling_elmo.run_scripts.cards.card import CardArguments
from modeling_elmo.run_scripts.cards.records import RunRecord
from modeling_elmo.run_scripts.cards.results import report
from modeling_elmo.run_scripts.cards.tables import format_score, spaced
from modeling_elmo.run_scripts.fine_tuning.continuation import Continuation, ContinuationArguments
from modeling_elmo.run_scripts.fine_tuning.head import (
    BasicHeadArguments,
    HeadArguments,
    task_model,
    task_tokenizer,
    train_task,
)
from modeling_elmo.run_scripts.fine_tuning.run import begin_run, push_model, run_record, run_settings, write_run
from modeling_elmo.run_scripts.fine_tuning.saved_head import file_arguments, saved_settings
from modeling_elmo.run_scripts.fine_tuning.task import Task
from modeling_elmo.run_scripts.fine_tuning.tasks import TASKS, task_class
from modeling_elmo.run_scripts.fine_tuning.trainer import TaskTrainingArguments
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.run_scripts.program.processes import sole_run
from modeling_elmo.run_scripts.program.trackers import TENSORBOARD_FOLDER, where_to_look

USE = "--model_name_or_path elmo --train_file TRAIN --validation_file DEV --output_dir OUTPUT"


def main(arguments: list[str] | None = None) -> RunRecord:
    """Returns the record of the trained model. The first argument is the name of the task."""
    task_parser = ProgramParser(description=__doc__, epilog="`TASK --help` lists the options of a task.")
    task_parser.add_argument("task", metavar="TASK", choices=TASKS, help=f"Task: {', '.join(TASKS)}.")
    arguments = sys.argv[1:] if arguments is None else arguments
    name = task_parser.parse_args(arguments[:1]).task
    task_type = task_class(name)
    parser = ProgramParser(
        BasicHeadArguments,
        ContinuationArguments,
        task_type.arguments_class,
        CardArguments,
        task_type.training_arguments_class,
        description=f"{inspect.getdoc(task_type)}\n\n    elmo {name} {USE}",
        epilog=f"`elmo reproduce {name}` runs the paper's experiments: baseline, ablations, several seeds.",
        prog=f"{task_parser.prog.removesuffix(f' {name}')} {name}",  # `elmo ner` has the name already
    )
    basic_head, how_to_go_on, options, card, training = parser.parse(arguments[1:])
    if not how_to_go_on.continue_head:
        head = HeadArguments(**vars(basic_head))  # which looks for the model
        start = time.monotonic()
        return fine_tune(task_type.read(options), head, card, training, start)
    continuation = Continuation.of(basic_head.model_name_or_path, name, how_to_go_on)
    parser.set_defaults(**saved_settings(continuation.saved, file_arguments(task_type)))  # files are read as before
    basic_head, _, options, card, training = parser.parse(arguments[1:])
    head = continuation.head_arguments(basic_head)
    start = time.monotonic()
    return fine_tune(continuation.task(task_type, options), head, card, training, start, continuation)


def fine_tune(
    task: Task,
    head: HeadArguments,
    card: CardArguments,
    training: TaskTrainingArguments,
    start: float,
    continuation: Continuation | None = None,
) -> RunRecord:
    """Trains the task's head on its data, `task.data`; `start` is the time at which its reading began."""
    settings = run_settings(task, head, training)
    if continuation is not None:
        settings |= vars(continuation.options)
        is_new = training.resume_from_checkpoint is None  # a resumed run has this score in its log
        training.eval_on_start = is_new and "validation" in task.data and training.eval_strategy != "no"
    folder = Path(training.output_dir)
    with sole_run(folder, is_main_process=training.process_index == 0):
        begin_run(task, head, training, settings)
        if training.process_index == 0:
            print(where_to_look(training.report_to, folder / TENSORBOARD_FOLDER))
        vectors = head.read_word_vectors()
        if continuation is None:
            tokenizer = task_tokenizer(task, head, task.data["train"], vectors)  # with the words of the training data
            make_model = partial(task_model, task, head, tokenizer, vectors)
        else:
            tokenizer = continuation.tokenizer(task, head)
            make_model = partial(continuation.model, task, head, tokenizer, vectors)
        with training.main_process_first(desc="encoding"):
            splits = task.encode_splits(tokenizer)
        options = training.for_trainer(task.metric, has_validation="validation" in splits)
        trainer = train_task(task, make_model, options, tokenizer, splits, training.checkpoint())
        began = start if training.resume_from_checkpoint is None else None
        record = run_record(trainer, task, splits, settings, began)
        if trainer.is_world_process_zero():
            write_run(folder, record, card, training)
            change = "" if continuation is None else change_of_score(trainer.state.log_history, record)
            report([record], folder, folder, change=change)
            if training.push_to_hub:
                push_model(folder, task, training)
    return record


def change_of_score(log: list[dict[str, Any]], record: RunRecord) -> str:
    """A sentence with the validation score of a head before and after it was trained further; empty if not measured."""
    metric = record["metric"]
    before = [entry[f"eval_{metric}"] for entry in log if entry["step"] == 0 and f"eval_{metric}" in entry]
    if not before:
        return ""
    after = record["metrics"]["validation"][metric]
    scores = f"from {format_score(before[0], metric)} to {format_score(after, metric)}"
    return f" This training took {spaced(metric)} on validation {scores}."


if __name__ == "__main__":
    run(main)
