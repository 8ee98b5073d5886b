"""A topic as Spark sees it: names and types of columns, and rows of the log in exactly these.

Filters that Spark pushes down: exact are comparisons with numbers and times of columns that are never null. They
narrow the span that is read where the log can find the place, and rows outside are dropped before they go to Java.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from embarcadero.client.arguments import time_us
from embarcadero.client.results import Batch
from embarcadero.errors import BadSchema, BadValue
from embarcadero.limits import SPARK_ROWS_BYTES
from embarcadero.spark.versions import from_arrow, to_arrow
from embarcadero.tier.columns import SYSTEM, payload_schema, rows
from embarcadero.wire.schemas import TopicSchemas

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_TOPIC: Final = "topic"
_RAW_SYSTEM: Final = {
    "topic": _TOPIC, "partition": "_partition", "lane": "_lane", "seq": "_seq", "index": "_index", "key": "key",
    "value": "value", "headers": "headers", "timestamp": "timestamp", "session": "_session",
    "session_seq": "_session_seq", "broker": "_broker",
}  # fmt: skip
RAW_USUAL: Final = ("topic", "partition", "seq", "key", "value", "headers", "timestamp")
"""Columns of a raw topic that are read unless others are named: each one costs time on its way to Java."""
_TYPED_SYSTEM: Final = {
    "_topic": _TOPIC, "_partition": "_partition", "_lane": "_lane", "_seq": "_seq", "_index": "_index",
    "_timestamp": "_append_time", "_session": "_session", "_session_seq": "_session_seq", "_broker": "_broker",
}  # fmt: skip
_OPERATIONS: Final = {
    "EqualTo": "equal", "EqualNullSafe": "equal", "GreaterThan": "greater", "GreaterThanOrEqual": "greater_equal",
    "LessThan": "less", "LessThanOrEqual": "less_equal", "In": "in",
}  # fmt: skip
_ALWAYS_TRUE: Final = "IsNotNull"
_NEVER_NULL: Final = frozenset(
    ["_lane", "_index", "_seq", "_partition", "_session", "_session_seq", "_broker", "_append_time", "timestamp"]
)
"""Columns of rows of the log by which is filtered; `timestamp` is one of raw topics only."""
_NUMBER_MAX: Final = (1 << 63) - 1


def column_names(schemas: TopicSchemas) -> dict[str, str]:
    """Names of a topic's columns in Spark, in their order, and what they are called in rows of the log."""
    if not schemas.typed:
        return dict(_RAW_SYSTEM)
    own = {name: name for name in payload_schema(schemas).names}
    if clash := [name for name in own if name.lower() in _TYPED_SYSTEM]:
        raise BadSchema(
            f"column {clash[0]!r} has the name of a column that every topic has in Spark",
            f"these names are taken: {', '.join(_TYPED_SYSTEM)}",
        )
    return own | _TYPED_SYSTEM


def arrow_schema(schemas: TopicSchemas) -> pa.Schema:
    """All columns of a topic with the types of tables."""
    known = {field.name: field.type for field in (*SYSTEM, *payload_schema(schemas))} | {_TOPIC: pa.string()}
    return pa.schema([pa.field(name, frame_type(known[inner])) for name, inner in column_names(schemas).items()])


def frame_type(kind: pa.DataType) -> pa.DataType:
    """A table's type as frames have it: times of day are microseconds, for Spark has TIME only if a flag is set."""
    if kinds.is_time(kind):
        return pa.int64()
    if kinds.is_list(kind):
        return pa.list_(kind.value_field.with_type(frame_type(kind.value_type)))
    if kinds.is_map(kind):
        return pa.map_(
            kind.key_field.with_type(frame_type(kind.key_type)), kind.item_field.with_type(frame_type(kind.item_type))
        )
    if kinds.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pa.struct([field.with_type(frame_type(field.type)) for field in fields])
    return kind


def spark_schema(schemas: TopicSchemas, columns: Sequence[str] | None) -> StructType:
    """What `load()` has: `columns`, if they are given. BadValue names a column that is not there."""
    from pyspark.sql.types import StructField, StructType

    whole = arrow_schema(schemas)
    if missing := [name for name in columns or () if name not in whole.names]:
        raise BadValue(f"option 'columns': there is no column {missing[0]!r}", f"there are {', '.join(whole.names)}")
    usual = whole.names if schemas.typed else RAW_USUAL
    chosen = pa.schema([whole.field(name) for name in (usual if columns is None else columns)])
    return StructType([StructField(field.name, from_arrow(field.type)) for field in chosen])


def check_schema(wanted: StructType, schemas: TopicSchemas, topic: str) -> None:
    """BadSchema, if a frame of this schema can't be made of the topic (any more): names the column and both types."""
    there = spark_schema(schemas, list(column_names(schemas)))
    for field in wanted:
        if field.name not in there.names:
            raise BadSchema(
                f"topic {topic!r} has no column {field.name!r}",
                f"it has {', '.join(there.names)}; if the topic was made anew, load it again",
            )
        known = there[field.name].dataType
        if field.dataType.simpleString() != known.simpleString():
            raise BadSchema(
                f"column {field.name!r} is {known.simpleString()} in topic {topic!r}, and not "
                f"{field.dataType.simpleString()}",
                "read it as it is and cast it in Spark; if the topic was made anew, load it again",
            )


