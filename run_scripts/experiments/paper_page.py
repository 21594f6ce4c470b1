"""One page with the results of a plan: tables and figures like the paper's, with the paper's lines beside ours."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modeling_elmo.run_scripts.cards.bilm_card import published_evaluation
from modeling_elmo.run_scripts.cards.figures import draw_layer_weights
from modeling_elmo.run_scripts.cards.tables import (
    RunRecord,
    by_arm,
    last_split,
    layer_table,
    markdown_table,
    mean_layer_weights,
    probe_table,
    relative_error_reduction,
    score_cell,
    sense_table,
)
from modeling_elmo.run_scripts.experiments.records import results_of
from modeling_elmo.run_scripts.program.files import write_lines

PAGE_BEGIN, PAGE_END = "<!-- elmo reproduce all: begin -->", "<!-- elmo reproduce all: end -->"
FIGURE = "layer_weights.png"
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
    "domain": [(AS_IT_WAS, FURTHER)],
    "figure 1": [("baseline@1.0", "elmo@0.1"), ("baseline@1.0", "elmo@1.0")],
}
LAYERS = ("biLSTM 1", "biLSTM 2")  # Tables 5 and 6 compare these two, without seeds
ScoresOfSeeds = dict[str, dict[int, float]]  # by arm and seed, from 0 to 1
ARMS_OF_TABLE_1 = ("baseline", "elmo")

PlanEntry = dict[str, Any]


def paper_page(plan: Sequence[PlanEntry], output: Path, others: Sequence[Path] = ()) -> str:
    """The page of all experiments that have results. The picture of the layer weights is written beside it.

    `output` has a folder for each experiment; so have `others`, of other biLMs, for more columns of Table 1.
    """
    every = {entry["name"]: results_of(output / entry["name"]) for entry in plan}
    found = {name: results for name, results in every.items() if results is not None}
    entries = [entry for entry in plan if entry["name"] in found]
    parts = [
        "Scores are in percent on the last split: the mean ± sample standard deviation over the runs, which have "
        "different seeds. Lines that name the paper (Peters et al. 2018) have its scores, which are of other data."
    ]
    for heading, paragraphs in page_sections(entries, found, output, others):
        if body := "\n\n".join(paragraphs):
            parts += [f"## {heading}", body]
    absent = [name for name in every if name not in found]
    return "\n\n".join([*parts, *([f"Without results so far: {', '.join(absent)}."] if absent else [])])


def page_sections(
    entries: Sequence[PlanEntry], found: dict[str, Any], output: Path, others: Sequence[Path]
) -> Iterator[tuple[str, Iterable[str]]]:
    """The headings with their paragraphs; a section without results has none."""
    tables: dict[str, list[PlanEntry]] = defaultdict(list)
    for entry in entries:
        tables[entry["table"]].append(entry)
    yield "Which claims of the paper hold here?", claims_section(entries, found)
    yield "Table 1: what does ELMo add?", [gains_table(tables["1"], found, others)] if tables["1"] else []
    yield "Table 2: how are the layers weighted?", arms_tables(tables["2"], found, output)
    yield "Table 3: where does ELMo enter the network?", arms_tables(tables["3"], found, output)
    yield "Table 4: what are the nearest uses of a word?", [neighbors_list(found[each["name"]]) for each in tables["4"]]
    for number, what, table_of in (("5", "word senses", sense_table), ("6", "parts of speech", probe_table)):
        answers = [table_of(found[each["name"]], each.get("paper")) for each in tables[number]]
        yield f"Table {number}: which layer knows {what}?", answers
    yield (
        "Section 3.4: does further training on the text of a task help?",
        domain_tables(tables["domain"], entries, found),
    )
    yield "Figure 1: how much training data is needed?", arms_tables(tables["figure 1"], found, output)
    yield "How many epochs are needed?", filter(None, [epochs_table(tables["1"], found)])
    yield "Figure 2: which layers do the tasks take?", weights_of_tasks(tables["1"], found, output)


def update_page(path: Path, page: str):
    """Replaces what a document has between the marks. Headings become one level deeper, and pictures are left out."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(PAGE_BEGIN)
    _, end, after = rest.partition(PAGE_END)
    if not (begin and end) or PAGE_BEGIN in after or PAGE_END in before + after:
        raise ValueError(f"{path} must have the lines {PAGE_BEGIN} and {PAGE_END} once, around the place of the page.")
    lines = [f"#{line}" if line.startswith("#") else line for line in page.split("\n") if not line.startswith("![")]
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip()
    write_lines(path, [f"{before}{begin}\n\n{body}\n\n{end}{after}".removesuffix("\n")])


