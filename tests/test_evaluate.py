"""`elmo evaluate`: the scores that the training printed and those of other libraries, its files, labels and errors."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import harmonic_mean

import numpy as np
import pytest
import seqeval.metrics
import sklearn.metrics
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from endings import conclusion
from errors import refused
from task_worker import (
    LEARNING,
    TASKS,
    WINDOWS,
    bilm,
    capitals,
    predictions_of,
    questions_of,
    read_json,
    sentences_of,
    train_head,
    write_questions,
    written,
)

from modeling_elmo import ELMoForTokenClassification
from modeling_elmo.run_scripts import evaluate
from modeling_elmo.run_scripts.fine_tuning import saved_head

TEXTS = [" ".join(words) for words, _ in sentences_of(TASKS / "wnut17_train.conll")][:60]
SETS = [["a"], ["b", "c"], ["a", "c"], []]
NUMBERS = [0.5, 1.5, 4]
FEW_STEPS = {"num_train_epochs": 2, "learning_rate": 0.05}


def rows_of(path: Path, rows: list[dict]) -> Path:
    return written(path, "".join(json.dumps(row) + "\n" for row in rows))


def word_shapes(folder: Path) -> dict[str, Path]:
    """Files with tags that mark no entities; signs have none."""
    files = {}
    for split, name in (("train", "train"), ("validation", "dev"), ("test", "test")):
        lines = []
        for words, _ in sentences_of(TASKS / f"wnut17_{name}.conll"):
            tags = [("UPPER" if word[0].isupper() else "lower") if word[0].isalpha() else "_" for word in words]
            lines += [f"{word}\t{tag}" for word, tag in zip(words, tags, strict=True)] + [""]
        files[f"{split}_file"] = written(folder / f"shapes_{name}.conll", "\n".join(lines) + "\n")
    return files


def labeled_texts(folder: Path, labels: list) -> dict[str, Path]:
    """Files with texts, whose number of words chooses their label."""
    rows = [{"text": text, "label": labels[len(text.split()) % len(labels)]} for text in TEXTS]
    return {
        f"{split}_file": rows_of(folder / f"{split}_{len(labels)}.jsonl", rows[first::3])
        for first, split in enumerate(("train", "validation", "test"))
    }


def some_questions(folder: Path) -> dict[str, Path]:
    """Questions, of which each third has no answer, as in SQuAD 2.0."""
    files = {}
    for split, name in (("train", "train"), ("validation", "dev"), ("test", "test")):
        questions = questions_of(name)
        for question in questions[::3]:
            question["answers"] = []
        files[f"{split}_file"] = write_questions(folder / f"questions_{name}.jsonl", questions)
    return files


# Options of a short training of each kind of task, and its files if they are not the fixtures.
KINDS = {
    "entities": ("ner", capitals, {"num_train_epochs": 3, "per_device_train_batch_size": 6, "learning_rate": 0.05}),
    "tags": ("ner", word_shapes, FEW_STEPS),
    "labels": ("classify", None, FEW_STEPS),
    "pairs": ("classify", "snli", {**FEW_STEPS, "classifier": "esim"}),
    "sets of labels": ("classify", lambda folder: labeled_texts(folder, SETS), FEW_STEPS),
    "numbers": ("classify", lambda folder: labeled_texts(folder, NUMBERS), {**FEW_STEPS, "problem": "regression"}),
    "answers": ("qa", None, {**WINDOWS, **LEARNING, "num_train_epochs": 2, "per_device_train_batch_size": 10}),
    "some answers": (
        "qa",
        some_questions,
        {**WINDOWS, **LEARNING, "num_train_epochs": 2, "null_score_diff_threshold": 1.5, "max_answer_length": 5},
    ),
    "roles": ("srl", None, {**LEARNING, "num_train_epochs": 3, "per_device_train_batch_size": 10}),
    "mentions": ("coref", None, {"num_train_epochs": 5, "learning_rate": 0.005, "train_singletons": True}),
    "clusters": ("coref", None, {"num_train_epochs": 5, "learning_rate": 0.005}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function of a kind: the folder of a trained head, and its files by split."""
    folders: dict[str, tuple[Path, dict[str, Path]]] = {}

    def head_of(kind: str) -> tuple[Path, dict[str, Path]]:
        if kind not in folders:
            task, source, options = KINDS[kind]
            folder = tmp_path_factory.mktemp(kind.replace(" ", "_"))
            bilm(folder / "bilm", pre_tokenization="treebank" if task == "qa" else "whitespace")
            files = source(folder) if callable(source) else {}
            train_head(task, folder, source if isinstance(source, str) else None, **files, **options)
            settings = read_json(folder / "run" / "run_settings.json")
            if not files:
                fixtures = {path.name: path for path in TASKS.iterdir()}
                files = {name: fixtures[settings[name]] for name in ("validation_file", "test_file")}
            folders[kind] = folder / "run", files
        return folders[kind]

    return head_of


