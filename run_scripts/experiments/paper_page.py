"""One page with the results of a plan: tables and figures like the paper's, with the paper's lines beside ours."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..cards.bilm_card import published_evaluation
from ..cards.figures import draw_layer_weights
from ..cards.records import RunRecord, by_arm, mean_layer_weights, splits_of
from ..cards.tables import error_reduction, layer_table, markdown_table, probe_table, score_cell, sense_table
from ..program.files import write_lines
from .reports import results_of

PAGE_BEGIN, PAGE_END = "<!-- elmo reproduce all: begin -->", "<!-- elmo reproduce all: end -->"
FIGURE = "layer_weights.png"
TABLE_1 = "Table 1: what does ELMo add?"
CONFIDENCE = 0.95
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
CLAIM_COLUMNS = ["task", "change", "the paper", "here", "seeds", "as in the paper?"]
EPOCH_COLUMNS = ["task", "best epoch without ELMo", "with ELMo", "epochs until ELMo reaches the best without"]
EXPLANATION_OF_CLAIMS = (
    "Each row is a change of the paper, with what it adds to the score there and here, in points. The interval "
    "has 95 % confidence, over seeds that are paired (of layers alone: over words). If it includes 0, or if "
    "there is one seed, the result is inconclusive. Where the paper has no figure, its answer is a gain. The "
    "test data are the same for all seeds, so the interval does not say what other test data would give."
)

PlanEntry = dict[str, Any]


def paper_page(plan: Sequence[PlanEntry], output: Path, others: Sequence[Path] = ()) -> str:
    """The page of all experiments that have results. The picture of the layer weights is written beside it.

    `output` has a folder for each experiment; so have `others`, of other biLMs, for more columns of Table 1.
    """
    all_results: dict[str, Any] = {}
    absent = []
    for entry in plan:
        results = results_of(output / entry["name"])
        if results is None:
            absent.append(entry["name"])
        else:
            all_results[entry["name"]] = results
    parts = [
        "Scores are in percent on the last split: the mean ± sample standard deviation over the runs, which have "
        "different seeds. Lines that name the paper (Peters et al. 2018) have its scores, which are of other data."
    ]
    for heading, paragraphs in page_sections(plan, all_results, output, others):
        if body := "\n\n".join(filter(None, paragraphs)):
            parts += [f"## {heading}", body]
    if absent:
        parts.append(f"Without results so far: {', '.join(absent)}.")
    return "\n\n".join(parts)


def page_sections(
    plan: Sequence[PlanEntry], all_results: dict[str, Any], output: Path, others: Sequence[Path]
) -> Iterator[tuple[str, Iterable[str]]]:
    """The headings with their paragraphs; a section without results has none."""
    entries = [entry for entry in plan if entry["name"] in all_results]
    tables: dict[str, list[PlanEntry]] = defaultdict(list)
    for entry in entries:
        tables[entry["table"]].append(entry)
    claims = table_if_rows(CLAIM_COLUMNS, claim_rows(entries, all_results))
    yield "Which claims of the paper hold here?", [EXPLANATION_OF_CLAIMS, claims] if claims else []
    yield TABLE_1, [gains_table(tables["1"], all_results, others)]
    yield "Table 2: how are the layers weighted?", arms_tables(tables["2"], all_results, output)
    yield "Table 3: where does ELMo enter the network?", arms_tables(tables["3"], all_results, output)
    neighbors = [neighbors_list(all_results[entry["name"]]) for entry in tables["4"]]
    yield "Table 4: what are the nearest uses of a word?", neighbors
    for number, what, table_of in (("5", "word senses", sense_table), ("6", "parts of speech", probe_table)):
        answers = [table_of(all_results[entry["name"]], entry.get("paper")) for entry in tables[number]]
        yield f"Table {number}: which layer knows {what}?", answers
    title = "Section 3.4: does further training on the text of a task help?"
    yield title, domain_tables(tables["domain"], plan, all_results)
    yield "Figure 1: how much training data is needed?", arms_tables(tables["figure 1"], all_results, output)
    yield "How many epochs are needed?", [table_if_rows(EPOCH_COLUMNS, epoch_rows(tables["1"], all_results))]
    yield "Figure 2: which layers do the tasks take?", weights_of_tasks(tables["1"], all_results, output)


def table_if_rows(header: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table; empty without rows below the header."""
    body = list(rows)
    return markdown_table([header, *body]) if body else ""


