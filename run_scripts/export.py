"""Exports a model for ONNX Runtime, or for torch alone: neither transformers nor this package is needed to run it.

    elmo export --model DIR --output_dir DIR_ONNX
    elmo export --model DIR --format pt2 --output_dir DIR_PT2

The new folder has `model.onnx` or `model.pt2`, the tokenizer, the configuration, and for ONNX an example script. It is
written only if the exported model agrees with the model on a few sentences.

Inputs:
    `character_ids` `(batch, time, max_word_length)`; `input_ids` `(batch, time)` for models with word vectors;
    `attention_mask` `(batch, time)`. All are int64, of any batch and time. Each row is one text from a zero state:
    `token_type_ids` and `initial_states` are not exported.

Outputs, in float32:
    biLM: `elmo_embeddings` `(batch, time, hidden_size)`, the mix; `hidden_states` `(batch, layers + 1, time,
    hidden_size)`. Linear heads: `logits`, `(batch, time, num_labels)` for tags, `(batch, num_labels)` for texts.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from modeling_elmo import ELMoForTokenClassification, ELMoModel
from modeling_elmo.conversion.files import check_empty, staged
from modeling_elmo.conversion.onnx import (
    Exported,
    NamedOutputs,
    check_exportable,
    check_onnx_packages,
    input_names,
    load_onnx,
    load_pt2,
    trace,
    write_onnx,
    write_pt2,
)
from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, run
from modeling_elmo.run_scripts.program.files import check_model, load_pretrained
from modeling_elmo.run_scripts.vectors.embedding import load_model_and_tokenizer

EXAMPLE = Path(__file__).parent / "vectors" / "onnx_vectors.py"
AUTO_CLASSES = {
    "ELMoModel": AutoModel,
    "ELMoForPreTraining": AutoModel,  # its biLM
    "ELMoForTokenClassification": AutoModelForTokenClassification,
    "ELMoForSequenceClassification": AutoModelForSequenceClassification,
}
CHECKED_SENTENCES = [
    "The play was staged again last night , in a theatre that nobody had ever heard of before .",
    "They play chess .",
    "Was für eine Überraschung !",
    "눈이 내리는 날",
    "Rindfleischetikettierungsüberwachungsaufgabenübertragungsgesetz",  # longer than a word may be
]
LARGEST_DIFFERENCE = 1e-5  # of the largest value; float32 sums in another order differ by 1e-6


@dataclass(kw_only=True)
class ExportArguments:
    model: str = option(..., "Folder or Hub name of a biLM, or of a linear head for tags or texts.")
    output_dir: str = option(..., "New or empty folder for the exported model.")
    format: Literal["onnx", "pt2"] = option("onnx", "ONNX file, or exported program of torch (torch.export).")
    trust_remote_code: bool = option(False, "Run code from the model's folder.")


def main(arguments: list[str] | None = None) -> Path:
    """Returns the new folder."""
    parsed = ProgramParser(ExportArguments, description=__doc__).parse(arguments)
    output_dir, is_onnx = Path(parsed.output_dir), parsed.format == "onnx"
    check_empty(output_dir)
    if is_onnx:
        check_onnx_packages()
    model, tokenizer = load_exportable(parsed.model, parsed.trust_remote_code)
    write, load = (write_onnx, load_onnx) if is_onnx else (write_pt2, load_pt2)
    words = [sentence.split() for sentence in CHECKED_SENTENCES]
    options = {"is_split_into_words": True, "padding": True, "return_tensors": "pt"}
    batches = [tokenizer(sentences, **options) for sentences in (words, *([each] for each in words))]
    with staged(output_dir) as folder:
        folder.mkdir()
        file = folder / f"model.{parsed.format}"
        write(trace(model, batches[0]), file)
        difference, largest = compare(load(file), model, batches)
        print(f"Largest difference from the model: {difference:.1e}, in values of up to {largest:.2g}.")
        if not difference <= LARGEST_DIFFERENCE * largest:
            raise ValueError(
                f"That is more than {LARGEST_DIFFERENCE} of the largest value: {output_dir} is not written."
            )
        tokenizer.save_pretrained(folder)
        model.config.to_json_file(folder / "config.json")  # the names of labels
        if is_onnx and example_fits(model, tokenizer):
            shutil.copy(EXAMPLE, folder)
        size = file.stat().st_size
    print(f"Wrote {output_dir / file.name}, {size:,} bytes.")
    return output_dir


def load_exportable(name: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """The biLM or the head of a folder, in float32 on CPU, and its tokenizer."""
    check_model(name)
    config = load_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    [architecture] = config.architectures or ["ELMoModel"]
    if architecture not in AUTO_CLASSES:
        raise ValueError(
            f"--model {name} has the architecture {architecture}, which cannot be exported. Pass a biLM, or a head for "
            "tags or texts that was trained with --head linear."
        )
    model, tokenizer = load_model_and_tokenizer(name, "cpu", trust_remote_code, auto_class=AUTO_CLASSES[architecture])
    check_exportable(model)
    return model, tokenizer


@torch.no_grad()
def compare(exported: Exported, model, batches: list[dict[str, Tensor]]) -> tuple[float, float]:
    """The largest difference of all outputs from those of the model, and the model's largest value."""
    differences, values = [], []
    for batch in batches:
        inputs = {name: batch[name] for name in input_names(model)}
        found = exported(**inputs)
        for name, expected in NamedOutputs(model)(**inputs).items():
            differences.append((found[name] - expected).abs().max())
            values.append(expected.abs().max())
    return torch.stack(differences).max().item(), torch.stack(values).max().item()


def example_fits(model, tokenizer) -> bool:
    """Whether the example reads words as the tokenizer does, and the model gives a vector for each."""
    reads_bytes = (
        tokenizer.alphabet == "utf8" and not tokenizer.literal_markers and not model.config.word_embedding_size
    )
    return reads_bytes and isinstance(model, (ELMoModel, ELMoForTokenClassification))


if __name__ == "__main__":
    run(main)
