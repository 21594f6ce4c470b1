"""The check of words finds what it lists, where it is, and nothing else."""

import runpy

import pytest
from places import ROOT

CHECK = runpy.run_path(str(ROOT / ".ci" / "check_sentences"))
STIFF = [
    "The figures are of the first run.",
    "Labels are those of the model.",
    "Words with tags that are none are left out.",
    "--output x: there is no such folder.",
    "A message tells how many words are left.",
    "Its name stands in the first line.",
    "A quote is no word of the text.",
    "Pass a text that is not empty.",
    "Training starts anew.",
    "A begun run is found.",
    "The run goes on.",
    "Other labels are refused.",
    "The file has a word a line.",
    "Write sentences, one a line.",
    "In Python. The same, with a model.",
    "This cannot be told from the data.",
    "No card was at hand.",
    "A column in the place of the text.",
    "It ends with the same\n    bits.",
    "Text. Of several files, the first counts.",
    "What should I know?",
    "The colour of a sense.",
    "A labelled sentence.",
    "Words are tokenised.",
    "It is grey.",
]
RIGHT = [
    "Of course this is of course right, and of use.",
    "The loss equals the loss of the definition.",
    "There is no word in the text, and none of them is missing.",
    "Only the ids tell the markers apart from words.",
    "A model that is not new is no longer trained, and is no slower.",
    "It is a line as before, and one word per line.",
    "Analysing Lexical Semantic Change with Contextualised Word Representations",
    "The analyses raise an error, otherwise they rise.",
    "In 45 cases, 44 of them equal; of the others, one.",
]


@pytest.mark.parametrize("text", STIFF)
def test_a_stiff_word_is_found(text):
    assert len(list(CHECK["stiff_words"](text))) == 1


@pytest.mark.parametrize("text", RIGHT)
def test_right_words_stay(text):
    assert not list(CHECK["stiff_words"](text))


def test_each_pattern_has_an_example():
    messages = {message.partition("write: ")[2] for text in STIFF for _, message in CHECK["stiff_words"](text)}
    assert messages == {*CHECK["PLAIN_WORDS"].values()}


def test_places_in_documents_and_code(tmp_path):
    page, program = tmp_path / "page.md", tmp_path / "program.py"
    page.write_text("Run `it goes on` and\n\n```text\nit goes on\n```\n\nit goes on here.\n")
    program.write_text(
        '''"""Words.\n\nThis run goes on then."""\n\nraise ValueError(f"{1} such {2} goes" " on now")  # goes on\n'''
    )
    [(line, text)] = CHECK["strings_of_document"](page)
    assert [line + below for below, _ in CHECK["stiff_words"](text)] == [7]
    lines = [(line, CHECK["stiff_words"](text)) for line, text in CHECK["strings_of_code"](program)]
    assert [line + below for line, words in lines for below, _ in words] == [3, 5]
