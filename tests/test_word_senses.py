"""The figures of word senses, compared with plain loops, and the reading of annotated text."""

import gzip
import random
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from bilm_models import pair_in, plain_layers
from endings import conclusion
from errors import refused
from places import FIXTURES
from pretraining_worker import arguments_of
from task_worker import bilm, read_json, written

from modeling_elmo.run_scripts import embed
from modeling_elmo.run_scripts.vectors import senses as sense_module
from modeling_elmo.run_scripts.vectors.embedding import embed_sentences
from modeling_elmo.run_scripts.vectors.layer_sources import static_layers
from modeling_elmo.run_scripts.vectors.senses import SenseInstance, read_annotated, read_inventory
from modeling_elmo.run_scripts.word_senses import main

SEMCOR = FIXTURES / "semcor"
TRAIN, TEST, INVENTORY = SEMCOR / "train.data.xml", SEMCOR / "test.data.xml", SEMCOR / "inventory.tsv"
NAMES = ["token layer", "biLSTM 1"]
ONE = '<sentence><instance id="d0" lemma="play" pos="NOUN">play</instance></sentence>'


def instance(lemma: str, senses: str, sentence: int) -> SenseInstance:
    return SenseInstance((lemma, "NOUN"), frozenset(senses), sentence, 0, 1)


