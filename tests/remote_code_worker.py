"""Uses saved folders without the package: `python remote_code_worker.py FOLDERS RESULTS RESAVED`.

`first_files` is for folders whose code raises an error, with the package and without it.

Loads every folder in FOLDERS under every Auto class and writes the outputs to RESULTS. Writes the results of stock
pipelines to a `.json` file of the same name. Then trains each model for a step and saves it in RESAVED.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, pipeline

TEXTS = ["He is in (London), Paris.", "Les naïfs ægithales", "밥 먹었어?"]
PAIR = {"text": TEXTS[0], "text_pair": TEXTS[1]}
PIPELINES = {
    "ELMoModel": ("feature-extraction", {}),
    "ELMoForTokenClassification": ("token-classification", {"aggregation_strategy": "simple"}),
    "ELMoForSequenceClassification": ("text-classification", {"top_k": None}),
    "ELMoForQuestionAnswering": ("question-answering", {"top_k": 3, "handle_impossible_answer": True}),
    "ELMoForSemanticRoleLabeling": ("semantic-role-labeling", {}),
    "ELMoForCoreferenceResolution": ("coreference-resolution", {}),
}
QUESTIONS = ["Where is he?", "Quelle ægithale ?", "밥?"]


def outputs_of(model, inputs) -> dict[str, torch.Tensor]:
    """The top layer, that of its biLM for a causal model, and what the class predicts."""
    is_causal = type(model).__name__ == "ELMoForCausalLM"
    with torch.no_grad():
        source = model.eval().elmo if is_causal else model.eval()
        outputs = source(**inputs, **types_for(model, inputs), output_hidden_states=True)
        if is_causal and model.config.has_softmax:
            outputs["logits"] = model(**inputs).logits
    found = {"hidden": outputs.hidden_states[-1].clone()}
    names = ("logits", "start_logits", "end_logits", "predicate_logits", "antecedent_scores")
    found |= {name: outputs[name] for name in names if name in outputs}
    return found


def types_for(model, inputs) -> dict[str, torch.Tensor]:
    """A reader needs types, here of contexts without a question. A row for roles marks its predicate."""
    kind, mask = type(model).__name__, inputs["attention_mask"]
    if kind == "ELMoForSemanticRoleLabeling":  # the first word, after the marker
        return {"token_type_ids": mask * (mask.cumsum(1) == 2)}
    return {"token_type_ids": mask} if kind == "ELMoForQuestionAnswering" else {}


def train_one_step(model, inputs):
    """Trains every parameter that is not frozen, with the loss of the class."""
    outputs = model.train()(**inputs, **types_for(model, inputs), **labels_for(model, inputs))
    loss = outputs.loss if "loss" in outputs else outputs.elmo_embeddings.square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def labels_for(model, inputs) -> dict[str, torch.Tensor]:
    kind = type(model).__name__
    if kind in ("ELMoForPreTraining", "ELMoForCausalLM"):
        return {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}
    if kind == "ELMoForQuestionAnswering":
        return dict.fromkeys(("start_positions", "end_positions"), inputs["attention_mask"][:, 0])
    if kind == "ELMoForSequenceClassification":
        return {"labels": inputs["attention_mask"][:, 0]}
    if kind == "ELMoForCoreferenceResolution":  # the first word of each text
        return {"mentions": torch.tensor([[row, 1, 1, 0] for row in range(len(inputs["input_ids"]))])}
    if kind == "ELMoForSemanticRoleLabeling":
        labels = types_for(model, inputs)["token_type_ids"]
        labels = labels.masked_fill(labels == 0, -100)  # of the predicate only
        return {"labels": labels, "predicate_labels": labels}
    return {"labels": torch.ones_like(inputs["input_ids"])} if kind == "ELMoForTokenClassification" else {}


def piped(name: str, **sources) -> list:
    """Results of the stock pipeline for a class. `sources` are arguments of `pipeline`: model, tokenizer, options."""
    task, options = PIPELINES[name]
    pipe = pipeline(task, **sources, **options)
    if task == "question-answering":
        return pipe(question=QUESTIONS, context=TEXTS, max_seq_len=12, doc_stride=2)
    if task == "semantic-role-labeling":
        return [pipe(TEXTS, predicates=[[0, 2, 1]] * 3, batch_size=2), pipe(TEXTS)]
    if task == "coreference-resolution":
        return [pipe(TEXTS), pipe([text.split() for text in TEXTS])]
    return [pipe(text) for text in (TEXTS if task != "text-classification" else [*TEXTS, PAIR])]


def load(folder: Path) -> dict[str, torch.nn.Module]:
    """The folder's model under each Auto class of its Auto map."""
    auto_map = AutoConfig.from_pretrained(folder, trust_remote_code=True).auto_map
    names = [name for name in auto_map if name.startswith("AutoModel")]
    return {name: getattr(transformers, name).from_pretrained(folder, trust_remote_code=True) for name in names}


def spoil(folder: Path):
    """Replaces the code of the folder: a file that runs writes its name to `ran`, and raises an error."""
    for file in folder.glob("*.py"):
        log, line = str(folder / "ran"), f"{file.name}\n"
        file.write_text(f"open({log!r}, 'a').write({line!r})\nraise SystemError('the folder runs')\n")


def first_files(folder: Path) -> dict[str, list[str]]:
    """The file of a spoilt folder that runs first in each call, without the flag and with it.

    "" if none does, and "refused" if transformers asks for the flag.
    """
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    calls = {auto: getattr(transformers, auto).from_pretrained for auto in [*auto_map, "AutoTokenizer"]}
    calls["pipeline"] = partial(pipeline, PIPELINES[folder.name][0])
    found: dict[str, list[str]] = {}
    for call, load in calls.items():
        for options in ({}, {"trust_remote_code": True}):
            found.setdefault(call, []).append(first_file(folder, partial(load, str(folder), **options)))
    return found


def first_file(folder: Path, load: Callable[[], Any]) -> str:
    ran, is_refused = folder / "ran", False
    try:
        load()
    except Exception as error:
        is_refused = "trust_remote_code=True" in str(error)
        if not (is_refused or ran.exists()):
            raise
    names = ran.read_text().split() if ran.exists() else []
    ran.unlink(missing_ok=True)
    return names[0] if names else "refused" if is_refused else ""


def main(folders: Path, results: Path, resaved: Path):
    assert importlib.util.find_spec("modeling_elmo") is None, "this test needs a python without the package"
    found, said = {}, {}
    for folder in sorted(folders.iterdir()):
        if folder.name in PIPELINES:
            said[folder.name] = piped(folder.name, model=str(folder), trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
        found |= {f"{folder.name}/inputs/{key}": value for key, value in inputs.items()}
        for auto_class, model in load(folder).items():
            found |= {f"{folder.name}/{auto_class}/{key}": value for key, value in outputs_of(model, inputs).items()}
            if type(model).__name__ == folder.name:
                train_one_step(model, inputs)
                model.save_pretrained(resaved / folder.name)
                tokenizer.save_pretrained(resaved / folder.name)
                found |= {f"{folder.name}/trained/{key}": value for key, value in outputs_of(model, inputs).items()}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, results)
    results.with_suffix(".json").write_text(json.dumps(said, default=float))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
