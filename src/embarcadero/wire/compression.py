"""Compressed record batches, and the size of any record batch, known before it is unpacked.

In a compressed message each buffer begins with its unpacked length (8 bytes; -1: stored as it is). Arrow allocates what
that length says, so all of them are read and added up first. Buffers that are not compressed may overlap, and lists of
values without bytes (nulls, empty strings) may have any length, so buffers and list entries are added up as well.
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
_NODE: Final = np.dtype([("length", "<i8"), ("null_count", "<i8")])
_OLD_COMPRESSION: Final = b"ARROW:experimental_compression"
"""A key in the metadata of Arrow 0.17's messages. Arrow's reader still unpacks them; no other writer makes them."""

# Positions of fields in the flatbuffer tables of Arrow's Message.fbs.
_MESSAGE_HEADER: Final = 2
_BATCH_LENGTH: Final = 0
_BATCH_NODES: Final = 1
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


def check_unpacked(metadata: bytes, body: Any, schema: pa.Schema, count: int, entries_max: int) -> None:
    """Raise Corrupt if a message has other than `count` records, or would unpack to too much.

    `entries_max`: entries that all its lists and maps together may have. Arrow has verified the offsets in the
    metadata; nothing else is believed, and nothing is unpacked.
    """
    if _OLD_COMPRESSION in metadata:
        raise Corrupt("a payload uses the experimental compression of Arrow 0.17", "use lz4 or zstd of Arrow 1.0")
    (message,) = struct.unpack_from("<I", metadata)
    batch = _table(metadata, message, _MESSAGE_HEADER)
    if batch is None:
        raise Corrupt("a payload's message has no record batch", _ADVICE)
    length = _field(metadata, batch, _BATCH_LENGTH)
    rows = 0 if length is None else int(struct.unpack_from("<q", metadata, length)[0])
    if rows != count:
        raise Corrupt(f"a payload has {rows} records, its entry says {count}", _ADVICE)
    claimed = sum(_claims(metadata, batch, memoryview(body) if body is not None else memoryview(b"")))
    if claimed > DECODED_BYTES_MAX:
        raise Corrupt(f"a payload unpacks to {claimed} bytes, more than {DECODED_BYTES_MAX}", _ADVICE)
    _check_lists(_vector(metadata, batch, _BATCH_NODES, _NODE)["length"].tolist(), schema, entries_max)


def _check_lists(lengths: list[int], schema: pa.Schema, entries_max: int) -> None:
    """Raise Corrupt if the lists and maps of a batch have too many entries in all.

    `lengths`: of all columns and, after each, of the columns within it; columns that `schema` lacks come last.
    """
    if len(lengths) <= len(schema):
        return  # no column has others within it, or Arrow refuses the batch
    entries = at = 0
    for kind in schema.types:
        found, at = _list_entries(lengths, kind, at)
        entries += found
    if entries > entries_max:
        raise Corrupt(f"lists and maps of a payload have {entries} entries in all, more than {entries_max}", _ADVICE)


def _list_entries(lengths: list[int], kind: pa.DataType, at: int) -> tuple[int, int]:
    """Entries in all lists of a column, whose own length is the one at `at`; and where the next column's is."""
    entries, at = 0, at + 1
    is_list = kind.num_fields > 0 and not pa.types.is_struct(kind)
    for number in range(kind.num_fields):
        if is_list and at < len(lengths):
            entries += max(0, lengths[at])
        found, at = _list_entries(lengths, kind.field(number).type, at)
        entries += found
    return entries, at


def _claims(metadata: bytes, batch: int, body: memoryview) -> list[int]:
    """Unpacked length of each buffer of a record batch, as it claims."""
    buffers = _vector(metadata, batch, _BATCH_BUFFERS, _BUFFER)
    if _field(metadata, batch, _BATCH_COMPRESSION) is None:
        return list(map(abs, buffers["length"].tolist()))  # Arrow refuses negative ones; they must not hide others
    claims = []
    for offset, length in buffers.tolist():
        if not length:
            continue
        if length < 8 or offset < 0 or offset + length > len(body):
            raise Corrupt(f"a compressed buffer of {length} bytes at {offset} of {len(body)}", _ADVICE)
        (unpacked,) = struct.unpack_from("<q", body, offset)
        if unpacked < _STORED_AS_IT_IS:
            raise Corrupt(f"a compressed buffer unpacks to {unpacked} bytes", _ADVICE)
        claims.append(length if unpacked == _STORED_AS_IT_IS else unpacked)
    return claims


def _vector(metadata: bytes, table: int, number: int, dtype: np.dtype[np.void]) -> np.ndarray[Any, np.dtype[np.void]]:
    """The structs that a field of a flatbuffer table points to."""
    vector = _table(metadata, table, number)
    if vector is None:
        return np.empty(0, dtype)
    (count,) = struct.unpack_from("<I", metadata, vector)
    if count > BATCH_BUFFERS_MAX:
        raise Corrupt(f"a payload has {count} buffers or columns, more than {BATCH_BUFFERS_MAX}", _ADVICE)
    return np.frombuffer(metadata, dtype, count, vector + 4)


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
