"""Writes the vectors of every sentence of a corpus, with any ELMo model.

    elmo embed --model DIR --input corpus.txt --output vectors.hdf5 --layers all

The input has one sentence per line. Line `i`, counted from 0, becomes entry `i` of the output, without the markers <S>
and </S>. A blank line is a sentence without words. The lines of a second file follow the lines of the first.

Text whose lines end anywhere needs `--split_sentences`: the lines of a paragraph are joined, and each of its sentences
becomes an entry. With it, and for several files, the output names file and line of each entry.

A FASTA file has one record per entry, under its name, and one token per residue:

    elmo embed --model DIR --input proteins.fasta.gz --output residues.hdf5 --layers sum

Shape of an entry:
    `(tokens, dim)`, or `(layers, tokens, dim)` with `--layers all`; a blank line has 0 tokens.
    With `--pooling`: `(dim,)`, or `(layers, dim)` with `--layers all`; a blank line is zeros.

The model is stateless: a sentence has the same vectors wherever it stands. `--stateful` gives the vectors of AllenNLP's
`ElmoEmbedder` of 2018, which carried states from each row of a batch to the same row of the next. With `--batch_size
1`, they equal the vectors of bilm-tf's `dump_bilm_embeddings`.

An interrupted run loses at most one block of lines, and a killed one also the block that it was writing: run the same
command again. Memory grows with the corpus by four bytes per line, and for `sentence_to_index` (see
`--forget_sentences`).

Several processes share the work, with one device each or on the CPU, and write the same file as one process. On several
machines, all paths must be on a file system that the machines share:

    torchrun --nproc_per_node 8 -m modeling_elmo.run_scripts.embed --model DIR --input corpus.txt --output vectors.hdf5
"""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.utils import logging

from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, print_conclusion, refuse_unread, run
from modeling_elmo.run_scripts.program.files import digest
from modeling_elmo.run_scripts.program.models import model_digest
from modeling_elmo.run_scripts.program.processes import join_processes, sole_run, values_of_all
from modeling_elmo.run_scripts.program.sentences import warn_of_split_words
from modeling_elmo.run_scripts.program.texts import TextArguments
from modeling_elmo.run_scripts.vectors.embedding import (
    BATCHES_PER_BLOCK,
    ComputedBlock,
    EncodedBlock,
    LayerChoice,
    PoolingChoice,
    StoredDtype,
    compute_block,
    encode_block,
    finish_block,
    load_model_and_tokenizer,
    reproducible_batch_tokens,
)
from modeling_elmo.run_scripts.vectors.lines import InputLine, LineUnit, hdf5_name, open_lines
from modeling_elmo.run_scripts.vectors.outputs import (
    EntryShape,
    LinePlan,
    OutputWriter,
    UnfinishedOutput,
    find_writer,
)
from modeling_elmo.run_scripts.vectors.pace import Pace, check_room, in_words

logger = logging.get_logger(__name__)
NumberedBlock = tuple[int, int, EncodedBlock]  # with its number and that of its first line


@dataclass(kw_only=True)
class EmbedArguments(TextArguments):
    model: str = option(..., "Folder or Hub name of any ELMo model.")
    output: str = option(..., "New file: .hdf5, .h5 or .parquet.")
    input: list[str] = option(
        [],
        "Files, patterns or folders: .txt, .jsonl, .csv, .tsv, .conll, .conllu; .fasta, .fa, .faa: FASTA. Also .gz or "
        ".zst.",
    )
    raw_text: bool = option(False, "Split sentences with the model's tokenizer. Default: at spaces only.")
    unit: LineUnit = option("word", "Token: a word, or each letter of a text. FASTA is always read by letters.")
    layers: LayerChoice = option("all", "All layers, the top layer, their average or sum, or the model's learned mix.")
    pooling: PoolingChoice = option("none", "One vector per sentence: the mean or the maximum over its words.")
    dtype: StoredDtype = option("float32", "Type of the vectors in the output file.")
    compute_dtype: Literal["float32", "bfloat16", "int8"] = option(
        "float32", "Precision of the computation; int8: on CPU only."
    )
    batch_tokens: int = option(4096, "Maximum tokens per batch, including markers and padding.")
    device: str | None = option(None, "Device. Default: cuda if available, else cpu.")
    stateful: bool = option(False, "Carry the states from batch to batch, as AllenNLP's ElmoEmbedder of 2018 did.")
    batch_size: int | None = option(None, "Sentences per batch with --stateful; vectors depend on it. Default: 64.")
    forget_sentences: bool = option(False, "Leave `sentence_to_index`, which holds the whole text, out of HDF5.")
    trust_remote_code: bool = option(False, "Run code from the model's folder.")

    def __post_init__(self):
        if self.raw_text and self.unit == "character":
            raise ValueError("--raw_text splits texts into words; it cannot be combined with --unit character.")
        if self.batch_size is not None and not self.stateful:
            raise ValueError(f"--batch_size {self.batch_size} needs --stateful; without it, pass --batch_tokens.")
        if self.stateful:
            refuse_unread(self, ["batch_tokens"], "with --stateful, whose batches have --batch_size sentences.")


