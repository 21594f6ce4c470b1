"""Cards of heads; tests of the programs that fine-tune read the cards of real runs."""

import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from modeling_elmo import ELMoConfig
from modeling_elmo.run_scripts.cards.card import CardArguments, write_card_facts
from modeling_elmo.run_scripts.cards.head_card import write_head_card
from modeling_elmo.run_scripts.program.files import write_json

RECORD = {
    "arm": "elmo",
    "seed": 2,
    "metric": "f1",
    "metrics": {"validation": {"f1": 0.5, "per_type": {}}, "test": {"f1": 0.25, "per_type": {}}},
    "layer_weights": {"input": [0.2, 0.5, 0.3]},
    "data": {"train": "train.conll", "text_column": "a|b"},
    "columns": ["tokens", "tags"],
    "train_samples": 1234,
    "settings": {"model_name_or_path": "someone/elmo", "load_best_model_at_end": True, "weight_decay": 0},
}


def written(folder: Path, labels=("O", "B-x"), head="ELMoForTokenClassification", config=None, **changes) -> str:
    config = ELMoConfig.from_preset("tiny", id2label=dict(enumerate(labels)), **(config or {}))
    config.architectures = [head]
    config.save_pretrained(folder)
    write_head_card(folder, "someone/tagger", RECORD | changes)
    return ModelCard.load(folder / "README.md").text


def test_labels_are_shown_as_they_are(tmp_path):
    labels = ["PRP$", "``", "|", "/person/artist", "/organization/artist", "*", "B_x"]
    (line,) = [line for line in written(tmp_path, labels).splitlines() if line.startswith("Labels: ")]
    assert re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", line) == f"Labels: {', '.join(labels)}."
    assert not re.search(r"(?<!\\)[`*|$]", line)
    assert "L49, and 10 more." in written(tmp_path, [f"L{number}" for number in range(60)])


@pytest.mark.parametrize(
    ("head", "config", "sentences"),
    [
        (
            "ELMoForTokenClassification",
            {"elmo_placement": "both"},
            ["Network: biLSTMs and a linear-chain CRF", "of someone/elmo, frozen, at its input and output.\n"],
        ),
        (
            "ELMoForTokenClassification",
            {"head": "linear", "freeze_bilm": False, "elmo_placement": "input"},
            ["Network: one linear layer.", "of someone/elmo, trained with it, at its input.\n"],
        ),
        ("ELMoForSequenceClassification", {"classifier": "esim"}, ["Network: ESIM,", 'print(pipe("It was staged']),
        (
            "ELMoForQuestionAnswering",
            {"use_elmo": False},
            ["BiDAF with self-attention", "without ELMo: a baseline.\n\nAn answer is a span", "print(pipe(question="],
        ),
    ],
)
def test_network_and_example(tmp_path, head, config, sentences):
    text = written(tmp_path, head=head, config=config)
    assert all(sentence in text for sentence in sentences), text
    assert text.startswith("\n# tagger\n") and "\nname = 'someone/tagger'  # path of this folder" in text


def test_semantic_roles(tmp_path):
    """The Hub has no tag of the pipeline's name."""
    scores = {"f1": 0.5, "predicate_f1": 0.75, "per_type": {}}
    labels = ["O", "B-ARG0", "B-C-ARG0", "B-V", "I-ARG0"]
    text = written(tmp_path, labels, "ELMoForSemanticRoleLabeling", metrics={"test": scores})
    assert "\n\nRoles: ARG0, C-ARG0, V.\n" in text
    assert "Network: interleaved LSTMs with highway connections (He et al. 2017), and a tagger" in text
    assert "pipe = pipeline('semantic-role-labeling', model=name, trust_remote_code=True)" in text
    assert "| test | 0.5000 | 0.7500 |\n\nRoles are scored for the gold predicates, as `srl-eval.pl` counts;" in text
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.pipeline_tag == data.eval_results[0].task_type == "token-classification"
    assert data.tags == ["elmo", "semantic-role-labeling"]


def test_example_with_pairs(tmp_path):
    text = written(tmp_path, head="ELMoForSequenceClassification", columns=["text", "text_pair", "label"])
    assert 'print(pipe({"text": "A man sleeps.", "text_pair": "Someone rests."}))' in text


def test_results_data_and_settings(tmp_path):
    (tmp_path / "statement.md").write_text("From *novels*.", encoding="utf-8")
    write_card_facts(tmp_path, CardArguments(data_statement=str(tmp_path / "statement.md")))
    text = written(tmp_path, base_model="someone/elmo", dataset="someone/text")
    table = ["| split | f1 |", "| ---: | ---: |", "| validation | 0.5000 |", "| test | 0.2500 |"]
    assert "\n".join(["## Results", "", *table, ""]) in text
    assert "- train: train.conll\n- text column: a\\|b\n- training examples: 1,234\n\nFrom *novels*.\n" in text
    assert "| load_best_model_at_end | True |\n\n## Intended use" in text and "weight_decay" not in text
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.base_model == "someone/elmo" and data.pipeline_tag == "token-classification"
    found = [(result.dataset_type, result.dataset_split, result.metric_value) for result in data.eval_results]
    assert found == [("someone/text", "validation", 0.5), ("someone/text", "test", 0.25)]


def test_splits_with_other_scores(tmp_path):
    """A kind of predicate, or a question without an answer, may be in one split only."""
    metrics = {"validation": {"f1": 0.5, "verb_f1": 0.4}, "test": {"f1": 0.25, "noun_f1": 0.125}}
    text = written(tmp_path, metrics=metrics)
    assert "| split | f1 | verb_f1 | noun_f1 |" in text
    assert "| validation | 0.5000 | 0.4000 | |\n| test | 0.2500 | | 0.1250 |\n" in text


def test_protocol(tmp_path):
    best = "Protocol: the checkpoint with the best `f1` on the validation split; "
    assert best + "one run, with seed 2.\n" in written(tmp_path)
    text = written(tmp_path, best_of=3, best_on="validation")
    assert best + "the best of 3 runs on the validation split, with seed 2.\n" in text
    text = written(tmp_path, metrics={"test": {"f1": 0.25}}, best_of=3, best_on="test")
    last = "Protocol: the last checkpoint; the best of 3 runs on the test split, with seed 2, "
    assert last + "which makes the figure slightly too good.\n" in text


def test_layer_weights(tmp_path):
    shares = "at the input: token layer 0.200, biLSTM 1 0.500, biLSTM 2 0.300.\n"
    assert f"Layer weights (softmax of s) {shares}" in written(tmp_path)
    assert f"Layer weights (fixed) {shares}" in written(tmp_path, config={"scalar_mix_mode": "average"})


def test_the_record_in_the_folder_is_the_default(tmp_path):
    written(tmp_path)
    expected = (tmp_path / "README.md").read_text(encoding="utf-8")
    write_json(tmp_path / "record.json", RECORD)
    write_head_card(tmp_path, "someone/tagger")
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == expected
