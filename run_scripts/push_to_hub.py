"""Checks a checkpoint and uploads it to the Hub. Without `--push` it is a dry run: everything except the upload.

    elmo push --model elmo-small --repo_id someone/elmo-small

It assembles a new folder: weights (in half precision with `--dtype float16`), code, tokenizer, card, results. A process
without this package loads the folder and runs the example of the card, and its outputs are compared with those here.
"""

import shutil
import tempfile
from pathlib import Path

from transformers.utils import logging

from modeling_elmo.conversion.files import staged
from modeling_elmo.run_scripts.cards.publishing import (
    PushArguments,
    assemble,
    files_to_upload,
    missing_facts,
    push,
    verify,
)
from modeling_elmo.run_scripts.program.command_line import ProgramParser, given_options, print_conclusion, run


def main(arguments: list[str] | None = None) -> Path | None:
    """Returns `output_dir`, if it was given."""
    parsed = ProgramParser(PushArguments, description=__doc__).parse(arguments)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = assemble(parsed, Path(scratch) / parsed.repo_id)
        warnings = missing_facts(folder)
        print(verify(folder, parsed))
        paths = files_to_upload(folder)
        sizes = [(folder / path).stat().st_size for path in paths]
        print(*(f"{size:>12,}  {path}" for size, path in zip(sizes, paths, strict=True)), sep="\n")
        print(f"{sum(sizes):>12,}  bytes in {len(paths)} files", *warnings, sep="\n")
        if parsed.output_dir:
            with staged(Path(parsed.output_dir)) as copy:
                shutil.copytree(folder, copy, copy_function=shutil.copyfile)  # safetensors lets only the owner read
        if parsed.push:
            push(folder, parsed.repo_id, "Checkpoint, tokenizer, code and card", parsed.private, parsed.token)
            load = f"AutoModel.from_pretrained({parsed.repo_id!r}, trust_remote_code=True)"
            print_conclusion(
                f"{parsed.repo_id} has {len(paths)} files, and loads without this package.",
                *("python", "-c", f"from transformers import AutoModel; print({load})"),
            )
        else:
            given = given_options(parsed, but=["output_dir", "token"])
            print_conclusion("Dry run: nothing was uploaded.", "elmo", "push", *given, "--push")
    return Path(parsed.output_dir) if parsed.output_dir else None


if __name__ == "__main__":
    run(main)
