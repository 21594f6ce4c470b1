"""Cards of biLMs, compared as a whole with those in `fixtures/cards`.

After a change of a template, put there what these tests write. test_run_pretraining.py reads the cards of real runs.
"""

import math
import re
import sys

import pytest
from errors import refused
from golden import check_golden
from huggingface_hub import ModelCard

from modeling_elmo import ELMoConfig
from modeling_elmo.run_scripts.cards.bilm_card import write_bilm_card
from modeling_elmo.run_scripts.cards.card import (
    CardArguments,
    hub_name,
    without_folders,
    write_card_facts,
    write_result,
)

try:
    from matplotlib import figure
except ImportError:
    figure = None

PROTOCOL = "each sentence on its own from a zero state"


@pytest.fixture(autouse=True)
def without_matplotlib(monkeypatch):
    """Most tests read only the text, and a picture takes half a second."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture
def with_matplotlib(without_matplotlib, monkeypatch):
    if figure is None:
        pytest.skip("needs matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)


def evaluation(step, perplexity, **changes):
    return {
        "step": step,
        "epoch": step / 100,
        "perplexity": perplexity,
        "forward": perplexity * 1.25,
        "backward": perplexity / 1.25,
        "predictions": 54321,
        "unknown_rate": 0.0456,
        "vocabulary_size": 7654,
        "protocol": PROTOCOL,
        **changes,
    }


def training(step, loss, name="loss", words_per_second=1000.0):
    return {
        "step": step,
        "epoch": step / 100,
        name: loss,
        "forward_loss": loss + 0.25,
        "backward_loss": loss - 0.25,
        "gradient_norm": 1.5,
        "learning_rate": 0.1,
        "words_per_second": words_per_second,
        "data_wait": 0.01,
    }


LOG = [
    evaluation(0, 7000.126),
    training(50, 6.5, words_per_second=900),
    training(100, 5.5, words_per_second=12345),
    evaluation(100, 250.377),
    training(150, 5.125, words_per_second=20000),
    evaluation(150, 260.5),
]


def write(folder, log=LOG, config=None, name="elmo-xy", **changes):
    record = {
        "num_parameters": 1234567,
        "data": {"train": ["train.txt"], "validation": ["dev.txt"], "sentences": 4321, "words": 87654},
        "settings": {"learning_rate": 0.2},
        "log": log,
        "base_model": None,
        "base_model_on_hub": hub_name(changes.get("base_model")),
        "published_step": 100,
        **changes,
    }
    (config or ELMoConfig.from_preset("tiny", architectures=["ELMoForPreTraining"])).save_pretrained(folder)
    write_result(folder, "pretraining", without_folders(record))
    return write_bilm_card(folder, name).read_text("utf-8")


SENSES = {
    "train": {"file": "a.data.xml", "instances": 9},
    "same_sense": {"lemmas": 3, "instances": 8, "chance": 0.25, "first sense": 0.5, "token layer": 0.375},
    "test": {"file": "b.data.xml", "instances": 7},
    "disambiguation": {"instances": 7, "unseen_lemmas": 0.125, "first sense": 0.75, "token layer": 0.625},
}


def trained_further(folder):
    """All findings, beside results of other tools."""
    others = [{"records": [1, 2]}, {"records": 3}, [4], {"records": [{"arm": "a"}]}, {"all": 5}, {"same_sense": 0.5}]
    others += [{"metric": "f1", "test": 0.5}, {"metric": "f1", "test": {"f1": 0.5}}]
    for number, other in enumerate(others):
        write_result(folder, f"of_another_tool_{number}", other)
    write_result(folder, "nearest_neighbors_play", {"word": "play", "layer": "top", "queries": [], "uses": 12})
    write_result(folder, "pairs_BLiMP", {"all": {"pairs": 8, "forward": 0.5, "backward": 0.75, "both": 0.625}})
    write_result(folder, "word_senses", SENSES)
    (folder / "results" / "word_senses.png").write_bytes(b"")
    earlier = [{"until_step": 1050, "settings": {"learning_rate": 0.1, "train_file": ["a", "b"], "fp16": True}}]
    settings = {"fp16": True, "learning_rate": 0.2, "max_steps": 5}
    data = {"train": ["train.txt"], "validation": ["dev.txt"], "sentences": 4321, "words": 98765}
    data |= {"longest_sentence": 1234, "cut_words": 56}
    return write(folder, base_model="someone/elmo", earlier_settings=earlier, settings=settings, data=data)


def word_level(folder):
    """A sampled softmax, without evaluations; results under other conditions."""
    write_result(folder, "card", {"language": ["ko", "en"]})
    wrong = {name: value for name, value in SENSES["disambiguation"].items() if name != "first sense"}
    write_result(folder, "senses", SENSES | {"disambiguation": wrong})
    scores = {"most frequent tag": {"accuracy": 0.5}, "biLSTM 1": {"accuracy": 0.925}}
    probe = {"metric": "accuracy", "train": {"file": "ud.conllu", "words": 12345}, "test": {"scores": scores}}
    write_result(folder, "probe", probe)
    sizes = {"projection_size": 64, "num_hidden_layers": 1, "char_vocab_size": 0, "word_embedding_size": 8}
    config = ELMoConfig.from_preset("tiny", softmax_type="sampled", num_sampled=3000, **sizes)
    data = {"train": ["someone/text"], "validation": [None], "sentences": None, "words": None}
    return write(folder, log=[training(50, 3.5, "sampled_loss")], config=config, data=data, base_model="/gone/elmo")


def lexicon_level(folder):
    """An adaptive softmax, both inputs, evaluations that diverged, and none of the published weights."""
    config = ELMoConfig.from_preset("tiny", softmax_type="adaptive", char_vocab_size=18, word_embedding_size=8)
    log = [evaluation(0, math.inf), training(50, 6.5), evaluation(100, 1e300), evaluation(200, math.nan)]
    return write(folder, log=log, config=config, base_model="someone/elmo", published_step=120)


def converted(folder):
    ELMoConfig.from_preset("tiny", has_softmax=False).save_pretrained(folder)
    files = [{"name": "w_.hdf5", "bytes": 1234, "sha256": "ab" * 32}]
    found = {"origin": "someone's *ELMo*", "files": files, "arrays": 33, "equal_arrays": 32}
    write_result(folder, "conversion", found)
    (folder / "statement.md").write_text("From speeches.", "utf-8")
    write_card_facts(folder, CardArguments(data_statement=str(folder / "statement.md")))
    return write_bilm_card(folder, "someone/elmo").read_text("utf-8")


@pytest.mark.parametrize("make", [trained_further, word_level, lexicon_level, converted])
def test_cards(make, tmp_path):
    check_golden(make(tmp_path), f"cards/{make.__name__}.txt")


OTHER_TEXT = [evaluation(0, 7000.126, predictions=5), *LOG[1:]]
OF_PERPLEXITY = {
    "of further training": {"base_model": "a/b"},
    "of a new biLM": {},
    "without an evaluation before": {"log": LOG[1:], "base_model": "someone/elmo"},
    "of another text before": {"log": OTHER_TEXT, "base_model": "someone/elmo"},
    "of the last step": {"published_step": 150},
    "of one evaluation": {"log": LOG[:4]},
    "of other weights": {"published_step": 120},
}


def test_conditions_of_the_perplexity(tmp_path):
    """What was measured on another text is no comparison; the lowest of one evaluation is no choice.

    The published step is named once: in the sentence on the perplexity, unless other weights were evaluated.
    """
    shown = []
    for name, changes in OF_PERPLEXITY.items():
        card = write(tmp_path, **changes)
        shown += [
            name,
            *(f"  {line}" for line in card.splitlines() if re.search("perplexity (at|is)|weights come", line)),
        ]
    check_golden("\n".join(shown) + "\n", "cards/perplexity.txt")


def test_front_matter_names_no_folder(tmp_path, monkeypatch):
    write(tmp_path, base_model="someone/elmo")
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.base_model == "someone/elmo" and data.license is None and data.metrics == ["perplexity"]
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value) == ("perplexity", 250.38)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for local in ("folder", str(tmp_path / "gone")):
        text = write(tmp_path, base_model=local)
        assert ModelCard.load(tmp_path / "README.md").data.base_model is None
        assert f"trained further from {local.split('/')[-1]}." in text and str(tmp_path) not in text


@pytest.mark.parametrize("name, lacks", [("pretraining", "data, log"), ("conversion", "origin, arrays")])
def test_a_record_of_something_else(name, lacks, tmp_path):
    """The file may have the name of ours by chance."""
    write(tmp_path)
    write_result(tmp_path, name, {"loss": 0.5})
    with refused(rf"{name}\.json is not the record of a run: it lacks {lacks}, .* Copy it from the run, or delete it"):
        write_bilm_card(tmp_path, "someone/elmo")


@pytest.mark.parametrize("log", [[], LOG[1:3]], ids=["empty", "training only"])
def test_logs_without_evaluations(tmp_path, log, with_matplotlib):
    text = write(tmp_path, log=log)
    assert "perplexity was not measured" in text and ModelCard.load(tmp_path / "README.md").data.metrics is None
    assert ("words per second" in text) == (tmp_path / "curve.png").exists() == ("curve.png" in text) == bool(log)
