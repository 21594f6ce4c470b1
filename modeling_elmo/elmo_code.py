"""The code in the folder of a saved model: written by `save_pretrained`, found again by `trust_remote_code=True`."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils import logging

logger = logging.get_logger(__name__)

NAME_OF_CLASS = re.compile(r'"(?:[^"]*--)?(\w+)\.ELMo\w+"')  # as in an Auto map, which may name a repository first
NO_SOURCES = (
    "The model is saved without its code, because this installation has no sources. It loads only where modeling_elmo "
    "is installed; leave out trust_remote_code there."
)


def code_of_folder(name: str) -> bytes | None:
    """The file of this name for a folder: this file, if it was generated, or what the package generates.

    None where the package is installed without sources.
    """
    if Path(__file__).name == name:
        return Path(__file__).read_bytes()
    return import_module(".shipping", __package__).generate(name)


@contextmanager
def saved_code(folder: str | os.PathLike, name: str, config_name: str) -> Iterator[None]:
    """Writes the file of code, and after the configuration is written too, names the files that it leaves behind."""
    place = Path(folder)
    before = code_files(place, config_name)
    place.mkdir(parents=True, exist_ok=True)
    if code := code_of_folder(name):
        (place / name).write_bytes(code)
    else:
        logger.warning_once(NO_SOURCES)
    yield
    if left := sorted(before - code_files(place, config_name)):
        files = ", ".join(left)
        logger.warning(f"{folder}: the code is in {name} now, and nothing reads {files} any more; delete these files.")


def code_files(folder: Path, config_name: str) -> set[str]:
    """The files of code that a configuration in the folder names for our classes, and those that they import."""
    path, found = folder / config_name, set()
    waiting = NAME_OF_CLASS.findall(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else []
    while waiting:
        file = folder / f"{waiting.pop()}.py"
        if file.name not in found and file.is_file():
            found.add(file.name)
            waiting += get_relative_imports(file)
    return found
