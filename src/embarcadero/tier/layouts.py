"""The layouts of a topic's table: which columns are in which files, and what readers make of them.

WHOLE, of earlier versions: one table with a row for each record and each control entry (a session's open or close, a
skip), system columns first. SPLIT: a table of records, with the topic's own columns first, and a table
`<name>__entries` of control entries. Readers see the rows of `columns.rows(..., control=True)` with either; a table
keeps the layout in which it was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from embarcadero.errors import BadSchema, BadTable
from embarcadero.tier.columns import KEPT, SYSTEM, TIME, payload_schema, table_schema
from embarcadero.types import BATCH_KIND
from embarcadero.wire.schemas import TopicSchemas

LAYOUT: Final = "embarcadero.layout"
"""The property of a table that says which layout it has; tables of earlier versions have none."""

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
    """How the rows of a topic are kept."""

    WHOLE = 1
    SPLIT = 2


def layout_of(properties: Mapping[str, str], name: str) -> Layout:
    """The layout of a table with these properties. BadTable, if a newer version made it."""
    said = properties.get(LAYOUT, str(int(Layout.WHOLE)))
    try:
        return Layout(int(said))
    except ValueError:
        known = ", ".join(str(int(each)) for each in Layout)
        raise BadTable(
            f"table {name} has layout {said!r}; this version knows {known}", "upgrade embarcadero on this machine"
        ) from None


def physical(name: str, layout: Layout) -> str:
    """What a column of rows is called in files."""
    return TIMESTAMP if layout is Layout.SPLIT and name == _LOGICAL_TIME else name


@lru_cache(maxsize=64)
def records_schema(schemas: TopicSchemas) -> pa.Schema:
    """Columns of a table of records: those of the topic, then those of the log. BadSchema names one that can't be."""
    own = payload_schema(schemas)
    if taken := [name for name in own.names if name.lower() in (TIMESTAMP, DAY)]:
        raise BadSchema(
            f"column {taken[0]!r} has the name of a column that every table of a topic has",
            "a topic with such a column can't be tiered; use another name",
        )
    return pa.schema([*own, *_system(_RECORDS)])


def entries_schema() -> pa.Schema:
    """Columns of a table of control entries."""
    return pa.schema(_system(_ENTRIES))


def _system(names: Sequence[str]) -> list[pa.Field]:
    return [pa.field(name, TIME) if name == TIMESTAMP else _LOGICAL[name] for name in names]


def file_schema(schemas: TopicSchemas, layout: Layout) -> pa.Schema:
    """Columns of the table that has a topic's records."""
    return records_schema(schemas) if layout is Layout.SPLIT else table_schema(schemas, control=True)


def row_schema(columns: pa.Schema, layout: Layout) -> pa.Schema:
    """Columns of rows, as readers see them, that a table with these columns has."""
    if layout is Layout.WHOLE:
        return columns
    own = [field for field in columns if field.name not in _RECORDS]
    return pa.schema([*_LOGICAL.values(), *own])


# --- rows to files ----------------------------------------------------------------------------------------------------
def split(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Rows made with control: those of records, and those of control entries."""
    is_record = pc.and_(pc.equal(rows.column(_KIND), BATCH_KIND), pc.greater(rows.column("_count"), 0))
    many = pc.sum(is_record).as_py() or 0
    if many == rows.num_rows:
        return rows, rows.slice(0, 0)
    if not many:
        return rows.slice(0, 0), rows
    return rows.filter(is_record), rows.filter(pc.invert(is_record))


def records_file(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of records with the columns of their table."""
    own = [name for name in rows.schema.names if name not in _LOGICAL]
    return _renamed(rows, [*own, *_RECORDS])


def entries_file(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of control entries with the columns of their table."""
    return _renamed(rows, _ENTRIES)


def _renamed(rows: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    columns = [rows.column(_LOGICAL_TIME if name == TIMESTAMP else name) for name in names]
    return pa.RecordBatch.from_arrays(columns, names=list(names))


def day_of(append_us: int) -> int:
    """The day of a time, as Iceberg counts them."""
    return append_us // _DAY_US


# --- files to rows ----------------------------------------------------------------------------------------------------
def constant(field: pa.Field, layout: Layout, count: int) -> pa.Array:
    """A column that a file does not have: of records the kind is known, everything else is null."""
    if field.name == _KIND and layout is Layout.SPLIT:
        return pa.repeat(pa.scalar(BATCH_KIND, field.type), count)
    return pa.nulls(count, field.type)
