"""Puts a checkpoint on the Hub. Without `--push` it is a dry run, which does everything but send.

    python -m modeling_elmo.run_scripts.push_to_hub --model elmo-small --repo_id someone/elmo-small

The folder is assembled anew: weights (with `--dtype`, in half precision), code, tokenizer, card, results. A process
that knows nothing of this package loads it and runs the card's example, and its vectors are compared with those here.
"""

import shutil
import tempfile
from pathlib import Path

from transformers.utils import logging

from modeling_elmo.run_scripts.cards.publishing import (
    PushArguments,
    assemble,
    published_files,
    push,
    refuse_tokens,
    verify,
)
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run


def main(arguments: list[str] | None = None) -> Path | None:
    """Returns `output_dir`, if there is one."""
    parsed = ProgramParser(PushArguments, description=__doc__).parse(arguments)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = assemble(parsed, Path(scratch) / parsed.repo_id)
        print(verify(folder, parsed))
        paths = published_files(folder)
        refuse_tokens(folder, paths)
        print("\n".join(f"{(folder / path).stat().st_size:>12,}  {path}" for path in paths))
        print(f"{sum((folder / path).stat().st_size for path in paths):>12,}  bytes in {len(paths)} files")
        if parsed.output_dir:
            shutil.copytree(folder, parsed.output_dir)
        if parsed.push:
            push(folder, parsed.repo_id, "Checkpoint, tokenizer, code and card", parsed.private, parsed.token)
        else:
            print(f"Nothing was sent. With --push it goes to {parsed.repo_id}.")
    return Path(parsed.output_dir) if parsed.output_dir else None


if __name__ == "__main__":
    run(main)
