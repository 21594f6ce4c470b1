import json
import logging
import pickle
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import islice, pairwise, takewhile
from pathlib import Path

import numpy as np
import pytest
import torch

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.run_scripts.pretraining.streams import (
    Corpus,
    CorpusArguments,
    SentenceBatches,
    StreamWindows,
    Survey,
    data_loader,
)

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "tests" / "fixtures" / "text"
ENGLISH = (TEXT / "en.txt").read_text(encoding="utf-8").splitlines()
KOREAN = (TEXT / "ko.txt").read_text(encoding="utf-8").splitlines()
RAW = [line for line in (TEXT / "en_raw.txt").read_text(encoding="utf-8").splitlines() if line.strip()]
WORDS = sorted({word for line in [*ENGLISH, *KOREAN, "sea is"] for word in line.split()})
TOKENIZER = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", *WORDS], max_word_length=40)
SPLIT = {"is_split_into_words": True}


@pytest.fixture
def corpus() -> Corpus:
    """444 lines in two files."""
    return Corpus.from_files([str(TEXT / "en.txt"), str(TEXT / "ko.txt")])


def write(path: Path, lines) -> Corpus:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return Corpus.from_files([str(path)])


def decoded(character_ids, input_ids) -> list[list[str]]:
    """Each row's words, from the characters, which must be those of the ids; padding left out."""
    rows = TOKENIZER.decode_characters(character_ids)
    ids = [row[row > 0] for row in input_ids]
    assert rows == [TOKENIZER.convert_ids_to_tokens(row.tolist()) for row in ids]
    return rows


def targets(labels) -> list[list[str]]:
    return [TOKENIZER.convert_ids_to_tokens(row[row != -100].tolist()) for row in labels]


def sentences_of(batch) -> list[str]:
    rows = decoded(batch.inputs["character_ids"], batch.inputs["input_ids"])
    assert all((row[0], row[-1]) == ("<S>", "</S>") for row in rows)
    return [" ".join(row[1:-1]) for row in rows]


def content(batch) -> tuple:
    inputs = {name: (tensor.dtype, tensor.tolist()) for name, tensor in batch.inputs.items()}
    return inputs, batch.epoch, batch.fraction, batch.places, batch.num_predictions, batch.num_unknown


def assert_same(batches, expected):
    batches, expected = list(map(content, batches)), list(map(content, expected))
    assert len(batches) == len(expected)
    assert all(one == other for one, other in zip(batches, expected, strict=True))


def tiny_model() -> ELMoForPreTraining:
    sizes = {"char_embedding_size": 4, "char_cnn_filters": [[1, 4], [2, 4]], "projection_size": 8}
    return ELMoForPreTraining(
        ELMoConfig(vocab_size=len(TOKENIZER), max_word_length=40, lstm_hidden_size=16, **sizes)
    ).train()


# --- sentences


def test_a_batch_of_sentences(tmp_path):
    corpus = write(tmp_path / "a.txt", ["the sea", "zyzzyva the", "", "it was the sea"])
    (batch,) = SentenceBatches(corpus, TOKENIZER, 18, shuffle=False, repeat=False, survey=corpus.survey(), **SPLIT)
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
    assert batch.places == [(str(tmp_path / "a.txt"), line) for line in (1, 2, 4)]


def test_ranks_and_workers_share_one_sequence(corpus):
    def batches(rank, world_size, num_workers):
        data = SentenceBatches(
            corpus, TOKENIZER, 600, shuffle_buffer=100, repeat=False, rank=rank, world_size=world_size, **SPLIT
        )
        return list(data_loader(data, num_workers))

    whole = batches(0, 1, 0)
    assert Counter(text for batch in whole for text in sentences_of(batch)) == Counter(ENGLISH + KOREAN)
    for world_size in (1, 2, 3):
        for num_workers in (0, 1, 2) if world_size < 3 else (2,):
            for rank in range(world_size):
                assert_same(batches(rank, world_size, num_workers), whole[rank::world_size])


