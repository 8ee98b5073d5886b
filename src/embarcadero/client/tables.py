"""Tables on their way out: completed to the topic's schema, checked, cut into batches that fit a frame."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from embarcadero.client.convert import Tabular, to_arrow
from embarcadero.errors import BadSchema, BadValue
from embarcadero.limits import DECODED_BYTES_MAX, MIB, RECORD_BYTES_MAX, RECORDS_PER_BATCH_MAX
from embarcadero.wire.codec import payload_crc
from embarcadero.wire.compression import compressed
from embarcadero.wire.payload import RAW_SCHEMA, TIMESTAMP_US_MAX, TIMESTAMP_US_MIN
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
def by_partition(data: Tabular, partitions: int, typed: bool) -> list[tuple[int | None, Tabular]]:
    """Rows grouped by the partition of their key, in order of first appearance. None: rows without a key."""
    if partitions == 1:
        return [(0, data)]
    if typed or data.column("key").null_count == data.num_rows:
        return [(None, data)]
    rows: dict[int | None, list[int]] = {}
    for row, key in enumerate(data.column("key").to_numpy(zero_copy_only=False).tolist()):
        rows.setdefault(None if key is None else partition_of(key, partitions), []).append(row)
    return [(partition, data.take(pa.array(numbers))) for partition, numbers in rows.items()]


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key; the same for every client of a topic."""
    return payload_crc(key) % partitions


def partitions_of(keys: pa.Array, partitions: int) -> npt.NDArray[np.int32]:
    """The partitions of many keys (binary, without nulls) at once: a step for each byte, not for each key."""
    ends = np.frombuffer(keys.buffers()[1], dtype=np.int32)[keys.offset : keys.offset + len(keys) + 1].astype(np.int64)
    data = np.frombuffer(keys.buffers()[2] or b"\0", dtype=np.uint8)
    lengths = np.diff(ends)
    longest_first = np.argsort(-lengths, kind="stable")
    starts, lengths = ends[:-1][longest_first], lengths[longest_first]
    crc, table = np.full(len(keys), 0xFFFF_FFFF, dtype=np.uint32), _crc_table()
    for at in range(int(lengths[0]) if len(lengths) else 0):
        still = int(np.searchsorted(-lengths, -at))  # keys longer than `at`
        crc[:still] = table[(crc[:still] ^ data[starts[:still] + at]) & 0xFF] ^ (crc[:still] >> 8)
    found = np.empty(len(keys), dtype=np.int32)
    found[longest_first] = (crc ^ np.uint32(0xFFFF_FFFF)) % np.uint32(partitions)
    return found


@cache
def _crc_table() -> npt.NDArray[np.uint32]:
    """CRC32C of each byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F6_3B78), table >> 1).astype(np.uint32)
    return table


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
    if batch.nbytes <= (bytes_max if compression is None else DECODED_BYTES_MAX // 2):
        payload = encoded(batch, compression)
        if payload.size <= bytes_max:
            yield batch.num_rows, payload
            return
    if batch.num_rows == 1:
        raise BadValue(f"a record that needs {batch.nbytes} bytes", f"a batch has at most {bytes_max} bytes")
    half = batch.num_rows // 2
    yield from _fitting(batch.slice(0, half), bytes_max, compression)
    yield from _fitting(batch.slice(half), bytes_max, compression)


def encoded(batch: pa.RecordBatch, compression: str | None) -> pa.Buffer:
    """A payload, compressed if asked and where that makes it smaller."""
    if compression is not None:
        payload = compressed(batch, compression)
        if payload.size < batch.nbytes:
            return payload
    return batch.serialize(memory_pool=_payload_pool())
