"""Readings as tables for Gradio and as HTML, in which every text of a user is escaped."""

import math
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler

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
.elmo-note { opacity: 0.75; font-size: 14px; }
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
    key = '<div class="elmo-word elmo-key"><b>&nbsp;</b>' + "".join(f"<span>{layer}</span>" for layer in layers)
    shown = ""
    for (words, cosines_LW), line in zip(lines, names, strict=True):
        shown += f'<div class="elmo-line">{key}</div>'
        for word, each, cosines in zip(words, line, cosines_LW.T.tolist(), strict=True):
            pressed = "true" if each == name else "false"
            button = f'<button data-word="{escape(each)}" aria-pressed="{pressed}">{escape(word)}</button>'
            cells = "".join(f'<span style="{shaded(cosine)}">{cosine:.2f}</span>' for cosine in cosines)
            shown += f'<div class="elmo-word">{button}{cells}</div>'
        shown += "</div>"
    return shown


def use_table(found: SimilarUses) -> Styler:
    """The uses nearest to the chosen one."""
    rows = [(cosine, str(found.uses[near])) for near, cosine in found.nearest]
    table = pd.DataFrame(rows, columns=["cosine", "nearest uses in other sentences"])
    return table.style.map(shaded, subset="cosine").format("{:.2f}", subset="cosine")


def expectation_table(lines: Iterable[Sequence[Expectation]]) -> Styler:
    """A row for each word, coloured by its surprise in each direction, with the expected words."""
    rows = [
        {
            "word": each.word + ("" if each.is_known else "*"),
            "bits": each.forward_bits,
            "expected from the words before": shown_guesses(each.forward, each.word),
            "bits, backward": each.backward_bits,
            "expected from the words after": shown_guesses(each.backward, each.word),
            "expected from both": shown_guesses(each.both, each.word),
        }
        for line in lines
        for each in line
    ]
    table, bits = pd.DataFrame(rows).style, ["bits", "bits, backward"]
    return table.map(lambda value: shaded(value, MOST_BITS, ORANGE), subset=bits).format("{:.1f}", subset=bits)


def shown_guesses(guesses: Iterable[Prediction], word: str) -> str:
    """Words with their probabilities; the word of the text is in brackets."""
    pairs = ((f"[{word}]" if guess.word == word else guess.word, math.exp(guess.log_prob)) for guess in guesses)
    return "  ".join(f"{text} {share:.1%}" for text, share in pairs)
