"""The `elmo` command, which runs one program and imports no other.

This module is outside the package `modeling_elmo`, whose import takes seconds: `elmo --help` answers at once.
"""

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version

PROGRAMS = {
    # name: (module in run_scripts, purpose)
    "pretrain": ("run_pretraining", "train a biLM on text, or continue the training of a checkpoint"),
    "perplexity": ("perplexity", "measure the perplexity of a biLM on held-out text"),
    "pairs": ("minimal_pairs", "measure how often a biLM prefers the good sentence of a pair"),
    "vocabulary": ("build_vocabulary", "count words and write the vocabulary of a biLM"),
    "ner": ("run_task", "fine-tune a tagger: named entities, parts of speech"),
    "classify": ("run_task", "fine-tune a classifier of texts or pairs: sentiment, entailment"),
    "qa": ("run_task", "fine-tune a reader that answers questions about a text"),
    "srl": ("run_task", "fine-tune a semantic role labeler: who did what to whom"),
    "coref": ("run_task", "fine-tune a coreference resolver: who is who in a document"),
    "evaluate": ("evaluate", "score a trained head on new files, and show its errors"),
    "reproduce": ("reproduce", "run the paper's experiments: baselines, ablations, several seeds"),
    "embed": ("embed", "write the vectors of every sentence of a file"),
    "neighbors": ("nearest_neighbors", "find the most similar uses of a word"),
    "explore": ("explore", "look at models in the browser: uses, expected words, heads"),
    "senses": ("word_senses", "measure how well each layer separates word senses"),
    "probe": ("probe", "measure what each layer knows about parts of speech and other tags"),
    "convert": ("convert_checkpoint", "convert a published checkpoint to a Hugging Face folder, or back"),
    "export": ("export", "export a model to ONNX, or to an exported program of torch"),
    "push": ("push_to_hub", "check a checkpoint and upload it to the Hub"),
    "benchmark": ("benchmark", "check correctness and measure speed"),
    "doctor": ("doctor", "print versions, processor, accelerators and chosen backends"),
}

# Variables that tqdm reads when it is imported. In a log, a bar is a line every half minute, and none before the first.
LINES_OF_PROGRESS = {
    "TQDM_DELAY": "30",
    "TQDM_MININTERVAL": "30",
    "TQDM_MAXINTERVAL": "30",
    "TQDM_POSITION": "0",  # no bar below another
    "TQDM_BAR_FORMAT": "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]\n",
}


def main() -> None:
    try:
        answer(*sys.argv[1:])
        print(end="", flush=True)  # Python would do it last, and report an output that nobody reads
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError:  # nobody reads the output; Python writes the rest when it ends, which must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def answer(name: str = "--help", *options: str) -> None:
    if name in ("-h", "--help"):
        programs = [f"  {name:12}{purpose}" for name, (_, purpose) in PROGRAMS.items()]
        print("usage: elmo PROGRAM [options]\n", *programs, "\nelmo PROGRAM --help lists its options.", sep="\n")
    elif name == "--version":
        print(f"elmo {version('modeling-elmo')}")
    elif name in PROGRAMS:
        run_program(name, *options)
    else:
        close = get_close_matches(name, PROGRAMS, 1)
        advice = f"Did you mean `elmo {close[0]}`?" if close else "`elmo --help` lists the programs."
        print(f"elmo: error: {name!r} is not a program. {advice}", file=sys.stderr)
        sys.exit(2)


def run_program(name: str, *options: str) -> None:
    sys.argv = [f"elmo {name}", *options]  # the name in the help and in errors
    if sys.stderr and not sys.stderr.isatty():
        for variable, value in LINES_OF_PROGRESS.items():
            os.environ.setdefault(variable, value)
    package = "modeling_elmo.run_scripts"
    run, module = import_module(f"{package}.program.command_line").run, PROGRAMS[name][0]
    task = [name] if module == "run_task" else []  # one program for all tasks
    run(lambda: import_module(f"{package}.{module}").main(task + sys.argv[1:]))  # from which it takes `--debug`


if __name__ == "__main__":
    main()
