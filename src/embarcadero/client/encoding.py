"""Encoding of published data: rows and tables are fitted to the topic's schema, checked, and split into batches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from embarcadero.errors import BadSchema, BadValue
from embarcadero.limits import DECODED_BYTES_MAX, MIB, RECORD_BYTES_MAX, RECORDS_PER_BATCH_MAX
from embarcadero.wire.partitioners import NO_PARTITION, partitions_of
from embarcadero.wire.schemas import (
    RAW_SCHEMA,
    TIMESTAMP_US_MAX,
    TIMESTAMP_US_MIN,
    TopicSchemas,
    compressed,
    list_entries_max,
    lone_payload,
    named,
    plain_batch,
    raw_batch,
)

Headers = Mapping[str, bytes]
GivenRecord = tuple[bytes, float | int, bytes | None, Headers | None]
"""Value, time, key, headers. A float is the clock's time in seconds; an int is a given time in microseconds."""

_KEPT_BYTES = 32 * MIB
_HEADER_OVERHEAD_BYTES = 24
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
ZONE_HINT = "use datetime.now(UTC), .replace(tzinfo=UTC) if the time is in UTC, or .astimezone() if it is local time"
_BYTES_TYPES = (pa.binary(), pa.string(), pa.large_binary(), pa.large_string())
_RAW_TYPES = {field.name: field.type for field in RAW_SCHEMA if field.name not in ("key", "value")}


@cache
def _payload_pool() -> pa.MemoryPool:
    """Return the pool for payloads: the C library, configured to keep freed memory.

    Arrow's own pool returns memory to the system within milliseconds, before acks arrive. New memory for every batch
    would cost a page fault and a cleared page for each 4 KiB: an eighth of all time at full speed.
    """
    np.empty(_KEPT_BYTES, dtype=np.uint8)  # freed immediately: the C library then keeps blocks up to this size
    return pa.system_memory_pool()


# --- fitting a schema -------------------------------------------------------------------------------------------------
def fitted(data: Any, schemas: TopicSchemas, now_us: int, record_bytes_max: int = RECORD_BYTES_MAX) -> Tabular:
    """Return `data` as checked Arrow data with exactly the columns of the topic. Values never change."""
    wanted = schemas.newest
    if isinstance(data, pa.RecordBatch | pa.Table) and data.schema.equals(wanted):
        table = data  # the fast path: it has the topic's schema
    elif schemas.typed:
        table = to_arrow(data, {field.name: field.type for field in wanted})
    else:
        table = _completed(to_arrow(data, _RAW_TYPES), now_us)
    if not table.num_rows:
        raise BadValue("the table has no records", "publish at least one record")
    table = _without_nulls(_arranged(table, wanted, schemas.version))
    if not schemas.typed:
        _check_records(table, record_bytes_max)
    return table


def _arranged(data: Tabular, wanted: pa.Schema, version: int) -> Tabular:
    if data.schema.equals(wanted):
        return data
    if problems := _differences(data.schema, wanted, _RAW_OPTIONAL if not version else ()):
        hint = _RAW_HINT if not version else f"the topic has: {named(wanted)} (version {version} of its schema)"
        raise BadSchema("the table does not fit the topic: " + "; ".join(problems), hint)
    names = set(data.schema.names)
    columns = [
        data.column(field.name) if field.name in names else pa.nulls(data.num_rows, field.type) for field in wanted
    ]
    return type(data).from_arrays(columns, schema=wanted)


_RAW_OPTIONAL = ("key", "headers", "timestamp")
_RAW_HINT = (
    "the topic has no schema: rows have value, and optionally key, headers and timestamp; create the topic with "
    "schema=... for columns of your own"
)


def _differences(schema: pa.Schema, wanted: pa.Schema, optional: Sequence[str] = ()) -> list[str]:
    """Return the differences that neither another order of columns nor nulls for missing nullable columns resolve."""
    problems = [f"column {name!r} is there twice" for name in sorted(set(schema.names)) if schema.names.count(name) > 1]
    if problems:
        return problems
    for field in wanted:
        if field.name not in schema.names:
            if not field.nullable and field.name not in optional:
                problems.append(f"column {field.name!r} is missing")
        elif schema.field(field.name).type != field.type:
            problems.append(f"column {field.name!r} is {schema.field(field.name).type}, not {field.type}")
    return problems + [f"column {name!r} is unknown" for name in schema.names if name not in wanted.names]


