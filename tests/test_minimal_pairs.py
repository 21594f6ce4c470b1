"""Minimal pairs: shares against the losses of each sentence alone, and errors of the table."""

import gzip
import json

import pytest
import torch
from bilm_models import save, tiny_model
from errors import refused

from modeling_elmo import ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.run_scripts import minimal_pairs

WORDS = ["the", "cats", "cat", "sleep", "sleeps", "on", "mat's"]
PAIRS = [  # group, good, bad; "purr" and "Purr" are unknown, "mat’s" is looked up as "mat's"
    ("agreement", "the cats sleep", "the cats sleeps"),
    ("agreement", "the cat sleeps on the mat’s", "the cat sleep on the mat’s"),
    ("agreement", "the cats purr", "the cat purr"),
    ("order", "cats sleep on mat’s", "sleep on mat’s cats"),
    ("order", "Purr the cats", "the Purr cats"),
]


@pytest.fixture(scope="module")
def bilm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bilm")
    vocab = ["<S>", "</S>", "<UNK>", *WORDS]
    tokenizer = ELMoTokenizer(vocab=vocab, pre_tokenization="whitespace", plain_signs=True)
    model = tiny_model(ELMoForPreTraining, 1, vocab_size=len(tokenizer))
    for parameter in model.parameters():  # contexts count
        torch.nn.init.normal_(parameter, std=0.5)
    return save(folder, model, tokenizer)


def write_table(folder, rows=PAIRS, header=("phenomenon", "good", "bad")):
    path = folder / "pairs.tsv.gz"
    path.write_bytes(gzip.compress("\n".join("\t".join(row) for row in [header, *rows]).encode()))
    return path


def test_shares_are_those_of_sentences_alone(bilm, tmp_path, capsys):
    model, tokenizer = (cls.from_pretrained(bilm) for cls in (ELMoForPreTraining, ELMoTokenizer))

    def log_probs(sentence):
        inputs = tokenizer([sentence], return_tensors="pt")
        with torch.no_grad():
            losses = model.eval()(**inputs, labels=inputs["input_ids"])
        count = len(sentence.split()) + 1
        forward, backward = -losses.forward_loss.item() * count, -losses.backward_loss.item() * count
        return forward, backward, forward + backward

    output = tmp_path / "results" / "pairs.json"
    found = minimal_pairs.main([str(write_table(tmp_path)), "--model", str(bilm), "--output", str(output)])
    assert found == json.loads(output.read_text()) and [*found] == ["agreement", "order", "all"]
    for name, row in found.items():
        pairs = [pair[1:] for pair in PAIRS if name in (pair[0], "all")]
        wins = [[good > bad for good, bad in zip(*map(log_probs, pair), strict=True)] for pair in pairs]
        assert row["pairs"] == len(pairs)
        for way, of_way in zip(("forward", "backward", "both"), zip(*wins, strict=True), strict=True):
            assert row[way] == pytest.approx(sum(of_way) / len(pairs))
    assert {found[name][way] for name in found for way in ("forward", "backward", "both")} - {0.0, 1.0}
    assert [row["unknown words"] for row in found.values()] == pytest.approx([2 / 24, 2 / 14, 4 / 38])
    printed = capsys.readouterr().out
    assert "| all        |     5 |" in printed
    told = (
        f"prefers the good sentence of {found['all']['both']:.1%} of the pairs; a guess is right in 50 %.\nNext: elmo "
    )
    assert told in printed


@pytest.mark.parametrize(
    ("table", "options", "received"),
    [
        ({"header": ("phenomenon", "good", "worse")}, [], "pairs.tsv.gz, line 2 has no 'bad'"),
        ({}, ["--group_column", "type"], r"line 2 has no column 'type', only \['phenom.*\]; pass --group_column\."),
        ({"rows": []}, [], "pairs.tsv.gz has no pairs"),
        ({"rows": [*PAIRS, ("order", " ", "the cats")]}, [], "line 7 has no 'good'"),
        ({"rows": [("order", "the cats", "the cats ")]}, [], "line 2: 'good' and 'bad' are the same: 'the cats'"),
        (
            {"rows": [*PAIRS, ("all", "the cats", "cats the")]},
            [],
            "line 7: the group 'all' has the name of the last row",
        ),
    ],
)
def test_wrong_tables(table, options, received, bilm, tmp_path):
    with refused(received):
        minimal_pairs.main([str(write_table(tmp_path, **table)), "--model", str(bilm), *options])


def write_rows(folder, rows):
    path = folder / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def shares(path, folder) -> dict:
    return minimal_pairs.main([str(path), "--model", str(folder)])


def test_other_formats(bilm, tmp_path):
    rows = [dict(zip(("phenomenon", "good", "bad"), row, strict=True)) for row in PAIRS]
    assert shares(write_rows(tmp_path, rows), bilm) == shares(write_table(tmp_path), bilm)
    rows[0]["phenomenon"], rows[1]["phenomenon"] = 0, " 0"
    assert shares(write_rows(tmp_path, rows), bilm)["0"]["pairs"] == 2
    for name, value in (("good", 5), ("phenomenon", ["a"])):
        with refused(f"pairs.jsonl, line 1 has no '{name}'"):
            shares(write_rows(tmp_path, [rows[0] | {name: value}]), bilm)
    with refused(r"pairs.txt: unknown suffix; pass a table that ends in .tsv, .csv, .jsonl"):
        shares(tmp_path / "pairs.txt", bilm)
