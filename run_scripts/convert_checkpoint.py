"""Converts an original ELMo checkpoint to a folder for `from_pretrained`, or such a folder back.

python run_scripts/convert_checkpoint.py --weights W.hdf5 --options O.json --output_dir DIR
python run_scripts/convert_checkpoint.py --weights model.zip --output_dir DIR
python run_scripts/convert_checkpoint.py --to_original DIR --weights W.hdf5 --options O.json

The folder's card tells where it is from, and how many arrays are the original's when it is converted back.
"""

import hashlib
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser

from modeling_elmo.conversion_elmo import (
    convert_original_checkpoint,
    export_original_checkpoint,
)
from modeling_elmo.conversion_files import find_checkpoint, read_arrays
from modeling_elmo.run_scripts.cards.bilm_card import bilm_part
from modeling_elmo.run_scripts.cards.card import (
    CardArguments,
    public,
    write_card,
    write_facts,
    write_results,
)
from modeling_elmo.run_scripts.program.command_line import run


def build_parser() -> HfArgumentParser:
    parser = HfArgumentParser(
        CardArguments,
        description="Converts an original ELMo checkpoint (bilm-tf, AllenNLP) to a Hugging Face folder, or back.",
        epilog="Files may be paths, folders or .zip archives that hold them, or hf://user/repo[@revision]/path.",
    )
    parser.add_argument("--weights", required=True, help="HDF5 weights, or a folder or archive with all of the files")
    parser.add_argument("--options", help="options.json (not needed for a folder or archive)")
    parser.add_argument("--output_dir", help="new or empty folder to write")
    parser.add_argument(
        "--vocabulary", help="the words of the training, one a line; word-level models and --softmax need it"
    )
    parser.add_argument("--softmax", help="HDF5 file with softmax/W and softmax/b; the result is then a language model")
    parser.add_argument(
        "--pre_tokenization",
        choices=("moses", "treebank", "whitespace"),
        default="moses",
        help="how the tokenizer splits raw text (default: moses, as in the training of the released models)",
    )
    parser.add_argument("--origin", help="for the card: where it is from, a link or a name (default: --weights)")
    parser.add_argument(
        "--to_original",
        metavar="MODEL",
        help="convert this folder back: --weights, --options, --vocabulary and --softmax are the new files to write",
    )
    return parser


def main(arguments: list[str] | None = None):
    parser = build_parser()
    card, args = parser.parse_args_into_dataclasses(arguments)
    if args.to_original:
        if not args.options or args.output_dir:
            parser.error("--to_original MODEL writes --weights and --options; pass both, and no --output_dir")
        export_original_checkpoint(args.to_original, args.weights, args.options, args.vocabulary, args.softmax)
        print(f"Wrote {args.weights} and {args.options}.")
        return
    if not args.output_dir:
        parser.error("pass --output_dir, the folder to write")
    convert_original_checkpoint(
        args.weights, args.options, args.output_dir, args.vocabulary, args.softmax, args.pre_tokenization
    )
    folder = Path(args.output_dir)
    write_results(folder, "conversion", record_of(args))
    write_facts(folder, card)
    name = folder.resolve().name
    write_card(folder, name, bilm_part(folder, name))
    print(
        f"Wrote {args.output_dir}; load it with AutoModel.from_pretrained({args.output_dir!r}, trust_remote_code=True)."
    )


def record_of(args: Namespace) -> dict[str, Any]:
    """Origin, files, and the arrays that are the same bits after a conversion back."""
    with tempfile.TemporaryDirectory() as scratch:
        found = find_checkpoint(args.weights, args.options, args.vocabulary, args.softmax, Path(scratch))
        weights, softmax = found[0], found[3]
        back = Path(scratch) / "back.hdf5", Path(scratch) / "back_softmax.hdf5"
        export_original_checkpoint(
            args.output_dir, back[0], Path(scratch) / "back.json", softmax=back[1] if softmax else None
        )
        originals = read_arrays(weights) | (read_arrays(softmax) if softmax else {})
        again = read_arrays(back[0]) | (read_arrays(back[1]) if softmax else {})
        files = [path for path in found if path is not None]
        return {
            "origin": public(args.origin or args.weights),
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
