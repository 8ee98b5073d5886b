"""The log as columns: rows of records with their positions, for the files of the tier and for Spark.

System columns come first: they repeat the numbers of a batch for each of its records. The topic's columns follow. With
`control`, every entry of the log is included: an entry without records is one row, with the `_seq` of the next record.
A table of such rows holds everything in the log, and a hole in `_index` is always a loss.

`table_type` and related functions map the types of topics to types that Iceberg, Spark and Parquet readers all have,
and back.

A layout defines which columns are in which files of a table. WHOLE (earlier versions): one table with a row for each
record and each control entry (a session's open or close, a skip), system columns first. SPLIT: a table of records, with
the topic's own columns first, and a table `<name>__entries` of control entries. With both layouts, readers get the rows
of `rows(..., control=True)`. A table keeps the layout of its creation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from embarcadero.client.results import Batch
from embarcadero.errors import BadSchema, BadTable, BadValue, Corrupt, UnknownSchema
from embarcadero.types import BATCH_KIND, EntryKind, GapKind
from embarcadero.wire.schemas import TopicSchemas

_DIGITS_MAX: Final = 38  # of a decimal in Iceberg and Spark
_UINT64_DIGITS: Final = 20
_ELEMENT, _KEY, _VALUE = "element", "key", "value"

_SAME: Final = (
    kinds.is_boolean, kinds.is_int32, kinds.is_int64, kinds.is_float32, kinds.is_float64, kinds.is_string,
    kinds.is_binary, kinds.is_date32,
)  # fmt: skip
TIME: Final = pa.timestamp("us", tz="UTC")

SYSTEM: Final = pa.schema(
    [
        pa.field("_lane", pa.int32()),
        pa.field("_index", pa.int64()),
        pa.field("_seq", pa.int64()),
        pa.field("_kind", pa.int32()),
        pa.field("_partition", pa.int32()),
        pa.field("_session", pa.int64()),
        pa.field("_session_seq", pa.int64()),
        pa.field("_broker", pa.int32()),
        pa.field("_append_time", TIME),
        pa.field("_crc", pa.int64()),
        pa.field("_size", pa.int32()),
        pa.field("_count", pa.int32()),
        pa.field("_schema_version", pa.int32()),
    ]
)
"""Columns of every row about its batch. `_kind` is an EntryKind, `_crc` the payload's CRC32C."""

KEPT: Final = pa.schema(
    [
        # SKIP: the number of skipped sequences from _session_seq on. SESSION_OPEN: its flags; null in older files.
        pa.field("_skipped", pa.int64()),
        pa.field("_damage", pa.string()),  # the reason why this batch's columns are null although it has records
        pa.field("_payload", pa.binary()),  # in the first row of a batch that columns do not hold exactly: its payload
    ]
)
"""Additional columns of rows with `control`, so that a table loses nothing of the log. Nearly always null."""

_RESERVED: Final = frozenset([*SYSTEM.names, *KEPT.names])

_SCHEMAS_KEPT: Final = 64  # cached schemas of topics

Int64s = npt.NDArray[np.int64]


def table_type(kind: pa.DataType, column: str = "") -> pa.DataType:
    """Map a type of a topic to the type of a table's column. Every value fits, with two exceptions.

    Times in nanoseconds are cut to microseconds (`to_table` reports it), and times outside the range of 64-bit
    microseconds do not fit. If there is no such type, BadSchema names the column.

        table_type(pa.uint32())                  # int64
        table_type(pa.list_(pa.float16(), 3))    # list<element: float>
    """
    if any(is_kind(kind) for is_kind in _SAME):
        return kind
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return pa.list_(pa.field(_ELEMENT, _nested(kind.value_type, column)))
    if kinds.is_map(kind):
        key, item = _nested(kind.key_type, column), _nested(kind.item_type, column)
        return pa.map_(pa.field(_KEY, key, nullable=False), pa.field(_VALUE, item))
    if kinds.is_struct(kind):
        return _struct_type(kind, column)
    return _plain_type(kind, column)


def _struct_type(kind: pa.StructType, column: str) -> pa.DataType:
    names = [kind.field(number).name for number in range(kind.num_fields)]
    if not names or "" in names or len({name.lower() for name in names}) < len(names):
        raise BadSchema(
            f"column {column!r} has type {kind}, which no table can hold",
            "give a struct at least one field, and each field a unique name (names ignore case)",
        )
    fields = [kind.field(number) for number in range(kind.num_fields)]
    return pa.struct([pa.field(field.name, _nested(field.type, column)) for field in fields])