def main(arguments: list[str] | None = None) -> Path:
    """Returns the path of the output."""
    parsed = ProgramParser(EmbedArguments, description=__doc__).parse(arguments)
    make_writer = find_writer(parsed.output)
    warn_of_split_words(parsed)
    keeps_columns = Path(parsed.output).suffix == ".parquet"
    lines = open_lines(parsed, parsed.input, parsed.raw_text, parsed.unit, keeps_columns)
    model, tokenizer = load_model_and_tokenizer(
        parsed.model, parsed.device, parsed.trust_remote_code, parsed.compute_dtype
    )
    warn_of_untrained_mix(parsed, model)
    writer = make_writer(entry_shape(parsed, model), not parsed.forget_sentences)
    output = unfinished_output(parsed, model, writer)
    if parsed.layers != "mixed":
        model.scalar_mix = None  # computing it would take one to two percent of the time
    processes, index = join_processes()
    if parsed.stateful and processes > 1:
        raise ValueError("--stateful reads the sentences in order: start one process.")
    is_main = index == 0
    with sole_run(output.folder, "--output", is_main):
        if is_main:
            output.find()
        output.follow(values_of_all(output, processes)[0])
        plan = output.plan(lines(), partial(count_tokens, tokenizer))
        if any(blocks != plan.blocks for blocks in values_of_all(plan.blocks, processes)):
            raise ValueError("The processes read different lines. Pass the same input to all.")
        if not plan.blocks:
            names = ", ".join(parsed.input) or parsed.dataset
            raise ValueError(f"{names} is empty: pass a text with at least one line.")
        if is_main:
            size = output.writer.size(plan)
            check_room(output.output, output.folder, size, output.num_bytes_written)
            print(f"{parsed.output}: {len(plan.tokens):,} lines, {plan.num_tokens:,} tokens, at most {in_words(size)}")
            output.begin(plan, lines())
        output.ends = values_of_all(output.ends, processes)[0]
        embed_lines(parsed, output, plan, lines(), model, tokenizer, processes, index)
        if is_main:
            output.complete()
        values_of_all(None, processes)  # the launcher may stop the others when one process ends
    if is_main:
        is_pooled = parsed.pooling != "none"
        print_conclusion(
            what_is_written(parsed, plan, writer.shape),
            "python",
            "-c",
            code_to_read(output.output, is_pooled, plan.first_name),
        )
    return output.output


def what_is_written(parsed: EmbedArguments, plan: LinePlan, shape: EntryShape) -> str:
    unit = "line" if shape.is_pooled else "token"
    vector = f"a vector of {shape.dim:,} numbers"
    if shape.layers is not None:
        vector = f"{shape.layers} layers of {shape.dim:,} numbers"
    return (
        f"{parsed.output} has {len(plan.tokens):,} lines with {plan.num_tokens:,} tokens, and for each {unit} {vector}."
    )


def code_to_read(output: Path, is_pooled: bool, first_name: str | None) -> str:
    """Python that prints the vectors of the first line."""
    path = json.dumps(output.as_posix(), ensure_ascii=False)
    if output.suffix == ".parquet":
        return f"import pandas; print(pandas.read_parquet({path}).iloc[0])"
    entry = '["sentence_vectors"][0]' if is_pooled else '["0"][:]'
    if first_name is not None:
        entry = f"[{json.dumps(hdf5_name(first_name), ensure_ascii=False)}][:]"
    return f"import h5py; print(h5py.File({path}){entry})"


