"""The card of a task head, from its configuration and the record of its run."""

from pathlib import Path

from huggingface_hub import EvalResult

import modeling_elmo
from modeling_elmo import ELMoConfig
from modeling_elmo.heads.task_model import ELMoTaskModel

from .card import write_card
from .records import RunRecord, checked_record, last_metrics, metrics_on, splits_of
from .tables import class_table, layer_names

PIPELINE_TAGS = {
    "ELMoForTokenClassification": "token-classification",
    "ELMoForSequenceClassification": "text-classification",
    "ELMoForQuestionAnswering": "question-answering",
    "ELMoForSemanticRoleLabeling": "semantic-role-labeling",
    "ELMoForCoreferenceResolution": "coreference-resolution",
}
RECORD_KEYS = ("seed", "metric", "metrics", "layer_weights", "data", "columns", "train_samples", "settings")
WITHOUT_LABELS = ("question-answering", "coreference-resolution")
# Where the Hub has no tag of the pipeline's name.
HUB_TAGS = dict.fromkeys(("semantic-role-labeling", "coreference-resolution"), "token-classification")


def write_head_card(folder: Path, name: str, record: RunRecord | None = None) -> Path:
    """Writes README.md for the head in `folder` and returns its path; without a record, a card without results.

    The example loads `name`, a folder or a repository on the Hub, whose last part is the title.
    """
    config = ELMoConfig.from_pretrained(folder)
    path = folder / "record.json"
    if record is None:
        record = checked_record(path, RECORD_KEYS) if path.exists() else {}
    head_class: type[ELMoTaskModel] = getattr(modeling_elmo, config.architectures[0])
    tag = PIPELINE_TAGS[config.architectures[0]]
    hub_tag = HUB_TAGS.get(tag, tag)
    metadata = {
        "pipeline_tag": hub_tag,
        "tags": ["elmo"] if tag == hub_tag else ["elmo", tag],
        "metrics": [record["metric"]] if record else None,
        "eval_results": score_results(hub_tag, record) if record else None,
        "base_model": record.get("base_model"),
    }
    values = {
        "config": config,
        "name_to_load": name,
        "pipeline_tag": tag,
        "network": head_class.network_name(config),
        "elmo_placement": head_class.resolve_elmo_placement(config) if config.use_elmo else None,
        "labels": None if tag in WITHOUT_LABELS else shown_labels(config, tag),
        "is_pair": "text_pair" in record["columns"] if record else config.classifier == "esim",
        "record": record,
        "settings": {name: value for name, value in record.get("settings", {}).items() if value},
        "metrics": metrics_on([record], record.get("metrics", ())),
        "class_table": class_table(last_metrics(record)) if record else "",
        "last_split": splits_of([record])[-1] if record else None,
        "best_was_selected": "validation" in record.get("metrics", ()) and record["settings"]["load_best_model_at_end"],
        "layer_names": layer_names,
    }
    return write_card(folder, name.rpartition("/")[2], "head_card.md", metadata, values)


def score_results(task: str, record: RunRecord) -> list[EvalResult]:
    """The results that the Hub shows for the model, one per split."""
    dataset = record.get("dataset")  # on the Hub
    return [
        EvalResult(
            task_type=task,
            dataset_type=dataset or "local",
            dataset_name=dataset or "local files",
            dataset_split=split,
            metric_type=record["metric"],
            metric_value=round(scores[record["metric"]], 4),
        )
        for split, scores in record["metrics"].items()
    ]


def shown_labels(config: ELMoConfig, tag: str) -> list[str]:
    """The names of the labels; of semantic roles, which have two labels each, the roles."""
    names = list(config.id2label.values())
    if tag != "semantic-role-labeling":
        return names
    return list(dict.fromkeys(name[2:] for name in names if name != "O"))
