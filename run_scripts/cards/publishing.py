"""Assembles the folder of a checkpoint for the Hub, checks it in a clean process, and uploads it."""

import glob
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import HfApi, metadata_load
from safetensors.torch import load_file
from yaml import YAMLError

import modeling_elmo
from modeling_elmo import ELMoConfig, ELMoPreTrainedModel, ELMoTokenizer
from modeling_elmo.configuration_elmo import SENTENCE_TRANSFORMERS_FILES

from ..program.command_line import option
from ..program.files import read_json
from ..program.models import MODEL_FILES, check_model, load_pretrained
from .bilm_card import write_bilm_card
from .card import EXAMPLES, CardArguments, check_repository, read_result, write_card_facts
from .head_card import PIPELINE_TAGS, write_head_card

# The only files that are uploaded. A training run also leaves optimizers, local paths and texts of the data.
FILES_TO_UPLOAD = (
    *MODEL_FILES,
    *SENTENCE_TRANSFORMERS_FILES,
    *("original_checkpoint.json", "original_manylangs.json", "allennlp_archive.json", "scalar_mix_*.safetensors"),
    *("record.json", "*.png", "LICENSE*"),
    *("results/*.json", "results/*.md", "results/*.png"),
)
SAVED_FILES = ("*.py", "model*.safetensors", "*.safetensors.index.json")  # written by `save_pretrained`, not copied
FLAG = {"nargs": "?", "const": True}  # argparse options of a flag that is true, false or not given
TEXTS = ["He is in (London), Paris.", "밥 먹었어?", "x"]  # read by both models that are compared
TOLERANCES = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.5}  # of the root mean square; other models exceed 1
NAME_IN_EXAMPLE = re.compile(r"^name = ['\"](.+)['\"]  # path of this folder.*$", re.MULTILINE)


def outputs_of(model, tokenizer, texts: list[str]) -> dict[str, torch.Tensor]:
    """The layers, logits and losses of a model of any of our classes. The clean process also runs this source."""
    kind = type(model).__name__
    is_pair = kind == "ELMoForQuestionAnswering" or "Sequence" in kind and model.config.classifier == "esim"
    others = texts[::-1] if is_pair else None
    inputs = tokenizer(texts, others, padding=True, return_tensors="pt")
    if kind == "ELMoForPreTraining":
        inputs["labels"] = inputs["input_ids"]
    with torch.no_grad():
        output = model.eval()(**inputs, output_hidden_states=True)
    outputs = {name: output[name] for name in output if name.endswith(("logits", "_loss"))}
    for number, layer in enumerate(output.get("hidden_states") or ()):
        outputs[f"layer {number}"] = layer
    return {name: tensor.float().contiguous() for name, tensor in outputs.items()}


CLEAN_PROCESS = """
import json, pathlib, re, sys
sys.modules["modeling_elmo"] = None  # as if it were not installed
import torch, transformers
from safetensors.torch import save_file

%s
name, texts = sys.argv[1], json.loads(sys.argv[2])
config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=True)
auto = next(auto for auto, place in config.auto_map.items() if place.endswith("." + config.architectures[0]))
model = getattr(transformers, auto).from_pretrained(name, trust_remote_code=True, dtype=torch.float32)
save_file(outputs_of(model, tokenizer, texts), "outputs.safetensors")
for code in re.findall("```python\\n(.*?)```", pathlib.Path(name, "README.md").read_text(encoding="utf-8"), re.DOTALL):
    exec(code, {})
"""


@dataclass(kw_only=True)
class PushArguments(CardArguments):
    model: str = option(..., "Folder of the checkpoint, as a training or a conversion left it.")
    repo_id: str = option(..., "Repository on the Hub: user/name, or the name of one of your own.")
    push: bool = option(False, "Upload the folder. Without it: a dry run.")
    new_card: bool = option(False, "Write a new card. Options of the card imply it.")
    private: bool | None = option(None, "Visibility of a new repository. Default: the setting of your account.", **FLAG)
    token: str | None = option(None, "Token. Default: the token of `hf auth login`, or $HF_TOKEN.")
    dtype: Literal["float32", "float16", "bfloat16"] = option("float32", "Precision of the stored weights.")
    output_dir: str | None = option(None, "New folder that keeps the assembled files.")

    def __post_init__(self):
        super().__post_init__()
        check_repository(self.repo_id, "--repo_id")
        if not Path(self.model, "config.json").is_file():
            raise FileNotFoundError(f"--model {self.model}: there is no config.json; pass the folder of a checkpoint.")
        check_model(self.model)
        if self.output_dir and Path(self.output_dir).exists():
            raise FileExistsError(f"--output_dir {self.output_dir} exists already; pass a new folder.")


def assemble(arguments: PushArguments, folder: Path) -> Path:
    """Fills `folder` with the checkpoint and its results, and nothing else."""
    source = Path(arguments.model)
    paths = files_to_upload(source)
    copied = [path for path in paths if not any(map(Path(path).match, SAVED_FILES))]
    refuse_outside_links(source, copied)
    for path in copied:
        if path.endswith(".json"):
            read_json(source / path)  # a damaged file is named where the user has it
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, folder / path)
    model, tokenizer = load_published(arguments.model)
    if model._is_int8() and arguments.dtype != "float32":
        raise ValueError(f"--dtype {arguments.dtype}: {arguments.model} is quantized; leave the option out.")
    stored = getattr(torch, arguments.dtype)
    # The configuration keeps float32, the precision in memory: half precision is for disks, not for CPUs.
    weights = model.state_dict()
    for name, value in weights.items():
        if value.is_floating_point():
            weights[name] = value.to(stored)
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    write = write_head_card if type(model).__name__ in PIPELINE_TAGS else write_bilm_card
    if write_card_facts(folder, arguments) or arguments.new_card or not (folder / "README.md").exists():
        write(folder, arguments.repo_id)
    else:
        renew_card(folder, write, arguments)
    return folder


