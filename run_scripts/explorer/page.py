"""The explorer's page in the browser: a thin layer of Gradio over the readings. Every text of a user is escaped."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from typing import Any

# Read when gradio is imported and launched: nothing is reported, and no text is stored, not even in the browser.
os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_RUN_HISTORY="False")

import gradio as gr  # noqa: E402 (after the lines above)
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from starlette.middleware import Middleware  # noqa: E402
from starlette.middleware.trustedhost import TrustedHostMiddleware  # noqa: E402

from modeling_elmo.prediction import Prediction
from modeling_elmo.tokenization.elmo_characters import UNK_WORD  # noqa: E402

from ..pretraining.corpus import Corpus  # noqa: E402
from . import readings  # noqa: E402
from .readings import OpenModel, SimilarUses, open_model  # noqa: E402

TITLE = "ELMo explorer"
# Texts to start with, for models of these languages.
FIRST_SENTENCES = (
    "The play was a great success on Broadway.\nThe actors in that play were superb.\nThey play chess every evening.",
    "그는 배를 타고 섬에 갔다.\n그는 사과와 배를 먹었다.\n어부들이 배를 타고 바다로 나갔다.",
)
FIRST_STORIES = (
    "Ada Lovelace wrote the first program in 1843.\nShe met Charles Babbage in London.",
    "에이다 러브레이스는 1843년에 첫 프로그램을 썼다.\n그녀는 런던에서 찰스 배비지를 만났다.",
)
FIRST_SECOND_TEXTS = ("A woman wrote a program.", "한 여성이 프로그램을 썼다.")
FIRST_QUESTIONS = ("Who wrote the first program?", "누가 첫 프로그램을 썼는가?")
# A click on a word chooses it.
CLICK = """element.addEventListener("click", event => {
    const word = event.target.closest("button[data-word]");
    if (word) trigger("select", {word: word.dataset.word});
});"""
# A click while an answer is computed counts when that is done. The models answer one question at a time.
QUEUED = {"trigger_mode": "always_last", "concurrency_id": "models", "concurrency_limit": 1}
MAP_COLORS = {"other uses": "#b8b8b8", "nearest uses": "#0072B2", "chosen use": "#D55E00"}
LOCAL_NAMES = ["127.0.0.1", "localhost", "[::1]"]
BLUE, ORANGE = "0, 114, 178", "213, 94, 0"  # of Okabe and Ito's palette, as in our figures
MOST_BITS = 16.0  # a surprise with the full color
OPEN_LINES = 8  # of a text; the tables of further lines are folded
# Colors are transparent, so that the text is readable in the light and in the dark theme.
CSS = """
.tabs .tab-container button { padding: 0 8px; }
.elmo-line { position: relative; overflow: hidden; padding-left: 90px; margin-bottom: 14px; }
.elmo-line > [dir] { display: flex; flex-wrap: wrap; gap: 4px; width: fit-content; }
.elmo-word { text-align: center; font-size: 13px; line-height: 22px; min-width: 46px; }
.elmo-word span { display: block; padding: 0 6px; white-space: nowrap; }
.elmo-word b, .elmo-word button { display: block; width: 100%; font-size: 15px; font-weight: 600; padding: 0 6px; }
.elmo-word b, .elmo-word button { height: 26px; line-height: 26px; margin: 0; }
.elmo-word button { cursor: pointer; border-radius: 4px; }
.elmo-word button[aria-pressed=true] { background: var(--body-text-color); color: var(--body-background-fill); }
.elmo-keys { position: absolute; left: 0; width: 90px; opacity: 0.7; }
.elmo-keys div { text-align: right; margin-bottom: 4px; }
.elmo-note { opacity: 0.75; font-size: 14px; }
.elmo-table { overflow-x: auto; margin-bottom: 14px; }
.elmo-table :is(th, td) { padding: 4px 8px !important; border-color: var(--border-color-primary) !important; }
.elmo-table th { white-space: nowrap; }
.elmo-table td, .elmo-text, textarea { unicode-bidi: plaintext; text-align: start; }
.elmo-text { white-space: pre-wrap; line-height: 2; }
.elmo-text mark { color: inherit; border-radius: 4px; padding: 2px 4px; margin-inline-end: 3px; }
.elmo-text bdi { font-size: 11px; font-weight: 600; margin-inline-start: 4px; }
.elmo-bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 0 8px; line-height: 30px; }
.elmo-bar { position: relative; padding: 4px 0; line-height: 22px; }
.elmo-bar::after { content: ""; position: absolute; inset: 0 0 0 var(--average); border-left: 2px dashed currentColor; }
"""


def answering(*names: str) -> dict[str, Any]:
    """`app_kwargs` of a page that answers requests for local names and these names, or for all of them if one is `*`.

    Under any other name, a page of another site could read the corpus: its name may lead to this computer (DNS
    rebinding).
    """
    return {"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_NAMES, *names])]}


# No file is served or taken, and nothing is loaded from other hosts: no fonts of a theme, for example.
LAUNCH_OPTIONS: dict[str, Any] = {
    "share": False,
    "allowed_paths": [],
    "max_file_size": 0,
    "ssr_mode": False,
    "footer_links": ["api"],
    "app_kwargs": answering(*["*"] if gr.utils.get_space() else []),  # a Space has names of its own
    "css": CSS,
    "theme": gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
}


def pass_proxy(*names: str):
    """Lets this process ask these hosts itself, whatever proxy is set."""
    former = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    hosts = [former, *names] if former else names
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


def build_page(
    models: Sequence[str],
    corpus: Sequence[str] = (),
    trust_remote_code: bool = False,
    split_sentences: str | None = None,
) -> gr.Blocks:
    """The page of some models, ready to launch with `LAUNCH_OPTIONS`. A tab with nothing to show is left out.

    From then on this process asks for local names without a proxy: Gradio asks for its own page.

    Args:
        models: folders or Hub names of biLMs and of trained heads.
        corpus: text files, folders or patterns, one sentence per line, to search for uses of a word.
        split_sentences: language of a corpus whose lines are not sentences; they are joined and split by its rules.
    """
    text = Corpus.from_files(corpus, language=split_sentences) if corpus else None
    opened = [open_model(name, trust_remote_code) for name in models]
    bilms = [model for model in opened if model.task is None]
    heads = [model for model in opened if model.task is not None]
    predicting = [model for model in bilms if model.predicts]
    mixing = [model for model in heads if readings.mixes_of(model)]
    with gr.Blocks(title=TITLE, analytics_enabled=False) as page:
        gr.HTML(f"<h1>{TITLE}</h1>" + "<br>".join(map(model_line, opened)))
        with gr.Tabs(overflow_behavior="wrap"):
            if bilms:
                add_uses_tab(page, bilms, text)
            if predicting:
                add_expectations_tab(page, predicting)
            if heads:
                add_heads_tab(page, heads)
            if mixing:
                add_weights_tab(mixing)
    pass_proxy("127.0.0.1", "localhost", "::1")
    return page.queue(max_size=32, api_open=False)  # an open API passes the queue


def add_uses_tab(page: gr.Blocks, bilms: list[OpenModel], corpus: Corpus | None):
    def uses(text: str, word: str | None, layer: int):
        parts = []
        for bilm in bilms:
            parts += uses_of(bilm, text, word, layer, corpus)
        return parts

    def first_uses(text: str, layer: int):
        try:
            names, chosen = readings.words_to_choose(bilms[0], text)
        except ValueError:  # `uses` says it too
            names, chosen = [], None
        return [gr.Dropdown(choices=names, value=chosen), *uses(text, chosen, layer)]

    with gr.Tab("Uses of a word"):
        gr.Markdown(
            "How alike are the uses of a word? Each color is a cosine between two vectors: of the chosen word, and of "
            "the word above. The token layer does not read the context; the layers of the biLSTM do. Case counts: uses "
            "of *play* do not include *Play*."
        )
        text = text_box("Sentences, one per line", language_of(bilms[0], FIRST_SENTENCES))
        look = gr.Button("Look", variant="primary")
        with gr.Row():
            word = gr.Dropdown(label="Chosen word: click one below", allow_custom_value=True, scale=2)
            deepest = max(bilms, key=lambda bilm: len(bilm.layers))
            layers = [(name, number) for number, name in enumerate(deepest.layers)]
            layer = gr.Radio(layers, value=len(layers) - 1, label="Layer of the nearest uses and of their map", scale=3)
        outputs = []
        with gr.Row():
            for bilm in bilms:
                with gr.Column(min_width=420):
                    gr.HTML(model_line(bilm))
                    cosines = gr.HTML(js_on_load=CLICK)
                    with gr.Row():
                        with gr.Column(min_width=400):
                            table = gr.HTML()
                        with gr.Column(min_width=400):
                            points, _ = use_map(None)
                            caption = gr.HTML()
                    outputs += [cosines, table, points, caption]
    show = {"fn": uses, "inputs": [text, word, layer], "outputs": outputs, **QUEUED}
    gr.on([word.input, layer.input], **show, api_name="uses")
    gr.on([look.click, page.load], first_uses, [text, layer], [word, *outputs], api_name="words", **QUEUED)
    for cosines in outputs[::4]:
        cosines.select(clicked_word, None, word, api_visibility="private").success(**show, api_visibility="private")


def clicked_word(event: gr.EventData) -> str:
    return event.word


def uses_of(opened: OpenModel, text: str, word: str | None, layer: int | None, corpus: Corpus | None) -> list[Any]:
    """A sentence and cosines, nearest uses, map and its caption; an error is the sentence, and nothing follows."""
    try:
        names = readings.named_words(opened, text)
        if not word or layer is None:
            raise ValueError("No word or no layer is chosen. Click a word, and choose a layer.")
        lines = readings.layer_cosines(opened, text, word)
        similar = readings.similar_uses(opened, text, word, layer, corpus)
    except (ValueError, ImportError) as error:
        return [note(str(error)), "", *use_map(None)]
    rows = [{"cosine": cosine, "nearest in other sentences": similar.uses[near]} for near, cosine in similar.nearest]
    nearest = "in one sentence"
    table = ""
    if rows:
        nearest = f"the nearest in another sentence has the cosine {rows[0]['cosine']:.2f}"
        table = shaded_table(rows, ["cosine"], "{:.2f}")
    summary = note(f"Uses of the word: {len(similar.uses)}; {nearest}.")
    return [summary + cosine_lines(opened.layers, lines, names, word), table, *use_map(similar)]


def use_map(similar: SimilarUses | None) -> tuple[gr.ScatterPlot, str]:
    """The uses in their plane, and its caption; hidden if there are fewer than three, because two points are a line."""
    if similar is None or len(similar.uses) < 3:
        axes = {"x": "first component", "y": "second component", "color": "group", "tooltip": ["use"]}
        return gr.ScatterPlot(**axes, color_map=MAP_COLORS, height=320, visible=False), ""
    # Gradio draws a change of the points only, and of them those in the colors of the first map.
    groups = ["other uses"] * len(similar.uses)
    for near, _ in similar.nearest:
        groups[near] = "nearest uses"
    groups[similar.query] = "chosen use"
    table = pd.DataFrame(
        {
            "first component": similar.points[:, 0],
            "second component": similar.points[:, 1],
            "group": groups,
            "use": list(map(str, similar.uses)),
        }
    )
    colors = pd.DataFrame({"group": MAP_COLORS.keys()})  # without a place, so that they are not drawn
    first, second = similar.shares
    shares = f"{first:.0%} by the first component and {second:.0%} by the second component"
    return gr.ScatterPlot(pd.concat([colors, table]), visible=True), note(f"Variance explained: {shares}.")


def add_expectations_tab(page: gr.Blocks, bilms: list[OpenModel]):
    def expect(text: str):
        shown = ""
        for bilm in bilms:
            shown += model_line(bilm) + told(expectation_lines, bilm, text)
        return shown

    with gr.Tab("What the model expects"):
        gr.Markdown(
            "Which words does the model expect in each place? The surprise of a word is -log2 of its probability: each "
            "bit halves the probability. The word of the text is in [brackets] where the model expects it. A word with "
            "\\* is not in the vocabulary, and counts as `<UNK>`."
        )
        text = text_box("Sentences, one per line", language_of(bilms[0], FIRST_SENTENCES))
        look = gr.Button("Look", variant="primary")
        gr.on([look.click, page.load], expect, text, gr.HTML(), api_name="expectations", **QUEUED)


def add_heads_tab(page: gr.Blocks, heads: list[OpenModel]):
    tasks = {head.task for head in heads}
    with gr.Tab("Heads"):
        limit = f" of up to {readings.LONGEST_SENTENCE} words" if "semantic-role-labeling" in tasks else ""
        text = text_box(f"Text, one sentence{limit} per line", language_of(heads[0], FIRST_STORIES))
        question = gr.Textbox(
            language_of(heads[0], FIRST_QUESTIONS),
            label="Question about the text",
            visible="extractive-question-answering" in tasks,
        )
        second = gr.Textbox(
            language_of(heads[0], FIRST_SECOND_TEXTS) if any(map(readings.needs_pairs, heads)) else "",
            label="Second text, for classifiers of pairs",
            visible="text-classification" in tasks,
        )
        look = gr.Button("Look", variant="primary")
        for number, head in enumerate(heads, 1):
            gr.HTML(model_line(head))
            find = partial(told, marked_text, head)
            inputs = [text, question, second]
            gr.on([look.click, page.load], find, inputs, gr.HTML(), api_name=f"head_{number}", **QUEUED)


def add_weights_tab(heads: list[OpenModel]):
    with gr.Tab("Layer weights"):
        gr.Markdown(
            "How much of each layer does a trained head use? The shares are the softmax of the learned weights, and "
            "gamma is the factor of the weighted sum (equation 1 of the paper)."
        )
        with gr.Row():
            for head in heads:
                with gr.Column(min_width=420):
                    gr.HTML(model_line(head))
                    for place, (shares, gamma) in readings.mixes_of(head).items():
                        gr.HTML(share_bars(f"ELMo at the {place} of the network", head.layers, shares, gamma))


def text_box(label: str, value: str) -> gr.Textbox:
    return gr.Textbox(value, label=label, lines=3, max_lines=12)


def language_of(opened: OpenModel, texts: Sequence[str]) -> str:
    """The text of which the model knows the most words."""
    tokenizer = opened.tokenizer

    def known_share(text: str) -> float:
        words = tokenizer.splitter.words(text)
        ids, _ = tokenizer.encode_words(words)
        return np.mean(ids != tokenizer.unk_token_id)

    return max(texts, key=known_share)


def told(function: Callable[..., str], *inputs: Any) -> str:
    """What the function tells, or our error in its place."""
    try:
        return function(*inputs)
    except (ValueError, ImportError) as error:
        return note(str(error))


def shaded(value: float, most: float = 1.0, positive: str = BLUE) -> str:
    """The background of a value: none for 0, strongest from `most` on, another color below 0."""
    color = positive if value >= 0 else ORANGE
    opacity = 0.7 * min(abs(value) / most, 1)
    return f"background: rgba({color}, {opacity:.2f})"


def note(text: str) -> str:
    return f'<p class="elmo-note">{escape(text)}</p>'


def folded(lines: Iterable[tuple[Sequence[str], str]], chosen: int = 0) -> str:
    """What is shown below the words of each line; after the first lines it is closed, except for the chosen line."""
    shown = ""
    for number, (words, part) in enumerate(lines):
        is_open = number < OPEN_LINES or number == chosen
        shown += part if is_open else f"<details><summary>{escape(' '.join(words))}</summary>{part}</details>"
    return shown


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
    cells = "".join(f"<span>{layer}</span>" for layer in layers)
    key = f'<div class="elmo-word"><b>&nbsp;</b>{cells}</div>'
    shown = []
    for (words, cosines_LW), line in zip(lines, names, strict=True):
        columns = ""
        for word, word_name, cosines in zip(words, line, cosines_LW.T.tolist(), strict=True):
            pressed = "true" if word_name == name else "false"
            button = f'<button data-word="{escape(word_name)}" aria-pressed="{pressed}">{escape(word)}</button>'
            cells = "".join(f'<span style="{shaded(cosine)}">{cosine:.2f}</span>' for cosine in cosines)
            columns += f'<div class="elmo-word">{button}{cells}</div>'
        keys = f'<div class="elmo-keys">{key * len(words)}</div>'  # for any number of rows; the rest is cut
        shown.append((words, f'<div class="elmo-line">{keys}<div dir="auto">{columns}</div></div>'))
    chosen_line = next(number for number, line in enumerate(names) if name in line)
    return folded(shown, chosen_line)


def shaded_table(rows: Sequence[dict[str, Any]], numbers: list[str], digits: str, **shades: Any) -> str:
    """A table whose numbers are shaded, and whose texts are escaped."""
    table = pd.DataFrame(rows).style.hide(axis="index").format(lambda text: escape(str(text)))
    table = table.format(digits, subset=numbers).map(partial(shaded, **shades), subset=numbers)
    return f'<div class="elmo-table">{table.to_html()}</div>'


def expectation_lines(opened: OpenModel, text: str) -> str:
    """A table for each line, with a row for each word, colored by its surprise in each direction."""
    lines = readings.expectations(opened, text)
    surprises = [(word.forward_bits, word.backward_bits) for line in lines for word in line]
    before, after = np.mean(surprises, axis=0)
    sentence = f"Mean surprise of a word: {before:.1f} bits given the words before, {after:.1f} given the words after."
    shown = []
    for line in lines:
        rows = []
        for expected in line:
            token = expected.token
            mark = "*" if token == UNK_WORD else ""
            row = {
                "word": expected.word + mark,
                "bits": expected.forward_bits,
                "expected from the words before": shown_guesses(expected.forward, token),
                "bits, backward": expected.backward_bits,
                "expected from the words after": shown_guesses(expected.backward, token),
                "expected from both": shown_guesses(expected.both, token),
            }
            rows.append(row)
        table = shaded_table(rows, ["bits", "bits, backward"], "{:.1f}", most=MOST_BITS, positive=ORANGE)
        shown.append(([expected.word for expected in line], table))
    return note(sentence) + folded(shown)


def marked_text(opened: OpenModel, *inputs: str) -> str:
    """What a head finds: the number of labeled pieces, and the text with their labels."""
    hues = {}
    count = 0
    marked = ""
    for text, label in readings.head_pieces(opened, *inputs):
        if not label:
            marked += escape(text)
            continue
        count += 1
        hue = hues.setdefault(label, 210 + 157 * len(hues))
        color = f"hsl({hue} 80% 50% / 0.3)"
        marked += f'<mark style="background: {color}">{escape(text)}<bdi>{escape(label)}</bdi></mark>'
    summary = f"Labeled pieces: {count}." if count else "Nothing found."
    return f'{note(summary)}<div class="elmo-text">{marked}</div>'


def share_bars(title: str, layers: Sequence[str], shares: Sequence[float], gamma: float) -> str:
    """A bar for the share of each layer, with a line at the average."""
    largest = layers[int(np.argmax(shares))]
    average = f"1/{len(layers)}"
    sentence = f"{title}, gamma {gamma:.2f}. Largest share: {largest}. The dashed line is the average, {average}."
    bars = f'<div class="elmo-bars" style="--average: calc(100% * {average})">'
    for layer, share in zip(layers, shares, strict=True):
        bar = f'<div class="elmo-bar"><div style="width: {share:.2%}; background: rgb({BLUE})">&nbsp;</div></div>'
        bars += f"<span>{layer}</span>{bar}<span>{share:.2f}</span>"
    return f"{note(sentence)}{bars}</div>"


def shown_guesses(guesses: Iterable[Prediction], token: str) -> str:
    """Words with their probabilities; what the word of the text counts as is in brackets."""
    shown = []
    for guess in guesses:
        text = f"[{token}]" if guess.word == token else guess.word
        shown.append(f"\u2068{text}\u2069\u00a0{math.exp(guess.log_prob):.1%}")  # isolated, whatever its direction
    return "\u2003".join(shown)
