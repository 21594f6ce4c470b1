"""The page of a plan: its tables from records, and its place in a document."""

import json
from pathlib import Path

import pytest

from modeling_elmo.run_scripts.experiments.paper_page import PAGE_BEGIN, PAGE_END, paper_page, update_page

CURVE = [[1.0, 0.5], [2.0, 0.7], [3.0, 0.6]]


def entry(name: str, table: str, **more) -> dict:
    return {"name": name, "table": table, "title": f"the {name}", **more}


def write_records(folder: Path, arms: dict[str, list[float]]):
    records = [
        {
            "task": "ner",
            "arm": arm,
            "seed": seed,
            "metric": "f1",
            "metrics": {"validation": {"f1": 0.9}, "test": {"f1": score}},
            "layer_weights": {"input": [0.2, 0.5, 0.3]} if arm == "elmo" else {},
            "seconds": 90.0,
            "curve": CURVE,
        }
        for arm, scores in arms.items()
        for seed, score in enumerate(scores)
    ]
    write_results(folder, {"records": records})


def write_results(folder: Path, results: dict):
    (folder / "results").mkdir(parents=True)
    (folder / "results" / "x.json").write_text(json.dumps(results), encoding="utf-8")


def test_tables_stand_beside_those_of_the_paper(tmp_path):
    write_records(tmp_path / "tags", {"baseline": [0.6, 0.62], "elmo": [0.7, 0.72]})
    write_records(tmp_path / "alone", {"elmo": [0.7, 0.72]})
    write_records(tmp_path / "layers", {"top layer": [0.5], "learned, lambda 1": [0.55]})
    use = {"use": "a [play] here", "neighbors": [[0.91, "one [play]"], [0.5, "the [play]"]]}
    write_results(
        tmp_path / "uses",
        {"word": "play", "word_vectors": [["play", 1], ["game", 0.8], ["won", 0.7]], "queries": [use]},
    )
    write_results(tmp_path / "senses", {"same_sense": {"lemmas": 3, "token layer": 0.5, "biLSTM 1": 0.625}})
    scores = {name: {"accuracy": share} for name, share in (("most frequent tag", 0.5), ("biLSTM 1", 0.91))}
    write_results(tmp_path / "probe", {"metric": "accuracy", "train": {}, "test": {"words": 9, "scores": scores}})
    plan = [
        entry("tags", "1", paper={"task": "NER", "baseline": 90.15, "elmo": 92.22}),
        entry("alone", "1"),
        entry("layers", "2", paper={"task": "SQuAD", "top layer": 84.7}),
        entry("uses", "4"),
        entry("senses", "5"),
        entry("probe", "6", paper={"task": "PTB", "biLSTM 1": 97.3}),
        entry("later", "6"),
    ]
    page = paper_page(plan, tmp_path)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.split("\n") if line.startswith("|")]
    for row in (
        ["the tags", "2", "61.00 ± 1.41", "71.00 ± 1.41", "25.6%"],
        ["the alone", "2", "", "71.00 ± 1.41", ""],
        ["the paper: NER", "", "90.15", "92.22", "21.0%"],  # as Table 1 of the paper says
        ["the layers", "top layer", "learned, lambda 1"],
        ["1 run", "50.00", "55.00"],
        ["the paper: SQuAD", "84.7", ""],
        ["epochs until the best score", "2.0", "2.0"],
        ["the tags", "baseline → elmo", "+2.1", "+10.0 ± 0.0", "2", "yes"],
        ["the tags", "2.0", "2.0", "2.0"],
        ["play, without a context", "0.80 to 0.70", "game, won"],
        ["a \\[play\\] here", "0.91", "one \\[play\\]"],
        ["", "0.50", "the \\[play\\]"],
        ["biLSTM 1", "62.5"],
        ["accuracy", "test", "the paper: PTB"],
        ["most frequent tag", "50.0", ""],
        ["biLSTM 1", "91.0", "97.3"],
        ["biLSTM 1", "0.500", "0.500"],  # of the layer weights
        ["tags", "4", "1.5", "0.1"],  # minutes per model, hours
    ):
        assert row in cells, row
    headings = [line for line in page.split("\n") if line.startswith("#")]
    assert [heading.split(":")[0] for heading in headings[1:-1]] == [
        *(f"## Table {number}" for number in (1, 2, 4, 5, 6)),
        *("## How many epochs are needed?", "## Figure 2"),
    ]
    assert page.endswith("Without results so far: later.")
    assert (tmp_path / "layer_weights.png").is_file() and "](layer_weights.png)" in page


