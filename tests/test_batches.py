"""Batches of whole sentences and windows of streams, against their definitions; workers, positions and errors."""

import json
import logging
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import islice, pairwise, product, takewhile

import numpy as np
import pytest
import torch
from bilm_models import make_tokenizer
from errors import refused
from places import TEXT

from modeling_elmo import ELMoConfig, ELMoForPreTraining
from modeling_elmo.encoder import pack_words
from modeling_elmo.run_scripts.pretraining.batches import SentenceBatches, StreamWindows, batch_loader
from modeling_elmo.run_scripts.pretraining.corpus import Corpus, CorpusArguments
from modeling_elmo.run_scripts.pretraining.counting import Survey
from modeling_elmo.run_scripts.program.command_line import run
from modeling_elmo.run_scripts.program.sentences import JUDGED_LINES

ENGLISH = (TEXT / "en.txt").read_text("utf-8").splitlines()
KOREAN = (TEXT / "ko.txt").read_text("utf-8").splitlines()
WORDS = sorted({word for line in [*ENGLISH, *KOREAN, "sea is"] for word in line.split()})
TOKENIZER = make_tokenizer(*WORDS, max_word_length=40)
SPLIT = {"is_split_into_words": True}


def two_files():
    """444 lines."""
    return Corpus.from_files([str(TEXT / "en.txt"), str(TEXT / "ko.txt")])


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return Corpus.from_files([str(path)])


def decoded(character_ids, input_ids) -> list[list[str]]:
    """The words of each row without padding, from the characters. They must be the words of the ids."""
    rows = TOKENIZER.decode_characters(character_ids)
    ids = [row[row > 0] for row in input_ids]
    assert rows == [TOKENIZER.convert_ids_to_tokens(row.tolist()) for row in ids]
    return rows


def content(batch):
    inputs = {name: (tensor.dtype, tensor.tolist()) for name, tensor in batch.inputs.items()}
    return inputs, batch.epoch, batch.fraction, batch.num_predictions, batch.num_unknown


def assert_same_batches(batches, expected):
    assert list(map(content, batches)) == list(map(content, expected))


RAW = [line for line in (TEXT / "en_raw.txt").read_text("utf-8").splitlines() if line.strip()]


def batches_of(corpus, tokens, **options):
    return SentenceBatches(corpus, TOKENIZER, tokens, **(SPLIT | options))


def windows_of(corpus, rows, steps, **options):
    return StreamWindows(corpus, TOKENIZER, rows, steps, **(SPLIT | options))


def make(kind, corpus, **options):
    return batches_of(corpus, 500, **options) if kind == "sentences" else windows_of(corpus, 2, 30, **options)


both_kinds = pytest.mark.parametrize("kind", ["sentences", "stream"])


@both_kinds
def test_words_are_packed_in_the_process_of_the_loader(kind, tmp_path):
    config = ELMoConfig(max_word_length=40)
    prefixes = [""] if kind == "sentences" else ["", "backward_"]
    corpus = write(tmp_path / "text.txt", ENGLISH[:40])
    raw = islice(make(kind, corpus), 3)
    for batch, expected in zip(islice(batch_loader(make(kind, corpus, config=config), 1), 3), raw, strict=True):
        assert batch.position == expected.position and batch.num_predictions == expected.num_predictions
        for prefix in prefixes:
            mask = expected.inputs.get(f"{prefix}attention_mask")
            words = pack_words(config, expected.inputs.pop(f"{prefix}character_ids"), attention_mask=mask)
            packed = batch.inputs.pop(f"{prefix}packed_batch")
            assert packed.shape == words.shape and packed.steps.batch_sizes == words.steps.batch_sizes
            for name in ("positions_N", "forward_N", "backward_N", "rows_S", "index_N", "ids_UX"):
                assert torch.equal(getattr(packed, name), getattr(words, name))
        assert batch.inputs.keys() == expected.inputs.keys() - {
            f"{prefix}{name}" for prefix in prefixes for name in ("input_ids", "attention_mask")
        }


def sentences_of(batch):
    rows = decoded(batch.inputs["character_ids"], batch.inputs["input_ids"])
    assert all((row[0], row[-1]) == ("<S>", "</S>") for row in rows)
    return [" ".join(row[1:-1]) for row in rows]


