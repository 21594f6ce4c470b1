"""What the card of a head says that was trained on a frozen or learning biLM: what its run recorded."""

from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult

from modeling_elmo import ELMoConfig
from modeling_elmo.run_scripts.cards.card import Part, shown, table
from modeling_elmo.run_scripts.cards.tables import layer_names
from modeling_elmo.run_scripts.program.files import read_json

PIPELINES = {
    "ELMoForTokenClassification": "token-classification",
    "ELMoForSequenceClassification": "text-classification",
    "ELMoForQuestionAnswering": "question-answering",
}
NETWORKS = {
    "tagger": "biLSTMs and a linear-chain CRF (section 4 of the paper, named entities)",
    "bcn": "a biattentive classification network (McCann et al. 2017)",
    "esim": "ESIM, the enhanced sequential inference model (Chen et al. 2017)",
    "reader": "BiDAF with self-attention (Clark and Gardner 2017)",
    "linear": "one linear layer",
}

MOST_LABELS = 50

USAGE = """\
from transformers import pipeline

name = {path!r}  # path of this folder, or its full name on the Hub
ask = pipeline({pipeline!r}, model=name, trust_remote_code=True)
print(ask({example}))"""

INTENDED_USE = """\
The task and the kind of text that it was trained on, with a person who looks at what it says. For other text, label
some of it and measure first."""


def task_part(folder: Path, name: str, record: dict[str, Any] | None = None) -> Part:
    """The card of the head in `folder`, from its configuration and what its run recorded, by default `record.json`.

    A head that another Trainer or a loop has trained has no record, and its card no results.
    """
    config, path = ELMoConfig.from_pretrained(folder), folder / "record.json"
    record = record or (read_json(path) if path.exists() else {})
    settings, pipeline = record.get("settings", {}), PIPELINES[config.architectures[0]]
    is_pair = (
        "text_pair" in record["columns"]
        if record
        else pipeline == "text-classification" and config.classifier == "esim"
    )
    return Part(
        model=describe_model(config, settings.get("model_name_or_path")),
        usage=USAGE.format(path=name, pipeline=pipeline, example=example(pipeline, is_pair)),
        sections=recorded_sections(config, record) if record else [],
        intended_use=INTENDED_USE,
        limits=[
            "Its figures are of the data above. Text of another kind, time or language is read worse."
            if record
            else "How good it is was not recorded: measure it on text of yours.",
            "What the data and the biLM's training text say of people, it repeats.",
        ],
        pipeline_tag=pipeline,
        tags=["elmo"],
        metrics=[record["metric"]] if record else [],
        results=evaluation_results(pipeline, record) if record else [],
        base_model=record.get("base_model"),
    )


def recorded_sections(config: ELMoConfig, record: dict[str, Any]) -> list[tuple[str, str]]:
    settings = [[shown(key), shown(value)] for key, value in record["settings"].items() if value]
    return [
        ("Results", f"{describe_results(record, config)}\n\nProtocol: {protocol(record)}"),
        ("Data", describe_data(record)),
        ("Training", table(["setting", "value"], settings)),
    ]


def evaluation_results(pipeline: str, record: dict[str, Any]) -> list[EvalResult]:
    dataset = record.get("dataset")  # on the Hub
    return [
        EvalResult(
            task_type=pipeline,
            dataset_type=dataset or "local",
            dataset_name=dataset or "local files",
            dataset_split=split,
            metric_type=record["metric"],
            metric_value=round(scores[record["metric"]], 4),
        )
        for split, scores in record["metrics"].items()
    ]


def example(pipeline: str, is_pair: bool) -> str:
    if pipeline == "question-answering":
        return 'question="Where was it staged?", context="The play was staged in Paris."'
    return '{"text": "A man sleeps.", "text_pair": "Someone rests."}' if is_pair else '"It was staged in Paris."'


def describe_model(config: ELMoConfig, base_model: str | None) -> str:
    kinds = {"ELMoForTokenClassification": "tagger", "ELMoForQuestionAnswering": "reader"}
    network = "linear" if config.head == "linear" else kinds.get(config.architectures[0], config.classifier)
    reads = "word vectors and characters, without ELMo: a baseline"
    if config.use_elmo:
        place = "input and output" if config.elmo_placement == "both" else config.elmo_placement
        state = "frozen" if config.freeze_bilm else "trained with it"
        paper = "[Peters et al. 2018](https://arxiv.org/abs/1802.05365)"
        bilm = shown(base_model) if base_model else "a biLM, which is in it"
        reads = f"ELMo ({paper}) of {bilm}, {state}, at its {place}"
    described = f"Network: {NETWORKS[network]}. It reads {reads}."
    if config.architectures[0] == "ELMoForQuestionAnswering":
        return f"{described}\n\nAn answer is a span of the context."
    return f"{described}\n\nLabels: {shown(list(config.id2label.values()), most=MOST_LABELS)}."


def describe_results(record: dict[str, Any], config: ELMoConfig) -> str:
    names = [name for name, value in next(iter(record["metrics"].values())).items() if isinstance(value, (int, float))]
    rows = [[split, *(f"{scores[name]:.4f}" for name in names)] for split, scores in record["metrics"].items()]
    parts = [table(["split", *names], rows, "---:")]
    for place, weights in record["layer_weights"].items():
        shares = ", ".join(
            f"{name} {weight:.3f}"
            for name, weight in zip(layer_names({place: np.array(weights)}), weights, strict=True)
        )
        kind = "softmax of s" if config.scalar_mix_mode == "learned" else "fixed"
        parts.append(f"Layer weights ({kind}) at the {place}: {shares}.")
    return "\n\n".join(parts)


def protocol(record: dict[str, Any]) -> str:
    best = f"the one with the best `{record['metric']}` on the validation split"
    is_chosen = "validation" in record["metrics"] and record["settings"]["load_best_model_at_end"]
    chosen = best if is_chosen else "the last one"
    runs = f"one run, with seed {record['seed']}"
    if "best_of" in record:
        runs = f"the best of {record['best_of']} runs on the {record['best_on']} split, with seed {record['seed']}"
        if record["best_on"] == "test":
            runs += ", which makes the figure a little too good"
    return f"of all checkpoints {chosen}; {runs}."


def describe_data(record: dict[str, Any]) -> str:
    rows = [f"- {key.replace('_', ' ')}: {shown(value)}" for key, value in record["data"].items()]
    return "\n".join([*rows, f"- training examples: {record['train_samples']:,}"])
