"""The partition of a key. All clients of a topic must agree, so the partitioner is a property of the topic.

`murmur2` gives the same partitions as Kafka's Java clients: `toPositive(murmur2(key)) % partitions`. `crc32c` is the
partitioner of topics that are older than the choice. Text is hashed as UTF-8. An integer of any width is hashed as 8
bytes, big-endian (as Kafka's LongSerializer writes it).
"""

from __future__ import annotations

import importlib
import struct
from functools import cache
from typing import Any, Final, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds

from embarcadero.errors import BadSchema
from embarcadero.types import CRC32C, MURMUR2
from embarcadero.wire.codec import payload_crc

Partitions = npt.NDArray[np.int32]
NO_PARTITION: Final = -1
"""The partition of a row with a null key."""

_KINDS: Final = {MURMUR2: 0, CRC32C: 1}
_BYTES: Final = (kinds.is_binary, kinds.is_string, kinds.is_large_binary, kinds.is_large_string)
_MASK: Final = 0xFFFF_FFFF
_SEED, _M = 0x9747_B28C, 0x5BD1_E995


class _Native(Protocol):
    """The functions of the C module (native/partitions.c)."""

    def partition(self, kind: int, key: bytes, partitions: int, /) -> int: ...
    def column(
        self,
        kind: int,
        partitions: int,
        offsets: object,
        width: int,
        data: object,
        validity: object,
        first: int,
        count: int,
        out: object,
        /,
    ) -> None: ...


def _load_native() -> _Native | None:
    try:
        return cast(_Native, importlib.import_module("embarcadero.wire._partitions"))
    except ImportError:
        return None


NATIVE = _load_native()


# --- the key column of a topic ----------------------------------------------------------------------------------------
def check_key(schema: pa.Schema, key: str) -> None:
    """Raise BadSchema unless the schema has this key column, with a type that can be hashed."""
    if key not in schema.names:
        raise BadSchema(f"key {key!r} is not a column of the schema", f"use one of {', '.join(schema.names)}")
    kind = schema.field(key).type
    if not is_key_type(kind):
        raise BadSchema(f"key column {key!r} has type {kind}", "use a binary, string or integer column")


def is_key_type(kind: pa.DataType) -> bool:
    """Whether values of this type can be keys."""
    return kinds.is_integer(kind) or any(is_bytes(kind) for is_bytes in _BYTES)


# --- one key ----------------------------------------------------------------------------------------------------------
def partition_of(key: bytes, partitions: int, partitioner: str) -> int:
    """Return the partition of one key."""
    if NATIVE is not None:
        return NATIVE.partition(_KINDS[partitioner], key, partitions)
    return key_hash(key, partitioner) % partitions


def key_hash(key: bytes, partitioner: str) -> int:
    """Return the hash of one key, without the native module."""
    return murmur2(key) & 0x7FFF_FFFF if partitioner == MURMUR2 else payload_crc(key)


def murmur2(key: bytes) -> int:
    """Hash as `org.apache.kafka.common.utils.Utils.murmur2` does; unsigned."""
    words, tail = len(key) // 4, key[len(key) & ~3 :]
    h = _SEED ^ len(key) & _MASK
    for word in struct.unpack_from(f"<{words}I", key):
        k = word * _M & _MASK
        h = (h * _M & _MASK) ^ ((k ^ k >> 24) * _M & _MASK)
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


# --- whole columns ----------------------------------------------------------------------------------------------------
def partitions_of(keys: pa.Array, partitions: int, partitioner: str) -> Partitions:
    """Return the partitions of a column of keys: binary, text or integers. NO_PARTITION for a null key."""
    column = _as_bytes(keys)
    if NATIVE is None:
        return _partitions_of(column, partitions, partitioner)
    validity, offsets, data = column.buffers()
    found = np.empty(len(column), dtype=np.int32)
    width = 8 if kinds.is_large_binary(column.type) or kinds.is_large_string(column.type) else 4
    if len(column):
        NATIVE.column(
            _KINDS[partitioner], partitions, offsets, width, data or b"", validity, column.offset, len(column), found
        )
    return found


