"""The figures that `make bench` measures again are those of the documents, and it measures them."""

import pytest
import torch
from errors import refused
from places import ROOT

from modeling_elmo.run_scripts import perplexity
from modeling_elmo.run_scripts.benchmarks import published


@torch.no_grad()
def test_distances_to_the_originals_are_the_published_ones(monkeypatch, capsys):
    monkeypatch.setattr(published, "held_out_perplexity", lambda: 1234.5)  # it takes minutes
    rows = {name: (float(before), float(now)) for name, before, now in published.main()}
    assert len(rows) == 4
    before, now = rows.pop("perplexity of elmo-small-en on heldout.txt")
    assert (before, now) == (88.89, 1234.5)
    assert "**88.89**" in (ROOT / "model_cards" / "elmo-small-en" / "README.md").read_text("utf-8")
    for before, now in rows.values():
        assert 0 < now < 5 * before < 5e-5
    assert capsys.readouterr().out.count("\n| ") == 5


@torch.no_grad()
def test_the_perplexity_is_that_of_the_program(monkeypatch, tmp_path):
    """On the first sentences, where the program gives another figure than on the whole text."""
    text = tmp_path / "few.txt"
    text.write_text("".join(published.HELD_OUT.read_text("utf-8").splitlines(keepends=True)[:40]), encoding="utf-8")
    monkeypatch.setattr(published, "HELD_OUT", text)
    options = ["--model", str(published.SHIPPED_MODEL), "--validation_file", str(text), "--is_split_into_words"]
    assert published.held_out_perplexity() == pytest.approx(perplexity.main(options).perplexity, rel=1e-6)


def test_it_needs_a_clone(monkeypatch, tmp_path):
    monkeypatch.setattr(published, "HELD_OUT", tmp_path / "heldout.txt")
    with refused("run this in a clone", FileNotFoundError):
        published.main()