def claims_section(entries: Sequence[PlanEntry], found: dict[str, Any]) -> Iterator[str]:
    if table := claims_table(entries, found):
        yield (
            "Each row is a change of the paper, with what it adds to the score there and here, in points. The interval "
            "has 95 % confidence, over seeds that are paired (of layers alone: over words). If it includes 0, or if "
            "there is one seed, the answer cannot be told. Where the paper has no figure, its answer is a gain. The "
            "test data are the same for all seeds, so the interval does not say what other test data would give."
        )
        yield table


def gains_table(entries: Sequence[PlanEntry], found: dict[str, Any], others: Sequence[Path]) -> str:
    """Each task without and with ELMo, and the share of the errors that is gone. An arm without runs has no figure.

    Another biLM has two more columns: its score, and the share of the errors over the seeds that the baseline has, too.
    """
    rows = [["task", "runs", "without ELMo", "with ELMo", "error reduction"]]
    for folder in others:
        rows[0] += [f"with {folder.name}", "error reduction"]
    for entry in entries:
        arms = [records_of(found[entry["name"]], name) for name in ARMS_OF_TABLE_1]  # a plan may leave out one of them
        arms += [records_of(results_of(folder / entry["name"]) or [], ARMS_OF_TABLE_1[1]) for folder in others]
        cells = [arm_cell(arms[0])]
        runs = len({record["seed"] for record in found[entry["name"]]})
        for records in arms[1:]:
            number = "" if len(records) in (0, runs) else f" ({runs_of([records])})"
            cells += [arm_cell(records) + number, reduction_cell(arms[0], records)]
        rows.append([entry["title"], str(runs), *cells])
        if "paper" in entry:
            scores = [entry["paper"][name] for name in ARMS_OF_TABLE_1]
            reduction = relative_error_reduction(*(score / 100 for score in scores))
            cells = ["", *map(str, scores), f"{reduction:.1%}", *["", ""] * len(others)]
            rows.append([f"the paper: {entry['paper']['task']}", *cells])
    return markdown_table(rows)


def records_of(records: Sequence[RunRecord], arm: str) -> list[RunRecord]:
    return [record for record in records if record["arm"] == arm]


def last_scores(records: Sequence[RunRecord]) -> list[float]:
    """The scores of runs on their last split."""
    return [record["metrics"][last_split(record)][record["metric"]] for record in records]


def arm_cell(records: Sequence[RunRecord]) -> str:
    """Mean and deviation of an arm; empty without runs."""
    return score_cell(last_scores(records), records[0]["metric"]) if records else ""


def reduction_cell(baseline: Sequence[RunRecord], records: Sequence[RunRecord]) -> str:
    """The share of the baseline's errors that is gone, over the seeds of both; empty if no seed has both."""
    both = of_shared_seeds(baseline, records)
    return f"{relative_error_reduction(*(float(np.mean(last_scores(runs))) for runs in both)):.1%}" if both[0] else ""


