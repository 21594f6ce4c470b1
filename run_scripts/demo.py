"""Shows what the package does, on real text, with the English biLM of the repository.

    python run_scripts/demo.py            (or `make demo`, in a clone; 5 minutes)

1. Reads raw text. 2. Finds similar uses of a word. 3. Trains the biLM further on texts of another kind. 4. Trains a
tagger of named entities with and without ELMo. All figures are saved in `demo_output/`.
"""

import shutil
import sys
import warnings
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, logging

from modeling_elmo.run_scripts.nearest_neighbors import main as nearest_neighbors
from modeling_elmo.run_scripts.perplexity import main as perplexity
from modeling_elmo.run_scripts.program.command_line import run
from modeling_elmo.run_scripts.reproduce import main as reproduce
from modeling_elmo.run_scripts.run_pretraining import main as run_pretraining

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "model_cards" / "elmo-mini-en"
DEMO_TEXTS = ROOT / "tests" / "fixtures" / "demo"
OUTPUT = ROOT / "demo_output"
STEPS, EPOCHS = 60, 12  # of further pretraining, and of each tagger
PICTURES = {
    "uses_of_play": "neighbors/play.png",
    "perplexity_of_film_reviews": "film-biLM/curve.png",
    "entities": "tagger/results/ner.png",
    "weights_of_the_layers": "tagger/results/ner_layer_weights.png",
}
SENTENCES = ["The play was a great success on Broadway.", "The actors in that play were superb.", "They play chess."]


def main():
    if not (MODEL.is_dir() and DEMO_TEXTS.is_dir()):
        raise FileNotFoundError(f"{MODEL} or {DEMO_TEXTS} is missing: the demo runs in a clone of the repository.")
    warnings.filterwarnings("ignore", message=".*'pin_memory' argument is set as true.*")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    read_text()
    find_neighbors()
    train_on()
    train_taggers()
    heading(f"Figures in {OUTPUT}")
    for name, path in PICTURES.items():
        shutil.copy(OUTPUT / path, OUTPUT / f"{name}.png")
        print(f"  {name}.png")


def read_text():
    heading("1. Raw text becomes vectors, one per word and layer. Look at the cosines.")
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModel.from_pretrained(MODEL)
    encoding = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        layers = model(**encoding).hidden_states
    print("words           ", tokenizer.convert_ids_to_tokens(encoding.input_ids[0]))
    print("hidden_states   ", [tuple(layer.shape) for layer in layers])
    uses = [encoding.tokens(row).index("play") for row in range(len(SENTENCES))]
    print("\n'play' in each sentence beside 'play' in the first:")
    for row, (text, use) in enumerate(zip(SENTENCES, uses, strict=True)):
        cosines = [torch.cosine_similarity(layer[0, uses[0]], layer[row, use], dim=0).item() for layer in layers]
        names = ("characters alone", "layer 1", "layer 2")
        print(f"  {text:45}", ", ".join(f"{name} {each:.2f}" for name, each in zip(names, cosines, strict=True)))


def find_neighbors():
    heading("2. Similar uses of 'play' in 200 sentences, for random queries. See whether they have the same meaning.")
    options = ["--word", "play", "--model", MODEL, "--queries", 5, "--output", OUTPUT / "neighbors" / "play.json"]
    call(nearest_neighbors, DEMO_TEXTS / "play.txt", *options)


def train_on():
    heading(
        "3. The biLM trains on 4,000 lines of film reviews. Compare the perplexity of other reviews before and after."
    )
    held_out = ["--validation_file", DEMO_TEXTS / "film_reviews_heldout.txt", "--is_split_into_words"]
    call(perplexity, "--model", MODEL, *held_out)
    options = [
        "--train_file",
        DEMO_TEXTS / "film_reviews.txt.gz",
        "--max_steps",
        STEPS,
        "--eval_steps",
        max(1, STEPS // 3),
    ]
    options += ["--logging_steps", max(1, STEPS // 10), "--per_device_train_batch_tokens", 1024, "--use_cpu"]
    options += ["--learning_rate", 1e-3, "--report_to", "none", "--output_dir", OUTPUT / "film-biLM"]
    call(run_pretraining, "--model_name_or_path", MODEL, *options, *held_out)


def train_taggers():
    heading("4. Named entities in 600 tweets and comments: the paper's network without and with ELMo. Compare F1.")
    options = ["--train_file", DEMO_TEXTS / "wnut17_train.conll", "--validation_file", DEMO_TEXTS / "wnut17_dev.conll"]
    options += ["--compare_baseline", "--cache_features", "--num_train_epochs", EPOCHS, "--use_cpu"]
    options += ["--config_overrides", '{"task_hidden_size": 100, "task_num_layers": 1}']
    options += ["--per_device_train_batch_size", 8, "--disable_tqdm", True, "--output_dir", OUTPUT / "tagger"]
    call(reproduce, "ner", "--model_name_or_path", MODEL, *options)


def call(program, *options):
    """Runs a program's `main` with the options of its command line."""
    program([str(option) for option in options])


def heading(text: str):
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


if __name__ == "__main__":
    run(main)
