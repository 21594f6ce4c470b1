"""Records of a run: its progress, which every checkpoint holds, its settings, and `results/pretraining.json`."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from modeling_elmo import ELMoForPreTraining
from modeling_elmo.run_scripts.cards.card import hub_name
from modeling_elmo.run_scripts.pretraining.corpus import CorpusArguments, Survey


@dataclass
class Progress:
    """Everything that changes during training, except tensors. The names are part of saved checkpoints."""

    step: int = 0
    epoch: float = 0.0
    predictions: int = 0  # in one direction, over all processes
    best_perplexity: float = math.inf
    best_step: int | None = None
    evaluations_since_best: int = 0
    held_out: str | None = None  # identifies the text of the perplexities
    base_model: str | None = None
    settings: dict[str, Any] | None = None
    earlier_settings: list[dict[str, Any]] = field(default_factory=list)  # settings that a resumed run has changed
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_evaluated(self) -> bool:
        """Whether the perplexity of this step has been measured."""
        return any(entry["step"] == self.step for entry in self.log if "perplexity" in entry)

    def is_best(self, perplexity: float) -> bool:
        """Takes note of a perplexity. Returns whether it is the lowest so far; the one before training is not."""
        if self.step == 0 or not perplexity < self.best_perplexity:
            self.evaluations_since_best += self.step > 0
            return False
        self.best_perplexity, self.best_step, self.evaluations_since_best = perplexity, self.step, 0
        return True

    def begin(self, settings: dict[str, Any], names_of_model: set[str]):
        """Takes note of the settings of a run that starts or resumes here, which cannot change those of the model."""
        if self.settings is not None:
            kept = {name: value for name, value in self.settings.items() if name in names_of_model}
            settings = kept | {name: value for name, value in settings.items() if name not in names_of_model}
        if self.settings not in (None, settings):
            self.earlier_settings.append({"until_step": self.step, "settings": self.settings})
        self.settings = settings

    def evaluate_on(self, held_out: str | None) -> str | None:
        """Takes note of the held-out text. Forgets the best step of another text, and returns a message then.

        The model that is published is then the best one from here on, or the last one without held-out text.
        """
        before, step = self.held_out, self.best_step
        self.held_out = held_out
        if before == held_out or step is None:
            return None
        self.best_perplexity, self.best_step, self.evaluations_since_best = math.inf, None, 0
        return (
            f"Step {step} was the best on {before or 'another text'}, but the held-out text is now "
            f"{held_out or 'missing'}. The best step is searched again from here on."
        )


def settings_of(*arguments: Any) -> dict[str, Any]:
    """The options that differ from their defaults, and the optimizer, which decides some of the defaults.

    Options of a single start are left out, because an interrupted and resumed run gives the same result.
    """
    settings = {}
    for group in arguments:
        for item in fields(group):
            value = getattr(group, item.name)
            is_default = value in (item.default, [])  # lists are empty by default
            if item.name == "optim" or not (is_default or item.name in ("output_dir", "resume_from_checkpoint")):
                settings[item.name] = value
    return settings


def record_of_run(
    progress: Progress,
    model: ELMoForPreTraining,
    corpus: CorpusArguments,
    survey: Survey | None,
    published_step: int,
) -> dict[str, Any]:
    """The content of `results/pretraining.json`."""
    data: dict[str, Any] = {
        "train": corpus.train_file or [str(corpus.dataset)],
        "validation": corpus.validation_file or [*filter(None, [corpus.validation_split])],
    }
    if survey is not None:
        data |= {"sentences": survey.lines, "words": survey.words, "longest_sentence": survey.longest}
        room = model.config.max_word_length - 2  # without the characters for begin and end of word
        data["cut_words"] = sum(number for length, number in survey.lengths.items() if length > room)
    return {
        "num_parameters": model.num_parameters(),
        "data": data,
        "settings": progress.settings,
        "earlier_settings": progress.earlier_settings,
        "log": progress.log,
        "base_model": progress.base_model,
        "base_model_on_hub": hub_name(progress.base_model),
        "published_step": published_step,
    }
