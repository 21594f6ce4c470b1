"""The generated files have all code that travels, section by section, and need nothing else of the package."""

import ast
import hashlib
import py_compile
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from places import ROOT
from transformers.dynamic_module_utils import get_imports, get_relative_imports

import modeling_elmo
from modeling_elmo.shipping import MODULES, generate

PACKAGES = {"torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", "numpy"}
OPTIONAL = {"triton", "cut_cross_entropy", "sentencex"}
ROOMS = ("modeling_elmo", "modeling_elmo/kernels", "modeling_elmo/heads", "tokenization")
SOURCES = {path.stem: path for room in ROOMS for path in (ROOT / room).glob("*.py")}
STAY = {"__init__", "prediction", "shipping"}  # and do not travel
HEADING = re.compile(r"^# (\w+) -{60,}$", re.MULTILINE)

each = pytest.mark.parametrize("name", MODULES)


@pytest.fixture
def file(name, tmp_path) -> Path:
    path = tmp_path / name
    path.write_bytes(generate(name))
    return path


def is_import(node: ast.AST) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def is_check(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and "require_version(" in ast.unparse(node) and not is_docstring(node)


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def statements(tree: ast.Module) -> list[str]:
    return [ast.dump(node) for node in tree.body if not is_import(node) and not is_check(node)]


def test_every_file_that_travels_is_a_section():
    sections = {stem for name in MODULES for stem in HEADING.findall(generate(name).decode())}
    assert sections == SOURCES.keys() - STAY


@each
def test_the_sections_are_the_sources(file):
    """Each statement of a source is in its section, in the same order, and nothing else is."""
    text = file.read_text("utf-8")
    _, *parts = HEADING.split(text)
    for stem, body in zip(parts[::2], parts[1::2], strict=True):
        assert statements(ast.parse(body)) == statements(ast.parse(SOURCES[stem].read_text("utf-8")))
    comments = [line for stem in parts[::2] for line in SOURCES[stem].read_text().split("\n") if line.startswith("#")]
    assert comments and all(line in text for line in comments)


@each
def test_the_contents_name_the_lines(file):
    lines = file.read_text("utf-8").split("\n")
    contents = re.findall(r"^ +(\d+)  (\w+): (.+)$", ast.get_docstring(ast.parse("\n".join(lines)), clean=False), re.M)
    assert [stem for _, stem, _ in contents] == HEADING.findall("\n".join(lines))
    for line, stem, title in contents:
        assert lines[int(line) - 1].startswith(f"# {stem} ---") and lines[int(line) + 1].startswith(f'"""{title}')


@each
def test_the_first_line_has_version_and_digest(file):
    first, rest = file.read_bytes().split(b"\n", 1)
    digest = hashlib.sha256(rest).hexdigest()
    assert (
        first.decode() == f"# modeling_elmo {modeling_elmo.__version__}, generated; SHA-256 of the sections: {digest}"
    )


@each
def test_it_compiles_without_faults(file):
    py_compile.compile(str(file), doraise=True)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", str(file)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@each
def test_what_it_imports(file):
    """transformers reads the imports with its own functions: a line of a docstring may be one for them."""
    assert get_relative_imports(file) == (["configuration_elmo"] if file.name == "modeling_elmo.py" else [])
    assert set(get_imports(file)) - sys.stdlib_module_names <= PACKAGES | OPTIONAL
    tree = ast.parse(file.read_bytes())
    top = {name.name.partition(".")[0] for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    top |= {node.module.partition(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom) and not node.level}
    assert top - sys.stdlib_module_names <= PACKAGES, "optional packages are imported in `try` or in a function"


@each
def test_the_version_of_transformers_is_checked_first(file):
    """An older version lacks names that are imported later."""
    first, second = [node for node in ast.parse(file.read_bytes()).body if not is_docstring(node)][:2]
    if file.name == "modeling_elmo.py":  # whose first import is the file that checks
        assert (first.level, first.module) == (1, "configuration_elmo")
    else:
        assert first.module == "transformers.utils.versions"
        assert ast.unparse(second).startswith("require_version('transformers>=")


@each
def test_no_name_has_two_meanings(file):
    """Whether it is imported or defined, also in `try`."""
    bound = Counter()
    for node in ast.parse(file.read_bytes()).body:
        for inner in ast.walk(node) if isinstance(node, ast.Try) else [node]:
            if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
                bound[inner.name] += 1
            elif is_import(inner):
                bound.update(alias.asname or alias.name.partition(".")[0] for alias in inner.names)
            elif isinstance(inner, (ast.Assign, ast.AnnAssign)) and inner is node:
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                bound.update(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
    assert {name for name, count in bound.items() if count > 1} <= {"logger", "torch"}  # `import torch.nn.functional`
    assert len(bound) > 30
