import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from jinja2 import UndefinedError

from modeling_elmo.run_scripts.cards.card import (
    CardArguments,
    card_templates,
    hub_name,
    read_result,
    without_folders,
    write_card,
    write_card_facts,
    write_result,
)
from modeling_elmo.run_scripts.program.command_line import ProgramParser

HOSTILE = "{{ 7 * 7 }} {% raw %} **bold** [link](u) <b> `code` |"


def render(template: str, **values) -> str:
    return card_templates().from_string(template).render(values)


def test_templates_escape_every_value():
    """Text of a record becomes neither Markdown nor Jinja, with or without a filter."""
    expected = r"{{ 7 \* 7 }} {% raw %} \*\*bold\*\* \[link\](u) \<b\> \`code\` \|"
    assert render("{{ value }}", value=HOSTILE) == expected
    assert render("{{ value | join('; ') }}", value=[HOSTILE, "b"]) == f"{expected}; b"
    assert render("{{ value | one_line(1) }}", value=[HOSTILE, "b"]) == f"{expected}, and 1 more"
    assert render("{{ value | capitalize }}", value="<b>") == r"\<b\>"
    assert render("{{ value | code }}", value=HOSTILE) == f"``{HOSTILE}``"
    assert render("{{ value | python }}", value="a'\n") == '"a\'\\n"'


def test_filters_of_numbers():
    assert render("{{ x | number }} {{ x | number('.1f') }}", x=1234567) == "1,234,567 1234567.0"
    assert render("{{ x | perplexity }} {{ y | perplexity }}", x=1234.567, y=1e9) == "1,234.57 1e+09"


def test_a_key_that_a_record_lacks():
    assert render("{% if record.gone %}yes{% else %}no{% endif %}", record={}) == "no"
    with pytest.raises(UndefinedError, match="gone"):
        render("{{ record.gone }}", record={})


def test_facts_that_the_author_states(tmp_path):
    """A fact stays until it is replaced; texts of the author are Markdown, and names are not."""
    (tmp_path / "cite.md").write_text("Cite *us*.\n", encoding="utf-8")
    assert not write_card_facts(tmp_path, CardArguments()) and read_result(tmp_path, "card") == {}
    stated = CardArguments(language=["en"], license="a_b_", license_reason="So *is* it.", dataset_tags=["someone/text"])
    assert write_card_facts(tmp_path, stated)
    assert write_card_facts(tmp_path, CardArguments(citation=str(tmp_path / "cite.md")))
    path = write_card(tmp_path, "elmo *xy*", "card.md", {"tags": ["elmo"]}, {})
    card = ModelCard.load(path)
    assert (card.data.license, card.data.language, card.data.datasets) == ("a_b_", ["en"], ["someone/text"])
    assert "\n# elmo \\*xy\\*\n" in card.text and "`a_b_`.\nSo *is* it.\n" in card.text
    assert card.text.endswith("```\n\nCite *us*.\n")
    assert not re.search("\n{3}", write_card(tmp_path, "a", "card.md", {}, {}).read_text().split("## Licence")[1])


def test_a_card_without_facts(tmp_path):
    card = ModelCard.load(write_card(tmp_path, "elmo", "card.md", {}, {}))
    assert card.data.license is None and card.data.model_name is None and card.data.library_name == "transformers"
    assert "No licence is recorded.\n" in card.text and card.text.endswith("```\n")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--language", "english"], ValueError, "--language english"),
        (["--citation", "nowhere.md"], FileNotFoundError, "nowhere.md"),
        (["--data_statement", "latin.md"], ValueError, "--data_statement latin.md: 'utf-8'"),
    ],
)
def test_mistakes_in_facts(options, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("latin.md").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(error, match=message):
        ProgramParser(CardArguments).parse(options)


def test_a_result_that_is_no_json(tmp_path):
    write_result(tmp_path, "play", {"word": "눈"})
    assert read_result(tmp_path, "play") == {"word": "눈"}
    for text in ('{"word": ', "[" * 100_000):
        (tmp_path / "results" / "play.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"play\.json is not JSON"):
            read_result(tmp_path, "play")
    write_result(tmp_path, "play", ["눈"])
    with pytest.raises(ValueError, match=r"play\.json holds a list in place of an object"):
        read_result(tmp_path, "play")


def test_records_do_not_show_folders():
    record = {"a": "/home/someone/x.txt", "b": ["/home/someone/y", "z/w", 3], "c": {"d": "/", "e": "../../someone/x"}}
    record["f"] = ["~/x", "file:///home/someone/x"]
    expected = {"a": "x.txt", "b": ["y", "z/w", 3], "c": {"d": "/", "e": "x"}, "f": ["x", "x"]}
    assert without_folders(record) == expected


@pytest.mark.parametrize(
    ("name", "found"),
    [("someone/elmo", "someone/elmo"), (None, None), (".", None), ("../gone/elmo", None), ("runs/a/b", None)],
)
def test_only_names_of_the_hub_are_named_there(name, found):
    assert hub_name(name) == found
