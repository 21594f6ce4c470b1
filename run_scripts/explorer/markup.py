"""Readings as HTML. Every text of a user is escaped."""

import math
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from modeling_elmo.prediction_elmo import Prediction
from modeling_elmo.run_scripts.explorer.readings import Expectation, OpenModel, SimilarUses

BLUE, ORANGE = "0, 114, 178", "213, 94, 0"  # of Okabe and Ito's palette, as in our figures
MOST_BITS = 16.0  # a surprise with the full colour
# Colours are transparent, so that the text is readable in the light and in the dark theme.
CSS = """
.elmo-line { display: flex; flex-wrap: wrap; gap: 4px; margin-bottom: 14px; }
.elmo-word { text-align: center; font-size: 13px; line-height: 22px; min-width: 46px; }
.elmo-word span { display: block; padding: 0 6px; }
.elmo-word b, .elmo-word button { display: block; width: 100%; font-size: 15px; font-weight: 600; padding: 0 6px; }
.elmo-word b, .elmo-word button { height: 26px; line-height: 26px; margin: 0; }
.elmo-word button { cursor: pointer; border-radius: 4px; }
.elmo-word button:hover { text-decoration: underline; }
.elmo-word button[aria-pressed=true] { background: var(--body-text-color); color: var(--body-background-fill); }
.elmo-key { text-align: right; opacity: 0.7; }
.prose .elmo-table { border-collapse: collapse; width: 100%; font-size: 14px; border: 0; }
.prose .elmo-table td, .prose .elmo-table th { padding: 3px 8px; vertical-align: top; text-align: left; border: 0; }
.prose .elmo-table th { font-weight: 600; opacity: 0.7; }
.prose .elmo-table tr { border: 0; border-bottom: 1px solid var(--border-color-primary); }
.prose .elmo-table .number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.elmo-guess { white-space: nowrap; margin-right: 6px; font-size: 13px; }
.elmo-guess i { opacity: 0.6; font-style: normal; font-size: 11px; }
.elmo-scroll { overflow-x: auto; }
.elmo-note { opacity: 0.75; font-size: 14px; }
.elmo-bar { height: 16px; border-radius: 3px; }
"""


def shaded(value: float, most: float = 1.0, positive: str = BLUE) -> str:
    """The background of a value: none for 0, strongest from `most` on, another colour below 0."""
    return f"background: rgba({positive if value >= 0 else ORANGE}, {0.7 * min(abs(value) / most, 1):.2f})"


def note(text: str) -> str:
    return f'<p class="elmo-note">{escape(text)}</p>'


def model_line(opened: OpenModel) -> str:
    config = opened.model.config
    kind = "biLM" if opened.task is None else opened.task.replace("-", " ")
    softmax = "" if opened.task or opened.predicts else ", without a softmax: it predicts no words"
    size = f"{len(opened.layers)} layers of {config.hidden_size}{softmax}"
    return f"<b>{escape(opened.name)}</b> <span class='elmo-note'>{kind}, {size}</span>"


def cosine_lines(
    layers: Sequence[str], lines: Iterable[tuple[Sequence[str], np.ndarray]], names: Sequence[Sequence[str]], name: str
) -> str:
    """Below each word its cosine with the chosen one in every layer; a word is a button that chooses it."""
    shown = []
    for (words, cosines_LW), line in zip(lines, names, strict=True):
        key = '<div class="elmo-word elmo-key"><b>&nbsp;</b>' + "".join(f"<span>{each}</span>" for each in layers)
        columns = zip(words, line, cosines_LW.T.tolist(), strict=True)
        cards = "".join(_word_card(*column, column[1] == name, layers) for column in columns)
        shown.append(f'<div class="elmo-line">{key}</div>{cards}</div>')
    return "".join(shown)