def evaluated(folder: Path, model: Path, *files: Path, **options) -> tuple[dict, list[dict]]:
    """The evaluation and the predictions in a new folder."""
    output = folder / "evaluation"
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    found = evaluate.main([str(model), *map(str, files), "--output_dir", str(output), "--use_cpu", *words])
    assert read_json(output / "evaluation.json") == found
    return found, predictions_of(output / "predictions.jsonl")


def assert_same_predictions(found: list[dict], expected: list[dict]):
    """Numbers within 1e-5: on some processors, the last bit of a probability depends on the batch."""
    numbers = [[], []]
    without = []
    for rows, floats in zip((found, expected), numbers, strict=True):
        without.append(json.loads(json.dumps(rows), parse_float=lambda text, floats=floats: floats.append(float(text))))
    assert without[0] == without[1] and numbers[0] == pytest.approx(numbers[1], abs=1e-5)


# Scores


@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_predictions_are_those_of_the_training(kind, trained, tmp_path):
    model, files = trained(kind)
    record = read_json(model / "record.json")
    found, predictions = evaluated(tmp_path, model, files["validation_file"], files["test_file"])
    assert (found["task"], found["metric"]) == (record["task"], record["metric"])
    for split in ("validation", "test"):
        file = str(files[f"{split}_file"])
        expected = predictions_of(model / f"predictions_{split}.jsonl")
        assert found["files"][file] == {"samples": len(expected), "metrics": record["metrics"][split]}
        of_file = [row for row in predictions if row["file"] == file]
        assert_same_predictions(of_file, [{"file": file, **row} for row in expected])
    assert found["unknown_labels"] == {}


@pytest.mark.parametrize("kind", ["entities", "some answers", "roles", "mentions"])
def test_outputs_of_few_examples_are_in_memory_at_once(kind, trained, tmp_path, monkeypatch):
    model, files = trained(kind)
    sizes = []
    predict = saved_head.TaskTrainer.predict

    def counted(trainer, rows):
        sizes.append(len({*rows["example_number"]}))
        return predict(trainer, rows)

    monkeypatch.setattr(saved_head, "EXAMPLES_AT_ONCE", 3)
    monkeypatch.setattr(saved_head.TaskTrainer, "predict", counted)
    found, _ = evaluated(tmp_path, model, files["test_file"])
    assert found["metrics"] == read_json(model / "record.json")["metrics"]["test"]
    assert max(sizes) <= 3 and sum(sizes) == found["files"][str(files["test_file"])]["samples"]


def flat(predictions: list[dict], *names: str) -> list[list]:
    return [[value for row in predictions for value in row[name]] for name in names]