def page_parts(path: Path) -> list[str]:
    """A document in parts: before, between and after the marks, and the marks."""
    parts = re.split(f"({PAGE_BEGIN}|{PAGE_END})", path.read_text(encoding="utf-8"))
    if parts[1::2] != [PAGE_BEGIN, PAGE_END]:
        raise ValueError(f"{path} must have the lines {PAGE_BEGIN} and {PAGE_END} once, around the place of Table 1.")
    return parts


def update_page(path: Path, page: str):
    """Replaces what a document has between the marks by Table 1 of a page."""
    parts = page_parts(path)
    sections = dict(part.split("\n", 1) for part in re.split("^## ", page, flags=re.MULTILINE)[1:])
    parts[2] = f"\n\n{sections.get(TABLE_1, '').strip()}\n\n"
    write_lines(path, ["".join(parts).removesuffix("\n")])


def last_score(record: RunRecord) -> float:
    return record["metrics"][splits_of([record])[-1]][record["metric"]]


def by_seed(records: Sequence[RunRecord] | None, arm: str, value: Callable[[RunRecord], Any] = last_score):
    """The value of each run of an arm by its seed."""
    return {record["seed"]: value(record) for record in records or [] if record["arm"] == arm}


def of_shared_seeds(*arms: dict[int, Any]) -> list[list[Any]]:
    """The values of each arm for the seeds that all arms have."""
    seeds = sorted(set.intersection(*map(set, arms)))
    return [[arm[seed] for seed in seeds] for arm in arms]


def runs_of(arms: Iterable[Sequence | dict]) -> str:
    """The number of runs of each arm, as text: `3 runs`, `2 to 3 runs`."""
    numbers = sorted({len(runs) for runs in arms})
    return f"{' to '.join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))} run{'s' * (numbers[-1] > 1)}"


def gains_table(entries: Sequence[PlanEntry], all_results: dict[str, Any], others: Sequence[Path]) -> str:
    """Each task without and with ELMo, and the share of the errors that is gone. An arm without runs has no figure.

    Another biLM has two more columns: its score, and the share of the errors over the seeds that the baseline has, too.
    """
    header = ["task", "runs", "without ELMo", "with ELMo", "error reduction"]
    header += [title for folder in others for title in (f"with {folder.name}", "error reduction")]
    rows = []
    for entry in entries:
        records = all_results[entry["name"]]
        metric, runs = records[0]["metric"], len({record["seed"] for record in records})
        baseline = by_seed(records, "baseline")
        cells = [entry["title"], str(runs), score_cell([*baseline.values()], metric)]
        for of_bilm in (records, *(results_of(folder / entry["name"]) for folder in others)):
            scores = by_seed(of_bilm, "elmo")
            number = "" if len(scores) in (0, runs) else f" ({runs_of([scores])})"
            both = of_shared_seeds(baseline, scores)
            reduction = error_reduction(*(float(np.mean(values)) for values in both)) if both[0] else ""
            cells += [score_cell([*scores.values()], metric) + number, reduction]
        rows.append(cells)
        if "paper" in entry:
            published = [entry["paper"][name] for name in ARMS_OF_TABLE_1]
            reduction = error_reduction(*(score / 100 for score in published))
            cells = [f"the paper: {entry['paper']['task']}", "", *map(str, published), reduction]
            rows.append(cells + ["", ""] * len(others))
    return table_if_rows(header, rows)