def test_further_training_is_compared_over_the_seeds_of_both(tmp_path):
    write_records(tmp_path / "tags", {"baseline": [0.6, 0.62], "elmo": [0.7, 0.72]})
    write_records(tmp_path / "tags_after", {"elmo": [0.75]})
    log = [{"step": step, "perplexity": value} for step, value in ((0, 40.0), (9, 30.0))]
    write_results(tmp_path / "texts", {"log": log, "published_step": 9})
    later = {"bilm": "texts", "beside": "tags"}
    plan = [entry("tags", "1"), entry("texts", "domain"), entry("tags_after", "domain", **later)]
    page = paper_page(plan, tmp_path)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.split("\n") if "|" in line]
    for row in (
        ["the texts", "40.0", "30.0"],
        ["the tags_after, after the texts", "1 run", "70.00", "75.00"],
        ["the tags_after", "the biLM as it was → trained further", "", "+5.0", "1", "cannot be told"],
    ):
        assert row in rows, row


def test_other_bilms_have_columns_in_table_1(tmp_path):
    write_records(tmp_path / "large" / "tags", {"baseline": [0.6, 0.5], "elmo": [0.7, 0.7]})
    write_records(tmp_path / "large" / "roles", {"baseline": [0.6], "elmo": [0.7]})
    write_records(tmp_path / "small" / "tags", {"elmo": [0.66]})
    plan = [entry("tags", "1", paper={"task": "NER", "baseline": 90.15, "elmo": 92.22}), entry("roles", "1")]
    page = paper_page(plan, tmp_path / "large", [tmp_path / "small"])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.split("\n") if "|" in line]
    for row in (
        ["task", "runs", "without ELMo", "with ELMo", "error reduction", "with small", "error reduction"],
        [
            "the tags",
            "2",
            "55.00 ± 7.07",
            "70.00 ± 0.00",
            "33.3%",
            "66.00 (1 run)",
            "15.0%",
        ],  # of the seed that both have
        ["the paper: NER", "", "90.15", "92.22", "21.0%", "", ""],
        ["the roles", "1", "60.00", "70.00", "25.0%", "", ""],
    ):
        assert row in rows, row


def test_figure_2_has_only_learned_weights(tmp_path):
    write_records(tmp_path / "tags", {"elmo": [0.7, 0.72]})
    write_records(tmp_path / "taglm", {"elmo": [0.7]})
    path = tmp_path / "taglm" / "results" / "x.json"
    (record,) = json.loads(path.read_text(encoding="utf-8"))["records"]
    record["settings"] = {"scalar_mix_mode": "top"}
    path.write_text(json.dumps({"records": [record]}), encoding="utf-8")
    page = paper_page([entry("tags", "1"), entry("taglm", "1")], tmp_path)
    assert "| layer       | input |\n" in page.split("## Figure 2")[1]


def test_times_leave_out_runs_that_were_interrupted(tmp_path):
    write_records(tmp_path / "tags", {"baseline": [0.6], "elmo": [0.7]})
    path = tmp_path / "tags" / "results" / "x.json"
    results = json.loads(path.read_text(encoding="utf-8"))
    results["records"][0].pop("seconds")
    path.write_text(json.dumps(results), encoding="utf-8")
    assert "| tags       |      2 |               1.5 |   0.1 |" in paper_page([entry("tags", "1")], tmp_path)


def test_a_document_keeps_all_but_the_page(tmp_path):
    document = tmp_path / "RESULTS.md"
    document.write_text(f"# Results\n\n{PAGE_BEGIN}\nold\n{PAGE_END}\n\n## More\n", encoding="utf-8")
    for _ in range(2):
        update_page(document, "words\n\n## Table 1\n\n![a picture](a.png)\n\nnew")
        expected = f"# Results\n\n{PAGE_BEGIN}\n\nwords\n\n### Table 1\n\nnew\n\n{PAGE_END}\n\n## More\n"
        assert document.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize(
    "text", ["", PAGE_BEGIN, PAGE_END, f"{PAGE_END}{PAGE_BEGIN}", f"{PAGE_BEGIN}{PAGE_END}{PAGE_BEGIN}{PAGE_END}"]
)
def test_documents_without_a_place_are_refused(text, tmp_path):
    document = tmp_path / "RESULTS.md"
    document.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="RESULTS.md must have the lines .* once, around the place of the page"):
        update_page(document, "new")
    assert document.read_text(encoding="utf-8") == text
