"""TensorFlow's checkpoint format, the "tensor bundle": an index, and the bytes of all tensors in one or more shards.

The index is a table as in LevelDB: blocks of sorted keys, each key without the prefix that it shares with the key
before, then a block with the places of these blocks, then a footer. The values are protocol buffers. Every block and
every tensor has a checksum, which is compared here: CRC-32C, rotated and shifted ("masked").
"""

from collections.abc import Iterator
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from modeling_elmo.conversion import files

FOOTER = 48
MAGIC = bytes.fromhex("57fb808b247547db")
DTYPES = {1: np.float32, 2: np.float64, 3: np.int32, 9: np.int64}  # numbers of TensorFlow's DataType
FLOAT32 = 1
CHUNK = 2**20  # words of four bytes whose checksums are joined at a time


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
    needed = prod(entry.shape) * dtype.itemsize
    there = shard.stat().st_size
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
        footer = BytesIO(content[-FOOTER:])
        _handle(footer)  # of a block with facts about the table, which is empty
        pairs: dict[bytes, bytes] = {}
        for _, place in _pairs(_block(content, *_handle(footer))):
            block = _block(content, *_handle(BytesIO(place)))
            pairs.update(_pairs(block))
        header = dict(_fields(pairs.pop(b"")))
        if header.get(2):
            raise ValueError("its numbers are big-endian")
        return header[1], {key.decode(): _entry(value) for key, value in pairs.items()}


def _handle(stream: BytesIO) -> tuple[int, int]:
    """Offset and size of a block."""
    return _varint(stream), _varint(stream)


def _block(content: bytes, offset: int, size: int) -> bytes:
    """The bytes of a block, which its compression and checksum follow."""
    end = offset + size
    block = content[offset:end]
    compression = content[end : end + 1]
    checksum = int.from_bytes(content[end + 1 : end + 5], "little")
    if crc32c(np.frombuffer(block + compression, np.uint8)) != checksum:
        raise ValueError(f"the checksum of the block at byte {offset} differs")
    if compression != b"\0":
        raise ValueError("its blocks are compressed; tf.train.Saver writes uncompressed ones")
    return block


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of a block. It ends with places to start from, and their number."""
    num_starts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * num_starts
    key = b""
    stream = BytesIO(block)
    while stream.tell() < end:
        num_shared = _varint(stream)
        num_others = _varint(stream)
        size = _varint(stream)
        key = key[:num_shared] + stream.read(num_others)
        yield key, stream.read(size)


def _entry(message: bytes) -> Entry:
    values = dict(_fields(message))
    shape = []
    for number, dimension in _fields(values.get(2, b"")):
        if number == 2:
            shape.append(dict(_fields(dimension)).get(1, 0))
    return Entry(
        dtype=values.get(1, 0),
        shape=tuple(shape),
        shard=values.get(3, 0),
        offset=values.get(4, 0),
        size=values.get(5, 0),
        checksum=values.get(6, 0),
        is_sliced=7 in values,
    )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of the fields of a protocol buffer."""
    stream = BytesIO(message)
    while stream.tell() < len(message):
        number, kind = divmod(_varint(stream), 8)
        if kind == 0:
            yield number, _varint(stream)
        elif kind == 2:
            yield number, stream.read(_varint(stream))
        else:
            yield number, int.from_bytes(stream.read({1: 8, 5: 4}[kind]), "little")


def _varint(stream: BytesIO) -> int:
    """A number of 7 bits per byte, the lowest first."""
    value = shift = 0
    while True:
        [byte] = stream.read(1)
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value


def _after_byte(registers: np.ndarray) -> np.ndarray:
    """The registers after a byte of zeros."""
    for _ in range(8):
        registers = np.where(registers & 1, registers >> 1 ^ np.uint32(0x82F63B78), registers >> 1)
    return registers


# The register after a word of zeros, from a register in which one byte is not zero: (4 places, 256 values).
_AFTER_WORD = np.arange(256, dtype=np.uint32) << np.array([[0], [8], [16], [24]], np.uint32)
for _ in range(4):
    _AFTER_WORD = _after_byte(_AFTER_WORD)


def _moved(registers: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The registers after the zeros of the table `after`. They are linear in their bytes."""
    first, second, third, fourth = (table[registers >> 8 * place & 255] for place, table in enumerate(after))
    return first ^ second ^ third ^ fourth


def crc32c(content: np.ndarray) -> int:
    """The masked CRC-32C of bytes.

    To read a word is to add it to the register, and to move on by a word of zeros. So neighbors can be joined, then
    neighbors of these sums, and so on: the first of two moves on by as many words as the second has.
    """
    words = content[: len(content) // 4 * 4].view("<u4")
    register = 0xFFFFFFFF
    for start in range(0, len(words), CHUNK):
        sums = words[start : start + CHUNK].copy()
        sums[0] ^= register
        after = _AFTER_WORD
        while len(sums) > 1:
            sums = np.append(np.zeros(len(sums) % 2, np.uint32), sums)
            sums = _moved(sums[::2], after) ^ sums[1::2]
            after = _moved(after, after)
        register = int(_moved(sums, _AFTER_WORD)[0])
    for byte in content[4 * len(words) :].tolist():
        lowest = np.array((register ^ byte) & 255, np.uint32)
        register = int(_after_byte(lowest)) ^ register >> 8
    checksum = register ^ 0xFFFFFFFF
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) % 2**32
