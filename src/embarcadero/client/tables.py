"""Arrow tables on their way out: completed to the topic's schema, checked, cut into batches that fit a frame."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embarcadero.errors import BadValue
from embarcadero.limits import MIB, RECORD_BYTES_MAX, RECORDS_PER_BATCH_MAX
from embarcadero.wire.codec import payload_crc
from embarcadero.wire.payload import RAW_SCHEMA

_KEPT_BYTES = 32 * MIB


@cache
def _payload_pool() -> pa.MemoryPool:
    """Where payloads are allocated: the C library, told to keep what is freed.

    Arrow's own pool gives memory back within milliseconds, sooner than acks come; getting it again for every batch
    costs a page fault and a cleared page for every 4 KiB, an eighth of all time at full speed.
    """
    np.empty(_KEPT_BYTES, dtype=np.uint8)  # freed at once: blocks up to this size are kept from now on
    return pa.system_memory_pool()


_BYTES_TYPES = (pa.binary(), pa.string(), pa.large_binary(), pa.large_string())


def raw_table(data: Any, now_us: int, record_bytes_max: int = RECORD_BYTES_MAX) -> pa.RecordBatch:
    """`data` as one batch of RAW_SCHEMA. A table of `value`, or of `key` and `value`, is completed."""
    if isinstance(data, pa.Table):
        data = data.combine_chunks().to_batches()
        data = data[0] if data else pa.RecordBatch.from_pylist([], schema=RAW_SCHEMA)
    if not isinstance(data, pa.RecordBatch):
        raise BadValue(f"publish takes a pyarrow Table or RecordBatch, not {type(data).__name__}", "send() takes bytes")
    if not data.num_rows:
        raise BadValue("a table without records", "publish at least one record")
    if set(data.schema.names) in ({"value"}, {"key", "value"}):
        data = _completed(data, now_us)
    if not data.schema.equals(RAW_SCHEMA):
        if problems := _differences(data.schema):
            raise BadValue("the table does not fit the topic: " + "; ".join(problems), f"wanted: {_named(RAW_SCHEMA)}")
        data = pa.RecordBatch.from_arrays([data.column(name) for name in RAW_SCHEMA.names], schema=RAW_SCHEMA)
    _check_records(data, record_bytes_max)
    return data


def _completed(data: pa.RecordBatch, now_us: int) -> pa.RecordBatch:
    wrong = [field for field in data.schema if field.type not in _BYTES_TYPES]
    if wrong:
        raise BadValue(
            f"column {wrong[0].name!r} is {wrong[0].type}, not binary or string", "encode it, or publish it as `value`"
        )
    columns = {name: data.column(name).cast(pa.binary()) for name in data.schema.names}
    key, _, headers, timestamp = RAW_SCHEMA.types
    now = pa.array(np.full(data.num_rows, now_us, dtype=np.int64)).view(timestamp)
    return pa.RecordBatch.from_arrays(
        [columns.get("key", pa.nulls(data.num_rows, key)), columns["value"], pa.nulls(data.num_rows, headers), now],
        schema=RAW_SCHEMA,
    )


def _differences(schema: pa.Schema) -> list[str]:
    problems = []
    for field in RAW_SCHEMA:
        if field.name not in schema.names:
            problems.append(f"column {field.name!r} is missing")
        elif schema.field(field.name).type != field.type:
            problems.append(f"column {field.name!r} is {schema.field(field.name).type}, not {field.type}")
    return problems + [f"column {name!r} is unknown" for name in schema.names if name not in RAW_SCHEMA.names]


def _named(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _check_records(data: pa.RecordBatch, record_bytes_max: int) -> None:
    for name in ("value", "timestamp"):
        if data.column(name).null_count:
            raise BadValue(f"column {name!r} has nulls", "every record has a value and a timestamp")
    if data.get_total_buffer_size() <= record_bytes_max:
        return  # no record can be larger than all of them
    keys = pc.fill_null(pc.binary_length(data.column("key")), 0)
    longest = pc.max(pc.add(keys, pc.binary_length(data.column("value")))).as_py()
    if longest > record_bytes_max:
        raise BadValue(f"a record of {longest} bytes", f"records have at most {record_bytes_max} bytes")


def by_partition(data: pa.RecordBatch, partitions: int) -> list[tuple[int | None, pa.RecordBatch]]:
    """Rows grouped by the partition of their key, in order of first appearance. None: rows without a key."""
    keys = data.column("key")
    if partitions == 1:
        return [(0, data)]
    if keys.null_count == len(keys):
        return [(None, data)]
    rows: dict[int | None, list[int]] = {}
    for row, key in enumerate(keys.to_numpy(zero_copy_only=False).tolist()):
        rows.setdefault(None if key is None else partition_of(key, partitions), []).append(row)
    return [(partition, data.take(pa.array(numbers))) for partition, numbers in rows.items()]


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key; the same for every client of a topic."""
    return payload_crc(key) % partitions


def pieces(
    data: pa.RecordBatch, bytes_max: int, records_max: int = RECORDS_PER_BATCH_MAX
) -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
    """Cut into batches whose payloads have at most `bytes_max` bytes; with each its payload."""
    payload = data.serialize(memory_pool=_payload_pool()) if data.num_rows <= records_max else None
    if payload is not None and payload.size <= bytes_max:
        yield data, payload
    elif data.num_rows == 1:
        raise BadValue(f"a record that needs {data.nbytes} bytes", f"a batch has at most {bytes_max} bytes")
    else:
        half = data.num_rows // 2
        yield from pieces(data.slice(0, half), bytes_max, records_max)
        yield from pieces(data.slice(half), bytes_max, records_max)
