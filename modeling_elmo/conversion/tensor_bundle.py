"""TensorFlow's checkpoint format, the "tensor bundle": an index, and the bytes of all tensors in one or more shards.

The index is a table as in LevelDB: blocks of sorted keys, each key without the prefix that it shares with the key
before, then a block with the places of these blocks, then a footer. The values are protocol buffers. Every block and
every tensor has a checksum, which is compared here: CRC-32C, rotated and shifted ("masked").
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from modeling_elmo.conversion import files as files

FOOTER, MAGIC = 48, bytes.fromhex("57fb808b247547db")
LARGEST_INDEX = 2**24  # bytes. Indices of biLMs have 10,000.
DTYPES = {1: np.float32, 2: np.float64, 3: np.int32, 9: np.int64}  # numbers of TensorFlow's DataType
FLOAT32 = 1
LANE = 512  # bytes that one lane of `crc32c` reads, one after the other
CHUNK = 2**22  # bytes that are read and checked at a time


class Entry(NamedTuple):
    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    is_sliced: bool


class TensorBundle:
    """The tensors of a checkpoint by their names. Values are read at each access, and nothing is kept."""

    def __init__(self, entries: dict[str, Entry], shards: Sequence[Path]):
        self.entries, self.shards = entries, shards
        for name, entry in entries.items():
            self._check(name, entry)

    def _check(self, name: str, entry: Entry):
        """Compares the sizes of an entry with its shard, before memory is allocated."""
        shard = self.shards[entry.shard]
        if entry.is_sliced or entry.dtype not in DTYPES:
            kind = "in slices" if entry.is_sliced else f"of TensorFlow's type {entry.dtype}"
            raise ValueError(f"{shard} has {name} {kind}; save the checkpoint again without partitioned variables.")
        needed, there = prod(entry.shape) * np.dtype(DTYPES[entry.dtype]).itemsize, shard.stat().st_size
        if entry.size != needed or entry.offset + entry.size > there:
            raise ValueError(
                f"{shard} is damaged or incomplete ({name} of shape {entry.shape} needs {needed} bytes, its entry has "
                f"{entry.size} from byte {entry.offset} of {there}); pass another copy."
            )

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        shard, register = self.shards[entry.shard], _START
        values = np.empty(entry.size // np.dtype(DTYPES[entry.dtype]).itemsize, DTYPES[entry.dtype])
        content = values.view(np.uint8)
        with shard.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            for start in range(0, entry.size, CHUNK):
                chunk = content[start : start + CHUNK]
                if file.readinto(chunk.data) != len(chunk):
                    raise ValueError(f"{shard} is incomplete: it ends within {name}; pass another copy.")
                register = _advance(register, chunk)
        if _masked(register) != entry.checksum:
            raise ValueError(f"{shard} is damaged (the checksum of {name} differs); pass another copy.")
        if values.dtype.kind == "f" and not np.isfinite(values.sum(dtype=np.float64)):  # a sum has a NaN, if one has
            raise ValueError(f"{shard} has NaN or infinite values in {name}; pass another copy.")
        return torch.from_numpy(values).reshape(entry.shape)


def read_index(path: Path) -> tuple[int, dict[str, Entry]]:
    """The number of shards, and the entries of all tensors by their names."""
    if path.stat().st_size > LARGEST_INDEX:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, at most {LARGEST_INDEX} are read; pass a biLM's.")
    content = path.read_bytes()
    if content[-len(MAGIC) :] != MAGIC or len(content) < FOOTER:
        raise ValueError(f"{path} is not the complete index of a TensorFlow checkpoint; pass another copy.")
    with files.reading(path):
        _, place = _handle(content[-FOOTER:], 0)  # of a block with facts about the table, which is empty
        top, _ = _handle(content[-FOOTER:], place)
    with files.reading(path):
        handles = [_handle(value, 0)[0] for _, value in _pairs(_block(path, content, top))]
    blocks = [_block(path, content, handle) for handle in handles]
    with files.reading(path):
        pairs = list(islice((pair for block in blocks for pair in _pairs(block)), files.MOST_OBJECTS))
        header = dict(_fields(dict(pairs)[b""]))  # the first key is empty
        entries = {key.decode(): _entry(value) for key, value in pairs if key}
        if list(dict(pairs)) != sorted(key for key, _ in pairs) or header.get(2):
            raise ValueError("its keys are not sorted" if not header.get(2) else "its numbers are big-endian")
        if header[1] > files.MOST_OBJECTS:
            raise ValueError(f"it has {header[1]} shards")
        if wrong := [name for name, entry in entries.items() if entry.shard >= header[1]]:
            raise ValueError(f"{wrong[0]} is in a shard after the last of {header[1]}")
    return header[1], entries


def _handle(content: bytes, place: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and the place after them."""
    offset, place = _varint(content, place)
    size, place = _varint(content, place)
    return (offset, size), place


