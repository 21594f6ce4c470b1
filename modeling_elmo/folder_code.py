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


def code_of_folder(*names: str) -> dict[str, bytes]:
    """The files of code for a folder, by name, as the package generates them. Empty if it is installed without sources.

    A generated file gives itself only: transformers copies the file of the class that it saves, and what it imports.
    """
    place = Path(__file__)
    if place.name in names:
        return {place.name: place.read_bytes()}
    generate = import_module(".shipping", __package__).generate
    return {name: code for name in names if (code := generate(name))}


@contextmanager
def saved_code(folder: str | os.PathLike, config_name: str, *names: str) -> Iterator[None]:
    """Writes the files of code, and after the configuration is written too, names the files that it leaves behind."""
    place, code = Path(folder), code_of_folder(*names)
    before = code_files(place, config_name)
    place.mkdir(parents=True, exist_ok=True)
    for name, content in code.items():
        (place / name).write_bytes(content)
    if not code:
        logger.warning_once(NO_SOURCES)
    yield
    if left := sorted(before - code_files(place, config_name)):
        old, new = ", ".join(left), " and ".join(names)
        logger.warning(f"{folder}: the code is in {new} now, and nothing reads {old} any more; delete these files.")


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
