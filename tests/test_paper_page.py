"""The page of a plan: what is left out where results are missing, and its place in a document.

The tables themselves are compared with RESULTS.md, which `test_paper` makes from the shipped records.
"""

from pathlib import Path

import pytest

from modeling_elmo.run_scripts.experiments.paper_page import PAGE_BEGIN, PAGE_END, paper_page, update_page
from modeling_elmo.run_scripts.experiments.records import write_records

CURVE = [[1.0, 0.5], [2.0, 0.7], [3.0, 0.6]]


def entry(name: str, table: str, **more) -> dict:
    return {"name": name, "table": table, "title": f"the {name}", **more}


def record(arm: str, seed: int, score: float, **more) -> dict:
    found = {"task": "ner", "arm": arm, "seed": seed, "metric": "f1", "seconds": 90.0, "curve": CURVE}
    found |= {"metrics": {"validation": {"f1": 0.9}, "test": {"f1": score}}}
    return found | {"layer_weights": {"input": [0.2, 0.5, 0.3]} if arm == "elmo" else {}} | more


def write_arms(folder: Path, **arms: list[float]):
    write_records(folder, None, [record(arm, seed, each) for arm in arms for seed, each in enumerate(arms[arm])])


def cells(page: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.split("\n") if line.startswith("|")]


def test_scores_are_compared_over_the_seeds_of_both(tmp_path):
    """Other biLMs have columns in Table 1; an arm or a biLM without runs has no figure."""
    write_arms(tmp_path / "large" / "tags", baseline=[0.6, 0.5], elmo=[0.7, 0.7])
    write_arms(tmp_path / "large" / "alone", elmo=[0.7, 0.72])
    write_arms(tmp_path / "small" / "tags", elmo=[0.66])
    write_arms(tmp_path / "large" / "tags_after", elmo=[0.75])
    log = [{"step": step, "perplexity": value} for step, value in ((0, 40.0), (9, 30.0))]
    write_records(tmp_path / "large" / "texts", None, [{"log": log, "published_step": 9}])
    plan = [
        entry("tags", "1", paper={"task": "NER", "baseline": 90.15, "elmo": 92.22}),
        *(entry("alone", "1"), entry("texts", "domain"), entry("later", "6")),
        entry("tags_after", "domain", bilm="texts", beside="tags"),
    ]
    page = paper_page(plan, tmp_path / "large", [tmp_path / "small"])
    for row in (
        ["task", "runs", "without ELMo", "with ELMo", "error reduction", "with small", "error reduction"],
        ["the tags", "2", "55.00 ± 7.07", "70.00 ± 0.00", "33.3%", "66.00 (1 run)", "15.0%"],
        ["the paper: NER", "", "90.15", "92.22", "21.0%", "", ""],  # as Table 1 of the paper says
        ["the alone", "2", "", "71.00 ± 1.41", "", "", ""],
        ["the texts", "40.0", "30.0"],
        ["the tags_after, after the texts", "1 run", "70.00", "75.00"],
        ["the tags_after", "the biLM as it was → trained further", "", "+5.0", "1", "cannot be told"],
    ):
        assert row in cells(page), row
    assert page.endswith("Without results so far: later.") and "Table 6" not in page
    assert (tmp_path / "large" / "layer_weights.png").is_file() and "](layer_weights.png)" in page


def test_figure_2_and_times_leave_out_what_was_not_measured(tmp_path):
    """Weights that were not learned, and the time of a run that was interrupted."""
    interrupted = record("baseline", 0, 0.6)
    interrupted.pop("seconds")
    write_records(tmp_path / "tags", None, [interrupted, record("elmo", 0, 0.7)])
    write_records(tmp_path / "taglm", None, [record("elmo", 0, 0.7, settings={"scalar_mix_mode": "top"})])
    page = paper_page([entry("tags", "1"), entry("taglm", "1")], tmp_path)
    assert "| layer       | input |\n" in page.split("## Figure 2")[1]
    assert ["tags", "2", "1.5", "0.1"] in cells(page)  # models, minutes per model, hours


def test_a_document_keeps_all_but_the_page(tmp_path):
    document = tmp_path / "RESULTS.md"
    document.write_text(f"# Results\n\n{PAGE_BEGIN}\nold\n{PAGE_END}\n\n## More\n", encoding="utf-8")
    for _ in range(2):
        update_page(document, "words\n\n## Table 1\n\n![a picture](a.png)\n\nnew")
        expected = f"# Results\n\n{PAGE_BEGIN}\n\nwords\n\n### Table 1\n\nnew\n\n{PAGE_END}\n\n## More\n"
        assert document.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("text", ["", f"{PAGE_END}{PAGE_BEGIN}", f"{PAGE_BEGIN}{PAGE_END}{PAGE_BEGIN}{PAGE_END}"])
def test_documents_without_a_place_are_refused(text, tmp_path):
    document = tmp_path / "RESULTS.md"
    document.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"RESULTS.md .*{PAGE_BEGIN}"):
        update_page(document, "new")
    assert document.read_text(encoding="utf-8") == text
