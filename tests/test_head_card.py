"""Cards of heads, compared as a whole with those in `fixtures/cards`; after a change of a template, write them again.

Tests of the programs that fine-tune read the cards of real runs.
"""

import pytest
from errors import refused
from golden import check_golden
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


def written(folder, labels=("O", "B-x"), head="ELMoForTokenClassification", config=None, **changes):
    config = ELMoConfig.from_preset("tiny", id2label=dict(enumerate(labels)), **(config or {}))
    config.architectures = [head]
    config.save_pretrained(folder)
    return write_head_card(folder, "someone/tagger", RECORD | changes).read_text("utf-8")


def tagger(folder):
    """Labels that are special in Markdown, and facts of the author."""
    (folder / "statement.md").write_text("From *novels*.", "utf-8")
    write_card_facts(folder, CardArguments(data_statement=str(folder / "statement.md")))
    labels = ["PRP$", "``", "|", "/person/artist", "*", "B_x", *(f"L{number}" for number in range(54))]
    return written(folder, labels, config={"elmo_placement": "both"}, base_model="someone/elmo", dataset="someone/text")


def linear_tagger(folder):
    """The best of three runs on the test data, whose biLM and fixed layers were trained too."""
    config = {"head": "linear", "freeze_bilm": False, "elmo_placement": "input", "scalar_mix_mode": "average"}
    rates = {"precision": 0.25, "recall": 0.25, "f1": 0.25}
    types = {"PER": {**rates, "number": 1234}, "*": {**rates, "number": 1}}
    metrics = {"test": {**rates, "per_type": types}}
    return written(folder, config=config, metrics=metrics, best_of=3, best_on="test")


def classifier_of_pairs(folder):
    """A kind of score may be of one split only."""
    metrics = {"validation": {"f1": 0.5, "verb_f1": 0.4}, "test": {"f1": 0.25, "noun_f1": 0.125}}
    changes = {"columns": ["text", "text_pair", "label"], "metrics": metrics, "best_of": 3, "best_on": "validation"}
    return written(folder, head="ELMoForSequenceClassification", config={"classifier": "esim"}, **changes)


def baseline_reader(folder):
    return written(folder, head="ELMoForQuestionAnswering", config={"use_elmo": False}, layer_weights={})


def role_labeller(folder):
    """The Hub has no tag of the pipeline's name."""
    scores = {"f1": 0.5, "predicate_f1": 0.75, "per_type": {}}
    labels = ["O", "B-ARG0", "B-C-ARG0", "B-V", "I-ARG0"]
    text = written(folder, labels, "ELMoForSemanticRoleLabeling", metrics={"test": scores})
    data = ModelCard(text).data
    assert data.pipeline_tag == data.eval_results[0].task_type == "token-classification"
    assert data.tags == ["elmo", "semantic-role-labeling"]
    return text


@pytest.mark.parametrize("make", [tagger, linear_tagger, classifier_of_pairs, baseline_reader, role_labeller])
def test_cards_of_heads(make, tmp_path):
    check_golden(make(tmp_path), f"cards/{make.__name__}.txt")


def test_the_record_in_the_folder_is_the_default(tmp_path):
    expected = written(tmp_path)
    write_json(tmp_path / "record.json", RECORD)
    assert write_head_card(tmp_path, "someone/tagger").read_text("utf-8") == expected
    for content, lacks in (([1], "seed, metric, "), ({"metric": "f1", "seed": 2}, "metrics, layer_weights, ")):
        write_json(tmp_path / "record.json", content)
        with refused(rf"record\.json is not the record of a run: it lacks {lacks}.* Copy it from the run, or delete"):
            write_head_card(tmp_path, "someone/tagger")
