"""Shows in the browser what models do: uses of a word, expected words, layer weights, what trained heads find.

    elmo explore model_cards/elmo-small-en --corpus corpus.txt

Pass biLMs and trained heads, in any number; all answer the same questions, side by side. The page is served on this
computer only, unless you pass `--server_name`. Ctrl-C stops it. `--space FOLDER` writes the page as a Space for the Hub
instead.
"""

import shutil
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from modeling_elmo import __version__
from modeling_elmo.conversion.files import check_empty, staged
from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, require, run
from modeling_elmo.run_scripts.program.data_files import find_files
from modeling_elmo.run_scripts.program.models import MODEL_FILES, check_model
from modeling_elmo.run_scripts.program.texts import RunningTextArguments

LOCAL = "127.0.0.1"  # no other computer can reach it
EVERY_ADDRESS = ("0.0.0.0", "::")
OWN_FILES = ("README.md", "requirements.txt", "app.py")
# The card and the program of a Space.
README = """---
title: ELMo explorer
emoji: 🔎
colorFrom: blue
colorTo: yellow
sdk: gradio
sdk_version: {gradio}
app_file: app.py
{models}---

What ELMo models know about words and sentences: {names}. `elmo explore --space` of
[modeling_elmo](https://pypi.org/project/modeling-elmo) wrote this Space.
"""
APP = '''"""The explorer of ELMo models."""

from pathlib import Path

from modeling_elmo.run_scripts.explorer.page import LAUNCH_OPTIONS, build_page

HERE = Path(__file__).parent
demo = build_page(
    models=[{models}],
    corpus=[{corpus}],
    trust_remote_code={trust_remote_code},
    split_sentences={split_sentences},
)

if __name__ == "__main__":
    demo.launch(**LAUNCH_OPTIONS)
'''


@dataclass(kw_only=True)
class ExploreArguments(RunningTextArguments):
    corpus: list[str] = option([], "Files, folders or patterns to search for uses of a word, one sentence per line.")
    port: int | None = option(None, "Port of the page. Default: the first free one from 7860.")
    server_name: str = option(LOCAL, "Address that others can open; 0.0.0.0: all of this computer. Default: none.")
    space: str | None = option(None, "New folder for a Space with the page, instead of serving it.")
    trust_remote_code: bool = option(False, "Run code from the folders of the models.")

    def __post_init__(self):
        try:  # gradio would tell the one too late, and the other in a traceback
            family, *_, address = socket.getaddrinfo(self.server_name, 0)[0]
            socket.create_server((address[0], self.port or 0), family=family).close()
        except (OSError, OverflowError, UnicodeError) as error:
            reason = f"--server_name {self.server_name}, --port {self.port} cannot be opened ({error})"
            raise ValueError(f"{reason}. Pass an address of this computer, and a free port.") from error


def main(arguments: list[str] | None = None) -> None:
    parser = ProgramParser(ExploreArguments, description=__doc__)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="Folders or Hub names of biLMs and trained heads.")
    parsed, positional = parser.parse(arguments)
    require("gradio", extra="explore", purpose="elmo explore")
    if parsed.space is not None:
        options = {"trust_remote_code": parsed.trust_remote_code, "split_sentences": parsed.split_sentences}
        write_space(Path(parsed.space), positional.models, parsed.corpus, **options)
        print(f"{parsed.space} is a Space. Upload it: hf upload USER/NAME {parsed.space} --repo-type space")
        return
    try:
        from modeling_elmo.run_scripts.explorer.page import LAUNCH_OPTIONS, answering, build_page, pass_proxy
    except (ImportError, ValueError) as error:  # its HTTP client refuses the address of a proxy, for example
        raise ImportError(f"Gradio cannot be imported in this environment: {error}") from error
    page = build_page(positional.models, parsed.corpus, parsed.trust_remote_code, parsed.split_sentences)
    pass_proxy(parsed.server_name)
    options = {"server_name": parsed.server_name, "server_port": parsed.port}
    options |= {"app_kwargs": answering("*" if parsed.server_name in EVERY_ADDRESS else parsed.server_name)}
    page.launch(**LAUNCH_OPTIONS | options, prevent_thread_lock=True, quiet=True)
    print(f"Open {page.local_url} in a browser. Ctrl-C stops the explorer.", flush=True)
    page.block_thread()


def write_space(
    folder: Path,
    models: Sequence[str],
    corpus: Sequence[str] = (),
    trust_remote_code: bool = False,
    split_sentences: str | None = None,
):
    """Writes the folder of a Space. Local models and the corpus are copied; names on the Hub stay names."""
    check_empty(folder)
    for name in models:
        check_model(name)
    local = {name: Path(name).resolve() for name in models if Path(name).is_dir()}
    texts = [Path(file) for pattern in corpus for file in find_files(pattern)]
    copies = [path.name for path in (*local.values(), *texts)]
    if twice := [name for name, number in Counter([*copies, *OWN_FILES]).items() if number > 1]:
        raise ValueError(f"Two models or texts have the name {twice[0]}, or a file of the Space has it. Rename one.")
    hub = "".join(f"- {name}\n" for name in models if name not in local)
    names = ", ".join(local[name].name if name in local else name for name in models)
    card = README.format(gradio=version("gradio"), models=hub and f"models:\n{hub}", names=names)
    places = [f"str(HERE / {local[name].name!r})" if name in local else repr(name) for name in models]
    program = APP.format(
        models=", ".join(places),
        corpus=", ".join(f"str(HERE / {text.name!r})" for text in texts),
        trust_remote_code=trust_remote_code,
        split_sentences=repr(split_sentences),
    )
    with staged(folder) as unfinished:
        unfinished.mkdir()
        for source in local.values():
            (unfinished / source.name).mkdir()
            for file in {file for pattern in MODEL_FILES for file in source.glob(pattern)}:
                shutil.copy(file, unfinished / source.name)  # of a link, the file
        for text in texts:
            shutil.copy(text, unfinished)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        (unfinished / "requirements.txt").write_text(f"modeling-elmo[explore,coref]=={__version__}\n", encoding="utf-8")
        (unfinished / "app.py").write_text(program, encoding="utf-8")


if __name__ == "__main__":
    run(main)
