"""Schemas of topics, and payloads of batches: Arrow record batches of these schemas.

A payload is one Arrow IPC record batch message without its schema, which the topic has. No step works per record:
encoding copies columns into one buffer, and decoding creates arrays over the received bytes.

A payload's CRC shows that its bytes did not change. It does not show that the publisher was honest, so decoding trusts
no field. Arrow verifies the metadata, and every buffer must fit. The claimed sizes of buffers, lists and maps are
summed before memory is allocated. The content of columns (offsets, UTF-8, nulls in columns that are not nullable) is
checked with `full`, for a few ns per record. Without `full`, read only columns of trusted publishers.

In a compressed message each buffer begins with its unpacked length (8 bytes; -1: not compressed). Arrow allocates that
length, so all lengths are read and summed first. Uncompressed buffers may overlap, and lists of values without bytes
(nulls, empty strings) may have any length, so buffers and list entries are summed as well.

A batch of one plain record is encoded without Arrow: four columns and a message of one row take Arrow 60 us, and a
publisher that sends records one by one waits for each. All these payloads have the same form: a head with some numbers
that depend on the value's length, the value, padding, and a tail with the time. The constant bytes and the positions of
the numbers are learned once from two payloads of Arrow.

Columns of a schema are only added at the end, so every version is a prefix of the newest one. So a history is small:
the newest schema, and the number of columns in each version. A reader with an old version can decode a newer batch: it
knows the first columns. Version 0 is raw records.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from embarcadero.errors import BadSchema, BadValue, Corrupt
from embarcadero.limits import (
    BATCH_BUFFERS_MAX,
    DECODED_BYTES_MAX,
    HEADERS_PER_BATCH_MAX,
    LIST_ENTRIES_MAX,
    SCHEMA_BYTES_MAX,
    SCHEMA_COLUMNS_MAX,
    SCHEMA_DEPTH_MAX,
    SCHEMA_ROW_BYTES_MAX,
)

# --- compressed messages, and the size of any message before it is unpacked -------------------------------------------
COMPRESSIONS: Final = ("lz4", "zstd")

_ADVICE: Final = "skip this batch and check the program that published it"
_CONTINUES_BYTES: Final = 8  # before the metadata of a message: a marker, and the metadata's length
_STORED_AS_IT_IS: Final = -1
_BUFFER: Final = np.dtype([("offset", "<i8"), ("length", "<i8")])
_NODE: Final = np.dtype([("length", "<i8"), ("null_count", "<i8")])
_OLD_COMPRESSION: Final = b"ARROW:experimental_compression"
"""A key in the metadata of Arrow 0.17's messages. Arrow's reader still unpacks them; no later writer produces them."""

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
    """Encode a record batch as a compressed message. It is cut out of a stream: Arrow has no other way."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_options(compression)) as stream:
        stream.write_batch(batch)
    whole = sink.getvalue()
    (schema_bytes,) = struct.unpack_from("<i", whole, 4)
    start = _CONTINUES_BYTES + schema_bytes  # the message of the schema comes first, and has no body
    return whole.slice(start, whole.size - start - _CONTINUES_BYTES)  # the end of the stream comes last


