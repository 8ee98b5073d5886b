"""A topic as Spark sees it: names and types of columns, rows of the log converted to them, and the work of a task.

A task reads a span of a lane (`SpanReader`): rows of the table below the tier frontier, rows of brokers above it, and
passes them to Spark as Arrow. `table_part` alone decides between table and brokers. Rows of the table are rows of the
log, so nothing is decoded twice. Entries without records, and rows outside of the span, are cut out.

Filters that Spark pushes down are exact if they compare numbers or times of columns that are never null. They narrow
the span where the log can find the position, and rows outside are dropped before they go to Java.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from embarcadero.client.api.sync_log import Log
from embarcadero.client.arguments import time_us
from embarcadero.client.results import Batch
from embarcadero.errors import BadSchema, BadValue, Corrupt, EmbarcaderoError, RecordsLost, Trimmed
from embarcadero.limits import SPARK_ROWS_BYTES
from embarcadero.spark.processes import shared_log
from embarcadero.spark.read.options import GO_ON, ReadOptions, TaskSpan
from embarcadero.spark.versions import from_arrow, to_arrow
from embarcadero.tier.columns import SYSTEM, payload_schema, rows
from embarcadero.types import EntryKind, Gap, GapKind, Span, Tier
from embarcadero.wire.schemas import TopicSchemas

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from embarcadero.tier.table_reads import TopicTable


# --- columns and filters ----------------------------------------------------------------------------------------------
_TOPIC: Final = "topic"
_RAW_SYSTEM: Final = {
    "topic": _TOPIC, "partition": "_partition", "lane": "_lane", "seq": "_seq", "index": "_index", "key": "key",
    "value": "value", "headers": "headers", "timestamp": "timestamp", "session": "_session",
    "session_seq": "_session_seq", "broker": "_broker",
}  # fmt: skip
RAW_USUAL: Final = ("topic", "partition", "seq", "key", "value", "headers", "timestamp")
"""Columns of a raw topic that are read by default: each one costs time on its way to Java."""
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
"""Columns of the log that filters can use; `timestamp` only in raw topics."""
_NUMBER_MAX: Final = (1 << 63) - 1


def column_names(schemas: TopicSchemas) -> dict[str, str]:
    """Map a topic's column names in Spark, in their order, to their names in rows of the log."""
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
    """Return all columns of a topic with the types of tables."""
    known = {field.name: field.type for field in (*SYSTEM, *payload_schema(schemas))} | {_TOPIC: pa.string()}
    return pa.schema([pa.field(name, frame_type(known[inner])) for name, inner in column_names(schemas).items()])


def frame_type(kind: pa.DataType) -> pa.DataType:
    """Convert a table's type to a frame's: times of day are microseconds, as Spark has TIME only if a flag is set."""
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
    """Return the columns of `load()`: `columns`, if given. BadValue names a column that does not exist."""
    from pyspark.sql.types import StructField, StructType

    whole = arrow_schema(schemas)
    if missing := [name for name in columns or () if name not in whole.names]:
        raise BadValue(f"option 'columns': there is no column {missing[0]!r}", f"columns are {', '.join(whole.names)}")
    usual = whole.names if schemas.typed else RAW_USUAL
    chosen = pa.schema([whole.field(name) for name in (usual if columns is None else columns)])
    return StructType([StructField(field.name, from_arrow(field.type)) for field in chosen])


def check_schema(wanted: StructType, schemas: TopicSchemas, topic: str) -> None:
    """Raise BadSchema, with the column and both types, if the topic can't give a frame of this schema."""
    there = spark_schema(schemas, list(column_names(schemas)))
    for field in wanted:
        if field.name not in there.names:
            raise BadSchema(
                f"topic {topic!r} has no column {field.name!r}",
                f"it has {', '.join(there.names)}; if the topic was created again, load it again",
            )
        known = there[field.name].dataType
        if field.dataType.simpleString() != known.simpleString():
            raise BadSchema(
                f"column {field.name!r} is {known.simpleString()} in topic {topic!r}, not "
                f"{field.dataType.simpleString()}",
                "read it with that type and cast it in Spark; if the topic was created again, load it again",
            )


