"""Windows of streams, against their definition on short texts."""

import json
from itertools import islice, pairwise, product

import pytest
import torch
from text_batches import (
    ENGLISH,
    KOREAN,
    SPLIT,
    TOKENIZER,
    WORDS,
    assert_same_batches,
    decoded,
    tiny_model,
    two_files,
    write,
)

from modeling_elmo.run_scripts.pretraining.batches import SentenceBatches, batch_loader
from modeling_elmo.run_scripts.pretraining.corpus import Survey
from modeling_elmo.run_scripts.pretraining.streams import StreamWindows


def targets(ids) -> list[list[str]]:
    return [TOKENIZER.convert_ids_to_tokens(row[row != -100].tolist()) for row in ids]


def plain_stream(lines: list[str], backward: bool) -> tuple[list[str], list[str]]:
    """The definition: inputs and targets of a row that reads these lines."""
    inputs, predicted = [], []
    for line in lines:
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
        predicted += targets(batch.inputs[f"{prefix or 'forward_'}targets"][row])[0]
    return inputs, predicted


@pytest.mark.parametrize("world_size, rows", [(1, 1), (1, 3), (2, 4)])
def test_held_out_text_is_predicted_once(world_size, rows):
    corpus = two_files()
    survey, pieces = corpus.survey(), []
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size, "survey": survey, "shuffle": False, "repeat": False}
        batches = list(batch_loader(StreamWindows(corpus, TOKENIZER, rows, 20, **options, **SPLIT), rank))
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
    data = StreamWindows(corpus, TOKENIZER, 5, 4, shuffle=False, repeat=False, survey=corpus.survey(), **SPLIT)
    (batch,) = data
    assert torch.isfinite(tiny_model()(**batch.inputs).loss)
    assert batch.num_predictions == 5 and int(batch.inputs["attention_mask"].sum()) == 5


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_block_has_windows_of_its_own(tmp_path, world_size):
    """The rows of all ranks read each block once in an epoch, and each direction in an order of its own."""
    lines = [" ".join([word, *["sea"] * (number % 7)]) for number, word in enumerate(WORDS[:640])]
    corpus = write(tmp_path / "a.txt", lines)
    found = {"": [], "backward_": []}
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size, "repeat": False, "survey": corpus.survey()}
        batches = list(StreamWindows(corpus, TOKENIZER, 3, 20, **options, **SPLIT))
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
        return StreamWindows(corpus, TOKENIZER, 4, 45, shuffle_buffer=100, **options, **SPLIT)

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
        (batch,) = islice(StreamWindows(corpus, TOKENIZER, 2, 4, rank=rank, world_size=3, **SPLIT), 1)
        assert [rows_of([batch], "", row) for row in range(2)] == 2 * [plain_stream(["the sea"], False)]
        (batch,) = islice(SentenceBatches(corpus, TOKENIZER, 9, rank=rank, world_size=3, **SPLIT), 1)
        assert batch.epoch == rank


def test_texts_that_do_not_fit_are_refused():
    corpus = two_files()
    options = {"survey": corpus.survey(), **SPLIT}
    position = next(iter(StreamWindows(corpus, TOKENIZER, 2, 9, **options))).position
    with pytest.raises(ValueError, match="saved with lines=444, but here it is 443"):
        StreamWindows(corpus, TOKENIZER, 2, 9, **options | {"survey": Survey(443, 9000)}, position=position)
    position["ranks"][0][0][0][1] = 100
    with pytest.raises(ValueError, match="The position is not in .*en.txt, .*ko.txt: the text has changed"):
        next(iter(StreamWindows(corpus, TOKENIZER, 2, 9, **options, position=position)))
    with pytest.raises(ValueError, match="the size of a streamed data set is unknown. Leave out --streaming"):
        StreamWindows(corpus, TOKENIZER, 2, 9, shuffle=False, repeat=False, **SPLIT)
