import json
import os
import re
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import zstandard
from datasets import Dataset, DatasetDict
from errors import refused
from places import TEXT
from task_worker import written

from modeling_elmo.run_scripts.pretraining.corpus import WHITESPACE, Corpus, CorpusArguments
from modeling_elmo.run_scripts.pretraining.counting import Survey, count_words
from modeling_elmo.run_scripts.program.texts import TextArguments
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter

ENGLISH = (TEXT / "en.txt").read_text("utf-8").splitlines()


def corpus_of(*paths, column="text"):
    return Corpus.from_files(list(map(str, paths)), column)


def texts(corpus):
    return [text for _, text in corpus.sentences(shuffle_files=False)]


def test_files_of_every_kind(tmp_path):
    parts = [ENGLISH[start : start + 50] for start in range(0, 250, 50)]
    (tmp_path / "below").mkdir()
    (tmp_path / "a.txt").write_bytes("\r\n".join(["\ufeff", *parts[0], " \t"]).encode())
    written(tmp_path / "b.txt.gz", "\n".join(parts[1]))
    halves = ["\n".join(parts[2])[:777], "\n".join(parts[2])[777:]]  # two frames, and a line that is in both
    (tmp_path / "c.txt.zst").write_bytes(b"".join(zstandard.compress(half.encode()) for half in halves))
    records = [json.dumps({"t": "\n\n".join(parts[3])}), "", json.dumps({"t": " "}), json.dumps({"t": []})]
    (tmp_path / "d.JSONL").write_text("\n".join(records), "utf-8")
    written(tmp_path / "below" / "e.jsonl.ZST", "\n".join(json.dumps({"t": line.split()}) for line in parts[4]))
    written(tmp_path / "g.conll.gz", "c X\nd X\n")
    (tmp_path / "news-00001-of-00100").write_text("only by name", "utf-8")

    names = ["a.txt", "b.txt.gz", "c.txt.zst", "d.JSONL", "below/e.jsonl.ZST"]
    whole = corpus_of(*(tmp_path / name for name in names), column="t")
    assert [text if isinstance(text, str) else " ".join(text) for text in texts(whole)] == ENGLISH
    words = [line.split() for line in ENGLISH]
    lengths = Counter(len(word.encode()) for sentence in words for word in sentence)
    assert whole.survey() == Survey(250, sum(map(len, words)), max(map(len, words)), lengths)
    assert next(whole.sentences(shuffle_files=False))[0] == (str(tmp_path / "a.txt"), 2)

    folder = corpus_of(tmp_path, tmp_path / "a.txt", column="t")
    assert sorted(folder.files) == sorted([*whole.files, str(tmp_path / "g.conll.gz")])
    assert texts(folder)[-1] == ["c", "d"]
    some = corpus_of(tmp_path / "*.txt*", tmp_path / "**" / "e*", tmp_path / "news*", column="t")
    expected = ["a.txt", "b.txt.gz", "c.txt.zst", "e.jsonl.ZST", "news-00001-of-00100"]
    assert [Path(file).name for file in some.files] == expected


def test_data_sets(tmp_path):
    data = Dataset.from_dict({"text": [*ENGLISH[:5], "", "\n".join(ENGLISH[5:8])], "other": [0] * 7})
    DatasetDict({"dev": data}).save_to_disk(tmp_path / "data")
    corpus = Corpus.from_arguments(CorpusArguments(dataset=str(tmp_path / "data"), split="dev"))
    assert texts(corpus) == ENGLISH[:8] and corpus.survey().lines == 8
    assert [place for place, _ in corpus.sentences()][4:] == [(str(tmp_path / "data"), row) for row in (4, 6, 6, 6)]
    assert corpus.order == "data (split dev)"  # a checkpoint can be resumed after the folder was moved
    assert replace(corpus, dataset=TextArguments(dataset="user/name", split="dev")).order == "user/name (split dev)"


