"""Markdown for cards and reports: values on one line, escaped, and tables."""

import re
from collections.abc import Sequence
from typing import Any

MOST_ITEMS = 10  # of a list; a corpus may have hundreds of files
SPECIAL = re.compile(r"[\\`*\[\]<>|~$&]|_(?![^\W_])|(?<![^\W_])_")  # an underscore inside a word is plain text


def one_line(value: Any, most: int = MOST_ITEMS) -> str:
    """The value on one line. A list shows its first `most` items and the number of the others."""
    if isinstance(value, (list, tuple)):
        more = [f"and {len(value) - most:,} more"] if len(value) > most else []
        return ", ".join([*map(one_line, value[:most]), *more])
    return " ".join(str(value).split())


def escape_markdown(value: Any) -> str:
    """The value as one line of plain text in Markdown, also inside a table."""
    return SPECIAL.sub(r"\\\g<0>", one_line(value))


def link_or_text(value: Any) -> str:
    """The value as a link if it is an address, else as plain text."""
    text = one_line(value)
    return f"<{text}>" if re.fullmatch(r"https?://[^\s<>]+", text) else escape_markdown(text)


def code_span(value: Any) -> str:
    """The value as inline code. The fence is longer than every run of backticks in the value."""
    text = one_line(value)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns. The first row is the header; the first column is left-aligned, the others right."""
    rows = [[escape_markdown(cell) for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * (width - 1) + (":" if place else "-") for place, width in enumerate(widths)]
    form = " | ".join(f"{{:{'>' if place else '<'}{width}}}" for place, width in enumerate(widths))
    return "\n".join(f"| {form.format(*row)} |" for row in [rows[0], rule, *rows[1:]])
