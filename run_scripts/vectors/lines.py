"""The lines of a corpus, from a file or a data set."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from modeling_elmo.run_scripts.program.files import TextArguments, dataset_texts, numbered_texts


class InputLine(NamedTuple):
    """A sentence; `words` is `None` if the tokenizer splits the text."""

    text: str
    words: list[str] | None


def open_lines(arguments: TextArguments, file: str | None, is_raw_text: bool) -> tuple[Iterator[InputLine], int | None]:
    """The lines of a file or of `arguments.dataset`, read one by one, and their number if it is known."""
    if (file is None) == (arguments.dataset is None):
        raise ValueError("Pass either --input FILE or --dataset NAME.")
    if file is None:
        rows, total = dataset_texts(arguments)
        return (to_line(f"{arguments.dataset}, row {row}", text, is_raw_text) for row, text in enumerate(rows)), total
    path = Path(file)
    kind = path.with_suffix("").suffix if path.suffix in (".gz", ".zst") else path.suffix
    if kind not in (".txt", ".jsonl") and path.suffix == kind or kind in (".json", ".csv", ".tsv"):
        raise ValueError(f"--input {path}: unknown suffix {kind!r}; pass a .txt, .jsonl, .gz or .zst file.")
    if not path.is_file():
        raise FileNotFoundError(f"--input {path}: there is no such file.")

    def lines() -> Iterator[InputLine]:
        texts = numbered_texts(path, arguments.text_column)
        return (to_line(f"{path}, line {number}", text, is_raw_text) for number, text in texts)

    # Reads the whole file once: a mistake in its last line shows now, not after hours.
    total = sum(1 for _ in lines())
    return lines(), total


def to_line(where: str, value: Any, is_raw_text: bool) -> InputLine:
    if isinstance(value, str):
        text = value.strip()
        return InputLine(text, None if is_raw_text else text.split())
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return InputLine(" ".join(value), value)
    raise ValueError(f"{where}: the sentence is {value!r}; pass a text or a list of words.")
