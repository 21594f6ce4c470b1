"""Puts a checkpoint on the Hub. Without `--push` it is a dry run, which does everything but send.

    python -m modeling_elmo.run_scripts.push_to_hub --model elmo-small --repo_id someone/elmo-small

The folder is assembled anew: weights (with `--dtype`, in half precision), code, tokenizer, card, results. A process
that knows nothing of this package loads it and runs the card's example, and its vectors are compared with those here.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file
from transformers import HfArgumentParser
from transformers.utils import logging

if __package__ in (None, ""):  # run by path from a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import modeling_elmo
from modeling_elmo import ELMoConfig, ELMoTokenizer
from modeling_elmo.run_scripts.lm_card import bilm_part
from modeling_elmo.run_scripts.model_card import CardArguments, write_card, write_facts
from modeling_elmo.run_scripts.task_card import task_part

# State of a training, and what it kept for itself: paths of the author's disk, texts of the data.
PRIVATE = ("training_args.bin", "settings.json", "training_state.pt", "predictions_*", "ensemble_*", ".*", "*.part")
TOKEN = re.compile(rb"hf_[A-Za-z0-9]{30,}")
TEXTS = ["He is in (London), Paris.", "밥 먹었어?", "x"]

STRANGER = """
import pathlib, re, sys
sys.modules["modeling_elmo"] = None  # as if it were not installed
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

name, texts = sys.argv[1], sys.argv[2:]
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model = AutoModel.from_pretrained(name, trust_remote_code=True, dtype=torch.float32)
with torch.no_grad():
    layers = model(**tokenizer(texts, padding=True, return_tensors="pt")).hidden_states
save_file({str(number): layer.contiguous() for number, layer in enumerate(layers)}, "layers.safetensors")
for code in re.findall("```python\\n(.*?)```", pathlib.Path(name, "README.md").read_text(encoding="utf-8"), re.DOTALL):
    exec(code, {})
"""


@dataclass(kw_only=True)
class PushArguments(CardArguments):
    model: str = field(metadata={"help": "Folder of the checkpoint, as a training or a conversion left it."})
    repo_id: str = field(metadata={"help": "Repository on the Hub: user/name."})
    push: bool = field(default=False, metadata={"help": "Send it. Otherwise: show what would be sent."})
    new_card: bool = field(default=False, metadata={"help": "Write the card anew, as also for options of the card."})
    private: bool = field(default=False, metadata={"help": "Whether a new repository is private."})
    token: str | None = field(default=None, metadata={"help": "Default: that of `hf auth login`, or $HF_TOKEN."})
    dtype: Literal["float32", "float16", "bfloat16"] = field(
        default="float32", metadata={"help": "Precision that weights are stored in; loaded, they are float32."}
    )
    output_dir: str | None = field(default=None, metadata={"help": "New folder to keep what was assembled in."})

    def __post_init__(self):
        super().__post_init__()
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.repo_id):
            raise ValueError(f"--repo_id {self.repo_id}: pass user/name.")
        if not Path(self.model, "config.json").is_file():
            raise FileNotFoundError(f"--model {self.model}: there is no config.json; pass the folder of a checkpoint.")
        if self.output_dir and Path(self.output_dir).exists():
            raise FileExistsError(f"--output_dir {self.output_dir} is there already; pass a new folder.")


def main(arguments: list[str] | None = None) -> Path | None:
    """Returns `output_dir`, if there is one."""
    (parsed,) = HfArgumentParser(PushArguments).parse_args_into_dataclasses(arguments)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = assemble(parsed, Path(scratch) / parsed.repo_id.split("/")[1])
        difference = verify(folder, parsed.model)
        print(f"A process without this package loads it and runs the card's example; vectors: {difference}")
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


def assemble(arguments: PushArguments, folder: Path) -> Path:
    """A folder with nothing in it that does not belong to the checkpoint; the card is new if its facts are."""
    source = Path(arguments.model)
    for path in published_files(source):
        if Path(path).suffix not in (".safetensors", ".py"):  # which are written anew
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, folder / path)
    config = ELMoConfig.from_pretrained(source)
    model_class = getattr(modeling_elmo, (config.architectures or ["ELMoModel"])[0])
    model = model_class.from_pretrained(source, dtype=torch.float32)
    stored = getattr(torch, arguments.dtype)
    # The configuration keeps float32, which is what it will be loaded as: half precision is for disks, not for CPUs.
    model.save_pretrained(folder, state_dict={name: value.to(stored) for name, value in model.state_dict().items()})
    ELMoTokenizer.from_pretrained(source).save_pretrained(folder)
    if write_facts(folder, arguments) or arguments.new_card or not (folder / "README.md").exists():
        part = task_part if (folder / "record.json").exists() else bilm_part
        write_card(folder, folder.name, part(folder, folder.name))
    return folder


def published_files(folder: Path) -> list[str]:
    """What belongs on the Hub of a folder: a checkpoint and its results, without the traces of its training."""
    found = [*folder.iterdir(), *(folder / "results").glob("*")]
    return sorted(
        path.relative_to(folder).as_posix()
        for path in found
        if path.is_file() and not any(path.match(pattern) for pattern in PRIVATE)
    )


def verify(folder: Path, source: str) -> str:
    """Loads `folder` in a clean process, runs its card, and says how far its vectors are from those of `source`.

    Raises:
        RuntimeError: the process failed; its message is in the error.
    """
    with tempfile.TemporaryDirectory() as home:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
        finished = subprocess.run(
            [sys.executable, "-c", STRANGER, folder.name, *TEXTS],
            cwd=folder.parent,
            env={**kept, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            text=True,
        )
    if finished.returncode:
        raise RuntimeError(f"{folder.name} does not load, or its card's example fails:\n{finished.stderr.strip()}")
    there = load_file(folder.parent / "layers.safetensors")
    here = layers_of(source)
    largest = max(float((there[str(number)] - layer).abs().max()) for number, layer in enumerate(here))
    scale = max(float(layer.square().mean().sqrt()) for layer in here)
    return f"largest difference to {source} {largest:.1e}, root mean square of its vectors {scale:.1e}"


def layers_of(source: str) -> tuple[torch.Tensor, ...]:
    model = modeling_elmo.ELMoModel.from_pretrained(source, dtype=torch.float32)
    inputs = ELMoTokenizer.from_pretrained(source)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).hidden_states


def refuse_tokens(folder: Path, paths: list[str]):
    for path in paths:
        if Path(path).suffix != ".safetensors" and TOKEN.search((folder / path).read_bytes()):
            raise ValueError(f"{path} holds what looks like a token of the Hub (hf_...): take it out, and revoke it.")


def push(folder: Path, repo_id: str, message: str, private: bool = False, token: str | None = None):
    """Uploads what belongs on the Hub as one commit: all of it is visible, or nothing.

    Args:
        repo_id: a name without a user is one of the token's owner.
    """
    paths = published_files(folder)
    refuse_tokens(folder, paths)
    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message=message, allow_patterns=paths)
    except Exception as error:  # a broken connection has the class of whatever library the client speaks with
        raise RuntimeError(
            f"{folder} could not be sent to {repo_id}: {error}\nWhat stood there stands there still, for the commit is "
            "the last step. Send it again with `python -m modeling_elmo.run_scripts.push_to_hub`; files that arrived "
            "are not sent twice."
        ) from error
    print(f"Uploaded to {repo}")


if __name__ == "__main__":
    main()
