"""Fine-tunes a tagger on a biLM: named entities, parts of speech, any label per word.

    elmo ner --model_name_or_path elmo --train_file train.conll --validation_file dev.conll --output_dir tagger

The network is the paper's (section 4): biLSTMs and a CRF over `[x_k; ELMo_k]`. Files have a word and its tag per line.
`elmo reproduce ner` runs the paper's experiments: baseline, ablations, several seeds.
"""

import time

from transformers import set_seed

from modeling_elmo.run_scripts.cards.card import CardArguments
from modeling_elmo.run_scripts.experiments.reports import begin_run, finish_run
from modeling_elmo.run_scripts.fine_tuning.head import BasicHeadArguments, HeadArguments, task_model, task_tokenizer
from modeling_elmo.run_scripts.fine_tuning.task import Record
from modeling_elmo.run_scripts.fine_tuning.tasks.tagging import Tagging, TaggingArguments
from modeling_elmo.run_scripts.fine_tuning.trainer import TaskTrainer, TaskTrainingArguments
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run


def main(arguments: list[str] | None = None) -> Record:
    parser = ProgramParser(
        BasicHeadArguments, TaggingArguments, CardArguments, TaskTrainingArguments, description=__doc__
    )
    model_options, data_options, card, training = parser.parse(arguments)
    start, head = time.monotonic(), HeadArguments(**vars(model_options))

    task = Tagging(data_options)  # reads the data: task.data["train"] has the columns tokens and tags

    with training.sole_run():
        begin_run(task, head, training)
        vectors = head.read_word_vectors()
        tokenizer = task_tokenizer(task, head, task.data["train"], vectors)  # with the words of the training data
        with training.main_process_first(desc="encoding"):
            splits = task.encode_splits(tokenizer)
        set_seed(training.seed)
        model = task_model(task, head, tokenizer, vectors, training.seed)  # ELMoForTokenClassification on the biLM

        trainer = TaskTrainer(
            model,
            args=training.for_trainer(task.metric, has_validation="validation" in splits),
            data_collator=task.collator(tokenizer),
            train_dataset=splits["train"],
            eval_dataset=splits.get("validation"),
            processing_class=tokenizer,
            compute_metrics=task.compute_metrics(splits),
        )
        trainer.train(resume_from_checkpoint=training.checkpoint())
        trainer.save_model()

        # Predictions, record.json and README.md; tables and figures in results/; the upload, if it is wanted.
        return finish_run(trainer, task, splits, head, card, training, start)


if __name__ == "__main__":
    run(main)
