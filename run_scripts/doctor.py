"""Tells what this machine can do: versions, processor, the backends that are chosen, and what each extra lacks.

    elmo doctor

Paste its output into a report of a problem. It loads no model and changes nothing.
"""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, version

import torch
from packaging.requirements import Requirement
from torch import nn

import modeling_elmo
from modeling_elmo import elmo_lstm_fused
from modeling_elmo.elmo_backends import bfloat16_obstacle, choose_backend
from modeling_elmo.elmo_operators import int8_obstacle
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.run_scripts.program.processes import has_accelerator, processor_name

PACKAGE = "modeling-elmo"


@dataclass(kw_only=True)
class DoctorArguments:
    """No options: the report is always whole."""


def main(arguments: list[str] | None = None) -> None:
    ProgramParser(DoctorArguments, description=__doc__).parse(arguments)
    for title, lines in sections().items():
        print(title)
        width = max(len(name) for name, _ in lines)
        print(*(f"  {name:{width}}  {text}" for name, text in lines), "", sep="\n")


def sections() -> dict[str, list[tuple[str, str]]]:
    """The sections of the report: pairs of a name and what is to be said of it."""
    required, extras = requirements()
    return {
        "Versions": [*versions(required)],
        "Processor": [*processor()],
        "Accelerators": [*accelerators()],
        "Chosen backends on CPU": [*chosen_backends()],
        "Extras": [(name, missing_packages(needed)) for name, needed in extras.items()],
    }


def requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """What the installed package always needs, and what each of its extras needs.

    Raises:
        ModuleNotFoundError: the package is imported from a folder, without having been installed.
    """
    try:
        facts = metadata(PACKAGE)
    except PackageNotFoundError:
        raise ModuleNotFoundError(
            f"{PACKAGE} is not installed, so its requirements are unknown. In the clone, run `pip install -e .`"
        ) from None
    all_of_them = [Requirement(line) for line in facts.get_all("Requires-Dist") or []]
    extras = {
        name: [each for each in all_of_them if each.marker and each.marker.evaluate({"extra": name})]
        for name in facts.get_all("Provides-Extra") or []
    }
    return [each for each in all_of_them if each.marker is None], extras


def versions(required: list[Requirement]) -> Iterator[tuple[str, str]]:
    yield PACKAGE, f"{version(PACKAGE)}, in {os.path.dirname(str(modeling_elmo.__file__))}"
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    for requirement in required:
        yield requirement.name, problem_of(requirement) or version(requirement.name)


def processor() -> Iterator[tuple[str, str]]:
    yield "name", f"{processor_name()}, {os.cpu_count()} cores; torch uses {torch.get_num_threads()} threads"
    yield "bfloat16", fast_unless(bfloat16_obstacle())
    yield "8 bits", fast_unless(int8_obstacle())


def fast_unless(obstacle: str | None) -> str:
    return "fast" if obstacle is None else f"slow: {obstacle}"


def accelerators() -> Iterator[tuple[str, str]]:
    if not has_accelerator():
        yield "device", f"none that torch {torch.__version__} can use"
    elif not torch.cuda.device_count():
        yield "device", str(torch.accelerator.current_accelerator())
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        cells = "triton" if elmo_lstm_fused.triton else "plain PyTorch, because triton is missing"
        yield f"cuda:{number}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB; cells of the LSTM in {cells}"


def chosen_backends() -> Iterator[tuple[str, str]]:
    """What a linear layer of the biLM would run on. `elmo_backend` lists the names."""
    layer, inputs = nn.Linear(16, 16), torch.zeros(2, 16)
    with torch.no_grad():
        yield "vectors", choose_backend([layer], inputs)[0]
    yield "training", choose_backend([layer], inputs)[0]
    with torch.autocast("cpu", torch.bfloat16):
        yield "training, --bf16", choose_backend([layer], inputs)[0]


def missing_packages(needed: list[Requirement]) -> str:
    problems = [problem for requirement in needed if (problem := problem_of(requirement))]
    return "; ".join(problems) if problems else "complete"


def problem_of(requirement: Requirement) -> str | None:
    """What is wrong with an installed package, or `None`. Extras of our own are judged on their own lines."""
    if requirement.name == PACKAGE:
        return None
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"{requirement.name} is {installed}, but must be {requirement.specifier}"


if __name__ == "__main__":
    run(main)
