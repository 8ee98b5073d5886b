"""Tables on their way out: completed to the topic's schema, checked, cut into batches that fit a frame."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embarcadero.client.convert import Tabular, to_arrow
from embarcadero.errors import BadSchema, BadValue
from embarcadero.limits import DECODED_BYTES_MAX, MIB, RECORD_BYTES_MAX, RECORDS_PER_BATCH_MAX
from embarcadero.wire.compression import compressed
from embarcadero.wire.partitioners import NO_PARTITION, partitions_of
from embarcadero.wire.payload import RAW_SCHEMA, TIMESTAMP_US_MAX, TIMESTAMP_US_MIN, list_entries_max
from embarcadero.wire.schemas import TopicSchemas, named

_KEPT_BYTES = 32 * MIB
_BYTES_TYPES = (pa.binary(), pa.string(), pa.large_binary(), pa.large_string())
_RAW_TYPES = {field.name: field.type for field in RAW_SCHEMA if field.name not in ("key", "value")}


@cache
def _payload_pool() -> pa.MemoryPool:
    """Where payloads are allocated: the C library, told to keep what is freed.

    Arrow's own pool gives memory back within milliseconds, sooner than acks come; getting it again for every batch
    costs a page fault and a cleared page for every 4 KiB, an eighth of all time at full speed.
    """
    np.empty(_KEPT_BYTES, dtype=np.uint8)  # freed at once: blocks up to this size are kept from now on
    return pa.system_memory_pool()


# --- fitting a schema -------------------------------------------------------------------------------------------------
def fitted(data: Any, schemas: TopicSchemas, now_us: int, record_bytes_max: int = RECORD_BYTES_MAX) -> Tabular:
    """`data` as Arrow with exactly the columns of the topic, checked. Nothing but its columns' order changes."""
    wanted = schemas.newest
    if isinstance(data, pa.RecordBatch | pa.Table) and data.schema.equals(wanted):
        table = data  # as it should be: the quick way
    elif schemas.typed:
        table = to_arrow(data, {field.name: field.type for field in wanted})
    else:
        table = _completed(to_arrow(data, _RAW_TYPES), now_us)
    if not table.num_rows:
        raise BadValue("a table without records", "publish at least one record")
    table = _without_nulls(_arranged(table, wanted, schemas.version))
    if not schemas.typed:
        _check_records(table, record_bytes_max)
    return table


def _arranged(data: Tabular, wanted: pa.Schema, version: int) -> Tabular:
    if data.schema.equals(wanted):
        return data
    if problems := _differences(data.schema, wanted):
        hint = f"the topic has: {named(wanted)}" + (f" (version {version} of its schema)" if version else "")
        raise BadSchema("the table does not fit the topic: " + "; ".join(problems), hint)
    names = set(data.schema.names)
    columns = [
        data.column(field.name) if field.name in names else pa.nulls(data.num_rows, field.type) for field in wanted
    ]
    return type(data).from_arrays(columns, schema=wanted)


def _differences(schema: pa.Schema, wanted: pa.Schema) -> list[str]:
    """What can't be put right by another order, or by nulls where a column that may be null is missing."""
    problems = [f"column {name!r} is there twice" for name in sorted(set(schema.names)) if schema.names.count(name) > 1]
    if problems:
        return problems
    for field in wanted:
        if field.name not in schema.names:
            if not field.nullable:
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
    """Raw records from `value` alone, or with any of the other columns; values and keys may be text."""
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
        return  # no record can be larger than all of them
    keys = pc.fill_null(pc.binary_length(data.column("key")), 0)
    longest = pc.max(pc.add(keys, pc.binary_length(data.column("value")))).as_py()
    if longest > record_bytes_max:
        raise BadValue(f"a record of {longest} bytes", f"records have at most {record_bytes_max} bytes")


# --- partitions -------------------------------------------------------------------------------------------------------
def by_partition(
    data: Tabular, partitions: int, key: str | None, partitioner: str
) -> list[tuple[int | None, Tabular]]:
    """Rows grouped by the partition of their `key` column, in order of first appearance; a group keeps its rows' order.

    None: rows whose key is null, or all rows of data without a key column.
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
    """Cut into batches: how many records each has, and its payload.

    A RecordBatch stays one batch if it fits a frame: whoever made it chose its size. A Table is cut by `batch_bytes`.
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
            f"a record that needs {batch.nbytes} bytes and has {entries} entries in lists and maps",
            f"a batch has at most {bytes_max} bytes and {entries_max} entries",
        )
    half = batch.num_rows // 2
    yield from _fitting(batch.slice(0, half), bytes_max, compression)
    yield from _fitting(batch.slice(half), bytes_max, compression)


def list_entries(column: pa.Array) -> int:
    """Entries in all lists and maps of a column, as readers count them before they unpack a batch."""
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
    """A payload, compressed if asked and where that makes it smaller."""
    if compression is not None:
        payload = compressed(batch, compression)
        if payload.size < batch.nbytes:
            return payload
    return batch.serialize(memory_pool=_payload_pool())
