"""The explorer as a person sees it: `make test-browser`. It needs Chromium and the package playwright."""

import shutil
from pathlib import Path

import pytest
import torch

from modeling_elmo import ELMoConfig, ELMoForTokenClassification, ELMoTokenizer

gradio = pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api", reason="`make test-browser` installs playwright")

ROOT = Path(__file__).parents[1]
ENGLISH, KOREAN = (str(ROOT / "model_cards" / f"elmo-small-{language}") for language in ("en", "ko"))
PLAY = str(ROOT / "tests" / "fixtures" / "demo" / "play.txt")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 120_000  # milliseconds, for a busy machine

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install the package of your distribution")


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> list[str]:
    """Two taggers: one that finds something in any text, and one that finds nothing."""
    folders = []
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>"])
    for name, tag in (("finder", 1), ("blind", 0)):
        config = ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), head="linear", id2label={0: "O", 1: "B-X"})
        model = ELMoForTokenClassification(config)
        with torch.no_grad():
            model.classifier.bias[tag] = 100.0
        folders.append(str(tmp_path_factory.mktemp("heads") / name))
        model.save_pretrained(folders[-1])
        tokenizer.save_pretrained(folders[-1])
    return folders


@pytest.fixture(scope="module")
def address(heads):
    from modeling_elmo.run_scripts.explorer.page import LAUNCH_OPTIONS, build_page

    page = build_page([ENGLISH, KOREAN, *heads], [PLAY])
    page.launch(**LAUNCH_OPTIONS, prevent_thread_lock=True, quiet=True)
    yield page.local_url
    page.close()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # root has no sandbox
        yield browser
        browser.close()


@pytest.fixture(params=[1280])
def tab(address, browser, request):
    """A tab of the browser with the explorer. The test fails if the page asks another computer, or logs an error."""
    page = browser.new_page(viewport={"width": request.param, "height": 900})
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
    assert page.evaluate("document.documentElement.scrollWidth") <= request.param
    page.close()


both_widths = pytest.mark.parametrize("tab", [1280, 400], indirect=True)


def visible(tab, selector: str):
    return tab.locator(selector).locator("visible=true")


def shown(tab, selector: str) -> list[str]:
    return visible(tab, selector).all_inner_texts()


def ask(tab, text: str):
    visible(tab, "textarea").first.fill(text)
    visible(tab, "button:text-is('Look')").click()


def sides(tab, selector: str) -> list[dict[str, float]]:
    """The place of each element in the window."""
    return visible(tab, selector).evaluate_all("each => each.map(one => one.getBoundingClientRect().toJSON())")


def drawn_points(tab, numbers: list[int]):
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


@both_widths
def test_an_error_is_a_message_without_the_old_result(tab):
    message = "There is no text yet. Type one."
    for name, result, count in (
        ("Uses of a word", "button[data-word], table, svg.marks", 2),
        ("What the model expects", "table", 2),
        ("Heads", "mark", 2),
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


@both_widths
def test_the_parts_fit(tab):
    """All tabs, the button at one place, tables within the window, and the labels of each row of words."""
    width = tab.viewport_size["width"]
    names = ["Uses of a word", "What the model expects", "Heads", "Layer weights"]
    assert shown(tab, "[role=tab]") == names and max(each["right"] for each in sides(tab, "[role=tab]")) <= width
    for table in visible(tab, ".elmo-table").all():
        assert table.evaluate("each => each.scrollWidth <= each.clientWidth")
    assert max(each["height"] for each in sides(tab, "th:first-child")) < 40  # one line
    for line in visible(tab, ".elmo-line").all():
        rows, keys = (
            {round(each.bounding_box()["y"]) for each in line.locator(f"{part} .elmo-word").all()}
            for part in ("[dir]", ".elmo-keys")
        )
        assert rows <= keys and (len(rows) > 1 or width > 400)
    places = []
    for name in names[:3]:
        tab.get_by_role("tab", name=name).click()
        visible(tab, ".elmo-note").last.wait_for()
        (button,), fields = sides(tab, "button:text-is('Look')"), sides(tab, "textarea")
        places.append((button["left"], button["width"]))
        assert 0 < button["top"] - max(each["bottom"] for each in fields) < 60
        assert button["width"] > 0.8 * width
    assert len(set(places)) == 1


def test_words_from_right_to_left(tab):
    ask(tab, "שלום עולם\nThe שלום is")
    visible(tab, "button[data-word='עולם']").first.wait_for()
    first, second, the, other, *_ = (each["left"] for each in sides(tab, "button[data-word]"))
    assert first > second and the < other
    assert visible(tab, "textarea").first.evaluate("each => getComputedStyle(each).unicodeBidi") == "plaintext"
    tab.get_by_role("tab", name="Heads").click()
    ask(tab, "שלום עולם\nThe word")
    visible(tab, "mark:has-text('עולם')").wait_for()
    first, second, the, other = (each["left"] for each in sides(tab, "mark"))
    assert first > second and the < other


def test_a_long_text_is_folded(tab):
    text = "\n".join(f"play {number} it" for number in range(60))
    ask(tab, text)
    tab.wait_for_selector("summary:has-text('play 59 it')")
    assert len(shown(tab, ".elmo-line")) == 2 * 8
    visible(tab, "summary:has-text('play 41 it')").first.click()
    visible(tab, "button[data-word='41']").click()
    tab.wait_for_selector("button[data-word='41'][aria-pressed=true]")
    assert len(shown(tab, ".elmo-line")) == 2 * 9
    tab.get_by_role("tab", name="What the model expects").click()
    ask(tab, text)
    tab.wait_for_selector("summary:has-text('play 59 it') >> visible=true")
    assert len(shown(tab, "table")) == 2 * 8


def test_what_heads_find_and_their_layers(tab):
    tab.get_by_role("tab", name="Heads").click()
    visible(tab, ".elmo-note:text-is('Nothing found.')").wait_for()
    ask(tab, "They play.\nIt is.")
    visible(tab, ".elmo-note:text-is('Labeled pieces: 6.')").wait_for()
    assert len(shown(tab, "mark")) == 6 and len(shown(tab, ".elmo-note:text-is('Nothing found.')")) == 1
    tab.get_by_role("tab", name="Layer weights").click()
    visible(tab, ".elmo-bars").first.wait_for()
    assert len(shown(tab, ".elmo-bar")) == 2 * 3
    lines = visible(tab, ".elmo-bar").evaluate_all(
        "each => each.map(bar => parseFloat(getComputedStyle(bar, '::after').left) / bar.clientWidth)"
    )
    assert lines == [pytest.approx(1 / 3, abs=0.01)] * 6