def test_streamed_data_set_is_read_whole_by_every_worker(tmp_path):
    (tmp_path / "data").mkdir()
    for number, part in enumerate((ENGLISH[:30], ENGLISH[30:60])):
        records = "\n".join(json.dumps({"text": line}) for line in part)
        (tmp_path / "data" / f"train-{number}.jsonl").write_text(records, encoding="utf-8")
    corpus = Corpus.from_dataset(CorpusArguments(dataset=str(tmp_path / "data"), streaming=True), "train")
    assert corpus.survey() is None
    batches = list(data_loader(SentenceBatches(corpus, TOKENIZER, 200, repeat=False, **SPLIT), num_workers=2))
    assert Counter(text for batch in batches for text in sentences_of(batch)) == Counter(ENGLISH[:60])
    assert batches[0].fraction is None


def test_sentences_go_on_from_every_position(corpus):
    def batches(**options):
        return SentenceBatches(corpus, TOKENIZER, 1500, shuffle_buffer=150, survey=corpus.survey(), **SPLIT, **options)

    whole = list(islice(batches(), 30))
    assert {batch.epoch for batch in whole} >= {0, 1}
    for done in range(1, 25):
        assert_same(islice(batches(position=whole[done - 1].position), 5), whole[done : done + 5])
    halves = [list(islice(batches(rank=rank, world_size=2), 4)) for rank in range(2)]
    position = SentenceBatches.merge_positions([half[-1].position for half in halves])
    position = json.loads(json.dumps(position))
    for rank in range(3):
        parts = islice(data_loader(batches(position=position, rank=rank, world_size=3), 2), 4)
        assert_same(parts, whole[8 + rank : 20 : 3])


@pytest.mark.parametrize("kind", ["sentences", "stream"])
def test_order_is_decided_by_seed_and_epoch(kind):
    corpus = Corpus.from_files([str(TEXT / "en.txt")])  # one, as the order of files changes too

    def places(seed, epoch=0, **options):
        if kind == "sentences":
            data = SentenceBatches(corpus, TOKENIZER, 1000, seed=seed, **SPLIT, **options)
        else:
            data = StreamWindows(corpus, TOKENIZER, 1, 50, seed=seed, survey=corpus.survey(), **SPLIT, **options)
        begun = takewhile(lambda batch: batch.epoch <= epoch, data)
        return [batch.places for batch in begun if batch.epoch == epoch]

    assert places(0) == places(0)
    first, second, other = places(0), places(0, 1), places(1)
    assert first != second and first != other
    if kind == "sentences":
        assert sorted(sum(first, [])) == sorted(sum(second, []))
        assert sorted(first) != sorted(second)  # other sentences together
        assert first != places(0, shuffle_buffer=120)


@pytest.mark.parametrize("pre_tokenization", ["moses", "treebank", "whitespace"])
def test_no_batch_is_over_its_budget(tmp_path, caplog, monkeypatch, pre_tokenization):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    lines = [*RAW, "=" * 300, "a,b.c;d!" * 40, "\u201c" * 100, "word " * 150, "a\x01b\x7f" * 50, *KOREAN]
    corpus = write(tmp_path / "a.txt", lines)
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>"], pre_tokenization=pre_tokenization)
    data = SentenceBatches(corpus, tokenizer, 100, is_split_into_words=False, shuffle_buffer=200, repeat=False)
    batches = list(data)
    sizes = [batch.inputs["input_ids"].numel() for batch in batches]
    assert max(sizes) <= 100 < 2 * np.mean(sizes)
    read = Counter(
        word
        for batch in batches
        for row in tokenizer.decode_characters(batch.inputs["character_ids"])
        for word in row[1:-1]
    )
    cut = tokenizer.max_word_length - 2
    spelled = (
        word.encode()[:cut].decode("utf-8", "ignore") for line in lines for word in tokenizer.splitter.words(line)
    )
    assert read == Counter(spelled)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "a.txt:" in warnings[0] and "more than a batch of 100 tokens has room for" in warnings[0]


def test_a_long_line_is_cut(tmp_path):
    corpus = write(tmp_path / "a.txt", ["the sea", "a b c d e f g h i j k"])
    batches = list(SentenceBatches(corpus, TOKENIZER, 6, repeat=False, survey=Survey(2, 13), **SPLIT))
    assert sorted(batch.places[0][1] for batch in batches) == [1, 2, 2, 2]
    lengths = sorted(batch.num_predictions - 1 for batch in batches)
    assert lengths == [2, 3, 4, 4]
    assert batches[-1].fraction == 1.0


