"""The card of a checkpoint: the frame, and the words and tables that all kinds of cards are made of.

A card says what was recorded in `results/` beside it, and nothing else: lm_card.py tells a biLM's, task_card.py that of
a head. `results/card.json` holds what no run knows: language, licence, where the text is from.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from modeling_elmo.run_scripts.program.files import read_json, write_json

MOST_NAMES = 10  # of a list of files; corpora come in hundreds of shards
TEMPLATE = Path(__file__).resolve().parents[2] / "model_cards" / "template.md"  # in a clone and in a wheel


@dataclass(kw_only=True)
class CardArguments:
    """What a card says that no run can know; names as in `Trainer.create_model_card`."""

    language: list[str] = field(
        default_factory=list, metadata={"help": "Of the text, as ISO 639 codes: `--language en`. For the card."}
    )
    license: str | None = field(
        default=None, metadata={"help": "Of the weights, as the Hub names it: cc-by-sa-4.0, mit, other. For the card."}
    )
    license_reason: str | None = field(default=None, metadata={"help": "A sentence on why. For the card."})
    dataset_tags: list[str] = field(
        default_factory=list, metadata={"help": "Hub names of the data that it was trained on. For the card."}
    )
    data_statement: str | None = field(
        default=None, metadata={"help": "Markdown file on the data: sources, their licences, who is in it."}
    )
    citation: str | None = field(default=None, metadata={"help": "Markdown file on how to cite the checkpoint."})

    def __post_init__(self):
        for language in self.language:
            if not re.fullmatch("[a-z]{2,3}|code|multilingual", language):
                raise ValueError(f"--language {language}: the Hub takes ISO 639 codes of two or three letters, as en.")
        for name in ("data_statement", "citation"):
            if (path := getattr(self, name)) is None:
                continue
            if not Path(path).is_file():
                raise FileNotFoundError(f"--{name} {path}: there is no such file; pass one with Markdown.")
            try:
                Path(path).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"--{name} {path} is not UTF-8 ({error}); convert it.") from None


class Part(NamedTuple):
    """What a kind of checkpoint adds to the frame that all cards share."""

    model: str
    usage: str
    sections: list[tuple[str, str]]
    intended_use: str
    limits: list[str]
    pipeline_tag: str
    tags: list[str]
    metrics: list[str]
    results: list[EvalResult]
    base_model: str | None  # on the Hub, which refuses names that are not its own


def write_facts(folder: Path, arguments: CardArguments) -> bool:
    """Adds to `results/card.json` what is given, if anything is; what was known before stays."""
    given = {item.name: getattr(arguments, item.name) for item in fields(CardArguments)}
    given = {name: value for name, value in given.items() if value}
    for name in ("data_statement", "citation"):
        if name in given:
            given[name] = Path(given[name]).read_text(encoding="utf-8").strip()
    if given:
        write_results(folder, "card", read_results(folder, "card") | given)
    return bool(given)


def write_results(folder: Path, name: str, found: Any):
    write_json(folder / "results" / f"{name}.json", found)


def read_results(folder: Path, name: str) -> dict[str, Any]:
    """Empty where nothing was recorded under this name."""
    path = folder / "results" / f"{name}.json"
    return read_json(path) if path.is_file() else {}


def write_card(folder: Path, name: str, part: Part) -> Path:
    """Writes README.md into the folder of a checkpoint, in place of one that is there, and returns its path."""
    facts = read_results(folder, "card")
    data = ModelCardData(
        language=facts.get("language"),
        license=facts.get("license"),
        datasets=facts.get("dataset_tags"),
        library_name="transformers",
        pipeline_tag=part.pipeline_tag,
        tags=part.tags,
        base_model=part.base_model,
        metrics=part.metrics or None,
        model_name=name if part.results else None,
        eval_results=part.results or None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=shown(name),
        model=part.model,
        usage=part.usage,
        sections=with_statement(part.sections, facts.get("data_statement")),
        intended_use=part.intended_use,
        limits="\n".join(f"- {limit}" for limit in part.limits),
        licence=licence(facts),
        citation=facts.get("citation"),
    )
    path = folder / "README.md"
    card.save(path)
    return path


def with_statement(sections: list[tuple[str, str]], statement: str | None) -> list[tuple[str, str]]:
    """Below what the run recorded of its data; a section of its own where it recorded nothing."""
    if not statement:
        return sections
    if "Data" not in dict(sections):
        return [("Data", statement), *sections]
    return [(title, f"{text}\n\n{statement}" if title == "Data" else text) for title, text in sections]


def licence(facts: dict[str, Any]) -> str:
    stated = "None is recorded. The weights follow the licence of what they were made from, as chosen by the author."
    if "license" in facts:
        stated = f"`{shown(facts['license'])}`."
    return " ".join([stated, *filter(None, [facts.get("license_reason")])])


def hub_name(name: str | None) -> str | None:
    """`name`, unless it is a folder here or cannot be a name there; the Hub refuses those."""
    if name is None or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def public(value: Any) -> Any:
    """A record without the places of files on its author's disk: of paths from `/`, `~` or `..` the last part stays.

    Only for values that name files: a text may begin with a slash as well.
    """
    if isinstance(value, dict):
        return {key: public(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(item) for item in value]
    is_place = isinstance(value, str) and (Path(value).is_absolute() or value.startswith(("~", "../", "file:/")))
    return Path(value).name or value if is_place else value


def table(header: list[str], rows: Iterable[list[str]], alignment: str = "---") -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, [alignment] * len(header), *rows])


def shown(value: Any, most: int = MOST_NAMES) -> str:
    """A value as one line of Markdown, in tables too."""
    text = listed(value, most)
    return re.sub(r"[\\`*\[\]<>|~$&]|_(?![^\W_])|(?<![^\W_])_", r"\\\g<0>", text)  # an underscore in a word is plain


def listed(value: Any, most: int = MOST_NAMES) -> str:
    """A value as one line; of a list the first `most`, and how many more there are."""
    if isinstance(value, (list, tuple)):
        more = [f"and {len(value) - most:,} more"] if len(value) > most else []
        return ", ".join([*map(listed, value[:most]), *more])
    return " ".join(str(value).split())