def test_parts_of_files_and_of_saved_data_sets(tmp_path):
    """As `datasets` reads parts of a data set with the same rows."""
    names = ("a.txt", "b.txt", "c.txt")
    for name, lines in zip(names, (ENGLISH[:4], ["", *ENGLISH[4:5]], ENGLISH[5:20]), strict=True):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    files = [str(tmp_path / name) for name in names]
    data = Dataset.from_dict({"text": ENGLISH[:20]})
    DatasetDict({"train": data}).save_to_disk(tmp_path / "saved")
    (tmp_path / "hub").mkdir()
    data.to_json(tmp_path / "hub" / "train.jsonl")
    for train, held_out, first, last in (
        ("train[:90%]", "train[90%:]", 18, 20),
        ("train[3:]", "train[:3]", 0, 3),
        ("train[:3]+train[7:]", "train[3:7]", 3, 7),
    ):
        options = {"split": train, "validation_split": held_out}
        wanted = [ENGLISH[:first] + ENGLISH[last:20], ENGLISH[first:last]]
        for source in ({"train_file": files}, *({"dataset": str(tmp_path / name)} for name in ("saved", "hub"))):
            arguments = CorpusArguments(**source, **options)
            assert [texts(Corpus.from_arguments(arguments)), texts(Corpus.held_out(arguments))] == wanted
    corpus = Corpus.from_arguments(CorpusArguments(train_file=files, split="train[2:6]"))
    assert sorted(text for _, text in corpus.sentences(1, 5)) == sorted(ENGLISH[2:6])  # files in another order
    assert next(corpus.sentences(shuffle_files=False))[0] == (files[0], 3)
    assert str(corpus).endswith("c.txt (split train[2:6])") and corpus.order.endswith(", train[2:6]")
    for source in ({"train_file": files}, {"dataset": str(tmp_path / "saved")}):
        with refused(r"--split dev.* The splits are \['train'\]"):
            Corpus.from_arguments(CorpusArguments(**source, split="dev"))
    for options in ({}, {"train_file": files, "validation_split": "train", "validation_file": files}):
        with refused("Pass either --validation_file FILE"):
            Corpus.held_out(CorpusArguments(**options))


def test_the_order_of_files_changes_with_seed_and_epoch(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"{number} a\n{number} b\n")
    corpus = corpus_of(tmp_path)
    orders = [" ".join(text for _, text in corpus.sentences(*order)) for order in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert orders[0] == orders[1] and len(set(orders)) == 3
    assert all(f"{number} a {number} b" in order for order in orders for number in range(8))
    assert texts(corpus)[:3] == ["0 a", "0 b", "1 a"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_name_that_is_not_utf8_is_refused_in_a_folder(tmp_path):
    for name in ("plain.txt", os.fsdecode(b"caf\xe9.txt")):
        (tmp_path / name).write_text("a b\n")
    with refused(f"^{tmp_path}/caf\udce9.txt is not UTF-8; .* rename the file"):
        corpus_of(tmp_path)


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("none*.txt", FileNotFoundError, r"none\*.txt: no file found. Pass files, patterns .*, or folders"),
        ("*.txt", ValueError, "fine.txt and .*link.txt are the same file"),
        ("pipe", ValueError, "pipe is a pipe"),
        ("blank.text", ValueError, "no sentence in .*blank.text"),
        ("empty.gz", ValueError, "empty.gz cannot be unpacked"),
        ("number.jsonl", ValueError, r"number.jsonl:2: the text is 3"),
    ],
)
def test_bad_text(tmp_path, name, error, message):
    (tmp_path / "fine.txt").write_text("fine")
    (tmp_path / "link.txt").symlink_to(tmp_path / "fine.txt")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "blank.text").write_text("\n \n")
    (tmp_path / "empty.gz").touch()
    (tmp_path / "number.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    with refused(message, error):
        corpus_of(tmp_path / name).survey()


def test_held_out_sentences_in_the_training_text(tmp_path, caplog):
    """A sentence counts as often as the held-out text has it; white space and the kind of file do not matter."""
    (tmp_path / "train.txt").write_text("a b\nc d\na b\ne f\n")
    records = [{"text": text} for text in (["a", "b"], " c  d", "a b", "a")]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "other.txt").write_text("a\nb\n")
    train, held_out, other = (corpus_of(tmp_path / name) for name in ("train.txt", "held_out.jsonl", "other.txt"))
    assert train.survey(other) == train.survey() and not caplog.text
    assert train.survey(held_out) == train.survey()
    assert "3 of 4 held-out sentences occur in the training text" in caplog.text and "train.txt" in caplog.text


def test_a_survey_counts_the_words_and_lengths_of_a_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("Well, 밥밥 (yes).\n", "utf-8")
    corpus = corpus_of(tmp_path / "a.txt")
    assert corpus.survey(None, TextSplitter("moses")) == Survey(1, 7, 7, {4: 1, 1: 4, 6: 1, 3: 1})
    assert corpus.survey(None, TextSplitter("moses"), "lexicon").lengths == {4: 1, 1: 4, 2: 1, 3: 1}