def _without_nulls(data: Tabular) -> Tabular:
    for field, column in zip(data.schema, data.columns, strict=True):
        if column.null_count and not field.nullable:
            raise BadSchema(f"column {field.name!r} has nulls", "the topic's schema allows none there")
    return data


def _completed(data: Tabular, now_us: int) -> Tabular:
    """Complete the columns of raw records: only `value` is required. Values and keys may be text."""
    present = [name for name in data.schema.names if name in RAW_SCHEMA.names]
    if "value" not in present or len(present) != len(data.schema):
        return data
    columns = {name: data.column(name) for name in present}
    for name in {"key", "value"} & columns.keys():
        if columns[name].type not in _BYTES_TYPES:
            raise BadSchema(f"column {name!r} is {columns[name].type}, not binary or string", "encode it first")
        columns[name] = columns[name].cast(pa.binary())
    if "timestamp" not in columns:
        columns["timestamp"] = pa.array(np.full(data.num_rows, now_us)).view(RAW_SCHEMA.field("timestamp").type)
    return type(data).from_arrays(list(columns.values()), names=list(columns))


def _check_records(data: Tabular, record_bytes_max: int) -> None:
    column = data.column("timestamp")
    times = (column.cast(pa.int64()) if isinstance(data, pa.Table) else column.view(pa.int64())).to_numpy()
    if times.min() < TIMESTAMP_US_MIN or times.max() > TIMESTAMP_US_MAX:
        raise BadValue(f"timestamps from {times.min()} to {times.max()} us", "use times of the years 1 to 9999")
    if data.get_total_buffer_size() <= record_bytes_max:
        return  # no record is larger than all together
    keys = pc.fill_null(pc.binary_length(data.column("key")), 0)
    longest = pc.max(pc.add(keys, pc.binary_length(data.column("value")))).as_py()
    if longest > record_bytes_max:
        problem = f"a record has {longest} bytes, and the limit is {record_bytes_max}"
        raise BadValue(problem, "split it into several records, or store it elsewhere and publish its address")


# --- single records ---------------------------------------------------------------------------------------------------
def given_bytes(what: str, value: Any) -> bytes:
    """Return a value or a key as bytes. Raises BadValue with a remedy."""
    if isinstance(value, bytearray | memoryview | bytes):
        return bytes(value)
    hint = "keys and values are bytes"
    if isinstance(value, str):
        hint = "encode it: text.encode()"
    elif isinstance(value, Mapping | list | tuple):
        hint = (
            "encode it: json.dumps(value).encode(); or create the topic with a schema, and publish([row, ...]) "
            "takes rows as dicts"
        )
    elif value is None:
        hint = 'use b"" for an empty value'
    elif isinstance(value, int | float):
        hint = "encode it: str(value).encode()"
    raise BadValue(f"the {what} of a record is {type(value).__name__}, not bytes", hint)


def headers_size(headers: Any) -> int:
    """Return the bytes that headers count for. Raises BadValue."""
    if not isinstance(headers, Mapping):
        raise BadValue(f"headers are {type(headers).__name__}, not a dict", "use a dict of str to bytes")
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, bytes):
            raise BadValue(f"header {name!r} has a value of type {type(value).__name__}", "use a dict of str to bytes")
        size += len(name.encode()) + len(value) + _HEADER_OVERHEAD_BYTES
    return size


def given_microseconds(timestamp: Any) -> int:
    """Return the timestamp of a record in microseconds since 1970. Raises BadValue."""
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise BadValue(f"timestamp {timestamp.isoformat()} has no time zone", ZONE_HINT)
        return (timestamp - _EPOCH) // _MICROSECOND
    if isinstance(timestamp, int) and TIMESTAMP_US_MIN <= timestamp <= TIMESTAMP_US_MAX:
        return int(timestamp)
    hint = "use a datetime with a time zone, or microseconds since 1970, in the years 1 to 9999"
    raise BadValue(f"timestamp {timestamp!r} is not valid", hint)


