import re
from pathlib import Path

import pytest
from errors import refused
from huggingface_hub import ModelCard
from jinja2 import UndefinedError
from places import ROOT

from modeling_elmo.run_scripts.cards.card import (
    EXAMPLES,
    CardArguments,
    card_templates,
    read_result,
    without_folders,
    write_card,
    write_card_facts,
    write_result,
)
from modeling_elmo.run_scripts.cards.tables import code_span, escape_markdown, markdown_table
from modeling_elmo.run_scripts.program.command_line import ProgramParser

HOSTILE = "{{ 7 * 7 }} {% raw %} **bold** [link](u) <b> `code` |"


def render(template, **values):
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


def test_a_key_that_a_record_lacks():
    assert render("{% if record.gone %}yes{% else %}no{% endif %}", record={}) == "no"
    with refused("gone", UndefinedError):
        render("{{ record.gone }}", record={})


def test_facts_that_the_author_states(tmp_path):
    """A fact stays until it is replaced; texts of the author are Markdown, and names are not."""
    (tmp_path / "cite.md").write_text("Cite *us*.\n", "utf-8")
    assert not write_card_facts(tmp_path, CardArguments()) and read_result(tmp_path, "card") == {}
    card = ModelCard.load(write_card(tmp_path, "elmo", "card.md", {}, {}))
    assert card.data.license is None and card.data.model_name is None and "No license is recorded.\n" in card.text
    stated = CardArguments(language=["en"], license="a_b_", license_reason="So *is* it.", dataset_tags=["someone/text"])
    assert write_card_facts(tmp_path, stated)
    assert write_card_facts(tmp_path, CardArguments(citation=str(tmp_path / "cite.md")))
    path = write_card(tmp_path, "elmo *xy*", "card.md", {"tags": ["elmo"]}, {})
    card = ModelCard.load(path)
    assert (card.data.license, card.data.language, card.data.datasets) == ("a_b_", ["en"], ["someone/text"])
    assert "\n# elmo \\*xy\\*\n" in card.text and "`a_b_`.\nSo *is* it.\n" in card.text
    assert card.text.endswith(".bib).\n\nCite *us*.\n")
    assert not re.search("\n{3}", write_card(tmp_path, "a", "card.md", {}, {}).read_text().split("## License")[1])


def test_the_example_is_in_the_language_of_the_model(tmp_path):
    """A text of the author, or one of ours."""
    for stated, expected in (
        ({}, EXAMPLES["en"]),
        ({"language": ["ko", "en"]}, EXAMPLES["ko"]),
        ({"language": ["de"]}, EXAMPLES["en"]),
        ({"language": ["de"], "example": ["Das Stück läuft .", "Wo?"]}, ["Das Stück läuft .", "Wo?"]),
    ):
        write_card_facts(tmp_path, CardArguments(**stated))
        values = {}
        write_card(tmp_path, "elmo", "card.md", {}, values)
        assert values["examples"] == expected


def test_settings_are_shown_as_they_are(tmp_path):
    settings = {"config_overrides": '{"a": [[1,2]]}', "files": ["a_b", "c\n```"]}
    card = write_card(tmp_path, "elmo", "card.md", {}, {"settings": settings}).read_text("utf-8")
    assert '```text\nconfig_overrides={"a": [[1,2]]}\nfiles=a_b, c ```\n```\n' in card


def test_the_card_names_the_oldest_supported_versions(tmp_path):
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    oldest = [
        re.search(rf"{name}>=([\d.]+)", project)[1] for name in ('requires-python = "', '"torch', '"transformers')
    ]
    versions = "Python {}, torch {} and transformers {}, or newer.".format(*oldest)
    assert versions in write_card(tmp_path, "elmo", "card.md", {}, {}).read_text("utf-8")


@pytest.mark.parametrize(
    "options, error, message",
    [
        (["--language", "english"], ValueError, "--language english"),
        (["--citation", "nowhere.md"], FileNotFoundError, "nowhere.md"),
        (["--data_statement", "latin.md"], ValueError, "--data_statement latin.md: 'utf-8'"),
    ],
)
def test_mistakes_in_facts(options, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("latin.md").write_bytes("naïve".encode("latin-1"))
    with refused(message, error):
        ProgramParser(CardArguments).parse(options)


def test_a_result_that_is_no_json(tmp_path):
    write_result(tmp_path, "play", {"word": "눈"})
    assert read_result(tmp_path, "play") == {"word": "눈"}
    for text, reason in (('{"word": ', "is not JSON"), ("[" * 100_000, "is not JSON"), ("[1]", "holds a list")):
        (tmp_path / "results" / "play.json").write_text(text, "utf-8")
        with refused(rf"play\.json {reason}"):
            read_result(tmp_path, "play")


def test_records_do_not_show_folders():
    record = {"a": "/home/someone/x.txt", "b": ["/home/someone/y", "z/w", 3], "c": {"d": "/", "e": "../../someone/x"}}
    record["f"] = ["~/x", "file:///home/someone/x"]
    expected = {"a": "x.txt", "b": ["y", "z/w", 3], "c": {"d": "/", "e": "x"}, "f": ["x", "x"]}
    assert without_folders(record) == expected


def test_values_in_markdown():
    """As plain text, and as code, which a backtick does not end."""
    for value, expected in (
        ("a|b", r"a\|b"),
        ("*x* `y` [z](u)", r"\*x\* \`y\` \[z\](u)"),
        ("<b>&amp;~$\\", r"\<b\>\&amp;\~\$\\"),
        ("_x_ __init__ set_a", r"\_x\_ \_\_init\_\_ set_a"),
        ("two\n\n# lines", "two # lines"),
    ):
        assert escape_markdown(value) == expected
    codes = {"a_b": "`a_b`", "a`b": "``a`b``", "`": "`` ` ``", "a``b\n`": "``` a``b ` ```"}
    assert {value: code_span(value) for value in codes} == codes


def test_table_is_aligned_and_escaped():
    lines = markdown_table([["arm", "test"], ["a|b", "1.00"], ["elmo *", ""]]).splitlines()
    assert lines == ["| arm     | test |", "| ------- | ---: |", r"| a\|b    | 1.00 |", r"| elmo \* |      |"]
    assert all(len(re.split(r"(?<!\\)\|", line)) == 4 for line in lines)
