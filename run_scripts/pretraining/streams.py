"""Raw text to batches of a language model, in one order whatever the number of processes.

`Corpus` reads sentences, `SentenceBatches` and `StreamWindows` make batches of them, `data_loader` spreads the work.
Nothing here grows with the corpus. Batches follow each other without end, one epoch after the other; each carries the
position behind it, and a data set that is made with that position goes on there exactly.

Shape suffixes: B rows, T steps, N sentences.
"""

import os
from collections import Counter
from collections.abc import Iterator
from itertools import chain, groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from transformers.utils import logging

from modeling_elmo.run_scripts.pretraining.batches import CorpusBatches, Encoder, LMBatch, Tokens, as_tensors
from modeling_elmo.run_scripts.pretraining.corpus import (
    Corpus,
    CorpusArguments,
    HeldOutArguments,
    Place,
    Sentence,
    Survey,
    number_of_words,
)
from modeling_elmo.tokenization.elmo_characters import UNK_ID

__all__ = [
    "Corpus",
    "CorpusArguments",
    "HeldOutArguments",
    "LMBatch",
    "SentenceBatches",
    "StreamWindows",
    "Survey",
    "data_loader",
]

logger = logging.get_logger(__name__)

BLOCK_LINES = 64  # read in a row by one row of a stream: enough for states to carry, few enough to be shuffled
SHORTEST = 3  # a word between its markers


class Plan(NamedTuple):
    """A batch that has not been encoded: sentences, which of them, and where it stands."""

    sentences: list[Sentence]
    chosen: np.ndarray
    epoch: int
    buffer: int
    batch: int
    lines: float


