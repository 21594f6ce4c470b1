"""Cards of biLMs; test_run_pretraining.py reads the cards of real runs."""

import math
import re
import sys

import pytest
from huggingface_hub import ModelCard

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
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


def evaluation(step: int, perplexity: float, **changes) -> dict:
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


def training(step: int, loss: float, name: str = "loss", words_per_second: float = 1000.0) -> dict:
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


def write(folder, log=LOG, config=None, name="elmo-xy", **changes) -> str:
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
    path = write_bilm_card(folder, name)
    assert path == folder / "README.md"
    return path.read_text(encoding="utf-8")


def tables(card: str) -> list[list[list[str]]]:
    """The cells of each table as GitHub reads them, the header first; all rows are as wide as the header."""
    found = []
    for lines in re.findall(r"(?:^\|.*\n)+", card, re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines.splitlines()]
        assert all(len(row) == len(rows[0]) for row in rows)
        assert all(re.fullmatch("-+:?", cell) for cell in rows[1])
        found.append([rows[0], *rows[2:]])
    return found


def evaluations_in(card: str) -> list[list[str]]:
    (table,) = (table for table in tables(card) if table[0][0] == "step")
    assert table[0] == ["step", "epoch", "perplexity", "forward", "backward"]
    return table[1:]


def rendered(cell: str) -> str:
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell)


def test_table_holds_the_figures_of_the_log(tmp_path):
    rows = evaluations_in(write(tmp_path))
    expected = [entry for entry in LOG if "perplexity" in entry]
    assert len(rows) == len(expected) == 3
    for row, entry in zip(rows, expected, strict=True):
        found = [float(cell.replace(" (published)", "").replace(",", "")) for cell in row]
        names = ("step", "epoch", "perplexity", "forward", "backward")
        assert found == pytest.approx([entry[name] for name in names], abs=0.005001)
    assert [row[0] for row in rows] == ["0", "100 (published)", "150"]


def test_perplexity_comes_with_its_conditions(tmp_path):
    text = write(tmp_path).split("## Perplexity")[1]
    assert "at step 100: **250.38** (forward 312.97, backward 200.30)" in text
    for part in ("`exp((L_f + L_b) / 2)`", "7,654 words", "full softmax", "54,321 predictions", "4.56%", PROTOCOL):
        assert part in text
    assert "lowest of 2 evaluations, chosen on this same text" in text
    assert "lowest" not in write(tmp_path, published_step=150)
    assert "lowest" not in write(tmp_path, log=LOG[:4])
    assert "adaptive softmax" in write(tmp_path, config=ELMoConfig.from_preset("tiny", softmax_type="adaptive"))


def test_before_and_after_for_a_model_that_was_trained_further(tmp_path):
    after = "7,000.13 before the training -> **250.38**"
    assert after in write(tmp_path, base_model="someone/elmo")
    assert "It was trained further from someone/elmo." in write(tmp_path, base_model="someone/elmo")
    assert "before the training" not in write(tmp_path)
    assert "before the training" not in write(tmp_path, log=LOG[1:], base_model="someone/elmo")
    other_text = [evaluation(0, 7000.126, predictions=5), *LOG[1:]]
    assert "before the training" not in write(tmp_path, log=other_text, base_model="someone/elmo")


@pytest.mark.parametrize("count", [12, 13, 100])
@pytest.mark.parametrize("published", [1, 7, 11])
def test_long_logs_are_thinned(tmp_path, count, published):
    log = [evaluation(step, 100.0 + step) for step in range(count)]
    steps = [row[0] for row in evaluations_in(write(tmp_path, log=log, published_step=published))]
    assert 11 <= len(steps) <= 12
    assert steps[0] == "0" and steps[-1].split()[0] == str(count - 1)
    assert [step for step in steps if "published" in step] in ([f"{published} (published)"],)
    numbers = [int(step.split()[0]) for step in steps]
    assert numbers == sorted(set(numbers))
    if count == 12:
        assert numbers == list(range(12))
    elif count == 100:
        others = [number for number in numbers if number != published]
        assert max(b - a for a, b in zip(others, others[1:], strict=False)) <= 11


def test_front_matter(tmp_path, monkeypatch):
    write(tmp_path, base_model="someone/elmo")
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.library_name == "transformers" and data.base_model == "someone/elmo"
    assert {"elmo", "language-model"} <= set(data.tags)
    assert data.license is None and data.metrics == ["perplexity"]
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value) == ("perplexity", 250.38)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for local in ("folder", str(tmp_path / "gone")):
        text = write(tmp_path, base_model=local)
        assert ModelCard.load(tmp_path / "README.md").data.base_model is None
        assert f"trained further from {local.split('/')[-1]}." in text
    assert str(tmp_path) not in text