def random_instances(number: int, seed: int) -> list[SenseInstance]:
    draw = random.Random(seed)
    return [
        instance(draw.choice("xyz"), draw.sample("abc", draw.choice([1, 1, 2])), draw.randrange(number // 2))
        for _ in range(number)
    ]


def random_vectors(number: int, seed: int) -> np.ndarray:
    found = np.random.default_rng(seed).normal(size=(number, len(NAMES), 5))
    return (found / np.linalg.norm(found, axis=-1, keepdims=True)).astype(np.float16)


def uses_of_most_frequent(instances: list[SenseInstance], lemma: str) -> int:
    senses = [sense for each in instances if each.lemma[0] == lemma for sense in each.senses]
    return max(map(senses.count, "abc"))


def test_same_sense_equals_plain_loops():
    counted, vectors = random_instances(60, 0), random_vectors(61, 0)
    instances = [*counted, instance("alone", "a", 3)]  # one use, and no second sense: not counted
    found = sense_module.same_sense(instances, vectors, {("x", "NOUN"): ["c", "a", "b"]}, NAMES)
    assert found["instances"] == 60 and found["lemmas"] == 3
    hits, chance = [], []
    for one, a in enumerate(counted):
        others = [two for two, b in enumerate(counted) if b.lemma == a.lemma and b.sentence != a.sentence]
        nearest = max(others, key=lambda two: float(vectors[one, 1].astype(float) @ vectors[two, 1].astype(float)))
        hits.append(bool(a.senses & counted[nearest].senses))
        chance.append(np.mean([bool(a.senses & counted[two].senses) for two in others]))
    assert found["biLSTM 1"] == pytest.approx(np.mean(hits), abs=0.02)  # float16 cannot tell all cosines apart
    assert found["chance"] == pytest.approx(np.mean(chance))
    of_x = sum("c" in each.senses for each in counted if each.lemma[0] == "x")
    most = {lemma: uses_of_most_frequent(counted, lemma) for lemma in "xyz"}
    assert found["first sense"] == pytest.approx((of_x + most["y"] + most["z"]) / 60)
    found = sense_module.same_sense(instances, vectors, {}, NAMES)
    assert found["most frequent sense"] == pytest.approx(sum(most.values()) / 60) and "first sense" not in found


def test_equally_near_uses_count_by_their_share():
    """Uses of one form in the token layer, for example."""
    instances = [instance("x", sense, number) for number, sense in enumerate("aab")]
    same = np.tile(random_vectors(1, 0), (3, 1, 1))
    found = sense_module.same_sense(instances, same, {}, NAMES)
    assert found["token layer"] == found["chance"] == pytest.approx((0.5 + 0.5 + 0) / 3)
    with refused("No lemma of --train_file has two senses in two sentences"):
        sense_module.same_sense([instance("x", "ab", 0)] * 2, same[:2], {}, NAMES)


def test_disambiguation_equals_plain_loops():
    train, test = random_instances(60, 1), [*random_instances(40, 2), instance("new", "ab", 9), instance("no", "a", 9)]
    vectors, looked_at = random_vectors(60, 1), random_vectors(42, 2)
    inventory = {("new", "NOUN"): ["b", "a"], ("x", "NOUN"): ["c"]}
    averages = sense_module.sense_averages(train, vectors)
    found = sense_module.disambiguation(train, test, averages, looked_at, inventory, NAMES)
    assert found["unseen_lemmas"] == 2 / 42
    right = 1  # of `new`, by its first sense
    for a, vector in zip(test[:40], looked_at[:40, 1].astype(float), strict=True):
        scores = {}
        for sense in "abc":
            uses = [number for number, b in enumerate(train) if b.lemma == a.lemma and sense in b.senses]
            if uses:
                mean = vectors[uses, 1].astype(float).mean(0)
                scores[sense] = mean @ vector / np.linalg.norm(mean)
        right += max(scores, key=scores.__getitem__) in a.senses
    assert found["biLSTM 1"] == pytest.approx(right / 42)
    assert found["first sense"] == (1 + sum("c" in each.senses for each in test[:40] if each.lemma[0] == "x")) / 42


def test_equally_near_senses_count_by_their_share():
    """One form in all uses, in the token layer."""
    train = [instance("x", sense, number) for number, sense in enumerate("abcc")]
    same = np.tile(random_vectors(1, 0), (4, 1, 1))
    averages = sense_module.sense_averages(train, same)
    found = sense_module.disambiguation(train, [instance("x", "ab", 9)], averages, same[:1], {}, NAMES)
    assert [found[name] for name in NAMES] == pytest.approx([2 / 3] * len(NAMES))


def test_reading():
    text = read_annotated(TRAIN)
    assert len(text.sentences) == 70
    assert all(word and "_" not in word for words in text.sentences for word in words)
    phrases = [each for each in text.instances if each.end - each.start > 1]
    assert sum("_" in each.lemma[0] for each in phrases) == 27  # and names, whose lemma is `person` or so
    for each in text.instances:
        assert each.end <= len(text.sentences[each.sentence])
        assert any(sense.split("%")[0] == each.lemma[0] for sense in each.senses)  # a key begins with its lemma
    senses = read_inventory(INVENTORY)["make", "VERB"]
    assert senses[0].startswith("make%2:") and len(senses) > 20


def test_the_legend_has_the_most_typical_use_of_each_sense(monkeypatch):
    """In one dimension, the use with the largest coordinate has the largest product with the average."""
    legend = {}
    monkeypatch.setattr(sense_module, "draw_map", lambda points, groups, path: legend.update(groups))
    text = read_annotated(SEMCOR / "play.data.xml")
    sense_module.draw_senses(text, np.arange(len(text.instances))[:, None], "play", Path("play.png"))
    assert len(legend) == sense_module.MAX_COLORED_SENSES
    label = "cut down in a close [play] at third , Tuttle to    (play%1:04:05::, 5 uses)"
    assert legend[label] == [n for n, each in enumerate(text.instances) if "play%1:04:05::" in each.senses]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return bilm(tmp_path_factory.mktemp("model") / "bilm")


def test_from_files_to_a_table_and_a_map(folder, tmp_path, capsys):
    for name in ("train.data.xml", "train.gold.key.txt"):
        with gzip.open(tmp_path / f"{name}.gz", "wb") as file:
            file.write((SEMCOR / name).read_bytes())
    output = tmp_path / "results" / "word_senses.json"
    options = ["--model", str(folder), "--train_file", str(tmp_path / "train.data.xml.gz"), "--test_file", str(TEST)]
    found = main([*options, "--sense_inventory", str(INVENTORY), "--lemma", "make", "--output", str(output)])
    assert read_json(output) == found
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    for name in ("first sense", "token layer", "biLSTM 1", "biLSTM 2", "average"):
        (row,) = [line for line in printed if line.startswith(f"| {name} ")]
        for figure in ("same_sense", "disambiguation"):
            assert 0 < found[figure][name] < 1 and f"{100 * found[figure][name]:.1f}" in row
    scores = found["disambiguation"]
    best = max(("token layer", "biLSTM 1", "biLSTM 2", "average"), key=scores.get)
    told, following = conclusion("\n".join(printed))
    assert told.startswith(
        f"Disambiguation is best with {best}, {100 * scores[best]:.1f} %; without vectors, first sense"
    )
    assert told.endswith(f"most frequent sense has {100 * scores['most frequent sense']:.1f}.")
    assert following == ["elmo", "neighbors", "TEXT", "--word", "make", "--model", str(folder)]


@pytest.mark.parametrize(
    "options, more", [([], ["--test_file", "TEST"]), (["--test_file", str(TEST)], ["--lemma", "LEMMA"])]
)
def test_the_next_command_adds_what_is_missing(folder, options, more, capsys):
    given = ["--model", str(folder), "--train_file", str(TRAIN), *options]
    found = main(given)["same_sense"]
    told, following = conclusion(capsys.readouterr().out)
    if not options:
        assert told.startswith("Same sense is best with ") and f"chance has {100 * found['chance']:.1f}, " in told
    assert {*following} >= {"elmo", "senses", *given, *more}


def test_the_vector_of_a_phrase_is_the_mean_of_its_words(folder):
    text = read_annotated(TRAIN)
    embedded = embed_sentences(text.sentences, *pair_in(folder), layers="all")
    vectors = sense_module.instance_vectors(text, (layers for _, layers in embedded))
    number = next(number for number, each in enumerate(text.instances) if each.end - each.start > 1)
    phrase = text.instances[number]
    top = plain_layers(folder, text.sentences[phrase.sentence])[2, phrase.start : phrase.end].mean(0)
    np.testing.assert_allclose(vectors[number, 2], top / top.norm(), atol=2e-3)


def test_vectors_from_elsewhere_stand_in_the_same_table(folder, tmp_path, capsys):
    """Written sentences, embedded by another program, give the figures of the model."""
    files = arguments_of({"train_file": TRAIN, "test_file": TEST, "sense_inventory": INVENTORY})
    for name, path in main(["--write_sentences", str(tmp_path), *files]).items():
        sentences = [line.split(" ") for line in Path(path).read_text("utf-8").splitlines()]
        assert sentences == read_annotated(SEMCOR / f"{name}.data.xml").sentences
        embed.main(["--model", str(folder), "--input", path, "--output", str(tmp_path / f"{name}.hdf5")])
    expected, found = main(["--model", str(folder), *files]), main(["--vectors", str(tmp_path), *files])
    assert "| layer 2" in capsys.readouterr().out
    both = main(["--model", str(folder), "--vectors", str(tmp_path), *files])
    assert both == {figure: {**expected[figure], **found[figure]} for figure in expected}
    names = {"layer 0": "token layer", "layer 1": "biLSTM 1", "layer 2": "biLSTM 2", "average of layers": "average"}
    for ours, theirs in names.items():
        for figure in ("same_sense", "disambiguation"):
            assert found[figure][ours] == pytest.approx(expected[figure][theirs], abs=1e-3)


def test_sentences_of_one_text(tmp_path):
    assert main(["--write_sentences", str(tmp_path), "--train_file", str(TRAIN)]).keys() == {"train"}
    assert [path.name for path in tmp_path.iterdir()] == ["train.txt"]


def test_one_vector_per_word(tmp_path):
    """A word has the vector of its lower-case form, or none."""
    rows = {"the": np.array([1.0, 0]), "Play": np.array([0, 1.0])}
    layers = list(static_layers(rows, [["The", "Play", "play", "."], []], "a.txt"))
    assert [each.shape for each in layers] == [(1, 4, 2), (1, 0, 2)]
    assert layers[0][0].tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]


def write_arrays(path: Path, arrays: list[np.ndarray]):
    with h5py.File(path, "w") as file:
        for number, array in enumerate(arrays):
            file[str(number)] = array


WORDS = len(read_annotated(TRAIN).sentences[0])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([], "train.hdf5 cannot be read .*'0'"),
        ([np.ones((2, 3))], rf"train.hdf5 .*array 0 is float64 of shape \(1, 2, 3\); .* \(1, {WORDS}, 3\)"),
        ([np.ones((2, WORDS, 0))], r"array 0 is float64 of shape \(2, "),
        ([np.full((WORDS, 3), b"a")], r"array 0 is \|S1"),
        ([np.full((WORDS, 3), np.nan)], "array 0 is float64.* finite"),
        (b"no archive", "train.hdf5 cannot be read"),
        (None, "has no train.hdf5, for .*train.data.xml"),
    ],
)
def test_wrong_vectors_from_elsewhere(tmp_path, array, message):
    if isinstance(array, list):
        write_arrays(tmp_path / "train.hdf5", array)
    elif array:
        (tmp_path / "train.hdf5").write_bytes(array)
    with refused(message, (ValueError, OSError)):
        main(["--vectors", str(tmp_path), "--train_file", str(TRAIN)])