@pytest.mark.parametrize("kind, copies", [("sentences", 8), ("stream", 12)])
def test_memory_does_not_grow_with_the_corpus(tmp_path, kind, copies):
    def peak(copies):
        corpus = write(tmp_path / f"{copies}.txt", ENGLISH * copies)
        tracemalloc.start()
        if kind == "sentences":
            data = SentenceBatches(corpus, TOKENIZER, 500, shuffle_buffer=1000, **SPLIT)
        else:
            data = StreamWindows(corpus, TOKENIZER, 3, 60, shuffle_buffer=200, **SPLIT)
        number = sum(1 for _ in takewhile(lambda batch: not batch.epoch, data))
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return number, size

    peak(1)  # fills the table of words
    (few, before), (many, after) = peak(copies), peak(10 * copies)
    assert many > 8 * few and after < 1.05 * before


# --- streams


def windows(corpus: Corpus, unroll_steps: int, **options) -> list[tuple]:
    """For every window of one row: forward inputs and targets, backward inputs and targets."""
    data = StreamWindows(
        corpus, TOKENIZER, 1, unroll_steps, shuffle=False, repeat=False, survey=corpus.survey(), **SPLIT
    )
    result = []
    for batch in data:
        inputs = batch.inputs
        forward = decoded(inputs["character_ids"], inputs["input_ids"]), targets(inputs["forward_targets"])
        backward = decoded(inputs["backward_character_ids"], inputs["backward_input_ids"])
        parts = *forward, backward, targets(inputs["backward_targets"])
        result.append(tuple(" ".join(rows[0]) for rows in parts))
    return result


def test_windows_of_four(tmp_path):
    corpus = write(tmp_path / "a.txt", ["the sea was", "it is"])
    assert windows(corpus, 4) == [
        ("<S> the sea was", "the sea was </S>", "</S> is it </S>", "is it <S> was"),
        ("<S> it is", "it is </S>", "was sea the", "sea the <S>"),
    ]


def test_windows_of_two(tmp_path):
    corpus = write(tmp_path / "a.txt", ["the sea was", "it is"])
    assert windows(corpus, 2) == [
        ("<S> the", "the sea", "</S> is", "is it"),
        ("sea was", "was </S>", "it </S>", "<S> was"),
        ("<S> it", "it is", "was sea", "sea the"),
        ("is", "</S>", "the", "<S>"),
    ]


def plain_stream(lines: list[str], backward: bool) -> tuple[list[str], list[str]]:
    """The definition: inputs and targets of a row that reads these lines."""
    inputs, predicted = [], []
    for line in reversed(lines) if backward else lines:
        words = ["<S>", *line.split(), "</S>"]
        words = words[::-1] if backward else words
        inputs += words[:-1]
        predicted += words[1:]
    return inputs, predicted


def rows_of(batches, prefix: str, number: int) -> tuple[list[str], list[str]]:
    """Inputs and targets of a row, all windows after each other."""
    inputs, predicted = [], []
    for batch in batches:
        row = slice(number, number + 1)
        inputs += decoded(batch.inputs[f"{prefix}character_ids"][row], batch.inputs[f"{prefix}input_ids"][row])[0]
        predicted += targets(batch.inputs[f"{prefix or 'forward_'}labels"][row])[0]
    return inputs, predicted