def test_model_data_and_speed(tmp_path):
    text = write(tmp_path, config=ELMoConfig.from_preset("small", vocab_size=7654))
    assert "It has 2 layers of 1,024 LSTM cells in each direction, projected to 128.\n" in text
    assert "1,234,567 parameters with the softmax, and a vocabulary of 7,654 words, including special words.\n" in text
    assert "It reads a word as its characters.\n" in text
    assert "Training text: train.txt; 4,321 sentences, 87,654 words.\n- Held-out text: dev.txt." in text
    assert "12,345 words/s (median" in text
    assert "at step 150: 5.125 nats per prediction (forward 5.375, backward 4.875; full softmax loss)" in text
    assert "The weights are those of step 100." in text

    sizes = {"projection_size": 64, "num_hidden_layers": 1, "char_vocab_size": 0, "word_embedding_size": 8}
    data = {"train": ["someone/text"], "validation": [None], "sentences": None, "words": None}
    text = write(tmp_path, config=ELMoConfig.from_preset("tiny", **sizes), data=data)
    assert "1 layer of 64 LSTM cells in each direction, without a projection.\n" in text
    assert "It reads a word as a vector of its own." in text
    both = ELMoConfig.from_preset("tiny", word_embedding_size=8)
    assert "It reads a word as its characters and a vector of its own." in write(tmp_path, config=both)
    assert "Training text: someone/text; sentences not counted, words not counted.\n- Held-out text: none." in text


def test_sampled_loss_is_labelled(tmp_path):
    config = ELMoConfig.from_preset("tiny", softmax_type="sampled", num_sampled=3000)
    text = write(tmp_path, log=[training(50, 3.5, "sampled_loss")], config=config)
    (line,) = (line for line in text.splitlines() if "3.500" in line)
    assert "sampled softmax loss, 3,000 candidates" in line
    assert "perplexity" not in line and "full softmax" not in line
    assert "It covers only the sampled candidates: do not compare it" in text
    assert "sampled" not in write(tmp_path)


def test_settings_that_a_resumed_run_changed(tmp_path):
    earlier = [{"until_step": 1050, "settings": {"learning_rate": 0.1, "train_file": ["a", "b"], "fp16": True}}]
    text = write(tmp_path, earlier_settings=earlier, settings={"fp16": True, "learning_rate": 0.2, "max_steps": 5})
    changes = "learning_rate 0.1; max_steps (default); train_file a, b."
    assert f"\n\nUp to step 1,050 these were different: {changes}\n" in text


@pytest.mark.parametrize("log", [[], LOG[1:3]], ids=["empty", "training only"])
def test_logs_without_evaluations(tmp_path, log, with_matplotlib):
    text = write(tmp_path, log=log)
    assert "It was not measured" in text
    assert [table[0] for table in tables(text)] == [["setting", "value"]]
    assert ModelCard.load(tmp_path / "README.md").data.metrics is None
    assert ("words/s" in text) == bool(log)
    assert (tmp_path / "curve.png").exists() == ("curve.png" in text) == bool(log)


def test_the_card_does_not_need_matplotlib(tmp_path):
    assert "curve.png" not in write(tmp_path) and not (tmp_path / "curve.png").exists()


def test_evaluations_without_training_and_of_another_step(tmp_path):
    text = write(tmp_path, log=[LOG[0], LOG[3]], published_step=120)
    assert "Held-out perplexity at step 100: **250.38**" in text and "(published)" not in text


@pytest.mark.parametrize("large", [math.inf, math.nan, 1e300])
def test_diverged_perplexities(tmp_path, large):
    log = [evaluation(0, large), training(50, 6.5), evaluation(100, large)]
    for row in evaluations_in(write(tmp_path, log=log, base_model="someone/elmo")):
        assert float(row[2]) == pytest.approx(large, nan_ok=True) and len(row[2]) < 8


def test_values_of_the_record_are_plain_text(tmp_path):
    """test_card.py shows this for every value that a template prints."""
    files = [str(tmp_path / f"*part*_{number}.txt") for number in range(99)]
    data = {"train": files, "validation": ["R&D_*.txt"], "sentences": 1, "words": 1}
    settings = {"set|_a": "__init__.py\n| x", "lr": 1e-05, "output_dir": str(tmp_path), "train_file": files}
    text = write(tmp_path, settings=settings, data=data, name="elmo *xy*")
    assert tables(text)[0][1:3] == [[r"set\|\_a", r"\_\_init\_\_.py \| x"], ["lr", "1e-05"]]
    assert text.count(r"\*part\*\_8.txt, \*part\*\_9.txt, and 89 more") == 2
    assert str(tmp_path.parent) not in text and "\n# elmo \\*xy\\*\n" in text
    (result,) = ModelCard.load(tmp_path / "README.md").data.eval_results
    assert result.dataset_name == "R&D_*.txt"


