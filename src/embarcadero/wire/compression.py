"""Compressed record batches: Arrow's own buffer compression, and what it may unpack to, known before it is unpacked.

In a compressed message each buffer begins with its unpacked length (8 bytes; -1: stored as it is). Arrow allocates what
that length says, so all of them are read and added up first.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

from embarcadero.errors import Corrupt
from embarcadero.limits import BATCH_BUFFERS_MAX, DECODED_BYTES_MAX

COMPRESSIONS: Final = ("lz4", "zstd")

_ADVICE: Final = "skip this batch and look at the program that published it"
_CONTINUES_BYTES: Final = 8  # before the metadata of a message: a mark, and the metadata's length
_STORED_AS_IT_IS: Final = -1
_BUFFER: Final = np.dtype([("offset", "<i8"), ("length", "<i8")])

# Positions of fields in the flatbuffer tables of Arrow's Message.fbs.
_MESSAGE_HEADER: Final = 2
_BATCH_BUFFERS: Final = 2
_BATCH_COMPRESSION: Final = 3


@cache
def _options(compression: str) -> pa.ipc.IpcWriteOptions:
    return pa.ipc.IpcWriteOptions(compression=compression)


def compressed(batch: pa.RecordBatch, compression: str) -> pa.Buffer:
    """The message of a record batch, compressed: cut out of a stream, since Arrow has no other way to make it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_options(compression)) as stream:
        stream.write_batch(batch)
    whole = sink.getvalue()
    (schema_bytes,) = struct.unpack_from("<i", whole, 4)
    start = _CONTINUES_BYTES + schema_bytes  # the message of the schema comes first, and has no body
    return whole.slice(start, whole.size - start - _CONTINUES_BYTES)  # the end of the stream comes last


def check_unpacked(metadata: bytes, body: Any) -> None:
    """Corrupt, if a message is compressed and would unpack to too much. Arrow has verified the metadata's offsets."""
    (message,) = struct.unpack_from("<I", metadata)
    batch = _table(metadata, message, _MESSAGE_HEADER)
    if batch is None:
        raise Corrupt("a payload's message has no record batch", _ADVICE)
    if _field(metadata, batch, _BATCH_COMPRESSION) is None:
        return
    claimed = sum(_claims(metadata, batch, memoryview(body) if body is not None else memoryview(b"")))
    if claimed > DECODED_BYTES_MAX:
        raise Corrupt(f"a payload unpacks to {claimed} bytes, more than {DECODED_BYTES_MAX}", _ADVICE)


def _claims(metadata: bytes, batch: int, body: memoryview) -> list[int]:
    """Unpacked length of each buffer of a record batch, as it claims."""
    vector = _table(metadata, batch, _BATCH_BUFFERS)
    if vector is None:
        return []
    (count,) = struct.unpack_from("<I", metadata, vector)
    if count > BATCH_BUFFERS_MAX:
        raise Corrupt(f"a compressed payload has {count} buffers, more than {BATCH_BUFFERS_MAX}", _ADVICE)
    claims = []
    for offset, length in np.frombuffer(metadata, _BUFFER, count, vector + 4).tolist():
        if not length:
            continue
        if length < 8 or offset < 0 or offset + length > len(body):
            raise Corrupt(f"a compressed buffer of {length} bytes at {offset} of {len(body)}", _ADVICE)
        (unpacked,) = struct.unpack_from("<q", body, offset)
        if unpacked < _STORED_AS_IT_IS:
            raise Corrupt(f"a compressed buffer unpacks to {unpacked} bytes", _ADVICE)
        claims.append(length if unpacked == _STORED_AS_IT_IS else unpacked)
    return claims


def _table(metadata: bytes, table: int, number: int) -> int | None:
    """Where the table or vector is that a field of a flatbuffer table points to."""
    field = _field(metadata, table, number)
    return None if field is None else field + int(struct.unpack_from("<I", metadata, field)[0])


def _field(metadata: bytes, table: int, number: int) -> int | None:
    """Where a field of a flatbuffer table is; None if absent."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    (vtable_bytes,) = struct.unpack_from("<H", metadata, vtable)
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", metadata, vtable + entry)[0] if entry < vtable_bytes else 0
    return table + offset if offset else None
