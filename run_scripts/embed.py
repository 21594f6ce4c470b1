"""Writes the vectors of every sentence of a corpus, with any ELMo model.

    elmo embed --model DIR --input corpus.txt --output vectors.hdf5 --layers all

The input has one sentence per line. Line `i`, counted from 0, becomes entry `i` of the output: duplicates are embedded
again, and a blank line is a sentence without words. The model reads the markers <S> and </S>; the output leaves them
out.

A FASTA file has one record per entry, under its name, and one token per residue:

    elmo embed --model DIR --input proteins.fasta.gz --output residues.hdf5 --layers sum

Shape of an entry:
    `(tokens, dim)`, or `(layers, tokens, dim)` with `--layers all`; a blank line has 0 tokens.
    With `--pooling`: `(dim,)`, or `(layers, dim)` with `--layers all`; a blank line is zeros.

An interrupted run loses at most one block of lines: run the same command again, and it continues after the finished
blocks. Memory does not grow with the corpus, except for `sentence_to_index` (see `--forget_sentences`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tqdm.auto import tqdm
from transformers.utils import logging

from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.run_scripts.program.files import TextArguments
from modeling_elmo.run_scripts.program.processes import sole_run
from modeling_elmo.run_scripts.vectors.embedding import (
    LayerChoice,
    PoolingChoice,
    StoredDtype,
    embed_lines,
    is_trained,
    load_model_and_tokenizer,
    weights_checksum,
)
from modeling_elmo.run_scripts.vectors.lines import LineUnit, open_lines
from modeling_elmo.run_scripts.vectors.outputs import PartsFolder, find_writer, parts_folder

logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class EmbedArguments(TextArguments):
    model: str = field(metadata={"help": "Folder or Hub name of any ELMo model."})
    output: str = field(metadata={"help": "New file: .hdf5, .h5 or .parquet."})
    input: str | None = field(
        default=None,
        metadata={
            "help": "UTF-8 file, one sentence per line (.txt, .jsonl), or FASTA (.fasta, .fa, .faa); also .gz, .zst."
        },
    )
    raw_text: bool = field(
        default=False, metadata={"help": "Split sentences with the model's tokenizer. Default: at spaces only."}
    )
    unit: LineUnit = field(
        default="word", metadata={"help": "Token: a word, or each letter of a text. FASTA is always read by letters."}
    )
    layers: LayerChoice = field(
        default="all",
        metadata={"help": "All layers, the top layer, their average or sum, or the learned mix of the model."},
    )
    pooling: PoolingChoice = field(
        default="none", metadata={"help": "One vector per sentence: the mean or the maximum over its words."}
    )
    dtype: StoredDtype = field(default="float32", metadata={"help": "Type of the vectors in the output file."})
    compute_dtype: Literal["float32", "bfloat16", "int8"] = field(
        default="float32",
        metadata={"help": "Type in which the model computes; int8: linear layers of the biLM in 8 bits, on CPU."},
    )
    batch_tokens: int = field(
        default=4096, metadata={"help": "Maximum tokens per batch, including markers and padding."}
    )
    device: str | None = field(default=None, metadata={"help": "Device. Default: cuda if available, else cpu."})
    forget_sentences: bool = field(
        default=False, metadata={"help": "Leave `sentence_to_index`, which holds the whole text, out of HDF5."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code from the model's folder."})

    def __post_init__(self):
        if self.raw_text and self.unit == "character":
            raise ValueError("--raw_text splits texts into words; it cannot be combined with --unit character.")


def main(arguments: list[str] | None = None) -> Path:
    """Returns the path of the output."""
    parsed = ProgramParser(EmbedArguments, description=__doc__).parse(arguments)
    output, write_output = Path(parsed.output), find_writer(parsed.output)
    lines, total = open_lines(parsed, parsed.input, parsed.raw_text, parsed.unit)
    model, tokenizer = load_model_and_tokenizer(
        parsed.model, parsed.device, parsed.trust_remote_code, parsed.compute_dtype
    )
    if parsed.layers == "mixed" and not is_trained(model.scalar_mix):
        logger.warning(f"The mix of {parsed.model} was never trained: it is the average of the layers.")
    choices = {name: getattr(parsed, name) for name in ("layers", "pooling", "dtype")}
    computed_by = {"compute_dtype": parsed.compute_dtype, "weights": weights_checksum(model)}
    with sole_run(parts_folder(output), option="--output"):
        parts = PartsFolder(output, {**choices, "raw_text": parsed.raw_text, "unit": parsed.unit, **computed_by})
        blocks = embed_lines(parts.skip_finished(lines), model, tokenizer, batch_tokens=parsed.batch_tokens, **choices)
        with tqdm(total=total, initial=parts.num_lines, unit=" lines", desc=output.name) as progress:
            for block in blocks:
                parts.save(block)
                progress.update(len(block.lines))
        if not parts.num_lines:
            raise ValueError(f"{parsed.input or parsed.dataset} is empty: pass a text with at least one line.")
        parts.assemble(write_output, keep_sentences=not parsed.forget_sentences)
    return output


if __name__ == "__main__":
    run(main)
