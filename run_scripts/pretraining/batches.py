"""Batches of a language model: words to arrays, batches of whole sentences, windows of streams, and their loading.

A stream is text without end in rows, cut into windows, with LSTM states carried from window to window. Batches follow
each other in one order, whatever the number of processes, and one epoch after the other. Each batch holds the position
after it. A data set that is created with this position continues exactly there. Memory does not grow with the corpus.

Shape suffixes: B rows, T steps, W max_word_length, N tokens or sentences.
"""

import atexit
import os
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from itertools import chain, count, groupby, islice, starmap
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers.utils import logging

from modeling_elmo import ELMoConfig, ELMoTokenizer
from modeling_elmo.encoder import pack_words
from modeling_elmo.tokenization.elmo_characters import BOS_ID, EOS_ID, UNK_ID
from modeling_elmo.tokenization.tokenization_elmo import one_call_at_a_time

from .corpus import Corpus, SourceSentence
from .counting import SentenceText, Survey, words_of

logger = logging.get_logger(__name__)

PUNCTUATION = string.punctuation.encode()
CONTROLS = bytes({*range(32), 127} - {*b"\t\n\v\f\r"})  # moses splits at these
# Replaced by spaces, because `bytes.split`, unlike `str.split`, does not split at all of them.
SPACES = bytes.maketrans(gaps := PUNCTUATION + CONTROLS, b" " * len(gaps))
# What a position depends on, as a user knows it.
SHOWN_SETTINGS = {
    "batches": "--context",
    "tokens_per_batch": "--per_device_train_batch_tokens",
    "rows": "--per_device_train_batch_size",
    "unroll_steps": "--unroll_steps",
    "seed": "--seed",
    "shuffle": "shuffling",
    "shuffle_buffer": "--shuffle_buffer",
    "is_split_into_words": "--is_split_into_words",
    "text": "the training text",
    "lines": "the number of sentences",
    "words": "the number of words",
    "world_size": "the number of processes",
}
CONTEXTS = {"SentenceBatches": "sentence", "StreamWindows": "stream"}
BLOCK_LINES = 64  # lines that a row reads in order: enough to carry states, few enough to shuffle


class AlignedTokens(NamedTuple):
    """Tokens of a stream, and the target of each position.

    Shape:
        input_ids, targets: `(N,)` or `(B, T)`
        character_ids: `(N, W)` or `(B, T, W)`
    """

    input_ids: np.ndarray
    character_ids: np.ndarray
    targets: np.ndarray


class SentenceEncoder:
    """Turns sentences into arrays with the tokenizer's table of distinct words.

    `is_split_into_words`: white space separates the words; otherwise the tokenizer splits the text.
    """

    def __init__(self, tokenizer: ELMoTokenizer, is_split_into_words: bool):
        self.table = tokenizer.word_table
        self.splits_at_spaces = is_split_into_words or tokenizer.splitter.name == "whitespace"
        self.split = str.split if self.splits_at_spaces else tokenizer.splitter.words

    def words(self, text: SentenceText) -> list[str]:
        return words_of(text, self.split)

    def max_words(self, text: SentenceText) -> int:
        """An upper bound of the number of words that is cheap to compute.

        A word that a rule splits off begins at a punctuation mark or with the letters after it. The treebank rules for
        `cannot` and similar words are ignored.
        """
        if self.splits_at_spaces or not isinstance(text, str) or not text.isascii():
            return len(self.words(text))
        characters = text.encode()
        marks = len(characters) - len(characters.translate(None, PUNCTUATION))
        return len(characters.translate(SPACES).split()) + marks

    @one_call_at_a_time
    def batch(self, sentences: list[list[str]]) -> dict[str, Tensor]:
        """Model inputs with a row `<S> w1 ... wn </S>` for each sentence.

        The labels are the ids of the row itself, -100 at padding; the model shifts them.
        """
        last_B1 = np.array([[len(words) + 1] for words in sentences])
        steps_T = np.arange(last_B1.max() + 1)
        rows_BT = np.zeros((len(sentences), len(steps_T)), dtype=np.int64)  # rows of the table; row 0 is padding
        rows_BT[(steps_T > 0) & (steps_T < last_B1)] = self.table.rows(list(chain.from_iterable(sentences)))
        rows_BT[:, 0] = BOS_ID
        np.put_along_axis(rows_BT, last_B1, EOS_ID, axis=1)
        ids_BT = self.table.input_ids(rows_BT)
        token_mask_BT = steps_T <= last_B1
        return as_tensors(
            input_ids=ids_BT,
            character_ids=self.table.character_ids(rows_BT),
            labels=np.where(token_mask_BT, ids_BT, -100),
            attention_mask=token_mask_BT.astype(np.int64),
        )

    @one_call_at_a_time
    def stream(self, text: SentenceText, backward: bool) -> AlignedTokens:
        """A sentence of a stream: `<S> a b` has the targets `a b </S>`; backward, `</S> b a` has `b a <S>`."""
        rows_N = np.concatenate([[BOS_ID], self.table.rows(self.words(text)), [EOS_ID]])
        if backward:
            rows_N = rows_N[::-1]
        ids_N = self.table.input_ids(rows_N)
        return AlignedTokens(ids_N[:-1], self.table.character_ids(rows_N[:-1]), ids_N[1:])


