"""Links and sections of documents in Markdown."""

import re
from pathlib import Path

LINK = re.compile(r"(?:\]\(|<img src=\")(?!https?:)([^)#\"]*)#?([^)\"]*)[)\"]")


def sections(path: Path) -> list[str]:
    """What a link may name after `#`."""
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
