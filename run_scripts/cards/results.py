"""The folder `results/` of a run or an experiment: its records, their tables and figures."""

from pathlib import Path

from ..program.command_line import print_conclusion
from ..program.files import write_json, write_lines
from .figures import draw_ablation, draw_confusion, draw_data_curve, draw_layer_weights
from .records import RunRecords, best_record, last_metrics, splits_of
from .tables import class_table, comparison, finding, results_report, score_table, summary_table


def report(records: RunRecords, folder: Path, model: Path | str, ablation: str | None = None, change: str = ""):
    """Prints the tables of all runs, and writes them to `results/` with the records and figures.

    Args:
        model: folder of the model to evaluate next.
        change: sentence for the end, with what the training has changed.
    """
    name = write_results(folder, records, ablation)
    results = folder / "results"
    picture = results / f"{name}.png"
    print(summary_table(records))
    scores = score_table(records)
    if scores:
        print(f"\n{scores}")
    if any(record["layer_weights"] for record in records):
        draw_layer_weights(records, results / f"{name}_layer_weights.png")
    arms = {record["arm"] for record in records}
    if ablation == "data":
        draw_data_curve(records, picture)
    elif len(arms) > 1:
        draw_ablation(records, picture)
    best = best_record(records)
    metrics = last_metrics(best)
    classes = class_table(metrics)
    if classes:
        whose = f" of {best['arm']}, seed {best['seed']}" if len(records) > 1 else ""
        print(f"\nClasses{whose} on {splits_of([best])[-1]}, in percent:\n\n{classes}\n")
    if "confusion" in metrics:
        draw_confusion(metrics["confusion"], [*metrics["per_label"]], results / f"{name}_confusion.png")
    print(f"{results}: {name}.json, {name}.md and figures")
    sentence = finding(metrics, best["metric"], splits_of([best])[-1])
    if len(records) > 1:
        sentence = comparison(records)
    print_conclusion(sentence + change, "elmo", "evaluate", model, "FILE")


def write_results(folder: Path, records: RunRecords, ablation: str | None = None) -> str:
    """Writes `results/NAME.json`, the records, and `results/NAME.md`, their tables; returns NAME."""
    first = records[0]
    name = first["task"]
    if ablation:
        name += f"_{ablation}"
    if "ensemble" in first.get("settings", ()):
        name += "_ensemble"
    results = folder / "results"
    tables = results_report(name, records)
    write_json(results / f"{name}.json", {"records": list(records)})
    write_lines(results / f"{name}.md", [tables])
    return name
