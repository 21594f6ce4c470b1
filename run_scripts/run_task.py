"""Fine-tunes the paper's network for a task on a biLM: a tagger, classifier, reader, labeller or resolver.

    elmo ner --model_name_or_path elmo --train_file train.conll --validation_file dev.conll --output_dir tagger

`elmo ner`, `classify`, `qa`, `srl` and `coref` are this program. `fine_tune_stock.py` does the same for named entities
with transformers' Trainer alone, and `run_ner_no_trainer.py` in a plain loop.
"""

import inspect
import sys
import time

from transformers import set_seed

from modeling_elmo.run_scripts.cards.card import CardArguments
from modeling_elmo.run_scripts.experiments.reports import begin_run, finish_run
from modeling_elmo.run_scripts.fine_tuning.head import BasicHeadArguments, HeadArguments, task_model, task_tokenizer
from modeling_elmo.run_scripts.fine_tuning.task import Record, Task
from modeling_elmo.run_scripts.fine_tuning.tasks import TASKS, task_class
from modeling_elmo.run_scripts.fine_tuning.trainer import TaskTrainer, TaskTrainingArguments
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run

USE = "--model_name_or_path elmo --train_file TRAIN --validation_file DEV --output_dir OUTPUT"


def main(arguments: list[str] | None = None) -> Record:
    """Returns the record of the trained model. The first argument is the name of the task."""
    task_parser = ProgramParser(description=__doc__, epilog="`TASK --help` lists the options of a task.")
    task_parser.add_argument("task", metavar="TASK", choices=TASKS, help=f"Task: {', '.join(TASKS)}.")
    arguments = sys.argv[1:] if arguments is None else arguments
    name = task_parser.parse_args(arguments[:1]).task
    chosen = task_class(name)
    parser = ProgramParser(
        BasicHeadArguments,
        chosen.arguments_class,
        CardArguments,
        chosen.training_arguments_class,
        description=f"{inspect.getdoc(chosen)}\n\n    elmo {name} {USE}",
        epilog=f"`elmo reproduce {name}` runs the paper's experiments: baseline, ablations, several seeds.",
        prog=f"{task_parser.prog.removesuffix(f' {name}')} {name}",  # `elmo ner` has the name already
    )
    basic_head, options, card, training = parser.parse(arguments[1:])
    head = HeadArguments(**vars(basic_head))  # which looks for the model
    start, task = time.monotonic(), chosen(options)  # reads the data
    return fine_tune(task, head, card, training, start)


def fine_tune(
    task: Task, head: HeadArguments, card: CardArguments, training: TaskTrainingArguments, start: float
) -> Record:
    """Trains the task's head on its data, `task.data`; `start` is the time at which its reading began."""
    with training.sole_run():
        begin_run(task, head, training)
        vectors = head.read_word_vectors()
        tokenizer = task_tokenizer(task, head, task.data["train"], vectors)  # with the words of the training data
        with training.main_process_first(desc="encoding"):
            splits = task.encode_splits(tokenizer)
        set_seed(training.seed)
        model = task_model(task, head, tokenizer, vectors, training.seed)  # the task's head on the biLM

        trainer = TaskTrainer(
            model,
            args=training.for_trainer(task.metric, has_validation="validation" in splits),
            data_collator=task.collator(tokenizer),
            train_dataset=splits["train"],
            eval_dataset=splits.get("validation"),
            processing_class=tokenizer,
            compute_metrics=task.compute_metrics(splits),
            preprocess_logits_for_metrics=task.preprocess_logits,
        )
        trainer.train(resume_from_checkpoint=training.checkpoint())
        trainer.save_model()

        # Predictions, record.json and README.md; tables and figures in results/; the upload, if it is wanted.
        return finish_run(trainer, task, splits, head, card, training, start)


if __name__ == "__main__":
    run(main)
