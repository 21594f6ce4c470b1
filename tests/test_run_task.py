"""The program of all tasks, from files to folders that stock tools load, and that predict what was recorded."""

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from errors import refused
from task_worker import (
    FIXTURES,
    LEARNING,
    TASKS,
    WINDOWS,
    WITHOUT_DROPOUT,
    assert_same_weights,
    bilm,
    capitals,
    experiment,
    interrupted,
    launch,
    options_of,
    predictions_of,
    questions_of,
    read_json,
    role_sentences_of,
    sentences_of,
    tagger_options,
    train_head,
    write_questions,
    written,
)
from transformers import AutoModelForTokenClassification, AutoTokenizer, Trainer, TrainingArguments, pipeline

from modeling_elmo import ELMoForCoreferenceResolution, ELMoTokenizer
from modeling_elmo.run_scripts import reproduce, run_task
from modeling_elmo.run_scripts.cards.publishing import files_to_upload
from modeling_elmo.run_scripts.fine_tuning.head import BasicHeadArguments
from modeling_elmo.run_scripts.fine_tuning.metrics import answer_scores, tagging_scores
from modeling_elmo.run_scripts.fine_tuning.tasks import task_class
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference import Coreference, CoreferenceArguments
from modeling_elmo.run_scripts.fine_tuning.tasks.semantic_roles import predicate_scores, role_scores
from modeling_elmo.run_scripts.fine_tuning.trainer import last_checkpoint

