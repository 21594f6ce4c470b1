"""Fine-tunes a semantic role labeller on a biLM: who did what to whom, as in PropBank.

    elmo srl --model_name_or_path elmo --train_file train.tsv --validation_file dev.tsv --output_dir labeller

The network is the paper's (section 4): eight LSTM layers with highway connections, in alternating directions (He et
al. 2017), over `[x_k; ELMo_k]` and a mark of the predicate. A second output finds the predicates. F1 is that of the
official scorer, `srl-eval.pl`, with gold predicates. `elmo reproduce srl` runs the paper's experiments: baseline,
ablations, several seeds.
"""

import time

from transformers import set_seed

from modeling_elmo.run_scripts.cards.card import CardArguments
from modeling_elmo.run_scripts.experiments.reports import begin_run, finish_run
from modeling_elmo.run_scripts.fine_tuning.head import BasicHeadArguments, HeadArguments, task_model, task_tokenizer
from modeling_elmo.run_scripts.fine_tuning.tasks.semantic_roles import (
    SemanticRoleArguments,
    SemanticRoles,
    SemanticRoleTrainingArguments,
)
from modeling_elmo.run_scripts.fine_tuning.trainer import TaskTrainer
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run


def main(arguments: list[str] | None = None) -> Record:
    parser = ProgramParser(
        BasicHeadArguments, SemanticRoleArguments, CardArguments, SemanticRoleTrainingArguments, description=__doc__
    )
    model_options, data_options, card, training = parser.parse(arguments)
    start, head = time.monotonic(), HeadArguments(**vars(model_options))

    task = SemanticRoles(data_options)  # reads the data: task.data["train"] has tokens, and tags for each predicate

    with training.sole_run():
        begin_run(task, head, training)
        vectors = head.read_word_vectors()
        tokenizer = task_tokenizer(task, head, task.data["train"], vectors)  # with the words of the training data
        with training.main_process_first(desc="encoding"):
            splits = task.encode_splits(tokenizer)  # a row per predicate
        set_seed(training.seed)
        model = task_model(task, head, tokenizer, vectors, training.seed)  # ELMoForSemanticRoleLabeling on the biLM

        trainer = TaskTrainer(
            model,
            args=training.for_trainer(task.metric, has_validation="validation" in splits),
            data_collator=task.collator(tokenizer),
            train_dataset=splits["train"],
            eval_dataset=splits.get("validation"),
            processing_class=tokenizer,
            compute_metrics=task.compute_metrics(splits),
            preprocess_logits_for_metrics=task.preprocess_logits,  # the best labels, without the others' scores
        )
        trainer.train(resume_from_checkpoint=training.checkpoint())
        trainer.save_model()

        # Predictions, record.json and README.md; tables and figures in results/; the upload, if it is wanted.
        return finish_run(trainer, task, splits, head, card, training, start)


if __name__ == "__main__":
    run(main)