class LMBatch(NamedTuple):
    """A batch, and its place in the text."""

    inputs: dict[str, Any]  # of `ELMoForPreTraining.forward`
    epoch: int  # of its text; some rows of a stream may already be in the next one
    fraction: float | None  # of the epoch that has been read; `None` if the size of the corpus is unknown
    position: dict[str, Any] | None  # after the batch; `None` for a held-out stream
    resets: Tensor | None = None  # `(2, B)`, of a stream: rows of each direction that begin a block, from zero states

    @property
    def epochs_read(self) -> float:
        return self.epoch + (self.fraction or 0)

    @property
    def forward_targets(self) -> Tensor:
        """`(B, T)`, -100 where there are none."""
        if "labels" in self.inputs:
            return self.inputs["labels"][:, 1:]
        return self.inputs["forward_targets"]

    @property
    def num_predictions(self) -> int:
        """In one direction."""
        return int((self.forward_targets != -100).sum())

    @property
    def num_unknown(self) -> int:
        """Forward predictions of `<UNK>`."""
        return int((self.forward_targets == UNK_ID).sum())


@dataclass(eq=False)
class CorpusBatches(IterableDataset):
    """Base class of `SentenceBatches` and `StreamWindows`.

    Args:
        is_split_into_words: see `SentenceEncoder`.
        seed, shuffle_buffer: decide the order, together with the number of the epoch.
        shuffle, repeat: whether to shuffle at all, and whether the next epoch follows. Held-out text has neither, and
            then the numbers of batches of two ranks may differ.
        position: of the last batch of one rank, or of all ranks by `merge_positions`; `None`: the beginning.
        rank, world_size: number of this process, and number of processes that share the batches.
        survey: the sizes of the corpus, to compute `LMBatch.fraction`.
        config: configuration of a model, for which the words are packed here, in the process that prepares the batch.
    """

    SIZES: ClassVar[tuple[str, ...]]  # of a batch

    corpus: Corpus
    tokenizer: InitVar[ELMoTokenizer]
    _: KW_ONLY
    is_split_into_words: bool
    seed: int = 0
    shuffle_buffer: int = 100_000
    shuffle: bool = True
    repeat: bool = True
    position: dict[str, Any] | None = None
    rank: int = 0
    world_size: int = 1
    survey: Survey | None = None
    config: ELMoConfig | None = None

    def __post_init__(self, tokenizer: ELMoTokenizer):
        self.encoder = SentenceEncoder(tokenizer, self.is_split_into_words)
        self.is_held_out = not (self.shuffle or self.repeat)
        self.settings: dict[str, Any] = {"batches": type(self).__name__}  # part of every position
        for name in (*self.SIZES, "seed", "shuffle", "shuffle_buffer", "is_split_into_words"):
            self.settings[name] = getattr(self, name)
        self.settings["text"] = self.corpus.order
        self.settings["lines"] = self.survey and self.survey.lines
        self.settings["words"] = self.survey and self.survey.words
        if self.position is not None:
            for name, now in self.settings.items():
                self._check_position(name, self.position.get(name), now)

    @staticmethod
    def _check_position(name: str, saved: Any, now: Any):
        if saved != now:
            before, here = (CONTEXTS.get(value, value) for value in (saved, now))
            raise ValueError(
                f"The checkpoint was written with {SHOWN_SETTINGS[name]} {before}, but here it is {here}. That changes "
                "the batches: continue with the same value, or start again in another --output_dir."
            )

    def _epochs(self, first: int) -> Iterable[int]:
        return count(first) if self.repeat else (first,)

    def _shuffled(self, items: Sequence | np.ndarray, *seed: int) -> np.ndarray:
        """The indices of the items in the order of the seed, or in their own order without shuffling."""
        if not self.shuffle:
            return np.arange(len(items))
        return np.random.default_rng(seed).permutation(len(items))

    def _packed(self, inputs: dict[str, Tensor], prefix: str = "") -> dict[str, Any]:
        """Model inputs with a packed batch instead of ids and mask, for a model that is known."""
        if self.config is None:
            return inputs
        names = ("character_ids", "input_ids", "attention_mask")
        words = [inputs.pop(f"{prefix}{name}", None) for name in names]
        return {f"{prefix}packed_batch": pack_words(self.config, *words), **inputs}

    def _fraction(self, lines: float) -> float | None:
        return min(1.0, lines / self.survey.lines) if self.survey else None