def of_shared_seeds(*runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """The records of each arm whose seeds all arms have."""
    seeds = set.intersection(*({record["seed"] for record in of_arm} for of_arm in runs))
    return [[record for record in of_arm if record["seed"] in seeds] for of_arm in runs]


def domain_tables(entries: Sequence[PlanEntry], every: Sequence[PlanEntry], found: dict[str, Any]) -> Iterator[str]:
    """Perplexities before and after further training, and scores of tasks with either biLM, of the seeds of both."""
    texts = [["text", "perplexity before", "after"]]
    tasks = [["task", "runs", AS_IT_WAS, FURTHER]]
    titles = {entry["name"]: entry["title"] for entry in every}
    for entry in entries:
        records = found[entry["name"]]
        if "bilm" not in entry:
            measured = [each for each in records["log"] if "perplexity" in each]
            both = measured[0], published_evaluation(measured, records["published_step"])
            texts.append([entry["title"], *(f"{each['perplexity']:.1f}" for each in both)])
            if "paper" in entry:
                texts.append([f"the paper: {entry['paper']['task']}", *map(str, entry["paper"]["perplexities"])])
        elif (general := entry["beside"]) in found:
            runs = of_shared_seeds(*(records_of(found[name], "elmo") for name in (general, entry["name"])))
            if not runs[0]:
                continue
            number = runs_of(runs)
            tasks.append([f"{entry['title']}, after {titles[entry['bilm']]}", number, *map(arm_cell, runs)])
            if "paper" in entry:
                scores = [str(entry["paper"][name]) for name in (AS_IT_WAS, FURTHER)]
                tasks.append([f"the paper: {entry['paper']['task']}", "", *scores])
    yield from (markdown_table(rows) for rows in (texts, tasks) if len(rows) > 1)


def arms_tables(entries: Sequence[PlanEntry], found: dict[str, Any], output: Path) -> Iterator[str]:
    for entry in entries:
        yield arms_table(entry, found[entry["name"]])
        pictures = (output / entry["name"]).glob("results/*_data.png")  # Figure 1
        yield from (f"![{entry['title']}]({path.relative_to(output).as_posix()})" for path in pictures)


def arms_table(entry: PlanEntry, records: Sequence[RunRecord]) -> str:
    """The scores of each arm, and those of the paper below."""
    arms = by_arm(records)
    rows = [[entry["title"], *arms], [runs_of(arms.values()), *map(arm_cell, arms.values())]]
    if "paper" in entry:
        rows.append([f"the paper: {entry['paper']['task']}", *(str(entry["paper"].get(arm, "")) for arm in arms)])
    curves = [[record.get("curve", []) for record in runs] for runs in arms.values()]
    if all(map(all, curves)):
        epochs = [[best_epoch(curve) for curve in of_arm] for of_arm in curves]
        rows.append(["epochs until the best score", *(f"{sum(each) / len(each):.1f}" for each in epochs)])
    return markdown_table(rows)


def runs_of(arms: Iterable[Sequence[RunRecord]]) -> str:
    """The number of runs of each arm, as text: `3 runs`, `2 to 3 runs`."""
    numbers = sorted({len(runs) for runs in arms})
    return f"{' to '.join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))} run{'s' * (numbers[-1] > 1)}"


def neighbors_list(found: dict[str, Any]) -> str:
    """The nearest words by word vectors, and each use with its neighbors."""
    rows = [[f"a use of {found['word']}", "cosine", "its nearest use"]]
    if "word_vectors" in found:
        (word, _), *others = found["word_vectors"]
        cosines = f"{others[0][1]:.2f} to {others[-1][1]:.2f}"
        rows.append([f"{word}, without a context", cosines, ", ".join(name for name, _ in others)])
    for query in found["queries"]:
        for number, (cosine, use) in enumerate(query["neighbors"]):
            rows.append(["" if number else query["use"], f"{cosine:.2f}", use])
    return markdown_table(rows)


def weights_of_tasks(entries: Sequence[PlanEntry], found: dict[str, Any], output: Path) -> Iterator[str]:
    """The layer weights that the tasks have learned, as a table and a picture."""
    records = [(entry["name"], record) for entry in entries for record in found[entry["name"]]]
    learned = [pair for pair in records if pair[1].get("settings", {}).get("scalar_mix_mode", "learned") == "learned"]
    runs = [{**record, "arm": name} for name, record in learned]
    if weights := mean_layer_weights(runs):
        yield layer_table(weights)
        if draw_layer_weights(runs, output / FIGURE):
            yield f"![Layer weights of all tasks]({FIGURE})"


class Gain(NamedTuple):
    """What a change adds to a score, over the seeds that both arms have."""

    mean: float  # difference
    margin: float | None  # half the width of its confidence interval, by Student's t over paired seeds. None: one seed
    seeds: int


def scores_by_arm(records: Sequence[RunRecord]) -> ScoresOfSeeds:
    """The scores on the last split."""
    scores: ScoresOfSeeds = {}
    for record, score in zip(records, last_scores(records), strict=True):
        scores.setdefault(record["arm"], {})[record["seed"]] = score
    return scores


def gain(before: dict[int, float], after: dict[int, float]) -> Gain | None:
    """What the second arm adds to the first; `None` if no seed has both."""
    differences = np.array([after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())])
    if not len(differences):
        return None
    if len(differences) == 1:
        return Gain(float(differences[0]), None, 1)
    from scipy.stats import t

    error = differences.std(ddof=1) / np.sqrt(len(differences))
    margin = float(t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1) * error)
    return Gain(float(differences.mean()), margin, len(differences))