LITBANK = {split: TASKS / f"litbank_{split}.conll" for split in ("train", "dev", "test")}
WITHOUT_EVALUATION = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
TRAINED = {
    "ner": {"num_train_epochs": 3, "per_device_train_batch_size": 6, "learning_rate": 0.05},
    "qa": WINDOWS | LEARNING | {"num_train_epochs": 3, "per_device_train_batch_size": 10},
    "srl": LEARNING | {"num_train_epochs": 3, "per_device_train_batch_size": 10},
    "coref": {"num_train_epochs": 15, "learning_rate": 0.005, "train_singletons": True, **WITHOUT_EVALUATION},
}
TRAINED["srl"] |= {"config_overrides": {"task_hidden_size": 24}}
SPANS = {**WITHOUT_DROPOUT, "lexical_dropout": 0.0, "max_span_width": 2, "task_hidden_size": 32}
TRAINED["coref"] |= {"config_overrides": SPANS, "test_file": LITBANK["train"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A function of a task: a folder with a biLM, `bilm`, and a head trained on it, `run`."""
    folders: dict[str, Path] = {}

    def folder_of(task: str) -> Path:
        if task not in folders:
            folders[task] = folder = tmp_path_factory.mktemp(task)
            bilm(folder / "bilm", pre_tokenization="treebank" if task == "qa" else "whitespace")
            train_head(task, folder, **(capitals(folder) if task == "ner" else {}), **TRAINED[task])
        return folders[task]

    return folder_of


# Options


@pytest.mark.parametrize("program", [*FIXTURES, *(f"reproduce {task}" for task in FIXTURES)])
def test_the_help_is_short(program, capsys):
    """It has the options of this package, and of Trainer's those with another default, and those of the documents."""
    shown, *names, task = [], *program.split()
    for option in ("--help", "--help_all"):
        with pytest.raises(SystemExit):
            (reproduce if names else run_task).main([task, option])
        shown.append({*re.findall(r"^  --(\w+)", capsys.readouterr().out, re.MULTILINE)})
    of_trainer = {item.name: item.default for item in fields(TrainingArguments)}
    ours = {item.name: item.default for item in fields(task_class(task).training_arguments_class)}
    brief, whole = shown
    assert whole == brief | {*ours}
    assert brief > {name for name, default in ours.items() if default != of_trainer.get(name)}
    assert brief > {"model_name_or_path", "train_file", "output_dir", "learning_rate", "num_train_epochs", "seed"}
    assert brief > {"per_device_train_batch_size", "use_cpu", "bf16", "resume_from_checkpoint", "optim"}
    assert len(brief) <= (75 if names else 63)


# The folder predicts what was recorded


def test_named_entities(place):
    folder = place("ner") / "run"
    record, rows = read_json(folder / "record.json"), predictions_of(folder / "predictions_test.jsonl")
    gold = sentences_of(place("ner") / "test.conll")
    assert [(row["tokens"], row["tags"]) for row in rows] == gold
    expected = tagging_scores([row["predicted"] for row in rows], [tags for _, tags in gold])
    assert record["metrics"]["test"] == expected and 0 < expected["f1"] < 1
    assert (record["task"], record["metric"], record["arm"]) == ("ner", "f1", "elmo")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder)
    for row in rows[:5]:
        with torch.no_grad():
            logits = model(**tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")).logits[0, 1:-1]
        assert [model.config.id2label[number] for number in logits.argmax(-1).tolist()] == row["predicted"]
    found = pipeline("token-classification", model=str(folder), aggregation_strategy="simple")
    assert all(group["entity_group"] == "NAME" for group in found("We saw Paris and Rome ."))
    assert (folder / "README.md").read_text("utf-8").count("token-classification") >= 2


@pytest.mark.parametrize("data, options", [("rt_polarity", {}), ("snli", {}), ("snli", {"classifier": "esim"})])
def test_texts_and_pairs(data, options, tmp_path):
    bilm(tmp_path / "bilm")
    record = train_head("classify", tmp_path, data, **options)
    rows = predictions_of(tmp_path / "run" / "predictions_test.jsonl")
    right = sum(row["predicted"] == row["label"] for row in rows)
    assert record["metrics"]["test"]["accuracy"] == pytest.approx(right / len(rows))
    classifier = pipeline("text-classification", model=str(tmp_path / "run"))
    for row in rows[:3]:
        text = {name: row[name] for name in ("text", "text_pair") if name in row}
        assert classifier(text)["label"] == row["predicted"]


@pytest.mark.parametrize(
    "labels, options, metric",
    [([0.1, 0.7], {"problem": "regression"}, "pearson"), ([["a"], ["a", "b"]], {}, "micro_f1")],
)
def test_numbers_and_sets_of_labels(labels, options, metric, tmp_path):
    bilm(tmp_path / "bilm")
    rows = [{"text": "a film", "label": labels[0]}, {"text": "a man", "label": labels[1]}] * 4
    file = written(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    files = {"train_file": file, "validation_file": file, "test_file": None}
    record = train_head("classify", tmp_path, **files, **options, max_steps=2)
    assert record["metric"] == metric and isinstance(record["metrics"]["validation"][metric], float)


def test_answers(place):
    folder = place("qa") / "run"
    record = read_json(folder / "record.json")
    assert (record["task"], record["metric"], record["train_samples"]) == ("question-answering", "f1", 40)
    rows, questions = predictions_of(folder / "predictions_test.jsonl"), questions_of("test")
    assert [row["id"] for row in rows] == [question["id"] for question in questions]
    gold = [[each["text"] for each in question["answers"]] for question in questions]
    expected, scores = answer_scores([row["predicted"] for row in rows], gold), record["metrics"]["test"]
    assert scores.items() >= expected.items()
    assert sum(kind["number"] for kind in scores["per_type"].values()) == 20 and "what" in scores["per_type"]
    reader, equal = pipeline("question-answering", model=str(folder), trust_remote_code=True), 0
    for row, question in zip(rows, questions, strict=True):
        asked = {"question": question["question"], "context": question["context"]}
        found = reader(**asked, max_seq_len=40, doc_stride=12)
        equal += found["answer"] == row["predicted"]
        assert np.log(found["score"]) == pytest.approx(row["log_probability"], abs=1e-3)
    assert equal >= len(rows) - 2  # spans of a young model may be equally probable
    card = (folder / "README.md").read_text("utf-8")
    assert "BiDAF with self-attention" in card and "pipe(question=" in card and "At the input and output" in card


def test_roles(place):
    folder = place("srl") / "run"
    record, rows = read_json(folder / "record.json"), predictions_of(folder / "predictions_test.jsonl")
    assert (record["task"], record["metric"]) == ("semantic-role-labeling", "f1")
    settings = record["settings"]
    assert (settings["elmo_placement"], settings["scalar_mix_l2"], settings["max_length"]) == ("input", 0.001, 102)
    verbs = [verb for row in rows for verb in row["verbs"]]
    expected = role_scores([verb["tags"] for verb in verbs], [verb["gold_tags"] for verb in verbs])
    expected |= predicate_scores(*([row[key] for row in rows] for key in ("predicted_predicates", "predicates")))
    assert record["metrics"]["test"].items() >= expected.items() and 0 < expected["f1"] < 1
    sentences = [words for words, *_ in role_sentences_of(TASKS / "propbank_test.tsv")]
    assert [row["words"] for row in rows] == sentences
    labeler = pipeline("semantic-role-labeling", model=str(folder), trust_remote_code=True)
    for row in rows:
        found = labeler(row["words"], is_split_into_words=True, predicates=row["predicates"])
        assert found["words"] == row["words"]
        for verb, expected in zip(found["verbs"], row["verbs"], strict=True):
            del expected["gold_tags"], expected["kind"]
            scores = [[argument.pop("score") for argument in each["arguments"]] for each in (verb, expected)]
            assert verb == expected and scores[0] == pytest.approx(scores[1], abs=1e-4)
        again = labeler(row["words"], is_split_into_words=True)
        assert [verb["verb"] for verb in again["verbs"]] == [row["words"][word] for word in row["predicted_predicates"]]
    card = (folder / "README.md").read_text("utf-8")
    assert "(He et al. 2017)" in card and "pipeline('semantic-role-labeling'" in card and "| predicate_f1 |" in card


def characters_of(row: dict) -> list[list[tuple[int, int]]]:
    """The characters of the predicted mentions, in words joined by spaces and sentences joined by line feeds."""
    clusters, starts, position = {}, [], 0
    for words in row["sentences"]:
        starts.append([])
        for word in words:
            starts[-1].append((position, position + len(word)))
            position += len(word) + 1
    for sentence, first, last, cluster in row["predicted"]:
        clusters.setdefault(cluster, []).append((starts[sentence][first][0], starts[sentence][last][1]))
    return sorted(map(sorted, clusters.values()))


def assert_resolves_as_recorded(folder: Path, split: str) -> int:
    """Compares the pipeline of the folder with the predictions, and returns the number of clusters."""
    resolver, count = pipeline("coreference-resolution", model=str(folder), trust_remote_code=True), 0
    for row in predictions_of(folder / f"predictions_{split}.jsonl"):
        found = resolver(row["sentences"])["clusters"]
        spans = [[(mention["start"], mention["end"]) for mention in cluster] for cluster in found]
        assert sorted(map(sorted, spans)) == characters_of(row)
        count += len(found)
    return count


def test_coreference(place):
    folder = place("coref") / "run"
    assert assert_resolves_as_recorded(folder, "test") > 1
    record = read_json(folder / "record.json")
    assert (record["task"], record["metric"], record["train_samples"]) == ("coreference-resolution", "f1", 2)
    assert "gap" not in record
    card = (folder / "README.md").read_text("utf-8")
    assert "(Lee et al. 2017)" in card and "| f1_without_singletons |" in card and "Labels:" not in card


def test_stock_trainer_trains_and_evaluates_coreference(place, tmp_path):
    """It needs `label_names`, and all columns for the collator."""
    folder = place("coref") / "run"
    task = Coreference.read(CoreferenceArguments(train_file=str(LITBANK["train"]), test_file=str(LITBANK["test"])))
    tokenizer = ELMoTokenizer.from_pretrained(folder)
    rows = task.encode_splits(tokenizer)
    options = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "remove_unused_columns": False}
    options |= {"label_names": ["mentions"], "max_steps": 2, "report_to": "none", "use_cpu": True}
    trainer = Trainer(
        ELMoForCoreferenceResolution.from_pretrained(folder),
        TrainingArguments(output_dir=str(tmp_path), **options),
        data_collator=task.collator(tokenizer),
        train_dataset=rows["train"],
    )
    trainer.train()
    found = trainer.predict(rows["train"])
    clusters, scores = found.predictions
    assert found.label_ids.shape == (2, 85, 4) and (found.label_ids[0, 51:] == -100).all()
    assert clusters.shape == (*scores.shape, 4) and len(clusters) == 2 and found.metrics["test_loss"] > 0
    assert (clusters[0] == -100).all(-1).any() and not (clusters[1] == -100).any()


# Networks learn their data by heart

FEW_SAMPLES = {"max_train_samples": 32, "max_eval_samples": 32, "test_file": None, **WITHOUT_EVALUATION}


def memorized(task: str, folder: Path, file: Path, sizes: dict, **options) -> dict:
    """The scores on the training data."""
    bilm(folder / "bilm", pre_tokenization="treebank" if task == "qa" else "whitespace")
    options |= {"train_file": file, "validation_file": file, "config_overrides": WITHOUT_DROPOUT | sizes}
    return train_head(task, folder, **FEW_SAMPLES, **options)["metrics"]["validation"]


@pytest.mark.slow
def test_questions_are_memorized(tmp_path):
    sizes = {"task_hidden_size": 24, "task_char_cnn_filters": [[3, 24]], "task_word_embedding_size": 32}
    options = LEARNING | {"learning_rate": 0.01, "per_device_train_batch_size": 32, "num_train_epochs": 60}
    scores = memorized("qa", tmp_path, TASKS / "squadshifts_train.json", sizes, **options)
    assert scores["exact_match"] == scores["f1"] == 1.0


@pytest.mark.slow
def test_roles_are_memorized(tmp_path):
    train = TASKS / "propbank_train.tsv"
    sizes = {"task_hidden_size": 48, "task_num_layers": 2, "task_char_cnn_filters": [[3, 24]]}
    options = LEARNING | {"learning_rate": 0.02, "per_device_train_batch_size": 16, "num_train_epochs": 50}
    scores = memorized("srl", tmp_path, train, sizes, **options, lr_scheduler_type="linear")
    assert scores["f1"] == scores["span_f1"] == scores["predicate_f1"] == 1.0
    assert sum(role["number"] for role in scores["per_type"].values()) > 100


@pytest.mark.slow
def test_documents_are_memorized(tmp_path):
    """Mentions of their clusters have up to two words. A span that is not kept is not learned, so most are kept."""
    arguments = CoreferenceArguments(train_file=str(LITBANK["train"]), validation_file=str(LITBANK["dev"]))
    data, file = Coreference.read(arguments).data, tmp_path / "documents.jsonl"
    with file.open("w", encoding="utf-8") as lines:  # sentences 1 to 4 of two documents
        for row in (data["train"][1], data["validation"][0]):
            row["sentences"], row["speakers"] = row["sentences"][1:5], []
            row["mentions"] = [[number - 1, *rest] for number, *rest in row["mentions"] if 1 <= number < 5]
            lines.write(json.dumps(row) + "\n")
    sizes = {**SPANS, "task_char_cnn_filters": [[3, 24]], "spans_per_word": 2.0}
    scores = memorized("coref", tmp_path, file, sizes, num_train_epochs=30, learning_rate=0.005)
    assert scores["f1"] > 0.99
    assert assert_resolves_as_recorded(tmp_path / "run", "validation") == 4


# Several processes, and runs that were stopped


@pytest.mark.slow
def test_two_processes_equal_one(place, tmp_path):
    """On the same batches. The 20 validation sentences fill the batches of two processes: Trainer repeats none.

    Adam would enlarge rounding where a gradient is nearly 0, and would not notice gradients that are summed.
    """
    common = {"config_overrides": WITHOUT_DROPOUT, "test_file": None, "optim": "sgd", "learning_rate": 0.1}
    two = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 5, "output_dir": tmp_path / "two"}
    launch(2, "run_task", options_of(place("ner"), **common, **two), "ner")
    train_head("ner", place("ner"), **common, per_device_train_batch_size=6, output_dir=tmp_path / "one")
    losses = []
    for size, name in enumerate(("one", "two"), 1):
        log = read_json(Path(last_checkpoint(tmp_path / name)) / "trainer_state.json")["log_history"]
        losses.append([entry["eval_loss"] for entry in log if "eval_loss" in entry])
        assert read_json(tmp_path / name / "record.json")["settings"]["world_size"] == size
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0]
    assert_same_weights(tmp_path / "two", tmp_path / "one", rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_processes_resolve_documents_of_different_sizes(place, tmp_path):
    options = {"num_train_epochs": 1, "validation_file": LITBANK["train"], "output_dir": tmp_path}
    launch(2, "run_task", options_of(place("coref"), "litbank", **options), "coref")
    rows = predictions_of(tmp_path / "predictions_validation.jsonl")
    assert [len(row["sentences"]) for row in rows] == [12, 12]
    assert len({sum(map(len, row["sentences"])) for row in rows}) == 2
    assert_resolves_as_recorded(tmp_path, "validation")
    assert_resolves_as_recorded(tmp_path, "test")


def test_a_run_resumes_with_its_own_settings_only(place, tmp_path):
    """The optimizer keeps the settings of the checkpoint, so a record of others would be false."""
    folder = place("ner")
    options = {"output_dir": tmp_path / "stopped", "num_train_epochs": 2, "learning_rate": 0.01}
    with interrupted():
        train_head("ner", folder, **options)
    again = options | {"resume_from_checkpoint": "last", "num_train_epochs": 3}
    other = tmp_path / "train.conll"
    written(other, (TASKS / "wnut17_train.conll").read_text("utf-8") + "more\tO\n")
    checkpoint = last_checkpoint(tmp_path / "stopped")
    for error, message, wrong in (
        (ValueError, "last: .* other settings: learning_rate 0.01, now 0.1", again | {"learning_rate": 0.1}),
        (ValueError, "last: .* other settings: data_digest '", again | {"train_file": other}),
        (FileExistsError, "pass another --output_dir, or run its command with --resume_from", options),
        (
            FileExistsError,
            f"{folder / 'run'} holds a model of another run; pass another",
            again | {"output_dir": folder / "run", "resume_from_checkpoint": checkpoint},
        ),
    ):
        with refused(message, error):
            train_head("ner", folder, **wrong)
    record = train_head("ner", folder, **again)
    assert record["epochs"] == 3 and record["settings"]["learning_rate"] == 0.01
    assert "run_settings.json" not in files_to_upload(tmp_path / "stopped")
    for checkpoint in (tmp_path / "stopped").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with refused(r"pass another --output_dir\.$", FileExistsError):  # nothing to resume
        train_head("ner", folder, **options)


@pytest.mark.parametrize("file", ["config.json", "checkpoint-20/training_state.pt"])
def test_a_bilm_in_the_output_folder_stays(file, place, tmp_path):
    """Trainer would remove its checkpoints, and the head would replace it."""
    (tmp_path / "run" / file).parent.mkdir(parents=True)
    (tmp_path / "run" / file).touch()
    with refused("run holds a model of another run", FileExistsError):
        train_head("ner", place("ner"), output_dir=tmp_path / "run")
    with refused("run was made with other settings", FileExistsError):
        experiment("ner", place("ner"), output_dir=tmp_path / "run")
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [tmp_path / "run" / file]


@pytest.mark.slow
@pytest.mark.parametrize("is_within_an_epoch", [False, True])
def test_a_stopped_run_resumes_with_the_same_windows(is_within_an_epoch, tmp_path):
    bilm(tmp_path / "bilm")
    steps = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 3, "eval_steps": 3}
    options = {"num_train_epochs": 3, "max_sentences": 4, "test_file": None, "max_eval_samples": 1}
    options |= steps if is_within_an_epoch else {}
    train_head("coref", tmp_path, **options, output_dir=tmp_path / "whole")
    with interrupted():
        train_head("coref", tmp_path, **options)
    train_head("coref", tmp_path, **options, resume_from_checkpoint="last")
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


