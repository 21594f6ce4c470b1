"""The commands of README.md, GUIDE.md and MIGRATION.md run, and Python blocks print what stands below them."""

import contextlib
import io
import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A working directory with what the texts refer to."""
    monkeypatch.chdir(tmp_path)
    for name in ("tests", "model_cards"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run_blocks(name: str) -> tuple[dict, int]:
    """What the Python blocks define, and how many outputs were compared."""
    blocks = re.findall(r"```(bash|python|text)\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    names, printed, compared = {}, "", 0
    for kind, block in blocks:
        if kind == "bash" and block.startswith("python -m modeling_elmo"):
            for line in block.replace("\\\n", " ").splitlines():
                _, _, module, *arguments = shlex.split(line)
                import_module(module).main(arguments)  # a process for each would take a minute more
        elif kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(block, names)
            printed = stdout.getvalue()
        elif kind == "text":
            assert printed == block
            compared += 1
    return names, compared


def test_readme_is_true(clone):
    assert run_blocks("README.md")[1] == 1


def test_korean_readme_has_the_same_commands_and_figures():
    english, korean = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ko.md"))
    commands = [
        [re.sub(r" +#.*", "", block) for block in re.findall(r"```\w+\n.*?```", text, re.DOTALL)]
        for text in (english, korean)
    ]
    assert commands[0] == commands[1] and len(commands[0]) == 4
    for figure in re.findall(r"\d+\.\d+ ± \d+\.\d+|\d+\.\de-\d+", english):
        assert figure in korean, figure
    for command in re.findall(r"\| (`convert_checkpoint .*`) \|", english):
        assert command in korean


def test_guide_is_true(clone):
    assert run_blocks("GUIDE.md")[1] == 8
    assert (clone / "vectors.hdf5").is_file() and (clone / "vocab.txt").is_file()


def test_links_lead_somewhere():
    for page in ROOT.glob("*.md"):
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for file, section in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name}: {file}"
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if section else []
            assert not section or section in [
                re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings
            ]


def test_results_name_options_that_exist():
    blocks = re.findall(r"```text\n(.*?)```", (ROOT / "RESULTS.md").read_text(encoding="utf-8"), re.DOTALL)
    options = 0
    for script, words in re.findall(r"^(run_\w+|perplexity)((?: .*\n?|\n)*)", "\n".join(blocks), re.MULTILINE):
        for option in re.findall(r"--\w+", words):
            assert option in help_of(script), f"{script} {option}"
            options += 1
    assert options > 30


def test_right_columns_of_the_migration_notes_run(clone):
    """Those that are Python; others name a script and options that it has."""
    names, _ = run_blocks("MIGRATION.md")
    rows = re.findall(
        r"^\|(?!-|.*\| here \|)[^|]*\| (.*) \|$", (ROOT / "MIGRATION.md").read_text("utf-8"), re.MULTILINE
    )
    ran = 0
    for right in rows:
        code = re.match(r"`([^`]*)`", right)[1]
        script, *words = code.split()
        if (ROOT / "run_scripts" / f"{script}.py").is_file() or script.startswith("--"):
            script = "embed" if script.startswith("--") else script
            assert all(word in help_of(script) for word in code.split() if word.startswith("--")), code
            continue
        result = exec_or_eval(code, names)
        assert result is not False, code
        ran += 1
    assert ran > 30
    vectors = names["embed_sentences"](names["sentences"], names["model"], names["tokenizer"], layers="all")
    assert [each.shape[:2] for _, each in vectors] == [(3, 3), (3, 2)]
    assert (clone / "all.hdf5").is_file()


@cache
def help_of(script: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as stdout, pytest.raises(SystemExit):
        import_module(f"modeling_elmo.run_scripts.{script}").main(["--help"])
    return stdout.getvalue()


def exec_or_eval(code: str, names: dict):
    try:
        compiled = compile(code, "right column", "eval")
    except SyntaxError:
        return exec(code, names)
    return eval(compiled, names)
