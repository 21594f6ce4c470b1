"""Exports a model for ONNX Runtime, or for torch alone: neither transformers nor this package is needed to run it.

    elmo export --model DIR --output_dir DIR_ONNX
    elmo export --model DIR --format pt2 --output_dir DIR_PT2

The new folder has `model.onnx` or `model.pt2`, the tokenizer, the configuration, and for ONNX an example script, of a
tagger two: `onnx_vectors.py` spells words, and `onnx_tags.py` prints words with their tags. The folder is written only
if the exported model agrees with the model on a few sentences.

Inputs:
    `character_ids` `(batch, time, max_word_length)`; `input_ids` `(batch, time)` for models with word vectors or a CRF;
    `attention_mask` `(batch, time)`. All are int64, of any batch and time. Each row is one text from a zero state:
    `token_type_ids` and `initial_states` are not exported.

Outputs, in float32:
    biLM: `elmo_embeddings` `(batch, time, hidden_size)`, the mix; `hidden_states` `(batch, layers + 1, time,
    hidden_size)`. Heads: `logits`, `(batch, time, num_labels)` for tags, `(batch, num_labels)` for texts. With a CRF
    also `predictions` `(batch, time)`, the best sequence of labels, -100 where there is no word.
"""

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.utils import CONFIG_NAME

from modeling_elmo import (
    ELMoConfig,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
    ELMoModel,
    ELMoPreTrainedModel,
)
from modeling_elmo.conversion.files import check_empty, staged
from modeling_elmo.heads.crf import bio_constraints
from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, print_conclusion, require, run
from modeling_elmo.run_scripts.program.files import read_json, write_json
from modeling_elmo.run_scripts.program.models import check_model, load_pretrained
from modeling_elmo.run_scripts.vectors.embedding import load_model_and_tokenizer

EXAMPLE = Path(__file__).parent / "vectors" / "onnx_vectors.py"
EXAMPLE_OF_TAGS = EXAMPLE.with_name("onnx_tags.py")
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
PACKAGES_OF_ONNX = ("onnx", "onnxscript", "onnxruntime")
VECTORS = ("elmo_embeddings", "hidden_states")  # outputs; the other ones are logits and labels
LARGEST_DIFFERENCE = 1e-5  # of a vector's largest value; float32 sums in another order differ by 1e-6


@dataclass(kw_only=True)
class ExportArguments:
    model: str = option(..., "Folder or Hub name of a biLM, a tagger, or a linear head for texts.")
    output_dir: str = option(..., "New or empty folder for the exported model.")
    format: Literal["onnx", "pt2"] = option("onnx", "ONNX file, or exported program of torch (torch.export).")
    trust_remote_code: bool = option(False, "Run code from the model's folder.")


def main(arguments: list[str] | None = None) -> Path:
    """Returns the new folder."""
    parsed = ProgramParser(ExportArguments, description=__doc__).parse(arguments)
    output_dir, is_onnx = Path(parsed.output_dir), parsed.format == "onnx"
    check_empty(output_dir)
    for package in PACKAGES_OF_ONNX if is_onnx else ():
        require(package, extra="export", purpose="an ONNX file")
    model, tokenizer = load_exportable(parsed.model, parsed.trust_remote_code)
    words = [sentence.split() for sentence in CHECKED_SENTENCES]
    options = {"is_split_into_words": True, "padding": True, "return_tensors": "pt"}
    encoded = (tokenizer(sentences, **options) for sentences in (words, *([each] for each in words)))
    batches = [{name: each[name] for name in input_names(model)} for each in encoded]
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # without notes of torch to its developers
    with staged(output_dir) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same notes
        folder.mkdir()
        file = folder / f"model.{parsed.format}"
        program = trace(model, batches[0])
        if is_onnx:
            write_onnx(program, file)
            exported = load_onnx(file)
        else:
            torch.export.save(program, file)
            exported = torch.export.load(file).module()
        difference = compare(exported, model, batches)
        print(f"Largest difference from the model: {difference:.1e} of a vector's largest value, of a logit, or of 1.")
        if not difference <= LARGEST_DIFFERENCE:
            raise ValueError(f"That is more than {LARGEST_DIFFERENCE}: {output_dir} is not written.")
        tokenizer.save_pretrained(folder)
        write_config(model.config, folder)
        examples = examples_for(model, tokenizer) if is_onnx else []
        for example in examples:
            shutil.copy(example, folder)
        size = file.stat().st_size
    print_conclusion(
        f"Wrote {output_dir / file.name}, {size:,} bytes; outputs differ from the model's by up to {difference:.1e}.",
        *command_to_run(output_dir / file.name, examples),
    )
    return output_dir


