"""A user of models on the Hub: `python hub_worker.py [MODULE ...]` imports the modules and reads lines.

A line is JSON, `[name of a function below, its arguments]`. The answer is a line, `{"found": ...}` or `{"error": ...}`.
"""

import importlib
import io
import json
import os
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers import AutoTokenizer

TEXTS = ["He is in (London), Paris.", "Les naïfs ægithales"]
VOCABULARY = ["<S>", "</S>", "<UNK>", "He", "is", "in", "London"]


def outputs_of(model, tokenizer) -> list:
    """The logits of a head; else the layers."""
    with torch.no_grad():
        outputs = model.eval()(**tokenizer(TEXTS, padding=True, return_tensors="pt"), output_hidden_states=True)
    return (outputs.logits if "logits" in outputs else torch.stack(outputs.hidden_states)).tolist()


def push(repo: str) -> list:
    from modeling_elmo import ELMoConfig, ELMoModel, ELMoTokenizer

    tokenizer = ELMoTokenizer(vocab=VOCABULARY)
    model = ELMoModel(ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer)))
    for part in (model, tokenizer):
        part.push_to_hub(repo)
    return outputs_of(model, tokenizer)


def load(repo: str, auto_class: str = "AutoModel") -> dict:
    tokenizer = AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
    model = getattr(transformers, auto_class).from_pretrained(repo, trust_remote_code=True)
    return {"module": type(model).__module__, "class": type(model).__name__, "outputs": outputs_of(model, tokenizer)}


def load_part(repo: str, auto_class: str, **options) -> str:
    return type(getattr(transformers, auto_class).from_pretrained(repo, **options)).__module__


def pretrain(folder: str, **options):
    import pretraining_worker

    Path(folder).mkdir()
    pretraining_worker.pretrain(Path(folder), **options)


def tag(folder: str, **options):
    import task_worker

    task_worker.train_head("ner", Path(folder), **options)


def run_script(script: str, arguments: list[str]):
    importlib.import_module(f"modeling_elmo.run_scripts.{script}").main(arguments)


def answer(name: str, arguments: dict) -> dict:
    try:
        with mock.patch("time.sleep"):  # half a minute before huggingface_hub gives up
            return {"found": globals()[name](**arguments)}
    except BaseException as error:  # argparse exits
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main(modules: list[str]):
    for module in modules:
        importlib.import_module(module)
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # functions print to stderr, and only answers go to stdout
    sys.stdin = io.StringIO()  # transformers asks there whether code is trusted
    for line in asked:
        print(json.dumps(answer(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