def test_entities_are_scored_as_seqeval_scores_them(trained, tmp_path):
    model, files = trained("entities")
    found, predictions = evaluated(tmp_path, model, *files.values())
    sides = [row["tags"] for row in predictions], [row["predicted"] for row in predictions]
    assert sides[0] == [tags for file in files.values() for _, tags in sentences_of(file)]
    report = seqeval.metrics.classification_report(*sides, output_dict=True, zero_division=0)
    assert 0 < found["metrics"]["f1"] == report["micro avg"]["f1-score"] < 1
    rates = found["metrics"]["per_type"] | {f"{name} avg": rates for name, rates in found["averages"].items()}
    assert {name: [*row.values()] for name, row in rates.items()} == {
        name: pytest.approx([*row.values()]) for name, row in report.items()
    }
    assert found["metrics"]["accuracy"] == sklearn.metrics.accuracy_score(*flat(predictions, "tags", "predicted"))
    right = sum(row["number"] for row in found["errors"]["confusions"] if row["kind"] == "right")
    assert right == pytest.approx(report["NAME"]["recall"] * report["NAME"]["support"])


@pytest.mark.parametrize("kind", ["tags", "labels", "pairs"])
def test_classes_are_scored_as_scikit_learn_scores_them(kind, trained, tmp_path):
    model, files = trained(kind)
    found, predictions = evaluated(tmp_path, model, files["test_file"])
    if kind == "tags":
        pairs = zip(*flat(predictions, "tags", "predicted"), strict=True)
        gold, predicted = zip(*[pair for pair in pairs if pair[0] != "_"], strict=True)
    else:
        gold, predicted = ([row[name] for row in predictions] for name in ("label", "predicted"))
    report = sklearn.metrics.classification_report(gold, predicted, output_dict=True, zero_division=0)
    assert found["metrics"]["accuracy"] == report.pop("accuracy")
    rates = found["metrics"]["per_type" if kind == "tags" else "per_label"]
    rates = rates | {f"{name} avg": row for name, row in found["averages"].items()}
    assert {name: [*row.values()] for name, row in rates.items() if name in report} == {
        name: pytest.approx([*row.values()]) for name, row in report.items()
    }
    counts = sklearn.metrics.confusion_matrix(gold, predicted, labels=sorted({*gold, *predicted}))
    ours = {(row["gold"], row["predicted"]): row["number"] for row in found["errors"]["confusions"]}
    for (first, second), number in np.ndenumerate(counts):
        names = sorted({*gold, *predicted})
        assert ours.get((names[first], names[second]), 0) == number


def test_sets_of_labels_are_scored_as_scikit_learn_scores_them(trained, tmp_path):
    model, files = trained("sets of labels")
    found, predictions = evaluated(tmp_path, model, files["test_file"])
    labels = ["a", "b", "c"]
    gold, predicted = ([[name in row[key] for name in labels] for row in predictions] for key in ("label", "predicted"))
    options = {"target_names": labels, "output_dict": True, "zero_division": 0}
    report = sklearn.metrics.classification_report(gold, predicted, **options)
    del report["samples avg"]
    rates = found["metrics"]["per_label"] | {f"{name} avg": row for name, row in found["averages"].items()}
    assert {name: [*row.values()] for name, row in rates.items()} == {
        name: pytest.approx([*row.values()]) for name, row in report.items()
    }
    assert found["metrics"]["subset_accuracy"] == sklearn.metrics.accuracy_score(gold, predicted)


def test_numbers_are_scored_as_numpy_scores_them(trained, tmp_path, capsys):
    model, files = trained("numbers")
    found, predictions = evaluated(tmp_path, model, files["test_file"])
    gold, predicted = ([row[name] for row in predictions] for name in ("label", "predicted"))
    assert found["metrics"]["pearson"] == pytest.approx(np.corrcoef(gold, predicted)[0, 1])
    assert found["metrics"]["mse"] == pytest.approx(np.mean(np.subtract(gold, predicted) ** 2))
    worst = [example["number"] for example in found["errors"]["examples"]]
    assert worst == [1 + number for number in np.argsort(-np.abs(np.subtract(gold, predicted)), kind="stable")]
    assert "Classes" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["answers", "some answers"])