class Shaper:
    """Makes Spark's rows of batches: exactly the columns and Arrow types of a frame.

    `wanted` are the columns that it needs from rows of the log, with their types.
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
        """Convert rows of the log, as `tier.columns.rows` makes them and the tier keeps them, to rows of the frame."""
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
        """Convert the records of batches with start_seq <= seq < stop_seq, a few MiB at a time."""
        for group in grouped(batches):
            found = rows(lane, group, self._schemas, list(self.wanted), start_seq, stop_seq)
            if found.num_rows:
                yield self.shaped(found)


def grouped(batches: Iterable[Batch]) -> Iterator[list[Batch]]:
    """Group batches in lists of a few MiB: large enough for one transfer to Java, small enough to avoid a copy."""
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
    """Make a column with the same text in every row."""
    data = text.encode()
    ends = np.arange(0, (count + 1) * len(data), len(data), dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data * count)]
    return pa.Array.from_buffers(pa.string(), count, buffers)


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison that rows must pass: on the frame's column `name`, which is `inner` in rows of the log."""

    name: str
    inner: str
    operation: str
    values: tuple[int, ...]  # times in microseconds since 1970


@dataclass(frozen=True, slots=True)
class Bounds:
    """Numbers that a column can have: low <= number < stop; if `only` is given, only these."""

    low: int = 0
    stop: int = _NUMBER_MAX
    only: frozenset[int] | None = None

    def narrowed(self, condition: Condition) -> Bounds:
        """Return the bounds with one more condition."""
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
    """Split filters into conditions that this source applies and filters that Spark applies."""
    conditions: list[Condition] = []
    remaining: list[Any] = []
    for each in filters:
        found = _condition(each, inner_names, typed)
        if found is None:
            remaining.append(each)
        elif found.operation:
            conditions.append(found)
    return conditions, remaining


def _condition(each: Any, inner_names: dict[str, str], typed: bool) -> Condition | None:
    """Convert one filter; the condition has no operation if the filter is always true."""
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
    """Return the bounds that all conditions together put on a column."""
    found = Bounds()
    for condition in conditions:
        if condition.inner == inner:
            found = found.narrowed(condition)
    return found


def passing(rows: pa.RecordBatch, conditions: Sequence[Condition]) -> pa.RecordBatch:
    """Return the rows that pass all conditions; the same object if all do."""
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


# --- tasks ------------------------------------------------------------------------------------------------------------
_LOG: Final = logging.getLogger("embarcadero.spark")
_ALWAYS: Final = ("_index", "_seq", "_kind", "_damage")
_RUNS_MAX: Final = 16
"""The most runs of rows of a row group that are passed on without a copy; more runs are copied together."""

Mask = npt.NDArray[np.bool_]


_WORKER: Final = "pyspark.worker"
"""The module that the daemon imports in each worker, and that no other process imports."""


@cache
def _freeze() -> None:
    """Exclude imported objects from garbage collection: Spark's workers collect after each task, for up to 30 ms.

    Other processes collect when they end, and libraries would report the frozen objects as leaks.
    """
    if _WORKER in sys.modules:
        gc.freeze()