def _nested(kind: pa.DataType, column: str) -> pa.DataType:
    if kinds.is_null(kind):
        raise BadSchema(f"column {column!r} nests the type null in another type", "use the type of the values instead")
    return table_type(kind, column)


def _plain_type(kind: pa.DataType, column: str) -> pa.DataType:
    if kinds.is_integer(kind):
        if kinds.is_uint64(kind):
            return pa.decimal128(_UINT64_DIGITS, 0)
        return pa.int64() if kinds.is_uint32(kind) else pa.int32()
    if kinds.is_decimal(kind):
        return _decimal_type(kind, column)
    if kinds.is_timestamp(kind):
        return pa.timestamp("us", tz=None if kind.tz is None else "UTC")
    if kinds.is_time(kind):
        return pa.time64("us")
    for is_kind, becomes in (
        (kinds.is_float16, pa.float32()),
        (kinds.is_large_string, pa.string()),
        (kinds.is_null, pa.string()),
        (kinds.is_large_binary, pa.binary()),
        (kinds.is_fixed_size_binary, pa.binary()),
        (kinds.is_date64, pa.date32()),
        (kinds.is_duration, pa.int64()),
    ):
        if is_kind(kind):
            return becomes
    raise BadSchema(
        f"column {column!r} has type {kind}, which Spark and Iceberg do not have",
        "use a duration, or separate columns for months, days and nanoseconds",
    )


def _decimal_type(kind: pa.DataType, column: str) -> pa.DataType:
    """Iceberg and Spark require 0 <= scale <= precision."""
    scale = max(kind.scale, 0)
    digits = max(kind.precision - min(kind.scale, 0), scale)
    if digits > _DIGITS_MAX:
        raise BadSchema(
            f"column {column!r} has type {kind}, but decimals of Spark and Iceberg have at most {_DIGITS_MAX} digits",
            "use a smaller precision, or a string",
        )
    return pa.decimal128(digits, scale)


def cuts_nanoseconds(kind: pa.DataType) -> bool:
    """Whether the table's type for this type may cut nanoseconds."""
    if (kinds.is_timestamp(kind) or kinds.is_time(kind)) and kind.unit == "ns":
        return True
    return any(cuts_nanoseconds(kind.field(number).type) for number in range(kind.num_fields))


def to_table(array: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, bool]:
    """Convert a column to its table type; also return whether this was exact. ArrowInvalid if a value does not fit."""
    if array.type == wanted:
        return array, True
    if cuts_nanoseconds(array.type):
        try:
            return pc.cast(array, wanted), True
        except pa.ArrowInvalid:
            return _without_nanoseconds(array, wanted), False
    return pc.cast(array, wanted), True


