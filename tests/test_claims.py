"""Claims of the paper beside results: intervals against scipy's tests, verdicts, and epochs."""

import numpy as np
import pytest
from scipy import stats

from modeling_elmo.run_scripts.experiments.claims import claims_table, epochs_table, gain, layer_gain, verdict


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")]


def records(**arms: list[float]) -> list[dict]:
    return [
        {"task": "ner", "arm": arm.replace("_", " "), "seed": seed, "metric": "f1", "metrics": {"test": {"f1": score}}}
        for arm, scores in arms.items()
        for seed, score in enumerate(scores)
    ]


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
        answer = "cannot be told" if test.pvalue >= 0.05 else "yes" if found.mean > 0 else "no"
        assert verdict(found, 1.0) == answer
        answers.add(answer)
    assert len(answers) == 3 or seeds == 2


def test_seeds_are_paired_and_one_tells_nothing():
    found = gain({1: 0.5, 2: 0.6, 3: 0.9}, {3: 1.0, 1: 0.7})
    assert found.mean == pytest.approx(0.15) and found.seeds == 2
    alone = gain({1: 0.5}, {1: 0.6})
    assert alone.margin is None and verdict(alone, 1.0) == "cannot be told"
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
    assert cells_of(claims_table(plan, found))[2:] == [
        ["tags", "baseline → elmo", "+2.1", "+10.0 ± 0.0", "3", "yes"],
        ["roles", "output → input", "", "-3.3 ± 14.3", "3", "cannot be told"],
        ["roles", "input → both", "-0.4", "+2.3 ± 1.4", "3", "no"],  # the paper loses there
        ["tags", "the biLM as it was → trained further", "", "-1.0", "1", "cannot be told"],
        ["senses", "biLSTM 1 → biLSTM 2", "+1.6", "+3.3 ± 1.1", "", "yes"],
        ["words", "biLSTM 1 → biLSTM 2", "-0.5", "-0.3 ± 0.4", "", "cannot be told"],
    ]
    assert claims_table(plan[3:4], found) == ""


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
    entry = {"name": "tags", "table": "1", "title": "tags"}
    assert cells_of(epochs_table([entry], {"tags": found}))[2:] == [["tags", "2.0", "3.0", "2.0"]]
    worse = [*found[:3], found[3] | {"curve": [[1.0, 0.1]]}]
    assert cells_of(epochs_table([entry], {"tags": worse}))[2:] == [["tags", "2.0", "2.0", ""]]
    assert epochs_table([entry], {"tags": records(baseline=[0.5], elmo=[0.6])}) == ""
