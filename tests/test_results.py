"""The folder `results/`: golden files with all tables, and what stays after an error."""

import json

import pytest
from golden import check_golden
from run_records import RECORDS

from modeling_elmo.run_scripts.cards.results import write_results


def test_results_are_written_whole(tmp_path):
    """0.206 of the errors are gone: (0.68 - 0.54) / 0.68."""
    assert write_results(tmp_path, RECORDS) == "ner"
    check_golden((tmp_path / "results" / "ner.md").read_text("utf-8"), "pages/results.md")
    assert json.loads((tmp_path / "results" / "ner.json").read_text("utf-8")) == {"records": RECORDS}
    before = {path: path.read_bytes() for path in (tmp_path / "results").iterdir()}
    with pytest.raises(TypeError):
        write_results(tmp_path, [{**RECORDS[0], "settings": {1, 2}}])
    assert {path: path.read_bytes() for path in (tmp_path / "results").iterdir()} == before


def test_a_record_may_lack_what_no_table_needs(tmp_path):
    """An ensemble's record does, because it was not trained."""
    needed = ("task", "arm", "seed", "metric", "metrics")
    ensemble = {name: RECORDS[0][name] for name in needed} | {"arm": "a|b", "settings": {"ensemble": ["c"]}}
    assert write_results(tmp_path, [ensemble], "layers") == "ner_layers_ensemble"
    text = (tmp_path / "results" / "ner_layers_ensemble.md").read_text("utf-8")
    check_golden(text, "pages/results_of_an_ensemble.md")