def load_exportable(name: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """The biLM or the head of a folder, in float32 on CPU, and its tokenizer."""
    check_model(name)
    config = load_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    [architecture] = config.architectures or ["ELMoModel"]
    if architecture not in AUTO_CLASSES:
        raise ValueError(f"--model {name} is {architecture}; pass a biLM, a tagger or a linear head for texts.")
    model, tokenizer = load_model_and_tokenizer(name, "cpu", trust_remote_code, auto_class=AUTO_CLASSES[architecture])
    check_exportable(model)
    model.base_model.drop_cache()  # the program would carry the cached words, but not read them
    return model, tokenizer


def check_exportable(model: ELMoPreTrainedModel):
    config = model.config
    is_paper = isinstance(model, ELMoForSequenceClassification) and not model.is_linear
    obstacles = {
        f"with head={config.head!r}. Pass a head that was trained with head='linear'": is_paper,
        "with weights in 8 bits. Export the model in float32, or what `model.dequantize()` returns": model._is_int8(),
        f"with scalar_mix_layer_norm={config.scalar_mix_layer_norm!r}, which is over a whole batch. Use a model with "
        "None or 'token'": config.scalar_mix_layer_norm in ("allennlp", "bilm"),
    }
    if found := [obstacle for obstacle, is_present in obstacles.items() if is_present]:
        raise ValueError(f"{type(model).__name__} cannot be exported {found[0]}.")


def input_names(model: ELMoPreTrainedModel) -> list[str]:
    characters = ["character_ids"] if model.config.char_vocab_size else []
    # A CRF leaves out the markers, which only `input_ids` show.
    words = ["input_ids"] if model.config.word_embedding_size or has_crf(model) else []
    return [*characters, *words, "attention_mask"]


def has_crf(model: ELMoPreTrainedModel) -> bool:
    return isinstance(model, ELMoForTokenClassification) and not model.is_linear


def command_to_run(file: Path, examples: Sequence[Path]) -> list[str]:
    """The command that runs an exported model: the last of its examples, or Python that loads it."""
    if examples:
        return ["python", str(file.with_name(examples[-1].name)), CHECKED_SENTENCES[1]]
    path = json.dumps(file.as_posix(), ensure_ascii=False)
    if file.suffix == ".pt2":
        return ["python", "-c", f"import torch; print(torch.export.load({path}).graph_signature)"]
    session = f"onnxruntime.InferenceSession({path})"
    return ["python", "-c", f"import onnxruntime; print(*{session}.get_inputs(), sep='\\n')"]


class NamedOutputs(nn.Module):
    """A model whose outputs are plain tensors by name, without a class of transformers."""

    def __init__(self, model: ELMoPreTrainedModel):
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(
        self, character_ids: Tensor | None = None, input_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        output = self.model(
            character_ids=character_ids, input_ids=input_ids, attention_mask=attention_mask, return_dict=True
        )
        if has_crf(self.model):
            return {"logits": output.logits, "predictions": output.predictions}
        if not isinstance(self.model, ELMoModel):
            return {"logits": output.logits}
        mix = {} if output.elmo_embeddings is None else {"elmo_embeddings": output.elmo_embeddings}
        return {**mix, "hidden_states": torch.stack(output.hidden_states, 1)}


@torch.no_grad()
def trace(model: ELMoPreTrainedModel, inputs: dict[str, Tensor]) -> torch.export.ExportedProgram:
    """The model in eval mode for any number of rows and words. The example `inputs` have two or more of both."""
    if has_crf(model):
        bio_constraints(model.label_names())  # remembered as constants, which a trace could not make
    rows_and_words = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time")}
    shapes = dict.fromkeys(inputs, rows_and_words)
    return torch.export.export(NamedOutputs(model), (), inputs, dynamic_shapes=shapes, strict=False)


@torch.no_grad()
def write_onnx(program: torch.export.ExportedProgram, path: Path):
    """Writes one file with the weights inside: at most 2 GB."""
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    written = torch.onnx.export(
        program,
        input_names=names,
        output_names=program.call_spec.out_spec.context,
        dynamic_shapes=dict.fromkeys(names, {0: "batch", 1: "time"}),
        dynamo=True,
        verbose=False,
    )
    written.save(path)


def load_onnx(path: Path) -> Callable[..., dict[str, Tensor]]:
    """An ONNX file in ONNX Runtime on CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]

    def run_session(**inputs: Tensor) -> dict[str, Tensor]:
        arrays = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return dict(zip(names, map(torch.from_numpy, arrays), strict=True))

    return run_session


@torch.no_grad()
def compare(exported: Callable[..., dict[str, Tensor]], model, batches: list[dict[str, Tensor]]) -> float:
    """The largest difference of all outputs from those of the model, relative to values above 1.

    All values of a vector are rounded as its largest one is: they come from sums of all values before.
    """
    differences = []
    for inputs in batches:
        found = exported(**inputs)
        for name, expected in NamedOutputs(model)(**inputs).items():
            expected = expected.double()
            size = expected.abs().amax(-1, keepdim=True) if name in VECTORS else expected.abs()
            differences.append(((found[name] - expected).abs() / size.clamp(min=1)).max())
    return torch.stack(differences).max().item()


def write_config(config: ELMoConfig, folder: Path):
    """Writes the configuration, which names the labels, with its code, so that `AutoTokenizer` knows the model type."""
    config.save_pretrained(folder)
    path = folder / CONFIG_NAME
    values = read_json(path)
    values["auto_map"] = {"AutoConfig": values["auto_map"]["AutoConfig"]}
    write_json(path, values)
    (folder / "modeling_elmo.py").unlink()  # the model itself is in the exported file


def examples_for(model, tokenizer) -> list[Path]:
    """The examples that read words as the tokenizer does, and print a vector or a tag for each."""
    if tokenizer.alphabet != "utf8" or tokenizer.literal_markers or model.config.word_embedding_size:
        return []
    if isinstance(model, ELMoForTokenClassification):
        return [EXAMPLE, EXAMPLE_OF_TAGS]
    return [EXAMPLE] if isinstance(model, ELMoModel) else []


if __name__ == "__main__":
    run(main)