def renew_card(folder: Path, write: Callable[[Path, str], Path], arguments: PushArguments):
    """Writes the card again for the name of the repository. A card that is not what `write` makes stays."""
    card = folder / "README.md"
    name = arguments.repo_id
    text = card.read_text(encoding="utf-8", errors="replace")
    match = NAME_IN_EXAMPLE.search(text)
    if match is None:
        return
    write(folder, match[1])
    if card.read_text(encoding="utf-8") == text:
        write(folder, name)
        return
    original = Path(arguments.model, "README.md")
    shutil.copyfile(original, card)
    if match[1] != name:
        changed = f"{name!r} in place of {match[1]!r}"
        raise ValueError(f"{original} is not what its records give. Write {changed} there, or pass --new_card.")


def load_published(source: str) -> tuple[ELMoPreTrainedModel, ELMoTokenizer]:
    """The tokenizer and the model, in the class that it was saved as."""
    config = load_pretrained(ELMoConfig, source)
    architecture = (config.architectures or ["ELMoModel"])[0]
    if not hasattr(modeling_elmo, architecture):
        raise ValueError(f"{source} has the architecture {architecture}, which is not a class of this package.")
    model = load_pretrained(getattr(modeling_elmo, architecture), source, dtype=torch.float32)
    return model, load_pretrained(ELMoTokenizer, source)


def files_to_upload(folder: Path) -> list[str]:
    """The files of a checkpoint and its results, without the traces of its training."""
    names = set()
    for pattern in FILES_TO_UPLOAD:
        for path in folder.glob(pattern):
            if path.is_file() and not path.name.startswith("."):
                names.add(path.relative_to(folder).as_posix())
    return sorted(names)


def verify(folder: Path, arguments: PushArguments) -> str:
    """Loads `folder` in a clean process, runs the example of its card, and compares the outputs with those here."""
    root = folder.parents[arguments.repo_id.count("/")]
    code = CLEAN_PROCESS % inspect.getsource(outputs_of)
    with tempfile.TemporaryDirectory() as home:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
        finished = subprocess.run(
            [sys.executable, "-c", code, arguments.repo_id, json.dumps(TEXTS)],  # in ASCII, for any locale
            cwd=root,
            env={**environment, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
    if finished.returncode:
        raise OSError(f"{folder.name} does not load, or its card's example fails:\n{finished.stderr.strip()}")
    there = load_file(root / "outputs.safetensors")
    here = outputs_of(*load_published(arguments.model), TEXTS)
    difference, name = max((largest_difference(here[name], there[name]), name) for name in here)
    size = f"{difference:.1e} of the root mean square ({name})"
    comparison = f"its outputs differ from the outputs of {arguments.model} by at most {size}"
    if difference > TOLERANCES[arguments.dtype]:
        raise OSError(f"{folder.name} gives other outputs when it is loaded without this package: {comparison}.")
    return f"A process without this package loads it and runs the card's example; {comparison}."


def largest_difference(here: torch.Tensor, there: torch.Tensor) -> float:
    """In units of the root mean square, without scores that mean "never" on both sides; infinite for NaN."""
    is_never = (here <= -1e3) & (there <= -1e3)
    scale = here[here > -1e3].square().mean().sqrt().clamp(min=1e-6)
    differences = (here - there)[~is_never].abs() / scale
    return max(differences.nan_to_num(nan=torch.inf).tolist(), default=0.0)


def missing_facts(folder: Path) -> list[str]:
    """Warnings about the card: a field that the Hub shows and searches by is missing, or the example is foreign."""
    try:
        stated = metadata_load(folder / "README.md") or {}
    except (YAMLError, ValueError) as error:
        reason = f"The front matter of README.md is not a YAML object in UTF-8: {error}"
        raise ValueError(f"{reason}. Correct it.") from error
    warnings = []
    for field, value in (("license", "cc-by-sa-4.0"), ("language", "en")):
        if not stated.get(field):
            warnings.append(
                f"Warning: the card has no {field}. Pass it for a new card, as in `--{field} {value}`, or add a line "
                f"such as `{field}: {value}` to the front matter of README.md."
            )
    facts = read_result(folder, "card")
    if facts.get("language", ["en"])[0] not in EXAMPLES and not facts.get("example"):
        warnings.append("Warning: the card's example is English. Pass --example with a text in the model's language.")
    return warnings


def refuse_outside_links(folder: Path, paths: list[str]):
    """Raises an error if a file is a link, or below a link, that leaves the folder."""
    for path in paths:
        target = (folder / path).resolve()
        if not target.is_relative_to(folder.resolve()):
            raise ValueError(f"{folder / path} is a link to {target}, outside the folder; copy the file or remove it.")


def push(folder: Path, repo_id: str, message: str, private: bool | None = None, token: str | None = None):
    """Uploads the checkpoint's files as one commit, so that all of it becomes visible or nothing."""
    paths = files_to_upload(folder)
    refuse_outside_links(folder, paths)
    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        patterns = list(map(glob.escape, paths))  # the Hub's client reads them as patterns
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message=message, allow_patterns=patterns)
    except Exception as error:  # the class of a broken connection depends on the library behind the client
        advice = "The repository is unchanged. Upload the folder again with `elmo push`."
        raise OSError(f"The upload to {repo_id} failed: {error}\n{advice}") from error
    print(f"Uploaded to {repo}")
