r"""Runs the experiments of the paper on a task: baseline, ablations, several seeds, ensembles.

    elmo reproduce ner --model_name_or_path elmo --train_file train.conll --validation_file dev.conll \
        --test_file test.conll --compare_baseline --seeds 5 --output_dir experiment

`--compare_baseline` trains the same network without ELMo too (Table 1). `--ablation` compares layer weights, layers,
where ELMo enters, or training sizes. `records.jsonl` holds a line for each finished model, `results/` tables and
figures, with mean and deviation over the seeds; `ARM/seed-N` holds a model. The same command resumes a stopped
experiment, and skips finished models.

    elmo reproduce all --model_name_or_path elmo --data DATA --output_dir paper

`all` runs a plan with the experiments of all six tasks, and writes one page that compares the paper's tables with ours.
"""

import inspect
import sys

from modeling_elmo.run_scripts.cards.records import RunRecord
from modeling_elmo.run_scripts.experiments import paper
from modeling_elmo.run_scripts.experiments.experiment import ExperimentArguments, run_experiment
from modeling_elmo.run_scripts.experiments.paper import PaperArguments, run_plan
from modeling_elmo.run_scripts.fine_tuning.head import HeadArguments
from modeling_elmo.run_scripts.fine_tuning.tasks import TASKS, task_class
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run


def main(arguments: list[str] | None = None) -> list[RunRecord]:
    """Returns the record of each model, or of the ensemble."""
    task_parser = ProgramParser(description=__doc__, epilog="`TASK --help` lists the options of a task.")
    choices = [*TASKS, "all"]
    text = f"Task of the experiment, or all: {', '.join(choices)}."
    task_parser.add_argument("task", metavar="TASK", choices=choices, help=text)
    arguments = sys.argv[1:] if arguments is None else arguments
    name = task_parser.parse_args(arguments[:1]).task
    if name == "all":
        program = f"{task_parser.prog} {name}"
        return run_plan(ProgramParser(PaperArguments, description=paper.__doc__, prog=program).parse(arguments[1:]))
    chosen = task_class(name)
    parser = ProgramParser(
        HeadArguments,
        chosen.arguments_class,
        ExperimentArguments,
        chosen.training_arguments_class,
        description=inspect.getdoc(chosen),
        prog=f"{task_parser.prog} {name}",
    )
    head, options, experiment, training = parser.parse(arguments[1:])
    return run_experiment(chosen.read(options), head, experiment, training)


if __name__ == "__main__":
    run(main)
