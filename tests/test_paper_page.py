"""The page of a plan: what is left out where results are missing, and its place in a document.

The tables themselves are compared with RESULTS.md, which `test_paper` makes from the shipped records.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from modeling_elmo.run_scripts.experiments.paper_page import (
    PAGE_BEGIN,
    PAGE_END,
    TABLE_1,
    claim_rows,
    epoch_rows,
    gain,
    layer_gain,
    paper_page,
    update_page,
    verdict,
)
from modeling_elmo.run_scripts.experiments.reports import write_records

CURVE = [[1.0, 0.5], [2.0, 0.7], [3.0, 0.6]]


def entry(name: str, table: str, **more) -> dict:
    return {"name": name, "table": table, "title": f"the {name}", **more}


def record(arm: str, seed: int, score: float, **more) -> dict:
    found = {"task": "ner", "arm": arm, "seed": seed, "metric": "f1", "seconds": 90.0, "curve": CURVE}
    found |= {"metrics": {"validation": {"f1": 0.9}, "test": {"f1": score}}}
    return found | {"layer_weights": {"input": [0.2, 0.5, 0.3]} if arm == "elmo" else {}} | more


def records(**arms: list[float]) -> list[dict]:
    return [record(arm, seed, each) for arm in arms for seed, each in enumerate(arms[arm])]


def write_arms(folder: Path, **arms: list[float]):
    write_records(folder, None, records(**arms))


def cells(page: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.split("\n") if line.startswith("|")]


def test_scores_are_compared_over_the_seeds_of_both(tmp_path):
    """Other biLMs have columns in Table 1; an arm or a biLM without runs has no figure."""
    write_arms(tmp_path / "large" / "tags", baseline=[0.6, 0.5], elmo=[0.7, 0.7])
    write_arms(tmp_path / "large" / "alone", elmo=[0.7, 0.72])
    write_arms(tmp_path / "small" / "tags", elmo=[0.66])
    write_arms(tmp_path / "large" / "tags_after", elmo=[0.75])
    write_arms(tmp_path / "large" / "later_after", elmo=[0.75])
    log = [{"step": step, "perplexity": value} for step, value in ((0, 40.0), (9, 30.0))]
    write_records(tmp_path / "large" / "texts", None, [{"log": log, "published_step": 9}])
    plan = [
        entry("tags", "1", paper={"task": "NER", "baseline": 90.15, "elmo": 92.22}),
        *(entry("alone", "1"), entry("texts", "domain"), entry("later", "6")),
        entry("tags_after", "domain", bilm="texts", beside="tags"),
        entry("later_after", "domain", bilm="texts", beside="later"),
    ]
    page = paper_page(plan, tmp_path / "large", [tmp_path / "small"])
    for row in (
        ["task", "runs", "without ELMo", "with ELMo", "error reduction", "with small", "error reduction"],
        ["the tags", "2", "55.00 ± 7.07", "70.00 ± 0.00", "33.3%", "66.00 (1 run)", "15.0%"],
        ["the paper: NER", "", "90.15", "92.22", "21.0%", "", ""],  # as Table 1 of the paper says
        ["the alone", "2", "", "71.00 ± 1.41", "", "", ""],
        ["the texts", "40.0", "30.0"],
        ["the tags_after, after the texts", "1 run", "70.00", "75.00"],
        ["the tags_after", "the biLM as it was → trained further", "", "+5.0", "1", "inconclusive"],
    ):
        assert row in cells(page), row
    assert page.endswith("Without results so far: later.") and "Table 6" not in page
    shutil.rmtree(tmp_path / "large" / "texts")  # the rows of the biLM that was trained there stay
    write_arms(tmp_path / "large" / "alone", baseline=[1.0], elmo=[0.7])  # nothing is left to gain
    rows = cells(paper_page(plan, tmp_path / "large"))
    assert ["the tags_after, after the texts", "1 run", "70.00", "75.00"] in rows
    assert ["the alone", "1", "100.00", "70.00", ""] in rows
    assert (tmp_path / "large" / "layer_weights.png").is_file() and "](layer_weights.png)" in page


def test_figure_2_leaves_out_weights_that_were_not_learned(tmp_path):
    write_records(tmp_path / "tags", None, [record("baseline", 0, 0.6), record("elmo", 0, 0.7)])
    write_records(tmp_path / "taglm", None, [record("elmo", 0, 0.7, settings={"scalar_mix_mode": "top"})])
    page = paper_page([entry("tags", "1"), entry("taglm", "1")], tmp_path)
    assert "| layer       | input |\n" in page.split("## Figure 2")[1]


def test_a_document_keeps_all_but_table_1(tmp_path):
    document = tmp_path / "RESULTS.md"
    document.write_text(f"# Results\n\n{PAGE_BEGIN}\nold\n{PAGE_END}\n\n## More\n", encoding="utf-8")
    for _ in range(2):
        update_page(document, f"words\n\n## {TABLE_1}\n\nnew\n\n## Table 2\n\nother")
        expected = f"# Results\n\n{PAGE_BEGIN}\n\nnew\n\n{PAGE_END}\n\n## More\n"
        assert document.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("text", ["", f"{PAGE_END}{PAGE_BEGIN}", f"{PAGE_BEGIN}{PAGE_END}{PAGE_BEGIN}{PAGE_END}"])
def test_documents_without_a_place_are_refused(text, tmp_path):
    document = tmp_path / "RESULTS.md"
    document.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"RESULTS.md .*{PAGE_BEGIN}"):
        update_page(document, "new")
    assert document.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("seeds", [2, 3, 5, 9])
def test_intervals_are_those_of_a_paired_t_test(seeds):
    random = np.random.default_rng(seeds)
    answers = set()
    for mean in np.linspace(-0.03, 0.03, 41):
        before = random.uniform(0.5, 0.7, seeds)
        after = before + random.normal(mean, 0.01, seeds)
        found = gain(dict(enumerate(before)), dict(enumerate(after)))
        test = stats.ttest_rel(after, before)
        interval = test.confidence_interval(0.95)
        assert (found.mean - found.margin, found.mean + found.margin) == pytest.approx(tuple(interval))
        answer = "inconclusive" if test.pvalue >= 0.05 else "yes" if found.mean > 0 else "no"
        assert verdict(found, 1.0) == answer
        answers.add(answer)
    assert len(answers) == 3 or seeds == 2


def test_seeds_are_paired_and_one_tells_nothing():
    found = gain({1: 0.5, 2: 0.6, 3: 0.9}, {3: 1.0, 1: 0.7})
    assert found.mean == pytest.approx(0.15) and found.seeds == 2
    alone = gain({1: 0.5}, {1: 0.6})
    assert alone.margin is None and verdict(alone, 1.0) == "inconclusive"
    assert gain({1: 0.5}, {2: 0.6}) is None


def test_claims_of_a_plan():
    plan = [
        {"name": "tags", "table": "1", "title": "tags", "paper": {"task": "NER", "baseline": 90.15, "elmo": 92.22}},
        {"name": "places", "table": "3", "title": "roles", "paper": {"task": "SRL", "input": 84.7, "both": 84.3}},
        {"name": "further", "table": "domain", "title": "tags", "bilm": "text", "beside": "tags"},
        {"name": "text", "table": "domain", "title": "posts"},
        {"name": "senses", "table": "5", "title": "senses", "paper": {"biLSTM 1": 67.4, "biLSTM 2": 69.0}},
        {"name": "probe", "table": "6", "title": "words", "paper": {"biLSTM 1": 97.3, "biLSTM 2": 96.8}},
    ]
    shares = {"biLSTM 1": 0.6545422781271838, "biLSTM 2": 0.6879454926624738}
    layers = {"biLSTM 1": {"accuracy": 0.94}, "biLSTM 2": {"accuracy": 0.937}}
    found = {
        "tags": records(baseline=[0.60, 0.61, 0.62], elmo=[0.70, 0.71, 0.72]),
        "places": records(input=[0.5, 0.5, 0.5], both=[0.52, 0.53, 0.52], output=[0.5, 0.6, 0.5]),
        "further": records(elmo=[0.69]),
        "text": {"log": []},
        "senses": {"same_sense": {}, "disambiguation": {**shares, "instances": 14310}},
        "probe": {"metric": "accuracy", "test": {"words": 25094, "scores": layers}},
    }
    assert [*claim_rows(plan, found)] == [
        ["tags", "baseline → elmo", "+2.1", "+10.0 ± 0.0", "3", "yes"],
        ["roles", "output → input", "", "-3.3 ± 14.3", "3", "inconclusive"],
        ["roles", "input → both", "-0.4", "+2.3 ± 1.4", "3", "no"],  # the paper loses there
        ["tags", "the biLM as it was → trained further", "", "-1.0", "1", "inconclusive"],
        ["senses", "biLSTM 1 → biLSTM 2", "+1.6", "+3.3 ± 1.1", "", "yes"],
        ["words", "biLSTM 1 → biLSTM 2", "-0.5", "-0.3 ± 0.4", "", "inconclusive"],
    ]
    assert not [*claim_rows(plan[3:4], found)]


def test_the_margin_of_layers_is_that_of_two_samples():
    random = np.random.default_rng(0)
    number, shares = 400, {"biLSTM 1": 0.7, "biLSTM 2": 0.8}
    found = layer_gain({"disambiguation": {**shares, "instances": number}})
    counts = [random.binomial(number, share, 20000) / number for share in shares.values()]
    assert found.margin == pytest.approx(1.96 * np.std(counts[1] - counts[0]), rel=0.03)
    assert layer_gain({"same_sense": {}}) is None and layer_gain({"disambiguation": {"instances": 3}}) is None


def test_epochs_until_the_best_of_the_other():
    curves = {"baseline": [[1.0, 0.2], [2.0, 0.5], [3.0, 0.5]], "elmo": [[1.0, 0.45], [2.0, 0.6], [3.0, 0.7]]}
    found = [record | {"curve": curves[record["arm"]]} for record in records(baseline=[0.5, 0.5], elmo=[0.7, 0.7])]
    tags = entry("tags", "1")
    assert [*epoch_rows([tags], {"tags": found})] == [["the tags", "2.0", "3.0", "2.0"]]
    worse = [*found[:3], found[3] | {"curve": [[1.0, 0.1]]}]
    assert [*epoch_rows([tags], {"tags": worse})] == [["the tags", "2.0", "2.0", ""]]
    assert not [*epoch_rows([tags], {"tags": found[:1]})]