# Models that have learned nothing


@pytest.mark.parametrize(
    ("task", "shown"), [("ner", "because the model always answers 'O'"), ("srl", "because hardly any answer is right")]
)
def test_a_score_that_needs_no_learning_is_told(task, shown, place, tmp_path, caplog):
    options = tagger_options(place(task), tmp_path) if task == "ner" else {"output_dir": tmp_path}
    train_head(task, place(task), **options | {"max_steps": 1})
    (message,) = [each for each in caplog.messages if "split 'test'" in each]
    cause = "training ended after step 1 (pass a larger --num_train_epochs or --max_steps, or smaller batches)"
    assert message.startswith(f"{tmp_path}, split 'test': f1 is 0.00, {shown}. Likely cause: {cause}")


# Refusals


def test_a_training_that_diverges_says_so(place, tmp_path):
    options = {"learning_rate": 1e38, "max_grad_norm": 0.0, "max_steps": 1, "test_file": None, "output_dir": tmp_path}
    with refused("training diverged. Pass a smaller learning rate"):
        train_head("coref", place("coref"), **options)


def test_a_question_that_fills_the_window(tmp_path):
    bilm(tmp_path / "bilm", pre_tokenization="treebank")
    questions = questions_of("train")[:3]
    questions[1]["question"] = "why " * 30
    path = write_questions(tmp_path / "train.jsonl", questions)
    with refused(f"Question {questions[1]['id']} has 30 words.*--max_seq_length 40"):
        train_head("qa", tmp_path, **WINDOWS, train_file=path, max_steps=1)