def test_answers_are_scored_as_torchmetrics_scores_them(kind, trained, tmp_path):
    from torchmetrics.functional.text import squad

    model, files = trained(kind)
    found, predictions = evaluated(tmp_path, model, files["test_file"])
    theirs = squad(
        [{"id": row["id"], "prediction_text": row["predicted"]} for row in predictions],
        [{"id": row["id"], "answers": {"text": row["answers"] or [""]}} for row in predictions],
    )
    for name, percentage in theirs.items():
        assert found["metrics"][name] == pytest.approx(percentage.item() / 100, rel=1e-5)
    assert ("no_answer_accuracy" in found["metrics"]) == (kind == "some answers")
    right = sum(row["number"] for row in found["errors"]["confusions"] if row["kind"] == "right")
    assert right == pytest.approx(found["metrics"]["exact_match"] * len(predictions))


@pytest.mark.parametrize("kind", ["mentions", "clusters"])
def test_clusters_are_scored_as_scorch_scores_them(kind, trained, tmp_path, monkeypatch):
    scorch = pytest.importorskip("scorch.scores")
    monkeypatch.setattr(scorch, "harmonic_mean", lambda pair: harmonic_mean([*map(float, pair)]))  # of numpy's numbers
    model, files = trained(kind)
    found, predictions = evaluated(tmp_path, model, files["validation_file"], files["test_file"])
    sides = []
    for name in ("mentions", "predicted"):
        clusters = defaultdict(set)
        for number, row in enumerate(predictions):
            for *span, cluster in row[name]:
                clusters[number, cluster].add((number, *span))
        sides.append([mentions for mentions in clusters.values() if kind == "mentions" or len(mentions) > 1])
    assert found["metrics"]["f1"] == pytest.approx(scorch.conll2012(*sides), rel=1e-12)
    right = {span for cluster in sides[0] for span in cluster} & {span for cluster in sides[1] for span in cluster}
    on_both_sides = ("right", "other class")
    numbers = [row["number"] for row in found["errors"]["confusions"] if row["kind"] in on_both_sides]
    assert sum(numbers) == len(right)


def test_roles_are_counted_as_they_are_scored(trained, tmp_path):
    model, files = trained("roles")
    found, _ = evaluated(tmp_path, model, files["test_file"])
    confusions = found["errors"]["confusions"]
    for role, rates in found["metrics"]["per_type"].items():
        of_gold = sum(row["number"] for row in confusions if row["gold"] == role)
        of_predicted = sum(row["number"] for row in confusions if row["predicted"] == role)
        right = sum(row["number"] for row in confusions if row["kind"] == "right" and row["gold"] == role)
        assert of_gold == rates["number"] and right == pytest.approx(rates["recall"] * of_gold)
        assert right == pytest.approx(rates["precision"] * of_predicted)


# Labels, files and options


def test_labels_that_the_model_lacks_are_named_and_count_as_errors(trained, tmp_path, caplog):
    model, _ = trained("entities")
    file = written(tmp_path / "new.conll", "Rome\tB-NAME\nwon\tO\n\nIn\tO\nMay\tB-DATE\n1999\tI-DATE\n")
    found, predictions = evaluated(tmp_path, model, file)
    assert found["unknown_labels"] == {"B-DATE": 1, "I-DATE": 1}
    told = f"{file} has labels that do not occur in {model}: B-DATE (1), I-DATE (1). A model cannot find them"
    assert told in caplog.text
    assert found["metrics"]["per_type"]["DATE"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "number": 1}
    sides = [row["tags"] for row in predictions], [row["predicted"] for row in predictions]
    assert found["metrics"]["f1"] == seqeval.metrics.f1_score(*sides)
    (missed,) = [row for row in found["errors"]["confusions"] if row["gold"] == "DATE"]
    assert missed["number"] == 1 and missed["texts"] == [["May 1999", 1]]
    page = (tmp_path / "evaluation" / "evaluation.html").read_text("utf-8")
    assert "B-DATE (1), I-DATE (1)." in page


def test_labels_of_samples_that_are_left_out_are_not_counted(trained, tmp_path):
    model, _ = trained("labels")
    rows = [{"text": "fine", "label": label} for label in "12022"]
    file = rows_of(tmp_path / "texts.jsonl", rows)
    found, _ = evaluated(tmp_path, model, file, max_eval_samples=3)
    assert found["unknown_labels"] == {"2": 1} and found["files"][str(file)]["samples"] == 3


