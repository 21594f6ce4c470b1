"""Prints what this machine can do: versions, processor, accelerators, and the backends that are chosen.

    elmo doctor

Paste its output into a report of a problem. It loads no model and changes nothing.
"""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

import modeling_elmo
from modeling_elmo import elmo_lstm_fused
from modeling_elmo.elmo_backends import bfloat16_obstacle, choose_backend
from modeling_elmo.elmo_operators import int8_obstacle
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.run_scripts.program.processes import has_accelerator, processor_name

# Required packages, and those that programs and faster paths need; `pip check` compares their versions.
PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "accelerate", "datasets"),
    *("h5py", "triton", "onnxruntime", "spacy", "gradio"),
)


def main(arguments: list[str] | None = None) -> None:
    ProgramParser(description=__doc__).parse(arguments)
    for title, lines in SECTIONS.items():
        pairs = [*lines()]
        width = max(len(name) for name, _ in pairs)
        print(title, *(f"  {name:{width}}  {text}" for name, text in pairs), "", sep="\n")


def versions() -> Iterator[tuple[str, str]]:
    yield "modeling-elmo", f"{modeling_elmo.__version__}, in {os.path.dirname(str(modeling_elmo.__file__))}"
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "missing"


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


SECTIONS = {
    "Versions": versions,
    "Processor": processor,
    "Accelerators": accelerators,
    "Chosen backends on CPU": chosen_backends,
}


if __name__ == "__main__":
    run(main)
