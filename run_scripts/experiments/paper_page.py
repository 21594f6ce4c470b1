"""One page with the results of a plan: tables and figures like the paper's, with the paper's lines next to ours."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..cards.bilm_card import evaluations_of, published_evaluation
from ..cards.figures import draw_layer_weights
from ..cards.records import RunRecord, RunRecords, by_arm, last_metrics, mean_layer_weights
from ..cards.tables import (
    error_reduction,
    layer_table,
    markdown_table,
    probe_scores,
    probe_table,
    score_cell,
    sense_table,
)
from ..program.files import JsonObject, write_lines
from .reports import results_of

PAGE_BEGIN, PAGE_END = "<!-- elmo reproduce all: begin -->", "<!-- elmo reproduce all: end -->"
FIGURE = "layer_weights.png"
TABLE_1 = "Table 1: what does ELMo add?"
QUANTILE = 0.975  # the upper end of an interval of 95 % confidence
AS_IT_WAS, FURTHER = "the biLM as it was", "trained further"
# The changes that the paper makes, by table: the arm before and the arm after it.
CHANGES = {
    "1": [("baseline", "elmo")],
    "2": [
        ("baseline", "top layer"),
        ("top layer", "average"),
        ("top layer", "learned, lambda 1"),
        ("learned, lambda 1", "learned, lambda 0.001"),
    ],
    "3": [("output", "input"), ("input", "both")],
    "figure 1": [("baseline@1.0", "elmo@0.1"), ("baseline@1.0", "elmo@1.0")],
}
LAYERS = ("biLSTM 1", "biLSTM 2")  # Tables 5 and 6 compare these two, without seeds
ARMS_OF_TABLE_1 = ("baseline", "elmo")
# The programs of each table, and the scores that a line of the paper must have there, besides its task.
SCORES_OF_THE_PAPER: dict[tuple[str, str], Sequence[str]] = {
    ("1", "reproduce"): ARMS_OF_TABLE_1,
    ("2", "reproduce"): (),
    ("3", "reproduce"): (),
    ("4", "neighbors"): (),
    ("5", "senses"): (),
    ("6", "probe"): (),
    ("domain", "pretrain"): ("perplexities",),
    ("domain", "reproduce"): (AS_IT_WAS, FURTHER),
    ("figure 1", "reproduce"): (),
}
CLAIM_COLUMNS = ["task", "change", "the paper", "here", "seeds", "as in the paper?"]
EPOCH_COLUMNS = ["task", "best epoch without ELMo", "with ELMo", "epochs until ELMo reaches the best without"]
EXPLANATION_OF_CLAIMS = (
    "Each row is a change that the paper studies, with the gain in points in the paper and in our runs. The interval "
    "has 95 % confidence, over seeds that are paired (of layers alone: over words). If it includes 0, or if "
    "there is one seed, the result is inconclusive. Where the paper has no figure, its answer is a gain. The "
    "test data are the same for all seeds, so the interval does not say what other test data would give."
)

PlanEntry = JsonObject
PlanEntries = Sequence[PlanEntry]
BySeed = dict[int, Any]  # values of the runs of an arm


def paper_page(plan: PlanEntries, output: Path, others: Sequence[Path] = ()) -> str:
    """The page of all experiments that have results. The picture of the layer weights is written next to it.

    `output` has a folder for each experiment; so have `others`, of other biLMs, for more columns of Table 1.
    """
    results = {entry["name"]: results_of(output / entry["name"]) for entry in plan}
    titles = {entry["name"]: entry["title"] for entry in plan}
    entries = []
    for entry in plan:
        if results[entry["name"]] is not None:
            context = {
                "results": results[entry["name"]],
                "results_beside": results.get(entry.get("beside")),
                "title_of_bilm": titles.get(entry.get("bilm")),
            }
            entries.append(entry | context)
    parts = [
        "Scores are in percent on the last split: the mean ± sample standard deviation over the runs, which have "
        "different seeds. Lines that name the paper (Peters et al. 2018) have its scores, on other data."
    ]
    for heading, paragraphs in page_sections(entries, output, others):
        body = "\n\n".join(filter(None, paragraphs))
        if body:
            parts += [f"## {heading}", body]
    absent = [name for name, answer in results.items() if answer is None]
    if absent:
        parts.append(f"Without results so far: {', '.join(absent)}.")
    return "\n\n".join(parts)


def page_sections(entries: PlanEntries, output: Path, others: Sequence[Path]) -> Iterator[tuple[str, Iterable[str]]]:
    """The headings with their paragraphs; a section without results has none.

    Args:
        entries: experiments with their `results`, and what they are compared with: `results_beside`, `title_of_bilm`.
    """
    tables = defaultdict(list)
    for entry in entries:
        tables[entry["table"]].append(entry)
    claims = table_if_rows(CLAIM_COLUMNS, claim_rows(entries))
    yield "Which claims of the paper are confirmed?", [EXPLANATION_OF_CLAIMS, claims] if claims else []
    yield TABLE_1, [gains_table(tables["1"], others)]
    yield "Table 2: how are the layers weighted?", arms_tables(tables["2"], output)
    yield "Table 3: where does ELMo enter the network?", arms_tables(tables["3"], output)
    yield "Table 4: what are the nearest uses of a word?", map(neighbors_list, tables["4"])
    yield "Table 5: which layer knows word senses?", layer_tables(sense_table, tables["5"])
    yield "Table 6: which layer knows parts of speech?", layer_tables(probe_table, tables["6"])
    texts = table_if_rows(["text", "perplexity before", "after"], text_rows(tables["domain"]))
    tasks = table_if_rows(["task", "runs", AS_IT_WAS, FURTHER], task_rows(tables["domain"]))
    yield "Section 3.4: does further training on the text of a task help?", [texts, tasks]
    yield "Figure 1: how much training data is needed?", arms_tables(tables["figure 1"], output)
    yield "How many epochs are needed?", [table_if_rows(EPOCH_COLUMNS, epoch_rows(tables["1"]))]
    yield "Figure 2: which layers do the tasks take?", weights_of_tasks(tables["1"], output)


def layer_tables(make_table: Callable[..., str], entries: PlanEntries) -> Iterator[str]:
    for entry in entries:
        yield make_table(entry["results"], entry.get("paper"))


def table_if_rows(header: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table; empty without rows below the header."""
    body = list(rows)
    return markdown_table([header, *body]) if body else ""


