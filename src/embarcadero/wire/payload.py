"""The payload of a batch: one Arrow IPC record batch message, without its schema (the topic knows it).

Nothing is parsed per record: encoding copies columns into one buffer, decoding makes arrays that lie on the received
bytes. A payload's CRC shows that nobody changed it, not that its publisher was honest, so decoding trusts nothing in
it: Arrow verifies the metadata, every buffer is checked to fit, and compressed bodies are refused because their few
bytes may claim any amount of memory. What is inside the columns (offsets, UTF-8, nulls where none may be) is checked
if asked (`full`), at a few ns a record; without it, read columns only of publishers you trust.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from embarcadero.errors import BadValue, Corrupt

RAW_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("headers", pa.map_(pa.string(), pa.binary())),
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""Records of a topic without a schema of its own."""

_KEY, _VALUE, _HEADERS, _TIMESTAMP = RAW_SCHEMA.types
_ARROW_ERRORS: Final = (pa.ArrowException, EOFError, OSError, ValueError, TypeError, OverflowError)
_ADVICE: Final = "skip this batch and look at the program that published it"

# Positions of fields in the flatbuffer tables of Arrow's Message.fbs.
_MESSAGE_HEADER: Final = 2
_BATCH_COMPRESSION: Final = 3


def raw_batch(
    keys: Sequence[bytes | None],
    values: Sequence[bytes],
    headers: Sequence[Mapping[str, bytes] | None],
    timestamps_us: Sequence[int],
) -> pa.RecordBatch:
    """Records as columns; all four have the same length."""
    count = len(values)
    try:
        columns = [
            _nullable(keys, _KEY),
            pa.array(values, _VALUE),
            _nullable(headers, _HEADERS, _pairs),
            pa.array(np.fromiter(timestamps_us, np.int64, len(timestamps_us))).view(_TIMESTAMP),
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)
    except (*_ARROW_ERRORS, AttributeError) as error:
        raise BadValue(
            f"{count} records can't be made a batch: {error}",
            "keys and values are bytes, headers map str to bytes, timestamps are microseconds since 1970",
        ) from error
    if batch.column(1).null_count:
        raise BadValue("a record without a value", "send b'' for an empty value")
    return batch


def _nullable(items: Sequence[Any], kind: pa.DataType, convert: Callable[[Any], Any] | None = None) -> pa.Array:
    """A column that is often all null, which then costs next to nothing."""
    if items.count(None) == len(items):
        return pa.nulls(len(items), kind)
    return pa.array(items if convert is None else list(map(convert, items)), kind)


def _pairs(headers: Mapping[str, bytes] | None) -> list[tuple[str, bytes]] | None:
    return None if headers is None else list(headers.items())


def encode_batch(batch: pa.RecordBatch) -> pa.Buffer:
    """The payload of a batch frame."""
    return batch.serialize()


def decode_batch(buffer: Any, schema: pa.Schema, count: int, *, full: bool = False) -> pa.RecordBatch:
    """The record batch in a payload, lying on `buffer`. Corrupt, if it is no batch of `count` records of `schema`."""
    try:
        message = pa.ipc.read_message(buffer)
        if message.type != "record batch":
            raise Corrupt(f"a payload holds a {message.type} message", "its publisher must send record batches")
        if _is_compressed(message.metadata.to_pybytes()):
            raise Corrupt("a payload is compressed", "its publisher must send record batches without compression")
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=full)
        if full and any(not field.nullable and batch.column(i).null_count for i, field in enumerate(schema)):
            raise Corrupt("a payload lacks values that its topic's schema demands", _ADVICE)
    except (*_ARROW_ERRORS, struct.error) as error:
        raise Corrupt(f"a payload is no record batch of its topic's schema: {error}", _ADVICE) from error
    if batch.num_rows != count:
        raise Corrupt(f"a payload has {batch.num_rows} records, its entry says {count}", _ADVICE)
    return batch


def _is_compressed(metadata: bytes) -> bool:
    """Whether a record batch message names a compression; Arrow has verified that its offsets lie inside."""
    (message,) = struct.unpack_from("<I", metadata)
    header = _field(metadata, message, _MESSAGE_HEADER)
    if header is None:
        raise Corrupt("a payload's message has no record batch", _ADVICE)
    (offset,) = struct.unpack_from("<I", metadata, header)
    return _field(metadata, header + offset, _BATCH_COMPRESSION) is not None


def _field(metadata: bytes, table: int, number: int) -> int | None:
    """Where a field of a flatbuffer table is; None if absent."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    (vtable_bytes,) = struct.unpack_from("<H", metadata, vtable)
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", metadata, vtable + entry)[0] if entry < vtable_bytes else 0
    return table + offset if offset else None