def test_other_labels_of_texts_and_answers(trained, tmp_path, caplog):
    model, _ = trained("labels")
    rows = [{"text": "fine", "label": "1"}, {"text": "so so", "label": "2"}]
    found, _ = evaluated(tmp_path / "labels", model, rows_of(tmp_path / "texts.jsonl", rows))
    assert found["unknown_labels"] == {"2": 1} and found["metrics"]["per_label"]["2"]["number"] == 1
    model, files = trained("answers")
    questions = questions_of("test")
    for question in questions[:5]:
        question["answers"] = []
    found, predictions = evaluated(tmp_path / "qa", model, write_questions(tmp_path / "questions.jsonl", questions))
    assert found["unknown_labels"] == {"no answer": 5} and found["metrics"]["no_answer_accuracy"] == 0.0
    assert f"5 questions have no answer, but {model} was trained on questions that have one" in caplog.text
    assert all(row["predicted"] for row in predictions)


def test_a_reader_that_was_trained_without_answers_may_answer_nothing(trained, tmp_path):
    """Also where all questions of a file have an answer."""
    model, _ = trained("some answers")
    settings = {"null_score_diff_threshold": -100.0}
    found, predictions = evaluated(tmp_path, model, TASKS / "squadshifts_test.json", **settings)
    assert not any(row["predicted"] for row in predictions) and found["metrics"]["f1"] == 0.0


@pytest.mark.parametrize(
    "kind, name, text, shown",
    [
        (
            "entities",
            "a.txt",
            "EU\nrejects\n",
            "a.txt, line 1 has 1 columns, not 2.* files with labels.*the pipeline on",
        ),
        ("entities", "a.jsonl", '{"tokens": ["EU"]}', "a.jsonl has no column 'tags'.*`elmo ner`"),
        ("entities", "a.conll", "", "a.conll has no samples"),
        ("entities", "a.json", '{"data": [{"paragraphs": []}]}', "a.json has no column 'tokens'"),
        (
            "entities",
            "a.conll",
            "EU\tNN\n",
            r"a.conll has none of the labels of .* \(O, B-NAME, I-NAME\), but NN \(1\)",
        ),
        ("entities", "a.xml", "<a>", "a.xml has an unknown ending"),
        ("labels", "a.tsv", "text\nfine\n", "a.tsv has no column 'label'"),
        (
            "labels",
            "a.jsonl",
            '{"text": "a", "text_pair": "b", "label": "1"}',
            "text and text_pair and label.*text and label",
        ),
        ("labels", "a.jsonl", '{"text": "a", "label": ["1"]}', "has lists of labels, but .* one label"),
        ("pairs", "a.jsonl", '{"text": "a", "label": "neutral"}', "a.jsonl has text and label"),
        ("sets of labels", "a.jsonl", '{"text": "a", "label": "a"}', "has one label per text, but .* gives several"),
        ("numbers", "a.tsv", "text\tlabel\na\tgood\n", "'good'; it must be a finite number"),
        ("answers", "a.jsonl", '{"question": "Who?", "context": "Ana."}', "no column 'answers'"),
        ("roles", "a.jsonl", '{"tokens": ["It", "rains"]}', "`predicate_index` is None"),
        ("mentions", "a.jsonl", '{"document": "a", "sentences": [["It"]]}', "`mentions` is None"),
    ],
)
def test_files_that_do_not_fit(kind, name, text, shown, trained, tmp_path):
    model, _ = trained(kind)
    with refused(shown):
        evaluated(tmp_path, model, written(tmp_path / name, text))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_other_mistakes(trained, tmp_path, monkeypatch):
    model, files = trained("entities")
    file = files["test_file"]
    with refused("missing.conll does not exist", FileNotFoundError):
        evaluated(tmp_path, model, tmp_path / "missing.conll")
    with refused("ELMoForPreTraining, which has no labels; pass a model of elmo ner, elmo classify, elmo qa"):
        evaluated(tmp_path, model.parent / "bilm", file)
    with refused("--use_cpu is an option before the model; write elmo evaluate MODEL FILE"):
        evaluate.main(["--use_cpu", "yes", str(model), str(file)])
    with refused("are the same file; pass it once"):
        evaluated(tmp_path, model, file, file.parent / ".." / file.parent.name / file.name)
    with refused("--label_column is not an option of this program"):
        evaluated(tmp_path, model, file, label_column="label")
    written(tmp_path / "evaluation", "mine")
    with refused("evaluation is not empty; pass --output_dir with a new", FileExistsError):
        evaluated(tmp_path, model, file)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("2 processes were started"):
        evaluated(tmp_path / "other", model, file)


