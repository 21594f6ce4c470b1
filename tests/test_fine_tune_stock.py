"""The script to copy learns the tags of the fixtures, and stock classes read its folder."""

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Sequence, Value
from errors import refused
from pretraining_worker import arguments_of
from task_worker import SPLITS, bilm, capitals, sentences_of
from transformers import AutoModelForTokenClassification, AutoTokenizer

from modeling_elmo.run_scripts import fine_tune_stock
from modeling_elmo.run_scripts.fine_tuning.metrics import tagging_scores

OPTIONS = {"learning_rate": 0.01, "per_device_train_batch_size": 6, "use_cpu": True, "disable_tqdm": "true"}
OPTIONS |= {"report_to": "none", "save_strategy": "no"}


def test_the_folder_has_the_scores_that_are_returned(tmp_path):
    bilm(tmp_path / "bilm")
    files, output = capitals(tmp_path), tmp_path / "run"
    options = {
        "model_name_or_path": tmp_path / "bilm",
        "output_dir": output,
        "num_train_epochs": 6,
        **OPTIONS,
        "learning_rate": 0.03,
    }
    options |= {name: files[name] for name in ("train_file", "validation_file")}
    found = fine_tune_stock.main(arguments_of(options))
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    gold, predicted = sentences_of(files["validation_file"]), []
    for words, _ in gold:
        with torch.no_grad():
            logits = model(**tokenizer(words, is_split_into_words=True, return_tensors="pt")).logits[0, 1:-1]
        predicted.append([model.config.id2label[number] for number in logits.argmax(-1).tolist()])
    scores = tagging_scores(predicted, [tags for _, tags in gold])
    assert {name: found[f"eval_{name}"] for name in ("precision", "recall", "f1")}.items() <= scores.items()
    assert 0.3 < scores["f1"] < 1


def test_lines_between_sentences_may_have_spaces(tmp_path):
    (tmp_path / "a.conll").write_text("\ufeffEU B-ORG\nrejects O\n \t\n\nPeter B-PER\n", "utf-8")
    rows = list(fine_tune_stock.sentences(str(tmp_path / "a.conll")))
    assert rows == [{"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]}, {"tokens": ["Peter"], "tags": ["B-PER"]}]


@pytest.mark.parametrize("word", ["New York", "10\u00a0000", "\u00a0", "foo\u0085bar", "foo\u2028bar", "foo\rbar"])
def test_lines_end_at_line_feeds_and_columns_at_tabs(word, tmp_path):
    (tmp_path / "a.conll").write_bytes(f"{word}\tX\tO\r\nAna\tX\tB-PER\r\n\r\n-DOCSTART-\n\nis X O\n".encode())
    expected = [{"tokens": [word, "Ana"], "tags": ["O", "B-PER"]}, {"tokens": ["is"], "tags": ["O"]}]
    assert list(fine_tune_stock.sentences(str(tmp_path / "a.conll"))) == expected


@pytest.mark.parametrize(
    "content, shown",
    [
        (b"EU B-ORG\nNew York O\n", "line 2 has no 2 columns, a word first and its tag last: 'New York O'"),
        (b"EU\n", "line 1 has no 2 columns, .*'EU'"),
        (b"\tO\n", r"line 1 has no 2 columns, .*'\\tO'"),
        (b"EU\tB-ORG\rsays\tO\r", "lines end in carriage returns. Save it as UTF-8 text"),
        ("EU\tB-ORG\nsays\tO\n".encode("utf-16"), "NUL bytes .UTF-16"),
        (b"EU\tB-ORG\nsa\0ys\tO\n", "NUL bytes"),
        (b"1 EU B\n2 says O\n\n1 It O\n", r"no words. Remove it. The columns begin with .*'1', '2'.*'EU', 'says'"),
        (b"0 EU B\n1 says O\n\n0 It O\n1 is O\n", r"no words.*'0', '1'"),
        (b"a1 EU B\na1 says O\n\na2 It O\na2 is O\n", r"no words.*'a1', 'a1'"),
    ],
)
def test_files_that_are_refused(content, shown, tmp_path):
    (tmp_path / "a.conll").write_bytes(content)
    with refused(f"a.conll.*{shown}"):
        fine_tune_stock.sentences(str(tmp_path / "a.conll"))


def test_a_tag_without_training_data_is_refused(tmp_path):
    bilm(tmp_path / "bilm")
    files = capitals(tmp_path)
    with files["validation_file"].open("a", encoding="utf-8") as file:
        file.write("Bonn\tB-CITY\n\n")
    options = {name: files[name] for name in ("train_file", "validation_file")}
    options |= {"model_name_or_path": tmp_path / "bilm", "output_dir": tmp_path / "run", **OPTIONS}
    with refused("The training data has no 'B-CITY'; pass more"):
        fine_tune_stock.main(arguments_of(options))


def test_a_data_set(tmp_path, monkeypatch):
    bilm(tmp_path / "bilm")
    names = ["O", "B-NAME", "I-NAME"]
    features = Features({"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=names))})
    rows = {split: sentences_of(path)[:20] for split, path in zip(SPLITS, capitals(tmp_path).values(), strict=True)}
    data = {
        split: Dataset.from_list([{"tokens": words, "ner_tags": tags} for words, tags in pairs], features)
        for split, pairs in rows.items()
    }
    monkeypatch.setattr(fine_tune_stock, "load_dataset", {"name": DatasetDict(data)}.__getitem__)
    options = {"model_name_or_path": tmp_path / "bilm", "dataset": "name", "output_dir": tmp_path / "run"}
    found = fine_tune_stock.main(arguments_of({**options, "max_steps": 2, **OPTIONS}))
    assert found["epoch"] > 0 and 0 <= found["eval_f1"] <= 1
    labels = AutoModelForTokenClassification.from_pretrained(tmp_path / "run").config.id2label
    assert [*labels.values()] == sorted(names)