@dataclass(eq=False)
class SentenceBatches(CorpusBatches):
    """Batches of whole sentences of similar length, each `<S> w1 ... wn </S>`.

    All ranks and workers plan the same sequence of batches, and each of them encodes its share. Their numbers may
    change between two runs.

    Args:
        tokens_per_batch: maximum of rows times the longest row, including markers and padding. A longer sentence is
            cut; a held-out one is a batch of its own.
    """

    SIZES = ("tokens_per_batch",)

    tokens_per_batch: int

    @staticmethod
    def merge_positions(positions_by_rank: list[dict[str, Any]]) -> dict[str, Any]:
        """The position of all ranks: after the batch of the last rank, if all have read the same number of batches."""
        return positions_by_rank[-1]

    def __iter__(self) -> Iterator[LMBatch]:
        share, shares = self.rank, self.world_size
        if worker := get_worker_info():
            share += self.world_size * worker.id
            shares *= worker.num_workers
        self.has_warned = share > 0  # all of them plan all batches, but only the first one warns
        return starmap(self._encode, islice(self._plan(), share, None, shares))

    def _plan(self) -> Iterator[tuple[list[SourceSentence], dict[str, int], float]]:
        """All batches from the position on: their sentences, the position after each, and the lines read until then.

        Text before the position is read, but not split into words.
        """
        start = self.position or {"epoch": 0, "buffer": 0, "batch": 0}
        buffer, batch = start["buffer"], start["batch"]
        for epoch in self._epochs(start["epoch"]):
            sentences = self.corpus.sentences(epoch, self.seed, self.shuffle)
            lines_before = sum(1 for _ in islice(sentences, buffer * self.shuffle_buffer))
            while lines := list(islice(sentences, self.shuffle_buffer)):
                yield from islice(self._plan_buffer(lines, epoch, buffer, lines_before), batch, None)
                lines_before += len(lines)
                buffer += 1
                batch = 0
            buffer = batch = 0

    def _plan_buffer(
        self, sentences: list[SourceSentence], epoch: int, buffer: int, lines_before: int
    ) -> Iterator[tuple[list[SourceSentence], dict[str, int], float]]:
        num_lines = len(sentences)
        lengths_N = self._max_lengths(sentences)
        if not self.is_held_out and lengths_N.max() > self.tokens_per_batch:
            pieces = map(self._cut, sentences, lengths_N)
            sentences = list(chain.from_iterable(pieces))
            lengths_N = self._max_lengths(sentences)
        order_N = self._shuffled(sentences, self.seed, epoch, buffer)
        order_N = order_N[np.argsort(lengths_N[order_N], kind="stable")]
        batches = list(self._filled(order_N, lengths_N))
        for done, number in enumerate(self._shuffled(batches, self.seed, epoch, buffer, 1), 1):
            batch = [sentences[i] for i in batches[number]]
            position = {"epoch": epoch, "buffer": buffer, "batch": done}
            yield batch, position, lines_before + num_lines * done / len(batches)

    def _filled(self, order_N: np.ndarray, lengths_N: np.ndarray) -> Iterator[np.ndarray]:
        """The numbers of the sentences of each batch, from the longest ones, which are last in the order, on."""
        end = len(order_N)
        while end > 0:
            longest = lengths_N[order_N[end - 1]]
            start = max(0, end - max(1, int(self.tokens_per_batch // longest)))
            yield order_N[start:end]
            end = start

    def _max_lengths(self, sentences: list[SourceSentence]) -> np.ndarray:
        return np.array([self.encoder.max_words(text) for _, text in sentences]) + 2

    def _cut(self, sentence: SourceSentence, max_length: int) -> list[SourceSentence]:
        if max_length <= self.tokens_per_batch:
            return [sentence]
        (file, line), text = sentence
        words = self.encoder.words(text)
        room = self.tokens_per_batch - 2
        if len(words) > room and not self.has_warned:
            self.has_warned = True
            logger.warning(
                f"{file}:{line} has {len(words)} words, too many for a batch of {self.tokens_per_batch} tokens. "
                "Such lines are cut into pieces."
            )
        return [((file, line), words[start : start + room]) for start in range(0, len(words), room)]

    def _encode(self, sentences: list[SourceSentence], position: dict[str, int], lines: float) -> LMBatch:
        return LMBatch(
            inputs=self._packed(self.encoder.batch([self.encoder.words(text) for _, text in sentences])),
            epoch=position["epoch"],
            fraction=self._fraction(lines),
            position=self.settings | position,
        )


class SentenceBlock(NamedTuple):
    """Consecutive sentences, and the number of the block in the order of the epoch."""

    epoch: int
    number: int
    sentences: list[SourceSentence]


class StreamRow:
    """A row of a stream: the iterator of its blocks, and its place in the present one."""

    def __init__(
        self,
        encode: Callable[[SentenceText], AlignedTokens],
        blocks: Iterator[SentenceBlock],
        lines_read: Counter[int],  # by epoch, of all rows
    ):
        self.encode, self.blocks, self.lines_read = encode, blocks, lines_read
        self.go_to(SentenceBlock(0, -1, []))

    def go_to(self, block: SentenceBlock, line: int = 0, offset: int = 0):
        self.block, self.line, self.offset = block, line, offset
        self.tokens: AlignedTokens | None = None  # of this line, once it is read

    @property
    def place(self) -> list[int]:
        return [self.block.epoch, self.block.number, self.line, self.offset]

    @property
    def has_more(self) -> bool:
        return self.line < len(self.block.sentences)

    def begin_block(self) -> bool:
        """Begins the next block if there is one and the current block is finished. Returns whether it did."""
        if self.has_more:
            return False
        block = next(self.blocks, None)
        if block is None:
            return False
        self.go_to(block)
        return True

    def read(self, steps: int) -> Iterator[AlignedTokens]:
        """The next `steps` tokens, a part of a sentence at a time; fewer at the end of the block."""
        while steps and self.has_more:
            if self.tokens is None:
                _, text = self.block.sentences[self.line]
                self.tokens = self.encode(text)
                if self.offset == 0:
                    self.lines_read[self.block.epoch] += 1
            end = min(self.offset + steps, len(self.tokens.targets))
            yield AlignedTokens(*(column[self.offset : end] for column in self.tokens))
            steps -= end - self.offset
            self.offset = end
            if end == len(self.tokens.targets):
                self.go_to(self.block, self.line + 1)


@dataclass(eq=False)
class StreamWindows(CorpusBatches):
    """Windows of streams, as the original trains: a row continues in the next window with the LSTM states it had.

    The two directions read the corpus independently. Forward, a sentence `<S> a b </S>` has the inputs `<S> a b` and
    the targets `a b </S>`. Backward, it has the inputs `</S> b a` and the targets `b a <S>`. So the last target of a
    window is often the first input of the next. In both directions the next sentence of the file follows, as in the
    original: backward, only the words of a sentence are in reverse order.

    A row that has finished its block of consecutive lines takes the next block of its rank, in a new window and from
    zero states, which the original never resets. Blocks are shuffled within the buffer; the ranks take them in turn.

    Held-out text is cut into pieces of similar length, one for each row of all ranks. Each rank keeps its pieces in
    memory. A position needs the same number of ranks; held-out text has none.
    """

    SIZES = ("rows", "unroll_steps")

    rows: int
    unroll_steps: int

    def __post_init__(self, tokenizer: ELMoTokenizer):
        super().__post_init__(tokenizer)
        if self.is_held_out and self.survey is None:
            raise ValueError(
                "A held-out stream is cut into pieces of equal length, but the size of a streamed data set is unknown. "
                "Leave out --streaming."
            )
        self.block_lines = BLOCK_LINES
        if self.survey is not None:  # blocks of a small corpus are shorter, so that every row gets some
            self.block_lines = min(BLOCK_LINES, max(1, self.survey.lines // (self.rows * self.world_size)))
        if self.position is not None:
            self._check_position("world_size", len(self.position["ranks"]), self.world_size)

    @staticmethod
    def merge_positions(positions_by_rank: list[dict[str, Any]]) -> dict[str, Any]:
        """The position of all ranks, from the position of each."""
        # A rank that has read no batch still has the merged position that it began with.
        ranks = [position["ranks"][rank % len(position["ranks"])] for rank, position in enumerate(positions_by_rank)]
        return positions_by_rank[0] | {"ranks": ranks}

    def __iter__(self) -> Iterator[LMBatch]:
        lines_read = Counter[int]()  # by epoch, in the forward direction
        forward = self._start(0, lines_read)
        backward = self._start(1, Counter())
        all_rows = forward + backward
        while True:
            resets = torch.tensor([row.begin_block() for row in all_rows])
            if not any(row.has_more for row in all_rows):
                return
            inputs = self._window(forward, "forward_targets") | self._window(backward, "backward_targets", "backward_")
            epoch = min(row.block.epoch for row in all_rows)
            position = None
            if not self.is_held_out:
                places = [[row.place for row in rows] for rows in (forward, backward)]
                position = self.settings | {"ranks": [[*places, [*lines_read.items()]]]}
            yield LMBatch(
                inputs=inputs,
                epoch=epoch,
                fraction=self._fraction(lines_read[epoch] * self.world_size),
                position=position,
                resets=resets.view(2, -1),
            )

    def _window(self, rows: list[StreamRow], name_of_targets: str, prefix: str = "") -> dict[str, Any]:
        """Model inputs of the next window of a direction, with an attention mask only if a token is masked.

        After the end of a block the tokens of a row are 0 and its targets -100.
        """
        table, shape = self.encoder.table, (len(rows), self.unroll_steps)
        window = AlignedTokens(
            input_ids=np.zeros(shape, dtype=np.int64),
            character_ids=np.zeros((*shape, table.max_word_length), dtype=table.dtype),
            targets=np.full(shape, -100, dtype=np.int64),
        )
        for number, row in enumerate(rows):
            start = 0
            for tokens in row.read(self.unroll_steps):
                end = start + len(tokens.targets)
                for column, part in zip(window, tokens, strict=True):
                    column[number, start:end] = part
                start = end
        arrays = {
            f"{prefix}input_ids": window.input_ids,
            f"{prefix}character_ids": window.character_ids,
            name_of_targets: window.targets,
        }
        token_mask_BT = window.targets != -100
        if not token_mask_BT.all():
            arrays[f"{prefix}attention_mask"] = token_mask_BT.astype(np.int64)
        return self._packed(as_tensors(**arrays), prefix)

    def _start(self, direction: int, lines_read: Counter[int]) -> list[StreamRow]:
        """The rows of a direction at the position, or at the beginning."""
        encode = partial(self.encoder.stream, backward=direction == 1)
        if self.is_held_out:
            return [StreamRow(encode, iter(piece), lines_read) for piece in self._pieces()]
        places: list[list[int]] = []
        if self.position is not None:
            *places_by_direction, counts = self.position["ranks"][self.rank]
            places = places_by_direction[direction]
            lines_read.update(dict(counts))
        blocks = self._blocks(direction, min((epoch for epoch, *_ in places), default=0))
        rows = [StreamRow(encode, blocks, lines_read) for _ in range(self.rows)]
        block_of = self._find({(epoch, number) for epoch, number, *_ in places}, blocks)
        for row, (epoch, number, line, offset) in zip(rows, places, strict=False):
            row.go_to(block_of[epoch, number], line, offset)
        return rows

    def _find(self, numbers: set, blocks: Iterator[SentenceBlock]) -> dict[tuple, SentenceBlock]:
        """The blocks with these epochs and numbers. Leaves the iterator after the last of them."""
        found: dict[tuple, SentenceBlock] = {}
        while len(found) < len(numbers):
            block = next(blocks, None)
            if block is None or block[:2] > max(numbers):
                raise ValueError(f"{self.corpus} has changed since the checkpoint was written. Start a new training.")
            if block[:2] in numbers:
                found[block[:2]] = block
        return found

    def _blocks(self, direction: int, first_epoch: int) -> Iterator[SentenceBlock]:
        seed = 2 * self.seed + direction
        size = max(1, self.shuffle_buffer // self.block_lines)
        for epoch in self._epochs(first_epoch):
            blocks = self._consecutive_lines(self.corpus.sentences(epoch, seed, self.shuffle))
            number = 0
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
        all_rows = self.rows * self.world_size
        words = 0
        for sentence in self.corpus.sentences(shuffle_files=False):
            row = min(words * all_rows // self.survey.words, all_rows - 1) - self.rank * self.rows
            if 0 <= row < self.rows:
                pieces[row].append(sentence)
            words += len(words_of(sentence[1]))
        return [[SentenceBlock(0, number, piece)] if piece else [] for number, piece in enumerate(pieces)]


def as_tensors(**arrays: np.ndarray) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def batch_loader(dataset: CorpusBatches, num_workers: int) -> DataLoader:
    """The batches in their order, prepared by `num_workers` processes (0: by this one).

    Without `pin_memory`: the model pins the few tensors that it moves, and the host reads the others.

    On two cores of an AMD EPYC, raw English gives 37, 65 and 91 batches of 16,384 tokens a second by 0, 1 and 2
    processes, and text that is split already 132, 89 and 137. So one process feeds a million words per second. On an
    H100, training waited for it for 0.1 % of the time.
    """
    if num_workers:  # else a forked process warns about the threads of the Rust library, which is not used there
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=nn.Identity(),  # the stock function would walk through all lines
        worker_init_fn=_start_worker,
    )


def _start_worker(_: int):
    """Protects a worker from the Ctrl-C or SIGTERM of its group, and from its own end.

    The step that runs still needs its batches. A spawned process, unlike a forked one, takes its interpreter down while
    a thread of the queue may still hand tensors to torch, which then aborts the process, and with it the training.
    """
    if hasattr(os, "setsid"):  # not on Windows
        os.setsid()
    atexit.register(os._exit, 0)
