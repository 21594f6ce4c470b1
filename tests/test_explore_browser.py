"""The explorer as a person sees it: `make test-browser`. It needs Chromium and the package playwright."""

import shutil
from pathlib import Path

import pytest

gradio = pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api", reason="`make test-browser` installs playwright")

ROOT = Path(__file__).parents[1]
ENGLISH, KOREAN = (str(ROOT / "model_cards" / f"elmo-small-{language}") for language in ("en", "ko"))
PLAY = str(ROOT / "tests" / "fixtures" / "demo" / "play.txt")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 120_000  # milliseconds, for a busy machine

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install the package of your distribution")


@pytest.fixture(scope="module")
def address():
    from modeling_elmo.run_scripts.explorer.page import LAUNCH_OPTIONS, build_page

    page = build_page([ENGLISH, KOREAN], [PLAY])
    page.launch(**LAUNCH_OPTIONS, prevent_thread_lock=True, quiet=True)
    yield page.local_url
    page.close()


@pytest.fixture
def tab(address):
    """A tab of the browser with the explorer. The test fails if the page asks another computer, or logs an error."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # root has no sandbox
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE)
        asked, errors, dialogs = [], [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        page.goto(address)
        yield page
        assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
        assert not errors and not dialogs
        browser.close()


def shown(tab, selector: str) -> list[str]:
    return tab.locator(selector).all_inner_texts()


def test_a_click_on_a_word_chooses_it(tab):
    tab.wait_for_selector("button[aria-pressed=true]")
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
    assert f"reads no word “{evil}” in this text" in " ".join(shown(tab, ".elmo-note"))


def test_expected_words_and_markup_in_a_text(tab):
    tab.get_by_role("tab", name="What the model expects").click()
    text = tab.get_by_label("Sentences, one a line").locator("visible=true")
    text.fill("<img src=x onerror=alert(1)> ${alert(2)} {{value}}")
    tab.get_by_role("button", name="Look").locator("visible=true").click()
    tab.wait_for_selector("td:has-text('onerror')")
    assert "onerror" in " ".join(shown(tab, "td"))


def test_an_error_is_a_message(tab):
    tab.wait_for_selector("button[data-word]")
    tab.get_by_label("Sentences, one a line").locator("visible=true").fill("")
    tab.get_by_role("button", name="Look").locator("visible=true").click()
    tab.get_by_text("There is no text yet. Type one.").first.wait_for()
