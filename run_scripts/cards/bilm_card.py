"""The card of a biLM: how it was trained or converted, its perplexity, and what its vectors encode.

It reads `results/`: `pretraining.json` has the settings, text and log of a biLM that was trained here, and
`conversion.json` the origin and the check of one that was converted. Experiments, nearest neighbours and word senses
may be there too, under any name.
"""

from pathlib import Path
from statistics import median
from typing import Any

from huggingface_hub import EvalResult

from modeling_elmo import ELMoConfig
from modeling_elmo.run_scripts.cards.card import read_result, write_card
from modeling_elmo.run_scripts.cards.figures import LogEntries, draw_curve, loss_kind
from modeling_elmo.run_scripts.cards.tables import ERRORS, one_line, probe_table, sense_table, summary_table
from modeling_elmo.run_scripts.program.files import read_json
from modeling_elmo.tokenization.elmo_characters import Utf8Alphabet

MOST_EVALUATIONS = 12  # rows of the card's table
SAME_PROTOCOL = ("predictions", "vocabulary_size", "protocol")  # perplexities that differ here cannot be compared


def write_bilm_card(folder: Path, name: str) -> Path:
    """Writes README.md for the biLM in `folder` and returns its path.

    The example loads `name`, a folder or a repository on the Hub, whose last part is the title.
    """
    config, run = ELMoConfig.from_pretrained(folder), read_result(folder, "pretraining")
    tokenizer = folder / "tokenizer_config.json"
    evaluations = [entry for entry in run.get("log", ()) if "perplexity" in entry]
    metadata = {
        "pipeline_tag": "feature-extraction",
        "tags": ["elmo", "bilm", "language-model", "lstm"],
        "metrics": ["perplexity"] if evaluations else None,
        "eval_results": [perplexity_result(run, evaluations)] if evaluations else None,
        "base_model": run.get("base_model_on_hub"),
    }
    experiments, findings = [], []
    for path in sorted((folder / "results").glob("*.json")):
        found = read_json(path)
        if is_experiment(found):
            experiments.append(experiment_values(path, found["records"]))
        elif isinstance(found, dict) and (shown := finding(found)):
            findings.append(found | {"figure": figure_beside(path), **shown})
    values = {
        "config": config,
        "name_to_load": name,
        "predicts_words": config.has_softmax and "ELMoForPreTraining" in (config.architectures or ()),
        "plain_signs": read_json(tokenizer).get("plain_signs", False) if tokenizer.is_file() else False,
        "reads_bytes": config.char_vocab_size == Utf8Alphabet.size,
        "pretraining": run,
        "conversion": read_result(folder, "conversion"),
        "experiments": experiments,
        "findings": findings,
        **(pretraining_values(folder, config, run, evaluations) if run else {}),
    }
    return write_card(folder, name.rpartition("/")[2], "bilm_card.md", metadata, values)


def perplexity_result(run: dict[str, Any], evaluations: LogEntries) -> EvalResult:
    """The result that the Hub shows for the model."""
    return EvalResult(
        task_type="language-modeling",
        dataset_type="local",
        dataset_name=one_line(run["data"]["validation"]),
        metric_type="perplexity",
        metric_value=round(published_evaluation(evaluations, run["published_step"])["perplexity"], 2),
    )


def published_evaluation(evaluations: LogEntries, step: int) -> dict[str, Any]:
    """The evaluation of the weights in the folder, or the last one if these weights were not evaluated."""
    return next((entry for entry in evaluations if entry["step"] == step), evaluations[-1])


def pretraining_values(
    folder: Path, config: ELMoConfig, run: dict[str, Any], evaluations: LogEntries
) -> dict[str, Any]:
    """The card's values about the training; also draws its curve."""
    steps = [entry for entry in run["log"] if "loss" in entry or "sampled_loss" in entry]
    last, trainings = steps[-1] if steps else {}, [*run.get("earlier_trainings", ()), run]
    return {
        "has_curve": draw_curve(trainings, config, folder / "curve.png"),
        "trainings": [training_values(training) for training in trainings],
        "changes": [each | {"settings": changed_settings(each, run)} for each in run.get("earlier_settings", ())],
        "words_per_second": median(entry["words_per_second"] for entry in steps) if steps else None,
        "last_training_step": last,
        "last_loss_kind": loss_kind("sampled_loss" if "sampled_loss" in last else "loss", config),
        **perplexity_values(run, evaluations),
    }


