"""The records of an experiment. Programs and experiments test the rest."""

import pytest

from modeling_elmo.run_scripts.experiments.reports import (
    RECORDS,
    add_records,
    read_records,
    results_of,
    write_records,
)


def test_records_are_in_the_order_of_the_run_and_others_stay(tmp_path):
    assert read_records(tmp_path) == (None, []) and results_of(tmp_path) is None
    first, second = ({"arm": arm, "seed": 1, "text": "a\u2028b\n"} for arm in ("baseline", "elmo"))
    write_records(tmp_path, {"program": "reproduce ner"}, [second])
    add_records(tmp_path, [first])
    assert read_records(tmp_path) == ({"program": "reproduce ner"}, [first, second])
    add_records(tmp_path, [first, second | {"text": ""}])
    assert results_of(tmp_path) == [first, second | {"text": ""}]
    write_records(tmp_path, None, [{"metric": "accuracy"}])
    assert results_of(tmp_path) == {"metric": "accuracy"}


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / RECORDS).write_text('{"arm": "elmo"}\n{"arm": "el', "utf-8")
    with pytest.raises(ValueError, match=f"{RECORDS}, line 2 is not JSON"):
        read_records(tmp_path)
