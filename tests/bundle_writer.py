"""Writes TensorFlow checkpoints as tf.train.Saver does, and index files that are wrong in one place."""

import struct
from pathlib import Path

import numpy as np

DTYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9}
MAGIC = 0xDB4775248B80FB57


def plain_crc32c(content: bytes) -> int:
    """The definition: one bit after the other."""
    register = 0xFFFFFFFF
    for byte in content:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def masked(content: bytes) -> int:
    checksum = plain_crc32c(content)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def header(num_shards: int, big_endian: bool = False) -> bytes:
    return field(1, num_shards) + (field(2, 1) if big_endian else b"") + field(3, field(1, 1))


def entry(dtype: int, shape, shard: int, offset: int, size: int, checksum: int) -> bytes:
    dims = b"".join(field(2, field(1, length)) for length in shape)
    numbers = field(1, dtype) + field(2, dims) + field(3, shard) + field(4, offset) + field(5, size)
    return numbers + varint(6 << 3 | 5) + struct.pack("<I", checksum)


def block_of(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Complete keys; the fixtures have keys that lack what they share with the key before."""
    parts = [varint(0) + varint(len(key)) + varint(len(value)) + key + value for key, value in pairs]
    return b"".join(parts) + struct.pack("<II", 0, 1)


def write_index(path: Path, pairs: list[tuple[bytes, bytes]], per_block: int = 7, compression: int = 0):
    content, handles = b"", []

    def add(block: bytes) -> bytes:
        nonlocal content
        handle, kind = varint(len(content)) + varint(len(block)), bytes([compression])
        content += block + kind + struct.pack("<I", masked(block + kind))
        return handle

    for start in range(0, len(pairs), per_block):
        some = pairs[start : start + per_block]
        handles.append((some[-1][0] + b"~", add(block_of(some))))
    meta, top = add(block_of([])), add(block_of(handles))
    path.write_bytes(content + (meta + top).ljust(40, b"\0") + struct.pack("<Q", MAGIC))


def write_bundle(folder: Path, arrays: dict[str, np.ndarray], step: int = 180, num_shards: int = 1):
    """Writes `model.ckpt-STEP`. The tensors go to the shards in turn."""
    prefix, shards, pairs = folder / f"model.ckpt-{step}", [b""] * num_shards, [(b"", header(num_shards))]
    for number, name in enumerate(sorted(arrays)):
        shard, array = number % num_shards, np.asarray(arrays[name])
        content, offset = array.tobytes(), len(shards[shard])
        shards[shard] += content
        found = entry(DTYPES[str(array.dtype)], array.shape, shard, offset, len(content), masked(content))
        pairs.append((name.encode(), found))
    write_index(Path(f"{prefix}.index"), pairs)
    for number, content in enumerate(shards):
        Path(f"{prefix}.data-{number:05}-of-{num_shards:05}").write_bytes(content)