@pytest.mark.parametrize("world_size, rows", [(1, 1), (1, 3), (2, 4)])
def test_held_out_text_is_predicted_once(corpus, world_size, rows):
    survey, pieces = corpus.survey(), []
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size, "survey": survey, "shuffle": False, "repeat": False}
        batches = list(data_loader(StreamWindows(corpus, TOKENIZER, rows, 20, **options, **SPLIT), rank))
        assert {tuple(batch.inputs["character_ids"].shape) for batch in batches} == {(rows, 20, 40)}
        for row in range(rows):
            forward, backward = rows_of(batches, "", row), rows_of(batches, "backward_", row)
            lines = " ".join(forward[0]).split("<S> ")[1:]
            lines = [line.strip() for line in lines]
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
    data = StreamWindows(corpus, TOKENIZER, 5, 4, shuffle=False, repeat=False, survey=corpus.survey(), **SPLIT)
    (batch,) = data
    assert torch.isfinite(tiny_model()(**batch.inputs).loss)
    assert batch.num_predictions == 5 and int(batch.inputs["attention_mask"].sum()) == 5


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_read_blocks_of_lines_and_all_of_them_in_an_epoch(corpus, world_size):
    lines = ENGLISH + KOREAN
    for prefix in ("", "backward_"):
        read = Counter()
        for rank in range(world_size):
            options = {"rank": rank, "world_size": world_size, "repeat": False, "survey": corpus.survey()}
            data = StreamWindows(corpus, TOKENIZER, 3, 20, **options, **SPLIT)
            assert data.block_lines == min(64, 444 // (3 * world_size))
            batches = list(data)
            for row in range(3):
                inputs, predicted = rows_of(batches, prefix, row)
                first = "</S>" if prefix else "<S>"
                texts = [part.split() for part in " ".join(inputs).split(first)[1:]]
                texts = [" ".join(words[::-1] if prefix else words) for words in texts]
                assert (inputs, predicted) == plain_stream(texts[::-1] if prefix else texts, bool(prefix))
                order = [lines.index(text) for text in texts]
                jumps = sum(after - before != (-1 if prefix else 1) for before, after in pairwise(order))
                assert jumps <= 1 + len(order) // data.block_lines + 2  # repeated lines
                read.update(texts)
        assert read == Counter(lines)


def test_each_direction_reads_blocks_in_its_own_order(tmp_path):
    corpus = write(tmp_path / "a.txt", range(640))
    data = StreamWindows(corpus, TOKENIZER, 1, 2, repeat=False, **SPLIT)  # a line of one word in each window
    places = np.array([[line for _, line in batch.places] for batch in data])
    blocks = (places - 1)[::64] // 64
    assert np.array_equal(np.sort(blocks, axis=0), np.arange(10)[:, None].repeat(2, axis=1))
    assert not np.array_equal(blocks[:, 0], blocks[:, 1])


def test_a_block_has_windows_of_its_own(tmp_path):
    lines = [" ".join([word, *["sea"] * (number % 7)]) for number, word in enumerate(WORDS[:640])]
    corpus = write(tmp_path / "a.txt", lines)
    batches = list(StreamWindows(corpus, TOKENIZER, 3, 20, repeat=False, survey=corpus.survey(), **SPLIT))
    assert batches[0].begins.all() and not batches[1].begins.any()
    for direction, prefix in enumerate(("", "backward_")):
        blocks = []
        for row in range(3):
            starts = [number for number, batch in enumerate(batches) if batch.begins[direction, row]]
            for start, end in pairwise([*starts, len(batches)]):
                blocks.append(rows_of(batches[start:end], prefix, row))
        expected = [plain_stream(lines[start : start + 64], bool(prefix)) for start in range(0, 640, 64)]
        assert sorted(blocks) == sorted(expected)


def test_another_text_has_other_positions(tmp_path):
    """Of the same number of lines, which would be read twice or not at all."""
    for name, lines in (("a.txt", ENGLISH[:20]), ("b.txt", ENGLISH[20:50])):
        write(tmp_path / name, lines)

    def batches(*names, is_split_into_words=True, position=None):
        corpus = Corpus.from_files([str(tmp_path / name) for name in names])
        options = {"is_split_into_words": is_split_into_words, "position": position, "survey": corpus.survey()}
        return SentenceBatches(corpus, TOKENIZER, 200, **options)

    position = next(iter(batches("a.txt", "b.txt"))).position
    batches("a.txt", "b.txt", position=position)
    with pytest.raises(ValueError, match=r"with text='2 file\(s\) from a.txt on, \w+', but here it is '2 .* b.txt"):
        batches("b.txt", "a.txt", position=position)
    with pytest.raises(ValueError, match="saved with is_split_into_words=True, but here it is False"):
        batches("a.txt", "b.txt", is_split_into_words=False, position=position)
    older = {name: value for name, value in position.items() if name not in ("text", "is_split_into_words")}
    batches("a.txt", "b.txt", position=older)


@pytest.mark.parametrize("world_size", [1, 2])
def test_streams_go_on_from_every_position(corpus, world_size):
    survey = corpus.survey()

    def batches(rank, position=None):
        options = {"rank": rank, "world_size": world_size, "position": position, "survey": survey}
        return StreamWindows(corpus, TOKENIZER, 4, 45, shuffle_buffer=100, **options, **SPLIT)

    whole = [list(islice(batches(rank), 80 // world_size)) for rank in range(world_size)]
    assert whole[0][0].epoch == 0 and whole[0][-1].epoch == 1
    for done in range(1, len(whole[0]) - 3):
        position = StreamWindows.merge_positions([rank[done - 1].position for rank in whole])
        position = json.loads(json.dumps(position))
        assert StreamWindows.merge_positions([position] * world_size) == position  # no batch followed
        for rank in range(world_size):
            resumed = data_loader(batches(rank, position), num_workers=int(done % 40 == 1))
            assert_same(islice(resumed, 3), whole[rank][done : done + 3])


def test_fraction_of_an_epoch_grows(corpus):
    data = StreamWindows(corpus, TOKENIZER, 2, 30, survey=corpus.survey(), **SPLIT)
    marks = [batch.epoch + batch.fraction for batch in islice(data, 300)]
    assert marks == sorted(marks) and marks[0] < 0.05 and marks[-1] > 1
    assert np.diff(marks).max() < 0.2  # other rows are in the next epoch already
    data = SentenceBatches(corpus, TOKENIZER, 500, survey=corpus.survey(), shuffle_buffer=100, **SPLIT)
    marks = [batch.epoch + batch.fraction for batch in islice(data, 60)]
    assert marks == sorted(marks) and marks[0] < 0.1 and marks[-1] > 1


# --- processes


@pytest.mark.parametrize("kind", ["sentences", "stream"])
def test_the_model_reads_them(corpus, kind):
    if kind == "sentences":
        batch = next(iter(SentenceBatches(corpus, TOKENIZER, 100, **SPLIT)))
    else:
        batch = next(iter(StreamWindows(corpus, TOKENIZER, 3, 10, **SPLIT)))
    loss = tiny_model()(**batch.inputs, num_items_in_batch=batch.num_predictions).loss
    assert abs(loss.item() - np.log(len(TOKENIZER))) < 1  # a model that knows nothing yet


def test_pickled_data_goes_on_alike(corpus):
    for data in (SentenceBatches(corpus, TOKENIZER, 500, **SPLIT), StreamWindows(corpus, TOKENIZER, 2, 9, **SPLIT)):
        assert_same(islice(pickle.loads(pickle.dumps(data)), 3), islice(data, 3))


PROGRAM = """
import multiprocessing, sys
from itertools import islice, pairwise, takewhile
from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.pretraining.streams import Corpus, SentenceBatches, data_loader

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", "the"])
    tokenizer(["many texts"] * 100, truncation=True, max_length=3)  # uses the threads of the Rust library
    data = SentenceBatches(Corpus.from_files([sys.argv[2]]), tokenizer, 900, is_split_into_words=False)
    print(sum(batch.num_predictions > 0 for batch in islice(data_loader(data, num_workers=1), 5)))
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_are_silent(tmp_path, method):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", method, str(TEXT / "en_raw.txt")]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("5\n", "")


def test_a_worker_says_what_is_wrong(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nna\xefve\n")
    data = SentenceBatches(Corpus.from_files([str(tmp_path / "a.txt")]), TOKENIZER, 100, **SPLIT)
    with pytest.raises(ValueError, match="a.txt, line 2 is not UTF-8"):
        next(iter(data_loader(data, num_workers=1)))


def test_a_corpus_without_sentences_is_not_read_for_ever(tmp_path):
    corpus = write(tmp_path / "a.txt", ["", " "])
    for data in (SentenceBatches(corpus, TOKENIZER, 9, **SPLIT), StreamWindows(corpus, TOKENIZER, 1, 9, **SPLIT)):
        with pytest.raises(ValueError, match="There is no sentence in .*a.txt"):
            next(iter(data))


def test_every_rank_gets_some_of_a_single_line(tmp_path):
    corpus = write(tmp_path / "a.txt", ["the sea"])
    for rank in range(3):
        (batch,) = islice(StreamWindows(corpus, TOKENIZER, 2, 4, rank=rank, world_size=3, **SPLIT), 1)
        assert [rows_of([batch], "", row) for row in range(2)] == 2 * [plain_stream(["the sea"], False)]
        (batch,) = islice(SentenceBatches(corpus, TOKENIZER, 9, rank=rank, world_size=3, **SPLIT), 1)
        assert batch.epoch == rank


def test_positions_of_other_batches_are_refused(corpus):
    sentences, stream = SentenceBatches(corpus, TOKENIZER, 99, **SPLIT), StreamWindows(corpus, TOKENIZER, 2, 9, **SPLIT)
    of_sentences, of_stream = next(iter(sentences)).position, next(iter(stream)).position
    wrong = [
        (
            lambda: SentenceBatches(corpus, TOKENIZER, 99, position=of_stream, **SPLIT),
            "'StreamWindows', .*'SentenceBatc",
        ),
        (
            lambda: StreamWindows(corpus, TOKENIZER, 2, 9, position=of_sentences, **SPLIT),
            "'SentenceBatches', .*'Stream",
        ),
        (lambda: SentenceBatches(corpus, TOKENIZER, 98, position=of_sentences, **SPLIT), "tokens_per_batch=99.* is 98"),
        (lambda: StreamWindows(corpus, TOKENIZER, 3, 9, position=of_stream, **SPLIT), "with rows=2, but here it is 3"),
        (lambda: StreamWindows(corpus, TOKENIZER, 2, 9, position=of_stream, seed=1, **SPLIT), "with seed=0, .* is 1"),
        (
            lambda: StreamWindows(corpus, TOKENIZER, 2, 9, position=of_stream, world_size=2, **SPLIT),
            "world_size=1, but here it is 2",
        ),
    ]
    for make, message in wrong:
        with pytest.raises(ValueError, match=message):
            make()


def test_positions_in_another_text_are_refused(corpus):
    options = {"survey": corpus.survey(), **SPLIT}
    position = next(iter(StreamWindows(corpus, TOKENIZER, 2, 9, **options))).position
    with pytest.raises(ValueError, match="saved with lines=444, but here it is 443"):
        StreamWindows(corpus, TOKENIZER, 2, 9, **options | {"survey": Survey(443, 9000)}, position=position)
    position["ranks"][0][0][0][1] = 100
    with pytest.raises(ValueError, match="The position is not one in .*en.txt, .*ko.txt: its text has changed"):
        next(iter(StreamWindows(corpus, TOKENIZER, 2, 9, **options, position=position)))


def test_wrong_arguments(corpus):
    with pytest.raises(ValueError, match="rank=2 of world_size=2: pass a rank from 0 to 1"):
        SentenceBatches(corpus, TOKENIZER, 99, rank=2, world_size=2, **SPLIT)
    with pytest.raises(ValueError, match="tokens_per_batch=2: a word and its markers are 3 tokens"):
        SentenceBatches(corpus, TOKENIZER, 2, **SPLIT)
    with pytest.raises(ValueError, match="unroll_steps=0: pass at least 1"):
        StreamWindows(corpus, TOKENIZER, 2, 0, **SPLIT)
    with pytest.raises(ValueError, match="num_workers=2: the rows of a stream are read in order; pass 0 or 1"):
        data_loader(StreamWindows(corpus, TOKENIZER, 2, 9, **SPLIT), num_workers=2)
    with pytest.raises(ValueError, match=r"its size must be known: pass survey=corpus.survey\(\)"):
        StreamWindows(corpus, TOKENIZER, 2, 9, shuffle=False, repeat=False, **SPLIT)
    with pytest.raises(TypeError, match="Received a str; pass an ELMoTokenizer"):
        SentenceBatches(corpus, "tokenizer", 99, **SPLIT)