def paper_row(paper: JsonObject, *cells: Any) -> list[str]:
    """The row of the paper's scores, below ours."""
    return [f"the paper: {paper['task']}", *map(str, cells)]


def page_parts(path: Path) -> list[str]:
    """A document in parts: before, between and after the marks, and the marks."""
    parts = re.split(f"({PAGE_BEGIN}|{PAGE_END})", path.read_text(encoding="utf-8"))
    if parts[1::2] != [PAGE_BEGIN, PAGE_END]:
        raise ValueError(f"{path} must have the lines {PAGE_BEGIN} and {PAGE_END} once, around the place of Table 1.")
    return parts


def update_page(path: Path, page: str):
    """Replaces what a document has between the marks by Table 1 of a page."""
    parts = page_parts(path)
    _, *sections = re.split("^## ", page, flags=re.MULTILINE)
    table = ""
    for section in sections:
        heading, _, body = section.partition("\n")
        if heading == TABLE_1:
            table = body.strip()
    parts[2] = f"\n\n{table}\n\n"
    write_lines(path, ["".join(parts).removesuffix("\n")])


def last_score(record: RunRecord) -> float:
    return last_metrics(record)[record["metric"]]


def learning_curve(record: RunRecord) -> list[tuple[float, float]] | None:
    return record.get("curve")


def by_seed(records: RunRecords | None, arm: str, value: Callable[[RunRecord], Any] = last_score):
    """The value of each run of an arm by its seed."""
    return {record["seed"]: value(record) for record in records or [] if record["arm"] == arm}


def of_shared_seeds(before: BySeed, after: BySeed) -> tuple[list[Any], list[Any]]:
    """The values of two arms for the seeds that both have."""
    seeds = sorted(before.keys() & after.keys())
    values = [before[seed] for seed in seeds]
    return values, [after[seed] for seed in seeds]


def runs_of(arms: Iterable[Sequence | dict]) -> str:
    """The number of runs of each arm, as text: `3 runs`, `2 to 3 runs`."""
    numbers = sorted(map(len, arms))
    fewest, most = numbers[0], numbers[-1]
    number = str(most) if fewest == most else f"{fewest} to {most}"
    return f"{number} runs" if most > 1 else f"{number} run"


