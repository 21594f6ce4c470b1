"""Uses saved biLMs in sentence-transformers: `python sentence_worker.py FOLDERS RESULTS RESAVED`.

Without the package. Writes the vectors of TEXTS from every folder in FOLDERS to RESULTS, trains the mix for a few
steps, writes the vectors again, and saves the model in RESAVED.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import dot_score

TEXTS = ["He is in (London), Paris.", "", "밥 먹었어?", "<S>", "He is in London, and in Paris too, they say.", "He"]
# different lengths in every batch
TRIPLETS = {
    "anchor": ["He is in London.", "Paris", "They say that he is here.", "In Paris, they say."],
    "positive": ["He was in London.", "It is in Paris, they say.", "He is here.", "Paris"],
    "negative": ["No.", "He is not.", "No, they do not say that he is in London.", "London"],
}


def train(model: SentenceTransformer, folder: Path, data=None, loss=None, steps: int = 3):
    """The default loss depends on the length of the vectors, so that gamma is trained; cosines would not."""
    arguments = SentenceTransformerTrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    loss = loss or MultipleNegativesRankingLoss(model, scale=1.0, similarity_fct=dot_score)
    SentenceTransformerTrainer(model, arguments, data or Dataset.from_dict(TRIPLETS), loss=loss).train()


def main(folders: Path, results: Path, resaved: Path):
    assert importlib.util.find_spec("modeling_elmo") is None, "this test needs a python without the package"
    found = {}
    for folder in sorted(folders.iterdir()):
        model = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
        found[f"{folder.name}/loaded"] = torch.from_numpy(model.encode(TEXTS, batch_size=4))
        model.transformers_model.freeze()
        train(model, resaved / "trainer")
        found[f"{folder.name}/trained"] = torch.from_numpy(model.encode(TEXTS, batch_size=4))
        model.save_pretrained(str(resaved / folder.name))
    save_file(found, results)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
