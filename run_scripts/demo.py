"""Converts a small original checkpoint, reads real sentences with it, and trains a new biLM for a minute.

python run_scripts/demo.py            (what `make demo` runs, in a clone)
"""

import os
import signal
import sys
import tempfile
import textwrap
from pathlib import Path
from threading import Timer

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):  # run by path from a clone that is not installed
    sys.path.insert(0, str(ROOT))

import h5py  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from transformers import AutoModel, AutoModelForPreTraining, AutoTokenizer, logging  # noqa: E402

from modeling_elmo.conversion_elmo import convert_original_checkpoint  # noqa: E402
from modeling_elmo.prediction_elmo import predict_texts  # noqa: E402
from modeling_elmo.run_scripts.embed import main as embed  # noqa: E402
from modeling_elmo.run_scripts.lm_training import Stopped  # noqa: E402
from modeling_elmo.run_scripts.run_pretraining import main as run_pretraining  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures"
SENTENCES = FIXTURES / "demo" / "play.txt"
OUTPUT = ROOT / "demo_output" / "elmo_vectors.hdf5"
WORD = "play"
TEXT = FIXTURES / "text" / "inaugural.txt.gz", FIXTURES / "text" / "inaugural_heldout.txt"
STEPS, SECONDS = 400, 15  # of training, and until it is interrupted


def main():
    if not SENTENCES.is_file():
        raise FileNotFoundError(f"{SENTENCES} is missing: the demo runs in a clone of the repository.")
    logging.disable_progress_bar()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = convert(Path(scratch) / "elmo-fixture")
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
        read_two_sentences(tokenizer, model)
        nearest_neighbors(tokenizer, model)
        write_vectors(folder, OUTPUT)
        train_from_scratch(Path(scratch) / "elmo-inaugural")


def convert(folder: Path) -> Path:
    heading("1. An original checkpoint (options.json + weights.hdf5) becomes a Hugging Face folder")
    source = FIXTURES / "elmo_fixtures" / "allennlp"
    convert_original_checkpoint(source / "lm_weights.hdf5", source / "options.json", folder)
    print(f"{source.relative_to(ROOT)} -> {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print("This is AllenNLP's tiny test model (vectors of 32 numbers, hardly trained): right numbers, little meaning.")
    return folder


def read_two_sentences(tokenizer, model):
    heading("2. AutoTokenizer and AutoModel read raw text")
    encoding = tokenizer(["The play was staged.", "They play chess."], padding=True, return_tensors="pt")
    with torch.no_grad():
        output = model(**encoding)
    print("tokens          ", tokenizer.convert_ids_to_tokens(encoding.input_ids[0]), "(no vocabulary came with it)")
    print("characters of   ", tokenizer.decode_characters(encoding.character_ids[0]))
    print("hidden_states   ", [tuple(layer.shape) for layer in output.hidden_states])
    print("elmo_embeddings ", tuple(output.elmo_embeddings.shape))
    similarity = F.cosine_similarity(output.elmo_embeddings[0, 2], output.elmo_embeddings[1, 2], dim=0)
    print(f"cosine of the two vectors of '{WORD}': {similarity:.4f} (a static vector would give 1)")


def nearest_neighbors(tokenizer, model):
    heading(f"3. Which other uses of '{WORD}' are nearest, among {len(read_sentences())} sentences?")
    sentences, vectors = read_sentences(), []
    for start in range(0, len(sentences), 50):
        batch = sentences[start : start + 50]
        encoding = tokenizer(batch, is_split_into_words=True, padding=True, return_tensors="pt")
        with torch.no_grad():
            top = model(**encoding).last_hidden_state
        vectors += [top[row, words.index(WORD) + 1] for row, words in enumerate(batch)]  # + 1: <S> stands first
    similarities = F.normalize(torch.stack(vectors), dim=1)
    similarities = similarities @ similarities.T
    for query in (0, 1, 2):
        print(f"\n  {context(sentences[query])}")
        for other in similarities[query].argsort(descending=True)[1:4].tolist():
            print(f"    {similarities[query, other]:.3f}  {context(sentences[other])}")


def write_vectors(folder: Path, output: Path):
    heading("4. All sentences to a file, in the layout of AllenNLP's `elmo` command")
    output.parent.mkdir(exist_ok=True)
    output.unlink(missing_ok=True)
    embed(["--model", str(folder), "--input", str(SENTENCES), "--output", str(output), "--layers", "all"])
    with h5py.File(output) as vectors:
        print(f"{output}: line 0 is a dataset of shape {vectors['0'].shape} (layers, words, width)")


def train_from_scratch(folder: Path):
    heading("5. A new biLM learns from inaugural addresses; Ctrl-C after a few seconds, then it goes on")
    train, held_out = map(str, TEXT)
    options = ["--preset", "tiny", "--vocabulary_size", "3000", "--is_split_into_words", "--report_to", "none"]
    options += ["--train_file", train, "--validation_file", held_out, "--output_dir", str(folder), "--use_cpu"]
    options += ["--per_device_train_batch_tokens", "1024", "--learning_rate", "0.01", "--max_steps", str(STEPS)]
    interruption = Timer(SECONDS, os.kill, (os.getpid(), signal.SIGINT))
    interruption.start()
    try:
        run_pretraining(options)
    except Stopped:
        run_pretraining([*options, "--resume_from_checkpoint", "last"])
    finally:
        interruption.cancel()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForPreTraining.from_pretrained(folder)
    sentence = ["The", "people", "of", "the", "United", "States", "are", "free", "."]
    ((_, *rest),) = predict_texts(model, tokenizer, [sentence], top_k=3)
    print(f"\nWhat it expects at each word of: {' '.join(sentence)}")
    for word, candidates in rest:
        print(f"  {word:>8}  {', '.join(candidate.word for candidate in candidates)}")


def read_sentences() -> list[list[str]]:
    return [line.split() for line in SENTENCES.read_text(encoding="utf-8").splitlines()]


def context(words: list[str], width: int = 6) -> str:
    place = words.index(WORD)
    left, right = words[max(0, place - width) : place], words[place + 1 : place + 1 + width]
    return f"{' '.join(left):>45.45} [{WORD}] {textwrap.shorten(' '.join(right), 45, placeholder='')}"


def heading(text: str):
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


if __name__ == "__main__":
    main()
