"""What a biLM's card says: how it was trained or where it is from, its perplexity, and what its vectors know.

results/pretraining.json  the run's settings, text and log, of a biLM that was trained here
results/conversion.json   origin and parity of one that was converted
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

from huggingface_hub import EvalResult

from modeling_elmo import ELMoConfig
from modeling_elmo.run_scripts.cards.card import Part, listed, read_results, shown, table
from modeling_elmo.run_scripts.cards.figures import PERPLEXITIES, draw_curve, loss_label
from modeling_elmo.run_scripts.cards.tables import ERRORS, sense_table, summarize
from modeling_elmo.run_scripts.cards.tables import table as summary_table
from modeling_elmo.run_scripts.program.files import read_json
from modeling_elmo.tokenization.elmo_characters import Utf8Alphabet

Entries = list[dict[str, Any]]

MOST_EVALUATIONS = 12  # rows of the card's table
COMPARABLE = ("predictions", "vocabulary_size", "protocol")  # two perplexities that differ here say nothing together

EXAMPLES = {"en": ["A", "sentence", "in", "words"], "ko": ["배가", "바다를", "건넜다", "."]}

USAGE = """\
from transformers import AutoModel, AutoTokenizer

name = {path!r}  # path of this folder, or its full name on the Hub
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model = AutoModel.from_pretrained(name, trust_remote_code=True)
inputs = tokenizer([{words}], is_split_into_words=True, return_tensors="pt")
outputs = model(**inputs)
layers = outputs.hidden_states  # token layer and biLSTM layers, each (batch, tokens, {hidden_size})
vectors = outputs.elmo_embeddings  # their weighted sum (batch, tokens, {hidden_size}): equation 1 of the paper"""

PREDICTION = """

# The same biLM with its softmax, to predict each word from those before and after.
from transformers import AutoModelForPreTraining

language_model = AutoModelForPreTraining.from_pretrained(name, trust_remote_code=True)
best = language_model.predict_words(**inputs, top_k=5)
print([tokenizer.convert_ids_to_tokens(ids) for ids in best.word_ids[0].tolist()])"""

INTENDED_USE = """\
Vectors of words in their context: as features of taggers, classifiers and readers, which learn the weights of its
layers (section 3.3 of the paper), to compare the uses of a word, and as a start for further training on other text. It
does not write texts, and it was not made to decide anything about people."""


def bilm_part(folder: Path, name: str) -> Part:
    """The card of the biLM in `folder`, from its configuration and `results/`."""
    config = ELMoConfig.from_pretrained(folder)
    trained, converted = read_results(folder, "pretraining"), read_results(folder, "conversion")
    evaluations = [entry for entry in trained.get("log", ()) if "perplexity" in entry]
    sections = pretraining_sections(folder, config, trained, evaluations) if trained else []
    if converted:
        sections.append(("Origin", describe_origin(converted)))
    sections += task_sections(folder) + vector_sections(folder)
    words = EXAMPLES.get(next(iter(read_results(folder, "card").get("language", ())), "en"), EXAMPLES["en"])
    usage = USAGE.format(path=name, hidden_size=config.hidden_size, words=json.dumps(words, ensure_ascii=False))
    return Part(
        model=describe_model(config, trained.get("num_parameters"), trained.get("base_model")),
        usage=usage + PREDICTION if predicts_words(config) else usage,
        sections=sections,
        intended_use=INTENDED_USE,
        limits=describe_limits(config, trained.get("data", {})),
        pipeline_tag="feature-extraction",
        tags=["elmo", "bilm", "language-model", "lstm"],
        metrics=["perplexity"] if evaluations else [],
        results=evaluation_results(trained, evaluations),
        base_model=trained.get("base_model_on_hub"),
    )


def pretraining_sections(
    folder: Path, config: ELMoConfig, trained: dict[str, Any], evaluations: Entries
) -> list[tuple[str, str]]:
    log, step = trained["log"], trained["published_step"]
    steps = [entry for entry in log if "loss" in entry or "sampled_loss" in entry]
    has_curve = draw_curve(folder / "curve.png", evaluations, steps, config, step)
    return [
        ("Data", describe_data(trained["data"])),
        ("Training", describe_training(trained, steps, config, has_curve)),
        ("Perplexity", describe_perplexity(evaluations, config, trained["base_model"], step)),
    ]