def _block(path: Path, content: bytes, handle: tuple[int, int]) -> bytes:
    """The bytes of a block, which its compression and checksum follow."""
    offset, size = handle
    block, compression = content[offset : offset + size], content[offset + size : offset + size + 1]
    checksum = content[offset + size + 1 : offset + size + 5]
    if len(checksum) < 4 or crc32c(block + compression) != int.from_bytes(checksum, "little"):
        raise ValueError(f"{path} is damaged (the checksum of the block at byte {offset} differs); pass another copy.")
    if compression != b"\0":
        raise ValueError(
            f"{path} has compressed blocks (type {compression[0]}; 1 is snappy), and only uncompressed ones are read, "
            "as tf.train.Saver writes them; save the checkpoint again."
        )
    return block


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of a block. It ends with places to start from, and their number."""
    end, place, key = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little"), 0, b""
    while place < end:
        shared, place = _varint(block, place)
        own, place = _varint(block, place)
        size, place = _varint(block, place)
        key = key[:shared] + block[place : place + own]
        if shared + own > files.LONGEST_NAME or len(key) != shared + own or place + own + size > end:
            raise ValueError(f"a key at byte {place} of a block is broken")
        yield key, block[place + own : place + own + size]
        place += own + size


def _entry(message: bytes) -> Entry:
    found = dict(_fields(message))
    dims = [dict(_fields(dim)) for number, dim in _fields(found.get(2, b"")) if number == 2]
    shape = tuple(dim.get(1, 0) for dim in dims)
    dtype, shard, offset, size, checksum = (found.get(number, 0) for number in (1, 3, 4, 5, 6))
    if any(not isinstance(value, int) for value in (dtype, *shape, shard, offset, size, checksum)):
        raise ValueError("an entry has text for a number")
    return Entry(dtype, shape, shard, offset, size, checksum, 7 in found)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of the fields of a protocol buffer."""
    place, value = 0, b""  # type: int, Any
    while place < len(message):
        tag, place = _varint(message, place)
        if (kind := tag & 7) == 0:
            value, place = _varint(message, place)
        elif kind == 2:
            size, place = _varint(message, place)
            value, place = message[place : place + size], place + size
        else:
            size = {1: 8, 5: 4}[kind]
            value, place = int.from_bytes(message[place : place + size], "little"), place + size
        if place > len(message):
            raise EOFError("an entry ends too early")
        yield tag >> 3, value


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """A number of 7 bits per byte, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        value |= (content[place] & 127) << shift
        place += 1
        if content[place - 1] < 128:
            return value, place
    raise ValueError("a number has more than 10 bytes")


def crc32c(content: bytes) -> int:
    """The masked CRC-32C of some bytes."""
    return _masked(_advance(_START, np.frombuffer(content, np.uint8)))


def _masked(register: int) -> int:
    checksum = register ^ _START
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) % 2**32


# The register of a CRC is linear in the bits that it has read. So lanes of bytes are read side by side, each from a
# register of 0, and joined: the register of A followed by B is that of B, plus that of A moved on by the length of B.
# An operator that moves a register on is an array of 32: the image of each bit.
_START = 0xFFFFFFFF
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


def _moved(operator: np.ndarray, registers: np.ndarray) -> np.ndarray:
    return np.bitwise_xor.reduce(np.where(registers[:, None] & _BITS, operator, np.uint32(0)), axis=1)


def _table(steps: int) -> np.ndarray:
    """The registers of all numbers after some steps of a bit."""
    table = np.arange(2**steps, dtype=np.uint32)
    for _ in range(steps):
        table = np.where(table & 1, table >> 1 ^ np.uint32(0x82F63B78), table >> 1)
    return table


_TABLE = _table(16)
_ONE_BYTE = _table(8)[_BITS & 255] ^ _BITS >> 8


def _advance(register: int, content: np.ndarray) -> int:
    """The register after the bytes of `content`."""
    lanes = 1 << max(0, -(-len(content) // LANE) - 1).bit_length()
    padded = np.zeros(lanes * LANE, np.uint8)  # zeros in front leave a register of 0 as it is
    padded[len(padded) - len(content) :] = content
    columns = np.ascontiguousarray(padded.view("<u2").reshape(lanes, -1).T)
    registers = np.zeros(lanes, np.uint32)
    for column in columns:
        registers = _TABLE[(registers ^ column) & 0xFFFF] ^ registers >> 16
    move = _power(LANE)
    while len(registers) > 1:
        registers = _moved(move, registers[::2]) ^ registers[1::2]
        move = _moved(move, move)
    before = _moved(_power(len(content)), np.array([register], np.uint32))
    return int(before[0] ^ registers[0])


def _power(length: int) -> np.ndarray:
    """The operator that moves a register on by some bytes of zero."""
    power, move = _BITS, _ONE_BYTE
    while length:
        power = _moved(move, power) if length & 1 else power
        move, length = _moved(move, move), length >> 1
    return power