def test_an_interrupted_evaluation_leaves_nothing(trained, tmp_path, monkeypatch):
    model, files = trained("entities")
    predict = saved_head.TaskTrainer.predict

    def interrupted(trainer, rows):
        if rows["example_number"][0]:
            raise KeyboardInterrupt
        return predict(trainer, rows)

    monkeypatch.setattr(saved_head, "EXAMPLES_AT_ONCE", 3)
    monkeypatch.setattr(saved_head.TaskTrainer, "predict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluated(tmp_path, model, files["test_file"])
    assert not list(tmp_path.iterdir())


def test_settings_come_from_the_training_unless_they_are_passed(tmp_path):
    """A training with columns and a tag scheme of its own."""
    bilm(tmp_path / "bilm")
    files = {}
    for split in ("train", "validation"):
        words = [words for words, _ in sentences_of(TASKS / "wnut17_dev.conll")]
        lines = ["".join(f"{word}\t{'S-NAME' if word[0].isupper() else 'O'}\tx\n" for word in row) for row in words]
        files[f"{split}_file"] = written(tmp_path / f"{split}.conll", "\n".join(lines))
    options = {"tag_scheme": "iobes", "tags_column": 2, "test_file": None, **FEW_STEPS}
    record = train_head("ner", tmp_path, **files, **options)
    model = tmp_path / "run"
    found, _ = evaluated(tmp_path / "as trained", model, files["validation_file"])
    assert found["metrics"] == record["metrics"]["validation"] and set(found["metrics"]["per_type"]) == {"NAME"}
    other = written(tmp_path / "other.conll", files["validation_file"].read_text("utf-8").replace("\tx\n", "\n"))
    found, _ = evaluated(tmp_path / "passed", model, other, tags_column=2, max_eval_samples=5)
    assert found["files"][str(other)]["samples"] == 5
    (model / "record.json").unlink()  # as after a training by another program
    with refused(r"has none of the labels of .* but x"):
        evaluated(tmp_path / "without", model, files["validation_file"])
    again, _ = evaluated(tmp_path / "without", model, files["validation_file"], tags_column=2, tag_scheme="iobes")
    assert again["metrics"] == record["metrics"]["validation"]


def test_files_that_do_not_need_the_options_of_the_training(tmp_path, caplog):
    """Without dropped labels, with a header, and with another format of roles."""
    bilm(tmp_path / "bilm")
    table = "good\t1\nbad\t0\nso so\t-\n"
    headless = written(tmp_path / "headless.tsv", table)
    options = {"drop_labels": "-", "column_names": ["text", "label"], "max_steps": 1, "output_dir": tmp_path / "texts"}
    train_head("classify", tmp_path, train_file=headless, validation_file=headless, test_file=None, **options)
    file = written(tmp_path / "texts.tsv", f"text\tlabel\n{table.partition('so so')[0]}")
    found, predictions = evaluated(tmp_path / "of texts", tmp_path / "texts", file)
    assert [row["label"] for row in predictions] == ["1", "0"] and found["unknown_labels"] == {}
    assert "--drop_labels -: no sample has such a label." in caplog.text
    roles = TASKS / "propbank_dev.tsv"
    options = {"roles_format": "propbank", "max_steps": 1, "max_train_samples": 3, "output_dir": tmp_path / "roles"}
    train_head("srl", tmp_path, train_file=roles, validation_file=roles, test_file=None, **options)
    row = {"tokens": ["It", "rains"], "predicate_index": [1], "predicate_tags": [["O", "B-V"]]}
    found, predictions = evaluated(tmp_path / "of roles", tmp_path / "roles", rows_of(tmp_path / "roles.jsonl", [row]))
    assert [row["predicates"] for row in predictions] == [[1]]


def test_a_head_in_eight_bits_is_evaluated(trained, tmp_path):
    model, files = trained("entities")
    small = ELMoForTokenClassification.from_pretrained(model).quantize()
    small.save_pretrained(tmp_path / "small")
    for path in model.glob("tokenizer*"):
        (tmp_path / "small" / path.name).write_bytes(path.read_bytes())
    found, _ = evaluated(tmp_path, tmp_path / "small", files["test_file"])
    assert found["metrics"]["accuracy"] == pytest.approx(
        read_json(model / "record.json")["metrics"]["test"]["accuracy"], abs=0.05
    )


def test_a_data_set_has_the_scores_of_its_file(trained, tmp_path, capsys):
    """Its tags are numbers of classes, and its split has another name."""
    model, files = trained("entities")
    sentences = list(sentences_of(files["test_file"]))
    names = sorted({tag for _, tags in sentences for tag in tags})
    rows = {"tokens": [words for words, _ in sentences], "tags": [tags for _, tags in sentences]}
    features = Features(tokens=List(Value("string")), tags=List(ClassLabel(names=names)))
    dataset = DatasetDict({"june": Dataset.from_dict(rows, features)})
    dataset.save_to_disk(tmp_path / "set")
    found, _ = evaluated(tmp_path / "set_1", model, dataset=tmp_path / "set", test_split="june")
    place = f"{tmp_path / 'set'}, june"
    assert capsys.readouterr().out.splitlines()[-2].startswith(f"On {place}, f1 is ")
    expected, _ = evaluated(tmp_path / "file", model, files["test_file"])
    assert found["files"].keys() == {place} and found["metrics"] == expected["metrics"]
    part, _ = evaluated(tmp_path / "part", model, dataset=tmp_path / "set", test_split="june[:3]")
    assert [scores["samples"] for scores in part["files"].values()] == [3]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dataset": "set"}, "Pass either files with labels, or --dataset NAME."),
        ({"test_split": "june"}, "--test_split june has no effect without --dataset; leave it out."),
    ],
)
def test_files_and_a_data_set(options, message, trained, tmp_path):
    model, files = trained("entities")
    with refused(message):
        evaluated(tmp_path, model, files["test_file"], **options)