def warn_of_untrained_mix(parsed: EmbedArguments, model: Any):
    mix = model.scalar_mix
    if parsed.layers == "mixed" and mix.mode == "learned" and not (mix.weights.any() or (mix.gamma != 1).any()):
        [saved_as] = model.config.architectures or [type(model).__name__]
        is_bilm = saved_as in ("ELMoModel", "ELMoForPreTraining")
        reason = "was never trained" if is_bilm else f"is a part of its {saved_as}, and not read here"
        logger.warning(f"The mix of {parsed.model} {reason}: the vectors are the average of the layers.")


def entry_shape(parsed: EmbedArguments, model: Any) -> EntryShape:
    layers = model.config.num_hidden_layers + 1 if parsed.layers == "all" else None
    return EntryShape(layers, 2 * model.config.projection_size, parsed.pooling != "none", parsed.dtype)


def unfinished_output(parsed: EmbedArguments, model: Any, writer: OutputWriter) -> UnfinishedOutput:
    """The file that this run writes, with the settings that a later run must repeat."""
    names = ("layers", "pooling", "dtype", "raw_text", "unit", "split_sentences")
    settings = {name: getattr(parsed, name) for name in names}
    settings["compute_dtype"] = str(model.dtype).removeprefix("torch.")
    if parsed.compute_dtype == "int8":
        settings["compute_dtype"] = "int8"
    settings["weights"] = digest(
        tensor.flatten().view(torch.uint8).cpu().numpy() for tensor in model.state_dict().values()
    )
    settings["model"] = model_digest(parsed.model)  # with its options, and its tokenizer
    settings["batch_size"] = (parsed.batch_size or 64) if parsed.stateful else None
    block_tokens = BATCHES_PER_BLOCK * parsed.batch_tokens
    return UnfinishedOutput(Path(parsed.output), writer, settings, block_tokens, block_lines=settings["batch_size"])


def count_tokens(tokenizer: Any, line: InputLine) -> int:
    return len(tokenizer.splitter.words(line.text) if line.words is None else line.words)


def embed_lines(
    parsed: EmbedArguments,
    output: UnfinishedOutput,
    plan: LinePlan,
    lines: Iterator[InputLine],
    model: Any,
    tokenizer: Any,
    processes: int,
    index: int,
):
    """Computes the share of this process, every n-th block on each of n processes, and writes it.

    Three blocks are in work: a thread encodes the next one, the model computes one, a thread writes the one before.
    """
    batch_tokens = None if parsed.stateful else parsed.batch_tokens
    if parsed.layers == "mixed" and batch_tokens is not None:
        batch_tokens = reproducible_batch_tokens(model, batch_tokens)
    states: tuple[Tensor, ...] | None = output.states if parsed.stateful else None

    def encoded() -> Iterator[NumberedBlock]:
        first = 0
        for number, block in enumerate(output.blocks(lines)):
            if number >= num_finished and number % processes == index:
                yield number, first, encode_block(block, tokenizer, batch_tokens)
            first += len(block)

    def write(number: int, first: int, computed: ComputedBlock):
        block = finish_block(computed, parsed.pooling, parsed.dtype)
        if [*map(len, block.tokens)] != plan.tokens[first : first + len(block.lines)].tolist():
            raise ValueError(f"Lines from {first + 1} on have changed since this run began. Run the command again.")
        output.append(number, first, block, processes)

    num_finished = len(output.ends)
    written: Future | None = None
    with (
        Pace(output.output.name, plan, output.writer.shape, num_finished, is_shown=index == 0) as pace,
        ThreadPoolExecutor(1) as encoder,
        ThreadPoolExecutor(1) as writer,
    ):
        for number, first, block in ahead(encoded(), encoder):
            computed = compute_block(block, model, parsed.layers, states)
            if parsed.stateful:
                states = computed.states
            if written is not None:
                pace.wait(written, computed)
                pace.show(len(output.ends))
            written = writer.submit(write, number, first, computed)
        if written is not None:
            pace.wait(written, computed)
        output.wait_for(len(plan.blocks), processes)
        pace.show(len(plan.blocks))


def ahead(blocks: Iterator[NumberedBlock], executor: ThreadPoolExecutor) -> Iterator[NumberedBlock]:
    """The same blocks. The executor makes the next one while the caller works with one."""
    coming = executor.submit(next, blocks, None)
    while (block := coming.result()) is not None:
        coming = executor.submit(next, blocks, None)
        yield block


if __name__ == "__main__":
    run(main)
