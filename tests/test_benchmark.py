"""The benchmark on the tiny model: every part runs, and wrong code gets no figure. No test depends on time."""

import gzip
import importlib.util
import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from errors import refused
from places import ROOT

from modeling_elmo import directions
from modeling_elmo.kernels.int8 import int8_obstacle
from modeling_elmo.kernels.lstm_cpu import training_lstm
from modeling_elmo.run_scripts import benchmark
from modeling_elmo.run_scripts.benchmarks import (
    model_speed,
    step_speed,
    text,
    timing,
)
from modeling_elmo.run_scripts.benchmarks.peers import peer_allennlp

SENTENCES = [line.split() for line in text.FIXTURE_TEXT.read_text("utf-8").splitlines()]
SIZES = ["--preset", "tiny", "--rounds", "2", "--batches", "1x8", "--training_batches", "4x6"]
SIZES += ["--vocabulary_size", "400"]
OURS = {"this package", "plain definition", "torch.nn.LSTM", "matrix products alone"}
INT8 = {"int8"} if int8_obstacle() is None else set()
PEER = """
def peer(model):
    def top_layer(encoding):
        return {factor} * model(**encoding).last_hidden_state

    return {{"model": top_layer, "parameters": dict(model.named_parameters())}}
"""


def measured(*arguments):
    return benchmark.main([*SIZES, *arguments])["rows"]


def implementations(rows, part, batch):
    return {row["implementation"] for row in rows if (row["part"], row["batch"]) == (part, batch)}


def write_peer(folder, body):
    file = folder / "their_elmo.py"
    file.write_text(body, "utf-8")
    return f"{file}:peer"


