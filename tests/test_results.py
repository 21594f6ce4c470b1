"""The folder `results/`: one golden file with all tables, and what stays after an error."""

import json

import pytest
from run_records import RECORDS

from modeling_elmo.run_scripts.cards.results import write_results

REPORT = """# ner

Task `ner`: f1, in percent; mean ± sample standard deviation over the runs, one per seed.

| network  | runs |   validation |         test | gain on test (points / share of errors) |
| -------- | ---: | -----------: | -----------: | --------------------------------------: |
| baseline |    2 | 41.00 ± 1.41 | 32.00 ± 2.83 |                                         |
| elmo     |    3 | 53.00 ± 2.65 | 46.00 ± 3.46 |                          +14.00 / 20.6% |

Gain over `baseline`: the difference, and the share of its errors that is gone.

## Layer weights

Softmax-normalized, mean over the runs.

| layer       | input |
| ----------- | ----: |
| token layer | 0.300 |
| biLSTM 1    | 0.400 |
| biLSTM 2    | 0.300 |

## By type

F1 on test, in percent, mean over the runs.

| type | number | baseline |  elmo |
| ---- | -----: | -------: | ----: |
| PER  |      7 |    32.00 | 46.00 |

## Runs

| network  | seed | validation |  test | train samples | epochs | seconds |
| -------- | ---: | ---------: | ----: | ------------: | -----: | ------: |
| baseline |    1 |      40.00 | 30.00 |         3,394 |    7.0 |      81 |
| elmo     |    1 |      50.00 | 42.00 |         3,394 |    7.0 |      81 |
| baseline |    2 |      42.00 | 34.00 |         3,394 |    7.0 |      81 |
| elmo     |    2 |      54.00 | 48.00 |         3,394 |    7.0 |      81 |
| elmo     |    3 |      55.00 | 48.00 |         3,394 |    7.0 |      81 |
"""


def test_results_are_written_whole(tmp_path):
    """0.206 of the errors are gone: (0.68 - 0.54) / 0.68."""
    assert write_results(tmp_path, RECORDS) == "ner"
    assert (tmp_path / "results" / "ner.md").read_text(encoding="utf-8") == REPORT
    assert json.loads((tmp_path / "results" / "ner.json").read_text(encoding="utf-8")) == {"records": RECORDS}
    before = {path: path.read_bytes() for path in (tmp_path / "results").iterdir()}
    with pytest.raises(TypeError):
        write_results(tmp_path, [{**RECORDS[0], "settings": {1, 2}}])
    assert {path: path.read_bytes() for path in (tmp_path / "results").iterdir()} == before


def test_a_record_may_lack_what_no_table_needs(tmp_path):
    """An ensemble's record does, because it was not trained."""
    needed = ("task", "arm", "seed", "metric", "metrics")
    ensemble = {name: RECORDS[0][name] for name in needed} | {"arm": "a|b", "settings": {"ensemble": ["c"]}}
    assert write_results(tmp_path, [ensemble], "layers") == "ner_layers_ensemble"
    text = (tmp_path / "results" / "ner_layers_ensemble.md").read_text(encoding="utf-8")
    line = text.rstrip().rpartition("\n")[2]
    assert line.split() == [r"|", r"a\|b", r"|", r"1", r"|", r"40.00", r"|", r"30.00", r"|", r"|", r"|", r"|"]
    assert "Layer weights" not in text
