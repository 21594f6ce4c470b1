"""Counting: against each line split by itself, by any number of processes, stored, interrupted, and shown."""

import gzip
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.pretraining import counting
from modeling_elmo.run_scripts.pretraining.corpus import Corpus
from modeling_elmo.run_scripts.pretraining.counting import count_words, load_counts, most_words
from modeling_elmo.run_scripts.pretraining.split_check import signs_of
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter

ROOT = Path(__file__).parents[1]
TEXTS = Path(__file__).parent / "fixtures" / "text"
LINES = [line for line in (TEXTS / "en.txt").read_text("utf-8").splitlines() if line.strip()]
SPLITTERS = {
    "moses": TextSplitter("moses"),
    "treebank": TextSplitter("treebank"),
    "whitespace": TextSplitter("whitespace"),
    "plain signs": TextSplitter("moses", plain_signs=True),
    "added tokens": TextSplitter("moses", ["[E1]"]),
}


@pytest.fixture
def corpus(tmp_path):
    """A plain file, a compressed one with other letters and added tokens, and one with lists of words."""
    (tmp_path / "a.txt").write_text("\n".join(LINES), "utf-8")
    with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as file:
        file.write("Ich [E1]kannt's nicht … »doch«.\n\nU.S. e.g. 3.5 cannot gonna.\n한국어는 어렵다.\n" * 300)
    rows = [json.dumps({"text": line.split()}) for line in LINES[:50]]
    (tmp_path / "c.jsonl").write_text("\n".join(rows), "utf-8")
    return Corpus.from_files([str(tmp_path / name) for name in ("a.txt", "b.txt.gz", "c.jsonl")])


def counted_by_hand(corpus, splitter):
    words, signs, lengths = Counter(), Counter(), []
    for text in corpus.texts():
        of_text = splitter.words(text) if isinstance(text, str) else text
        words.update(of_text)
        lengths.append(len(of_text))
        signs.update(signs_of(text.split() if isinstance(text, str) else text))
    return len(lengths), max(lengths), words, signs


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("splitter", SPLITTERS.values(), ids=SPLITTERS)
def test_counts_are_those_of_each_line(splitter, processes, corpus):
    found = count_words(corpus, splitter, processes=processes)
    assert (found.lines, found.longest, found.words, found.signs) == counted_by_hand(corpus, splitter)
    assert found.is_split == (splitter.name != "whitespace")


@pytest.mark.parametrize("processes", [1, 2])
def test_held_out_sentences_that_occur(processes, corpus, tmp_path):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("\n".join([LINES[3], LINES[3].replace(" ", "  "), "Nobody wrote this .", LINES[7]]), "utf-8")
    found = count_words(corpus, SPLITTERS["moses"], Corpus.from_files([str(held_out)]), processes=processes)
    assert (found.known, found.held_out) == (3, 4)


def test_ids_are_those_of_a_batch():
    tokenizer = ELMoTokenizer.from_pretrained(Path(__file__).parents[1] / "model_cards" / "elmo-small-en")
    words = [*SPLITTERS["treebank"].words(" ".join(LINES)), "“", "<S>", "</S>", "<UNK>", "x" * 90, "ﬁ"]
    ids = tokenizer(words, is_split_into_words=True, add_special_tokens=False).input_ids
    assert [tokenizer.word_table.id_of(word) for word in words] == ids


@given(st.text("ab's.,!-…“'»9 \tx\u0301한cannotgonna", max_size=60))
def test_a_text_has_at_most_so_many_words(text):
    for splitter in SPLITTERS.values():
        assert len(splitter.words(text)) <= most_words(text, len(text.split()))


@pytest.fixture
def any_size_is_large(monkeypatch):
    monkeypatch.setattr(counting, "MANY_BYTES", 0)
    monkeypatch.setattr(counting, "available_cores", lambda: 2)


def test_files_are_counted_once(corpus, tmp_path, any_size_is_large, monkeypatch, capsys):
    stored = tmp_path / "out" / "counts.json.gz"
    splitter = SPLITTERS["moses"]
    found = count_words(corpus, splitter, stored=stored)
    assert found == count_words(corpus, splitter)
    with monkeypatch.context() as broken:
        broken.setattr(Corpus, "texts", lambda _: pytest.fail("it was read"))
        assert count_words(corpus, splitter, stored=stored) == found
        assert f"{stored} has the counts of" in capsys.readouterr().out
        for other in (SPLITTERS["treebank"], SPLITTERS["plain signs"]):
            assert load_counts(stored, counting.source_of(corpus, other, None)) is None
        assert load_counts(stored, counting.source_of(corpus, splitter, corpus)) is None
    file = Path(corpus.files[0])
    os.utime(file, (1, 1))  # as after a change
    file.write_text("\n".join([*LINES, "One more."]), "utf-8")
    assert count_words(corpus, splitter, stored=stored).lines == found.lines + 1
    whole = stored.read_bytes()
    for damaged in (whole[:100], whole[:10] + b"\xff" * 50 + whole[60:]):
        stored.write_bytes(damaged)
        assert count_words(corpus, splitter, stored=stored).lines == found.lines + 1


def test_errors_of_a_process(corpus, any_size_is_large, monkeypatch):
    Path(corpus.files[2]).write_text('{"text": "a b"}\n{"text": 3}\n', "utf-8")
    with pytest.raises(ValueError, match=r"c\.jsonl:2: the text is 3"):
        count_words(corpus, SPLITTERS["moses"])
    monkeypatch.setattr(counting, "_count_share", lambda *_: os._exit(1))
    with pytest.raises(ChildProcessError, match="ended without a result"):
        count_words(corpus, SPLITTERS["moses"])


@pytest.mark.parametrize("processes", [1, 2])
def test_the_bar_counts_bytes_to_the_end(processes, corpus, monkeypatch):
    bars, make = [], counting.tqdm

    def bar_of(**options):
        bars.append(make(**options, disable=False))
        return bars[-1]

    monkeypatch.setattr(counting, "tqdm", bar_of)
    count_words(corpus, SPLITTERS["moses"], processes=processes)
    (bar,) = bars
    assert bar.n == bar.total == sum(os.path.getsize(file) for file in corpus.files)


KILLED = """
import os, sys, time
from modeling_elmo.run_scripts.pretraining import counting
from modeling_elmo.run_scripts.pretraining.corpus import WHITESPACE, Corpus

def wait(corpus, tally, *_):
    print(os.getpid(), flush=True)
    time.sleep(600)

counting._count_share = wait
counting.count_words(Corpus.from_files([sys.argv[1]]), WHITESPACE, processes=2)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signal 0 ends a process there")
def test_processes_end_with_a_parent_that_is_killed(corpus):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, corpus.files[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        children = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    end = time.monotonic() + 30
    for child in children:
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < end:
                os.kill(child, 0)
                time.sleep(0.1)
