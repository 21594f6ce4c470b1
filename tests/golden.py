"""Expected texts, each in a file of `fixtures`."""

from places import FIXTURES


def check_golden(text: str, name: str):
    """Compares the text with a file of `fixtures`. After a change that you want, write the new text there."""
    assert text == (FIXTURES / name).read_text("utf-8"), f"the text is not that of tests/fixtures/{name}"