class Shaper:
    """Makes Spark's rows of batches: exactly the columns and Arrow types of a frame.

    `wanted` are the columns that rows of the log must have for it, with their types.
    """

    def __init__(self, topic: str, schemas: TopicSchemas, schema: StructType) -> None:
        names, payload = column_names(schemas), payload_schema(schemas)
        self._topic, self._schemas = topic, schemas
        self._schema = to_arrow(schema)
        self._inner = [names[name] for name in self._schema.names]
        self.wanted = {
            name: (SYSTEM if name in SYSTEM.names else payload).field(name).type
            for name in self._inner
            if name != _TOPIC
        }

    def shaped(self, found: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the log, as `tier.columns.rows` makes them and the tier keeps them, as rows of the frame."""
        arrays = [
            _repeated(self._topic, found.num_rows) if inner == _TOPIC else found.column(inner) for inner in self._inner
        ]
        cast = [
            array if array.type == field.type else pc.cast(array, field.type)
            for array, field in zip(arrays, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(cast, schema=self._schema)

    def of_batches(
        self, lane: int, batches: Iterable[Batch], start_seq: int, stop_seq: int
    ) -> Iterator[pa.RecordBatch]:
        """The records of batches with start_seq <= seq < stop_seq, a few MiB at a time."""
        for group in grouped(batches):
            found = rows(lane, group, self._schemas, list(self.wanted), start_seq, stop_seq)
            if found.num_rows:
                yield self.shaped(found)


def grouped(batches: Iterable[Batch]) -> Iterator[list[Batch]]:
    """Batches in lists of a few MiB: large enough to be worth a trip to Java, small enough not to be copied for it."""
    group: list[Batch] = []
    size = 0
    for batch in batches:
        if group and size + batch.size > SPARK_ROWS_BYTES:
            yield group
            group, size = [], 0
        group.append(batch)
        size += batch.size
    if group:
        yield group


def _repeated(text: str, count: int) -> pa.Array:
    """A column with the same text in every row, laid out at once."""
    data = text.encode()
    ends = np.arange(0, (count + 1) * len(data), len(data), dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data * count)]
    return pa.Array.from_buffers(pa.string(), count, buffers)


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison that rows must pass: of the frame's column `name`, which is `inner` in rows of the log."""

    name: str
    inner: str
    operation: str
    values: tuple[int, ...]  # times in microseconds since 1970


@dataclass(frozen=True, slots=True)
class Bounds:
    """Numbers that a column can have: low <= number < stop; if `only` is given, these and no others."""

    low: int = 0
    stop: int = _NUMBER_MAX
    only: frozenset[int] | None = None

    def narrowed(self, condition: Condition) -> Bounds:
        """What is left with one more condition."""
        value = condition.values[0] if condition.values else 0
        if condition.operation in ("equal", "in"):
            wanted = frozenset(condition.values)
            only = wanted if self.only is None else self.only & wanted
            low, stop = min(only, default=0), max(only, default=-1) + 1
            return Bounds(max(self.low, low), min(self.stop, stop), only)
        if condition.operation in ("greater", "greater_equal"):
            return Bounds(max(self.low, value + (condition.operation == "greater")), self.stop, self.only)
        return Bounds(self.low, min(self.stop, value + (condition.operation == "less_equal")), self.only)


def understood(filters: Iterable[Any], inner_names: dict[str, str], typed: bool) -> tuple[list[Condition], list[Any]]:
    """Filters that we answer, as conditions, and those that are left to Spark."""
    conditions: list[Condition] = []
    left: list[Any] = []
    for each in filters:
        found = _condition(each, inner_names, typed)
        if found is None:
            left.append(each)
        elif found.operation:
            conditions.append(found)
    return conditions, left


def _condition(each: Any, inner_names: dict[str, str], typed: bool) -> Condition | None:
    """One filter; with no operation if it is always true."""
    kind, path = type(each).__name__, list(getattr(each, "attribute", ()))
    name = path[0] if len(path) == 1 else ""
    inner = inner_names.get(name, "")
    if inner not in _NEVER_NULL or (typed and inner == "timestamp"):
        return None
    if kind == _ALWAYS_TRUE:
        return Condition(name, inner, "", ())
    if kind not in _OPERATIONS:
        return None
    values = [value for value in each.value if value is not None] if kind == "In" else [each.value]
    numbers = [_number(value) for value in values]
    if None in numbers:
        return None
    return Condition(name, inner, _OPERATIONS[kind], tuple(number for number in numbers if number is not None))


def _number(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, datetime):
        try:
            return time_us(value if value.tzinfo is not None else value.replace(tzinfo=UTC))
        except BadValue:
            return None
    return None


def bounds(conditions: Sequence[Condition], inner: str) -> Bounds:
    """What all conditions together leave of a column."""
    found = Bounds()
    for condition in conditions:
        if condition.inner == inner:
            found = found.narrowed(condition)
    return found


def passing(rows: pa.RecordBatch, conditions: Sequence[Condition]) -> pa.RecordBatch:
    """The rows that pass all conditions; the very same object if all do."""
    mask: Any = None
    for condition in conditions:
        each = _mask(rows.column(condition.name), condition)
        mask = each if mask is None else pc.and_(mask, each)
    return rows if mask is None or mask.true_count == len(mask) else rows.filter(mask)


def _mask(column: pa.Array, condition: Condition) -> Any:
    numbers = column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column.cast(pa.int64())
    if condition.operation == "in":
        return pc.is_in(numbers, value_set=pa.array(condition.values, pa.int64()))
    return getattr(pc, condition.operation)(numbers, pa.scalar(condition.values[0], pa.int64()))