def evaluation_results(trained: dict[str, Any], evaluations: Entries) -> list[EvalResult]:
    if not evaluations:
        return []
    return [
        EvalResult(
            task_type="language-modeling",
            dataset_type="local",
            dataset_name=listed(trained["data"]["validation"]),
            metric_type="perplexity",
            metric_value=round(published(evaluations, trained["published_step"])["perplexity"], 2),
        )
    ]


def published(evaluations: Entries, step: int) -> dict[str, Any]:
    """That of the weights in the folder; the last, where these were not evaluated."""
    return next((entry for entry in evaluations if entry["step"] == step), evaluations[-1])


def predicts_words(config: ELMoConfig) -> bool:
    return config.has_softmax and "ELMoForPreTraining" in (config.architectures or ())


def describe_limits(config: ELMoConfig, data: dict[str, Any]) -> list[str]:
    limits = [
        "It knows the language of its training text: its domains, its time, its prejudices. Other text is read worse, "
        "and what the text says of people is in the vectors.",
    ]
    if config.char_vocab_size:
        room = config.max_word_length - 2  # for begin and end
        seen = f": {data['cut_words']:,} of the training text's {data['words']:,}" if "cut_words" in data else ""
        unit = "bytes, in UTF-8" if config.char_vocab_size == Utf8Alphabet.size else "characters"
        limits.append(f"Of a word it reads the first {room} {unit}; longer words are cut{seen}.")
    longest = f"; the longest of its training had {data['longest_sentence']:,}" if "longest_sentence" in data else ""
    limits.append(f"A sentence may have any number of words{longest}. Those before and after it are not seen.")
    if not config.char_vocab_size:
        limits.append("Words outside its vocabulary are all read as `<UNK>`.")
    if not predicts_words(config):
        limits.append("It gives vectors, and predicts no words: it came without its softmax.")
    elif config.char_vocab_size:
        limits.append("It reads any word, and predicts those of its vocabulary or `<UNK>`.")
    return limits


def task_sections(folder: Path) -> list[tuple[str, str]]:
    """The experiments whose records lie in `results/`: with and without ELMo, and the layer weights they learned."""
    parts = []
    for path, found in results_of(folder):
        if is_experiment(found):
            records, summaries = found["records"], summarize(found["records"])
            arms = {summary.arm.partition("@")[0] for summary in summaries}
            baseline = "baseline" if "baseline" in arms else None
            parts += [f"### {shown(path.stem.replace('_', ' '))}", describe_experiment(records[0])]
            parts += [summary_table(summaries, records[0]["metric"], baseline)]
            parts += pictures_of(folder, path, "Learned layer weights", "_layer_weights")
    return [("As features of tasks", "\n\n".join(parts))] if parts else []


def is_experiment(found: Any) -> bool:
    """Whether a file's content is what a fine-tuning script records; anything may lie in the folder."""
    records = found.get("records") if isinstance(found, dict) else None
    is_list = isinstance(records, list) and bool(records)
    return is_list and all(isinstance(each, dict) and {"arm", "metrics"} <= set(each) for each in records)


def describe_experiment(record: dict[str, Any]) -> str:
    settings, metric = record.get("settings", {}), record["metric"]
    network = "one linear layer" if settings.get("head") == "linear" else "a network of the paper"
    bilm = "the frozen biLM" if settings.get("freeze_bilm", True) else "the biLM, which learns with it"
    unit = "" if metric in ERRORS else ", in percent"
    name = shown(metric.replace("_", " ")).capitalize()
    is_chosen_there = settings.get("load_best_model_at_end") and list(record["metrics"]) == ["validation"]
    chosen = " The data that is measured on also chose the epoch." if is_chosen_there else ""
    return f"{name} of {network} on {bilm}; mean ± sample deviation over seeds{unit}.{chosen}"


def vector_sections(folder: Path) -> list[tuple[str, str]]:
    """What `nearest_neighbors.py` and `word_senses.py` found."""
    parts = []
    for path, found in results_of(folder):
        if isinstance(found, dict) and {"word", "layer", "queries", "uses"} <= found.keys():
            parts += [describe_neighbors(found), *pictures_of(folder, path, f"Uses of {found['word']}")]
        if isinstance(found, dict) and "same_sense" in found:
            lemma = found.get("map", {}).get("lemma")
            parts += [describe_senses(found), *pictures_of(folder, path, f"Uses of {lemma} in the top layer, by sense")]
    return [("What its vectors know", "\n\n".join(parts))] if parts else []


