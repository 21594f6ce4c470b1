"""The house as its imports show it: programs apart from parts, arrows in one direction, one meaning per name."""

import ast
import re
from graphlib import TopologicalSorter

import pytest
from places import ROOT

from modeling_elmo.run_scripts.modeling_elmo_cli import PROGRAMS

PACKAGES = {
    "modeling_elmo": "modeling_elmo",
    "tokenization": "modeling_elmo.tokenization",
    "run_scripts": "modeling_elmo.run_scripts",
}
STAY = {"__init__", "prediction", "shipping"}  # all other files of the package travel with a checkpoint
# A part may import parts of a lower floor, and of its own sub-package.
FLOORS = {"program": 0, "cards": 1, "vectors": 2, "pretraining": 2, "fine_tuning": 3}
FLOORS |= {"explorer": 3, "experiments": 4, "benchmarks": 4}
# The command, and the programs that it does not run: the demo of the clone, the script and the loop to copy and change.
# spaCy imports its factory, which must not be in a package.
OTHER_PROGRAMS = {"modeling_elmo_cli", "modeling_elmo_spacy", "demo", "fine_tune_stock", "run_ner_no_trainer"}
NAMES_OF_MANY_FILES = {
    "__all__",
    "__version__",
    "logger",  # as in transformers
    "main",  # of programs
}


def module_name(path):
    folder, *inner = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[folder], *inner]).removesuffix(".__init__")


FILES = {module_name(path): path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))}
TREES = {module: ast.parse(path.read_text("utf-8")) for module, path in FILES.items()}
RUN_SCRIPTS = PACKAGES["run_scripts"] + "."
IS_PROGRAM = {module: path.parent == ROOT / "run_scripts" and path.stem != "__init__" for module, path in FILES.items()}


def imports_of(module):
    """Full names of all modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module if FILES[module].stem == "__init__" else module.rpartition(".")[0]
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*parents, *filter(None, [node.module])])
            members = {f"{source}.{alias.name}" for alias in node.names}
            found |= (members & FILES.keys()) or {source}
    return found


IMPORTS = {module: imports_of(module) for module in FILES}
OURS = {module: found & FILES.keys() for module, found in IMPORTS.items()}


def sub_package(module):
    inner = module.removeprefix(RUN_SCRIPTS).split(".")
    return inner[0] if module.startswith(RUN_SCRIPTS) and inner[0] in FLOORS else None


def is_shipped(module):
    path = FILES[module]
    return path.parent.name in ("modeling_elmo", "kernels", "heads", "tokenization") and path.stem not in STAY


def test_the_imports_are_read():
    """Otherwise all that follows would hold for nothing."""
    assert "modeling_elmo.tokenization.elmo_characters" in OURS["modeling_elmo.tokenization.tokenization_elmo"]
    assert "modeling_elmo.run_scripts.program.command_line" in OURS["modeling_elmo.run_scripts.embed"]
    assert "modeling_elmo.configuration_elmo" in OURS["modeling_elmo"]
    assert sum(map(len, OURS.values())) > 150 and sum(map(is_shipped, FILES)) > 10


def test_the_top_of_run_scripts_has_only_programs():
    stems = {path.stem for module, path in FILES.items() if IS_PROGRAM[module]}
    assert stems == {module for module, _ in PROGRAMS.values()} | OTHER_PROGRAMS


def test_no_part_imports_a_program():
    wrong = {module: found for module in FILES if (found := {name for name in OURS[module] if IS_PROGRAM[name]})}
    assert wrong.keys() <= {f"{RUN_SCRIPTS}demo"}, wrong  # it shows other programs


def test_no_test_file_imports_another():
    """What several need is in `bilm_models.py`, `head_models.py` and other files beside them."""
    tests = {path.name: path.read_text("utf-8") for path in (ROOT / "tests").glob("*.py")}
    assert not [name for name, text in tests.items() if re.search(r"^\s*(from|import) test_", text, re.MULTILINE)]


def test_files_import_in_no_circle():
    list(TopologicalSorter(OURS).static_order())


def test_arrows_point_downwards():
    wrong = [
        (module, name)
        for module, found in OURS.items()
        for name in found
        if (source := sub_package(module)) and (target := sub_package(name))
        if source != target and FLOORS[source] <= FLOORS[target]
    ]
    assert not wrong


ROOMS = ("kernels", "", "heads")  # of the package, from the ground floor


def room(module):
    path = FILES[module]
    is_model = path.is_relative_to(ROOT / "modeling_elmo") and path.stem not in STAY
    name = "" if path.parent.name == "modeling_elmo" else path.parent.name
    return name if is_model and name in ROOMS else None


def test_kernels_know_no_model_and_models_no_head():
    wrong = [
        (module, name)
        for module, found in OURS.items()
        for name in found
        if (source := room(module)) is not None and (target := room(name)) is not None
        if ROOMS.index(source) < ROOMS.index(target)
    ]
    assert not wrong


def test_a_run_needs_no_experiments():
    assert not [name for name in OURS[f"{RUN_SCRIPTS}run_task"] if sub_package(name) == "experiments"]


def test_parts_import_each_other_relatively_and_programs_by_full_names():
    """A relative path is right on disk, and installed. A program that runs by path has no package to start from."""
    for module in (name for name in FILES if name.startswith(RUN_SCRIPTS)):
        levels_below = len(FILES[module].relative_to(ROOT / "run_scripts").parts)
        for node in ast.walk(TREES[module]):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert not IS_PROGRAM[module], f"{module} runs by path: {ast.unparse(node)}"
                assert node.level <= levels_below, f"{module}: the core by modeling_elmo, not {ast.unparse(node)}"
            elif isinstance(node, (ast.Import, ast.ImportFrom)) and not IS_PROGRAM[module]:
                assert "run_scripts" not in ast.unparse(node), f"{module}: {ast.unparse(node)}"


def test_the_package_imports_no_scripts():
    library = [module for module in FILES if not module.startswith(RUN_SCRIPTS)]
    assert not [(module, name) for module in library for name in OURS[module] if name.startswith(RUN_SCRIPTS)]


@pytest.mark.parametrize("module", [module for module in FILES if is_shipped(module)])
def test_files_that_travel_import_names_of_each_other(module):
    """They become sections of one file (`shipping.py`), where no module has a name: no `from . import module`."""
    tree = TREES[module]
    ours = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    for node in ours:
        assert node in tree.body and node.module, ast.unparse(node)
        assert not any(alias.asname for alias in node.names), ast.unparse(node)
        assert not {alias.name for alias in node.names} & {path.stem for path in FILES.values()}, ast.unparse(node)
    everywhere = {name.partition(".")[0] for name in IMPORTS[module] - FILES.keys()}
    assert not everywhere & set(PACKAGES), "an absolute import of ours breaks in a checkpoint's folder"
    assert OURS[module] <= {name for name in FILES if is_shipped(name)}, "what it imports does not travel"


def names_defined_in(module):
    names = set()
    for node in TREES[module].body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def test_a_name_has_one_meaning():
    owners = {}
    for module in FILES:
        for name in names_defined_in(module) - NAMES_OF_MANY_FILES:
            owners.setdefault(name, []).append(str(FILES[module].relative_to(ROOT)))
    shared = {name: files for name, files in sorted(owners.items()) if len(files) > 1}
    assert not shared, "\n".join(f"{name}: {', '.join(files)}" for name, files in shared.items())