def gains_table(entries: PlanEntries, others: Sequence[Path]) -> str:
    """Each task without and with ELMo, and the share of the errors that is gone. An arm without runs has no figure.

    Another biLM has two more columns: its score, and the share of the errors over the seeds that the baseline has, too.
    """
    header = ["task", "runs", "without ELMo", "with ELMo", "error reduction"]
    for folder in others:
        header += [f"with {folder.name}", "error reduction"]
    rows = []
    for entry in entries:
        records = entry["results"]
        metric = records[0]["metric"]
        seeds = {record["seed"] for record in records}
        runs = len(seeds)
        baseline = by_seed(records, "baseline")
        row = [entry["title"], str(runs), score_cell(baseline.values(), metric)]
        row += gain_cells(baseline, records, metric, runs)
        for folder in others:
            row += gain_cells(baseline, results_of(folder / entry["name"]), metric, runs)
        rows.append(row)
        if "paper" in entry:
            paper = entry["paper"]
            before, after = (paper[arm] for arm in ARMS_OF_TABLE_1)
            reduction = error_reduction(before / 100, after / 100)
            empty = ["", ""] * len(others)
            rows.append(paper_row(paper, "", before, after, reduction, *empty))
    return table_if_rows(header, rows)


def gain_cells(baseline: BySeed, records: RunRecords | None, metric: str, runs: int) -> list[str]:
    """The scores with ELMo, with their number if it is not `runs`, and the share of the errors that is gone."""
    scores = by_seed(records, "elmo")
    cell = score_cell(scores.values(), metric)
    if len(scores) not in (0, runs):
        cell += f" ({runs_of([scores])})"
    before, after = of_shared_seeds(baseline, scores)
    if not before:
        return [cell, ""]
    return [cell, error_reduction(float(np.mean(before)), float(np.mean(after)))]


def text_rows(entries: PlanEntries) -> Iterator[list[str]]:
    """Perplexities before and after further training."""
    for entry in entries:
        if "bilm" in entry:
            continue
        first, *_ = evaluations_of(entry["results"])
        published = published_evaluation(entry["results"])
        cells = [f"{evaluation['perplexity']:.1f}" for evaluation in (first, published)]
        yield [entry["title"], *cells]
        if "paper" in entry:
            paper = entry["paper"]
            yield paper_row(paper, *paper["perplexities"])


def task_rows(entries: PlanEntries) -> Iterator[list[str]]:
    """Scores of tasks with the biLM as it was and trained further, of the seeds of both."""
    for entry in entries:
        if "bilm" not in entry:
            continue
        records = entry["results"]
        before, after = of_shared_seeds(by_seed(entry["results_beside"], "elmo"), by_seed(records, "elmo"))
        if before:
            metric = records[0]["metric"]
            title = f"{entry['title']}, after {entry['title_of_bilm']}"
            yield [title, runs_of([before]), score_cell(before, metric), score_cell(after, metric)]
            if "paper" in entry:
                paper = entry["paper"]
                yield paper_row(paper, "", paper[AS_IT_WAS], paper[FURTHER])


def arms_tables(entries: PlanEntries, output: Path) -> Iterator[str]:
    """The scores of each arm, with the scores of the paper below, and the pictures of Figure 1."""
    for entry in entries:
        records = entry["results"]
        metric = records[0]["metric"]
        arms = by_arm(records)
        scores = [score_cell(map(last_score, runs), metric) for runs in arms.values()]
        rows = [[entry["title"], *arms], [runs_of(arms.values()), *scores]]
        if "paper" in entry:
            paper = entry["paper"]
            rows.append(paper_row(paper, *(paper.get(arm, "") for arm in arms)))
        if all(map(learning_curve, records)):
            epochs = []
            for runs in arms.values():
                epochs.append(mean_of(best_epoch(run["curve"]) for run in runs))
            rows.append(["epochs until the best score", *epochs])
        yield markdown_table(rows)
        for path in (output / entry["name"]).glob("results/*_data.png"):
            yield f"![{entry['title']}]({path.relative_to(output).as_posix()})"


def mean_of(values: Iterable[float]) -> str:
    return f"{np.mean(list(values)):.1f}"


def neighbors_list(entry: PlanEntry) -> str:
    answer = entry["results"]
    rows = [[f"a use of {answer['word']}", "cosine", "its nearest use"]]
    if "word_vectors" in answer:
        (word, _), *others = answer["word_vectors"]
        names, cosines = zip(*others, strict=True)
        extremes = f"{cosines[0]:.2f} to {cosines[-1]:.2f}"
        rows.append([f"{word}, without a context", extremes, ", ".join(names)])
    for query in answer["queries"]:
        title = query["use"]
        for cosine, use, *_ in query["neighbors"]:  # records of before have no place
            rows.append([title, f"{cosine:.2f}", use])
            title = ""
    return markdown_table(rows)


def weights_of_tasks(entries: PlanEntries, output: Path) -> Iterator[str]:
    """The layer weights that the tasks have learned, as a table and a picture."""
    runs = []
    for entry in entries:
        for record in entry["results"]:
            if record.get("settings", {}).get("scalar_mix_mode", "learned") == "learned":
                runs.append(record | {"arm": entry["name"]})
    weights = mean_layer_weights(runs)
    if weights:
        yield layer_table(weights)
        if draw_layer_weights(runs, output / FIGURE):
            yield f"![Layer weights of all tasks]({FIGURE})"