def layer_gain(results: dict[str, Any]) -> Gain | None:
    """What the second layer adds to the first, in the answer of `elmo senses` or `elmo probe`.

    The margin is that of two samples of the same size. They are the same words, so it is rather too wide.
    """
    if "disambiguation" in results:
        shares, number = results["disambiguation"], results["disambiguation"]["instances"]
    elif "test" in results and "scores" in results["test"]:
        scores = results["test"]["scores"]
        shares = {layer: scores[layer][results["metric"]] for layer in scores}
        number = results["test"]["words"]
    else:
        return None
    if any(layer not in shares for layer in LAYERS):
        return None
    from scipy.stats import norm

    before, after = (shares[layer] for layer in LAYERS)
    error = np.sqrt((before * (1 - before) + after * (1 - after)) / number)
    return Gain(after - before, float(norm.ppf((1 + CONFIDENCE) / 2) * error), 0)


def verdict(found: Gain, expected: float) -> str:
    """Whether a gain has the sign of `expected`, if its interval excludes 0."""
    if found.margin is None or abs(found.mean) <= found.margin:
        return "cannot be told"
    return "yes" if found.mean * expected > 0 else "no"


def claims_table(entries: Sequence[PlanEntry], found: dict[str, Any]) -> str:
    """A row for each change of each task; empty if no task has both arms of a change."""
    rows = [["task", "change", "the paper", "here", "seeds", "as in the paper?"]]
    for entry in entries:
        results = found[entry["name"]]
        if isinstance(results, list):
            scores = scores_by_arm(results)
            if entry["table"] == "domain":
                general = scores_by_arm(found.get(entry["beside"], []))
                scores = {AS_IT_WAS: general.get("elmo", {}), FURTHER: scores.get("elmo", {})}
            for change in CHANGES.get(entry["table"], []):
                rows += claim_row(entry, change, gain(*(scores.get(arm, {}) for arm in change)))
        elif entry["table"] in ("5", "6"):
            rows += claim_row(entry, LAYERS, layer_gain(results))
    return markdown_table(rows) if len(rows) > 1 else ""


def claim_row(entry: PlanEntry, change: tuple[str, str], found: Gain | None) -> Iterator[list[str]]:
    """The row of a change; none if it was not measured. The paper gains where it has no figure for the task."""
    if found is None:
        return
    paper, (before, after) = entry.get("paper", {}), change
    published = round(paper[after] - paper[before], 2) if before in paper and after in paper else None
    margin = "" if found.margin is None else f" ± {100 * found.margin:.1f}"
    cells = ["" if published is None else f"{published:+.1f}", f"{100 * found.mean:+.1f}{margin}"]
    cells += [str(found.seeds or ""), verdict(found, 1.0 if published is None else published)]
    yield [entry["title"], f"{before} → {after}", *cells]


def epochs_table(entries: Sequence[PlanEntry], found: dict[str, Any]) -> str:
    """How soon the arm with ELMo is as good as the baseline ever is; empty if no task has learning curves of both.

    Every figure is a mean over seeds. A seed whose ELMo never reaches the baseline's best leaves the last cell empty.
    """
    rows = [["task", "best epoch without ELMo", "with ELMo", "epochs until ELMo reaches the best without"]]
    for entry in entries:
        curves = {(record["arm"], record["seed"]): record.get("curve", []) for record in found[entry["name"]]}
        seeds = sorted({seed for _, seed in curves})
        pairs = [(curves.get(("baseline", seed), []), curves.get(("elmo", seed), [])) for seed in seeds]
        pairs = [pair for pair in pairs if all(pair)]
        if pairs:
            reached = [first_epoch(elmo, max(score for _, score in baseline)) for baseline, elmo in pairs]
            cells = [np.mean([best_epoch(pair[arm]) for pair in pairs]) for arm in (0, 1)]
            epochs = [epoch for epoch in reached if epoch is not None]
            cells += [np.mean(epochs)] if len(epochs) == len(pairs) else []
            rows.append([entry["title"], *(f"{cell:.1f}" for cell in cells)] + [""] * (3 - len(cells)))
    return markdown_table(rows) if len(rows) > 1 else ""


def first_epoch(curve: Sequence[Sequence[float]], least: float) -> float | None:
    """The first epoch with a score of at least `least`."""
    return next((epoch for epoch, score in curve if score >= least), None)


def best_epoch(curve: Sequence[Sequence[float]]) -> float:
    """The first epoch with the best score."""
    return max(curve, key=lambda point: point[1])[0]
