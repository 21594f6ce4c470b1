"""TensorFlow's checkpoint format, the "tensor bundle": an index, and the bytes of all tensors in one or more shards.

The index is a table as in LevelDB: blocks of sorted keys, each key without the prefix that it shares with the key
before, then a block with the places of these blocks, then a footer. The values are protocol buffers. Every block and
every tensor has a checksum, which is compared here: CRC-32C, rotated and shifted ("masked").
"""

from collections.abc import Iterator
from functools import reduce
from math import prod
from operator import xor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from modeling_elmo.conversion import files as files

FOOTER, MAGIC = 48, bytes.fromhex("57fb808b247547db")
DTYPES = {1: np.float32, 2: np.float64, 3: np.int32, 9: np.int64}  # numbers of TensorFlow's DataType
FLOAT32 = 1
LANE = 512  # bytes
CHUNK = 2**22  # bytes whose lanes are read at a time


class Entry(NamedTuple):
    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    is_sliced: bool


def read_tensor(shard: Path, name: str, entry: Entry) -> Tensor:
    """The values of an entry, whose sizes and checksum are compared with the shard."""
    if entry.is_sliced or entry.dtype not in DTYPES:
        kind = "in slices" if entry.is_sliced else f"of TensorFlow's type {entry.dtype}"
        raise ValueError(f"{shard} has {name} {kind}; save the checkpoint again without partitioned variables.")
    dtype = np.dtype(DTYPES[entry.dtype])
    needed, there = prod(entry.shape) * dtype.itemsize, shard.stat().st_size
    if entry.size != needed or entry.offset + entry.size > there:
        raise ValueError(
            f"{shard} is damaged or incomplete ({name} of shape {entry.shape} needs {needed} bytes, its entry has "
            f"{entry.size} from byte {entry.offset} of {there}); pass another copy."
        )
    values = np.fromfile(shard, dtype, prod(entry.shape), offset=entry.offset)
    if crc32c(values.view(np.uint8)) != entry.checksum:
        raise ValueError(f"{shard} is damaged (the checksum of {name} differs); pass another copy.")
    tensor = torch.from_numpy(values).reshape(entry.shape)
    files.check_finite({name: tensor}, shard)
    return tensor


def read_index(path: Path) -> tuple[int, dict[str, Entry]]:
    """The number of shards, and the entries of all tensors by their names."""
    content = path.read_bytes()
    with files.reading(path):
        if not content.endswith(MAGIC):
            raise ValueError("it does not end as the index of a TensorFlow checkpoint")
        _, place = _handle(content[-FOOTER:], 0)  # of a block with facts about the table, which is empty
        top, _ = _handle(content[-FOOTER:], place)
        blocks = [_block(content, _handle(value, 0)[0]) for _, value in _pairs(_block(content, top))]
        pairs = dict(pair for block in blocks for pair in _pairs(block))
        header = dict(_fields(pairs.pop(b"")))
        if header.get(2):
            raise ValueError("its numbers are big-endian")
        return header[1], {key.decode(): _entry(value) for key, value in pairs.items()}


def _handle(content: bytes, place: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and the place after them."""
    offset, place = _varint(content, place)
    size, place = _varint(content, place)
    return (offset, size), place


def _block(content: bytes, handle: tuple[int, int]) -> bytes:
    """The bytes of a block, which its compression and checksum follow."""
    offset, size = handle
    block, compression = content[offset : offset + size], content[offset + size : offset + size + 1]
    checksum = content[offset + size + 1 : offset + size + 5]
    if crc32c(np.frombuffer(block + compression, np.uint8)) != int.from_bytes(checksum, "little"):
        raise ValueError(f"the checksum of the block at byte {offset} differs")
    if compression != b"\0":
        raise ValueError("its blocks are compressed; tf.train.Saver writes uncompressed ones")
    return block


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of a block. It ends with places to start from, and their number."""
    end, place, key = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little"), 0, b""
    while place < end:
        shared, place = _varint(block, place)
        own, place = _varint(block, place)
        size, place = _varint(block, place)
        key = key[:shared] + block[place : place + own]
        yield key, block[place + own : place + own + size]
        place += own + size


def _entry(message: bytes) -> Entry:
    found = dict(_fields(message))
    dims = [dict(_fields(dim)) for number, dim in _fields(found.get(2, b"")) if number == 2]
    shape = tuple(dim.get(1, 0) for dim in dims)
    dtype, shard, offset, size, checksum = (found.get(number, 0) for number in (1, 3, 4, 5, 6))
    return Entry(dtype, shape, shard, offset, size, checksum, is_sliced=7 in found)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of the fields of a protocol buffer."""
    place, value = 0, b""  # type: int, Any
    while place < len(message):
        tag, place = _varint(message, place)
        if (kind := tag & 7) == 0:
            value, place = _varint(message, place)
        else:
            size, place = _varint(message, place) if kind == 2 else ({1: 8, 5: 4}[kind], place)
            value, place = message[place : place + size], place + size
        yield tag >> 3, value if kind in (0, 2) else int.from_bytes(value, "little")


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """A number of 7 bits per byte, the lowest first, and the place after it."""
    value = shift = 0
    while True:
        byte, place = content[place], place + 1
        value, shift = value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, place


def crc32c(content: np.ndarray) -> int:
    """The masked CRC-32C of bytes."""
    register = _START
    for start in range(0, len(content), CHUNK):
        register = _advance(register, content[start : start + CHUNK])
    checksum = register ^ _START
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) % 2**32


_START = 0xFFFFFFFF
_TABLE = np.arange(256, dtype=np.uint32)  # the register after a byte, from each register of one byte
for _ in range(8):
    _TABLE = np.where(_TABLE & 1, _TABLE >> 1 ^ np.uint32(0x82F63B78), _TABLE >> 1)


def _read(registers: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The registers after the bytes of `columns`, each after a column."""
    for column in columns:
        registers = _TABLE[(registers ^ column) & 255] ^ registers >> 8
    return registers


# A register is linear in the bits that it has read. So lanes of bytes are read side by side, each from a register of 0:
# the register of A followed by B is that of B, plus that of A after as many zeros, which is looked up byte by byte.
_AFTER_LANE = _read(
    np.arange(256, dtype=np.uint32) << np.array([[0], [8], [16], [24]], np.uint32), np.zeros(LANE, np.uint8)
).tolist()


def _advance(register: int, content: np.ndarray) -> int:
    """The register after the bytes of `content`."""
    lanes = content[: len(content) // LANE * LANE].reshape(-1, LANE)
    for lane in _read(np.zeros(len(lanes), np.uint32), np.ascontiguousarray(lanes.T)).tolist():
        moved = (table[byte] for table, byte in zip(_AFTER_LANE, register.to_bytes(4, "little"), strict=True))
        register = reduce(xor, moved, lane)
    return int(_read(np.array([register], np.uint32), content[lanes.size :])[0])
