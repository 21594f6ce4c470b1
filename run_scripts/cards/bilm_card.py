"""The card of a biLM: how it was trained or converted, its perplexity, and what its vectors encode.

It reads `results/`: `pretraining.json` has the settings, text and log of a biLM that was trained here, and
`conversion.json` the origin and the check of one that was converted. Results of `elmo senses`, `elmo probe` and
`elmo pairs` may be there too, under any name.
"""

from operator import itemgetter
from pathlib import Path
from statistics import median

from huggingface_hub import EvalResult

from modeling_elmo import ELMoConfig
from modeling_elmo.tokenization.elmo_characters import Utf8Alphabet

from ..program.files import JsonObject, read_json
from .card import CardValues, read_result, write_card
from .figures import LogEntries, draw_curve
from .tables import LayerScores, layer_names, object_in, one_line, probe_scores, sense_scores

PRETRAINING_KEYS = ("data", "log", "base_model", "published_step")  # of a record; others may be missing
CONVERSION_KEYS = ("origin", "arrays", "equal_arrays", "files")
SAME_PROTOCOL = ("predictions", "vocabulary_size", "protocol")  # perplexities that differ here cannot be compared


def write_bilm_card(folder: Path, name: str) -> Path:
    """Writes README.md for the biLM in `folder` and returns its path.

    The example loads `name`, a folder or a repository on the Hub, whose last part is the title.
    """
    config = ELMoConfig.from_pretrained(folder)
    run = read_result(folder, "pretraining", PRETRAINING_KEYS)
    published = published_evaluation(run)
    metadata = {
        "pipeline_tag": "feature-extraction",
        "tags": ["elmo", "bilm", "language-model", "lstm"],
        "base_model": run.get("base_model_on_hub"),
    }
    if published:
        result = EvalResult(
            task_type="language-modeling",
            dataset_type="local",
            dataset_name=one_line(run["data"]["validation"]),
            metric_type="perplexity",
            metric_value=round(published["perplexity"], 2),
        )
        metadata |= {"metrics": ["perplexity"], "eval_results": [result]}
    values = {
        "config": config,
        "name_to_load": name,
        "predicts_words": config.has_softmax and "ELMoForPreTraining" in (config.architectures or ()),
        "reads_bytes": config.char_vocab_size == Utf8Alphabet.size,
        "pretraining": run,
        "conversion": read_result(folder, "conversion", CONVERSION_KEYS),
        "layers": layer_names(config.num_hidden_layers + 1),
        "settings": run.get("settings"),
        **analysis_values(folder / "results"),
    }
    if run:
        values |= pretraining_values(folder, config, run)
    return write_card(folder, name.rpartition("/")[2], "bilm_card.md", metadata, values)


def evaluations_of(run: JsonObject) -> LogEntries:
    return [entry for entry in run.get("log", ()) if "perplexity" in entry]


def analysis_values(results: Path) -> CardValues:
    """The card's values about what the vectors encode: scores of layers, and the names of pictures."""
    scores = {}
    pictures = []
    for path in sorted(results.glob("*.json")):
        result = read_json(path)
        if not isinstance(result, dict):
            continue
        scores |= scores_by_layer(path.stem, result)
        if "same_sense" in result and path.with_suffix(".png").exists():
            pictures.append(path.stem)
    return {"scores_by_layer": scores, "pictures": pictures}


def published_evaluation(run: JsonObject) -> JsonObject:
    """The evaluation of the weights in the folder, or the last one if these were not evaluated; empty without any."""
    evaluation = {}
    for evaluation in evaluations_of(run):
        if evaluation["step"] == run["published_step"]:
            break
    return evaluation


def pretraining_values(folder: Path, config: ELMoConfig, run: JsonObject) -> CardValues:
    """The card's values about the training; also draws its curve."""
    trainings = [*run.get("earlier_trainings", ()), run]
    speeds = [entry["words_per_second"] for entry in run["log"] if "words_per_second" in entry]
    earlier_settings = run.get("earlier_settings", ())
    return {
        "has_curve": draw_curve(trainings, config, folder / "curve.png"),
        "trainings": map(training_values, trainings),
        "changed_at": [f"{settings['until_step']:,}" for settings in earlier_settings],
        "words_per_second": median(speeds) if speeds else None,
        **perplexity_values(run),
    }


def training_values(run: JsonObject) -> CardValues:
    """The row of a training in the table of several: how much it read, and its perplexity."""
    last = max(run["log"], key=itemgetter("step"), default={"step": 0, "epoch": 0.0})
    perplexity = published_evaluation(run).get("perplexity")
    return {"data": run["data"], **last, "perplexity": perplexity}


def perplexity_values(run: JsonObject) -> CardValues:
    """The published perplexity and the one before the training."""
    published = published_evaluation(run)
    if not published:
        return {}
    step = published["step"]
    evaluations = evaluations_of(run)
    start = evaluations[0]
    values: CardValues = {"perplexity": published}
    is_comparable = all(start[name] == published[name] for name in SAME_PROTOCOL)
    if run["base_model"] and start["step"] == 0 < step and is_comparable:
        values["perplexity_before"] = start["perplexity"]
    others = [entry["perplexity"] for entry in evaluations if entry["step"] not in (0, step)]
    if others and step == run["published_step"] and published["perplexity"] < min(others):
        values["lowest_of"] = len(others) + 1  # a minimum is slightly too low, and the card says so
    return values


def scores_by_layer(name: str, result: JsonObject) -> dict[str, LayerScores]:
    """The scores in a result of `elmo senses`, `elmo probe` or `elmo pairs`, by title; other results have none."""
    titled = {}
    scores = sense_scores(result)
    if "same_sense" in scores:
        titled["nearest use has the same sense"] = scores["same_sense"]
        if accuracies := scores.get("disambiguation"):
            else_first = ", else the first" if "first sense" in accuracies else ""
            titled[f"sense with the nearest mean vector{else_first}"] = accuracies
    elif "metric" in result:
        for split, accuracies in probe_scores(result).items():  # of the test data, if there are any
            titled = {f"{result['metric']} of a linear layer on {split}": accuracies}
    elif "both" in object_in(result, "all"):
        titled["accuracy"] = {"both directions": result["all"]["both"]}
    return {f"{name}: {title}": scores for title, scores in titled.items()}