def test_files_may_follow_options(trained, tmp_path):
    model, files = trained("entities")
    output = str(tmp_path / "evaluation")
    found = evaluate.main([str(model), "--use_cpu", "--output_dir", output, str(files["test_file"])])
    assert list(found["files"]) == [str(files["test_file"])]


def test_what_is_printed(trained, tmp_path, capsys):
    model, files = trained("entities")
    found, _ = evaluated(tmp_path, model, files["validation_file"], files["test_file"])
    printed = capsys.readouterr().out
    scores = found["files"][str(files["test_file"])]["metrics"]
    assert f"| {100 * scores['f1']:.2f} |" in printed and "| all files " in printed and "| micro average" in printed
    missed = max(
        (row for row in found["errors"]["confusions"] if row["kind"] == "missed"), key=lambda row: row["number"]
    )
    assert f"{missed['number']:8,}  missed NAME: {missed['texts'][0][0]}" in printed
    assert f"Open {tmp_path / 'evaluation' / 'evaluation.html'} to read the errors." in printed
    told, following = conclusion(printed)
    after_training = read_json(model / "record.json")["metrics"]["test"]["f1"]
    before = f"After its training, f1 on test was {100 * after_training:.2f}."
    assert told == f"On 2 files, f1 is {100 * found['metrics']['f1']:.2f}. {before}"
    assert following[:5] == ["elmo", "ner", "--model_name_or_path", str(model), "--continue_head"]