@dataclass(frozen=True, slots=True)
class SpanReader:
    """Reads spans of topics in workers. It is sent to them, so it holds plain data only."""

    options: ReadOptions
    schemas: TopicSchemas
    schema: StructType
    fail_on_lost: bool  # whether records that a crash took are data loss: only if the stream reads before durability
    conditions: tuple[Condition, ...] = ()
    partitions: tuple[int, ...] | None = None
    table_properties: tuple[str, ...] = ()  # for access to the files of a topic's table

    def read(self, span: TaskSpan) -> Iterator[pa.RecordBatch]:
        """Read the records of a span as rows of the frame. Raises Trimmed or RecordsLost if some are missing."""
        shaper = Shaper(span.topic, self.schemas, self.schema)
        for found in self._rows(span, shaper):
            _freeze()  # when the first rows are here, everything is imported
            passed = passing(found, self.conditions)
            if passed.num_rows:
                yield passed

    def _rows(self, span: TaskSpan, shaper: Shaper) -> Iterator[pa.RecordBatch]:
        """Read rows of the table below its frontier, and of brokers above it. The frontier is looked up once.

        Brokers also serve the rows of a table whose files this machine can't read.
        """
        log, at, stop = shared_log(self.options.brokers, self.table_properties), span.start.index, span.stop.stop
        tier = log.describe(span.topic).tier
        table, frontier = table_part(tier, span.topic, span.lane, at, stop, self.table_properties)
        if table is not None:
            at = frontier
            gone, durable = partial(self._gone, span), self.options.read == "durable"
            found = table_rows(table, span, frontier, shaper.wanted, self.partitions, gone, durable)
            yield from map(shaper.shaped, found)
        if at < stop:
            yield from self._scanned(log, span, at, shaper)

    def _scanned(self, log: Log, span: TaskSpan, start: int, shaper: Shaper) -> Iterator[pa.RecordBatch]:
        found = log.scan(
            span.topic,
            lane=span.lane,
            start=start,
            stop=span.stop.stop,
            read=self.options.read,
            partitions=self.partitions,
        )
        for batches in found:
            for batch in batches:
                if batch.gap is not None:
                    self._gone(span, batch.gap)
            yield from shaper.of_batches(span.lane, batches, span.start.seq, span.stop.seq)

    def _gone(self, span: TaskSpan, gap: Gap) -> None:
        """Handle a gap. Sequences that a session skipped are no loss: the topic's rule allows it; no position is empty.

        Positions that a restart skipped are no loss either, if nothing there was durable.
        """
        problem = None if gap.kind in (GapKind.SKIPPED, GapKind.NEVER_DURABLE) else self._problem(span, gap)
        if problem is not None:
            self.lost(problem, fail=self.fail_on_lost or gap.kind is GapKind.TRIMMED)

    def lost(self, problem: EmbarcaderoError, *, fail: bool) -> None:
        """Raise an error about missing records, or log it if the user wants to continue without them."""
        if fail and self.options.fail_on_data_loss:
            raise problem
        _LOG.warning("%s", problem.message)

    def _problem(self, span: TaskSpan, gap: Gap) -> EmbarcaderoError | None:
        where = f"batches [{gap.start}, {gap.stop}) of lane {span.lane} of topic {span.topic!r}"
        if gap.kind is GapKind.TRIMMED:
            return Trimmed(f"{where} were trimmed before they were read", GO_ON)
        if gap.kind is GapKind.LOST:
            return RecordsLost(f"{where} were lost with the memory of the cluster", GO_ON)
        if gap.start < span.stop.index:
            return RecordsLost(f"lane {span.lane} of topic {span.topic!r} ends at index {gap.start}", GO_ON)
        return None


class TablePart(NamedTuple):
    """The part of a span that is read from its table: the entries below `frontier`.

    Without a `table` its files can't be read here, and brokers read them for this process.
    """

    table: TopicTable | None
    frontier: int


def table_part(tier: Tier | None, topic: str, lane: int, start: int, stop: int, properties: Sequence[str]) -> TablePart:
    """Decide where batches [start, stop) of a lane are read: below the tier's frontier from the table, else by brokers.

    Brokers find records in memory or on a disk, and report gaps. A frontier at `start`: the table has no part of it.
    """
    frontier = 0 if tier is None else min(tier.frontier(lane)[0], stop)
    if tier is None or start >= frontier:
        return TablePart(None, start)
    visible = table_visible(tier.id, tier.metadata, topic)
    return TablePart(open_table(tier, properties) if visible else None, frontier)


def open_table(tier: Tier, properties: Sequence[str]) -> TopicTable:
    """Open a topic's table at the snapshot in the store; `properties` are the configured `tier.properties`."""
    from embarcadero.config.secrets import parse_properties
    from embarcadero.tier.table_reads import TopicTable  # needs PyIceberg, which only tiered topics require

    return TopicTable(tier, parse_properties(properties))


