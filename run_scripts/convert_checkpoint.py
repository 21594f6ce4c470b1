"""Converts an original ELMo checkpoint to a folder for `from_pretrained`, or such a folder back.

python run_scripts/convert_checkpoint.py --weights W.hdf5 --options O.json --output_dir DIR
python run_scripts/convert_checkpoint.py --weights model.zip --output_dir DIR
python run_scripts/convert_checkpoint.py --to_original DIR --weights W.hdf5 --options O.json
"""

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # run by path from a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modeling_elmo.conversion_elmo import convert_original_checkpoint, export_original_checkpoint  # noqa: E402


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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
    parser.add_argument(
        "--to_original",
        metavar="MODEL",
        help="convert this folder back: --weights, --options, --vocabulary and --softmax are the new files to write",
    )
    return parser


def main(arguments: list[str] | None = None):
    parser = build_parser()
    args = parser.parse_args(arguments)
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
    print(
        f"Wrote {args.output_dir}; load it with AutoModel.from_pretrained({args.output_dir!r}, trust_remote_code=True)."
    )


if __name__ == "__main__":
    main()
