"""Assembles the folder of a checkpoint for the Hub, checks it in a clean process, and uploads it."""

import glob
import inspect
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
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors.torch import load_file

import modeling_elmo
from modeling_elmo import ELMoConfig, ELMoPreTrainedModel, ELMoTokenizer
from modeling_elmo.configuration_elmo import SENTENCE_TRANSFORMERS_FILES
from modeling_elmo.run_scripts.cards.bilm_card import bilm_part
from modeling_elmo.run_scripts.cards.card import CardArguments, write_card, write_facts
from modeling_elmo.run_scripts.cards.head_card import PIPELINES, task_part
from modeling_elmo.run_scripts.program.files import MODEL_FILES

# All that is sent. Trainings leave more beside it: optimizers, paths of the author's disk, texts of the data.
PUBLISHED = (*MODEL_FILES, *SENTENCE_TRANSFORMERS_FILES, "original_checkpoint.json", "record.json", "*.png", "LICENSE*")

PUBLISHED += tuple(f"results/*.{kind}" for kind in ("json", "md", "png"))

MADE_ANEW = ("*.py", "*.safetensors", "*.safetensors.index.json")

FLAG = {"nargs": "?", "const": True}  # of an option that is true, false or not given

TOKEN = re.compile(rb"(?:hf_(?:oauth_)?|api_org_)[A-Za-z0-9]{30,}|hf_jwt_[A-Za-z0-9._-]{30,}")

TEXTS = ["He is in (London), Paris.", "밥 먹었어?", "x"]

TOLERANCES = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.5}  # of the root mean square; another model has above 1

CARD_NAME = re.compile(r"^name = ['\"](.+)['\"](?=  # path of this folder)", re.MULTILINE)


def outputs_of(model, tokenizer, texts: list[str]) -> dict[str, torch.Tensor]:
    """What a model of any of our classes makes of texts. Its source is run in the clean process, too."""
    kind, config = type(model).__name__, model.config
    is_pair = kind == "ELMoForQuestionAnswering" or "Sequence" in kind and config.classifier == "esim"
    inputs = tokenizer(texts, texts[::-1] if is_pair else None, padding=True, return_tensors="pt")
    labels = {"labels": inputs["input_ids"]} if kind == "ELMoForPreTraining" else {}
    with torch.no_grad():
        found = model.eval()(**inputs, **labels, output_hidden_states=True)
    layers = {f"layer {number}": layer for number, layer in enumerate(found.get("hidden_states") or ())}
    others = {name: found[name] for name in found if name.endswith(("logits", "_loss"))}
    return {name: tensor.float().contiguous() for name, tensor in {**layers, **others}.items()}


STRANGER = f"""
import pathlib, re, sys
sys.modules["modeling_elmo"] = None  # as if it were not installed
import torch, transformers
from safetensors.torch import save_file

{inspect.getsource(outputs_of)}
name, texts = sys.argv[1], sys.argv[2:]
config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=True)
auto = next(auto for auto, place in config.auto_map.items() if place.endswith("." + config.architectures[0]))
model = getattr(transformers, auto).from_pretrained(name, trust_remote_code=True, dtype=torch.float32)
save_file(outputs_of(model, tokenizer, texts), "outputs.safetensors")
for code in re.findall("```python\\n(.*?)```", pathlib.Path(name, "README.md").read_text(encoding="utf-8"), re.DOTALL):
    exec(code, {{}})
"""


@dataclass(kw_only=True)
class PushArguments(CardArguments):
    model: str = field(metadata={"help": "Folder of the checkpoint, as a training or a conversion left it."})
    repo_id: str = field(metadata={"help": "Repository on the Hub: user/name; a name alone is one of yours."})
    push: bool = field(default=False, metadata={"help": "Send it. Otherwise: show what would be sent."})
    new_card: bool = field(default=False, metadata={"help": "Write the card anew, as also for options of the card."})
    private: bool | None = field(
        default=None, metadata={"help": "Whether a new repository is private. Default: as your account has it.", **FLAG}
    )
    token: str | None = field(default=None, metadata={"help": "Default: that of `hf auth login`, or $HF_TOKEN."})
    dtype: Literal["float32", "float16", "bfloat16"] = field(
        default="float32", metadata={"help": "Precision that weights are stored in; loaded, they are float32."}
    )
    output_dir: str | None = field(default=None, metadata={"help": "New folder to keep what was assembled in."})

    def __post_init__(self):
        super().__post_init__()
        try:
            validate_repo_id(self.repo_id)
        except HFValidationError as error:
            raise ValueError(f"--repo_id {self.repo_id}: pass user/name. {error}") from None
        if not Path(self.model, "config.json").is_file():
            raise FileNotFoundError(f"--model {self.model}: there is no config.json; pass the folder of a checkpoint.")
        if self.output_dir and Path(self.output_dir).exists():
            raise FileExistsError(f"--output_dir {self.output_dir} is there already; pass a new folder.")


