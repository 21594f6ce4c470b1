"""The model card of a pretraining run: what the run recorded, and nothing that it did not."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData

from modeling_elmo import ELMoConfig

Entries = list[dict[str, Any]]

MOST_EVALUATIONS = 12  # rows of the card's table
MOST_NAMES = 10  # of a list of files; corpora come in hundreds of shards
PERPLEXITIES = {"perplexity": "both directions", "forward": "forward", "backward": "backward"}
COMPARABLE = ("predictions", "vocabulary_size", "protocol")  # two perplexities that differ here say nothing together

CARD = """\
# {name}

{model}

## Use

```python
from transformers import AutoModel, AutoModelForPreTraining, AutoTokenizer

name = {path!r}  # this folder, or the full name on the Hub
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
inputs = tokenizer([["A", "sentence", "in", "words"]], is_split_into_words=True, return_tensors="pt")

model = AutoModel.from_pretrained(name, trust_remote_code=True)
layers = model(**inputs).hidden_states  # token layer and biLSTM layers, each (batch, tokens, {hidden_size})

# ELMoForPreTraining: the same biLM with its softmax, to predict words from those before and after.
language_model = AutoModelForPreTraining.from_pretrained(name, trust_remote_code=True)
best = language_model.predict_words(**inputs, top_k=5)
print([tokenizer.convert_ids_to_tokens(ids) for ids in best.word_ids[0].tolist()])
```

## Data

{data}

## Training

{training}

## Perplexity

{perplexity}

## Licence

