"""Heads that are trained further with new data: what they keep, what they get, and which options are errors."""

import json
import re
from types import SimpleNamespace

import pytest
from datasets import Dataset
from endings import conclusion
from errors import refused
from safetensors.torch import load_file
from task_worker import FIXTURES, arguments_of, bilm, options_of, read_json, train_head
from torch.testing import assert_close

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts import run_task
from modeling_elmo.run_scripts.fine_tuning.continuation import Continuation, ContinuationArguments, with_labels
from modeling_elmo.run_scripts.fine_tuning.saved_head import saved_head
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference import Coreference, CoreferenceArguments
from modeling_elmo.run_scripts.fine_tuning.tasks.tagging import Tagging

NAMES = [("Ada", "B-PER"), ("sees", "O"), ("Rome", "B-LOC")]
SYSTEMS = [("Ada", "B-PER"), ("uses", "O"), ("Linux", "I-SYS"), ("daily", "I-SYS")]
SHORT = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
FROZEN = SHORT | {"learning_rate": 1e-30}  # what it saves is what it began with, but for zeros


def write_tags(path, sentence):
    path.write_text("\n\n".join("\n".join(f"{word}\t{tag}" for word, tag in sentence) for _ in range(9)), "utf-8")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A trained tagger in the folder `tagger`, and files."""
    folder = tmp_path_factory.mktemp("heads")
    bilm(folder / "bilm")
    names = write_tags(folder / "names.conll", NAMES)
    write_tags(folder / "systems.conll", SYSTEMS)
    train_head("ner", folder, train_file=names, validation_file=names, test_file=None, output_dir=folder / "tagger")
    return folder


def go_on(folder, task="ner", model="tagger", file="systems.conll", **options):
    defaults = {"model_name_or_path": folder / model, "continue_head": True, "config_overrides": None}
    given = {"train_file": folder / file, "validation_file": folder / file, "test_file": None, **FROZEN, **options}
    return run_task.main([task, *arguments_of(options_of(folder) | defaults | given)])


def assert_same(found, expected):
    assert_close(found, expected, rtol=0, atol=1e-25)


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def test_labels_and_words_stay_and_come_after(place, tmp_path, warnings_of_transformers):
    record = go_on(place, output_dir=tmp_path, new_labels="add", new_words="add")
    assert "count as errors" not in warnings_of_transformers.text
    assert record["settings"].items() >= {"continue_head": True, "new_labels": "add", "new_words": "add"}.items()
    config = read_json(tmp_path / "config.json")
    assert config["id2label"] == {"0": "O", "1": "B-LOC", "2": "B-PER", "3": "B-SYS", "4": "I-SYS"}
    words = ELMoTokenizer.from_pretrained(tmp_path)
    known = len(ELMoTokenizer.from_pretrained(place / "tagger"))
    assert words.convert_ids_to_tokens(range(known, len(words))) == ["uses", "Linux", "daily"]
    before, after = weights_of(place / "tagger"), weights_of(tmp_path)
    assert before.keys() == after.keys()
    changed = set()
    for name, old in before.items():
        new = after[name]
        assert_same(new[tuple(slice(size) for size in old.shape)], old)
        if new.shape != old.shape:
            changed.add(name)
    assert changed == {
        *("classifier.weight", "classifier.bias", "crf.transitions", "crf.start", "crf.end"),
        "token_features.word_embeddings.weight",
    }
    card = (tmp_path / "README.md").read_text("utf-8")
    assert "It continues the trained head of tagger" in card


def test_a_regression_goes_on(place, tmp_path):
    """It has no labels."""
    rows = [json.dumps({"text": f"text {number}", "label": number / 7}) for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), "utf-8")
    files = {f"{split}_file": tmp_path / "rows.jsonl" for split in ("train", "validation")}
    train_head("classify", place, **files, test_file=None, problem="regression", output_dir=tmp_path / "head", **SHORT)
    go_on(place, "classify", tmp_path / "head", **files, output_dir=tmp_path / "run")
    assert_same(weights_of(tmp_path / "run"), weights_of(tmp_path / "head"))
    (tmp_path / "hidden.jsonl").write_text('{"text": "a", "label": -1}\n{"text": "b", "label": -1}', "utf-8")
    with refused("Split 'test' has the label -1.0 in every row, so its labels seem to be hidden"):
        go_on(place, "classify", tmp_path / "head", **files | {"test_file": tmp_path / "hidden.jsonl"})


def test_genres_and_speakers_are_those_of_the_head(place, tmp_path):
    """The new documents have fewer genres, in another order, and no speakers."""

    def documents(name, genres, **columns):
        rows = []
        for number, genre in enumerate(genres):
            sentences = {"sentences": [["Ada", "sleeps"], ["She", "snores"]], "mentions": [[0, 0, 0, 0], [1, 0, 0, 0]]}
            rows.append(json.dumps({"document": str(number), "genre": genre, **sentences, **columns}))
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(rows), "utf-8")
        return {"train_file": path, "validation_file": path, "test_file": None}

    speakers = {"speakers": [["a", "a"], ["b", "b"]]}
    known = documents("all", ["bc", "nw", "wb"], **speakers)
    train_head("coref", place, **known, output_dir=tmp_path / "head", **SHORT)
    files = documents("few", ["wb", "nw"])
    continuation = Continuation.of(str(tmp_path / "head"), "coref", ContinuationArguments(continue_head=True))
    task = continuation.task(Coreference, CoreferenceArguments(**files))
    batch = task.encode(task.data["train"][:], ELMoTokenizer(), is_training=True)
    assert batch["genre_ids"] == [2, 1] and not any(map(any, batch["speaker_ids"]))
    go_on(place, "coref", tmp_path / "head", **files, output_dir=tmp_path / "run")
    assert_same(weights_of(tmp_path / "run"), weights_of(tmp_path / "head"))
    with refused("train, document 1: `genre` is 'tc'; it must be a genre of .*head: one of bc, nw, wb"):
        go_on(place, "coref", tmp_path / "head", **documents("new", ["bc", "tc"]), output_dir=tmp_path / "new")


def test_words_without_a_tag_are_no_new_label():
    saved = SimpleNamespace(labels=["NOUN", "VERB"])
    train = Dataset.from_dict({"tags": [["NOUN", "_", "ADJ"], ["ADJ"]]})
    assert Tagging.missing_labels(train, saved) == {"ADJ": 2}
    assert Tagging.missing_labels(train, SimpleNamespace(labels=["O", "B-X"])) == {"ADJ": 2, "NOUN": 1, "_": 1}


def test_nothing_new(place, tmp_path):
    go_on(place, output_dir=tmp_path, file="names.conll")
    before, after = weights_of(place / "tagger"), weights_of(tmp_path)
    assert_same(after, before)


def test_it_learns_the_new_label_and_keeps_the_old(place, tmp_path):
    both = tmp_path / "both.conll"
    both.write_text("\n\n".join((place / name).read_text() for name in ("names.conll", "systems.conll")), "utf-8")
    options = {"train_file": both, "validation_file": both, "max_steps": 25, "learning_rate": 0.05}
    record = go_on(place, output_dir=tmp_path / "run", new_labels="add", **options)
    found = record["metrics"]["validation"]["per_type"]
    assert {name: round(scores["f1"], 2) for name, scores in found.items()} == {"LOC": 1, "PER": 1, "SYS": 1}


def test_the_last_lines_have_the_score_before(place, tmp_path, capsys):
    """That of the tagger on other tags, which it knows; one step does not change it."""
    options = FROZEN | {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    file = write_tags(tmp_path / "other.conll", [("Ada", "B-LOC"), ("sees", "O"), ("Rome", "B-LOC")])
    record = go_on(place, file=file, output_dir=tmp_path / "run", **options)
    score = f"{100 * record['metrics']['validation']['f1']:.2f}"
    found, following = conclusion(capsys.readouterr().out)
    assert found.endswith(f" This training took f1 on validation from {score} to {score}.")
    go_on(place, file=file, output_dir=tmp_path / "best", **options | {"max_steps": 40, "learning_rate": 0.05})
    found, _ = conclusion(capsys.readouterr().out)
    before, after = re.search(r"from (\S+) to (\S+)\.$", found).groups()
    assert before == score and float(after) > float(score)


def test_vectors_for_new_words(place, tmp_path):
    (tmp_path / "vectors.txt").write_text("".join(f"{word} {' '.join(['0.25'] * 50)}\n" for word in ("uses", "Ada")))
    options = {"new_labels": "add", "new_words": "add", "word_vectors": tmp_path / "vectors.txt"}
    go_on(place, output_dir=tmp_path / "run", **options)
    old, new = (
        weights_of(path)["token_features.word_embeddings.weight"] for path in (place / "tagger", tmp_path / "run")
    )
    assert_same(new[: len(old)], old)
    assert new[len(old)].eq(0.25).all() and not new[len(old) + 1].eq(0.25).any()
    (tmp_path / "narrow.txt").write_text("uses 1 2 3\n")
    with refused("--word_vectors has vectors of 3 numbers, and the head's have 50"):
        go_on(place, output_dir=tmp_path / "narrow", **{**options, "word_vectors": tmp_path / "narrow.txt"})


def test_files_are_read_as_in_the_first_training(place, tmp_path):
    """IOB1 tags look like BIO tags."""
    iob1 = write_tags(tmp_path / "iob1.conll", [("Ada", "I-PER"), ("sees", "O"), ("Rome", "I-LOC")])
    files = {"train_file": iob1, "validation_file": iob1, "test_file": None}
    train_head("ner", place, **files, tag_scheme="iob1", output_dir=tmp_path / "tagger", **SHORT)
    record = go_on(place, model=tmp_path / "tagger", **files, output_dir=tmp_path / "run")
    assert record["settings"]["tag_scheme"] == "iob1" and record["metrics"]["validation"]["per_type"].keys() == {
        "LOC",
        "PER",
    }


TASKS_TO_CONTINUE = {
    "classify": {},
    "srl": {"per_device_train_batch_size": 10},
    "qa": {"max_seq_length": 40, "doc_stride": 12, "max_train_samples": 6, "max_eval_samples": 4},
    "coref": {"max_train_samples": 1, "max_eval_samples": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS_TO_CONTINUE)
def test_every_task_goes_on(task, place, tmp_path):
    """With nothing new and a learning rate of 0, all weights stay."""
    options = TASKS_TO_CONTINUE[task]
    first = train_head(task, place, output_dir=tmp_path / "head", **SHORT, **options)
    files = {name: value for name, value in options_of(place, FIXTURES[task]).items() if name.endswith("_file")}
    given = {
        "model_name_or_path": tmp_path / "head",
        "continue_head": True,
        "config_overrides": None,
        **FROZEN,
        **options,
    }
    again = run_task.main([task, *arguments_of(options_of(place) | files | given | {"output_dir": tmp_path / "run"})])
    before, after = weights_of(tmp_path / "head"), weights_of(tmp_path / "run")
    assert_same(after, before)
    assert again["metrics"] == first["metrics"]


def test_a_class_is_added(place, tmp_path):
    rows = [json.dumps({"text": f"text {number}", "label": "ab"[number % 2]}) for number in range(8)]
    (tmp_path / "two.jsonl").write_text("\n".join(rows), "utf-8")
    (tmp_path / "three.jsonl").write_text("\n".join([*rows, '{"text": "more", "label": "aa"}']), "utf-8")
    two, three = (
        {f"{split}_file": tmp_path / f"{name}.jsonl" for split in ("train", "validation")} for name in ("two", "three")
    )
    train_head(
        "classify",
        place,
        "snli",
        **two,
        test_file=None,
        output_dir=tmp_path / "head",
        **SHORT,
    )
    options = {**three, "output_dir": tmp_path / "run"}
    with refused("labels that .*head lacks: aa \\(1\\). Correct them, or pass --new_labels add"):
        go_on(place, "classify", tmp_path / "head", **options)
    with refused("--classifier linear: .*head was trained with bcn; leave the option out"):
        go_on(place, "classify", tmp_path / "head", classifier="linear", new_labels="add", **options)
    go_on(place, "classify", tmp_path / "head", new_labels="add", **options)
    assert read_json(tmp_path / "run" / "config.json")["id2label"] == {"0": "a", "1": "b", "2": "aa"}
    before, after = weights_of(tmp_path / "head"), weights_of(tmp_path / "run")
    assert_same(after["classifier.output.weight"][:2], before["classifier.output.weight"])


def test_pairs_of_tags_stay_together(place):
    saved = saved_head(str(place / "tagger"))
    missing = {"I-SYS": 2, "B-ORG": 1, "I-LOC": 1}
    labels = with_labels(saved, missing, "add").labels
    assert labels == ["O", "B-LOC", "B-PER", "I-LOC", "B-ORG", "I-ORG", "B-SYS", "I-SYS"]
    assert with_labels(saved, {"NOUN": 3, "X": 1}, "add").labels == ["O", "B-LOC", "B-PER", "NOUN", "X"]
    assert with_labels(saved, {}, "refuse") is saved


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "labels that .*tagger lacks: I-SYS \\(18\\). Correct them, or pass --new_labels add"),
        ({"continue_head": False, "new_labels": "add"}, "--new_labels add has no effect without --continue_head"),
        ({"head": "linear"}, "--head linear has no effect with --continue_head, which keeps the network"),
        ({"config_overrides": '{"task_hidden_size": 3}'}, "--config_overrides .* has no effect with --continue_head"),
        ({"word_vectors": "vectors.txt"}, "--word_vectors vectors.txt has no effect .* Pass --new_words add too"),
        ({"task": "srl"}, "--continue_head: .*tagger is a head of `elmo ner`, not of `elmo srl`"),
        ({"head_folder": "bilm"}, "bilm is ELMoForPreTraining, which has no labels; pass a model of elmo ner"),
    ],
)
def test_what_is_refused(options, message, place, tmp_path):
    options = dict(options)
    folder = options.pop("head_folder", "tagger")
    task = options.pop("task", "ner")
    with refused(message):
        go_on(place, task, output_dir=tmp_path / "run", model_name_or_path=place / folder, **options)
    assert not (tmp_path / "run" / "config.json").exists()


def test_new_words_need_word_vectors(place, tmp_path):
    options = {"train_file": place / "names.conll", "validation_file": place / "names.conll", "test_file": None}
    train_head("ner", place, **options, head="linear", output_dir=tmp_path / "linear", **SHORT)
    with refused("--new_words add: .*linear learns no new words, because it has no word vectors"):
        go_on(place, model=tmp_path / "linear", new_labels="add", new_words="add", output_dir=tmp_path / "run")
    go_on(place, model=tmp_path / "linear", new_labels="add", output_dir=tmp_path / "run")
    assert read_json(tmp_path / "run" / "record.json")["settings"]["head"] == "linear"