def test_code_of_the_card_runs(tmp_path, monkeypatch, capsys):
    words = tmp_path / "vocab.txt"
    words.write_text("\n".join(["<S>", "</S>", "<UNK>", "A", "sentence", "in", "words"]), encoding="utf-8")
    tokenizer = ELMoTokenizer(words)
    model = ELMoForPreTraining(ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer)))
    folder = tmp_path / "elmo'xy"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = write(folder, config=model.config, name=folder.name)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall("```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(code, names)
    assert [tuple(layer.shape) for layer in names["layers"]] == [(1, 6, 32)] * 3
    assert "(batch, tokens, 32)" in code
    for found in eval(capsys.readouterr().out.strip().splitlines()[-1]):
        assert len(found) == 5 and set(found) <= set(tokenizer.get_vocab())


@pytest.mark.parametrize(("languages", "words"), [(["ko", "en"], '"배가", "바다를"'), (["is"], '"A", "sentence"')])
def test_the_example_is_in_the_language_of_the_model(tmp_path, languages, words):
    write_result(tmp_path, "card", {"language": languages})
    assert f"tokenizer([[{words}" in write(tmp_path)


NEIGHBORS = {
    "word": "play",
    "layer": "top",
    "text": ["a.txt"],
    "uses": 1234,
    "seed": 7,
    "queries": [{"use": "We [play] |", "neighbors": [[0.875, "They [play] *"]]}],
}
SENSES = {
    "train": {"file": "a.data.xml", "instances": 9},
    "same_sense": {"lemmas": 3, "instances": 8, "chance": 0.25, "first sense": 0.5, "token layer": 0.375},
    "test": {"file": "b.data.xml", "instances": 7},
    "disambiguation": {"instances": 7, "unseen_lemmas": 0.125, "first sense": 0.75, "token layer": 0.625},
}


def record(arm: str, seed: int, f1: float) -> dict:
    return {"task": "ner", "arm": arm, "seed": seed, "metric": "f1", "metrics": {"test": {"f1": f1}}}


def test_results_of_other_scripts_are_in_the_card(tmp_path):
    write_result(tmp_path, "nearest_neighbors_play", NEIGHBORS)
    write_result(tmp_path, "word_senses", SENSES)
    records = [record("baseline", 1, 0.5), record("baseline", 2, 0.7), record("elmo", 1, 0.8), record("elmo", 2, 0.8)]
    write_result(tmp_path, "wnut17_entities", {"records": records})
    for number, other in enumerate(({"records": [1, 2]}, {"records": 3}, [4], {"records": [{"arm": "a"}]})):
        write_result(tmp_path, f"of_another_tool_{number}", other)
    (tmp_path / "results" / "word_senses.png").write_bytes(b"")
    text = write(tmp_path)
    tasks, vectors = text.split("## As features of tasks")[1].split("## What its vectors know")
    assert "### wnut17 entities" in tasks
    rows = {row[0]: row for row in tables(tasks)[0][1:]}
    assert rows["baseline"][2] == "60.00 ± 14.14" and rows["elmo"][2:] == ["80.00 ± 0.00", "+20.00 / 50.0%"]
    cells = [[rendered(cell) for cell in row] for row in tables(vectors)[0][1:]]
    assert cells == [["**We [play] |**", ""], ["They [play] *", "0.88"]]
    assert "Uses of `play` in a.txt with their nearest neighbours" in vectors
    assert "in bold, were drawn with seed 7 from 1,234 uses.\n" in vectors
    assert ["token layer", "37.5", "62.5"] in tables(vectors)[1] and ["chance", "25.0", ""] in tables(vectors)[1]
    assert "(3 lemmas with at least two senses, 8 uses)" in vectors
    assert "on b.data.xml (7 uses; 12% have a lemma that is not in the training text and get the first" in vectors
    conditions = "F1 of a network of the paper on the frozen biLM, {}: mean ± sample standard deviation over seeds, in "
    assert f"{conditions.format('without pretrained word vectors')}percent." in tasks
    assert "also selected the epoch" not in text
    settings = {"load_best_model_at_end": True, "word_vectors": "glove_100d.txt"}
    records = [{**each, "settings": settings, "metrics": {"validation": each["metrics"]["test"]}} for each in records]
    write_result(tmp_path, "wnut17_entities", {"records": records})
    text = rendered(write(tmp_path))
    assert f"{conditions.format('beside the word vectors of glove_100d.txt')}percent.\nThe same data also sel" in text
    assert "](results/word_senses.png)" in vectors and "](results/nearest" not in vectors
    assert "As features" not in write(tmp_path / "other") and "vectors know" not in write(tmp_path / "other")


def test_conditions_of_other_results(tmp_path):
    settings = {"head": "linear", "freeze_bilm": False}
    records = [record(arm, 1, 0.5) | {"settings": settings} for arm in ("elmo@0.1", "baseline@0.1")]
    write_result(tmp_path, "data", {"records": records})
    errors = record("elmo", 1, 0) | {"metric": "mse", "metrics": {"dev": {"mse": 0.5}}}
    write_result(tmp_path, "losses", {"records": [errors]})
    write_result(tmp_path, "foreign", {"queries": 3})
    drawn = NEIGHBORS | {"uses": 2000, "uses_in_text": 54321, "queries": [{"use": "/ [play] /", "neighbors": []}]}
    write_result(tmp_path, "play", drawn)
    wrong = {name: value for name, value in SENSES["disambiguation"].items() if name != "first sense"}
    write_result(tmp_path, "senses", SENSES | {"disambiguation": wrong})
    scores = {"most frequent tag": {"accuracy": 0.5}, "biLSTM 1": {"accuracy": 0.925}}
    probe = {"metric": "accuracy", "train": {"file": "ud.conllu", "words": 12345}, "test": {"scores": scores}}
    write_result(tmp_path, "probe", probe)
    text = write(tmp_path)
    assert "F1 of one linear layer on the fine-tuned biLM: mean" in text and "gain on test" in text
    assert "Mse of a network of the paper on the frozen biLM, without pretrained word vectors: mean ± sample" in text
    assert "standard deviation over seeds.\n" in text
    assert "seed 7 from 2,000 of the 54,321 uses." in text and "**/ \\[play\\] /**" in text
    assert "12% have a lemma that is not in the training text and count as wrong)" in text
    assert "Accuracy of one linear layer that reads the tag of a word from its vector, in percent; it learned" in text
    assert "from ud.conllu (12,345 words)" in text and ["biLSTM 1", "92.5"] in sum(tables(text), [])
    (tmp_path / "results" / "play.json").write_text('{"word": ', encoding="utf-8")
    with pytest.raises(ValueError, match=r"play\.json is not JSON in UTF-8: .*Write it again"):
        write(tmp_path)


def test_origin_of_a_converted_model(tmp_path):
    ELMoConfig.from_preset("tiny", has_softmax=False).save_pretrained(tmp_path)
    files = [{"name": "w_.hdf5", "bytes": 1234, "sha256": "ab" * 32}]
    found = {"origin": "someone's *ELMo*", "files": files, "arrays": 33, "equal_arrays": 32}
    write_result(tmp_path, "conversion", found)
    (tmp_path / "statement.md").write_text("From speeches.", encoding="utf-8")
    write_card_facts(tmp_path, CardArguments(data_statement=str(tmp_path / "statement.md")))
    text = write_bilm_card(tmp_path, "someone/elmo").read_text(encoding="utf-8")
    assert "\n# elmo\n" in text and "\nname = 'someone/elmo'  # path" in text
    assert "```\n\n## Data\n\nFrom speeches.\n\n## Origin\n\nConverted from someone's \\*ELMo\\*; not trained" in text
    assert tables(text)[0][1:] == [[r"w\_.hdf5", "1,234", f"`{'ab' * 32}`"]]
    assert "32 of 33 arrays equal the original arrays bit for bit" in text
    assert "## Training" not in text and "## Perplexity" not in text


def test_limits(tmp_path):
    data = {"train": ["a.txt"], "validation": [], "sentences": 9, "words": 98765, "longest_sentence": 1234}
    text = write(tmp_path, data=data | {"cut_words": 56})
    assert "first 48 bytes (UTF-8) of a word; longer words are cut (56 of the 98,765 words of the training" in text
    assert "the longest training sentence had 1,234." in text
    assert "predicts only words of its vocabulary, or `<UNK>`" in text
    assert "Before you compare texts, subtract the mean and the first principal directions" in text
    assert "longer words are cut.\n" in write(tmp_path, data=data)
    word_level = {"char_vocab_size": 0, "word_embedding_size": 8, "has_softmax": False}
    text = write(tmp_path, config=ELMoConfig.from_preset("tiny", **word_level), data=data)
    assert "bytes (UTF-8)" not in text and "It reads all words outside its vocabulary as `<UNK>`." in text
    assert "predicts no words: its softmax is missing" in text
    lexicon = ELMoConfig.from_preset("tiny", char_vocab_size=18, max_word_length=12)
    assert "first 10 characters of a word; longer" in write(tmp_path, config=lexicon, data=data)
