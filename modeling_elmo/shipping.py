"""Generates the code that travels with a checkpoint: three files with all code of the package that it needs.

A section is a file of the package, after the files that it imports. Its relative imports are left out, because all
names are in one file, and its other imports are merged at the top. So files that travel import each other only as
`from .module import name`, and no two of them define the same name.
"""

import ast
import hashlib
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec, resolve_name
from typing import NamedTuple

import modeling_elmo

# The configuration has a file of its own, which the file of the models imports: transformers loads it, and parses its
# file, with each tokenizer and each model.
MODULES = {
    "configuration_elmo.py": ("configuration_elmo",),
    "modeling_elmo.py": (
        *("modeling_elmo", "causal"),
        *("heads.tagger", "heads.classifier", "heads.reader", "heads.reader_pipeline"),
        *("heads.role_labeler", "heads.role_labeler_pipeline"),
        *("heads.coreference_resolver", "heads.coreference_pipeline"),
    ),
    "tokenization_elmo.py": ("tokenization.tokenization_elmo",),
}
TITLES = {
    "configuration_elmo.py": "The configuration of ELMo",
    "modeling_elmo.py": "ELMo, its task models and pipelines",
    "tokenization_elmo.py": "The tokenizer of ELMo",
}
FIRST_LINE = "# modeling_elmo {version}, generated; SHA-256 of the sections: {digest}\n"
ABOUT = '''"""{title}, in one file of sections.

To change it, change the package modeling_elmo, whose license is Apache-2.0. Line and title of each section:

{contents}
"""

'''


class Section(NamedTuple):
    """A file of the package: its name, its text, and the text's syntax tree."""

    name: str
    source: str
    tree: ast.Module


@cache
def generate(name: str) -> bytes | None:
    """A file of `MODULES`, or None if the package is installed without sources."""
    found: dict[str, Section] = {}
    if not all(_add(f"{modeling_elmo.__name__}.{module}", found, name) for module in MODULES[name]):
        return None
    sections = list(found.values())
    imports, bodies = _merged_imports(sections, name), list(map(_body, sections))
    line = 3 + ABOUT.count("\n") + len(sections) + imports.count("\n")
    contents = []
    for section, body in zip(sections, bodies, strict=True):
        heading = (ast.get_docstring(section.tree) or "").partition("\n")[0]
        contents.append(f"{line:>6}  {section.name}: {heading}")
        line += body.count("\n")
    text = ABOUT.format(title=TITLES[name], contents="\n".join(contents)) + imports + "".join(bodies)
    return first_line(modeling_elmo.__version__, text.encode()) + text.encode()


def first_line(version: str, sections: bytes) -> bytes:
    """The first line of a generated file, whose other lines are the sections."""
    return FIRST_LINE.format(version=version, digest=hashlib.sha256(sections).hexdigest()).encode()


def _is_other_file(module: str, name: str) -> bool:
    """Whether a module is in another generated file, and imported from there."""
    return f"{module.rpartition('.')[2]}.py" in MODULES.keys() - {name}


def _add(module: str, found: dict[str, Section], name: str) -> bool:
    """Adds a file of the package after the files that it imports, or returns False if it has no source."""
    if module in found or _is_other_file(module, name):
        return True
    spec = find_spec(module)
    source = getattr(spec.loader, "get_source", lambda _: None)(module) if spec else None
    if source is None:
        return False
    tree = ast.parse(source)
    ours = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]
    if not all(_add(resolve_name(f"{'.' * node.level}{node.module}", spec.parent), found, name) for node in ours):
        return False
    found[module] = Section(module.rpartition(".")[2], source, tree)
    return True


def _body(section: Section) -> str:
    """The text of a section under its name, without the imports and the check of transformers' version."""
    lines, docstring = section.source.splitlines(), section.tree.body[0]
    for node in section.tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) or _is_check(node):
            for line in range(node.lineno - 1, node.end_lineno or 0):
                lines[line] = ""
    head, rest = lines[: docstring.end_lineno], "\n".join(lines[docstring.end_lineno :])
    return "\n".join(["", "", f"# {section.name} ".ljust(120, "-"), "", *head, "", rest.strip(), ""])


def _is_check(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) == "require_version"


def _merged_imports(sections: list[Section], name: str) -> str:
    """The check of transformers' version, whose error explains those of later imports, and all other imports."""
    checks: dict[str, None] = {}
    modules: set[str] = set()
    names: dict[str, set[str]] = {}
    for section in sections:
        for node in section.tree.body:
            if _is_check(node):
                checks[section.source.splitlines()[node.lineno - 1]] = None
            elif isinstance(node, ast.Import):
                modules |= {ast.unparse(alias) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.setdefault(str(node.module), set()).update(map(ast.unparse, node.names))
            elif isinstance(node, ast.ImportFrom) and _is_other_file(str(node.module), name):
                names.setdefault(f".{node.module}", set()).update(map(ast.unparse, node.names))
    blocks: list[list[str]] = [[], [], []]
    for module in sorted(modules):
        blocks[_rank(module)].append(f"import {module}")
    for module in sorted(names):
        blocks[_rank(module)] += _from_import(module, names[module])
    blocks.insert(1, list(checks))
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _rank(module: str) -> int:
    """0: what checks the version of transformers, here or in another file; 1: Python's own modules; 2: all others."""
    if module.startswith(".") or module == "transformers.utils.versions":
        return 0
    return 1 if module.partition(".")[0] in sys.stdlib_module_names else 2


def _from_import(module: str, names: set[str]) -> Iterator[str]:
    line = f"from {module} import {', '.join(sorted(names))}"
    if len(line) <= 120:
        yield line
    else:
        yield from (f"from {module} import (", *(f"    {name}," for name in sorted(names)), ")")
