"""Streams: text without end in rows, cut into windows, with LSTM states carried from window to window.

Shape suffixes: B rows, T steps.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from modeling_elmo import ELMoTokenizer
from modeling_elmo.run_scripts.pretraining.batches import (
    AlignedTokens,
    CorpusBatches,
    LMBatch,
    SentenceEncoder,
    as_tensors,
)
from modeling_elmo.run_scripts.pretraining.corpus import Corpus, SourceSentence, words_of
from modeling_elmo.tokenization.elmo_characters import UNK_ID

BLOCK_LINES = 64  # lines that a row reads in order: enough to carry states, few enough to shuffle


class SentenceBlock(NamedTuple):
    """Consecutive sentences, and the number of the block in the order of the epoch."""

    epoch: int
    number: int
    sentences: list[SourceSentence]


class StreamRow:
    """A row of a stream: the iterator of its blocks, and its place in the present one."""

    def __init__(
        self, encoder: SentenceEncoder, backward: bool, blocks: Iterator[SentenceBlock], lines_read: Counter[int]
    ):
        self.encoder, self.backward, self.blocks, self.lines_read = encoder, backward, blocks, lines_read
        self.go_to(SentenceBlock(0, -1, []))

    def go_to(self, block: SentenceBlock, line: int = 0, offset: int = 0):
        self.block, self.line, self.offset = block, line, offset
        self.tokens: AlignedTokens | None = None  # of this line, once it is read

    @property
    def has_more(self) -> bool:
        """Whether some of the block is left."""
        return self.line < len(self.block.sentences)

    def begin_block(self) -> bool:
        """Begins the next block if there is one and the current block is finished. Returns whether it did."""
        if self.has_more:
            return False
        block = next(self.blocks, None)
        if block is not None:
            self.go_to(block)
        return block is not None

    def read(self, steps: int) -> Iterator[AlignedTokens]:
        """The next `steps` tokens, a part of a sentence at a time; fewer at the end of the block."""
        while steps and self.has_more:
            if self.tokens is None:
                _, text = self.block.sentences[self.line]
                self.tokens = self.encoder.stream(self.encoder.words(text), self.backward)
                self.lines_read[self.block.epoch] += not self.offset
            tokens = AlignedTokens(*(column[self.offset : self.offset + steps] for column in self.tokens))
            self.offset += len(tokens.targets)
            steps -= len(tokens.targets)
            if self.offset == len(self.tokens.targets):
                self.go_to(self.block, self.line + 1)
            yield tokens


class StreamWindows(CorpusBatches):
    """Windows of streams, as the original trains: a row continues in the next window with the LSTM states it had.

    The two directions read the corpus independently. Forward, a sentence `<S> a b </S>` has the inputs `<S> a b` and
    the targets `a b </S>`. Backward, it has the inputs `</S> b a` and the targets `b a <S>`. So the last target of a
    window is often the first input of the next. In both directions the next sentence of the file follows, as in the
    original: backward, only the words of a sentence are in reverse order.

    A row that has finished its block of consecutive lines takes the next block of its rank, in a new window and from
    zero states. The original never resets them, and its weights then depend on where the states have drifted. Blocks
    are shuffled within the buffer, and the ranks take them in turn.

    Held-out text is cut into pieces of similar length, one for each row of all ranks. Each rank keeps its pieces in
    memory. A position needs the same number of ranks; held-out text has none.
    """

    def __init__(self, corpus: Corpus, tokenizer: ELMoTokenizer, rows: int, unroll_steps: int, **options):
        super().__init__(corpus, tokenizer, rows=rows, unroll_steps=unroll_steps, **options)
        self.rows, self.unroll_steps = rows, unroll_steps
        if self.is_held_out and self.survey is None:
            raise ValueError(
                "A held-out stream is cut into pieces of equal length, but the size of a streamed data set is unknown. "
                "Leave out --streaming."
            )
        # Blocks of a small corpus are shorter, so that every row gets some.
        lines = self.survey.lines // (rows * self.world_size) if self.survey else BLOCK_LINES
        self.block_lines = min(BLOCK_LINES, max(1, lines))
        if self.position is not None:
            self._check_position("world_size", len(self.position["ranks"]), self.world_size)

    @staticmethod
    def merge_positions(positions_by_rank: list[dict[str, Any]]) -> dict[str, Any]:
        """The position of all ranks, from the position of each."""
        # A rank that has read no batch still has the merged position that it began with.
        ranks = [each["ranks"][rank % len(each["ranks"])] for rank, each in enumerate(positions_by_rank)]
        return positions_by_rank[0] | {"ranks": ranks}

    def __iter__(self) -> Iterator[LMBatch]:
        lines_read = Counter[int]()  # by epoch, in the forward direction
        forward, backward = self._start(0, lines_read), self._start(1, Counter())
        while True:
            resets_2B = np.array([[row.begin_block() for row in rows] for rows in (forward, backward)])
            if not any(row.has_more for row in forward + backward):
                return
            text, stream = self._window(forward), self._window(backward)
            epoch = min(row.block.epoch for row in forward + backward)
            fraction = min(1.0, lines_read[epoch] * self.world_size / self.survey.lines) if self.survey else None
            places = ([[*row.block[:2], row.line, row.offset] for row in rows] for rows in (forward, backward))
            yield LMBatch(
                inputs=stream_inputs(text, "forward") | stream_inputs(stream, "backward"),
                num_predictions=int((text.targets != -100).sum()),
                num_unknown=int((text.targets == UNK_ID).sum()),
                epoch=epoch,
                fraction=fraction,
                position=None if self.is_held_out else self.settings | {"ranks": [[*places, [*lines_read.items()]]]},
                resets=torch.from_numpy(resets_2B),
            )

    def _window(self, rows: list[StreamRow]) -> AlignedTokens:
        """The next window of a direction. After the end of a block its tokens are 0 and its targets -100."""
        table, shape = self.encoder.table, (len(rows), self.unroll_steps)
        ids_BT, targets_BT = np.zeros(shape, dtype=np.int64), np.full(shape, -100, dtype=np.int64)
        window = AlignedTokens(ids_BT, np.zeros((*shape, table.max_word_length), dtype=table.dtype), targets_BT)
        for number, row in enumerate(rows):
            start = 0
            for tokens in row.read(self.unroll_steps):
                end = start + len(tokens.targets)
                for column, part in zip(window, tokens, strict=True):
                    column[number, start:end] = part
                start = end
        return window

    def _start(self, direction: int, lines_read: Counter[int]) -> list[StreamRow]:
        """The rows of a direction at the position, or at the beginning."""
        backward = direction == 1
        if self.is_held_out:
            return [StreamRow(self.encoder, backward, iter(piece), lines_read) for piece in self._pieces()]
        *by_direction, counts = self.position["ranks"][self.rank] if self.position else ([], [], [])
        positions = by_direction[direction]
        lines_read.update(dict(counts))
        blocks = self._blocks(direction, min((epoch for epoch, *_ in positions), default=0))
        rows = [StreamRow(self.encoder, backward, blocks, lines_read) for _ in range(self.rows)]
        found = self._find({(epoch, number) for epoch, number, *_ in positions if number >= 0}, blocks)
        for row, (epoch, number, line, offset) in zip(rows, positions, strict=False):
            if number >= 0:
                row.go_to(found[epoch, number], line, offset)
        return rows

    def _find(self, numbers: set, blocks: Iterator[SentenceBlock]) -> dict[tuple, SentenceBlock]:
        """The blocks with these epochs and numbers. Leaves the iterator after the last of them."""
        found: dict[tuple, SentenceBlock] = {}
        while len(found) < len(numbers):
            block = next(blocks, None)
            if block is None or block[:2] > max(numbers):
                raise ValueError(f"The position is not in {self.corpus}: the text has changed. Start a new training.")
            if block[:2] in numbers:
                found[block[:2]] = block
        return found

    def _blocks(self, direction: int, first_epoch: int) -> Iterator[SentenceBlock]:
        """The blocks of this rank."""
        seed = 2 * self.seed + direction
        size = max(1, self.shuffle_buffer // self.block_lines)
        for epoch in self._epochs(first_epoch):
            blocks, number = self._consecutive_lines(self.corpus.sentences(epoch, seed, self.shuffle)), 0
            while buffer := list(islice(blocks, size)):
                for chosen in self._shuffled(buffer, seed, epoch, number):
                    # Shifted by the epoch: a rank without a block in this epoch gets one in the next.
                    if (number + epoch) % self.world_size == self.rank:
                        yield SentenceBlock(epoch, number, buffer[chosen])
                    number += 1

    def _consecutive_lines(self, sentences: Iterator[SourceSentence]) -> Iterator[list[SourceSentence]]:
        """Blocks of `block_lines` sentences of one file; the last one of a file may be shorter."""
        for _, lines in groupby(sentences, key=lambda sentence: sentence[0][0]):
            while block := list(islice(lines, self.block_lines)):
                yield block

    def _pieces(self) -> list[list[SentenceBlock]]:
        """The piece of held-out text for each row of this rank, empty if there are more rows than sentences."""
        pieces: list[list[SourceSentence]] = [[] for _ in range(self.rows)]
        words, all_rows = 0, self.rows * self.world_size
        for source_line, text in self.corpus.sentences(shuffle_files=False):
            row = min(words * all_rows // self.survey.words, all_rows - 1) - self.rank * self.rows
            if 0 <= row < self.rows:
                pieces[row].append((source_line, text))
            words += len(words_of(text))
        return [[SentenceBlock(0, number, piece)] if piece else [] for number, piece in enumerate(pieces)]


def stream_inputs(window: AlignedTokens, direction: str) -> dict[str, Tensor]:
    """Model inputs of a window, with an attention mask only if a token is masked."""
    prefix = "" if direction == "forward" else "backward_"
    arrays = {
        f"{prefix}input_ids": window.input_ids,
        f"{prefix}character_ids": window.character_ids,
        f"{direction}_targets": window.targets,
    }
    token_mask_BT = window.targets != -100
    if not token_mask_BT.all():
        arrays[f"{prefix}attention_mask"] = token_mask_BT.astype(np.int64)
    return as_tensors(**arrays)
