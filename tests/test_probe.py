"""The probe of each layer: its classifier against scipy, its table against the model one sentence at a time."""

import shutil

import h5py
import numpy as np
import pytest
from bilm_models import plain_layers
from endings import conclusion
from errors import refused
from pretraining_worker import arguments_of
from scipy.optimize import minimize
from scipy.special import log_softmax
from task_worker import bilm, read_json, written

from modeling_elmo.run_scripts import probe
from modeling_elmo.run_scripts.probe import most_frequent_tags, probe_layer

SIZES = {"train": 60, "validation": 10, "test": 20}
WORDS = ["Anna", "saw", "the", "old", "harbor", "quickly", "dogs", "sing"]
TAGS = {"Anna": "NOUN", "saw": "VERB", "the": "DET", "old": "ADJ", "harbor": "NOUN", "quickly": "ADV"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return bilm(tmp_path_factory.mktemp("model") / "bilm")


def sentences(number: int, seed: int) -> list[list[tuple[str, str]]]:
    """Random words with tags; those of two words depend on chance."""
    draw = np.random.default_rng(seed)
    return [
        [(word, TAGS.get(word) or draw.choice(["NOUN", "VERB"])) for word in draw.choice(WORDS, draw.integers(2, 7))]
        for _ in range(number)
    ]


@pytest.fixture
def files(tmp_path):
    paths = {}
    for seed, (split, number) in enumerate(SIZES.items()):
        lines = ["".join(f"{word}\t{tag}\n" for word, tag in sentence) for sentence in sentences(number, seed)]
        paths[split] = written(tmp_path / f"my.{split}.tsv", "\n".join(lines))
    return paths


def options(files) -> list[str]:
    return arguments_of({f"{split}_file": path for split, path in files.items()})


def test_the_classifier_minimizes_the_penalized_likelihood():
    """scikit-learn's objective, written down and minimized by scipy; the penalty is on the weights, not on the bias."""
    draw = np.random.default_rng(0)
    vectors = draw.normal(3, 2, size=(90, 4))
    classes = (vectors @ draw.normal(size=(4, 3)) + draw.normal(size=(90, 3))).argmax(1)
    scaled = (vectors - vectors[:60].mean(0)) / vectors[:60].std(0)

    def loss(values):
        weights, bias = values[:12].reshape(4, 3), values[12:]
        log_probs = log_softmax(scaled[:60] @ weights + bias, axis=1)
        return -log_probs[np.arange(60), classes[:60]].sum() + (weights**2).sum() / 2

    best = minimize(loss, np.zeros(15), method="BFGS").x
    expected = (scaled[60:] @ best[:12].reshape(4, 3) + best[12:]).argmax(1)
    tags = {"train": [[str(each)] for each in classes[:60]], "test": [[str(each) for each in classes[60:]]]}
    found = probe_layer({"train": vectors[:60], "test": vectors[60:]}, tags)
    assert found == {"test": [[str(each) for each in expected]]}
    assert 0.5 < (expected == classes[60:]).mean() < 1


def test_most_frequent_tags():
    words = {"train": [["a", "b", "a"], ["a", "b"]], "test": [["b", "new"], ["a"]]}
    tags = {"train": [["X", "Y", "Z"], ["X", "Y"]]}
    assert most_frequent_tags(words, tags) == {"test": [["Y", "X"], ["X"]]}


def test_each_layer_of_a_model(folder, files, tmp_path, capsys):
    """Accuracy by layer equals a classifier's on vectors that the model computes a sentence at a time."""
    output = tmp_path / "results" / "probe.json"
    found = probe.main(["--model", str(folder), *options(files), "--output", str(output)])
    assert read_json(output) == found
    layers, tags = {}, {}
    for seed, (split, number) in enumerate(SIZES.items()):
        rows = sentences(number, seed)
        tags[split] = [[tag for _, tag in row] for row in rows]
        layers[split] = np.concatenate([plain_layers(folder, [word for word, _ in row]) for row in rows], axis=1)
    printed = capsys.readouterr().out
    for number, name in enumerate(["token layer", "biLSTM 1", "biLSTM 2"]):
        predicted = probe_layer({split: each[number] for split, each in layers.items()}, tags)
        for split in ("validation", "test"):
            hits = np.concatenate(predicted[split]) == np.concatenate(tags[split])
            score = found[split]["scores"][name]["accuracy"]
            assert score == pytest.approx(hits.mean(), abs=0.03)  # other sums of float32
            assert f"{100 * score:.1f}" in printed
    assert found["test"]["words"] == sum(map(len, tags["test"])) and found["test"]["file"] == "my.test.tsv"
    tagger = ["elmo", "ner", "--model_name_or_path", str(folder), *options(files), "--output_dir", "tagger"]
    assert sorted(conclusion(printed)[1]) == sorted(tagger)


def test_the_next_command_reads_the_same_data(tmp_path, capsys):
    """Words in the second column, and vectors of no model."""
    lines = ["".join(f"{tag}\t{word}\n" for word, tag in sentence) for sentence in sentences(40, 0)]
    file = written(tmp_path / "tags_first.tsv", "\n".join(lines))
    vectors = written(tmp_path / "vectors.txt", "\n".join(f"{word} {len(word)} 1" for word in WORDS))
    columns = {"train_file": file, "test_file": file, "tags_column": 1, "word_column": 2}
    probe.main(["--word_vectors", str(vectors), *arguments_of(columns)])
    following = conclusion(capsys.readouterr().out)[1]
    tagger = ["elmo", "ner", "--model_name_or_path", "MODEL", *arguments_of(columns), "--output_dir", "tagger"]
    assert sorted(following) == sorted(tagger)


def test_vectors_from_elsewhere(files, tmp_path):
    """A layer that holds the tags is perfect, and one of noise is not; `X` keeps the dots of a file's name."""
    found = probe.main(["--write_sentences", str(tmp_path), *options(files)])
    assert found == {split: str(tmp_path / f"my.{split}.txt") for split in files}
    draw, names = np.random.default_rng(0), ["ADJ", "ADV", "DET", "NOUN", "VERB"]
    for split, path in files.items():
        blocks = path.read_text("utf-8").split("\n\n")
        with h5py.File(tmp_path / f"my.{split}.hdf5", "w") as arrays:
            for number, block in enumerate(blocks):
                tags = [line.split("\t")[1] for line in block.split("\n") if line]
                known = np.eye(len(names))[[names.index(tag) for tag in tags]]
                arrays[str(number)] = np.stack([known, draw.normal(size=known.shape)])
    vectors = ["--vectors", str(tmp_path)]
    scores = probe.main([*vectors, *options(files)])["test"]["scores"]
    assert list(scores) == ["most frequent tag", "layer 0", "layer 1"]
    assert scores["layer 0"]["accuracy"] == 1 and scores["layer 1"]["accuracy"] < 0.6
    with refused(r"my\.train\.hdf5 has .* arrays for .* sentences, so they may belong to others"):
        probe.main([*vectors, *options(files), "--max_train_samples", "5"])
    (tmp_path / "other").mkdir()
    again = options(files | {"test": shutil.copy(files["train"], tmp_path / "other")})
    for given in (vectors, ["--write_sentences", str(tmp_path / "new")]):
        with refused(r"my\.train\.tsv and .* are both called 'my\.train' here; rename one"):
            probe.main([*given, *again])
    assert not (tmp_path / "new").exists()


def test_entities_are_scored_by_f1(folder, tmp_path):
    text = "".join(f"{word}\t{'B-PER' if word == 'Anna' else 'O'}\n" for word in WORDS)
    file = written(tmp_path / "a.tsv", f"{text}\n{text}")
    found = probe.main(["--model", str(folder), *options({"train": file, "test": file})])
    assert found["metric"] == "f1" and found["test"]["scores"]["most frequent tag"]["f1"] == 1


def test_mistakes(folder, files, tmp_path):
    one = written(tmp_path / "one.tsv", "a\tX\n\nb\tY\n")
    (tmp_path / "my.test.txt").touch()
    for message, arguments in (
        (
            r"one\.tsv has only the tag 'X'",
            ["--model", str(folder), *options({"train": one, "test": one}), "--max_train_samples", "1"],
        ),
        ("There is no data to evaluate on", ["--model", str(folder), "--train_file", str(one)]),
        (
            r"--write_sentences would replace .*my\.test\.txt; pass a new folder",
            ["--write_sentences", str(tmp_path), *options(files)],
        ),
    ):
        with refused(message, (ValueError, FileExistsError)):
            probe.main(arguments)


def test_words_without_a_tag_are_left_out(files, tmp_path, caplog):
    """The classifier sees the vectors of the other words, which stand in their sentences."""
    draw, names = np.random.default_rng(0), ["ADJ", "ADV", "DET", "NOUN", "VERB"]
    for path in files.values():
        lines = path.read_text("utf-8").replace("the\tDET", "the\t_")
        written(path, lines)
        with h5py.File(path.with_suffix(".hdf5"), "w") as arrays:
            for number, block in enumerate(lines.split("\n\n")):
                tags = [line.split("\t")[1] for line in block.split("\n") if line]
                known = np.array([np.eye(5)[names.index(tag)] if tag != "_" else draw.normal(size=5) for tag in tags])
                arrays[str(number)] = known[None]
    found = probe.main(["--vectors", str(tmp_path), *options(files)])
    tagged = [line for line in files["test"].read_text("utf-8").splitlines() if line and not line.endswith("_")]
    assert found["test"]["words"] == len(tagged)
    scores = found["test"]["scores"]["vectors"]
    assert scores["accuracy"] == 1 and "_" not in scores["per_type"] and "DET" not in scores["per_type"]
    assert "words have the tag _, which means no tag" in caplog.text


def test_a_probe_that_does_not_converge_is_told(monkeypatch, caplog, recwarn):
    monkeypatch.setattr(probe, "MAX_ITERATIONS", 2)
    vectors = np.random.default_rng(0).normal(size=(50, 9))
    probe_layer({"train": vectors}, {"train": [[str(number % 3)] for number in range(50)]}, "biLSTM 2")
    assert "The probe of biLSTM 2 was stopped after 2 iterations, before it had converged." in caplog.text
    assert not recwarn.list