# Sentences


def test_a_batch_of_sentences(tmp_path):
    corpus = write(tmp_path / "a.txt", ["the sea", "zyzzyva the", "", "it was the sea"])
    (batch,) = batches_of(corpus, 18, shuffle=False, repeat=False, survey=corpus.survey())
    the, sea, it, was = map(TOKENIZER.convert_tokens_to_ids, ("the", "sea", "it", "was"))
    assert batch.inputs["input_ids"].tolist() == [
        [1, the, sea, 2, 0, 0],
        [1, 3, the, 2, 0, 0],
        [1, it, was, the, sea, 2],
    ]
    assert batch.inputs["labels"].tolist()[:2] == [[1, the, sea, 2, -100, -100], [1, 3, the, 2, -100, -100]]
    assert batch.inputs["attention_mask"].tolist() == [[1] * 4 + [0] * 2] * 2 + [[1] * 6]
    expected = TOKENIZER(["the sea", "zyzzyva the", "it was the sea"], padding=True, return_tensors="pt")
    assert torch.equal(batch.inputs["character_ids"], expected["character_ids"].to(torch.int16))
    assert (batch.num_predictions, batch.num_unknown, batch.epoch, batch.fraction) == (11, 1, 0, 1.0)


def test_ranks_and_workers_share_one_sequence():
    def batches(rank, world_size, num_workers):
        share = {"rank": rank, "world_size": world_size}
        return list(batch_loader(batches_of(two_files(), 600, shuffle_buffer=100, repeat=False, **share), num_workers))

    whole = batches(0, 1, 0)
    assert Counter(text for batch in whole for text in sentences_of(batch)) == Counter(ENGLISH + KOREAN)
    for world_size, num_workers in ((1, 2), (2, 1), (3, 0)):
        for rank in range(world_size):
            assert_same_batches(batches(rank, world_size, num_workers), whole[rank::world_size])


def test_streamed_data_set_is_read_whole_by_every_worker(tmp_path):
    (tmp_path / "data").mkdir()
    for number, part in enumerate((ENGLISH[:30], ENGLISH[30:60])):
        records = "\n".join(json.dumps({"text": line}) for line in part)
        (tmp_path / "data" / f"train-{number}.jsonl").write_text(records, "utf-8")
    corpus = Corpus.from_arguments(CorpusArguments(dataset=str(tmp_path / "data"), streaming=True))
    assert corpus.survey() is None
    batches = list(batch_loader(batches_of(corpus, 200, repeat=False), num_workers=2))
    assert Counter(text for batch in batches for text in sentences_of(batch)) == Counter(ENGLISH[:60])
    assert batches[0].fraction is None


def test_sentences_continue_from_every_position():
    corpus = two_files()

    def batches(**options):
        return batches_of(corpus, 1500, shuffle_buffer=150, survey=corpus.survey(), **options)

    whole = list(islice(batches(), 30))
    assert {batch.epoch for batch in whole} >= {0, 1}
    for done in range(1, 25):
        assert_same_batches(islice(batches(position=whole[done - 1].position), 5), whole[done : done + 5])
    halves = [list(islice(batches(rank=rank, world_size=2), 4)) for rank in range(2)]
    position = SentenceBatches.merge_positions([half[-1].position for half in halves])
    position = json.loads(json.dumps(position))
    for rank in range(3):
        parts = islice(batch_loader(batches(position=position, rank=rank, world_size=3), 2), 4)
        assert_same_batches(parts, whole[8 + rank : 20 : 3])


@pytest.mark.parametrize("pre_tokenization", ["moses", "treebank", "whitespace"])
def test_no_batch_exceeds_its_tokens(tmp_path, caplog, monkeypatch, pre_tokenization):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    lines = [*RAW, "=" * 300, "a,b.c;d!" * 40, "\u201c" * 100, "word " * 150, "a\x01b\x7f" * 50, *KOREAN]
    corpus = write(tmp_path / "a.txt", lines)
    tokenizer = make_tokenizer(pre_tokenization=pre_tokenization)
    data = SentenceBatches(corpus, tokenizer, 100, is_split_into_words=False, shuffle_buffer=200, repeat=False)
    batches = list(data)
    sizes = [batch.inputs["input_ids"].numel() for batch in batches]
    assert max(sizes) <= 100 < 2 * np.mean(sizes)
    rows = (row for batch in batches for row in tokenizer.decode_characters(batch.inputs["character_ids"]))
    cut = tokenizer.max_word_length - 2
    spelled = (
        word.encode()[:cut].decode("utf-8", "ignore") for line in lines for word in tokenizer.splitter.words(line)
    )
    assert Counter(word for row in rows for word in row[1:-1]) == Counter(spelled)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "a.txt:" in warning and "too many for a batch of 100 tokens" in warning