def _without_nanoseconds(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    return pc.cast(array, options=pc.CastOptions(target_type=wanted, allow_time_truncate=True))


def from_table(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Convert a column of a table to the type in its topic."""
    if array.type == wanted:
        return array
    return pa.nulls(len(array), wanted) if kinds.is_null(wanted) else pc.cast(array, wanted)


class _Decoded(NamedTuple):
    """The payload columns of one batch: arrays in table types, or the damage; and whether they are exact."""

    arrays: list[pa.Array] | None
    damage: str | None
    exact: bool


@lru_cache(maxsize=_SCHEMAS_KEPT)
def payload_schema(schemas: TopicSchemas) -> pa.Schema:
    """The topic's own columns in table types; all are nullable."""
    for field in schemas.newest:
        if field.name.lower() in _RESERVED:
            raise BadSchema(
                f"column {field.name!r} has the name of a system column",
                "a topic with such a column cannot be tiered or read by Spark; use another name",
            )
    return pa.schema([pa.field(field.name, table_type(field.type, field.name)) for field in schemas.newest])


@lru_cache(maxsize=_SCHEMAS_KEPT)
def table_schema(schemas: TopicSchemas, control: bool) -> pa.Schema:
    """Columns of the topic's rows: system columns, then its own. BadSchema names an impossible column."""
    kept = list(KEPT) if control else []
    return pa.schema([*SYSTEM, *kept, *payload_schema(schemas)])


def rows(
    lane: int,
    batches: Iterable[Batch],
    schemas: TopicSchemas,
    columns: Sequence[str] | None = None,
    start_seq: int | None = None,
    stop_seq: int | None = None,
    *,
    control: bool = False,
) -> pa.RecordBatch:
    """Convert batches of one lane, in order, to rows with the wanted columns (None: all columns).

    Rows outside [start_seq, stop_seq) are removed. Gaps have no rows. With `control`, a SKIP has one row, and so has
    every other entry without records. A payload that is not a batch of its topic raises Corrupt. With `control`, its
    rows instead have the reason in `_damage`, and `_payload` keeps the payload. `_payload` also keeps payloads with
    nanoseconds.

        rows(0, batches, schemas, ["_seq", "price"])
    """
    schema = _wanted(table_schema(schemas, control), columns)
    entries = [batch for batch in batches if _has_rows(batch, control)]
    counts = np.fromiter((batch.count or 1 for batch in entries), np.int64, len(entries))
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    seqs = np.repeat(_numbers(entries, "seq"), counts) + within
    first = 0 if start_seq is None else int(np.searchsorted(seqs, start_seq))
    stop = len(seqs) if stop_seq is None else int(np.searchsorted(seqs, stop_seq))
    payload = payload_schema(schemas)
    own = [field for field in schema if field.name not in _RESERVED]
    needs_payload = bool(own) or "_damage" in schema.names or "_payload" in schema.names
    decoded = [_decode(batch, schemas, payload, own, control) for batch in entries] if needs_payload else []
    arrays = _payload_columns(own, decoded, counts)
    known = {"_seq": seqs, "_lane": lane}
    made = [
        arrays[field.name]
        if field.name in arrays
        else _kept_column(field, entries, decoded, counts)
        if field.name in KEPT.names
        else _system_column(field, entries, counts, known)
        for field in schema
    ]
    found = pa.RecordBatch.from_arrays(made, schema=schema) if made else _no_columns(len(seqs))
    return found.slice(first, max(stop - first, 0))


def _wanted(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    if columns is None:
        return schema
    if unknown := [name for name in columns if name not in schema.names]:
        raise BadValue(f"there is no column {', '.join(unknown)}", f"the columns are {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in columns])


def _no_columns(count: int) -> pa.RecordBatch:
    """Rows without columns, for a count(*)."""
    return pa.RecordBatch.from_struct_array(pa.Array.from_buffers(pa.struct([]), count, [None]))


def _has_rows(batch: Batch, control: bool) -> bool:
    if control:
        return batch.gap is None or batch.gap.kind is GapKind.SKIPPED
    return batch.count > 0


# --- columns ----------------------------------------------------------------------------------------------------------
_FIELDS: Final = {
    "_index": "index", "_kind": "kind", "_partition": "partition", "_session": "session",
    "_session_seq": "session_seq", "_broker": "broker", "_append_time": "append_us", "_crc": "crc", "_size": "size",
    "_count": "count", "_schema_version": "schema_version",
}  # fmt: skip


def _numbers(entries: list[Batch], name: str) -> Int64s:
    """A field of all entries. A 64-bit hash (a session's name, in `session_seq` of its first entry) becomes signed."""
    return np.fromiter((getattr(batch, name) for batch in entries), np.uint64, len(entries)).view(np.int64)


def _system_column(field: pa.Field, entries: list[Batch], counts: Int64s, known: dict[str, Any]) -> pa.Array:
    if field.name == "_lane":
        return pa.array(np.full(int(counts.sum()), known["_lane"], np.int32))
    values = known["_seq"] if field.name == "_seq" else np.repeat(_numbers(entries, _FIELDS[field.name]), counts)
    if field.type == TIME:
        return pa.array(values).view(TIME)
    return pa.array(values.astype(np.int32) if field.type == pa.int32() else values)


def _kept_column(field: pa.Field, entries: list[Batch], decoded: list[_Decoded], counts: Int64s) -> pa.Array:
    """A column that is null for nearly all batches."""
    parts: list[pa.Array] = []
    waiting = 0  # rows without a value since the last part
    for number, count in enumerate(counts.tolist()):
        value, times = _kept_value(field.name, entries[number], decoded[number] if decoded else None)
        if value is not None:
            filled = count if times is None else times
            parts += [pa.nulls(waiting, field.type), pa.repeat(pa.scalar(value, field.type), filled)]
            waiting = -filled
        waiting += count
    rest = pa.nulls(waiting, field.type)
    return pa.concat_arrays([*parts, rest]) if parts else rest


def _kept_value(name: str, batch: Batch, decoded: _Decoded | None) -> tuple[Any, int | None]:
    """The value of a batch in such a column, and the number of its rows that have it (None: all)."""
    if name == "_skipped":
        if batch.kind is EntryKind.SESSION_OPEN:
            return batch.flags, 1
        return None if batch.gap is None else batch.gap.stop - batch.gap.start, 1
    if decoded is None or decoded.exact:
        return None, None
    return (bytes(batch.payload), 1) if name == "_payload" else (decoded.damage, None)


def _payload_columns(own: list[pa.Field], decoded: list[_Decoded], counts: Int64s) -> dict[str, pa.Array]:
    made: dict[str, pa.Array] = {}
    for number, field in enumerate(own):
        parts = [
            pa.nulls(int(count), field.type) if batch.arrays is None else batch.arrays[number]
            for batch, count in zip(decoded, counts, strict=True)
        ]
        made[field.name] = parts[0] if len(parts) == 1 else _joined(parts, field.type)
    return made


def _joined(parts: list[pa.Array], kind: pa.DataType) -> pa.Array:
    return pa.concat_arrays(parts) if parts else pa.nulls(0, kind)


def _decode(batch: Batch, schemas: TopicSchemas, payload: pa.Schema, own: list[pa.Field], control: bool) -> _Decoded:
    if not batch.count:
        return _Decoded(None, None, True)
    if control and batch.schema_version > schemas.version:
        raise UnknownSchema(
            f"{batch!r} has schema version {batch.schema_version}, newer than {schemas.version}",
            "describe the topic again",
        )
    try:
        found = batch.to_arrow()
        # With `control`, exactness matters, so all columns are converted; else only the wanted ones.
        names = payload.names if control else [field.name for field in own]
        cast = {name: to_table(found.column(name), payload.field(name).type) for name in names}
    except Corrupt as error:
        if not control:
            raise
        return _Decoded(None, error.message, False)
    except pa.ArrowInvalid as error:
        if not control:
            raise BadValue(
                f"{batch!r} has a value that no table can hold: {error}", "read the batch with to_arrow()"
            ) from None
        return _Decoded(None, f"a value that no table can hold: {error}", False)
    return _Decoded([cast[field.name][0] for field in own], None, all(exact for _, exact in cast.values()))


# --- entries ----------------------------------------------------------------------------------------------------------
HASHED: Final = (
    "_index", "_seq", "_kind", "_count", "_crc", "_session", "_session_seq", "_partition", "_append_time",
)  # fmt: skip
"""Columns that are compared between copies of the log's entries."""


class EntriesHash:
    """A hash of entries in order: equal for the same part of a log, independent of row groups and files."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._last: int | None = None
        self.entries = 0

    def add(self, found: pa.RecordBatch) -> None:
        """Add rows with `control`, in order; each entry counts once, by its first row."""
        if not found.num_rows:
            return
        indices = found.column("_index").to_numpy()
        first = np.concatenate(([indices[0] != self._last], indices[1:] != indices[:-1]))
        words = np.empty((int(first.sum()), len(HASHED)), "<i8")
        for number, name in enumerate(HASHED):
            column = found.column(name)
            words[:, number] = (column.view(pa.int64()) if column.type == TIME else column).to_numpy()[first]
        self._hash.update(words.tobytes())
        self._last = int(indices[-1])
        self.entries += len(words)

    @property
    def hex(self) -> str:
        """The hash so far."""
        return self._hash.hexdigest()


# --- layouts ----------------------------------------------------------------------------------------------------------
LAYOUT: Final = "embarcadero.layout"
"""The property of a table with its layout; tables of earlier versions do not have it."""

TIMESTAMP: Final = "_timestamp"
DAY: Final = "_timestamp_day"  # the partition field
_LOGICAL_TIME: Final = "_append_time"
_KIND: Final = "_kind"
_DAY_US: Final = 86_400_000_000

_RECORDS: Final = (
    "_seq", TIMESTAMP, "_partition", "_lane", "_index", "_session", "_session_seq", "_broker", "_crc", "_size",
    "_count", "_schema_version", "_damage", "_payload",
)  # fmt: skip
_ENTRIES: Final = (
    "_seq", TIMESTAMP, "_partition", "_lane", "_index", _KIND, "_session", "_session_seq", "_skipped", "_broker",
    "_crc", "_size", "_count", "_schema_version",
)  # fmt: skip
_LOGICAL: Final = {field.name: field for field in (*SYSTEM, *KEPT)}


class Layout(IntEnum):
    """The layout of a topic's rows in tables."""

    WHOLE = 1
    SPLIT = 2


def layout_of(properties: Mapping[str, str], name: str) -> Layout:
    """The layout of a table with these properties. BadTable if a newer version created it."""
    found = properties.get(LAYOUT, str(int(Layout.WHOLE)))
    try:
        return Layout(int(found))
    except ValueError:
        known = ", ".join(str(int(each)) for each in Layout)
        raise BadTable(
            f"table {name} has layout {found!r}; this version knows {known}", "upgrade embarcadero on this machine"
        ) from None


def physical(name: str, layout: Layout) -> str:
    """The name in files of a column of rows."""
    return TIMESTAMP if layout is Layout.SPLIT and name == _LOGICAL_TIME else name


@lru_cache(maxsize=64)
def records_schema(schemas: TopicSchemas) -> pa.Schema:
    """Columns of a table of records: the topic's columns, then the log's. BadSchema names an impossible column."""
    own = payload_schema(schemas)
    if taken := [name for name in own.names if name.lower() in (TIMESTAMP, DAY)]:
        raise BadSchema(
            f"column {taken[0]!r} has the name of a column that every table has",
            "a topic with such a column cannot be tiered; use another name",
        )
    return pa.schema([*own, *_system(_RECORDS)])


def entries_schema() -> pa.Schema:
    """Columns of a table of control entries."""
    return pa.schema(_system(_ENTRIES))


def _system(names: Sequence[str]) -> list[pa.Field]:
    return [pa.field(name, TIME) if name == TIMESTAMP else _LOGICAL[name] for name in names]


def file_schema(schemas: TopicSchemas, layout: Layout) -> pa.Schema:
    """Columns of the table with a topic's records."""
    return records_schema(schemas) if layout is Layout.SPLIT else table_schema(schemas, control=True)


def row_schema(columns: pa.Schema, layout: Layout) -> pa.Schema:
    """Columns of rows for readers of a table with these columns."""
    if layout is Layout.WHOLE:
        return columns
    own = [field for field in columns if field.name not in _RECORDS]
    return pa.schema([*_LOGICAL.values(), *own])


# --- rows to files ----------------------------------------------------------------------------------------------------
def split(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Split rows with `control` into rows of records and rows of control entries."""
    is_record = pc.and_(pc.equal(rows.column(_KIND), BATCH_KIND), pc.greater(rows.column("_count"), 0))
    many = pc.sum(is_record).as_py() or 0
    if many == rows.num_rows:
        return rows, rows.slice(0, 0)
    if not many:
        return rows.slice(0, 0), rows
    return rows.filter(is_record), rows.filter(pc.invert(is_record))


def records_file(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rename and select the columns of a table of records."""
    own = [name for name in rows.schema.names if name not in _LOGICAL]
    return _renamed(rows, [*own, *_RECORDS])


def entries_file(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rename and select the columns of a table of control entries."""
    return _renamed(rows, _ENTRIES)


def _renamed(rows: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    columns = [rows.column(_LOGICAL_TIME if name == TIMESTAMP else name) for name in names]
    return pa.RecordBatch.from_arrays(columns, names=list(names))


def day_of(append_us: int) -> int:
    """The day of a time, in Iceberg's count of days."""
    return append_us // _DAY_US


# --- files to rows ----------------------------------------------------------------------------------------------------
def constant(field: pa.Field, layout: Layout, count: int) -> pa.Array:
    """A column that a file does not have: the kind of records is known, other columns are null."""
    if field.name == _KIND and layout is Layout.SPLIT:
        return pa.repeat(pa.scalar(BATCH_KIND, field.type), count)
    return pa.nulls(count, field.type)
