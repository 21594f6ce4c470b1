"""Converts an original ELMo checkpoint (bilm-tf, AllenNLP) to a folder for `from_pretrained`, or such a folder back.

    elmo convert --weights W.hdf5 --options O.json --output_dir DIR
    elmo convert --weights model.zip --output_dir DIR
    elmo convert --to_original DIR --weights W.hdf5 --options O.json
    elmo convert --list german

Inputs are paths, folders or .zip archives that hold the files, or hf://user/repo[@revision]/path. The card of the new
folder names the origin, and how many arrays equal the original arrays after conversion back.
"""

import hashlib
import shutil
import tempfile
from argparse import SUPPRESS, Action
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from modeling_elmo.conversion_catalogue import format_catalogue, published_checkpoints
from modeling_elmo.conversion_elmo import convert_original_checkpoint, export_original_checkpoint
from modeling_elmo.conversion_files import find_checkpoint, read_arrays
from modeling_elmo.run_scripts.cards.bilm_card import write_bilm_card
from modeling_elmo.run_scripts.cards.card import CardArguments, without_folders, write_card_facts, write_result
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run


@dataclass(kw_only=True)
class ConversionArguments(CardArguments):
    weights: str = field(metadata={"help": "HDF5 weights, or a folder or archive with all of the files."})
    options: str | None = field(
        default=None, metadata={"help": "File options.json; not needed for a folder or archive."}
    )
    output_dir: str | None = field(default=None, metadata={"help": "New or empty folder for the converted model."})
    vocabulary: str | None = field(
        default=None,
        metadata={"help": "Words of the training, one per line; needed for word-level models and with --softmax."},
    )
    softmax: str | None = field(
        default=None, metadata={"help": "HDF5 file with softmax/W and softmax/b, to convert the language model."}
    )
    pre_tokenization: Literal["moses", "treebank", "whitespace"] = field(
        default="moses",
        metadata={"help": "Splitting of raw text by the tokenizer. The released models were trained with moses."},
    )
    origin: str | None = field(default=None, metadata={"help": "Origin for the card: a link or a name."})
    to_original: str | None = field(
        default=None,
        metadata={"help": "Folder to convert back; --weights, --options, --vocabulary, --softmax are the new files."},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.to_original and (not self.options or self.output_dir):
            raise ValueError("--to_original writes the files --weights and --options: pass both, and no --output_dir.")
        if not self.to_original and not self.output_dir:
            raise ValueError("There is no folder to write; pass --output_dir.")


class ListAction(Action):
    """Prints the published checkpoints and ends the program, as `--help` does."""

    def __call__(self, parser, namespace, values, option_string=None):
        print(format_catalogue(published_checkpoints(" ".join(values)), shutil.get_terminal_size().columns))
        parser.exit()


def main(arguments: list[str] | None = None):
    parser = ProgramParser(ConversionArguments, description=__doc__)
    about = "Print the published checkpoints, or those with all of the words, and end."
    parser.add_argument("--list", nargs="*", action=ListAction, dest=SUPPRESS, metavar="WORD", help=about)
    parsed = parser.parse(arguments)
    if parsed.to_original:
        export_original_checkpoint(
            parsed.to_original, parsed.weights, parsed.options, parsed.vocabulary, parsed.softmax
        )
        print(f"Wrote {parsed.weights} and {parsed.options}.")
        return
    folder = Path(parsed.output_dir)
    convert_original_checkpoint(
        parsed.weights, parsed.options, folder, parsed.vocabulary, parsed.softmax, parsed.pre_tokenization
    )
    write_result(folder, "conversion", conversion_record(folder, parsed))
    write_card_facts(folder, parsed)
    write_bilm_card(folder, folder.resolve().name)
    print(f"Wrote {folder}; load it with AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True).")


def conversion_record(folder: Path, arguments: ConversionArguments) -> dict[str, Any]:
    """The origin, the files, and the number of arrays that a conversion back gives bit for bit."""
    with tempfile.TemporaryDirectory() as scratch:
        found = find_checkpoint(
            arguments.weights, arguments.options, arguments.vocabulary, arguments.softmax, Path(scratch)
        )
        weights, softmax = found[0], found[3]
        new_weights, new_softmax = Path(scratch, "back.hdf5"), Path(scratch, "back_softmax.hdf5") if softmax else None
        export_original_checkpoint(folder, new_weights, Path(scratch, "back.json"), softmax=new_softmax)
        originals = read_arrays(weights) | (read_arrays(softmax) if softmax else {})
        again = read_arrays(new_weights) | (read_arrays(new_softmax) if new_softmax else {})
        files = [path for path in found if path is not None]
        return {
            "origin": without_folders(arguments.origin or arguments.weights),
            "files": [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)} for path in files],
            "arrays": len(originals),
            "equal_arrays": sum(name in again and torch.equal(originals[name], again[name]) for name in originals),
        }


def sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


if __name__ == "__main__":
    run(main)
