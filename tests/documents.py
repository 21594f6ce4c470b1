"""Links, sections and sentences of documents in Markdown."""

import re
from pathlib import Path

LINK = re.compile(r"(?:\]\(|<img src=\")(?!https?:)([^)#\"]*)#?([^)\"]*)[)\"]")


def sections(path: Path) -> list[str]:
    """What a link may name after `#`."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def sentence_lengths(text: str) -> list[int]:
    """The words of each sentence, without blocks of code, tables and headings; code in a sentence is one word."""
    lines = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
    prose = " ".join(line for line in lines if not line.startswith(("|", "#", "    ")))
    prose = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "x", prose))
    lengths = [len(sentence.split()) for sentence in re.split(r"[.!?](?:\s|$)", prose)]
    return [length for length in lengths if length > 2]  # shorter ones are labels, such as "Yes."
