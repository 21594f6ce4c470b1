"""Prints what this machine can do: versions, processor, accelerators, and the backends that are chosen.

    elmo doctor

Paste its output into a report of a problem. It loads no model and changes nothing.
"""

import os
import platform
from importlib.metadata import distributions

import torch
from torch import nn

import modeling_elmo
from modeling_elmo import elmo_lstm_fused
from modeling_elmo.elmo_backends import bfloat16_obstacle, choose_backend, processor_name
from modeling_elmo.elmo_operators import int8_obstacle
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run
from modeling_elmo.run_scripts.program.processes import has_accelerator

# Required packages, and those that programs and faster paths need; `pip check` compares their versions.
PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "accelerate", "datasets"),
    *("h5py", "triton", "onnxruntime", "spacy", "gradio"),
)


def main(arguments: list[str] | None = None) -> None:
    ProgramParser(description=__doc__).parse(arguments)
    for title, facts in machine_facts().items():
        print(title, *(f"  {name:16}  {text}" for name, text in facts.items()), "", sep="\n")


def machine_facts() -> dict[str, dict[str, str]]:
    """Facts by section and name. The backends are those of a linear layer; `elmo_backend` lists their names."""
    obstacles = {"bfloat16": bfloat16_obstacle(), "8 bits": int8_obstacle()}
    layer, inputs = nn.Linear(16, 16), torch.zeros(2, 16)
    with torch.no_grad():
        vectors = choose_backend([layer], inputs)[0]
    with torch.autocast("cpu", torch.bfloat16, enabled=not obstacles["bfloat16"]):  # as the programs do
        bf16 = choose_backend([layer], inputs)[0]
    return {
        "Versions": {
            "modeling-elmo": f"{modeling_elmo.__version__}, in {os.path.dirname(str(modeling_elmo.__file__))}",
            "python": f"{platform.python_version()}, {platform.platform()}",
            **{name: next((each.version for each in distributions(name=name)), "missing") for name in PACKAGES},
        },
        "Processor": {
            "name": f"{processor_name()}, {os.cpu_count()} cores; torch uses {torch.get_num_threads()} threads",
            **{name: f"slow: {obstacle}" if obstacle else "fast" for name, obstacle in obstacles.items()},
        },
        "Accelerators": accelerators(),
        "Chosen backends on CPU": {
            "vectors": vectors,
            "training": choose_backend([layer], inputs)[0],
            "training, --bf16": bf16,
        },
    }


def accelerators() -> dict[str, str]:
    if not has_accelerator():
        return {"device": f"none that torch {torch.__version__} can use"}
    facts = {"device": str(torch.accelerator.current_accelerator())}
    cells = "triton" if elmo_lstm_fused.triton else "plain PyTorch, because triton is missing"
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        facts[f"cuda:{number}"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB; cells of the LSTM in {cells}"
    return facts


if __name__ == "__main__":
    run(main)
