"""Vectors of a whole corpus with any ELMo model: one sentence a line in; HDF5, npz, Parquet or Arrow out.

    python -m modeling_elmo.run_scripts.embed --model DIR --input corpus.txt --output vectors.hdf5 --layers all

Line `i` (from 0) of the input is entry `i` of the output, always: duplicates are embedded like any other line, and a
blank line is a sentence without words. The model reads the markers <S> and </S>; the output leaves them out.

Shape:
    a line: `(tokens, dim)`, with `--layers all` `(layers, tokens, dim)`; a blank line has 0 tokens.
    a line with `--pooling`: `(dim,)`, with `--layers all` `(layers, dim)`; a blank line is zeros.

An interruption costs the unfinished block of lines at most: the same command goes on behind the finished ones. Memory
does not grow with the corpus (but see `--forget_sentences`). What the output files look like, and where finished lines
wait for them: embed_output.py.
"""

from pathlib import Path

import modeling_elmo  # noqa: F401 (makes ELMo known to the Auto classes)
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.run_scripts.vectors.embedding import EmbedArguments, embed_corpus


def main(arguments: list[str] | None = None) -> Path:
    return embed_corpus(ProgramParser(EmbedArguments, description=__doc__).parse(arguments))


if __name__ == "__main__":
    run(main)