None is recorded. The weights follow the licence of the training text, as chosen by the author.
"""


def write_model_card(
    folder: Path,
    *,
    name: str,
    config: ELMoConfig,
    num_parameters: int,
    data: dict[str, Any],
    settings: dict[str, Any],
    log: Entries,
    base_model: str | None,
    published_step: int,
) -> Path:
    """Writes README.md, and curve.png where matplotlib is installed, into `folder`.

    Args:
        name: of the model; the card's title.
        num_parameters: of the whole language model, its softmax included.
        data: names of the `train` and `validation` text, and its `sentences` and `words`, `None` if not counted.
        settings: of the run, by name.
        log: the run's entries, each with `step` and `epoch`, and figures of training or of an evaluation.
        base_model: folder or Hub name of the model that was trained further.
        published_step: whose weights are in the folder.

    Returns:
        The path of README.md.
    """
    evaluations = [entry for entry in log if "perplexity" in entry]
    steps = [entry for entry in log if "loss" in entry or "sampled_loss" in entry]
    has_curve = draw_curve(folder / "curve.png", evaluations, steps, config, published_step)
    card = CARD.format(
        name=shown(name),
        path=name,
        hidden_size=config.hidden_size,
        model=describe_model(config, num_parameters, base_model),
        data=describe_data(data),
        training=describe_training(settings, steps, config, published_step, has_curve),
        perplexity=describe_perplexity(evaluations, config, base_model, published_step),
    )
    path = folder / "README.md"
    ModelCard(f"---\n{front_matter(base_model, evaluations).to_yaml()}\n---\n\n{card}").save(path)
    return path


def front_matter(base_model: str | None, evaluations: Entries) -> ModelCardData:
    is_on_hub = base_model is not None and not Path(base_model).is_absolute() and not Path(base_model).exists()
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="feature-extraction",
        tags=["elmo", "bilm", "language-model", "lstm"],
        base_model=base_model if is_on_hub else None,  # the Hub refuses names that are not its own
        metrics=["perplexity"] if evaluations else None,
    )


def describe_model(config: ELMoConfig, num_parameters: int, base_model: str | None) -> str:
    layers = f"{config.num_hidden_layers} layer{'s' if config.num_hidden_layers > 1 else ''}"
    projection = f"projected to {config.projection_size:,}" if config.has_projection else "without a projection"
    characters = ["its characters"] if config.char_vocab_size else []
    vector = ["a vector of its own"] if config.word_embedding_size else []
    origin = f" It was trained further from {shown(base_model)}." if base_model else ""
    return (
        "A biLM, the bidirectional language model of ELMo ([Peters et al. 2018](https://arxiv.org/abs/1802.05365)): "
        f"{layers} of {config.lstm_hidden_size:,} LSTM cells in each direction, {projection}; "
        f"{num_parameters:,} parameters with the softmax; a vocabulary of {config.vocab_size:,} words, special words "
        f"included. It reads a word as {' and '.join(characters + vector)}.{origin}"
    )


def describe_data(data: dict[str, Any]) -> str:
    counts = [
        f"{data[unit]:,} {unit}" if data.get(unit) is not None else f"{unit} not counted"
        for unit in ("sentences", "words")
    ]
    held_out = [name for name in data["validation"] if name is not None]
    return (
        f"- Training text: {shown(data['train'])}; {', '.join(counts)}.\n- Held-out text: {shown(held_out) or 'none'}."
    )


def describe_training(
    settings: dict[str, Any], steps: Entries, config: ELMoConfig, published_step: int, has_curve: bool
) -> str:
    parts = [f"The weights are those of step {published_step:,}."]
    if steps:
        speed = median(entry["words_per_second"] for entry in steps)
        parts += [
            f"Speed: {speed:,.0f} words/s (median over the run, all devices together, sentence markers counted).",
            last_loss(steps[-1], config),
        ]
    if has_curve:
        parts.append("![Held-out perplexity and training loss over steps](curve.png)")
    if settings:
        rows = [[shown(name), shown(value)] for name, value in settings.items()]
        parts += [
            "Settings that differ from the defaults, and those of the optimizer:",
            table(["setting", "value"], rows),
        ]
    return "\n\n".join(parts)


def last_loss(entry: dict[str, Any], config: ELMoConfig) -> str:
    name = "sampled_loss" if "sampled_loss" in entry else "loss"
    sampled = (
        " It counts the candidates alone: do not compare it with a loss over all words."
        if name == "sampled_loss"
        else ""
    )
    return (
        f"Last training loss, at step {entry['step']:,}: {entry[name]:.3f} nats a prediction (forward "
        f"{entry['forward_loss']:.3f}, backward {entry['backward_loss']:.3f}; {loss_label(name, config)}).{sampled}"
    )


def loss_label(name: str, config: ELMoConfig) -> str:
    if name == "sampled_loss":
        return f"sampled softmax loss, {config.num_sampled:,} candidates"
    return f"{'adaptive' if config.softmax_type == 'adaptive' else 'full'} softmax loss"


def describe_perplexity(evaluations: Entries, config: ELMoConfig, base_model: str | None, published_step: int) -> str:
    if not evaluations:
        return "It was not measured: the run had no held-out text."
    found = next((entry for entry in evaluations if entry["step"] == published_step), evaluations[-1])
    rows = [
        [
            f"{entry['step']:,}{' (published)' if entry['step'] == published_step else ''}",
            f"{entry['epoch']:.2f}",
            *(number(entry[name]) for name in PERPLEXITIES),
        ]
        for entry in thinned(evaluations, found)
    ]
    return "\n\n".join(
        [
            headline(found, evaluations, base_model),
            conditions(found, config) + choice(found, evaluations, published_step),
            table(["step", "epoch", *PERPLEXITIES], rows, "---:"),
        ]
    )


def headline(found: dict[str, Any], evaluations: Entries, base_model: str | None) -> str:
    start = evaluations[0]
    is_comparable = start["step"] == 0 < found["step"] and all(start[name] == found[name] for name in COMPARABLE)
    before = f"{number(start['perplexity'])} before the training -> " if base_model and is_comparable else ""
    return (
        f"Held-out perplexity at step {found['step']:,}: {before}**{number(found['perplexity'])}** "
        f"(forward {number(found['forward'])}, backward {number(found['backward'])})."
    )


def conditions(found: dict[str, Any], config: ELMoConfig) -> str:
    softmax = "adaptive softmax over all of them" if config.softmax_type == "adaptive" else "full softmax"
    return f"""\