class SentenceBatches(CorpusBatches):
    """Each sentence by itself, `<S> w1 ... wn </S>`, beside others of like length.

    The batches of all ranks and workers are one sequence, which each of them plans and encodes its part of; the number
    of either may change between two runs. A sentence that no batch has room for is cut into several.

    Args:
        tokens_per_batch: rows times the longest, markers and padding included, at most.
        others: as for `CorpusBatches`.
    """

    def __init__(self, corpus: Corpus, tokenizer, tokens_per_batch: int, **options):
        super().__init__(corpus, tokenizer, tokens_per_batch=tokens_per_batch, **options)
        if tokens_per_batch < SHORTEST:
            raise ValueError(f"tokens_per_batch={tokens_per_batch}: a word and its markers are {SHORTEST} tokens.")
        self.tokens_per_batch = tokens_per_batch
        self.has_warned = False

    @staticmethod
    def merge_positions(positions_by_rank: list[dict[str, Any]]) -> dict[str, Any]:
        """Where all ranks go on: behind the last rank's batch, if all have had as many."""
        return positions_by_rank[-1]

    def __iter__(self) -> Iterator[LMBatch]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        part = self.rank + self.world_size * number
        self.has_warned = part > 0  # all of them plan all batches; one of them warns
        return map(self._encode, islice(self._plan(), part, None, self.world_size * workers))

    def _plan(self) -> Iterator[Plan]:
        """All batches from the position on; no text is split before it."""
        start = self.position or {"epoch": 0, "buffer": 0, "batch": 0}
        buffer, batch = start["buffer"], start["batch"]
        for epoch in self._epochs(start["epoch"]):
            sentences = self.corpus.sentences(epoch, self.seed, self.shuffle)
            skipped = sum(1 for _ in islice(sentences, buffer * self.shuffle_buffer))
            while lines := list(islice(sentences, self.shuffle_buffer)):
                plans = self._plan_buffer(lines, epoch, buffer, skipped)
                yield from islice(plans, batch, None)
                skipped += len(lines)
                buffer, batch = buffer + 1, 0
            if not skipped:
                raise self.corpus.emptiness()
            buffer = batch = 0

    def _plan_buffer(self, sentences: list[Sentence], epoch: int, buffer: int, lines_before: int) -> Iterator[Plan]:
        num_lines = len(sentences)
        lengths_N = np.array([self.encoder.max_words(text) for _, text in sentences]) + 2
        if lengths_N.max() > self.tokens_per_batch:
            sentences = list(chain.from_iterable(map(self._cut, sentences, lengths_N)))
            lengths_N = np.array([self.encoder.max_words(text) for _, text in sentences]) + 2
        order_N = self._shuffled(sentences, self.seed, epoch, buffer)
        order_N = order_N[np.argsort(lengths_N[order_N], kind="stable")]
        batches, end = [], len(order_N)
        while end > 0:
            start = max(0, end - int(self.tokens_per_batch // lengths_N[order_N[end - 1]]))
            batches.append(order_N[start:end])
            end = start
        for done, number in enumerate(self._shuffled(batches, self.seed, epoch, buffer, 1), 1):
            lines = lines_before + num_lines * done / len(batches)
            yield Plan(sentences, batches[number], epoch, buffer, done, lines)

    def _cut(self, sentence: Sentence, length: int) -> list[Sentence]:
        if length <= self.tokens_per_batch:
            return [sentence]
        place, words, room = sentence[0], self.encoder.words(sentence[1]), self.tokens_per_batch - 2
        if len(words) > room and not self.has_warned:
            self.has_warned = True
            logger.warning(
                f"{place[0]}:{place[1]} has {len(words)} words, more than a batch of {self.tokens_per_batch} "
                "tokens has room for. It is cut into pieces, as are all such lines."
            )
        return [(place, words[start : start + room]) for start in range(0, len(words), room)]

    def _encode(self, plan: Plan) -> LMBatch:
        sentences = [plan.sentences[number] for number in plan.chosen]
        words = [self.encoder.words(text) for _, text in sentences]
        tokens = self.encoder.batch(words)
        position = {"epoch": plan.epoch, "buffer": plan.buffer, "batch": plan.batch}
        return LMBatch(
            inputs=as_tensors(**tokens._asdict(), attention_mask=(tokens.labels != -100).astype(np.int64)),
            num_predictions=sum(map(len, words)) + len(words),
            num_unknown=int((tokens.labels == UNK_ID).sum()),
            epoch=plan.epoch,
            fraction=min(1.0, plan.lines / self.survey.lines) if self.survey else None,
            position=self.settings | position,
            places=[place for place, _ in sentences],
        )


class Block(NamedTuple):
    """Consecutive sentences, and their number in the order of the epoch."""

    epoch: int
    number: int
    sentences: list[Sentence]


class Row:
    """One row of a stream: the sentence that it is in, and where its next ones come from."""

    def __init__(self, encoder: Encoder, backward: bool, blocks: Iterator[Block], lines_read: Counter[int]):
        self.encoder, self.backward, self.blocks, self.lines_read = encoder, backward, blocks, lines_read
        self.block, self.line, self.offset = Block(0, -1, []), -1, 0
        self.tokens: Tokens | None = None

    @property
    def position(self) -> list[int]:
        return [self.block.epoch, self.block.number, self.line, self.offset]

    def go_to(self, block: Block, line: int, offset: int = 0):
        self.block, self.line, self.offset = block, line, offset
        self.place, text = block.sentences[-1 - line if self.backward else line]
        self.tokens = self.encoder.stream(self.encoder.words(text), self.backward)

    def begin_block(self) -> bool:
        """Whether the block was read to its end, and this is the next one's beginning."""
        if self._has_more() or self.line + 1 < len(self.block.sentences):
            return False
        block = next(self.blocks, None)
        if block is not None:
            self._begin_sentence(block, 0)
        return block is not None

    def read(self, steps: int) -> Iterator[tuple[Place, Tokens]]:
        """The next `steps` positions, a part of a sentence at a time; fewer at the end of the block."""
        while steps and (self._has_more() or self._next_sentence()):
            part = slice(self.offset, self.offset + steps)
            tokens = Tokens(*(column[part] for column in self.tokens))
            self.offset += len(tokens.labels)
            steps -= len(tokens.labels)
            yield self.place, tokens

    def _has_more(self) -> bool:
        return self.tokens is not None and self.offset < len(self.tokens.labels)

    def _next_sentence(self) -> bool:
        if self.line + 1 >= len(self.block.sentences):
            return False
        self._begin_sentence(self.block, self.line + 1)
        return True

    def _begin_sentence(self, block: Block, line: int):
        self.go_to(block, line)
        self.lines_read[block.epoch] += 1


class StreamWindows(CorpusBatches):
    """Text without end in rows, cut into windows, as the original trains: LSTM states are carried from one to the next.

    The two directions read the corpus independently. Forward, a sentence `<S> a b </S>` predicts `a b </S>` from
    `<S> a b`, and then the next sentence follows; backward it predicts `b a <S>` from `</S> b a`. So the last target of
    a window is often the first input of the next.

    A row that has finished its block of consecutive lines takes the next one of its rank, in a new window and from
    zero states; the original never starts anew, and its weights come to count on where its states have drifted. Blocks
    are shuffled within the buffer, and taken by the ranks in turn. Held-out text (`shuffle=False, repeat=False`) is cut
    into one piece for each row of all ranks instead, in order and of like length; each rank keeps the text of its
    pieces in memory.

    Args:
        rows: of a rank.
        unroll_steps: positions of a window.
        others: as for `CorpusBatches`; `position` needs the same number of ranks, and held-out text has none.
    """

    def __init__(self, corpus: Corpus, tokenizer, rows: int, unroll_steps: int, **options):
        super().__init__(corpus, tokenizer, rows=rows, unroll_steps=unroll_steps, **options)
        self.rows, self.unroll_steps = rows, unroll_steps
        self.is_held_out = not (self.shuffle or self.repeat)
        if self.is_held_out and self.survey is None:
            raise ValueError(
                "Held-out text is cut into pieces of like length, so its size must be known: pass "
                "survey=corpus.survey(), which is None for a data set that is streamed: download that one."
            )
        if self.is_held_out and self.position is not None:
            raise ValueError("Held-out text is read from its beginning: leave `position` out.")
        # A small corpus is cut finer, so that every row gets some of it.
        lines = self.survey.lines // (rows * self.world_size) if self.survey else BLOCK_LINES
        self.block_lines = min(BLOCK_LINES, max(1, lines))
        if self.position is not None:
            self._check("world_size", len(self.position["ranks"]), self.world_size)

    @staticmethod
    def merge_positions(positions_by_rank: list[dict[str, Any]]) -> dict[str, Any]:
        """Where all ranks go on, from the position of each."""
        # Where no batch followed, each rank holds the merged one that it began with.
        ranks = [
            position["ranks"][rank if len(position["ranks"]) > 1 else 0]
            for rank, position in enumerate(positions_by_rank)
        ]
        return positions_by_rank[0] | {"ranks": ranks}

    @staticmethod
    def check_workers(num_workers: int):
        if num_workers > 1:
            raise ValueError(f"num_workers={num_workers}: the rows of a stream are read in order; pass 0 or 1.")

    def __iter__(self) -> Iterator[LMBatch]:
        worker = get_worker_info()
        self.check_workers(worker.num_workers if worker else 0)
        lines_read = Counter[int]()  # by the rows of the forward direction
        forward, backward = self._start(0, lines_read), self._start(1, Counter())
        while True:
            begins_2B = np.array([[row.begin_block() for row in rows] for rows in (forward, backward)])
            (text, places), (stream, more_places) = self._window(forward), self._window(backward)
            if not places and not more_places:
                return
            epoch = min(row.block.epoch for row in forward + backward)
            share = min(1.0, lines_read[epoch] * self.world_size / self.survey.lines) if self.survey else None
            ends = [[row.position for row in forward], [row.position for row in backward], [*lines_read.items()]]
            yield LMBatch(
                inputs=as_inputs(text, "") | as_inputs(stream, "backward_"),
                num_predictions=int((text.labels != -100).sum()),
                num_unknown=int((text.labels == UNK_ID).sum()),
                epoch=epoch,
                fraction=share,
                position=None if self.is_held_out else self.settings | {"ranks": [ends]},
                places=places + more_places,
                begins=torch.from_numpy(begins_2B),
            )

    def _window(self, rows: list[Row]) -> tuple[Tokens, list[Place]]:
        """The next window of a direction; zeros, and -100 as labels, where a block has come to its end."""
        table, shape = self.encoder.table, (len(rows), self.unroll_steps)
        ids_BT, labels_BT = np.zeros(shape, dtype=np.int64), np.full(shape, -100, dtype=np.int64)
        window = Tokens(ids_BT, np.zeros((*shape, table.max_word_length), dtype=table.dtype), labels_BT)
        places = []
        for number, row in enumerate(rows):
            start = 0
            for place, tokens in row.read(self.unroll_steps):
                end = start + len(tokens.labels)
                for column, part in zip(window, tokens, strict=True):
                    column[number, start:end] = part
                places.append(place)
                start = end
        return window, places

    def _start(self, direction: int, lines_read: Counter[int]) -> list[Row]:
        """The rows of a direction at the position, or at the beginning."""
        backward = direction == 1
        if self.is_held_out:
            return [Row(self.encoder, backward, iter(piece), lines_read) for piece in self._pieces()]
        positions = self.position["ranks"][self.rank][direction] if self.position else []
        blocks = self._blocks(direction, min((epoch for epoch, *_ in positions), default=0))
        rows = [Row(self.encoder, backward, blocks, lines_read) for _ in range(self.rows)]
        if self.position and direction == 0:
            lines_read.update(dict(self.position["ranks"][self.rank][2]))
        held = self._find({(epoch, number) for epoch, number, *_ in positions if number >= 0}, blocks)
        for row, (epoch, number, line, offset) in zip(rows, positions, strict=False):
            if number >= 0:
                row.go_to(held[epoch, number], line, offset)
        return rows

    def _find(self, numbers: set[tuple[int, int]], blocks: Iterator[Block]) -> dict[tuple[int, int], Block]:
        """The blocks that rows were in, the last one of which is the last that any row had taken."""
        found: dict[tuple[int, int], Block] = {}
        while len(found) < len(numbers):
            block = next(blocks, None)
            if block is None or block[:2] > max(numbers):
                raise ValueError(f"The position is not one in {self.corpus}: its text has changed. Begin anew.")
            if block[:2] in numbers:
                found[block[:2]] = block
        return found

    def _blocks(self, direction: int, first_epoch: int) -> Iterator[Block]:
        """The blocks of this rank."""
        seed = 2 * self.seed + direction
        size = max(1, self.shuffle_buffer // self.block_lines)
        for epoch in self._epochs(first_epoch):
            blocks, number = self._consecutive_lines(self.corpus.sentences(epoch, seed, self.shuffle)), 0
            while buffer := list(islice(blocks, size)):
                for chosen in self._shuffled(buffer, seed, epoch, number):
                    # A rank for which an epoch has no block gets one in the next.
                    if (number + epoch) % self.world_size == self.rank:
                        yield Block(epoch, number, buffer[chosen])
                    number += 1
            if not number:
                raise self.corpus.emptiness()

    def _consecutive_lines(self, sentences: Iterator[Sentence]) -> Iterator[list[Sentence]]:
        for _, lines in groupby(sentences, key=lambda sentence: sentence[0][0]):
            while block := list(islice(lines, self.block_lines)):
                yield block

    def _pieces(self) -> list[list[Block]]:
        """For each row of this rank its piece of the text, none where there are more rows than sentences."""
        pieces: list[list[Sentence]] = [[] for _ in range(self.rows)]
        words, all_rows = 0, self.rows * self.world_size
        for sentence in self.corpus.sentences(shuffle_files=False):
            row = min(words * all_rows // self.survey.words, all_rows - 1) - self.rank * self.rows
            if 0 <= row < self.rows:
                pieces[row].append(sentence)
            words += number_of_words(sentence[1])
        return [[Block(0, number, piece)] if piece else [] for number, piece in enumerate(pieces)]


def as_inputs(tokens: Tokens, prefix: str) -> dict[str, Tensor]:
    """Model inputs of a window; with a mask only if something is masked."""
    named = {f"{prefix}input_ids": tokens.input_ids, f"{prefix}character_ids": tokens.character_ids}
    named[f"{prefix or 'forward_'}labels"] = tokens.labels
    mask = tokens.labels != -100
    return as_tensors(**named, **({} if mask.all() else {f"{prefix}attention_mask": mask.astype(np.int64)}))


def data_loader(dataset: CorpusBatches, num_workers: int, pin_memory: bool = False) -> DataLoader:
    """The batches in their order, made by `num_workers` processes (0: by this one)."""
    if isinstance(dataset, StreamWindows):
        dataset.check_workers(num_workers)
    if num_workers:  # a forked process would warn about the threads of the Rust library, which is not used there
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=as_it_is,
        worker_init_fn=leave_the_group,
    )


def leave_the_group(_: int):
    """A terminal sends Ctrl-C, a launcher SIGTERM, to all of a group: without workers no step could be finished."""
    if hasattr(os, "setsid"):  # not on Windows
        os.setsid()


def as_it_is(batch: Any) -> Any:
    """Not a lambda: started anew, a worker finds it by name. The stock function would walk through all places."""
    return batch
