"""The payload of a batch: one Arrow IPC record batch message, without its schema (the topic knows it).

Nothing is parsed per record: encoding copies columns into one buffer, decoding makes arrays that lie on the received
bytes. A payload's CRC shows that nobody changed it, not that its publisher was honest, so decoding trusts nothing in
it: Arrow verifies the metadata, every buffer is checked to fit, and the sizes that buffers, lists and maps claim are
added up before any memory is asked for (compression.py). What is inside the columns (offsets, UTF-8, nulls where none
may be) is checked if asked (`full`), at a few ns a record; without it, read columns only of publishers you trust.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from embarcadero.errors import BadValue, Corrupt
from embarcadero.limits import HEADERS_PER_BATCH_MAX, LIST_ENTRIES_MAX
from embarcadero.wire.compression import check_unpacked, compressed

RAW_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("headers", pa.map_(pa.string(), pa.binary())),
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""Records of a topic without a schema of its own."""

TIMESTAMP_US_MIN: Final = -62_135_596_800_000_000
TIMESTAMP_US_MAX: Final = 253_402_300_799_999_999
"""Times that a datetime can be: the years 1 to 9999."""

_KEY, _VALUE, _HEADERS, _TIMESTAMP = RAW_SCHEMA.types
_ARROW_ERRORS: Final = (pa.ArrowException, EOFError, OSError, ValueError, TypeError, OverflowError)
_ADVICE: Final = "skip this batch and look at the program that published it"


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


def plain_batch(values: Sequence[bytes], times_s: Sequence[float]) -> pa.RecordBatch:
    """Records that have only a value and the time of a clock, in seconds: the quick way to make a raw batch."""
    count = len(values)
    times = np.rint(np.fromiter(times_s, np.float64, count) * 1e6).astype(np.int64)
    ends = np.zeros(count + 1, np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int32, count), out=ends[1:])
    columns = [  # laid out by hand: pa.array would load pandas first, if there is one, for a third of a second
        pa.nulls(count, _KEY),
        pa.Array.from_buffers(_VALUE, count, [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]),
        pa.nulls(count, _HEADERS),
        pa.Array.from_buffers(_TIMESTAMP, count, [None, pa.py_buffer(times)]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


def encode_batch(batch: pa.RecordBatch, compression: str | None = None) -> pa.Buffer:
    """The payload of a batch frame; `compression` is None, "lz4" or "zstd"."""
    return batch.serialize() if compression is None else compressed(batch, compression)


def list_entries_max(schema: pa.Schema) -> int:
    """How many entries all lists and maps of a batch of this schema may have, together."""
    return HEADERS_PER_BATCH_MAX if schema is RAW_SCHEMA or schema.equals(RAW_SCHEMA) else LIST_ENTRIES_MAX


def decode_batch(buffer: Any, schema: pa.Schema, count: int, *, full: bool = False) -> pa.RecordBatch:
    """The record batch in a payload, lying on `buffer`. Corrupt, if it is no batch of `count` records of `schema`."""
    try:
        message = pa.ipc.read_message(buffer)
        if message.type != "record batch":
            raise Corrupt(f"a payload holds a {message.type} message", "its publisher must send record batches")
        check_unpacked(message.metadata.to_pybytes(), message.body, schema, count, list_entries_max(schema))
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=full)
        if full and any(not field.nullable and batch.column(i).null_count for i, field in enumerate(schema)):
            raise Corrupt("a payload lacks values that its topic's schema demands", _ADVICE)
    except (*_ARROW_ERRORS, struct.error) as error:
        raise Corrupt(f"a payload is no record batch of its topic's schema: {error}", _ADVICE) from error
    if batch.num_rows != count:
        raise Corrupt(f"a payload has {batch.num_rows} records, its entry says {count}", _ADVICE)
    return batch