def domain_tables(
    entries: Sequence[PlanEntry], plan: Sequence[PlanEntry], all_results: dict[str, Any]
) -> Iterator[str]:
    """Perplexities before and after further training, and scores of tasks with either biLM, of the seeds of both."""
    texts, tasks = [], []
    titles = {entry["name"]: entry["title"] for entry in plan}
    for entry in entries:
        results, paper = all_results[entry["name"]], entry.get("paper")
        if "bilm" not in entry:
            evaluations = [logged for logged in results["log"] if "perplexity" in logged]
            both = evaluations[0], published_evaluation(evaluations, results["published_step"])
            texts.append([entry["title"], *(f"{evaluation['perplexity']:.1f}" for evaluation in both)])
            if paper:
                texts.append([f"the paper: {paper['task']}", *map(str, paper["perplexities"])])
            continue
        pair = of_shared_seeds(by_seed(all_results.get(entry["beside"]), "elmo"), by_seed(results, "elmo"))
        if pair[0]:
            cells = [score_cell(scores, results[0]["metric"]) for scores in pair]
            tasks.append([f"{entry['title']}, after {titles[entry['bilm']]}", runs_of(pair), *cells])
            if paper:
                tasks.append([f"the paper: {paper['task']}", "", str(paper[AS_IT_WAS]), str(paper[FURTHER])])
    yield table_if_rows(["text", "perplexity before", "after"], texts)
    yield table_if_rows(["task", "runs", AS_IT_WAS, FURTHER], tasks)


def arms_tables(entries: Sequence[PlanEntry], all_results: dict[str, Any], output: Path) -> Iterator[str]:
    """The scores of each arm, those of the paper below, and the pictures of Figure 1."""
    for entry in entries:
        arms = by_arm(all_results[entry["name"]])
        scores = [score_cell([*map(last_score, runs)], runs[0]["metric"]) for runs in arms.values()]
        rows = [[entry["title"], *arms], [runs_of(arms.values()), *scores]]
        if "paper" in entry:
            rows.append([f"the paper: {entry['paper']['task']}", *(str(entry["paper"].get(arm, "")) for arm in arms)])
        if all(record.get("curve") for record in all_results[entry["name"]]):
            epochs = ([best_epoch(record["curve"]) for record in runs] for runs in arms.values())
            rows.append(["epochs until the best score", *(f"{np.mean(of_arm):.1f}" for of_arm in epochs)])
        yield markdown_table(rows)
        pictures = (output / entry["name"]).glob("results/*_data.png")
        yield from (f"![{entry['title']}]({path.relative_to(output).as_posix()})" for path in pictures)


def neighbors_list(answer: dict[str, Any]) -> str:
    rows = [[f"a use of {answer['word']}", "cosine", "its nearest use"]]
    if "word_vectors" in answer:
        (word, _), *others = answer["word_vectors"]
        cosines = f"{others[0][1]:.2f} to {others[-1][1]:.2f}"
        rows.append([f"{word}, without a context", cosines, ", ".join(name for name, _ in others)])
    for query in answer["queries"]:
        for number, (cosine, use) in enumerate(query["neighbors"]):
            rows.append(["" if number else query["use"], f"{cosine:.2f}", use])
    return markdown_table(rows)


def weights_of_tasks(entries: Sequence[PlanEntry], all_results: dict[str, Any], output: Path) -> Iterator[str]:
    """The layer weights that the tasks have learned, as a table and a picture."""
    records = [{**record, "arm": entry["name"]} for entry in entries for record in all_results[entry["name"]]]
    runs = [run for run in records if run.get("settings", {}).get("scalar_mix_mode", "learned") == "learned"]
    if weights := mean_layer_weights(runs):
        yield layer_table(weights)
        if draw_layer_weights(runs, output / FIGURE):
            yield f"![Layer weights of all tasks]({FIGURE})"


class Gain(NamedTuple):
    """What a change adds to a score, over the seeds that both arms have."""

    mean: float  # difference
    margin: float | None  # half the width of its confidence interval, by Student's t over paired seeds. None: one seed
    seeds: int


def gain(before: dict[int, float], after: dict[int, float]) -> Gain | None:
    """What the second arm adds to the first; `None` if no seed has both."""
    old, new = of_shared_seeds(before, after)
    differences = np.array(new) - np.array(old)
    seeds = len(differences)
    if seeds < 2:
        return Gain(float(differences[0]), None, 1) if seeds else None
    from scipy.stats import t

    margin = t.ppf((1 + CONFIDENCE) / 2, seeds - 1) * differences.std(ddof=1) / np.sqrt(seeds)
    return Gain(float(differences.mean()), float(margin), seeds)


