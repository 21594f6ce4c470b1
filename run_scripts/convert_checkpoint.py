"""Converts a published ELMo checkpoint to a folder for `from_pretrained`, or such a folder back.

    elmo convert --weights W.hdf5 --options O.json --output_dir DIR
    elmo convert --weights FOLDER_OR_ARCHIVE --output_dir DIR
    elmo convert --to_original DIR --weights W.hdf5 --options O.json
    elmo convert --to_original DIR --weights NEW_FOLDER        (ELMoForManyLangs)
    elmo convert --list german

Inputs are paths, folders or archives (.zip, .tar.gz) that hold the files, or hf://user/repo[@revision]/path. The files
of a folder or archive show its format. A task model of AllenNLP (model.tar.gz) gives its biLM and its learned mixes.
The card of the new folder names the origin, and how many arrays equal the original arrays after conversion back.
"""

import hashlib
import tempfile
from argparse import SUPPRESS, Action
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch

from modeling_elmo import ELMoForPreTraining, ELMoModel
from modeling_elmo.conversion.archive import AllenNLPArchive
from modeling_elmo.conversion.catalog import format_catalog, published_checkpoints
from modeling_elmo.conversion.files import check_empty, fetch, files_in, first_of, is_torch_file, staged
from modeling_elmo.conversion.formats import Checkpoint
from modeling_elmo.conversion.manylangs import ManyLangsCheckpoint, export_manylangs_checkpoint
from modeling_elmo.conversion.original import OriginalCheckpoint, export_original_checkpoint
from modeling_elmo.conversion.tensorflow import TensorFlowCheckpoint
from modeling_elmo.run_scripts.cards.bilm_card import write_bilm_card
from modeling_elmo.run_scripts.cards.card import CardArguments, without_folders, write_card_facts, write_result
from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, print_conclusion, refuse_unread, run
from modeling_elmo.run_scripts.program.models import check_model, load_pretrained

# The first that matches. Archives of NLPL have two, of which only the TensorFlow checkpoint has the softmax.
FORMATS = (ManyLangsCheckpoint, TensorFlowCheckpoint, AllenNLPArchive, OriginalCheckpoint)
OPTIONS_OF_FORMATS = ("options", "vocabulary", "softmax", "step", "optimizer_state", "architecture", "bilm")
# What only a new folder for `from_pretrained` has: its tokenizer and its card.
OPTIONS_OF_FOLDERS = ("pre_tokenization", "origin", *(item.name for item in fields(CardArguments)))


@dataclass(kw_only=True)
class ConversionArguments(CardArguments):
    weights: str = option(..., "HDF5 weights, weights.th of AllenNLP, or a folder or archive of a format.")
    options: str | None = option(None, "File options.json; not needed for a folder or archive.")
    output_dir: str | None = option(None, "New or empty folder for the converted model.")
    vocabulary: str | None = option(
        None, "Vocabulary of the training, one word per line; needed for word-level models and with --softmax."
    )
    softmax: str | None = option(None, "HDF5 file with softmax/W and softmax/b, to convert the language model.")
    step: int | None = option(
        None, "Step of a TensorFlow checkpoint. Default: the newest, which the file `checkpoint` names."
    )
    optimizer_state: bool = option(
        False,
        "Also convert the Adagrad accumulators of a TensorFlow checkpoint: `elmo pretrain "
        "--model_name_or_path DIR --optim adagrad` then continues with them.",
    )
    architecture: str | None = option(None, "Architecture file of ELMoForManyLangs, if the folder lacks it.")
    bilm: str | None = option(None, "Name of the biLM in a task model of AllenNLP that has several.")
    pre_tokenization: Literal["moses", "treebank", "whitespace"] | None = option(
        None,
        "Rules by which the tokenizer splits raw text. Default: moses, with which the released models were "
        "trained; whitespace for ELMoForManyLangs.",
    )
    origin: str | None = option(None, "Origin for the card: a link or a name.")
    to_original: str | None = option(
        None, "Folder to convert back, to the new files --weights, --options, --vocabulary and --softmax."
    )

    def __post_init__(self):
        super().__post_init__()
        if bool(self.to_original) == bool(self.output_dir):
            raise ValueError("Pass --output_dir, a new folder, or --to_original with new --weights, --options.")