def test_vectors_of_the_test_text_are_like_those_of_the_training_text(tmp_path):
    """Else one layer would be compared with all, or no layer with itself."""
    for name, file, layers in (("train", TRAIN, 2), ("test", TEST, 1)):
        arrays = [np.ones((layers, len(words), 4)) for words in read_annotated(file).sentences]
        write_arrays(tmp_path / f"{name}.hdf5", arrays)
    with refused(r"test\.hdf5 .*array 0 is float64 of shape \(1, .* shape \(2, \d+, 4\)"):
        main(["--vectors", str(tmp_path), "--train_file", str(TRAIN), "--test_file", str(TEST)])


def test_lemmas_that_only_the_test_text_has_are_told(tmp_path, capsys):
    written(tmp_path / "glove.txt", "the 1 0\na 0 1\n")
    files = ["--train_file", str(SEMCOR / "play.data.xml"), "--test_file", str(TEST)]
    main(["--word_vectors", str(tmp_path / "glove.txt"), *files])
    assert "100.0% of the uses in the test text have a lemma that the training text lacks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_file": "nowhere.data.xml"}, "nowhere.data.xml: pass X.data.xml .* with nowhere.gold.key.txt in"),
        ({"train_file": "nowhere.data.xml.gz"}, "nowhere.data.xml.gz: pass .* with nowhere.gold.key.txt.gz in"),
        ({"sense_inventory": str(SEMCOR / "test.gold.key.txt")}, "txt, line 1 is "),
        ({"output": "make.png"}, r"--output make\.png: .* \.json"),
        ({"lemma": "make"}, "--lemma make .* --output"),
        ({"lemma": "unicorn", "output": "x.json"}, r"--lemma unicorn has 0 use\(s\) in --train_file"),
        ({"model": None, "vectors": "b", "write_sentences": "c"}, "--vectors b .* only --write_sentences"),
    ],
)
def test_mistakes(folder, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with refused(message, (ValueError, OSError)):
        main(arguments_of({"model": folder, "train_file": TRAIN, **options}))


def test_broken_annotations(tmp_path):
    text, keys = tmp_path / "a.data.xml", tmp_path / "a.gold.key.txt"
    shutil.copy(TRAIN, text)
    first, *others = (SEMCOR / "train.gold.key.txt").read_text("utf-8").splitlines(keepends=True)
    name = first.split()[0]
    for lines in (others, [f"{name}\n", *others]):
        written(keys, "".join(lines))
        with refused(rf"instance {name} has no sense in a\.gold\.key\.txt"):
            read_annotated(text)
    for content, message in (
        (TRAIN.read_text("utf-8")[:5000], "is not a complete XML file"),
        (f"<corpus>{ONE.replace('lemma', 'x')}</corpus>", "the instance 'play' has no 'lemma'; add it"),
        ("<corpus><sentence><wf>x</wf></sentence></corpus>", "no <instance> in a <sentence>; pass text as of Raganato"),
    ):
        with refused(rf"a\.data\.xml.* {message}"):
            read_annotated(written(text, content))


def test_ids_of_joined_files(tmp_path):
    """What contradicts an earlier line raises an error; what repeats it passes."""
    text, keys = written(tmp_path / "a.data.xml", f"<corpus>{ONE}{ONE}</corpus>"), tmp_path / "a.gold.key.txt"
    for lines, message in (
        ("d0 play%1\nd0 play%2\n", r"a\.gold\.key\.txt, line 2: line 1 gives play%1 to the instance d0; give each"),
        ("d0 play%1\n", r"a\.data\.xml: 2 instances have the id d0; give each its own"),
    ):
        written(keys, lines)
        with refused(message):
            read_annotated(text)
    written(keys, "d0 play%1 play%2\n\nd0 play%2 play%1\n")
    assert [use.senses for use in read_annotated(text).instances] == [{"play%1", "play%2"}] * 2


def test_lemmas_of_joined_files(tmp_path):
    inventory = written(tmp_path / "inventory.tsv", "March\tNOUN\tmarch%1\nrun\tVERB\trun%1\nmarch\tNOUN\tmarch%2\n")
    with refused(r"inventory\.tsv, line 3: line 1 has other senses of march NOUN"):
        read_inventory(inventory)
    written(inventory, "March\tNOUN\tmarch%1\nmarch\tNOUN\tmarch%1\nmarch\tVERB\tmarch%2\n")
    assert read_inventory(inventory) == {("march", "NOUN"): ["march%1"], ("march", "VERB"): ["march%2"]}
