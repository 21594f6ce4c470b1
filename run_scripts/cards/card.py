"""The parts of all cards: the facts that an author states, the files in `results/`, and the rendering of templates.

A card repeats recorded facts only: those in `results/` and the configuration, and `record.json` of a head. Its
sentences are in the templates of `model_cards/`: `card.md` is the frame, and `bilm_card.md` and `head_card.md` fill it.
`results/card.json` holds facts that no run knows: language, license, origin of the text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Undefined
from markupsafe import Markup

from ..program.command_line import option
from ..program.files import JsonObject, write_json
from .records import checked_record
from .tables import code_span, escape_markdown, link_or_text, one_line

TEMPLATES = Path(__file__).resolve().parents[2] / "model_cards"  # in a clone and in a wheel
EXAMPLES = {  # by language: two sentences, and a question about the first
    "en": ["The play was staged in Paris.", "It was a success.", "Where was the play staged?"],
    "ko": ["배가 바다를 건넜다.", "바다는 넓다.", "배가 무엇을 건넜나?"],
}

CardValues = dict[str, Any]  # for a template, or for the metadata above it


@dataclass(kw_only=True)
class CardArguments:
    """Facts for a card that no run knows, named as in `Trainer.create_model_card`."""

    _argument_group_name = "options of the model card"

    language: list[str] = option([], "Languages of the text, as ISO 639 codes.")
    license: str | None = option(None, "License of the weights, by its name on the Hub: cc-by-sa-4.0, mit, other.")
    license_reason: str | None = option(None, "Sentence that explains the license.")
    dataset_tags: list[str] = option([], "Names on the Hub of the training data.")
    data_statement: str | None = option(None, "Markdown file about the data: sources, licenses, people in it.")
    citation: str | None = option(None, "Markdown file that says how to cite the checkpoint.")
    example: list[str] = option(
        [], "One or two texts for the example, in the language of the model; a question is the last."
    )

    def __post_init__(self):
        for language in self.language:
            if not re.fullmatch("[a-z]{2,3}|code|multilingual", language):
                raise ValueError(f"--language {language}: the Hub takes ISO 639 codes of two or three letters, as en.")
        for name in ("data_statement", "citation"):
            if (path := getattr(self, name)) is not None:
                Path(path).read_text(encoding="utf-8")  # a mistake shows now, not after hours


def write_card_facts(folder: Path, arguments: CardArguments) -> bool:
    """Adds the given options to `results/card.json` and keeps the earlier ones. Returns whether any was given."""
    given = {}
    for item in fields(CardArguments):
        value = getattr(arguments, item.name)
        if value:
            given[item.name] = value
    for name in ("data_statement", "citation"):
        if name in given:
            given[name] = Path(given[name]).read_text(encoding="utf-8").strip()
    if given:
        write_result(folder, "card", read_result(folder, "card") | given)
    return bool(given)


def write_result(folder: Path, name: str, result: Any):
    write_json(folder / "results" / f"{name}.json", result)


def read_result(folder: Path, name: str, needed: Iterable[str] = ()) -> JsonObject:
    """Reads `results/{name}.json`, which must have some keys; returns an empty dict if the file does not exist."""
    path = folder / "results" / f"{name}.json"
    return checked_record(path, needed) if path.is_file() else {}


def write_card(folder: Path, name: str, template: str, metadata: CardValues, values: CardValues) -> Path:
    """Renders a template of `model_cards/` to README.md in the folder of a checkpoint, and returns its path.

    The Hub gets `metadata` with the stated facts, and the template `values` with `name` and `facts`.
    """
    facts = read_result(folder, "card")
    language, *_ = facts.get("language") or ["en"]
    values["examples"] = facts.get("example") or EXAMPLES.get(language, EXAMPLES["en"])
    data = ModelCardData(
        language=facts.get("language"),
        license=facts.get("license"),
        datasets=facts.get("dataset_tags"),
        library_name="transformers",
        model_name=name if metadata.get("eval_results") else None,
        **metadata,
    )
    page = card_templates().get_template(template)
    text = page.render(metadata=data.to_yaml(), name=name, facts=facts, **values)
    path = folder / "README.md"
    ModelCard(text).save(path)
    return path


class MissingKey(StrictUndefined):
    """A key that a record lacks: false in a condition, and an error where a template prints it."""

    __bool__ = Undefined.__bool__  # type: ignore[assignment]  # Jinja declares that it always raises


@cache
def card_templates() -> Environment:
    """The templates of cards. They escape every printed value as Markdown, except after `| safe` and our filters."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,  # so that Jinja tells Markup from other text
        finalize=lambda value: value if isinstance(value, Markup) else Markup(escape_markdown(value)),
        undefined=MissingKey,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "one_line": one_line,
        "code": lambda value: Markup(code_span(value)),
        "link": lambda value: Markup(link_or_text(value)),
        "python": lambda value: Markup(repr(value)),
        "number": lambda value, form=",": format(value, form),
        "perplexity": lambda value: f"{value:,.2f}" if value < 1e6 else f"{value:.3g}",
    }
    return environment


def check_repository(name: str, option_name: str):
    """Refuses a name that the Hub would refuse only after the training."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"{option_name}: {error.args[0]} Pass USER/NAME.") from error


def hub_name(name: str | None) -> str | None:
    """`name`, or None if it is a local folder or no valid name on the Hub, which refuses such names in a card."""
    if name is None or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def without_folders(value: Any) -> Any:
    """A record without the folders of its author's disk: paths from `/`, `~` or `..` keep their last part."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(item) for item in value]
    is_path = isinstance(value, str) and (Path(value).is_absolute() or value.startswith(("~", "../", "file:/")))
    return Path(value).name or value if is_path else value
