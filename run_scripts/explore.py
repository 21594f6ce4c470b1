"""Shows in the browser what models do: uses of a word, expected words, layer weights, what trained heads find.

    elmo explore model_cards/elmo-mini-en --corpus corpus.txt

Pass biLMs and trained heads, in any number; all answer the same questions, side by side. The page is served on this
computer only, unless you pass `--server_name`. Ctrl-C stops it. `--space FOLDER` writes the page as a Space for the Hub
instead.
"""

import socket
from dataclasses import dataclass
from pathlib import Path

from modeling_elmo.run_scripts.explorer.space import write_space
from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, run
from modeling_elmo.run_scripts.program.files import require

LOCAL = "127.0.0.1"  # no other computer can reach it
EVERY_ADDRESS = ("0.0.0.0", "::")


@dataclass(kw_only=True)
class ExploreArguments:
    corpus: list[str] = option(
        [], "Text files, folders or patterns, one sentence a line, in which to find uses of a word."
    )
    port: int | None = option(None, "Port of the page. Default: the first free one from 7860.")
    server_name: str = option(
        LOCAL,
        "Name or address of this computer under which others reach the page; 0.0.0.0: all its addresses. "
        "Default: none.",
    )
    space: str | None = option(None, "Empty folder to write as a Space, instead of serving.")
    trust_remote_code: bool = option(False, "Run code from the folders of the models.")

    def __post_init__(self):
        try:  # gradio would tell the one too late, and the other in a traceback
            family, *_, address = socket.getaddrinfo(self.server_name, 0)[0]
            socket.create_server((address[0], self.port or 0), family=family).close()
        except (OSError, OverflowError, UnicodeError) as error:
            raise ValueError(
                f"--server_name {self.server_name}, --port {self.port} cannot be opened ({error}). Pass an address of "
                "this computer, or 0.0.0.0, and a free port."
            ) from error


def main(arguments: list[str] | None = None) -> None:
    parser = ProgramParser(ExploreArguments, description=__doc__)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="Folders or Hub names of biLMs and trained heads.")
    parsed, positional = parser.parse(arguments)
    require("gradio", extra="explore", purpose="elmo explore")
    if parsed.space is not None:
        write_space(Path(parsed.space), positional.models, parsed.corpus, parsed.trust_remote_code)
        print(f"{parsed.space} is a Space. Upload it: hf upload USER/NAME {parsed.space} --repo-type space")
        return
    try:
        from modeling_elmo.run_scripts.explorer.page import LAUNCH_OPTIONS, answering, build_page, pass_proxy
    except (ImportError, ValueError) as error:  # its HTTP client refuses the address of a proxy, for example
        raise ImportError(f"Gradio cannot be imported in this environment: {error}") from error
    page = build_page(positional.models, parsed.corpus, parsed.trust_remote_code)
    pass_proxy(parsed.server_name)
    options = {"server_name": parsed.server_name, "server_port": parsed.port}
    options |= {"app_kwargs": answering("*" if parsed.server_name in EVERY_ADDRESS else parsed.server_name)}
    page.launch(**LAUNCH_OPTIONS | options, prevent_thread_lock=True, quiet=True)
    print(f"Open {page.local_url} in a browser. Ctrl-C stops the explorer.", flush=True)
    page.block_thread()


if __name__ == "__main__":
    run(main)
