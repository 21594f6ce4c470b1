"""The explorer as a Space of the Hugging Face Hub: a folder with its card, its program and its requirements."""

import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from modeling_elmo import __version__
from modeling_elmo.conversion.files import staged
from modeling_elmo.run_scripts.pretraining.corpus import find_files
from modeling_elmo.run_scripts.program.files import MODEL_FILES, check_model

README = """---
title: ELMo explorer
emoji: 🔎
colorFrom: blue
colorTo: yellow
sdk: gradio
sdk_version: {gradio}
app_file: app.py
{models}---

What ELMo models know of words and sentences: {names}. `elmo explore --space` of
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
)

if __name__ == "__main__":
    demo.launch(**LAUNCH_OPTIONS)
'''


def write_space(folder: Path, models: Sequence[str], corpus: Sequence[str] = (), trust_remote_code: bool = False):
    """Writes the folder of a Space. Local models and the corpus are copied; names on the Hub stay names.

    Raises:
        FileExistsError: the folder is not empty.
        FileNotFoundError: there is no such model or text.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"--space {folder} is not empty; pass a new folder.")
    for name in models:
        check_model(name)
    local = {name: Path(name).resolve() for name in models if Path(name).is_dir()}
    texts = [Path(file) for pattern in corpus for file in find_files(pattern)]
    copies = [path.name for path in (*local.values(), *texts)]
    if len(set(copies)) < len(copies):
        raise ValueError(
            f"Two models or texts have one name: {', '.join(copies)}. Rename one, for a Space is one folder."
        )
    hub = "".join(f"- {name}\n" for name in models if name not in local)
    names = ", ".join(local[name].name if name in local else name for name in models)
    card = README.format(gradio=version("gradio"), models=hub and f"models:\n{hub}", names=names)
    program = APP.format(
        models=", ".join(f"str(HERE / {local[name].name!r})" if name in local else repr(name) for name in models),
        corpus=", ".join(f"str(HERE / {text.name!r})" for text in texts),
        trust_remote_code=trust_remote_code,
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