class Gain(NamedTuple):
    """What a change adds to a score, over the seeds that both arms have."""

    mean: float  # difference
    margin: float | None  # half the width of its confidence interval, by Student's t over paired seeds. None: one seed
    seeds: int


def gain(before: BySeed, after: BySeed) -> Gain | None:
    """What the second arm adds to the first; `None` if no seed has both."""
    scores, other_scores = of_shared_seeds(before, after)
    seeds = len(scores)
    if not seeds:
        return None
    differences = np.subtract(other_scores, scores)
    mean = float(differences.mean())
    if seeds == 1:
        return Gain(mean, None, seeds)
    from scipy.stats import sem, t

    margin = t.ppf(QUANTILE, seeds - 1) * sem(differences)
    return Gain(mean, float(margin), seeds)


def layer_gain(results: JsonObject) -> Gain | None:
    """What the second layer adds to the first, in the answer of `elmo senses` or `elmo probe`.

    The margin is computed for two samples of the same size. They are the same words, so it is rather too wide.
    """
    if "disambiguation" in results:
        shares = results["disambiguation"]
        number = shares["instances"]
    elif "test" in results:
        shares = probe_scores(results)["test"]
        number = results["test"]["words"]
    else:
        return None
    if not shares.keys() >= {*LAYERS}:
        return None
    from scipy.stats import norm

    before, after = (shares[layer] for layer in LAYERS)
    variances = before * (1 - before) + after * (1 - after)
    margin = norm.ppf(QUANTILE) * np.sqrt(variances / number)
    return Gain(after - before, float(margin), 0)


def verdict(measured: Gain, expected: float) -> str:
    """Whether a gain has the sign of `expected`, if its interval excludes 0."""
    if measured.margin is None or abs(measured.mean) <= measured.margin:
        return "inconclusive"
    return "yes" if measured.mean * expected > 0 else "no"


def claim_rows(entries: PlanEntries) -> Iterator[list[str]]:
    """A row for each change of each task that was measured. The paper gains where it has no figure for the task."""
    for entry in entries:
        paper = entry.get("paper", {})
        for before, after, measured in gains_of(entry):
            if measured is None:
                continue
            published = ""
            expected = 1.0
            if {before, after} <= paper.keys():
                expected = round(paper[after] - paper[before], 2)
                published = f"{expected:+.1f}"
            here = f"{100 * measured.mean:+.1f}"
            if measured.margin is not None:
                here += f" ± {100 * measured.margin:.1f}"
            seeds = str(measured.seeds or "")
            yield [entry["title"], f"{before} → {after}", published, here, seeds, verdict(measured, expected)]


def gains_of(entry: PlanEntry) -> Iterator[tuple[str, str, Gain | None]]:
    results = entry["results"]
    if entry["table"] in ("5", "6"):
        yield *LAYERS, layer_gain(results)
    elif "beside" in entry:
        yield AS_IT_WAS, FURTHER, gain(by_seed(entry["results_beside"], "elmo"), by_seed(results, "elmo"))
    else:
        for before, after in CHANGES.get(entry["table"], []):
            yield before, after, gain(by_seed(results, before), by_seed(results, after))


def epoch_rows(entries: PlanEntries) -> Iterator[list[str]]:
    """How soon the arm with ELMo is as good as the baseline ever is, where there are learning curves of both.

    Every figure is a mean over seeds. A seed whose ELMo never reaches the baseline's best leaves the last cell empty.
    """
    for entry in entries:
        curves = [by_seed(entry["results"], arm, learning_curve) for arm in ARMS_OF_TABLE_1]
        epochs = []
        for baseline, elmo in zip(*of_shared_seeds(*curves), strict=True):
            if baseline and elmo:
                best_score = max(score for _, score in baseline)
                epochs.append((best_epoch(baseline), best_epoch(elmo), first_epoch(elmo, best_score)))
        if epochs:
            cells = map(mean_of, zip(*epochs, strict=True))
            yield [entry["title"], *("" if cell == "inf" else cell for cell in cells)]


def first_epoch(curve: Sequence[Sequence[float]], least: float) -> float:
    """The first epoch with a score of at least `least`; infinity if there is none."""
    return next((epoch for epoch, score in curve if score >= least), math.inf)


def best_epoch(curve: Sequence[Sequence[float]]) -> float:
    """The first epoch with the best score."""
    epoch, _ = max(curve, key=itemgetter(1))
    return epoch
