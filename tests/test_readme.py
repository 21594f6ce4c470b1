"""The documents are true: blocks run and print what they show, options and files exist, links lead somewhere."""

import contextlib
import gzip
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from clean_python import run
from documents import LINK, sections
from places import ROOT

from modeling_elmo.run_scripts.modeling_elmo_cli import PROGRAMS

DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
}
OUTPUTS = {  # compared in each document with blocks of Python or commands
    "README.md": 1,
    "README.ko.md": 2,
    "docs/CHECKPOINTS.md": 1,
    "docs/analysis.md": 2,
    "docs/deployment.md": 1,
    "docs/fine_tuning.md": 1,
    "docs/integrations.md": 5,
    "docs/performance.md": 0,
    "docs/pretraining.md": 0,
    "docs/reproducing.md": 0,
    "docs/sharing.md": 1,
    "docs/vectors.md": 6,
}
# What was measured, whose commands take hours and data that are not here; the migration notes have a test of their own.
REPORTS = {"docs/RESULTS.md", "docs/MIGRATION.md"}
# The folder `data` of the pages, whose public files are not here: small files of the same format.
DATA = {
    "wnut17": "ner/wnut17/{}.conll",
    "rt_polarity": "sentiment/rt_polarity/{}.tsv.gz",
    "propbank": "srl/propbank_ewt/{}.tsv.gz",
    "litbank": "coref/litbank/{}.conll.gz",
    "squadshifts": "qa/qamr/{}.json.gz",
}
TASKS = ("ner", "classify", "qa", "srl", "coref", "all")
SCORE = r"\d+\.\d+"


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A working directory with the folders that the documents name."""
    monkeypatch.chdir(tmp_path)
    for name in ("tests", "model_cards"):
        (tmp_path / name).symlink_to(ROOT / name)
    contents = {"vectors/glove.6B.100d.subset.txt.gz": b"the 0.1 0.2\n"}
    for file in (ROOT / "tests" / "fixtures" / "tasks").glob("*_*"):
        name, split = file.stem.rsplit("_", 1)
        contents |= {DATA[name].format(split): file.read_bytes()} if name in DATA else {}
    for name, content in contents.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "outputs"),
    [pytest.param(*page, marks=() if page[0] == "README.md" else pytest.mark.slow) for page in OUTPUTS.items()],
)
def test_blocks_run_and_print_what_they_show(clone, name, outputs):
    assert run_blocks(name)[1] == outputs


@pytest.mark.slow
def test_the_first_example_runs_from_an_archive(tmp_path):
    """An archive of a forge, or a clone on Windows, has the text of a link instead of its file."""
    code, printed = re.search("```python\n(.*?)```\n\n```text\n(.*?)```", DOCUMENTS["README.md"], re.DOTALL).groups()
    folder = Path("model_cards", re.search("model_cards/([\\w-]+)", code)[1])
    shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    for link in [path for path in (tmp_path / folder).rglob("*") if path.is_symlink()]:
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
    assert run(sys.executable, "-c", code, cwd=tmp_path, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1") == printed


def test_every_page_is_run_and_in_the_index():
    pages = {name for name in DOCUMENTS if name.startswith("docs/") and name != "docs/README.md"}
    assert {f"docs/{file}" for file, _ in LINK.findall(DOCUMENTS["docs/README.md"])} >= pages
    runnable = {name for name in pages - REPORTS if re.search("```(python|bash\nelmo )", DOCUMENTS[name])}
    assert runnable == OUTPUTS.keys() & pages


def test_right_columns_of_the_migration_notes_run(clone):
    names, _ = run_blocks("docs/MIGRATION.md")
    rows = re.findall(r"^\|(?!-)[^|]*\| `([^`]*)`.* \|$", DOCUMENTS["docs/MIGRATION.md"], re.MULTILINE)
    python = [code for code in rows if not code.startswith("elmo ")]
    assert len(python) > 30
    for code in python:
        assert exec_or_eval(code, names) is not False, code
    vectors = names["embed_sentences"](names["sentences"], names["model"], names["tokenizer"], layers="all")
    assert [layers.shape[:2] for _, layers in vectors] == [(3, 3), (3, 2)]
    assert (clone / "all.hdf5").is_file()


def test_commands_name_programs_and_options_that_exist():
    options = 0
    for name, text in DOCUMENTS.items():
        for program, words in commands(text):
            assert program in PROGRAMS, f"{name}: elmo {program}"
            for option in re.findall(r"--\w+", words):
                assert has_option(program, option, words), f"{name}: elmo {program} {option}"
                options += 1
    assert options > 120


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name.startswith("docs/") and name not in REPORTS])
def test_options_of_a_page_belong_to_a_program(name):
    for option in re.findall(r"`(--\w+)", DOCUMENTS[name]):
        assert option in ("--debug", "--help") or any(has_option(program, option) for program in PROGRAMS), option


def test_links_lead_somewhere():
    for name, text in DOCUMENTS.items():
        for file, section in LINK.findall(re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)):
            target = (ROOT / name).parent / file if file else ROOT / name
            assert target.exists(), f"{name}: {file}"
            assert not section or section in sections(target), f"{name}: {file}#{section}"


def test_each_page_says_where_to_go_next():
    pages = {name: text for name, text in DOCUMENTS.items() if name.startswith(("docs/", "README"))}
    for name, text in pages.items():
        last = text.rstrip("\n").rpartition("\n\n")[2]
        assert last.startswith(("Next: ", "다음: ")) and 1 <= len(LINK.findall(last)) <= 3, f"{name}: {last}"


def test_korean_readme_has_the_same_commands_figures_and_links():
    english = DOCUMENTS["README.md"]
    before, of_korean, after = re.split(r"(## 한국어.*?(?=\n## ))", DOCUMENTS["README.ko.md"], flags=re.DOTALL)
    korean = before + after
    assert {program for program, _ in commands(of_korean)} == {"embed", "ner"}
    blocks = [
        [re.sub(r" +#.*", "", block) for block in re.findall(r"```\w+\n.*?```", text, re.DOTALL)]
        for text in (english, korean)
    ]
    assert blocks[0] == blocks[1] and len(blocks[0]) == 4
    assert figures_of_results(english) == figures_of_results(korean) and len(figures_of_results(english)) == 11
    assert sorted(commands(english)) == sorted(commands(korean))
    assert "`make demo`" in english and "`make test`" in english  # the two that make their own environments
    own = {"README.md", "README.ko.md", "docs/tour.ipynb", "docs/tour.ko.ipynb"}
    links = {link for link in LINK.findall(korean) if link[0]}  # one leads to the section of the Korean model
    assert {file for file, _ in {*LINK.findall(english)} ^ links} == own


def test_scores_of_tasks_are_those_of_the_results():
    """The scores in the README, with and without ELMo, equal Table 1 in RESULTS.md, rounded."""
    table = DOCUMENTS["docs/RESULTS.md"].partition("begin -->")[2].partition("<!-- ")[0]
    measured = [
        [float(number) for number in re.findall(SCORE, row)[:4]] for row in re.findall(r"^\| .*± .*", table, re.M)
    ]
    text = DOCUMENTS["README.md"].replace("**", "")
    rows = re.findall(rf"^\| .*? \| ({SCORE}) ± ({SCORE}) \| ({SCORE}) ± ({SCORE}) \|", text, re.M)
    assert len(rows) == 7
    for row in rows:
        assert any([*map(float, row)] == pytest.approx(other, abs=0.051) for other in measured), row


def test_the_map_names_every_folder():
    tree = re.search(r"(^    \S.*/ .*\n(^    .*\n)+)", DOCUMENTS["CONTRIBUTING.md"], re.MULTILINE)
    named, parents = {"run_scripts/benchmarks/peers"}, []  # which is on the line of its parent
    for spaces, folder in re.findall(r"^    ( *)(\w+)/ ", tree[1], re.MULTILINE):
        parents[len(spaces) // 2 :] = [folder]
        named.add("/".join(parents))
    files = [file for room in ("modeling_elmo", "tokenization", "run_scripts") for file in (ROOT / room).rglob("*.py")]
    assert named == {file.parent.relative_to(ROOT).as_posix() for file in files} | {"docs", "model_cards", "tests"}


def run_blocks(name: str) -> tuple[dict[str, Any], int]:
    """Runs the `elmo` commands and the Python of a document; compares the Python's output with the block below it.

    A training takes one epoch, so the output of a trained model is in a block `console`, which is not compared.

    Returns:
        What the Python blocks define, and the number of compared outputs.
    """
    names, printed, compared = {}, "", 0
    for kind, block in re.findall(r"```(bash|python|text)\n(.*?)```", DOCUMENTS[name], re.DOTALL):
        if kind == "bash" and block.startswith("elmo "):
            for line in re.sub(r"(--num_train_epochs) \d+", r"\1 1", block).replace("\\\n", " ").splitlines():
                _, program, *arguments = shlex.split(line)
                run_program(program, *arguments)
        elif kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(block, names)
            printed = stdout.getvalue()
        elif kind == "text" and not block.startswith("elmo "):
            assert printed == block
            compared += 1
    return names, compared


def commands(text: str) -> Iterator[tuple[str, str]]:
    """The program and the other words of each `elmo` command, in blocks with the indented lines below, and in prose."""
    for block in re.findall(r"```\w+\n(.*?)```", text, re.DOTALL):
        yield from re.findall(r"^elmo (\w+)(.*(?:\n .*)*)", block, re.MULTILINE)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from re.findall(r"`elmo ([a-z]+)(?![a-z:])([^`]*)`", prose)


def has_option(program: str, option: str, words: str = "") -> bool:
    """Whether the help of a program lists an option; `reproduce` has a help for each task, which the words name."""
    if program != "reproduce":
        return option in options_of(program)
    tasks = re.match(r" *([\w|]*)", words)[1].split("|")
    if tasks == [""]:
        return any(option in options_of(program, task) for task in TASKS)
    return all(option in options_of(program, task) for task in tasks)


@cache
def options_of(program: str, *task: str) -> set[str]:
    with contextlib.redirect_stdout(io.StringIO()) as stdout, pytest.raises(SystemExit):
        run_program(program, *task, "--help")
    return {*re.findall(r"--\w+", stdout.getvalue())}


def run_program(program: str, *arguments: str):
    """In this process: a process for each would take a minute more."""
    task = [program] if program in TASKS else []
    import_module(f"modeling_elmo.run_scripts.{PROGRAMS[program][0]}").main([*task, *arguments])


def exec_or_eval(code: str, names: dict[str, Any]) -> Any:
    try:
        compiled = compile(code, "right column", "eval")
    except SyntaxError:
        return exec(code, names)
    return eval(compiled, names)


def figures_of_results(readme: str) -> list[tuple[list[str], list[str]]]:
    """The numbers and links of each row of results, without the first column. These tables have three columns."""
    rows = [line.strip("|").split(" | ")[1:] for line in readme.splitlines() if line.startswith("| ")]
    found = []
    for cells in (" | ".join(row) for row in rows if len(row) == 2):
        numbers = re.findall(r"\d+\.\d+ ± \d+\.\d+|-?\d+(?:\.\d+)*(?:e-\d+)?", re.sub(r"\(.*?\)", "", cells))
        found += [(numbers, re.findall(r"RESULTS\.md#[\w-]+", cells))] if numbers else []
    return found
