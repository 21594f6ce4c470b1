import re

import pytest

from modeling_elmo.run_scripts.cards.markdown import code_span, escape_markdown, markdown_table, one_line


def test_lists_are_shortened():
    names = [f"part_{number}" for number in range(12)]
    assert one_line(names) == ", ".join(names[:10]) + ", and 2 more"
    assert one_line(names, most=12) == ", ".join(names)
    assert one_line([["a", "b"], "c\n d"]) == "a, b, c d"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a|b", r"a\|b"),
        ("*x* `y` [z](u)", r"\*x\* \`y\` \[z\](u)"),
        ("<b>&amp;~$\\", r"\<b\>\&amp;\~\$\\"),
        ("_x_ __init__ set_a", r"\_x\_ \_\_init\_\_ set_a"),
        ("two\n\n# lines", "two # lines"),
        (None, "None"),
    ],
)
def test_escaped_values_are_plain_text(value, expected):
    assert escape_markdown(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a_b", "`a_b`"), ("a`b", "``a`b``"), ("`", "`` ` ``"), ("a``b\n`", "``` a``b ` ```")],
)
def test_backticks_do_not_end_inline_code(value, expected):
    assert code_span(value) == expected


def test_table_is_aligned_and_escaped():
    lines = markdown_table([["arm", "test"], ["a|b", "1.00"], ["elmo *", ""]]).splitlines()
    assert lines == ["| arm     | test |", "| ------- | ---: |", r"| a\|b    | 1.00 |", r"| elmo \* |      |"]
    assert all(len(re.split(r"(?<!\\)\|", line)) == 4 for line in lines)