# Streams


def targets(ids) -> list[list[str]]:
    return [TOKENIZER.convert_ids_to_tokens(row[row != -100].tolist()) for row in ids]


def plain_stream(lines, backward) -> tuple[list[str], list[str]]:
    """The definition: inputs and targets of a row that reads these lines."""
    inputs, predicted = [], []
    for line in lines:
        words = ["<S>", *line.split(), "</S>"]
        words = words[::-1] if backward else words
        inputs += words[:-1]
        predicted += words[1:]
    return inputs, predicted


def rows_of(batches, prefix, number) -> tuple[list[str], list[str]]:
    """Inputs and targets of a row, all windows after each other."""
    inputs, predicted = [], []
    for batch in batches:
        row = slice(number, number + 1)
        inputs += decoded(batch.inputs[f"{prefix}character_ids"][row], batch.inputs[f"{prefix}input_ids"][row])[0]
        predicted += targets(batch.inputs[f"{prefix or 'forward_'}targets"][row])[0]
    return inputs, predicted


@pytest.mark.parametrize("world_size, rows", [(1, 1), (1, 3), (2, 4)])
def test_held_out_text_is_predicted_once(world_size, rows):
    corpus = two_files()
    survey, pieces = corpus.survey(), []
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size, "survey": survey, "shuffle": False, "repeat": False}
        batches = list(batch_loader(windows_of(corpus, rows, 20, **options), rank))
        assert {tuple(batch.inputs["character_ids"].shape) for batch in batches} == {(rows, 20, 40)}
        for row in range(rows):
            forward, backward = rows_of(batches, "", row), rows_of(batches, "backward_", row)
            lines = [line.strip() for line in " ".join(forward[0]).split("<S> ")[1:]]
            assert forward == plain_stream(lines, False) and backward == plain_stream(lines, True)
            pieces.append(lines)
        masked = batches[-1].inputs["forward_targets"] == -100
        if masked.any():
            assert torch.equal(batches[-1].inputs["attention_mask"], (~masked).long())
            assert not batches[-1].inputs["character_ids"][masked].any()
        assert "attention_mask" not in batches[0].inputs
    assert sum(pieces, []) == ENGLISH + KOREAN
    words = [sum(len(line.split()) for line in piece) for piece in pieces]
    assert max(words) - min(words) < 120
    assert sum(batch.num_predictions for batch in batches) == sum(words[-rows:]) + sum(map(len, pieces[-rows:]))


def test_more_rows_than_held_out_sentences(tmp_path):
    corpus = write(tmp_path / "a.txt", ["the sea", "it"])
    (batch,) = windows_of(corpus, 5, 4, shuffle=False, repeat=False, survey=corpus.survey())
    model = ELMoForPreTraining(ELMoConfig.from_preset("tiny", vocab_size=len(TOKENIZER), max_word_length=40))
    assert torch.isfinite(model(**batch.inputs).loss)
    assert batch.num_predictions == 5 and int(batch.inputs["attention_mask"].sum()) == 5


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_block_has_windows_of_its_own(tmp_path, world_size):
    """The rows of all ranks read each block once in an epoch, and each direction in an order of its own."""
    lines = [" ".join([word, *["sea"] * (number % 7)]) for number, word in enumerate(WORDS[:640])]
    corpus = write(tmp_path / "a.txt", lines)
    found = {"": [], "backward_": []}
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size, "repeat": False, "survey": corpus.survey()}
        batches = list(windows_of(corpus, 3, 20, **options))
        assert batches[0].resets.all() and not batches[1].resets.any()
        for (direction, prefix), row in product(enumerate(found), range(3)):
            starts = [number for number, batch in enumerate(batches) if batch.resets[direction, row]]
            for start, end in pairwise([*starts, len(batches)]):
                found[prefix].append(rows_of(batches[start:end], prefix, row))
    for prefix, blocks in found.items():
        expected = [plain_stream(lines[start : start + 64], bool(prefix)) for start in range(0, 640, 64)]
        assert sorted(blocks) == sorted(expected)
    first, second = ([sorted(inputs) for inputs, _ in blocks] for blocks in found.values())
    assert [block[2:4] for block in first] != [block[2:4] for block in second]