@lru_cache(maxsize=64)
def table_visible(tier_id: str, metadata: str, topic: str) -> bool:
    """Whether this process can read the files of a table. For a folder of another machine brokers read them."""
    scheme, _, rest = metadata.partition("://")
    if (scheme != "file" and not metadata.startswith("/")) or Path(unquote(rest) or metadata).exists():
        return True
    _LOG.warning(
        "the table of topic %r (%s) is in a folder that this machine can't read (%s): brokers read it for this job; "
        "a warehouse in an object store or a shared folder is faster",
        topic,
        tier_id,
        metadata,
    )
    return False


def table_rows(
    table: TopicTable,
    span: TaskSpan,
    stop: int,
    columns: dict[str, pa.DataType],
    partitions: Sequence[int] | None,
    gone: Callable[[Gap], None],
    durable: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Read records of a span below index `stop`, with the wanted columns; report holes with `gone`.

    `durable`: only durable records are read, so a hole in which nothing ever was durable is NEVER_DURABLE.

    A column that is newer than the table is null. Corrupt, if a batch was damaged when it was tiered.
    """
    there = table.schema.names
    names = list(dict.fromkeys([*(name for name in columns if name in there), *_ALWAYS, "_partition"]))
    at, low = span.start.index, table.tier.start(span.lane)[0]
    if at < min(low, stop):
        gone(Gap(GapKind.TRIMMED, at, min(low, stop)))
        at = min(low, stop)
    for group in table.rows(span.lane, at, stop, names) if at < stop else ():
        indices = group.column("_index").to_numpy()
        for start, end in _holes(indices, at):
            gone(table.tier.gap(span.lane, start, end, durable))
        at = int(indices[-1]) + 1
        for run in _runs(group, _wanted(group, span, partitions)):
            _check_damage(run)
            yield from _portions(_with_columns(run, columns))
    if at < stop:
        gone(table.tier.gap(span.lane, at, stop, durable))


def _holes(indices: npt.NDArray[np.int64], at: int) -> list[Span]:
    """Find holes: a table has every entry of the log, so a missing index was lost."""
    before = np.concatenate(([at - 1], indices[:-1]))
    return [Span(int(before[row]) + 1, int(indices[row])) for row in np.flatnonzero(indices > before + 1).tolist()]


def _wanted(group: pa.RecordBatch, span: TaskSpan, partitions: Sequence[int] | None) -> Mask:
    entry_kinds, seqs = group.column("_kind").to_numpy(), group.column("_seq").to_numpy()
    wanted: Mask = (entry_kinds == EntryKind.BATCH) & (seqs >= span.start.seq) & (seqs < span.stop.seq)
    if partitions is not None:
        wanted &= np.isin(group.column("_partition").to_numpy(), partitions)
    return wanted


def _runs(group: pa.RecordBatch, wanted: Mask) -> Iterator[pa.RecordBatch]:
    """Select the wanted rows, without a copy if they are in a few runs."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8))).tolist()
    if len(edges) > 2 * _RUNS_MAX:
        yield group.filter(pa.array(wanted))
        return
    for number, (first, last) in enumerate(pairwise(edges)):
        if number % 2 == 0:
            yield group.slice(first, last - first)


def _portions(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut rows of a row group to the size of batches of the log: a whole group takes long on its way to Java."""
    portions = max(1, -(-rows.nbytes // SPARK_ROWS_BYTES))
    step = max(1, -(-rows.num_rows // portions))
    for start in range(0, rows.num_rows, step):
        yield rows.slice(start, step)


def _check_damage(rows: pa.RecordBatch) -> None:
    damage: Any = rows.column("_damage")
    if damage.null_count < len(damage):
        row = next(number for number, each in enumerate(damage) if each.is_valid)
        raise Corrupt(
            f"the batch at index {rows.column('_index')[row]} is damaged: {damage[row]}",
            "it was damaged before it was tiered; skip it, or leave out the topic's own columns",
        )


def _with_columns(rows: pa.RecordBatch, columns: dict[str, pa.DataType]) -> pa.RecordBatch:
    arrays = [
        rows.column(name) if name in rows.schema.names else pa.nulls(rows.num_rows, kind)
        for name, kind in columns.items()
    ]
    if not arrays:
        return rows
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))