def check_unpacked(metadata: bytes, body: Any, schema: pa.Schema, count: int, entries_max: int) -> None:
    """Raise Corrupt if a message does not have `count` records, or would unpack to too many bytes.

    `entries_max`: the limit for the entries of all its lists and maps together. Arrow has verified the offsets in the
    metadata. This trusts no other field, and unpacks no data.
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
        raise Corrupt(f"a payload has {rows} records, and its entry has {count}", _ADVICE)
    claimed = sum(_claims(metadata, batch, memoryview(body) if body is not None else memoryview(b"")))
    if claimed > DECODED_BYTES_MAX:
        raise Corrupt(f"a payload unpacks to {claimed} bytes, and the limit is {DECODED_BYTES_MAX}", _ADVICE)
    _check_lists(_vector(metadata, batch, _BATCH_NODES, _NODE)["length"].tolist(), schema, entries_max)


def _check_lists(lengths: list[int], schema: pa.Schema, entries_max: int) -> None:
    """Raise Corrupt if the lists and maps of a batch have too many entries together.

    `lengths`: of all columns and, after each, of its nested columns. Columns that `schema` lacks come last.
    """
    if len(lengths) <= len(schema):
        return  # no column is nested, or Arrow refuses the batch
    entries = at = 0
    for kind in schema.types:
        found, at = _list_entries(lengths, kind, at)
        entries += found
    if entries > entries_max:
        problem = f"lists and maps of a payload have {entries} entries together, and the limit is {entries_max}"
        raise Corrupt(problem, _ADVICE)


def _list_entries(lengths: list[int], kind: pa.DataType, at: int) -> tuple[int, int]:
    """Count the entries in all lists of the column at `at`. Return them, and the position of the next column."""
    entries, at = 0, at + 1
    is_list = kind.num_fields > 0 and not pa.types.is_struct(kind)
    for number in range(kind.num_fields):
        if is_list and at < len(lengths):
            entries += max(0, lengths[at])
        found, at = _list_entries(lengths, kind.field(number).type, at)
        entries += found
    return entries, at


def _claims(metadata: bytes, batch: int, body: memoryview) -> list[int]:
    """Return the claimed unpacked length of each buffer of a record batch."""
    buffers = _vector(metadata, batch, _BATCH_BUFFERS, _BUFFER)
    if _field(metadata, batch, _BATCH_COMPRESSION) is None:
        return list(map(abs, buffers["length"].tolist()))  # negative ones, which Arrow refuses, must not lower the sum
    claims = []
    for offset, length in buffers.tolist():
        if not length:
            continue
        if length < 8 or offset < 0 or offset + length > len(body):
            problem = f"a compressed buffer has {length} bytes at offset {offset} of a body of {len(body)} bytes"
            raise Corrupt(problem, _ADVICE)
        (unpacked,) = struct.unpack_from("<q", body, offset)
        if unpacked < _STORED_AS_IT_IS:
            raise Corrupt(f"a compressed buffer unpacks to {unpacked} bytes", _ADVICE)
        claims.append(length if unpacked == _STORED_AS_IT_IS else unpacked)
    return claims


def _vector(metadata: bytes, table: int, number: int, dtype: np.dtype[np.void]) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return the structs to which a field of a flatbuffer table points."""
    vector = _table(metadata, table, number)
    if vector is None:
        return np.empty(0, dtype)
    (count,) = struct.unpack_from("<I", metadata, vector)
    if count > BATCH_BUFFERS_MAX:
        raise Corrupt(f"a payload has {count} buffers or columns, and the limit is {BATCH_BUFFERS_MAX}", _ADVICE)
    return np.frombuffer(metadata, dtype, count, vector + 4)


def _table(metadata: bytes, table: int, number: int) -> int | None:
    """Return the offset of the table or vector to which a field of a flatbuffer table points."""
    field = _field(metadata, table, number)
    return None if field is None else field + int(struct.unpack_from("<I", metadata, field)[0])


def _field(metadata: bytes, table: int, number: int) -> int | None:
    """Return the offset of a field of a flatbuffer table; None if it is absent."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    (vtable_bytes,) = struct.unpack_from("<H", metadata, vtable)
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", metadata, vtable + entry)[0] if entry < vtable_bytes else 0
    return table + offset if offset else None


# --- payloads ---------------------------------------------------------------------------------------------------------
RAW_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("headers", pa.map_(pa.string(), pa.binary())),
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""The schema of raw records, for topics without their own schema."""

TIMESTAMP_US_MIN: Final = -62_135_596_800_000_000
TIMESTAMP_US_MAX: Final = 253_402_300_799_999_999
"""The range of a datetime: the years 1 to 9999."""

_KEY, _VALUE, _HEADERS, _TIMESTAMP = RAW_SCHEMA.types
_ARROW_ERRORS: Final = (pa.ArrowException, EOFError, OSError, ValueError, TypeError, OverflowError)