def results_of(folder: Path) -> list[tuple[Path, Any]]:
    paths = sorted((folder / "results").glob("*.json"))
    return [(path, read_json(path)) for path in paths]


def pictures_of(folder: Path, path: Path, title: str, suffix: str = "") -> list[str]:
    picture = path.with_name(f"{path.stem}{suffix}.png")
    return [f"![{shown(title)}]({picture.relative_to(folder).as_posix()})"] if picture.exists() else []


def describe_neighbors(found: dict[str, Any]) -> str:
    rows = [
        row
        for query in found["queries"]
        for row in (
            [f"**{shown(query['use'])}**", ""],
            *([shown(use), f"{cosine:.2f}"] for cosine, use in query["neighbors"]),
        )
    ]
    there, uses = found.get("uses_in_text", found["uses"]), found["uses"]
    compared = f"{uses:,}" if there == uses else f"{uses:,} that were drawn of {there:,}"
    return (
        f"Uses of `{found['word']}` (bold), drawn with seed {found['seed']} of {compared} in "
        f"{shown(found['text'])}, and the nearest in other sentences (layer: {found['layer']}).\n\n"
        + table(["use", "cosine"], rows)
    )


def describe_senses(found: dict[str, Any]) -> str:
    same, told = found["same_sense"], found.get("disambiguation")
    parts = [
        f"Word senses of {shown(found['train']['file'])}, in percent. Same sense@1: how often the nearest use of a "
        f"lemma in another sentence has its sense ({same['lemmas']:,} lemmas with two senses or more, "
        f"{same['instances']:,} uses)."
    ]
    if told:
        parts.append(
            f"Disambiguation: the nearest average of a sense, on {shown(found['test']['file'])} "
            f"({told['instances']:,} uses; the {told['unseen_lemmas']:.0%} whose lemma is not in the training text "
            f"{'get the first sense' if 'first sense' in told else 'count as wrong'})."
        )
    return f"{' '.join(parts)}\n\n{sense_table(found)}"


def describe_origin(converted: dict[str, Any]) -> str:
    files = [[shown(file["name"]), f"{file['bytes']:,}", f"`{file['sha256']}`"] for file in converted["files"]]
    return "\n\n".join(
        [
            f"Converted from {shown(converted['origin'])}; not trained here.",
            table(["file", "bytes", "SHA-256"], files),
            f"Parity: written back to the original's format, {converted['equal_arrays']} of {converted['arrays']} "
            "arrays equal the original's bit for bit.",
            "The weights' licence is that of the origin.",
        ]
    )


def describe_model(config: ELMoConfig, num_parameters: int | None, base_model: str | None) -> str:
    layers = f"{config.num_hidden_layers} layer{'s' if config.num_hidden_layers > 1 else ''}"
    projection = f"projected to {config.projection_size:,}" if config.has_projection else "without a projection"
    characters = ["its characters"] if config.char_vocab_size else []
    vector = ["a vector of its own"] if config.word_embedding_size else []
    parameters = f"{num_parameters:,} parameters with the softmax; " if num_parameters else ""
    origin = f" It was trained further from {shown(base_model)}." if base_model else ""
    return (
        "A biLM, the bidirectional language model of ELMo ([Peters et al. 2018](https://arxiv.org/abs/1802.05365)): "
        f"{layers} of {config.lstm_hidden_size:,} LSTM cells in each direction, {projection}; "
        f"{parameters}a vocabulary of {config.vocab_size:,} words, special words "
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


def describe_training(trained: dict[str, Any], steps: Entries, config: ELMoConfig, has_curve: bool) -> str:
    settings = trained["settings"]
    parts = [f"The weights are those of step {trained['published_step']:,}."]
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
    parts += [describe_change(part, settings) for part in trained.get("earlier_settings", [])]
    return "\n\n".join(parts)


def describe_change(earlier: dict[str, Any], settings: dict[str, Any]) -> str:
    """What of the settings was another up to some step."""
    before = earlier["settings"]
    names = sorted(name for name in settings.keys() | before if settings.get(name) != before.get(name))
    values = [f"{shown(name)} {shown(before.get(name, 'as by default'))}" for name in names]
    return f"Up to step {earlier['until_step']:,} these were different: {'; '.join(values)}."


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


def describe_perplexity(evaluations: Entries, config: ELMoConfig, base_model: str | None, published_step: int) -> str:
    if not evaluations:
        return "It was not measured: the run had no held-out text."
    found = published(evaluations, published_step)
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