class ListAction(Action):
    """Prints the published checkpoints and ends the program, as `--help` does."""

    def __call__(self, parser, namespace, values, option_string=None):
        print(format_catalog(published_checkpoints(" ".join(values))))
        parser.exit()


def main(arguments: list[str] | None = None):
    parser = ProgramParser(ConversionArguments, description=__doc__)
    about = "Print the published checkpoints, or those with all of the words, and end."
    parser.add_argument("--list", nargs="*", action=ListAction, dest=SUPPRESS, metavar="WORD", help=about)
    parsed = parser.parse(arguments)
    if parsed.to_original:
        convert_back(parsed)
        return
    output_dir = Path(parsed.output_dir)
    check_empty(output_dir)
    with tempfile.TemporaryDirectory() as scratch, staged(output_dir) as folder:
        place = fetch(parsed.weights, Path(scratch))
        source = format_of(place, parsed)
        print(f"{parsed.weights}: {source.name}")
        others = [name for name in OPTIONS_OF_FORMATS if name not in source.option_names]
        refuse_unread(parsed, others, f"because {parsed.weights} is {source.name}; leave it out.")
        options = {name: getattr(parsed, name) for name in source.option_names}
        found = source.find(Path(scratch), place, **options)
        found.convert(folder, parsed.pre_tokenization)
        originals, again = found.arrays(), found.arrays_of_export(folder, Path(scratch))
        record = {
            "origin": without_folders(parsed.origin or parsed.weights),
            "files": list(map(file_record, found.paths)),
            "arrays": len(originals),
            "equal_arrays": sum(name in again and torch.equal(originals[name], again[name]) for name in originals),
        }
        if notes := found.report(output_dir.resolve().name):
            record["notes"] = notes
        write_result(folder, "conversion", record)
        write_card_facts(folder, parsed)
        write_bilm_card(folder, output_dir.resolve().name)
        print(*found.report(output_dir), sep="\n")
    print(f"Wrote {output_dir}; load it with AutoModel.from_pretrained({str(output_dir)!r}, trust_remote_code=True).")
    print_conclusion(
        f"Converted back, {record['equal_arrays']} of {record['arrays']} arrays equal the original arrays bit for bit.",
        *("elmo", "embed", "--model", output_dir, "--input", "TEXT", "--output", "vectors.hdf5"),
    )


def convert_back(arguments: ConversionArguments):
    folder = str(arguments.to_original)
    check_model(folder)
    model = load_pretrained(ELMoForPreTraining if arguments.softmax else ELMoModel, folder)
    of_manylangs = model.config.always_project  # as only models of ELMoForManyLangs do
    known = () if of_manylangs else OriginalCheckpoint.option_names
    others = {*OPTIONS_OF_FORMATS, *OPTIONS_OF_FOLDERS}.difference(known)
    given = [name for name in sorted(others) if getattr(arguments, name) != []]
    refuse_unread(arguments, given, "with --to_original and this model; leave it out.")
    if of_manylangs:
        export_manylangs_checkpoint(folder, arguments.weights)
    elif arguments.options is None:
        raise ValueError("--to_original writes the files --weights and --options: pass both.")
    else:
        files = (arguments.weights, arguments.options, arguments.vocabulary, arguments.softmax)
        export_original_checkpoint(folder, *files)
    print(f"Wrote {arguments.weights}.")


def format_of(place: Path, arguments: ConversionArguments) -> type[Checkpoint]:
    """The format of `--weights`. A file without the name of another format, or with a separate softmax, is HDF5.

    But what `torch.save` wrote under any name is a task model.
    """
    paths = files_in(place) if place.is_dir() else [place]
    fitting = []
    for candidate in FORMATS:
        if any(fnmatchcase(path.name, pattern) for path in paths for pattern in candidate.patterns):
            fitting.append(candidate)
    if arguments.softmax and OriginalCheckpoint in fitting:
        return OriginalCheckpoint
    if fitting:
        return fitting[0]
    if not place.is_dir():
        return AllenNLPArchive if is_torch_file(place) else OriginalCheckpoint
    known = "; ".join(f"{' or '.join(item.patterns)} ({item.name})" for item in FORMATS)
    names = first_of(path.name for path in paths) or "no files"
    raise FileNotFoundError(
        f"{arguments.weights} has no checkpoint of a known format: {known}. It has {names}; pass another folder."
    )


def file_record(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


if __name__ == "__main__":
    run(main)