@pytest.mark.parametrize(
    "task, options, message",
    [
        ("ner", {"validation_file": None, "test_file": None}, "no data to evaluate on; pass --validation_file FILE"),
        ("classify", {"classifier": "esim"}, "--classifier esim compares two texts, .* one; pass --text_pair_column"),
        ("qa", {"max_length": 30}, "--max_length.*Did you mean --max_seq_length"),
        ("qa", {"max_seq_length": 4}, "--max_seq_length 4"),
        ("qa", {"max_seq_length": 100, "doc_stride": 98}, "--max_seq_length 100 .*--doc_stride 98"),
        ("srl", {"max_length": 2}, "--max_length 2"),
        ("srl", {"train_file": TASKS / "snli_dev.jsonl"}, "snli_dev.jsonl, line 1.*tokens"),
        ("coref", {"config_overrides": {"train_singletons": True}}, "train_singletons"),
    ],
)
def test_options_that_are_refused(task, options, message, tmp_path):
    bilm(tmp_path / "bilm")
    with refused(message):
        train_head(task, tmp_path, **options)


def test_output_folders_that_are_refused(tmp_path):
    bilm(tmp_path / "bilm")
    (tmp_path / "experiment").mkdir()
    written(tmp_path / "experiment" / "settings.json", "{}")
    (tmp_path / "file").touch()
    with refused("experiment .*`elmo reproduce`; pass another --output_dir", FileExistsError):
        train_head("ner", tmp_path, output_dir=tmp_path / "experiment")
    with refused("--output_dir .*file is a file; pass a folder", FileExistsError):
        train_head("ner", tmp_path, output_dir=tmp_path / "file")


def test_few_options_beside_those_of_trainer():
    """A newcomer reads them all: the others are options of `elmo reproduce`, or fields of the configuration."""
    options = {each.name for each in fields(BasicHeadArguments)}
    assert options == {"model_name_or_path", "head", "freeze_bilm", "word_vectors", "config_overrides"}