def _as_bytes(keys: pa.Array) -> pa.Array:
    """Convert keys to a column of bytes or text; integers to 8 bytes each, big-endian."""
    if not kinds.is_integer(keys.type):
        return keys
    wide = np.uint64 if keys.type == pa.uint64() else np.int64
    numbers = keys.fill_null(0).to_numpy(zero_copy_only=False).astype(wide)
    offsets = np.arange(len(keys) + 1, dtype=np.int64) * 8
    missing = np.packbits(np.asarray(keys.is_valid(), dtype=bool), bitorder="little") if keys.null_count else None
    validity = None if missing is None else pa.py_buffer(missing)
    data = numbers.astype(numbers.dtype.newbyteorder(">")).tobytes()
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(keys), buffers)


def _partitions_of(column: pa.Array, partitions: int, partitioner: str) -> Partitions:
    """Return partitions without the native module, with one step for each byte or word of the longest key."""
    large = kinds.is_large_binary(column.type) or kinds.is_large_string(column.type)
    _, offsets, buffer = column.buffers()
    if not len(column):
        return np.empty(0, dtype=np.int32)
    raw: npt.NDArray[Any] = np.frombuffer(offsets, dtype=np.int64 if large else np.int32)
    ends = raw[column.offset : column.offset + len(column) + 1].astype(np.int64)
    data = np.frombuffer(buffer if buffer is not None and buffer.size else b"\0", dtype=np.uint8)
    there = np.asarray(column.is_valid(), dtype=bool)
    starts, lengths = ends[:-1], np.where(there, np.diff(ends), 0)
    longest_first = np.argsort(-lengths, kind="stable")
    hashed = (_murmur2 if partitioner == MURMUR2 else _crc32c)(data, starts[longest_first], lengths[longest_first])
    found = np.empty(len(column), dtype=np.int32)
    found[longest_first] = hashed % np.uint32(partitions)
    found[~there] = NO_PARTITION
    return found


def _crc32c(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Compute the CRC32C of keys that are sorted by length, the longest first."""
    crc, table = np.full(len(starts), _MASK, dtype=np.uint32), _crc_table()
    for at in range(int(lengths[0])):
        still = int(np.searchsorted(-lengths, -at))  # keys longer than `at`
        crc[:still] = table[(crc[:still] ^ data[starts[:still] + at]) & 0xFF] ^ (crc[:still] >> 8)
    return crc ^ np.uint32(_MASK)


def _murmur2(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Compute murmur2 of keys that are sorted by length, the longest first. The sign bit is cleared."""
    m = np.uint32(_M)
    words = lengths // 4
    h = np.uint32(_SEED) ^ lengths.astype(np.uint32)
    for at in range(int(words[0])):
        still = int(np.searchsorted(-words, -at))  # keys with more words than `at`
        k = _bytes_at(data, starts[:still] + 4 * at, 4) * m
        k = (k ^ (k >> np.uint32(24))) * m
        h[:still] = (h[:still] * m) ^ k
    for size in (1, 2, 3):
        rows = np.flatnonzero(lengths % 4 == size)
        h[rows] = (h[rows] ^ _bytes_at(data, starts[rows] + 4 * words[rows], size)) * m
    h = (h ^ (h >> np.uint32(13))) * m
    return (h ^ (h >> np.uint32(15))) & np.uint32(0x7FFF_FFFF)


def _bytes_at(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.uint32]:
    """Read `size` bytes from each start as one little-endian number."""
    word = np.zeros(len(starts), dtype=np.uint32)
    for byte in range(size):
        word |= data[starts + byte].astype(np.uint32) << np.uint32(8 * byte)
    return word


@cache
def _crc_table() -> npt.NDArray[np.uint32]:
    """Return the CRC32C of each byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F6_3B78), table >> 1).astype(np.uint32)
    return table