def raw_batch(
    keys: Sequence[bytes | None],
    values: Sequence[bytes],
    headers: Sequence[Mapping[str, bytes] | None],
    timestamps_us: Sequence[int],
) -> pa.RecordBatch:
    """Make a batch of raw records from four columns of the same length. Raises BadValue."""
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
            f"{count} records do not form a batch: {error}",
            "use bytes for keys and values, a dict of str to bytes for headers, microseconds since 1970 for timestamps",
        ) from error
    if batch.column(1).null_count:
        raise BadValue("a record has no value", "use b'' for an empty value")
    return batch


def _nullable(items: Sequence[Any], kind: pa.DataType, convert: Callable[[Any], Any] | None = None) -> pa.Array:
    """Make a column. If all values are null, which is common, it is almost free."""
    if items.count(None) == len(items):
        return pa.nulls(len(items), kind)
    return pa.array(items if convert is None else list(map(convert, items)), kind)


def _pairs(headers: Mapping[str, bytes] | None) -> list[tuple[str, bytes]] | None:
    return None if headers is None else list(headers.items())


def plain_batch(values: Sequence[bytes], times_s: Sequence[float]) -> pa.RecordBatch:
    """Make a batch of raw records from values and clock times in seconds. This is the fast path."""
    count = len(values)
    times = np.rint(np.fromiter(times_s, np.float64, count) * 1e6).astype(np.int64)
    ends = np.zeros(count + 1, np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int32, count), out=ends[1:])
    columns = [  # built from buffers: pa.array would first load pandas, if installed, for a third of a second
        pa.nulls(count, _KEY),
        pa.Array.from_buffers(_VALUE, count, [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]),
        pa.nulls(count, _HEADERS),
        pa.Array.from_buffers(_TIMESTAMP, count, [None, pa.py_buffer(times)]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


def encode_batch(batch: pa.RecordBatch, compression: str | None = None) -> pa.Buffer:
    """Encode the payload of a batch frame. `compression` is None, "lz4" or "zstd"."""
    return batch.serialize() if compression is None else compressed(batch, compression)


def list_entries_max(schema: pa.Schema) -> int:
    """Return the limit for the entries of all lists and maps of a batch with this schema, together."""
    return HEADERS_PER_BATCH_MAX if schema is RAW_SCHEMA or schema.equals(RAW_SCHEMA) else LIST_ENTRIES_MAX


def decode_batch(buffer: Any, schema: pa.Schema, count: int, *, full: bool = False) -> pa.RecordBatch:
    """Decode a payload without a copy. Raises Corrupt unless it is a batch of `count` records of `schema`."""
    try:
        message = pa.ipc.read_message(buffer)
        if message.type != "record batch":
            raise Corrupt(f"a payload has a {message.type} message, not a record batch", _ADVICE)
        check_unpacked(message.metadata.to_pybytes(), message.body, schema, count, list_entries_max(schema))
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=full)
        if full and any(not field.nullable and batch.column(i).null_count for i, field in enumerate(schema)):
            raise Corrupt("a payload has nulls in a column that is not nullable", _ADVICE)
    except (*_ARROW_ERRORS, struct.error) as error:
        raise Corrupt(f"a payload is not a record batch of its topic's schema: {error}", _ADVICE) from error
    if batch.num_rows != count:
        raise Corrupt(f"a payload has {batch.num_rows} records, and its entry has {count}", _ADVICE)
    return batch


# --- the payload of one plain record ----------------------------------------------------------------------------------
_ALIGN: Final = 8
_SHORTER, _LONGER = 61, 70  # lengths and padded lengths differ by different numbers, which distinguishes the two
_NUMBER: Final = struct.Struct("<I")
_TIME: Final = struct.Struct("<q")
_HEADS_KEPT: Final = 256
_PADDING: Final = tuple(bytes(missing) for missing in range(_ALIGN))


class _Form(NamedTuple):
    """The common form of all payloads of one plain record."""

    head: bytes
    lengths: list[tuple[int, int]]  # offset of a number in the head, and its difference to the value's length
    padded: list[tuple[int, int]]  # the same for numbers that include the padding
    before_time: bytes
    after_time: bytes


def _example(size: int) -> tuple[bytes, int, int]:
    """Let Arrow encode a value of zeros. Return its bytes, and the offsets of the value and of the time."""
    made = encode_batch(plain_batch([bytes(size)], [0.0]))
    columns = pa.ipc.read_record_batch(pa.ipc.read_message(made), RAW_SCHEMA).columns
    value_at, time_at = (column.buffers()[-1].address - made.address for column in (columns[1], columns[3]))
    return made.to_pybytes(), value_at, time_at


@cache
def _form() -> _Form | None:
    """Learn the form. None: this release of Arrow encodes differently than expected, so Arrow must encode."""
    (payload, value_at, time_at), (longer, value_at_too, time_at_too) = _example(_SHORTER), _example(_LONGER)
    grown = _LONGER - _SHORTER
    tail_at, tail_at_too = value_at + _padded(_SHORTER), value_at_too + _padded(_LONGER)
    heads = [np.frombuffer(made[:value_at], dtype="<u4").astype(np.int64) for made in (payload, longer)]
    numbers = np.flatnonzero(heads[0] != heads[1]).tolist()
    by = {at: int(heads[1][at] - heads[0][at]) for at in numbers}
    alike = value_at == value_at_too and payload[tail_at:] == longer[tail_at_too:] and time_at > tail_at
    known = set(by.values()) <= {grown, _padded(_LONGER) - _padded(_SHORTER)}
    if not (alike and known and time_at_too - tail_at_too == time_at - tail_at):
        return None
    return _Form(
        payload[:value_at],
        [(4 * at, int(heads[0][at]) - _SHORTER) for at in numbers if by[at] == grown],
        [(4 * at, int(heads[0][at]) - _padded(_SHORTER)) for at in numbers if by[at] != grown],
        payload[tail_at:time_at],
        payload[time_at + _TIME.size :],
    )


def _padded(size: int) -> int:
    return (size + _ALIGN - 1) & -_ALIGN


@lru_cache(maxsize=_HEADS_KEPT)
def _head(size: int) -> bytes:
    """Return the bytes before a value of this size. Publishers send many values of the same size."""
    form = _form()
    if form is None:
        return b""
    head, room = bytearray(form.head), _padded(size)
    for at, beyond in form.lengths:
        _NUMBER.pack_into(head, at, size + beyond)
    for at, beyond in form.padded:
        _NUMBER.pack_into(head, at, room + beyond)
    return bytes(head)


def lone_payload(value: bytes, time_s: float) -> bytes:
    """Encode one value and time (in seconds): the same bytes as `plain_batch` encoded without compression."""
    form, size = _form(), len(value)
    if form is None:
        return bytes(memoryview(encode_batch(plain_batch([value], [time_s]))))
    time_us = _TIME.pack(round(time_s * 1e6))
    return b"".join((_head(size), value, _PADDING[-size % _ALIGN], form.before_time, time_us, form.after_time))


# --- schemas and their versions ---------------------------------------------------------------------------------------
SEQ_COLUMN: Final = "_seq"
"""The column for seqs, which bounded reads add."""

_PLAIN: Final = (
    kinds.is_null, kinds.is_boolean, kinds.is_integer, kinds.is_floating, kinds.is_decimal, kinds.is_temporal,
    kinds.is_binary, kinds.is_string, kinds.is_large_binary, kinds.is_large_string, kinds.is_fixed_size_binary,
)  # fmt: skip
_NESTED: Final = (
    kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list, kinds.is_struct, kinds.is_map,
)  # fmt: skip
_OFFSET_BYTES: Final = 8
_KINDS: Final = "use numbers, bool, dates and times, binary, string, decimal, and list, struct or map of these"


@dataclass(frozen=True, slots=True)
class TopicSchemas:
    """The schemas of a topic: `newest`, and the number of its columns in each version."""

    newest: pa.Schema
    widths: tuple[int, ...] = ()

    @property
    def version(self) -> int:
        """The newest version; 0 for raw records."""
        return len(self.widths)

    @property
    def typed(self) -> bool:
        """Whether the topic has its own schema."""
        return bool(self.widths)

    def of(self, version: int) -> pa.Schema:
        """Return the schema to decode a batch. For a newer version it has only the known columns."""
        if not self.typed or version >= self.version:
            if version and not self.typed:
                problem = f"a topic of raw records has a batch of schema version {version}"
                raise Corrupt(problem, "report it: this is a bug")
            return self.newest
        if version < 1:
            raise Corrupt("a topic with a schema has a batch of raw records", "report it: this is a bug")
        return pa.schema(list(self.newest)[: self.widths[version - 1]])

    def all(self) -> dict[int, pa.Schema]:
        """Return all versions; empty for raw records."""
        return {version: self.of(version) for version in range(1, self.version + 1)}


RAW: Final = TopicSchemas(RAW_SCHEMA)


def encode_schema(schema: Any) -> bytes:
    """Check a new or changed schema and encode it as an Arrow message. Raises BadSchema with the reason."""
    if not isinstance(schema, pa.Schema):
        raise BadSchema(f"the schema is a {type(schema).__name__}, not a pyarrow.Schema", "see pyarrow.schema")
    check_row_bytes(checked_schema(schema.remove_metadata()))
    data: bytes = schema.remove_metadata().serialize().to_pybytes()
    if len(data) > SCHEMA_BYTES_MAX:
        problem = f"the schema has {len(data)} bytes, and the limit is {SCHEMA_BYTES_MAX}"
        raise BadSchema(problem, "use fewer columns or shorter names")
    return data


def decode_schema(data: bytes) -> pa.Schema:
    """Decode and check a schema from a peer."""
    if len(data) > SCHEMA_BYTES_MAX:
        problem = f"the schema has {len(data)} bytes, and the limit is {SCHEMA_BYTES_MAX}"
        raise BadSchema(problem, "use fewer columns or shorter names")
    try:
        return checked_schema(pa.ipc.read_schema(pa.py_buffer(data)))
    except BadSchema:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # names that are not UTF-8 raise on access
        problem = f"the schema is not an Arrow schema: {error}"
        raise BadSchema(problem, "send the result of pyarrow's Schema.serialize") from None


def decode_versions(columns: bytes, widths: Sequence[int]) -> TopicSchemas:
    """Decode the schemas of a topic from a broker's answer."""
    if not columns:
        return RAW
    schema = decode_schema(columns)
    ends = tuple(widths)
    if not ends or ends[0] < 1 or ends[-1] != len(schema) or any(a >= b for a, b in pairwise(ends)):
        problem = f"schema versions with {list(ends)[:8]} columns contradict a schema of {len(schema)} columns"
        raise Corrupt(problem, "report it: this is a bug")
    return TopicSchemas(schema, ends)


def checked_schema(schema: pa.Schema) -> pa.Schema:
    """Check that a topic may have this schema, and return it."""
    if not 1 <= len(schema) <= SCHEMA_COLUMNS_MAX:
        raise BadSchema(f"the schema has {len(schema)} columns", f"use 1 to {SCHEMA_COLUMNS_MAX}")
    seen: set[str] = set()
    for field in schema:
        if not field.name or field.name == SEQ_COLUMN or field.name in seen:
            why = "occurs twice" if field.name in seen else "is not allowed as the name of a column"
            raise BadSchema(f"{field.name!r} {why}", f"use unique names other than '' and {SEQ_COLUMN!r}")
        seen.add(field.name)
        _check_type(field.name, field.type, 0)
    return schema


def _check_type(column: str, kind: pa.DataType, depth: int) -> None:
    if depth > SCHEMA_DEPTH_MAX:
        raise BadSchema(f"column {column!r} has types nested {depth} deep", f"use at most {SCHEMA_DEPTH_MAX} levels")
    if kinds.is_dictionary(kind):
        raise BadSchema(f"column {column!r} is {kind}, and batches have no dictionaries", f"use {kind.value_type}")
    if any(is_kind(kind) for is_kind in _NESTED):
        for number in range(kind.num_fields):
            _check_type(column, kind.field(number).type, depth + 1)
    elif isinstance(kind, pa.BaseExtensionType) or not any(is_kind(kind) for is_kind in _PLAIN):
        raise BadSchema(f"column {column!r} is {kind}, which topics do not support", _KINDS)


def check_row_bytes(schema: pa.Schema) -> None:
    """Raise BadSchema if rows of a new or changed schema are too wide: readers fill older records with such nulls.

    Topics that got such a schema from an earlier version keep it.
    """
    widths = {field.name: _row_bytes(field.type) for field in schema}
    if (total := sum(widths.values())) > SCHEMA_ROW_BYTES_MAX:
        column = max(widths, key=widths.__getitem__)
        what = f"rows have {total:,} bytes in columns of fixed width, {widths[column]:,} of them in column {column!r}"
        raise BadSchema(what, f"use at most {SCHEMA_ROW_BYTES_MAX:,}; use binary and list without a size")


def _row_bytes(kind: pa.DataType) -> int:
    """Return the size of any row, also of a null. An entry of a list counts as at least one byte."""
    inner = [_row_bytes(kind.field(number).type) for number in range(kind.num_fields)]
    if kinds.is_fixed_size_list(kind):
        return int(kind.list_size) * max(1, *inner)
    if kinds.is_struct(kind):
        return sum(inner)
    if inner:
        return max(_OFFSET_BYTES, *inner)
    if kinds.is_fixed_size_binary(kind):
        return int(kind.byte_width)
    if kinds.is_null(kind):
        return 0
    return (kind.bit_width + 7) // 8 if kinds.is_primitive(kind) or kinds.is_decimal(kind) else _OFFSET_BYTES


def evolve(known: TopicSchemas, wanted: pa.Schema) -> TopicSchemas:
    """Return the next version, with new columns at the end, or the same object. Raises BadSchema with all reasons."""
    if not known.typed:
        raise BadSchema("a topic of raw records can't get a schema", "create another topic with that schema")
    added = [field for field in wanted if field.name not in known.newest.names]
    if problems := [*_changes(known.newest, wanted, added), *_unfit(added)]:
        raise BadSchema("; ".join(problems), "only add nullable columns, or create another topic")
    if not added:
        return known
    newest = pa.schema([*known.newest, *added])
    encode_schema(newest)
    return TopicSchemas(newest, (*known.widths, len(newest)))


def _changes(known: pa.Schema, wanted: pa.Schema, added: list[pa.Field]) -> list[str]:
    problems = []
    for place, field in enumerate(known):
        if field.name in wanted.names:
            new = wanted.field(field.name)
            if new.type != field.type:
                problems.append(f"column {field.name!r} is {field.type} and can't become {new.type}")
            elif new.nullable != field.nullable:
                was, becomes = (("nullable", "not null"), ("not null", "nullable"))[new.nullable]
                problems.append(f"column {field.name!r} is {was} and can't become {becomes}")
        elif place < len(wanted) and wanted.field(place) in added and wanted.field(place).type == field.type:
            problems.append(f"column {field.name!r} can't be renamed to {wanted.field(place).name!r}")
        else:
            problems.append(f"column {field.name!r} can't be removed")
    return problems


def _unfit(added: list[pa.Field]) -> list[str]:
    strict = [field.name for field in added if not field.nullable]
    return [f"new column {name!r} must be nullable: older records have none" for name in strict]


def named(schema: pa.Schema) -> str:
    """Return a schema in one line, in the form of `topic create --schema`."""
    return ", ".join(f"{field.name}: {field.type}{'' if field.nullable else '!'}" for field in schema)