@pytest.mark.slow
def test_every_part_gives_its_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing.gc, "collect", int)  # which takes a second among the objects of all tests
    monkeypatch.setattr(text, "MOST_TEXTS", 30)
    output = tmp_path / "figures.json"
    softmaxes = {"full", "sampled", "sampled-dense", "adaptive", "adaptive-bf16", "adaptive-muon"}
    options = ("--batches", "1x8", "3x5dense", "--softmaxes", *softmaxes, "--output", str(output))
    rows = measured(*options)
    for batch in ("1x8", "3x5dense"):
        assert implementations(rows, "inference", batch) == OURS | INT8
    assert implementations(rows, "training", "4x6") == OURS
    assert implementations(rows, "pretraining", "4x6") == softmaxes
    stored = {"layers stored", "layers computed", "layers stored, torch.nn"}
    for head in ("tagger", "BCN", "ESIM", "reader"):
        assert implementations(rows, "fine_tuning", f"{head}, 4x6") == stored
        for batch in ("1x8", "3x5dense"):
            assert implementations(rows, "heads", f"{head}, {batch}") == {"this package", "its biLM alone"}
    for pre_tokenization in ("whitespace", "moses", "treebank"):
        assert implementations(rows, "tokenizer", f"{pre_tokenization}, 30 texts") == {"this package", "BertTokenizer"}
    figures = json.loads(output.read_text("utf-8"))
    assert figures["rows"] == rows and figures["conditions"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "\ninference, 1x8, 10 tokens\n" in printed


def test_ratios_are_taken_within_a_round(monkeypatch):
    """A round in which the machine is ten times as slow changes no ratio."""
    monkeypatch.setattr(timing.gc, "collect", int)  # which takes a second among the objects of all tests
    calls = []
    names = [timing.Implementation(name, lambda name=name: calls.append(name)) for name in ("ours", "theirs")]
    contest = timing.Contest("part", "batch", 6, "tokens", names)
    timing.measure(contest, 9)
    rounds = ["".join(calls[start : start + 2]) for start in range(2, len(calls), 2)]  # after the check
    assert len(rounds) == 10 and {*rounds} == {"ourstheirs", "theirsours"}
    monkeypatch.setattr(timing, "time_in_turns", lambda *_: [[1.0, 10.0, 1.0], [2.0, 20.0, 2.0]])
    _, theirs = timing.measure(contest, 3)
    assert (theirs["lowest_speedup"], theirs["speedup_of_ours"], theirs["highest_speedup"]) == (2, 2, 2)
    assert (theirs["milliseconds"], theirs["tokens_per_second"], theirs["slowest"]) == (2000, 3, 20000)
    assert theirs["relative_rms_error"] is None


@pytest.mark.parametrize(
    "part, wrong, output",
    [
        ("inference", lambda outputs: 2 * outputs, "vectors"),
        ("training", lambda outputs: 2 * outputs - outputs.detach(), ".*weight"),  # only the gradient
    ],
)
def test_no_figure_for_a_wrong_lstm(part, wrong, output, monkeypatch, capsys):
    def wrong_lstm(*arguments):
        outputs, *states = training_lstm(*arguments)
        return wrong(outputs), *states

    monkeypatch.setitem(directions.KERNELS, part, wrong_lstm)
    with refused(f"'this package' is wrong: its output '{output}' .* no speed is reported"):
        measured("--parts", part)
    assert "speedup" not in capsys.readouterr().out


@pytest.mark.parametrize("part, name", [("fine_tuning", "layers stored"), ("pretraining", "full")])
def test_no_figure_for_a_wrong_step(part, name, monkeypatch):
    monkeypatch.setattr(step_speed, "take_step", lambda loss, *_: {"loss": loss() + 1})
    with refused(f"'{name}' is wrong: its output 'loss'"):
        measured("--parts", part)


def test_relative_error():
    one = torch.ones(3)
    assert timing.relative_rms(1.5 * one, one) == pytest.approx(0.5)
    assert timing.relative_rms(0 * one, 0 * one) == 0
    assert timing.relative_rms(math.nan * one, one) == math.inf
    assert timing.relative_rms(torch.ones(2), one) == math.inf


@pytest.mark.slow
def test_peers(tmp_path):
    """The second one prepares its input outside the clock. It names no parameters, so it is not trained."""
    prepared = (
        "def prepared(model):\n"
        "    prepare = lambda encoding: encoding['character_ids']\n"
        "    return {'prepare': prepare, 'model': lambda ids: model(character_ids=ids).last_hidden_state}\n"
    )
    peer = write_peer(tmp_path, PEER.format(factor=1) + prepared)
    rows = measured("--parts", "inference", "training", "--peer", peer, peer.replace(":peer", ":prepared"))
    assert implementations(rows, "inference", "1x8") == OURS | INT8 | {"peer", "prepared"}
    assert implementations(rows, "training", "4x6") == OURS | {"peer"}


def test_no_figure_for_a_wrong_peer(tmp_path):
    with refused(r"'peer' is wrong: its output .* error of [13].0e\+00"):
        measured("--parts", "inference", "--peer", write_peer(tmp_path, PEER.format(factor=2)))


@pytest.mark.parametrize(
    "options, received",
    [
        (["--peer", "allennlp"], "--peer allennlp.*FILE.py:FUNCTION"),
        (["--peer", f"{__file__}:elmo"], "--peer .*test_benchmark.py:elmo"),
        (["--against", "nowhere"], "nowhere/modeling_elmo"),
        (["--output", "."], r"--output \."),
        (["--batches", "4x20sparse"], "'4x20sparse'.*ROWSxWORDS"),
        (["--training_batches", "100x40dense"], "100x40dense"),
        (["--parts", "heads", "--peer", "there"], "--peer is not read in --parts heads; pass one of inference, "),
        (["--parts", "pretraining", "--peer", "there"], "--peer is not read in --parts pretraining"),
        (["--parts", "fine_tuning", "--against", "there"], "--against is not read in --parts fine_tuning"),
        (["--device", "cuda"], "--device cuda: torch cannot compute on it here"),
        (["--device", "cuda", "--parts", "inference", "tokenizer"], "--device cuda .* leave out .*--parts"),
        (["--device", "cuda", "--against", "there"], "--device cuda .* leave out .*--against"),
    ],
)
def test_mistakes(options, received, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(received, (ValueError, OSError)):
        measured(*options)


@pytest.mark.slow
def test_against_another_checkout(tmp_path):
    """The package of the other folder runs, beside this one."""
    other = tmp_path / "clone"
    for name in ("modeling_elmo", "tokenization"):
        shutil.copytree(ROOT / name, other / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "modeling_elmo" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write("\nprint('the other package:', __name__, __file__)\n")
    short, output = tmp_path / "short.txt", tmp_path / "figures.json"
    short.write_text("\n".join(" ".join(words) for words in SENTENCES[:30]), "utf-8")
    parts = ["--parts", "inference", "heads", "training", "tokenizer", "--against", str(other), "--output", str(output)]
    command = [sys.executable, "-m", "modeling_elmo.run_scripts.benchmark", *SIZES, *parts, "--text_file", str(short)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert f"the other package: modeling_elmo_of_another_checkout {other}" in finished.stdout
    rows = [row for row in json.loads(output.read_text())["rows"] if row["implementation"] == "other checkout"]
    assert [row["part"] for row in rows] == ["inference", *["heads"] * 4, "training", *["tokenizer"] * 3]
    assert all(row["relative_rms_error"] < 1e-5 for row in rows)


def test_allennlp_reads_words_without_markers():
    encoding = model_speed.encode_words([["a", "longer", "one"], ["short"]])
    characters = peer_allennlp.without_markers(encoding)
    assert characters.shape == (2, 3, 50)
    assert torch.equal(characters[0], encoding.character_ids[0, 1:4])
    assert torch.equal(characters[1, :1], encoding.character_ids[1, 1:2]) and not characters[1, 1:].any()


@pytest.mark.skipif(importlib.util.find_spec("allennlp") is None, reason="needs allennlp==2.10.1, without dependencies")
def test_allennlp_agrees():
    peer = f"{peer_allennlp.__file__}:allennlp"
    rows = measured("--parts", "inference", "training", "--peer", peer)
    assert [row["relative_rms_error"] < 1e-5 for row in rows if row["implementation"] == "allennlp"] == [True] * 2


def test_sentences_of_a_batch():
    batch = text.draw_batch(SENTENCES, "32x20", seed=0)
    assert len(batch) == 32 and len(batch[0]) == 20 and all(3 <= len(words) <= 20 for words in batch)
    assert all(words in SENTENCES for words in batch)
    assert batch == text.draw_batch(SENTENCES, "32x20", seed=0) != text.draw_batch(SENTENCES, "32x20", seed=1)
    assert [len(words) for words in text.draw_batch(SENTENCES, "32x20dense", seed=0)] == [20] * 32
    assert [len(words) for words in text.draw_batch(SENTENCES, "2x5dense+1x20", seed=0)] == [5, 5, 20]
    cut = text.draw_batch(SENTENCES, "200x20", seed=0)  # more than there are of up to 20 words
    assert len(cut) == 200 and max(map(len, cut)) == 20


def test_texts(tmp_path, monkeypatch):
    lines = "\n".join(" ".join(words) for words in SENTENCES[:20]) + "\nToo short\n"
    file = tmp_path / "text.txt.gz"
    file.write_bytes(gzip.compress(lines.encode()))
    assert text.read_sentences(str(file)) == SENTENCES[:20]
    assert text.read_sentences(None) == SENTENCES
    (tmp_path / "short.txt").write_text("Too short\n", "utf-8")
    with refused("short.txt has no line of 3 words"):
        text.read_sentences(str(tmp_path / "short.txt"))
    monkeypatch.setattr(text, "FIXTURE_TEXT", tmp_path / "not_there.txt")
    with refused("--text_file"):
        text.read_sentences(None)


def test_bert_has_its_best_case():
    texts = [" ".join(words) for words in SENTENCES]
    tokenizer = text.bert_tokenizer(texts)
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    assert not (encoded.input_ids == tokenizer.unk_token_id).any()
    pieces = int(encoded.attention_mask.sum()) - 2 * len(texts)
    assert pieces < 1.05 * sum(map(len, SENTENCES))


def test_float32_has_no_tf32():
    """torch's own choice for cuDNN is TF32, with 2e-4 of error in a row that says float32."""
    found = {}
    for precision in model_speed.PRECISIONS:

        def call(name=precision):
            products = torch.get_float32_matmul_precision()
            found[name] = products, torch.backends.cudnn.allow_tf32, torch.is_autocast_enabled("cpu")
            return {}

        model_speed.in_precision("ours", call, {}, torch.device("cpu"), precision).call()
    assert found == {
        "float32": ("highest", False, False),
        "tf32": ("high", True, False),
        "bfloat16": ("highest", True, True),
    }
    assert torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "highest"