def assemble(arguments: PushArguments, folder: Path) -> Path:
    """A folder with nothing in it that does not belong to the checkpoint; the card is new if its facts are."""
    source = Path(arguments.model)
    for path in published_files(source):
        if not any(Path(path).match(pattern) for pattern in MADE_ANEW):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, folder / path)
    model, tokenizer = load(arguments.model)
    stored = getattr(torch, arguments.dtype)
    # The configuration keeps float32, which is what it will be loaded as: half precision is for disks, not for CPUs.
    weights = {name: value.to(stored) for name, value in model.state_dict().items() if value.is_floating_point()}
    model.save_pretrained(folder, state_dict=model.state_dict() | weights)
    tokenizer.save_pretrained(folder)
    card = folder / "README.md"
    if write_facts(folder, arguments) or arguments.new_card or not card.exists():
        part = task_part if type(model).__name__ in PIPELINES else bilm_part
        write_card(folder, folder.name, part(folder, arguments.repo_id))
    else:
        card.write_text(renamed(card.read_text(encoding="utf-8"), arguments.repo_id), encoding="utf-8")
    return folder


def load(source: str) -> tuple[ELMoPreTrainedModel, ELMoTokenizer]:
    """The model, of the class that it was saved as, and its tokenizer."""
    config = ELMoConfig.from_pretrained(source)
    model_class = getattr(modeling_elmo, (config.architectures or ["ELMoModel"])[0])
    return model_class.from_pretrained(source, dtype=torch.float32), ELMoTokenizer.from_pretrained(source)


def renamed(card: str, repo_id: str) -> str:
    """A card of ours under another name: in its example, its title and what the Hub reads. Others stay as they are."""
    if (found := CARD_NAME.search(card)) is None:
        return card
    old, new = found[1].split("/")[-1], repo_id.split("/")[-1]
    card = CARD_NAME.sub(f"name = {repo_id!r}", card)
    return re.sub(rf"^(# |- name: ){re.escape(old)}$", rf"\g<1>{new}", card, flags=re.MULTILINE)


def published_files(folder: Path) -> list[str]:
    """What belongs on the Hub of a folder: a checkpoint and its results, without the traces of its training."""
    found = {path for pattern in PUBLISHED for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found if not path.name.startswith("."))


def verify(folder: Path, arguments: PushArguments) -> str:
    """Loads `folder` in a clean process, runs its card, and says how far its outputs are from those of the source.

    Raises:
        RuntimeError: the process failed, with its message, or its outputs are others than those here.
    """
    root = folder.parents[arguments.repo_id.count("/")]
    with tempfile.TemporaryDirectory() as home:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
        finished = subprocess.run(
            [sys.executable, "-c", STRANGER, arguments.repo_id, *TEXTS],
            cwd=root,
            env={**kept, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            text=True,
        )
    if finished.returncode:
        raise RuntimeError(f"{folder.name} does not load, or its card's example fails:\n{finished.stderr.strip()}")
    there, here = load_file(root / "outputs.safetensors"), outputs_of(*load(arguments.model), TEXTS)
    name, worst = max(((name, distance(here[name], there[name])) for name in here), key=lambda pair: pair[1])
    found = f"of its outputs {name} differs most from that of {arguments.model}, by {worst:.1e} of its root mean square"
    if worst > TOLERANCES[arguments.dtype]:
        raise RuntimeError(f"{folder.name} is another model when it is loaded without this package: {found}.")
    return f"A process without this package loads it and runs the card's example; {found}."


def distance(here: torch.Tensor, there: torch.Tensor) -> float:
    """The largest difference, in units of the root mean square; scores that are "never" in both are left out.

    What is not a number, here or there, is infinitely far.
    """
    differing = ~((here <= -1e3) & (there <= -1e3))
    scale = here[here > -1e3].square().mean().sqrt().clamp(min=1e-6)
    return max(((here - there)[differing].abs() / scale).nan_to_num(nan=torch.inf).tolist(), default=0.0)


def refuse_tokens(folder: Path, paths: list[str]):
    for path in paths:
        if Path(path).suffix != ".safetensors" and TOKEN.search((folder / path).read_bytes()):
            raise ValueError(
                f"{path} holds what looks like a token of the Hub (hf_..., api_org_...): take it out, and revoke it."
            )


def push(folder: Path, repo_id: str, message: str, private: bool | None = None, token: str | None = None):
    """Uploads what belongs on the Hub as one commit: all of it is visible, or nothing.

    Args:
        repo_id: a name without a user is one of the token's owner.
    """
    paths = published_files(folder)
    refuse_tokens(folder, paths)
    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        names = list(map(glob.escape, paths))  # the Hub's client takes them for patterns
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message=message, allow_patterns=names)
    except Exception as error:  # a broken connection has the class of whatever library the client speaks with
        raise RuntimeError(
            f"{folder} could not be sent to {repo_id}: {error}\nWhat stood there stands there still, for the commit is "
            "the last step. Send it again with `python -m modeling_elmo.run_scripts.push_to_hub`; files that arrived "
            "are not sent twice."
        ) from error
    print(f"Uploaded to {repo}")
