"""Models as programs that need no code of ours: an exported program of torch (`.pt2`), or an ONNX file.

    program = trace(model, inputs)                       # `inputs` from the tokenizer, two rows or more
    write_onnx(program, "model.onnx")
    outputs = load_onnx("model.onnx")(**other_inputs)    # any number of rows and words

`elmo export --help` lists inputs and outputs. No input is checked.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from modeling_elmo.elmo_head_layers import bio_constraints
from modeling_elmo.modeling_elmo import ELMoModel, ELMoPreTrainedModel
from modeling_elmo.modeling_elmo_heads import ELMoForSequenceClassification, ELMoForTokenClassification

PACKAGES_OF_ONNX = ("onnx", "onnxscript", "onnxruntime")
Exported = Callable[..., dict[str, Tensor]]  # inputs by name -> outputs by name


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
        if not isinstance(self.model, ELMoModel):
            predictions = output.get("predictions")
            return {"logits": output.logits} | ({} if predictions is None else {"predictions": predictions})
        mix = {} if output.elmo_embeddings is None else {"elmo_embeddings": output.elmo_embeddings}
        return {**mix, "hidden_states": torch.stack(output.hidden_states, 1)}


def input_names(model: ELMoPreTrainedModel) -> list[str]:
    """The inputs of an exported model."""
    config, is_head = model.config, not isinstance(model, ELMoModel)
    characters = ["character_ids"] if config.char_vocab_size else []
    # A CRF leaves out the markers, which `input_ids` show.
    reads_words = config.word_embedding_size or (is_head and not model.is_linear)
    words = ["input_ids"] if reads_words else []
    return [*characters, *words, "attention_mask"]


def check_exportable(model: ELMoPreTrainedModel):
    """Raises an error if the model cannot be exported, or if this release of torch cannot export it."""
    if not hasattr(torch.compiler, "is_exporting"):
        raise ImportError(f"Exporting needs torch 2.7 or newer, but this is torch {torch.__version__}.")
    heads, config = (ELMoForTokenClassification, ELMoForSequenceClassification), model.config
    is_text = isinstance(model, ELMoForSequenceClassification)
    is_readable = isinstance(model, (ELMoModel, *heads)) and not (is_text and not model.is_linear)
    obstacles = {
        f"with head={config.head!r}. Pass a biLM (ELMoModel), a tagger, or a head for texts that was trained with "
        "head='linear'": not is_readable,
        "in training mode. Call `model.eval()` before": model.training,
        "with weights in 8 bits. Export the model in float32, or what `model.dequantize()` returns": model._is_int8(),
        f"with scalar_mix_layer_norm={config.scalar_mix_layer_norm!r}, which is over a whole batch. Use a model with "
        "None or 'token'": config.scalar_mix_layer_norm in ("allennlp", "bilm"),
    }
    if found := [obstacle for obstacle, is_present in obstacles.items() if is_present]:
        raise ValueError(f"{type(model).__name__} cannot be exported {found[0]}.")


@torch.no_grad()
def trace(model: ELMoPreTrainedModel, inputs: Mapping[str, Tensor]) -> torch.export.ExportedProgram:
    """The model as `torch.export` sees it, for any number of rows and words.

    Args:
        model: in eval mode, on CPU. Cached words are not exported; their vectors are computed.
        inputs: an example, at least two rows of two words.
    """
    check_exportable(model)
    names = input_names(model)
    if isinstance(model, ELMoForTokenClassification):
        bio_constraints(model.label_names())  # remembered as constants, which a trace cannot make
    rows_and_words = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time")}
    with _without_cache(model), _quiet():
        return torch.export.export(
            NamedOutputs(model),
            (),
            {name: inputs[name] for name in names},
            dynamic_shapes=dict.fromkeys(names, rows_and_words),
            strict=False,
        )


def write_pt2(program: torch.export.ExportedProgram, path: str | Path):
    torch.export.save(program, path)


def load_pt2(path: str | Path) -> Exported:
    return torch.no_grad()(torch.export.load(path).module())


@torch.no_grad()
def write_onnx(program: torch.export.ExportedProgram, path: str | Path):
    """Writes one file with the weights inside: at most 2 GB."""
    check_onnx_packages()
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    outputs = program.call_spec.out_spec.context
    rows_and_words = {0: "batch", 1: "time"}
    with _quiet():
        written = torch.onnx.export(
            program,
            input_names=names,
            output_names=outputs,
            dynamic_shapes=dict.fromkeys(names, rows_and_words),
            dynamo=True,
            verbose=False,
        )
        written.save(path)


def load_onnx(path: str | Path, threads: int = 0) -> Exported:
    """An ONNX file in ONNX Runtime on CPU. `threads` is 0 for its own choice."""
    check_onnx_packages()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]

    def run(**inputs: Tensor) -> dict[str, Tensor]:
        arrays = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return dict(zip(names, map(torch.from_numpy, arrays), strict=True))

    return run


def check_onnx_packages():
    if missing := [name for name in PACKAGES_OF_ONNX if find_spec(name) is None]:
        raise ImportError(f'ONNX files need {", ".join(missing)}: pip install "modeling-elmo[export]"')


@contextmanager
def _without_cache(model: ELMoPreTrainedModel) -> Iterator[None]:
    """Takes out the vocabulary cache, which the traced program would carry but not read."""
    bilm = model.base_model
    cache, bilm.vocabulary_cache = bilm.vocabulary_cache, None
    try:
        yield
    finally:
        bilm.vocabulary_cache = cache


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences notes of torch's exporter to its developers, and about packages that ELMo does not use."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
