"""The page of a plan whose results have gaps, as one golden file; its intervals; its place in a document.

`test_paper` makes the pages of the shipped records again.
"""

from pathlib import Path

import numpy as np
import pytest
from errors import refused
from golden import check_golden
from scipy import stats

from modeling_elmo.run_scripts.experiments.paper_page import (
    PAGE_BEGIN,
    PAGE_END,
    TABLE_1,
    gain,
    layer_gain,
    paper_page,
    update_page,
    verdict,
)
from modeling_elmo.run_scripts.experiments.reports import write_records

CURVES = {"baseline": [[1.0, 0.2], [2.0, 0.5], [3.0, 0.5]], "elmo": [[1.0, 0.45], [2.0, 0.6], [3.0, 0.7]]}


def entry(name: str, table: str, **more) -> dict:
    return {"name": name, "table": table, "title": f"the {name}", **more}


PLAN = [
    entry("tags", "1", paper={"task": "NER", "baseline": 90.15, "elmo": 92.22}),
    entry("alone", "1"),
    entry("perfect", "1"),
    entry("top", "1"),
    entry("places", "3", paper={"task": "SRL", "input": 84.7, "both": 84.3}),
    entry("senses", "5", paper={"task": "WSD", "biLSTM 1": 67.4, "biLSTM 2": 69.0}),
    entry("texts", "domain"),
    entry("gone", "domain"),
    entry("later", "6"),
    entry("tags_after", "domain", bilm="texts", beside="tags"),
    entry("alone_after", "domain", bilm="gone", beside="alone"),
    entry("later_after", "domain", bilm="texts", beside="later"),
]


def write_arms(folder: Path, arms: dict[str, list[float]], curves=CURVES, **more):
    records = []
    for arm, scores in arms.items():
        for seed, score in enumerate(scores):
            record = {"task": "ner", "arm": arm, "seed": seed, "metric": "f1", "curve": curves.get(arm), **more}
            record["metrics"] = {"validation": {"f1": 0.9}, "test": {"f1": score}}
            records.append(record | {"layer_weights": {"input": [0.2, 0.5, 0.3]} if arm == "elmo" else {}})
    write_records(folder, None, records)


def test_a_page_with_gaps(tmp_path):
    """Scores are compared over the seeds of both arms; an arm or a biLM without runs has no figure.

    In the golden file, 5.0 points of `tags_after` come from one seed, the error reduction of NER is the paper's
    21 %, `both` has the opposite sign of the paper's, `perfect` has no errors to reduce, the weights of `top` were not
    learned, and ELMo never reaches the baseline of `alone`.
    """
    large = tmp_path / "large"
    write_arms(large / "tags", {"baseline": [0.6, 0.5], "elmo": [0.7, 0.7]})
    write_arms(tmp_path / "small" / "tags", {"elmo": [0.66]})
    write_arms(large / "alone", {"elmo": [0.7, 0.72], "baseline": [0.6]}, curves=CURVES | {"elmo": [[1.0, 0.1]]})
    write_arms(large / "perfect", {"baseline": [1.0], "elmo": [0.7]})
    write_arms(large / "top", {"elmo": [0.7]}, settings={"scalar_mix_mode": "top"})
    write_arms(large / "places", {"input": [0.5] * 3, "both": [0.52, 0.53, 0.52], "output": [0.5, 0.6, 0.5]})
    for name in ("tags", "alone", "later"):
        write_arms(large / f"{name}_after", {"elmo": [0.75]})
    shares = {"biLSTM 1": 0.6545422781271838, "biLSTM 2": 0.6879454926624738, "instances": 14310}
    uses = {"lemmas": 3, "instances": 8, "chance": 0.25}
    write_records(large / "senses", None, [{"same_sense": uses, "disambiguation": shares}])
    log = [{"step": step, "perplexity": value} for step, value in ((0, 40.0), (9, 30.0))]
    write_records(large / "texts", None, [{"log": log, "published_step": 9}])
    page = paper_page(PLAN, large, [tmp_path / "small"])
    check_golden(f"{page}\n", "pages/with_gaps.md")
    assert (large / "layer_weights.png").is_file()


def test_a_document_keeps_all_but_table_1(tmp_path):
    document = tmp_path / "RESULTS.md"
    document.write_text(f"# Results\n\n{PAGE_BEGIN}\nold\n{PAGE_END}\n\n## More\n")
    for _ in range(2):
        update_page(document, f"words\n\n## {TABLE_1}\n\nnew\n\n## Table 2\n\nother")
        assert document.read_text() == f"# Results\n\n{PAGE_BEGIN}\n\nnew\n\n{PAGE_END}\n\n## More\n"


@pytest.mark.parametrize("text", ["", f"{PAGE_END}{PAGE_BEGIN}", f"{PAGE_BEGIN}{PAGE_END}{PAGE_BEGIN}{PAGE_END}"])
def test_documents_without_a_place_are_refused(text, tmp_path):
    document = tmp_path / "RESULTS.md"
    document.write_text(text, "utf-8")
    with refused(f"RESULTS.md .*{PAGE_BEGIN}"):
        update_page(document, "new")


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


def test_the_margin_of_layers_is_that_of_two_samples():
    random = np.random.default_rng(0)
    number, shares = 400, {"biLSTM 1": 0.7, "biLSTM 2": 0.8}
    found = layer_gain({"disambiguation": {**shares, "instances": number}})
    counts = [random.binomial(number, share, 20000) / number for share in shares.values()]
    assert found.margin == pytest.approx(1.96 * np.std(counts[1] - counts[0]), rel=0.03)
    scores = {layer: {"accuracy": share} for layer, share in shares.items()}
    assert layer_gain({"metric": "accuracy", "test": {"words": number, "scores": scores}}) == found
    assert layer_gain({"same_sense": {}}) is None and layer_gain({"disambiguation": {"instances": 3}}) is None
