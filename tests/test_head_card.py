"""Cards of heads; tests of the scripts that train look at those of real runs."""

import re
from pathlib import Path

from huggingface_hub import ModelCard

from modeling_elmo import ELMoConfig
from modeling_elmo.run_scripts.cards.card import write_card
from modeling_elmo.run_scripts.cards.head_card import task_part

RECORD = {
    "arm": "elmo",
    "seed": 2,
    "metric": "f1",
    "metrics": {"validation": {"f1": 0.5}, "test": {"f1": 0.25}},
    "layer_weights": {"input": [0.2, 0.5, 0.3]},
    "data": {"train": "train.conll"},
    "columns": ["tokens", "tags"],
    "train_samples": 1234,
    "settings": {"model_name_or_path": "someone/elmo", "load_best_model_at_end": True},
}


def written(folder: Path, labels=("O", "B-x"), **changes) -> str:
    config = ELMoConfig.from_preset("tiny", id2label=dict(enumerate(labels)), **changes.pop("config", {}))
    config.architectures = ["ELMoForTokenClassification"]
    config.save_pretrained(folder)
    write_card(folder, "tagger", task_part(folder, "tagger", RECORD | changes))
    return ModelCard.load(folder / "README.md").text


def test_labels_are_shown_as_they_are(tmp_path):
    labels = ["PRP$", "``", "|", "/person/artist", "/organization/artist", "*", "B_x"]
    (line,) = [line for line in written(tmp_path, labels).splitlines() if line.startswith("Labels: ")]
    assert re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", line) == f"Labels: {', '.join(labels)}."
    assert not re.search(r"(?<!\\)[`*|$]", line)
    assert "L49, and 10 more." in written(tmp_path, [f"L{number}" for number in range(60)])


def test_protocol(tmp_path):
    best = "of all checkpoints the one with the best `f1` on the validation split; "
    assert best + "one run, with seed 2." in written(tmp_path)
    text = written(tmp_path, best_of=3, best_on="validation")
    assert best + "the best of 3 runs on the validation split, with seed 2." in text
    text = written(tmp_path, metrics={"test": {"f1": 0.25}}, best_of=3, best_on="test")
    assert (
        "the last one; the best of 3 runs on the test split, with seed 2, which makes the figure a little too" in text
    )


def test_layer_weights(tmp_path):
    assert "Layer weights (softmax of s) at the input: token layer 0.200, biLSTM 1 0.500" in written(tmp_path)
    assert "Layer weights (fixed) at the input:" in written(tmp_path, config={"scalar_mix_mode": "average"})