# --- partitions -------------------------------------------------------------------------------------------------------
def by_partition(data: Tabular, partitions: int, key: str | None, partitioner: str) -> list[tuple[int | None, Tabular]]:
    """Group rows by the partition of their `key` column, in the order of first appearance. Groups keep row order.

    The partition None has rows with a null key, or all rows if there is no key column.
    """
    if partitions == 1:
        return [(0, data)]
    if key is None or data.column(key).null_count == data.num_rows:
        return [(None, data)]
    column = data.column(key)
    found = partitions_of(column.combine_chunks() if isinstance(data, pa.Table) else column, partitions, partitioner)
    numbers, firsts, sizes = np.unique(found, return_index=True, return_counts=True)
    if len(numbers) == 1:
        return [(int(numbers[0]), data)]
    rows = np.split(np.argsort(found, kind="stable"), np.cumsum(sizes)[:-1])
    return [
        (None if numbers[group] == NO_PARTITION else int(numbers[group]), data.take(pa.array(rows[group])))
        for group in np.argsort(firsts).tolist()
    ]


# --- cutting ----------------------------------------------------------------------------------------------------------
def pieces(
    data: Tabular, batch_bytes: int, bytes_max: int, compression: str | None, records_max: int = RECORDS_PER_BATCH_MAX
) -> Iterator[tuple[int, pa.Buffer]]:
    """Split data into batches: the number of records and the payload of each.

    A RecordBatch stays one batch if it fits a frame: its author chose its size. A Table is split by `batch_bytes`.
    """
    most = bytes_max if isinstance(data, pa.RecordBatch) else batch_bytes
    rows = min(records_max, max(1, data.num_rows * most // max(1, data.nbytes)))
    for start in range(0, data.num_rows, rows):
        part = data.slice(start, rows)
        for batch in [part] if isinstance(part, pa.RecordBatch) else part.combine_chunks().to_batches():
            yield from _fitting(batch, bytes_max, compression)


def _fitting(batch: pa.RecordBatch, bytes_max: int, compression: str | None) -> Iterator[tuple[int, pa.Buffer]]:
    small = batch.nbytes <= (bytes_max if compression is None else DECODED_BYTES_MAX // 2)
    entries, entries_max = sum(map(list_entries, batch.columns)), list_entries_max(batch.schema)
    if small and entries <= entries_max:
        payload = encoded(batch, compression)
        if payload.size <= bytes_max:
            yield batch.num_rows, payload
            return
    if batch.num_rows == 1:
        raise BadValue(
            f"a record needs {batch.nbytes} bytes and has {entries} entries in lists and maps, and the limit of a "
            f"batch is {bytes_max} bytes and {entries_max} entries",
            "split it into several records",
        )
    half = batch.num_rows // 2
    yield from _fitting(batch.slice(0, half), bytes_max, compression)
    yield from _fitting(batch.slice(half), bytes_max, compression)


def list_entries(column: pa.Array) -> int:
    """Count the entries in all lists and maps of a column, as readers do before they decode a batch."""
    kind = column.type
    if pa.types.is_struct(kind):
        return sum(list_entries(column.field(number)) for number in range(kind.num_fields))
    if not kind.num_fields:
        return 0
    first: int
    entries: int
    if pa.types.is_fixed_size_list(kind):
        first, entries = column.offset * kind.list_size, len(column) * kind.list_size
    else:
        first = column.offsets[0].as_py()
        entries = column.offsets[-1].as_py() - first
    within = (column.keys, column.items) if pa.types.is_map(kind) else (column.values,)
    return entries + sum(list_entries(values.slice(first, entries)) for values in within)


def encoded(batch: pa.RecordBatch, compression: str | None) -> pa.Buffer:
    """Encode a batch. Compression is used if it is requested and makes the payload smaller."""
    if compression is not None:
        payload = compressed(batch, compression)
        if payload.size < batch.nbytes:
            return payload
    return batch.serialize(memory_pool=_payload_pool())


def encoded_records(records: list[GivenRecord], plain: bool, compression: str | None) -> Any:
    """Encode raw records. `plain`: none has a key, headers or a given time."""
    if plain and len(records) == 1 and compression is None:
        return lone_payload(records[0][0], records[0][1])
    return encoded(_raw_records(records, plain), compression)


def _raw_records(records: list[GivenRecord], plain: bool) -> pa.RecordBatch:
    """Make columns of raw records. (zip(*records) iterates over all of them together, which is ten times slower.)"""
    values, times = [record[0] for record in records], [record[1] for record in records]
    if plain:
        return plain_batch(values, times)
    times_us = [when if type(when) is int else round(when * 1e6) for when in times]
    return raw_batch([record[2] for record in records], values, [record[3] for record in records], times_us)


Tabular = Any
"""A pyarrow Table or RecordBatch. pyarrow has no type annotations."""

_ACCEPTED = (
    "publish accepts an Arrow Table or RecordBatch, a pandas or polars DataFrame, a list of dicts, a dict of columns"
)
_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError)


def to_arrow(data: Any, wanted: Mapping[str, pa.DataType]) -> Tabular:
    """Convert `data` to Arrow, with the wanted types if nothing is lost. Arrow data is returned unchanged."""
    if isinstance(data, pa.Table | pa.RecordBatch):
        return data
    if _is_frame("pandas", data):
        if not data.columns.is_unique:
            raise BadSchema(f"columns {list(data.columns)} have a name twice", "rename one of them")
        columns = {name: data[name] for name in data.columns}  # the index is not a column
        for name, column in columns.items():
            if _zoned(wanted.get(name)) and column.dtype.kind == "M" and getattr(column.dtype, "tz", None) is None:
                raise _no_zone(name, wanted[name], f'use data[{name!r}].dt.tz_localize("UTC"), or another zone')
        return _table(columns, wanted)
    if hasattr(data, "__arrow_c_stream__"):  # polars, and other libraries with the Arrow interface
        table = _stream(data)
        for name in table.column_names:
            kind = table.column(name).type
            if _zoned(wanted.get(name)) and not _zoned(kind) and "timestamp" in str(kind):
                raise _no_zone(name, wanted[name], 'use .dt.replace_time_zone("UTC"), or another zone')
        return _table({name: _cast(name, table.column(name), wanted.get(name)) for name in table.column_names}, wanted)
    if isinstance(data, Mapping):
        return _table(data, wanted)
    if isinstance(data, Sequence) and not isinstance(data, str | bytes | bytearray | memoryview):
        return _table(_columns(data), wanted)
    raise BadValue(f"a {type(data).__name__} can't be published", f"{_ACCEPTED}; send() accepts bytes")


def _stream(data: Any) -> pa.Table:
    if _is_frame("polars", data):
        for name, kind in data.schema.items():
            if str(kind) == "Object":  # polars would return the addresses of the objects
                raise BadSchema(f"column {name!r} holds Python objects", "give it a type that Arrow has")
    try:
        return data.to_arrow() if _is_frame("polars", data) else pa.table(data)
    except (*_ERRORS, RuntimeError) as error:
        raise BadValue(f"a {type(data).__name__} can't be published: {error}", _ACCEPTED) from None


def _is_frame(library: str, data: Any) -> bool:
    """Whether it is a DataFrame of this library. The library is then loaded already."""
    module = sys.modules.get(library)
    return module is not None and isinstance(data, module.DataFrame)


def _columns(rows: Sequence[Any]) -> dict[str, list[Any]]:
    names: dict[str, None] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise BadValue(f"row {number} is {type(row).__name__}, not a dict", _ACCEPTED)
        names.update(dict.fromkeys(row))
    return {name: [row.get(name) for row in rows] for name in names}


def _table(columns: Mapping[Any, Any], wanted: Mapping[str, pa.DataType]) -> pa.Table:
    arrays = {}
    for name, values in columns.items():
        if not isinstance(name, str):
            raise BadSchema(f"the name of column {name!r} is not text", "rename it")
        arrays[name] = _array(name, values, wanted.get(name))
    lengths = {len(array) for array in arrays.values()}
    if len(lengths) > 1:
        sizes = ", ".join(f"{name}: {len(array)}" for name, array in arrays.items())
        raise BadSchema(f"the columns have different lengths ({sizes})", "pass the same number of values per column")
    return pa.table(arrays)


def _array(name: str, values: Any, kind: pa.DataType | None) -> Any:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise BadSchema(
            f"column {name!r} is one {type(values).__name__}, not a list of values",
            "pass rows as a list of dicts, or columns as lists",
        )
    try:
        if not isinstance(values, Sequence) and not hasattr(values, "__array__"):
            values = list(values)
        if kind is not None and kinds.is_map(kind):
            values = [list(value.items()) if isinstance(value, Mapping) else value for value in values]
        if kind is not None and _zoned(kind) and getattr(getattr(values, "dtype", None), "kind", "O") == "O":
            for number, value in enumerate(values):
                if (found := naive_time(value, kind)) is not None:
                    raise _no_zone(name, kind, ZONE_HINT, f" (row {number}: {found.isoformat()})")
        if kind is not None and isinstance(values, Sequence) and may_lose(kind):
            for number, value in enumerate(values):
                if loses(value, kind):
                    raise ValueError(f"{value!r} in row {number} would lose a part of its value")
        return pa.array(values, kind)
    except BadSchema:
        raise
    except _ERRORS as error:
        what = "Arrow" if kind is None else str(kind)
        raise BadSchema(f"column {name!r} can't become {what}: {error}", "convert it before you publish it") from None


def _cast(name: str, column: Any, kind: pa.DataType | None) -> Any:
    try:
        return column if kind is None or column.type == kind else column.cast(kind)
    except _ERRORS as error:
        problem = f"column {name!r} is {column.type}, not {kind}: {error}"
        raise BadSchema(problem, "convert it before you publish it") from None


def _zoned(kind: pa.DataType | None) -> bool:
    """Whether this type, or a part of it, is a time with a zone."""
    if kind is None:
        return False
    if kinds.is_timestamp(kind):
        return kind.tz is not None
    return any(_zoned(kind.field(number).type) for number in range(kind.num_fields))


def naive_time(value: Any, kind: pa.DataType) -> datetime | None:
    """Return a datetime without a time zone where the column needs one, or None if there is none."""
    if kinds.is_timestamp(kind):
        naive = isinstance(value, datetime) and value.tzinfo is None and type(value).__name__ != "NaTType"
        return value if naive and kind.tz is not None else None
    parts: list[tuple[Any, pa.DataType]] = []
    if kinds.is_struct(kind) and isinstance(value, Mapping):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        parts = [(value.get(field.name), field.type) for field in fields]
    elif kinds.is_map(kind) and isinstance(value, Mapping | Sequence):
        for key, item in value.items() if isinstance(value, Mapping) else value:
            parts += [(key, kind.key_type), (item, kind.item_type)]
    elif kind.num_fields and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        parts = [(item, kind.value_type) for item in value]
    return next((found for part, its in parts if (found := naive_time(part, its)) is not None), None)


def _no_zone(name: str, kind: pa.DataType, hint: str, where: str = "") -> BadSchema:
    return BadSchema(f"column {name!r} has times without a time zone{where}, and the topic's column is {kind}", hint)


_UNITS_US = {"s": 1_000_000, "ms": 1_000}


def may_lose(kind: pa.DataType) -> bool:
    """Whether values of this type must be checked one by one."""
    if kind.num_fields:
        return True
    return bool(kinds.is_integer(kind) or kinds.is_date(kind)) or getattr(kind, "unit", "us") in _UNITS_US


def loses(value: Any, kind: pa.DataType) -> bool:
    """Whether a conversion would lose a part of the value. Arrow refuses values of a wrong kind."""
    if value is None or isinstance(value, str | bytes):
        return False
    if kinds.is_integer(kind):
        return not isinstance(value, int) and hasattr(value, "__int__") and bool(value != int(value))
    if kinds.is_date(kind):
        return isinstance(value, datetime) and value.time() != time()
    if kinds.is_struct(kind):
        return isinstance(value, Mapping) and _loses_fields(value, kind)
    if kinds.is_map(kind):
        pairs = list(value.items() if isinstance(value, Mapping) else value)
        return any(loses(key, kind.key_type) or loses(item, kind.item_type) for key, item in pairs)
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return may_lose(kind.value_type) and any(loses(item, kind.value_type) for item in value)
    unit_us = _UNITS_US.get(getattr(kind, "unit", ""), 1)
    return unit_us > 1 and _microseconds(value) % unit_us != 0


def _loses_fields(value: Mapping[Any, Any], kind: pa.DataType) -> bool:
    fields = {kind.field(number).name: kind.field(number).type for number in range(kind.num_fields)}
    return any(name not in fields or loses(item, fields[name]) for name, item in value.items())


def _microseconds(value: Any) -> int:
    if isinstance(value, timedelta):
        return value.microseconds
    return value.microsecond if isinstance(value, datetime | time) else 0
