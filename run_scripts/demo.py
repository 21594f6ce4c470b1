"""Shows what the package does, on real text, with the English biLM of the repository.

    python run_scripts/demo.py            (or `make demo`, in a clone; 4 minutes)

1. Reads raw text. 2. Finds similar uses of a word. 3. Trains the biLM further on texts of another kind. 4. Trains a
tagger of named entities with and without ELMo. Figures are saved below `demo_output/`. A table of what was measured and
next commands come last.
"""

import os
import shlex
import shutil
import sys
import warnings
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, logging

from modeling_elmo.run_scripts.cards.tables import markdown_table
from modeling_elmo.run_scripts.nearest_neighbors import main as nearest_neighbors
from modeling_elmo.run_scripts.perplexity import main as perplexity
from modeling_elmo.run_scripts.program.command_line import run
from modeling_elmo.run_scripts.reproduce import main as reproduce
from modeling_elmo.run_scripts.run_pretraining import main as run_pretraining

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "model_cards" / "elmo-small-en"
DEMO_TEXTS = ROOT / "tests" / "fixtures" / "demo"
OUTPUT = ROOT / "demo_output"
BIN = Path(sys.executable).parent
STEPS, EPOCHS = 30, 12  # of further pretraining, and of each tagger
TAGGERS = "tagger"
RESULTS = f"{TAGGERS}/results/ner"
PICTURES = ("neighbors/play.png", "film-biLM/curve.png", f"{RESULTS}.png", f"{RESULTS}_layer_weights.png")
SENTENCES = ["The play was a great success on Broadway.", "The actors in that play were superb.", "They play chess."]


def main():
    if not (MODEL.is_dir() and DEMO_TEXTS.is_dir()):
        raise FileNotFoundError(f"{MODEL} or {DEMO_TEXTS} is missing: the demo runs in a clone of the repository.")
    warnings.filterwarnings("ignore", message=".*'pin_memory' argument is set as true.*")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    print("\n1. Raw text becomes vectors, one per word and layer. Look at the cosines.")
    read_text()
    print("\n2. Similar uses of 'play' in 200 sentences, for random queries. See whether they have the same meaning.")
    options = {"word": "play", "model": MODEL, "queries": 5, "output": OUTPUT / "neighbors" / "play.json"}
    call(nearest_neighbors, DEMO_TEXTS / "play.txt", **options)
    print("\n3. The biLM trains on film reviews. Compare the perplexity of other reviews before and after.")
    perplexities = train_on()
    print("\n4. Named entities in 600 tweets: the paper's network without and with ELMo. Compare F1.")
    scores = train_taggers()
    print("\nFigures:", *(shown(OUTPUT / path) for path in PICTURES), sep="\n  ")
    print_lesson(perplexities, scores)


def read_text():
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModel.from_pretrained(MODEL)
    encoding = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        layers = model(**encoding).hidden_states
    print("words           ", tokenizer.convert_ids_to_tokens(encoding.input_ids[0]))
    print("hidden_states   ", [tuple(layer.shape) for layer in layers])
    uses = [encoding.tokens(row).index("play") for row in range(len(SENTENCES))]
    print("\n'play' in each sentence compared with 'play' in the first:")
    for row, (text, use) in enumerate(zip(SENTENCES, uses, strict=True)):
        cosines = [torch.cosine_similarity(layer[0, uses[0]], layer[row, use], dim=0).item() for layer in layers]
        print(f"  {text:45}", "characters alone {:.2f}, layer 1 {:.2f}, layer 2 {:.2f}".format(*cosines))


def train_on() -> tuple[float, float]:
    """The perplexity of other reviews before and after."""
    held_out = {"validation_file": DEMO_TEXTS / "film_reviews_heldout.txt", "is_split_into_words": True}
    before = call(perplexity, model=MODEL, **held_out).perplexity
    steps = {"max_steps": STEPS, "eval_steps": max(1, STEPS // 3), "logging_steps": max(1, STEPS // 10)}
    training = {"learning_rate": 1e-3, "per_device_train_batch_tokens": 1024, "use_cpu": True, "report_to": "none"}
    files = {"train_file": DEMO_TEXTS / "film_reviews.txt.gz", "output_dir": OUTPUT / "film-biLM"}
    trained = call(run_pretraining, model_name_or_path=MODEL, **files, **steps, **training, **held_out)
    return before, trained.progress.best_perplexity


def train_taggers() -> tuple[float, float]:
    """F1 in percent without and with ELMo."""
    splits = {"train_file": DEMO_TEXTS / "wnut17_train.conll", "validation_file": DEMO_TEXTS / "wnut17_dev.conll"}
    training = {"num_train_epochs": EPOCHS, "per_device_train_batch_size": 8, "use_cpu": True, "disable_tqdm": True}
    network = {"config_overrides": '{"task_hidden_size": 100, "task_num_layers": 1}'}
    arms = {"compare_baseline": True, "cache_features": True, "output_dir": OUTPUT / TAGGERS}
    records = call(reproduce, "ner", model_name_or_path=MODEL, **splits, **arms, **network, **training)
    without, with_elmo = (100 * record["metrics"]["validation"]["f1"] for record in records)
    return without, with_elmo


def call(program, *arguments, **options):
    """Runs a program's `main` with the options of its command line."""
    return program([*map(str, arguments), *(f"--{name}={value}" for name, value in options.items())])


def print_lesson(perplexities: tuple[float, float], scores: tuple[float, float]):
    """What this run has measured, and next commands."""
    rows = [
        ["measured in this run", "before", "after"],
        [f"perplexity of film reviews: {STEPS} steps of training", *(f"{value:.1f}" for value in perplexities)],
        ["F1 of names in tweets: without and with ELMo", *(f"{value:.1f}" for value in scores)],
    ]
    print(f"\n{markdown_table(rows)}")
    print(f"\nThe two taggers differ in ELMo alone: F1 {scores[1] - scores[0]:+.1f}.")
    print("\nNext, use the second tagger, write the vectors of a text, or train a tagger on files like yours:\n")
    print(*next_commands(), sep="\n")
    print(f"\nAfter `source {shown(BIN / 'activate')}`, the command is `elmo`; `elmo --help` lists the programs.")


def next_commands() -> list[str]:
    python, elmo, model, texts, output = map(shown, (BIN / "python", BIN / "elmo", MODEL, DEMO_TEXTS, OUTPUT))
    tagger = os.path.relpath(OUTPUT / TAGGERS / "elmo" / "seed-42")
    find = f'pipeline("token-classification", "{tagger}", trust_remote_code=True, aggregation_strategy="simple")'
    code = f'from transformers import pipeline; print(*{find}("Barack Obama visited New York."), sep="\\n")'
    files = f"--train_file {texts}/wnut17_train.conll --validation_file {texts}/wnut17_dev.conll"
    return [
        f"{python} -c {shlex.quote(code)}",
        f"{elmo} embed --model {model} --input {texts}/play.txt --output {output}/vectors.hdf5",
        f"{elmo} ner --model_name_or_path {model} {files} --output_dir {output}/my-tagger",
    ]


def shown(path: Path) -> str:
    """A path from here, as a shell reads it."""
    return shlex.quote(os.path.relpath(path))


if __name__ == "__main__":
    run(main)