@pytest.mark.parametrize("world_size", [1, 2])
def test_streams_continue_from_every_position(world_size):
    corpus = two_files()
    survey = corpus.survey()

    def batches(rank, position=None):
        options = {"rank": rank, "world_size": world_size, "position": position, "survey": survey}
        return windows_of(corpus, 4, 45, shuffle_buffer=100, **options)

    whole = [list(islice(batches(rank), 80 // world_size)) for rank in range(world_size)]
    assert whole[0][0].epoch == 0 and whole[0][-1].epoch == 1
    for done in range(1, len(whole[0]) - 3):
        position = StreamWindows.merge_positions([rank[done - 1].position for rank in whole])
        position = json.loads(json.dumps(position))
        assert StreamWindows.merge_positions([position] * world_size) == position  # no batch followed
        for rank in range(world_size):
            resumed = batch_loader(batches(rank, position), num_workers=int(done % 40 == 1))
            assert_same_batches(islice(resumed, 3), whole[rank][done : done + 3])


def test_every_rank_gets_some_of_a_single_line(tmp_path):
    corpus = write(tmp_path / "a.txt", ["the sea"])
    for rank in range(3):
        batch = next(iter(windows_of(corpus, 2, 4, rank=rank, world_size=3)))
        assert [rows_of([batch], "", row) for row in range(2)] == 2 * [plain_stream(["the sea"], False)]
        batch = next(iter(batches_of(corpus, 9, rank=rank, world_size=3)))
        assert batch.epoch == rank


# Sentences and streams


@both_kinds
def test_order_is_decided_by_seed_and_epoch(kind):
    corpus = Corpus.from_files([str(TEXT / "en.txt")])  # one file, because the order of files changes too

    def lines(seed, epoch=0, **options):
        data = make(kind, corpus, seed=seed, survey=corpus.survey(), **options)
        begun = takewhile(lambda batch: batch.epoch <= epoch, data)
        read = sentences_of if kind == "sentences" else lambda batch: batch.inputs["input_ids"].tolist()
        return [read(batch) for batch in begun if batch.epoch == epoch]

    first, second, other = lines(0), lines(0, 1), lines(1)
    assert first != second and first != other
    if kind == "sentences":
        assert sorted(sum(first, [])) == sorted(sum(second, []))
        assert sorted(first) != sorted(second)  # different sentences share a batch
        assert first != lines(0, shuffle_buffer=120)


@pytest.mark.parametrize("kind, copies", [("sentences", 8), ("stream", 4)])
def test_memory_does_not_grow_with_the_corpus(tmp_path, kind, copies):
    def peak(copies):
        corpus = write(tmp_path / f"{copies}.txt", ENGLISH * copies)
        tracemalloc.start()
        data = make(kind, corpus, shuffle_buffer={"sentences": 1000, "stream": 200}[kind])
        number = sum(1 for _ in takewhile(lambda batch: not batch.epoch, data))
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return number, size

    peak(1)  # fills the table of words
    (few, before), (many, after) = peak(copies), peak(10 * copies)
    assert many > 8 * few and after < 1.2 * before  # of ten times the text


@both_kinds
def test_fraction_of_an_epoch_grows(kind):
    corpus = two_files()
    batches = islice(make(kind, corpus, survey=corpus.survey(), shuffle_buffer=100), 300)
    marks = [batch.epoch + batch.fraction for batch in batches]
    assert marks == sorted(marks) and marks[0] < 0.1 and marks[-1] > 1
    assert np.diff(marks).max() < 0.2  # rows of a stream may already be in the next epoch


# Positions


@pytest.fixture(scope="module")
def corpus():
    return two_files()


BACKWARDS = Corpus.from_files([str(TEXT / "ko.txt"), str(TEXT / "en.txt")])  # with the same number of lines


@pytest.mark.parametrize(
    "kind, others, message",
    [
        ("sentences", {"tokens": 98}, "--per_device_train_batch_tokens 500, but here it is 98.*same value"),
        ("sentences", {"seed": 1}, "--seed 0, but here it is 1"),
        ("sentences", {"is_split_into_words": False}, "--is_split_into_words True, but here it is False"),
        (
            "sentences",
            {"corpus": BACKWARDS},
            r"training text 2 file\(s\) from en.txt on, .* but here it is 2 .* ko.txt",
        ),
        ("stream", {"rows": 3}, "--per_device_train_batch_size 2, but here it is 3"),
        ("stream", {"world_size": 2}, "the number of processes 1, but here it is 2"),
        ("stream", {"survey": Survey(443, 9000)}, "the number of sentences 444, but here it is 443"),
        ("stream", {"survey": Survey(444, 9000)}, r"the number of words \d+, but here it is 9000"),
    ],
)
def test_positions_of_other_batches_are_refused(kind, others, message, corpus):
    """They would be read twice or not at all."""
    if kind == "sentences":
        make_batches, options = batches_of, {"corpus": corpus, "tokens": 500}
    else:
        make_batches, options = windows_of, {"corpus": corpus, "rows": 2, "steps": 30, "survey": corpus.survey()}
    position = next(iter(make_batches(**options))).position
    make_batches(**options, position=position)
    with refused(f"The checkpoint was written with (the )?{message}"):
        make_batches(**options | others, position=position)


def test_positions_of_changed_text_are_refused(corpus):
    survey = corpus.survey()
    position = next(iter(windows_of(corpus, 2, 30, survey=survey))).position
    with refused("--context stream, but here it is sentence"):
        batches_of(corpus, 500, position=position)
    position["ranks"][0][0][0][1] = 100
    with refused(".*en.txt, .*ko.txt has changed since the checkpoint"):
        next(iter(windows_of(corpus, 2, 30, survey=survey, position=position)))
    with refused("the size of a streamed data set is unknown. Leave out --streaming"):
        windows_of(corpus, 2, 30, shuffle=False, repeat=False)


# Workers


PROGRAM = """
import multiprocessing, sys
from itertools import islice
from threading import Thread
import torch
from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.pretraining.batches import SentenceBatches, batch_loader
from modeling_elmo.run_scripts.pretraining.corpus import Corpus

def share():  # as the thread of a worker's queue does
    while True:
        torch.zeros(9).share_memory_()

class WithThread(torch.utils.data.IterableDataset):
    def __iter__(self):
        Thread(target=share, daemon=True).start()
        yield torch.zeros(9)

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", "the"])
    tokenizer(["many texts"] * 100, truncation=True, max_length=3)  # uses the threads of the Rust library
    data = SentenceBatches(Corpus.from_files([sys.argv[2]]), tokenizer, 900, is_split_into_words=False)
    print(sum(batch.num_predictions > 0 for batch in islice(batch_loader(data, num_workers=1), 5)))
    next(iter(batch_loader(WithThread(), num_workers=1)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_are_silent(tmp_path, method):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", method, str(TEXT / "en_raw.txt")]
    environment = {"PYTHONPATH": str(TEXT.parents[2]), "PATH": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("5\n", "")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_mistake_in_the_text_is_an_error_of_the_user(num_workers, tmp_path, monkeypatch, capsys):
    """Also if a worker reads it, whose traceback is not shown."""
    (tmp_path / "a.txt").write_bytes(("a\n" * JUDGED_LINES + "na\xefve\n").encode("latin-1"))
    batches = make("sentences", Corpus.from_files([str(tmp_path / "a.txt")]), repeat=False)
    monkeypatch.setattr(sys, "argv", ["elmo"])
    with pytest.raises(SystemExit) as ended:
        run(lambda: list(batch_loader(batches, num_workers)))
    assert ended.value.code == 2
    assert re.fullmatch(
        rf"elmo: error: {tmp_path}/a.txt, line {JUDGED_LINES + 1} is not UTF-8: .*\n", capsys.readouterr().err
    )
