"""The `elmo` command: one program after another, each imported only when it is called.

This file is a module of its own, outside the package `modeling_elmo`, whose import takes seconds.
"""

import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version

PROGRAMS = {
    "pretrain": ("run_pretraining", "train a biLM from text, or train a checkpoint further"),
    "perplexity": ("perplexity", "measure the held-out perplexity of a biLM"),
    "vocabulary": ("build_vocabulary", "count words and write the vocabulary of a biLM"),
    "ner": ("run_ner", "fine-tune a tagger: named entities, parts of speech"),
    "classify": ("run_classification", "fine-tune a classifier of texts or pairs: sentiment, entailment"),
    "qa": ("run_qa", "fine-tune a reader: answers to questions about a text"),
    "reproduce": ("reproduce", "run the paper's experiments: baselines, ablations, several seeds"),
    "embed": ("embed", "write the vectors of every sentence of a file"),
    "neighbors": ("nearest_neighbors", "find the uses of a word that are most alike"),
    "senses": ("word_senses", "measure what each layer knows of word senses"),
    "convert": ("convert_checkpoint", "convert a published checkpoint, or convert it back"),
    "push": ("push_to_hub", "check a checkpoint and upload it to the Hub"),
    "benchmark": ("benchmark", "measure correctness and speed"),
}


def main():
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
    elif arguments[0] == "--version":
        print(f"elmo {version('modeling-elmo')}")
    elif arguments[0] in PROGRAMS:
        sys.argv = [f"elmo {arguments[0]}", *arguments[1:]]  # the name that help and errors show
        program = import_module(f"modeling_elmo.run_scripts.{PROGRAMS[arguments[0]][0]}")
        import_module("modeling_elmo.run_scripts.program.command_line").run(program.main)
    else:
        close = get_close_matches(arguments[0], PROGRAMS, 1)
        advice = f"Did you mean `elmo {close[0]}`?" if close else "`elmo --help` lists the programs."
        sys.exit(f"elmo: error: there is no program {arguments[0]!r}. {advice}")


def usage() -> str:
    width = max(map(len, PROGRAMS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in PROGRAMS.items()]
    return "\n".join(["usage: elmo PROGRAM [options]", "", *lines, "", "elmo PROGRAM --help lists its options."])


if __name__ == "__main__":
    main()