def training_values(run: dict[str, Any]) -> dict[str, Any]:
    """The row of a training in the table of several: how much it read, and its perplexity."""
    last = max(run["log"], key=lambda entry: entry["step"], default={"step": 0, "epoch": 0.0})
    evaluations = [entry for entry in run["log"] if "perplexity" in entry]
    found = published_evaluation(evaluations, run["published_step"]) if evaluations else {}
    return {"data": run["data"], **last, "perplexity": found.get("perplexity")}


def changed_settings(earlier: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """The names and earlier values of the settings that a resumed run changed."""
    before, after = earlier["settings"], run["settings"]
    names = sorted(name for name in after.keys() | before if after.get(name) != before.get(name))
    return [f"{name} {one_line(before.get(name, '(default)'))}" for name in names]


def perplexity_values(run: dict[str, Any], evaluations: LogEntries) -> dict[str, Any]:
    """The published perplexity, the one before the training, and the table of evaluations."""
    if not evaluations:
        return {}
    step = run["published_step"]
    found, start = published_evaluation(evaluations, step), evaluations[0]
    is_comparable = start["step"] == 0 < found["step"] and all(start[name] == found[name] for name in SAME_PROTOCOL)
    others = [entry["perplexity"] for entry in evaluations if entry["step"] not in (0, found["step"])]
    is_lowest = found["step"] == step and others and found["perplexity"] < min(others)
    return {
        "perplexity": found,
        "perplexity_before": start["perplexity"] if run["base_model"] and is_comparable else None,
        "lowest_of": len(others) + 1 if is_lowest else None,  # a minimum is slightly too low, and the card says so
        "evaluations": thinned(evaluations, found),
    }


def thinned(evaluations: LogEntries, found: dict[str, Any]) -> LogEntries:
    """At most `MOST_EVALUATIONS` entries, evenly over the run, including the first, the last and `found`."""
    last, gaps = len(evaluations) - 1, MOST_EVALUATIONS - 2
    if last < MOST_EVALUATIONS:
        return evaluations
    kept = {round(place * last / gaps) for place in range(gaps + 1)}
    return [entry for index, entry in enumerate(evaluations) if index in kept or entry is found]


def is_experiment(found: Any) -> bool:
    """Whether a fine-tuning run wrote this result; the folder may hold any other JSON."""
    records = found.get("records") if isinstance(found, dict) else None
    is_list = isinstance(records, list) and bool(records)
    return is_list and all(isinstance(each, dict) and {"arm", "metrics"} <= set(each) for each in records)


def experiment_values(path: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "title": path.stem.replace("_", " "),
        "metric": records[0]["metric"].replace("_", " "),
        "is_percent": records[0]["metric"] not in ERRORS,
        "settings": records[0].get("settings", {}),
        "splits": list(records[0]["metrics"]),
        "table": summary_table(records),
        "figure": figure_beside(path, "_layer_weights"),
    }


def finding(result: dict[str, Any]) -> dict[str, Any] | None:
    """The kind and the table of a result of `elmo senses`, `elmo probe` or `elmo neighbors`; `None` for others."""
    if "same_sense" in result:
        return {"kind": "senses", "table": sense_table(result)}
    if "metric" in result and any("scores" in result.get(split, ()) for split in ("validation", "test")):
        return {"kind": "probe", "table": probe_table(result)}
    return {"kind": "neighbors"} if {"word", "layer", "queries", "uses"} <= result.keys() else None


def figure_beside(path: Path, suffix: str = "") -> str | None:
    """The picture of a result, relative to the checkpoint's folder."""
    figure = path.with_name(f"{path.stem}{suffix}.png")
    return f"results/{figure.name}" if figure.exists() else None