RAW = ["He didn't come.", "It's late, isn't it?", "They couldn't see John's house.", "Nobody came."]
OF_TREEBANK = ["He did n't come .", "It 's late , is n't it ?", "They could n't see John 's house .", "Nobody came ."]
OF_MOSES = ["He didn 't come .", "It 's late , isn 't it ?", "They couldn 't see John 's house .", "Nobody came ."]
TYPOGRAPHIC = [line.replace("'", "’") for line in OF_TREEBANK]
DUTCH = ["'s Avonds ligt 't in 't park.", "Hij don van 't dak, 's nachts.", "Foto's van 's morgens."]  # don: borrowed
POSSESSIVE = ["The firm 's profit rose .", "Yesterday 's news .", "Our president 's words ."]
FRENCH = ["L' homme qu' il a vu .", "C' est l' été ."]
BRACKETS = ["The firm 's profit -LRB- 3 % -RRB- rose .", "Our president 's -LRB- last -RRB- words ."]
NEW_RULES = "split into words as by the rules {} .* Pass --pre_tokenization {} for a new model"
BOTH = "split into words as by the rules {} .* Pass --pre_tokenization {} --is_split_into_words for"
ALREADY = "is split into words already, .* Pass --is_split_into_words"
SPLIT_TEXTS = [  # lines, the rules of the tokenizer, whether the words are given, and what a warning says
    (OF_TREEBANK, "moses", True, NEW_RULES.format("treebank", "treebank")),
    (OF_TREEBANK, "moses", False, BOTH.format("treebank", "treebank")),
    (TYPOGRAPHIC, "moses", True, NEW_RULES.format("treebank", "treebank")),
    ([*OF_TREEBANK, *OF_TREEBANK, *OF_MOSES], "moses", True, NEW_RULES.format("treebank", "treebank")),
    (OF_TREEBANK, "treebank", True, None),
    (OF_TREEBANK, "treebank", False, None),
    (OF_TREEBANK, "whitespace", True, None),
    (OF_MOSES, "treebank", True, NEW_RULES.format("moses", "moses")),
    (OF_MOSES, "treebank", False, BOTH.format("moses", "moses")),
    (OF_MOSES, "moses", True, None),
    (OF_MOSES, "moses", False, ALREADY),
    (POSSESSIVE, "moses", False, ALREADY),  # ' and s
    (POSSESSIVE, "moses", True, None),  # as both rules do
    (POSSESSIVE, "treebank", True, None),
    (BRACKETS, "moses", True, NEW_RULES.format("treebank", "treebank")),
    (BRACKETS, "treebank", True, r"has -LRB- and -RRB- where raw text has \( and \), which this text lacks. Write"),
    (["Le vin -LRB- rouge -RRB- ."], "moses", True, "has -LRB- and -RRB- where"),
    ([*OF_TREEBANK, "He said (no) -LRB- yes -RRB- ( ) ."], "treebank", True, None),  # it has both
    *((*each, None) for each in product((RAW, DUTCH, FRENCH), ("moses", "treebank"), (False, True))),
    ([*RAW, "The words n't and 't differ."], "moses", False, None),
]


@pytest.mark.parametrize("lines, rules, given, message", SPLIT_TEXTS)
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_text_that_was_split_by_other_rules(suffix, lines, rules, given, message, tmp_path, caplog):
    """Split by hand. Lists of words are given words, whatever the options say."""
    is_split_again = not given and suffix == ".txt"
    if suffix == ".jsonl":
        stored = [json.dumps({"text": line.split()}) for line in lines]
        message = None if message == ALREADY else message and message.replace(" --is_split_into_words", "")
    else:
        stored = lines
    path = tmp_path / f"a{suffix}"
    path.write_text("\n".join(stored * 5), "utf-8")
    corpus = corpus_of(path)
    splitter = WHITESPACE if given else TextSplitter(rules)
    corpus.survey(None, splitter, "utf8", None, rules)
    assert bool(caplog.messages) == (message is not None) and all(str(path) in each for each in caplog.messages)
    if message is not None:
        assert re.search(message, caplog.text)
        assert ("--is_split_into_words" in caplog.text) == (is_split_again and "-LRB-" not in message)
    told = [*caplog.messages]
    caplog.clear()
    count_words(corpus, splitter).warn_of_rules(corpus, rules)  # of `elmo vocabulary`
    assert caplog.messages == told


def test_what_the_rules_make_of_raw_text_is_what_the_survey_looks_for():
    assert [" ".join(TextSplitter("treebank").words(line)) for line in RAW] == OF_TREEBANK
    assert [" ".join(TextSplitter("moses").words(line)) for line in RAW] == OF_MOSES


def test_a_text_may_mention_the_words_of_other_rules(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("\n".join(["Nobody came ."] * 40_000 + OF_TREEBANK), "utf-8")
    corpus_of(tmp_path / "a.txt").survey(None, WHITESPACE, "utf8", None, "moses")
    assert not caplog.text