- It is `exp((L_f + L_b) / 2)`, with the mean losses of the forward and the backward direction in nats; those of one \
direction are `exp(L_f)` and `exp(L_b)`.
- Vocabulary: {found["vocabulary_size"]:,} words, special words included; {softmax}.
- Counted: {found["predictions"]:,} predictions in each direction (words, and `</S>` forward, `<S>` backward), \
{found["unknown_rate"]:.2%} of them `<UNK>`.
- Protocol: {shown(found["protocol"])}."""


def choice(found: dict[str, Any], evaluations: Entries, published_step: int) -> str:
    """That the figure is a minimum, where it is one: such a figure is a little too good."""
    others = [entry["perplexity"] for entry in evaluations if entry["step"] not in (0, found["step"])]
    is_lowest = found["step"] == published_step and others and found["perplexity"] < min(others)
    return f"\n- It is the lowest of {len(others) + 1} evaluations, chosen on this same text." if is_lowest else ""


def thinned(evaluations: Entries, found: dict[str, Any]) -> Entries:
    """At most `MOST_EVALUATIONS`, evenly over the run; the first, the last and `found` stay."""
    last, gaps = len(evaluations) - 1, MOST_EVALUATIONS - 2
    if last < MOST_EVALUATIONS:
        return evaluations
    kept = {round(place * last / gaps) for place in range(gaps + 1)}
    return [entry for index, entry in enumerate(evaluations) if index in kept or entry is found]


def number(perplexity: float) -> str:
    return f"{perplexity:,.2f}" if perplexity < 1e6 else f"{perplexity:.3g}"


def table(header: list[str], rows: Iterable[list[str]], alignment: str = "---") -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, [alignment] * len(header), *rows])


def shown(value: Any) -> str:
    """A value as one line of Markdown, in tables too. Long lists are cut; of absolute paths the last part stays."""
    if isinstance(value, (list, tuple)):
        more = [f"and {len(value) - MOST_NAMES:,} more"] if len(value) > MOST_NAMES else []
        return ", ".join([*map(shown, value[:MOST_NAMES]), *more])
    text = " ".join(str(value).split())
    if Path(text).is_absolute():  # where things lie on the author's disk is nobody's business
        text = Path(text).name or text
    return re.sub(r"[\\`*\[\]<>|~$&]|_(?![^\W_])|(?<![^\W_])_", r"\\\g<0>", text)  # an underscore in a word is plain


def draw_curve(path: Path, evaluations: Entries, steps: Entries, config: ELMoConfig, published_step: int) -> bool:
    """Draws held-out perplexity and training loss. Returns False without matplotlib, or if there is nothing to draw."""
    try:
        from matplotlib.figure import Figure  # saved by Agg; pyplot would choose a backend for the whole process
    except ImportError:
        return False
    losses = {loss_label(name, config): points(steps, name) for name in ("loss", "sampled_loss")}
    perplexities = {label: points(evaluations, name) for name, label in PERPLEXITIES.items()}
    panels = {"held-out perplexity": perplexities, "training loss\n(nats a prediction)": losses}
    panels = {title: lines for title, lines in panels.items() if any(lines.values())}
    if not panels:
        return False
    figure = Figure(figsize=(8, 0.5 + 2.75 * len(panels)), dpi=120, layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        draw_panel(axis, title, lines, published_step)
    if any(perplexities.values()):
        scale_logarithmically(axes[0])
    axes[-1].set_xlabel("optimizer steps")
    figure.savefig(path)
    return True


def points(entries: Entries, name: str) -> list[tuple[int, float]]:
    return [(entry["step"], entry[name]) for entry in entries if name in entry and math.isfinite(entry[name])]


def draw_panel(axis, title: str, lines: dict[str, list[tuple[int, float]]], published_step: int):
    for label, line in lines.items():
        if line:
            is_one_direction = label in ("forward", "backward")
            width = 0.8 if is_one_direction else 1.6
            axis.plot(
                *zip(*line, strict=True),
                label=label,
                linewidth=width,
                marker="o" if len(line) <= 50 else "",
                markersize=2 * width,
            )
    axis.axvline(published_step, color="0.5", linestyle="--", linewidth=1, label=f"published: step {published_step:,}")
    axis.set_ylabel(title)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    axis.locator_params(axis="x", integer=True)
    axis.xaxis.set_major_formatter("{x:,.0f}")


def scale_logarithmically(axis):
    from matplotlib.ticker import AutoLocator, LogLocator, NullLocator

    axis.set_yscale("log")
    axis.set_ylabel(f"{axis.get_ylabel()} (log scale)")
    low, high = map(math.log10, axis.get_ylim())
    subs = (1,) if high - low > 4 else (1, 2, 5)  # LogLocator skips decades, but only without subdivisions
    axis.yaxis.set_major_locator(LogLocator(subs=subs) if high - low > 1 else AutoLocator())
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:,.6g}")


def push(folder: Path, name: str, arguments: Any, message: str):
    """Uploads what `AutoModel` needs, the card and its pictures, as one commit.

    Args:
        name: of the repository, where `hub_model_id` gives none.
        arguments: with `hub_model_id`, `hub_private_repo` and `hub_token`, as in `TrainingArguments`.
        message: of the commit.
    """
    api = HfApi(token=arguments.hub_token)
    repo = api.create_repo(arguments.hub_model_id or name, private=arguments.hub_private_repo, exist_ok=True)
    # Records name paths, and predictions hold the data.
    ignored = ["checkpoint-*", "*/*", "predictions_*.jsonl", "settings.json", "record.json", "training_args.bin"]
    api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message=message, ignore_patterns=ignored)
    print(f"Uploaded to {repo}")