def _word_card(word: str, name: str, cosines: Sequence[float], is_chosen: bool, layers: Sequence[str]) -> str:
    cells = "".join(
        f'<span style="{shaded(cosine)}" title="{layer}">{cosine:.2f}</span>'
        for cosine, layer in zip(cosines, layers, strict=True)
    )
    pressed = "true" if is_chosen else "false"
    button = f'<button data-word="{escape(name)}" aria-pressed="{pressed}">{escape(word)}</button>'
    return f'<div class="elmo-word">{button}{cells}</div>'


def use_table(found: SimilarUses, has_corpus: bool) -> str:
    """The uses nearest to the chosen one."""
    chosen = found.uses[found.query]
    word = chosen.words[chosen.position]
    if not found.nearest:
        place = "these sentences or in the corpus" if has_corpus else "these sentences"
        advice = "" if has_corpus else " Start the explorer with --corpus FILE to look in more text."
        return note(f"There is no other sentence with “{word}” in {place}.{advice}")
    row = '<tr><td class="number" style="{}">{:.2f}</td><td>{} <b>{}</b> {}</td></tr>'
    rows = "".join(
        row.format(shaded(cosine), cosine, *map(escape, found.uses[near].in_context()))
        for near, cosine in found.nearest
    )
    return f'<table class="elmo-table"><tr><th>cosine</th><th>nearest uses in other sentences</th></tr>{rows}</table>'


def expectation_table(lines: Iterable[Sequence[Expectation]]) -> str:
    """A row for each word, coloured by its surprise in each direction, with the expected words."""
    ways = ("expected from the words before", "bits", "expected from the words after", "expected from both")
    head = "".join(f"<th>{column}</th>" for column in ("word", "bits", *ways))
    tables = []
    for line in lines:
        rows = "".join(f"<tr>{_expectation_cells(each)}</tr>" for each in line)
        forward, backward = (sum(bits) / len(line) for bits in zip(*(each[2:4] for each in line), strict=True))
        tables.append(f'<div class="elmo-scroll"><table class="elmo-table"><tr>{head}</tr>{rows}</table></div>')
        tables.append(
            note(f"On average {forward:.1f} bits from the words before, {backward:.1f} from the words after.")
        )
    return "".join(tables)


def _expectation_cells(each: Expectation) -> str:
    cells = f"<td><b>{escape(each.word)}</b>{'' if each.is_known else '*'}</td>"
    for bits, guesses in ((each.forward_bits, each.forward), (each.backward_bits, each.backward)):
        cells += f'<td class="number" style="{shaded(bits, MOST_BITS, ORANGE)}">{bits:.1f}</td>'
        cells += f"<td>{_guesses(guesses, each.word)}</td>"
    return f"{cells}<td>{_guesses(each.both, each.word)}</td>"


def _guesses(guesses: Iterable[Prediction], word: str) -> str:
    shown = []
    for guess in guesses:
        text = escape(guess.word) if guess.word != word else f"<b>{escape(word)}</b>"
        shown.append(f'<span class="elmo-guess">{text} <i>{percent(math.exp(guess.log_prob))}</i></span>')
    return " ".join(shown)


def percent(share: float) -> str:
    return "&lt;0.1%" if share < 0.0005 else f"{share:.1%}" if share < 0.095 else f"{share:.0%}"


def mix_bars(opened: OpenModel, mixes: dict[str, tuple[list[float], float]]) -> str:
    """A bar for the share of each layer, at each place where ELMo enters the head."""
    parts = []
    for place, (shares, gamma) in mixes.items():
        rows = "".join(
            f'<tr><td style="width: 7em">{layer}</td><td><div class="elmo-bar" style="width: {100 * share:.1f}%; '
            f'background: rgb({BLUE})"></div></td><td class="number" style="width: 4em">{share:.1%}</td></tr>'
            for layer, share in zip(opened.layers, shares, strict=True)
        )
        title = f"ELMo at the {escape(place)} of the network, gamma {gamma:.2f}"
        parts.append(f'<table class="elmo-table"><tr><th colspan=3>{title}</th></tr>{rows}</table>')
    return "<br>".join(parts)
