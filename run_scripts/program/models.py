"""Models by name: checked before a program works for them, loaded with all their weights, and digested."""

import json
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME, cached_file, extract_commit_hash

from modeling_elmo.conversion.files import check_complete

from .command_line import flat_message, is_mistake_of_user
from .files import digest, read_json

# The files of a published model, in the order of writing. config.json is the last: without it the folder is not a
# model, so nobody loads a folder that is half written.
MODEL_FILES = (
    *("*.py", "README.md", "vocab.txt", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),  # of transformers 4
    *("model*.safetensors", "*.safetensors.index.json", "config.json"),
)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def check_model(name_or_path: str):
    """Checks that a folder or the Hub has an ELMo model of this name, before a program works for it."""
    folder = Path(name_or_path)
    if folder.exists():
        if not (folder / CONFIG_NAME).is_file():
            raise FileNotFoundError(f"{folder} has no config.json; pass a model, or convert one with elmo convert.")
        config = read_json(folder / CONFIG_NAME)
    else:
        try:
            config, _ = PreTrainedConfig.get_config_dict(name_or_path)
        except OSError as error:
            reason = f"the folder does not exist, and the Hub gives no model ({flat_message(error):.300})"
            raise FileNotFoundError(f"{name_or_path}: {reason}. Correct it, or run `hf auth login`.") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type != "elmo":
        raise ValueError(f"{name_or_path} is a {model_type!r} model; pass an ELMo model.")


def load_pretrained(kind: Any, name_or_path: str | Path, **options: Any) -> Any:
    """A model or a tokenizer, `kind.from_pretrained(name_or_path, **options)`, whose weights are numbers.

    All weights must be there, unless the caller passes `output_loading_info`, and reads it.
    """
    is_model = hasattr(kind, "_model_mapping") or issubclass(kind, torch.nn.Module)
    is_checked_here = is_model and "output_loading_info" not in options
    if is_checked_here:
        options["output_loading_info"] = True
    try:
        loaded = kind.from_pretrained(name_or_path, **options)
    except Exception as error:  # of torch, safetensors, tokenizers, json: whatever the files hold
        if is_mistake_of_user(error) and str(name_or_path) in str(error):
            raise
        reason = flat_message(error).rstrip(".")
        if isinstance(error, pickle.UnpicklingError):  # its message advises to run the code in the file
            reason = "a pickle is damaged, or holds more than tensors"
        if pointers := [file.name for file in files_of_folder(name_or_path) if is_lfs_pointer(file)]:
            reason = f"Git LFS has not fetched {', '.join(pointers)}; run `git lfs pull` in the clone"
        raise ValueError(f"{name_or_path} cannot be loaded: {reason:.300}. Copy it again, or pass another.") from error
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # beside the loading info
    if isinstance(model, torch.nn.Module) and (name := broken_weights(model)):
        raise ValueError(f"{name_or_path}: the weights of {name} are not finite. Pass another checkpoint.")
    if not is_checked_here:
        return loaded
    check_complete(loaded[1]["missing_keys"], name_or_path)
    return model


def files_of_folder(name_or_path: str | Path) -> list[Path]:
    """The files of a model's folder; none of a name on the Hub."""
    return [path for path in sorted(Path(name_or_path).glob("*")) if path.is_file()]


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is what a clone without Git LFS has in its place."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def model_digest(name_or_path: str, is_baseline: bool = False) -> str:
    """A digest of a model's files without its code, whichever transformers wrote them, or its commit on the Hub.

    Args:
        is_baseline: whether only the tokenizer is read.
    """
    config = Path(cached_file(name_or_path, CONFIG_NAME))
    if commit := extract_commit_hash(str(config), None):
        return commit
    options: dict[str, Any] = {}
    paths = list(config.parent.glob("tokenizer*.json"))
    if not is_baseline:
        options = read_json(config) | {"transformers_version": None, "auto_map": None}
        paths += config.parent.glob("*.safetensors")
    contents = map(_bytes_with_code, sorted(paths))
    return digest(chain([json.dumps(options, sort_keys=True).encode()], contents))


def _bytes_with_code(path: Path) -> bytes:
    """A file of a model. The configuration of a tokenizer without code names code, as transformers writes it."""
    content = path.read_bytes()
    if path.name != TOKENIZER_CONFIG_FILE or b'"auto_map"' in content:
        return content
    config = {**read_json(path), "auto_map": {"AutoTokenizer": ["tokenization_elmo.ELMoTokenizer", None]}}
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def broken_weights(model: torch.nn.Module) -> str | None:
    """The name of the first parameter with a value that is infinite or not a number."""
    for name, weights in model.named_parameters():
        if not weights.isfinite().all():
            return name
    return None
