"""The names that users import: from the package, and from the modules that had them before."""

import re
import subprocess
import sys
from importlib import import_module

import pytest

import modeling_elmo

FORMER_PLACES = {
    "ELMoForTokenClassification": "modeling_elmo_heads",
    "ELMoForCausalLM": "modeling_elmo_causal",
    "ELMoInt8Config": "elmo_operators",
    "ELMoScores": "elmo_scoring",
    "ELMoSemanticRolePipeline": "pipeline_elmo_roles",
    "elmo_backend": "elmo_backends",
    "score_texts": "prediction_elmo",
}


@pytest.mark.parametrize("name", FORMER_PLACES)
def test_former_places_give_the_same_objects(name):
    module = import_module(f"modeling_elmo.{FORMER_PLACES[name]}")
    assert getattr(module, name) is getattr(modeling_elmo, name)


def test_every_name_is_there_and_listed():
    for name in [*modeling_elmo.__all__, *modeling_elmo._LAZY]:
        assert getattr(modeling_elmo, name).__name__ == name and name in dir(modeling_elmo)
    with pytest.raises(AttributeError, match="has no attribute 'embed_sentence'"):
        modeling_elmo.embed_sentence  # noqa: B018 (the access raises)


def test_the_first_page_of_the_reference_says_what_each_name_is_for():
    named = re.findall(r"`([\w.]+)`", modeling_elmo.__doc__)
    assert {*named} - {"elmo"} >= {*modeling_elmo.__all__, *modeling_elmo._LAZY}
    for name in {*named} - {"elmo", *modeling_elmo.__all__, *modeling_elmo._LAZY}:
        assert import_module(name).__doc__


def test_what_models_do_not_need_is_imported_late():
    code = "import sys, modeling_elmo; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {*done.stdout.split()}
    assert "modeling_elmo.modeling_elmo" in loaded
    assert not {f"modeling_elmo.{module}" for module in modeling_elmo._LAZY.values()} & loaded