def layer_gain(results: dict[str, Any]) -> Gain | None:
    """What the second layer adds to the first, in the answer of `elmo senses` or `elmo probe`.

    The margin is that of two samples of the same size. They are the same words, so it is rather too wide.
    """
    if "disambiguation" in results:
        shares, number = results["disambiguation"], results["disambiguation"]["instances"]
    else:
        scores = results.get("test", {}).get("scores", {})
        shares = {layer: scores[layer][results["metric"]] for layer in scores}
        number = results["test"]["words"] if scores else 0
    if not shares.keys() >= {*LAYERS}:
        return None
    from scipy.stats import norm

    before, after = (shares[layer] for layer in LAYERS)
    error = np.sqrt((before * (1 - before) + after * (1 - after)) / number)
    return Gain(after - before, float(norm.ppf((1 + CONFIDENCE) / 2) * error), 0)


def verdict(measured: Gain, expected: float) -> str:
    """Whether a gain has the sign of `expected`, if its interval excludes 0."""
    if measured.margin is None or abs(measured.mean) <= measured.margin:
        return "inconclusive"
    return "yes" if measured.mean * expected > 0 else "no"


def claim_rows(entries: Sequence[PlanEntry], all_results: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each change of each task that was measured. The paper gains where it has no figure for the task."""
    for entry in entries:
        paper = entry.get("paper", {})
        for before, after, measured in gains_of(entry, all_results):
            if measured is None:
                continue
            published = round(paper[after] - paper[before], 2) if {before, after} <= paper.keys() else None
            margin = "" if measured.margin is None else f" ± {100 * measured.margin:.1f}"
            cells = ["" if published is None else f"{published:+.1f}", f"{100 * measured.mean:+.1f}{margin}"]
            cells += [str(measured.seeds or ""), verdict(measured, 1.0 if published is None else published)]
            yield [entry["title"], f"{before} → {after}", *cells]


def gains_of(entry: PlanEntry, all_results: dict[str, Any]) -> Iterator[tuple[str, str, Gain | None]]:
    results, table = all_results[entry["name"]], entry["table"]
    if table in ("5", "6"):
        yield *LAYERS, layer_gain(results)
    elif "beside" in entry:
        yield AS_IT_WAS, FURTHER, gain(by_seed(all_results.get(entry["beside"]), "elmo"), by_seed(results, "elmo"))
    else:
        for before, after in CHANGES.get(table, []):
            yield before, after, gain(by_seed(results, before), by_seed(results, after))


def epoch_rows(entries: Sequence[PlanEntry], all_results: dict[str, Any]) -> Iterator[list[str]]:
    """How soon the arm with ELMo is as good as the baseline ever is, where there are learning curves of both.

    Every figure is a mean over seeds. A seed whose ELMo never reaches the baseline's best leaves the last cell empty.
    """
    for entry in entries:
        curves = (by_seed(all_results[entry["name"]], arm, lambda run: run.get("curve")) for arm in ARMS_OF_TABLE_1)
        pairs = [pair for pair in zip(*of_shared_seeds(*curves), strict=True) if all(pair)]
        if pairs:
            best = [f"{np.mean([best_epoch(curve) for curve in of_arm]):.1f}" for of_arm in zip(*pairs, strict=True)]
            reached = np.mean([first_epoch(elmo, max(score for _, score in baseline)) for baseline, elmo in pairs])
            yield [entry["title"], *best, f"{reached:.1f}" if np.isfinite(reached) else ""]


def first_epoch(curve: Sequence[Sequence[float]], least: float) -> float:
    """The first epoch with a score of at least `least`; infinity if there is none."""
    return next((epoch for epoch, score in curve if score >= least), math.inf)


def best_epoch(curve: Sequence[Sequence[float]]) -> float:
    """The first epoch with the best score."""
    return max(curve, key=lambda point: point[1])[0]
