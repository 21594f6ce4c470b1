"""The card of a biLM: how it was trained or converted, its perplexity, and what its vectors encode.

It reads `results/`: `pretraining.json` has the settings, text and log of a biLM that was trained here, and
`conversion.json` the origin and the check of one that was converted. Experiments, and results of `elmo senses`,
`elmo probe` and `elmo pairs` may be there too, under any name.
"""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from huggingface_hub import EvalResult

from modeling_elmo import ELMoConfig
from modeling_elmo.run_scripts.cards.card import read_result, write_card
from modeling_elmo.run_scripts.cards.figures import LogEntries, draw_curve
from modeling_elmo.run_scripts.cards.tables import (
    NO_SCORES,
    RunRecord,
    by_arm,
    layer_names,
    markdown_table,
    one_line,
    score_cell,
    scores_on,
    splits_of,
)
from modeling_elmo.run_scripts.program.files import read_json
from modeling_elmo.tokenization.elmo_characters import Utf8Alphabet

SAME_PROTOCOL = ("predictions", "vocabulary_size", "protocol")  # perplexities that differ here cannot be compared


def write_bilm_card(folder: Path, name: str) -> Path:
    """Writes README.md for the biLM in `folder` and returns its path.

    The example loads `name`, a folder or a repository on the Hub, whose last part is the title.
    """
    config, run = ELMoConfig.from_pretrained(folder), read_result(folder, "pretraining")
    evaluations = [entry for entry in run.get("log", ()) if "perplexity" in entry]
    metadata = {
        "pipeline_tag": "feature-extraction",
        "tags": ["elmo", "bilm", "language-model", "lstm"],
        "metrics": ["perplexity"] if evaluations else None,
        "eval_results": [perplexity_result(run, evaluations)] if evaluations else None,
        "base_model": run.get("base_model_on_hub"),
    }
    results = {path: read_json(path) for path in sorted((folder / "results").glob("*.json"))}
    experiments = {path: found["records"] for path, found in results.items() if is_experiment(found)}
    scores = {path: rows for path, found in results.items() if (rows := scores_by_layer(path, found))}
    pictures = [path.with_name(f"{path.stem}_layer_weights.png") for path in experiments]
    pictures += [path.with_suffix(".png") for path in scores]
    values = {
        "config": config,
        "name_to_load": name,
        "predicts_words": config.has_softmax and "ELMoForPreTraining" in (config.architectures or ()),
        "reads_bytes": config.char_vocab_size == Utf8Alphabet.size,
        "pretraining": run,
        "conversion": read_result(folder, "conversion"),
        "experiments_table": experiments_table(experiments) if experiments else None,
        "seeds": sorted({len(runs) for records in experiments.values() for runs in by_arm(records).values()}),
        "layers_table": layers_table(scores.values(), config.num_hidden_layers + 1) if scores else None,
        "pictures": {title_of(path): path.name for path in pictures if path.exists()},
        "settings": run.get("settings"),
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
    trainings = [*run.get("earlier_trainings", ()), run]
    speeds = [entry["words_per_second"] for entry in run["log"] if "words_per_second" in entry]
    return {
        "has_curve": draw_curve(trainings, config, folder / "curve.png"),
        "trainings": [training_values(training) for training in trainings],
        "changed_at": [f"{each['until_step']:,}" for each in run.get("earlier_settings", ())],
        "words_per_second": median(speeds) if speeds else None,
        **perplexity_values(run, evaluations),
    }


def training_values(run: dict[str, Any]) -> dict[str, Any]:
    """The row of a training in the table of several: how much it read, and its perplexity."""
    last = max(run["log"], key=lambda entry: entry["step"], default={"step": 0, "epoch": 0.0})
    evaluations = [entry for entry in run["log"] if "perplexity" in entry]
    found = published_evaluation(evaluations, run["published_step"]) if evaluations else {}
    return {"data": run["data"], **last, "perplexity": found.get("perplexity")}


def perplexity_values(run: dict[str, Any], evaluations: LogEntries) -> dict[str, Any]:
    """The published perplexity and the one before the training."""
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
    }


def is_experiment(found: Any) -> bool:
    """Whether a fine-tuning run wrote this result; the folder may hold any other JSON."""
    records = found.get("records") if isinstance(found, dict) else None
    is_list = isinstance(records, list) and bool(records)
    return is_list and all(isinstance(each, dict) and {"arm", "metrics"} <= set(each) for each in records)


def experiments_table(experiments: dict[Path, list[RunRecord]]) -> str:
    """A row per experiment with its scores on the last split, and a column per arm."""
    arms = {path: by_arm(records) for path, records in experiments.items()}
    names = list(dict.fromkeys(chain.from_iterable(arms.values())))
    rows = [["task", *names]]
    for path, records in experiments.items():
        metric, splits, settings = records[0]["metric"], splits_of(records), records[0].get("settings", {})
        selects = settings.get("load_best_model_at_end") and splits == ["validation"]
        notes = {
            f"on {splits[-1]}{', which selected the epoch' if selects else ''}": splits[-1] != "test",
            "linear layer": settings.get("head") == "linear",
            "biLM trained": not settings.get("freeze_bilm", True),
            settings.get("word_vectors"): settings.get("word_vectors"),
        }
        title = [title_of(path), metric.replace("_", " "), *(note for note in notes if notes[note])]
        cells = (score_cell(scores_on(arms[path].get(name, ()), splits[-1], metric), metric) for name in names)
        rows.append([", ".join(title), *(cell.replace(" ", "") for cell in cells)])
    return markdown_table(rows)


def scores_by_layer(path: Path, found: Any) -> dict[str, dict[str, float]]:
    """The rows of a result of `elmo senses`, `elmo probe` or `elmo pairs` by their titles; none of other results."""
    rows: dict[str, dict[str, float]] = {}
    if isinstance(found, dict) and "same_sense" in found:
        means = found.get("disambiguation", {})
        rows["nearest use has the same sense"] = found["same_sense"]
        rows[f"sense with the nearest mean vector{', else the first' if 'first sense' in means else ''}"] = means
    elif isinstance(found, dict) and "metric" in found:
        for split in ("validation", "test"):
            if "scores" in found.get(split, ()):
                scores = {name: each[found["metric"]] for name, each in found[split]["scores"].items()}
                rows = {f"{found['metric']} of a linear layer on {split}": scores}
    elif isinstance(found, dict) and "both" in (found.get("all") or ()):
        rows["accuracy"] = {"both directions": found["all"]["both"]}
    return {f"{title_of(path)}: {name}": scores for name, scores in rows.items() if scores}


def layers_table(results: Iterable[dict[str, dict[str, float]]], layers: int) -> str:
    """A row per measure: the scores of the layers, and in the last column those of all others, such as baselines."""
    names = layer_names(layers)
    table = [["", *names, "others"]]
    for title, scores in chain.from_iterable(rows.items() for rows in results):
        cells = {name: f"{100 * score:.1f}" for name, score in scores.items() if name not in NO_SCORES}
        others = ", ".join(f"{name} {cell}" for name, cell in cells.items() if name not in names)
        table.append([title, *(cells.get(name, "") for name in names), others])
    return markdown_table(table)


def title_of(path: Path) -> str:
    return path.stem.replace("_", " ")
