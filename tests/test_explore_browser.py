"""The explorer as a person sees it: `make test-browser`. It needs Chromium and the package playwright."""

import shutil

import pytest
import torch
from bilm_models import make_tokenizer, save, tiny_model
from places import FIXTURES, ROOT

from modeling_elmo import ELMoForTokenClassification

gradio = pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api", reason="`make test-browser` installs playwright")

ENGLISH, KOREAN = (str(ROOT / "model_cards" / f"elmo-small-{language}") for language in ("en", "ko"))
PLAY = str(FIXTURES / "demo" / "play.txt")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 120_000  # milliseconds, for a busy machine

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install the package of your distribution")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A page with two biLMs, and a tagger that finds something in any text."""
    from modeling_elmo.run_scripts.explorer.page import LAUNCH_OPTIONS, build_page

    tokenizer, tagger = make_tokenizer(), tmp_path_factory.mktemp("heads") / "finder"
    options = {"head": "linear", "id2label": {0: "O", 1: "B-X"}}
    model = tiny_model(ELMoForTokenClassification, vocab_size=len(tokenizer), **options)
    with torch.no_grad():
        model.classifier.bias[1] = 100.0
    save(tagger, model, tokenizer)
    page = build_page([ENGLISH, KOREAN, str(tagger)], [PLAY])
    page.launch(**LAUNCH_OPTIONS, prevent_thread_lock=True, quiet=True)
    yield page.local_url
    page.close()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # root has no sandbox
        yield browser
        browser.close()


@pytest.fixture
def tab(address, browser):
    """A tab of the browser with the explorer. The test fails if the page asks another computer, or logs an error."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    asked, errors, dialogs = [], [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.goto(address)
    page.wait_for_selector("button[aria-pressed=true]")
    yield page
    assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert not errors and not dialogs
    page.close()


def visible(tab, selector):
    return tab.locator(selector).locator("visible=true")


def shown(tab, selector):
    return visible(tab, selector).all_inner_texts()


def ask(tab, text):
    visible(tab, "textarea").first.fill(text)
    visible(tab, "button:text-is('Look')").click()


def drawn_points(tab, numbers):
    """Waits until each model has a sentence with its number of uses, and a map with as many points."""
    for number in numbers:
        tab.wait_for_selector(f".elmo-note:has-text('Uses of the word: {number};')")
    many = [number for number in numbers if number > 2]  # two points are no map
    points = "[...document.querySelectorAll('svg.marks')].filter(map => map.checkVisibility())"
    points += ".map(map => map.querySelectorAll('.mark-symbol.role-mark path').length)"
    tab.wait_for_function(f"JSON.stringify({points}) == '{str(many).replace(' ', '')}'")


def test_a_click_on_a_word_chooses_it(tab):
    assert shown(tab, "button[aria-pressed=true]") == ["play", "play"]  # of both models
    assert "[play]" in " ".join(shown(tab, "td"))  # of the nearest uses
    tab.locator("button[data-word='chess']").first.click()
    tab.wait_for_selector("button[data-word='chess'][aria-pressed=true]")
    chosen = tab.get_by_label("Chosen word")
    assert chosen.input_value() == "chess"
    evil = "<img src=x onerror=alert(1)>${alert(2)}{{value}}"  # a template of JavaScript, and one of Gradio
    chosen.fill(evil)
    chosen.press("Enter")
    tab.wait_for_selector("p:has-text('reads no word')")
    assert f"reads no word '{evil}' in this text" in " ".join(shown(tab, ".elmo-note"))


def test_words_and_maps_are_those_of_the_text(tab):
    """The components that change with their properties: choices, visibility."""
    drawn_points(tab, [209, 209])
    for text, words, uses, nearest in (
        ("A xyzzy is here.", 5, 1, 0),
        ("Our xyzzy, a xyzzy.\nIs xyzzy?", 9, 3, 1),
        ("Its play.", 3, 207, 8),
        ("xyzzy is\nxyzzy was", 4, 2, 1),
        ("A play.", 3, 207, 8),
    ):
        ask(tab, text)
        drawn_points(tab, [uses] * 2)
        assert len(shown(tab, "button[data-word]")) == 2 * words
        assert len(shown(tab, ".elmo-table tr:has(td)")) == 2 * nearest
        tab.get_by_label("Chosen word").click()
        assert len(shown(tab, "ul[role=listbox] li")) == words
        tab.keyboard.press("Escape")


def test_expected_words_and_markup_in_a_text(tab):
    tab.get_by_role("tab", name="What the model expects").click()
    ask(tab, "<img src=x onerror=alert(1)> ${alert(2)} {{value}}")
    tab.wait_for_selector("td:has-text('onerror')")
    assert "onerror" in " ".join(shown(tab, "td"))
    ask(tab, "They play.\nIt is.")
    tab.wait_for_selector("td:text-is('Is*'), td:text-is('is')")
    assert shown(tab, "tr:has(td) td:first-child")[:6] == ["They", "play", ".", "It", "is", "."]
    assert len(shown(tab, "table")) == 2 * 2 and len(shown(tab, "tr:has(td)")) == 2 * 6
    assert len(shown(tab, ".elmo-note:has-text('Mean surprise of a word')")) == 2


def test_an_error_is_a_message_without_the_old_result(tab):
    message = "There is no text yet. Type one."
    for name, result, count in (
        ("Uses of a word", "button[data-word], table, svg.marks", 2),
        ("What the model expects", "table", 2),
        ("Heads", "mark", 1),
    ):
        tab.get_by_role("tab", name=name).click()
        visible(tab, result).first.wait_for()
        ask(tab, "")
        messages = playwright.expect(visible(tab, f".elmo-note:text-is('{message}')"))
        messages.to_have_count(count, timeout=PATIENCE)
        assert not shown(tab, ".toast-wrap *, .error") and not shown(tab, result)
        ask(tab, "They play.")
        messages.to_have_count(0, timeout=PATIENCE)
        visible(tab, result).first.wait_for()
