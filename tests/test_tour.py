"""The notebooks of docs/ run, print what is stored in them, and are fit for a web page. `make tour` stores it again."""

import os
import re

import nbclient
import nbformat
import numpy as np
import pytest
from documents import LINK, sections
from places import ROOT

DOCS = ROOT / "docs"
NOTEBOOKS = ["tour.ipynb", "tour.ko.ipynb"]
NUMBER = r"-?\d[\d,]*\.?\d*"
NOISE = r"[/\\](home|tmp|usr|root|Users)\b|runtime|[Ww]arning"  # paths of a machine, timings, advice of libraries


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(DOCS / name, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook: nbformat.NotebookNode) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def num_pictures(cell: nbformat.NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def execute(notebook: nbformat.NotebookNode) -> None:
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}  # a clone may not be installed
    options = {"timeout": 1200, "record_timing": False, "coalesce_streams": True}
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(DOCS)}}, **options).execute(env=environment)


def compare(found: nbformat.NotebookNode, stored: nbformat.NotebookNode, **tolerance: float) -> None:
    """The same words; numbers within a tolerance, because float32 sums differ between processors."""
    texts = [printed(found), printed(stored)]
    words = [re.sub(NUMBER, "0", text).split() for text in texts]
    assert words[0] == words[1]
    numbers = [[float(number.replace(",", "")) for number in re.findall(NUMBER, text)] for text in texts]
    np.testing.assert_allclose(*numbers, **tolerance, err_msg=texts[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_prints_what_is_stored_and_elmo_helps_the_tagger(name):
    notebook, stored = read(name), read(name)
    execute(notebook)
    pairs = [*zip(code_cells(notebook), code_cells(stored), strict=True)]
    untrained = [pair for pair in pairs if "tagger" not in pair[0].source]
    assert len(untrained) > 18
    for cell, before in untrained:
        compare(cell, before, rtol=0.02, atol=0.02)
        assert num_pictures(cell) == num_pictures(before)
    training, weights = [pair for pair in pairs if "tagger" in pair[0].source][-2:]
    without, with_elmo = (float(number) for number in re.findall(r"(\d+\.\d)", printed(training[0])))
    assert with_elmo > without + 5
    compare(*training, atol=8)
    compare(*weights, atol=0.2)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_fit_for_a_web_page(name):
    notebook, text = read(name), (DOCS / name).read_text("utf-8")
    assert len(text) < 400_000
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert all(len(cell.source.splitlines()) <= 40 for cell in cells)
    for output in (output for cell in cells for output in cell.outputs):
        assert output.get("name", "stdout") == "stdout" and output.output_type != "error"
        assert not re.search(NOISE, output.get("text", ""))
    for file, section in LINK.findall(prose(notebook)):
        assert (DOCS / file).exists(), file
        assert not section or section in sections(DOCS / file), f"{file}#{section}"


def test_both_languages_tell_the_same_story():
    notebooks = [read(name) for name in NOTEBOOKS]
    headings, exercises = r"^## (\d)\..*?(?:\((\d+).*)?$", r"^\*\*\w+ ([\d.]+)\.\*\*"  # with minutes; with numbers
    for pattern, count in ((headings, 8), (exercises, 9)):
        english, korean = (re.findall(pattern, prose(each), re.MULTILINE) for each in notebooks)
        assert len(english) == count and english == korean
    for each in notebooks:
        assert prose(each).count("<details>\n<summary>") == prose(each).count("\n\n</details>") == 9
        solved = [number for cell in code_cells(each) for number in re.findall(r"^# \w+ ([\d.]+)\n", cell.source)]
        assert len(solved) == 8
        assert sum("plt.show()" in cell.source for cell in code_cells(each)) == 5


if __name__ == "__main__":
    for name in NOTEBOOKS:
        notebook = read(name)
        execute(notebook)
        nbformat.write(notebook, DOCS / name)
